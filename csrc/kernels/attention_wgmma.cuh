// Attention of a plan's items on Hopper's warpgroup instructions (sm_90a), bf16 and fp16. A CTA is one
// warpgroup of producers (attention_wgmma_load.cuh) and one to three of consumers
// (attention_wgmma_consume.cuh), 64 query rows each, which read the same ring of KV blocks. Here they get
// their barriers and registers.
#pragma once

#include "kernels/attention_wgmma_consume.cuh"

namespace jaxinfer {

template <class Config, class Variant>
JAXINFER_DEVICE void attention_wgmma(const AttentionParams& params, int cls, const VariantOperands& operands,
                                     const TensorMaps& maps) {
  extern __shared__ __align__(1024) char memory[];
  using Shared = WgmmaShared<Config>;
  using Producer = WgmmaProducer<Config>;
  if (threadIdx.x == 0) {
    const WgmmaBarriers<Config> barriers{shared_address(memory + Shared::kBarriers)};
    for (int c = 0; c < Shared::kConsumers; ++c) {
      init_barrier(barriers.query_full(c), 1);
      init_barrier(barriers.query_empty(c), kWarpgroupThreads);
    }
    for (int i = 0; i < Shared::kStages; ++i) {
      init_barrier(barriers.k_full(i), Producer::kArrivals);
      init_barrier(barriers.v_full(i), Producer::kArrivals);
      init_barrier(barriers.k_empty(i), 4 * Shared::kConsumers);
      init_barrier(barriers.v_empty(i), 4 * Shared::kConsumers);
    }
    publish_barriers();
    prefetch_map(&maps.q);
    if (Config::kContiguous || Config::kPageBox > 0) {
      prefetch_map(&maps.k);
      prefetch_map(&maps.v);
    }
  }
  allow_next_kernel();
  cta_barrier();
  // The producers come last, so that consumers count their threads from 0.
  if (threadIdx.x >= Shared::kConsumers * kWarpgroupThreads) {
    give_registers<Config::kProducerRegisters>();
    WgmmaProducer<Config>(params, cls, maps, memory).run();
  } else {
    take_registers<Config::kConsumerRegisters>();
    WgmmaConsumer<Config, Variant>(params, operands, memory).run();
  }
  end_after_earlier_kernels();
}

}  // namespace jaxinfer
