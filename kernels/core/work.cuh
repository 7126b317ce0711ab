// Which tile a block computes. Blocks start in the order of their index: within a section of heads whose shared
// operands fit in L2, the heads run side by side, tile after tile, the longest tiles of a causal mask first.
#pragma once

#include "core/params.cuh"

namespace cupyflash {

struct Work {
  int tile, batch, head;
};

// `heads` is the number of heads of one batch, `tiles` the tiles of one head; `descending` starts with the last tile.
__device__ inline Work find_work(uint32 index, int tiles, int batch, int heads, int section, bool descending) {
  const uint32 pairs = uint32(batch) * heads, per_section = uint32(section) * tiles;
  const uint32 first = index / per_section * section, rest = index % per_section;
  const uint32 width = min(uint32(section), pairs - first);
  const uint32 tile = rest / width, pair = first + rest % width;
  return {int(descending ? tiles - 1 - tile : tile), int(pair / heads), int(pair % heads)};
}

// The work of an item of so many heads, in the order of the runs of all sequences; its batch is the number of the
// sequence. Within one the order is that of the other `find_work`, in sections of heads that share `sizes.section`
// rows.
__device__ inline Work find_work(const Segments& segments, TileKind kind, const Sizes& s, int heads, uint32 item,
                                 bool descending) {
  const TileList& list = segments.lists[kind];
  const int sequence = segments.sequence(kind, item / heads);
  const Segment& segment = segments.all()[sequence];
  const int shared_rows = kind == kQueryTiles ? segment.seqlen_k : segment.seqlen_q;
  const int section = max(1, s.section / max(1, shared_rows)) * (heads / (s.heads_q / s.group));
  Work work = find_work(item - uint32(segment.first[kind]) * heads, segment.runs(list, kind), 1, heads,
                        min(section, heads), descending);
  work.batch = sequence;
  return work;
}

// The tiles that one persistent block computes, one after the other: those of one run of every `step`, dealt back and
// forth. That evens out what pairs leave, the middle one of an odd number of tiles; and the straight walk spills.
template <bool kVarlen = false, TileKind kKind = kQueryTiles>
struct Works {
  const Order& order;  // of packed sequences only the heads
  const Sizes& sizes;
  const Segments& segments;
  uint32 run, step, stride;  // stride: to the next run
  bool descending;           // the last tiles of a head are the longest
  Work work;
  int partner;  // the tile that ends the run

  __device__ __forceinline__ Works(const Order& order, const Sizes& sizes, const Segments& segments, uint32 first,
                                   uint32 step, bool descending = true)
      : order(order),
        sizes(sizes),
        segments(segments),
        run(first),
        step(step),
        stride(2 * (step - first) - 1),
        descending(descending) {
    find();
  }
  __device__ __forceinline__ bool left() const {
    return run < uint32(kVarlen ? segments.runs(kKind) * order.heads : order.all_runs);
  }
  __device__ __forceinline__ void next() {
    if (work.tile != partner) {
      work.tile = partner;
    } else {
      jump(run + stride);
      stride = 2 * step - stride;
    }
  }
  __device__ __forceinline__ void jump(uint32 to) {
    run = to;
    find();
  }

 private:
  __device__ __forceinline__ void find() {
    if constexpr (kVarlen) {
      if (!left()) return;
      work = find_work(segments, kKind, sizes, order.heads, run, false);
      const TileList& list = segments.lists[kKind];
      const int last = segments.all()[work.batch].tiles(list, kKind) - 1;
      if (descending) work.tile = last - work.tile;
      partner = list.paired ? last - work.tile : work.tile;
      return;
    }
    work = find_work(run, order.runs, sizes.batch, order.heads, sizes.section, false);
    if (descending) work.tile = order.tiles - 1 - work.tile;
    partner = order.paired ? order.tiles - 1 - work.tile : work.tile;
  }
};

}  // namespace cupyflash
