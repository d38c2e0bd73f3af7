// The two matrix products of a KV block, register-blocked: Q K^T over groups of rows and four columns, and P
// V over groups of rows and up to four vectors of the head dimension. Every element is summed in the same
// order whatever the blocking is, so a row's bits do not depend on its neighbours.
#pragma once

#include <cstdint>

#include "cpu/elements.h"
#include "cpu/kernels.h"

namespace jaxinfer::cpu::JAXINFER_ISA {

// s[r][c] = q[r] . k[c] for columns [begin, end), multiples of 4; rows of s are kBlockKV apart.
template <int32_t kRows>
inline void dot_rows(const float* q, int64_t q_stride, const float* const* k, int32_t begin, int32_t end,
                     int32_t vecs, float* s) {
  for (int32_t c = begin; c < end; c += 4) {
    const float* k0 = k[c];
    const float* k1 = k[c + 1];
    const float* k2 = k[c + 2];
    const float* k3 = k[c + 3];
    Vec sums[kRows][4];
#pragma GCC unroll 4
    for (int32_t r = 0; r < kRows; ++r) {
      sums[r][0] = sums[r][1] = sums[r][2] = sums[r][3] = zero();
    }
    for (int32_t i = 0; i < vecs; ++i) {
      Vec x[kRows];
#pragma GCC unroll 4
      for (int32_t r = 0; r < kRows; ++r) x[r] = load(q + r * q_stride + i * kWidth);
      const float* columns[4] = {k0, k1, k2, k3};
#pragma GCC unroll 4
      for (int32_t n = 0; n < 4; ++n) {
        const Vec y = load(columns[n] + i * kWidth);
#pragma GCC unroll 4
        for (int32_t r = 0; r < kRows; ++r) sums[r][n] = fma(x[r], y, sums[r][n]);
      }
    }
#pragma GCC unroll 4
    for (int32_t r = 0; r < kRows; ++r) {
      store_sums(s + r * kBlockKV + c, sums[r][0], sums[r][1], sums[r][2], sums[r][3]);
    }
  }
}

// o[r] = o[r] * factor[r] + sum of p[r][c] * v[c] over columns [begin, end), for kVecs vectors at dimension
// d. The block is summed on its own first, which keeps the rounding error of long rows near that of a block.
template <int32_t kRows, int32_t kVecs>
JAXINFER_INLINE void add_weighted(const float* p, const float* factor, const float* const* v, int32_t begin,
                                  int32_t end, int32_t d, float* o, int64_t o_stride) {
  Vec sums[kRows][kVecs];
#pragma GCC unroll 4
  for (int32_t r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int32_t i = 0; i < kVecs; ++i) sums[r][i] = zero();
  }
  for (int32_t c = begin; c < end; ++c) {
    const float* row = v[c] + d;
    Vec weight[kRows];
#pragma GCC unroll 4
    for (int32_t r = 0; r < kRows; ++r) weight[r] = splat(p[r * kBlockKV + c]);
#pragma GCC unroll 4
    for (int32_t i = 0; i < kVecs; ++i) {
      const Vec y = load(row + i * kWidth);
#pragma GCC unroll 4
      for (int32_t r = 0; r < kRows; ++r) sums[r][i] = fma(weight[r], y, sums[r][i]);
    }
  }
#pragma GCC unroll 4
  for (int32_t r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int32_t i = 0; i < kVecs; ++i) {
      float* at = o + r * o_stride + d + i * kWidth;
      store(at, fma(load(at), splat(factor[r]), sums[r][i]));
    }
  }
}

template <int32_t kRows>
inline void add_weighted_rows(const float* p, const float* factor, const float* const* v, int32_t begin,
                              int32_t end, int32_t vecs, float* o, int64_t o_stride) {
  int32_t i = 0;
  for (; i + 4 <= vecs; i += 4) {
    add_weighted<kRows, 4>(p, factor, v, begin, end, i * kWidth, o, o_stride);
  }
  if (vecs - i >= 2) {
    add_weighted<kRows, 2>(p, factor, v, begin, end, i * kWidth, o, o_stride);
    i += 2;
  }
  if (i < vecs) add_weighted<kRows, 1>(p, factor, v, begin, end, i * kWidth, o, o_stride);
}

// The same for one row that must not touch columns it does not see, because their V is not finite: 0 * inf is
// NaN.
inline void add_visible(const float* p, float factor, const float* const* v, uint64_t visible, int32_t vecs,
                        float* o) {
  for (int32_t i = 0; i < vecs; ++i) {
    const int32_t d = i * kWidth;
    Vec sum = zero();
    for (uint64_t left = visible; left != 0; left &= left - 1) {
      const int32_t c = __builtin_ctzll(left);
      sum = fma(splat(p[c]), load(v[c] + d), sum);
    }
    store(o + d, fma(load(o + d), splat(factor), sum));
  }
}

inline bool all_finite(const float* row, int32_t vecs) {
  Vec sum = zero();
  for (int32_t i = 0; i < vecs; ++i) sum = fma(load(row + i * kWidth), zero(), sum);
  return reduce_add(sum) == 0.0f;
}

}  // namespace jaxinfer::cpu::JAXINFER_ISA
