// What the roles of the warpgroup kernel share: where everything lies in shared memory, the barriers between
// producers and consumers, what they tell each other about an item, and how blocks are cut out of it. No
// copies, no math.
#pragma once

#include "kernels/sm90.cuh"
#include "kernels/work.cuh"

namespace jaxinfer {

// What consumers know of an item. The producer of Q writes it before Q is there: finding it out by themselves
// took consumers 1300 of the 16400 cycles of an item of 8 x 1024 causal tokens (H200, head dim 128).
struct ItemSlot {
  CursorState cursor;
  int is_end;  // 1: there is no item any more
  int num_blocks;
  int first;     // first column of block 0, see BlockRange
  int kv_begin;  // columns [kv_begin, kv_end) of the row's list
  int kv_end;
  int kv_offset;  // position of the row's first KV token
};
// Consumers that have left Q of item n have left item n - 1. When item n + 2 is written, the last of them may
// have left no more than that: slots n and n + 1 may still be read.
constexpr int kItemSlots = 4;

// Columns that a query row sees: indices in the BSR row's list, [begin, end), none of them below the item's
// first one; or where the layout gives positions those, [begin, end], as nothing is behind the last of int.
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
  static constexpr bool kBoxes = Config::kPageBox > 0;
  // Whether consumers ask once an item whether pages are missing, not at every block: three have no registers
  // for the answer, nor their producers for finding it.
  static constexpr bool kAsksOnce = kBoxes && kConsumers < 3;
  // How far apart the patterns of a panel of K or V lie, and its panels. One box brings all panels of its
  // rows, eight rows of each after the other.
  static constexpr int kKPattern = (kBoxes ? kPanelsQk : 1) * kPatternBytes;
  static constexpr int kVPattern = (kBoxes ? kPanelsVo : 1) * kPatternBytes;
  static constexpr int kNextPanel = kBoxes ? kPatternBytes : kKvPanel;

  static constexpr int kQuery = 0;
  static constexpr int kK = kQuery + kPanelsQk * kQueryPanel;
  static constexpr int kV = kK + kStages * kKBytes;
  static constexpr int kRanges = kV + kStages * kVBytes;                      // ColumnRange[tile]
  static constexpr int kPresent = kRanges + Config::kTile * 8;                // uint4[stages]
  static constexpr int kPositions = kPresent + kStages * 16;                  // int[stages][block]
  static constexpr int kWhole = kPositions + kStages * Config::kBlockKV * 4;  // int[stages][2]
  static constexpr int kBarriers = kWhole + kStages * 8;
  static constexpr int kNumBarriers = 2 * kConsumers + 4 * kStages;
  static constexpr int kItems = kBarriers + kNumBarriers * 8;  // ItemSlot[kItemSlots]
  static constexpr int kNumbers = kItems + kItemSlots * static_cast<int>(sizeof(ItemSlot));  // int[warps]
  static constexpr int kProducerStates = kNumbers + 4 * kConsumers * 4;                      // CursorState[4]
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

// Addresses of the barriers. Full ones are completed by producers, empty ones by consumers: of K and V by one
// arrival per warp, of Q, which also gives the item's slot back, by one of every thread that read it.
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

// Which columns of the blocks in the ring are there, as bits of four words, and their positions where the
// layout gives them: producers of K write them before their arrival.
template <class Config>
struct WgmmaColumns {
  using Shared = WgmmaShared<Config>;
  // Rows that one word describes: those of a part of a gathering warp, else 32.
  static constexpr int kRowsPerWord = Config::kPageBox == 0 ? Config::kBlockKV / 4 : 32;
  char* memory;

  JAXINFER_DEVICE uint4* words(int stage) const {
    return reinterpret_cast<uint4*>(memory + Shared::kPresent) + stage;
  }
  JAXINFER_DEVICE int* positions(int stage) const {  // int[block]
    return reinterpret_cast<int*>(memory + Shared::kPositions) + stage * Config::kBlockKV;
  }
  // Of an item's second block, by warps of K: 1 where all pages of the item that the warp looked at are
  // there.
  JAXINFER_DEVICE int* whole(int stage) const {
    return reinterpret_cast<int*>(memory + Shared::kWhole) + stage * 2;
  }
  JAXINFER_DEVICE bool has_whole_item(int stage) const {
    return (whole(stage)[0] & whole(stage)[Config::kProducerWarps / 2 - 1]) != 0;
  }
  JAXINFER_DEVICE bool has_all(int stage) const {
    const uint4 w = *words(stage);
    return (w.x & w.y & w.z & w.w) == ~0u;
  }
  JAXINFER_DEVICE bool has(int stage, int c) const {
    const uint32_t word = reinterpret_cast<const uint32_t*>(words(stage))[c / kRowsPerWord];
    return (word >> (c % kRowsPerWord) & 1) != 0;
  }
};

// Config of the consumers' share of a CTA, for what counts its threads.
template <class Config>
struct ConsumerConfig : Config {
  static constexpr int kNumThreads = WgmmaShared<Config>::kConsumers * kWarpgroupThreads;
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

// Whether each consumer's rows of Q come by themselves. Worked out anew at every item: known throughout, it
// would take a register of the products.
template <class Config>
JAXINFER_DEVICE bool has_split_query(const AttentionParams& params) {
  if (!Config::kPacked) return true;
  const int rows = forget(64);
  return params.group_divider.divide(rows) * params.group_divider.divisor == rows;
}

}  // namespace jaxinfer
