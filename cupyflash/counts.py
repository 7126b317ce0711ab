"""What attention costs, counted before anything runs: operations, exponentials and bytes, by formula.

The *score* of a query and a key that it sees is the unit. A head of ``N`` queries and keys of width ``d`` has ``N^2``
scores, ``4 d N^2`` operations in the forward (``q k^T`` and ``p v``; a multiplication and an addition are two) and
``10 d N^2`` in the backward (five products), and one exponential for each score and pass. Elements have 16 bits.

Kernels compute whole tiles, with the tilings of ``choose.py``, and these are counted as they run: `portable_forward`
and `portable_backward` are the kernels of ``kernels/sm80/``, the others those of ``kernels/sm90/``. Of shared memory,
the operands of the products and what they are copied or stored from are counted; q and out, which cross it once, are
not. Left out is all that grows with N alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from .problem import Problem
from .spec import (
    BackwardSpec,
    ForwardSpec,
    HopperBackwardSpec,
    HopperForwardSpec,
    HopperKeysSpec,
    HopperQueriesSpec,
)


@dataclass(frozen=True)
class Amounts:
    """What one pass asks of each resource."""

    flops: int  # of the tensor cores
    exps: int  # of the special-function units
    memory_bytes: int  # to and from DRAM, at least
    shared_bytes: int = 0  # to and from shared memory
    tile_bytes: int = 0  # that tiles load, from the L2 cache or from DRAM


def scores(problem: Problem) -> int:
    """Pairs of a query and a key that it sees, of one head."""
    return tiles(problem, 1, 1)


def tiles(problem: Problem, block_q: int, block_k: int) -> int:
    """Tiles of ``block_q`` queries and ``block_k`` keys in which some query sees a key, of one head."""
    keys = -(-problem.seqlen_k // block_k)
    full, rest = divmod(problem.seqlen_q, block_q)
    if not problem.banded:
        return (full + (rest > 0)) * keys
    low, high = problem.key_range(problem.seqlen_q - rest, problem.seqlen_q)  # of the last block, where it is shorter
    total = -(-high // block_k) - low // block_k if rest and low < high else 0
    if problem.left is not None:  # blocks below the band see no key
        full = max(0, min(full, -(-(problem.seqlen_k + problem.left - problem.diagonal) // block_q)))
        total -= _sum_of_quotients(full, block_q, problem.diagonal - problem.left, block_k, keys)
    if problem.right is None:
        return total + full * keys
    above = block_q + problem.diagonal + problem.right + block_k - 1
    return total + _sum_of_quotients(full, block_q, above, block_k, keys)


def _sum_of_quotients(count: int, step: int, start: int, divisor: int, most: int) -> int:
    """Sum of ``(start + i * step) // divisor`` over ``i < count``, each at least 0 and at most ``most``."""
    first = min(count, max(0, -(start // step)))
    last = min(count, max(first, -((start - most * divisor) // step)))
    total, count, start = (count - last) * most, last - first, start + first * step
    # The points below a line are counted, in turn, by column and by row: Euclid's algorithm.
    while count:
        total += count * (count - 1) // 2 * (step // divisor) + count * (start // divisor)
        step, start = step % divisor, start % divisor
        top = step * count + start
        count, start, step, divisor = top // divisor, top % divisor, divisor, step
    return total


def operand_bytes(problem: Problem, backward: bool = False) -> int:
    """Bytes of what any implementation reads and writes once: inputs, results and log-sum-exps.

    q, k, v in and out, lse out; or dout, q, k, v, out, lse in and dq, dk, dv out.
    """
    rows_q, rows_k = problem.heads_q * problem.seqlen_q, problem.heads_k * problem.seqlen_k
    width = problem.head_dim + problem.head_dim_v
    elements = (rows_q + rows_k) * width * (2 if backward else 1)
    return problem.batch * (2 * elements + 4 * rows_q)


def standard(problem: Problem, backward: bool = False) -> Amounts:
    """Of standard attention, which keeps its scores in memory (Algorithms 0 and 3 of FlashAttention [1]_).

    The forward writes the scores, reads them for the softmax, which writes the weights p, and reads p for ``p v``: 4
    passes over N^2 elements. The backward reads p for ``dv``, writes ``dp``, reads p and dp to write ``ds``, and reads
    ds for ``dq`` and for ``dk``: 7 passes, and four products where a fused one makes the scores again. A mask saves
    nothing: scores that it hides are computed, too. Of shared memory nothing is counted, it depends on the library of
    matrix products.

    .. [1] T. Dao et al., "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness",
       arXiv:2205.14135, section 2.2 and appendix B.
    """
    area = problem.batch * problem.heads_q * problem.seqlen_q * problem.seqlen_k
    memory = (7 if backward else 4) * 2 * area + operand_bytes(problem, backward)
    products = (2 if backward else 1) * 2 * (problem.head_dim + problem.head_dim_v)
    return Amounts(area * products, 0 if backward else area, memory)


def useful(problem: Problem, backward: bool = False) -> Amounts:
    """Least of any exact algorithm that computes the weights again in the backward: what rates are counted in."""
    area = problem.batch * problem.heads_q * scores(problem)
    return Amounts(area * per_score(problem, backward), area, operand_bytes(problem, backward))


def per_score(problem: Problem, backward: bool) -> int:
    """Operations for each score: two products of the forward, five of the backward."""
    d, dv = problem.head_dim, problem.head_dim_v
    return 6 * d + 4 * dv if backward else 2 * (d + dv)


def portable_forward(problem: Problem, spec: ForwardSpec) -> Amounts:
    """Of the forward with mma.sync: each warp reads all of K, its own rows of q, and V or its own columns of V.

    Where it has but some columns, it reads the weights p of the rows of other warps, too.
    """
    pairs, width = problem.batch * problem.heads_q, spec.head_dim + spec.head_dim_v
    steps = pairs * tiles(problem, spec.block_q, spec.block_k)
    area = steps * spec.block_q * spec.block_k
    keys = 2 * spec.block_k * width
    queries = 0 if spec.q_in_registers else 2 * spec.block_q * spec.head_dim
    operands = 2 * spec.block_k * (spec.warps * spec.head_dim + spec.out_warps_q * spec.head_dim_v)
    weights = 0 if spec.p_in_registers else 2 * spec.block_q * spec.block_k * (1 + spec.warps // spec.out_warps_q)
    return Amounts(
        flops=2 * area * width,
        exps=area,
        memory_bytes=operand_bytes(problem),
        shared_bytes=steps * (keys + operands + queries + weights),
        tile_bytes=steps * keys,
    )


def hopper_forward(problem: Problem, spec: HopperForwardSpec) -> Amounts:
    """Of the forward with wgmma: a warpgroup of 64 rows reads q, K and V from shared memory, p from registers.

    Tiles are computed by warpgroup and loaded for all warpgroups of a team, or of a cluster, together. Where heads
    are packed, the 64 rows are fewer queries of several heads.
    """
    heads, queries = problem.heads_q, 64
    if spec.packed:
        heads, queries = problem.heads_k, 64 // problem.group
    pairs, width = problem.batch * heads, spec.head_dim + spec.head_dim_v
    steps = pairs * tiles(problem, queries, spec.block_k)
    loads = pairs * tiles(problem, queries * spec.groups * spec.cluster, spec.block_k)
    area, keys = 64 * steps * spec.block_k, 2 * spec.block_k * width
    return Amounts(
        flops=2 * area * width,
        exps=area,
        memory_bytes=operand_bytes(problem),
        shared_bytes=steps * (keys + 2 * 64 * spec.head_dim) + loads * spec.cluster * keys,
        tile_bytes=loads * keys,
    )


def portable_backward(problem: Problem, spec: BackwardSpec) -> Amounts:
    """Of the backward with mma.sync, and of the two small kernels around it.

    These read out and, once more, dout for ``delta``, and clear and convert the float32 sum of dq, which the main
    kernel adds to: 16 bytes an element of q, where it does not stay in the L2 cache.
    """
    d, dv, bq, bk, warps = spec.head_dim, spec.head_dim_v, spec.block_q, spec.block_k, spec.warps
    pairs = problem.batch * problem.heads_q
    steps = pairs * tiles(problem, bq, bk)
    score_rows, score_cols = bk // spec.score_warps_k, bq * spec.score_warps_k // warps
    grad_rows, grad_share = bk // spec.grad_warps_k, spec.grad_warps_k / warps
    dq_rows, dq_share = bq // spec.dq_warps_q, spec.dq_warps_q / warps
    operands = (
        (score_rows + score_cols) * (d + dv)  # S^T = k q^T, dP^T = v dout^T
        + bq * grad_share * (d + dv)  # dout and q of dv and dk
        + (0 if spec.p_in_registers else 2 * grad_rows * bq)  # their other operands: P^T and dS^T
        + dq_rows * bk + bk * dq_share * d  # dq = dS k
    )  # fmt: skip
    stored = bq * bk * (1 if spec.p_in_registers else 2)
    loaded = 2 * bq * (d + dv)
    rows = pairs * problem.seqlen_q
    return Amounts(
        flops=steps * bq * bk * (6 * d + 4 * dv),
        exps=steps * bq * bk,
        memory_bytes=operand_bytes(problem, True) + rows * (16 * d + 8 + 2 * problem.head_dim_v),
        shared_bytes=int(steps * (2 * warps * operands + 2 * stored + loaded)),
        tile_bytes=steps * (loaded + 8 * bq + 4 * bq * d),
    )


def hopper_backward(problem: Problem, spec: HopperBackwardSpec) -> Amounts:
    """Of the backward with wgmma, and of the two small kernels around it, as those of `portable_backward`.

    A warpgroup of 64 keys reads them and the queries for S^T and dP^T, the queries for dk and dv, and the dS^T of all
    warpgroups and the keys for its 64 rows or columns of dq.
    """
    d, dv, bq, bk = spec.head_dim, spec.head_dim_v, spec.block_q, spec.block_k
    pairs = problem.batch * problem.heads_q
    steps, rows = pairs * tiles(problem, bq, bk), pairs * problem.seqlen_q
    operands = spec.groups * ((64 + 2 * bq) * (d + dv) + 2 * bk * 64)
    loaded = 2 * bq * (d + dv)
    return Amounts(
        flops=steps * bq * bk * (6 * d + 4 * dv),
        exps=steps * bq * bk,
        memory_bytes=operand_bytes(problem, True) + rows * (16 * d + 16 + 2 * problem.head_dim_v),
        shared_bytes=steps * (2 * operands + 2 * bq * bk + loaded),
        tile_bytes=steps * (loaded + 8 * bq + 4 * bq * d),
    )


def hopper_split_backward(problem: Problem, keys: HopperKeysSpec, queries: HopperQueriesSpec) -> Amounts:
    """Of the backward with wgmma in two kernels and of the small one before them, which computes ``delta``.

    Both compute S and dP, so that they make seven products of the five. The kernel of dk and dv hands P over from one
    warpgroup to the other; it keeps some columns of k and v in registers, the left operands of S^T and dP^T.
    """
    d, dv = keys.head_dim, keys.head_dim_v
    pairs = problem.batch * problem.heads_q
    of_keys, of_queries = pairs * tiles(problem, 64, 64), pairs * tiles(problem, queries.block_q, 64)
    left = max(0, d - 64 * keys.kept) + max(0, dv - 64 * keys.kept)
    loaded = 2 * 64 * (d + dv)
    rows = pairs * problem.seqlen_q
    return Amounts(
        flops=of_keys * 64 * 64 * 4 * (d + dv) + of_queries * queries.block_q * 64 * (4 * d + 2 * dv),
        exps=(of_keys * 64 + of_queries * queries.block_q) * 64,
        memory_bytes=operand_bytes(problem, True) + operand_bytes(problem) + rows * (12 + 2 * problem.head_dim_v),
        shared_bytes=of_keys * (2 * 64 * (left + 2 * (d + dv)) + 4 * 64 * 64 + loaded)
        + of_queries * (queries.block_q // 64 * 2 * 64 * (3 * d + 2 * dv) + loaded),
        tile_bytes=(of_keys + of_queries) * loaded,
    )


def io_complexity(problem: Problem, sram_elements: int) -> dict[str, int | None]:
    """Elements that standard attention and FlashAttention-1 move, up to a constant factor (Theorem 2 of [1]_).

    For sequence length N, head dimension d and an on-chip memory of M elements, d <= M <= N d: standard attention
    needs Theta(N d + N^2) accesses to DRAM, FlashAttention Theta(N^2 d^2 / M). With two lengths, N^2 stands for
    seqlen_q * seqlen_k, and N d for the larger of the two matrices.

    Parameters
    ----------
    problem : Problem
    sram_elements : int
        M: elements that fit in the shared memory of a multiprocessor.

    Returns
    -------
    dict
        ``"standard"`` and ``"flash"``, for all heads of the batch; the latter None where M is not in that range.

    References
    ----------
    .. [1] T. Dao et al., "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness",
       arXiv:2205.14135, Theorem 2.
    """
    pairs, d = problem.batch * problem.heads_q, max(problem.head_dim, problem.head_dim_v)
    area, rows = problem.seqlen_q * problem.seqlen_k, max(problem.seqlen_q, problem.seqlen_k)
    within = d <= sram_elements <= rows * d
    return {"standard": pairs * (area + rows * d), "flash": pairs * area * d * d // sram_elements if within else None}
