// Plans and runs one small batch in C++ alone and compares with attention written out in double precision: a
// program that can run under an emulator, where there is no Python. Exit status 0: every value agrees.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <random>
#include <vector>

#include "cpu/executor.h"
#include "params.h"
#include "plan/capacity.h"
#include "plan/cost.h"
#include "plan/planner.h"

using namespace jaxinfer;

int main() {
  constexpr int32_t kTokens = 9, kRows = 3, kQoHeads = 6, kKvHeads = 2, kHeadDim = 24, kPage = 4, kPages = 40;
  // A prompt of 7 tokens that is all its cache, an empty request, two tokens behind 95 cached ones.
  const std::vector<int32_t> q_start{0, 7, 7}, q_len{7, 0, 2}, kv_start{0, 2, 2}, kv_len{7, 0, 97},
      kv_offset(kRows, 0);
  std::vector<int32_t> q_pos{0, 1, 2, 3, 4, 5, 6, 95, 96}, kv_indices(27);
  for (size_t i = 0; i < kv_indices.size(); ++i) kv_indices[i] = static_cast<int32_t>((i * 17 + 3) % kPages);

  PlanRequest request{};
  request.num_tokens = kTokens;
  request.num_rows = kRows;
  request.num_layouts = 1;
  request.kv_capacity = static_cast<int64_t>(kv_indices.size()) * kPage;
  request.page_size = kPage;
  request.num_qo_heads = kQoHeads;
  request.num_kv_heads = kKvHeads;
  request.head_dim_qk = request.head_dim_vo = kHeadDim;
  request.element_size = 4;
  request.schedule = Schedule::kLpt;
  request.split_tokens = 512;
  request.clip.causal = true;
  request.format.num_classes = 1;
  request.format.classes[0] = {16, 1, choose_num_queues(32, kKvHeads), 32, 0, 0, 0};
  request.costs[0] = default_costs(request.schedule, false);
  fill_capacities(&request);
  LayoutView layout{};
  layout.q_start = q_start.data();
  layout.q_len = q_len.data();
  layout.kv_start = kv_start.data();
  layout.kv_indices = kv_indices.data();
  layout.kv_len = kv_len.data();
  layout.kv_offset = kv_offset.data();
  layout.q_pos = q_pos.data();
  layout.kv_indices_capacity = static_cast<int64_t>(kv_indices.size());
  layout.num_pages = kPages;
  std::vector<int32_t> plan(request.format.num_words + 4);
  int32_t* aligned = plan.data();
  while (reinterpret_cast<uintptr_t>(aligned) % 16 != 0) ++aligned;
  make_plan(layout, request, aligned);

  std::mt19937 generator(0);
  const auto normal = [&](size_t size) {
    std::normal_distribution<float> draw;
    std::vector<float> values(size);
    std::generate(values.begin(), values.end(), [&] { return draw(generator); });
    return values;
  };
  const auto q = normal(kTokens * kQoHeads * kHeadDim), k = normal(kPages * kPage * kKvHeads * kHeadDim),
             v = normal(kPages * kPage * kKvHeads * kHeadDim);
  std::vector<float> o(q.size(), NAN), lse(kTokens * kQoHeads, NAN);
  const size_t states = static_cast<size_t>(request.format.slot_capacity) * kQoHeads;
  std::vector<float> partial_o(states * kHeadDim, NAN), partial_max(states, NAN), partial_sum(states, NAN);
  AttentionParams params{};
  params.q = q.data();
  params.k = k.data();
  params.v = v.data();
  params.plan = aligned;
  params.kv_indices = kv_indices.data();
  params.kv_offset = kv_offset.data();
  params.q_pos = q_pos.data();
  params.o = o.data();
  params.lse = lse.data();
  params.partial_o = partial_o.data();
  params.partial_max = partial_max.data();
  params.partial_sum = partial_sum.data();
  params.dtype = DType::kF32;
  params.num_tokens = kTokens;
  params.num_rows = kRows;
  params.num_qo_heads = kQoHeads;
  params.num_kv_heads = kKvHeads;
  params.head_dim_qk = params.head_dim_vo = kHeadDim;
  params.num_layers = 1;
  params.num_pages = kPages;
  params.page_size = kPage;
  params.kv_indices_capacity = layout.kv_indices_capacity;
  params.k_strides = params.v_strides = {0, kPage * kKvHeads * kHeadDim, kKvHeads * kHeadDim, kHeadDim};
  params.format = request.format;
  const float sm_scale = 1.0f / std::sqrt(float{kHeadDim});
  params.variant.rules = kRuleCausal | kRuleSoftmax;
  params.variant.sm_scale = sm_scale;
  cpu::attention(params, [](int64_t num_tasks, const std::function<void(int64_t)>& task) {
    for (int64_t i = 0; i < num_tasks; ++i) task(i);
  });

  double worst = 0.0;
  const int32_t row_of[kTokens] = {0, 0, 0, 0, 0, 0, 0, 2, 2};
  for (int32_t t = 0; t < kTokens; ++t) {
    for (int32_t h = 0; h < kQoHeads; ++h) {
      const int32_t row = row_of[t], kv_head = h / (kQoHeads / kKvHeads);
      double sum = 0.0;
      std::vector<double> expected(kHeadDim, 0.0);
      for (int32_t j = 0; j <= q_pos[t]; ++j) {
        const int64_t slot = int64_t{kv_indices[kv_start[row] + j / kPage]} * kPage + j % kPage;
        const int64_t at = (slot * kKvHeads + kv_head) * kHeadDim;
        double s = 0.0;
        for (int32_t d = 0; d < kHeadDim; ++d) s += double{q[(t * kQoHeads + h) * kHeadDim + d]} * k[at + d];
        const double weight = std::exp(s * sm_scale);
        sum += weight;
        for (int32_t d = 0; d < kHeadDim; ++d) expected[d] += weight * v[at + d];
      }
      const double lse_error = std::abs(lse[t * kQoHeads + h] - std::log(sum));
      if (!(lse_error <= worst)) worst = lse_error;
      for (int32_t d = 0; d < kHeadDim; ++d) {
        const double error = std::abs(o[(t * kQoHeads + h) * kHeadDim + d] - expected[d] / sum);
        if (!(error <= worst)) worst = error;  // written so that NaN is kept
      }
    }
  }
  std::printf("%s, largest error %.1e\n", cpu::isa_name(cpu::isa()), worst);
  return worst < 1e-5 ? 0 : 1;
}
