// Runs the CUDA kernels and the CPU executor on the same plans and compares. Built by build.py, which also
// compiles the kernels that `--list` names.
//
//   test_kernels --list | FOLDER [filter | append | sanitize [i/n]] | FOLDER bench [filter] | FOLDER decode
//
// i/n: the i-th of n shares of the cases. sanitize: an eleventh of the cases and the appends; a sanitizer
// makes everything a hundred times slower.
#include <cstdio>
#include <cstring>
#include <string>

#include "bench.h"
#include "cases.h"
#include "compare.h"
#include "device.h"

namespace jaxinfer::test {
namespace {

bool test_append(const Kernels& kernels, DType dtype) {
  const int size = element_size(dtype);
  const int num_tokens = 37, heads = 3, qk = 72, vo = 128, page_size = 5, num_layers = 2;
  const int64_t num_pages = 11;
  bool ok = true;
  for (const bool hnd : {false, true}) {
    for (const int layer_index : {-1, 0, 1, 2}) {
      Options o;
      o.hnd = hnd;
      o.num_kv_heads = heads;
      o.page_size = page_size;
      o.num_layers = num_layers;
      std::mt19937 rng(layer_index + 10);
      AppendParams a{};
      a.element_size = size;
      a.num_tokens = num_tokens;
      a.num_kv_heads = heads;
      a.head_dim_qk = qk;
      a.head_dim_vo = vo;
      a.num_layers = num_layers;
      a.num_pages = num_pages;
      a.page_size = page_size;
      a.k_strides = make_strides(o, num_pages, qk);
      a.v_strides = make_strides(o, num_pages, vo);
      a.set_dividers();
      auto random = [&](int64_t elements) {
        Bytes x(elements * size);
        for (uint8_t& byte : x) byte = static_cast<uint8_t>(rng());
        return x;
      };
      Bytes k = random(int64_t{num_tokens} * heads * qk), v = random(int64_t{num_tokens} * heads * vo);
      Bytes k_pages = random(num_layers * a.k_strides.layer),
            v_pages = random(num_layers * a.v_strides.layer);
      Ints slots, layer{layer_index};
      // None twice: what such slots hold is unspecified. Some lie outside the pool.
      for (int i = 0; i < num_tokens; ++i)
        slots.push_back((i * 23) % 59 - 2 + (i % 11 == 0 ? 2147480000 : 0));
      Buffer d_k(k), d_v(v), d_k_pages(k_pages), d_v_pages(v_pages), d_slots(slots), d_layer(layer);
      AppendParams d = a;
      d.k = d_k.as<void>();
      d.v = d_v.as<void>();
      d.k_pages = d_k_pages.as<void>();
      d.v_pages = d_v_pages.as<void>();
      d.slots = d_slots.as<int32_t>();
      d.layer = d_layer.as<int32_t>();
      void* arguments[] = {&d};
      launch(kernels.at(append_spec(dtype)), 8, arguments, nullptr);
      CHECK_CUDA(cudaDeviceSynchronize());
      a.k = k.data();
      a.v = v.data();
      a.k_pages = k_pages.data();
      a.v_pages = v_pages.data();
      a.slots = slots.data();
      a.layer = layer.data();
      cpu::append(a, serial);
      Bytes k_got(k_pages.size()), v_got(v_pages.size());
      d_k_pages.read(k_got.data());
      d_v_pages.read(v_got.data());
      ok = ok && k_got == k_pages && v_got == v_pages;
    }
  }
  std::printf("%s append %s\n", ok ? "PASS" : "FAIL", dtype_name(dtype));
  return ok;
}

int main(int argc, char** argv) {
  const std::vector<Case> cases = make_cases();
  if (argc < 2 || std::strcmp(argv[1], "--list") == 0) {
    for (const Case& c : cases) {
      const AttentionParams a = spec_params(c.options);
      for (int i = 0; i < a.format.num_classes; ++i) std::printf("%s\n", attention_spec(a, i).c_str());
      std::printf("%s\n", merge_spec(a).c_str());
    }
    for (const BenchCase& b : make_bench_cases()) {
      std::printf("%s\n%s\n", attention_spec(spec_params(b.options), 0).c_str(),
                  merge_spec(spec_params(b.options)).c_str());
    }
    for (const Options& o : decode_bench_options()) {
      std::printf("%s\n%s\n", attention_spec(spec_params(o), 0).c_str(), merge_spec(spec_params(o)).c_str());
    }
    for (const DType dtype : {DType::kBF16, DType::kF32}) std::printf("%s\n", append_spec(dtype).c_str());
    return 0;
  }
  const Kernels kernels(argv[1]);
  const std::string mode = argc > 2 ? argv[2] : "";
  if (mode == "bench") {
    run_benchmarks(kernels, argc > 3 ? argv[3] : "");
    return 0;
  }
  if (mode == "decode") {
    run_decode_benchmarks(kernels);
    return 0;
  }
  const bool sanitize = mode == "sanitize";
  int share = 0, shares = 1;
  if (argc > 3 && std::sscanf(argv[3], "%d/%d", &share, &shares) != 2) return 2;
  int failed = 0, number_run = 0, matching = 0;
  uint32_t seed = 1;
  for (const Case& c : cases) {
    ++seed;
    // Neighbours share a kernel and differ in layouts and lengths. These meet all tiles, padded dims, rules
    // and kinds of layouts; a stride that shares a factor with the lists of CaseList would miss some.
    if (sanitize ? seed % 11 != 3 : c.name.find(mode) == std::string::npos) continue;
    if (matching++ % shares != share) continue;
    ++number_run;
    const auto launch = [&](const AttentionParams& a, Merge merge) {
      launch_attention(kernels, a, nullptr, merge);
    };
    failed += check_case(c.name, make_problem(c.options, seed), 1, launch) ? 0 : 1;
  }
  if ((mode.empty() || mode == "append" || sanitize) && share == 0) {
    for (const DType dtype : {DType::kBF16, DType::kF32}) failed += test_append(kernels, dtype) ? 0 : 1;
  }
  std::printf("%d of %d cases failed\n", failed, number_run);
  return failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace jaxinfer::test

int main(int argc, char** argv) {
  return jaxinfer::test::main(argc, argv);
}
