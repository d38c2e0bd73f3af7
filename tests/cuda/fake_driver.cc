// A libcuda.so.1 that does nothing, for tests of ffi/driver.cc and ffi/kernels.cc on machines without a GPU:
// two devices of the architecture in FAKE_CUDA_ARCH, modules that remember their image, and a count of what
// was loaded. g++ -std=c++17 -shared -fPIC fake_driver.cc -o libcuda.so.1
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

int g_context = 1;
thread_local void* t_current = nullptr;
std::atomic<int> g_loaded{0};

int arch() {
  const char* text = std::getenv("FAKE_CUDA_ARCH");
  return text != nullptr ? std::atoi(text) : 90;
}

int ok_init(unsigned) {
  return 0;
}
int version(int* out) {
  return *out = 13000, 0;
}
int error_text(int, const char** out) {
  return *out = "FAKE_ERROR", 0;
}
int count(int* out) {
  return *out = 2, 0;
}
int get(int* device, int ordinal) {
  return *device = ordinal, ordinal < 2 ? 0 : 101;
}
int name(char* out, int size, int) {
  return std::snprintf(out, size, "Fake"), 0;
}
int attribute(int* out, int which, int) {
  *out = which == 75 ? arch() / 10 : which == 76 ? arch() % 10 : which == 16 ? 132 : 232448;
  return 0;
}
int retain(void** context, int) {
  return *context = &g_context, 0;
}
int current(void** context) {
  return *context = t_current, 0;
}
int push(void* context) {
  return t_current = context, 0;
}
int pop(void** context) {
  return *context = t_current, t_current = nullptr, 0;
}
int load(void** module, const void* image) {
  if (t_current == nullptr) return 201;  // no context
  if (std::memcmp(image,
                  "\x7f"
                  "ELF",
                  4) != 0)
    return 200;
  ++g_loaded;
  return *module = const_cast<void*>(image), 0;
}
int unload(void*) {
  return --g_loaded, 0;
}
int function(void** out, void* module, const char*) {
  return *out = module, 0;
}
int set_attribute(void*, int, int) {
  return 0;
}
int func_load(void*) {
  return 0;
}
int launch(const void*, void*, void**, void**) {
  return 0;
}

int encode(void*, int, unsigned, void*, const void*, const void*, const void*, const void*, int, int, int,
           int) {
  return 0;
}

struct Entry {
  const char* name;
  void* address;
};
const Entry kEntries[] = {
    {"cuInit", reinterpret_cast<void*>(ok_init)},
    {"cuDriverGetVersion", reinterpret_cast<void*>(version)},
    {"cuGetErrorName", reinterpret_cast<void*>(error_text)},
    {"cuGetErrorString", reinterpret_cast<void*>(error_text)},
    {"cuDeviceGetCount", reinterpret_cast<void*>(count)},
    {"cuDeviceGet", reinterpret_cast<void*>(get)},
    {"cuDeviceGetName", reinterpret_cast<void*>(name)},
    {"cuDeviceGetAttribute", reinterpret_cast<void*>(attribute)},
    {"cuDevicePrimaryCtxRetain", reinterpret_cast<void*>(retain)},
    {"cuCtxGetCurrent", reinterpret_cast<void*>(current)},
    {"cuCtxPushCurrent", reinterpret_cast<void*>(push)},
    {"cuCtxPopCurrent", reinterpret_cast<void*>(pop)},
    {"cuModuleLoadData", reinterpret_cast<void*>(load)},
    {"cuModuleUnload", reinterpret_cast<void*>(unload)},
    {"cuModuleGetFunction", reinterpret_cast<void*>(function)},
    {"cuFuncSetAttribute", reinterpret_cast<void*>(set_attribute)},
    {"cuFuncLoad", reinterpret_cast<void*>(func_load)},
    {"cuLaunchKernelEx", reinterpret_cast<void*>(launch)},
    {"cuTensorMapEncodeTiled", reinterpret_cast<void*>(encode)},
};

}  // namespace

extern "C" int cuDriverGetVersion(int* out) {
  return version(out);
}
extern "C" int fake_loaded_modules() {
  return g_loaded;
}
extern "C" int cuGetProcAddress_v2(const char* symbol, void** address, int, uint64_t, int* status) {
  for (const Entry& entry : kEntries) {
    if (std::strcmp(entry.name, symbol) == 0) return *address = entry.address, *status = 0, 0;
  }
  return *address = nullptr, *status = 1, 500;
}
