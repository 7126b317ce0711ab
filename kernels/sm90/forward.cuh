// out = softmax(scale q k^T) v and its log-sum-exp on Hopper: the loop of sm80/forward.cuh with its roles split
// (FlashAttention-3, arXiv 2407.08608). One warpgroup copies tiles by TMA; the others own 64 queries each and overlap
// the products of the next tile with the softmax of this one, and take turns at the tensor cores.
#pragma once

#include "core/epilogue.cuh"
#include "core/softmax.cuh"
#include "core/spec.cuh"
#include "core/work.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/tile.cuh"
#include "sm90/wgmma.cuh"

namespace cupyflash {

struct HopperForwardParams {
  TensorMap q, k, v, out_map;
  Array out;  // where out_map is not used
  RowArray lse;
  Sizes sizes;
  int paired;  // a block computes the tiles i and n - 1 - i of a head one after the other: equal work on causal masks
};

// The warpgroups issue their products one after the other, so that one computes its softmax while another multiplies.
// Barrier first + g opens for group g when the group before it has issued; barrier 0 is that of __syncthreads.
template <int kGroups>
struct Turns {
  static constexpr int kMeeting = 2 * 128;  // threads of the group that waits and of the one that passes on
  int group, first;

  __device__ __forceinline__ void open() const {
    if (kGroups > 1 && group == kGroups - 1) named_arrive(first, kMeeting);
  }
  __device__ __forceinline__ void wait() const {
    if (kGroups > 1) named_sync(first + group, kMeeting);
  }
  __device__ __forceinline__ void pass_on() const {
    if (kGroups > 1) named_arrive(first + (group + 1) % kGroups, kMeeting);
  }
  __device__ __forceinline__ void close() const {
    if (kGroups > 1 && group == 0) named_sync(first, kMeeting);
  }
};

// Calls body(work) for each tile of queries of every step-th run.
template <class Body>
__device__ __forceinline__ void for_each_work(const HopperForwardParams& p, int q_tiles, int heads, uint32 first,
                                              uint32 step, Body body) {
  const int runs = p.paired ? (q_tiles + 1) / 2 : q_tiles;
  const uint32 count = uint32(p.sizes.batch) * heads * runs;
#pragma unroll 1
  for (uint32 index = first; index < count; index += step) {
    Work work = find_work(index, runs, p.sizes.batch, heads, p.sizes.section, !p.paired);
    const int partner = p.paired ? q_tiles - 1 - work.tile : work.tile;
#pragma unroll 1
    for (int tile = partner; tile >= work.tile; tile -= max(1, partner - work.tile)) body({tile, work.batch, work.head});
  }
}

template <class T, HopperForwardSpec kSpec>
__global__ void __launch_bounds__(kSpec.threads(), 1)
    hopper_forward(const __grid_constant__ HopperForwardParams p) {
  constexpr int kBlockQ = 64 * kSpec.groups, kBlockK = kSpec.block_k, kDim = kSpec.head_dim, kDimV = kSpec.head_dim_v;
  constexpr int kQBytes = tile_bytes(kBlockQ, kDim), kKBytes = tile_bytes(kBlockK, kDim);
  constexpr int kVBytes = tile_bytes(kBlockK, kDimV), kOutBytes = tile_bytes(kBlockQ, kDimV);
  constexpr int kQSlot = kQBytes > kOutBytes ? kQBytes : kOutBytes, kSlot = kKBytes > kVBytes ? kKBytes : kVBytes;
  constexpr int kWarps = 4 * kSpec.groups;  // that compute
  constexpr bool kStaged = kSpec.access == 16 && !kSpec.float32_out;
  static_assert(kStaged || !kSpec.packed, "only the copy engine writes several heads");

  constexpr int kTeamBytes = kSpec.q_slots * kQSlot + kSpec.slots * kSlot, kBarriers = 2 * kSpec.slots + 3 * kSpec.q_slots;

  extern __shared__ __align__(1024) char shared[];
  __shared__ uint64 barriers[kSpec.teams * kBarriers];
  const int warpgroup = __shfl_sync(kFullWarp, threadIdx.x / 128, 0);
  const bool copying = warpgroup == kSpec.teams * kSpec.groups;
  // Of the four warps that copy, the first load, one for each team; the others store.
  const int helper = warp_index() % 4, loads = helper < kSpec.teams;
  const int team = !copying ? warpgroup / kSpec.groups : loads ? helper : kSpec.teams == 3 ? lane_index() % 3 : helper % kSpec.teams;
  const uint32 q_base = (shared_address(shared) + 1023 & ~1023u) + team * kTeamBytes;
  const uint32 base = q_base + kSpec.q_slots * kQSlot, barrier_base = shared_address(barriers + team * kBarriers);
  // Tiles in the order K0 K1 V0 K2 V1 ...: the scores of a tile come before the product of the one before it.
  Ring<kSpec.slots> ring(barrier_base);
  Ring<kSpec.q_slots> q_ring(barrier_base + 16 * kSpec.slots);
  const uint32 out_full = barrier_base + 16 * (kSpec.slots + kSpec.q_slots);
  if (copying && loads && lane_index() == 0) {
    ring.init(kWarps), q_ring.init(kStaged ? 1 : kWarps);
    for (int i = 0; i < kSpec.q_slots; ++i) barrier_init(out_full + 8 * i, kWarps);
    fence_barrier_init();  // for the copy engine; for the other threads the barrier below
  }
  __syncthreads();

  const Sizes& s = p.sizes;
  const Band band(s);
  const int queries = kSpec.packed ? kBlockQ / s.group : kBlockQ;  // of a tile
  const int q_tiles = (s.seqlen_q + queries - 1) / queries;
  const int heads = kSpec.packed ? s.heads_q / s.group : s.heads_q;
  const uint32 first = blockIdx.x * kSpec.teams + team, step = gridDim.x * kSpec.teams;

  if (copying) {
    give_registers<kSpec.copying_registers()>();
    if (loads && lane_index() == 0) {
      prefetch_map(p.q), prefetch_map(p.k), prefetch_map(p.v);
      for_each_work(p, q_tiles, heads, first, step, [&](Work work) {
        const Range tiles = tiles_of(band, work.tile * queries, queries, kBlockK);
        const int head_q = kSpec.packed ? work.head * s.group : work.head, head_k = head_q / s.group;
        const auto load_k = [&](int tile) {
          const uint32 target = base + ring.slot() * kSlot;
          copy_tile<kBlockK, kDim>(target, p.k, ring.acquire(kKBytes), tile * kBlockK, head_k, work.batch);
          ring.advance();
        };
        const auto load_v = [&](int tile) {
          const uint32 target = base + ring.slot() * kSlot;
          copy_tile<kBlockK, kDimV>(target, p.v, ring.acquire(kVBytes), tile * kBlockK, head_k, work.batch);
          ring.advance();
        };
        if (tiles.last >= tiles.first) load_k(tiles.last);
        const uint32 target = q_base + q_ring.slot() * kQSlot;
        const int q_bytes = kSpec.packed ? panels(kDim) * queries * s.group * kRowBytes : kQBytes;
        copy_tile<kBlockQ, kDim>(target, p.q, q_ring.acquire(q_bytes), work.tile * queries, head_q, work.batch);
        q_ring.advance();
#pragma unroll 1
        for (int tile = tiles.last - 1; tile >= tiles.first; --tile) load_k(tile), load_v(tile + 1);
        if (tiles.last >= tiles.first) load_v(tiles.first);
      });
    } else if (kStaged && !loads && lane_index() < (kSpec.teams == 3 ? 3 : helper < 2 * kSpec.teams)) {
      prefetch_map(p.out_map);
      for_each_work(p, q_tiles, heads, first, step, [&](Work work) {
        barrier_wait(out_full + 8 * q_ring.slot(), q_ring.parity());
        store_tile<kBlockQ, kDimV>(p.out_map, q_base + q_ring.slot() * kQSlot, work.tile * queries,
                                   kSpec.packed ? work.head * s.group : work.head, work.batch);
        wait_for_stores();
        barrier_arrive(q_ring.empty(q_ring.slot()));
        q_ring.advance();
      });
    }
    return;
  }

  take_registers<kSpec.registers()>();
  const int group = warpgroup % kSpec.groups, warp_row = 64 * group + warp_index() % 4 * 16;
  const Turns<kSpec.ping_pong ? kSpec.groups : 1> turns = {group, 1 + team * kSpec.groups};
  turns.open();

  for_each_work(p, q_tiles, heads, first, step, [&](Work work) {
    const int first_query = work.tile * queries;
    const auto query_of = [&](int row) { return first_query + (kSpec.packed ? row / s.group : row); };
    const Range tiles = tiles_of(band, first_query, queries, kBlockK);
    const Range rows = {query_of(64 * group), min(query_of(64 * group + 63), min(first_query + queries, s.seqlen_q) - 1)};
    const Range own = rows.last < rows.first ? Range{0, -1} : tiles_of(band, rows, kBlockK);
    const Range seen_by_all = keys_of_all(band, rows);

    Accumulator<kDimV> out[1];
    Accumulator<kBlockK> scores[1];
    uint32 weights[kBlockK / 16][4];  // the 16-bit scores, as left operand
    OnlineSoftmax<1> softmax;
    out[0].clear();

    const uint32 q = q_base + q_ring.slot() * kQSlot + group * 64 * kRowBytes;
    const auto issue_scores = [&] {  // q k^T
      const uint32 k = base + ring.slot() * kSlot;
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < kDim / 16; ++step)
        Wgmma<T, kBlockK>::dot_rows(scores[0].x, row_operand<kBlockQ>(q, step), row_operand<kBlockK>(k, step), step > 0);
      wgmma_commit();
    };
    const auto issue_out = [&](int ahead) {  // out += weights v
      const uint32 v = base + ring.slot(ahead) * kSlot;
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < kBlockK / 16; ++step)
        Wgmma<T, kDimV>::times(out[0].x, weights[step], column_operand<kBlockK>(v, step));
      wgmma_commit();
    };
    const auto weigh = [&](int tile) {  // scores -> weights in float32; whether out must be rescaled
      const int first_key = tile * kBlockK;
      if (first_key < seen_by_all.first || first_key + kBlockK - 1 > seen_by_all.last)
        scores[0].hide(warp_row, first_key, -kInfinity, [&](int row) { return band.keys(query_of(row)); });
      const bool raised = softmax.raise(scores, s.scale_log2);
      softmax.exponentiate(scores, s.scale_log2);
      return raised;
    };
    const auto round_weights = [&] {
#pragma unroll
      for (int step = 0; step < kBlockK / 16; ++step) scores[0].template operand<T>(weights[step], step);
    };
    // Tiles that other groups of the block see, but not this one: its turns pass, its share of the slots is freed.
    const auto skip = [&](int count) {
#pragma unroll 1
      for (; count > 0; --count) ring.wait(), ring.release(), ring.advance();
    };
    const auto sit_out = [&](int steps, bool first) {
#pragma unroll 1
      for (; steps > 0; --steps, first = false) turns.wait(), turns.pass_on(), skip(first ? 1 : 2);
    };

    q_ring.wait();
    if (own.last >= own.first) {
      sit_out(tiles.last - own.last, true);
      ring.wait();
      turns.wait();
      issue_scores();
      turns.pass_on();
      wgmma_wait<0>();
      ring.release();
      ring.advance();
      if (tiles.last > own.last) skip(1);
      weigh(own.last);
      round_weights();
#pragma unroll 1
      for (int tile = own.last - 1; tile >= own.first; --tile) {
        ring.wait();
        turns.wait();
        issue_scores();
        ring.wait(1);
        issue_out(1);  // of the tile before
        turns.pass_on();
        wgmma_wait<1>();  // the scores are there; k is free, the product with v goes on
        ring.release();
        const bool raised = weigh(tile);
        wgmma_wait<0>();  // out is there; v and the registers of the weights are free
        ring.release(1);
        ring.advance(2);
        round_weights();
        if (raised) softmax.rescale(out);
      }
      if (own.first > tiles.first) turns.wait(), turns.pass_on(), skip(1);
      ring.wait();
      issue_out(0);
      wgmma_wait<0>();
      ring.release();
      ring.advance();
      sit_out(own.first - tiles.first - 1, false);
      if (own.first > tiles.first) skip(1);
    } else if (tiles.last >= tiles.first) {
      sit_out(tiles.last - tiles.first + 1, true);
      skip(1);
    }

    float inverse[2], lse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      softmax.finish(0, half, s.scale, inverse[half], lse[half]);
      const int row = warp_row + out[0].row(half), query = query_of(row);
      const int head = kSpec.packed ? work.head * s.group + row % s.group : work.head;
      if (p.lse.data != nullptr && lane_index() % 4 == 0 && query < min(first_query + queries, s.seqlen_q))
        p.lse.at(work.batch, head)[query * p.lse.row] = lse[half];
    }
    out[0].scale_rows(inverse[0], inverse[1]);
    if constexpr (kStaged) {
      named_sync(1 + kSpec.teams * kSpec.groups + warpgroup, 128);  // the group has read its rows of q, where out goes
      write_rows<T, kBlockQ>(out[0], q + warp_index() % 4 * 16 * kRowBytes);
      fence_async_shared();
      __syncwarp();
      if (lane_index() == 0) barrier_arrive(out_full + 8 * q_ring.slot());
    } else {
      const Matrix target = head_of(p.out, work.batch, work.head, s.seqlen_q, s.head_dim_v, kSpec.float32_out ? 4 : 2);
      if constexpr (kSpec.float32_out)
        store_direct<float, 4>(out[0], target, first_query + warp_row, 0);
      else
        store_direct<T, kSpec.access>(out[0], target, first_query + warp_row, 0);
      q_ring.release();
    }
    q_ring.advance();
  });
  turns.close();
}

}  // namespace cupyflash
