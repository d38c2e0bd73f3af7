// Online softmax of one query row over the columns of one KV block, in natural units with IEEE infinities.
// Which columns a row sees and what a logit is: variant.h.
#pragma once

#include <cmath>
#include <cstdint>

#include "cpu/variant.h"

namespace jaxinfer::cpu::JAXINFER_ISA {

JAXINFER_INLINE Mask lanes(uint64_t visible, int32_t column) {
  return mask_of_bits(static_cast<uint32_t>(visible >> column) & ((1u << kWidth) - 1u));
}

// Replaces dot products s[begin, end) (multiples of kWidth) by weights exp(logit - m), zero where masked, and
// updates the row's maximum m and sum l. Returns the factor of what the row has accumulated so far. Masked
// columns are selected away before anything is computed from them: they may hold NaN. `l` takes the same
// additions whatever the range is, because columns outside it would add zeros.
JAXINFER_INLINE float softmax_row(const Logits& logits, uint64_t visible, int32_t begin, int32_t end,
                                  float* s, float* m, float* l) {
  const Vec masked = splat(-INFINITY);
  Vec row_max = masked;
  if (visible == ~uint64_t{0}) {
    for (int32_t c = 0; c < kBlockKV; c += kWidth) {
      const Vec x = logits(load(s + c));
      store(s + c, x);
      row_max = max(row_max, x);
    }
  } else {
    for (int32_t c = begin; c < end; c += kWidth) {
      const Vec x = select(lanes(visible, c), logits(load(s + c)), masked);
      store(s + c, x);
      row_max = max(row_max, x);
    }
  }
  const float old_max = *m;
  const float block_max = reduce_max(row_max);
  const float new_max = block_max > old_max ? block_max : old_max;
  // With nothing seen yet, -inf - -inf would be NaN; any finite shift gives exp(-inf) = 0.
  const float shift = new_max == -INFINITY ? 0.0f : new_max;
  const Vec shifts = splat(shift);
  Vec sum = zero();
  for (int32_t c = begin; c < end; c += kWidth) {
    const Vec weight = exp(sub(load(s + c), shifts));
    store(s + c, weight);
    sum = add(sum, weight);
  }
  const float factor = old_max == new_max ? 1.0f : first_lane(exp(splat(old_max - shift)));
  *m = new_max;
  *l = *l * factor + reduce_add(sum);
  return factor;
}

// Without softmax the weights are the logits themselves, zero where masked.
JAXINFER_INLINE void weight_row(const Logits& logits, uint64_t visible, int32_t begin, int32_t end,
                                float* s) {
  for (int32_t c = begin; c < end; c += kWidth) {
    store(s + c, select(lanes(visible, c), logits(load(s + c)), zero()));
  }
}

}  // namespace jaxinfer::cpu::JAXINFER_ISA
