// The end of an item in the warpgroup kernel: a consumer's rows of o and lse, or of a partial state, go from
// registers to global memory. How they came about is not here (attention_wgmma_consume.cuh).
#pragma once

#include "kernels/sm90_wgmma.cuh"
#include "kernels/softmax.cuh"
#include "kernels/variant.cuh"

namespace jaxinfer {

// The empty state in the partial slots of an item, by all threads of Config.
template <class Config, class Variant>
JAXINFER_DEVICE void write_empty_partial(const AttentionParams& params, const Item& item, int head) {
  const int group_size = params.group_divider.divisor;
  const int first_head = Config::kPacked ? head * group_size : head;
  const int num_heads = Config::kPacked ? group_size : 1;
  const int tokens = item.flags & 0xffff;
  for (int t = 0; t < tokens; ++t) {
    const int64_t row = int64_t{item.out + t} * params.num_qo_heads + first_head;
    // The heads of a token are neighbours.
    float* const o = params.partial_o + row * params.head_dim_vo;
#pragma unroll 1
    for (int i = threadIdx.x; i < num_heads * params.head_dim_vo; i += Config::kNumThreads) o[i] = 0.0f;
#pragma unroll 1
    for (int i = threadIdx.x; i < num_heads; i += Config::kNumThreads) {
      if constexpr (Variant::kSoftmax) params.partial_max[row + i] = -infinity();
      if constexpr (kFindsEmpty<Variant>) params.partial_sum[row + i] = 0.0f;
    }
  }
}

// Consumer knows its item and its rows; softmax and o are those of this thread.
template <class Config, class Variant, class Consumer>
class WgmmaStore {
  using Type = Element<Config::kDType>;
  static constexpr int kPieces = Config::kHeadDimVo / 8;

 public:
  JAXINFER_DEVICE WgmmaStore(const AttentionParams& params, const VariantOperands& operands,
                             const Consumer& consumer, const SoftmaxState<2>& softmax,
                             const float (&o)[4 * kPieces])
      : params_(params), operands_(operands), consumer_(consumer), softmax_(softmax), o_(o) {}

  // lse of this thread's rows, or the sums of a partial state.
  JAXINFER_DEVICE void write_sums() {
    const auto rows = consumer_.rows();
    const Item& item = consumer_.item();
    final_ = item.out < 0;
    const int first = final_ ? item.token_begin : item.out;  // among the tokens, or the slots
    const int num_rows = rows.num_rows();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = consumer_.tile_row(r);
      real_[r] = i < num_rows;
      place_[r] = int64_t{first + rows.token(i)} * params_.num_qo_heads + rows.qo_head(i);
      const bool writes = real_[r] && (consumer_.lane() & 3) == 0;
      const float l = kFindsEmpty<Variant> ? quad_sum(softmax_.l[r]) : 1.0f;
      empty_[r] = l == 0.0f;
      inverse_[r] = 1.0f;
      if constexpr (Variant::kSoftmax) {
        const float m = softmax_.m[r];
        const float largest = empty_[r] ? -infinity() : m * consumer_.max_scale();
        if (final_) {
          // A row that saw nothing has o = 0 exactly, whatever its sums hold.
          inverse_[r] = empty_[r] ? 0.0f : reciprocal(l);
          if (writes) params_.lse[place_[r]] = natural_lse(largest, l);
        } else {
          if (!empty_[r]) {
            inverse_[r] = partial_factor(m, consumer_.scale(), consumer_.max_scale(), largest);
          }
          if (writes) {
            params_.partial_max[place_[r]] = largest;
            params_.partial_sum[place_[r]] = l * inverse_[r];
          }
        }
      } else if constexpr (kFindsEmpty<Variant>) {
        if (writes && !final_) params_.partial_sum[place_[r]] = l;
      }
    }
  }

  // This thread's rows of o, final or partial ones in float32.
  JAXINFER_DEVICE void write_output() const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // The four lanes of a row stay together.
      if (final_) {
        store_final(r);
      } else if (real_[r]) {
        float* const to = params_.partial_o + place_[r] * params_.head_dim_vo + 2 * (consumer_.lane() & 3);
#pragma unroll
        for (int j = 0; j < kPieces; ++j) {
          if (8 * j < params_.head_dim_vo) {
            *reinterpret_cast<float2*>(to + 8 * j) =
                make_float2(o_[4 * j + 2 * r] * inverse_[r], o_[4 * j + 2 * r + 1] * inverse_[r]);
          }
        }
      }
    }
  }

 private:
  // One row of o. Four lanes hold two columns each of every piece of eight; they exchange them so that each
  // writes 16 bytes at once.
  JAXINFER_DEVICE void store_final(int r) const {
    const int quarter = consumer_.lane() & 3;
    const bool real = real_[r];
    uint16_t* const to = static_cast<uint16_t*>(params_.o) + place_[r] * params_.head_dim_vo + 8 * quarter;
    const Row row = Variant::kOutput && real ? consumer_.make_row(consumer_.tile_row(r)) : Row{};
#pragma unroll
    for (int j = 0; j < kPieces; j += 4) {
      uint32_t x[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float pair[2] = {o_[4 * (j + e) + 2 * r] * inverse_[r], o_[4 * (j + e) + 2 * r + 1] * inverse_[r]};
        if constexpr (Variant::kOutput) {
          const int column = 8 * (j + e) + 2 * quarter;
          if (real && !empty_[r] && column < params_.head_dim_vo)
            Variant(params_, operands_, row).output(pair, column, row);
        }
        x[e] = Type::pack_pair(pair[0], pair[1]);
      }
      exchange(x, quarter & 1, 1, 0, 1, 2, 3);
      exchange(x, quarter >> 1, 2, 0, 2, 1, 3);
      if (real && 8 * (j + quarter) < params_.head_dim_vo) {
        *reinterpret_cast<uint4*>(to + 8 * j) = make_uint4(x[0], x[1], x[2], x[3]);
      }
    }
  }
  // A step of a transposition between lanes that differ in bit `mask`: `upper` lanes give their a and c for
  // the others' b and d.
  static JAXINFER_DEVICE void exchange(uint32_t (&x)[4], int upper, int mask, int a, int b, int c, int d) {
    const uint32_t first = __shfl_xor_sync(kFullWarp, upper != 0 ? x[a] : x[b], mask);
    const uint32_t second = __shfl_xor_sync(kFullWarp, upper != 0 ? x[c] : x[d], mask);
    x[a] = upper != 0 ? first : x[a];
    x[b] = upper != 0 ? x[b] : first;
    x[c] = upper != 0 ? second : x[c];
    x[d] = upper != 0 ? x[d] : second;
  }

  const AttentionParams& params_;
  const VariantOperands& operands_;
  const Consumer& consumer_;
  const SoftmaxState<2>& softmax_;
  const float (&o_)[4 * kPieces];
  bool final_;        // not a partial state
  bool real_[2];      // rows of the item
  bool empty_[2];     // rows that saw nothing
  int64_t place_[2];  // of the rows among those of all tokens, or of all slots
  float inverse_[2];  // of the rows' sums
};

}  // namespace jaxinfer
