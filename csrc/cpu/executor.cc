// Deals the work of a plan to tasks and picks the instruction set. No arithmetic on values happens here.
#include "cpu/executor.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <thread>

#include "cpu/kernels.h"
#include "integers.h"

namespace jaxinfer::cpu {
namespace {

// Below this many multiply-adds (about 20 microseconds of one core) waking other threads costs more than it
// gains.
constexpr int64_t kMinParallelWork = 400'000;
constexpr int64_t kMinParallelBytes = 256 * 1024;

Isa best_isa() {
#if defined(__x86_64__)
  const bool avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (avx2 && avx512) return Isa::kAvx512;
  if (avx2) return Isa::kAvx2;
#endif
  return Isa::kScalar;
}

Isa choose_isa() {
  const Isa best = best_isa();
  const char* text = std::getenv("JAXINFER_CPU_ISA");
  if (text == nullptr || *text == '\0') return best;
  for (const Isa isa : {Isa::kScalar, Isa::kAvx2, Isa::kAvx512}) {
    if (std::strcmp(text, isa_name(isa)) == 0) return isa < best ? isa : best;
  }
  std::fprintf(stderr, "jaxinfer: JAXINFER_CPU_ISA is '%s', expected scalar, avx2 or avx512; using %s\n",
               text, isa_name(best));
  return best;
}

const Kernels& kernels() {
  switch (isa()) {
#if defined(__x86_64__)
    case Isa::kAvx512:
      return avx512::kernels();
    case Isa::kAvx2:
      return avx2::kernels();
#endif
    default:
      return scalar::kernels();
  }
}

// Memory of the calling thread, kept between calls.
float* thread_scratch(int64_t floats) {
  constexpr std::align_val_t kAlignment{64};
  struct Free {
    void operator()(float* p) const { ::operator delete(p, kAlignment); }
  };
  thread_local std::unique_ptr<float, Free> memory;
  thread_local int64_t capacity = 0;
  if (capacity < floats) {
    memory.reset();
    capacity = 0;
    memory.reset(
        static_cast<float*>(::operator new(static_cast<size_t>(floats) * sizeof(float), kAlignment)));
    capacity = floats;
  }
  return memory.get();
}

bool layer_in_range(const int32_t* layer, int32_t num_layers) {
  return layer == nullptr || (*layer >= 0 && *layer < num_layers);
}

// Runs body(begin, end) over pieces of [0, count): one piece when there is little work, else about 64 of
// them.
template <class Body>
void for_pieces(const ParallelFor& parallel_for, int64_t count, bool little, const Body& body) {
  if (count == 0) return;
  if (little) return body(0, count);
  const int64_t piece = ceil_div(count, 64);
  parallel_for(ceil_div(count, piece), [&](int64_t i) {
    const int64_t begin = i * piece;
    body(begin, begin + piece < count ? begin + piece : count);
  });
}

// Multiply-adds of all items.
int64_t total_work(const AttentionParams& p) {
  int64_t pairs = 0;
  for (int32_t c = 0; c < p.format.num_classes; ++c) {
    const Item* items = p.format.items(p.plan, c);
    const int32_t count = p.plan[kHeaderNumItems + c];
    for (int32_t i = 0; i < count; ++i) {
      pairs += int64_t{items[i].num_tokens()} * (1 + int64_t{items[i].kv_end} - items[i].kv_begin);
    }
  }
  return pairs * p.num_qo_heads * (p.head_dim_qk + p.head_dim_vo);
}

// Tasks [begin, end) of one class.
struct TaskRange {
  int64_t begin;
  int64_t end;
  int32_t heads;  // of the class
  int32_t heads_per_task;
  int32_t chunks;    // tasks of one queue
  bool queue_major;  // tasks of a queue follow one another; else tasks of a head do
};

// KV heads that one task of a memory-bound class takes together. Where heads of a token are neighbours in
// memory, a kilobyte or more in one piece lets the hardware stream it: 1.2 to 1.5 times the speed of 256-byte
// pieces that are 768 bytes apart. Not at the price of idle threads.
int32_t heads_per_task(const AttentionParams& p, int32_t num_queues, int32_t heads) {
  static const int64_t min_tasks = 4 * int64_t{std::max(1u, std::thread::hardware_concurrency())};
  if (p.k_strides.head != p.head_dim_qk || p.v_strides.head != p.head_dim_vo) return 1;
  const int64_t row_bytes = int64_t{p.head_dim_qk} * (p.dtype == DType::kF32 ? 4 : 2);
  const int64_t by_size = ceil_div(1024, row_bytes);
  const int64_t by_tasks = heads / std::min<int64_t>(heads, ceil_div(min_tasks, num_queues));
  return static_cast<int32_t>(std::min({by_size, by_tasks, int64_t{heads}}));
}

TaskRange make_tasks(const AttentionParams& p, const ClassFormat& cls, int64_t begin) {
  TaskRange range;
  range.heads = cls.packed ? p.num_kv_heads : p.num_qo_heads;
  range.queue_major = !cls.is_compute_bound(p.group_size());
  range.heads_per_task = range.queue_major && cls.packed ? heads_per_task(p, cls.num_queues, range.heads) : 1;
  range.chunks = static_cast<int32_t>(ceil_div(range.heads, range.heads_per_task));
  range.begin = begin;
  range.end = begin + int64_t{cls.num_queues} * range.chunks;
  return range;
}

}  // namespace

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::kScalar:
      return "scalar";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
  }
  return "unknown";
}

Isa isa() {
  static const Isa chosen = choose_isa();
  return chosen;
}

void attention(const AttentionParams& p, const ParallelFor& parallel_for) {
  const Kernels& code = kernels();
  if (!layer_in_range(p.layer, p.num_layers)) {
    code.write_empty(p, 0, p.num_tokens);
    return;
  }
  // One task is a queue with some of its heads. What a GPU's CTA would run in turn does not depend on one
  // another.
  TaskRange ranges[kMaxClasses];
  int64_t num_tasks = 0;
  for (int32_t c = 0; c < p.format.num_classes; ++c) {
    ranges[c] = make_tasks(p, p.format.classes[c], num_tasks);
    num_tasks = ranges[c].end;
  }
  const int64_t scratch_size = scratch_floats(p);
  const auto task = [&](int64_t i) {
    const int32_t c = i < ranges[0].end ? 0 : 1;
    const ClassFormat& cls = p.format.classes[c];
    const TaskRange& range = ranges[c];
    const int32_t worker = static_cast<int32_t>(i - range.begin);
    const int32_t queue = range.queue_major ? worker / range.chunks : worker % cls.num_queues;
    const int32_t chunk = range.queue_major ? worker % range.chunks : worker / cls.num_queues;
    const int32_t* indptr = p.plan + cls.queue_indptr;
    if (indptr[queue] == indptr[queue + 1]) return;
    const int32_t head = chunk * range.heads_per_task;
    const int32_t head_end =
        head + range.heads_per_task < range.heads ? head + range.heads_per_task : range.heads;
    code.run_queue(p, c, queue, head, head_end, thread_scratch(scratch_size));
  };
  const bool little = total_work(p) < kMinParallelWork;
  if (little) {
    for (int64_t i = 0; i < num_tasks; ++i) task(i);
  } else {
    parallel_for(num_tasks, task);
  }
  const int32_t entries = p.plan[kHeaderNumMerge];
  const int64_t merge_work = int64_t{p.plan[kHeaderNumSlots]} * p.num_qo_heads * p.head_dim_vo;
  for_pieces(parallel_for, entries, merge_work < kMinParallelWork / 4, [&](int64_t begin, int64_t end) {
    code.merge(p, static_cast<int32_t>(begin), static_cast<int32_t>(end));
  });
}

namespace {

// Copies one token's K or V: [num_kv_heads, head_dim] into its slot.
void append_token(const AppendParams& p, void* pages, const CacheStrides& strides, int64_t layer,
                  const void* rows, int32_t head_dim, int64_t token, int64_t slot) {
  const int64_t size = p.element_size;
  const int64_t row_bytes = head_dim * size;
  const char* from = static_cast<const char*>(rows) + token * p.num_kv_heads * row_bytes;
  char* to =
      static_cast<char*>(pages) +
      (layer * strides.layer + slot / p.page_size * strides.page + slot % p.page_size * strides.token) * size;
  if (strides.head == head_dim) {
    std::memcpy(to, from, static_cast<size_t>(p.num_kv_heads * row_bytes));
    return;
  }
  for (int32_t h = 0; h < p.num_kv_heads; ++h) {
    std::memcpy(to + h * strides.head * size, from + h * row_bytes, static_cast<size_t>(row_bytes));
  }
}

}  // namespace

void append(const AppendParams& p, const ParallelFor& parallel_for) {
  if (!layer_in_range(p.layer, p.num_layers)) return;
  const int64_t layer = p.layer == nullptr ? 0 : *p.layer;
  const int64_t num_slots = p.num_pages * p.page_size;
  const int64_t bytes =
      int64_t{p.num_tokens} * p.num_kv_heads * (p.head_dim_qk + p.head_dim_vo) * p.element_size;
  for_pieces(parallel_for, p.num_tokens, bytes < kMinParallelBytes, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t slot = p.slots[t];
      if (slot < 0 || slot >= num_slots) continue;
      append_token(p, p.k_pages, p.k_strides, layer, p.k, p.head_dim_qk, t, slot);
      append_token(p, p.v_pages, p.v_strides, layer, p.v, p.head_dim_vo, t, slot);
    }
  });
}

}  // namespace jaxinfer::cpu
