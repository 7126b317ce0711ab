// out = softmax(scale q k^T) v and its log-sum-exp of float32 and float64: as in sm80/forward.cuh, block_q queries of
// one head go through the keys they see from the last tile to the first.
#pragma once

#include "core/spec.cuh"
#include "core/work.cuh"
#include "precise/params.cuh"
#include "precise/softmax.cuh"
#include "precise/tile.cuh"

namespace cupyflash {

template <class T, PreciseForwardSpec kSpec>
__global__ void __launch_bounds__(32 * kSpec.warps(), kSpec.blocks_per_sm)
    precise_forward(const __grid_constant__ PreciseForwardParams p) {
  using A = Arithmetic<T, kSpec.products, kSpec.steps>;
  using Real = typename A::Real;
  static_assert(sizeof(Real) == kSpec.item);
  if (p.only_if != nullptr && *p.only_if == 0) return;
  constexpr int kThreads = 32 * kSpec.warps(), kAccess = kSpec.access, kRowTiles = kSpec.row_tiles;
  constexpr int kOutCols = kSpec.head_dim_v / kSpec.parts;
  using QTile = WideTile<Real, kSpec.block_q, kSpec.head_dim>;
  using KTile = WideTile<Real, kSpec.block_k, kSpec.head_dim>;
  using VTile = WideTile<Real, kSpec.block_k, kSpec.head_dim_v>;
  extern __shared__ __align__(1024) char shared[];
  const QTile q_tile = {shared_address(shared)};
  const KTile k_tile = {q_tile.base + QTile::kBytes};
  const VTile v_tile = {k_tile.base + KTile::kBytes};

  const Sizes& s = p.sizes;
  const int q_tiles = (s.seqlen_q + kSpec.block_q - 1) / kSpec.block_q;
  const Work work = find_work(blockIdx.x, q_tiles, s.batch, s.heads_q, s.section, true);
  const Matrix q = head_of(p.q, work.batch, work.head, s.seqlen_q, s.head_dim, sizeof(Real));
  const Matrix k = head_of(p.k, work.batch, work.head / s.group, s.seqlen_k, s.head_dim, sizeof(Real));
  const Matrix v = head_of(p.v, work.batch, work.head / s.group, s.seqlen_k, s.head_dim_v, sizeof(Real));

  const Band band(s);
  const int first_row = work.tile * kSpec.block_q;
  const int warp_row = warp_index() / kSpec.parts * (16 * kRowTiles), part = warp_index() % kSpec.parts;
  const Range rows = {first_row, min(first_row + kSpec.block_q, s.seqlen_q) - 1};
  const Range seen_by_all = keys_of_all(band, rows);
  const Range tiles = tiles_of(band, first_row, kSpec.block_q, kSpec.block_k);
  const Real scale = p.exact_scale;

  RowSums<A, kOutCols> out[kRowTiles];
#pragma unroll
  for (int t = 0; t < kRowTiles; ++t) out[t].clear();
  PreciseSoftmax<A, kRowTiles> softmax;

  if (tiles.last >= tiles.first) {
    load_tile<kThreads, kAccess>(q_tile, q, first_row);
    load_tile<kThreads, kAccess>(k_tile, k, tiles.last * kSpec.block_k);
    commit_copies();
  }
#pragma unroll 1
  for (int tile = tiles.last; tile >= tiles.first; --tile) {
    const int first_key = tile * kSpec.block_k;
    wait_copies<0>();
    __syncthreads();  // k has landed, and every warp is done with the previous v
    load_tile<kThreads, kAccess>(v_tile, v, first_key);
    commit_copies();

    Accumulator<kSpec.block_k, Real> scores[kRowTiles];
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) scores[t].clear();
    multiply_rows<A>(scores, q_tile, warp_row, k_tile, 0);
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) {
#pragma unroll
      for (int j = 0; j < kSpec.block_k / 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[t].x[j][i] = A::scaled(scores[t].x[j][i], scale);
      if (first_key < seen_by_all.first || first_key + kSpec.block_k - 1 > seen_by_all.last)
        scores[t].hide(first_row + warp_row + 16 * t, first_key, -kInfinity, [&](int row) { return band.keys(row); });
    }

    wait_copies<0>();
    __syncthreads();  // v has landed, and every warp is done with k
    if (tile > tiles.first) load_tile<kThreads, kAccess>(k_tile, k, first_key - kSpec.block_k);
    commit_copies();
    softmax.weigh(scores, [&](const Real(&factor)[kRowTiles][2]) {
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t) out[t].scale_rows(factor[t][0], factor[t][1]);
    });
    multiply_weights<A>(out, scores, v_tile, part * kOutCols);
  }

  const Matrix target = head_of(p.out, work.batch, work.head, s.seqlen_q, s.head_dim_v, sizeof(Real));
#pragma unroll
  for (int t = 0; t < kRowTiles; ++t) {
    const int tile_row = first_row + warp_row + 16 * t;
    Real inverse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Real lse;
      softmax.finish(t, half, -kInfinity, inverse[half], lse);
      const int row = tile_row + out[t].row(half);
      if (p.lse.data != nullptr && part == 0 && lane_index() % 4 == 0 && row < s.seqlen_q)
        rows_of<Real>(p.lse, work.batch, work.head)[row * p.lse.row] = lse;
    }
    out[t].scale_rows(inverse[0], inverse[1]);
    store_sums<A, kAccess>(out[t], target, tile_row, part * kOutCols);
  }
}

}  // namespace cupyflash
