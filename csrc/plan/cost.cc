// Cost constants and the rules that turn costs and CTA counts into queue counts.
#include "plan/cost.h"

#include <algorithm>
#include <optional>

namespace jaxinfer {

// In KV tokens of the class. Measured on an H200 (bf16, 32 query heads, 8 KV heads, head dim 128, page 16,
// 264 CTAs, batches of single-token rows), attention alone, runs against lpt:
// - 1 x 1024: 5.05 us against 9.84; 1 x 8192: 12.9, 12.9; 16 x 4096: 63.6, 63.8; 64 x 8192: 472.0, 472.0
// - 64 x 2048: 123.8, 123.1 and 128 x 1024, with the merge: 124.6, 123.5: what lpt wins, 0.3 to 0.9%
// - 16 lengths of 512 to 1024: 16.5, 18.7; skewed lengths, 16 of them: 19.6, 20.5; 64: 83.3, 85.2; 128:
//   112.1, 116.1
// What the constants stand for:
// - fixed: what starts an item and writes its result. 96 per segment is best for runs, whose segments follow
//   each other in one pipeline; a compute-bound item fills and drains a deeper one around a larger tile: 1.7
//   of its blocks.
// - block: a compute-bound kernel multiplies whole blocks. Without it 16 causal prompts of 512 to 1024 tokens
//   are 6% slower, 8 of 1024 3%.
// - floor: a cut costs a partial result and its merge. Runs may cut down to 64 tokens: 1 x 1024 in 16
//   pieces takes half of the time that two pieces take.
// - granule: the four streams of a CTA read 16 tokens each at a time; half of that balances runs better.
//   Of 30 settings (fixed 48 to 112, granule 16, 32 and 64, 32 and 33 queues) on 24 batches, with the merge,
//   96 and 32 are best: 0.7 to 2.6% less than 64 for 16 requests, skewed or of 512 to 1024 tokens, 3.5% for 8
//   of those, 1.5 and 2.1% for 32 skewed ones, larger and equal batches within 0.6%.
// - merge: the merge kernel is worth launching where cuts win more than its 2 to 4 us, 80 tokens of a CTA.
// - merge_token: the merge of one query token's two pieces (32 heads, head dim 128) takes 0.14 us, a CTA with
//   two of eight heads 26 ns for a KV token.
// - weight, in nanoseconds: while all 264 CTAs read, each takes 30 for one KV token (K and V, head dim 128,
//   bf16, 4.5 TB/s); while all 132 CTAs multiply, or some do beside others that read, 13 for 128 rows: chunks
//   of 2048 tokens of 8192, 4 of 2048 of 2048 and 4096 of 4096 take 376, 265 and 236 us by it, 380, 252 and
//   215 measured, the second one 336 on 104 CTAs beside 32 x 4096 tokens, 342 measured.
Costs default_costs(Schedule schedule, const ClassFormat& cls, int32_t group_size) {
  constexpr Costs kMemoryBound{/*fixed=*/48,  /*alpha=*/1,    /*beta=*/1,   /*block=*/1,
                               /*floor=*/512,
                               /*weight=*/30, /*granule=*/64, /*merge=*/80, /*merge_token=*/0};
  constexpr Costs kComputeBound{/*fixed=*/224,  /*alpha=*/0,    /*beta=*/1,    /*block=*/128,
                                /*floor=*/1024,
                                /*weight=*/13,  /*granule=*/64, /*merge=*/128, /*merge_token=*/5};
  const bool compute_bound = cls.is_compute_bound(group_size);
  Costs costs = compute_bound ? kComputeBound : kMemoryBound;
  if (compute_bound) costs.weight = costs.weight * cls.tile / 128;
  if (schedule == Schedule::kRuns && !compute_bound) {
    costs.fixed = 96;
    costs.floor = 64;
    costs.granule = 32;
  }
  return costs;
}

int64_t smallest_piece(const Costs& costs, int64_t kv_tokens, int32_t num_queues) {
  // One KV token of a row is worth less than a partial result of it. With eight KV heads on 264 CTAs, 16 and
  // 32 pieces take 8.5 and 9.0 us at 2048 tokens, 11.1 and 10.9 at 4096, 15.5 and 14.4 at 8192. The merge
  // reads 32 at a time.
  const int64_t most = std::max<int64_t>(kv_tokens < 4096 ? 16 : 32, num_queues / 4);
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

namespace {

// CTAs of a compute-bound class that have work when `queues` of its queues do; none where that is not their
// share.
std::optional<int64_t> busy_ctas(const ClassFormat& cls, int64_t heads, int64_t queues) {
  if (cls.num_queues * heads <= cls.num_ctas) return queues * heads;
  // Half of the workers of CTA c, which are c, c + num_ctas, ..., are of queue c % num_queues, half of the
  // one as far from the other end (ItemCursor): up to half of the queues have CTAs of their own.
  if (cls.num_ctas % cls.num_queues == 0 && 2 * queues <= cls.num_queues) {
    return 2 * queues * (cls.num_ctas / cls.num_queues);
  }
  return std::nullopt;
}

// Time of a memory-bound class on `ctas` of its num_ctas CTAs, from `alone`, that on all of them. Measured on
// an H200 (63 x 8192 tokens beside a chunk of 512) at 3/4, 5/8, 1/2, 3/8, 1/4 and 1/8 of the
// CTAs: 1.09, 1.13, 1.19, 1.41, 2.0 and 3.9 times that, because fewer multiprocessors keep the memory nearly
// as busy, until what each can read limits them; these lines say 1.1, 1.14, 1.21, 1.39, 2.1 and 4.2.
int64_t reading_time(int64_t alone, int64_t ctas, int64_t num_ctas) {
  return std::max(alone * 7 / 8 + alone * num_ctas / (6 * ctas), alone * 13 * num_ctas / (25 * ctas));
}

// A class that reads and one that multiplies, and how long they would take, all in one unit of time.
struct Pair {
  const ClassFormat& memory;
  const ClassFormat& compute;
  int64_t heads[kMaxClasses];
  int64_t work[kMaxClasses];  // CTAs times time
  int64_t longest;            // time of the longest piece, for all heads that a CTA has of its queue

  Pair(const PlanRequest& request, const int64_t* total_cost, int64_t longest_piece)
      : memory(request.format.classes[0]), compute(request.format.classes[1]) {
    for (int32_t c = 0; c < kMaxClasses; ++c) {
      heads[c] = num_heads(request.format.classes[c], request.num_qo_heads, request.num_kv_heads);
      work[c] = total_cost[c] * request.costs[c].weight * heads[c];
    }
    const int64_t of_queue = ceil_div(ceil_div(compute.num_queues * heads[1], compute.num_ctas), 2);
    longest = (longest_piece * request.costs[1].weight * of_queue) << 8;
    // Halved until a time, in 2^-8, fits in 64 bits with a number of CTAs (< 2^16).
    while (std::max(work[0], work[1]) >= (int64_t{1} << 36)) {
      work[0] >>= 1;
      work[1] >>= 1;
      longest >>= 1;
    }
  }
  int64_t reading() const { return (work[0] << 8) / memory.num_ctas; }
  int64_t reading(int64_t queues) const {
    return reading_time(reading(), queues * heads[0], memory.num_ctas);
  }
  int64_t computing(int64_t ctas) const { return std::max((work[1] << 8) / ctas, longest); }
};

}  // namespace

QueueShares share_queues(const PlanRequest& request, const int64_t* total_cost, int64_t longest_piece) {
  const PlanFormat& format = request.format;
  QueueShares shares{};
  for (int32_t c = 0; c < format.num_classes; ++c) shares.queues[c] = format.classes[c].num_queues;
  // Two classes that wait for the same thing gain nothing from each other.
  if (format.num_classes == 1 || !request.side_by_side ||
      format.classes[0].is_compute_bound(request.group_size()) ||
      !format.classes[1].is_compute_bound(request.group_size())) {
    return shares;
  }
  const Pair pair(request, total_cost, longest_piece);
  int64_t best = pair.reading() + pair.computing(pair.compute.num_ctas);  // one after the other
  for (int32_t queues = 1; queues < pair.compute.num_queues; ++queues) {
    const auto busy = busy_ctas(pair.compute, pair.heads[1], queues);
    if (!busy) break;
    // A CTA is worth its part of the machine, which either class's CTAs fill.
    const int64_t room =
        int64_t{pair.memory.num_ctas} * (pair.compute.num_ctas - *busy) / pair.compute.num_ctas;
    const int64_t others = std::min<int64_t>(room / pair.heads[0], pair.memory.num_queues);
    if (others < 1) break;
    const int64_t computing = pair.computing(*busy);
    const int64_t both = std::max(pair.reading(others), computing);
    if (both >= best) continue;
    best = both;
    shares.queues[0] = static_cast<int32_t>(others);
    shares.queues[1] = queues;
    // At most 16 times its load, which more than holds every tile.
    const int64_t load = ceil_div(total_cost[1], queues);
    const int64_t spare =
        std::min((best - computing) * 64 / std::max<int64_t>(computing, 1), int64_t{15 * 64});
    shares.free_load = load + load * spare / 64;
    shares.end = best;
  }
  return shares;
}

int32_t reading_queues(const PlanRequest& request, const int64_t* total_cost, const QueueShares& shares,
                       int64_t load) {
  // Up to 1/16 later, that is: more reads in flight than the memory needs delay those of the other class.
  // Beside the chunk above 5/8 of the CTAs took 542 us for both, 3/4 of them 566.
  const int64_t end = shares.end / shares.free_load * load / 16 * 17;
  if (end < shares.end) return shares.queues[0];
  const Pair pair(request, total_cost, 0);
  int32_t queues = shares.queues[0];
  while ((queues - 1) * pair.heads[0] * 8 >= int64_t{pair.memory.num_ctas} * 5 &&
         pair.reading(queues - 1) <= end) {
    --queues;
  }
  return queues;
}

}  // namespace jaxinfer
