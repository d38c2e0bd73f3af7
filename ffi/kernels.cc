// The registry of loaded kernels. See kernels.h.
#include "kernels.h"

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

namespace jaxinfer::cuda {

namespace {

using Key = std::pair<int32_t, std::string>;  // device ordinal, spec or lines of specs

struct KeyLess {
  using is_transparent = void;
  template <typename A, typename B>
  bool operator()(const A& a, const B& b) const {
    return a.first != b.first ? a.first < b.first : std::string_view(a.second) < std::string_view(b.second);
  }
};

// Everything here lives as long as the process: kernels may be running while it ends.
struct Registry {
  std::mutex mutex;  // never held while the loader or the driver runs
  Loader loader;
  std::map<Key, Kernel, KeyLess> kernels;                              // by one spec
  std::map<Key, std::unique_ptr<std::vector<Kernel>>, KeyLess> calls;  // by a call's specs
  std::map<int32_t, std::unique_ptr<DeviceInfo>> devices;
};

Registry& registry() {
  static auto* const instance = new Registry;
  return *instance;
}

DeviceInfo read_device(int32_t ordinal) {
  DeviceInfo info{};
  if (!driver().ok()) {
    info.error = driver().error;
    return info;
  }
  const Api& api = driver().api;
  info.error = describe(api.device_get(&info.device, ordinal), "cuDeviceGet");
  if (!info.error.empty()) return info;
  char name[256] = "";
  api.device_get_name(name, sizeof(name), info.device);
  api.device_get_attribute(&info.num_multiprocessors, kMultiprocessorCount, info.device);
  api.device_get_attribute(&info.max_smem_bytes, kMaxSharedMemoryPerBlockOptin, info.device);
  info.name = name;
  info.capability = compute_capability(info.device);
  info.can_start_early = can_start_early(std::stoi(info.capability));
  info.error = describe(api.primary_ctx_retain(&info.context, info.device), "cuDevicePrimaryCtxRetain");
  return info;
}

std::string load(const DeviceInfo& device, const CompiledKernel& compiled, Kernel* kernel, Module* module) {
  if (compiled.smem_bytes > device.max_smem_bytes) {
    return "kernel " + compiled.entry + " needs " + std::to_string(compiled.smem_bytes) +
           " bytes of shared memory per CTA, " + device.name + " has " +
           std::to_string(device.max_smem_bytes);
  }
  const ScopedContext scope(device.context);
  if (!scope.error().empty()) return scope.error();
  const Api& api = driver().api;
  *kernel = Kernel{nullptr,
                   device.context,
                   compiled.num_threads,
                   compiled.smem_bytes,
                   device.num_multiprocessors,
                   device.can_start_early,
                   compiled.tensor_maps,
                   compiled.kv_box_rows};
  if (auto error = describe(api.module_load_data(module, compiled.cubin.data()), "cuModuleLoadData");
      !error.empty()) {
    return error + " (kernel " + compiled.entry + " on " + device.name + " of capability " +
           device.capability + ")";
  }
  if (auto error = describe(api.module_get_function(&kernel->function, *module, compiled.entry.c_str()),
                            "cuModuleGetFunction");
      !error.empty()) {
    return error;
  }
  if (auto error =
          describe(api.func_set_attribute(kernel->function, kMaxDynamicSharedSizeBytes, compiled.smem_bytes),
                   "cuFuncSetAttribute");
      !error.empty()) {
    return error;
  }
  // With lazy loading the code would otherwise be copied at the first launch, which may be inside a graph
  // capture.
  return api.func_load == nullptr ? "" : describe(api.func_load(kernel->function), "cuFuncLoad");
}

std::string load_kernel(int32_t ordinal, const std::string& spec, Kernel* kernel) {
  Registry& all = registry();
  Loader loader;
  {
    const std::lock_guard<std::mutex> lock(all.mutex);
    if (const auto found = all.kernels.find(Key(ordinal, spec)); found != all.kernels.end()) {
      *kernel = found->second;
      return "";
    }
    loader = all.loader;
  }
  const DeviceInfo& device = device_info(ordinal);
  if (!device.error.empty()) return device.error;
  if (!loader)
    return "no compiler is registered: `import jaxinfer` in this process before running the program";
  std::string error;
  const CompiledKernel compiled = loader(spec, device.capability, &error);
  if (!error.empty()) return error;
  Module module = nullptr;
  error = load(device, compiled, kernel, &module);
  bool lost_race = false;
  if (error.empty()) {
    const std::lock_guard<std::mutex> lock(all.mutex);
    const auto [entry, inserted] = all.kernels.emplace(Key(ordinal, spec), *kernel);
    *kernel = entry->second;
    lost_race = !inserted;
  }
  if (module != nullptr && (lost_race || !error.empty())) {
    const ScopedContext scope(device.context);
    driver().api.module_unload(module);
  }
  return error;
}

}  // namespace

void set_loader(Loader loader) {
  const std::lock_guard<std::mutex> lock(registry().mutex);
  registry().loader = std::move(loader);
}

bool can_start_early(int major) {
  // Streams can be captured with such launches from 12.3 on.
  return major >= 9 && driver().version >= 12030;
}

const DeviceInfo& device_info(int32_t ordinal) {
  Registry& all = registry();
  {
    const std::lock_guard<std::mutex> lock(all.mutex);
    if (const auto found = all.devices.find(ordinal); found != all.devices.end()) return *found->second;
  }
  auto info = std::make_unique<DeviceInfo>(read_device(ordinal));
  const std::lock_guard<std::mutex> lock(all.mutex);
  return *all.devices.emplace(ordinal, std::move(info)).first->second;
}

std::string load_kernels(int32_t ordinal, std::string_view specs) {
  if (find_kernels(ordinal, specs) != nullptr) return "";
  auto kernels = std::make_unique<std::vector<Kernel>>();
  for (size_t begin = 0; begin < specs.size();) {
    const size_t end = std::min(specs.find('\n', begin), specs.size());
    Kernel kernel{};
    if (auto error = load_kernel(ordinal, std::string(specs.substr(begin, end - begin)), &kernel);
        !error.empty()) {
      return error;
    }
    kernels->push_back(kernel);
    begin = end + 1;
  }
  const std::lock_guard<std::mutex> lock(registry().mutex);
  registry().calls.emplace(Key(ordinal, std::string(specs)), std::move(kernels));
  return "";
}

const std::vector<Kernel>* find_kernels(int32_t ordinal, std::string_view specs) {
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.calls.find(std::pair<int32_t, std::string_view>(ordinal, specs));
  return found == all.calls.end() ? nullptr : found->second.get();
}

std::string launch(const Kernel& kernel, int64_t num_ctas, Stream stream, void** params, Start start,
                   Placement placement) {
  const ScopedContext scope(kernel.context);
  if (!scope.error().empty()) return scope.error();
  LaunchAttribute attributes[2] = {};
  LaunchConfig config{};
  config.attributes = attributes;
  if (start == Start::kEarly && kernel.can_start_early) {
    LaunchAttribute& early = attributes[config.num_attributes++];
    early.id = kProgrammaticStreamSerialization;
    early.value[0] = 1;
  }
  if (placement == Placement::kPairs && kernel.can_start_early) {
    LaunchAttribute& cluster = attributes[config.num_attributes++];
    cluster.id = kClusterDimension;
    cluster.value[0] = 2;
    cluster.value[1] = cluster.value[2] = 1;
  }
  config.grid[0] = static_cast<unsigned>(num_ctas);
  config.block[0] = static_cast<unsigned>(kernel.num_threads);
  config.grid[1] = config.grid[2] = config.block[1] = config.block[2] = 1;
  config.shared_bytes = static_cast<unsigned>(kernel.smem_bytes);
  config.stream = stream;
  return describe(driver().api.launch_kernel(&config, kernel.function, params, nullptr), "cuLaunchKernelEx");
}

}  // namespace jaxinfer::cuda
