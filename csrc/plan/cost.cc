// Cost constants and the two rules that turn costs and CTA counts into queue counts.
#include "plan/cost.h"

#include <algorithm>

namespace jaxinfer {

// Starting values, in KV tokens of the class, to be replaced by fits against the product's own kernels:
// - fixed 48 (memory-bound): a decode item's start and its result cost about what 48 KV tokens do; 128
//   (compute-bound): filling and draining a deeper pipeline around a larger tile.
// - runs: 96 per segment measured best for contiguous runs, which cut more often.
// - floor: a cut costs a partial result and a merge; below 256 (1024) KV tokens it costs more than it
// balances.
// - weight: a CTA with the whole machine behind it reads one KV token (K and V, head dim 128, bf16) in 41 ns
// at
//   3.3 TB/s over 264 CTAs and multiplies it with 128 rows in 14 ns at 600 TFLOP/s over 132 CTAs.
Costs default_costs(Schedule schedule, bool compute_bound) {
  constexpr Costs kMemoryBound{/*fixed=*/48,  /*alpha=*/1,    /*beta=*/1,  /*floor=*/512,
                               /*weight=*/3,  /*granule=*/64, /*merge=*/80};
  constexpr Costs kComputeBound{/*fixed=*/128, /*alpha=*/1,    /*beta=*/1,  /*floor=*/1024,
                                /*weight=*/1,  /*granule=*/64, /*merge=*/128};
  Costs costs = compute_bound ? kComputeBound : kMemoryBound;
  if (schedule == Schedule::kRuns && !compute_bound) {
    costs.fixed = 96;
    costs.floor = 64;
  }
  return costs;
}

int64_t smallest_piece(const Costs& costs, int64_t kv_tokens, int32_t num_queues) {
  // One KV token of a row is worth less than a partial result of it: with eight KV heads on 264 CTAs, 16 pieces are
  // best up to 8192 tokens and 32 from 16384 on.
  const int64_t most = std::max<int64_t>(kv_tokens < 16384 ? 16 : 32, num_queues / 4);
  return std::max(costs.floor, round_up(ceil_div(kv_tokens, most), costs.granule));
}

int32_t choose_num_queues(int32_t num_ctas, int32_t heads) {
  // num_ctas queues always fill whole rounds, so the loop ends.
  for (int64_t queues = 1; queues < num_ctas; ++queues) {
    const int64_t workers = queues * heads;
    const int64_t idle = round_up(workers, num_ctas) - workers;
    if (idle * 50 <= num_ctas) return static_cast<int32_t>(queues);
  }
  return num_ctas;
}

void choose_queues_used(const PlanRequest& request, const int64_t* total_cost, int32_t* queues_used) {
  const PlanFormat& format = request.format;
  if (format.num_classes == 1) {
    queues_used[0] = format.classes[0].num_queues;
    return;
  }
  // Class c alone takes total * weight / num_queues; its share of the sum of both times is the share of its
  // queues that lets both end at that sum. Costs are halved until the products fit in 64 bits (queues <
  // 2^16).
  int64_t scaled[kMaxClasses];
  for (int32_t c = 0; c < kMaxClasses; ++c) scaled[c] = total_cost[c] * request.costs[c].weight;
  while (std::max(scaled[0], scaled[1]) >= (int64_t{1} << 28)) {
    scaled[0] >>= 1;
    scaled[1] >>= 1;
  }
  const int64_t queues[kMaxClasses] = {format.classes[0].num_queues, format.classes[1].num_queues};
  const int64_t time[kMaxClasses] = {scaled[0] * queues[1], scaled[1] * queues[0]};
  const int64_t sum = std::max<int64_t>(time[0] + time[1], 1);
  for (int32_t c = 0; c < kMaxClasses; ++c) {
    const int64_t used = std::max<int64_t>(ceil_div(queues[c] * time[c], sum), 1);
    queues_used[c] = total_cost[c] == 0 ? 0 : static_cast<int32_t>(std::min(used, queues[c]));
  }
}

}  // namespace jaxinfer
