// x[rows, depth] @ kernel -> out[rows, width], for kernels packed as panels[count, depth, kPanelWidth]: the columns
// kPanelWidth at a time, each panel contiguous, so that a step reads the weights once and in order.

#include "team.h"
#include "tiles.h"
#include "xla/ffi/api/ffi.h"

namespace odriver {
namespace ffi = xla::ffi;

constexpr int kVectors = 2;
constexpr int64_t kPanelWidth = kVectors * kWidth;
constexpr int64_t kAheadBytes = 2048;  // of 1 to 8 KiB the best where weights come from memory
constexpr int64_t kRowsAtOnce = 512;  // activations that stay in a core's cache while panels go by
constexpr int64_t kMaxTasks = 256;

template <typename Stored>
void multiply(const float* x, const Stored* panels, float* out, int64_t rows, int64_t depth,
              int64_t width) {
  const int64_t count = (width + kPanelWidth - 1) / kPanelWidth;
  const int64_t tasks = std::min(count, kMaxTasks);
  parallel_for(tasks, [&](int64_t task) {
    for (int64_t first = 0; first < rows; first += kRowsAtOnce) {
      const int64_t some = std::min(kRowsAtOnce, rows - first);
      for (int64_t panel = task * count / tasks; panel < (task + 1) * count / tasks; ++panel) {
        const float* from = x + first * depth;
        const Stored* begin = panels + panel * depth * kPanelWidth;
        const Stored* ahead = begin + kAheadBytes / sizeof(Stored);
        const Columns<kVectors, Stored> right{{begin, begin + kWidth}, {ahead, ahead + kWidth}, kPanelWidth};
        float* to = out + first * width + panel * kPanelWidth;
        if ((panel + 1) * kPanelWidth <= width) {
          product(some, from, depth, right, depth, to, width, false);
          continue;
        }
        for (int64_t row = 0; row < some; ++row) {  // the last panel hangs over the last column
          float whole[kPanelWidth];
          product(1, from + row * depth, depth, right, depth, whole, 0, false);
          std::copy(whole, whole + width - panel * kPanelWidth, to + row * width);
        }
      }
    }
  });
}

ffi::Error linear(ffi::Buffer<ffi::F32> x, ffi::AnyBuffer panels,
                  ffi::ResultBuffer<ffi::F32> out) {
  const int64_t depth = x.dimensions().back(), width = out->dimensions().back();
  const int64_t rows = x.element_count() / depth;
  if (panels.element_type() == ffi::F32)
    multiply(x.typed_data(), static_cast<const float*>(panels.untyped_data()), out->typed_data(), rows, depth, width);
  else
    multiply(x.typed_data(), static_cast<const uint16_t*>(panels.untyped_data()), out->typed_data(), rows, depth, width);
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(odriver_linear, linear,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::Buffer<ffi::F32>>());

}  // namespace odriver

extern "C" int odriver_panel_width() { return odriver::kPanelWidth; }
