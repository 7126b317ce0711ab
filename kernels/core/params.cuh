// The one argument of each kernel; NumPy twins in cupyflash/structs.py. Strides count elements.
//
// Conventions: lse is the natural logarithm in float32, the sink (-inf without one) for a row that sees no key, whose
// out is 0.
#pragma once

#include "core/types.cuh"

namespace cupyflash {

struct Array {  // (batch, seqlen, heads, head_dim), the last axis contiguous
  void* data;
  int64 batch, row, head;
};

struct RowArray {  // (batch, heads, seqlen)
  float* data;
  int64 batch, head, row;

  __device__ __forceinline__ float* at(int b, int h) const { return data + b * batch + h * head; }
};

// lse in base 2 and delta of 16 rows follow each other; the four rows of a lane, which has them as columns of two 8 x 8
// blocks, are neighbours. Rows that do not exist or have the lse -inf get inf: their P is 0, whatever they hold.
constexpr int kStatisticTile = 128;  // rows are added up to a multiple
__device__ __forceinline__ int64 statistic_of(int row) {
  return row / 16 * 32 + row % 8 / 2 * 4 + row % 16 / 8 * 2 + row % 2;
}
__device__ __forceinline__ int statistic_rows(int seqlen_q) {
  return (seqlen_q + kStatisticTile - 1) / kStatisticTile * kStatisticTile;
}

struct Sizes {
  int batch, heads_q, group, seqlen_q, seqlen_k, head_dim, head_dim_v;
  int low, high;            // query i sees the keys i + low ... i + high
  int section;              // (batch, head) pairs that run together, so that what they share stays in L2
  float scale, scale_log2;  // the forward's is positive: it takes the maximum before it scales
};

// What a hidden score becomes, so that its exponential is 0 whatever the sign of the scale.
__device__ __forceinline__ float hidden_score(const Sizes& s) { return s.scale_log2 < 0.f ? kInfinity : -kInfinity; }
// An lse in base 2; inf for a row that sees neither a key nor a sink, so that its P is 0. kHuge: biases and functions
// of the user may make it so large that it would not be finite. Else only a sink alone does, beside which P is 0, too.
template <bool kHuge = true>
__device__ __forceinline__ float lse_in_base_2(float lse) {
  constexpr float kLargest = __builtin_bit_cast(float, 0x7f7fffff);
  const float y = lse * kLog2E;
  if constexpr (!kHuge) return y == -kInfinity ? kInfinity : y;
  if (lse == -kInfinity) return kInfinity;
  return fabsf(y) == kInfinity && fabsf(lse) != kInfinity ? copysignf(kLargest, y) : y;
}
// A natural logit in base 2, minus such an lse: both rounded alike. Of a row whose biases are all -1e9 the two are
// equal, where an exact product minus a rounded lse would be anything up to 64, and P infinite from 1e10 on.
__device__ __forceinline__ float logit_minus_lse(float logit, float lse) { return __fmul_rn(logit, kLog2E) - lse; }

struct Score {  // core/score.cuh
  const float* slopes;
  int64 batch, head;  // strides
  float inside, cap;  // scale / softcap, and softcap in base 2
  float near;         // below it softcap is, in base 2, score * series(score^2)
  float series[3];    // its coefficients
  float middle;       // what exponents are relative to where softcap bounds them: no maximum is looked for
  int diagonal;       // query i has the distance 0 from the key i + diagonal
};

struct Sink {  // of each query head: a logit without a key, in the sums of all its rows; -inf, which adds 0, if no data
  const float* data;
  int64 head;

  __device__ __forceinline__ float of(int h) const { return data == nullptr ? -kInfinity : data[h * head]; }
};

struct LogitArray {  // (batch, heads_q, seqlen_q, seqlen_k), of any strides: 0 where it was broadcast; any/logits.cuh
  const void* data;
  int64 batch, head, row, col;
};

struct BiasGradient {  // of a contiguous dbias, whose axes are those of the logits, or 1 where the bias was broadcast
  void* data;
  int batches, heads, rows, cols;
  int chunks;  // blocks that share a tile of dbias; if it is 1,
  int run;     // tiles of dbias that a block computes one after the other
  int parts;   // sums of each element that have to be added, in `dbias_parts`; 1: there is nothing to add
};

constexpr int kMaskTile = 128;  // rows and columns of a bit of a block mask
struct BlockMask {              // of queries by keys, or of keys by queries; core/blocks.cuh
  const uint32* data;           // (batch, heads_q, rows of tiles, 2, words), a bit for each tile of a row: that some of
                                // it is shown, then that a mask or a MaskMod may hide some of that
  int64 batch, head, words;     // strides in rows, 0 where it was broadcast; and words of a row
};

struct Dropout {                     // any/dropout.cuh
  static constexpr int kRounds = 7;  // of Philox
  uint64 keys[kRounds];              // of the rounds, two words each: the seed, and what each adds to it
  uint32 bits[32];                   // of the threshold, from the highest one down: each 32 times
  float scale;                       // 1 / (1 - probability)
};

struct Order {   // of the tiles of persistent blocks
  int heads;     // of one batch that have tiles of their own
  int tiles;     // of one head
  int runs;      // of one head: its tiles or, if paired, its pairs of tiles
  int all_runs;  // of all heads
  int paired;    // a run is the tiles i and n - 1 - i: equal work on causal masks
};

// Packed sequences. Their tiles are counted through all of them, those of the longest first; so are blocks of 16 rows,
// and of kStatisticTile rows, in the order of the sequences.
enum TileKind { kQueryTiles, kKeyTiles, kBlocks, kStatistics, kTileKinds };

struct TileList {
  int at;      // in the table: of each run the sequence that it belongs to
  int rows;    // of a tile
  int paired;  // a run is the tiles i and n - 1 - i of a sequence, as in Order; otherwise a tile
  int bound;   // runs of all sequences, at most; 0 where nobody needs the list
};

struct alignas(32) Segment {  // one sequence
  int first_q, first_k;       // its first rows
  int seqlen_q, seqlen_k;
  int first[kTileKinds];  // its first run in each list

  __device__ __forceinline__ int tiles(const TileList& list, TileKind kind) const {
    return ((kind == kKeyTiles ? seqlen_k : seqlen_q) + list.rows - 1) / list.rows;
  }
  __device__ __forceinline__ int runs(const TileList& list, TileKind kind) const {
    return list.paired ? (tiles(list, kind) + 1) / 2 : tiles(list, kind);
  }
};

struct PackedRows {  // those of one sequence
  int first, count;
};

struct Segments {   // made by any/segments.cuh
  int* table;       // how many runs each list has, room, the segments, and the lists
  int lower_right;  // the corner where the diagonal of a sequence is; else the other
  TileList lists[kTileKinds];

  static constexpr int kHead = 8;  // before the segments
  __device__ __forceinline__ Segment* all() const { return reinterpret_cast<Segment*>(table + kHead); }
  __device__ __forceinline__ int runs(TileKind kind) const { return table[kind]; }
  __device__ __forceinline__ int sequence(TileKind kind, int run) const { return table[lists[kind].at + run]; }
};

struct ForwardParams {
  Array q, k, v, out;
  RowArray lse;
  Sizes sizes;
  Score score;
  Sink sink;
  Dropout dropout;
  LogitArray bias, mask;
  BlockMask blocks;
  Segments segments;
};

struct BackwardParams {
  Array q, k, v, dout, out, dq, dk, dv;
  RowArray lse, dlse;
  RowArray
      delta;      // or packed, for sm90/backward.cuh: (batch * heads_q, statistic_rows / 16, 2, 16), see `statistic_of`
  float* dq_sum;  // (batch * heads_q, 16-row blocks, 8-column blocks, 128): accumulator fragments
  uint32* turn;   // deterministic: work counter, then one counter for each (batch, head, query tile), or for sm90
                  // for each (batch, head, 16-row block), of which each tile uses its first
  Sizes sizes;
  Score score;
  Sink sink;
  float* dsink;  // (heads_q)
  Dropout dropout;
  LogitArray bias, mask;
  BiasGradient dbias;
  float* dbias_parts;            // (parts, elements of dbias)
  BlockMask blocks, key_blocks;  // queries by keys, keys by queries
  Segments segments;
};

struct Matrix {  // one head of an array in global memory; stride in bytes
  char* data;
  int64 stride;
  int rows, cols;
};

__device__ __forceinline__ Matrix head_of(const Array& array, int batch, int head, int rows, int cols, int item = 2) {
  return {static_cast<char*>(array.data) + (batch * array.batch + head * array.head) * item, array.row * item, rows,
          cols};
}

}  // namespace cupyflash
