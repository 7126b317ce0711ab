// Gradients on Hopper: the loop of sm80/backward.cuh with its roles split. One warp copies q, dout, lse and delta; each
// warpgroup owns 64 keys, keeps P^T and dS^T as register operands of dv and dk, and computes its part of dq from the dS
// of all, which goes through shared memory.
#pragma once

#include "core/epilogue.cuh"
#include "core/spec.cuh"
#include "core/work.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/tile.cuh"
#include "sm90/wgmma.cuh"

namespace cupyflash {

struct HopperBackwardParams {
  TensorMap q, k, v, dout;
  BackwardParams rest;
};

template <class T, HopperBackwardSpec kSpec>
__global__ void __launch_bounds__(128 * (kSpec.groups + 1), 1)
    hopper_backward(const __grid_constant__ HopperBackwardParams params) {
  constexpr int kBlockQ = kSpec.block_q, kBlockK = kSpec.block_k, kDim = kSpec.head_dim, kDimV = kSpec.head_dim_v;
  constexpr int kQBytes = tile_bytes(kBlockQ, kDim), kDoutBytes = tile_bytes(kBlockQ, kDimV);
  constexpr int kStageBytes = kQBytes + kDoutBytes;
  constexpr int kKBytes = tile_bytes(kBlockK, kDim), kVBytes = tile_bytes(kBlockK, kDimV);
  constexpr int kDsBytes = tile_bytes(kBlockK, kBlockQ);
  // A group computes 64 queries of dq where there are as many for each, else all queries and a part of the columns.
  constexpr bool kSplitQueries = kBlockQ == 64 * kSpec.groups;
  constexpr int kDqCols = kSplitQueries ? kDim : kDim / kSpec.groups;
  static_assert(kBlockK == 64 * kSpec.groups && (kSplitQueries || kBlockQ == 64), "64 keys and 64 queries a group");

  const BackwardParams& p = params.rest;
  extern __shared__ __align__(1024) char shared[];
  __shared__ uint64 barriers[1 + 2 * kSpec.stages];
  const uint32 base = (shared_address(shared) + 1023) & ~1023u;
  const uint32 k_base = base, v_base = k_base + kKBytes, stage_base = v_base + kVBytes;
  const uint32 ds_base = stage_base + kSpec.stages * kStageBytes;  // two, so that one barrier a tile is enough
  float* const statistics = reinterpret_cast<float*>(shared + (ds_base + 2 * kDsBytes - shared_address(shared)));
  Ring<kSpec.stages> ring(shared_address(barriers + 1));
  const uint32 keys_full = shared_address(barriers);
  if (threadIdx.x == 0) {
    barrier_init(keys_full, 1);
    for (int i = 0; i < kSpec.stages; ++i)  // the copying warp's lanes arrive for the statistics that they store
      barrier_init(ring.full(i), 1 + 32), barrier_init(ring.empty(i), 4 * kSpec.groups);
    fence_barrier_init();  // for the copy engine; for the other threads the barrier below
  }
  __syncthreads();

  const Sizes& s = p.sizes;
  const int k_tiles = (s.seqlen_k + kBlockK - 1) / kBlockK;
  const Work work = find_work(blockIdx.x, k_tiles, s.batch, s.heads_q / s.group, s.section, false);
  const Band band(s);
  const int first_key = work.tile * kBlockK, first_head = work.head * s.group;
  const Range seen = queries_of_any(band, {first_key, min(first_key + kBlockK, s.seqlen_k) - 1});
  const int first_tile = seen.first / kBlockQ;
  const int last_tile = seen.last < seen.first ? first_tile - 1 : seen.last / kBlockQ;
  const int role = __shfl_sync(kFullWarp, threadIdx.x / 128, 0);

  if (role == 0) {  // producer
    give_registers<kSpec.groups == 3 ? 32 : 24>();
    if (threadIdx.x >= 32 || last_tile < first_tile) return;
    if (threadIdx.x == 0) {
      barrier_expect(keys_full, kKBytes + kVBytes);
      copy_tile<kBlockK, kDim>(k_base, params.k, keys_full, first_key, work.head, work.batch);
      copy_tile<kBlockK, kDimV>(v_base, params.v, keys_full, first_key, work.head, work.batch);
    }
    for (int head = first_head; head < first_head + s.group; ++head)
      for (int tile = first_tile; tile <= last_tile; ++tile) {
        const int stage = ring.stage();
        barrier_wait(ring.empty(stage), ring.parity() ^ 1);
        if (threadIdx.x == 0) {
          const uint32 q = stage_base + stage * kStageBytes;
          barrier_expect(ring.full(stage), kStageBytes);
          copy_tile<kBlockQ, kDim>(q, params.q, ring.full(stage), tile * kBlockQ, head, work.batch);
          copy_tile<kBlockQ, kDimV>(q + kQBytes, params.dout, ring.full(stage), tile * kBlockQ, head, work.batch);
        }
        float* const lse = statistics + stage * 2 * kBlockQ;
#pragma unroll
        for (int i = threadIdx.x; i < kBlockQ; i += 32) {
          const int row = tile * kBlockQ + i;
          float value = kInfinity, delta = 0.f;  // of a row that does not exist or sees no key: P is 0
          if (row < s.seqlen_q) {
            const float natural = p.lse.at(work.batch, head)[row * p.lse.row];
            if (natural != -kInfinity) value = natural * kLog2E;
            delta = p.delta.at(work.batch, head)[row * p.delta.row];
          }
          lse[i] = value, lse[kBlockQ + i] = delta;
        }
        barrier_arrive(ring.full(stage));
        ring.advance();
      }
    return;
  }

  take_registers<kSpec.groups == 3 ? 160 : 240>();
  const int group = role - 1, warp_row = warp_index() % 4 * 16, key_row = 64 * group + warp_row;
  constexpr int kAll = 128 * kSpec.groups;
  const int q_blocks = (s.seqlen_q + 15) / 16;

  Accumulator<kDim> dk;
  Accumulator<kDimV> dv;
  Accumulator<kBlockQ> prob, ds;
  Accumulator<kDqCols> dq;
  uint32 prob_operand[kBlockQ / 16][4], ds_operand[kBlockQ / 16][4];
  dk.clear(), dv.clear();
  if (last_tile >= first_tile) barrier_wait(keys_full, 0);

  int buffer = 0;
  for (int head = first_head; head < first_head + s.group; ++head)
#pragma unroll 1
    for (int tile = first_tile; tile <= last_tile; ++tile) {
      const uint32 q = stage_base + ring.stage() * kStageBytes, dout = q + kQBytes;
      const uint32 ds_tile = ds_base + buffer * kDsBytes;
      const float* const lse = statistics + ring.stage() * 2 * kBlockQ;
      const int first_query = tile * kBlockQ;
      ring.wait();
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < kDim / 16; ++step)  // S^T = k q^T
        Wgmma<T, kBlockQ>::dot_rows(prob.x, row_operand<kBlockK>(k_base + group * 64 * kRowBytes, step),
                                    row_operand<kBlockQ>(q, step), step > 0);
      wgmma_commit();
#pragma unroll
      for (int step = 0; step < kDimV / 16; ++step)  // dP^T = v dout^T
        Wgmma<T, kBlockQ>::dot_rows(ds.x, row_operand<kBlockK>(v_base + group * 64 * kRowBytes, step),
                                    row_operand<kBlockQ>(dout, step), step > 0);
      wgmma_commit();

      wgmma_wait<1>();  // S^T is there
      const Range seen_by_all = queries_of_all(band, {first_key + 64 * group, first_key + 64 * group + 63});
      if (first_query < seen_by_all.first || first_query + kBlockQ - 1 > seen_by_all.last ||
          first_key + 64 * group + 64 > s.seqlen_k)
        prob.hide(first_key + key_row, first_query, s.scale_log2 < 0.f ? kInfinity : -kInfinity,
                  [&](int key) { return band.queries(key); });
#pragma unroll
      for (int j = 0; j < kBlockQ / 8; ++j) {
        const float2 l = *reinterpret_cast<const float2*>(lse + 8 * j + prob.col());
#pragma unroll
        for (int i = 0; i < 4; ++i) prob.x[j][i] = exp2f(fmaf(prob.x[j][i], s.scale_log2, i % 2 ? -l.y : -l.x));
      }
#pragma unroll
      for (int step = 0; step < kBlockQ / 16; ++step) prob.template operand<T>(prob_operand[step], step);
      wgmma_wait<0>();  // dP^T is there
#pragma unroll
      for (int j = 0; j < kBlockQ / 8; ++j) {
        const float2 delta = *reinterpret_cast<const float2*>(lse + kBlockQ + 8 * j + prob.col());
#pragma unroll
        for (int i = 0; i < 4; ++i) ds.x[j][i] = prob.x[j][i] * (ds.x[j][i] - (i % 2 ? delta.y : delta.x));
      }
#pragma unroll
      for (int step = 0; step < kBlockQ / 16; ++step) ds.template operand<T>(ds_operand[step], step);

      wgmma_fence();
#pragma unroll
      for (int step = 0; step < kBlockQ / 16; ++step)
        Wgmma<T, kDimV>::times(dv.x, prob_operand[step], column_operand<kBlockQ>(dout, step));
      wgmma_commit();
    // dS^T to shared memory, rows of keys, in the swizzle that wgmma expects: unit u of row r is at u ^ (r % 8).
#pragma unroll
      for (int step = 0; step < kBlockQ / 16; ++step)
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // register i: row half i % 2, columns 8 * (2 * step + i / 2)
          const int row = key_row + ds.row(i % 2), unit = 2 * step + i / 2;
          const uint32 panel = ds_tile + unit / 8 * kBlockK * kRowBytes;
          store_shared(panel + row * kRowBytes + (unit % 8 ^ row % 8) * 16 + 2 * ds.col(), ds_operand[step][i]);
        }
      fence_async_shared();
      named_sync(1, kAll);  // dS of all groups is there, and nobody reads the other buffer any more

      const uint32 left = ds_tile + (kSplitQueries ? group * kBlockK * kRowBytes : 0);
      const uint32 right = k_base + (kSplitQueries ? 0 : group * (kDqCols / 64) * kBlockK * kRowBytes);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < kBlockK / 16; ++step)  // dq = dS k
        Wgmma<T, kDqCols>::transposed_times(dq.x, column_operand<kBlockK>(left, step),
                                            column_operand<kBlockK>(right, step), step > 0);
      wgmma_commit();
#pragma unroll
      for (int step = 0; step < kBlockQ / 16; ++step)
        Wgmma<T, kDim>::times(dk.x, ds_operand[step], column_operand<kBlockQ>(q, step));
      wgmma_commit();
      wgmma_wait<1>();  // dv and dq are there
      const int block = (first_query + (kSplitQueries ? 64 * group : 0) + warp_row) / 16;
      if (block < q_blocks) {
        const int64 pair = int64(work.batch) * s.heads_q + head;
        const int first_col = kSplitQueries ? 0 : group * kDqCols;
        float* target = p.dq_sum + ((pair * q_blocks + block) * (kDim / 8) + first_col / 8) * 128 + 4 * lane_index();
#pragma unroll
        for (int j = 0; j < kDqCols / 8; ++j) reduce_add(target + 128 * j, dq.x[j]);
      }
      wgmma_wait<0>();  // dk is there; q, dout and the registers of the operands are free
      ring.release();
      ring.advance();
      buffer ^= 1;
    }

  dk.scale_rows(s.scale, s.scale);
  const Matrix dk_target = head_of(p.dk, work.batch, work.head, s.seqlen_k, s.head_dim);
  const Matrix dv_target = head_of(p.dv, work.batch, work.head, s.seqlen_k, s.head_dim_v);
  if constexpr (kSpec.access == 16) {
    store_wide<T>(dk, dk_target, first_key + key_row, 0);
    store_wide<T>(dv, dv_target, first_key + key_row, 0);
  } else {
    store_direct<T, kSpec.access>(dk, dk_target, first_key + key_row, 0);
    store_direct<T, kSpec.access>(dv, dv_target, first_key + key_row, 0);
  }
}

}  // namespace cupyflash
