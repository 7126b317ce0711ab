// dq on Hopper for wide heads: a pass of its own, after delta is known, that sums in registers. A block owns 128
// queries, whose q and dout stay in shared memory, and goes through the keys that they see. One warpgroup copies; each
// of the others computes, for 64 queries,
//   S = q k^T    P = exp(scale S - lse)    dP = dout v^T    dS = P (dP - delta)    dq += dS k
// dS is the gradient of a bias that has an element for each score.
#pragma once

#include "any/bias_tiles.cuh"
#include "any/dropout.cuh"
#include "any/mods.cuh"
#include "core/blocks.cuh"
#include "core/epilogue.cuh"
#include "core/score.cuh"
#include "core/segments.cuh"
#include "core/spec.cuh"
#include "sm90/backward_params.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/tile.cuh"
#include "sm90/wgmma.cuh"

namespace cupyflash {

template <class T, HopperQueriesSpec kSpec, class Mods = NoMods>
__global__ void __launch_bounds__(kSpec.threads(), 1)
    hopper_queries(const __grid_constant__ Modified<HopperBackwardParams, Mods> p) {
  constexpr int kGroups = 2, kBlockQ = 64 * kGroups, kBlockK = 64, kDim = kSpec.head_dim, kDimV = kSpec.head_dim_v;
  constexpr int kKBytes = tile_bytes(kBlockK, kDim), kVBytes = tile_bytes(kBlockK, kDimV);
  constexpr int kQBytes = tile_bytes(64, kDim), kDoutBytes = tile_bytes(64, kDimV);  // of a group
  constexpr int kSlots = kSpec.slots, kSlotsV = kSpec.slots_v;
  using GroupLogits = Logits<kSpec.bias, kSpec.mask, 64, kBlockK, kSpec.logit_slots>;

  static_assert(registers_suffice(kSpec), "what the roles take is more than a block has");
  extern __shared__ __align__(1024) char shared[];
  static_assert(!kSpec.blocks || kSpec.bias == kNoBias, "its tiles come for all keys");
  __shared__ uint64 barriers[2 * (1 + 1 + kSlots + kSlotsV) + kGroups * GroupLogits::kBarriers];
  const uint32 q_base = first_tile(shared), dout_base = q_base + kGroups * kQBytes;
  const uint32 k_base = dout_base + kGroups * kDoutBytes, v_base = k_base + kSlots * kKBytes;
  Ring<1> q_ring(shared_address(barriers)), dout_ring(shared_address(barriers + 2));
  Ring<kSlots> k_ring(shared_address(barriers + 4));
  Ring<kSlotsV> v_ring(shared_address(barriers + 4 + 2 * kSlots));
  const auto logits_of = [&](int group, uint32 count = 0) {
    return GroupLogits(v_base + kSlotsV * kVBytes + group * GroupLogits::kBytes,
                       shared_address(barriers + 4 + 2 * (kSlots + kSlotsV) + group * GroupLogits::kBarriers), count);
  };
  const int warpgroup = same_in_warp(threadIdx.x / 128);
  const bool copies = warpgroup == kGroups;
  if (threadIdx.x == 0) {
    q_ring.init(4 * kGroups), dout_ring.init(4 * kGroups), k_ring.init(4 * kGroups), v_ring.init(4 * kGroups);
    if constexpr (GroupLogits::kAny)
      for (int i = 0; i < kGroups; ++i) logits_of(i).ring.init(4);
    fence_barrier_init();  // for the copy engine; for the other threads the barrier below
  }
  __syncthreads();

  Sizes s = p.sizes;
  if constexpr (!kSpec.varlen) s.section *= s.group;  // counts query heads here
  const Band band(s);
  using Where = Place<kSpec.varlen>;
  using Change = ScoreChange<kSpec.softcap, kSpec.alibi, false, Mods>;
  static_assert(!Change::kModded || !GroupLogits::kAny, "no registers are left for both");
  const Change change = {p.score, s};
  const auto shown_to = [&](const Work& work) {
    return ShownTiles<kSpec.blocks, kBlockK>::of(p.blocks, work.batch, work.head, work.tile * kBlockQ);
  };
  Works<kSpec.varlen> works(p.queries, s, p.segments, blockIdx.x, gridDim.x);
  const auto find_place = [&] { return place_of<kSpec.varlen>(s, p.segments, works.work.batch); };

  if (copies) {
    give_registers<kSpec.copying_registers()>();
    if constexpr (GroupLogits::kAny)
      if (threadIdx.x % 128 == 32) {
        uint32 count = 0;
        for (; works.left(); works.next()) {
          const Work& work = works.work;
          const Range tiles = tiles_of(band, work.tile * kBlockQ, kBlockQ, kBlockK);
          const auto shown = shown_to(work);
#pragma unroll 1
          for (int tile = shown.up(tiles.first, tiles.last); tile <= tiles.last;
               tile = shown.up(tile + 1, tiles.last)) {
            if (!shown.in_part(tile)) continue;
#pragma unroll
            for (int i = 0; i < kGroups; ++i)
              logits_of(i, count).copy(p.bias_map, p.mask_map,
                                       {work.batch, work.head, work.tile * kBlockQ + 64 * i, tile * kBlockK});
            ++count;
          }
        }
      }
    if (threadIdx.x % 128 > 0) return;
    prefetch_map(p.q_map), prefetch_map(p.k_map), prefetch_map(p.v_map), prefetch_map(p.dout_map);
    for (; works.left(); works.next()) {
      const Work& work = works.work;
      const Where place = find_place();
      const int first_query = work.tile * kBlockQ, head_k = work.head / s.group;
      const Range tiles = tiles_of(band_in(band, place), first_query, kBlockQ, kBlockK);
      const auto shown = shown_to(work);
      const int first_tile = shown.up(tiles.first, tiles.last);
      if (tiles.last < first_tile) continue;
      const uint32 q_full = q_ring.acquire(kGroups * kQBytes);
#pragma unroll
      for (int i = 0; i < kGroups; ++i)
        copy_tile<64, kDim>(q_base + i * kQBytes, p.q_map, q_full, first_query + 64 * i, work.head, place.rows_q());
      q_ring.advance();
#pragma unroll 1
      for (int tile = first_tile; tile <= tiles.last; tile = shown.up(tile + 1, tiles.last)) {
        copy_tile<kBlockK, kDim>(k_base + k_ring.slot() * kKBytes, p.k_map, k_ring.acquire(kKBytes), tile * kBlockK,
                                 head_k, place.rows_k());
        k_ring.advance();
        if (tile == first_tile) {
          const uint32 dout_full = dout_ring.acquire(kGroups * kDoutBytes);
#pragma unroll
          for (int i = 0; i < kGroups; ++i)
            copy_tile<64, kDimV>(dout_base + i * kDoutBytes, p.dout_map, dout_full, first_query + 64 * i, work.head,
                                 place.rows_q());
          dout_ring.advance();
        }
        copy_tile<kBlockK, kDimV>(v_base + v_ring.slot() * kVBytes, p.v_map, v_ring.acquire(kVBytes), tile * kBlockK,
                                  head_k, place.rows_k());
        v_ring.advance();
      }
    }
    return;
  }

  take_registers<kSpec.registers()>();
  const int warp_row = warp_index() % 4 * 16;  // a row of the group's 64
  const RowOperand<64> q(q_base + warpgroup * kQBytes);
  const RowOperand<64> dout(dout_base + warpgroup * kDoutBytes);

  Accumulator<kDim> dq;
  Accumulator<kBlockK> prob, ds;    // S, then P; dP, then dS
  uint32 weights[kBlockK / 16][4];  // dS in 16 bits, as left operand
  int first_query;                  // of the group
  float lse[2], delta[2], slope;
  GroupLogits logits = logits_of(warpgroup);

  const auto issue_scores = [&](int ahead) {  // q k^T
    const RowOperand<kBlockK> k(k_base + k_ring.slot(ahead) * kKBytes);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) Wgmma<T, kBlockK>::dot_rows(prob.x, q[step], k[step], step > 0);
    wgmma_commit();
  };
  const auto issue_products = [&] {  // dout v^T
    const RowOperand<kBlockK> v(v_base + v_ring.slot() * kVBytes);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kDimV / 16; ++step) Wgmma<T, kBlockK>::dot_rows(ds.x, dout[step], v[step], step > 0);
    wgmma_commit();
  };
  const auto issue_dq = [&] {  // dq += dS k
    const ColumnOperand<kBlockK> k(k_base + k_ring.slot() * kKBytes);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kBlockK / 16; ++step) Wgmma<T, kDim>::times(dq.x, weights[step], k[step]);
    wgmma_commit();
  };
  KeptFragment<Rows::kQueries, kBlockK> kept;
  const auto dropping = [&] { return Dropping{p.dropout, works.work.batch, works.work.head}; };
  const auto exponentiate = [&](const Where& place, int tile, bool in_part) {  // S -> P
    const int first_key = tile * kBlockK;
    const Band& its_band = band_in(band, place);
    const Range seen_by_all =
        keys_of_all(its_band, {first_query, min(first_query + 64, sizes_in(s, place).seqlen_q) - 1});
    const bool masked = first_key < seen_by_all.first || first_key + kBlockK - 1 > seen_by_all.last;
    const auto visible = [&](int row) { return its_band.keys(row); };
    if constexpr (Change::kAny || GroupLogits::kAny) {
      const auto row_of = [&](const LogitMap& array) { return [&](int r) { return (warp_row + r) * array.row; }; };
      const Slant slant = change.slant(
          first_key, [&](int half) { return first_query + warp_row + prob.row(half) + place.diagonal(p.score); },
          [&](int) { return slope; });
      Weights<kBlockK> none;
      const auto minus_lse = [&](int, int i) { return -lse[i / 2]; };
      if constexpr (Change::kModded) {
        auto places = mod::Places<Rows::kQueries, kBlockK>::from(s, works.work.batch, works.work.head,
                                                                 first_query + warp_row, first_key);
        places.whole = kSpec.blocks && !in_part;
        change.template weigh_mods<T, false>(
            prob, none, slant, p.mods, places, [](int, int) { return 0.f; }, minus_lse);
      } else if constexpr (kSpec.bias != kNoBias) {
        auto bias = logits.row_bias(row_of(p.bias_map));
        change.template weigh<T, false>(prob, none, slant,
                                        [&](int j, int i) { return logit_minus_lse(bias(j, i), lse[i / 2]); });
      } else {
        change.template weigh<T, false>(prob, none, slant, minus_lse);
      }
      if (masked) prob.hide(first_query + warp_row, first_key, 0.f, visible);
      if constexpr (kSpec.mask) {
        if (in_part) change.hide_masked(prob, none, logits.row_mask(row_of(p.mask_map)));
      }
      if (in_part) logits.release();
    } else {
      if (masked) prob.hide(first_query + warp_row, first_key, hidden_score(s), visible);
#pragma unroll
      for (int j = 0; j < kBlockK / 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) prob.x[j][i] = exp2f(fmaf(prob.x[j][i], s.scale_log2, -lse[i / 2]));
    }
    if constexpr (kSpec.dropout) kept.decide(dropping(), first_query + warp_row, first_key);
  };
  const auto weigh = [&] {  // dP -> dS
#pragma unroll
    for (int step = 0; step < kBlockK / 16; ++step) {
#pragma unroll
      for (int j = 2 * step; j < 2 * step + 2; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& x = ds.x[j][i];
          if constexpr (kSpec.dropout)
            x = prob.x[j][i] * fmaf(kept.blocks[step].of(x, j, i), p.dropout.scale, -delta[i / 2]);
          else
            x = prob.x[j][i] * (x - delta[i / 2]);
        }
      ds.template operand<T>(weights[step], step);
    }
  };
  const auto store_dbias = [&](int tile) {
    const Work& work = works.work;
    if constexpr (kSpec.dbias)
      store_scores<kSpec.bias>(ds, p.dbias, work.batch, work.head, first_query + warp_row, tile * kBlockK);
  };
  // The wait for the next k, or the release of q, stands between the exponentials and the wait for dP: the compiler
  // would move them behind it.
  const auto finish_tile = [&](const Where& place, int tile, bool last, bool in_part) {
    if (in_part) logits.wait();
    wgmma_wait<1>();  // the scores are there, dP goes on
    exponentiate(place, tile, in_part);
    if (last)
      q_ring.release();
    else
      k_ring.wait(1);
    wgmma_wait<0>();
    v_ring.release();
    v_ring.advance();
    weigh();
    store_dbias(tile);
  };

#pragma unroll 1
  for (; works.left(); works.next()) {
    const Work& work = works.work;
    const Where place = find_place();
    first_query = work.tile * kBlockQ + 64 * warpgroup;
    const Range tiles = tiles_of(band_in(band, place), work.tile * kBlockQ, kBlockQ, kBlockK);
    dq.clear();
    slope = change.slope(work.batch, work.head);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_query + warp_row + dq.row(half);
      lse[half] = kInfinity, delta[half] = 0.f;  // of a row that is not there or sees no key: P is 0
      if (row < sizes_in(s, place).seqlen_q) {
        lse[half] =
            lse_in_base_2 < kSpec.bias != kNoBias || Mods::kScore > (p.lse.at(place.q(), work.head)[row * p.lse.row]);
        delta[half] = p.delta.at(place.q(), work.head)[row * p.delta.row];
      }
    }
    const auto shown = shown_to(work);
    const int first_tile = shown.up(tiles.first, tiles.last);
    if (tiles.last >= first_tile) {
      q_ring.wait();
      k_ring.wait();
      issue_scores(0);
      dout_ring.wait();
      v_ring.wait();
      issue_products();
      finish_tile(place, first_tile, shown.is_last(first_tile, tiles.last), shown.in_part(first_tile));
#pragma unroll 1
      for (int tile = shown.up(first_tile + 1, tiles.last); tile <= tiles.last; tile = shown.up(tile + 1, tiles.last)) {
        issue_dq();  // of the tile before
        issue_scores(1);
        wgmma_wait<1>();  // dq is there: dP gets the registers of the weights
        k_ring.release();
        k_ring.advance();
        v_ring.wait();
        issue_products();
        finish_tile(place, tile, shown.is_last(tile, tiles.last), shown.in_part(tile));
      }
      dout_ring.release();
      issue_dq();
      wgmma_wait<0>();
      k_ring.release();
      k_ring.advance();
      q_ring.advance(), dout_ring.advance();
    }
    if constexpr (kSpec.dbias) {  // what no query of the tile sees
      ds.clear();
#pragma unroll 1
      for (int tile = 0; tile * kBlockK < s.seqlen_k; ++tile)
        if (tile < tiles.first || tile > tiles.last) store_dbias(tile);
    }
    dq.scale_rows(s.scale, s.scale);
    const Matrix target = head_of(p.dq, place.q(), work.head, sizes_in(s, place).seqlen_q, s.head_dim);
    store<T, kSpec.access>(dq, target, first_query + warp_row);
  }
}

}  // namespace cupyflash
