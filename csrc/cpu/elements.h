// Element types of q, K, V and o: how rows of them become float rows and back. Sums stay in float32
// everywhere.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/vec.h"

namespace jaxinfer::cpu::JAXINFER_ISA {

JAXINFER_INLINE uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}
JAXINFER_INLINE float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

struct F32 {
  using Storage = float;
  static constexpr bool kIsFloat = true;
  static JAXINFER_INLINE Vec load_vec(const Storage* p) { return load(p); }
  static JAXINFER_INLINE float to_float(Storage x) { return x; }
  static JAXINFER_INLINE Storage from_float(float x) { return x; }
};

struct F16 {
  using Storage = uint16_t;
  static constexpr bool kIsFloat = false;
  static JAXINFER_INLINE Vec load_vec(const Storage* p) { return load_f16(p); }
  static JAXINFER_INLINE float to_float(Storage x) {
    const uint32_t sign = uint32_t{x} >> 15 << 31;
    const uint32_t magnitude = uint32_t{x} & 0x7fff;
    if (magnitude >= 0x7c00u) return float_of(sign | 0x7f800000u | magnitude << 13);
    if (magnitude >= 0x400u) return float_of(sign | ((magnitude << 13) + (112u << 23)));
    return float_of(sign | bits_of(static_cast<float>(magnitude) * 0x1p-24f));
  }
  // Rounds to nearest even; beyond 65504 (after rounding) becomes infinity.
  static JAXINFER_INLINE Storage from_float(float x) {
    const uint32_t sign = bits_of(x) >> 16 & 0x8000u;
    uint32_t magnitude = bits_of(x) & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return static_cast<Storage>(sign | 0x7e00u);
    if (magnitude >= 0x47800000u) return static_cast<Storage>(sign | 0x7c00u);  // 65536 and more
    if (magnitude < 0x38800000u) {
      // Below 2^-14 the spacing is 2^-24, which is that of floats in [0.5, 1): the addition rounds.
      return static_cast<Storage>(sign | (bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u));
    }
    magnitude += 0xfffu + (magnitude >> 13 & 1u);
    return static_cast<Storage>(sign | ((magnitude - (112u << 23)) >> 13));
  }
};

struct BF16 {
  using Storage = uint16_t;
  static constexpr bool kIsFloat = false;
  static JAXINFER_INLINE Vec load_vec(const Storage* p) { return load_bf16(p); }
  static JAXINFER_INLINE float to_float(Storage x) { return float_of(uint32_t{x} << 16); }
  // Rounds to nearest even.
  static JAXINFER_INLINE Storage from_float(float x) {
    const uint32_t bits = bits_of(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<Storage>(bits >> 16 | 0x40u);
    return static_cast<Storage>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
  }
};

// Vectors of a scratch row of n floats; the lanes behind n are zero.
JAXINFER_INLINE int32_t num_vecs(int32_t n) {
  return (n + kWidth - 1) / kWidth;
}

// Writes n elements as floats and zeros up to a whole number of vectors.
template <class T>
JAXINFER_INLINE void load_row(const typename T::Storage* from, int32_t n, float* to) {
  int32_t d = 0;
  for (; d + kWidth <= n; d += kWidth) store(to + d, T::load_vec(from + d));
  if (d == n) return;
  store(to + d, zero());
  for (; d < n; ++d) to[d] = T::to_float(from[d]);
}

template <class T>
JAXINFER_INLINE void store_row(const float* from, int32_t n, typename T::Storage* to) {
  for (int32_t d = 0; d < n; ++d) to[d] = T::from_float(from[d]);
}

}  // namespace jaxinfer::cpu::JAXINFER_ISA
