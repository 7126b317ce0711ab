"""cupyflash and its peers, timed in turn in one process on one GPU.

    python benchmarks/side_by_side.py [--dtypes bfloat16 float16] [--head-dims 64 128 256] [--peers fa2 cudnn]

Sizes are those of the FlashAttention-3 paper: batch * seqlen = 16384 tokens, heads * head_dim = 2048. Every
entry is timed round after round, so that a drift of the clock hits all alike; a figure is the median of the
rounds. A forward pass counts 4 * batch * heads * seqlen^2 * head_dim operations, half of that when causal; a
backward pass 2.5 times as many. Peers: PyTorch's FlashAttention-2 and cuDNN, FlashAttention-3 (its PyTorch or
JAX package) and FlashAttention-4; one that is not installed is left out and named.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

TOKENS, WIDTH = 16384, 2048
ROUNDS, SECONDS = 5, 0.05
TOLERANCE = 2e-2  # relative error of a 16-bit result against float32
PASSES = ("fwd", "bwd")


def synchronize(_):
    torch.cuda.synchronize()


class Pair(NamedTuple):
    """The two passes of one implementation, and how to wait for the result of either."""

    fwd: Callable
    bwd: Callable
    wait: Callable


def torch_pair(function, q, k, v, dout):
    """A differentiable function of tensors; its backward goes through autograd."""

    def forward():
        with torch.no_grad():
            return function(q, k, v)

    inputs = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = function(*inputs)
    return Pair(forward, lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True), synchronize)


def sdpa(backend):
    def build(q, k, v, dout, causal):
        def function(*heads_first):
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(*heads_first, is_causal=causal)

        # Only the order of the axes is another: the memory stays (batch, seqlen, heads, head_dim).
        return torch_pair(function, *(x.transpose(1, 2) for x in (q, k, v, dout)))

    return build


def fa3(q, k, v, dout, causal):
    try:
        from flash_attn_interface import flash_attn_func
    except ImportError:
        return fa3_jax(q, k, v, dout, causal)

    def function(*qkv):
        out = flash_attn_func(*qkv, causal=causal)
        return out[0] if isinstance(out, tuple) else out

    return torch_pair(function, q, k, v, dout)


def fa3_jax(q, k, v, dout, causal):
    import jax
    from flash_attn3_jax import flash

    options = (q.shape[-1] ** -0.5, causal, (-1, 0 if causal else -1))
    qkv = [jax.dlpack.from_dlpack(x) for x in (q, k, v)]
    forward = jax.jit(lambda *arrays: flash._flash_mha_fwd(*arrays, *options))
    backward = jax.jit(lambda *arrays: flash._flash_mha_bwd(*arrays, *options))
    saved = (jax.dlpack.from_dlpack(dout), *qkv, *forward(*qkv))
    return Pair(lambda: forward(*qkv), lambda: backward(*saved), jax.block_until_ready)


def fa4(q, k, v, dout, causal):
    from flash_attn.cute import flash_attn_func

    def function(*qkv):
        out = flash_attn_func(*qkv, causal=causal)
        return out[0] if isinstance(out, tuple) else out

    return torch_pair(function, q, k, v, dout)


def ours(q, k, v, dout, causal):
    import cupy

    from cupyflash import attention, attention_backward

    *qkv, dout_ = (cupy.from_dlpack(x) for x in (q, k, v, dout))
    saved = (dout_, *qkv, *attention(*qkv, causal=causal, return_lse=True))
    pair = Pair(lambda: attention(*qkv, causal=causal), lambda: attention_backward(*saved, causal=causal), synchronize)
    check([pair.fwd(), *pair.bwd()], *(x[:1, :, :1] for x in (q, k, v, dout)), causal)
    return pair


def check(results, q, k, v, dout, causal):
    """Raise unless the first head of ``results`` agrees with standard attention in float32."""
    qkv = [x.float().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    with sdpa_kernel(SDPBackend.MATH):
        out = F.scaled_dot_product_attention(*qkv, is_causal=causal)
    expected = [out, *torch.autograd.grad(out, qkv, dout.float().transpose(1, 2))]
    for name, result, right in zip(("out", "dq", "dk", "dv"), results, expected, strict=True):
        got = torch.from_dlpack(result)[:1, :, :1].float().transpose(1, 2)
        error = ((got - right).norm() / right.norm()).item()
        if not error < TOLERANCE:
            raise ArithmeticError(f"wrong {name}: relative error {error:.3g}")


PEERS = {
    "fa2": sdpa(SDPBackend.FLASH_ATTENTION),
    "cudnn": sdpa(SDPBackend.CUDNN_ATTENTION),
    "fa3": fa3,
    "fa4": fa4,
}


def seconds_per_call(call, wait, count):
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        result = call()
    wait(result)
    return (time.perf_counter() - start) / count


def median_seconds(calls):
    """``calls`` maps a name to (call, wait); all are timed in turn, round after round."""
    counts, samples = {}, {name: [] for name in calls}
    for name, (call, wait) in calls.items():
        seconds_per_call(call, wait, 2)
        counts[name] = max(3, min(200, int(SECONDS / seconds_per_call(call, wait, 2))))
    for _ in range(ROUNDS):
        for name, (call, wait) in calls.items():
            samples[name].append(seconds_per_call(call, wait, counts[name]))
    return {name: statistics.median(times) for name, times in samples.items()}


def measure_cell(implementations, missing, dtype, head_dim, causal, seqlen):
    """TFLOP/s of every implementation at one size. One that is not installed moves over to ``missing``."""
    torch.manual_seed(0)
    shape = (TOKENS // seqlen, seqlen, WIDTH // head_dim, head_dim)
    arrays = [torch.randn(shape, device="cuda", dtype=getattr(torch, dtype)) for _ in range(4)]
    calls, failed = {}, {}
    for name, build in list(implementations.items()):
        try:
            pair = build(*arrays, causal)
            for which in PASSES:
                pair.wait(getattr(pair, which)())
                calls[f"{name}.{which}"] = (getattr(pair, which), pair.wait)
        except ImportError as error:
            missing[name] = str(error)
            del implementations[name]
        except Exception as error:  # a peer that refuses a size must not end the run
            failed[name] = f"{type(error).__name__}: {error}"[:200]
    operations = 4 * TOKENS * seqlen * shape[2] * head_dim * (0.5 if causal else 1)
    tflops = {
        name: round(operations * (2.5 if name.endswith("bwd") else 1) / seconds / 1e12, 1)
        for name, seconds in median_seconds(calls).items()
    }
    return {"tflops": tflops, "failed": failed, "ratio_to_best_peer": ratios_to_best(tflops)}


def ratios_to_best(tflops):
    """Our rate over that of the fastest peer, for the passes that both have."""
    ratios = {}
    for which in PASSES:
        peers = [tflops[f"{name}.{which}"] for name in PEERS if f"{name}.{which}" in tflops]
        if peers and f"cupyflash.{which}" in tflops:
            ratios[which] = round(tflops[f"cupyflash.{which}"] / max(peers), 3)
    return ratios


def ceilings():
    """What the machine gives to a large matrix product and to a copy."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    source = torch.empty(2**31, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    calls = {"matmul": lambda: a @ b, "copy": lambda: target.copy_(source)}
    seconds = median_seconds({name: (call, synchronize) for name, call in calls.items()})
    return {
        "bf16 matmul TFLOP/s": round(2 * 8192**3 / seconds["matmul"] / 1e12, 1),
        "copy TB/s": round(2 * 2**31 / seconds["copy"] / 1e12, 2),
    }


def summarise(cells):
    """Print the geometric mean and the worst cell of our rate over FlashAttention-2's and the best peer's."""
    for which in PASSES:
        ratios = {"FlashAttention-2": {}, "the best peer": {}}
        for key, cell in cells.items():
            rate = cell["tflops"]
            if f"fa2.{which}" in rate and f"cupyflash.{which}" in rate:
                ratios["FlashAttention-2"][key] = rate[f"cupyflash.{which}"] / rate[f"fa2.{which}"]
            if which in cell["ratio_to_best_peer"]:
                ratios["the best peer"][key] = cell["ratio_to_best_peer"][which]
        for rival, ratio in ratios.items():
            if ratio:
                worst = min(ratio, key=ratio.get)
                mean = statistics.geometric_mean(ratio.values())
                print(f"{which} over {rival}: geometric mean {mean:.3f}, worst {ratio[worst]:.3f} ({worst})")


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"], choices=["bfloat16", "float16"])
    parser.add_argument("--head-dims", nargs="+", type=int, default=[64, 128, 256])
    parser.add_argument("--seqlens", nargs="+", type=int, default=[512, 1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=list(PEERS))
    parser.add_argument("--quick", action="store_true", help="sequence lengths 1024 and 8192 only")
    parser.add_argument("--keep", action="store_true", help="keep what OUTPUT holds of other sizes")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    return parser.parse_args()


def main():
    options = parse_arguments()
    implementations = {name: PEERS[name] for name in options.peers} | {"cupyflash": ours}
    result = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "dtype": "bfloat16",  # of the cells whose key names no other
        "ceilings": ceilings(),
        "missing": {},
        "cells": {},
    }
    if options.keep and options.output.exists():
        result["cells"] = json.loads(options.output.read_text())["cells"]
    seqlens = [1024, 8192] if options.quick else options.seqlens
    for dtype, head_dim, causal, seqlen in product(options.dtypes, options.head_dims, (False, True), seqlens):
        key = f"d{head_dim} {'causal' if causal else 'full'} S{seqlen}"
        key += "" if dtype == result["dtype"] else f" {dtype}"
        cell = measure_cell(implementations, result["missing"], dtype, head_dim, causal, seqlen)
        print(key, cell["tflops"], cell["ratio_to_best_peer"], cell["failed"] or "", flush=True)
        result["cells"][key] = cell
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    print("not installed:", result["missing"] or "none")
    summarise(result["cells"])


if __name__ == "__main__":
    main()
