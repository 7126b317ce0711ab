// The argument of Hopper's backward kernels; NumPy twin in cupyflash/launch.py.
#pragma once

#include "core/params.cuh"
#include "sm90/ptx.cuh"

namespace cupyflash {

struct HopperBackwardParams {
  TensorMap q_map, k_map, v_map, dout_map;
  Array dout, out, dq, dk, dv;
  RowArray lse, dlse;
  float* statistics;  // (batch, heads_q, blocks of 64 rows, 2, 64): see `statistic_place`
  float* dq_sum;      // (window, group, 16-row blocks, 8-column blocks, 128): accumulator fragments
  uint32* counters;   // next work, next block of dq, then for each pair of the window: see `Counters`
  Sizes sizes;
  int window;      // (batch, key head) pairs that have a dq_sum: pair i takes that of pair i - window
  int row_blocks;  // of 16 queries, a multiple of 8
  int rotated;     // the tiles of keys of a head begin with different queries
};

// lse in base 2 and delta of 64 rows follow each other. In 16 rows, the four that one lane needs are neighbours.
__device__ __forceinline__ constexpr int statistic_place(int row) {
  return row / 64 * 128 + row % 64 / 16 * 16 + row % 8 / 2 * 4 + row % 16 / 8 * 2 + row % 2;
}

struct Counters {  // of one (batch, key head) pair of the window, over all pairs that had the place
  uint32* added;   // warps that have added all they have to dq_sum
  uint32* freed;   // blocks of dq_sum that were converted and cleared

  __device__ __forceinline__ Counters(const HopperBackwardParams& p, int place)
      : added(p.counters + 2 + place), freed(p.counters + 2 + p.window + place) {}
};

}  // namespace cupyflash
