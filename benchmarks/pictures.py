"""The pictures of README.md, drawn from the committed results.

    python benchmarks/pictures.py [--only training retrieval] [--format png] [--output-dir FOLDER]

One whose result is missing is left out and named; one whose result cannot be read ends the script. Needs neither a GPU
nor PyTorch, but Matplotlib.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import report
from drawing import BLUE, DARK, RED, STYLES, finish, line, logarithmic, origin, over_lengths, panels, save, short

import cupyflash
from cupyflash.roofline import DEVICES, FALLBACK, REPORTED
from cupyflash.roofline_report import check_plot

HERE = Path(__file__).parent
SHAPES = {"gpt2": "GPT-2, 12 heads of 64", "bert-large": "BERT-large, 16 heads of 64"}
MASKS = {"full": "no mask", "causal": "causal"}
GUESSING = math.log(64)  # the loss of retrieval.py, of as many values
MARKERS = {64: "o", 128: "s", 256: "D"}  # of head_dim
OUT_OF_MEMORY = "out of memory"
ARROW = {"arrowstyle": "<->", "color": DARK, "linewidth": 0.8, "shrinkA": 4, "shrinkB": 4}


def time_and_memory(result):
    """Both passes over the length, in milliseconds and in gigabytes; a cross where standard attention ended."""
    shapes, handles = {}, {}
    for key, cell in result["cells"].items():
        title, seqlen = key.rsplit(" S", 1)
        shapes.setdefault(title, {})[int(seqlen)] = cell
    figure, axes = panels(2, len(shapes), 5.6, sharex=True, sharey="row")
    for column, (title, cells) in zip(axes.T, shapes.items()):
        for axis, value, parts in zip(column, (milliseconds, gigabytes), (("fwd", "bwd"), ("memory",))):
            for name in STYLES:
                points = [(n, value(cell, name)) for n, cell in sorted(cells.items()) if value(cell, name) is not None]
                line(axis, name, points, handles)
                ended = [n for n, cell in cells.items() if out_of_memory(cell, name, parts)]
                if points and ended and max(ended) > points[-1][0]:
                    style = {"color": STYLES[name][1], "marker": "X", "markersize": 8, "linestyle": "none"}
                    handles[f"beyond: {OUT_OF_MEMORY}"] = axis.plot(*points[-1], **style, zorder=5)[0]
            over_lengths(axis, cells)
            logarithmic(axis)
        shape, mask = title.split()
        column[0].set_title((", " if len(shapes) < 3 else "\n").join((SHAPES.get(shape, shape), MASKS[mask])))
        column[1].set_xlabel("sequence length")
    axes[0, 0].set_ylabel("forward and backward, ms")
    axes[1, 0].set_ylabel("memory beyond the inputs, GB")
    return finish(figure, handles, 3, origin(result), result["dtype"], "16384 tokens, or one longer sequence")


def milliseconds(cell, name):
    times = [cell["milliseconds"].get(f"{name}.{which}") for which in ("fwd", "bwd")]
    return None if None in times else sum(times)


def gigabytes(cell, name):
    return cell["bytes"][name] / 1e9 if name in cell["bytes"] else None


def out_of_memory(cell, name, parts):
    return OUT_OF_MEMORY in [cell["failed"].get(f"{name}.{part}") for part in parts]


def traffic(result):
    """Gigabytes to and from memory over the length, counted and by formula."""
    handles = {}
    tokens = result["cells"][-1]["batch"] * result["cells"][-1]["seqlen"]
    cells = [cell for cell in result["cells"] if cell["batch"] * cell["seqlen"] == tokens]
    figure, axes = panels(1, 2, 3.1, sharey=True)
    for axis, which in zip(axes[0], ("forward", "backward")):
        counted = {}
        for name in ("standard", "cupyflash"):
            pass_ = f"{name} {which}"
            counted[name] = [(cell["seqlen"], moved(cell["measured"][pass_])) for cell in cells]
            line(axis, name, counted[name], handles)
            least = [(cell["seqlen"], cell["formula"][pass_] / 1e9) for cell in cells]
            title = f"{STYLES[name][0]}, by formula"
            handles[title] = axis.plot(*zip(*least), ":", color=STYLES[name][1], linewidth=1.1)[0]
        (seqlen, low), (_, high) = counted["cupyflash"][-1], counted["standard"][-1]
        axis.annotate("", (seqlen, low), (seqlen, high), arrowprops=ARROW)
        beside = {"xytext": (-4, 0), "textcoords": "offset points", "ha": "right", "va": "center"}
        axis.annotate(f"{high / low:.0f} times", (seqlen, math.sqrt(low * high)), **beside)
        over_lengths(axis, [cell["seqlen"] for cell in cells])
        logarithmic(axis)
        axis.set(title=which, xlabel="sequence length")
    axes[0, 0].set_ylabel("read from and written to memory, GB")
    size = f"{tokens} tokens, {result['heads']} heads of {result['head_dim']}, no mask"
    return finish(figure, handles, 2, origin(result), result["dtype"], size)


def moved(counts):
    return (counts["read"] + counts["write"]) / 1e9


def speed(which, result):
    """TFLOP/s of one pass over the length, beside the peers."""
    handles = {}
    rows = {key[2:]: row for key, row in report.rates(result).items() if key[:2] == (result["dtype"], which)}
    head_dims = sorted({head_dim for head_dim, _ in rows})
    masks = [mask for mask in MASKS if any(mask == other for _, other in rows)]
    ceiling = result["ceilings"]["bf16 matmul TFLOP/s"]
    top = 1.06 * max([ceiling, *(rate for row in rows.values() for known in row.values() for rate in known.values())])
    figure, axes = panels(len(masks), len(head_dims), 0.9 + 2.1 * len(masks), sharex=True, sharey=True)
    for (i, mask), (j, head_dim) in ((row, column) for row in enumerate(masks) for column in enumerate(head_dims)):
        axis, row = axes[i, j], rows.get((head_dim, mask), {})
        for name in STYLES:
            line(axis, name, [(n, rate[name]) for n, rate in sorted(row.items()) if name in rate], handles)
        roof = axis.axhline(ceiling, color=DARK, linewidth=1, linestyle=(0, (1, 1.5)))
        handles["large matrix product"] = roof
        over_lengths(axis, {n for row in rows.values() for n in row})
        axis.set(ylim=(0, top), title=f"head_dim {head_dim}, {MASKS[mask]}")
    for axis in axes[:, 0]:
        axis.set_ylabel(f"{report.TITLES[which]}, TFLOP/s")
    for axis in axes[-1]:
        axis.set_xlabel("sequence length")
    size = "16384 tokens, heads x head_dim = 2048"
    return finish(figure, handles, 4, origin(result), result["dtype"], size)


def roofline(result, lengths=None):
    """TFLOP/s over operations per byte, under what a matrix product and a copy reach on the same GPU."""
    handles = {}
    lengths = lengths if lengths and lengths["gpu"] == result["gpu"] else None
    tflops, tbytes = result["ceilings"]["bf16 matmul TFLOP/s"], result["ceilings"]["copy TB/s"]
    known = DEVICES[REPORTED.get(result["gpu"], FALLBACK)]
    device = replace(known, name=result["gpu"], matmul=1e12 * tflops, memory=1e12 * tbytes, source="measured")
    figure, axes = panels(1, 2, 3.6, sharex=True, sharey=True)
    x = np.geomspace(8, 16384, 300)
    for axis, which in zip(axes[0], report.TITLES):
        axis.plot(x, np.minimum(x * tbytes, tflops), color=DARK, linewidth=1)
        for title, points, style in (
            *ours_by_intensity(result, device, which),
            *standard_by_intensity(lengths, device, which),
        ):
            handles[title] = axis.plot(*zip(*points), zorder=4, linewidth=0.9, **style)[0]
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        logarithmic(axis)
        axis.set_yticks([50, 100, 200, 400, 800])
        axis.set(title=report.TITLES[which], xlabel="operations per byte to or from memory, at most", ylim=(30, 1200))
        text = {"fontsize": 7, "color": DARK, "va": "bottom", "transform_rotates_text": True, "rotation_mode": "anchor"}
        axis.text(16384, 1.07 * tflops, f"matrix product, {tflops:.0f} TFLOP/s", ha="right", **text)
        axis.text(9, 9.9 * tbytes, f"copy, {tbytes} TB/s", rotation=math.degrees(math.atan(tbytes)), **text)
    axes[0, 0].set_ylabel("TFLOP/s")
    caption = [origin(result), result["dtype"], "no mask, each line from short sequences to long ones"]
    if lengths:
        caption.append(f"measured standard attention: {lengths['dtype']}, {lengths.get('date', 'undated')}")
    return finish(figure, handles, 2, *caption)


def ours_by_intensity(result, device, which):
    """Yield title, points (operations per byte, TFLOP/s) and style: a line for each head_dim of side_by_side.json."""
    for (dtype, direction, head_dim, mask), row in report.rates(result).items():
        if (dtype, direction, mask) == (result["dtype"], which, "full"):
            points = [
                (estimates(device, which, 16384 // n, n, 2048 // head_dim, head_dim)[1].intensity, rate["cupyflash"])
                for n, rate in sorted(row.items())
                if "cupyflash" in rate
            ]
            if points:
                style = {"color": BLUE, "marker": MARKERS.get(head_dim, "v")}
                yield f"cupyflash, head_dim {head_dim}", points, style


def standard_by_intensity(lengths, device, which):
    """The same of standard attention: the best that table.json has measured, and what memory allows at most."""
    points = []
    for key, cell in lengths["cells"].items() if lengths else ():
        title, seqlen = key.rsplit(" S", 1)
        times = [cell["milliseconds"].get(f"standard-{name}.{which}") for name in ("cupy", "torch")]
        if title == "bert-large full" and int(seqlen) >= 512 and any(times):
            one = estimates(device, which, cell["batch"], int(seqlen), 16, 64)[0]
            points.append((one.intensity, one.useful_flops / min(filter(None, times)) / 1e9))
    if points:
        yield "standard attention, head_dim 64", points, {"color": RED, "marker": MARKERS[64]}
    for head_dim, marker in MARKERS.items():
        one = estimates(device, which, 4, 4096, 2048 // head_dim, head_dim)[0]
        most = one.intensity, one.useful_flops / one.predicted / 1e12
        style = {"color": RED, "marker": marker, "markerfacecolor": "white", "linestyle": "none"}
        yield f"standard attention, head_dim {head_dim}, at most", [most], style


def estimates(device, which, *shape):
    """What `cupyflash.roofline` says of standard attention and of the default path."""
    x = np.broadcast_to(np.float16(0), shape)
    found = cupyflash.roofline(x, x, x, device=device).estimates
    found = [one for one in found if one.direction == report.TITLES[which]]
    return found[0], found[-1]


def training(result):
    """Tokens a second and memory of training, as bars."""
    handles = {}
    cells, names = result["cells"], result["attention"]
    figure, axes = panels(1, 2, 3.1)
    rates = {
        key: {name: rate / 1000 for name, rate in cell["tokens_per_second"].items()} for key, cell in cells.items()
    }
    peaks = {
        key: {name: sum(peak.values()) / 1e9 for name, peak in cell["peak_bytes"].items() if peak}
        for key, cell in cells.items()
    }
    for axis, values, what in zip(axes[0], (rates, peaks), ("thousand tokens a second", "peak memory, GB")):
        top = max((value for cell in values.values() for value in cell.values()), default=1)
        for i, name in enumerate(names):
            title, colour, *_ = STYLES[name]
            for place, key in enumerate(cells):
                x, value = place + (i - (len(names) - 1) / 2) * 0.27, values[key].get(name)
                bar = axis.bar(x, value or 0, 0.25, color=colour)
                handles[title] = bar
                if value is not None:
                    axis.text(x, value + 0.01 * top, f"{value:.3g}", ha="center", va="bottom", fontsize=7)
                elif cells[key]["failed"].get(name) == OUT_OF_MEMORY:
                    style = {"rotation": 90, "fontsize": 7, "color": colour}
                    axis.text(x, 0.02 * top, OUT_OF_MEMORY, ha="center", va="bottom", **style)
        axis.set_xticks(range(len(cells)), [f"{cell['batch']} x {key[1:]}" for key, cell in cells.items()])
        axis.tick_params(axis="x", length=0)
        axis.grid(visible=False, axis="x")
        axis.set(ylabel=what, xlabel="sequences x their length", ylim=(0, 1.1 * top))
    size = f"{result['layers']} layers of {result['heads']} heads, width {result['width']}"
    return finish(figure, handles, 3, origin(result), f"{size}; weights float32, products {result['dtype']}")


def retrieval(result):
    """Right answers and loss over the steps, with a line where the sequences get longer."""
    handles, records = {}, result["steps"]
    steps = [record["step"] for record in records]
    figure, ((axis,),) = panels(1, 1, 3.1)
    right = [record["accuracy"] for record in records]
    loss = [record["loss"] / GUESSING for record in records]
    handles["right answers"] = axis.plot(steps, right, color=BLUE, linewidth=1.6, zorder=4)[0]
    handles["loss, relative to guessing"] = axis.plot(steps, loss, color=RED, linewidth=1.1)[0]
    starts = [a["step"] for before, a in zip([{"items": 0}, *records], records) if a["items"] != before["items"]]
    items = {record["step"]: record["items"] for record in records}
    room, free_from = 0.04 * (steps[-1] - steps[0] + 1), [-math.inf, -math.inf]
    for number, start in enumerate(starts):
        axis.axvline(start, color="0.7", linewidth=0.8, zorder=1)
        height = 1 - number % 2
        if start >= free_from[height]:  # else its name would lie on another one
            beside = {"xytext": (2, 0), "textcoords": "offset points", "fontsize": 7, "color": DARK}
            axis.annotate(short(items[start]), (start, 1.06 + 0.07 * height), **beside)
            free_from[height] = start + room
    axis.grid(visible=False, axis="x")
    axis.set(xlabel="step; above: items of a sequence", ylabel="share", ylim=(0, 1.2), xlim=(steps[0], steps[-1]))
    axis.set_yticks([0, 0.25, 0.5, 0.75, 1])
    caption = [f"{result['accuracy']:.3%} right on tables never seen of {result['items']:,} items"]
    if "out_of_memory" in result.get("standard", {}):
        caption.append("standard attention is out of memory there")
    return finish(figure, handles, 2, origin(result), f"{records[-1]['seconds']:.0f} s of training", *caption)


# Its name -> the function, the result that it needs, and one that it uses if it is there.
PICTURES = {
    "time-and-memory": (time_and_memory, "table"),
    "traffic": (traffic, "traffic"),
    "roofline": (roofline, "side_by_side", "table"),
    "forward": (partial(speed, "fwd"), "side_by_side"),
    "backward": (partial(speed, "bwd"), "side_by_side"),
    "training": (training, "training"),
    "retrieval": (retrieval, "retrieval"),
}


def parse_arguments(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=list(PICTURES), choices=list(PICTURES))
    parser.add_argument("--results", type=Path, default=HERE, metavar="FOLDER", help="with the JSON of the scripts")
    parser.add_argument("--output-dir", type=Path, default=HERE / "pictures", metavar="FOLDER")
    parser.add_argument("--format", default="png", choices=["png", "svg", "pdf"])
    options = parser.parse_args(arguments)
    check_plot(parser, argparse.Namespace(plot=True))
    return options


def main(arguments=None):
    options = parse_arguments(arguments)
    try:
        options.output_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"pictures.py: --output-dir {options.output_dir}: {error.strerror}", file=sys.stderr)
        return 2
    drawn = 0
    for name in options.only:
        draw, *results = PICTURES[name]
        first, *others = [options.results / f"{result}.json" for result in results]
        if not first.exists():
            print(f"{name} is left out: {first} is missing", file=sys.stderr)
            continue
        files = [first, *(file for file in others if file.exists())]
        try:
            figure = draw(*(json.loads(file.read_text()) for file in files))
        except (OSError, ValueError, LookupError, ArithmeticError, TypeError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}"
            print(f"pictures.py: {name} cannot be drawn from {', '.join(map(str, files))}: {reason}", file=sys.stderr)
            return 2
        path = options.output_dir / f"{name}.{options.format}"
        save(figure, path)
        print(f"{path}: {path.stat().st_size / 1000:.0f} KB")
        drawn += 1
    return 0 if drawn else 1


if __name__ == "__main__":
    sys.exit(main())
