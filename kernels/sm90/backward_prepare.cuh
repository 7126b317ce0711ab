// Before Hopper's backward: delta = rowsum(dout out) - dlse beside lse in base 2, and a cleared dq_sum. Bound by
// memory.
#pragma once

#include "any/around_backward.cuh"
#include "sm90/backward_params.cuh"

namespace cupyflash {

// One block: 64 rows of some neighbouring heads, so that it reads whole kilobytes.
template <class T, PrepareSpec kSpec>
__global__ void __launch_bounds__(256) prepare_hopper_backward(const __grid_constant__ HopperBackwardParams p) {
  using Out = typename Choose<kSpec.float32_out, T>::Type;
  constexpr int kLanes = kSpec.head_dim_v <= 64 ? 8 : 16, kHeads = 64 / kLanes, kUnroll = 4;  // lanes of a row
  __shared__ float deltas[kHeads][64];
  const Sizes& s = p.sizes;

  for (int64 i = int64(blockIdx.x) * 256 + threadIdx.x; i < 2 + 2 * p.window; i += int64(gridDim.x) * 256)
    p.counters[i] = 0;
  const int64 sums = int64(p.window) * s.group * p.row_blocks * (4 * kSpec.head_dim);
  float4* const sum = reinterpret_cast<float4*>(p.dq_sum);
  for (int64 i = int64(blockIdx.x) * 256 + threadIdx.x; i < sums; i += int64(gridDim.x) * 256)
    sum[i] = {0.f, 0.f, 0.f, 0.f};

  const int head_groups = (s.heads_q + kHeads - 1) / kHeads, row_groups = p.row_blocks / 4;
  const int first_head = blockIdx.x % head_groups * kHeads;
  const int first_row = blockIdx.x / head_groups % row_groups * 64, batch = blockIdx.x / head_groups / row_groups;
  const int lane = threadIdx.x % kLanes, in_head = threadIdx.x / kLanes % kHeads, in_row = threadIdx.x / 64;
  const int head = min(first_head + in_head, s.heads_q - 1), col = 8 * lane;
  const T* const dout = static_cast<const T*>(p.dout.data) + batch * p.dout.batch + head * p.dout.head + col;
  const Out* const out = static_cast<const Out*>(p.out.data) + batch * p.out.batch + head * p.out.head + col;
#pragma unroll 1
  for (int first = first_row + in_row; first < first_row + 64; first += 4 * kUnroll) {
    float x[kUnroll][8], y[kUnroll][8];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int row = first + 4 * i, count = row < s.seqlen_q ? s.head_dim_v - col : 0;
#pragma unroll
      for (int e = 0; e < 8; ++e) x[i][e] = y[i][e] = 0.f;
      if (count <= 0) continue;
      Elements<T, kSpec>::load(x[i], dout + row * p.dout.row, count);
      Elements<T, kSpec>::load(y[i], out + row * p.out.row, count);
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      float delta = 0.f;
#pragma unroll
      for (int e = 0; e < 8; ++e) delta = fmaf(x[i][e], y[i][e], delta);
#pragma unroll
      for (int step = kLanes / 2; step > 0; step /= 2) delta += __shfl_xor_sync(kFullWarp, delta, step);
      if (lane == 0) deltas[in_head][first + 4 * i - first_row] = delta;
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = threadIdx.x; i < 64 * kHeads; i += 256) {
    const int place = i / 64, head = first_head + place, row = first_row + i % 64;
    if (head >= s.heads_q) continue;
    float lse = kInfinity, delta = 0.f;  // of a row that does not exist or sees no key: P is 0, whatever dout holds
    if (row < s.seqlen_q) {
      const float natural = p.lse.at(batch, head)[row * p.lse.row];
      if (natural != -kInfinity) {
        lse = natural * kLog2E, delta = deltas[place][i % 64];
        if (p.dlse.data != nullptr) delta -= p.dlse.at(batch, head)[row * p.dlse.row];
      }
    }
    float* const target = p.statistics + (int64(batch) * s.heads_q + head) * p.row_blocks * 32 + statistic_place(row);
    target[0] = lse, target[64] = delta;
  }
}

}  // namespace cupyflash
