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
#include "kernels/mma_memory.cuh"
#include "kernels/query.cuh"
#include "kernels/softmax.cuh"
#include "kernels/variant.cuh"

namespace jaxinfer {

template <class Config, class Variant>
class MmaAttention {
  using Type = Element<Config::kDType>;
  using Shared = MmaSharedMemory<Config>;
  static constexpr int kFragments = QueryFragments<Config>::kFragments;
  static constexpr int kRows = 2 * kFragments;           // fragment rows of a thread
  static constexpr int kColumns = Config::kBlockKV / 8;  // pieces of eight columns
  static constexpr int kPieces = Config::kHeadDimVo / 8;
  static constexpr bool kPositions = (Config::kRules & kPositionRules) != 0;
  static constexpr bool kTransforms = Variant::kKey || Variant::kValue;  // changes tiles of K or V in place
  static_assert(Config::kTile == 16 * Config::kWarpsM * kFragments, "tile rows");
  static_assert(Config::kNumThreads == 32 * Config::kWarpsM * Config::kStreams, "threads");
  static_assert(Config::kBlockKV % 16 == 0 && Config::kBlockKV <= 64, "columns of a block");
  static_assert(Config::kSmemBytes == Shared::kBytes,
                "the tile table and the kernel disagree on shared memory");

 public:
  JAXINFER_DEVICE MmaAttention(const AttentionParams& params, int cls, const VariantOperands& operands,
                               char* memory, WarpState& state)
      : params_(params),
        operands_(operands),
        memory_(memory),
        lane_(threadIdx.x & 31),
        warp_(warp_index() % Config::kWarpsM),
        stream_(warp_index() / Config::kWarpsM),
        state_(state),
        rows_{state_.computing, params.group_divider},
        cursor_(params, cls, 1, state_.computing),
        exists_(cursor_.next()),
        ring_(params, cursor_, exists_, state_, shared_address(memory + Shared::kRing),
              reinterpret_cast<uint32_t*>(memory + Shared::kPresent),
              reinterpret_cast<int*>(memory + Shared::kPosition), stream_, warp_, lane_),
        query_(shared_address(memory + Shared::kQuery), warp_, lane_),
        k_rows_((lane_ & 7) + (lane_ >> 4 << 3), lane_ >> 3 & 1),
        v_rows_(lane_ & 15, lane_ >> 4) {}

  JAXINFER_DEVICE void run() {
    for (bool exists = exists_; exists; exists = cursor_.next()) {
      if (item().bsr_row < 0) {
        write_empty<Config>(params_, item(), state_.computing.head);
      } else {
        run_item();
      }
    }
  }

 private:
  // Of the warps of a stream. All streams pass it equally often, those without a last block, too: racecheck
  // of CUDA 13.0 loses track of the CTA's barrier where groups of warps pass others unequally often. One
  // barrier for all streams costs up to 5% (head dim 256, skewed lengths).
  JAXINFER_DEVICE void stream_barrier() {
    if constexpr (Config::kWarpsM == 1) {
      __syncwarp();
    } else if constexpr (Config::kStreams == 1) {
      cta_barrier();
    } else {
      group_barrier<Config::kStreams, 32 * Config::kWarpsM>(stream_);
    }
  }

  JAXINFER_DEVICE void run_item() {
    const int kv_end = item().kv_end;
    // All that is read before the barrier is on its way at once: each trip to memory takes most of a
    // microsecond.
    const int kv_offset = item().kv_begin < kv_end ? __ldg(params_.kv_offset + item().bsr_row) : 0;
    const int q_pos = kPositions ? load_position() : 0;
    cta_barrier();  // the item before may still be reading Q and merged states
    load_query<Config, Variant>(params_, operands_, rows_, shared_address(memory_ + Shared::kQuery),
                                sign_bits());
    if constexpr (kPositions) find_visible(q_pos);
    cta_barrier();
    state_.kv_offset = kv_offset;
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
    int begin = item().kv_begin + stream_ * Config::kBlockKV;
#pragma unroll 1
    for (; begin < kv_end; begin += Config::kStreams * Config::kBlockKV) {
      wait_copies<Config::kStages - 2>();
      stream_barrier();
      ring_.issue(free_stage());
      attend(begin);
      stage_ = stage_ + 1 == Config::kStages ? 0 : stage_ + 1;
    }
    if (Config::kStreams > 1 && Config::kWarpsM > 1 && begin - stream_ * Config::kBlockKV < kv_end) {
      // Only earlier streams have a last block.
      stream_barrier();
      if constexpr (kTransforms) stream_barrier();
    }
    if constexpr (kFindsEmpty<Variant>) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) softmax_.l[r] = quad_sum(softmax_.l[r]);
    }
    if constexpr (Config::kStreams > 1) {
      stream_barrier();  // another warp may still read the stage's last block
#pragma unroll 1
      for (int first = 0; first < rows_.num_rows(); first += StreamSums<Config>::kRows) {
        if (first > 0) cta_barrier();
        share_state(first);
        cta_barrier();
        store_merged(first);
      }
    } else {
      store();
    }
  }

  // The stage that the next copies go to; nothing is in it or on its way to it.
  JAXINFER_DEVICE int free_stage() const { return stage_ == 0 ? Config::kStages - 1 : stage_ - 1; }

  // With 32 rows per warp registers are scarce, so there both are read again where needed.
  JAXINFER_DEVICE int lane() const { return kFragments > 1 ? fresh_thread_index() & 31 : lane_; }
  JAXINFER_DEVICE int warp() const {
    return kFragments > 1 ? (fresh_thread_index() >> 5) % Config::kWarpsM : warp_;
  }
  JAXINFER_DEVICE const Item& item() const { return state_.computing.item; }

  // Fragments hold q.k; with a negative scale Q is negated, so that the largest product is the largest logit.
  JAXINFER_DEVICE float logit_scale() const { return fabsf(params_.variant.sm_scale); }
  JAXINFER_DEVICE uint32_t sign_bits() const { return params_.variant.sm_scale < 0.0f ? Type::kSignBits : 0; }
  // Of fragments to logits and to base-2 exponents; the variant's fragments are logits already.
  JAXINFER_DEVICE float fragment_scale() const { return Variant::kLogits ? 1.0f : logit_scale(); }
  JAXINFER_DEVICE float scale() const { return exponent_scale(fragment_scale()); }

  JAXINFER_DEVICE Row make_row(int i) const { return query_row(params_, rows_, i); }
  // Tile row of this thread's fragment row r.
  JAXINFER_DEVICE int tile_row(int r) const {
    return (warp() * kFragments + (r >> 1)) * 16 + (lane() >> 2) + (r & 1) * 8;
  }

  // Position of this thread's row.
  JAXINFER_DEVICE int load_position() const {
    static_assert(Config::kTile <= Config::kNumThreads, "a thread for every row");
    const int row = fresh_thread_index();
    return row < rows_.num_rows() ? __ldg(params_.q_pos + item().token_begin + rows_.token(row)) : 0;
  }
  // What every row may see, to shared memory. Idle rows see everything; nobody reads their results.
  JAXINFER_DEVICE void find_visible(int q_pos) {
    const int row = fresh_thread_index();
    if (row >= Config::kTile) return;
    visible()[row] = row < rows_.num_rows() ? visible_positions<Config::kRules>(params_.variant, q_pos)
                                            : Visible{kInt32Min, kInt32Max};
  }
  JAXINFER_DEVICE Visible* visible() const { return reinterpret_cast<Visible*>(memory_ + Shared::kVisible); }

  // Columns at positions outside [clear_first, clear_last] are hidden from some row of this warp.
  JAXINFER_DEVICE void find_clear() {
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
    if constexpr (kTransforms) stream_barrier();

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
    } else {
      plain_weights(s, softmax_);
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
          x = keep ? x : hidden_score<Variant::kSoftmax>();
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

  JAXINFER_DEVICE float2* shared_states() const {
    return reinterpret_cast<float2*>(memory_ + Shared::kMergeState);
  }

  JAXINFER_DEVICE uint32_t* free_stages() const {
    return reinterpret_cast<uint32_t*>(memory_ + Shared::kFreeStages);
  }

  // This warp's part of tile rows [first, first + StreamSums::kRows) to shared memory, for the merge of the
  // streams. Idle rows stay away.
  JAXINFER_DEVICE void share_state(int first) {
    const uint32_t sums = ring_.k_tile(free_stage());
    if (warp_ == 0 && lane_ == 0) free_stages()[stream_] = sums;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int row = tile_row(r);
      if (row < first || row >= min(first + StreamSums<Config>::kRows, rows_.num_rows())) continue;
      const int column = 2 * (lane() & 3);
#pragma unroll
      for (int j = 0; j < kPieces; ++j) {
        const float* const x = o_[r >> 1][j] + 2 * (r & 1);
        store_shared(sums + StreamSums<Config>::offset(row - first, 2 * j + (column >> 2)) + (column & 3) * 4,
                     x[0], x[1]);
      }
      if (kFindsEmpty<Variant> && column == 0) {
        shared_states()[stream_ * Config::kTile + row] = make_float2(softmax_.m[r], softmax_.l[r]);
      }
    }
  }

  // Adds the states of the streams, always in the same order, and writes the result: a thread has four
  // columns of a row at a time.
  JAXINFER_DEVICE void store_merged(int first) {
    constexpr int kQuads = Config::kHeadDimVo / 4;
    const int num_rows = min(StreamSums<Config>::kRows, rows_.num_rows() - first);
#pragma unroll 1
    for (int i = fresh_thread_index(); i < num_rows * kQuads; i += Config::kNumThreads) {
      const int row = first + i / kQuads;
      const int quad = i % kQuads;
      if (4 * quad >= params_.head_dim_vo) continue;
      float4 x[Config::kStreams];
#pragma unroll
      for (int s = 0; s < Config::kStreams; ++s) {
        x[s] = load_shared_float4(free_stages()[s] + StreamSums<Config>::offset(row - first, quad));
      }
      float m = -infinity();
      float l = 0.0f;
      float sums[4] = {};
      if constexpr (Variant::kSoftmax) {
        float2 states[Config::kStreams];
#pragma unroll
        for (int s = 0; s < Config::kStreams; ++s) {
          states[s] = shared_states()[s * Config::kTile + row];
          m = fmaxf(m, states[s].x);
        }
        const float base = row_base(m, scale());
        const float shift = rounded_shift(m - base, scale());
#pragma unroll
        for (int s = 0; s < Config::kStreams; ++s) {
          const float factor = rescale_factor(states[s].x - base, scale(), shift);
          l = fmaf(states[s].y, factor, l);
          add(x[s], factor, sums);
        }
      } else {
#pragma unroll
        for (int s = 0; s < Config::kStreams; ++s) {
          if constexpr (kFindsEmpty<Variant>) l += shared_states()[s * Config::kTile + row].y;
          add(x[s], 1.0f, sums);
        }
      }
      store_quad(row, 4 * quad, m, l, sums);
    }
  }

  static JAXINFER_DEVICE void add(const float4& x, float factor, float (&sums)[4]) {
    sums[0] = fmaf(x.x, factor, sums[0]);
    sums[1] = fmaf(x.y, factor, sums[1]);
    sums[2] = fmaf(x.z, factor, sums[2]);
    sums[3] = fmaf(x.w, factor, sums[3]);
  }

  // Writes this thread's rows: the final o and lse, or partial ones in float32.
  JAXINFER_DEVICE void store() {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int row = tile_row(r);
      if (row >= rows_.num_rows()) continue;
      const int column = 2 * (lane() & 3);
      const int64_t at = result_row(row);
      const float factor = store_state(at, column == 0, softmax_.m[r], softmax_.l[r]);
#pragma unroll
      for (int j = 0; j < kPieces; ++j) {
        if (8 * j >= params_.head_dim_vo) continue;  // head dims are multiples of 8
        float x[2] = {o_[r >> 1][j][2 * (r & 1)] * factor, o_[r >> 1][j][2 * (r & 1) + 1] * factor};
        const int64_t to = at * params_.head_dim_vo + 8 * j + column;
        if (is_final()) {
          apply_output(row, 8 * j + column, softmax_.l[r], x);
          *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(params_.o) + to) = Type::pack_pair(x[0], x[1]);
        } else {
          *reinterpret_cast<float2*>(params_.partial_o + to) = make_float2(x[0], x[1]);
        }
      }
    }
  }

  // Four columns of a row.
  JAXINFER_DEVICE void store_quad(int row, int column, float m, float l, float (&x)[4]) {
    const int64_t at = result_row(row);
    const float factor = store_state(at, column == 0, m, l);
    const int64_t to = at * params_.head_dim_vo + column;
#pragma unroll
    for (int e = 0; e < 4; ++e) x[e] *= factor;
    if (is_final()) {
      apply_output(row, column, l, x);
      *reinterpret_cast<uint2*>(static_cast<uint16_t*>(params_.o) + to) =
          make_uint2(Type::pack_pair(x[0], x[1]), Type::pack_pair(x[2], x[3]));
    } else {
      *reinterpret_cast<float4*>(params_.partial_o + to) = make_float4(x[0], x[1], x[2], x[3]);
    }
  }

  JAXINFER_DEVICE bool is_final() const { return item().out < 0; }

  // Row of o and lse, or of the partial ones, that a tile row goes to.
  JAXINFER_DEVICE int64_t result_row(int row) const {
    const int64_t first = is_final() ? item().token_begin : item().out;
    return (first + rows_.token(row)) * params_.num_qo_heads + rows_.qo_head(row);
  }

  // Writes what belongs to a row besides its sums, by the thread that `writes`; returns what the sums must be
  // multiplied by.
  JAXINFER_DEVICE float store_state(int64_t at, bool writes, float m, float l) {
    if constexpr (!Variant::kSoftmax) {
      if (kFindsEmpty<Variant> && writes && !is_final()) params_.partial_sum[at] = l;
      return 1.0f;
    }
    const bool empty = l == 0.0f;
    const float largest = empty ? -infinity() : m * fragment_scale();
    if (is_final()) {
      if (writes) params_.lse[at] = natural_lse(largest, l);
      return empty ? 0.0f : 1.0f / l;  // a row that saw nothing has o = 0 exactly, whatever its sums hold
    }
    const float factor = empty ? 1.0f : partial_factor(m, scale(), fragment_scale(), largest);
    if (writes) {
      params_.partial_max[at] = largest;
      params_.partial_sum[at] = l * factor;
    }
    return factor;
  }

  template <int kCount>
  JAXINFER_DEVICE void apply_output(int row, int column, float l, float (&x)[kCount]) {
    if constexpr (Variant::kOutput) {
      if (l == 0.0f) return;
      const Row output_row = make_row(row);
      Variant(params_, operands_, output_row).output(x, column, output_row);
    }
  }

  const AttentionParams& params_;
  const VariantOperands& operands_;
  char* memory_;
  int lane_;
  int warp_;  // inside the stream
  int stream_;
  WarpState& state_;
  ItemRows<Config::kPacked> rows_;
  ItemCursor<Config> cursor_;
  bool exists_;  // the first item
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
  using Shared = MmaSharedMemory<Config>;
  allow_next_kernel();
  WarpState registers;
  WarpState* state = &registers;
  if constexpr (!kStateInRegisters<Config>) {
    state = reinterpret_cast<WarpState*>(memory + Shared::kWarpStates) + (threadIdx.x >> 5);
  }
  MmaAttention<Config, Variant> attention(params, cls, operands, memory, *state);
  attention.run();
  end_after_earlier_kernels();
}

}  // namespace jaxinfer
