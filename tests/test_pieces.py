"""The pieces of the kernels, each in a tiny kernel of its own and compared with the obvious computation on the host.

The kernels are compiled without a GPU too, so that a test which no longer fits its piece is seen everywhere.
"""

import functools
import math
import re
from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest
import tools

from cupyflash import compiler

gpu = pytest.mark.gpu
hopper = pytest.mark.skipif("sm90" not in tools.CUDA_PATHS, reason="needs a Hopper GPU")
DTYPES16 = ("float16", "bfloat16")


@dataclass(frozen=True)
class Piece:
    """Test kernels around a header, and the instantiations that the tests run."""

    header: str
    code: str
    expressions: tuple
    mods = None  # as of a Variant

    @property
    def source(self):
        return compiler.source(self.header) + "\nusing namespace cupyflash;\n" + self.code

    @functools.cache  # noqa: B019  there are as many as there are constants below
    def kernels(self):
        import cupy

        module = cupy.RawModule(code=self.source, options=compiler.options(self), name_expressions=self.expressions)
        return {expression: module.get_function(expression) for expression in self.expressions}

    def run(self, expression, grid, block, *arguments):
        self.kernels()[expression]((grid,), (block,), arguments)


def to_gpu(values):
    import cupy

    return cupy.asarray(np.ascontiguousarray(values))


def nans(shape, dtype=np.float32):
    """An array on the GPU whose bits are all 1, which is NaN in every floating dtype."""
    import cupy

    size = math.prod(shape) * np.dtype(dtype).itemsize
    return cupy.full(size, 255, np.uint8).view(dtype).reshape(shape)


def bits16(values, dtype):
    """Host values rounded to a 16-bit dtype, as integers."""
    return np.ascontiguousarray(values).astype(tools.DTYPES[dtype]).view(np.uint16)


def floats16(bits, dtype):
    return bits.view(tools.DTYPES[dtype]).astype(np.float64)


# --- Conversions

CONVERT = Piece(
    "any/ptx.cuh",
    """
template <class T>
__global__ void convert(const float2* x, uint32* packed, float2* unpacked, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  packed[i] = T::pack(x[i].x, x[i].y);
  unpacked[i] = T::unpack(packed[i]);
}
""",
    tuple(f"convert<cupyflash::{dtype}>" for dtype in DTYPES16),
)


@gpu
@pytest.mark.parametrize("dtype", DTYPES16)
def test_conversions(dtype):
    every = np.arange(1 << 16, dtype=np.uint16).view(tools.DTYPES[dtype]).astype(np.float32)
    finite = every[np.isfinite(every)]
    following = np.sort(finite)
    halfway = (following[:-1].astype(np.float64) + following[1:]) / 2  # ties: to the even neighbour
    exact = halfway.astype(np.float32)
    random = np.random.default_rng(0).standard_normal(1 << 14) * 10.0 ** np.random.default_rng(1).uniform(
        -9, 9, 1 << 14
    )
    special = [0.0, -0.0, math.inf, -math.inf, math.nan, 65519.0, 65520.0, 3.4e38, -3.4e38, 1e-30]
    with np.errstate(invalid="ignore"):  # the signalling NaN among every
        x = np.concatenate([every, exact, np.nextafter(exact, np.inf), random, special]).astype(np.float32)
    x = x[: len(x) // 2 * 2]
    packed, unpacked = nans((len(x) // 2,), np.uint32), nans((len(x) // 2, 2))
    count = len(x) // 2
    CONVERT.run(f"convert<cupyflash::{dtype}>", -(-count // 256), 256, to_gpu(x), packed, unpacked, np.int32(count))

    with np.errstate(over="ignore"):
        expected = x.astype(tools.DTYPES[dtype])
    got = packed.get().view(np.uint16)
    numbers = ~np.isnan(x)
    assert np.array_equal(got[numbers], expected.view(np.uint16)[numbers])
    assert np.isnan(got.view(expected.dtype).astype(np.float32)[~numbers]).all()
    back = unpacked.get().ravel()
    assert np.array_equal(back, got.view(expected.dtype).astype(np.float32), equal_nan=True)


# --- Accumulator

ACCUMULATOR = Piece(
    "core/epilogue.cuh",
    """
struct Half {  // core/ knows no 16-bit type: any with a pack() will do
  static __device__ uint32 pack(float low, float high) { return uint32(low) | uint32(high) << 16; }
};

template <int kCols>
__device__ Accumulator<kCols> numbered() {  // 1000 * row + column
  Accumulator<kCols> acc;
  for (int j = 0; j < kCols / 8; ++j)
    for (int i = 0; i < 4; ++i) acc.x[j][i] = 1000 * acc.row(i / 2) + 8 * j + acc.col() + i % 2;
  return acc;
}
template <int kCols>
__device__ void write(const Accumulator<kCols>& acc, float* out) {
  for (int j = 0; j < kCols / 8; ++j)
    for (int i = 0; i < 4; ++i) out[acc.row(i / 2) * kCols + 8 * j + acc.col() + i % 2] = acc.x[j][i];
}

template <int kCols>
__global__ void rows_and_columns(float* out, float* cleared) {
  Accumulator<kCols> acc = numbered<kCols>();
  write(acc, out);
  acc.clear();
  write(acc, cleared);
}

template <int kCols>
__global__ void scale(float* out) {
  Accumulator<kCols> acc = numbered<kCols>();
  acc.scale_rows(2.f, 0.5f);
  write(acc, out);
}

template <int kCols>
__global__ void operand(uint32* out) {  // (step, register, lane)
  Accumulator<kCols> acc = numbered<kCols>();
  for (int j = 0; j < kCols / 8; ++j)
    for (int i = 0; i < 4; ++i) acc.x[j][i] = 100 * acc.row(i / 2) + 8 * j + acc.col() + i % 2;
  for (int step = 0; step < kCols / 16; ++step) {
    uint32 a[4];
    acc.template operand<Half>(a, step);
    for (int i = 0; i < 4; ++i) out[(step * 4 + i) * 32 + threadIdx.x] = a[i];
  }
}

template <int kCols>
__global__ void hide(float* out, const int* first, const int* last, int first_row, int first_col) {
  Accumulator<kCols> acc = numbered<kCols>();
  acc.hide(first_row, first_col, -1.f, [&](int row) { return Range{first[row], last[row]}; });
  write(acc, out);
}

struct Short : Half {
  unsigned short bits;
};
template <class Out, int kAccess>
__global__ void store(char* data, int64 stride, int rows, int cols, int row, int col) {
  store_direct<Out, kAccess>(numbered<32>(), Matrix{data, stride, rows, cols}, row, col);
}
""",
    (
        *(f"{name}<{cols}>" for name in ("rows_and_columns", "scale", "operand", "hide") for cols in (16, 48, 128)),
        "store<float, 4>",
        "store<Short, 2>",
        "store<Short, 4>",
    ),
)
COLS = pytest.mark.parametrize("cols", [16, 48, 128])


def numbered(cols):
    return (1000 * np.arange(16)[:, None] + np.arange(cols)).astype(np.float32)


@gpu
@COLS
def test_accumulator_rows_and_columns(cols):
    out, cleared = nans((16, cols)), nans((16, cols))
    ACCUMULATOR.run(f"rows_and_columns<{cols}>", 1, 32, out, cleared)
    assert np.array_equal(out.get(), numbered(cols))  # each element has a lane, and only one
    assert not cleared.get().any()


@gpu
@COLS
def test_accumulator_scale_rows(cols):
    out = nans((16, cols))
    ACCUMULATOR.run(f"scale<{cols}>", 1, 32, out)
    assert np.array_equal(out.get(), numbered(cols) * np.repeat([2, 0.5], 8)[:, None].astype(np.float32))


@gpu
@COLS
def test_accumulator_as_operand(cols):
    """Register i of lane l: row l / 4 (+ 8 if i is odd), columns 2 (l % 4) and the next (+ 8 if i is 2 or 3)."""
    out = nans((cols // 16, 4, 32), np.uint32)
    ACCUMULATOR.run(f"operand<{cols}>", 1, 32, out)
    step, i, lane = np.indices(out.shape)
    low = 100 * (lane // 4 + 8 * (i % 2)) + 16 * step + 2 * (lane % 4) + 8 * (i // 2)
    assert np.array_equal(out.get(), low | low + 1 << 16)


@gpu
@COLS
@pytest.mark.parametrize("first_row, first_col", [(0, 0), (16, 0), (0, 48), (32, 96)])
def test_accumulator_hide(cols, first_row, first_col):
    rng = np.random.default_rng(cols)
    first = rng.integers(-5, first_col + cols + 5, 64, dtype=np.int32)
    last = first + rng.integers(-10, cols, 64, dtype=np.int32)
    first[first_row : first_row + 4], last[first_row : first_row + 4] = first_col, first_col + cols - 1  # sees all
    first[first_row + 8], last[first_row + 8] = 0, 1 << 30
    first[first_row + 9], last[first_row + 9] = first_col + 1, first_col  # none
    out = nans((16, cols))
    arguments = to_gpu(first), to_gpu(last), np.int32(first_row), np.int32(first_col)
    ACCUMULATOR.run(f"hide<{cols}>", 1, 32, out, *arguments)
    rows, columns = first_row + np.arange(16)[:, None], first_col + np.arange(cols)
    seen = (columns >= first[rows]) & (columns <= last[rows])
    assert np.array_equal(out.get(), np.where(seen, numbered(cols), np.float32(-1)))


@gpu
@pytest.mark.parametrize("out_type, access", [("float", 4), ("Short", 2), ("Short", 4)])
@pytest.mark.parametrize("rows, cols", [(48, 96), (17, 33), (31, 47), (16, 96), (40, 32), (33, 41)])
def test_store_direct(out_type, access, rows, cols):
    row, col = 16, 32
    dtype = np.dtype(np.float32 if out_type == "float" else np.uint16)
    step = access // dtype.itemsize  # elements of a store: aligned to them and no better, and a multiple of them
    cols = cols // step * step
    start, width = 3 * step, 101 * step
    buffer = nans((48, width), dtype)
    expected = buffer.get().ravel()
    arguments = np.int64(width * dtype.itemsize), *ints(rows, cols, row, col)
    ACCUMULATOR.run(f"store<{out_type}, {access}>", 1, 32, buffer.ravel()[start:], *arguments)
    for r, c in product(range(row, min(row + 16, rows)), range(col, min(col + 32, cols))):
        expected[start + r * width + c] = 1000 * (r - row) + c - col
    assert np.array_equal(buffer.get().ravel().view(np.uint8), expected.view(np.uint8))


def ints(*values):
    return tuple(map(np.int32, values))


# --- Band

BAND = Piece(
    "core/band.cuh",
    """
__device__ void put(int* out, Range r) { out[0] = r.first, out[1] = r.last; }

// Of each case: low, high, seqlen_q, seqlen_k, first and last row, first and last key.
template <int>
__global__ void ranges(const int* cases, int* out, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const int* c = cases + 8 * i;
  Sizes sizes{};
  sizes.low = c[0], sizes.high = c[1], sizes.seqlen_q = c[2], sizes.seqlen_k = c[3];
  const Band band(sizes);
  put(out + 8 * i, keys_of_any(band, {c[4], c[5]}));
  put(out + 8 * i + 2, keys_of_all(band, {c[4], c[5]}));
  put(out + 8 * i + 4, queries_of_any(band, {c[6], c[7]}));
  put(out + 8 * i + 6, queries_of_all(band, {c[6], c[7]}));
}

// Of each case: low, high, seqlen_q, seqlen_k, first row, rows of a query tile, keys of a key tile.
template <int>
__global__ void tiles(const int* cases, int* out, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const int* c = cases + 7 * i;
  Sizes sizes{};
  sizes.low = c[0], sizes.high = c[1], sizes.seqlen_q = c[2], sizes.seqlen_k = c[3];
  const Range range = tiles_of(Band(sizes), c[4], c[5], c[6]);
  out[2 * i] = range.first, out[2 * i + 1] = range.last;
}
""",
    ("ranges<0>", "tiles<0>"),
)
UNBOUNDED = 1 << 30


def bands():
    """Sizes, bands, and tiles of rows and keys cut off at the ends, as the kernels cut them."""
    for seqlen_q, seqlen_k in product((1, 2, 5, 9), (1, 3, 8, 11)):
        diagonals = sorted({0, seqlen_k - seqlen_q})
        sides = (0, 1, 3, 20, UNBOUNDED)
        for diagonal, left, right in product(diagonals, sides, sides):
            low = -UNBOUNDED if left == UNBOUNDED else diagonal - left
            high = UNBOUNDED if right == UNBOUNDED else diagonal + right
            for block, row, key in product((1, 4), range(seqlen_q), range(seqlen_k)):
                if row % block == key % block == 0:
                    last_row, last_key = min(row + block, seqlen_q) - 1, min(key + block, seqlen_k) - 1
                    yield low, high, seqlen_q, seqlen_k, row, last_row, key, last_key


@gpu
def test_band():
    cases = np.array(list(bands()), np.int32)
    out = nans((len(cases), 4, 2), np.int32)
    BAND.run("ranges<0>", -(-len(cases) // 128), 128, to_gpu(cases), out, np.int32(len(cases)))
    for case, got in zip(cases.tolist(), out.get().tolist()):
        low, high, seqlen_q, seqlen_k, row, last_row, key, last_key = case
        i, j = np.arange(seqlen_q)[:, None], np.arange(seqlen_k)
        seen = (j >= i + low) & (j <= i + high)
        rows, keys = seen[row : last_row + 1], seen[:, key : last_key + 1]
        expected = rows.any(0), rows.all(0), keys.any(1), keys.all(1)
        for (first, last), places in zip(got, map(np.flatnonzero, expected)):
            assert list(range(first, last + 1)) == places.tolist(), (case, got)


@gpu
def test_key_tiles():
    """Those in which a row of the query tile sees a key, and no others."""
    cases = sorted(
        {(*case[:5], block_q, block_k) for case, block_q, block_k in product(bands(), (1, 4, 16), (1, 2, 4, 16))}
    )
    cases = [case for case in cases if case[4] % case[5] == 0]
    out = nans((len(cases), 2), np.int32)
    arguments = to_gpu(np.array(cases, np.int32)), out, np.int32(len(cases))
    BAND.run("tiles<0>", -(-len(cases) // 128), 128, *arguments)
    for case, (first, last) in zip(cases, out.get().tolist()):
        low, high, seqlen_q, seqlen_k, row, block_q, block_k = case
        i, j = np.arange(seqlen_q)[row : row + block_q, None], np.arange(seqlen_k)
        keys = np.flatnonzero(((j >= i + low) & (j <= i + high)).any(0))
        assert list(range(first, last + 1)) == sorted(set((keys // block_k).tolist())), (case, first, last)


# --- Work

WORK = Piece(
    "core/work.cuh",
    """
template <bool kDescending>
__global__ void find(int* out, int tiles, int batch, int heads, int section, int count) {
  const uint32 i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= uint32(count)) return;
  const Work work = find_work(i, tiles, batch, heads, section, kDescending);
  out[3 * i] = work.batch, out[3 * i + 1] = work.head, out[3 * i + 2] = work.tile;
}

template <bool kDescending>
__global__ void walk(const Order order, const Sizes sizes, int* out) {
  const Segments none = {};
  int i = 0;
  for (Works works(order, sizes, none, blockIdx.x, gridDim.x, kDescending); works.left(); works.next(), ++i) {
    int* const one = out + 3 * (blockIdx.x * order.tiles * order.heads * sizes.batch + i);
    one[0] = works.work.batch, one[1] = works.work.head, one[2] = works.work.tile;
  }
}
""",
    ("find<true>", "find<false>", "walk<true>", "walk<false>"),
)


@gpu
@pytest.mark.parametrize("descending", [True, False])
def test_every_tile_is_computed_once(descending):
    sizes = (1, 2, 3, 7)
    for tiles, batch, heads in product((*sizes, 33), sizes, (*sizes, 12)):
        pairs = batch * heads
        for section in sorted({1, 2, 3, pairs // 2, pairs - 1, pairs} - {0}):
            if section > pairs:
                continue
            work = find(tiles, batch, heads, section, pairs * tiles, descending)
            case = tiles, batch, heads, section
            expected = {(b, h, t) for b in range(batch) for h in range(heads) for t in range(tiles)}
            assert {tuple(w) for w in work.tolist()} == expected, case
            pair = work[:, 0] * heads + work[:, 1]
            assert (np.diff(pair // section) >= 0).all(), (case, "a section starts before the one before it is done")
            for one in range(pairs):
                own = work[pair == one, 2]
                assert (np.diff(own) == (-1 if descending else 1)).all(), (case, "the longest tile is not the first")


@gpu
def test_work_of_many_blocks():
    """Indices beyond 2^16 and heads that do not divide into sections."""
    tiles, batch, heads, section = 1025, 3, 37, 50
    work = find(tiles, batch, heads, section, tiles * batch * heads, False)
    flat = (work[:, 0] * heads + work[:, 1]) * tiles + work[:, 2]
    assert np.array_equal(np.sort(flat), np.arange(tiles * batch * heads))


@gpu
@pytest.mark.parametrize("descending", [True, False])
@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("blocks", [1, 2, 5, 64])
def test_works_of_persistent_blocks(blocks, paired, descending):
    """Every tile once. The tiles i and n - 1 - i follow each other, the longer first, if a run is a pair."""
    structs = pytest.importorskip("cupyflash.structs", reason="needs CuPy")
    for tiles, batch, heads, section in ((1, 1, 1, 1), (2, 3, 1, 2), (5, 2, 3, 4), (5, 2, 3, 6), (8, 1, 7, 7)):
        runs = -(-tiles // 2) if paired else tiles
        order = np.array([(heads, tiles, runs, batch * heads * runs, paired)], structs.ORDER)
        sizes = np.zeros(1, structs.SIZES)
        sizes["batch"], sizes["heads_q"], sizes["section"] = batch, heads, section
        out = to_gpu(np.full((blocks, batch * heads * tiles, 3), -1, np.int32))
        WORK.run(f"walk<{str(descending).lower()}>", blocks, 1, struct(order), struct(sizes), out)
        lists = [own[own[:, 2] >= 0].tolist() for own in out.get()]
        found = sorted(tuple(work) for own in lists for work in own)
        assert found == [(b, h, t) for b in range(batch) for h in range(heads) for t in range(tiles)]
        if section >= batch * heads and not paired:  # the tiles in one row, dealt back and forth
            for block, own in enumerate(lists):
                places = [(tiles - 1 - t if descending else t) * batch * heads + b * heads + h for b, h, t in own]
                assert places == [r * blocks + (blocks - 1 - block if r % 2 else block) for r in range(len(own))]
        for own in lists:
            for (b, h, tile), (c, g, after) in zip(own, own[1:]):
                if paired and (tile > tiles - 1 - tile if descending else tile < tiles - 1 - tile):
                    assert (c, g, after) == (b, h, tiles - 1 - tile)


def struct(array):
    return array.view(np.dtype(("V", array.nbytes)))[0]


def find(tiles, batch, heads, section, count, descending):
    out = nans((count, 3), np.int32)
    arguments = ints(tiles, batch, heads, section, count)
    WORK.run(f"find<{str(descending).lower()}>", -(-count // 128), 128, out, *arguments)
    return out.get()


# --- Online softmax

SOFTMAX = Piece(
    "core/softmax.cuh",
    """
// scores: (tiles, 16 kRowTiles, kCols); sinks: (16 kRowTiles). out: (16 kRowTiles, 8) holds, for each column modulo 8,
// the sum of the weights.
template <int kRowTiles, int kCols, bool kRelative>
__global__ void softmax(const float* scores, int tiles, float scale, const float* sinks, float* out, float* lse,
                        float* top) {
  OnlineSoftmax<kRowTiles> online;
  Accumulator<8> sums[kRowTiles];
  for (int t = 0; t < kRowTiles; ++t) sums[t].clear();
  for (int tile = 0; tile < tiles; ++tile, scores += 16 * kRowTiles * kCols) {
    Accumulator<kCols> x[kRowTiles];
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
      for (int j = 0; j < kCols / 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float score = scores[(16 * t + x[t].row(i / 2)) * kCols + 8 * j + x[t].col() + i % 2];
          x[t].x[j][i] = kRelative ? fmaf(score, scale * kLog2E, -online.origin(t, i / 2)) : score;
        }
    online.template weigh<kRelative>(x, scale * kLog2E, [&](const float (&factor)[kRowTiles][2]) {
      for (int t = 0; t < kRowTiles; ++t) sums[t].scale_rows(factor[t][0], factor[t][1]);
    });
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
      for (int j = 0; j < kCols / 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[t].x[0][i] += x[t].x[j][i];
  }
#pragma unroll
  for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float inverse, row_lse;
      const int row = 16 * t + sums[t].row(half);
      online.finish(t, half, kRelative ? kLn2 : scale, sinks[row], inverse, row_lse);
#pragma unroll
      for (int i = 0; i < 2; ++i) out[row * 8 + sums[t].col() + i] = sums[t].x[0][2 * half + i] * inverse;
      lse[row] = row_lse, top[row] = online.top[t][half];
    }
}
""",
    tuple(f"softmax<{shape}, {relative}>" for shape in ("1, 32", "2, 64") for relative in ("false", "true")),
)


def online_softmax(scores, scale=1.0, row_tiles=1, sinks=-math.inf, relative=False):
    """The weights summed over the columns of equal remainder modulo 8, the log-sum-exp and the top of each row."""
    tiles, rows, cols = scores.shape
    assert rows == 16 * row_tiles
    out, lse, top = nans((rows, 8)), nans((rows,)), nans((rows,))
    sinks = to_gpu(np.broadcast_to(np.float32(sinks), (rows,)))
    arguments = to_gpu(scores.astype(np.float32)), np.int32(tiles), np.float32(scale), sinks, out, lse, top
    SOFTMAX.run(f"softmax<{row_tiles}, {cols}, {str(relative).lower()}>", 1, 32, *arguments)
    return out.get(), lse.get(), top.get()


def right_softmax(scores, scale=1.0, sinks=-math.inf):
    x = np.float64(np.float32(scale)) * scores.astype(np.float32).astype(np.float64).transpose(1, 0, 2)
    x = x.reshape(len(x), -1)
    x = np.concatenate([x, np.broadcast_to(np.float32(sinks), (len(x),))[:, None]], axis=1)
    highest = x.max(axis=1, keepdims=True)
    weights = np.exp(x - np.where(np.isneginf(highest), 0, highest))
    total = weights.sum(axis=1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = np.log(total) + np.where(np.isneginf(highest), 0, highest)
    weights = weights[:, :-1] / np.where(total == 0, 1, total)
    return weights.reshape(len(x), -1, 8).sum(axis=1), lse[:, 0]


def check_softmax(scores, scale=1.0, row_tiles=1, sinks=-math.inf, relative=False):
    out, lse, top = online_softmax(scores, scale, row_tiles, sinks, relative)
    expected_out, expected_lse = right_softmax(scores, scale, sinks)
    # top * scale is rounded where it is below kExact: every weight is off by the same factor, which only a sink shows.
    base = np.abs(top.astype(np.float64) * scale * math.log2(math.e))
    rounded = np.where(base <= 16384, 2.0**-24 * base, 0).max() if np.isfinite(sinks).any() else 0
    if relative:  # exponents are rounded before top is subtracted from them, where it is far
        rounded = 2.0**-23 * np.abs(top[np.isfinite(top)]).max(initial=0)
    tools.assert_close("out", out.astype(np.float64), expected_out, 4e-6 + rounded * np.abs(expected_out).max())
    finite = np.abs(expected_lse[np.isfinite(expected_lse)])
    allowed = 4e-6 + 2.0**-22 * (finite.max() if finite.size else 0)
    tools.assert_close("lse", lse.astype(np.float64), expected_lse, allowed)
    return out, lse, top


@gpu
@pytest.mark.parametrize("row_tiles, cols", [(1, 32), (2, 64)])
@pytest.mark.parametrize("scale", [1.0, 0.125, 3.0, 2.0**-126])
@pytest.mark.parametrize("tiles", [1, 2, 7])
def test_softmax(row_tiles, cols, scale, tiles):
    scores = 3 * np.random.default_rng(tiles).standard_normal((tiles, 16 * row_tiles, cols))
    check_softmax(scores, scale, row_tiles)


@gpu
@pytest.mark.parametrize("row_tiles, cols", [(1, 32), (2, 64)])
@pytest.mark.parametrize("size", [0, 3, 30, 300])
@pytest.mark.parametrize("tiles", [1, 2, 7])
def test_softmax_of_exponents(row_tiles, cols, size, tiles):
    """Relative to a maximum that is near 0, which is subtracted at once, and to one that is far."""
    rng = np.random.default_rng(tiles)
    scores = size * rng.standard_normal((tiles, 16 * row_tiles, 1)) + rng.standard_normal((tiles, 16 * row_tiles, cols))
    check_softmax(scores, 1.0, row_tiles, relative=True)


@gpu
@pytest.mark.parametrize("relative", [False, True])
def test_softmax_of_rows_without_keys(relative):
    scores = np.random.default_rng(1).standard_normal((4, 16, 32))
    scores[:, 0] = -math.inf  # never a key
    scores[:3, 1] = -math.inf  # the first at the end
    scores[1:, 2] = -math.inf  # the last at the start
    scores[1:3, 3] = -math.inf
    scores[:, 4], scores[2, 4, 17] = -math.inf, -4.0  # one key
    scores[:, 5], scores[3, 5, 31] = -math.inf, 0.0
    scores[0, 6, ::2] = -math.inf
    out, lse, _ = check_softmax(scores, relative=relative)
    assert not out[0].any() and lse[0] == -math.inf
    assert out[4].tolist() == [0, 1, 0, 0, 0, 0, 0, 0] and (relative or lse[4] == -4)
    out, lse, top = online_softmax(np.full((3, 16, 32), -math.inf), relative=relative)
    assert not out.any() and (lse == -math.inf).all() and (top == -math.inf).all()


@gpu
@pytest.mark.parametrize("scale", [1.0, 0.125, 3.0, 2.0**-126])
@pytest.mark.parametrize("offset", [0.0, 1e4, -1e4, 1e30])
def test_softmax_with_sinks(scale, offset):
    """Far below the scores, among them and far above; of rows without keys too."""
    scores = offset + 3 * np.random.default_rng(0).standard_normal((3, 16, 32))
    scores[:, 8:] = -math.inf
    sinks = np.float32(scale * offset + np.array([-math.inf, -1e5, -90, -5, 0, 5, 90, 1e5] * 2))
    out, lse, _ = check_softmax(scores, scale, sinks=sinks)
    assert not out[8:].any() and (lse[8:] == sinks[8:]).all()


@gpu
def test_softmax_with_sinks_that_are_no_numbers():
    out, lse, _ = online_softmax(np.zeros((1, 16, 32)), sinks=[math.inf, math.nan] * 8)
    assert not out[::2].any() and np.isposinf(lse[::2]).all()
    assert np.isnan(out[1::2]).all() and np.isnan(lse[1::2]).all()


@gpu
@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, 16384.0, 1e9, -1e9, 1e30, -1e30])
def test_softmax_of_equal_scores(value):
    """However large they are, their differences are 0."""
    out, lse, _ = online_softmax(np.full((2, 16, 32), value))
    assert (out == 0.125).all()
    assert np.allclose(lse, np.float64(np.float32(value)) + math.log(64), rtol=2.0**-22, atol=1e-6)


@gpu
@pytest.mark.parametrize("offset", [1e3, 1e4, 4e4, -4e4, 1e5])
def test_softmax_of_large_scores(offset):
    """A score is exact to 2^-8 at 60000; so must its weight be, and none may overflow."""
    rng = np.random.default_rng(0)
    check_softmax(offset + rng.integers(-640, 640, (3, 16, 32)) / 64)


@gpu
def test_softmax_rescales_when_the_top_has_grown():
    scores = np.zeros((3, 16, 32), np.float32)
    growth = np.float32([0, 0.5, 5, 5.5, 5.6, 6, 20, 60, 80, 90, 200, 1000, -5, -50, -90, -1000])  # kSlack: 5.545
    scores[1] = growth[:, None]
    scores[2] = 2 * growth[:, None]
    _, _, top = check_softmax(scores)
    lag = scores.max(axis=(0, 2)) - top
    assert (lag >= 0).all() and (lag * math.log2(math.e) <= 8).all()
    assert (top[growth >= 6] == 2 * growth[growth >= 6]).all()
    assert (top[(0 < growth) & (growth < 2.5)] == 0).all()


@gpu
def test_softmax_of_a_row_depends_on_that_row_alone():
    """Bit for bit: whether other rows of the warp rescale, are huge, empty or NaN."""
    rng = np.random.default_rng(5)
    own = rng.standard_normal((5, 32)) + np.arange(5)[:, None]  # grows, slowly enough not to rescale
    results = set()
    others = {
        "tame": np.zeros(5),
        "growing": 50.0 * np.arange(5),
        "huge": np.full(5, 1e6),
        "huge at last": np.array([0, 0, 0, 0, 1e6]),
        "empty": np.full(5, -math.inf),
        "NaN": np.full(5, math.nan),
    }
    for offsets, place in product(others.values(), (0, 7, 8, 15)):
        scores = rng.standard_normal((5, 16, 32)) + offsets[:, None, None]
        scores[:, place] = own
        out, lse, top = online_softmax(scores)
        results.add((out[place].tobytes(), lse[place].tobytes(), top[place].tobytes()))
        for other in {0, 1, 15} - {place}:
            assert np.isnan(offsets).any() == np.isnan(out[other]).any()
    assert len(results) == 1


# --- Tiles

TILES = tuple(product((16, 32, 64, 128), (16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 240, 256)))
LAYOUT = Piece(
    "sm80/tile.cuh",
    """
template <int kRows, int kCols>
__global__ void addresses(uint32 base, uint32* out) {
  using Shape = Tile<kRows, kCols>;
  for (int i = threadIdx.x; i < kRows * Shape::kUnits; i += blockDim.x)
    out[i] = Shape(base).at(i / Shape::kUnits, i % Shape::kUnits);
}
template <int kRows, int kCols>
__global__ void moved(uint32 base, int row, int unit, uint32* out) {  // of (r, u), u < 2: what the operands start from
  using Shape = Tile<kRows, kCols>;
  for (int i = threadIdx.x; i < 2 * kRows; i += blockDim.x)
    out[i] = Shape::moved(Shape(base).at(i / 2, i % 2), row, unit);
}
""",
    tuple(f"{name}<{rows}, {cols}>" for name in ("addresses", "moved") for rows, cols in TILES),
)


def addresses(rows, cols, base=1024):
    out = nans((rows, cols // 8), np.uint32)
    LAYOUT.run(f"addresses<{rows}, {cols}>", 1, 128, np.uint32(base), out)
    return out.get().astype(np.int64)


@gpu
@pytest.mark.parametrize("rows, cols", TILES)
def test_tile_layout(rows, cols):
    at = addresses(rows, cols)
    assert np.array_equal(np.sort(at.ravel()), 1024 + 16 * np.arange(at.size)), "two units share a place"
    # ldmatrix reads one unit of eight rows at a time, from eight banks of 16 bytes.
    groups = at.reshape(rows // 8, 8, -1) // 16 % 8
    assert (np.sort(groups, axis=1) == np.arange(8)[None, :, None]).all(), "bank conflict"


@gpu
@pytest.mark.parametrize("rows, cols", TILES)
def test_tile_moved(rows, cols):
    at = addresses(rows, cols)
    for row, unit in product(range(0, rows, 8), range(0, cols // 8, 2)):
        out = nans((rows, 2), np.uint32)
        LAYOUT.run(f"moved<{rows}, {cols}>", 1, 128, np.uint32(1024), *ints(row, unit), out)
        expected = at[row:, unit : unit + 2]
        assert np.array_equal(out.get()[: rows - row], expected), (row, unit)


COPIES = tuple(  # rows, columns, threads
    (rows, cols, threads)
    for rows, cols in ((32, 16), (64, 48), (32, 64), (48, 96), (64, 112), (32, 224), (64, 256))
    for threads in (128, 256)
)
COPY = Piece(
    "sm80/tile.cuh",
    """
template <int kRows, int kCols, int kThreads, int kAccess>
__global__ void copy_in(char* source, int64 stride, int rows, int cols, int first, unsigned short* out) {
  __shared__ __align__(1024) unsigned short shared[kRows * kCols];
  for (int i = threadIdx.x; i < kRows * kCols; i += kThreads) shared[i] = 0xffff;
  __syncthreads();
  const Tile<kRows, kCols> tile(shared_address(shared));
  load_tile<kThreads, kAccess>(tile, Matrix{source, stride, rows, cols}, first);
  commit_copies();
  wait_copies<0>();
  __syncthreads();
  for (int i = threadIdx.x; i < kRows * kCols; i += kThreads) {
    const int row = i / kCols, col = i % kCols;
    out[i] = shared[(tile.at(row, col / 8) - tile.base) / 2 + col % 8];
  }
}
template <int kRows, int kCols, int kThreads>
__global__ void copy_out(const unsigned short* source, char* target, int64 stride, int rows, int cols, int first) {
  __shared__ __align__(1024) unsigned short shared[kRows * kCols];
  const Tile<kRows, kCols> tile(shared_address(shared));
  for (int i = threadIdx.x; i < kRows * kCols; i += kThreads) {
    const int row = i / kCols, col = i % kCols;
    shared[(tile.at(row, col / 8) - tile.base) / 2 + col % 8] = source[i];
  }
  __syncthreads();
  store_tile<kThreads>(tile, Matrix{target, stride, rows, cols}, first);
}
""",
    (
        *(f"copy_in<{r}, {c}, {t}, {access}>" for r, c, t in COPIES for access in (16, 8, 4, 2)),
        *(f"copy_out<{r}, {c}, {t}>" for r, c, t in COPIES),
    ),
)


def tails(rows, cols, access):
    """Rows and columns of a matrix and the first row of the tile: whole, one unit short, cut off, beyond the end."""
    unit = access // 2
    widths = sorted({cols, cols - unit, max(unit, (cols - 16) // unit * unit + unit)})
    return [
        (length, width, first)
        for width in widths
        for length, first in ((rows, 0), (3 * rows, rows), (rows + 1, rows), (2 * rows - 1, rows), (5, 0), (rows, rows))
    ]


@gpu
@pytest.mark.parametrize("access", [16, 8, 4, 2])
@pytest.mark.parametrize("rows, cols, threads", COPIES)
def test_load_tile(rows, cols, threads, access):
    unit = access // 2
    rng = np.random.default_rng(cols)
    for length, width, first in tails(rows, cols, access):
        stride = width + unit  # aligned as promised and no better
        memory = np.full(unit + length * stride + 4096, 0xFFFF, np.uint16)  # NaN around
        matrix = rng.integers(1, 0x7000, (length, width), dtype=np.uint16)
        view = np.lib.stride_tricks.as_strided(memory[unit:], (length, width), (2 * stride, 2))
        view[...] = matrix
        out = nans((rows, cols), np.uint16)
        source = to_gpu(memory)[unit:]
        arguments = source, np.int64(2 * stride), *ints(length, width, first), out
        COPY.run(f"copy_in<{rows}, {cols}, {threads}, {access}>", 1, threads, *arguments)
        expected = np.zeros((rows, cols), np.uint16)
        part = matrix[first : first + rows]
        expected[: len(part), :width] = part
        assert np.array_equal(out.get(), expected), (length, width, first)


@gpu
@pytest.mark.parametrize("rows, cols, threads", COPIES)
def test_store_tile(rows, cols, threads):
    values = np.random.default_rng(cols).integers(1, 0x7000, (rows, cols), dtype=np.uint16)
    for length, width, first in tails(rows, cols, 16):
        stride = width + 8
        target = nans((8 + length * stride + 64,), np.uint16)
        expected = target.get()
        view = np.lib.stride_tricks.as_strided(expected[8:], (length, width), (2 * stride, 2))
        part = view[first : first + rows]
        part[...] = values[: len(part), :width]
        arguments = to_gpu(values), target[8:], np.int64(2 * stride), *ints(length, width, first)
        COPY.run(f"copy_out<{rows}, {cols}, {threads}>", 1, threads, *arguments)
        assert np.array_equal(target.get(), expected), (length, width, first)


# --- Products

M, N, K = 32, 48, 64
LEFTS, RIGHTS = ("Left", "LeftTransposed", "rounded", "InRegisters"), ("Right", "RightTransposed")
PRODUCT = Piece(
    "sm80/forward.cuh",
    f"""
constexpr int M = {M}, N = {N}, K = {K};
constexpr int kOffset = 16;  // an operand is a part of its tile
struct LeftKind {{}};
struct LeftTransposedKind {{}};
struct roundedKind {{}};
struct InRegistersKind {{}};
struct RightKind {{}};
struct RightTransposedKind {{}};
"""
    """
template <class A, class B> constexpr bool same = false;
template <class A> constexpr bool same<A, A> = true;

template <class T, bool kTransposed, class Operand, class RightTile>
__device__ void multiply_with(Accumulator<N> (&acc)[M / 16], Operand left, RightTile right_tile) {
  if constexpr (kTransposed)
    product<T, K / 16>(acc, left, RightTransposed(right_tile, kOffset));
  else
    product<T, K / 16>(acc, left, Right(right_tile, kOffset));
}

// out (M x N) = left (M x K) right (K x N). Tiles in memory: left with rows [kOffset, kOffset + M), or transposed with
// those columns; right with columns [kOffset, kOffset + N), or transposed with those rows.
template <class T, class LeftOf, class RightOf>
__global__ void multiply_tiles(char* left, char* right, float* out) {
  constexpr bool kLeftTransposed = same<LeftOf, LeftTransposedKind>;
  constexpr bool kRightTransposed = same<RightOf, RightTransposedKind>;
  using LeftTile = Tile<kLeftTransposed ? K : M + kOffset, kLeftTransposed ? M + kOffset : K>;
  using RightTile = Tile<kRightTransposed ? N + kOffset : K, kRightTransposed ? K : N + kOffset>;
  __shared__ __align__(1024) char shared[LeftTile::kBytes + RightTile::kBytes];
  const LeftTile left_tile(shared_address(shared));
  const RightTile right_tile(left_tile.base + LeftTile::kBytes);
  load_tile<32, 16>(left_tile, Matrix{left, 2 * LeftTile::kCols, LeftTile::kRows, LeftTile::kCols}, 0);
  load_tile<32, 16>(right_tile, Matrix{right, 2 * RightTile::kCols, RightTile::kRows, RightTile::kCols}, 0);
  commit_copies();
  wait_copies<0>();
  __syncthreads();

  Accumulator<N> acc[M / 16];
  for (int t = 0; t < M / 16; ++t) acc[t].clear();
  if constexpr (same<LeftOf, LeftKind>) {
    multiply_with<T, kRightTransposed>(acc, Left(left_tile, kOffset), right_tile);
  } else if constexpr (kLeftTransposed) {
    multiply_with<T, kRightTransposed>(acc, LeftTransposed(left_tile, kOffset), right_tile);
  } else if constexpr (same<LeftOf, InRegistersKind>) {
    InRegisters<M / 16, K / 16> registers;
    registers.read(Left(left_tile, kOffset));
    multiply_with<T, kRightTransposed>(acc, registers, right_tile);
  } else {
    Accumulator<K> values[M / 16];
#pragma unroll
    for (int t = 0; t < M / 16; ++t)
#pragma unroll
      for (int j = 0; j < K / 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = kOffset + 16 * t + values[t].row(i / 2), col = 8 * j + values[t].col() + i % 2;
          values[t].x[j][i] = T::unpack(reinterpret_cast<unsigned short*>(left)[row * K + col]).x;
        }
    multiply_with<T, kRightTransposed>(acc, rounded<T>(values), right_tile);
  }
  for (int t = 0; t < M / 16; ++t)
    for (int j = 0; j < N / 8; ++j)
      for (int i = 0; i < 4; ++i)
        out[(16 * t + acc[t].row(i / 2)) * N + 8 * j + acc[t].col() + i % 2] = acc[t].x[j][i];
}

template <class T>
__global__ void store_accumulator(unsigned short* out) {  // row, column and value agree
  __shared__ __align__(1024) unsigned short shared[48 * 80];
  const Tile<48, 80> tile(shared_address(shared));
  for (int i = threadIdx.x; i < 48 * 80; i += 32) shared[i] = 0xffff;
  __syncthreads();
  Accumulator<32> acc;
  for (int j = 0; j < 4; ++j)
    for (int i = 0; i < 4; ++i) acc.x[j][i] = acc.row(i / 2) * 8 + (8 * j + acc.col() + i % 2) % 8 + 0.25f * j;
  tile.store<T>(acc, 16, 48);
  __syncthreads();
  for (int i = threadIdx.x; i < 48 * 80; i += 32)
    out[i] = shared[(tile.at(i / 80, i % 80 / 8) - tile.base) / 2 + i % 8];
}
""",
    (
        *(
            f"multiply_tiles<cupyflash::{dtype}, {left}Kind, {right}Kind>"
            for dtype in DTYPES16
            for left in LEFTS
            for right in RIGHTS
        ),
        *(f"store_accumulator<cupyflash::{dtype}>" for dtype in DTYPES16),
    ),
)


@gpu
@pytest.mark.parametrize("dtype", DTYPES16)
@pytest.mark.parametrize("right", RIGHTS)
@pytest.mark.parametrize("left", LEFTS)
@pytest.mark.parametrize("exact", [True, False], ids=["integers", "normal"])
def test_product(left, right, dtype, exact):
    rng = np.random.default_rng(7)

    def values(*shape):
        numbers = rng.integers(-8, 9, shape) if exact else rng.standard_normal(shape)
        return bits16(numbers.astype(np.float64), dtype)

    left_bits, right_bits = values(M + 16, K), values(K, N + 16)
    out = nans((M, N))
    stored_left = left_bits.T if left == "LeftTransposed" else left_bits
    stored_right = right_bits.T if right == "RightTransposed" else right_bits
    expression = f"multiply_tiles<cupyflash::{dtype}, {left}Kind, {right}Kind>"
    PRODUCT.run(expression, 1, 32, to_gpu(stored_left), to_gpu(stored_right), out)
    a, b = floats16(left_bits, dtype)[16:], floats16(right_bits, dtype)[:, 16:]
    allowed = 0 if exact else 4e-6 * (np.abs(a) @ np.abs(b)).max()  # integers are exact: every index is seen
    tools.assert_close("product", out.get().astype(np.float64), a @ b, allowed)


@gpu
@pytest.mark.parametrize("dtype", DTYPES16)
def test_tile_takes_an_accumulator(dtype):
    out = nans((48, 80), np.uint16)
    PRODUCT.run(f"store_accumulator<cupyflash::{dtype}>", 1, 32, out)
    row, col = np.arange(16)[:, None], np.arange(32)
    expected = np.full((48, 80), 0xFFFF, np.uint16)
    expected[16:32, 48:80] = bits16(row * 8 + col % 8 + 0.25 * (col // 8), dtype)
    assert np.array_equal(out.get(), expected)


# --- Hopper: the copy engine, and products of a warpgroup

WIDTHS = (64, 80, 96, 128, 192, 256)
BOX_ROWS = (64, 80, 128, 192)
WARPGROUP_K = 64
HOPPER = Piece(
    "sm90/forward.cuh",
    """
constexpr int K = 64;
struct Maps {
  TensorMap left, right;
};

// Element (row, col) of a panel of 64 columns, which begins at a multiple of 1024 bytes.
__device__ int place(int row, int col) { return row * 64 + ((col / 8) ^ (row % 8)) * 8 + col % 8; }

__device__ Ring<1> new_ring(uint64* barriers) {
  const Ring<1> ring(shared_address(barriers));
  if (threadIdx.x == 0) {
    ring.init(1);
    fence_barrier_init();
  }
  __syncthreads();
  return ring;
}

template <int kRows>
__global__ void box(const __grid_constant__ TensorMap map, int col, int row, int head, int batch, unsigned short* out) {
  __shared__ __align__(1024) unsigned short shared[kRows * 64];
  __shared__ uint64 barriers[2];
  for (int i = threadIdx.x; i < kRows * 64; i += blockDim.x) shared[i] = 0xffff;
  asm volatile("fence.proxy.async;" ::: "memory");  // the NaN before what the copy engine writes
  const Ring<1> ring = new_ring(barriers);
  if (threadIdx.x == 0) copy_box(shared_address(shared), map, ring.acquire(sizeof(shared)), col, row, head, batch);
  ring.wait();
  for (int i = threadIdx.x; i < kRows * 64; i += blockDim.x) out[i] = shared[place(i / 64, i % 64)];
}

template <int kN>
__device__ void fill(Accumulator<kN>& acc, float value) {
  for (int j = 0; j < kN / 8; ++j)
    for (int i = 0; i < 4; ++i) acc.x[j][i] = value;
}
template <int kN>
__device__ void write(const Accumulator<kN>& acc, float* out) {
  for (int j = 0; j < kN / 8; ++j)
    for (int i = 0; i < 4; ++i)
      out[(16 * warp_index() + acc.row(i / 2)) * kN + 8 * j + acc.col() + i % 2] = acc.x[j][i];
}

// out (64 x kN) = left (64 x K) right^T, right (kN x K), added to `before` or in its place.
template <class T, int kN>
__global__ void __launch_bounds__(128)
    dot_rows(const __grid_constant__ Maps maps, float before, int accumulate, float* out) {
  __shared__ __align__(1024) char left[64 * 128];
  __shared__ __align__(1024) char right[kN * 128];
  __shared__ uint64 barriers[2];
  const Ring<1> ring = new_ring(barriers);
  if (threadIdx.x == 0) {
    const uint32 full = ring.acquire(sizeof(left) + sizeof(right));
    copy_tile<64, K>(shared_address(left), maps.left, full, 0, 0, 0);
    copy_tile<kN, K>(shared_address(right), maps.right, full, 0, 0, 0);
  }
  ring.wait();
  Accumulator<kN> acc;
  fill(acc, before);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < K / 16; ++step)
    Wgmma<T, kN>::dot_rows(acc.x, descriptor(shared_address(left) + 32 * step, 16),
                           descriptor(shared_address(right) + 32 * step, 16), step > 0 || accumulate);
  wgmma_commit();
  wgmma_wait<0>();
  write(acc, out);
}

// out (64 x kN) = before + left (64 x K) right, right (K x kN).
template <class T, int kN>
__global__ void __launch_bounds__(128)
    times(const __grid_constant__ Maps maps, const uint32* left, float before, float* out) {
  __shared__ __align__(1024) char right[panels(kN) * K * 128];
  __shared__ uint64 barriers[2];
  const Ring<1> ring = new_ring(barriers);
  if (threadIdx.x == 0) {
    const uint32 full = ring.acquire(sizeof(right));
    copy_tile<K, kN>(shared_address(right), maps.right, full, 0, 0, 0);
  }
  uint32 a[K / 16][4];
#pragma unroll
  for (int step = 0; step < K / 16; ++step)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = 16 * warp_index() + lane_index() / 4 + 8 * (i % 2);
      a[step][i] = left[(row * K + 16 * step + 2 * (lane_index() % 4) + 8 * (i / 2)) / 2];
    }
  ring.wait();
  Accumulator<kN> acc;
  fill(acc, before);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < K / 16; ++step)
    Wgmma<T, kN>::times(acc.x, a[step], descriptor(shared_address(right) + 2048 * step, K * 128));
  wgmma_commit();
  wgmma_wait<0>();
  write(acc, out);
}
""",
    (
        *(f"box<{rows}>" for rows in BOX_ROWS),
        *(f"{n}<cupyflash::{t}, {width}>" for n in ("dot_rows", "times") for t in DTYPES16 for width in WIDTHS),
    ),
)


def tensor_maps(*arrays):
    """The maps of arrays on the GPU in one argument of a kernel; each array with the rows of its boxes."""
    from cupyflash import tensor_map

    words = np.concatenate([tensor_map.encode(x, dtype, rows) for x, dtype, rows in arrays])
    return words.view(np.dtype(("V", words.nbytes)))


@gpu
@hopper
@pytest.mark.parametrize("rows", BOX_ROWS)
@pytest.mark.parametrize("seqlen, head_dim", [(192, 64), (100, 72), (1, 40), (257, 128), (81, 200)])
def test_copy_box(rows, seqlen, head_dim):
    """What is beyond the last row or column is zero, though the array goes on in memory with another head or batch."""
    values = np.random.default_rng(rows).integers(1, 0x7000, (2, seqlen, 3, head_dim), dtype=np.uint16)
    x = to_gpu(values)
    map_ = tensor_maps((x, "float16", rows))
    for row, col in product((0, seqlen // 2, seqlen - 1, seqlen), range(0, head_dim, 64)):
        for head, batch in ((0, 0), (2, 0), (1, 1)):
            out = nans((rows, 64), np.uint16)
            HOPPER.run(f"box<{rows}>", 1, 128, map_, *ints(col, row, head, batch), out)
            expected = np.zeros((rows, 64), np.uint16)
            part = values[batch, row : row + rows, head, col : col + 64]
            expected[: part.shape[0], : part.shape[1]] = part
            assert np.array_equal(out.get(), expected), (row, col, head, batch)


@gpu
@hopper
@pytest.mark.parametrize("dtype", DTYPES16)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("exact", [True, False], ids=["integers", "normal"])
def test_warpgroup_products(width, dtype, exact):
    rng = np.random.default_rng(width)

    def values(*shape):
        numbers = rng.integers(-8, 9, shape) if exact else rng.standard_normal(shape)
        return bits16(numbers.astype(np.float64), dtype)

    left, rows, columns = values(64, WARPGROUP_K), values(width, WARPGROUP_K), values(WARPGROUP_K, width)
    a, b, c = (floats16(bits, dtype) for bits in (left, rows, columns))
    on_gpu = [to_gpu(bits[None, :, None, :]) for bits in (left, rows, columns)]
    name = f"<cupyflash::{dtype}, {width}>"
    before = np.float32(3)
    for accumulate in (0, 1):
        maps = tensor_maps((on_gpu[0], dtype, 64), (on_gpu[1], dtype, width))
        out = nans((64, width))
        HOPPER.run(f"dot_rows{name}", 1, 128, maps, before, np.int32(accumulate), out)
        allowed = 0 if exact else 4e-6 * (3 + np.abs(a) @ np.abs(b.T)).max()
        tools.assert_close("dot_rows", out.get().astype(np.float64), a @ b.T + 3 * accumulate, allowed)
    maps = tensor_maps((on_gpu[0], dtype, 64), (on_gpu[2], dtype, WARPGROUP_K))
    out = nans((64, width))
    HOPPER.run(f"times{name}", 1, 128, maps, on_gpu[0], before, out)
    allowed = 0 if exact else 4e-6 * (3 + np.abs(a) @ np.abs(c)).max()
    tools.assert_close("times", out.get().astype(np.float64), 3 + a @ c, allowed)


def test_every_width_of_a_warpgroup_product():
    text = (compiler.kernel_dir() / "sm90" / "wgmma.cuh").read_text()
    found = re.findall(r"^WGMMA\((\w+), .*?, (\d+),", text, re.MULTILINE)
    assert sorted(found) == sorted((dtype, str(width)) for dtype in DTYPES16 for width in WIDTHS)


# --- Without a GPU

PIECES = {
    "convert": CONVERT,
    "accumulator": ACCUMULATOR,
    "band": BAND,
    "work": WORK,
    "softmax": SOFTMAX,
    "layout": LAYOUT,
    "copy": COPY,
    "product": PRODUCT,
    "hopper": HOPPER,
}


@pytest.mark.skipif(bool(tools.nvrtc_missing()), reason=str(tools.nvrtc_missing()))
@pytest.mark.parametrize("name", PIECES)
def test_kernels_compile(name):
    piece = PIECES[name]
    assert len(set(piece.expressions)) == len(piece.expressions)
    arch = "sm_90a" if piece.header.startswith("sm90/") else "sm_90"
    assert tools.nvrtc_compile(piece.source, piece.expressions, arch)[:4] == b"\x7fELF"


def test_core_knows_no_architecture():
    """A header of core/ is complete by itself, and includes nothing but core/."""
    for path in sorted((compiler.kernel_dir() / "core").glob("*.cuh")):
        text = compiler.source(f"core/{path.name}")
        assert all(line.startswith('#line 1 "core/') for line in text.splitlines() if line.startswith("#line 1 "))
        if not tools.nvrtc_missing():
            tools.nvrtc_compile(text, (), "sm_90")
