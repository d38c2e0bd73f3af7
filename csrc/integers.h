// Division and rounding of non-negative 64-bit integers, for host code. Kernels divide by Divider (params.h).
#pragma once

#include <cstdint>

namespace jaxinfer {

inline int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}
// The next multiple of b.
inline int64_t round_up(int64_t a, int64_t b) {
  return ceil_div(a, b) * b;
}

}  // namespace jaxinfer
