// The loop over an item: its rows against its KV blocks, with the online softmax in between, and the store of
// the result as final output or partial state.
#pragma once

#include <cmath>
#include <cstdint>

#include "cpu/products.h"
#include "cpu/softmax.h"

namespace jaxinfer::cpu::JAXINFER_ISA {

// With more rows than this to a KV head, rows of K and V are first copied together as floats: 16-bit rows
// would be converted once per row group, and in a cache with a power-of-two stride all rows compete for the
// same few cache sets.
template <class T>
constexpr int32_t kMaxRowsInPlace = T::kIsFloat ? 8 : 4;

// What one turn computes: tokens [token, token + num_tokens) for KV heads [kv_head, kv_head + num_kv_heads),
// each with `heads` query heads that follow one another from first_head. Rows are ordered by KV head, token,
// query head.
struct Rows {
  int64_t token;
  int32_t num_tokens;
  int32_t kv_head;
  int32_t num_kv_heads;
  int32_t first_head;
  int32_t heads;

  int32_t per_kv_head() const { return num_tokens * heads; }
};

template <class T>
class Tile {
 public:
  using Storage = typename T::Storage;

  Tile(const AttentionParams& params, const Item& item, const Rows& rows, float* scratch)
      : p_(params),
        item_(item),
        rows_(rows),
        source_(make_source<Storage>(params, item, rows.kv_head)),
        logits_(params.variant),
        softmax_(params.variant.on(kRuleSoftmax)),
        in_place_(rows.per_kv_head() <= kMaxRowsInPlace<T> && params.head_dim_qk % kWidth == 0 &&
                  params.head_dim_vo % kWidth == 0),
        stripe_(in_place_ && same_sets(params.v_strides.token) ? 8 : kBlockKV),
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
    if (first < item_.kv_end) source_.gather(first, next_);
    for (int64_t begin = first; begin < item_.kv_end; begin += kBlockKV) {
      KvBlock<Storage>* free = block_;
      block_ = next_;
      next_ = free;
      has_next_ = begin + kBlockKV < item_.kv_end;
      if (has_next_) source_.gather(begin + kBlockKV, next_);
      if (!look()) continue;
      for (int32_t h = 0; h < rows_.num_kv_heads; ++h) {
        if (in_place_) {
          step<T>(point(h), h);
        } else {
          step<F32>(copy(h), h);
        }
      }
    }
    finish();
  }

 private:
  // K and V rows of one block and KV head: column c lies `k_offset` elements behind k[c].
  template <class S>
  struct Columns {
    const typename S::Storage* const* k;  // [kBlockKV]
    const typename S::Storage* const* v;  // [kBlockKV]
    int64_t k_offset;
    int64_t v_offset;
  };

  // Rows that many elements apart fall on the same few sets of an L1 cache (64 sets of 64 bytes, 8 ways): no
  // more than 8 of them can be kept for another pass.
  static bool same_sets(int64_t stride) { return stride * static_cast<int64_t>(sizeof(Storage)) % 2048 == 0; }

  void start() {
    int32_t r = 0;
    for (int32_t k = 0; k < rows_.num_kv_heads; ++k) {
      for (int32_t t = 0; t < rows_.num_tokens; ++t) {
        const int64_t head = rows_.first_head + int64_t{k} * rows_.heads;
        const Storage* q =
            static_cast<const Storage*>(p_.q) + ((rows_.token + t) * p_.num_qo_heads + head) * p_.head_dim_qk;
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
  }

  // Finds what each token sees of the block; false if none sees anything.
  bool look() {
    seen_ = 0;
    uint64_t by_all = ~uint64_t{0};
    for (int32_t t = 0; t < rows_.num_tokens; ++t) {
      visible_[t] = visible_columns(p_, item_, *block_, rows_.token + t);
      seen_ |= visible_[t];
      by_all &= visible_[t];
    }
    seen_by_some_ = seen_ & ~by_all;
    return seen_ != 0;
  }

  // Rows where they lie in the cache. Columns that no token sees become zero rows and are not read.
  Columns<T> point(int32_t h) {
    const int64_t k_offset = h * p_.k_strides.head;
    const int64_t v_offset = h * p_.v_strides.head;
    if (seen_ == ~uint64_t{0}) return {block_->k, block_->v, k_offset, v_offset};
    for (int32_t c = 0; c < kBlockKV; ++c) {
      const bool seen = (seen_ >> c & 1) != 0;
      k_in_place_[c] = seen ? block_->k[c] + k_offset : zero_row<Storage>();
      v_in_place_[c] = seen ? block_->v[c] + v_offset : zero_row<Storage>();
    }
    return {k_in_place_, v_in_place_, 0, 0};
  }

  // The same as float rows in scratch memory.
  Columns<F32> copy(int32_t h) {
    for (int32_t c = 0; c < kBlockKV; ++c) {
      if ((seen_ >> c & 1) == 0) {
        k_copied_[c] = v_copied_[c] = kZeroRow;
        continue;
      }
      load_row<T>(block_->k[c] + h * p_.k_strides.head, p_.head_dim_qk, k_ + c * qk_stride_);
      load_row<T>(block_->v[c] + h * p_.v_strides.head, p_.head_dim_vo, v_ + c * vo_stride_);
      k_copied_[c] = k_ + c * qk_stride_;
      v_copied_[c] = v_ + c * vo_stride_;
    }
    return {k_copied_, v_copied_, 0, 0};
  }

  // Rows of the next block for the same KV head.
  Ahead ahead(const Storage* const* rows, int32_t head_dim, int64_t offset) const {
    const int64_t size = sizeof(Storage);
    return {has_next_ ? reinterpret_cast<const char* const*>(rows) : nullptr, offset * size,
            static_cast<int32_t>(head_dim * size)};
  }

  // Adds the block to the rows of KV head h.
  template <class S>
  void step(const Columns<S>& columns, int32_t h) {
    bool finite = true;  // V of the columns that not all tokens see
    for (uint64_t left = seen_by_some_; left != 0 && finite; left &= left - 1) {
      finite = all_finite<S>(columns.v[__builtin_ctzll(left)] + columns.v_offset, vo_vecs_);
    }
    Ahead k = ahead(next_->k, p_.head_dim_qk, h * p_.k_strides.head);
    Ahead v = ahead(next_->v, p_.head_dim_vo, h * p_.v_strides.head);
    int32_t r = h * rows_.per_kv_head();
    const int32_t end = r + rows_.per_kv_head();
    // Three rows use the registers best where only 12 sums fit, four where 16 do; no row is left over alone,
    // which would keep too few sums in flight.
    constexpr int32_t kGroup = kSums / 4;
    while (r < end) {
      const int32_t left = end - r;
      const int32_t rows = left <= 4 ? left : (left == kGroup + 1 ? 2 : kGroup);
      switch (rows) {
        case 4:
          step_group<S, 4>(columns, r, finite, k, v);
          break;
        case 3:
          step_group<S, 3>(columns, r, finite, k, v);
          break;
        case 2:
          step_group<S, 2>(columns, r, finite, k, v);
          break;
        default:
          step_group<S, 1>(columns, r, finite, k, v);
          break;
      }
      k.rows = v.rows = nullptr;
      r += rows;
    }
  }

  template <class S, int32_t kRows>
  void step_group(const Columns<S>& columns, int32_t row, bool finite, const Ahead& ahead_k,
                  const Ahead& ahead_v) {
    uint64_t seen = 0;
    for (int32_t r = 0; r < kRows; ++r) seen |= visible_[token_of_[row + r]];
    if (seen == 0) return;
    const int32_t begin = __builtin_ctzll(seen) / kWidth * kWidth;
    const int32_t end = (64 - __builtin_clzll(seen) + kWidth - 1) / kWidth * kWidth;
    alignas(64) float s[kRows * kBlockKV];
    float factor[kRows];
    dot_rows<S, kRows>(q_ + row * qk_stride_, qk_stride_, columns.k, columns.k_offset, begin, end, qk_vecs_,
                       ahead_k, s);
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
    if (finite) {
      const Weighted<S> weighted = {s,   factor,  columns.v, columns.v_offset, begin,
                                    end, stripe_, o,         vo_stride_};
      add_weighted_rows<S, kRows>(weighted, vo_vecs_, ahead_v);
      return;
    }
    for (int32_t r = 0; r < kRows; ++r) {
      add_visible<S>(s + r * kBlockKV, factor[r], columns.v, columns.v_offset, visible_[token_of_[row + r]],
                     vo_vecs_, o + r * vo_stride_);
    }
  }

  void finish() {
    for (int32_t r = 0; r < rows_.num_kv_heads * rows_.per_kv_head(); ++r) {
      const int64_t t = token_of_[r];
      const int64_t head = rows_.first_head + r / rows_.per_kv_head() * rows_.heads + r % rows_.heads;
      float* o = o_ + r * vo_stride_;
      if (item_.out < 0) {
        const float lse = normalise(o, sum_[r], max_[r]);
        const int64_t at = (rows_.token + t) * p_.num_qo_heads + head;
        store_row<T>(o, p_.head_dim_vo, static_cast<Storage*>(p_.o) + at * p_.head_dim_vo);
        p_.lse[at] = lse;
      } else {
        const int64_t slot = item_.out + (rows_.token - item_.token_begin) + t;
        const int64_t at = slot * p_.num_qo_heads + head;
        store_row<F32>(o, p_.head_dim_vo, p_.partial_o + at * p_.head_dim_vo);
        p_.partial_max[at] = max_[r];
        p_.partial_sum[at] = sum_[r];
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
  const bool in_place_;      // K and V are read where they lie
  const int32_t stripe_;     // Weighted::stripe
  const int64_t qk_stride_;  // floats between scratch rows
  const int64_t vo_stride_;
  const int32_t qk_vecs_;
  const int32_t vo_vecs_;

  float* q_;  // [kMaxRows, qk_stride_]
  float* o_;  // [kMaxRows, vo_stride_] weighted sums, not divided
  float* k_;  // [kBlockKV, qk_stride_] rows of the block where they are not read in place
  float* v_;  // [kBlockKV, vo_stride_]

  KvBlock<Storage> blocks_[2];
  KvBlock<Storage>* block_ = &blocks_[0];  // the block being computed
  KvBlock<Storage>* next_ = &blocks_[1];   // the one after it, if has_next_
  bool has_next_ = false;
  const Storage* k_in_place_[kBlockKV];
  const Storage* v_in_place_[kBlockKV];
  const float* k_copied_[kBlockKV];
  const float* v_copied_[kBlockKV];
  uint64_t seen_;               // columns that some token sees
  uint64_t seen_by_some_;       // of these, the columns that not all tokens see
  uint64_t visible_[kMaxRows];  // [num_tokens] columns that each token sees
  uint8_t token_of_[kMaxRows];  // [rows] token of each row, counted from rows_.token
  float max_[kMaxRows];         // [rows]
  float sum_[kMaxRows];         // [rows]
};

}  // namespace jaxinfer::cpu::JAXINFER_ISA
