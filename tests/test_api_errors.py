"""Wrong arguments: an error that names the argument, what it got and what is allowed, and nothing else."""

import doctest
import itertools
import os
import subprocess
import sys
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

import cupyflash
from cupyflash import checks

F32 = np.float32
BF16 = np.dtype(ml_dtypes.bfloat16)


def arrays(q=(2, 3, 4, 8), k=(2, 5, 2, 8), v=None, dtype=F32):
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape).astype(dtype) for shape in (q, k, v or k)]


def backward_arguments(dtype=F32):
    """dout, q, k, v, out, lse"""
    q, k, v = arrays(dtype=dtype)
    return [np.ones_like(q), q, k, v, np.ones_like(q), np.ones((2, 4, 3), F32)]


@pytest.fixture
def no_backend(monkeypatch):
    """Fail if a wrong call comes as far as the backend or the memory of a result."""

    def reached(*args):
        raise AssertionError("a wrong call was carried out")

    monkeypatch.setattr("cupyflash.cpu.forward", reached)
    monkeypatch.setattr("cupyflash.cpu.backward", reached)
    monkeypatch.setattr("cupyflash.interop.Home.empty", reached)


def refused(error, words, function, *args, **kwargs):
    with pytest.raises(error) as caught:
        function(*args, **kwargs)
    assert type(caught.value) is error
    for word in ["allowed", *([words] if isinstance(words, str) else words)]:
        assert word in str(caught.value)


# ------------------------------------------------------------------------------------------------ arrays


@pytest.mark.parametrize("wrong", [None, "q", 3, [[[[1.0]]]], F32(1), np.ma.ones((2, 3, 4, 8), F32)])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_not_an_array(no_backend, wrong, position):
    args = arrays()
    args[position] = wrong
    refused(TypeError, ["qkv"[position] + " is a ", type(wrong).__name__], cupyflash.attention, *args)


@pytest.mark.parametrize("name", ["dout", "q", "k", "v", "out", "lse", "dlse"])
def test_backward_not_an_array(no_backend, name):
    args = dict(zip(("dout", "q", "k", "v", "out", "lse"), backward_arguments(), strict=True), dlse=None)
    args[name] = [1.0]
    dlse = args.pop("dlse")
    words = f"{name} is a list"
    refused(TypeError, words, cupyflash.attention_backward, *args.values(), dlse=dlse)


def test_object_with_array_interfaces_only(no_backend):
    class Column:
        def __array__(self, dtype=None, copy=None):
            return np.ones((2, 3, 4, 8), F32)

    _, k, v = arrays()
    refused(TypeError, "q is a ", cupyflash.attention, Column(), k, v)


@pytest.mark.parametrize(
    "q, k, v, words",
    [
        # pytorch/pytorch#193728: K and V that do not belong together
        ((1, 3, 1, 8), (1, 5, 1, 8), (1, 6, 1, 8), ["k has shape (1, 5, 1, 8)", "v has shape (1, 6, 1, 8)"]),
        ((2, 3, 1, 8), (2, 5, 1, 8), (1, 5, 1, 8), ["k has shape (2, 5, 1, 8)", "v has shape (1, 5, 1, 8)"]),
        ((1, 3, 2, 8), (1, 5, 2, 8), (1, 5, 1, 8), ["k has shape (1, 5, 2, 8)", "v has shape (1, 5, 1, 8)"]),
        ((2, 3, 1, 8), (1, 5, 1, 8), None, ["q has shape (2, 3, 1, 8)", "k has shape (1, 5, 1, 8)", "batch"]),
        ((1, 3, 1, 8), (1, 5, 1, 9), None, ["q has shape (1, 3, 1, 8)", "k has shape (1, 5, 1, 9)"]),
        ((1, 3, 5, 8), (1, 5, 2, 8), None, ["q has 5 heads", "k has 2", "multiple"]),
        ((1, 3, 2, 8), (1, 5, 4, 8), None, ["q has 2 heads", "k has 4", "multiple"]),
        ((1, 3, 4, 8), (1, 5, 0, 8), None, ["q has 4 heads", "k has 0", "multiple"]),
        ((1, 3, 1, 0), (1, 5, 1, 0), (1, 5, 1, 8), ["q has head_dim 0"]),
        ((1, 3, 1, 8), (1, 5, 1, 8), (1, 5, 1, 0), ["v has head_dim 0"]),
        ((3, 8), (5, 8), None, ["q has shape (3, 8)", "(batch, seqlen, heads, head_dim)"]),
        ((1, 3, 1, 8), (5, 1, 8), None, ["q has shape (1, 3, 1, 8)", "k has shape (5, 1, 8)", "for all"]),
        ((3, 1, 8), (5, 1, 8), (1, 5, 1, 8), ["q has shape (3, 1, 8)", "v has shape (1, 5, 1, 8)"]),
        ((1, 1, 3, 1, 8), (1, 1, 5, 1, 8), None, ["q has shape (1, 1, 3, 1, 8)"]),
    ],
)
def test_shapes(no_backend, q, k, v, words):
    refused(ValueError, words, cupyflash.attention, *arrays(q, k, v))


def test_lengths_fit_32_bits(no_backend):
    """Views without memory of their own: a row repeated 2**29 times."""
    q, k, _ = arrays((1, 1, 1, 8), (1, 1, 1, 8))
    long = np.broadcast_to(k, (1, 2**29, 1, 8))
    refused(
        ValueError,
        ["q has seqlen 536870912", "k has seqlen 536870912"],
        cupyflash.attention,
        long,
        long,
        long,
    )
    problem = checks.forward(False, checks.options(True, None, None), q=long[:, 1:], k=long, v=long)
    assert problem.seqlen_q + problem.seqlen_k == 2**30 - 1


@pytest.mark.parametrize(
    "dtypes",
    [
        # huggingface/diffusers#6774
        ("float32", "float16", "float16"),
        ("bfloat16", "bfloat16", "float16"),
        ("float32", "float32", "float64"),
        ("int32", "int32", "int32"),
        ("complex64", "complex64", "complex64"),
        ("bool", "bool", "bool"),
        (">f4", ">f4", ">f4"),
        ("float8_e4m3fn", "float8_e4m3fn", "float8_e4m3fn"),
        ("longdouble", "longdouble", "longdouble"),
    ],
)
def test_dtypes(no_backend, dtypes):
    args = [x.astype(dtype) for x, dtype in zip(arrays(), dtypes, strict=True)]
    words = [f"{name} has dtype {x.dtype}" for name, x in zip("qkv", args, strict=True)]
    refused(TypeError, [*words, "float16, bfloat16, float32, float64"], cupyflash.attention, *args)


@pytest.mark.parametrize("name, head_dim, head_dim_v", [("q", 257, 8), ("v", 8, 300)])
def test_head_dim_on_the_gpu(name, head_dim, head_dim_v):
    q, k, v = arrays((1, 2, 1, head_dim), (1, 2, 1, head_dim), (1, 2, 1, head_dim_v), np.float16)
    options = checks.options(False, None, None)
    refused(ValueError, [f"{name} has head_dim", "1 to 256"], checks.forward, True, options, q=q, k=k, v=v)
    assert checks.forward(False, options, q=q, k=k, v=v).head_dim_v == v.shape[-1]


@pytest.mark.parametrize(
    "position, change, error, words",
    [
        (0, lambda x: x[:, :2], ValueError, ["dout has shape (2, 2, 4, 8)", "(2, 3, 4, 8)"]),
        (0, lambda x: x.astype("f8"), TypeError, ["dout has dtype float64", "q has dtype float32"]),
        (4, lambda x: x[..., :4], ValueError, ["out has shape (2, 3, 4, 4)", "(2, 3, 4, 8)"]),
        (4, lambda x: x.astype("f2"), TypeError, ["out has dtype float16", "float32"]),
        (5, lambda x: x.swapaxes(1, 2), ValueError, ["lse has shape (2, 3, 4)", "(2, 4, 3)"]),
        (5, lambda x: x.astype("f8"), TypeError, ["lse has dtype float64", "float32"]),
    ],
)
def test_backward_arrays(no_backend, position, change, error, words):
    args = backward_arguments()
    args[position] = change(args[position])
    refused(error, words, cupyflash.attention_backward, *args)


def test_backward_dlse(no_backend):
    args = backward_arguments()
    backward = cupyflash.attention_backward
    refused(ValueError, "dlse has shape (2, 4, 2)", backward, *args, dlse=args[5][..., :2])
    refused(TypeError, "dlse has dtype float16", backward, *args, dlse=args[5].astype("f2"))


# ----------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    "name, value, error",
    [
        ("causal", 1, TypeError),
        ("causal", 0, TypeError),
        ("causal", None, TypeError),
        ("causal", np.array(True), TypeError),
        ("causal", "bottom_right", ValueError),
        ("causal", "", ValueError),
        ("window", 3, TypeError),
        ("window", "12", TypeError),
        ("window", np.array([1, 2]), TypeError),
        ("window", (1,), ValueError),
        ("window", (1, 2, 3), ValueError),
        ("window", (1.0, 2), TypeError),
        ("window", (True, 2), TypeError),
        ("window", (1, np.array(2)), TypeError),
        # Dao-AILab/flash-attention#1133, #1116: no negative number means "unlimited"
        ("window", (-1, 0), ValueError),
        ("window", (0, -1), ValueError),
        ("window", (-1, -3), ValueError),
        ("window", (-5, 0), ValueError),
        ("window", (np.int64(-1), None), ValueError),
        # cupy/cupy#8485: arrays are no scalars
        ("scale", np.array(0.5), TypeError),
        ("scale", np.array([0.5]), TypeError),
        ("scale", "0.5", TypeError),
        ("scale", True, TypeError),
        ("scale", 1j, TypeError),
        ("scale", float("nan"), ValueError),
        ("scale", float("inf"), ValueError),
        ("scale", np.float16("-inf"), ValueError),
        ("scale", 1e39, ValueError),
        ("scale", 10**400, ValueError),
        ("softcap", np.array(5.0), TypeError),
        ("softcap", "5", TypeError),
        ("softcap", True, TypeError),
        ("softcap", 1j, TypeError),
        ("softcap", 0, ValueError),
        ("softcap", 0.0, ValueError),
        ("softcap", -1, ValueError),
        ("softcap", -30.0, ValueError),
        ("softcap", float("nan"), ValueError),
        ("softcap", float("inf"), ValueError),
        ("softcap", np.float16("inf"), ValueError),
        ("softcap", 1e-31, ValueError),
        ("softcap", 1.1e30, ValueError),
        ("softcap", 10**400, ValueError),
        ("alibi_slopes", 0.5, TypeError),
        ("alibi_slopes", [0.5] * 4, TypeError),
        ("alibi_slopes", True, TypeError),
        ("sink", 0.5, TypeError),
        ("sink", [0.5] * 4, TypeError),
        ("sink", True, TypeError),
        ("bias", 0.5, TypeError),
        ("bias", F32(0.5), TypeError),
        ("bias", [[0.5]], TypeError),
        ("mask", True, TypeError),
        ("mask", np.True_, TypeError),
        ("mask", "causal", TypeError),
        ("return_lse", 1, TypeError),
        ("return_lse", None, TypeError),
    ],
)
def test_option(no_backend, name, value, error):
    words = [name] if name in ("window", "return_lse") else [name, "is"]
    refused(error, words, cupyflash.attention, *arrays(), **{name: value})
    if name != "return_lse":
        refused(error, words, cupyflash.attention_backward, *backward_arguments(), **{name: value})


@pytest.mark.parametrize("digits", [1000, 5000])
@pytest.mark.parametrize("kind", [int, lambda x: -x, lambda x: Fraction(x, 3)], ids=["int", "negative", "fraction"])
def test_huge_numbers_are_not_printed(no_backend, kind, digits):
    """Python refuses to print an integer of more than 4300 digits."""
    huge = kind(10**digits)
    sides = (-abs(huge), 0), (0, -abs(huge))
    for name, value in (("scale", huge), ("softcap", huge), *(("window", side) for side in sides), ("causal", huge)):
        with pytest.raises((TypeError, ValueError), match=rf"{name} .*too long to print.*; allowed") as caught:
            cupyflash.attention(*arrays(), **{name: value})
        assert len(str(caught.value)) < 300
    refused(ValueError, "scale is of type", cupyflash.attention, *arrays(), scale=huge)


def test_huge_window_hides_nothing():
    args = arrays()
    for window in ((10**5000, None), (10**5000, 10**5000)):
        np.testing.assert_array_equal(cupyflash.attention(*args, window=window), cupyflash.attention(*args))


def test_negative_window_names_the_way_out(no_backend):
    refused(ValueError, "use None for unlimited", cupyflash.attention, *arrays(), window=(-1, 0))


@pytest.mark.parametrize("softcap", [0, -1, 1e31, float("nan")])
def test_softcap_names_the_way_out(no_backend, softcap):
    words = ["None, which switches it off", "positive", "1e-30 to 1e+30"]
    refused(ValueError, words, cupyflash.attention, *arrays(), softcap=softcap)


@pytest.mark.parametrize(
    "make, error, words",
    [
        (lambda: np.ones(3, F32), ValueError, ["shape (3,)", "(4,), (heads_q,) or (2, 4), (batch, heads_q)"]),
        (lambda: np.ones(2, F32), ValueError, ["shape (2,)", "(4,)"]),  # as many as k has
        (lambda: np.ones((1, 4), F32), ValueError, ["shape (1, 4)", "(2, 4)"]),
        (lambda: np.ones((4, 2), F32), ValueError, ["shape (4, 2)", "(2, 4)"]),
        (lambda: np.ones((2, 4, 1), F32), ValueError, ["shape (2, 4, 1)", "(2, 4)"]),
        (lambda: np.ones((), F32), ValueError, ["shape ()", "(4,)"]),
        (lambda: np.ones(4), TypeError, ["dtype float64", "float32 for dtype float32"]),
        (lambda: np.ones(4, np.float16), TypeError, ["dtype float16", "float32"]),
        (lambda: np.ones(4, int), TypeError, ["dtype int64", "float32"]),
        (lambda: np.ones(4, ">f4"), TypeError, ["dtype >f4", "float32"]),
    ],
)
def test_slopes(no_backend, make, error, words):
    words = [f"alibi_slopes has {words[0]}", *words[1:]]
    refused(error, words, cupyflash.attention, *arrays(), alibi_slopes=make())
    refused(error, words, cupyflash.attention_backward, *backward_arguments(), alibi_slopes=make())


@pytest.mark.parametrize("dtype, allowed", [("float16", "float32"), (BF16, "float32"), ("float64", "float64")])
def test_dtype_of_slopes(dtype, allowed):
    """That of lse."""
    args = arrays(dtype=dtype)
    cupyflash.attention(*args, alibi_slopes=np.ones(4, allowed))
    for other in {"float16", "float32", "float64"} - {allowed}:
        refused(TypeError, f"allowed: {allowed}", cupyflash.attention, *args, alibi_slopes=np.ones(4, other))


def test_slopes_without_batch(no_backend):
    words = ["alibi_slopes has shape (2, 4)", "allowed: (4,), (heads_q,)"]
    refused(ValueError, words, cupyflash.attention, *[x[0] for x in arrays()], alibi_slopes=np.ones((2, 4), F32))


@pytest.mark.parametrize(
    "make, error, words",
    [
        (lambda: np.ones(3, F32), ValueError, ["shape (3,)", "(4,), (heads_q,)"]),
        (lambda: np.ones(2, F32), ValueError, ["shape (2,)", "(4,)"]),  # as many as k has
        (lambda: np.ones((2, 4), F32), ValueError, ["shape (2, 4)", "(4,)"]),  # not of each batch
        (lambda: np.ones((1, 4), F32), ValueError, ["shape (1, 4)", "(4,)"]),
        (lambda: np.ones((), F32), ValueError, ["shape ()", "(4,)"]),
        (lambda: np.ones(4), TypeError, ["dtype float64", "float32 for dtype float32"]),
        (lambda: np.ones(4, np.float16), TypeError, ["dtype float16", "float32"]),
        (lambda: np.ones(4, int), TypeError, ["dtype int64", "float32"]),
        (lambda: np.ones(4, ">f4"), TypeError, ["dtype >f4", "float32"]),
    ],
)
def test_sink(no_backend, make, error, words):
    words = [f"sink has {words[0]}", *words[1:]]
    refused(error, words, cupyflash.attention, *arrays(), sink=make())
    refused(error, words, cupyflash.attention_backward, *backward_arguments(), sink=make())


@pytest.mark.parametrize("dtype, allowed", [("float16", "float32"), (BF16, "float32"), ("float64", "float64")])
def test_dtype_of_sink(dtype, allowed):
    """That of lse."""
    args = arrays(dtype=dtype)
    cupyflash.attention(*args, sink=np.ones(4, allowed))
    for other in {"float16", "float32", "float64"} - {allowed}:
        refused(TypeError, f"allowed: {allowed}", cupyflash.attention, *args, sink=np.ones(4, other))


OF_LOGITS = "allowed: what broadcasts to (2, 4, 3, 5), ([batch,] heads_q, seqlen_q, seqlen_k)"


@pytest.mark.parametrize("name, dtype", [("bias", F32), ("mask", bool)])
@pytest.mark.parametrize(
    "shape",
    [(5, 3), (3, 4), (4,), (3,), (2, 5), (0,), (2, 3, 5), (2, 2, 3, 5), (4, 4, 3, 5), (2, 4, 3, 5, 1), (1,) * 5],
    ids=str,
)  # fmt: skip
def test_shape_of_logits(no_backend, name, dtype, shape):
    """As many heads as k has, the axes of another call, one more axis."""
    words = [f"{name} has shape {shape}", OF_LOGITS]
    refused(ValueError, words, cupyflash.attention, *arrays(), **{name: np.ones(shape, dtype)})
    refused(ValueError, words, cupyflash.attention_backward, *backward_arguments(), **{name: np.ones(shape, dtype)})


@pytest.mark.parametrize("name, dtype", [("bias", F32), ("mask", bool)])
@pytest.mark.parametrize("shape", [(1, 4, 3, 5), (1, 1, 1, 1), (2, 3, 5)], ids=str)
def test_shape_of_logits_without_batch(no_backend, name, dtype, shape):
    words = [f"{name} has shape {shape}", "allowed: what broadcasts to (4, 3, 5), ([batch,] heads_q"]
    one = [x[0] for x in arrays()]
    refused(ValueError, words, cupyflash.attention, *one, **{name: np.ones(shape, dtype)})


@pytest.mark.parametrize("dtype", ["float16", BF16, "float32", "float64"])
def test_dtype_of_bias(dtype):
    """Any, but float64 only beside float64."""
    args, allowed = arrays(dtype=dtype), ["float16", "bfloat16", "float32", "float64"]
    if dtype != "float64":
        allowed.pop()
    words = f"allowed: {', '.join(allowed)} for dtype {np.dtype(dtype).name}"
    for given in ("float16", BF16, "float32", "float64", bool, int, "complex64", ">f4"):
        if np.dtype(given) in [np.dtype(BF16 if name == "bfloat16" else name) for name in allowed]:
            cupyflash.attention(*args, bias=np.ones((3, 5), given))
        else:
            words_ = [f"bias has dtype {np.dtype(given)}", words]
            refused(TypeError, words_, cupyflash.attention, *args, bias=np.ones((3, 5), given))


@pytest.mark.parametrize("dtype", [np.uint8, int, F32, "float16", object, "S1"])
def test_dtype_of_mask(no_backend, dtype):
    """No numbers: 1 and 0 could be meant to be added."""
    words = [f"mask has dtype {np.dtype(dtype)}", "allowed: bool, True where a query may see a key"]
    refused(TypeError, words, cupyflash.attention, *arrays(), mask=np.ones((3, 5), dtype))
    refused(TypeError, words, cupyflash.attention_backward, *backward_arguments(), mask=np.ones((3, 5), dtype))


@pytest.mark.parametrize("name", ["alibi_slopes", "sink", "bias"])
def test_strides_by_head_on_the_gpu(name):
    """Any, but of whole elements."""
    scattered = sys.modules["cupyflash.attention"]._scattered
    odd = np.lib.stride_tricks.as_strided(np.zeros(5, F32), (4,), (5,))
    with pytest.raises(ValueError, match=name + r" has strides \(5,\); allowed: multiples of its 4 bytes"):
        scattered(True, {name: odd})
    assert not scattered(True, {name: np.ones((4, 2), F32).T})


def test_a_right_array_in_another_place():
    """What is remembered of a call knows which arguments its arrays were."""
    args, out = arrays(), np.zeros((2, 3, 4, 8), F32)
    cupyflash.attention(*args, out=out)
    refused(ValueError, "alibi_slopes has shape (2, 3, 4, 8)", cupyflash.attention, *args, alibi_slopes=out)
    args = backward_arguments()
    cupyflash.attention_backward(*args, dlse=args[5])
    refused(ValueError, "alibi_slopes has shape", cupyflash.attention_backward, *args, alibi_slopes=args[5])
    refused(ValueError, "sink has shape", cupyflash.attention_backward, *args, sink=args[5])
    one = np.ones(4, F32)
    out, lse = cupyflash.attention(*args[1:4], alibi_slopes=one, return_lse=True)
    with_sink, sink_lse = cupyflash.attention(*args[1:4], sink=one, return_lse=True)
    assert (out != with_sink).any() and (lse != sink_lse).any()
    assert cupyflash.attention_backward(*args, alibi_slopes=one).dsink is None
    assert cupyflash.attention_backward(*args, sink=one).dsink.shape == (4,)
    gradients = cupyflash.attention_backward(*args, bias=one[:, None, None])
    assert gradients.dsink is None and gradients.dbias.shape == (4, 1, 1)


@pytest.mark.parametrize("name", ["deterministic", "bias_gradient"])
@pytest.mark.parametrize("value", [1, 0, None, "dbias", np.ones(1, bool)], ids=str)
def test_switches_of_the_backward(no_backend, name, value):
    """Also without a bias."""
    for options in ({}, {"bias": np.ones(5, F32)}):
        args = *backward_arguments(), {name: value} | options
        refused(
            TypeError, f"{name} is ", lambda *arrays: cupyflash.attention_backward(*arrays[:-1], **arrays[-1]), *args
        )


def test_bias_gradient_without_a_bias():
    """There is none to leave out; and a switch may be one of NumPy."""
    args = backward_arguments()
    expected = cupyflash.attention_backward(*args)
    for value in (False, True, np.False_, np.True_):
        got = cupyflash.attention_backward(*args, bias_gradient=value)
        assert got.dbias is None and all((x == y).all() for x, y in zip(got[:3], expected, strict=False))


def test_a_call_does_not_decide_for_others_about_dbias():
    """What is remembered of a call knows whether it was wanted."""
    args, bias = backward_arguments(), np.ones((3, 5), F32)
    for wanted in (True, False, True, False):
        assert (cupyflash.attention_backward(*args, bias=bias, bias_gradient=wanted).dbias is None) != wanted


def test_unknown_option(no_backend):
    with pytest.raises(TypeError, match="dropout_p"):
        cupyflash.attention(*arrays(), dropout_p=0.1)


def test_a_right_call_does_not_excuse_a_wrong_one():
    """1 == True == 1.0 and 0 == False: what is remembered of a call must tell them apart."""
    args = arrays()
    for options in ({"causal": True}, {"scale": 1.0}, {"softcap": 1.0}, {"window": (1, 1)}, {"causal": False}):
        cupyflash.attention(*args, **options)
    for options in ({"causal": 1}, {"scale": True}, {"softcap": True}, {"window": (True, 1)}, {"causal": 0}):
        refused(TypeError, list(options), cupyflash.attention, *args, **options)


def test_scalars_of_any_kind():
    """cupy/cupy#8485"""
    args = arrays()
    for number in (1, 0, -2, 0.5):
        expected = cupyflash.attention(*args, scale=float(number))
        for kind in (float, np.float64, np.float32, np.float16, Fraction):
            np.testing.assert_array_equal(cupyflash.attention(*args, scale=kind(number)), expected)
        if number == int(number):
            for kind in (int, np.int8, np.int64):
                np.testing.assert_array_equal(cupyflash.attention(*args, scale=kind(number)), expected)


def test_softcap_of_any_kind():
    args = arrays()
    expected = cupyflash.attention(*args, softcap=2.0)
    for kind in (np.float64, np.float32, np.float16, Fraction, int, np.int8):
        np.testing.assert_array_equal(cupyflash.attention(*args, softcap=kind(2)), expected)


def test_options_in_any_spelling():
    args = arrays()
    expected = cupyflash.attention(*args, causal=True, window=(2, None))
    for causal, window in itertools.product((True, np.True_, "lower_right"), ((2, 5), [2, None], (np.int32(2), 0))):
        np.testing.assert_array_equal(cupyflash.attention(*args, causal=causal, window=window), expected)


# --------------------------------------------------------------------------------------------------- out


def test_out_is_returned():
    q, k, v = arrays(dtype=np.float16)
    expected, expected_lse = cupyflash.attention(q, k, v, return_lse=True)
    for dtype in (np.float16, F32):
        out = np.full(q.shape, np.nan, dtype)
        result, lse = cupyflash.attention(q, k, v, out=out, return_lse=True)
        assert result is out
        np.testing.assert_array_equal(out.astype(np.float16), expected)
        np.testing.assert_array_equal(lse, expected_lse)
    assert cupyflash.attention(q, k, v, out=out) is out


@pytest.mark.parametrize(
    "out, error, words",
    [
        (np.zeros((2, 3, 4, 7), F32), ValueError, ["out has shape (2, 3, 4, 7)", "(2, 3, 4, 8)"]),
        (np.zeros((1, 3, 4, 8), F32), ValueError, "out has shape (1, 3, 4, 8)"),
        (np.zeros((3, 4, 8), F32), ValueError, "out has shape (3, 4, 8)"),
        (np.zeros((2, 3, 4, 8), "f8"), TypeError, ["out has dtype float64", "float32"]),
        (np.zeros((2, 3, 4, 8), "f2"), TypeError, ["out has dtype float16", "float32"]),
        (np.zeros((2, 3, 4, 8), ">f4"), TypeError, "out has dtype >f4"),
        (np.broadcast_to(F32(0), (2, 3, 4, 8)), ValueError, ["out has shape", "overlap"]),
        ([0], TypeError, "out is a list"),
    ],
)
def test_out(no_backend, out, error, words):
    refused(error, words, cupyflash.attention, *arrays(), out=out)


def test_out_of_16_bit_inputs(no_backend):
    q, k, v = arrays(dtype=BF16)
    words = ["out has dtype float16", "bfloat16 or float32"]
    refused(TypeError, words, cupyflash.attention, q, k, v, out=np.zeros(q.shape, "f2"))


def test_out_read_only(no_backend):
    q, k, v = arrays()
    out = np.zeros_like(q)
    out.flags.writeable = False
    for _ in range(2):  # a call that looks alike came before
        refused(ValueError, ["out is a read-only array", "NumPy"], cupyflash.attention, q, k, v, out=out)


def test_out_overlaps_itself():
    q, k, v = arrays()
    out = np.zeros_like(q)
    cupyflash.attention(q, k, v, out=out)
    twice = np.lib.stride_tricks.as_strided(out, out.shape, (0, *out.strides[1:]))
    refused(ValueError, "its elements overlap", cupyflash.attention, q, k, v, out=twice)


def test_out_overlaps_inputs():
    q, k, v = arrays((1, 4, 2, 8), (1, 4, 2, 8))
    assert cupyflash.attention(q, k, v, out=np.empty_like(q)) is not None  # the same layout, in memory of its own
    before = [x.copy() for x in (q, k, v)]
    for name, x in (("q", q), ("k", k), ("v", v)):
        refused(ValueError, f"out shares memory with {name}", cupyflash.attention, q, k, v, out=x)
        refused(ValueError, f"out shares memory with {name}", cupyflash.attention, q, k, v, out=x[:, ::-1])
    buffer = np.ones((1, 5, 2, 8), F32)
    refused(ValueError, "memory with k", cupyflash.attention, q, buffer[:, :4], v, out=buffer[:, 1:])
    for x, y in zip((q, k, v), before, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("name", ["alibi_slopes", "sink"])
def test_out_overlaps_what_a_head_has(name):
    q, k, v = arrays()
    memory = np.zeros(q.size + 4, F32)
    out = memory[:-4].reshape(q.shape)
    assert cupyflash.attention(q, k, v, out=out, **{name: memory[-4:]}) is out
    for given in (memory[2:6], memory[-5:-1], memory[::48][:4]):
        refused(ValueError, f"memory with {name}", cupyflash.attention, q, k, v, out=out, **{name: given})


@pytest.mark.parametrize("name, dtype", [("bias", F32), ("mask", bool)])
def test_out_overlaps_what_is_broadcast(name, dtype):
    q, k, v = arrays()
    memory = np.zeros(q.size + 15, F32)
    out, beside = memory[:-15].reshape(q.shape), memory[-15:].view(dtype)[:15].reshape(3, 5)
    assert cupyflash.attention(q, k, v, out=out, **{name: beside}) is out
    for given in (memory[:5].view(dtype)[:5], np.broadcast_to(memory[7:8].view(dtype)[:1], (2, 4, 3, 5))):
        refused(ValueError, f"memory with {name}", cupyflash.attention, q, k, v, out=out, **{name: given})


def test_out_may_lie_between_the_inputs():
    """One projection, four slices: no element is shared, although the ranges of addresses are."""
    fused = np.random.default_rng(0).normal(size=(2, 3, 4, 2, 8)).astype(F32)
    q, k, v, out = (fused[:, :, i] for i in range(4))
    expected = cupyflash.attention(q.copy(), k.copy(), v.copy())
    inputs = fused[:, :, :3].copy()
    assert cupyflash.attention(q, k, v, out=out) is out
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(fused[:, :, :3], inputs)


@pytest.mark.parametrize(
    "make, overlaps",
    [
        (lambda x: x.reshape(2, 3, 4, 8), False),
        (lambda x: x.reshape(4, 3, 8, 2).transpose(3, 1, 0, 2), False),
        (lambda x: x.reshape(2, 3, 4, 8)[::-1, :, ::-1], False),
        (lambda x: x[: 3 * 4 * 8].reshape(1, 3, 4, 8).repeat(1, 0), False),
        (lambda x: np.lib.stride_tricks.as_strided(x, (1, 3, 4, 8), (0, 128, 32, 4)), False),
        (lambda x: np.lib.stride_tricks.as_strided(x, (1, 3, 4, 8), (10**12, 128, 32, 4)), False),
        (lambda x: np.lib.stride_tricks.as_strided(x, (2, 3, 4, 8), (0, 128, 32, 4)), True),
        (lambda x: np.lib.stride_tricks.as_strided(x, (2, 3, 4, 8), (128, 32, 32, 4)), True),
        (lambda x: np.lib.stride_tricks.as_strided(x, (2, 3, 4, 8), (64, 16, 8, 4)), True),
        (lambda x: np.lib.stride_tricks.as_strided(x, (2, 3, 4, 8), (384, -128, 32, -2)), True),
        (lambda x: np.lib.stride_tricks.as_strided(x, (0, 3, 4, 8), (0, 0, 0, 0)), False),
    ],
)
def test_overlap_within(make, overlaps):
    assert checks._overlaps_itself(make(np.zeros(192, F32))) is overlaps


# ------------------------------------------------------------------------------------------- the problem


@pytest.mark.parametrize("seqlen_q, seqlen_k", [(1, 1), (1, 4), (4, 1), (3, 5), (5, 3), (4, 4)])
def test_band(seqlen_q, seqlen_k):
    """The band of every window is the mask that defines it, and a side is None where it hides nothing."""
    q, k, _ = arrays((1, seqlen_q, 1, 8), (1, seqlen_k, 1, 8))
    i, j = np.ogrid[:seqlen_q, :seqlen_k]
    sides = [None, 0, 1, 2, 3, 4, 5, 6, 10**9, 2**31 - 1, 2**62]
    for causal, left, right in itertools.product((False, True, "lower_right", "upper_left"), sides, sides):
        diagonal = i if causal == "upper_left" else i + seqlen_k - seqlen_q
        visible = np.ones((seqlen_q, seqlen_k), bool)
        if causal:
            visible &= j <= diagonal
        seen_right = visible.copy() if right is None else visible & (j <= diagonal + min(right, 99))
        seen_left = np.ones_like(visible) if left is None else j >= diagonal - min(left, 99)
        problem = checks.forward(False, checks.options(causal, (left, right), None), q=q, k=k, v=k)
        assert (problem.left is None) == seen_left.all()
        assert (problem.right is None) == seen_right.all()
        band = np.ones_like(visible)
        if problem.left is not None:
            band &= j >= i + problem.diagonal - problem.left
        if problem.right is not None:
            band &= j <= i + problem.diagonal + problem.right
        np.testing.assert_array_equal(band, seen_left & seen_right)
        assert problem.diagonal == 0 or problem.banded


def test_equal_problems_are_equal():
    q, k, _ = arrays((1, 7, 1, 8), (1, 7, 1, 8))

    def problem(causal=False, window=None, scale=None, softcap=None, slopes=None, sink=None, **more):
        options = checks.options(causal, window, scale, softcap)
        return checks.forward(False, options, q=q, k=k, v=k, alibi_slopes=slopes, sink=sink, **more)

    assert problem() == problem(window=(None, None)) == problem(window=(6, 6)) == problem(scale=8**-0.5)
    assert problem(window=(2**31 - 1, 2**31 - 1)) == problem()
    causal = problem(causal=True)
    assert causal == problem("lower_right") == problem("upper_left") == problem(window=(None, 0))
    assert causal == problem(True, (6, 3)) == problem(True, (10**9, None)) == problem(window=(7, 0)) != problem()
    assert problem(window=(0, 0)).left == 0 != problem(window=(1, 0)).left
    assert problem(softcap=2) == problem(softcap=np.float16(2)) != problem() == problem(softcap=None)
    one, two = np.ones(1, F32), np.zeros((1, 1), F32)
    assert problem(slopes=one) == problem(slopes=two) != problem() and problem(slopes=one).alibi
    assert problem(sink=one) == problem(sink=two[0]) != problem() and problem(sink=one).sink
    assert problem(sink=one) != problem(slopes=one) != problem(slopes=one, sink=one)
    assert problem(bias=one) == problem(bias=two[0]) != problem() and problem(bias=one).bias == "float32"
    assert problem(bias=one) != problem(bias=one.astype(BF16)) and problem(mask=one > 0) != problem()


@pytest.mark.parametrize("causal, diagonal", [(False, 4), (True, 4), ("upper_left", 0)])
def test_diagonal_of_slopes(causal, diagonal):
    """It counts where no key is hidden, too."""
    q, k, _ = arrays((1, 3, 1, 8), (1, 7, 1, 8))
    for window in (None, (9, 9)):
        options = checks.options(causal, window, None)
        assert checks.forward(False, options, q=q, k=k, v=k, alibi_slopes=np.ones(1, F32)).diagonal == diagonal


def test_no_batch():
    q, k, v = arrays()
    out, lse = cupyflash.attention(q, k, v, return_lse=True, causal=True)
    one, one_lse = cupyflash.attention(q[1], k[1], v[1], return_lse=True, causal=True)
    assert one.shape == (3, 4, 8) and one_lse.shape == (4, 3)
    np.testing.assert_array_equal(one, out[1])
    np.testing.assert_array_equal(one_lse, lse[1])
    grads = cupyflash.attention_backward(out, q, k, v, out, lse, causal=True)
    one_grads = cupyflash.attention_backward(one, q[1], k[1], v[1], one, one_lse, dlse=None, causal=True)
    for grad, one_grad in zip(grads[:3], one_grads[:3], strict=True):
        np.testing.assert_array_equal(one_grad, grad[1])


@pytest.mark.parametrize(
    "q, k", [((2, 3, 4, 8), (2, 0, 2, 8)), ((2, 0, 4, 8), (2, 5, 2, 8)), ((0, 3, 4, 8), (0, 5, 2, 8)),
             ((2, 3, 0, 8), (2, 5, 0, 8)), ((2, 3, 0, 8), (2, 5, 2, 8)), ((3, 4, 8), (0, 2, 8))]
)  # fmt: skip
@pytest.mark.parametrize("causal", [False, True])
def test_empty(no_backend, monkeypatch, q, k, causal):
    """Nothing to compute: the backend is not called."""
    monkeypatch.setattr("cupyflash.interop.Home.empty", lambda self, *args: (x := np.ndarray(*args), x))
    q, k, v = arrays(q, k, (*k[:-1], 6))
    out = np.full((*q.shape[:-1], 6), np.nan, F32)
    result, lse = cupyflash.attention(q, k, v, causal=causal, window=(2, 2), out=out, return_lse=True)
    assert result is out and not out.any() and np.isneginf(lse).all()
    assert lse.shape == (*q.shape[:-3], q.shape[-2], q.shape[-3])
    grads = cupyflash.attention_backward(out, q, k, v, out, lse, dlse=lse, causal=causal)
    for grad, x in zip(grads[:3], (q, k, v), strict=True):
        assert grad.shape == x.shape and grad.dtype == x.dtype and not grad.any()


def test_what_is_remembered_is_bounded(monkeypatch):
    module = sys.modules["cupyflash.attention"]
    monkeypatch.setattr(module, "_MAX_PLANS", 8)
    module._plans.clear()
    q, k, v = arrays((1, 1, 1, 8), (1, 1, 1, 8))
    for scale in range(100):
        cupyflash.attention(q, k, v, scale=scale)
        assert len(module._plans) <= 8
    assert cupyflash.attention(q, k, v, scale=99) is not None and len(module._plans) <= 8


@pytest.mark.parametrize("name", ["attention", "merge", "padding", "varlen"])
def test_examples(name):
    """The examples of the docstrings."""
    failed, tried = doctest.testmod(sys.modules[f"cupyflash.{name}"])
    assert tried and not failed


# ------------------------------------------------------------------------------------------------ import


def run(code, **env):
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | env, cwd=ROOT
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def test_import_brings_no_other_library():
    """mars-project/mars#479, cupy/cupy#1790: nothing that could start CUDA, and nothing that may be missing."""
    code = """
import sys, cupyflash, numpy as np
q = np.ones((1, 2, 1, 8), np.float16)
out, lse = cupyflash.attention(q, q, q, return_lse=True)
cupyflash.attention_backward(out, q, q, q, out, lse)
cupyflash.merge_attention((out, lse), (out, lse))
print([name for name in ("cupy", "torch", "jax", "cuda") if name in sys.modules])
"""
    assert run(code).strip() == "[]"


def test_gpu_arrays_without_cupy():
    """cupy/cupy#1790: another library has a GPU, CuPy is not there."""
    code = """
import sys, numpy as np
sys.modules["cupy"] = None
import cupyflash
class Array:
    __dlpack__ = None
    def __dlpack_device__(self): return 2, 0
    def __array_namespace__(self): return np
try:
    cupyflash.attention(Array(), Array(), Array())
except ImportError as error:
    print(error)
"""
    message = run(code)
    assert "CuPy" in message and 'pip install "cupyflash[cuda13]"' in message


def test_fork_after_import():
    """mars-project/mars#479"""
    code = """
import os, numpy as np, cupyflash
q = np.ones((1, 2, 1, 8), np.float32)
cupyflash.attention(q, q, q)
if pid := os.fork():
    print(os.waitpid(pid, 0)[1])
else:
    os._exit(int(not (cupyflash.attention(q, q, q) == 1).all()))
"""
    assert run(code).strip() == "0"


@pytest.mark.gpu
def test_fork_then_gpu():
    """mars-project/mars#479: import in the parent starts no CUDA, so that a child can."""
    code = """
import os, cupyflash, numpy as np
if pid := os.fork():
    print(os.waitpid(pid, 0)[1])
else:
    import cupy
    q = cupy.ones((1, 2, 1, 8), cupy.float16)
    os._exit(int(not (cupyflash.attention(q, q, q) == 1).all()))
"""
    assert run(code).strip() == "0"
