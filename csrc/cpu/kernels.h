// The border between executor.cc (threads, memory, dispatch) and the code that is compiled once per
// instruction set (isa_*.cc): a table of functions over plain structs. Nothing here depends on compiler
// flags.
#pragma once

#include <cstdint>

#include "cpu/executor.h"
#include "params.h"

namespace jaxinfer::cpu {

// Columns of a KV block. Blocks lie on a grid anchored at index 0 of a row's list, so that the order of a
// row's additions never depends on where an item begins or on which rows share a tile.
constexpr int32_t kBlockKV = 64;

// Query rows handled at once. An item with more (never made for the tiles that exist) is processed in several
// turns.
constexpr int32_t kMaxRows = 192;

constexpr int32_t kMaxHeadDim = 256;

// Row strides of scratch arrays are multiples of the widest vector.
constexpr int32_t padded(int32_t head_dim) {
  return (head_dim + 15) / 16 * 16;
}

// Floats of scratch memory that one running worker needs.
inline int64_t scratch_floats(const AttentionParams& params) {
  const int64_t dims = int64_t{padded(params.head_dim_qk)} + padded(params.head_dim_vo);
  return dims * (kMaxRows + kBlockKV);
}

struct Kernels {
  // Runs the items of one queue for heads [head_begin, head_end) of the class; `scratch` holds
  // scratch_floats(params), aligned to 64 bytes.
  void (*run_queue)(const AttentionParams& params, int32_t class_index, int32_t queue, int32_t head_begin,
                    int32_t head_end, float* scratch);
  // Merges entries [begin, end) of the merge list into o and lse.
  void (*merge)(const AttentionParams& params, int32_t begin, int32_t end);
  // Writes the empty state (o = 0, lse = -inf) for tokens [begin, end) and all heads.
  void (*write_empty)(const AttentionParams& params, int32_t begin, int32_t end);
};

namespace scalar {
const Kernels& kernels();
}
#if defined(__x86_64__)
namespace avx2 {
const Kernels& kernels();
}
namespace avx512 {
const Kernels& kernels();
}
#endif

}  // namespace jaxinfer::cpu
