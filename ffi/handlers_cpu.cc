// XLA FFI handlers for platform "cpu": buffers and attributes to parameter structs, then the CPU executor. No
// math.
#include "checks.h"
#include "cpu/executor.h"
#include "handlers.h"
#include "thread_pool.h"

namespace jaxinfer {

namespace {

cpu::ParallelFor on(ffi::ThreadPool& pool) {
  return [&pool](int64_t num_tasks, const std::function<void(int64_t)>& task) {
    run_on_pool(pool, num_tasks, task);
  };
}

ffi::Error attention(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                     IntBuffer layer, IntBuffer plan, IntBuffer kv_indices, IntBuffer kv_offset,
                     IntBuffer q_pos, IntBuffer block_pos, IntBuffer q_start, IntBuffer kv_len,
                     ffi::Buffer<ffi::DataType::U8> mask_bits, IntBuffer mask_indptr,
                     ffi::Result<ffi::AnyBuffer> o, ffi::ResultBuffer<ffi::DataType::F32> lse,
                     ffi::ResultBuffer<ffi::DataType::F32> workspace, int32_t rules, float sm_scale,
                     float logits_soft_cap, int32_t window_left, int32_t window_right, bool hnd,
                     bool contiguous, bool has_layer, bool has_block_pos,
                     ffi::Span<const int32_t> plan_classes, int32_t merge_capacity, int32_t slot_capacity) {
  AttentionCall call{q,         k,       v,      layer,     plan,        kv_indices, kv_offset, q_pos,
                     block_pos, q_start, kv_len, mask_bits, mask_indptr, o,          lse,       workspace};
  AttentionParams params;
  JAXINFER_RETURN_IF_ERROR(make_params(call,
                                       {.rules = rules,
                                        .sm_scale = sm_scale,
                                        .logits_soft_cap = logits_soft_cap,
                                        .window_left = window_left,
                                        .window_right = window_right,
                                        .hnd = hnd,
                                        .contiguous = contiguous,
                                        .has_layer = has_layer,
                                        .has_block_pos = has_block_pos,
                                        .plan_classes = plan_classes,
                                        .merge_capacity = merge_capacity,
                                        .slot_capacity = slot_capacity},
                                       &params));
  JAXINFER_CHECK(params.plan[kHeaderVersion] == kPlanVersion,
                 "the plan has version " + std::to_string(params.plan[kHeaderVersion]) + ", expected " +
                     std::to_string(kPlanVersion));
  cpu::attention(params, on(pool));
  return ffi::Error::Success();
}

// k_pages and v_pages arrive twice: as operands and as the results that alias them. Only the results are
// used.
ffi::Error append(ffi::ThreadPool pool, ffi::AnyBuffer, ffi::AnyBuffer, ffi::AnyBuffer k, ffi::AnyBuffer v,
                  IntBuffer slots, IntBuffer layer, ffi::Result<ffi::AnyBuffer> k_pages,
                  ffi::Result<ffi::AnyBuffer> v_pages, bool hnd, bool has_layer) {
  AppendCall call{k, v, slots, layer, k_pages, v_pages};
  AppendParams params;
  JAXINFER_RETURN_IF_ERROR(make_params(call, hnd, has_layer, &params));
  cpu::append(params, on(pool));
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxinfer_attention_cpu, attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()                   // q
                                  .Arg<ffi::AnyBuffer>()                   // k
                                  .Arg<ffi::AnyBuffer>()                   // v
                                  .Arg<IntBuffer>()                        // layer
                                  .Arg<IntBuffer>()                        // plan
                                  .Arg<IntBuffer>()                        // kv_indices
                                  .Arg<IntBuffer>()                        // kv_offset
                                  .Arg<IntBuffer>()                        // q_pos
                                  .Arg<IntBuffer>()                        // block_pos
                                  .Arg<IntBuffer>()                        // q_start
                                  .Arg<IntBuffer>()                        // kv_len
                                  .Arg<ffi::Buffer<ffi::DataType::U8>>()   // mask_bits
                                  .Arg<IntBuffer>()                        // mask_indptr
                                  .Ret<ffi::AnyBuffer>()                   // o
                                  .Ret<ffi::Buffer<ffi::DataType::F32>>()  // lse
                                  .Ret<ffi::Buffer<ffi::DataType::F32>>()  // workspace
                                  .Attr<int32_t>("rules")
                                  .Attr<float>("sm_scale")
                                  .Attr<float>("logits_soft_cap")
                                  .Attr<int32_t>("window_left")
                                  .Attr<int32_t>("window_right")
                                  .Attr<bool>("hnd")
                                  .Attr<bool>("contiguous")
                                  .Attr<bool>("has_layer")
                                  .Attr<bool>("has_block_pos")
                                  .Attr<ffi::Span<const int32_t>>("plan_classes")
                                  .Attr<int32_t>("merge_capacity")
                                  .Attr<int32_t>("slot_capacity"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxinfer_append_cpu, append,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // k_pages
                                  .Arg<ffi::AnyBuffer>()  // v_pages
                                  .Arg<ffi::AnyBuffer>()  // k
                                  .Arg<ffi::AnyBuffer>()  // v
                                  .Arg<IntBuffer>()       // slots
                                  .Arg<IntBuffer>()       // layer
                                  .Ret<ffi::AnyBuffer>()  // k_pages
                                  .Ret<ffi::AnyBuffer>()  // v_pages
                                  .Attr<bool>("hnd")
                                  .Attr<bool>("has_layer"));

}  // namespace jaxinfer
