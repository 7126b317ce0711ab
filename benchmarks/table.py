"""Time and memory of standard attention, cupyflash and its peers from 128 to 65536 tokens, as a table and as a plot.

    python benchmarks/table.py [--shapes gpt2 bert-large] [--both-masks] [--keep] [--plot table.png]

The figures of the FlashAttention paper (arXiv 2205.14135, figure 3) in the shapes of GPT-2 (12 heads of 64, causal) and
BERT-large (16 heads of 64, not causal): batch * seqlen = 16384 tokens, one sequence beyond that. Standard attention
keeps all scores in memory, in CuPy (standard.py) and in PyTorch; where it runs out of memory the table says so. Peers
and paths of cupyflash are those of side_by_side.py, timed in turn; standard attention is timed before them, alone,
since its scores leave no room for others. Memory is the peak of a forward and a backward together, their results
included, beyond q, k, v and the gradient of the result. The last column is the figure of PyTorch's standard attention
over that of cupyflash.
"""

from __future__ import annotations

import argparse
import gc
import sys

import output
import side_by_side
import torch
import torch_attention
from side_by_side import TOKENS, Pair, ours, synchronize, to_cupy

from cupyflash.roofline_report import count, rate

SHAPES = {"gpt2": (12, 64, True), "bert-large": (16, 64, False)}  # heads, head_dim, causal
SEQLENS = [2**n for n in range(7, 17)]
STANDARD = ("standard-cupy", "standard-torch")
OUT_OF_MEMORY = "out of memory"


def standard_torch(q, k, v, dout, causal):
    return side_by_side.torch_pair(lambda *qkv: torch_attention.standard_attention(*qkv, causal), q, k, v, dout)


def standard_cupy(q, k, v, dout, causal):
    import standard

    if q.dtype != torch.float16:
        raise TypeError("standard.py knows float16 only")
    *qkv, dout_ = (to_cupy(x.transpose(1, 2).contiguous()) for x in (q, k, v, dout))

    def step():
        return standard.backward(dout_, *qkv, *standard.forward(*qkv, causal))

    out, weights = standard.forward(*qkv, causal)
    return Pair(
        lambda: standard.forward(*qkv, causal, weights)[0],
        lambda: standard.backward(dout_, *qkv, out, weights),
        synchronize,
        step,
    )


def implementations(paths, peers):
    """In groups that are timed together."""
    fused = {name: side_by_side.PEERS[name] for name in peers}
    fused |= {"cupyflash" if path == "default" else f"cupyflash-{path}": ours(path) for path in paths}
    return [{"standard-cupy": standard_cupy}, {"standard-torch": standard_torch}, fused]


def free():
    """Give the memory that both libraries keep for later back to the GPU."""
    import cupy

    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    cupy.get_default_memory_pool().free_all_blocks()


def peak_bytes(call):
    """Most memory that ``call`` held at a time, its results included, in PyTorch and in CuPy."""
    import cupy

    free()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    pool = cupy.cuda.MemoryPool()  # it never shrinks by itself, so its size is its high-water mark
    try:
        with cupy.cuda.using_allocator(pool.malloc):
            call()
            torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before + pool.total_bytes()
    finally:
        pool.free_all_blocks()  # else CuPy 14 keeps them, out of reach: its blocks and the pool's lists hold each other


def is_out_of_memory(error):
    return type(error).__name__ in ("OutOfMemoryError", "CUDARuntimeError") and "memory" in str(error).lower()


def measure_group(group, arrays, causal, timing, cell, missing):
    """Add milliseconds, bytes and failures of the implementations of ``group`` to ``cell``."""
    calls = {}
    for name, build in group.items():
        if name in missing:
            continue
        try:
            step = build(*arrays, causal).step  # without what the passes below keep
            if step:
                cell["bytes"][name] = peak_bytes(step)
        except ImportError as error:
            missing[name] = str(error)
            continue
        except Exception as error:  # an implementation that refuses a size must not end the run
            cell["failed"][f"{name}.memory"] = reason(error)
        free()
        try:
            pair = build(*arrays, causal)
        except Exception as error:
            cell["failed"] |= {f"{name}.{which}": reason(error) for which in side_by_side.PASSES}
            continue
        for which in side_by_side.PASSES:
            if call := getattr(pair, which):
                try:
                    pair.wait(call())
                    calls[f"{name}.{which}"] = call, pair.wait
                except Exception as error:
                    cell["failed"][f"{name}.{which}"] = reason(error)
    seconds = side_by_side.median_seconds(calls, *timing, least=1)
    cell["milliseconds"] |= {entry: round(1e3 * s, 4) for entry, s in seconds.items()}


def reason(error):
    return OUT_OF_MEMORY if is_out_of_memory(error) else f"{type(error).__name__}: {error}"[:200]


def measure_cell(groups, missing, timing, dtype, shape, causal, seqlen):
    """Milliseconds and bytes of every implementation at one size."""
    heads, head_dim, _ = shape
    size = (max(1, TOKENS // seqlen), seqlen, heads, head_dim)
    torch.manual_seed(0)
    arrays = [torch.randn(size, device="cuda", dtype=getattr(torch, dtype)) for _ in range(4)]
    cell = {"batch": size[0], "milliseconds": {}, "bytes": {}, "failed": {}}
    for group in groups:
        measure_group(group, arrays, causal, timing, cell, missing)
        free()
    return cell


def names_in(cell):
    """The implementations that have a figure or a failure there."""
    return {entry.rsplit(".", 1)[0] for entry in (*cell["milliseconds"], *cell["failed"])}


def names_of(result):
    found = set().union(*map(names_in, result["cells"].values()))
    order = [*STANDARD, *side_by_side.PEERS, "cupyflash-sm80", "cupyflash-sm90", "cupyflash"]
    return [name for name in order if name in found]


def both_passes(cell, name):
    """Milliseconds of forward and backward together, or None."""
    times = [cell["milliseconds"].get(f"{name}.{which}") for which in side_by_side.PASSES]
    return None if None in times else sum(times)


def table(result):
    """Markdown: for each shape and mask the milliseconds of the forward, of both passes, and the memory of both."""
    names, lines = names_of(result), []
    for title in dict.fromkeys(key.rsplit(" S", 1)[0] for key in result["cells"]):
        cells = {int(key.rsplit(" S", 1)[1]): c for key, c in result["cells"].items() if key.startswith(f"{title} S")}
        rows = (
            ("forward, ms", lambda cell, name: cell["milliseconds"].get(f"{name}.fwd"), 1, ("fwd",)),
            ("both passes, ms", both_passes, 1, side_by_side.PASSES),
            ("memory, MB", lambda cell, name: cell["bytes"].get(name), 1e-6, ("memory",)),
        )
        for what, value, unit, which in rows:
            lines += ["", f"| {title}: {what} | " + " | ".join(names) + " | ratio |"]
            lines.append("|---" * (len(names) + 2) + "|")
            for seqlen, cell in sorted(cells.items()):
                values = {name: value(cell, name) for name in names}
                texts = [text_of(values[name], failure(cell, name, which), unit) for name in names]
                theirs, own = values.get("standard-torch"), values.get("cupyflash")
                ratio = f"{theirs / own:.1f}" if theirs and own else ""
                lines.append(f"| {seqlen} | " + " | ".join([*texts, ratio]) + " |")
    return "\n".join(lines[1:])


def failure(cell, name, which):
    """Why one of ``which`` has no figure, or None."""
    return next((cell["failed"][f"{name}.{one}"] for one in which if f"{name}.{one}" in cell["failed"]), None)


def text_of(value, failed, unit):
    if value is None:
        return OUT_OF_MEMORY if failed == OUT_OF_MEMORY else "failed" if failed else "–"
    return f"{value * unit:.3g}" if value * unit < 1000 else f"{value * unit:.0f}"


def resumed(result, kept):
    """``result`` after an earlier one of the same GPU, software, dtype and timing: its sizes.

    Older ones are of a single command and commit, and leave the timing to the command.
    """
    commands = kept.get("commands") or [kept["command"]]
    commit = {"commit": kept["commit"]} if kept.get("commit") else {}
    cells = {key: commit | cell for key, cell in kept["cells"].items()}
    kept = timing_of(commands[0]) | kept | {"commands": commands, "cells": cells}
    return output.resumed(result, kept, "dtype", "rounds", "seconds")


def timing_of(command):
    """--rounds and --seconds of a command of this script."""
    parser = argparse.ArgumentParser(add_help=False)
    add_timing(parser)
    return vars(parser.parse_known_args(command.split())[0])


def add_timing(parser):
    parser.add_argument("--rounds", type=count, default=3)
    parser.add_argument("--seconds", type=rate, default=0.01, help="of one entry in one round")


def parse_arguments(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--both-masks", action="store_true", help="each shape causal and not")
    parser.add_argument("--seqlens", nargs="+", type=count, default=SEQLENS)
    parser.add_argument("--dtype", default="float16", choices=["float16", "bfloat16"])
    parser.add_argument("--peers", nargs="*", default=list(side_by_side.PEERS), choices=list(side_by_side.PEERS))
    parser.add_argument("--paths", nargs="+", default=["default", "sm80"], choices=["default", "sm80", "sm90"])
    parser.add_argument("--keep", action="store_true", help="keep the sizes that OUTPUT holds, measure the others")
    add_timing(parser)
    return output.parse(parser, __file__, arguments)


def main(arguments=None):
    options = parse_arguments(arguments)
    about = output.about(output.gpu_of(torch), torch)
    commit, command = about.pop("commit"), about.pop("command")
    result = {
        **about,
        "commands": [command],
        "dtype": options.dtype,
        "rounds": options.rounds,
        "seconds": options.seconds,
        "missing": {},
        "cells": {},
    }
    result = output.keep(options, result, resumed)
    groups = implementations(options.paths, options.peers)
    sizes = [
        (name, causal, seqlen)
        for seqlen in options.seqlens
        for name in options.shapes
        for causal in ((False, True) if options.both_masks else SHAPES[name][2:])
    ]
    for number, (name, causal, seqlen) in enumerate(sizes, 1):
        key, timing = f"{name} {'causal' if causal else 'full'} S{seqlen}", (options.rounds, options.seconds)
        wanted = {name for group in groups for name in group} - result["missing"].keys()
        if key in result["cells"] and wanted <= names_in(result["cells"][key]):
            continue
        cell = measure_cell(groups, result["missing"], timing, options.dtype, SHAPES[name], causal, seqlen)
        result["cells"][key] = {"commit": commit, **cell}
        output.progress(number, len(sizes), key, cell["failed"] or "")
        output.write(options, result)
    output.show(options, result, table(result), "time_and_memory")
    return side_by_side.exit_code(result)


if __name__ == "__main__":
    sys.exit(main())
