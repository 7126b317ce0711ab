"""Backends as fixtures, the tests that need a GPU, and the record of their run."""

import datetime
import importlib
import json
import os
import platform
import tempfile
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

# Before NumPy is loaded: its products here are small, and threads that wait for each other are slower than one,
# above all beside the other processes of pytest-xdist.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX would take most of the GPU's memory
# Of several GPUs, the processes of pytest-xdist, gw0 and so on, have another one first.
WORKER, GPUS = os.environ.get("PYTEST_XDIST_WORKER"), len(list(Path("/dev").glob("nvidia[0-9]*")))
if WORKER and GPUS > 1:
    turned = (str((int(WORKER.removeprefix("gw")) + i) % GPUS) for i in range(GPUS))
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", ",".join(turned))

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import tools  # noqa: E402
from tools import ALL_16, ALL_OPTIONS, backend_fixture  # noqa: E402

from cupyflash import choose  # noqa: E402

RECORD = tools.ROOT / "tests" / "gpu_record.json"
NO_CUDA = tools.cuda_missing()


def pytest_addoption(parser):
    parser.addoption("--gpu-record", action="store_true", help=f"write {RECORD.name} after a run of all tests")


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a CUDA GPU")
    config.addinivalue_line("markers", "large: needs many gigabytes of GPU memory")
    if config.getoption("gpu_record"):
        if NO_CUDA:
            raise pytest.UsageError(f"--gpu-record needs a GPU ({NO_CUDA})")
        if not hasattr(config, "workerinput"):  # of pytest-xdist: its controller gets every report
            config.pluginmanager.register(GpuRecord(), "gpu-record")


def pytest_collection_modifyitems(items):
    if NO_CUDA:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=NO_CUDA))


backend = backend_fixture("backend", "Every backend in every dtype with all options.", *ALL_OPTIONS)
backend16 = backend_fixture("backend16", "Every backend in its 16-bit dtypes.", *ALL_16)
backend1 = backend_fixture(
    "backend1", "Every backend once, for what does not depend on the dtype.", "numpy-float32", "cuda-bfloat16"
)
backend_bfloat16 = backend_fixture("backend_bfloat16", "Every backend in bfloat16.", "numpy-bfloat16", "cuda-bfloat16")
cuda = backend_fixture("cuda", "The GPU.", "cuda-bfloat16")
precise = backend_fixture("precise", "The GPU in float32 and float64.", "cuda-float32", "cuda-float64")
halves = backend_fixture("halves", "Hopper in float32.", "sm90-float32")
hopper16 = backend_fixture("hopper16", "Hopper in 16 bits.", "sm90-bfloat16", "sm90-float16")


@pytest.fixture
def steady(monkeypatch):
    """Has short calls follow the sums of rows, too, as `choose.steady` says; called with False: no call."""

    def set_keys(count):
        monkeypatch.setattr(choose, "STEADY_KEYS", count)
        monkeypatch.setattr(choose, "STEADY_SCORES", 1)
        for name in () if NO_CUDA else ("launch", "launch_varlen"):
            monkeypatch.setattr(importlib.import_module(f"cupyflash.{name}"), "_plans", {})

    set_keys(1)
    return lambda wanted: set_keys(1 if wanted else 1 << 40)


@pytest.fixture(autouse=True)
def _share_gpu_memory(request):
    """Between the processes of pytest-xdist: large tests one after the other; what a memory pool keeps, others lack."""
    large = request.node.get_closest_marker("large")
    if NO_CUDA:
        yield
        return
    import cupy

    with open(Path(tempfile.gettempdir()) / "cupyflash-large-tests", "w") if large else nullcontext() as file:
        if large and os.name == "posix":
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed
        yield
        pool = cupy.get_default_memory_pool()
        if large or pool.total_bytes() > 1 << 30:
            pool.free_all_blocks()


class GpuRecord:
    """Counts the tests marked gpu, and writes what ran, where and on which sources.

    A run of all tests makes the record. Tests that fail are named in it, and a later run of only these, on the same
    sources, moves those that pass then.
    """

    def __init__(self):
        self.outcomes = {}

    def pytest_runtest_logreport(self, report):
        if "gpu" in report.keywords or report.nodeid in self.outcomes:  # that of a process that died has no keywords
            worst, before = ("passed", "skipped", "failed"), self.outcomes.get(report.nodeid, "passed")
            self.outcomes[report.nodeid] = max(before, report.outcome, key=worst.index)

    def pytest_sessionfinish(self, session, exitstatus):
        option, sha256 = session.config.option, tools.tree_digest()
        all_tests = not option.keyword and option.markexpr in ("", "gpu") and session.config.args == ["tests"]
        before = json.loads(RECORD.read_text()) if RECORD.exists() else {}
        again = before.get("sha256") == sha256 and set(self.outcomes) <= set(before.get("failures", ()))
        if session.shouldstop or not (all_tests or again):
            raise pytest.UsageError(
                "--gpu-record needs a run of all tests, or of those that failed; nothing is recorded"
            )
        counts = Counter(self.outcomes.values())
        failures = {name for name, outcome in self.outcomes.items() if outcome == "failed"}
        if not all_tests:
            failures |= set(before["failures"]) - set(self.outcomes)
            counts.update({outcome: before[outcome] for outcome in ("passed", "skipped")})
        record = {
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            **_versions(),
            "paths": list(tools.CUDA_PATHS),
            "passed": counts["passed"],
            "failed": len(failures),
            "skipped": counts["skipped"],
            "failures": sorted(failures),
            "sha256": sha256,
        }
        if exitstatus > 1:
            record["stale"] = f"the run ended early, after {len(self.outcomes)} GPU tests"
        RECORD.write_text(json.dumps(record, indent=2) + "\n")


def _versions():
    import cupy

    def dotted(number):  # 13020 is 13.2
        return f"{number // 1000}.{number % 1000 // 10}"

    runtime = cupy.cuda.runtime
    return {
        "gpu": runtime.getDeviceProperties(0)["name"].decode(),
        "driver": _driver(),
        "driver_cuda": dotted(runtime.driverGetVersion()),
        "cuda": dotted(runtime.runtimeGetVersion()),
        "nvrtc": ".".join(map(str, cupy.cuda.nvrtc.getVersion())),
        "cupy": cupy.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def _driver():
    version = Path("/proc/driver/nvidia/version")
    words = version.read_text().splitlines()[0].split() if version.exists() else []
    return next((word for word in words if word[0].isdigit() and "." in word), None)
