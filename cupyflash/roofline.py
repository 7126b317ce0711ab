"""What attention costs on a GPU, and what it waits for there: the roofline, predicted by formula or measured.

The least time of a pass is what its slowest resource needs for its share alone, all others hidden behind it; see
``counts.py`` for the shares. The resources are tensor cores, DRAM, special-function units, which compute the
exponentials, and shared memory.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from . import checks, choose, counts, interop
from .counts import Amounts
from .problem import Problem

RESOURCES = {
    "matmul": "tensor cores",
    "memory": "memory",
    "exp": "exponentials",
    "shared": "shared memory",
}
# mma.sync, which the portable kernels use, reaches 62.9 % of Hopper's tensor cores on average; the rest takes wgmma
# (W. Luo et al., "Benchmarking and Dissecting the Nvidia Hopper GPU Architecture via Microbenchmarking",
# arXiv:2402.13499).
MMA_SYNC_ON_HOPPER = 0.629
# Of a multiprocessor: CUDA C++ Programming Guide, "Arithmetic Instructions" (ex2 is a special function), and the 32
# banks of 4 bytes of "Shared Memory" in "Compute Capabilities".
EXPS_PER_CLOCK, SHARED_BYTES_PER_CLOCK = 16, 128


@dataclass(frozen=True)
class Device:
    """What a GPU gives a second.

    Parameters
    ----------
    name : str
    capability : int
        Compute capability, 90 for 9.0.
    matmul : float
        Operations of dense matrix products of 16-bit numbers, summed in float32.
    memory : float
        Bytes to and from DRAM.
    exp : float
        Exponentials: 16 for each clock and multiprocessor. Bytes of shared memory are 8 times as many, 128.
    source : str
        Where the figures come from.
    """

    name: str
    capability: int
    matmul: float
    memory: float
    exp: float
    source: str = "given"

    def __post_init__(self):
        for name in ("name", "source"):
            text = getattr(self, name)
            if not isinstance(text, str):
                raise TypeError(f"{name} is {checks.shown(text)} ({checks.type_name(text)}); allowed: a string")
        fields = {name: checks.figure(name, getattr(self, name)) for name in ("matmul", "memory", "exp")}
        fields["capability"] = checks.integer("capability", self.capability, 0)
        for name, number in fields.items():  # plain numbers, which JSON takes
            object.__setattr__(self, name, number)

    @property
    def shared(self) -> float:
        """Bytes to and from shared memory a second."""
        return self.exp * SHARED_BYTES_PER_CLOCK / EXPS_PER_CLOCK


# (compute capability, TFLOP/s of float16 with float32 sums, without sparsity, TB/s, multiprocessors, GHz of the boost)
_PUBLISHED = {
    "A100": (80, 312, 2.039, 108, 1.410),  # data sheet of the A100 80GB SXM; architecture white paper, table 1
    "H100": (90, 989.4, 3.35, 132, 1.830),  # data sheet of the H100 SXM; the clock is 989.4e12 / (132 * 4096)
    "H200": (90, 989.4, 4.8, 132, 1.830),  # data sheet of the H200 SXM
    "RTX 3090": (86, 71, 0.936, 82, 1.695),  # GA102 white paper, appendix A
    "RTX 4090": (89, 165.2, 1.008, 128, 2.520),  # Ada white paper, appendix A
    "L40S": (89, 362.05, 0.864, 142, 2.520),  # data sheet
}
DEVICES = {
    name: Device(name, capability, tflops * 1e12, tbytes * 1e12, EXPS_PER_CLOCK * sms * ghz * 1e9, "published figures")
    for name, (capability, tflops, tbytes, sms, ghz) in _PUBLISHED.items()
}
FALLBACK = "H200"
# What the driver calls those cards: others with such a name in theirs (PCIe, NVL, Ti, laptops) have other figures.
REPORTED = {
    "NVIDIA A100-SXM4-80GB": "A100",
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA H200": "H200",
    "NVIDIA GeForce RTX 3090": "RTX 3090",
    "NVIDIA GeForce RTX 4090": "RTX 4090",
    "NVIDIA L40S": "L40S",
}


@dataclass(frozen=True)
class Estimate:
    """One pass on one path: "standard", "sm80" or "sm90"."""

    path: str
    direction: str  # "forward" or "backward"
    tiling: str  # queries x keys of a tile
    amounts: Amounts
    useful_flops: int
    seconds: dict  # resource -> what it needs on its own
    measured: float | None = None  # seconds

    @property
    def name(self) -> str:
        return f"{self.path} {self.direction}"

    @property
    def binds(self) -> str:
        """The resource that needs longest."""
        return max(self.seconds, key=self.seconds.get)

    @property
    def predicted(self) -> float:
        """Seconds at least."""
        return max(self.seconds.values())

    @property
    def intensity(self) -> float:
        """Useful operations for each byte of DRAM."""
        return self.useful_flops / self.amounts.memory_bytes

    @property
    def achieved(self) -> dict | None:
        """Share of the measured time for which each resource was needed."""
        return self.measured and {name: seconds / self.measured for name, seconds in self.seconds.items()}

    def as_dict(self) -> dict:
        derived = ("binds", "predicted", "intensity", "achieved")
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}


@dataclass(frozen=True)
class Roofline:
    """What `roofline` found. ``str`` makes a table of it, `as_dict` data for JSON, `plot` a picture."""

    problem: Problem
    device: Device
    estimates: tuple[Estimate, ...]
    io_complexity: dict  # elements, "standard" and "flash": `cupyflash.counts.io_complexity`

    def as_dict(self) -> dict:
        device = {**asdict(self.device), "shared": self.device.shared}
        estimates = [estimate.as_dict() for estimate in self.estimates]
        return {
            "problem": asdict(self.problem),
            "device": device,
            "estimates": estimates,
            "io_complexity": self.io_complexity,
        }

    def __str__(self) -> str:
        from .roofline_report import table

        return table(self)

    def plot(self, path) -> None:
        """Draw the roofline into the file ``path``; needs Matplotlib, the extra "plot"."""
        from .roofline_report import plot

        plot(self, path)


def roofline(q, k=None, v=None, /, *, causal=False, window=None, device=None, measure=False) -> Roofline:
    """Predict what `attention` and `attention_backward` wait for on a GPU, and how long.

    For standard attention and for each kernel path of the GPU: operations, exponentials, least bytes of memory, bytes
    of shared memory, the time that each resource needs for its share, and which one binds. Nothing is computed, and no
    GPU is needed, unless ``measure``.

    Parameters
    ----------
    q, k, v : array
        As for `attention`, float16 or bfloat16; only their shapes and dtypes count, and contiguous arrays are assumed.
        ``numpy.broadcast_to(numpy.float16(0), shape)`` has a shape and takes no memory. Or, as ``q`` alone, a
        `cupyflash.problem.Problem`.
    causal, window
        As for `attention`.
    device : str or Device, optional
        "A100", "H100", "H200", "RTX 3090", "RTX 4090" or "L40S", whose published figures are taken, or figures of your
        own (``from cupyflash.roofline import Device``). By default the GPU here, if its figures are known, and an H200
        where there is none.
    measure : bool, default False
        On the GPU here, measure the ceilings (a large matrix product by cuBLAS, a copy, exponentials) and both passes
        of `attention`, in turn, by CUDA events; medians.

    Returns
    -------
    Roofline

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As `attention` on a GPU. ValueError also for a device without known figures, and for a problem without work.
    RuntimeError
        ``measure`` without a GPU, CuPy or cuBLAS.

    Notes
    -----
    A prediction is a lower bound: it assumes full overlap of the resources, all multiprocessors at work all the time,
    and takes from DRAM each byte once, even where the L2 cache still holds it. The portable kernels ("sm80") are given
    62.9 % of Hopper's tensor cores, which is what ``mma.sync`` gets there.

    Examples
    --------
    At head_dim 64 Hopper's exponentials take as long as its matrix products, while standard attention waits for its
    memory (milliseconds):

    >>> import numpy as np
    >>> import cupyflash
    >>> q = np.broadcast_to(np.float16(0), (4, 4096, 32, 64))
    >>> found = {one.name: one for one in cupyflash.roofline(q, q, q, device="H200").estimates}
    >>> {name: round(1e3 * seconds, 2) for name, seconds in found["sm90 forward"].seconds.items()}
    {'matmul': 0.56, 'memory': 0.06, 'exp': 0.56, 'shared': 0.44}
    >>> found["standard forward"].binds, round(1e3 * found["standard forward"].predicted, 2)
    ('memory', 3.64)
    """
    checks.flag("measure", measure)
    problem = _problem(q, k, v, causal, window)
    if problem.empty or not counts.scores(problem):
        raise ValueError(
            f"{problem} has nothing to compute; allowed: no dimension of length 0, a query that sees a key"
        )
    if measure:
        if device is not None:
            raise ValueError(f"device is {checks.shown(device)} and measure is True; allowed: one of them")
        here, seconds = _measured(problem)
    else:
        here, seconds = _device(device), {}
    estimates = tuple(_estimate(problem, here, *one, seconds.get(one[:2])) for one in _amounts(problem, here))
    sram = choose.SHARED_LIMIT[here.capability] // 2
    return Roofline(problem, here, estimates, counts.io_complexity(problem, sram))


def _problem(q, k, v, causal, window) -> Problem:
    if isinstance(q, Problem):
        if k is not None or v is not None or causal is not False or window is not None:
            raise TypeError("q is a Problem; allowed beside it: device and measure")
        problem = checks.given(q)
    else:
        arrays = {"q": q, "k": k, "v": v}
        home = interop.home(arrays)
        with home.scope():
            problem = checks.forward(True, checks.options(causal, window, None), **home.views(arrays))
    if problem.dtype not in ("float16", "bfloat16") or max(problem.head_dim, problem.head_dim_v) > 256:
        raise NotImplementedError(
            f"q has dtype {problem.dtype} and head_dim {problem.head_dim}, v head_dim {problem.head_dim_v}; "
            "allowed: float16 and bfloat16, up to 256"
        )
    return problem


def _device(device) -> Device:
    allowed = f"allowed: {', '.join(DEVICES)}, a Device of your own figures, or, on the GPU here, measure=True"
    if isinstance(device, Device):
        found = device
    elif device is None:
        name = _name_here()
        found = DEVICES.get(REPORTED.get(name, "") if name else FALLBACK)
    elif isinstance(device, str):
        name, found = checks.shown(device), DEVICES.get(device)
    else:
        raise TypeError(f"device is {checks.shown(device)} ({checks.type_name(device)}); {allowed}")
    if found is None:
        raise ValueError(f"device is {name}, whose figures are not known; {allowed}")
    if found.capability not in choose.SHARED_LIMIT:
        raise ValueError(
            f"device has capability {found.capability}; allowed: {', '.join(map(str, choose.SHARED_LIMIT))}"
        )
    return found


def _name_here() -> str | None:
    """Name of the current GPU, or None without one."""
    try:
        import cupy

        return cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode()
    except Exception:  # no CuPy, no driver or no GPU: all of them mean "by formula"
        return None


def _measured(problem: Problem) -> tuple[Device, dict]:
    """The GPU here with measured figures, and the seconds of both passes, by path and direction."""
    from .demo.machine import missing_for_gpu

    missing = missing_for_gpu()
    if missing:
        raise RuntimeError(f"measure=True needs a GPU; without it, everything else here works: {missing}")
    import cupy

    from . import timing

    capability, nvrtc = int(cupy.cuda.Device().compute_capability), cupy.cuda.nvrtc.getVersion()
    rates, seconds = timing.ceilings_and(timing.passes(problem))
    path = choose.path(capability, nvrtc) if _access(problem) == 16 else "sm80"
    times = {(path, direction): time for direction, time in seconds.items()}
    return Device(_name_here(), capability, **rates, source="measured here"), times


def _access(problem: Problem) -> int:
    """Widest load of rows of contiguous arrays, in bytes."""
    bits = 16 | 2 * problem.head_dim | 2 * problem.head_dim_v
    return bits & -bits


def _amounts(problem: Problem, device: Device):
    """Yield path, direction, tiling and amounts."""
    capability, limit = device.capability, choose.SHARED_LIMIT[device.capability]
    access = _access(problem)
    yield "standard", "forward", "", counts.standard(problem)
    spec = choose.forward(problem, access, False, limit, capability).spec
    yield "sm80", "forward", _tiling(spec), counts.portable_forward(problem, spec)
    if capability == 90 and access == 16:
        spec = choose.hopper_forward(problem, access, False).spec
        yield "sm90", "forward", _tiling(spec), counts.hopper_forward(problem, spec)
    yield "standard", "backward", "", counts.standard(problem, backward=True)
    spec = choose.backward(problem, access, False, limit, capability).spec
    yield "sm80", "backward", _tiling(spec), counts.portable_backward(problem, spec)
    if capability == 90 and access == 16:
        if choose.split(problem):
            specs = [variant.spec for variant in choose.hopper_split_backward(problem, access)]
            yield "sm90", "backward", "64x64", counts.hopper_split_backward(problem, *specs)
        else:
            spec = choose.hopper_backward(problem, access, False).spec
            yield "sm90", "backward", _tiling(spec), counts.hopper_backward(problem, spec)


def _tiling(spec) -> str:
    return f"{spec.block_q}x{spec.block_k}"


def _estimate(problem: Problem, device: Device, path, direction, tiling, amounts: Amounts, measured) -> Estimate:
    matmul = device.matmul
    if path == "sm80" and device.capability == 90:
        matmul *= MMA_SYNC_ON_HOPPER
    seconds = {
        "matmul": amounts.flops / matmul,
        "memory": amounts.memory_bytes / device.memory,
        "exp": amounts.exps / device.exp,
        "shared": amounts.shared_bytes / device.shared,
    }
    useful = counts.useful(problem, direction == "backward").flops
    return Estimate(path, direction, tiling, amounts, useful, seconds, measured)
