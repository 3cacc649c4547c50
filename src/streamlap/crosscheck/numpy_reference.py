"""What results have to be, by NumPy alone: plain copies, and products in float64 with a bound.

The bound is that of Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., 3.1 and 3.5:
a sum of ``k`` products, in any order, with or without fused operations, is computed with an error

    |fl(x y) - x y| <= gamma_k |x| |y|,   gamma_k = k u / (1 - k u),

element by element, where ``u`` is the unit roundoff. If the inputs are rounded first, each by a
relative error of at most ``v``, then ``|x| |y|`` grows by at most ``(1 + v)^2``, so that the whole
error is at most ``((1 + v)^2 (1 + gamma_k) - 1) |x| |y|``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

FP64 = 2.0**-53
FP32 = 2.0**-24
TF32_INPUT = 2.0**-10
"""TF32 keeps 10 bits after the point: 2^-11 if the input is rounded to nearest, 2^-10 if it is cut
off. Nobody promises which, so this is the larger one."""
TF32_SUM = 2.0**-22
"""Tensor cores add in fp32's format but cut off after aligning, so not with fp32's roundoff. This
allows for four times that."""


def gamma(k: int, u: float) -> float:
    """Return Higham's gamma_k (lemma 3.1); infinite where ``k u`` is not below 1."""
    return k * u / (1 - k * u) if k * u < 1 else float("inf")


def product(x: Array, y: Array) -> Array:
    """Return the matrix product in float64."""
    return x.astype(np.float64) @ y.astype(np.float64)


def product_bound(x: Array, y: Array, u: float, rounded_inputs: float = 0.0) -> Array:
    """Return how far each element of a computed product may be from :func:`product`.

    Args:
        x, y: matrices of shapes (m, k) and (k, n).
        u: the unit roundoff of the sums.
        rounded_inputs: the relative error with which the inputs are rounded first.

    The error of the float64 product itself, gamma_k of ``FP64``, is added. See the module for the
    formula.
    """
    k = x.shape[1]
    factor = (1 + rounded_inputs) ** 2 * (1 + gamma(k, u)) - 1 + gamma(k, FP64)
    return factor * product(np.abs(x), np.abs(y))


def pipelined_run(x: Array, n: int = 50) -> list[Array]:
    """Return ``n`` products of ``x`` (k, k) with itself, in float64: the plain loop."""
    return [product(x, x) for _ in range(n)]


def copy(x: Array) -> Array:
    """Return the values of ``x`` in new contiguous memory."""
    return np.array(x, order="C", copy=True)
