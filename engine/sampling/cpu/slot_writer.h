// A sequence's state written into the arrays of all slots, as one call: XLA compiles a loop for each array.

#pragma once

#include <cstring>

#include "handler.h"

namespace odriver {

// (arrays [slots, ...] of four-byte elements, slot s32[], as many arrays [...] of a sequence) -> the same arrays
inline const char* write_slot(const Call& call) {
  const int count = static_cast<int>(call.attr<int64_t>("arrays"));
  const int64_t slot = call.arg(count).ints()[0];
  for (int array = 0; array < count; ++array) {
    const Buffer to = call.result(array), row = call.arg(count + 1 + array);
    if (to.data() != call.arg(array).data()) return "XLA has copied the state of slots";
    std::memcpy(to.floats() + slot * row.size(), row.data(), row.size() * sizeof(float));
  }
  return nullptr;
}

}  // namespace odriver
