// A vector of floats for one instruction set: AVX-512 (16), AVX2 (8), or four lanes that any compiler can map
// (SSE2, NEON). Knows nothing of attention. Everything lives in the namespace of the instruction set: the
// same inline function compiled with other flags would otherwise be merged by the linker.
#pragma once

#include <cstdint>
#include <cstring>

#if JAXINFER_VEC_WIDTH > 4
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define JAXINFER_INLINE inline __attribute__((always_inline))

namespace jaxinfer::cpu::JAXINFER_ISA {

constexpr int32_t kWidth = JAXINFER_VEC_WIDTH;

#if JAXINFER_VEC_WIDTH == 16

using Vec = __m512;
using Mask = __mmask16;

JAXINFER_INLINE Vec zero() {
  return _mm512_setzero_ps();
}
JAXINFER_INLINE Vec splat(float x) {
  return _mm512_set1_ps(x);
}
JAXINFER_INLINE Vec load(const float* p) {
  return _mm512_loadu_ps(p);
}
JAXINFER_INLINE void store(float* p, Vec a) {
  _mm512_storeu_ps(p, a);
}
JAXINFER_INLINE Vec add(Vec a, Vec b) {
  return _mm512_add_ps(a, b);
}
JAXINFER_INLINE Vec sub(Vec a, Vec b) {
  return _mm512_sub_ps(a, b);
}
JAXINFER_INLINE Vec mul(Vec a, Vec b) {
  return _mm512_mul_ps(a, b);
}
JAXINFER_INLINE Vec div(Vec a, Vec b) {
  return _mm512_div_ps(a, b);
}
JAXINFER_INLINE Vec fma(Vec a, Vec b, Vec c) {
  return _mm512_fmadd_ps(a, b, c);
}
// A NaN in the second operand is returned.
JAXINFER_INLINE Vec max(Vec a, Vec b) {
  return _mm512_max_ps(a, b);
}
JAXINFER_INLINE Vec min(Vec a, Vec b) {
  return _mm512_min_ps(a, b);
}
JAXINFER_INLINE Mask less(Vec a, Vec b) {
  return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ);
}
JAXINFER_INLINE Mask mask_of_bits(uint32_t bits) {
  return static_cast<Mask>(bits);
}
JAXINFER_INLINE Vec select(Mask mask, Vec a, Vec b) {
  return _mm512_mask_blend_ps(mask, b, a);
}
JAXINFER_INLINE Vec abs(Vec a) {
  return _mm512_abs_ps(a);
}
JAXINFER_INLINE Vec copy_sign(Vec magnitude, Vec sign) {
  return _mm512_or_ps(magnitude, _mm512_and_ps(sign, _mm512_set1_ps(-0.0f)));
}
// a * 2^n, where n is the integer in the low bits of `shifted`.
JAXINFER_INLINE Vec scale_by_power(Vec a, Vec shifted) {
  return _mm512_castsi512_ps(
      _mm512_add_epi32(_mm512_castps_si512(a), _mm512_slli_epi32(_mm512_castps_si512(shifted), 23)));
}
JAXINFER_INLINE __m256 fold(Vec a) {
  return _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
}
JAXINFER_INLINE float reduce_max(Vec a) {
  return _mm512_reduce_max_ps(a);
}
JAXINFER_INLINE Vec load_f16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
JAXINFER_INLINE Vec load_bf16(const uint16_t* p) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

#elif JAXINFER_VEC_WIDTH == 8

using Vec = __m256;
using Mask = __m256;

JAXINFER_INLINE Vec zero() {
  return _mm256_setzero_ps();
}
JAXINFER_INLINE Vec splat(float x) {
  return _mm256_set1_ps(x);
}
JAXINFER_INLINE Vec load(const float* p) {
  return _mm256_loadu_ps(p);
}
JAXINFER_INLINE void store(float* p, Vec a) {
  _mm256_storeu_ps(p, a);
}
JAXINFER_INLINE Vec add(Vec a, Vec b) {
  return _mm256_add_ps(a, b);
}
JAXINFER_INLINE Vec sub(Vec a, Vec b) {
  return _mm256_sub_ps(a, b);
}
JAXINFER_INLINE Vec mul(Vec a, Vec b) {
  return _mm256_mul_ps(a, b);
}
JAXINFER_INLINE Vec div(Vec a, Vec b) {
  return _mm256_div_ps(a, b);
}
JAXINFER_INLINE Vec fma(Vec a, Vec b, Vec c) {
  return _mm256_fmadd_ps(a, b, c);
}
// A NaN in the second operand is returned.
JAXINFER_INLINE Vec max(Vec a, Vec b) {
  return _mm256_max_ps(a, b);
}
JAXINFER_INLINE Vec min(Vec a, Vec b) {
  return _mm256_min_ps(a, b);
}
JAXINFER_INLINE Mask less(Vec a, Vec b) {
  return _mm256_cmp_ps(a, b, _CMP_LT_OQ);
}
JAXINFER_INLINE Mask mask_of_bits(uint32_t bits) {
  const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  return _mm256_castsi256_ps(
      _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(static_cast<int32_t>(bits)), lane), lane));
}
JAXINFER_INLINE Vec select(Mask mask, Vec a, Vec b) {
  return _mm256_blendv_ps(b, a, mask);
}
JAXINFER_INLINE Vec abs(Vec a) {
  return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a);
}
JAXINFER_INLINE Vec copy_sign(Vec magnitude, Vec sign) {
  return _mm256_or_ps(magnitude, _mm256_and_ps(sign, _mm256_set1_ps(-0.0f)));
}
// a * 2^n, where n is the integer in the low bits of `shifted`.
JAXINFER_INLINE Vec scale_by_power(Vec a, Vec shifted) {
  return _mm256_castsi256_ps(
      _mm256_add_epi32(_mm256_castps_si256(a), _mm256_slli_epi32(_mm256_castps_si256(shifted), 23)));
}
JAXINFER_INLINE __m256 fold(Vec a) {
  return a;
}
JAXINFER_INLINE float reduce_max(Vec a) {
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps(x, x, 1)));
}
JAXINFER_INLINE Vec load_f16(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
JAXINFER_INLINE Vec load_bf16(const uint16_t* p) {
  const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

#else

using Vec = float __attribute__((vector_size(16)));
using Mask = int32_t __attribute__((vector_size(16)));

JAXINFER_INLINE Vec zero() {
  return Vec{0, 0, 0, 0};
}
JAXINFER_INLINE Vec splat(float x) {
  return Vec{x, x, x, x};
}
JAXINFER_INLINE Vec load(const float* p) {
  Vec a;
  std::memcpy(&a, p, sizeof(a));
  return a;
}
JAXINFER_INLINE void store(float* p, Vec a) {
  std::memcpy(p, &a, sizeof(a));
}
JAXINFER_INLINE Vec add(Vec a, Vec b) {
  return a + b;
}
JAXINFER_INLINE Vec sub(Vec a, Vec b) {
  return a - b;
}
JAXINFER_INLINE Vec mul(Vec a, Vec b) {
  return a * b;
}
JAXINFER_INLINE Vec div(Vec a, Vec b) {
  return a / b;
}
JAXINFER_INLINE Vec fma(Vec a, Vec b, Vec c) {
#if defined(__aarch64__)
  return (Vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}
JAXINFER_INLINE Vec select(Mask mask, Vec a, Vec b) {
  return (Vec)(((Mask)a & mask) | ((Mask)b & ~mask));
}
// A NaN in the second operand is returned.
JAXINFER_INLINE Vec max(Vec a, Vec b) {
  return select(a > b, a, b);
}
JAXINFER_INLINE Vec min(Vec a, Vec b) {
  return select(a < b, a, b);
}
JAXINFER_INLINE Mask less(Vec a, Vec b) {
  return a < b;
}
JAXINFER_INLINE Mask mask_of_bits(uint32_t bits) {
  const Mask lane = {1, 2, 4, 8};
  const int32_t x = static_cast<int32_t>(bits);
  return (Mask{x, x, x, x} & lane) == lane;
}
JAXINFER_INLINE Vec abs(Vec a) {
  return (Vec)((Mask)a & ~(Mask)splat(-0.0f));
}
JAXINFER_INLINE Vec copy_sign(Vec magnitude, Vec sign) {
  return (Vec)((Mask)magnitude | ((Mask)sign & (Mask)splat(-0.0f)));
}
// a * 2^n, where n is the integer in the low bits of `shifted`.
JAXINFER_INLINE Vec scale_by_power(Vec a, Vec shifted) {
  return (Vec)((Mask)a + ((Mask)shifted << 23));
}
JAXINFER_INLINE float reduce_max(Vec a) {
  const float x = a[0] > a[1] ? a[0] : a[1];
  const float y = a[2] > a[3] ? a[2] : a[3];
  return x > y ? x : y;
}
JAXINFER_INLINE Vec load_f16(const uint16_t* p) {
  // Exponent and fraction move to their float places and the exponent is rebiased. Subnormal numbers go
  // through an integer conversion: the threads that run this may treat subnormal floats as zero.
  const Mask bits = {p[0], p[1], p[2], p[3]};
  const Mask magnitude = bits & 0x7fff;
  const Mask normal = (magnitude << 13) + (112 << 23);
  const Mask special = (magnitude << 13) | 0x7f800000;
  const Mask subnormal = (Mask)(__builtin_convertvector(magnitude, Vec) * splat(0x1p-24f));
  const Mask is_special = magnitude >= 0x7c00;
  const Mask is_subnormal = magnitude < 0x400;
  const Mask finite = (subnormal & is_subnormal) | (normal & ~is_subnormal);
  return (Vec)((special & is_special) | (finite & ~is_special) | ((bits & 0x8000) << 16));
}
JAXINFER_INLINE Vec load_bf16(const uint16_t* p) {
  const Mask bits = {p[0], p[1], p[2], p[3]};
  return (Vec)(bits << 16);
}

#endif

// out[i] = sum of the lanes of the i-th vector, i < 4; always the same order of additions.
JAXINFER_INLINE void store_sums(float* out, Vec a, Vec b, Vec c, Vec d) {
#if JAXINFER_VEC_WIDTH > 4
  const __m256 fa = fold(a), fb = fold(b), fc = fold(c), fd = fold(d);
  // Half the shuffles that three horizontal additions would be split into.
  const __m256 ab = _mm256_add_ps(_mm256_unpacklo_ps(fa, fb), _mm256_unpackhi_ps(fa, fb));
  const __m256 cd = _mm256_add_ps(_mm256_unpacklo_ps(fc, fd), _mm256_unpackhi_ps(fc, fd));
  const __m256 abcd = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, _MM_SHUFFLE(1, 0, 1, 0)),
                                    _mm256_shuffle_ps(ab, cd, _MM_SHUFFLE(3, 2, 3, 2)));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps(abcd, 1)));
#else
  const Vec vectors[4] = {a, b, c, d};
  for (int32_t i = 0; i < 4; ++i) {
    out[i] = (vectors[i][0] + vectors[i][1]) + (vectors[i][2] + vectors[i][3]);
  }
#endif
}

JAXINFER_INLINE float reduce_add(Vec a) {
  float sums[4];
  store_sums(sums, a, a, a, a);
  return sums[0];
}

JAXINFER_INLINE float first_lane(Vec a) {
#if JAXINFER_VEC_WIDTH == 16
  return _mm512_cvtss_f32(a);
#elif JAXINFER_VEC_WIDTH == 8
  return _mm256_cvtss_f32(a);
#else
  return a[0];
#endif
}

}  // namespace jaxinfer::cpu::JAXINFER_ISA
