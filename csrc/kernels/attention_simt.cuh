// Attention of a plan's items on CUDA cores: tile 1, one token per item, all types. The only kernel for
// float32. Every warp is a stream of its own: it takes blocks of eight KV tokens in turn, for up to eight
// query heads at once (items of more heads are visited several times), and the warps' states are merged at
// the end of the item.
//
// Inside a block, scores: lane i holds KV token i % 8 and a quarter of the head dim (chunks i / 8, i / 8 + 4,
// ...); sums of values: lanes hold 16-byte chunks of a V row, and where a row has fewer chunks than lanes,
// groups of lanes take different tokens.
#pragma once

#include "kernels/gather.cuh"
#include "kernels/softmax.cuh"
#include "kernels/variant.cuh"

namespace jaxinfer {

constexpr int kSimtMaxRows = 8;  // query heads of one visit

// What shared memory holds, in bytes from its start. kSmemBytes of jaxinfer/jit/tiles.py is the same sum.
template <class Config>
struct SimtSharedMemory {
  static constexpr int kQuery = 0;  // float [kSimtMaxRows, kHeadDimQk]
  static constexpr int kRing = kQuery + kSimtMaxRows * Config::kHeadDimQk * 4;
  // float [kStreams, kSimtMaxRows, kHeadDimVo]
  static constexpr int kMerge = kRing + RingShape<Config>::kBytes;
  static constexpr int kMergeState = kMerge + Config::kStreams * kSimtMaxRows * Config::kHeadDimVo * 4;
  static constexpr int kPosition = kMergeState + Config::kStreams * kSimtMaxRows * 8;
  static constexpr int kWarpStates = kPosition + RingShape<Config>::kPositionBytes;
  static constexpr int kPresent =
      kWarpStates + Config::kNumThreads / 32 * static_cast<int>(sizeof(WarpState));
  static constexpr int kBytes = kPresent + RingShape<Config>::kPresentBytes;
};

template <class Config, class Variant>
class SimtAttention {
  using Type = Element<Config::kDType>;
  using Shared = SimtSharedMemory<Config>;
  static constexpr int kPerChunk = Type::kPerChunk;
  static constexpr int kChunksQk = RingShape<Config>::kChunksQk;
  static constexpr int kChunksVo = RingShape<Config>::kChunksVo;
  // That share one row of V.
  static constexpr int kLanesPerRow = kChunksVo > 16 ? 32 : kChunksVo > 8 ? 16 : 8;
  static constexpr int kGroups = 32 / kLanesPerRow;      // tokens at once
  static constexpr int kPieces = (kChunksVo + 31) / 32;  // chunks of a lane
  static constexpr bool kPositions = (Config::kRules & kPositionRules) != 0;
  static_assert(Config::kBlockKV == 8 && Config::kWarpsM == 1 && Config::kTile == 1,
                "one warp, eight tokens");
  static_assert(Config::kNumThreads == 32 * Config::kStreams, "threads");
  static_assert(Config::kSmemBytes == Shared::kBytes,
                "the tile table and the kernel disagree on shared memory");

 public:
  // Visits of every item.
  static JAXINFER_DEVICE int passes(const AttentionParams& params) {
    const int rows = Config::kPacked ? params.group_divider.divisor : 1;
    return (rows + kSimtMaxRows - 1) / kSimtMaxRows;
  }

  JAXINFER_DEVICE SimtAttention(const AttentionParams& params, int cls, const VariantOperands& operands,
                                char* memory)
      : params_(params),
        operands_(operands),
        memory_(memory),
        lane_(threadIdx.x & 31),
        stream_(threadIdx.x >> 5),
        state_(reinterpret_cast<WarpState*>(memory + Shared::kWarpStates)[threadIdx.x >> 5]),
        cursor_(params, cls, passes(params), state_.computing),
        exists_(cursor_.next()),
        ring_(params, cursor_, exists_, state_, shared_address(memory + Shared::kRing),
              reinterpret_cast<uint32_t*>(memory + Shared::kPresent),
              reinterpret_cast<int*>(memory + Shared::kPosition), stream_, 0, lane_) {
    ring_.fill();
  }

  JAXINFER_DEVICE void run() {
    for (bool exists = exists_; exists; exists = cursor_.next()) {
      const CursorState& s = state_.computing;
      if (s.item.bsr_row >= 0) {
        run_item(s.item, s.head, s.pass);
      } else if (s.pass == 0) {
        write_empty<Config>(params_, s.item, s.head);
      }
    }
  }

 private:
  JAXINFER_DEVICE void run_item(const Item& item, int head, int pass) {
    const ItemRows<Config::kPacked> rows{state_.computing, params_.group_divider};
    first_row_ = pass * kSimtMaxRows;
    num_rows_ = min(rows.num_rows() - first_row_, kSimtMaxRows);
    token_ = item.token_begin;
    q_pos_ = __ldg(params_.q_pos + token_);
    request_ = item.bsr_row;
    kv_head_ = rows.kv_head();
    first_head_ = Config::kPacked ? head * params_.group_divider.divisor + first_row_ : head;
    cta_barrier();  // the visit before may still be reading Q and merged states
    load_query();
    cta_barrier();
    // The number of heads is known at run time; few copies of the loop keep idle rows cheap.
    if (num_rows_ <= 1) {
      run_rows<1>(item);
    } else if (num_rows_ <= 4) {
      run_rows<4>(item);
    } else {
      run_rows<8>(item);
    }
    cta_barrier();
    store(item);
  }

  JAXINFER_DEVICE Row make_row(int r) const {
    return Row{request_, token_, q_pos_, first_head_ + r, kv_head_};
  }

  JAXINFER_DEVICE void load_query() {
    const int chunks = params_.head_dim_qk / kPerChunk;
    for (int i = threadIdx.x; i < kSimtMaxRows * kChunksQk; i += Config::kNumThreads) {
      const int r = i / kChunksQk;
      const int chunk = i % kChunksQk;
      float x[kPerChunk] = {};
      if (r < num_rows_ && chunk < chunks) {
        const int64_t at = (int64_t{token_} * params_.num_qo_heads + first_head_ + r) * chunks + chunk;
        Type::unpack(__ldg(static_cast<const uint4*>(params_.q) + at), x);
        if constexpr (Variant::kQuery) {
          const Row row = make_row(r);
          Variant(params_, operands_, row).query(x, chunk * kPerChunk, row);
          Type::unpack(Type::pack(x), x);
        }
      }
      float4* const to = reinterpret_cast<float4*>(memory_ + Shared::kQuery) + i * (kPerChunk / 4);
#pragma unroll
      for (int e = 0; e < kPerChunk / 4; ++e)
        to[e] = make_float4(x[4 * e], x[4 * e + 1], x[4 * e + 2], x[4 * e + 3]);
    }
  }

  // All KV blocks of this warp for kRows rows, then the warp's state to shared memory.
  template <int kRows>
  JAXINFER_DEVICE void run_rows(const Item& item) {
    float o[kRows][kPieces][kPerChunk] = {};
    float m[kRows];
    float l[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      m[r] = -infinity();
      l[r] = 0.0f;
    }
    const int offset = item.kv_begin < item.kv_end ? __ldg(params_.kv_offset + request_) : 0;
    const Visible visible = visible_positions<Config::kRules>(params_.variant, q_pos_);
#pragma unroll 1
    for (int begin = item.kv_begin + stream_ * Config::kBlockKV; begin < item.kv_end;
         begin += Config::kStreams * Config::kBlockKV) {
      wait_copies<Config::kStages - 2>();
      __syncwarp();
      ring_.issue(stage_ == 0 ? Config::kStages - 1 : stage_ - 1);
      const int c = lane_ & 7;
      const int pos = params_.block_pos != nullptr ? ring_.positions(stage_)[c] : offset + begin + c;
      const Col col{pos, begin + c};
      const bool present = (ring_.present(stage_) >> c & 1) != 0;
      float p[kRows];
      score<kRows>(col, present, p);
      bool keep = present;
      if constexpr (kPositions) keep = keep && visible.first <= pos && pos <= visible.last;
      float factor[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) weigh(r, col, keep, p[r], m[r], l[r], factor[r]);
      add_values<kRows>(begin, offset, p, factor, o);
      stage_ = stage_ + 1 == Config::kStages ? 0 : stage_ + 1;
    }
    keep_state<kRows>(m, l, o);
  }

  // p[r] = q . k of row r and this lane's token.
  template <int kRows>
  JAXINFER_DEVICE void score(const Col& col, bool present, float (&p)[kRows]) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) p[r] = 0.0f;
    const uint32_t tile = ring_.k_tile(stage_);
    const uint32_t query = shared_address(memory_ + Shared::kQuery);
#pragma unroll 4
    for (int i = 0; i < kChunksQk / 4; ++i) {
      const int chunk = 4 * i + (lane_ >> 3);
      float k[kPerChunk];
      Type::unpack(load_shared(tile + RowTile<kChunksQk>::offset(lane_ & 7, chunk)), k);
      if constexpr (Variant::kKey) {
        if (present && chunk < params_.head_dim_qk / kPerChunk) {
          const Row row = make_row(0);
          Variant(params_, operands_, row).key(k, chunk * kPerChunk, row, col);
          Type::unpack(Type::pack(k), k);
        }
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int e = 0; e < kPerChunk / 4; ++e) {
          const float4 q = load_shared_float4(query + (r * kChunksQk + chunk) * (kPerChunk * 4) + e * 16);
          p[r] = fmaf(q.x, k[4 * e], p[r]);
          p[r] = fmaf(q.y, k[4 * e + 1], p[r]);
          p[r] = fmaf(q.z, k[4 * e + 2], p[r]);
          p[r] = fmaf(q.w, k[4 * e + 3], p[r]);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      p[r] += shuffle_xor(p[r], 8);
      p[r] += shuffle_xor(p[r], 16);
    }
  }

  // One score to its weight; m and the factor of earlier sums are the same in all lanes, l is this token's
  // share.
  JAXINFER_DEVICE void weigh(int r, const Col& col, bool keep, float& p, float& m, float& l, float& factor) {
    float s = p * params_.variant.sm_scale;
    if constexpr (Variant::kLogits || Variant::kMask) {
      const Row row = make_row(min(r, num_rows_ - 1));
      const Variant variant(params_, operands_, row);
      if constexpr (Variant::kLogits) s = variant.logits(s, row, col);
      if constexpr (Variant::kMask) keep = keep && variant.mask(row, col);
    }
    if constexpr (Variant::kCapped) s = SoftCap(params_.variant.logits_soft_cap)(s);
    if constexpr (Variant::kSoftmax) {
      const float x = keep ? s : -infinity();
      float largest = fmaxf(x, shuffle_xor(x, 1));
      largest = fmaxf(largest, shuffle_xor(largest, 2));
      largest = fmaxf(largest, shuffle_xor(largest, 4));
      largest = fmaxf(m, largest);
      // Differences first: a product with log2(e) would round large logits, or overflow.
      const float shift = finite_max(largest);
      factor = exp2_fast((m - shift) * kLog2e);
      m = largest;
      p = exp2_fast((x - shift) * kLog2e);
      l = fmaf(l, factor, p);
    } else {
      p = plain_weight(keep ? s : hidden_score<false>(), l);
      factor = 1.0f;
    }
  }

  // Rescales this lane's sums of values and adds those of a block: p[r] is the weight of row r and this
  // lane's token, which other lanes get by shuffles.
  template <int kRows>
  JAXINFER_DEVICE void add_values(int begin, int offset, const float (&p)[kRows],
                                  const float (&factor)[kRows], float (&o)[kRows][kPieces][kPerChunk]) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
#pragma unroll
        for (int e = 0; e < kPerChunk; ++e) o[r][i][e] *= factor[r];
      }
    }
    const uint32_t tile = ring_.v_tile(stage_);
    const uint32_t present = static_cast<uint32_t>(ring_.present(stage_));
#pragma unroll
    for (int t = 0; t < 8 / kGroups; ++t) {
      const int c = t * kGroups + lane_ / kLanesPerRow;
      float weight[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) weight[r] = __shfl_sync(kFullWarp, p[r], c);
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const int chunk = lane_ % kLanesPerRow + 32 * i;
        if (kChunksVo % kLanesPerRow != 0 && chunk >= kChunksVo) continue;
        float v[kPerChunk];
        Type::unpack(load_shared(tile + RowTile<kChunksVo>::offset(c, chunk)), v);
        if constexpr (Variant::kValue) {
          if ((present >> c & 1) != 0 && chunk < params_.head_dim_vo / kPerChunk) {
            const int pos = params_.block_pos != nullptr ? ring_.positions(stage_)[c] : offset + begin + c;
            const Row row = make_row(0);
            Variant(params_, operands_, row).value(v, chunk * kPerChunk, row, Col{pos, begin + c});
            Type::unpack(Type::pack(v), v);
          }
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
          for (int e = 0; e < kPerChunk; ++e) o[r][i][e] = fmaf(weight[r], v[e], o[r][i][e]);
        }
      }
    }
  }

  // This warp's maxima, sums of weights and sums of values to shared memory, for store().
  template <int kRows>
  JAXINFER_DEVICE void keep_state(float (&m)[kRows], float (&l)[kRows],
                                  float (&o)[kRows][kPieces][kPerChunk]) {
    float* const sums = reinterpret_cast<float*>(memory_ + Shared::kMerge);
    float2* const states = reinterpret_cast<float2*>(memory_ + Shared::kMergeState);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int mask = 1; mask < 8; mask *= 2) l[r] += shuffle_xor(l[r], mask);
      if (lane_ == 0) states[stream_ * kSimtMaxRows + r] = make_float2(m[r], l[r]);
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const int chunk = lane_ % kLanesPerRow + 32 * i;
#pragma unroll
        for (int e = 0; e < kPerChunk; ++e) {
#pragma unroll
          for (int mask = kLanesPerRow; mask < 32; mask *= 2) o[r][i][e] += shuffle_xor(o[r][i][e], mask);
        }
        if (lane_ >= kLanesPerRow || (kChunksVo % kLanesPerRow != 0 && chunk >= kChunksVo)) continue;
        float4* const to = reinterpret_cast<float4*>(
            sums + (stream_ * kSimtMaxRows + r) * Config::kHeadDimVo + chunk * kPerChunk);
#pragma unroll
        for (int e = 0; e < kPerChunk / 4; ++e) {
          to[e] = make_float4(o[r][i][4 * e], o[r][i][4 * e + 1], o[r][i][4 * e + 2], o[r][i][4 * e + 3]);
        }
      }
    }
  }

  // Merges the warps' states in their order and writes the rows.
  JAXINFER_DEVICE void store(const Item& item) {
    const float* const sums = reinterpret_cast<const float*>(memory_ + Shared::kMerge);
    const float2* const states = reinterpret_cast<const float2*>(memory_ + Shared::kMergeState);
    const bool final = item.out < 0;
    const int chunks = params_.head_dim_vo / kPerChunk;
    for (int i = threadIdx.x; i < num_rows_ * kChunksVo; i += Config::kNumThreads) {
      const int r = i / kChunksVo;
      const int chunk = i % kChunksVo;
      if (chunk >= chunks) continue;
      float m = -infinity();
      float l = 0.0f;
      float weight[Config::kStreams];
#pragma unroll
      for (int w = 0; w < Config::kStreams; ++w) m = fmaxf(m, states[w * kSimtMaxRows + r].x);
#pragma unroll
      for (int w = 0; w < Config::kStreams; ++w) {
        weight[w] =
            Variant::kSoftmax ? exp2_fast((states[w * kSimtMaxRows + r].x - finite_max(m)) * kLog2e) : 1.0f;
        l = fmaf(weight[w], states[w * kSimtMaxRows + r].y, l);
      }
      // A row that saw nothing has o = 0 exactly, whatever its sums hold. Partial sums stay undivided.
      const float inverse = !Variant::kSoftmax || !final ? 1.0f : l == 0.0f ? 0.0f : 1.0f / l;
      float x[kPerChunk] = {};
#pragma unroll
      for (int w = 0; w < Config::kStreams; ++w) {
        const float* const from = sums + (w * kSimtMaxRows + r) * Config::kHeadDimVo + chunk * kPerChunk;
#pragma unroll
        for (int e = 0; e < kPerChunk; ++e) x[e] = fmaf(weight[w], from[e], x[e]);
      }
#pragma unroll
      for (int e = 0; e < kPerChunk; ++e) x[e] *= inverse;
      const int64_t at = int64_t{final ? token_ : item.out} * params_.num_qo_heads + first_head_ + r;
      if (kFindsEmpty<Variant> && chunk == 0) {
        if (!final) {
          params_.partial_max[at] = m;
          params_.partial_sum[at] = l;
        } else if (Variant::kSoftmax) {
          params_.lse[at] = natural_lse(m, l);
        }
      }
      if (final) {
        if constexpr (Variant::kOutput) {
          const Row row = make_row(r);
          if (l != 0.0f) Variant(params_, operands_, row).output(x, chunk * kPerChunk, row);
        }
        static_cast<uint4*>(params_.o)[at * chunks + chunk] = Type::pack(x);
      } else {
        float* const to = params_.partial_o + at * params_.head_dim_vo + chunk * kPerChunk;
#pragma unroll
        for (int e = 0; e < kPerChunk; e += 4) {
          *reinterpret_cast<float4*>(to + e) = make_float4(x[e], x[e + 1], x[e + 2], x[e + 3]);
        }
      }
    }
  }

  const AttentionParams& params_;
  const VariantOperands& operands_;
  char* memory_;
  int lane_;
  int stream_;
  WarpState& state_;
  ItemCursor<Config> cursor_;
  bool exists_;  // the first visit
  KvRing<Config> ring_;
  int stage_ = 0;  // of the block that comes next
  // Of the visit:
  int first_row_;
  int num_rows_;
  int token_;
  int q_pos_;
  int request_;
  int kv_head_;
  int first_head_;  // query head of row 0
};

template <class Config, class Variant>
JAXINFER_DEVICE void attention_simt(const AttentionParams& params, int cls, const VariantOperands& operands) {
  extern __shared__ __align__(128) char memory[];
  allow_next_kernel();
  SimtAttention<Config, Variant> attention(params, cls, operands, opaque(memory));
  attention.run();
  end_after_earlier_kernels();
}

}  // namespace jaxinfer
