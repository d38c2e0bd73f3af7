// Attention rules: which columns of a KV block a token may see (as a 64-bit mask), and what happens to its
// logits. Weights and sums are not made here.
#pragma once

#include <cstdint>

#include "cpu/gather.h"
#include "cpu/math.h"

namespace jaxinfer::cpu::JAXINFER_ISA {

// Bits [begin, end) of a 64-bit word, the bounds clamped to [0, 64].
JAXINFER_INLINE uint64_t bit_range(int64_t begin, int64_t end) {
  if (begin < 0) begin = 0;
  if (end > 64) end = 64;
  if (begin >= end) return 0;
  return (~uint64_t{0} >> (64 - (end - begin))) << begin;
}

// Positions [begin, end) that a query at position q_pos may see. In 64 bits: a window may be near 2^31.
struct Span {
  int64_t begin;
  int64_t end;
};
JAXINFER_INLINE Span visible_span(const VariantParams& variant, int64_t q_pos) {
  Span span = {INT64_MIN / 2, INT64_MAX / 2};
  if (variant.on(kRuleCausal)) span.end = q_pos + 1;
  if (variant.on(kRuleWindowLeft)) span.begin = q_pos - variant.window_left;
  if (variant.on(kRuleWindowRight)) {
    const int64_t end = q_pos + variant.window_right + 1;
    if (end < span.end) span.end = end;
  }
  return span;
}

// The custom mask's bits of columns [begin, begin + 64) for one token; bits outside the operand are zero.
JAXINFER_INLINE uint64_t custom_mask(const VariantParams& variant, int32_t row, int64_t token,
                                     int64_t begin) {
  const int64_t bit = (token - variant.q_start[row]) * variant.kv_len[row] + begin;
  if (bit < 0) return 0;
  const int64_t byte = variant.mask_indptr[row] + bit / 8;
  const int32_t shift = static_cast<int32_t>(bit % 8);
  uint64_t low = 0;
  for (int32_t i = 0; i < 8; ++i) {
    const int64_t at = byte + i;
    if (at >= 0 && at < variant.mask_capacity) low |= uint64_t{variant.mask_bits[at]} << (8 * i);
  }
  if (shift == 0) return low;
  const int64_t at = byte + 8;
  const uint64_t high = at >= 0 && at < variant.mask_capacity ? variant.mask_bits[at] : 0;
  return low >> shift | high << (64 - shift);
}

// Columns of the block that a token may see.
template <class Storage>
JAXINFER_INLINE uint64_t visible_columns(const AttentionParams& p, const Item& item,
                                         const KvBlock<Storage>& block, int64_t token) {
  const VariantParams& variant = p.variant;
  uint64_t visible = block.present;
  if (variant.on(kRuleMask)) visible &= custom_mask(variant, item.bsr_row, token, block.begin);
  if ((variant.rules & (kRuleCausal | kRuleWindowLeft | kRuleWindowRight)) == 0) return visible;
  const Span span = visible_span(variant, p.q_pos[token]);
  if (p.block_pos == nullptr) {
    const int64_t column_0 = p.kv_offset[item.bsr_row] + block.begin;
    return visible & bit_range(span.begin - column_0, span.end - column_0);
  }
  for (uint64_t left = visible; left != 0; left &= left - 1) {
    const int32_t c = __builtin_ctzll(left);
    if (block.pos[c] < span.begin || block.pos[c] >= span.end) visible &= ~(uint64_t{1} << c);
  }
  return visible;
}

// Turns dot products into logits.
struct Logits {
  Vec scale;
  Vec cap;
  Vec inverse_cap;
  bool capped;

  explicit JAXINFER_INLINE Logits(const VariantParams& variant)
      : scale(splat(variant.sm_scale)), capped(variant.on(kRuleSoftCap)) {
    cap = splat(capped ? variant.logits_soft_cap : 1.0f);
    inverse_cap = splat(capped ? 1.0f / variant.logits_soft_cap : 1.0f);
  }
  JAXINFER_INLINE Vec operator()(Vec dot) const {
    const Vec s = mul(dot, scale);
    return capped ? mul(cap, tanh(mul(s, inverse_cap))) : s;
  }
};

}  // namespace jaxinfer::cpu::JAXINFER_ISA
