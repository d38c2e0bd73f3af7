// Merges partial states into final outputs, and writes empty states. Which states belong together is the
// plan's choice; how they came about is in tile.h.
#pragma once

#include <cmath>
#include <cstdint>

#include "cpu/elements.h"
#include "cpu/kernels.h"

namespace jaxinfer::cpu::JAXINFER_ISA {

// One token and head: slots [begin, end) of the merge list, in that order. Weights are relative to the
// largest maximum, so that a single state comes out bit for bit as if it had been final. An empty state is
// skipped: what its o holds must not leak. The added zero turns -0 into 0, as for final output (tile.h).
template <class T>
inline void merge_head(const AttentionParams& p, const int32_t* slots, int32_t begin, int32_t end,
                       int64_t token, int64_t head) {
  const bool softmax = p.variant.on(kRuleSoftmax);
  alignas(64) float o[kMaxHeadDim];
  const int32_t dim = p.head_dim_vo;
  for (int32_t d = 0; d < dim; ++d) o[d] = 0.0f;
  float max = -INFINITY;
  for (int32_t i = begin; softmax && i < end; ++i) {
    const float part_max = p.partial_max[int64_t{slots[i]} * p.num_qo_heads + head];
    if (!(part_max <= max)) max = part_max;
  }
  float sum = 0.0f;
  for (int32_t i = begin; i < end; ++i) {
    const int64_t at = int64_t{slots[i]} * p.num_qo_heads + head;
    if (softmax && p.partial_sum[at] == 0.0f) continue;
    const float weight = softmax ? std::exp(p.partial_max[at] - max) : 1.0f;
    sum += weight * p.partial_sum[at];
    const float* part = p.partial_o + at * dim;
    for (int32_t d = 0; d < dim; ++d) o[d] += weight * part[d];
  }
  float lse = 0.0f;
  if (softmax) {
    lse = sum == 0.0f ? -INFINITY : max + std::log(sum);
    const float divisor = sum == 0.0f ? 1.0f : sum;
    for (int32_t d = 0; d < dim; ++d) o[d] /= divisor;
  }
  for (int32_t d = 0; d < dim; ++d) o[d] += 0.0f;
  const int64_t at = token * p.num_qo_heads + head;
  store_row<T>(o, dim, static_cast<typename T::Storage*>(p.o) + at * dim);
  p.lse[at] = lse;
}

template <class T>
inline void merge_entries(const AttentionParams& p, int32_t begin, int32_t end) {
  const int32_t* token = p.plan + p.format.merge_token;
  const int32_t* indptr = p.plan + p.format.merge_indptr;
  const int32_t* slots = p.plan + p.format.merge_slots;
  for (int32_t e = begin; e < end; ++e) {
    for (int32_t h = 0; h < p.num_qo_heads; ++h)
      merge_head<T>(p, slots, indptr[e], indptr[e + 1], token[e], h);
  }
}

// Heads [first_head, first_head + heads) of tokens [token, token + num_tokens) of the final output.
template <class T>
inline void write_empty_states(const AttentionParams& p, int64_t token, int64_t num_tokens,
                               int64_t first_head, int64_t heads) {
  const float lse = p.variant.on(kRuleSoftmax) ? -INFINITY : 0.0f;
  for (int64_t t = token; t < token + num_tokens; ++t) {
    const int64_t at = t * p.num_qo_heads + first_head;
    std::memset(static_cast<typename T::Storage*>(p.o) + at * p.head_dim_vo, 0,
                static_cast<size_t>(heads * p.head_dim_vo) * sizeof(typename T::Storage));
    for (int64_t h = 0; h < heads; ++h) p.lse[at + h] = lse;
  }
}

}  // namespace jaxinfer::cpu::JAXINFER_ISA
