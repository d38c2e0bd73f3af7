// Softmax of a consumer warpgroup: score fragments of a block to weights, which are exactly the left
// fragments of the product with V, relative to maxima that are looked for only when they matter. Where scores
// come from is not here (attention_wgmma_consume.cuh).
#pragma once

#include "kernels/softmax.cuh"

namespace jaxinfer {

// The two fragment rows of a thread in blocks of kColumns pieces of eight columns; o has kPieces pieces. The
// first kEarly pieces of a block are weighed while the product before still reads its weights.
//
// A weight may be relative to a maximum that is too small, by up to kLargestSum: it is as exact, and sums are
// far from overflow. So a block is weighed by the maxima that are known, and only where a row's sum exceeds
// the bound is its maximum looked for and the block weighed again. That spares most blocks a third of their
// instructions and softmax its longest chain.
template <class Type, int kColumns, int kPieces, int kEarly>
class WgmmaWeights {
  using Scores = float[4 * kColumns];
  using Packed = uint32_t[2 * kColumns];
  using Output = float[4 * kPieces];
  // What fp16 can hold of one weight, with room for rounding.
  static constexpr float kLargestSum = 32768.0f;

 public:
  JAXINFER_DEVICE const SoftmaxState<2>& state() const { return state_; }
  JAXINFER_DEVICE void clear() { state_.clear(); }

  // Weighs an item's first block. narrow: nothing is seen of its second half, which gets no weights.
  JAXINFER_DEVICE void first(Scores& s, float scale, Packed& p, bool narrow) {
    float factor[2], shift[2];
    const bool stays[2] = {false, false};
    change_maxima(s, scale, stays, factor, shift, narrow);
    state_.l[0] = state_.l[1] = 0.0f;
    weigh<0>(s, scale, shift, p, state_.l, narrow);
  }

  // Without softmax, scores are the weights.
  JAXINFER_DEVICE void plain(const Scores& s, Packed& p) {
#pragma unroll
    for (int i = 0; i < 2 * kColumns; ++i) {
      float& l = state_.l[i & 1];
      const float first = plain_weight(s[2 * i], l);
      const float second = plain_weight(s[2 * i + 1], l);
      p[i] = Type::pack_pair(first, second);
    }
  }

  // A later block, in two steps: what does not touch p and o, which the product before still uses; and the
  // rest. o are the sums of the blocks before.
  JAXINFER_DEVICE void start(const Scores& s, float scale) {
    sums_[0] = sums_[1] = 0.0f;
#pragma unroll
    for (int i = 0; i < 4 * kEarly; ++i) {
      const int r = i >> 1 & 1;
      early_[i] = exp2_fast(fmaf(s[i], scale, -shift_[r]));
      sums_[r] += early_[i];
    }
  }
  JAXINFER_DEVICE void finish(Scores& s, float scale, Packed& p, Output& o) {
    float sums[2] = {sums_[0], sums_[1]};
#pragma unroll
    for (int i = 0; i < 2 * kEarly; ++i) p[i] = Type::pack_pair(early_[2 * i], early_[2 * i + 1]);
    weigh<kEarly>(s, scale, shift_, p, sums, false);
    if (!__all_sync(kFullWarp, sums[0] <= kLargestSum && sums[1] <= kLargestSum)) {
      // Whether a row's maximum changes depends on the row alone, so that its bits do not depend on who
      // shares its warp.
      const int first_lane = fresh_thread_index() & 28;
      bool stays[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        stays[r] = (__ballot_sync(kFullWarp, sums[r] <= kLargestSum) >> first_lane & 15) == 15;
      }
      float factor[2], shift[2];
      change_maxima(s, scale, stays, factor, shift, false);
      sums[0] = sums[1] = 0.0f;
      weigh<0>(s, scale, shift, p, sums, false);
#pragma unroll
      for (int i = 0; i < 4 * kPieces; ++i) o[i] *= factor[i >> 1 & 1];
    }
    state_.l[0] += sums[0];
    state_.l[1] += sums[1];
  }

 private:
  // From piece kFirst on, of the first half; adds to this thread's shares of the sums.
  template <int kFirst>
  static JAXINFER_DEVICE void weigh(const Scores& s, float scale, const float (&shift)[2], Packed& p,
                                    float (&sums)[2], bool narrow) {
    weigh_pairs<2 * kFirst, kColumns>(s, scale, shift, p, sums);
    if (!narrow) {
      weigh_pairs<kColumns, 2 * kColumns>(s, scale, shift, p, sums);
    } else {
      // As they are, whatever that is: no product reads them.
#pragma unroll
      for (int i = kColumns; i < 2 * kColumns; ++i) asm volatile("" : "=r"(p[i]));
    }
  }
  template <int kFirst, int kEnd>
  static JAXINFER_DEVICE void weigh_pairs(const Scores& s, float scale, const float (&shift)[2], Packed& p,
                                          float (&sums)[2]) {
#pragma unroll
    for (int i = kFirst; i < kEnd; ++i) {
      const int r = i & 1;
      const float first = exp2_fast(fmaf(s[2 * i], scale, -shift[r]));
      const float second = exp2_fast(fmaf(s[2 * i + 1], scale, -shift[r]));
      sums[r] += first;
      sums[r] += second;
      p[i] = Type::pack_pair(first, second);
    }
  }

  // Rows that do not stay get the block's maximum into theirs, and huge ones their scores relative to it.
  // Then what was summed up before must be multiplied by factor[r], and exponents of this block subtract
  // shift[r].
  JAXINFER_DEVICE void change_maxima(Scores& s, float scale, const bool (&stays)[2], float (&factor)[2],
                                     float (&shift)[2], bool narrow) {
    bool huge = false;
    float maxima[2] = {s[0], s[2]};
    raise<0, kColumns / 2>(s, maxima);
    if (!narrow) raise<kColumns / 2, kColumns>(s, maxima);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float m = quad_max(maxima[r]);
      const float earlier = state_.m[r];
      m = stays[r] ? earlier : fmaxf(earlier, m);
      const float base = row_base(m, scale);
      huge = huge || base != 0.0f;
      shift[r] = rounded_shift(m - base, scale);
      factor[r] = rescale_factor(earlier - base, scale, shift[r]);
      // Rows that saw nothing yet and huge ones get weights beyond every bound next time, so that the next
      // block looks for their maxima, too.
      shift_[r] = base != 0.0f || m == -infinity() ? -infinity() : shift[r];
      state_.m[r] = m;
      state_.l[r] *= factor[r];
    }
    if (__any_sync(kFullWarp, huge)) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float base = row_base(state_.m[r], scale);
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
          s[4 * j + 2 * r] -= base;
          s[4 * j + 2 * r + 1] -= base;
        }
      }
    }
  }

  // To the largest scores of pieces [kFirst, kEnd).
  template <int kFirst, int kEnd>
  static JAXINFER_DEVICE void raise(const Scores& s, float (&maxima)[2]) {
#pragma unroll
    for (int j = kFirst; j < kEnd; ++j) {
#pragma unroll
      for (int r = 0; r < 2; ++r) maxima[r] = fmaxf(maxima[r], fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
    }
  }

  SoftmaxState<2> state_;
  float shift_[2];  // what exponents of the next block subtract: the maxima, scaled
  float early_[kEarly > 0 ? 4 * kEarly : 1];
  float sums_[2];
};

}  // namespace jaxinfer
