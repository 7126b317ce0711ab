// The instructions of the Hopper path, one function each; numbers are sections of the PTX ISA 9.0 manual.
#pragma once

#include "any/ptx.cuh"

namespace cupyflash {

struct alignas(64) TensorMap {  // made by the driver (cuTensorMapEncodeTiled)
  uint64 words[16];
};

// 9.7.13.15 mbarrier: init, arrive, arrive.expect_tx, try_wait
__device__ __forceinline__ void barrier_init(uint32 barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// That of another block of the cluster.
__device__ __forceinline__ void barrier_arrive_at(uint32 barrier, int block) {
  asm volatile(
      "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(barrier),
      "r"(block)
      : "memory");
}
__device__ __forceinline__ void barrier_expect(uint32 barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint32 barrier, uint32 parity) {
  asm volatile(
      "{ .reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again; }" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
// 9.7.13.4 fence: makes initialised barriers visible to the copy engine.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// 9.7.9.26.4.1 cp.async.bulk: neighbouring bytes, a multiple of 16.
__device__ __forceinline__ void copy_bytes(uint32 target, const void* source, uint32 barrier, int bytes) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %3, [%2];" ::"r"(target),
               "l"(source), "r"(barrier), "r"(bytes)
               : "memory");
}

// 9.7.9.26.5.2 cp.async.bulk.tensor: a box of (head_dim, heads, seqlen, batch); what is outside the array is read as
// zero, and not written.
__device__ __forceinline__ void copy_box(uint32 target, const TensorMap& map, uint32 barrier, int col, int row,
                                         int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(target),
      "l"(&map), "r"(barrier), "r"(col), "r"(head), "r"(row), "r"(batch)
      : "memory");
}
// A box of rows of one of packed sequences, `row` counting from its `first` one; what is beyond its `count` is read as
// zero, and not written. Such a map (tensor_map.py) has the rows in three axes: the coordinates of a row add up to it,
// and the first of them leaves the array where the sequence ends.
constexpr int kMappedRows = 1 << 30;
__device__ __forceinline__ void copy_box(uint32 target, const TensorMap& map, uint32 barrier, int col, int row,
                                         int head, int first, int count) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], "
      "[%2];" ::"r"(target),
      "l"(&map), "r"(barrier), "r"(col), "r"(head), "r"(kMappedRows - count + row), "r"(first + count), "r"(kMappedRows)
      : "memory");
}
__device__ __forceinline__ void store_box(const TensorMap& map, uint32 source, int col, int row, int head, int first,
                                          int count) {
  asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(&map),
               "r"(source), "r"(col), "r"(head), "r"(kMappedRows - count + row), "r"(first + count), "r"(kMappedRows)
               : "memory");
}
// To the same address of the blocks of the cluster that `blocks` has a bit for; each one's own barrier counts the
// bytes.
__device__ __forceinline__ void copy_box_to_all(uint32 target, const TensorMap& map, uint32 barrier, int col, int row,
                                                int head, int batch, int blocks) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(target),
      "l"(&map), "r"(barrier), "r"(col), "r"(head), "r"(row), "r"(batch), "h"(static_cast<unsigned short>(blocks))
      : "memory");
}
__device__ __forceinline__ void store_box(const TensorMap& map, uint32 source, int col, int row, int head, int batch) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
               "r"(source), "r"(col), "r"(head), "r"(row), "r"(batch)
               : "memory");
}
// 9.7.9.26.6 cp.async.bulk.commit_group, wait_group: until the stores have read shared memory.
__device__ __forceinline__ void wait_for_stores() {
  asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::: "memory");
}
__device__ __forceinline__ void prefetch_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// 9.7.13.4 fence.proxy.async: what this thread stored in shared memory is seen by wgmma and the copy engine.
__device__ __forceinline__ void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// 9.7.15.5.15 stmatrix: four 8 x 8 matrices of 16 bits; lane l has the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrix(uint32 address, const uint32 (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
}

// 9.7.9.8 ld: an element of 1 or 4 bytes, and two neighbours.
template <int kItem>
__device__ __forceinline__ uint32 load_item(uint32 address) {
  uint32 x;
  if constexpr (kItem == 1)
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  else
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  return x;
}
template <int kItem>
__device__ __forceinline__ void load_pair(uint32 (&x)[4], uint32 address) {
  if constexpr (kItem == 1) {
    asm volatile("ld.shared.u16 %0, [%1];" : "=r"(x[0]) : "r"(address) : "memory");
    x[1] = x[0] >> 8, x[0] &= 0xff;
  } else {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x[0]), "=r"(x[1]) : "r"(address) : "memory");
  }
}

// 9.7.13.3 barrier.cluster
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// 9.7.20.5 setmaxnreg
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// 9.7.13.1 bar: named barriers; `threads` counts those that wait and those that only arrive.
__device__ __forceinline__ void named_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// 9.7.15.7 wgmma.fence, commit_group, wait_group
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// 9.7.15.5.1 shared memory descriptor for tiles of 128-byte rows in 128-byte swizzle, rows in groups of 8 x 128 bytes.
// `leading`: bytes between groups of 64 columns, where the columns are the rows of the operand. The descriptor of an
// address that is n bytes further is n / 16 more: one addition (UIADD3.64), where packing an address takes five.
__device__ __forceinline__ uint64 descriptor(uint32 address, int leading) {
  return (address & 0x3ffff) >> 4 | uint64(leading >> 4) << 16 | uint64(1024 >> 4) << 32 | uint64(1) << 62;
}

}  // namespace cupyflash
