// What products of digits (digits.h) take of a processor: VNNI with AVX-512, or AVX2.

#pragma once

#include "tiles.h"

#if defined(__AVX512VNNI__) || (defined(__AVX2__) && !defined(__AVX512F__))
#define ODRIVER_INTEGERS

namespace odriver {

inline Integers load_integers(const void* from) {
  Integers loaded;
  std::memcpy(&loaded, from, sizeof loaded);
  return loaded;
}

#if defined(__AVX512VNNI__)

constexpr int kParts = 3;  // of an output: of each digit

inline void sum_digits(const int32_t* digits, int32_t* sums) { std::copy_n(digits, kParts, sums); }

// To the nearest.
inline Integers rounded(Vector x) { return Integers(_mm512_cvtps_epi32(__m512(x))); }

// The bytes of each 16 in an order.
inline Integers ordered(Integers bytes, __m128i order) {
  return Integers(_mm512_shuffle_epi8(__m512i(bytes), _mm512_broadcast_i32x4(order)));
}

// sums += four unsigned bytes by four signed ones. gcc 12 copies the sums before and after its own function for this.
inline __attribute__((always_inline)) Integers multiply_add(Integers sums, Integers bytes, Integers digits) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(bytes), "v"(digits));
  return sums;
}

#else

constexpr int kParts = 2;  // of an output: of d0 + 256 d1, and of d2

inline void sum_digits(const int32_t* digits, int32_t* sums) {
  sums[0] = digits[0] + 256 * digits[1];
  sums[1] = digits[2];
}

inline Integers rounded(Vector x) { return Integers(_mm256_cvtps_epi32(__m256(x))); }

inline Integers ordered(Integers bytes, __m128i order) {
  return Integers(_mm256_shuffle_epi8(__m256i(bytes), _mm256_broadcastsi128_si256(order)));
}

// halves += two unsigned bytes by two signed ones, each, in 16 bits. In assembler, as gcc 12 runs out of registers.
inline __attribute__((always_inline)) Integers multiply_add_halves(Integers halves, Integers bytes, Integers digits) {
  const __m256i products = _mm256_maddubs_epi16(__m256i(bytes), __m256i(digits));
  asm("vpaddw %1, %0, %0" : "+x"(halves) : "x"(products));
  return halves;
}

// Both halves of each, added up and multiplied.
inline Integers added(Integers halves, int16_t by) { return Integers(_mm256_madd_epi16(__m256i(halves), _mm256_set1_epi16(by))); }

inline Integers multiply_add(Integers sums, Integers bytes, Integers digits) {
  return sums + added(multiply_add_halves(Integers{}, bytes, digits), 1);
}

#endif

}  // namespace odriver

#endif
