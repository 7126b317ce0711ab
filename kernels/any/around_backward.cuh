// The two small kernels around the backward, bound by memory: before it, delta = rowsum(dout out) - dlse and a cleared
// dq sum; after it, dq = scale * sum in the element type.
#pragma once

#include "any/ptx.cuh"
#include "core/epilogue.cuh"
#include "core/params.cuh"
#include "core/segments.cuh"
#include "core/spec.cuh"

namespace cupyflash {

template <bool kFloat, class T>
struct Choose {
  using Type = T;
};
template <class T>
struct Choose<true, T> {
  using Type = float;
};

// Eight neighbouring elements of Item (T or float), as they were read: by 16 bytes where the alignment allows it.
template <class T, class Item, int kAccess>
struct Elements {
  static constexpr int kWords = 2 * sizeof(Item);
  uint32 words[kWords];

  __device__ __forceinline__ void load(const Item* source, int count) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = 0;
    if constexpr (kAccess == 16) {
      if (count <= 0) return;
#pragma unroll
      for (int i = 0; i < kWords / 4; ++i)
        *reinterpret_cast<uint4*>(words + 4 * i) = reinterpret_cast<const uint4*>(source)[i];
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (i >= count) continue;
        if constexpr (sizeof(Item) == 4)
          words[i] = __float_as_uint(source[i]);
        else
          words[i / 2] |= uint32(source[i].bits) << i % 2 * 16;
      }
    }
  }
  __device__ __forceinline__ float2 pair(int i) const {
    if constexpr (sizeof(Item) == 4) return {__uint_as_float(words[2 * i]), __uint_as_float(words[2 * i + 1])};
    return T::unpack(words[i]);
  }
};

// One block: 16 rows of some neighbouring heads. All loads are on their way before the first is used.
template <class T, PrepareSpec kSpec>
__global__ void __launch_bounds__(256) prepare_backward(const __grid_constant__ BackwardParams p) {
  using Out = typename Choose<kSpec.float32_out, T>::Type;
  constexpr int kLanes = kSpec.lanes(), kHeads = kSpec.heads(), kSteps = 4;  // 4 rows at a time
  __shared__ float deltas[kHeads][16];
  const int head_groups = (p.sizes.heads_q + kHeads - 1) / kHeads;
  const uint32 index = gridDim.x - 1 - blockIdx.x;  // what the next kernel begins with is touched last
  const int first_head = index % head_groups * kHeads;
  constexpr TileKind kRows = kSpec.packed ? kStatistics : kBlocks;
  const auto [sequence, block] = find_rows<kSpec.varlen, kRows>(p.sizes, p.segments, index / head_groups);
  if (kSpec.varlen && sequence < 0) return;
  const auto at = place_of<kSpec.varlen>(p.sizes, p.segments, sequence);
  const Sizes& s = sizes_in(p.sizes, at);
  const int batch = at.q(), first_row = 16 * block;

  const int lane = threadIdx.x % kLanes, place = threadIdx.x / kLanes % kHeads, in_row = threadIdx.x / 64;
  const int head = first_head + place, col = 8 * lane;
  const T* dout = static_cast<const T*>(p.dout.data) + batch * p.dout.batch + head * p.dout.head + col;
  const Out* out = static_cast<const Out*>(p.out.data) + batch * p.out.batch + head * p.out.head + col;
  Elements<T, T, kSpec.access> x[kSteps];
  Elements<T, Out, kSpec.access> y[kSteps];
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const int row = first_row + in_row + 4 * i, count = head < s.heads_q && row < s.seqlen_q ? s.head_dim_v - col : 0;
    x[i].load(dout + row * p.dout.row, count);
    y[i].load(out + row * p.out.row, count);
  }
  // Of these threads, one for each row and head.
  const int its_head = first_head + threadIdx.x / 16, its_row = first_row + threadIdx.x % 16;
  const bool mine = threadIdx.x < 16 * kHeads && its_head < s.heads_q;
  float lse = -kInfinity, dlse = 0.f;
  if (mine && its_row < s.seqlen_q) {
    lse = p.lse.at(batch, its_head)[its_row * p.lse.row];
    if (p.dlse.data != nullptr) dlse = p.dlse.at(batch, its_head)[its_row * p.dlse.row];
  }

  const int q_blocks = (s.seqlen_q + 15) / 16;
  if (p.dq_sum != nullptr && block < q_blocks) {
    constexpr int kBlock = 4 * kSpec.head_dim;  // of 16 bytes
#pragma unroll
    for (int first = 0; first < kHeads * kBlock; first += 256) {
      const int i = first + threadIdx.x;
      const int64 of_all = at.block(s, first_head + i / kBlock) + block;
      if (i < kHeads * kBlock && first_head + i / kBlock < s.heads_q)
        reinterpret_cast<float4*>(p.dq_sum)[of_all * kBlock + i % kBlock] = {};
    }
  }

#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    float delta = 0.f;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float2 a = x[i].pair(e), b = y[i].pair(e);
      delta = fmaf(a.x, b.x, fmaf(a.y, b.y, delta));
    }
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) delta += __shfl_xor_sync(kFullWarp, delta, step);
    if (lane == 0) deltas[place][in_row + 4 * i] = delta;
  }
  __syncthreads();
  if (!mine) return;
  // A row without keys and sink has no gradient, whatever dout and dlse hold: P is 0 there, and 0 * inf would not be.
  const float delta = lse == -kInfinity ? 0.f : deltas[threadIdx.x / 16][threadIdx.x % 16] - dlse;
  if constexpr (kSpec.packed) {
    float* const target = p.delta.data + 2 * at.statistic(s, its_head) + statistic_of(its_row);
    target[0] = lse_in_base_2(lse), target[16] = delta;
  } else if (its_row < s.seqlen_q) {
    p.delta.at(batch, its_head)[its_row * p.delta.row] = delta;
  }
}

// One warp: 16 rows and 64 columns of one head, or 32 where there are no 64; the next warp: the next columns or head.
template <class T, PrepareSpec kSpec>
__global__ void __launch_bounds__(256) finish_backward(const __grid_constant__ BackwardParams p) {
  constexpr int kCols = kSpec.finished_cols(), kParts = kSpec.head_dim / kCols;
  // The last first: they may still be in L2.
  const int64 index = int64(gridDim.x - 1 - blockIdx.x) * 8 + warp_index();
  const int part = index % kParts, head = index / kParts % p.sizes.heads_q;
  const auto [sequence, block] =
      find_rows<kSpec.varlen, kBlocks>(p.sizes, p.segments, index / kParts / p.sizes.heads_q);
  if (kSpec.varlen ? sequence < 0 : sequence >= p.sizes.batch) return;
  const auto place = place_of<kSpec.varlen>(p.sizes, p.segments, sequence);
  const Sizes& s = sizes_in(p.sizes, place);
  const float4* const sum =
      reinterpret_cast<const float4*>(p.dq_sum) + ((place.block(s, head) + block) * kParts + part) * (4 * kCols);
  Accumulator<kCols> dq;
#pragma unroll
  for (int j = 0; j < kCols / 8; ++j) {
    const float4 x = __ldcs(sum + 32 * j + lane_index());
    dq.x[j][0] = x.x, dq.x[j][1] = x.y, dq.x[j][2] = x.z, dq.x[j][3] = x.w;
  }
  dq.scale_rows(s.scale, s.scale);
  store<T, kSpec.access>(dq, head_of(p.dq, place.q(), head, s.seqlen_q, s.head_dim), 16 * block, kCols * part);
}

}  // namespace cupyflash
