// Tiles of 16-bit elements in shared memory as the copy engine leaves them and wgmma reads them.
#pragma once

#include "sm90/ptx.cuh"

namespace cupyflash {

// A tile in shared memory: panels of 64 columns, one after the other; a row of a panel has 128 bytes, the span of the
// swizzle.
constexpr int kRowBytes = 128;

__device__ constexpr int panels(int cols) { return (cols + 63) / 64; }
__device__ constexpr int tile_bytes(int rows, int cols) { return panels(cols) * rows * kRowBytes; }

template <int kRows, int kCols>
__device__ __forceinline__ void copy_tile(uint32 target, const TensorMap& map, uint32 full, int row, int head,
                                          int batch) {
#pragma unroll
  for (int i = 0; i < panels(kCols); ++i) copy_box(target + i * kRows * kRowBytes, map, full, 64 * i, row, head, batch);
}

// 16 columns from 16 * step on of rows of a tile of kRows, as an operand whose rows they are.
template <int kRows>
__device__ __forceinline__ uint64 row_operand(uint32 rows, int step) {
  return descriptor(rows + step / 4 * kRows * kRowBytes + step % 4 * 32, 16);  // the hardware ignores `leading` here
}
// 16 rows from 16 * step on of all columns of a tile of kRows, as an operand whose rows are the columns.
template <int kRows>
__device__ __forceinline__ uint64 column_operand(uint32 tile, int step) {
  return descriptor(tile + step * 16 * kRowBytes, kRows * kRowBytes);
}

}  // namespace cupyflash
