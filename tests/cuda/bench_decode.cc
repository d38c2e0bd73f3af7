// Decode batches of serving size, by schedule and by way of merging; and one batch in many shapes.
#include <cstdio>
#include <string>

#include "bench_run.h"
#include "lengths.h"

namespace jaxinfer::test {

namespace {

using Rows = std::vector<std::pair<int, int>>;

template <size_t kSize>
Rows single_tokens(const int (&lengths)[kSize]) {
  Rows rows;
  for (const int length : lengths) rows.push_back({1, length});
  return rows;
}

Options base(Rows rows) {
  Options o;
  o.classes = {{16, true}};
  o.num_ctas = 264;
  o.num_qo_heads = 32;
  o.num_kv_heads = 8;
  o.rows = std::move(rows);
  o.padding = 0;
  o.rules = kRuleSoftmax | kRuleCausal;
  return o;
}

std::vector<std::pair<std::string, Options>> batches() {
  return {
      {"64 x 2048", base(Rows(64, {1, 2048}))},        {"128 x 1024", base(Rows(128, {1, 1024}))},
      {"16 x 4096", base(Rows(16, {1, 4096}))},        {"64 x 8192", base(Rows(64, {1, 8192}))},
      {"1 x 1024", base(Rows(1, {1, 1024}))},          {"1 x 8192", base(Rows(1, {1, 8192}))},
      {"1 x 32768", base(Rows(1, {1, 32768}))},        {"1 x 131072", base(Rows(1, {1, 131072}))},
      {"uniform 16", base(single_tokens(kUniform16))}, {"skewed 16", base(single_tokens(kSkewed16))},
      {"skewed 64", base(single_tokens(kSkewed64))},   {"skewed 128", base(single_tokens(kSkewed128))},
  };
}

// Shapes of 64 x 8192 (a quarter of the requests where rows are wide).
std::vector<std::pair<std::string, Options>> shapes() {
  std::vector<std::pair<std::string, Options>> all;
  const auto add = [&](const std::string& name, auto change) {
    Options o = base(Rows(64, {1, 8192}));
    change(o);
    all.push_back({name, o});
  };
  for (const int page_size : {1, 3, 64, 256}) {
    add("page " + std::to_string(page_size), [&](Options& o) { o.page_size = page_size; });
  }
  add("hnd", [](Options& o) { o.hnd = true; });
  for (const int group : {1, 2, 3, 5, 8, 9, 12, 16}) {
    add("group " + std::to_string(group), [&](Options& o) { o.num_qo_heads = 8 * group; });
  }
  for (const int dim : {64, 96, 192, 256}) {
    add("dim " + std::to_string(dim), [&](Options& o) {
      o.head_dim_qk = o.head_dim_vo = dim;
      if (dim > 128) o.rows.resize(32);
      if (dim > 128) o.num_ctas = 132;
    });
  }
  for (const auto& [tile, tokens] : {std::pair<int, int>{16, 1}, {32, 4}, {64, 8}}) {
    add("group 8, " + std::to_string(tokens) + " tokens, tile " + std::to_string(tile), [&](Options& o) {
      o.num_qo_heads = 64;
      o.rows = Rows(64, {tokens, 2048});
      o.classes = {{tile, true}};
    });
  }
  return all;
}

}  // namespace

std::vector<Options> decode_bench_options() {
  std::vector<Options> all;
  for (const auto& [name, options] : batches()) all.push_back(options);
  for (const auto& [name, options] : shapes()) all.push_back(options);
  return all;
}

void run_decode_benchmarks(const Kernels& kernels) {
  for (const auto& [name, options] : batches()) {
    running() = name;
    BenchRun run(options);
    for (const auto& [schedule, invariant] : {std::pair<Schedule, bool>{Schedule::kLpt, false},
                                              {Schedule::kRuns, false},
                                              {Schedule::kLpt, true}}) {
      run.make_plan(schedule, invariant);
      std::printf("%-11s %s", name.c_str(),
                  invariant                    ? "inv "
                  : schedule == Schedule::kLpt ? "lpt "
                                               : "runs");
      for (const Merge merge : {Merge::kAfter, Merge::kDependent, Merge::kNone}) {
        const double us = run.time(kernels, merge);
        std::printf("  %s %.2f us %.3f", merge_name(merge), us, run.bytes() / us * 1e-6);
      }
      std::printf("  slots %d\n", run.num_slots());
      std::fflush(stdout);
    }
  }
  for (const auto& [name, options] : shapes()) {
    running() = name;
    BenchRun run(options);
    run.make_plan(Schedule::kRuns, false);
    std::printf("%-28s", name.c_str());
    for (const Merge merge : {Merge::kDependent, Merge::kNone}) {
      const double us = run.time(kernels, merge);
      std::printf("  %s %.1f us %.3f", merge_name(merge), us, run.bytes() / us * 1e-6);
    }
    std::printf("  slots %d\n", run.num_slots());
    std::fflush(stdout);
  }
}

}  // namespace jaxinfer::test
