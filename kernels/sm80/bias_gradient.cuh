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

#include "any/logits.cuh"
#include "any/mods.cuh"
#include "core/blocks.cuh"
#include "core/dropout.cuh"
#include "core/epilogue.cuh"
#include "core/score.cuh"
#include "core/spec.cuh"
#include "sm80/tile.cuh"

namespace cupyflash {

template <int kBias>
struct BiasElement {
  using Type = float;
};
template <>
struct BiasElement<kFloat16Bias> {
  using Type = float16;
};
template <>
struct BiasElement<kBfloat16Bias> {
  using Type = bfloat16;
};

// The tiles of S of all heads, one after the other: first along the axes that are summed, so that those of one tile of
// dbias follow each other, then along the others; the keys before the queries, heads and batches.
enum Axis { kKeys, kQueries, kHeads, kBatches, kAxes };

template <int kBlockQ, int kBlockK>
struct Tiles {
  const BackwardParams& p;  // all is computed where it is used: a loop has no registers for it

  __device__ __forceinline__ int count(int axis) const {
    const Sizes& s = p.sizes;
    return axis == kKeys      ? (s.seqlen_k + kBlockK - 1) / kBlockK
           : axis == kQueries ? (s.seqlen_q + kBlockQ - 1) / kBlockQ
           : axis == kHeads   ? s.heads_q
                              : s.batch;
  }
  __device__ __forceinline__ bool summed(int axis) const {
    const BiasGradient& g = p.dbias;
    return (axis == kKeys ? g.cols : axis == kQueries ? g.rows : axis == kHeads ? g.heads : g.batches) == 1;
  }
  // Those of one tile of dbias, or the tiles of dbias.
  __device__ __forceinline__ int64 number(bool of_one) const {
    int64 product = 1;
#pragma unroll
    for (int axis = 0; axis < kAxes; ++axis)
      if (summed(axis) == of_one) product *= count(axis);
    return product;
  }
};

template <bool kBlocks, int kBlockQ, int kBlockK>
struct Walk {  // through some of them
  const Tiles<kBlockQ, kBlockK>& tiles;
  int64 left;  // of the tiles, with the present one
  int at[kAxes];

  __device__ __forceinline__ Walk(const Tiles<kBlockQ, kBlockK>& tiles, int64 first, int64 last)
      : tiles(tiles), left(last - first) {
#pragma unroll
    for (int i = 0; i < 2 * kAxes; ++i) {
      const int axis = i % kAxes;
      if (tiles.summed(axis) != i < kAxes) continue;
      at[axis] = first % tiles.count(axis), first /= tiles.count(axis);
    }
  }
  __device__ __forceinline__ void next() {
    --left;
    bool carry = true;
#pragma unroll
    for (int i = 0; i < 2 * kAxes; ++i) {
      const int axis = i % kAxes;
      if (!carry || tiles.summed(axis) != i < kAxes) continue;
      carry = ++at[axis] == tiles.count(axis);
      if (carry) at[axis] = 0;
    }
  }
  __device__ __forceinline__ int row() const { return at[kQueries] * kBlockQ; }
  __device__ __forceinline__ int col() const { return at[kKeys] * kBlockK; }
  __device__ __forceinline__ Range rows() const { return {row(), min(row() + kBlockQ, tiles.p.sizes.seqlen_q) - 1}; }
  // Of the row of a block mask in which it lies.
  __device__ __forceinline__ ShownTiles<kBlocks, kBlockK> shown() const {
    return ShownTiles<kBlocks, kBlockK>::of(tiles.p.blocks, at[kBatches], at[kHeads], row());
  }
  __device__ __forceinline__ bool seen(const Band& band) const {
    const Range keys = keys_of_any(band, rows());
    return max(keys.first, col()) <= min(keys.last, col() + kBlockK - 1) && shown().has(at[kKeys]);
  }
  // Whether the next one is of another tile of dbias, or of another block.
  __device__ __forceinline__ bool ends_sum() const {
    bool last = true;
#pragma unroll
    for (int axis = 0; axis < kAxes; ++axis) last &= !tiles.summed(axis) || at[axis] == tiles.count(axis) - 1;
    return last || left == 1;
  }
};

// The sum over all rows, left in the first one; and over all columns.
template <int kCols, int kRowTiles>
__device__ __forceinline__ void add_rows(Accumulator<kCols> (&x)[kRowTiles]) {
#pragma unroll
  for (int j = 0; j < kCols / 8; ++j)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float sum = 0.f;
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t) sum += x[t].x[j][i] + x[t].x[j][i + 2];
#pragma unroll
      for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(kFullWarp, sum, step);
      x[0].x[j][i] = sum;
    }
}
template <int kCols, int kRowTiles>
__device__ __forceinline__ void add_cols(Accumulator<kCols> (&x)[kRowTiles]) {
#pragma unroll
  for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      float sum = 0.f;
#pragma unroll
      for (int j = 0; j < kCols / 8; ++j) sum += x[t].x[j][i] + x[t].x[j][i + 1];
#pragma unroll
      for (int step = 1; step < 4; step *= 2) sum += __shfl_xor_sync(kFullWarp, sum, step);
      x[t].x[0][i] = sum;
    }
}

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

  const Sizes& s = p.sizes;
  const BiasGradient& g = p.dbias;
  const Tiles<kBlockQ, kBlockK> tiles = {p};
  const int64 of_sum = tiles.number(true);
  const int chunk = blockIdx.x % g.chunks;
  int64 first, last;
  if (g.chunks > 1) {  // some of the tiles of one sum, or all those of `run` sums
    const int64 of_chunk = (of_sum + g.chunks - 1) / g.chunks, start = blockIdx.x / g.chunks * of_sum;
    first = start + chunk * of_chunk, last = start + min(of_sum, (chunk + 1) * of_chunk);
  } else {
    first = int64(blockIdx.x) * g.run * of_sum;
    last = min(first + g.run * of_sum, tiles.number(false) * of_sum);
  }

  const Band band(s);
  using Change = ScoreChange<kSpec.softcap, kSpec.alibi, true, Mods>;
  const Change change = {p.score, s};

  static_assert(!kSpec.blocks || kMaskTile % kBlockQ == 0, "the rows have the same blocks");
  Walk<kSpec.blocks, kBlockQ, kBlockK> now(tiles, first, last), next = now;  // next: the next tile that is seen
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
      const Dropping dropping = {p.dropout, batch, head};
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
          change.multiply_mods(prob[t], all.mods(),
                               mod::Places<Rows::kQueries, kCols>::from(s, batch, head, row, first_col),
                               [&](int i) { return -lse[i / 2]; });
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
        if constexpr (kSpec.dropout && !Mods::kScore) dropping.mark<Rows::kQueries>(prob[t], row, first_col);
      }

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
      if constexpr (kSpec.dropout && Mods::kScore)  // whose derivative has a sign of its own: it cannot keep a mark
#pragma unroll
        for (int t = 0; t < kRowTiles; ++t)
          dropping.tell<Rows::kQueries>(dprob[t], opaque(first_row) + 16 * t, first_col, [&](int j, int i, bool kept) {
            dprob[t].x[j][i] = kept ? dprob[t].x[j][i] * p.dropout.scale : 0.f;
          });
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
              if constexpr (kSpec.dropout && !Mods::kScore)
                sum[t].x[j][i] += dropping.gradient(prob[t].x[j][i], dprob[t].x[j][i], delta);
              else
                sum[t].x[j][i] = fmaf(prob[t].x[j][i], dprob[t].x[j][i] - delta, sum[t].x[j][i]);
            }
        }
    }
    if (!now.ends_sum()) continue;

    const bool sums_rows = tiles.summed(kQueries), sums_cols = tiles.summed(kKeys);
    if (sums_rows) add_rows(sum);
    if (sums_cols) add_cols(sum);
    const int row = sums_rows ? 0 : first_row, col = sums_cols ? 0 : first_col;
    const int64 of_head = int64(g.rows) * g.cols;
    const int64 place = ((g.batches == 1 ? 0 : int64(batch) * g.heads) + (g.heads == 1 ? 0 : head)) * of_head;
    if (g.parts == 1) {
      using Out = typename BiasElement<kSpec.bias>::Type;
      const Matrix target = {reinterpret_cast<char*>(static_cast<Out*>(g.data) + place), g.cols * int64(sizeof(Out)),
                             g.rows, g.cols};
      bool wide = false;
      if constexpr (!kSpec.summed && sizeof(Out) == 2 && kCols % 32 == 0) {
        wide = g.cols % 8 == 0 && reinterpret_cast<uint64>(g.data) % 16 == 0;
        if (wide)
#pragma unroll
          for (int t = 0; t < kRowTiles; ++t) store_wide<Out>(sum[t], target, row + 16 * t, col);
      }
      if (!wide)
#pragma unroll
        for (int t = 0; t < kRowTiles; ++t) store_direct<Out, sizeof(Out)>(sum[t], target, row + 16 * t, col);
    } else {
      const int of_rows = sums_rows ? kWarpsQ : 1, of_cols = sums_cols ? kWarpsK : 1;
      const int part = (chunk * of_rows + (sums_rows ? warp_q : 0)) * of_cols + (sums_cols ? warp_k : 0);
      float* const sums = p.dbias_parts + part * (int64(g.batches) * g.heads * of_head) + place;
      const Matrix target = {reinterpret_cast<char*>(sums), 4ll * g.cols, g.rows, g.cols};
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t) store_direct<float, 4>(sum[t], target, row + 16 * t, col);
    }
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
