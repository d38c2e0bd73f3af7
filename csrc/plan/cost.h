// What an item costs, and how two classes share the machine. Knows nothing of layouts or of the packed array.
#pragma once

#include <cstdint>

#include "plan/request.h"

namespace jaxinfer {

// Heads that the workers of a class are multiplied by.
inline int32_t num_heads(const ClassFormat& cls, int32_t num_qo_heads, int32_t num_kv_heads) {
  return cls.packed ? num_kv_heads : num_qo_heads;
}

Costs default_costs(Schedule schedule, const ClassFormat& cls, int32_t group_size);

inline int64_t item_cost(const Costs& costs, int64_t tokens, int64_t kv_tokens) {
  return costs.fixed + costs.alpha * tokens + costs.beta * round_up(kv_tokens, costs.block);
}

// Fewest KV tokens that a piece of a tile with kv_tokens may have. A lane merges all partial
// results of its columns of a row, so their number is bounded as well.
int64_t smallest_piece(const Costs& costs, int64_t kv_tokens, int32_t num_queues);

// Smallest number of queues whose queues * heads workers leave at most 2% of num_ctas idle in their last
// round.
int32_t choose_num_queues(int32_t num_ctas, int32_t heads);

// How classes share the machine.
struct QueueShares {
  int32_t queues[kMaxClasses];  // that a class may put work on, the first ones
  // Load of a queue with which the second class ends when the first one does, or later where that is better
  // for both; 0: the classes run one after the other, each on all of its queues.
  int64_t free_load;
  int64_t end;  // when both have ended, in a unit of share_queues'
};

// Chosen from the classes' total costs so that a class that multiplies, whose longest piece costs
// longest_piece, and one that reads, side by side, finish together as early as they can.
QueueShares share_queues(const PlanRequest& request, const int64_t* total_cost, int64_t longest_piece);

// Queues of the class that reads once the other one's fullest queue has `load`: fewer than its share where
// that is enough to end with it. Only with a free_load.
int32_t reading_queues(const PlanRequest& request, const int64_t* total_cost, const QueueShares& shares,
                       int64_t load);

}  // namespace jaxinfer
