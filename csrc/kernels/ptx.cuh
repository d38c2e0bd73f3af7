// The PTX that kernels use, one wrapper each: asynchronous copies, matrix fragments, barriers, fast math, and
// element types. No attention here. Needs no CUDA header, so that NVRTC compiles it alone.
#pragma once

#include <cstdint>

#include "params.h"

#define JAXINFER_DEVICE __device__ __forceinline__

namespace jaxinfer {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr float kLargestFloat = 3.40282347e38f;
constexpr uint32_t kFullWarp = 0xffffffffu;
constexpr int32_t kInt32Max = 2147483647;
constexpr int32_t kInt32Min = -2147483647 - 1;

JAXINFER_DEVICE float infinity() {
  return __int_as_float(0x7f800000);
}

// One of two types.
template <bool kCondition, class A, class B>
struct Select {
  using Type = A;
};
template <class A, class B>
struct Select<false, A, B> {
  using Type = B;
};

// threadIdx.x, read again at every use: what is computed from it in rarely run code must not stay in
// registers.
JAXINFER_DEVICE int fresh_thread_index() {
  int x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}

// With JAXINFER_INJECT_DELAYS=<seed> every arrival, barrier and wait is preceded by a sleep of up to a
// microsecond in a quarter of the cases: an order that nothing enforces changes, and so do bits.
JAXINFER_DEVICE void injected_delay() {
#ifdef JAXINFER_INJECT_DELAYS
  uint32_t x;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(x));
  x = (x ^ (fresh_thread_index() >> 5) * 0x9e3779b9u ^ blockIdx.x * 0x85ebca6bu ^
       static_cast<uint32_t>(JAXINFER_INJECT_DELAYS)) *
      0xc2b2ae35u;
  x = __shfl_sync(__activemask(), x ^ x >> 15, __ffs(__activemask()) - 1);
  if ((x & 3) == 0) asm volatile("nanosleep.u32 %0;" ::"r"(x >> 22));
#endif
}

// x, of which the compiler knows nothing: what is computed from it does not stay in registers either.
JAXINFER_DEVICE int forget(int x) {
  asm volatile("mov.b32 %0, %0;" : "+r"(x));
  return x;
}

// The warp's number in the CTA. Taken from lane 0, so that the compiler knows it to be equal in all lanes.
JAXINFER_DEVICE int warp_index() {
  return __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x >> 5), 0);
}

// Zero in all lanes, which no compiler knows: bit 31 of the mask of lower lanes.
JAXINFER_DEVICE uint32_t opaque_zero() {
  uint32_t lower;
  asm volatile("mov.u32 %0, %%lanemask_lt;" : "=r"(lower));
  return lower >> 31;
}

// `memory`, of which no compiler knows that it is the same in all lanes. Where ptxas 13.0 sees that for the
// place that LDGSTS copies to, it gives the instruction a uniform register, and an H200 ends in an illegal
// instruction.
JAXINFER_DEVICE char* opaque(char* memory) {
  return memory + opaque_zero();
}

// ---- global memory ----

// A read at this place of the program: the compiler moves others behind the branches that decide whether
// their results are needed, and then one trip to memory waits for another.
JAXINFER_DEVICE int4 load_now(const int4* from) {
  int4 x;
  asm volatile("ld.relaxed.gpu.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(from));
  return x;
}

JAXINFER_DEVICE int load_now(const int* from) {
  int x;
  asm volatile("ld.global.nc.s32 %0, [%1];" : "=r"(x) : "l"(from));
  return x;
}

// Reads where `wanted`, else gives `otherwise`: without a branch.
JAXINFER_DEVICE int load_if(bool wanted, const int* from, int otherwise) {
  int x = otherwise;
  asm volatile("{.reg .pred p; setp.ne.s32 p, %1, 0; @p ld.global.nc.s32 %0, [%2];}"
               : "+r"(x)
               : "r"(static_cast<int>(wanted)), "l"(from));
  return x;
}

// Zeros where not `wanted`.
JAXINFER_DEVICE uint4 load_if(bool wanted, const uint4* from) {
  uint4 x = make_uint4(0, 0, 0, 0);
  asm volatile("{.reg .pred p; setp.ne.s32 p, %4, 0; @p ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%5];}"
               : "+r"(x.x), "+r"(x.y), "+r"(x.z), "+r"(x.w)
               : "r"(static_cast<int>(wanted)), "l"(from));
  return x;
}

// ---- shared memory ----

JAXINFER_DEVICE uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

JAXINFER_DEVICE void store_shared(uint32_t to, uint4 x) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}
JAXINFER_DEVICE void store_shared(uint32_t to, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(x), "f"(y) : "memory");
}
// Writes where `wanted`: without a branch.
JAXINFER_DEVICE void store_shared_if(bool wanted, uint32_t to, uint32_t x) {
  asm volatile("{.reg .pred p; setp.ne.s32 p, %1, 0; @p st.shared.b32 [%0], %2;}" ::"r"(to),
               "r"(static_cast<int>(wanted)), "r"(x)
               : "memory");
}
JAXINFER_DEVICE uint4 load_shared(uint32_t from) {
  uint4 x;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(from)
               : "memory");
  return x;
}
JAXINFER_DEVICE float4 load_shared_float4(uint32_t from) {
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(from)
               : "memory");
  return x;
}

// L2 policy of data that is read once: it leaves first.
JAXINFER_DEVICE uint64_t read_once_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy));
  return policy;
}

// Copies 16 bytes. Data that is not read once has no policy: with that of ordinary data, evict_normal, decode
// with head dim 96 takes 466 us on an H200 instead of 375.
template <bool kReadOnce>
JAXINFER_DEVICE void copy_async(uint32_t to, const void* from) {
  if constexpr (kReadOnce) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "l"(read_once_policy())
                 : "memory");
  } else {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
  }
}
// Writes 16 zero bytes when `present` is false; then `from` is not read.
template <bool kReadOnce>
JAXINFER_DEVICE void copy_async(uint32_t to, const void* from, bool present) {
  const uint32_t bytes = present ? 16 : 0;
  if constexpr (kReadOnce) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(to),
                 "l"(from), "r"(bytes), "l"(read_once_policy())
                 : "memory");
  } else {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
                 : "memory");
  }
}
// Copies where `wanted`: without a branch.
template <bool kReadOnce>
JAXINFER_DEVICE void copy_async_if(bool wanted, uint32_t to, const void* from) {
  if constexpr (kReadOnce) {
    asm volatile(
        "{.reg .pred p; setp.ne.s32 p, %2, 0;"
        " @p cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %3;}" ::"r"(to),
        "l"(from), "r"(static_cast<int>(wanted)), "l"(read_once_policy())
        : "memory");
  } else {
    asm volatile(
        "{.reg .pred p; setp.ne.s32 p, %2, 0; @p cp.async.cg.shared.global.L2::128B [%0], [%1], 16;}" ::"r"(
            to),
        "l"(from), "r"(static_cast<int>(wanted))
        : "memory");
  }
}
JAXINFER_DEVICE void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most kPending of this thread's latest groups are unfinished.
template <int kPending>
JAXINFER_DEVICE void wait_copies() {
  injected_delay();
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// ---- barriers ----

// All threads of the CTA.
JAXINFER_DEVICE void cta_barrier() {
  injected_delay();
  __syncthreads();
}

// The kThreads threads (whole warps) of one of kGroups groups. Group g meets under barrier 1 + g; 0 is the
// CTA's own.
template <int kGroups, int kThreads, int kGroup = 0>
JAXINFER_DEVICE void group_barrier(int group) {
  static_assert(kGroups < 16, "a CTA has 16 barriers");
  if (kGroup == kGroups - 1 || group == kGroup) {
    injected_delay();
    asm volatile("bar.sync %0, %1;" ::"n"(1 + kGroup), "n"(kThreads) : "memory");
  } else if constexpr (kGroup < kGroups - 1) {
    group_barrier<kGroups, kThreads, kGroup + 1>(group);
  }
}

// Where a kernel may start before earlier ones of its stream end (programmatic dependent launch): from 9.0
// on. Elsewhere the two functions below do nothing.
#if __CUDA_ARCH__ >= 900
constexpr bool kStartsEarly = true;
#else
constexpr bool kStartsEarly = false;
#endif
// Ends when all earlier kernels have ended and their results can be read.
JAXINFER_DEVICE void wait_for_earlier_kernels() {
#if __CUDA_ARCH__ >= 900
  injected_delay();
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// The last act of a kernel that may start early. Whoever follows on the stream waits for this kernel alone,
// so it must not end before those in front of it have, even where it never reads what they write: one CTA
// that waits keeps the grid from being complete.
JAXINFER_DEVICE void end_after_earlier_kernels() {
  if (blockIdx.x == 0) wait_for_earlier_kernels();
}
// The next kernel may start when all CTAs have said this or ended.
JAXINFER_DEVICE void allow_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Of the device, or a few more.
JAXINFER_DEVICE uint32_t num_multiprocessors() {
  uint32_t x;
  asm("mov.u32 %0, %%nsmid;" : "=r"(x));
  return x;
}

// ---- fragments ----

// Four 8x8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8.
JAXINFER_DEVICE void load_matrices(uint32_t address, uint32_t (&x)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address)
               : "memory");
}
JAXINFER_DEVICE void load_matrices_transposed(uint32_t address, uint32_t (&x)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address)
               : "memory");
}

// ---- math ----

// 2^x to 2 units in the last place; 2^-inf is 0, results under 2^-126 are 0.
JAXINFER_DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
JAXINFER_DEVICE float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
JAXINFER_DEVICE float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

JAXINFER_DEVICE float shuffle_xor(float x, int mask) {
  return __shfl_xor_sync(kFullWarp, x, mask);
}

// ---- element types ----

// kPerChunk elements make 16 bytes, the unit of every copy and of every hole that sees fragments.
template <DType kType>
struct Element;

template <>
struct Element<DType::kF32> {
  static constexpr int kBytes = 4;
  static constexpr int kPerChunk = 4;
  static constexpr uint32_t kSignBits = 0x80000000u;

  static JAXINFER_DEVICE void unpack(uint4 chunk, float (&x)[4]) {
    x[0] = __uint_as_float(chunk.x);
    x[1] = __uint_as_float(chunk.y);
    x[2] = __uint_as_float(chunk.z);
    x[3] = __uint_as_float(chunk.w);
  }
  static JAXINFER_DEVICE uint4 pack(const float (&x)[4]) {
    return make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]),
                      __float_as_uint(x[3]));
  }
};

// Type of both factors: "bf16" or "f16".
#define JAXINFER_MMA(type)                                                   \
  asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                 \
      ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                       \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))

// What the two 16-bit types share; Type has low, high and pack_pair.
template <DType kType>
struct HalfElement {
  using Type = Element<kType>;
  static constexpr int kBytes = 2;
  static constexpr int kPerChunk = 8;
  static constexpr uint32_t kSignBits = 0x80008000u;

  static JAXINFER_DEVICE void unpack(uint4 chunk, float (&x)[8]) {
    const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[2 * i] = Type::low(words[i]);
      x[2 * i + 1] = Type::high(words[i]);
    }
  }
  static JAXINFER_DEVICE uint4 pack(const float (&x)[8]) {
    return make_uint4(Type::pack_pair(x[0], x[1]), Type::pack_pair(x[2], x[3]), Type::pack_pair(x[4], x[5]),
                      Type::pack_pair(x[6], x[7]));
  }
  // c += a * b for a 16x16 (row) and b 16x8 (column), accumulated in float32.
  static JAXINFER_DEVICE void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (kType == DType::kBF16) {
      JAXINFER_MMA("bf16");
    } else {
      JAXINFER_MMA("f16");
    }
  }
};
#undef JAXINFER_MMA

template <>
struct Element<DType::kBF16> : HalfElement<DType::kBF16> {
  static JAXINFER_DEVICE float low(uint32_t pair) { return __uint_as_float(pair << 16); }
  static JAXINFER_DEVICE float high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }
  static JAXINFER_DEVICE uint32_t pack_pair(float low, float high) {
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
  }
};

template <>
struct Element<DType::kF16> : HalfElement<DType::kF16> {
  static JAXINFER_DEVICE float low(uint32_t pair) {
    float x;
    asm("{.reg .b16 lo, hi; mov.b32 {lo, hi}, %1; cvt.f32.f16 %0, lo;}" : "=f"(x) : "r"(pair));
    return x;
  }
  static JAXINFER_DEVICE float high(uint32_t pair) {
    float x;
    asm("{.reg .b16 lo, hi; mov.b32 {lo, hi}, %1; cvt.f32.f16 %0, hi;}" : "=f"(x) : "r"(pair));
    return x;
  }
  static JAXINFER_DEVICE uint32_t pack_pair(float low, float high) {
    uint32_t pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
  }
};

}  // namespace jaxinfer
