// Softmax of a consumer warpgroup: score fragments of a block to weights, which are exactly the left
// fragments of the product with V, relative to maxima that are looked for only when they matter. Where scores
// come from is not here (attention_wgmma_consume.cuh).
#pragma once

#include "kernels/soft_cap.cuh"
#include "kernels/softmax.cuh"

namespace jaxinfer {

// The two fragment rows of a thread in blocks of kColumns pieces of eight columns; o has kPieces pieces. The
// first kEarly pieces of a block are weighed while the product before still reads its weights.
//
// A weight may be relative to a maximum that is too small, by up to kLargestSum: it is as exact, and sums are
// far from overflow. So a block is weighed by the maxima that are known, and only where a row's sum exceeds
// the bound is its maximum looked for and the block weighed again. That spares most blocks a third of their
// instructions and softmax its longest chain.
template <class Type, class Exponents, int kColumns, int kPieces, int kEarly>
class WgmmaWeights {
  using Scores = float[4 * kColumns];
  using Packed = uint32_t[2 * kColumns];
  using Output = float[4 * kPieces];

 public:
  JAXINFER_DEVICE const SoftmaxState<2>& state() const { return state_; }
  JAXINFER_DEVICE void clear() { state_.clear(); }

  // Weighs an item's first block. narrow: nothing is seen of its second half, which gets no weights.
  JAXINFER_DEVICE void first(Scores& s, const Exponents& exponents, Packed& p, bool narrow) {
    float factor[2], shift[2];
    const bool stays[2] = {false, false};
    const bool given = change_maxima<false>(s, exponents, stays, factor, shift, narrow);
    state_.l[0] = state_.l[1] = 0.0f;
    weigh_all(s, exponents, given, shift, p, state_.l, narrow);
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
  JAXINFER_DEVICE void start(const Scores& s, const Exponents& exponents) {
    sums_[0] = sums_[1] = 0.0f;
#pragma unroll
    for (int i = 0; i < 4 * kEarly; ++i) {
      const int r = i >> 1 & 1;
      early_[i] = exp2_fast(exponents(s[i], shift_[r]));
      sums_[r] += early_[i];
    }
  }
  JAXINFER_DEVICE void finish(Scores& s, const Exponents& exponents, Packed& p, Output& o) {
    float sums[2] = {sums_[0], sums_[1]};
#pragma unroll
    for (int i = 0; i < 2 * kEarly; ++i) p[i] = Type::pack_pair(early_[2 * i], early_[2 * i + 1]);
    // Rows far from a cap's series stay so. Where all of a warp's are, only what looks for their maxima is
    // left to do; at head dim 128 the question costs more than it saves (3% of ordinary scores).
    const bool far = shift_[0] == -infinity() && shift_[1] == -infinity();
    if (Exponents::kCapped && kPieces != 16 && __all_sync(kFullWarp, far)) {
      sums[0] = sums[1] = infinity();
    } else {
      weigh<kEarly>(s, exponents, shift_, p, sums, false);
    }
    if (!__all_sync(kFullWarp, sums[0] <= largest_sum(0) && sums[1] <= largest_sum(1))) {
      // Whether a row's maximum changes depends on the row alone, so that its bits do not depend on who
      // shares its warp.
      const int first_lane = fresh_thread_index() & 28;
      bool stays[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        stays[r] = (__ballot_sync(kFullWarp, sums[r] <= largest_sum(r)) >> first_lane & 15) == 15;
      }
      float factor[2], shift[2];
      const bool given = change_maxima<true>(s, exponents, stays, factor, shift, false);
      sums[0] = sums[1] = 0.0f;
      weigh_all(s, exponents, given, shift, p, sums, false);
      // Rows that are far from a cap's series come here with maxima that stay.
      if (!Exponents::kCapped || !__all_sync(kFullWarp, factor[0] == 1.0f && factor[1] == 1.0f)) {
#pragma unroll
        for (int i = 0; i < 4 * kPieces; ++i) o[i] *= factor[i >> 1 & 1];
      }
    }
    state_.l[0] += sums[0];
    state_.l[1] += sums[1];
  }

 private:
  // From piece kFirst on, of the first half; adds to this thread's shares of the sums.
  template <int kFirst, class Function>
  static JAXINFER_DEVICE void weigh(const Scores& s, const Function& exponents, const float (&shift)[2],
                                    Packed& p, float (&sums)[2], bool narrow) {
    weigh_pairs<2 * kFirst, kColumns>(s, exponents, shift, p, sums);
    if (!narrow) {
      weigh_pairs<kColumns, 2 * kColumns>(s, exponents, shift, p, sums);
    } else {
      // As they are, whatever that is: no product reads them.
#pragma unroll
      for (int i = kColumns; i < 2 * kColumns; ++i) asm volatile("" : "=r"(p[i]));
    }
  }
  template <int kFirst, int kEnd, class Function>
  static JAXINFER_DEVICE void weigh_pairs(const Scores& s, const Function& exponents, const float (&shift)[2],
                                          Packed& p, float (&sums)[2]) {
#pragma unroll
    for (int i = kFirst; i < kEnd; ++i) {
      const int r = i & 1;
      const float first = exp2_fast(exponents(s[2 * i], shift[r]));
      const float second = exp2_fast(exponents(s[2 * i + 1], shift[r]));
      sums[r] += first;
      sums[r] += second;
      p[i] = Type::pack_pair(first, second);
    }
  }

  // All pieces; `given`: with a cap, scores are exponents already.
  static JAXINFER_DEVICE void weigh_all(const Scores& s, const Exponents& exponents, bool given,
                                        const float (&shift)[2], Packed& p, float (&sums)[2], bool narrow) {
    if (Exponents::kCapped && given) {
      weigh<0>(s, GivenExponents(), shift, p, sums, narrow);
    } else {
      weigh<0>(s, exponents, shift, p, sums, narrow);
    }
  }

  // Rows that do not stay get the block's maximum into theirs. Then what was summed up before must be
  // multiplied by factor[r], and exponents of this block subtract shift[r]. Scores of huge rows become
  // relative to their maxima. With a cap, where some row of the warp is far from the series, all rows' scores
  // become exponents; kAlways: even where none is, which spares the code a second way to weigh them. Returns
  // whether.
  template <bool kAlways>
  JAXINFER_DEVICE bool change_maxima(Scores& s, const Exponents& exponents, const bool (&stays)[2],
                                     float (&factor)[2], float (&shift)[2], bool narrow) {
    const float scale = exponents.scale;
    bool is_far[2];
    bool any_far = false;
    float maxima[2] = {s[0], s[2]};
    raise<0, kColumns / 2>(s, maxima);
    if (!narrow) raise<kColumns / 2, kColumns>(s, maxima);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float m = exponents.largest(quad_max(maxima[r]));
      const float earlier = state_.m[r];
      m = stays[r] ? earlier : fmaxf(earlier, m);
      const float base = row_base(m, scale);
      shift[r] = rounded_shift(m - base, scale);
      is_far[r] = base != 0.0f || !exponents.is_near(shift[r]);
      any_far = any_far || is_far[r];
      factor[r] = rescale_factor(earlier - base, scale, shift[r]);
      // Rows that saw nothing yet and those far away get weights beyond every bound next time, so that the
      // next block looks for their maxima, too.
      shift_[r] = is_far[r] || m == -infinity() ? -infinity() : shift[r];
      largest_sum_[r] = exponents.largest_sum(shift[r]);
      state_.m[r] = m;
      state_.l[r] *= factor[r];
    }
    any_far = __any_sync(kFullWarp, any_far);
    if constexpr (Exponents::kCapped) {
      if (any_far) {
        cap_scores(s, exponents, is_far, shift);
      } else if (kAlways) {
        // Of scores that look new, or what their exponents are made of would stay in registers for this.
        const uint32_t zero = opaque_zero();
#pragma unroll
        for (int i = 0; i < 4 * kColumns; ++i) {
          const float x = __uint_as_float(__float_as_uint(s[i]) + zero);
          s[i] = exponents(x, shift[i >> 1 & 1]);
        }
      }
    } else if (any_far) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float base = row_base(state_.m[r], scale);
#pragma unroll
        for (int i = 0; i < 2 * kColumns; ++i) score(s, r, i) -= base;
      }
    }
    return kAlways || any_far;
  }

  // Scores to exponents, where some row of the warp is far from a cap's series. Part by part in a loop: the
  // three ways would be a third of a kernel's code, and of the time to compile it. As registers have no
  // index, all scores move on by a part in every turn.
  JAXINFER_DEVICE void cap_scores(Scores& s, const Exponents& exponents, const bool (&is_far)[2],
                                  const float (&shift)[2]) const {
    constexpr int kTurns = kColumns % 4 == 0 ? 4 : 2;
    constexpr int kPart = 4 * kColumns / kTurns;
    const float scale = exponents.scale;
#pragma unroll 1
    for (int turn = 0; turn < kTurns; ++turn) {
      float part[kPart];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float base = row_base(state_.m[r], scale);
        if (!is_far[r]) {
#pragma unroll
          for (int i = 0; i < kPart / 2; ++i) score(part, r, i) = exponents(score(s, r, i), shift[r]);
        } else if (base == 0.0f && exponents.is_middle(shift[r])) {
#pragma unroll
          for (int i = 0; i < kPart / 2; ++i)
            score(part, r, i) = fmaf(exponents.middle(score(s, r, i)), scale, -shift[r]);
        } else {
#pragma unroll
          for (int i = 0; i < kPart / 2; ++i)
            score(part, r, i) = fmaf(exponents.capped(score(s, r, i)) - base, scale, -shift[r]);
        }
      }
#pragma unroll
      for (int i = 0; i < 4 * kColumns - kPart; ++i) s[i] = s[i + kPart];
#pragma unroll
      for (int i = 0; i < kPart; ++i) s[4 * kColumns - kPart + i] = part[i];
    }
  }

  JAXINFER_DEVICE float largest_sum(int r) const {
    return Exponents::kCapped ? largest_sum_[r] : Exponents::kLargestSum;
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
  // Score i of fragment row r.
  template <int kCount>
  static JAXINFER_DEVICE float& score(float (&s)[kCount], int r, int i) {
    return s[4 * (i >> 1) + 2 * r + (i & 1)];
  }

  SoftmaxState<2> state_;
  float shift_[2];        // what exponents of the next block subtract: the maxima, scaled
  float largest_sum_[2];  // with a cap: of a row, see Exponents
  float early_[kEarly > 0 ? 4 * kEarly : 1];
  float sums_[2];
};

}  // namespace jaxinfer
