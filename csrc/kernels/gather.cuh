// Where K and V rows lie and how blocks of them reach shared memory: the only header that knows pages,
// layers, strides and contiguous caches. No math; nothing here depends on the attention rules.
#pragma once

#include "kernels/work.cuh"

namespace jaxinfer {

// A tile of rows in shared memory, kChunks pieces of 16 bytes each, swizzled so that eight rows at one column
// of chunks lie in different banks: for ldmatrix, for copies and for plain 16-byte reads.
template <int kChunks>
struct RowTile {
  static_assert(kChunks % 8 == 0 || kChunks == 12, "rows are whole multiples of 128 bytes, or 192");
  static constexpr int kPitch = kChunks * 16;

  // What the low bits of a row's chunk numbers are combined with.
  static JAXINFER_DEVICE int phase(int row) { return kChunks % 8 == 0 ? row & 7 : (row >> 1) & 3; }
  static JAXINFER_DEVICE uint32_t offset(int row, int chunk) {
    return static_cast<uint32_t>(row * kPitch + ((chunk ^ phase(row)) << 4));
  }
};

// Sizes of a ring of KV blocks. A stream is a group of kWarpsM warps that share one ring and read the same
// blocks; stream s of an item reads blocks s, s + kStreams, ... Everything that a stream needs is private to
// it.
template <class Config>
struct RingShape {
  using Type = Element<Config::kDType>;
  static constexpr int kChunksQk = Config::kHeadDimQk / Type::kPerChunk;
  static constexpr int kChunksVo = Config::kHeadDimVo / Type::kPerChunk;
  static constexpr int kKBytes = Config::kBlockKV * kChunksQk * 16;
  static constexpr int kVBytes = Config::kBlockKV * kChunksVo * 16;
  static constexpr int kStageBytes = kKBytes + kVBytes;
  static constexpr int kStages = Config::kStreams * Config::kStages;  // of all streams
  static constexpr int kBytes = kStages * kStageBytes;
  static constexpr int kRowsPerWarp = Config::kBlockKV / Config::kWarpsM;
  // Per stage one word of present columns for every loading warp, and the columns' positions.
  static constexpr int kPresentBytes = kStages * Config::kWarpsM * 4;
  static constexpr int kPositionBytes = kStages * Config::kBlockKV * 4;
  static_assert(kRowsPerWarp * Config::kWarpsM == Config::kBlockKV && kRowsPerWarp <= 32,
                "rows per loading warp");
};

// Loads the blocks of a CTA's items in order, ahead of their use and across the borders of items.
template <class Config>
class KvRing {
  using Shape = RingShape<Config>;
  using Type = Element<Config::kDType>;
  static constexpr int kRowLanes = 8;  // that copy one row at a time; 16 are up to 1% slower
  // Packed tiles of short queries are the only readers of their K and V; of long queries many tiles read the
  // same.
  static constexpr bool kReadOnce = Config::kPacked && Config::kTile < 128;

 public:
  // `cursor` stands at the first item, if `exists`. `data`, `present`, `positions`: shared memory of all streams; `warp` counts inside the stream.
  JAXINFER_DEVICE KvRing(const AttentionParams& params, const ItemCursor<Config>& cursor, bool exists, WarpState& state, uint32_t data, uint32_t* present, int* positions, int stream,
                         int warp, int lane)
      : params_(params),
        cursor_(cursor, state.loading),
        state_(state),
        data_(data + stream * Config::kStages * Shape::kStageBytes),
        present_(present + stream * Config::kStages * Config::kWarpsM),
        positions_(positions + stream * Config::kStages * Config::kBlockKV),
        stream_(stream),
        warp_(warp),
        lane_(lane) {
    enter_item(exists);
    look_up();
#pragma unroll 1
    for (int i = 0; i < Config::kStages - 1; ++i) issue(i);
  }

  // Starts the copies of the next block into a stage, as one group (an empty one behind the last block).
  JAXINFER_DEVICE void issue(int stage) {
    if (begin_ >= 0) {
      copy(stage);
      begin_ += Config::kStreams * Config::kBlockKV;
      if (begin_ >= item().kv_end) enter_item(cursor_.next());
      look_up();
    }
    commit_copies();
  }

  JAXINFER_DEVICE uint32_t k_tile(int stage) const { return data_ + stage * Shape::kStageBytes; }
  JAXINFER_DEVICE uint32_t v_tile(int stage) const { return k_tile(stage) + Shape::kKBytes; }

  // Bit c: column c of the stage's block lies inside the item's range and in the pool.
  JAXINFER_DEVICE uint64_t present(int stage) const {
    uint64_t bits = 0;
#pragma unroll
    for (int w = 0; w < Config::kWarpsM; ++w) {
      bits |= uint64_t{present_[stage * Config::kWarpsM + w]} << (w * Shape::kRowsPerWarp);
    }
    return bits;
  }
  // Positions of the stage's columns; written only where the layout gives block positions.
  JAXINFER_DEVICE const int* positions(int stage) const { return positions_ + stage * Config::kBlockKV; }

 private:
  JAXINFER_DEVICE const Item& item() const { return cursor_.state().item; }

  // Goes to the first block of this stream from the cursor's item on, if that `exists`.
  JAXINFER_DEVICE void enter_item(bool exists) {
    for (; exists; exists = cursor_.next()) {
      begin_ = item().kv_begin + stream_ * Config::kBlockKV;
      if (begin_ < item().kv_end) break;
    }
    if (!exists) {
      begin_ = -1;
      return;
    }
    const int head = cursor_.state().head;
    const int kv_head = Config::kPacked ? head : params_.group_divider.divide(head);
    const int64_t layer = params_.layer == nullptr ? 0 : *params_.layer;
    state_.k_head = static_cast<const char*>(params_.k) +
                    (layer * params_.k_strides.layer + kv_head * params_.k_strides.head) * Type::kBytes;
    state_.v_head = static_cast<const char*>(params_.v) +
                    (layer * params_.v_strides.layer + kv_head * params_.v_strides.head) * Type::kBytes;
    __syncwarp();
  }

  // Index in the row's list of this lane's row of the next block.
  JAXINFER_DEVICE int lane_index() const { return begin_ + warp_ * Shape::kRowsPerWarp + lane_; }

  // Reads the page id of this lane's row of the next block: early, because the copies of that block wait for
  // it.
  JAXINFER_DEVICE void look_up() {
    if constexpr (!Config::kContiguous) {
      page_ = -1;
      if (!lane_has_row()) return;
      const int64_t entry = int64_t{item().table_begin} + params_.page_divider.divide(lane_index());
      if (entry < params_.kv_indices_capacity) page_ = __ldg(params_.kv_indices + entry);
    }
  }

  JAXINFER_DEVICE bool lane_has_row() const {
    return begin_ >= 0 && lane_ < Shape::kRowsPerWarp && lane_index() < item().kv_end;
  }

  JAXINFER_DEVICE void copy(int stage) {
    // Each lane knows one row, as its number among the rows of the layer's cache (which are fewer than 2^32,
    // ffi/checks.h); the others get it by shuffles, so that no address is computed twice.
    int64_t page = page_;
    if constexpr (Config::kContiguous) page = lane_has_row() ? int64_t{item().table_begin} + lane_index() : -1;
    const bool in_pool = page >= 0 && page < params_.num_pages;
    uint32_t lane_row = static_cast<uint32_t>(page) * static_cast<uint32_t>(params_.page_size * params_.num_kv_heads);
    if constexpr (!Config::kContiguous) {
      const int block = params_.page_divider.divide(lane_index());
      const int in_page = lane_index() - block * params_.page_size;
      // Caches are dense, so that K and V differ in the length of a row alone.
      const bool hnd = params_.k_strides.token == params_.head_dim_qk;
      lane_row += static_cast<uint32_t>(in_page * (hnd ? 1 : params_.num_kv_heads));
      if (params_.block_pos != nullptr && in_pool) {
        positions_[stage * Config::kBlockKV + warp_ * Shape::kRowsPerWarp + lane_] =
            __ldg(params_.block_pos + int64_t{item().table_begin} + block) + in_page;
      }
    }
    const uint32_t present = __ballot_sync(kFullWarp, in_pool);
    if (lane_ == 0) present_[stage * Config::kWarpsM + warp_] = present;
    // Where ptxas 13.0 sees that a stage is the same for all lanes, it gives LDGSTS a uniform register for it, and an
    // H200 ends in an illegal instruction.
    const uint32_t tile = k_tile(stage) ^ opaque_zero();
    constexpr uint32_t kAll = Shape::kRowsPerWarp == 32 ? ~0u : (1u << (Shape::kRowsPerWarp & 31)) - 1;
    if (present == kAll && params_.head_dim_qk == Config::kHeadDimQk &&
        params_.head_dim_vo == Config::kHeadDimVo) {
      copy_rows<true>(tile, lane_row, present);
    } else {
      copy_rows<false>(tile, lane_row, present);
    }
  }

  // kWhole: every row is there, and no chunk lies beyond the true head dim.
  template <bool kWhole>
  JAXINFER_DEVICE void copy_rows(uint32_t tile, uint32_t lane_row, uint32_t present) {
    constexpr int kRows = 32 / kRowLanes;  // of one instruction
    constexpr int kGroups = (Shape::kRowsPerWarp + kRows - 1) / kRows;
    const uint32_t column = lane_ % kRowLanes;
    const uint32_t k_bytes = params_.head_dim_qk * Type::kBytes;
    const uint32_t v_bytes = params_.head_dim_vo * Type::kBytes;
    const uint64_t policy = make_policy(kReadOnce);
    const char* const k = state_.k_head + column * 16;
    const char* const v = state_.v_head + column * 16;
    // Blocks in part are few: less code is worth more than a faster loop, because every launch fetches it anew.
#pragma unroll(kWhole ? kGroups : 1)
    for (int g = 0; g < kGroups; ++g) {
      const int row = g * kRows + lane_ / kRowLanes;
      const uint64_t shared_row = __shfl_sync(kFullWarp, lane_row, row & 31);
      if (Shape::kRowsPerWarp % kRows != 0 && row >= Shape::kRowsPerWarp) continue;
      const bool row_present = kWhole || (present >> row & 1) != 0;
      copy_row<kWhole, Shape::kChunksQk>(tile, g * kRows, k + shared_row * k_bytes, row_present,
                                         k_bytes / 16, policy);
      copy_row<kWhole, Shape::kChunksVo>(tile + Shape::kKBytes, g * kRows, v + shared_row * v_bytes, row_present,
                                         v_bytes / 16, policy);
    }
  }

  // Chunks beyond the true head dim and rows that are not there become zeros: what the pool or shared memory
  // holds there may be NaN, and 0 * NaN would reach the sums.
  template <bool kWhole, int kChunks>
  JAXINFER_DEVICE void copy_row(uint32_t tile, int first_row, const char* from, bool row_present,
                                int chunks, uint64_t policy) {
    const int column = lane_ % kRowLanes;
    const int row = warp_ * Shape::kRowsPerWarp + lane_ / kRowLanes;
#pragma unroll
    for (int first = 0; first < kChunks; first += kRowLanes) {
      const int chunk = first + column;
      if (kChunks % kRowLanes != 0 && chunk >= kChunks) continue;
      // Phases combine bit by bit, so that one lane-dependent offset and constants make every address.
      const uint32_t to = tile + first_row * RowTile<kChunks>::kPitch +
                          (RowTile<kChunks>::offset(row, chunk) ^ RowTile<kChunks>::phase(first_row) << 4);
      if constexpr (kWhole) {
        copy_async(to, from + first * 16, policy);
      } else {
        copy_async(to, from + first * 16, row_present && chunk < chunks, policy);
      }
    }
  }

  const AttentionParams& params_;
  ItemCursor<Config> cursor_;
  WarpState& state_;
  uint32_t data_;
  uint32_t* present_;
  int* positions_;
  int stream_;
  int warp_;
  int lane_;
  int begin_;      // index of the next block's first column in the row's list; -1 behind the last block
  int page_ = -1;  // page id of this lane's row of the next block, or -1; not used when contiguous
};

}  // namespace jaxinfer
