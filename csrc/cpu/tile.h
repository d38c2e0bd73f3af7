// The loop over an item: its rows against its KV blocks, with the online softmax in between, and the store of
// the result as final output or partial state.
#pragma once

#include <cmath>
#include <cstdint>

#include "cpu/products.h"
#include "cpu/softmax.h"

namespace jaxinfer::cpu::JAXINFER_ISA {

// Rows of a group: as many as fit in registers beside four columns or four vectors of V.
#if JAXINFER_VEC_WIDTH == 16 || defined(__aarch64__)
constexpr int32_t kRowGroup = 4;
#else
constexpr int32_t kRowGroup = 3;
#endif
static_assert(kRowGroup <= kMaxRowGroup, "scratch holds the logits of one row group");

// With more rows than this, rows of K and V are copied together before they are read again and again: in a
// cache with a power-of-two stride they would all compete for the same few cache sets.
constexpr int32_t kMaxRowsInPlace = 8;

// What masked columns are read as.
alignas(64) static const float kZeroRow[kMaxHeadDim] = {};

// Query rows of an item: tokens [token, token + num_tokens) times the query heads [first_head, + heads).
struct Rows {
  int64_t token;
  int32_t num_tokens;
  int32_t first_head;
  int32_t heads;

  int32_t count() const { return num_tokens * heads; }
};

template <class T>
class Tile {
 public:
  using Storage = typename T::Storage;

  Tile(const AttentionParams& params, const Item& item, const Rows& rows, int32_t kv_head, float* scratch)
      : p_(params),
        item_(item),
        rows_(rows),
        source_(make_source<Storage>(params, item, kv_head)),
        logits_(params.variant),
        softmax_(params.variant.on(kRuleSoftmax)),
        qk_stride_(padded(params.head_dim_qk)),
        vo_stride_(padded(params.head_dim_vo)),
        qk_vecs_(num_vecs(params.head_dim_qk)),
        vo_vecs_(num_vecs(params.head_dim_vo)) {
    q_ = scratch;
    o_ = q_ + int64_t{kMaxRows} * qk_stride_;
    k_ = o_ + int64_t{kMaxRows} * vo_stride_;
    v_ = k_ + int64_t{kBlockKV} * qk_stride_;
  }

  void run() {
    start();
    const int64_t first = int64_t{item_.kv_begin} / kBlockKV * kBlockKV;
    for (int64_t begin = first; begin < item_.kv_end; begin += kBlockKV) {
      source_.gather(begin, &block_);
      if (look()) {
        fetch();
        step();
      }
    }
    finish();
  }

 private:
  void start() {
    for (int32_t r = 0, t = 0; t < rows_.num_tokens; ++t) {
      const Storage* q = static_cast<const Storage*>(p_.q) +
                         ((rows_.token + t) * p_.num_qo_heads + rows_.first_head) * p_.head_dim_qk;
      for (int32_t h = 0; h < rows_.heads; ++h, ++r) {
        load_row<T>(q + int64_t{h} * p_.head_dim_qk, p_.head_dim_qk, q_ + r * qk_stride_);
        float* o = o_ + r * vo_stride_;
        for (int32_t i = 0; i < vo_vecs_; ++i) store(o + i * kWidth, zero());
        token_of_[r] = static_cast<uint8_t>(t);
        max_[r] = -INFINITY;
        sum_[r] = 0.0f;
      }
    }
  }

  // Finds what each token sees of the block; false if none sees anything.
  bool look() {
    seen_ = 0;
    uint64_t by_all = ~uint64_t{0};
    for (int32_t t = 0; t < rows_.num_tokens; ++t) {
      visible_[t] = visible_columns(p_, item_, block_, rows_.token + t);
      seen_ |= visible_[t];
      by_all &= visible_[t];
    }
    seen_by_some_ = seen_ & ~by_all;
    return seen_ != 0;
  }

  // Makes float rows of the columns that some token sees; other columns become zero rows and are not read.
  void fetch() {
    const bool in_place = T::kIsFloat && rows_.count() <= kMaxRowsInPlace && p_.head_dim_qk % kWidth == 0 &&
                          p_.head_dim_vo % kWidth == 0;
    for (int32_t c = 0; c < kBlockKV; ++c) {
      if ((seen_ >> c & 1) == 0) {
        k_rows_[c] = v_rows_[c] = kZeroRow;
      } else if (in_place) {
        k_rows_[c] = reinterpret_cast<const float*>(block_.k[c]);
        v_rows_[c] = reinterpret_cast<const float*>(block_.v[c]);
      } else {
        load_row<T>(block_.k[c], p_.head_dim_qk, k_ + c * qk_stride_);
        load_row<T>(block_.v[c], p_.head_dim_vo, v_ + c * vo_stride_);
        k_rows_[c] = k_ + c * qk_stride_;
        v_rows_[c] = v_ + c * vo_stride_;
      }
    }
    v_finite_ = true;
    for (uint64_t left = seen_by_some_; left != 0 && v_finite_; left &= left - 1) {
      v_finite_ = all_finite(v_rows_[__builtin_ctzll(left)], vo_vecs_);
    }
  }

  void step() {
    const int32_t count = rows_.count();
    int32_t r = 0;
    for (; r + kRowGroup <= count; r += kRowGroup) step_group<kRowGroup>(r);
    switch (count - r) {
      case 3:
        return step_group<3>(r);
      case 2:
        return step_group<2>(r);
      case 1:
        return step_group<1>(r);
      default:
        return;
    }
  }

  template <int32_t kRows>
  void step_group(int32_t row) {
    uint64_t seen = 0;
    for (int32_t r = 0; r < kRows; ++r) seen |= visible_[token_of_[row + r]];
    if (seen == 0) return;
    const int32_t begin = __builtin_ctzll(seen) / kWidth * kWidth;
    const int32_t end = (64 - __builtin_clzll(seen) + kWidth - 1) / kWidth * kWidth;
    alignas(64) float s[kRows * kBlockKV];
    float factor[kRows];
    dot_rows<kRows>(q_ + row * qk_stride_, qk_stride_, k_rows_, begin, end, qk_vecs_, s);
    for (int32_t r = 0; r < kRows; ++r) {
      const uint64_t visible = visible_[token_of_[row + r]];
      if (softmax_) {
        factor[r] =
            softmax_row(logits_, visible, begin, end, s + r * kBlockKV, &max_[row + r], &sum_[row + r]);
      } else {
        weight_row(logits_, visible, begin, end, s + r * kBlockKV);
        factor[r] = 1.0f;
      }
    }
    float* o = o_ + row * vo_stride_;
    if (v_finite_) {
      add_weighted_rows<kRows>(s, factor, v_rows_, begin, end, vo_vecs_, o, vo_stride_);
      return;
    }
    for (int32_t r = 0; r < kRows; ++r) {
      add_visible(s + r * kBlockKV, factor[r], v_rows_, visible_[token_of_[row + r]], vo_vecs_,
                  o + r * vo_stride_);
    }
  }

  void finish() {
    for (int32_t r = 0; r < rows_.count(); ++r) {
      const int64_t t = token_of_[r];
      const int64_t head = rows_.first_head + r % rows_.heads;
      float* o = o_ + r * vo_stride_;
      const float lse = normalise(o, sum_[r], max_[r]);
      if (item_.out < 0) {
        const int64_t at = (rows_.token + t) * p_.num_qo_heads + head;
        store_row<T>(o, p_.head_dim_vo, static_cast<Storage*>(p_.o) + at * p_.head_dim_vo);
        p_.lse[at] = lse;
      } else {
        const int64_t slot = item_.out + (rows_.token - item_.token_begin) + t;
        const int64_t at = slot * p_.num_qo_heads + head;
        store_row<F32>(o, p_.head_dim_vo, p_.partial_o + at * p_.head_dim_vo);
        p_.partial_lse[at] = lse;
      }
    }
  }

  // Divides o by the sum and returns the row's lse. The added zero turns -0 into 0: the sign of a zero
  // depends on what masked columns hold. A true division: equal weights of ones must come out as exactly 1.
  float normalise(float* o, float sum, float max) const {
    const bool empty = softmax_ && sum == 0.0f;
    const Vec divisor = splat(softmax_ ? sum : 1.0f);
    for (int32_t i = 0; i < vo_vecs_; ++i) {
      const Vec x = empty ? zero() : add(div(load(o + i * kWidth), divisor), zero());
      store(o + i * kWidth, x);
    }
    if (!softmax_) return 0.0f;
    return empty ? -INFINITY : max + std::log(sum);
  }

  const AttentionParams& p_;
  const Item& item_;
  const Rows rows_;
  const KvSource<Storage> source_;
  const Logits logits_;
  const bool softmax_;
  const int64_t qk_stride_;  // floats between scratch rows
  const int64_t vo_stride_;
  const int32_t qk_vecs_;
  const int32_t vo_vecs_;

  float* q_;  // [kMaxRows, qk_stride_]
  float* o_;  // [kMaxRows, vo_stride_] weighted sums, not divided
  float* k_;  // [kBlockKV, qk_stride_] rows of the block where they cannot be read in place
  float* v_;  // [kBlockKV, vo_stride_]

  KvBlock<Storage> block_;
  const float* k_rows_[kBlockKV];
  const float* v_rows_[kBlockKV];
  uint64_t seen_;               // columns that some token sees
  uint64_t seen_by_some_;       // of these, the columns that not all tokens see
  bool v_finite_;               // no infinity or NaN in V of the columns that not all tokens see
  uint64_t visible_[kMaxRows];  // [num_tokens] columns that each token sees
  uint8_t token_of_[kMaxRows];  // [rows] token of each row, counted from rows_.token
  float max_[kMaxRows];         // [rows]
  float sum_[kMaxRows];         // [rows]
};

}  // namespace jaxinfer::cpu::JAXINFER_ISA
