"""What a call asks for, in one frozen record that every backend reads."""

from __future__ import annotations

from dataclasses import dataclass

from .mods import Mods


@dataclass(frozen=True)
class Problem:
    """One attention call without its arrays.

    The visible keys of query ``i`` are a band around the diagonal ``i + diagonal``:
    ``i + diagonal - left <= j <= i + diagonal + right``. A side that hides no key is ``None``, so that
    equal problems compare equal however they were spelled.
    """

    dtype: str  # "float16", "bfloat16", "float32" or "float64"
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_k: int
    head_dim: int
    head_dim_v: int
    scale: float
    diagonal: int = 0  # key on the diagonal of query 0: seqlen_k - seqlen_q (lower right) or 0 (upper left)
    left: int | None = None
    right: int | None = None
    softcap: float | None = None
    alibi: bool = False  # slopes are given
    sink: bool = False  # sinks are given
    dropout: float = 0.0  # a multiple of 2**-32
    bias: str | None = None  # dtype of the bias that is given
    mask: bool = False  # a mask is given, or a block mask whose blocks are shown in part
    precision: str | None = None  # "tf32", or None for the highest
    blocks: bool = False  # a block mask is given
    mods: Mods | None = None  # functions of the user
    varlen: str | None = None  # packed sequences, as many as batches: the corner of the diagonal of each; the lengths
    # are those of all together, and left and right what was given

    @property
    def group(self) -> int:
        """Query heads that share one key head."""
        return self.heads_q // self.heads_k

    @property
    def banded(self) -> bool:
        """Whether some query does not see every key."""
        return self.left is not None or self.right is not None

    @property
    def empty(self) -> bool:
        """Whether nothing can be computed: no row, or no key."""
        return 0 in (self.batch, self.heads_q, self.seqlen_q, self.seqlen_k, self.head_dim_v)

    def key_range(self, first: int, last: int) -> tuple[int, int]:
        """Half-open range of the keys that some query of ``first <= i < last`` sees."""
        low = 0 if self.left is None else max(0, first + self.diagonal - self.left)
        high = self.seqlen_k if self.right is None else min(self.seqlen_k, last + self.diagonal + self.right)
        return low, max(low, high)

    def unmasked_range(self, first: int, last: int) -> tuple[int, int]:
        """Half-open range of the keys that every query of ``first <= i < last`` sees."""
        low = 0 if self.left is None else max(0, last - 1 + self.diagonal - self.left)
        high = self.seqlen_k if self.right is None else min(self.seqlen_k, first + 1 + self.diagonal + self.right)
        return low, max(low, high)
