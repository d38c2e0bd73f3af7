// The executor's inner code for four-lane vectors that every compiler maps to the baseline of its target. The
// build gives this file its flags.
#define JAXINFER_ISA scalar
#define JAXINFER_VEC_WIDTH 4

#include "cpu/isa_impl.h"
