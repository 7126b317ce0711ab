// What both kernels of sm90/precise_backward.cuh are made of: tiles of halves with their products, and P.
#pragma once

#include "precise/arithmetic.cuh"
#include "precise/halves.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/tile.cuh"
#include "sm90/wgmma.cuh"

namespace cupyflash {

constexpr int kTile = 64;  // rows of a tile

// Rows that stay, a tile for each group, and the tiles that meet them: of q and k, or of v and dout, in halves of
// padded(kDim) columns.
template <int kDim, int kGroups, int kSlots>
struct Side {
  static constexpr int kCols = padded(kDim), kTileBytes = tile_bytes(kTile, 2 * kCols);
  static constexpr int kBytes = (kGroups + kSlots) * kTileBytes, kBarriers = 2 + 2 * kSlots;

  uint32 base;
  Ring<1> rows;
  Ring<kSlots> ring;

  __device__ __forceinline__ Side(uint32 base, uint64* barriers)
      : base(base), rows(shared_address(barriers)), ring(shared_address(barriers + 2)) {}
  // `arrivals` fill a tile, one of them that of its bytes.
  __device__ __forceinline__ void init(int arrivals) const { rows.init(4 * kGroups), ring.init(4 * kGroups, arrivals); }
  __device__ __forceinline__ uint32 tile() const { return base + (kGroups + ring.slot()) * kTileBytes; }

  // The thread that copies.
  __device__ __forceinline__ void copy_rows(const TensorMap& map, int row, int head, int batch) const {
    const uint32 full = rows.acquire(kGroups * kTileBytes);
#pragma unroll
    for (int i = 0; i < kGroups; ++i)
      copy_tile<kTile, 2 * kCols>(base + i * kTileBytes, map, full, row + i * kTile, head, batch);
  }
  __device__ __forceinline__ void copy(const TensorMap& map, int row, int head, int batch) {
    copy_tile<kTile, 2 * kCols>(tile(), map, ring.acquire(kTileBytes), row, head, batch);
    ring.advance();
  }
  // The warp that adds a number of each row.
  template <class Get>
  __device__ __forceinline__ void add_numbers(float (&numbers)[kSlots][kTile], Get get) {
    const int lane = lane_index();
    const float x[2] = {get(lane), get(lane + 32)};
    barrier_wait(ring.empty(ring.slot()), ring.parity() ^ 1);
    numbers[ring.slot()][lane] = x[0], numbers[ring.slot()][lane + 32] = x[1];
    ring.fill();
    ring.advance();
  }

  // A warpgroup that computes: scores = its rows * tile^T. The first product is that of the small halves of q or dout,
  // wherever these are: all passes make the same scores.
  template <bool kKeysStay>
  __device__ __forceinline__ void issue_scores(Accumulator<kTile>& scores, int group) const {
    const RowOperand<kTile> left(base + group * kTileBytes), right(tile());
    constexpr int kSmall = kCols / 16;
    const auto product = [&](int of_left, int of_right, int accumulate) {
#pragma unroll
      for (int step = 0; step < kDim / 16; ++step)
        Wgmma<float16, kTile>::dot_rows(scores.x, left[of_left + step], right[of_right + step], accumulate | step);
    };
    constexpr int kFirst = kKeysStay ? 0 : kSmall;
    wgmma_fence();
    product(kFirst, kSmall - kFirst, 0), product(kSmall - kFirst, kFirst, 1), product(0, 0, 1);
    wgmma_commit();
  }
  // sum = weights * tile, of the columns from `col` on
  template <int kSumCols>
  __device__ __forceinline__ void issue_sum(Accumulator<kSumCols>& sum, const uint32 (&big)[kTile / 16][4],
                                            const uint32 (&small)[kTile / 16][4], int col) const {
    const uint32 panel = tile() + tile_bytes(kTile, col);
    const ColumnOperand<kTile> tile_big(panel), tile_small(panel + kTileBytes / 2);
    const auto product = [&](const uint32(&weights)[kTile / 16][4], const ColumnOperand<kTile>& rows, int accumulate) {
#pragma unroll
      for (int step = 0; step < kTile / 16; ++step)
        Wgmma<float16, kSumCols>::times(sum.x, weights[step], rows[step], accumulate | step);
    };
    wgmma_fence();
    product(small, tile_big, 0), product(big, tile_small, 1), product(big, tile_big, 1);
    wgmma_commit();
  }
  __device__ __forceinline__ void release() {
    ring.release();
    ring.advance();
  }
};

// scores -> P, rounded as in the forward; `hide` hides what the mask leaves out.
template <class Lse, class Hide>
__device__ __forceinline__ void weigh(Accumulator<kTile>& scores, float scale, Lse lse, Hide hide) {
  using A = Arithmetic<float32, 3>;
#pragma unroll
  for (int j = 0; j < kTile / 8; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) scores.x[j][i] = A::scaled(scores.x[j][i], scale) - lse(j, i);
  hide();
#pragma unroll
  for (int j = 0; j < kTile / 8; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) scores.x[j][i] = A::Exponential{}(scores.x[j][i]);
}

// Waits for the turn when the weights are there: the compiler would make them in the turn, while others wait. `zero` is
// 0, which it does not know.
template <int kGroups>
__device__ __forceinline__ void wait_with(const Turns<kGroups>& turns, const uint32 (&small)[kTile / 16][4],
                                          uint32 zero) {
  uint32 any = 0;
#pragma unroll
  for (int step = 0; step < kTile / 16; ++step)
#pragma unroll
    for (int i = 0; i < 4; ++i) any |= small[step][i];
  Turns<kGroups>{turns.group + int(any & zero), turns.first}.wait();
}

}  // namespace cupyflash
