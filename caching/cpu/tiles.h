// What the CPU kernels share: a register tile of a matrix product, and a vector exponential. Compiled for each level of
// processors (caching/instruction_set.py), which the vector width follows from.
//
// A tile adds up each output in the order of k, whatever other rows there are: a row's result does not depend on
// the batch it is computed in, bit for bit.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace odriver {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64, kMaxSums = 24;  // of 32 registers
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32, kMaxSums = 12;  // of 16
#else
constexpr int kVectorBytes = 16, kMaxSums = 24;  // of 32 (NEON; SSE2 has 16, for processors without AVX2 alone)
#endif
constexpr int kWidth = kVectorBytes / sizeof(float);
constexpr int kWideRows = kMaxSums / 4;  // up to so many rows a tile is four vectors wide, else two

typedef float Vector __attribute__((vector_size(kVectorBytes)));
typedef float Unaligned __attribute__((vector_size(kVectorBytes), aligned(4), may_alias));
typedef int32_t Integers __attribute__((vector_size(kVectorBytes)));
typedef uint16_t Halves __attribute__((vector_size(kVectorBytes / 2), aligned(2), may_alias));
typedef int16_t Shorts __attribute__((vector_size(kVectorBytes / 2)));
typedef int8_t Bytes __attribute__((vector_size(kWidth), aligned(1), may_alias));

inline Vector load(const float* from) { return *reinterpret_cast<const Unaligned*>(from); }

// a * b + c, rounded once where the processor can. Compilers join nothing else (-ffp-contract=off): gcc 14 joins in some
// copies of a loop and not in others, and a row's result would depend on how many rows there are.
inline Vector fma(Vector a, Vector b, Vector c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__ARM_NEON)
  return vfmaq_f32(c, a, b);
#else
  return a * b + c;
#endif
}

// A number in all of a vector. Adding it to 0 would be an addition, as -0 becomes 0.
inline Vector spread(float x) { return x - Vector{}; }

inline Vector fma(Vector a, float b, Vector c) { return fma(a, spread(b), c); }
inline Vector fma(Vector a, Vector b, float c) { return fma(a, b, spread(c)); }

// The bits of bfloat16 are the upper half of a float's.
inline Vector load(const uint16_t* from) {
#if defined(__AVX512F__)
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
#elif defined(__AVX2__)
  const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
#else
  const Integers wide = __builtin_convertvector(*reinterpret_cast<const Halves*>(from), Integers) << 16;
  return reinterpret_cast<Vector>(wide);
#endif
}

// gcc 12 takes a dozen instructions for what x86 has two for.
inline Vector load(const int8_t* from) {
#if defined(__AVX512F__)
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(__AVX2__)
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
  const Shorts wider = __builtin_convertvector(*reinterpret_cast<const Bytes*>(from), Shorts);
  return __builtin_convertvector(__builtin_convertvector(wider, Integers), Vector);
#endif
}

// Two numbers from -8 to 7 in a byte: the lower bits of kWidth bytes are one vector, the upper ones the next.
enum class Nibbles : uint8_t {};

inline void load(const Nibbles* from, Vector* two) {
#if defined(__AVX512F__)
  const __m512i both = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  const __m512 numbers = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1);
  two[0] = _mm512_permutexvar_ps(both, numbers);
  two[1] = _mm512_permutexvar_ps(_mm512_srli_epi32(both, 4), numbers);
#else
  const Bytes bytes = *reinterpret_cast<const Bytes*>(from);
  const Integers both = __builtin_convertvector(__builtin_convertvector(bytes, Shorts), Integers);
  two[0] = __builtin_convertvector(both << 28 >> 28, Vector);
  two[1] = __builtin_convertvector(both >> 4, Vector);
#endif
}

inline void store(float* to, Vector value) { *reinterpret_cast<Unaligned*>(to) = value; }

inline void store(float* to, float value) { *to = value; }

// Rounded to the nearest, ties to even, as XLA rounds.
inline void store(uint16_t* to, float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  *to = value != value ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline float highest(Vector x) {
  float lanes[kWidth];
  store(lanes, x);
  for (int half = kWidth / 2; half > 0; half /= 2)
    for (int lane = 0; lane < half; ++lane) lanes[lane] = std::max(lanes[lane], lanes[lane + half]);
  return lanes[0];
}

inline float sum(Vector x) {
  float lanes[kWidth];
  store(lanes, x);
  for (int half = kWidth / 2; half > 0; half /= 2)
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  return lanes[0];
}

// The right side of a product: `vectors` columns of kWidth, each with a beginning of its own, a row every `stride`.
// `ahead` is what will be read next; it is fetched meanwhile. Another kind has the same members.
template <int vectors, typename Stored>
struct Columns {
  static constexpr int kVectors = vectors, kAtOnce = vectors;
  static constexpr bool kGrouped = false;
  const Stored* begin[vectors];
  const Stored* ahead[vectors];
  int64_t stride;

  // kAtOnce vectors of row k, from `first` on.
  void read(int64_t k, int first, Vector* row) const {
    for (int v = 0; v < kAtOnce; ++v) row[v] = load(begin[first + v] + k * stride);
  }
  auto fetch_from(int64_t) const {
    return [this](int64_t k) __attribute__((always_inline)) {
      for (int v = 0; v < vectors; ++v) __builtin_prefetch(ahead[v] + k * stride);
    };
  }
};

// sums[rows, columns] += x[rows, from begin to end] @ right[from begin to end, columns]
template <int rows, bool prefetch, typename Right>
inline __attribute__((always_inline)) void accumulate(const float* x, int64_t x_stride, const Right& right, int64_t begin,
                                                      int64_t end, Vector (&sums)[rows][Right::kVectors]) {
  auto fetch = right.fetch_from(begin);
  for (int64_t k = begin; k < end; ++k) {
    if (prefetch) fetch(k);
    for (int first = 0; first < Right::kVectors; first += Right::kAtOnce) {
      Vector columns[Right::kAtOnce];
      right.read(k, first, columns);
      const float* left = x + k;
      if (Right::kAtOnce < Right::kVectors) asm volatile("" : "+r"(left));  // read again: it has no register meanwhile
      for (int row = 0; row < rows; ++row)
        for (int v = 0; v < Right::kAtOnce; ++v) {
          Vector& sum = sums[row][first + v];
          sum = fma(columns[v], left[row * x_stride], sum);
        }
    }
  }
}

// out[rows, columns] (+)= x[rows, depth] @ right[depth, columns]
template <int rows, bool prefetch, typename Right>
__attribute__((noinline)) void tile(const float* x, int64_t x_stride, const Right& right, int64_t depth, float* out,
                                    int64_t out_stride, bool add) {
  constexpr int vectors = Right::kVectors;
  Vector sums[rows][vectors];
  for (int row = 0; row < rows; ++row)
    for (int v = 0; v < vectors; ++v) sums[row][v] = add ? load(out + row * out_stride + v * kWidth) : Vector{};
  if constexpr (!Right::kGrouped) {
    accumulate<rows, prefetch>(x, x_stride, right, 0, depth, sums);
  } else {
    for (int64_t k = 0; k < depth; k += right.group) {
      Vector of_group[rows][vectors] = {}, scales[vectors];
      accumulate<rows, prefetch>(x, x_stride, right, k, std::min(depth, k + right.group), of_group);
      right.read_scales(k, scales);
      for (int row = 0; row < rows; ++row)
        for (int v = 0; v < vectors; ++v) sums[row][v] = fma(of_group[row][v], scales[v], sums[row][v]);
    }
  }
  for (int row = 0; row < rows; ++row)
    for (int v = 0; v < vectors; ++v) store(out + row * out_stride + v * kWidth, sums[row][v]);
}

template <bool prefetch, typename Right, int rows = kMaxSums / Right::kVectors>
inline void tile_of(int64_t count, const float* x, int64_t x_stride, const Right& right, int64_t depth, float* out,
                    int64_t out_stride, bool add) {
  if (count == rows)
    tile<rows, prefetch>(x, x_stride, right, depth, out, out_stride, add);
  else if constexpr (rows > 1)
    tile_of<prefetch, Right, rows - 1>(count, x, x_stride, right, depth, out, out_stride, add);
}

// The same for any number of rows, cut into tiles as even as can be; the first tile fetches ahead for the others.
template <typename Right>
void product(int64_t rows, const float* x, int64_t x_stride, const Right& right, int64_t depth, float* out,
             int64_t out_stride, bool add) {
  constexpr int64_t at_once = kMaxSums / Right::kVectors;
  const int64_t tiles = (rows + at_once - 1) / at_once;
  int64_t row = 0;
  for (int64_t done = 0; done < tiles; ++done) {
    const int64_t count = (rows - row + (tiles - done) - 1) / (tiles - done);
    const float* from = x + row * x_stride;
    float* to = out + row * out_stride;
    if (done == 0)
      tile_of<true>(count, from, x_stride, right, depth, to, out_stride, add);
    else
      tile_of<false>(count, from, x_stride, right, depth, to, out_stride, add);
    row += count;
  }
}

// exp of each element, to about 1e-7 relative; below -87 it is 0. The polynomial is that of Cephes' expf (Moshier).
inline Vector exponential(Vector x) {
  const Integers vanishes = x < -87.0f;
  const Vector bounded = vanishes ? Vector{} : x;
  const Vector magic = spread(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vector shifted = fma(bounded, 1.44269504088896341f, magic);
  const Vector power = shifted - magic;
  const Vector rest = fma(power, 2.12194440e-4f, fma(power, -0.693359375f, bounded));
  Vector sum = spread(1.9875691500e-4f);
  sum = fma(sum, rest, 1.3981999507e-3f);
  sum = fma(sum, rest, 8.3334519073e-3f);
  sum = fma(sum, rest, 4.1665795894e-2f);
  sum = fma(sum, rest, 1.6666665459e-1f);
  sum = fma(sum, rest, 5.0000001201e-1f);
  sum = fma(sum * rest, rest, rest) + 1.0f;
  const Integers scaled = reinterpret_cast<Integers>(sum) + (__builtin_convertvector(power, Integers) << 23);
  return vanishes ? Vector{} : reinterpret_cast<Vector>(scaled);
}

// tanh of each element, to about 3e-7 relative, by the rational function of Eigen and XLA. NaN stays NaN.
inline Vector hyperbolic_tangent(Vector x) {
  const Vector limit = spread(7.90531110763549805f);  // from here on it is 1
  const Vector below = x > limit ? limit : x;
  const Vector bounded = below < -limit ? -limit : below;
  const Vector square = bounded * bounded;
  Vector above = spread(-2.76076847742355e-16f);
  above = fma(above, square, 2.00018790482477e-13f);
  above = fma(above, square, -8.60467152213735e-11f);
  above = fma(above, square, 5.12229709037114e-08f);
  above = fma(above, square, 1.48572235717979e-05f);
  above = fma(above, square, 6.37261928875436e-04f);
  above = fma(above, square, 4.89352455891786e-03f);
  Vector under = spread(1.19825839466702e-06f);
  under = fma(under, square, 1.18534705686654e-04f);
  under = fma(under, square, 2.26843463243900e-03f);
  under = fma(under, square, 4.89352518554385e-03f);
  return bounded * above / under;
}

}  // namespace odriver
