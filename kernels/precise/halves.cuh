// float32 as two float16: 2^e x = big + small, big the nearest float16, with 11 bits, small the rest, of which float16
// keeps 11 bits, and nothing below 2^-25. One e for an array takes its largest |x| to 2^14 ... 2^15. A row whose
// largest is at least 2^-17 of that has 22 bits in its largest numbers, and so has a column; where one has less, `wide`
// is set, and the kernels of precise/ compute everything. Products big big + big small + small big leave out 2^-22 of
// each term.
#pragma once

#include "any/ptx.cuh"
#include "core/fragment.cuh"
#include "precise/params.cuh"

namespace cupyflash {

struct float32;

__device__ constexpr int padded(int head_dim) { return head_dim <= 64 ? 64 : 128; }  // columns of each half

// e for an array whose largest |x| has these bits; both 2^e and 2^-e are normal numbers.
constexpr int kLargestExponent = 126;  // of numbers this small, some are `wide`
__device__ __forceinline__ int exponent_of(uint32 largest) {
  return largest == 0 ? 0 : min(kLargestExponent, 127 + 14 - int(largest >> 23));
}
__device__ __forceinline__ float power_of_two(int exponent) { return __uint_as_float(uint32(127 + exponent) << 23); }

// a * 2^exponent, finite, so that 0 times it is 0.
__device__ __forceinline__ float finite_scale(double a, int exponent) {
  constexpr float kMost = __builtin_bit_cast(float, 0x7f7fffff);
  return fminf(fmaxf(static_cast<float>(ldexp(a, exponent)), -kMost), kMost);
}

// Two numbers as two pairs of float16.
__device__ __forceinline__ void split(float low, float high, uint32& big, uint32& small) {
  big = float16::pack(low, high);
  const float2 rounded = float16::unpack(big);
  small = float16::pack(low - rounded.x, high - rounded.y);
}

// Splits weights or dS, each row times the power of two that takes its largest number to 2^14 ... 2^15: however small a
// row is, it keeps its bits. `exponent`: of what a row was multiplied by already; then of all. It takes the sums back.
template <int kCols>
__device__ __forceinline__ void split_by_row(Accumulator<kCols>& acc, uint32 (&big)[kCols / 16][4],
                                             uint32 (&small)[kCols / 16][4], int (&exponent)[2]) {
  float up[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float largest = 0;
#pragma unroll
    for (int j = 0; j < kCols / 8; ++j)
      largest = fmaxf(largest, fmaxf(fabsf(acc.x[j][2 * half]), fabsf(acc.x[j][2 * half + 1])));
    largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, 2));
    const int more = min(exponent_of(__float_as_uint(largest)), kLargestExponent - exponent[half]);
    up[half] = power_of_two(more), exponent[half] += more;
  }
  acc.scale_rows(up[0], up[1]);
#pragma unroll
  for (int step = 0; step < kCols / 16; ++step)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* const pair = acc.x[2 * step + i / 2] + 2 * (i % 2);
      split(pair[0], pair[1], big[step][i], small[step][i]);
    }
}

// sum += part / 2^exponent of the row, from the column `col` on
template <int kCols, int kPart>
__device__ __forceinline__ void add(Accumulator<kCols>& sum, const Accumulator<kPart>& part, int col,
                                    const int (&exponent)[2]) {
  const float down[2] = {power_of_two(-exponent[0]), power_of_two(-exponent[1])};
#pragma unroll
  for (int j = 0; j < kPart / 8; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& x = sum.x[col / 8 + j][i];
      x = fmaf(part.x[j][i], down[i / 2], x);
    }
}

}  // namespace cupyflash
