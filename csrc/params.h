// Parameter structs that cross from the FFI handlers to the CPU executor and to the GPU kernels. Pointers are
// borrowed for the call; every pointer carries its shape. Nothing here knows XLA, Python or JAX.
#pragma once

#include <cstdint>

#include "plan/format.h"

namespace jaxinfer {

enum class DType : int32_t { kF32 = 0, kF16 = 1, kBF16 = 2 };

// Which attention rules are on: the structure a kernel is compiled for. Values live in VariantParams.
enum Rule : uint32_t {
  kRuleCausal = 1u << 0,       // kv_pos <= q_pos
  kRuleWindowLeft = 1u << 1,   // kv_pos >= q_pos - window_left
  kRuleWindowRight = 1u << 2,  // kv_pos <= q_pos + window_right
  kRuleSoftCap = 1u << 3,      // s = cap * tanh(s / cap)
  kRuleMask = 1u << 4,         // custom bit mask
  kRuleSoftmax = 1u << 5,      // off: o = sum w_j v_j, partial results add up, lse is not defined
};

struct VariantParams {
  uint32_t rules;  // OR of Rule
  float sm_scale;
  float logits_soft_cap;  // read only with kRuleSoftCap
  int32_t window_left;    // read only with kRuleWindowLeft
  int32_t window_right;   // read only with kRuleWindowRight
  // [mask_capacity] little-endian bits; bit (token - q_start) * kv_len + index of the row
  const uint8_t* mask_bits;
  const int32_t* mask_indptr;  // [num_rows + 1] byte offset of each row's first bit
  int64_t mask_capacity;       // bytes; a bit beyond it counts as masked
  const int32_t* q_start;      // [num_rows] read only with kRuleMask
  const int32_t* kv_len;       // [num_rows] read only with kRuleMask

  bool on(Rule rule) const { return (rules & rule) != 0; }
};

// Where the rows of one cache tensor (K or V) lie. Strides count elements; products are taken in 64 bits.
struct CacheStrides {
  int64_t layer;  // 0 without a layer axis
  int64_t page;   // contiguous: one KV token (page_size is 1)
  int64_t token;  // inside a page
  int64_t head;
};

// Division of [0, 2^31) by a number that is only known at run time: a product and a shift. The host prepares
// it: a GPU would take longer for its magic number than for the first bytes of K.
struct Divider {
  uint32_t magic;
  uint32_t shift;
  int32_t divisor;

  Divider() = default;
  explicit Divider(int32_t d) : divisor(d) {
    uint32_t log = 0;  // ceil(log2(d))
    while ((int64_t{1} << log) < d) ++log;
    shift = 31 + log;
    // magic * d is in [2^shift, 2^shift + 2^log): the error stays under one for n < 2^31.
    magic = static_cast<uint32_t>(((uint64_t{1} << shift) + d - 1) / static_cast<uint32_t>(d));
  }
  constexpr int32_t divide(int32_t n) const {
    return static_cast<int32_t>(static_cast<uint64_t>(static_cast<uint32_t>(n)) * magic >> shift);
  }
};

struct AttentionParams {
  const void* q;         // [num_tokens, num_qo_heads, head_dim_qk] of dtype
  const void* k;         // [num_layers?, num_pages, page_size, num_kv_heads, head_dim_qk] through k_strides
  const void* v;         // [num_layers?, num_pages, page_size, num_kv_heads, head_dim_vo] through v_strides
  const int32_t* layer;  // [1], or null without a layer axis; out of range: every token gets the empty state
  const int32_t* plan;   // [format.num_words]
  const int32_t* kv_indices;  // [kv_indices_capacity] page ids; null when contiguous
  const int32_t* kv_offset;   // [num_rows] position of each row's first KV token
  const int32_t* q_pos;       // [num_tokens]
  const int32_t* block_pos;   // [kv_indices_capacity] position of each listed block's first token, or null

  void* o;     // [num_tokens, num_qo_heads, head_dim_vo] of dtype
  float* lse;  // [num_tokens, num_qo_heads] natural log; undefined without kRuleSoftmax
  // The partial state of a slot and head is (o, max, sum): o and sum are taken relative to max, and o is not
  // divided by sum. A log-sum-exp in their place would round max + log(sum), and with it the weight of the
  // piece.
  // [slot_capacity, num_qo_heads, head_dim_vo] sum of exp(logit - max) v; without softmax, of logit v
  float* partial_o;
  float* partial_max;  // [slot_capacity, num_qo_heads] largest logit, or one that is a few units smaller
  float* partial_sum;  // [slot_capacity, num_qo_heads] sum of exp(logit - max); 0: the piece saw nothing

  DType dtype;  // of q, k, v and o
  int32_t num_tokens;
  int32_t num_rows;
  int32_t num_qo_heads;
  int32_t num_kv_heads;
  int32_t head_dim_qk;
  int32_t head_dim_vo;
  int32_t num_layers;           // 1 without a layer axis
  int64_t num_pages;            // contiguous: KV tokens
  int32_t page_size;            // 1 when contiguous
  int64_t kv_indices_capacity;  // 0 when contiguous
  CacheStrides k_strides;
  CacheStrides v_strides;
  PlanFormat format;
  VariantParams variant;
  // By group_size() and page_size, for the kernels of GPUs: set_dividers.
  Divider group_divider;
  Divider page_divider;

  void set_dividers() {
    group_divider = Divider(group_size());
    page_divider = Divider(page_size);
  }
  int32_t group_size() const { return num_qo_heads / num_kv_heads; }
  // Whether CTAs 2c and 2c + 1 of a class, which read the same tokens for two heads, should run on
  // neighbouring multiprocessors, where the device can promise that. Measured on an H200 in two runs: 64 x
  // 2048 takes 0.9 and 1.0% less, 64 and 128 skewed 0.4 to 0.8%; of smaller batches 16 x 4096 0.9 and 1.3%
  // and 1 x 1024 2.2% less, but 16 of 512 to 1024 0.7 and 1.0%, 8 x 1024 1.2 and 1 x 8192 0.6% more. Fours:
  // 25% more.
  bool runs_in_pairs(int32_t cls) const {
    const ClassFormat& of = format.classes[cls];
    return format.num_classes == 1 && of.tile == 16 && of.num_ctas % 2 == 0 && num_rows >= 64;
  }
};

// A tensor map as cuTensorMapEncodeTiled writes it; a kernel only hands its address to the copy engine.
struct alignas(64) TensorMap {
  uint64_t words[16];
};

// What one swizzle pattern of the copy engine spans: 128 bytes of eight rows.
constexpr int kPanelElements = 64;  // of a row, of 16 bits
constexpr int kPatternRows = 8;

// How the copy engine reads the operands of one launch of attention_wgmma. Fastest dimension first, Q is
// [head_dim_qk][num_qo_heads][num_tokens]; contiguous K and V [head_dim][tokens][num_kv_heads][num_layers];
// pages, of all layers one behind the other, in groups of kPatternRows rows:
// [kPanelElements][kPatternRows][panels][groups][num_kv_heads], or where head_dim is no whole number of
// panels [head_dim][kPatternRows][groups][num_kv_heads].
struct TensorMaps {
  TensorMap q;
  TensorMap k;  // k and v: not filled where pages are gathered row by row
  TensorMap v;
};

struct AppendParams {
  void* k_pages;  // [num_layers?, num_pages, page_size, num_kv_heads, head_dim_qk], written in place
  void* v_pages;  // [num_layers?, num_pages, page_size, num_kv_heads, head_dim_vo], written in place
  const void* k;  // [num_tokens, num_kv_heads, head_dim_qk]
  const void* v;  // [num_tokens, num_kv_heads, head_dim_vo]
  // [num_tokens] page * page_size + offset; outside [0, num_pages * page_size): skipped
  const int32_t* slots;
  const int32_t* layer;  // [1], or null without a layer axis; out of range: nothing is written

  int32_t element_size;  // bytes of one element
  int32_t num_tokens;
  int32_t num_kv_heads;
  int32_t head_dim_qk;
  int32_t head_dim_vo;
  int32_t num_layers;
  int64_t num_pages;
  int32_t page_size;
  CacheStrides k_strides;
  CacheStrides v_strides;
  // By the 16-byte chunks of a row, for the kernel of GPUs: set_dividers.
  Divider k_chunks;
  Divider v_chunks;

  void set_dividers() {
    k_chunks = Divider(head_dim_qk * element_size / 16);
    v_chunks = Divider(head_dim_vo * element_size / 16);
  }
};

}  // namespace jaxinfer
