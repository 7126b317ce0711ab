// The gradient of the sinks: dsink = sum over batch and rows of exp(sink - lse) * (dlse - rowsum(dout out)), where the
// kernel before the backward left delta = rowsum(dout out) - dlse. A block sums one head, always in the same order.
#pragma once

#include "any/ptx.cuh"
#include "core/params.cuh"
#include "core/segments.cuh"
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
  float sum = 0.f;
  // The sink has all the weight where lse is it, infinite ones included, whose difference is NaN.
  const auto add = [&](float lse, float delta) { sum -= (lse == sink ? 1.f : exp2f((sink - lse) * kLog2E)) * delta; };
  const auto lse_of = [&](const Place<kSpec.varlen>& place, int row) {
    return p.lse.at(place.q(), head)[row * p.lse.row];
  };
  const auto delta_of = [&](const Place<kSpec.varlen>& place, int row) {
    if constexpr (kSpec.packed)
      return p.delta.data[2 * place.statistic(s, head) + statistic_of(row) + 16];
    else
      return p.delta.at(place.q(), head)[row * p.delta.row];
  };

  if constexpr (kSpec.varlen) {
#pragma unroll 4
    for (int i = threadIdx.x / 16; i < p.segments.runs(kBlocks); i += kThreads / 16) {
      const auto [sequence, block] = find_rows<true, kBlocks>(s, p.segments, i);
      const Place<true> place = place_of<true>(s, p.segments, sequence);
      const int row = 16 * block + threadIdx.x % 16;
      if (row < place.sizes.seqlen_q) add(lse_of(place, row), delta_of(place, row));
    }
  } else {
    int row = threadIdx.x % s.seqlen_q;
    uint32 batch = threadIdx.x / s.seqlen_q;
    const uint32 batches = s.batch;
    while (batch < batches) {
      float lse[kSteps], delta[kSteps];
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const bool exists = batch < batches;
        const Place<false> place = {int(batch)};
        lse[i] = exists ? lse_of(place, row) : kInfinity;
        delta[i] = exists ? delta_of(place, row) : 0.f;
        row += kThreads % s.seqlen_q, batch += kThreads / s.seqlen_q;
        if (row >= s.seqlen_q) row -= s.seqlen_q, ++batch;
      }
#pragma unroll
      for (int i = 0; i < kSteps; ++i) add(lse[i], delta[i]);
    }
  }
  sum = sum_of_warp(sum);
  const int warp = warp_index();  // by all lanes: it is a shuffle
  if (lane_index() == 0) sums[warp] = sum;
  __syncthreads();
  if (warp > 0) return;
  sum = sum_of_warp(sums[lane_index()]);
  if (lane_index() == 0) p.dsink[head] = sum;
}

}  // namespace cupyflash
