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

ffi::Error attention(ffi::ThreadPool pool, AttentionCall call) {
  JAXINFER_CHECK(call.operands.size() == 0, "rules written as CUDA text need a GPU");
  AttentionParams params;
  JAXINFER_RETURN_IF_ERROR(make_params(call, &params));
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

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jaxinfer_attention_cpu,
    [](ffi::ThreadPool pool, auto... call) { return attention(pool, AttentionCall{call...}); },
    bind_attention(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()));

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
