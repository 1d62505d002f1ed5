// Log-probabilities on a CPU: what engine/sampling/logprobs.py has of XLA's operations, as one call.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "handler.h"
#include "rows.h"
#include "team.h"

namespace odriver {

struct Likely {
  float logit;
  int32_t id;
};

// The `count` highest, the first of equals first.
inline std::vector<Likely> likeliest(const Row& row, int64_t count) {
  const float lowest = row.held_by(count);
  std::vector<Likely> some;
  for (int64_t block = 0; block < row.blocks(); ++block) {
    if (row.maxima[block] < lowest) continue;
    const int64_t begin = block * kBlock, end = std::min(begin + kBlock, row.size);
    for (int64_t at = begin; at < end; ++at)
      if (row.logits[at] >= lowest) some.push_back({row.logits[at], int32_t(at)});
  }
  std::partial_sort(some.begin(), some.begin() + count, some.end(), [](const Likely& one, const Likely& other) {
    return one.logit > other.logit || (one.logit == other.logit && one.id < other.id);
  });
  return some;
}

// The bits of a token's log-probability, its rank, then ids and the bits of the likeliest. All are NaN, or 0, where some logit
// is not finite, and where a row has no token: it doesn't sample, or stands behind a draft that was wrong.
inline void write_logprobs(Row& row, int64_t token, int64_t count, int32_t* to) {
  constexpr int32_t nan = 0x7fc00000;
  std::fill(to, to + 2 + 2 * count, 0);
  to[0] = nan;
  std::fill_n(to + 2 + count, count, nan);
  if (token < 0 || find_best(row) == kNoToken) return;
  double total = 0;
  float weights[kBlock];
  for (int64_t block = 0; block < row.blocks(); ++block) total += row.weights(block, -INFINITY, weights);
  const double normalizer = row.best + std::log(total);
  const auto write = [&](int64_t at, float logit) {
    const float logprob = logit - normalizer;
    std::memcpy(to + at, &logprob, sizeof logprob);
  };
  const float chosen = row.logits[token];
  write(0, chosen);
  to[1] = 1 + std::count_if(row.logits, row.logits + row.size, [=](float x) { return x > chosen; });
  const std::vector<Likely> best = likeliest(row, count);
  for (int64_t at = 0; at < count; ++at) {
    to[2 + at] = best[at].id;
    write(2 + count + at, best[at].logit);
  }
}

// (logits f32[rows, vocab], tokens s32[rows]) -> s32[rows, 2 + 2 * n]
inline const char* logprobs(const Call& call) {
  const Buffer logits = call.arg(0), tokens = call.arg(1), out = call.result(0);
  const int64_t size = logits.dim(1), columns = out.dim(1);
  parallel_for(logits.dim(0), [&](int64_t at) {
    static thread_local std::vector<float> maxima;
    Row row{logits.floats() + at * size, size, 0, 1, maxima};
    const int64_t token = std::min<int64_t>(tokens.ints()[at], size - 1);
    write_logprobs(row, token, columns / 2 - 1, static_cast<int32_t*>(out.data()) + at * columns);
  });
  return nullptr;
}

}  // namespace odriver
