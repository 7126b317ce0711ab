"""Every check of arguments: what passes here, a backend can compute.

Messages name the argument, what it got and what is allowed. Nothing here reads or writes an element.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from numbers import Integral, Real
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
from ml_dtypes import bfloat16

from .mods import CPP_TYPES, FLOATS, HOST_TYPES, MOST_AXES, MOST_CAPTURES, MaskMod, Mods, ScoreMod
from .problem import Problem

DTYPES = {np.dtype(t): t.__name__ for t in (np.float16, bfloat16, np.float32, np.float64)}
PLAIN_DTYPES = {name: dtype for dtype, name in DTYPES.items()}  # dtypes of arrays may carry metadata
PRECISIONS = (None, "highest", "tf32")
GPU_HEAD_DIM = 256
CORNERS = ("lower_right", "upper_left")
MAX_SEQLENS = 2**30  # sums of two positions and a window side stay within 32 bits in the kernels
MAX_SCALE = 1e38  # times log2(e), it is still finite in float32
SOFTCAP = (1e-30, 1e30)  # the kernels divide by it, in float32 and where numbers below 1e-38 are 0
MASK_TILE = 128  # queries and keys that block masks have a bit for: kMaskTile
MAX_COUNTED = 2**32  # batches or heads that the counter of dropout tells apart


_MOST = 2**63 - 1
_LEAST = dict(batch=0, seqlen_q=0, seqlen_k=0, heads_q=0, heads_k=0, head_dim=1, head_dim_v=1, diagonal=-_MOST)


class Options(NamedTuple):
    """Options of a call that are valid for some shape."""

    corner: str = "lower_right"  # of the logits, where the diagonal ends or starts
    left: int | None = None
    right: int | None = None
    scale: float | None = None
    softcap: float | None = None
    dropout: float = 0.0
    precision: str | None = None
    block_mask: tuple | None = None  # BlockMask.layout
    mods: Mods | None = None  # without the types of what they captured


_NO_OPTIONS = Options()


def type_name(x) -> str:
    """Type of `x`, with the module it comes from."""
    return f"{type(x).__module__}.{type(x).__qualname__}".removeprefix("builtins.")


def shown(value) -> str:
    """`repr` of a value that a message names, unless it is too long: nobody reads a thousand digits."""
    try:
        text = repr(value)
    except ValueError:  # an integer with more digits than Python converts
        text = ""
    return text if 0 < len(text) <= 200 else f"of type {type_name(value)} and too long to print"


def options(causal, window, scale, softcap=None, dropout=0.0, precision=None, block_mask=None, mods=None) -> Options:
    """Options in one spelling: `causal=True` is the lower right corner and no key to the right."""
    none = scale is softcap is precision is block_mask is mods is None
    if causal is False and window is None and not dropout and none:
        return _NO_OPTIONS
    corner = _corner(causal)
    left, right = (None, None) if window is None else _window(window)
    if corner is not None:
        right = 0
    scale, softcap = None if scale is None else _scale(scale), None if softcap is None else _softcap(softcap)
    more = _precision(precision), block_mask, mods
    return Options(corner or "lower_right", left, right, scale, softcap, dropout, *more)


def mods(score_mod, mask_mod, backward=False) -> Mods | None:
    """Functions of the user; a forward does not depend on whose gradients are wanted."""
    if score_mod is mask_mod is None:
        return None
    for name, given, kind in (("score_mod", score_mod, ScoreMod), ("mask_mod", mask_mod, MaskMod)):
        if given is not None and not isinstance(given, kind):
            raise TypeError(
                f"{name} is {shown(given)} ({type_name(given)}); allowed: None or cupyflash.{kind.__name__}"
            )
    score, mask = (None if given is None else given.mod for given in (score_mod, mask_mod))
    both = Mods(score if backward or score is None else replace(score, gradients=()), mask)
    if len(both.captures) > MOST_CAPTURES:
        raise ValueError(
            f"score_mod and mask_mod capture {len(both.captures)} values; allowed: at most {MOST_CAPTURES} together"
        )
    return both


def _corner(causal):
    if isinstance(causal, (bool, np.bool_)):
        return CORNERS[0] if causal else None
    allowed = "allowed: False, True, 'lower_right', 'upper_left'"
    if not isinstance(causal, str):
        raise TypeError(f"causal is {shown(causal)} ({type_name(causal)}); {allowed}")
    if causal not in CORNERS:
        raise ValueError(f"causal is {shown(causal)}; {allowed}")
    return causal


def _window(window):
    allowed = "allowed: None or (left, right), each a non-negative integer or None"
    if not isinstance(window, (tuple, list)):
        raise TypeError(f"window is {shown(window)} ({type_name(window)}); {allowed}")
    if len(window) != 2:
        raise ValueError(f"window has {len(window)} items; {allowed}")
    for side, bound in zip(("left", "right"), window, strict=True):
        if bound is not None and (isinstance(bound, bool) or not isinstance(bound, Integral)):
            raise TypeError(f"window {side} is {shown(bound)} ({type_name(bound)}); {allowed}")
        if bound is not None and bound < 0:
            raise ValueError(f"window {side} is {shown(bound)}; {allowed}: use None for unlimited")
    return (None if bound is None else int(bound) for bound in window)


def _precision(precision):
    allowed = "allowed: None, 'highest', which is the same, 'tf32'"
    if precision is not None and not isinstance(precision, str):
        raise TypeError(f"precision is {shown(precision)} ({type_name(precision)}); {allowed}")
    if precision not in PRECISIONS:
        raise ValueError(f"precision is {shown(precision)}; {allowed}")
    return None if precision == "highest" else precision


def _scale(scale):
    allowed = "allowed: None or a finite real number of at most 1e38 in magnitude"
    number = _real("scale", scale, allowed)
    if not abs(number) <= MAX_SCALE:
        raise ValueError(f"scale is {shown(scale)}; {allowed}")
    return float(number) + 0.0  # -0.0 equals 0.0, but has another sign


def _softcap(softcap):
    least, most = SOFTCAP
    allowed = f"allowed: None, which switches it off, or a positive real number from {least:g} to {most:g}"
    number = _real("softcap", softcap, allowed)
    if not least <= number <= most:
        raise ValueError(f"softcap is {shown(softcap)}; {allowed}")
    return float(number)


def dropout(probability, seed) -> tuple[float, int]:
    """Both; the probability rounded to the 32 bits that decide on a weight, so that it is exactly that of the mask."""
    if seed is None and type(probability) is float and probability == 0:
        return 0.0, 0
    allowed = "allowed: a real number from 0 to 1 - 2**-32"
    number = _real("dropout", probability, allowed)
    if not 0 <= number <= 1 - 2**-32:
        raise ValueError(f"dropout is {shown(probability)}; {allowed}")
    allowed = "allowed: an integer from 0 to 2**64 - 1"
    if seed is None and number:
        raise ValueError(f"seed is None and dropout is {shown(probability)}; {allowed}, the same in both passes")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, Integral)):
        raise TypeError(f"seed is {shown(seed)} ({type_name(seed)}); {allowed}")
    if seed is not None and not 0 <= seed < 2**64:
        raise ValueError(f"seed is {shown(seed)}; {allowed}")
    return round(float(number) * 2**32) / 2**32, int(seed or 0)


def _real(name, value, allowed):
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} is {shown(value)} ({type_name(value)}); {allowed}")
    return value.item() if isinstance(value, np.generic) else value  # bounds may overflow a NumPy float16


def flag(name, value):
    """Check a switch."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} is {shown(value)} ({type_name(value)}); allowed: False, True")


def figure(name, value) -> float:
    """A figure of a device."""
    allowed = "allowed: a number from 1 to 1e30, a second"  # so that no time and no rate leaves the range of a float
    number = _real(name, value, allowed)
    if not 1 <= number <= 1e30:
        raise ValueError(f"{name} is {shown(value)}; {allowed}")
    return float(number)


def integer(name, value, least) -> int:
    """An integer of at most 64 bits."""
    allowed = f"allowed: an integer from {least} to {_MOST}"
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} is {shown(value)} ({type_name(value)}); {allowed}")
    if not least <= value <= _MOST:
        raise ValueError(f"{name} is {shown(value)}; {allowed}")
    return int(value)


def given(problem) -> Problem:
    """The same problem, whose fields a user wrote."""
    fields = {name: integer(f"q.{name}", getattr(problem, name), least) for name, least in _LEAST.items()}
    sides = {name: getattr(problem, name) for name in ("left", "right")}
    fields |= {name: integer(f"q.{name}", side, 0) for name, side in sides.items() if side is not None}
    heads_q, heads_k, lengths = fields["heads_q"], fields["heads_k"], fields["seqlen_q"] + fields["seqlen_k"]
    if heads_q and (heads_k == 0 or heads_q % heads_k):
        raise ValueError(f"q.heads_q is {heads_q} and q.heads_k is {heads_k}; allowed: a multiple of heads_k")
    if lengths >= MAX_SEQLENS:
        raise ValueError(f"q.seqlen_q and q.seqlen_k are {lengths} together; allowed: less than {MAX_SEQLENS}")
    return replace(problem, **fields)


def forward(
    gpu, options, *, q, k, v, out=None, alibi_slopes=None, sink=None, bias=None, mask=None, sequences=None, **captured
) -> Problem:
    """Problem of a forward call of NumPy arrays, or of CuPy arrays when `gpu`; `sequences`: how many are packed."""
    problem = _problem(gpu, options, alibi_slopes, sink, bias, mask, captured, q=q, k=k, v=v, sequences=sequences)
    if out is not None:
        _check_out(problem, q, out)
        if _overlaps_itself(out):
            raise ValueError(
                f"out has shape {out.shape} and strides {out.strides}: its elements overlap or interleave;"
                " allowed: each element in memory of its own"
            )
    return problem if sequences is None else packed(problem, options, sequences)


def backward(
    gpu,
    options,
    *,
    dout,
    q,
    k,
    v,
    out,
    lse,
    dlse=None,
    alibi_slopes=None,
    sink=None,
    bias=None,
    mask=None,
    sequences=None,
    **captured,
) -> Problem:
    """Problem of a backward call of NumPy arrays, or of CuPy arrays when `gpu`; `sequences`: how many are packed."""
    arrays = {"q": q, "k": k, "v": v, "dout": dout}
    problem = _problem(gpu, options, alibi_slopes, sink, bias, mask, captured, **arrays, sequences=sequences)
    _check_out(problem, q, out)
    _check_shape("dout", dout, out.shape, "that of out")
    for name, x in (("lse", lse), ("dlse", dlse)):
        if x is not None:
            _check_lse(problem.dtype, name, x, (*q.shape[:-3], problem.heads_q, problem.seqlen_q))
    return problem if sequences is None else packed(problem, options, sequences)


def packed(problem, options, batch) -> Problem:
    """The same of so many packed sequences, from that of all their rows as one."""
    longest = max(problem.seqlen_q, problem.seqlen_k)
    left, right = (None if side is None or side >= longest else side for side in (options.left, options.right))
    return replace(problem, batch=batch, varlen=options.corner, diagonal=0, left=left, right=right)


def segment(problem, seqlen_q, seqlen_k) -> Problem:
    """The dense problem of one of packed sequences."""
    options = Options(problem.varlen, problem.left, problem.right)
    band = dict(zip(("diagonal", "left", "right"), _band(options, seqlen_q, seqlen_k, problem.alibi)))
    return replace(problem, batch=1, seqlen_q=seqlen_q, seqlen_k=seqlen_k, varlen=None, **band)


def _problem(gpu, options, slopes, sink, bias, mask, captured, *, q, k, v, sequences=None, **more):
    arrays = {"q": q, "k": k, "v": v, **more}
    _check_dtypes(arrays)
    dtype = DTYPES[q.dtype]
    if options.precision and dtype != "float32":
        raise ValueError(f"precision is '{options.precision}' and q has dtype {dtype}; allowed: None, 'highest'")
    _check_axes(arrays, sequences is not None)
    *batch, seqlen_q, heads_q, head_dim = q.shape
    seqlen_k, heads_k, head_dim_v = v.shape[-3:]
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(f"k has shape {k.shape} and v has shape {v.shape}; allowed: equal but for the last axis")
    if q.shape[:-3] != k.shape[:-3]:
        raise ValueError(f"q has shape {q.shape} and k has shape {k.shape}; allowed: the same batch, axis 0")
    if k.shape[-1] != head_dim:
        raise ValueError(f"q has shape {q.shape} and k has shape {k.shape}; allowed: the same last axis")
    for name, width in (("q", head_dim), ("v", v.shape[-1])):
        if width == 0 or (gpu and width > GPU_HEAD_DIM):
            limit = f"1 to {GPU_HEAD_DIM} on the GPU" if gpu else "1 or more"
            raise ValueError(f"{name} has head_dim {width}; allowed: {limit}")
    if heads_q and (heads_k == 0 or heads_q % heads_k):
        raise ValueError(
            f"q has {heads_q} heads and k has {heads_k}; allowed: a multiple of the heads of k (axes: batch, seqlen, "
            "heads, head_dim)"
        )
    if seqlen_q + seqlen_k >= MAX_SEQLENS:
        raise ValueError(
            f"q has seqlen {seqlen_q} and k has seqlen {seqlen_k}; allowed: less than {MAX_SEQLENS} together"
        )
    if slopes is not None:
        _check_slopes(dtype, slopes, (*(batch if sequences is None else [sequences]), heads_q))
    if sink is not None:
        _check_lse_dtype(dtype, "sink", sink)
        _check_shape("sink", sink, (heads_q,), "(heads_q,)")
    if bias is not None:
        _check_bias_dtype(dtype, bias)
    if mask is not None and mask.dtype != bool:
        raise TypeError(f"mask has dtype {mask.dtype}; allowed: bool, True where a query may see a key")
    for name, x in (("bias", bias), ("mask", mask)):
        if x is not None:
            _check_broadcasts(name, x.shape, (*batch, heads_q, seqlen_q, seqlen_k))
    elements = False
    if options.block_mask is not None:
        fits(options.block_mask, (*batch, heads_q, seqlen_q, seqlen_k))
        elements = options.block_mask[2] is not None
        if elements and mask is not None:
            raise ValueError(
                "mask is given, and block_mask has blocks that are shown in part; allowed: one of them, or both as "
                "BlockMask.from_mask(mask & block_mask.dense(seqlen_q, seqlen_k))"
            )
    if options.dropout:
        counted(**dict(zip(("batch",), batch if sequences is None else [sequences])), heads=heads_q)
    if gpu and q.itemsize > 2:
        given = {"softcap": options.softcap, "alibi_slopes": slopes, "sink": sink, "bias": bias, "mask": mask}
        given |= {"block_mask": options.block_mask, "dropout": options.dropout or None, "cu_seqlens_q": sequences}
        if options.mods is not None:
            given |= {"score_mod": options.mods.score, "mask_mod": options.mods.mask}
        for name in (name for name, value in given.items() if value is not None):
            raise NotImplementedError(
                f"{name} is given and q has dtype {dtype}; allowed with it on the GPU: float16, bfloat16; "
                "on the host, as NumPy arrays: every dtype"
            )
    return Problem(
        dtype,
        *(batch or [1]),
        seqlen_q,
        seqlen_k,
        heads_q,
        heads_k,
        head_dim,
        head_dim_v,
        head_dim**-0.5 if options.scale is None else options.scale,
        *_band(options, seqlen_q, seqlen_k, slopes is not None),
        options.softcap,
        slopes is not None,
        sink is not None,
        options.dropout,
        None if bias is None else DTYPES[bias.dtype],
        mask is not None or elements,
        options.precision,
        options.block_mask is not None,
        None if options.mods is None else _typed(gpu, options.mods, dtype, captured),
    )


def _typed(gpu, mods, dtype, captured) -> Mods:
    """With the types of the captured arrays, by name."""
    types = HOST_TYPES if dtype == "float64" else CPP_TYPES
    for name, x in captured.items():
        if x.dtype not in types:
            names = ", ".join(str(x) for x in types)
            raise TypeError(f"{name} has dtype {x.dtype}; allowed: {names} where q has dtype {dtype}")
        if not 1 <= x.ndim <= MOST_AXES:
            raise ValueError(f"{name} has shape {x.shape}; allowed: 1 to {MOST_AXES} axes, or a Python number")
        if gpu and any(abs(stride) >= x.itemsize << 31 for stride in x.strides):
            raise ValueError(f"{name} has strides {x.strides}; allowed: less than 2**31 elements")
    for mod in (mods.score, mods.mask):
        if mod is None:
            continue
        if gpu and mod.text is None:
            raise TypeError(f"{mod.argument} has a Python function; allowed on the GPU: text of C++")
        if not gpu and mod.text is not None:
            raise TypeError(f"{mod.argument} has text of C++; allowed on the host: a Python function")
    score, mask = (None if mod is None else mod.typed(captured, types) for mod in (mods.score, mods.mask))
    for capture in Mods(score).tracked:
        if capture.type not in FLOATS:
            got = captured[f"score_mod.{capture.name}"].dtype
            raise TypeError(
                f"score_mod.{capture.name} has dtype {got}; allowed with a gradient: floating-point numbers"
            )
    return Mods(score, mask)


def block_mask(x, home):
    """Check that it is one, and where the arrays are."""
    from .block_mask import BlockMask

    if not isinstance(x, BlockMask):
        raise TypeError(f"block_mask is {shown(x)} ({type_name(x)}); allowed: None or a cupyflash.BlockMask")
    if x.gpu != home.index:
        places = ("the host" if gpu is None else f"GPU {gpu}" for gpu in (x.gpu, home.index))
        raise ValueError("block_mask is on {}, the arrays are on {}; allowed: the same".format(*places))


def block_size(size) -> tuple[int, int]:
    """Queries and keys of a block."""
    pair = size if isinstance(size, (tuple, list)) else (size, size)
    allowed = f"allowed: positive multiples of {MASK_TILE}, one for both or (queries, keys)"
    if len(pair) != 2 or any(isinstance(n, bool) or not isinstance(n, Integral) for n in pair):
        raise TypeError(f"block_size is {shown(size)} ({type_name(size)}); {allowed}")
    if any(n <= 0 or n % MASK_TILE or n > MAX_SEQLENS for n in pair):
        raise ValueError(f"block_size is {shown(size)}; {allowed}")
    return int(pair[0]), int(pair[1])


def blocks(blocks, full=None, mask=None, name="blocks"):
    """Check the arrays of a block mask."""
    for which, x in ((name, blocks), ("full", full), ("mask", mask)):
        if x is not None and x.dtype != bool:
            raise TypeError(f"{which} has dtype {x.dtype}; allowed: bool")
    if blocks.ndim not in (2, 3, 4):
        axes = "[[batch,] heads_q,] " + ("seqlen_q, seqlen_k" if name == "mask" else "blocks_q, blocks_k")
        raise ValueError(f"{name} has shape {blocks.shape}; allowed: ({axes})")
    if full is not None:
        _check_broadcasts("full", full.shape, blocks.shape, "the shape of blocks")
    if mask is not None and mask.ndim > 4:
        raise ValueError(
            f"mask has shape {mask.shape}; allowed: at most four axes, (batch, heads_q, seqlen_q, seqlen_k)"
        )


def shown_by_function(result, shape):
    """Check what a function of indices returned."""
    if result.dtype != bool:
        raise TypeError(f"function returned dtype {result.dtype}; allowed: bool, True where a query may see a key")
    _check_broadcasts("what function returned", result.shape, shape, "(batch, heads_q, queries, seqlen_k)")


def fits(layout, shape):
    """Check that a block mask is one for logits of this shape."""
    blocks, size, mask = layout
    lengths = (-(-n // block) for n, block in zip(shape[-2:], size))
    expected = (1,) * (4 - len(shape)) + (*shape[:-2], *lengths)
    if any(n not in (1, whole) for n, whole in zip(blocks[:2], expected)) or blocks[2:] != expected[2:]:
        raise ValueError(
            f"block_mask has shape {blocks} of blocks of {size}; allowed: {expected}, where batch and heads may be 1"
        )
    if mask is not None:
        _check_broadcasts("the mask of block_mask", mask, (1,) * (4 - len(shape)) + tuple(shape))


def logits_shape(batch, heads, seqlen_q, seqlen_k) -> tuple[int, ...]:
    """Shape of a matrix of logits that someone names."""
    sizes = {"batch": batch, "heads": heads, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    batch, heads, seqlen_q, seqlen_k = (integer(name, size, 0) for name, size in sizes.items())
    if seqlen_q + seqlen_k >= MAX_SEQLENS:
        raise ValueError(f"seqlen_q is {seqlen_q} and seqlen_k is {seqlen_k}; allowed: less than 2**30 together")
    return batch, heads, seqlen_q, seqlen_k


def mask_shape(batch, heads, seqlen_q, seqlen_k) -> tuple[int, ...]:
    """Shape of a mask of dropout."""
    batch, heads, seqlen_q, seqlen_k = logits_shape(batch, heads, seqlen_q, seqlen_k)
    counted(batch=batch, heads=heads)
    return batch, heads, seqlen_q, seqlen_k


def array_module(xp):
    """Check that it is one that makes masks."""
    if getattr(xp, "__name__", None) not in ("numpy", "cupy"):
        raise TypeError(f"xp is {shown(xp)} ({type_name(xp)}); allowed: the modules numpy and cupy")


def counted(**sizes):
    """Check that the counter of dropout has a word for each of the `sizes`."""
    for name, size in sizes.items():
        if size > MAX_COUNTED:
            raise ValueError(f"{name} is {size}; allowed with dropout: at most 2**32")


def _band(options, seqlen_q, seqlen_k, alibi):
    """Diagonal, left and right of the band of visible keys; `None` for a side that hides no key."""
    diagonal = 0 if options.corner == "upper_left" else seqlen_k - seqlen_q
    left, right = options.left, options.right
    if left is not None and left >= seqlen_q - 1 + diagonal:  # the last query sees key 0
        left = None
    if right is not None and right >= seqlen_k - 1 - diagonal:  # the first query sees the last key
        right = None
    return (0 if left is right is None and not alibi else diagonal), left, right


def parts(outs, lses, dtype) -> np.dtype:
    """Dtype of the merged result of partial results of NumPy or CuPy arrays."""
    arrays = {f"out of part {i}": out for i, out in enumerate(outs)}
    _check_dtypes(arrays)
    _check_axes(arrays)
    first = outs[0]
    for name, out in arrays.items():
        _check_shape(name, out, first.shape, "that of the first part")
    for i, lse in enumerate(lses):
        shape = (*first.shape[:-3], first.shape[-2], first.shape[-3])
        _check_lse(DTYPES[first.dtype], f"lse of part {i}", lse, shape)
    return PLAIN_DTYPES[DTYPES[first.dtype if dtype is None else _result_dtype(dtype)]]


def _result_dtype(dtype):
    allowed = f"allowed: None, {', '.join(DTYPES.values())}"
    try:
        dtype = np.dtype(str(dtype).removeprefix("torch.") if type_name(dtype) == "torch.dtype" else dtype)
    except Exception:  # NumPy evaluates text: "f4,(3" is a SyntaxError
        raise TypeError(f"dtype is {shown(dtype)}; {allowed}") from None
    if dtype not in DTYPES:
        raise TypeError(f"dtype is {dtype}; {allowed}")
    return dtype


def lse_dtype(dtype: str) -> np.dtype:
    """Dtype of lse, and of the arithmetic, for inputs of `dtype`."""
    return np.dtype(np.float64 if dtype == "float64" else np.float32)


def result_memory(home, out, **inputs):
    """Check that `out` can be written and shares no memory with the inputs; no layout tells that."""
    if not home.writable or (isinstance(out, np.ndarray) and not out.flags.writeable):
        raise ValueError(f"out is a read-only array in {home}; allowed: an array that can be written")
    for name, x in inputs.items():
        if _shares_memory(out, x):
            raise ValueError(f"out shares memory with {name}; allowed: memory of its own")


def _check_dtypes(arrays):
    if len({x.dtype for x in arrays.values()}) > 1 or next(iter(arrays.values())).dtype not in DTYPES:
        got = ", ".join(f"{name} has dtype {x.dtype}" for name, x in arrays.items())
        raise TypeError(f"{got}; allowed: {', '.join(DTYPES.values())}, the same for all")


def _check_axes(arrays, are_packed=False):
    first = next(iter(arrays.values()))
    if first.ndim not in ((3,) if are_packed else (3, 4)) or any(x.ndim != first.ndim for x in arrays.values()):
        got = ", ".join(f"{name} has shape {x.shape}" for name, x in arrays.items())
        dense = "(batch, seqlen, heads, head_dim) for all, or (seqlen, heads, head_dim) for all"
        raise ValueError(f"{got}; allowed: " + ("(total, heads, head_dim) for all" if are_packed else dense))


def _check_shape(name, x, shape, whose):
    if x.shape != shape:
        raise ValueError(f"{name} has shape {x.shape}; allowed: {shape}, {whose}")


def _check_out(problem, q, out):
    allowed = {q.dtype, lse_dtype(problem.dtype)}
    if out.dtype not in allowed:
        names = " or ".join(name for dtype, name in DTYPES.items() if dtype in allowed)
        raise TypeError(f"out has dtype {out.dtype}; allowed: {names} where q has dtype {problem.dtype}")
    _check_shape("out", out, (*q.shape[:-1], problem.head_dim_v), "that of q with the head_dim of v")


def _check_lse(dtype, name, lse, shape):
    _check_lse_dtype(dtype, name, lse)
    _check_shape(name, lse, shape, "([batch,] heads_q, seqlen_q)")


def _check_slopes(dtype, slopes, shape):
    _check_lse_dtype(dtype, "alibi_slopes", slopes)
    if slopes.shape not in (shape, shape[-1:]):
        with_batch = f" or {shape}, (batch, heads_q)" if len(shape) > 1 else ""
        raise ValueError(f"alibi_slopes has shape {slopes.shape}; allowed: {shape[-1:]}, (heads_q,){with_batch}")


def _check_bias_dtype(dtype, bias):
    allowed = {name: x for x, name in DTYPES.items() if name != "float64" or dtype == "float64"}
    if bias.dtype not in allowed.values():
        raise TypeError(f"bias has dtype {bias.dtype}; allowed: {', '.join(allowed)} for dtype {dtype}")


def _check_broadcasts(name, given, shape, axes="([batch,] heads_q, seqlen_q, seqlen_k)"):
    aligned = shape[len(shape) - len(given) :]
    if len(given) > len(shape) or any(size not in (1, whole) for size, whole in zip(given, aligned, strict=True)):
        raise ValueError(f"{name} has shape {given}; allowed: what broadcasts to {shape}, {axes}")


def _check_lse_dtype(dtype, name, x):
    if x.dtype != lse_dtype(dtype):
        raise TypeError(f"{name} has dtype {x.dtype}; allowed: {lse_dtype(dtype)} for dtype {dtype}")


def _overlaps_itself(x):
    """Whether two elements may share memory: each stride must step over all that smaller strides reach."""
    reach = x.itemsize
    for stride, size in sorted((abs(stride), size) for stride, size in zip(x.strides, x.shape, strict=True)):
        if size > 1 and stride < reach:
            return x.size > 0
        reach += (size - 1) * stride
    return False


def _shares_memory(a, b):
    if isinstance(a, np.ndarray):
        return np.shares_memory(a, b)
    # CuPy's own tests: that of ranges takes memory wrapped twice for two, the exact one computes on the GPU.
    (a_low, a_high), (b_low, b_high) = _range(a), _range(b)
    return a_low < b_high and b_low < a_high and np.shares_memory(_addresses(a), _addresses(b))


def _range(x):
    """Half-open range of the addresses of a CuPy array."""
    low, high = _reach(x.shape, x.strides, x.itemsize)
    return x.data.ptr + low, x.data.ptr + high


@lru_cache(1024)
def _reach(shape, strides, itemsize):
    if 0 in shape:
        return 0, 0
    steps = [(size - 1) * stride for size, stride in zip(shape, strides, strict=True)]
    return sum(step for step in steps if step < 0), sum(step for step in steps if step > 0) + itemsize


def _addresses(x):
    """A NumPy array at the addresses of a CuPy array: never read."""
    interface = {"version": 3, "typestr": f"|V{x.itemsize}", "data": (x.data.ptr, True)}
    interface |= {"shape": x.shape, "strides": x.strides}
    return np.asarray(SimpleNamespace(__array_interface__=interface))
