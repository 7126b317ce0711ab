"""Bytes to and from DRAM of standard attention and of cupyflash, measured beside the formulas.

    python benchmarks/traffic.py [--seqlens 512 1024] [--plot traffic.png]

The first size is that of the table in the FlashAttention paper (arXiv 2205.14135, figure 2: GPT-2 medium, 64 sequences
of 1024 with 16 heads of 64); the others have 32768 tokens. The script runs itself under Nsight Compute, which reads the
counters of the memory controllers, kernel by kernel, and neither clears the caches between kernels nor touches the
clocks. Before and after each pass a kernel reads a buffer larger than the L2 cache: what the pass left to be written
there is written then, and counted for the pass.

Formulas are those of `cupyflash.counts`: what standard attention must move at least, and cupyflash where nothing that
goes through memory stays in the L2 cache; of the sum of dq in float32 some does. Standard attention is standard.py.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import output

import cupyflash
from cupyflash.roofline_report import count, rate

HEADS, HEAD_DIM, TOKENS = 16, 64, 32768
GPT2_MEDIUM = (64, 1024)  # batch, seqlen
# Gigabytes of both passes there, measured on an A100.
PAPER = {"standard": 40.3, "cupyflash": 4.4}
READ, WRITE = METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
PASSES = tuple(f"{name} {which}" for name in ("standard", "cupyflash") for which in ("forward", "backward"))
FLUSH = "flush_l2"
FLUSH_BYTES = 1 << 28
FLUSH_SOURCE = f"""
extern "C" __global__ void {FLUSH}(const float4* x, long long count, float* sum) {{
    float total = 0.f;
    for (long long i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) total += x[i].x;
    if (total == 1.f) *sum = total;
}}
"""
FORMULAS = "The formulas alone: python -m cupyflash roofline"
HOW_TO_GET_NCU = (
    "ncu is missing: traffic.py reads hardware counters through Nsight Compute, which comes with the CUDA toolkit "
    "(package nsight-compute); name it with --ncu if it is not in the path. " + FORMULAS
)


def formulas(batch, seqlen):
    """Bytes of each pass."""
    x = np.broadcast_to(np.float16(0), (batch, seqlen, HEADS, HEAD_DIM))
    least = {}
    for one in cupyflash.roofline(x, x, x, device="H200").estimates:
        # Of the paths of a direction the last one is the default.
        least[f"{'standard' if one.path == 'standard' else 'cupyflash'} {one.direction}"] = one.amounts.memory_bytes
    return least


def run_passes(sizes, seconds, log):
    """All passes of all sizes, each between two flushes; to be run under ncu. Writes what was run to ``log``."""
    import cupy
    from cupyx.profiler import profile

    kernel = cupy.RawKernel(FLUSH_SOURCE, FLUSH)
    scratch, total = cupy.zeros(FLUSH_BYTES // 4, np.float32), cupy.zeros(1, np.float32)
    gpu = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    start, done = time.perf_counter(), []

    def flush():
        kernel((1024,), (256,), (scratch, np.int64(FLUSH_BYTES // 16), total))

    flush()  # compiles
    for batch, seqlen in sizes:
        spent = time.perf_counter() - start
        print(f"batch {batch}, seqlen {seqlen} [{spent:.0f} s]", file=sys.stderr, flush=True)
        if spent > seconds:
            print("no time left for this one", file=sys.stderr)
            break
        calls = passes(cupy, batch, seqlen)
        for call in calls:
            call()  # compiles
        for call in (*calls, lambda: None):
            with profile():
                flush()
                call()
        done.append((batch, seqlen))
        log.write_text(json.dumps({"gpu": gpu, "sizes": done}))
        del calls, call
        cupy.get_default_memory_pool().free_all_blocks()


def passes(cupy, batch, seqlen):
    """Calls, in the order of PASSES."""
    import standard

    q, k, v, dout = (normal(cupy, (batch, seqlen, HEADS, HEAD_DIM), seed) for seed in range(4))
    out, lse = cupyflash.attention(q, k, v, return_lse=True)
    *heads_first, dout_first = (cupy.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k, v, dout))
    out_first, weights = standard.forward(*heads_first)
    return (
        lambda: standard.forward(*heads_first),
        lambda: standard.backward(dout_first, *heads_first, out_first, weights),
        lambda: cupyflash.attention(q, k, v, return_lse=True),
        lambda: cupyflash.attention_backward(dout, q, k, v, out, lse),
    )


def normal(cupy, shape, seed):
    block = np.random.default_rng(seed).standard_normal(1 << 20, dtype=np.float32).astype(np.float16)
    return cupy.resize(cupy.asarray(block), shape)


def read_kernels(text):
    """Kernels in the order of their launch, each as (name, bytes read, bytes written), from what ncu printed."""
    lines = text.splitlines()
    header = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if header is None:
        raise RuntimeError(f"ncu gave no counters:\n{text[-2000:]}")
    kernels = {}
    for row in csv.DictReader(line for line in lines[header:] if line.startswith('"')):
        entry = kernels.setdefault(int(row["ID"]), {"name": row["Kernel Name"]})
        entry[row["Metric Name"]] = float(row["Metric Value"].replace(",", ""))
    return [(entry["name"], entry[READ], entry[WRITE]) for _, entry in sorted(kernels.items())]


def by_pass(kernels, count):
    """Bytes and kernels of ``count`` times all passes, in order: what stands between two flushes."""
    totals = []
    for name, read, written in kernels:
        if name.startswith(FLUSH):
            if totals:
                totals[-1]["write"] += written
            totals.append({"read": 0, "write": 0, "kernels": 0})
        else:
            totals[-1]["read"] += read
            totals[-1]["write"] += written
            totals[-1]["kernels"] += 1
    passes = [total for total in totals if total["kernels"]]
    if len(passes) < count * len(PASSES):
        raise RuntimeError(f"ncu saw {len(passes)} passes; {count * len(PASSES)} were run")
    return [dict(zip(PASSES, passes[i * len(PASSES) :])) for i in range(count)]


def missing():
    """What to measure with, if there is none."""
    try:
        import cupy
    except ImportError:
        return output.NO_CUPY
    return "" if cupy.cuda.is_available() else "CuPy finds no CUDA GPU"


def measure(options):
    """Run this script under ncu and return what it counted."""
    ncu = options.ncu or shutil.which("ncu")
    if ncu is None or shutil.which(ncu) is None:
        raise RuntimeError(HOW_TO_GET_NCU)
    if missing():
        raise RuntimeError(f"{missing()}. {FORMULAS}")
    about = output.about(None)
    sizes = [GPT2_MEDIUM] * options.gpt2 + [(max(1, TOKENS // seqlen), seqlen) for seqlen in options.seqlens]
    with tempfile.TemporaryDirectory() as folder:
        log, counters = Path(folder, "log.json"), Path(folder, "counters.csv")
        command = [
            *(ncu, "--metrics", ",".join(METRICS), "--clock-control", "none", "--cache-control", "none"),
            *("--profile-from-start", "off", "--csv", "--print-units", "base", "--log-file", str(counters)),
            *(sys.executable, __file__, "--run", str(log), "--seconds", str(options.seconds)),
            *("--sizes", json.dumps(sizes)),
        ]
        # In another locale ncu would write 1.234,5.
        done = subprocess.run(command, env={**os.environ, "LC_ALL": "C"}, stdout=subprocess.DEVNULL)
        text = counters.read_text() if counters.exists() else ""
        if "ERR_NVGPUCTRPERM" in text:
            raise RuntimeError(
                "this user may not read the GPU's counters: run as root, or see https://developer.nvidia.com/ERR_NVGPUCTRPERM"
            )
        if not log.exists():
            raise RuntimeError(f"the run under ncu failed with exit code {done.returncode}:\n{text[-2000:]}")
        run = json.loads(log.read_text())
        measured = by_pass(read_kernels(text), len(run["sizes"]))
    cells = [
        {"batch": batch, "seqlen": seqlen, "formula": formulas(batch, seqlen), "measured": passes}
        for (batch, seqlen), passes in zip(run["sizes"], measured)
    ]
    return {
        **about | {"gpu": run["gpu"]},
        "dtype": "float16",
        "heads": HEADS,
        "head_dim": HEAD_DIM,
        "paper": {"batch": GPT2_MEDIUM[0], "seqlen": GPT2_MEDIUM[1], "gigabytes_of_both_passes": PAPER},
        "cells": cells,
    }


def moved(passes, name):
    return passes[name]["read"] + passes[name]["write"]


def table(result):
    """Markdown: gigabytes measured (by formula), and how many times as much standard attention moves; the paper's."""
    lines = ["| batch | seqlen | " + " | ".join(PASSES) + " | ratio |", "|---" * (len(PASSES) + 3) + "|"]
    for cell in result["cells"]:
        passes = cell["measured"]
        cells = [f"{moved(passes, name) / 1e9:.2f} ({cell['formula'][name] / 1e9:.2f})" for name in PASSES]
        total = {name: sum(moved(passes, p) for p in PASSES if p.startswith(name)) for name in PAPER}
        ratio = f"{total['standard'] / total['cupyflash']:.1f}"
        lines.append("| " + " | ".join([str(cell["batch"]), str(cell["seqlen"]), *cells, ratio]) + " |")
    paper = result["paper"]
    standard, flash = (paper["gigabytes_of_both_passes"][name] for name in PAPER)
    size = f"batch {paper['batch']}, seqlen {paper['seqlen']}, both passes"
    lines += ["", f"The FlashAttention paper, {size}, on an A100: {standard} and {flash}, ratio {standard / flash:.1f}"]
    return "\n".join(lines)


def parse_arguments(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seqlens", nargs="*", type=count, default=[512, 1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--no-gpt2", action="store_false", dest="gpt2", help="leave out the size of the paper's table")
    parser.add_argument("--seconds", type=rate, default=45, help="begin no size after so many")
    parser.add_argument("--ncu", metavar="PATH", help="of Nsight Compute's command line")
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)  # of the process under ncu
    parser.add_argument("--sizes", type=json.loads, help=argparse.SUPPRESS)
    return output.parse(parser, __file__, arguments)


def main(arguments=None):
    options = parse_arguments(arguments)
    if options.run:
        run_passes(options.sizes, options.seconds, options.run)
        return 0
    try:
        result = measure(options)
    except RuntimeError as error:
        print(f"traffic.py: {error}", file=sys.stderr)
        return 2
    output.write(options, result)
    output.show(options, result, table(result), "traffic")
    return 0


if __name__ == "__main__":
    sys.exit(main())
