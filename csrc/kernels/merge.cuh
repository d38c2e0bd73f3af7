// Merges the partial states that an attention kernel left: one warp per (merge entry, query head), the
// entry's slots in ascending KV position. Writes the final o and lse; without softmax partial results add up.
#pragma once

#include "kernels/variant.cuh"

namespace jaxinfer {

template <class Config, class Variant>
JAXINFER_DEVICE void merge(const AttentionParams& params, const VariantOperands& operands) {
  using Type = Element<Config::kDType>;
  constexpr int kPieces = (Config::kHeadDimVo + 127) / 128;  // a lane holds four elements of each
  const int32_t* const plan = params.plan;
  const int32_t* const merge_indptr = plan + params.format.merge_indptr;
  const int32_t* const merge_slots = plan + params.format.merge_slots;
  const int lane = threadIdx.x & 31;
  const int num_heads = params.num_qo_heads;
  const int64_t num_rows = int64_t{plan[kHeaderNumMerge]} * num_heads;
  const int64_t stride = int64_t{gridDim.x} * (Config::kNumThreads / 32);
  for (int64_t i = int64_t{blockIdx.x} * (Config::kNumThreads / 32) + (threadIdx.x >> 5); i < num_rows;
       i += stride) {
    const int entry = static_cast<int>(i / num_heads);
    const int head = static_cast<int>(i - int64_t{entry} * num_heads);
    const int begin = merge_indptr[entry];
    const int end = merge_indptr[entry + 1];  // slots [begin, end)
    float m = -infinity();
    if constexpr (Variant::kSoftmax) {
      for (int s = begin + lane; s < end; s += 32) {
        m = fmaxf(m, params.partial_max[int64_t{merge_slots[s]} * num_heads + head]);
      }
#pragma unroll
      for (int mask = 1; mask < 32; mask *= 2) m = fmaxf(m, shuffle_xor(m, mask));
    }
    float total = 0.0f;
    float o[kPieces][4] = {};
#pragma unroll 4
    for (int s = begin; s < end; ++s) {
      const int64_t at = int64_t{merge_slots[s]} * num_heads + head;
      float weight = 1.0f;
      bool empty = false;
      if constexpr (Variant::kSoftmax) {
        const float sum = params.partial_sum[at];
        empty = sum == 0.0f;  // left out by selection: whatever its o holds cannot leak
        weight = empty ? 0.0f : exp2_fast((params.partial_max[at] - m) * kLog2e);
        total = empty ? total : fmaf(weight, sum, total);
      }
      const float4* const from = reinterpret_cast<const float4*>(params.partial_o + at * params.head_dim_vo);
#pragma unroll
      for (int p = 0; p < kPieces; ++p) {
        const int piece = lane + 32 * p;
        if (piece * 4 >= params.head_dim_vo) continue;
        const float4 x = from[piece];
        o[p][0] = empty ? o[p][0] : fmaf(weight, x.x, o[p][0]);
        o[p][1] = empty ? o[p][1] : fmaf(weight, x.y, o[p][1]);
        o[p][2] = empty ? o[p][2] : fmaf(weight, x.z, o[p][2]);
        o[p][3] = empty ? o[p][3] : fmaf(weight, x.w, o[p][3]);
      }
    }
    const int token = plan[params.format.merge_token + entry];
    const int64_t row = int64_t{token} * num_heads + head;
    float inverse = 1.0f;
    if constexpr (Variant::kSoftmax) {
      inverse = total == 0.0f ? 0.0f : 1.0f / total;
      if (lane == 0) params.lse[row] = total == 0.0f ? -infinity() : m + log2_fast(total) * kLn2;
    }
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
      const int dim = 4 * (lane + 32 * p);
      if (dim >= params.head_dim_vo) continue;
      float x[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e] = o[p][e] * inverse;
      if constexpr (Variant::kOutput) {
        const Row output_row{-1, token, params.q_pos[token], head, head / (num_heads / params.num_kv_heads)};
        Variant(params, operands, output_row).output(x, dim, output_row);
      }
      if constexpr (Config::kDType == DType::kF32) {
        *reinterpret_cast<float4*>(static_cast<float*>(params.o) + row * params.head_dim_vo + dim) =
            make_float4(x[0], x[1], x[2], x[3]);
      } else {
        *reinterpret_cast<uint2*>(static_cast<uint16_t*>(params.o) + row * params.head_dim_vo + dim) =
            make_uint2(Type::pack_pair(x[0], x[1]), Type::pack_pair(x[2], x[3]));
      }
    }
  }
}

}  // namespace jaxinfer
