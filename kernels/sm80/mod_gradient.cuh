// Gradients of arrays that a ScoreMod captured. A block owns 16 queries a warp of one head and goes through the keys
// that they see: S and dP again, then ds = P (dP - delta), the gradient of what the function returns. For each of its
// reads the function is called once more, where that read alone has the derivative 1, and
//   gradient[what was read] += ds * d(result) / d(read)
// is added in float32, in no fixed order: by lane as long as it reads the same element, then by warp if all lanes do.
#pragma once

#include "any/dropout.cuh"
#include "any/logits.cuh"
#include "any/mods.cuh"
#include "core/blocks.cuh"
#include "core/score.cuh"
#include "core/spec.cuh"
#include "core/work.cuh"
#include "sm80/tile.cuh"

namespace cupyflash {

__device__ __forceinline__ void add_from_warp(float* target, float x) {
  const uint64 address = reinterpret_cast<uint64>(target);
  if (__all_sync(kFullWarp, address == __shfl_sync(kFullWarp, address, 0))) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(kFullWarp, x, step);
    if (lane_index() > 0) return;
  }
  if (target != nullptr) atomicAdd(target, x);
}

template <class T, ModGradientSpec kSpec, class Mods>
__global__ void __launch_bounds__(32 * kSpec.warps)
    mod_gradient(const __grid_constant__ ModifiedAt<BackwardParams, Mods, kSpec.mods_at> all) {
  const BackwardParams& p = all.params();
  const Mods& mods = all.mods();
  constexpr int kThreads = 32 * kSpec.warps, kAccess = kSpec.access, kBlockQ = 16 * kSpec.warps;
  constexpr int kBlockK = kSpec.block_k, kDim = kSpec.head_dim, kDimV = kSpec.head_dim_v;
  using QTile = Tile<kBlockQ, kDim>;
  using DoutTile = Tile<kBlockQ, kDimV>;
  using KTile = Tile<kBlockK, kDim>;
  using VTile = Tile<kBlockK, kDimV>;
  extern __shared__ __align__(1024) char shared[];
  const QTile q_tile(shared_address(shared));
  const DoutTile dout_tile(q_tile.base + QTile::kBytes);
  const KTile k_tile(dout_tile.base + DoutTile::kBytes);
  const VTile v_tile(k_tile.base + KTile::kBytes);

  const Sizes& s = p.sizes;
  const int q_tiles = (s.seqlen_q + kBlockQ - 1) / kBlockQ;
  const Work work = find_work(blockIdx.x, q_tiles, s.batch, s.heads_q, s.heads_q, true);
  const int batch = work.batch, head = work.head, head_k = head / s.group;
  const Band band(s);
  const ScoreChange<kSpec.softcap, kSpec.alibi, kSpec.bias != kNoBias> change = {p.score, s};
  const float slope = change.slope(batch, head);
  const int first_row = work.tile * kBlockQ, warp_row = first_row + 16 * warp_index();
  const Range tiles = tiles_of(band, first_row, kBlockQ, kBlockK);
  static_assert(!kSpec.blocks || kMaskTile % kBlockQ == 0, "the rows have the same blocks");
  const auto shown = ShownTiles<kSpec.blocks, kBlockK>::of(p.blocks, batch, head, first_row);
  const int first_tile = shown.up(tiles.first, tiles.last);
  if (tiles.last < first_tile) return;
  load_tile<kThreads, kAccess>(q_tile, head_of(p.q, batch, head, s.seqlen_q, s.head_dim), first_row);
  load_tile<kThreads, kAccess>(dout_tile, head_of(p.dout, batch, head, s.seqlen_q, s.head_dim_v), first_row);

  float lse[2], delta[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = warp_row + Accumulator<8>::row(half);
    lse[half] = kInfinity, delta[half] = 0.f;  // of a row that is not there or sees no key: P is 0
    if (row >= s.seqlen_q) continue;
    lse[half] = lse_in_base_2(p.lse.at(batch, head)[row * p.lse.row]);
    if constexpr (kSpec.packed)
      delta[half] =
          p.delta.data[(int64(batch) * s.heads_q + head) * statistic_rows(s.seqlen_q) * 2 + statistic_of(row) + 16];
    else
      delta[half] = p.delta.at(batch, head)[row * p.delta.row];
  }

#pragma unroll 1
  for (int tile = first_tile; tile <= tiles.last; tile = shown.up(tile + 1, tiles.last)) {
    const int first_key = tile * kBlockK;
    __syncthreads();  // every warp is done with the tiles before
    load_tile<kThreads, kAccess>(k_tile, head_of(p.k, batch, head_k, s.seqlen_k, s.head_dim), first_key);
    load_tile<kThreads, kAccess>(v_tile, head_of(p.v, batch, head_k, s.seqlen_k, s.head_dim_v), first_key);
    commit_copies();
    wait_copies<0>();
    __syncthreads();
    Accumulator<kBlockK> logits[1], prob, ds[1];
    logits[0].clear(), ds[0].clear();
    product<T, kDim / 16>(logits, Left(q_tile, 16 * warp_index()), RightTransposed(k_tile));
    product<T, kDimV / 16>(ds, Left(dout_tile, 16 * warp_index()), RightTransposed(v_tile));
    const Slant slant = change.slant(
        first_key, [&](int half) { return warp_row + prob.row(half) + p.score.diagonal; }, [&](int) { return slope; });
    if constexpr (kSpec.bias != kNoBias) {
      using Items = LogitItems<typename BiasItem<kSpec.bias>::Type>;
      const Items bias = Items::of(p.bias, batch, head, warp_row, first_key, s);
      change.template apply<1>(logits[0], slant, [&](int j, int i) { return bias_log2<kSpec.bias>(bias(j, i)); });
    } else {
      change.template apply<1>(logits[0], slant, [](int, int) { return 0.f; });
    }
    if constexpr (kSpec.dropout) {
      KeptFragment<Rows::kQueries, kBlockK> kept;
      kept.decide({p.dropout, batch, head}, warp_row, first_key);
      kept.drop(ds[0]);
      ds[0].scale_rows(p.dropout.scale, p.dropout.scale);
    }
    auto places = mod::Places<Rows::kQueries, kBlockK>::from(s, batch, head, warp_row, first_key);
    places.whole = kSpec.blocks && !kSpec.mask && !shown.in_part(tile);
#pragma unroll
    for (int j = 0; j < kBlockK / 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& logit = logits[0].x[j][i];
        logit *= kLn2;
        const float result = changed(mods, logit, places.template at<false>(j, i), places.whole);
        prob.x[j][i] = exp2f(logit_minus_lse(result, lse[i / 2]));
      }
    prob.hide(warp_row, first_key, 0.f, [&](int row) { return row < s.seqlen_q ? band.keys(row) : Range{0, -1}; });
    if constexpr (kSpec.mask)
      if (shown.in_part(tile)) {
        const auto seen = LogitItems<unsigned char>::of(p.mask, batch, head, warp_row, first_key, s);
#pragma unroll
        for (int j = 0; j < kBlockK / 8; ++j)
#pragma unroll
          for (int i = 0; i < 4; ++i)
            if (!seen(j, i)) prob.x[j][i] = 0.f;
      }
#pragma unroll
    for (int j = 0; j < kBlockK / 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float weight = prob.x[j][i];
        ds[0].x[j][i] = weight == 0.f ? 0.f : weight * (ds[0].x[j][i] - delta[i / 2]);
      }

    int reads = 1;
#pragma unroll 1
    for (int read = 0; __any_sync(kFullWarp, read < reads); ++read) {
      float* target = nullptr;
      float sum = 0.f;
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int j = 0; j < kBlockK / 8; ++j)
#pragma unroll
          for (int i = 2 * half; i < 2 * half + 2; ++i) {
            const float gradient = ds[0].x[j][i];
            if (gradient == 0.f) continue;
            mod::Trace trace = {read};
            const mod::Dual result = mods.traced(logits[0].x[j][i], places.template at<false>(j, i), trace);
            reads = max(reads, trace.count);
            if (trace.target == nullptr) continue;
            if (trace.target != target) {
              if (target != nullptr) atomicAdd(target, sum);
              target = trace.target, sum = 0.f;
            }
            sum = fmaf(gradient, result.tangent, sum);
          }
      add_from_warp(target, sum);
    }
  }
}

}  // namespace cupyflash
