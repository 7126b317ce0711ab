// Gradients of float32 on Hopper from halves (precise/halves.cuh), as in precise/backward.cuh by two kernels, so that
// every sum is made in registers and in one order. Rows of a block stay in shared memory, 64 for each warpgroup that
// computes, and tiles of 64 others stream past; one more warpgroup copies. With the rows that stay,
//   keys      S^T = k q^T        P^T = exp(scale S^T - lse)       dv += P^T dout
//             dP^T = v dout^T    dS^T = P^T (dP^T - delta)        dk += dS^T q
//   queries   S = q k^T          P = exp(scale S - lse)
//             dP = dout v^T      dS = P (dP - delta)              dq += dS k
// Each product is three of halves, as in sm90/precise_forward.cuh, and a sum of its own, which is added outside. The
// warpgroups take turns, one product at a time: what each computes in between takes less time than the turns of others.
#pragma once

#include "core/epilogue.cuh"
#include "core/spec.cuh"
#include "core/work.cuh"
#include "sm90/precise_params.cuh"
#include "sm90/precise_tiles.cuh"

namespace cupyflash {

template <class T, HopperPreciseKeysSpec kSpec>
__global__ void __launch_bounds__(kSpec.threads(), 1)
    hopper_precise_keys(const __grid_constant__ HopperPreciseBackwardParams p) {
  if (p.halves.scales->wide) return;
  constexpr int kGroups = kSpec.groups, kBlockK = 64 * kGroups;
  using Queries = Side<kSpec.head_dim, kGroups, kSpec.slots>;
  using Douts = Side<kSpec.head_dim_v, kGroups, kSpec.slots_dout>;
  static_assert(registers_suffice(kSpec), "what the roles take is more than a block has");
  extern __shared__ __align__(1024) char shared[];
  __shared__ uint64 barriers[Queries::kBarriers + Douts::kBarriers];
  // Of the tiles of q in flight lse, and of those of dout delta.
  __shared__ __align__(8) float lses[kSpec.slots][kTile], deltas[kSpec.slots_dout][kTile];
  Queries queries(first_tile(shared), barriers);
  Douts douts(queries.base + Queries::kBytes, barriers + Queries::kBarriers);
  if (threadIdx.x == 0) {
    queries.init(2), douts.init(2);
    fence_barrier_init();  // for the copy engine; for the other threads the barrier below
  }
  __syncthreads();

  const Sizes& s = p.sizes;
  const Band band(s);
  const int k_tiles = (s.seqlen_k + kBlockK - 1) / kBlockK;
  const Work work = find_work(blockIdx.x, k_tiles, s.batch, s.heads_q / s.group, s.section, false);
  const int first_row = work.tile * kBlockK, warpgroup = same_in_warp(threadIdx.x / 128);
  // Of queries, in each head of the group.
  const Range tiles = query_tiles_of(band, {first_row, min(first_row + kBlockK, s.seqlen_k) - 1}, kTile);

  if (warpgroup == kGroups) {  // a thread copies for each side, and a warp adds the numbers that go with its tiles
    give_registers<kSpec.copying_registers()>();
    const int warp = warp_index() % 4;
    if (warp < 2 && lane_index() > 0 || tiles.last < tiles.first) return;
    if (warp == 0) queries.copy_rows(p.k_map, first_row, work.head, work.batch);
    if (warp == 1) douts.copy_rows(p.v_map, first_row, work.head, work.batch);
    for (int head = work.head * s.group; head < (work.head + 1) * s.group; ++head)
      for (int row = tiles.first * kTile; row <= tiles.last * kTile; row += kTile) {
        const auto statistic = [&](int i) { return Statistic<float>::of(p, work.batch, head, row + i); };
        if (warp == 0) queries.copy(p.q_map, row, head, work.batch);
        if (warp == 1) douts.copy(p.dout_map, row, head, work.batch);
        if (warp == 2) queries.add_numbers(lses, [&](int i) { return statistic(i).lse; });
        if (warp == 3) douts.add_numbers(deltas, [&](int i) { return statistic(i).delta; });
      }
    return;
  }

  take_registers<kSpec.registers()>();
  const int group = warpgroup, first_key = first_row + 64 * group, warp_row = warp_index() % 4 * 16;
  const Turns<kGroups> turns{group, 1};
  turns.open();
  const Scales& scales = *p.halves.scales;
  const float scale = finite_scale(p.exact_scale, -exponent_of(scales.largest[kQ]) - exponent_of(scales.largest[kK]));
  const float unit_dp = power_of_two(-exponent_of(scales.largest[kV]) - exponent_of(scales.largest[kDout]));
  const uint32 zero = s.group < 0;  // which the compiler does not know
  const Range seen_by_all = queries_of_all(band, {first_key, first_key + 63});
  Accumulator<padded(kSpec.head_dim)> dk;
  Accumulator<padded(kSpec.head_dim_v)> dv;
  uint32 big[kTile / 16][4], small[kTile / 16][4];  // P, then dS
  dk.clear(), dv.clear();
  int tile = tiles.first, remaining = max(0, tiles.last - tiles.first + 1) * s.group;
  if (remaining > 0) queries.rows.wait(), douts.rows.wait();
#pragma unroll 1
  for (; remaining > 0; --remaining) {
    Accumulator<kTile> prob, ds;
    queries.ring.wait();
    turns.wait();
    queries.template issue_scores<true>(prob, group);
    turns.pass_on();
    wgmma_wait<0>();
    const auto pair_of = [&](const float (&numbers)[kTile], int j) {  // of the queries of this lane
      return *reinterpret_cast<const float2*>(numbers + 8 * j + prob.col());
    };
    const auto lse = [&](int j, int i) {
      const float2 pair = pair_of(lses[queries.ring.slot()], j);
      return i % 2 ? pair.y : pair.x;
    };
    weigh(prob, scale, lse, [&] {
      const int first_query = tile * kTile;
      if (first_query < seen_by_all.first || first_query + kTile - 1 > seen_by_all.last)
        prob.hide(first_key + warp_row, first_query, -kInfinity, [&](int key) { return band.queries(key); });
    });
    int exponent[2] = {};
    split_by_row(prob, big, small, exponent);

    douts.ring.wait();
    constexpr int kPart = 64;  // columns of dk and dv that are summed at a time: registers
#pragma unroll
    for (int col = 0; col < dv.kCols; col += kPart) {
      Accumulator<kPart> part;
      wait_with(turns, small, zero);
      douts.issue_sum(part, big, small, col);
      turns.pass_on();
      wgmma_wait<0>();
      add(dv, part, col, exponent);
    }

    // Again: without a branch the compiler adds the last part behind the next product, whose registers it keeps then.
    douts.ring.wait();
    turns.wait();
    douts.template issue_scores<true>(ds, group);
    turns.pass_on();
    wgmma_wait<0>();
#pragma unroll
    for (int j = 0; j < kTile / 8; ++j) {
      const float2 delta = pair_of(deltas[douts.ring.slot()], j);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        // P from its halves, but not before the scores are there, as the compiler would have it: registers.
        const int step = j / 2, i = j % 2 * 2 + half;
        float &x = ds.x[j][2 * half], &y = ds.x[j][2 * half + 1];
        const float2 a = float16::unpack(big[step][i] ^ __float_as_uint(x) & zero), b = float16::unpack(small[step][i]);
        x = (a.x + b.x) * fmaf(x, unit_dp, -delta.x), y = (a.y + b.y) * fmaf(y, unit_dp, -delta.y);
      }
    }
    douts.release();
    split_by_row(ds, big, small, exponent);
#pragma unroll
    for (int col = 0; col < dk.kCols; col += kPart) {
      Accumulator<kPart> part;
      wait_with(turns, small, zero);
      queries.issue_sum(part, big, small, col);
      turns.pass_on();
      wgmma_wait<0>();
      add(dk, part, col, exponent);
    }
    queries.release();
    tile = tile == tiles.last ? tiles.first : tile + 1;
  }
  turns.close();

  const float unit_dout = power_of_two(-exponent_of(scales.largest[kDout]));
  dv.scale_rows(unit_dout, unit_dout);
  const float unit_q = power_of_two(-exponent_of(scales.largest[kQ])), exact_scale = p.exact_scale;
  dk.scale_rows(unit_q, unit_q), dk.scale_rows(exact_scale, exact_scale);
  store_direct<float, kSpec.access>(dk, head_of(p.dk, work.batch, work.head, s.seqlen_k, s.head_dim, 4),
                                    first_key + warp_row, 0);
  store_direct<float, kSpec.access>(dv, head_of(p.dv, work.batch, work.head, s.seqlen_k, s.head_dim_v, 4),
                                    first_key + warp_row, 0);
}

template <class T, HopperPreciseQueriesSpec kSpec>
__global__ void __launch_bounds__(kSpec.threads(), 1)
    hopper_precise_queries(const __grid_constant__ HopperPreciseBackwardParams p) {
  if (p.halves.scales->wide) return;
  constexpr int kGroups = kSpec.groups, kBlockQ = 64 * kGroups;
  using Keys = Side<kSpec.head_dim, kGroups, kSpec.slots>;
  using Values = Side<kSpec.head_dim_v, kGroups, kSpec.slots_v>;
  static_assert(registers_suffice(kSpec), "what the roles take is more than a block has");
  extern __shared__ __align__(1024) char shared[];
  __shared__ uint64 barriers[Keys::kBarriers + Values::kBarriers];
  Keys keys(first_tile(shared), barriers);
  Values values(keys.base + Keys::kBytes, barriers + Keys::kBarriers);
  if (threadIdx.x == 0) {
    keys.init(1), values.init(1);
    fence_barrier_init();  // for the copy engine; for the other threads the barrier below
  }
  __syncthreads();

  const Sizes& s = p.sizes;
  const Band band(s);
  const int q_tiles = (s.seqlen_q + kBlockQ - 1) / kBlockQ;
  const Work work = find_work(blockIdx.x, q_tiles, s.batch, s.heads_q, s.section * s.group, true);
  const int first_row = work.tile * kBlockQ, warpgroup = same_in_warp(threadIdx.x / 128);
  const Range tiles = tiles_of(band, first_row, kBlockQ, kTile);

  if (warpgroup == kGroups) {  // a thread copies for each side
    give_registers<kSpec.copying_registers()>();
    const int warp = warp_index() % 4, head_k = work.head / s.group;
    if (warp > 1 || lane_index() > 0 || tiles.last < tiles.first) return;
    if (warp == 0) keys.copy_rows(p.q_map, first_row, work.head, work.batch);
    if (warp == 1) values.copy_rows(p.dout_map, first_row, work.head, work.batch);
    for (int row = tiles.first * kTile; row <= tiles.last * kTile; row += kTile) {
      if (warp == 0) keys.copy(p.k_map, row, head_k, work.batch);
      if (warp == 1) values.copy(p.v_map, row, head_k, work.batch);
    }
    return;
  }

  take_registers<kSpec.registers()>();
  const int group = warpgroup, first_query = first_row + 64 * group, warp_row = warp_index() % 4 * 16;
  const Turns<kGroups> turns{group, 1};
  turns.open();
  const Scales& scales = *p.halves.scales;
  const float scale = finite_scale(p.exact_scale, -exponent_of(scales.largest[kQ]) - exponent_of(scales.largest[kK]));
  const float unit_dp = power_of_two(-exponent_of(scales.largest[kV]) - exponent_of(scales.largest[kDout]));
  const uint32 zero = s.group < 0;  // which the compiler does not know
  const Range seen_by_all = keys_of_all(band, {first_query, min(first_query + 64, s.seqlen_q) - 1});
  Accumulator<padded(kSpec.head_dim)> dq;
  dq.clear();
  Statistic<float> of_row[2];
#pragma unroll
  for (int half = 0; half < 2; ++half)
    of_row[half] = Statistic<float>::of(p, work.batch, work.head, first_query + warp_row + dq.row(half));
  if (tiles.last >= tiles.first) keys.rows.wait(), values.rows.wait();
#pragma unroll 1
  for (int tile = tiles.first; tile <= tiles.last; ++tile) {
    Accumulator<kTile> prob, ds;
    keys.ring.wait(), values.ring.wait();
    turns.wait();
    keys.template issue_scores<false>(prob, group);
    values.template issue_scores<false>(ds, group);
    turns.pass_on();
    wgmma_wait<1>();  // the scores are there
    const auto lse = [&](int, int i) { return of_row[i / 2].lse; };
    weigh(prob, scale, lse, [&] {
      const int first_key = tile * kTile;
      if (first_key < seen_by_all.first || first_key + kTile - 1 > seen_by_all.last)
        prob.hide(first_query + warp_row, first_key, -kInfinity, [&](int row) { return band.keys(row); });
    });
    wgmma_wait<0>();
    values.release();
#pragma unroll
    for (int j = 0; j < kTile / 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) ds.x[j][i] = prob.x[j][i] * fmaf(ds.x[j][i], unit_dp, -of_row[i / 2].delta);
    uint32 big[kTile / 16][4], small[kTile / 16][4];
    int exponent[2] = {};
    split_by_row(ds, big, small, exponent);
    Accumulator<dq.kCols> part;
    wait_with(turns, small, zero);
    keys.issue_sum(part, big, small, 0);
    turns.pass_on();
    wgmma_wait<0>();
    keys.release();
    add(dq, part, 0, exponent);
  }
  turns.close();

  const float unit_k = power_of_two(-exponent_of(scales.largest[kK])), exact_scale = p.exact_scale;
  dq.scale_rows(unit_k, unit_k), dq.scale_rows(exact_scale, exact_scale);
  store_direct<float, kSpec.access>(dq, head_of(p.dq, work.batch, work.head, s.seqlen_q, s.head_dim, 4),
                                    first_query + warp_row, 0);
}

}  // namespace cupyflash
