// x[rows, depth] @ kernel * scales[width] -> out[rows, width], for kernels in panels (panels.h).
//
// It is here that int8's are scaled (scales is empty for others), as XLA would make one operation of that and of what is
// added next for some numbers of rows and not for others. Scales of 4 bits are for groups of inputs, in panels as well.
//
// A grouped product has kernels of several experts, one after the other, and rows sorted by expert. An expert's kernel without
// rows is not read, and rows behind those of all experts become zero.

#include <algorithm>
#include <vector>

#include "handler.h"
#include "panels.h"
#include "team.h"

namespace odriver {

constexpr int64_t kBlockBytes = 1 << 20;  // of activations, which stay in a core's cache while panels go by
constexpr int kTasks = 8;  // of each thread: few, so that it reads on and on, and enough to share them evenly

// Consecutive rows of one expert, how many panels they are multiplied by at once, and the first step that does so.
struct Part {
  int64_t expert, begin, rows, panels, step;
};

// With few rows, enough sums to hide what each addition waits.
int64_t panels_at_once(int64_t rows) {
  if (rows * kMaxPanels * kPanelVectors <= kMaxSums) return kMaxPanels;
  return rows <= kWideRows ? 2 : 1;
}

// The rows of each expert, cut so that a part's activations stay in a core's cache while panels go by. The last part is the
// rows behind all, of which there are no steps.
std::vector<Part> parts_of(const int32_t* sizes, int64_t experts, int64_t rows, int64_t depth, int64_t panels) {
  std::vector<Part> parts;
  int64_t row = 0, step = 0;
  for (int64_t expert = 0; expert < experts; ++expert) {
    const int64_t first = row, size = std::clamp<int64_t>(sizes[expert], 0, rows - first);
    const int64_t blocks = (size * depth * int64_t(sizeof(float)) + kBlockBytes - 1) / kBlockBytes;
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t end = first + (block + 1) * size / blocks, at_once = panels_at_once(end - row);
      parts.push_back({expert, row, end - row, at_once, step});
      step += (panels + at_once - 1) / at_once;
      row = end;
    }
  }
  parts.push_back({experts, row, rows - row, 1, step});
  return parts;
}

const Part* part_of(const std::vector<Part>& parts, int64_t step) {
  return &*std::prev(std::partition_point(parts.begin(), parts.end(), [&](const Part& part) { return part.step <= step; }));
}

// A call: x and out, and the rows of each expert.
struct Rows {
  const float* x;
  float* out;
  int64_t rows, depth, width;
  const int32_t* sizes;
  int64_t experts;
};

void scale(const float* scales, float* out, int64_t rows, int64_t width, int64_t columns) {
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t column = 0; column < columns; ++column) out[row * width + column] *= scales[column];
}

// `scales` are those of whole columns, or null.
template <typename Stored, typename Scales>
void multiply(const Rows& all, const Kernels<Stored, Scales>& kernels, const float* scales) {
  const int64_t count = (all.width + kPanelWidth - 1) / kPanelWidth;
  const std::vector<Part> parts = parts_of(all.sizes, all.experts, all.rows, all.depth, count);
  const int64_t steps = parts.back().step, each = std::max<int64_t>(1, steps / (kTasks * team().size()));
  parallel_for((steps + each - 1) / each, [&](int64_t task) {
    const int64_t begin = task * each, end = std::min(steps, begin + each);
    const Part* part = part_of(parts, begin);
    for (int64_t step = begin; step < end; ++step) {
      if (step == part[1].step) ++part;
      const int64_t panel = (step - part->step) * part->panels, column = panel * kPanelWidth;
      const int64_t at_once = std::min(part->panels, count - panel), first = part->expert * count + panel;
      const int64_t next = panel + at_once < count ? first + at_once : part[1].expert * count;
      const int64_t columns = std::min(at_once * kPanelWidth, all.width - column);
      float* out = all.out + part->begin * all.width + column;
      multiply_by(at_once, all.x + part->begin * all.depth, kernels, first, next, out, part->rows, all.width, columns);
      if (scales) scale(scales + part->expert * all.width + column, out, part->rows, all.width, columns);
    }
  });
  std::fill_n(all.out + parts.back().begin * all.width, parts.back().rows * all.width, 0.0f);
}

void multiply(const Rows& all, const Buffer& panels, const Buffer& scales) {
  const auto multiply_by = [&](auto* stored) {
    multiply(all, Kernels<std::decay_t<decltype(*stored)>, NoScales>{stored, all.depth, {}},
             scales.size() ? scales.floats() : nullptr);
  };
  if (panels.dtype() == XLA_FFI_DataType_F32)
    multiply_by(panels.floats());
  else if (panels.dtype() == XLA_FFI_DataType_BF16)
    multiply_by(static_cast<const uint16_t*>(panels.data()));
  else if (panels.dtype() == XLA_FFI_DataType_S8)
    multiply_by(static_cast<const int8_t*>(panels.data()));
  else
    multiply(all,
             Kernels<Nibbles, GroupScales>{static_cast<const Nibbles*>(panels.data()), all.depth,
                                           {scales.floats(), scales.dim(-2), all.depth}},
             nullptr);
}

// (x f32, panels f32, bf16, s8 or 4 bits in u8, scales f32) -> out f32
const char* linear(const Call& call) {
  const Buffer x = call.arg(0), out = call.result(0);
  const int64_t depth = x.dim(-1), width = out.dim(-1);
  const int32_t rows = out.size() / width;
  multiply({x.floats(), out.floats(), rows, depth, width, &rows, 1}, call.arg(1), call.arg(2));
  return nullptr;
}

// (x f32, panels and scales of each expert as above, rows s32 of each expert) -> out f32
const char* grouped_linear(const Call& call) {
  const Buffer x = call.arg(0), sizes = call.arg(3), out = call.result(0);
  multiply({x.floats(), out.floats(), out.dim(0), x.dim(-1), out.dim(-1), sizes.ints(), sizes.size()}, call.arg(1),
           call.arg(2));
  return nullptr;
}

}  // namespace odriver

ODRIVER_HANDLER(odriver_linear, odriver::linear)
ODRIVER_HANDLER(odriver_grouped_linear, odriver::grouped_linear)

extern "C" int odriver_panel_width() { return odriver::kPanelWidth; }
