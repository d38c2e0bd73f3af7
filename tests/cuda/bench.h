// Bandwidth and throughput of the kernels on batches of serving size, and the kernels that this needs.
#pragma once

#include <string>
#include <vector>

#include "device.h"
#include "problem.h"

namespace jaxinfer::test {

// Options of every benchmark; `--list` needs them without a GPU.
struct BenchCase {
  std::string name;
  Options options;
  bool decode;  // report TB/s of K and V rather than TFLOP/s
};
std::vector<BenchCase> make_bench_cases();

void run_benchmarks(const Kernels& kernels, const std::string& filter);

// Decode batches by schedule and way of merging.
void run_decode_benchmarks(const Kernels& kernels);
std::vector<Options> decode_bench_options();

// An Options without data: only the facts that specs depend on.
AttentionParams spec_params(const Options& options);

}  // namespace jaxinfer::test
