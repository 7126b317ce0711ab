"""Every problem gets a kernel that fits the GPU and whose tiles the warps can share, or an error that says why not."""

import math
import re
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest

from cupyflash import choose, compiler, precise
from cupyflash.mods import Mod, Mods
from cupyflash.problem import Problem
from cupyflash.spec import BIAS_TYPES, Variant

LIMITS = (49152, 65536, 101376, 166912, 232448)  # bytes of shared memory that a block may have
STATIC = 16  # bytes beside the dynamic memory: the ticket of the deterministic backward
SPLIT = choose.HopperKeysSpec, choose.HopperQueriesSpec
RESERVED = 1024  # bytes of a multiprocessor's memory that each block costs beside its own


def problem(head_dim, head_dim_v=None, dtype="bfloat16"):
    return Problem(dtype, 1, 128, 128, 1, 1, head_dim, head_dim_v or head_dim, 1.0)


def chosen(pass_, limit, head_dim, head_dim_v=None, access=16, option=False):
    """The spec, or None where the GPU is too small."""
    try:
        return getattr(choose, pass_)(problem(head_dim, head_dim_v), access, option, limit).spec
    except NotImplementedError as error:
        for part in ("head_dim", "shared memory", str(limit), "NumPy"):
            assert part in str(error)
        return None


def wgmma_widths():
    """Columns of a product that wgmma.cuh has, in both dtypes."""
    text = (compiler.kernel_dir() / "sm90" / "wgmma.cuh").read_text()
    widths = [{int(n) for n in re.findall(rf"^WGMMA\({t}, .*?, (\d+),", text, re.M)} for t in ("float16", "bfloat16")]
    assert widths[0] == widths[1]
    return widths[0]


def is_valid_on_hopper(spec):
    assert spec.access in (2, 4, 16)
    if isinstance(spec, SPLIT):
        assert {spec.head_dim % 64, spec.head_dim_v % 64} == {0} and spec.threads == 384
        return {64, spec.head_dim, spec.head_dim_v} <= wgmma_widths()
    if isinstance(spec, choose.HopperBackwardSpec):
        return is_valid_hopper_backward(spec)
    return is_valid_hopper_forward(spec)


def is_valid_hopper_backward(spec):
    """The groups share dq: 64 queries each, or 64 columns."""
    assert spec.threads == 128 * (spec.groups + 1) and spec.block_k == 64 * spec.groups and spec.groups == 2
    assert spec.key_slots in (1, 2) and spec.stages >= 2, "the next tile is read while the present one is there"
    assert (spec.block_q, spec.head_dim) in ((64 * spec.groups, 64), (64, 64 * spec.groups))
    assert 128 % spec.block_q == 0, "lse and delta are packed in tiles of 128 rows"
    return {spec.block_q, 64, spec.head_dim, spec.head_dim_v} <= wgmma_widths()


def is_valid_hopper_forward(spec):
    """Roles: at most four warpgroups compute, a fifth copies for two teams at most. A Q slot for each group."""
    assert spec.cluster in (1, 2) and 1 <= spec.teams <= 2 and spec.groups >= 2 and spec.teams * spec.groups <= 4
    assert spec.q_slots >= spec.groups and spec.slots >= 3
    assert spec.threads == 128 * (spec.teams * spec.groups + 1) and spec.block_q == 64 * spec.cluster * spec.groups
    assert spec.block_k // spec.cluster % 8 == 0, "each block of a cluster copies whole groups of eight rows"
    assert not spec.blocks or choose.divides_mask_tile(spec.block_q, spec.block_k)
    return spec.head_dim % 16 == 0 and {spec.block_k, spec.head_dim_v} <= wgmma_widths()


def is_valid(spec):
    """Whether the tiles can be cut as the kernels cut them: every piece is a whole number of 16 x 16 blocks."""
    if isinstance(spec, (choose.HopperForwardSpec, choose.HopperBackwardSpec, *SPLIT)):
        return is_valid_on_hopper(spec)
    assert spec.stages in (1, 2) and spec.access in (2, 4, 8, 16)
    assert 32 * spec.warps == spec.threads <= 1024
    assert spec.threads >= 128, "a copy by twos gives each thread of a row of 256 bytes its own column"
    pieces = {"head_dim": spec.head_dim, "head_dim_v": spec.head_dim_v, "block_k": spec.block_k}
    if isinstance(spec, choose.ForwardSpec):
        assert spec.warps % spec.out_warps_q == 0
        assert spec.p_in_registers or spec.stages == 1
        pieces |= {
            "score rows": spec.block_q / spec.warps,
            "out rows": spec.block_q / spec.out_warps_q,
            "out columns": spec.head_dim_v * spec.out_warps_q / spec.warps,
        }
    else:
        warps = spec.warps
        for split in (spec.score_warps_k, spec.grad_warps_k, spec.dq_warps_q):
            assert warps % split == 0
        assert spec.block_q <= spec.threads, "each thread fetches the statistics of one row at most"
        pieces |= {
            "block_q": spec.block_q,
            "score rows": spec.block_k / spec.score_warps_k,
            "score columns": spec.block_q * spec.score_warps_k / warps,
            "gradient rows": spec.block_k / spec.grad_warps_k,
            "dk columns": spec.head_dim * spec.grad_warps_k / warps,
            "dv columns": spec.head_dim_v * spec.grad_warps_k / warps,
            "dq rows": spec.block_q / spec.dq_warps_q,
            "dq columns": spec.head_dim * spec.dq_warps_q / warps,
        }
    return all(piece >= 16 and piece % 16 == 0 for piece in pieces.values())


def fits(spec, limit):
    static = STATIC if getattr(spec, "deterministic", False) else 0
    if isinstance(spec, choose.HopperForwardSpec):
        logits = 2 * spec.groups * spec.logit_slots
        static = 8 * (spec.teams * (2 * spec.slots + 3 * spec.q_slots) + logits)  # the barriers
    if isinstance(spec, choose.HopperBackwardSpec):
        static = 8 * (4 * (spec.key_slots + spec.stages) + 6 + 2 * spec.logit_slots)
        static += (32 + 16) * spec.stages + 12 * spec.key_slots
    if isinstance(spec, choose.HopperKeysSpec):
        static = 8 * (4 + 2 * (spec.slots + spec.slots_dout + spec.logit_slots) + 16)
    if isinstance(spec, choose.HopperQueriesSpec):
        static = 8 * 2 * (2 + spec.slots + spec.slots_v + 2 * spec.logit_slots)
    return spec.shared_bytes + static <= limit and spec.shared_bytes * spec.blocks_per_sm <= limit


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_every_head_dim_fits_or_is_refused(pass_, limit):
    multiples = range(16, 257, 16)  # what lies between is padded to them
    head_dims = {*((d, d) for d in range(1, 257)), *product(multiples, multiples)}
    for (d, dv), access, option in product(sorted(head_dims), (16, 2), (False, True)):
        spec = chosen(pass_, limit, d, dv, access, option)
        if spec is None:
            continue
        assert is_valid(spec) and fits(spec, limit), spec
        assert spec.head_dim >= d and spec.head_dim_v >= dv and spec.access == access
        assert option == (spec.float32_out if pass_ == "forward" else spec.deterministic)


def bias_gradient(limit, head_dim, head_dim_v=None, shape=(1, 1, 128, 128), access=16, packed=False, **options):
    """The variant of the kernel of dbias."""
    given = replace(problem(head_dim, head_dim_v), batch=2, bias="float32", **options)
    before = Variant("", "", "", choose.PrepareSpec(head_dim, head_dim, packed, False, access))
    return choose.bias_gradient(given, before, shape, access, limit)


@pytest.mark.parametrize("limit", LIMITS)
def test_every_head_dim_of_the_backward_has_a_dbias(limit):
    for d, dv, access in product(range(1, 257, 5), (1, 37, 64, 192, 256), (16, 2)):
        if chosen("backward", limit, d, dv) is None:
            continue
        spec = bias_gradient(limit, d, dv, access=access).spec
        assert fits(spec, limit) and (spec.head_dim, spec.head_dim_v) == (-(-d // 16) * 16, -(-dv // 16) * 16)
        assert spec.threads >= 128, "as of the backward"
        rows, cols = spec.block_q / spec.warps_q, spec.block_k * spec.warps_q / spec.warps
        assert rows % 16 == cols % 16 == 0 and spec.access == access


@pytest.mark.parametrize("limit", LIMITS[1:])
def test_what_the_kernel_of_dbias_adds(limit):
    """Several tiles of scores for one of dbias: of batches or heads, or along an axis with more than one."""
    for shape, lengths, summed in (
        ((2, 1, 128, 128), (128, 128), False),
        ((1, 1, 128, 128), (128, 128), True),
        ((2, 1, 1, 1), (16, 16), False),
        ((2, 1, 1, 300), (16, 300), False),
        ((2, 1, 1, 300), (300, 300), True),
        ((2, 1, 300, 1), (300, 300), True),
    ):
        for packed in (False, True):
            given = {"seqlen_q": lengths[0], "seqlen_k": lengths[1], "mask": True, "dropout": 0.5}
            spec = bias_gradient(limit, 64, shape=shape, packed=packed, **given).spec
            assert (spec.summed, spec.packed, spec.bias, spec.mask, spec.dropout) == (summed, packed, 3, True, True)
            assert not spec.softcap and not spec.alibi


HOPPER_LIMIT = choose.SHARED_LIMIT[90]
MASKS = {  # right side and keys: those that choose between the tilings of a row
    "full, short": (None, choose.SHORT),
    "full, long": (None, choose.SHORT + 1),
    "banded, short": (0, choose.SHORT),
    "banded, long": (0, choose.SHORT + 1),
}


def hopper(head_dim, head_dim_v=None, mask="full, short", access=16, float32_out=False, dtype="bfloat16"):
    right, seqlen_k = MASKS[mask]
    masked = replace(problem(head_dim, head_dim_v, dtype), right=right, seqlen_k=seqlen_k)
    return choose.hopper_forward(masked, access, float32_out)


@pytest.mark.parametrize("mask", MASKS)
def test_every_head_dim_fits_on_hopper(mask):
    """Both head dims on their own: the larger one picks the row."""
    assert HOPPER_LIMIT == 232448
    dims = (1, 8, 15, 16, 17, *range(24, 257, 8), 37, 63, 65, 127, 129, 255)
    for d, dv in product(dims, dims):
        spec = hopper(d, dv, mask).spec
        assert is_valid(spec) and fits(spec, HOPPER_LIMIT), spec
        assert d <= spec.head_dim < d + 16 and dv <= spec.head_dim_v
        assert spec.head_dim_v == min(n for n in choose.HOPPER_DIMS_V if n >= dv)


def test_the_tilings_of_hopper():
    limits = sorted(choose.HOPPER_FORWARD)
    for limit, (d, dv), mask in product(limits, ((1, 1), (1, 0), (0, 1)), MASKS):
        larger, smaller = limit, 16
        spec = hopper(larger if d else smaller, larger if dv else smaller, mask).spec
        assert hopper_tiling(spec) == choose.HOPPER_FORWARD[limit][list(MASKS).index(mask)]


def hopper_tiling(spec):
    return spec.block_k, spec.cluster, spec.teams, spec.groups, spec.q_slots, spec.slots


@pytest.mark.parametrize(
    "packed, seqlen_q, heads_q, heads_k",
    [
        (True, 1, 8, 1),
        (True, 1, 64, 1),
        (True, 16, 8, 2),
        (True, 5, 6, 2),
        (True, 130, 8, 2),  # two tiles for each of four heads, or five for all
        (False, 1, 8, 8),
        (False, 1, 65, 1),  # more heads than rows of a warpgroup
        (False, 128, 8, 1),
        (False, 4096, 8, 1),
        (False, 1000, 8, 1),  # 63 tiles of all heads, or 8 for each: no gain worth a division in each row
    ],
)
def test_when_the_heads_of_a_group_share_a_tile(packed, seqlen_q, heads_q, heads_k):
    one = replace(problem(128), seqlen_q=seqlen_q, seqlen_k=choose.SHORT + 1, heads_q=heads_q, heads_k=heads_k)
    assert choose.hopper_forward(one, 16, False).spec.packed is packed
    assert not choose.hopper_forward(one, 16, True).spec.packed, "the copy engine alone writes several heads"
    assert not choose.hopper_forward(one, 8, False).spec.packed


@pytest.mark.parametrize(
    "banded, tiles, places, runs, paired",
    [
        (False, 9, 10, 9, 0),
        (True, 9, 10, 5, 1),
        (True, 8, 10, 4, 1),
        (True, 1, 5, 1, 1),
        (True, 8, 48, 8, 0),  # all of them run at once: a pair would take longer
        (True, 8, 47, 4, 1),
    ],
)
def test_order(banded, tiles, places, runs, paired):
    launch = pytest.importorskip("cupyflash.launch", reason="needs CuPy")
    one = replace(problem(256), batch=2, right=0 if banded else None)
    assert launch._order(one, 3, tiles, places) == ((3, tiles, runs, 2 * 3 * runs, paired), 2 * 3 * runs)
    with pytest.raises(ValueError, match="exceeds the 2147483647 blocks of a launch; split the batch"):
        launch._order(one, 1 << 20, 1 << 11, 1 << 30)


def test_hopper_backward():
    dims = (*range(1, 129, 7), 64, 65, 128)
    for d, dv, deterministic in product(dims, dims, (False, True)):
        for access, stored in ((16, 16), (8, 4), (4, 4), (2, 2)):
            spec = choose.hopper_backward(problem(d, dv), access, deterministic).spec
            assert is_valid(spec) and fits(spec, HOPPER_LIMIT), spec
            assert (spec.access, spec.deterministic) == (stored, deterministic)
            assert spec.head_dim == (64 if max(d, dv) <= 64 else 128) and d <= spec.head_dim and dv <= spec.head_dim_v


def test_which_tiles_of_keys_begin_elsewhere():
    """With a mask they do anyway; where the order of the sums is fixed, whole heads must fill most places."""
    full, causal = problem(64), replace(problem(64), right=0)
    for tiles, filled in ((1, True), (16, True), (32, True), (64, True), (70, False), (100, False), (128, True)):
        assert choose.rotated(full, False, tiles, 132) and choose.rotated(full, True, tiles, 132) == filled
        assert not any(choose.rotated(causal, d, tiles, 132) for d in (False, True))
    assert choose.rotated(full, True, 132, 132) and not choose.rotated(full, True, 133, 132)


@pytest.mark.parametrize("d, dv", list(product((1, 64, 72, 96, 128, 192, 256), repeat=2)))
def test_block_masks(d, dv):
    """The tiles of every kernel lie within those of 128 x 128 that have bits, and its rows are those of one head."""
    for options in ({}, {"dropout": 0.5}, {"softcap": 1.0}, {"softcap": 1.0, "alibi": True}, {"mask": True}):
        for mask, (right, seqlen_k) in MASKS.items():
            grouped = {"heads_q": 8, "right": right, "seqlen_k": seqlen_k, "blocks": True}
            one = replace(problem(d, dv), **grouped, **options)
            specs = [choose.forward(one, 16, False, HOPPER_LIMIT).spec]
            specs += [choose.backward(one, 16, x, HOPPER_LIMIT).spec for x in (False, True)]
            specs.append(choose.hopper_forward(one, 16, False).spec)
            assert is_valid(specs[-1]) and not specs[-1].packed and specs[-1].mask == one.mask
            for deterministic in (False, True):
                if choose.backward_elsewhere(one):
                    continue
                if choose.split(one, deterministic):
                    specs += [variant.spec for variant in choose.hopper_split_backward(one, 16)]
                else:
                    specs.append(choose.hopper_backward(one, 16, deterministic).spec)
                    assert not deterministic and not choose.rotated(one, deterministic, 1, 132)
            for spec in specs:
                assert spec.blocks and fits(spec, HOPPER_LIMIT)
                assert all(128 % getattr(spec, name, 64) == 0 for name in ("block_q", "block_k")), (mask, spec)


def test_split_backward():
    for seqlen_k, least in ((512, 65), (513, 129), (1 << 20, 129)):
        taken = [choose.split(replace(problem(d), seqlen_k=seqlen_k)) for d in range(1, 257)]
        assert taken == [d >= least for d in range(1, 257)]
        mixed = replace(problem(1, least), seqlen_k=seqlen_k), replace(problem(least, 1), seqlen_k=seqlen_k)
        assert all(choose.split(one) for one in mixed)
    with_dropout = [choose.split(replace(problem(d), seqlen_k=100, dropout=0.5)) for d in range(1, 257)]
    assert with_dropout == [d > 128 for d in range(1, 257)]
    dims = (1, 64, 65, 128, 129, 160, 192, 193, 255, 256)
    for d, dv in product(dims, dims):
        if choose.split(problem(d, dv)):
            for access, stored in ((16, 16), (8, 4), (4, 4), (2, 2)):
                for variant in choose.hopper_split_backward(problem(d, dv), access):
                    spec = variant.spec
                    assert is_valid(spec) and fits(spec, HOPPER_LIMIT) and spec.access == stored, spec
                    assert d <= spec.head_dim < d + 64 and dv <= spec.head_dim_v < dv + 64


@pytest.mark.parametrize(
    "bias, mask", [("bfloat16", False), ("float32", False), (None, True), ("float16", True), ("float32", True)]
)
def test_bias_and_mask_on_hopper(bias, mask):
    """Each warpgroup has one or two tiles of them, or words of a mask where the backward is one kernel, and always in
    the forward; where a backward has no room, the portable kernels do it.
    """
    dims = (1, 16, 64, 65, 96, 97, 128, 129, 192, 193, 256)
    for d, dv, seqlen_k in product(dims, dims, (512, 513)):
        one = replace(problem(d, dv), seqlen_k=seqlen_k, bias=bias, mask=mask)
        mains = [choose.hopper_forward(one, 16, False), choose.hopper_forward(one, 2, True)]
        assert choose.backward_elsewhere(one) == (max(d, dv) > (128 if (bias, mask) == ("float32", True) else 192))
        if not choose.backward_elsewhere(one):
            single = 64 < max(d, dv) <= 128 and seqlen_k > 512 and not (bias and mask)
            single |= bias is None and max(d, dv) <= 64
            assert choose.split(one) != single == (not choose.split(one, True))
            backwards = (choose.hopper_backward(one, 16, False),) if single else choose.hopper_split_backward(one, 16)
            mains += backwards
        for spec in (main.spec for main in mains):
            assert is_valid(spec) and fits(spec, HOPPER_LIMIT), spec
            assert (BIAS_TYPES[spec.bias], getattr(spec, "mask", False)) == (bias, mask)
            tiles = bias is not None or isinstance(spec, (choose.HopperKeysSpec, choose.HopperQueriesSpec))
            assert spec.logit_slots in ((1, 2) if tiles else (0,))
            assert not tiles or getattr(spec, "teams", 1) == 1, "a warp is left to copy them"
    assert not any(choose.backward_elsewhere(problem(d)) for d in dims)
    dropped = replace(problem(64), dropout=0.5)
    assert choose.backward_elsewhere(replace(dropped, bias=bias, mask=mask)) and not choose.backward_elsewhere(dropped)


@pytest.mark.parametrize("bias, mask", [*product(BIAS_TYPES[1:], (False, True))])
def test_dbias_on_hopper(bias, mask):
    """Clusters of two by two blocks of 128 queries and keys, or of as many as there are tiles."""
    for d, dv, packed in product((1, 64, 65, 128), (40, 128), (False, True)):
        one = replace(problem(d, dv), batch=2, seqlen_q=129, seqlen_k=129, bias=bias, mask=mask)
        before = Variant("", "", "", choose.PrepareSpec(d, dv, packed, False, 16))
        for lengths, cluster in (((129, 129), (2, 2)), ((128, 600), (1, 2)), ((600, 1), (2, 1)), ((1, 128), (1, 1))):
            given = replace(one, seqlen_q=lengths[0], seqlen_k=lengths[1])
            spec = choose.hopper_bias_gradient(given, before, 64).spec
            assert (spec.cluster_q, spec.cluster_k) == cluster and spec.cluster == math.prod(cluster)
            assert (spec.block_q, spec.block_k) == (128 * cluster[0], 128 * cluster[1])
            assert (spec.warps_q, spec.warps) == (8 * cluster[0], 8 * spec.cluster), "16 rows and 128 columns each"
            assert (spec.packed, spec.box_k, spec.mask, BIAS_TYPES[spec.bias]) == (packed, 64, mask, bias)
            assert fits(spec, HOPPER_LIMIT) and spec.threads == 384 and 2 <= spec.slots <= 4 and spec.logit_slots > 0
            assert {spec.head_dim, spec.head_dim_v} <= {64, 128} and spec.head_dim >= d and spec.head_dim_v >= dv
            logits = 128 * 128 * ((4 if bias == "float32" else 2) + mask)
            slot = 2 * 128 * 2 * max(spec.head_dim, spec.head_dim_v)
            assert spec.shared_bytes == 1024 + spec.slots * slot + spec.logit_slots * logits
    unknown = {"head_dim_v": 129}, {"dropout": 0.5}, {"blocks": True}, {"mods": object()}
    assert not any(choose.hopper_bias_gradient(replace(one, **more), before, 64) for more in unknown)


def test_dbias_beside_dq():
    """An element for each score, and what dS is besides."""
    for d, options, stored in (
        (64, {}, True),
        (192, {}, True),
        (128, {"mask": True}, True),
        (192, {"mask": True}, False),
        (64, {"softcap": 2.0}, False),
    ):
        one = replace(problem(d), batch=2, heads_q=4, seqlen_q=5, seqlen_k=7, bias="float16", **options)
        assert choose.stores_dbias(one, (2, 4, 5, 7)) == stored
        assert not any(choose.stores_dbias(one, shape) for shape in ((1, 4, 5, 7), (2, 1, 5, 7), (2, 4, 1, 7)))
        keys, queries = (variant.spec for variant in choose.hopper_split_backward(one, 16, True))
        assert queries.dbias and not hasattr(keys, "dbias")
    assert not choose.hopper_split_backward(one, 16)[1].spec.dbias


def test_shared_bytes_of_bias_and_mask():
    """In panels of 128 bytes a row: of a mask, 128 columns, even if only 64 are there. Or in words of it, a bit for
    each score of the tiles of queries that are on their way; the forward has them in registers.
    """
    plain = replace(problem(128), seqlen_k=513)
    expected = {("bfloat16", False): 256, ("float32", False): 512, (None, True): 128, ("float16", True): 384}
    for (bias, mask), row in expected.items():
        one = replace(plain, bias=bias, mask=mask)
        spec = choose.hopper_forward(one, 16, False).spec
        assert (spec.block_k, spec.groups, spec.q_slots, spec.slots) == (128, 2, 2 if bias else 4, 4)
        of_bias = 2 * spec.logit_slots * 64 * (row - 128 * mask)
        assert spec.shared_bytes == 1024 + 2 * 128 * (spec.q_slots * 64 + 4 * 128) + of_bias
        keys, queries = (variant.spec for variant in choose.hopper_split_backward(one, 16))
        before = [variant.spec.shared_bytes for variant in choose.hopper_split_backward(plain, 16)]
        row = {256: 128, 512: 256, 128: 128, 384: 256}[row]
        assert keys.shared_bytes - before[0] == keys.logit_slots * 64 * row
        assert queries.shared_bytes - before[1] == queries.logit_slots * 128 * row
        if not bias:
            spec, before = (choose.hopper_backward(p, 16, False).spec for p in (one, plain))
            assert spec.shared_bytes - before.shared_bytes == 2 * 128 * 64 // 8 and spec.logit_slots == 0
        elif not mask:
            spec, before = (choose.hopper_backward(p, 16, False).spec for p in (one, plain))
            assert spec.shared_bytes - before.shared_bytes == 2 * 64 * 2 * row and spec.logit_slots == 2


def test_shared_bytes_of_the_split_backward():
    keys, queries = (variant.spec for variant in choose.hopper_split_backward(problem(256, 192), 16))
    assert (keys.kept, keys.slots, keys.slots_dout, keys.block_k) == (2, 3, 2, 64)
    k, v = 64 * (256 - 128), 64 * (192 - 128)  # the rest is in registers
    handed_over, lse_and_delta = 2 * 2 * 64 * 64, 4 * 64 * (3 + 2)
    assert keys.shared_bytes == 1024 + 2 * (k + v + 3 * 64 * 256 + 2 * 64 * 192) + handed_over + lse_and_delta
    assert (queries.slots, queries.slots_v, queries.block_q) == (2, 1, 128)
    assert queries.shared_bytes == 1024 + 2 * (128 * (256 + 192) + 2 * 64 * 256 + 64 * 192)


def test_kernel_before_the_split_backward():
    keys, _ = choose.hopper_split_backward(problem(200, 160), 2)
    before = choose.before_backward(keys, True, 8)
    assert before.template == "prepare_backward" and before.dtype == keys.dtype
    spec = before.spec
    assert (spec.head_dim, spec.head_dim_v, spec.float32_out, spec.access) == (256, 192, True, 8)


@pytest.mark.parametrize("access, stored", [(16, 16), (8, 4), (4, 4), (2, 2)])
@pytest.mark.parametrize("float32_out", [False, True])
def test_options_of_hopper(access, stored, float32_out):
    spec = hopper(64, access=access, float32_out=float32_out).spec
    assert (spec.access, spec.float32_out) == (4 if float32_out else stored, float32_out)


@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_blocks_that_are_to_share_a_multiprocessor_do(pass_):
    for d, option, (capability, limit) in product(range(1, 257), (False, True), choose.SHARED_LIMIT.items()):
        spec = chosen(pass_, limit, d, option=option)
        reserved = RESERVED if capability >= 80 else 0
        if spec:
            assert spec.blocks_per_sm * (spec.shared_bytes + reserved) <= limit + reserved, (d, capability)


@pytest.mark.parametrize(
    "pass_, limit, largest",
    [("forward", 49152, 192), ("forward", 65536, 256), ("backward", 65536, 224)],
)
def test_which_head_dims_a_small_gpu_takes(pass_, limit, largest):
    taken = [d for d in range(1, 257) if chosen(pass_, limit, d)]
    assert taken == list(range(1, largest + 1))


@pytest.mark.parametrize("limit", [limit for limit in LIMITS if limit > 65536])
def test_every_head_dim_is_taken_from_99_kib_on(limit):
    for pass_, d, option in product(("forward", "backward"), range(1, 257), (False, True)):
        assert chosen(pass_, limit, d, access=2, option=option), (pass_, d, option)


def test_shared_bytes():
    """The sizes of the arrays in the kernels, spelled out once."""
    spec = choose.forward(problem(96, 64), 16, False, 232448).spec
    assert (spec.block_q, spec.block_k, spec.stages) == (128, 64, 2)
    assert spec.shared_bytes == 2 * (128 * 96 + 2 * 64 * (96 + 64))
    spec = choose.forward(problem(256, 40), 16, False, 232448).spec  # p and a number for each row
    assert (spec.block_q, spec.block_k, spec.stages, spec.head_dim_v, spec.out_warps_q) == (64, 64, 1, 64, 1)
    assert spec.shared_bytes == 2 * (64 * 256 + 64 * (256 + 64)) + 2 * 64 * 64 + 4 * 64
    spec = hopper(96, 40).spec  # rows of 64 columns: one panel after the other, from an address that 1024 divides
    assert (spec.block_q, spec.block_k, spec.q_slots, spec.slots, spec.head_dim_v) == (192, 96, 6, 4, 64)
    assert spec.shared_bytes == 1024 + 2 * 128 * (6 * 64 + 4 * 96)
    spec = hopper(64, mask="banded, short").spec
    assert (spec.teams, spec.groups, spec.block_k, spec.q_slots, spec.slots) == (2, 2, 64, 4, 4)
    assert spec.shared_bytes == 1024 + 2 * 2 * 64 * (4 * 64 + 4 * 64)
    spec = choose.hopper_backward(problem(100, 70), 16, False).spec
    assert (spec.block_q, spec.block_k, spec.stages, spec.key_slots) == (64, 128, 2, 1)
    assert spec.shared_bytes == 1024 + 2 * (128 + 2 * 64) * (128 + 128) + 2 * 2 * 128 * 64 + 2 * 8 * 64
    spec = choose.hopper_backward(problem(64), 16, False).spec
    assert (spec.block_q, spec.block_k, spec.stages, spec.key_slots) == (128, 128, 2, 2)
    assert spec.shared_bytes == 1024 + 2 * (2 * 128 + 2 * 128) * (64 + 64) + 2 * 2 * 128 * 128 + 2 * 8 * 128
    spec = choose.backward(problem(128, 64), 16, False, 232448).spec
    assert (spec.block_q, spec.block_k, spec.stages, spec.p_in_registers) == (64, 128, 2, False)
    keys_and_queries = 2 * (128 * 192 + 2 * 64 * 192)
    p_and_ds, lse_and_delta = 2 * 2 * 64 * 128, 2 * 2 * 64 * 4
    assert spec.shared_bytes == keys_and_queries + p_and_ds + lse_and_delta


@pytest.mark.parametrize("softcap, bounded", [(None, False), (1.0, True), (31.0, True), (31.1, False)])
def test_what_softcap_bounds(softcap, bounded):
    """The weights of one row need no maximum where bfloat16 holds them whatever the scores, and nothing else counts."""
    problem_ = replace(problem(64), softcap=softcap)
    for other in ({}, {"right": 0}, {"dropout": 0.5}, {"sink": True}):
        assert choose.hopper_forward(replace(problem_, **other), 16, False).spec.bounded == bounded
    for other in ({"alibi": True}, {"bias": "bfloat16"}, {"mask": True}, {"blocks": True}, {"dtype": "float16"}):
        assert not choose.hopper_forward(replace(problem_, **other), 16, False).spec.bounded


STEADY = replace(problem(64), batch=4, seqlen_q=4096, seqlen_k=4096, heads_q=8, heads_k=8)  # 2^29 scores


@pytest.mark.parametrize(
    "expected, change",
    [
        (True, {}),
        (True, {"head_dim": 40, "head_dim_v": 8}),
        (True, {"sink": True}),
        (True, {"heads_k": 1}),
        (True, {"right": 0}),
        (True, {"batch": 2}),  # 2^28 scores
        (False, {"batch": 1}),
        (False, {"batch": 2, "right": 0}),
        (True, {"seqlen_k": 2048, "batch": 4}),
        (False, {"seqlen_k": 2047, "batch": 100}),
        (True, {"left": 2047, "right": 0, "batch": 100}),
        (False, {"left": 2046, "right": 0, "batch": 100}),
        (True, {"left": None, "right": 5, "batch": 100}),
        (True, {"head_dim": 128, "head_dim_v": 128}),
        (False, {"head_dim": 129}),
        (False, {"head_dim_v": 129}),
        (True, {"dtype": "float16"}),
        (True, {"scale": 0.01}),
        (False, {"scale": 0.0}),
        (False, {"scale": 1e-35}),
        (True, {"softcap": 50.0, "head_dim": 128, "head_dim_v": 128}),
        (False, {"softcap": 50.0}),
        (False, {"softcap": 5.0, "head_dim": 128, "head_dim_v": 128}),  # bounded
        (False, {"softcap": 50.0, "head_dim": 128, "head_dim_v": 128, "dtype": "float16"}),
        (False, {"alibi": True, "dtype": "float16"}),
        (False, {"mods": Mods(score=Mod("score_mod", "score", ())), "dtype": "float16"}),
        (True, {"dropout": 0.5, "dtype": "float16"}),
        (True, {"alibi": True}),
        (True, {"dropout": 0.5}),
        (False, {"blocks": True, "alibi": True}),
        (False, {"blocks": True, "dropout": 0.5}),
        (False, {"bias": "bfloat16"}),
        (False, {"mask": True}),
        (True, {"blocks": True}),
        (True, {"blocks": True, "mask": True}),
        (False, {"blocks": True, "bias": "bfloat16"}),
        (False, {"varlen": "lower_right"}),
        (False, {"varlen": "lower_right", "seqlen_q": 65536, "seqlen_k": 65536, "batch": 65}),
        (True, {"varlen": "lower_right", "seqlen_q": 65536, "seqlen_k": 65536, "batch": 64}),
        (True, {"mods": Mods(score=Mod("score_mod", "score", ()))}),
        (False, {"mods": Mods(mask=Mod("mask_mod", "true", ()))}),
    ],
)
def test_when_sums_are_followed(expected, change):
    assert choose.steady(replace(STEADY, **change)) is expected


def test_the_kernel_behind_one_that_follows_sums():
    """Tiled alike: both take the same struct."""
    main = choose.hopper_forward(STEADY, 16, False)
    first, behind = choose.steadily(main)
    assert (first.spec.steady, first.spec.only_if) == (True, False)
    assert (behind.spec.steady, behind.spec.only_if) == (False, True)
    assert not (main.spec.steady or main.spec.only_if)
    for one in (first, behind):
        assert replace(one, spec=main.spec) == main
        assert replace(one.spec, steady=False, only_if=False) == main.spec
    assert {"steady=true", "only_if=true"} <= set(re.findall(r"\.(\w+=true)", first.spec.cpp() + behind.spec.cpp()))


def test_shared_bytes_of_dropout():
    """A bit for each weight of a tile: of two, where warps may be a tile apart or tiles are made ahead; none, where a
    warp decides for itself alone."""
    for make, tiles in (
        (lambda x: choose.forward(x, 16, False, 232448), 2),
        (lambda x: choose.backward(x, 16, False, 232448), 1),
        (lambda x: choose.hopper_forward(x, 16, False), 0),
        (lambda x: choose.hopper_backward(x, 16, False), 2),
    ):
        spec = make(replace(problem(128), dropout=0.5, seqlen_k=2048)).spec
        without = replace(spec, dropout=False)
        rows = spec.block_q // getattr(spec, "cluster", 1)
        assert spec.shared_bytes - without.shared_bytes == tiles * rows * spec.block_k // 8, spec


@pytest.mark.parametrize(
    "head_dim, padded, padded_v",
    [(1, 16, 48), (15, 16, 48), (16, 16, 48), (17, 32, 48), (80, 80, 48), (255, 256, 64), (256, 256, 64)],
)
def test_padded_head_dim(head_dim, padded, padded_v):
    spec = chosen("forward", 232448, head_dim, 40)
    assert (spec.head_dim, spec.head_dim_v) == (padded, padded_v)
    main = choose.backward(problem(head_dim, 40), 16, False, 232448)
    assert head_dim <= main.spec.head_dim < head_dim + 64 and 40 <= main.spec.head_dim_v < 40 + 64
    before, after = choose.before_backward(main, True, 8), choose.after_backward(main)
    for around in (before, after):  # they write and read the same sum
        assert (around.spec.head_dim, around.spec.head_dim_v) == (main.spec.head_dim, main.spec.head_dim_v)
        assert around.dtype == main.dtype and not around.spec.packed
    assert (before.spec.float32_out, before.spec.access, after.spec.access) == (True, 8, 16)


def test_no_array_no_shared_memory():
    main = choose.backward(problem(64), 16, False, 232448)
    for around in (choose.before_backward(main, False, 16), choose.after_backward(main)):
        assert around.spec.shared_bytes == 0 and around.spec.threads == 256


FORWARD = "cupyflash::forward<cupyflash::{}, cupyflash::ForwardSpec{{{}}}>"
BACKWARD = "cupyflash::backward<cupyflash::{}, cupyflash::BackwardSpec{{{}}}>"
HOPPER = "cupyflash::hopper_forward<cupyflash::{}, cupyflash::HopperForwardSpec{{{}}}>"


@pytest.mark.parametrize(
    "variant, header, expression",
    [
        (
            choose.forward(problem(64), 16, False, 232448),
            "sm80/forward.cuh",
            FORWARD.format(
                "bfloat16",
                ".head_dim=64, .head_dim_v=64, .block_q=128, .block_k=64, .warps=4, .out_warps_q=4, .stages=2, "
                ".blocks_per_sm=2, .q_in_registers=true, .float32_out=false, .access=16",
            ),
        ),
        (
            choose.forward(problem(100, 128, "float16"), 8, True, 101376),
            "sm80/forward.cuh",
            FORWARD.format(
                "float16",
                ".head_dim=112, .head_dim_v=128, .block_q=128, .block_k=32, .warps=4, .out_warps_q=4, .stages=1, "
                ".blocks_per_sm=2, .q_in_registers=false, .float32_out=true, .access=8",
            ),
        ),
        (
            hopper(192, 128, dtype="float16"),
            "sm90/forward.cuh",
            HOPPER.format(
                "float16",
                ".head_dim=192, .head_dim_v=128, .block_k=64, .cluster=1, .teams=1, .groups=2, .q_slots=4, .slots=5, "
                ".packed=false, .float32_out=false, .access=16",
            ),
        ),
        (
            choose.hopper_backward(problem(40, 72), 8, True),
            "sm90/backward.cuh",
            "cupyflash::hopper_backward<cupyflash::bfloat16, cupyflash::HopperBackwardSpec{.head_dim=128, "
            ".head_dim_v=96, .block_q=64, .groups=2, .stages=2, .key_slots=1, .deterministic=true, .access=4}>",
        ),
        (
            choose.hopper_split_backward(problem(192, 128), 16)[0],
            "sm90/backward_keys.cuh",
            "cupyflash::hopper_keys<cupyflash::bfloat16, cupyflash::HopperKeysSpec{.head_dim=192, .head_dim_v=128, "
            ".kept=3, .slots=3, .slots_dout=3, .access=16}>",
        ),
        (
            choose.hopper_split_backward(problem(256, 40), 8)[1],
            "sm90/backward_queries.cuh",
            "cupyflash::hopper_queries<cupyflash::bfloat16, cupyflash::HopperQueriesSpec{.head_dim=256, "
            ".head_dim_v=64, .slots=2, .slots_v=1, .access=4}>",
        ),
        (
            choose.backward(problem(128), 16, True, 232448),
            "sm80/backward.cuh",
            BACKWARD.format(
                "bfloat16",
                ".head_dim=128, .head_dim_v=128, .block_q=64, .block_k=128, .warps=8, .score_warps_k=4, "
                ".grad_warps_k=4, .dq_warps_q=2, .stages=2, .blocks_per_sm=1, .deterministic=true, .access=16",
            ),
        ),
        (
            choose.backward(problem(256, 40, "float16"), 2, False, 101376),
            "sm80/backward.cuh",
            BACKWARD.format(
                "float16",
                ".head_dim=256, .head_dim_v=64, .block_q=32, .block_k=64, .warps=8, .score_warps_k=4, "
                ".grad_warps_k=2, .dq_warps_q=2, .stages=2, .blocks_per_sm=1, .deterministic=false, .access=2",
            ),
        ),
        (
            choose.sink_gradient(choose.before_backward(choose.hopper_backward(problem(64), 4, False), True, 2)),
            "any/sink.cuh",
            "cupyflash::sink_gradient<cupyflash::bfloat16, cupyflash::SinkSpec{.warps=32, .packed=true}>",
        ),
        (
            choose.hopper_bias_gradient(
                replace(problem(64, 100), seqlen_q=200, seqlen_k=100, bias="bfloat16"),
                Variant("", "", "", choose.PrepareSpec(64, 100, True, False, 16)),
                128,
            ),
            "sm90/bias_gradient.cuh",
            "cupyflash::hopper_bias_gradient<cupyflash::bfloat16, cupyflash::HopperBiasGradientSpec{.head_dim=64, "
            ".head_dim_v=128, .cluster_q=2, .cluster_k=1, .slots=3, .box_k=128, .packed=true, .bias=2, "
            ".logit_slots=1}>",
        ),
        (
            choose.bias_sum(Variant("", "", "float16", SimpleNamespace(bias=2))),
            "sm80/bias_gradient.cuh",
            "cupyflash::add_bias_gradients<cupyflash::float16, cupyflash::BiasSumSpec{.warps=8, .bias=2}>",
        ),
        (
            choose.before_backward(choose.hopper_backward(problem(64), 4, False), True, 2),
            "any/around_backward.cuh",
            "cupyflash::prepare_backward<cupyflash::bfloat16, cupyflash::PrepareSpec"
            "{.head_dim=64, .head_dim_v=64, .packed=true, .float32_out=true, .access=2}>",
        ),
    ],
    ids=lambda value: value.template if hasattr(value, "template") else "",
)
def test_expression(variant, header, expression):
    assert variant.header == header
    assert variant.expression == expression


NVRTC = (12, 9), (13, 0), (14, 1)


def test_path_of_a_gpu(monkeypatch):
    monkeypatch.delenv("CUPYFLASH_PATH", raising=False)
    for nvrtc in NVRTC:
        assert choose.path(90, nvrtc) == "sm90"
    others = [capability for capability in (*choose.SHARED_LIMIT, 88, 101, 110, 121) if capability != 90]
    for capability, nvrtc in product(others, NVRTC):
        assert choose.path(capability, nvrtc) == "sm80"
    for nvrtc in ((12, 0), (12, 8)):
        assert choose.path(90, nvrtc) == "sm80"


def test_path_from_the_environment(monkeypatch):
    for name in choose.PATHS:
        monkeypatch.setenv("CUPYFLASH_PATH", name)
        assert choose.path(90, (12, 9)) == name
    monkeypatch.setenv("CUPYFLASH_PATH", "sm80")
    for capability, nvrtc in ((80, (13, 0)), (90, (12, 0)), (100, (13, 0))):
        assert choose.path(capability, nvrtc) == "sm80"


@pytest.mark.parametrize(
    "capability, nvrtc, found",
    [(80, (13, 0), "8.0 and 13.0"), (100, (13, 2), "10.0 and 13.2"), (90, (12, 8), "9.0 and 12.8")],
)
def test_path_that_the_gpu_cannot_take(monkeypatch, capability, nvrtc, found):
    monkeypatch.setenv("CUPYFLASH_PATH", "sm90")
    with pytest.raises(ValueError) as error:
        choose.path(capability, nvrtc)
    needed = "CUPYFLASH_PATH=sm90 needs a GPU of compute capability 9.0 and NVRTC 12.9 or later"
    assert str(error.value) == f"{needed}; here are {found}"


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("name", ["", "sm70", "SM80", "sm80 ", "sm90a"])
def test_path_that_does_not_exist(monkeypatch, name, capability):
    monkeypatch.setenv("CUPYFLASH_PATH", name)
    with pytest.raises(ValueError) as error:
        choose.path(capability, (13, 0))
    assert str(error.value) == f"CUPYFLASH_PATH={name!r} names no kernel path; there are sm80, sm90"


@pytest.mark.parametrize("capability", [75, 80, 86, 89, 90, 100, 120, 130])
def test_variants(capability):
    limit = choose.SHARED_LIMIT.get(capability, 65536)
    variants = list(choose.variants(capability))
    wide = [variant for variant in variants if variant.dtype in precise.ITEM]
    of_halves = [variant for variant in wide if not variant.template.startswith("precise")]
    assert bool(of_halves) == (capability == 90) and {variant.dtype for variant in of_halves} <= {"float32"}
    assert {variant.dtype for variant in wide} == ({"float32", "float64"} if capability >= 80 else set())
    variants = [variant for variant in variants if variant not in wide]
    assert {variant.dtype for variant in variants} == {"float16", "bfloat16"} - (
        {"bfloat16"} if capability < 80 else set()
    )
    templates = {"forward", "backward", "prepare_backward", "finish_backward", "sink_gradient"}
    on_hopper = {"hopper_forward", "hopper_backward", "hopper_keys", "hopper_queries"}
    assert {variant.template for variant in variants} == templates | (on_hopper if capability == 90 else set())
    assert len(set(variants)) == len(variants)
    for variant in variants:
        if variant.template in {"forward", "backward"} | on_hopper:
            assert is_valid(variant.spec) and fits(variant.spec, limit)
    for table, pass_ in ((choose.FORWARD, "forward"), (choose.BACKWARD, "backward")):
        dims = {variant.spec.head_dim for variant in variants if variant.template == pass_}
        assert dims == {d for d in table if chosen(pass_, limit, d)}
    if capability == 90:
        specs = [variant.spec for variant in variants if variant.template == "hopper_forward"]
        for limit, tilings in choose.HOPPER_FORWARD.items():
            own = [s for s in specs if min(n for n in choose.HOPPER_FORWARD if n >= s.head_dim) == limit]
            assert {hopper_tiling(s) for s in own} == set(tilings)
            assert {s.float32_out for s in own} == {False, True}


# --- access: the widest load that every row is aligned to


def array(shape=(2, 5, 3, 64), pointer=0, steps=None, itemsize=2):
    """Something with the address and strides of a CuPy array."""
    steps = steps or (shape[1] * shape[2] * shape[3], shape[2] * shape[3], shape[3], 1)
    strides = tuple(step * itemsize for step in steps)
    return SimpleNamespace(data=SimpleNamespace(ptr=pointer), shape=shape, strides=strides, itemsize=itemsize)


@pytest.mark.parametrize(
    "expected, head_dim, arrays",
    [
        (16, 64, [array()]),
        (16, 64, [array(pointer=512), array(pointer=16)]),
        (8, 64, [array(pointer=512), array(pointer=8)]),
        (4, 64, [array(pointer=4), array()]),
        (2, 64, [array(), array(pointer=2), array()]),
        (16, 40, [array((2, 5, 3, 40))]),
        (8, 36, [array((2, 5, 3, 36))]),
        (4, 38, [array((2, 5, 3, 38))]),
        (2, 37, [array((2, 5, 3, 37))]),
        (2, 37, [array((2, 5, 3, 37), steps=(1920, 384, 64, 1))]),  # aligned rows, but not whole in wider loads
        (2, 64, [array(steps=(1000, 200, 65, 1))]),
        (4, 64, [array(steps=(1000, 202, 64, 1))]),
        (8, 64, [array(steps=(1004, 200, 64, 1))]),
        (16, 64, [array((1, 5, 3, 64), steps=(1, 200, 64, 1))]),  # the stride of an axis with one entry means nothing
        (16, 64, [array((1, 1, 1, 64), steps=(1, 1, 1, 1))]),
        (16, 64, [array(steps=(-1000, -200, -64, 1))]),
        (8, 64, [array(steps=(0, -204, 64, 1))]),
        (8, 64, [array(pointer=8, itemsize=4)]),
        (16, 64, [array(steps=(1000, 196, 64, 1), itemsize=4)]),
    ],
)
def test_access(expected, head_dim, arrays):
    launch = pytest.importorskip("cupyflash.launch", reason="needs CuPy")
    assert launch._access(problem(head_dim), tuple(arrays)) == expected


def test_access_of_the_value_head_dim():
    launch = pytest.importorskip("cupyflash.launch", reason="needs CuPy")
    assert launch._access(problem(64, 37), (array(),)) == 2
