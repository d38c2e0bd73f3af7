// Writes new K and V rows to their cache slots, 16 bytes at a time; knows element sizes, not types.
#pragma once

#include "kernels/work.cuh"

namespace jaxinfer {

// Copies one row of `from` [num_heads, chunks] to the slots of a token, by the threads of the CTA.
template <class Config>
JAXINFER_DEVICE void append_row(const void* from, void* pool, const CacheStrides& strides, int64_t place,
                                int64_t token, int num_heads, const Divider& chunks) {
  const uint4* const source = static_cast<const uint4*>(from) + token * num_heads * chunks.divisor;
  for (int i = threadIdx.x; i < num_heads * chunks.divisor; i += Config::kNumThreads) {
    const int head = chunks.divide(i);
    const int64_t element = place + head * strides.head;
    uint4* const to = reinterpret_cast<uint4*>(static_cast<char*>(pool) + element * Config::kElementSize);
    to[i - head * chunks.divisor] = __ldg(source + i);
  }
}

template <class Config>
JAXINFER_DEVICE void append(const AppendParams& params) {
  int64_t layer = 0;
  if (params.layer != nullptr) {
    layer = *params.layer;
    if (layer < 0 || layer >= params.num_layers) return;
  }
  const int64_t num_slots = params.num_pages * params.page_size;
  for (int64_t token = blockIdx.x; token < params.num_tokens; token += gridDim.x) {
    const int64_t slot = params.slots[token];
    if (slot < 0 || slot >= num_slots) continue;
    const int64_t page = slot / params.page_size;
    const int64_t in_page = slot - page * params.page_size;
    append_row<Config>(
        params.k, params.k_pages, params.k_strides,
        layer * params.k_strides.layer + page * params.k_strides.page + in_page * params.k_strides.token,
        token, params.num_kv_heads, params.k_chunks);
    append_row<Config>(
        params.v, params.v_pages, params.v_strides,
        layer * params.v_strides.layer + page * params.v_strides.page + in_page * params.v_strides.token,
        token, params.num_kv_heads, params.v_chunks);
  }
}

}  // namespace jaxinfer
