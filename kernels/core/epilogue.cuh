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

}  // namespace cupyflash
