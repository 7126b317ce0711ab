// Gradients on Hopper: the products of sm80/backward.cuh with their roles split. A block takes tiles of keys, one after
// the other, and for each goes through the queries that see it. One warp copies; each computing warpgroup owns 64 keys,
// keeps P^T and dS^T in registers, the left operands of dv and dk, and leaves dS in shared memory. dq is made one tile
// later, when the dS of all warpgroups has long been there, and added up in memory; the warps that have nothing to copy
// convert what is complete. The warpgroups take turns at the tensor cores.
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
  // The last tile of its keys, after which the next is not begun before all is added; no tile.
  static constexpr int kLast = 256, kDrains = 512, kEnd = 1024;
  int first_query;
  uint32 block;  // of dq_sum, where the tile begins
  int flags;     // bit i: the mask hides some score of group i
};
struct KeyTile {
  int first_key, head, batch;
};

// Blocks of 16 rows of dq_sum in 16 bits, each when all have added to it; then cleared for another head.
template <class T, HopperBackwardSpec kSpec, int kTogether>
__device__ __forceinline__ void convert_dq(const HopperBackwardParams& p) {
  constexpr int kDim = kSpec.head_dim;
  const Sizes& s = p.sizes;
  const uint32 heads_k = s.heads_q / s.group, pairs = s.batch * heads_k, blocks = uint32(s.group) * p.row_blocks;
  const Range tiles = tiles_of(Band(s), 0, s.seqlen_q, kSpec.block_k());  // those with a query
  const uint32 all = (tiles.last - tiles.first + 1) * 4 * kSpec.groups;
  while (true) {
    uint32 index;
    if (lane_index() == 0) index = atomicAdd(p.counters + 1, 1u);
    index = __shfl_sync(kFullWarp, index, 0);
    const uint32 pair = index / blocks, block = index % blocks, place = pair % p.window, round = pair / p.window;
    if (pair >= pairs) return;
    const Counters counters(p, place);
    if (lane_index() == 0)
      while (load_acquire(counters.added) < (round + 1) * all) __nanosleep(100);
    __syncwarp();
    const bool again = pair + p.window < pairs;
    const int head = pair % heads_k * s.group + block / p.row_blocks, first_row = block % p.row_blocks * 16;
    const Matrix target = head_of(p.dq, pair / heads_k, head, s.seqlen_q, s.head_dim);
    float4* const sum =
        reinterpret_cast<float4*>(p.dq_sum + (int64(place) * blocks + block) * (16 * kDim)) + lane_index();
#pragma unroll 1
    for (int first = 0; first < kDim / 16; first += kTogether) {
      float4 x[kTogether][2];
#pragma unroll
      for (int i = 0; i < 2 * kTogether; ++i) x[i / 2][i % 2] = __ldcg(sum + 32 * (2 * first + i));
      if (again) {
#pragma unroll
        for (int i = 0; i < 2 * kTogether; ++i) __stcg(sum + 32 * (2 * first + i), float4{0.f, 0.f, 0.f, 0.f});
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        uint32 words[4];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          words[j] = T::pack(s.scale * x[i][j].x, s.scale * x[i][j].y);
          words[2 + j] = T::pack(s.scale * x[i][j].z, s.scale * x[i][j].w);
        }
        const int col = 16 * (first + i);
        if constexpr (kSpec.access == 16) {
          transpose_quad(words);
          const int row = first_row + lane_index() / 4 + lane_index() % 4 / 2 * 8, c = col + lane_index() % 2 * 8;
          if (row < target.rows && c < target.cols)
            *reinterpret_cast<uint4*>(target.data + row * target.stride + 2 * c) = {words[0], words[1], words[2],
                                                                                    words[3]};
        } else {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const int row = first_row + Accumulator<8>::row(j / 2), c = col + j % 2 * 8 + Accumulator<8>::col();
            T* const to = reinterpret_cast<T*>(target.data + row * target.stride) + c;
            if (row >= target.rows || c >= target.cols) continue;
            if constexpr (kSpec.access >= 4) {
              *reinterpret_cast<uint32*>(to) = words[j];
            } else {
              to[0].bits = words[j];
              if (c + 1 < target.cols) to[1].bits = words[j] >> 16;
            }
          }
        }
      }
    }
    __syncwarp();
    if (again && lane_index() == 0) add_release(counters.freed, 1);
  }
}

// The gradients of keys that no query sees, by one warp.
__device__ inline void clear_rows(const Matrix& m, int first, int count) {
  for (int row = first; row < min(first + count, m.rows); ++row)
    for (int col = lane_index(); col < m.cols; col += 32)
      reinterpret_cast<unsigned short*>(m.data + row * m.stride)[col] = 0;
}

template <class T, HopperBackwardSpec kSpec>
__global__ void __launch_bounds__(kSpec.threads(), 1) hopper_backward(const __grid_constant__ HopperBackwardParams p) {
  constexpr int kGroups = kSpec.groups, kStages = kSpec.stages, kKeySlots = kSpec.key_slots;
  constexpr int kBlockQ = kSpec.block_q, kBlockK = kSpec.block_k(), kDim = kSpec.head_dim, kDimV = kSpec.head_dim_v;
  constexpr int kQBytes = tile_bytes(kBlockQ, kDim), kDoutBytes = tile_bytes(kBlockQ, kDimV);
  constexpr int kKBytes = tile_bytes(kBlockK, kDim), kVBytes = tile_bytes(kBlockK, kDimV);
  constexpr int kDsBytes = tile_bytes(kBlockK, kBlockQ), kStatisticBytes = 8 * kBlockQ;
  // What a group computes of dq: 64 queries, or 64 columns of all.
  constexpr bool kByQueries = kBlockQ == 64 * kGroups;
  constexpr int kDqCols = 64;
  static_assert(kByQueries ? kDim == 64 : kBlockQ == 64 && kDim == 64 * kGroups, "dq is shared among the groups");
  constexpr uint32 kNone = ~0u;

  extern __shared__ __align__(1024) char shared[];
  __shared__ uint64 barriers[4 * kKeySlots + 4 * kStages + 4];
  __shared__ Job jobs[kStages];
  __shared__ KeyTile key_tiles[kKeySlots];
  const uint32 k_base = (shared_address(shared) + 1023) & ~1023u, v_base = k_base + kKeySlots * kKBytes;
  const uint32 q_base = v_base + kKeySlots * kVBytes, dout_base = q_base + kStages * kQBytes;
  const uint32 ds_base = dout_base + kStages * kDoutBytes, staging_base = ds_base + 2 * kDsBytes;
  const uint32 statistics_base = staging_base + (kSpec.reduction == 2 ? kBlockQ * kDim * 4 : 0);
  Ring<kKeySlots> keys(shared_address(barriers)), values(shared_address(barriers + 2 * kKeySlots));
  Ring<kStages> queries(shared_address(barriers + 4 * kKeySlots));  // with jobs and statistics
  Ring<kStages> douts(shared_address(barriers + 4 * kKeySlots + 2 * kStages));
  Ring<2> ds_ring(shared_address(barriers + 4 * kKeySlots + 4 * kStages));  // dS^T, from all groups to all groups
  if (threadIdx.x == 0) {
    keys.init(4 * kGroups), values.init(4 * kGroups), queries.init(4 * kGroups), douts.init(4 * kGroups);
    ds_ring.init(4 * kGroups, 4 * kGroups);
    fence_barrier_init();  // for the copy engine; for the other threads the barrier below
  }
  __syncthreads();

  const Sizes& s = p.sizes;
  const int role = __shfl_sync(kFullWarp, threadIdx.x / 128, 0);

  if (role == 0) {
    give_registers<kSpec.copying_registers()>();
    if (warp_index() > 0) return convert_dq<T, kSpec, 1>(p);
    const int heads_k = s.heads_q / s.group, k_tiles = (s.seqlen_k + kBlockK - 1) / kBlockK;
    const uint32 works = uint32(s.batch) * heads_k * k_tiles;
    const Band band(s);
    Work work;
    bool more, free;  // whether there is a work, whether its place in dq_sum is free
    Range seen;
    const auto look = [&] {
      const int pair = work.batch * heads_k + work.head;
      free = load_acquire(Counters(p, pair % p.window).freed) >= uint32(pair / p.window * s.group) * p.row_blocks;
    };
    const auto wait_until_free = [&] {
      for (; !free; look()) __nanosleep(100);
      __syncwarp();
    };
    const auto next = [&] {  // work, of those with a query
      while (true) {
        uint32 index;
        if (lane_index() == 0) index = atomicAdd(p.counters, 1u);
        index = __shfl_sync(kFullWarp, index, 0);
        more = index < works;
        if (!more) return;
        work = find_work(index, k_tiles, s.batch, heads_k, s.section, false);
        const int first_key = work.tile * kBlockK;
        seen = queries_of_any(band, {first_key, min(first_key + kBlockK, s.seqlen_k) - 1});
        look();
        if (seen.last >= seen.first) return;
        clear_rows(head_of(p.dk, work.batch, work.head, s.seqlen_k, s.head_dim), first_key, kBlockK);
        clear_rows(head_of(p.dv, work.batch, work.head, s.seqlen_k, s.head_dim_v), first_key, kBlockK);
      }
    };
    next();
    while (more) {
      wait_until_free();
      const Work present = work;
      const int first_key = work.tile * kBlockK, place = (work.batch * heads_k + work.head) % p.window;
      const int first_tile = seen.first / kBlockQ, tiles = seen.last / kBlockQ - first_tile + 1;
      int tile = p.rotated ? first_tile + int(int64(work.tile) * tiles / k_tiles) : first_tile, head = 0, in_head = 0;
#pragma unroll 1
      while (true) {
        const bool begins = head == 0 && in_head == 0, last = head == s.group - 1 && in_head == tiles - 1;
        const int slot = queries.slot(), first = tile * kBlockQ;
        if (last) next();
        barrier_wait(queries.empty(slot), queries.parity() ^ 1);
        if (lane_index() == 0) {
          // A block must not keep its dq while it waits for the place of another head, which could wait for this one;
          // nor the keys of two works, each with one tile, while it waits for those of a third.
          int flags = last ? kKeySlots > 1 && more && free && !begins ? Job::kLast : Job::kLast | Job::kDrains : 0;
#pragma unroll
          for (int group = 0; group < kGroups; ++group) {
            const int key = first_key + 64 * group;
            const Range seen_by_all = queries_of_all(band, {key, key + 63});
            if (first < seen_by_all.first || first + kBlockQ - 1 > seen_by_all.last) flags |= 1 << group;
          }
          jobs[slot] = {first, uint32((place * s.group + head) * p.row_blocks + first / 16), flags};
          const uint32 full = queries.full(slot);
          barrier_expect(full, kQBytes + kStatisticBytes);
          copy_tile<kBlockQ, kDim>(q_base + slot * kQBytes, p.q_map, full, first, present.head * s.group + head,
                                   present.batch);
          copy_bytes(
              statistics_base + slot * kStatisticBytes,
              p.statistics +
                  ((int64(present.batch) * s.heads_q + present.head * s.group + head) * p.row_blocks + first / 16) * 32,
              full, kStatisticBytes);
          if (begins) {
            const uint32 v = v_base + values.slot() * kVBytes;
            copy_tile<kBlockK, kDimV>(v, p.v_map, values.acquire(kVBytes), first_key, present.head, present.batch);
          }
          const uint32 dout = dout_base + slot * kDoutBytes;
          copy_tile<kBlockQ, kDimV>(dout, p.dout_map, douts.acquire(kDoutBytes), first, present.head * s.group + head,
                                    present.batch);
          if (begins) {
            const int slot = keys.slot();
            barrier_wait(keys.empty(slot), keys.parity() ^ 1);
            key_tiles[slot] = {first_key, present.head, present.batch};
            barrier_expect(keys.full(slot), kKBytes);
            copy_tile<kBlockK, kDim>(k_base + slot * kKBytes, p.k_map, keys.full(slot), first_key, present.head,
                                     present.batch);
          }
        }
        __syncwarp();
        queries.advance(), douts.advance();
        if (begins) keys.advance(), values.advance();
        if (last) break;
        if (++tile == first_tile + tiles) tile = first_tile;
        if (++in_head == tiles) in_head = 0, ++head;
      }
    }
    if (lane_index() == 0) {
      barrier_wait(queries.empty(queries.slot()), queries.parity() ^ 1);
      jobs[queries.slot()].flags = Job::kEnd;
      barrier_arrive(queries.full(queries.slot()));
    }
    return;
  }

  take_registers<kSpec.registers()>();
  const int group = role - 1;
  const auto warp_row = [] { return int(opaque(threadIdx.x) / 32 % 4 * 16); };
  const Turns<kSpec.ping_pong ? kGroups : 1> turns = {group, 1};
  turns.open();
  Accumulator<kDim> dk;
  Accumulator<kDimV> dv;
  Accumulator<kBlockQ> prob, ds;
  Accumulator<kDqCols> dq;
  uint32 prob_operand[kBlockQ / 16][4], ds_operand[kBlockQ / 16][4];
  dk.clear(), dv.clear();

  // All rings of queries count alike. `ahead` is 1 for the next tile, -1 for the one before.
  const auto issue_scores = [&](int ahead, int keys_ahead) {  // S^T = k q^T
    const uint64 q = row_operand<kBlockQ>(q_base + queries.slot(ahead) * kQBytes, 0);
    const uint64 k = row_operand<kBlockK>(k_base + keys.slot(keys_ahead) * kKBytes + group * 64 * kRowBytes, 0);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step)
      Wgmma<T, kBlockQ>::dot_rows(prob.x, row_step<kBlockK>(k, step), row_step<kBlockQ>(q, step), step > 0);
    wgmma_commit();
  };
  const auto issue_ds = [&](int ahead, int keys_ahead) {  // dP^T = v dout^T
    const uint64 dout = row_operand<kBlockQ>(dout_base + queries.slot(ahead) * kDoutBytes, 0);
    const uint64 v = row_operand<kBlockK>(v_base + keys.slot(keys_ahead) * kVBytes + group * 64 * kRowBytes, 0);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kDimV / 16; ++step)
      Wgmma<T, kBlockQ>::dot_rows(ds.x, row_step<kBlockK>(v, step), row_step<kBlockQ>(dout, step), step > 0);
    wgmma_commit();
  };
  const auto issue_dv = [&] {  // dv += P^T dout
    const uint64 dout = column_operand<kBlockQ>(dout_base + queries.slot() * kDoutBytes, 0);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kBlockQ / 16; ++step)
      Wgmma<T, kDimV>::times(dv.x, prob_operand[step], column_step(dout, step));
    wgmma_commit();
  };
  const auto issue_dk = [&] {  // dk += dS^T q
    const uint64 q = column_operand<kBlockQ>(q_base + queries.slot() * kQBytes, 0);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kBlockQ / 16; ++step) Wgmma<T, kDim>::times(dk.x, ds_operand[step], column_step(q, step));
    wgmma_commit();
  };
  const auto issue_dq = [&](int ahead, int keys_ahead) {  // dq = dS k
    const uint64 left = column_operand<kBlockK>(
        ds_base + ds_ring.slot(ahead) * kDsBytes + (kByQueries ? group * kBlockK * kRowBytes : 0), 0);
    const uint64 right = column_operand<kBlockK>(
        k_base + keys.slot(keys_ahead) * kKBytes + (kByQueries ? 0 : group * kBlockK * kRowBytes), 0);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kBlockK / 16; ++step)
      Wgmma<T, kDqCols>::transposed_times(dq.x, column_step(left, step), column_step(right, step), step > 0);
    wgmma_commit();
  };
  const auto add_dq = [&](uint32 block) {
    const int warp = opaque(threadIdx.x) / 32 % 4;
    float* const target = p.dq_sum + int64(block + (kByQueries ? 4 * group : 0) + warp) * (16 * kDim) +
                          (kByQueries ? 0 : group * 16 * kDqCols);
    if constexpr (kSpec.reduction == 1) {
#pragma unroll
      for (int j = 0; j < kDqCols / 8; ++j) reduce_add(target + 128 * j + 4 * lane_index(), dq.x[j]);
    } else if constexpr (kSpec.reduction == 2) {
      const uint32 staging = staging_base + (4 * group + warp) * (16 * kDqCols * 4);
      if (lane_index() == 0) wait_for_reads();
      __syncwarp();
#pragma unroll
      for (int j = 0; j < kDqCols / 8; ++j) store_shared(staging + 512 * j + 16 * lane_index(), dq.x[j]);
      fence_async();
      __syncwarp();
      if (lane_index() == 0) add_bytes(target, staging, 16 * kDqCols * 4);
    }
  };
  const auto tell_added = [&](uint32 block) {  // that this warp has no more for its head
    if constexpr (kSpec.reduction == 2) {
      if (lane_index() == 0) wait_for_writes(), fence_async();
    }
    __syncwarp();
    if (lane_index() == 0) add_release(Counters(p, block / (s.group * p.row_blocks)).added, 1);
  };
  const auto store_gradients = [&](int keys_ahead) {
    const KeyTile& tile = key_tiles[keys.slot(keys_ahead)];
    const int first_key = tile.first_key + 64 * group + warp_row(), batch = tile.batch, head = tile.head;
    const Matrix dk_target = head_of(p.dk, batch, head, s.seqlen_k, s.head_dim);
    const Matrix dv_target = head_of(p.dv, batch, head, s.seqlen_k, s.head_dim_v);
    dk.scale_rows(s.scale, s.scale);
    if constexpr (kSpec.access == 16) {
      store_wide<T>(dk, dk_target, first_key, 0);
      store_wide<T>(dv, dv_target, first_key, 0);
    } else {
      store_direct<T, kSpec.access>(dk, dk_target, first_key, 0);
      store_direct<T, kSpec.access>(dv, dv_target, first_key, 0);
    }
    dk.clear(), dv.clear();
  };
  const auto weigh = [&](int flags) {
    const float4* const statistics = reinterpret_cast<const float4*>(
        shared + (statistics_base + queries.slot() * kStatisticBytes - shared_address(shared)) +
        16 * (lane_index() % 4));
    wgmma_wait<1>();  // S^T is there
    if (flags >> group & 1) {
      const Band band(s);
      prob.hide(key_tiles[keys.slot()].first_key + 64 * group + warp_row(), jobs[queries.slot()].first_query,
                s.scale_log2 < 0.f ? kInfinity : -kInfinity, [&](int key) { return band.queries(key); });
    }
#pragma unroll
    for (int step = 0; step < kBlockQ / 16; ++step) {
      const float4 lse = statistics[step / 4 * 32 + step % 4 * 4];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float& x = prob.x[2 * step + i / 4][i % 4];
        x = exp2f(fmaf(x, s.scale_log2, -(i < 4 ? i % 2 ? lse.y : lse.x : i % 2 ? lse.w : lse.z)));
      }
    }
    // The exponentials while dP^T is being made: the compiler moves them past its wait if there is no other.
    barrier_wait(ds_ring.empty(ds_ring.slot()), ds_ring.parity() ^ 1);
    wgmma_wait<0>();  // dP^T is there
#pragma unroll
    for (int step = 0; step < kBlockQ / 16; ++step) {
      const float4 delta = statistics[step / 4 * 32 + 16 + step % 4 * 4];
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
    queries.wait();
    if (jobs[queries.slot()].flags & Job::kEnd) return false;
    keys.wait();
    issue_scores(0, 0);
    douts.wait();
    values.wait();
    issue_ds(0, 0);
    return true;
  };

  // Blocks of dq_sum: of the tile before, whose dq is to be made; the last one of a head, not told of yet.
  uint32 previous = kNone, told = kNone;
  bool previous_last = false;
  const auto take_dq = [&] {
    if (previous == kNone) return;
    if (told != kNone) tell_added(told);
    told = previous_last ? previous : kNone;
    add_dq(previous);
  };
  const auto advance = [&](bool last) {
    queries.advance(), douts.advance(), ds_ring.advance();
    if (last) keys.advance(), values.advance();
  };
#pragma unroll 1
  while (begin()) {
#pragma unroll 1
    while (true) {  // S^T and dP^T are being made
      const int flags = jobs[queries.slot()].flags;
      const bool last = flags & Job::kLast;
      weigh(flags);
      if (last) values.release();
#pragma unroll
      for (int step = 0; step < kBlockQ / 16; ++step)  // rows of keys
        store_matrix(block_row<kBlockK>(ds_base + ds_ring.slot() * kDsBytes, 64 * group + warp_row(), step),
                     ds_operand[step]);
      fence_async_shared();
      __syncwarp();
      if (lane_index() == 0) barrier_arrive(ds_ring.full(ds_ring.slot()));

      turns.wait();
      issue_dv();
      // Of the tile before; where there is none, the product of whatever is there goes nowhere.
      if (previous != kNone) ds_ring.wait(-1);
      issue_dq(-1, previous_last ? -1 : 0);
      issue_dk();
      wgmma_wait<1>();  // dv and dq are there
      douts.release();
      if (previous != kNone) ds_ring.release(-1);
      if (previous_last) keys.release(-1);
      if (flags & Job::kDrains) break;
      queries.wait(1);
      if (last) keys.wait(1);
      issue_scores(1, last);
      if constexpr (kSpec.ping_pong == 2) turns.pass_on();
      take_dq();
      if (kKeySlots > 1 && last) {
        wgmma_wait<0>();
        store_gradients(0);
      } else {
        wgmma_wait<1>();  // dk is there
      }
      previous = jobs[queries.slot()].block, previous_last = last;
      queries.release();
      douts.wait(1);
      if (last) values.wait(1);
      issue_ds(1, last);
      if constexpr (kSpec.ping_pong == 1) turns.pass_on();
      advance(last);
    }
    turns.pass_on();
    take_dq();
    wgmma_wait<0>();
    const uint32 block = jobs[queries.slot()].block;
    ds_ring.wait();
    issue_dq(0, 0);
    queries.release();
    wgmma_wait<0>();
    store_gradients(0);
    ds_ring.release(), keys.release();
    if (told != kNone) tell_added(told);
    add_dq(block);
    tell_added(block);
    previous = told = kNone, previous_last = false;
    advance(true);
  }
  turns.close();
  if constexpr (kSpec.reduction == 2) {
    if (lane_index() == 0) wait_for_writes();
  }
  convert_dq<T, kSpec, 4>(p);
}

}  // namespace cupyflash
