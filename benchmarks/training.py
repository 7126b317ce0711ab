"""Training GPT-2 small from end to end with standard attention, with PyTorch's own and with cupyflash.

    python benchmarks/training.py [--seqlens 1024 4096 16384] [--plot training.png] [--json]

A step is forward, loss, backward and AdamW, in plain PyTorch: 12 layers of 12 heads, width 768, a vocabulary of 50257
padded to 50304, 16384 tokens a step in sequences of one length. Weights are float32, products bfloat16 by autocast.
Attention alone differs: "standard" keeps all scores in memory (torch_attention.py), "torch" is
scaled_dot_product_attention with the backend that PyTorch chooses, "cupyflash" the autograd function of
torch_attention.py. Each gets q, k and v in bfloat16, outside of autocast, which would have standard attention keep its
weights in float32, at twice the memory. Standard attention that runs out of memory is said to.

All start with the same random weights and see one batch of random tokens in every step, so that they learn it by heart.
The run is a check, too: the losses of the first and of the last step, and the gradients that the weights of q, k and v
get in the first one, must agree within TOLERANCES, or the exit code is 1. The last loss says least: AdamW divides by
the size of a gradient, and so makes of any rounding a step of full length (standard attention and PyTorch's own were
1.1 % apart after 20 steps).

Steps are timed in turn, round after round, and after as many untimed ones of the same kind; a figure is the median of
the rounds. Memory is the peak of the first two steps, weights and state of the optimizer included: what PyTorch
allocates, and to it what CuPy's pool grows to, which holds what the backward needs beside its results.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time

import output

try:
    import torch
except ImportError:
    output.lacks("PyTorch is missing; pip install torch")
import torch.nn.functional as F
from table import OUT_OF_MEMORY, free, reason
from torch import nn
from torch_attention import attention, standard_attention

from cupyflash.roofline_report import count

SIZES = {"layers": 12, "heads": 12, "width": 768, "vocabulary": 50304}
# Relative: of the losses to the least one, of the gradients to those of the first implementation, by their norm.
ON_NUMPY = (
    "On NumPy: --cpu --layers 2 --heads 2 --width 32 --vocabulary 128 --seqlens 32 --tokens 128 "
    "--output training-numpy.json"
)
TOLERANCES = {"first": 1e-3, "last": 5e-2, "gradients": 5e-2}


def torch_attention(q, k, v, causal):
    """Attention by the backend that PyTorch chooses."""
    out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal)
    return out.transpose(1, 2)


IMPLEMENTATIONS = {"standard": standard_attention, "torch": torch_attention, "cupyflash": attention}


class Block(nn.Module):
    """One layer, which normalises before each part."""

    def __init__(self, width, heads, attend):
        super().__init__()
        self.heads, self.attend = heads, attend
        self.norm, self.qkv, self.mix = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        qkv = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1))
        with torch.autocast(x.device.type, enabled=False):
            out = self.attend(*qkv.unbind(2), causal=True)
        x = x + self.mix(out.flatten(2))
        return x + self.feed(x)


class GPT(nn.Module):
    """GPT-2, from tokens (batch, seqlen) to the logits of those that follow; the embedding is the head, too."""

    def __init__(self, attend, layers, heads, width, vocabulary, positions):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(positions, width)
        self.blocks = nn.Sequential(*(Block(width, heads, attend) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                adds = name.endswith(("mix.weight", "feed.3.weight"))  # to the residual stream
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if adds else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return F.linear(self.norm(self.blocks(x)), self.tokens.weight)


class Training:
    """A model, its optimizer, the one batch that it sees, and the losses so far."""

    def __init__(self, attend, sizes, batch, seqlen, device):
        torch.manual_seed(0)
        with torch.device(device):
            self.model = GPT(attend, **sizes, positions=seqlen)
            tokens = torch.randint(sizes["vocabulary"], (batch, seqlen + 1))
        self.inputs, self.targets = tokens[:, :-1], tokens[:, 1:].flatten()
        rates = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **rates, fused=True)
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self.losses, self.gradients = [], None

    def step(self):
        with torch.autocast(self.inputs.device.type, torch.bfloat16):
            loss = F.cross_entropy(self.model(self.inputs).flatten(0, 1), self.targets)
        loss.backward()
        if self.gradients is None:
            weights = [block.qkv.weight.grad for block in self.model.blocks]
            self.gradients = torch.stack([x.unflatten(0, (3, -1)).cpu() for x in weights], dim=1)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(loss.detach())

    def seconds(self, steps):
        """Of one of so many steps, after as many untimed ones."""
        for _ in range(2):
            synchronize()
            start = time.perf_counter()
            for _ in range(steps):
                self.step()
        synchronize()
        return (time.perf_counter() - start) / steps


def synchronize():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def begin_peak(device):
    """Bytes in use, in PyTorch and in CuPy, before the peak that `peak_bytes` finds; None without a GPU."""
    if device == "cpu":
        return None
    free()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated(), pool_bytes()


def peak_bytes(before):
    """Most memory held since then, beyond that."""
    return before and {"torch": torch.cuda.max_memory_allocated() - before[0], "cupy": pool_bytes() - before[1]}


def pool_bytes():
    """Of CuPy's pool for all threads, as autograd has its own; it never shrinks by itself."""
    import cupy

    return cupy.get_default_memory_pool().total_bytes()


def attempt(name, failed, function, *arguments):
    """What the function of the implementation ``name`` returns; None where it fails, and ``failed`` says why."""
    try:
        return function(*arguments)
    except Exception as error:  # must not end the run
        failed[name] = reason(error)


def begin(name, sizes, batch, seqlen, device):
    """A training after its first two steps; the second one finds the state of the optimizer in memory."""
    training = Training(IMPLEMENTATIONS[name], sizes, batch, seqlen, device)
    training.step()
    training.step()
    synchronize()
    return training


def measure_cell(options, seqlen, device):
    """Time, memory and losses of every implementation at one length."""
    batch = options.tokens // seqlen
    sizes = {name: getattr(options, name) for name in SIZES}
    peaks, failed, trainings, samples = {}, {}, {}, {}
    for name in options.attention:
        output.progress(len(trainings), len(options.attention), f"S{seqlen}: {name} begins")
        before = begin_peak(device)
        training = attempt(name, failed, begin, name, sizes, batch, seqlen, device)
        if training:
            trainings[name], samples[name], peaks[name] = training, [], peak_bytes(before)
    training = None  # a model that fails must not live on in it
    for _ in range(options.rounds):
        for name in list(trainings):
            samples[name].append(attempt(name, failed, trainings[name].seconds, options.steps))
            if name in failed:
                del trainings[name], peaks[name]
                if device != "cpu":
                    free()  # for those that go on
    seconds = {name: statistics.median(samples[name]) for name in trainings}
    return {
        "batch": batch,
        "parameters": next((training.parameters for training in trainings.values()), None),
        "steps": 2 + 2 * options.rounds * options.steps,
        "milliseconds": {name: round(1e3 * s, 3) for name, s in seconds.items()},
        "tokens_per_second": {name: round(batch * seqlen / s) for name, s in seconds.items()},
        "peak_bytes": peaks,
        "loss": {name: [x.losses[0].item(), x.losses[-1].item()] for name, x in trainings.items()},
        "differences": differences(list(trainings.values())),
        "failed": failed,
    }


def differences(trainings):
    """How far losses and gradients are apart, relatively."""
    if not trainings:
        return {}
    found = {}
    for which, place in (("first", 0), ("last", -1)):
        losses = [training.losses[place].item() for training in trainings]
        found[which] = max(losses) / min(losses) - 1 if all(map(math.isfinite, losses)) else math.inf
    right = trainings[0].gradients
    norms = right.flatten(1).norm(dim=1)  # of q, k and v
    apart = [((x.gradients - right).flatten(1).norm(dim=1) / norms).max().item() for x in trainings]
    found["gradients"] = max(apart) if all(map(math.isfinite, apart)) else math.inf
    return found


def complaints(result):
    """What is wrong with a run: differences over the tolerance, failures other than of standard attention's memory."""
    found = []
    for key, cell in result["cells"].items():
        for which, tolerance in result["tolerances"].items():
            if not cell["differences"].get(which, 0) <= tolerance:
                found.append(f"{key}: {which} differ by {cell['differences'][which]:.2g}; tolerance {tolerance:g}")
        for name, why in cell["failed"].items():
            if (name, why) != ("standard", OUT_OF_MEMORY):
                found.append(f"{key}: {name} failed: {why}")
    return found


def table(result):
    """Markdown: a row for each length and implementation."""
    header = "seqlen|batch|attention|ms a step|tokens/s|speed-up|memory, GB|first loss|last loss".split("|")
    lines = [header, ["---"] * len(header)]
    for key, cell in result["cells"].items():
        rates = cell["tokens_per_second"]
        for name in result["attention"]:
            start = [key.removeprefix("S"), cell["batch"], name]
            if name in cell["failed"]:
                why = OUT_OF_MEMORY if cell["failed"][name] == OUT_OF_MEMORY else "failed"
                lines.append([*start, why, *["–"] * 5])
                continue
            peak = cell["peak_bytes"][name]
            lines.append(
                [
                    *(*start, f"{cell['milliseconds'][name]:.1f}", f"{rates[name]:,}"),
                    f"{rates[name] / rates['standard']:.2f}" if "standard" in rates else "–",
                    f"{sum(peak.values()) / 1e9:.2f}" if peak else "–",
                    *(f"{loss:.4f}" for loss in cell["loss"][name]),
                ]
            )
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def caption(result):
    """The model, the run and how far the results are apart."""
    cells = result["cells"]
    parameters = sorted({cell["parameters"] for cell in cells.values() if cell["parameters"]})
    millions = " and ".join(f"{1e-6 * number:.4g}" for number in parameters)
    apart = {which: max(cell["differences"].get(which, 0) for cell in cells.values()) for which in TOLERANCES}
    return (
        f"{result['layers']} layers of {result['heads']} heads, width {result['width']}, {millions} million weights; "
        f"{result['tokens']} tokens a step, bfloat16; {result['gpu']}, {result['date']}. Apart by at most: losses of "
        f"the first step {apart['first']:.1g}, of the last {apart['last']:.1g}, gradients {apart['gradients']:.1g}."
    )


def parse_arguments(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--attention", nargs="+", default=list(IMPLEMENTATIONS), choices=list(IMPLEMENTATIONS))
    parser.add_argument("--seqlens", nargs="+", type=count, default=[1024, 4096], metavar="N")
    parser.add_argument("--tokens", type=count, default=16384, metavar="N", help="of a step")
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=count, default=default, metavar="N")
    parser.add_argument("--rounds", type=count, default=5, metavar="N")
    parser.add_argument("--steps", type=count, default=4, metavar="N", help="timed in a round, after as many untimed")
    parser.add_argument("--cpu", action="store_true", help="no GPU, cupyflash on NumPy: for small sizes")
    options = output.parse(parser, __file__, arguments)
    if options.width % options.heads:
        parser.error(f"--width is {options.width}; allowed: multiples of --heads, {options.heads}")
    for seqlen in options.seqlens:
        if options.tokens % seqlen:
            parser.error(f"--seqlens has {seqlen}; allowed: divisors of --tokens, {options.tokens}")
    return options


def main(arguments=None):
    options = parse_arguments(arguments)
    device = "cpu" if options.cpu else "cuda"
    result = {
        **output.about("CPU, NumPy backend" if options.cpu else output.gpu_of(torch, ON_NUMPY), torch),
        "dtype": "bfloat16",
        "attention": options.attention,
        "tokens": options.tokens,
        **{name: getattr(options, name) for name in SIZES},
        "tolerances": TOLERANCES,
        "cells": {},
    }
    # What the libraries of PyTorch allocate once is not to be counted for the implementation that comes first.
    Training(torch_attention, {"layers": 1, "heads": 1, "width": 64, "vocabulary": 64}, 1, 64, device).step()
    for number, seqlen in enumerate(options.seqlens, 1):
        cell = result["cells"][f"S{seqlen}"] = measure_cell(options, seqlen, device)
        output.progress(number, len(options.seqlens), f"S{seqlen}", cell["tokens_per_second"], cell["failed"] or "")
        output.write(options, result)
    output.show(options, result, f"{caption(result)}\n\n{table(result)}", "training")
    found = complaints(result)
    for complaint in found:
        print(f"training.py: {complaint}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
