// The executor's inner code for four-lane vectors, which every compiler maps to the baseline of its target.
#define JAXINFER_ISA scalar
#define JAXINFER_VEC_WIDTH 4

#include "cpu/isa_impl.h"
