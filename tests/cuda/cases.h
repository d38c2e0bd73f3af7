// The list of problems of the kernel test. Declared as data, so that the kernels they need can be listed and
// compiled before anything runs.
#pragma once

#include <string>
#include <vector>

#include "problem.h"

namespace jaxinfer::test {

struct Case {
  std::string name;
  Options options;
};

// Lengths for a tile that holds `tokens` query tokens: empty ones, single ones, partly filled blocks, several
// tiles.
inline std::vector<std::pair<int, int>> lengths(int tokens, int variant) {
  switch (variant % 4) {
    case 0:
      return {{1, 300}, {0, 40}, {tokens, 129}, {2, 0}, {tokens + 1, 64}, {1, 1}, {3, 700}};
    case 1:
      return {{2 * tokens + 3, 2 * tokens + 90}, {1, 16}, {1, 17}, {4, 15}, {5, 2}};
    case 2:
      return {{1, 2500}};
    default:
      return {{1, 64}, {1, 128}, {7, 333}, {tokens, tokens}, {3 * tokens, 1000}};
  }
}

inline std::string describe(const Options& o) {
  std::string s = o.dtype == DType::kF32 ? "f32" : o.dtype == DType::kF16 ? "f16" : "bf16";
  s += " d" + std::to_string(o.head_dim_qk);
  if (o.head_dim_qk != o.head_dim_vo) s += "x" + std::to_string(o.head_dim_vo);
  for (const TileClass& c : o.classes) s += " t" + std::to_string(c.tile) + (c.packed ? "p" : "u");
  s += " h" + std::to_string(o.num_qo_heads) + "/" + std::to_string(o.num_kv_heads);
  s += o.contiguous ? " contiguous" : " page" + std::to_string(o.page_size);
  s += " rules" + std::to_string(o.rules);
  if (o.hnd) s += " hnd";
  if (o.num_layers > 0) s += " layer" + std::to_string(o.layer) + "/" + std::to_string(o.num_layers);
  if (o.block_pos) s += " block_pos";
  if (o.bad_ids) s += " bad_ids";
  if (o.shared_prefix > 0) s += " prefix" + std::to_string(o.shared_prefix);
  if (o.batch_invariant) s += " invariant";
  if (o.runs) s += " runs";
  if (o.scale_k != 1.0f) s += " keys*" + std::to_string(static_cast<int>(o.scale_k));
  if (o.sm_scale < 0) s += " negative";
  if ((o.rules & kRuleSoftCap) != 0) s += " cap" + std::to_string(o.logits_soft_cap);
  return s;
}

class CaseList {
 public:
  std::vector<Case> cases;

  // One compiled kernel, run on several problems: heads, page sizes, layouts and lengths change, the kernel
  // does not.
  void add(Options o, int times = 4) {
    static constexpr int kPageSizes[] = {16, 1, 5, 64, 3, 32};
    const std::pair<int, int> kHeads[] = {{8, 2}, {4, 4}, {6, 2}, {16, 2}, {16, 1}, {12, 4}};
    for (int i = 0; i < times; ++i) {
      const int n = static_cast<int>(cases.size());
      const auto [qo, kv] = kHeads[n % 6];
      o.num_qo_heads = qo;
      o.num_kv_heads = kv;
      o.page_size = kPageSizes[(n / 2) % 6];
      o.hnd = n % 3 == 1 && !o.contiguous;
      o.num_layers = n % 4 == 2 ? 2 : 0;
      o.layer = n % 4 == 2 ? 1 : 0;
      o.bad_ids = n % 5 == 3 && !o.contiguous;
      o.runs = n % 7 == 6;
      o.batch_invariant = n % 6 == 5;
      o.num_ctas = n % 2 ? 24 : 7;
      const int group = qo / kv;
      const TileClass& cls = o.classes.back();
      o.rows = lengths(cls.tile == 1 ? 1 : cls.packed ? cls.tile / group : cls.tile, n);
      push(o);
    }
  }

  void push(const Options& o) { cases.push_back({describe(o), o}); }
};

inline Options base(DType dtype, int qk, int vo, std::vector<TileClass> classes, uint32_t rules) {
  Options o;
  o.dtype = dtype;
  o.head_dim_qk = qk;
  o.head_dim_vo = vo;
  o.classes = std::move(classes);
  o.rules = rules;
  return o;
}

// Soft caps and scales of K: scores that the cap leaves as they are, bends and cuts off, rows of several
// kinds, and huge logits.
inline std::vector<std::pair<float, float>> soft_caps() {
  return {{50.0f, 1.0f},  {30.0f, 1.0f},   {10.0f, 1.0f}, {0.5f, 1.0f},  {30.0f, 5.0f},
          {50.0f, 60.0f}, {1e5f, 1000.0f}, {1e30f, 5.0f}, {1e-30f, 1.0f}};
}

inline std::vector<Case> make_cases() {
  constexpr uint32_t kSm = kRuleSoftmax, kCausal = kSm | kRuleCausal;
  constexpr uint32_t kWindows = kSm | kRuleCausal | kRuleWindowLeft | kRuleWindowRight;
  CaseList list;
  const DType bf16 = DType::kBF16, f16 = DType::kF16, f32 = DType::kF32;
  // Head dims and tiles. The true head dim is not always the padded one.
  const std::pair<int, int> dims[] = {{64, 64},   {40, 56},   {96, 72},   {128, 128},
                                      {104, 120}, {192, 192}, {256, 200}, {192, 128}};
  for (const auto& [qk, vo] : dims) {
    for (const int tile : {16, 32, 64, 128})
      list.add(base(bf16, qk, vo, {{tile, true}}, kCausal), qk == 128 ? 8 : 3);
    list.add(base(f32, qk, vo, {{1, true}}, kCausal), 3);
  }
  for (const int tile : {16, 32, 64, 128}) list.add(base(f16, 128, 128, {{tile, true}}, kCausal), 4);
  list.add(base(f16, 128, 128, {{1, true}}, kCausal), 3);
  list.add(base(bf16, 96, 96, {{1, true}}, kCausal), 3);
  // Unpacked rows, contiguous caches.
  for (const int tile : {16, 64, 128}) {
    list.add(base(bf16, 128, 128, {{tile, false}}, kCausal), 4);
    Options o = base(bf16, 128, 128, {{tile, tile < 128}}, kCausal);
    o.contiguous = true;
    list.add(o, 4);
  }
  Options dense = base(f32, 128, 128, {{1, false}}, kCausal);
  list.add(dense, 2);
  dense.contiguous = true;
  list.add(dense, 2);
  // Rules.
  const uint32_t rule_sets[] = {kSm,
                                kWindows,
                                kSm | kRuleWindowLeft,
                                kCausal | kRuleSoftCap,
                                kSm | kRuleMask,
                                kWindows | kRuleMask | kRuleSoftCap,
                                uint32_t{kRuleCausal}};
  for (const uint32_t rules : rule_sets) {
    for (const int tile : {16, 32, 64, 128}) list.add(base(bf16, 128, 128, {{tile, true}}, rules), 4);
    list.add(base(f32, 128, 128, {{1, true}}, rules), 4);
  }
  // Two classes, shared prefixes, block positions, layers outside the pool, extreme scales.
  for (int i = 0; i < 4; ++i) {
    Options o = base(bf16, 128, 128, {{16, true}, {128, i % 2 == 0}}, kCausal);
    o.rows = {{1, 900}, {200, 200}, {1, 33}, {2, 77}, {300, 450}, {0, 5}, {1, 1}};
    o.runs = i == 3;
    list.push(o);
  }
  for (const int tile : {1, 16, 64}) {
    Options o = base(tile == 1 ? f32 : bf16, 128, 128, {{tile, true}}, kCausal);
    o.rows = {{1, 50}, {3, 20}, {0, 0}, {2, 0}, {5, 333}};
    o.shared_prefix = 200;
    list.push(o);
    o.shared_prefix = 0;
    o.block_pos = true;
    for (const uint32_t rules : {kSm, kCausal, kWindows}) {
      o.rules = rules;
      o.page_size = 8;
      list.push(o);
    }
    o.block_pos = false;
    o.rules = kCausal;
    o.num_layers = 3;
    o.layer = 3;
    list.push(o);
    o.layer = -1;
    list.push(o);
    o.num_layers = 0;
    o.layer = 0;
    o.scale_k = 60.0f;
    list.push(o);
    o.scale_k = 1.0f;
    o.sm_scale = -0.2f;
    list.push(o);
  }
  for (const auto& [cap, scale] : soft_caps()) {
    for (const int tile : {1, 16, 128}) {
      Options o = base(tile == 1 ? f32 : bf16, 128, 128, {{tile, true}}, kCausal | kRuleSoftCap);
      o.rows = {{1, 50}, {3, 20}, {0, 0}, {2, 0}, {100, 333}};
      o.logits_soft_cap = cap;
      o.scale_k = scale;
      list.push(o);
      o.sm_scale = -0.2f;
      list.push(o);
    }
  }
  // Groups up to 128 in one tile.
  for (const int group : {17, 64, 65, 128}) {
    Options o = base(bf16, 128, 128, {{128, true}}, kCausal);
    o.num_qo_heads = group;
    o.num_kv_heads = 1;
    o.rows = {{1, 700}, {3, 50}, {2, 1}};
    list.push(o);
    o.dtype = f32;
    o.classes = {{1, true}};
    list.push(o);
  }
  // Rows that are no multiple of a line.
  for (const int tile : {16, 32, 64, 128}) list.add(base(bf16, 96, 96, {{tile, true}}, kCausal), 6);
  return list.cases;
}

}  // namespace jaxinfer::test
