// The functor contract between kernels and attention rules, and the built-in rules. Kernels call the holes
// below and nothing else; causal and window rules are not holes, because they decide which KV blocks need a
// mask at all.
//
// What a translation unit holds, in this order:
//   #include "params.h"
//   namespace jaxinfer { struct VariantOperands {...}; }       pointers and scalars of a user's rules
//   #include "kernels/attention_mma.cuh"                       or attention_wgmma, attention_simt, merge
//   namespace jaxinfer { struct Config {...}; struct Variant : BuiltinVariant<Config> {...}; }
//   extern "C" __global__ ... jaxinfer_attention_mma(params, cls, operands)        wgmma: and tensor maps
// Config holds kDType, kHeadDimQk and kHeadDimVo (padded), kTile, kPacked, kContiguous, kRules, kNumThreads,
// kMinCtas, kSmemBytes and the tile table's constants (jaxinfer/jit/tiles.py).
//
// A variant has, beside its flags:
//   Variant(const AttentionParams&, const VariantOperands&, const Row&): scalars to registers, once per row
//   float logits(float s, const Row&, const Col&) const: s is sm_scale * q.k, before masking
//   bool mask(const Row&, const Col&) const: true where the row may attend
//   template <int kCount> void query(float (&x)[kCount], int dim, const Row&) const
//   template <int kCount> void key(float (&x)[kCount], int dim, const Row&, const Col&) const
//   template <int kCount> void value(float (&x)[kCount], int dim, const Row&, const Col&) const
//   template <int kCount> void output(float (&x)[kCount], int dim, const Row&) const
//
// The last four see kCount consecutive elements of a row, from element `dim` on, and change them in place.
// Query, key and value see them before they are used, rounded to the element type afterwards; key and value
// get any row of the item (its request and kv_head hold, its query token does not matter). Output sees the
// final normalised row, unless the row saw nothing. A hole whose flag (kLogits, kMask, kQuery, kKey, kValue,
// kOutput) is false is never called and costs nothing. Two flags are no holes: kSoftmax, and kCapped, a soft
// cap before softmax, which kernels apply themselves to what logits() returns (soft_cap.cuh).
#pragma once

#include "kernels/ptx.cuh"
#include "kernels/soft_cap.cuh"

namespace jaxinfer {

// What a query row is.
struct Row {
  int request;  // BSR row; -1 where several may have been merged (output only)
  int token;
  int q_pos;
  int qo_head;
  int kv_head;
};

// What a KV column is: its position, and its index in the BSR row's list.
struct Col {
  int kv_pos;
  int kv_index;
};

// The bits of one query row of a packed custom mask.
struct MaskRow {
  const uint8_t* bits;  // [capacity], little-endian bits
  int64_t capacity;     // bytes; a bit beyond it counts as masked
  int64_t first;        // bit of the row's KV index 0, counted from bits[0]

  JAXINFER_DEVICE MaskRow(const VariantParams& params, const Row& row)
      : bits(params.mask_bits), capacity(params.mask_capacity), first(0) {
    if (row.request < 0) return;
    const int64_t in_row = int64_t{row.token - params.q_start[row.request]} * params.kv_len[row.request];
    first = int64_t{params.mask_indptr[row.request]} * 8 + in_row;
  }
  JAXINFER_DEVICE bool operator()(int kv_index) const {
    const int64_t bit = first + kv_index;
    return (bit >> 3) < capacity && (bits[bit >> 3] >> (bit & 7) & 1) != 0;
  }
};

struct NoSoftCap {
  JAXINFER_DEVICE float operator()(float s) const { return s; }
};
struct NoMaskRow {
  JAXINFER_DEVICE bool operator()(int) const { return true; }
};

JAXINFER_DEVICE SoftCap make_soft_cap(const VariantParams& params, SoftCap*) {
  return SoftCap(params.logits_soft_cap);
}
JAXINFER_DEVICE NoSoftCap make_soft_cap(const VariantParams&, NoSoftCap*) {
  return NoSoftCap{};
}
JAXINFER_DEVICE MaskRow make_mask_row(const VariantParams& params, const Row& row, MaskRow*) {
  return MaskRow(params, row);
}
JAXINFER_DEVICE NoMaskRow make_mask_row(const VariantParams&, const Row&, NoMaskRow*) {
  return NoMaskRow{};
}

// The rules of Config::kRules; a rule that is off leaves no trace in registers or code.
template <class Config>
struct BuiltinVariant {
  static constexpr bool kSoftmax = (Config::kRules & kRuleSoftmax) != 0;
  static constexpr bool kCapped = kSoftmax && (Config::kRules & kRuleSoftCap) != 0;
  static constexpr bool kLogits = !kSoftmax && (Config::kRules & kRuleSoftCap) != 0;
  static constexpr bool kMask = (Config::kRules & kRuleMask) != 0;
  static constexpr bool kQuery = false;
  static constexpr bool kKey = false;
  static constexpr bool kValue = false;
  static constexpr bool kOutput = false;

  using Cap = typename Select<kLogits, SoftCap, NoSoftCap>::Type;
  using Bits = typename Select<kMask, MaskRow, NoMaskRow>::Type;
  Cap soft_cap;
  Bits bits;

  JAXINFER_DEVICE BuiltinVariant(const AttentionParams& params, const VariantOperands&, const Row& row)
      : soft_cap(make_soft_cap(params.variant, static_cast<Cap*>(nullptr))),
        bits(make_mask_row(params.variant, row, static_cast<Bits*>(nullptr))) {}

  JAXINFER_DEVICE float logits(float s, const Row&, const Col&) const { return soft_cap(s); }
  JAXINFER_DEVICE bool mask(const Row&, const Col& col) const { return bits(col.kv_index); }
};

// What score fragments are multiplied by to give logits. They hold q.k, negated where sm_scale is negative;
// what a variant's logits() returned are logits already.
template <class Variant>
JAXINFER_DEVICE float fragment_scale(const VariantParams& params) {
  return Variant::kLogits ? 1.0f : fabsf(params.sm_scale);
}
// The same of rows' maxima: with a soft cap they are logits.
template <class Variant>
JAXINFER_DEVICE float max_scale(const VariantParams& params) {
  return Variant::kCapped ? 1.0f : fragment_scale<Variant>(params);
}

// Positions that a query row may see by the causal and window rules, [first, last] with both ends included.
struct Visible {
  int first;
  int last;
};

template <uint32_t kRules>
JAXINFER_DEVICE Visible visible_positions(const VariantParams& params, int q_pos) {
  Visible range{kInt32Min, kInt32Max};
  // A window that reaches beyond what an int holds hides nothing on that side.
  if constexpr ((kRules & kRuleWindowLeft) != 0) {
    range.first = q_pos < kInt32Min + params.window_left ? kInt32Min : q_pos - params.window_left;
  }
  if constexpr ((kRules & kRuleWindowRight) != 0) {
    range.last = q_pos > kInt32Max - params.window_right ? kInt32Max : q_pos + params.window_right;
  }
  if constexpr ((kRules & kRuleCausal) != 0) range.last = min(range.last, q_pos);
  return range;
}

// Whether kernels find out which rows saw nothing. Their result is zero: softmax must not divide it, and the
// output hole must not change it, which would make it depend on how a plan covers such rows.
template <class Variant>
constexpr bool kFindsEmpty = Variant::kSoftmax || Variant::kOutput;

constexpr uint32_t kPositionRules = kRuleCausal | kRuleWindowLeft | kRuleWindowRight;

}  // namespace jaxinfer
