"""What the pictures of pictures.py have in common: colours, axes, legend, caption and file."""

from __future__ import annotations

import io
import textwrap
from pathlib import Path

import numpy as np
import output

# Title, colour, marker and dashes. The colours are those that M. Okabe and K. Ito chose for every kind of colour
# vision; markers tell the lines apart where there is no colour at all.
STYLES = {
    "standard": ("standard attention", "#d55e00", "s", "-"),
    "standard-cupy": ("standard attention, CuPy", "#d55e00", "s", "--"),
    "standard-torch": ("standard attention, PyTorch", "#d55e00", "s", "-"),
    "torch": ("PyTorch's scaled_dot_product_attention", "#009e73", "^", "-"),
    "fa2": ("FlashAttention-2", "#e69f00", "v", "-"),
    "cudnn": ("cuDNN", "#009e73", "^", "-"),
    "fa3": ("FlashAttention-3", "#cc79a7", "D", "-"),
    "fa4": ("FlashAttention-4", "#56b4e9", "P", "-"),
    "cupyflash-sm80": ("cupyflash, portable kernels", "#0072b2", "o", "--"),
    "cupyflash": ("cupyflash", "#0072b2", "o", "-"),
}
TITLES = [title for title, *_ in STYLES.values()]
BLUE, RED, DARK = STYLES["cupyflash"][1], STYLES["standard"][1], "0.3"
DPI = 160
SETTINGS = {
    "axes.axisbelow": True,
    "axes.edgecolor": DARK,
    "axes.grid": True,
    "axes.labelsize": 8,
    "axes.linewidth": 0.7,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 8.5,
    "font.size": 8,
    "grid.color": "0.9",
    "grid.linewidth": 0.6,
    "legend.fontsize": 7.5,
    "legend.frameon": False,
    "legend.handlelength": 2.6,
    "lines.markersize": 3.8,
    "savefig.facecolor": "white",
    "xtick.color": DARK,
    "xtick.labelsize": 7.5,
    "xtick.minor.bottom": False,
    "ytick.color": DARK,
    "ytick.labelsize": 7.5,
    "ytick.minor.left": False,
}


def panels(rows, columns, height, **options):
    """A figure, and its axes in rows and columns."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    matplotlib.rcdefaults()
    matplotlib.rcParams.update(SETTINGS)
    return plt.subplots(rows, columns, figsize=(7.2, height), squeeze=False, layout="constrained", **options)


def finish(figure, handles, columns, *caption):
    """Add the legend of all panels, in the order of STYLES, and the caption."""
    rank = {title: number for number, title in enumerate(TITLES)}
    titles = sorted(handles, key=lambda title: rank.get(title, len(rank)))
    figure.legend([handles[title] for title in titles], titles, loc="outside upper center", ncols=columns)
    figure.supxlabel(textwrap.fill("; ".join(caption), 125), x=0.01, ha="left", fontsize=7, color="0.4")
    return figure


def save(figure, path):
    """Write the figure and let go of it."""
    import matplotlib.pyplot as plt

    if Path(path).suffix == ".png":
        memory = io.BytesIO()
        figure.savefig(memory, dpi=DPI, format="png")
        with_palette(memory).save(path, optimize=True)
    else:
        figure.savefig(path)
    plt.close(figure)


def with_palette(file):
    """The image in its 256 most frequent colours, which halves its file."""
    from PIL import Image

    pixels = np.asarray(Image.open(file).convert("RGB")).astype(np.int32)
    packed, inverse, counts = np.unique(pixels @ [1 << 16, 1 << 8, 1], return_inverse=True, return_counts=True)
    colours = packed[:, None] >> [16, 8, 0] & 255
    palette = colours[np.argsort(-counts, kind="stable")[:256]]
    nearest = [((palette - colour) ** 2).sum(axis=1).argmin() for colour in colours]
    image = Image.fromarray(np.uint8(nearest)[inverse].reshape(pixels.shape[:2]))
    image.putpalette(palette.astype(np.uint8).tobytes())
    return image


def line(axis, name, points, handles):
    """Draw the points of an implementation; ``handles`` keeps its line for the legend."""
    title, colour, marker, dashes = STYLES[name]
    if points:
        ours = name == "cupyflash"
        fill = "white" if dashes == "--" else colour
        style = {"color": colour, "marker": marker, "markerfacecolor": fill}
        drawn = axis.plot(*zip(*points), dashes, linewidth=2 if ours else 1.1, zorder=4 if ours else 3, **style)
        handles[title] = drawn[0]


def over_lengths(axis, lengths):
    """A logarithmic axis of sequence lengths, every second one named if they are many."""
    lengths = sorted(lengths)
    named = lengths[1 - len(lengths) % 2 :: 2] if len(lengths) > 6 else lengths
    axis.set_xscale("log", base=2)
    axis.set_xticks(named, [short(n) for n in named])


def short(n):
    return f"{n // 1024}k" if n % 1024 == 0 else str(n)


def logarithmic(axis):
    """A logarithmic vertical axis in plain numbers."""
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


def origin(result):
    """GPU, date and, of results that name them, commits."""
    gpu, commits = result.get("gpu") or result.get("device"), output.commits(result)
    return f"{gpu}, {result.get('date', 'undated')}" + (f", cupyflash at {', '.join(commits)}" if commits else "")
