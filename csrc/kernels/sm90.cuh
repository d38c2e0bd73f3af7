// What Hopper (sm_90a) adds to ptx.cuh, one wrapper each: transaction barriers, tensor copies (TMA), barriers
// of warpgroups, registers handed from role to role, and shared memory as wgmma reads it. No attention here.
#pragma once

#include "kernels/ptx.cuh"

namespace jaxinfer {

constexpr int kWarpgroupThreads = 128;
constexpr int kPanelBytes = 2 * kPanelElements;  // one row of a panel, what one swizzle pattern spans
constexpr int kPatternBytes = kPatternRows * kPanelBytes;

// ---- transaction barriers (mbarrier) ----
// A barrier completes a phase when `count` arrivals and all announced bytes are in. Waiters name the parity
// of the phase they wait for; waiting for parity 1 of a fresh barrier returns at once.

JAXINFER_DEVICE void init_barrier(uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
// Makes initialised barriers visible to the copy engine; a CTA barrier must follow.
JAXINFER_DEVICE void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
JAXINFER_DEVICE void arrive(uint32_t barrier) {
  injected_delay();
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Without a branch, which a warp would have to join behind.
JAXINFER_DEVICE void arrive_if(bool arrives, uint32_t barrier) {
  injected_delay();
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.u32 p, %1, 0;\n@p mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];\n}" ::
          "r"(barrier),
      "r"(static_cast<uint32_t>(arrives))
      : "memory");
}
// Arrives, and announces bytes that copies will deliver.
JAXINFER_DEVICE void arrive_expecting(uint32_t barrier, int bytes) {
  injected_delay();
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
JAXINFER_DEVICE void wait_barrier(uint32_t barrier, uint32_t parity) {
  injected_delay();
  asm volatile(
      "{\n.reg .pred done;\n"
      "again_%=: mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [%0], %1, 0x989680;\n"
      "@done bra done_%=;\nbra again_%=;\ndone_%=: }" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Where a role stands in a ring of kStages slots. One register: how many slots it has passed.
template <int kStages>
struct RingCursor {
  static_assert((kStages & (kStages - 1)) == 0, "a division would cost more than a register");
  uint32_t passed;

  JAXINFER_DEVICE explicit RingCursor(int first_parity) : passed(first_parity * kStages) {}
  JAXINFER_DEVICE int stage() const { return static_cast<int>(passed % kStages); }
  JAXINFER_DEVICE uint32_t parity() const { return passed / kStages & 1; }  // of the slot's current phase
  JAXINFER_DEVICE void advance() { ++passed; }
};

// ---- barriers of groups of warps ----

JAXINFER_DEVICE void named_sync(int id, int num_threads) {
  injected_delay();
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}
JAXINFER_DEVICE void named_arrive(int id, int num_threads) {
  injected_delay();
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}

// ---- copies ----

// True in one lane of a converged warp. A test for lane 0 would put every copy into a loop over lanes: 109
// cycles each instead of 28.
JAXINFER_DEVICE bool elect_lane() {
  uint32_t elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p; }" : "=r"(elected));
  return elected != 0;
}
JAXINFER_DEVICE void prefetch_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// Copies a box to shared memory and counts its bytes, those outside the tensor included, on `barrier`; what
// is outside becomes zeros. Coordinates count elements, the fastest dimension first.
JAXINFER_DEVICE void copy_box(uint32_t to, const TensorMap* map, uint32_t barrier, int c0, int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
      "[%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}
JAXINFER_DEVICE void copy_box(uint32_t to, const TensorMap* map, uint32_t barrier, int c0, int c1, int c2,
                              int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, "
      "%6}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}
JAXINFER_DEVICE void copy_box(uint32_t to, const TensorMap* map, uint32_t barrier, int c0, int c1, int c2,
                              int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, "
      "%6, %7}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}
// Waits until all copies of this thread have landed.
JAXINFER_DEVICE void wait_all_copies() {
  injected_delay();
  asm volatile("cp.async.wait_all;" ::: "memory");
}
// Brings a line to L1 for another warp.
JAXINFER_DEVICE void read_ahead(const int32_t* from) {
  asm volatile("{.reg .b32 unused; ld.global.nc.b32 unused, [%0];}" ::"l"(from));
}
// Between writes of ordinary instructions (copy_async too) and reads of the same bytes by wgmma, and between
// such writes and the next copy_box over them.
JAXINFER_DEVICE void fence_tensor_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- registers ----

template <int kRegisters>
JAXINFER_DEVICE void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
JAXINFER_DEVICE void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ---- shared memory as wgmma reads it ----

// Offset of a 16-byte chunk (0 to 7) of a row of a panel. Panels begin at multiples of 1024 bytes; eight rows
// are one swizzle pattern, which the copy engine writes by itself.
JAXINFER_DEVICE uint32_t panel_offset(int row, int chunk) {
  return static_cast<uint32_t>(row * kPanelBytes + ((chunk ^ (row & 7)) << 4));
}

// Descriptor of a matrix in 128-byte swizzled panels: the lower half, in units of 16 bytes its address and
// the bytes between panels (`panel_stride`, read only where one instruction spans several: V), and the upper
// half, known when the kernel is compiled: the bytes between patterns of a panel, and the swizzle.
JAXINFER_DEVICE uint32_t matrix_descriptor(uint32_t address, int panel_stride) {
  return (address & 0x3ffff) >> 4 | static_cast<uint32_t>(panel_stride >> 4) << 16;
}
constexpr uint32_t descriptor_high(int pattern_stride) {
  return static_cast<uint32_t>(pattern_stride) >> 4 | 1u << 30;
}

}  // namespace jaxinfer
