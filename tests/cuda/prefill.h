// The warpgroup kernel from the kernel tests: its specs, and launches with tensor maps as the FFI handler
// makes them.
#pragma once

#include <fstream>
#include <map>
#include <sstream>
#include <string>

#include "device.h"
#include "problem.h"
#include "tensor_maps.h"

namespace jaxinfer::test {

// What the copy engine can bring of a page at once; the same rule as jaxinfer.jit.select's.
inline int page_box(const AttentionParams& a) {
  if (a.kv_indices == nullptr) return 0;
  return a.page_size % 16 == 0 ? 16 : a.page_size % 8 == 0 ? 8 : 0;
}

// The spec of a class as attention_wgmma.
inline std::string wgmma_spec(const AttentionParams& a, int cls) {
  std::string spec = attention_spec(a, cls);
  spec.replace(spec.find("attention_mma"), std::string("attention_mma").size(), "attention_wgmma");
  spec.pop_back();
  return spec + ",\"page_box\":" + std::to_string(page_box(a)) + "}";
}

// The spec of a class as it is run: small tiles by the portable kernel, as jaxinfer.jit.render says.
inline std::string class_spec(const AttentionParams& a, int cls) {
  const int tile = a.format.classes[cls].tile;
  const bool is_single = tile == 64 && page_box(a) > 0 && padded_head_dim(a.head_dim_qk) == 128 &&
                         padded_head_dim(a.head_dim_vo) == 128;
  return tile >= 128 || is_single ? wgmma_spec(a, cls) : attention_spec(a, cls);
}

// The kernels of one folder, and for how many KV rows those that take tensor maps want them.
struct PrefillKernels {
  std::string label;  // of results
  Kernels kernels;
  std::map<std::string, int> box_rows;  // by spec

  PrefillKernels(const std::string& folder, const std::string& label) : label(label), kernels(folder) {
    std::ifstream in(folder + "/manifest.tsv");
    std::string line;
    while (std::getline(in, line)) {
      std::istringstream fields(line);
      std::string spec, skipped, maps, rows;
      std::getline(fields, spec, '\t');
      for (int i = 0; i < 4; ++i) std::getline(fields, skipped, '\t');
      std::getline(fields, maps, '\t');
      std::getline(fields, rows, '\t');
      if (maps == "1") box_rows[spec] = std::stoi(rows);
    }
  }
  bool has(const std::string& spec) const { return box_rows.count(spec) != 0; }
};

// The launches of one attention call whose large tiles run the warpgroup kernel.
inline void launch_wgmma(const PrefillKernels& build, AttentionParams params, cudaStream_t stream,
                         Merge merge) {
  int unused[2] = {0, 0};
  for (int cls = params.format.num_classes - 1; cls >= 0; --cls) {
    const std::string spec = class_spec(params, cls);
    TensorMaps maps;
    const std::string error = build.has(spec) ? cuda::make_tensor_maps(params, params.format.classes[cls],
                                                                       build.box_rows.at(spec), &maps)
                                              : "";
    if (!error.empty()) {
      std::printf("FAIL in '%s': %s\n", running().c_str(), error.c_str());
      std::exit(2);
    }
    void* arguments[] = {&params, &cls, unused, &maps};
    launch_class(build.kernels.at(spec), params, cls, arguments, stream, merge);
  }
  launch_merge(build.kernels, params, stream, merge);
}

// Options of the benchmark; `--list` needs their specs without a GPU.
struct PrefillBench {
  std::string name;
  Options options;
  bool portable;  // measure the portable kernel, too
};
std::vector<PrefillBench> make_prefill_benches();
// Measures with every build that has a row's kernel. `in_pairs`: differences with confidence intervals.
void run_prefill_benches(const std::vector<PrefillKernels>& builds, const std::string& filter, bool in_pairs);

}  // namespace jaxinfer::test
