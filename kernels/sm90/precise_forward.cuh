// out = softmax(scale q k^T) v and its log-sum-exp of float32 on Hopper: each product is three of float16 halves,
// small big + big small + big big, the small ones first. Tensor cores cut off what does not fit into a sum: none goes
// on from one tile to the next, out is added up outside of them. One warpgroup copies; the others own 64 queries each
// and take turns, one product at a time, so that the softmax of one runs beside the products of the others.
#pragma once

#include "core/epilogue.cuh"
#include "core/spec.cuh"
#include "core/work.cuh"
#include "precise/halves.cuh"
#include "precise/softmax.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/precise_params.cuh"
#include "sm90/tile.cuh"
#include "sm90/wgmma.cuh"

namespace cupyflash {

template <class T, HopperPreciseSpec kSpec>
__global__ void __launch_bounds__(kSpec.threads(), 1)
    hopper_precise_forward(const __grid_constant__ HopperPreciseForwardParams p) {
  if (p.halves.scales->wide) return;
  constexpr int kGroups = kSpec.groups, kSlots = kSpec.slots, kBlockQ = 64 * kGroups, kBlockK = kSpec.block_k;
  constexpr int kDim = kSpec.head_dim, kDimV = kSpec.head_dim_v;
  constexpr int kCols = padded(kDim), kColsV = padded(kDimV);  // of each half
  constexpr int kQBytes = tile_bytes(64, 2 * kCols);
  constexpr int kKBytes = tile_bytes(kBlockK, 2 * kCols), kVBytes = tile_bytes(kBlockK, 2 * kColsV);
  static_assert(registers_suffice(kSpec), "what the roles take is more than a block has");

  extern __shared__ __align__(1024) char shared[];
  __shared__ uint64 barriers[2 * (kGroups + 2 * kSlots)];
  const int warpgroup = same_in_warp(threadIdx.x / 128);
  const uint32 q_base = first_tile(shared), barrier_base = shared_address(barriers);
  const uint32 k_base = q_base + kGroups * kQBytes, v_base = k_base + kSlots * kKBytes;
  Ring<kGroups> q_ring(barrier_base);
  Ring<kSlots> k_ring(barrier_base + 16 * kGroups), v_ring(barrier_base + 16 * (kGroups + kSlots));
  const bool loads = threadIdx.x == 128 * kGroups;
  if (loads) {
    q_ring.init(4), k_ring.init(4 * kGroups), v_ring.init(4 * kGroups);
    fence_barrier_init();  // for the copy engine; for the other threads the barrier below
  }
  __syncthreads();

  const Sizes& s = p.sizes;
  const Band band(s);

  if (warpgroup == kGroups) {
    give_registers<kSpec.copying_registers()>();
    if (!loads) return;
    prefetch_map(p.q_map), prefetch_map(p.k_map), prefetch_map(p.v_map);
    for (Works<> works(p.order, s, p.segments, blockIdx.x, gridDim.x); works.left(); works.next()) {
      const Work& work = works.work;
      const Range tiles = tiles_of(band, work.tile * kBlockQ, kBlockQ, kBlockK);
      const int head_k = work.head / s.group;
#pragma unroll 1
      for (int tile = tiles.last; tile >= tiles.first; --tile) {
        const int row = tile * kBlockK;
        copy_tile<kBlockK, 2 * kCols>(k_base + k_ring.slot() * kKBytes, p.k_map, k_ring.acquire(kKBytes), row, head_k,
                                      work.batch);
        k_ring.advance();
        if (tile == tiles.last)
#pragma unroll 1
          for (int group = 0; group < kGroups; ++group, q_ring.advance())
            copy_tile<64, 2 * kCols>(q_base + group * kQBytes, p.q_map, q_ring.acquire(kQBytes),
                                     work.tile * kBlockQ + 64 * group, work.head, work.batch);
        copy_tile<kBlockK, 2 * kColsV>(v_base + v_ring.slot() * kVBytes, p.v_map, v_ring.acquire(kVBytes), row, head_k,
                                       work.batch);
        v_ring.advance();
      }
    }
    return;
  }

  take_registers<kSpec.registers()>();
  const int group = warpgroup, warp_row = warp_index() % 4 * 16;  // a row of the group's 64
  const Turns<kGroups> turns = {group, 1};
  turns.open();
  const Scales& scales = *p.halves.scales;
  const float scale = finite_scale(p.exact_scale, -exponent_of(scales.largest[kQ]) - exponent_of(scales.largest[kK]));
  const float unit_v = power_of_two(-exponent_of(scales.largest[kV]));

  using A = Arithmetic<float32, 3>;
  using Softmax = PreciseSoftmax<A, 1>;
  using Scores = Accumulator<kBlockK>;
  using Out = Accumulator<kDimV>;
  using Weights = uint32[kBlockK / 16][4];
  Out out;
  Softmax softmax;

  const auto issue_scores = [&](Scores& scores) {  // q k^T
    const RowOperand<64> q(same_in_warp(q_base + group * kQBytes));
    const RowOperand<kBlockK> k(k_base + k_ring.slot() * kKBytes);
    constexpr int kSmall = kCols / 16;
    const auto product = [&](int of_q, int of_k, int accumulate) {
#pragma unroll
      for (int step = 0; step < kDim / 16; ++step)
        Wgmma<float16, kBlockK>::dot_rows(scores.x, q[of_q + step], k[of_k + step], accumulate | step);
    };
    wgmma_fence();
    product(kSmall, 0, 0), product(0, kSmall, 1), product(0, 0, 1);
    wgmma_commit();
  };
  const auto issue_out = [&](Out& of_tile, const Weights& big, const Weights& small) {  // weights v
    const uint32 tile = v_base + v_ring.slot() * kVBytes;
    const ColumnOperand<kBlockK> v_big(tile), v_small(tile + kVBytes / 2);
    const auto product = [&](const Weights& weights, const ColumnOperand<kBlockK>& v, int accumulate) {
#pragma unroll
      for (int step = 0; step < kBlockK / 16; ++step)
        Wgmma<float16, kDimV>::times(of_tile.x, weights[step], v[step], accumulate | step);
    };
    wgmma_fence();
    product(small, v_big, 0), product(big, v_small, 1), product(big, v_big, 1);
    wgmma_commit();
  };
#pragma unroll 1
  for (Works<> works(p.order, s, p.segments, blockIdx.x, gridDim.x); works.left(); works.next()) {
    const Work& work = works.work;
    const int first_query = work.tile * kBlockQ + 64 * group;  // of the group
    const Range tiles = tiles_of(band, work.tile * kBlockQ, kBlockQ, kBlockK);
    softmax = Softmax();
    out.clear();
    if (tiles.last >= tiles.first) q_ring.wait(group);
#pragma unroll 1
    for (int tile = tiles.last; tile >= tiles.first; --tile) {
      const int first_key = tile * kBlockK, last_key = first_key + kBlockK - 1;
      const int row = opaque(first_query);  // what follows takes few instructions, and no registers for the whole loop
      const Range rows = {row, min(row + 64, s.seqlen_q) - 1};
      const Range seen = keys_of_any(band, rows), seen_by_all = keys_of_all(band, rows);
      if (rows.last < row || last_key < seen.first || first_key > seen.last) {  // of other groups; skipped in turn
        if (tile == tiles.first) q_ring.release(group);
        k_ring.wait(), turns.wait(), turns.pass_on(), k_ring.release(), k_ring.advance();
        v_ring.wait(), turns.wait(), turns.pass_on(), v_ring.release(), v_ring.advance();
        continue;
      }
      k_ring.wait();
      turns.wait();
      Scores scores[1];
      scores[0].clear();
      issue_scores(scores[0]);
      turns.pass_on();
      wgmma_wait<0>();
      if (tile == tiles.first) q_ring.release(group);
      k_ring.release(), k_ring.advance();
#pragma unroll
      for (int j = 0; j < kBlockK / 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[0].x[j][i] = A::scaled(scores[0].x[j][i], scale);
      if (first_key < seen_by_all.first || last_key > seen_by_all.last)
        scores[0].hide(first_query + warp_row, first_key, -kInfinity, [&](int row) { return band.keys(row); });
      softmax.weigh(scores, [&](const float (&factor)[1][2]) { out.scale_rows(factor[0][0], factor[0][1]); });
      // The sums of a neighbour, which are of the same rows, so that they are there: added up later they would keep all
      // weights.
#pragma unroll
      for (float& sum : softmax.sum[0]) sum = __shfl_xor_sync(kFullWarp, sum, 1);
      Weights big, small;
      int exponent[2] = {};
      split_by_row(scores[0], big, small, exponent);
      v_ring.wait();
      turns.wait();
      Out of_tile;
      of_tile.clear();
      issue_out(of_tile, big, small);
      turns.pass_on();
      wgmma_wait<0>();
      v_ring.release(), v_ring.advance();
      add(out, of_tile, 0, exponent);
    }
    if (tiles.last >= tiles.first) q_ring.advance(kGroups);

    float inverse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float lse;
      softmax.finish(0, half, -kInfinity, inverse[half], lse);
      const int row = first_query + warp_row + out.row(half);
      if (p.lse.data != nullptr && lane_index() % 4 == 0 && row < s.seqlen_q)
        p.lse.at(work.batch, work.head)[row * p.lse.row] = lse;
    }
    out.scale_rows(inverse[0], inverse[1]);
    out.scale_rows(unit_v, unit_v);  // by itself: the product of both may be no normal number
    store_direct<float, kSpec.access>(out, head_of(p.out, work.batch, work.head, s.seqlen_q, s.head_dim_v, 4),
                                      first_query + warp_row, 0);
  }
  turns.close();
}

}  // namespace cupyflash
