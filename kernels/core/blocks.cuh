// Which tiles a block mask shows: FlashAttention's Algorithm 5 (arXiv 2205.14135). A kernel whose tiles divide those of
// the mask goes from one that is shown to the next; to it, a tile that is not shown does not exist.
#pragma once

#include "core/band.cuh"

namespace cupyflash {

// The tiles of kBlock columns in one row of the mask; without a mask every tile is shown.
template <bool kBlocks, int kBlock>
struct ShownTiles {
  static_assert(!kBlocks || kMaskTile % kBlock == 0, "a tile has one bit");
  static constexpr int kTilesOfBit = kBlocks ? kMaskTile / kBlock : 1;
  const uint32* shown;  // then, `words` further, the bits of what is hidden in part
  int words;

  // Of the row in which `row` lies: a query where the columns are keys, a key where they are queries.
  __device__ __forceinline__ static ShownTiles of(const BlockMask& mask, int batch, int head, int row) {
    if constexpr (!kBlocks) return {};
    const int64 rows = batch * mask.batch + head * mask.head + row / kMaskTile;
    return {mask.data + rows * 2 * mask.words, int(mask.words)};
  }

  // The first one that is shown from `tile` on, upwards; beyond `last` if there is none.
  __device__ __forceinline__ int up(int tile, int last) const {
    if constexpr (kBlocks)
#pragma unroll 1
      while (tile <= last) {
        const int bit = tile / kTilesOfBit;
        const uint32 word = __ldg(shown + bit / 32) >> bit % 32;
        if (word & 1) break;
        tile = (word != 0 ? bit + __ffs(word) - 1 : (bit / 32 + 1) * 32) * kTilesOfBit;
      }
    return tile;
  }
  // The same downwards; below `first` if there is none.
  __device__ __forceinline__ int down(int tile, int first) const {
    if constexpr (kBlocks)
#pragma unroll 1
      while (tile >= first) {
        const int bit = tile / kTilesOfBit;
        const uint32 word = __ldg(shown + bit / 32) << (31 - bit % 32);
        if (word >> 31) break;
        tile = (word != 0 ? bit - __clz(word) + 1 : bit / 32 * 32) * kTilesOfBit - 1;
      }
    return tile;
  }
  __device__ __forceinline__ bool has(int tile) const {
    if constexpr (!kBlocks) return true;
    return has_bit(0, tile / kTilesOfBit);
  }
  // Whether none is shown before, or after, `tile`.
  __device__ __forceinline__ bool is_first(int tile, int first) const {
    if constexpr (!kBlocks) return tile <= first;
    return down(tile - 1, first) < first;
  }
  __device__ __forceinline__ bool is_last(int tile, int last) const {
    if constexpr (!kBlocks) return tile == last;
    return up(tile + 1, last) > last;
  }
  // Whether a mask or a MaskMod may hide some of a tile.
  __device__ __forceinline__ bool in_part(int tile) const {
    if constexpr (!kBlocks) return true;
    return has_bit(words, tile / kTilesOfBit);
  }
  // How many of a range are shown.
  __device__ __forceinline__ int count(Range tiles) const {
    if constexpr (!kBlocks) return tiles.last - tiles.first + 1;
    if (tiles.last < tiles.first) return 0;
    const int first = tiles.first / kTilesOfBit, last = tiles.last / kTilesOfBit;
    int bits = 0;
#pragma unroll 1
    for (int i = first / 32; i <= last / 32; ++i) {
      uint32 word = __ldg(shown + i);
      if (i == first / 32) word &= ~0u << first % 32;
      if (i == last / 32) word &= ~0u >> (31 - last % 32);
      bits += __popc(word);
    }
    if constexpr (kTilesOfBit == 1) return bits;
    const int before = has_bit(0, first) ? tiles.first % kTilesOfBit : 0;
    const int after = has_bit(0, last) ? kTilesOfBit - 1 - tiles.last % kTilesOfBit : 0;
    return bits * kTilesOfBit - before - after;
  }

 private:
  __device__ __forceinline__ bool has_bit(int first_word, int bit) const {
    return __ldg(shown + first_word + bit / 32) >> bit % 32 & 1;
  }
};

// The tiles of kBlock queries that are shown some keys, within a range and in some query heads: those of the first head
// upwards, then those of the next.
template <bool kBlocks, int kBlock>
struct QueryTiles {
  Range range;
  int batch, first_key, head, end, tile;  // head: `end` where there are no more

  __device__ __forceinline__ void begin(const BlockMask& key_blocks, Range of_one_head, int its_batch,
                                        int its_first_key, int first_head, int heads) {
    range = of_one_head, batch = its_batch, first_key = its_first_key;
    head = first_head, end = first_head + heads, tile = range.first;
    find(key_blocks);
  }
  __device__ __forceinline__ bool left() const { return head < end; }
  __device__ __forceinline__ void next(const BlockMask& key_blocks) {
    ++tile;
    find(key_blocks);
  }
  // Whether the element mask hides some of `tile`.
  __device__ __forceinline__ bool in_part(const BlockMask& key_blocks) const {
    return of_head(key_blocks, head).in_part(tile);
  }
  // Before the first `next`.
  __device__ __forceinline__ int count(const BlockMask& key_blocks) const {
    int tiles = 0;
#pragma unroll 1
    for (int i = head; i < end; ++i) tiles += of_head(key_blocks, i).count(range);
    return tiles;
  }

 private:
  __device__ __forceinline__ ShownTiles<kBlocks, kBlock> of_head(const BlockMask& key_blocks, int i) const {
    return ShownTiles<kBlocks, kBlock>::of(key_blocks, batch, i, first_key);
  }
  __device__ __forceinline__ void find(const BlockMask& key_blocks) {
#pragma unroll 1
    for (; left(); ++head, tile = range.first) {
      tile = of_head(key_blocks, head).up(tile, range.last);
      if (tile <= range.last) return;
    }
  }
};

}  // namespace cupyflash
