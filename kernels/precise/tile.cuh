// Tiles of float32 and float64 in shared memory, their ways in, and the two kinds of product that read them. A product
// may take columns, and give its own, in any order. Here lane l of a quad (l = lane % 4) has 16 bytes in a row, a unit:
//
//   along the rows of both factors      the columns that lane l multiplies are those of its unit, not l and l + 4
//   weights times rows                  the weights of lane l are where the product before left them, the columns 2 l
//                                       and 2 l + 1, so that it reads these rows; and of a row 8 lanes read 8 units,
//                                       each one column of several products: those of lane l are neighbours in the end
#pragma once

#include "precise/arithmetic.cuh"
#include "sm80/tile.cuh"

namespace cupyflash {

template <class Real_, int kRows_, int kCols_>
struct WideTile {
  using Real = Real_;
  static constexpr int kRows = kRows_, kCols = kCols_, kItem = sizeof(Real);
  static constexpr int kUnits = kCols * kItem / 16;  // of a row
  static constexpr int kBytes = kRows * kUnits * 16;
  static_assert(kUnits % 8 == 0, "a row is a whole number of rounds through the banks");

  uint32 base;

  // Unit u of row r is kept at u ^ phase(r). Of the eight lanes that are served together, two rows with four units, or
  // four rows of one parity with two units, none meets another.
  __device__ __forceinline__ static int phase(int row) { return (row ^ row / 2) % 2 * 4 + row / 4 % 2 * 2; }
  __device__ __forceinline__ uint32 at(int row, int unit) const {
    return base + (row * kUnits + (unit ^ phase(row))) * 16;
  }
  // From the address of (r, u) to that of (r + row, u + unit): row is a multiple of 8, and unit and u share no bit.
  __device__ __forceinline__ static uint32 moved(uint32 address, int row, int unit) {
    return (address ^ unit % 8 * 16) + (row * kUnits + unit / 8 * 8) * 16;
  }
};

// acc += left right^T: the rows of both from `left_row` and `right_row` on. kTransposed: as A::multiply says.
template <class A, bool kTransposed = false, int kRowTiles, int kCols, class Left, class Right>
__device__ __forceinline__ void multiply_rows(Accumulator<kCols, typename A::Real> (&acc)[kRowTiles], Left left,
                                              int left_row, Right right, int right_row) {
  static_assert(Left::kCols == Right::kCols);
  constexpr bool kAhead = A::kAhead && !kTransposed;  // dk and dv leave no registers for it
  const uint32 left_lane = opaque(left.at(left_row + lane_index() / 4, lane_index() % 4));
  const uint32 right_lane = opaque(right.at(right_row + lane_index() / 4, lane_index() % 4));
  typename A::Factor a[kAhead + 1][kRowTiles][A::kSteps][4], b[kAhead + 1][kCols / 8][A::kSteps][2];
  constexpr int kTogether = 2 * A::kSteps / A::kUnit;  // units of a lane
  const auto load_left = [&](int group) {
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int u = 0; u < kTogether; ++u) {
          typename A::Real unit[A::kUnit];
          load_unit(unit, Left::moved(left_lane, 16 * t + 8 * half, 4 * (kTogether * group + u)));
#pragma unroll
          for (int e = 0; e < A::kUnit; ++e)
            a[group % (kAhead + 1)][t][(A::kUnit * u + e) / 2][half + e % 2 * 2] = A::factor(unit[e]);
        }
  };
  const auto load_right = [&](int group, int j) {
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      typename A::Real unit[A::kUnit];
      load_unit(unit, Right::moved(right_lane, 8 * j, 4 * (kTogether * group + u)));
#pragma unroll
      for (int e = 0; e < A::kUnit; ++e) b[group % (kAhead + 1)][j][(A::kUnit * u + e) / 2][e % 2] = A::factor(unit[e]);
    }
  };
  const auto load_ahead = [&](int group) {
    load_left(group);
#pragma unroll
    for (int j = 0; j < kCols / 8; ++j) load_right(group, j);
  };
  constexpr int kGroups = Left::kUnits / (4 * kTogether);
  if constexpr (kAhead) load_ahead(0);
#pragma unroll(kAhead ? kGroups : 2)
  for (int group = 0; group < kGroups; ++group) {
    if constexpr (!kAhead) load_left(group);
    if (kAhead && group + 1 < kGroups) load_ahead(group + 1);
#pragma unroll
    for (int j = 0; j < kCols / 8; ++j) {
      if (j % 2 == 0) __syncwarp();  // as below
      if constexpr (!kAhead) load_right(group, j);
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t)
        A::template multiply<kTransposed>(acc[t].x[j], a[group % (kAhead + 1)][t], b[group % (kAhead + 1)][j]);
    }
  }
}

// Sums of rows of a tile: of the columns from `col` on, in the order that `multiply_weights` leaves.
template <class A, int kCols>
struct RowSums : Accumulator<kCols, typename A::Real> {
  // The first of kUnit neighbouring columns, x[kUnit * unit ... kUnit * unit + kUnit - 1][i].
  __device__ __forceinline__ static int column(int unit, int i) {
    return A::kUnit * (8 * unit + 2 * (lane_index() % 4) + i % 2);
  }
};

// acc += weights * the rows of the tile, all of them, columns from `col` on.
template <class A, int kRowTiles, int kDepth, int kCols, class Tile>
__device__ __forceinline__ void multiply_weights(RowSums<A, kCols> (&acc)[kRowTiles],
                                                 const Accumulator<kDepth, typename A::Real> (&weights)[kRowTiles],
                                                 Tile tile, int col) {
  static_assert(kDepth == Tile::kRows && kDepth % (8 * A::kSteps) == 0 && kCols % (8 * A::kUnit) == 0);
  uint32 lane[2];
#pragma unroll
  for (int odd = 0; odd < 2; ++odd)
    lane[odd] = opaque(tile.at(2 * (lane_index() % 4) + odd, lane_index() / 4) + col / (8 * A::kUnit) * 128);
#pragma unroll
  for (int first = 0; first < kDepth; first += 8 * A::kSteps) {
    typename A::Factor a[kRowTiles][A::kSteps][4];
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
      for (int step = 0; step < A::kSteps; ++step)
#pragma unroll
        for (int i = 0; i < 4; ++i) a[t][step][i] = A::factor(weights[t].x[first / 8 + step][i % 2 * 2 + i / 2]);
#pragma unroll
    for (int unit = 0; unit < kCols / (8 * A::kUnit); ++unit) {
      __syncwarp();  // or the loads of all units go ahead, into registers that are not there
      typename A::Factor b[A::kUnit][A::kSteps][2];
#pragma unroll
      for (int step = 0; step < A::kSteps; ++step)
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          typename A::Real x[A::kUnit];
          load_unit(x, Tile::moved(lane[odd], first + 8 * step, 8 * unit));
#pragma unroll
          for (int e = 0; e < A::kUnit; ++e) b[e][step][odd] = A::factor(x[e]);
        }
#pragma unroll
      for (int e = 0; e < A::kUnit; ++e)
#pragma unroll
        for (int t = 0; t < kRowTiles; ++t) A::multiply(acc[t].x[A::kUnit * unit + e], a[t], b[e]);
    }
  }
}

// Writes acc to (row, col) of a matrix; rows and columns beyond its edge are left out.
template <class A, int kAccess, int kCols>
__device__ __forceinline__ void store_sums(const RowSums<A, kCols>& acc, const Matrix& m, int row, int col) {
  using Real = typename A::Real;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = opaque(row + acc.row(half));
    if (r >= m.rows) continue;
    Real* const target = reinterpret_cast<Real*>(m.data + r * m.stride);
#pragma unroll
    for (int unit = 0; unit < kCols / (8 * A::kUnit); ++unit)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int c = col + acc.column(unit, i);
        struct alignas(16) {
          Real x[A::kUnit];
        } values;
#pragma unroll
        for (int e = 0; e < A::kUnit; ++e) values.x[e] = acc.x[A::kUnit * unit + e][2 * half + i];
        if constexpr (kAccess == 16) {
          if (c < m.cols) *reinterpret_cast<decltype(values)*>(target + c) = values;
        } else {
#pragma unroll
          for (int e = 0; e < A::kUnit; ++e)
            if (c + e < m.cols) target[c + e] = values.x[e];
        }
      }
  }
}

}  // namespace cupyflash
