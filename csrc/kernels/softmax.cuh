// Online softmax of the rows that one thread holds, in base 2. Exponents are x * scale, where x are the raw
// values in the score fragments; nothing here knows how they were made.
#pragma once

#include "kernels/ptx.cuh"
#include "kernels/soft_cap.cuh"

namespace jaxinfer {

// Maximum or sum over the four lanes that share a fragment row.
JAXINFER_DEVICE float quad_max(float x) {
  x = fmaxf(x, shuffle_xor(x, 1));
  return fmaxf(x, shuffle_xor(x, 2));
}
JAXINFER_DEVICE float quad_sum(float x) {
  x += shuffle_xor(x, 1);
  return x + shuffle_xor(x, 2);
}

// Never -inf: a row that has seen nothing subtracts 0, because -inf - -inf is NaN.
JAXINFER_DEVICE float finite_max(float m) {
  return m == -infinity() ? 0.0f : m;
}

// kRows rows of a thread: m is the largest x so far, or a smaller one with weights that stay far from
// overflow (kMaxRise here, kLargestSum of WgmmaWeights), l this thread's share of the sum of
// 2^((x - m) * scale). Without softmax l is 0 as long as the row saw nothing, and m is not used.
template <int kRows>
struct SoftmaxState {
  float m[kRows];
  float l[kRows];

  JAXINFER_DEVICE void clear() {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      m[r] = -infinity();
      l[r] = 0.0f;
    }
  }
};

// Of x to base-2 exponents, where logits are x * logit_scale. A zero would turn an x of -inf into NaN, and an
// infinity one that is the maximum. The numbers in their places still make all weights 1, and those of all
// but the maximum 0.
JAXINFER_DEVICE float exponent_scale(float logit_scale) {
  return fminf(fmaxf(logit_scale * kLog2e, 1e-36f), kLargestFloat);
}

// A weight is 2^(x * scale - shift), shift = m * scale rounded. What rounding leaves is common to a row's
// sums and cancels, if it is small: at 2^31 it exceeds the range of exp2, and m * scale itself may overflow.
// So from kMaxShift on a row is huge and its x are taken relative to m first, which leaves a shift of 0: the
// difference is exact where the weight does not vanish. At this bound rounding leaves 2^-12 at most, so that
// rows may come from one form to the other without a correction of their sums.
constexpr float kMaxShift = 4096.0f;

// __fmul_rn keeps the product from being fused: every exponent must subtract the same rounded number.
JAXINFER_DEVICE float rounded_shift(float m, float scale) {
  return __fmul_rn(finite_max(m), scale);
}
JAXINFER_DEVICE bool is_huge(float shift) {
  return fabsf(shift) > kMaxShift;
}
// What the x of a row are taken relative to first.
JAXINFER_DEVICE float row_base(float m, float scale) {
  return is_huge(rounded_shift(m, scale)) ? m : 0.0f;
}

// Factor of sums that were taken relative to m, once they are relative to `shift`; m is relative to the base
// of the new maximum.
JAXINFER_DEVICE float rescale_factor(float m, float scale, float shift) {
  return m == -infinity() ? 0.0f : exp2_fast(__fmul_rn(m, scale) - shift);
}

// A row keeps its maximum while no score exceeds it by more than 2^8 in weights: these are far from
// overflow, in fp16, too, and rescaling all sums for every small step costs 5%.
constexpr float kMaxRise = 8.0f;

// What the weights of a block's scores are made with: 2^(x * scale - shift).
template <int kRows>
struct Weights {
  float scale;
  float shift[kRows];

  JAXINFER_DEVICE float operator()(float x, int row) const { return exp2_fast(fmaf(x, scale, -shift[row])); }
};

// The largest score of every row: s[f][j][0..1] belong to row 2f, s[f][j][2..3] to row 2f + 1.
template <int kFragments, int kColumns>
JAXINFER_DEVICE void find_largest(const float (&s)[kFragments][kColumns][4],
                                  float (&largest)[2 * kFragments]) {
#pragma unroll
  for (int r = 0; r < 2 * kFragments; ++r) {
    const int e = 2 * (r & 1);
    largest[r] = fmaxf(s[r >> 1][0][e], s[r >> 1][0][e + 1]);
#pragma unroll
    for (int j = 1; j < kColumns; ++j) {
      largest[r] = fmaxf(largest[r], fmaxf(s[r >> 1][j][e], s[r >> 1][j][e + 1]));
    }
    largest[r] = quad_max(largest[r]);
  }
}

// Prepares the weights of a block with maxima `largest`. Returns whether any row of the warp needs more, by
// raise_max(): most blocks don't.
template <int kRows>
JAXINFER_DEVICE bool find_weights(const float (&largest)[kRows], const SoftmaxState<kRows>& state,
                                  Weights<kRows>& weights) {
  bool more = false;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    weights.shift[r] = rounded_shift(state.m[r], weights.scale);
    more = more || (largest[r] - state.m[r]) * weights.scale > kMaxRise || is_huge(weights.shift[r]);
  }
  return __any_sync(kFullWarp, more);
}

// Raises the maxima that have to be; factor[r] is what earlier sums of the row must be multiplied by. Scores
// of a huge row become relative to its maximum.
template <int kFragments, int kColumns>
JAXINFER_DEVICE void raise_max(float (&s)[kFragments][kColumns][4], const float (&largest)[2 * kFragments],
                               SoftmaxState<2 * kFragments>& state, Weights<2 * kFragments>& weights,
                               float (&factor)[2 * kFragments]) {
  constexpr int kRows = 2 * kFragments;
  const float scale = weights.scale;
  float earlier[kRows];
  bool huge = false;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    earlier[r] = state.m[r];
    // By the row alone: what others of the warp need must not change its bits.
    if ((largest[r] - state.m[r]) * scale > kMaxRise) state.m[r] = largest[r];
    weights.shift[r] = rounded_shift(state.m[r], scale);
    huge = huge || is_huge(weights.shift[r]);
  }
  // One question for all rows, so that those of ordinary size pay for nothing else.
  if (__any_sync(kFullWarp, huge)) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float base = row_base(state.m[r], scale);
      earlier[r] -= base;
      weights.shift[r] = rounded_shift(state.m[r] - base, scale);
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
#pragma unroll
        for (int e = 2 * (r & 1); e < 2 * (r & 1) + 2; ++e) s[r >> 1][j][e] -= base;
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    factor[r] = rescale_factor(earlier[r], scale, weights.shift[r]);
    state.l[r] *= factor[r];
  }
}

// Stands for a score that a row must not see. Without softmax every float is a weight; this is a NaN that
// neither arithmetic nor a change of sign makes of numbers. kCapped: a soft cap follows.
template <bool kSoftmax, bool kCapped = false>
JAXINFER_DEVICE float hidden_score() {
  return kCapped ? hidden_uncapped() : kSoftmax ? -infinity() : __uint_as_float(0xffe5c3e1u);
}

// Without softmax a score is the weight, and a hidden one weighs 0. `l` turns positive at any other.
JAXINFER_DEVICE float plain_weight(float x, float& l) {
  const bool hidden = __float_as_uint(x) == __float_as_uint(hidden_score<false>());
  l = hidden ? l : 1.0f;
  return hidden ? 0.0f : x;
}

// All scores of a block to weights without softmax, in place; rows as in find_largest.
template <int kFragments, int kColumns>
JAXINFER_DEVICE void plain_weights(float (&s)[kFragments][kColumns][4], SoftmaxState<2 * kFragments>& state) {
#pragma unroll
  for (int f = 0; f < kFragments; ++f) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s[f][j][e] = plain_weight(s[f][j][e], state.l[2 * f + (e >> 1)]);
    }
  }
}

// Factor of a row's sums that makes them relative to `largest` = m * logit_scale, rounded, which other pieces
// of the row can be compared with. Logits beyond 2^24 cannot hold what rounding left; there the bound keeps
// the sums finite.
JAXINFER_DEVICE float partial_factor(float m, float scale, float logit_scale, float largest) {
  constexpr float kBound = 16.0f;
  const float shift = rounded_shift(m, scale);
  const float huge = fminf(fmaxf(fmaf(m, logit_scale, -largest) * kLog2e, -kBound), kBound);
  return exp2_fast(is_huge(shift) ? huge : -fmaf(largest, kLog2e, -shift));
}

// Natural log of the row's sum of exponentials; `largest` as above. A NaN is not an empty row.
JAXINFER_DEVICE float natural_lse(float largest, float l) {
  return l == 0.0f ? -infinity() : fmaf(log2_fast(l), kLn2, largest);
}

}  // namespace jaxinfer
