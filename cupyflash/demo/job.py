"""The job itself: run the encoder on cupyflash's attention, compare, measure, and judge."""

from __future__ import annotations

import sys
import time

import numpy as np

from cupyflash import __version__, attention, reference

from .encoder import Encoder
from .inputs import HOW_TO_GET_IT, find_model, pretrained_inputs, random_inputs
from .machine import best_machine

WINDOWS_AT_ONCE = 4
REFERENCE_SCORES = 1 << 22  # float64 scores in memory at once: 32 MB


def standard_attention(q, k, v):
    """Attention as the textbook has it, all scores in memory, in the dtype of ``q``."""
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    weights = q @ k.swapaxes(2, 3)
    weights *= q.dtype.type(q.shape[-1] ** -0.5)
    weights -= weights.max(-1, keepdims=True)
    np.exp(weights, out=weights)
    weights /= weights.sum(-1, keepdims=True)
    return (weights @ v).swapaxes(1, 2)


class Errors:
    """Largest errors of a group of calls of attention, beside those of standard attention on the same inputs.

    Allowed is twice what standard attention is off by, plus a floor, since standard attention may be right by
    luck: one rounding of the largest result, and what one float32 rounding of the largest logit does to it.

    Parameters
    ----------
    name : str
        Of the group.
    step : int
        Every so many queries are checked. An odd number meets every row of a tile.
    """

    def __init__(self, name, step=1):
        self.name, self.step, self.calls = name, step, 0
        self.cupyflash = self.standard = self.allowed = 0.0  # np.maximum: NaN stays

    def add(self, q, k, v, out):
        """Compare ``out`` with the float64 reference, a block of queries at a time so that long calls fit."""
        q, out = q[:, :: self.step], out[:, :: self.step]
        logit = longest(q) * longest(k) * q.shape[-1] ** -0.5
        floor = np.finfo(np.float32).eps / 2 * logit * float(abs(v).max())
        rows = max(1, REFERENCE_SCORES // (q.shape[0] * q.shape[2] * k.shape[1]))
        for first in range(0, q.shape[1], rows):
            part = slice(first, first + rows)
            right = reference.attention(q[:, part], k, v)
            self.cupyflash = np.maximum(self.cupyflash, float(abs(out[:, part] - right).max()))
            standard = float(abs(standard_attention(q[:, part], k, v) - right).max())
            self.standard = np.maximum(self.standard, standard)
            rounding = np.finfo(q.dtype).eps * float(abs(right).max())
            self.allowed = np.maximum(self.allowed, 2 * self.standard + rounding + floor)
        self.calls += 1

    @property
    def hold(self):
        return bool(self.calls and self.cupyflash <= self.allowed)

    def report(self):
        numbers = {name: float(getattr(self, name)) for name in ("cupyflash", "standard", "allowed")}
        return {"name": self.name, "calls": self.calls, "step": self.step, **numbers, "holds": self.hold}


def longest(x):
    """Length of the longest row; for q times that for k bounds each logit and every partial sum of it."""
    return float((x.astype(np.float32) ** 2).sum(-1).max()) ** 0.5


def run(backend=None):
    """Do the main job.

    Parameters
    ----------
    backend : {"numpy", "cuda"} or None
        None takes a GPU if one can be used.

    Returns
    -------
    dict
        Everything that is printed, ``passed`` included.

    Raises
    ------
    NoGpu
        If ``backend`` is ``"cuda"`` and no GPU can be used.
    """
    start = time.perf_counter()
    machine, no_gpu = best_machine(backend)
    folder = find_model()
    if folder is None:
        say(HOW_TO_GET_IT)
    inputs = pretrained_inputs(folder, machine.tokens) if folder else random_inputs(machine.tokens)
    weights = {name: machine.asarray(array) for name, array in inputs.weights.items()}
    encoder = Encoder(weights, inputs.heads, inputs.epsilon)

    def embed(ids, errors):
        def checked_attention(*qkv):
            q, k, v = (x.astype(machine.dtype) for x in qkv)
            out = attention(q, k, v)
            errors.add(q, k, v, out)
            return out.astype(qkv[0].dtype)

        return machine.asnumpy(encoder(machine.asarray(np.asarray(ids)), checked_attention))

    say(f"embedding {2 * len(inputs.pairs)} sentences")
    of_sentences = Errors(f"{2 * len(inputs.pairs)} sentences")
    pairs = [[embed([ids], of_sentences)[0] for ids in pair] for pair in inputs.pairs]

    ids, firsts = inputs.windows()
    say(f"embedding a text of {len(inputs.text)} tokens in {len(ids)} windows")
    of_windows = Errors(f"{len(ids)} windows of {ids.shape[1]} tokens", step=7)
    blocks = [ids[first : first + WINDOWS_AT_ONCE] for first in range(0, len(ids), WINDOWS_AT_ONCE)]
    windows = np.concatenate([embed(block, of_windows) for block in blocks])
    question = None if inputs.question is None else embed([inputs.question], of_sentences)[0]

    say(f"attention over all {len(inputs.text)} tokens at once")
    of_long = Errors(f"one call, {len(inputs.text)} tokens")
    long_call = run_long_call(machine, encoder, inputs.text, of_long)

    groups = (of_sentences, of_windows, of_long)
    similarity = compare_pairs(pairs)
    checks = {
        "attention is as exact as standard attention": of_sentences.hold and of_windows.hold,
        "sentences that belong together are closer than all others": similarity["holds"],
        "the long call is right": of_long.hold,
    }
    return {
        "version": __version__,
        "backend": machine.name,
        "device": machine.device,
        "dtype": machine.dtype.name,
        "gpu_not_used_because": no_gpu,
        "model": inputs.model,
        "pretrained": folder is not None,
        "layers": encoder.layers,
        "heads": inputs.heads,
        "head_dim": encoder.hidden // inputs.heads,
        "text": inputs.text_name,
        "errors": [errors.report() for errors in groups],
        "similarity": similarity,
        "answer": None if question is None else find_answer(question, windows, firsts, inputs),
        "long_call": long_call,
        "seconds": time.perf_counter() - start,
        "checks": checks,
        "passed": all(checks.values()),
    }


def compare_pairs(pairs):
    """Cosine similarities of the sentences of a pair, and of sentences of different pairs."""
    embeddings = np.array(pairs)
    cosines = np.einsum("ash,bth->abst", embeddings, embeddings)
    same = np.eye(len(pairs), dtype=bool)
    together, apart = cosines[same][:, 0, 1], cosines[~same]

    def spread(x):
        return {"lowest": float(x.min()), "mean": float(x.mean()), "highest": float(x.max())}

    return {"together": spread(together), "apart": spread(apart), "holds": bool(together.min() > apart.max())}


def find_answer(question, windows, firsts, inputs):
    """The part of the text in the middle of the window that is closest to the question."""
    similarity = windows @ question
    best = int(similarity.argmax())
    middle = firsts[best]
    part = [name for first, name in inputs.parts if first <= middle][-1]
    return {"part": part, "window": best, "similarity": float(similarity[best])}


def run_long_call(machine, encoder, text, errors):
    """First layer's attention over the whole text as one sequence: errors, time, memory, what it waits for.

    The model was trained with 512 positions; they start over as often as the text needs.
    """
    ids = machine.asarray(text[None])
    q, k, v = (x.astype(machine.dtype) for x in encoder.project(encoder.embed(ids), 0))
    errors.add(q, k, v, attention(q, k, v))
    measured = {}
    for name, function in (("cupyflash", attention), ("standard", standard_attention)):
        try:
            seconds = machine.seconds(lambda function=function: function(q, k, v))
            peak = machine.peak_bytes(lambda function=function: function(q, k, v))
        except MemoryError:  # standard attention on a small device
            seconds = peak = None
        measured[name] = {"seconds": seconds, "peak_bytes": peak}
    scores = q.shape[2] * q.shape[1] * k.shape[1]
    amounts = {
        "matmul": 4 * scores * q.shape[3],
        "copy": 4 * q.nbytes,  # q, k and v are read and the output is written, once each
        "exp": scores,
    }
    resources = find_bottleneck(amounts, machine.rates(), measured["cupyflash"]["seconds"])
    return {"tokens": len(text), **measured, "resources": resources}


def find_bottleneck(amounts, rates, seconds):
    """Share of the measured time that each resource needs, at the rate that it reaches on its own."""
    uses = {name: {"amount": amounts[name], "rate": rates[name]} for name in amounts}
    for use in uses.values():
        use["share"] = use["amount"] / use["rate"] / seconds
    return {"waits_for": max(uses, key=lambda name: uses[name]["share"]), **uses}


def say(message):
    print(message, file=sys.stderr, flush=True)
