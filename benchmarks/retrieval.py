"""A small transformer learns to find one item among 65,536, which standard attention has no memory for.

    python benchmarks/retrieval.py [--items 65536] [--plot retrieval.png] [--json]

A sequence is a table in disorder. Each item holds a key, a value, and the key of some item whose value it asks for; the
item at which it finds that may stand anywhere, so each of the 65,536 queries has to look at all 65,536 items. A key is
one of 65,536, written as two symbols of 256; a value is one of 64. The keys are dealt anew for each sequence, so that
nothing can be learnt by heart.

Training starts with many short sequences and makes them longer by a factor of 4, with as many items a step, once 95 %
of the answers are right: 4096 sequences of 16 items, ..., one of 65,536. At the full length the rate of learning goes
down to 0. The score is that on sequences never seen.

Two layers of 8 heads of 32 in bfloat16: for each of them standard attention keeps 69 GB of weights, and makes 69 GB of
scores to get them. One step with it is tried before. Without a GPU the same runs on NumPy, in float32, up to 4096
items: with --items 256 --tokens 4096 it takes about a minute, on busy cores several.
"""

from __future__ import annotations

import argparse
import sys
import time

import output

try:
    import torch
except ImportError:
    output.lacks("PyTorch is missing; pip install torch")
import torch.nn.functional as F
from torch import nn
from torch_attention import attention, standard_attention

from cupyflash.roofline_report import count, rate

SYMBOLS, VALUES = 256, 64
KEYS = SYMBOLS * SYMBOLS
SHORTEST, GROWTH = 16, 4  # items of the first sequences, factor from one phase to the next
LEARNT, PASSED = 0.95, 0.99  # accuracy that ends a phase; that of a run that passes
WARM_UP = 30  # steps
MOST_ON_NUMPY = 4096  # items: their number squared is what a step takes
ON_NUMPY = f"On NumPy, up to {MOST_ON_NUMPY} items: --items 256 --tokens 4096 --output retrieval-numpy.json"


class Block(nn.Module):
    """One layer of a transformer that normalises before each part."""

    def __init__(self, width, heads, attend, dtype):
        super().__init__()
        self.heads, self.attend, self.dtype = heads, attend, dtype
        self.norm, self.qkv, self.mix = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x):
        qkv = self.qkv(self.norm(x)).to(self.dtype).unflatten(-1, (3, self.heads, -1))
        x = x + self.mix(self.attend(*qkv.unbind(2)).flatten(2).to(x.dtype))
        return x + self.feed(x)


class Retriever(nn.Module):
    """From items to the logits of the values that they ask for; the order of the items means nothing."""

    def __init__(self, attend, dtype, width=256, heads=8, layers=2, embedding=64):
        super().__init__()
        self.symbols = nn.Embedding(2 * SYMBOLS, embedding)  # the same for keys and for questions
        self.values = nn.Embedding(VALUES, embedding)
        self.read = nn.Linear(5 * embedding, width)
        self.blocks = nn.Sequential(*(Block(width, heads, attend, dtype) for _ in range(layers)))
        self.answer = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, VALUES))

    def forward(self, keys, values, asked):
        parts = self.code(keys), self.values(values), self.code(asked)
        return self.answer(self.blocks(self.read(torch.cat(parts, dim=-1))))

    def code(self, keys):
        return self.symbols(torch.stack((keys // SYMBOLS, SYMBOLS + keys % SYMBOLS), dim=-1)).flatten(-2)


def deal(sequences, items, generator):
    """Keys, values and asked keys (sequences, items), and the answers. All keys of a batch differ."""
    shape, device = (sequences, items), generator.device
    keys = torch.randperm(KEYS, generator=generator, device=device)[: sequences * items].view(shape)
    values = torch.randint(VALUES, shape, generator=generator, device=device)
    which = torch.randint(items, shape, generator=generator, device=device)
    return keys, values, keys.gather(1, which), values.gather(1, which)


def lengths(items):
    """Items of a sequence, phase by phase."""
    phases = [SHORTEST]
    while phases[-1] < items:
        phases.append(min(items, GROWTH * phases[-1]))
    return phases


def step(model, optimizer, batch):
    """One step of training; loss and accuracy before it."""
    *inputs, answers = batch
    logits = model(*inputs)
    loss = F.cross_entropy(logits.flatten(0, 1), answers.flatten())
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item(), accuracy(logits, answers)


def accuracy(logits, answers):
    return (logits.argmax(dim=-1) == answers).float().mean().item()


def train(model, options, generator):
    """Train through all phases; yield a record of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate, betas=(0.9, 0.95), weight_decay=0)
    start, number = time.perf_counter(), 0
    for items in lengths(options.items):
        left = options.last_steps if items == options.items else None
        right = 0
        while right < LEARNT if left is None else left > 0:
            number += 1
            slower = 1 if left is None else left / options.last_steps
            for group in optimizer.param_groups:
                group["lr"] = options.rate * min(1, number / WARM_UP) * slower
            loss, right = step(model, optimizer, deal(options.tokens // items, items, generator))
            seconds = time.perf_counter() - start
            yield {"step": number, "items": items, "loss": loss, "accuracy": right, "seconds": round(seconds, 2)}
            if seconds > options.seconds:
                return
            left = left and left - 1


@torch.no_grad()
def test(model, options, generator):
    """Accuracy on sequences of the full length that were never seen."""
    scores = []
    for _ in range(options.tests):
        *inputs, answers = deal(1, options.items, generator)
        scores.append(accuracy(model(*inputs), answers))
    return sum(scores) / len(scores)


def try_standard(options, generator, dtype):
    """What one step with standard attention at the full length says: its seconds, or that memory ran out."""
    model = Retriever(standard_attention, dtype).to(generator.device)
    start = time.perf_counter()
    try:
        step(model, torch.optim.AdamW(model.parameters()), deal(1, options.items, generator))
    except torch.OutOfMemoryError as error:
        return {"out_of_memory": str(error).split(" GPU ")[0]}
    return {"seconds": round(time.perf_counter() - start, 3)}


def parse_arguments(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--items", type=count, default=KEYS, help=f"of the longest sequences, at most {KEYS}")
    parser.add_argument("--tokens", type=count, default=KEYS, help="items of a step, in one or many sequences")
    parser.add_argument("--rate", type=rate, default=2e-3, help="of learning")
    parser.add_argument("--last-steps", type=count, default=80, help="at the full length")
    parser.add_argument("--seconds", type=rate, default=400, help="end the training after so many")
    parser.add_argument("--tests", type=count, default=8, help="sequences never seen")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-standard", action="store_true", help="do not try standard attention before")
    options = output.parse(parser, __file__, arguments)
    if not SHORTEST <= options.items <= options.tokens <= KEYS:
        parser.error(
            f"--items is {options.items} and --tokens {options.tokens}; allowed: {SHORTEST} to {KEYS}, items <= tokens"
        )
    return options


def main(arguments=None):
    options = parse_arguments(arguments)
    gpu = torch.cuda.is_available()
    on_numpy = options.items <= MOST_ON_NUMPY and not gpu
    name = "CPU, NumPy backend" if on_numpy else output.gpu_of(torch, ON_NUMPY)
    device, dtype = ("cuda", torch.bfloat16) if gpu else ("cpu", torch.float32)
    torch.manual_seed(options.seed)
    generator = torch.Generator(device).manual_seed(options.seed)
    result = {
        **output.about(name, torch),
        "items": options.items,
        "tokens": options.tokens,
    }
    if gpu and not options.no_standard:
        result["standard"] = try_standard(options, generator, dtype)
        print("standard attention, one step:", result["standard"], file=sys.stderr, flush=True)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    model = Retriever(attention, dtype).to(device)
    result["parameters"] = sum(p.numel() for p in model.parameters())
    result["steps"] = []
    for record in train(model, options, generator):
        before = result["steps"][-1] if result["steps"] else {"items": 0}
        result["steps"].append(record)
        if record["items"] != before["items"] or record["step"] % 10 == 0:
            print(" ".join(f"{name} {value:.4g}" for name, value in record.items()), file=sys.stderr, flush=True)
    result["accuracy"] = test(model, options, generator)
    if gpu:
        import cupy

        result["peak_bytes"] = torch.cuda.max_memory_allocated() + cupy.get_default_memory_pool().total_bytes()
    output.write(options, result)
    passed = result["accuracy"] > PASSED
    answers, last = options.tests * options.items, result["steps"][-1]
    text = (
        f"{'passed' if passed else 'FAILED'}: {result['accuracy']:.3%} of {answers:,} answers right after "
        f"{last['step']} steps, {last['seconds']:.0f} s"
        + (f", where --seconds {options.seconds:g} ended the training" if last["seconds"] > options.seconds else "")
    )
    output.show(options, {**result, "passed": passed}, text, "retrieval")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
