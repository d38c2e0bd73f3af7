// The two matrix products of a KV block, register-blocked: Q K^T over groups of rows and four columns, and P
// V over groups of rows and up to four vectors of the head dimension. Every element is summed in the same
// order whatever the blocking is, so a row's bits do not depend on its neighbours.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/elements.h"
#include "cpu/kernels.h"

namespace jaxinfer::cpu::JAXINFER_ISA {

// Rows that the next block will read, fetched into the cache while this one is computed: pages are scattered,
// and the hardware follows no stream from one to the next. `rows` is null where nothing is to be fetched.
struct Ahead {
  const char* const* rows;  // [kBlockKV]
  int64_t offset;           // bytes into each row
  int32_t bytes;            // to fetch of each row

  JAXINFER_INLINE void fetch(int32_t column) const {
    for (int32_t i = 0; i < bytes; i += 64) __builtin_prefetch(rows[column] + offset + i);
  }
};

// Sums that fit in vector registers beside their operands.
#if JAXINFER_VEC_WIDTH == 16 || defined(__aarch64__)
constexpr int32_t kSums = 16;
#else
constexpr int32_t kSums = 12;
#endif

// s[r][c] = q[r] . k[c] for columns [begin, end), multiples of 4; rows of s are kBlockKV apart. K is read
// `offset` elements into each row.
template <class T, int32_t kRows>
JAXINFER_INLINE void dot_rows(const float* q, int64_t q_stride, const typename T::Storage* const* k,
                              int64_t offset, int32_t begin, int32_t end, int32_t vecs, const Ahead& ahead,
                              float* s) {
  constexpr int32_t kColumns = kRows * 4 <= kSums ? 4 : 2;
  for (int32_t c = begin; c < end; c += kColumns) {
    if (ahead.rows != nullptr) {
      for (int32_t n = 0; n < kColumns; ++n) ahead.fetch(c + n);
    }
    const typename T::Storage* columns[kColumns];
    Vec sums[kRows][kColumns];
#pragma GCC unroll 4
    for (int32_t n = 0; n < kColumns; ++n) {
      columns[n] = k[c + n] + offset;
#pragma GCC unroll 4
      for (int32_t r = 0; r < kRows; ++r) sums[r][n] = zero();
    }
    for (int32_t i = 0; i < vecs; ++i) {
      Vec x[kRows];
#pragma GCC unroll 4
      for (int32_t r = 0; r < kRows; ++r) x[r] = load(q + r * q_stride + i * kWidth);
#pragma GCC unroll 4
      for (int32_t n = 0; n < kColumns; ++n) {
        const Vec y = T::load_vec(columns[n] + i * kWidth);
#pragma GCC unroll 4
        for (int32_t r = 0; r < kRows; ++r) sums[r][n] = fma(x[r], y, sums[r][n]);
      }
    }
    if constexpr (kColumns == 4) {
#pragma GCC unroll 4
      for (int32_t r = 0; r < kRows; ++r) {
        store_sums(s + r * kBlockKV + c, sums[r][0], sums[r][1], sums[r][2], sums[r][3]);
      }
    } else {
#pragma GCC unroll 2
      for (int32_t r = 0; r < kRows; r += 2) {
        float pair[4];
        store_sums(pair, sums[r][0], sums[r][1], sums[r + 1][0], sums[r + 1][1]);
        std::memcpy(s + r * kBlockKV + c, pair, 2 * sizeof(float));
        std::memcpy(s + (r + 1) * kBlockKV + c, pair + 2, 2 * sizeof(float));
      }
    }
  }
}

// The operands of o[r] = o[r] * factor[r] + sum of p[r][c] * v[c] over columns [begin, end). The block is
// summed on its own first, which keeps the rounding error of long rows near that of a block.
template <class T>
struct Weighted {
  const float* p;                       // [kRows, kBlockKV]
  const float* factor;                  // [kRows]
  const typename T::Storage* const* v;  // [kBlockKV] rows, to be read `offset` elements into each
  int64_t offset;
  int32_t begin;
  int32_t end;
  int32_t stripe;  // columns that are finished for all dimensions before the next are read
  float* o;        // [kRows, o_stride]
  int64_t o_stride;
};

// Columns [begin, end) of the block for kVecs vectors at dimension d. Sums of stripes before the last wait in
// `waiting`, [kRows, kMaxHeadDim].
template <class T, int32_t kRows, int32_t kVecs>
JAXINFER_INLINE void add_weighted(const Weighted<T>& w, int32_t begin, int32_t end, int32_t d,
                                  const Ahead& ahead, float* waiting) {
  Vec sums[kRows][kVecs];
#pragma GCC unroll 4
  for (int32_t r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int32_t i = 0; i < kVecs; ++i) {
      sums[r][i] = begin == w.begin ? zero() : load(waiting + r * kMaxHeadDim + d + i * kWidth);
    }
  }
  for (int32_t c = begin; c < end; ++c) {
    if (ahead.rows != nullptr && d == 0) ahead.fetch(c);
    const typename T::Storage* row = w.v[c] + (w.offset + d);
    Vec weight[kRows];
#pragma GCC unroll 4
    for (int32_t r = 0; r < kRows; ++r) weight[r] = splat(w.p[r * kBlockKV + c]);
#pragma GCC unroll 4
    for (int32_t i = 0; i < kVecs; ++i) {
      const Vec y = T::load_vec(row + i * kWidth);
#pragma GCC unroll 4
      for (int32_t r = 0; r < kRows; ++r) sums[r][i] = fma(weight[r], y, sums[r][i]);
    }
  }
#pragma GCC unroll 4
  for (int32_t r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int32_t i = 0; i < kVecs; ++i) {
      float* at = w.o + r * w.o_stride + d + i * kWidth;
      if (end == w.end) {
        store(at, fma(load(at), splat(w.factor[r]), sums[r][i]));
      } else {
        store(waiting + r * kMaxHeadDim + d + i * kWidth, sums[r][i]);
      }
    }
  }
}

template <class T, int32_t kRows>
JAXINFER_INLINE void add_weighted_rows(const Weighted<T>& w, int32_t vecs, const Ahead& ahead) {
  alignas(64) float waiting[kRows * kMaxHeadDim];
  for (int32_t c = w.begin; c < w.end; c += w.stripe) {
    const int32_t end = w.end - c < w.stripe ? w.end : c + w.stripe;
    int32_t i = 0;
    if constexpr (kRows * 4 <= kSums) {
      for (; i + 4 <= vecs; i += 4) add_weighted<T, kRows, 4>(w, c, end, i * kWidth, ahead, waiting);
    }
    for (; i + 2 <= vecs; i += 2) add_weighted<T, kRows, 2>(w, c, end, i * kWidth, ahead, waiting);
    if (i < vecs) add_weighted<T, kRows, 1>(w, c, end, i * kWidth, ahead, waiting);
  }
}

// The same for one row that must not touch columns it does not see, because their V is not finite: 0 * inf is
// NaN.
template <class T>
inline void add_visible(const float* p, float factor, const typename T::Storage* const* v, int64_t offset,
                        uint64_t visible, int32_t vecs, float* o) {
  for (int32_t i = 0; i < vecs; ++i) {
    const int32_t d = i * kWidth;
    Vec sum = zero();
    for (uint64_t left = visible; left != 0; left &= left - 1) {
      const int32_t c = __builtin_ctzll(left);
      sum = fma(splat(p[c]), T::load_vec(v[c] + (offset + d)), sum);
    }
    store(o + d, fma(load(o + d), splat(factor), sum));
  }
}

template <class T>
inline bool all_finite(const typename T::Storage* row, int32_t vecs) {
  Vec sum = zero();
  for (int32_t i = 0; i < vecs; ++i) sum = fma(T::load_vec(row + i * kWidth), zero(), sum);
  return reduce_add(sum) == 0.0f;
}

}  // namespace jaxinfer::cpu::JAXINFER_ISA
