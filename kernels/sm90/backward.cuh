// Gradients on Hopper: the products of sm80/backward.cuh with their roles split. A block takes tiles of keys, one after
// the other, and for each goes through the queries that see it. One warp copies; each computing warpgroup owns 64 keys:
//   S^T = k q^T         P^T = exp(scale S^T - lse)        dv += P^T dout
//   dP^T = v dout^T     dS^T = P^T (dP^T - delta)         dk += dS^T q      dq = dS k
// P^T and dS^T stay in registers, the left operands of dv and dk; dS^T goes to shared memory too, for dq, which needs
// that of all warpgroups. dq is made one tile later, when all have long left theirs there, and is added up in memory in
// float32; the kernels of any/around_backward.cuh clear that sum and convert it. With dropout, P^T in dv and dP^T lack
// what is dropped and are scaled; warps that copy nothing decide that.
#pragma once

#include "any/dropout.cuh"
#include "any/mods.cuh"
#include "core/epilogue.cuh"
#include "core/score.cuh"
#include "sm90/backward_tiles.cuh"
#include "sm90/wgmma.cuh"

namespace cupyflash {

template <class T, HopperBackwardSpec kSpec, class Mods = NoMods>
__global__ void __launch_bounds__(kSpec.threads(), 1)
    hopper_backward(const __grid_constant__ Modified<HopperBackwardParams, Mods> p) {
  using Tiles = BackwardTiles<kSpec>;
  constexpr int kGroups = kSpec.groups, kBlockQ = kSpec.block_q, kBlockK = kSpec.block_k();
  constexpr int kDim = kSpec.head_dim, kDimV = kSpec.head_dim_v;
  // What a group computes of dq: 64 queries, or 64 columns of all.
  constexpr bool kByQueries = kBlockQ == 64 * kGroups;
  constexpr int kDqCols = 64;
  constexpr uint32 kNone = ~0u;
  static_assert(registers_suffice(kSpec), "what the roles take is more than a block has");
  static_assert(kByQueries ? kDim == 64 : kBlockQ == 64 && kDim == 64 * kGroups, "dq is shared among the groups");

  extern __shared__ __align__(1024) char shared[];
  using TileLogits = typename Tiles::TileLogits;
  static_assert(!kSpec.blocks || !TileLogits::kAny, "their tiles come for all keys");
  __shared__ uint64 barriers[Tiles::kBarriers + TileLogits::kBarriers];
  __shared__ Job jobs[kSpec.stages];
  __shared__ Alibi alibis[kSpec.stages];
  __shared__ LogitPlace places[kSpec.stages];
  __shared__ KeyTile<kSpec.varlen> key_tiles[kSpec.key_slots];
  Tiles tiles(first_tile(shared), barriers, jobs, alibis, places, key_tiles);
  uint32* const kept_words = reinterpret_cast<uint32*>(shared + (tiles.kept - shared_address(shared)));
  using Change = ScoreChange<kSpec.softcap, kSpec.alibi, false, Mods>;
  static_assert(!Change::kModded || !TileLogits::kAny, "no registers are left for both");
  static_assert(!kSpec.dropout || !Change::kModded && !kSpec.blocks && !kSpec.mask && !TileLogits::kAny,
                "nor beside dropout");
  static_assert(!kSpec.mask || !Change::kModded && !TileLogits::kAny, "nor beside a mask");
  if constexpr (Change::kModded) {
    __shared__ int heads[kSpec.stages];
    tiles.heads = heads;
  }
  if (threadIdx.x == 0) {
    tiles.init();
    fence_barrier_init();  // for the copy engine; for the other threads the barrier below
  }
  __syncthreads();

  const Sizes& s = p.sizes;
  const int role = same_in_warp(threadIdx.x / 128);
  if (role == 0) {
    give_registers<kSpec.copying_registers()>();
    if constexpr (kSpec.dropout)
      if (warp_index() >= 4 - Tiles::kDecidingWarps) return decide_tiles<kSpec>(p, tiles, kept_words);
    if (warp_index() == 0) copy_tiles<kSpec, Mods>(p, tiles);
    if constexpr (kSpec.deterministic)
      if (threadIdx.x == 32) keep_order<kSpec>(p, tiles);
    if constexpr (TileLogits::kAny)
      if (threadIdx.x == 64) copy_logits<kSpec>(p, tiles);
    return;
  }

  take_registers<kSpec.registers()>();
  const Change change = {p.score, s};
  // Found anew where the compiler has no register for the role until then.
  constexpr bool kFindsRole = kSpec.mask && kSpec.blocks || Mods::kMask && kSpec.access < 16;
  const int group = (kFindsRole ? same_in_warp(opaque(threadIdx.x) / 128) : role) - 1;
  const auto warp_row = [] { return int(opaque(threadIdx.x) / 32 % 4 * 16); };
  const auto turns = [&] {  // with dropout, no register is left for the group
    return Turns<kGroups>{kSpec.dropout ? int(opaque(threadIdx.x) / 128) - 1 : group, 1};
  };
  turns().open();
  Accumulator<kDim> dk;
  Accumulator<kDimV> dv;
  Accumulator<kBlockQ> prob, ds;
  Accumulator<kDqCols> dq;
  uint32 prob_operand[kBlockQ / 16][4], ds_operand[kBlockQ / 16][4];
  dk.clear(), dv.clear();
  // Of the present tile, read a tile ahead: shared memory answers late, behind what is being added to dq.
  int flags = 0, flags_before = 0, blocks = 0;
  uint32 block = 0, part_before = kNone;  // of dq_sum, where this warp adds
  float4 lse[kBlockQ / 16];
  ShownBits<kBlockQ> shown;
  // The narrow stores, and softcap with a bias, have no registers left for lse; nor, where the compiler is NVRTC 13.5,
  // has a mask with 128 queries or softcap, nor a MaskMod beside a block mask. The narrow stores, and softcap with
  // ALiBi, have none for delta beside dropout; nor have 128 queries with softcap or dropout.
  constexpr bool kReadsAhead = kSpec.access == 16 && !(kSpec.softcap && TileLogits::kAny) &&
                               !(kSpec.mask && (kBlockQ == 128 || kSpec.softcap)) && !(kSpec.blocks && Mods::kMask);
  constexpr int kPart = kSpec.access == 16 && !(Change::kDerived && kSpec.alibi) ? 2 : 1;
  constexpr bool kDeltaAhead = kBlockQ == 128 ? !(Change::kDerived || kSpec.dropout) : kPart == 2 || !kSpec.dropout;
  // 0, which the compiler does not know: a plain copy of P would be made early, and no product overlap another.
  const uint32 zero = s.group < 0;

  // All rings of queries count alike. `ahead` is 1 for the next tile, -1 for the one before.
  const auto issue_scores = [&](int ahead, int keys_ahead) {  // S^T = k q^T
    const RowOperand<kBlockQ> q(tiles.q + tiles.queries().slot(ahead) * Tiles::kQBytes);
    const RowOperand<kBlockK> k(tiles.k + tiles.keys().slot(keys_ahead) * Tiles::kKBytes + group * 64 * kRowBytes);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) Wgmma<T, kBlockQ>::dot_rows(prob.x, k[step], q[step], step > 0);
    wgmma_commit();
  };
  const auto issue_ds = [&](int ahead, int keys_ahead) {  // dP^T = v dout^T
    const RowOperand<kBlockQ> dout(tiles.dout + tiles.queries().slot(ahead) * Tiles::kDoutBytes);
    const RowOperand<kBlockK> v(tiles.v + tiles.keys().slot(keys_ahead) * Tiles::kVBytes + group * 64 * kRowBytes);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kDimV / 16; ++step) Wgmma<T, kBlockQ>::dot_rows(ds.x, v[step], dout[step], step > 0);
    wgmma_commit();
  };
  const auto issue_dv = [&] {  // dv += P^T dout
    const ColumnOperand<kBlockQ> dout(tiles.dout + tiles.queries().slot() * Tiles::kDoutBytes);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kBlockQ / 16; ++step) Wgmma<T, kDimV>::times(dv.x, prob_operand[step], dout[step]);
    wgmma_commit();
  };
  const auto issue_dk = [&] {  // dk += dS^T q
    const ColumnOperand<kBlockQ> q(tiles.q + tiles.queries().slot() * Tiles::kQBytes);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kBlockQ / 16; ++step) Wgmma<T, kDim>::times(dk.x, ds_operand[step], q[step]);
    wgmma_commit();
  };
  const auto issue_dq = [&](int ahead, int keys_ahead) {  // dq = dS k
    const ColumnOperand<kBlockK> left(tiles.ds + tiles.ds_ring().slot(ahead) * Tiles::kDsBytes +
                                      (kByQueries ? group * kBlockK * kRowBytes : 0));
    const ColumnOperand<kBlockK> right(tiles.k + tiles.keys().slot(keys_ahead) * Tiles::kKBytes +
                                       (kByQueries ? 0 : group * kBlockK * kRowBytes));
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kBlockK / 16; ++step)
      Wgmma<T, kDqCols>::transposed_times(dq.x, left[step], right[step], step > 0);
    wgmma_commit();
  };

  const auto statistics = [&](int ahead) {  // lse of two queries and two more, four times; then delta
    return reinterpret_cast<const float4*>(
               shared +
               (tiles.statistics + tiles.queries().slot(ahead) * Tiles::kStatisticBytes - shared_address(shared))) +
           lane_index() % 4;
  };
  const auto part = [&] {
    const int own = (kByQueries ? 4 * group : 0) + warp_row() / 16;
    return own < blocks ? (block + own) * (kByQueries ? 1 : kGroups) + (kByQueries ? 0 : group) : kNone;
  };
  const auto read_job = [&](int ahead) {
    const Job& job = tiles.job(ahead);
    flags_before = flags, part_before = part();
    flags = job.flags, block = job.block, blocks = job.blocks;
    if constexpr (kSpec.mask) {
#pragma unroll
      for (int part = 0; part < kBlockQ / 64; ++part) shown.words[part] = tiles.word(shared, group, part, ahead);
    }
  };
  const auto read_lse = [&](int ahead, int first, int end) {
#pragma unroll
    for (int step = first; step < end; ++step) lse[step] = statistics(ahead)[8 * step];
  };
  const auto add_dq = [&](uint32 to, int ahead) {
    if constexpr (kSpec.deterministic) tiles.adding().wait(ahead);
    if (to != kNone) {
      float* const target = p.dq_sum + int64(to) * (16 * kDqCols) + 4 * lane_index();
#pragma unroll
      for (int j = 0; j < kDqCols / 8; ++j) reduce_add(target + 128 * j, dq.x[j]);
    }
    if constexpr (kSpec.deterministic) {
      __syncwarp();  // all lanes have added
      tiles.adding().release(ahead);
    }
  };
  const auto store_gradients = [&] {
    const KeyTile<kSpec.varlen>& tile = tiles.key_tile();
    const int first_key = tile.first_key + 64 * group + warp_row();
    dk.scale_rows(s.scale, s.scale);
    if constexpr (kSpec.dropout) dv.scale_rows(p.dropout.scale, p.dropout.scale);
    store<T, kSpec.access>(dk, head_of(p.dk, tile.batch, tile.head, tile.seqlen_k(s), s.head_dim), first_key);
    store<T, kSpec.access>(dv, head_of(p.dv, tile.batch, tile.head, tile.seqlen_k(s), s.head_dim_v), first_key);
    dk.clear(), dv.clear();
  };
  const auto weigh = [&] {
    Alibi alibi = {};
    if constexpr (kSpec.alibi) alibi = tiles.alibi();
    TileLogits logits = tiles.logits();
    logits.wait();
    int head = 0, first_query = 0;
    if constexpr (Change::kModded) head = tiles.head(), first_query = tiles.job().first_query;
    wgmma_wait<1>();  // S^T is there
    if constexpr (!kReadsAhead && !Change::kDerived) read_lse(0, 0, kBlockQ / 16);
    const auto lse_of = [&](int j, int i) {
      const float4 four = Change::kDerived && !kReadsAhead ? statistics(0)[8 * (j / 2)] : lse[j / 2];
      return j % 2 ? i % 2 ? four.w : four.z : i % 2 ? four.y : four.x;
    };
    const auto visible = [&](int key) {
      if constexpr (kSpec.varlen) return tiles.key_tile().band().queries(key);
      return Band(s).queries(key);
    };
    const bool hides_some = kSpec.mask && (!kSpec.blocks || flags & Job::kInPart);
    Weights<kBlockQ> weights;
    if constexpr (Change::kAny || TileLogits::kAny) {
      const Slant slant = change.slant(
          0, [&](int half) { return alibi.origin + 64 * group + warp_row() + prob.row(half); },
          [&](int) { return alibi.slope; });
      const int first_row = 64 * group + warp_row();
      const auto minus_lse = [&](int j, int i) { return -lse_of(j, i); };
      if constexpr (Change::kModded) {
        const auto& keys = tiles.key_tile();
        auto places =
            mod::Places<Rows::kKeys, kBlockQ>::from(s, keys.batch, head, keys.first_key + first_row, first_query);
        places.whole = kSpec.blocks && !(flags & Job::kInPart);
        change.template weigh_mods<T, true, kPart>(
            prob, weights, slant, p.mods, places, [](int, int) { return 0.f; }, minus_lse);
      } else if constexpr (kSpec.bias != kNoBias) {
        auto bias = logits.column_bias(p.bias_map, first_row);
        change.template weigh<T, true, kPart>(prob, weights, slant,
                                              [&](int j, int i) { return logit_minus_lse(bias(j, i), lse_of(j, i)); });
      } else {
        change.template weigh<T, true, kPart>(prob, weights, slant, minus_lse);
      }
      if (flags >> group & 1)
        change.hide(prob, weights, tiles.key_tile().first_key + 64 * group + warp_row(), tiles.job().first_query,
                    visible);
      if (hides_some) change.hide_masked(prob, weights, shown);
      logits.release();
    } else {
      if (flags >> group & 1)
        prob.hide(tiles.key_tile().first_key + 64 * group + warp_row(), tiles.job().first_query, hidden_score(s),
                  visible);
      if (hides_some) {
#pragma unroll
        for (int j = 0; j < kBlockQ / 8; ++j)
#pragma unroll
          for (int i = 0; i < 4; ++i) prob.x[j][i] = shown(j, i) ? prob.x[j][i] : hidden_score(s);
      }
#pragma unroll
      for (int j = 0; j < kBlockQ / 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) prob.x[j][i] = exp2f(fmaf(prob.x[j][i], s.scale_log2, -lse_of(j, i)));
    }
    const auto read_delta = [&](int step) { return statistics(0)[8 * step + 4]; };
    float4 deltas[kBlockQ / 16];
    if constexpr (kDeltaAhead)
#pragma unroll
      for (int step = 0; step < kBlockQ / 16; ++step) deltas[step] = read_delta(step);
    // The exponentials while dP^T is being made: the compiler moves them past its wait if there is no other.
    barrier_wait(tiles.ds_ring().empty(tiles.ds_ring().slot()), tiles.ds_ring().parity() ^ 1);
    wgmma_wait<0>();  // dP^T is there
#pragma unroll
    for (int step = 0; step < kBlockQ / 16; ++step) {
      const float4 delta = kDeltaAhead ? deltas[step] : read_delta(step);
      if constexpr (Change::kDerived) {
#pragma unroll
        for (int i = 0; i < 4; ++i) prob_operand[step][i] = weights.prob[step][i] ^ zero;
        prob.template widen<T>(weights.changed[step], step);
      } else {
        prob.template operand<T>(prob_operand[step], step);
      }
      Kept<Rows::kKeys> kept;
      if constexpr (kSpec.dropout) {
        const uint32* const words = kept_words + tiles.queries().slot() * (Tiles::kKeptBytes / 4);
        kept = Kept<Rows::kKeys>::template of<kBlockK>(words, 16 * step, 64 * group + warp_row());
#pragma unroll
        for (int i = 0; i < 4; ++i) prob_operand[step][i] &= kept.pair(i);
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int j = 2 * step + i / 4;
        const float of_query = i < 4 ? i % 2 ? delta.y : delta.x : i % 2 ? delta.w : delta.z;
        float& x = ds.x[j][i % 4];
        if constexpr (kSpec.dropout)
          x = prob.x[j][i % 4] * fmaf(kept.of(x, j, i % 4), p.dropout.scale, -of_query);
        else
          x = prob.x[j][i % 4] * (x - of_query);
      }
      ds.template operand<T>(ds_operand[step], step);
    }
  };
  const auto begin = [&] {  // whether there is another tile
    tiles.queries().wait();
    read_job(0);
    if (flags & Job::kEnd) return false;
    tiles.keys().wait();
    issue_scores(0, 0);
    tiles.douts().wait();
    tiles.values().wait();
    issue_ds(0, 0);
    if constexpr (kReadsAhead) read_lse(0, 0, kBlockQ / 16);
    return true;
  };

#pragma unroll 1
  while (begin()) {
#pragma unroll 1
    while (true) {  // S^T and dP^T are being made
      const bool first = flags & Job::kFirst, last = flags & Job::kLast, goes_on = kSpec.key_slots > 1 && last;
      const bool keys_end = !first && flags_before & Job::kLast;
      const uint32 part_to_add = part_before;  // read_job moves it on
      weigh();
      if (last) tiles.values().release();
#pragma unroll
      for (int step = 0; step < kBlockQ / 16; ++step)  // rows of keys
        store_matrix(
            block_row<kBlockK>(tiles.ds + tiles.ds_ring().slot() * Tiles::kDsBytes, 64 * group + warp_row(), step),
            ds_operand[step]);
      // dS of all groups, for dq; before the turn, not to hold it while waiting.
      if (!first) tiles.ds_ring().wait(-1);

      turns().wait();
      issue_dv();
      // Of the tile before; where there is none, the product of whatever is there goes nowhere.
      issue_dq(-1, keys_end ? -1 : 0);
      issue_dk();
      // dS^T, before the products of others read it; behind our own, which hide its time.
      fence_async_shared();
      __syncwarp();
      if (lane_index() == 0) barrier_arrive(tiles.ds_ring().full(tiles.ds_ring().slot()));
      wgmma_wait<1>();  // dv and dq are there
      tiles.douts().release();
      if (!first) tiles.ds_ring().release(-1);
      if (keys_end) tiles.keys().release(-1);
      if (flags & Job::kDrains) break;
      tiles.queries().wait(1);
      read_job(1);
      if constexpr (kReadsAhead) read_lse(1, 0, kBlockQ / 32);
      if (goes_on) tiles.keys().wait(1);
      issue_scores(1, goes_on);
      turns().pass_on();
      if (!first) add_dq(part_to_add, -1);
      if (goes_on) {
        wgmma_wait<0>();
        store_gradients();
      } else {
        wgmma_wait<1>();  // dk is there; the next scores are being made
      }
      tiles.queries().release();
      if constexpr (kReadsAhead) read_lse(1, kBlockQ / 32, kBlockQ / 16);
      tiles.douts().wait(1);
      if (goes_on) tiles.values().wait(1);
      issue_ds(1, goes_on);
      tiles.advance(last);
    }
    turns().pass_on();
    if (!(flags & Job::kFirst)) add_dq(part_before, -1);
    wgmma_wait<0>();
    tiles.ds_ring().wait();
    issue_dq(0, 0);
    wgmma_wait<0>();
    add_dq(part(), 0);
    tiles.queries().release();
    store_gradients();
    tiles.ds_ring().release(), tiles.keys().release();
    tiles.advance(true);
  }
  turns().close();
}

}  // namespace cupyflash
