// From rows to tiles: checks the layout's values, assigns every BSR row to a class, cuts it into tiles of
// whole tokens and clips their KV ranges. No queues and no costs here.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/request.h"

namespace jaxinfer {

// Tokens [token_begin, token_begin + num_tokens) of one BSR row against KV tokens [kv_begin, kv_end) of its
// list.
struct Tile {
  int32_t row;
  int32_t token_begin;
  int32_t num_tokens;
  int32_t kv_begin;
  int32_t kv_end;
};

// Throws std::invalid_argument, naming the array, the row and both numbers, where values would lead outside
// the arrays, the capacities or the pool. Nothing else in the planner checks values.
void check_layout(const LayoutView& layout, const PlanRequest& request);

// Tiles of class c in ascending (row, token); tiles that see nothing are left out.
void make_tiles(const LayoutView& layout, const PlanRequest& request,
                std::vector<Tile> (&tiles)[kMaxClasses]);

}  // namespace jaxinfer
