// The executor's inner code for AVX-512 F, BW, VL and DQ, compiled with the flags of isa_flags.
#define JAXINFER_ISA avx512
#define JAXINFER_VEC_WIDTH 16

// GCC 12's own intrinsics read an undefined register on purpose and warn about it (GCC bug 105593, fixed in
// 13).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include "cpu/isa_impl.h"
