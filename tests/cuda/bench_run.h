// One benchmark's inputs, plans and timed launches. Inputs are random and rotated, so that no launch finds
// its K and V in L2.
#pragma once

#include <algorithm>
#include <array>
#include <memory>
#include <random>
#include <vector>

#include "bench.h"

namespace jaxinfer::test {

// Fills device memory with a random pattern, repeated.
inline void fill_random(const Buffer& buffer, DType dtype) {
  static std::unique_ptr<Buffer> patterns[3];
  std::unique_ptr<Buffer>& pattern = patterns[static_cast<int>(dtype)];
  if (pattern == nullptr) {
    pattern = std::make_unique<Buffer>(random_pattern(dtype));
  }
  for (size_t at = 0; at < buffer.bytes(); at += pattern->bytes()) {
    CHECK_CUDA(cudaMemcpy(buffer.as<uint8_t>() + at, pattern->as<uint8_t>(),
                          std::min(pattern->bytes(), buffer.bytes() - at), cudaMemcpyDeviceToDevice));
  }
}

// The inputs of one benchmark, several sets of them, so that no launch finds its K and V in L2.
class BenchRun {
 public:
  explicit BenchRun(const Options& o) : options_(o) {
    std::mt19937 rng(1);
    p_.options = o;
    make_layout(o, rng, &p_, &num_pages_);
    const int size = element_size(o.dtype);
    num_tokens_ = static_cast<int>(p_.q_pos.size());
    heads_ = int64_t{num_tokens_} * o.num_qo_heads;
    make_plan_and_params(&p_, num_pages_, false);
    a_ = p_.params;
    a_.kv_indices = o.contiguous ? nullptr : keep(p_.kv_indices).as<int32_t>();
    a_.kv_offset = keep(p_.kv_offset).as<int32_t>();
    a_.q_pos = keep(p_.q_pos).as<int32_t>();
    a_.lse = keep(heads_ * 4).as<float>();
    const int64_t k_bytes = num_pages_ * a_.k_strides.page * size;
    const int64_t v_bytes = num_pages_ * a_.v_strides.page * size;
    const auto sets =
        static_cast<int>(std::clamp<int64_t>((int64_t{300} << 20) / (k_bytes + v_bytes) + 1, 1, 72));
    for (int i = 0; i < sets; ++i) {
      sets_.push_back({&keep(heads_ * o.head_dim_qk * size), &keep(k_bytes), &keep(v_bytes),
                       &keep(heads_ * o.head_dim_vo * size)});
      for (int j = 0; j < 3; ++j) fill_random(*sets_.back()[j], o.dtype);
    }
    CHECK_CUDA(cudaStreamCreate(&stream_));
    CHECK_CUDA(cudaEventCreate(&begin_));
    CHECK_CUDA(cudaEventCreate(&end_));
  }
  ~BenchRun() { cudaStreamDestroy(stream_); }

  // Plans, and allocates what the plan needs.
  void make_plan(Schedule schedule, bool batch_invariant) {
    p_.options.runs = schedule == Schedule::kRuns;
    p_.options.batch_invariant = batch_invariant;
    make_plan_and_params(&p_, num_pages_, false);
    a_.format = p_.params.format;
    planned_.clear();
    const int64_t states = int64_t{a_.format.slot_capacity} * options_.num_qo_heads;
    const auto add = [&](int64_t bytes) -> Buffer& {
      return *planned_.emplace_back(std::make_unique<Buffer>(bytes));
    };
    Buffer& plan = *planned_.emplace_back(std::make_unique<Buffer>(p_.plan));
    a_.plan = plan.as<int32_t>();
    a_.partial_o = add(states * options_.head_dim_vo * 4).as<float>();
    a_.partial_max = add(states * 4).as<float>();
    a_.partial_sum = add(states * 4).as<float>();
  }

  // Median time of a launch, in microseconds, from graphs of launches over all sets.
  double time(const Kernels& kernels, Merge merge) {
    const auto sets = static_cast<int>(sets_.size());
    const int per_graph = std::max((11 / sets + 1) * sets, 12);
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CHECK_CUDA(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < per_graph; ++i) {
      a_.q = sets_[i % sets][0]->as<void>();
      a_.k = sets_[i % sets][1]->as<void>();
      a_.v = sets_[i % sets][2]->as<void>();
      a_.o = sets_[i % sets][3]->as<void>();
      launch_attention(kernels, a_, stream_, merge);
    }
    CHECK_CUDA(cudaStreamEndCapture(stream_, &graph));
    CHECK_CUDA(cudaGraphInstantiate(&exec, graph, 0));
    std::vector<float> times;
    for (int i = 0; i < 9; ++i) {
      CHECK_CUDA(cudaEventRecord(begin_, stream_));
      CHECK_CUDA(cudaGraphLaunch(exec, stream_));
      CHECK_CUDA(cudaEventRecord(end_, stream_));
      CHECK_CUDA(cudaStreamSynchronize(stream_));
      float ms;
      CHECK_CUDA(cudaEventElapsedTime(&ms, begin_, end_));
      if (i >= 2) times.push_back(ms / static_cast<float>(per_graph));
    }
    CHECK_CUDA(cudaGraphExecDestroy(exec));
    CHECK_CUDA(cudaGraphDestroy(graph));
    std::sort(times.begin(), times.end());
    return times[times.size() / 2] * 1e3;
  }

  // Bytes of K and V, and operations.
  double bytes() const {
    double kv_tokens = 0;
    for (const int len : p_.kv_len) kv_tokens += len;
    return kv_tokens * options_.num_kv_heads * (options_.head_dim_qk + options_.head_dim_vo) *
           element_size(options_.dtype);
  }
  double flops() const {
    double pairs = 0;
    for (size_t r = 0; r < p_.q_len.size(); ++r) {
      for (int i = 0; i < p_.q_len[r]; ++i) {
        pairs += (options_.rules & kRuleCausal) != 0 ? p_.kv_len[r] - p_.q_len[r] + i + 1 : p_.kv_len[r];
      }
    }
    return 2.0 * pairs * options_.num_qo_heads * (options_.head_dim_qk + options_.head_dim_vo);
  }
  int num_slots() const { return p_.plan[kHeaderNumSlots]; }
  int num_merges() const { return p_.plan[kHeaderNumMerge]; }

 private:
  template <class From>
  Buffer& keep(const From& from) {
    return *kept_.emplace_back(std::make_unique<Buffer>(from));
  }
  Options options_;
  Problem p_{};
  int64_t num_pages_ = 0;
  int num_tokens_;
  int64_t heads_;
  AttentionParams a_;
  std::vector<std::unique_ptr<Buffer>> kept_, planned_;
  std::vector<std::array<Buffer*, 4>> sets_;  // q, k, v, o
  cudaStream_t stream_;
  cudaEvent_t begin_, end_;
};

}  // namespace jaxinfer::test
