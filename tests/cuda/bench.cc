// See bench.h. Inputs are random and rotated, so that no launch finds its K and V in L2.
#include "bench.h"

#include <algorithm>
#include <cmath>
#include <random>

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

// Fills device memory with random bf16 (or fp16, fp32) normal numbers: a pattern of 64 MB, repeated.
void fill_random(const Buffer& buffer, DType dtype) {
  static std::vector<uint8_t> patterns[3];
  std::vector<uint8_t>& pattern = patterns[static_cast<int>(dtype)];
  if (pattern.empty()) {
    pattern.resize(size_t{64} << 20);
    std::mt19937 rng(3);
    std::normal_distribution<float> normal;
    std::vector<float> table(1 << 16);
    for (float& x : table) x = normal(rng);
    const size_t size = element_size(dtype);
    for (size_t i = 0; i < pattern.size() / size; ++i)
      put_element(dtype, table[rng() & 0xffff], &pattern[i * size]);
  }
  for (size_t at = 0; at < buffer.bytes(); at += pattern.size()) {
    CHECK_CUDA(cudaMemcpy(buffer.as<uint8_t>() + at, pattern.data(),
                          std::min(pattern.size(), buffer.bytes() - at), cudaMemcpyHostToDevice));
  }
}

void run_one(const Kernels& kernels, const BenchCase& bench) {
  running() = bench.name;
  Options o = bench.options;
  const int size = element_size(o.dtype);
  std::mt19937 rng(1);
  Problem p{};
  p.options = o;
  int64_t num_pages = 0;
  make_layout(o, rng, &p, &num_pages);
  make_plan_and_params(&p, num_pages, false);
  AttentionParams a = p.params;
  Buffer d_plan(p.plan), d_indices(p.kv_indices), d_offset(p.kv_offset), d_pos(p.q_pos);
  a.plan = d_plan.as<int32_t>();
  if (!o.contiguous) a.kv_indices = d_indices.as<int32_t>();
  a.kv_offset = d_offset.as<int32_t>();
  a.q_pos = d_pos.as<int32_t>();
  const int64_t heads = int64_t{a.num_tokens} * o.num_qo_heads;
  const int64_t k_bytes = num_pages * a.k_strides.page * size, v_bytes = num_pages * a.v_strides.page * size;
  const int sets =
      static_cast<int>(std::clamp<int64_t>((int64_t{300} << 20) / (k_bytes + v_bytes) + 1, 1, 16));
  std::vector<Buffer> q, k, v, out;
  for (int i = 0; i < sets; ++i) {
    q.emplace_back(heads * o.head_dim_qk * size);
    k.emplace_back(k_bytes);
    v.emplace_back(v_bytes);
    out.emplace_back(heads * o.head_dim_vo * size);
    fill_random(q.back(), o.dtype);
    fill_random(k.back(), o.dtype);
    fill_random(v.back(), o.dtype);
  }
  Buffer lse(heads * 4), partial_o(int64_t{a.format.slot_capacity} * o.num_qo_heads * o.head_dim_vo * 4),
      partial_max(int64_t{a.format.slot_capacity} * o.num_qo_heads * 4),
      partial_sum(int64_t{a.format.slot_capacity} * o.num_qo_heads * 4);
  a.lse = lse.as<float>();
  a.partial_o = partial_o.as<float>();
  a.partial_max = partial_max.as<float>();
  a.partial_sum = partial_sum.as<float>();
  cudaStream_t stream;
  CHECK_CUDA(cudaStreamCreate(&stream));
  cudaEvent_t begin, end;
  CHECK_CUDA(cudaEventCreate(&begin));
  CHECK_CUDA(cudaEventCreate(&end));
  // A graph of launches, so that the time of a launch on the host does not show.
  const int per_graph = std::max(sets, 8);
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < per_graph; ++i) {
    a.q = q[i % sets].as<void>();
    a.k = k[i % sets].as<void>();
    a.v = v[i % sets].as<void>();
    a.o = out[i % sets].as<void>();
    launch_attention(kernels, a, stream);
  }
  CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
  CHECK_CUDA(cudaGraphInstantiate(&exec, graph, 0));
  std::vector<float> times;
  for (int i = 0; i < 9; ++i) {
    CHECK_CUDA(cudaEventRecord(begin, stream));
    CHECK_CUDA(cudaGraphLaunch(exec, stream));
    CHECK_CUDA(cudaEventRecord(end, stream));
    CHECK_CUDA(cudaStreamSynchronize(stream));
    float ms;
    CHECK_CUDA(cudaEventElapsedTime(&ms, begin, end));
    if (i >= 2) times.push_back(ms / per_graph);
  }
  std::sort(times.begin(), times.end());
  const double us = times[times.size() / 2] * 1e3;
  double kv_tokens = 0, pairs = 0;
  for (size_t r = 0; r < p.q_len.size(); ++r) {
    kv_tokens += p.kv_len[r];
    for (int i = 0; i < p.q_len[r]; ++i) {
      pairs += (o.rules & kRuleCausal) != 0 ? p.kv_len[r] - p.q_len[r] + i + 1 : p.kv_len[r];
    }
  }
  const double bytes = kv_tokens * o.num_kv_heads * (o.head_dim_qk + o.head_dim_vo) * size;
  const double flops = 2.0 * pairs * o.num_qo_heads * (o.head_dim_qk + o.head_dim_vo);
  std::printf("BENCH %-44s %9.1f us  (min %.1f)  %6.3f TB/s of K,V  %6.1f TFLOP/s  slots %d merges %d\n",
              bench.name.c_str(), us, times[0] * 1e3, bytes / us * 1e-6, flops / us * 1e-6,
              p.plan[kHeaderNumSlots], p.plan[kHeaderNumMerge]);
  std::fflush(stdout);
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
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
  for (size_t c = 0; c < o.classes.size(); ++c) {
    ClassFormat& cls = a.format.classes[c];
    cls.tile = o.classes[c].tile;
    cls.packed = o.classes[c].packed ? 1 : 0;
    cls.num_ctas = o.num_ctas;
    cls.num_queues = choose_num_queues(o.num_ctas, num_heads(cls, o.num_qo_heads, o.num_kv_heads));
  }
  return a;
}

std::vector<BenchCase> make_bench_cases() {
  std::vector<BenchCase> all;
  auto make = [&](const std::string& name, bool decode, int qk, int vo, TileClass cls, int num_ctas, int qo,
                  int kv, int page_size, std::vector<std::pair<int, int>> rows, uint32_t rules = kCausal,
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
    all.push_back({name, o, decode});
  };
  using Rows = std::vector<std::pair<int, int>>;
  const TileClass t1{1, true}, t16{16, true}, t32{32, true}, t64{64, true}, t128{128, false};
  make("decode 64x2048 page16 t16", true, 128, 128, t16, 264, 32, 8, 16, Rows(64, {1, 2048}));
  make("decode 64x2048 page1 t16", true, 128, 128, t16, 264, 32, 8, 1, Rows(64, {1, 2048}));
  make("decode 64x8192 page16 t16", true, 128, 128, t16, 264, 32, 8, 16, Rows(64, {1, 8192}));
  make("decode 64x2048 page16 t32", true, 128, 128, t32, 264, 32, 8, 16, Rows(64, {1, 2048}));
  make("decode 64x2048 page16 t64", true, 128, 128, t64, 264, 32, 8, 16, Rows(64, {1, 2048}));
  make("decode 64x2048 page16 t1 bf16", true, 128, 128, t1, 264, 32, 8, 16, Rows(64, {1, 2048}));
  make("decode 64x2048 page16 t1 f32", true, 128, 128, t1, 264, 32, 8, 16, Rows(64, {1, 2048}), kCausal,
       DType::kF32);
  make("decode 64x2048 page16 t1 bf16 32/32", true, 128, 128, t1, 264, 32, 32, 16, Rows(16, {1, 2048}));
  make("decode 16x2048 page16 t16 32/32", true, 128, 128, t16, 264, 32, 32, 16, Rows(16, {1, 2048}));
  make("decode 64x2048 page16 t16 64/8", true, 128, 128, t16, 264, 64, 8, 16, Rows(64, {1, 2048}));
  make("decode 64x2048 page16 t16 d64", true, 64, 64, t16, 264, 32, 8, 16, Rows(64, {1, 2048}));
  make("decode 64x2048 page16 t16 d256 132", true, 256, 256, t16, 132, 16, 8, 16, Rows(64, {1, 2048}));
  make("decode 64 skewed 32768 page16 t16", true, 128, 128, t16, 264, 32, 8, 16, skewed(64, 32768));
  make("decode 16 skewed 5573 page16 t16", true, 128, 128, t16, 264, 32, 8, 16, skewed(16, 5573));
  make("decode 1x1024 page16 t16", true, 128, 128, t16, 264, 32, 8, 16, Rows(1, {1, 1024}));
  make("decode 1x32768 page16 t16", true, 128, 128, t16, 264, 32, 8, 16, Rows(1, {1, 32768}));
  make("verify 64x(4,2048) page16 t16", true, 128, 128, t16, 264, 32, 8, 16, Rows(64, {4, 2048}));
  make("verify 64x(8,2048) page16 t32", true, 128, 128, t32, 264, 32, 8, 16, Rows(64, {8, 2048}));
  make("verify 64x(16,2048) page16 t64", true, 128, 128, t64, 264, 32, 8, 16, Rows(64, {16, 2048}));
  make("prefill 4x4096 causal contiguous", false, 128, 128, t128, 264, 32, 8, 0, Rows(4, {4096, 4096}));
  make("prefill 4x4096 causal contiguous 132", false, 128, 128, t128, 132, 32, 8, 0, Rows(4, {4096, 4096}));
  make("prefill 4x4096 causal page16", false, 128, 128, t128, 264, 32, 8, 16, Rows(4, {4096, 4096}));
  make("prefill 4x4096 causal page1", false, 128, 128, t128, 264, 32, 8, 1, Rows(4, {4096, 4096}));
  make("prefill 4x4096 full contiguous", false, 128, 128, t128, 264, 32, 8, 0, Rows(4, {4096, 4096}),
       kRuleSoftmax);
  make("prefill 1x16384 causal page16", false, 128, 128, t128, 264, 32, 8, 16, Rows(1, {16384, 16384}));
  make("prefill 4x4096 causal page16 t64", false, 128, 128, t64, 264, 32, 8, 16, Rows(4, {4096, 4096}));
  make("prefill 4x4096 causal page16 soft cap", false, 128, 128, t128, 264, 32, 8, 16, Rows(4, {4096, 4096}),
       kCausal | kRuleSoftCap);
  make("prefill 4x4096 causal page16 d64", false, 64, 64, t128, 264, 32, 8, 16, Rows(4, {4096, 4096}));
  make("prefill 4x4096 causal page16 d256", false, 256, 256, t128, 132, 16, 4, 16, Rows(4, {4096, 4096}));
  make("prefill 4x4096 causal page16 d192x128", false, 192, 128, t128, 264, 32, 32, 16,
       Rows(4, {4096, 4096}));
  return all;
}

void run_benchmarks(const Kernels& kernels, const std::string& filter) {
  for (const BenchCase& bench : make_bench_cases()) {
    if (bench.name.find(filter) != std::string::npos) run_one(kernels, bench);
  }
}

}  // namespace jaxinfer::test
