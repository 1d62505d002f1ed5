// A row of logits, as what draws from it and what tells its log-probabilities read it.

#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "tiles.h"

namespace odriver {

constexpr int64_t kBlock = 128;  // tokens; first a block is drawn, and then a token of it
constexpr float kWeightless = -87.0f;  // up to this relative logit a token's weight is 0
constexpr int32_t kNoToken = -1;  // of a row with NaN or infinity

// A row's logits, relative to the best one: 0 for that token, below 0 for others.
struct Row {
  const float* logits;
  int64_t size;
  float best, temperature;
  std::vector<float>& maxima;  // of each block

  int64_t blocks() const { return (size + kBlock - 1) / kBlock; }

  // Behind the last token minus infinity.
  void below(int64_t block, float* to) const {
    const int64_t begin = block * kBlock, count = std::min(kBlock, size - begin);
    std::copy(logits + begin, logits + begin + count, to);
    std::fill(to + count, to + kBlock, -INFINITY);
    for (int64_t at = 0; at < kBlock; at += kWidth) store(to + at, (load(to + at) - best) / temperature);
  }

  // Tokens below `lowest` have none. Returns their sum.
  float weights(int64_t block, float lowest, float* to) const {
    below(block, to);
    Vector sums{};
    for (int64_t at = 0; at < kBlock; at += kWidth) {
      const Vector x = load(to + at);
      const Integers kept = (x > kWeightless) & (x >= lowest);
      const Vector weights = kept ? exponential(x) : Vector{};
      store(to + at, weights);
      sums += weights;
    }
    return sum(sums);
  }

  // A logit that no fewer than `count` blocks have, or pass, and so as many tokens.
  float held_by(int64_t count) const {
    if (count > blocks()) return -INFINITY;
    std::vector<float> ordered(maxima);
    std::nth_element(ordered.begin(), ordered.begin() + count - 1, ordered.end(), std::greater<float>());
    return ordered[count - 1];
  }
};

// The first of the best tokens, or kNoToken; the row's best logit and those of its blocks.
inline int32_t find_best(Row& row) {
  row.best = -INFINITY;
  row.maxima.resize(row.blocks());
  int64_t block = 0;
  float zeros = 0;  // NaN if some logit is not finite
  for (int64_t begin = 0; begin < row.size; begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, row.size);
    Vector highs = spread(-INFINITY), sums{};
    int64_t at = begin;
    for (; at + kWidth <= end; at += kWidth) {
      const Vector x = load(row.logits + at);
      highs = x > highs ? x : highs;
      sums += x * 0.0f;
    }
    float high = highest(highs);
    zeros += sum(sums);
    for (; at < end; ++at) high = std::max(high, row.logits[at]), zeros += row.logits[at] * 0.0f;
    row.maxima[begin / kBlock] = high;
    if (high > row.best) row.best = high, block = begin;
  }
  if (!(zeros == 0)) return kNoToken;
  return std::find(row.logits + block, row.logits + row.size, row.best) - row.logits;
}

}  // namespace odriver
