// Masks of the allowed tokens on a CPU: what engine/sampling/token_masks.py has of XLA's operations, as one call.

#pragma once

#include <cfloat>

#include "step_rows.h"
#include "tiles.h"

namespace odriver {

constexpr float kMaskedOut = -FLT_MAX;
constexpr int64_t kWordBits = 32;

// (logits f32[rows, vocab], masks s32[rows, words]) -> logits
inline const char* mask(const Call& call) {
  const Buffer logits = call.arg(0), masks = call.arg(1), out = call.result(0);
  Integers places;  // of a vector's tokens
  for (int place = 0; place < kWidth; ++place) places[place] = place;
  by_piece(logits, [&](int64_t row, int64_t begin, int64_t size) {
    const float* from = logits.floats() + row * logits.dim(1) + begin;
    float* to = out.floats() + row * logits.dim(1) + begin;
    const int32_t* words = masks.ints() + row * masks.dim(1) + begin / kWordBits;
    int64_t at = 0;
    for (; at + kWidth <= size; at += kWidth) {
      const Integers bits = (words[at / kWordBits] >> (places + static_cast<int32_t>(at % kWordBits))) & 1;
      store(to + at, bits != 0 ? load(from + at) : spread(kMaskedOut));
    }
    for (; at < size; ++at) to[at] = words[at / kWordBits] >> at % kWordBits & 1 ? from[at] : kMaskedOut;
  });
  return nullptr;
}

}  // namespace odriver
