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
#include "whole.h"

namespace odriver {

constexpr int64_t kBlockBytes = 1 << 20;  // of activations, which stay in a core's cache while panels go by
constexpr int kTasks = 8;  // of each thread: few, so that it reads on and on, and enough to share them evenly

// Consecutive rows of one expert, how many panels they are multiplied by at once, and the first step that does so.
struct Part {
  int64_t expert, begin, rows, panels, step;
};

// With few rows, enough sums to hide what each addition waits.
int64_t panels_at_once(int64_t rows, int64_t sums) {
  int64_t panels = kMaxPanels;
  while (panels > 1 && rows * panels * kPanelVectors * sums > kMaxSums) panels /= 2;
  return panels;
}

// A call: x and out, and the rows of each expert.
struct Rows {
  const float* x;
  float* out;
  int64_t rows, depth, width;
  const int32_t* sizes;
  int64_t experts;
};

// The rows of each expert, cut so that a part's activations stay in a core's cache while panels go by. The last part is the
// rows behind all, of which there are no steps.
std::vector<Part> parts_of(const Rows& all, int64_t panels, int64_t sums) {
  std::vector<Part> parts;
  int64_t row = 0, step = 0;
  for (int64_t expert = 0; expert < all.experts; ++expert) {
    const int64_t first = row, size = std::clamp<int64_t>(all.sizes[expert], 0, all.rows - first);
    const int64_t blocks = (size * all.depth * int64_t(sizeof(float)) + kBlockBytes - 1) / kBlockBytes;
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t end = first + (block + 1) * size / blocks, at_once = panels_at_once(end - row, sums);
      parts.push_back({expert, row, end - row, at_once, step});
      step += (panels + at_once - 1) / at_once;
      row = end;
    }
  }
  parts.push_back({all.experts, row, all.rows - row, 1, step});
  return parts;
}

const Part* part_of(const std::vector<Part>& parts, int64_t step) {
  return &*std::prev(std::partition_point(parts.begin(), parts.end(), [&](const Part& part) { return part.step <= step; }));
}

void scale(const float* scales, float* out, int64_t rows, int64_t width, int64_t columns) {
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t column = 0; column < columns; ++column) out[row * width + column] *= scales[column];
}

// x of all rows by their kernels. `scales` are those of whole columns, or null.
template <typename Activations, typename Stored, typename Scales>
void multiply(const Rows& all, const Activations& x, const Kernels<Stored, Scales>& kernels, const float* scales) {
  const int64_t count = (all.width + kPanelWidth - 1) / kPanelWidth;
  const std::vector<Part> parts = parts_of(all, count, Activations::kSums);
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
      multiply_by(at_once, x.from(part->begin), kernels, first, next, out, part->rows, all.width, columns);
      if (scales) scale(scales + part->expert * all.width + column, out, part->rows, all.width, columns);
    }
  });
  std::fill_n(all.out + parts.back().begin * all.width, parts.back().rows * all.width, 0.0f);
}

template <typename Stored>
void multiply_floats(const Rows& all, const Stored* panels, const float* scales) {
  multiply(all, Floats{all.x, all.depth}, Kernels<Stored, NoScales>{panels, all.depth, {}}, scales);
}

#if defined(ODRIVER_INTEGERS)

// A group of several is a multiple of kWidth inputs.
template <typename Stored, typename Scales>
void multiply_digits(const Rows& all, const Kernels<Stored, Scales>& kernels, int64_t group, const float* scales) {
  const DigitsOfRows digits(all.x, all.rows, all.depth, std::max(group, kWidth / kQuad));
  multiply(all, digits.all(), kernels, scales);
}

constexpr int64_t kTogether4 = kQuad;

void multiply_4_bits(const Rows& all, const void* panels, const float* scales, int64_t groups) {
  const int64_t quads = (all.depth + kQuad - 1) / kQuad;
  const Kernels<Quad4, GroupScales> kernels{static_cast<const Quad4*>(panels), quads, {scales, groups, quads}};
  multiply_digits(all, kernels, std::min(kernels.scales.group(), kMostQuads4), nullptr);
}

#else

constexpr int64_t kTogether4 = 1;

void multiply_4_bits(const Rows& all, const void* panels, const float* scales, int64_t groups) {
  const GroupScales of_groups(scales, groups, all.depth);
  const Kernels<Nibbles, GroupScales> kernels{static_cast<const Nibbles*>(panels), all.depth, of_groups};
  multiply(all, Floats{all.x, all.depth}, kernels, nullptr);
}

#endif

#if defined(__AVX512VNNI__)

constexpr int64_t kTogether8 = kQuad;

void multiply_8_bits(const Rows& all, const void* panels, const float* scales) {
  const Kernels<Quad8, NoScales> kernels{static_cast<const Quad8*>(panels), (all.depth + kQuad - 1) / kQuad, {}};
  multiply_digits(all, kernels, kMostQuads8, scales);
}

#else

constexpr int64_t kTogether8 = 1;

// With AVX2 as floats: a product of integers takes it more instructions, but for one row, which waits for memory either way.
void multiply_8_bits(const Rows& all, const void* panels, const float* scales) {
  multiply_floats(all, static_cast<const int8_t*>(panels), scales);
}

#endif

void multiply(const Rows& all, const Buffer& panels, const Buffer& scales) {
  if (panels.dtype() == XLA_FFI_DataType_F32)
    multiply_floats(all, panels.floats(), nullptr);
  else if (panels.dtype() == XLA_FFI_DataType_BF16)
    multiply_floats(all, static_cast<const uint16_t*>(panels.data()), nullptr);
  else if (panels.dtype() == XLA_FFI_DataType_S8)
    multiply_8_bits(all, panels.data(), scales.floats());
  else
    multiply_4_bits(all, panels.data(), scales.floats(), scales.dim(-2));
}

// The rows up to the last one that is not all zeros. Padding is (engine/models/decoder.py), and so are its products.
int32_t rows_up_to_padding(const float* x, int64_t rows, int64_t depth) {
  const auto is_zero = [](float number) { return number == 0; };
  while (rows > 0 && std::all_of(x + (rows - 1) * depth, x + rows * depth, is_zero)) --rows;
  return rows;
}

// (x f32, panels f32, bf16, s8 or 4 bits in u8, scales f32) -> out f32
const char* linear(const Call& call) {
  const Buffer x = call.arg(0), out = call.result(0);
  const int64_t depth = x.dim(-1), width = out.dim(-1), rows = out.size() / width;
  const int32_t used = rows_up_to_padding(x.floats(), rows, depth);
  multiply({x.floats(), out.floats(), rows, depth, width, &used, 1}, call.arg(1), call.arg(2));
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
// Inputs of weights of 8 or 4 bits that lie side by side.
extern "C" int odriver_inputs_together(int bits) { return bits == 8 ? odriver::kTogether8 : odriver::kTogether4; }
