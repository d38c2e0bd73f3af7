// The soft cap of logits, cap * tanh(logit / cap), and how scores become base-2 exponents with it and
// without. Which rows those are relative to what is softmax.cuh's business.
#pragma once

#include "kernels/ptx.cuh"

namespace jaxinfer {

// tanh(x) = x * (1 + kC2 x^2 + kC4 x^4 + ...): the polynomial of this degree whose relative error up to
// kBound is least, 6.5e-7. Beyond it grows faster than tanh.
struct TanhSeries {
  static constexpr float kBound = 0.75f;
  static constexpr float kAtBound = 0.635149f;  // tanh(kBound)
  static constexpr float kC2 = -0.333296676f;
  static constexpr float kC4 = 0.132682369f;
  static constexpr float kC6 = -0.0502779489f;
  static constexpr float kC8 = 0.0131058312f;
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
    float series = fmaf(z, TanhSeries::kC8, TanhSeries::kC6);
    series = fmaf(series, z, TanhSeries::kC4);
    series = fmaf(series, z, TanhSeries::kC2);
    series = fmaf(series, z, 1.0f);
    return fabsf(x) < TanhSeries::kBound ? series * s : large;
  }
};

// The same series for scores, whose logits are score * logit_scale: x * series(x) is the capped logit times
// `factor`.
class CapSeries {
 public:
  JAXINFER_DEVICE CapSeries(float cap, float logit_scale, float factor) {
    const float unit = logit_scale / cap;
    const float square = unit * unit;
    c0_ = logit_scale * factor;
    c2_ = TanhSeries::kC2 * (square * c0_);
    c4_ = TanhSeries::kC4 * (square * (square * c0_));
    c6_ = TanhSeries::kC6 * (square * (square * (square * c0_)));
    c8_ = TanhSeries::kC8 * (square * (square * (square * (square * c0_))));
  }

  JAXINFER_DEVICE float operator()(float x) const {
    const float z = x * x;
    float series = fmaf(z, c8_, c6_);
    series = fmaf(series, z, c4_);
    series = fmaf(series, z, c2_);
    return fmaf(series, z, c0_);
  }
  // Coefficients that vanish would make NaN of an infinite x, and infinite ones of 0.
  JAXINFER_DEVICE bool is_usable() const { return c8_ >= 1e-37f && c8_ <= kLargestFloat; }

 private:
  float c0_;  // of 1, x^2, ...
  float c2_;
  float c4_;
  float c6_;
  float c8_;
};

// Scores to capped logits. Those of a row whose largest score is_near() may all be capped by the series
// alone: scores below -TanhSeries::kBound, which it makes too small, have weights under 2^-kNegligible there.
// Hidden scores stay hidden.
class ScoreCap {
 public:
  static constexpr float kNegligible = 20.0f;

  JAXINFER_DEVICE ScoreCap(float cap, float logit_scale)
      : cap_(cap), logit_scale_(logit_scale), series_(cap, logit_scale, 1.0f) {}

  // The base-2 exponent of a capped logit that the series reaches.
  static JAXINFER_DEVICE float reach(float cap) { return cap * (kLog2e * TanhSeries::kAtBound); }

  JAXINFER_DEVICE bool is_near(float largest) const {
    const float logit = largest * logit_scale_;
    const bool inside = logit <= cap_ * TanhSeries::kBound && logit * kLog2e >= kNegligible - reach(cap_);
    return series_.is_usable() && (inside || largest == -infinity());
  }
  JAXINFER_DEVICE float near(float x) const { return series_(x) * x; }
  JAXINFER_DEVICE float any(float x) const {
    const float logit = SoftCap(cap_)(x * logit_scale_);
    return x == -infinity() ? x : logit;
  }

 private:
  float cap_;
  float logit_scale_;
  CapSeries series_;
};

// Exponents of scores that are a constant factor away from them.
struct LinearExponents {
  static constexpr bool kCapped = false;
  // What fp16 can hold of one weight, with room for rounding.
  static constexpr float kLargestSum = 32768.0f;
  float scale;  // of m, and of scores

  JAXINFER_DEVICE float operator()(float x, float shift) const { return fmaf(x, scale, -shift); }
  JAXINFER_DEVICE bool is_near(float) const { return true; }
  JAXINFER_DEVICE float capped(float x) const { return x; }
};

// Of scores that are exponents already.
struct GivenExponents {
  JAXINFER_DEVICE float operator()(float x, float) const { return x; }
};

// Exponents of capped logits, straight from scores by the series: five instructions more than without a cap,
// and none of them on the unit that exp2 keeps busy. m are capped logits.
//
// No score is tested for whether the series reaches it. One beyond gets a weight above kLargestSum, like any
// that exceeds the known maximum by much, which is noticed: the series grows faster than tanh. For one below
// see ScoreCap. So rows with maxima in between (is_near) take this way, and others ScoreCap::any.
struct CappedExponents {
  static constexpr bool kCapped = true;
  static constexpr float kLargestSum = 256.0f;
  static constexpr float kLargestExponent = 8.0f;
  float scale;  // of m

  JAXINFER_DEVICE CappedExponents(float cap, float logit_scale)
      : scale(kLog2e),
        reach_(ScoreCap::reach(cap)),
        exact_(cap, logit_scale),
        series_(cap, logit_scale, kLog2e) {}

  JAXINFER_DEVICE float operator()(float x, float shift) const { return fmaf(series_(x), x, -shift); }
  // Of a row's maximum, scaled.
  JAXINFER_DEVICE bool is_near(float shift) const {
    return series_.is_usable() && shift <= reach_ - kLargestExponent &&
           shift >= ScoreCap::kNegligible - reach_;
  }
  JAXINFER_DEVICE float capped(float x) const { return exact_.any(x); }

 private:
  float reach_;
  ScoreCap exact_;
  CapSeries series_;
};

}  // namespace jaxinfer
