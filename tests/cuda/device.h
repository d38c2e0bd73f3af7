// GPU side of the kernel test: specs of kernels, loading their cubins, launching a problem.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "params.h"

namespace jaxinfer::test {

// What is running, for the message of an error that ends the program.
inline std::string& running() {
  static std::string name;
  return name;
}

#define CHECK_CUDA(call)                                                                                   \
  do {                                                                                                     \
    const cudaError_t status = (call);                                                                     \
    if (status != cudaSuccess) {                                                                           \
      std::printf("FAIL in '%s': %s:%d %s: %s\n", ::jaxinfer::test::running().c_str(), __FILE__, __LINE__, \
                  #call, cudaGetErrorString(status));                                                      \
      std::exit(2);                                                                                        \
    }                                                                                                      \
  } while (0)

inline int padded_head_dim(int d) {
  for (const int padded : {64, 96, 128, 192, 256}) {
    if (d <= padded) return padded;
  }
  std::abort();
}

inline const char* dtype_name(DType dtype) {
  return dtype == DType::kF32 ? "float32" : dtype == DType::kF16 ? "float16" : "bfloat16";
}

// The spec of one kernel as JSON, in the form that jaxinfer.jit.spec reads.
inline std::string attention_spec(const AttentionParams& a, int cls) {
  const ClassFormat& format = a.format.classes[cls];
  std::ostringstream s;
  s << "{\"kernel\":\"" << (format.tile == 1 ? "attention_simt" : "attention_mma") << "\",\"dtype\":\""
    << dtype_name(a.dtype) << "\",\"head_dim_qk\":" << padded_head_dim(a.head_dim_qk)
    << ",\"head_dim_vo\":" << padded_head_dim(a.head_dim_vo) << ",\"tile\":" << format.tile
    << ",\"packed\":" << (format.packed ? "true" : "false")
    << ",\"contiguous\":" << (a.kv_indices == nullptr ? "true" : "false") << ",\"rules\":" << a.variant.rules
    << "}";
  return s.str();
}
inline std::string merge_spec(const AttentionParams& a) {
  std::ostringstream s;
  s << "{\"kernel\":\"merge\",\"dtype\":\"" << dtype_name(a.dtype)
    << "\",\"head_dim_vo\":" << padded_head_dim(a.head_dim_vo)
    << ",\"rules\":" << (a.variant.rules & kRuleSoftmax) << "}";
  return s.str();
}
inline std::string append_spec(DType dtype) {
  return std::string("{\"kernel\":\"append\",\"dtype\":\"") + dtype_name(dtype) + "\"}";
}

struct LoadedKernel {
  cudaKernel_t kernel;
  int num_threads;
  int smem_bytes;
};

// Kernels that build.py compiled: a manifest of "spec<TAB>cubin<TAB>entry<TAB>threads<TAB>bytes" lines. Each
// is loaded when it is first needed, because a sanitizer takes long to load one.
class Kernels {
 public:
  explicit Kernels(const std::string& folder) {
    std::ifstream in(folder + "/manifest.tsv");
    std::string line;
    while (std::getline(in, line)) {
      std::istringstream fields(line);
      std::string spec, file, entry, threads, bytes;
      std::getline(fields, spec, '\t');
      std::getline(fields, file, '\t');
      std::getline(fields, entry, '\t');
      std::getline(fields, threads, '\t');
      std::getline(fields, bytes, '\t');
      built_[spec] = Built{folder + "/" + file, entry, std::stoi(threads), std::stoi(bytes)};
    }
  }
  bool has(const std::string& spec) const { return built_.count(spec) != 0; }
  const LoadedKernel& at(const std::string& spec) const {
    const auto built = built_.find(spec);
    if (built == built_.end()) {
      std::printf("FAIL no kernel %s: run build.py again\n", spec.c_str());
      std::exit(2);
    }
    const auto [found, is_new] = loaded_.try_emplace(spec);
    if (is_new) found->second = load(built->second);
    return found->second;
  }

 private:
  struct Built {
    std::string path;
    std::string entry;
    int num_threads;
    int smem_bytes;
  };

  static LoadedKernel load(const Built& built) {
    LoadedKernel loaded{nullptr, built.num_threads, built.smem_bytes};
    cudaLibrary_t library;
    CHECK_CUDA(
        cudaLibraryLoadFromFile(&library, built.path.c_str(), nullptr, nullptr, 0, nullptr, nullptr, 0));
    CHECK_CUDA(cudaLibraryGetKernel(&loaded.kernel, library, built.entry.c_str()));
    CHECK_CUDA(cudaFuncSetAttribute(reinterpret_cast<const void*>(loaded.kernel),
                                    cudaFuncAttributeMaxDynamicSharedMemorySize, loaded.smem_bytes));
    return loaded;
  }

  std::map<std::string, Built> built_;
  mutable std::map<std::string, LoadedKernel> loaded_;
};

inline void launch(const LoadedKernel& kernel, int64_t grid, void** arguments, cudaStream_t stream) {
  CHECK_CUDA(cudaLaunchKernel(reinterpret_cast<const void*>(kernel.kernel), dim3(static_cast<unsigned>(grid)),
                              dim3(kernel.num_threads), arguments, kernel.smem_bytes, stream));
}

// When the kernel that merges partial states may start.
enum class Merge {
  kAfter,      // when the attention kernels have ended, which run one after the other then
  kDependent,  // before that, to wait on the GPU; attention kernels run side by side
  kNone,       // never: what attention alone takes
};
inline const char* merge_name(Merge merge) {
  constexpr const char* kNames[] = {"after", "pdl", "none"};
  return kNames[static_cast<int>(merge)];
}

// `dependent`: may start before earlier kernels end. `pairs`: CTAs 2c and 2c + 1 on neighbouring
// multiprocessors.
inline void launch_early(const LoadedKernel& kernel, int64_t grid, void** arguments, cudaStream_t stream,
                         bool dependent, bool pairs) {
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(grid));
  config.blockDim = dim3(kernel.num_threads);
  config.dynamicSmemBytes = kernel.smem_bytes;
  config.stream = stream;
  config.attrs = attributes;
  if (dependent) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  if (pairs) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = 2;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  }
  CHECK_CUDA(cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel.kernel), arguments));
}

// The merge after the kernels of a call's classes.
inline void launch_merge(const Kernels& kernels, AttentionParams params, cudaStream_t stream, Merge merge) {
  if (merge == Merge::kNone || params.format.merge_capacity <= 0 || params.format.slot_capacity <= 0) return;
  int unused[2] = {0, 0};
  const LoadedKernel& kernel = kernels.at(merge_spec(params));
  const int64_t warps =
      int64_t{params.format.merge_capacity} * params.num_qo_heads * ((params.head_dim_vo + 127) / 128);
  const int64_t per_cta = kernel.num_threads / 32;
  void* arguments[] = {&params, unused};
  const int64_t grid = std::min<int64_t>((warps + per_cta - 1) / per_cta, 1056);
  launch_early(kernel, grid, arguments, stream, merge == Merge::kDependent, false);
}

// A class's launch; the first one of a call waits for everything before.
inline void launch_class(const LoadedKernel& kernel, const AttentionParams& params, int cls, void** arguments,
                         cudaStream_t stream, Merge merge) {
  const bool first = cls == params.format.num_classes - 1;
  launch_early(kernel, params.format.classes[cls].num_ctas, arguments, stream,
               !first && merge != Merge::kAfter, params.runs_in_pairs(cls));
}

// The launches of one attention call, in the order of the FFI handler.
inline void launch_attention(const Kernels& kernels, AttentionParams params, cudaStream_t stream,
                             Merge merge) {
  int unused[2] = {0, 0};
  for (int cls = params.format.num_classes - 1; cls >= 0; --cls) {
    void* arguments[] = {&params, &cls, unused};
    launch_class(kernels.at(attention_spec(params, cls)), params, cls, arguments, stream, merge);
  }
  launch_merge(kernels, params, stream, merge);
}

// Device memory that lives as long as the object; not a byte more than asked for, so that memcheck sees every
// access beyond.
class Buffer {
 public:
  explicit Buffer(size_t bytes) : bytes_(bytes) {
    CHECK_CUDA(cudaMalloc(&data_, std::max<size_t>(bytes, 1)));
  }
  Buffer(const void* from, size_t bytes) : Buffer(bytes) {
    if (bytes > 0) CHECK_CUDA(cudaMemcpy(data_, from, bytes, cudaMemcpyHostToDevice));
  }
  template <class T>
  explicit Buffer(const std::vector<T>& from) : Buffer(from.data(), from.size() * sizeof(T)) {}
  Buffer(const Buffer&) = delete;
  Buffer(Buffer&& other) : data_(other.data_), bytes_(other.bytes_) { other.data_ = nullptr; }
  ~Buffer() { cudaFree(data_); }
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  size_t bytes() const { return bytes_; }
  void fill(int byte) { CHECK_CUDA(cudaMemset(data_, byte, bytes_)); }
  void read(void* to) const { CHECK_CUDA(cudaMemcpy(to, data_, bytes_, cudaMemcpyDeviceToHost)); }

 private:
  void* data_ = nullptr;
  size_t bytes_;
};

}  // namespace jaxinfer::test
