// Activations as whole numbers, for products with whole weights (whole.h): x = unit * (d0 + 256 d1 + 65536 d2), where digits are
// from -128 to 127 and a row's unit is a power of two. The largest number of a row has 23 bits and each is off by at most half a
// unit, 2^-23 of it: sums of float32 round as much. A row with infinity or NaN has NaN for its unit.

#pragma once

#include <algorithm>
#include <limits>
#include <memory>

#include "integers.h"
#include "team.h"

#if defined(ODRIVER_INTEGERS)

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
  static constexpr int kSums = kDigits;  // of a tile for each output
  const int32_t* words;   // [rows, stride, 4]: those of a quad's inputs in the bytes of a word, for each digit
  const int32_t* totals;  // [rows, groups, kParts]: the digits of a group of inputs, added up as their products are
  const float* units;     // [rows]
  int64_t stride, groups, group;  // quads of a row and of a group

  // One of quad k's words, in all of a vector.
  Integers word(int64_t row, int64_t k, int digit) const { return Integers{} + words[(row * stride + k) * kWord + digit]; }

  Digits from(int64_t row) const {
    return {words + row * stride * kWord, totals + row * groups * kParts, units + row, stride, groups, group};
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
        totals_(new int32_t[rows * groups_ * kParts]),
        units_(new float[rows]) {
    parallel_for((rows + kRowsOfTask - 1) / kRowsOfTask, [&](int64_t task) {
      for (int64_t row = task * kRowsOfTask; row < std::min(rows, (task + 1) * kRowsOfTask); ++row)
        units_[row] =
            digits_of(x + row * depth, depth, &words_[row * stride_ * kWord], &totals_[row * groups_ * kParts], group);
    });
  }

  Digits all() const { return {words_.get(), totals_.get(), units_.get(), stride_, groups_, group_}; }

 private:
  const int64_t stride_, groups_, group_;
  const std::unique_ptr<int32_t[]> words_, totals_;
  const std::unique_ptr<float[]> units_;

  // Inputs from k on; behind the last they are 0.
  static Vector read(const float* x, int64_t depth, int64_t k) {
    if (depth - k >= kWidth) return load(x + k);
    float inputs[kWidth] = {};
    std::copy(x + k, x + depth, inputs);
    return load(inputs);
  }

  // Returns the unit.
  static float digits_of(const float* x, int64_t depth, int32_t* words, int32_t* totals, int64_t group) {
    Integers most{};
    for (int64_t k = 0; k < depth; k += kWidth) {
      const Integers other = magnitude(read(x, depth, k));
      most = most > other ? most : other;
    }
    int32_t largest = 0;
    for (int lane = 0; lane < kWidth; ++lane) largest = std::max(largest, most[lane]);
    const int32_t exponent = std::max((std::min(largest, kLargest) + kCarry) >> 23, kLeastExponent);
    const float units_of_one = as_float((276 - exponent) << 23);
    for (int64_t k = 0; k < depth; totals += kParts) {
      Integers sums{};
      for (const int64_t end = std::min(depth, k + group * kQuad); k < end; k += kWidth) {
        const Integers digits = apart(rounded(read(x, depth, k) * units_of_one));
        std::memcpy(words + k, &digits, sizeof digits);
        sums = multiply_add(sums, Integers{} + 0x01010101, digits);
      }
      int32_t of_digits[kDigits] = {};
      for (int lane = 0; lane < kWidth; ++lane)
        if (lane % kWord < kDigits) of_digits[lane % kWord] += sums[lane];
      sum_digits(of_digits, totals);
    }
    return largest > kLargest ? std::numeric_limits<float>::quiet_NaN() : as_float((exponent - 22) << 23);
  }

  // A float's bits without its sign: larger for larger ones, and largest for NaN.
  static Integers magnitude(Vector x) { return Integers(x) & 0x7fffffff; }

  // Whole numbers of four inputs -> the words of their quad. With 128 added to each, a number's digits are its bytes.
  static Integers apart(Integers numbers) {
    const Integers digits = (numbers + 0x808080) ^ 0x808080;
    return ordered(digits, _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  }
};

}  // namespace odriver

#endif
