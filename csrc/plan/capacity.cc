// The bounds proved in capacity.h, in 64-bit integers.
#include "plan/capacity.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>

namespace jaxinfer {
namespace {

constexpr int64_t kMaxPieces = 34;  // of one tile, with batch_invariant

int64_t max_tiles(const PlanRequest& request, int32_t c) {
  const int64_t covered = int64_t{request.num_layouts} * request.num_tokens;
  const int64_t q_min = c == 0 ? 1 : int64_t{request.tokens_per_tile(c - 1)} + 1;
  const int64_t rows = std::min<int64_t>(request.num_rows, covered / q_min);
  const bool last = c == request.format.num_classes - 1;
  return last ? rows + (covered - rows) / request.tokens_per_tile(c) : rows;
}

int32_t narrow(int64_t value, const char* what) {
  if (value > std::numeric_limits<int32_t>::max()) {
    throw std::invalid_argument(std::string("plan: ") + what + " would be " + std::to_string(value) +
                                ", expected less than 2147483648; use fewer tokens, rows or layouts");
  }
  return static_cast<int32_t>(value);
}

}  // namespace

void fill_capacities(PlanRequest* request) {
  PlanFormat& format = request->format;
  const int64_t tokens = request->num_tokens;
  int64_t tiles[kMaxClasses];
  int64_t other_tiles = 0;  // of all classes but the first
  int64_t cut_tokens = 0;   // sum over classes of queues * tokens of an item
  int64_t item_tokens_max = 0;
  for (int32_t c = 0; c < format.num_classes; ++c) {
    tiles[c] = max_tiles(*request, c);
    if (c > 0) other_tiles += tiles[c];
    const int64_t item_tokens = std::min<int64_t>(request->tokens_per_tile(c), tokens);
    cut_tokens += format.classes[c].num_queues * item_tokens;
    item_tokens_max = std::max(item_tokens_max, item_tokens);
  }

  for (int32_t c = 0; c < format.num_classes; ++c) {
    const int64_t queues = format.classes[c].num_queues;
    int64_t items =
        request->batch_invariant
            ? std::min(kMaxPieces * tiles[c], 2 * tiles[c] + request->kv_capacity / request->split_tokens)
            : tiles[c] + queues;
    if (c == 0) {
      items +=
          std::min(tokens, request->num_rows + 1 + other_tiles) + queues + ceil_div(tokens, kMaxItemTokens);
    }
    format.classes[c].item_capacity = narrow(items, "item_capacity");
  }

  int64_t slots;
  int64_t merges = tokens;
  if (request->batch_invariant) {
    const int64_t cuts = request->kv_capacity / request->split_tokens + 1;  // real quotient <= this
    slots = std::min(kMaxPieces * tokens, 2 * tokens + item_tokens_max * cuts);
    if (!request->clip.window_left) slots = std::min(slots, 2 * item_tokens_max * cuts);
  } else if (request->num_layouts == 1) {
    slots = std::min(2 * cut_tokens, tokens + cut_tokens);
    merges = std::min(tokens, cut_tokens);
  } else {
    slots = request->num_layouts * tokens + cut_tokens;
  }
  format.slot_capacity = narrow(slots, "slot_capacity");
  format.merge_capacity = narrow(merges, "merge_capacity");
  lay_out(&format);
  narrow(format.num_words, "the number of words");
}

}  // namespace jaxinfer
