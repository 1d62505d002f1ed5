// one_call LIBRARY HANDLER < call > results: calls a kernel as XLA does, for processors that JAX has not been installed for.
//
// A call is, in integers of 8 bytes: the number of arrays, and of each its XLA_FFI_DataType, its bytes, rank and dimensions and,
// of an argument, its content; of a result the argument that it shares memory with, or -1. Arguments come first. Then it has the
// number of attributes, and of each a name in 16 bytes and a value in 8.

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "xla/ffi/api/c_api.h"

static void read(void* to, size_t bytes) {
  if (bytes && fread(to, bytes, 1, stdin) != 1) exit(2);
}

static int64_t integer() {
  int64_t value;
  read(&value, sizeof value);
  return value;
}

struct Array {
  std::vector<int64_t> dims;
  std::vector<char> content;
  XLA_FFI_Buffer buffer;
};

static std::vector<void*> arrays(std::vector<void*>* arguments) {
  std::vector<void*> buffers(integer());
  for (void*& each : buffers) {
    Array& array = *new Array;
    const auto dtype = static_cast<XLA_FFI_DataType>(integer());
    array.content.resize(integer());
    array.dims.resize(integer());
    read(array.dims.data(), array.dims.size() * sizeof(int64_t));
    void* data = array.content.data();
    if (!arguments)
      read(data, array.content.size());
    else if (const int64_t shared = integer(); shared >= 0)
      data = static_cast<XLA_FFI_Buffer*>((*arguments)[shared])->data;
    array.buffer = {XLA_FFI_Buffer_STRUCT_SIZE, nullptr, dtype, data, static_cast<int64_t>(array.dims.size()), array.dims.data()};
    each = &array.buffer;
  }
  return buffers;
}

int main(int, char** words) {
  void* library = dlopen(words[1], RTLD_NOW);
  const auto handler = library ? reinterpret_cast<XLA_FFI_Handler*>(dlsym(library, words[2])) : nullptr;
  if (!handler) return fprintf(stderr, "%s\n", dlerror()), 1;
  if (const auto use_cores = reinterpret_cast<void (*)(int)>(dlsym(library, "odriver_use_cores"))) use_cores(2);

  std::vector<void*> arguments = arrays(nullptr), results = arrays(&arguments);
  const size_t count = integer();
  std::vector<std::string> names(count);
  std::vector<int64_t> values(count);
  std::vector<XLA_FFI_ByteSpan> spans(count);
  std::vector<XLA_FFI_Scalar> scalars(count);
  std::vector<XLA_FFI_ByteSpan*> name_pointers(count);
  std::vector<void*> scalar_pointers(count);
  std::vector<XLA_FFI_AttrType> types(count, XLA_FFI_AttrType_SCALAR);
  for (size_t at = 0; at < count; ++at) {
    char name[17] = {};
    read(name, 16);
    names[at] = name, values[at] = integer();
    spans[at] = {names[at].data(), names[at].size()};
    scalars[at] = {XLA_FFI_DataType_S64, &values[at]};
    name_pointers[at] = &spans[at], scalar_pointers[at] = &scalars[at];
  }

  XLA_FFI_CallFrame frame{};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.stage = XLA_FFI_ExecutionStage_EXECUTE;
  frame.args.size = arguments.size(), frame.args.args = arguments.data();
  frame.rets.size = results.size(), frame.rets.rets = results.data();
  frame.attrs.size = count, frame.attrs.types = types.data();
  frame.attrs.names = name_pointers.data(), frame.attrs.attrs = scalar_pointers.data();
  if (handler(&frame)) return 3;

  for (void* each : results) {
    const auto& buffer = *static_cast<XLA_FFI_Buffer*>(each);
    const auto& array = *reinterpret_cast<Array*>(static_cast<char*>(each) - offsetof(Array, buffer));
    fwrite(buffer.data, array.content.size(), 1, stdout);
  }
  fflush(stdout);
  _Exit(0);  // the kernels' threads run on
}
