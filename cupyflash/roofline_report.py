"""A `Roofline` as a table and as a picture, and the command that prints them."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
from ml_dtypes import bfloat16

from . import counts
from .roofline import DEVICES, RESOURCES, Roofline, roofline

DTYPES = {"float16": np.float16, "bfloat16": bfloat16}
HOW_TO_PLOT = 'Matplotlib is missing; it comes with the extra "plot": pip install "cupyflash[plot]"'


def check_plot(parser, options) -> None:
    """End ``parser`` with a message where ``options`` want a plot that cannot be drawn."""
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error(HOW_TO_PLOT)


def table(found: Roofline) -> str:
    """Lines of text: the problem, the device, and a row for each pass on each path."""
    problem, device = found.problem, found.device
    masked = f", {counts.scores(problem) / (problem.seqlen_q * problem.seqlen_k):.0%} visible" if problem.banded else ""
    lines = [
        f"{problem.dtype}, batch {problem.batch}, heads {problem.heads_q} on {problem.heads_k}, "
        f"queries {problem.seqlen_q}, keys {problem.seqlen_k}, head_dim {problem.head_dim}"
        + (f" and {problem.head_dim_v}" if problem.head_dim_v != problem.head_dim else "")
        + masked,
        f"{device.name}, {device.source}: {device.matmul / 1e12:.0f} TFLOP/s, {device.memory / 1e12:.2f} TB/s, "
        f"{device.exp / 1e12:.2f} T exponentials/s, {device.shared / 1e12:.1f} TB/s of shared memory",
        "",
        f"{'what a pass asks for':<19}" + cells("tile", "GFLOP", "MB", "M exp", "MB shared", "MB tiles", "FLOP/byte"),
    ]
    for one in found.estimates:
        asked = one.amounts
        numbers = (asked.flops / 1e9, *(n / 1e6 for n in (asked.memory_bytes, asked.exps, asked.shared_bytes)))
        lines.append(
            f"  {one.name:<17}" + cells(one.tiling, *map(number, (*numbers, asked.tile_bytes / 1e6, one.intensity)))
        )
    heads = ("tensor", "memory", "exp", "shared", "at least", "TFLOP/s", "measured", "TFLOP/s")
    lines += ["", f"{'milliseconds':<19}" + cells(*heads) + "  waits for"]
    for one in found.estimates:
        times = [number(1e3 * seconds) for seconds in one.seconds.values()]
        times += [number(1e3 * one.predicted), number(one.useful_flops / one.predicted / 1e12)]
        if one.measured:
            times += [number(1e3 * one.measured), number(one.useful_flops / one.measured / 1e12)]
        else:
            times += ["", ""]
        lines.append(f"  {one.name:<17}" + cells(*times) + f"  {RESOURCES[one.binds]}")
    for one in found.estimates:
        if one.measured:
            shares = ", ".join(f"{RESOURCES[name]} {share:.0%}" for name, share in one.achieved.items())
            lines.append(f"of the measured time, {one.name} needed: {shares}")
    standard, flash = found.io_complexity["standard"], found.io_complexity["flash"]
    by_tiles = "holds for d <= M <= N d only" if flash is None else f"{number(flash / 1e6)} million"
    lines += [
        "",
        "elements to and from memory, up to a factor (FlashAttention, arXiv 2205.14135, theorem 2):",
        f"  standard attention, N^2 + N d: {number(standard / 1e6)} million; by tiles, N^2 d^2 / M: {by_tiles}",
    ]
    return "\n".join(lines)


def cells(*texts):
    return "".join(f"{text:>10}" for text in texts)


def number(value):
    return "" if value == 0 else f"{value:.0f}" if 1000 <= value < 1e7 else f"{value:.3g}"


def plot(found: Roofline, path) -> None:
    """Draw TFLOP/s over operations per byte: roofs of the device, a point for each prediction and measurement."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    device, estimates = found.device, found.estimates
    figure, axis = plt.subplots(figsize=(7, 4.4))
    ridge, most = device.matmul / device.memory, max(one.intensity for one in estimates)
    x = np.geomspace(min(ridge, min(one.intensity for one in estimates)) / 4, 4 * max(ridge, most), 200)
    axis.plot(x, np.minimum(x * device.memory, device.matmul) / 1e12, "0.2", label="memory, tensor cores")
    for direction, style in (("forward", "--"), ("backward", ":")):
        one = next(one for one in estimates if one.direction == direction and one.path != "standard")
        roof = one.useful_flops / (one.amounts.exps / device.exp) / 1e12
        axis.axhline(roof, color="0.6", linestyle=style, linewidth=1, label=f"exponentials of the {direction}")
    for i, one in enumerate(estimates):
        marker = "o" if one.direction == "forward" else "s"
        rate = one.useful_flops / one.predicted / 1e12
        axis.plot(one.intensity, rate, f"C{i}{marker}", fillstyle="none", label=f"{one.name}, predicted")
        if one.measured:
            rate = one.useful_flops / one.measured / 1e12
            axis.plot(one.intensity, rate, f"C{i}{marker}", label=f"{one.name}, measured")
    axis.set(xscale="log", yscale="log", xlabel="useful operations for each byte of DRAM, at most", ylabel="TFLOP/s")
    problem = found.problem
    size = f"{problem.seqlen_q} x {problem.seqlen_k}, head_dim {problem.head_dim}"
    axis.set_title(f"{device.name}, {device.source}; {problem.dtype}, {size}", fontsize=9)
    axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def as_json(value, indent=None) -> str:
    """``value`` as JSON, with null where that has no number: for NaN and infinities."""

    def finite(value):
        if isinstance(value, dict):
            return {name: finite(entry) for name, entry in value.items()}
        if isinstance(value, (list, tuple)):
            return [finite(entry) for entry in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(finite(value), indent=indent, allow_nan=False)


def file(text: str) -> Path:
    """Where a result can go, from the command line; said before anything is computed."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is in no folder that exists")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder")
    return path


def picture(text: str) -> Path:
    """The same, with a suffix that Matplotlib knows, where there is Matplotlib."""
    path = file(text)
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        return path  # check_plot says so
    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.lstrip(".").lower() not in known:
        raise argparse.ArgumentTypeError(f"{text!r} has the suffix {path.suffix!r}; allowed: {', '.join(known)}")
    return path


def count(text: str) -> int:
    """A positive number of something, from the command line."""
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is no positive integer")
    return int(text)


def rate(text: str) -> float:
    """A positive finite number, from the command line."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive finite number")
    return value


def add_arguments(parser) -> None:
    """Add the options of the command."""
    for name, default in (("batch", 4), ("seqlen", 4096), ("heads", 16), ("head-dim", 128)):
        parser.add_argument(f"--{name}", type=count, default=default, metavar="N", help=f"default: {default}")
    parser.add_argument("--seqlen-k", type=count, metavar="N", help="keys; default: as many as queries")
    parser.add_argument(
        "--heads-k", type=count, metavar="N", help="heads of the keys; default: as many as of the queries"
    )
    parser.add_argument("--head-dim-v", type=count, metavar="N", help="of the values; default: that of the keys")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--window", type=int, nargs=2, metavar=("LEFT", "RIGHT"), help="-1: no limit on that side")
    parser.add_argument("--device", choices=DEVICES, help="published figures of this GPU instead of the one here")
    parser.add_argument("--matmul", type=rate, metavar="TFLOP/s", help="your own figure instead, like 786")
    parser.add_argument("--memory", type=rate, metavar="TB/s", help="the same")
    parser.add_argument("--exp", type=rate, metavar="T/s", help="the same, exponentials")
    parser.add_argument("--measure", action="store_true", help="measure ceilings and both passes on the GPU here")
    parser.add_argument("--plot", type=picture, metavar="FILE", help='draw the roofline; needs the extra "plot"')


def command(options) -> int:
    """Print what the options of the command ask for; return the exit code."""
    try:
        found = _find(options)
    except (ValueError, TypeError, NotImplementedError, RuntimeError) as error:
        print(f"roofline: {error}", file=sys.stderr)
        return 2
    print(as_json(found.as_dict(), indent=2) if options.json else found)
    if options.plot:
        try:
            found.plot(options.plot)
        except OSError as error:
            print(f"roofline: --plot {options.plot}: {error}", file=sys.stderr)
            return 2
    return 0


def _find(options) -> Roofline:
    seqlen_k = options.seqlen if options.seqlen_k is None else options.seqlen_k
    heads_k = options.heads if options.heads_k is None else options.heads_k
    head_dim_v = options.head_dim if options.head_dim_v is None else options.head_dim_v
    shapes = (
        (options.batch, options.seqlen, options.heads, options.head_dim),
        (options.batch, seqlen_k, heads_k, options.head_dim),
        (options.batch, seqlen_k, heads_k, head_dim_v),
    )
    try:
        arrays = [np.broadcast_to(DTYPES[options.dtype](0), shape) for shape in shapes]  # no memory
    except ValueError:  # NumPy's limits, of a number and of their product
        largest = max(shapes, key=math.prod)
        raise ValueError(f"shape {largest} is too large; allowed: less than 2**62 elements") from None
    masks = {"causal": options.causal}
    if options.window:
        masks["window"] = tuple(None if side == -1 else side for side in options.window)
    figures = {name: getattr(options, name) for name in ("matmul", "memory", "exp")}
    figures = {name: figure for name, figure in figures.items() if figure is not None}
    if options.measure and (figures or options.device):
        raise ValueError("--measure finds the figures of the GPU here; leave out --device, --matmul, --memory, --exp")
    if options.measure:
        print("measuring the GPU", file=sys.stderr)
    found = roofline(*arrays, **masks, device=options.device, measure=options.measure)
    if found.device.source == "published figures" and options.device is None:
        print(f"taking the published figures of {found.device.name}; --measure needs a GPU", file=sys.stderr)
    if figures:
        yours = "your figures" if len(figures) == 3 else f"{found.device.source} but your {' and '.join(figures)}"
        own = replace(found.device, source=yours, **{name: 1e12 * rate for name, rate in figures.items()})
        found = roofline(*arrays, **masks, device=own)
    return found
