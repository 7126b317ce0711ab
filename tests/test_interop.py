"""Arrays of other libraries, layouts, devices, streams and threads."""

import contextlib
import ctypes
import gc
import importlib
import sys
import threading
import time
import types
import weakref

import ml_dtypes
import numpy as np
import pytest
from tools import named

import cupyflash
from cupyflash import interop

BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = ("float16", "bfloat16", "float32", "float64")
GPU_DTYPES = ("float16", "bfloat16")


def normal(shape, dtype="float32", seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def inputs(dtype="float32"):
    """dout, q, k, v"""
    shapes = (2, 5, 4, 6), (2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 6)
    return [normal(shape, dtype, seed) for seed, shape in enumerate(shapes)]


def results(dout, q, k, v, **options):
    """out, lse, dq, dk, dv and, with a bias and a sink, dbias and dsink"""
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
    return [out, lse, *named(cupyflash.attention_backward(dout, q, k, v, out, lse, dlse=lse, **options)).values()]


def assert_same(got, expected):
    for x, y in zip(got, expected, strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


# ----------------------------------------------------------------------------------------------- layouts


def layouts(x):
    """The values of x in other layouts."""
    wide = np.zeros((*x.shape[:-1], 2 * x.shape[-1] + 1), x.dtype)
    wide[..., 1::2] = x
    padded = np.full([n + 2 for n in x.shape], np.nan, x.dtype)
    inner = padded[tuple(slice(1, -1) for _ in x.shape)]
    inner[...] = x
    odd = np.zeros(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape)
    odd[...] = x
    return {
        "last axis first": np.ascontiguousarray(np.moveaxis(x, -1, 0)).transpose(1, 2, 3, 0),
        "heads before seqlen": np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2),
        "every other element": wide[..., 1::2],
        "keys backwards": np.ascontiguousarray(x[:, ::-1])[:, ::-1],
        "channels backwards": np.ascontiguousarray(x[..., ::-1])[..., ::-1],
        "within a larger array": inner,
        "odd address": odd,
    }


@pytest.mark.parametrize("name", layouts(normal((1, 1, 1, 1))))
@pytest.mark.parametrize("which", [0, 1, 2, 3, None])
def test_layouts(name, which):
    """Dao-AILab/flash-attention#355, #2777, cupy/cupy#10172: any strides, in one array or in all."""
    args = inputs()
    expected = results(*args)
    strange = [layouts(x)[name] if which in (i, None) else x for i, x in enumerate(args)]
    got = results(*strange)
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-6, atol=2e-6)  # BLAS may round otherwise
        assert x.flags.c_contiguous


def test_broadcast_gradient():
    """Dao-AILab/flash-attention#355: what the sum of out sends back has no strides at all."""
    _, q, k, v = inputs()
    dout = np.broadcast_to(np.float32(1), (2, 5, 4, 6))
    assert_same(results(dout, q, k, v), results(dout.copy(), q, k, v))


@pytest.mark.parametrize("stride", [0, 1, 3, 10**12, -(10**12)])
def test_axes_of_size_1(stride):
    """pytorch/pytorch#99803: their strides mean nothing."""
    args = [normal((1, 1, 1, 8), seed=seed) for seed in range(4)]
    expected = results(*args)
    strange = [np.lib.stride_tricks.as_strided(x, x.shape, (stride, stride, stride, 4)) for x in args]
    assert_same(results(*strange), expected)
    out = np.lib.stride_tricks.as_strided(np.empty(8, np.float32), (1, 1, 1, 8), (stride, stride, stride, 4))
    assert_same([cupyflash.attention(*strange[1:], out=out)], expected[:1])


def test_read_only_inputs():
    """jax-ml/jax#40789"""
    args = inputs()
    expected = results(*args)
    before = [x.copy() for x in args]
    for x in args:
        x.flags.writeable = False
    assert_same(results(*args), expected)
    assert_same(args, before)


def test_numpy_subclass(tmp_path):
    args = inputs()
    mapped = []
    for i, x in enumerate(args):
        mapped.append(np.memmap(tmp_path / str(i), x.dtype, "w+", shape=x.shape))
        mapped[-1][...] = x
    got = results(*mapped)
    assert_same(got, results(*args))
    assert all(type(x) is np.ndarray for x in got)


@pytest.mark.parametrize("dtype", DTYPES)
def test_metadata_of_a_dtype_stays_with_its_array(dtype):
    """It is no part of a dtype's equality: not in results, nor in those of a later call that looks alike."""
    plain = inputs(dtype)
    marked = [x.view(np.dtype(x.dtype, metadata={"of": "the caller"})) for x in plain]
    sys.modules["cupyflash.attention"]._plans.clear()
    for args in (marked, plain):
        got = results(*args)
        got += cupyflash.merge_attention((args[0], got[1].view(np.dtype(got[1].dtype, metadata={"of": "lse"}))))
        got.append(cupyflash.merge_attention((args[0], got[1]), dtype=np.dtype("float32", metadata={"of": "dtype"}))[0])
        assert all(x.dtype.metadata is None for x in got)
    assert marked[0].dtype.metadata


# ------------------------------------------------------------------------------- libraries, on the host


class Library:
    """A module of arrays with DLPack and nothing else."""

    __name__ = "library"

    class Array:
        def __init__(self, x, device=(1, 0)):
            self.x, self.device = x, device

        def __dlpack__(self, **kwargs):
            return self.x.__dlpack__(**kwargs)

        def __dlpack_device__(self):
            return self.device

        def __array_namespace__(self):
            return library

    def from_dlpack(self, x):
        return self.Array(np.from_dlpack(x))


library = Library()


def from_numpy(name, x):
    if name == "numpy":
        return x
    if name == "library":
        return library.Array(x)
    if name == "torch":
        torch = pytest.importorskip("torch")
        return torch.from_numpy(x.view("i2")).view(torch.bfloat16) if x.dtype == BF16 else torch.from_numpy(x)
    return pytest.importorskip("jax").numpy.asarray(x)


def to_numpy(x):
    if type(x).__module__ == "torch":
        torch = sys.modules["torch"]
        assert type(x) is torch.Tensor and not x.requires_grad
        return x.cpu().view(torch.int16).numpy().view(BF16) if x.dtype == torch.bfloat16 else x.cpu().numpy()
    return x.x if isinstance(x, Library.Array) else np.asarray(x)


CASES = [(name, dtype) for name in ("torch", "jax", "library") for dtype in DTYPES]
CASES = [case for case in CASES if case not in [("library", "bfloat16"), ("jax", "float64")]]


@pytest.mark.parametrize("name, dtype", CASES)
@pytest.mark.parametrize("batched", [True, False])
def test_library(name, dtype, batched):
    """cupy/cupy#8801, jax-ml/jax#40789: what comes in goes out, with the bits of NumPy; inputs stay as they are."""
    args = inputs(dtype)
    if not batched:
        args = [x[1] for x in args]
    before = [x.copy() for x in args]
    theirs = [from_numpy(name, x) for x in args]
    got = results(*theirs, causal=True)
    assert all(type(x) is type(theirs[0]) for x in got)
    assert_same(map(to_numpy, got), results(*args, causal=True))
    assert_same(map(to_numpy, theirs), before)


@pytest.mark.parametrize("name, dtype", CASES)
@pytest.mark.parametrize("shape", [(4,), (2, 4)])
def test_slopes_of_a_library(name, dtype, shape):
    args = inputs(dtype)
    slopes = normal(shape, "float64" if dtype == "float64" else "float32")
    theirs = [from_numpy(name, x) for x in args]
    got = results(*theirs, softcap=2, alibi_slopes=from_numpy(name, slopes))
    assert_same(map(to_numpy, got), results(*args, softcap=2, alibi_slopes=slopes))


@pytest.mark.parametrize("name, dtype", CASES)
def test_sink_of_a_library(name, dtype):
    args = inputs(dtype)
    sink = normal(4, "float64" if dtype == "float64" else "float32")
    theirs = [from_numpy(name, x) for x in (*args, sink)]
    *arrays, given = theirs
    for options in ({"causal": True}, {"softcap": 2}):
        got = results(*arrays, sink=given, **options)
        assert len(got) == 6 and all(type(x) is type(theirs[0]) for x in got)
        assert_same(map(to_numpy, got), results(*args, sink=sink, **options))
    assert_same(map(to_numpy, theirs), (*args, sink))


@pytest.mark.parametrize("name, dtype", CASES)
@pytest.mark.parametrize("shape", [(2, 4, 5, 7), (4, 1, 7), (5, 1), ()], ids=str)
def test_bias_and_mask_of_a_library(name, dtype, shape):
    args = inputs(dtype)
    bias, mask = np.asarray(normal(shape, seed=8)).astype(dtype), np.asarray(normal(shape, seed=9) > -0.7)
    theirs = [from_numpy(name, x) for x in (*args, bias, mask)]
    *arrays, their_bias, their_mask = theirs
    got = results(*arrays, bias=their_bias, mask=their_mask, causal=True)
    assert len(got) == 6 and all(type(x) is type(theirs[0]) for x in got)
    assert_same(map(to_numpy, got), results(*args, bias=bias, mask=mask, causal=True))
    assert_same(map(to_numpy, theirs), (*args, bias, mask))
    without = [from_numpy(name, x) for x in (args[0], args[1], args[2][:, :0], args[3][:, :0])]
    dbias = to_numpy(results(*without, bias=from_numpy(name, bias.reshape(-1)[:1]))[-1])
    assert dbias.shape == (1,) and not dbias.any()


@pytest.mark.parametrize("name, dtype", CASES)
def test_constant_bias_of_a_library(name, dtype):
    dout, q, k, v = inputs(dtype)
    bias = normal((4, 1, 7), seed=8).astype(dtype)
    out, lse = cupyflash.attention(q, k, v, bias=bias, return_lse=True)
    arrays = dout, q, k, v, out, lse
    *theirs, their_bias = (from_numpy(name, x) for x in (*arrays, bias))
    got = cupyflash.attention_backward(*theirs, bias=their_bias, bias_gradient=False)
    assert got.dbias is None and all(type(x) is type(theirs[0]) for x in got[:3])
    assert_same(map(to_numpy, got[:3]), cupyflash.attention_backward(*arrays, bias=bias)[:3])


def test_mask_of_torch():
    """Expanded without memory; no numbers."""
    torch = pytest.importorskip("torch")
    args = inputs()
    theirs = [from_numpy("torch", x) for x in args]
    mask = torch.from_numpy(normal((2, 1, 1, 7)) > -0.5)
    got = results(*theirs, mask=mask.expand(2, 4, 5, 7), bias=torch.ones(1).expand(5, 7))
    assert_same(map(to_numpy, got), results(*args, mask=mask.numpy(), bias=np.ones((5, 7), np.float32)))
    with pytest.raises(TypeError, match="mask has dtype torch.uint8; allowed: torch.bool"):
        cupyflash.attention(*theirs[1:], mask=mask.to(torch.uint8))
    with pytest.raises(TypeError, match="bias has dtype torch.bool; allowed: torch.float16, torch.bfloat16"):
        cupyflash.attention(*theirs[1:], bias=mask)
    with pytest.raises(ValueError, match="bias requires grad"):
        cupyflash.attention(*theirs[1:], bias=torch.ones(7, requires_grad=True))


@pytest.mark.parametrize("name", ["torch", "jax", "library"])
def test_sink_without_keys(name):
    dout, q, k, v = inputs()
    sink = normal(4)
    theirs = [from_numpy(name, x) for x in (dout, q, k[:, :0], v[:, :0])]
    got = results(*theirs, sink=from_numpy(name, sink))
    assert all(type(x) is type(theirs[0]) for x in got)
    lse, dsink = to_numpy(got[1]), to_numpy(got[-1])
    assert_same([lse], [np.broadcast_to(sink[:, None], (2, 4, 5))])
    np.testing.assert_allclose(dsink, 10 * sink, rtol=1e-6)


@pytest.mark.parametrize("name", ["torch", "library"])
def test_no_copy(name, monkeypatch):
    """The backend works in the memory of the caller's arrays."""
    args = inputs()
    seen = []
    monkeypatch.setattr("cupyflash.cpu.forward", lambda problem, *views: seen.extend(views))
    out = cupyflash.attention(*[from_numpy(name, x) for x in args[1:]])
    for x, view in zip((*args[1:], to_numpy(out)), seen, strict=False):
        assert x.__array_interface__["data"][0] == view.__array_interface__["data"][0]
    assert seen[4:] == [None] * 3 + [0] + [None] * 4  # lse, slopes, sink, seed, bias, mask, blocks, functions


def test_jax_without_copy(monkeypatch):
    _, q, k, v = (from_numpy("jax", x) for x in inputs("bfloat16"))
    seen = []
    monkeypatch.setattr("cupyflash.cpu.forward", lambda problem, *views: seen.extend(views))
    cupyflash.attention(q, k, v)
    for x, view in zip((q, k, v), seen, strict=False):
        assert x.unsafe_buffer_pointer() == view.__array_interface__["data"][0]


@pytest.mark.parametrize("name", ["jax", "library"])
def test_immutable_out(name):
    """jax-ml/jax#40789: refused, whatever the shape."""
    _, q, k, v = (from_numpy(name, x) for x in inputs())
    out = from_numpy(name, np.zeros((2, 5, 4, 6), "float32"))
    with pytest.raises(ValueError, match="out is a read-only array in .* on the host; allowed"):
        cupyflash.attention(q, k, v, out=out)
    assert not to_numpy(out).any()


@pytest.mark.parametrize(
    "first, second", [("numpy", "torch"), ("torch", "numpy"), ("library", "numpy"), ("jax", "torch")]
)
def test_libraries_do_not_mix(first, second):
    """cupy/cupy#9842"""
    dout, q, k, v = inputs()
    names = {"numpy": "NumPy", "torch": "PyTorch", "jax": "JAX", "library": "library"}
    with pytest.raises(TypeError, match="allowed") as caught:
        cupyflash.attention(from_numpy(first, q), from_numpy(second, k), from_numpy(first, v))
    for part in (f"q is in {names[first]} on the host", f"k is in {names[second]} on the host"):
        assert part in str(caught.value)
    with pytest.raises(TypeError, match=f"out is in {names[second]}"):
        cupyflash.attention(*[from_numpy(first, x) for x in (q, k, v)], out=from_numpy(second, dout))
    with pytest.raises(TypeError, match=f"alibi_slopes is in {names[second]}"):
        slopes = from_numpy(second, normal(4))
        cupyflash.attention(*[from_numpy(first, x) for x in (q, k, v)], alibi_slopes=slopes)
    with pytest.raises(TypeError, match=f"sink is in {names[second]}"):
        cupyflash.attention(*[from_numpy(first, x) for x in (q, k, v)], sink=from_numpy(second, normal(4)))


def test_library_without_namespace():
    class Array(Library.Array):
        __array_namespace__ = property()

    _, q, k, v = inputs()
    with pytest.raises(TypeError, match="q is a .*Array without __array_namespace__"):
        cupyflash.attention(Array(q), Array(k), Array(v))


def test_library_that_cannot_export():
    """NumPy takes no bfloat16 through DLPack: an error, and no result of another dtype."""
    _, q, k, v = (library.Array(x) for x in inputs("bfloat16"))
    with pytest.raises(TypeError, match="q is a .*Array that numpy cannot view: .*; allowed"):
        cupyflash.attention(q, k, v)


def test_library_on_another_device():
    _, q, k, v = (library.Array(x, (8, 0)) for x in inputs())
    with pytest.raises(ValueError, match=r"q is on DLPack device \(8, 0\); allowed"):
        cupyflash.attention(q, k, v)


def raises(error):
    def method(self, *args, **kwargs):
        raise error

    return method


@pytest.mark.parametrize(
    "name, broken",
    [
        *(
            ("__dlpack_device__", lambda self, device=device: device)
            for device in (None, 1, (), (1,), (1, 0, 0), "ab", (1, None), (1.5, 0), ([], {}))
        ),
        ("__dlpack_device__", raises(ValueError("lost"))),
        ("__dlpack_device__", raises(ZeroDivisionError("lost"))),
        ("__dlpack_device__", None),
        ("__array_namespace__", raises(KeyError("lost"))),
        ("__dlpack__", raises(ValueError("lost"))),
        ("__dlpack__", raises(ZeroDivisionError("lost"))),
        ("__dlpack__", raises(MemoryError("lost"))),
        ("__dlpack__", lambda self, **kwargs: None),
        ("__dlpack__", None),
    ],
)
@pytest.mark.parametrize("position", [0, 2])
def test_library_that_is_broken(name, broken, position):
    kind = type("Broken", (Library.Array,), {name: broken})
    args = [library.Array(x) for x in inputs()[1:]]
    args[position] = kind(args[position].x)
    with pytest.raises(TypeError, match=f"^{'qkv'[position]} is a .*Broken.*; allowed"):
        cupyflash.attention(*args)


def test_library_on_no_device():
    _, q, k, v = (library.Array(x, (2, -1)) for x in inputs())
    with pytest.raises(ValueError, match=r"q is on DLPack device \(2, -1\); allowed"):
        cupyflash.attention(q, k, v)


def test_types_are_not_kept():
    kind = type("Local", (Library.Array,), {})
    cupyflash.attention(*[kind(x) for x in inputs()[1:]])
    assert kind in interop._FINDERS
    known = weakref.ref(kind)
    del kind
    gc.collect()
    assert known() is None


# ----------------------------------------------------------------------------------------------- PyTorch


def test_torch_out():
    dout, q, k, v = inputs("bfloat16")
    expected = cupyflash.attention(q, k, v)
    q, k, v = (from_numpy("torch", x) for x in (q, k, v))
    out = from_numpy("torch", dout)
    assert cupyflash.attention(q, k, v, out=out) is out
    assert_same([to_numpy(out)], [expected])
    with pytest.raises(ValueError, match="out shares memory with q"):
        cupyflash.attention(q, k, v, out=q[..., :6])


def test_torch_requires_grad():
    """ROCm/FlyDSL#1099"""
    torch = pytest.importorskip("torch")
    args = inputs()
    expected = results(*args)
    dout, q, k, v = (torch.nn.Parameter(from_numpy("torch", x)) for x in args)
    with pytest.raises(ValueError, match=r"q requires grad.*q\.detach\(\).*torch\.no_grad\(\).*attention_backward"):
        cupyflash.attention(q, k, v)
    with pytest.raises(ValueError, match="v requires grad"):
        cupyflash.attention(q.detach(), k.detach(), v)
    with pytest.raises(ValueError, match="dout requires grad"):
        cupyflash.attention_backward(dout, *[from_numpy("torch", x) for x in (*args[1:], *expected[:2])])
    slopes = torch.ones(4, requires_grad=True)
    with pytest.raises(ValueError, match="alibi_slopes requires grad"):
        cupyflash.attention(*[x.detach() for x in (q, k, v)], alibi_slopes=slopes)
    with pytest.raises(ValueError, match=r"sink requires grad.*sink\.detach\(\)"):
        cupyflash.attention(*[x.detach() for x in (q, k, v)], sink=slopes)
    with torch.no_grad():
        assert_same(map(to_numpy, results(dout, q, k, v)), expected)
    with torch.inference_mode():
        assert_same(map(to_numpy, results(dout, q, k, v)), expected)
    assert_same(map(to_numpy, results(*[x.detach() for x in (dout, q, k, v)])), expected)


def test_torch_tensors_without_plain_memory():
    """cupy/cupy#9842"""
    torch = pytest.importorskip("torch")
    _, q, k, v = (from_numpy("torch", x) for x in inputs())
    negative = torch.complex(q, -q).conj().imag
    conjugate = torch.complex(q, q).conj()
    for wrong, error, words in (
        (negative, ValueError, r"q has .*is_neg\(\) True; allowed: .*resolve_neg\(\)"),
        (conjugate, ValueError, r"q has .*is_conj\(\) True"),
        (q.to_sparse(), ValueError, "q has layout torch.sparse_coo"),
        (q.to("meta"), ValueError, "q is a tensor on device meta; allowed: cpu, cuda"),
        (q.to(torch.int32), TypeError, "q has dtype torch.int32; allowed: torch.float16, torch.bfloat16"),
        (q.to(torch.float8_e4m3fn), TypeError, "q has dtype torch.float8_e4m3fn"),
    ):
        with pytest.raises(error, match=words):
            cupyflash.attention(wrong, k, v)
    expected = cupyflash.attention(q, k, v)
    assert torch.equal(cupyflash.attention(negative.resolve_neg(), k, v), expected)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("position", [0, 2])
def test_torch_tensors_without_memory(position):
    torch = pytest.importorskip("torch")
    fake = pytest.importorskip("torch._subclasses.fake_tensor").FakeTensorMode()
    args = [from_numpy("torch", x) for x in inputs()[1:]]
    name = "qkv"[position]

    def call(wrong):
        cupyflash.attention(*args[:position], wrong, *args[position + 1 :])

    for layout in (torch.strided, torch.jagged):
        with pytest.raises(TypeError, match=f"^{name} is a nested tensor; allowed: plain tensors"):
            call(torch.nested.nested_tensor([*args[position]], layout=layout))
    with pytest.raises(TypeError, match=f"^{name} is a .*FakeTensor whose memory.*; allowed: plain tensors"):
        call(fake.from_tensor(args[position]))
    with pytest.raises(TypeError, match=f"^{name} is a torch.Tensor whose memory.*; allowed: plain tensors"):
        torch.func.vmap(call)(args[position][None])


def test_torch_layouts():
    """Transposed, expanded and sliced tensors, bfloat16 among them."""
    _, q, k, v = (from_numpy("torch", x) for x in inputs("bfloat16"))
    dout = from_numpy("torch", normal((1, 1, 1, 1), "bfloat16")).expand(2, 5, 4, 6)
    expected = [to_numpy(x) for x in results(dout.clone(), q, k, v)]
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    k = k.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)
    v = v.repeat(1, 1, 1, 2)[..., :6]
    assert_same(map(to_numpy, results(dout, q, k, v)), expected)


# --------------------------------------------------------------------------------------------------- JAX


def test_jax_tracer():
    jax = pytest.importorskip("jax")
    _, q, k, v = (from_numpy("jax", x) for x in inputs())
    with pytest.raises(TypeError, match="q is traced by JAX; allowed"):
        jax.jit(cupyflash.attention)(q, k, v)


# -------------------------------------------------------------------------------- CuPy arrays, without a GPU


def cupy_array(x, device=0):
    """A CuPy array at the address of host memory: it can be checked, but not computed with."""
    cupy = pytest.importorskip("cupy")
    memory = cupy.cuda.UnownedMemory(x.__array_interface__["data"][0], x.nbytes, x, device)
    return cupy.ndarray(x.shape, x.dtype, cupy.cuda.MemoryPointer(memory, 0), x.strides)


@pytest.fixture
def current_device(monkeypatch):
    """Stand in for CUDA: the device that is current, and the order in which others became so."""
    cupy = pytest.importorskip("cupy")
    stack = [0]

    class Device:
        def __init__(self, index):
            self.index = index

        def __enter__(self):
            stack.append(self.index)

        def __exit__(self, *exc):
            stack.append("left")

    cuda = types.SimpleNamespace(runtime=types.SimpleNamespace(getDevice=lambda: 0), Device=Device)
    xp = types.SimpleNamespace(
        cuda=cuda,
        ndarray=cupy.ndarray,
        ascontiguousarray=lambda x: ("copy", x),
    )
    monkeypatch.setattr(interop.Home, "xp", xp)
    return stack


def test_cupy_devices_do_not_mix():
    """Dao-AILab/flash-attention#1793"""
    _, q, k, v = inputs("float16")
    with pytest.raises(ValueError, match="q is in CuPy on GPU 0, k is in CuPy on GPU 1, v is in CuPy on GPU 0"):
        cupyflash.attention(cupy_array(q), cupy_array(k, 1), cupy_array(v))
    with pytest.raises(TypeError, match="q is in CuPy on GPU 0, k is in NumPy on the host"):
        cupyflash.attention(cupy_array(q), k, v)


@pytest.mark.parametrize("device", [0, 1])
def test_cupy_call(current_device, monkeypatch, device):
    """The backend gets the arrays, on their device; scattered ones are copied; out is written at last."""
    calls = []
    backend = types.SimpleNamespace(
        forward=lambda *args: calls.append((*args, len(current_device))), keep_for_graph=lambda *args: None
    )
    monkeypatch.setattr(interop.Home, "backend", backend)
    dout, q, k, v = (cupy_array(x, device) for x in inputs("float16"))
    scattered = layouts(inputs("float16")[2])["last axis first"]
    assert cupyflash.attention(q, k, v, out=dout) is dout
    assert calls.pop()[2] is k
    del current_device[1:]
    for _ in range(2):
        assert cupyflash.attention(q, cupy_array(scattered, device), v, out=dout) is dout
        problem, *views, lse, _, seed, _, _, _, _, depth = calls.pop()
        assert (
            views[0] is q and views[1][0] == "copy" and views[2] is v and views[3] is dout and lse is None and seed == 0
        )
        assert problem.dtype == "float16" and problem.seqlen_k == 7
        assert current_device[-1] == ("left" if device else 0) and depth == (2 if device else 1)
        del current_device[1:]
    one = normal((2, 5, 4, 1), "float16")
    one = cupy_array(np.lib.stride_tricks.as_strided(one, one.shape, (*one.strides[:-1], 10**12)), device)
    cupyflash.attention(one, one, one, out=cupy_array(np.empty(one.shape, "float16"), device))
    assert calls.pop()[1] is one  # pytorch/pytorch#99803: an axis of size 1 is contiguous


def test_cupy_arguments(current_device):
    args = inputs("float16")
    q, k, v = (cupy_array(x) for x in args[1:])
    wide = [cupy_array(x) for x in inputs("float32")[1:]]
    with pytest.raises(
        NotImplementedError, match="softcap is given and q has dtype float32; allowed with it on the GPU"
    ):
        cupyflash.attention(*wide, softcap=2.0)
    odd = np.zeros(q.nbytes + 1, np.uint8)[1:].view(np.float16).reshape(q.shape)
    with pytest.raises(ValueError, match="q is at address 0x.*; allowed: multiples of 2"):
        cupyflash.attention(cupy_array(odd), k, v)


def test_cupy_out_overlaps(current_device, monkeypatch):
    """Each array wraps its memory anew here, as those of PyTorch and DLPack do."""
    monkeypatch.setattr(interop.Home, "backend", types.SimpleNamespace(forward=lambda *args: None))
    fused = np.zeros((2, 6, 4, 4, 8), "float16")
    q, k, v, out = (cupy_array(fused[:, :5, i]) for i in range(4))
    assert cupyflash.attention(q, k, v, out=out) is out
    assert cupyflash.attention(q, k, v, out=cupy_array(fused[:, ::-1][:, :5, 3])) is not None
    for i, name in enumerate("qkv"):
        for wrong in (fused[:, :5, i], fused[:, 1:, i], fused[:, 4::-1, i], fused[::-1, :5, i, :, ::-1]):
            with pytest.raises(ValueError, match=f"out shares memory with {name}"):
                cupyflash.attention(q, k, v, out=cupy_array(wrong))
    flat = np.zeros(2 * q.size - 1, "float16")
    ends = [cupy_array(x.reshape(q.shape)) for x in (flat[: q.size], flat[q.size - 1 :])]
    for first, last in (ends, ends[::-1], (ends[0], ends[1][::-1, ::-1, ::-1, ::-1])):
        with pytest.raises(ValueError, match="out shares memory with v"):
            cupyflash.attention(q, k, first, out=last)


# --------------------------------------------------------------------------------------- threads and memory


def in_threads(work, count=10):
    barrier, errors = threading.Barrier(count), []

    def run(i):
        try:
            barrier.wait()
            work(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_threads_share_a_home(monkeypatch):
    """cupy/cupy#6574: those that ask at once get one home, or arrays in one place would look as if in two."""
    monkeypatch.setattr(interop, "_HOMES", {})
    monkeypatch.setattr(interop.Home, "__init__", lambda self, gpu: time.sleep(0.01))
    homes = [None] * 10
    in_threads(lambda i: homes.__setitem__(i, interop._home(interop.CuPy, 0)))
    assert len(set(homes)) == 1


def test_threads():
    """cupy/cupy#6574: the first call of ten threads at once."""
    args = inputs()
    expected = results(*args)
    sys.modules["cupyflash.attention"]._plans.clear()
    interop._FINDERS.clear()
    interop._HOMES.clear()
    libraries = ["numpy", "library"] + ["torch"] * ("torch" in sys.modules)

    def work(i):
        for repeat in range(20):
            name = libraries[(i + repeat) % len(libraries)]
            assert_same(map(to_numpy, results(*[from_numpy(name, x) for x in args])), expected)

    in_threads(work)


@pytest.mark.parametrize("name", ["numpy", "torch", "library", "jax"])
def test_nothing_is_kept(name):
    """pytorch/pytorch#9261: no array, and no object of ours, outlives a call."""
    theirs = [from_numpy(name, x) for x in inputs()]

    def counts(calls):
        for _ in range(calls):
            results(*theirs)
            with contextlib.suppress(ValueError):
                cupyflash.attention(theirs[1], theirs[2], theirs[2], scale=float("nan"))
        gc.collect()
        return len(gc.get_objects()), [sys.getrefcount(x) for x in theirs]

    counts(20)
    objects, references = counts(20)
    more_objects, more_references = counts(200)
    assert more_references == references
    assert more_objects - objects < 100


# ------------------------------------------------------------------------------------------------ on a GPU


@pytest.fixture
def cupy():
    return pytest.importorskip("cupy")


@pytest.fixture
def torch_cuda():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("PyTorch sees no GPU")
    return torch


def to_cupy(x, cupy):
    return cupy.asarray(x.view("u2")).view(x.dtype)


def gpu_inputs(cupy, dtype="float16"):
    """dout, q, k, v with more than one tile"""
    shapes = (2, 200, 4, 64), (2, 200, 4, 64), (2, 300, 2, 64), (2, 300, 2, 64)
    return [to_cupy(normal(shape, dtype, seed), cupy) for seed, shape in enumerate(shapes)]


def gpu_results(dout, q, k, v, **options):
    """`results`, and the same bits each time."""
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
    backward = cupyflash.attention_backward
    return [out, lse, *named(backward(dout, q, k, v, out, lse, dlse=lse, deterministic=True, **options)).values()]


def assert_same_bits(got, expected):
    for x, y in zip(got, expected, strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        assert (x.get() if hasattr(x, "get") else x).tobytes() == y.get().tobytes()


def torch_from(torch, x):
    """A tensor with memory of its own."""
    integers = torch.from_dlpack(x.view("i2")).clone()
    return integers.view(torch.bfloat16 if x.dtype == BF16 else torch.float16)


def torch_bits(x):
    return (
        x.contiguous().cpu().numpy()
        if x.element_size() == 4
        else x.contiguous().view(sys.modules["torch"].int16).cpu().numpy()
    )


DELAY = r"""extern "C" __global__ void wait(long long clocks) {
    long long start = clock64();
    while (clock64() - start < clocks) {}
}"""


def delay(cupy, clocks=200_000_000):
    """Keep the current stream busy for about a tenth of a second."""
    cupy.RawKernel(DELAY, "wait")((1,), (1,), (np.int64(clocks),))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", GPU_DTYPES)
def test_gpu_agrees_with_host(cupy, dtype):
    args = gpu_inputs(cupy, dtype)
    eps = float(ml_dtypes.finfo(dtype).eps)
    got, expected = gpu_results(*args, causal=True), results(*[x.get() for x in args], causal=True)
    for x, y in zip(got, expected, strict=True):
        assert type(x) is cupy.ndarray and x.dtype == y.dtype
        x, y = x.get().astype("f8"), y.astype("f8")
        np.testing.assert_allclose(x, y, rtol=8 * eps, atol=8 * eps * abs(y).max())


@pytest.mark.gpu
def test_gpu_layouts(cupy, monkeypatch):
    """Dao-AILab/flash-attention#355, #2777, cupy/cupy#10172, pytorch/pytorch#99803.

    On one path, since Hopper's copy engine does not read every layout.
    """
    launch = importlib.import_module("cupyflash.launch")
    monkeypatch.setenv("CUPYFLASH_PATH", "sm80")
    monkeypatch.setattr(launch, "_plans", {})
    args = gpu_inputs(cupy)
    expected = gpu_results(*args)
    for name in layouts(args[0].get()).keys() - {"odd address"}:
        for which in range(4):
            strange = list(args)
            host = layouts(args[which].get())[name]
            low, high = np.lib.array_utils.byte_bounds(host)
            memory = cupy.asarray(np.frombuffer(ctypes.string_at(low, high - low), np.uint8))
            start = memory.data + (host.ctypes.data - low)
            strange[which] = cupy.ndarray(host.shape, host.dtype, start, host.strides)
            assert_same_bits(gpu_results(*strange), expected)
    dout = cupy.broadcast_to(cupy.ones((), cupy.float16), args[0].shape)
    assert_same_bits(gpu_results(dout, *args[1:]), gpu_results(cupy.ascontiguousarray(dout), *args[1:]))
    one = [x[:1, :1, :1] for x in args]
    strange = [cupy.ndarray(x.shape, x.dtype, x.data, (10**12, 2, 6, 2)) for x in one]
    assert_same_bits(gpu_results(*strange), gpu_results(*[cupy.ascontiguousarray(x) for x in one]))


@pytest.mark.gpu
def test_gpu_strides_between_elements(cupy):
    _, q, k, v = gpu_inputs(cupy)
    odd = cupy.ndarray(k.shape, k.dtype, cupy.zeros(1 << 20, cupy.uint8).data, (1 << 16, 129, 64, 2))
    with pytest.raises(ValueError, match="k has strides .*129.*multiples of its 2 bytes"):
        cupyflash.attention(q, odd, v)


@pytest.mark.gpu
def test_gpu_out(cupy):
    _, q, k, v = gpu_inputs(cupy, "bfloat16")
    expected = cupyflash.attention(q, k, v)
    scattered = cupy.full((*q.shape[:-1], 3 * q.shape[-1]), cupy.nan, BF16)
    fused = cupy.full((2, 200, 3, 4, 64), cupy.nan, BF16)
    for out in (cupy.empty_like(q), scattered[..., ::3], fused[:, :, 1], fused[:, ::-1, 2]):
        assert cupyflash.attention(q, k, v, out=out) is out
        assert_same_bits([out], [expected])
    assert np.isnan(scattered.get()[..., 1::3].astype("f4")).all() and np.isnan(fused.get()[:, :, 0].astype("f4")).all()
    wide = cupy.empty(q.shape, "f4")
    assert cupyflash.attention(q, k, v, out=wide) is wide
    assert_same_bits([wide.astype(BF16)], [expected])
    for name, x in (("q", q), ("k", k), ("v", v)):
        with pytest.raises(ValueError, match=f"out shares memory with {name}"):
            cupyflash.attention(q, k, v, out=cupy.ndarray(q.shape, q.dtype, x.data))


@pytest.mark.gpu
def test_gpu_refusals(cupy):
    _, q, k, v = gpu_inputs(cupy)
    with pytest.raises(
        NotImplementedError, match="softcap is given and q has dtype float32; allowed with it on the GPU"
    ):
        cupyflash.attention(q.astype("f4"), k.astype("f4"), v.astype("f4"), softcap=2.0)
    with pytest.raises(ValueError, match="q has head_dim 257; allowed: 1 to 256 on the GPU"):
        wide = cupy.zeros((1, 2, 1, 257), "f2")
        cupyflash.attention(wide, wide, wide)
    with pytest.raises(TypeError, match="q is in CuPy on GPU 0, k is in NumPy on the host"):
        cupyflash.attention(q, k.get(), v)
    with pytest.raises(ValueError, match="q is at address 0x.*; allowed: multiples of 2"):
        cupyflash.attention(cupy.zeros(q.nbytes + 1, "u1")[1:].view("f2").reshape(q.shape), k, v)
    with pytest.raises(TypeError, match="scale is .*cupy"):
        cupyflash.attention(q, k, v, scale=cupy.array(0.5))


@pytest.mark.gpu
def test_gpu_empty(cupy):
    _, q, k, v = gpu_inputs(cupy)
    out, lse = cupyflash.attention(q, k[:, :0], v[:, :0], return_lse=True)
    assert not out.any() and cupy.isneginf(lse).all()
    grads = cupyflash.attention_backward(out, q, k[:, :0], v[:, :0], out, lse)
    assert grads.dk.shape == (2, 0, 2, 64) and not grads.dq.any()
    sink = cupy.arange(4, dtype="float32")
    out, lse = cupyflash.attention(q, k[:, :0], v[:, :0], return_lse=True, sink=sink)
    assert not out.any() and (lse == sink[:, None]).all()
    grads = cupyflash.attention_backward(out, q, k[:, :0], v[:, :0], out, lse, dlse=lse, sink=sink)
    assert (grads.dsink == 2 * q.shape[1] * sink).all() and not grads.dq.any()
    grads = cupyflash.attention_backward(out[:, :0], q[:, :0], k, v, out[:, :0], lse[..., :0])
    assert not grads.dk.any() and not grads.dv.any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", GPU_DTYPES)
def test_gpu_torch(cupy, torch_cuda, dtype):
    """cupy/cupy#8801, ROCm/FlyDSL#1099"""
    torch = torch_cuda
    args = gpu_inputs(cupy, dtype)
    expected = gpu_results(*args)
    theirs = [torch_from(torch, x) for x in args]
    got = gpu_results(*theirs)
    assert all(x.device == theirs[0].device for x in got) and got[0].dtype is theirs[0].dtype
    for x, y in zip(got, expected, strict=True):
        assert torch_bits(x).tobytes() == y.get().tobytes()
    out = torch.empty_like(theirs[0])
    assert cupyflash.attention(*theirs[1:], out=out) is out and torch.equal(out, got[0])
    strange = theirs[2].permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)
    assert torch.equal(cupyflash.attention(theirs[1], strange, theirs[3]), got[0])
    q = theirs[1].requires_grad_()
    with pytest.raises(ValueError, match="q requires grad"):
        cupyflash.attention(q, *theirs[2:])
    with torch.no_grad():
        assert torch.equal(cupyflash.attention(q, *theirs[2:]), got[0])
    with pytest.raises(ValueError, match="q is in PyTorch on GPU 0, k is in PyTorch on the host"):
        cupyflash.attention(q.detach(), theirs[2].cpu(), theirs[3])
    with pytest.raises(TypeError, match="q is in PyTorch on GPU 0, k is in CuPy on GPU 0"):
        cupyflash.attention(q.detach(), args[2], args[3])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", GPU_DTYPES)
def test_gpu_jax(cupy, dtype):
    """cupy/cupy#8801, jax-ml/jax#40789"""
    jax = pytest.importorskip("jax")
    try:
        device = jax.devices("gpu")[0]
    except RuntimeError as error:
        pytest.skip(f"JAX sees no GPU: {error}")
    args = gpu_inputs(cupy, dtype)
    expected = gpu_results(*args)
    theirs = [jax.device_put(x.get(), device) for x in args]
    before = [np.asarray(x).copy() for x in theirs]
    got = gpu_results(*theirs)
    for x, y in zip(got, expected, strict=True):
        assert isinstance(x, jax.Array) and x.devices() == {device} and x.dtype == y.dtype
        assert np.asarray(x).tobytes() == y.get().tobytes()
    assert all(np.asarray(x).tobytes() == y.tobytes() for x, y in zip(theirs, before, strict=True))
    with pytest.raises(ValueError, match="out is a read-only array in JAX on GPU 0"):
        cupyflash.attention(*theirs[1:], out=theirs[0])


@pytest.mark.gpu
def test_gpu_cupy_stream(cupy):
    """Dao-AILab/flash-attention#2505: a call on a busy stream sees what was written there before it."""
    _, q, k, v = gpu_inputs(cupy)
    expected = cupyflash.attention(q, k, v)
    late = cupy.full_like(q, cupy.nan)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        delay(cupy)
        late[...] = q
        out = cupyflash.attention(late, k, v)
        host = out.get(stream=stream)
        assert cupy.cuda.get_current_stream() == stream
    assert host.tobytes() == expected.get().tobytes()


@pytest.mark.gpu
def test_gpu_torch_stream(cupy, torch_cuda):
    """Dao-AILab/flash-attention#2505: PyTorch's current stream, and CuPy's is the same afterwards."""
    torch = torch_cuda
    args = gpu_inputs(cupy)
    _, q, k, v = (torch_from(torch, x) for x in args)
    expected = cupyflash.attention(q, k, v)
    late = torch.full_like(q, torch.nan)
    stream, before = torch.cuda.Stream(), cupy.cuda.get_current_stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        late.copy_(q)
        out = cupyflash.attention(late, k, v)
        assert not stream.query()  # the call did not wait
        assert torch.equal(out, expected)
    assert cupy.cuda.get_current_stream() == before


@pytest.mark.gpu
def test_gpu_stream_keeps_memory(cupy):
    """cupy/cupy#8068: nothing that the kernels still use goes back to the pool of another stream."""
    args = gpu_inputs(cupy)
    expected = gpu_results(*args)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        delay(cupy)
        got = gpu_results(*args)
    filled = [cupy.full(x.shape, cupy.nan, x.dtype) for x in expected * 4]
    stream.synchronize()
    assert_same_bits(got, expected)
    del filled


@pytest.mark.gpu
def test_gpu_not_current(cupy):
    """Dao-AILab/flash-attention#1793, cupy/cupy#5795"""
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("one GPU")
    args = gpu_inputs(cupy)
    expected = gpu_results(*args)
    with cupy.cuda.Device(1):
        others = gpu_inputs(cupy)
    got = gpu_results(*others)
    assert cupy.cuda.runtime.getDevice() == 0
    assert all(x.device.id == 1 for x in got)
    assert_same_bits(got, expected)
    assert_same_bits(gpu_results(*args), expected)
    with pytest.raises(ValueError, match="q is in CuPy on GPU 0, k is in CuPy on GPU 1"):
        cupyflash.attention(args[1], others[2], args[3])


@pytest.mark.gpu
@pytest.mark.parametrize("with_sink", [False, True])
def test_gpu_graph(cupy, with_sink):
    """flashinfer-ai/flashinfer#4609: a warm call can be captured, and the graph reads the buffers anew."""
    args = gpu_inputs(cupy)
    options = {"sink": cupy.zeros(4, "float32")} if with_sink else {}
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        gpu_results(*args, **options)
        stream.begin_capture()
        got = gpu_results(*args, **options)
        graph = stream.end_capture()
        for seed in range(2):
            args[1][...] = to_cupy(normal(args[1].shape, "float16", 10 + seed), cupy)
            if with_sink:
                options["sink"][...] = to_cupy(normal(4, seed=20 + seed), cupy)
            graph.launch(stream)
            stream.synchronize()
            captured = [x.copy() for x in got]
            assert_same_bits(captured, gpu_results(*args, **options))


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_gpu_graph_of_blocks_that_wait_for_each_other(cupy, causal):
    """Deterministic, 2 tiles of keys: without a mask the driver starts the blocks of a head together."""
    dout, q, k, v = (to_cupy(normal((2, 256, 3, 64), "float16", seed), cupy) for seed in range(4))
    stream = cupy.cuda.Stream(non_blocking=True)

    def results():
        out, lse = cupyflash.attention(q, k, v, causal=causal, return_lse=True)
        return cupyflash.attention_backward(dout, q, k, v, out, lse, causal=causal, deterministic=True)[:3]

    with stream:
        results()
        stream.begin_capture()
        got = results()
        graph = stream.end_capture()
        for seed in range(2):
            q[...] = to_cupy(normal(q.shape, "float16", 10 + seed), cupy)
            graph.launch(stream)
            stream.synchronize()
            assert_same_bits([x.copy() for x in got], results())


@pytest.mark.gpu
def test_gpu_graph_keeps_its_workspace(cupy):
    """A replay writes into nothing that the pool has given to others since the capture."""
    args = gpu_inputs(cupy)
    args[0] = cupy.swapaxes(cupy.ascontiguousarray(cupy.swapaxes(args[0], 2, 3)), 2, 3)  # copied by the call
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        gpu_results(*args)
        stream.begin_capture()
        got = gpu_results(*args)
        graph = stream.end_capture()
        others = [cupy.full(size, 7, cupy.uint8) for size in (1 << n for n in range(9, 24)) for _ in range(4)]
        graph.launch(stream)
        stream.synchronize()
        assert all(bool((x == 7).all()) for x in others)
        assert_same_bits(got, gpu_results(*args))


@pytest.mark.gpu
def test_gpu_torch_graph(cupy, torch_cuda):
    """flashinfer-ai/flashinfer#4609"""
    torch = torch_cuda
    dout, q, k, v = (torch_from(torch, x) for x in gpu_inputs(cupy))
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        gpu_results(dout, q, k, v)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        got = gpu_results(dout, q, k, v)
    for factor in (2, -1):
        q.mul_(factor)
        graph.replay()
        torch.cuda.synchronize()
        for x, y in zip(got, gpu_results(dout, q, k, v), strict=True):
            assert torch_bits(x).tobytes() == torch_bits(y).tobytes()


@pytest.mark.gpu
def test_gpu_threads(cupy):
    """cupy/cupy#6574: first calls at once, each thread on a stream of its own; kernels of sizes no other test uses."""
    args = [[to_cupy(normal((1, 70, 2, 8 * i + 3), "float16", j), cupy) for j in range(4)] for i in range(2)]
    got = [None] * 10
    cupy.cuda.Device().synchronize()

    def work(i):
        with cupy.cuda.Stream(non_blocking=True) as stream:
            for _ in range(20):
                got[i] = gpu_results(*args[i % 2])
            stream.synchronize()

    in_threads(work)
    expected = [gpu_results(*x) for x in args]
    for i, x in enumerate(got):
        assert_same_bits(x, expected[i % 2])


@pytest.mark.gpu
def test_gpu_in_a_new_thread(cupy):
    """A warm call is the first that a thread makes: the driver finds no context of it, if nobody has bound one."""
    args = gpu_inputs(cupy)
    expected = [gpu_results(*args) for _ in range(2)][1]  # and CuPy's pool has what a call needs
    got = []
    in_threads(lambda i: got.append(gpu_results(*args)), 1)
    assert_same_bits(got[0], expected)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cupy", "torch"])
def test_gpu_memory(cupy, name, request):
    """pytorch/pytorch#9261"""
    args = gpu_inputs(cupy)
    if name == "torch":
        torch = request.getfixturevalue("torch_cuda")
        args = [torch_from(torch, x) for x in args]
    pool = cupy.get_default_memory_pool()

    def used():
        torch_used = torch.cuda.memory_allocated() if name == "torch" else 0
        return pool.used_bytes() + torch_used, pool.total_bytes()

    for _ in range(3):
        gpu_results(*args)
    before = used()
    for _ in range(300):
        gpu_results(*args)
    assert used() == before


@pytest.mark.gpu
def test_gpu_merge(cupy):
    for dtype in GPU_DTYPES:
        _, q, k, v = gpu_inputs(cupy, dtype)
        parts = [cupyflash.attention(q, k[:, i::3], v[:, i::3], return_lse=True) for i in range(3)]
        out, lse = cupyflash.merge_attention(*parts, dtype="float32")
        host, host_lse = cupyflash.merge_attention(*[[x.get() for x in part] for part in parts], dtype="float32")
        assert type(out) is cupy.ndarray
        np.testing.assert_allclose(out.get(), host, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(lse.get(), host_lse, rtol=1e-6)
        empty = cupy.full_like(out, cupy.nan), cupy.full_like(lse, -cupy.inf)
        assert_same_bits(cupyflash.merge_attention(empty, (out, lse), empty), (out, lse))
        out, lse = cupyflash.merge_attention(empty, empty)
        assert not out.any() and cupy.isneginf(lse).all()
