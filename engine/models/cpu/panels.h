// Kernels [depth, width] as panels [count, depth, kPanelWidth]: the columns kPanelWidth at a time, each panel contiguous, so
// that a step reads the weights once and in order. In 4 bits a row of a panel is kPanelWidth / 2 bytes (tiles.h). Rows have four
// inputs where products are of integers (whole.h): "depth" is then in such rows.

#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "tiles.h"

namespace odriver {

constexpr int kPanelVectors = 2;
constexpr int64_t kPanelWidth = kPanelVectors * kWidth;
constexpr int kMaxPanels = 4;           // that are read side by side
constexpr int64_t kAheadBytes = 8192;   // of them together; of 2 to 32 KiB the best where weights come from memory
constexpr int64_t kLineBytes = 64;
constexpr int64_t kRowsOfNarrow = 24;   // up to so many rows weights narrower than float32 are read as they are

template <typename Stored>
constexpr int64_t kRowElements = std::is_same_v<Stored, Nibbles> ? kPanelWidth / 2 : kPanelWidth;

template <typename Stored>
inline void read_row(const Stored* from, Vector* row) {
  if constexpr (std::is_same_v<Stored, Nibbles>)
    load(from, row);
  else
    for (int v = 0; v < kPanelVectors; ++v) row[v] = load(from + v * kWidth);
}

// Weights without scales, or whose scales are for whole columns.
struct NoScales {
  static constexpr bool kGrouped = false;
  int64_t group() const { return 0; }
  NoScales from(int64_t) const { return {}; }
};

// Scales in panels [count, groups, kPanelWidth]: one for each output and group of 2^shift inputs.
struct GroupScales {
  static constexpr bool kGrouped = true;
  const float* begin;
  int64_t groups, shift = 0;

  // The least group of which so many hold all inputs; there is no other but where one group holds all.
  GroupScales(const float* begin, int64_t groups, int64_t depth) : begin(begin), groups(groups) {
    while ((depth - 1) >> shift >= groups) ++shift;
  }
  int64_t group() const { return int64_t(1) << shift; }
  const float* of(int64_t panel, int64_t k) const { return begin + (panel * groups + (k >> shift)) * kPanelWidth; }
  GroupScales from(int64_t panel) const {
    GroupScales rest = *this;
    rest.begin = of(panel, 0);
    return rest;
  }
};

// One or more kernels, one after the other.
template <typename Stored, typename Scales>
struct Kernels {
  const Stored* begin;
  int64_t depth;
  Scales scales;

  const Stored* panel(int64_t number) const { return begin + number * depth * kRowElements<Stored>; }
};

// The right side of a product: `panels` of them from `first` on. `next` is read after them; it is fetched meanwhile.
template <int panels, typename Stored, typename Scales>
struct Panels {
  using Numbers = Stored;
  static constexpr int kVectors = panels * kPanelVectors, kAtOnce = kPanelVectors;
  static constexpr bool kGrouped = Scales::kGrouped;
  static constexpr int64_t kRow = kRowElements<Stored>, kRowBytes = kRow * sizeof(Stored);
  static constexpr int64_t kAhead = kAheadBytes / panels / kRowBytes;  // rows
  const Stored* const begin;
  const int64_t depth, group;
  const Scales scales;
  const int64_t to_next;  // from one of the last `kAhead` rows, the elements to what is fetched with it

  Panels(const Kernels<Stored, Scales>& kernels, int64_t first, int64_t next)
      : begin(kernels.panel(first)),
        depth(kernels.depth),
        group(kernels.scales.group()),
        scales(kernels.scales.from(first)),
        to_next(kernels.panel(next) - begin + (kAhead - depth) * kRow) {}

  const Stored* row(int panel, int64_t k) const { return begin + (panel * depth + k) * kRow; }

  template <typename Columns>
  void read(int64_t k, int first, Columns* columns) const {
    read_row(row(first / kPanelVectors, k), columns);
  }

  // Of the group that begins at k.
  void read_scales(int64_t k, Vector* row) const {
    for (int panel = 0; panel < panels; ++panel)
      for (int v = 0; v < kPanelVectors; ++v) *row++ = load(scales.of(panel, k) + v * kWidth);
  }

  // Without the attribute gcc finds that it computes nothing, and leaves it out.
  __attribute__((always_inline)) void fetch(int64_t k) const {
    if (k * kRowBytes % kLineBytes) return;
    const Stored* from = begin + k * kRow + (k + kAhead < depth ? kAhead * kRow : to_next);
    for (int panel = 0; panel < panels; ++panel)
      for (int64_t byte = 0; byte < kRowBytes; byte += kLineBytes)
        __builtin_prefetch(reinterpret_cast<const char*>(from + panel * depth * kRow) + byte);
  }
};

// A panel as `read_row` gives it, as floats or integers, before scales: over many rows cheaper than to read it so in every tile.
template <typename Read, typename Columns, typename Stored, typename Scales>
Kernels<Read, Scales> read_once(const Kernels<Stored, Scales>& kernels, int64_t panel) {
  static thread_local std::vector<Read> columns;
  columns.resize(kernels.depth * kPanelWidth);
  const Panels<1, Stored, Scales> packed(kernels, panel, panel);
  for (int64_t k = 0; k < kernels.depth; ++k) {
    Columns row[kPanelVectors];
    static_assert(sizeof row == kPanelWidth * sizeof(Read));
    packed.read(k, 0, row);
    std::memcpy(&columns[k * kPanelWidth], row, sizeof row);
  }
  return {columns.data(), kernels.depth, kernels.scales.from(panel)};
}

// Activations of consecutive rows.
struct Floats {
  static constexpr int kSums = 1;  // of a tile for each output
  const float* begin;
  int64_t depth;

  Floats from(int64_t row) const { return {begin + row * depth, depth}; }
};

// out[rows, columns] = x[rows, depth] @ some panels, of which the last may hang over the last column of `width`. Several at
// once are for as many rows as one tile has.
template <int panels, typename Stored, typename Scales>
void multiply(const Floats& x, const Kernels<Stored, Scales>& kernels, int64_t panel, int64_t next, float* out, int64_t rows,
              int64_t width, int64_t columns) {
  const int64_t depth = kernels.depth;
  if constexpr (panels == 1 && sizeof(Stored) < sizeof(float))
    if (rows > kRowsOfNarrow) return multiply<1>(x, read_once<float, Vector>(kernels, panel), 0, 0, out, rows, width, columns);
  const Panels<panels, Stored, Scales> right(kernels, panel, next);
  if (columns < panels * kPanelWidth) {
    for (int64_t row = 0; row < rows; ++row) {
      float whole[panels * kPanelWidth];
      tile<1, true>(x.begin + row * depth, depth, right, depth, whole, 0, false);
      std::copy(whole, whole + columns, out + row * width);
    }
  } else if constexpr (panels > 1) {
    tile_of<true>(rows, x.begin, depth, right, depth, out, width, false);
  } else {
    product(rows, x.begin, depth, right, depth, out, width, false);
  }
}

// The same for any number of panels up to kMaxPanels.
template <int panels = kMaxPanels, typename Activations, typename Stored, typename Scales>
void multiply_by(int64_t count, const Activations& x, const Kernels<Stored, Scales>& kernels, int64_t panel, int64_t next,
                 float* out, int64_t rows, int64_t width, int64_t columns) {
  if (count >= panels) {
    const int64_t behind = count > panels ? panel + panels : next;
    multiply<panels>(x, kernels, panel, behind, out, rows, width, std::min(columns, panels * kPanelWidth));
    count -= panels, panel += panels, out += panels * kPanelWidth, columns -= panels * kPanelWidth;
  }
  if constexpr (panels > 1)
    if (count > 0) multiply_by<panels / 2>(count, x, kernels, panel, next, out, rows, width, columns);
}

}  // namespace odriver
