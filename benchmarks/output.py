"""What scripts say of the run that a result comes from, and how they give it: as a file, a picture, a text or JSON."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this tree, installed or not

from cupyflash.roofline_report import as_json, check_plot, file, picture

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    *("cupyflash", "cupy-cuda13x", "cupy-cuda12x", "nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"),
    *("torch", "flash-attn-3", "flash-attn3-jax", "flash-attn-4"),
)
CODE = ("cupyflash", "kernels", "benchmarks/*.py")  # what a result depends on; results lie beside it
NO_CUPY = 'CuPy is missing; pip install "cupyflash[cuda13]"'
WITHOUT_GPU = "By formula: python -m cupyflash roofline. Committed results: python benchmarks/pictures.py"
START = time.perf_counter()


def about(gpu, torch=None):
    """What every result says of its run; ``torch`` is the module, where it takes part."""
    return {
        "gpu": gpu,
        **({"torch": torch.__version__, "cudnn": torch.backends.cudnn.version()} if torch else {}),
        "commit": commit(),
        "versions": versions(),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "command": command(),
    }


def commit():
    """Of this tree, with a "+" where code was changed since; in a copy without git what CUPYFLASH_COMMIT says."""
    try:
        if not (ROOT / ".git").exists():
            raise FileNotFoundError
        return git("rev-parse", "--short=8", "HEAD") + ("+" if git("status", "--porcelain", "--", *CODE) else "")
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("CUPYFLASH_COMMIT")


def git(*words):
    """What git prints."""
    done = subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.strip()


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
    """End the script, which cannot run for ``what`` is missing or wrong: the message names both."""
    print(f"{Path(sys.argv[0]).name}: {what}", file=sys.stderr)
    sys.exit(2)


def gpu_of(torch, instead=WITHOUT_GPU):
    """Name of the GPU; ends the script, and names what is possible ``instead``, where there is none to be used."""
    if not torch.cuda.is_available():
        lacks(f"PyTorch finds no CUDA GPU. {instead}")
    try:
        import cupy  # noqa: F401
    except ImportError:
        lacks(NO_CUPY)
    return torch.cuda.get_device_name()


def progress(number, total, *words):
    """Say on stderr what was done so far."""
    print(f"[{number}/{total}, {time.perf_counter() - START:.0f} s]", *words, file=sys.stderr, flush=True)


def parse(parser, script, arguments, plot=True):
    """The options of a ``script``, with those that say where its result goes."""
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    if plot:
        parser.add_argument("--plot", type=picture, metavar="FILE", help='needs the extra "plot"')
    default = Path(script).with_suffix(".json")
    told = f"default: {default.name} beside the script"
    parser.add_argument("--output", type=file, metavar="FILE", default=default, help=told)
    options = parser.parse_args(arguments)
    if plot:
        check_plot(parser, options)
    return options


def keep(options, result, resumed):
    """With --keep ``resumed`` of ``result`` and of what the file holds; ends the script where that is another's."""
    if not (options.keep and options.output.exists()):
        return result
    try:
        return resumed(result, json.loads(options.output.read_text()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        lacks(f"--keep of {options.output}: {type(error).__name__}: {error}")


def resumed(result, kept, *same):
    """``result`` after an earlier one of the same GPU and software, and with the ``same`` fields: its sizes."""
    before, now = (
        x.get("versions", {}) | {name: x.get(name) for name in ("gpu", "torch", "cudnn", *same)} for x in (kept, result)
    )
    for name in sorted(before.keys() & now.keys()):
        if before[name] != now[name]:
            raise ValueError(f"it has {name} {before[name]}, this run {now[name]}; allowed: the same")
    own = {"cells": kept["cells"], "missing": kept["missing"]}
    own["versions"] = kept.get("versions", {}) | result["versions"]
    own["commands"] = list(dict.fromkeys(kept.get("commands", []) + result["commands"]))
    return result | own


def commits(result):
    """Those that the figures of a result were measured at, as far as it names them."""
    cells = result.get("cells")
    own = [cell.get("commit") for cell in cells.values()] if isinstance(cells, dict) else []
    return list(dict.fromkeys(filter(None, own))) or list(filter(None, [result.get("commit")]))


def write(options, result):
    """In one step: a run that is ended leaves a whole file."""
    part = options.output.with_name(options.output.name + ".part")
    part.write_text(as_json(result, indent=1) + "\n")
    part.replace(options.output)


def show(options, result, text, picture=None):
    """Draw the ``picture`` of that name, if it is wanted, and print the result: ``text``, or JSON."""
    if picture and options.plot:
        import pictures

        pictures.save(getattr(pictures, picture)(result), options.plot)
    print(as_json(result) if options.json else text)
