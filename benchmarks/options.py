"""What options cost: each beside the same call without any, and beside PyTorch's FlexAttention with the same function.

    python benchmarks/options.py [--only "causal alibi,bias SxS"] [--no-flex]

16384 tokens, heads * head_dim = 2048, bfloat16, as side_by_side.py; head_dim 128 and 8192 tokens a batch, but for rows
that name others. "Speed" is the time of a pass without the option over that with it, "over FlexAttention" the time of
FlexAttention over ours. A row's calls are timed in turn, and the file is written after each row: what fails is named
in the table, and the others go on. What disagrees with FlexAttention gets no figure beside it. Kernels are compiled
first, several at once; torch.compile then takes some seconds for each function.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

import output
import side_by_side
import torch
from side_by_side import PASSES, TOKENS, WIDTH, Pair, synchronize, torch_pair
from torch.nn.attention import flex_attention as flex_module

from cupyflash import BlockMask, MaskMod, ScoreMod, attention, attention_backward
from cupyflash.roofline_report import count, rate

DEVICE, BLOCK = "cuda", 128
CAP, DROPPED, TOLERANCE = 30.0, {"dropout": 0.1, "seed": 0}, 2e-2
WINDOW = DOCUMENT = 1024  # documents have as many tokens, or up to twice that
ALIBI, SAME_DOCUMENT = "score - slope[h] * fabs(float(i - j))", "document[i] == document[j]"
METHOD = (
    "milliseconds of a call, by the host's clock around calls without a pause, those of a row in turn: median of {} "
    "samples of {} s, each after as long untimed. FlexAttention by torch.compile in its default mode; its backward "
    "alone, by autograd.grad. speed: time without the option over time with it; over flex: time of FlexAttention over "
    "ours"
)


class Size(NamedTuple):
    head_dim: int = 128
    seqlen: int = 8192

    @property
    def heads(self):
        return WIDTH // self.head_dim

    @property
    def blocks(self):
        return self.seqlen // BLOCK


class Row(NamedTuple):
    """What a row measures. A "bias" is differentiated in the backward, but where "bias_gradient" is False."""

    options: Callable  # of cupyflash, for a size
    flex: Callable | None = None  # the same for FlexAttention; "bias" is a tensor that it adds
    base: str = "none"  # the row without the option
    size: Size = Size()


# What is given to both.


def seeded(seed=0):
    return torch.Generator(DEVICE).manual_seed(seed)


@functools.cache
def inputs(size):
    """q, k, v and dout."""
    shape, generator = (TOKENS // size.seqlen, size.seqlen, size.heads, size.head_dim), seeded()
    return [torch.randn(shape, generator=generator, device=DEVICE, dtype=torch.bfloat16) for _ in range(4)]


def normal(*shape):
    return torch.randn(shape, generator=seeded(1), device=DEVICE, dtype=torch.bfloat16)


def shown(probability, *shape):
    return torch.rand(shape, generator=seeded(2), device=DEVICE) < probability


def slopes(size):
    """Of the ALiBi paper, for a power of two."""
    return 2.0 ** (-8 * torch.arange(1, size.heads + 1, device=DEVICE, dtype=torch.float32) / size.heads)


def documents(size, multiple=1):
    """The document of each token; lengths are multiples of ``multiple``."""
    number, shortest = size.seqlen // DOCUMENT, DOCUMENT // multiple
    lengths = torch.randint(shortest, 2 * shortest + 1, (number,), generator=seeded(3), device=DEVICE)
    ids = torch.arange(number, device=DEVICE, dtype=torch.int32)
    return ids.repeat_interleave(multiple * lengths)[: size.seqlen]


def touched(document):
    """Blocks in which a query and a key are of one document."""
    first, last = document[::BLOCK], document[BLOCK - 1 :: BLOCK]
    return (first[:, None] <= last) & (first <= last[:, None])


def full(document):
    """Blocks in which all are."""
    first, last = document[::BLOCK], document[BLOCK - 1 :: BLOCK]
    return (first[:, None] == last) & (first == last[:, None])


# Options of cupyflash.


def softcap(size):
    return {"softcap": CAP}


def alibi(size):
    return {"alibi_slopes": slopes(size)}


def score_mod(size):
    return {"score_mod": ScoreMod(ALIBI, slope=slopes(size))}


def bias(size):
    return {"bias": normal(size.seqlen, size.seqlen)}


def bias_of_heads(size):
    return {"bias": normal(size.heads, size.seqlen, size.seqlen)}


def bias_of_keys(size):
    return {"bias": normal(size.seqlen)}


def constant(options):
    return lambda size: options(size) | {"bias_gradient": False}


constant_bias = constant(bias)


def causal(options=lambda size: {}):
    return lambda size: {"causal": True} | options(size)


def documents_by_function(size):
    document = documents(size)
    blocks = BlockMask(touched(document), full=full(document))
    return {"mask_mod": MaskMod(SAME_DOCUMENT, document=document), "block_mask": blocks}


def documents_by_elements(size):
    document = documents(size)
    return {"block_mask": BlockMask.from_mask(document[:, None] == document)}


def mask_of_blocks(size):
    blocks = shown(0.5, size.blocks, size.blocks)
    return {"mask": blocks.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)}


def sparse(size):
    return shown(0.25, size.heads, size.blocks, size.blocks)


def whole_documents(size):
    return {"block_mask": BlockMask(touched(documents(size, BLOCK)))}


def sparse_blocks(size):
    return {"block_mask": BlockMask(sparse(size))}


# Options of FlexAttention.


def flex_softcap(size):
    return {"score_mod": lambda score, b, h, i, j: CAP * torch.tanh(score / CAP)}


def flex_alibi(size):
    steep = slopes(size)
    return {"score_mod": lambda score, b, h, i, j: score - steep[h] * (i - j).abs()}


def flex_mask(function, size):
    mask = flex_module.create_block_mask(function, None, None, size.seqlen, size.seqlen, device=DEVICE)
    return {"block_mask": mask}


def flex_causal(size):
    return flex_mask(lambda b, h, i, j: j <= i, size)


def flex_causal_softcap(size):
    return flex_softcap(size) | flex_causal(size)


def flex_causal_alibi(size):
    return flex_alibi(size) | flex_causal(size)


def flex_window(size):
    return flex_mask(lambda b, h, i, j: (j <= i) & (i - j <= WINDOW), size)


def flex_documents(size, multiple=1):
    document = documents(size, multiple)
    return flex_mask(lambda b, h, i, j: document[i] == document[j], size)


def flex_whole_documents(size):
    return flex_documents(size, BLOCK)


def flex_sparse(size):
    """The blocks as they are: create_block_mask would make all elements first."""
    blocks = sparse(size)
    counts = blocks.sum(-1, dtype=torch.int32)[None]
    order = blocks.int().argsort(dim=-1, descending=True, stable=True).int()[None]

    def is_shown(b, h, i, j):
        return blocks[h, i // BLOCK, j // BLOCK]

    none = torch.zeros_like(counts)  # is shown in part
    mask = flex_module.BlockMask.from_kv_blocks(none, order, counts, order, BLOCK_SIZE=BLOCK, mask_mod=is_shown)
    return {"block_mask": mask}


LONG, NARROW = Size(128, 16384), Size(64, 16384)
ROWS = {
    "none": Row(lambda size: {}, lambda size: {}),
    "softcap": Row(softcap, flex_softcap),
    "alibi": Row(alibi, flex_alibi),
    "score_mod alibi": Row(score_mod, flex_alibi),
    "dropout": Row(lambda size: DROPPED),  # which FlexAttention lacks
    "bias HxSxS": Row(bias_of_heads),
    "bias SxS": Row(bias, bias),
    "bias S": Row(bias_of_keys),
    "constant bias HxSxS": Row(constant(bias_of_heads)),
    "constant bias SxS": Row(constant_bias, constant_bias),
    "constant bias S": Row(constant(bias_of_keys)),
    "mask SxS": Row(lambda size: {"mask": shown(0.7, size.seqlen, size.seqlen)}),
    "mask SxS of blocks": Row(mask_of_blocks),
    "causal": Row(causal(), flex_causal, base="causal"),
    "causal softcap": Row(causal(softcap), flex_causal_softcap, base="causal"),
    "causal alibi": Row(causal(alibi), flex_causal_alibi, base="causal"),
    "causal score_mod alibi": Row(causal(score_mod), flex_causal_alibi, base="causal"),
    "causal dropout": Row(causal(lambda size: DROPPED), base="causal"),
    "causal bias SxS": Row(causal(bias), base="causal"),
    "window": Row(lambda size: {"causal": True, "window": (WINDOW, None)}, flex_window, base="causal"),
    "documents by mask_mod and block_mask": Row(documents_by_function, flex_documents),
    "documents by block_mask of elements": Row(documents_by_elements, flex_documents),
    "documents of whole blocks": Row(whole_documents, flex_whole_documents),
    "d128 S16384": Row(lambda size: {}, base="d128 S16384", size=LONG),
    "d128 S16384 blocks": Row(sparse_blocks, flex_sparse, "d128 S16384", LONG),
    "d64 S16384": Row(lambda size: {}, base="d64 S16384", size=NARROW),
    "d64 S16384 blocks": Row(sparse_blocks, flex_sparse, "d64 S16384", NARROW),
}


def ours(options, size):
    """Both passes of cupyflash and, for the check, the results of each."""
    *qkv, dout = inputs(size)
    both = {name: value for name, value in options.items() if name != "bias_gradient"}
    out, lse = attention(*qkv, return_lse=True, **both)
    saved = (dout, *qkv, out, lse)
    dq, dk, dv, dbias, *_ = attention_backward(*saved, **options)
    pair = Pair(lambda: attention(*qkv, **both), lambda: attention_backward(*saved, **options), synchronize)
    return pair, [x for x in (out, dq, dk, dv, dbias) if x is not None]


@functools.cache  # rows share functions
def flex(make, size):
    compiled = torch.compile(flex_module.flex_attention, dynamic=False, fullgraph=True)
    options = make(size)
    bias, gradient = options.pop("bias", None), options.pop("bias_gradient", True)
    learned = [bias] if bias is not None and gradient else []

    def function(q, k, v, bias=bias):
        added = {} if bias is None else {"score_mod": lambda score, b, h, i, j: score + bias[i, j]}
        return compiled(q, k, v, **options, **added)

    *qkv, dout = (x.transpose(1, 2) for x in inputs(size))
    pair = torch_pair(function, *qkv, *learned, dout)
    results = [pair.fwd(), *pair.bwd()]
    return pair, [x.transpose(1, 2) for x in results[:4]] + results[4:]


def check(got, expected):
    for name, (x, y) in zip(("out", "dq", "dk", "dv", "dbias"), zip(got, expected, strict=True)):
        error = ((x.float() - y.float()).norm() / y.float().norm()).item()
        if not error < TOLERANCE:
            raise ArithmeticError(f"{name} is {error:.2g} from that of FlexAttention")


def compile_ours(names):
    """First calls, in threads: NVRTC takes seconds for each kernel."""

    def call(name):
        with suppress(Exception):  # it comes again where it is named
            ours(ROWS[name].options(ROWS[name].size), ROWS[name].size)

    with ThreadPoolExecutor() as pool:
        list(pool.map(call, {*names, *(ROWS[name].base for name in names)}))
    torch.cuda.synchronize()


def measure(name, timing, with_flex):
    """Milliseconds, ratios and what failed of one row."""
    row, pairs, failed = ROWS[name], {}, {}
    try:
        pairs["cupyflash"], results = ours(row.options(row.size), row.size)
        if row.base != name:
            pairs["without"], _ = ours(ROWS[row.base].options(row.size), row.size)
    except Exception as error:  # the others go on
        failed["cupyflash"] = shortened(error)
    if with_flex and row.flex and not failed:
        try:
            pairs["flex"], expected = flex(row.flex, row.size)
            check(results, expected)
        except Exception as error:
            pairs.pop("flex", None)
            failed["flex"] = shortened(error)
    calls = {f"{entry}.{which}": (getattr(pair, which), pair.wait) for entry, pair in pairs.items() for which in PASSES}
    try:
        seconds = {} if "cupyflash" in failed else side_by_side.median_seconds(calls, *timing)
    except Exception as error:
        seconds, failed["timing"] = {}, shortened(error)
    milliseconds = {entry: round(1e3 * s, 4) for entry, s in seconds.items()}
    return row.size._asdict() | ratios(seconds) | {"milliseconds": milliseconds, "failed": failed}


def shortened(error):
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def ratios(seconds):
    """What the table shows of a row; None where there is no figure."""

    def over(entry, which):
        own, other = seconds.get(f"cupyflash.{which}"), seconds.get(f"{entry}.{which}")
        return own and other and round(other / own, 3)

    kinds = (("speed", "without"), ("over flex", "flex"))
    return {f"{kind} {which}": over(entry, which) for kind, entry in kinds for which in PASSES}


COLUMNS = ("speed fwd", "speed bwd", "over flex fwd", "over flex bwd")


def line(name, row):
    """Of the table, in Markdown."""
    figures = ["–" if row[column] is None else f"{row[column]:.2f}" for column in COLUMNS]
    said = "; ".join(f"{what}: {error}" for what, error in row["failed"].items()).replace("|", "\\|")
    return f"| {name} | {' | '.join(figures)} | {said} |"


def table(result):
    """Markdown."""
    lines = [
        "| option | speed, forward | backward | over FlexAttention, forward | backward | failed |",
        "|---" * 6 + "|",
    ]
    return "\n".join([*lines, *(line(name, row) for name, row in result["rows"].items())])


def rows(text):
    """Names of rows, from the command line."""
    names = text.split(",")
    for name in names:
        if name not in ROWS:
            raise argparse.ArgumentTypeError(f"there is no row {name!r}; allowed: {', '.join(ROWS)}")
    return names


def kept(parser, options, result):
    """The rows that the file holds, where only some are measured."""
    if not (options.only and options.output.exists()):
        return {}
    try:
        before = json.loads(options.output.read_text())
        held, commands = dict(before["rows"]), list(before["commands"])
        table(before)  # rows that are not whole
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        parser.error(f"{options.output}: no result of options.py can be read there: {type(error).__name__}: {error}")
    for what in ("gpu", "versions", "method"):
        if before.get(what) != result[what]:
            parser.error(f"{options.output} has {what} {before.get(what)}, this run {result[what]}; allowed: the same")
    result["commands"] = [*dict.fromkeys(commands + result["commands"])]
    return held


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", type=rows, metavar="NAME,...", help="rows; OUTPUT keeps the others that it holds")
    parser.add_argument("--no-flex", action="store_true", help="without FlexAttention, and so without a check")
    parser.add_argument("--rounds", type=count, default=5)
    parser.add_argument("--seconds", type=rate, default=0.03, help="of one entry in one round")
    options = output.parse(parser, __file__, arguments, plot=False)
    about = output.about(output.gpu_of(torch), torch)
    commands = [about.pop("command")]
    result = {
        **about,
        "commands": commands,
        "method": METHOD.format(options.rounds, options.seconds),
        "inputs": f"bfloat16, {TOKENS} tokens, heads * head_dim = {WIDTH}",
    }
    known = kept(parser, options, result)
    result["rows"] = {}
    torch._dynamo.config.recompile_limit = 64  # one function is compiled for every row
    wanted = options.only or list(ROWS)
    compile_ours(wanted)
    output.progress(0, len(wanted), "compiled")
    for number, name in enumerate(wanted, 1):
        row = measure(name, (options.rounds, options.seconds), not options.no_flex)
        known[name] = {"commit": about["commit"], **row}
        result["rows"] = {name: known[name] for name in ROWS if name in known}
        output.progress(number, len(wanted), line(name, row))
        output.write(options, result)
    output.show(options, result, table(result))
    return 1 if any(known[name]["failed"] for name in wanted) else 0


if __name__ == "__main__":
    sys.exit(main())
