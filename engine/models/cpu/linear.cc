// x[rows, depth] @ kernel * scales[width] -> out[rows, width], for kernels packed as panels[count, depth, kPanelWidth]:
// the columns kPanelWidth at a time, each panel contiguous, so that a step reads the weights once and in order.
//
// It is here that int8's are scaled (scales is empty for others), as XLA would make one operation of that and of what is
// added next for some numbers of rows and not for others.

#include <vector>

#include "team.h"
#include "tiles.h"
#include "xla/ffi/api/ffi.h"

namespace odriver {
namespace ffi = xla::ffi;

constexpr int kVectors = 2;
constexpr int64_t kPanelWidth = kVectors * kWidth;
constexpr int64_t kAheadBytes = 2048;  // of 1 to 8 KiB the best where weights come from memory
constexpr int64_t kRowsOfNarrow = 24;  // up to so many rows bfloat16 and int8 are read as they are
constexpr int64_t kBlockBytes = 1 << 20;  // of activations, which stay in a core's cache while panels go by

template <int panels, typename Stored>
Columns<panels * kVectors, Stored> columns_of(const Stored* panel, int64_t depth) {
  Columns<panels * kVectors, Stored> columns{{}, {}, kPanelWidth};
  for (int v = 0; v < panels * kVectors; ++v) {
    columns.begin[v] = panel + (v / kVectors) * depth * kPanelWidth + (v % kVectors) * kWidth;
    columns.ahead[v] = columns.begin[v] + kAheadBytes / sizeof(Stored);
  }
  return columns;
}

// A panel as floats: over many rows cheaper than to widen it in every tile.
template <typename Stored>
const float* widened(const Stored* panel, int64_t elements) {
  static thread_local std::vector<float> wide;
  wide.resize(elements + kAheadBytes / sizeof(float));
  for (int64_t at = 0; at < elements; at += kWidth) store(&wide[at], load(panel + at));
  return wide.data();
}

// The columns of some panels; the last one may hang over the last column.
template <int panels, typename Stored>
void multiply(const float* x, const Stored* panel, float* out, int64_t rows, int64_t depth, int64_t width,
              int64_t columns) {
  if constexpr (sizeof(Stored) < sizeof(float))
    if (rows > kRowsOfNarrow)
      return multiply<panels>(x, widened(panel, panels * depth * kPanelWidth), out, rows, depth, width, columns);
  const auto right = columns_of<panels>(panel, depth);
  if (columns == panels * kPanelWidth) return product(rows, x, depth, right, depth, out, width, false);
  for (int64_t row = 0; row < rows; ++row) {
    float whole[panels * kPanelWidth];
    product(1, x + row * depth, depth, right, depth, whole, 0, false);
    std::copy(whole, whole + columns, out + row * width);
  }
}

void scale(const float* scales, float* out, int64_t rows, int64_t width, int64_t columns) {
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t column = 0; column < columns; ++column) out[row * width + column] *= scales[column];
}

template <typename Stored>
void multiply(const float* x, const Stored* panels, const float* scales, float* out, int64_t rows, int64_t depth,
              int64_t width) {
  const int64_t count = (width + kPanelWidth - 1) / kPanelWidth;
  const int64_t together = rows <= kWideRows ? 2 : 1;  // with few rows, enough sums to hide what each addition waits
  const int64_t blocks = (rows * depth * int64_t(sizeof(float)) + kBlockBytes - 1) / kBlockBytes;
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t begin = block * rows / blocks, some = (block + 1) * rows / blocks - begin;
    parallel_for((count + together - 1) / together, [&](int64_t task) {
      const int64_t panel = task * together, first = panel * kPanelWidth;
      const Stored* from = panels + panel * depth * kPanelWidth;
      float* to = out + begin * width + first;
      const int64_t columns = std::min(together * kPanelWidth, width - first);
      if (together == 2 && panel + 2 <= count)
        multiply<2>(x + begin * depth, from, to, some, depth, width, columns);
      else
        multiply<1>(x + begin * depth, from, to, some, depth, width, columns);
      if (scales) scale(scales + first, to, some, width, columns);
    });
  }
}

ffi::Error linear(ffi::Buffer<ffi::F32> x, ffi::AnyBuffer panels, ffi::Buffer<ffi::F32> scales,
                  ffi::ResultBuffer<ffi::F32> out) {
  const int64_t depth = x.dimensions().back(), width = out->dimensions().back();
  const int64_t rows = x.element_count() / depth;
  const void* from = panels.untyped_data();
  const float* by = scales.element_count() ? scales.typed_data() : nullptr;
  if (panels.element_type() == ffi::F32)
    multiply(x.typed_data(), static_cast<const float*>(from), by, out->typed_data(), rows, depth, width);
  else if (panels.element_type() == ffi::S8)
    multiply(x.typed_data(), static_cast<const int8_t*>(from), by, out->typed_data(), rows, depth, width);
  else
    multiply(x.typed_data(), static_cast<const uint16_t*>(from), by, out->typed_data(), rows, depth, width);
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(odriver_linear, linear,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());

}  // namespace odriver

extern "C" int odriver_panel_width() { return odriver::kPanelWidth; }
