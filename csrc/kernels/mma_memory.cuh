// Where everything of a CTA of attention_mma.cuh lies in shared memory. Nothing is read or written here.
#pragma once

#include "kernels/gather.cuh"
#include "kernels/variant.cuh"

namespace jaxinfer {

// What shared memory holds, in bytes from its start. kSmemBytes of jaxinfer/jit/tiles.py is the same sum.
template <class Config>
struct MmaSharedMemory {
  static constexpr int kStates = Config::kStreams > 1 ? Config::kStreams * Config::kTile : 0;
  static constexpr int kQuery = 0;
  static constexpr int kRing = kQuery + Config::kTile * Config::kHeadDimQk * 2;
  static constexpr int kMergeState = kRing + RingShape<Config>::kBytes;
  static constexpr int kFreeStages = kMergeState + kStates * 8;
  static constexpr int kVisible = kFreeStages + (Config::kStreams > 1 ? 16 : 0);
  static constexpr int kPosition = kVisible + Config::kTile * static_cast<int>(sizeof(Visible));
  static constexpr int kWarpStates = kPosition + RingShape<Config>::kPositionBytes;
  static constexpr int kNumWarpStates = kStateInRegisters<Config> ? 0 : Config::kNumThreads / 32;
  static constexpr int kRowNumbers = kWarpStates + kNumWarpStates * static_cast<int>(sizeof(WarpState));
  static constexpr int kPresent = kRowNumbers + (Config::kStreams == 1 ? Config::kBlockKV * 4 : 0);
  static constexpr int kBytes = kPresent + RingShape<Config>::kPresentBytes;
};

// Sums of a stream's rows, float32 [kRows, kHeadDimVo], in the ring's free stage, as many rows as fit:
// 16-byte pieces, swizzled so that writing fragments and reading rows both spread over the banks.
template <class Config>
struct StreamSums {
  static constexpr int kPitch = Config::kHeadDimVo * 4;
  static constexpr int kRoom = RingShape<Config>::kStageBytes / kPitch / 8 * 8;
  static constexpr int kRows = kRoom < Config::kTile ? kRoom : Config::kTile;
  static_assert(Config::kStreams == 1 || kRows > 0, "a stage holds rows of sums");
  static JAXINFER_DEVICE uint32_t offset(int row, int piece) {
    return static_cast<uint32_t>(row * kPitch + ((piece ^ (row & 7)) << 4));
  }
};

}  // namespace jaxinfer
