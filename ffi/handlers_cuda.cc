// XLA FFI handlers for platform "CUDA": buffers and attributes to parameter structs, then one launch per tile
// class and one merge. Kernels are loaded in the initialize stage; the execute stage only launches (it never
// allocates, synchronises or reads device memory), so that a command buffer can capture it. No math.
#include <algorithm>
#include <cstring>
#include <string_view>
#include <type_traits>

#include "checks.h"
#include "handlers.h"
#include "integers.h"
#include "kernels.h"
#include "tensor_maps.h"

namespace jaxinfer {

namespace {

// The structs are kernel parameters, copied byte by byte: 4 KB is what every driver accepts.
static_assert(std::is_trivially_copyable_v<AttentionParams> && sizeof(AttentionParams) < 4096);
static_assert(std::is_trivially_copyable_v<AppendParams> && sizeof(AppendParams) < 4096);

constexpr int64_t kCtasPerMultiprocessor = 8;  // of a grid-stride kernel; more would only queue
constexpr size_t kMaxOperandBytes = 1024;      // of a user's variant; a kernel parameter like the structs

// Grid of a kernel that strides over `work` CTAs' worth of items.
int64_t stride_grid(const cuda::Kernel& kernel, int64_t work) {
  return std::min(work, kCtasPerMultiprocessor * int64_t{kernel.num_multiprocessors});
}

ffi::Error internal(const std::string& text) {
  return ffi::Error::Internal("jaxinfer: " + text);
}

ffi::Error initialize(int32_t device, ffi::Dictionary attributes) {
  const auto specs = attributes.get<std::string_view>("kernels");
  JAXINFER_CHECK(specs.has_value(),
                 "the call carries no kernels; it was exported by another version of jaxinfer");
  if (const auto error = cuda::load_kernels(device, *specs); !error.empty()) {
    return ffi::Error(ffi::ErrorCode::kFailedPrecondition, "jaxinfer: " + error);
  }
  return ffi::Error::Success();
}

// The operands of a user's variant as the kernel takes them: pointers in field order, then the scalars'
// bytes.
ffi::Error pack_operands(ffi::RemainingArgs arrays, std::string_view scalars,
                         char (&packed)[kMaxOperandBytes]) {
  JAXINFER_CHECK(arrays.size() * sizeof(void*) + scalars.size() <= kMaxOperandBytes,
                 "a variant has more operands than fit into " + std::to_string(kMaxOperandBytes) + " bytes");
  char* out = packed;
  for (size_t i = 0; i < arrays.size(); ++i, out += sizeof(void*)) {
    const auto array = arrays.get<ffi::AnyBuffer>(i);
    if (!array.has_value()) return array.error();
    const void* pointer = array->untyped_data();
    std::memcpy(out, &pointer, sizeof(pointer));
  }
  std::memcpy(out, scalars.data(), scalars.size());
  return ffi::Error::Success();
}

ffi::Error attention(int32_t device, cuda::Stream stream, std::string_view kernels, std::string_view scalars,
                     AttentionCall call) {
  AttentionParams params;
  JAXINFER_RETURN_IF_ERROR(make_params(call, &params));
  alignas(16) char packed[kMaxOperandBytes] = {};
  JAXINFER_RETURN_IF_ERROR(pack_operands(call.operands, scalars, packed));

  const auto* loaded = cuda::find_kernels(device, kernels);
  if (loaded == nullptr) return internal("the kernels were not loaded before execution");
  const PlanFormat& format = params.format;
  const bool merges = format.merge_capacity > 0 && format.slot_capacity > 0;
  JAXINFER_CHECK(loaded->size() == static_cast<size_t>(format.num_classes) + (merges ? 1 : 0),
                 "the call has " + std::to_string(loaded->size()) + " kernels, its plan needs " +
                     std::to_string(format.num_classes + (merges ? 1 : 0)));
  if (params.num_tokens == 0) return ffi::Error::Success();

  // The classes run side by side. The last one goes first: its CTAs need a multiprocessor each where they run
  // on two or three warpgroups, which nothing would leave them once the smaller CTAs of the first class are
  // there. The next class starts when all CTAs of the one before have started or ended, and reads nothing of
  // what that one writes; all that both read was there before the first of them started, which waits for
  // everything earlier. It ends after the one before, so that what follows waits for both
  // (end_after_earlier_kernels).
  cuda::Start start = cuda::Start::kAfterAll;
  for (int32_t cls = format.num_classes - 1; cls >= 0; --cls) {
    if (format.classes[cls].item_capacity == 0 || format.classes[cls].num_ctas <= 0) continue;
    const cuda::Kernel& kernel = (*loaded)[cls];
    TensorMaps maps;
    if (kernel.tensor_maps) {
      if (const auto error = cuda::make_tensor_maps(params, format.classes[cls], kernel.kv_box_rows, &maps);
          !error.empty()) {
        return internal(error);
      }
    }
    const auto placement = params.runs_in_pairs(cls) ? cuda::Placement::kPairs : cuda::Placement::kAny;
    void* arguments[] = {&params, &cls, packed, &maps};
    if (const auto error =
            cuda::launch(kernel, format.classes[cls].num_ctas, stream, arguments, start, placement);
        !error.empty()) {
      return internal(error);
    }
    start = cuda::Start::kEarly;
  }
  if (merges) {
    const cuda::Kernel& merge = loaded->back();
    // One warp for every 128 columns of a row: MergePiece of merge.cuh.
    const int64_t warps =
        int64_t{format.merge_capacity} * params.num_qo_heads * ceil_div(params.head_dim_vo, 128);
    void* arguments[] = {&params, packed};
    if (const auto error = cuda::launch(merge, stride_grid(merge, ceil_div(warps, merge.num_threads / 32)),
                                        stream, arguments, cuda::Start::kEarly);
        !error.empty()) {
      return internal(error);
    }
  }
  return ffi::Error::Success();
}

ffi::Error append(int32_t device, cuda::Stream stream, std::string_view kernels, AppendCall call) {
  AppendParams params;
  JAXINFER_RETURN_IF_ERROR(make_params(call, &params));
  const auto* loaded = cuda::find_kernels(device, kernels);
  if (loaded == nullptr) return internal("the kernels were not loaded before execution");
  JAXINFER_CHECK(loaded->size() == 1, "an append has one kernel, got " + std::to_string(loaded->size()));
  if (params.num_tokens == 0 || params.num_pages == 0) return ffi::Error::Success();

  const cuda::Kernel& kernel = loaded->front();
  void* arguments[] = {&params};
  const auto error = cuda::launch(kernel, stride_grid(kernel, params.num_tokens), stream, arguments);
  return error.empty() ? ffi::Error::Success() : internal(error);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxinfer_initialize_cuda, initialize,
                              ffi::Ffi::BindInitialize().Ctx<ffi::DeviceOrdinal>().Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxinfer_attention_cuda,
                              [](int32_t device, cuda::Stream stream, std::string_view kernels,
                                 std::string_view scalars, auto... call) {
                                return attention(device, stream, kernels, scalars, AttentionCall{call...});
                              },
                              bind_attention(ffi::Ffi::Bind()
                                                 .Ctx<ffi::DeviceOrdinal>()
                                                 .Ctx<ffi::PlatformStream<cuda::Stream>>()
                                                 .Attr<std::string_view>("kernels")
                                                 .Attr<std::string_view>("scalars")),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxinfer_append_cuda,
                              [](int32_t device, cuda::Stream stream, std::string_view kernels,
                                 auto... call) {
                                return append(device, stream, kernels, AppendCall{call...});
                              },
                              bind_append(ffi::Ffi::Bind()
                                              .Ctx<ffi::DeviceOrdinal>()
                                              .Ctx<ffi::PlatformStream<cuda::Stream>>()
                                              .Attr<std::string_view>("kernels")),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jaxinfer
