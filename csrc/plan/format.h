// The packed plan: one int32 array that says which CTA does which piece of work and how partial results
// merge. This header is the only place that knows where each part lies. It holds no scheduling decisions
// (planner.h).
//
//   header[16] | per class: queue_indptr[num_queues + 1], padded to 16 bytes; queue_first[num_queues];
//   items[item_capacity] |
//   merge_token[M], merge_indptr[M + 1], merge_slots[S]        (M = merge_capacity, S = slot_capacity)
//
// Everything static (class count, capacities) travels beside the array, so offsets never depend on lengths.
#pragma once

#include <cstdint>

namespace jaxinfer {

constexpr int32_t kPlanVersion = 2;
constexpr int64_t kHeaderWords = 16;
constexpr int32_t kMaxClasses = 2;
constexpr int32_t kMaxItemTokens = 65535;  // what the token count in Item::flags can hold

// Words of the header. Words not named here are zero.
enum HeaderWord : int32_t {
  kHeaderVersion = 0,
  kHeaderNumTokens = 1,  // capacity, padding included
  kHeaderNumClasses = 2,
  kHeaderNumSlots = 3,  // partial slots in use
  kHeaderNumMerge = 4,  // merge entries in use
  kHeaderNumItems = 5,  // [kMaxClasses] items in use, one word per class
};

// One piece of work: some tokens of one BSR row against a range of the row's KV tokens, for one head of the
// class.
struct Item {
  int32_t token_begin;  // first query token
  int32_t kv_begin;     // KV tokens [kv_begin, kv_end), counted inside the BSR row's list
  int32_t kv_end;
  int32_t table_begin;  // the row's first block in kv_indices (contiguous: its first KV token)
  int32_t bsr_row;      // -1: an empty item, which writes the empty state for its tokens
  int32_t out;          // -1: final output; else the partial slot of token_begin, later tokens follow
  int32_t merge;        // merge entry of token_begin (later tokens follow); -1 when out is -1
  int32_t flags;        // bits 0-15: token count

  int32_t num_tokens() const { return flags & 0xffff; }
};
constexpr int64_t kItemWords = 8;
static_assert(sizeof(Item) == kItemWords * sizeof(int32_t), "an item is eight words");

// Static facts of one tile class and where its parts start.
struct ClassFormat {
  int32_t tile;    // query rows of a tile
  int32_t packed;  // 1: rows are tokens x group_size heads, workers are queues x KV heads; 0: one query head
  int32_t num_queues;  // static capacity; queues may be empty
  int32_t num_ctas;    // CTAs of the launch; CTA c runs workers c, c + num_ctas, ...
  int32_t item_capacity;
  int64_t queue_indptr;  // word offset of queue_indptr[num_queues + 1]: items [indptr[i], indptr[i + 1]) of
                         // queue i
  int64_t queue_first;   // word offset of queue_first[num_queues], a copy of each queue's first item, so that
                         // a CTA's first reads do not wait for each other; zeros for an empty queue
  int64_t items;         // word offset of items[item_capacity], a multiple of 4

  // Whole query tokens that one tile holds.
  constexpr int32_t tokens_per_tile(int32_t group_size) const {
    if (tile == 1) return 1;
    return packed ? tile / group_size : tile;
  }

  // True: limited by arithmetic (worker w is for head w / num_queues, see ItemCursor for its queue). False:
  // limited by reading K and V (queue w / heads, head w % heads: the heads of a queue run in lockstep). A
  // tile of 128 that holds one packed token has nothing to reuse K and V for, so it counts as memory-bound.
  constexpr bool is_compute_bound(int32_t group_size) const {
    return tile == 192 || (tile == 128 && (!packed || 2 * group_size <= tile));  // no division: kernels ask
  }
};

struct PlanFormat {
  int32_t num_classes;
  ClassFormat classes[kMaxClasses];
  int32_t merge_capacity;
  int32_t slot_capacity;
  int64_t merge_token;  // word offsets of the merge list
  int64_t merge_indptr;
  int64_t merge_slots;
  int64_t num_words;  // size of the packed array

  const Item* items(const int32_t* plan, int32_t c) const {
    return reinterpret_cast<const Item*>(plan + classes[c].items);
  }
};

// Fills the offsets of `format` from its static facts; the one function that lays the array out.
inline void lay_out(PlanFormat* format) {
  int64_t word = kHeaderWords;
  for (int32_t c = 0; c < format->num_classes; ++c) {
    ClassFormat& cls = format->classes[c];
    cls.queue_indptr = word;
    word += (int64_t{cls.num_queues} + 1 + 3) / 4 * 4;
    cls.queue_first = word;
    word += int64_t{cls.num_queues} * kItemWords;
    cls.items = word;
    word += int64_t{cls.item_capacity} * kItemWords;
  }
  format->merge_token = word;
  word += format->merge_capacity;
  format->merge_indptr = word;
  word += int64_t{format->merge_capacity} + 1;
  format->merge_slots = word;
  format->num_words = word + format->slot_capacity;
}

}  // namespace jaxinfer
