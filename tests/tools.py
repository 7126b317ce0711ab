"""What the tests share: backends, inputs, buffers with guards, the yardstick of error, and the check of a case."""

from __future__ import annotations

import hashlib
import importlib
import math
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import cupyflash
from cupyflash import checks, compiler, dual, reference
from cupyflash.choose import PATHS, paths

ROOT = Path(__file__).resolve().parents[1]
DTYPES = {name: np.dtype(name) for name in ("float16", "float32", "float64")} | {
    "bfloat16": np.dtype(ml_dtypes.bfloat16)
}
HOST_LOGITS = 1 << 22  # above, a reference for CUDA arrays is computed on the GPU

# Around every tile edge; each length meets itself and, as queries and as keys, another length.
LENGTHS = (1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 203, 255, 257, 1023, 1025)
_OTHER = [LENGTHS[(7 * i + 3) % len(LENGTHS)] for i in range(len(LENGTHS))]
LENGTH_PAIRS = sorted({*zip(LENGTHS, LENGTHS), *zip(LENGTHS, _OTHER), *zip(_OTHER, LENGTHS)})


# ---------------------------------------------------------------------------------------------- backends


def cuda_missing():
    """Why there is no CUDA here, or `None`."""
    try:
        import cupy
    except ImportError as error:
        return f"CuPy cannot be imported: {error}"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"no GPU: {error}"
    return None if count else "no GPU"


def nvrtc_missing():
    """Why CUDA sources cannot be compiled here, or `None`."""
    try:
        from cupy_backends.cuda.libs import nvrtc

        nvrtc.getVersion()
    except Exception as error:  # no CuPy, or no library: which error that is depends on CuPy
        return f"NVRTC cannot be loaded: {error}"
    return None


def nvrtc_compile(code, expressions, arch):
    """Compile CUDA C++ without a GPU; returns machine code. RuntimeError holds the compiler's log."""
    from cupy_backends.cuda.libs import nvrtc

    program = nvrtc.createProgram(code, "test.cu", (), ())
    try:
        for expression in expressions:
            nvrtc.addNameExpression(program, expression)
        try:
            nvrtc.compileProgram(program, (*compiler.OPTIONS, f"-arch={arch}", "-ftz=true"))
        except nvrtc.NVRTCError as error:
            raise RuntimeError(f"{error}\n{nvrtc.getProgramLog(program)}") from None
        return nvrtc.getCUBIN(program)
    finally:
        nvrtc.destroyProgram(program)


def _cuda_paths():
    if cuda_missing():
        return PATHS
    import cupy

    return paths(int(cupy.cuda.Device(0).compute_capability), cupy.cuda.nvrtc.getVersion())


CUDA_PATHS = _cuda_paths()  # the kernel paths that the tests marked gpu run


@dataclass(frozen=True)
class Backend:
    """Where a test runs, and in which dtype."""

    name: str  # "numpy" or "cuda"
    dtype_name: str
    path: str = ""  # of the kernels of "cuda"

    def activate(self, monkeypatch):
        """Make calls take the path."""
        if self.name == "cuda":
            monkeypatch.setenv("CUPYFLASH_PATH", self.path)
            monkeypatch.setattr("cupyflash.precise.HALVES_LENGTH", 1)  # short ones are no other case
            self.module._plans.clear()
        return self

    @property
    def dtype(self):
        return DTYPES[self.dtype_name]

    @property
    def xp(self):
        return importlib.import_module("cupy" if self.name == "cuda" else "numpy")

    @property
    def module(self):
        """The module with `forward` and `backward`."""
        return importlib.import_module("cupyflash.launch" if self.name == "cuda" else "cupyflash.cpu")

    @property
    def lse_dtype(self):
        return np.dtype("float64" if self.dtype_name == "float64" else "float32")

    @property
    def splits(self):
        """Whether products take their factors apart, which may cost an element its last bit."""
        return (self.name, self.dtype_name) == ("cuda", "float32")

    @property
    def other_rounding(self):
        """Relative: what numbers elsewhere change, which send float32 on Hopper to kernels that round otherwise."""
        return 16 * self.eps if self.splits and self.path == "sm90" else 0

    @property
    def eps(self):
        return float(ml_dtypes.finfo(self.dtype).eps)

    def array(self, values, dtype=None):
        """Host values rounded to `dtype` (that of the backend), in an array of the backend."""
        values = np.ascontiguousarray(values).astype(dtype or self.dtype)
        if self.name == "numpy":
            return values
        return self.xp.asarray(values.view(f"u{values.itemsize}")).view(values.dtype)

    def host(self, array):
        """An array of the backend as float64 on the host."""
        return (array if self.name == "numpy" else array.get()).astype(np.float64)

    def normal(self, shape, seed=0, factor=1.0):
        """Normal values about 0.5: a value that is dropped or counted twice then shows in every sum."""
        return self.array(factor * (np.random.default_rng(seed).standard_normal(shape) + 0.5))

    def poison(self):
        """Fill with NaN what a kernel may find in memory that it did not write: free and shared memory."""
        blocks = [self.xp.full(1 << n, 255, "u1") for n in range(9, 24)]
        del blocks
        if self.name == "cuda":
            _poison_shared_memory(self.xp)


def _poison_shared_memory(cupy):
    attributes = cupy.cuda.Device().attributes
    size = attributes["MaxSharedMemoryPerBlockOptin"]
    kernel = cupy.RawKernel(
        """extern "C" __global__ void poison(int words) {
            extern __shared__ volatile unsigned memory[];
            for (int i = threadIdx.x; i < words; i += blockDim.x) memory[i] = 0xffffffffu;
        }""",
        "poison",
    )
    kernel.max_dynamic_shared_size_bytes = size
    kernel((4 * attributes["MultiProcessorCount"],), (1024,), (np.int32(size // 4),), shared_mem=size)


def _backends(*names):
    params = []
    for name, dtype in (name.split("-") for name in names):
        if name == "numpy":
            params.append(pytest.param(Backend(name, dtype), id=f"{name}-{dtype}"))
            continue
        for path in PATHS[:1] if dtype == "float64" else CUDA_PATHS:
            if name in ("cuda", path):
                backend = Backend("cuda", dtype, path)
                params.append(pytest.param(backend, marks=pytest.mark.gpu, id=f"{path}-{dtype}"))
    return params


def backend_fixture(name, doc, *names):
    def backend(request, monkeypatch):
        return request.param.activate(monkeypatch)

    backend.__doc__ = doc
    return pytest.fixture(params=_backends(*names), name=name)(backend)


ALL_16 = ("numpy-float16", "numpy-bfloat16", "cuda-float16", "cuda-bfloat16")
ALL_OPTIONS = (*ALL_16, "numpy-float32", "numpy-float64")
# The fixture of modules whose tests need no option that float32 and float64 lack on the GPU.
every_backend = backend_fixture(
    "backend", "Every backend in every dtype.", *ALL_OPTIONS, "cuda-float32", "cuda-float64"
)
# Those of modules about an option, each of which is one more kernel to compile: the GPU's paths in one dtype each.
_OPTION_16 = ("numpy-float16", "numpy-bfloat16", "sm80-float16", "sm90-bfloat16")
option_backend = backend_fixture("backend", "Of `backend`.", *_OPTION_16, "numpy-float32", "numpy-float64")
option_backend16 = backend_fixture("backend16", "Of `backend16`.", *_OPTION_16)


# ---------------------------------------------------------------------------------------------- inputs


@dataclass(frozen=True)
class Inputs:
    """Arrays of one case."""

    q: object
    k: object
    v: object
    dout: object
    dlse: object

    @property
    def qkv(self):
        return self.q, self.k, self.v


def inputs(backend, seqlen_q, seqlen_k=None, heads_q=2, heads_k=None, head_dim=64, head_dim_v=None, batch=2, **how):
    """Random arrays of a case; `how` goes to `Backend.normal`."""
    seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
    heads_k = heads_k or heads_q
    head_dim_v = head_dim_v or head_dim
    seed = how.pop("seed", 0)
    shapes = (
        (batch, seqlen_q, heads_q, head_dim),
        (batch, seqlen_k, heads_k, head_dim),
        (batch, seqlen_k, heads_k, head_dim_v),
        (batch, seqlen_q, heads_q, head_dim_v),
    )
    q, k, v, dout = (backend.normal(shape, 5 * seed + i, **how) for i, shape in enumerate(shapes))
    dlse = np.random.default_rng(5 * seed + 4).standard_normal((batch, heads_q, seqlen_q))
    return Inputs(q, k, v, dout, backend.array(dlse, backend.lse_dtype))


@dataclass(frozen=True)
class Layout:
    """How an array of four axes lies in memory."""

    order: tuple = (0, 1, 2, 3)  # axes of memory, slowest first
    offset: int = 0  # elements before the first
    padding: int = 0  # elements between the rows of the fastest axis
    step: int = 1  # of the last axis
    flip: tuple = ()  # axes that run backwards

    def place(self, flat, shape):
        """A view of `flat` with `shape`."""
        sizes = self._sizes(shape)
        view = flat[self.offset : self.offset + math.prod(sizes)].reshape(sizes)
        view = view.transpose(np.argsort(self.order).tolist())
        view = view[tuple(slice(0, n * s, s) for n, s in zip(shape, (1, 1, 1, self.step)))]
        return view[tuple(slice(None, None, -1 if axis in self.flip else 1) for axis in range(len(shape)))]

    def size(self, shape):
        """Elements of `flat` that `place` needs."""
        return self.offset + math.prod(self._sizes(shape))

    def _sizes(self, shape):
        sizes = [shape[axis] * (self.step if axis == len(shape) - 1 else 1) for axis in self.order]
        return [*sizes[:-1], sizes[-1] + self.padding]


LAYOUTS = {
    "contiguous": Layout(),
    "heads first": Layout(order=(0, 2, 1, 3)),
    "sequence first": Layout(order=(1, 0, 2, 3)),
    "padded": Layout(padding=8, offset=8),
    "padded by one": Layout(padding=1, offset=3),
    "one element off": Layout(offset=1),
    "two elements off": Layout(offset=2),
    "four elements off": Layout(offset=4),
    "every other element": Layout(step=2),
    "last axis slow": Layout(order=(0, 3, 2, 1)),
    "sequence backwards": Layout(flip=(1,)),
    "heads and batch backwards": Layout(flip=(0, 2), offset=1),
    "last axis backwards": Layout(flip=(3,)),
}
# A last axis that is not contiguous is allowed for inputs; backends take it for outputs too.


class Guarded:
    """An array in the midst of memory that must not change: all of it starts as NaN."""

    MARGIN = 512

    def __init__(self, backend, shape, dtype=None, layout=LAYOUTS["contiguous"]):
        self.backend, self.shape, self.layout = backend, shape, layout
        dtype = np.dtype(dtype or backend.dtype)
        self.bits = np.dtype(f"u{dtype.itemsize}")
        size = layout.size(shape) + 2 * self.MARGIN
        self.flat = backend.xp.full(size * dtype.itemsize, 255, "u1").view(self.bits)
        self.array = self._view(self.flat.view(dtype))

    def _view(self, flat):
        return self.layout.place(flat[self.MARGIN :], self.shape)

    def check(self):
        """Fail if memory around the array was written."""
        flat = self.flat if self.backend.name == "numpy" else self.flat.get()
        flat = flat.copy()
        nothing = np.iinfo(self.bits).max
        self._view(flat)[...] = nothing
        changed = np.flatnonzero(flat != nothing)
        assert changed.size == 0, f"written outside of the array, at elements {changed[:8] - self.MARGIN}"


def laid_out(backend, values, layout):
    """A copy of an array in another layout, surrounded by NaN."""
    guarded = Guarded(backend, values.shape, values.dtype, layout)
    guarded.array[...] = values
    return guarded.array


def rows_are_contiguous(x):
    return x.strides[-1] == x.itemsize


# ---------------------------------------------------------------------------------------------- right and wrong


def yardstick(
    dtype,
    q,
    k,
    v,
    dout=None,
    dlse=None,
    *,
    causal=False,
    window=None,
    scale=None,
    softcap=None,
    bias=None,
    mask=None,
    alibi_slopes=None,
    sink=None,
    dropout=0.0,
    seed=None,
    score_mod=None,
    mask_mod=None,
    bias_dtype=None,
):
    """What is right, and how far off one may be: `{name: (expected, allowed)}`.

    Takes float64 arrays of four axes, and the dtype that `bias` had. Allowed is twice the error of a plain
    implementation (products and softmax in float32, weights and results rounded to the dtype) and a floor: the rounding
    of the result, and of every term of its sum as if independent. Without the floor, a plain implementation that is
    right by luck on a tiny case would allow nothing.
    """
    options = {"causal": causal, "window": window, "scale": scale, "softcap": softcap, "alibi_slopes": alibi_slopes}
    options |= {"bias": bias, "mask": mask, "sink": sink, "score_mod": score_mod, "mask_mod": mask_mod}
    options |= {"dropout": dropout, "seed": seed}
    xp = reference._namespace(q)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    group = q.shape[2] // k.shape[2]
    work = np.float64 if dtype.name == "float64" else np.float32

    def heads_first(x):
        return x.reshape(*x.shape[:2], k.shape[2], -1, x.shape[-1]).transpose(0, 2, 3, 1, 4)

    def back(x, heads):
        return x.transpose(0, 3, 1, 2, 4).reshape(x.shape[0], x.shape[3], heads, x.shape[-1])

    def per_key(x):
        return back(x.sum(axis=2, keepdims=True), k.shape[2])

    def per_query(x):
        return back(x, q.shape[2])

    def rounded(x):
        return x.astype(dtype).astype(work)

    def transposed(x):
        return x.swapaxes(-1, -2)

    def rss(a, b):
        return xp.sqrt((a * a) @ (b * b))

    expected, expected_lse = reference.attention(q, k, v, return_lse=True, **options)
    q_, k_, v_ = (heads_first(x).astype(work) for x in (q, k, v))
    s, derivative, added = work(scale) * (q_ @ transposed(k_)), work(1), work(0)
    if softcap is not None:
        tanh = xp.tanh(s / work(softcap))
        s, derivative = work(softcap) * tanh, 1 - tanh * tanh
    if alibi_slopes is not None:
        slopes = alibi_slopes.astype(work).reshape(*alibi_slopes.shape[:-1], k.shape[2], group, 1, 1)
        added = -slopes * xp.abs(reference._ahead(xp, q.shape[1], k.shape[1], causal)).astype(work)
    terms_of_s, s = abs(s) + abs(added), s + added
    if bias is not None:
        added = reference._by_head(xp, bias.astype(work), s)
        terms_of_s, s = terms_of_s + abs(added), s + added
    before, tangent, places = s, work(1), reference._places(xp, s)
    if score_mod is not None:
        captured = {
            n: x.astype(work) if isinstance(x, np.ndarray) and x.dtype.kind not in "biu" else x
            for n, x in score_mod.captures.items()
        }
        s, tangent = dual.score_and_tangent(score_mod.function, before, places, captured)
        tangent = np.asarray(tangent, work)
        terms_of_s = terms_of_s * np.abs(tangent) + abs(before) + xp.where(np.isfinite(s), abs(s), 0)
        s = s.astype(work)
    seen = reference.visible(xp, q.shape[1], k.shape[1], causal, window)
    if mask is not None:
        seen = seen & reference._by_head(xp, mask, s)
    if mask_mod is not None:
        seen = seen & mask_mod.function(*places, **mask_mod.captures)
    terms_of_s, s = xp.where(seen, terms_of_s, work(0)), xp.where(seen, s, -work(math.inf))
    sinks = xp.full((1, 1, 1, 1), -math.inf, work) if sink is None else sink.astype(work).reshape(k.shape[2], -1, 1, 1)
    highest = xp.maximum(s.max(axis=-1, keepdims=True), sinks)
    highest = xp.where(highest == -math.inf, work(0), highest)
    p, p_sink = xp.exp(s - highest), xp.exp(sinks - highest)
    total = p.sum(axis=-1, keepdims=True) + p_sink
    total_or_one = xp.where(total == 0, work(1), total)
    p, p_sink = p / total_or_one, p_sink / total_or_one
    lse = xp.where(total == 0, -work(math.inf), highest + xp.log(total_or_one))
    factor = work(1)
    if dropout:
        mask = cupyflash.dropout_mask(*(q.shape[i] for i in (0, 2, 1)), k.shape[1], dropout=dropout, seed=seed, xp=xp)
        factor = mask.reshape(p.shape) / work(1 - dropout)
    o = rounded(rounded(factor * p) @ v_)

    steepest = _largest(xp, terms_of_s)
    eps, work_eps = float(ml_dtypes.finfo(dtype).eps), float(np.finfo(work).eps)
    terms = q.shape[1] + k.shape[1] if dtype == work else 1  # sums in the dtype itself round every term
    tiny = terms * float(ml_dtypes.finfo(dtype).smallest_subnormal)
    slack = {"float32": 4, "float64": 16 * (1 + steepest)}.get(dtype.name, 0.25)

    def bound(right, plain, magnitude):
        error = _largest(xp, right - plain)
        return right, 2 * error + slack * eps * (_largest(xp, right) + _largest(xp, magnitude)) + tiny

    results = {"out": bound(expected, per_query(o), rss(factor * p, v_))}
    lse = lse.reshape(expected_lse.shape)
    results["lse"] = (expected_lse, 2 * _largest(xp, expected_lse - lse) + 8 * work_eps * (1 + steepest))
    if dout is None:
        return results
    if dtype.name == "float32":  # a backward that makes weights again reads lse, rounded: an error of whole rows
        slack += _largest(xp, expected_lse) / 2

    gradients = reference.attention_backward(dout, q, k, v, expected, expected_lse, dlse=dlse, **options)
    do = heads_first(dout).astype(work)
    delta = (do * o).sum(axis=-1, keepdims=True)
    if dlse is not None:
        delta = delta - dlse.astype(work).reshape(delta.shape)
    dp = factor * (do @ transposed(v_))
    of_result = p * (dp - delta)
    ds_before = xp.where(p == 0, work(0), of_result * tangent)
    ds = rounded(derivative * ds_before)
    delta_error = xp.sqrt((do * do * o * o).sum(axis=-1, keepdims=True))  # o is rounded: one error for the whole row
    if bias is not None:
        # The error of delta is one of the whole row, and of a bias for whole rows it is that of all its weights.
        shape = (*q.shape[:1], q.shape[2], q.shape[1], k.shape[1])
        plain = reference._summed(ds_before.reshape(shape), bias.shape)
        floor = xp.abs(dp) + xp.abs(delta)
        squares = reference._summed(((p * floor) ** 2).reshape(shape), bias.shape)
        per_row = p.reshape(shape)
        if 1 in bias.shape[-1:] or bias.ndim == 0:
            per_row = per_row.sum(axis=-1, keepdims=True)
        of_delta = (per_row * delta_error.reshape(*shape[:-1], 1)) ** 2
        squares = squares + reference._summed(of_delta, bias.shape)
        right, allowed = bound(gradients.dbias, plain.astype(bias_dtype).astype(work), xp.sqrt(squares))
        info = ml_dtypes.finfo(bias_dtype)
        allowed += float(info.eps) / 4 * _largest(xp, right) + float(info.smallest_subnormal)
        results["dbias"] = right, allowed
    if score_mod is not None and score_mod.gradients:
        results["dscore_mod"] = _captured_bounds(
            score_mod,
            before,
            places,
            captured,
            gradients.dscore_mod,
            of_result,
            p,
            abs(dp) + abs(delta),
            delta_error,
            eps,
        )
    if softcap is not None or score_mod is not None:
        derivative = derivative + 2 * work_eps / (slack * eps)  # where tanh is nearly 1 it has few digits
    p_ds = derivative * xp.where(p == 0, work(0), p * abs(tangent))
    term = p_ds * (xp.abs(dp) + xp.abs(delta))
    scale = work(scale)
    dq_floor = abs(scale) * (rss(term, k_) + delta_error * xp.abs(p_ds @ k_))
    dk_floor = abs(scale) * (rss(transposed(term), q_) + rss(transposed(p_ds * delta_error), q_))
    results["dq"] = bound(gradients.dq, per_query(rounded(scale * (ds @ k_))), dq_floor)
    results["dk"] = bound(gradients.dk, rounded(per_key(scale * (transposed(ds) @ q_))), dk_floor * group**0.5)
    dv_floor = rss(transposed(factor * p), do) * group**0.5
    results["dv"] = bound(gradients.dv, rounded(per_key(transposed(rounded(factor * p)) @ do)), dv_floor)
    if sink is not None:
        terms, floors = -p_sink * delta, p_sink * (abs(delta) + delta_error)
        dsink, floor = (x.sum(axis=(0, 3, 4)).ravel() for x in (terms, floors * floors))
        results["dsink"] = bound(gradients.dsink, dsink, xp.sqrt(floor))
    return results


def _captured_bounds(score_mod, before, places, captured, right, ds, p, floor, delta_error, eps):
    """Those of the gradients of what a `ScoreMod` captured, by name."""
    sums = {name: np.zeros(captured[name].shape, np.float64) for name in score_mod.gradients}
    squares = {name: np.zeros(captured[name].shape, np.float64) for name in score_mod.gradients}
    dual.add_gradients(sums, score_mod.function, before, places, captured, ds)
    for name, index, tangent in dual.reads(score_mod.function, before, places, captured, score_mod.gradients):
        # The error of delta is one of the whole row: (sum of n terms)^2 <= n times the sum of their squares.
        terms = (p * floor) ** 2 + p.shape[-1] * (p * delta_error) ** 2
        np.add.at(squares[name], index, np.where(p == 0, 0, terms * np.asarray(tangent, np.float64) ** 2))
    bounds = {}
    for name in score_mod.gradients:
        info = ml_dtypes.finfo(score_mod.captures[name].dtype)
        error = _largest(np, right[name] - sums[name].astype(score_mod.captures[name].dtype).astype(np.float64))
        slack = eps / 4 * (_largest(np, right[name]) + _largest(np, np.sqrt(squares[name])))
        slack += 4 * float(np.finfo(p.dtype).eps) * ds.size**0.5 * _largest(np, np.sqrt(squares[name]))
        slack += float(info.eps) / 4 * _largest(np, right[name]) + float(info.smallest_subnormal)
        bounds[name] = right[name], 2 * error + slack
    return bounds


def _largest(xp, x):
    return float(xp.where(xp.isfinite(x), xp.abs(x), x.dtype.type(0)).max())


def assert_close(name, got, expected, allowed):
    """Same places of NaN and of both infinities, and elsewhere an error of at most `allowed`."""
    assert got.shape == expected.shape, f"{name}: shape {got.shape}, expected {expected.shape}"
    for what, test in (("NaN", np.isnan), ("inf", np.isposinf), ("-inf", np.isneginf)):
        wrong = np.argwhere(test(got) != test(expected))
        if len(wrong):
            at = tuple(map(int, wrong[0]))
            raise AssertionError(
                f"{name}: {len(wrong)} of {got.size} places of {what} are wrong, first {at}: "
                f"got {got[at]}, expected {expected[at]}"
            )
    if got.size == 0:
        return
    finite = np.isfinite(expected)
    error = np.abs(np.where(finite, got, 0) - np.where(finite, expected, 0))
    at = tuple(map(int, np.unravel_index(error.argmax(), error.shape)))
    assert error[at] <= allowed, (
        f"{name}: {np.count_nonzero(error > allowed)} of {got.size} are off by more than {allowed:.3g}, worst {at}: "
        f"got {got[at]:.9g}, expected {expected[at]:.9g}, error {error[at]:.3g}"
    )


def check(backend, q, k, v, dout=None, dlse=None, *, deterministic=False, expected=None, **options):
    """Run a case forward, and backward if there is a `dout`; compare all results with the reference.

    `expected`: options that the reference gets in another form.

    The output goes to a guarded buffer of NaN, and free memory is NaN. Returns the results.
    """
    backend.poison()
    guarded = Guarded(backend, (*q.shape[:-1], v.shape[-1]))
    out, lse = cupyflash.attention(q, k, v, out=guarded.array, return_lse=True, **options)
    guarded.check()
    assert out is guarded.array
    assert lse.dtype == backend.lse_dtype
    results = {"out": out, "lse": lse}
    if dout is not None:
        gradients = cupyflash.attention_backward(
            dout, q, k, v, out, lse, dlse=dlse, deterministic=deterministic, **options
        )
        results |= named(gradients)
        captured = results.pop("dscore_mod", {})
        for gradient, x in zip(gradients, (q, k, v, options.get("bias"), options.get("sink"))):
            assert gradient is x is None or gradient.dtype == x.dtype and isinstance(gradient, type(x))
    right = expectation(backend, q, k, v, dout, dlse, **options | (expected or {}))
    for name, result in results.items():
        assert_close(name, backend.host(result), *right[name])
    if dout is not None and captured:
        for name, result in captured.items():
            assert result.dtype == options["score_mod"].captures[name].dtype
            assert_close(f"dscore_mod of {name}", backend.host(result), *right["dscore_mod"][name])
        results["dscore_mod"] = captured
    return results


def _shown_whole(mod, full):
    """The function where `full`, (batch or 1, heads or 1, queries, keys), is true as well."""

    def function(b, h, i, j, full, **captures):
        batch, heads = full.shape[:2]
        return mod.function(b, h, i, j, **captures) | full[b % batch, h % heads, i, j]

    return cupyflash.MaskMod(function, full=full, **mod.captures)


def expectation(
    backend,
    q,
    k,
    v,
    dout=None,
    dlse=None,
    *,
    bias=None,
    mask=None,
    block_mask=None,
    alibi_slopes=None,
    sink=None,
    **options,
):
    """The yardstick for arrays of a backend, on the host; of a block mask, that of the dense mask."""
    if block_mask is not None:
        dense = block_mask.dense(q.shape[1], k.shape[1])
        mask = dense if mask is None else mask & dense
        if options.get("mask_mod") is not None and block_mask.full_for_mod is not None:
            full = backend.host(block_mask.elements_for_mod(q.shape[1], k.shape[1])).astype(bool)
            options["mask_mod"] = _shown_whole(options["mask_mod"], full)
    arrays, more = (q, k, v, dout, dlse), {"bias": bias, "alibi_slopes": alibi_slopes, "sink": sink}
    on_gpu = backend.name == "cuda" and math.prod(q.shape[:-1]) * k.shape[-3] > HOST_LOGITS

    def wide(x):
        return None if x is None else x.astype(np.float64) if on_gpu else backend.host(x)

    with np.errstate(all="ignore"):
        options |= {name: wide(x) for name, x in more.items()}
        options["mask"] = None if mask is None else wide(mask).astype(bool)
        options["bias_dtype"] = None if bias is None else bias.dtype
        right = yardstick(backend.dtype, *map(wide, arrays), **options)
    captured = right.pop("dscore_mod", None)
    right = {name: (expected.get() if on_gpu else expected, allowed) for name, (expected, allowed) in right.items()}
    return right if captured is None else right | {"dscore_mod": captured}


def problem(backend, q, k, v, *, causal=False, window=None, scale=None, softcap=None, alibi_slopes=None, sink=None):
    """The record that the backends take."""
    options = checks.options(causal, window, scale, softcap)
    return checks.forward(backend.name == "cuda", options, q=q, k=k, v=v, alibi_slopes=alibi_slopes, sink=sink)


def named(gradients):
    """Those that there are, by name."""
    return {name: gradient for name, gradient in gradients._asdict().items() if gradient is not None}


def same_bits(a, b):
    """Whether two arrays of one backend hold the same bits."""
    return a.shape == b.shape and a.tobytes() == b.tobytes()


def assert_copied(backend, got, expected):
    """The weight 1 gives the very bits, or all but the last one."""
    if not backend.splits:
        assert same_bits(got, expected)
    np.testing.assert_allclose(backend.host(got), backend.host(expected), rtol=backend.eps)


# ---------------------------------------------------------------------------------------------- record


def tree_digest(root=ROOT):
    """SHA-256 over the paths and bytes of what runs on the GPU: all `.py` and `.cuh` of the package and the kernels."""
    digest = hashlib.sha256()
    files = (path for folder in ("cupyflash", "kernels") for path in (root / folder).rglob("*"))
    for path in sorted(path for path in files if path.suffix in (".py", ".cuh")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()
