// Throughput of the warpgroup kernel on batches of serving size, beside the portable kernel. The card is
// limited by power: contestants run in short bursts, in an order that rotates, so that heat hits all alike.
// What differs by less than a round from the next is compared in pairs, round by round.
#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <sstream>

#include "bench.h"
#include "prefill.h"

namespace jaxinfer::test {

namespace {

constexpr uint32_t kCausal = kRuleSoftmax | kRuleCausal;
constexpr int kMultiprocessors = 132;
using Rows = std::vector<std::pair<int, int>>;

// A random pattern, repeated; from another place every time, or queries would meet
// themselves among the keys, whose scores then are as large as no others.
void fill_random(const Buffer& buffer) {
  static Bytes pattern = random_pattern(DType::kBF16);
  std::rotate(pattern.begin(), pattern.begin() + 2 * 4099, pattern.end());
  for (size_t at = 0; at < buffer.bytes(); at += pattern.size()) {
    CHECK_CUDA(cudaMemcpy(buffer.as<uint8_t>() + at, pattern.data(),
                          std::min(pattern.size(), buffer.bytes() - at), cudaMemcpyHostToDevice));
  }
}

AttentionParams row_params(const PrefillBench& bench) {
  AttentionParams a = spec_params(bench.options);
  a.page_size = bench.options.page_size;
  return a;
}

// One way to run a row: a plan on the device, and what launches it.
struct Contestant {
  const PrefillBench* bench;
  const PrefillKernels* kernels;
  AttentionParams params;
  std::vector<std::unique_ptr<Buffer>> buffers;
  std::vector<double> milliseconds;
  int slots = 0;
  double balance = 0;  // largest queue cost over the mean
};

// Cost of the fullest queue of the first class over the mean.
double queue_balance(const AttentionParams& a) {
  const ClassFormat& cls = a.format.classes[0];
  const Costs costs = default_costs(Schedule::kLpt, cls, a.group_size());
  const int32_t* const indptr = a.plan + cls.queue_indptr;
  double total = 0, largest = 0;
  for (int q = 0; q < cls.num_queues; ++q) {
    double cost = 0;
    for (int i = indptr[q]; i < indptr[q + 1]; ++i) {
      const Item& item = a.format.items(a.plan, 0)[i];
      cost += static_cast<double>(item_cost(costs, item.num_tokens(), item.kv_end - item.kv_begin));
    }
    total += cost;
    largest = std::max(largest, cost);
  }
  return largest * cls.num_queues / total;
}

// Its plan of the row's layout. scale_k makes logits large by their scale here: contestants share K.
void make_contestant(Problem p, int64_t num_pages, Contestant* c) {
  p.options = c->bench->options;
  const Options& o = p.options;
  p.options.sm_scale = o.scale_k / std::sqrt(static_cast<float>(o.head_dim_qk));
  make_plan_and_params(&p, num_pages, false);
  c->slots = p.plan[kHeaderNumSlots];
  c->balance = queue_balance(p.params);
  AttentionParams& a = c->params;
  a = p.params;

  auto upload = [&](const auto& from) {
    c->buffers.push_back(std::make_unique<Buffer>(from));
    return c->buffers.back()->template as<int32_t>();
  };
  a.plan = upload(p.plan);
  if (!o.contiguous) a.kv_indices = upload(p.kv_indices);
  a.kv_offset = upload(p.kv_offset);
  a.q_pos = upload(p.q_pos);
  auto scratch = [&](int64_t floats) {
    c->buffers.push_back(std::make_unique<Buffer>(floats * 4));
    return c->buffers.back()->as<float>();
  };
  const int64_t slot_heads = int64_t{a.format.slot_capacity} * o.num_qo_heads;
  a.lse = scratch(int64_t{a.num_tokens} * o.num_qo_heads);
  a.partial_o = scratch(slot_heads * o.head_dim_vo);
  a.partial_max = scratch(slot_heads);
  a.partial_sum = scratch(slot_heads);
}

struct Difference {
  double mean, error;  // of a's time from b's in percent, and half of the 95% confidence interval
};
Difference paired_difference(const Contestant& a, const Contestant& b) {
  const size_t rounds = a.milliseconds.size() - 1;
  double sum = 0, squares = 0;
  for (size_t i = 1; i <= rounds; ++i) {
    const double x = 100.0 * (a.milliseconds[i] / b.milliseconds[i] - 1.0);
    sum += x;
    squares += x * x;
  }
  const double mean = sum / rounds;
  return {mean, 1.96 * std::sqrt((squares / rounds - mean * mean) / (rounds - 1))};
}

// Of the products of queries with keys that they see, and of weights with values.
double count_flops(const Problem& p, const Options& o) {
  double pairs = 0;
  for (size_t r = 0; r < p.q_len.size(); ++r) {
    for (int i = 0; i < p.q_len[r]; ++i) {
      int64_t seen = p.kv_len[r];
      if ((o.rules & kRuleCausal) != 0) seen = seen - p.q_len[r] + i + 1;
      if ((o.rules & kRuleWindowLeft) != 0) seen = std::min<int64_t>(seen, o.window_left + 1);
      pairs += static_cast<double>(seen);
    }
  }
  return 2.0 * pairs * o.num_qo_heads * (o.head_dim_qk + o.head_dim_vo);
}

// All contestants of one row: neighbours in the list with the same name up to the last word. `in_pairs`: many
// short rounds, and of each contestant how much longer it takes than the same way of the first build, which
// itself is compared with the row's first way.
void run_row(const std::vector<const PrefillBench*>& row, const std::vector<PrefillKernels>& builds,
             bool in_pairs) {
  const Options& o = row[0]->options;
  running() = row[0]->name;
  std::mt19937 rng(1);
  Problem p{};
  p.options = o;
  int64_t num_pages = 0;
  make_layout(o, rng, &p, &num_pages);
  std::vector<Contestant> contestants;
  for (const PrefillBench* bench : row) {
    for (const PrefillKernels& build : builds) {
      if (in_pairs && bench->portable) continue;
      const AttentionParams params = row_params(*bench);
      if (bench->portable ? !build.kernels.has(attention_spec(params, 0)) : !build.has(wgmma_spec(params, 0)))
        continue;
      contestants.emplace_back();
      contestants.back().bench = bench;
      contestants.back().kernels = &build;
    }
  }
  Buffer q(p.q_pos.size() * o.num_qo_heads * o.head_dim_qk * 2);
  const int64_t token_bytes = int64_t{o.num_kv_heads} * 2 * (o.contiguous ? 1 : o.page_size);
  Buffer k(num_pages * token_bytes * o.head_dim_qk), v(num_pages * token_bytes * o.head_dim_vo);
  Buffer out(p.q_pos.size() * o.num_qo_heads * o.head_dim_vo * 2);
  for (const Buffer* buffer : {&q, &k, &v}) fill_random(*buffer);
  for (Contestant& c : contestants) {
    make_contestant(p, num_pages, &c);
    c.params.q = q.as<void>();
    c.params.k = k.as<void>();
    c.params.v = v.as<void>();
    c.params.o = out.as<void>();
  }
  cudaEvent_t begin, end;
  CHECK_CUDA(cudaEventCreate(&begin));
  CHECK_CUDA(cudaEventCreate(&end));
  const auto go = [&](const Contestant& c) {
    if (c.bench->portable) {
      launch_attention(c.kernels->kernels, c.params, nullptr, Merge::kDependent);
    } else {
      launch_wgmma(*c.kernels, c.params, nullptr, Merge::kDependent);
    }
  };
  const int rounds = in_pairs ? 120 : 6;
  const double burst = in_pairs ? 3.0 : 30.0;  // milliseconds
  for (int round = 0; round <= rounds; ++round) {
    for (size_t i = 0; i < contestants.size(); ++i) {
      Contestant& c = contestants[(i + round) % contestants.size()];
      // The first round warms up and finds how many launches make a burst.
      const int launches = round == 0 ? 3 : std::max(2, static_cast<int>(burst / c.milliseconds[0]));
      CHECK_CUDA(cudaEventRecord(begin, nullptr));
      for (int n = 0; n < launches; ++n) go(c);
      CHECK_CUDA(cudaEventRecord(end, nullptr));
      CHECK_CUDA(cudaDeviceSynchronize());
      float ms;
      CHECK_CUDA(cudaEventElapsedTime(&ms, begin, end));
      c.milliseconds.push_back(ms / launches);
    }
  }
  std::printf("%-34s", row[0]->name.substr(0, row[0]->name.rfind(' ')).c_str());
  std::vector<Difference> differences;
  for (const Contestant& c : contestants) {
    const Contestant* to = &contestants[0];
    for (const Contestant& other : contestants) {
      if (other.bench == c.bench && other.kernels == &builds[0] && &other != &c) to = &other;
    }
    differences.push_back(paired_difference(c, *to));
  }
  for (size_t i = 0; i < contestants.size(); ++i) {
    Contestant& c = contestants[i];
    std::sort(c.milliseconds.begin() + 1, c.milliseconds.end());
    const double ms = c.milliseconds[1 + rounds / 2];
    const double flops = count_flops(p, c.bench->options);
    std::printf("  %s%s %.0f (%.0f-%.0f)", c.bench->name.substr(c.bench->name.rfind(' ') + 1).c_str(),
                c.kernels->label.c_str(), flops / ms * 1e-9, flops / c.milliseconds.back() * 1e-9,
                flops / c.milliseconds[1] * 1e-9);
    if (in_pairs && i > 0) std::printf(" %+.2f%% +- %.2f", differences[i].mean, differences[i].error);
    if (!c.bench->portable && c.kernels == &builds[0]) std::printf(" bal %.2f sl %d", c.balance, c.slots);
  }
  std::printf("\n");
  std::fflush(stdout);
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
}

Rows skewed(int batch, int mean) {
  std::mt19937 rng(7);
  std::lognormal_distribution<double> length(6.0, 1.2);
  Rows rows;
  double sum = 0;
  std::vector<double> draws;
  for (int i = 0; i < batch; ++i) draws.push_back(length(rng));
  for (const double x : draws) sum += x;
  for (const double x : draws) {
    const int n = std::max(16, static_cast<int>(x / sum * mean * batch));
    rows.push_back({n, n});
  }
  return rows;
}

Rows uniform(int batch, int low, int high) {
  std::mt19937 rng(5);
  Rows rows;
  for (int i = 0; i < batch; ++i) {
    const int n = low + static_cast<int>(rng() % (high - low));
    rows.push_back({n, n});
  }
  return rows;
}

}  // namespace

std::vector<PrefillBench> make_prefill_benches() {
  std::vector<PrefillBench> all;
  struct Way {
    const char* name;
    TileClass cls;
    int num_ctas;
    bool portable;
    uint32_t without = 0;  // rules that are off here
  };
  const std::vector<Way> ways = {{"u", {128, false}, kMultiprocessors, false},
                                 {"p", {128, true}, kMultiprocessors, false},
                                 {"mma", {128, false}, 2 * kMultiprocessors, true}};
  const std::vector<Way> few = {ways[0], ways[2]};
  Way uncapped = ways[0];
  uncapped.name = "uncapped";
  uncapped.without = kRuleSoftCap;
  const std::vector<Way> capped = {ways[0], uncapped, ways[2]};
  Way whole = ways[0];
  whole.name = "whole";
  whole.without = kRuleWindowLeft;
  const std::vector<Way> narrow = {{"u192", {192, false}, kMultiprocessors, false},
                                   {"p192", {192, true}, kMultiprocessors, false},
                                   {"u128", {128, false}, kMultiprocessors, false},
                                   {"mma", {128, false}, 2 * kMultiprocessors, true}};
  const std::vector<Way> verify = {{"wgmma", {64, true}, 2 * kMultiprocessors, false},
                                   {"mma", {64, true}, 2 * kMultiprocessors, true}};
  auto add = [&](const std::string& name, const std::vector<Way>& run, int qk, int vo, int qo, int kv,
                 int page, const Rows& rows, uint32_t rules = kCausal, float cap = 50.0f,
                 float scale = 1.0f) {
    for (const Way& way : run) {
      Options o = Options();
      o.head_dim_qk = qk;
      o.head_dim_vo = vo;
      o.num_qo_heads = qo;
      o.num_kv_heads = kv;
      o.contiguous = page == 0;
      o.page_size = page == 0 ? 1 : page;
      o.rows = rows;
      o.padding = 0;
      o.rules = rules & ~way.without;
      o.window_left = 1023;
      o.logits_soft_cap = cap;
      o.scale_k = scale;
      o.classes = {way.cls};
      o.num_ctas = way.num_ctas;
      all.push_back({name + " " + way.name, o, way.portable});
    }
  };
  const Rows four(4, {4096, 4096}), one(1, {16384, 16384}), eight(8, {1024, 1024}), sixteen(16, {1024, 1024}),
      chunks(16, {512, 8192});
  add("4x4096 d128 causal dense", ways, 128, 128, 32, 8, 0, four);
  add("4x4096 d128 causal page16", ways, 128, 128, 32, 8, 16, four);
  add("4x4096 d128 causal page1", ways, 128, 128, 32, 8, 1, four);
  add("4x4096 d128 full dense", few, 128, 128, 32, 8, 0, four, kRuleSoftmax);
  add("4x4096 d128 full page16", few, 128, 128, 32, 8, 16, four, kRuleSoftmax);
  add("4x4096 d128 full page1", few, 128, 128, 32, 8, 1, four, kRuleSoftmax);
  add("1x16384 d128 causal dense", ways, 128, 128, 32, 8, 0, one);
  add("1x16384 d128 causal page16", few, 128, 128, 32, 8, 16, one);
  add("8x1024 d128 causal dense", ways, 128, 128, 32, 8, 0, eight);
  add("16x1024 d128 causal dense", ways, 128, 128, 32, 8, 0, sixteen);
  add("16x1024 d128 causal page16", ways, 128, 128, 32, 8, 16, sixteen);
  add("16x(512,8192) d128 dense", ways, 128, 128, 32, 8, 0, chunks);
  add("16x(512,8192) d128 page16", ways, 128, 128, 32, 8, 16, chunks);
  add("uniform 16 d128 page16", ways, 128, 128, 32, 8, 16, uniform(16, 512, 1024));
  add("skewed 16 d128 page16", ways, 128, 128, 32, 8, 16, skewed(16, 1024));
  add("4x4096 d64 causal dense", narrow, 64, 64, 32, 8, 0, four);
  add("4x4096 d64 causal page16", narrow, 64, 64, 32, 8, 16, four);
  add("4x4096 d64 full dense", narrow, 64, 64, 32, 8, 0, four, kRuleSoftmax);
  add("4x4096 d256 causal dense", ways, 256, 256, 16, 4, 0, four);
  add("4x4096 d256 causal page16", few, 256, 256, 16, 4, 16, four);
  add("4x4096 d256 full dense", few, 256, 256, 16, 4, 0, four, kRuleSoftmax);
  add("4x4096 d192x128 causal dense", few, 192, 128, 32, 32, 0, four);
  add("1x16384 d128 window dense", {ways[0], whole, ways[1]}, 128, 128, 32, 8, 0, one,
      kCausal | kRuleWindowLeft);
  constexpr uint32_t kCap = kCausal | kRuleSoftCap;
  add("4x4096 d128 soft cap dense", capped, 128, 128, 32, 8, 0, four, kCap);
  add("4x4096 d128 soft cap 30 dense", capped, 128, 128, 32, 8, 0, four, kCap, 30.0f);
  // Scores that the cap bends: up to half of it, and far beyond.
  add("4x4096 d128 soft cap bent dense", capped, 128, 128, 32, 8, 0, four, kCap, 50.0f, 5.0f);
  add("4x4096 d128 soft cap huge dense", capped, 128, 128, 32, 8, 0, four, kCap, 50.0f, 100.0f);
  add("1x16384 d128 soft cap dense", capped, 128, 128, 32, 8, 0, one, kCap);
  add("1x16384 d128 soft cap 30 dense", capped, 128, 128, 32, 8, 0, one, kCap, 30.0f);
  add("4x4096 d64 soft cap dense", narrow, 64, 64, 32, 8, 0, four, kCap);
  add("4x4096 d256 soft cap dense", capped, 256, 256, 16, 4, 0, four, kCap);
  add("verify 64 x (8, 2048)", verify, 128, 128, 64, 8, 16, Rows(64, {8, 2048}));
  return all;
}

void run_prefill_benches(const std::vector<PrefillKernels>& builds, const std::string& filter,
                         bool in_pairs) {
  const std::vector<PrefillBench> all = make_prefill_benches();
  // Substrings of names, separated by commas.
  auto wanted = [&](const std::string& name) {
    std::istringstream parts(filter);
    bool found = filter.empty();
    for (std::string part; std::getline(parts, part, ',');)
      found = found || name.find(part) != std::string::npos;
    return found;
  };
  auto title = [](const PrefillBench& b) { return b.name.substr(0, b.name.rfind(' ')); };
  for (size_t i = 0; i < all.size();) {
    std::vector<const PrefillBench*> row;
    const std::string name = title(all[i]);
    for (; i < all.size() && title(all[i]) == name; ++i) row.push_back(&all[i]);
    if (wanted(name)) run_row(row, builds, in_pairs);
  }
}

}  // namespace jaxinfer::test
