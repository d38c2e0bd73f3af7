// The two matrix products of a KV block on tensor cores (mma.sync m16n8k16), and the fragments they work on.
// Rows of fragment f of a warp are 16f + lane / 4 and 8 more; columns of piece j are 8j + 2 (lane % 4) and
// the next.
#pragma once

#include "kernels/gather.cuh"

namespace jaxinfer {

// Addresses of a lane's rows of one tile for ldmatrix. A chunk number 2i + b (b this lane's) combined with
// the phase is (2i) ^ (b ^ phase), which only changes bits 5 and 6 of an address: one register and constants
// make every address.
template <int kChunks>
class TileMatrices {
  // Rows of 192 bytes begin at odd multiples of 64, so there the row's own bits must stay out of the
  // combination.
  static constexpr bool kOne = kChunks % 8 == 0;

 public:
  // `tile` is a multiple of 128; `lane_row`: this lane's row, less than 16; `odd`: whether this lane reads
  // odd chunks.
  JAXINFER_DEVICE TileMatrices(uint32_t tile, int lane_row, int odd) {
    const uint32_t row = tile + lane_row * RowTile<kChunks>::kPitch;
    const uint32_t low = (odd ^ RowTile<kChunks>::phase(lane_row)) << 4;
    first_ = kOne ? row + low : row;
    low_ = kOne ? 0 : low;
  }

  // Address for chunks 2 * pair and 2 * pair + 1 of the rows from 16 * block on.
  JAXINFER_DEVICE uint32_t at(int block, int pair) const {
    const uint32_t change = (pair & 3) << 5;
    return (kOne ? first_ ^ change : first_ + (low_ ^ change)) + (pair >> 2) * 128 +
           block * (16 * RowTile<kChunks>::kPitch);
  }

 private:
  uint32_t first_;
  uint32_t low_;
};
// Of a K tile, whose rows are columns of the product, and of a V tile.
template <int kChunks>
JAXINFER_DEVICE TileMatrices<kChunks> key_matrices(uint32_t tile, int lane) {
  return TileMatrices<kChunks>(tile, (lane & 7) + (lane >> 4 << 3), lane >> 3 & 1);
}
template <int kChunks>
JAXINFER_DEVICE TileMatrices<kChunks> row_matrices(uint32_t tile, int lane) {
  return TileMatrices<kChunks>(tile, lane & 15, lane >> 4);
}

// Query fragments of a warp's rows: kept in registers, or read again from shared memory at every step.
template <class Config>
class QueryFragments {
 public:
  static constexpr int kChunks = Config::kHeadDimQk / 8;
  static constexpr int kSteps = Config::kHeadDimQk / 16;
  static constexpr int kFragments = Config::kTile / (16 * Config::kWarpsM);

  JAXINFER_DEVICE QueryFragments(uint32_t tile, int warp, int lane)
      : rows_(row_matrices<kChunks>(tile + warp * kFragments * 16 * RowTile<kChunks>::kPitch, lane)) {}

  JAXINFER_DEVICE void load() {
    if constexpr (Config::kQueryInRegisters != 0) {
#pragma unroll
      for (int f = 0; f < kFragments; ++f) {
#pragma unroll
        for (int i = 0; i < kSteps; ++i) load_matrices(rows_.at(f, i), kept_[f][i]);
      }
    }
  }
  JAXINFER_DEVICE void get(int f, int step, uint32_t (&a)[4]) const {
    if constexpr (Config::kQueryInRegisters != 0) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = kept_[f][step][i];
    } else {
      load_matrices(rows_.at(f, step), a);
    }
  }

 private:
  TileMatrices<kChunks> rows_;
  uint32_t kept_[Config::kQueryInRegisters != 0 ? kFragments : 1][kSteps][4];
};

// s = Q K^T for the kBlockKV columns of a K tile.
template <class Config, int kFragments, int kColumns>
JAXINFER_DEVICE void multiply_qk(const QueryFragments<Config>& query,
                                 const TileMatrices<Config::kHeadDimQk / 8>& keys,
                                 float (&s)[kFragments][kColumns][4]) {
  using Type = Element<Config::kDType>;
  // With few columns the chain of dependent products is what takes time: two sets of sums halve it.
  constexpr int kSets = kFragments * kColumns <= 2 ? 2 : 1;
  float sums[kSets][kFragments][kColumns][4];
#pragma unroll
  for (int t = 0; t < kSets; ++t) {
#pragma unroll
    for (int f = 0; f < kFragments; ++f) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[t][f][j][e] = 0.0f;
      }
    }
  }
#pragma unroll
  for (int step = 0; step < Config::kHeadDimQk / 16; ++step) {
    // All that a step reads before its products: 2.5% faster than in turn, in tile 128.
    uint32_t a[kFragments][4];
    uint32_t b[kColumns / 2][4];
#pragma unroll
    for (int f = 0; f < kFragments; ++f) query.get(f, step, a[f]);
#pragma unroll
    for (int block = 0; block < kColumns / 2; ++block) load_matrices(keys.at(block, step), b[block]);
#pragma unroll
    for (int block = 0; block < kColumns / 2; ++block) {
#pragma unroll
      for (int f = 0; f < kFragments; ++f) {
        Type::multiply(sums[step % kSets][f][2 * block], a[f], b[block][0], b[block][1]);
        Type::multiply(sums[step % kSets][f][2 * block + 1], a[f], b[block][2], b[block][3]);
      }
    }
  }
#pragma unroll
  for (int f = 0; f < kFragments; ++f) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        s[f][j][e] = kSets == 2 ? sums[0][f][j][e] + sums[kSets - 1][f][j][e] : sums[0][f][j][e];
      }
    }
  }
}

// o += P V. `weigh(x, r)` turns a score of fragment row r into its weight; the score fragments are then
// exactly the left fragments of this product. kInGaps: weights of the next sixteen columns are made between
// the products of these, where the two kinds of units work at the same time.
template <class Config, bool kInGaps, int kFragments, int kColumns, class Weigh>
JAXINFER_DEVICE void multiply_pv(float (&s)[kFragments][kColumns][4], const Weigh& weigh,
                                 const TileMatrices<Config::kHeadDimVo / 8>& values,
                                 float (&o)[kFragments][Config::kHeadDimVo / 8][4]) {
  using Type = Element<Config::kDType>;
  constexpr int kPairs = Config::kHeadDimVo / 16;
  constexpr int kScores = 8 * kFragments;  // of sixteen columns
  const auto weigh_some = [&](int block, int begin, int end) {
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      if (i >= begin && i < end) weigh(s[i / 8][2 * block + (i >> 2 & 1)][i & 3], 2 * (i / 8) + (i >> 1 & 1));
    }
  };
#pragma unroll
  for (int block = 0; block < (kInGaps ? 1 : kColumns / 2); ++block) weigh_some(block, 0, kScores);
#pragma unroll
  for (int block = 0; block < kColumns / 2; ++block) {
    uint32_t a[kFragments][4];
#pragma unroll
    for (int f = 0; f < kFragments; ++f) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float (&x)[4] = s[f][2 * block + half];
        a[f][2 * half] = Type::pack_pair(x[0], x[1]);
        a[f][2 * half + 1] = Type::pack_pair(x[2], x[3]);
      }
    }
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      uint32_t b[4];
      load_matrices_transposed(values.at(block, pair), b);
#pragma unroll
      for (int f = 0; f < kFragments; ++f) {
        Type::multiply(o[f][2 * pair], a[f], b[0], b[1]);
        Type::multiply(o[f][2 * pair + 1], a[f], b[2], b[3]);
      }
      if (kInGaps && block + 1 < kColumns / 2)
        weigh_some(block + 1, pair * kScores / kPairs, (pair + 1) * kScores / kPairs);
    }
  }
}

}  // namespace jaxinfer
