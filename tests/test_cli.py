"""The command line: the main job and its checks, the parts that it is made of, and `compile`'s options."""

import json
import math
import subprocess
import sys
import types
from functools import partialmethod

import numpy as np
import pytest

import cupyflash
from cupyflash.__main__ import main
from cupyflash.demo import encoder, inputs, job, machine, tokenizer
from cupyflash.roofline_report import as_json

needs_model = pytest.mark.skipif(inputs.find_model() is None, reason=f"needs the package {inputs.PACKAGE}")


@pytest.fixture
def short(monkeypatch):
    """The job on a text of two windows, with every time measured once."""
    monkeypatch.setattr(machine.Cpu, "tokens", 800)
    monkeypatch.setattr(machine.Cpu, "seconds", partialmethod(machine.Cpu.seconds, budget=0))


@pytest.fixture
def without_model(short, monkeypatch):
    monkeypatch.setattr(job, "find_model", lambda: None)


def run_json(capsys, *arguments):
    code = main(["--backend", "numpy", "--json", *arguments])
    return code, json.loads(capsys.readouterr().out)


# --- The main job


def test_table_without_the_model(without_model, capsys):
    assert main(["--backend", "numpy"]) == 0
    printed = capsys.readouterr()
    assert 'pip install "cupyflash[demo]"' in printed.err
    lines = printed.out.splitlines()
    assert "random weights" in printed.out and lines[-1].startswith("passed")
    assert max(map(len, lines)) <= 110 and printed.out.isascii()


def test_json(without_model, capsys):
    code, report = run_json(capsys)
    assert code == 0 and report["passed"] is True and all(report["checks"].values())
    assert (report["backend"], report["dtype"], report["pretrained"]) == ("numpy", "float32", False)
    assert report["version"] == cupyflash.__version__
    assert [errors["calls"] for errors in report["errors"]] == [24, 2, 1]
    for errors in report["errors"]:
        assert 0 < errors["cupyflash"] <= errors["allowed"] and errors["standard"] > 0
    assert report["similarity"]["together"]["lowest"] > report["similarity"]["apart"]["highest"]
    call = report["long_call"]
    assert call["tokens"] == 800
    assert 12 * 800 * 800 * 4 < call["standard"]["peak_bytes"]
    assert 0 < call["cupyflash"]["peak_bytes"] < call["standard"]["peak_bytes"] / 2
    assert call["cupyflash"]["seconds"] > 0 and call["standard"]["seconds"] > 0
    shares = {name: use["share"] for name, use in call["resources"].items() if name != "waits_for"}
    assert set(shares) == {"matmul", "copy", "exp"}
    assert call["resources"]["waits_for"] == max(shares, key=shares.get)


@needs_model
def test_pretrained(short, capsys):
    code, report = run_json(capsys)
    assert code == 0 and report["pretrained"] is True
    assert report["layers"] == 6 and report["heads"] == 12 and report["head_dim"] == 32
    assert report["similarity"]["together"]["lowest"] > 0.5 > 0.2 > report["similarity"]["apart"]["highest"]
    assert report["answer"]["part"] == "assert"


def off_by_a_little(q, out):
    return out * np.float32(1.0001)


def nan_in_one_place(q, out):
    out[0, 0, 0, 0] = np.nan
    return out


def one_wrong_row_of_a_long_call(q, out):
    if q.shape[1] > inputs.WINDOW:
        out[0, 700, 3] += 1e-3
    return out


def shuffled_sentences(q, out):
    return np.ones_like(out) if q.shape[1] < inputs.WINDOW else out


@pytest.mark.parametrize(
    "spoil, failing",
    [
        (off_by_a_little, {0, 2}),
        (nan_in_one_place, {0, 1, 2}),
        (one_wrong_row_of_a_long_call, {2}),
        (shuffled_sentences, {0}),
    ],
)
def test_wrong_attention_fails(without_model, monkeypatch, capsys, spoil, failing):
    monkeypatch.setattr(job, "attention", lambda q, k, v: spoil(q, cupyflash.attention(q, k, v)))
    code, report = run_json(capsys)
    assert code == 1 and report["passed"] is False
    assert {i for i, holds in enumerate(report["checks"].values()) if not holds} == failing


def test_failure_in_the_table(without_model, monkeypatch, capsys):
    monkeypatch.setattr(job, "attention", lambda q, k, v: np.full_like(q, np.nan))
    assert main(["--backend", "numpy"]) == 1
    out = capsys.readouterr().out
    assert "BAD  the long call is right" in out and "FAILED" in out


def test_standard_attention_out_of_memory(without_model, monkeypatch, capsys):
    def exhausted(q, k, v, standard=job.standard_attention):
        if q.shape[1] == 800:
            raise MemoryError
        return standard(q, k, v)

    monkeypatch.setattr(job, "standard_attention", exhausted)
    monkeypatch.setattr(job, "REFERENCE_SCORES", 1 << 20)  # the errors are found in blocks of fewer queries
    assert main(["--backend", "numpy"]) == 0
    assert capsys.readouterr().out.count("no memory") == 2


def test_pairs_must_be_closer_than_all_others():
    a, b, c = np.eye(3)
    assert job.compare_pairs([[a, a], [b, b]])["holds"]
    assert not job.compare_pairs([[a, b], [b, a]])["holds"]
    assert not job.compare_pairs([[a, a], [b, c]])["holds"]
    assert not job.compare_pairs([[a, a], [b, b * np.nan]])["holds"]


def test_cuda_without_gpu(without_model, monkeypatch, capsys):
    monkeypatch.setattr(machine, "missing_for_gpu", lambda: "CuPy finds no GPU (none)")
    assert main(["--backend", "cuda"]) == 2
    printed = capsys.readouterr()
    assert "CuPy finds no GPU (none)" in printed.err and not printed.out
    assert main(["--json"]) == 0  # without a wish it goes on, and says why
    report = json.loads(capsys.readouterr().out)
    assert report["backend"] == "numpy" and report["gpu_not_used_because"] == "CuPy finds no GPU (none)"


def test_cupy_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert 'pip install "cupyflash[cuda13' in machine.missing_for_gpu()


@pytest.mark.gpu
def test_cuda(monkeypatch, capsys):
    monkeypatch.setattr(machine.Gpu, "tokens", 2000)
    assert main(["--backend", "cuda", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["backend"] == "cuda" and report["dtype"] == "float16"
    assert all(0 < use["share"] < 1 for use in list(report["long_call"]["resources"].values())[1:])


def test_module_runs_without_a_terminal():
    command = [sys.executable, "-m", "cupyflash", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60)
    assert done.returncode == 0 and not done.stderr
    assert "--backend" in done.stdout and "--json" in done.stdout and "compile" in done.stdout


@pytest.mark.parametrize("arguments", [["--backend", "tpu"], ["--nonsense"], ["compute"]])
def test_wrong_arguments(arguments, capsys):
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 2 and arguments[-1] in capsys.readouterr().err


def test_json_has_no_nan():
    value = {"a": [1.5, math.nan], "b": {"c": math.inf, "d": "x"}, "e": (-math.inf, 2)}
    expected = {"a": [1.5, None], "b": {"c": None, "d": "x"}, "e": [None, 2]}
    assert json.loads(as_json(value)) == expected


# --- compile


@pytest.fixture
def compiled(monkeypatch):
    """What `compile_command` is called with; it returns 7."""
    calls = []
    fake = types.SimpleNamespace(compile_command=lambda archs, json: calls.append((archs, json)) or 7)
    monkeypatch.setattr(cupyflash, "compiler", fake, raising=False)
    return calls


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["compile"], ([], False)),
        (["compile", "--json"], ([], True)),
        (["--json", "compile"], ([], True)),
        (["compile", "--arch", "sm_80, sm_90a"], (["sm_80", "sm_90a"], False)),
    ],
)
def test_compile_options(compiled, arguments, expected):
    assert main(arguments) == 7
    assert compiled == [expected]


@pytest.mark.parametrize("arguments", [["compile", "--arch", "90"], ["--backend", "numpy", "compile"]])
def test_compile_refuses(compiled, arguments, capsys):
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 2 and not compiled


# --- Its parts


WORDS = "[PAD] [UNK] [CLS] [SEP] un ##aff ##able play ##ing ##s , . ! $ + cafe 你 好 i a".split()


@pytest.mark.parametrize(
    "text, pieces",
    [
        ("", []),
        (" \t\n", []),
        ("unaffable", ["un", "##aff", "##able"]),
        ("Playing, PLAYS!", ["play", "##ing", ",", "play", "##s", "!"]),
        ("playful", ["[UNK]"]),  # one unknown part makes the word unknown
        ("Café café", ["cafe", "cafe"]),  # composed and decomposed accents
        ("你好", ["你", "好"]),
        ("a$+a", ["a", "$", "+", "a"]),
        ("\u0130", ["i"]),  # lower-case after the dot is gone
        ("pl\u200bay\x00 \ufffd.", ["play", "."]),
        ("a\u00a0a\u2028a", ["a", "a", "a"]),
        ("a" * 101, ["[UNK]"]),
    ],
)
def test_tokenizer(text, pieces):
    word_piece = tokenizer.WordPiece(WORDS)
    assert [WORDS[i] for i in word_piece(text)] == pieces


def test_read_safetensors(tmp_path):
    header = {
        "__metadata__": {"format": "pt"},
        "b": {"dtype": "I64", "shape": [2], "data_offsets": [24, 40]},
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "scalar": {"dtype": "F16", "shape": [], "data_offsets": [40, 42]},
    }
    a, b = np.arange(6, dtype="<f4").reshape(2, 3), np.array([-1, 1 << 40], "<i8")
    text = json.dumps(header).encode()
    data = a.tobytes() + b.tobytes() + np.float16(0.5).tobytes()
    (tmp_path / "x").write_bytes(len(text).to_bytes(8, "little") + text + data)
    arrays = encoder.read_safetensors(tmp_path / "x")
    assert set(arrays) == {"a", "b", "scalar"} and arrays["scalar"] == 0.5
    for got, expected in ((arrays["a"], a), (arrays["b"], b)):
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)


def test_gelu():
    x = np.concatenate([np.linspace(-9, 9, 1001), [0, 1e-30, -1e-30, 1e4, -1e4]]).astype(np.float32)
    expected = [t * (1 + math.erf(t / math.sqrt(2))) / 2 for t in x.tolist()]
    assert encoder.gelu(x).dtype == np.float32
    np.testing.assert_allclose(encoder.gelu(x), expected, rtol=3e-7, atol=1e-6)


def test_windows_overlap_by_half():
    ids, firsts = inputs.random_inputs(1600).windows()
    text = inputs.random_inputs(1600).text
    assert ids.shape == (5, 512) and firsts.tolist() == [0, 255, 510, 765, 1020]
    assert set(ids[:, 0]) == {0} and set(ids[:, -1]) == {1}
    np.testing.assert_array_equal(ids[2, 1:-1], text[510:1020])


def test_peak_bytes():
    def function():
        x = np.zeros(1 << 20)
        del x
        return np.zeros(1 << 10)

    assert 8 << 20 <= machine.Cpu().peak_bytes(function) < 9 << 20


@needs_model
def test_embedding_is_that_of_the_model():
    """Against values of the reference implementation in PyTorch."""
    material = inputs.pretrained_inputs(inputs.find_model(), inputs.WINDOW)
    first, second = material.pairs[0]
    assert first == [101, 1037, 2158, 2003, 2652, 1037, 2858, 2006, 1996, 2395, 1012, 102]
    model = encoder.Encoder(material.weights, material.heads, material.epsilon)
    a, b = (model(np.array([ids]), cupyflash.attention)[0] for ids in (first, second))
    np.testing.assert_allclose(a[:4], [0.07721827, -0.03773748, 0.0399664, -0.03565875], atol=1e-6)
    assert abs(a @ b - 0.714316) < 1e-5
