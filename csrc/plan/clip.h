// Clipping: which KV tokens of a row a tile's tokens can see at all. The one place that turns causal and
// window rules into index ranges; kernels mask inside the range and never derive one.
#pragma once

#include <cstdint>

#include "plan/request.h"

namespace jaxinfer {

constexpr int32_t kKvAlign = 16;  // ranges begin, and are cut, at multiples of this many KV tokens

// KV tokens [begin, end) of a row's list, begin a multiple of kKvAlign; begin >= end: nothing.
struct KvRange {
  int32_t begin;
  int32_t end;
};

// The union of what the tokens [token_begin, token_end) of `row` can see.
KvRange clip_tile(const LayoutView& layout, const PlanRequest& request, int32_t row, int32_t token_begin,
                  int32_t token_end);

}  // namespace jaxinfer
