"""Backend for packed NumPy arrays: one sequence after the other, each as a dense call."""

from __future__ import annotations

import numpy as np

from . import checks, cpu
from .segments import segments


def forward(problem, indices, q, k, v, out, lse, slopes, sink, seed):
    """Write `out` and, unless it is `None`, `lse`; rows of no sequence become 0 and -inf."""
    out[...] = 0
    if lse is not None:
        lse[...] = -np.inf
    for b, at in enumerate(segments(indices)):
        alone = checks.segment(problem, at.q.stop - at.q.start, at.k.stop - at.k.start)
        rows_lse = None if lse is None else lse[None, :, at.q]
        if not alone.empty:
            arrays = (x[None, rows] for x, rows in zip((q, k, v, out), (at.q, at.k, at.k, at.q)))
            cpu.forward(alone, *arrays, rows_lse, _of(slopes, b), sink, seed, first_batch=b)
        elif lse is not None and sink is not None:
            rows_lse[...] = sink[:, None]


def backward(problem, indices, dout, q, k, v, out, lse, dlse, dq, dk, dv, slopes, sink, dsink, deterministic, seed):
    """Write `dq`, `dk`, `dv` and, unless it is `None`, `dsink`; gradients of rows of no sequence are 0."""
    for gradient in (dq, dk, dv, dsink):
        if gradient is not None:
            gradient[...] = 0
    part = None if dsink is None else dsink.copy()
    for b, at in enumerate(segments(indices)):
        alone = checks.segment(problem, at.q.stop - at.q.start, at.k.stop - at.k.start)
        rows_dlse = None if dlse is None else dlse[None, :, at.q]
        if not alone.empty:
            arrays = (x[None, rows] for x, rows in zip((dout, q, k, v, out), (at.q, at.q, at.k, at.k, at.q)))
            gradients = (x[None, rows] for x, rows in zip((dq, dk, dv), (at.q, at.k, at.k)))
            more = _of(slopes, b), sink, part, deterministic, seed
            cpu.backward(alone, *arrays, lse[None, :, at.q], rows_dlse, *gradients, *more, first_batch=b)
        elif part is not None:
            # Beside a sink there is no key: lse is the sink, if there is one, and out is 0.
            part[...] = 0 if dlse is None else np.where(sink == -np.inf, 0, rows_dlse[0].sum(axis=1))
        if part is not None:
            dsink += part


def _of(slopes, b):
    return None if slopes is None else slopes[b : b + 1]
