"""benchmarks/side_by_side.json as the table of README.md, and as a plot.

python benchmarks/report.py                  print the table
python benchmarks/report.py --write          put it between the marks in README.md
python benchmarks/report.py --plot out.svg   needs the extra "plot"; goes with --write
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from pathlib import Path

import output

from cupyflash.roofline_report import check_plot

HERE = Path(__file__).parent
MARKS = ("<!-- performance table: benchmarks/report.py --write -->", "<!-- end of the performance table -->")
TITLES = {"fwd": "forward", "bwd": "backward"}
PEERS = {"fa2": "FlashAttention-2", "cudnn": "cuDNN", "fa3": "FlashAttention-3", "fa4": "FlashAttention-4"}
KEY = re.compile(r"d(\d+) (full|causal) S(\d+)(?: (\w+))?")


def rates(result):
    """(dtype, pass, head_dim, mask) -> {seqlen: {implementation: TFLOP/s}}, in the order of the file."""
    rows = {}
    for key, cell in result["cells"].items():
        head_dim, mask, seqlen, dtype = KEY.fullmatch(key).groups()
        for name, rate in cell["tflops"].items():
            implementation, which = name.split(".")
            row = rows.setdefault((dtype or result["dtype"], which, int(head_dim), mask), {})
            row.setdefault(int(seqlen), {})[implementation] = rate
    return dict(sorted(rows.items(), key=lambda row: (row[0][0], list(TITLES).index(row[0][1]))))


def is_ours(name):
    return name.startswith("cupyflash")


def over(rate, ours, peers):
    """The rate of ``ours`` over that of the fastest of ``peers``, or None."""
    known = [rate[peer] for peer in peers if peer in rate]
    return rate[ours] / max(known) if known and ours in rate else None


def table(result):
    """Markdown with a row for each pass, dtype, head_dim and mask; a cell: TFLOP/s (ratio to the best peer)."""
    rows = rates(result)
    seqlens = sorted({seqlen for row in rows.values() for seqlen in row})
    header = ["pass", "dtype", "head_dim", "mask", *seqlens]
    lines = [header, ["---"] * len(header)]
    for (dtype, which, head_dim, mask), row in rows.items():
        cells = []
        for seqlen in seqlens:
            rate = row.get(seqlen, {})
            ratio = over(rate, "cupyflash", peers_of(rows))
            own = f"{rate['cupyflash']:.0f}" if "cupyflash" in rate else "–"
            cells.append(own + (f" ({ratio:.2f})" if ratio else ""))
        lines.append([TITLES[which], dtype, head_dim, mask, *cells])
    text = "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
    return f"{caption(result)}\n\n{text}\n\n{means(rows)}"


def peers_of(rows):
    return sorted({name for row in rows.values() for rate in row.values() for name in rate if not is_ours(name)})


def caption(result):
    """What was measured, where, when and how."""
    versions = result.get("versions") or {"torch": result["torch"]}
    commits = output.commits(result)
    of_cupyflash = [f"cupyflash at {', '.join(commits)}"] if commits else []
    cudnn = [f"cuDNN {cudnn_version(result['cudnn'])}"] if result["cudnn"] else []
    used = ", ".join(of_cupyflash + [f"{name} {version}" for name, version in versions.items()] + cudnn)
    commands = ", ".join(f"`{command}`" for command in result.get("commands", []))
    rows = rates(result)
    peers = {dtype: peers_of({key: row for key, row in rows.items() if key[0] == dtype}) for dtype, *_ in rows}
    measured = "; ".join(f"in {dtype} {titles(names)}" for dtype, names in peers.items() if names)
    return (
        f"TFLOP/s of cupyflash on one {result['gpu']}, whose own bfloat16 matrix product reaches "
        f"{result['ceilings']['bf16 matmul TFLOP/s']}"
        + (f" (measured {result['ceilings_from']})" if "ceilings_from" in result else "")
        + "; in parentheses the ratio to the best peer of the same run"
        + (f" ({measured}). " if measured else ". ")
        + "".join(f"{PEERS.get(name, name)} was not measured at {where}. " for name, where in gaps(result))
        + f"The columns are sequence lengths. Measured on {result.get('date', 'an unknown date')} with {used}"
        + (f", by {commands}." if commands else ".")
    )


def titles(names):
    return ", ".join(PEERS.get(name, name) for name in names)


def gaps(result):
    """(implementation, where) for each head_dim that it failed at: all of its sizes, or some."""
    known = {
        (name, head_dim) for (*_, head_dim, _), row in rates(result).items() for rate in row.values() for name in rate
    }
    failed = {
        (name, int(KEY.fullmatch(key)[1])): None for key, cell in result["cells"].items() for name in cell["failed"]
    }
    for name, head_dim in failed:
        yield name, f"{'some sizes of ' if (name, head_dim) in known else ''}head_dim {head_dim}"


def cudnn_version(number):
    """91900 is 9.19.0."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def means(rows):
    """Lines of geometric means: the default path over the best peer, the portable one over FlashAttention-2."""
    lines = []
    for dtype, which in dict.fromkeys(key[:2] for key in rows):
        own = {key: row for key, row in rows.items() if key[:2] == (dtype, which)}
        known = peers_of(own)
        comparisons = (
            ("cupyflash", f"the best of {titles(known)}", known),
            ("cupyflash-sm80", f"{PEERS['fa2']}, the portable kernels", ["fa2"]),
        )
        for ours, rivals, peers in comparisons:
            ratios = [ratio for row in own.values() for rate in row.values() if (ratio := over(rate, ours, peers))]
            if ratios:
                mean = statistics.geometric_mean(ratios)
                lines.append(f"* {TITLES[which]}, {dtype}, over {rivals}: {mean:.2f}, worst {min(ratios):.2f}")
    return "Geometric means over all sizes:\n\n" + "\n".join(lines) if lines else "cupyflash was not measured."


def write(text, readme):
    before, _, rest = readme.read_text().partition(MARKS[0])
    _, last, after = rest.partition(MARKS[1])
    if not last:
        raise ValueError(f"it lacks {MARKS[0]!r} and, after it, {MARKS[1]!r}")
    readme.write_text(f"{before}{MARKS[0]}\n{text}\n{MARKS[1]}{after}")


def plot(result, path):
    """A panel for each row of the table; right axis: the fraction of the machine's own matrix product."""
    import matplotlib.pyplot as plt

    rows, columns = rates(result), 6
    names = sorted({name for row in rows.values() for rate in row.values() for name in rate})
    lines = -(-len(rows) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(3.2 * columns, 2.6 * lines), squeeze=False)
    ceiling = result["ceilings"]["bf16 matmul TFLOP/s"]
    top = 1.05 * max(ceiling, *(rate[name] for row in rows.values() for rate in row.values() for name in rate))
    for axis, ((dtype, which, head_dim, mask), row) in zip(axes.flat, rows.items()):
        for name in names:
            points = [(seqlen, rate[name]) for seqlen, rate in sorted(row.items()) if name in rate]
            if points:
                axis.plot(
                    *zip(*points),
                    f"C{names.index(name)}",
                    marker=".",
                    linewidth=2 if name == "cupyflash" else 1,
                    label=name,
                )
        axis.set(xscale="log", ylim=(0, top))
        axis.set_title(f"{TITLES[which]} d{head_dim} {mask} {dtype}", fontsize=8)
        axis.secondary_yaxis("right", functions=(lambda rate: rate / ceiling, lambda part: part * ceiling))
    axes[0, 0].legend(fontsize=7)
    figure.supxlabel("sequence length")
    figure.supylabel("TFLOP/s")
    figure.tight_layout()
    figure.savefig(path)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--input", type=Path, default=HERE / "side_by_side.json")
    parser.add_argument("--write", action="store_true", help="put the table into README.md")
    parser.add_argument("--plot", type=output.picture, metavar="FILE")
    options = parser.parse_args(arguments)
    check_plot(parser, options)
    try:
        result = json.loads(options.input.read_text())
        text = table(result)
        if options.plot:  # before the README: what cannot be drawn is not written either
            plot(result, options.plot)
    except (OSError, ValueError, LookupError, ArithmeticError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        parser.error(f"--input {options.input}: no result of side_by_side.py can be read there: {reason}")
    if options.write:
        readme = HERE.parent / "README.md"
        try:
            write(text, readme)
        except (OSError, ValueError) as error:
            parser.error(f"--write: {readme}: {error}")
    if not (options.write or options.plot):
        print(text)


if __name__ == "__main__":
    main()
