// What an item costs, and how two classes share the machine. Knows nothing of layouts or of the packed array.
#pragma once

#include <cstdint>

#include "plan/request.h"

namespace jaxinfer {

// Heads that the workers of a class are multiplied by.
inline int32_t num_heads(const ClassFormat& cls, int32_t num_qo_heads, int32_t num_kv_heads) {
  return cls.packed ? num_kv_heads : num_qo_heads;
}

Costs default_costs(Schedule schedule, bool compute_bound);

inline int64_t item_cost(const Costs& costs, int64_t tokens, int64_t kv_tokens) {
  return costs.fixed + costs.alpha * tokens + costs.beta * kv_tokens;
}

// Fewest KV tokens that a piece of a tile with kv_tokens may have. A row's partial results are merged by one warp, so
// their number is bounded as well.
int64_t smallest_piece(const Costs& costs, int64_t kv_tokens, int32_t num_queues);

// Smallest number of queues whose queues * heads workers leave at most 2% of num_ctas idle in their last
// round.
int32_t choose_num_queues(int32_t num_ctas, int32_t heads);

// Queues that each class uses, chosen from the classes' total costs so that classes running side by side
// finish together. A class without work uses none; one class alone uses all of its queues.
void choose_queues_used(const PlanRequest& request, const int64_t* total_cost, int32_t* queues_used);

}  // namespace jaxinfer
