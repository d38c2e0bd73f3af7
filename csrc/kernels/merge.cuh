// Merges the partial states that attention kernels left: one warp per (merge entry, query head), the entry's
// slots in ascending KV position. Writes the final o and lse; without softmax partial results add up.
#pragma once

#include "kernels/ptx.cuh"
#include "kernels/variant.cuh"

namespace jaxinfer {

// One entry of the merge list, as a warp sees it. The plan is there before any partial state, so it can be
// read while those are still on their way.
struct MergeEntry {
  int token;
  int begin;  // slots [begin, end) of the merge list
  int end;
  int slot;  // slot begin + lane, or 0

  JAXINFER_DEVICE MergeEntry(const AttentionParams& params, int entry, int lane)
      : token(__ldg(params.plan + params.format.merge_token + entry)),
        begin(__ldg(params.plan + params.format.merge_indptr + entry)),
        end(__ldg(params.plan + params.format.merge_indptr + entry + 1)),
        slot(load_slot(params, begin + lane)) {}

  JAXINFER_DEVICE int load_slot(const AttentionParams& params, int i) const {
    return i < end ? __ldg(params.plan + params.format.merge_slots + i) : 0;
  }
};

// The final row of an entry and head, by one warp. Up to kBatch partial rows are on their way at a time: one
// after the other they would cost a trip to L2 each (16 splits 2.3 us, 32 splits 7 us on an H200).
template <class Config, class Variant>
JAXINFER_DEVICE void merge_row(const AttentionParams& params, const VariantOperands& operands,
                               const MergeEntry& entry, int head, int lane) {
  using Type = Element<Config::kDType>;
  constexpr int kPieces = (Config::kHeadDimVo + 127) / 128;  // a lane holds four elements of each
  constexpr int kBatch = 16 / kPieces;
  const int num_heads = params.num_qo_heads;
  // Where this lane's slot and head are among the rows of partial states, and what they hold.
  int64_t at = int64_t{entry.slot} * num_heads + head;
  float max = -infinity();
  float sum = 0.0f;
  float m = -infinity();
  const auto load_state = [&](int i) {
    max = i < entry.end ? __ldcg(params.partial_max + at) : -infinity();
    sum = i < entry.end ? __ldcg(params.partial_sum + at) : 0.0f;
  };
  if constexpr (Variant::kSoftmax) load_state(entry.begin + lane);
  float total = 0.0f;
  float o[kPieces][4] = {};
  for (int first = entry.begin; first < entry.end; first += 32) {
    if (first > entry.begin) {
      at = int64_t{entry.load_slot(params, first + lane)} * num_heads + head;
      if constexpr (Variant::kSoftmax) load_state(first + lane);
    }
#pragma unroll 1
    for (int base = 0; base < 32 && first + base < entry.end; base += kBatch) {
      float4 x[kBatch][kPieces];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const float4* const from =
            reinterpret_cast<const float4*>(params.partial_o + shuffle(at, base + i) * params.head_dim_vo);
#pragma unroll
        for (int p = 0; p < kPieces; ++p) {
          const int piece = lane + 32 * p;
          const bool exists = first + base + i < entry.end && piece * 4 < params.head_dim_vo;
          x[i][p] = exists ? __ldcg(from + piece) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
      }
      if (Variant::kSoftmax && first + base == entry.begin) {
        m = max;
        for (int i = entry.begin + 32 + lane; i < entry.end; i += 32) {
          m = fmaxf(m, __ldcg(params.partial_max + int64_t{entry.load_slot(params, i)} * num_heads + head));
        }
#pragma unroll
        for (int mask = 1; mask < 32; mask *= 2) m = fmaxf(m, shuffle_xor(m, mask));
      }
      const float lane_weight = sum == 0.0f ? 0.0f : exp2_fast((max - m) * kLog2e);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (first + base + i >= entry.end) break;
        float weight = 1.0f;
        bool empty = false;
        if constexpr (Variant::kSoftmax) {
          const float slot_sum = __shfl_sync(kFullWarp, sum, base + i);
          weight = __shfl_sync(kFullWarp, lane_weight, base + i);
          empty = slot_sum == 0.0f;  // left out by selection: whatever its o holds cannot leak
          total = empty ? total : fmaf(weight, slot_sum, total);
        }
#pragma unroll
        for (int p = 0; p < kPieces; ++p) {
          o[p][0] = empty ? o[p][0] : fmaf(weight, x[i][p].x, o[p][0]);
          o[p][1] = empty ? o[p][1] : fmaf(weight, x[i][p].y, o[p][1]);
          o[p][2] = empty ? o[p][2] : fmaf(weight, x[i][p].z, o[p][2]);
          o[p][3] = empty ? o[p][3] : fmaf(weight, x[i][p].w, o[p][3]);
        }
      }
    }
  }
  const int64_t row = int64_t{entry.token} * num_heads + head;
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
      const Row output_row{-1, entry.token, params.q_pos[entry.token], head,
                           params.group_divider.divide(head)};
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

// A kernel of its own, behind the attention kernels. Where it may start before they end, it reads the plan
// meanwhile.
template <class Config, class Variant>
JAXINFER_DEVICE void merge(const AttentionParams& params, const VariantOperands& operands) {
  const int lane = threadIdx.x & 31;
  const uint32_t num_heads = params.num_qo_heads;
  const int num_entries = __ldg(params.plan + kHeaderNumMerge);
  const uint32_t stride = gridDim.x * (Config::kNumThreads / 32);
  const uint32_t first = blockIdx.x * (Config::kNumThreads / 32) + (threadIdx.x >> 5);
  int number = first / num_heads;
  int head = first % num_heads;
  bool waits = true;
  while (number < num_entries) {
    const MergeEntry entry(params, number, lane);
    if (waits) wait_for_earlier_kernels();
    waits = false;
    merge_row<Config, Variant>(params, operands, entry, head, lane);
    number += stride / num_heads;
    head += stride % num_heads;
    if (head >= params.num_qo_heads) {
      head -= params.num_qo_heads;
      ++number;
    }
  }
}

}  // namespace jaxinfer
