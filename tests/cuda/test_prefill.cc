// The warpgroup kernel (attention_wgmma) against the CPU executor on the same plans. Built by build.py.
//
//   test_prefill --list | FOLDER [filter [i/n]] | FOLDER sanitize
//   | FOLDER bench|pairs [filter[,filter...] [FOLDER...]]
//
// i/n: the i-th of n shares of the cases that the filter lets through. sanitize: one short case of every
// loader. bench: with kernels of more folders, each with a manifest of its own, beside those of the first.
// pairs: the same for differences of less than a percent.
#include <cstdio>
#include <cstring>
#include <string>

#include "bench.h"
#include "cases.h"
#include "compare.h"
#include "prefill.h"

namespace jaxinfer::test {
namespace {

constexpr uint32_t kCausal = kRuleSoftmax | kRuleCausal;

enum class Loader { kContiguous, kPages16, kPages8, kGather };

struct PrefillCase : Case {
  bool sanitize;
};

// Problems for one kernel: page sizes of one loader, heads, layouts and lengths change.
class PrefillCases {
 public:
  std::vector<PrefillCase> cases;

  void add(Options o, Loader loader, int times) {
    static constexpr int kPages[4][4] = {{1, 1, 1, 1}, {16, 64, 48, 128}, {8, 24, 40, 8}, {1, 3, 4, 5}};
    static constexpr const char* kNames[] = {"tma", "box16", "box8", "gather"};
    const std::pair<int, int> kHeads[] = {{8, 2}, {4, 4}, {6, 2}, {16, 2}, {5, 1}, {14, 2}};
    for (int i = 0; i < times; ++i) {
      const int n = number_++;
      const auto [qo, kv] = kHeads[n % 6];
      o.num_qo_heads = qo;
      o.num_kv_heads = kv;
      o.contiguous = loader == Loader::kContiguous;
      o.page_size = kPages[static_cast<int>(loader)][i % 4];
      o.hnd = n % 3 == 1 && !o.contiguous;
      o.num_layers = n % 4 == 2 ? 2 : 0;
      o.layer = n % 4 == 2 ? 1 : 0;
      o.bad_ids = n % 5 == 3 && !o.contiguous;
      o.batch_invariant = n % 7 == 5;
      o.num_ctas = n % 2 ? 24 : 7;
      const int tile = o.classes[0].tile;
      o.rows = lengths(o.classes[0].packed ? tile / (qo / kv) : tile, n);
      push(kNames[static_cast<int>(loader)], o);
    }
  }
  void push(const std::string& name, const Options& o, bool sanitize = false) {
    cases.push_back({{name + " " + describe(o), o}, sanitize});
  }

 private:
  int number_ = 0;
};

std::vector<PrefillCase> make_prefill_cases() {
  PrefillCases list;
  const DType bf16 = DType::kBF16;
  const Loader loaders[] = {Loader::kContiguous, Loader::kPages16, Loader::kPages8, Loader::kGather};
  for (const Loader loader : loaders) {
    list.add(base(bf16, 128, 128, {{128, false}}, kCausal), loader, 4);
    list.add(base(bf16, 128, 128, {{128, true}}, kCausal), loader, 6);
  }
  struct Dims {
    int qk, vo, tile;
  };
  const Dims dims[] = {{64, 64, 192},   {40, 56, 192},   {64, 64, 128},   {80, 96, 128},
                       {96, 72, 128},   {192, 192, 128}, {256, 200, 128}, {256, 256, 128},
                       {192, 128, 128}, {128, 128, 192}, {104, 120, 192}};
  for (const Dims& d : dims) {
    for (const Loader loader : {Loader::kContiguous, Loader::kPages16, Loader::kGather}) {
      list.add(base(bf16, d.qk, d.vo, {{d.tile, loader != Loader::kContiguous}}, kCausal), loader, 4);
    }
  }
  list.add(base(bf16, 104, 120, {{128, true}}, kCausal), Loader::kPages16, 3);
  list.add(base(DType::kF16, 128, 128, {{128, true}}, kCausal), Loader::kPages16, 3);
  list.add(base(DType::kF16, 64, 64, {{192, true}}, kCausal), Loader::kPages16, 3);
  constexpr uint32_t kWindows = kCausal | kRuleWindowLeft | kRuleWindowRight;
  const uint32_t rule_sets[] = {kRuleSoftmax,
                                kWindows,
                                kRuleSoftmax | kRuleWindowLeft,
                                kCausal | kRuleSoftCap,
                                kRuleSoftmax | kRuleMask,
                                kWindows | kRuleMask | kRuleSoftCap,
                                kRuleCausal};
  for (const uint32_t rules : rule_sets) {
    list.add(base(bf16, 128, 128, {{128, true}}, rules), Loader::kPages16, 3);
    list.add(base(bf16, 128, 128, {{128, true}}, rules), Loader::kGather, 3);
  }
  for (const uint32_t rules : {uint32_t{kRuleSoftmax}, kWindows, kCausal | kRuleSoftCap}) {
    list.add(base(bf16, 128, 128, {{192, true}}, rules), Loader::kContiguous, 3);
  }
  list.add(base(bf16, 64, 64, {{192, true}}, kWindows | kRuleMask | kRuleSoftCap), Loader::kGather, 3);
  list.add(base(bf16, 256, 256, {{128, true}}, kWindows | kRuleMask | kRuleSoftCap), Loader::kGather, 3);
  // One consumer warpgroup.
  for (const uint32_t rules : rule_sets) {
    list.add(base(bf16, 128, 128, {{64, true}}, rules), Loader::kPages16, 3);
    list.add(base(bf16, 104, 120, {{64, true}}, rules), Loader::kPages8, 3);
  }
  list.add(base(DType::kF16, 128, 128, {{64, true}}, kCausal), Loader::kPages16, 6);
  // Shared prefixes, block positions, layers outside the pool, extreme and negative scales.
  for (const int page_size : {16, 8, 5}) {
    const char* const name = page_size == 16 ? "box16" : page_size == 8 ? "box8" : "gather";
    Options o = base(bf16, 128, 128, {{128, true}}, kCausal);
    o.page_size = page_size;
    o.rows = {{1, 50}, {30, 20}, {0, 0}, {2, 0}, {500, 333}, {100, 900}};
    o.shared_prefix = 200;
    list.push(name, o);
    o.shared_prefix = 0;
    o.block_pos = true;
    for (const uint32_t rules : {uint32_t{kRuleSoftmax}, kCausal, kWindows}) {
      o.rules = rules;
      list.push(name, o);
    }
    o.block_pos = false;
    o.rules = kCausal;
    o.num_layers = 3;
    o.layer = 3;
    list.push(name, o);
    o.layer = -1;
    list.push(name, o);
    o.num_layers = 0;
    o.layer = 0;
    // Maxima that grow a lot in most blocks, and in some.
    for (const float scale : {60.0f, 5.0f}) {
      o.scale_k = scale;
      list.push(name, o);
    }
    o.scale_k = 1.0f;
    o.sm_scale = -0.2f;
    list.push(name, o);
  }
  for (const auto& [cap, scale] : soft_caps()) {
    for (const int page_size : {16, 5}) {
      Options o = base(bf16, 128, 128, {{128, true}}, kCausal | kRuleSoftCap);
      o.page_size = page_size;
      o.rows = {{1, 50}, {30, 20}, {0, 0}, {2, 0}, {500, 333}, {100, 900}};
      o.logits_soft_cap = cap;
      o.scale_k = scale;
      list.push(page_size == 16 ? "box16" : "gather", o);
      o.sm_scale = -0.2f;
      list.push(page_size == 16 ? "box16" : "gather", o);
    }
  }
  // Two kernels side by side. Either class can be without work; both leave partial states to one merge.
  const std::vector<std::pair<int, int>> mixes[] = {
      {{1, 900}, {200, 700}, {1, 33}, {2, 2077}, {300, 450}, {0, 5}, {1, 1}, {4, 1500}},
      {{1, 900}, {3, 4000}, {0, 9}, {1, 1}, {2, 77}},
      {{1500, 1600}, {0, 5}, {40, 900}}};
  for (const auto& rows : mixes) {
    for (const int page_size : {16, 5}) {
      Options o = base(bf16, 128, 128, {{16, true, 264}, {128, true, 132}}, kCausal);
      o.page_size = page_size;
      o.rows = rows;
      o.side_by_side = o.runs = true;
      list.push("mixed", o);
      o.classes[0].num_ctas = 10;
      o.classes[1].num_ctas = 5;
      o.batch_invariant = page_size == 5;
      list.push("mixed", o);
    }
  }
  // Short ones: a sanitizer makes everything a hundred times slower. A partly filled block, a whole one,
  // several.
  for (const int page_size : {0, 16, 8, 1}) {
    Options o = base(bf16, 128, 128, {{128, true}}, kCausal);
    o.contiguous = page_size == 0;
    o.page_size = o.contiguous ? 1 : page_size;
    o.num_ctas = 2;
    o.rows = {{3, 40}, {0, 9}, {20, 128}, {1, 300}};
    list.push(page_size == 0   ? "tma"
              : page_size == 1 ? "gather"
                               : "box" + std::to_string(page_size),
              o, true);
  }
  Options mixed = base(bf16, 128, 128, {{16, true, 4}, {128, true, 2}}, kCausal);
  mixed.rows = {{1, 200}, {40, 100}, {1, 40}};
  mixed.side_by_side = true;
  list.push("mixed", mixed, true);
  return list.cases;
}

int main(int argc, char** argv) {
  const std::vector<PrefillCase> cases = make_prefill_cases();
  if (argc < 2 || std::strcmp(argv[1], "--list") == 0) {
    auto print = [](const Options& o, bool portable) {
      AttentionParams a = spec_params(o);
      a.page_size = o.page_size;
      for (int i = 0; i < a.format.num_classes; ++i) {
        std::printf("%s\n", class_spec(a, i).c_str());
        if (portable) std::printf("%s\n", attention_spec(a, i).c_str());
      }
      std::printf("%s\n", merge_spec(a).c_str());
    };
    for (const PrefillCase& c : cases) print(c.options, false);
    for (const PrefillBench& b : make_prefill_benches()) print(b.options, b.portable);
    return 0;
  }
  const std::string mode = argc > 2 ? argv[2] : "";
  if (mode == "bench" || mode == "pairs") {
    std::vector<PrefillKernels> builds;
    builds.emplace_back(argv[1], "");
    for (int i = 4; i < argc; ++i) {
      const std::string folder = argv[i];
      builds.emplace_back(folder, "/" + folder.substr(folder.rfind('/') + 1));
    }
    run_prefill_benches(builds, argc > 3 ? argv[3] : "", mode == "pairs");
    return 0;
  }
  const PrefillKernels build(argv[1], "");
  const bool sanitize = mode == "sanitize";
  int share = 0, shares = 1;
  if (argc > 3 && std::sscanf(argv[3], "%d/%d", &share, &shares) != 2) return 2;
  int failed = 0, number_run = 0, matching = 0;
  uint32_t seed = 1;
  for (const PrefillCase& c : cases) {
    ++seed;
    if (sanitize ? !c.sanitize : c.name.find(mode) == std::string::npos || matching++ % shares != share)
      continue;
    ++number_run;
    const auto launch = [&](const AttentionParams& a, Merge merge) {
      launch_wgmma(build, a, nullptr, merge);
    };
    failed += check_case(c.name, make_problem(c.options, seed), sanitize ? 0 : 3, launch) ? 0 : 1;
  }
  std::printf("%d of %d cases failed\n", failed, number_run);
  return failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace jaxinfer::test

int main(int argc, char** argv) {
  return jaxinfer::test::main(argc, argv);
}
