// The copying side of sm90/backward.cuh: which tiles a block goes through, where they lie in shared memory, the warp
// that has them brought there, and the thread that keeps the order of a deterministic backward.
#pragma once

#include "any/dropout.cuh"
#include "core/blocks.cuh"
#include "core/score.cuh"
#include "core/segments.cuh"
#include "core/spec.cuh"
#include "sm90/backward_params.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/tile.cuh"

namespace cupyflash {

// What is to be done with one tile of queries, as the copying warp says it.
struct alignas(16) Job {  // flags, block and blocks are read together
  // Bit i: the band hides some score of group i. Then: a block mask does not show it whole; there is no tile before,
  // whose dq is to be made; the last tile of its keys; all is added before the next tile begins; no tile.
  static constexpr int kInPart = 64, kFirst = 128, kLast = 256, kDrains = 512, kEnd = 1024;
  int flags;
  uint32 block;  // of dq_sum, where the tile begins; `blocks` of them exist
  int blocks;
  int first_query;
  uint32 before;  // tiles of keys that add to dq before this one, if deterministic
};
struct alignas(8) Alibi {  // of a tile of queries and the present keys
  float slope;
  int origin;  // the query at the distance 0 from the first key, in the tile
};
template <bool kVarlen>
struct KeyTile {
  int first_key, head, batch;

  __device__ __forceinline__ void set(int key, int of_head, const Place<false>& place) {
    first_key = key, head = of_head, batch = place.batch;
  }
  __device__ __forceinline__ int seqlen_k(const Sizes& s) const { return s.seqlen_k; }
};
template <>
struct KeyTile<true> {
  int first_key, head, batch;  // the first row of the sequence
  int low, high, length_q, length_k;

  __device__ __forceinline__ void set(int key, int of_head, const Place<true>& place) {
    first_key = key, head = of_head, batch = place.k();
    low = place.sizes.low, high = place.sizes.high;
    length_q = place.sizes.seqlen_q, length_k = place.sizes.seqlen_k;
  }
  __device__ __forceinline__ Band band() const { return {low, high, length_q, length_k}; }
  __device__ __forceinline__ int seqlen_k(const Sizes&) const { return length_k; }
};

// The gradients of keys that no query sees, by one warp.
__device__ inline void clear_rows(const Matrix& m, int first, int count) {
  for (int row = first; row < min(first + count, m.rows); ++row)
    for (int col = lane_index(); col < m.cols; col += 32)
      reinterpret_cast<unsigned short*>(m.data + row * m.stride)[col] = 0;
}

template <HopperBackwardSpec kSpec>
struct BackwardTiles {  // in shared memory
  static constexpr int kBlockQ = kSpec.block_q, kBlockK = kSpec.block_k(), kSlots = kSpec.key_slots;
  static constexpr int kQBytes = tile_bytes(kBlockQ, kSpec.head_dim),
                       kDoutBytes = tile_bytes(kBlockQ, kSpec.head_dim_v);
  static constexpr int kKBytes = tile_bytes(kBlockK, kSpec.head_dim), kVBytes = tile_bytes(kBlockK, kSpec.head_dim_v);
  static constexpr int kDsBytes = tile_bytes(kBlockK, kBlockQ), kStatisticBytes = 8 * kBlockQ;
  static constexpr int kBarriers = 4 * kSlots + 4 * kSpec.stages + 6;
  static constexpr int kKeptBytes = 4 * Dropping::words(kBlockQ, kBlockK);
  static constexpr int kDecidingWarps = !kSpec.dropout ? 0 : kSpec.deterministic ? 2 : 3;  // the last ones of the four
  static constexpr int kPartBytes = 4 * kPartLanes, kParts = kBlockQ / 64;                 // of a group
  static constexpr int kWordBytes = kSpec.mask ? kSpec.groups * kParts * kPartBytes : 0;
  using TileLogits = Logits<kSpec.bias, false, kBlockQ, kBlockK, kSpec.logit_slots>;

  uint32 k, v, q, dout, ds, statistics, kept, words, barriers;
  Job* jobs;
  Alibi* alibis;
  LogitPlace* places;
  KeyTile<kSpec.varlen>* key_tiles;
  int* heads = nullptr;             // of queries, for functions of the user
  uint32 count = 0, key_count = 0;  // tiles so far, of queries and of keys

  __device__ __forceinline__ BackwardTiles(uint32 base, uint64* barriers, Job* jobs, Alibi* alibis, LogitPlace* places,
                                           KeyTile<kSpec.varlen>* key_tiles)
      : k(base),
        v(k + kSlots * kKBytes),
        q(v + kSlots * kVBytes),
        dout(q + kSpec.stages * kQBytes),
        ds(dout + kSpec.stages * kDoutBytes),
        statistics(ds + 2 * kDsBytes + TileLogits::kBytes),
        kept(statistics + kSpec.stages * kStatisticBytes),
        words(kept + (kSpec.dropout ? kSpec.stages * kKeptBytes : 0)),
        barriers(shared_address(barriers)),
        jobs(jobs),
        alibis(alibis),
        places(places),
        key_tiles(key_tiles) {}

  __device__ __forceinline__ Ring<kSlots> keys() const { return Ring<kSlots>(barriers, key_count); }
  __device__ __forceinline__ Ring<kSlots> values() const { return Ring<kSlots>(barriers + 16 * kSlots, key_count); }
  // q, with jobs, statistics and words.
  __device__ __forceinline__ Ring<kSpec.stages> queries() const {
    return Ring<kSpec.stages>(barriers + 32 * kSlots, count);
  }
  // With what dropout keeps.
  __device__ __forceinline__ Ring<kSpec.stages> douts() const {
    return Ring<kSpec.stages>(barriers + 32 * kSlots + 16 * kSpec.stages, count);
  }
  // dS^T, from all groups to all groups.
  __device__ __forceinline__ Ring<2> ds_ring() const {
    return Ring<2>(barriers + 32 * kSlots + 32 * kSpec.stages, count);
  }
  // Deterministic: full when it is this tile's turn to be added to dq, empty when all have added.
  __device__ __forceinline__ Ring<1> adding() const {
    return Ring<1>(barriers + 32 * kSlots + 32 * kSpec.stages + 32, count);
  }
  __device__ __forceinline__ Job& job(int ahead = 0) const { return jobs[queries().slot(ahead)]; }
  __device__ __forceinline__ Alibi& alibi(int ahead = 0) const { return alibis[queries().slot(ahead)]; }
  __device__ __forceinline__ LogitPlace& place() const { return places[queries().slot()]; }
  __device__ __forceinline__ int& head() const { return heads[queries().slot()]; }
  // Of the mask, for this lane of a group.
  __device__ __forceinline__ uint32 word(const char* shared, int group, int part, int ahead) const {
    const uint32 at = words + queries().slot(ahead) * kWordBytes + (group * kParts + part) * kPartBytes;
    return reinterpret_cast<const uint32*>(shared + (at - shared_address(shared)))[threadIdx.x % kPartLanes];
  }
  __device__ __forceinline__ KeyTile<kSpec.varlen>& key_tile() const { return key_tiles[key_count % kSlots]; }
  __device__ __forceinline__ void advance(bool last) {
    ++count;
    if (last) ++key_count;
  }

  __device__ __forceinline__ TileLogits logits() const {
    return TileLogits(ds + 2 * kDsBytes, barriers + 8 * kBarriers, count);
  }

  __device__ __forceinline__ void init() const {
    constexpr int kWarps = 4 * kSpec.groups;
    if constexpr (TileLogits::kAny) logits().ring.init(kWarps);
    keys().init(kWarps), values().init(kWarps), douts().init(kWarps, 1 + kDecidingWarps);
    queries().init(kWarps + (kSpec.deterministic ? 1 : 0) + (TileLogits::kAny ? 1 : 0));
    ds_ring().init(kWarps, kWarps), adding().init(kWarps);
  }
};

// The tiles of keys that a block takes, and the tiles of queries that see them; for the warp that copies.
// Deterministic and not rotated, a tile is taken when its turn comes, the last keys of a head first, so that a block
// waits only for blocks that have begun; and causal tiles of keys begin with queries that no later keys add to.
// Rotated, each tile of a head waits for all others: they belong to as many blocks, which have as many heads before
// them.
template <HopperBackwardSpec kSpec>
struct KeyTiles {
  static_assert(!(kSpec.blocks && kSpec.deterministic), "no registers are left to count what comes before");
  const HopperBackwardParams& p;
  Works<kSpec.varlen, kKeyTiles> works;
  Range seen;

  // With a block mask: the tiles of queries that the present keys are shown to. In shared memory, for the warp has few
  // registers.
  QueryTiles<kSpec.blocks, kSpec.block_q>& shown;

  __device__ __forceinline__ explicit KeyTiles(const HopperBackwardParams& p,
                                               QueryTiles<kSpec.blocks, kSpec.block_q>& shown)
      : p(p),
        shown(shown),
        works(p.keys, p.sizes, p.segments, takes_tickets() ? ticket() : blockIdx.x, gridDim.x, kSpec.deterministic) {
    skip_unseen();
  }
  __device__ __forceinline__ bool left() const { return works.left(); }
  __device__ __forceinline__ void next() {
    step();
    skip_unseen();
  }
  __device__ __forceinline__ Place<kSpec.varlen> place() const {
    return place_of<kSpec.varlen>(p.sizes, p.segments, works.work.batch);
  }

 private:
  __device__ __forceinline__ bool takes_tickets() const { return kSpec.deterministic && !p.rotated; }
  __device__ __forceinline__ uint32 ticket() const {
    uint32 index = 0;
    if (lane_index() == 0) index = atomicAdd(p.turn, 1u);
    return __shfl_sync(kFullWarp, index, 0);
  }
  __device__ __forceinline__ void step() {
    if (takes_tickets())
      works.jump(ticket());
    else
      works.next();
  }
  // To the first one that some query sees, from the present one on; the gradients of the others are 0.
  __device__ __forceinline__ void skip_unseen() {
    for (; left(); step()) {
      const Work& work = works.work;
      const Place<kSpec.varlen> its_place = place();
      const Sizes& s = sizes_in(p.sizes, its_place);
      const int first_key = work.tile * kSpec.block_k(), last_key = min(first_key + kSpec.block_k(), s.seqlen_k) - 1;
      seen = query_tiles_of(Band(s), {first_key, last_key}, kSpec.block_q);
      if constexpr (kSpec.blocks) shown.begin(p.key_blocks, seen, work.batch, first_key, work.head * s.group, s.group);
      if (kSpec.blocks ? shown.left() : seen.last >= seen.first) return;
      clear_rows(head_of(p.dk, its_place.k(), work.head, s.seqlen_k, s.head_dim), first_key, kSpec.block_k());
      clear_rows(head_of(p.dv, its_place.k(), work.head, s.seqlen_k, s.head_dim_v), first_key, kSpec.block_k());
    }
  }
};

// What to do with the queries from `first` on; `flags` knows what the mask does not say.
template <HopperBackwardSpec kSpec>
__device__ __forceinline__ Job make_job(const HopperBackwardParams& p, const Place<kSpec.varlen>& place,
                                        const Work& work, int head, int first, int flags) {
  const Sizes& s = sizes_in(p.sizes, place);
  const Band band(s);
#pragma unroll
  for (int group = 0; group < kSpec.groups; ++group) {
    const int key = work.tile * kSpec.block_k() + 64 * group;
    const Range seen_by_all = queries_of_all(band, {key, key + 63});
    if (first < seen_by_all.first || first + kSpec.block_q - 1 > seen_by_all.last) flags |= 1 << group;
  }
  const int q_blocks = (s.seqlen_q + 15) / 16;
  const uint32 of_head = kSpec.varlen ? uint32(place.block(s, head)) : uint32(work.batch * s.heads_q + head) * q_blocks;
  const uint32 block = of_head + first / 16;
  uint32 before = 0;
  if constexpr (kSpec.deterministic) {
    if (p.rotated) {  // all see all: the first to come is the last one that begins here or before, then the one below
      const int count = (s.seqlen_q + kSpec.block_q - 1) / kSpec.block_q;
      const int below = ((first / kSpec.block_q + 1) * p.keys.tiles - 1) / count - work.tile;
      before = below < 0 ? below + p.keys.tiles : below;
    } else {
      before = tiles_of(band, first, kSpec.block_q, kSpec.block_k()).last - work.tile;
    }
  }
  return {flags, block, min(kSpec.block_q / 16, q_blocks - first / 16), first, before};
}

// Deterministic: each tile of queries has a counter of the tiles of keys that were added to its dq. The thread that
// sees to the order: what it waits for, others need not. Its fence covers what they added before they arrived.
template <HopperBackwardSpec kSpec>
__device__ __forceinline__ void keep_order(const HopperBackwardParams& p, BackwardTiles<kSpec>& tiles) {
  const auto read_job = [&] {
    tiles.queries().wait();
    const Job job = tiles.job();
    barrier_arrive(tiles.queries().empty(tiles.queries().slot()));
    return job;
  };
  Job job = read_job();
  while (!(job.flags & Job::kEnd)) {
    uint32* const added = p.turn + 1 + job.block;
    while (load_acquire(added) < job.before) __nanosleep(20);
    const Ring<1> adding = tiles.adding();
    barrier_arrive(adding.full(0));
    tiles.advance(false);
    job = read_job();  // now, so that its place is not kept for long
    barrier_wait(adding.empty(0), adding.parity());
    add_release(added, 1);
  }
}

// Dropout: the warps that decide what is kept, while others copy and compute. `words`: of the tiles of dout. They read
// jobs, but need not release them: those who compute release a tile of queries after its words. All but the number of
// the word is found anew each time, for these warps have few registers.
template <HopperBackwardSpec kSpec>
__device__ __forceinline__ void decide_tiles(const HopperBackwardParams& p, BackwardTiles<kSpec>& tiles,
                                             uint32* words) {
  using Tiles = BackwardTiles<kSpec>;
  constexpr uint32 kThreads = 32 * Tiles::kDecidingWarps, kWords = Tiles::kKeptBytes / 4;
  static_assert(kWords % 32 == 0 && kWords >= kThreads, "a warp makes words of one tile at a time, and of every tile");
  uint32 i = opaque(threadIdx.x) % kThreads;  // of the words of all tiles
  while (true) {
    tiles.count = i / kWords;
    tiles.queries().wait();
    if (tiles.job().flags & Job::kEnd) return;
    barrier_wait(tiles.douts().empty(tiles.douts().slot()), tiles.douts().parity() ^ 1);
#pragma unroll 1
    do {
      tiles.count = i / kWords;
      const volatile LogitPlace& place = tiles.place();
      const Dropping dropping = {p.dropout, place.batch, place.head};
      words[i % (kSpec.stages * kWords)] =
          dropping.template word_of_tile<Tiles::kBlockK>(i % kWords, place.query, place.key);
      i += kThreads;
    } while (i % kWords >= kThreads);
    tiles.count = i / kWords - 1;
    tiles.douts().fill();
  }
}

// The thread that copies the bias: another one, for that warp has no registers left.
template <HopperBackwardSpec kSpec>
__device__ __forceinline__ void copy_logits(const HopperBackwardParams& p, BackwardTiles<kSpec>& tiles) {
  while (true) {
    tiles.queries().wait();
    const int flags = tiles.job().flags;
    const LogitPlace place = tiles.place();
    barrier_arrive(tiles.queries().empty(tiles.queries().slot()));
    if (flags & Job::kEnd) return;
    tiles.logits().copy(p.bias_map, p.mask_map, place);
    tiles.advance(false);
  }
}

// The warp that copies.
template <HopperBackwardSpec kSpec, class Mods>
__device__ __forceinline__ void copy_tiles(const HopperBackwardParams& p, BackwardTiles<kSpec>& tiles) {
  using Tiles = BackwardTiles<kSpec>;
  constexpr int kBlockQ = kSpec.block_q, kBlockK = kSpec.block_k(), kDim = kSpec.head_dim, kDimV = kSpec.head_dim_v;
  const Sizes& s = p.sizes;
  const ScoreChange<kSpec.softcap, kSpec.alibi> change = {p.score, s};
  using Where = Place<kSpec.varlen>;
  // Read again for each use: 24 registers do not hold it.
  const auto place_of_work = [&](const Work& work) {
    return place_of<kSpec.varlen>(s, p.segments, kSpec.varlen ? opaque(work.batch) : work.batch);
  };
  const auto copy_queries = [&](const Where& place, int first, int head, bool masked) {  // with what comes with them
    const uint32 full = tiles.queries().full(tiles.queries().slot()), slot = tiles.queries().slot();
    const int64 row = place.statistic(s, head) + first;
    barrier_expect(full, Tiles::kQBytes + Tiles::kStatisticBytes + (masked ? Tiles::kWordBytes : 0));
    copy_tile<kBlockQ, kDim>(tiles.q + slot * Tiles::kQBytes, p.q_map, full, first, head, place.rows_q());
    copy_bytes(tiles.statistics + slot * Tiles::kStatisticBytes, p.delta.data + 2 * row, full, Tiles::kStatisticBytes);
  };
  const auto copy_words = [&](const Work& work, int first, int head) {
    const uint32* source = p.words.data + work.batch * p.words.batch + head * p.words.head +
                           work.tile * kSpec.groups * p.words.rows + first / 64 * p.words.cols;
    uint32 target = tiles.words + tiles.queries().slot() * Tiles::kWordBytes;
#pragma unroll
    for (int group = 0; group < kSpec.groups; ++group, source += p.words.rows)
#pragma unroll
      for (int part = 0; part < Tiles::kParts; ++part, target += Tiles::kPartBytes)
        copy_bytes(target, source + part * p.words.cols, tiles.queries().full(tiles.queries().slot()),
                   Tiles::kPartBytes);
  };
  const auto copy_keys = [&](const Where& place, const Work& work) {
    const int slot = tiles.keys().slot(), first_key = work.tile * kBlockK;
    const uint32 full = tiles.keys().full(slot);
    barrier_wait(tiles.keys().empty(slot), tiles.keys().parity() ^ 1);
    tiles.key_tile().set(first_key, work.head, place);
    barrier_expect(full, Tiles::kKBytes);
    copy_tile<kBlockK, kDim>(tiles.k + slot * Tiles::kKBytes, p.k_map, full, first_key, work.head, place.rows_k());
  };

  __shared__ QueryTiles<kSpec.blocks, kBlockQ> shown;
  KeyTiles<kSpec> key_tiles(p, shown);
  bool drained = true;
  while (key_tiles.left()) {
    const Work work = key_tiles.works.work;
    const Range seen = key_tiles.seen;
    const int count = seen.last - seen.first + 1;
    const int of_head =
        kSpec.varlen ? (sizes_in(s, place_of_work(work)).seqlen_k + kBlockK - 1) / kBlockK : p.keys.tiles;
    int tile = p.rotated ? seen.first + int(int64(work.tile) * count / of_head) : seen.first;
    int in_group = 0, in_head = 0;
    bool first_of_keys = true;
#pragma unroll 1
    while (true) {
      const bool begins = kSpec.blocks ? first_of_keys : in_group == 0 && in_head == 0;
      bool in_part = kSpec.mask;
      if constexpr (kSpec.blocks) {
        tile = shown.tile, in_group = shown.head - work.head * s.group;
        if constexpr (kSpec.mask || Mods::kMask) in_part = shown.in_part(p.key_blocks);
        shown.next(p.key_blocks);
      }
      const bool last = kSpec.blocks ? !shown.left() : in_group == s.group - 1 && in_head == count - 1;
      const int slot = tiles.queries().slot(), first = tile * kBlockQ, head = work.head * s.group + in_group;
      if (last) key_tiles.next();
      // A block must not keep the keys of two works, each with one tile, while it waits for those of a third.
      const bool drains = last && (kSpec.key_slots == 1 || !key_tiles.left() || begins);
      barrier_wait(tiles.queries().empty(slot), tiles.queries().parity() ^ 1);
      if (lane_index() == 0) {
        const int flags = (drained ? Job::kFirst : 0) | (last ? Job::kLast : 0) | (drains ? Job::kDrains : 0) |
                          (in_part ? Job::kInPart : 0);
        tiles.job() = make_job<kSpec>(p, place_of_work(work), work, head, first, flags);
        if constexpr (kSpec.alibi)
          tiles.alibi() = {change.slope(work.batch, head),
                           work.tile * kBlockK - place_of_work(work).diagonal(p.score) - first};
        if constexpr (Tiles::TileLogits::kAny || kSpec.dropout)
          tiles.place() = {work.batch, head, first, work.tile * kBlockK};
        if constexpr (Mods::kScore || Mods::kMask) tiles.head() = head;
        copy_queries(place_of_work(work), first, head, kSpec.mask && in_part);
        if (kSpec.mask && in_part) copy_words(work, first, head);
        if (begins)
          copy_tile<kBlockK, kDimV>(tiles.v + tiles.values().slot() * Tiles::kVBytes, p.v_map,
                                    tiles.values().acquire(Tiles::kVBytes), work.tile * kBlockK, work.head,
                                    place_of_work(work).rows_k());
        copy_tile<kBlockQ, kDimV>(tiles.dout + slot * Tiles::kDoutBytes, p.dout_map,
                                  tiles.douts().acquire(Tiles::kDoutBytes), first, head, place_of_work(work).rows_q());
        if (begins) copy_keys(place_of_work(work), work);  // last: the dq of the work before reads the place
      }
      __syncwarp();
      drained = drains;
      tiles.advance(last);
      if (last) break;
      if constexpr (kSpec.blocks) {
        first_of_keys = false;
        continue;
      }
      if (++tile > seen.last) tile = seen.first;
      if (++in_head == count) in_head = 0, ++in_group;
    }
  }
  if (lane_index() == 0) {
    const int slot = tiles.queries().slot();
    barrier_wait(tiles.queries().empty(slot), tiles.queries().parity() ^ 1);
    tiles.job().flags = Job::kEnd;
    barrier_arrive(tiles.queries().full(slot));
  }
}

}  // namespace cupyflash
