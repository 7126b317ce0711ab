"""Functions of the user: what changes a score, and what says whether a query sees a key.

For arrays on a GPU a function is C++ text, which becomes a part of the kernel's source; for NumPy arrays it is a Python
function of arrays. What it captures is an argument of the kernel, and only the types of that are compiled.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Integral, Real
from typing import NamedTuple

import numpy as np
from ml_dtypes import bfloat16

MOST_CAPTURES = 8  # of both functions of a call together
MOST_AXES = 4
NAMES = ("score", "b", "h", "i", "j", "seqlen_q", "seqlen_k")  # what a function is given
CPP_TYPES = {  # of the elements of captured arrays
    np.dtype(np.float16): "float16",
    np.dtype(bfloat16): "bfloat16",
    np.dtype(np.float32): "float",
    np.dtype(np.int32): "int",
    np.dtype(np.int64): "long long",
    np.dtype(np.uint8): "unsigned char",
    np.dtype(bool): "bool",
}
FLOATS = ("float16", "bfloat16", "float", "double")
HOST_TYPES = CPP_TYPES | {np.dtype(np.float64): "double"}
_MATHS = "abs cos exp inf log max min pow sin sqrt tanh where"
_KEYWORDS = """
alignas alignof and and_eq asm auto bitand bitor bool break case catch char char16_t char32_t char8_t class co_await
co_return co_yield compl concept const const_cast consteval constexpr constinit continue decltype default delete do
double dynamic_cast else enum explicit export extern false float for friend goto if inline int long mutable namespace
new noexcept not not_eq nullptr operator or or_eq private protected public register reinterpret_cast requires return
short signed sizeof static static_assert static_cast struct switch template this thread_local throw true try typedef
typeid typename union unsigned using virtual void volatile wchar_t while xor xor_eq
"""
_TAKEN = {*NAMES, *_MATHS.split(), *_KEYWORDS.split()}
_OFFSET = re.compile(r"\bfloat\s*\(\s*(i|j)\s*-\s*(?!\1)[ij]\s*\)")  # which a kernel has at hand
_CHANGES = re.compile(r"[;{]|(?<![=!<>])=(?!=)|<<=|>>=|\+\+|--")  # a statement or an assignment
_FLOAT = re.compile(r"(?<![\w.])((?:\d+\.\d*|\.\d+)(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+)(?![\w.])")


class ModError(ValueError):
    """The text of a `ScoreMod` or `MaskMod` does not compile."""


class _Function:
    """What both classes share."""

    argument: str  # of `attention`, and the file that the compiler names
    gradients: tuple[str, ...] = ()

    def __init__(self, function, captures):
        kind = type(self).__name__
        if not isinstance(function, str) and not callable(function):
            raise TypeError(
                f"{kind} got {_shown(function)}; allowed: text of C++, for arrays on a GPU, or a Python function, for "
                "NumPy arrays"
            )
        if isinstance(function, str) and not function.strip():
            raise ValueError(
                f"{kind} got text without anything in it; allowed: an expression, or statements that return"
            )
        for name, value in captures.items():
            if not name.isascii() or not name.isidentifier() or name in _TAKEN or name.startswith("_"):
                raise ValueError(
                    f"{kind} captures {name!r}; allowed: names of letters, digits and _ that do not begin with _ and "
                    f"that neither C++ nor the function has taken ({', '.join(NAMES)}, {', '.join(_MATHS.split())})"
                )
            _check_number(kind, name, value)
        if len(captures) > MOST_CAPTURES:
            raise ValueError(f"{kind} captures {len(captures)} values; allowed: at most {MOST_CAPTURES}")
        self.function = function
        self.captures = dict(captures)

    def __repr__(self):
        given = [repr(self.function), *self.captures]
        return f"{type(self).__name__}({', '.join(given)})"

    @cached_property
    def arrays(self) -> dict:
        """What is captured but for numbers, by the name that messages give it."""
        return {f"{self.argument}.{n}": x for n, x in self.captures.items() if not isinstance(x, _NUMBERS)}

    @cached_property
    def mod(self) -> Mod:
        """What calls that look alike share, but for the types of arrays."""
        text = self.function if isinstance(self.function, str) else None
        captures = tuple(Capture(name, _number_type(x), 0) for name, x in self.captures.items())
        return Mod(self.argument, text, captures, self.gradients)


class ScoreMod(_Function):
    """A function that changes the scores of `attention`.

    It is given each score, after scale, ``softcap``, ALiBi and ``bias``, and returns what takes its place; the masks
    come after it. -inf hides a key, as a mask does.

    Parameters
    ----------
    function : str or callable
        For arrays on a GPU C++ text, either an expression or statements that ``return``. It may use ``score``
        (the natural logit), ``b`` (batch), ``h`` (query head), ``i`` (query), ``j`` (key), ``seqlen_q``, ``seqlen_k``,
        everything captured, ``inf``, and ``abs``, ``cos``, ``exp``, ``log``, ``max``, ``min``, ``pow``, ``sin``,
        ``sqrt``, ``tanh`` and ``where(condition, a, b)``. Floating-point numbers are float, also without the ``f``.
        Declare what depends on ``score`` as ``auto``: in the backward it is a dual number, with its derivative.

        For NumPy arrays a Python function ``(score, b, h, i, j, **captured)``: the score is an array, the others are
        integer arrays that broadcast to its shape, and so must the result. For the backward it is called with dual
        numbers, which know NumPy's arithmetic, comparisons and ``where``, and the functions above.
    gradients : tuple of str, default ()
        Names of captured arrays of floating-point numbers whose gradients `attention_backward` computes: those of
        every element that the function reads by ``name[...]``.
    **captures : array or number
        Arrays of the library and on the device of ``q``, of 1 to 4 axes and any strides, of float16, bfloat16, float32,
        int32, int64, uint8 or bool (also float64 where ``q`` is), and Python numbers: an int of 32 bits, a
        float, which is rounded to float32 on a GPU, or a bool. At most 8, those of a `MaskMod` included. Text reads an
        element by ``name[x, y]`` with an index for each axis.

    Raises
    ------
    TypeError
        Something has the wrong type.
    ValueError
        A name is taken, there are too many captures, or the text is empty.

    Notes
    -----
    The text is compiled when it is first used, and once for the types of what it captures: other numbers and arrays are
    other arguments of the same kernel. What does not compile raises `ModError`, a ValueError that shows the line,
    before anything is launched.

    Nothing checks an index: one outside of its array reads what lies there, or fails on a GPU. ``b``, ``h``, ``i`` and
    ``j`` are always those of a score that exists, but the function is also called for keys that the masks hide.

    At a kink, derivatives are those of NumPy's habits: that of ``abs`` is 0 at 0, ``min`` and ``max`` of
    equal numbers take the first. A weight of 0 has no gradient, whatever the derivative.

    Examples
    --------
    ALiBi [1]_ with slopes that are learned:

    >>> import numpy as np
    >>> import cupyflash
    >>> slopes = np.float32([0.5, 0.25])
    >>> mod = cupyflash.ScoreMod(
    ...     lambda score, b, h, i, j, slope: score - slope[h] * abs(i - j), slope=slopes, gradients=("slope",)
    ... )
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 5, 2, 8), dtype=np.float32)
    >>> out, lse = cupyflash.attention(q, k, v, score_mod=mod, return_lse=True)
    >>> grads = cupyflash.attention_backward(np.ones_like(out), q, k, v, out, lse, score_mod=mod)
    >>> grads.dscore_mod["slope"].shape
    (2,)

    The same for arrays on a GPU, and others:

    >>> text = "score - slope[h] * abs(i - j)"
    >>> learned_alibi = cupyflash.ScoreMod(text, slope=slopes, gradients=("slope",))
    >>> capped = cupyflash.ScoreMod("cap * tanh(score / cap)", cap=30.0)
    >>> bucket, table = np.zeros(9, np.int32), np.zeros((32, 2), np.float32)
    >>> text = "score + table[bucket[j - i + seqlen_q - 1], h]"
    >>> relative_bias = cupyflash.ScoreMod(text, bucket=bucket, table=table, gradients=("table",))
    >>> statements = cupyflash.ScoreMod('''
    ...     if (j < prefix) return score;
    ...     auto shifted = score - 0.5 * abs(i - j);
    ...     return where(i >= j, shifted, -inf);
    ... ''', prefix=16)

    References
    ----------
    .. [1] O. Press, N. A. Smith, M. Lewis, "Train Short, Test Long: Attention with Linear Biases Enables Input
       Length Extrapolation", arXiv:2108.12409.
    """

    argument = "score_mod"

    def __init__(self, function, /, *, gradients=(), **captures):
        super().__init__(function, captures)
        if isinstance(gradients, str) or not isinstance(gradients, (tuple, list)):
            raise TypeError(f"gradients is {_shown(gradients)}; allowed: a tuple of names of captured arrays")
        for name in gradients:
            if f"score_mod.{name}" not in self.arrays:
                arrays = ", ".join(key.partition(".")[2] for key in self.arrays) or "none"
                raise ValueError(f"gradients has {_shown(name)}; allowed: names of captured arrays, here {arrays}")
        self.gradients = tuple(dict.fromkeys(gradients))


class MaskMod(_Function):
    """A function that says whether a query of `attention` sees a key.

    Parameters
    ----------
    function : str or callable
        As that of `ScoreMod`, without the score: ``(b, h, i, j, **captured)``, and true where the query sees the key.
    **captures : array or number
        As those of `ScoreMod`.

    Raises
    ------
    TypeError, ValueError
        As `ScoreMod`.

    See Also
    --------
    ScoreMod : Its notes hold here as well.

    Examples
    --------
    Documents that lie one after the other and see only themselves:

    >>> import numpy as np
    >>> import cupyflash
    >>> ids = np.array([[0, 0, 1, 1, 1]])
    >>> documents = cupyflash.MaskMod(lambda b, h, i, j, doc: doc[b, i] == doc[b, j], doc=ids)
    >>> q = np.zeros((1, 5, 1, 8), np.float32)
    >>> v = np.arange(5, dtype=np.float32).reshape(1, 5, 1, 1)
    >>> cupyflash.attention(q, q, v, mask_mod=documents).ravel()
    array([0.5, 0.5, 3. , 3. , 3. ], dtype=float32)

    The same for arrays on a GPU, and others: a prefix that all see, every third key, and a tree of proposed tokens,
    each of which sees those that it comes from:

    >>> documents = cupyflash.MaskMod("doc[b, i] == doc[b, j]", doc=ids)
    >>> prefix = cupyflash.MaskMod("j < prefix || j <= i", prefix=100)
    >>> dilated = cupyflash.MaskMod("j <= i && (i - j) % 3 == 0")
    >>> tree = cupyflash.MaskMod("ancestor[i, j]", ancestor=np.tri(5, dtype=bool))
    """

    argument = "mask_mod"

    def __init__(self, function, /, **captures):
        super().__init__(function, captures)


_NUMBERS = (bool, int, float, np.generic)


def _shown(value):
    from .checks import shown, type_name

    return f"{shown(value)} ({type_name(value)})"


def _number_type(value) -> str:
    """Of what is no array; "" for one."""
    if not isinstance(value, _NUMBERS):
        return ""
    return "bool" if isinstance(value, (bool, np.bool_)) else "int" if isinstance(value, Integral) else "float"


def _check_number(kind, name, value):
    allowed = "allowed: an array, an int of 32 bits, a float or a bool"
    if isinstance(value, np.generic) and not isinstance(value, (np.bool_, Integral, Real)):
        raise TypeError(f"{kind} captures {name} = {_shown(value)}; {allowed}")
    if _number_type(value) == "int" and not -(2**31) <= value < 2**31:
        raise ValueError(f"{kind} captures {name} = {_shown(value)}; {allowed}")


class Capture(NamedTuple):
    """What the compiler knows of a captured value."""

    name: str
    type: str  # of C++
    axes: int  # 0: a number

    @property
    def words(self) -> int:
        """Of 64 bits in the struct: a pointer and 32-bit strides, or a number."""
        return 1 + (self.axes + 1) // 2

    def member(self, name: str) -> str:
        return f"Captured<{self.type}, {self.axes}> {name};" if self.axes else f"alignas(8) {self.type} {name};"


@dataclass(frozen=True)
class Mod:
    """A function as a kernel's source has it."""

    argument: str
    text: str | None  # None: a Python function
    captures: tuple[Capture, ...]
    gradients: tuple[str, ...] = ()

    def typed(self, arrays: dict, types: dict) -> Mod:
        """With the types of the `arrays`, by their names in messages."""
        captures = (
            capture if capture.type else Capture(capture.name, types[array.dtype], array.ndim)
            for capture, array in ((c, arrays.get(f"{self.argument}.{c.name}")) for c in self.captures)
        )
        return replace(self, captures=tuple(captures))

    def cpp(self) -> str:
        """The text as a function template, whose lines the compiler counts as the user does."""
        text = _FLOAT.sub(r"\1f", _called(self.text, {c.name for c in self.captures if c.axes}))
        if not _CHANGES.search(text):  # then i and j are what they were
            text = _OFFSET.sub(lambda found: "(-_offset)" if found[1] == "i" else "_offset", text)
        result, score = ("Number", "Number score, ") if self.argument == "score_mod" else ("bool", "")
        template = "template <class Number>\n" if score else ""
        captures = "".join(f", const auto& {capture.name}" for capture in self.captures)
        before, after = ("", "") if re.search(r"\breturn\b", self.text) else ("return (", ");")
        return (
            f"{template}__device__ __forceinline__ {result} {self.argument}({score}int b, int h, int i, int j, "
            f"int seqlen_q, int seqlen_k, float _offset{captures}) {{\n{before}\n"
            f'#line 1 "{self.argument}"\n{text}\n#line 1 "after {self.argument}"\n{after}}}\n'
        )

    @property
    def reads(self) -> bool:
        """Whether it reads an array at an index that is not the same for a whole head."""
        same = {"b", "h"} | {capture.name for capture in self.captures if not capture.axes}
        arrays = "|".join(capture.name for capture in self.captures if capture.axes)
        indices = re.findall(rf"\b(?:{arrays})\s*\[([^\]]*)", self.text) if arrays else []
        return any(set(re.findall(r"[A-Za-z_]\w*", index)) - same for index in indices)

    def pick(self, prefix: str, at: Callable = lambda member, capture: member) -> str:
        """The captured members as arguments."""
        return "".join(f", {at(f'{prefix}{n}', capture)}" for n, capture in enumerate(self.captures))


def _called(text: str, names: set[str]) -> str:
    """`text` with name[x, y] as name(x, y), for C++20 has no such index; no character moves."""
    characters, open_ = list(text), []
    for at, character in enumerate(text):
        if character == "[":
            word = re.search(r"(\w+)\s*$", text[:at])
            open_.append(bool(word) and word[1] in names)
            if open_[-1]:
                characters[at] = "("
        elif character == "]" and open_ and open_.pop():
            characters[at] = ")"
    return "".join(characters)


@dataclass(frozen=True)
class Mods:
    """The functions of a call."""

    score: Mod | None = None
    mask: Mod | None = None

    @property
    def captures(self) -> tuple[Capture, ...]:
        return tuple(capture for mod in (self.score, self.mask) if mod for capture in mod.captures)

    @property
    def tracked(self) -> tuple[Capture, ...]:
        """The captured arrays whose gradients are wanted."""
        return tuple(c for c in self.score.captures if c.name in self.score.gradients) if self.score else ()

    @property
    def reads(self) -> bool:
        """Whether a kernel needs registers for what is read for every score."""
        return any(mod.reads for mod in (self.score, self.mask) if mod)

    @cached_property
    def slots(self) -> tuple[int, ...]:
        """The word of each captured value, then of each gradient."""
        sizes = [capture.words for capture in (*self.captures, *self.tracked)]
        return tuple(sum(sizes[:n]) for n in range(len(sizes)))

    @cached_property
    def words(self) -> int:
        """Size of the struct."""
        return max(1, sum(capture.words for capture in (*self.captures, *self.tracked)))

    def cpp(self) -> str:
        """The struct `cupyflash::mod::UserMods`, an argument of the kernels' templates."""
        score, mask = self.score, self.mask
        members = [c.member(f"s{n}") for n, c in enumerate(score.captures)] if score else []
        members += [c.member(f"m{n}") for n, c in enumerate(mask.captures)] if mask else []
        place = {c.name: f"g{n}" for n, c in enumerate(self.tracked)}
        members += [f"Captured<float, {c.axes}> {place[c.name]};" for c in self.tracked]
        at = "at.b, at.h, at.i, at.j, at.seqlen_q, at.seqlen_k"
        offset = "float(at.j - at.i)"  # beside a derivative, an addition takes more from the tensor cores than it saves
        methods = []
        if score:
            methods.append(
                "template <class Number>\n"
                "__device__ __forceinline__ Number score(Number x, const Element& at) const {\n"
                f"return score_mod<Number>(x, {at}, sizeof(Number) > 4 ? {offset} : at.offset{score.pick('s')});\n}}"
            )
        if mask:
            methods.append(
                "__device__ __forceinline__ bool visible(const Element& at) const {\n"
                f"return mask_mod({at}, {offset}{mask.pick('m')});\n}}"
            )
        if place:

            def traced(member, capture):
                return f"trace.of({member}, {place[capture.name]})" if capture.name in place else member

            methods.append(
                "__device__ __forceinline__ Dual traced(float x, const Element& at, Trace& trace) const {\n"
                f"return score_mod<Dual>(x, {at}, {offset}{score.pick('s', traced)});\n}}"
            )
        given = {"kScore": bool(score), "kMask": bool(mask), "kReads": self.reads}
        flags = f"static constexpr bool {', '.join(f'{name} = {str(is_).lower()}' for name, is_ in given.items())};"
        functions = "".join(mod.cpp() for mod in (score, mask) if mod)
        body = "\n".join([flags, *members, *methods])
        return f'#line 1 "mods"\nnamespace cupyflash::mod {{\n{functions}struct UserMods {{\n{body}\n}};\n}}\n'

    def error(self, log: str, target: str) -> ModError:
        """What the compiler said, below the user's own lines."""
        parts = []
        for mod in (self.score, self.mask):
            said = _said(log, mod) if mod else {}
            if said:
                parts.append(f"{mod.argument} does not compile for {target}:")
                for n, line in enumerate(mod.text.splitlines(), 1):
                    parts.append(f"{'>' if n in said else ' '} {n:3} | {line}")
                    parts += [f"      ^ {message}" for message in said.get(n, ())]
        return ModError("\n".join(parts) or f"score_mod or mask_mod does not compile for {target}:\n{log}")


def _said(log: str, mod: Mod) -> dict[int, list[str]]:
    """Messages of the compiler by line of the text, also those about what the text calls and what ends too early."""
    said: dict = {}
    for message in re.split(r"\n\s*\n", log):
        found = re.search(r"^(.+)\((\d+)\): (?:catastrophic )?error[^:\n]*: (.*)$", message, re.M)
        if not found:
            continue
        where, line, text = found.groups()
        called = re.search(rf"at line (\d+) of ((?:after )?{mod.argument})$", message, re.M)
        if called and not where.endswith(mod.argument):
            line, where = called.groups()
        if where == f"after {mod.argument}":
            line = len(mod.text.splitlines())
            text = "a path ends without return" if "missing return" in text else text
        elif where != mod.argument:
            continue
        said.setdefault(int(line), []).append(text)
    return said


class Given(NamedTuple):
    """The functions of one call, and the views of the arrays that they captured."""

    score: ScoreMod | None
    mask: MaskMod | None
    views: dict

    def captured(self) -> list:
        """Values in the order of `Mods.captures`: arrays, and the words of numbers."""
        return [
            self.views[f"{mod.argument}.{name}"] if f"{mod.argument}.{name}" in mod.arrays else _word(x)
            for mod in (self.score, self.mask)
            if mod is not None
            for name, x in mod.captures.items()
        ]

    def keywords(self, mod, dtype) -> dict:
        """What a Python function captured, floating-point numbers as `dtype`."""

        def wide(name, x):
            x = self.views.get(f"{mod.argument}.{name}", x)
            return x.astype(dtype) if getattr(x, "dtype", None) in _FLOAT_DTYPES and getattr(x, "ndim", 0) else x

        return {name: wide(name, x) for name, x in mod.captures.items()}


_FLOAT_DTYPES = [dtype for dtype, name in HOST_TYPES.items() if name in FLOATS]


def _word(number) -> int:
    """The 64 bits that hold a number of 32 bits, or a bool."""
    kind = _number_type(number)
    if kind == "float":
        return int(np.float32(number).view(np.uint32))
    return int(number) & 0xFFFFFFFF
