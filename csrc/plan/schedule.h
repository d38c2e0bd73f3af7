// From tiles to pieces on queues: where tiles are cut and who takes what. Knows nothing of the packed array.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/request.h"
#include "plan/tiles.h"

namespace jaxinfer {

// KV tokens [kv_begin, kv_end) of one tile, on one queue.
struct Piece {
  int32_t tile;  // index in the class's tiles
  int32_t kv_begin;
  int32_t kv_end;
  int32_t queue;
};

// The pieces of one class. A tile's pieces are consecutive and ascend in kv_begin.
struct ClassPieces {
  std::vector<Piece> pieces;
  // [pieces.size()] indices of the pieces in the order in which they were dealt, which is that inside a queue
  std::vector<int32_t> order;
};

// Cuts the tiles of every class and deals the pieces over its queues, as request.schedule says.
void schedule_pieces(const LayoutView& layout, const PlanRequest& request,
                     const std::vector<Tile> (&tiles)[kMaxClasses], ClassPieces (&classes)[kMaxClasses]);

}  // namespace jaxinfer
