// A ring of slots in shared memory between roles: a slot is full when all that `init` counts have arrived, threads or
// announced copies, and empty again after as many releases. And the turns of warpgroups at the tensor cores.
#pragma once

#include "sm90/ptx.cuh"

namespace cupyflash {

template <int kSlots, int kCluster = 1>
struct Ring {
  uint32 barriers;   // kSlots full barriers, then kSlots empty ones
  uint32 count = 0;  // tiles so far, on either side

  __device__ __forceinline__ explicit Ring(uint32 barriers, uint32 count = 0) : barriers(barriers), count(count) {}

  // `arrivals` fill a slot, each of a thread or of the copies that one announced; `releases` free it.
  __device__ __forceinline__ void init(int releases, int arrivals = 1) const {
    for (int i = 0; i < kSlots; ++i) barrier_init(full(i), arrivals), barrier_init(empty(i), releases);
  }
  __device__ __forceinline__ uint32 full(int slot) const { return barriers + 8 * slot; }
  __device__ __forceinline__ uint32 empty(int slot) const { return barriers + 8 * (kSlots + slot); }
  // Of the tile that is `ahead` of the present one.
  __device__ __forceinline__ int slot(int ahead = 0) const { return (count + ahead) % kSlots; }
  __device__ __forceinline__ uint32 parity(int ahead = 0) const { return (count + ahead) / kSlots & 1; }
  __device__ __forceinline__ void advance(int tiles = 1) { count += tiles; }

  // Producer: waits for room and announces the bytes; the copies then name the full barrier.
  __device__ __forceinline__ uint32 acquire(int bytes) const {
    barrier_wait(empty(slot()), parity() ^ 1);
    barrier_expect(full(slot()), bytes);
    return full(slot());
  }
  // A warp that has stored its part, or all of it, itself.
  __device__ __forceinline__ void fill() const {
    __syncwarp();
    if (opaque(threadIdx.x) % 32 == 0) barrier_arrive(full(slot()));
  }
  // Consumer. Warps of a group may finish a product at different times: each releases what it has read.
  __device__ __forceinline__ void wait(int ahead = 0) const { barrier_wait(full(slot(ahead)), parity(ahead)); }
  __device__ __forceinline__ void release(int ahead = 0) const {
    if constexpr (kCluster > 1) {  // every block copies to all
      if (lane_index() < kCluster) barrier_arrive_at(empty(slot(ahead)), lane_index());
    } else {
      if (lane_index() == 0) barrier_arrive(empty(slot(ahead)));
    }
  }
};

// Runs that differ in length, as a block mask makes them: a block takes one more when it is through with its last. The
// thread that loads takes it, and tells the other roles. Else each role knows the runs of its block. In the kernels of
// dk, dv and of dq this won nothing.
template <bool kDealt>
struct Dealer {
  static constexpr int kSlots = 2, kBarriers = kDealt ? 2 * kSlots : 0;
  Ring<kSlots> ring;
  uint32* runs;  // kSlots

  __device__ __forceinline__ Dealer(const uint64* barriers, uint32* runs)
      : ring(shared_address(barriers)), runs(runs) {}
  __device__ __forceinline__ void init(int followers) const {  // warps
    if constexpr (kDealt) ring.init(followers);
  }
  // `taken`: how many runs blocks took beyond their first ones. Early, for it takes a while.
  __device__ __forceinline__ static uint32 draw(uint32* taken) {
    if constexpr (!kDealt) return 0;
    return gridDim.x + atomicAdd(taken, 1u);
  }
  template <class Works>
  __device__ __forceinline__ void deal(Works& works, uint32 run) {
    if constexpr (!kDealt) return works.next();
    barrier_wait(ring.empty(ring.slot()), ring.parity() ^ 1);
    runs[ring.slot()] = run;
    barrier_arrive(ring.full(ring.slot()));
    ring.advance();
    works.jump(run);
  }
  template <class Works>
  __device__ __forceinline__ void follow(Works& works, bool whole_warp = true) {
    if constexpr (!kDealt) return works.next();
    ring.wait();
    works.jump(runs[ring.slot()]);
    __syncwarp(whole_warp ? kFullWarp : 1);  // all have read it
    ring.release();
    ring.advance();
  }
};

// The warpgroups issue their products one after the other, so that one computes its softmax while another multiplies.
// Barrier first + g opens for group g when the group before it has issued; barrier 0 is that of __syncthreads.
template <int kGroups>
struct Turns {
  static constexpr int kMeeting = 2 * 128;  // threads of the group that waits and of the one that passes on
  int group, first;

  __device__ __forceinline__ void open() const {
    if (group == kGroups - 1) named_arrive(first, kMeeting);
  }
  __device__ __forceinline__ void wait() const { named_sync(first + group, kMeeting); }
  __device__ __forceinline__ void pass_on() const { named_arrive(first + (group + 1) % kGroups, kMeeting); }
  __device__ __forceinline__ void close() const {
    if (group == 0) named_sync(first, kMeeting);
  }
};

}  // namespace cupyflash
