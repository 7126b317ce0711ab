"""Packed sequences of very different lengths: cupyflash beside the dense kernels and its peers, timed in turn.

    python benchmarks/varlen.py [--head-dims 128] [--mean 1024] [--longest 8192] [--tokens 65536]

Lengths are log-normal, cut off at the longest, and the same for all entries; heads * head_dim = 2048, bfloat16. A rate
counts what is useful: 4 * heads * head_dim operations for each pair of a query and a key of one sequence, half of that
when causal; a backward pass 2.5 times as many. "dense" is cupyflash on as many tokens, in sequences of one length: the
one for which as many operations belong to a token. Peers: FlashAttention-3 and -4, and PyTorch's `varlen_attn`; one
that is not installed is left out and named. Our results are compared with those of dense calls, sequence by sequence.
"""

from __future__ import annotations

import argparse
import json
import sys
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import output
import side_by_side
import torch
from side_by_side import PASSES, WIDTH, Pair, synchronize, to_cupy, to_torch, torch_pair

from cupyflash.roofline_report import count, rate

SIGMA = 1.0  # of the logarithm of a length
TOLERANCE = 2e-2


def draw(tokens, mean, longest, seed=0):
    """Lengths that add up to `tokens`."""
    rng, lengths = np.random.default_rng(seed), []
    while sum(lengths) < tokens:
        length = int(rng.lognormal(np.log(mean) - SIGMA**2 / 2, SIGMA))
        lengths.append(min(max(1, length), longest, tokens - sum(lengths)))
    return lengths


def ours(lengths, q, k, v, dout, cu_seqlens, causal):
    import cupy

    from cupyflash import attention_varlen, attention_varlen_backward

    *qkv, dout_ = (to_cupy(x) for x in (q, k, v, dout))
    cu = cupy.from_dlpack(cu_seqlens)
    options = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "causal": causal}
    out, lse = attention_varlen(*qkv, return_lse=True, **options)
    saved = (dout_, *qkv, out, lse)
    check(lengths, qkv, dout_, causal, out, attention_varlen_backward(*saved, **options))
    return Pair(
        lambda: attention_varlen(*qkv, **options), lambda: attention_varlen_backward(*saved, **options), synchronize
    )


def check(lengths, qkv, dout, causal, out, gradients):
    """Raise unless each sequence has what it has alone."""
    from cupyflash import attention, attention_backward

    first = 0
    for length in lengths:
        rows = slice(first, first + length)
        first += length
        alone = [x[None, rows] for x in (*qkv, dout)]
        out_alone, lse = attention(*alone[:3], causal=causal, return_lse=True)
        right = (out_alone, *attention_backward(alone[3], *alone[:3], out_alone, lse, causal=causal)[:3])
        for name, x, y in zip(("out", "dq", "dk", "dv"), (out, *gradients[:3]), right):
            got, expected = (to_torch(a, torch.bfloat16).float() for a in (x[rows], y[0]))
            error = ((got - expected).norm() / expected.norm()).item()
            if not error < TOLERANCE:
                raise ArithmeticError(f"{name} of rows {rows} is {error:.2g} from that of a dense call")


def fa3(lengths, q, k, v, dout, cu, causal):
    from flash_attn_interface import flash_attn_varlen_func

    longest = max(lengths)

    def function(*qkv):
        out = flash_attn_varlen_func(*qkv, cu, cu, longest, longest, causal=causal)
        return out[0] if isinstance(out, tuple) else out

    return torch_pair(function, q, k, v, dout)


def fa4(lengths, q, k, v, dout, cu, causal):
    from flash_attn.cute import flash_attn_varlen_func

    def function(*qkv):
        longest = max(lengths)
        keywords = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": longest, "max_seqlen_k": longest}
        out = flash_attn_varlen_func(*qkv, **keywords, causal=causal)
        return out[0] if isinstance(out, tuple) else out

    return torch_pair(function, q, k, v, dout)


def torch_varlen(lengths, q, k, v, dout, cu, causal):
    from torch.nn.attention.varlen import varlen_attn

    longest, window = max(lengths), (-1, 0 if causal else -1)
    return torch_pair(lambda *qkv: varlen_attn(*qkv, cu, cu, longest, longest, window_size=window), q, k, v, dout)


PEERS = {"fa3": fa3, "fa4": fa4, "torch": torch_varlen}


def dense(arrays, tokens, seqlen, causal):
    """cupyflash on sequences of one length, as many tokens as are whole ones."""
    from cupyflash import attention, attention_backward

    batch = tokens // seqlen
    q, k, v, dout = (to_cupy(x[: batch * seqlen]).reshape(batch, seqlen, *x.shape[1:]) for x in arrays)
    out, lse = attention(q, k, v, causal=causal, return_lse=True)
    saved = (dout, q, k, v, out, lse)
    pair = Pair(
        lambda: attention(q, k, v, causal=causal), lambda: attention_backward(*saved, causal=causal), synchronize
    )
    return pair, batch * seqlen**2


def measure(options, head_dim, causal, missing):
    """TFLOP/s of every entry."""
    torch.manual_seed(0)
    lengths = draw(options.tokens, options.mean, options.longest)
    cu = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device="cuda")
    shape = (options.tokens, WIDTH // head_dim, head_dim)
    arrays = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    pairs = sum(n * n for n in lengths)
    seqlen = -(-pairs // options.tokens // 64) * 64  # of which as many operations belong to a token
    calls, failed, operations = {}, {}, {}
    makers = {"cupyflash": ours, **{name: PEERS[name] for name in PEERS if name not in missing}}
    for name, make in (*makers.items(), ("dense", None)):
        operations[name] = pairs
        try:
            if make is None:
                pair, operations[name] = dense(arrays, options.tokens, seqlen, causal)
            else:
                pair = make(lengths, *arrays, cu, causal)
            made = {f"{name}.{which}": (getattr(pair, which), pair.wait) for which in PASSES}
            for call, wait in made.values():
                wait(call())
            calls |= made
        except ImportError as error:
            missing[name] = str(error)
        except Exception as error:  # the others go on
            failed[name] = f"{type(error).__name__}: {error}"[:300]
    seconds = side_by_side.median_seconds(calls, options.rounds, options.seconds)
    tflops = {}
    for entry, time in seconds.items():
        name, which = entry.split(".")
        flops = 4 * operations[name] * WIDTH * (0.5 if causal else 1) * (2.5 if which == "bwd" else 1)
        tflops[entry] = round(flops / time / 1e12, 1)
    return {"sequences": len(lengths), "dense_seqlen": seqlen, "tflops": tflops, "failed": failed}


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--head-dims", nargs="+", type=count, default=[64, 128])
    parser.add_argument("--tokens", type=count, default=65536)
    parser.add_argument("--mean", type=count, default=1024)
    parser.add_argument("--longest", type=count, default=8192)
    parser.add_argument("--rounds", type=count, default=5)
    parser.add_argument("--seconds", type=rate, default=0.03, help="of one entry in one round")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--output", type=output.file, default=Path(__file__).with_suffix(".json"))
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("varlen.py needs a CUDA GPU; PyTorch finds none", file=sys.stderr)
        return 2
    result = {
        "gpu": torch.cuda.get_device_name(),
        "versions": output.versions(),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "command": output.command(),
        "missing": {},
        "cells": {},
    }
    for head_dim in options.head_dims:
        for causal in (False, True):
            cell = measure(options, head_dim, causal, result["missing"])
            result["cells"][f"d{head_dim} {'causal' if causal else 'full'}"] = cell
            print(f"d{head_dim} causal={causal}", cell, file=sys.stderr)
            output.write(options, result)
    if options.json:
        print(json.dumps(result))
    return 1 if any(cell["failed"] for cell in result["cells"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
