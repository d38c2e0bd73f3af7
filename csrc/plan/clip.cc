// Positions to list indices, in 64-bit arithmetic: positions and windows are any int32.
#include "plan/clip.h"

#include <algorithm>

namespace jaxinfer {
namespace {

// Positions that a tile can see: [lo, hi], both inclusive; far outside int32 where no rule bounds them.
struct PositionRange {
  int64_t lo = -(int64_t{1} << 40);
  int64_t hi = int64_t{1} << 40;
};

PositionRange visible_positions(const ClipRule& clip, const int32_t* q_pos, int32_t token_begin,
                                int32_t token_end) {
  const auto [min_pos, max_pos] = std::minmax_element(q_pos + token_begin, q_pos + token_end);
  PositionRange range;
  if (clip.causal) range.hi = *max_pos;
  if (clip.window_right) range.hi = std::min(range.hi, int64_t{*max_pos} + *clip.window_right);
  if (clip.window_left) range.lo = int64_t{*min_pos} - *clip.window_left;
  return range;
}

// Blocks at given, ascending positions: the first block that ends at or behind lo, the last that begins at or
// before hi.
void clip_blocks(const int32_t* block_pos, int64_t num_blocks, int64_t page_size, int64_t kv_len,
                 const PositionRange& range, int64_t* begin, int64_t* end) {
  const int32_t* last = block_pos + num_blocks;
  const int64_t first_block =
      std::partition_point(block_pos, last, [&](int32_t pos) { return pos + page_size <= range.lo; }) -
      block_pos;
  const int64_t end_block =
      std::partition_point(block_pos, last, [&](int32_t pos) { return pos <= range.hi; }) - block_pos;
  if (first_block >= end_block) {
    *begin = *end = 0;
    return;
  }
  *begin = first_block * page_size + std::max<int64_t>(0, range.lo - block_pos[first_block]);
  const int64_t last_pos = block_pos[end_block - 1];
  *end = std::min(kv_len, (end_block - 1) * page_size + std::min(page_size, range.hi + 1 - last_pos));
}

}  // namespace

KvRange clip_tile(const LayoutView& layout, const PlanRequest& request, int32_t row, int32_t token_begin,
                  int32_t token_end) {
  const int64_t kv_len = layout.kv_len[row];
  const ClipRule& clip = request.clip;
  if (kv_len == 0) return {0, 0};
  if (!clip.causal && !clip.window_left && !clip.window_right) return {0, static_cast<int32_t>(kv_len)};

  const PositionRange range = visible_positions(clip, layout.q_pos, token_begin, token_end);
  int64_t begin;
  int64_t end;
  if (layout.block_pos != nullptr) {
    clip_blocks(layout.block_pos + layout.kv_start[row], ceil_div(kv_len, request.page_size),
                request.page_size, kv_len, range, &begin, &end);
  } else {
    const int64_t offset = layout.kv_offset[row];
    begin = std::max<int64_t>(0, range.lo - offset);
    end = std::min(kv_len, range.hi + 1 - offset);
  }
  if (begin >= end) return {0, 0};
  return {static_cast<int32_t>(begin / kKvAlign * kKvAlign), static_cast<int32_t>(end)};
}

}  // namespace jaxinfer
