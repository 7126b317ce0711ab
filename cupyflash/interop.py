"""Arrays in and out: NumPy, CuPy, PyTorch, JAX and other DLPack exporters, without a copy.

A *home* is one library on one device. It shows the library's arrays as NumPy or CuPy arrays, which the
backends read and write, and makes the results arrays of the library again. A library is looked for only
when an array of it is at hand; none is imported for any other reason.
"""

from __future__ import annotations

import operator
import sys
from contextlib import contextmanager, nullcontext
from functools import cached_property
from importlib import import_module
from weakref import WeakKeyDictionary

import numpy as np
from ml_dtypes import bfloat16

from .checks import DTYPES, type_name

_HOST, _CUDA = (1, 3), (2, 13)  # DLPack device types: CPU, pinned memory; CUDA, managed memory
_ALLOWED = "allowed: arrays of NumPy, CuPy, PyTorch, JAX or with __dlpack__, of one library on one device"

INDICES = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "rows")
_PLAIN = "allowed: plain tensors with memory, not nested, traced, fake or of torch.func"


def home(arrays: dict):
    """Home that all arrays, given by name, share."""
    homes = [(_FINDERS.get(type(x)) or _learn(name, x))(name, x) for name, x in arrays.items()]
    if homes.count(homes[0]) != len(homes):
        got = ", ".join(f"{name} is in {where}" for name, where in zip(arrays, homes, strict=True))
        same_library = len({where.library for where in homes}) == 1
        raise (ValueError if same_library else TypeError)(f"{got}; {_ALLOWED}")
    return homes[0]


class Home:
    """NumPy arrays; base of the others."""

    library = "NumPy"
    writable = True  # whether arrays of the library may be written, as out= needs

    def __init__(self, gpu=None):
        self.gpu = gpu is not None
        self.index = gpu

    def __repr__(self):
        return f"{self.library} on " + (f"GPU {self.index}" if self.gpu else "the host")

    @cached_property
    def xp(self):
        """Module of the views: numpy or cupy."""
        return _cupy() if self.gpu else np

    @cached_property
    def backend(self):
        """Module that computes."""
        return import_module("cupyflash.launch" if self.gpu else "cupyflash.cpu")

    @cached_property
    def varlen(self):
        """Module that computes for packed sequences."""
        return import_module("cupyflash.launch_varlen" if self.gpu else "cupyflash.cpu_varlen")

    def scope(self):
        """Context of a call: its device and stream are the current ones of CuPy."""
        return _NO_SCOPE

    def views(self, arrays):
        """The same memory as NumPy or CuPy arrays, by name."""
        return arrays

    def empty(self, shape, dtype):
        """An array of the library without contents, and its view."""
        x = self.xp.ndarray(shape, dtype)
        return x, x

    def give(self, x):
        """What `empty` made, as the caller is to get it."""
        return x


class CuPy(Home):
    """On CuPy's current stream of the arrays' device, which need not be the current device."""

    library = "CuPy"

    def scope(self):
        cuda = self.xp.cuda
        return _NO_SCOPE if cuda.runtime.getDevice() == self.index else cuda.Device(self.index)

    def views(self, arrays):
        for name, x in arrays.items():
            if x.data.ptr % x.itemsize:
                raise ValueError(f"{name} is at address {x.data.ptr:#x}; allowed: multiples of {x.itemsize}")
        return arrays


class PyTorch(Home):
    """On PyTorch's current stream; results come from PyTorch's allocator, so that it may free them early."""

    library = "PyTorch"

    def __init__(self, gpu=None):
        super().__init__(gpu)
        self.torch = torch = sys.modules["torch"]
        self.dtypes = {getattr(torch, name): dtype for dtype, name in DTYPES.items()}
        self.mask_dtypes = {torch.bool: np.dtype(bool)}
        self.index_dtypes = {torch.int32: np.dtype(np.int32), torch.int64: np.dtype(np.int64)}
        self.torch_dtypes = {ours: theirs for theirs, ours in (self.dtypes | self.index_dtypes).items()}
        integers = self.index_dtypes | {torch.uint8: np.dtype(np.uint8)}
        self.captured_dtypes = self.dtypes | self.mask_dtypes | integers
        self.device = torch.device("cpu") if gpu is None else torch.device("cuda", gpu)
        self.streams = {}  # CuPy's, by the pointer

    def scope(self):
        return self._stream_scope() if self.gpu else _NO_SCOPE

    @contextmanager
    def _stream_scope(self):
        pointer = self.torch.cuda.current_stream(self.device).cuda_stream
        stream = self.streams.get(pointer)
        if stream is None:  # PyTorch never gives a stream back
            stream = self.streams[pointer] = self.xp.cuda.Stream.from_external(_Stream(pointer))
        with self.xp.cuda.Device(self.index), stream:
            yield

    def views(self, arrays):
        return {name: self._checked_view(name, x) for name, x in arrays.items()}

    def _checked_view(self, name, x):
        if x.is_nested:
            raise TypeError(f"{name} is a nested tensor; {_PLAIN}")
        if x.requires_grad and self.torch.is_grad_enabled():
            raise ValueError(
                f"{name} requires grad, but no gradient flows through this call; allowed: {name}.detach() or "
                "torch.no_grad(); cupyflash.attention_backward computes the gradients"
            )
        if x.layout is not self.torch.strided or x.is_conj() or x.is_neg():
            raise ValueError(
                f"{name} has layout {x.layout}, is_conj() {x.is_conj()} and is_neg() {x.is_neg()}; allowed: "
                f"torch.strided, without conjugate or negative bit ({name}.resolve_conj().resolve_neg())"
            )
        dtypes = self.captured_dtypes if "." in name else self.index_dtypes if name in INDICES else self.dtypes
        if name in ("mask", "blocks", "full"):
            dtypes = self.mask_dtypes
        dtype = dtypes.get(x.dtype)
        if dtype is None:
            raise TypeError(f"{name} has dtype {x.dtype}; allowed: {', '.join(map(str, dtypes))}")
        try:
            return self._view(x.detach(), dtype)
        except (AssertionError, RuntimeError) as error:
            raise TypeError(f"{name} is a {type_name(x)} whose memory cannot be had: {error}; {_PLAIN}") from error

    def _view(self, x, dtype):
        if not self.gpu:
            return x.view(self.torch.int16).numpy().view(dtype) if dtype == bfloat16 else x.numpy()
        pointer = x.data_ptr()
        if not pointer and x.numel():
            raise RuntimeError("its address is 0")
        memory = self.xp.cuda.UnownedMemory(pointer, x.nbytes, x, self.index)
        strides = [stride * dtype.itemsize for stride in x.stride()]
        return self.xp.ndarray(x.shape, dtype, self.xp.cuda.MemoryPointer(memory, 0), strides)

    def empty(self, shape, dtype):
        x = self.torch.empty(shape, dtype=self.torch_dtypes[dtype], device=self.device)
        return x, self._view(x, dtype)


class _Stream:
    """A stream of another library, by the CUDA stream protocol."""

    def __init__(self, pointer):
        self.pointer = pointer or 1  # both are the legacy default stream, but CuPy may take 0 for another

    def __cuda_stream__(self):
        return 0, self.pointer


class _Guest(Home):
    """A library whose arrays may be immutable, and whose allocator does not know CuPy's streams.

    It may use the memory of an input again as soon as the caller drops it, so a call waits for its results.
    """

    writable = False

    def scope(self):
        return self._waiting_scope() if self.gpu else _NO_SCOPE

    @contextmanager
    def _waiting_scope(self):
        with self.xp.cuda.Device(self.index):
            yield
            self.xp.cuda.get_current_stream().synchronize()


class JAX(_Guest):
    """One device of JAX, outside of `jax.jit`."""

    library = "JAX"

    def __init__(self, gpu, device):
        super().__init__(gpu)
        self.device = device

    def views(self, arrays):
        view = self.xp.from_dlpack if self.gpu else np.asarray  # from_dlpack of NumPy knows no bfloat16
        return {name: view(x) for name, x in arrays.items()}

    def give(self, x):
        jax = sys.modules["jax"]
        return jax.dlpack.from_dlpack(x) if self.gpu else jax.device_put(x, self.device, may_alias=True)


class DLPack(_Guest):
    """Any other library with DLPack and the array API standard."""

    def __init__(self, gpu, library, namespace):
        super().__init__(gpu)
        self.library = library
        self.namespace = namespace

    def views(self, arrays):
        return {name: self._view(name, x) for name, x in arrays.items()}

    def _view(self, name, x):
        try:
            return self.xp.from_dlpack(x)
        except Exception as error:  # whatever the library raises
            message = f"{name} is a {type_name(x)} that {self.xp.__name__} cannot view: {error}; {_ALLOWED}"
            raise TypeError(message) from error

    def give(self, x):
        return self.namespace.from_dlpack(x)


_NO_SCOPE = nullcontext()
_NUMPY = Home()
_HOMES: dict = {}  # (class, *arguments) -> home
_FINDERS = WeakKeyDictionary()  # type of an array -> function to its home


def _home(*key):
    return _HOMES.get(key) or _HOMES.setdefault(key, key[0](*key[1:]))


def _learn(name, x):
    """Function to the home of arrays of the type of `x`; remembered by type."""
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(f"{name} is a {type_name(x)}, whose mask would be ignored; {_ALLOWED}")
    for library, kind, find in _LIBRARIES:
        if isinstance(x, getattr(sys.modules.get(library), kind, ())):
            return _FINDERS.setdefault(type(x), find)
    if hasattr(type(x), "__dlpack_device__"):
        return _FINDERS.setdefault(type(x), _find_dlpack)
    raise TypeError(f"{name} is a {type_name(x)}; {_ALLOWED}")


def _find_numpy(name, x):
    return _NUMPY


def _find_cupy(name, x):
    return _home(CuPy, x.data.device_id)


def _find_torch(name, x):
    if x.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name} is a tensor on device {x.device}; allowed: cpu, cuda")
    return _home(PyTorch, x.device.index if x.device.type == "cuda" else None)


def _find_jax(name, x):
    jax = sys.modules["jax"]
    if isinstance(x, jax.core.Tracer):
        raise TypeError(f"{name} is traced by JAX; allowed: concrete arrays, outside of jax.jit and jax.grad")
    device, *others = x.devices()
    if others or device.platform not in ("cpu", "gpu", "cuda"):
        raise ValueError(f"{name} is on {device} and {len(others)} others; allowed: the host or one CUDA GPU")
    return _home(JAX, None if device.platform == "cpu" else x.__dlpack_device__()[1], device)


def _find_dlpack(name, x):
    if not hasattr(x, "__array_namespace__"):
        raise TypeError(f"{name} is a {type_name(x)} without __array_namespace__, which makes the results")
    try:
        kind, index = map(operator.index, x.__dlpack_device__())
        namespace = x.__array_namespace__()
    except Exception as error:  # whatever the library raises
        raise TypeError(
            f"{name} is a {type_name(x)} without a DLPack device or namespace: {error}; {_ALLOWED}"
        ) from error
    if kind not in _HOST + _CUDA or index < 0:
        raise ValueError(f"{name} is on DLPack device ({kind}, {index}); allowed: the host or a CUDA GPU")
    library = getattr(namespace, "__name__", type(x).__module__)
    return _home(DLPack, index if kind in _CUDA else None, library, namespace)


_LIBRARIES = (
    ("numpy", "ndarray", _find_numpy),
    ("cupy", "ndarray", _find_cupy),
    ("torch", "Tensor", _find_torch),
    ("jax", "Array", _find_jax),
)


def _cupy():
    try:
        return import_module("cupy")
    except ImportError as error:
        message = 'arrays on a GPU need CuPy: pip install "cupyflash[cuda13]" (CUDA 12: "cupyflash[cuda12]")'
        raise ImportError(message) from error
