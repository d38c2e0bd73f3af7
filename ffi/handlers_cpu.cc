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

ffi::Error append(ffi::ThreadPool pool, AppendCall call) {
  AppendParams params;
  JAXINFER_RETURN_IF_ERROR(make_params(call, &params));
  cpu::append(params, on(pool));
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jaxinfer_attention_cpu,
    [](ffi::ThreadPool pool, auto... call) { return attention(pool, AttentionCall{call...}); },
    bind_attention(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()));

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jaxinfer_append_cpu, [](ffi::ThreadPool pool, auto... call) { return append(pool, AppendCall{call...}); },
    bind_append(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()));

}  // namespace jaxinfer
