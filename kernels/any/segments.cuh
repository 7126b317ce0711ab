// Packed sequences, from the arrays that say where they begin: the first block writes the table of core/params.cuh's
// Segments; the others clear the rows that no sequence uses. Values that make no sense are limited to the rows there
// are, and sequences never overlap, so that no kernel reads or writes elsewhere.
#pragma once

#include "any/ptx.cuh"
#include "core/params.cuh"
#include "core/spec.cuh"

namespace cupyflash {

struct Cleared {  // (total, heads, width)
  Array array;
  int heads, units;  // of two bytes, in a row of a head
  int item;          // bytes of an element
};

struct Lengths {               // of the sequences, in q or in k
  const void* starts;          // (batch + 1)
  const void* used;            // (batch), or null: all rows
  int wide_starts, wide_used;  // of 64 bits
  int total;                   // rows there are

  __device__ __forceinline__ int start(int i) const { return entry(starts, wide_starts, i, total); }
  __device__ __forceinline__ int used_of(int i, int room) const {
    return used == nullptr ? room : entry(used, wide_used, i, room);
  }

 private:
  __device__ __forceinline__ static int entry(const void* array, int wide, int i, int most) {
    const int64 x = wide ? static_cast<const int64*>(array)[i] : static_cast<const int*>(array)[i];
    return int(min(max(x, int64(0)), int64(most)));
  }
};

struct SegmentsParams {
  Lengths lengths_q, lengths_k;
  int batch;
  int longest_keys;  // come first, instead of the longest queries
  Segments segments;
  Cleared of_q, of_k, of_v;  // without heads: none
  RowArray lse;              // or null
  int heads;                 // of lse
};

struct Sum {
  __device__ __forceinline__ int operator()(int a, int b) const { return a + b; }
};
struct Maximum {
  __device__ __forceinline__ int operator()(int a, int b) const { return max(a, b); }
};

// Inclusive scans of one number of each thread of the block, one after the other: `carry` is that of all before.
template <class Operation>
struct Scan {
  int* ends;  // of the warps: 32
  int carry = 0;
  Operation operation;

  __device__ __forceinline__ int operator()(int x) {
    const int warp = warp_index();
    x = of_warp(x);
    __syncthreads();  // the scan before was read
    if (lane_index() == 31) ends[warp] = x;
    __syncthreads();
    const int others = of_warp(ends[lane_index()]);  // every warp for itself
    const int before = __shfl_sync(kFullWarp, others, max(0, warp - 1));
    if (warp > 0) x = operation(x, before);
    x = operation(x, carry);
    carry = operation(carry, __shfl_sync(kFullWarp, others, 31));
    return x;
  }

 private:
  __device__ __forceinline__ int of_warp(int x) const {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(kFullWarp, x, step);
      if (lane_index() >= step) x = operation(x, other);
    }
    return x;
  }
};

// From the longest to the shortest, eight buckets for each doubling; 0 comes last.
constexpr int kBuckets = 256;
__device__ __forceinline__ int bucket_of(int length) {
  return length == 0 ? kBuckets - 1 : kBuckets - 2 - ((__float_as_int(float(length)) >> 20) - (127 << 3));
}

// One row, by all lanes of a warp.
__device__ __forceinline__ void clear_row(const Cleared& cleared, int row) {
  const Array& array = cleared.array;
  for (int head = 0; head < cleared.heads; ++head) {
    char* const data = static_cast<char*>(array.data) + (row * array.row + head * array.head) * cleared.item;
    for (int unit = lane_index(); unit < cleared.units; unit += 32) reinterpret_cast<unsigned short*>(data)[unit] = 0;
  }
}

// One row for each thread, then the unused ones.
__device__ inline void clear_unused(const SegmentsParams& p, int threads) {
  const int blocks_q = (p.lengths_q.total + threads - 1) / threads, block = blockIdx.x - 1;
  const bool of_q = block < blocks_q;
  const Lengths& lengths = of_q ? p.lengths_q : p.lengths_k;
  const int row = (of_q ? block : block - blocks_q) * threads + threadIdx.x;
  int below = 0, above = p.batch + 1;  // in between: the first one that begins behind the row
  while (below < above) {
    const int middle = (below + above) / 2;
    if (lengths.start(middle) <= row)
      below = middle + 1;
    else
      above = middle;
  }
  const int sequence = below - 1;
  bool unused = row < lengths.total;
  if (unused && sequence >= 0 && sequence < p.batch) {
    const int first = lengths.start(sequence), room = max(0, lengths.start(sequence + 1) - first);
    unused = row >= first + lengths.used_of(sequence, room);
  }
  for (uint32 votes = __ballot_sync(kFullWarp, unused); votes != 0; votes &= votes - 1) {
    const int one = __shfl_sync(kFullWarp, row, __ffs(votes) - 1);
    if (of_q) {
      clear_row(p.of_q, one);
      for (int head = lane_index(); p.lse.data != nullptr && head < p.heads; head += 32)
        p.lse.at(0, head)[one * p.lse.row] = -kInfinity;
    } else {
      clear_row(p.of_k, one), clear_row(p.of_v, one);
    }
  }
}

template <class T, SegmentsSpec kSpec>
__global__ void __launch_bounds__(32 * kSpec.warps) prepare_segments(const __grid_constant__ SegmentsParams p) {
  static_assert(kSpec.warps == 32);
  constexpr int kThreads = 32 * kSpec.warps;
  if (blockIdx.x > 0) return clear_unused(p, kThreads);
  __shared__ int ends[32], places[kBuckets];
  const int thread = threadIdx.x, batch = p.batch;
  Segment* const all = p.segments.all();
  int* const order = reinterpret_cast<int*>(all + batch);
  if (thread < kBuckets) places[thread] = 0;
  __syncthreads();

  Scan<Maximum> scan_q = {ends}, scan_k = {ends};
  Scan<Sum> scan_blocks = {ends}, scan_statistics = {ends};
  const auto runs = [&](const Segment& segment, TileKind kind) {
    const TileList& list = p.segments.lists[kind];
    return list.bound > 0 ? segment.runs(list, kind) : 0;
  };
  for (int first = 0; first < batch; first += kThreads) {
    const int i = first + thread, last = min(i, batch - 1);
    Segment segment = {};
    segment.first_q = scan_q(p.lengths_q.start(last)), segment.first_k = scan_k(p.lengths_k.start(last));
    if (i < batch) {
      segment.seqlen_q = p.lengths_q.used_of(i, max(0, p.lengths_q.start(i + 1) - segment.first_q));
      segment.seqlen_k = p.lengths_k.used_of(i, max(0, p.lengths_k.start(i + 1) - segment.first_k));
      atomicAdd(&places[bucket_of(p.longest_keys ? segment.seqlen_k : segment.seqlen_q)], 1);
    }
    const int blocks = runs(segment, kBlocks), statistics = runs(segment, kStatistics);
    segment.first[kBlocks] = scan_blocks(blocks) - blocks;
    segment.first[kStatistics] = scan_statistics(statistics) - statistics;
    if (i < batch) all[i] = segment;
  }
  __syncthreads();
  const int count = thread < kBuckets ? places[thread] : 0;
  Scan<Sum> scan_places = {ends};
  const int place = scan_places(count) - count;
  if (thread < kBuckets) places[thread] = place;
  __syncthreads();
  for (int i = thread; i < batch; i += kThreads)
    order[atomicAdd(&places[bucket_of(p.longest_keys ? all[i].seqlen_k : all[i].seqlen_q)], 1)] = i;
  __syncthreads();

  Scan<Sum> scan_queries = {ends}, scan_keys = {ends};
  for (int first = 0; first < batch; first += kThreads) {
    const bool exists = first + thread < batch;
    Segment& segment = all[exists ? order[first + thread] : 0];
    const int queries = exists ? runs(segment, kQueryTiles) : 0, keys = exists ? runs(segment, kKeyTiles) : 0;
    const int first_query = scan_queries(queries) - queries, first_key = scan_keys(keys) - keys;
    if (exists) segment.first[kQueryTiles] = first_query, segment.first[kKeyTiles] = first_key;
  }
  __syncthreads();

  if (thread == 0) {
    int* const counts = p.segments.table;
    counts[kQueryTiles] = scan_queries.carry, counts[kKeyTiles] = scan_keys.carry;
    counts[kBlocks] = scan_blocks.carry, counts[kStatistics] = scan_statistics.carry;
  }
  for (int i = warp_index(); i < batch; i += kSpec.warps) {
    const Segment segment = all[i];
#pragma unroll
    for (int kind = 0; kind < kTileKinds; ++kind) {
      int* const list = p.segments.table + p.segments.lists[kind].at + segment.first[kind];
      for (int run = lane_index(); run < runs(segment, TileKind(kind)); run += 32) list[run] = i;
    }
  }
}

}  // namespace cupyflash
