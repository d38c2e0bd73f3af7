// Where K and V rows lie and how blocks of them reach shared memory: the only header of the portable
// attention kernels that knows pages, layers, strides and contiguous caches (of the warpgroup kernel, that is
// attention_wgmma_load.cuh). No math; nothing here depends on the attention rules.
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
  // Rows of 192 bytes (head dim 96) begin in the middle of a line in every other head, so that two heads
  // share a line, which must stay until the second has read its half. 64 x 8192 tokens on an H200, same run:
  // 375.4 us with requests for halves of lines and no policy, 378.7 with the policy, 414.9 with it and 8
  // lanes; 16 lanes 379.3; a whole line and a half each 384.3; exact 64-byte reads (no prefetch) 400.6. Heads
  // that do not share (pages by head) take 370.5, 364.3 with 8 lanes.
  static constexpr bool kWholeLines = Shape::kChunksQk % 8 == 0 && Shape::kChunksVo % 8 == 0;
  // That copy one row at a time; 16 are up to 1% slower.
  static constexpr int kRowLanes = kWholeLines ? 8 : 4;
  // Packed tiles of short queries are the only readers of their K and V; of long queries many tiles read the
  // same.
  static constexpr bool kReadOnce = Config::kPacked && Config::kTile < 128 && kWholeLines;
  static constexpr int kGroupRows = 32 / kRowLanes;  // of one instruction
  static_assert(Shape::kChunksQk % kRowLanes == 0 && Shape::kChunksVo % kRowLanes == 0, "lanes of a row");
  static constexpr int kGroups = (Shape::kRowsPerWarp + kGroupRows - 1) / kGroupRows;

 public:
  // `cursor` stands at the first item, if `exists`. `data`, `present`, `positions`: shared memory of all
  // streams; `warp` counts inside the stream.
  JAXINFER_DEVICE KvRing(const AttentionParams& params, const ItemCursor<Config>& cursor, bool exists,
                         WarpState& state, uint32_t data, uint32_t* present, int* positions, int stream,
                         int warp, int lane, uint32_t* row_numbers = nullptr)
      : params_(params),
        cursor_(cursor, state.loading),
        state_(state),
        data_(data + stream * Config::kStages * Shape::kStageBytes),
        present_(present + stream * Config::kStages * Config::kWarpsM),
        positions_(positions + stream * Config::kStages * Config::kBlockKV),
        row_numbers_(row_numbers),
        stream_(stream),
        warp_(warp),
        lane_(lane) {
    enter_item(exists);
    look_up();
  }

  // Starts the first copies. Not the constructor, so that other reads may come between the first page ids and
  // these.
  JAXINFER_DEVICE void fill() {
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

  // The same in steps, for streams whose warps have products to hide them behind: copy_part(), which does
  // nothing for most blocks, the straight copy_prepared(), turn_item(), and prepare() for the next time.
  // Where most blocks pass there are no branches and no shuffles, because no instruction moves across either.
  static constexpr bool kPrepares = Config::kStreams == 1;
  // Copies the next block where it has to be looked at row by row.
  JAXINFER_DEVICE void copy_part(int stage) {
    if (whole_ || begin_ < 0) return;
    copy(stage);
    begin_ += Config::kBlockKV;
  }
  // Copies it otherwise, and reads the page ids of the block behind it.
  JAXINFER_DEVICE void copy_prepared(int stage) {
    uint32_t rows[kGroups];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      rows[g] = row_numbers_[warp() * Shape::kRowsPerWarp + g * kGroupRows + lane() / kRowLanes];
    }
    const char* const k = state_.k_head + lane() % kRowLanes * 16;
    const char* const v = state_.v_head + lane() % kRowLanes * 16;
    const uint32_t tile = k_tile(stage);
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const bool wanted = whole_ && (Shape::kRowsPerWarp % kGroupRows == 0 ||
                                     g * kGroupRows + lane() / kRowLanes < Shape::kRowsPerWarp);
      copy_row_if<Shape::kChunksQk>(wanted, tile, g * kGroupRows,
                                    k + uint64_t{rows[g]} * (Shape::kChunksQk * 16u));
      copy_row_if<Shape::kChunksVo>(wanted, tile + Shape::kKBytes, g * kGroupRows,
                                    v + uint64_t{rows[g]} * (Shape::kChunksVo * 16u));
    }
    commit_copies();
    if (whole_ && lane() == 0) present_[stage * Config::kWarpsM + warp()] = kAllRows;
    begin_ += whole_ ? Config::kBlockKV : 0;
    look_up();
  }
  JAXINFER_DEVICE void turn_item() {
    __syncwarp();  // all lanes have read their row numbers, which prepare() writes
    if (begin_ < 0 || begin_ < item().kv_end) return;
    enter_item(cursor_.next());
    look_up();
  }
  // Where the rows of the next block lie, and whether all are there.
  JAXINFER_DEVICE void prepare() {
    const uint32_t row = find_row();
    store_shared_if(lane() < Shape::kRowsPerWarp,
                    shared_address(row_numbers_ + warp() * Shape::kRowsPerWarp + lane()), row);
    whole_ = __ballot_sync(kFullWarp, in_pool(find_page())) == kAllRows && is_plain();
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
  // With 32 rows per warp registers are scarce, so there both are worked out again where needed: from a
  // register, because the next instruction would wait for a special one.
  static constexpr bool kFresh = Config::kTile == 32 * Config::kWarpsM;
  JAXINFER_DEVICE int lane() const { return kFresh ? forget(thread_) & 31 : lane_; }
  JAXINFER_DEVICE int warp() const { return kFresh ? (forget(thread_) >> 5) % Config::kWarpsM : warp_; }

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
    const int64_t layer = cursor_.layer();
    state_.k_head = static_cast<const char*>(params_.k) +
                    (layer * params_.k_strides.layer + kv_head * params_.k_strides.head) * Type::kBytes;
    state_.v_head = static_cast<const char*>(params_.v) +
                    (layer * params_.v_strides.layer + kv_head * params_.v_strides.head) * Type::kBytes;
    __syncwarp();
  }

  // Index in the row's list of this lane's row of the next block.
  JAXINFER_DEVICE int lane_index() const { return begin_ + warp() * Shape::kRowsPerWarp + lane(); }

  // Reads the page id of this lane's row of the next block: early, because the copies of that block wait for
  // it.
  JAXINFER_DEVICE void look_up() {
    if constexpr (!Config::kContiguous) {
      const int64_t entry = int64_t{item().table_begin} + params_.page_divider.divide(lane_index());
      const int wanted =
          static_cast<int>(lane_has_row()) & static_cast<int>(entry < params_.kv_indices_capacity);
      page_ = load_if(wanted != 0, params_.kv_indices + entry, -1);
    }
  }

  JAXINFER_DEVICE bool lane_has_row() const {
    // Without branches: only half of the lanes may have one.
    return static_cast<int>(begin_ >= 0) & static_cast<int>(lane() < Shape::kRowsPerWarp) &
           static_cast<int>(lane_index() < item().kv_end);
  }

  // The page or, in a contiguous cache, the row of this lane's row of the next block, or -1.
  JAXINFER_DEVICE int64_t find_page() const {
    if constexpr (Config::kContiguous) {
      const int64_t row = int64_t{item().table_begin} + lane_index();
      return lane_has_row() ? row : -1;
    }
    return page_;
  }
  JAXINFER_DEVICE bool in_pool(int64_t page) const {
    return static_cast<uint64_t>(page) < static_cast<uint64_t>(params_.num_pages);
  }

  // This lane's row of the next block, as its number among the rows of the layer's cache (which are fewer
  // than 2^32, ffi/checks.h). Others get it by shuffles, so that no address is computed twice.
  JAXINFER_DEVICE uint32_t find_row() const {
    uint32_t row =
        static_cast<uint32_t>(find_page()) * static_cast<uint32_t>(params_.page_size * params_.num_kv_heads);
    if constexpr (!Config::kContiguous) {
      const int in_page =
          lane_index() - static_cast<int>(params_.page_divider.divide(lane_index())) * params_.page_size;
      // Caches are dense, so that K and V differ in the length of a row alone.
      const bool hnd = params_.k_strides.token == params_.head_dim_qk;
      row += static_cast<uint32_t>(in_page * (hnd ? 1 : params_.num_kv_heads));
    }
    return row;
  }

  static constexpr uint32_t kAllRows =
      Shape::kRowsPerWarp == 32 ? ~0u : (1u << (Shape::kRowsPerWarp & 31)) - 1;
  JAXINFER_DEVICE bool has_whole_rows() const {
    return params_.head_dim_qk == Config::kHeadDimQk && params_.head_dim_vo == Config::kHeadDimVo;
  }
  JAXINFER_DEVICE bool is_plain() const {
    return has_whole_rows() && (Config::kContiguous || params_.block_pos == nullptr);
  }

  JAXINFER_DEVICE void copy(int stage) {
    const bool there = in_pool(find_page());
    const uint32_t lane_row = find_row();
    if constexpr (!Config::kContiguous) {
      if (params_.block_pos != nullptr && there) {
        const int block = params_.page_divider.divide(lane_index());
        positions_[stage * Config::kBlockKV + warp() * Shape::kRowsPerWarp + lane()] =
            __ldg(params_.block_pos + int64_t{item().table_begin} + block) + lane_index() -
            block * params_.page_size;
      }
    }
    const uint32_t present = __ballot_sync(kFullWarp, there);
    if (lane() == 0) present_[stage * Config::kWarpsM + warp()] = present;
    const uint32_t tile = k_tile(stage);
    if (!kPrepares && present == kAllRows && has_whole_rows()) {
      copy_rows<true>(tile, lane_row, present);
    } else {
      copy_rows<false>(tile, lane_row, present);
    }
  }

  // kWhole: every row is there, and no chunk lies beyond the true head dim.
  template <bool kWhole>
  JAXINFER_DEVICE void copy_rows(uint32_t tile, uint32_t lane_row, uint32_t present) {
    const uint32_t column = lane() % kRowLanes;
    const uint32_t k_bytes = params_.head_dim_qk * Type::kBytes;
    const uint32_t v_bytes = params_.head_dim_vo * Type::kBytes;
    const char* const k = state_.k_head + column * 16;
    const char* const v = state_.v_head + column * 16;
    // Blocks in part are few: less code is worth more than a faster loop, because every launch fetches it
    // anew.
#pragma unroll(kWhole ? kGroups : 1)
    for (int g = 0; g < kGroups; ++g) {
      const int row = g * kGroupRows + lane() / kRowLanes;
      const uint64_t shared_row = __shfl_sync(kFullWarp, lane_row, row & 31);
      if (Shape::kRowsPerWarp % kGroupRows != 0 && row >= Shape::kRowsPerWarp) continue;
      const bool row_present = kWhole || (present >> row & 1) != 0;
      copy_row<kWhole, Shape::kChunksQk>(tile, g * kGroupRows, k + shared_row * k_bytes, row_present,
                                         k_bytes / 16);
      copy_row<kWhole, Shape::kChunksVo>(tile + Shape::kKBytes, g * kGroupRows, v + shared_row * v_bytes,
                                         row_present, v_bytes / 16);
    }
  }

  // Where a chunk of row first_row + row goes. Phases combine bit by bit, so that one lane-dependent offset
  // and constants make every address.
  template <int kChunks>
  static JAXINFER_DEVICE uint32_t chunk_place(uint32_t tile, int first_row, int row, int chunk) {
    return tile + first_row * RowTile<kChunks>::kPitch +
           (RowTile<kChunks>::offset(row, chunk) ^ RowTile<kChunks>::phase(first_row) << 4);
  }

  // Chunks beyond the true head dim and rows that are not there become zeros: what the pool or shared memory
  // holds there may be NaN, and 0 * NaN would reach the sums.
  template <bool kWhole, int kChunks>
  JAXINFER_DEVICE void copy_row(uint32_t tile, int first_row, const char* from, bool row_present,
                                int chunks) {
    const int column = lane() % kRowLanes;
    const int row = warp() * Shape::kRowsPerWarp + lane() / kRowLanes;
#pragma unroll
    for (int first = 0; first < kChunks; first += kRowLanes) {
      const int chunk = first + column;
      const uint32_t to = chunk_place<kChunks>(tile, first_row, row, chunk);
      if constexpr (kWhole) {
        copy_async<kReadOnce>(to, from + first * 16);
      } else {
        copy_async<kReadOnce>(to, from + first * 16, row_present && chunk < chunks);
      }
    }
  }

  // A row of a block that is whole, if `wanted`.
  template <int kChunks>
  JAXINFER_DEVICE void copy_row_if(bool wanted, uint32_t tile, int first_row, const char* from) {
    const int row = warp() * Shape::kRowsPerWarp + lane() / kRowLanes;
#pragma unroll
    for (int first = 0; first < kChunks; first += kRowLanes) {
      const int chunk = first + lane() % kRowLanes;
      const uint32_t to = chunk_place<kChunks>(tile, first_row, row, chunk);
      copy_async_if<kReadOnce>(wanted, to, from + first * 16);
    }
  }

  const AttentionParams& params_;
  ItemCursor<Config> cursor_;
  WarpState& state_;
  uint32_t data_;
  uint32_t* present_;
  int* positions_;
  uint32_t* row_numbers_;  // [kBlockKV] of the block that prepare() has seen
  int stream_;
  int warp_;
  int lane_;
  int thread_ = fresh_thread_index();
  int begin_;           // index of the next block's first column in the row's list; -1 behind the last block
  int page_ = -1;       // page id of this lane's row of the next block, or -1; not used when contiguous
  bool whole_ = false;  // prepare() found every row of the next block, and none needs more than its copy
};

}  // namespace jaxinfer
