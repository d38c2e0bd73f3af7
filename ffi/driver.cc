// Opening libcuda.so.1 and looking its entry points up. See driver.h.
#include "driver.h"

#include <dlfcn.h>

namespace jaxinfer::cuda {

namespace {

using GetProcAddress = Result (*)(const char* symbol, void** function, int version, uint64_t flags,
                                  int* status);

// Entry points are asked for in the version that our declarations match; the driver keeps old ones forever.
constexpr int kInterfaceVersion = 12000;

class Loader {
 public:
  explicit Loader(GetProcAddress get) : get_(get) {}

  template <typename Function>
  void required(const char* name, Function* function) {
    if (!optional(name, kInterfaceVersion, function) && missing_.empty()) missing_ = name;
  }

  template <typename Function>
  bool optional(const char* name, int version, Function* function) {
    void* address = nullptr;
    int status = 0;
    const Result result = get_(name, &address, version, 0, &status);
    *function = result == kSuccess ? reinterpret_cast<Function>(address) : nullptr;
    return *function != nullptr;
  }

  const std::string& missing() const { return missing_; }

 private:
  GetProcAddress get_;
  std::string missing_;
};

std::string describe_with(const Api& api, Result result, const char* call) {
  const char* name = nullptr;
  const char* text = nullptr;
  if (api.get_error_name != nullptr) api.get_error_name(result, &name);
  if (api.get_error_string != nullptr) api.get_error_string(result, &text);
  return std::string(call) + " failed: " + (name != nullptr ? name : std::to_string(result).c_str()) + ": " +
         (text != nullptr ? text : "unknown error");
}

std::string open(Driver* driver) {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* reason = dlerror();
    return std::string("no NVIDIA driver: ") +
           (reason != nullptr ? reason : "libcuda.so.1 cannot be opened") +
           ". Install the driver, or in a container give it access to the GPU (for example --gpus all).";
  }
  auto get = reinterpret_cast<GetProcAddress>(dlsym(library, "cuGetProcAddress_v2"));
  auto get_version = reinterpret_cast<Result (*)(int*)>(dlsym(library, "cuDriverGetVersion"));
  if (get_version != nullptr) get_version(&driver->version);
  if (get == nullptr || driver->version < kMinDriverVersion) {
    return "the NVIDIA driver is too old: it supports CUDA " + version_text(driver->version) +
           ", needed is " + version_text(kMinDriverVersion) + " or newer. Update the driver.";
  }
  Loader loader(get);
  Api& api = driver->api;
  loader.required("cuInit", &api.init);
  loader.required("cuDriverGetVersion", &api.driver_get_version);
  loader.required("cuGetErrorName", &api.get_error_name);
  loader.required("cuGetErrorString", &api.get_error_string);
  loader.required("cuDeviceGetCount", &api.device_get_count);
  loader.required("cuDeviceGet", &api.device_get);
  loader.required("cuDeviceGetName", &api.device_get_name);
  loader.required("cuDeviceGetAttribute", &api.device_get_attribute);
  loader.required("cuDevicePrimaryCtxRetain", &api.primary_ctx_retain);
  loader.required("cuCtxGetCurrent", &api.ctx_get_current);
  loader.required("cuCtxPushCurrent", &api.ctx_push_current);
  loader.required("cuCtxPopCurrent", &api.ctx_pop_current);
  loader.required("cuModuleLoadData", &api.module_load_data);
  loader.required("cuModuleUnload", &api.module_unload);
  loader.required("cuModuleGetFunction", &api.module_get_function);
  loader.required("cuFuncSetAttribute", &api.func_set_attribute);
  loader.required("cuLaunchKernelEx", &api.launch_kernel);
  loader.required("cuTensorMapEncodeTiled", &api.tensor_map_encode_tiled);
  loader.optional("cuFuncLoad", 12040, &api.func_load);
  if (!loader.missing().empty()) {
    return "the NVIDIA driver (CUDA " + version_text(driver->version) + ") lacks " + loader.missing();
  }
  if (const Result result = api.init(0); result != kSuccess) {
    return "the NVIDIA driver does not start: " + describe_with(api, result, "cuInit");
  }
  return "";
}

}  // namespace

const Driver& driver() {
  static const Driver* const instance = [] {
    auto* driver = new Driver{};  // never freed: handlers may still run while the process ends
    driver->error = open(driver);
    return driver;
  }();
  return *instance;
}

std::string describe(Result result, const char* call) {
  return result == kSuccess ? "" : describe_with(driver().api, result, call);
}

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

std::string compute_capability(Device device) {
  int major = 0, minor = 0;
  driver().api.device_get_attribute(&major, kComputeCapabilityMajor, device);
  driver().api.device_get_attribute(&minor, kComputeCapabilityMinor, device);
  return std::to_string(major) + "." + std::to_string(minor);
}

ScopedContext::ScopedContext(Context context) {
  Context current = nullptr;
  const Api& api = driver().api;
  // The executor has usually made it current already, and asking costs less than pushing.
  if (api.ctx_get_current(&current) == kSuccess && current == context) return;
  error_ = describe(api.ctx_push_current(context), "cuCtxPushCurrent");
  pushed_ = error_.empty();
}

ScopedContext::~ScopedContext() {
  Context popped = nullptr;
  if (pushed_) driver().api.ctx_pop_current(&popped);
}

}  // namespace jaxinfer::cuda
