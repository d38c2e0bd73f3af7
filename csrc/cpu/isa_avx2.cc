// The executor's inner code for AVX2, FMA and F16C, compiled with the flags of isa_flags.
#define JAXINFER_ISA avx2
#define JAXINFER_VEC_WIDTH 8

#include "cpu/isa_impl.h"
