// The accumulator of one warp, of float32 but in kernels/precise: 16 rows, as mma.m16n8 and wgmma.m64nN leave it.
// x[j][i] is row lane / 4 + 8 * (i / 2), column 8 * j + 2 * (lane % 4) + i % 2.
// Two neighbouring 16 x 8 blocks, rounded to 16 bits, are the A operand of the next product.
#pragma once

#include "core/band.cuh"

namespace cupyflash {

template <int kCols_, class Real = float>
struct Accumulator {
  static constexpr int kCols = kCols_;
  Real x[kCols / 8][4];

  __device__ __forceinline__ static int row(int half) { return lane_index() / 4 + 8 * half; }
  __device__ __forceinline__ static int col() { return 2 * (lane_index() % 4); }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int j = 0; j < kCols / 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) x[j][i] = 0;
  }

  __device__ __forceinline__ void scale_rows(Real upper, Real lower) {
#pragma unroll
    for (int j = 0; j < kCols / 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) x[j][i] *= i < 2 ? upper : lower;
  }

  // Whether all of this lane's columns of a row are.
  __device__ __forceinline__ bool finite(int half) const {
    Real zero = 0;  // or NaN
#pragma unroll
    for (int j = 0; j < kCols / 8; ++j) zero = x[j][2 * half] * 0 + zero, zero = x[j][2 * half + 1] * 0 + zero;
    return zero == 0;
  }

  // Sets to `hidden` what `visible(row)`, a Range of columns, leaves out.
  template <class Visible>
  __device__ __forceinline__ void hide(int first_row, int first_col, Real hidden, Visible visible) {
    each_hidden(first_row, first_col, visible, [&](int j, int i) { x[j][i] = hidden; });
  }
  template <class Visible, class Hide>
  __device__ __forceinline__ static void each_hidden(int first_row, int first_col, Visible visible, Hide hide) {
    first_row = opaque(first_row);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Range range = visible(first_row + row(half));
      const int first = range.first - first_col - col(), last = range.last - first_col - col();
#pragma unroll
      for (int j = 0; j < kCols / 8; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          if (8 * j + i < first || 8 * j + i > last) hide(j, 2 * half + i);
    }
  }

  // Columns 16 * step ... 16 * step + 15 as an A operand.
  template <class T>
  __device__ __forceinline__ void operand(uint32 (&a)[4], int step) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = T::pack(x[2 * step + i / 2][2 * (i % 2)], x[2 * step + i / 2][2 * (i % 2) + 1]);
  }
  // And back.
  template <class T>
  __device__ __forceinline__ void widen(const uint32 (&a)[4], int step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = T::unpack(a[i]);
      x[2 * step + i / 2][2 * (i % 2)] = pair.x, x[2 * step + i / 2][2 * (i % 2) + 1] = pair.y;
    }
  }
};

// Of such operands, the columns 8 * j, 8 * j + 1 in both rows, and one element of them.
template <class T, int kSteps>
__device__ __forceinline__ void round(uint32 (&operand)[kSteps][4], int j, const float (&x)[4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) operand[j / 2][2 * (j % 2) + half] = T::pack(x[2 * half], x[2 * half + 1]);
}
template <int kSteps>
__device__ __forceinline__ void clear(uint32 (&operand)[kSteps][4], int j, int i) {
  operand[j / 2][2 * (j % 2) + i / 2] &= i % 2 ? 0xffffu : 0xffff0000u;
}

// A 16-bit A operand made of accumulators: the left factor that never was in shared memory.
template <class T, int kCols, int kRowTiles>
struct Rounded {
  const Accumulator<kCols> (&x)[kRowTiles];
  __device__ __forceinline__ void operator()(uint32 (&a)[4], int row_tile, int step) const {
    x[row_tile].template operand<T>(a, step);
  }
};
template <class T, int kCols, int kRowTiles>
__device__ __forceinline__ Rounded<T, kCols, kRowTiles> rounded(const Accumulator<kCols> (&x)[kRowTiles]) {
  return {x};
}

}  // namespace cupyflash
