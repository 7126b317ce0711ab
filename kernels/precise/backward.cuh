// Gradients of float32 and float64, as in sm80/backward.cuh but by two kernels, so that every sum is made in registers
// and in one order: that of dk and dv computes P^T and dS^T of its keys, that of dq P and dS of its queries. Before
// them a small one computes delta = rowsum(dout out) - dlse.
#pragma once

#include "core/spec.cuh"
#include "core/work.cuh"
#include "precise/params.cuh"
#include "precise/softmax.cuh"
#include "precise/tile.cuh"

namespace cupyflash {

// A warp computes one row of one head.
template <class T, PreciseDeltaSpec kSpec>
__global__ void __launch_bounds__(32 * kSpec.warps) precise_delta(const __grid_constant__ PreciseBackwardParams p) {
  using Real = typename Arithmetic<T, 1>::Real;
  static_assert(sizeof(Real) == kSpec.item);
  const Sizes& s = p.sizes;
  const int64 index = int64(blockIdx.x) * kSpec.warps + warp_index();
  const int head = index % s.heads_q, row = index / s.heads_q % s.seqlen_q, batch = index / s.heads_q / s.seqlen_q;
  if (batch >= s.batch) return;
  const Matrix dout = head_of(p.dout, batch, head, s.seqlen_q, s.head_dim_v, sizeof(Real));
  const Matrix out = head_of(p.out, batch, head, s.seqlen_q, s.head_dim_v, sizeof(Real));
  const Real* const a = reinterpret_cast<const Real*>(dout.data + row * dout.stride);
  const Real* const b = reinterpret_cast<const Real*>(out.data + row * out.stride);
  Real delta = 0;
  for (int col = lane_index(); col < s.head_dim_v; col += 32) delta = fma(a[col], b[col], delta);
#pragma unroll
  for (int step = 16; step > 0; step /= 2) delta += __shfl_xor_sync(kFullWarp, delta, step);
  if (lane_index() > 0) return;
  if (p.dlse.data != nullptr) delta -= rows_of<Real>(p.dlse, batch, head)[row * p.dlse.row];
  // A row without keys has no gradient, whatever dout and dlse hold: P is 0 there, and 0 * inf would not be.
  if (rows_of<Real>(p.lse, batch, head)[row * p.lse.row] == -kInfinity) delta = 0;
  rows_of<Real>(p.delta, batch, head)[row * p.delta.row] = delta;
}

template <class T, PreciseKeysSpec kSpec>
__global__ void __launch_bounds__(32 * kSpec.warps(), kSpec.blocks_per_sm)
    precise_keys(const __grid_constant__ PreciseBackwardParams p) {
  using A = Arithmetic<T, kSpec.products, kSpec.steps>;
  using Real = typename A::Real;
  static_assert(sizeof(Real) == kSpec.item);
  if (p.only_if != nullptr && *p.only_if == 0) return;
  constexpr int kThreads = 32 * kSpec.warps(), kAccess = kSpec.access;
  constexpr int kCols = kSpec.head_dim / kSpec.parts, kColsV = kSpec.head_dim_v / kSpec.parts;
  using KTile = WideTile<Real, kSpec.block_k, kSpec.head_dim>;
  using VTile = WideTile<Real, kSpec.block_k, kSpec.head_dim_v>;
  using QTile = WideTile<Real, kSpec.block_q, kSpec.head_dim>;
  using DoutTile = WideTile<Real, kSpec.block_q, kSpec.head_dim_v>;
  extern __shared__ __align__(1024) char shared[];
  const KTile k_tile = {shared_address(shared)};
  const VTile v_tile = {k_tile.base + KTile::kBytes};
  constexpr int kStageBytes = QTile::kBytes + DoutTile::kBytes;
  const auto q_tile = [&](int stage) { return QTile{v_tile.base + VTile::kBytes + stage * kStageBytes}; };
  const auto dout_tile = [&](int stage) { return DoutTile{q_tile(stage).base + QTile::kBytes}; };
  // block_q of lse, then as many of delta.
  const auto statistics = [&](int stage) {
    return reinterpret_cast<Real*>(shared + KTile::kBytes + VTile::kBytes + kSpec.stages * kStageBytes) +
           stage * 2 * kSpec.block_q;
  };

  const Sizes& s = p.sizes;
  const int k_tiles = (s.seqlen_k + kSpec.block_k - 1) / kSpec.block_k;
  const Work work = find_work(blockIdx.x, k_tiles, s.batch, s.heads_q / s.group, s.section, false);
  const Matrix k = head_of(p.k, work.batch, work.head, s.seqlen_k, s.head_dim, sizeof(Real));
  const Matrix v = head_of(p.v, work.batch, work.head, s.seqlen_k, s.head_dim_v, sizeof(Real));
  const Band band(s);
  const int first_key = work.tile * kSpec.block_k;
  const int warp_row = warp_index() / kSpec.parts * 16, part = warp_index() % kSpec.parts;
  const Range keys = {first_key, min(first_key + kSpec.block_k, s.seqlen_k) - 1};
  const Range seen_by_all = queries_of_all(band, keys);
  const Range tiles = query_tiles_of(band, keys, kSpec.block_q);
  const Real scale = p.exact_scale;
  const typename A::Exponential exponential{};

  RowSums<A, kCols> dk[1];
  RowSums<A, kColsV> dv[1];
  dk[0].clear(), dv[0].clear();

  const auto load_queries = [&](int stage, int head, int tile) {
    const Matrix q = head_of(p.q, work.batch, head, s.seqlen_q, s.head_dim, sizeof(Real));
    const Matrix dout = head_of(p.dout, work.batch, head, s.seqlen_q, s.head_dim_v, sizeof(Real));
    load_tile<kThreads, kAccess>(q_tile(stage), q, tile * kSpec.block_q);
    load_tile<kThreads, kAccess>(dout_tile(stage), dout, tile * kSpec.block_q);
    commit_copies();
    if (threadIdx.x < kSpec.block_q) {
      const auto row = Statistic<Real>::of(p, work.batch, head, tile * kSpec.block_q + threadIdx.x);
      statistics(stage)[threadIdx.x] = row.lse, statistics(stage)[kSpec.block_q + threadIdx.x] = row.delta;
    }
  };
  int head = work.head * s.group, tile = tiles.first;
  int remaining = max(0, tiles.last - tiles.first + 1) * s.group;
  if (remaining > 0) {
    load_tile<kThreads, kAccess>(k_tile, k, first_key);
    load_tile<kThreads, kAccess>(v_tile, v, first_key);
    load_queries(0, head, tile);
  }
  int stage = 0;
#pragma unroll 1
  for (; remaining > 0; --remaining) {
    const int next_tile = tile == tiles.last ? tiles.first : tile + 1, next_head = head + (tile == tiles.last);
    const int next_stage = kSpec.stages == 2 ? stage ^ 1 : 0, first_query = tile * kSpec.block_q;
    wait_copies<0>();
    __syncthreads();  // this tile has landed, and every warp is done with the previous one
    if (kSpec.stages == 2 && remaining > 1) load_queries(next_stage, next_head, next_tile);

    Accumulator<kSpec.block_q, Real> prob[1], ds[1];
    prob[0].clear();
    multiply_rows<A, true>(prob, k_tile, warp_row, q_tile(stage), 0);
    const Real* const lse = statistics(stage) + prob[0].col();
    const bool masked = first_key + kSpec.block_k > s.seqlen_k || first_query < seen_by_all.first ||
                        first_query + kSpec.block_q - 1 > seen_by_all.last;
#pragma unroll
    for (int j = 0; j < kSpec.block_q / 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) prob[0].x[j][i] = A::scaled(prob[0].x[j][i], scale) - lse[8 * j + i % 2];
    if (masked) prob[0].hide(first_key + warp_row, first_query, -kInfinity, [&](int key) { return band.queries(key); });
#pragma unroll
    for (int j = 0; j < kSpec.block_q / 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) prob[0].x[j][i] = exponential(prob[0].x[j][i]);
    multiply_weights<A>(dv, prob, dout_tile(stage), part * kColsV);

    ds[0].clear();
    multiply_rows<A, true>(ds, v_tile, warp_row, dout_tile(stage), 0);
#pragma unroll
    for (int j = 0; j < kSpec.block_q / 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        ds[0].x[j][i] = prob[0].x[j][i] * (ds[0].x[j][i] - lse[kSpec.block_q + 8 * j + i % 2]);
    multiply_weights<A>(dk, ds, q_tile(stage), part * kCols);

    if (kSpec.stages == 1) {
      __syncthreads();  // every warp is done with the tile
      if (remaining > 1) load_queries(0, next_head, next_tile);
    }
    stage = next_stage, tile = next_tile, head = next_head;
  }

  dk[0].scale_rows(scale, scale);
  const Matrix dk_target = head_of(p.dk, work.batch, work.head, s.seqlen_k, s.head_dim, sizeof(Real));
  const Matrix dv_target = head_of(p.dv, work.batch, work.head, s.seqlen_k, s.head_dim_v, sizeof(Real));
  store_sums<A, kAccess>(dk[0], dk_target, first_key + warp_row, part * kCols);
  store_sums<A, kAccess>(dv[0], dv_target, first_key + warp_row, part * kColsV);
}

template <class T, PreciseQueriesSpec kSpec>
__global__ void __launch_bounds__(32 * kSpec.warps(), kSpec.blocks_per_sm)
    precise_queries(const __grid_constant__ PreciseBackwardParams p) {
  using A = Arithmetic<T, kSpec.products, kSpec.steps>;
  using Real = typename A::Real;
  static_assert(sizeof(Real) == kSpec.item);
  if (p.only_if != nullptr && *p.only_if == 0) return;
  constexpr int kThreads = 32 * kSpec.warps(), kAccess = kSpec.access, kCols = kSpec.head_dim / kSpec.parts;
  using QTile = WideTile<Real, kSpec.block_q, kSpec.head_dim>;
  using DoutTile = WideTile<Real, kSpec.block_q, kSpec.head_dim_v>;
  using KTile = WideTile<Real, kSpec.block_k, kSpec.head_dim>;
  using VTile = WideTile<Real, kSpec.block_k, kSpec.head_dim_v>;
  extern __shared__ __align__(1024) char shared[];
  const QTile q_tile = {shared_address(shared)};
  const DoutTile dout_tile = {q_tile.base + QTile::kBytes};
  constexpr int kStageBytes = KTile::kBytes + VTile::kBytes;
  const auto k_tile = [&](int stage) { return KTile{dout_tile.base + DoutTile::kBytes + stage * kStageBytes}; };
  const auto v_tile = [&](int stage) { return VTile{k_tile(stage).base + KTile::kBytes}; };

  const Sizes& s = p.sizes;
  const int q_tiles = (s.seqlen_q + kSpec.block_q - 1) / kSpec.block_q;
  const Work work = find_work(blockIdx.x, q_tiles, s.batch, s.heads_q, s.section * s.group, true);
  const Matrix q = head_of(p.q, work.batch, work.head, s.seqlen_q, s.head_dim, sizeof(Real));
  const Matrix dout = head_of(p.dout, work.batch, work.head, s.seqlen_q, s.head_dim_v, sizeof(Real));
  const Matrix k = head_of(p.k, work.batch, work.head / s.group, s.seqlen_k, s.head_dim, sizeof(Real));
  const Matrix v = head_of(p.v, work.batch, work.head / s.group, s.seqlen_k, s.head_dim_v, sizeof(Real));
  const Band band(s);
  const int first_row = work.tile * kSpec.block_q;
  const int warp_row = warp_index() / kSpec.parts * 16, part = warp_index() % kSpec.parts;
  const Range seen_by_all = keys_of_all(band, {first_row, min(first_row + kSpec.block_q, s.seqlen_q) - 1});
  const Range tiles = tiles_of(band, first_row, kSpec.block_q, kSpec.block_k);
  const Real scale = p.exact_scale;
  const typename A::Exponential exponential{};

  RowSums<A, kCols> dq[1];
  dq[0].clear();
  Statistic<Real> of_row[2];
#pragma unroll
  for (int half = 0; half < 2; ++half)
    of_row[half] = Statistic<Real>::of(p, work.batch, work.head, first_row + warp_row + dq[0].row(half));

  const auto load_keys = [&](int stage, int tile) {
    load_tile<kThreads, kAccess>(k_tile(stage), k, tile * kSpec.block_k);
    load_tile<kThreads, kAccess>(v_tile(stage), v, tile * kSpec.block_k);
    commit_copies();
  };
  if (tiles.last >= tiles.first) {
    load_tile<kThreads, kAccess>(q_tile, q, first_row);
    load_tile<kThreads, kAccess>(dout_tile, dout, first_row);
    load_keys(0, tiles.last);
  }
  int stage = 0;
#pragma unroll 1
  for (int tile = tiles.last; tile >= tiles.first; --tile) {
    const int first_key = tile * kSpec.block_k, next_stage = kSpec.stages == 2 ? stage ^ 1 : 0;
    wait_copies<0>();
    __syncthreads();  // this tile has landed, and every warp is done with the previous one
    if (kSpec.stages == 2 && tile > tiles.first) load_keys(next_stage, tile - 1);

    Accumulator<kSpec.block_k, Real> prob[1], ds[1];
    prob[0].clear();
    multiply_rows<A>(prob, q_tile, warp_row, k_tile(stage), 0);
#pragma unroll
    for (int j = 0; j < kSpec.block_k / 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) prob[0].x[j][i] = A::scaled(prob[0].x[j][i], scale) - of_row[i / 2].lse;
    if (first_key < seen_by_all.first || first_key + kSpec.block_k - 1 > seen_by_all.last)
      prob[0].hide(first_row + warp_row, first_key, -kInfinity, [&](int row) { return band.keys(row); });

    ds[0].clear();
    multiply_rows<A>(ds, dout_tile, warp_row, v_tile(stage), 0);
#pragma unroll
    for (int j = 0; j < kSpec.block_k / 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) ds[0].x[j][i] = exponential(prob[0].x[j][i]) * (ds[0].x[j][i] - of_row[i / 2].delta);
    multiply_weights<A>(dq, ds, k_tile(stage), part * kCols);

    if (kSpec.stages == 1) {
      __syncthreads();  // every warp is done with the tile
      if (tile > tiles.first) load_keys(0, tile - 1);
    }
    stage = next_stage;
  }
  dq[0].scale_rows(scale, scale);
  const Matrix target = head_of(p.dq, work.batch, work.head, s.seqlen_q, s.head_dim, sizeof(Real));
  store_sums<A, kAccess>(dq[0], target, first_row + warp_row, part * kCols);
}

}  // namespace cupyflash
