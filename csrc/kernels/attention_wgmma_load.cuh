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
  static constexpr int kCtas = kConsumers == 1 ? 2 : 1;  // of a multiprocessor
  static constexpr int kRegisters = 65536 / (kCtas * Config::kNumThreads) / 8 * 8;
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

// Half of the producer warps bring K, the other half V: slots of K become free at other times than those of
// V, and neither has to wait for the other's.
template <class Config>
class WgmmaProducer {
  using Shared = WgmmaShared<Config>;
  static constexpr bool kGather = !Config::kContiguous && Config::kPageBox == 0;
  static constexpr int kWarps = Config::kProducerWarps / 2;  // of K, and as many of V
  static_assert(kWarps * 2 == Config::kProducerWarps && (Config::kContiguous ? kWarps == 1 : kWarps <= 2),
                "one warp of K and one of V, or two of each");
  // A gathering warp brings two parts of its rows; a lane knows the page of one row of each, or of a box.
  static constexpr int kParts = kGather ? 2 : 1;
  static constexpr int kLanes =
      kGather ? Config::kBlockKV / 4 : Config::kBlockKV / (Config::kPageBox > 0 ? Config::kPageBox : 8);
  static_assert(!kGather || (kWarps == 2 && kLanes % 8 == 0), "rows of a gathering warp");

  // How far apart pages and their tokens lie, in rows of one head: 32 bits count all rows that a GPU can
  // hold, and one instruction makes an address of them.
  struct RowSteps {
    uint32_t page;
    uint32_t token;
  };

  struct Pages {
    int id[kParts];

    JAXINFER_DEVICE Pages() {
#pragma unroll
      for (int& x : id) x = -1;
    }
  };

 public:
  // Arrivals that fill a slot.
  static constexpr int kArrivals = kWarps;

  JAXINFER_DEVICE WgmmaProducer(const AttentionParams& params, int cls, const TensorMaps& maps, char* memory)
      : params_(params),
        cls_(cls),
        maps_(maps),
        memory_(memory),
        barriers_{shared_address(memory + Shared::kBarriers)},
        shared_(shared_address(memory)),
        warp_(static_cast<int>(threadIdx.x >> 5) % kWarps),
        lane_(static_cast<int>(threadIdx.x) & 31),
        layer_(params.layer == nullptr ? 0 : *params.layer),
        num_pages_(static_cast<uint32_t>(min(params.num_pages, int64_t{kInt32Max}))),
        state_(reinterpret_cast<CursorState*>(memory + Shared::kProducerStates)[(threadIdx.x >> 5) & 3]) {}

  JAXINFER_DEVICE void run() {
    const int warp = static_cast<int>(threadIdx.x >> 5) & 3;
    if (warp < kWarps) {
      bring<true>();
    } else if (warp < 2 * kWarps) {
      bring<false>();
    }
  }

 private:
  // K (kKeys) or V of every block, in the order in which consumers want them. The first warp of V brings Q,
  // too: its place becomes free when the item before has used its last K, one product before that item's V.
  template <bool kKeys>
  JAXINFER_DEVICE void bring() {
    ItemCursor<Config> cursor(params_, cls_, 1, state_);
    RingCursor<Shared::kStages> slot(1);
    uint32_t query_parity = 1;
    const RowSteps steps = kKeys ? row_steps(params_.k_strides, params_.head_dim_qk)
                                 : row_steps(params_.v_strides, params_.head_dim_vo);
    while (cursor.next()) {
      const Item item = bounded_item<Config>(params_, state_);
      const BlockRange<Config> blocks(item);
      // For all warps of the CTA: what starts an item would wait for it.
      if (kKeys && warp_ == 0) read_ahead(cursor.item_behind());
      if (item.bsr_row < 0 || blocks.count == 0) continue;
      if (kKeys && warp_ == 0) read_rows_ahead();
      begin_item<kKeys>();
      const int last = blocks.begin(blocks.count - 1);
      Pages pages = look_up(last);
      if (!kKeys && warp_ == 0) {
        load_query(query_parity);
        query_parity ^= 1;
      }
      for (int begin = last; begin >= blocks.first; begin -= Config::kBlockKV) {
        // Page ids are read a block ahead: else every block would wait for them.
        const Pages next = begin > blocks.first ? look_up(begin - Config::kBlockKV) : Pages();
        wait_barrier(kKeys ? barriers_.k_empty(slot.stage()) : barriers_.v_empty(slot.stage()),
                     slot.parity());
        load<kKeys>(slot.stage(), begin, pages, steps);
        pages = next;
        slot.advance();
      }
    }
  }

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

  // What is known of an item is read where it is needed, from shared memory: registers are scarce here.
  JAXINFER_DEVICE int kv_head() const {
    return Config::kPacked ? state_.head : params_.group_divider.divide(state_.head);
  }
  static JAXINFER_DEVICE RowSteps row_steps(const CacheStrides& strides, int head_dim) {
    const uint32_t chunks = static_cast<uint32_t>(head_dim) / 8;
    return RowSteps{static_cast<uint32_t>(strides.page / 8) / chunks,
                    static_cast<uint32_t>(strides.token / 8) / chunks};
  }
  // Index in the row's list of the first row of this lane's box (page TMA), or of its row of a part (gather).
  JAXINFER_DEVICE int lane_index(int begin, int part) const {
    return begin + (kGather ? (warp_ * kParts + part) * kLanes + row_of(lane_) : lane_ * Config::kPageBox);
  }
  // The row of a part whose place a gathering lane knows. A lane copies a row of every four, and so finds all
  // of its rows among the seven lanes beside it: a shuffle with a constant.
  static JAXINFER_DEVICE int row_of(int lane) { return (lane & 7) * 4 + (lane >> 3); }
  JAXINFER_DEVICE int in_page(int index) const {
    return index - params_.page_divider.divide(index) * params_.page_divider.divisor;
  }

  // What every block of an item needs, so that little is left to do for a block: producers take turns with
  // consumers at issuing instructions.
  template <bool kKeys>
  JAXINFER_DEVICE void begin_item() {
    if constexpr (!Config::kContiguous) {
      const int64_t listed = params_.kv_indices_capacity - state_.item.table_begin;
      const int64_t limit = min(listed * params_.page_size, int64_t{state_.item.kv_end});
      limit_ = static_cast<int>(max(limit, int64_t{0}));
      table_ = params_.kv_indices + state_.item.table_begin;
    }
    if constexpr (kGather) {
      const CacheStrides& strides = kKeys ? params_.k_strides : params_.v_strides;
      head_ = static_cast<const char*>(kKeys ? params_.k : params_.v) + (lane_ & 7) * 16 +
              (layer_ * strides.layer + kv_head() * strides.head) * 2;
      asm volatile("" : "+l"(head_));  // one sum: taken apart, every address would cost two more
    }
  }

  JAXINFER_DEVICE bool has_place() const {
    if constexpr (kGather) return kLanes == 32 || row_of(lane_) < kLanes;
    return lane_ < kLanes;
  }

  // The pages of this lane's box or rows, inside the pool or not; negative where nothing is.
  JAXINFER_DEVICE Pages look_up(int begin) const {
    Pages pages;
    if constexpr (!Config::kContiguous) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const int index = lane_index(begin, part);
        if (has_place() && index < limit_)
          pages.id[part] = __ldg(table_ + params_.page_divider.divide(index));
      }
    }
    return pages;
  }

  template <bool kKeys>
  JAXINFER_DEVICE void load(int stage, int begin, Pages pages, RowSteps steps) const {
    constexpr int kPanels = kKeys ? Shared::kPanelsQk : Shared::kPanelsVo;
    constexpr int kBytes = kKeys ? Shared::kKBytes : Shared::kVBytes;
    const uint32_t to = shared_ + (kKeys ? Shared::kK : Shared::kV) + stage * kBytes;
    const uint32_t full = kKeys ? barriers_.k_full(stage) : barriers_.v_full(stage);
    const TensorMap* const map = kKeys ? &maps_.k : &maps_.v;
    if constexpr (Config::kContiguous) {
      contiguous<kPanels>(to, map, full, begin);
    } else {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        // Not where it was read: the comparison would wait for it.
        if (static_cast<uint32_t>(pages.id[part]) >= num_pages_) pages.id[part] = -1;
      }
      if constexpr (kKeys) describe(stage, begin, pages);
      if constexpr (kGather) {
        gather<kPanels>(to, steps, kKeys ? params_.head_dim_qk : params_.head_dim_vo, begin, pages);
        // Here rather than in the consumers, where it would stand between them and their products.
        wait_all_copies();
        fence_tensor_proxy();
        __syncwarp();
        if (lane_ == 0) arrive(full);
      } else {
        boxes<kPanels>(to, map, full, begin, pages.id[0]);
      }
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
  JAXINFER_DEVICE void boxes(uint32_t to, const TensorMap* map, uint32_t full, int begin, int page) const {
    constexpr int kBoxes = Config::kBlockKV / Config::kPageBox;
    constexpr int kMost = (kBoxes + kWarps - 1) / kWarps;  // of one warp
    const int first = warp_ * kMost;
    const int count = min(kMost, kBoxes - first);
    if (elect_lane()) arrive_expecting(full, count * kPanels * Config::kPageBox * kPanelBytes);
    __syncwarp();
    const int head = kv_head();
    const int lane_row = in_page(lane_index(begin, 0));
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

  // Each lane knows the place of one row of a part; eight lanes copy a row, 128 bytes at a time. Rows that
  // are not there and chunks beyond the true head dim become zeros.
  template <int kPanels>
  JAXINFER_DEVICE void gather(uint32_t to, RowSteps steps, int head_dim, int begin,
                              const Pages& pages) const {
    const int column = lane_ & 7;
    const int quarter = lane_ >> 3;  // the row of four that this lane helps to copy
    // Even and odd groups of four rows differ in one bit of the swizzle.
    const uint32_t even = to + panel_offset(warp_ * kParts * kLanes + quarter, column);
    const uint32_t odd = even ^ 64;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      constexpr int kGroups = kLanes / 4;
      const int page = pages.id[part];
      // Which row of the cache this lane's row is, counted in rows of one head.
      const uint32_t row = static_cast<uint32_t>(page) * steps.page +
                           static_cast<uint32_t>(in_page(lane_index(begin, part))) * steps.token;
      const auto copy = [&](int g, uint32_t from, uint32_t there) {
        const char* const source = head_ + uint64_t{from} * static_cast<uint32_t>(head_dim * 2);
        const uint32_t at = (g % 2 == 0 ? even : odd) + (part * kLanes + g * 4) * kPanelBytes;
#pragma unroll
        for (int p = 0; p < kPanels; ++p) {
          copy_row_async(at + p * Shared::kKvPanel, source + p * kPanelBytes, there > p * 8);
        }
      };
      if (__all_sync(kFullWarp, page >= 0 || !has_place()) && head_dim == kPanels * kPanelElements) {
        uint32_t rows[kGroups];
#pragma unroll
        for (int g = 0; g < kGroups; ++g) rows[g] = __shfl_sync(kFullWarp, row, g, 8);
#pragma unroll
        for (int g = 0; g < kGroups; ++g) copy(g, rows[g], kFullWarp);
      } else {
#pragma unroll 2
        for (int g = 0; g < kGroups; ++g) {
          const bool there = __shfl_sync(kFullWarp, page, g, 8) >= 0;
          const uint32_t from = __shfl_sync(kFullWarp, row, g, 8);
          copy(g, there ? from : 0, there ? max(head_dim / 8 - column, 0) : 0);
        }
      }
    }
  }

  // Which columns of a block are there, as bits, and their positions where the layout gives them.
  JAXINFER_DEVICE void describe(int stage, int begin, const Pages& pages) const {
    uint32_t* const words = reinterpret_cast<uint32_t*>(memory_ + Shared::kPresent) + stage * 4;
    int* const positions = reinterpret_cast<int*>(memory_ + Shared::kPositions) + stage * Config::kBlockKV;
    const bool has_positions = params_.block_pos != nullptr;
    uint32_t there[kParts];
    int position[kParts];
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int index = lane_index(begin, part);
      const bool known = pages.id[part] >= 0;
      // Columns behind the item's last one are left to the ranges, which cost less.
      int there_too = known || index >= state_.item.kv_end;
      if constexpr (kGather) {
        there[part] = __ballot_sync(kFullWarp, there_too || !has_place());
        if (there[part] != kFullWarp) {  // from the order of lanes to that of rows
          there[part] =
              __ballot_sync(kFullWarp, __shfl_sync(kFullWarp, there_too, (lane_ & 3) * 8 + (lane_ >> 2)));
        }
      } else {
        there[part] = __ballot_sync(kFullWarp, there_too);
      }
      position[part] = 0;
      if (has_positions && known) {
        position[part] = in_page(index) + __ldg(params_.block_pos + int64_t{state_.item.table_begin} +
                                                params_.page_divider.divide(index));
      }
    }
    if constexpr (kGather) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const int word = warp_ * kParts + part;
        if (lane_ == 0) words[word] = there[part] | (kLanes < 32 ? ~0u << (kLanes & 31) : 0u);
        if (has_positions && has_place()) positions[word * kLanes + row_of(lane_)] = position[part];
      }
    } else if (warp_ == 0) {
      constexpr int kPerWord = 32 / Config::kPageBox;
      const uint32_t boxes = there[0] | ~0u << (Config::kBlockKV / Config::kPageBox);
      // The lane that announces the bytes of K, so that its own arrival publishes the words: racecheck
      // follows a barrier from the threads that arrive, not through a __syncwarp before.
      if (elect_lane()) {
        *reinterpret_cast<uint4*>(words) =
            make_uint4(box_rows(boxes), box_rows(boxes >> kPerWord), box_rows(boxes >> 2 * kPerWord),
                       box_rows(boxes >> 3 * kPerWord));
      }
      if (has_positions && lane_ < kLanes) {
        for (int r = 0; r < Config::kPageBox; ++r) {
          positions[lane_ * Config::kPageBox + r] = position[0] + r;
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
  uint32_t num_pages_;
  CursorState& state_;
  // Of the item:
  int limit_;             // columns of the row's list before this one have pages
  const int32_t* table_;  // the row's pages
  const char* head_;      // where this lane's chunk of row 0 of the KV head lies (gather)
};

}  // namespace jaxinfer
