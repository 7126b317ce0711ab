"""What the scripts in benchmarks/ make of their measurements, and what of them needs no GPU."""

import ctypes
import importlib.util
import inspect
import json
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tools

import cupyflash
from cupyflash import reference

FOLDER = tools.ROOT / "benchmarks"
if not FOLDER.is_dir():
    pytest.skip("the benchmarks are not part of this archive", allow_module_level=True)


@pytest.fixture(autouse=True)
def path(monkeypatch):
    """Scripts import each other as neighbours."""
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])  # asv adds to it
    yield
    for script in FOLDER.glob("*.py"):
        sys.modules.pop(script.stem, None)
    for name in [name for name in sys.modules if name.split(".")[0] == "benchmarks"]:
        del sys.modules[name]


def code_of(main, *arguments):
    """The exit code of a script, whichever way it ends."""
    try:
        return main(*arguments)
    except SystemExit as ended:
        return ended.code


# --- traffic.py

COLUMNS = ("ID", "Process ID", "Kernel Name", "Section Name", "Metric Name", "Metric Unit", "Metric Value")


def ncu_prints(kernels):
    """As ncu does: a row for each metric, among other lines."""
    lines = ["==PROF== Connected to process 7", ",".join(f'"{name}"' for name in COLUMNS)]
    for number, (name, read, written) in enumerate(kernels):
        for metric, value in (("dram__bytes_read.sum", read), ("dram__bytes_write.sum", written)):
            row = (number, 7, name, "Command line profiler metrics", metric, "byte", f"{value:,}")
            lines.append(",".join(f'"{x}"' for x in row))
    return "\n".join([*lines, "==PROF== Disconnected"])


def kernels_of(sizes):
    """Each pass launches two kernels of 1000 bytes times its place; 5 more are written by the flush after it."""
    launched = []
    for _ in range(sizes):
        for place in range(1, 5):
            launched.append(("flush_l2", 256, 5 if place > 1 else 0))
            launched += [(f"kernel<{place}, 2>(int, float)", 600 * place, 400 * place)] * 2
        launched.append(("flush_l2", 256, 5))
    return launched


def test_traffic_of_each_pass():
    import traffic

    kernels = traffic.read_kernels(ncu_prints(kernels_of(2)))
    assert kernels[1] == ("kernel<1, 2>(int, float)", 600, 400)
    passes = traffic.by_pass(kernels, 2)
    assert len(passes) == 2 and tuple(passes[0]) == traffic.PASSES
    for of_size in passes:
        for place, total in enumerate(of_size.values(), 1):
            assert total == {"read": 1200 * place, "write": 800 * place + 5, "kernels": 2}
    with pytest.raises(RuntimeError, match="ncu saw 8 passes; 12 were run"):
        traffic.by_pass(kernels, 3)
    with pytest.raises(RuntimeError, match="no counters:\n==ERROR== x"):
        traffic.read_kernels("==ERROR== x")


def test_traffic_formulas():
    import traffic

    least = traffic.formulas(64, 1024)
    scores, operand = 2 * 64 * 16 * 1024**2, 2 * 64 * 1024 * 16 * 64
    assert set(least) == set(traffic.PASSES)
    assert least["standard forward"] == 4 * scores + 4 * operand + 4 * 64 * 16 * 1024
    assert least["cupyflash forward"] == 4 * operand + 4 * 64 * 16 * 1024
    assert least["standard backward"] > 7 * scores > 5 * least["cupyflash backward"]


def test_traffic_without_ncu(monkeypatch, capsys, tmp_path):
    import traffic

    monkeypatch.setattr(traffic.shutil, "which", lambda name: None)
    assert traffic.main(["--output", str(tmp_path / "x.json")]) == 2
    assert "ncu is missing" in capsys.readouterr().err
    assert not (tmp_path / "x.json").exists()


NO_GPU = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: False))


@pytest.mark.parametrize(
    "cupy, words",
    [(None, 'CuPy is missing; pip install "cupyflash[cuda13]". '), (NO_GPU, "CuPy finds no CUDA GPU. ")],
)
def test_traffic_without_a_gpu(monkeypatch, capsys, tmp_path, cupy, words):
    import traffic

    monkeypatch.setitem(sys.modules, "cupy", cupy)
    ncu = fake_ncu(tmp_path, f"touch {tmp_path}/started")
    assert traffic.main(["--ncu", ncu, "--output", str(tmp_path / "x.json")]) == 2
    assert f"traffic.py: {words}The formulas alone: python -m cupyflash roofline" in capsys.readouterr().err
    assert not (tmp_path / "started").exists()


NCU = """#!/bin/sh
while [ "$1" != --log-file ]; do shift; done
{}
"""


def fake_ncu(tmp_path, body):
    path = tmp_path / "ncu"
    path.write_text(NCU.format(body))
    path.chmod(0o755)
    return str(path)


def test_traffic_end_to_end(monkeypatch, tmp_path, capsys):
    import traffic

    monkeypatch.setattr(traffic, "missing", lambda: "")
    (tmp_path / "counters").write_text(ncu_prints(kernels_of(2)))
    log = json.dumps({"gpu": "some GPU", "sizes": [[64, 1024], [64, 512]]})
    body = f"""cp {tmp_path}/counters "$2"; while [ "$1" != --run ]; do shift; done; echo '{log}' > "$2" """
    ncu, output = fake_ncu(tmp_path, body), tmp_path / "out.json"
    assert traffic.main(["--ncu", ncu, "--seqlens", "512", "--output", str(output)]) == 0
    result = json.loads(output.read_text())
    assert [(cell["batch"], cell["seqlen"]) for cell in result["cells"]] == [(64, 1024), (64, 512)]
    assert result["cells"][1]["measured"]["cupyflash backward"] == {"read": 4800, "write": 3205, "kernels": 2}
    *lines, _, paper = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and "(9.13)" in lines[2] and len({line.count("|") for line in lines}) == 1
    assert paper.startswith("The FlashAttention paper, batch 64, seqlen 1024, ")
    assert paper.endswith(": 40.3 and 4.4, ratio 9.2")
    pytest.importorskip("matplotlib")
    import pictures

    pictures.save(pictures.traffic(result), tmp_path / "out.png")


@pytest.mark.parametrize(
    "body, words",
    [
        ("echo '==ERROR== ERR_NVGPUCTRPERM' > \"$2\"; exit 1", "may not read the GPU's counters"),
        ("echo '==ERROR== other' > \"$2\"; exit 9", "exit code 9:\n==ERROR== other"),
    ],
)
def test_traffic_when_ncu_fails(monkeypatch, tmp_path, capsys, body, words):
    import traffic

    monkeypatch.setattr(traffic, "missing", lambda: "")
    assert traffic.main(["--ncu", fake_ncu(tmp_path, body), "--output", str(tmp_path / "x.json")]) == 2
    assert words in capsys.readouterr().err


# --- table.py


def result_of_table():
    def cell(n):
        standard = ["standard-cupy", "standard-torch"]
        fits, fails = (standard, []) if n < 1000 else ([], standard)
        names = [*fits, "fa2", "cupyflash"]
        times = {f"{name}.{which}": n * i / 100 for i, name in enumerate(names, 1) for which in ("fwd", "bwd")}
        failed = {f"{name}.{which}": "out of memory" for name in fails for which in ("fwd", "bwd", "memory")}
        return {
            "batch": 1,
            "milliseconds": {**times, "cupyflash-sm80.fwd": 2.0},
            "bytes": {name: n * 10_000 for name in names},
            "failed": failed,
        }

    cells = {f"{shape} S{n}": cell(n) for n in (128, 2048) for shape in ("gpt2 causal", "bert-large full")}
    return {"gpu": "some GPU", "dtype": "float16", "cells": cells}


def test_table(tmp_path):
    pytest.importorskip("torch")
    import table

    result = result_of_table()
    assert table.names_of(result) == ["standard-cupy", "standard-torch", "fa2", "cupyflash-sm80", "cupyflash"]
    blocks = table.table(result).split("\n\n")
    assert len(blocks) == 6 and all(len(block.splitlines()) == 4 for block in blocks)
    assert blocks[0].splitlines()[2] == "| 128 | 1.28 | 2.56 | 3.84 | 2 | 5.12 | 0.5 |"
    assert blocks[1].splitlines()[3] == "| 2048 | out of memory | out of memory | 41 | – | 81.9 |  |"
    assert blocks[2].splitlines()[3].startswith("| 2048 | out of memory | out of memory | 20.5 | – | 20.5 |")
    pytest.importorskip("matplotlib")
    import pictures

    pictures.save(pictures.time_and_memory(result), tmp_path / "out.png")


@pytest.mark.parametrize("script", ["table", "side_by_side", "options", "varlen"])
def test_without_gpu(monkeypatch, capsys, tmp_path, script):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    script, output = importlib.import_module(script), tmp_path / "x.json"
    monkeypatch.setattr(sys, "argv", ["benchmarks/script.py", "--output", str(output)])
    assert code_of(script.main, ["--output", str(output)]) == 2
    printed = capsys.readouterr()
    assert printed.err == (
        "script.py: PyTorch finds no CUDA GPU. By formula: python -m cupyflash roofline. "
        "Committed results: python benchmarks/pictures.py\n"
    )
    assert not printed.out and not output.exists()


def test_a_run_that_is_ended_leaves_a_whole_file(tmp_path, monkeypatch):
    import output

    options = SimpleNamespace(output=tmp_path / "x.json")
    output.write(options, {"a": 1})

    def ended(path, text):
        path.open("w").write(text[:3])
        raise KeyboardInterrupt

    monkeypatch.setattr("pathlib.Path.write_text", ended)
    with pytest.raises(KeyboardInterrupt):
        output.write(options, {"a": 2})
    assert json.loads(options.output.read_text()) == {"a": 1}


def test_no_cupy_for_a_gpu(monkeypatch, capsys):
    import output

    cuda = SimpleNamespace(is_available=lambda: True, get_device_name=lambda: "some GPU")
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace())
    assert output.gpu_of(SimpleNamespace(cuda=cuda)) == "some GPU"
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert code_of(output.gpu_of, SimpleNamespace(cuda=cuda)) == 2
    assert 'CuPy is missing; pip install "cupyflash[cuda13]"' in capsys.readouterr().err


@pytest.mark.parametrize("name, code", [("standard-torch", 0), ("fa2", 0), ("cupyflash", 1), ("cupyflash-sm80", 1)])
def test_table_fails_where_cupyflash_does(monkeypatch, capsys, tmp_path, name, code):
    pytest.importorskip("torch")
    import table

    cell = result_of_table()["cells"]["gpt2 causal S128"] | {"failed": {f"{name}.bwd": "ValueError: no"}}
    monkeypatch.setattr(table.output, "gpu_of", lambda _: "some GPU")
    monkeypatch.setattr(table, "measure_cell", lambda *_: cell)
    assert table.main(["--shapes", "gpt2", "--seqlens", "128", "--output", str(tmp_path / "x.json")]) == code
    assert (f"gpt2 causal S128: {name}.bwd: ValueError: no\n" in capsys.readouterr().err) == bool(code)


@pytest.fixture
def run_table(monkeypatch, tmp_path):
    """Run it at ``commit`` without a GPU; the exit code, the sizes that it measured, and the file."""
    pytest.importorskip("torch")
    import table

    output = tmp_path / "out.json"

    def run(*words, commit="1", gpu="some GPU"):
        made = []

        def measure(groups, missing, timing, dtype, shape, causal, seqlen):
            made.append(seqlen)
            names = [name for group in groups for name in group]
            times = {f"{name}.fwd": 1.0 for name in names if name != "fa2"}
            return {"batch": 1, "milliseconds": times, "bytes": {}, "failed": {"fa2.fwd": "refused", "fa2.bwd": "no"}}

        words = ["--shapes", "gpt2", "--peers", "fa2", "--output", str(output), *words]
        monkeypatch.setattr(sys, "argv", ["table.py", *words])
        monkeypatch.setattr(table, "measure_cell", measure)
        monkeypatch.setattr(table.output, "gpu_of", lambda _: gpu)
        monkeypatch.setattr(table.output, "commit", lambda: commit)
        return code_of(table.main, words), made, output

    return run


def commits_of(output):
    return {key.split(" S")[1]: cell.get("commit") for key, cell in json.loads(output.read_text())["cells"].items()}


def test_a_table_that_goes_on(run_table, capsys):
    """A size with a figure, or a failure, of all that is wanted stays, with its commit."""
    import drawing

    assert run_table("--seqlens", "128", "512")[:2] == (0, [128, 512])
    code, made, output = run_table("--seqlens", "128", "256", "512", "--keep", commit="2")
    assert (code, made, commits_of(output)) == (0, [256], {"128": "1", "512": "1", "256": "2"})
    rows = [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert rows[-4:] == ["gpt2", "128", "256", "512"]
    result = json.loads(output.read_text())
    assert len(result["commands"]) == 2 and "--keep" in result["commands"][1]
    assert "commit" not in result and drawing.origin(result).endswith(", cupyflash at 1, 2")
    assert run_table("--seqlens", "128", "--keep", "--paths", "sm80")[1] == []
    assert run_table("--seqlens", "128", "--keep", "--paths", "sm90")[1] == [128]
    output.write_text(json.dumps(result | {"missing": {"cupyflash-sm90": "no"}}))
    assert run_table("--seqlens", "128", "--keep", "--paths", "sm90")[1] == []
    assert run_table("--seqlens", "128", commit="3")[1] == [128] and commits_of(output) == {"128": "3"}


@pytest.mark.parametrize("commit", ["0", None])
def test_a_table_of_before_that_goes_on(run_table, commit):
    """It names one command, which alone says the timing, and at most one commit."""
    *_, output = run_table("--seqlens", "128", "--rounds", "2")
    old = json.loads(output.read_text())
    for name in ("commands", "rounds", "seconds"):
        del old[name]
    del old["cells"]["gpt2 causal S128"]["commit"]
    old |= {"command": "python table.py --both-masks --rounds 2"} | ({"commit": commit} if commit else {})
    output.write_text(json.dumps(old))
    assert run_table("--seqlens", "128", "256", "--rounds", "3", "--keep")[0] == 2
    assert json.loads(output.read_text()) == old
    for more in ("256", "512"):
        assert run_table("--seqlens", "128", more, "--rounds", "2", "--keep", commit="1")[:2] == (0, [int(more)])
    result = json.loads(output.read_text())
    assert commits_of(output) == {"128": commit, "256": "1", "512": "1"}
    assert (result["rounds"], result["seconds"]) == (2, 0.01)
    assert len(result["commands"]) == 3 and result["commands"][0] == old["command"] and "command" not in result


def test_a_table_keeps_what_is_of_the_same_machine_and_timing(run_table, capsys):
    *_, output = run_table("--seqlens", "128")
    text = output.read_text()
    capsys.readouterr()
    for words, gpu, said in (
        ([], "another GPU", "gpu some GPU, this run another GPU"),
        (["--dtype", "bfloat16"], "some GPU", "dtype float16, this run bfloat16"),
        (["--rounds", "2"], "some GPU", "rounds 3, this run 2"),
        (["--seconds", "0.03"], "some GPU", "seconds 0.01, this run 0.03"),
    ):
        assert run_table("--seqlens", "256", "--keep", *words, gpu=gpu)[:2] == (2, [])
        message = f"table.py: --keep of {output}: ValueError: it has {said}; allowed: the same\n"
        assert capsys.readouterr().err == message and output.read_text() == text
    other = json.loads(text)
    output.write_text(json.dumps(other | {"versions": dict.fromkeys(other["versions"], "0")}))
    assert run_table("--seqlens", "256", "--keep")[:2] == (2, [])
    assert " 0, this run " in capsys.readouterr().err
    for text in ("{", "[]", '{"gpu": "some GPU"}', '{"command": "x", "cells": [1]}', '{"commands": [1], "cells": {}}'):
        output.write_text(text)
        assert run_table("--keep")[:2] == (2, []) and output.read_text() == text
        assert f"table.py: --keep of {output}: " in capsys.readouterr().err


class FakePool:
    """Of CuPy: what it holds stays held until it is told to let go."""

    def __init__(self):
        self.held, self.malloc = 7, None

    def total_bytes(self):
        return self.held

    def free_all_blocks(self):
        self.held = 0


def fake_cupy(pool):
    device = SimpleNamespace(synchronize=lambda: None)
    cuda = SimpleNamespace(MemoryPool=lambda: pool, using_allocator=lambda _: nullcontext(), Device=lambda: device)
    return SimpleNamespace(cuda=cuda, get_default_memory_pool=FakePool)


@pytest.mark.parametrize("fails", [False, True])
def test_memory_that_was_counted_is_given_back(monkeypatch, fails):
    """What one size held must not be missing at the next, where standard attention would end too early."""
    pytest.importorskip("torch")
    import table

    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(table.torch.cuda, name, lambda: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(table.torch.cuda, name, lambda: 100)
    pool = FakePool()
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(pool))
    if fails:
        with pytest.raises(ZeroDivisionError):
            table.peak_bytes(lambda: 1 / 0)
    else:
        assert table.peak_bytes(lambda: None) == 7
    assert pool.held == 0


def test_workspace_of_gradients_without_a_sink(monkeypatch):
    from benchmarks import bench_memory

    pool = FakePool()
    monkeypatch.setattr(bench_memory, "cupy", fake_cupy(pool))
    x = np.zeros(1, np.uint8)
    assert bench_memory.workspace(lambda: cupyflash.AttentionGradients(x, x, x, None)) == 4
    assert pool.held == 0


# --- standard.py


class OnHost(np.ndarray):
    """An array of NumPy with its address where CuPy has it."""

    extents = {}  # bytes, by address

    @property
    def data(self):
        self.extents[self.ctypes.data] = self.nbytes
        return SimpleNamespace(ptr=self.ctypes.data)


def matrices(address, kind, rows, cols, leading, stride, count):
    """``count`` matrices of float16 in memory, column by column: (count, rows, cols)."""
    assert kind == 2 and leading >= rows  # CUDA_R_16F
    elements = (count - 1) * stride + (cols - 1) * leading + rows
    assert 2 * elements <= OnHost.extents[address]
    memory = np.frombuffer((ctypes.c_uint16 * elements).from_address(address), np.float16)
    return np.lib.stride_tricks.as_strided(memory, (count, rows, cols), (2 * stride, 2, 2 * leading))


class Cublas:
    """Of cuBLAS what standard.py calls, on the host."""

    CUBLAS_OP_N, CUBLAS_OP_T, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT = 0, 1, 68, -1

    def __init__(self, launched):
        self.launched = launched

    # fmt: off
    def gemmStridedBatchedEx(
        self, handle, transa, transb, m, n, k, alpha, A, Atype, lda, strideA, B, Btype, ldb, strideB,
        beta, C, Ctype, ldc, strideC, batchCount, computeType, algo
    ):  # fmt: on
        assert (handle, computeType, algo) == (7, 68, -1)
        a = matrices(A, Atype, *((k, m) if transa else (m, k)), lda, strideA, batchCount)
        b = matrices(B, Btype, *((n, k) if transb else (k, n)), ldb, strideB, batchCount)
        c = matrices(C, Ctype, m, n, ldc, strideC, batchCount)
        alpha, beta = (ctypes.c_float.from_address(address).value for address in (alpha, beta))
        assert (alpha, beta) == (1, 0)
        c[...] = (a.mT if transa else a).astype(np.float32) @ (b.mT if transb else b).astype(np.float32)
        self.launched.append("product")


def softmax(weights, seqlen_q, seqlen_k, scale, causal):
    seen = np.tri(seqlen_q, seqlen_k, seqlen_k - seqlen_q) if causal else 1
    weights[...] = np.exp(scale * weights.astype(np.float32)) * seen
    weights /= weights.sum(axis=-1, keepdims=True, dtype=np.float32)


def softmax_gradient(weights, dscores, delta, seqlen_k, scale):
    dscores[...] = scale * weights.astype(np.float32) * (dscores - delta[..., None])


@pytest.fixture
def standard_on_host(monkeypatch):
    """standard.py, with NumPy in the place of CuPy, and the names of the kernels that it launched."""
    cupy = pytest.importorskip("cupy")
    launched = []
    libraries = importlib.import_module("cupy_backends.cuda.libs")
    monkeypatch.setitem(vars(libraries), "cublas", Cublas(launched))
    standard = importlib.import_module("standard")
    device = SimpleNamespace(get_cublas_handle=lambda: 7)
    cuda = SimpleNamespace(device=device, runtime=cupy.cuda.runtime)
    monkeypatch.setattr(standard, "cupy", SimpleNamespace(empty=lambda *args: np.empty(*args).view(OnHost), cuda=cuda))

    def kernel(name):
        def launch(grid, block, arguments):
            array, seqlen_k = arguments[0], arguments[-2 if name == "softmax_gradient" else 2]
            assert grid == (array.size // seqlen_k,) and block == (standard.THREADS,)
            assert all(x.flags.c_contiguous for x in arguments)
            globals()[name](*arguments)
            launched.append(name)

        return launch

    def delta(dout, out, axis):
        launched.append("delta")
        return np.einsum("bhsd,bhsd->bhs", dout.astype(np.float32), out)

    monkeypatch.setattr(standard, "_kernel", kernel)
    monkeypatch.setattr(standard, "_delta", delta)
    return standard, launched


def check_standard(standard, to_device, to_host, causal, seqlen_q, seqlen_k, head_dim):
    random = np.random.default_rng(0)
    lengths = seqlen_q, seqlen_k, seqlen_k, seqlen_q
    arrays = [random.standard_normal((2, 3, n, head_dim)).astype("float16") for n in lengths]
    *qkv, dout = map(to_device, arrays)
    out, weights = standard.forward(*qkv, causal)
    found = out, *standard.backward(dout, *qkv, out, weights)
    weights[...] = 7
    again, same = standard.forward(*qkv, causal, weights)
    assert same is weights and (again == out).all()
    *qkv, dout = (x.swapaxes(1, 2) for x in arrays)
    right, lse = reference.attention(*qkv, causal=causal, return_lse=True)
    gradients = reference.attention_backward(dout, *qkv, right, lse, causal=causal)
    for got, expected in zip(found, (right, *gradients[:3])):
        assert got.dtype == np.float16 and got.flags.c_contiguous
        assert abs(to_host(got).swapaxes(1, 2) - expected).max() < 0.02 * abs(expected).max()


@pytest.mark.parametrize("causal", [False, True])
def test_standard_attention_calls_cublas(standard_on_host, causal):
    """What it passes and how often: three kernels forward and six backward, no copies and no conversions."""
    standard, launched = standard_on_host
    check_standard(standard, lambda x: x.view(OnHost), np.asarray, causal, 10, 14, 6)
    assert launched[:3] == ["product", "softmax", "product"]
    assert sorted(launched[3:9]) == ["delta", *4 * ["product"], "softmax_gradient"] and launched[9:] == launched[:3]
    with pytest.raises(ValueError, match="strides are .*; allowed: contiguous, or mT of contiguous"):
        standard.product(*2 * [np.zeros((1, 2, 4, 4), np.float16).view(OnHost)[..., ::2]])


def test_signature_of_cublas():
    """The stand-in takes what CuPy's does, whose signature can be read where cuBLAS itself is missing."""
    pytest.importorskip("cupy")
    binary = Path(importlib.util.find_spec("cupy_backends.cuda.libs.cublas").origin).read_bytes()
    (signature,) = set(re.findall(rb"gemmStridedBatchedEx\((.*?)\)", binary))
    names = [argument.split()[-1] for argument in signature.decode().split(", ")]
    assert names == list(inspect.signature(Cublas(None).gemmStridedBatchedEx).parameters)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlens", [(130, 130), (64, 200)])
def test_standard_attention_in_cupy(causal, seqlens):
    import cupy
    import standard

    check_standard(standard, cupy.asarray, cupy.asnumpy, causal, *seqlens, 64)


# --- compare.py


ASV_TABLE = """All benchmarks:

| Change   | Before [aaaa] <main>   | After [bbbb]   | Ratio   | Benchmark (Parameter)  |
|----------|------------------------|----------------|---------|------------------------|
| +        | 5.75±0.9ms             | 11.2±1ms       | 1.95    | bench.slower(False, 4) |
| !        | 5.75±0.9ms             | failed         | n/a     | bench.broken           |
|          | n/a                    | n/a            | n/a     | bench.skipped          |
|          | 5.75±0.9ms             | n/a            | n/a     | bench.gone             |
|          | failed                 | failed         | n/a     | bench.never            |
| *        | failed                 | 3.7±1ms        | n/a     | bench.repaired         |
|          | 0                      | 0              | n/a     | bench.nothing          |
|          | 6.41±0.9ms             | 6.70±0.9ms     | ~1.04   | bench.same             |
| -        | 6.41±0.9ms             | 3.7±1ms        | 0.53    | bench.faster           |
"""


@pytest.mark.parametrize(
    "names, code, words",
    [
        (["slower", "broken", "same", "faster"], 1, "worse by over 3% from HEAD to HEAD~1: 2 of 4"),
        (["skipped", "never", "nothing", "same", "faster"], 0, "worse by over 3% from HEAD to HEAD~1: 0 of 3"),
        (["same", "nothing"], 0, "nothing changed\n"),
        (["skipped", "never", "repaired", "gone"], 2, "nothing ran on both commits; without a GPU: --bench Numpy"),
        ([], 2, "nothing ran on both commits"),
    ],
)
def test_what_asv_compared(monkeypatch, capsys, names, code, words):
    pytest.importorskip("asv")
    import compare

    head, lines = ASV_TABLE.splitlines()[:4], ASV_TABLE.splitlines()[4:]
    table = "\n".join([*head, *(line for line in lines if any(f"bench.{name}" in line for name in names))])
    monkeypatch.setattr(compare, "git", lambda *command: command[-1].removesuffix("^{commit}"))
    monkeypatch.setattr(compare, "compare", lambda *_: table if names else "")
    assert code_of(compare.main, ["HEAD", "HEAD~1"]) == code
    printed = capsys.readouterr()
    assert words in printed.out + printed.err
    shown = [name for name in ("slower", "broken", "faster") if f"bench.{name}" in printed.out]
    assert shown == [name for name in names if name in ("slower", "broken", "faster")]
    assert not any(f"bench.{name}" in printed.out for name in ("skipped", "never", "nothing", "same"))
    assert code_of(compare.main, ["HEAD", "HEAD~1", "--json"]) == code
    if code != 2:
        result = json.loads(capsys.readouterr().out)
        assert result["worse"] == sum(name in ("slower", "broken") for name in names)
        ran = [name for name in names if name != "skipped" and name != "never"]
        assert sorted(row["benchmark"].split("(")[0] for row in result["rows"]) == sorted(f"bench.{x}" for x in ran)
        assert result["factor"] == 1.03 and all(list(row) == list(compare.COLUMNS) for row in result["rows"])


def test_compare_names_a_commit_that_does_not_exist(capsys):
    pytest.importorskip("asv")
    if not (tools.ROOT / ".git").exists():
        pytest.skip("no repository")
    import compare

    assert code_of(compare.main, ["no-such-commit"]) == 2
    assert "no-such-commit" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, message",
    [
        (["HEAD", "HEAD"], "HEAD and HEAD are the same commit"),
        (["HEAD", "--rounds", "0"], "'0' is no positive integer"),
        (["HEAD", "--factor", "-1"], "'-1' is no positive finite number"),
        (
            ["HEAD", "--bench", "bench_host", "--bench", "no_such"],
            "'no_such' finds no benchmark among bench_backward.Back",
        ),
        (["HEAD", "--bench", "("], "'(' is no regular expression: "),
        (
            ["HEAD", "HEAD", "--bench", "Forward.time_attention.'float16', 64, True"],
            "are the same commit",
        ),  # it is known
        (["HEAD", "HEAD", "--bench", "time_warm_call$"], "are the same commit"),
    ],
)
def test_compare_refuses(capsys, words, message):
    pytest.importorskip("asv")
    if not (tools.ROOT / ".git").exists():
        pytest.skip("no repository")
    import compare

    assert code_of(compare.main, words) == 2
    assert message in capsys.readouterr().err


# --- torch_attention.py and retrieval.py


@pytest.mark.parametrize("causal", [False, True])
def test_gradients_in_torch(causal):
    torch = pytest.importorskip("torch")
    import torch_attention

    torch.manual_seed(0)
    shapes = ((2, 17, 4, 8), (2, 23, 4, 8), (2, 23, 4, 8))
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    dout = torch.randn(shapes[0], dtype=torch.float64)
    results = []
    for attend in (torch_attention.attention, torch_attention.standard_attention):
        out = attend(*inputs, causal)
        results.append((out, *torch.autograd.grad(out, inputs, dout)))
    for got, expected in zip(*results):
        torch.testing.assert_close(got, expected)


def test_items_that_are_dealt():
    torch = pytest.importorskip("torch")
    import retrieval

    keys, values, asked, answers = retrieval.deal(8, 64, torch.Generator().manual_seed(0))
    assert keys.shape == values.shape == asked.shape == answers.shape == (8, 64)
    assert keys.unique().numel() == keys.numel() and 0 <= keys.min() and keys.max() < retrieval.KEYS
    for row in range(8):
        table = dict(zip(keys[row].tolist(), values[row].tolist()))
        assert [table[key] for key in asked[row].tolist()] == answers[row].tolist()
    assert retrieval.lengths(65536) == [16, 64, 256, 1024, 4096, 16384, 65536]
    assert retrieval.lengths(100) == [16, 64, 100]


def test_order_of_items_means_nothing():
    torch = pytest.importorskip("torch")
    import retrieval
    from torch_attention import attention

    torch.manual_seed(0)
    model = retrieval.Retriever(attention, torch.float32, width=32, heads=2, layers=1, embedding=8)
    *items, _ = retrieval.deal(1, 40, torch.Generator().manual_seed(1))
    order = torch.randperm(40)
    torch.testing.assert_close(model(*(x[:, order] for x in items)), model(*items)[:, order], rtol=1e-4, atol=1e-4)


def test_retrieval_is_learnt(tmp_path, capsys):
    pytest.importorskip("torch")
    import retrieval

    output = tmp_path / "out.json"
    small = ["--items", "64", "--tokens", "1024", "--last-steps", "25", "--rate", "4e-3"]
    assert retrieval.main([*small, "--output", str(output)]) == 0
    assert capsys.readouterr().out.startswith("passed: ")
    result = json.loads(output.read_text())
    assert result["accuracy"] > 0.99 and result["steps"][-1]["items"] == 64
    assert result["steps"][0]["accuracy"] < 0.1
    assert retrieval.main([*small, "--seconds", "1e-9", "--output", str(output)]) == 1
    assert capsys.readouterr().out.endswith(" s, where --seconds 1e-09 ended the training\n")


def test_retrieval_without_gpu(tmp_path, capsys):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    import retrieval

    assert code_of(retrieval.main, ["--output", str(tmp_path / "x.json")]) == 2
    printed = capsys.readouterr()
    assert "PyTorch finds no CUDA GPU. On NumPy, up to 4096 items: --items 256 --tokens 4096 --output " in printed.err
    assert not printed.out and not list(tmp_path.iterdir())


# --- training.py

TINY = "--cpu --layers 2 --heads 2 --width 32 --vocabulary 128 --tokens 64 --rounds 1 --steps 2".split()


@pytest.fixture
def training():
    pytest.importorskip("torch")
    import training

    return training


def test_size_of_gpt2(training):
    import torch

    with torch.device("meta"):
        model = training.GPT(None, 12, 12, 768, vocabulary=50257, positions=1024)
    assert sum(parameter.numel() for parameter in model.parameters()) == 124_439_808  # of GPT-2 small


@pytest.mark.parametrize("name", ["standard", "torch", "cupyflash"])
def test_gpt_sees_no_token_that_follows(training, name):
    import torch

    model = training.GPT(training.IMPLEMENTATIONS[name], 2, 2, 32, vocabulary=64, positions=24)
    tokens = torch.arange(48).view(2, 24)
    before = model(tokens)
    tokens[:, 16] += 7
    after = model(tokens)
    torch.testing.assert_close(after[:, :16], before[:, :16])
    assert ((after - before)[:, 16:].abs().amax(dim=-1) > 1e-4).all()


def test_training_agrees(training, tmp_path, capsys):
    output = tmp_path / "out.json"
    assert training.main([*TINY, "--seqlens", "16", "32", "--output", str(output)]) == 0
    result, printed = json.loads(output.read_text()), capsys.readouterr()
    assert list(result["cells"]) == ["S16", "S32"] and result["cells"]["S32"]["batch"] == 2
    for cell in result["cells"].values():
        assert cell["steps"] == 6 and cell["failed"] == {} and set(cell["loss"]) == set(training.IMPLEMENTATIONS)
        assert all(first > last for first, last in cell["loss"].values())
        assert 0 < cell["differences"]["gradients"] < 0.02
    caption, _, *lines = printed.out.splitlines()
    assert caption.startswith("2 layers of 2 heads") and len(lines) == 8
    assert lines[2].startswith("| 16 | 4 | standard | ") and " | 1.00 | – | " in lines[2]
    assert len({line.count("|") for line in lines}) == 1
    assert "S32" in printed.err and "S32" not in printed.out


def test_training_that_disagrees(training, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(training.IMPLEMENTATIONS, "torch", lambda q, k, v, causal: training.attention(q, k, v))
    output = tmp_path / "out.json"
    assert training.main([*TINY, "--seqlens", "32", "--output", str(output)]) == 1
    assert "training.py: S32: gradients differ by" in capsys.readouterr().err
    nan = SimpleNamespace(losses=[training.torch.tensor(np.nan)] * 2, gradients=training.torch.ones(3, 1))
    assert training.differences([nan, nan]) == {"first": np.inf, "last": np.inf, "gradients": 0}


def test_training_out_of_memory(training, tmp_path, capsys, monkeypatch):
    def fail(*arguments, **options):
        raise training.torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")

    monkeypatch.setitem(training.IMPLEMENTATIONS, "standard", fail)
    output = tmp_path / "out.json"
    arguments = [*TINY, "--seqlens", "32", "--output", str(output)]
    assert training.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[4] == "| 32 | 2 | standard | out of memory | – | – | – | – | – |"
    assert lines[6].startswith("| 32 | 2 | cupyflash | ")
    monkeypatch.setitem(training.IMPLEMENTATIONS, "cupyflash", fail)
    assert training.main(arguments) == 1
    assert "S32: cupyflash failed: out of memory" in capsys.readouterr().err


def test_training_that_ends_in_a_later_round(training, tmp_path, monkeypatch):
    seconds = training.Training.seconds

    def fail(self, steps):
        if self.model.blocks[0].attend is training.standard_attention:
            raise training.torch.OutOfMemoryError("CUDA out of memory")
        return seconds(self, steps)

    monkeypatch.setattr(training.Training, "seconds", fail)
    output = tmp_path / "out.json"
    assert training.main([*TINY, "--rounds", "2", "--seqlens", "32", "--output", str(output)]) == 0
    cell = json.loads(output.read_text())["cells"]["S32"]
    assert cell["failed"] == {"standard": "out of memory"}
    assert all(list(cell[what]) == ["torch", "cupyflash"] for what in ("loss", "milliseconds", "peak_bytes"))


def test_training_refuses(training, capsys):
    if not training.torch.cuda.is_available():
        assert code_of(training.main, []) == 2
        assert "PyTorch finds no CUDA GPU. On NumPy: --cpu --layers 2" in capsys.readouterr().err
    for arguments, words in (
        (["--seqlens", "1000"], "--seqlens has 1000; allowed: divisors of --tokens, 16384"),
        (["--heads", "7"], "--width is 768; allowed: multiples of --heads, 7"),
    ):
        with pytest.raises(SystemExit, match="2"):
            training.main(arguments)
        assert words in capsys.readouterr().err


# --- report.py, output.py


def test_caption():
    import report

    def cell(names, failed=()):
        return {"tflops": {f"{name}.fwd": 100.0 for name in names}, "failed": dict.fromkeys(failed, "RuntimeError")}

    cells = {
        "d64 full S512": cell(["cupyflash", "cudnn", "fa3"]),
        "d128 full S512": cell(["cupyflash", "cudnn", "fa3"]),
        "d128 full S1024": cell(["cupyflash", "cudnn"], ["fa3"]),
        "d256 full S512": cell(["cupyflash", "cudnn"], ["fa3"]),
        "d64 full S512 float16": cell(["cupyflash", "fa2"]),
    }
    machine = {"gpu": "some GPU", "torch": "2.0", "cudnn": 91900, "ceilings": {"bf16 matmul TFLOP/s": 700}}
    caption = report.caption({**machine, "dtype": "bfloat16", "cells": cells})
    assert "(in bfloat16 cuDNN, FlashAttention-3; in float16 FlashAttention-2)" in caption
    assert "FlashAttention-3 was not measured at some sizes of head_dim 128. " in caption
    assert "FlashAttention-3 was not measured at head_dim 256. " in caption
    assert "head_dim 64" not in caption and "cuDNN 9.19.0." in caption


@pytest.mark.parametrize("words", [["--output", "/tmp/x.json"], ["--output=/tmp/x.json"], []])
def test_command_without_its_output(monkeypatch, words):
    import output

    monkeypatch.setattr(sys, "argv", ["benchmarks/table.py", *words, "--rounds", "4"])
    assert output.command() == "python benchmarks/table.py --rounds 4"


def test_commit_of_a_result(monkeypatch, tmp_path):
    """With a "+" where code was changed, wherever results lie; and in a copy without git."""
    import output

    monkeypatch.setattr(output, "ROOT", tmp_path)
    monkeypatch.delenv("CUPYFLASH_COMMIT", raising=False)
    assert output.commit() is None
    monkeypatch.setenv("CUPYFLASH_COMMIT", "of a copy")
    assert output.commit() == "of a copy"
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "cupyflash").mkdir()
    for name in ("benchmarks/table.json", "benchmarks/table.py", "cupyflash/cpu.py"):
        (tmp_path / name).write_text("1")
    try:
        output.git("init", "--quiet")
    except OSError:
        pytest.skip("no git")
    assert output.commit() == "of a copy"  # there is no commit yet
    author = ("-c", "user.name=x", "-c", "user.email=x@y.z")
    output.git("add", ".")
    output.git(*author, "commit", "--quiet", "-m", "x")
    name = output.git("rev-parse", "HEAD")[:8]
    (tmp_path / "benchmarks/table.json").write_text("2")
    assert output.commit() == name == output.about("some GPU")["commit"]
    (tmp_path / "cupyflash/new.py").write_text("2")
    assert output.commit() == name + "+"
    (tmp_path / "cupyflash/new.py").unlink()
    (tmp_path / "benchmarks/table.py").write_text("2")
    assert output.commit() == name + "+"


def test_results_are_json_whatever_they_hold(tmp_path, capsys):
    import output

    options = SimpleNamespace(output=tmp_path / "x.json", json=True, plot=None)
    result = {"loss": [np.inf, 1.0], "accuracy": np.float64("nan")}
    output.write(options, result)
    output.show(options, result, "text", "picture")

    def refuse(constant):
        raise AssertionError(constant)

    for text in (options.output.read_text(), capsys.readouterr().out):
        assert json.loads(text, parse_constant=refuse) == {"loss": [None, 1.0], "accuracy": None}


MEASURING = ["table", "training", "retrieval", "side_by_side", "options", "varlen", "precise", "traffic"]


@pytest.mark.parametrize("script", MEASURING)
def test_every_script_has_the_same_options_for_its_result(script, capsys):
    pytest.importorskip("torch")
    pytest.importorskip("cupy")
    with pytest.raises(SystemExit, match="0"):
        importlib.import_module(script).main(["--help"])
    text = capsys.readouterr().out
    assert "--json " in text and "--output FILE" in text and f"default: {script}.json beside the script" in text


@pytest.mark.parametrize("script", ["table", "training", "retrieval", "side_by_side", "options", "varlen"])
def test_without_torch(monkeypatch, capsys, script):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(sys, "argv", [f"benchmarks/{script}.py"])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(script)
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"{script}.py: PyTorch is missing; pip install torch\n"


@pytest.mark.parametrize(
    "words, message",
    [
        (["--output", "no/such/folder/x.json"], "is in no folder that exists"),
        (["--output", "."], "is a folder"),
        (["--plot", "no/such/folder/x.png"], "is in no folder that exists"),
        (["--plot", "x.none"], "'x.none' has the suffix '.none'; allowed: "),
        (["--seqlens", "0"], "'0' is no positive integer"),
    ],
)
def test_what_would_be_lost_is_refused_before_it_is_measured(capsys, words, message):
    pytest.importorskip("matplotlib")
    import traffic

    assert code_of(traffic.main, words) == 2
    assert message in capsys.readouterr().err


# --- report.py


RATE_OF_0 = {"dtype": "bfloat16", "cells": {"d64 full S512": {"tflops": {"cupyflash.fwd": 1, "fa2.fwd": 0}}}}


@pytest.mark.parametrize(
    "text",
    [None, "{", "[]", '{"cells": []}', '{"cells": {"d64": {}}}', '{"cells": {}}', json.dumps(RATE_OF_0)],
)
def test_report_of_no_result(tmp_path, capsys, text):
    import report

    path = tmp_path / "x.json"
    if text is not None:
        path.write_text(text)
    assert code_of(report.main, ["--input", str(path)]) == 2
    assert f"{path}: no result of side_by_side.py" in capsys.readouterr().err


def test_readme_has_the_table_of_the_committed_result():
    import report

    text = report.table(json.loads((FOLDER / "side_by_side.json").read_text()))
    assert f"{report.MARKS[0]}\n{text}\n{report.MARKS[1]}" in (tools.ROOT / "README.md").read_text()


def test_report_writes_and_draws(monkeypatch, capsys, tmp_path):
    """Both, where both are asked for; and no point lies outside of its panel."""
    plots = pytest.importorskip("matplotlib.pyplot")
    import report

    cells = {f"d64 full S{n}": {"tflops": {"cupyflash.fwd": n, "fa2.fwd": 300}, "failed": {}} for n in (512, 1024)}
    machine = {"gpu": "some GPU", "torch": "2.0", "cudnn": 91900, "ceilings": {"bf16 matmul TFLOP/s": 700}}
    source, readme = tmp_path / "x.json", tmp_path / "README.md"
    source.write_text(json.dumps({**machine, "dtype": "bfloat16", "cells": cells}))
    readme.write_text(f"before {report.MARKS[0]} old {report.MARKS[1]} after")
    monkeypatch.setattr(report, "HERE", tmp_path / "benchmarks")
    report.main(["--input", str(source), "--write", "--plot", str(tmp_path / "x.png")])
    assert capsys.readouterr().out == "" and (tmp_path / "x.png").exists()
    text = readme.read_text()
    assert "| forward | bfloat16 | 64 | full | 512 (1.71) | 1024 (3.41) |" in text and "old" not in text
    axis = plots.gcf().axes[0]
    assert axis.get_ylim()[1] > max(max(line.get_ydata()) for line in axis.lines) == 1024
    plots.close()
    report.main(["--input", str(source)])
    assert capsys.readouterr().out.strip() in text

    source.write_text(json.dumps({**machine, "dtype": "bfloat16", "cells": {}}))
    arguments = ["--input", str(source), "--write", "--plot", str(tmp_path / "x.png")]
    assert code_of(report.main, arguments) == 2 and readme.read_text() == text, "what cannot be drawn is not written"
    plots.close("all")


@pytest.mark.parametrize("text", ["", "{0} old", "{1} and {0}", None])
def test_report_without_its_marks(monkeypatch, capsys, tmp_path, text):
    import report

    readme, source = tmp_path / "README.md", FOLDER / "side_by_side.json"
    if text is not None:
        readme.write_text(text.format(*report.MARKS))
    monkeypatch.setattr(report, "HERE", tmp_path / "benchmarks")
    assert code_of(report.main, ["--input", str(source), "--write"]) == 2
    assert f"--write: {readme}: " in capsys.readouterr().err
    assert text is None or readme.read_text() == text.format(*report.MARKS)


def test_report_without_matplotlib(monkeypatch, capsys, tmp_path):
    import report

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert code_of(report.main, ["--plot", str(tmp_path / "x.png")]) == 2
    assert 'the extra "plot"' in capsys.readouterr().err


# --- side_by_side.py


def test_lengths_that_divide_the_tokens(side_by_side, monkeypatch, capsys):
    assert code_of(side_by_side.main, ["--seqlens", "3000"]) == 2
    assert "--seqlens has 3000; allowed: divisors of 16384" in capsys.readouterr().err


@pytest.fixture
def side_by_side(monkeypatch):
    pytest.importorskip("torch")
    import side_by_side

    monkeypatch.setattr(side_by_side.torch.cuda, "synchronize", lambda: None)
    return side_by_side


def test_every_round_has_an_order_of_its_own(side_by_side):
    made = []
    calls = {name: (lambda name=name: made.append(name), lambda _: None) for name in "abcdef"}
    seconds = side_by_side.median_seconds(calls, rounds=4, seconds=0, least=1)
    assert set(seconds) == set(calls) and all(s >= 0 for s in seconds.values())
    rounds = np.reshape(made[-4 * 2 * len(calls) :], (4, len(calls), 2))  # each is called untimed, then timed
    assert (rounds[..., 0] == rounds[..., 1]).all() and all(sorted(one) == sorted(calls) for one in rounds[..., 0])
    assert len({"".join(one) for one in rounds[..., 0]}) == 4


def test_a_result_that_goes_on(side_by_side):
    machine = {"gpu": "some GPU", "torch": "2", "cudnn": 9, "dtype": "bfloat16", "date": "1st"}
    first = machine | {"cells": {"a": 1}, "missing": {}, "ceilings": 5, "versions": {"x": 1, "y": 1}, "commands": ["1"]}
    second = first | {"cells": {}, "missing": {"m": 1}, "ceilings": None, "versions": {"x": 1}, "commands": ["2"]}
    expected = first | {"commands": ["1", "2"]}
    assert side_by_side.resumed(second, first) == expected
    assert side_by_side.resumed(second, expected) == expected
    later = expected | {"date": "2nd", "ceilings_from": "on 1st"}  # which stay those of the first
    assert side_by_side.resumed(second | {"date": "2nd"}, first) == later
    assert side_by_side.resumed(second | {"date": "3rd"}, later) == later | {"date": "3rd"}
    for change in ({"gpu": "another GPU"}, {"cudnn": 10}, {"dtype": "float16"}, {"versions": {"x": 2}}):
        with pytest.raises(ValueError, match="it has .*, this run .*; allowed: the same"):
            side_by_side.resumed(second | change, first)


@pytest.fixture
def run_side_by_side(side_by_side, monkeypatch, tmp_path):
    """Run it without a GPU, with cells that have ``failed``; the exit code and the file."""
    output = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["side_by_side.py"])
    monkeypatch.setattr(side_by_side.output, "commit", lambda: "12345678+")
    monkeypatch.setattr(side_by_side, "ceilings", lambda: {"bf16 matmul TFLOP/s": 700})

    def run(*words, gpu="some GPU", **failed):
        cell = {"tflops": {"fa2.fwd": 1.0}, "failed": failed, "ratio_to_best_peer": {}}
        monkeypatch.setattr(side_by_side.output, "gpu_of", lambda _: gpu)
        monkeypatch.setattr(side_by_side, "measure_cell", lambda *_: cell)
        return code_of(side_by_side.main, ["--quick", "--output", str(output), *words]), output

    return run


def test_side_by_side_fails_where_cupyflash_does(run_side_by_side, capsys):
    assert run_side_by_side(fa2="refused")[0] == 0
    assert run_side_by_side(**{"cupyflash-sm80": "ArithmeticError: wrong out"})[0] == 1
    assert "d64 full S1024: cupyflash-sm80: ArithmeticError: wrong out\n" in capsys.readouterr().err


def test_side_by_side_keeps_what_is_of_the_same_machine(run_side_by_side, capsys):
    _, output = run_side_by_side()
    first = json.loads(output.read_text())
    output.write_text(json.dumps(first | {"ceilings": {"bf16 matmul TFLOP/s": 690}, "ceilings_from": "elsewhere"}))
    assert run_side_by_side("--keep")[0] == 0
    result = json.loads(output.read_text())
    assert (result["ceilings"], result["ceilings_from"]) == ({"bf16 matmul TFLOP/s": 690}, "elsewhere")
    assert run_side_by_side("--keep", gpu="another GPU")[0] == 2
    assert "it has gpu some GPU, this run another GPU; allowed: the same" in capsys.readouterr().err
    for text in ("{", "[]", '{"gpu": "some GPU"}'):
        output.write_text(text)
        assert run_side_by_side("--keep")[0] == 2 and output.read_text() == text
        assert f"side_by_side.py: --keep of {output}: " in capsys.readouterr().err


def test_side_by_side_in_json(run_side_by_side, capsys):
    code, output = run_side_by_side("--json")
    printed = capsys.readouterr()
    assert code == 0 and json.loads(printed.out) == json.loads(output.read_text())
    assert "[12/12, " in printed.err
    assert run_side_by_side()[0] == 0
    assert "not installed: none\n" in capsys.readouterr().out


def test_cells_name_the_commit_that_they_were_measured_at(run_side_by_side, side_by_side, monkeypatch):
    import report

    others = dict.fromkeys(("cudnn", "fa3", "fa4", "cupyflash"), "refused")
    _, output = run_side_by_side(**others)
    first = json.loads(output.read_text())
    assert first["commit"] == "12345678+" and first["commands"] and "command" not in first
    del first["cells"]["d64 full S1024"], first["cells"]["d64 full S8192"]["commit"]  # as older files are
    output.write_text(json.dumps(first))
    monkeypatch.setattr(side_by_side.output, "commit", lambda: "abcdefab")
    run_side_by_side("--keep", **others)
    result = json.loads(output.read_text())
    commits = {key: cell.get("commit") for key, cell in result["cells"].items()}
    assert len(commits) == 12 and result["commit"] == "abcdefab"
    assert (commits.pop("d64 full S1024"), commits.pop("d64 full S8192")) == ("abcdefab", None)
    assert set(commits.values()) == {"12345678+"}
    assert " with cupyflash at 12345678+, abcdefab, " in report.caption(result)


# --- options.py


def on_the_host(kind):
    """`kind` of text that is also an expression of Python, since the host needs a function."""
    arguments = ["score"] * (kind is cupyflash.ScoreMod) + ["b", "h", "i", "j"]

    def make(text, **captures):
        of_c = {"fabs": abs, "float": np.float32}
        return kind(eval(f"lambda {', '.join([*arguments, *captures])}: {text}", of_c), **captures)

    return make


@pytest.fixture
def options(side_by_side, monkeypatch):
    """On the host, small, without times; FlexAttention as it is when nothing is compiled: without a backward."""
    import options

    torch, check = options.torch, options.check
    more = {"ScoreMod": on_the_host(cupyflash.ScoreMod), "MaskMod": on_the_host(cupyflash.MaskMod), "CAP": 1.0}
    for name, value in {"DEVICE": "cpu", "TOKENS": 1024, "WIDTH": 32, "WINDOW": 100, "DOCUMENT": 128, **more}.items():
        monkeypatch.setattr(options, name, value)
    for name, row in options.ROWS.items():
        size = options.Size(16, 512 if row.size == options.Size() else 1024)
        monkeypatch.setitem(options.ROWS, name, row._replace(size=size))

    def forward_alone(function, *arrays):
        return options.Pair(lambda: function(*arrays[:-1]), list, options.synchronize)

    monkeypatch.setattr(options, "torch_pair", forward_alone)
    monkeypatch.setattr(options, "check", lambda got, expected: check(got[:1], expected))
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(options.output, "gpu_of", lambda _: "some GPU")
    times = {"cupyflash": 0.002, "without": 0.001, "flex": 0.006}

    def seconds(calls, *timing):
        return {name: times[name.split(".")[0]] for name in calls}

    monkeypatch.setattr(side_by_side, "median_seconds", seconds)
    return options


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_options_compute_what_flex_attention_does(options, monkeypatch, tmp_path, capsys):
    output = tmp_path / "out.json"
    words = ["--output", str(output)]
    assert options.main(words) == 0
    result, lines = json.loads(output.read_text()), capsys.readouterr().out.splitlines()
    assert list(result["rows"]) == list(options.ROWS) and len(lines) == 2 + len(options.ROWS)
    assert lines[2:4] == ["| none | – | – | 3.00 | 3.00 |  |", "| softcap | 0.50 | 0.50 | 3.00 | 3.00 |  |"]
    for name, row in result["rows"].items():
        assert row["failed"] == {} and (row["over flex fwd"] is None) == (options.ROWS[name].flex is None)

    # One that is another function has no figure beside FlexAttention, one that fails has none; the others stay.
    monkeypatch.setitem(options.ROWS, "softcap", options.ROWS["softcap"]._replace(flex=options.flex_causal))
    monkeypatch.setitem(options.ROWS, "bias S", options.Row(lambda size: {"softcap": 0}, size=options.Size(16, 512)))
    assert options.main([*words, "--only", "bias S,softcap"]) == 1
    rows = json.loads(output.read_text())["rows"]
    assert list(rows) == list(options.ROWS) and rows["alibi"] == result["rows"]["alibi"]
    assert "out is " in rows["softcap"]["failed"]["flex"] and rows["softcap"]["over flex fwd"] is None
    assert rows["softcap"]["speed bwd"] == 0.5
    assert rows["bias S"]["speed fwd"] is None and "softcap" in rows["bias S"]["failed"]["cupyflash"]
    assert "| bias S | – | – | – | – | cupyflash: ValueError: softcap is 0" in capsys.readouterr().err

    monkeypatch.setattr(options.output, "gpu_of", lambda _: "another GPU")
    for text in ("", "[]", "{}", "null", '{"rows": [], "commands": []}', '{"rows": {"alibi": {}}, "commands": []}'):
        whole = output.read_text()
        output.write_text(text)
        assert code_of(options.main, [*words, "--only", "alibi"]) == 2 and output.read_text() == text
        assert f"{output}: no result of options.py can be read there: " in capsys.readouterr().err
        output.write_text(whole)
    assert code_of(options.main, [*words, "--only", "alibi"]) == 2
    assert "has gpu some GPU, this run another GPU; allowed: the same" in capsys.readouterr().err


def test_a_constant_bias_has_no_gradient(options, monkeypatch):
    """In neither library, and in both the same bias as where it has one."""
    for shape in ("HxSxS", "SxS", "S"):
        row, constant = (options.ROWS[f"{kind} {shape}"] for kind in ("bias", "constant bias"))
        *same, dbias = options.ours(row.options(row.size), row.size)[1]
        got = options.ours(constant.options(row.size), row.size)[1]
        assert len(got) == 4 and all((x == y).all() for x, y in zip(got, same, strict=True))
        assert dbias.shape == row.options(row.size)["bias"].shape

    differentiated = []

    def pair(function, *arrays):
        differentiated.append(len(arrays) - 1)
        return options.Pair(lambda: function(*arrays[:-1]), list, options.synchronize)

    monkeypatch.setattr(options, "torch_pair", pair)
    options.flex.cache_clear()
    rows = [options.ROWS[name] for name in ("softcap", "bias SxS", "constant bias SxS")]
    outs = [options.flex(row.flex, row.size)[1][0] for row in rows]
    assert differentiated == [3, 4, 3] and (outs[1] == outs[2]).all() and (outs[0] != outs[1]).any()
    options.flex.cache_clear()


def test_options_that_are_none(options, capsys):
    assert code_of(options.main, ["--only", "softcap,nothing"]) == 2
    assert "there is no row 'nothing'; allowed: none, softcap, " in capsys.readouterr().err


def test_blocks_of_both_libraries(options):
    size = options.Size(16, 1024)
    made = options.flex_sparse(size)["block_mask"]
    expected = options.flex_module.create_block_mask(made.mask_mod, 1, size.heads, 1024, 1024, device="cpu")
    for name in ("full_kv_num_blocks", "full_kv_indices", "full_q_num_blocks", "full_q_indices", "kv_num_blocks"):
        assert (getattr(made, name) == getattr(expected, name)).all(), name
    assert (made.to_dense() == options.sparse_blocks(size)["block_mask"].blocks).all()
    for multiple in (1, options.BLOCK):
        document = options.documents(size, multiple)
        expected = cupyflash.BlockMask.from_mask(document[:, None] == document)
        assert (options.touched(document).numpy() == expected.blocks).all()
        assert len(document) == 1024 and 128 <= document.bincount()[:-1].min() <= document.bincount().max() <= 256
    assert expected.mask is None


# --- pictures.py


def result_of_traffic():
    import traffic

    cells = []
    for batch, seqlen in ((64, 1024), (64, 512), (32, 1024), (16, 2048)):
        least = traffic.formulas(batch, seqlen)
        measured = {name: {"read": 0.6 * n, "write": 0.6 * n, "kernels": 2} for name, n in least.items()}
        cells.append({"batch": batch, "seqlen": seqlen, "formula": least, "measured": measured})
    return {"gpu": "some GPU", "date": "2026-01-01", "dtype": "float16", "heads": 16, "head_dim": 64, "cells": cells}


def result_of_training():
    names = ["standard", "torch", "cupyflash"]

    def cell(batch, fits):
        return {
            "batch": batch,
            "tokens_per_second": {name: 100_000 for name in fits},
            "peak_bytes": {name: {"torch": 20_000_000_000, "cupy": 50_000_000} for name in fits},
            "failed": {name: "out of memory" for name in names if name not in fits},
        }

    cells = {"S1024": cell(16, names), "S4096": cell(4, names[1:])}
    model = {"layers": 12, "heads": 12, "width": 768, "dtype": "bfloat16"}
    return {"gpu": "some GPU", "date": "2026-01-01", "attention": names, **model, "cells": cells}


def result_of_retrieval():
    steps = [
        {"step": n, "items": 16 * 4 ** (n // 10), "loss": 4.2 / n, "accuracy": 1 - 1 / n, "seconds": n}
        for n in range(1, 70)
    ]
    standard = {"out_of_memory": "CUDA out of memory. Tried to allocate 64 GiB."}
    return {"device": "some GPU", "items": 65536, "steps": steps, "accuracy": 0.999, "standard": standard}


@pytest.fixture
def results(tmp_path):
    made = {"table": result_of_table(), "traffic": result_of_traffic(), "training": result_of_training()}
    made |= {"retrieval": result_of_retrieval()}
    made |= {"side_by_side": json.loads((FOLDER / "side_by_side.json").read_text())}
    made["table"]["gpu"] = made["side_by_side"]["gpu"]
    for name, result in made.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
    return tmp_path


def test_every_picture(results, capsys):
    image = pytest.importorskip("matplotlib.image")
    import pictures

    first, second = (["--results", str(results), "--output-dir", str(results / name)] for name in ("first", "second"))
    assert pictures.main(first) == 0
    drawn = sorted((results / "first").iterdir())
    assert [path.stem for path in drawn] == sorted(pictures.PICTURES) and capsys.readouterr().err == ""
    for path in drawn:
        assert path.stat().st_size < 60_000
        height, width, _ = image.imread(path).shape
        assert width == 1152 and 400 < height < 1000
    assert pictures.main([*second, "--only", "traffic"]) == 0  # the same result, the same file
    assert (results / "second/traffic.png").read_bytes() == (results / "first/traffic.png").read_bytes()


def test_pictures_that_are_left_out(results, capsys):
    pytest.importorskip("matplotlib")
    import pictures

    for name in ("table", "training"):
        (results / f"{name}.json").unlink()
    arguments = ["--results", str(results), "--output-dir", str(results / "out"), "--format", "svg", "--only"]
    assert pictures.main([*arguments, "training", "roofline"]) == 0  # whose standard attention is by formula then
    assert [path.name for path in (results / "out").iterdir()] == ["roofline.svg"]
    assert capsys.readouterr().err == f"training is left out: {results / 'training.json'} is missing\n"
    assert pictures.main([*arguments, "training"]) == 1


@pytest.mark.parametrize("name, file", [("training", "training"), ("roofline", "table")])
@pytest.mark.parametrize("text", [b"{", b"[1]", b"\xff", b'{"gpu": "NVIDIA H200"}'])
def test_pictures_of_no_result(results, capsys, name, file, text):
    pytest.importorskip("matplotlib")
    import pictures

    path, folder = results / f"{file}.json", results / "out"
    path.write_bytes(text)
    assert pictures.main(["--results", str(results), "--output-dir", str(folder), "--only", name]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"pictures.py: {name} cannot be drawn from ") and f"{path}: " in printed
    assert not list(folder.iterdir())


def test_points_under_the_roofline():
    pytest.importorskip("matplotlib")
    import pictures

    result = {
        "gpu": "NVIDIA H200",
        "dtype": "bfloat16",
        "ceilings": {"bf16 matmul TFLOP/s": 800, "copy TB/s": 4},
        "cells": {f"d64 full S{n}": {"tflops": {"cupyflash.fwd": n / 10, "fa2.fwd": 1}} for n in (512, 1024)},
    }
    device = pictures.DEVICES["H200"]
    ((title, points, _),) = pictures.ours_by_intensity(result, device, "fwd")
    assert title == "cupyflash, head_dim 64" and [rate for _, rate in points] == [51.2, 102.4]
    # 4 n^2 d operations, and four arrays of n d elements of two bytes and n numbers of four.
    assert [n for n, _ in points] == pytest.approx([4 * n * n * 64 / (8 * n * 64 + 4 * n) for n in (512, 1024)])
    lengths = {"cells": {"bert-large full S1024": {"batch": 16, "milliseconds": {"standard-torch.fwd": 2.0}}}}
    measured, *most = pictures.standard_by_intensity(lengths, device, "fwd")
    assert measured[1][0][1] == pytest.approx(4 * 16 * 16 * 1024**2 * 64 / 2e-3 / 1e12)
    assert [points[0][1] for _, points, _ in most] == pytest.approx(
        [points[0][0] * device.memory / 1e12 for _, points, _ in most]
    )


# --- precise.py


def test_standard_attention_is_right(monkeypatch):
    """With NumPy in the place of CuPy; and cupyflash as the script calls it."""
    pytest.importorskip("cupy")
    script = importlib.import_module("precise")
    monkeypatch.setattr(script, "cupy", np)
    kernels = {
        "exponentials": lambda top, scale, p: p.__setitem__(..., np.exp(scale * p - top)),
        "gradient": lambda p, delta, scale, x: x.__setitem__(..., scale * p * (x - delta)),
    }
    for name, kernel in kernels.items():
        monkeypatch.setattr(script.Standard, name, staticmethod(kernel))
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((1, 20, 3, 8)) for _ in range(4)]
    found = {}
    for name in ("cupyflash", "standard"):
        results = []
        for call in script.CALLS["float64"][name](arrays, results):
            call()
        found[name] = {"errors": script.errors(arrays, results)}
        assert max(found[name]["errors"]) < 1e-14
        found[name] |= {
            pass_: {"seconds": 1.0 + (name == "standard"), "tflops": 3.0} for pass_ in ("forward", "backward")
        }
    size = {"dtype": "float64", "head_dim": 64, "seqlen": 1024, "found": found, "failed": {}}
    lines = list(script.lines(size))
    assert [line.split()[:7] for line in lines] == [
        ["float64", "64", "1024", "cupyflash", "3.0", "3.0", "1.00"],
        ["float64", "64", "1024", "standard", "3.0", "3.0", "2.00"],
    ]


def test_precise_that_fails(monkeypatch, capsys, tmp_path):
    """What failed is named, has no figures, and takes none from the others; the exit code is of cupyflash alone."""
    pytest.importorskip("cupy")
    import precise

    def fails(arrays, results, **options):
        raise ValueError("no")

    def works(arrays, results, **options):
        return (lambda: None), (lambda: None)

    runtime = SimpleNamespace(getDevice=lambda: 0, getDeviceProperties=lambda _: {"name": b"some GPU"})
    cuda = SimpleNamespace(is_available=lambda: True, runtime=runtime)
    monkeypatch.setattr(precise, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(precise, "errors", lambda *_: (1e-7, 2e-7))
    monkeypatch.setattr(precise.timing, "normal", lambda *_: None)
    monkeypatch.setattr(precise.timing, "median_seconds", lambda calls, _: dict.fromkeys(calls, 1e-3))
    output = tmp_path / "x.json"
    words = ["--dtypes", "float64", "--head-dims", "96", "--seqlens", "1024", "2048", "--output", str(output)]
    for ours, theirs, code in ((works, fails, 0), (fails, works, 1)):
        monkeypatch.setitem(precise.CALLS, "float64", {"cupyflash": ours, "standard": theirs})
        assert precise.main(words) == code
        printed = capsys.readouterr()
        assert printed.err.count("ValueError: no") == 2 and "[2/2, " in printed.err
        head, *rows = printed.out.splitlines()
        failed = "standard" if ours is works else "cupyflash"
        assert len(rows) == 4 and rows[1] == f"float64    96   1024 {failed:16} failed: ValueError: no"
        assert precise.main([*words, "--json"]) == code
        result = json.loads(capsys.readouterr().out)
        assert result == json.loads(output.read_text()) and result["gpu"] == "some GPU" and "commit" in result
    figure = result["sizes"][0]["found"]["standard"]["forward"]["tflops"]
    assert figure == pytest.approx(4 * 16384 * 1024 * 21 * 96 / 1e-3 / 1e12)  # 21 heads of 96 are fewer than 2048


# --- varlen.py


@pytest.fixture
def varlen(side_by_side, monkeypatch):
    """On this host, with NumPy in the place of CuPy, and in that of FlashAttention-4 what PyTorch has for each one."""
    import ml_dtypes
    import varlen

    torch = varlen.torch

    def flash_attn_varlen_func(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal):
        assert cu_seqlens_q is cu_seqlens_k and max_seqlen_q == max_seqlen_k == cu_seqlens_q.diff().max()
        parts = []
        for rows in map(slice, cu_seqlens_q[:-1], cu_seqlens_q[1:]):
            heads_first = (x[rows].transpose(0, 1) for x in (q, k, v))
            out = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=causal)
            parts.append(out.transpose(0, 1))
        return torch.cat(parts), None

    for name in ("randn", "tensor"):
        make = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *args, device, make=make, **options: make(*args, **options))
    monkeypatch.setattr(varlen.output, "gpu_of", lambda _: "none")
    monkeypatch.setattr(varlen, "to_cupy", lambda x: x.view(torch.int16).numpy().view(ml_dtypes.bfloat16))
    monkeypatch.setattr(varlen, "to_torch", lambda x, dtype: torch.from_numpy(x.view(np.int16)).view(dtype))
    monkeypatch.setattr(varlen, "WIDTH", 32)
    modules = {"cupy": SimpleNamespace(from_dlpack=np.from_dlpack), "flash_attn": SimpleNamespace()}
    modules["flash_attn.cute"] = SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)
    for name in ("flash_attn_interface", "flash_attn3_jax"):
        modules[name] = None
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return varlen


TINY_MIX = ["--head-dims", "16", "--tokens", "300", "--mean", "60", "--longest", "100"]
TINY_MIX += ["--rounds", "1", "--seconds", "1e-9", "--peers", "fa3", "fa4"]


def test_packed_sequences_of_any_length(varlen, tmp_path, capsys):
    output = tmp_path / "x.json"
    assert varlen.main([*TINY_MIX, "--output", str(output)]) == 0
    result, lines = json.loads(output.read_text()), capsys.readouterr().out.splitlines()
    assert list(result["missing"]) == ["fa3"] and lines[-1].startswith("not installed: {'fa3'")
    assert list(result["cells"]) == ["d16 full", "d16 causal"] and len(lines) == 2 + 2 * 3
    for cell in result["cells"].values():
        assert not cell["failed"] and cell["dense_seqlen"] == 64 and 0 < cell["shortest"] < cell["longest"] <= 100
        assert set(cell["tflops"]) == {f"{x}.{which}" for x in ("cupyflash", "dense", "fa4") for which in varlen.PASSES}
    assert [line.split()[:3] for line in lines[1:4]] == [["d16", "full", x] for x in ("cupyflash", "dense,", "fa4")]


def test_packed_sequences_that_disagree(varlen, tmp_path, capsys, monkeypatch):
    peer = varlen.fa4
    monkeypatch.setitem(varlen.PEERS, "fa4", lambda lengths, q, *rest: peer(lengths, -q, *rest))
    output = tmp_path / "x.json"
    assert varlen.main([*TINY_MIX, "--output", str(output)]) == 1
    cells = json.loads(output.read_text())["cells"]
    assert all("wrong out: relative error" in cell["failed"]["fa4"] for cell in cells.values())
    assert "fa4 " in capsys.readouterr().out and not any("fa4.fwd" in cell["tflops"] for cell in cells.values())


def test_lengths_of_packed_sequences(varlen):
    lengths = varlen.draw(65536, 1024, 8192)
    assert sum(lengths) == 65536 and 0 < min(lengths) < 500 and 2000 < max(lengths) <= 8192
    assert 700 < np.mean(lengths) < 1400
