// Cost constants and the two rules that turn costs and CTA counts into queue counts.
#include "plan/cost.h"

#include <algorithm>

namespace jaxinfer {

// In KV tokens of the class. Measured on an H200 (bf16, 32 query heads, 8 KV heads, head dim 128, page 16,
// 264 CTAs, batches of single-token rows), attention alone, runs against lpt:
// - 1 x 1024: 5.05 us against 9.84; 1 x 8192: 12.9, 12.9; 16 x 4096: 63.6, 63.8; 64 x 8192: 472.0, 472.0
// - 64 x 2048: 123.8, 123.1 and 128 x 1024, with the merge: 124.6, 123.5: what lpt wins, 0.3 to 0.9%
// - 16 lengths of 512 to 1024: 16.5, 18.7; skewed lengths, 16 of them: 19.6, 20.5; 64: 83.3, 85.2; 128:
//   112.1, 116.1
// What the constants stand for:
// - fixed: what starts an item and writes its result. 96 per segment is best for runs, whose segments follow
//   each other in one pipeline; a compute-bound item fills and drains a deeper one around a larger tile.
// - floor: a cut costs a partial result and its merge. Runs may cut down to one granule: 1 x 1024 in 16
//   pieces takes half of the time that two pieces take.
// - granule: the four streams of a CTA read 16 tokens each at a time.
// - merge: the merge kernel is worth launching where cuts win more than its 2 to 4 us, 80 tokens of a CTA.
// - weight: a CTA with the whole machine behind it reads one KV token (K and V, head dim 128, bf16) in 41 ns
//   at 3.3 TB/s over 264 CTAs and multiplies it with 128 rows in 14 ns at 600 TFLOP/s over 132 CTAs.
Costs default_costs(Schedule schedule, bool compute_bound) {
  constexpr Costs kMemoryBound{/*fixed=*/48, /*alpha=*/1,    /*beta=*/1,  /*floor=*/512,
                               /*weight=*/3, /*granule=*/64, /*merge=*/80};
  constexpr Costs kComputeBound{/*fixed=*/128, /*alpha=*/1,    /*beta=*/1,   /*floor=*/1024,
                                /*weight=*/1,  /*granule=*/64, /*merge=*/128};
  Costs costs = compute_bound ? kComputeBound : kMemoryBound;
  if (schedule == Schedule::kRuns && !compute_bound) {
    costs.fixed = 96;
    costs.floor = 64;
  }
  return costs;
}

int64_t smallest_piece(const Costs& costs, int64_t kv_tokens, int32_t num_queues) {
  // One KV token of a row is worth less than a partial result of it: with eight KV heads on 264 CTAs, 16
  // pieces are best up to 8192 tokens and 32 from 16384 on.
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
