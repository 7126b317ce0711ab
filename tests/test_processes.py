"""Processes in unusual surroundings: their caches, paths and locales."""

import os
import subprocess
import sys

import pytest
import tools

SCRIPT = """
import cupy, numpy, cupyflash
rng = numpy.random.default_rng(0)
q, k, v = (cupy.asarray(rng.standard_normal((1, 70, 2, 64)).astype("f2")) for _ in range(3))
out, lse = cupyflash.attention(q, k, v, causal=True, return_lse=True)
grads = cupyflash.attention_backward(out, q, k, v, out, lse, causal=True, deterministic=True)
print("sum", *(int(x.get().view("u2").astype("u8").sum()) for x in (out, *grads[:3])))
"""


def start(**environment):
    env = {name: value for name, value in os.environ.items() if name != "CUPY_CACHE_DIR"} | environment
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(tools.ROOT), env.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.gpu
def test_caches(tmp_path):
    """cupy/cupy#2296, #9463, #7581: all at once, and each with the same result."""
    accented = tmp_path / "caché 缓存"
    shared = tmp_path / "shared"
    processes = {
        "no home": start(HOME="/nonexistent"),
        "not ASCII": start(CUPY_CACHE_DIR=str(accented), LC_ALL="C", PYTHONUTF8="0"),
        **{f"shared cache {i}": start(CUPY_CACHE_DIR=str(shared)) for i in range(6)},
    }
    results = {name: (*process.communicate(timeout=300), process.returncode) for name, process in processes.items()}
    for name, (output, errors, status) in results.items():
        assert status == 0, f"{name}: {errors}"
        assert output == results["shared cache 0"][0], name
    assert start(CUPY_CACHE_DIR=str(shared)).communicate(timeout=300)[0] == results["shared cache 0"][0]


def test_numpy_does_not_import_the_gpu_libraries():
    """cupy/cupy#1790: arrays of NumPy need neither CuPy, PyTorch nor JAX."""
    script = (
        "import sys, numpy, cupyflash\n"
        "q = numpy.ones((1, 5, 2, 8), 'f4')\n"
        "out, lse = cupyflash.attention(q, q, q, return_lse=True)\n"
        "cupyflash.attention_backward(q, q, q, q, out, lse)\n"
        "assert not {'cupy', 'torch', 'jax'} & set(sys.modules)\n"
    )
    env = os.environ | {"PYTHONPATH": str(tools.ROOT)}
    subprocess.run([sys.executable, "-c", script], check=True, env=env)
