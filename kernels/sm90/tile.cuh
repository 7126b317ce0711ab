// Tiles of 16-bit elements in shared memory as the copy engine leaves them and wgmma reads them.
#pragma once

#include "core/fragment.cuh"
#include "sm90/ptx.cuh"

namespace cupyflash {

// A tile in shared memory: panels of 64 columns, one after the other; a row of a panel has 128 bytes, the span of the
// swizzle.
constexpr int kRowBytes = 128;
constexpr int kTileAlignment = 1024;  // eight rows, the period of the swizzle

// The first address of `shared` where a tile may begin.
__device__ __forceinline__ uint32 first_tile(const char* shared) {
  return (shared_address(shared) + kTileAlignment - 1) & ~uint32(kTileAlignment - 1);
}

__device__ constexpr int panels(int cols) { return (cols + 63) / 64; }
__device__ constexpr int tile_bytes(int rows, int cols) { return panels(cols) * rows * kRowBytes; }

// A box of one of packed sequences.
__device__ __forceinline__ void copy_box(uint32 target, const TensorMap& map, uint32 full, int col, int row, int head,
                                         PackedRows rows) {
  copy_box(target, map, full, col, row, head, rows.first, rows.count);
}
__device__ __forceinline__ void store_box(const TensorMap& map, uint32 source, int col, int row, int head,
                                          PackedRows rows) {
  store_box(map, source, col, row, head, rows.first, rows.count);
}

// `Batch`: its number, or PackedRows. In a cluster each block copies its part of the rows to all.
template <int kRows, int kCols, int kCluster = 1, class Batch>
__device__ __forceinline__ void copy_tile(uint32 target, const TensorMap& map, uint32 full, int row, int head,
                                          Batch batch, int rank = 0) {
  constexpr int kPart = kRows / kCluster;
#pragma unroll
  for (int i = 0; i < panels(kCols); ++i) {
    const uint32 part = target + (i * kRows + rank * kPart) * kRowBytes;
    if constexpr (kCluster == 1)
      copy_box(part, map, full, 64 * i, row, head, batch);
    else
      copy_box_to_all(part, map, full, 64 * i, row + rank * kPart, head, batch, (1 << kCluster) - 1);
  }
}
template <int kRows, int kCols, class Batch>
__device__ __forceinline__ void store_tile(const TensorMap& map, uint32 source, int row, int head, Batch batch) {
#pragma unroll
  for (int i = 0; i < panels(kCols); ++i) store_box(map, source + i * kRows * kRowBytes, 64 * i, row, head, batch);
}

// Sixteen rows of a warp, rounded, to rows of a tile of kRows; unit u (16 bytes) of row r is at u ^ (r % 8).
template <class T, int kRows, int kCols>
__device__ __forceinline__ void write_rows(const Accumulator<kCols>& acc, uint32 rows) {
  const int lane = lane_index(), row = lane % 16;
#pragma unroll
  for (int step = 0; step < kCols / 16; ++step) {
    uint32 x[4];
    acc.template operand<T>(x, step);
    const int unit = 2 * step % 8 + lane / 16;
    store_matrix(rows + step / 4 * kRows * kRowBytes + row * kRowBytes + (unit ^ row % 8) * 16, x);
  }
}

// Rows of a tile of kRows as an operand whose rows they are; [step]: 16 columns, from 16 * step on.
template <int kRows>
struct RowOperand {
  uint64 first;
  __device__ __forceinline__ explicit RowOperand(uint32 rows) : first(descriptor(rows, 16)) {}  // leading is ignored
  __device__ __forceinline__ uint64 operator[](int step) const {
    return first + ((step / 4 * kRows * kRowBytes + step % 4 * 32) >> 4);
  }
};
// All columns of a tile of kRows as an operand whose rows are the columns; [step]: 16 rows, from 16 * step on.
template <int kRows>
struct ColumnOperand {
  uint64 first;
  __device__ __forceinline__ explicit ColumnOperand(uint32 tile) : first(descriptor(tile, kRows * kRowBytes)) {}
  __device__ __forceinline__ uint64 operator[](int step) const { return first + (step * 16 * kRowBytes >> 4); }
};

// This lane's row of the 16 x 16 block at `row` and column 16 * step of a tile of kRows, for `store_matrix`.
template <int kRows>
__device__ __forceinline__ uint32 block_row(uint32 tile, int row, int step) {
  const int r = row + lane_index() % 16;
  const uint32 start = tile + r * kRowBytes + (lane_index() / 16 ^ r % 8) * 16;
  return (start ^ step % 4 * 32) + step / 4 * kRows * kRowBytes;
}

}  // namespace cupyflash
