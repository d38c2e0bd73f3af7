// Merges the partial states that attention kernels left: one warp per (merge entry, query head, 128 columns),
// the entry's slots in ascending KV position. Writes the final o and lse; without softmax partial results add
// up.
#pragma once

#include "kernels/softmax.cuh"
#include "kernels/variant.cuh"

namespace jaxinfer {

// Columns of a lane. One column each would be four times the warps: 128 x 1024 batch invariant, with the most
// partial states of our batches, takes 135.5 us on an H200, 146.3 with one column, 127 without its merge.
constexpr int kMergeColumns = 4;

// One entry of the merge list and the part of its row that a warp has. The plan is there before any partial
// state, so it can be read while those are still on their way.
template <class Config>
struct MergePiece {
  // A true head dim lies above the padded one before its own, so that both have as many pieces.
  static constexpr uint32_t kPieces = (Config::kHeadDimVo + 32 * kMergeColumns - 1) / (32 * kMergeColumns);

  int token;
  int begin;  // slots [begin, end) of the merge list
  int end;
  int slot;  // slot begin + lane, or the last one
  int head;
  int column;  // first one of this lane

  static JAXINFER_DEVICE uint32_t of_entry(const AttentionParams& params) {
    return kPieces * params.num_qo_heads;
  }

  JAXINFER_DEVICE MergePiece(const AttentionParams& params, uint32_t i, int lane) {
    const uint32_t entry = i / of_entry(params);
    token = __ldg(params.plan + params.format.merge_token + entry);
    begin = __ldg(params.plan + params.format.merge_indptr + entry);
    end = __ldg(params.plan + params.format.merge_indptr + entry + 1);
    slot = load_slot(params, begin + lane);
    const uint32_t rest = i - entry * of_entry(params);
    head = static_cast<int>(rest / kPieces);
    column = (static_cast<int>(rest % kPieces) * 32 + lane) * kMergeColumns;
  }

  JAXINFER_DEVICE int load_slot(const AttentionParams& params, int i) const {
    return __ldg(params.plan + params.format.merge_slots + min(i, end - 1));
  }
};

// This lane's columns of the final row of a piece. All slots' values of them, up to 32, are on their way at a
// time: one after the other they would cost a trip to L2 each (16 slots 2.3 us, 32 slots 7 us on an H200).
// Writes nothing unless the partial states `exist`.
template <class Config, class Variant>
JAXINFER_DEVICE void merge_columns(const AttentionParams& params, const VariantOperands& operands,
                                   const MergePiece<Config>& piece, int lane, bool exist) {
  // Slots between two questions whether there are more. A warp alone takes a microsecond for the instructions
  // of 32 slots: without questions 1 x 1024 tokens take 7.4 us on an H200 instead of 6.8 (16 slots), 16
  // requests of 512 to 1024 19.5 instead of 18.4 (2 or 3).
  constexpr int kGroup = 8;
  const int num_heads = params.num_qo_heads;
  const int head = piece.head;
  const int column = piece.column;
  const bool has_column = column < params.head_dim_vo;
  const float* const from = params.partial_o + (has_column ? column : 0);
  float o[kMergeColumns] = {};
  float total = 0.0f;  // of this lane's slots; stays 0 where no piece saw anything
  float m = -infinity();
  int slot = piece.slot;
  int first = piece.begin;
  do {
    const int count = min(piece.end - first, 32);
    const int64_t at = int64_t{slot} * num_heads + head;
    // Head dims are multiples of 8, so that 32 bits hold where a slot's row starts.
    const uint32_t row_start = static_cast<uint32_t>(at * (params.head_dim_vo / 8));
    float max = 0.0f;
    float sum = 0.0f;
    if constexpr (Variant::kSoftmax) max = __ldcg(params.partial_max + at);
    if constexpr (kFindsEmpty<Variant>) {
      sum = lane < count ? __ldcg(params.partial_sum + at) : 0.0f;
    }
    float x[32][kMergeColumns];
    // Behind the last slot, that one again: a group is read without branches.
#pragma unroll
    for (int group = 0; group < 32; group += kGroup) {
      if (group >= count) break;
#pragma unroll
      for (int i = group; i < group + kGroup; ++i) {
        const uint64_t start = __shfl_sync(kFullWarp, row_start, i);
        const float4 columns = __ldcg(reinterpret_cast<const float4*>(from + start * 8));
        x[i][0] = columns.x;
        x[i][1] = columns.y;
        x[i][2] = columns.z;
        x[i][3] = columns.w;
      }
    }
    float weight = lane < count ? 1.0f : -1.0f;  // of this lane's slot; below 0: leave it out
    if constexpr (Variant::kSoftmax) {
      if (first == piece.begin) {
        m = max;
#pragma unroll 1
        for (int i = first + 32 + lane; i < piece.end; i += 32) {
          m = fmaxf(m, __ldcg(params.partial_max + int64_t{piece.load_slot(params, i)} * num_heads + head));
        }
#pragma unroll
        for (int mask = 1; mask < 32; mask *= 2) m = fmaxf(m, shuffle_xor(m, mask));
      }
      // A piece that saw nothing is left out: whatever its o holds cannot leak.
      const bool empty = sum == 0.0f;
      // Equal ones may be infinite, where logits exceed float32.
      weight = empty ? -1.0f : max == m ? 1.0f : exp2_fast((max - m) * kLog2e);
      total = empty ? total : fmaf(weight, sum, total);
    } else {
      total += sum;
    }
#pragma unroll
    for (int group = 0; group < 32; group += kGroup) {
      if (group >= count) break;
#pragma unroll
      for (int i = group; i < group + kGroup; ++i) {
        const float slot_weight = __shfl_sync(kFullWarp, weight, i);
        if (slot_weight < 0.0f) continue;
#pragma unroll
        for (int e = 0; e < kMergeColumns; ++e) o[e] = fmaf(slot_weight, x[i][e], o[e]);
      }
    }
    first += 32;
    if (first < piece.end) slot = piece.load_slot(params, first + lane);
  } while (first < piece.end);
  if constexpr (kFindsEmpty<Variant>) {
#pragma unroll
    for (int mask = 1; mask < 32; mask *= 2) total += shuffle_xor(total, mask);
  }
  const float inverse = !Variant::kSoftmax ? 1.0f : total == 0.0f ? 0.0f : 1.0f / total;
  if (!exist || !has_column) return;
  const int64_t row = int64_t{piece.token} * num_heads + head;
  if (Variant::kSoftmax && column == 0) params.lse[row] = natural_lse(m, total);
#pragma unroll
  for (int e = 0; e < kMergeColumns; ++e) o[e] *= inverse;
  if constexpr (Variant::kOutput) {
    const Row output_row{-1, piece.token, params.q_pos[piece.token], head, params.group_divider.divide(head)};
    if (total != 0.0f) Variant(params, operands, output_row).output(o, column, output_row);
  }
  const int64_t to = row * params.head_dim_vo + column;
  if constexpr (Config::kDType == DType::kF32) {
    *reinterpret_cast<float4*>(static_cast<float*>(params.o) + to) = make_float4(o[0], o[1], o[2], o[3]);
  } else {
    using Type = Element<Config::kDType>;
    *reinterpret_cast<uint2*>(static_cast<uint16_t*>(params.o) + to) =
        make_uint2(Type::pack_pair(o[0], o[1]), Type::pack_pair(o[2], o[3]));
  }
}

// A kernel of its own, behind the attention kernels. Where it may start before they end, it reads the plan
// meanwhile, and runs once for nothing: a first run fetches code and address translations, which takes longer
// than the merge does. CTAs that find no room beside those of the attention kernels start when these have
// ended, where a run for nothing would only double their work (256 slots of 32 heads: 18 us instead of 5 on
// an H200).
template <class Config, class Variant>
JAXINFER_DEVICE void merge(const AttentionParams& params, const VariantOperands& operands) {
  using Piece = MergePiece<Config>;
  constexpr uint32_t kBesideAttention = 3;  // CTAs per multiprocessor
  const int lane = threadIdx.x & 31;
  const uint32_t num_warps = gridDim.x * (Config::kNumThreads / 32);
  // 32 bits hold all pieces: their partial states are up to 512 bytes each.
  const uint32_t all = static_cast<uint32_t>(__ldg(params.plan + kHeaderNumMerge)) * Piece::of_entry(params);
  uint32_t i = blockIdx.x * (Config::kNumThreads / 32) + warp_index();
  bool exist = !kStartsEarly || blockIdx.x >= kBesideAttention * num_multiprocessors();
  if (i < all) {
    if (exist) wait_for_earlier_kernels();
    Piece piece(params, i, lane);
    do {
      // Read ahead, but nothing where this is the only one, as in small batches: what is done between the
      // wait and the reads of partial states delays the result.
      const uint32_t following = i + num_warps;
      Piece next = piece;
      if (following < all) next = Piece(params, following, lane);
      merge_columns<Config, Variant>(params, operands, piece, lane, exist);
      if (exist) {
        piece = next;
        i = following;
      } else {
        wait_for_earlier_kernels();
        exist = true;
      }
    } while (i < all);
  }
  end_after_earlier_kernels();  // even without any entry
}

}  // namespace jaxinfer
