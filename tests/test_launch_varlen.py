"""Every kind of call of packed sequences is planned and 'launched' without a GPU, as test_launch.py does it."""

import itertools

import numpy as np
import pytest
import tools
from test_launch import ALIGNED, DEVICES, MULTIPROCESSORS, Gpu, array, copyable, exists, gpu, tiles, watch_workspace  # noqa: F401

import cupyflash
from cupyflash import choose, dropout, structs, tensor_map

LENGTHS = {
    "mixed": ((1, 64, 0, 129, 300), (5, 64, 33, 0, 257), (3, 2)),
    "one": ((70,), (100,), (0, 0)),
    "many": ((3,) * 300, (5,) * 300, (0, 0)),
    "long": ((5000, 3000), (5000, 3000), (0, 0)),
    "no keys": ((70, 3), (0, 0), (0, 0)),
}
OPTIONS = {
    "none": {},
    "window": {"window": (20, 30), "scale": 0.3},
    "upper left": {"causal": "upper_left", "softcap": 30.0},
    "alibi": {"alibi_slopes": True, "causal": True},
    "sink": {"sink": True},
    "dropout": {"dropout": 0.25, "seed": (1 << 63) + 5},
}
HEADS = [(64, 64), (128, 128), (256, 256), (64, 128), (40, 37)]
ADDRESS_WORD = 12


def called(gpu, lengths, options, head_dim, head_dim_v, used=(), dtype=np.int32, layout=array, backward=None):  # noqa: F811
    """Arrays by name and what was launched, of a forward or, with its keywords, of a backward call."""
    lengths_q, lengths_k, spare = lengths
    total_q, total_k = sum(lengths_q) + spare[0], sum(lengths_k) + spare[1]
    narrow, wide, batch = tools.DTYPES["bfloat16"], np.dtype(np.float32), len(lengths_q)
    arrays = {"q": layout((total_q, 4, head_dim), narrow), "k": layout((total_k, 2, head_dim), narrow)}
    arrays |= {"v": layout((total_k, 2, head_dim_v), narrow), "out": array((total_q, 4, head_dim_v), narrow)}
    indices = {f"cu_seqlens_{side}": np.cumsum([0, *n]) for side, n in zip("qk", lengths[:2])}
    indices |= {f"seqused_{side}": np.array(lengths["qk".index(side)]) // 2 for side in used}
    for name, values in indices.items():
        indices[name] = array(values.shape, dtype if name != "seqused_k" else np.int64)
        indices[name][...] = values
    options = dict(options)
    for name, shape in (("alibi_slopes", (batch, 4)), ("sink", (4,))):
        if options.get(name):
            options[name] = arrays[name] = array(shape, wide)
    gpu.launched.clear(), gpu.temporaries.clear()
    if backward is None:
        out, lse = cupyflash.attention_varlen(
            *(arrays[name] for name in "qkv"), out=arrays["out"], return_lse=True, **indices, **options
        )
        arrays["lse"] = lse
    else:
        arrays |= {"dout": layout((total_q, 4, head_dim_v), narrow), "lse": array((4, total_q), wide)}
        given = [arrays[name] for name in ("dout", "q", "k", "v", "out", "lse")]
        dlse = array((4, total_q), wide)
        arrays["dlse"] = dlse
        got = cupyflash.attention_varlen_backward(*given, dlse=dlse, **indices, **options, **backward)
        arrays |= tools.named(got)
    return arrays, indices, list(gpu.launched)


def check(gpu, lengths, options, arrays, indices, launched, deterministic=False):  # noqa: F811
    before, *others = launched
    assert before.variant.template == "prepare_segments"
    for one in launched:
        assert exists(one.variant.header, one.variant.template)
        assert one.threads == one.spec.threads and one.shared_bytes == one.spec.shared_bytes and 0 < one.blocks
        assert getattr(one.spec, "varlen", True) and not one.cooperative
    totals = {"q": len(arrays["q"]), "k": len(arrays["k"])}
    bounds = check_before(before, arrays, indices, totals, lengths)
    for one in others:
        params, name = one.params, one.variant.template
        assert params["segments"] == before.params["segments"]
        check_arrays(one, arrays, totals)
        check_options(params, options, arrays, totals, len(lengths[0]))
        heads_q, heads_k = 4, 2
        paired = [params["segments"]["lists"][i]["paired"] for i in range(2)]
        rows = [params["segments"]["lists"][i]["rows"] for i in range(4)]
        blocks = {
            "forward": heads_q * bounds[0],
            "backward": heads_k * bounds[1],
            "finish_backward": tiles(heads_q * bounds[2] * (parts_of(one.spec) or 1), 8),
            "sink_gradient": heads_q,
        }
        if name in ("forward", "hopper_forward", "hopper_queries"):
            assert rows[0] == one.spec.block_q
        if name in ("backward", "hopper_backward", "hopper_keys"):
            assert rows[1] == one.spec.block_k
        if name == "prepare_backward":
            needed = 8 * bounds[3] if one.spec.packed else bounds[2]
            assert one.blocks == needed * tiles(heads_q, one.spec.heads) and rows[2:] in ([16, 128], [16, 0])
        elif name in blocks:
            assert one.blocks == blocks[name] and not (any(paired) and name in ("forward", "backward"))
        else:
            order = params[
                "keys"
                if name in ("hopper_keys", "hopper_backward")
                else "order"
                if name == "hopper_forward"
                else "queries"
            ]
            heads = heads_k if name in ("hopper_keys", "hopper_backward") else heads_q
            assert order["heads"] == heads
            runs = heads * bounds[1 if heads == heads_k else 0]
            assert one.blocks == min(MULTIPROCESSORS, tiles(runs, getattr(one.spec, "teams", 1)))
            assert not (deterministic and name == "hopper_backward" and (paired[1] or params["rotated"]))
            check_maps(one, arrays)
    return bounds


def parts_of(spec):
    """Parts of a row that a warp finishes."""
    return spec.head_dim // spec.finished_cols if hasattr(spec, "finished_cols") else None


def check_before(before, arrays, indices, totals, lengths):
    """The struct of the first kernel; returns the bounds of its lists."""
    params = before.params
    for side in "qk":
        cu, used = (indices.get(f"{name}_{side}") for name in ("cu_seqlens", "seqused"))
        expected = (cu.ctypes.data, 0 if used is None else used.ctypes.data)
        expected += (cu.itemsize == 8, used is not None and used.itemsize == 8, totals[side])
        assert params[f"lengths_{side}"].item() == expected
    backward = "dq" in arrays
    results = ("dq", "dk", "dv") if backward else ("out",)
    assert params["batch"] == len(lengths[0]) and params["longest_keys"] == (not backward)
    for field, name in itertools.zip_longest(("of_q", "of_k", "of_v"), results):
        (pointer, batch, row, head), heads, units, item = params[field].item()
        if name is None:
            assert (pointer, heads) == (0, 0)
            continue
        x = arrays[name]
        assert (pointer, heads, units, item) == (x.ctypes.data, x.shape[1], x.shape[2], 2)
        assert x.size == 0 or len(x) == 1 or (row * 2, head * 2) == x.strides[:2]
    lse = params["lse"].item()
    if backward:
        assert lse[0] == 0
    else:
        assert lse[0] == arrays["lse"].ctypes.data and lse[2:] == (totals["q"], 1) and params["heads"] == 4
    searched = tiles(totals["q"], 1024) + (tiles(totals["k"], 1024) if backward else 0)
    assert before.blocks == 1 + searched
    segments, bounds, at = params["segments"], [], structs.TABLE_HEAD + 9 * len(lengths[0])
    assert segments["table"] % 32 == 0
    for kind, one in zip(structs.TILE_KINDS, segments["lists"]):
        assert one["at"] == at
        at += one["bound"]
        bounds.append(int(one["bound"]))
        if one["rows"]:
            of = lengths[1] if kind == "keys" else lengths[0]
            assert sum(tiles(n, int(one["rows"])) for n in of) <= one["bound"]
    return bounds


def check_arrays(one, arrays, totals):
    params = one.params
    for name in params.dtype.names:
        kind = params.dtype[name]
        if kind == structs.ARRAY and (name != "out" or not params["out"]["data"] == 0):
            pointer, batch, row, head = params[name].item()
            x = arrays[name]
            assert pointer == x.ctypes.data and batch == row
            assert all(n < 2 or step * x.itemsize == s for n, step, s in zip(x.shape, (row, head), x.strides)), name
        if kind == structs.ROW_ARRAY and name != "delta":
            pointer, batch, head, row = params[name].item()
            assert pointer == arrays[name].ctypes.data and (batch, head, row) == (1, totals["q"], 1)
    access = getattr(one.spec, "access", 2)
    for name in ALIGNED.get(one.variant.template, ()):
        x = arrays[name]
        assert (x.ctypes.data | x.shape[2] * 2) % access == 0 and all(s % access == 0 for s in x.strides[:2]), name


def check_options(params, options, arrays, totals, batch):
    sizes = params["sizes"]
    assert (sizes["batch"], sizes["seqlen_q"], sizes["seqlen_k"]) == (batch, totals["q"], totals["k"])
    assert sizes["section"] >= 1
    left, right = options.get("window", (None, 0 if options.get("causal") else None))
    low, high = (-structs.UNBOUNDED if left is None else -left), (structs.UNBOUNDED if right is None else right)
    if max(totals.values()) > 30:
        assert (sizes["low"], sizes["high"]) == (low, high)
    assert params["segments"]["lower_right"] == (options.get("causal") != "upper_left")
    keys = dropout.round_keys(options["seed"]) if "seed" in options else [(0, 0)] * dropout.ROUNDS
    assert params["dropout"]["keys"].ravel().tolist() == [left | right << 32 for left, right in keys]
    slopes = arrays.get("alibi_slopes")
    expected = (0, 0, 0) if slopes is None else (slopes.ctypes.data, 4 if batch > 1 else 0, 1)
    assert params["score"].item()[:3] == expected and params["score"]["diagonal"] == 0
    sink = arrays.get("sink")
    assert params["sink"].item() == ((0, 0) if sink is None else (sink.ctypes.data, 1))


def check_maps(one, arrays):
    """Each row of each sequence is where it is, and outside of the map where it is beyond the last one."""
    params, spec = one.params, one.spec
    rows = {"hopper_forward": {"q": 64, "out": 64}, "hopper_backward": {}}.get(one.variant.template)
    for name in ("q", "k", "v", "out", "dout"):
        field = name if name in params.dtype.names and params.dtype[name] == structs.MAP else f"{name}_map"
        if field not in params.dtype.names or not params[field].any():
            assert name in ("out", "dout")
            continue
        words = [int(word) for word in params[field]]
        address = words.pop(ADDRESS_WORD)
        kind, sizes, strides, box = words[0], words[1:6], words[6:10], words[10:15]
        x = arrays[name]
        assert address == x.ctypes.data and kind == tensor_map.ELEMENT_TYPES["bfloat16"]
        block = spec.block_q if name in ("q", "dout") and hasattr(spec, "block_q") else getattr(spec, "block_k", 64)
        expected = 64 if rows is None else rows.get(name, block)
        assert sizes[:2] == [x.shape[2], x.shape[1]] and box == [64, 1, expected, 1, 1]
        for first, count, row in ((0, 1, 0), (3, 70, 69), (1000, 5, 7), (len(x), 128, 130)):
            place = (tensor_map.MAPPED_ROWS - count + row, first + count, tensor_map.MAPPED_ROWS)
            assert all(i < n for i, n in zip(place[1:], sizes[3:])) and (place[0] < sizes[2]) == (row < count)
            offset = sum(i * step for i, step in zip(place, strides[1:])) % 2**64
            assert len(x) < 2 or offset == (first + row) * x.strides[0]


every_call = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


@every_call
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_forward(gpu, heads, lengths, options):  # noqa: F811
    for used, dtype in (((), np.int32), ("q", np.int64), ("qk", np.int32)):
        arrays, indices, launched = called(gpu, lengths, options, *heads, used, dtype)
        on_hopper = gpu.path == "sm90" and all(x.size and x.strides[0] % 16 == 0 for x in map(arrays.get, "qkv"))
        on_hopper |= gpu.path == "sm90" and heads[0] % 8 == heads[1] % 8 == 0
        assert launched[-1].variant.template == ("hopper_forward" if on_hopper else "forward")
        check(gpu, lengths, options, arrays, indices, launched)
        (table,) = [x for x in gpu.temporaries if x.dtype == np.int32]
        segments = launched[0].params["segments"]
        assert segments["table"] == table.ctypes.data
        assert table.size == segments["lists"][-1]["at"] + segments["lists"][-1]["bound"]


@every_call
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
def test_backward(gpu, heads, lengths, options, deterministic):  # noqa: F811
    keywords = {"deterministic": deterministic}
    arrays, indices, launched = called(gpu, lengths, options, *heads, "k", backward=keywords)
    bounds = check(gpu, lengths, options, arrays, indices, launched, deterministic)
    names = [one.variant.template for one in launched]
    mains = [name for name in names if name in ("backward", "hopper_backward", "hopper_keys", "hopper_queries")]
    split = "hopper_queries" in mains
    order = ["prepare_segments", "prepare_backward", *mains, *([] if split else ["finish_backward"])]
    assert names == order + (["sink_gradient"] if "sink" in options else [])
    params, spec = launched[1].params, launched[1].spec
    delta, dq_sum, turn = (
        next((x for x in gpu.temporaries if x.ctypes.data == pointer), None)
        for pointer in (params["delta"]["data"], params["dq_sum"], params["turn"])
    )
    assert delta.size == 4 * (2 * 128 * bounds[3] if spec.packed else len(arrays["q"]))
    assert (dq_sum is None) == split and (split or dq_sum.size == 4 * bounds[2] * 16 * spec.head_dim)
    assert (turn is None) == (split or not deterministic) and (turn is None or turn.size == 1 + 4 * bounds[2])
    assert not mains or spec.packed == ("hopper_backward" in mains)


@pytest.mark.parametrize("gpu", ["9.0 portable", "9.0"], indirect=True)
def test_layouts(gpu):  # noqa: F811
    for pad in (8, 1, 0):
        made = lambda shape, dtype, pad=pad: array(shape, dtype, pad)  # noqa: E731
        for backward in (None, {}):
            arrays, indices, launched = called(gpu, LENGTHS["mixed"], {}, 64, 64, layout=made, backward=backward)
            assert ("hopper" in "".join(one.variant.template for one in launched)) == (gpu.path == "sm90" and pad != 1)
            check(gpu, LENGTHS["mixed"], {}, arrays, indices, launched)


@pytest.mark.parametrize("gpu", ["9.0"], indirect=True)
@pytest.mark.parametrize("backward", [None, {}], ids=["forward", "backward"])
def test_a_call_holds_its_workspace(gpu, monkeypatch, backward):  # noqa: F811
    """Until the last launch, also the table of the first one: the flag of sums must not lie in its place."""
    monkeypatch.setattr(choose, "STEADY_KEYS", 1)
    monkeypatch.setattr(choose, "STEADY_SCORES", 1)
    _, held = watch_workspace(gpu, monkeypatch)
    _, _, launched = called(gpu, LENGTHS["mixed"], {}, 64, 64, backward=backward)
    assert len(held) == len(launched) > 2 and all(map(all, held))
    if backward is None:
        assert [one.spec.steady for one in launched[1:]] == [True, False] and launched[1].params["only_if"]


@pytest.mark.parametrize("gpu", ["9.0"], indirect=True)
def test_nothing_is_launched(gpu):  # noqa: F811
    for lengths in (((), (), (5, 3)), ((0, 0), (3, 4), (0, 0)), ((), (), (0, 0))):
        for backward in (None, {}):
            arrays, _, launched = called(gpu, lengths, {}, 64, 64, backward=backward)
            assert not launched
            assert backward is None or not any(arrays[name].any() for name in ("dq", "dk", "dv"))


@pytest.mark.parametrize("gpu", ["8.6", "9.0"], indirect=True)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_wide_dtypes(gpu, dtype):  # noqa: F811
    q = array((70, 4, 64), np.dtype(dtype))
    indices = {f"cu_seqlens_{side}": array((2,), np.int32) for side in "qk"}
    with pytest.raises(NotImplementedError, match=f"cu_seqlens_q is given and q has dtype {dtype}; allowed with it"):
        cupyflash.attention_varlen(q, q, q, **indices)
    lse = array((4, 70), np.dtype(dtype))
    with pytest.raises(NotImplementedError, match=f"cu_seqlens_q is given and q has dtype {dtype}; allowed with it"):
        cupyflash.attention_varlen_backward(q, q, q, q, q, lse, **indices)
    assert not gpu.launched and not gpu.temporaries


def test_pairs_of_long_causal_sequences():
    problem = cupyflash.problem.Problem("bfloat16", 2, 8000, 8000, 4, 2, 64, 64, 1.0, right=0, varlen="lower_right")
    tiles_of = cupyflash.launch_varlen.Tiles.in_runs
    assert tiles_of(problem, "queries", 128, 4, 132).struct[2][0][2]
    assert not tiles_of(problem, "queries", 128, 4, 1320).struct[2][0][2]
    assert not choose.split_packed(problem, 16, True) and choose.split_packed(problem, 2, False)
