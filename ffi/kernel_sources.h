// The texts of the GPU kernels' headers, embedded when the library is built (embed_sources.cmake).
#pragma once

#include <string>
#include <vector>

namespace jaxinfer {

struct KernelSource {
  const char* name;  // as #include names it, relative to csrc: "kernels/merge.cuh"
  std::string text;
};
std::vector<KernelSource> kernel_sources();

}  // namespace jaxinfer
