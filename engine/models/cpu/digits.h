// Activations as whole numbers, for products with whole weights by VNNI (AVX-512): x = unit * (d0 + 256 d1 + 65536 d2), where
// digits are from -128 to 127 and a row's unit is a power of two. The largest number of a row has 23 bits and each is off by
// at most half a unit, 2^-23 of it: sums of float32 round as much. A row with infinity or NaN has NaN for its unit.

#pragma once

#include <algorithm>
#include <limits>
#include <memory>

#include "team.h"
#include "tiles.h"

#if defined(__AVX512VNNI__)

namespace odriver {

constexpr int64_t kQuad = 4;    // inputs, whose digits lie side by side
constexpr int kDigits = 3;      // of four words of a quad, the last of which is 0
constexpr int kWord = 4;
constexpr int64_t kRowsOfTask = 8;
constexpr int32_t kLargest = 0x7f7fffff;  // the bits of the largest float
constexpr int32_t kCarry = 0x010101;      // added to bits: three digits reach 0x7f7f7f, where 23 bits reach 0x7fffff
constexpr int32_t kLeastExponent = 23;    // below it a unit would not be a normal float

// Digits of consecutive rows.
struct Digits {
  static constexpr int kSums = kDigits;
  const int32_t* words;   // [rows, stride, 4]: those of a quad's inputs in the bytes of a word, for each digit
  const int32_t* totals;  // [rows, groups, 4]: the digits of a group of inputs, added up
  const float* units;     // [rows]
  int64_t stride, groups, group;  // quads of a row and of a group

  Digits from(int64_t row) const {
    return {words + row * stride * kWord, totals + row * groups * kWord, units + row, stride, groups, group};
  }
};

inline float as_float(int32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof bits);
  return value;
}

// Makes digits of rows [rows, depth], and owns them.
class DigitsOfRows {
 public:
  // `group` quads have totals of their own; it is a multiple of kWidth inputs.
  DigitsOfRows(const float* x, int64_t rows, int64_t depth, int64_t group)
      : stride_((depth + kWidth - 1) / kWidth * (kWidth / kQuad)),
        groups_((stride_ + group - 1) / group),
        group_(group),
        words_(new int32_t[rows * stride_ * kWord]),
        totals_(new int32_t[rows * groups_ * kWord]),
        units_(new float[rows]) {
    parallel_for((rows + kRowsOfTask - 1) / kRowsOfTask, [&](int64_t task) {
      for (int64_t row = task * kRowsOfTask; row < std::min(rows, (task + 1) * kRowsOfTask); ++row)
        units_[row] =
            digits_of(x + row * depth, depth, &words_[row * stride_ * kWord], &totals_[row * groups_ * kWord], group);
    });
  }

  Digits all() const { return {words_.get(), totals_.get(), units_.get(), stride_, groups_, group_}; }

 private:
  const int64_t stride_, groups_, group_;
  const std::unique_ptr<int32_t[]> words_, totals_;
  const std::unique_ptr<float[]> units_;

  // Inputs from k on; behind the last they are 0.
  static __m512 read(const float* x, int64_t depth, int64_t k) {
    return _mm512_maskz_loadu_ps(depth - k < kWidth ? (1 << (depth - k)) - 1 : 0xffff, x + k);
  }

  // Returns the unit.
  static float digits_of(const float* x, int64_t depth, int32_t* words, int32_t* totals, int64_t group) {
    __m512i most = _mm512_setzero_si512();
    for (int64_t k = 0; k < depth; k += kWidth) most = _mm512_max_epi32(most, magnitude(read(x, depth, k)));
    const int32_t largest = _mm512_reduce_max_epi32(most);
    const int32_t exponent = std::max((std::min(largest, kLargest) + kCarry) >> 23, kLeastExponent);
    const __m512 units_of_one = _mm512_set1_ps(as_float((276 - exponent) << 23));
    for (int64_t k = 0; k < depth; totals += kWord) {
      __m512i sums = _mm512_setzero_si512();
      for (const int64_t end = std::min(depth, k + group * kQuad); k < end; k += kWidth) {
        const __m512i digits = apart(_mm512_cvtps_epi32(_mm512_mul_ps(read(x, depth, k), units_of_one)));
        _mm512_storeu_si512(words + k, digits);
        sums = _mm512_dpbusd_epi32(sums, _mm512_set1_epi8(1), digits);
      }
      const __m256i halves = _mm256_add_epi32(_mm512_castsi512_si256(sums), _mm512_extracti64x4_epi64(sums, 1));
      const __m128i total = _mm_add_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(totals), total);
    }
    return largest > kLargest ? std::numeric_limits<float>::quiet_NaN() : as_float((exponent - 22) << 23);
  }

  // A float's bits without its sign: larger for larger ones, and largest for NaN.
  static __m512i magnitude(__m512 x) { return _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff)); }

  // Whole numbers of four inputs -> the words of their quad. With 128 added to each, a number's digits are its bytes.
  static __m512i apart(__m512i numbers) {
    const __m512i carries = _mm512_set1_epi32(0x808080);
    const __m512i digits = _mm512_xor_si512(_mm512_add_epi32(numbers, carries), carries);
    const __m128i order = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm512_shuffle_epi8(digits, _mm512_broadcast_i32x4(order));
  }
};

}  // namespace odriver

#endif
