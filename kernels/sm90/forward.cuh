// out = softmax(scale q k^T) v and its log-sum-exp on Hopper: the loop of sm80/forward.cuh with its roles split
// (FlashAttention-3, arXiv 2407.08608). One warpgroup copies tiles by TMA; the others own 64 queries each and overlap
// the products of the next tile with the softmax of this one, and take turns at the tensor cores.
#pragma once

#include "any/dropout.cuh"
#include "any/mask_words.cuh"
#include "any/mods.cuh"
#include "core/blocks.cuh"
#include "core/epilogue.cuh"
#include "core/score.cuh"
#include "core/segments.cuh"
#include "core/softmax.cuh"
#include "core/spec.cuh"
#include "sm90/logits.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/tile.cuh"
#include "sm90/wgmma.cuh"

namespace cupyflash {

struct HopperForwardParams {
  TensorMap q, k, v, out_map;
  Array out;  // where out_map is not used
  RowArray lse;
  Sizes sizes;
  Order order;
  int queries;  // of 64 rows: fewer where the rows are packed
  Score score;
  Sink sink;
  Dropout dropout;
  BlockMask blocks;
  LogitMap bias;
  Segments segments;
  uint32* taken;    // runs that blocks took beyond their first ones, where a block mask makes them unequal
  uint32* only_if;  // the flag of HopperForwardSpec::steady
  MaskWords mask;
};

template <class T, HopperForwardSpec kSpec, class Mods = NoMods>
__global__ void __cluster_dims__(kSpec.cluster, 1, 1) __launch_bounds__(kSpec.threads(), 1)
    hopper_forward(const __grid_constant__ Modified<HopperForwardParams, Mods> p) {
  if constexpr (kSpec.only_if)
    if (*p.only_if == 0) return;
  constexpr int kGroups = kSpec.groups, kTeams = kSpec.teams, kWarpgroups = kTeams * kGroups;
  constexpr int kCluster = kSpec.cluster;
  constexpr int kBlockK = kSpec.block_k, kDim = kSpec.head_dim, kDimV = kSpec.head_dim_v;
  constexpr int kQBytes = tile_bytes(64, kDim), kOutBytes = tile_bytes(64, kDimV);
  constexpr int kKBytes = tile_bytes(kBlockK, kDim), kVBytes = tile_bytes(kBlockK, kDimV);
  constexpr int kQSlot = kQBytes > kOutBytes ? kQBytes : kOutBytes, kSlot = kKBytes > kVBytes ? kKBytes : kVBytes;
  constexpr int kTeamBytes = kSpec.q_slots * kQSlot + kSpec.slots * kSlot;
  constexpr int kBarriers = 2 * kSpec.slots + 3 * kSpec.q_slots;
  constexpr bool kStaged = kSpec.staged();
  using Runs = Dealer<kSpec.blocks>;
  static_assert(registers_suffice(kSpec), "what the roles take is more than a block has");
  using GroupLogits = Logits<kSpec.bias, false, 64, kBlockK, kSpec.logit_slots>;
  static_assert(!GroupLogits::kAny || kTeams == 1, "a warp is left to copy them");
  static_assert(!kSpec.blocks || kSpec.bias == kNoBias, "its tiles come for all keys");
  static_assert(kStaged || !kSpec.packed, "only the copy engine writes several heads");
  static_assert(!kSpec.blocks || !kSpec.packed && kMaskTile % (64 * kCluster * kGroups) == 0,
                "the rows of a tile have the same blocks");
  static_assert(!kSpec.blocks || kCluster == 1 && kTeams == 1, "one warp takes the runs of a block");
  static_assert(!kSpec.varlen || !kSpec.packed && kCluster == 1, "the rows of a box belong to one sequence and head");
  static_assert(!kSpec.steady || kSpec.mask <= kSpec.blocks && !kSpec.bounded, "some tiles are seen in full");
  static_assert(!kSpec.dropout || !kSpec.packed, "queries whose random numbers come together are 8 rows apart");

  extern __shared__ __align__(1024) char shared[];
  __shared__ uint64 barriers[kTeams * kBarriers + kGroups * GroupLogits::kBarriers + Runs::kBarriers];
  __shared__ uint32 dealt[Runs::kSlots];
  const int warpgroup = same_in_warp(threadIdx.x / 128);
  const bool copies = warpgroup == kWarpgroups;
  const int copier = warp_index() % 4;  // of the warps that copy: one loads and one stores for each team
  const int team = copies ? copier % kTeams : warpgroup / kGroups;
  const bool loads = copies && copier < kTeams && lane_index() == 0;
  const bool stores = kStaged && copies && copier / kTeams == 1 && lane_index() == 0;
  const uint32 q_base = first_tile(shared) + team * kTeamBytes;
  const uint32 base = q_base + kSpec.q_slots * kQSlot, barrier_base = shared_address(barriers + team * kBarriers);
  Ring<kSpec.slots, kCluster> ring(barrier_base);  // K and V
  Ring<kSpec.q_slots> q_ring(barrier_base + 16 * kSpec.slots);
  const uint32 out_full = barrier_base + 16 * (kSpec.slots + kSpec.q_slots);  // out is where q was
  const auto logits_of = [&](int group, uint32 count = 0) {
    return GroupLogits(q_base + kTeamBytes + group * GroupLogits::kBytes,
                       barrier_base + 8 * (kBarriers + group * GroupLogits::kBarriers), count);
  };
  Runs runs(barriers + kTeams * kBarriers + kGroups * GroupLogits::kBarriers, dealt);
  if (loads) {
    runs.init(4 * kWarpgroups + kStaged + GroupLogits::kAny);
    if constexpr (GroupLogits::kAny)
      for (int i = 0; i < kGroups; ++i) logits_of(i).ring.init(4);
    ring.init(4 * kGroups * kCluster), q_ring.init(kStaged ? 1 : 4);
    for (int i = 0; i < kSpec.q_slots; ++i) barrier_init(out_full + 8 * i, 4);
    fence_barrier_init();  // for the copy engine; for the other threads the barrier below
  }
  if constexpr (kCluster > 1)
    cluster_sync();
  else
    __syncthreads();

  const Sizes& s = p.sizes;
  const Band band(s);
  using Where = Place<kSpec.varlen>;
  using Change = ScoreChange<kSpec.softcap, kSpec.alibi, false, Mods>;
  static_assert(
      !kSpec.bounded || kSpec.softcap && !kSpec.alibi && !Change::kModded && !GroupLogits::kAny && !kSpec.blocks,
      "nothing else changes what softcap bounds, and the keys of a row are known");
  static_assert(!kSpec.steady || !Mods::kMask && !GroupLogits::kAny, "the keys of a row are known");
  static_assert(!Change::kModded || !GroupLogits::kAny, "no registers are left for both");
  const Change change = {p.score, s};
  const int queries = kSpec.packed ? p.queries : 64, block_q = kCluster * kGroups * queries;  // of a group, of a team
  const int rank = kCluster > 1 ? blockIdx.x % kCluster : 0;
  const auto head_of_q = [&](const Work& work) { return kSpec.packed ? work.head * s.group : work.head; };
  const auto shown_to = [&](const Work& work) {
    return ShownTiles<kSpec.blocks, kBlockK>::of(p.blocks, work.batch, work.head, work.tile * block_q);
  };
  Works<kSpec.varlen> works(p.order, s, p.segments, blockIdx.x / kCluster * kTeams + team,
                            gridDim.x / kCluster * kTeams);
  const auto find_place = [&] { return place_of<kSpec.varlen>(s, p.segments, works.work.batch); };
  if (copies) {
    give_registers<kSpec.copying_registers()>();
    if (loads) {
      prefetch_map(p.q), prefetch_map(p.k), prefetch_map(p.v);
      const int q_bytes = kSpec.packed ? panels(kDim) * queries * s.group * kRowBytes : kQBytes;
      for (uint32 run; works.left(); runs.deal(works, run)) {
        run = runs.draw(p.taken + kSpec.only_if);
        const Work& work = works.work;
        const Where place = find_place();
        const Range tiles = tiles_of(band_in(band, place), work.tile * block_q, block_q, kBlockK);
        const int head_q = head_of_q(work), head_k = head_q / s.group;
        const auto load_q = [&] {
#pragma unroll 1
          for (int group = 0; group < kGroups; ++group) {
            const uint32 target = q_base + q_ring.slot() * kQSlot;
            const int row = work.tile * block_q + (rank * kGroups + group) * queries;
            copy_tile<64, kDim>(target, p.q, q_ring.acquire(q_bytes), row, head_q, place.rows_q());
            q_ring.advance();
          }
        };
        const auto load_k = [&](int tile) {
          const uint32 target = base + ring.slot() * kSlot, full = ring.acquire(kKBytes);
          copy_tile<kBlockK, kDim, kCluster>(target, p.k, full, tile * kBlockK, head_k, place.rows_k(), rank);
          ring.advance();
        };
        const auto load_v = [&](int tile) {
          const uint32 target = base + ring.slot() * kSlot, full = ring.acquire(kVBytes);
          copy_tile<kBlockK, kDimV, kCluster>(target, p.v, full, tile * kBlockK, head_k, place.rows_k(), rank);
          ring.advance();
        };
        // The scores of a tile come before the product of the one before it: K0 K1 V0 K2 V1 ...
        if constexpr (kSpec.blocks) {
          const auto shown = shown_to(work);
          int before = shown.down(tiles.last, tiles.first);
          if (before >= tiles.first) load_k(before);
          load_q();
#pragma unroll 1
          for (int tile; (tile = shown.down(before - 1, tiles.first)) >= tiles.first; before = tile)
            load_k(tile), load_v(before);
          if (before >= tiles.first) load_v(before);
        } else {  // in words of its own, for the compiler makes more of them
          if (tiles.last >= tiles.first) load_k(tiles.last);
          load_q();
#pragma unroll 1
          for (int tile = tiles.last - 1; tile >= tiles.first; --tile) load_k(tile), load_v(tile + 1);
          if (tiles.last >= tiles.first) load_v(tiles.first);
        }
      }
    } else if (stores) {
      prefetch_map(p.out_map);
      for (; works.left(); runs.follow(works, false)) {
        const Where place = find_place();
#pragma unroll 1
        for (int group = 0; group < kGroups; ++group) {
          barrier_wait(out_full + 8 * q_ring.slot(), q_ring.parity());
          store_tile<64, kDimV>(p.out_map, q_base + q_ring.slot() * kQSlot,
                                works.work.tile * block_q + (rank * kGroups + group) * queries, head_of_q(works.work),
                                place.rows_q());
          wait_for_stores();
          barrier_arrive(q_ring.empty(q_ring.slot()));
          q_ring.advance();
        }
      }
    } else if (GroupLogits::kAny && copier == 2 && lane_index() == 0) {
      prefetch_map(p.bias.map);
      uint32 counts[kGroups] = {};
      for (; works.left(); runs.follow(works, false)) {
        const Work& work = works.work;
        const Range tiles = tiles_of(band, work.tile * block_q, block_q, kBlockK);
        const auto shown = shown_to(work);
#pragma unroll 1
        for (int tile = shown.down(tiles.last, tiles.first); tile >= tiles.first;
             tile = shown.down(tile - 1, tiles.first))
#pragma unroll
          for (int group = 0; group < kGroups; ++group) {
            const int first = work.tile * block_q + (rank * kGroups + group) * queries;
            const Range own = kSpec.blocks         ? tiles
                              : first < s.seqlen_q ? tiles_of(band, first, queries, kBlockK)
                                                   : Range{0, -1};
            if (tile >= own.first && tile <= own.last && shown.in_part(tile))
              logits_of(group, counts[group]++)  // no mask comes in tiles: any map will do for it
                  .copy(p.bias, p.bias, {work.batch, head_of_q(work), first, tile * kBlockK}, queries,
                        kSpec.packed ? s.group : 1);
          }
      }
    }
    return;
  }

  take_registers<kSpec.registers()>();
  const int group = warpgroup % kGroups, warp_row = warp_index() % 4 * 16;  // a row of the group's 64
  const Turns<kGroups> turns = {group, 1 + team * kGroups};
  turns.open();

  Accumulator<kDimV> out[1];
  Accumulator<kBlockK> scores[1];
  uint32 weights[kBlockK / 16][4];  // the 16-bit scores, as left operand
  KeptFragment<Rows::kQueries, kBlockK> kept;
  OnlineSoftmax<1> softmax;
  int first_query;  // of the group
  Range seen_by_all = {};
  const auto head_of_row = [&](const Work& work, int row) {
    return kSpec.packed ? work.head * s.group + row % s.group : work.head;
  };
  const auto query_of = [&](int row) { return first_query + (kSpec.packed ? row / s.group : row); };

  const auto issue_scores = [&] {  // q k^T
    // same_in_warp: else q's descriptor is built in every lane's registers, and moved for each product.
    const RowOperand<64> q(same_in_warp(q_base + q_ring.slot(group) * kQSlot));
    const RowOperand<kBlockK> k(base + ring.slot() * kSlot);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) Wgmma<T, kBlockK>::dot_rows(scores[0].x, q[step], k[step], step > 0);
    wgmma_commit();
  };
  const auto issue_out = [&](int ahead) {  // out += weights v
    const ColumnOperand<kBlockK> v(base + ring.slot(ahead) * kSlot);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kBlockK / 16; ++step) Wgmma<T, kDimV>::times(out[0].x, weights[step], v[step]);
    wgmma_commit();
  };
  float factor[2], slope[2] = {};
  GroupLogits logits = logits_of(group);
  const auto row_of = [&](const LogitMap& array) {  // in a tile of it
    return [&, heads = array.head ? s.group : 1](int r) {
      const int row = warp_row + r;
      return kSpec.packed ? row / s.group * array.row * heads + row % s.group * array.head : row * array.row;
    };
  };
  // With a bias exponents are natural: in base 2, what is finite might not be.
  constexpr bool kNatural = kSpec.bias != kNoBias;
  const float exponent_log2 = kNatural ? kLog2E : change.scale_log2();
  constexpr bool kRelative = Change::kAny && !Change::kModded && !kNatural;
  // Of changed scores the first ones may be far below those that follow: the maximum does not begin there.
  constexpr bool kFloored = kSpec.steady && Change::kAny;
  int head[2], query[2];  // of this lane's rows, for functions of the user
  ShownBits<kSpec.mask ? kBlockK : 64> shown_bits;
  const uint32* mask_row = nullptr;  // this lane's words
  const auto find_mask_row = [&] {
    const Work& work = works.work;
    const int part = opaque(first_query) / queries;
    mask_row = p.mask.data + work.batch * p.mask.batch + work.head * p.mask.head + part * p.mask.rows +
               threadIdx.x % kPartLanes;
  };
  // Early, so that they come while the scores are made; beside a bias, late, for want of registers.
  constexpr bool kEarlyBits = kSpec.mask && kSpec.bias == kNoBias;
  const auto load_bits = [&](int tile, bool in_part) {
    if constexpr (kEarlyBits)
      if (in_part) shown_bits.load(mask_row, p.mask.cols, tile);
  };
  const auto begin_dropping = [&](int first_key) {
    if constexpr (kSpec.dropout)
      kept.begin({p.dropout, works.work.batch, works.work.head}, first_query + warp_row, first_key);
  };
  const auto finish_dropping = [&](int first_key) {
    if constexpr (kSpec.dropout)
      kept.finish({p.dropout, works.work.batch, works.work.head}, first_query + warp_row, first_key);
  };
  const auto slant_of = [&](const Where& place, int first_key) {
    return change.slant(
        first_key, [&](int half) { return query_of(warp_row + scores[0].row(half)) + place.diagonal(p.score); },
        [&](int half) { return slope[half]; });
  };
  // `inside`: all keys of the tile exist. `whole`: see mod::Places. `steadily`: see below.
  const auto change_scores = [&](const Where& place, int first_key, bool inside, bool whole, bool steadily) {
    [[maybe_unused]] constexpr int kPart = kSpec.float32_out ? 1 : 2;
    if constexpr (Change::kModded) {
      auto places = mod::Places<Rows::kQueries, kBlockK>::from(
          s, works.work.batch, first_key, [&](int half) { return head[half]; }, [&](int half) { return query[half]; });
      places.inside = inside, places.whole = whole;
      change.template apply_mods<(Mods::kReads ? kPart : kBlockK / 8)>(scores[0], slant_of(place, first_key), p.mods,
                                                                       places, [](int, int) { return 0.f; });
    } else if constexpr (Change::kAny) {
      change.template apply<kPart>(scores[0], slant_of(place, first_key), [&](int, int i) {
        if constexpr (kSpec.bounded) return -p.score.middle;
        if constexpr (!kRelative) return 0.f;
        return -(steadily ? softmax.top[0][i / 2] : softmax.origin(0, i / 2));
      });
    }
  };
  // Scores -> weights in float32; whether out must be multiplied by factor. Only of the last tile, which comes first,
  // may there be keys that do not exist.
  const auto weigh = [&](const Where& place, int tile, bool first, bool in_part) {
    const int first_key = tile * kBlockK;
    const bool hides = first_key < seen_by_all.first || first_key + kBlockK - 1 > seen_by_all.last;
    if constexpr (kSpec.bounded && kWarpgroups == 2)  // three have no registers for it
      if (!hides && change.all_near(scores[0])) {
        // In one piece, so that the series runs beside the exponentials.
        change.template cap<false>(scores[0], slant_of(place, first_key), [&](int, int) { return -p.score.middle; });
        softmax.exponentiate_relative(scores, [&] { begin_dropping(first_key); });
        finish_dropping(first_key);
        return false;
      }
    change_scores(place, first_key, !first, kSpec.blocks && !in_part, false);
    if (in_part) logits.wait();
    if constexpr (kSpec.bias != kNoBias) {
      auto bias = logits.row_bias(row_of(p.bias));
      const float unit = Change::kAny ? kLn2 : s.scale;
#pragma unroll
      for (int j = 0; j < kBlockK / 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[0].x[j][i] = fmaf(scores[0].x[j][i], unit, bias(j, i));
    }
    if (hides)
      scores[0].hide(warp_row, first_key, -kInfinity,
                     [&](int row) { return band_in(band, place).keys(query_of(row)); });
    if constexpr (kSpec.mask) {
      if (in_part) {
        if constexpr (!kEarlyBits) find_mask_row(), shown_bits.load(mask_row, p.mask.cols, tile);
#pragma unroll
        for (int j = 0; j < kBlockK / 8; ++j)
#pragma unroll
          for (int i = 0; i < 4; ++i) scores[0].x[j][i] = shown_bits(j, i) ? scores[0].x[j][i] : -kInfinity;
      }
    }
    if (in_part) logits.release();
    bool raised = false;  // of this warp: its out is not there yet, and to wait is for the warpgroup
    const auto rescale = [&](const float (&by)[1][2]) {
      factor[0] = by[0][0], factor[1] = by[0][1];
      raised = true;
    };
    if constexpr (kSpec.bounded)
      softmax.exponentiate_relative(scores, [&] { begin_dropping(first_key); });
    else
      softmax.template weigh<kRelative>(scores, exponent_log2, rescale, [&] { begin_dropping(first_key); });
    finish_dropping(first_key);
    return raised;
  };
  // The same of a tile that all rows see in full, where sums take the place of maxima.
  const auto weigh_steadily = [&](const Where& place, int tile) {
    const int first_key = tile * kBlockK;
    change_scores(place, first_key, true, false, true);
    if constexpr (kRelative)
      softmax.exponentiate_relative(scores, [&] { begin_dropping(first_key); });
    else
      softmax.exponentiate_steadily(scores, exponent_log2, [&] { begin_dropping(first_key); });
    finish_dropping(first_key);
  };
  const auto round_weights = [&] {
#pragma unroll
    for (int step = 0; step < kBlockK / 16; ++step) scores[0].template operand<T>(weights[step], step);
    if constexpr (kSpec.dropout) kept.drop(weights);
  };
  const auto finish = [&](const Where& place, const Work& work) {  // out and lse
    const int slot = q_ring.slot(group);
    float inverse[2], lse[2];
    bool wrong = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp_row + out[0].row(half), query = query_of(row);
      const int head = head_of_row(work, row);
      softmax.finish(0, half, kNatural ? 1.f : change.scale(), p.sink.of(head), inverse[half], lse[half]);
      if constexpr (kSpec.bounded) {  // the weight of a row's only key, as it was rounded, is to be 1
        const float total = softmax.total(0, half);
        const Range keys = band_in(band, place).keys(query);
        if (keys.first == keys.last && p.sink.data == nullptr) inverse[half] = 1 / T::unpack(T::pack(total, 0.f)).x;
      }
      if constexpr (kSpec.steady)
        wrong |= query < min(first_query + queries, sizes_in(s, place).seqlen_q) &
                 !(softmax.holds(0, half, exponent_log2, p.sink.of(head)) & out[0].finite(half));
      if constexpr (kFloored) {
        const Range keys = band_in(band, place).keys(query);
        wrong |= query < min(first_query + queries, sizes_in(s, place).seqlen_q) & keys.first <= keys.last &
                 !softmax.suffices(0, half);
      }
      if constexpr (kSpec.dropout) inverse[half] *= p.dropout.scale;
      if (p.lse.data != nullptr && lane_index() % 4 == 0 &&
          query < min(first_query + queries, sizes_in(s, place).seqlen_q))
        p.lse.at(place.q(), head)[query * p.lse.row] = lse[half];
    }
    if (wrong) *p.only_if = 1;
    out[0].scale_rows(inverse[0], inverse[1]);
    if constexpr (kStaged) {
      named_sync(1 + kWarpgroups + warpgroup, 128);  // the group has read its q
      write_rows<T, 64>(out[0], q_base + slot * kQSlot + warp_row * kRowBytes);
      fence_async_shared();
      __syncwarp();
      if (lane_index() == 0) barrier_arrive(out_full + 8 * slot);
    } else {
      const Matrix target =
          head_of(p.out, place.q(), work.head, sizes_in(s, place).seqlen_q, s.head_dim_v, kSpec.float32_out ? 4 : 2);
      if constexpr (kSpec.float32_out)
        store_direct<float, 4>(out[0], target, first_query + warp_row, 0);
      else
        store_direct<T, kSpec.access>(out[0], target, first_query + warp_row, 0);
      q_ring.release(group);
    }
    q_ring.advance(kGroups);
  };
  // Tiles that other groups of the team see, but not this one: its turns pass, its share of the slots is freed.
  const auto skip = [&](int count) {
#pragma unroll 1
    for (; count > 0; --count) ring.wait(), __syncwarp(), ring.release(), ring.advance();
  };
  const auto sit_out = [&](int steps, bool first) {
#pragma unroll 1
    for (; steps > 0; --steps, first = false) turns.wait(), turns.pass_on(), skip(first ? 1 : 2);
  };
#pragma unroll 1
  while (works.left()) {
    const Work work = works.work;
    const Where place = find_place();
    const Band& its_band = band_in(band, place);
    const int seqlen_q = sizes_in(s, place).seqlen_q;
    first_query = work.tile * block_q + (rank * kGroups + group) * queries;
    seen_by_all = keys_of_all(its_band, {first_query, min(first_query + queries, seqlen_q) - 1});
    const Range tiles = tiles_of(its_band, work.tile * block_q, block_q, kBlockK);
    // With a block mask all groups compute what one of them sees: it shows them the same.
    const Range own = kSpec.blocks || first_query < seqlen_q
                          ? tiles_of(its_band, kSpec.blocks ? work.tile * block_q : first_query,
                                     kSpec.blocks ? block_q : queries, kBlockK)
                          : Range{0, -1};
    const auto shown = shown_to(work);
    const int first_tile = shown.down(own.last, own.first);
    const int before = tiles.last - own.last,
              after = own.first - tiles.first;  // tiles of others, from the last one down
    softmax = OnlineSoftmax<1>(kSpec.bounded ? p.score.middle
                               : kFloored    ? OnlineSoftmax<1>::kFloor / exponent_log2
                                             : -kInfinity);
    out[0].clear();
    if constexpr (kSpec.alibi)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        slope[half] = change.slope(work.batch, head_of_row(work, warp_row + out[0].row(half)));
    if constexpr (Change::kModded)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = warp_row + out[0].row(half);
        head[half] = head_of_row(work, row), query[half] = query_of(row);
      }
    if constexpr (kEarlyBits) find_mask_row();
    q_ring.wait(group);
    if (first_tile >= own.first) {
      const bool in_part = shown.in_part(first_tile);
      load_bits(first_tile, in_part);
      sit_out(before, true);
      ring.wait();
      turns.wait();
      issue_scores();
      turns.pass_on();
      wgmma_wait<0>();
      ring.release();
      ring.advance();
      if (before > 0) skip(1);
      weigh(place, first_tile, true, in_part);
      round_weights();
      const auto in_full = [&](int tile) {  // all rows see all of its keys
        return tile * kBlockK >= seen_by_all.first && (tile + 1) * kBlockK - 1 <= seen_by_all.last &&
               !(kSpec.mask && shown.in_part(tile));
      };
      bool settled = kSpec.blocks && in_full(first_tile);  // one of those before was
#pragma unroll 1
      for (int tile = shown.down(first_tile - 1, own.first); tile >= own.first;
           tile = shown.down(tile - 1, own.first)) {
        if constexpr (kSpec.steady) {  // the same by the sums: all rows see this tile in full, and saw another one
          const int first_full = (seen_by_all.first + kBlockK - 1) / kBlockK;
          const auto steadily = [&] {
            if constexpr (kSpec.blocks) return settled && tile >= own.first && in_full(tile);
            return tile >= first_full && (tile + 2) * kBlockK - 1 <= seen_by_all.last;
          };
#pragma unroll 1
          for (; steadily(); tile = shown.down(tile - 1, own.first)) {
            ring.wait();
            turns.wait();
            issue_scores();
            ring.wait(1);
            issue_out(1);
            turns.pass_on();
            wgmma_wait<1>();
            ring.release();
            weigh_steadily(place, tile);
            wgmma_wait<0>();
            ring.release(1);
            ring.advance(2);
            if (softmax.full())  // behind the wait, for else no exponential would be
              softmax.lower(scores, exponent_log2,
                            [&](const float (&by)[1][2]) { out[0].scale_rows(by[0][0], by[0][1]); });
            round_weights();
          }
          if (tile < own.first) break;
        }
        const bool in_part = shown.in_part(tile);
        load_bits(tile, in_part);
        ring.wait();
        turns.wait();
        issue_scores();
        ring.wait(1);
        issue_out(1);  // of the tile before
        turns.pass_on();
        wgmma_wait<1>();  // the scores are there; k is free, the product with v goes on
        ring.release();
        const bool raised = weigh(place, tile, false, in_part);
        wgmma_wait<0>();  // out is there; v and the registers of the weights are free
        ring.release(1);
        ring.advance(2);
        round_weights();
        if (raised) out[0].scale_rows(factor[0], factor[1]);
        if constexpr (kSpec.blocks) settled |= in_full(tile);
      }
      if (after > 0) turns.wait(), turns.pass_on(), skip(1);
      ring.wait();
      issue_out(0);
      runs.follow(works);  // its divisions while the last product is being made
      wgmma_wait<0>();
      ring.release();
      ring.advance();
      sit_out(after - 1, false);
      if (after > 0) skip(1);
    } else {
      runs.follow(works);
      if (!kSpec.blocks && tiles.last >= tiles.first) sit_out(tiles.last - tiles.first + 1, true), skip(1);
    }
    finish(place, work);
  }
  turns.close();
  if constexpr (kCluster > 1) cluster_sync();  // nobody leaves whom the other may still tell of a free slot
}

}  // namespace cupyflash
