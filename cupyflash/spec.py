"""What is fixed when a kernel is compiled: frozen records whose C++ twins are in ``kernels/core/spec.cuh``.

A spec is written into the kernel's template argument field by field, so that the compiler checks every name.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from .mods import Mods

BIAS_TYPES = (None, "float16", "bfloat16", "float32")  # BiasType in kernels/any/logits.cuh


def _logit_bytes(bias: int, mask: bool, rows: int, cols: int) -> int:
    """Of the tiles of a bias and a mask in shared memory, in panels of 128 bytes a row."""
    items = (0, 2, 2, 4)[bias], int(mask)
    return rows * 128 * sum(-(-cols * item // 128) for item in items)


def _literal(value: int | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class Spec:
    """Common to all specs: the C++ text, and what a launch needs to know."""

    def cpp(self) -> str:
        """Return the designated initialiser that names this spec in C++."""
        given = [f.name for f in fields(self) if getattr(self, f.name) != f.default]
        body = ", ".join(f".{name}={_literal(getattr(self, name))}" for name in given)
        return f"cupyflash::{type(self).__name__}{{{body}}}"

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of one block."""
        return 0


@dataclass(frozen=True)
class ForwardSpec(Spec):
    head_dim: int
    head_dim_v: int
    block_q: int
    block_k: int
    warps: int
    out_warps_q: int
    stages: int
    blocks_per_sm: int
    q_in_registers: bool
    float32_out: bool
    access: int
    softcap: bool = False
    alibi: bool = False
    dropout: bool = False
    bias: int = 0  # of BIAS_TYPES
    mask: bool = False
    blocks: bool = False
    varlen: bool = False

    @property
    def p_in_registers(self) -> bool:
        return self.out_warps_q == self.warps

    @property
    def shared_bytes(self) -> int:
        q = self.block_q * max(self.head_dim, self.head_dim_v)
        p = 0 if self.p_in_registers else self.block_q * (2 * self.block_k + 4)
        kept = self.dropout * 2 * self.block_q * self.block_k // 8
        return 2 * (q + self.stages * self.block_k * (self.head_dim + self.head_dim_v)) + p + kept


@dataclass(frozen=True)
class HopperForwardSpec(Spec):
    head_dim: int
    head_dim_v: int
    block_k: int
    cluster: int
    teams: int
    groups: int
    q_slots: int
    slots: int
    packed: bool
    float32_out: bool
    access: int
    softcap: bool = False
    alibi: bool = False
    dropout: bool = False
    bias: int = 0  # of BIAS_TYPES
    mask: bool = False
    logit_slots: int = 0
    blocks: bool = False
    bounded: bool = False  # by softcap, so that no maximum is needed
    varlen: bool = False
    steady: bool = False  # behind a row's first full tile its sum takes the maximum's place; a flag says if that failed
    only_if: bool = False  # nothing is computed where the flag is not set

    blocks_per_sm = 1

    @property
    def staged(self) -> bool:
        """Whether out leaves through shared memory and the copy engine."""
        return self.access == 16

    @property
    def block_q(self) -> int:
        """Rows of one tile."""
        return 64 * self.cluster * self.groups

    @property
    def threads(self) -> int:
        return 128 * (self.teams * self.groups + 1)

    @property
    def shared_bytes(self) -> int:
        width = -(-max(self.head_dim, self.head_dim_v) // 64) * 64
        tiles = 2 * width * self.teams * (self.q_slots * 64 + self.slots * self.block_k)
        logits = self.groups * self.logit_slots * _logit_bytes(self.bias, False, 64, self.block_k)
        return tiles + logits + 1024


@dataclass(frozen=True)
class BackwardSpec(Spec):
    head_dim: int
    head_dim_v: int
    block_q: int
    block_k: int
    warps: int
    score_warps_k: int
    grad_warps_k: int
    dq_warps_q: int
    stages: int
    blocks_per_sm: int
    deterministic: bool
    access: int
    softcap: bool = False
    alibi: bool = False
    dropout: bool = False
    bias: int = 0  # of BIAS_TYPES
    mask: bool = False
    blocks: bool = False
    varlen: bool = False

    @property
    def p_in_registers(self) -> bool:
        return self.score_warps_k == self.warps == self.grad_warps_k

    @property
    def shared_bytes(self) -> int:
        width = self.head_dim + self.head_dim_v
        scores = self.block_q * self.block_k * (1 if self.p_in_registers else 2)
        statistics = 2 * self.stages * self.block_q * 4
        kept = self.dropout * self.block_q * self.block_k // 8
        return 2 * (self.block_k * width + self.stages * self.block_q * width + scores) + statistics + kept


@dataclass(frozen=True)
class HopperBackwardSpec(Spec):
    head_dim: int
    head_dim_v: int
    block_q: int
    groups: int
    stages: int
    key_slots: int
    deterministic: bool
    access: int
    softcap: bool = False
    alibi: bool = False
    dropout: bool = False
    bias: int = 0  # of BIAS_TYPES
    logit_slots: int = 0
    mask: bool = False
    blocks: bool = False
    varlen: bool = False

    blocks_per_sm = 1

    @property
    def block_k(self) -> int:
        return 64 * self.groups

    @property
    def threads(self) -> int:
        return 128 * (self.groups + 1)

    @property
    def shared_bytes(self) -> int:
        width = sum(-(-n // 64) * 64 for n in (self.head_dim, self.head_dim_v))
        scores, statistics = 2 * self.block_k * self.block_q, 8 * self.stages * self.block_q
        tiles = 2 * ((self.key_slots * self.block_k + self.stages * self.block_q) * width + scores)
        kept = self.dropout * self.stages * self.block_k * self.block_q // 8
        logits = self.logit_slots * _logit_bytes(self.bias, False, self.block_q, self.block_k)
        words = self.mask * self.stages * self.block_k * self.block_q // 8
        return tiles + statistics + kept + logits + words + 1024


@dataclass(frozen=True)
class HopperKeysSpec(Spec):
    """Of the kernel that computes dk and dv alone."""

    head_dim: int
    head_dim_v: int
    kept: int
    slots: int
    slots_dout: int
    access: int
    softcap: bool = False
    alibi: bool = False
    dropout: bool = False
    bias: int = 0  # of BIAS_TYPES
    mask: bool = False
    logit_slots: int = 0
    blocks: bool = False
    varlen: bool = False

    blocks_per_sm, threads, block_k = 1, 384, 64

    @property
    def shared_bytes(self) -> int:
        d, dv = self.head_dim, self.head_dim_v
        keys = max(0, d - 64 * self.kept) + max(0, dv - 64 * self.kept)
        tiles = self.slots * d + self.slots_dout * dv
        handover, statistics = 2 * 2 * 64 * 64, 4 * 64 * (self.slots + self.slots_dout)
        logits = self.logit_slots * _logit_bytes(self.bias, self.mask, 64, 64)
        return 2 * 64 * (keys + tiles) + handover + statistics + logits + 1024


@dataclass(frozen=True)
class HopperQueriesSpec(Spec):
    """Of the kernel that computes dq alone."""

    head_dim: int
    head_dim_v: int
    slots: int
    slots_v: int
    access: int
    softcap: bool = False
    alibi: bool = False
    dropout: bool = False
    bias: int = 0  # of BIAS_TYPES
    mask: bool = False
    logit_slots: int = 0
    blocks: bool = False
    dbias: bool = False
    varlen: bool = False

    blocks_per_sm, threads, block_q = 1, 384, 128

    @property
    def shared_bytes(self) -> int:
        tiles = 2 * 64 * ((2 + self.slots) * self.head_dim + (2 + self.slots_v) * self.head_dim_v)
        return tiles + self.logit_slots * _logit_bytes(self.bias, self.mask, self.block_q, 64) + 1024


@dataclass(frozen=True)
class PreciseForwardSpec(Spec):
    """Of float32 and float64."""

    head_dim: int
    head_dim_v: int
    item: int
    block_q: int
    block_k: int
    row_tiles: int
    parts: int
    blocks_per_sm: int
    steps: int
    products: int
    access: int

    @property
    def warps(self) -> int:
        return self.block_q // (16 * self.row_tiles) * self.parts

    @property
    def shared_bytes(self) -> int:
        return self.item * (self.block_q * self.head_dim + self.block_k * (self.head_dim + self.head_dim_v))


@dataclass(frozen=True)
class PreciseKeysSpec(Spec):
    """Of the kernel that computes dk and dv of float32 and float64."""

    head_dim: int
    head_dim_v: int
    item: int
    block_q: int
    block_k: int
    parts: int
    stages: int
    blocks_per_sm: int
    steps: int
    products: int
    access: int

    @property
    def warps(self) -> int:
        return self.block_k // 16 * self.parts

    @property
    def shared_bytes(self) -> int:
        width, statistics = self.head_dim + self.head_dim_v, 2 * self.stages * self.block_q
        return self.item * ((self.block_k + self.stages * self.block_q) * width + statistics)


@dataclass(frozen=True)
class PreciseQueriesSpec(Spec):
    """Of the kernel that computes dq of float32 and float64."""

    head_dim: int
    head_dim_v: int
    item: int
    block_q: int
    block_k: int
    parts: int
    stages: int
    blocks_per_sm: int
    steps: int
    products: int
    access: int

    @property
    def warps(self) -> int:
        return self.block_q // 16 * self.parts

    @property
    def shared_bytes(self) -> int:
        return self.item * (self.block_q + self.stages * self.block_k) * (self.head_dim + self.head_dim_v)


@dataclass(frozen=True)
class PreciseDeltaSpec(Spec):
    """Of the kernel before them."""

    warps: int
    item: int


@dataclass(frozen=True)
class SplitSpec(Spec):
    """Of the kernels that split float32 into two float16."""

    warps: int
    blocks_per_sm: int
    access: int
    backward: bool


def _halves_bytes(rows: int, head_dim: int) -> int:
    """Of float32 rows in shared memory, as two float16."""
    return 2 * 2 * rows * (64 if head_dim <= 64 else 128)


@dataclass(frozen=True)
class HopperPreciseSpec(Spec):
    """Of Hopper's forward of float32, by products of float16."""

    head_dim: int
    head_dim_v: int
    block_k: int
    groups: int
    slots: int
    access: int

    blocks_per_sm = 1

    @property
    def block_q(self) -> int:
        return 64 * self.groups

    @property
    def threads(self) -> int:
        return 128 * (self.groups + 1)

    @property
    def shared_bytes(self) -> int:
        keys = self.slots * self.block_k
        return _halves_bytes(self.block_q + keys, self.head_dim) + _halves_bytes(keys, self.head_dim_v) + 1024


@dataclass(frozen=True)
class HopperPreciseKeysSpec(Spec):
    """Of Hopper's kernel that computes dk and dv of float32."""

    head_dim: int
    head_dim_v: int
    groups: int
    slots: int
    slots_dout: int
    access: int

    blocks_per_sm = 1

    @property
    def block_k(self) -> int:
        return 64 * self.groups

    @property
    def threads(self) -> int:
        return 128 * (self.groups + 1)

    @property
    def shared_bytes(self) -> int:
        tiles = _halves_bytes(self.block_k + 64 * self.slots, self.head_dim)
        return tiles + _halves_bytes(self.block_k + 64 * self.slots_dout, self.head_dim_v) + 1024


@dataclass(frozen=True)
class HopperPreciseQueriesSpec(Spec):
    """Of the one that computes dq."""

    head_dim: int
    head_dim_v: int
    groups: int
    slots: int
    slots_v: int
    access: int

    blocks_per_sm = 1

    @property
    def block_q(self) -> int:
        return 64 * self.groups

    @property
    def threads(self) -> int:
        return 128 * (self.groups + 1)

    @property
    def shared_bytes(self) -> int:
        tiles = _halves_bytes(self.block_q + 64 * self.slots, self.head_dim)
        return tiles + _halves_bytes(self.block_q + 64 * self.slots_v, self.head_dim_v) + 1024


@dataclass(frozen=True)
class ModGradientSpec(Spec):
    """Of the kernel that computes dscore_mod."""

    head_dim: int
    head_dim_v: int
    block_k: int
    warps: int
    access: int
    mods_at: int
    packed: bool
    softcap: bool = False
    alibi: bool = False
    dropout: bool = False
    bias: int = 0  # of BIAS_TYPES
    mask: bool = False
    blocks: bool = False

    blocks_per_sm = 1

    @property
    def block_q(self) -> int:
        return 16 * self.warps

    @property
    def shared_bytes(self) -> int:
        return 2 * (self.block_q + self.block_k) * (self.head_dim + self.head_dim_v)


@dataclass(frozen=True)
class MaskWordsSpec(Spec):
    """Of the kernel that puts a mask into the order of accumulators."""

    warps: int
    along_rows: bool


@dataclass(frozen=True)
class SegmentsSpec(Spec):
    """Of the kernel that finds the tiles of packed sequences."""

    warps: int


@dataclass(frozen=True)
class SinkSpec(Spec):
    """Of the kernel that computes dsink."""

    warps: int
    packed: bool
    varlen: bool = False


@dataclass(frozen=True)
class BiasGradientSpec(Spec):
    """Of the kernel that computes dbias."""

    head_dim: int
    head_dim_v: int
    block_q: int
    block_k: int
    warps: int
    warps_q: int
    blocks_per_sm: int
    summed: bool
    packed: bool
    access: int
    softcap: bool = False
    alibi: bool = False
    dropout: bool = False
    bias: int = 0  # of BIAS_TYPES
    mask: bool = False
    blocks: bool = False
    mods_at: int = 0

    @property
    def shared_bytes(self) -> int:
        kept = self.dropout * self.block_q * self.block_k // 8
        return 2 * (self.block_q + self.block_k) * (self.head_dim + self.head_dim_v) + kept


@dataclass(frozen=True)
class HopperBiasGradientSpec(Spec):
    """Of Hopper's kernel that computes dbias. Its tiles, and the warps that share one, are those of a cluster."""

    head_dim: int
    head_dim_v: int
    cluster_q: int
    cluster_k: int
    slots: int
    box_k: int
    packed: bool
    softcap: bool = False
    alibi: bool = False
    bias: int = 0  # of BIAS_TYPES
    mask: bool = False
    logit_slots: int = 0

    blocks_per_sm, threads = 1, 384

    @property
    def cluster(self) -> int:
        return self.cluster_q * self.cluster_k

    @property
    def block_q(self) -> int:
        return 128 * self.cluster_q

    @property
    def block_k(self) -> int:
        return 128 * self.cluster_k

    @property
    def warps_q(self) -> int:
        return 8 * self.cluster_q

    @property
    def warps(self) -> int:
        return self.warps_q * self.cluster_k

    @property
    def shared_bytes(self) -> int:
        width = -(-max(self.head_dim, self.head_dim_v) // 64) * 64
        logits = self.logit_slots * _logit_bytes(self.bias, self.mask, 128, 128)
        return 2 * self.slots * (128 + 128) * width + logits + 1024


@dataclass(frozen=True)
class BiasSumSpec(Spec):
    """Of the kernel that adds its parts."""

    warps: int
    bias: int


@dataclass(frozen=True)
class PrepareSpec(Spec):
    """Of the two small kernels around the backward: delta before it, the conversion of dq after it."""

    head_dim: int
    head_dim_v: int
    packed: bool
    float32_out: bool
    access: int
    varlen: bool = False

    warps = 8

    @property
    def heads(self) -> int:
        """Neighbouring heads of a block before the backward, with 16 rows each."""
        return 8 if self.head_dim_v <= 64 else 4 if self.head_dim_v <= 128 else 2

    @property
    def finished_cols(self) -> int:
        """Columns of a warp after it, with 16 rows."""
        return 64 if self.head_dim % 64 == 0 else 32


@dataclass(frozen=True)
class Variant:
    """One kernel as it is compiled: a template in a header, an element type, a spec."""

    header: str  # "sm80/forward.cuh"
    template: str  # "forward"
    dtype: str  # "float16", ...
    spec: Spec
    mods: Mods | None = None  # functions of the user

    @property
    def expression(self) -> str:
        """The C++ expression that names the instantiation."""
        mods = ", cupyflash::mod::UserMods" if self.mods else ""
        return f"cupyflash::{self.template}<cupyflash::{self.dtype}, {self.spec.cpp()}{mods}>"
