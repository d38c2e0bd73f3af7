// The FFI handler symbols, one per (operation, platform); module.cc hands them to Python.
#pragma once

#include "xla/ffi/api/c_api.h"

namespace jaxinfer {

extern "C" XLA_FFI_Error* jaxinfer_attention_cpu(XLA_FFI_CallFrame* call_frame);
extern "C" XLA_FFI_Error* jaxinfer_append_cpu(XLA_FFI_CallFrame* call_frame);
extern "C" XLA_FFI_Error* jaxinfer_initialize_cuda(XLA_FFI_CallFrame* call_frame);
extern "C" XLA_FFI_Error* jaxinfer_attention_cuda(XLA_FFI_CallFrame* call_frame);
extern "C" XLA_FFI_Error* jaxinfer_append_cuda(XLA_FFI_CallFrame* call_frame);

}  // namespace jaxinfer
