// Bias and mask on Hopper: the copy engine brings what a tile of scores needs of them into shared memory while other
// tiles are computed; a lane reads its elements there when its scores have come. An axis along which an array was
// broadcast has one entry, in memory and in the tile.
#pragma once

#include "any/logits.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/tile.cuh"

namespace cupyflash {

struct LogitMap {
  TensorMap map;         // (seqlen_k, heads_q, seqlen_q, batch)
  int batch, head, row;  // 1, or 0 along an axis with one entry for all
};

struct LogitPlace {  // where a tile begins
  int batch, head, query, key;
};

// Elements of kItem bytes, 0 where there is no array: panels of 128 bytes a row, in 128-byte swizzle.
template <int kItem, int kRows, int kCols>
struct LogitTile {
  static constexpr int kPanelCols = kItem > 0 ? kRowBytes / kItem : kCols, kPanelBytes = kRows * kRowBytes;
  static constexpr int kPanels = (kCols + kPanelCols - 1) / kPanelCols, kBytes = kItem > 0 ? kPanels * kPanelBytes : 0;

  // Rows are the queries of some heads, query by query.
  __device__ __forceinline__ static int bytes(const LogitMap& array, int queries, int heads) {
    return kItem > 0 ? kPanels * kRowBytes * (array.row ? queries : 1) * (array.head ? heads : 1) : 0;
  }
  __device__ __forceinline__ static void copy(uint32 target, const LogitMap& array, uint32 full, const LogitPlace& at) {
    if constexpr (kItem > 0)
#pragma unroll
      for (int i = 0; i < kPanels; ++i)
        copy_box(target + i * kPanelBytes, array.map, full, at.key + i * kPanelCols, at.query * array.row,
                 at.head * array.head, at.batch * array.batch);
  }
  // Columns that add no bit to those of a lane's own may be added by `later`.
  __device__ __forceinline__ static uint32 place(int row, int col) {
    return col / kPanelCols * kPanelBytes + row * kRowBytes + (col % kPanelCols * kItem ^ row % 8 * 16);
  }
  __device__ __forceinline__ static uint32 later(uint32 place, int col) {
    return (place ^ col % kPanelCols * kItem) + col / kPanelCols * kPanelBytes;
  }
};

// Of the scores x[j][i] of a fragment whose rows are queries: read by pairs of keys, or by 16 keys in 16 bits.
template <int kItem, int kRows, int kCols>
struct RowItems {
  using Tile = LogitTile<kItem, kRows, kCols>;
  static constexpr bool kByMatrix = kItem == 2;
  uint32 first[2];  // of the lane's two rows; kByMatrix: first[0] is what it reads for the warp
  uint32 words[4];

  // `row_of(r)`: the row of the tile of the fragment's row r.
  template <class RowOf>
  __device__ __forceinline__ RowItems(uint32 tile, RowOf row_of) {
    const int lane = lane_index();
    if constexpr (kByMatrix) {
      first[0] = tile + Tile::place(row_of(lane % 16), lane / 16 * 8);
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        first[half] = tile + Tile::place(row_of(Accumulator<8>::row(half)), Accumulator<8>::col());
    }
  }
  // The bits, for j and i in their order.
  __device__ __forceinline__ uint32 operator()(int j, int i) {
    if constexpr (kByMatrix) {
      if (j % 2 == 0 && i == 0) load_matrix(words, Tile::later(first[0], 8 * j));
      return words[j % 2 * 2 + i / 2] >> i % 2 * 16 & 0xffff;
    } else {
      if (i % 2 == 0) load_pair<kItem>(words, Tile::later(first[i / 2], 8 * j));
      return words[i % 2];
    }
  }
};

// The same where the rows are keys.
template <int kItem, int kRows, int kCols>
struct ColumnItems {
  using Tile = LogitTile<kItem, kRows, kCols>;
  static constexpr bool kByMatrix = kItem == 2;
  uint32 first[2];  // of the lane's two columns; kByMatrix: as above
  uint32 words[4];
  int step;  // bytes to the next 8 queries

  // Of the keys from the column `col` on.
  __device__ __forceinline__ ColumnItems(uint32 tile, const LogitMap& array, int col)
      : step(array.row * 8 * kRowBytes) {
    const int lane = lane_index();
    if constexpr (kByMatrix) {
      first[0] = tile + Tile::place(array.row * (lane / 16 * 8 + lane % 8), col + lane / 8 % 2 * 8);
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        first[i] = tile + Tile::place(array.row * (Accumulator<8>::col() + i), col + Accumulator<8>::row(0));
    }
  }
  __device__ __forceinline__ uint32 operator()(int j, int i) {
    if constexpr (kByMatrix) {
      if (j % 2 == 0 && i == 0) load_matrix_transposed(words, first[0] + j * step);
      return words[j % 2 * 2 + i / 2] >> i % 2 * 16 & 0xffff;
    } else {
      return load_item<kItem>(Tile::later(first[i % 2], i / 2 * 8) + j * step);
    }
  }
};

template <int kBias>
__device__ __forceinline__ float bias_value(uint32 bits) {
  if constexpr (kBias == kFloat32Bias) return __uint_as_float(bits);
  if constexpr (kBias == kFloat16Bias) return float16::unpack(bits).x;
  return bfloat16::unpack(bits).x;
}

// The tiles of both, kSlots of them on their way.
template <int kBias, bool kMask, int kRows, int kCols, int kSlots>
struct Logits {
  static constexpr int kBiasItem = kBias == kNoBias ? 0 : kBias == kFloat32Bias ? 4 : 2;
  using BiasTile = LogitTile<kBiasItem, kRows, kCols>;
  using MaskTile = LogitTile<kMask, kRows, kCols>;
  static constexpr bool kAny = kBias != kNoBias || kMask;
  static constexpr int kSlotBytes = BiasTile::kBytes + MaskTile::kBytes, kBytes = kSlots * kSlotBytes;
  static constexpr int kBarriers = 2 * kSlots;
  static_assert(kAny == (kSlots > 0));

  uint32 base;
  Ring<kSlots> ring;

  __device__ __forceinline__ Logits(uint32 base, uint32 barriers, uint32 count = 0)
      : base(base), ring(barriers, count) {}
  __device__ __forceinline__ uint32 bias() const { return base + ring.slot() * kSlotBytes; }
  __device__ __forceinline__ uint32 mask() const { return bias() + BiasTile::kBytes; }

  // The thread that copies. A tile has `queries` of `heads`.
  __device__ __forceinline__ void copy(const LogitMap& bias_map, const LogitMap& mask_map, const LogitPlace& at,
                                       int queries = kRows, int heads = 1) {
    const int bytes = BiasTile::bytes(bias_map, queries, heads) + MaskTile::bytes(mask_map, queries, heads);
    const uint32 full = ring.acquire(bytes);
    BiasTile::copy(bias(), bias_map, full, at);
    MaskTile::copy(mask(), mask_map, full, at);
    ring.advance();
  }
  // Those that compute, between them.
  __device__ __forceinline__ void wait() const {
    if constexpr (kAny) ring.wait();
  }
  __device__ __forceinline__ void release() {
    if constexpr (kAny) {
      fence_async_shared();  // the copy engine writes next
      __syncwarp();
      ring.release();
      ring.advance();
    }
  }
  template <class RowOf>
  __device__ __forceinline__ auto row_bias(RowOf row_of) const {
    return [items = RowItems<kBiasItem, kRows, kCols>(bias(), row_of)](int j, int i) mutable {
      return bias_value<kBias>(items(j, i));
    };
  }
  template <class RowOf>
  __device__ __forceinline__ auto row_mask(RowOf row_of) const {
    return RowItems<1, kRows, kCols>(mask(), row_of);
  }
  __device__ __forceinline__ auto column_bias(const LogitMap& array, int col) const {
    return [items = ColumnItems<kBiasItem, kRows, kCols>(bias(), array, col)](int j, int i) mutable {
      return bias_value<kBias>(items(j, i));
    };
  }
  __device__ __forceinline__ auto column_mask(const LogitMap& array, int col) const {
    return ColumnItems<1, kRows, kCols>(mask(), array, col);
  }
};

}  // namespace cupyflash
