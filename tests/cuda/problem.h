// Random attention problems for the kernel test: layouts, poisoned caches, and plans made by the product's
// planner. Knows no GPU.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "params.h"
#include "plan/capacity.h"
#include "plan/cost.h"
#include "plan/planner.h"

namespace jaxinfer::test {

struct TileClass {
  int tile;
  bool packed;
  std::optional<int> num_ctas = std::nullopt;  // else those of the options
};

// What a problem is made of. Rows are (q_len, kv_len) of requests, in order, without padding between them.
struct Options {
  DType dtype = DType::kBF16;
  int head_dim_qk = 128, head_dim_vo = 128;
  int num_qo_heads = 8, num_kv_heads = 2;
  int page_size = 16;
  bool hnd = false, contiguous = false;
  int num_layers = 0, layer = 0;  // 0: no layer axis
  bool block_pos = false;         // lists skip blocks
  bool bad_ids = false;           // some page ids lie outside the pool
  int shared_prefix = 0;          // KV tokens of a row that all tokens see as well (two layouts)
  uint32_t rules = kRuleSoftmax;
  float sm_scale = 0.0f;  // 0: 1 / sqrt(head_dim_qk)
  float logits_soft_cap = 20.0f;
  int window_left = 70, window_right = 3;
  std::vector<TileClass> classes;
  int num_ctas = 24;
  bool runs = false, side_by_side = false, batch_invariant = false;
  std::vector<std::pair<int, int>> rows;
  int padding = 3;      // tokens behind the last request
  float scale_k = 1.0;  // makes logits large
};

// What is known of class c before there is a plan.
inline ClassFormat class_format(const Options& o, size_t c) {
  ClassFormat cls{};
  cls.tile = o.classes[c].tile;
  cls.packed = o.classes[c].packed ? 1 : 0;
  cls.num_ctas = o.classes[c].num_ctas.value_or(o.num_ctas);
  cls.num_queues = choose_num_queues(cls.num_ctas, num_heads(cls, o.num_qo_heads, o.num_kv_heads));
  return cls;
}

inline int element_size(DType dtype) {
  return dtype == DType::kF32 ? 4 : 2;
}

inline uint16_t to_half(DType dtype, float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (dtype == DType::kBF16) return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  // Values here are normal in float16, or 0.
  const uint32_t sign = bits >> 16 & 0x8000;
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude < 0x38800000) return static_cast<uint16_t>(sign);
  return static_cast<uint16_t>(sign | (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13);
}

inline float from_element(DType dtype, const uint8_t* p) {
  if (dtype == DType::kF32) {
    float x;
    std::memcpy(&x, p, 4);
    return x;
  }
  uint16_t h;
  std::memcpy(&h, p, 2);
  uint32_t bits;
  if (dtype == DType::kBF16) {
    bits = uint32_t{h} << 16;
  } else {
    const uint32_t sign = uint32_t{h} >> 15 << 31, magnitude = h & 0x7fff;
    if (magnitude >= 0x7c00) {
      bits = sign | 0x7f800000 | magnitude << 13;
    } else if (magnitude >= 0x400) {
      bits = sign | ((magnitude << 13) + (112u << 23));
    } else {
      const float x = static_cast<float>(magnitude) * 0x1p-24f;
      return sign ? -x : x;
    }
  }
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

inline void put_element(DType dtype, float x, uint8_t* p) {
  if (dtype == DType::kF32) {
    std::memcpy(p, &x, 4);
  } else {
    const uint16_t h = to_half(dtype, x);
    std::memcpy(p, &h, 2);
  }
}

using Bytes = std::vector<uint8_t>;
using Ints = std::vector<int32_t>;

struct Problem {
  Options options;
  Bytes q, k, v;
  Ints layer, plan, kv_indices, kv_offset, q_pos, block_pos, q_start, q_len, kv_start, kv_len, mask_indptr;
  Bytes mask_bits;
  AttentionParams params;  // host pointers; o, lse and partials are null
};

inline CacheStrides make_strides(const Options& o, int64_t num_pages, int head_dim) {
  CacheStrides s{};
  const int64_t d = head_dim, h = o.num_kv_heads, p = o.contiguous ? 1 : o.page_size;
  s.page = p * h * d;
  s.token = o.hnd ? d : h * d;
  s.head = o.hnd ? p * d : d;
  s.layer = o.num_layers > 0 ? num_pages * s.page : 0;
  return s;
}

// The layout's arrays: rows, pages in random order with absurd ids behind the used ones, positions.
inline void make_layout(const Options& o, std::mt19937& rng, Problem* p, int64_t* num_pages) {
  const int page_size = o.contiguous ? 1 : o.page_size;
  int num_tokens = 0;
  for (const auto& row : o.rows) num_tokens += row.first;
  auto add_row = [&](int q_start, int q_len, int kv_len, int kv_offset) {
    p->q_start.push_back(q_start);
    p->q_len.push_back(q_len);
    p->kv_len.push_back(kv_len);
    p->kv_offset.push_back(kv_offset);
  };
  if (o.shared_prefix > 0) add_row(0, num_tokens, o.shared_prefix, 0);
  int token = 0;
  for (const auto& [q_len, kv_len] : o.rows) {
    add_row(token, q_len, kv_len, o.shared_prefix);
    for (int i = 0; i < q_len; ++i) p->q_pos.push_back(o.shared_prefix + kv_len - q_len + i);
    token += q_len;
  }
  for (int i = 0; i < o.padding; ++i) p->q_pos.push_back(0);

  int64_t used = 0;
  for (const int len : p->kv_len) used += (len + page_size - 1) / page_size;
  *num_pages = used + 5;
  if (o.contiguous) {
    int start = 2;
    for (const int len : p->kv_len) {
      p->kv_start.push_back(start);
      start += len;
    }
    return;
  }
  Ints pages(*num_pages);
  for (size_t i = 0; i < pages.size(); ++i) pages[i] = static_cast<int32_t>(i);
  std::shuffle(pages.begin(), pages.end(), rng);
  size_t next = 0;
  for (size_t r = 0; r < p->kv_len.size(); ++r) {
    p->kv_start.push_back(static_cast<int32_t>(p->kv_indices.size()));
    const int blocks = (p->kv_len[r] + page_size - 1) / page_size;
    int position = static_cast<int>(rng() % 3) * page_size;
    for (int b = 0; b < blocks; ++b) {
      const bool bad = o.bad_ids && rng() % 5 == 0;
      p->kv_indices.push_back(bad ? (rng() % 2 ? 2147480000 : -7) : pages[next]);
      ++next;
      if (o.block_pos) {
        p->block_pos.push_back(position);
        position += page_size * static_cast<int>(1 + rng() % 2);
      }
    }
    if (o.block_pos) {
      // Queries at positions spread over what the row lists.
      for (int i = 0; i < p->q_len[r]; ++i) {
        p->q_pos[p->q_start[r] + i] = position - page_size - p->q_len[r] + i;
      }
    }
  }
  for (int i = 0; i < 9; ++i) {
    p->kv_indices.push_back(2147480000);
    if (o.block_pos) p->block_pos.push_back(2147480000);
  }
}

// Random K or V where rows list tokens, NaN everywhere else.
inline Bytes make_pool(const Options& o, const Problem& p, int64_t num_pages, int head_dim, float scale,
                       std::mt19937& rng) {
  const int page_size = o.contiguous ? 1 : o.page_size;
  const CacheStrides s = make_strides(o, num_pages, head_dim);
  const int layers = o.num_layers > 0 ? o.num_layers : 1;
  const int size = element_size(o.dtype);
  Bytes pool(static_cast<size_t>(layers) * num_pages * s.page * size, 0xff);  // all ones is NaN in every type
  std::normal_distribution<float> normal;
  const int64_t layer = o.num_layers > 0 && o.layer >= 0 && o.layer < o.num_layers ? o.layer : 0;
  for (size_t r = 0; r < p.kv_len.size(); ++r) {
    for (int j = 0; j < p.kv_len[r]; ++j) {
      const int64_t page = o.contiguous ? p.kv_start[r] + j : p.kv_indices[p.kv_start[r] + j / page_size];
      if (page < 0 || page >= num_pages) continue;
      for (int h = 0; h < o.num_kv_heads; ++h) {
        const int64_t at =
            layer * s.layer + page * s.page + (o.contiguous ? 0 : j % page_size * s.token) + h * s.head;
        for (int d = 0; d < head_dim; ++d) put_element(o.dtype, normal(rng) * scale, &pool[(at + d) * size]);
      }
    }
  }
  return pool;
}

// What the planner sees of a problem.
inline LayoutView layout_view(const Problem& p, bool with_block_pos) {
  LayoutView layout{};
  layout.q_start = p.q_start.data();
  layout.q_len = p.q_len.data();
  layout.kv_start = p.kv_start.data();
  layout.kv_indices = p.kv_indices.data();
  layout.kv_len = p.kv_len.data();
  layout.kv_offset = p.kv_offset.data();
  layout.q_pos = p.q_pos.data();
  layout.block_pos = with_block_pos ? p.block_pos.data() : nullptr;
  layout.kv_indices_capacity = static_cast<int64_t>(p.kv_indices.size());
  return layout;
}

// What every problem needs beside its data, from make_layout's arrays: the plan, and the facts and host
// pointers of the call. `fine`: small problems are cut into pieces, too.
inline void make_plan_and_params(Problem* problem, int64_t num_pages, bool fine) {
  Problem& p = *problem;
  const Options& o = p.options;
  PlanRequest request{};
  request.num_tokens = static_cast<int>(p.q_pos.size());
  request.num_rows = static_cast<int>(p.q_len.size());
  request.num_layouts = o.shared_prefix > 0 ? 2 : 1;
  request.page_size = o.contiguous ? 1 : o.page_size;
  request.kv_capacity = o.contiguous ? num_pages : static_cast<int64_t>(p.kv_indices.size()) * o.page_size;
  request.contiguous = o.contiguous;
  request.num_qo_heads = o.num_qo_heads;
  request.num_kv_heads = o.num_kv_heads;
  request.head_dim_qk = o.head_dim_qk;
  request.head_dim_vo = o.head_dim_vo;
  request.element_size = element_size(o.dtype);
  request.schedule = o.runs ? Schedule::kRuns : Schedule::kLpt;
  request.side_by_side = o.side_by_side;
  request.batch_invariant = o.batch_invariant;
  request.split_tokens = fine ? 64 : 512;
  request.clip.causal = (o.rules & kRuleCausal) != 0;
  if ((o.rules & kRuleWindowLeft) != 0) request.clip.window_left = o.window_left;
  if ((o.rules & kRuleWindowRight) != 0) request.clip.window_right = o.window_right;
  request.format.num_classes = static_cast<int32_t>(o.classes.size());
  for (size_t c = 0; c < o.classes.size(); ++c) {
    ClassFormat& cls = request.format.classes[c];
    cls = class_format(o, c);
    request.costs[c] = default_costs(request.schedule, cls, request.group_size());
    if (fine) {
      request.costs[c].block = 1;
      request.costs[c].floor = 32;
      request.costs[c].fixed = 16;
      request.costs[c].granule = 16;
      request.costs[c].merge = request.costs[c].merge_token = 0;
    }
  }
  fill_capacities(&request);
  const LayoutView layout = layout_view(p, o.block_pos);
  p.plan.resize(request.format.num_words + 4);
  while (reinterpret_cast<uintptr_t>(p.plan.data()) % 16 != 0) p.plan = Ints(p.plan);
  make_plan(layout, request, p.plan.data());

  AttentionParams& a = p.params;
  a.layer = o.num_layers > 0 ? p.layer.data() : nullptr;
  a.plan = p.plan.data();
  a.kv_indices = o.contiguous ? nullptr : p.kv_indices.data();
  a.kv_offset = p.kv_offset.data();
  a.q_pos = p.q_pos.data();
  a.block_pos = layout.block_pos;
  a.dtype = o.dtype;
  a.num_tokens = request.num_tokens;
  a.num_rows = request.num_rows;
  a.num_qo_heads = o.num_qo_heads;
  a.num_kv_heads = o.num_kv_heads;
  a.head_dim_qk = o.head_dim_qk;
  a.head_dim_vo = o.head_dim_vo;
  a.num_layers = o.num_layers > 0 ? o.num_layers : 1;
  a.num_pages = num_pages;
  a.page_size = request.page_size;
  a.kv_indices_capacity = o.contiguous ? 0 : static_cast<int64_t>(p.kv_indices.size());
  a.k_strides = make_strides(o, num_pages, o.head_dim_qk);
  a.v_strides = make_strides(o, num_pages, o.head_dim_vo);
  a.format = request.format;
  a.variant.rules = o.rules;
  a.variant.sm_scale = o.sm_scale != 0.0f ? o.sm_scale : 1.0f / std::sqrt(static_cast<float>(o.head_dim_qk));
  a.variant.logits_soft_cap = o.logits_soft_cap;
  a.variant.window_left = o.window_left;
  a.variant.window_right = o.window_right;
  a.set_dividers();
}

inline Problem make_problem(const Options& o, uint32_t seed) {
  std::mt19937 rng(seed);
  Problem p{};
  p.options = o;
  int64_t num_pages = 0;
  make_layout(o, rng, &p, &num_pages);
  const int num_tokens = static_cast<int>(p.q_pos.size());
  const int num_rows = static_cast<int>(p.q_len.size());
  const int size = element_size(o.dtype);
  p.k = make_pool(o, p, num_pages, o.head_dim_qk, o.scale_k, rng);
  p.v = make_pool(o, p, num_pages, o.head_dim_vo, 1.0f, rng);
  p.q.assign(static_cast<size_t>(num_tokens) * o.num_qo_heads * o.head_dim_qk * size, 0xff);
  std::normal_distribution<float> normal;
  const size_t real = static_cast<size_t>(num_tokens - o.padding) * o.num_qo_heads * o.head_dim_qk;
  for (size_t i = 0; i < real; ++i) put_element(o.dtype, normal(rng), &p.q[i * size]);
  if (o.num_layers > 0) p.layer = {o.layer};
  p.mask_indptr.push_back(0);
  for (int r = 0; r < num_rows; ++r) {
    const int64_t bits = int64_t{p.q_len[r]} * p.kv_len[r];
    p.mask_indptr.push_back(p.mask_indptr.back() + static_cast<int32_t>((bits + 7) / 8));
  }
  for (int i = 0; i < p.mask_indptr.back(); ++i) p.mask_bits.push_back(static_cast<uint8_t>(rng() | rng()));

  make_plan_and_params(&p, num_pages, true);
  AttentionParams& a = p.params;
  a.q = p.q.data();
  a.k = p.k.data();
  a.v = p.v.data();
  a.variant.mask_bits = p.mask_bits.data();
  a.variant.mask_indptr = p.mask_indptr.data();
  a.variant.mask_capacity = static_cast<int64_t>(p.mask_bits.size());
  a.variant.q_start = p.q_start.data();
  a.variant.kv_len = p.kv_len.data();
  return p;
}

}  // namespace jaxinfer::test
