// Attention of a plan's items on tensor cores, for every architecture with mma.sync (sm_80 and up), bf16 and
// fp16. The shape of a CTA comes from Config: kStreams groups of kWarpsM warps. The warps of a stream split
// the query rows, streams split the KV blocks of an item and are merged at its end. Tiles 16: four streams of
// one warp, which never wait for each other inside an item; tile 32: two streams of two; larger ones: one
// stream of all warps.
//
// An item: rows of Q to shared memory; then for every KV block gather (issued blocks ahead), Q K^T, logits,
// mask, online softmax, P V; then the state is written: o and lse, or a partial of both.
#pragma once

#include "kernels/fragments.cuh"
#include "kernels/softmax.cuh"
#include "kernels/variant.cuh"

namespace jaxinfer {

// What shared memory holds, in bytes from its start. kSmemBytes of jaxinfer/jit/tiles.py is the same sum.
template <class Config>
struct MmaSharedMemory {
  static constexpr int kMergePitch =
      Config::kHeadDimVo + 8;                          // floats; 8 more keep the rows of a fragment apart
  static constexpr int kSlots = Config::kStreams / 2;  // streams that hand over their state at once
  static constexpr int kQuery = 0;
  static constexpr int kRing = kQuery + Config::kTile * Config::kHeadDimQk * 2;
  static constexpr int kMerge = kRing + RingShape<Config>::kBytes;
  static constexpr int kMergeState = kMerge + kSlots * Config::kTile * kMergePitch * 4;
  static constexpr int kVisible = kMergeState + kSlots * Config::kTile * 8;
  static constexpr int kPosition = kVisible + Config::kTile * static_cast<int>(sizeof(Visible));
  static constexpr int kWarpStates = kPosition + RingShape<Config>::kPositionBytes;
  static constexpr int kCtaState =
      kWarpStates + Config::kNumThreads / 32 * static_cast<int>(sizeof(WarpState));
  static constexpr int kPresent = kCtaState + static_cast<int>(sizeof(CtaState));
  static constexpr int kBytes = kPresent + RingShape<Config>::kPresentBytes;
};

template <class Config, class Variant>
class MmaAttention {
  using Type = Element<Config::kDType>;
  using Shared = MmaSharedMemory<Config>;
  static constexpr int kFragments = QueryFragments<Config>::kFragments;
  static constexpr int kRows = 2 * kFragments;           // fragment rows of a thread
  static constexpr int kColumns = Config::kBlockKV / 8;  // pieces of eight columns
  static constexpr int kPieces = Config::kHeadDimVo / 8;
  static constexpr bool kPositions = (Config::kRules & kPositionRules) != 0;
  static_assert(Config::kTile == 16 * Config::kWarpsM * kFragments, "tile rows");
  static_assert(Config::kNumThreads == 32 * Config::kWarpsM * Config::kStreams, "threads");
  static_assert(Config::kBlockKV % 16 == 0 && Config::kBlockKV <= 64, "columns of a block");
  static_assert(Config::kSmemBytes == Shared::kBytes,
                "the tile table and the kernel disagree on shared memory");

 public:
  // The CTA's state is filled, and visible to all threads.
  JAXINFER_DEVICE MmaAttention(const AttentionParams& params, int cls, const VariantOperands& operands,
                               char* memory)
      : params_(params),
        operands_(operands),
        memory_(memory),
        lane_(threadIdx.x & 31),
        warp_(static_cast<int>(threadIdx.x >> 5) % Config::kWarpsM),
        stream_(static_cast<int>(threadIdx.x >> 5) / Config::kWarpsM),
        cta_(*reinterpret_cast<const CtaState*>(memory + Shared::kCtaState)),
        state_(reinterpret_cast<WarpState*>(memory + Shared::kWarpStates)[threadIdx.x >> 5]),
        rows_{state_.computing, cta_.group_size},
        ring_(params, cls, 1, cta_, state_, shared_address(memory + Shared::kRing),
              reinterpret_cast<uint32_t*>(memory + Shared::kPresent),
              reinterpret_cast<int*>(memory + Shared::kPosition), stream_, warp_, lane_),
        query_(shared_address(memory + Shared::kQuery), warp_, lane_),
        k_rows_((lane_ & 7) + (lane_ >> 4 << 3), lane_ >> 3 & 1),
        v_rows_(lane_ & 15, lane_ >> 4) {}

  JAXINFER_DEVICE void run(int cls) {
    ItemCursor cursor(params_, cls, Config::kPacked, 1, state_.computing);
    while (cursor.next()) {
      if (item().bsr_row < 0) {
        write_empty<Config>(params_, item(), state_.computing.head);
      } else {
        run_item();
      }
    }
  }

 private:
  JAXINFER_DEVICE void stream_barrier() {
    if constexpr (Config::kWarpsM == 1) {
      __syncwarp();
    } else if constexpr (Config::kStreams == 1) {
      cta_barrier();
    } else {
      group_barrier(1 + stream_, 32 * Config::kWarpsM);
    }
  }

  JAXINFER_DEVICE void run_item() {
    cta_barrier();  // the item before may still be reading Q and merged states
    load_query();
    if constexpr (kPositions) find_visible();
    cta_barrier();
    query_.load();
    find_clear();
    softmax_.clear();
#pragma unroll
    for (int f = 0; f < kFragments; ++f) {
#pragma unroll
      for (int j = 0; j < kPieces; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) o_[f][j][e] = 0.0f;
      }
    }
#pragma unroll 1
    for (int begin = item().kv_begin + stream_ * Config::kBlockKV; begin < item().kv_end;
         begin += Config::kStreams * Config::kBlockKV) {
      wait_copies<Config::kStages - 2>();
      stream_barrier();
      ring_.issue(stage_ == 0 ? Config::kStages - 1 : stage_ - 1);
      attend(begin);
      stage_ = stage_ + 1 == Config::kStages ? 0 : stage_ + 1;
    }
    if constexpr (Variant::kSoftmax) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) softmax_.l[r] = quad_sum(softmax_.l[r]);
    }
    if constexpr (Config::kStreams > 1) merge_streams();
    if (stream_ == 0) store();
  }

  // With 32 rows per warp registers are scarce, so there both are read again where needed.
  JAXINFER_DEVICE int lane() const { return kFragments > 1 ? fresh_thread_index() & 31 : lane_; }
  JAXINFER_DEVICE int warp() const {
    return kFragments > 1 ? (fresh_thread_index() >> 5) % Config::kWarpsM : warp_;
  }
  JAXINFER_DEVICE const Item& item() const { return state_.computing.item; }

  // Fragments hold q.k; with a negative scale Q is negated, so that the largest product is the largest logit.
  JAXINFER_DEVICE float logit_scale() const { return fabsf(params_.variant.sm_scale); }
  JAXINFER_DEVICE uint32_t sign_bits() const { return params_.variant.sm_scale < 0.0f ? Type::kSignBits : 0; }
  // Of fragments to base-2 exponents. A zero would turn -inf into NaN; the number in its place still makes
  // every weight 1.
  JAXINFER_DEVICE float scale() const {
    return Variant::kLogits ? kLog2e : fmaxf(logit_scale() * kLog2e, 1e-36f);
  }

  JAXINFER_DEVICE Row make_row(int i) const {
    const int token = item().token_begin + rows_.token(i);
    return Row{item().bsr_row, token, __ldg(params_.q_pos + token), rows_.qo_head(i), rows_.kv_head()};
  }
  // Tile row of this thread's fragment row r.
  JAXINFER_DEVICE int tile_row(int r) const {
    return (warp() * kFragments + (r >> 1)) * 16 + (lane() >> 2) + (r & 1) * 8;
  }

  // Rows beyond the item's and chunks beyond the true head dim become zeros.
  JAXINFER_DEVICE void load_query() {
    constexpr int kChunks = Config::kHeadDimQk / 8;
    const int chunks = params_.head_dim_qk / 8;
#pragma unroll 4
    for (int i = fresh_thread_index(); i < Config::kTile * kChunks; i += Config::kNumThreads) {
      const int row = i / kChunks;
      const int chunk = i % kChunks;
      uint4 x = make_uint4(0, 0, 0, 0);
      if (row < rows_.num_rows() && chunk < chunks) {
        const int64_t token = item().token_begin + rows_.token(row);
        const int64_t at = (token * params_.num_qo_heads + rows_.qo_head(row)) * chunks + chunk;
        x = __ldg(static_cast<const uint4*>(params_.q) + at);
        if constexpr (Variant::kQuery) {
          const Row query_row = make_row(row);
          float elements[8];
          Type::unpack(x, elements);
          Variant(params_, operands_, query_row).query(elements, chunk * 8, query_row);
          x = Type::pack(elements);
        }
        x.x ^= sign_bits();
        x.y ^= sign_bits();
        x.z ^= sign_bits();
        x.w ^= sign_bits();
      }
      store_shared(shared_address(memory_ + Shared::kQuery) + RowTile<kChunks>::offset(row, chunk), x);
    }
  }

  // What every row may see, to shared memory. Idle rows see everything; nobody reads their results.
  JAXINFER_DEVICE void find_visible() {
    for (int i = fresh_thread_index(); i < Config::kTile; i += Config::kNumThreads) {
      Visible range{kInt32Min, kInt32Max};
      if (i < rows_.num_rows()) {
        const int token = item().token_begin + rows_.token(i);
        range = visible_positions<Config::kRules>(params_.variant, __ldg(params_.q_pos + token));
      }
      visible()[i] = range;
    }
  }
  JAXINFER_DEVICE Visible* visible() const { return reinterpret_cast<Visible*>(memory_ + Shared::kVisible); }

  // Columns at positions outside [clear_first, clear_last] are hidden from some row of this warp.
  JAXINFER_DEVICE void find_clear() {
    state_.kv_offset = item().kv_begin < item().kv_end ? __ldg(params_.kv_offset + item().bsr_row) : 0;
    if constexpr (kPositions) {
      const Visible range = visible()[warp() * kFragments * 16 + lane() % (kFragments * 16)];
      state_.clear_first = __reduce_max_sync(kFullWarp, range.first);
      state_.clear_last = __reduce_min_sync(kFullWarp, range.last);
    }
    __syncwarp();
  }

  // One KV block: scores, weights, and their sum of values.
  JAXINFER_DEVICE void attend(int begin) {
    if constexpr (Variant::kKey) {
      transform<Config::kHeadDimQk / 8, true>(begin, ring_.k_tile(stage_), params_.head_dim_qk / 8);
    }
    if constexpr (Variant::kValue) {
      transform<Config::kHeadDimVo / 8, false>(begin, ring_.v_tile(stage_), params_.head_dim_vo / 8);
    }
    if constexpr (Variant::kKey || Variant::kValue) stream_barrier();

    float s[kFragments][kColumns][4];
    multiply_qk<Config>(query_, k_rows_, ring_.k_tile(stage_), s);
    if constexpr (Variant::kLogits || !Variant::kSoftmax) apply_logits(begin, s);
    if (Variant::kMask || needs_mask(begin)) apply_mask(begin, s);

    if constexpr (Variant::kSoftmax) {
      float factor[kRows];
      const bool changed = update_softmax(s, scale(), softmax_, factor);
      if (__any_sync(kFullWarp, changed)) {
#pragma unroll
        for (int f = 0; f < kFragments; ++f) {
#pragma unroll
          for (int j = 0; j < kPieces; ++j) {
#pragma unroll
            for (int e = 0; e < 4; ++e) o_[f][j][e] *= factor[2 * f + (e >> 1)];
          }
        }
      }
    }
    multiply_pv<Config>(s, v_rows_, ring_.v_tile(stage_), o_);
  }

  // Position of column c of the block. Where the layout gives block positions they came with the block.
  JAXINFER_DEVICE int position(int begin, int c) const {
    return params_.block_pos != nullptr ? ring_.positions(stage_)[c] : state_.kv_offset + begin + c;
  }

  JAXINFER_DEVICE bool needs_mask(int begin) const {
    constexpr uint64_t kAll =
        Config::kBlockKV == 64 ? ~uint64_t{0} : (uint64_t{1} << (Config::kBlockKV & 63)) - 1;
    if (ring_.present(stage_) != kAll) return true;
    if constexpr (kPositions) {
      // Positions ascend along a row's list.
      return position(begin, 0) < state_.clear_first ||
             position(begin, Config::kBlockKV - 1) > state_.clear_last;
    }
    return false;
  }

  // Hides columns: those that are not there, and those that a rule or the variant hides.
  JAXINFER_DEVICE void apply_mask(int begin, float (&s)[kFragments][kColumns][4]) {
    const int first = 2 * (lane() & 3);
    const uint64_t mine = ring_.present(stage_) >> first;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const Visible range = kPositions ? visible()[tile_row(r)] : Visible{};
      const Row row = Variant::kMask ? hole_row(r) : Row{};
      const Variant variant(params_, operands_, row);
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          bool keep = (mine >> (8 * j + e) & 1) != 0;
          const int c = first + 8 * j + e;
          const Col col{position(begin, c), begin + c};
          if constexpr (kPositions) keep = keep && range.first <= col.kv_pos && col.kv_pos <= range.last;
          if constexpr (Variant::kMask) keep = keep && variant.mask(row, col);
          float& x = s[r >> 1][j][2 * (r & 1) + e];
          x = keep ? x : (Variant::kSoftmax ? -infinity() : 0.0f);
        }
      }
    }
  }

  // Products to logits, through the variant where it wants that.
  JAXINFER_DEVICE void apply_logits(int begin, float (&s)[kFragments][kColumns][4]) {
    const int first = 2 * (lane() & 3);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const Row row = Variant::kLogits ? hole_row(r) : Row{};
      const Variant variant(params_, operands_, row);
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int c = first + 8 * j + e;
          float& x = s[r >> 1][j][2 * (r & 1) + e];
          x *= logit_scale();
          if constexpr (Variant::kLogits) x = variant.logits(x, row, Col{position(begin, c), begin + c});
        }
      }
    }
  }

  // Of fragment row r. Idle rows copy a real one; their results are not read.
  JAXINFER_DEVICE Row hole_row(int r) const { return make_row(min(tile_row(r), rows_.num_rows() - 1)); }

  // Changes the rows of a K or V tile in place, by the threads of the stream.
  template <int kChunks, bool kIsKey>
  JAXINFER_DEVICE void transform(int begin, uint32_t tile, int chunks) {
    const uint64_t present = ring_.present(stage_);
    const Row row = make_row(0);
    const Variant variant(params_, operands_, row);
    for (int i = warp_ * 32 + lane_; i < Config::kBlockKV * kChunks; i += 32 * Config::kWarpsM) {
      const int c = i / kChunks;
      const int chunk = i % kChunks;
      if ((present >> c & 1) == 0 || chunk >= chunks) continue;
      const uint32_t at = tile + RowTile<kChunks>::offset(c, chunk);
      float elements[8];
      Type::unpack(load_shared(at), elements);
      const Col col{position(begin, c), begin + c};
      if constexpr (kIsKey) {
        variant.key(elements, chunk * 8, row, col);
      } else {
        variant.value(elements, chunk * 8, row, col);
      }
      store_shared(at, Type::pack(elements));
    }
  }

  // Adds the states of the streams into stream 0, always in the same order: upper half into lower half.
  JAXINFER_DEVICE void merge_streams() {
    float* const sums = reinterpret_cast<float*>(memory_ + Shared::kMerge);
    float2* const states = reinterpret_cast<float2*>(memory_ + Shared::kMergeState);
#pragma unroll
    for (int half = Config::kStreams / 2; half > 0; half /= 2) {
      if (half < Config::kStreams / 2) cta_barrier();
      if (stream_ >= half && stream_ < 2 * half) {
        const int slot = (stream_ - half) * Config::kTile;
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          float* const row = sums + (slot + tile_row(r)) * Shared::kMergePitch + 2 * (lane_ & 3);
#pragma unroll
          for (int j = 0; j < kPieces; ++j) {
            const float* const x = o_[r >> 1][j] + 2 * (r & 1);
            *reinterpret_cast<float2*>(row + 8 * j) = make_float2(x[0], x[1]);
          }
          if (Variant::kSoftmax && (lane() & 3) == 0) {
            states[slot + tile_row(r)] = make_float2(softmax_.m[r], softmax_.l[r]);
          }
        }
      }
      cta_barrier();
      if (stream_ < half) {
        const int slot = stream_ * Config::kTile;
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const float* const row = sums + (slot + tile_row(r)) * Shared::kMergePitch + 2 * (lane_ & 3);
          float mine = 1.0f;
          float other = 1.0f;
          if constexpr (Variant::kSoftmax) {
            const float2 state = states[slot + tile_row(r)];
            const float m = fmaxf(softmax_.m[r], state.x);
            const float shift = __fmul_rn(finite_max(m), scale());
            mine = rescale_factor(softmax_.m[r], scale(), shift);
            other = rescale_factor(state.x, scale(), shift);
            softmax_.m[r] = m;
            softmax_.l[r] = softmax_.l[r] * mine + state.y * other;
          }
#pragma unroll
          for (int j = 0; j < kPieces; ++j) {
            const float2 x = *reinterpret_cast<const float2*>(row + 8 * j);
            float* const mine_o = o_[r >> 1][j] + 2 * (r & 1);
            mine_o[0] = mine_o[0] * mine + x.x * other;
            mine_o[1] = mine_o[1] * mine + x.y * other;
          }
        }
      }
    }
  }

  // Writes this thread's rows: the final o and lse, or partial ones in float32.
  JAXINFER_DEVICE void store() {
    const bool final = item().out < 0;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int i = tile_row(r);
      if (i >= rows_.num_rows()) continue;
      const int64_t first = final ? item().token_begin : item().out;
      const int64_t at = (first + rows_.token(i)) * params_.num_qo_heads + rows_.qo_head(i);
      float inverse = 1.0f;
      if constexpr (Variant::kSoftmax) {
        const float m = softmax_.m[r];
        const float l = softmax_.l[r];
        const bool empty = l == 0.0f;
        if (final) {
          // A row that saw nothing has o = 0 exactly, whatever its sums hold.
          inverse = empty ? 0.0f : 1.0f / l;
          if ((lane() & 3) == 0) params_.lse[at] = natural_lse(m, scale(), l);
        } else {
          // Sums are relative to the rounded m * scale; the difference to the largest logit goes into them.
          const float largest = empty ? -infinity() : Variant::kLogits ? m : m * logit_scale();
          if (!empty) inverse = exp2_fast(-fmaf(largest, kLog2e, -__fmul_rn(m, scale())));
          if ((lane() & 3) == 0) {
            params_.partial_max[at] = largest;
            params_.partial_sum[at] = l * inverse;
          }
        }
      }
      const int column = 2 * (lane() & 3);
      const int64_t first_element = at * params_.head_dim_vo + column;
      if (final) {
        uint16_t* const to = static_cast<uint16_t*>(params_.o) + first_element;
#pragma unroll
        for (int j = 0; j < kPieces; ++j) {
          float x[2] = {o_[r >> 1][j][2 * (r & 1)] * inverse, o_[r >> 1][j][2 * (r & 1) + 1] * inverse};
          if (8 * j < params_.head_dim_vo) {  // head dims are multiples of 8
            if constexpr (Variant::kOutput) {
              const Row row = make_row(i);
              Variant(params_, operands_, row).output(x, 8 * j + column, row);
            }
            *reinterpret_cast<uint32_t*>(to + 8 * j) = Type::pack_pair(x[0], x[1]);
          }
        }
      } else {
        float* const to = params_.partial_o + first_element;
#pragma unroll
        for (int j = 0; j < kPieces; ++j) {
          if (8 * j < params_.head_dim_vo) {
            *reinterpret_cast<float2*>(to + 8 * j) =
                make_float2(o_[r >> 1][j][2 * (r & 1)], o_[r >> 1][j][2 * (r & 1) + 1]);
          }
        }
      }
    }
  }

  const AttentionParams& params_;
  const VariantOperands& operands_;
  char* memory_;
  int lane_;
  int warp_;  // inside the stream
  int stream_;
  const CtaState& cta_;
  WarpState& state_;
  ItemRows<Config::kPacked> rows_;
  KvRing<Config> ring_;
  QueryFragments<Config> query_;
  MatrixAddress<Config::kHeadDimQk / 8> k_rows_;
  MatrixAddress<Config::kHeadDimVo / 8> v_rows_;
  int stage_ = 0;  // of the block that comes next
  // Of the item:
  SoftmaxState<kRows> softmax_;
  float o_[kFragments][kPieces][4];
};

template <class Config, class Variant>
JAXINFER_DEVICE void attention_mma(const AttentionParams& params, int cls, const VariantOperands& operands) {
  extern __shared__ __align__(128) char memory[];
  fill_cta_state(params, *reinterpret_cast<CtaState*>(memory + MmaSharedMemory<Config>::kCtaState));
  MmaAttention<Config, Variant> attention(params, cls, operands, memory);
  attention.run(cls);
}

}  // namespace jaxinfer
