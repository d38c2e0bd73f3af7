// What the planner is asked: the static facts of a plan (PlanRequest) and the arrays of one step's layout
// (LayoutView). No decisions live here; costs are in cost.h, capacities in capacity.h, the work itself in
// planner.h.
#pragma once

#include <cstdint>
#include <optional>

#include "integers.h"
#include "plan/format.h"

namespace jaxinfer {

enum class Schedule : int32_t { kLpt = 0, kRuns = 1 };

// Cost of an item: fixed + alpha * tokens + beta * KV tokens (rounded up to blocks), in integers.
struct Costs {
  int64_t fixed;        // starting an item and writing its result
  int64_t alpha;        // per query token
  int64_t beta;         // per KV token, at least 1
  int64_t block;        // KV tokens are paid for by blocks of so many; 1, or a multiple of 16 up to floor / 2
  int64_t floor;        // fewest KV tokens worth a cut; a multiple of 16, at least 32
  int64_t weight;       // time of one cost unit on one of num_ctas CTAs, in the unit of the other class's
  int64_t granule;      // KV tokens that a CTA takes at a time; a multiple of 16 (runs)
  int64_t merge;        // what partial results cost once, wherever there are any
  int64_t merge_token;  // and for each query token of a tile that is cut (lpt of a compute-bound class)
};

// The rules that bound which KV positions a token can see; everything else is masked inside the range.
struct ClipRule {
  bool causal = false;                  // kv_pos <= q_pos
  std::optional<int32_t> window_left;   // kv_pos >= q_pos - window_left
  std::optional<int32_t> window_right;  // kv_pos <= q_pos + window_right
};

struct PlanRequest {
  int32_t num_tokens;  // capacity, padding included
  int32_t num_rows;
  int32_t num_layouts;  // most rows that may cover one token
  int64_t kv_capacity;  // most KV tokens that the rows can list in all
  int32_t page_size;    // 1 when contiguous
  bool contiguous;
  int32_t num_qo_heads;
  int32_t num_kv_heads;
  int32_t head_dim_qk;
  int32_t head_dim_vo;
  int32_t element_size;  // bytes of one element of K and V
  Schedule schedule;
  bool side_by_side;  // the launches of two classes overlap, and share the machine by the queues they use
  bool batch_invariant;
  int32_t split_tokens;  // KV tokens between cuts, read with batch_invariant only; a multiple of 16
  ClipRule clip;
  // Of its classes tile, packed, num_queues and num_ctas are given; fill_capacities fills the rest.
  PlanFormat format;
  Costs costs[kMaxClasses];

  int32_t group_size() const { return num_qo_heads / num_kv_heads; }
  int32_t tokens_per_tile(int32_t c) const { return format.classes[c].tokens_per_tile(group_size()); }
};

struct LayoutView {
  const int32_t* q_start;   // [num_rows] first query token of the row
  const int32_t* q_len;     // [num_rows]
  const int32_t* kv_start;  // [num_rows] the row's first block in kv_indices (contiguous: its first KV token)
  const int32_t* kv_indices;  // [kv_indices_capacity] page ids, read only to check them against num_pages
  const int32_t* kv_len;      // [num_rows]
  const int32_t* kv_offset;   // [num_rows] position of the row's first KV token
  const int32_t* q_pos;       // [num_tokens]
  const int32_t* block_pos;   // [kv_indices_capacity] position of each listed block's first token, or null
  int64_t kv_indices_capacity;
  std::optional<int64_t> num_pages;  // pages of the pool (contiguous: KV tokens) when known
};

}  // namespace jaxinfer
