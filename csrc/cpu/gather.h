// Where the K and V rows of a KV block lie: the only place that knows pages, layers and strides. Knows no
// math.
#pragma once

#include <cstdint>

#include "cpu/kernels.h"
#include "cpu/vec.h"

namespace jaxinfer::cpu::JAXINFER_ISA {

// What columns that are not present are read as.
alignas(64) static const float kZeroRow[kMaxHeadDim] = {};

template <class Storage>
JAXINFER_INLINE const Storage* zero_row() {
  return reinterpret_cast<const Storage*>(kZeroRow);
}

// One block of a BSR row's list, restricted to an item's range.
template <class Storage>
struct KvBlock {
  int64_t begin;               // index of column 0 in the row's list, a multiple of kBlockKV
  uint64_t present;            // columns inside the item's range whose page lies in the pool
  const Storage* k[kBlockKV];  // rows of present columns; other columns are zero rows
  const Storage* v[kBlockKV];
  int64_t pos[kBlockKV];  // positions, set for present columns and only where block positions are given
};

// The cache as one head of one item sees it.
template <class Storage>
struct KvSource {
  const Storage* k;  // of the layer and KV head
  const Storage* v;
  const AttentionParams* params;
  int64_t table_begin;
  int64_t kv_begin;  // [kv_begin, kv_end) of the row's list
  int64_t kv_end;

  // Fills the block that begins at `begin`.
  JAXINFER_INLINE void gather(int64_t begin, KvBlock<Storage>* block) const {
    const AttentionParams& p = *params;
    block->begin = begin;
    block->present = 0;
    if (begin < kv_begin || begin + kBlockKV > kv_end) clear(block);
    const int64_t first = begin > kv_begin ? begin : kv_begin;
    const int64_t last = begin + kBlockKV < kv_end ? begin + kBlockKV : kv_end;
    int64_t entry = table_begin + first / p.page_size;
    int64_t offset = first % p.page_size;
    for (int64_t j = first; j < last; ++entry, offset = 0) {
      const int64_t left = p.page_size - offset;
      const int64_t run_end = last - j < left ? last : j + left;
      const int64_t page = page_of(entry);
      if (page < 0) {
        for (; j < run_end; ++j) block->k[j - begin] = block->v[j - begin] = zero_row<Storage>();
        continue;
      }
      const Storage* k_row = k + page * p.k_strides.page + offset * p.k_strides.token;
      const Storage* v_row = v + page * p.v_strides.page + offset * p.v_strides.token;
      for (; j < run_end; ++j, ++offset) {
        const int64_t c = j - begin;
        block->k[c] = k_row;
        block->v[c] = v_row;
        if (p.block_pos != nullptr) block->pos[c] = int64_t{p.block_pos[entry]} + offset;
        block->present |= uint64_t{1} << c;
        k_row += p.k_strides.token;
        v_row += p.v_strides.token;
      }
    }
  }

 private:
  static void clear(KvBlock<Storage>* block) {
    for (int32_t c = 0; c < kBlockKV; ++c) block->k[c] = block->v[c] = zero_row<Storage>();
  }

  // The page of one entry of the row's list, -1 if it does not lie in the pool: such columns are masked, not
  // read.
  JAXINFER_INLINE int64_t page_of(int64_t entry) const {
    const AttentionParams& p = *params;
    if (p.kv_indices == nullptr) return entry >= 0 && entry < p.num_pages ? entry : -1;
    if (entry < 0 || entry >= p.kv_indices_capacity) return -1;
    const int64_t page = p.kv_indices[entry];
    return page >= 0 && page < p.num_pages ? page : -1;
  }
};

template <class Storage>
JAXINFER_INLINE KvSource<Storage> make_source(const AttentionParams& p, const Item& item, int32_t kv_head) {
  const int64_t layer = p.layer == nullptr ? 0 : *p.layer;
  KvSource<Storage> source;
  source.k = static_cast<const Storage*>(p.k) + layer * p.k_strides.layer + kv_head * p.k_strides.head;
  source.v = static_cast<const Storage*>(p.v) + layer * p.v_strides.layer + kv_head * p.v_strides.head;
  source.params = &p;
  source.table_begin = item.table_begin;
  source.kv_begin = item.kv_begin;
  source.kv_end = item.kv_end;
  return source;
}

}  // namespace jaxinfer::cpu::JAXINFER_ISA
