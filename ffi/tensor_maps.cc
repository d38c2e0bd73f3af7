// See tensor_maps.h. Boxes are what csrc/kernels/attention_wgmma_load.cuh copies at once.
#include "tensor_maps.h"

#include <algorithm>

#include "driver.h"

namespace jaxinfer::cuda {

namespace {

constexpr uint32_t kConsumerRows = 64;  // query rows of a warpgroup
constexpr uint64_t kElementBytes = 2;

static_assert(sizeof(TensorMap) == 128, "the size of a CUtensorMap");

// One dimension beyond the first, which is the head dim.
struct Dimension {
  int64_t size;
  int64_t stride;  // elements
  uint32_t box;
};

template <size_t kCount>
std::string encode(const AttentionParams& params, const void* address, int64_t head_dim,
                   const Dimension (&more)[kCount], TensorMapPromotion promotion, TensorMap* map) {
  uint64_t sizes[kCount + 1] = {static_cast<uint64_t>(head_dim)};
  uint64_t strides[kCount];  // bytes
  uint32_t box[kCount + 1] = {kPanelElements};
  uint32_t ones[kCount + 1] = {1};
  for (size_t i = 0; i < kCount; ++i) {
    // An empty cache is never read, but its map must be a valid one; nor is the stride of a missing axis.
    sizes[i + 1] = static_cast<uint64_t>(std::max<int64_t>(more[i].size, 1));
    strides[i] = static_cast<uint64_t>(more[i].size > 1 ? more[i].stride : 8) * kElementBytes;
    box[i + 1] = more[i].box;
    ones[i + 1] = 1;
  }
  const TensorMapType type = params.dtype == DType::kBF16 ? kMapBfloat16 : kMapFloat16;
  void* const base = const_cast<void*>(address != nullptr ? address : params.q);
  return describe(
      driver().api.tensor_map_encode_tiled(map, type, kCount + 1, base, sizes, strides, box, ones,
                                           kMapNoInterleave, kMapSwizzle128, promotion, kMapFillZeros),
      "cuTensorMapEncodeTiled");
}

// K or V.
std::string encode_cache(const AttentionParams& params, const void* address, int32_t head_dim,
                         const CacheStrides& strides, uint32_t box_rows, TensorMap* map) {
  if (params.kv_indices == nullptr) {
    const Dimension more[] = {{params.num_pages, strides.page, box_rows},
                              {params.num_kv_heads, strides.head, 1},
                              {params.num_layers, strides.layer, 1}};
    return encode(params, address, head_dim, more, kMapPromote256, map);
  }
  // Rows of all pages of all layers in groups of eight: one layer lies behind the other.
  const int64_t group = kPatternRows * strides.token;
  const int64_t last_page = params.num_layers * params.num_pages - 1;
  const int64_t groups =
      std::max<int64_t>(last_page, 0) * (strides.page / group) + params.page_size / kPatternRows;
  const Dimension rows = {kPatternRows, strides.token, kPatternRows};
  const Dimension heads = {params.num_kv_heads, strides.head, 1};
  // Of scattered pages 256 bytes at a time bring what nobody asked for.
  if (head_dim % kPanelElements == 0) {
    const uint32_t panels = static_cast<uint32_t>(head_dim / kPanelElements);
    const Dimension more[] = {
        rows, {panels, kPanelElements, panels}, {groups, group, box_rows / kPatternRows}, heads};
    return encode(params, address, kPanelElements, more, kMapPromote128, map);
  }
  // Zeros behind a row's end are made by the first dimension, so that its panels come by themselves.
  const Dimension more[] = {rows, {groups, group, 1}, heads};
  return encode(params, address, head_dim, more, kMapPromote128, map);
}

}  // namespace

std::string make_tensor_maps(const AttentionParams& params, const ClassFormat& cls, int32_t kv_box_rows,
                             TensorMaps* maps) {
  const auto group = static_cast<uint32_t>(cls.packed != 0 ? params.group_size() : 1);
  // Rows of a warpgroup by themselves where tokens do not straddle two, else the whole tile.
  const uint32_t rows = kConsumerRows % group == 0 ? kConsumerRows : static_cast<uint32_t>(cls.tile);
  const int64_t head_dim = params.head_dim_qk;
  const Dimension more[] = {{params.num_qo_heads, head_dim, group},
                            {params.num_tokens, params.num_qo_heads * head_dim, rows / group}};
  std::string error = encode(params, params.q, params.head_dim_qk, more, kMapPromote256, &maps->q);
  if (!error.empty() || kv_box_rows == 0) return error;
  const auto box_rows = static_cast<uint32_t>(kv_box_rows);
  error = encode_cache(params, params.k, params.head_dim_qk, params.k_strides, box_rows, &maps->k);
  if (!error.empty()) return error;
  return encode_cache(params, params.v, params.head_dim_vo, params.v_strides, box_rows, &maps->v);
}

}  // namespace jaxinfer::cuda
