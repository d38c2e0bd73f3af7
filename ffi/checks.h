// From XLA buffers and attributes to the parameter structs: shapes, strides, optional operands. Platform
// handlers (handlers_cpu.cc, handlers_cuda.cc) add the launch. Python has checked every call with better
// words (jaxinfer/attention.py, jaxinfer/cache.py); what is checked again here keeps a hand-made or stale
// program from reading out of bounds.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "params.h"
#include "xla/ffi/api/ffi.h"

namespace jaxinfer {

namespace ffi = xla::ffi;

using IntBuffer = ffi::Buffer<ffi::DataType::S32>;

#define JAXINFER_CHECK(condition, text) \
  if (!(condition)) return ffi::Error::InvalidArgument(std::string("jaxinfer: ") + (text))

#define JAXINFER_RETURN_IF_ERROR(expression)                \
  if (ffi::Error status = (expression); status.failure()) { \
    return status;                                          \
  }

// "[2, 16, 64]"
inline std::string text(ffi::AnyBuffer::Dimensions dims) {
  std::string out = "[";
  for (size_t i = 0; i < dims.size(); ++i) out += (i > 0 ? ", " : "") + std::to_string(dims[i]);
  return out + "]";
}

inline ffi::Error to_dtype(const char* name, ffi::DataType type, DType* dtype) {
  switch (type) {
    case ffi::DataType::F32:
      *dtype = DType::kF32;
      return ffi::Error::Success();
    case ffi::DataType::F16:
      *dtype = DType::kF16;
      return ffi::Error::Success();
    case ffi::DataType::BF16:
      *dtype = DType::kBF16;
      return ffi::Error::Success();
    default:
      return ffi::Error::InvalidArgument(std::string("jaxinfer: ") + name + " has XLA's element type " +
                                         std::to_string(static_cast<int>(type)) +
                                         ", expected float32, float16 or bfloat16");
  }
}

// Shape and strides of one cache tensor, [num_layers?, num_pages, page_size, num_kv_heads, head_dim] ("NHD"),
// [num_layers?, num_pages, num_kv_heads, page_size, head_dim] ("HND"), or contiguous
// [num_layers?, num_kv_tokens, num_kv_heads, head_dim].
struct CacheShape {
  int64_t num_layers, num_pages, page_size, num_kv_heads, head_dim;
  CacheStrides strides;
};

inline ffi::Error read_cache_shape(const char* name, ffi::AnyBuffer::Dimensions dims, bool hnd,
                                   bool contiguous, bool has_layer, CacheShape* shape) {
  const size_t first = has_layer ? 1 : 0;
  const size_t rank = first + (contiguous ? 3 : 4);
  JAXINFER_CHECK(dims.size() == rank,
                 std::string(name) + " has shape " + text(dims) + ", expected rank " + std::to_string(rank));
  const auto* d = dims.begin() + first;
  shape->num_layers = has_layer ? dims[0] : 1;
  shape->num_pages = d[0];
  shape->page_size = contiguous ? 1 : hnd ? d[2] : d[1];
  shape->num_kv_heads = contiguous ? d[1] : hnd ? d[1] : d[2];
  shape->head_dim = contiguous ? d[2] : d[3];
  CacheStrides& s = shape->strides;
  s.head = hnd && !contiguous ? shape->page_size * shape->head_dim : shape->head_dim;
  s.token = hnd && !contiguous ? shape->head_dim : shape->num_kv_heads * shape->head_dim;
  s.page = shape->page_size * shape->num_kv_heads * shape->head_dim;
  s.layer = has_layer ? shape->num_pages * s.page : 0;
  return ffi::Error::Success();
}

// What the shapes of K and V say, to the members that all parameter structs have. They must agree but in
// head_dim.
template <class Params>
ffi::Error fill_cache(const CacheShape& k, const CacheShape& v, Params* params) {
  JAXINFER_CHECK(k.num_layers == v.num_layers && k.num_pages == v.num_pages && k.page_size == v.page_size &&
                     k.num_kv_heads == v.num_kv_heads,
                 "the caches of k and v have " + std::to_string(k.num_layers) + " and " +
                     std::to_string(v.num_layers) + " layers, " + std::to_string(k.num_pages) + " and " +
                     std::to_string(v.num_pages) + " pages of " + std::to_string(k.page_size) + " and " +
                     std::to_string(v.page_size) + " tokens, " + std::to_string(k.num_kv_heads) + " and " +
                     std::to_string(v.num_kv_heads) + " heads; expected the same but for head_dim");
  params->num_kv_heads = static_cast<int32_t>(k.num_kv_heads);
  params->head_dim_qk = static_cast<int32_t>(k.head_dim);
  params->head_dim_vo = static_cast<int32_t>(v.head_dim);
  params->num_layers = static_cast<int32_t>(k.num_layers);
  params->num_pages = k.num_pages;
  params->page_size = static_cast<int32_t>(k.page_size);
  params->k_strides = k.strides;
  params->v_strides = v.strides;
  return ffi::Error::Success();
}

inline ffi::Error check_layer(bool has_layer, const IntBuffer& layer) {
  JAXINFER_CHECK(!has_layer || layer.element_count() == 1,
                 "layer has " + std::to_string(layer.element_count()) + " elements, expected one");
  return ffi::Error::Success();
}

// The static facts of a plan as they travel in attributes: per class (tile, packed, num_queues, num_ctas,
// item_capacity).
inline ffi::Error read_plan_format(ffi::Span<const int32_t> classes, int32_t merge_capacity,
                                   int32_t slot_capacity, PlanFormat* format) {
  constexpr size_t kFields = 5;
  JAXINFER_CHECK(classes.size() == kFields || classes.size() == kFields * kMaxClasses,
                 "plan_classes has " + std::to_string(classes.size()) + " numbers, expected " +
                     std::to_string(kFields) + " for each of one or two classes");
  *format = PlanFormat{};
  format->num_classes = static_cast<int32_t>(classes.size() / kFields);
  for (int32_t c = 0; c < format->num_classes; ++c) {
    const int32_t* field = classes.begin() + static_cast<size_t>(c) * kFields;
    format->classes[c] = ClassFormat{.tile = field[0],
                                     .packed = field[1],
                                     .num_queues = field[2],
                                     .num_ctas = field[3],
                                     .item_capacity = field[4],
                                     .queue_indptr = 0,
                                     .queue_first = 0,
                                     .items = 0};
  }
  format->merge_capacity = merge_capacity;
  format->slot_capacity = slot_capacity;
  lay_out(format);
  return ffi::Error::Success();
}

// What is static in an attention call, on every platform: the call's attribute "attention", a dictionary that
// attention_attributes of jaxinfer/ffi.py makes.
struct AttentionAttributes {
  int32_t rules;
  float sm_scale, logits_soft_cap;
  int32_t window_left, window_right;
  bool hnd, contiguous, has_layer, has_block_pos;
  ffi::Span<const int32_t> plan_classes;
  int32_t merge_capacity, slot_capacity;
};

}  // namespace jaxinfer

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jaxinfer::AttentionAttributes, StructMember<int32_t>("rules"),
                                      StructMember<float>("sm_scale"), StructMember<float>("logits_soft_cap"),
                                      StructMember<int32_t>("window_left"),
                                      StructMember<int32_t>("window_right"), StructMember<bool>("hnd"),
                                      StructMember<bool>("contiguous"), StructMember<bool>("has_layer"),
                                      StructMember<bool>("has_block_pos"),
                                      StructMember<Span<const int32_t>>("plan_classes"),
                                      StructMember<int32_t>("merge_capacity"),
                                      StructMember<int32_t>("slot_capacity"));

namespace jaxinfer {

// Operands, results and attributes of the attention call, in the order of bind_attention.
struct AttentionCall {
  ffi::AnyBuffer q, k, v;
  IntBuffer layer, plan, kv_indices, kv_offset, q_pos, block_pos, q_start, kv_len;
  ffi::Buffer<ffi::DataType::U8> mask_bits;
  IntBuffer mask_indptr;
  ffi::RemainingArgs operands;  // arrays of a user's variant
  ffi::Result<ffi::AnyBuffer> o;
  ffi::ResultBuffer<ffi::DataType::F32> lse, workspace;
  AttentionAttributes attributes;
};

// Appends to a handler's binding what AttentionCall is made of; operands and results as in jaxinfer/ffi.py.
template <class Binding>
auto bind_attention(Binding binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()                   // q
      .template Arg<ffi::AnyBuffer>()                   // k
      .template Arg<ffi::AnyBuffer>()                   // v
      .template Arg<IntBuffer>()                        // layer
      .template Arg<IntBuffer>()                        // plan
      .template Arg<IntBuffer>()                        // kv_indices
      .template Arg<IntBuffer>()                        // kv_offset
      .template Arg<IntBuffer>()                        // q_pos
      .template Arg<IntBuffer>()                        // block_pos
      .template Arg<IntBuffer>()                        // q_start
      .template Arg<IntBuffer>()                        // kv_len
      .template Arg<ffi::Buffer<ffi::DataType::U8>>()   // mask_bits
      .template Arg<IntBuffer>()                        // mask_indptr
      .RemainingArgs()                                  // operands
      .template Ret<ffi::AnyBuffer>()                   // o
      .template Ret<ffi::Buffer<ffi::DataType::F32>>()  // lse
      .template Ret<ffi::Buffer<ffi::DataType::F32>>()  // workspace
      .template Attr<AttentionAttributes>("attention");
}

inline ffi::Error make_params(AttentionCall& call, AttentionParams* params) {
  const AttentionAttributes& attributes = call.attributes;
  *params = AttentionParams{};
  JAXINFER_RETURN_IF_ERROR(to_dtype("q", call.q.element_type(), &params->dtype));
  JAXINFER_CHECK(call.k.element_type() == call.q.element_type() &&
                     call.v.element_type() == call.q.element_type() &&
                     call.o->element_type() == call.q.element_type(),
                 "q, k, v and o must share one dtype");
  CacheShape k_shape, v_shape;
  JAXINFER_RETURN_IF_ERROR(read_cache_shape("k", call.k.dimensions(), attributes.hnd, attributes.contiguous,
                                            attributes.has_layer, &k_shape));
  JAXINFER_RETURN_IF_ERROR(read_cache_shape("v", call.v.dimensions(), attributes.hnd, attributes.contiguous,
                                            attributes.has_layer, &v_shape));
  JAXINFER_RETURN_IF_ERROR(fill_cache(k_shape, v_shape, params));
  const auto q_dims = call.q.dimensions();
  JAXINFER_CHECK(q_dims.size() == 3 && q_dims[2] == k_shape.head_dim,
                 "q has shape " + text(q_dims) + ", expected [num_tokens, num_qo_heads, k's head_dim " +
                     std::to_string(k_shape.head_dim) + "]");
  JAXINFER_CHECK(k_shape.num_kv_heads > 0 && q_dims[1] % k_shape.num_kv_heads == 0,
                 "q has " + std::to_string(q_dims[1]) + " heads, expected a multiple of k's " +
                     std::to_string(k_shape.num_kv_heads));

  JAXINFER_RETURN_IF_ERROR(read_plan_format(attributes.plan_classes, attributes.merge_capacity,
                                            attributes.slot_capacity, &params->format));
  JAXINFER_CHECK(static_cast<int64_t>(call.plan.element_count()) == params->format.num_words,
                 "the plan has " + std::to_string(call.plan.element_count()) + " words, expected " +
                     std::to_string(params->format.num_words));
  const int64_t state_size = q_dims[1] * (v_shape.head_dim + 2);
  JAXINFER_CHECK(static_cast<int64_t>(call.workspace->element_count()) >=
                     int64_t{params->format.slot_capacity} * state_size,
                 "the workspace has " + std::to_string(call.workspace->element_count()) +
                     " floats, the plan's partial states need " +
                     std::to_string(int64_t{params->format.slot_capacity} * state_size));
  JAXINFER_CHECK(static_cast<int64_t>(call.q_pos.element_count()) == q_dims[0],
                 "q_pos has " + std::to_string(call.q_pos.element_count()) +
                     " elements, expected q's num_tokens " + std::to_string(q_dims[0]));
  JAXINFER_CHECK(
      !attributes.has_block_pos || call.block_pos.element_count() == call.kv_indices.element_count(),
      "block_pos has " + std::to_string(call.block_pos.element_count()) +
          " elements, expected as many as kv_indices: " + std::to_string(call.kv_indices.element_count()));
  JAXINFER_RETURN_IF_ERROR(check_layer(attributes.has_layer, call.layer));
  const size_t rows = call.kv_offset.element_count();
  const bool masked = (attributes.rules & kRuleMask) != 0;
  JAXINFER_CHECK(!masked || (call.q_start.element_count() == rows && call.kv_len.element_count() == rows &&
                             call.mask_indptr.element_count() == rows + 1),
                 "q_start, kv_len and mask_indptr have " + std::to_string(call.q_start.element_count()) +
                     ", " + std::to_string(call.kv_len.element_count()) + " and " +
                     std::to_string(call.mask_indptr.element_count()) +
                     " elements, expected kv_offset's rows " + std::to_string(rows) +
                     ", and one more of mask_indptr");

  params->q = call.q.untyped_data();
  params->k = call.k.untyped_data();
  params->v = call.v.untyped_data();
  params->layer = attributes.has_layer ? call.layer.typed_data() : nullptr;
  params->plan = call.plan.typed_data();
  params->kv_indices = attributes.contiguous ? nullptr : call.kv_indices.typed_data();
  params->kv_offset = call.kv_offset.typed_data();
  params->q_pos = call.q_pos.typed_data();
  params->block_pos = attributes.has_block_pos ? call.block_pos.typed_data() : nullptr;
  params->o = call.o->untyped_data();
  params->lse = call.lse->typed_data();
  params->partial_o = call.workspace->typed_data();
  const int64_t slot_heads = int64_t{params->format.slot_capacity} * q_dims[1];
  params->partial_max = params->partial_o + slot_heads * v_shape.head_dim;
  params->partial_sum = params->partial_max + slot_heads;
  params->num_tokens = static_cast<int32_t>(q_dims[0]);
  params->num_rows = static_cast<int32_t>(rows);
  params->num_qo_heads = static_cast<int32_t>(q_dims[1]);
  params->kv_indices_capacity =
      attributes.contiguous ? 0 : static_cast<int64_t>(call.kv_indices.element_count());
  params->variant =
      VariantParams{.rules = static_cast<uint32_t>(attributes.rules),
                    .sm_scale = attributes.sm_scale,
                    .logits_soft_cap = attributes.logits_soft_cap,
                    .window_left = attributes.window_left,
                    .window_right = attributes.window_right,
                    .mask_bits = masked ? call.mask_bits.typed_data() : nullptr,
                    .mask_indptr = masked ? call.mask_indptr.typed_data() : nullptr,
                    .mask_capacity = masked ? static_cast<int64_t>(call.mask_bits.element_count()) : 0,
                    .q_start = masked ? call.q_start.typed_data() : nullptr,
                    .kv_len = masked ? call.kv_len.typed_data() : nullptr};
  params->set_dividers();
  return ffi::Error::Success();
}

// Operands, results and attributes of the append call, in the order of bind_append. The pools arrive twice:
// as operands and as the results that alias them. Only the results are used.
struct AppendCall {
  ffi::AnyBuffer k_operand, v_operand, k, v;
  IntBuffer slots, layer;
  ffi::Result<ffi::AnyBuffer> k_pages, v_pages;
  bool hnd, has_layer;
};

// Appends to a handler's binding what AppendCall is made of; operands and results as in jaxinfer/ffi.py.
template <class Binding>
auto bind_append(Binding binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()  // k_pages
      .template Arg<ffi::AnyBuffer>()  // v_pages
      .template Arg<ffi::AnyBuffer>()  // k
      .template Arg<ffi::AnyBuffer>()  // v
      .template Arg<IntBuffer>()       // slots
      .template Arg<IntBuffer>()       // layer
      .template Ret<ffi::AnyBuffer>()  // k_pages
      .template Ret<ffi::AnyBuffer>()  // v_pages
      .template Attr<bool>("hnd")
      .template Attr<bool>("has_layer");
}

inline ffi::Error make_params(AppendCall& call, AppendParams* params) {
  const bool hnd = call.hnd;
  const bool has_layer = call.has_layer;
  *params = AppendParams{};
  DType dtype = DType::kF32;
  JAXINFER_RETURN_IF_ERROR(to_dtype("k", call.k.element_type(), &dtype));
  CacheShape k_shape, v_shape;
  JAXINFER_RETURN_IF_ERROR(
      read_cache_shape("k_pages", call.k_pages->dimensions(), hnd, false, has_layer, &k_shape));
  JAXINFER_RETURN_IF_ERROR(
      read_cache_shape("v_pages", call.v_pages->dimensions(), hnd, false, has_layer, &v_shape));
  JAXINFER_RETURN_IF_ERROR(fill_cache(k_shape, v_shape, params));
  const auto k_dims = call.k.dimensions();
  JAXINFER_CHECK(k_dims.size() == 3 && k_dims[1] == k_shape.num_kv_heads && k_dims[2] == k_shape.head_dim,
                 "k has shape " + text(k_dims) + ", expected [num_tokens, " +
                     std::to_string(k_shape.num_kv_heads) + ", " + std::to_string(k_shape.head_dim) + "]");
  const auto v_dims = call.v.dimensions();
  JAXINFER_CHECK(v_dims.size() == 3 && v_dims[0] == k_dims[0] && v_dims[1] == v_shape.num_kv_heads &&
                     v_dims[2] == v_shape.head_dim,
                 "v has shape " + text(v_dims) + ", expected [" + std::to_string(k_dims[0]) + ", " +
                     std::to_string(v_shape.num_kv_heads) + ", " + std::to_string(v_shape.head_dim) + "]");
  JAXINFER_CHECK(static_cast<int64_t>(call.slots.element_count()) == k_dims[0],
                 "slots has " + std::to_string(call.slots.element_count()) +
                     " elements, expected k's num_tokens " + std::to_string(k_dims[0]));
  JAXINFER_RETURN_IF_ERROR(check_layer(has_layer, call.layer));

  params->k_pages = call.k_pages->untyped_data();
  params->v_pages = call.v_pages->untyped_data();
  params->k = call.k.untyped_data();
  params->v = call.v.untyped_data();
  params->slots = call.slots.typed_data();
  params->layer = has_layer ? call.layer.typed_data() : nullptr;
  params->element_size = dtype == DType::kF32 ? 4 : 2;
  params->num_tokens = static_cast<int32_t>(k_dims[0]);
  params->set_dividers();
  return ffi::Error::Success();
}

}  // namespace jaxinfer
