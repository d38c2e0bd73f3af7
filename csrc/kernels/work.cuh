// Which items a CTA runs, read from the plan, and the rows of an item. No addresses of K and V, no math.
#pragma once

#include "kernels/ptx.cuh"

namespace jaxinfer {

// Division of [0, 2^31) by a number that is only known at run time: a product and a shift.
struct FastDivider {
  uint32_t magic;
  uint32_t shift;
  int divisor;

  FastDivider() = default;
  JAXINFER_DEVICE explicit FastDivider(int d) : divisor(d) {
    const uint32_t log = d <= 1 ? 0 : 32 - __clz(d - 1);  // ceil(log2(d))
    shift = 31 + log;
    // magic * d is in [2^shift, 2^shift + 2^log): the error stays under one for n < 2^31.
    magic = static_cast<uint32_t>(((uint64_t{1} << shift) + d - 1) / static_cast<uint32_t>(d));
  }
  JAXINFER_DEVICE int divide(int n) const {
    return static_cast<int>(static_cast<uint64_t>(static_cast<uint32_t>(n)) * magic >> shift);
  }
};

// Where a warp stands in the items of its CTA's workers. It lies in shared memory: most of it is only needed
// when an item ends, and registers are what bounds the tiles.
struct CursorState {
  Item item;
  int head;  // of the class: a KV head when packed, else a query head
  int pass;  // [0, passes)
  int worker;
  int next;  // items [next, end) of the queue are still to come
  int end;
};

// Walks the items of this CTA's workers in order; every item is visited `passes` times in a row. By whole
// warps.
class ItemCursor {
 public:
  JAXINFER_DEVICE ItemCursor(const AttentionParams& params, int cls, bool packed, int passes,
                             CursorState& state)
      : params_(params), state_(state), cls_(cls), passes_(passes), packed_(packed) {
    state_.worker = static_cast<int>(blockIdx.x) - static_cast<int>(gridDim.x);
    state_.next = state_.end = 0;
    state_.pass = passes - 1;
    __syncwarp();
  }

  JAXINFER_DEVICE const CursorState& state() const { return state_; }

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

 private:
  JAXINFER_DEVICE bool next_item(CursorState& s) {
    const ClassFormat& format = params_.format.classes[cls_];
    const int num_heads = packed_ ? params_.num_kv_heads : params_.num_qo_heads;
    while (s.next >= s.end) {
      s.worker += static_cast<int>(gridDim.x);
      if (s.worker >= format.num_queues * num_heads) return false;
      int queue;
      if (format.is_compute_bound(params_.group_size())) {
        s.head = s.worker / format.num_queues;
        queue = s.worker - s.head * format.num_queues;
      } else {
        queue = s.worker / num_heads;
        s.head = s.worker - queue * num_heads;
      }
      const int32_t* indptr = params_.plan + format.queue_indptr;
      s.next = indptr[queue];
      s.end = indptr[queue + 1];
    }
    const int4* words = reinterpret_cast<const int4*>(params_.plan + format.items) + int64_t{s.next} * 2;
    const int4 low = __ldg(words);
    const int4 high = __ldg(words + 1);
    ++s.next;
    s.item = Item{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    // A layer outside the pool: every token gets the empty state.
    const bool layer_exists =
        params_.layer == nullptr || (*params_.layer >= 0 && *params_.layer < params_.num_layers);
    if (!layer_exists || s.item.bsr_row < 0) s.item.kv_end = s.item.kv_begin;
    return true;
  }

  const AttentionParams& params_;
  CursorState& state_;
  int cls_;
  int passes_;
  bool packed_;
};

// What all warps of a CTA, and each warp by itself, keep in shared memory beside tiles and rings.
struct CtaState {
  FastDivider group_size;
  FastDivider page_size;
  int unused[2];
};
struct WarpState {
  CursorState computing;  // the item whose rows are being computed
  CursorState loading;    // the item whose KV blocks are being loaded, ahead of that
  int kv_offset;          // position of the first KV token of the row being computed
  int clear_first;        // every row of the warp sees positions [clear_first, clear_last]
  int clear_last;
  int64_t k_head;  // of the item being loaded: element offsets of its layer and KV head
  int64_t v_head;
};
static_assert(sizeof(CtaState) == 32 && sizeof(WarpState) == 136, "jaxinfer/jit/tiles.py counts these bytes");

// By all threads of the CTA, which then see it.
JAXINFER_DEVICE void fill_cta_state(const AttentionParams& params, CtaState& state) {
  if (threadIdx.x == 0) {
    state.group_size = FastDivider(params.num_qo_heads / params.num_kv_heads);
    state.page_size = FastDivider(params.page_size);
  }
  cta_barrier();
}

// The query rows of an item: packed, row i is token i / group_size and query head i % group_size of the KV
// head.
template <bool kPacked>
struct ItemRows {
  const CursorState& state;
  const FastDivider& group;

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
  const int group_size = params.num_qo_heads / params.num_kv_heads;
  const int first_head = Config::kPacked ? head * group_size : head;
  const int num_heads = Config::kPacked ? group_size : 1;
  const int chunks = params.head_dim_vo / Type::kPerChunk;
  const int tokens = item.flags & 0xffff;
  for (int t = 0; t < tokens; ++t) {
    const int64_t row = int64_t{item.token_begin + t} * params.num_qo_heads + first_head;
    // The heads of a token are neighbours: their rows are one run of chunks.
    uint4* o = reinterpret_cast<uint4*>(params.o) + row * chunks;
    for (int i = threadIdx.x; i < num_heads * chunks; i += Config::kNumThreads) o[i] = make_uint4(0, 0, 0, 0);
    if ((Config::kRules & kRuleSoftmax) != 0) {
      for (int i = threadIdx.x; i < num_heads; i += Config::kNumThreads) params.lse[row + i] = -infinity();
    }
  }
}

}  // namespace jaxinfer
