"""What attention costs by formula, on which device, and the command that prints it."""

import json
import re
import sys
import time
from dataclasses import replace
from itertools import product

import ml_dtypes
import numpy as np
import pytest
import tools

import cupyflash
from cupyflash import choose, counts
from cupyflash.__main__ import main
from cupyflash.problem import Problem
from cupyflash.roofline import DEVICES, MMA_SYNC_ON_HOPPER, Device


def problem(seqlen_q=256, seqlen_k=None, heads_q=2, heads_k=None, head_dim=64, head_dim_v=None, batch=3, **band):
    return Problem(
        "bfloat16",
        batch,
        seqlen_q,
        seqlen_k or seqlen_q,
        heads_q,
        heads_k or heads_q,
        head_dim,
        head_dim_v or head_dim,
        head_dim**-0.5,
        **band,
    )


def stand_in(*shape, dtype=ml_dtypes.bfloat16):
    """An array of a shape, without memory."""
    return np.broadcast_to(np.zeros((), dtype), shape)


def visible(one):
    """Which scores of ``one`` exist, as a matrix."""
    distance = np.arange(one.seqlen_k) - np.arange(one.seqlen_q)[:, None] - one.diagonal
    left = np.inf if one.left is None else one.left
    right = np.inf if one.right is None else one.right
    return (-left <= distance) & (distance <= right)


# --- Counts

BANDS = [
    {},
    {"right": 0},
    {"left": 5},
    {"left": 0, "right": 0},
    {"left": 30, "right": 7, "diagonal": 3},
    {"right": 0, "diagonal": -40},
    {"left": 2, "right": 2, "diagonal": 60},
]


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("lengths", [(64, 64), (1, 97), (97, 1), (50, 83)])
def test_scores_and_tiles_are_those_of_the_mask(band, lengths):
    one = problem(*lengths, **band)
    seen = visible(one)
    assert counts.scores(one) == seen.sum()
    for block_q, block_k in ((16, 16), (32, 8), (7, 48)):
        padded = np.zeros([-(-n // block) * block for n, block in zip(lengths, (block_q, block_k))], bool)
        padded[: lengths[0], : lengths[1]] = seen
        blocks = padded.reshape(padded.shape[0] // block_q, block_q, padded.shape[1] // block_k, block_k)
        assert counts.tiles(one, block_q, block_k) == blocks.any((1, 3)).sum()


def test_tiles_are_those_of_every_block():
    rng = np.random.default_rng(0)
    for _ in range(3000):
        side, block = rng.integers(0, 60, 2).tolist(), rng.integers(1, 18, 2).tolist()
        left, right = (None if one < 10 else one - 10 for one in side)
        lengths = rng.integers(0, 40, 2).tolist()
        one = replace(problem(left=left, right=right, diagonal=int(rng.integers(-50, 50))), seqlen_q=lengths[0])
        one = replace(one, seqlen_k=lengths[1])
        expected = 0
        for first in range(0, one.seqlen_q, block[0]):
            low, high = one.key_range(first, min(first + block[0], one.seqlen_q))
            expected += -(-high // block[1]) - low // block[1] if low < high else 0
        assert counts.tiles(one, *block) == expected, (one, block)


def test_counting_takes_no_longer_for_long_sequences():
    n = 2**29 - 1
    start = time.perf_counter()
    assert counts.scores(problem(n, right=0)) == n * (n + 1) // 2
    assert counts.scores(problem(n, left=2, right=1)) == 4 * n - 4
    assert cupyflash.roofline(problem(n, right=0, left=n // 3), device="H200")
    assert time.perf_counter() - start < 1


def test_amounts_of_standard_attention():
    one = problem(seqlen_q=512, seqlen_k=384, heads_q=4, heads_k=2, head_dim=64, head_dim_v=96, batch=3)
    area, q, k, v, out = 3 * 4 * 512 * 384, 3 * 512 * 4 * 64, 3 * 384 * 2 * 64, 3 * 384 * 2 * 96, 3 * 512 * 4 * 96
    forward, backward = counts.standard(one), counts.standard(one, backward=True)
    assert forward.flops == 2 * area * (64 + 96) and forward.exps == area
    assert backward.flops == 2 * area * 2 * (64 + 96) and backward.exps == 0
    lse = 4 * 3 * 4 * 512
    assert forward.memory_bytes == 8 * area + 2 * (q + k + v + out) + lse
    assert backward.memory_bytes == 14 * area + 2 * (2 * (q + k + v) + 2 * out) + lse


def test_operands_of_the_portable_forward():
    one = problem(seqlen_q=128, head_dim=64, heads_q=1, batch=1)
    spec = choose.forward(one, 16, False, choose.SHARED_LIMIT[90]).spec
    assert (spec.block_q, spec.block_k, spec.warps, spec.q_in_registers) == (128, 64, 4, True)
    amounts = counts.portable_forward(one, spec)
    # Two tiles of 64 keys: K and V of 64 columns, written once and read by four warps.
    assert amounts.shared_bytes == 2 * 5 * 2 * 64 * 128
    assert amounts.tile_bytes == 2 * 2 * 64 * 128
    assert amounts.flops == 4 * 128 * 128 * 64


def test_operands_of_a_forward_whose_warps_own_columns():
    one = problem(seqlen_q=64, head_dim=256, heads_q=1, batch=1)
    spec = choose.forward(one, 16, False, choose.SHARED_LIMIT[90]).spec
    assert (spec.block_q, spec.block_k, spec.warps, spec.out_warps_q) == (64, 64, 4, 1)
    q = k = v = 2 * 64 * 256
    p = 2 * 64 * 64
    # K and V are written; K is read by four warps, V once; Q once; P is written once and read by every warp.
    assert counts.portable_forward(one, spec).shared_bytes == (k + v) + 4 * k + v + q + 5 * p


def test_operands_of_the_hopper_forward():
    one = problem(seqlen_q=2048, head_dim=128, heads_q=1, batch=1)
    spec = choose.hopper_forward(one, 16, False).spec
    assert (spec.block_q, spec.block_k, spec.groups, spec.cluster) == (128, 128, 2, 1)
    amounts = counts.hopper_forward(one, spec)
    loads, steps, keys = 16 * 16, 32 * 16, 2 * 128 * 256
    assert amounts.tile_bytes == loads * keys
    assert amounts.shared_bytes == loads * keys + steps * (keys + 2 * 64 * 128)
    assert amounts.flops == 4 * 2048**2 * 128 and amounts.exps == 2048**2


def test_operands_of_the_hopper_backward():
    one = problem(seqlen_q=1024, head_dim=64, heads_q=1, batch=1)
    spec = choose.hopper_backward(one, 16, False).spec
    assert (spec.block_q, spec.block_k, spec.groups) == (128, 128, 2)
    amounts, steps = counts.hopper_backward(one, spec), 8 * 8
    assert amounts.flops == counts.useful(one, True).flops and amounts.exps == 1024**2
    scores, sums, dq = 2 * (64 + 128) * 64, 2 * 128 * 64, 2 * 128 * 64  # elements that one warpgroup reads
    ds, tiles = 128 * 128, 2 * 128 * 64  # that are written for both
    assert amounts.shared_bytes == steps * 2 * (2 * (scores + sums + dq) + ds + tiles)
    assert amounts.tile_bytes == steps * (2 * tiles + 128 * 8 + 128 * 64 * 4)


def test_operands_of_the_split_backward():
    """Seven products for five."""
    one = problem(seqlen_q=1024, head_dim=256, heads_q=1, batch=1)
    keys, queries = (variant.spec for variant in choose.hopper_split_backward(one, 16))
    assert (keys.kept, queries.block_q) == (2, 128)
    amounts = counts.hopper_split_backward(one, keys, queries)
    assert amounts.flops == 7 * 2 * 256 * 1024**2 and amounts.exps == 2 * 1024**2
    tile, panel = 2 * 64 * 256, 2 * 64 * 64
    of_keys = 2 * (tile // 2) + 4 * tile + 4 * 64 * 64 + 2 * tile  # k and v, q and dout twice, p, the copies
    of_queries = 2 * (2 * tile + 3 * tile) + 2 * tile  # two warpgroups: q and dout, k, v and k again
    assert amounts.shared_bytes == 16 * 16 * of_keys + 8 * 16 * of_queries and tile == 4 * panel


def test_packed_heads_are_fewer_tiles():
    one = problem(seqlen_q=1, seqlen_k=4096, heads_q=32, heads_k=4, head_dim=128, batch=1)
    spec = choose.hopper_forward(one, 16, False).spec
    assert spec.packed
    assert counts.hopper_forward(one, spec).exps == 4 * 64 * 4096  # a tile for each key head, not for each head


def test_tiles_of_a_mask_are_between_its_scores_and_all():
    for right, head_dim in product((0, None), (64, 128, 256)):
        one = problem(seqlen_q=1000, head_dim=head_dim, right=right)
        least = counts.useful(one).flops
        for make, count in (
            (choose.forward(one, 16, False, choose.SHARED_LIMIT[90]), counts.portable_forward),
            (choose.hopper_forward(one, 16, False), counts.hopper_forward),
        ):
            assert least <= count(one, make.spec).flops <= 1.4 * least
        spec = choose.backward(one, 16, False, choose.SHARED_LIMIT[90]).spec
        assert counts.useful(one, True).flops <= counts.portable_backward(one, spec).flops
        assert counts.portable_backward(one, spec).flops <= 1.4 * counts.useful(one, True).flops
        if choose.split(one):
            specs = [variant.spec for variant in choose.hopper_split_backward(one, 16)]
            assert 1.4 <= counts.hopper_split_backward(one, *specs).flops / counts.useful(one, True).flops <= 1.7
        else:
            spec = choose.hopper_backward(one, 16, False).spec
            assert 1 <= counts.hopper_backward(one, spec).flops / counts.useful(one, True).flops <= 1.4


def test_io_complexity():
    one = problem(seqlen_q=4096, head_dim=64, heads_q=16, batch=64)
    found = counts.io_complexity(one, 100_000)
    assert found["standard"] == 64 * 16 * (4096**2 + 4096 * 64)
    assert found["flash"] == 64 * 16 * 4096**2 * 64**2 // 100_000
    assert counts.io_complexity(one, 200_000)["flash"] < found["flash"]
    for elements, holds in ((63, False), (64, True), (4096 * 64, True), (4096 * 64 + 1, False)):  # of the theorem
        found = counts.io_complexity(one, elements)
        assert (found["flash"] is not None) == holds and found["standard"]


# --- The prediction


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("head_dim", [1, 40, 64, 96, 128, 192, 256])
def test_every_device_and_row_of_the_tables(name, head_dim):
    found = cupyflash.roofline(problem(seqlen_q=300, head_dim=head_dim, right=0), device=name)
    paths = {(one.path, one.direction): one for one in found.estimates}
    assert len(paths) == len(found.estimates)
    for direction in ("forward", "backward"):
        assert (("sm90", direction) in paths) == (DEVICES[name].capability == 90 and head_dim % 8 == 0)
    for one in found.estimates:
        assert one.predicted == one.seconds[one.binds] > 0 and one.measured is None and one.achieved is None
        assert one.useful_flops / one.predicted <= DEVICES[name].matmul


def test_paths_are_held_against_what_they_can_reach():
    found = {one.name: one for one in cupyflash.roofline(problem(4096, head_dim=128), device="H100").estimates}
    portable, hopper = found["sm80 forward"].seconds["matmul"], found["sm90 forward"].seconds["matmul"]
    assert hopper == pytest.approx(portable * MMA_SYNC_ON_HOPPER)
    assert found["standard forward"].binds == "memory" and found["sm90 forward"].binds == "matmul"


def test_tilings_are_those_of_the_tables(monkeypatch):
    monkeypatch.setitem(choose.HOPPER_FORWARD, 64, ((96, 1, 1, 1, 6, 4),) * 4)
    choose.hopper_forward.cache_clear()
    found = {one.name: one.tiling for one in cupyflash.roofline(problem(), device="H200").estimates}
    choose.hopper_forward.cache_clear()
    assert found["sm90 forward"] == "64x96"


def test_arrays_of_any_kind_and_problems_agree():
    q, k = stand_in(2, 100, 4, 64), stand_in(2, 120, 2, 64)
    found = cupyflash.roofline(q, k, k, causal=True, device="A100")
    expected = problem(100, 120, 4, 2, batch=2, diagonal=20, right=0)
    assert found.problem == expected
    assert cupyflash.roofline(expected, device="A100") == found
    torch = pytest.importorskip("torch")
    q, k = (torch.zeros(x.shape, dtype=torch.bfloat16) for x in (q, k))
    assert cupyflash.roofline(q, k, k, causal=True, device="A100") == found


def test_own_figures():
    own = Device("mine", 90, 500e12, 2e12, 2e12)
    found = cupyflash.roofline(problem(), device=own)
    assert found.device is own and own.shared == 16e12
    assert found.estimates[0].seconds["memory"] == found.estimates[0].amounts.memory_bytes / 2e12


@pytest.mark.parametrize(
    "arguments, options, error, words",
    [
        ([problem()], {"device": "B300"}, ValueError, "'B300'.*A100, H100"),
        ([problem()], {"device": Device("x", 70, 1, 1, 1)}, ValueError, "capability 70; allowed"),
        ([problem()], {"causal": True}, TypeError, "q is a Problem"),
        ([problem(batch=0)], {}, ValueError, "nothing to compute"),
        (
            [problem(8, right=0, diagonal=-100)],
            {},
            ValueError,
            "nothing to compute; allowed: .*a query that sees a key",
        ),
        ([problem()], {"device": "H100", "measure": True}, ValueError, "one of them"),
        ([stand_in(1, 8, 1, 8, dtype=np.float32)] * 3, {}, NotImplementedError, "float32"),
        ([stand_in(1, 8, 1, 300)] * 3, {}, ValueError, "head_dim 300"),
        *(
            ([problem()], {"device": wrong}, TypeError, "device is .*; allowed: A100")
            for wrong in (90, [], ["A100"], {}, {"A100"}, b"A100", True, Device)
        ),
        ([problem()], {"device": ""}, ValueError, "device is ''.*; allowed: A100"),
        ([problem()], {"measure": 1}, TypeError, r"measure is 1 \(int\); allowed: False, True"),
        ([problem()], {"measure": "no"}, TypeError, "measure is 'no'"),
        ([problem()], {"measure": None}, TypeError, "measure is None"),
    ],
)
def test_wrong_arguments(arguments, options, error, words):
    with pytest.raises(error, match=words):
        cupyflash.roofline(*arguments, **options)


@pytest.mark.skipif(not tools.cuda_missing(), reason="there is a GPU")
def test_measure_without_gpu_says_what_is_missing():
    with pytest.raises(RuntimeError, match="measure=True needs a GPU.*(CuPy|cuBLAS)"):
        cupyflash.roofline(problem(), measure=True)


def test_unknown_gpu(monkeypatch):
    module = sys.modules["cupyflash.roofline"]
    monkeypatch.setattr(module, "_name_here", lambda: "NVIDIA A100-PCIE-40GB")
    with pytest.raises(ValueError, match="A100-PCIE-40GB, whose figures are not known.*measure=True"):
        cupyflash.roofline(problem())
    monkeypatch.setattr(module, "_name_here", lambda: "NVIDIA A100-SXM4-80GB")
    assert cupyflash.roofline(problem()).device == DEVICES["A100"]


# --- What is printed


def test_one_of_each():
    text = str(cupyflash.roofline(problem(1, heads_q=1, heads_k=1), device="H200"))
    assert "batch 3, heads 1 on 1, queries 1, keys 1, head_dim 64" in text
    assert text.endswith("by tiles, N^2 d^2 / M: holds for d <= M <= N d only")
    assert re.search(
        r"by tiles, N\^2 d\^2 / M: [0-9.]+ million$", str(cupyflash.roofline(problem(8192), device="H200"))
    )


def test_table_and_json():
    for device, masks in product(DEVICES, ({}, {"right": 0})):
        found = cupyflash.roofline(problem(**masks), device=device)
        text = str(found)
        assert text.isascii() and max(map(len, text.splitlines())) <= 120
        assert all(text.count(f"  {one.name} ") == 2 for one in found.estimates)
        data = json.loads(json.dumps(found.as_dict()))
        assert len(data["estimates"]) == len(found.estimates)
        assert data["estimates"][0]["binds"] == found.estimates[0].binds


@pytest.mark.parametrize("measured", [None, 1e-3])
def test_plot(tmp_path, measured):
    pytest.importorskip("matplotlib")

    found = cupyflash.roofline(problem(), device="H200")
    found = replace(found, estimates=tuple(replace(one, measured=measured) for one in found.estimates))
    assert "achieved" in found.estimates[0].as_dict() and str(found)
    found.plot(tmp_path / "out.png")
    assert (tmp_path / "out.png").stat().st_size > 1000


def test_command(capsys):
    sizes = ["--batch", "2", "--heads", "8", "--heads-k", "2", "--seqlen", "1000", "--head-dim", "96", "--causal"]
    assert main(["roofline", *sizes, "--device", "RTX 4090"]) == 0
    printed = capsys.readouterr()
    assert "RTX 4090" in printed.out and "sm80 backward" in printed.out and not printed.err
    assert main(["--json", "roofline", *sizes, "--device", "H100", "--memory", "3", "--window", "10", "-1"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["device"]["memory"] == 3e12 and report["device"]["matmul"] == DEVICES["H100"].matmul
    assert report["device"]["source"] == "published figures but your memory"
    assert main(["roofline", "--device", "H100", "--matmul", "800", "--memory", "3", "--exp", "4"]) == 0
    assert "H100, your figures: 800 TFLOP/s, 3.00 TB/s, 4.00 T exponentials/s" in capsys.readouterr().out
    assert (report["problem"]["heads_k"], report["problem"]["left"], report["problem"]["right"]) == (2, 10, 0)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--heads-k", "3"], "multiple of the heads of k"),
        (["--head-dim", "257"], "head_dim 257"),
        (["--batch", "0"], "'0' is no positive integer"),
        (["--seqlen", "-1"], "'-1' is no positive integer"),
        (["--seqlen", str(10**20)], "is too large; allowed: less than 2**62 elements"),
        (["--batch", str(2**40), "--seqlen", str(2**20)], "is too large; allowed: less than 2**62 elements"),
        (["--measure", "--memory", "3"], "leave out"),
        (["--json", "--memory", "1e-320"], "; allowed: a number from 1 to 1e30, a second"),
        (["--json", "--exp", "1e296"], "exp is 1e+308; allowed"),
        *((["--memory", text], f"'{text}' is no positive finite number") for text in ("0", "-3", "nan", "inf", "x")),
    ],
)
def test_command_refuses(arguments, words, capsys):
    try:
        code = main(["roofline", "--device", "H100", *arguments])
    except SystemExit as exit:  # argparse's own
        code = exit.code
    printed = capsys.readouterr()
    assert code == 2 and words in printed.err and not printed.out


@pytest.mark.parametrize("name, words", [("nowhere/x.png", "in no folder"), ("", "is a folder"), ("x.foo", "'.foo'")])
def test_a_plot_that_cannot_be_written_is_refused_before_anything_is_measured(capsys, tmp_path, name, words):
    pytest.importorskip("matplotlib")
    with pytest.raises(SystemExit, match="2"):
        main(["roofline", "--measure", "--plot", str(tmp_path / name)])
    printed = capsys.readouterr()
    assert words in printed.err and "argument --plot" in printed.err
    assert not printed.out and "measuring" not in printed.err and not list(tmp_path.parent.glob("*.png"))


def test_a_plot_that_fails_costs_no_table(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(cupyflash.roofline_report, "check_plot", lambda *_: None)
    monkeypatch.setattr(cupyflash.roofline_report, "plot", lambda _, path: path.read_bytes())
    assert main(["roofline", "--device", "H100", "--plot", str(tmp_path / "x.png")]) == 2
    printed = capsys.readouterr()
    assert "sm80 backward" in printed.out and "roofline: --plot " in printed.err


@pytest.mark.parametrize("figures", [(1, 1, 1), (1e30, 1, 1e30), (1, 1e30, 1)])
def test_json_of_any_figures_has_numbers_alone(figures):
    sizes = {"batch": 2**63 - 1, "heads_q": 2**63 - 1, "heads_k": 1}
    for one in (problem(1), replace(problem(2**29 - 1), **sizes)):
        found = cupyflash.roofline(one, device=Device("mine", 90, *figures))
        assert json.dumps(found.as_dict(), allow_nan=False) and "inf" not in str(found) and "nan" not in str(found)


def test_huge_numbers_keep_their_columns():
    text = str(cupyflash.roofline(problem(2**29 - 1, batch=2**20), device="H200"))
    rows = [line for line in text.splitlines() if line.startswith(("  standard ", "  sm")) and "million" not in line]
    assert len(rows) == 12 and all(len(word) <= 9 for row in rows for word in row.split())


@pytest.mark.parametrize("figure", [0, -1, 1e-308, 1e31, float("nan"), float("inf")])
def test_figures_of_a_device(figure):
    with pytest.raises(ValueError, match="memory is .*; allowed: a number from 1 to 1e30, a second"):
        Device("mine", 90, 1e12, figure, 1e12)


@pytest.mark.parametrize(
    "changes, error, words",
    [
        ({"name": 3}, TypeError, r"name is 3 \(int\); allowed: a string"),
        ({"source": None}, TypeError, "source is None .*; allowed: a string"),
        ({"capability": "90"}, TypeError, r"capability is '90' \(str\); allowed: an integer"),
        ({"capability": 9.0}, TypeError, r"capability is 9.0 \(float\)"),
        ({"capability": True}, TypeError, r"capability is True \(bool\)"),
        ({"capability": -90}, ValueError, "capability is -90; allowed: an integer from 0"),
        ({"matmul": "1"}, TypeError, r"matmul is '1' \(str\); allowed: a number from 1 to 1e30, a second"),
        ({"matmul": None}, TypeError, "matmul is None"),
        ({"exp": True}, TypeError, "exp is True"),
        ({"exp": 1j}, TypeError, "exp is 1j"),
        ({"memory": np.array(1.0)}, TypeError, "memory is array"),
        ({"memory": 10**400}, ValueError, "memory is .*too long to print; allowed: a number from 1"),
        ({"memory": -(10**400)}, ValueError, "memory is .*; allowed"),
    ],
)
def test_fields_of_a_device(changes, error, words):
    with pytest.raises(error, match=words):
        replace(DEVICES["A100"], **changes)


def test_figures_of_any_kind():
    one = Device("mine", np.int64(90), np.float32(1e12), np.int64(10**12), 10**12)
    assert one == Device("mine", 90, float(np.float32(1e12)), 1e12, 1e12)
    assert json.dumps(cupyflash.roofline(problem(), device=one).as_dict())


@pytest.mark.parametrize(
    "changes, error, words",
    [
        *(
            ({name: value}, ValueError, f"q.{name} is {value}; allowed: an integer from 0")
            for name in ("batch", "seqlen_q", "seqlen_k", "heads_q", "heads_k", "left", "right")
            for value in (-1, 2**63)
        ),
        ({"head_dim": 0}, ValueError, "q.head_dim is 0; allowed: an integer from 1"),
        ({"head_dim_v": -8}, ValueError, "q.head_dim_v is -8"),
        ({"batch": 10**5000}, ValueError, "q.batch is .*too long to print"),
        ({"diagonal": 10**5000}, ValueError, "q.diagonal is .*too long to print"),
        ({"diagonal": None}, TypeError, "q.diagonal is None"),
        ({"heads_k": 0}, ValueError, "q.heads_q is 2 and q.heads_k is 0; allowed: a multiple"),
        ({"heads_k": 3}, ValueError, "q.heads_q is 2 and q.heads_k is 3"),
        ({"seqlen_q": 2**30}, ValueError, "q.seqlen_q and q.seqlen_k are .* together; allowed: less than 1073741824"),
        ({"batch": 2.0}, TypeError, r"q.batch is 2.0 \(float\); allowed: an integer from 0"),
        ({"batch": None}, TypeError, "q.batch is None"),
        ({"head_dim": True}, TypeError, "q.head_dim is True"),
        ({"left": "3"}, TypeError, "q.left is '3'"),
    ],
)
def test_fields_of_a_problem(changes, error, words):
    with pytest.raises(error, match=words):
        cupyflash.roofline(replace(problem(), **changes), device="H100")


def test_fields_of_a_problem_do_not_wrap():
    fields = {"batch": 2**20, "seqlen_q": 2**20, "heads_q": 2**10, "heads_k": 2**10}
    small = {name: np.int32(value) for name, value in fields.items()}
    expected = cupyflash.roofline(replace(problem(), **fields), device="H100")
    assert cupyflash.roofline(replace(problem(), **small), device="H100") == expected


@pytest.mark.parametrize("name", ["NVIDIA GH200 480GB", "NVIDIA A100-SXM4-40GB", "NVIDIA H100 NVL", "NVIDIA H100 PCIe"])
def test_cards_with_other_figures_are_not_known(monkeypatch, name):
    module = sys.modules["cupyflash.roofline"]
    monkeypatch.setattr(module, "_name_here", lambda: name)
    with pytest.raises(ValueError, match=f"device is {name}, whose figures are not known"):
        cupyflash.roofline(problem())


@pytest.mark.parametrize("changes", [{"dtype": "float32"}, {"head_dim": 300}])
def test_problems_that_no_kernel_takes(changes):
    with pytest.raises(NotImplementedError, match="q has dtype .*; allowed: float16 and bfloat16, up to 256"):
        cupyflash.roofline(replace(problem(), **changes), device="H100")


def test_command_without_matplotlib(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit) as exit:
        main(["roofline", "--plot", "x.png"])
    assert exit.value.code == 2
    assert '"cupyflash[plot]"' in capsys.readouterr().err


@pytest.mark.gpu
def test_measured():
    found = cupyflash.roofline(problem(4096, head_dim=128, batch=4, heads_q=16, right=0), measure=True)
    assert found.device.source == "measured here"
    timed = [one for one in found.estimates if one.measured]
    assert {one.direction for one in timed} == {"forward", "backward"}
    for one in timed:  # how much is for a benchmark to say: other tests may run beside this one
        assert all(share > 0 for share in one.achieved.values())
