// Online softmax of the rows that one thread holds, in base 2. Exponents are x * scale, where x are the raw
// values in the score fragments; nothing here knows how they were made.
#pragma once

#include "kernels/ptx.cuh"

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

// kRows rows of a thread: m is the largest x so far, l this thread's share of the sum of 2^((x - m) * scale).
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

// Factor of sums that were taken relative to m, once they are relative to `shift` = finite_max(new m) *
// scale, rounded.
// __fmul_rn keeps the products from being fused: every exponent must subtract the same rounded number.
JAXINFER_DEVICE float rescale_factor(float m, float scale, float shift) {
  return m == -infinity() ? 0.0f : exp2_fast(__fmul_rn(m, scale) - shift);
}

// Scores to weights, in place: s[f][j][0..1] belong to row 2f, s[f][j][2..3] to row 2f + 1. factor[r] is what
// earlier sums of the row must be multiplied by; `changed` is whether any of them is not 1.
template <int kFragments, int kColumns>
JAXINFER_DEVICE bool update_softmax(float (&s)[kFragments][kColumns][4], float scale,
                                    SoftmaxState<2 * kFragments>& state, float (&factor)[2 * kFragments]) {
  bool changed = false;
#pragma unroll
  for (int f = 0; f < kFragments; ++f) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = 2 * f + h;
      float largest = fmaxf(s[f][0][2 * h], s[f][0][2 * h + 1]);
#pragma unroll
      for (int j = 1; j < kColumns; ++j) largest = fmaxf(largest, fmaxf(s[f][j][2 * h], s[f][j][2 * h + 1]));
      const float m = fmaxf(state.m[r], quad_max(largest));
      const float shift = __fmul_rn(finite_max(m), scale);
      factor[r] = rescale_factor(state.m[r], scale, shift);
      changed |= factor[r] != 1.0f;
      state.m[r] = m;
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
#pragma unroll
        for (int e = 2 * h; e < 2 * h + 2; ++e) {
          s[f][j][e] = exp2_fast(fmaf(s[f][j][e], scale, -shift));
          sum += s[f][j][e];
        }
      }
      state.l[r] = fmaf(state.l[r], factor[r], sum);
    }
  }
  return changed;
}

// Natural log of the row's sum of exponentials.
JAXINFER_DEVICE float natural_lse(float m, float scale, float l) {
  return l > 0.0f ? (m * scale + log2_fast(l)) * kLn2 : -infinity();
}

}  // namespace jaxinfer
