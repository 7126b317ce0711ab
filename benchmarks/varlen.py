"""Packed sequences of very different lengths: cupyflash beside its dense kernels and its peers, timed in turn.

    python benchmarks/varlen.py [--head-dims 64 128] [--mean 1024] [--longest 8192] [--tokens 65536]

Lengths are log-normal, cut off at the longest, and the same for all entries; heads * head_dim = 2048, bfloat16. A rate
counts what is useful: 4 * heads * head_dim operations for each pair of a query and a key of one sequence, half of that
when causal; a backward pass 2.5 times as many. "dense" is cupyflash on as many tokens, in sequences of one length: the
one for which as many operations belong to a token. Peers: FlashAttention-3 (its PyTorch or JAX package) and -4, and
PyTorch's `varlen_attn`; one that is not installed is left out and named. Our results are compared with those of dense
calls, sequence by sequence, and the output of a peer with ours: what disagrees gets no figure. Under a minute on an
H200, most of it for kernels that are compiled.
"""

from __future__ import annotations

import argparse
import sys
from itertools import product

import numpy as np
import output
import side_by_side  # says so if there is no PyTorch
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
    check(lengths, qkv, dout_, causal, (out, *attention_varlen_backward(*saved, **options)[:3]))
    return Pair(
        lambda: attention_varlen(*qkv, **options), lambda: attention_varlen_backward(*saved, **options), synchronize
    )


def check(lengths, qkv, dout, causal, results):
    """Raise unless each sequence has the output that it has alone, and all of them together their gradients."""
    from cupyflash import attention, attention_backward

    results, alone, first = [to_torch(x, torch.bfloat16) for x in results], [], 0
    for length in lengths:
        rows = slice(first, first + length)
        first += length
        *inputs, its_dout = (x[None, rows] for x in (*qkv, dout))
        out, lse = attention(*inputs, causal=causal, return_lse=True)
        right = out, *attention_backward(its_dout, *inputs, out, lse, causal=causal)[:3]
        alone.append([to_torch(x[0], torch.bfloat16) for x in right])
        agree(f"out of rows {rows.start} to {rows.stop}", results[0][rows], alone[-1][0])
    for name, got, parts in zip(("dq", "dk", "dv"), results[1:], list(zip(*alone))[1:]):
        agree(name, got, torch.cat(parts))


def agree(name, got, expected):
    error = ((got.float() - expected.float()).norm() / expected.float().norm()).item()
    if not error < TOLERANCE:
        raise ArithmeticError(f"wrong {name}: relative error {error:.3g}")


def torch_varlen_pair(function, q, k, v, dout):
    """Of a function that may return more than the output."""

    def first(*qkv):
        out = function(*qkv)
        return out[0] if isinstance(out, tuple) else out

    return torch_pair(first, q, k, v, dout)


def fa3(lengths, q, k, v, dout, cu, causal):
    try:
        from flash_attn_interface import flash_attn_varlen_func
    except ImportError:
        return fa3_jax(lengths, q, k, v, dout, cu, causal)
    longest = max(lengths)
    return torch_varlen_pair(
        lambda *qkv: flash_attn_varlen_func(*qkv, cu, cu, longest, longest, causal=causal), q, k, v, dout
    )


def fa3_jax(lengths, q, k, v, dout, cu, causal):
    import jax
    from flash_attn3_jax.varlen_bwd import flash_mha_varlen_bwd
    from flash_attn3_jax.varlen_fwd import flash_mha_varlen_fwd

    options = {"max_seqlen_q": max(lengths), "max_seqlen_k": max(lengths)}
    options |= {"is_causal": causal, "window_size": (-1, 0 if causal else -1)}
    *qkv, dout_, cu_ = (jax.dlpack.from_dlpack(x) for x in (q, k, v, dout, cu))
    forward = jax.jit(lambda *arrays: flash_mha_varlen_fwd(*arrays, **options))
    backward = jax.jit(lambda *arrays: flash_mha_varlen_bwd(*arrays, **options))
    saved = (dout_, *qkv, *forward(*qkv, cu_, cu_), cu_, cu_)
    return Pair(lambda: forward(*qkv, cu_, cu_), lambda: backward(*saved), jax.block_until_ready)


def fa4(lengths, q, k, v, dout, cu, causal):
    from flash_attn.cute import flash_attn_varlen_func

    options = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": max(lengths), "max_seqlen_k": max(lengths)}
    return torch_varlen_pair(lambda *qkv: flash_attn_varlen_func(*qkv, causal=causal, **options), q, k, v, dout)


def torch_varlen(lengths, q, k, v, dout, cu, causal):
    from torch.nn.attention.varlen import varlen_attn

    longest, window = max(lengths), (-1, 0 if causal else -1)
    return torch_varlen_pair(
        lambda *qkv: varlen_attn(*qkv, cu, cu, longest, longest, window_size=window), q, k, v, dout
    )


PEERS = {"fa3": fa3, "fa4": fa4, "torch": torch_varlen}


def dense(seqlen):
    """cupyflash on sequences of one length, as many as are whole."""

    def make(lengths, q, k, v, dout, cu, causal):
        from cupyflash import attention, attention_backward

        batch = len(q) // seqlen
        q, k, v, dout = (to_cupy(x[: batch * seqlen]).reshape(batch, seqlen, *x.shape[1:]) for x in (q, k, v, dout))
        out, lse = attention(q, k, v, causal=causal, return_lse=True)
        saved = (dout, q, k, v, out, lse)
        return Pair(
            lambda: attention(q, k, v, causal=causal), lambda: attention_backward(*saved, causal=causal), synchronize
        )

    return make


def measure(options, head_dim, causal, missing):
    """TFLOP/s of every entry."""
    torch.manual_seed(0)
    lengths = draw(options.tokens, options.mean, options.longest)
    cu = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device="cuda")
    shape = (options.tokens, WIDTH // head_dim, head_dim)
    arrays = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    of_mix = sum(n * n for n in lengths)
    seqlen = min(options.tokens, -(-of_mix // options.tokens // 64) * 64)  # with as many operations for a token
    pairs = dict.fromkeys(("cupyflash", *PEERS), of_mix) | {"dense": options.tokens // seqlen * seqlen**2}
    makers = {"cupyflash": ours, "dense": dense(seqlen)}
    makers |= {name: PEERS[name] for name in options.peers if name not in missing}
    calls, failed, expected = {}, {}, None
    for name, make in makers.items():
        try:
            pair = make(lengths, *arrays, cu, causal)
            made = {f"{name}.{which}": (getattr(pair, which), pair.wait) for which in PASSES}
            for call, wait in made.values():
                wait(call())
            if name == "cupyflash":
                expected = to_torch(pair.fwd(), torch.bfloat16)
            elif name in PEERS and expected is not None:
                out = pair.fwd()
                agree("out", torch.from_dlpack(out[0] if isinstance(out, tuple) else out), expected)
            calls |= made
        except ImportError as error:
            missing[name] = str(error)
        except Exception as error:  # a peer that refuses the lengths must not end the run
            failed[name] = f"{type(error).__name__}: {error}"[:300]
    tflops = {}
    for entry, seconds in side_by_side.median_seconds(calls, options.rounds, options.seconds).items():
        name, which = entry.split(".")
        operations = 4 * pairs[name] * shape[1] * head_dim * (0.5 if causal else 1) * (2.5 if which == "bwd" else 1)
        tflops[entry] = round(operations / seconds / 1e12, 1)
    about = {"sequences": len(lengths), "shortest": min(lengths), "longest": max(lengths), "dense_seqlen": seqlen}
    return about | {"tflops": tflops, "failed": failed}


def table(result):
    """Rates of both passes, how many times as fast packed sequences of cupyflash are, and who is missing."""
    head = f"{'':12} {'':18} TFLOP/s forward, backward; times as fast as it cupyflash is"
    rows = (row for key, cell in result["cells"].items() for row in lines(key, cell))
    return "\n".join([head, *rows, f"not installed: {result['missing'] or 'none'}"])


def lines(key, cell):
    rates = cell["tflops"]
    for name in dict.fromkeys(entry.split(".")[0] for entry in rates):
        known = [rates[f"{name}.{which}"] for which in PASSES]
        own = [rates.get(f"cupyflash.{which}") for which in PASSES]
        ratios = [f"{mine / rate:6.2f}" if mine else "     -" for mine, rate in zip(own, known)]
        label = f"dense, {cell['dense_seqlen']} each" if name == "dense" else name
        yield " ".join((f"{key:12} {label:18}", *(f"{rate:7.1f}" for rate in known), *ratios))
    for name, error in cell["failed"].items():
        yield f"{key:12} {name:18} failed: {error}"


def parse_arguments(arguments):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--head-dims", nargs="+", type=count, default=[128])
    parser.add_argument("--tokens", type=count, default=65536)
    parser.add_argument("--mean", type=count, default=1024)
    parser.add_argument("--longest", type=count, default=8192)
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=list(PEERS))
    parser.add_argument("--rounds", type=count, default=side_by_side.ROUNDS)
    parser.add_argument("--seconds", type=rate, default=side_by_side.SECONDS, help="of one entry in one round")
    return output.parse(parser, __file__, arguments, plot=False)


def main(arguments=None):
    options = parse_arguments(arguments)
    result = {**output.about(output.gpu_of(torch), torch), "missing": {}, "cells": {}}
    sizes = list(product(options.head_dims, (False, True)))
    for number, (head_dim, causal) in enumerate(sizes, 1):
        key = f"d{head_dim} {'causal' if causal else 'full'}"
        cell = result["cells"][key] = measure(options, head_dim, causal, result["missing"])
        output.progress(number, len(sizes), key, cell["failed"] or "")
        output.write(options, result)
    output.show(options, result, table(result))
    return 1 if any(cell["failed"] for cell in result["cells"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
