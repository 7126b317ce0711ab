// The two small kernels around the backward, bound by memory: before it, delta = rowsum(dout out) - dlse and a cleared
// dq sum; after it, dq = scale * sum in the element type.
#pragma once

#include "any/ptx.cuh"
#include "core/fragment.cuh"
#include "core/params.cuh"
#include "core/spec.cuh"

namespace cupyflash {

template <class T, PrepareSpec kSpec>
struct Elements {  // kCount neighbouring elements of T or float, as wide loads as the alignment allows
  static constexpr int kCount = 8;

  template <class Item>
  __device__ __forceinline__ static void load(float (&x)[kCount], const Item* source, int count) {
    if constexpr (kSpec.access == 16) {
      constexpr int kVectors = sizeof(Item) * kCount / 16;
      uint4 packed[kVectors];
#pragma unroll
      for (int i = 0; i < kVectors; ++i) packed[i] = reinterpret_cast<const uint4*>(source)[i];
      if constexpr (sizeof(Item) == 4) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) x[i] = reinterpret_cast<const float*>(packed)[i];
      } else {
#pragma unroll
        for (int i = 0; i < kCount / 2; ++i) {
          const float2 pair = T::unpack(reinterpret_cast<const uint32*>(packed)[i]);
          x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if constexpr (sizeof(Item) == 4)
          x[i] = i < count ? source[i] : 0.f;
        else
          x[i] = i < count ? T::unpack(source[i].bits).x : 0.f;
      }
    }
  }
};

template <bool kFloat, class T>
struct Choose {
  using Type = T;
};
template <class T>
struct Choose<true, T> {
  using Type = float;
};

// One block: 16 rows of one head.
template <class T, PrepareSpec kSpec>
__global__ void __launch_bounds__(256) prepare_backward(const __grid_constant__ BackwardParams p) {
  using Out = typename Choose<kSpec.float32_out, T>::Type;
  const Sizes& s = p.sizes;
  const int q_blocks = (s.seqlen_q + 15) / 16;
  const int64 index = blockIdx.x, pair = index / q_blocks;
  const int block = index % q_blocks, batch = pair / s.heads_q, head = pair % s.heads_q;

  if (p.dq_sum != nullptr) {
    float4* sum = reinterpret_cast<float4*>(p.dq_sum + index * (16 * kSpec.head_dim));
    for (int i = threadIdx.x; i < 4 * kSpec.head_dim; i += blockDim.x) sum[i] = {0.f, 0.f, 0.f, 0.f};
  }

  const int row = block * 16 + threadIdx.x / 16, lane = threadIdx.x % 16;
  const bool exists = row < s.seqlen_q;
  const T* dout = static_cast<const T*>(p.dout.data) + batch * p.dout.batch + head * p.dout.head + row * p.dout.row;
  const Out* out = static_cast<const Out*>(p.out.data) + batch * p.out.batch + head * p.out.head + row * p.out.row;
  float delta = 0.f;
#pragma unroll
  for (int i = 0; i < (kSpec.head_dim_v + 127) / 128; ++i) {
    const int col = 8 * (lane + 16 * i), count = exists ? s.head_dim_v - col : 0;
    if (count <= 0) continue;
    float x[8], y[8];
    Elements<T, kSpec>::load(x, dout + col, count);
    Elements<T, kSpec>::load(y, out + col, count);
#pragma unroll
    for (int e = 0; e < 8; ++e) delta = fmaf(x[e], y[e], delta);
  }
#pragma unroll
  for (int step = 8; step > 0; step /= 2) delta += __shfl_xor_sync(kFullWarp, delta, step);
  if (!exists || lane > 0) return;
  if (p.dlse.data != nullptr) delta -= p.dlse.at(batch, head)[row * p.dlse.row];
  // A row without keys has no gradient, whatever dout and dlse hold: P is 0 there, and 0 * inf would not be.
  if (p.lse.at(batch, head)[row * p.lse.row] == -kInfinity) delta = 0.f;
  p.delta.at(batch, head)[row * p.delta.row] = delta;
}

// One block: 16 rows of one head; each warp takes every eighth block of eight columns.
template <class T, PrepareSpec kSpec>
__global__ void __launch_bounds__(256) finish_backward(const __grid_constant__ BackwardParams p) {
  const Sizes& s = p.sizes;
  const int q_blocks = (s.seqlen_q + 15) / 16;
  const int64 index = blockIdx.x, pair = index / q_blocks;
  const int block = index % q_blocks, batch = pair / s.heads_q, head = pair % s.heads_q;

  T* dq = static_cast<T*>(p.dq.data) + batch * p.dq.batch + head * p.dq.head;
  const float4* sum = reinterpret_cast<const float4*>(p.dq_sum) + index * (4 * kSpec.head_dim);
  for (int i = threadIdx.x; i < 4 * kSpec.head_dim; i += blockDim.x) {
    const float4 x = sum[i];
    const int col = i / 32 * 8 + Accumulator<8>::col();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = block * 16 + Accumulator<8>::row(half);
      if (row >= s.seqlen_q || col >= s.head_dim) continue;
      const uint32 packed = T::pack(s.scale * (half ? x.z : x.x), s.scale * (half ? x.w : x.y));
      T* target = dq + row * p.dq.row + col;
      if constexpr (kSpec.access >= 4) {
        *reinterpret_cast<uint32*>(target) = packed;
      } else {
        target[0].bits = packed;
        if (col + 1 < s.head_dim) target[1].bits = packed >> 16;
      }
    }
  }
}

}  // namespace cupyflash
