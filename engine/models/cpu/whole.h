// Products of digits with weights of 8 or 4 bits, whose sums are exact (digits.h). Four inputs of an output lie side by side in
// panels of such weights: a row of a panel is a quad of inputs.

#pragma once

#include "digits.h"
#include "panels.h"

#if defined(ODRIVER_INTEGERS)

namespace odriver {

// Weights of two outputs for four inputs: a panel's column i and, in the upper bits, i + kPanelWidth / 2.
struct Quad4 {
  static constexpr int32_t kZero = 8;  // what is read is so much more: a digit is multiplied by an unsigned byte
  uint8_t inputs[kQuad];
};

constexpr int64_t kMostQuads4 = 1 << 9;  // whose products of two digits a sum of 32 bits holds

template <>
constexpr int64_t kRowElements<Quad4> = kPanelWidth / 2;

inline void read_row(const Quad4* from, Integers* row) {
  const Integers both = load_integers(from) ^ int32_t(0x88888888);
  row[0] = both & 0x0f0f0f0f;
  row[1] = (both >> 4) & 0x0f0f0f0f;
}

#if defined(__AVX512VNNI__)

// Weights of an output for four inputs.
struct Quad8 {
  static constexpr int32_t kZero = 128;
  int8_t inputs[kQuad];
};

constexpr int64_t kMostQuads8 = 1 << 14;  // whose products a sum of 32 bits holds

inline void read_row(const Quad8* from, Integers* row) {
  for (int v = 0; v < kPanelVectors; ++v) row[v] = load_integers(from + v * kWidth) ^ int32_t(0x80808080);
}

// sums[rows, columns] of each digit += x[rows, from begin to end] @ right[from begin to end, columns]
template <int rows, bool prefetch, typename Right>
inline __attribute__((always_inline)) void accumulate(const Digits& x, const Right& right, int64_t begin, int64_t end,
                                                      Integers (&sums)[rows][Right::kVectors][kParts]) {
  auto fetch = right.fetch_from(begin);
  for (int64_t k = begin; k < end; ++k) {
    if (prefetch) fetch(k);
    for (int first = 0; first < Right::kVectors; first += kPanelVectors) {  // panel by panel, or registers do not suffice
      Integers columns[kPanelVectors];
      right.read(k, first, columns);
      for (int row = 0; row < rows; ++row)
        for (int digit = 0; digit < kDigits; ++digit)
          for (int v = 0; v < kPanelVectors; ++v)
            sums[row][first + v][digit] = multiply_add(sums[row][first + v][digit], columns[v], x.word(row, k, digit));
    }
  }
}

inline Vector joined(const Integers (&sums)[kParts]) {
  const Vector lower = fma(__builtin_convertvector(sums[1], Vector), 256.0f, __builtin_convertvector(sums[0], Vector));
  return fma(__builtin_convertvector(sums[2], Vector), 65536.0f, lower);
}

#else

// The same weights as read_row gives them: bytes of a panel's columns.
struct Quad4Read {
  static constexpr int32_t kZero = Quad4::kZero;
  uint8_t inputs[kQuad];
};

inline void read_row(const Quad4Read* from, Integers* row) {
  for (int v = 0; v < kPanelVectors; ++v) row[v] = load_integers(from + v * kWidth);
}

constexpr int64_t kQuadsOfHalves = 8;  // whose products with 4 bits a sum of 16 bits holds

// As above, first in halves of 32 bits, a panel after the other. Of a group's two lower digits 256 d1 + d0 is added up.
template <int rows, bool prefetch, typename Right>
inline __attribute__((always_inline)) void accumulate(const Digits& x, const Right& right, int64_t begin, int64_t end,
                                                      Integers (&sums)[rows][Right::kVectors][kParts]) {
  auto fetch = right.fetch_from(begin);
  for (int64_t from = begin; from < end; from += kQuadsOfHalves)
    for (int first = 0; first < Right::kVectors; first += kPanelVectors) {
      Integers halves[rows][kPanelVectors][kDigits];
      for (int row = 0; row < rows; ++row)
        for (int digit = 0; digit < kDigits; ++digit)
          for (int v = 0; v < kPanelVectors; ++v) halves[row][v][digit] = Integers{};
      for (int64_t k = from; k < std::min(end, from + kQuadsOfHalves); ++k) {
        if (prefetch && first == 0) fetch(k);
        Integers columns[kPanelVectors];
        right.read(k, first, columns);
        for (int row = 0; row < rows; ++row)
          for (int digit = 0; digit < kDigits; ++digit)
            for (int v = 0; v < kPanelVectors; ++v)
              halves[row][v][digit] = multiply_add_halves(halves[row][v][digit], columns[v], x.word(row, k, digit));
      }
      for (int row = 0; row < rows; ++row)
        for (int v = 0; v < kPanelVectors; ++v) {
          const Integers(&of_digits)[kDigits] = halves[row][v];
          sums[row][first + v][0] += added(of_digits[0], 1) + added(of_digits[1], 256);
          sums[row][first + v][1] += added(of_digits[2], 1);
        }
    }
}

inline Vector joined(const Integers (&sums)[kParts]) {
  return fma(__builtin_convertvector(sums[1], Vector), 65536.0f, __builtin_convertvector(sums[0], Vector));
}

#endif

// out[rows, columns] = x[rows, depth] @ right[depth, columns]
template <int rows, bool prefetch, typename Right>
__attribute__((noinline)) void tile(const Digits& x, const Right& right, float* out, int64_t out_stride) {
  constexpr int vectors = Right::kVectors;
  Vector sums[rows][vectors] = {};
  for (int64_t group = 0; group < x.groups; ++group) {
    const int64_t begin = group * x.group;
    Integers of_group[rows][vectors][kParts];
    for (int row = 0; row < rows; ++row)
      for (int sum = 0; sum < kParts; ++sum) {
        const int32_t total = x.totals[(row * x.groups + group) * kParts + sum];
        for (int v = 0; v < vectors; ++v) of_group[row][v][sum] = Integers{} - Right::Numbers::kZero * total;
      }
    accumulate<rows, prefetch>(x, right, begin, std::min(right.depth, begin + x.group), of_group);
    if constexpr (Right::kGrouped) {
      Vector scales[vectors];
      right.read_scales(begin, scales);
      for (int row = 0; row < rows; ++row)
        for (int v = 0; v < vectors; ++v) sums[row][v] = fma(joined(of_group[row][v]), scales[v], sums[row][v]);
    } else {
      for (int row = 0; row < rows; ++row)
        for (int v = 0; v < vectors; ++v) sums[row][v] += joined(of_group[row][v]);
    }
  }
  for (int row = 0; row < rows; ++row)
    for (int v = 0; v < vectors; ++v) store(out + row * out_stride + v * kWidth, sums[row][v] * x.units[row]);
}

template <int vectors>
constexpr int kTileRows = std::max(1, kMaxSums / kDigits / vectors);  // of so many vectors

template <bool prefetch, typename Right, int rows = kTileRows<Right::kVectors>>
inline void tile_of(int64_t count, const Digits& x, const Right& right, float* out, int64_t out_stride) {
  if (count == rows)
    tile<rows, prefetch>(x, right, out, out_stride);
  else if constexpr (rows > 1)
    tile_of<prefetch, Right, rows - 1>(count, x, right, out, out_stride);
}

// out[rows, columns] = x[rows, depth] @ a panel, of which `next` is read then.
template <typename Stored, typename Scales>
void multiply_panel(const Digits& x, const Panels<1, Stored, Scales>& panel, const void* next, int64_t row_bytes, float* out,
                    int64_t rows, int64_t width) {
  constexpr int64_t at_once = kTileRows<kPanelVectors>;
  const SharedPanel<Stored, Scales> tiles(panel, next, row_bytes, rows, at_once);
  tiles.for_each(rows, [&](int64_t row, int64_t count, const auto& right, auto fetches) {
    tile_of<fetches.value>(count, x.from(row), right, out + row * width, width);
  });
}

// As for floats (panels.h).
template <int panels, typename Stored, typename Scales>
void multiply(const Digits& x, const Kernels<Stored, Scales>& kernels, int64_t panel, int64_t next, float* out, int64_t rows,
              int64_t width, int64_t columns) {
  if (columns < panels * kPanelWidth) {
    const PanelsOfOneTile<panels, Stored, Scales> right(kernels, panel, next);
    for (int64_t row = 0; row < rows; ++row) {
      float whole[panels * kPanelWidth];
      tile<1, true>(x.from(row), right, whole, 0);
      std::copy(whole, whole + columns, out + row * width);
    }
  } else if constexpr (panels > 1) {
    tile_of<true>(rows, x, PanelsOfOneTile<panels, Stored, Scales>(kernels, panel, next), out, width);
  } else {
    const Panels<1, Stored, Scales> packed(kernels, panel);
    const void* then = kernels.panel(next);
#if !defined(__AVX512VNNI__)
    if constexpr (std::is_same_v<Stored, Quad4>)
      if (rows > kRowsOfNarrow)
        return multiply_panel(x, read_once<Quad4Read, Integers>(packed), then, packed.kRowBytes, out, rows, width);
#endif
    multiply_panel(x, packed, then, packed.kRowBytes, out, rows, width);
  }
}

}  // namespace odriver

#endif
