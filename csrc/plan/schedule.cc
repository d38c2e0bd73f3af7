// The schedules: lpt, runs, and cuts by row for batch_invariant. All arithmetic is in integers and every tie
// goes to the lower index, so that the same lengths give the same plan on any machine. Costs and shares of
// the machine are cost.cc's, ends that level CTAs level.cc's.
#include "plan/schedule.h"

#include <algorithm>
#include <numeric>

#include "plan/clip.h"
#include "plan/cost.h"
#include "plan/level.h"

namespace jaxinfer {
namespace {

// K and V that a section's rows may keep in L2 for the heads that run at once.
constexpr int64_t kSectionBytes = int64_t{16} << 20;

// Stable: sorts `order` by ascending keys[order[i]], a byte at a time, so that equal keys keep their index
// order.
void radix_sort(const std::vector<uint64_t>& keys, std::vector<int32_t>* order) {
  static thread_local std::vector<int32_t> sorted;
  sorted.resize(order->size());
  uint64_t used_bits = 0;
  for (uint64_t key : keys) used_bits |= key;
  for (int shift = 0; shift < 64 && used_bits >> shift != 0; shift += 8) {
    size_t begin[257] = {};
    for (uint64_t key : keys) ++begin[(key >> shift & 255) + 1];
    std::partial_sum(begin, begin + 257, begin);
    for (int32_t i : *order) sorted[begin[keys[i] >> shift & 255]++] = i;
    order->swap(sorted);
  }
}

int64_t tile_cost(const Costs& costs, const Tile& tile) {
  return item_cost(costs, tile.num_tokens, tile.kv_end - tile.kv_begin);
}

int64_t piece_cost(const Costs& costs, const std::vector<Tile>& tiles, const Piece& piece) {
  return item_cost(costs, tiles[piece.tile].num_tokens, piece.kv_end - piece.kv_begin);
}

using Heap = std::vector<std::pair<int64_t, int32_t>>;

// Queues by load; the least loaded one, the lowest index among equals, takes what comes next.
class LeastLoaded {
 public:
  LeastLoaded(Heap* heap, int32_t num_queues) : heap_(*heap) {
    heap_.clear();
    for (int32_t q = 0; q < num_queues; ++q) heap_.emplace_back(0, q);
  }
  int64_t load() const { return heap_[0].first; }
  int32_t queue() const { return heap_[0].second; }
  void add(int64_t cost) {
    std::pair<int64_t, int32_t> moved{heap_[0].first + cost, heap_[0].second};
    size_t hole = 0;
    for (size_t child = 1; child < heap_.size(); child = 2 * hole + 1) {
      if (child + 1 < heap_.size() && heap_[child + 1] < heap_[child]) ++child;
      if (moved < heap_[child]) break;
      heap_[hole] = heap_[child];
      hole = child;
    }
    heap_[hole] = moved;
  }

 private:
  Heap& heap_;  // a binary heap, the least (load, queue) in front
};

// lpt: takes the tiles in `order`; the queue that is next takes what fills it to the quota, the rest of the
// tile goes to the queue after it.
//
// Cuts <= queues: the division rounds up, so every cut leaves its queue with a load of at least the quota,
// and no full queue is next while another is not. If a tile were cut with all queues full, the loads would be
// at least queues * quota >= total + queues * c; but they are less than total + (pieces so far beyond one per
// tile) * c, which are at most `queues` before that cut. Largest load <= quota + 1.5 * beta * floor + c: a
// queue that is next has a load of at most the quota, and takes at most what fills it, or the floor, rounded
// up to 16 or a block (at most half a floor), and half a floor more. Cuts are whole blocks behind the tile's
// begin, so that the pieces of a tile have as many blocks as the tile.
void cut_and_deal(const std::vector<Tile>& tiles, const std::vector<int32_t>& order, const Costs& costs,
                  int64_t quota, int32_t num_queues, Heap* heap, ClassPieces* out) {
  LeastLoaded queues(heap, num_queues);
  for (int32_t i : order) {
    const Tile& tile = tiles[i];
    const int64_t own_cost = item_cost(costs, tile.num_tokens, 0);
    for (int64_t begin = tile.kv_begin; begin < tile.kv_end;) {
      const int64_t room = ceil_div(std::max<int64_t>(quota - queues.load() - own_cost, 0), costs.beta);
      const int64_t take = round_up(std::max(room, costs.floor), std::max<int64_t>(costs.block, kKvAlign));
      const int64_t end = tile.kv_end - begin <= take + costs.floor / 2 ? tile.kv_end : begin + take;
      out->pieces.push_back({i, static_cast<int32_t>(begin), static_cast<int32_t>(end), queues.queue()});
      queues.add(item_cost(costs, tile.num_tokens, end - begin));
      begin = end;
    }
  }
}

// Load of the fullest queue when whole tiles are dealt in `order`; fills `out` unless it is null.
int64_t deal_whole(const std::vector<Tile>& tiles, const std::vector<int32_t>& order, const Costs& costs,
                   int32_t num_queues, Heap* heap, ClassPieces* out) {
  LeastLoaded queues(heap, num_queues);
  int64_t largest = 0;
  for (int32_t i : order) {
    const Tile& tile = tiles[i];
    const int64_t cost = tile_cost(costs, tile);
    if (out != nullptr) out->pieces.push_back({i, tile.kv_begin, tile.kv_end, queues.queue()});
    largest = std::max(largest, queues.load() + cost);
    queues.add(cost);
  }
  return largest;
}

// runs: fills queues one after the other up to the quota, cutting the tile at which one is full. False: the
// tiles need more queues; nothing of use is in `out`, which may be null. Every cut ends a queue, so cuts <
// queues.
bool fill_runs(const std::vector<Tile>& tiles, const Costs& costs, int64_t quota, int32_t num_queues,
               ClassPieces* out) {
  int32_t queue = 0;
  int64_t load = 0;
  for (size_t i = 0; i < tiles.size(); ++i) {
    const Tile& tile = tiles[i];
    const int64_t own_cost = item_cost(costs, tile.num_tokens, 0);
    const int64_t smallest = smallest_piece(costs, tile.kv_end - tile.kv_begin, num_queues);
    for (int64_t begin = tile.kv_begin; begin < tile.kv_end;) {
      const int64_t left = tile.kv_end - begin;
      const int64_t room =
          std::max<int64_t>(quota - load - own_cost, 0) / costs.beta / costs.granule * costs.granule;
      int64_t take = load == 0 ? std::max(room, smallest) : room;
      if (left <= take + costs.granule / 2) take = left;
      if (take < left && take < smallest) {
        if (++queue == num_queues) return false;
        load = 0;
        continue;
      }
      if (out != nullptr) {
        out->pieces.push_back({static_cast<int32_t>(i), static_cast<int32_t>(begin),
                               static_cast<int32_t>(begin + take), queue});
      }
      load += item_cost(costs, tile.num_tokens, take);
      begin += take;
    }
  }
  return true;
}

// runs: the smallest quota, to a granule, with which the tiles fit; whole tiles where they are balanced well
// enough without cuts.
void schedule_runs(const std::vector<Tile>& tiles, const std::vector<int32_t>& descending, const Costs& costs,
                   int32_t num_queues, int64_t total_cost, Heap* heap, ClassPieces* out) {
  const int64_t quota = ceil_div(total_cost, num_queues);
  if (deal_whole(tiles, descending, costs, num_queues, heap, nullptr) <= quota + costs.merge) {
    deal_whole(tiles, descending, costs, num_queues, heap, out);
    return;
  }
  const int64_t step = costs.beta * costs.granule;
  int64_t steps = 0;  // the quota is known to be too small by less than 2 * steps
  int64_t stride = 1;
  while (!fill_runs(tiles, costs, quota + (steps + stride - 1) * step, num_queues, nullptr)) {
    steps += stride;
    stride *= 2;
  }
  while (stride > 1) {
    stride /= 2;
    if (!fill_runs(tiles, costs, quota + (steps + stride - 1) * step, num_queues, nullptr)) steps += stride;
  }
  fill_runs(tiles, costs, quota + steps * step, num_queues, out);
}

// Cuts at multiples of a step that depends on the row alone.
void cut_by_row(const LayoutView& layout, const PlanRequest& request, int32_t c,
                const std::vector<Tile>& tiles, ClassPieces* out) {
  for (size_t i = 0; i < tiles.size(); ++i) {
    const Tile& tile = tiles[i];
    const int64_t row_tiles = ceil_div(layout.q_len[tile.row], request.tokens_per_tile(c));
    const int64_t step = std::max<int64_t>(request.split_tokens * row_tiles,
                                           ceil_div(layout.kv_len[tile.row], 32 * kKvAlign) * kKvAlign);
    for (int64_t begin = tile.kv_begin; begin < tile.kv_end;) {
      const int64_t end = std::min<int64_t>(tile.kv_end, (begin / step + 1) * step);
      out->pieces.push_back(
          {static_cast<int32_t>(i), static_cast<int32_t>(begin), static_cast<int32_t>(end), 0});
      begin = end;
    }
  }
}

// Section of every tile: consecutive rows whose K and V, for the heads that run at once, fit in
// kSectionBytes.
void find_sections(const LayoutView& layout, const PlanRequest& request, const ClassFormat& cls,
                   const std::vector<Tile>& tiles, std::vector<uint64_t>* sections) {
  const int64_t heads = num_heads(cls, request.num_qo_heads, request.num_kv_heads);
  const int64_t at_once = std::min(heads, ceil_div(cls.num_ctas, cls.num_queues));
  const int64_t kv_heads = cls.packed ? at_once : ceil_div(at_once, request.group_size());
  const int64_t token_bytes =
      kv_heads * (int64_t{request.head_dim_qk} + request.head_dim_vo) * request.element_size;
  sections->resize(tiles.size());
  uint64_t section = 0;
  int64_t bytes = 0;
  for (size_t i = 0; i < tiles.size(); ++i) {
    if (i == 0 || tiles[i].row != tiles[i - 1].row) {
      const int64_t row_bytes = layout.kv_len[tiles[i].row] * token_bytes;
      if (bytes > 0 && bytes + row_bytes > kSectionBytes) {
        ++section;
        bytes = 0;
      }
      bytes += row_bytes;
    }
    (*sections)[i] = section;
  }
}

// Scratch that keeps its memory from plan to plan.
struct Scratch {
  std::vector<uint64_t> sections;  // [tiles]
  std::vector<uint64_t> keys;      // [tiles or pieces]
  std::vector<int32_t> order;      // [tiles or pieces]
  std::vector<int64_t> loads;      // [queues]
  Heap heap;
  ClassPieces leveled;
};

// Loads of the queues, to scratch->loads.
void find_loads(const std::vector<Tile>& tiles, const Costs& costs, int32_t num_queues,
                const std::vector<Piece>& pieces, Scratch* scratch) {
  scratch->loads.assign(num_queues, 0);
  for (const Piece& piece : pieces) scratch->loads[piece.queue] += piece_cost(costs, tiles, piece);
}

// A compute-bound class, cut and dealt already: deals whole tiles instead where that ends with the class
// beside it (free_load, 0 without one) or before the cuts and the merge behind them would. 16 chunks of 512
// tokens on 8192: cuts balance 3% better and take 5% longer (551 against 582 TFLOP/s on an H200). Returns the
// load of the fullest queue.
int64_t prefer_whole(const std::vector<Tile>& tiles, const Costs& costs, int32_t num_queues,
                     int64_t free_load, Scratch* scratch, ClassPieces* out) {
  int64_t cut_tokens = 0;  // as often as their tiles are cut
  for (size_t i = 1; i < out->pieces.size(); ++i) {
    if (out->pieces[i - 1].tile == out->pieces[i].tile) cut_tokens += tiles[out->pieces[i].tile].num_tokens;
  }
  find_loads(tiles, costs, num_queues, out->pieces, scratch);
  const int64_t cut = *std::max_element(scratch->loads.begin(), scratch->loads.end());
  if (cut_tokens == 0) return cut;
  const int64_t whole = deal_whole(tiles, scratch->order, costs, num_queues, &scratch->heap, nullptr);
  if (whole > std::max(free_load, cut) + costs.merge + costs.merge_token * cut_tokens) return cut;
  out->pieces.clear();
  return deal_whole(tiles, scratch->order, costs, num_queues, &scratch->heap, out);
}

// `order` sorted by (section in a compute-bound class, descending cost, index); cost(i) and tile_of(i) of its
// i-th.
template <typename CostOf, typename TileOf>
void sort_by_cost(size_t size, bool by_section, CostOf cost, TileOf tile_of, Scratch* scratch) {
  scratch->keys.resize(size);
  scratch->order.resize(size);
  std::iota(scratch->order.begin(), scratch->order.end(), 0);
  int64_t largest = 0;
  for (size_t i = 0; i < size; ++i) largest = std::max(largest, cost(i));
  for (size_t i = 0; i < size; ++i) scratch->keys[i] = static_cast<uint64_t>(largest - cost(i));
  radix_sort(scratch->keys, &scratch->order);
  if (!by_section) return;
  for (size_t i = 0; i < size; ++i) scratch->keys[i] = scratch->sections[tile_of(i)];
  radix_sort(scratch->keys, &scratch->order);
}

// Numbers the queues by descending load: a CTA that runs queues of several heads takes them from either end
// in turn, a full one beside one with room.
void sort_queues(const std::vector<Tile>& tiles, const Costs& costs, int32_t num_queues, Scratch* scratch,
                 ClassPieces* pieces) {
  find_loads(tiles, costs, num_queues, pieces->pieces, scratch);
  const std::vector<int64_t>& load = scratch->loads;
  std::vector<int32_t> order(num_queues);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return load[a] > load[b]; });
  std::vector<int32_t> rank(num_queues);
  for (int32_t i = 0; i < num_queues; ++i) rank[order[i]] = i;
  for (Piece& p : pieces->pieces) p.queue = rank[p.queue];
}

// A compute-bound class that has the machine for itself: takes whole tiles with a few of them levelled in
// place of `out`, where the CTAs and a merge then end earlier.
void prefer_level(const std::vector<Tile>& tiles, const PlanRequest& request, int32_t c, Scratch* scratch,
                  ClassPieces* out) {
  const ClassFormat& cls = request.format.classes[c];
  const Costs& costs = request.costs[c];
  const int64_t heads = num_heads(cls, request.num_qo_heads, request.num_kv_heads);
  ClassPieces& leveled = scratch->leveled;
  leveled.pieces.clear();
  deal_whole(tiles, scratch->order, costs, cls.num_queues, &scratch->heap, &leveled);
  sort_queues(tiles, costs, cls.num_queues, scratch, &leveled);
  const int64_t cost = cost_of_ctas(tiles, costs, cls, heads, *out);
  // Less than that is worth no merge: pieces are not where the others of their K and V are.
  if (level_ctas(tiles, costs, cls, heads, &leveled) < cost - cost / 128) out->pieces.swap(leveled.pieces);
}

// Cost of what a class computes, and of its longest piece, which cannot be cut any further.
struct ClassCost {
  int64_t total = 0;
  int64_t longest_piece = 0;

  void add(int64_t cost, int64_t piece_cost) {
    total += cost;
    longest_piece = std::max(longest_piece, piece_cost);
  }
};

ClassCost cost_of_class(const std::vector<Tile>& tiles, const Costs& costs) {
  ClassCost sum;
  const int64_t uncut = costs.floor * 3 / 2;
  for (const Tile& tile : tiles) {
    const int64_t kv_tokens = tile.kv_end - tile.kv_begin;
    sum.add(tile_cost(costs, tile), item_cost(costs, tile.num_tokens, std::min(kv_tokens, uncut)));
  }
  return sum;
}

ClassCost cost_of_pieces(const std::vector<Tile>& tiles, const Costs& costs,
                         const std::vector<Piece>& pieces) {
  ClassCost sum;
  for (const Piece& piece : pieces) {
    const int64_t cost = piece_cost(costs, tiles, piece);
    sum.add(cost, cost);
  }
  return sum;
}

// batch_invariant: deals pieces that are cut already, the longest first.
void deal_pieces(const std::vector<Tile>& tiles, const Costs& costs, bool by_section, int32_t num_queues,
                 Scratch* scratch, ClassPieces* out) {
  std::vector<Piece>& pieces = out->pieces;
  const auto cost = [&](size_t i) { return piece_cost(costs, tiles, pieces[i]); };
  sort_by_cost(pieces.size(), by_section, cost, [&](size_t i) { return pieces[i].tile; }, scratch);
  LeastLoaded queues(&scratch->heap, num_queues);
  for (int32_t i : scratch->order) {
    pieces[i].queue = queues.queue();
    queues.add(cost(i));
  }
  out->order = scratch->order;
}

// The order in which tiles are dealt, to scratch->order.
void sort_tiles(const std::vector<Tile>& tiles, const Costs& costs, bool by_section, int32_t num_queues,
                Scratch* scratch) {
  const auto cost = [&](size_t i) { return tile_cost(costs, tiles[i]); };
  const auto sort = [&](bool sections) {
    sort_by_cost(tiles.size(), sections, cost, [](size_t i) { return i; }, scratch);
  };
  const auto largest_load = [&] {
    return deal_whole(tiles, scratch->order, costs, num_queues, &scratch->heap, nullptr);
  };
  sort(false);
  if (!by_section || scratch->sections.back() == 0) return;
  const int64_t mixed = largest_load();
  sort(true);
  // The last section may begin with tiles that are too long to even out what the ones before it leave.
  if (largest_load() > mixed / 16 * 17) sort(false);
}

// Cuts and deals the tiles of class c. What the class that computes comes to may change the share of the one
// that reads beside it.
void schedule_class(const PlanRequest& request, int32_t c, const std::vector<Tile>& tiles,
                    const int64_t* total_cost, QueueShares* shares, Scratch* scratch, ClassPieces* out) {
  const Costs& costs = request.costs[c];
  const int32_t num_queues = shares->queues[c];
  const bool compute_bound = request.format.classes[c].is_compute_bound(request.group_size());
  sort_tiles(tiles, costs, compute_bound, num_queues, scratch);
  if (request.schedule == Schedule::kRuns && !compute_bound) {
    schedule_runs(tiles, scratch->order, costs, num_queues, total_cost[c], &scratch->heap, out);
    return;
  }
  int64_t largest_own = 0;
  for (const Tile& tile : tiles) largest_own = std::max(largest_own, item_cost(costs, tile.num_tokens, 0));
  const int64_t quota = ceil_div(total_cost[c], num_queues) + largest_own;
  cut_and_deal(tiles, scratch->order, costs, quota, num_queues, &scratch->heap, out);
  if (!compute_bound) return;
  const int64_t load = prefer_whole(tiles, costs, num_queues, shares->free_load, scratch, out);
  if (shares->free_load > 0) shares->queues[0] = reading_queues(request, total_cost, *shares, load);
  sort_queues(tiles, costs, num_queues, scratch, out);
  if (shares->free_load == 0 && tiles.size() >= static_cast<size_t>(num_queues)) {
    prefer_level(tiles, request, c, scratch, out);
  }
}

}  // namespace

void schedule_pieces(const LayoutView& layout, const PlanRequest& request,
                     const std::vector<Tile> (&tiles)[kMaxClasses], ClassPieces (&classes)[kMaxClasses]) {
  static thread_local Scratch scratch;
  ClassCost sums[kMaxClasses];
  for (int32_t c = 0; c < request.format.num_classes; ++c) {
    classes[c].pieces.clear();
    classes[c].order.clear();
    if (request.batch_invariant) {
      cut_by_row(layout, request, c, tiles[c], &classes[c]);
      sums[c] = cost_of_pieces(tiles[c], request.costs[c], classes[c].pieces);
    } else {
      sums[c] = cost_of_class(tiles[c], request.costs[c]);
    }
  }
  const int64_t total_cost[kMaxClasses] = {sums[0].total, sums[1].total};
  QueueShares shares = share_queues(request, total_cost, sums[1].longest_piece);

  // The first class's queues may depend on what the last one's came to.
  for (int32_t c = request.format.num_classes - 1; c >= 0; --c) {
    if (tiles[c].empty()) continue;
    const ClassFormat& cls = request.format.classes[c];
    const bool by_section = cls.is_compute_bound(request.group_size());
    if (by_section) find_sections(layout, request, cls, tiles[c], &scratch.sections);
    if (request.batch_invariant) {
      deal_pieces(tiles[c], request.costs[c], by_section, shares.queues[c], &scratch, &classes[c]);
      continue;
    }
    schedule_class(request, c, tiles[c], total_cost, &shares, &scratch, &classes[c]);
    classes[c].order.resize(classes[c].pieces.size());
    std::iota(classes[c].order.begin(), classes[c].order.end(), 0);
  }
}

}  // namespace jaxinfer
