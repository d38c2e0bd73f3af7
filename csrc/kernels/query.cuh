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

// Chunks of an item's Q that a thread has in registers, on their way to shared memory: several reads at a
// time. Rows beyond the item's and chunks beyond the true head dim become zeros.
template <class Config, class Variant>
class QueryChunks {
  using Type = Element<Config::kDType>;
  static constexpr int kChunks = Config::kHeadDimQk / 8;
  static constexpr int kLoads = (Config::kTile * kChunks + Config::kNumThreads - 1) / Config::kNumThreads;
  static constexpr int kMost = Config::kTile >= 64 ? 8 : 4;
  static constexpr int kBatch = kLoads < kMost ? kLoads : kMost;

 public:
  static constexpr int kAll = Config::kTile * kChunks;
  static constexpr int kStep = kBatch * Config::kNumThreads;

  // Asks for chunks first, first + kNumThreads, ... of the tile, kBatch of them.
  JAXINFER_DEVICE void read(const AttentionParams& params, const ItemRows<Config::kPacked>& rows, int first) {
    const int chunks = params.head_dim_qk / 8;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int row = (first + i * Config::kNumThreads) / kChunks;
      const int chunk = (first + i * Config::kNumThreads) % kChunks;
      const bool wanted = row < rows.num_rows() && chunk < chunks;
      x_[i] = make_uint4(0, 0, 0, 0);
      if (!kReadsAhead<Config> && !wanted) continue;  // addresses of all chunks at once take registers
      const int64_t token = rows.state.item.token_begin + rows.token(row);
      x_[i] = load_if(wanted, static_cast<const uint4*>(params.q) +
                                  (token * params.num_qo_heads + rows.qo_head(row)) * chunks + chunk);
    }
  }

  JAXINFER_DEVICE void write(const AttentionParams& params, const VariantOperands& operands,
                             const ItemRows<Config::kPacked>& rows, int first, uint32_t to,
                             uint32_t sign_bits) {
    const int chunks = params.head_dim_qk / 8;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int row = (first + i * Config::kNumThreads) / kChunks;
      const int chunk = (first + i * Config::kNumThreads) % kChunks;
      if (kAll % kStep != 0 && row >= Config::kTile) continue;
      if constexpr (Variant::kQuery) {
        if (row < rows.num_rows() && chunk < chunks) {
          const Row query = query_row(params, rows, row);
          float elements[8];
          Type::unpack(x_[i], elements);
          Variant(params, operands, query).query(elements, chunk * 8, query);
          x_[i] = Type::pack(elements);
        }
      }
      x_[i].x ^= sign_bits;
      x_[i].y ^= sign_bits;
      x_[i].z ^= sign_bits;
      x_[i].w ^= sign_bits;
      store_shared(to + RowTile<kChunks>::offset(row, chunk), x_[i]);
    }
  }

 private:
  uint4 x_[kBatch];
};

template <class Config, class Variant>
JAXINFER_DEVICE void load_query(const AttentionParams& params, const VariantOperands& operands,
                                const ItemRows<Config::kPacked>& rows, uint32_t to, uint32_t sign_bits) {
  using Chunks = QueryChunks<Config, Variant>;
#pragma unroll 1
  for (int first = fresh_thread_index(); first < Chunks::kAll; first += Chunks::kStep) {
    Chunks chunks;
    chunks.read(params, rows, first);
    chunks.write(params, operands, rows, first, to, sign_bits);
  }
}

}  // namespace jaxinfer
