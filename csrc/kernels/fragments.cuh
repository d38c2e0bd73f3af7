// The two matrix products of a KV block on tensor cores (mma.sync m16n8k16), and the fragments they work on.
// Rows of fragment f of a warp are 16f + lane / 4 and 8 more; columns of piece j are 8j + 2 (lane % 4) and
// the next.
#pragma once

#include "kernels/gather.cuh"

namespace jaxinfer {

// Addresses of a lane's rows for ldmatrix. A chunk number 2i + b (b this lane's) combined with the phase is
// (2i) ^ (b ^ phase), which only changes bits 5 and 6 of an address: one register and constants make every
// address.
template <int kChunks>
struct MatrixAddress {
  uint32_t row;  // offset of the row
  uint32_t low;  // (b ^ phase) * 16

  // `lane_row`: this lane's row, less than 16; `odd`: whether this lane reads odd chunks.
  JAXINFER_DEVICE MatrixAddress(int lane_row, int odd)
      : row(lane_row * RowTile<kChunks>::kPitch), low((odd ^ RowTile<kChunks>::phase(lane_row)) << 4) {}

  // Address for chunks 2 * pair and 2 * pair + 1 of the rows from 16 * block on; `tile` is a multiple of 128.
  JAXINFER_DEVICE uint32_t at(uint32_t tile, int block, int pair) const {
    const uint32_t change = (pair & 3) << 5;
    // Rows of 192 bytes begin at odd multiples of 64, so there the row's own bits must stay out of the
    // combination.
    const uint32_t first = kChunks % 8 == 0 ? (tile + row + low) ^ change : tile + row + (low ^ change);
    return first + (pair >> 2) * 128 + block * (16 * RowTile<kChunks>::kPitch);
  }
};

// Query fragments of a warp's rows: kept in registers, or read again from shared memory at every step.
template <class Config>
class QueryFragments {
 public:
  static constexpr int kChunks = Config::kHeadDimQk / 8;
  static constexpr int kSteps = Config::kHeadDimQk / 16;
  static constexpr int kFragments = Config::kTile / (16 * Config::kWarpsM);

  JAXINFER_DEVICE QueryFragments(uint32_t tile, int warp, int lane)
      : tile_(tile + warp * kFragments * 16 * RowTile<kChunks>::kPitch), address_(lane & 15, lane >> 4) {}

  JAXINFER_DEVICE void load() {
    if constexpr (Config::kQueryInRegisters != 0) {
#pragma unroll
      for (int f = 0; f < kFragments; ++f) {
#pragma unroll
        for (int i = 0; i < kSteps; ++i) load_matrices(address_.at(tile_, f, i), kept_[f][i]);
      }
    }
  }
  JAXINFER_DEVICE void get(int f, int step, uint32_t (&a)[4]) const {
    if constexpr (Config::kQueryInRegisters != 0) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = kept_[f][step][i];
    } else {
      load_matrices(address_.at(tile_, f, step), a);
    }
  }

 private:
  uint32_t tile_;
  MatrixAddress<kChunks> address_;
  uint32_t kept_[Config::kQueryInRegisters != 0 ? kFragments : 1][kSteps][4];
};

// s = Q K^T for the kBlockKV columns of a K tile.
template <class Config, int kFragments, int kColumns>
JAXINFER_DEVICE void multiply_qk(const QueryFragments<Config>& query,
                                 const MatrixAddress<Config::kHeadDimQk / 8>& rows, uint32_t k_tile,
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
    uint32_t a[kFragments][4];
#pragma unroll
    for (int f = 0; f < kFragments; ++f) query.get(f, step, a[f]);
#pragma unroll
    for (int block = 0; block < kColumns / 2; ++block) {
      uint32_t b[4];
      load_matrices(rows.at(k_tile, block, step), b);
#pragma unroll
      for (int f = 0; f < kFragments; ++f) {
        Type::multiply(sums[step % kSets][f][2 * block], a[f], b[0], b[1]);
        Type::multiply(sums[step % kSets][f][2 * block + 1], a[f], b[2], b[3]);
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

// o += P V; the score fragments hold the weights, which are exactly the left fragments of this product.
template <class Config, int kFragments, int kColumns>
JAXINFER_DEVICE void multiply_pv(const float (&s)[kFragments][kColumns][4],
                                 const MatrixAddress<Config::kHeadDimVo / 8>& rows, uint32_t v_tile,
                                 float (&o)[kFragments][Config::kHeadDimVo / 8][4]) {
  using Type = Element<Config::kDType>;
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
    for (int pair = 0; pair < Config::kHeadDimVo / 16; ++pair) {
      uint32_t b[4];
      load_matrices_transposed(rows.at(v_tile, block, pair), b);
#pragma unroll
      for (int f = 0; f < kFragments; ++f) {
        Type::multiply(o[f][2 * pair], a[f], b[0], b[1]);
        Type::multiply(o[f][2 * pair + 1], a[f], b[2], b[3]);
      }
    }
  }
}

}  // namespace jaxinfer
