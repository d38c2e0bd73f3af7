// Attention of a plan's items on tensor cores, for every architecture with mma.sync (sm_80 and up), bf16 and
// fp16. The shape of a CTA comes from Config: kStreams groups of kWarpsM warps. The warps of a stream split
// the query rows, streams split the KV blocks of an item and are merged at its end. Tiles 16: four streams of
// one warp, which never wait for each other inside an item; tile 32: two streams of two; larger ones: one
// stream of all warps.
//
// An item: rows of Q to shared memory; then for every KV block gather (issued blocks ahead), Q K^T, logits,
// mask, online softmax, P V; then the state is written: o and lse, or a partial of both.
#pragma once

#include "kernels/attention_mma_scores.cuh"

namespace jaxinfer {

template <class Config, class Variant>
class MmaAttention : MmaScores<Config, Variant> {
  using Scores = MmaScores<Config, Variant>;
  using Scores::hole_row;
  using Scores::item;
  using Scores::kColumns;
  using Scores::kFragments;
  using Scores::kPositions;
  using Scores::kRows;
  using Scores::lane;
  using Scores::lane_;
  using Scores::make_row;
  using Scores::memory_;
  using Scores::operands_;
  using Scores::params_;
  using Scores::position;
  using Scores::rows_;
  using Scores::scale;
  using Scores::state_;
  using Scores::tile_row;
  using Scores::warp_;
  using typename Scores::Block;
  using typename Scores::Shared;
  using typename Scores::Type;
  static constexpr int kPieces = Config::kHeadDimVo / 8;
  static constexpr int kChunksQk = Config::kHeadDimQk / 8;
  // Products are what takes time, and everything else happens beside them: weights between the products of
  // P V, whose units are others, copies behind those of Q K^T, addresses behind those of P V.
  static constexpr bool kInGaps = KvRing<Config>::kPrepares;
  using Chunks = QueryChunks<Config, Variant>;
  static constexpr bool kTransforms = Variant::kKey || Variant::kValue;  // changes tiles of K or V in place
  static_assert(Config::kTile == 16 * Config::kWarpsM * kFragments, "tile rows");
  static_assert(Config::kNumThreads == 32 * Config::kWarpsM * Config::kStreams, "threads");
  static_assert(Config::kBlockKV % 16 == 0 && Config::kBlockKV <= 64, "columns of a block");
  static_assert(Config::kSmemBytes == Shared::kBytes,
                "the tile table and the kernel disagree on shared memory");

 public:
  // Q is asked for before the first copies of K and V, and that of a later item before the state of the one
  // in front is written, where a thread has room for its part. Behind the copies it is the last to arrive:
  // 0.4 us later on an idle H200 (1 x 1024 tokens: 6.8 us instead of 6.45), 1.8 us on a busy one.
  static constexpr bool kReadsEarly = kReadsAhead<Config> && Chunks::kAll <= Chunks::kStep;

  JAXINFER_DEVICE MmaAttention(const AttentionParams& params, int cls, const VariantOperands& operands,
                               char* memory, WarpState& state, CursorState& following)
      : Scores(params, operands, memory, state),
        stream_(warp_index() / Config::kWarpsM),
        following_(following),
        cursor_(params, cls, 1, following_),
        exists_(cursor_.next()),
        ring_(params, cursor_, exists_, state_, shared_address(memory + Shared::kRing),
              reinterpret_cast<uint32_t*>(memory + Shared::kPresent),
              reinterpret_cast<int*>(memory + Shared::kPosition), stream_, warp_, lane_,
              reinterpret_cast<uint32_t*>(memory + Shared::kRowNumbers)),
        query_(shared_address(memory + Shared::kQuery), warp_, lane_),
        keys_(key_matrices<kChunksQk>(ring_.k_tile(0), lane())) {
    if (kReadsEarly && exists_) read_rows(following_);
    ring_.fill();
  }

  JAXINFER_DEVICE void run() {
    if constexpr (kInGaps) ring_.prepare();
    while (exists_) {
      if constexpr (kReadsEarly) state_.computing = following_;
      if (item().bsr_row < 0) {
        write_empty<Config>(params_, item(), state_.computing.head);
        if constexpr (kReadsEarly) read_following();
      } else {
        run_item();
      }
      if constexpr (!kReadsEarly) exists_ = cursor_.next();
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

  // What an item needs beside K and V. All of it is on its way at once: each trip to memory takes most of a
  // microsecond.
  JAXINFER_DEVICE void read_rows(const CursorState& of) {
    const ItemRows<Config::kPacked> rows{of, params_.group_divider};
    kv_offset_ = load_if(of.item.kv_begin < of.item.kv_end, params_.kv_offset + of.item.bsr_row, 0);
    if constexpr (kPositions) q_pos_ = this->load_position(rows);
    if constexpr (kReadsEarly) chunks_.read(params_, rows, fresh_thread_index());
  }

  // Before the state of the item in front is written, which takes as long as what it asks for.
  JAXINFER_DEVICE void read_following() {
    exists_ = cursor_.next();
    if (exists_) read_rows(following_);
  }

  JAXINFER_DEVICE void run_item() {
    const uint32_t query = shared_address(memory_ + Shared::kQuery);
    if constexpr (!kReadsEarly) read_rows(state_.computing);
    cta_barrier();  // the item before may still be reading Q and merged states
    if constexpr (kReadsEarly) {
      chunks_.write(params_, operands_, rows_, fresh_thread_index(), query, this->sign_bits());
    } else {
      load_query<Config, Variant>(params_, operands_, rows_, query, this->sign_bits());
    }
    if constexpr (kPositions) this->find_visible(q_pos_);
    cta_barrier();
    state_.kv_offset = kv_offset_;
    query_.load();
    this->find_clear();
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
    for (; begin < item().kv_end; begin += Config::kStreams * Config::kBlockKV) {
      wait_copies<Config::kStages - 2>();
      stream_barrier();
      if constexpr (kInGaps) {
        ring_.copy_part(free_stage());
      } else {
        ring_.issue(free_stage());
      }
      attend(begin);
      stage_ = next_stage();
    }
    if (Config::kStreams > 1 && Config::kWarpsM > 1 && begin - stream_ * Config::kBlockKV < item().kv_end) {
      // Only earlier streams have a last block.
      stream_barrier();
      if constexpr (kTransforms) stream_barrier();
    }
    if constexpr (kReadsEarly) read_following();
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
    multiply_qk(query_, kInGaps ? keys_ : make_keys(stage_), s);
    if constexpr (kInGaps) {
      // Behind the products, where they cost least (4 x 4096 tokens causal, pages of 16: 329 TFLOP/s; between
      // the products 308, where each wait for an address holds them up; before them 316).
      ring_.copy_prepared(free_stage());
      ring_.turn_item();
    }
    const Block block{ring_, stage_, begin};
    if constexpr (Variant::kLogits || !Variant::kSoftmax) this->apply_logits(block, s);
    if (Variant::kMask || __any_sync(kFullWarp, this->needs_mask(block))) this->apply_mask(block, s);

    Weights<kRows> weights{scale(), {}};
    if constexpr (Variant::kSoftmax) {
      float largest[kRows];
      find_largest(s, largest);
      if constexpr (Variant::kCapped) this->cap_scores(s, largest);
      if (find_weights(largest, softmax_, weights)) {
        float factor[kRows];
        raise_max(s, largest, softmax_, weights, factor);
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
    const auto values = row_matrices<Config::kHeadDimVo / 8>(ring_.v_tile(stage_), lane());
    multiply_pv<Config, kInGaps>(
        s,
        [&](float& x, int row) {
          if constexpr (!Variant::kSoftmax) return;
          x = weights(x, row);
          softmax_.l[row] += x;
        },
        values, o_);
    if constexpr (kInGaps) {
      ring_.prepare();
      keys_ = make_keys(next_stage());
    }
  }

  JAXINFER_DEVICE int next_stage() const { return stage_ + 1 == Config::kStages ? 0 : stage_ + 1; }
  JAXINFER_DEVICE TileMatrices<kChunksQk> make_keys(int stage) const {
    return key_matrices<kChunksQk>(ring_.k_tile(stage), lane());
  }

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
      const Col col{position(Block{ring_, stage_, begin}, c), begin + c};
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
    const float largest = empty ? -infinity() : m * this->max_scale();
    if (is_final()) {
      if (writes) params_.lse[at] = natural_lse(largest, l);
      return empty ? 0.0f : 1.0f / l;  // a row that saw nothing has o = 0 exactly, whatever its sums hold
    }
    const float factor = empty ? 1.0f : partial_factor(m, scale(), this->max_scale(), largest);
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

  int stream_;
  CursorState& following_;  // where the cursor stands; kReadsEarly: one item ahead of the one computed
  ItemCursor<Config> cursor_;
  bool exists_;  // that item
  KvRing<Config> ring_;
  QueryFragments<Config> query_;
  TileMatrices<kChunksQk> keys_;  // of the block that comes next
  int stage_ = 0;                 // of the block that comes next
  // Of the item:
  int kv_offset_;
  int q_pos_;
  Chunks chunks_;
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
  using Attention = MmaAttention<Config, Variant>;
  CursorState following;
  Attention attention(params, cls, operands, opaque(memory), *state,
                      Attention::kReadsEarly ? following : state->computing);
  attention.run();
  end_after_earlier_kernels();
}

}  // namespace jaxinfer
