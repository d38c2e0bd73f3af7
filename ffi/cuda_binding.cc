// What Python sees of the GPU side: the kernels' sources, facts about driver and devices, and registering the
// loader.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>

#include "kernel_sources.h"
#include "kernels.h"

namespace nb = nanobind;

namespace jaxinfer {

namespace {

// Calls the Python loader. Threads of XLA call this without the GIL and without any lock of ours.
cuda::CompiledKernel call_loader(nb::handle loader, const std::string& spec, const std::string& capability,
                                 std::string* error) {
  cuda::CompiledKernel kernel{};
  if (!Py_IsInitialized()) {
    *error = "the Python interpreter, which compiles kernels, is gone";
    return kernel;
  }
  const nb::gil_scoped_acquire gil;
  try {
    const auto result = nb::cast<nb::tuple>(loader(spec, capability));
    const auto cubin = nb::cast<nb::bytes>(result[0]);
    kernel.cubin.assign(cubin.c_str(), cubin.size());
    kernel.entry = nb::cast<std::string>(result[1]);
    kernel.num_threads = nb::cast<int32_t>(result[2]);
    kernel.smem_bytes = nb::cast<int32_t>(result[3]);
    kernel.tensor_maps = nb::cast<bool>(result[4]);
    kernel.kv_box_rows = nb::cast<int32_t>(result[5]);
  } catch (nb::python_error& exception) {
    // The traceback is of no use to a caller of a compiled program; the message is written for them.
    *error = nb::cast<std::string>(nb::str(exception.value()));
  } catch (const std::exception& exception) {
    *error = std::string("the kernel loader returned something unexpected: ") + exception.what();
  }
  if (error->empty() && kernel.cubin.empty()) *error = "the kernel loader returned an empty cubin";
  return kernel;
}

nb::dict driver_info() {
  nb::dict info;
  const cuda::Driver& driver = cuda::driver();
  nb::list devices;
  int count = 0;
  if (driver.ok()) driver.api.device_get_count(&count);
  for (int i = 0; i < count; ++i) {
    nb::dict device;
    char name[256] = "";
    int multiprocessors = 0;
    cuda::Device handle;
    if (driver.api.device_get(&handle, i) != cuda::kSuccess) continue;
    driver.api.device_get_name(name, sizeof(name), handle);
    driver.api.device_get_attribute(&multiprocessors, cuda::kMultiprocessorCount, handle);
    device["name"] = std::string(name);
    device["compute_capability"] = cuda::compute_capability(handle);
    device["multiprocessors"] = multiprocessors;
    devices.append(device);
  }
  info["version"] = cuda::version_text(driver.version);
  info["error"] = driver.error;
  info["devices"] = devices;
  return info;
}

}  // namespace

void bind_cuda(nb::module_& m) {
  m.def(
      "set_kernel_loader",
      [](nb::callable loader) {
        // Kept for the life of the process: releasing it would need the GIL of an interpreter that may be
        // gone.
        const nb::handle kept = loader.release();
        cuda::set_loader([kept](const std::string& spec, const std::string& capability, std::string* error) {
          return call_loader(kept, spec, capability, error);
        });
      },
      nb::arg("loader"),
      "loader(spec_json, compute_capability) -> (cubin, kernel name, threads per CTA, bytes of shared "
      "memory, whether its last parameter is tensor maps, KV rows of one copy by them).");
  m.def(
      "kernel_sources",
      [] {
        nb::dict sources;
        for (const KernelSource& source : kernel_sources()) {
          sources[nb::str(source.name)] = nb::str(source.text.data(), source.text.size());
        }
        return sources;
      },
      "The headers of the GPU kernels: text by the name that #include uses.");
  m.def("can_start_early", &cuda::can_start_early, nb::arg("major"),
        "Whether devices of this compute capability start a kernel while the one before it runs.");
  m.def("driver_info", &driver_info,
        "Driver version, devices, and an error text where there is no usable driver.");
  m.def(
      "load_kernels",
      [](int32_t device, const std::string& specs) {
        std::string error;
        {
          const nb::gil_scoped_release release;  // the loader takes it again
          error = cuda::load_kernels(device, specs);
        }
        if (!error.empty()) throw std::runtime_error(error);
      },
      nb::arg("device"), nb::arg("specs"), "Compiles and loads kernels, one spec per line, on a device.");
}

}  // namespace jaxinfer
