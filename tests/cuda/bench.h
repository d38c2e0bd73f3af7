// Bandwidth and throughput of the kernels on batches of serving size, and the kernels that this needs.
#pragma once

#include <random>
#include <string>
#include <vector>

#include "device.h"
#include "problem.h"

namespace jaxinfer::test {

// Options of every benchmark; `--list` needs them without a GPU.
struct BenchCase {
  std::string name;
  Options options;
};
std::vector<BenchCase> make_bench_cases();

void run_benchmarks(const Kernels& kernels, const std::string& filter);

// Decode batches by schedule and way of merging.
void run_decode_benchmarks(const Kernels& kernels);
std::vector<Options> decode_bench_options();

// 64 MB of random normal numbers.
inline Bytes random_pattern(DType dtype) {
  Bytes bytes(size_t{64} << 20);
  std::mt19937 rng(3);
  std::normal_distribution<float> normal;
  std::vector<float> table(1 << 16);
  for (float& x : table) x = normal(rng);
  const size_t size = element_size(dtype);
  for (size_t i = 0; i < bytes.size() / size; ++i)
    put_element(dtype, table[rng() & 0xffff], &bytes[i * size]);
  return bytes;
}

// An Options without data: only the facts that specs depend on.
AttentionParams spec_params(const Options& options);

}  // namespace jaxinfer::test
