// A case of the kernels' tests: executed by the CPU executor and by kernels, compared, launched again for the
// same bits, and reported in one line. Which cases there are and how they are launched is not here.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>

#include "bench.h"
#include "execute.h"

namespace jaxinfer::test {

// How far results are from the expected ones. Rows are those of one query token and head.
struct Errors {
  double all = 0;        // |got - want| / |want| over all of o
  double worst_row = 0;  // the same of the worst row
  double worst_lse = 0;
  int64_t not_finite = 0;
  int64_t wrong_empty = 0;  // rows that see nothing, and do not say so
  int64_t bad_rows = 0;
  int64_t first_bad_row = -1;
};

inline Errors find_errors(const Problem& p, const Result& want, const Result& got) {
  const AttentionParams& a = p.params;
  const int64_t rows = int64_t{a.num_tokens} * a.num_qo_heads;
  const bool softmax = (a.variant.rules & kRuleSoftmax) != 0;
  Errors errors;
  double difference = 0, norm = 0;
  for (int64_t i = 0; i < rows; ++i) {
    double row_difference = 0, row_norm = 0;
    bool zero = true, bad = false;
    for (int d = 0; d < a.head_dim_vo; ++d) {
      const int64_t at = (i * a.head_dim_vo + d) * element_size(a.dtype);
      const double x = from_element(a.dtype, &got.o[at]), y = from_element(a.dtype, &want.o[at]);
      if (!std::isfinite(x)) {
        ++errors.not_finite;
        bad = true;
        continue;
      }
      zero = zero && x == 0;
      row_difference += (x - y) * (x - y);
      row_norm += y * y;
    }
    difference += row_difference;
    norm += row_norm;
    if (row_norm > 0) errors.worst_row = std::max(errors.worst_row, std::sqrt(row_difference / row_norm));
    const float x = got.lse[i], y = want.lse[i];
    if (softmax && (std::isinf(y) || !std::isfinite(x))) {
      if (x != y || !zero) {
        ++errors.wrong_empty;
        bad = true;
      }
    } else if (softmax) {
      errors.worst_lse = std::max(errors.worst_lse, std::abs(double{x} - y) / (1.0 + 1e-3 * std::abs(y)));
    }
    if (!bad && row_difference <= 0.01 * row_norm) continue;
    ++errors.bad_rows;
    if (errors.first_bad_row < 0) errors.first_bad_row = i;
  }
  errors.all = std::sqrt(norm > 0 ? difference / norm : difference);
  return errors;
}

// The end of the case's line; returns whether it passed.
inline bool report(const Problem& p, const Errors& errors, const Result& got) {
  const AttentionParams& a = p.params;
  const double bound = a.dtype == DType::kF32 ? 2e-5 : a.dtype == DType::kF16 ? 1e-3 : 4e-3;
  const bool ok =
      errors.not_finite == 0 && errors.wrong_empty == 0 && errors.all < bound && errors.worst_lse < 1e-3;
  std::printf("%s o %.2e (row %.2e) lse %.1e bits %08x", ok ? "PASS" : "FAIL", errors.all, errors.worst_row,
              errors.worst_lse, checksum(got));
  if (!ok) {
    std::printf("  not finite %ld, wrong empty %ld, bad rows %ld", static_cast<long>(errors.not_finite),
                static_cast<long>(errors.wrong_empty), static_cast<long>(errors.bad_rows));
    if (errors.first_bad_row >= 0) {
      std::printf(", first at token %ld head %ld", static_cast<long>(errors.first_bad_row / a.num_qo_heads),
                  static_cast<long>(errors.first_bad_row % a.num_qo_heads));
    }
  }
  std::printf("\n");
  std::fflush(stdout);
  return ok;
}

// launch(params, merge) makes the launches of one attention call. They are made `launches` times more: the
// bits must be the same, whenever the merge starts.
template <class Launch>
bool check_case(const std::string& name, const Problem& p, int launches, Launch launch) {
  running() = name;
  const auto run = [&](Merge merge) {
    return run_gpu(p, [&](const AttentionParams& a) { launch(a, merge); });
  };
  const Result want = run_cpu(p);
  std::printf("%-92s", name.c_str());  // before the launch, which may never end
  std::fflush(stdout);
  const Result got = run(Merge::kAfter);
  bool ok = report(p, find_errors(p, want, got), got);
  for (int i = 0; i < launches && ok; ++i) {
    const Result again = run(Merge::kDependent);
    if (again.o == got.o && std::memcmp(again.lse.data(), got.lse.data(), got.lse.size() * 4) == 0) continue;
    std::printf("FAIL %s: bits differ between two launches\n", name.c_str());
    ok = false;
  }
  return ok;
}

}  // namespace jaxinfer::test
