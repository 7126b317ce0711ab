"""The report of the main job as a short table."""

from __future__ import annotations

from .inputs import QUESTION

RESOURCES = {
    "matmul": ("matrix products", "FLOP/s"),
    "copy": ("memory traffic", "B/s"),
    "exp": ("exponentials", "/s"),
}


def table(report):
    """Lines of text that show ``report``."""
    lines = [
        f"cupyflash {report['version']} on {report['backend']}: {report['device']}",
        f"model: {report['model']}, {report['layers']} layers of {report['heads']} heads",
        f"text: {report['text']}",
    ]
    if report["gpu_not_used_because"]:
        lines.append(f"no GPU: {report['gpu_not_used_because']}")

    lines += ["", row(f"{report['dtype']} attention against float64", "cupyflash", "standard", "allowed")]
    for errors in report["errors"]:
        numbers = (f"{errors[name]:.1e}" for name in ("cupyflash", "standard", "allowed"))
        title = f"  {errors['name']}, {plural(errors['calls'], 'call')}"
        lines.append(row(title, *numbers, verdict(errors["holds"])))

    similarity = report["similarity"]
    together, apart = similarity["together"], similarity["apart"]
    lines += ["", row("cosine similarity of sentences", "lowest", "mean", "highest")]
    numbers = [[f"{of[name]:.2f}" for name in ("lowest", "mean", "highest")] for of in (together, apart)]
    lines.append(row("  that belong together", *numbers[0]))
    lines.append(row("  that do not", *numbers[1], verdict(similarity["holds"])))
    if answer := report["answer"]:
        lines.append(f'  "{QUESTION}"')
        lines.append(f"  is closest to the text's part on '{answer['part']}' ({answer['similarity']:.2f})")

    long_call = report["long_call"]
    ours, theirs = long_call["cupyflash"], long_call["standard"]
    lines += ["", row(f"first layer, {long_call['tokens']} tokens in one call", "cupyflash", "standard")]
    lines.append(row("  time", *(milliseconds(call["seconds"]) for call in (ours, theirs))))
    lines.append(row("  peak memory beyond q, k, v", *(megabytes(call["peak_bytes"]) for call in (ours, theirs))))

    resources = long_call["resources"]
    lines += ["", "what cupyflash's call waits for, at rates measured here"]
    for name, (title, unit) in RESOURCES.items():
        share, speed = resources[name]["share"], rate(resources[name]["rate"], unit)
        mark = "  <- most" if name == resources["waits_for"] else ""
        lines.append(row(f"  {title}", f"{share:.1%}") + f" of the time, at {speed}{mark}")

    lines.append("")
    lines += [f"{verdict(holds):4} {check}" for check, holds in report["checks"].items()]
    lines.append(f"{'passed' if report['passed'] else 'FAILED'} in {report['seconds']:.0f} s")
    return "\n".join(lines)


def row(title, *cells):
    return f"{title:<42}" + "".join(f"{cell:>14}" for cell in cells).rstrip()


def verdict(holds):
    return "ok" if holds else "BAD"


def plural(number, noun):
    return f"{number} {noun}" + "s" * (number != 1)


def milliseconds(seconds):
    return "no memory" if seconds is None else f"{seconds * 1e3:.{0 if seconds > 0.1 else 2}f} ms"


def megabytes(size):
    return "no memory" if size is None else f"{size / 1e6:.1f} MB"


def rate(value, unit):
    return f"{value / 1e12:.1f} T{unit}" if value >= 1e12 else f"{value / 1e9:.1f} G{unit}"
