// The gradient of the sinks: dsink = sum over batch and rows of exp(sink - lse) * (dlse - rowsum(dout out)), where the
// kernel before the backward left delta = rowsum(dout out) - dlse. A block sums one head, always in the same order.
#pragma once

#include "any/ptx.cuh"
#include "core/params.cuh"
#include "core/spec.cuh"

namespace cupyflash {

__device__ __forceinline__ float sum_of_warp(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(kFullWarp, x, step);
  return x;
}

template <class T, SinkSpec kSpec>
__global__ void __launch_bounds__(32 * kSpec.warps) sink_gradient(const __grid_constant__ BackwardParams p) {
  static_assert(kSpec.warps == 32);
  constexpr int kThreads = 32 * kSpec.warps, kSteps = 4;  // steps: loads that are on their way together
  __shared__ float sums[kSpec.warps];
  const Sizes& s = p.sizes;
  const int head = blockIdx.x;
  const float sink = p.sink.of(head);
  const auto delta_of = [&](int batch, int row) {
    if constexpr (kSpec.packed) {
      const int64 first = (int64(batch) * s.heads_q + head) * statistic_rows(s.seqlen_q) * 2;
      return p.delta.data[first + statistic_of(row) + 16];
    } else {
      return p.delta.at(batch, head)[row * p.delta.row];
    }
  };

  float sum = 0.f;
  int row = threadIdx.x % s.seqlen_q;
  uint32 batch = threadIdx.x / s.seqlen_q;
  const uint32 batches = s.batch;
  while (batch < batches) {
    float lse[kSteps], delta[kSteps];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const bool exists = batch < batches;
      lse[i] = exists ? p.lse.at(batch, head)[row * p.lse.row] : kInfinity;
      delta[i] = exists ? delta_of(batch, row) : 0.f;
      row += kThreads % s.seqlen_q, batch += kThreads / s.seqlen_q;
      if (row >= s.seqlen_q) row -= s.seqlen_q, ++batch;
    }
    // The sink has all the weight where lse is it, infinite ones included, whose difference is NaN.
#pragma unroll
    for (int i = 0; i < kSteps; ++i) sum -= (lse[i] == sink ? 1.f : exp2f((sink - lse[i]) * kLog2E)) * delta[i];
  }
  sum = sum_of_warp(sum);
  if (lane_index() == 0) sums[warp_index()] = sum;
  __syncthreads();
  if (warp_index() > 0) return;
  sum = sum_of_warp(sums[lane_index()]);
  if (lane_index() == 0) p.dsink[head] = sum;
}

}  // namespace cupyflash
