"""The CUDA sources and their compiler: one string, structs as in NumPy, no spills, errors that say what is wrong."""

import dataclasses
import json
import os
import re
import shutil
import struct
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import tools

from cupyflash import choose, compiler, precise, spec, structs
from cupyflash.problem import Problem
from cupyflash.spec import Variant

needs_nvrtc = pytest.mark.skipif(bool(tools.nvrtc_missing()), reason=str(tools.nvrtc_missing()))
KERNELS = compiler.kernel_dir()
HEADERS = sorted(path.relative_to(KERNELS).as_posix() for path in KERNELS.rglob("*.cuh"))
TOP_HEADERS = (
    *("any/around_backward.cuh", "any/mask_words.cuh", "any/segments.cuh", "any/sink.cuh"),
    *("sm80/forward.cuh", "sm80/backward.cuh", "sm80/bias_gradient.cuh"),
    *("sm90/forward.cuh", "sm90/backward.cuh", "sm90/backward_keys.cuh", "sm90/backward_queries.cuh"),
    "sm90/bias_gradient.cuh",
    *("precise/forward.cuh", "precise/backward.cuh", "precise/split.cuh", "sm90/precise_forward.cuh"),
    "sm90/precise_backward.cuh",
    "sm80/mod_gradient.cuh",
)
LIMIT = 232448


def forward(head_dim=64, head_dim_v=None, dtype="float16", access=16, float32_out=False, limit=LIMIT):
    problem = Problem(dtype, 1, 1, 1, 1, 1, head_dim, head_dim_v or head_dim, 1.0)
    return choose.forward(problem, access, float32_out, limit)


def backward(head_dim=64, head_dim_v=None, dtype="float16", access=16, deterministic=False, limit=LIMIT):
    problem = Problem(dtype, 1, 1, 1, 1, 1, head_dim, head_dim_v or head_dim, 1.0)
    return choose.backward(problem, access, deterministic, limit)


def hopper_forward(head_dim=64, head_dim_v=None, dtype="float16", access=16, float32_out=False, right=None, group=1):
    problem = Problem(dtype, 1, 1, 1, group, 1, head_dim, head_dim_v or head_dim, 1.0, right=right)
    return choose.hopper_forward(problem, access, float32_out)


def hopper_backward(head_dim=64, head_dim_v=None, dtype="float16", access=16, deterministic=False):
    problem = Problem(dtype, 1, 1, 1, 1, 1, head_dim, head_dim_v or head_dim, 1.0)
    return choose.hopper_backward(problem, access, deterministic)


def split_backward(head_dim=256, head_dim_v=None, dtype="float16", access=16):
    problem = Problem(dtype, 1, 1, 1, 1, 1, head_dim, head_dim_v or head_dim, 1.0)
    return choose.hopper_split_backward(problem, access)


EVERY_OPTION = {"mask": True, "softcap": 2.0, "alibi": True, "dropout": 0.5}


def bias_gradient(head_dim, head_dim_v=None, dtype="float16", bias="float32", shape=(1, 4, 300, 300), access=16,
                  packed=False, limit=LIMIT, **options):  # fmt: skip
    problem = Problem(dtype, 2, 300, 300, 4, 4, head_dim, head_dim_v or head_dim, 1.0, bias=bias, **options)
    before = Variant("", "", dtype, spec.PrepareSpec(head_dim, head_dim, packed, False, access))
    return choose.bias_gradient(problem, before, shape, access, limit)


def hopper_bias_gradient(head_dim, head_dim_v=None, dtype="float16", bias="float32", seqlen=300, packed=False,
                         **options):  # fmt: skip
    head_dim_v = head_dim_v or head_dim
    problem = Problem(dtype, 2, seqlen, seqlen, 4, 4, head_dim, head_dim_v, 1.0, bias=bias, **options)
    before = Variant("", "", dtype, spec.PrepareSpec(head_dim, head_dim_v, packed, False, 16))
    return choose.hopper_bias_gradient(problem, before, 128 if packed else 64)


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    """A copy of the CUDA sources that may be changed, under a path that is not ASCII."""
    folder = tmp_path / "kërnels 核"
    shutil.copytree(KERNELS, folder)
    monkeypatch.setattr(compiler, "kernel_dir", lambda: folder)
    compiler.source.cache_clear()
    yield folder
    compiler.source.cache_clear()


# --- The sources


def enclosed(text, at):
    """`text` from its parenthesis or brace at `at` to the one that closes it."""
    depth = 0
    for end in range(at, len(text)):
        depth += (text[end] in "({") - (text[end] in ")}")
        if depth == 0:
            return text[at : end + 1]


@pytest.mark.parametrize("header", HEADERS)
def test_all_lanes_shuffle(header):
    """What one lane does alone waits for no other: `warp_index` is a shuffle, in which it would wait forever."""
    code = re.sub(r"//.*", "", (KERNELS / header).read_text(encoding="ascii"))
    for found in re.finditer(r"\bif (?:constexpr )?(?=\()", code):
        condition = enclosed(code, found.end())
        after = code[found.end() + len(condition) :].lstrip()
        alone = enclosed(after, 0) if after.startswith("{") else after.partition(";")[0]
        if "lane_index()" in condition:
            assert not re.search(r"\b(warp_index|same_in_warp|sum_of_warp|\w+_sync|__syncwarp)\b", alone), alone


@pytest.mark.parametrize("header", HEADERS)
def test_header(header):
    text = (KERNELS / header).read_text(encoding="ascii")  # NVRTC and the C locale need nothing else
    includes = re.findall(r"^\s*#\s*include\s*(.*)$", text, re.MULTILINE)
    assert all(include.strip('"') in HEADERS for include in includes), "CUDA headers are neither needed nor shipped"
    assert text.count("#pragma once") == 1
    code = re.sub(r"//.*", "", text)
    instructions = re.findall(r"\basm\b(?:\s+volatile)?\s*\(\s*(\"[^\"]*\")", code)
    assert len(instructions) == len(re.findall(r"\basm\b", code))
    if header == "sm90/wgmma.cuh":  # nothing but one instruction and the predicate that it takes
        texts = re.findall(r"\basm volatile\((.*?):", re.sub(r"\s*\\\n\s*", " ", code))
        assert len(texts) == len(instructions) == 5
        for text in texts:
            written = "".join(re.findall(r'"([^"]*)"', text)).replace("{ .reg .pred p;", "")
            executed = [line.split()[0] for line in written.split(";") if line.strip(" }")]
            assert executed[:-1] in ([], ["setp.ne.b32"])
            assert executed[-1].startswith("wgmma.mma_async.sync.aligned.m64n")
    elif not header.endswith("/ptx.cuh"):
        empty = header == "core/types.cuh"  # opaque() keeps a value from the optimizer and executes nothing
        assert set(instructions) <= ({'""'} if empty else set()), "PTX belongs into ptx.cuh"


def test_top_headers():
    """They are what the tables hold, on any GPU, and what packed sequences, a bias and a function of the user need."""
    variants = [variant for capability in choose.SHARED_LIMIT for variant in choose.variants(capability)]
    more = {choose.segments(variants[0]).header, bias_gradient(64).header, hopper_bias_gradient(64).header}
    more |= {"sm80/mod_gradient.cuh", "any/mask_words.cuh"}
    assert {variant.header for variant in variants} == set(TOP_HEADERS) - more


def test_no_other_files():
    assert {path.suffix for path in KERNELS.rglob("*") if path.is_file()} - {".pyc"} == {".cuh", ".py"}


@pytest.mark.parametrize("header", TOP_HEADERS)
def test_source_is_self_contained(header):
    text = compiler.source(header)
    assert "#include" not in text and "#pragma once" not in text and text.isascii()
    assert str(KERNELS) not in text, "CuPy's cache must not depend on where the package lies"
    parts = re.findall(r'^#line 1 "(.+)"$', text, re.MULTILINE)
    assert parts[0] == header and set(parts) <= set(HEADERS) and len(parts) == len(set(parts))
    for part in parts:
        lines = (KERNELS / part).read_text().splitlines()
        kept = [line for line in lines if not line.startswith("#include") and line != "#pragma once"]
        assert all(line in text for line in kept)


def test_every_header_is_used():
    used = {part for header in TOP_HEADERS for part in re.findall(r'#line 1 "(.+)"', compiler.source(header))}
    assert used == set(HEADERS)


@pytest.mark.parametrize("header", TOP_HEADERS)
def test_a_changed_header_is_a_changed_source(kernels, header):
    before = compiler.source(header)
    for part in set(re.findall(r'#line 1 "(.+)"', before)):
        text = (kernels / part).read_text()
        (kernels / part).write_text(text + "// changed\n")
        compiler.source.cache_clear()
        assert compiler.source(header) != before
        (kernels / part).write_text(text)
    compiler.source.cache_clear()
    assert compiler.source(header) == before


def test_a_missing_header_is_named(kernels):
    (kernels / "core" / "band.cuh").unlink()
    with pytest.raises(FileNotFoundError, match=r"core.band\.cuh is missing; install it again"):
        compiler.source("sm80/forward.cuh")


def test_missing_sources_are_named(kernels):
    shutil.rmtree(kernels)
    with pytest.raises(FileNotFoundError, match=r"sm80.forward\.cuh is missing; install it again"):
        compiler.source("sm80/forward.cuh")


@needs_nvrtc
def test_an_error_names_file_and_line(kernels):
    path = kernels / "core" / "softmax.cuh"
    lines = path.read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if "__any_sync(kFullWarp, grew)" in line)
    lines[at] = "    no_such_function();"
    path.write_text("\n".join(lines))
    with pytest.raises(RuntimeError) as error:
        compiler.compile_offline(forward(), "sm_90")
    assert f"core/softmax.cuh({at + 1})" in str(error.value) and "no_such_function" in str(error.value)
    assert "ForwardSpec{.head_dim=64" in str(error.value) and "sm_90" in str(error.value)


# --- Twins: a struct of NumPy or a dataclass, and the same struct in C++

TWINS_HEADER = """
#define OFFSET(type, member) __INTADDR__(&((type*)0)->member)  // offsetof, whose header NVRTC may lack
template <class A, class B> struct Same { static constexpr bool value = false; };
template <class A> struct Same<A, A> { static constexpr bool value = true; };
template <class A> struct Pointer { static constexpr bool value = false; };
template <class A> struct Pointer<A*> { static constexpr bool value = true; };
"""
CPP_TYPES = {
    "i4": "int",
    "u4": "unsigned int",
    "i8": "long long",
    "u8": "unsigned long long",
    "f4": "float",
    "f8": "double",
}


def same_struct(name, dtype, nested, derived=False):
    """C++ that compiles only if the struct `name` is laid out as `dtype`; of a derived one, C++ does not count."""
    struct_ = f"cupyflash::{name}"
    lines = [f"static_assert(sizeof({struct_}) == {dtype.itemsize});"]
    for field, (kind, offset, *_) in dtype.fields.items():
        member = f"decltype({struct_}::{field})"
        lines.append(f"static_assert(OFFSET({struct_}, {field}) == {offset});")
        if kind.str[1:] == "u8" and field != "seed":
            lines.append(f"static_assert(Pointer<{member}>::value && sizeof({member}) == 8);")
        else:  # an array of one dtype is nested too: a tensor map
            item, shape = kind.subdtype or (kind, ())
            cpp = nested.get(kind) or CPP_TYPES[item.str[1:]] + "".join(f"[{n}]" for n in shape)
            lines.append(f"static_assert(Same<{member}, {cpp}>::value);")
    return lines + ([] if derived else same_count(name, len(dtype.fields)))


def same_count(name, count):
    """C++ that compiles only if the struct has `count` members."""
    names = ", ".join(f"m{i}" for i in range(count))
    return [f"__device__ inline void count(const cupyflash::{name}& s) {{ const auto& [{names}] = s; }}"]


def same_spec(record):
    """C++ that compiles only if the spec has the fields of the dataclass in its order and with its types."""
    name = f"cupyflash::{record.__name__}"
    fields = dataclasses.fields(record)
    lines = [f"static_assert(Same<decltype({name}::{f.name}), {f.type}>::value);" for f in fields]
    for a, b in zip(fields, fields[1:]):
        lines.append(f"static_assert(OFFSET({name}, {a.name}) < OFFSET({name}, {b.name}));")
    return lines + same_count(record.__name__, len(fields))


def compile_twins(lines, header="sm90/forward.cuh"):
    tools.nvrtc_compile(compiler.source(header) + TWINS_HEADER + "\n".join(lines), (), "sm_90a")


NESTED = {
    structs.ARRAY: "cupyflash::Array",
    structs.ROW_ARRAY: "cupyflash::RowArray",
    structs.SIZES: "cupyflash::Sizes",
    structs.MAP: "cupyflash::TensorMap",
    structs.ORDER: "cupyflash::Order",
    structs.SCORE: "cupyflash::Score",
    structs.SINK: "cupyflash::Sink",
    structs.DROPOUT: "cupyflash::Dropout",
    structs.LOGIT_ARRAY: "cupyflash::LogitArray",
    structs.BIAS_GRADIENT: "cupyflash::BiasGradient",
    structs.LOGIT_MAP: "cupyflash::LogitMap",
    structs.BLOCKS: "cupyflash::BlockMask",
    structs.MASK_WORDS: "cupyflash::MaskWords",
    structs.SEGMENTS: "cupyflash::Segments",
    structs.TILE_LISTS: "cupyflash::TileList[cupyflash::kTileKinds]",
    structs.LENGTHS: "cupyflash::Lengths",
    structs.CLEARED: "cupyflash::Cleared",
    structs.HALVES: "cupyflash::Halves",
}


@needs_nvrtc
def test_struct_twins():
    twins = {
        "Array": structs.ARRAY,
        "RowArray": structs.ROW_ARRAY,
        "Sizes": structs.SIZES,
        "Order": structs.ORDER,
        "Score": structs.SCORE,
        "Sink": structs.SINK,
        "Dropout": structs.DROPOUT,
        "LogitArray": structs.LOGIT_ARRAY,
        "BiasGradient": structs.BIAS_GRADIENT,
        "LogitMap": structs.LOGIT_MAP,
        "BlockMask": structs.BLOCKS,
        "TileList": structs.TILE_LIST,
        "Segments": structs.SEGMENTS,
        "ForwardParams": structs.FORWARD_PARAMS,
        "BackwardParams": structs.BACKWARD_PARAMS,
        "HopperForwardParams": structs.HOPPER_FORWARD_PARAMS,
    }
    lines = [line for name, dtype in twins.items() for line in same_struct(name, dtype, NESTED)]
    for name, dtype, alignment in (
        ("TensorMap", structs.MAP, 64),
        ("HopperForwardParams", None, 64),
        ("Array", None, 8),
    ):
        lines.append(f"static_assert(alignof(cupyflash::{name}) == {alignment});")
        if dtype:
            lines.append(f"static_assert(sizeof(cupyflash::{name}) == {dtype.itemsize});")
    compile_twins(lines)
    lines = same_struct("HopperBackwardParams", structs.HOPPER_BACKWARD_PARAMS, NESTED, derived=True)
    lines.append(f"static_assert(cupyflash::kStatisticTile == {structs.STATISTIC_TILE});")
    compile_twins(lines, "sm90/backward_params.cuh")
    for name, dtype in (
        ("PreciseForwardParams", structs.PRECISE_FORWARD_PARAMS),
        ("PreciseBackwardParams", structs.PRECISE_BACKWARD_PARAMS),
    ):
        compile_twins(same_struct(name, dtype, NESTED, derived=True), "precise/params.cuh")
    for name, dtype in (
        ("HalvesParams<false>", structs.HALVES_FORWARD_PARAMS),
        ("HalvesParams<true>", structs.HALVES_BACKWARD_PARAMS),
        ("HopperPreciseForwardParams", structs.HOPPER_PRECISE_FORWARD_PARAMS),
        ("HopperPreciseBackwardParams", structs.HOPPER_PRECISE_BACKWARD_PARAMS),
    ):
        compile_twins(same_struct(name, dtype, NESTED, derived=True), "sm90/precise_params.cuh")
    twins = {"Halves": structs.HALVES, "Scales": structs.SCALES}
    compile_twins([x for name, dtype in twins.items() for x in same_struct(name, dtype, NESTED)], "precise/params.cuh")
    twins = {"Lengths": structs.LENGTHS, "Cleared": structs.CLEARED, "SegmentsParams": structs.SEGMENTS_PARAMS}
    lines = [line for name, dtype in twins.items() for line in same_struct(name, dtype, NESTED)]
    lines.append(f"static_assert(sizeof(cupyflash::Segment) == {4 * structs.SEGMENT_WORDS});")
    lines.append(f"static_assert(cupyflash::Segments::kHead == {structs.TABLE_HEAD});")
    compile_twins(lines, "any/segments.cuh")
    twins = {"MaskWords": structs.MASK_WORDS, "MaskWordsParams": structs.MASK_WORDS_PARAMS}
    lines = [line for name, dtype in twins.items() for line in same_struct(name, dtype, NESTED)]
    compile_twins(lines, "any/mask_words.cuh")
    for name in structs.BACKWARD_PARAMS.names:  # the kernels before and after take the first part as theirs
        assert structs.HOPPER_BACKWARD_PARAMS.fields[name] == structs.BACKWARD_PARAMS.fields[name]


def moved(dtype, by):
    fields = [dtype.fields[name] for name in dtype.names]
    offsets = [offset + by * (kind == dtype["out"]) for kind, offset in fields]
    names, formats = list(dtype.names), [kind for kind, _ in fields]
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": dtype.itemsize})


@needs_nvrtc
def test_a_wrong_twin_of_the_struct_of_hopper_is_seen():
    right = structs.HOPPER_FORWARD_PARAMS
    smaller = np.dtype({"names": ["q"], "formats": [structs.MAP], "offsets": [0], "itemsize": 576})
    for wrong in (moved(right, 8), renamed(right, "q", "query"), smaller):
        with pytest.raises(RuntimeError, match="static assertion failed|has no member|more elements than"):
            compile_twins(same_struct("HopperForwardParams", wrong, NESTED))


def renamed(dtype, old, new):
    return np.dtype([(new if n == old else n, dtype.fields[n][0]) for n in dtype.names], align=True)


def swapped(dtype, a, b):
    names = [{a: b, b: a}.get(n, n) for n in dtype.names]
    return np.dtype([(n, dtype.fields[n][0]) for n in names], align=True)


@needs_nvrtc
@pytest.mark.parametrize(
    "wrong",
    [
        lambda sizes: renamed(sizes, "low", "lower"),
        lambda sizes: swapped(sizes, "low", "high"),
        lambda sizes: swapped(sizes, "scale_log2", "section"),
        lambda sizes: np.dtype([(n, sizes.fields[n][0]) for n in sizes.names[:-1]], align=True),
        lambda sizes: np.dtype([*((n, sizes.fields[n][0]) for n in sizes.names), ("more", "i4")], align=True),
        lambda sizes: np.dtype([(n, "i4") for n in sizes.names], align=True),
        lambda sizes: np.dtype([(n, "i8") for n in sizes.names], align=True),
    ],
    ids=["renamed", "swapped", "swapped types", "one less", "one more", "wrong type", "wrong size"],
)
def test_a_wrong_struct_twin_is_seen(wrong):
    with pytest.raises(RuntimeError, match="static assertion failed"):
        compile_twins(same_struct("Sizes", wrong(structs.SIZES), {}))


SPECS = (
    *(spec.ForwardSpec, spec.HopperForwardSpec, spec.BackwardSpec),
    *(spec.HopperBackwardSpec, spec.HopperKeysSpec, spec.HopperQueriesSpec, spec.PrepareSpec, spec.SinkSpec),
    *(spec.BiasGradientSpec, spec.HopperBiasGradientSpec, spec.BiasSumSpec),
    *(spec.PreciseForwardSpec, spec.PreciseKeysSpec, spec.PreciseQueriesSpec, spec.PreciseDeltaSpec),
    *(spec.SplitSpec, spec.HopperPreciseSpec, spec.HopperPreciseKeysSpec, spec.HopperPreciseQueriesSpec),
    *(spec.ModGradientSpec, spec.MaskWordsSpec),
)


@needs_nvrtc
def test_spec_twins():
    compile_twins([line for record in SPECS for line in same_spec(record)])


@needs_nvrtc
@pytest.mark.parametrize("record", SPECS)
def test_a_wrong_spec_twin_is_seen(record):
    fields = [(f.name, f.type) for f in dataclasses.fields(record)]
    for wrong in (fields[:-1], [fields[1], fields[0], *fields[2:]], [*fields[:-1], ("acces", "int")]):
        with pytest.raises(RuntimeError, match="static assertion failed|more elements than"):
            compile_twins(same_spec(dataclasses.make_dataclass(record.__name__, wrong)))


@needs_nvrtc
@pytest.mark.parametrize(
    "old, new",
    [(".warps=4", ".warp=4"), (".block_q=128, .block_k=64", ".block_k=64, .block_q=128"), (".access=16", ".access=&x")],
    ids=["no such field", "another order", "no number"],
)
def test_the_compiler_checks_the_fields_of_a_spec(old, new):
    right = forward()
    text = right.spec.cpp()
    assert old in text
    wrong = SimpleNamespace(cpp=lambda: text.replace(old, new), shared_bytes=0)
    with pytest.raises(RuntimeError, match="does not compile for sm_90"):
        compiler.compile_offline(dataclasses.replace(right, spec=wrong), "sm_90")


@needs_nvrtc
def test_a_tile_that_is_no_multiple_of_16_is_refused():
    right = forward()
    wrong = dataclasses.replace(right.spec, head_dim=40)
    with pytest.raises(RuntimeError, match="a tile is a whole number of mma steps wide"):
        compiler.compile_offline(dataclasses.replace(right, spec=wrong), "sm_90")


@needs_nvrtc
def test_roles_that_would_wait_for_registers_are_refused():
    right = hopper_backward(128)
    wrong = dataclasses.replace(right.spec, groups=3)
    with pytest.raises(RuntimeError, match="what the roles take is more than a block has"):
        compiler.compile_offline(dataclasses.replace(right, spec=wrong), "sm_90")


# --- The machine code

HMMA = 0x23C  # low 12 bits of a 16-byte instruction: HMMA.16816 and HMMA.1688
DMMA = 0x23F
HGMMA = (0x9F0, 0xDF0)  # with the left operand in shared memory, and in registers
LOCAL = (0x387, 0x983)  # STL, LDL


def instructions(cubin):
    """How often each opcode occurs, and the flags of the ELF file that name the architecture: CUDA 13 moved it."""
    assert cubin[:4] == b"\x7fELF", "not machine code: an older driver cannot load PTX of a newer NVRTC"
    (start,) = struct.unpack_from("<Q", cubin, 40)
    (flags,) = struct.unpack_from("<I", cubin, 48)
    count, names = struct.unpack_from("<HH", cubin, 60)
    sections = [struct.unpack_from("<IIQQQQ", cubin, start + 64 * i) for i in range(count)]
    found = Counter()
    for name, _, _, _, offset, size in sections:
        begin = sections[names][4] + name
        if cubin[begin : begin + 6] == b".text.":
            found.update(word & 0xFFF for word in struct.unpack_from(f"<{size // 2}H", cubin, offset)[::8])
    return found, (flags & 0xFF, flags >> 8 & 0xFF)


def products(variant):
    """16 x 8 x 16 products of one warp in the text of a kernel: each loop over tiles has one body."""
    s = variant.spec
    if variant.template == "forward":
        return s.block_q // s.warps // 16 * (s.block_k // 8) * (s.head_dim // 16 + s.head_dim_v // 16)
    if variant.template == "backward":
        width = 3 * s.head_dim + 2 * s.head_dim_v  # of the five products, each block_q x block_k
        return s.block_q * s.block_k * width // (16 * 8 * 16) // s.warps
    if variant.template == "bias_gradient":
        return s.block_q * s.block_k * (s.head_dim + s.head_dim_v) // (16 * 8 * 16) // s.warps
    return 0


def precise_products(variant, capability):
    """Instructions of one warp: of a rolled loop along a row, two of its steps are in the text."""
    s = variant.spec
    unit = 8 * s.steps  # columns of a step
    if variant.template == "precise_forward":
        along, depth, columns, scores = s.head_dim, s.block_k, s.head_dim_v, s.row_tiles
    elif variant.template == "precise_queries":
        along, depth, columns, scores = s.head_dim, s.block_k, s.head_dim, 1
    else:
        along, depth, columns, scores = s.head_dim, s.block_q, s.head_dim + s.head_dim_v, 1
    assert along // unit > 2
    if s.item == 4 or variant.template == "precise_keys":
        along = 2 * unit
    count = scores * depth // 8 * (along + columns // s.parts) // 8  # products of 16 x 8 x 8
    if variant.template != "precise_forward":
        count += depth // 8 * along // 8  # dP
    if s.item == 4:
        return count * s.products
    return count * 4 if capability < 90 else count // s.steps


def group_products(variant):
    """Those of a warpgroup, with both factors in shared memory, and with the left one in registers.

    The first or the last tile is outside of the loop, the others are in it.
    """
    s = variant.spec
    if variant.template == "hopper_precise_forward":  # three products of halves each
        return 3 * (s.head_dim // 16), 3 * (s.block_k // 16)
    if variant.template == "hopper_forward":  # tiles where sums are followed have a loop of their own
        return (2 + s.steady) * (s.head_dim // 16), (2 + s.steady) * (s.block_k // 16)
    if variant.template == "hopper_backward":  # S and dP twice, and dq
        width, keys = 2 * s.head_dim + 2 * s.head_dim_v, s.block_k
        return (width + 2 * keys) // 16, 2 * (s.block_q // 16)
    if variant.template == "hopper_bias_gradient":
        return (s.head_dim + s.head_dim_v) // 16, 0
    if variant.template in ("hopper_precise_keys", "hopper_precise_queries"):  # three products of halves each
        scores, parts = 3 * (s.head_dim + s.head_dim_v) // 16, 1  # dq in one part, dk and dv in parts of 64 columns
        if variant.template == "hopper_precise_keys":
            parts = sum(-(-n // 64) for n in (s.head_dim, s.head_dim_v))
        return scores, 3 * parts * 64 // 16
    if variant.template == "hopper_queries":
        return 2 * (s.head_dim + s.head_dim_v) // 16, 2 * (64 // 16)
    if variant.template == "hopper_keys":
        kept = min(64 * s.kept, s.head_dim) + min(64 * s.kept, s.head_dim_v)
        return 2 * (s.head_dim + s.head_dim_v - kept) // 16, 2 * kept // 16 + 2 * 2 * (64 // 16)
    return 0, 0


def some_variants(capability):
    """Every pass and option once, and the head dims at which the tiles change."""
    limit = choose.SHARED_LIMIT[capability]
    dtype = "float16" if capability < 80 else "bfloat16"
    other = "float16"
    on_hopper = [
        hopper_forward(64, dtype=dtype),
        hopper_forward(64, dtype=other, right=0),
        hopper_forward(128, dtype=other, group=5),
        hopper_forward(40, 96, dtype=other, access=2),
        hopper_forward(192, 128, dtype=other),
        hopper_forward(256, dtype=dtype, float32_out=True),
        *choose.steadily(hopper_forward(64, dtype=dtype)),
        hopper_backward(64, dtype=dtype),
        hopper_backward(128, dtype=dtype),
        hopper_backward(128, 80, dtype=other, access=2),
        hopper_backward(64, dtype=other, deterministic=True),
        hopper_backward(128, dtype=other, deterministic=True),
        choose.sink_gradient(choose.before_backward(hopper_backward(64, dtype=dtype), False, 16)),
        *split_backward(256, dtype=dtype),
        *split_backward(192, 128, dtype=other, access=2),
        split_backward(64, 256, dtype=dtype)[0],
        hopper_bias_gradient(64, dtype=dtype, bias="bfloat16"),
        hopper_bias_gradient(128, dtype=other, bias="float16", packed=True),
        hopper_bias_gradient(40, 128, dtype=other, bias="float32", seqlen=100),
    ]
    main = backward(128, dtype=dtype, limit=limit)
    return [
        *(forward(d, dtype=dtype, limit=limit) for d in (64, 128)),
        forward(256, dtype=other, limit=limit),
        forward(128, dtype=dtype, float32_out=True, limit=limit),
        forward(37, 96, dtype=other, access=2, limit=limit),
        backward(64, dtype=dtype, limit=limit),
        main,
        backward(64, dtype=other, deterministic=True, access=4, limit=limit),
        backward(192, 64, dtype=other, access=8, limit=limit),
        choose.before_backward(main, True, 16),
        choose.before_backward(backward(37, dtype=other, access=2, limit=limit), False, 2),
        choose.after_backward(main),
        choose.sink_gradient(choose.before_backward(main, True, 16)),
        bias_gradient(64, dtype=dtype, bias="bfloat16", limit=limit),
        bias_gradient(128, dtype=dtype, bias="float16", shape=(2, 4, 300, 300), limit=limit),
        (of_bias := bias_gradient(256, 40, dtype=other, bias="float32", access=2, limit=limit, **EVERY_OPTION)),
        choose.bias_sum(of_bias),
        choose.bias_sum(bias_gradient(64, bias="bfloat16")),
        *(on_hopper if capability == 90 else ()),
    ]


def registers_to_share(variant):
    """Of a thread, before the roles of a Hopper kernel take theirs: what `registers_suffice` counts on."""
    return 65536 // variant.spec.threads // 8 * 8


def compiled(variants, arch):
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda variant: compiler.compile_offline(variant, arch), dict.fromkeys(variants)))


def assert_fits(variants, arch):
    """They spill no registers, and on Hopper nothing waits after each product."""
    reports = compiled(variants, arch)
    for report in reports:
        assert report.spill_bytes == 0 and not report.remarks, f"{report.variant.expression} for {arch}"
    return reports


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90"])
def test_variants_compile_without_spills(arch):
    capability = int(arch[3:])
    for report in compiled(some_variants(capability), arch):
        variant, found = report.variant, instructions(report.cubin)
        about = f"{variant.expression} for {arch}"
        assert report.arch == ("sm_90a" if variant.header.startswith("sm90/") else arch)
        assert report.shared_bytes == variant.spec.shared_bytes
        assert not report.remarks, f"{about}: {report.remarks}"
        assert report.spill_bytes == 0, f"{about} spills {report.spill_bytes} bytes"
        assert not any(found[0][opcode] for opcode in LOCAL), f"{about} uses local memory"
        assert capability in found[1], f"{about} is code for another GPU"
        assert 0 < report.registers <= 255
        blocks = getattr(variant.spec, "blocks_per_sm", 1)
        assert report.registers * variant.spec.threads * blocks <= 65536, f"{about} does not fit the register file"
        if variant.header.startswith("sm90/"):
            assert report.registers == registers_to_share(variant), f"{about} has fewer registers than its roles take"
        per_product = 2 if capability < 80 else 1
        assert found[0][HMMA] == per_product * products(variant), f"{about} multiplies elsewhere"
        assert tuple(found[0][opcode] for opcode in HGMMA) == group_products(variant), f"{about} multiplies elsewhere"


PACKED_WITH_FEW_REGISTERS = (
    (64, 16, True, {"softcap": 5.0, "alibi": True}),
    (64, 2, False, {"softcap": 5.0, "alibi": True, "dropout": 0.5}),
    (96, 2, False, {"alibi": True}),
    (192, 2, False, {"alibi": True}),
    (256, 16, False, {}),
    (256, 16, False, {"softcap": 5.0, "alibi": True, "dropout": 0.5}),
)


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_packed_sequences_fit(arch):
    """The kernels that find their tiles in a table, and all that go with them."""
    problem = Problem("bfloat16", 4, 4096, 4096, 4, 2, 128, 128, 1.0, varlen="lower_right")
    small = dataclasses.replace(problem, head_dim=64, head_dim_v=64)
    if arch == "sm_80":
        main = choose.backward(problem, 16, False, LIMIT)
        before = choose.before_backward(main, False, 16)
        variants = [choose.forward(problem, 16, False, LIMIT), choose.forward(small, 2, False, LIMIT), main]
        variants += [before, choose.after_backward(main), choose.sink_gradient(before), choose.segments(main)]
        for head_dim, access, deterministic, options in PACKED_WITH_FEW_REGISTERS:
            tight = dataclasses.replace(problem, head_dim=head_dim, head_dim_v=head_dim, **options)
            variants += [choose.forward(tight, access, False, LIMIT)]
            variants += [choose.backward(tight, access, deterministic, LIMIT)]
    else:
        main = choose.hopper_backward(problem, 16, False)
        before = choose.before_backward(main, False, 16)
        variants = [choose.hopper_forward(one, 16, False) for one in (problem, small)]
        variants += [main, choose.hopper_backward(small, 16, True), before, choose.sink_gradient(before)]
        variants += choose.hopper_split_backward(problem, 16)
    assert_fits(variants, arch)


@needs_nvrtc
@pytest.mark.parametrize(
    "arch, dtype, precision, head_dims",
    [
        ("sm_80", "float32", None, ((64, 64), (128, 128), (192, 128))),
        ("sm_80", "float64", None, ((128, 128),)),
        ("sm_86", "float32", None, ((192, 192), (256, 256))),
        ("sm_86", "float64", None, ((192, 192), (256, 256))),
        ("sm_90", "float32", None, ((64, 64), (128, 128), (256, 256))),
        ("sm_90", "float32", "tf32", ((64, 64),)),
        ("sm_90", "float64", None, ((64, 64), (128, 128))),
    ],
)
def test_precise_kernels_fit(arch, dtype, precision, head_dims):
    limit, variants = choose.SHARED_LIMIT[int(arch[3:])], []
    for head_dim, head_dim_v in head_dims:
        problem = Problem(dtype, 1, 1, 1, 1, 1, head_dim, head_dim_v, 1.0, precision=precision)
        access = 16 if head_dim == head_dim_v else 8
        variants += [precise.forward(problem, access, limit), *precise.backward(problem, access, limit)[1:]]
    for report in assert_fits(variants, arch):
        variant, spec = report.variant, report.variant.spec
        about = f"{variant.expression} for {arch}"
        registers = report.registers * spec.threads * spec.blocks_per_sm
        assert registers <= 65536, f"{about} does not fit the register file"
        found, opcode = instructions(report.cubin)[0], DMMA if dtype == "float64" else HMMA
        assert found[opcode] == precise_products(variant, int(arch[3:])), f"{about} multiplies elsewhere"


def test_shared_memory_of_halves():
    """A row of a tile is two float16 for each padded column; one kilobyte is for the alignment."""
    rows = {
        "hopper_precise_forward": lambda s: (64 * s.groups + s.slots * s.block_k, s.slots * s.block_k),
        "hopper_precise_keys": lambda s: (64 * (s.groups + s.slots), 64 * (s.groups + s.slots_dout)),
        "hopper_precise_queries": lambda s: (64 * (s.groups + s.slots), 64 * (s.groups + s.slots_v)),
    }
    variants = [one for one in precise.variants(90) if one.template in rows]
    assert {one.template for one in variants} == rows.keys()
    for one in variants:
        widths = [precise.padded(n) for n in (one.spec.head_dim, one.spec.head_dim_v)]
        assert one.spec.shared_bytes == 1024 + sum(4 * n * w for n, w in zip(rows[one.template](one.spec), widths))


@needs_nvrtc
@pytest.mark.parametrize("head_dim, head_dim_v", [(64, 64), (128, 128), (33, 96), (96, 40)])
def test_halves_fit(head_dim, head_dim_v):
    problem = Problem("float32", 1, 300, 300, 1, 1, head_dim, head_dim_v, 1.0)
    variants = [precise.hopper_forward(problem, access) for access in (16, 4)]
    variants += [variant for access in (16, 4) for variant in precise.hopper_backward(problem, access)]
    for report in assert_fits(variants, "sm_90"):
        found, about = instructions(report.cubin)[0], report.variant.expression
        assert report.registers == registers_to_share(report.variant), f"{about} has fewer than its roles take"
        products = tuple(found[opcode] for opcode in HGMMA)
        assert products == group_products(report.variant), f"{about} multiplies elsewhere"
    for report in assert_fits([x for access in (16, 4) for x in precise.split(access, access == 4)], "sm_90"):
        spec = report.variant.spec
        assert report.registers * spec.threads * spec.blocks_per_sm <= 65536, "does not fit the register file"


@needs_nvrtc
@pytest.mark.parametrize("change", [{"softcap": True}, {"alibi": True}, {"softcap": True, "alibi": True}])
def test_a_changed_score_fits_on_hopper(change):
    """The kernels with the fewest registers left."""
    narrow = {"dtype": "bfloat16", "access": 2}
    variants = (
        *(hopper_forward(64, float32_out=True), hopper_forward(128)),
        *(hopper_backward(d, deterministic=deterministic) for d in (64, 128) for deterministic in (False, True)),
        *(hopper_backward(64, **narrow), hopper_backward(128, deterministic=True, **narrow)),
        *split_backward(256),
        *split_backward(256, **narrow),
    )
    assert_fits([dataclasses.replace(v, spec=dataclasses.replace(v.spec, **change)) for v in variants], "sm_90")


SOME_DIMS = (64, 128, 256)


@needs_nvrtc
@pytest.mark.parametrize(
    "head_dim, head_dim_v", [(64, 64), (8, 64), (64, 8), (96, 72), (128, 128), (192, 128), (256, 256)]
)
def test_kernels_that_follow_sums_fit(head_dim, head_dim_v):
    """In every way to write out."""
    plain = Problem("bfloat16", 1, 4096, 4096, 3, 3, head_dim, head_dim_v, 1.0)
    problems = (
        plain,
        dataclasses.replace(plain, right=0, seqlen_k=1024),
        dataclasses.replace(plain, seqlen_q=1, heads_k=1),
    )
    ways = (16, False), (4, False), (2, False), (16, True)
    mains = [choose.hopper_forward(problem, *way) for problem in problems for way in ways]
    assert_fits([choose.steadily(main)[0] for main in mains], "sm_90")


@needs_nvrtc
@pytest.mark.parametrize("head_dim", SOME_DIMS)
def test_bias_and_mask_fit(head_dim):
    """The portable kernels, which read them element by element."""
    variants = []
    for more in ({"bias": "float32", "mask": True, "softcap": 2.0, "alibi": True, "dropout": 0.5}, {"mask": True}):
        problem = Problem("float16", 1, 1, 1, 1, 1, head_dim, head_dim, 1.0, **more)
        variants += [choose.forward(problem, access, False, choose.SHARED_LIMIT[80], 80) for access in (16, 2)]
        for access, deterministic in ((16, True), (2, False)):
            variants.append(choose.backward(problem, access, deterministic, choose.SHARED_LIMIT[80], 80))
        for variant in variants[-4:]:
            assert (variant.spec.bias, variant.spec.mask) == (spec.BIAS_TYPES.index(more.get("bias")), True)
    assert_fits(variants, "sm_80")


@needs_nvrtc
@pytest.mark.parametrize("head_dim", SOME_DIMS)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_dbias_fits(arch, head_dim):
    """Of one tile of scores or of several, whatever else the scores have."""
    packed = arch == "sm_90" and 64 < head_dim <= 128  # where Hopper has one kernel
    how = {"bias": "float16", "packed": packed, "limit": choose.SHARED_LIMIT[int(arch[3:])], **EVERY_OPTION}
    assert_fits([bias_gradient(head_dim, shape=shape, **how) for shape in ((2, 4, 300, 300), (1, 4, 300, 300))], arch)


@needs_nvrtc
@pytest.mark.parametrize("head_dim", (64, 128, 192))
def test_dbias_fits_on_hopper(head_dim):
    """In a kernel of its own, and beside dq; with what takes the most registers beside it."""
    for bias in ("bfloat16", "float32"):
        problem = Problem("bfloat16", 1, 300, 300, 2, 2, head_dim, head_dim, 1.0, bias=bias, alibi=True,
                          mask=head_dim <= 128)  # fmt: skip
        assert choose.stores_dbias(problem, (1, 2, 300, 300))
        variants = [choose.hopper_split_backward(problem, access, True)[1] for access in (16, 2)]
        if head_dim in choose.HOPPER_BIAS_GRADIENT:
            for more in ({}, {"softcap": 2.0, "alibi": True}):
                variants.append(hopper_bias_gradient(head_dim, dtype="bfloat16", bias=bias, mask=True, **more))
        assert_fits(variants, "sm_90")


@needs_nvrtc
@pytest.mark.parametrize("head_dim", SOME_DIMS)
def test_bias_and_mask_fit_on_hopper(head_dim):
    """With what takes the most registers beside them."""
    plain = Problem("bfloat16", 1, 4096, 4096, 2, 2, head_dim, head_dim, 1.0)
    both = {"softcap": 2.0, "alibi": True}
    packed = dataclasses.replace(plain, bias="float32", mask=True, heads_q=6, seqlen_q=3, **both)
    variants = [choose.hopper_forward(packed, 16, False)]
    for more in ({"bias": "bfloat16"}, {"bias": "float16", "mask": True, **both}):
        problem = dataclasses.replace(plain, **more)
        variants.append(choose.hopper_forward(problem, 16, "softcap" in more))
        if choose.backward_elsewhere(problem):
            continue
        if choose.split(problem):
            variants += choose.hopper_split_backward(problem, 2 if "softcap" in more else 16)
        else:
            variants.append(choose.hopper_backward(problem, 16, "softcap" in more))
    for report in assert_fits(variants, "sm_90"):
        found = instructions(report.cubin)[0]
        assert tuple(found[opcode] for opcode in HGMMA) == group_products(report.variant), report.variant.expression


@needs_nvrtc
@pytest.mark.parametrize("head_dim", (64, 96, 128, 192, 256))
def test_words_of_a_mask_fit_on_hopper(head_dim):
    """Alone and with what takes the most registers, in the forward and in the one kernel of the backward."""
    plain = Problem("bfloat16", 1, 4096, 4096, 2, 2, head_dim, head_dim, 1.0, mask=True)
    changed = dataclasses.replace(plain, softcap=2.0, alibi=True)
    packed = dataclasses.replace(changed, dropout=0.5, heads_q=6, seqlen_q=3)
    variants = [choose.hopper_forward(plain, 16, False), choose.hopper_forward(plain, 2, False)]
    variants += [choose.hopper_forward(changed, 16, True), choose.hopper_forward(packed, 2, False)]
    variants.append(choose.hopper_forward(dataclasses.replace(plain, blocks=True), 16, False))
    if not choose.split(plain):
        variants += [choose.hopper_backward(plain, 16, False), choose.hopper_backward(changed, 2, True)]
        variants.append(choose.hopper_backward(dataclasses.replace(plain, blocks=True), 16, False))
    assert all(variant.spec.mask for variant in variants)
    variants += [choose.mask_words(variants[0], along_rows) for along_rows in (False, True)]
    for report in assert_fits(variants, "sm_90"):
        found = instructions(report.cubin)[0]
        assert not any(found[opcode] for opcode in LOCAL), f"{report.variant.expression} uses local memory"
        assert tuple(found[opcode] for opcode in HGMMA) == group_products(report.variant), report.variant.expression


@needs_nvrtc
def test_serialised_products_are_seen(kernels):
    """Scores that are read while their product is on its way make the compiler wait after each product."""
    path = kernels / "sm90" / "forward.cuh"
    text = path.read_text()
    assert text.count("wgmma_wait<1>();") == 2  # that of sums in place of maxima, which is not compiled, too
    path.write_text(text.replace("wgmma_wait<1>();", ""))
    (remark,) = compiler.compile_offline(hopper_forward(), "sm_90").remarks
    assert remark.startswith("(C7514)") and "serialized" in remark and "\n" not in remark


def test_options_of_a_kernel():
    """Machine code of Hopper's own instructions runs on Hopper alone."""
    for variant in (hopper_forward(), hopper_backward(), *split_backward()):
        assert compiler.options(variant) == ("-std=c++20", "-arch=sm_90a")
    before, after = choose.before_backward(hopper_backward(), True, 16), choose.after_backward(backward())
    for variant in (forward(), backward(), before, after):
        assert compiler.options(variant) == ("-std=c++20",)


# --- Targets: a GPU that is too old or too new for the kernels or for NVRTC


@pytest.fixture
def nvrtc(monkeypatch):
    """Sets the version of NVRTC, and what it compiles for."""
    module = pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason="needs CuPy")

    def pretend(version, archs):
        monkeypatch.setattr(module, "getVersion", lambda: version)
        monkeypatch.setattr(module, "getSupportedArchs", lambda: archs)

    return pretend


NVRTC_12_0 = (12, 0), (50, 52, 53, 60, 61, 62, 70, 72, 75, 80, 86, 87, 89, 90)
NVRTC_12_8 = (12, 8), (50, 52, 53, 60, 61, 62, 70, 72, 75, 80, 86, 87, 89, 90, 100, 101, 120)


@pytest.mark.parametrize(
    "known, capability, parts",
    [
        (NVRTC_12_0, 120, ["NVRTC 12.0", "GPU X", "12.0", "knows 5.0,", "8.9, 9.0;", "a newer NVRTC"]),
        (NVRTC_12_0, 88, ["NVRTC 12.0", "8.8", "a newer NVRTC"]),
        (NVRTC_12_8, 130, ["NVRTC 12.8", "13.0", "a newer NVRTC"]),
        (((14, 0), (90, 100)), 80, ["NVRTC 14.0", "8.0", "knows 9.0, 10.0;", "an older NVRTC"]),
    ],
)
def test_nvrtc_does_not_know_the_gpu(nvrtc, known, capability, parts):
    nvrtc(*known)
    with pytest.raises(RuntimeError) as error:
        compiler.check_target(forward(), capability, "GPU X")
    assert not isinstance(error.value, NotImplementedError)
    assert all(part in str(error.value) for part in parts), str(error.value)


@pytest.mark.parametrize(
    "dtype, capability, oldest",
    [
        ("float16", 61, "7.5"),
        ("float16", 70, "7.5"),
        *((dtype, 75, "8.0") for dtype in ("bfloat16", "float32", "float64")),
    ],
)
def test_the_gpu_is_too_old(nvrtc, dtype, capability, oldest):
    nvrtc(*NVRTC_12_8)
    with pytest.raises(NotImplementedError) as error:
        compiler.check_target(backward(dtype=dtype), capability, "GPU X")
    for part in (f"{dtype} needs", oldest, "GPU X", f"{capability / 10}", "NumPy"):
        assert part in str(error.value)


@pytest.mark.parametrize(
    "known, capability",
    [(NVRTC_12_0, 75), (NVRTC_12_0, 90), (NVRTC_12_8, 120), (NVRTC_12_8, 121)],  # CuPy takes 12.0 for a 12.1
)
def test_nvrtc_knows_the_gpu(nvrtc, known, capability):
    nvrtc(*known)
    compiler.check_target(forward(), capability, "GPU X")


@needs_nvrtc
@pytest.mark.parametrize("arch, error", [("sm_61", NotImplementedError), ("sm_990", RuntimeError), ("90", ValueError)])
def test_offline_target(arch, error):
    with pytest.raises(error, match=arch):
        compiler.compile_offline(forward(), arch)


@needs_nvrtc
def test_the_compiler_refuses_the_arch():
    with pytest.raises(RuntimeError, match="does not compile for sm_80a"):  # 8.0 has no features of its own
        compiler.compile_offline(forward(), "sm_80a")


BUILD_ONE = """
import cupy
from cupyflash import choose, compiler
from cupyflash.problem import Problem
main = choose.backward(Problem("float16", 1, 1, 1, 1, 1, 64, 64, 1.0), 16, False, 65536)
compiler.kernel(choose.before_backward(main, False, 16), 0)
print(cupy.cuda.Device().compute_capability)
"""


@pytest.mark.gpu
def test_the_cached_kernel_is_machine_code(tmp_path):
    """CuPy may ask NVRTC for PTX, which a driver older than NVRTC cannot load."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CUPY_")}
    environment |= {"CUPY_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(tools.ROOT)}
    command = [sys.executable, "-c", BUILD_ONE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    (path,) = tmp_path.rglob("*.cubin")
    content = path.read_bytes()
    assert b"\x7fELF" in content, "no machine code"
    _, flags = instructions(content[content.index(b"\x7fELF") :])
    assert int(done.stdout) in flags


@pytest.mark.gpu
def test_an_error_of_the_running_compiler_is_explained(kernels):
    path = kernels / "core" / "types.cuh"
    path.write_text(path.read_text() + "\nno_such_type x;\n")
    with pytest.raises(RuntimeError, match="(?s)does not compile for .*no_such_type"):
        compiler._build(forward())


@pytest.mark.gpu
@pytest.mark.parametrize("error, pretended", [(NotImplementedError, 61), (RuntimeError, 990)])
def test_a_call_explains_what_the_gpu_lacks(monkeypatch, error, pretended):
    check = compiler.check_target
    monkeypatch.setattr(compiler, "check_target", lambda variant, _, target: check(variant, pretended, target))
    with pytest.raises(error, match=str(pretended / 10)):
        compiler._build(forward())


# --- python -m cupyflash compile


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs `compile_command` over variants whose reports are made up; returns its exit code, lines and errors."""
    variants = [forward(), backward(), forward(128)]
    monkeypatch.setattr(choose, "variants", lambda capability: iter(variants))

    def run(outcomes, archs=("sm_80",), as_json=True):
        def compile_offline(variant, arch):
            outcome = outcomes[variants.index(variant)]
            if isinstance(outcome, Exception):
                raise outcome
            spills, remarks = (0, outcome) if isinstance(outcome, tuple) else (outcome, ())
            return compiler.Report(variant, arch, 100, spills, variant.spec.shared_bytes, 0.5, b"", remarks)

        monkeypatch.setattr(compiler, "compile_offline", compile_offline)
        code = compiler.compile_command(list(archs), as_json)
        printed = capsys.readouterr()
        return code, printed.out.splitlines(), printed.err.splitlines()

    run.variants = variants
    return run


def test_command_prints_json(command):
    code, lines, errors = command([0, 0, 0], ("sm_80", "sm_90a"))
    assert code == 0 and not errors
    expected = [
        {
            "arch": arch,
            "registers": 100,
            "spill_bytes": 0,
            "shared_bytes": variant.spec.shared_bytes,
            "seconds": 0.5,
            "kernel": variant.expression,
        }
        for arch in ("sm_80", "sm_90a")
        for variant in command.variants
    ]
    assert list(map(json.loads, lines)) == expected


def test_command_prints_a_table(command):
    code, lines, errors = command([0, 0, 0], as_json=False)
    assert code == 0 and not errors
    assert lines[0].split() == ["arch", "regs", "spills", "shared", "seconds", "kernel"]
    assert [line.split(maxsplit=5)[5] for line in lines[1:]] == [variant.expression for variant in command.variants]


def test_command_fails_after_a_spill(command):
    code, lines, errors = command([0, 8, 0])
    assert code == 1 and not errors
    assert [json.loads(line)["spill_bytes"] for line in lines] == [0, 8, 0]


@pytest.mark.parametrize("as_json", [False, True])
def test_command_fails_after_a_remark(command, as_json):
    code, lines, errors = command([0, ("(C7510) serialized", "(C7514) as well"), 0], as_json=as_json)
    about = f"{command.variants[1].expression} for sm_80"
    assert code == 1 and errors == [f"{about}: (C7510) serialized", f"{about}: (C7514) as well"]
    assert len(lines) == (3 if as_json else 4)


@pytest.mark.parametrize("error", [RuntimeError("bad kernel"), NotImplementedError("bad kernel")])
def test_command_fails_after_an_error(command, error):
    code, lines, errors = command([error, 0, 0])
    assert code == 1 and errors == ["bad kernel"]
    assert [json.loads(line)["kernel"] for line in lines] == [v.expression for v in command.variants[1:]]


def test_command_says_once_what_is_wrong_with_an_arch(command):
    code, lines, errors = command([RuntimeError("bad arch")] * 3)
    assert (code, lines, errors) == (1, [], ["bad arch"])


def test_command_without_a_gpu_compiles_for_two_archs(command, monkeypatch):
    monkeypatch.setattr(compiler, "_present_capability", lambda: None)
    code, lines, _ = command([0, 0, 0], archs=())
    assert code == 0 and [json.loads(line)["arch"] for line in lines] == ["sm_80"] * 3 + ["sm_90"] * 3


def test_command_builds_for_the_present_gpu(command, monkeypatch):
    """As a call does, so that CuPy keeps the result."""
    built = SimpleNamespace(num_regs=77, local_size_bytes=0)
    monkeypatch.setattr(compiler, "_present_capability", lambda: 86)
    monkeypatch.setattr(compiler, "_build", lambda variant: built)
    code, lines, errors = command([AssertionError("compiled offline")] * 3, archs=())
    assert code == 0 and not errors
    assert [(r["arch"], r["registers"]) for r in map(json.loads, lines)] == [("sm_86", 77)] * 3


@pytest.mark.parametrize("arch", ["sm_", "sm_8.0", "80", "sm_90x"])
def test_command_names_a_wrong_arch(arch):
    with pytest.raises(ValueError, match=f"like sm_80 or sm_90a, got '{re.escape(arch)}'"):
        compiler.compile_command([arch], False)
