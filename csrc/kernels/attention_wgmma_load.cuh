// Shared memory of the warpgroup kernel, and its producers: the warps that bring Q, K and V of a CTA's items
// there, by the copy engine from contiguous caches (TMA) and from pages of whole swizzle patterns (page TMA),
// else row by row (gather). The only header of the kernel that knows pages and layers. No math.
#pragma once

#include "kernels/sm90.cuh"
#include "kernels/work.cuh"

namespace jaxinfer {

// What a warp of consumers keeps about its item. It lies in shared memory: registers are for the products.
struct ConsumerState {
  CursorState cursor;
  uint32_t query_parity;
  int kv_offset;  // position of the row's first KV token
  int kv_begin;   // columns [kv_begin, kv_end) of the row's list
  int kv_end;
};

// Columns that a query row sees, [begin, end): indices in the BSR row's list, or positions where the layout
// gives them.
struct ColumnRange {
  int begin;
  int end;
};

// Offsets in bytes. _wgmma_smem_bytes of jaxinfer/jit/tiles.py is the same sum.
template <class Config>
struct WgmmaShared {
  static constexpr int kPanelsQk = (Config::kHeadDimQk + kPanelElements - 1) / kPanelElements;
  static constexpr int kPanelsVo = (Config::kHeadDimVo + kPanelElements - 1) / kPanelElements;
  static constexpr int kConsumers = Config::kTile / 64;  // warpgroups
  static constexpr int kQueryPanel = Config::kTile * kPanelBytes;
  static constexpr int kKvPanel = Config::kBlockKV * kPanelBytes;
  static constexpr int kKBytes = kPanelsQk * kKvPanel;
  static constexpr int kVBytes = kPanelsVo * kKvPanel;
  static constexpr int kStages = Config::kStages;

  static constexpr int kQuery = 0;
  static constexpr int kK = kQuery + kPanelsQk * kQueryPanel;
  static constexpr int kV = kK + kStages * kKBytes;
  static constexpr int kRanges = kV + kStages * kVBytes;        // ColumnRange[tile]
  static constexpr int kPresent = kRanges + Config::kTile * 8;  // uint4[stages]
  static constexpr int kPositions = kPresent + kStages * 16;    // int[stages][block]
  static constexpr int kBarriers = kPositions + kStages * Config::kBlockKV * 4;
  static constexpr int kNumBarriers = 2 * kConsumers + 4 * kStages;
  static constexpr int kConsumerStates = kBarriers + kNumBarriers * 8;  // ConsumerState[consumer warps]
  static constexpr int kProducerStates =                                // CursorState[4]
      kConsumerStates + 4 * kConsumers * static_cast<int>(sizeof(ConsumerState));
  static constexpr int kBytes = (kProducerStates + 4 * static_cast<int>(sizeof(CursorState)) + 15) / 16 * 16;
  static_assert(Config::kBlockKV % 16 == 0 && Config::kBlockKV <= 128, "columns of a block");
  static_assert(Config::kNumThreads == kWarpgroupThreads * (kConsumers + 1), "a producer and the consumers");
  // Per thread, as the launch deals them; a role that asks for more than is left waits for ever.
  static constexpr int kRegisters = 65536 / Config::kNumThreads / 8 * 8;
  static_assert(Config::kProducerRegisters + kConsumers * Config::kConsumerRegisters <=
                    (kConsumers + 1) * kRegisters,
                "registers of all roles");
  static_assert(Config::kSmemBytes == kBytes, "the tile table and the kernel disagree on shared memory");
};

// Addresses of the barriers. Full ones are completed by producers, empty ones by consumers, one arrival per
// warp.
template <class Config>
struct WgmmaBarriers {
  using Shared = WgmmaShared<Config>;
  uint32_t first;

  JAXINFER_DEVICE uint32_t query_full(int c) const { return first + 8 * c; }
  JAXINFER_DEVICE uint32_t query_empty(int c) const { return first + 8 * (Shared::kConsumers + c); }
  JAXINFER_DEVICE uint32_t k_full(int stage) const { return ring(0, stage); }
  JAXINFER_DEVICE uint32_t k_empty(int stage) const { return ring(1, stage); }
  JAXINFER_DEVICE uint32_t v_full(int stage) const { return ring(2, stage); }
  JAXINFER_DEVICE uint32_t v_empty(int stage) const { return ring(3, stage); }

 private:
  JAXINFER_DEVICE uint32_t ring(int which, int stage) const {
    return first + 8 * (2 * Shared::kConsumers + which * Shared::kStages + stage);
  }
};

// How blocks of KV tokens are cut out of an item: from `first` on, kBlockKV each, the last one first, because
// the blocks that need masks are the last ones of a causal item.
template <class Config>
struct BlockRange {
  int first;
  int count;

  JAXINFER_DEVICE explicit BlockRange(const Item& item) {
    // A page box cannot begin inside of a swizzle pattern; columns before kv_begin are masked.
    first = Config::kPageBox > 0 ? item.kv_begin & ~(Config::kPageBox - 1) : item.kv_begin;
    count =
        item.kv_end <= item.kv_begin ? 0 : (item.kv_end - first + Config::kBlockKV - 1) / Config::kBlockKV;
  }
  JAXINFER_DEVICE int begin(int i) const { return first + i * Config::kBlockKV; }
};

// The item of a cursor as this kernel runs it: a contiguous row ends where the cache does.
template <class Config>
JAXINFER_DEVICE Item bounded_item(const AttentionParams& params, const CursorState& state) {
  Item item = state.item;
  if constexpr (Config::kContiguous) {
    const int64_t room = params.num_pages - item.table_begin;
    if (item.kv_end > room) item.kv_end = max(item.kv_begin, static_cast<int>(max(room, int64_t{0})));
  }
  return item;
}

template <class Config>
class WgmmaProducer {
  using Shared = WgmmaShared<Config>;
  static constexpr bool kGather = !Config::kContiguous && Config::kPageBox == 0;
  static constexpr int kWarps = Config::kProducerWarps;
  static constexpr int kRowsPerWarp = Config::kBlockKV / kWarps;
  static_assert(!kGather || (kWarps == 4 && kRowsPerWarp % 8 == 0), "rows of a gathering warp");

 public:
  // Arrivals that fill a slot of K (and, but for the last, of V).
  static constexpr int kKArrivals = kGather ? kWarpgroupThreads + kWarps : kWarps;
  static constexpr int kVArrivals = kGather ? kWarpgroupThreads : kWarps;

  JAXINFER_DEVICE WgmmaProducer(const AttentionParams& params, int cls, const TensorMaps& maps, char* memory)
      : params_(params),
        cls_(cls),
        maps_(maps),
        memory_(memory),
        barriers_{shared_address(memory + Shared::kBarriers)},
        shared_(shared_address(memory)),
        warp_(static_cast<int>(threadIdx.x >> 5) & 3),
        lane_(static_cast<int>(threadIdx.x) & 31),
        layer_(params.layer == nullptr ? 0 : *params.layer),
        state_(reinterpret_cast<CursorState*>(memory + Shared::kProducerStates)[warp_]) {}

  JAXINFER_DEVICE void run() {
    if (warp_ >= kWarps) return;
    ItemCursor<Config> cursor(params_, cls_, 1, state_);
    RingCursor<Shared::kStages> slot(1);
    uint32_t query_parity = 1;
    while (cursor.next()) {
      const Item item = bounded_item<Config>(params_, state_);
      const BlockRange<Config> blocks(item);
      // For all warps of the CTA: what starts an item would wait for it.
      if (warp_ == 0) read_ahead(cursor.item_behind());
      if (item.bsr_row < 0 || blocks.count == 0) continue;
      if (warp_ == 0) read_rows_ahead();
      const int last = blocks.begin(blocks.count - 1);
      int page = look_up(last);
      for (int begin = last; begin >= blocks.first; begin -= Config::kBlockKV) {
        // Page ids are read a block ahead: else every block would wait for them.
        const int next = begin > blocks.first ? look_up(begin - Config::kBlockKV) : 0;
        wait_barrier(barriers_.k_empty(slot.stage()), slot.parity());
        // Not where it was read: the comparison would wait for it.
        if (page >= params_.num_pages) page = -1;
        load_k(slot.stage(), begin, page);
        // Q comes after the first K: its place becomes free only when the item before has used its last K.
        if (begin == last) {
          if (warp_ == 0) load_query(query_parity);
          query_parity ^= 1;
        }
        wait_barrier(barriers_.v_empty(slot.stage()), slot.parity());
        load_v(slot.stage(), begin, page);
        page = next;
        slot.advance();
      }
    }
    if constexpr (kGather) wait_copies<0>();
  }

 private:
  // Positions of the item's rows, for the consumers: when they come to the item, they have nothing else to
  // do.
  JAXINFER_DEVICE void read_rows_ahead() const {
    constexpr int kLine = 32;
    const int tokens = state_.item.flags & 0xffff;
    const int first = lane_ * kLine;
    if (first < tokens + kLine - 1)
      read_ahead(params_.q_pos + state_.item.token_begin + min(first, tokens - 1));
    if (lane_ == 31) read_ahead(params_.kv_offset + state_.item.bsr_row);
  }

  // Rows of a warpgroup by themselves where tokens do not straddle them, else the whole tile for all of them.
  JAXINFER_DEVICE void load_query(uint32_t parity) {
    const int group = Config::kPacked ? params_.group_divider.divisor : 1;
    const int first_head = Config::kPacked ? state_.head * group : state_.head;
    const bool split = (64 % group) == 0;
    const int parts = split ? Shared::kConsumers : 1;
    const int tokens = (split ? 64 : Config::kTile) / group;  // of a part
    for (int c = 0; c < parts; ++c) {
      for (int owner = c; owner < (split ? c + 1 : Shared::kConsumers); ++owner) {
        wait_barrier(barriers_.query_empty(owner), parity);
      }
      if (elect_lane()) {
        const uint32_t full = barriers_.query_full(c);
        arrive_expecting(full, Shared::kPanelsQk * tokens * group * kPanelBytes);
#pragma unroll
        for (int p = 0; p < Shared::kPanelsQk; ++p) {
          copy_box(shared_ + Shared::kQuery + p * Shared::kQueryPanel + c * 64 * kPanelBytes, &maps_.q, full,
                   p * kPanelElements, first_head, state_.item.token_begin + c * tokens);
        }
      }
      __syncwarp();
    }
  }

  JAXINFER_DEVICE uint32_t k_slot(int stage) const { return shared_ + Shared::kK + stage * Shared::kKBytes; }
  JAXINFER_DEVICE uint32_t v_slot(int stage) const { return shared_ + Shared::kV + stage * Shared::kVBytes; }

  // What is known of an item is read where it is needed, from shared memory: registers are scarce here.
  JAXINFER_DEVICE int kv_head() const {
    return Config::kPacked ? state_.head : params_.group_divider.divide(state_.head);
  }
  // Index in the row's list of this lane's row (gather), or of the first one of its box (page TMA).
  JAXINFER_DEVICE int lane_index(int begin) const {
    return begin + (kGather ? warp_ * kRowsPerWarp + lane_ : lane_ * Config::kPageBox);
  }
  JAXINFER_DEVICE int in_page(int index) const {
    return index - params_.page_divider.divide(index) * params_.page_divider.divisor;
  }

  // The page of this lane's box or row, inside the pool or not; negative where nothing is.
  JAXINFER_DEVICE int look_up(int begin) const {
    int page = -1;
    if constexpr (!Config::kContiguous) {
      const int index = lane_index(begin);
      if (lane_ < kLanes && index < state_.item.kv_end) {
        const int64_t at = int64_t{state_.item.table_begin} + params_.page_divider.divide(index);
        if (at < params_.kv_indices_capacity) page = __ldg(params_.kv_indices + at);
      }
    }
    return page;
  }

  JAXINFER_DEVICE void load_k(int stage, int begin, int page) const {
    const uint32_t full = barriers_.k_full(stage);
    if constexpr (Config::kContiguous) {
      contiguous<Shared::kPanelsQk>(k_slot(stage), &maps_.k, full, begin);
    } else {
      describe(stage, begin, page);
      if constexpr (kGather) {
        gather<Shared::kPanelsQk>(k_slot(stage), params_.k, params_.k_strides, params_.head_dim_qk, begin,
                                  page);
        arrive_after_copies(full);
        if (lane_ == 0) arrive(full);
      } else {
        pages<Shared::kPanelsQk>(k_slot(stage), &maps_.k, full, begin, page);
      }
    }
  }
  JAXINFER_DEVICE void load_v(int stage, int begin, int page) const {
    const uint32_t full = barriers_.v_full(stage);
    if constexpr (Config::kContiguous) {
      contiguous<Shared::kPanelsVo>(v_slot(stage), &maps_.v, full, begin);
    } else if constexpr (kGather) {
      gather<Shared::kPanelsVo>(v_slot(stage), params_.v, params_.v_strides, params_.head_dim_vo, begin,
                                page);
      arrive_after_copies(full);
    } else {
      pages<Shared::kPanelsVo>(v_slot(stage), &maps_.v, full, begin, page);
    }
  }

  template <int kPanels>
  JAXINFER_DEVICE void contiguous(uint32_t to, const TensorMap* map, uint32_t full, int begin) const {
    if (elect_lane()) {
      arrive_expecting(full, kPanels * Shared::kKvPanel);
#pragma unroll
      for (int p = 0; p < kPanels; ++p) {
        copy_box(to + p * Shared::kKvPanel, map, full, p * kPanelElements, state_.item.table_begin + begin,
                 kv_head(), layer_);
      }
    }
    __syncwarp();
  }

  // Boxes of kPageBox rows; the producer warps share them. A page that is not there is a coordinate outside
  // of the tensor, which reads as zeros.
  template <int kPanels>
  JAXINFER_DEVICE void pages(uint32_t to, const TensorMap* map, uint32_t full, int begin, int page) const {
    constexpr int kBoxes = Config::kBlockKV / Config::kPageBox;
    constexpr int kMost = (kBoxes + kWarps - 1) / kWarps;  // of one warp
    const int first = warp_ * kMost;
    const int count = min(kMost, kBoxes - first);
    if (elect_lane()) arrive_expecting(full, count * kPanels * Config::kPageBox * kPanelBytes);
    __syncwarp();
    const int head = kv_head();
    const int lane_row = in_page(lane_index(begin));
#pragma unroll(kPanels > 2 ? 1 : kMost)  // for registers
    for (int j = 0; j < kMost; ++j) {
      const int box = first + j;
      const int box_page = __shfl_sync(kFullWarp, page < 0 ? kOutside : page, box & 31);
      const int row = __shfl_sync(kFullWarp, lane_row, box & 31);
      if (kBoxes % kWarps != 0 && j >= count) break;
      if (elect_lane()) {
#pragma unroll
        for (int p = 0; p < kPanels; ++p) {
          copy_box(to + p * Shared::kKvPanel + box * Config::kPageBox * kPanelBytes, map, full,
                   p * kPanelElements, row, head, box_page, layer_);
        }
      }
      __syncwarp();
    }
  }

  // Each lane knows the place of one row; eight lanes copy a row, 128 bytes at a time. Rows that are not
  // there and chunks beyond the true head dim become zeros.
  template <int kPanels>
  JAXINFER_DEVICE void gather(uint32_t to, const void* from, const CacheStrides& strides, int head_dim,
                              int begin, int page) const {
    const uint32_t present = __ballot_sync(kFullWarp, page >= 0);
    const int64_t row_start = page < 0 ? 0
                                       : layer_ * strides.layer + kv_head() * strides.head +
                                             page * strides.page + in_page(lane_index(begin)) * strides.token;
    const int column = lane_ & 7;
    const int chunks = head_dim / 8;
#pragma unroll(kPanels > 2 ? 1 : 2)  // for registers
    for (int g = 0; g < kRowsPerWarp / 4; ++g) {
      const int row = g * 4 + (lane_ >> 3);
      const char* const source = static_cast<const char*>(from) + shuffle(row_start, row) * 2 + column * 16;
      const bool there = (present >> row & 1) != 0;
      const uint32_t at = to + panel_offset(warp_ * kRowsPerWarp + row, column);
#pragma unroll
      for (int p = 0; p < kPanels; ++p) {
        copy_row_async(at + p * Shared::kKvPanel, source + p * kPanelBytes, there && p * 8 + column < chunks);
      }
    }
  }

  // Which columns of a block are there, as bits, and their positions where the layout gives them.
  JAXINFER_DEVICE void describe(int stage, int begin, int page) const {
    uint32_t* const words = reinterpret_cast<uint32_t*>(memory_ + Shared::kPresent) + stage * 4;
    int* const positions = reinterpret_cast<int*>(memory_ + Shared::kPositions) + stage * Config::kBlockKV;
    // Columns behind the item's last one are left to the ranges, which cost less.
    const uint32_t there = __ballot_sync(kFullWarp, page >= 0 || lane_index(begin) >= state_.item.kv_end);
    const bool has_positions = params_.block_pos != nullptr;
    int position = 0;
    if (has_positions && page >= 0) {
      const int index = lane_index(begin);
      position = in_page(index) + __ldg(params_.block_pos + int64_t{state_.item.table_begin} +
                                        params_.page_divider.divide(index));
    }
    if constexpr (kGather) {
      if (lane_ == 0) words[warp_] = there | (kRowsPerWarp < 32 ? ~0u << (kRowsPerWarp & 31) : 0u);
      if (has_positions && lane_ < kRowsPerWarp) {
        positions[warp_ * kRowsPerWarp + lane_] = position;
      }
    } else if (warp_ == 0) {
      constexpr int kPerWord = 32 / Config::kPageBox;
      const uint32_t boxes = there | ~0u << (Config::kBlockKV / Config::kPageBox);
      // The lane that announces the bytes of K, so that its own arrival publishes the words: racecheck
      // follows a barrier from the threads that arrive, not through a __syncwarp before.
      if (elect_lane()) {
        *reinterpret_cast<uint4*>(words) =
            make_uint4(box_rows(boxes), box_rows(boxes >> kPerWord), box_rows(boxes >> 2 * kPerWord),
                       box_rows(boxes >> 3 * kPerWord));
      }
      if (has_positions && lane_ < kLanes) {
        for (int r = 0; r < Config::kPageBox; ++r) {
          positions[lane_ * Config::kPageBox + r] = position + r;
        }
      }
    }
    __syncwarp();  // what other lanes wrote comes before the arrival of the one that publishes it
  }
  // A word of rows from the lowest bits of `boxes`, each kPageBox times: copies of all bits, every one so far
  // up that its own bit of them stands at its first row. One lane makes four words, so a loop would cost.
  static JAXINFER_DEVICE uint32_t box_rows(uint32_t boxes) {
    static_assert(Config::kPageBox == 8 || Config::kPageBox == 16, "copies without overlap");
    constexpr uint32_t kCopies = Config::kPageBox == 8 ? 0x00204081u : 0x00008001u;
    constexpr uint32_t kFirstRows = Config::kPageBox == 8 ? 0x01010101u : 0x00010001u;
    const uint32_t bits = boxes & ((1u << (32 / Config::kPageBox)) - 1);
    return (bits * kCopies & kFirstRows) * ((1u << Config::kPageBox) - 1);
  }

  static constexpr int kLanes =
      kGather ? kRowsPerWarp : Config::kBlockKV / (Config::kPageBox > 0 ? Config::kPageBox : 8);
  static constexpr int kOutside = 1 << 30;  // more pages than any cache has

  const AttentionParams& params_;
  int cls_;
  const TensorMaps& maps_;
  char* memory_;
  WgmmaBarriers<Config> barriers_;
  uint32_t shared_;
  int warp_;
  int lane_;
  int layer_;  // out of the pool: no item has blocks
  CursorState& state_;
};

}  // namespace jaxinfer
