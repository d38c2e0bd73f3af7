// How large a plan can get: static functions of what is known when a step is traced, with the proofs that no
// batch of that capacity overflows them. The scheduler's side of each bound is in schedule.cc.
#pragma once

#include "plan/request.h"

namespace jaxinfer {

// Fills item_capacity, merge_capacity and slot_capacity of request->format, then lays the array out.
// Throws std::invalid_argument where the array would have 2^31 words or more.
//
// N tokens, R rows, L layouts; class c has Q queues and tiles of n tokens. Every layout covers a token at
// most once, so the rows' q_len add up to at most L * N.
//
// - Tiles of a class. Its rows have q_len >= q_min (1 in the first class, else one more than the class before
//   holds), so there are at most R' = min(R, L * N / q_min) of them. In the last class a row has
//   ceil(q_len / n) <= 1 + (q_len - 1) / n tiles, in all at most R' + (L * N - R') / n; in any other class a
//   row is one tile.
// - Cuts. `lpt` and `runs` make at most Q cuts per class: items <= tiles + Q.
// - Empty items, all in the first class. A maximal run of tokens that no tile sees starts at token 0, or
//   where a tile that sees something ends: then the row ends there too, or the row's next tile is dropped
//   (sees nothing) and starts there. So there are at most 1 + R + dropped tiles runs, and no more than N.
//   Dropped tiles of the first class leave their own places free (tiles counts them), those of the others do
//   not. A run of length x is written in pieces of p = min(65535, max(n, ceil(unseen / Q))) tokens:
//   ceil(x / p) <= 1 + x / p, in all at most runs + Q + ceil(N / 65535).
// - Slots. One layout: only pieces of cut tiles have slots; a tile cut k times has k + 1 <= 2k pieces, so
//   slots <= 2 * Q * n; also every tile has one piece plus its cuts: slots <= N + Q * n. Several layouts: any
//   item may be partial: slots <= L * N + Q * n. No item has more than min(n, N) tokens.
// - Merge entries: one per token of a cut tile (one layout: <= Q * n), never more than N.
// - batch_invariant (one layout). A row of m tiles is cut at multiples of a step >= split_tokens * m and
//   >= kv_len / 32: a tile has at most 34 pieces, and at most 2 + kv_len / step (1 + kv_len / step when
//   ranges begin at 0, which holds without window_left). Over a row of m tiles: items <= 2 * m + kv_len /
//   split_tokens, and q_len <= m * n gives slots <= 2 * q_len + n * kv_len / split_tokens; without
//   window_left a tile cut k times has k <= kv_len / step and at most 2k pieces: slots <= 2 * n * kv_len /
//   split_tokens. The rows' kv_len add up to at most kv_capacity.
void fill_capacities(PlanRequest* request);

}  // namespace jaxinfer
