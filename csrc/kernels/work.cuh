// Which items a CTA runs, read from the plan, and the rows of an item. No addresses of K and V, no math.
#pragma once

#include "kernels/ptx.cuh"

namespace jaxinfer {

// Where a warp stands in the items of its CTA's workers.
struct CursorState {
  Item item;
  int head;  // of the class: a KV head when packed, else a query head
  int pass;  // [0, passes)
  int worker;
  int next;  // items [next, end) of the queue are still to come
  int end;
};

// Tiles of up to 32 rows have registers to spare, and every trip to shared memory would delay their copies.
template <class Config>
constexpr bool kStateInRegisters = Config::kTile <= 32;

// Whether there are registers for what shortens the start of an item, too. Not in tile 32: two of its CTAs
// would leave no room for one of the merge, which would start late, and a single one spills (sm_120).
template <class Config>
constexpr bool kReadsAhead = Config::kTile <= 16;

// What each warp keeps by itself. It lies in shared memory where registers bound the tile, else in registers.
struct WarpState {
  CursorState computing;  // the item whose rows are being computed
  CursorState loading;    // the item whose KV blocks are being loaded, ahead of that
  int kv_offset;          // position of the first KV token of the row being computed
  int clear_first;        // every row of the warp sees positions [clear_first, clear_last]
  int clear_last;
  const char* k_head;  // of the item being loaded: row 0 of its layer and KV head
  const char* v_head;
};
static_assert(sizeof(WarpState) == 136, "jaxinfer/jit/tiles.py counts these bytes");

// Walks the items of this CTA's workers in order; every item is visited `passes` times in a row. By whole
// warps.
template <class Config>
class ItemCursor {
 public:
  JAXINFER_DEVICE ItemCursor(const AttentionParams& params, int cls, int passes, CursorState& state)
      : params_(params), state_(state), cls_(cls), passes_(passes) {
    // Beside the first item: behind it, it would be a trip to memory of its own (0.4 us on an H200).
    if (kReadsAhead<Config> && params.layer != nullptr) layer_ = load_now(params.layer);
    state_.worker = static_cast<int>(blockIdx.x) - static_cast<int>(gridDim.x);
    state_.next = state_.end = 0;
    state_.pass = passes - 1;
    __syncwarp();
  }

  // A cursor where another one stands.
  JAXINFER_DEVICE ItemCursor(const ItemCursor& other, CursorState& state)
      : params_(other.params_),
        state_(state),
        cls_(other.cls_),
        passes_(other.passes_),
        layer_(other.layer_) {
    state_ = other.state_;
    __syncwarp();
  }

  JAXINFER_DEVICE const CursorState& state() const { return state_; }

  // 0 without a layer axis.
  JAXINFER_DEVICE int layer() const {
    return kReadsAhead<Config> || params_.layer == nullptr ? layer_ : *params_.layer;
  }

  // Moves to the next visit; false when there is none, and then it must not be called again.
  JAXINFER_DEVICE bool next() {
    CursorState s = state_;
    __syncwarp();
    if (++s.pass == passes_) {
      s.pass = 0;
      if (!next_item(s)) return false;
    }
    state_ = s;  // every lane writes the same
    __syncwarp();
    return true;
  }

  // The item behind this one of the same queue, in the plan; the item itself where there is none.
  JAXINFER_DEVICE const int32_t* item_behind() const {
    const int at = state_.next < state_.end ? state_.next : state_.next - 1;
    return params_.plan + params_.format.classes[cls_].items + at * kItemWords;
  }

 private:
  JAXINFER_DEVICE bool next_item(CursorState& s) {
    const ClassFormat& format = params_.format.classes[cls_];
    // As far as they are known when the kernel is compiled.
    const int num_heads = Config::kPacked ? params_.num_kv_heads : params_.num_qo_heads;
    const bool compute_bound =
        ClassFormat{Config::kTile, Config::kPacked}.is_compute_bound(params_.group_divider.divisor);
    int4 low, high;
    if (s.next < s.end) {
      const int4* words = reinterpret_cast<const int4*>(params_.plan + format.items) + int64_t{s.next} * 2;
      low = __ldg(words);
      high = __ldg(words + 1);
    } else {
      do {
        s.worker += static_cast<int>(gridDim.x);
        if (s.worker >= format.num_queues * num_heads) return false;
        const uint32_t divisor = compute_bound ? format.num_queues : num_heads;
        const int quotient = static_cast<uint32_t>(s.worker) / divisor;
        const int rest = s.worker - quotient * divisor;
        s.head = compute_bound ? quotient : rest;
        // The heads that a CTA runs one after the other take turns at the queues from either end, so that its
        // queues are not all long or all short.
        const bool mirrored = (__popc(quotient) & 1) != 0;
        const int queue = !compute_bound ? quotient : mirrored ? format.num_queues - 1 - rest : rest;
        // These reads do not depend on each other, which makes a cold start one trip to memory shorter.
        const int32_t* indptr = params_.plan + format.queue_indptr;
        const int4* words = reinterpret_cast<const int4*>(params_.plan + format.queue_first) + queue * 2;
        s.next = __ldg(indptr + queue);
        s.end = __ldg(indptr + queue + 1);
        low = load_now(words);
        high = load_now(words + 1);
      } while (s.next >= s.end);
    }
    ++s.next;
    s.item = Item{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    // A layer outside the pool: every token gets the empty state.
    const bool layer_exists = static_cast<uint32_t>(layer()) < static_cast<uint32_t>(params_.num_layers);
    if (!layer_exists || s.item.bsr_row < 0) s.item.kv_end = s.item.kv_begin;
    return true;
  }

  const AttentionParams& params_;
  CursorState& state_;
  int cls_;
  int passes_;
  int layer_ = 0;  // not read from memory unless kReadsAhead
};

// The query rows of an item: packed, row i is token i / group_size and query head i % group_size of the KV
// head.
template <bool kPacked>
struct ItemRows {
  const CursorState& state;
  const Divider& group;

  JAXINFER_DEVICE int num_rows() const {
    const int tokens = state.item.flags & 0xffff;
    return kPacked ? tokens * group.divisor : tokens;
  }
  // Token of row i, counted from the item's token_begin.
  JAXINFER_DEVICE int token(int i) const { return kPacked ? group.divide(i) : i; }
  JAXINFER_DEVICE int qo_head(int i) const {
    return kPacked ? state.head * group.divisor + (i - token(i) * group.divisor) : state.head;
  }
  JAXINFER_DEVICE int kv_head() const { return kPacked ? state.head : group.divide(state.head); }
};

// o = 0 and lse = -inf for the tokens of an empty item, by all threads of the CTA.
template <class Config>
JAXINFER_DEVICE void write_empty(const AttentionParams& params, const Item& item, int head) {
  using Type = Element<Config::kDType>;
  const int group_size = params.group_divider.divisor;
  const int first_head = Config::kPacked ? head * group_size : head;
  const int num_heads = Config::kPacked ? group_size : 1;
  const int chunks = params.head_dim_vo / Type::kPerChunk;
  const int tokens = item.flags & 0xffff;
  for (int t = 0; t < tokens; ++t) {
    const int64_t row = int64_t{item.token_begin + t} * params.num_qo_heads + first_head;
    // The heads of a token are neighbours: their rows are one run of chunks.
    uint4* o = reinterpret_cast<uint4*>(params.o) + row * chunks;
#pragma unroll 1
    for (int i = threadIdx.x; i < num_heads * chunks; i += Config::kNumThreads) o[i] = make_uint4(0, 0, 0, 0);
    if ((Config::kRules & kRuleSoftmax) != 0) {
#pragma unroll 1
      for (int i = threadIdx.x; i < num_heads; i += Config::kNumThreads) params.lse[row + i] = -infinity();
    }
  }
}

}  // namespace jaxinfer
