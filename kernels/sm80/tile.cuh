// Tiles of 16-bit elements in shared memory, swizzled so that neither ldmatrix nor the copies meet a bank conflict,
// and their ways in (global memory, accumulators) and out (mma operands, global memory).
#pragma once

#include "core/fragment.cuh"
#include "sm80/ptx.cuh"

namespace cupyflash {

__device__ constexpr int common_factor(int a, int b) { return b == 0 ? a : common_factor(b, a % b); }

__device__ constexpr int min_of(int a, int b) { return a < b ? a : b; }
__device__ constexpr int power_of_two_in(int n) { return n < 2 ? n : 2 * power_of_two_in(n / 2); }

template <int kRows_, int kCols_>
struct Tile {
  static constexpr int kRows = kRows_, kCols = kCols_, kItem = 2;
  static constexpr int kUnits = kCols / 8;  // 16-byte units of a row
  static constexpr int kBytes = kRows * kCols * 2;
  // Eight rows at one unit must fall into eight bank groups of 16 bytes. Rows kSpan apart start in the same group,
  // so unit u of row r is kept at u ^ (r / kSpan % kPhases), within aligned groups of kPhases units.
  static constexpr int kPhases = common_factor(kUnits, 8), kSpan = 8 / kPhases;
  static_assert(kCols % 16 == 0, "a tile is a whole number of mma steps wide");

  uint32 base;

  __device__ __forceinline__ explicit Tile(uint32 address) : base(address) {}

  __device__ __forceinline__ static int phase(int row) { return row / kSpan % kPhases; }

  // Address of unit `unit` of row `row`.
  __device__ __forceinline__ uint32 at(int row, int unit) const {
    return base + row * (kUnits * 16) + (unit / kPhases * kPhases + ((unit % kPhases) ^ phase(row))) * 16;
  }
  // From the address of (r, u) to that of (r + row, u + unit): row is a multiple of 8, and unit and u share no bit.
  __device__ __forceinline__ static uint32 moved(uint32 address, int row, int unit) {
    return (address ^ (unit % kPhases * 16)) + (row * kUnits + unit / kPhases * kPhases) * 16;
  }

  // kCount rows from `row` on, a multiple of 8.
  template <int kCount>
  __device__ __forceinline__ Tile<kCount, kCols> rows(int row) const {
    return Tile<kCount, kCols>(base + row * (kUnits * 16));
  }

  // Rounds an accumulator into rows `row` ... row + 15, columns from `col` on.
  template <class T, int kAccCols>
  __device__ __forceinline__ void store(const Accumulator<kAccCols>& acc, int row, int col) const {
#pragma unroll
    for (int j = 0; j < kAccCols / 8; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        store_shared(at(row + acc.row(half), col / 8 + j) + 2 * acc.col(),
                     T::pack(acc.x[j][2 * half], acc.x[j][2 * half + 1]));
  }
  // The same of what is rounded: A operands.
  template <int kSteps>
  __device__ __forceinline__ void store(const uint32 (&operands)[kSteps][4], int row, int col) const {
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        store_shared(at(row + Accumulator<8>::row(i % 2), col / 8 + 2 * step + i / 2) + 2 * Accumulator<8>::col(),
                     operands[step][i]);
  }
};

// Starts to copy the rows from `first` on into the tile; what lies outside of the matrix becomes zero. A row is cut
// into runs of a power of two of units, so that a thread keeps its column and its bank group from row to row, and one
// address serves all runs of one size.
template <int kThreads, int kAccess, int kUnit = 0, class AnyTile>
__device__ __forceinline__ void load_tile(AnyTile tile, const Matrix& m, int first) {
  constexpr int kRows = tile.kRows, kRun = min_of(power_of_two_in(tile.kUnits - kUnit), 16),
                kPieces = kRun * 16 / kAccess;
  constexpr int kRuns = (tile.kUnits - kUnit) / kRun, kRowStep = kThreads / kPieces;
  const int thread = opaque(int(threadIdx.x)), row = thread / kPieces, byte = kUnit * 16 + thread % kPieces * kAccess;
  int limit[kRuns];
#pragma unroll
  for (int run = 0; run < kRuns; ++run)
    limit[run] = tile.kItem * m.cols > byte + run * kRun * 16 ? m.rows - first - row : 0;
  const int64 step = kRowStep * m.stride;
  const char* source = m.data + (first + row) * m.stride + byte;
  constexpr int kUnroll = kAccess == 16 ? 64 : 1;  // narrow copies are for odd shapes: small code, quick to compile
#pragma unroll kUnroll
  for (int i = 0; i < (kRows + kRowStep - 1) / kRowStep; ++i) {
    if (kRows % kRowStep != 0 && row + i * kRowStep >= kRows) break;
#pragma unroll
    for (int run = 0; run < kRuns; ++run) {
      const int unit = byte / 16 + run * kRun;
      const uint32 target =
          kRowStep % 8 == 0 ? tile.moved(tile.at(row, unit), i * kRowStep, 0) : tile.at(row + i * kRowStep, unit);
      copy_async<kAccess>(target + byte % 16, source + run * kRun * 16, i * kRowStep < limit[run]);
    }
    source = opaque(source + step);
  }
  if constexpr (kUnit + kRuns * kRun < tile.kUnits) load_tile<kThreads, kAccess, kUnit + kRuns * kRun>(tile, m, first);
}

// The part of that copy that is due at piece i of n of a product: so that neither waits for the other at the door of
// shared memory. The last part leaves half way, and commits all.
template <int kThreads, int kAccess, int kRows, int kCols>
__device__ __forceinline__ void load_part(Tile<kRows, kCols> tile, const Matrix& m, int first, int i, int n) {
  constexpr int kPart = kAccess == 16 ? 16 : kRows, kParts = kRows / kPart;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    if (i != part * n / (2 * kParts)) continue;
    load_tile<kThreads, kAccess>(tile.template rows<kPart>(part * kPart), m, first + part * kPart);
    if (part == kParts - 1) commit_copies();
  }
}

// Copies the tile to the rows from `first` on, as far as they exist, in units of 16 bytes.
template <int kThreads, int kUnit = 0, int kRows, int kCols>
__device__ __forceinline__ void store_tile(Tile<kRows, kCols> tile, const Matrix& m, int first) {
  constexpr int kRun = min_of(power_of_two_in(tile.kUnits - kUnit), 16), kRowStep = kThreads / kRun;
  const int row = threadIdx.x / kRun, unit = kUnit + threadIdx.x % kRun;
  const int limit = m.cols > 8 * unit ? min(m.rows - first, kRows) - row : 0;
#pragma unroll
  for (int i = 0; i < (kRows + kRowStep - 1) / kRowStep; ++i) {
    if (i * kRowStep >= limit) break;
    *reinterpret_cast<uint4*>(m.data + (first + row + i * kRowStep) * m.stride + unit * 16) =
        load_shared_16(tile.at(row + i * kRowStep, unit));
  }
  if constexpr (kUnit + kRun < tile.kUnits) store_tile<kThreads, kUnit + kRun>(tile, m, first);
}

// Operands of mma.m16n8k16, read from a tile step by step. Each keeps the address of its lane at step 0; opaque, so
// that the steps' addresses, one XOR away, are not kept in registers as well.
template <class Tile>
struct Left {  // rows from `row` on
  uint32 lane;
  __device__ __forceinline__ explicit Left(Tile tile, int row)
      : lane(opaque(tile.at(row + lane_index() % 16, lane_index() / 16))) {}
  __device__ __forceinline__ void operator()(uint32 (&a)[4], int row_tile, int step) const {
    load_matrix(a, Tile::moved(lane, 16 * row_tile, 2 * step));
  }
};
template <class Tile>
struct LeftTransposed {  // columns from `col` on become the rows
  uint32 lane;
  int col;
  __device__ __forceinline__ explicit LeftTransposed(Tile tile, int col)
      : lane(opaque(tile.at(lane_index() % 8 + lane_index() / 16 * 8, lane_index() / 8 % 2))), col(col) {}
  __device__ __forceinline__ void operator()(uint32 (&a)[4], int row_tile, int step) const {
    load_matrix_transposed(a, Tile::moved(lane, 16 * step, col / 8 + 2 * row_tile));
  }
};
template <class Tile>
struct Right {  // columns from `col` on, as two operands of eight columns
  uint32 lane;
  int col;
  __device__ __forceinline__ explicit Right(Tile tile, int col = 0)
      : lane(opaque(tile.at(lane_index() % 16, lane_index() / 16))), col(col) {}
  __device__ __forceinline__ void operator()(uint32 (&b)[4], int step, int j) const {
    load_matrix_transposed(b, Tile::moved(lane, 16 * step, col / 8 + 2 * j));
  }
};
template <class Tile>
struct RightTransposed {  // rows from `row` on become the columns
  uint32 lane;
  __device__ __forceinline__ explicit RightTransposed(Tile tile, int row = 0)
      : lane(opaque(tile.at(row + lane_index() % 8 + lane_index() / 16 * 8, lane_index() / 8 % 2))) {}
  __device__ __forceinline__ void operator()(uint32 (&b)[4], int step, int j) const {
    load_matrix(b, Tile::moved(lane, 16 * j, 2 * step));
  }
};

// acc += left right over kSteps of 16. left(a, t, step): 16 rows; right(b, step, j): 16 columns; meanwhile(i, n): what
// else to do while piece i of n is multiplied.
template <class T, int kSteps, int kRowTiles, int kCols, class Left, class Right, class Meanwhile = Nothing>
__device__ __forceinline__ void product(Accumulator<kCols> (&acc)[kRowTiles], Left left, Right right,
                                        Meanwhile meanwhile = {}) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    uint32 a[kRowTiles][4];
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) left(a[t], t, step);
#pragma unroll
    for (int j = 0; j < kCols / 16; ++j) {
      uint32 b[4];
      right(b, step, j);
      meanwhile(step * (kCols / 16) + j, kSteps * (kCols / 16));
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t) {
        multiply<T>(acc[t].x[2 * j], a[t], b[0], b[1]);
        multiply<T>(acc[t].x[2 * j + 1], a[t], b[2], b[3]);
      }
    }
  }
}

}  // namespace cupyflash
