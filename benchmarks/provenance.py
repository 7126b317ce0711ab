"""What a result says of the run that it comes from."""

from __future__ import annotations

import importlib.metadata
import sys

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
