// The gradient of a bias on Hopper: the sums of sm80/bias_gradient.cuh with their roles split. A cluster of blocks owns
// a tile of scores, of which each block computes 128 queries and 128 keys; its blocks read what they share once, each a
// part that the copy engine brings to all. One warpgroup copies; each of the others computes, for 64 queries,
//   S = q k^T    P = exp(scale S + bias - lse)    dP = dout v^T    sum += P (dP - delta)
// and stores a finished sum while the other one multiplies.
#pragma once

#include "any/bias_tiles.cuh"
#include "core/score.cuh"
#include "core/spec.cuh"
#include "sm90/backward_params.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/tile.cuh"
#include "sm90/wgmma.cuh"

namespace cupyflash {

// A tile of scores, as the copying thread says it.
struct SumStep {
  static constexpr int kEndsSum = 1, kUnseen = 2, kEnd = 4;  // kUnseen: nothing is added; kEnd: no tile
  int flags;
  int batch, head, row, col;  // of the cluster
};

// Where a block has what it computes, and with whom: the blocks of a cluster count along the keys first.
template <HopperBiasGradientSpec kSpec>
struct BlockPlace {
  static constexpr int kBlock = 128;  // queries and keys
  static constexpr uint32 kAlongK = (1u << kSpec.cluster_k) - 1;
  static constexpr uint32 kAlongQ = ((1u << kSpec.cluster()) - 1) / kAlongK;  // every cluster_k-th
  int q, k;                                                                   // in the cluster

  __device__ __forceinline__ explicit BlockPlace(int rank) : q(rank / kSpec.cluster_k), k(rank % kSpec.cluster_k) {}
  __device__ __forceinline__ int row(int of_cluster) const { return of_cluster + q * kBlock; }
  __device__ __forceinline__ int col(int of_cluster) const { return of_cluster + k * kBlock; }

  // The block's rows from `row` on of q or dout, or of k or v. What blocks share they copy to each other box by box.
  template <int kCols>
  __device__ __forceinline__ void copy_queries(uint32 target, const TensorMap& map, uint32 full, int row, int head,
                                               int batch) const {
    copy<kCols, 64, kSpec.cluster_k>(target, map, full, row, head, batch, k, kAlongK << q * kSpec.cluster_k);
  }
  template <int kCols>
  __device__ __forceinline__ void copy_keys(uint32 target, const TensorMap& map, uint32 full, int row, int head,
                                            int batch) const {
    copy<kCols, kSpec.box_k, kSpec.cluster_q>(target, map, full, row, head, batch, q, kAlongQ << k);
  }

 private:
  template <int kCols, int kBox, int kParts>
  __device__ __forceinline__ static void copy(uint32 target, const TensorMap& map, uint32 full, int row, int head,
                                              int batch, int part, uint32 blocks) {
    constexpr int kBoxes = kBlock / kBox;  // of a panel
#pragma unroll
    for (int i = 0; i < panels(kCols) * kBoxes; ++i) {
      const uint32 to = target + i * kBox * kRowBytes;
      const int col = 64 * (i / kBoxes), box_row = row + i % kBoxes * kBox;
      if constexpr (kParts == 1)
        copy_box(to, map, full, col, box_row, head, batch);
      else if (i % kParts == part)
        copy_box_to_all(to, map, full, col, box_row, head, batch, blocks);
    }
  }
};

// lse in base 2, and 16 further delta.
__device__ __forceinline__ const float* packed_statistics(const BackwardParams& p, int batch, int head, int row) {
  const int64 pair = int64(batch) * p.sizes.heads_q + head;
  return p.delta.data + pair * statistic_rows(p.sizes.seqlen_q) * 2 + statistic_of(row);
}

template <class T, HopperBiasGradientSpec kSpec>
__global__ void __cluster_dims__(kSpec.cluster(), 1, 1) __launch_bounds__(kSpec.threads(), 1)
    hopper_bias_gradient(const __grid_constant__ HopperBackwardParams p) {
  constexpr int kGroups = 2, kBlock = BlockPlace<kSpec>::kBlock;
  constexpr int kDim = kSpec.head_dim, kDimV = kSpec.head_dim_v, kSlots = kSpec.slots, kCluster = kSpec.cluster();
  constexpr int kPartBytes = tile_bytes(kBlock, kDim > kDimV ? kDim : kDimV), kSlotBytes = 2 * kPartBytes;
  constexpr int kSteps = 8;  // places for them: one is read until its sum is stored, when all slots may be of others
  using GroupLogits = Logits<kSpec.bias, kSpec.mask, 64, kBlock, kSpec.logit_slots>;
  static_assert(kSlots < kSteps);

  extern __shared__ __align__(1024) char shared[];
  __shared__ uint64 barriers[2 * kSlots + kGroups * GroupLogits::kBarriers];
  __shared__ SumStep steps[kSteps];
  const uint32 base = first_tile(shared);
  Ring<kSlots, kCluster> ring(shared_address(barriers));  // q and k, then dout and v
  const auto logits_of = [&](int group, uint32 count = 0) {
    return GroupLogits(base + kSlots * kSlotBytes + group * GroupLogits::kBytes,
                       shared_address(barriers + 2 * kSlots + group * GroupLogits::kBarriers), count);
  };
  if (threadIdx.x == 0) {
    ring.init(4 * kGroups * kCluster);
    for (int i = 0; i < kGroups; ++i) logits_of(i).ring.init(4);
    fence_barrier_init();  // for the copy engine; for the other threads the barrier below
  }
  if constexpr (kCluster > 1)
    cluster_sync();
  else
    __syncthreads();

  const Sizes& s = p.sizes;
  const Band band(s);
  const BlockPlace<kSpec> place(kCluster > 1 ? blockIdx.x % kCluster : 0);
  const int warpgroup = same_in_warp(threadIdx.x / 128);

  if (warpgroup == kGroups) {
    give_registers<kSpec.copying_registers()>();
    const Tiles<kBlock * kSpec.cluster_q, kBlock * kSpec.cluster_k> tiles = {p};
    auto walk = walk_of<false>(tiles, blockIdx.x / kCluster);
    if (threadIdx.x % 128 == 0) {
      uint32 count = 0;
      const auto tell = [&](int flags) {
        barrier_wait(ring.empty(ring.slot()), ring.parity() ^ 1);
        steps[count++ % kSteps] = {flags, walk.at[kBatches], walk.at[kHeads], walk.row(), walk.col()};
      };
      for (; walk.left > 0; walk.next()) {
        const bool seen = walk.seen(band), ends = walk.ends_sum();
        if (!seen && !ends) continue;
        tell((ends ? SumStep::kEndsSum : 0) | (seen ? 0 : SumStep::kUnseen));
        if (seen) {
          const int batch = walk.at[kBatches], head = walk.at[kHeads], head_k = head / s.group;
          const int row = place.row(walk.row()), col = place.col(walk.col());
          const auto slot = [&] { return base + ring.slot() * kSlotBytes; };
          const uint32 scores_full = ring.acquire(2 * tile_bytes(kBlock, kDim));
          place.template copy_queries<kDim>(slot(), p.q_map, scores_full, row, head, batch);
          place.template copy_keys<kDim>(slot() + kPartBytes, p.k_map, scores_full, col, head_k, batch);
          ring.advance();
          const uint32 products_full = ring.acquire(2 * tile_bytes(kBlock, kDimV));
          place.template copy_queries<kDimV>(slot(), p.dout_map, products_full, row, head, batch);
          place.template copy_keys<kDimV>(slot() + kPartBytes, p.v_map, products_full, col, head_k, batch);
          ring.advance();
        } else {
          barrier_arrive(ring.full(ring.slot()));
          ring.advance();
        }
      }
      tell(SumStep::kEnd);
      barrier_arrive(ring.full(ring.slot()));
    } else if (threadIdx.x % 128 == 32) {  // the bias of a sum is that of each of its tiles
      uint32 count = 0;
      bool has_bias = false;
      for (; walk.left > 0; walk.next()) {
        if (walk.seen(band) && (kSpec.mask || !has_bias)) {
#pragma unroll
          for (int i = 0; i < kGroups; ++i)
            logits_of(i, count).copy(
                p.bias_map, p.mask_map,
                {walk.at[kBatches], walk.at[kHeads], place.row(walk.row()) + 64 * i, place.col(walk.col())});
          ++count, has_bias = true;
        }
        if (walk.ends_sum()) has_bias = false;
      }
    }
    return;
  }

  take_registers<kSpec.registers()>();
  const int warp = warpgroup * 4 + warp_index() % 4;
  const Turns<kGroups> turns = {warpgroup, 1};
  turns.open();
  using Change = ScoreChange<kSpec.softcap, kSpec.alibi, true>;
  const Change change = {p.score, s};
  GroupLogits logits = logits_of(warpgroup);
  Accumulator<kBlock> sum[1], prob, dprob;
  sum[0].clear();
  uint32 count = 0;
  bool has_bias = false;

  const auto issue_scores = [&] {  // q k^T
    const uint32 slot = base + ring.slot() * kSlotBytes;
    const RowOperand<kBlock> q(slot + warpgroup * 64 * kRowBytes), k(slot + kPartBytes);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) Wgmma<T, kBlock>::dot_rows(prob.x, q[step], k[step], step > 0);
    wgmma_commit();
  };
  const auto issue_products = [&] {  // dout v^T
    const uint32 slot = base + ring.slot(1) * kSlotBytes;
    const RowOperand<kBlock> dout(slot + warpgroup * 64 * kRowBytes), v(slot + kPartBytes);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kDimV / 16; ++step) Wgmma<T, kBlock>::dot_rows(dprob.x, dout[step], v[step], step > 0);
    wgmma_commit();
  };
  const auto row_of_warp = [&](const SumStep& step) { return place.row(step.row) + 16 * warp; };
  const auto sum_of = [&](const SumStep& step) {
    constexpr int kWarps = 4 * kGroups;
    const int chunk = blockIdx.x / kCluster % p.dbias.chunks;
    return WarpSum{step.batch,
                   step.head,
                   row_of_warp(step),
                   place.col(step.col),
                   chunk,
                   place.q * kWarps + warp,
                   kSpec.cluster_q * kWarps,
                   place.k,
                   kSpec.cluster_k};
  };
  const auto release_logits = [&] {
    logits.release();
    has_bias = false;
  };
  // Of a row that is not there or sees no key: P is 0.
  const auto lse_of = [&](const SumStep& step, int half) {
    const int row = row_of_warp(step) + prob.row(half);
    if (row >= s.seqlen_q) return kInfinity;
    if constexpr (kSpec.packed) return packed_statistics(p, step.batch, step.head, row)[0];
    return lse_in_base_2(p.lse.at(step.batch, step.head)[row * p.lse.row]);
  };
  const auto delta_of = [&](const SumStep& step, int half) {
    const int row = row_of_warp(step) + prob.row(half);
    if (row >= s.seqlen_q) return 0.f;
    if constexpr (kSpec.packed) return packed_statistics(p, step.batch, step.head, row)[16];
    return p.delta.at(step.batch, step.head)[row * p.delta.row];
  };
  const auto add_tile = [&](const SumStep& step, bool ends_sum) {
    turns.wait();
    issue_scores();
    ring.wait(1);
    issue_products();
    turns.pass_on();

    // Softcap beside ALiBi has no registers left for delta during the exponentials.
    constexpr bool kDeltaAhead = !(kSpec.softcap && kSpec.alibi);
    float lse[2], delta[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      lse[half] = lse_of(step, half);
      if constexpr (kDeltaAhead) delta[half] = delta_of(step, half);
    }
    const float slope = change.slope(step.batch, step.head);

    if (kSpec.mask || !has_bias) logits.wait();
    has_bias = true;
    wgmma_wait<1>();  // the scores are there, dP goes on
    ring.release();
    const auto row_of = [&](const LogitMap& array) { return [&](int r) { return (warp % 4 * 16 + r) * array.row; }; };
    const Slant slant = change.slant(
        place.col(step.col), [&](int half) { return row_of_warp(step) + prob.row(half) + p.score.diagonal; },
        [&](int) { return slope; });
    auto bias = logits.row_bias(row_of(p.bias_map));
    constexpr int kPart = kSpec.softcap && kSpec.alibi ? 1 : 2;
    change.template apply<kPart>(prob, slant, [&](int j, int i) { return logit_minus_lse(bias(j, i), lse[i / 2]); });
#pragma unroll
    for (int j = 0; j < kBlock / 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) prob.x[j][i] = exp2f(prob.x[j][i]);
    const int row = row_of_warp(step), col = place.col(step.col);
    const Range by_all = keys_of_all(band, {row, min(row + 16, s.seqlen_q) - 1});
    if (row + 16 > s.seqlen_q || col < by_all.first || col + kBlock - 1 > by_all.last)
      prob.hide(row, col, 0.f, [&](int row) { return row < s.seqlen_q ? band.keys(row) : Range{0, -1}; });
    if constexpr (kSpec.mask) {
      Weights<kBlock> none;
      ScoreChange<false, false>{p.score, s}.hide_masked(prob, none, logits.row_mask(row_of(p.mask_map)));
    }
    if (kSpec.mask || ends_sum) release_logits();
    if constexpr (!kDeltaAhead) delta[0] = delta_of(step, 0), delta[1] = delta_of(step, 1);
    wgmma_wait<0>();
    ring.release(1);
    ring.advance(2);
#pragma unroll
    for (int j = 0; j < kBlock / 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& x = sum[0].x[j][i];
        x = fmaf(prob.x[j][i], dprob.x[j][i] - delta[i / 2], x);
      }
  };

#pragma unroll 1
  for (;; ++count) {
    ring.wait();
    const SumStep& step = steps[count % kSteps];
    const int flags = step.flags;
    if (flags & SumStep::kEnd) break;
    if (flags & SumStep::kUnseen) {
      if (has_bias) release_logits();
      ring.release();
      ring.advance();
    } else {
      add_tile(step, flags & SumStep::kEndsSum);
    }
    if (flags & SumStep::kEndsSum) {
      store_sum<kSpec.bias, true>(sum, p, sum_of(step));
      sum[0].clear();
    }
  }
  turns.close();
  if constexpr (kCluster > 1) cluster_sync();  // nobody leaves whom the others may still tell of a free slot
}

}  // namespace cupyflash
