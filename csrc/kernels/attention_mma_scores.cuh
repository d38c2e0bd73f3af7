// A warp's scores of a KV block: the rows and columns they belong to, logits, and what hides them. Which
// blocks there are and what becomes of the scores is attention_mma.cuh's business.
#pragma once

#include "kernels/fragments.cuh"
#include "kernels/mma_memory.cuh"
#include "kernels/query.cuh"
#include "kernels/softmax.cuh"
#include "kernels/variant.cuh"

namespace jaxinfer {

template <class Config, class Variant>
class MmaScores {
 protected:
  using Type = Element<Config::kDType>;
  using Shared = MmaSharedMemory<Config>;
  static constexpr int kFragments = QueryFragments<Config>::kFragments;
  static constexpr int kRows = 2 * kFragments;           // fragment rows of a thread
  static constexpr int kColumns = Config::kBlockKV / 8;  // pieces of eight columns
  static constexpr bool kPositions = (Config::kRules & kPositionRules) != 0;
  static constexpr uint64_t kAllColumns =
      Config::kBlockKV == 64 ? ~uint64_t{0} : (uint64_t{1} << (Config::kBlockKV & 63)) - 1;

  // A block in the ring; column 0 is `begin` in the row's list.
  struct Block {
    const KvRing<Config>& ring;
    int stage;
    int begin;
  };

  JAXINFER_DEVICE MmaScores(const AttentionParams& params, const VariantOperands& operands, char* memory,
                            WarpState& state)
      : params_(params),
        operands_(operands),
        memory_(memory),
        lane_(threadIdx.x & 31),
        warp_(warp_index() % Config::kWarpsM),
        state_(state),
        rows_{state_.computing, params.group_divider} {}

  // With 32 rows per warp registers are scarce, so there both are read again where needed.
  JAXINFER_DEVICE int lane() const { return kFragments > 1 ? fresh_thread_index() & 31 : lane_; }
  JAXINFER_DEVICE int warp() const {
    return kFragments > 1 ? (fresh_thread_index() >> 5) % Config::kWarpsM : warp_;
  }
  JAXINFER_DEVICE const Item& item() const { return state_.computing.item; }

  // Fragments hold q.k; with a negative scale Q is negated, so that the largest product is the largest logit.
  JAXINFER_DEVICE float logit_scale() const { return fabsf(params_.variant.sm_scale); }
  JAXINFER_DEVICE uint32_t sign_bits() const { return params_.variant.sm_scale < 0.0f ? Type::kSignBits : 0; }
  // Of maxima to logits and to base-2 exponents.
  JAXINFER_DEVICE float max_scale() const { return jaxinfer::max_scale<Variant>(params_.variant); }
  JAXINFER_DEVICE float scale() const { return exponent_scale(max_scale()); }

  JAXINFER_DEVICE Row make_row(int i) const { return query_row(params_, rows_, i); }
  // Tile row of this thread's fragment row r.
  JAXINFER_DEVICE int tile_row(int r) const {
    return (warp() * kFragments + (r >> 1)) * 16 + (lane() >> 2) + (r & 1) * 8;
  }

  // Position of this thread's row.
  JAXINFER_DEVICE int load_position(const ItemRows<Config::kPacked>& rows) const {
    static_assert(Config::kTile <= Config::kNumThreads, "a thread for every row");
    const int row = fresh_thread_index();
    return load_if(row < rows.num_rows(), params_.q_pos + rows.state.item.token_begin + rows.token(row), 0);
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

  // Position of column c of the block. Where the layout gives block positions they came with the block.
  JAXINFER_DEVICE int position(const Block& block, int c) const {
    return params_.block_pos != nullptr ? block.ring.positions(block.stage)[c]
                                        : state_.kv_offset + block.begin + c;
  }

  JAXINFER_DEVICE bool needs_mask(const Block& block) const {
    bool needed = block.ring.present(block.stage) != kAllColumns;
    if constexpr (kPositions) {
      // Positions ascend along a row's list. All of it is read at once, without branches.
      needed |= position(block, 0) < state_.clear_first;
      needed |= position(block, Config::kBlockKV - 1) > state_.clear_last;
    }
    return needed;
  }

  // Hides columns: those that are not there, and those that a rule or the variant hides.
  JAXINFER_DEVICE void apply_mask(const Block& block, float (&s)[kFragments][kColumns][4]) {
    const uint64_t present = block.ring.present(block.stage);
    if (kPositions && !Variant::kMask && present == kAllColumns && params_.block_pos == nullptr) {
      apply_ranges(block, s);
    } else {
      apply_columns(block, present, s);
    }
  }

  // Where every column is there and positions count up with the columns: by two comparisons each.
  JAXINFER_DEVICE void apply_ranges(const Block& block, float (&s)[kFragments][kColumns][4]) {
    const int from = state_.kv_offset + block.begin + 2 * (lane() & 3);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const Visible range = visible()[tile_row(r)];
      // Counted from `from`, at most a block. Where the subtraction counts it is exact without a sign.
      const int first = range.first <= from ? 0 : distance(from, range.first);
      const int last = range.last < from ? -1 : distance(from, range.last);
#pragma unroll
      for (int i = 0; i < 2 * kColumns; ++i) {
        const int c = 8 * (i >> 1) + (i & 1);
        float& x = score(s, r, i);
        x = first <= c && c <= last ? x : hidden_score<Variant::kSoftmax, Variant::kCapped>();
      }
    }
  }

  // Of two positions in this order, but at most a block.
  static JAXINFER_DEVICE int distance(int from, int to) {
    const uint32_t exact = static_cast<uint32_t>(to) - static_cast<uint32_t>(from);
    return static_cast<int>(min(exact, static_cast<uint32_t>(Config::kBlockKV)));
  }

  // Any others: first what to keep, a bit per column, in a loop that costs little code; then the scores.
  JAXINFER_DEVICE void apply_columns(const Block& block, uint64_t present,
                                     float (&s)[kFragments][kColumns][4]) {
    const int first = 2 * (lane() & 3);
    const uint64_t mine = present >> first;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const Visible range = kPositions ? visible()[tile_row(r)] : Visible{};
      const Row row = Variant::kMask ? hole_row(r) : Row{};
      const Variant variant(params_, operands_, row);
      uint32_t keep = 0;
      // A variant's mask is asked of every block, and what it reads should be on its way at once. Small tiles
      // have few columns, and tile 32 at head dim 192 spills with the loop.
#pragma unroll(Variant::kMask || Config::kStreams > 1 ? 2 * kColumns : 1)
      for (int i = 0; i < 2 * kColumns; ++i) {
        const int c = 8 * (i >> 1) + (i & 1);
        bool kept = (mine >> c & 1) != 0;
        const Col col{position(block, first + c), block.begin + first + c};
        if constexpr (kPositions) kept = kept && range.first <= col.kv_pos && col.kv_pos <= range.last;
        if constexpr (Variant::kMask) kept = kept && variant.mask(row, col);
        keep |= static_cast<uint32_t>(kept) << i;
      }
#pragma unroll
      for (int i = 0; i < 2 * kColumns; ++i) {
        float& x = score(s, r, i);
        x = (keep >> i & 1) != 0 ? x : hidden_score<Variant::kSoftmax, Variant::kCapped>();
      }
    }
  }

  // Score i of this thread's fragment row r: of column 8 (i / 2) + i % 2, counted from this lane's first.
  static JAXINFER_DEVICE float& score(float (&s)[kFragments][kColumns][4], int r, int i) {
    return s[r >> 1][i >> 1][2 * (r & 1) + (i & 1)];
  }

  // Products to logits, through the variant where it wants that.
  JAXINFER_DEVICE void apply_logits(const Block& block, float (&s)[kFragments][kColumns][4]) {
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
          if constexpr (Variant::kLogits)
            x = variant.logits(x, row, Col{position(block, c), block.begin + c});
        }
      }
    }
  }

  // Scores to capped logits, the rows' largest ones, too. How a row is capped depends on its block alone, so
  // that its bits do not depend on who shares its warp.
  JAXINFER_DEVICE void cap_scores(float (&s)[kFragments][kColumns][4], float (&largest)[kRows]) const {
    const ScoreCap cap(params_.variant.logits_soft_cap, fragment_scale<Variant>(params_.variant));
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (cap.is_near(largest[r])) {
        largest[r] = cap.near(largest[r]);
#pragma unroll
        for (int i = 0; i < 2 * kColumns; ++i) score(s, r, i) = cap.near(score(s, r, i));
      } else {
        largest[r] = cap.logit(largest[r]);
#pragma unroll
        for (int i = 0; i < 2 * kColumns; ++i) score(s, r, i) = cap.any(score(s, r, i));
      }
    }
  }

  // Of fragment row r. Idle rows copy a real one; their results are not read.
  JAXINFER_DEVICE Row hole_row(int r) const { return make_row(min(tile_row(r), rows_.num_rows() - 1)); }

  const AttentionParams& params_;
  const VariantOperands& operands_;
  char* memory_;
  int lane_;
  int warp_;  // inside the stream
  WarpState& state_;
  ItemRows<Config::kPacked> rows_;
};

}  // namespace jaxinfer
