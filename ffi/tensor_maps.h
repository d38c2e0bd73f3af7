// Tensor maps of attention launches: how the copy engine of Hopper finds Q, K and V. From static shapes and
// addresses alone, so that they can be made while a command buffer is recorded. Knows neither XLA nor the
// kernels' registry.
#pragma once

#include <string>

#include "params.h"

namespace jaxinfer::cuda {

// Fills the maps of one class's launch; "" or an error. `kv_box_rows`: KV rows that one copy brings, 0 for
// none.
std::string make_tensor_maps(const AttentionParams& params, const ClassFormat& cls, int32_t kv_box_rows,
                             TensorMaps* maps);

}  // namespace jaxinfer::cuda
