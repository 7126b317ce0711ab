// dk and dv on Hopper for wide heads, where the dq of sm90/backward.cuh would cost more than its products: it has a
// kernel of its own. A block owns 64 keys of one key head and goes through the queries that see them, for every query
// head of the group. One warpgroup copies; the other two share the work by product, not by rows:
//   for dv   S^T = k q^T         P^T = exp(scale S^T - lse)     dv += P^T dout
//   for dk   dP^T = v dout^T     dS^T = P^T (dP^T - delta)      dk += dS^T q
// Both hold the same keys and queries in the same lanes, so that P goes from lane to lane through shared memory. Each
// has its next scores issued before the sum that the last ones go into, and computes while the sum goes on.
#pragma once

#include "any/dropout.cuh"
#include "any/mods.cuh"
#include "core/blocks.cuh"
#include "core/epilogue.cuh"
#include "core/score.cuh"
#include "core/segments.cuh"
#include "core/spec.cuh"
#include "sm90/backward_params.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/tile.cuh"
#include "sm90/wgmma.cuh"

namespace cupyflash {

constexpr int kTile = 64;  // keys of a block, and queries of a tile

// One side of the work: keys (k or v) and the tiles of queries that they meet (q or dout), with one statistic of each
// query (lse or delta). In panels of 64 columns: the first `kKeptPanels` of the keys are kept in registers, where a
// product reads them for nothing; they arrive through the ring, as the tile before the first. The others stay in
// shared memory.
template <class T, int kCols, int kKeptPanels, int kSlots>
struct Side {
  static constexpr int kPanelBytes = tile_bytes(kTile, 64), kTileBytes = tile_bytes(kTile, kCols);
  static constexpr int kKept = kKeptPanels < panels(kCols) ? kKeptPanels : panels(kCols), kRest = panels(kCols) - kKept;
  static constexpr int kBytes = kRest * kPanelBytes + kSlots * kTileBytes, kBarriers = 2 + 2 * kSlots;

  uint32 rest, tiles;
  float* statistics;
  Ring<1> rest_ring;
  Ring<kSlots> ring;
  uint32 kept[kKept > 0 ? 4 * kKept : 1][4];

  __device__ __forceinline__ Side(uint32 base, float* statistics, uint64* barriers)
      : rest(base),
        tiles(base + kRest * kPanelBytes),
        statistics(statistics),
        rest_ring(shared_address(barriers)),
        ring(shared_address(barriers + 2)) {}

  // A tile is there with its bytes and its statistics, and free when both warpgroups have released it.
  __device__ __forceinline__ void init() const { rest_ring.init(4), ring.init(8, 2); }
  __device__ __forceinline__ uint32 tile() const { return tiles + ring.slot() * kTileBytes; }
  __device__ __forceinline__ float* statistic() const { return statistics + ring.slot() * kTile; }

  // The thread that copies.
  template <class Batch>
  __device__ __forceinline__ void copy_keys(const TensorMap& keys, int row, int head, Batch batch) {
    if constexpr (kKept > 0) {
      const uint32 full = ring.acquire(kKept * kPanelBytes);
#pragma unroll
      for (int i = 0; i < kKept; ++i) copy_box(tile() + i * kPanelBytes, keys, full, 64 * i, row, head, batch);
      ring.advance();
    }
    if constexpr (kRest > 0) {
      const uint32 full = rest_ring.acquire(kRest * kPanelBytes);
#pragma unroll
      for (int i = 0; i < kRest; ++i) copy_box(rest + i * kPanelBytes, keys, full, 64 * (kKept + i), row, head, batch);
      rest_ring.advance();
    }
  }
  template <class Batch>
  __device__ __forceinline__ void copy_queries(const TensorMap& queries, int row, int head, Batch batch) {
    copy_tile<kTile, kCols>(tile(), queries, ring.acquire(kTileBytes), row, head, batch);
    ring.advance();
  }

  // The warp that adds the statistics: `get(row)` is that of a row.
  __device__ __forceinline__ void pass_keys() {
    if constexpr (kKept > 0) wait_for_room(), arrive();
  }
  template <class Get>
  __device__ __forceinline__ void add_statistics(int row, Get get) {
    const int lane = lane_index();
    const float x[2] = {get(row + lane), get(row + lane + 32)};
    wait_for_room();
    statistic()[lane] = x[0], statistic()[lane + 32] = x[1];
    __syncwarp();
    arrive();
  }

  // The warpgroup that multiplies the keys, and the one that does not.
  __device__ __forceinline__ void take_keys() {
    if constexpr (kKept > 0) {
      ring.wait();
      const int row = warp_index() % 4 * 16 + lane_index() % 16;
#pragma unroll
      for (int step = 0; step < 4 * kKept; ++step) {
        const int unit = 2 * (step % 4) + lane_index() / 16;
        load_matrix(kept[step], tile() + step / 4 * kPanelBytes + row * kRowBytes + (unit ^ row % 8) * 16);
      }
      fence_async_shared();  // the copy engine writes next
      __syncwarp();
      release();
    }
    if constexpr (kRest > 0) rest_ring.wait();
  }
  __device__ __forceinline__ void skip_keys() {
    if constexpr (kKept > 0) {
      ring.wait();  // or this release could count for the tile that was there before
      release();
    }
  }
  __device__ __forceinline__ void release_keys() {
    if constexpr (kRest > 0) rest_ring.release(), rest_ring.advance();
  }
  __device__ __forceinline__ void release() { ring.release(), ring.advance(); }

  // scores = keys * tile^T
  __device__ __forceinline__ void issue_scores(Accumulator<kTile>& scores) const {
    const RowOperand<kTile> others(rest), queries(tile());
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kCols / 16; ++step) {
      if (step < 4 * kKept)
        Wgmma<T, kTile>::dot_rows(scores.x, kept[step < 4 * kKept ? step : 0], queries[step], step > 0);
      else
        Wgmma<T, kTile>::dot_rows(scores.x, others[step - 4 * kKept], queries[step], step > 0);
    }
    wgmma_commit();
  }
  // sum += weights * tile
  __device__ __forceinline__ void issue_sum(Accumulator<kCols>& sum, const uint32 (&weights)[kTile / 16][4]) const {
    const ColumnOperand<kTile> rows(tile());
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kTile / 16; ++step) Wgmma<T, kCols>::times(sum.x, weights[step], rows[step]);
    wgmma_commit();
  }

 private:
  __device__ __forceinline__ void wait_for_room() const { barrier_wait(ring.empty(ring.slot()), ring.parity() ^ 1); }
  __device__ __forceinline__ void arrive() {
    if (lane_index() == 0) barrier_arrive(ring.full(ring.slot()));
    ring.advance();
  }
};

// P^T, with softcap multiplied by its derivative, from a warp of the one warpgroup to the same warp of the other, two
// tiles of 16 x 64 in flight: in 16 bits, in units of 16 bytes a lane.
struct Handover {
  static constexpr int kBytes = 2 * 2 * kTile * kTile, kBarriers = 4 * 4;
  Ring<2> ring;
  uint4* slots;

  __device__ __forceinline__ Handover(char* base, uint64* barriers)
      : ring(shared_address(barriers) + warp_index() % 4 * 32),
        slots(reinterpret_cast<uint4*>(base) + threadIdx.x % 128) {}

  __device__ __forceinline__ static void init(uint64* barriers) {
    for (int i = 0; i < kBarriers; ++i) barrier_init(shared_address(barriers + i), 1);
  }
  __device__ __forceinline__ uint4* slot(int i) const { return slots + (4 * ring.slot() + i) * 128; }

  __device__ __forceinline__ void put(const uint32 (&x)[4][4]) {
    barrier_wait(ring.empty(ring.slot()), ring.parity() ^ 1);
#pragma unroll
    for (int i = 0; i < 4; ++i) *slot(i) = {x[i][0], x[i][1], x[i][2], x[i][3]};
    __syncwarp();
    if (lane_index() == 0) barrier_arrive(ring.full(ring.slot()));
    ring.advance();
  }
  // In the order of `put`; then `done`.
  __device__ __forceinline__ void wait() const { ring.wait(); }
  __device__ __forceinline__ uint4 get(int i) const { return *slot(i); }
  __device__ __forceinline__ void done() {
    __syncwarp();
    ring.release();
    ring.advance();
  }
};

// The loop of a warpgroup over `tiles` tiles of queries: sum += weights * tile of `right`, where `weigh` makes the
// weights of left's scores. `zero` is 0, which the compiler does not know: a plain copy of the weights would make it
// write them where the sum still reads the last ones, and then wait after every product.
template <class Left, class Right, int kCols, class Weigh>
__device__ __forceinline__ void accumulate(Left& left, Right& right, Accumulator<kCols>& sum, int tiles, uint32 zero,
                                           Weigh weigh) {
  Accumulator<kTile> scores;
  uint32 weights[kTile / 16][4], next[kTile / 16][4];
  left.take_keys();
  left.ring.wait();
  left.issue_scores(scores);
  wgmma_wait<0>();
  weigh(scores, weights);
  left.release();
  right.skip_keys();
#pragma unroll 1
  for (int i = 1; i < tiles; ++i) {
    left.ring.wait();
    left.issue_scores(scores);
    right.ring.wait();
    right.issue_sum(sum, weights);  // of the tile before
    wgmma_wait<1>();                // the scores are there, the sum goes on
    weigh(scores, next);
    left.release();
    wgmma_wait<0>();
    right.release();
#pragma unroll
    for (int step = 0; step < kTile / 16; ++step)
#pragma unroll
      for (int j = 0; j < 4; ++j) weights[step][j] = next[step][j] ^ zero;
  }
  left.release_keys();
  right.ring.wait();
  right.issue_sum(sum, weights);
  wgmma_wait<0>();
  right.release();
}

template <class T, HopperKeysSpec kSpec, class Mods = NoMods>
__global__ void __launch_bounds__(kSpec.threads(), 1)
    hopper_keys(const __grid_constant__ Modified<HopperBackwardParams, Mods> p) {
  using Queries = Side<T, kSpec.head_dim, kSpec.kept, kSpec.slots>;
  using Douts = Side<T, kSpec.head_dim_v, kSpec.kept, kSpec.slots_dout>;
  static_assert(registers_suffice(kSpec), "what the roles take is more than a block has");
  extern __shared__ __align__(1024) char shared[];
  using TileLogits = Logits<kSpec.bias, kSpec.mask, kTile, kTile, kSpec.logit_slots>;
  __shared__ uint64 barriers[Queries::kBarriers + Douts::kBarriers + Handover::kBarriers + TileLogits::kBarriers];
  char* const base = shared + (-shared_address(shared) & 1023);
  char* const handover_base = base + Queries::kBytes + Douts::kBytes;
  float* const statistics = reinterpret_cast<float*>(handover_base + Handover::kBytes + TileLogits::kBytes);
  uint64* const handover_barriers = barriers + Queries::kBarriers + Douts::kBarriers;
  Queries queries(shared_address(base), statistics, barriers);
  Douts douts(shared_address(base) + Queries::kBytes, statistics + kSpec.slots * kTile, barriers + Queries::kBarriers);
  Handover handover(handover_base, handover_barriers);
  TileLogits logits(shared_address(handover_base) + Handover::kBytes,
                    shared_address(handover_barriers + Handover::kBarriers));
  const int warpgroup = same_in_warp(threadIdx.x / 128);
  if (threadIdx.x == 0) {
    queries.init(), douts.init(), Handover::init(handover_barriers);
    if constexpr (TileLogits::kAny) logits.ring.init(4);
    fence_barrier_init();  // for the copy engine; for the other threads the barrier below
  }
  __syncthreads();

  const Sizes& s = p.sizes;
  const Band band(s);
  using Where = Place<kSpec.varlen>;
  using Change = ScoreChange<kSpec.softcap, kSpec.alibi, false, Mods>;
  static_assert(!Change::kModded || !TileLogits::kAny, "no registers are left for both");
  static_assert(!kSpec.blocks || kSpec.bias == kNoBias, "its tiles come for all keys");
  static_assert(!kSpec.dropout || !Change::kModded && !TileLogits::kAny, "no registers are left for both");
  const Change change = {p.score, s};
  Works<kSpec.varlen, kKeyTiles> works(p.keys, s, p.segments, blockIdx.x, gridDim.x, false);
  const auto find_place = [&] { return place_of<kSpec.varlen>(s, p.segments, works.work.batch); };
  const auto tiles_of_work = [&](const Where& place) {  // of queries, in each head of the group
    const int first_key = works.work.tile * kTile;
    return query_tiles_of(band_in(band, place), {first_key, min(first_key + kTile, sizes_in(s, place).seqlen_k) - 1},
                          kTile);
  };
  const auto shown_to = [&](Range tiles) {
    const Work& work = works.work;
    const int first_head = work.head * s.group;
    QueryTiles<kSpec.blocks, kTile> shown;
    if constexpr (kSpec.blocks) shown.begin(p.key_blocks, tiles, work.batch, work.tile * kTile, first_head, s.group);
    return shown;
  };

  const auto count_of = [&](Range tiles) {
    return kSpec.blocks ? shown_to(tiles).count(p.key_blocks) : (tiles.last - tiles.first + 1) * s.group;
  };

  if (warpgroup == 2) {  // a thread copies for each side, and a warp adds the statistics that go with its tiles
    give_registers<kSpec.copying_registers()>();
    const int warp = warp_index() % 4;
    if (warp < 2 && lane_index() > 0) return;
    if (warp == 0) prefetch_map(p.k_map), prefetch_map(p.q_map);
    if (warp == 1) prefetch_map(p.v_map), prefetch_map(p.dout_map);
    for (; works.left(); works.next()) {
      const Work& work = works.work;
      const Where place = find_place();
      const Range tiles = tiles_of_work(place);
      auto shown = shown_to(tiles);
      if (kSpec.blocks ? !shown.left() : tiles.last < tiles.first) continue;
      if (warp == 0) queries.copy_keys(p.k_map, work.tile * kTile, work.head, place.rows_k());
      if (warp == 1) douts.copy_keys(p.v_map, work.tile * kTile, work.head, place.rows_k());
      if (warp == 2) queries.pass_keys();
      if (warp == 3) douts.pass_keys();
      const auto pass = [&](int head, int first, int last, bool in_part) {
        const auto lse = [&](int row) {  // of a row that is not there or sees no key: P is 0
          const float natural =
              row < sizes_in(s, place).seqlen_q ? p.lse.at(place.q(), head)[row * p.lse.row] : -kInfinity;
          return lse_in_base_2 < kSpec.bias != kNoBias || Mods::kScore > (natural);
        };
        const auto delta = [&](int row) {
          return row < sizes_in(s, place).seqlen_q ? p.delta.at(place.q(), head)[row * p.delta.row] : 0.f;
        };
        for (int row = first * kTile; row <= last * kTile; row += kTile) {
          if (warp == 0) queries.copy_queries(p.q_map, row, head, place.rows_q());
          if (warp == 1) douts.copy_queries(p.dout_map, row, head, place.rows_q());
          if (warp == 2) queries.add_statistics(row, lse);
          if constexpr (TileLogits::kAny)
            if (warp == 2 && lane_index() == 0 && in_part)
              logits.copy(p.bias_map, p.mask_map, {work.batch, head, row, work.tile * kTile});
          if (warp == 3) douts.add_statistics(row, delta);
        }
      };
      if constexpr (kSpec.blocks)
        for (; shown.left(); shown.next(p.key_blocks))
          pass(shown.head, shown.tile, shown.tile, !kSpec.mask || shown.in_part(p.key_blocks));
      else
        for (int head = work.head * s.group; head < (work.head + 1) * s.group; ++head)
          pass(head, tiles.first, tiles.last, true);
    }
    return;
  }

  take_registers<kSpec.registers()>();
  const int warp_row = warp_index() % 4 * 16;  // a row of the block's 64 keys
  const uint32 zero = s.group < 0;
  if (warpgroup == 0) {  // dv
    for (; works.left(); works.next()) {
      const Work& work = works.work;
      const Where place = find_place();
      const Band& its_band = band_in(band, place);
      const int first_key = work.tile * kTile;
      const Range tiles = tiles_of_work(place),
                  seen_by_all = queries_of_all(its_band, {first_key, first_key + kTile - 1});
      Accumulator<kSpec.head_dim_v> dv;
      dv.clear();
      int tile = tiles.first, head = work.head * s.group;
      auto shown = shown_to(tiles);
      float slope = 0.f;
      const auto weigh = [&](Accumulator<kTile>& prob, uint32(&weights)[kTile / 16][4]) {
        bool in_part = true;
        if constexpr (kSpec.blocks) {
          tile = shown.tile, head = shown.head;
          if constexpr (kSpec.mask || Mods::kMask) in_part = shown.in_part(p.key_blocks);
          shown.next(p.key_blocks);
        }
        const int first_query = tile * kTile;
        const bool masked = first_query < seen_by_all.first || first_query + kTile - 1 > seen_by_all.last;
        const auto visible = [&](int key) { return its_band.queries(key); };
        const auto lse_of = [&](int j) {
          return *reinterpret_cast<const float2*>(queries.statistic() + 8 * j + prob.col());
        };
        Weights<kTile> rounded;
        if constexpr (Change::kAny || TileLogits::kAny) {
          if ((kSpec.alibi || Change::kModded) && (kSpec.blocks || tile == tiles.first))
            slope = change.slope(work.batch, kSpec.dropout ? head : head++);
          const Slant slant = change.slant(
              first_query, [&](int half) { return first_key + warp_row + prob.row(half) - place.diagonal(p.score); },
              [&](int) { return slope; });
          constexpr int kPart = kSpec.access == 16 ? 2 : 1;  // the narrow stores take registers
          const auto minus_lse = [&](int j, int i) { return i % 2 ? -lse_of(j).y : -lse_of(j).x; };
          if (in_part) logits.wait();
          if constexpr (Change::kModded) {
            auto places =
                mod::Places<Rows::kKeys, kTile>::from(s, work.batch, head - 1, first_key + warp_row, first_query);
            places.whole = !in_part;
            change.template weigh_mods<T, true, kPart>(
                prob, rounded, slant, p.mods, places, [](int, int) { return 0.f; }, minus_lse);
          } else if constexpr (kSpec.bias != kNoBias) {
            auto bias = logits.column_bias(p.bias_map, warp_row);
            change.template weigh<T, true, kPart>(
                prob, rounded, slant, [&](int j, int i) { return logit_minus_lse(bias(j, i), -minus_lse(j, i)); });
          } else {
            change.template weigh<T, true, kPart>(prob, rounded, slant, minus_lse);
          }
          if (masked) change.hide(prob, rounded, first_key + warp_row, first_query, visible);
          if constexpr (kSpec.mask) {
            if (in_part) change.hide_masked(prob, rounded, logits.column_mask(p.mask_map, warp_row));
          }
          if (in_part) logits.release();
        } else {
          if (masked) prob.hide(first_key + warp_row, first_query, hidden_score(s), visible);
#pragma unroll
          for (int j = 0; j < kTile / 8; ++j) {
            const float2 lse = lse_of(j);
#pragma unroll
            for (int i = 0; i < 4; ++i) prob.x[j][i] = exp2f(fmaf(prob.x[j][i], s.scale_log2, i % 2 ? -lse.y : -lse.x));
          }
        }
        KeptFragment<Rows::kKeys, kTile> kept;
        if constexpr (kSpec.dropout) kept.decide({p.dropout, work.batch, head}, first_key + warp_row, first_query);
        if constexpr (Change::kDerived) {
#pragma unroll
          for (int step = 0; step < kTile / 16; ++step)
#pragma unroll
            for (int i = 0; i < 4; ++i) weights[step][i] = rounded.prob[step][i];
          if constexpr (kSpec.dropout) kept.mark(rounded.changed);
          handover.put(rounded.changed);  // the other warpgroup needs P for nothing else
        } else {
#pragma unroll
          for (int step = 0; step < kTile / 16; ++step) prob.template operand<T>(weights[step], step);
          if constexpr (kSpec.dropout) kept.mark(weights);
          handover.put(weights);
        }
        if constexpr (kSpec.dropout) kept.drop(weights);
        if (kSpec.dropout && tile == tiles.last) ++head;
        tile = tile == tiles.last ? tiles.first : tile + 1;
      };
      const int count = count_of(tiles);
      if (count > 0) accumulate(queries, douts, dv, count, zero, weigh);
      if constexpr (kSpec.dropout) dv.scale_rows(p.dropout.scale, p.dropout.scale);
      store<T, kSpec.access>(dv, head_of(p.dv, place.k(), work.head, sizes_in(s, place).seqlen_k, s.head_dim_v),
                             first_key + warp_row);
    }
  } else {  // dk
    for (; works.left(); works.next()) {
      const Work& work = works.work;
      const Where place = find_place();
      const Range tiles = tiles_of_work(place);
      Accumulator<kSpec.head_dim> dk;
      dk.clear();
      const auto weigh = [&](Accumulator<kTile>& ds, uint32(&weights)[kTile / 16][4]) {
        handover.wait();
#pragma unroll
        for (int step = 0; step < kTile / 16; ++step) {
          const uint4 packed = handover.get(step);
          const float2 prob[4] = {T::unpack(packed.x), T::unpack(packed.y), T::unpack(packed.z), T::unpack(packed.w)};
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int j = 2 * step + half;
            const float2 delta = *reinterpret_cast<const float2*>(douts.statistic() + 8 * j + ds.col());
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              const float2 weight = prob[2 * half + i];
              float &x = ds.x[j][2 * i], &y = ds.x[j][2 * i + 1];
              x = kSpec.dropout ? gradient_of_marked(weight.x, x, delta.x, p.dropout) : weight.x * (x - delta.x);
              y = kSpec.dropout ? gradient_of_marked(weight.y, y, delta.y, p.dropout) : weight.y * (y - delta.y);
            }
          }
          ds.template operand<T>(weights[step], step);
        }
        handover.done();
      };
      const int count = count_of(tiles);
      if (count > 0) accumulate(douts, queries, dk, count, zero, weigh);
      dk.scale_rows(s.scale, s.scale);
      store<T, kSpec.access>(dk, head_of(p.dk, place.k(), work.head, sizes_in(s, place).seqlen_k, s.head_dim),
                             work.tile * kTile + warp_row);
    }
  }
}

}  // namespace cupyflash
