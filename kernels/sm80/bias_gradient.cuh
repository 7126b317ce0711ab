// The gradient of a bias: dS before the derivative of softcap, summed over the axes along which the bias was broadcast.
//   S = q k^T    P = exp(scale S + bias - lse)    dP = dout v^T    dbias = sum of P (dP - delta)
// A block adds up all tiles of S that belong to one tile of dbias, in registers, and goes on to the next one:
//
//   bias (1, heads, seqlen_q, seqlen_k)    over the batches
//   bias (batch, 1, 1, seqlen_k)           over the tiles of queries and the heads; then over the rows of the tile
//
// Where tiles of dbias are few, some blocks share one: each of them, and each warp whose part of a tile has to be added
// to another's, writes a sum of its own, and a second kernel adds these. Every order is fixed, so that equal calls give
// equal bits.
#pragma once

#include "any/bias_tiles.cuh"
#include "any/dropout.cuh"
#include "any/mods.cuh"
#include "core/score.cuh"
#include "core/spec.cuh"
#include "sm80/tile.cuh"

namespace cupyflash {

template <class T, BiasGradientSpec kSpec, class Mods = NoMods>
__global__ void __launch_bounds__(32 * kSpec.warps, kSpec.blocks_per_sm)
    bias_gradient(const __grid_constant__ ModifiedAt<BackwardParams, Mods, kSpec.mods_at> all) {
  const BackwardParams& p = all.params();
  constexpr int kThreads = 32 * kSpec.warps, kAccess = kSpec.access, kBlockQ = kSpec.block_q, kBlockK = kSpec.block_k;
  constexpr int kDim = kSpec.head_dim, kDimV = kSpec.head_dim_v;
  constexpr int kWarpsQ = kSpec.warps_q, kWarpsK = kSpec.warps / kWarpsQ;
  constexpr int kRows = kBlockQ / kWarpsQ, kCols = kBlockK / kWarpsK, kRowTiles = kRows / 16;  // of a warp
  const int warp_q = warp_index() % kWarpsQ, warp_k = warp_index() / kWarpsQ;

  extern __shared__ __align__(1024) char shared[];
  const Tile<kBlockQ, kDim> q_tile(shared_address(shared));
  const Tile<kBlockQ, kDimV> dout_tile(q_tile.base + q_tile.kBytes);
  const Tile<kBlockK, kDim> k_tile(dout_tile.base + dout_tile.kBytes);
  const Tile<kBlockK, kDimV> v_tile(k_tile.base + k_tile.kBytes);
  uint32* const kept_words = reinterpret_cast<uint32*>(shared + (v_tile.base + v_tile.kBytes - q_tile.base));

  const Sizes& s = p.sizes;
  const Tiles<kBlockQ, kBlockK> tiles = {p};
  const Band band(s);
  using Change = ScoreChange<kSpec.softcap, kSpec.alibi, true, Mods>;
  const Change change = {p.score, s};

  static_assert(!kSpec.blocks || kMaskTile % kBlockQ == 0, "the rows have the same blocks");
  auto now = walk_of<kSpec.blocks>(tiles, blockIdx.x), next = now;  // next: the next tile that is seen
  while (next.left > 0 && !next.seen(band)) next.next();
  bool new_rows = true, new_keys = true;  // whether it lacks what the tile before had
  const auto load_scores = [&] {
    const int batch = next.at[kBatches], head = next.at[kHeads];
    if (new_rows) load_tile<kThreads, kAccess>(q_tile, head_of(p.q, batch, head, s.seqlen_q, s.head_dim), next.row());
    if (new_keys)
      load_tile<kThreads, kAccess>(k_tile, head_of(p.k, batch, head / s.group, s.seqlen_k, s.head_dim), next.col());
    commit_copies();
  };
  if (next.left > 0) load_scores();

  Accumulator<kCols> sum[kRowTiles];
  const auto clear_sum = [&] {
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) sum[t].clear();
  };
  clear_sum();
#pragma unroll 1
  for (; now.left > 0; now.next()) {
    const int batch = now.at[kBatches], head = now.at[kHeads];
    const int block_row = now.row(), block_col = now.col();
    const int first_row = opaque(block_row) + warp_q * kRows, first_col = opaque(block_col) + warp_k * kCols;
    if constexpr (!kSpec.summed) clear_sum();  // here, so that it takes no registers during the products
    if (now.left == next.left) {
      wait_copies<0>();
      __syncthreads();  // q and k have landed, and every warp is done with dout and v of the tile before
      if (new_rows)
        load_tile<kThreads, kAccess>(dout_tile, head_of(p.dout, batch, head, s.seqlen_q, s.head_dim_v), block_row);
      if (new_keys)
        load_tile<kThreads, kAccess>(v_tile, head_of(p.v, batch, head / s.group, s.seqlen_k, s.head_dim_v), block_col);
      commit_copies();

      Accumulator<kCols> prob[kRowTiles];
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t) prob[t].clear();
      product<T, kDim / 16>(prob, Left(q_tile, warp_q * kRows), RightTransposed(k_tile, warp_k * kCols));

      const Range by_all = keys_of_all(band, now.rows());
      const bool masked =
          block_row + kBlockQ > s.seqlen_q || block_col < by_all.first || block_col + kBlockK - 1 > by_all.last;
      const auto visible = [&](int row) { return row < s.seqlen_q ? band.keys(row) : Range{0, -1}; };
      const bool in_part = now.shown().in_part(now.at[kKeys]);
      const float slope = change.slope(batch, head);
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t) {
        const int row = opaque(first_row) + 16 * t;
        __syncwarp();  // or all loads go ahead, into registers that are not there
        float lse[2];
#pragma unroll
        for (int half = 0; half < 2; ++half)
          lse[half] = lse_in_base_2(p.lse.at(batch, head)[min(row + prob[t].row(half), s.seqlen_q - 1) * p.lse.row]);
        const Slant slant = change.slant(
            first_col, [&](int half) { return row + prob[t].row(half) + p.score.diagonal; },
            [&](int) { return slope; });
        using Items = LogitItems<typename BiasItem<kSpec.bias>::Type>;
        const Items bias = Items::of(p.bias, batch, head, row, first_col, s);
        const auto shown = [&] { return LogitItems<unsigned char>::of(p.mask, batch, head, row, first_col, s); };
        if constexpr (Change::kModded) {  // P times the derivative of what they return by what they are given
          change.template apply<1>(prob[t], slant, [&](int j, int i) { return bias_log2<kSpec.bias>(bias(j, i)); });
          auto places = mod::Places<Rows::kQueries, kCols>::from(s, batch, head, row, first_col);
          places.whole = kSpec.blocks && !kSpec.mask && !in_part;
          change.multiply_mods(prob[t], all.mods(), places, [&](int i) { return -lse[i / 2]; });
          Weights<kCols> none;
          if (masked) change.hide(prob[t], none, row, first_col, visible);
          if constexpr (kSpec.mask)
            if (in_part) change.hide_masked(prob[t], none, shown());
        } else {
          change.template apply<1>(prob[t], slant,
                                   [&](int j, int i) { return bias_log2<kSpec.bias>(bias(j, i)) - lse[i / 2]; });
          if (masked) prob[t].hide(row, first_col, -kInfinity, visible);
          if constexpr (kSpec.mask)
            if (in_part) hide_masked(prob[t], shown());
#pragma unroll
          for (int j = 0; j < kCols / 8; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) prob[t].x[j][i] = exp2f(prob[t].x[j][i]);
        }
      }

      if constexpr (kSpec.dropout)
        Dropping{p.dropout, batch, head}.decide<kBlockQ, kBlockK, kThreads>(kept_words, block_row, block_col);
      wait_copies<0>();
      __syncthreads();  // dout and v have landed, and every warp is done with q and k
      do next.next();
      while (next.left > 0 && !next.seen(band));
      const auto same = [&](Axis axis) { return next.at[axis] == now.at[axis]; };
      const bool same_batch = same(kBatches);
      new_rows = !(same_batch && same(kHeads) && same(kQueries));
      new_keys = !(same_batch && next.at[kHeads] / s.group == head / s.group && same(kKeys));
      if (next.left > 0) load_scores();

      Accumulator<kCols> dprob[kRowTiles];
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t) dprob[t].clear();
      product<T, kDimV / 16>(dprob, Left(dout_tile, warp_q * kRows), RightTransposed(v_tile, warp_k * kCols));
      if constexpr (kSpec.dropout) {
#pragma unroll
        for (int t = 0; t < kRowTiles; ++t) {
          KeptFragment<Rows::kQueries, kCols> kept;
          kept.template read<kBlockK>(kept_words, warp_q * kRows + 16 * t, warp_k * kCols);
          kept.drop(dprob[t]);
        }
      }
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = min(opaque(first_row) + 16 * t + prob[t].row(half), s.seqlen_q - 1);
          __syncwarp();  // or all loads go ahead, into registers that are not there
          float delta;
          if constexpr (kSpec.packed) {
            const int64 pair = int64(batch) * s.heads_q + head;
            delta = p.delta.data[pair * statistic_rows(s.seqlen_q) * 2 + statistic_of(row) + 16];
          } else {
            delta = p.delta.at(batch, head)[row * p.delta.row];
          }
#pragma unroll
          for (int j = 0; j < kCols / 8; ++j)
#pragma unroll
            for (int i = 2 * half; i < 2 * half + 2; ++i) {
              const float dp = dprob[t].x[j][i];
              const float centred = kSpec.dropout ? fmaf(dp, p.dropout.scale, -delta) : dp - delta;
              sum[t].x[j][i] = fmaf(prob[t].x[j][i], centred, sum[t].x[j][i]);
            }
        }
    }
    if (!now.ends_sum()) continue;

    const int chunk = blockIdx.x % p.dbias.chunks;
    store_sum<kSpec.bias, !kSpec.summed>(sum, p,
                                         {batch, head, first_row, first_col, chunk, warp_q, kWarpsQ, warp_k, kWarpsK});
    if constexpr (kSpec.summed) clear_sum();
  }
}

// A block adds the parts of 32 elements; each warp every eighth of them.
template <class T, BiasSumSpec kSpec>
__global__ void __launch_bounds__(32 * kSpec.warps) add_bias_gradients(const __grid_constant__ BackwardParams p) {
  using Out = typename BiasElement<kSpec.bias>::Type;
  __shared__ float sums[kSpec.warps][32];
  const BiasGradient& g = p.dbias;
  const int warp = warp_index();
  const int64 size = int64(g.batches) * g.heads * g.rows * g.cols, element = int64(blockIdx.x) * 32 + lane_index();
  float sum = 0.f;
  if (element < size) {
#pragma unroll 4
    for (int part = warp; part < g.parts; part += kSpec.warps) sum += p.dbias_parts[part * size + element];
  }
  sums[warp][lane_index()] = sum;
  __syncthreads();
  if (warp > 0 || element >= size) return;
#pragma unroll
  for (int i = 1; i < kSpec.warps; ++i) sum += sums[i][lane_index()];
  if constexpr (sizeof(Out) == 4)
    static_cast<float*>(g.data)[element] = sum;
  else
    static_cast<Out*>(g.data)[element].bits = Out::pack(sum, 0.f);
}

}  // namespace cupyflash
