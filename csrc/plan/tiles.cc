// Values are refused here, once, so that everything behind can index without asking.
#include "plan/tiles.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "plan/clip.h"

namespace jaxinfer {
namespace {

[[noreturn]] void refuse(const char* name, int64_t row, int64_t got, const std::string& expected) {
  throw std::invalid_argument(std::string("layout.") + name + "[" + std::to_string(row) +
                              "] = " + std::to_string(got) + ": expected " + expected);
}

std::string text(int64_t value) {
  return std::to_string(value);
}

// Page ids and block positions of one row's used blocks [start, start + num_blocks) of kv_indices.
void check_blocks(const LayoutView& layout, int32_t row, int64_t start, int64_t num_blocks) {
  if (layout.num_pages) {
    const int32_t* ids = layout.kv_indices + start;
    // Negative ids are the largest unsigned ones; a plain maximum is a vector loop.
    uint32_t largest = 0;
    for (int64_t b = 0; b < num_blocks; ++b) largest = std::max(largest, static_cast<uint32_t>(ids[b]));
    if (largest >= *layout.num_pages) {
      const int32_t* bad =
          std::find_if(ids, ids + num_blocks, [&](int32_t id) { return id < 0 || id >= *layout.num_pages; });
      throw std::invalid_argument("layout.kv_indices: row " + text(row) + " lists page " + text(*bad) +
                                  " as its block " + text(bad - ids) +
                                  ", expected an id in [0, num_pages = " + text(*layout.num_pages) + ")");
    }
  }
  if (layout.block_pos != nullptr) {
    const int32_t* pos = layout.block_pos + start;
    const int32_t* bad = std::is_sorted_until(pos, pos + num_blocks);
    if (bad != pos + num_blocks) {
      throw std::invalid_argument("layout.block_pos: row " + text(row) + " has position " + text(bad[0]) +
                                  " behind position " + text(bad[-1]) +
                                  ", expected ascending positions within a row");
    }
  }
}

// No token may be covered by more than num_layouts rows: the capacities count on it.
void check_coverage(const LayoutView& layout, const PlanRequest& request) {
  int64_t end = 0;
  bool disjoint = true;
  for (int32_t r = 0; r < request.num_rows && disjoint; ++r) {
    if (layout.q_len[r] == 0) continue;
    disjoint = layout.q_start[r] >= end;
    end = int64_t{layout.q_start[r]} + layout.q_len[r];
  }
  if (disjoint) return;
  // [num_tokens + 1] rows that begin less rows that end at a token
  static thread_local std::vector<int32_t> change;
  change.assign(static_cast<size_t>(request.num_tokens) + 1, 0);
  for (int32_t r = 0; r < request.num_rows; ++r) {
    ++change[layout.q_start[r]];
    --change[layout.q_start[r] + layout.q_len[r]];
  }
  int32_t covering = 0;
  for (int32_t t = 0; t < request.num_tokens; ++t) {
    covering += change[t];
    if (covering > request.num_layouts) {
      throw std::invalid_argument("layout: token " + text(t) + " is covered by " + text(covering) +
                                  " rows, expected at most num_layouts = " + text(request.num_layouts));
    }
  }
}

}  // namespace

void check_layout(const LayoutView& layout, const PlanRequest& request) {
  const bool contiguous = request.contiguous;
  const int64_t kv_end = contiguous ? request.kv_capacity : layout.kv_indices_capacity;
  const int64_t pool_end = contiguous && layout.num_pages ? std::min(kv_end, *layout.num_pages) : kv_end;
  const char* unit = contiguous ? " KV tokens" : " entries of kv_indices";
  int64_t listed = 0;
  for (int32_t r = 0; r < request.num_rows; ++r) {
    const int64_t q_start = layout.q_start[r];
    const int64_t q_len = layout.q_len[r];
    const int64_t kv_start = layout.kv_start[r];
    const int64_t kv_len = layout.kv_len[r];
    if (q_len < 0) refuse("q_len", r, q_len, "at least 0");
    if (kv_len < 0) refuse("kv_len", r, kv_len, "at least 0");
    if (q_start < 0 || q_start > request.num_tokens) {
      refuse("q_start", r, q_start, "a token in [0, num_tokens = " + text(request.num_tokens) + "]");
    }
    if (q_start + q_len > request.num_tokens) {
      refuse("q_len", r, q_len,
             "q_start + q_len <= num_tokens, but " + text(q_start) + " + " + text(q_len) + " > " +
                 text(request.num_tokens));
    }
    if (kv_len == 0) continue;
    const int64_t num_blocks = contiguous ? kv_len : ceil_div(kv_len, request.page_size);
    if (kv_start < 0) refuse("kv_start", r, kv_start, "at least 0");
    if (kv_start + num_blocks > pool_end) {
      refuse("kv_len", r, kv_len,
             "kv_start + its " + text(num_blocks) + (contiguous ? " tokens" : " blocks") +
                 " <= " + text(pool_end) + unit + ", but kv_start is " + text(kv_start));
    }
    listed += kv_len;
    if (!contiguous) check_blocks(layout, r, kv_start, num_blocks);
  }
  if (request.batch_invariant && listed > request.kv_capacity) {
    throw std::invalid_argument(
        "layout.kv_len: the rows list " + text(listed) +
        " KV tokens in all, expected at most kv_capacity = " + text(request.kv_capacity));
  }
  check_coverage(layout, request);
}

void make_tiles(const LayoutView& layout, const PlanRequest& request,
                std::vector<Tile> (&tiles)[kMaxClasses]) {
  for (auto& list : tiles) list.clear();
  const int32_t last = request.format.num_classes - 1;
  int32_t tokens_per_tile[kMaxClasses];
  for (int32_t c = 0; c <= last; ++c) tokens_per_tile[c] = request.tokens_per_tile(c);
  for (int32_t r = 0; r < request.num_rows; ++r) {
    const int32_t q_len = layout.q_len[r];
    int32_t c = 0;
    while (c < last && q_len > tokens_per_tile[c]) ++c;
    const int32_t step = tokens_per_tile[c];
    for (int32_t done = 0; done < q_len; done += std::min(step, q_len - done)) {
      const int32_t begin = layout.q_start[r] + done;
      const int32_t num_tokens = std::min(step, q_len - done);
      const KvRange range = clip_tile(layout, request, r, begin, begin + num_tokens);
      if (range.begin < range.end) tiles[c].push_back({r, begin, num_tokens, range.begin, range.end});
    }
  }
}

}  // namespace jaxinfer
