// Compiled, never run, where a CUDA toolkit or NVIDIA's runtime wheel is installed: our declarations of the
// driver API (ffi/driver.h) against the real ones. g++ -std=c++17 -fsyntax-only -Iffi -I<folder of cuda.h>
// tests/cuda/driver_abi.cc
#include <cuda.h>

#include <cstddef>
#include <type_traits>

#include "driver.h"

using namespace jaxinfer::cuda;

namespace {

// Two types are passed alike: same size, and both integers or both pointers.
template <typename A, typename B>
constexpr bool kAlike = sizeof(A) == sizeof(B) && std::is_pointer_v<A> == std::is_pointer_v<B> &&
                        std::is_floating_point_v<A> == std::is_floating_point_v<B>;

template <typename Ours, typename Theirs>
struct SameCall : std::false_type {};
template <typename OurResult, typename... Ours, typename TheirResult, typename... Theirs>
struct SameCall<OurResult (*)(Ours...), TheirResult (*)(Theirs...)> {
  static constexpr bool test() {
    if constexpr (sizeof...(Ours) != sizeof...(Theirs)) {
      return false;
    } else {
      return kAlike<OurResult, TheirResult> && (kAlike<Ours, Theirs> && ...);
    }
  }
  static constexpr bool value = test();
};

#define SAME(ours, theirs) static_assert(SameCall<decltype(Api::ours), decltype(&theirs)>::value, #theirs)
SAME(init, cuInit);
SAME(driver_get_version, cuDriverGetVersion);
SAME(get_error_name, cuGetErrorName);
SAME(get_error_string, cuGetErrorString);
SAME(device_get_count, cuDeviceGetCount);
SAME(device_get, cuDeviceGet);
SAME(device_get_name, cuDeviceGetName);
SAME(device_get_attribute, cuDeviceGetAttribute);
SAME(primary_ctx_retain, cuDevicePrimaryCtxRetain);
SAME(ctx_get_current, cuCtxGetCurrent);
SAME(ctx_push_current, cuCtxPushCurrent);
SAME(ctx_pop_current, cuCtxPopCurrent);
SAME(module_load_data, cuModuleLoadData);
SAME(module_unload, cuModuleUnload);
SAME(module_get_function, cuModuleGetFunction);
SAME(func_set_attribute, cuFuncSetAttribute);
SAME(launch_kernel, cuLaunchKernelEx);
SAME(tensor_map_encode_tiled, cuTensorMapEncodeTiled);
#if CUDA_VERSION >= 12040
SAME(func_load, cuFuncLoad);
#endif

static_assert(int{kSuccess} == CUDA_SUCCESS);
static_assert(int{kMultiprocessorCount} == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
static_assert(int{kComputeCapabilityMajor} == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
static_assert(int{kComputeCapabilityMinor} == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
static_assert(int{kMaxSharedMemoryPerBlockOptin} == CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
static_assert(int{kMaxDynamicSharedSizeBytes} == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
static_assert(sizeof(CUtensorMap) == 128);
static_assert(int{kMapFloat16} == CU_TENSOR_MAP_DATA_TYPE_FLOAT16);
static_assert(int{kMapBfloat16} == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16);
static_assert(int{kMapNoInterleave} == CU_TENSOR_MAP_INTERLEAVE_NONE);
static_assert(int{kMapSwizzle128} == CU_TENSOR_MAP_SWIZZLE_128B);
static_assert(int{kMapPromote128} == CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
static_assert(int{kMapPromote256} == CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
static_assert(int{kMapFillZeros} == CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
static_assert(int{kClusterDimension} == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);
static_assert(int{kProgrammaticStreamSerialization} == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION);
static_assert(sizeof(LaunchAttribute) == sizeof(CUlaunchAttribute) &&
              sizeof(LaunchConfig) == sizeof(CUlaunchConfig));
static_assert(offsetof(LaunchAttribute, value) == offsetof(CUlaunchAttribute, value));
static_assert(offsetof(LaunchConfig, block) == offsetof(CUlaunchConfig, blockDimX));
static_assert(offsetof(LaunchConfig, shared_bytes) == offsetof(CUlaunchConfig, sharedMemBytes));
static_assert(offsetof(LaunchConfig, stream) == offsetof(CUlaunchConfig, hStream));
static_assert(offsetof(LaunchConfig, attributes) == offsetof(CUlaunchConfig, attrs));
static_assert(offsetof(LaunchConfig, num_attributes) == offsetof(CUlaunchConfig, numAttrs));
static_assert(sizeof(CUdevice_attribute) == sizeof(DeviceAttribute));

}  // namespace
