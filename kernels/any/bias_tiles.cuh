// Sums of tiles of scores, which are tiles of dbias: in which order a block adds them up, and where a warp leaves what
// it has added.
#pragma once

#include "any/logits.cuh"
#include "core/blocks.cuh"
#include "core/epilogue.cuh"

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

// All that the block `index` of those that share the sums goes through.
template <bool kBlocks, int kBlockQ, int kBlockK>
__device__ __forceinline__ Walk<kBlocks, kBlockQ, kBlockK> walk_of(const Tiles<kBlockQ, kBlockK>& tiles, int index) {
  const BiasGradient& g = tiles.p.dbias;
  const int64 of_sum = tiles.number(true);
  int64 first, last;
  if (g.chunks > 1) {  // some of the tiles of one sum, or all those of `run` sums
    const int64 of_chunk = (of_sum + g.chunks - 1) / g.chunks, start = index / g.chunks * of_sum;
    const int chunk = index % g.chunks;
    first = start + chunk * of_chunk, last = start + min(of_sum, (chunk + 1) * of_chunk);
  } else {
    first = int64(index) * g.run * of_sum;
    last = min(first + g.run * of_sum, tiles.number(false) * of_sum);
  }
  return Walk<kBlocks, kBlockQ, kBlockK>(tiles, first, last);
}

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

// To rows of dbias, or of its parts. kWide: 16 bits by 16 bytes, where the rows allow it.
template <class Out, bool kWide = true, int kCols>
__device__ __forceinline__ void store_rows(const Accumulator<kCols>& x, void* data, const BiasGradient& g, int64 place,
                                           int row, int col) {
  const Matrix target = {static_cast<char*>(data) + place * int64(sizeof(Out)), g.cols * int64(sizeof(Out)), g.rows,
                         g.cols};
  if constexpr (kWide && sizeof(Out) == 2 && kCols % 32 == 0) {
    if (g.cols % 8 == 0 && reinterpret_cast<uint64>(data) % 16 == 0) return store_wide<Out>(x, target, row, col);
  }
  store_direct<Out, sizeof(Out)>(x, target, row, col);
}

// A tile of dbias that is no sum.
template <int kBias, int kCols>
__device__ __forceinline__ void store_scores(const Accumulator<kCols>& x, const BiasGradient& g, int batch, int head,
                                             int row, int col) {
  const int64 place = (int64(batch) * g.heads + head) * g.rows * g.cols;
  store_rows<typename BiasElement<kBias>::Type>(x, g.data, g, place, row, col);
}

// A warp's part of a sum: where it begins, and which one it is of those that add up to an element where rows or columns
// are summed.
struct WarpSum {
  int batch, head, row, col;
  int chunk, warp_q, warps_q, warp_k, warps_k;
};

// Leaves it in dbias, or among the parts of it.
template <int kBias, bool kWide, int kCols, int kRowTiles>
__device__ __forceinline__ void store_sum(Accumulator<kCols> (&sum)[kRowTiles], const BackwardParams& p,
                                          const WarpSum& at) {
  const BiasGradient& g = p.dbias;
  const bool sums_rows = g.rows == 1, sums_cols = g.cols == 1;
  if (sums_rows) add_rows(sum);
  if (sums_cols) add_cols(sum);
  const int row = sums_rows ? 0 : at.row, col = sums_cols ? 0 : at.col;
  const int64 of_head = int64(g.rows) * g.cols;
  const int64 place = ((g.batches == 1 ? 0 : int64(at.batch) * g.heads) + (g.heads == 1 ? 0 : at.head)) * of_head;
  if (g.parts == 1) {
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t)
      store_rows<typename BiasElement<kBias>::Type, kWide>(sum[t], g.data, g, place, row + 16 * t, col);
  } else {
    const int of_rows = sums_rows ? at.warps_q : 1, of_cols = sums_cols ? at.warps_k : 1;
    const int part = (at.chunk * of_rows + (sums_rows ? at.warp_q : 0)) * of_cols + (sums_cols ? at.warp_k : 0);
    const int64 of_part = int64(g.batches) * g.heads * of_head;
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t)
      store_rows<float>(sum[t], p.dbias_parts, g, part * of_part + place, row + 16 * t, col);
  }
}

}  // namespace cupyflash
