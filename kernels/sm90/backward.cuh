// Gradients on Hopper: the products of sm80/backward.cuh with their roles split. A block takes tiles of keys, one after
// the other, and for each goes through the queries that see it. One warp copies; each computing warpgroup owns 64 keys:
//   S^T = k q^T         P^T = exp(scale S^T - lse)        dv += P^T dout
//   dP^T = v dout^T     dS^T = P^T (dP^T - delta)         dk += dS^T q      dq = dS k
// P^T and dS^T stay in registers, the left operands of dv and dk; dS^T goes to shared memory too, for dq, which needs
// that of all warpgroups. dq is made one tile later, when all have long left theirs there, and is added up in memory in
// float32; the kernels of any/around_backward.cuh clear that sum and convert it.
#pragma once

#include "core/epilogue.cuh"
#include "core/spec.cuh"
#include "core/work.cuh"
#include "sm90/backward_params.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/tile.cuh"
#include "sm90/wgmma.cuh"

namespace cupyflash {

// What is to be done with one tile of queries, as the copying warp says it.
struct Job {
  // The first tile after a drain; the last one of its keys; all is added before the next one begins; no tile. Below:
  // the mask hides some score of group i.
  static constexpr int kFirst = 128, kLast = 256, kDrains = 512, kEnd = 1024;
  int flags;
  int first_query;
  uint32 block;  // of dq_sum, where the tile begins; `blocks` of them exist
  int blocks;
  uint32 before;  // tiles of keys that add to dq before this one, if deterministic
};
struct KeyTile {
  int first_key, head, batch;
};

// The gradients of keys that no query sees, by one warp.
__device__ inline void clear_rows(const Matrix& m, int first, int count) {
  for (int row = first; row < min(first + count, m.rows); ++row)
    for (int col = lane_index(); col < m.cols; col += 32)
      reinterpret_cast<unsigned short*>(m.data + row * m.stride)[col] = 0;
}

template <HopperBackwardSpec kSpec>
struct BackwardTiles {  // in shared memory
  static constexpr int kBlockQ = kSpec.block_q, kBlockK = kSpec.block_k(), kSlots = kSpec.key_slots;
  static constexpr int kQBytes = tile_bytes(kBlockQ, kSpec.head_dim),
                       kDoutBytes = tile_bytes(kBlockQ, kSpec.head_dim_v);
  static constexpr int kKBytes = tile_bytes(kBlockK, kSpec.head_dim), kVBytes = tile_bytes(kBlockK, kSpec.head_dim_v);
  static constexpr int kDsBytes = tile_bytes(kBlockK, kBlockQ), kStatisticBytes = 8 * kBlockQ;
  static constexpr int kBarriers = 4 * kSlots + 4 * kSpec.stages + 4;
  static constexpr int kJobs = 4;  // the two before the present one are still read while the next ones are written
  static_assert(kSpec.stages + (kSpec.deterministic ? 2 : 1) <= kJobs);

  uint32 k, v, q, dout, ds, statistics, barriers;
  Job* jobs;
  KeyTile* key_tiles;
  uint32 count = 0, key_count = 0;  // tiles so far, of queries and of keys

  __device__ __forceinline__ BackwardTiles(uint32 base, uint64* barriers, Job* jobs, KeyTile* key_tiles)
      : k(base),
        v(k + kSlots * kKBytes),
        q(v + kSlots * kVBytes),
        dout(q + kSpec.stages * kQBytes),
        ds(dout + kSpec.stages * kDoutBytes),
        statistics(ds + 2 * kDsBytes),
        barriers(shared_address(barriers)),
        jobs(jobs),
        key_tiles(key_tiles) {}

  __device__ __forceinline__ Ring<kSlots> keys() const { return Ring<kSlots>(barriers, key_count); }
  __device__ __forceinline__ Ring<kSlots> values() const { return Ring<kSlots>(barriers + 16 * kSlots, key_count); }
  // q, with jobs and statistics.
  __device__ __forceinline__ Ring<kSpec.stages> queries() const {
    return Ring<kSpec.stages>(barriers + 32 * kSlots, count);
  }
  __device__ __forceinline__ Ring<kSpec.stages> douts() const {
    return Ring<kSpec.stages>(barriers + 32 * kSlots + 16 * kSpec.stages, count);
  }
  // dS^T, from all groups to all groups.
  __device__ __forceinline__ Ring<2> ds_ring() const {
    return Ring<2>(barriers + 32 * kSlots + 32 * kSpec.stages, count);
  }
  __device__ __forceinline__ Job& job(int ahead = 0) const { return jobs[(count + ahead) % kJobs]; }
  __device__ __forceinline__ KeyTile& key_tile() const { return key_tiles[key_count % kSlots]; }
  __device__ __forceinline__ void advance(bool last) {
    ++count;
    if (last) ++key_count;
  }

  __device__ __forceinline__ void init() const {
    constexpr int kWarps = 4 * kSpec.groups;
    keys().init(kWarps), values().init(kWarps), queries().init(kWarps), douts().init(kWarps);
    ds_ring().init(kWarps, kWarps);
  }
};

// The warp that copies.
template <HopperBackwardSpec kSpec>
__device__ __forceinline__ void copy_tiles(const HopperBackwardParams& p, BackwardTiles<kSpec>& tiles) {
  using Tiles = BackwardTiles<kSpec>;
  constexpr int kBlockQ = kSpec.block_q, kBlockK = kSpec.block_k();
  const Sizes& s = p.sizes;
  const Band band(s);
  const int q_blocks = (s.seqlen_q + 15) / 16;
  // Deterministic: works are taken when they are begun, the last keys of a head first, so that a block waits only for
  // blocks that have begun; and causal tiles of keys begin with the queries that no later keys add to.
  const auto ticket = [&] {
    uint32 index = 0;
    if (lane_index() == 0) index = atomicAdd(p.turn, 1u);
    return __shfl_sync(kFullWarp, index, 0);
  };
  Works works(p.keys, s, kSpec.deterministic ? ticket() : blockIdx.x, gridDim.x, kSpec.deterministic);
  Range seen;
  const auto next_work = [&] {
    if constexpr (kSpec.deterministic)
      works.jump(ticket());
    else
      works.next();
  };
  const auto skip_unseen = [&] {  // to the first work with a query, from the present one on
    for (; works.left(); next_work()) {
      const Work& work = works.work;
      const int first_key = work.tile * kBlockK;
      seen = query_tiles_of(band, {first_key, min(first_key + kBlockK, s.seqlen_k) - 1}, kBlockQ);
      if (seen.last >= seen.first) return;
      clear_rows(head_of(p.dk, work.batch, work.head, s.seqlen_k, s.head_dim), first_key, kBlockK);
      clear_rows(head_of(p.dv, work.batch, work.head, s.seqlen_k, s.head_dim_v), first_key, kBlockK);
    }
  };
  skip_unseen();
  bool drained = true;
  while (works.left()) {
    const Work work = works.work;
    const Range range = seen;
    const int first_key = work.tile * kBlockK, count = range.last - range.first + 1;
    int tile = p.rotated ? range.first + int(int64(work.tile) * count / p.keys.tiles) : range.first;
    int in_group = 0, in_head = 0;
#pragma unroll 1
    while (true) {
      const bool begins = in_group == 0 && in_head == 0, last = in_group == s.group - 1 && in_head == count - 1;
      const int slot = tiles.queries().slot(), first = tile * kBlockQ;
      const int head = work.head * s.group + in_group, pair = work.batch * s.heads_q + head;
      if (last) next_work(), skip_unseen();
      barrier_wait(tiles.queries().empty(slot), tiles.queries().parity() ^ 1);
      // A block must not keep the keys of two works, each with one tile, while it waits for those of a third.
      const bool drains = last && (kSpec.key_slots == 1 || !works.left() || begins);
      if (lane_index() == 0) {
        int flags = (drained ? Job::kFirst : 0) | (last ? Job::kLast : 0) | (drains ? Job::kDrains : 0);
#pragma unroll
        for (int group = 0; group < kSpec.groups; ++group) {
          const int key = first_key + 64 * group;
          const Range seen_by_all = queries_of_all(band, {key, key + 63});
          if (first < seen_by_all.first || first + kBlockQ - 1 > seen_by_all.last) flags |= 1 << group;
        }
        const int before = kSpec.deterministic ? tiles_of(band, first, kBlockQ, kBlockK).last - work.tile : 0;
        tiles.job() = {flags, first, uint32(pair) * q_blocks + first / 16, min(kBlockQ / 16, q_blocks - first / 16),
                       uint32(before)};
        const uint32 full = tiles.queries().full(slot);
        barrier_expect(full, Tiles::kQBytes + Tiles::kStatisticBytes);
        copy_tile<kBlockQ, kSpec.head_dim>(tiles.q + slot * Tiles::kQBytes, p.q_map, full, first, head, work.batch);
        copy_bytes(tiles.statistics + slot * Tiles::kStatisticBytes,
                   p.delta.data + (int64(pair) * statistic_rows(s.seqlen_q) + first) * 2, full, Tiles::kStatisticBytes);
        const int key_slot = tiles.keys().slot();
        if (begins)
          copy_tile<kBlockK, kSpec.head_dim_v>(tiles.v + key_slot * Tiles::kVBytes, p.v_map,
                                               tiles.values().acquire(Tiles::kVBytes), first_key, work.head,
                                               work.batch);
        copy_tile<kBlockQ, kSpec.head_dim_v>(tiles.dout + slot * Tiles::kDoutBytes, p.dout_map,
                                             tiles.douts().acquire(Tiles::kDoutBytes), first, head, work.batch);
        if (begins) {  // last: the dq of the work before reads the place
          const uint32 full = tiles.keys().full(key_slot);
          barrier_wait(tiles.keys().empty(key_slot), tiles.keys().parity() ^ 1);
          tiles.key_tile() = {first_key, work.head, work.batch};
          barrier_expect(full, Tiles::kKBytes);
          copy_tile<kBlockK, kSpec.head_dim>(tiles.k + key_slot * Tiles::kKBytes, p.k_map, full, first_key, work.head,
                                             work.batch);
        }
      }
      __syncwarp();
      drained = drains;
      tiles.advance(last);
      if (last) break;
      if (++tile > range.last) tile = range.first;
      if (++in_head == count) in_head = 0, ++in_group;
    }
  }
  if (lane_index() == 0) {
    const int slot = tiles.queries().slot();
    barrier_wait(tiles.queries().empty(slot), tiles.queries().parity() ^ 1);
    tiles.job().flags = Job::kEnd;
    barrier_arrive(tiles.queries().full(slot));
  }
}

template <class T, HopperBackwardSpec kSpec>
__global__ void __launch_bounds__(kSpec.threads(), 1) hopper_backward(const __grid_constant__ HopperBackwardParams p) {
  using Tiles = BackwardTiles<kSpec>;
  constexpr int kGroups = kSpec.groups, kBlockQ = kSpec.block_q, kBlockK = kSpec.block_k();
  constexpr int kDim = kSpec.head_dim, kDimV = kSpec.head_dim_v;
  // What a group computes of dq: 64 queries, or 64 columns of all.
  constexpr bool kByQueries = kBlockQ == 64 * kGroups;
  constexpr int kDqCols = 64;
  constexpr uint32 kNone = ~0u;
  static_assert(kByQueries ? kDim == 64 : kBlockQ == 64 && kDim == 64 * kGroups, "dq is shared among the groups");

  extern __shared__ __align__(1024) char shared[];
  __shared__ uint64 barriers[Tiles::kBarriers];
  __shared__ Job jobs[Tiles::kJobs];
  __shared__ KeyTile key_tiles[kSpec.key_slots];
  Tiles tiles((shared_address(shared) + 1023) & ~1023u, barriers, jobs, key_tiles);
  if (threadIdx.x == 0) {
    tiles.init();
    fence_barrier_init();  // for the copy engine; for the other threads the barrier below
  }
  __syncthreads();

  const Sizes& s = p.sizes;
  const int role = __shfl_sync(kFullWarp, threadIdx.x / 128, 0);
  if (role == 0) {
    give_registers<kSpec.copying_registers()>();
    if (warp_index() == 0) copy_tiles<kSpec>(p, tiles);
    return;
  }

  take_registers<kSpec.registers()>();
  const int group = role - 1;
  const auto warp_row = [] { return int(opaque(threadIdx.x) / 32 % 4 * 16); };
  const Turns<kSpec.turns ? kGroups : 1> turns = {group, 1};
  turns.open();
  Accumulator<kDim> dk;
  Accumulator<kDimV> dv;
  Accumulator<kBlockQ> prob, ds;
  Accumulator<kDqCols> dq;
  uint32 prob_operand[kBlockQ / 16][4], ds_operand[kBlockQ / 16][4];
  dk.clear(), dv.clear();

  // All rings of queries count alike. `ahead` is 1 for the next tile, -1 for the one before.
  const auto issue_scores = [&](int ahead, int keys_ahead) {  // S^T = k q^T
    const uint64 q = row_operand<kBlockQ>(tiles.q + tiles.queries().slot(ahead) * Tiles::kQBytes, 0);
    const uint64 k =
        row_operand<kBlockK>(tiles.k + tiles.keys().slot(keys_ahead) * Tiles::kKBytes + group * 64 * kRowBytes, 0);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step)
      Wgmma<T, kBlockQ>::dot_rows(prob.x, row_step<kBlockK>(k, step), row_step<kBlockQ>(q, step), step > 0);
    wgmma_commit();
  };
  const auto issue_ds = [&](int ahead, int keys_ahead) {  // dP^T = v dout^T
    const uint64 dout = row_operand<kBlockQ>(tiles.dout + tiles.queries().slot(ahead) * Tiles::kDoutBytes, 0);
    const uint64 v =
        row_operand<kBlockK>(tiles.v + tiles.keys().slot(keys_ahead) * Tiles::kVBytes + group * 64 * kRowBytes, 0);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kDimV / 16; ++step)
      Wgmma<T, kBlockQ>::dot_rows(ds.x, row_step<kBlockK>(v, step), row_step<kBlockQ>(dout, step), step > 0);
    wgmma_commit();
  };
  const auto issue_dv = [&] {  // dv += P^T dout
    const uint64 dout = column_operand<kBlockQ>(tiles.dout + tiles.queries().slot() * Tiles::kDoutBytes, 0);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kBlockQ / 16; ++step)
      Wgmma<T, kDimV>::times(dv.x, prob_operand[step], column_step(dout, step));
    wgmma_commit();
  };
  const auto issue_dk = [&] {  // dk += dS^T q
    const uint64 q = column_operand<kBlockQ>(tiles.q + tiles.queries().slot() * Tiles::kQBytes, 0);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kBlockQ / 16; ++step) Wgmma<T, kDim>::times(dk.x, ds_operand[step], column_step(q, step));
    wgmma_commit();
  };
  const auto issue_dq = [&](int ahead, int keys_ahead) {  // dq = dS k
    const uint64 left = column_operand<kBlockK>(
        tiles.ds + tiles.ds_ring().slot(ahead) * Tiles::kDsBytes + (kByQueries ? group * kBlockK * kRowBytes : 0), 0);
    const uint64 right = column_operand<kBlockK>(
        tiles.k + tiles.keys().slot(keys_ahead) * Tiles::kKBytes + (kByQueries ? 0 : group * kBlockK * kRowBytes), 0);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kBlockK / 16; ++step)
      Wgmma<T, kDqCols>::transposed_times(dq.x, column_step(left, step), column_step(right, step), step > 0);
    wgmma_commit();
  };

  // dq is that of the tile before. Deterministic: each part of it has a counter of the tiles of keys that were added.
  const auto part_of = [&](const Job& job) {
    const int block = (kByQueries ? 4 * group : 0) + warp_row() / 16;
    if (block >= job.blocks) return kNone;
    return (job.block + block) * (kByQueries ? 1 : kGroups) + (kByQueries ? 0 : group);
  };
  const auto add_dq = [&](const Job& job) {
    const uint32 part = part_of(job);
    if (part == kNone) return;
    if constexpr (kSpec.deterministic) {
      if (lane_index() == 0)
        while (load_acquire(p.turn + 1 + part) < job.before) __nanosleep(20);
      __syncwarp();
    }
    float* const target = p.dq_sum + int64(part) * (16 * kDqCols) + 4 * lane_index();
#pragma unroll
    for (int j = 0; j < kDqCols / 8; ++j) reduce_add(target + 128 * j, dq.x[j]);
  };
  const auto tell_added = [&](const Job& job) {
    if constexpr (kSpec.deterministic) {
      const uint32 part = part_of(job);
      __syncwarp();
      if (part != kNone && lane_index() == 0) add_release(p.turn + 1 + part, 1);
    }
  };
  const auto store_gradients = [&] {
    const KeyTile& tile = tiles.key_tile();
    const int first_key = tile.first_key + 64 * group + warp_row();
    dk.scale_rows(s.scale, s.scale);
    store<T, kSpec.access>(dk, head_of(p.dk, tile.batch, tile.head, s.seqlen_k, s.head_dim), first_key);
    store<T, kSpec.access>(dv, head_of(p.dv, tile.batch, tile.head, s.seqlen_k, s.head_dim_v), first_key);
    dk.clear(), dv.clear();
  };
  const auto weigh = [&](int flags) {
    const float4* const statistics =
        reinterpret_cast<const float4*>(
            shared + (tiles.statistics + tiles.queries().slot() * Tiles::kStatisticBytes - shared_address(shared))) +
        lane_index() % 4;
    wgmma_wait<1>();  // S^T is there
    if (flags >> group & 1) {
      const Band band(s);
      prob.hide(tiles.key_tile().first_key + 64 * group + warp_row(), tiles.job().first_query,
                s.scale_log2 < 0.f ? kInfinity : -kInfinity, [&](int key) { return band.queries(key); });
    }
#pragma unroll
    for (int step = 0; step < kBlockQ / 16; ++step) {
      const float4 lse = statistics[8 * step];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float& x = prob.x[2 * step + i / 4][i % 4];
        x = exp2f(fmaf(x, s.scale_log2, -(i < 4 ? i % 2 ? lse.y : lse.x : i % 2 ? lse.w : lse.z)));
      }
    }
    // The exponentials while dP^T is being made: the compiler moves them past its wait if there is no other.
    barrier_wait(tiles.ds_ring().empty(tiles.ds_ring().slot()), tiles.ds_ring().parity() ^ 1);
    wgmma_wait<0>();  // dP^T is there
#pragma unroll
    for (int step = 0; step < kBlockQ / 16; ++step) {
      const float4 delta = statistics[8 * step + 4];
      prob.template operand<T>(prob_operand[step], step);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float& x = ds.x[2 * step + i / 4][i % 4];
        x = prob.x[2 * step + i / 4][i % 4] * (x - (i < 4 ? i % 2 ? delta.y : delta.x : i % 2 ? delta.w : delta.z));
      }
      ds.template operand<T>(ds_operand[step], step);
    }
  };
  const auto begin = [&] {  // whether there is another tile
    tiles.queries().wait();
    if (tiles.job().flags & Job::kEnd) return false;
    tiles.keys().wait();
    issue_scores(0, 0);
    tiles.douts().wait();
    tiles.values().wait();
    issue_ds(0, 0);
    return true;
  };

#pragma unroll 1
  while (begin()) {
#pragma unroll 1
    while (true) {  // S^T and dP^T are being made
      const int flags = tiles.job().flags;
      const bool first = flags & Job::kFirst, last = flags & Job::kLast, goes_on = kSpec.key_slots > 1 && last;
      weigh(flags);
      if (last) tiles.values().release();
#pragma unroll
      for (int step = 0; step < kBlockQ / 16; ++step)  // rows of keys
        store_matrix(
            block_row<kBlockK>(tiles.ds + tiles.ds_ring().slot() * Tiles::kDsBytes, 64 * group + warp_row(), step),
            ds_operand[step]);
      fence_async_shared();
      __syncwarp();
      if (lane_index() == 0) barrier_arrive(tiles.ds_ring().full(tiles.ds_ring().slot()));
      // By now what was added half a tile ago has arrived, and this costs no time.
      if (kSpec.deterministic && !first && !(tiles.job(-1).flags & Job::kFirst)) tell_added(tiles.job(-2));

      turns.wait();
      issue_dv();
      // Of the tile before; where there is none, the product of whatever is there goes nowhere.
      const bool keys_end = !first && tiles.job(-1).flags & Job::kLast;
      if (!first) tiles.ds_ring().wait(-1);
      issue_dq(-1, keys_end ? -1 : 0);
      issue_dk();
      wgmma_wait<1>();  // dv and dq are there
      tiles.douts().release();
      if (!first) tiles.ds_ring().release(-1);
      if (keys_end) tiles.keys().release(-1);
      if (flags & Job::kDrains) break;
      if constexpr (!kSpec.early) {
        if (!first) add_dq(tiles.job(-1));
        wgmma_wait<0>();  // dk is there
      }
      tiles.queries().wait(1);
      if (goes_on) tiles.keys().wait(1);
      issue_scores(1, goes_on);
      turns.pass_on();
      if (kSpec.early && !first) add_dq(tiles.job(-1));
      if (goes_on) {
        wgmma_wait<0>();
        store_gradients();
      } else if constexpr (kSpec.early) {
        wgmma_wait<1>();  // dk is there
      }
      tiles.queries().release();
      tiles.douts().wait(1);
      if (goes_on) tiles.values().wait(1);
      issue_ds(1, goes_on);
      tiles.advance(last);
    }
    turns.pass_on();
    const bool first = tiles.job().flags & Job::kFirst;
    if (!first) add_dq(tiles.job(-1));
    wgmma_wait<0>();
    tiles.ds_ring().wait();
    issue_dq(0, 0);
    if (!first) tell_added(tiles.job(-1));
    wgmma_wait<0>();
    add_dq(tiles.job());
    tiles.queries().release();
    store_gradients();
    tiles.ds_ring().release(), tiles.keys().release();
    tell_added(tiles.job());
    tiles.advance(true);
  }
  turns.close();
}

}  // namespace cupyflash
