"""A BERT encoder in a page of NumPy or CuPy, which is handed the attention that it uses."""

from __future__ import annotations

import json

import numpy as np

SAFETENSORS_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4"}


def read_safetensors(path):
    """Arrays of a safetensors file by name: eight bytes of header length, a JSON header, the raw data."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    arrays = {}
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        raw = data[start + first : start + last]
        arrays[name] = np.frombuffer(raw, SAFETENSORS_DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return arrays


def random_weights(*, layers=2, hidden=384, inner=1536, vocabulary=2000, positions=512, seed=0):
    """Weights of an untrained encoder, scaled so that its attention is neither flat nor one-hot."""
    rng = np.random.default_rng(seed)
    shapes = {
        "embeddings.word_embeddings": (vocabulary, hidden),
        "embeddings.position_embeddings": (positions, hidden),
        "embeddings.token_type_embeddings": (2, hidden),
    }
    norms = ["embeddings.LayerNorm"]
    for i in range(layers):
        layer = f"encoder.layer.{i}."
        shapes |= {layer + f"attention.self.{name}": (hidden, hidden) for name in ("query", "key", "value")}
        shapes |= {
            layer + "attention.output.dense": (hidden, hidden),
            layer + "intermediate.dense": (inner, hidden),
            layer + "output.dense": (hidden, inner),
        }
        norms += [layer + "attention.output.LayerNorm", layer + "output.LayerNorm"]
    weights = {}
    for name, shape in shapes.items():
        weights[name + ".weight"] = (rng.standard_normal(shape) * 1.5 / shape[1] ** 0.5).astype(np.float32)
        weights[name + ".bias"] = np.zeros(shape[0], np.float32)
    for name in norms:
        weights[name + ".weight"] = np.ones(hidden, np.float32)
        weights[name + ".bias"] = np.zeros(hidden, np.float32)
    return weights


class Encoder:
    """Sentence embeddings: the mean of BERT's last hidden states, scaled to length one.

    Parameters
    ----------
    weights : dict of str to array
        By the names that BERT checkpoints use. NumPy or CuPy arrays; the encoder computes where they are.
    heads : int
        Attention heads of every layer.
    epsilon : float
        Of the layer normalisations.
    """

    def __init__(self, weights, heads, epsilon=1e-12):
        self.weights, self.heads, self.epsilon = weights, heads, epsilon
        self.layers = sum(name.endswith("attention.self.query.weight") for name in weights)
        self.hidden = weights["embeddings.word_embeddings.weight"].shape[1]

    def __call__(self, ids, attention):
        """Embeddings (batch, hidden) of ``ids`` (batch, tokens), all of one length, through ``attention``."""
        x = self.embed(ids)
        for i in range(self.layers):
            layer = f"encoder.layer.{i}."
            mixed = attention(*self.project(x, i)).reshape(x.shape)
            x = x + self.linear(mixed, layer + "attention.output.dense")
            x = self.norm(x, layer + "attention.output.LayerNorm")
            inner = gelu(self.linear(x, layer + "intermediate.dense"))
            x = x + self.linear(inner, layer + "output.dense")
            x = self.norm(x, layer + "output.LayerNorm")
        mean = x.mean(1)
        return mean / np.sqrt((mean * mean).sum(-1, keepdims=True))

    def embed(self, ids):
        """What the first layer reads. Beyond the last position that was trained, positions start over."""
        tokens = ids.shape[1]
        positions = self.weights["embeddings.position_embeddings.weight"]
        x = self.weights["embeddings.word_embeddings.weight"][ids]
        x += np.tile(positions, (-(-tokens // len(positions)), 1))[:tokens]
        x += self.weights["embeddings.token_type_embeddings.weight"][0]
        return self.norm(x, "embeddings.LayerNorm")

    def project(self, x, layer):
        """Query, key and value of one layer, each (batch, tokens, heads, head_dim)."""
        names = (f"encoder.layer.{layer}.attention.self.{name}" for name in ("query", "key", "value"))
        return [self.linear(x, name).reshape(*x.shape[:2], self.heads, -1) for name in names]

    def linear(self, x, name):
        y = x @ self.weights[name + ".weight"].T
        y += self.weights[name + ".bias"]
        return y

    def norm(self, x, name):
        x = x - x.mean(-1, keepdims=True)
        x /= np.sqrt((x * x).mean(-1, keepdims=True) + self.epsilon)
        x *= self.weights[name + ".weight"]
        x += self.weights[name + ".bias"]
        return x


def gelu(x):
    """``x * Phi(x)``, erf by formula 7.1.26 of Abramowitz and Stegun (off by 1.5e-7 at most)."""
    z = np.abs(x) * np.float32(0.5**0.5)
    t = 1 / (1 + np.float32(0.3275911) * z)
    polynomial = t * np.float32(1.061405429)
    for coefficient in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
        polynomial += np.float32(coefficient)
        polynomial *= t
    z *= -z
    tail = polynomial * np.exp(z)  # erfc(|x| / sqrt(2))
    return np.maximum(x, 0) - np.abs(x) * np.float32(0.5) * tail
