"""Exact attention, forward and backward, on CUDA GPUs from Python, without a build."""

from . import reference
from .attention import AttentionGradients, attention, attention_backward
from .block_mask import BlockMask
from .dropout import dropout_mask
from .merge import merge_attention
from .mods import MaskMod, ModError, ScoreMod
from .roofline import roofline

__version__ = "0.1.0"

__all__ = [
    "AttentionGradients",
    "BlockMask",
    "MaskMod",
    "ModError",
    "ScoreMod",
    "__version__",
    "attention",
    "attention_backward",
    "dropout_mask",
    "merge_attention",
    "reference",
    "roofline",
]
