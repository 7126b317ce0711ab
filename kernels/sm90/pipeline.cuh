// A ring of tiles in shared memory between the copy engine and the warpgroups: a tile is full when its bytes have
// landed, and empty again when every consumer warp has released it.
#pragma once

#include "sm90/ptx.cuh"

namespace cupyflash {

template <int kStages>
struct Ring {
  uint32 barriers;  // kStages full barriers, then kStages empty ones
  int count = 0;    // tiles so far, on either side

  __device__ __forceinline__ explicit Ring(uint32 barriers) : barriers(barriers) {}

  __device__ __forceinline__ void init(int consumer_warps) const {
    for (int i = 0; i < kStages; ++i) barrier_init(full(i), 1), barrier_init(empty(i), consumer_warps);
  }
  __device__ __forceinline__ uint32 full(int stage) const { return barriers + 8 * stage; }
  __device__ __forceinline__ uint32 empty(int stage) const { return barriers + 8 * (kStages + stage); }
  __device__ __forceinline__ int stage() const { return count % kStages; }
  __device__ __forceinline__ uint32 parity() const { return count / kStages & 1; }
  __device__ __forceinline__ void advance() { ++count; }

  // Producer: waits for room and announces the bytes; the copies then name the full barrier.
  __device__ __forceinline__ uint32 acquire(int bytes) const {
    barrier_wait(empty(stage()), parity() ^ 1);
    barrier_expect(full(stage()), bytes);
    return full(stage());
  }
  // Consumer. Warps of a group may finish a product at different times: each releases what it has read.
  __device__ __forceinline__ void wait() const { barrier_wait(full(stage()), parity()); }
  __device__ __forceinline__ void release() const {
    if (lane_index() == 0) barrier_arrive(empty(stage()));
  }
};

}  // namespace cupyflash
