"""float32 and float64 beside standard attention in CuPy and PyTorch's memory-efficient attention: speed and error.

    python benchmarks/precise.py [--seqlens 1024 4096] [--head-dims 64 128] [--rounds 5] [--output precise.json]

16384 tokens, heads * head_dim = 2048, full mask. Times are medians of rounds in which all are timed in turn; rates
count 4 and 10 operations for each score and column, whatever a kernel computes twice. The error is the largest of out,
and of all gradients, on the first two heads, beside that of standard attention in the same dtype, which is the unit.
"""

from __future__ import annotations

import argparse
import sys
from itertools import product

import numpy as np
import output

try:
    import cupy
except ImportError:
    output.lacks(output.NO_CUPY)

import cupyflash
from cupyflash import reference, timing
from cupyflash.roofline_report import count

TOKENS, WIDTH = 16384, 2048


class Standard:
    """All scores in memory, by cuBLAS and CuPy's kernels: as few passes over them as those allow."""

    exponentials = cupy.ElementwiseKernel("T top, T scale", "T x", "x = exp(scale * x - top)", "exponentials")
    gradient = cupy.ElementwiseKernel("T p, T delta, T scale", "T x", "x = scale * p * (x - delta)", "gradient")

    @classmethod
    def forward(cls, q, k, v):
        """Result and weights of arrays (batch, heads, seqlen, head_dim)."""
        p = q @ k.swapaxes(2, 3)
        scale = p.dtype.type(q.shape[-1] ** -0.5)
        cls.exponentials(scale * p.max(axis=-1, keepdims=True), scale, p)
        return (p @ v) / p.sum(axis=-1, keepdims=True), p

    @classmethod
    def backward(cls, dout, q, k, v, out, p):
        """Gradients of q, k and v, where p holds normalised weights."""
        ds = dout @ v.swapaxes(2, 3)
        cls.gradient(p, (dout * out).sum(axis=-1, keepdims=True), p.dtype.type(q.shape[-1] ** -0.5), ds)
        return ds @ k, (q.swapaxes(2, 3) @ ds).swapaxes(2, 3), (dout.swapaxes(2, 3) @ p).swapaxes(2, 3)


def of_cupyflash(arrays, results, **options):
    """Calls of both passes, and what they give."""
    q, k, v, dout = arrays
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
    gradients = cupyflash.attention_backward(dout, q, k, v, out, lse, **options)
    results[:] = out, *gradients[:3]
    return (
        lambda: cupyflash.attention(q, k, v, out=out, **options),
        lambda: cupyflash.attention_backward(dout, q, k, v, out, lse, **options),
    )


def of_standard(arrays, results):
    """The same of standard attention."""
    q, k, v, dout = (cupy.ascontiguousarray(x.swapaxes(1, 2)) for x in arrays)
    out, p = Standard.forward(q, k, v)
    p /= p.sum(axis=-1, keepdims=True)
    results[:] = (x.swapaxes(1, 2) for x in (out, *Standard.backward(dout, q, k, v, out, p)))
    return lambda: Standard.forward(q, k, v), lambda: Standard.backward(dout, q, k, v, out, p)


def of_torch(arrays, results):
    """The same of PyTorch's memory-efficient attention, without TF32."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    torch.backends.cuda.matmul.allow_tf32 = False
    q, k, v, dout = (torch.from_dlpack(x).transpose(1, 2) for x in arrays)
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]

    def forward():
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(*inputs)

    out = forward()

    def backward():
        return torch.autograd.grad(out, inputs, dout, retain_graph=True)

    results[:] = (cupy.from_dlpack(x.detach().transpose(1, 2)) for x in (out, *backward()))
    return forward, backward


CALLS = {
    "float32": {
        "cupyflash": of_cupyflash,
        "cupyflash, tf32": lambda *x: of_cupyflash(*x, precision="tf32"),
        "standard": of_standard,
        "torch efficient": of_torch,
    },
    "float64": {"cupyflash": of_cupyflash, "standard": of_standard},
}


def errors(arrays, results, heads=2):
    """Largest errors of out, and of the gradients, in the first batch and heads."""
    q, k, v, dout = (x[:1, :, :heads] for x in arrays)
    out, lse = reference.attention(q, k, v, return_lse=True)
    right = out, *reference.attention_backward(dout, q, k, v, out, lse)[:3]
    found = [float(abs(x[:1, :, :heads] - y).max()) for x, y in zip(results, right)]
    return found[0], max(found[1:])


def measure(dtype, head_dim, seqlen, rounds):
    """Seconds and errors of both passes, by the names of what was measured, and why others failed."""
    shape = (TOKENS // seqlen, seqlen, WIDTH // head_dim, head_dim)
    arrays = [timing.normal(shape, np.dtype(dtype), seed) for seed in range(4)]
    calls, found, failed = {}, {}, {}
    for name, make in CALLS[dtype].items():
        results = []
        try:
            forward, backward = make(arrays, results)
            found[name] = {"errors": errors(arrays, results)}
        except Exception as error:  # the others go on
            failed[name] = f"{type(error).__name__}: {error}"[:300]
            continue
        calls |= {(name, "forward"): forward, (name, "backward"): backward}
    seconds = timing.median_seconds(calls, rounds)
    for (name, pass_), value in seconds.items():
        products = 2 if pass_ == "forward" else 5
        operations = products * 2 * TOKENS * seqlen * shape[2] * head_dim
        found[name][pass_] = {"seconds": value, "tflops": operations / value / 1e12}
    return {"dtype": dtype, "head_dim": head_dim, "seqlen": seqlen, "found": found, "failed": failed}


def table(result):
    head = "dtype     dim seqlen: TFLOP/s and times as long, of both passes; error of out and gradients (in standard's)"
    return "\n".join([head, *(line for size in result["sizes"] for line in lines(size))])


def lines(size):
    """Of a table: rates, how many times as fast cupyflash is, and errors in units of those of `standard`."""
    found, passes = size["found"], ("forward", "backward")
    unit, ours = (found.get(name, {}) for name in ("standard", "cupyflash"))
    label = f"{size['dtype']:8} {size['head_dim']:4} {size['seqlen']:6}"
    for name, one in found.items():
        ratios = [f"{one[p]['seconds'] / ours[p]['seconds']:5.2f}" if ours else "    -" for p in passes]
        relative = [f" ({x / y:.1f})" for x, y in zip(one["errors"], unit["errors"])] if unit else ["", ""]
        off = [f"{x:.1e}{times}" for x, times in zip(one["errors"], relative)]
        rates = [f"{one[p]['tflops']:6.1f}" for p in passes]
        yield " ".join((f"{label} {name:16}", *rates, *ratios, *off))
    for name, why in size["failed"].items():
        yield f"{label} {name:16} failed: {why}"


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=[*CALLS], choices=[*CALLS])
    parser.add_argument("--head-dims", nargs="+", type=count, default=[64, 128])
    parser.add_argument("--seqlens", nargs="+", type=count, default=[1024, 2048, 4096, 8192])
    parser.add_argument("--rounds", type=count, default=timing.ROUNDS)
    options = output.parse(parser, __file__, arguments, plot=False)
    for seqlen in options.seqlens:
        if TOKENS % seqlen:
            parser.error(f"--seqlens has {seqlen}; allowed: what divides {TOKENS}")
    if not cupy.cuda.is_available():
        output.lacks(f"CuPy finds no CUDA GPU. {output.WITHOUT_GPU}")
    gpu = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())["name"].decode()
    result = {**output.about(gpu), "sizes": []}
    sizes = list(product(options.dtypes, options.head_dims, options.seqlens))
    for number, size in enumerate(sizes, 1):
        measured = measure(*size, options.rounds)
        result["sizes"].append(measured)
        output.progress(number, len(sizes), *size, measured["failed"] or "")
        output.write(options, result)
    output.show(options, result, table(result))
    return 1 if any(size["failed"].keys() & {"cupyflash", "cupyflash, tf32"} for size in result["sizes"]) else 0


if __name__ == "__main__":
    sys.exit(main())
