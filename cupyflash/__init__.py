"""Exact attention, forward and backward, on CUDA GPUs from Python, without a build."""

from . import padding, reference
from .attention import AttentionGradients, attention, attention_backward
from .block_mask import BlockMask
from .dropout import dropout_mask
from .merge import merge_attention
from .mods import MaskMod, ModError, ScoreMod
from .roofline import roofline
from .varlen import attention_varlen, attention_varlen_backward

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
    "attention_varlen",
    "attention_varlen_backward",
    "dropout_mask",
    "merge_attention",
    "padding",
    "reference",
    "roofline",
]
