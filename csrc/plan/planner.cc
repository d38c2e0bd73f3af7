// Packs scheduled pieces: slots, merge entries, empty items, queues. Where tiles are cut is schedule.cc.
#include "plan/planner.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "plan/clip.h"
#include "plan/schedule.h"
#include "plan/tiles.h"

namespace jaxinfer {
namespace {

// A slot of one partial piece waiting for its place in the merge list.
struct Partial {
  int64_t position;  // of the piece's first KV token
  int32_t token_begin;
  int32_t num_tokens;
  int32_t slot;
};

struct TokenRun {
  int32_t begin;
  int32_t num_tokens;
};

struct Scratch {
  std::vector<Tile> tiles[kMaxClasses];
  ClassPieces classes[kMaxClasses];
  std::vector<int32_t> num_pieces;         // [num_tokens + 1] pieces of each token
  std::vector<int32_t> shared;             // [num_tokens + 1] tokens before t that have more than one piece
  std::vector<int32_t> entry;              // [num_tokens + 1] merge entries before token t
  std::vector<int32_t> num_slots;          // [num_tokens + 1] slots of each token
  std::vector<int32_t> cursor;             // [num_tokens or num_queues] where the next one goes
  std::vector<int32_t> outs[kMaxClasses];  // [pieces] first slot of the piece, or -1
  std::vector<Partial> partials;
  std::vector<TokenRun> unseen;
};

void check_fits(int64_t got, int64_t capacity, const char* what) {
  if (got > capacity) {
    throw std::logic_error("plan: " + std::to_string(got) + " " + what + ", but the capacity is " +
                           std::to_string(capacity) + "; this is a bug in the planner's bounds");
  }
}

// Fills num_pieces and shared.
void count_pieces(const PlanRequest& request, Scratch* s) {
  const int32_t num_tokens = request.num_tokens;
  s->num_pieces.assign(num_tokens + 1, 0);
  for (int32_t c = 0; c < request.format.num_classes; ++c) {
    for (const Piece& piece : s->classes[c].pieces) {
      const Tile& tile = s->tiles[c][piece.tile];
      ++s->num_pieces[tile.token_begin];
      --s->num_pieces[tile.token_begin + tile.num_tokens];
    }
  }
  s->shared.resize(num_tokens + 1);
  int32_t running = 0;
  int32_t shared = 0;
  for (int32_t t = 0; t < num_tokens; ++t) {
    running += s->num_pieces[t];
    s->num_pieces[t] = running;
    s->shared[t] = shared;
    shared += running > 1;
  }
  s->shared[num_tokens] = shared;
}

// Gives slots to every piece with a token that has another piece too: such a piece is partial as a whole.
// Returns the number of slots.
int32_t assign_slots(const LayoutView& layout, const PlanRequest& request, Scratch* s) {
  int64_t num_slots = 0;
  s->partials.clear();
  for (int32_t c = 0; c < request.format.num_classes; ++c) {
    s->outs[c].clear();
    for (const Piece& piece : s->classes[c].pieces) {
      const Tile& tile = s->tiles[c][piece.tile];
      const bool partial = s->shared[tile.token_begin + tile.num_tokens] > s->shared[tile.token_begin];
      s->outs[c].push_back(partial ? static_cast<int32_t>(num_slots) : -1);
      if (!partial) continue;
      const int64_t position = int64_t{layout.kv_offset[tile.row]} + piece.kv_begin;
      s->partials.push_back({position, tile.token_begin, tile.num_tokens, static_cast<int32_t>(num_slots)});
      num_slots += tile.num_tokens;
      check_fits(num_slots, request.format.slot_capacity, "partial slots");
    }
  }
  // The pieces of one tile ascend already; with several layouts a token's pieces come from several rows.
  if (request.num_layouts > 1) {
    std::stable_sort(s->partials.begin(), s->partials.end(),
                     [](const Partial& a, const Partial& b) { return a.position < b.position; });
  }
  return static_cast<int32_t>(num_slots);
}

// Writes the merge list, one entry per token with slots, by ascending token; fills `entry`. Returns the
// entries.
int32_t write_merge_list(const PlanRequest& request, Scratch* s, int32_t* out) {
  const PlanFormat& format = request.format;
  const int32_t num_tokens = request.num_tokens;
  int32_t* merge_token = out + format.merge_token;
  int32_t* merge_indptr = out + format.merge_indptr;
  int32_t* merge_slots = out + format.merge_slots;
  s->num_slots.assign(num_tokens + 1, 0);
  for (const Partial& p : s->partials) {
    ++s->num_slots[p.token_begin];
    --s->num_slots[p.token_begin + p.num_tokens];
  }
  s->entry.resize(num_tokens + 1);
  s->cursor.resize(num_tokens + 1);
  int32_t entries = 0;
  int32_t running = 0;
  int32_t end = 0;
  for (int32_t t = 0; t < num_tokens; ++t) {
    running += s->num_slots[t];
    s->entry[t] = entries;
    s->cursor[t] = end;
    if (running == 0) continue;
    check_fits(entries + 1, format.merge_capacity, "merge entries");
    merge_token[entries] = t;
    merge_indptr[entries] = end;
    end += running;
    ++entries;
  }
  std::fill(merge_token + entries, merge_token + format.merge_capacity, -1);
  std::fill(merge_indptr + entries, merge_indptr + format.merge_capacity + 1, end);
  for (const Partial& p : s->partials) {
    for (int32_t i = 0; i < p.num_tokens; ++i) merge_slots[s->cursor[p.token_begin + i]++] = p.slot + i;
  }
  std::fill(merge_slots + end, merge_slots + format.slot_capacity, -1);
  return entries;
}

// Maximal runs of tokens without a piece, in pieces small enough to be dealt over the first class's queues.
void find_unseen(const PlanRequest& request, Scratch* s) {
  s->unseen.clear();
  const int32_t num_tokens = request.num_tokens;
  const int64_t unseen = std::count(s->num_pieces.begin(), s->num_pieces.begin() + num_tokens, 0);
  const int64_t even = ceil_div(unseen, request.format.classes[0].num_queues);
  const auto most = static_cast<int32_t>(
      std::min<int64_t>(kMaxItemTokens, std::max<int64_t>(request.tokens_per_tile(0), even)));
  for (int32_t t = 0; t < num_tokens;) {
    if (s->num_pieces[t] != 0) {
      ++t;
      continue;
    }
    const int32_t begin = t;
    while (t < num_tokens && s->num_pieces[t] == 0 && t - begin < most) ++t;
    s->unseen.push_back({begin, t - begin});
  }
}

// Writes queue_indptr, queue_first and items of class c: each queue's pieces in dealing order, then its empty items.
// Returns the number of items.
int32_t write_class(const LayoutView& layout, const PlanRequest& request, int32_t c, Scratch* s,
                    int32_t* out) {
  const ClassFormat& cls = request.format.classes[c];
  const std::vector<Tile>& tiles = s->tiles[c];
  const ClassPieces& pieces = s->classes[c];
  const size_t num_empty = c == 0 ? s->unseen.size() : 0;
  const int64_t num_items = static_cast<int64_t>(pieces.pieces.size() + num_empty);
  check_fits(num_items, cls.item_capacity, "items");

  int32_t* indptr = out + cls.queue_indptr;
  std::fill(indptr, out + cls.items, 0);  // queue_first as well
  for (const Piece& piece : pieces.pieces) ++indptr[piece.queue + 1];
  for (size_t i = 0; i < num_empty; ++i) ++indptr[i % cls.num_queues + 1];
  for (int32_t q = 0; q < cls.num_queues; ++q) indptr[q + 1] += indptr[q];
  s->cursor.assign(indptr, indptr + cls.num_queues);

  Item* items = reinterpret_cast<Item*>(out + cls.items);
  for (int32_t i : pieces.order) {
    const Piece& piece = pieces.pieces[i];
    const Tile& tile = tiles[piece.tile];
    const int32_t slot = s->outs[c][i];
    items[s->cursor[piece.queue]++] = {tile.token_begin,
                                       piece.kv_begin,
                                       piece.kv_end,
                                       layout.kv_start[tile.row],
                                       tile.row,
                                       slot,
                                       slot < 0 ? -1 : s->entry[tile.token_begin],
                                       tile.num_tokens};
  }
  for (size_t i = 0; i < num_empty; ++i) {
    const TokenRun& run = s->unseen[i];
    items[s->cursor[i % cls.num_queues]++] = {run.begin, 0, 0, 0, -1, -1, -1, run.num_tokens};
  }
  std::fill(reinterpret_cast<int32_t*>(items + num_items),
            reinterpret_cast<int32_t*>(items + cls.item_capacity), 0);
  Item* first = reinterpret_cast<Item*>(out + cls.queue_first);
  for (int32_t q = 0; q < cls.num_queues; ++q) {
    if (indptr[q] < indptr[q + 1]) first[q] = items[indptr[q]];
  }
  return static_cast<int32_t>(num_items);
}

}  // namespace

void make_plan(const LayoutView& layout, const PlanRequest& request, int32_t* out) {
  static thread_local Scratch scratch;
  check_layout(layout, request);
  make_tiles(layout, request, scratch.tiles);
  schedule_pieces(layout, request, scratch.tiles, scratch.classes);
  count_pieces(request, &scratch);
  find_unseen(request, &scratch);

  std::fill(out, out + kHeaderWords, 0);
  out[kHeaderVersion] = kPlanVersion;
  out[kHeaderNumTokens] = request.num_tokens;
  out[kHeaderNumClasses] = request.format.num_classes;
  out[kHeaderNumSlots] = assign_slots(layout, request, &scratch);
  out[kHeaderNumMerge] = write_merge_list(request, &scratch, out);
  for (int32_t c = 0; c < request.format.num_classes; ++c) {
    out[kHeaderNumItems + c] = write_class(layout, request, c, &scratch, out);
  }
}

}  // namespace jaxinfer
