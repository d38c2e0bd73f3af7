// One execution of a problem, by the CPU executor or by kernels on the GPU, with every result and partial
// state poisoned beforehand. What is launched is the caller's business, so is what the results should be.
#pragma once

#include <cmath>
#include <functional>
#include <vector>

#include "cpu/executor.h"
#include "device.h"
#include "problem.h"

namespace jaxinfer::test {

inline void serial(int64_t num_tasks, const std::function<void(int64_t)>& task) {
  for (int64_t i = 0; i < num_tasks; ++i) task(i);
}

// Results of one execution: o as elements, lse.
struct Result {
  Bytes o;
  std::vector<float> lse;
};

// Tells whether another build gives the same bits.
inline uint32_t checksum(const Result& result) {
  uint32_t bits = 2166136261u;
  const auto add = [&bits](const void* data, size_t size) {
    for (size_t i = 0; i < size; ++i) bits = (bits ^ static_cast<const uint8_t*>(data)[i]) * 16777619u;
  };
  add(result.o.data(), result.o.size());
  add(result.lse.data(), result.lse.size() * sizeof(float));
  return bits;
}

inline Result run_cpu(const Problem& p) {
  AttentionParams a = p.params;
  const int64_t heads = int64_t{a.num_tokens} * a.num_qo_heads;
  const int64_t slots = int64_t{a.format.slot_capacity} * a.num_qo_heads;
  Result result{Bytes(heads * a.head_dim_vo * element_size(a.dtype), 0xff), std::vector<float>(heads, NAN)};
  std::vector<float> partial_o(slots * a.head_dim_vo + 1, NAN), partial_max(slots + 1, NAN),
      partial_sum(slots + 1, NAN);
  a.o = result.o.data();
  a.lse = result.lse.data();
  a.partial_o = partial_o.data();
  a.partial_max = partial_max.data();
  a.partial_sum = partial_sum.data();
  cpu::attention(a, serial);
  return result;
}

// launch(params) makes the launches of one attention call on the default stream.
template <class Launch>
Result run_gpu(const Problem& p, Launch launch) {
  AttentionParams a = p.params;
  const int64_t heads = int64_t{a.num_tokens} * a.num_qo_heads;
  const int64_t slots = int64_t{a.format.slot_capacity} * a.num_qo_heads;
  Result result{Bytes(heads * a.head_dim_vo * element_size(a.dtype)), std::vector<float>(heads)};
  Buffer q(p.q), k(p.k), v(p.v), layer(p.layer), plan(p.plan), kv_indices(p.kv_indices),
      kv_offset(p.kv_offset), q_pos(p.q_pos), block_pos(p.block_pos), mask_bits(p.mask_bits),
      mask_indptr(p.mask_indptr), q_start(p.q_start), kv_len(p.kv_len), o(result.o.size()), lse(heads * 4),
      partial_o(slots * a.head_dim_vo * 4), partial_max(slots * 4), partial_sum(slots * 4);
  for (Buffer* poisoned : {&o, &lse, &partial_o, &partial_max, &partial_sum}) poisoned->fill(0xff);
  a.q = q.as<void>();
  a.k = k.as<void>();
  a.v = v.as<void>();
  if (a.layer != nullptr) a.layer = layer.as<int32_t>();
  a.plan = plan.as<int32_t>();
  if (a.kv_indices != nullptr) a.kv_indices = kv_indices.as<int32_t>();
  a.kv_offset = kv_offset.as<int32_t>();
  a.q_pos = q_pos.as<int32_t>();
  if (a.block_pos != nullptr) a.block_pos = block_pos.as<int32_t>();
  a.variant.mask_bits = mask_bits.as<uint8_t>();
  a.variant.mask_indptr = mask_indptr.as<int32_t>();
  a.variant.q_start = q_start.as<int32_t>();
  a.variant.kv_len = kv_len.as<int32_t>();
  a.o = o.as<void>();
  a.lse = lse.as<float>();
  a.partial_o = partial_o.as<float>();
  a.partial_max = partial_max.as<float>();
  a.partial_sum = partial_sum.as<float>();
  launch(a);
  CHECK_CUDA(cudaDeviceSynchronize());
  o.read(result.o.data());
  lse.read(result.lse.data());
  return result;
}

}  // namespace jaxinfer::test
