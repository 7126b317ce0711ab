"""cupyflash and its peers, timed in turn in one process on one GPU.

    python benchmarks/side_by_side.py [--dtypes bfloat16 float16] [--peers fa2 cudnn] [--paths default sm80]

Sizes are those of the FlashAttention-3 paper: batch * seqlen = 16384 tokens, heads * head_dim = 2048. All entries
are timed in turn, round after round, so that a drift of the clock hits all alike, and in another order each round,
because the one before still shows: up to 4 % after 10 ms. Each first runs as long untimed, to find the clock that its
own power leaves. A figure is the median of the rounds. A forward pass counts
4 * batch * heads * seqlen^2 * head_dim operations, half of that when causal; a backward pass 2.5 times as many. Peers:
PyTorch's FlashAttention-2 and cuDNN, FlashAttention-3 (its PyTorch or JAX package) and FlashAttention-4; one that is
not installed is left out and named.

An entry is an implementation and a pass, "fa2.fwd"; "cupyflash.fwd" takes the default kernel path of the GPU and
"cupyflash-sm80.fwd" the portable one, in the same run, and so do their backward passes.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from itertools import product
from typing import NamedTuple

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import output
from report import is_ours

try:
    import torch
except ImportError:
    output.lacks("PyTorch is missing; pip install torch")
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from cupyflash import roofline_report as words

TOKENS, WIDTH = 16384, 2048
ROUNDS, SECONDS = 5, 0.03  # of each entry; with two peers and two paths, 36 sizes take about a minute and a half
TOLERANCES = {"out": 2e-2, "lse": 1e-3, "dq": 2e-2, "dk": 2e-2, "dv": 2e-2}  # relative, against float32
CHECKED = 16384  # queries; the scores of a head in float32 take 1 GB there
PASSES = ("fwd", "bwd")


def synchronize(_):
    torch.cuda.synchronize()


class Pair(NamedTuple):
    """The two passes of one implementation; how to wait for the result of either."""

    fwd: Callable
    bwd: Callable
    wait: Callable
    step: Callable | None = None  # both, one after the other, for what that takes of memory


def torch_pair(function, *arrays):
    """A differentiable function of all tensors but the last, which is dout; its backward goes through autograd."""
    *plain, dout = arrays

    def forward():
        with torch.no_grad():
            return function(*plain)

    inputs = [x.detach().clone().requires_grad_() for x in plain]
    out = function(*inputs)
    return Pair(
        forward,
        lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True),
        synchronize,
        lambda: torch.autograd.grad(function(*inputs), inputs, dout),
    )


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


def ours(path):
    """Both passes, on the default path or on another one."""

    def build(q, k, v, dout, causal):
        from cupyflash import attention, attention_backward, launch

        plans = {}
        *qkv, dout_ = (to_cupy(x) for x in (q, k, v, dout))

        def on_path(function, *arrays, **options):
            def call():
                launch._plans = plans  # their keys do not name the path
                return function(*arrays, causal=causal, **options)

            return call

        def both():
            out, lse = forward_with_lse()
            return on_path(attention_backward, dout_, *qkv, out, lse)()

        forward, forward_with_lse = on_path(attention, *qkv), on_path(attention, *qkv, return_lse=True)
        with preferred(path):  # for the first calls, which plan
            out, lse = forward_with_lse()
            results = {"out": forward(), "lse": lse}
            backward = on_path(attention_backward, dout_, *qkv, out, lse)
            results |= zip(("dq", "dk", "dv"), backward())
        if q.shape[1] <= CHECKED:
            check(results, q, k, v, dout, causal)
        return Pair(forward, backward, synchronize, both)

    return build


@contextmanager
def preferred(path):
    """CUPYFLASH_PATH set to ``path``; what it was for "default"."""
    before = os.environ.get("CUPYFLASH_PATH")
    if path != "default":
        os.environ["CUPYFLASH_PATH"] = path
    try:
        yield
    finally:
        if path != "default":
            del os.environ["CUPYFLASH_PATH"]
            if before is not None:
                os.environ["CUPYFLASH_PATH"] = before


def to_cupy(x):
    """The memory of a 16-bit tensor."""
    import cupy
    import ml_dtypes

    dtype = ml_dtypes.bfloat16 if x.dtype == torch.bfloat16 else "float16"
    return cupy.from_dlpack(x.view(torch.int16)).view(dtype)


def to_torch(x, dtype):
    """The memory of a CuPy array of float32 or, in 16 bits, of ``dtype``."""
    return torch.from_dlpack(x) if x.itemsize == 4 else torch.from_dlpack(x.view("int16")).view(dtype)


def check(results, q, k, v, dout, causal):
    """Raise unless first and last head, of the first and the last batch, agree with attention in float32."""
    for at in (0, -1):
        expected = standard(*(x[at, :, at].float() for x in (q, k, v, dout)), causal)
        for name, result in results.items():
            tensor = to_torch(result, q.dtype)
            got = (tensor[at, at] if name == "lse" else tensor[at, :, at]).float()
            error = ((got - expected[name]).norm() / expected[name].norm()).item()
            if not error < TOLERANCES[name]:
                raise ArithmeticError(f"wrong {name}[{at}] of head {at}: relative error {error:.3g}")


def standard(q, k, v, dout, causal):
    """Results of standard attention of one head, arrays (seqlen, head_dim)."""
    qkv = [x.requires_grad_() for x in (q, k, v)]
    logits = q @ k.T * q.shape[-1] ** -0.5
    if causal:
        logits = logits.masked_fill(torch.ones_like(logits, dtype=torch.bool).triu(1), -torch.inf)
    out = logits.softmax(dim=-1) @ v
    gradients = torch.autograd.grad(out, qkv, dout, retain_graph=True)
    lse = logits.detach().logsumexp(dim=-1)
    return {"out": out.detach(), "lse": lse, **dict(zip(("dq", "dk", "dv"), gradients))}


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


def median_seconds(calls, rounds=ROUNDS, seconds=SECONDS, least=3):
    """``calls`` maps a name to (call, wait); all are timed in turn, round after round of ``seconds`` each.

    A round has ``least`` calls of each or more, and an order of its own.
    """
    counts, samples = {}, {name: [] for name in calls}
    for name, (call, wait) in calls.items():
        seconds_per_call(call, wait, min(2, least))
        counts[name] = max(least, min(200, int(seconds / seconds_per_call(call, wait, min(2, least)))))
    names = list(calls)
    for number in range(rounds):
        random.Random(number).shuffle(names)
        for name in names:
            call, wait = calls[name]
            seconds_per_call(call, wait, counts[name])
            samples[name].append(seconds_per_call(call, wait, counts[name]))
    return {name: statistics.median(times) for name, times in samples.items()}


def measure_cell(implementations, missing, timing, dtype, head_dim, causal, seqlen):
    """TFLOP/s of every implementation at one size. One that is not installed moves over to ``missing``."""
    torch.manual_seed(0)
    shape = (TOKENS // seqlen, seqlen, WIDTH // head_dim, head_dim)
    arrays = [torch.randn(shape, device="cuda", dtype=getattr(torch, dtype)) for _ in range(4)]
    calls, failed = {}, {}
    for name, build in list(implementations.items()):
        try:
            pair = build(*arrays, causal)
            made = {f"{name}.{which}": getattr(pair, which) for which in PASSES}
            for call in made.values():
                pair.wait(call())
            calls |= {entry: (call, pair.wait) for entry, call in made.items()}
        except ImportError as error:
            missing[name] = str(error)
            del implementations[name]
        except Exception as error:  # a peer that refuses a size must not end the run
            failed[name] = f"{type(error).__name__}: {error}"[:200]
    operations = 4 * shape[0] * seqlen**2 * shape[2] * head_dim * (0.5 if causal else 1)
    tflops = {
        name: round(operations * (2.5 if name.endswith("bwd") else 1) / seconds / 1e12, 1)
        for name, seconds in median_seconds(calls, *timing).items()
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


def summary(cells):
    """Yield geometric mean and worst cell of the rate of each of our entries over each peer's and the best peer's."""
    rates = [cell["tflops"] for cell in cells.values()]
    for entry in sorted({name for rate in rates for name in rate if is_ours(name)}):
        which = entry.split(".")[1]
        rivals = {name: [f"{name}.{which}"] for name in PEERS} | {"best peer": [f"{name}.{which}" for name in PEERS]}
        for rival, names in rivals.items():
            ratio = {}
            for key, rate in zip(cells, rates):
                known = [rate[name] for name in names if name in rate]
                if entry in rate and known:
                    ratio[key] = rate[entry] / max(known)
            if ratio:
                worst = min(ratio, key=ratio.get)
                mean = statistics.geometric_mean(ratio.values())
                yield f"{entry} over {rival}: geometric mean {mean:.3f}, worst {ratio[worst]:.3f} ({worst})"


def parse_arguments(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"], choices=["bfloat16", "float16"])
    parser.add_argument("--head-dims", nargs="+", type=words.count, default=[64, 128, 256])
    parser.add_argument("--seqlens", nargs="+", type=words.count, default=[512, 1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=list(PEERS))
    parser.add_argument(
        "--paths",
        nargs="+",
        default=["default"],
        choices=["default", "sm80", "sm90"],
        help="kernel paths of cupyflash",
    )
    parser.add_argument("--rounds", type=words.count, default=ROUNDS)
    parser.add_argument("--seconds", type=words.rate, default=SECONDS, help="of one entry in one round")
    parser.add_argument("--quick", action="store_true", help="sequence lengths 1024 and 8192 only")
    parser.add_argument("--keep", action="store_true", help="keep the sizes that OUTPUT holds, measure the others")
    parser.add_argument("--again", action="store_true", help="with --keep: measure the sizes asked for in any case")
    options = output.parse(parser, __file__, arguments, plot=False)
    check_seqlens(parser, options)
    return options


def check_seqlens(parser, options):
    """End ``parser`` with a message where batches of TOKENS cannot be made."""
    for seqlen in options.seqlens:
        if TOKENS % seqlen:
            parser.error(f"--seqlens has {seqlen}; allowed: divisors of {TOKENS}")


def has_all(cell, names):
    """Whether ``cell`` holds a rate, or a failure, of each of the set ``names`` of implementations."""
    return names <= {entry.split(".")[0] for entry in cell["tflops"]} | set(cell["failed"])


def resumed(result, kept):
    """``result`` after an earlier one of the same GPU and software: its sizes, and the ceilings that it has."""
    own = {"ceilings": kept["ceilings"]}
    if "ceilings_from" in kept or kept["date"] != result["date"]:
        own["ceilings_from"] = kept.get("ceilings_from", f"on {kept['date']}")
    return output.resumed(result, kept, "dtype") | own


def main(arguments=None):
    options = parse_arguments(arguments)
    about = output.about(output.gpu_of(torch), torch)
    commands = [about.pop("command")]
    implementations = {name: PEERS[name] for name in options.peers}
    implementations |= {"cupyflash" if path == "default" else f"cupyflash-{path}": ours(path) for path in options.paths}
    result = {
        **about,
        "commands": commands,
        "dtype": "bfloat16",  # of the cells whose key names no other
        "ceilings": None,
        "missing": {},
        "cells": {},
    }
    result = output.keep(options, result, resumed)
    result["ceilings"] = result["ceilings"] or ceilings()
    seqlens = [1024, 8192] if options.quick else options.seqlens
    sizes = list(product(options.dtypes, options.head_dims, (False, True), seqlens))
    for number, (dtype, head_dim, causal, seqlen) in enumerate(sizes, 1):
        key = f"d{head_dim} {'causal' if causal else 'full'} S{seqlen}"
        key += "" if dtype == result["dtype"] else f" {dtype}"
        wanted = implementations.keys() - result["missing"].keys()
        if not options.again and key in result["cells"] and has_all(result["cells"][key], wanted):
            continue
        timing = options.rounds, options.seconds
        cell = measure_cell(implementations, result["missing"], timing, dtype, head_dim, causal, seqlen)
        found = cell["tflops"], cell["ratio_to_best_peer"], cell["failed"] or ""
        output.progress(number, len(sizes), key, *found)
        result["cells"][key] = {"commit": about["commit"], **cell}
        output.write(options, result)
    lines = [f"not installed: {result['missing'] or 'none'}", *summary(result["cells"])]
    output.show(options, result, "\n".join(lines))
    return exit_code(result)


def exit_code(result):
    """1 where cupyflash failed or is missing, which is said; where a peer did, that is a result."""
    reasons = {"missing": result["missing"]} | {key: cell["failed"] for key, cell in result["cells"].items()}
    lines = [f"{key}: {name}: {names[name]}" for key, names in reasons.items() for name in names if is_ours(name)]
    for line in lines:
        print(line, file=sys.stderr)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
