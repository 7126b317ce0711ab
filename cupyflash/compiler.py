"""From a variant to a running kernel: one self-contained source string, NVRTC, CuPy's disk cache."""

from __future__ import annotations

import functools
import os
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from json import dumps
from pathlib import Path

from .spec import Variant

OPTIONS = ("-std=c++20",)
MOD_OPTIONS = ("-diag-error=940",)  # a path of the user's function that ends without return
OLDEST_GPU = {"float16": 75, "bfloat16": 80, "float32": 80, "float64": 80}  # capability that the instructions need
HOPPER_OPTIONS = (*OPTIONS, "-arch=sm_90a")  # wgmma and setmaxnreg; from NVRTC 12.9 on it wins over CuPy's own -arch


def options(variant: Variant) -> tuple[str, ...]:
    """Return the compiler's options for `variant`, without those that CuPy adds."""
    base = HOPPER_OPTIONS if variant.header.startswith("sm90/") else OPTIONS
    return base + MOD_OPTIONS if variant.mods else base


def kernel_dir() -> Path:
    """Return the folder of the CUDA sources: beside this file when installed, beside its parent in a clone."""
    here = Path(__file__).resolve().parent
    installed = here / "kernels"
    return installed if installed.is_dir() else here.parent / "kernels"


@functools.cache
def source(header: str) -> str:
    """Return the text of `header` with its includes in place, as NVRTC and CuPy's cache key see it.

    One string without include paths: a changed file is a changed key, and printing it shows exactly what runs.
    """
    root, seen = kernel_dir(), set()

    def expand(name: str) -> str:
        if name in seen:
            return ""
        seen.add(name)
        if not (root / name).is_file():
            raise FileNotFoundError(f"cupyflash is incomplete: {root / name} is missing; install it again")
        lines = [f'#line 1 "{name}"']
        for number, line in enumerate((root / name).read_text(encoding="ascii").splitlines(), 1):
            included = re.fullmatch(r'#include "(.+)"', line)
            if included:
                lines += [expand(included[1]), f'#line {number + 1} "{name}"']
            elif line != "#pragma once":
                lines.append(line)
        return "\n".join(lines)

    return expand(header) + "\n"


def check_dtype(dtype: str, capability: int, target: str) -> None:
    """Raise if a GPU of `capability` (90 is 9.0), which is that of `target`, lacks the instructions for `dtype`."""
    oldest = OLDEST_GPU[dtype]
    if capability < oldest:
        raise NotImplementedError(
            f"{dtype} needs a GPU of compute capability {_dotted(oldest)} or later, {target} has "
            f"{_dotted(capability)}; NumPy arrays take every dtype"
        )


def code(variant: Variant) -> str:
    """Return all that the compiler gets for `variant`: its header, and behind it the functions of the user."""
    return source(variant.header) + (variant.mods.cpp() if variant.mods else "")


def _error(variant: Variant, target: str, log: object) -> Exception:
    """What to raise where `variant` does not compile; with functions of the user, these are wrong."""
    if variant.mods:
        return variant.mods.error(str(log), target)
    return RuntimeError(f"{variant.expression} does not compile for {target}:\n{log}")


def check_target(variant: Variant, capability: int, target: str) -> None:
    """Raise if `variant` cannot be built for `capability` (90 is 9.0), which is that of `target`."""
    from cupy_backends.cuda.libs import nvrtc

    check_dtype(variant.dtype, capability, target)
    known = sorted(nvrtc.getSupportedArchs())
    # CuPy compiles for the newest one that NVRTC knows where the GPU is newer, which runs within a major version.
    if capability in known or (capability > known[-1] and capability // 10 == known[-1] // 10):
        return
    version = ".".join(map(str, nvrtc.getVersion()))
    raise RuntimeError(
        f"NVRTC {version} cannot compile for {target}, which has compute capability {_dotted(capability)}; it knows "
        f"{', '.join(map(_dotted, known))}; install " + ("a newer" if capability > known[0] else "an older") + " NVRTC"
    )


def _dotted(capability: int) -> str:
    return f"{capability // 10}.{capability % 10}"


@dataclass(frozen=True)
class Report:
    """What the compiler said of one kernel."""

    variant: Variant
    arch: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    seconds: float
    cubin: bytes
    remarks: tuple[str, ...] = ()  # what slows the kernel down: ptxas says so where it makes wgmma wait for each other


def compile_offline(variant: Variant, arch: str) -> Report:
    """Compile `variant` for `arch` ("sm_80", ...) without a GPU; RuntimeError holds the compiler's log."""
    from cupy_backends.cuda.libs import nvrtc

    check_target(variant, _capability(arch), arch)
    start = time.perf_counter()
    program = nvrtc.createProgram(code(variant), variant.header, (), ())
    try:
        nvrtc.addNameExpression(program, variant.expression)
        arch = "sm_90a" if variant.header.startswith("sm90/") else arch
        try:
            more = MOD_OPTIONS if variant.mods else ()
            nvrtc.compileProgram(program, (*OPTIONS, *more, f"-arch={arch}", "-ftz=true", "--ptxas-options=-v"))
        except nvrtc.NVRTCError as error:
            raise _error(variant, arch, f"{error}\n{nvrtc.getProgramLog(program)}") from None
        log, cubin = nvrtc.getProgramLog(program), nvrtc.getCUBIN(program)
    finally:
        nvrtc.destroyProgram(program)
    seconds = time.perf_counter() - start
    spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill", log))
    registers = max(int(n) for n in re.findall(r"Used (\d+) registers", log))
    remarks = tuple(re.findall(r"\(C7\d+\).*", log))
    return Report(variant, arch, registers, spills, variant.spec.shared_bytes, seconds, cubin, remarks)


_kernels: dict = {}


def kernel(variant: Variant, device: int):
    """Return the compiled kernel of `variant` on the current device `device`, ready to launch.

    Threads that ask for the same one at the same time may both compile it; all get the same kernel.
    """
    found = _kernels.get((variant, device))
    return found or _kernels.setdefault((variant, device), _build(variant))


def _build(variant: Variant):
    import cupy

    device = cupy.cuda.Device()
    target = cupy.cuda.runtime.getDeviceProperties(device.id)["name"].decode()
    check_target(variant, int(device.compute_capability), target)
    start = time.perf_counter()
    try:
        module = cupy.RawModule(code=code(variant), options=options(variant), name_expressions=(variant.expression,))
        built = module.get_function(variant.expression)
    except cupy.cuda.compiler.CompileException as error:
        raise _error(variant, target, error) from error
    if variant.spec.shared_bytes > 0:
        built.max_dynamic_shared_size_bytes = variant.spec.shared_bytes
    if os.environ.get("CUPYFLASH_VERBOSE"):
        about = f"{built.num_regs} registers, {built.local_size_bytes} bytes of local memory"
        print(f"{variant.expression}: {about}, {time.perf_counter() - start:.2f} s", file=sys.stderr)
    return built


def compile_command(archs: list[str] | None, json: bool) -> int:
    """Compile what the tables hold and print what the compiler says; return 1 after a spill, remark or error, else 0.

    Without `archs`, the present GPU's kernels are built the way a call builds them, which fills CuPy's disk cache;
    without a GPU, those of sm_80 and sm_90 are compiled. Remarks are those of kernels that are compiled without a GPU.
    """
    from . import choose

    device = None if archs else _present_capability()
    if device:
        archs = [f"sm_{device}"]
    jobs = [(variant, arch) for arch in archs or ("sm_80", "sm_90") for variant in choose.variants(_capability(arch))]
    try:
        import cupy_backends  # noqa: F401
    except ImportError:
        print('compile needs NVRTC, which comes with CuPy: the extra "cuda13" or "cuda12"; no GPU', file=sys.stderr)
        return 2
    errors, slow = set(), False
    columns = ("arch", "registers", "spill_bytes", "shared_bytes", "seconds", "kernel")
    if not json:
        print(("{:>8} " * 5 + "{}").format("arch", "regs", "spills", "shared", "seconds", "kernel"))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for (variant, arch), report in zip(jobs, pool.map(lambda job: _report(*job, device is not None), jobs)):
            if isinstance(report, str):
                if report not in errors:  # what is wrong with an arch is wrong with all of its kernels
                    print(report, file=sys.stderr)
                errors.add(report)
                continue
            slow |= report.spill_bytes > 0 or bool(report.remarks)
            for remark in report.remarks:
                print(f"{variant.expression} for {arch}: {remark}", file=sys.stderr)
            values = (
                arch,
                report.registers,
                report.spill_bytes,
                report.shared_bytes,
                report.seconds,
                variant.expression,
            )
            if json:
                print(dumps(dict(zip(columns, values))), flush=True)
            else:
                print("{:>8} {:>8} {:>8} {:>8} {:>8.2f} {}".format(*values), flush=True)
    return int(slow or bool(errors))


def _capability(arch: str) -> int:
    match = re.fullmatch(r"sm_(\d+)[af]?", arch)
    if not match:
        raise ValueError(f"arch must look like sm_80 or sm_90a, got {arch!r}")
    return int(match[1])


def _present_capability() -> int | None:
    try:
        import cupy

        return int(cupy.cuda.Device().compute_capability)
    except Exception:  # no CuPy, no driver or no GPU: all of them mean "compile offline"
        return None


def _report(variant: Variant, arch: str, present: bool) -> Report | str:
    try:
        if not present:
            return compile_offline(variant, arch)
        start = time.perf_counter()
        built = _build(variant)
        seconds = time.perf_counter() - start
        return Report(variant, arch, built.num_regs, built.local_size_bytes, variant.spec.shared_bytes, seconds, b"")
    except RuntimeError as error:
        return str(error)
