// The producers of the warpgroup kernel: the warps that bring Q, K and V of a CTA's items to shared memory,
// by the copy engine from contiguous caches (TMA) and from pages of whole swizzle patterns (page TMA), else
// row by row (gather). The only header of the kernel that knows pages and layers. No math.
#pragma once

#include "kernels/attention_wgmma_items.cuh"

namespace jaxinfer {

// Half of the producer warps bring K, the other half V: slots of K become free at other times than those of
// V, and neither has to wait for the other's.
template <class Config>
class WgmmaProducer {
  using Shared = WgmmaShared<Config>;
  using Ring = RingCursor<Shared::kStages>;
  static constexpr bool kGather = !Config::kContiguous && Config::kPageBox == 0;
  static constexpr int kWarps = Config::kProducerWarps / 2;  // of K, and as many of V
  static_assert(kWarps * 2 == Config::kProducerWarps && (Config::kContiguous ? kWarps == 1 : kWarps <= 2),
                "one warp of K and one of V, or two of each");
  // A gathering warp brings two parts of its rows; a lane knows the page of one row of each, or of a box.
  static constexpr int kParts = kGather ? 2 : 1;
  static constexpr int kLanes =
      kGather ? Config::kBlockKV / 4 : Config::kBlockKV / (Config::kPageBox > 0 ? Config::kPageBox : 8);
  static_assert(!kGather || (kWarps == 2 && kLanes % 4 == 0), "a gathering warp has whole swizzle patterns");

  // How far apart pages and their tokens lie, in rows of one head (gather) or in groups of eight rows, as
  // boxes count them: 32 bits count all rows of a GPU's memory, and one instruction makes an address of them.
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

  static constexpr int kBoxes =
      kGather ? 0 : Config::kBlockKV / (Config::kPageBox > 0 ? Config::kPageBox : 8);
  static constexpr int kMostBoxes = (kBoxes + kWarps - 1) / kWarps;  // of one warp
  static constexpr int kGroups = kGather ? kLanes / 4 : 1;           // of four rows, of a part

  // What is found of a block before its slot is free: then its consumers may wait for every instruction.
  struct Block {
    Pages pages;             // inside the pool, else negative
    uint32_t there[kParts];  // columns (gather) or boxes that are there, as bits: for K
    int position[kParts];    // of this lane's first row, where the layout gives positions: for K
    // Where this lane's row (gather) or box lies, in RowSteps' units; contiguous: the block's first row.
    uint32_t own[kParts];
    bool all[kParts];  // all rows of a part are there (gather)
    bool whole;        // see WgmmaColumns::whole
    // `own` of other lanes: of the boxes that this warp copies, or of the rows of the first part that this
    // lane does.
    uint32_t others[kGather ? kGroups : kMostBoxes];
  };

 public:
  // Arrivals that fill a slot.
  static constexpr int kArrivals = kWarps;

  JAXINFER_DEVICE WgmmaProducer(const AttentionParams& params, int cls, const TensorMaps& maps, char* memory)
      : params_(params),
        cls_(cls),
        maps_(maps),
        memory_(memory),
        columns_{memory},
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
    Ring slot(1);
    WgmmaItems<Config> items(params_, maps_, memory_, state_, lane_);
    const bool publishes = !kKeys && warp_ == 0;
    int number = 0;  // of the item
    const RowSteps steps = kKeys ? row_steps(params_.k_strides, params_.head_dim_qk)
                                 : row_steps(params_.v_strides, params_.head_dim_vo);
    while (cursor.next()) {
      const Item item = bounded_item<Config>(params_, state_);
      const BlockRange<Config> blocks(item);
      // For all warps of the CTA: what starts an item would wait for it.
      if (kKeys && warp_ == 0) read_ahead(cursor.item_behind());
      if (publishes) items.publish(number++, item, blocks);
      if (blocks.count == 0) continue;
      if (kKeys && warp_ == 0) items.read_rows_ahead();
      begin_item<kKeys>();
      if constexpr (kKeys && Shared::kAsksOnce) {
        if (warp_ == 0) read_pages_ahead();
      }
      const int last = blocks.begin(blocks.count - 1);
      if constexpr (kGather) {
        bring_rows<kKeys>(blocks.first, last, steps, slot);
        continue;
      }
      Pages pages = look_up(last);
      for (int begin = last; begin >= blocks.first; begin -= Config::kBlockKV) {
        // Page ids are read a block ahead: else every block would wait for them.
        const Pages next = begin > blocks.first ? look_up(begin - Config::kBlockKV) : Pages();
        Block block = prepare<kKeys>(begin, pages, steps);
        // Between the first two blocks of an item, when consumers are busy with the first.
        if constexpr (kKeys && Shared::kAsksOnce)
          block.whole = begin + Config::kBlockKV == last && has_all_pages();
        wait_slot<kKeys>(slot);
        load<kKeys>(slot.stage(), block);
        pages = next;
        slot.advance();
      }
    }
    if (publishes) items.end(number);
  }

  // Gathered blocks of an item. The rows of a block are found while those of the one before land: a warp has
  // one block in flight, and what stands between two costs time; two in flight cost more.
  template <bool kKeys>
  JAXINFER_DEVICE void bring_rows(int first, int last, RowSteps steps, Ring& slot) const {
    Pages pages = look_up(last);
#pragma unroll 1
    for (int begin = last; begin >= first; begin -= Config::kBlockKV) {
      const Pages next = begin > first ? look_up(begin - Config::kBlockKV) : Pages();
      const Block block = prepare<kKeys>(begin, pages, steps);
      if (begin != last) end_block<kKeys>(slot);
      wait_slot<kKeys>(slot);
      load<kKeys>(slot.stage(), block);
      pages = next;
    }
    end_block<kKeys>(slot);
  }
  template <bool kKeys>
  JAXINFER_DEVICE void end_block(Ring& slot) const {
    wait_all_copies();
    fence_tensor_proxy();  // consumers would wait for it between their products
    __syncwarp();
    if (lane_ == 0) arrive(kKeys ? barriers_.k_full(slot.stage()) : barriers_.v_full(slot.stage()));
    slot.advance();
  }
  template <bool kKeys>
  JAXINFER_DEVICE void wait_slot(const Ring& slot) const {
    wait_barrier(kKeys ? barriers_.k_empty(slot.stage()) : barriers_.v_empty(slot.stage()), slot.parity());
  }

  static JAXINFER_DEVICE RowSteps row_steps(const CacheStrides& strides, int head_dim) {
    if constexpr (Shared::kBoxes) {
      return RowSteps{
          static_cast<uint32_t>(strides.page / kPatternRows) / static_cast<uint32_t>(strides.token), 0};
    }
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
    head_number_ = Config::kPacked ? state_.head : params_.group_divider.divide(state_.head);
    if constexpr (kGather) {
      const CacheStrides& strides = kKeys ? params_.k_strides : params_.v_strides;
      head_ = static_cast<const char*>(kKeys ? params_.k : params_.v) + (lane_ & 7) * 16 +
              (layer_ * strides.layer + head_number_ * strides.head) * 2;
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

  // Pages [first_page, end_page) of the row's list hold an item's columns; none where the list is too short.
  JAXINFER_DEVICE int first_page() const { return params_.page_divider.divide(state_.item.kv_begin); }
  JAXINFER_DEVICE int end_page() const {
    return limit_ < state_.item.kv_end ? 0 : params_.page_divider.divide(state_.item.kv_end - 1) + 1;
  }
  // Brings their ids to L1, 32 by a lane.
  JAXINFER_DEVICE void read_pages_ahead() const {
    const int end = end_page();
    for (int i = first_page() + lane_ * 32; i < end; i += 1024) read_ahead(table_ + i);
  }
  // Whether all pages of an item are there, of those that this warp looks at. A vote of consumers at every
  // block is 1% slower (pages of 16, head dim 128).
  JAXINFER_DEVICE bool has_all_pages() const {
    const int end = end_page();
    bool whole = end > 0;
#pragma unroll 2
    for (int i = first_page() + warp_ * 32 + lane_; i < end; i += kWarps * 32)
      whole = whole & (static_cast<uint32_t>(__ldg(table_ + i)) < num_pages_);
    return __all_sync(kFullWarp, whole);
  }

  // What `load` needs; slots are not touched yet.
  template <bool kKeys>
  JAXINFER_DEVICE Block prepare(int begin, const Pages& pages, RowSteps steps) const {
    Block block;
    if constexpr (Config::kContiguous) {
      block.own[0] = state_.item.table_begin + begin;
    } else {
      block.pages = pages;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        // Not where it was read: the comparison would wait for it.
        if (static_cast<uint32_t>(pages.id[part]) >= num_pages_) block.pages.id[part] = -1;
      }
      if constexpr (kKeys) find_present(begin, &block);
      if constexpr (kGather) {
        find_rows(begin, steps, &block);
      } else {
        find_boxes(begin, steps, &block);
      }
    }
    return block;
  }

  template <bool kKeys>
  JAXINFER_DEVICE void load(int stage, const Block& block) const {
    constexpr int kPanels = kKeys ? Shared::kPanelsQk : Shared::kPanelsVo;
    constexpr int kBytes = kKeys ? Shared::kKBytes : Shared::kVBytes;
    const uint32_t to = shared_ + (kKeys ? Shared::kK : Shared::kV) + stage * kBytes;
    const uint32_t full = kKeys ? barriers_.k_full(stage) : barriers_.v_full(stage);
    const TensorMap* const map = kKeys ? &maps_.k : &maps_.v;
    if constexpr (Config::kContiguous) {
      contiguous<kPanels>(to, map, full, block);
    } else if constexpr (kGather) {
      if constexpr (kKeys) publish(stage, block);
      gather<kPanels>(to, kKeys ? params_.head_dim_qk : params_.head_dim_vo, block);
    } else {
      if (kKeys && params_.block_pos != nullptr) publish_positions(stage, block);
      boxes<kKeys>(to, map, full, block, stage);
    }
  }

  template <int kPanels>
  JAXINFER_DEVICE void contiguous(uint32_t to, const TensorMap* map, uint32_t full,
                                  const Block& block) const {
    if (elect_lane()) {
#pragma unroll
      for (int p = 0; p < kPanels; ++p) {
        copy_box(to + p * Shared::kKvPanel, map, full, p * kPanelElements, static_cast<int>(block.own[0]),
                 head_number_, layer_);
      }
      arrive_expecting(full, kPanels * Shared::kKvPanel);
    }
    __syncwarp();
  }

  // Where this lane's box lies, counted in groups of eight rows, and where those of this warp do. A page that
  // is not there is a coordinate outside of the tensor, which reads as zeros.
  JAXINFER_DEVICE void find_boxes(int begin, RowSteps steps, Block* block) const {
    const uint32_t page =
        static_cast<uint32_t>(block->pages.id[0]) + static_cast<uint32_t>(layer_) * num_pages_;
    const uint32_t place = page * steps.page + in_page(lane_index(begin, 0)) / kPatternRows;
    block->own[0] = block->pages.id[0] < 0 ? kOutside : place;
#pragma unroll
    for (int j = 0; j < kMostBoxes; ++j)
      block->others[j] = __shfl_sync(kFullWarp, block->own[0], (warp_ * kMostBoxes + j) & 31);
  }

  // Boxes of kPageBox rows and all panels; the producer warps share them.
  template <bool kKeys>
  JAXINFER_DEVICE void boxes(uint32_t to, const TensorMap* map, uint32_t full, const Block& block,
                             int stage) const {
    constexpr int kPanels = kKeys ? Shared::kPanelsQk : Shared::kPanelsVo;
    constexpr int kPatterns = Config::kPageBox / kPatternRows;
    constexpr int kBoxBytes = kPanels * Config::kPageBox * kPanelBytes;
    const int first = warp_ * kMostBoxes;
    const int count = min(kMostBoxes, kBoxes - first);
    // Of padded head dims the panels come by themselves, eight rows at a time: see encode_cache().
    const bool whole = (kKeys ? params_.head_dim_qk : params_.head_dim_vo) == kPanels * kPanelElements;
    if (elect_lane()) {
      // The copies first: they are waited for. Bytes may land before they are announced, as this warp's
      // arrival is still to come.
      if (whole) {
#pragma unroll
        for (int j = 0; j < kMostBoxes; ++j) {
          if (kBoxes % kWarps == 0 || j < count)
            copy_box(to + (first + j) * kBoxBytes, map, full, 0, 0, 0, static_cast<int>(block.others[j]),
                     head_number_);
        }
      }
      if (kKeys && warp_ == 0) store_present(stage, block.there[0]);
      if (kKeys && Shared::kAsksOnce) columns_.whole(stage)[warp_] = block.whole ? 1 : 0;
      arrive_expecting(full, count * kBoxBytes);
    }
    __syncwarp();
    if (!whole) {
#pragma unroll 1
      for (int j = 0; j < count * kPatterns; ++j) {
        const int row =
            static_cast<int>(__shfl_sync(kFullWarp, block.own[0], first + j / kPatterns)) + j % kPatterns;
        if (elect_lane()) {
#pragma unroll
          for (int p = 0; p < kPanels; ++p) {
            copy_box(to + ((first * kPatterns + j) * kPanels + p) * kPatternBytes, map, full,
                     p * kPanelElements, 0, row, head_number_);
          }
        }
        __syncwarp();
      }
    }
  }

  // Which row of the cache this lane's row of a part is, counted in rows of one head; and those that it
  // copies.
  JAXINFER_DEVICE void find_rows(int begin, RowSteps steps, Block* block) const {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int page = block->pages.id[part];
      block->own[part] = static_cast<uint32_t>(page) * steps.page +
                         static_cast<uint32_t>(in_page(lane_index(begin, part))) * steps.token;
      block->all[part] = __all_sync(kFullWarp, page >= 0 || !has_place());
    }
    shuffle_rows(block->own[0], block->others);
  }

  static JAXINFER_DEVICE void shuffle_rows(uint32_t own, uint32_t (&rows)[kGroups]) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) rows[g] = __shfl_sync(kFullWarp, own, g, 8);
  }

  // Each lane knows the place of one row of a part; eight lanes copy a row, 128 bytes at a time. Rows that
  // are not there and chunks beyond the true head dim become zeros.
  template <int kPanels>
  JAXINFER_DEVICE void gather(uint32_t to, int head_dim, const Block& block) const {
    const int column = lane_ & 7;
    const int quarter = lane_ >> 3;  // the row of four that this lane helps to copy
    // Even and odd groups of four rows differ in one bit of the swizzle.
    const uint32_t even = to + panel_offset(warp_ * kParts * kLanes + quarter, column);
    const uint32_t odd = even ^ 64;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const auto copy = [&](int g, uint32_t from, uint32_t there) {
        const char* const source = head_ + uint64_t{from} * static_cast<uint32_t>(head_dim * 2);
        const int group = part * kGroups + g;
        const uint32_t at = (group % 2 == 0 ? even : odd) + group * 4 * kPanelBytes;
#pragma unroll
        for (int p = 0; p < kPanels; ++p) {
          copy_async<false>(at + p * Shared::kKvPanel, source + p * kPanelBytes, there > p * 8);
        }
      };
      if (block.all[part] && head_dim == kPanels * kPanelElements) {
        uint32_t rows[kGroups];
        if (part == 0) {
#pragma unroll
          for (int g = 0; g < kGroups; ++g) rows[g] = block.others[g];
        } else {
          shuffle_rows(block.own[part], rows);
        }
#pragma unroll
        for (int g = 0; g < kGroups; ++g) copy(g, rows[g], kFullWarp);
      } else {
#pragma unroll 2
        for (int g = 0; g < kGroups; ++g) {
          const bool there = __shfl_sync(kFullWarp, block.pages.id[part], g, 8) >= 0;
          const uint32_t from = __shfl_sync(kFullWarp, block.own[part], g, 8);
          copy(g, there ? from : 0, there ? max(head_dim / 8 - column, 0) : 0);
        }
      }
    }
  }

  // Which columns of a block are there, as bits, and their positions where the layout gives them.
  JAXINFER_DEVICE void find_present(int begin, Block* block) const {
    const bool has_positions = params_.block_pos != nullptr;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int index = lane_index(begin, part);
      const bool known = block->pages.id[part] >= 0;
      // Columns behind the item's last one are left to the ranges, which cost less.
      int there_too = known || index >= state_.item.kv_end;
      uint32_t& there = block->there[part];
      if constexpr (kGather) {
        there = __ballot_sync(kFullWarp, there_too || !has_place());
        if (there != kFullWarp) {  // from the order of lanes to that of rows
          there = __ballot_sync(kFullWarp, __shfl_sync(kFullWarp, there_too, (lane_ & 3) * 8 + (lane_ >> 2)));
        }
      } else {
        there = __ballot_sync(kFullWarp, there_too);
      }
      block->position[part] = 0;
      if (has_positions && known) {
        block->position[part] = in_page(index) + __ldg(params_.block_pos + int64_t{state_.item.table_begin} +
                                                       params_.page_divider.divide(index));
      }
    }
  }
  // Both before the arrival of a lane of the same warp.
  JAXINFER_DEVICE void publish(int stage, const Block& block) const {
    uint32_t* const words = reinterpret_cast<uint32_t*>(columns_.words(stage));
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int word = warp_ * kParts + part;
      if (lane_ == 0) words[word] = block.there[part] | (kLanes < 32 ? ~0u << (kLanes & 31) : 0u);
      if (params_.block_pos != nullptr && has_place())
        columns_.positions(stage)[word * kLanes + row_of(lane_)] = block.position[part];
    }
  }
  JAXINFER_DEVICE void publish_positions(int stage, const Block& block) const {
    if (warp_ == 0 && lane_ < kLanes) {
      for (int r = 0; r < Config::kPageBox; ++r) {
        columns_.positions(stage)[lane_ * Config::kPageBox + r] = block.position[0] + r;
      }
    }
    __syncwarp();  // what other lanes wrote comes before the arrival of the one that publishes it
  }
  // By the lane that announces the bytes of K, so that its own arrival publishes the words: racecheck
  // follows a barrier from the threads that arrive, not through a __syncwarp before.
  JAXINFER_DEVICE void store_present(int stage, uint32_t there) const {
    uint4* const words = columns_.words(stage);
    constexpr int kPerWord = 32 / Config::kPageBox;
    const uint32_t boxes = there | ~0u << (Config::kBlockKV / Config::kPageBox);
    if (boxes == ~0u) {
      *words = make_uint4(~0u, ~0u, ~0u, ~0u);
    } else {
      *words = make_uint4(box_rows(boxes), box_rows(boxes >> kPerWord), box_rows(boxes >> 2 * kPerWord),
                          box_rows(boxes >> 3 * kPerWord));
    }
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

  static constexpr uint32_t kOutside = 1u << 30;  // more groups of rows than any cache has

  const AttentionParams& params_;
  int cls_;
  const TensorMaps& maps_;
  char* memory_;
  WgmmaColumns<Config> columns_;
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
  int head_number_;
  const char* head_;  // where this lane's chunk of row 0 of the KV head lies (gather)
};

}  // namespace jaxinfer
