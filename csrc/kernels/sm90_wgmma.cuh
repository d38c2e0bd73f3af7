// wgmma: the asynchronous matrix products of a warpgroup, m64 x N x 16 of 16-bit elements into float32, for
// the N that attention uses. Accumulators and register operands must not be touched between `commit_products`
// and the `wait_products` that covers them.
#pragma once

#include "kernels/sm90.cuh"

namespace jaxinfer {

JAXINFER_DEVICE void fence_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
JAXINFER_DEVICE void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most kPending of this warpgroup's latest groups are unfinished.
template <int kPending>
JAXINFER_DEVICE void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps the compiler from moving uses of accumulators across: before fence_products and after wait_products.
template <int kCount>
JAXINFER_DEVICE void pin_registers(float (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(x[i])::"memory");
}

template <int kN>
struct Wgmma;

// Operands of the accumulators: eight at a time, numbered in the text from %0 on.
#define JAXINFER_EIGHT(i)                                                                     \
  "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), \
      "+f"(c[i + 6]), "+f"(c[i + 7])
#define JAXINFER_TEXT_16     \
  "%0,%1,%2,%3,%4,%5,%6,%7," \
  "%8,%9,%10,%11,%12,%13,%14,%15"
#define JAXINFER_TEXT_32              \
  JAXINFER_TEXT_16                    \
  ",%16,%17,%18,%19,%20,%21,%22,%23," \
  "%24,%25,%26,%27,%28,%29,%30,%31"
#define JAXINFER_TEXT_40 \
  JAXINFER_TEXT_32       \
  ",%32,%33,%34,%35,%36,%37,%38,%39"
#define JAXINFER_TEXT_48 \
  JAXINFER_TEXT_40       \
  ",%40,%41,%42,%43,%44,%45,%46,%47"
#define JAXINFER_TEXT_56 \
  JAXINFER_TEXT_48       \
  ",%48,%49,%50,%51,%52,%53,%54,%55"
#define JAXINFER_TEXT_64 \
  JAXINFER_TEXT_56       \
  ",%56,%57,%58,%59,%60,%61,%62,%63"
#define JAXINFER_TEXT_96             \
  JAXINFER_TEXT_64                   \
  ",%64,%65,%66,%67,%68,%69,%70,%71" \
  ",%72,%73,%74,%75,%76,%77,%78,%79" \
  ",%80,%81,%82,%83,%84,%85,%86,%87" \
  ",%88,%89,%90,%91,%92,%93,%94,%95"
#define JAXINFER_TEXT_128                    \
  JAXINFER_TEXT_96                           \
  ",%96,%97,%98,%99,%100,%101,%102,%103"     \
  ",%104,%105,%106,%107,%108,%109,%110,%111" \
  ",%112,%113,%114,%115,%116,%117,%118,%119" \
  ",%120,%121,%122,%123,%124,%125,%126,%127"
#define JAXINFER_OPERANDS_16 JAXINFER_EIGHT(0), JAXINFER_EIGHT(8)
#define JAXINFER_OPERANDS_32 JAXINFER_OPERANDS_16, JAXINFER_EIGHT(16), JAXINFER_EIGHT(24)
#define JAXINFER_OPERANDS_40 JAXINFER_OPERANDS_32, JAXINFER_EIGHT(32)
#define JAXINFER_OPERANDS_48 JAXINFER_OPERANDS_40, JAXINFER_EIGHT(40)
#define JAXINFER_OPERANDS_56 JAXINFER_OPERANDS_48, JAXINFER_EIGHT(48)
#define JAXINFER_OPERANDS_64 JAXINFER_OPERANDS_56, JAXINFER_EIGHT(56)
#define JAXINFER_OPERANDS_96 \
  JAXINFER_OPERANDS_64, JAXINFER_EIGHT(64), JAXINFER_EIGHT(72), JAXINFER_EIGHT(80), JAXINFER_EIGHT(88)
#define JAXINFER_OPERANDS_128 \
  JAXINFER_OPERANDS_96, JAXINFER_EIGHT(96), JAXINFER_EIGHT(104), JAXINFER_EIGHT(112), JAXINFER_EIGHT(120)

// c = a b, or c += a b where `accumulate` is not 0. shared: a and b from shared memory, both with the summed
// dimension in their rows' direction (Q and K). registers: a from registers, b with its columns in that
// direction (P and V). Matrices in shared memory are given by the lower half of their descriptors: sums of 64
// bits would go through the registers of every thread. kPattern: bytes between the patterns of a panel of b;
// those of a follow each other.
#define JAXINFER_WGMMA(N, REGISTERS, I0, I1, I2, I3, I4, I5, I6)                                        \
  template <>                                                                                           \
  struct Wgmma<N> {                                                                                     \
    template <DType kType, int kPattern>                                                                \
    static JAXINFER_DEVICE void shared(float (&c)[REGISTERS], uint32_t a, uint32_t b, int accumulate) { \
      if constexpr (kType == DType::kBF16) {                                                            \
        JAXINFER_WGMMA_SHARED(N, REGISTERS, "bf16", I0, I1, I2, I3, I4);                                \
      } else {                                                                                          \
        JAXINFER_WGMMA_SHARED(N, REGISTERS, "f16", I0, I1, I2, I3, I4);                                 \
      }                                                                                                 \
    }                                                                                                   \
    template <DType kType, int kPattern>                                                                \
    static JAXINFER_DEVICE void registers(float (&c)[REGISTERS], uint32_t a0, uint32_t a1, uint32_t a2, \
                                          uint32_t a3, uint32_t b, int accumulate) {                    \
      if constexpr (kType == DType::kBF16) {                                                            \
        JAXINFER_WGMMA_REGISTERS(N, REGISTERS, "bf16", I0, I1, I2, I3, I4, I5, I6);                     \
      } else {                                                                                          \
        JAXINFER_WGMMA_REGISTERS(N, REGISTERS, "f16", I0, I1, I2, I3, I4, I5, I6);                      \
      }                                                                                                 \
    }                                                                                                   \
  }
#define JAXINFER_WGMMA_SHARED(N, REGISTERS, TYPE, A, B, P, HA, HB)                                       \
  asm volatile("{.reg .pred p; .reg .b64 a, b; setp.ne.b32 p, %" #P ", 0; mov.b64 a, {%" #A ", %" #HA    \
               "}; mov.b64 b, {%" #B ", %" #HB "}; wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE \
               "." TYPE " {" JAXINFER_TEXT_##REGISTERS "}, a, b, p, 1, 1, 0, 0;}"                        \
               : JAXINFER_OPERANDS_##REGISTERS                                                           \
               : "r"(a), "r"(b), "r"(accumulate), "n"(descriptor_high(kPatternBytes)),                   \
                 "n"(descriptor_high(kPattern)))
#define JAXINFER_WGMMA_REGISTERS(N, REGISTERS, TYPE, A0, A1, A2, A3, B, P, H)                             \
  asm volatile("{.reg .pred p; .reg .b64 b; setp.ne.b32 p, %" #P ", 0; mov.b64 b, {%" #B ", %" #H         \
               "}; wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE                         \
               " {" JAXINFER_TEXT_##REGISTERS "}, {%" #A0 ",%" #A1 ",%" #A2 ",%" #A3 "}, b, p, 1, 1, 1;}" \
               : JAXINFER_OPERANDS_##REGISTERS                                                            \
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b), "r"(accumulate),                             \
                 "n"(descriptor_high(kPattern)))

JAXINFER_WGMMA(32, 16, 16, 17, 18, 19, 20, 21, 22);
JAXINFER_WGMMA(64, 32, 32, 33, 34, 35, 36, 37, 38);
JAXINFER_WGMMA(80, 40, 40, 41, 42, 43, 44, 45, 46);
JAXINFER_WGMMA(96, 48, 48, 49, 50, 51, 52, 53, 54);
JAXINFER_WGMMA(112, 56, 56, 57, 58, 59, 60, 61, 62);
JAXINFER_WGMMA(128, 64, 64, 65, 66, 67, 68, 69, 70);
JAXINFER_WGMMA(192, 96, 96, 97, 98, 99, 100, 101, 102);
JAXINFER_WGMMA(256, 128, 128, 129, 130, 131, 132, 133, 134);

#undef JAXINFER_WGMMA
#undef JAXINFER_WGMMA_SHARED
#undef JAXINFER_WGMMA_REGISTERS
#undef JAXINFER_EIGHT
#undef JAXINFER_TEXT_16
#undef JAXINFER_OPERANDS_16
#undef JAXINFER_TEXT_32
#undef JAXINFER_OPERANDS_32
#undef JAXINFER_TEXT_40
#undef JAXINFER_OPERANDS_40
#undef JAXINFER_TEXT_48
#undef JAXINFER_OPERANDS_48
#undef JAXINFER_TEXT_56
#undef JAXINFER_OPERANDS_56
#undef JAXINFER_TEXT_64
#undef JAXINFER_OPERANDS_64
#undef JAXINFER_TEXT_96
#undef JAXINFER_OPERANDS_96
#undef JAXINFER_TEXT_128
#undef JAXINFER_OPERANDS_128

// The border of a basic block that the assembler cannot remove, and moves no wait for products across. `size`
// is not negative, which it does not know.
JAXINFER_DEVICE void split_block(int size) {
  asm volatile(
      "{\n.reg .pred q;\nagain_%=: setp.ne.s32 q, %0, -1;\n@q bra done_%=;\nnanosleep.u32 32;\nbra "
      "again_%=;\ndone_%=: }" ::"r"(size)
      : "memory");
}
// x, which the assembler does not know before this point either.
JAXINFER_DEVICE float behind(float x, int size) {
  asm volatile(
      "{\n.reg .pred q;\nagain_%=: setp.ne.s32 q, %1, -1;\n@q bra done_%=;\nnanosleep.u32 32;\n"
      "mov.b32 %0, %1;\nbra again_%=;\ndone_%=: }"
      : "+f"(x)
      : "r"(size)
      : "memory");
  return x;
}

}  // namespace jaxinfer
