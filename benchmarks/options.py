"""What options cost: each beside the same call without any, and beside PyTorch's FlexAttention with the same function.

    python benchmarks/options.py [--head-dims 128] [--seqlens 8192] [--no-flex]

16384 tokens, heads * head_dim = 2048, bfloat16; all entries of a size are timed in turn, as side_by_side.py does it.
"cost" is the time of a pass without the option over that with it, "flex" the time of FlexAttention over ours. Results
that disagree with those of FlexAttention get no figure. torch.compile takes some ten seconds for each option.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from datetime import datetime, timezone
from pathlib import Path

import output
import side_by_side
import torch
from side_by_side import PASSES, TOKENS, WIDTH, Pair, synchronize, to_cupy, to_torch, torch_pair

from cupyflash.roofline_report import count, rate

CAP, WINDOW, DROPPED, TOLERANCE = 30.0, 1024, {"dropout": 0.1, "seed": 0}, 2e-2


def slopes(heads):
    """Of the ALiBi paper, for a power of two."""
    return 2.0 ** (-8 * torch.arange(1, heads + 1, device="cuda", dtype=torch.float32) / heads)


def softcap_mod(score, b, h, i, j):
    return CAP * torch.tanh(score / CAP)


def alibi_mod(heads):
    steep = slopes(heads)
    return lambda score, b, h, i, j: score - steep[h] * (i - j).abs()


def in_window(b, h, i, j):
    return (j <= i) & (i - j <= WINDOW)


def causal(b, h, i, j):
    return j <= i


# Of each entry: the options of cupyflash, the score function and the mask function of FlexAttention, of `heads`.
ENTRIES = {
    "no option": lambda heads: ({}, None, None),
    "causal": lambda heads: ({"causal": True}, None, causal),
    "softcap": lambda heads: ({"softcap": CAP}, softcap_mod, None),
    "causal softcap": lambda heads: ({"causal": True, "softcap": CAP}, softcap_mod, causal),
    "softcap of 1": lambda heads: ({"softcap": 1.0}, lambda score, b, h, i, j: torch.tanh(score), None),
    "alibi": lambda heads: ({"alibi_slopes": slopes(heads)}, alibi_mod(heads), None),
    "causal alibi": lambda heads: ({"causal": True, "alibi_slopes": slopes(heads)}, alibi_mod(heads), causal),
    "window": lambda heads: ({"causal": True, "window": (WINDOW, None)}, None, in_window),
    "dropout": lambda heads: (DROPPED, None, None),  # which FlexAttention lacks
    "causal dropout": lambda heads: ({"causal": True} | DROPPED, None, None),
}


def ours(qkv, dout, options):
    """Both passes of cupyflash and, for the check, the results of each."""
    import cupy

    from cupyflash import attention, attention_backward

    q, k, v, dout = (to_cupy(x) for x in (*qkv, dout))
    options = {name: cupy.from_dlpack(x) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    out, lse = attention(q, k, v, return_lse=True, **options)
    saved = (dout, q, k, v, out, lse)
    gradients = attention_backward(*saved, **options)[:3]
    results = [to_torch(x, torch.bfloat16) for x in (out, *gradients)]
    forward, backward = lambda: attention(q, k, v, **options), lambda: attention_backward(*saved, **options)
    return Pair(forward, backward, synchronize), results


def flex(qkv, dout, score_mod, mask_mod):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    seqlen = qkv[0].shape[1]
    mask = create_block_mask(mask_mod, None, None, seqlen, seqlen) if mask_mod else None
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)

    def function(*heads_first):
        return compiled(*heads_first, score_mod=score_mod, block_mask=mask)

    heads_first = [x.transpose(1, 2) for x in (*qkv, dout)]
    pair = torch_pair(function, *heads_first)
    return pair, [x.transpose(1, 2) for x in (pair.fwd(), *pair.bwd())]


def check(got, expected):
    for name, x, y in zip(("out", "dq", "dk", "dv"), got, expected):
        error = ((x.float() - y.float()).norm() / y.float().norm()).item()
        if not error < TOLERANCE:
            raise ArithmeticError(f"{name} is {error:.2g} from that of FlexAttention")


def measure(head_dim, seqlen, timing, with_flex):
    """Milliseconds and ratios of every entry at one size."""
    torch.manual_seed(0)
    torch._dynamo.config.recompile_limit = 64  # one function is compiled for every entry
    heads = WIDTH // head_dim
    shape = (TOKENS // seqlen, seqlen, heads, head_dim)
    *qkv, dout = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    calls, failed = {}, {}
    for name, make in ENTRIES.items():
        options, score_mod, mask_mod = make(heads)
        try:
            pairs = {}
            pairs[name], results = ours(qkv, dout, options)
            if with_flex and "dropout" not in name:
                pairs[f"flex {name}"], expected = flex(qkv, dout, score_mod, mask_mod)
                check(results, expected)
        except Exception as error:  # the others go on
            failed[name] = f"{type(error).__name__}: {error}"[:300]
        else:
            for entry, pair in pairs.items():
                calls |= {f"{entry}.{which}": (getattr(pair, which), pair.wait) for which in PASSES}
    seconds = side_by_side.median_seconds(calls, *timing)
    return {"milliseconds": {name: round(1e3 * s, 4) for name, s in seconds.items()}, "failed": failed}


def ratios(cell, name, which):
    """(cost, flex) of one pass of an entry; None where there is no figure."""
    times = cell["milliseconds"]
    own, plain = times.get(f"{name}.{which}"), times.get(f"{'causal' if 'causal' in name else 'no option'}.{which}")
    other = times.get(f"flex {name}.{which}")
    return plain and own and plain / own, other and own and other / own


def table(result):
    """Markdown."""
    lines = ["| size | option | cost, forward | backward | FlexAttention / cupyflash, forward | backward |"]
    lines.append("|---" * 6 + "|")
    for key, cell in result["cells"].items():
        for name in ENTRIES:
            if name in cell["failed"]:
                lines.append(f"| {key} | {name} | {cell['failed'][name]} | | | |")
                continue
            figures = [x for pair in zip(*(ratios(cell, name, which) for which in PASSES)) for x in pair]
            if "window" in name:
                figures[:2] = None, None  # it computes less than what it is compared with
            lines.append(f"| {key} | {name} | " + " | ".join("–" if x is None else f"{x:.2f}" for x in figures) + " |")
    return "\n".join(lines)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--head-dims", nargs="+", type=count, default=[128])
    parser.add_argument("--seqlens", nargs="+", type=count, default=[8192])
    parser.add_argument("--no-flex", action="store_true", help="without FlexAttention, and so without a check")
    parser.add_argument("--rounds", type=count, default=5)
    parser.add_argument("--seconds", type=rate, default=0.03, help="of one entry in one round")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--output", type=output.file, default=Path(__file__).with_suffix(".json"))
    options = parser.parse_args(arguments)
    side_by_side.check_seqlens(parser, options)
    if not torch.cuda.is_available():
        print("options.py needs a CUDA GPU; PyTorch finds none", file=sys.stderr)
        return 2
    start = time.perf_counter()
    result = {
        "gpu": torch.cuda.get_device_name(),
        "versions": output.versions(),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "command": output.command(),
        "cells": {},
    }
    for head_dim in options.head_dims:
        for seqlen in options.seqlens:
            cell = measure(head_dim, seqlen, (options.rounds, options.seconds), not options.no_flex)
            result["cells"][f"d{head_dim} S{seqlen}"] = cell
            print(f"[{time.perf_counter() - start:.0f} s] d{head_dim} S{seqlen}", cell["failed"] or "", file=sys.stderr)
            output.write(options, result)
    print(json.dumps(result) if options.json else table(result))
    return 1 if any(cell["failed"] for cell in result["cells"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
