"""cupyflash inside PyTorch's autograd: an attention whose gradients come from cupyflash.attention_backward."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this tree, installed or not

import torch

import cupyflash


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal):
        out, lse = cupyflash.attention(q, k, v, causal=causal, return_lse=True)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.causal = causal
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):
        return *cupyflash.attention_backward(dout, *ctx.saved_tensors, causal=ctx.causal)[:3], None


def attention(q, k, v, causal=False):
    """Differentiable attention of tensors (batch, seqlen, heads, head_dim)."""
    return _Attention.apply(q, k, v, causal)


def standard_attention(q, k, v, causal=False):
    """The same with all scores in memory, as textbooks have it: 2 * heads * seqlen^2 of them for a gradient."""
    q, k, v = (x.transpose(1, 2) for x in (q * q.shape[-1] ** -0.5, k, v))
    scores = q @ k.transpose(2, 3)
    if causal:
        hidden = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device)
        scores.masked_fill_(hidden.triu_(1 + scores.shape[3] - scores.shape[2]), -torch.inf)
    return (scores.softmax(dim=-1) @ v).transpose(1, 2)
