// The NVIDIA driver, opened when it is first needed: the few entry points of libcuda.so.1 that jaxinfer
// calls, declared here so that building needs no CUDA toolkit, and its errors as text. What is loaded and
// launched: kernels.cc.
#pragma once

#include <cstdint>
#include <string>

namespace jaxinfer {
struct TensorMap;  // params.h
}

namespace jaxinfer::cuda {

// Opaque handles and status of the driver API. Layouts and values are the driver's ABI
// (tests/cuda/driver_abi.cc).
using Result = int;  // CUresult; 0 is success
using Device = int;  // CUdevice
using Context = struct ContextHandle*;
using Module = struct ModuleHandle*;
using Function = struct FunctionHandle*;
using Stream = struct StreamHandle*;

constexpr Result kSuccess = 0;

enum DeviceAttribute : int {
  kMultiprocessorCount = 16,
  kComputeCapabilityMajor = 75,
  kComputeCapabilityMinor = 76,
  kMaxSharedMemoryPerBlockOptin = 97,
};

enum FunctionAttribute : int { kMaxDynamicSharedSizeBytes = 8 };

enum LaunchAttributeId : int { kClusterDimension = 4, kProgrammaticStreamSerialization = 6 };

struct LaunchAttribute {  // CUlaunchAttribute
  LaunchAttributeId id;
  int padding;
  int value[3];  // the first alone, or of three dimensions
  char unused[52];
};

struct LaunchConfig {  // CUlaunchConfig
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_bytes;
  Stream stream;
  LaunchAttribute* attributes;
  unsigned num_attributes;
};

// Of tensor maps: what jaxinfer uses of each enumeration.
enum TensorMapType : int { kMapFloat16 = 6, kMapBfloat16 = 9 };
enum TensorMapInterleave : int { kMapNoInterleave = 0 };
enum TensorMapSwizzle : int { kMapSwizzle128 = 3 };
enum TensorMapPromotion : int { kMapPromote128 = 2, kMapPromote256 = 3 };
enum TensorMapFill : int { kMapFillZeros = 0 };

// The oldest driver whose interface we use, as cuDriverGetVersion counts: 12.0.
constexpr int kMinDriverVersion = 12000;

struct Api {
  Result (*init)(unsigned flags);
  Result (*driver_get_version)(int* version);
  Result (*get_error_name)(Result error, const char** text);
  Result (*get_error_string)(Result error, const char** text);
  Result (*device_get_count)(int* count);
  Result (*device_get)(Device* device, int ordinal);
  Result (*device_get_name)(char* name, int size, Device device);
  Result (*device_get_attribute)(int* value, DeviceAttribute attribute, Device device);
  Result (*primary_ctx_retain)(Context* context, Device device);
  Result (*ctx_get_current)(Context* context);
  Result (*ctx_push_current)(Context context);
  Result (*ctx_pop_current)(Context* context);
  Result (*module_load_data)(Module* module, const void* image);
  Result (*module_unload)(Module module);
  Result (*module_get_function)(Function* function, Module module, const char* name);
  Result (*func_set_attribute)(Function function, FunctionAttribute attribute, int value);
  Result (*func_load)(Function function);  // null before driver 12.4
  Result (*launch_kernel)(const LaunchConfig* config, Function function, void** params, void** extra);
  Result (*tensor_map_encode_tiled)(TensorMap* map, TensorMapType type, uint32_t rank, void* address,
                                    const uint64_t* dims, const uint64_t* strides, const uint32_t* box,
                                    const uint32_t* element_strides, TensorMapInterleave interleave,
                                    TensorMapSwizzle swizzle, TensorMapPromotion promotion,
                                    TensorMapFill fill);
};

// The driver of this machine, or why there is none; settled once.
struct Driver {
  Api api;
  int version;        // 13000 is 13.0; 0 without a driver
  std::string error;  // empty when the driver can be used

  bool ok() const { return error.empty(); }
};
const Driver& driver();

// "" for success, else "<call> failed: CUDA_ERROR_X: description".
std::string describe(Result result, const char* call);

// "12.4" of 12040, as cuDriverGetVersion counts.
std::string version_text(int version);

// "9.0".
std::string compute_capability(Device device);

// Makes the device's primary context (which XLA uses too) current for a scope.
class ScopedContext {
 public:
  explicit ScopedContext(Context context);
  ~ScopedContext();
  ScopedContext(const ScopedContext&) = delete;
  ScopedContext& operator=(const ScopedContext&) = delete;
  const std::string& error() const { return error_; }

 private:
  bool pushed_ = false;
  std::string error_;
};

}  // namespace jaxinfer::cuda
