// Accumulators to global memory without shared memory: any alignment, float32 or 16 bits.
#pragma once

#include "core/fragment.cuh"

namespace cupyflash {

// Writes acc to (row, col) of a matrix of `Out`; rows and columns beyond its edge are left out.
template <class Out, int kAccess, int kCols>
__device__ __forceinline__ void store_direct(const Accumulator<kCols>& acc, const Matrix& m, int row, int col) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = opaque(row + acc.row(half));
    if (r >= m.rows) continue;
    Out* target = reinterpret_cast<Out*>(m.data + r * m.stride);
#pragma unroll
    for (int j = 0; j < kCols / 8; ++j) {
      if constexpr (sizeof(Out) == 2 && kAccess >= 4) {  // an even number of columns
        const int c = col + 8 * j + acc.col();
        if (c < m.cols) *reinterpret_cast<uint32*>(target + c) = Out::pack(acc.x[j][2 * half], acc.x[j][2 * half + 1]);
      } else if constexpr (sizeof(Out) == 4 && kAccess >= 8) {
        const int c = col + 8 * j + acc.col();
        if (c < m.cols) *reinterpret_cast<float2*>(target + c) = {acc.x[j][2 * half], acc.x[j][2 * half + 1]};
      } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int c = col + 8 * j + acc.col() + i;
          if (c >= m.cols) continue;
          if constexpr (sizeof(Out) == 4)
            target[c] = acc.x[j][2 * half + i];
          else
            target[c].bits = Out::pack(acc.x[j][2 * half + i], 0.f);
        }
      }
    }
  }
}

// The 4 x 4 words that the four lanes of a row hold (x[j] of lane l is word l of piece j), transposed: lane l then has
// the four words of piece l.
__device__ __forceinline__ void transpose_quad(uint32 (&x)[4]) {
  const int lane = lane_index() % 4;
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (j & bit) continue;
      const bool upper = lane & bit;  // gives its word j, and gets the partner's word j + bit
      const uint32 other = __shfl_xor_sync(kFullWarp, upper ? x[j] : x[j + bit], bit);
      (upper ? x[j] : x[j + bit]) = other;
    }
}

// The same in 16 bits and in units of 16 bytes: four lanes write 64 bytes of a row.
template <class T, int kCols>
__device__ __forceinline__ void store_wide(const Accumulator<kCols>& acc, const Matrix& m, int row, int col) {
  static_assert(kCols % 32 == 0, "a unit for each of four lanes");
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = row + acc.row(half);
#pragma unroll
    for (int j = 0; j < kCols / 8; j += 4) {
      uint32 x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = T::pack(acc.x[j + i][2 * half], acc.x[j + i][2 * half + 1]);
      transpose_quad(x);
      const int c = col + 8 * (j + lane_index() % 4);
      if (r < m.rows && c < m.cols) *reinterpret_cast<uint4*>(m.data + r * m.stride + 2 * c) = {x[0], x[1], x[2], x[3]};
    }
  }
}

// By whichever of the two the alignment allows.
template <class T, int kAccess, int kCols>
__device__ __forceinline__ void store(const Accumulator<kCols>& acc, const Matrix& m, int row, int col = 0) {
  if constexpr (kAccess == 16)
    store_wide<T>(acc, m, row, col);
  else
    store_direct<T, kAccess>(acc, m, row, col);
}

}  // namespace cupyflash
