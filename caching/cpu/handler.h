// The part of XLA's foreign function interface that our kernels need, over its C header. XLA's own C++ header says more
// about a handler's types, but takes most of a kernel's time to compile.

#pragma once

#include <cstdint>
#include <cstring>

#include "xla/ffi/api/c_api.h"

namespace odriver {

// An array of a call.
class Buffer {
 public:
  explicit Buffer(const void* buffer) : buffer_(static_cast<const XLA_FFI_Buffer*>(buffer)) {}

  XLA_FFI_DataType dtype() const { return buffer_->dtype; }
  void* data() const { return buffer_->data; }
  float* floats() const { return static_cast<float*>(buffer_->data); }
  const int32_t* ints() const { return static_cast<const int32_t*>(buffer_->data); }
  int64_t rank() const { return buffer_->rank; }
  // The size of an axis; counted from the end where it is negative.
  int64_t dim(int64_t axis) const { return buffer_->dims[axis < 0 ? buffer_->rank + axis : axis]; }
  int64_t size() const {
    int64_t product = 1;
    for (int64_t axis = 0; axis < buffer_->rank; ++axis) product *= buffer_->dims[axis];
    return product;
  }

 private:
  const XLA_FFI_Buffer* buffer_;
};

// The arguments, results and attributes of a call, as Python's ffi_call gives them.
class Call {
 public:
  explicit Call(const XLA_FFI_CallFrame* frame) : frame_(frame) {}

  Buffer arg(int index) const { return Buffer(frame_->args.args[index]); }
  Buffer result(int index) const { return Buffer(frame_->rets.rets[index]); }
  template <typename Value>
  Value attr(const char* name) const {
    const XLA_FFI_Attrs& attrs = frame_->attrs;
    int64_t at = 0;
    while (std::strlen(name) != attrs.names[at]->len || std::memcmp(name, attrs.names[at]->ptr, attrs.names[at]->len)) ++at;
    return *static_cast<const Value*>(static_cast<const XLA_FFI_Scalar*>(attrs.attrs[at])->value);
  }

 private:
  const XLA_FFI_CallFrame* frame_;
};

// Runs a kernel, which returns what went wrong, or null. XLA asks for the version of the interface by the same function.
template <typename Kernel>
XLA_FFI_Error* handle(const XLA_FFI_CallFrame* frame, const Kernel& kernel) {
  auto* extension = frame->extension_start;  // of a type whose name differs by jaxlib
  if (extension && extension->type == XLA_FFI_Extension_Metadata) {
    XLA_FFI_Metadata* metadata = reinterpret_cast<XLA_FFI_Metadata_Extension*>(extension)->metadata;
    metadata->api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR};
    metadata->traits = 0;
    metadata->state_type_id = XLA_FFI_UNKNOWN_TYPE_ID;
    return nullptr;
  }
  const char* failure = kernel(Call(frame));
  if (!failure) return nullptr;
  XLA_FFI_Error_Create_Args error{XLA_FFI_Error_Create_Args_STRUCT_SIZE, nullptr, failure, XLA_FFI_Error_Code_INTERNAL};
  return frame->api->XLA_FFI_Error_Create(&error);
}

}  // namespace odriver

// Exports a kernel as a handler of this name.
#define ODRIVER_HANDLER(name, kernel) \
  extern "C" XLA_FFI_Error* name(XLA_FFI_CallFrame* frame) { return odriver::handle(frame, kernel); }
