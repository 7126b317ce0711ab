"""The parameter structs of the kernels: NumPy twins of those in ``kernels/core/params.cuh``, ``any/segments.cuh``,
``any/mask_words.cuh`` and, for Hopper's, ``sm90/forward.cuh`` and ``sm90/backward_params.cuh``. Strides count elements.
"""

from __future__ import annotations

import math

import numpy as np

from . import tensor_map
from .dropout import ROUNDS, WORD, round_keys
from .mods import Mods
from .problem import Problem

ARRAY = np.dtype([("data", "u8"), ("batch", "i8"), ("row", "i8"), ("head", "i8")], align=True)
ROW_ARRAY = np.dtype([("data", "u8"), ("batch", "i8"), ("head", "i8"), ("row", "i8")], align=True)
_COUNTS = "batch heads_q group seqlen_q seqlen_k head_dim head_dim_v low high section"
SIZES = np.dtype([*((n, "i4") for n in _COUNTS.split()), ("scale", "f4"), ("scale_log2", "f4")], align=True)
_SCORE = [("slopes", "u8"), ("batch", "i8"), ("head", "i8")]
SCORE = np.dtype(
    [
        *_SCORE,
        *((n, "f4") for n in ("inside", "cap", "near")),
        ("series", "f4", 3),
        ("middle", "f4"),
        ("diagonal", "i4"),
    ],
    align=True,
)
SINK = np.dtype([("data", "u8"), ("head", "i8")], align=True)
LOGIT_ARRAY = np.dtype([("data", "u8"), *((n, "i8") for n in ("batch", "head", "row", "col"))], align=True)
BIAS_GRADIENT = np.dtype(
    [("data", "u8"), *((n, "i4") for n in ("batches", "heads", "rows", "cols", "chunks", "run", "parts"))], align=True
)
BLOCKS = np.dtype([("data", "u8"), *((n, "i8") for n in ("batch", "head", "words"))], align=True)
MASK_WORDS = np.dtype([("data", "u8"), *((n, "i8") for n in ("batch", "head", "rows", "cols"))], align=True)
DROPOUT = np.dtype([("keys", "u8", ROUNDS), ("bits", "u4", 32), ("scale", "f4")], align=True)
TILE_KINDS = ("queries", "keys", "blocks", "statistics")  # TileKind
TILE_LIST = np.dtype([(n, "i4") for n in ("at", "rows", "paired", "bound")])
TILE_LISTS = np.dtype((TILE_LIST, len(TILE_KINDS)))
SEGMENT_WORDS, TABLE_HEAD = 8, 8  # of 32 bits: a Segment, and Segments::kHead
SEGMENTS = np.dtype([("table", "u8"), ("lower_right", "i4"), ("lists", TILE_LISTS)], align=True)
FORWARD_PARAMS = np.dtype(
    [*((n, ARRAY) for n in ("q", "k", "v", "out")), ("lse", ROW_ARRAY)]
    + [("sizes", SIZES), ("score", SCORE), ("sink", SINK), ("dropout", DROPOUT)]
    + [("bias", LOGIT_ARRAY), ("mask", LOGIT_ARRAY), ("blocks", BLOCKS), ("segments", SEGMENTS)],
    align=True,
)
BACKWARD_PARAMS = np.dtype(
    [*((n, ARRAY) for n in ("q", "k", "v", "dout", "out", "dq", "dk", "dv"))]
    + [*((n, ROW_ARRAY) for n in ("lse", "dlse", "delta"))]
    + [
        ("dq_sum", "u8"),
        ("turn", "u8"),
        ("sizes", SIZES),
        ("score", SCORE),
        ("sink", SINK),
        ("dsink", "u8"),
        ("dropout", DROPOUT),
        ("bias", LOGIT_ARRAY),
        ("mask", LOGIT_ARRAY),
        ("dbias", BIAS_GRADIENT),
        ("dbias_parts", "u8"),
        ("blocks", BLOCKS),
        ("key_blocks", BLOCKS),
        ("segments", SEGMENTS),
    ],
    align=True,
)
# Those of float32 and float64, in kernels/precise/params.cuh, and of float32 that is split.
OPERANDS = ("q", "k", "v", "dout")  # Operand
SCALES = np.dtype(
    [("largest", "u4", len(OPERANDS)), ("of_column", "u4", (len(OPERANDS), 128)), ("wide", "u4")], align=True
)
HALVES = np.dtype([*((n, "u8") for n in OPERANDS), ("scales", "u8")], align=True)


def _extended(dtype: np.dtype, *fields: tuple) -> np.dtype:
    return np.dtype([*((n, dtype[n]) for n in dtype.names), *fields], align=True)


PRECISE_FORWARD_PARAMS = _extended(FORWARD_PARAMS, ("exact_scale", "f8"), ("only_if", "u8"))
PRECISE_BACKWARD_PARAMS = _extended(BACKWARD_PARAMS, ("exact_scale", "f8"), ("only_if", "u8"))
HALVES_FORWARD_PARAMS = _extended(PRECISE_FORWARD_PARAMS, ("halves", HALVES))
HALVES_BACKWARD_PARAMS = _extended(PRECISE_BACKWARD_PARAMS, ("halves", HALVES))

ORDER = np.dtype([(n, "i4") for n in ("heads", "tiles", "runs", "all_runs", "paired")])
MAP = np.dtype(("u8", tensor_map.WORDS))
MAP_ALIGNMENT = 64


def _with_maps(*fields: tuple[str, np.dtype]) -> np.dtype:
    """The layout that C++ gives to a struct with tensor maps, whose alignment NumPy does not know."""
    offsets, end = [], 0
    for _, dtype in fields:
        dtype = np.dtype(dtype)
        alignment = MAP_ALIGNMENT if dtype == MAP or "map" in (dtype.names or ()) else dtype.alignment
        offsets.append(-(-end // alignment) * alignment)
        end = offsets[-1] + dtype.itemsize
    names, formats = zip(*fields)
    itemsize = -(-end // MAP_ALIGNMENT) * MAP_ALIGNMENT
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": itemsize})


LOGIT_MAP = _with_maps(("map", MAP), *((n, "i4") for n in ("batch", "head", "row")))
HOPPER_FORWARD_PARAMS = _with_maps(
    *((n, MAP) for n in ("q", "k", "v", "out_map")),
    *(("out", ARRAY), ("lse", ROW_ARRAY), ("sizes", SIZES), ("order", ORDER), ("queries", "i4")),
    *(("score", SCORE), ("sink", SINK), ("dropout", DROPOUT), ("blocks", BLOCKS)),
    *(("bias", LOGIT_MAP), ("segments", SEGMENTS), ("taken", "u8"), ("only_if", "u8"), ("mask", MASK_WORDS)),
)
# The struct of the kernels around the backward, which take as much of it as they know, then maps and orders.
HOPPER_BACKWARD_PARAMS = _with_maps(
    *((n, BACKWARD_PARAMS[n]) for n in BACKWARD_PARAMS.names),
    *((n, MAP) for n in ("q_map", "k_map", "v_map", "dout_map")),
    *(("keys", ORDER), ("queries", ORDER), ("rotated", "i4")),
    *(("bias_map", LOGIT_MAP), ("mask_map", LOGIT_MAP), ("words", MASK_WORDS)),
)
# Those of the kernels that multiply halves, in sm90/precise_params.cuh.
HOPPER_PRECISE_FORWARD_PARAMS = _with_maps(
    *((n, HALVES_FORWARD_PARAMS[n]) for n in HALVES_FORWARD_PARAMS.names),
    *((n, MAP) for n in ("q_map", "k_map", "v_map")),
    ("order", ORDER),
)
HOPPER_PRECISE_BACKWARD_PARAMS = _with_maps(
    *((n, HALVES_BACKWARD_PARAMS[n]) for n in HALVES_BACKWARD_PARAMS.names),
    *((n, MAP) for n in ("q_map", "k_map", "v_map", "dout_map")),
)
_LENGTHS = [("starts", "u8"), ("used", "u8"), *((n, "i4") for n in ("wide_starts", "wide_used", "total"))]
LENGTHS = np.dtype(_LENGTHS, align=True)
CLEARED = np.dtype([("array", ARRAY), *((n, "i4") for n in ("heads", "units", "item"))], align=True)
SEGMENTS_PARAMS = np.dtype(
    [("lengths_q", LENGTHS), ("lengths_k", LENGTHS), ("batch", "i4"), ("longest_keys", "i4"), ("segments", SEGMENTS)]
    + [*((n, CLEARED) for n in ("of_q", "of_k", "of_v")), ("lse", ROW_ARRAY), ("heads", "i4")],
    align=True,
)
_COUNTS = "heads group rows row_step cols row_parts col_parts wide"
MASK_WORDS_PARAMS = np.dtype(
    [("mask", LOGIT_ARRAY), ("words", MASK_WORDS), ("blocks", BLOCKS), *((n, "i4") for n in _COUNTS.split())],
    align=True,
)
# "dropout": its keys; "mods": as many as there are values that functions of the user captured.
FORWARD_POINTERS = ("q", "k", "v", "out", "lse", "score", "sink", "dropout", "blocks", "bias", "mask", "mods")
BACKWARD_POINTERS = (*(n for n in BACKWARD_PARAMS.names if n not in ("sizes", "segments")), "mods")
MAPS = ("q_map", "k_map", "v_map", "dout_map")
# Of `Plan.halves`: the flag, the halves, their scales, and the halves again for their maps.
HALVES_FORWARD_POINTERS = ("only_if", *(f"halves.{n}" for n in (*OPERANDS[:3], "scales")), *MAPS[:3])
HALVES_BACKWARD_POINTERS = ("only_if", *(f"halves.{n}" for n in (*OPERANDS, "scales")), *MAPS)
HOPPER_POINTERS = (*BACKWARD_POINTERS, *MAPS, "bias_map", "mask_map", "words")
MASK_WORDS_POINTERS = ("mask", "words", "blocks")
SEGMENTS_POINTERS = tuple(f"lengths_{side}.{name}" for side in "qk" for name in ("starts", "used"))
SEGMENTS_POINTERS += ("segments", "of_q", "of_k", "of_v", "lse")
MOST = (1 << 31) - 1
UNBOUNDED = 1 << 30  # beyond every key: seqlen_q + seqlen_k < 2^30
TINY = 2.0**-126  # the least scale: one that float32 takes for 0 would make NaN of the -inf of a hidden score
LARGEST = float(np.finfo(np.float32).max)
STATISTIC_TILE = 128  # kStatisticTile


def zeros(dtype: np.dtype, mods: Mods | None, captured) -> np.ndarray:
    """A struct, followed by the strides of what is `captured`, whose words are written for each call."""
    if mods is None:
        return np.zeros(1, dtype)
    params = np.zeros(1, modified(dtype, mods.words))
    halves = params["mods"].view(np.int32)[0]
    for slot, x in zip(mods.slots, captured, strict=True):
        if not isinstance(x, int):
            strides = [stride // x.itemsize if n > 1 else 0 for stride, n in zip(x.strides, x.shape)]
            halves[2 * slot + 2 : 2 * slot + 2 + len(strides)] = strides
    return params


def modified(dtype: np.dtype, count: int) -> np.dtype:
    """`dtype` with the field ``mods`` of so many words behind it: Modified of ``kernels/any/mods.cuh``."""
    start = -(-dtype.itemsize // 64) * 64
    formats = [*(dtype[name] for name in dtype.names), np.dtype(("u8", count))]
    offsets = [*(dtype.fields[name][1] for name in dtype.names), start]
    names = [*dtype.names, "mods"]
    return np.dtype(
        {"names": names, "formats": formats, "offsets": offsets, "itemsize": start + -(-8 * count // 64) * 64}
    )


def steps(x) -> tuple[int, ...]:
    """Strides in elements of the first three axes; that of an axis with one entry means nothing and becomes 0."""
    return tuple(stride // x.itemsize if n > 1 else 0 for stride, n in zip(x.strides[:3], x.shape))


def fill(params: np.ndarray, name: str, x) -> None:
    """Write the strides of the array ``x``, unless it is None, into the field ``name``."""
    if x is not None:
        record = params[0][name]
        for field, step in zip(record.dtype.names[1:], steps(x)):
            record[field] = step


def fill_logits(params: np.ndarray, name: str, x) -> None:
    """Write the strides of ``x``, unless it is None, that has been broadcast to the shape of the logits."""
    if x is not None:
        params[0][name] = (0, *(stride // x.itemsize if n > 1 else 0 for stride, n in zip(x.strides, x.shape)))


def fill_blocks(params: np.ndarray, name: str, bitmaps) -> None:
    """Write the field ``name`` for one of the arrays of a `BlockMask`, unless it is None."""
    if bitmaps is not None:
        batch, heads, rows, _, words = bitmaps.shape
        params[0][name] = (0, heads * rows if batch > 1 else 0, rows if heads > 1 else 0, words)


def fill_score(params: np.ndarray, problem: Problem, slopes) -> None:
    """Write the field ``score``, but for the pointer."""
    fill(params, "score", slopes)
    params["score"]["diagonal"] = problem.diagonal
    if problem.softcap is not None:
        params["score"]["inside"] = min(max(problem.scale / problem.softcap, -LARGEST), LARGEST)
        params["score"]["cap"] = problem.softcap * math.log2(math.e)
        params["score"]["near"], params["score"]["series"] = _series(problem.scale, problem.softcap)
        params["score"]["middle"] = params["score"]["cap"] / 2


# tanh(u) / u in u^2, for u < NEAR with an error below 3e-8, half of float32's last digit. With one more coefficient
# NEAR could be 1/4; it would be an instruction for each score, while scores of a cap of 30 are rarely beyond 4.8.
NEAR, TANH = 0.16, (0.999999972, -0.333313741, 0.131285196)


def _series(scale: float, softcap: float) -> tuple[float, tuple[float, ...]]:
    """What the kernels compute softcap with while |score| < near; 0 where float32 cannot hold the coefficients."""
    inside = scale / softcap
    try:
        near = NEAR / abs(inside)
        series = tuple(scale * math.log2(math.e) * c * inside ** (2 * n) for n, c in enumerate(TANH))
    except (ZeroDivisionError, OverflowError):
        return 0.0, (0.0,) * len(TANH)
    held = all(TINY <= abs(x) <= LARGEST for x in (near * near, *series))
    return (near, series) if held else (0.0, (0.0,) * len(TANH))


def fill_dropout(params: np.ndarray, problem: Problem) -> None:
    """Write the field ``dropout``, but for the keys."""
    threshold = int(problem.dropout * WORD)
    params["dropout"]["bits"] = [2**32 - 1 if threshold >> 31 - n & 1 else 0 for n in range(32)]
    params["dropout"]["scale"] = 1 / (1 - problem.dropout)


def dropout_words(problem: Problem, seed: int) -> list[int]:
    """The keys of ``dropout``, which depend on the seed, as 64-bit words; none where nothing is dropped."""
    return [left | right << 32 for left, right in round_keys(seed)] if int(problem.dropout * WORD) else []


def sizes(problem: Problem, section: int) -> tuple:
    """The values of SIZES; ``section``: heads that run together, so that what they share stays in L2, or, of packed
    sequences, the rows that they share then.
    """
    low = -UNBOUNDED if problem.left is None else problem.diagonal - problem.left
    high = UNBOUNDED if problem.right is None else problem.diagonal + problem.right
    used = math.copysign(max(abs(problem.scale), TINY), problem.scale)
    return (
        problem.batch, problem.heads_q, problem.group, problem.seqlen_q, problem.seqlen_k, problem.head_dim,
        problem.head_dim_v, low, high, section, problem.scale, used * math.log2(math.e),
    )  # fmt: skip
