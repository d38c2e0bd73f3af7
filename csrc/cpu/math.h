// exp and tanh on vectors, to about one unit in the last place. The polynomials are least-squares fits made
// for the intervals named at each.
#pragma once

#include "cpu/vec.h"

namespace jaxinfer::cpu::JAXINFER_ISA {

// exp(0) is exactly 1; below -87.33 (results under the smallest normal float) it is 0; x at most 88; NaN
// stays NaN.
JAXINFER_INLINE Vec exp(Vec x) {
  const Vec lowest = splat(-87.33654f);
  const Mask underflow = less(x, lowest);
  x = max(lowest, x);
  // Adding 1.5 * 2^23 leaves round(x / ln 2) in the low bits of the sum.
  const Vec round = splat(12582912.0f);
  const Vec shifted = fma(x, splat(1.44269504f), round);
  const Vec n = sub(shifted, round);
  Vec r = fma(n, splat(-0.693359375f), x);  // ln 2 in two parts; the first product is exact
  r = fma(n, splat(2.12194440e-4f), r);
  // exp(r) = 1 + r + r^2 p(r) for |r| <= ln(2) / 2
  Vec p = splat(0.0013933734f);
  p = fma(p, r, splat(0.008363236f));
  p = fma(p, r, splat(0.041666463f));
  p = fma(p, r, splat(0.16666576f));
  p = fma(p, r, splat(0.5f));
  p = fma(mul(r, r), p, r);
  p = add(p, splat(1.0f));
  return select(underflow, zero(), scale_by_power(p, shifted));
}

JAXINFER_INLINE Vec tanh(Vec x) {
  const Vec a = abs(x);
  // tanh(a) = a + a^3 p(a^2) for a < 0.625
  const Vec z = mul(a, a);
  Vec p = splat(0.0022958412f);
  p = fma(p, z, splat(-0.00834698f));
  p = fma(p, z, splat(0.021769961f));
  p = fma(p, z, splat(-0.053959407f));
  p = fma(p, z, splat(0.13333304f));
  p = fma(p, z, splat(-0.33333334f));
  const Vec small = fma(mul(z, a), p, a);
  // Beyond 20 the result is 1 in float32; the bound keeps exp in range. A NaN comes through min's second
  // operand.
  const Vec e = exp(mul(splat(2.0f), min(splat(20.0f), a)));
  const Vec large = sub(splat(1.0f), div(splat(2.0f), add(e, splat(1.0f))));
  return copy_sign(select(less(a, splat(0.625f)), small, large), x);
}

}  // namespace jaxinfer::cpu::JAXINFER_ISA
