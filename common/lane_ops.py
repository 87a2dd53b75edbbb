"""Ops other than matmul, sixteen numbers at a time. Shapes and sources as in common/cpu_ops.py."""

import math
from functools import partial

import numpy as np

from common.intrinsics import (
    LANES,
    between,
    highest,
    larger,
    load_lanes,
    multiply_add,
    nearest,
    power_of_two,
    store_lanes,
    sums_as_floats,
    total,
    zero_below,
    zero_lanes,
)
from common.jit import njit

LOG2E = np.float32(math.log2(math.e))
HIGH, LOW = np.float32(0.693359375), np.float32(math.log(2) - 0.693359375)  # of ln 2: n times the first is exact
LEAST, MOST = np.float32(-87), np.float32(88)  # of x: beyond, e^x is no ordinary float32
# Fitted to (e^r - 1 - r) / r^2 where r is at most half of ln 2, to a rounding of e^r; the r^5 term first.
TERMS = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
TERM5, TERM4, TERM3, TERM2, TERM1, TERM0 = map(np.float32, TERMS)

inlined = partial(njit, _nrt=False, forceinline=True)


@njit
def rms_norm(x, weight, eps):  # (T, D), (D,), () -> (T, D)
    """x over its root mean square, times weight."""
    T, D = x.shape
    out, full = np.empty_like(x), D - D % LANES
    for t in range(T):
        lanes = zero_lanes(1)
        for i in range(0, full, LANES):
            lanes = multiply_add(load_lanes(x, (t, i)), load_lanes(x, (t, i)), lanes)
        squares = total(lanes)
        for i in range(full, D):
            squares += x[t, i] * x[t, i]
        inverse = np.float32(1 / math.sqrt(squares / D + eps))
        for i in range(0, full, LANES):
            store_lanes(out, (t, i), load_lanes(x, (t, i)) * inverse * load_lanes(weight, i))
        for i in range(full, D):
            out[t, i] = x[t, i] * inverse * weight[i]
    return out


@inlined
def exp(x):
    """e^x of each lane as 2^n e^r: 0 below LEAST, as at MOST above it, and NaN where x is."""
    within = between(x, LEAST, MOST)
    n = nearest(within * LOG2E)
    r = multiply_add(sums_as_floats(n), -LOW, multiply_add(sums_as_floats(n), -HIGH, within))
    p = multiply_add(r, TERM5, zero_lanes(1) + TERM4)
    p = multiply_add(p, r, zero_lanes(1) + TERM3)
    p = multiply_add(p, r, zero_lanes(1) + TERM2)
    p = multiply_add(p, r, zero_lanes(1) + TERM1)
    p = multiply_add(p, r, zero_lanes(1) + TERM0)
    return zero_below((multiply_add(p, r * r, r) + np.float32(1)) * power_of_two(n), x, LEAST)


@inlined
def silu_lanes(lanes):
    return lanes / (exp(lanes * np.float32(-1)) + np.float32(1))


@njit
def silu(x):  # (T, F) -> (T, F)
    """x * sigmoid(x)."""
    out = np.empty_like(x)
    values, written = x.reshape(-1), out.reshape(-1)
    full = len(values) - len(values) % LANES
    for i in range(0, full, LANES):
        store_lanes(written, i, silu_lanes(load_lanes(values, i)))
    if full < len(values):
        rest = np.zeros(LANES, np.float32)
        rest[: len(values) - full] = values[full:]
        store_lanes(rest, 0, silu_lanes(load_lanes(rest, 0)))
        written[full:] = rest[: len(values) - full]
    return out


@njit
def softmax(x):  # (S,) -> (S,)
    """exp(x) over its sum, less the maximum first so that exp never overflows."""
    S = len(x)
    out = np.full((S + LANES - 1) // LANES * LANES, -np.inf, np.float32)
    out[:S] = x
    most = load_lanes(out, 0)
    for i in range(LANES, len(out), LANES):
        most = larger(most, load_lanes(out, i))
    top, sums = highest(most), zero_lanes(1)
    for i in range(0, len(out), LANES):
        lanes = exp(load_lanes(out, i) - top)
        sums = sums + lanes
        store_lanes(out, i, lanes)
    share = np.float32(1) / total(sums)
    for i in range(0, len(out), LANES):
        store_lanes(out, i, load_lanes(out, i) * share)
    return out[:S]
