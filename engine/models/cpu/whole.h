// Products of digits with weights of 8 or 4 bits, whose sums are exact (digits.h). Four inputs of an output lie side by side in
// panels of such weights: a row of a panel is a quad of inputs.

#pragma once

#include "digits.h"
#include "panels.h"

#if defined(__AVX512VNNI__)

namespace odriver {

// Weights of an output for four inputs, and of two for four: a panel's column i and, in the upper bits, i + kPanelWidth / 2.
struct Quad8 {
  static constexpr int32_t kZero = 128;  // what is read is so much more: VNNI multiplies a digit by an unsigned byte
  int8_t inputs[kQuad];
};
struct Quad4 {
  static constexpr int32_t kZero = 8;
  uint8_t inputs[kQuad];
};

template <>
constexpr int64_t kRowElements<Quad4> = kPanelWidth / 2;

constexpr int64_t kMostQuads = 1 << 14;  // whose products a sum of 32 bits holds

inline void read_row(const Quad8* from, __m512i* row) {
  for (int v = 0; v < kPanelVectors; ++v)
    row[v] = _mm512_xor_si512(_mm512_loadu_si512(from + v * kWidth), _mm512_set1_epi8(-128));
}

inline void read_row(const Quad4* from, __m512i* row) {
  constexpr int kFlippedAndKept = 0x28;  // (a ^ b) & c
  const __m512i both = _mm512_loadu_si512(from), sign = _mm512_set1_epi8(8), bits = _mm512_set1_epi8(15);
  row[0] = _mm512_ternarylogic_epi32(both, sign, bits, kFlippedAndKept);
  row[1] = _mm512_ternarylogic_epi32(_mm512_srli_epi32(both, 4), sign, bits, kFlippedAndKept);
}

// sums += four unsigned bytes of a column by four digits. gcc 12 copies the sums before and after its own function for this.
inline __attribute__((always_inline)) __m512i multiply_add(__m512i sums, __m512i columns, __m512i digits) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(columns), "v"(digits));
  return sums;
}

// sums[rows, columns] of each digit += x[rows, from begin to end] @ right[from begin to end, columns]
template <int rows, bool prefetch, typename Right>
inline __attribute__((always_inline)) void accumulate(const Digits& x, const Right& right, int64_t begin, int64_t end,
                                                      __m512i (&sums)[rows][Right::kVectors][kDigits]) {
  for (int64_t k = begin; k < end; ++k) {
    if (prefetch) right.fetch(k);
    for (int first = 0; first < Right::kVectors; first += kPanelVectors) {  // panel by panel, or registers do not suffice
      __m512i columns[kPanelVectors];
      read_row(right.row(first / kPanelVectors, k), columns);
      for (int row = 0; row < rows; ++row)
        for (int digit = 0; digit < kDigits; ++digit) {
          const __m512i left = _mm512_set1_epi32(x.words[(row * x.stride + k) * kWord + digit]);
          for (int v = 0; v < kPanelVectors; ++v)
            sums[row][first + v][digit] = multiply_add(sums[row][first + v][digit], columns[v], left);
        }
    }
  }
}

inline Vector joined(const __m512i (&digits)[kDigits]) {
  Vector sum = _mm512_cvtepi32_ps(digits[0]);
  sum += _mm512_cvtepi32_ps(digits[1]) * 256.0f;
  sum += _mm512_cvtepi32_ps(digits[2]) * 65536.0f;
  return sum;
}

// out[rows, columns] = x[rows, depth] @ right[depth, columns]
template <int rows, bool prefetch, typename Right>
__attribute__((noinline)) void tile(const Digits& x, const Right& right, float* out, int64_t out_stride) {
  constexpr int vectors = Right::kVectors;
  Vector sums[rows][vectors] = {};
  for (int64_t group = 0; group < x.groups; ++group) {
    const int64_t begin = group * x.group;
    __m512i digits[rows][vectors][kDigits];
    for (int row = 0; row < rows; ++row)
      for (int digit = 0; digit < kDigits; ++digit) {
        const int32_t total = x.totals[(row * x.groups + group) * kWord + digit];
        for (int v = 0; v < vectors; ++v) digits[row][v][digit] = _mm512_set1_epi32(-Right::Numbers::kZero * total);
      }
    accumulate<rows, prefetch>(x, right, begin, std::min(right.depth, begin + x.group), digits);
    if constexpr (Right::kGrouped) {
      Vector scales[vectors];
      right.read_scales(begin, scales);
      for (int row = 0; row < rows; ++row)
        for (int v = 0; v < vectors; ++v) sums[row][v] += joined(digits[row][v]) * scales[v];
    } else {
      for (int row = 0; row < rows; ++row)
        for (int v = 0; v < vectors; ++v) sums[row][v] += joined(digits[row][v]);
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

// For any number of rows, cut into tiles as even as can be; the first tile fetches ahead for the others.
template <typename Right>
void product(const Digits& x, const Right& right, float* out, int64_t rows, int64_t out_stride) {
  constexpr int64_t at_once = kTileRows<Right::kVectors>;
  const int64_t tiles = (rows + at_once - 1) / at_once;
  for (int64_t row = 0, left = tiles; left > 0; --left) {
    const int64_t count = (rows - row + left - 1) / left;
    if (row == 0)
      tile_of<true>(count, x, right, out, out_stride);
    else
      tile_of<false>(count, x.from(row), right, out + row * out_stride, out_stride);
    row += count;
  }
}

// As for floats (panels.h).
template <int panels, typename Stored, typename Scales>
void multiply(const Digits& x, const Kernels<Stored, Scales>& kernels, int64_t panel, int64_t next, float* out, int64_t rows,
              int64_t width, int64_t columns) {
  const Panels<panels, Stored, Scales> right(kernels, panel, next);
  if (columns == panels * kPanelWidth) return product(x, right, out, rows, width);
  for (int64_t row = 0; row < rows; ++row) {
    float whole[panels * kPanelWidth];
    tile<1, true>(x.from(row), right, whole, 0);
    std::copy(whole, whole + columns, out + row * width);
  }
}

}  // namespace odriver

#endif
