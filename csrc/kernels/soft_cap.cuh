// The soft cap of logits, cap * tanh(logit / cap), and how scores become base-2 exponents with it and
// without. Which rows those are relative to what is softmax.cuh's business.
#pragma once

#include "kernels/ptx.cuh"

namespace jaxinfer {

// tanh(x) = x * (1 + c1 x^2 + c2 x^4 + ...): the polynomial of this degree whose relative error up to kBound
// is least, 6.5e-7. Beyond it grows faster than tanh.
struct TanhSeries {
  static constexpr int kCount = 5;  // coefficients
  static constexpr float kBound = 0.75f;
  static constexpr float kAtBound = 0.635149f;  // tanh(kBound)
  static constexpr JAXINFER_DEVICE float coefficient(int i) {
    return i == 0   ? 1.0f
           : i == 1 ? -0.333296676f
           : i == 2 ? 0.132682369f
           : i == 3 ? -0.0502779489f
                    : 0.0131058312f;
  }
};

// The one of degree 5, to 2.9e-5 of tanh(x) up to 0.5: two instructions less a score. It grows faster than
// tanh, too; at 0.65 it is 0.1% off.
struct ShortTanhSeries {
  static constexpr int kCount = 3;
  static constexpr float kAtBound = 0.462117f;  // tanh(0.5)
  static constexpr float kBelow = 0.571670f;    // tanh(0.65)
  static constexpr JAXINFER_DEVICE float coefficient(int i) {
    return i == 0 ? 1.0f : i == 1 ? -0.33206912f : 0.11644041f;
  }
};

// Capped logits, to 7e-7 of each. For large ones cap - 2 cap / (e^(2s / cap) + 1): the exponential is
// infinite or 0 in the end, and both give the right one.
struct SoftCap {
  float cap;
  float inverse;

  JAXINFER_DEVICE explicit SoftCap(float cap) : cap(cap), inverse(1.0f / cap) {}

  JAXINFER_DEVICE float operator()(float s) const {
    const float x = s * inverse;
    const float large = fmaf(-2.0f * cap, reciprocal(exp2_fast(x * (2.0f * kLog2e)) + 1.0f), cap);
    const float z = x * x;
    float series = TanhSeries::coefficient(TanhSeries::kCount - 1);
#pragma unroll
    for (int i = TanhSeries::kCount - 2; i >= 0; --i) series = fmaf(series, z, TanhSeries::coefficient(i));
    return fabsf(x) < TanhSeries::kBound ? series * s : large;
  }
};

// A series of tanh for scores, whose logits are score * logit_scale: x * series(x) is the capped logit times
// `factor`.
template <class Tanh>
class CapSeries {
 public:
  JAXINFER_DEVICE CapSeries(float cap, float logit_scale, float factor) {
    const float unit = logit_scale / cap;
    const float square = unit * unit;
    float power = logit_scale * factor;
#pragma unroll
    for (int i = 0; i < Tanh::kCount; ++i) {
      c_[i] = Tanh::coefficient(i) * power;
      power *= square;
    }
  }

  JAXINFER_DEVICE float operator()(float x) const {
    const float z = x * x;
    float series = c_[Tanh::kCount - 1];
#pragma unroll
    for (int i = Tanh::kCount - 2; i >= 0; --i) series = fmaf(series, z, c_[i]);
    return series;
  }
  JAXINFER_DEVICE float& leading() { return c_[Tanh::kCount - 1]; }
  // Coefficients that vanish would make NaN of an infinite x, and infinite ones of 0.
  JAXINFER_DEVICE bool is_usable() const {
    return c_[Tanh::kCount - 1] >= 1e-37f && c_[Tanh::kCount - 1] <= kLargestFloat;
  }

 private:
  float c_[Tanh::kCount];  // of 1, x^2, ...
};

// Stands for a hidden score that is to be capped. Not an infinity, because products that overflowed have
// logits then; but a number whose square is one, so that the series leave it no weight, and that is no one's
// choice.
JAXINFER_DEVICE float hidden_uncapped() {
  return __uint_as_float(0xff75c3e1u);
}

// Scores to capped logits. Those of a row whose largest score is_near() may all be capped by the series
// alone: scores below -TanhSeries::kBound, which it makes too small, have weights under 2^-kNegligible there.
// Hidden scores get logits of -inf.
class ScoreCap {
 public:
  static constexpr float kNegligible = 20.0f;

  JAXINFER_DEVICE ScoreCap(float cap, float logit_scale)
      : cap_(cap), logit_scale_(logit_scale), series_(cap, logit_scale, 1.0f) {}

  // The base-2 exponent of a capped logit that the series reaches.
  static JAXINFER_DEVICE float reach(float cap) { return cap * (kLog2e * TanhSeries::kAtBound); }

  JAXINFER_DEVICE bool is_near(float largest) const {
    const float logit = largest * logit_scale_;
    return series_.is_usable() && logit <= cap_ * TanhSeries::kBound &&
           logit * kLog2e >= kNegligible - reach(cap_);
  }
  JAXINFER_DEVICE bool is_usable() const { return series_.is_usable(); }
  JAXINFER_DEVICE float near(float x) const { return series_(x) * x; }
  JAXINFER_DEVICE float any(float x) const { return x == hidden_uncapped() ? -infinity() : logit(x); }
  // Of a row's largest score. Where nothing is seen -cap, which nothing that is seen later falls below.
  JAXINFER_DEVICE float logit(float x) const { return SoftCap(cap_)(x * logit_scale_); }

 private:
  float cap_;
  float logit_scale_;
  CapSeries<TanhSeries> series_;
};

// Exponents of scores that are a constant factor away from them.
struct LinearExponents {
  static constexpr bool kCapped = false;
  // What fp16 can hold of one weight, with room for rounding.
  static constexpr float kLargestSum = 32768.0f;
  float scale;  // of m, and of scores

  // What every exponent needs, all but a square of it.
  JAXINFER_DEVICE float& leading() { return scale; }
  JAXINFER_DEVICE float operator()(float x, float shift) const { return fmaf(x, scale, -shift); }
  JAXINFER_DEVICE float largest_sum(float) const { return kLargestSum; }
  JAXINFER_DEVICE bool is_near(float) const { return true; }
  JAXINFER_DEVICE bool is_middle(float) const { return false; }
  JAXINFER_DEVICE float middle(float x) const { return x; }
  JAXINFER_DEVICE float capped(float x) const { return x; }
  JAXINFER_DEVICE float largest(float x) const { return x; }
};

// Of scores that are exponents already.
struct GivenExponents {
  JAXINFER_DEVICE float operator()(float x, float) const { return x; }
};

// Exponents of capped logits, straight from scores by the short series: three instructions more than without
// a cap, and none of them on the unit that exp2 keeps busy. m are capped logits.
//
// No score is tested for whether the series reaches it. One beyond gets a weight above largest_sum(), like
// any that exceeds the known maximum by much, which is noticed: the series grows faster than tanh. For one
// below see ScoreCap; where the short series makes it 2% too small, it is negligible. So rows with maxima in
// between (is_near) take this way, and others the longer series or ScoreCap::any.
struct CappedExponents {
  static constexpr bool kCapped = true;
  static constexpr float kLargestSum = 256.0f;
  // By how much the scores of a near row may exceed its maximum at least. Less makes more blocks weigh twice.
  static constexpr float kLeastRise = 1.0f;
  // Up to here 2.9e-5 of a logit are 0.001.
  static constexpr float kLargestReach = 50.0f;
  float scale;  // of m

  JAXINFER_DEVICE CappedExponents(float cap, float logit_scale)
      : scale(kLog2e),
        reach_(fminf(cap * (kLog2e * ShortTanhSeries::kAtBound), kLargestReach)),
        below_(fminf(cap * (kLog2e * ShortTanhSeries::kBelow), kLargestReach)),
        wide_(ScoreCap::reach(cap)),
        exact_(cap, logit_scale),
        series_(cap, logit_scale, kLog2e) {}

  JAXINFER_DEVICE float& leading() { return series_.leading(); }
  JAXINFER_DEVICE float operator()(float x, float shift) const { return fmaf(series_(x), x, -shift); }
  // What a row's sum may be, so that none of its weights is of a score that the series does not reach.
  JAXINFER_DEVICE float largest_sum(float shift) const {
    return fminf(exp2_fast(reach_ - shift), kLargestSum);
  }
  // Of a row's maximum, scaled.
  JAXINFER_DEVICE bool is_near(float shift) const {
    return series_.is_usable() && is_within(shift, reach_ - kLeastRise, below_);
  }
  // The same for the longer series, once the largest of all scores is known.
  JAXINFER_DEVICE bool is_middle(float shift) const {
    return exact_.is_usable() && is_within(shift, wide_, wide_);
  }
  JAXINFER_DEVICE float middle(float x) const { return exact_.near(x); }
  JAXINFER_DEVICE float capped(float x) const { return exact_.any(x); }
  JAXINFER_DEVICE float largest(float x) const { return exact_.logit(x); }

 private:
  // Whether a row's maximum suits a series that is exact up to exponent `above`, and good enough for
  // negligible weights down to -`below`.
  static JAXINFER_DEVICE bool is_within(float shift, float above, float below) {
    return shift <= above && shift >= ScoreCap::kNegligible - below;
  }

  float reach_;  // exponents, see is_within()
  float below_;
  float wide_;
  ScoreCap exact_;
  CapSeries<ShortTanhSeries> series_;
};

}  // namespace jaxinfer
