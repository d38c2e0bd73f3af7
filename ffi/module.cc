// The Python module `jaxinfer._native`: handler capsules for jax.ffi, the planner's binding, facts about the
// build.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "cpu/executor.h"
#include "handlers.h"

namespace nb = nanobind;

namespace jaxinfer {

void bind_plan(nb::module_& m);  // plan_binding.cc
void bind_cuda(nb::module_& m);  // cuda_binding.cc

namespace {

nb::capsule handler(XLA_FFI_Error* (*function)(XLA_FFI_CallFrame*)) {
  return nb::capsule(reinterpret_cast<void*>(function), "xla._CUSTOM_CALL_TARGET");
}

}  // namespace

NB_MODULE(_native, m) {
  m.def(
      "registrations",
      [] {
        nb::dict cpu;
        cpu["jaxinfer_attention"] = handler(jaxinfer_attention_cpu);
        cpu["jaxinfer_append"] = handler(jaxinfer_append_cpu);
        // A GPU call loads its kernels in the initialize stage, which runs before every execution.
        nb::dict attention;
        attention["initialize"] = handler(jaxinfer_initialize_cuda);
        attention["execute"] = handler(jaxinfer_attention_cuda);
        nb::dict append;
        append["initialize"] = handler(jaxinfer_initialize_cuda);
        append["execute"] = handler(jaxinfer_append_cuda);
        nb::dict gpu;
        gpu["jaxinfer_attention"] = attention;
        gpu["jaxinfer_append"] = append;
        nb::dict platforms;
        platforms["cpu"] = cpu;
        platforms["CUDA"] = gpu;
        return platforms;
      },
      "Handler capsules by platform and FFI target name; where a target has stages, a dict of them.");
  // Of the headers that the handlers were built with: XLA takes these and older ones.
  m.attr("xla_ffi_api") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  m.def(
      "cpu_isa", [] { return std::string(cpu::isa_name(cpu::isa())); },
      "The instruction set that the CPU executor uses here: 'scalar', 'avx2' or 'avx512'.");
  bind_plan(m);
  bind_cuda(m);
}

}  // namespace jaxinfer
