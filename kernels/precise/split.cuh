// q, k, v and, before a backward, dout, of any strides, as precise/halves.cuh says: one kernel looks for the largest
// number of each, another one splits them.
#pragma once

#include "core/spec.cuh"
#include "precise/halves.cuh"

namespace cupyflash {

// A vector, one row of one head, is read by as many lanes as four times that is the padded width.
struct Source {
  Array array;
  uint32 rows, heads, vectors;
  int cols, lanes;

  template <class Params>
  __device__ __forceinline__ static Source of(const Params& p, Operand operand) {
    const Sizes& s = p.sizes;
    const bool of_q = operand == kQ || operand == kDout;
    const uint32 rows = of_q ? s.seqlen_q : s.seqlen_k, heads = of_q ? s.heads_q : s.heads_q / s.group;
    const int cols = operand == kQ || operand == kK ? s.head_dim : s.head_dim_v;
    if constexpr (requires { p.dout; })
      return {operand == kQ   ? p.q
              : operand == kK ? p.k
              : operand == kV ? p.v
                              : p.dout,
              rows,
              heads,
              s.batch * rows * heads,
              cols,
              padded(cols) / 4};
    else
      return {
          operand == kQ ? p.q : operand == kK ? p.k : p.v, rows, heads, s.batch * rows * heads, cols, padded(cols) / 4};
  }
  // The first of this lane's four columns, whatever the vector.
  __device__ __forceinline__ int col() const { return lane_index() % lanes * 4; }
  // Four columns, zeros beyond the last.
  template <int kAccess>
  __device__ __forceinline__ void load(float (&x)[4], uint32 vector, int col) const {
    const uint32 head = vector % heads, row = vector / heads % rows, batch = vector / heads / rows;
    const float* const source =
        static_cast<const float*>(array.data) + (batch * array.batch + row * array.row + head * array.head) + col;
    if constexpr (kAccess == 16) {
      const float4 unit = vector < vectors && col < cols ? __ldg(reinterpret_cast<const float4*>(source)) : float4{};
      x[0] = unit.x, x[1] = unit.y, x[2] = unit.z, x[3] = unit.w;
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = vector < vectors && col + i < cols ? __ldg(source + i) : 0.f;
    }
  }
};

// Calls use(x, vector, col) for all units of four columns, those of this thread; `together` are on their way at once.
template <SplitSpec kSpec, class Use>
__device__ __forceinline__ void each_unit(const Source& source, Use use) {
  constexpr int kTogether = 4;
  const int col = source.col();
  const uint32 at_once = 32 / source.lanes, step = gridDim.x * kSpec.warps * at_once;
  const uint32 own = (blockIdx.x * kSpec.warps + warp_index()) * at_once + lane_index() / source.lanes;
#pragma unroll 1
  for (uint32 vector = own; __any_sync(kFullWarp, vector < source.vectors); vector += kTogether * step) {
    float x[kTogether][4];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) source.load<kSpec.access>(x[i], vector + i * step, col);
#pragma unroll
    for (int i = 0; i < kTogether; ++i) use(x[i], vector + i * step, col);
  }
}

__device__ __forceinline__ uint32 magnitude_bits(float x) { return __float_as_uint(x) & 0x7fffffffu; }  // NaN above inf

// Whether the largest number of a row or a column has less than 22 bits.
__device__ __forceinline__ bool is_small(uint32 largest, float factor) {
  constexpr float kLeast = 0.125f;  // 2^-3 / 2^-25 = 2^22
  return largest != 0 && !(__uint_as_float(largest) * factor >= kLeast);
}

template <class T, SplitSpec kSpec>
__global__ void __launch_bounds__(32 * kSpec.warps, kSpec.blocks_per_sm)
    find_largest(const __grid_constant__ HalvesParams<kSpec.backward> p) {
  constexpr int kColumns = kSpec.operands() * kMostCols;
  __shared__ uint32 columns[kColumns];
  for (int i = threadIdx.x; i < kColumns; i += 32 * kSpec.warps) columns[i] = 0;
  __syncthreads();
#pragma unroll
  for (int operand = kQ; operand < kSpec.operands(); ++operand) {
    uint32 most[4] = {};
    const Source source = Source::of(p, Operand(operand));
    each_unit<kSpec>(source, [&](const float (&x)[4], uint32, int) {
#pragma unroll
      for (int i = 0; i < 4; ++i) most[i] = max(most[i], magnitude_bits(x[i]));
    });
#pragma unroll
    for (int i = 0; i < 4; ++i) atomicMax(columns + operand * kMostCols + source.col() + i, most[i]);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kColumns; i += 32 * kSpec.warps) {
    atomicMax(p.halves.scales->of_column[i / kMostCols] + i % kMostCols, columns[i]);
    const uint32 largest = __reduce_max_sync(kFullWarp, columns[i]);
    if (lane_index() == 0) atomicMax(p.halves.scales->largest + i / kMostCols, largest);
  }
}

template <class T, SplitSpec kSpec>
__global__ void __launch_bounds__(32 * kSpec.warps, kSpec.blocks_per_sm)
    split_rows(const __grid_constant__ HalvesParams<kSpec.backward> p) {
  Scales& scales = *p.halves.scales;
  bool wide = false;
#pragma unroll
  for (int operand = kQ; operand < kSpec.operands(); ++operand) {
    const Source source = Source::of(p, Operand(operand));
    const uint32 largest = scales.largest[operand];
    const float factor = power_of_two(exponent_of(largest));
    each_unit<kSpec>(source, [&](float (&x)[4], uint32 vector, int col) {
      uint32 of_row = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) of_row = max(of_row, magnitude_bits(x[i])), x[i] *= factor;
#pragma unroll
      for (int step = 16; step > 0; step /= 2)
        if (step < source.lanes) of_row = max(of_row, __shfl_xor_sync(kFullWarp, of_row, step));
      wide |= is_small(of_row, factor);
      if (vector >= source.vectors) return;
      uint2 big, small;
      split(x[0], x[1], big.x, small.x);
      split(x[2], x[3], big.y, small.y);
      uint2* const target = static_cast<uint2*>(p.halves.of(Operand(operand))) + 2 * int64(vector) * source.lanes;
      target[col / 4] = big, target[col / 4 + source.lanes] = small;
    });
    wide |=
        largest >= 0x7f800000u || threadIdx.x < kMostCols && is_small(scales.of_column[operand][threadIdx.x], factor);
  }
  if constexpr (kSpec.backward) {  // what takes dout v back to its size is a normal number, and so is the product
    const int exponent = exponent_of(scales.largest[kV]) + exponent_of(scales.largest[kDout]);
    wide |= exponent < -60 || exponent > 112;
  }
  if (wide) scales.wide = 1;
}

}  // namespace cupyflash
