"""What scripts say of the run that a result comes from, and how they give it: as a file, a picture, a text or JSON."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this tree, installed or not

from cupyflash.roofline_report import file, picture

PACKAGES = (
    *("cupyflash", "cupy-cuda13x", "cupy-cuda12x", "nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"),
    *("torch", "flash-attn-3", "flash-attn3-jax", "flash-attn-4"),
)


def command():
    """This run's, without the file that the result went to."""
    words, kept = iter(sys.argv), ["python"]
    for word in words:
        if word == "--output":
            next(words, None)
        elif not word.startswith("--output="):
            kept.append(word)
    return " ".join(kept)


def versions():
    """Of the packages that are installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def lacks(what):
    """End the script, which cannot run without ``what``: the message names both."""
    print(f"{Path(sys.argv[0]).name}: {what}", file=sys.stderr)
    sys.exit(2)


def add_arguments(parser, script):
    """The options of a ``script`` that say where its result goes."""
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--plot", type=picture, metavar="FILE", help='needs the extra "plot"')
    parser.add_argument("--output", type=file, metavar="FILE", default=Path(script).with_suffix(".json"))


def write(options, result):
    options.output.write_text(json.dumps(result, indent=1) + "\n")


def show(options, result, picture, text):
    """Draw the picture of that name, if it is wanted, and print the result: ``text``, or JSON."""
    if options.plot:
        import pictures

        pictures.save(getattr(pictures, picture)(result), options.plot)
    print(json.dumps(result) if options.json else text)
