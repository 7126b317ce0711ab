"""Dual numbers (W. K. Clifford, 1873): arrays that carry a derivative through whatever is computed from them.

``kernels/core/dual.cuh`` is the same for the kernels. At a kink, the derivative of ``abs`` is 0, and ``minimum`` and
``maximum`` of equal numbers take that of the first.
"""

from __future__ import annotations

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

# Derivatives by each argument, of the arguments x, y and the result r.
_ONE = {
    np.positive: lambda x, r: 1,
    np.negative: lambda x, r: -1,
    np.absolute: lambda x, r: np.sign(x),
    np.exp: lambda x, r: r,
    np.log: lambda x, r: 1 / x,
    np.sqrt: lambda x, r: 0.5 / r,
    np.square: lambda x, r: 2 * x,
    np.tanh: lambda x, r: 1 - r * r,
    np.sin: lambda x, r: np.cos(x),
    np.cos: lambda x, r: -np.sin(x),
}
_TWO = {
    np.add: (lambda x, y, r: 1, lambda x, y, r: 1),
    np.subtract: (lambda x, y, r: 1, lambda x, y, r: -1),
    np.multiply: (lambda x, y, r: y, lambda x, y, r: x),
    np.divide: (lambda x, y, r: 1 / y, lambda x, y, r: -r / y),
    np.minimum: (lambda x, y, r: ~(y < x), lambda x, y, r: y < x),
    np.maximum: (lambda x, y, r: ~(y > x), lambda x, y, r: y > x),
    np.power: (lambda x, y, r: y * x ** (y - 1), lambda x, y, r: np.log(x) * r),
}
_WITHOUT = {  # what has no derivative: truth
    *(np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal),
    *(np.isnan, np.isinf, np.isfinite, np.signbit, np.logical_not, np.logical_and, np.logical_or),
}


class Dual(NDArrayOperatorsMixin):
    """An array and its derivative, by some number."""

    def __init__(self, value, tangent):
        self.value = value
        self.tangent = tangent

    @property
    def shape(self):
        return self.value.shape

    @property
    def dtype(self):
        return self.value.dtype

    def __array_ufunc__(self, function, method, *inputs, **keywords):
        values = [_value(x) for x in inputs]
        if method == "__call__" and not keywords:
            if function in _WITHOUT:
                return function(*values)
            derivatives = (_ONE[function],) if function in _ONE else _TWO.get(function)
            if derivatives:
                result = function(*values)
                parts = [
                    x.tangent * d(*values, result)
                    for x, d in zip(inputs, derivatives, strict=True)
                    if isinstance(x, Dual)
                ]
                return Dual(result, sum(parts[1:], parts[0]))
        raise _unknown(function.__name__ + ("" if method == "__call__" else f".{method}"))

    def __array_function__(self, function, types, args, kwargs):
        if function is not np.where or kwargs or len(args) != 3:
            raise _unknown(function.__name__)
        condition, a, b = args
        condition = _value(condition)
        return Dual(np.where(condition, _value(a), _value(b)), np.where(condition, _tangent(a), _tangent(b)))

    def __getitem__(self, index):
        return Dual(self.value[index], np.broadcast_to(self.tangent, self.value.shape)[index])

    def __array__(self, *args, **kwargs):
        raise _unknown("numpy.asarray")


class Reads:
    """Counts what a function reads of captured arrays: one of the reads, and no other, has the derivative 1."""

    def __init__(self, looked_at: int):
        self.looked_at = looked_at
        self.count = 0
        self.name = None  # of the array that this one was of
        self.index = None

    def of(self, name, array):
        return _Read(self, name, array)


class _Read:
    """A captured array whose reads are counted."""

    def __init__(self, reads, name, array):
        self._reads, self._name, self._array = reads, name, array
        self.shape, self.ndim, self.dtype = array.shape, array.ndim, array.dtype

    def __getitem__(self, index):
        reads, value = self._reads, self._array[index]
        reads.count += 1
        if reads.count - 1 != reads.looked_at:
            return value
        reads.name, reads.index = self._name, index
        return Dual(value, np.ones_like(value))

    def __array__(self, *args, **kwargs):
        raise TypeError(f"{self._name} has a gradient; allowed: to read it by {self._name}[...]")


def score_and_tangent(function, score, places, captured):
    """Of `function` at `score`: what it returns, and its derivative by the score."""
    result = function(Dual(score, np.ones((), score.dtype)), *places, **captured)
    return _value(result), _tangent(result)


def reads(function, score, places, captured, names):
    """For each read of what has one of the `names`: the name, the index, and the derivative of the result by it.

    The function is called once for each read.
    """
    looked_at, count = 0, 1
    while looked_at < count:
        trace = Reads(looked_at)
        tracked = {name: trace.of(name, captured[name]) for name in names}
        tangent = _tangent(function(score, *places, **captured | tracked))
        count, looked_at = trace.count, looked_at + 1
        if trace.name is not None:
            index = trace.index if isinstance(trace.index, tuple) else (trace.index,)
            _check_index(trace.name, index, captured[trace.name].ndim)
            yield trace.name, tuple(np.broadcast_to(x, score.shape) for x in index), tangent


def add_gradients(sums, function, score, places, captured, ds):
    """Add to `sums`, by name, what `ds`, the gradient of the function's results, gives to each element that it read."""
    for name, index, tangent in reads(function, score, places, captured, sums):
        np.add.at(sums[name], index, np.where(ds == 0, 0, ds * tangent))


def _check_index(name, index, axes):
    if len(index) != axes or any(np.asarray(x).dtype.kind not in "iu" for x in index):
        kinds = ", ".join(type(x).__name__ for x in index)
        raise TypeError(f"{name} has a gradient and is read by ({kinds}); allowed: {axes} integers or arrays of them")


def _value(x):
    return x.value if isinstance(x, Dual) else x


def _tangent(x):
    return x.tangent if isinstance(x, Dual) else 0


def _unknown(name):
    known = sorted({f.__name__ for f in (*_ONE, *_TWO, *_WITHOUT)} | {"where"})
    return TypeError(f"score_mod calls {name}, whose derivative is not known; allowed: {', '.join(known)}")
