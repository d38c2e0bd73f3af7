// Loaded GPU kernels by device and spec. Compiling is a callback's affair (jaxinfer.jit registers one); this
// file knows neither Python nor XLA.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "driver.h"

namespace jaxinfer::cuda {

// What the loader returns for one spec.
struct CompiledKernel {
  std::string cubin;
  std::string entry;    // name of the kernel in the cubin
  int32_t num_threads;  // per CTA
  int32_t smem_bytes;   // dynamic shared memory per CTA
  bool tensor_maps;     // the last parameter is TensorMaps
  int32_t kv_box_rows;  // KV rows of one copy by them; 0: K and V have no maps
};

// Compiles `spec` for devices of a compute capability ("9.0"); on failure fills `error` and returns what it
// likes. Called without any lock held and from any thread.
using Loader =
    std::function<CompiledKernel(const std::string& spec, const std::string& capability, std::string* error)>;
void set_loader(Loader loader);

// A kernel that is ready to be launched on its device.
struct Kernel {
  Function function;
  Context context;
  int32_t num_threads;
  int32_t smem_bytes;
  int32_t num_multiprocessors;  // of the device
  bool can_start_early;         // the device and its driver know Start::kEarly, captured or not
  bool tensor_maps;             // see CompiledKernel
  int32_t kv_box_rows;
};

// When a kernel may start: when what was launched before it on the stream has ended, or earlier, because it
// waits on the GPU itself before it reads anything of the launch before, and before it ends (9.0 on;
// elsewhere as kAfterAll).
enum class Start { kAfterAll, kEarly };

// Whether devices of this compute capability (its major part), with the driver of this machine, know
// Start::kEarly.
bool can_start_early(int major);

// Facts about a device, read once.
struct DeviceInfo {
  Device device;
  Context context;  // the primary one
  std::string name;
  std::string capability;  // "9.0"
  int32_t num_multiprocessors;
  int32_t max_smem_bytes;  // per CTA
  bool can_start_early;
  std::string error;  // empty when the device can be used
};
const DeviceInfo& device_info(int32_t ordinal);

// Loads the kernels of `specs`, one spec per line, on a device; "" or an error. Cheap when they are loaded
// already.
std::string load_kernels(int32_t ordinal, std::string_view specs);

// The loaded kernels of `specs`, in the order of the lines, or null when load_kernels has not run. They stay
// loaded.
const std::vector<Kernel>* find_kernels(int32_t ordinal, std::string_view specs);

// Which CTAs run on neighbouring multiprocessors: none in particular, or 2c and 2c + 1, of an even number, on
// devices that know clusters (those that also know Start::kEarly).
enum class Placement { kAny, kPairs };

// Launches on a stream of the kernel's device; never allocates or synchronises. "" or an error.
std::string launch(const Kernel& kernel, int64_t num_ctas, Stream stream, void** params,
                   Start start = Start::kAfterAll, Placement placement = Placement::kAny);

}  // namespace jaxinfer::cuda
