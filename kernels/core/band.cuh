// Which keys a query sees, and which tiles that makes necessary.
//
//   low = -1, high = 0     keys ->    query i sees  i + low <= j <= i + high,  0 <= j < seqlen_k.
//                    x . . . .        Tiles without an x are never touched; a tile with nothing but x
//         queries    x x . . .        is not masked.
//                    . x x . .
#pragma once

#include "core/params.cuh"

namespace cupyflash {

struct Range {  // inclusive; empty where last < first
  int first, last;
};

struct Band {
  int low, high, seqlen_q, seqlen_k;

  __device__ explicit Band(const Sizes& s) : low(s.low), high(s.high), seqlen_q(s.seqlen_q), seqlen_k(s.seqlen_k) {}

  __device__ Band(int low, int high, int seqlen_q, int seqlen_k)
      : low(low), high(high), seqlen_q(seqlen_q), seqlen_k(seqlen_k) {}

  __device__ Range keys(int query) const { return {max(0, query + low), min(seqlen_k - 1, query + high)}; }
  __device__ Range queries(int key) const {
    return {key < seqlen_k ? max(0, key - high) : seqlen_q, min(seqlen_q - 1, key - low)};
  }
};

// Keys that some query of the rows sees, and keys that every one sees.
__device__ inline Range keys_of_any(const Band& band, Range rows) {
  return {band.keys(rows.first).first, band.keys(rows.last).last};
}
__device__ inline Range keys_of_all(const Band& band, Range rows) {
  return {band.keys(rows.last).first, band.keys(rows.first).last};
}
__device__ inline Range queries_of_any(const Band& band, Range keys) {
  return {band.queries(keys.first).first, band.queries(keys.last).last};
}
__device__ inline Range queries_of_all(const Band& band, Range keys) {
  return {band.queries(keys.last).first, band.queries(keys.first).last};
}

// The key tiles that the rows see, first to last; none where last < first.
__device__ inline Range tiles_of(const Band& band, Range rows, int block_k) {
  const Range seen = keys_of_any(band, rows);
  const int first = seen.first / block_k;
  return {first, seen.last < seen.first ? first - 1 : seen.last / block_k};
}
// Those of the queries from `first_row` on.
__device__ inline Range tiles_of(const Band& band, int first_row, int block_q, int block_k) {
  return tiles_of(band, {first_row, min(first_row + block_q, band.seqlen_q) - 1}, block_k);
}
// The query tiles that see some of the keys.
__device__ inline Range query_tiles_of(const Band& band, Range keys, int block_q) {
  const Range seen = queries_of_any(band, keys);
  const int first = seen.first / block_q;
  return {first, seen.last < seen.first ? first - 1 : seen.last / block_q};
}

}  // namespace cupyflash
