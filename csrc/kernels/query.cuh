// An item's rows of Q: what they are, and their way to shared memory for tensor cores.
#pragma once

#include "kernels/gather.cuh"
#include "kernels/variant.cuh"

namespace jaxinfer {

// Row i of the item.
template <bool kPacked>
JAXINFER_DEVICE Row query_row(const AttentionParams& params, const ItemRows<kPacked>& rows, int i) {
  const Item& item = rows.state.item;
  const int token = item.token_begin + rows.token(i);
  return Row{item.bsr_row, token, __ldg(params.q_pos + token), rows.qo_head(i), rows.kv_head()};
}

// Rows beyond the item's and chunks beyond the true head dim become zeros. Several reads are on their way
// at a time.
template <class Config, class Variant>
JAXINFER_DEVICE void load_query(const AttentionParams& params, const VariantOperands& operands,
                                const ItemRows<Config::kPacked>& rows, uint32_t to, uint32_t sign_bits) {
  using Type = Element<Config::kDType>;
  constexpr int kChunks = Config::kHeadDimQk / 8;
  constexpr int kAll = Config::kTile * kChunks;
  constexpr int kLoads = (kAll + Config::kNumThreads - 1) / Config::kNumThreads;
  constexpr int kMost = Config::kTile >= 64 ? 8 : 4;
  constexpr int kBatch = kLoads < kMost ? kLoads : kMost;
  const int chunks = params.head_dim_qk / 8;
#pragma unroll 1
  for (int first = fresh_thread_index(); first < kAll; first += kBatch * Config::kNumThreads) {
    uint4 x[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int row = (first + i * Config::kNumThreads) / kChunks;
      const int chunk = (first + i * Config::kNumThreads) % kChunks;
      x[i] = make_uint4(0, 0, 0, 0);
      if (row >= rows.num_rows() || chunk >= chunks) continue;
      const int64_t token = rows.state.item.token_begin + rows.token(row);
      x[i] = __ldg(static_cast<const uint4*>(params.q) +
                   (token * params.num_qo_heads + rows.qo_head(row)) * chunks + chunk);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int row = (first + i * Config::kNumThreads) / kChunks;
      const int chunk = (first + i * Config::kNumThreads) % kChunks;
      if (kAll % (kBatch * Config::kNumThreads) != 0 && row >= Config::kTile) continue;
      if constexpr (Variant::kQuery) {
        if (row < rows.num_rows() && chunk < chunks) {
          const Row query = query_row(params, rows, row);
          float elements[8];
          Type::unpack(x[i], elements);
          Variant(params, operands, query).query(elements, chunk * 8, query);
          x[i] = Type::pack(elements);
        }
      }
      x[i].x ^= sign_bits;
      x[i].y ^= sign_bits;
      x[i].z ^= sign_bits;
      x[i].w ^= sign_bits;
      store_shared(to + RowTile<kChunks>::offset(row, chunk), x[i]);
    }
  }
}

}  // namespace jaxinfer
