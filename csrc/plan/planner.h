// The planner: the lengths of one step in, the packed plan of format.h out.
//
// Pure integer arithmetic on the host, deterministic, and a function of lengths, starts and positions only:
// page ids never reach the array. Algorithm 1 of FlashInfer (arXiv 2501.01005, section 3.3.1) with the last
// queue's chunk fitted to the quota instead of a fixed chunk size.
#pragma once

#include <cstdint>

#include "plan/request.h"

namespace jaxinfer {

// Writes all request.format.num_words words of `out` (16-byte aligned). Words that carry nothing are 0 in the
// header, the queue padding and unused items; -1 in unused merge_token and merge_slots; the last end in
// unused merge_indptr. `request` has its capacities filled (capacity.h). Throws std::invalid_argument where
// the layout's values are not legal; never writes or reads beyond the capacities.
void make_plan(const LayoutView& layout, const PlanRequest& request, int32_t* out);

}  // namespace jaxinfer
