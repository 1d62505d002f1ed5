// What a decoder has between its products, each row by itself: norms, gates, additions (engine/models/cpu/rows.py).
//
// XLA's loops are for its own threads, which wait for cores while ours look for the next product. A row is computed the same
// whatever other rows there are.

#include <algorithm>
#include <cmath>

#include "handler.h"
#include "team.h"
#include "tiles.h"

namespace odriver {

constexpr int64_t kTaskNumbers = 1 << 14;  // of a task: what a thread does in the time that it takes to have another one help
constexpr int kSums = 4;                   // side by side, as an addition waits for the one before

// Calls compute(row) for each row of an array, whose last axis a row is.
template <typename Compute>
void for_each_row(const Buffer& array, const Compute& compute) {
  const int64_t width = std::max<int64_t>(array.dim(-1), 1), rows = array.size() / width;
  const int64_t each = std::max<int64_t>(1, kTaskNumbers / width);
  parallel_for((rows + each - 1) / each, [&](int64_t task) {
    for (int64_t row = task * each; row < std::min(rows, (task + 1) * each); ++row) compute(row);
  });
}

// Calls compute(numbers of each input) for `width` numbers, a vector at a time, and stores what it gives. Behind the last one
// are zeros.
template <typename Compute, typename... Input>
void map(int64_t width, float* out, const Compute& compute, const Input*... inputs) {
  int64_t i = 0;
  for (; i + kWidth <= width; i += kWidth) store(out + i, compute(load(inputs + i)...));
  if (i == width) return;
  const auto some = [&](const float* from) {
    float lanes[kWidth] = {};
    std::copy(from + i, from + width, lanes);
    return load(lanes);
  };
  float lanes[kWidth];
  store(lanes, compute(some(inputs)...));
  std::copy(lanes, lanes + width - i, out + i);
}

// The sum of term(vector) over a row.
template <typename Term>
float total(const float* x, int64_t width, const Term& term) {
  Vector sums[kSums] = {};
  int64_t i = 0;
  for (; i + kSums * kWidth <= width; i += kSums * kWidth)
    for (int s = 0; s < kSums; ++s) sums[s] += term(load(x + i + s * kWidth));
  float rest = 0;
  for (; i + kWidth <= width; i += kWidth) sums[0] += term(load(x + i));
  for (; i < width; ++i) rest += term(spread(x[i]))[0];
  return sum(sums[0] + sums[1] + (sums[2] + sums[3])) + rest;
}

// (x f32[..., width], scales f32[width]) -> out f32[..., width]
const char* norm(const Call& call) {
  const Buffer x = call.arg(0);
  const float *from = x.floats(), *scales = call.arg(1).floats();
  float* to = call.result(0).floats();
  const int64_t width = x.dim(-1);
  const float eps = call.attr<float>("eps");
  const bool centered = call.attr<int64_t>("centered");
  for_each_row(x, [&](int64_t row) {
    const float *own = from + row * width, count = static_cast<float>(width);
    const float mean = centered ? total(own, width, [](Vector x) { return x; }) / count : 0.0f;
    const float squares = total(own, width, [&](Vector x) { return (x - mean) * (x - mean); });
    const float factor = 1.0f / std::sqrt(squares / count + eps);
    map(width, to + row * width, [&](Vector x, Vector scale) { return (x - mean) * factor * scale; }, own, scales);
  });
  return nullptr;
}

// x times the logistic function of z.
inline Vector times_logistic(Vector x, Vector z) {
  const Vector least = spread(-87.0f);  // whose exponential is finite
  return x / (1.0f + exponential(-(z < least ? least : z)));
}

inline Vector silu(Vector x) { return times_logistic(x, x); }

// As (1 + tanh(z)) / 2 is the logistic function of 2 z, whose small values are exact.
inline Vector gelu_tanh(Vector x) { return times_logistic(x, 1.595769121605730f * (x + 0.044715f * (x * x * x))); }

// (x f32, y f32) -> x + scale * y
const char* added(const Call& call) {
  const float *x = call.arg(0).floats(), *y = call.arg(1).floats();
  const Buffer out = call.result(0);
  const int64_t width = out.dim(-1);
  const float scale = call.attr<float>("scale");
  for_each_row(out, [&](int64_t row) {
    const int64_t at = row * width;
    map(width, out.floats() + at, [&](Vector x, Vector y) { return x + y * scale; }, x + at, y + at);
  });
  return nullptr;
}

// (gate and up f32[..., 2, width]) -> activation(gate) * up f32[..., width]
template <typename Activation>
const char* gated(const Call& call, const Activation& activation) {
  const Buffer out = call.result(0);
  const float* from = call.arg(0).floats();
  const int64_t width = out.dim(-1);
  for_each_row(out, [&](int64_t row) {
    const float* gate = from + 2 * row * width;
    map(width, out.floats() + row * width, [&](Vector gate, Vector up) { return activation(gate) * up; }, gate, gate + width);
  });
  return nullptr;
}

const char* gated_silu(const Call& call) { return gated(call, silu); }
const char* gated_gelu_tanh(const Call& call) { return gated(call, gelu_tanh); }

}  // namespace odriver

ODRIVER_HANDLER(odriver_norm, odriver::norm)
ODRIVER_HANDLER(odriver_added, odriver::added)
ODRIVER_HANDLER(odriver_gated_silu, odriver::gated_silu)
ODRIVER_HANDLER(odriver_gated_gelu_tanh, odriver::gated_gelu_tanh)
