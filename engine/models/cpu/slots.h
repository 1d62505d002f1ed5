// A slot of adapters, as engine/models/adapters/slot_words.py writes it: a header, then numbers.

#pragma once

#include <cstdint>

namespace odriver {

constexpr int64_t kHeader = 16;           // words: the bytes of a number, 0 without an adapter, and the rank of each part ...
constexpr int64_t kContent = kHeader - 1;  // ... and last, how many words of numbers follow

}  // namespace odriver
