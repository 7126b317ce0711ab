// Packed sequences: which one an item of work belongs to, and where its rows are. A kernel of dense arrays, whose
// batches have one length, gets the same from the sizes of the call, by the same names.
#pragma once

#include "core/band.cuh"
#include "core/work.cuh"

namespace cupyflash {

// The sequence of an item. A head of its arrays is `head_of(array, q() or k(), ...)`.
template <bool kVarlen>
struct Place {
  int batch;

  __device__ __forceinline__ int q() const { return batch; }
  __device__ __forceinline__ int k() const { return batch; }
  // The same for the copy engine.
  __device__ __forceinline__ int rows_q() const { return batch; }
  __device__ __forceinline__ int rows_k() const { return batch; }
  __device__ __forceinline__ int diagonal(const Score& score) const { return score.diagonal; }
  // Where a head begins in dq_sum, in blocks of 16 rows, and in the packed statistics, in rows.
  __device__ __forceinline__ int64 block(const Sizes& s, int head) const {
    return (int64(batch) * s.heads_q + head) * ((s.seqlen_q + 15) / 16);
  }
  __device__ __forceinline__ int64 statistic(const Sizes& s, int head) const {
    return (int64(batch) * s.heads_q + head) * statistic_rows(s.seqlen_q);
  }
};

// Of a packed array, every row is the first of a batch: the stride of a batch is that of a row.
template <>
struct Place<true> {
  Sizes sizes;  // of this sequence
  const Segments& segments;
  int batch, first_q, first_k, to_diagonal;

  __device__ __forceinline__ Place(const Sizes& all, const Segments& segments, int batch)
      : sizes(all), segments(segments), batch(batch) {
    const Segment& segment = segments.all()[batch];
    first_q = segment.first_q, first_k = segment.first_k;
    sizes.seqlen_q = segment.seqlen_q, sizes.seqlen_k = segment.seqlen_k;
    to_diagonal = segments.lower_right ? sizes.seqlen_k - sizes.seqlen_q : 0;
    sizes.low += to_diagonal, sizes.high += to_diagonal;  // what hides no key still hides none
  }
  __device__ __forceinline__ int q() const { return first_q; }
  __device__ __forceinline__ int k() const { return first_k; }
  __device__ __forceinline__ PackedRows rows_q() const { return {first_q, sizes.seqlen_q}; }
  __device__ __forceinline__ PackedRows rows_k() const { return {first_k, sizes.seqlen_k}; }
  __device__ __forceinline__ int diagonal(const Score&) const { return to_diagonal; }
  __device__ __forceinline__ int64 block(const Sizes&, int head) const {
    return int64(head) * segments.lists[kBlocks].bound + segments.all()[batch].first[kBlocks];
  }
  __device__ __forceinline__ int64 statistic(const Sizes&, int head) const {
    return (int64(head) * segments.lists[kStatistics].bound + segments.all()[batch].first[kStatistics]) *
           kStatisticTile;
  }
};

// The one tile of a block, which is item `index`; the batch is -1 where there is none.
template <bool kVarlen, TileKind kKind>
__device__ __forceinline__ Work find_tile(const Sizes& s, const Segments& segments, int rows, uint32 index) {
  const int heads = kKind == kQueryTiles ? s.heads_q : s.heads_q / s.group;
  constexpr bool kDescending = kKind == kQueryTiles;  // the last tiles of queries are the longest of a causal mask
  if constexpr (kVarlen) {
    if (index >= uint32(segments.runs(kKind)) * heads) return {0, -1, 0};
    return find_work(segments, kKind, s, heads, index, kDescending);
  } else {
    const int length = kKind == kQueryTiles ? s.seqlen_q : s.seqlen_k;
    return find_work(index, (length + rows - 1) / rows, s.batch, heads, s.section, kDescending);
  }
}

template <bool kVarlen>
__device__ __forceinline__ Place<kVarlen> place_of(const Sizes& s, const Segments& segments, int batch) {
  if constexpr (kVarlen)
    return Place<true>(s, segments, batch);
  else
    return {batch};
}

// The sizes and the band of a place. Dense kernels have those of the call, with the instructions that they would have
// without places: through a reference in a struct, or made anew, the compiler arranges the code otherwise.
__device__ __forceinline__ const Sizes& sizes_in(const Sizes& all, const Place<false>&) { return all; }
__device__ __forceinline__ const Sizes& sizes_in(const Sizes&, const Place<true>& place) { return place.sizes; }
__device__ __forceinline__ const Band& band_in(const Band& all, const Place<false>&) { return all; }
__device__ __forceinline__ Band band_in(const Band&, const Place<true>& place) { return Band(place.sizes); }

// The batch of block `index` of 16 rows, which are counted from tile to tile of kKind through all batches, -1 where
// there is none; and its number there.
struct RowBlock {
  int batch, block;
};
template <bool kVarlen, TileKind kKind, class Index>
__device__ __forceinline__ RowBlock find_rows(const Sizes& s, const Segments& segments, Index index) {
  constexpr int kRows = kKind == kStatistics ? kStatisticTile : 16, kPart = kRows / 16;
  if constexpr (kVarlen) {
    const Index tile = index / kPart;
    if (tile >= segments.runs(kKind)) return {-1, 0};
    const int batch = segments.sequence(kKind, tile);
    return {batch, int(tile - segments.all()[batch].first[kKind]) * kPart + int(index % kPart)};
  } else {
    const int blocks = (kKind == kStatistics ? statistic_rows(s.seqlen_q) : s.seqlen_q + 15) / 16;
    return {int(index / blocks), int(index % blocks)};
  }
}

}  // namespace cupyflash
