// Whole tiles leave some CTAs with a tile more than others; here the ends of those tiles go to the others.
// Knows how queues fall to CTAs (ItemCursor of the kernels), but not how tiles come to queues (schedule.cc).
#pragma once

#include <cstdint>
#include <vector>

#include "plan/request.h"
#include "plan/schedule.h"

namespace jaxinfer {

// Cost of a class's pieces on queues numbered by descending load: that of the CTA with the most, and of the
// merge behind it, in units of a queue's load.
int64_t cost_of_ctas(const std::vector<Tile>& tiles, const Costs& costs, const ClassFormat& cls,
                     int64_t heads, const ClassPieces& pieces);

// Whole tiles on queues numbered by descending load: moves the ends of as few as it can, so that all CTAs end
// together. Returns cost_of_ctas of what it leaves.
int64_t level_ctas(const std::vector<Tile>& tiles, const Costs& costs, const ClassFormat& cls, int64_t heads,
                   ClassPieces* pieces);

}  // namespace jaxinfer
