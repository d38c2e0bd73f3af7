// Plans and runs one small batch in C++ alone and compares with attention written out in double precision: a
// program that can run under an emulator, where there is no Python. Exit status 0: every value agrees.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <vector>

#include "../tests/cuda/problem.h"
#include "cpu/executor.h"

using namespace jaxinfer;

int main() {
  test::Options options;
  options.dtype = DType::kF32;
  options.head_dim_qk = options.head_dim_vo = 24;
  options.num_qo_heads = 6;
  options.page_size = 4;
  options.rules = kRuleCausal | kRuleSoftmax;
  options.classes = {{16, true}};
  // A prompt of 7 tokens that is all its cache, an empty request, two tokens behind 95 cached ones.
  options.rows = {{7, 7}, {0, 0}, {2, 97}};
  test::Problem problem = test::make_problem(options, 1);
  AttentionParams& p = problem.params;

  const size_t heads = static_cast<size_t>(p.num_tokens) * p.num_qo_heads;
  const size_t states = static_cast<size_t>(p.format.slot_capacity) * p.num_qo_heads;
  std::vector<float> o(heads * p.head_dim_vo, NAN), lse(heads, NAN), partial_o(states * p.head_dim_vo, NAN),
      partial_max(states, NAN), partial_sum(states, NAN);
  p.o = o.data();
  p.lse = lse.data();
  p.partial_o = partial_o.data();
  p.partial_max = partial_max.data();
  p.partial_sum = partial_sum.data();
  cpu::attention(p, [](int64_t num_tasks, const std::function<void(int64_t)>& task) {
    for (int64_t i = 0; i < num_tasks; ++i) task(i);
  });

  const float *q = static_cast<const float*>(p.q), *k = static_cast<const float*>(p.k),
              *v = static_cast<const float*>(p.v);
  double worst = 0.0;
  const auto check = [&worst](double got, double expected) {
    const double error = std::abs(got - expected);
    if (!(error <= worst)) worst = error;  // written so that NaN is kept
  };
  for (size_t row = 0; row < options.rows.size(); ++row) {
    for (int32_t i = 0; i < problem.q_len[row] * p.num_qo_heads; ++i) {
      const int32_t t = problem.q_start[row] + i / p.num_qo_heads, h = i % p.num_qo_heads;
      const int64_t at_q = int64_t{t} * p.num_qo_heads + h;
      double sum = 0.0;
      std::vector<double> expected(p.head_dim_vo, 0.0);
      for (int32_t j = 0; j <= p.q_pos[t]; ++j) {
        const int64_t page = p.kv_indices[problem.kv_start[row] + j / p.page_size];
        const auto at = [&](const CacheStrides& s) {
          return page * s.page + j % p.page_size * s.token + h / p.group_size() * s.head;
        };
        double s = 0.0;
        for (int32_t d = 0; d < p.head_dim_qk; ++d) {
          s += double{q[at_q * p.head_dim_qk + d]} * k[at(p.k_strides) + d];
        }
        const double weight = std::exp(s * p.variant.sm_scale);
        sum += weight;
        for (int32_t d = 0; d < p.head_dim_vo; ++d) expected[d] += weight * v[at(p.v_strides) + d];
      }
      check(lse[at_q], std::log(sum));
      for (int32_t d = 0; d < p.head_dim_vo; ++d) check(o[at_q * p.head_dim_vo + d], expected[d] / sum);
    }
  }
  std::printf("%s, largest error %.1e\n", cpu::isa_name(cpu::isa()), worst);
  return worst < 1e-5 ? 0 : 1;
}
