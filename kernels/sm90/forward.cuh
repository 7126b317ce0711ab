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
  TensorMap q, k, v;
  Array out;
  RowArray lse;
  Sizes sizes;
};

// The warpgroups issue their products one after the other, so that one computes its softmax while another multiplies.
// Barrier 1 + g opens for group g when the group before it has issued; barrier 0 is that of __syncthreads.
template <int kGroups>
struct Turns {
  static constexpr int kMeeting = 2 * 128;  // threads of the group that waits and of the one that passes on
  int group;

  __device__ __forceinline__ void open() const {
    if (kGroups > 1 && group == kGroups - 1) named_arrive(1, kMeeting);
  }
  __device__ __forceinline__ void wait() const {
    if (kGroups > 1) named_sync(1 + group, kMeeting);
  }
  __device__ __forceinline__ void pass_on() const {
    if (kGroups > 1) named_arrive(1 + (group + 1) % kGroups, kMeeting);
  }
  __device__ __forceinline__ void close() const {
    if (kGroups > 1 && group == 0) named_sync(1, kMeeting);
  }
};

template <class T, HopperForwardSpec kSpec>
__global__ void __launch_bounds__(128 * (kSpec.groups + 1), 1)
    hopper_forward(const __grid_constant__ HopperForwardParams p) {
  constexpr int kBlockQ = 64 * kSpec.groups, kBlockK = kSpec.block_k, kDim = kSpec.head_dim, kDimV = kSpec.head_dim_v;
  constexpr int kQBytes = tile_bytes(kBlockQ, kDim), kKBytes = tile_bytes(kBlockK, kDim);
  constexpr int kVBytes = tile_bytes(kBlockK, kDimV), kStages = kSpec.stages;
  // Registers of a thread: 128 threads of each role share the 65536 of the multiprocessor.
  constexpr int kProducerRegisters = kSpec.groups == 3 ? 32 : 24;
  constexpr int kConsumerRegisters = kSpec.groups == 3 ? 160 : 240;

  extern __shared__ __align__(1024) char shared[];
  __shared__ uint64 barriers[2 + 4 * kStages];
  const uint32 q_base = (shared_address(shared) + 1023) & ~1023u, k_base = q_base + kQBytes;
  const uint32 v_base = k_base + kStages * kKBytes;
  Ring<1> q_ring(shared_address(barriers));
  Ring<kStages> k_ring(shared_address(barriers + 2)), v_ring(shared_address(barriers + 2 + 2 * kStages));
  if (threadIdx.x == 0) {
    q_ring.init(4 * kSpec.groups), k_ring.init(4 * kSpec.groups), v_ring.init(4 * kSpec.groups);
    fence_barrier_init();  // for the copy engine; for the other threads the barrier below
  }
  __syncthreads();

  const Sizes& s = p.sizes;
  const Band band(s);
  const int q_tiles = (s.seqlen_q + kBlockQ - 1) / kBlockQ;
  const uint32 works = uint32(s.batch) * s.heads_q * q_tiles;
  const int role = __shfl_sync(kFullWarp, threadIdx.x / 128, 0);

  if (role == 0) {  // producer
    give_registers<kProducerRegisters>();
    if (threadIdx.x > 0) return;
    prefetch_map(p.q), prefetch_map(p.k), prefetch_map(p.v);
    for (uint32 index = blockIdx.x; index < works; index += gridDim.x) {
      const Work work = find_work(index, q_tiles, s.batch, s.heads_q, s.section, true);
      const Range tiles = tiles_of(band, work.tile * kBlockQ, kBlockQ, kBlockK);
      const int head_k = work.head / s.group;
      if (tiles.last < tiles.first) continue;
      for (int tile = tiles.last; tile >= tiles.first; --tile) {
        const uint32 k_full = k_ring.acquire(kKBytes);
        copy_tile<kBlockK, kDim>(k_base + k_ring.stage() * kKBytes, p.k, k_full, tile * kBlockK, head_k, work.batch);
        k_ring.advance();
        if (tile == tiles.last) {
          const uint32 q_full = q_ring.acquire(kQBytes);
          copy_tile<kBlockQ, kDim>(q_base, p.q, q_full, work.tile * kBlockQ, work.head, work.batch);
          q_ring.advance();
        }
        const uint32 v_full = v_ring.acquire(kVBytes);
        copy_tile<kBlockK, kDimV>(v_base + v_ring.stage() * kVBytes, p.v, v_full, tile * kBlockK, head_k, work.batch);
        v_ring.advance();
      }
    }
  } else {  // consumers
    take_registers<kConsumerRegisters>();
    const int group = role - 1, warp_row = 64 * group + warp_index() % 4 * 16;
    const Turns<kSpec.ping_pong ? kSpec.groups : 1> turns = {group};
    turns.open();

    for (uint32 index = blockIdx.x; index < works; index += gridDim.x) {
      const Work work = find_work(index, q_tiles, s.batch, s.heads_q, s.section, true);
      const int first_row = work.tile * kBlockQ;
      const Range tiles = tiles_of(band, first_row, kBlockQ, kBlockK);
      const Range rows = {first_row + 64 * group, min(first_row + 64 * group + 64, s.seqlen_q) - 1};
      const Range seen_by_all = keys_of_all(band, rows);

      Accumulator<kDimV> out[1];
      Accumulator<kBlockK> scores[1];
      uint32 weights[kBlockK / 16][4];  // the 16-bit scores, as left operand
      OnlineSoftmax<1> softmax;
      out[0].clear();

      const auto issue_scores = [&] {  // q k^T
        const uint32 k = k_base + k_ring.stage() * kKBytes;
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < kDim / 16; ++step)
          Wgmma<T, kBlockK>::dot_rows(scores[0].x, row_operand<kBlockQ>(q_base + group * 64 * kRowBytes, step),
                                      row_operand<kBlockK>(k, step), step > 0);
        wgmma_commit();
      };
      const auto issue_out = [&] {  // out += weights v
        const uint32 v = v_base + v_ring.stage() * kVBytes;
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < kBlockK / 16; ++step)
          Wgmma<T, kDimV>::times(out[0].x, weights[step], column_operand<kBlockK>(v, step));
        wgmma_commit();
      };
      const auto weigh = [&](int tile) {  // scores -> weights in float32; whether out must be rescaled
        const int first_key = tile * kBlockK;
        if (first_key < seen_by_all.first || first_key + kBlockK - 1 > seen_by_all.last)
          scores[0].hide(first_row + warp_row, first_key, -kInfinity, [&](int row) { return band.keys(row); });
        const bool raised = softmax.raise(scores, s.scale_log2);
        softmax.exponentiate(scores, s.scale_log2);
        return raised;
      };
      const auto round_weights = [&] {
#pragma unroll
        for (int step = 0; step < kBlockK / 16; ++step) scores[0].template operand<T>(weights[step], step);
      };

      if (tiles.last >= tiles.first) {
        q_ring.wait();
        k_ring.wait();
        turns.wait();
        issue_scores();
        turns.pass_on();
        wgmma_wait<0>();
        k_ring.release();
        if (tiles.last == tiles.first) q_ring.release();
        k_ring.advance();
        weigh(tiles.last);
        round_weights();
#pragma unroll 1
        for (int tile = tiles.last - 1; tile >= tiles.first; --tile) {
          k_ring.wait();
          turns.wait();
          issue_scores();
          v_ring.wait();
          issue_out();  // of the tile before
          turns.pass_on();
          wgmma_wait<1>();  // the scores are there; k is free, the product with v goes on
          k_ring.release();
          if (tile == tiles.first) q_ring.release();
          k_ring.advance();
          const bool raised = weigh(tile);
          wgmma_wait<0>();  // out is there; v and the registers of the weights are free
          v_ring.release();
          v_ring.advance();
          round_weights();
          if (raised) softmax.rescale(out);
        }
        v_ring.wait();
        issue_out();
        wgmma_wait<0>();
        v_ring.release();
        v_ring.advance();
        q_ring.advance();
      }

      float inverse[2], lse[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        softmax.finish(0, half, s.scale, inverse[half], lse[half]);
        const int row = first_row + warp_row + out[0].row(half);
        if (p.lse.data != nullptr && lane_index() % 4 == 0 && row < s.seqlen_q)
          p.lse.at(work.batch, work.head)[row * p.lse.row] = lse[half];
      }
      out[0].scale_rows(inverse[0], inverse[1]);
      const Matrix target = head_of(p.out, work.batch, work.head, s.seqlen_q, s.head_dim_v, kSpec.float32_out ? 4 : 2);
      if constexpr (kSpec.float32_out)
        store_direct<float, 4>(out[0], target, first_row + warp_row, 0);
      else if constexpr (kSpec.access == 16)
        store_wide<T>(out[0], target, first_row + warp_row, 0);
      else
        store_direct<T, kSpec.access>(out[0], target, first_row + warp_row, 0);
    }
    turns.close();
  }
}

}  // namespace cupyflash
