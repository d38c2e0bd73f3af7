// See bench.h.
#include "bench.h"

#include <algorithm>
#include <random>

#include "bench_run.h"

namespace jaxinfer::test {

namespace {

constexpr uint32_t kCausal = kRuleSoftmax | kRuleCausal;

// Lengths drawn once, heavily skewed: most requests short, a few very long.
std::vector<std::pair<int, int>> skewed(int batch, int longest) {
  std::mt19937 rng(7);
  std::vector<std::pair<int, int>> rows;
  std::lognormal_distribution<double> length(6.0, 1.2);
  for (int i = 0; i < batch; ++i) rows.push_back({1, std::clamp(static_cast<int>(length(rng)), 16, longest)});
  rows[batch / 2].second = longest;
  return rows;
}

void run_one(const Kernels& kernels, const BenchCase& bench) {
  running() = bench.name;
  BenchRun run(bench.options);
  run.make_plan(Schedule::kRuns, false);
  const double us = run.time(kernels, Merge::kDependent);
  std::printf("BENCH %-44s %9.1f us  %6.3f TB/s of K,V  %6.1f TFLOP/s  slots %d merges %d\n",
              bench.name.c_str(), us, run.bytes() / us * 1e-6, run.flops() / us * 1e-6, run.num_slots(),
              run.num_merges());
  std::fflush(stdout);
}

}  // namespace

AttentionParams spec_params(const Options& o) {
  AttentionParams a{};
  static const int32_t kNotNull = 0;
  a.kv_indices = o.contiguous ? nullptr : &kNotNull;
  a.dtype = o.dtype;
  a.num_qo_heads = o.num_qo_heads;
  a.num_kv_heads = o.num_kv_heads;
  a.num_layers = 1;
  a.head_dim_qk = o.head_dim_qk;
  a.head_dim_vo = o.head_dim_vo;
  a.variant.rules = o.rules;
  a.format.num_classes = static_cast<int32_t>(o.classes.size());
  for (size_t c = 0; c < o.classes.size(); ++c) a.format.classes[c] = class_format(o, c);
  return a;
}

std::vector<BenchCase> make_bench_cases() {
  std::vector<BenchCase> all;
  auto make = [&](const std::string& name, int qk, int vo, TileClass cls, int num_ctas, int qo, int kv,
                  int page_size, std::vector<std::pair<int, int>> rows, uint32_t rules = kCausal,
                  DType dtype = DType::kBF16) {
    Options o;
    o.dtype = dtype;
    o.head_dim_qk = qk;
    o.head_dim_vo = vo;
    o.classes = {cls};
    o.num_ctas = num_ctas;
    o.num_qo_heads = qo;
    o.num_kv_heads = kv;
    o.contiguous = page_size == 0;
    o.page_size = page_size == 0 ? 1 : page_size;
    o.rows = std::move(rows);
    o.padding = 0;
    o.rules = rules;
    all.push_back({name, o});
  };
  using Rows = std::vector<std::pair<int, int>>;
  const TileClass t1{1, true}, t16{16, true}, t32{32, true}, t64{64, true}, t128{128, false};
  make("decode 64x2048 page16 t16", 128, 128, t16, 264, 32, 8, 16, Rows(64, {1, 2048}));
  make("decode 64x2048 page1 t16", 128, 128, t16, 264, 32, 8, 1, Rows(64, {1, 2048}));
  make("decode 64x8192 page16 t16", 128, 128, t16, 264, 32, 8, 16, Rows(64, {1, 8192}));
  make("decode 64x2048 page16 t32", 128, 128, t32, 264, 32, 8, 16, Rows(64, {1, 2048}));
  make("decode 64x2048 page16 t64", 128, 128, t64, 264, 32, 8, 16, Rows(64, {1, 2048}));
  make("decode 64x2048 page16 t1 bf16", 128, 128, t1, 264, 32, 8, 16, Rows(64, {1, 2048}));
  make("decode 64x2048 page16 t1 f32", 128, 128, t1, 264, 32, 8, 16, Rows(64, {1, 2048}), kCausal,
       DType::kF32);
  make("decode 64x2048 page16 t1 bf16 32/32", 128, 128, t1, 264, 32, 32, 16, Rows(16, {1, 2048}));
  make("decode 16x2048 page16 t16 32/32", 128, 128, t16, 264, 32, 32, 16, Rows(16, {1, 2048}));
  make("decode 64x2048 page16 t16 64/8", 128, 128, t16, 264, 64, 8, 16, Rows(64, {1, 2048}));
  make("decode 64x2048 page16 t16 soft cap", 128, 128, t16, 264, 32, 8, 16, Rows(64, {1, 2048}),
       kCausal | kRuleSoftCap);
  make("decode 64x2048 page16 t16 d64", 64, 64, t16, 264, 32, 8, 16, Rows(64, {1, 2048}));
  make("decode 64x2048 page16 t16 d256 132", 256, 256, t16, 132, 16, 8, 16, Rows(64, {1, 2048}));
  make("decode 64 skewed 32768 page16 t16", 128, 128, t16, 264, 32, 8, 16, skewed(64, 32768));
  make("decode 16 skewed 5573 page16 t16", 128, 128, t16, 264, 32, 8, 16, skewed(16, 5573));
  make("decode 1x1024 page16 t16", 128, 128, t16, 264, 32, 8, 16, Rows(1, {1, 1024}));
  make("decode 1x32768 page16 t16", 128, 128, t16, 264, 32, 8, 16, Rows(1, {1, 32768}));
  make("verify 64x(4,2048) page16 t16", 128, 128, t16, 264, 32, 8, 16, Rows(64, {4, 2048}));
  make("verify 64x(8,2048) page16 t32", 128, 128, t32, 264, 32, 8, 16, Rows(64, {8, 2048}));
  make("verify 64x(16,2048) page16 t64", 128, 128, t64, 264, 32, 8, 16, Rows(64, {16, 2048}));
  make("prefill 4x4096 causal contiguous", 128, 128, t128, 264, 32, 8, 0, Rows(4, {4096, 4096}));
  make("prefill 4x4096 causal contiguous 132", 128, 128, t128, 132, 32, 8, 0, Rows(4, {4096, 4096}));
  make("prefill 4x4096 causal page16", 128, 128, t128, 264, 32, 8, 16, Rows(4, {4096, 4096}));
  make("prefill 4x4096 causal page1", 128, 128, t128, 264, 32, 8, 1, Rows(4, {4096, 4096}));
  make("prefill 4x4096 full contiguous", 128, 128, t128, 264, 32, 8, 0, Rows(4, {4096, 4096}), kRuleSoftmax);
  make("prefill 1x16384 causal page16", 128, 128, t128, 264, 32, 8, 16, Rows(1, {16384, 16384}));
  make("prefill 4x4096 causal page16 t64", 128, 128, t64, 264, 32, 8, 16, Rows(4, {4096, 4096}));
  make("prefill 4x4096 causal page16 soft cap", 128, 128, t128, 264, 32, 8, 16, Rows(4, {4096, 4096}),
       kCausal | kRuleSoftCap);
  make("prefill 4x4096 causal page16 d64", 64, 64, t128, 264, 32, 8, 16, Rows(4, {4096, 4096}));
  make("prefill 4x4096 causal page16 d256", 256, 256, t128, 132, 16, 4, 16, Rows(4, {4096, 4096}));
  make("prefill 4x4096 causal page16 d192x128", 192, 128, t128, 264, 32, 32, 16, Rows(4, {4096, 4096}));
  return all;
}

void run_benchmarks(const Kernels& kernels, const std::string& filter) {
  for (const BenchCase& bench : make_bench_cases()) {
    if (bench.name.find(filter) != std::string::npos) run_one(kernels, bench);
  }
}

}  // namespace jaxinfer::test
