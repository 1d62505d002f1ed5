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
constexpr int64_t kPieceBytes = 65536;  // of a panel: all rows are multiplied by it, and the next one fetched meanwhile
constexpr int64_t kTilesOfStreams = 3;  // up to so many tiles wait for memory, of which two streams come faster than one
constexpr int64_t kTilesThatFetch = 16;  // at most: to fetch costs a tile an instruction for each row
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
  int64_t group() const { return 1; }
  NoScales from(int64_t, int64_t) const { return {}; }
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
  GroupScales from(int64_t panel, int64_t k) const {
    GroupScales rest = *this;
    rest.begin = of(panel, k);
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

// The right side of a product: so many panels, or of one panel `depth` rows.
template <int panels, typename Stored, typename Scales>
struct Panels {
  using Numbers = Stored;
  static constexpr int kVectors = panels * kPanelVectors, kAtOnce = kPanelVectors;
  static constexpr bool kGrouped = Scales::kGrouped;
  static constexpr int64_t kRow = kRowElements<Stored>, kRowBytes = kRow * sizeof(Stored);
  const Stored* const begin;
  const int64_t depth, group;
  const Scales scales;

  Panels(const Kernels<Stored, Scales>& kernels, int64_t first)
      : begin(kernels.panel(first)), depth(kernels.depth), group(kernels.scales.group()), scales(kernels.scales.from(first, 0)) {}

  // Of one panel the rows from k on.
  Panels(const Panels& whole, int64_t k, int64_t depth)
      : begin(whole.row(0, k)), depth(depth), group(whole.group), scales(whole.scales.from(0, k)) {}

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
};

// Panels for one tile. `next` is read after them; it is fetched meanwhile.
template <int panels, typename Stored, typename Scales>
struct PanelsOfOneTile : Panels<panels, Stored, Scales> {
  using Whole = Panels<panels, Stored, Scales>;
  static constexpr int64_t kAhead = kAheadBytes / panels / Whole::kRowBytes;  // rows
  const int64_t to_next;  // from one of the last `kAhead` rows, the elements to what is fetched with it

  PanelsOfOneTile(const Kernels<Stored, Scales>& kernels, int64_t first, int64_t next)
      : Whole(kernels, first), to_next(kernels.panel(next) - this->begin + (kAhead - kernels.depth) * Whole::kRow) {}

  // Without the attribute gcc finds that it computes nothing, and leaves it out.
  auto fetch_from(int64_t) const {
    return [this](int64_t k) __attribute__((always_inline)) {
      if (k * Whole::kRowBytes % kLineBytes) return;
      const Stored* from = this->begin + k * Whole::kRow + (k + kAhead < this->depth ? kAhead * Whole::kRow : to_next);
      for (int panel = 0; panel < panels; ++panel)
        for (int64_t byte = 0; byte < Whole::kRowBytes; byte += kLineBytes)
          __builtin_prefetch(reinterpret_cast<const char*>(from + panel * this->depth * Whole::kRow) + byte);
    };
  }
};

// A panel, or a piece of one, for several tiles. What is read next is as many rows of `row_bytes` from `next` on; each tile
// fetches its part of them, so that memory is read all the time.
template <typename Stored, typename Scales>
struct SharedPanel : Panels<1, Stored, Scales> {
  using Whole = Panels<1, Stored, Scales>;
  static constexpr int64_t kLines = Whole::kRowBytes > kLineBytes ? 2 : 1;  // fetched with each row
  const int64_t tiles, fetching;
  const char* next;
  int64_t part, step, stream;  // bytes: of a stream for each tile, within a stream, and from a line to that of the other stream

  SharedPanel(const Whole& whole, const void* next, int64_t row_bytes, int64_t rows, int64_t rows_of_tile)
      : Whole(whole),
        tiles((rows + rows_of_tile - 1) / rows_of_tile),
        fetching(std::min(tiles, kTilesThatFetch)),
        next(static_cast<const char*>(next)) {
    const int64_t streams = kLines > 1 || tiles <= kTilesOfStreams ? 2 : 1, bytes = whole.depth * row_bytes / streams;
    step = (row_bytes + kLines * fetching - 1) / (kLines * fetching) * (2 / streams);
    stream = streams > 1 ? bytes : step / 2;
    part = bytes / fetching;
  }

  // A line of each stream in turn, or of both with each row. A single stream is two: every other line of it.
  auto fetch_from(int64_t k) const {
    const char* line = next + (k >> (kLines == 1)) * step;
    const char* other = line + stream;
    if (kLines == 1 && k % 2) line += step, std::swap(line, other);
    return [line, other, step = step](int64_t) mutable __attribute__((always_inline)) {
      __builtin_prefetch(line);
      if constexpr (kLines > 1) {
        __builtin_prefetch(other);
        line += step, other += step;
      } else {
        const char* then = line + step;
        line = other, other = then;
      }
    };
  }

  // Calls multiply(first, rows, right, whether it fetches) for each tile of all rows, which are as even as can be.
  template <typename Multiply>
  void for_each(int64_t rows, const Multiply& multiply) const {
    SharedPanel right = *this;
    for (int64_t row = 0, left = tiles; left > 0; --left, right.next += part) {
      const int64_t count = (rows - row + left - 1) / left;
      tiles - left < fetching ? multiply(row, count, right, std::true_type{}) : multiply(row, count, right, std::false_type{});
      row += count;
    }
  }
};

// Rows of a panel as `read_row` gives them, as floats or integers, before scales: over many rows cheaper than to read them so in
// every tile.
template <typename Read, typename Columns, typename Stored, typename Scales>
Panels<1, Read, Scales> read_once(const Panels<1, Stored, Scales> packed) {
  static thread_local std::vector<Read> columns;
  columns.resize(packed.depth * kPanelWidth);
  Read* const to = columns.data();
  for (int64_t k = 0; k < packed.depth; ++k) {
    Columns row[kPanelVectors];
    static_assert(sizeof row == kPanelWidth * sizeof(Read));
    packed.read(k, 0, row);
    for (int v = 0; v < kPanelVectors; ++v) std::memcpy(to + k * kPanelWidth + v * kWidth, &row[v], sizeof row[v]);
  }
  return {Kernels<Read, Scales>{to, packed.depth, packed.scales}, 0};
}

// Activations of consecutive rows.
struct Floats {
  static constexpr int kSums = 1;  // of a tile for each output
  const float* begin;
  int64_t depth;

  Floats from(int64_t row) const { return {begin + row * depth, depth}; }
};

// out[rows, columns] (+)= x[rows, depth] @ rows of a panel, of which `next` are read then.
template <typename Stored, typename Scales>
void multiply_piece(const float* x, int64_t x_stride, const Panels<1, Stored, Scales>& piece, const void* next, int64_t row_bytes,
                    float* out, int64_t rows, int64_t width, bool add) {
  if constexpr (sizeof(Stored) < sizeof(float))
    if (rows > kRowsOfNarrow)
      return multiply_piece(x, x_stride, read_once<float, Vector>(piece), next, row_bytes, out, rows, width, add);
  constexpr int64_t at_once = kMaxSums / kPanelVectors;
  const SharedPanel<Stored, Scales> tiles(piece, next, row_bytes, rows, at_once);
  tiles.for_each(rows, [&](int64_t row, int64_t count, const auto& right, auto fetches) {
    tile_of<fetches.value>(count, x + row * x_stride, x_stride, right, piece.depth, out + row * width, width, add);
  });
}

// out[rows, columns] = x[rows, depth] @ some panels, of which the last may hang over the last column of `width`. Several at
// once are for as many rows as one tile has.
template <int panels, typename Stored, typename Scales>
void multiply(const Floats& x, const Kernels<Stored, Scales>& kernels, int64_t panel, int64_t next, float* out, int64_t rows,
              int64_t width, int64_t columns) {
  const int64_t depth = kernels.depth;
  if (columns < panels * kPanelWidth) {
    const PanelsOfOneTile<panels, Stored, Scales> right(kernels, panel, next);
    for (int64_t row = 0; row < rows; ++row) {
      float whole[panels * kPanelWidth];
      tile<1, true>(x.begin + row * depth, depth, right, depth, whole, 0, false);
      std::copy(whole, whole + columns, out + row * width);
    }
  } else if constexpr (panels > 1) {
    tile_of<true>(rows, x.begin, depth, PanelsOfOneTile<panels, Stored, Scales>(kernels, panel, next), depth, out, width, false);
  } else {
    const Panels<1, Stored, Scales> whole(kernels, panel);
    const int64_t most = kPieceBytes / sizeof(float) / kPanelWidth, pieces = (depth + most - 1) / most;
    const int64_t each = ((depth + pieces - 1) / pieces + whole.group - 1) / whole.group * whole.group;
    for (int64_t k = 0; k < depth; k += each) {
      const Panels<1, Stored, Scales> piece(whole, k, std::min(each, depth - k));
      const Stored* then = k + each < depth ? whole.row(0, k + each) : kernels.panel(next);
      multiply_piece(x.begin + k, depth, piece, then, whole.kRowBytes, out, rows, width, k > 0);
    }
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
