// CPU execution of a plan: the same items and merge list that a GPU would run, in vectorised C++.
// Results do not depend on how `parallel_for` deals tasks to threads.
#pragma once

#include <cstdint>
#include <functional>

#include "params.h"

namespace jaxinfer::cpu {

// Runs task(i) for every i in [0, num_tasks), in any order and on any threads, and returns when all are done.
using ParallelFor = std::function<void(int64_t num_tasks, const std::function<void(int64_t)>& task)>;

// The instruction sets that an executor exists for, worst first.
enum class Isa { kScalar, kAvx2, kAvx512 };

// The best instruction set of this processor; JAXINFER_CPU_ISA=scalar|avx2|avx512 asks for a lesser one.
Isa isa();
const char* isa_name(Isa isa);

void attention(const AttentionParams& params, const ParallelFor& parallel_for);
void append(const AppendParams& params, const ParallelFor& parallel_for);

}  // namespace jaxinfer::cpu
