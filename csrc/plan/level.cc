// See level.h. All arithmetic is in integers and every tie goes to the lower index, as in schedule.cc.
#include "plan/level.h"

#include <algorithm>

#include "plan/clip.h"
#include "plan/cost.h"

namespace jaxinfer {
namespace {

// The queues that a CTA runs in turn. With several heads it takes half of its queues from either end of their
// numbers: queue q and the one as far from the other end are a unit, which such a CTA runs whole. Else a unit
// is a queue.
struct Units {
  int32_t num_queues;
  bool paired;

  Units(const ClassFormat& cls, int64_t heads) : num_queues(cls.num_queues), paired(false) {
    if (cls.num_ctas % cls.num_queues != 0) return;
    // Parities of a CTA's heads alternate where this is a power of two.
    const int64_t beside = cls.num_ctas / cls.num_queues;
    paired = (beside & (beside - 1)) == 0 && heads % (2 * beside) == 0;
  }
  int32_t count() const { return paired ? (num_queues + 1) / 2 : num_queues; }
  int32_t of(int32_t queue) const { return paired ? std::min(queue, num_queues - 1 - queue) : queue; }
  // How often a CTA of the unit runs each of its queues.
  int64_t times(int32_t unit) const { return paired && 2 * unit == num_queues - 1 ? 2 : 1; }
  int64_t queues() const { return paired ? 2 : 1; }
  // The unit's queue that is to get more.
  int32_t emptier(int32_t unit) const { return paired ? num_queues - 1 - unit : unit; }
};

struct Level {
  std::vector<int64_t> loads;  // [units]
  int64_t cut_tokens = 0;      // query tokens of tiles with several pieces

  int64_t largest() const { return *std::max_element(loads.begin(), loads.end()); }
};

Level level_of(const std::vector<Tile>& tiles, const Costs& costs, const Units& units,
               const ClassPieces& pieces) {
  Level level;
  level.loads.assign(units.count(), 0);
  for (size_t i = 0; i < pieces.pieces.size(); ++i) {
    const Piece& piece = pieces.pieces[i];
    const int32_t tokens = tiles[piece.tile].num_tokens;
    const int32_t unit = units.of(piece.queue);
    level.loads[unit] += units.times(unit) * item_cost(costs, tokens, piece.kv_end - piece.kv_begin);
    const bool another = i > 0 && pieces.pieces[i - 1].tile == piece.tile;
    const bool third = another && i > 1 && pieces.pieces[i - 2].tile == piece.tile;
    if (another && !third) level.cut_tokens += tokens;
  }
  return level;
}

int64_t cost_of(const Level& level, const Costs& costs, const Units& units) {
  const int64_t merge = level.cut_tokens == 0 ? 0 : costs.merge + costs.merge_token * level.cut_tokens;
  return ceil_div(level.largest(), units.queues()) + merge;
}

// An end of the last piece of a unit, for another one.
struct Move {
  int32_t piece;  // of the whole tile
  int32_t kv_begin;
  int32_t unit;
};

// What is to move so that no unit has more than `most`; false: that cannot be.
bool find_moves(const std::vector<Tile>& tiles, const Costs& costs, const Units& units,
                const ClassPieces& pieces, const std::vector<int32_t>& last_piece, std::vector<int64_t> loads,
                int64_t most, std::vector<Move>* moves) {
  moves->clear();
  const int64_t step = std::max<int64_t>(costs.block, kKvAlign);
  // A tile that is cut has its merge anyway, however many pieces it comes to.
  const int64_t smallest = costs.floor / 2;
  for (int32_t from = 0; from < units.count(); ++from) {
    if (loads[from] <= most) continue;
    const Piece& piece = pieces.pieces[last_piece[from]];
    const Tile& tile = tiles[piece.tile];
    const int64_t own_cost = item_cost(costs, tile.num_tokens, 0);
    int64_t end = tile.kv_end;
    const auto too_much = ceil_div(loads[from] - most, costs.beta * units.times(from));
    // Cuts are whole blocks behind the tile's begin, so that its pieces have as many blocks as the tile.
    const int64_t length = (tile.kv_end - tile.kv_begin - std::max(too_much, smallest)) / step * step;
    if (length < smallest) return false;
    loads[from] -=
        units.times(from) * costs.beta * round_up(tile.kv_end - tile.kv_begin - length, costs.block);
    while (end > tile.kv_begin + length) {
      const auto to = static_cast<int32_t>(std::min_element(loads.begin(), loads.end()) - loads.begin());
      const int64_t room = (most - loads[to]) / units.times(to) - own_cost;
      const int64_t left = end - tile.kv_begin - length;
      int64_t take = left;
      if (costs.beta * round_up(left, costs.block) > room) {
        take = std::min(room / costs.beta, left - smallest);
        // The first end has what is behind the last whole block.
        take = end - tile.kv_begin - round_up(end - tile.kv_begin - take, step);
      }
      if (take < std::min(smallest, left) || static_cast<int32_t>(moves->size()) == units.num_queues)
        return false;
      end -= take;
      loads[to] += units.times(to) * item_cost(costs, tile.num_tokens, take);
      moves->push_back({last_piece[from], static_cast<int32_t>(end), to});
    }
  }
  return true;
}

void apply(const std::vector<Tile>& tiles, const Units& units, std::vector<Move> moves, ClassPieces* pieces) {
  // Pieces of a tile ascend; its moves are from its end on.
  std::stable_sort(moves.begin(), moves.end(), [](const Move& a, const Move& b) {
    return a.piece != b.piece ? a.piece < b.piece : a.kv_begin < b.kv_begin;
  });
  std::vector<Piece> out;
  size_t next = 0;
  for (size_t i = 0; i < pieces->pieces.size(); ++i) {
    out.push_back(pieces->pieces[i]);
    for (; next < moves.size() && moves[next].piece == static_cast<int32_t>(i); ++next) {
      out.back().kv_end = moves[next].kv_begin;
      out.push_back({pieces->pieces[i].tile, moves[next].kv_begin, tiles[pieces->pieces[i].tile].kv_end,
                     units.emptier(moves[next].unit)});
    }
  }
  pieces->pieces.swap(out);
}

}  // namespace

int64_t cost_of_ctas(const std::vector<Tile>& tiles, const Costs& costs, const ClassFormat& cls,
                     int64_t heads, const ClassPieces& pieces) {
  const Units units(cls, heads);
  return cost_of(level_of(tiles, costs, units, pieces), costs, units);
}

int64_t level_ctas(const std::vector<Tile>& tiles, const Costs& costs, const ClassFormat& cls, int64_t heads,
                   ClassPieces* pieces) {
  const Units units(cls, heads);
  const Level whole = level_of(tiles, costs, units, *pieces);
  int64_t total = 0;
  for (int32_t u = 0; u < units.count(); ++u) total += whole.loads[u] / units.times(u);
  std::vector<int32_t> last_piece(units.count(), -1);
  for (size_t i = 0; i < pieces->pieces.size(); ++i) {
    last_piece[units.of(pieces->pieces[i].queue)] = static_cast<int32_t>(i);
  }
  const int64_t cost = cost_of(whole, costs, units);
  std::vector<Move> moves;
  const int64_t mean = ceil_div(total * units.queues(), units.num_queues);
  constexpr int64_t kAttempts = 64;
  const int64_t step = std::max<int64_t>(ceil_div(whole.largest() - mean, kAttempts), 1);
  for (int64_t most = mean; most < whole.largest(); most += step) {
    if (!find_moves(tiles, costs, units, *pieces, last_piece, whole.loads, most, &moves)) continue;
    ClassPieces leveled = *pieces;
    apply(tiles, units, moves, &leveled);
    const int64_t leveled_cost = cost_of(level_of(tiles, costs, units, leveled), costs, units);
    if (leveled_cost >= cost) break;
    pieces->pieces.swap(leveled.pieces);
    return leveled_cost;
  }
  return cost;
}

}  // namespace jaxinfer
