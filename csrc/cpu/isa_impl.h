// The table of functions of one instruction set. Included once by each isa_*.cc, after JAXINFER_ISA (the
// namespace) and JAXINFER_VEC_WIDTH are defined.
#pragma once

#include "cpu/merge.h"
#include "cpu/tile.h"

namespace jaxinfer::cpu::JAXINFER_ISA {

// Runs an item for heads [head_begin, head_end) of its class, as many at a time as fit in one turn.
template <class T>
void run_item(const AttentionParams& p, const ClassFormat& cls, const Item& item, int32_t head_begin,
              int32_t head_end, float* scratch) {
  const int32_t group = p.group_size();
  const int32_t num_tokens = item.num_tokens();
  Rows rows;
  rows.heads = cls.packed ? group : 1;
  if (item.bsr_row < 0 && item.out < 0) {
    write_empty_states<T>(p, item.token_begin, num_tokens, int64_t{head_begin} * rows.heads,
                          int64_t{head_end - head_begin} * rows.heads);
    return;
  }
  const int32_t token_step = kMaxRows / rows.heads;
  for (int32_t t = 0; t < num_tokens; t += token_step) {
    rows.token = int64_t{item.token_begin} + t;
    rows.num_tokens = num_tokens - t < token_step ? num_tokens - t : token_step;
    // Unpacked heads that share a KV head would not lie where Rows expects them: one at a time.
    const int32_t head_step = cls.packed ? kMaxRows / rows.per_kv_head() : 1;
    for (int32_t h = head_begin; h < head_end; h += head_step) {
      rows.first_head = h * rows.heads;
      rows.kv_head = rows.first_head / group;
      rows.num_kv_heads = head_end - h < head_step ? head_end - h : head_step;
      Tile<T>(p, item, rows, scratch).run();
    }
  }
}

template <class T>
void run_queue_of(const AttentionParams& p, int32_t class_index, int32_t queue, int32_t head_begin,
                  int32_t head_end, float* scratch) {
  const ClassFormat& cls = p.format.classes[class_index];
  const int32_t* indptr = p.plan + cls.queue_indptr;
  const Item* items = p.format.items(p.plan, class_index);
  for (int32_t i = indptr[queue]; i < indptr[queue + 1]; ++i) {
    run_item<T>(p, cls, items[i], head_begin, head_end, scratch);
  }
}

static void run_queue(const AttentionParams& p, int32_t class_index, int32_t queue, int32_t head_begin,
                      int32_t head_end, float* scratch) {
  switch (p.dtype) {
    case DType::kF32:
      return run_queue_of<F32>(p, class_index, queue, head_begin, head_end, scratch);
    case DType::kF16:
      return run_queue_of<F16>(p, class_index, queue, head_begin, head_end, scratch);
    case DType::kBF16:
      return run_queue_of<BF16>(p, class_index, queue, head_begin, head_end, scratch);
  }
}

static void merge(const AttentionParams& p, int32_t begin, int32_t end) {
  switch (p.dtype) {
    case DType::kF32:
      return merge_entries<F32>(p, begin, end);
    case DType::kF16:
      return merge_entries<F16>(p, begin, end);
    case DType::kBF16:
      return merge_entries<BF16>(p, begin, end);
  }
}

static void write_empty(const AttentionParams& p, int32_t begin, int32_t end) {
  switch (p.dtype) {
    case DType::kF32:
      return write_empty_states<F32>(p, begin, end - begin, 0, p.num_qo_heads);
    case DType::kF16:
      return write_empty_states<F16>(p, begin, end - begin, 0, p.num_qo_heads);
    case DType::kBF16:
      return write_empty_states<BF16>(p, begin, end - begin, 0, p.num_qo_heads);
  }
}

const Kernels& kernels() {
  static constexpr Kernels table = {run_queue, merge, write_empty};
  return table;
}

}  // namespace jaxinfer::cpu::JAXINFER_ISA
