"""Dropout: the random numbers, the mask that they make, and what both passes do with it."""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import tools
from test_choose import fits, is_valid
from test_compiler import LOCAL, instructions, needs_nvrtc, registers_to_share
from test_score import MASKS
from tools import check, inputs

import cupyflash
from cupyflash import checks, choose, compiler, reference
from cupyflash.dropout import kept, philox, round_keys
from cupyflash.problem import Problem

option_backend, option_backend16 = tools.option_backend, tools.option_backend16

LENGTHS = (1, 15, 17, 64, 130, 300)
HEAD_DIMS = [(40, 40), (64, 64), (96, 96), (128, 128), (256, 256), (192, 128), (64, 40), (16, 256)]
SEED = 0x9E3779B97F4A7C15  # beyond 63 bits
KEY = SEED & 0xFFFFFFFF, SEED >> 32


def mask_of(q, k, dropout, seed):
    """`(batch, heads, seqlen_q, seqlen_k)` on the host."""
    return cupyflash.dropout_mask(q.shape[0], q.shape[2], q.shape[1], k.shape[1], dropout=dropout, seed=seed)


# ---------------------------------------------------------------------------------------------- random numbers


@pytest.mark.parametrize(
    "counter, key, rounds, expected",
    [
        ((0, 0, 0, 0), (0, 0), 7, "5f6fb709 0d893f64 4f121f81 4f730a48"),
        ((0, 0, 0, 0), (0, 0), 10, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, 7, "5207ddc2 45165e59 4d8ee751 8c52f662"),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, 10, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            7,
            "4dfccaba 190a87f0 c47362ba b6b5242a",
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            10,
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_known_answers(counter, key, rounds, expected):
    """Those of Random123, the library of the authors of Philox."""
    words = philox([np.array([word], np.uint64) for word in counter], key, rounds)
    assert [int(word[0]) for word in words] == [int(word, 16) for word in expected.split()]


def keys():
    """The keys of the kernels, as C++."""
    words = ", ".join(f"{left | right << 32}u" for left, right in round_keys(KEY[0] | KEY[1] << 32))
    return f"constexpr cupyflash::uint64 keys[] = {{{words}}};"


@needs_nvrtc
def test_known_answers_of_the_kernels():
    """The compiler computes Philox of any/dropout.cuh for counters of all sizes; NumPy gives the same."""
    lines = [
        keys(),
        """
        __device__ constexpr unsigned word(int i, unsigned a, unsigned b, unsigned c, unsigned d) {
          unsigned words[4] = {};
          cupyflash::Philox(a, c, d, keys).make(words, b & ~7u, b & 7);
          return words[i];
        }
        """,
    ]
    for counter in ((0, 0, 0, 0), (1, 2, 3, 4), (2**29 - 1, 2**29 - 1, 2**32 - 1, 2**32 - 1), (9, 0, 70000, 2**31)):
        expected = philox([np.array([n], np.uint64) for n in counter], KEY)
        given = ", ".join(f"{n}u" for n in counter)
        lines += [f"static_assert(word({i}, {given}) == {int(word[0])}u);" for i, word in enumerate(expected)]
    tools.nvrtc_compile(compiler.source("any/dropout.cuh") + "\n".join(lines), (), "sm_90")


def place(query, key):
    """The stream that the number of a weight is in, and which bit of each word."""

    def bits(x, *which):
        return sum((x >> n & 1) << i for i, n in enumerate(reversed(which)))

    stream = 2 * bits(query, 2, 1) + bits(key, 2)
    byte = 2 * bits(query, 3) + bits(key, 3)
    return stream, 8 * byte + 7 - (4 * bits(key, 1) + 2 * bits(query, 0) + bits(key, 0))


def number(batch, head, query, key):
    """What differs from the threshold in the 32 bits of a weight's number, with the seed SEED: bit by bit."""
    stream, bit = place(query, key)
    counters = [(query // 16, 64 * (key // 16) + 8 * stream + call, head, batch) for call in range(8)]
    words = [int(word[0]) for c in counters for word in philox([np.array([n], np.uint64) for n in c], KEY)]
    return sum((word >> bit & 1) << 31 - n for n, word in enumerate(words))


SHAPE = (2, 3, 40, 70)
NUMBERS = {(b, h, i, j): number(b, h, i, j) for b, h, i, j in np.ndindex(SHAPE) if b + h in (0, 3) and (i + j) % 7 == 0}


@pytest.mark.parametrize("dropout", [2**-32, 0.1, 0.3, 0.5, 1 - 2**-32])
def test_mask_by_its_definition(dropout):
    mask = cupyflash.dropout_mask(*SHAPE, dropout=dropout, seed=SEED)
    assert mask.shape == SHAPE and mask.dtype == bool
    threshold = round(dropout * 2**32)
    for index, difference in NUMBERS.items():
        assert mask[index] == (threshold ^ difference >= threshold), index


# Weight n of a word: its bit n alone differs from the threshold's, or all below it, of which the highest one decides.
DIFFERENCES = {"one": lambda bit: 1 << bit, "all below": lambda bit: (1 << 32) - (2 << bit) & (1 << 32) - 1}
THRESHOLDS = (0xA5A5A5A5, 0x5A5A5A5A, 1, 2**31, 2**32 - 1)


def dropped(which, threshold):
    return threshold if which == "one" else threshold << 1 & (1 << 32) - 1


@pytest.mark.parametrize("which", DIFFERENCES)
@pytest.mark.parametrize("threshold", THRESHOLDS)
def test_all_32_bits_decide(monkeypatch, which, threshold):
    """And what does not differ at all is kept."""

    def words(counter, key):
        call = counter[1] % 8 + 0 * sum(counter)
        table = np.array([DIFFERENCES[which](31 - n) for n in range(32)], np.uint64)
        return [table[(4 * call + i).astype(int)] for i in range(4)]

    monkeypatch.setattr("cupyflash.dropout.philox", words)
    mask = cupyflash.dropout_mask(1, 1, 16, 16, dropout=threshold / 2**32, seed=SEED)[0, 0]
    for i, j in np.ndindex(16, 16):
        assert mask[i, j] == (not dropped(which, threshold) >> place(i, j)[1] & 1), (i, j)


@needs_nvrtc
@pytest.mark.parametrize("which", DIFFERENCES)
def test_all_32_bits_decide_in_the_kernels(which):
    words = ", ".join(f"{DIFFERENCES[which](31 - n)}u" for n in range(32))
    code = f"""
    __device__ constexpr unsigned dropped(unsigned threshold) {{
      constexpr unsigned all[8][4] = {{{words}}};
      unsigned bits[32] = {{}};
      for (int n = 0; n < 32; ++n) bits[n] = threshold >> 31 - n & 1 ? ~0u : 0u;
      cupyflash::Comparison comparison;
      for (int n = 2; n >= 0; --n) comparison.precede(all[n], bits + 4 * n);
      for (int n = 3; n < 8; ++n) comparison.follow(all[n], bits + 4 * n);
      return ~comparison.kept;
    }}
    """
    lines = [f"static_assert(dropped({threshold}u) == {dropped(which, threshold)}u);" for threshold in THRESHOLDS]
    tools.nvrtc_compile(compiler.source("any/dropout.cuh") + code + "\n".join(lines), (), "sm_90")


@needs_nvrtc
@pytest.mark.parametrize("threshold", [1, 2**31, 2**32 - 1, 429496730, 0xFFFF0000, 0x0000FFFF, 0xA5A5A5A5])
def test_words_of_the_kernels(threshold):
    """The compiler makes the words of two blocks, four bits after four; NumPy's mask has the same bits."""
    batch, head, lines = 3, 2, []
    for query, key in ((16, 48), (2**29 - 16, 32)):
        block = kept(
            np, threshold / 2**32, SEED, *(range(n, n + m) for n, m in zip((batch, head, query, key), (1, 1, 16, 16)))
        )
        words = [0] * 8
        for i, j in np.ndindex(16, 16):
            stream, bit = place(i, j)
            words[stream] |= int(block[0, 0, i, j]) << bit
        arguments = [f"{query // 16}u, {key // 2 + stream}u" for stream in range(8)]
        lines += [f"static_assert(word({given}) == {word}u);" for given, word in zip(arguments, words)]
    bits = ", ".join("~0u" if threshold >> 31 - n & 1 else "0u" for n in range(32))
    code = f"""
    __device__ constexpr unsigned word(unsigned block, unsigned stream) {{
      constexpr unsigned bits[] = {{{bits}}};
      {keys()}
      const cupyflash::Philox row(block, {head}, {batch}, keys);
      cupyflash::Comparison comparison;
      unsigned words[4] = {{}};
      for (int n = 2; n >= 0; --n) row.make(words, 8 * stream, n), comparison.precede(words, bits + 4 * n);
      for (int n = 3; n < 8; ++n) row.make(words, 8 * stream, n), comparison.follow(words, bits + 4 * n);
      return comparison.kept;
    }}
    """
    tools.nvrtc_compile(compiler.source("any/dropout.cuh") + code + "\n".join(lines), (), "sm_90")


@needs_nvrtc
@pytest.mark.parametrize("rows", ["kQueries", "kKeys"])
def test_lanes_find_their_weights(rows):
    """Each lane of a fragment, of S and of its transpose, looks at the bit that its weight has."""
    places = [32 * stream + bit for stream, bit in (place(i, j) for i in range(16) for j in range(16))]
    code = f"""
    __device__ constexpr bool finds() {{
      using namespace cupyflash;
      using Kept = Kept<Rows::{rows}>;
      constexpr int places[16][16] = {{{", ".join(map(str, places))}}};
      for (int lane = 0; lane < 32; ++lane)
        for (int j = 0; j < 2; ++j)
          for (int i = 0; i < 4; ++i) {{
            const int row = lane / 4 + 8 * (i / 2), col = 8 * j + 2 * (lane % 4) + i % 2;  // core/fragment.cuh
            const int bit = 8 * Kept::byte_of(j, i / 2) + 7 - i % 2 * Kept::kNext - Kept::shift(lane);
            const int expected = Rows::{rows} == Rows::kQueries ? places[row][col] : places[col][row];
            if (32 * Kept::stream(lane) + bit != expected) return false;
          }}
      return true;
    }}
    static_assert(finds());
    """
    tools.nvrtc_compile(compiler.source("any/dropout.cuh") + code, (), "sm_90")


def test_first_part_of_a_larger_mask():
    """And any range of it, as the NumPy path asks for."""
    mask = cupyflash.dropout_mask(3, 4, 100, 130, dropout=0.4, seed=1)
    np.testing.assert_array_equal(cupyflash.dropout_mask(2, 3, 33, 70, dropout=0.4, seed=1), mask[:2, :3, :33, :70])
    dropout, _ = checks.dropout(0.4, 1)
    part = kept(np, dropout, 1, range(1, 3), range(2, 4), range(17, 61), range(9, 129))
    np.testing.assert_array_equal(part, mask[1:3, 2:4, 17:61, 9:129])


@pytest.mark.parametrize("axis, far", [(0, 2**32 - 1), (1, 2**32 - 1), (2, 2**30 - 17), (3, 2**30 - 17)])
def test_no_index_aliases(axis, far):
    """The last index that is allowed, and each power of two before it, has numbers of its own."""
    seen = set()
    for index in [0, *(1 << n for n in range(1, far.bit_length())), far]:
        ranges = [range(1), range(1), range(64), range(64)]
        ranges[axis] = range(index // 16 * 16, index // 16 * 16 + 16) if axis > 1 else range(index, index + 1)
        mask = kept(np, 0.5, 3, *ranges)
        seen.add((index // 16 if axis > 1 else index, np.packbits(mask).tobytes()))
    assert len({bits for _, bits in seen}) == len({index for index, _ in seen})


# ---------------------------------------------------------------------------------------------- statistics


@pytest.mark.parametrize("dropout", [2**-20, 0.001, 0.1, 0.25, 0.5, 0.9, 0.999, 1 - 2**-20])
def test_rate(dropout):
    """Within 5 sigma of 2^24 weights: 8 bits would miss 0.1 by 17, and 0.001 and less by hundreds."""
    mask = cupyflash.dropout_mask(2, 2, 2048, 2048, dropout=dropout, seed=11)
    sigma = math.sqrt(mask.size * dropout * (1 - dropout))
    assert abs(np.count_nonzero(~mask) - mask.size * dropout) <= 5 * sigma


def correlation(a, b):
    """In units of its standard deviation where a and b are independent: about normal."""
    return float(np.corrcoef(a.ravel(), b.ravel())[0, 1]) * math.sqrt(a.size)


@pytest.mark.parametrize("dropout", [0.1, 0.5])
def test_neighbours_are_independent(dropout):
    """Weights of one counter, of neighbouring counters, of other heads, batches and seeds."""
    mask = cupyflash.dropout_mask(2, 2, 1024, 1024, dropout=dropout, seed=5).astype(np.float32)
    for lag in (1, 2, 7, 8, 9, 16, 64, 128, 512):
        for rows, columns in ((lag, 0), (0, lag), (lag, lag)):
            first, second = mask[0, 0, rows:, columns:], mask[0, 0, : 1024 - rows, : 1024 - columns]
            assert abs(correlation(first, second)) < 5, (rows, columns)
        assert abs(correlation(mask[0, 0, lag:, :-lag], mask[0, 0, :-lag, lag:])) < 5, lag
    assert abs(correlation(mask[0, 0], mask[0, 0].T)) < 5 * math.sqrt(2)  # each pair stands in it twice
    for other in (mask[0, 1], mask[1, 0], mask[1, 1]):
        assert abs(correlation(mask[0, 0], other)) < 5
    assert abs(correlation(mask[0, 1], mask[1, 0])) < 5
    for seed in (4, 6, 5 + 2**32, 5 << 32, 5 + 2**63):
        other = cupyflash.dropout_mask(1, 1, 1024, 1024, dropout=dropout, seed=seed).astype(np.float32)
        assert abs(correlation(mask[0, 0], other[0, 0])) < 5, seed


@pytest.mark.parametrize("dropout", [0.1, 0.5])
def test_weights_of_a_block_are_independent(dropout):
    """Those that share their words, and those of its other streams: all pairs of the 256."""
    mask = cupyflash.dropout_mask(1, 1, 2048, 2048, dropout=dropout, seed=8)[0, 0].astype(np.float32)
    blocks = mask.reshape(128, 16, 128, 16).transpose(1, 3, 0, 2).reshape(256, -1)
    pairs = np.corrcoef(blocks)[np.triu_indices(256, 1)] * math.sqrt(blocks.shape[1])
    assert abs(pairs).max() < 5.5  # one of 32 640: 1 in 800 is beyond
    assert abs(pairs.var() - 1) < 5 * math.sqrt(2 / pairs.size)


def test_patterns_of_a_word():
    """All 256 of the weights of a byte of it, which one comparison decides, come equally often."""
    mask = cupyflash.dropout_mask(1, 1, 2048, 2048, dropout=0.5, seed=8)[0, 0]
    bits = mask.reshape(512, 4, 512, 4)[:, :2].transpose(1, 3, 0, 2).reshape(8, -1)
    counts = np.bincount(np.packbits(bits, axis=0)[0], minlength=256)
    expected = bits.shape[1] / 256
    assert abs(((counts - expected) ** 2 / expected).sum() - 255) < 5 * math.sqrt(2 * 255)


def test_sums_of_rows_and_columns():
    """Their variances are those of independent weights."""
    mask = cupyflash.dropout_mask(1, 1, 2048, 2048, dropout=0.3, seed=13)[0, 0]
    for axis in (0, 1):
        variance = mask.sum(axis=axis).var() / (2048 * 0.3 * 0.7)
        assert abs(variance - 1) < 5 * math.sqrt(2 / 2048)


# ---------------------------------------------------------------------------------------------- against the reference


@pytest.mark.parametrize("seqlen_q", LENGTHS)
@pytest.mark.parametrize("seqlen_k", LENGTHS)
@pytest.mark.parametrize("causal", [False, True])
def test_lengths(backend1, seqlen_q, seqlen_k, causal):
    x = inputs(backend1, seqlen_q, seqlen_k, batch=1, seed=1)
    check(backend1, *x.qkv, x.dout, x.dlse, causal=causal, dropout=0.3, seed=SEED)


@pytest.mark.parametrize("dropout", [1e-4, 0.1, 0.5, 0.9, Fraction(1, 3), np.float32(0.999)])
def test_probabilities(backend, dropout):
    x = inputs(backend, 130, 150, batch=1)
    check(backend, *x.qkv, x.dout, x.dlse, dropout=dropout, seed=2)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(1100, 1100), (300, 1300), (1300, 300)])
def test_long(backend1, seqlen_q, seqlen_k, head_dim):
    x = inputs(backend1, seqlen_q, seqlen_k, batch=1, head_dim=head_dim, seed=2)
    check(backend1, *x.qkv, x.dout, x.dlse, causal=True, dropout=0.2, seed=3)


@pytest.mark.parametrize("options", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(130, 130), (65, 200), (200, 65)])
def test_masks(backend1, options, seqlen_q, seqlen_k):
    x = inputs(backend1, seqlen_q, seqlen_k, heads_q=4, heads_k=2, seed=3)
    check(backend1, *x.qkv, x.dout, x.dlse, **options, dropout=0.2, seed=4)


@pytest.mark.parametrize("head_dim, head_dim_v", HEAD_DIMS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_head_dims(backend16, head_dim, head_dim_v, causal, deterministic):
    x = inputs(backend16, 130, 150, heads_q=4, heads_k=2, head_dim=head_dim, head_dim_v=head_dim_v, batch=1, seed=4)
    options = {"causal": causal, "deterministic": deterministic}
    check(backend16, *x.qkv, x.dout, x.dlse, **options, dropout=0.4, seed=5)


@pytest.mark.parametrize("heads_q, heads_k", [(3, 3), (6, 2), (16, 1), (40, 40)])
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(1, 100), (5, 64), (130, 65)])
def test_groups_of_heads(backend, heads_q, heads_k, seqlen_q, seqlen_k):
    """Few queries too, of many heads."""
    x = inputs(backend, seqlen_q, seqlen_k, heads_q, heads_k, head_dim=32, seed=5)
    check(backend, *x.qkv, x.dout, x.dlse, causal=True, dropout=0.3, seed=6)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_with_changed_scores(backend16, head_dim, causal):
    x = inputs(backend16, 130, 200, heads_q=4, heads_k=2, head_dim=head_dim, batch=1, seed=6)
    slopes = backend16.array([0.0, 0.05, -0.02, 0.3], backend16.lse_dtype)
    for change in ({"softcap": 3.0}, {"alibi_slopes": slopes}, {"softcap": 2.0, "alibi_slopes": slopes}):
        check(backend16, *x.qkv, x.dout, x.dlse, causal=causal, dropout=0.3, seed=7, **change)


@pytest.mark.parametrize("scale", [0.0, -0.3, 1.0])
def test_scale(backend1, scale):
    x = inputs(backend1, 70, 130, batch=1, head_dim=16)
    check(backend1, *x.qkv, x.dout, x.dlse, scale=scale, dropout=0.3, seed=8)


@pytest.mark.parametrize("layout", tools.LAYOUTS.values(), ids=tools.LAYOUTS)
def test_layouts(backend1, layout):
    x = inputs(backend1, 70, 65, heads_q=4, heads_k=2)
    q, k, v, dout = (tools.laid_out(backend1, array, layout) for array in (*x.qkv, x.dout))
    check(backend1, q, k, v, dout, x.dlse, causal=True, dropout=0.3, seed=9)


def test_float32_out(backend16):
    x, options = inputs(backend16, 65, 130), {"dropout": 0.3, "seed": 10}
    buffer = tools.Guarded(backend16, x.q.shape, np.float32)
    out, lse = cupyflash.attention(*x.qkv, out=buffer.array, return_lse=True, **options)
    buffer.check()
    right = tools.expectation(backend16, *x.qkv, x.dout, **options)
    tools.assert_close("out", backend16.host(out), *right["out"])
    for name, gradient in tools.named(cupyflash.attention_backward(x.dout, *x.qkv, out, lse, **options)).items():
        tools.assert_close(name, backend16.host(gradient), *right[name])


def test_without_batch(backend1):
    """The first of a batch."""
    x, options = inputs(backend1, 65, 70, heads_q=4, heads_k=2), {"dropout": 0.5, "seed": 1}
    out, lse = cupyflash.attention(*x.qkv, return_lse=True, **options)
    gradients = cupyflash.attention_backward(x.dout, *x.qkv, out, lse, deterministic=True, **options)
    alone = [array[0] for array in x.qkv]
    one, one_lse = cupyflash.attention(*alone, return_lse=True, **options)
    assert tools.same_bits(one, out[0]) and tools.same_bits(one_lse, lse[0])
    ones = cupyflash.attention_backward(x.dout[0], *alone, one, one_lse, deterministic=True, **options)
    assert all(tools.same_bits(one, all_[0]) for one, all_ in zip(ones[:3], gradients[:3]))
    assert not tools.same_bits(cupyflash.attention(*[array[1] for array in x.qkv], **options), out[1])


@pytest.mark.parametrize("seqlen_q, seqlen_k, batch, heads", [(4, 0, 2, 3), (0, 4, 2, 3), (3, 3, 0, 3), (3, 3, 2, 0)])
def test_empty(backend1, seqlen_q, seqlen_k, batch, heads):
    q, k, v = (backend1.normal((batch, n, heads, 16)) for n in (seqlen_q, seqlen_k, seqlen_k))
    options = {"dropout": 0.5, "seed": 0}
    assert mask_of(q, k, **options).shape == (batch, heads, seqlen_q, seqlen_k)
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
    assert not backend1.host(out).any() and np.isneginf(backend1.host(lse)).all()
    for gradient in cupyflash.attention_backward(out, q, k, v, out, lse, **options)[:3]:
        assert not backend1.host(gradient).any()


@pytest.mark.parametrize("causal", [False, True])
def test_gradients_along_a_direction(causal):
    """The public functions against finite differences."""
    backend, seed = tools.Backend("numpy", "float64"), 7
    x = inputs(backend, 33, 41, heads_q=4, heads_k=2, seed=seed)
    options = {"causal": causal, "softcap": 4.0, "dropout": 0.4, "seed": 3}

    def loss(*qkv):
        out, lse = cupyflash.attention(*qkv, return_lse=True, **options)
        return (out * x.dout).sum() + (lse * x.dlse).sum()

    out, lse = cupyflash.attention(*x.qkv, return_lse=True, **options)
    for function in (cupyflash.attention_backward, reference.attention_backward):
        gradients = function(x.dout, *x.qkv, out, lse, dlse=x.dlse, **options)
        for i, gradient in enumerate(gradients[:3]):
            direction = [np.zeros_like(array) for array in x.qkv]
            direction[i] = np.random.default_rng(seed + i).standard_normal(gradient.shape)
            above, below = (loss(*(a + step * d for a, d in zip(x.qkv, direction))) for step in (1e-6, -1e-6))
            np.testing.assert_allclose((above - below) / 2e-6, (gradient * direction[i]).sum(), rtol=1e-6)


# ---------------------------------------------------------------------------------------------- the mask in the results


@pytest.mark.parametrize("head_dim, head_dim_v", [(16, 64), (64, 64), (96, 96), (128, 128), (192, 192), (256, 256)])
@pytest.mark.parametrize("heads_q, heads_k", [(2, 2), (4, 1)])
@pytest.mark.parametrize("causal", [False, True])
def test_both_passes_keep_the_same(backend16, head_dim, head_dim_v, heads_q, heads_k, causal):
    """Dao-AILab/flash-attention#612, #1251: values that are the identity show the weights, in each tiling."""
    backend, dropout, seed = backend16, 0.3, 12
    seqlen_q, seqlen_k = 70 if head_dim > 64 else 200, min(head_dim_v, 150)
    q = backend.array(np.zeros((2, seqlen_q, heads_q, head_dim)))
    k = backend.array(np.zeros((2, seqlen_k, heads_k, head_dim)))
    v = backend.array(np.eye(seqlen_k, head_dim_v)[None, :, None] * np.ones((2, 1, heads_k, 1)))
    options = {"causal": causal, "dropout": dropout, "seed": seed}
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
    mask = mask_of(q, k, dropout, seed) & reference.visible(np, seqlen_q, seqlen_k, causal)
    weights = backend.host(out)[..., :seqlen_k].transpose(0, 2, 1, 3)
    np.testing.assert_array_equal(weights != 0, mask)

    first = min(seqlen_q, head_dim_v)  # queries whose dout is a column of the identity show their weights in dv
    for h in range(heads_q):
        dout = np.zeros((2, seqlen_q, heads_q, head_dim_v))
        dout[:, :first, h, :first] = np.eye(first)
        gradients = cupyflash.attention_backward(backend.array(dout), q, k, v, out, lse, **options)
        shown = backend.host(gradients.dv)[:, :, h // (heads_q // heads_k), :first]
        np.testing.assert_array_equal(shown.swapaxes(1, 2) != 0, mask[:, h, :first])


def test_every_key_by_name(backend1):
    """A thousand keys, some at a time: tiles further on keep what the mask says."""
    seqlen_k, width, options = 1000, 64, {"dropout": 0.5, "seed": SEED}
    q, k = backend1.array(np.zeros((1, 20, 1, 64))), backend1.array(np.zeros((1, seqlen_k, 1, 64)))
    mask = mask_of(q, k, **options)[0, 0]
    for first in range(0, seqlen_k, width):
        values = np.zeros((1, seqlen_k, 1, width))
        values[0, first : first + width, 0] = np.eye(width)[: seqlen_k - first]
        out = backend1.host(cupyflash.attention(q, k, backend1.array(values), **options))[0, :, 0]
        part = mask[:, first : first + width]
        np.testing.assert_array_equal(out[:, : part.shape[1]] != 0, part)


@pytest.mark.parametrize("dropout", [0.5, 0.95])
def test_lse_is_that_without_dropout(backend, dropout):
    """aws-neuron/nki-samples#80: a row whose keys are all dropped has out 0, and lse as if none were."""
    x = inputs(backend, 300, batch=1)
    options = {"causal": True, "dropout": dropout, "seed": 1}
    out, lse = cupyflash.attention(*x.qkv, return_lse=True, **options)
    right = tools.expectation(backend, *x.qkv, causal=True)
    tools.assert_close("lse", backend.host(lse), *right["lse"])
    kept_keys = mask_of(x.q, x.k, dropout, 1) & reference.visible(np, 300, 300, True)
    nothing = ~kept_keys.any(axis=-1)
    assert nothing.any() and np.isfinite(backend.host(out)).all()
    np.testing.assert_array_equal((backend.host(out) == 0).all(axis=-1), nothing.swapaxes(1, 2))


def test_by_hand(backend):
    """Two keys of weight 1/2: out is the sum of those that are kept, at four thirds of their weight."""
    q, v = np.zeros((1, 64, 1, 16)), np.zeros((1, 2, 1, 16))
    v[0, :, 0, 0] = 1, 2
    q, k, v = backend.array(q), backend.array(np.zeros((1, 2, 1, 16))), backend.array(v)
    out = backend.host(cupyflash.attention(q, k, v, dropout=0.25, seed=4))[0, :, 0, 0]
    expected = mask_of(q, k, 0.25, 4)[0, 0] @ [1, 2] / 2 / 0.75
    assert len(set(expected)) == 4
    np.testing.assert_allclose(out, expected, rtol=backend.eps)


@pytest.mark.parametrize("dropout", [0.0, -0.0, 0, 2**-34, Fraction(0), np.float16(0)])
def test_nothing_is_dropped(backend, dropout):
    """The same bits as without the option, also where 32 bits cannot tell the probability from 0."""
    x = inputs(backend, 130, heads_q=4, heads_k=2)

    def results(**options):
        out, lse = cupyflash.attention(*x.qkv, causal=True, return_lse=True, **options)
        return (
            out,
            lse,
            *cupyflash.attention_backward(x.dout, *x.qkv, out, lse, causal=True, deterministic=True, **options)[:3],
        )

    assert all(map(tools.same_bits, results(dropout=dropout, seed=3), results()))
    assert mask_of(x.q, x.k, dropout, 3).all()


def test_same_bits_again(backend):
    x, options = inputs(backend, 200, 300, heads_q=4, heads_k=2), {"causal": True, "dropout": 0.2, "seed": 1}
    runs = [check(backend, *x.qkv, x.dout, x.dlse, deterministic=True, **options) for _ in range(2)]
    assert all(tools.same_bits(runs[0][name], runs[1][name]) for name in runs[0])


def test_other_seeds_and_probabilities_in_the_same_call(backend1):
    """Dao-AILab/flash-attention#314: what is remembered of a call does not hold its seed."""
    x = inputs(backend1, 65, heads_q=4)
    outs = []
    for options in ({"seed": 1}, {"seed": 2}, {"seed": 1 + 2**32}, {"seed": SEED}, {"seed": 1, "dropout": 0.4}):
        outs.append(check(backend1, *x.qkv, x.dout, **{"dropout": 0.3} | options)["out"])
    assert len({out.tobytes() for out in outs}) == len(outs)
    check(backend1, *x.qkv, x.dout)


@pytest.mark.parametrize("position", ["q", "k"])
def test_nan_is_not_dropped(backend, position):
    """In the rows that have it: where some weight is kept, out is NaN, and so is every gradient that it reaches."""
    x, options = inputs(backend, 70, 130, batch=1), {"dropout": 0.5, "seed": 2}
    getattr(x, position)[0, 40, 0, 3] = np.nan
    out, lse = cupyflash.attention(*x.qkv, return_lse=True, **options)
    rows = np.arange(70) == 40 if position == "q" else np.ones(70, bool)
    np.testing.assert_array_equal(np.isnan(backend.host(out)[0, :, 0, 0]), rows)
    gradients = cupyflash.attention_backward(x.dout, *x.qkv, out, lse, **options)
    assert np.isfinite(backend.host(out)[0, :, 1]).all() and np.isnan(backend.host(gradients.dq)[0, rows, 0]).all()
    kept_keys = mask_of(x.q, x.k, **options)[0, 0][rows].any(axis=0)
    np.testing.assert_array_equal(np.isnan(backend.host(gradients.dv)[0, :, 0, 0]), kept_keys)


@pytest.mark.gpu
def test_mask_on_the_gpu(cuda):
    options = {"dropout": 0.3, "seed": SEED}
    theirs = cupyflash.dropout_mask(2, 3, 100, 70, **options, xp=cuda.xp)
    assert isinstance(theirs, cuda.xp.ndarray)
    np.testing.assert_array_equal(theirs.get(), cupyflash.dropout_mask(2, 3, 100, 70, **options))


def test_graph(cuda):
    """A captured call keeps its seed, in both passes, whatever seeds come after it."""
    xp, x = cuda.xp, inputs(cuda, 130, 200)

    def results(seed):
        options = {"dropout": 0.3, "seed": seed}
        out, lse = cupyflash.attention(*x.qkv, return_lse=True, **options)
        return out, lse, *cupyflash.attention_backward(x.dout, *x.qkv, out, lse, deterministic=True, **options)[:3]

    results(1)
    stream = xp.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        captured = results(2)
        graph = stream.end_capture()
        for _ in range(2):
            others = results(3)
            graph.launch(stream)
            stream.synchronize()
            assert all(map(tools.same_bits, captured, results(2)))
            assert not tools.same_bits(captured[0], others[0])


# ---------------------------------------------------------------------------------------------- arguments


def calls(**options):
    """Every function that takes the options."""
    x = inputs(tools.Backend("numpy", "float32"), 3, head_dim=8, batch=1)
    lse = x.dlse
    yield lambda: cupyflash.attention(*x.qkv, **options)
    yield lambda: cupyflash.attention_backward(x.dout, *x.qkv, x.dout, lse, **options)
    yield lambda: reference.attention(*x.qkv, **options)
    yield lambda: reference.attention_backward(x.dout, *x.qkv, x.dout, lse, **options)
    yield lambda: cupyflash.dropout_mask(1, 1, 3, 3, **{"dropout": 0.0, "seed": None} | options)


@pytest.mark.parametrize(
    "options, error, words",
    [
        ({"dropout": 1.0}, ValueError, "dropout is 1.0; allowed: a real number from 0 to 1 - 2**-32"),
        ({"dropout": 1 - 2**-33, "seed": 1}, ValueError, "dropout is 0.99999999988"),
        ({"dropout": -0.1}, ValueError, "dropout is -0.1; allowed: a real number from 0"),
        ({"dropout": math.nan}, ValueError, "dropout is nan; allowed"),
        ({"dropout": math.inf}, ValueError, "dropout is inf; allowed"),
        ({"dropout": 10**400}, ValueError, "dropout is of type int and too long to print; allowed"),
        ({"dropout": True}, TypeError, "dropout is True (bool); allowed: a real number from 0"),
        ({"dropout": False}, TypeError, "dropout is False (bool)"),
        ({"dropout": None}, TypeError, "dropout is None (NoneType)"),
        ({"dropout": "0.1"}, TypeError, "dropout is '0.1' (str)"),
        ({"dropout": 0.1j}, TypeError, "dropout is 0.1j (complex)"),
        ({"dropout": np.array(0.1)}, TypeError, "(numpy.ndarray); allowed: a real number"),
        ({"dropout": 0.1, "seed": None}, ValueError, "seed is None and dropout is 0.1; allowed: an integer from 0"),
        ({"dropout": 0.1, "seed": -1}, ValueError, "seed is -1; allowed: an integer from 0 to 2**64 - 1"),
        ({"dropout": 0.1, "seed": 2**64}, ValueError, "seed is 18446744073709551616; allowed"),
        ({"dropout": 0.1, "seed": 1.0}, TypeError, "seed is 1.0 (float); allowed: an integer"),
        ({"dropout": 0.1, "seed": True}, TypeError, "seed is True (bool); allowed: an integer"),
        ({"dropout": 0.1, "seed": np.array([1])}, TypeError, "(numpy.ndarray); allowed: an integer"),
        ({"seed": -1}, ValueError, "seed is -1"),
        ({"seed": "0"}, TypeError, "seed is '0' (str)"),
    ],
)
def test_refused(options, error, words):
    """Whatever came before: each is refused when a right call has been remembered, too."""
    for right in calls(dropout=0.0, seed=1):
        right()
    for call in calls(**options):
        with pytest.raises(error) as caught:
            call()
        assert words in str(caught.value)


@pytest.mark.parametrize("kind", [int, np.uint64, np.int64, np.uint8])
def test_seeds_of_any_kind(backend1, kind):
    x = inputs(backend1, 17, batch=1)
    expected = cupyflash.attention(*x.qkv, dropout=0.5, seed=7)
    assert tools.same_bits(cupyflash.attention(*x.qkv, dropout=0.5, seed=kind(7)), expected)
    largest = cupyflash.attention(*x.qkv, dropout=0.5, seed=np.uint64(2**64 - 1))
    assert tools.same_bits(largest, cupyflash.attention(*x.qkv, dropout=0.5, seed=2**64 - 1))


@pytest.mark.parametrize("kind", [float, np.float64, np.float32, np.float16, Fraction])
def test_probabilities_of_any_kind(kind):
    mask = cupyflash.dropout_mask(1, 1, 64, 64, dropout=0.25, seed=7)
    assert (cupyflash.dropout_mask(1, 1, 64, 64, dropout=kind(0.25), seed=7) == mask).all() and not mask.all()


def test_probability_is_that_of_the_mask():
    for given, rounded in ((0.1, 429496730 / 2**32), (2**-33, 0.0), (0.75 * 2**-32, 2**-32), (0.5, 0.5)):
        assert checks.dropout(given, 0) == (rounded, 0)
    assert checks.dropout(1 - 2**-32, 0)[0] == 1 - 2**-32


def test_more_than_the_counter_tells_apart():
    q = np.broadcast_to(np.zeros((1, 1, 1, 1), np.float32), (2**32 + 1, 1, 1, 1))
    for x, name in ((q, "batch"), (q.transpose(1, 2, 0, 3), "heads")):
        with pytest.raises(ValueError, match=rf"{name} is 4294967297; allowed with dropout: at most 2\*\*32"):
            checks.forward(False, checks.options(False, None, None, dropout=0.5), q=x, k=x, v=x)


@pytest.mark.parametrize(
    "sizes, error, words",
    [
        ((2**32 + 1, 1, 1, 1), ValueError, "batch is 4294967297; allowed with dropout: at most 2**32"),
        ((1, 2**32 + 1, 1, 1), ValueError, "heads is 4294967297; allowed with dropout: at most 2**32"),
        ((1, 1, 2**29, 2**29), ValueError, "allowed: less than 2**30 together"),
        ((1, 1, -1, 1), ValueError, "seqlen_q is -1; allowed: an integer from 0"),
        ((1, 1, 1, 1.0), TypeError, "seqlen_k is 1.0 (float)"),
    ],
)
def test_sizes_of_a_mask(sizes, error, words):
    with pytest.raises(error) as caught:
        cupyflash.dropout_mask(*sizes, dropout=0.5, seed=0)
    assert words in str(caught.value)


@pytest.mark.parametrize("xp", [None, "numpy", math, np.zeros(1)])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_modules_without_masks(xp, dropout):
    with pytest.raises(TypeError, match=r"xp is .*; allowed: the modules numpy and cupy"):
        cupyflash.dropout_mask(1, 1, 1, 1, dropout=dropout, seed=0, xp=xp)


# ---------------------------------------------------------------------------------------------- kernels


def problem(head_dim, dtype="bfloat16", **fields):
    return replace(Problem(dtype, 1, 2048, 2048, 1, 1, head_dim, head_dim, 1.0, dropout=0.5), **fields)


@pytest.mark.parametrize("limit", [65536, 101376, 166912, 232448])
def test_chosen_tiles(limit):
    """All fit, and cut into blocks of 16 x 16, whose words are whole warps."""
    for head_dim, change in ((d, c) for d in range(8, 257, 8) for c in ({}, {"softcap": 1.0})):
        one = problem(head_dim, **change)
        specs = [choose.forward(one, 16, False, limit).spec]
        if limit > 101376 or head_dim <= 128:  # a small GPU refuses the others
            specs += [choose.backward(one, 16, deterministic, limit).spec for deterministic in (False, True)]
        if limit == choose.SHARED_LIMIT[90]:
            few = replace(one, heads_q=8, seqlen_q=2)
            specs += [choose.hopper_forward(x, 16, False).spec for x in (one, replace(one, right=0), few)]
            if not choose.backward_elsewhere(one) and not choose.split(one):
                specs += [choose.hopper_backward(one, 16, deterministic).spec for deterministic in (False, True)]
        for spec in specs:
            assert is_valid(spec) and fits(spec, limit) and spec.dropout
            assert not getattr(spec, "packed", False), "rows of several heads have no counters in common"
            assert spec.block_q % 16 == spec.block_k % 16 == spec.block_q * spec.block_k // 32 % 32 == 0


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_kernels_do_not_spill(arch):
    limit = choose.SHARED_LIMIT[int(arch[3:])]
    variants = []
    for head_dim in (64, 96, 128, 256):
        one = problem(head_dim)
        variants += [choose.forward(one, 16, False, limit), choose.backward(one, 16, False, limit)]
        if arch == "sm_90":
            variants += [choose.hopper_forward(one, 16, False), choose.hopper_forward(replace(one, right=0), 16, False)]
            assert choose.backward_elsewhere(one) == (head_dim == 256) and choose.split(one) == (head_dim > 128)
            if head_dim <= 128:
                variants += [choose.hopper_backward(replace(one, **c), 16, False) for c in ({}, {"softcap": 1.0})]
        shown = problem(head_dim, bias="float32", mask=True)
        before = choose.before_backward(variants[1], False, 16)
        variants += [choose.bias_gradient(shown, before, (1, 1, 1, 2048), 16, limit)]
    if arch == "sm_90":
        variants += choose.hopper_split_backward(problem(192), 16)
        variants += choose.hopper_split_backward(problem(192, blocks=True, softcap=1.0, alibi=True), 16)
        options = ({"mask": True}, {"bias": "float32"}, {"blocks": True}, {"softcap": 1.0, "alibi": True})
        variants += [choose.hopper_forward(problem(128, **more), 16, False) for more in options]
    with ThreadPoolExecutor(2) as pool:
        reports = list(pool.map(lambda v: compiler.compile_offline(v, arch), dict.fromkeys(variants)))
    for report in reports:
        about = f"{report.variant.expression} for {arch}"
        assert report.spill_bytes == 0 and not report.remarks, f"{about}: {report.spill_bytes} bytes, {report.remarks}"
        assert not any(instructions(report.cubin)[0][opcode] for opcode in LOCAL), f"{about} uses local memory"
        if report.variant.header.startswith("sm90/"):
            assert report.registers == registers_to_share(report.variant), f"{about} has fewer than its roles take"
