"""The ops that no float stage changes, written as their formulas.

Shapes: T new tokens, S seen, D model width, F ffn width, V vocabulary, hd head size. Arrays are float32. A sum
runs in order; rms_norm and silu compute in float64 and round once, since a few outliers hold most of what they sum, and
their cost does not show beside a matmul.
"""

import math

import numpy as np

from common.jit import njit


@njit
def add(a, b):  # (T, D), (T, D) -> (T, D)
    """a + b: the residual connection."""
    return a + b


@njit
def mul(a, b):  # (T, F), (T, F) -> (T, F)
    """a * b, element by element: the gate of SwiGLU (Shazeer 2020, arXiv 2002.05202)."""
    return a * b


@njit
def silu(x):  # (T, F) -> (T, F)
    """x * sigmoid(x)."""
    T, F = x.shape
    out = np.empty_like(x)
    for t in range(T):
        for f in range(F):
            wide = np.float64(x[t, f])
            out[t, f] = wide / (1 + math.exp(-wide))
    return out


@njit
def scale(x, factor):  # (S,), () -> (S,)
    """factor * x."""
    return np.float32(factor) * x


@njit
def dot(a, b):  # (hd,), (hd,) -> ()
    """The sum of a * b."""
    total = np.float32(0)
    for d in range(a.shape[0]):
        total += a[d] * b[d]
    return total


@njit
def softmax(x):  # (S,) -> (S,)
    """exp(x) over its sum, less the maximum first so that exp never overflows."""
    out = np.exp(x - np.max(x))
    return out / np.sum(out)


@njit
def rms_norm(x, weight, eps):  # (T, D), (D,), () -> (T, D)
    """x over its root mean square, times weight (Zhang & Sennrich 2019, arXiv 1910.07467)."""
    T, D = x.shape
    out = np.empty_like(x)
    for t in range(T):
        total = 0.0
        for d in range(D):
            total += np.float64(x[t, d]) * np.float64(x[t, d])
        inverse = 1 / math.sqrt(total / D + eps)
        for d in range(D):
            out[t, d] = x[t, d] * inverse * weight[d]
    return out


@njit
def rope(x, freqs, start):  # (T, heads, hd), (hd/2,), () -> (T, heads, hd)
    """Turn each pair (2i, 2i+1) by position * freqs[i] radians (Su et al. 2021, arXiv 2104.09864).

    Row t stands at position start + t. Dimensions beyond the last pair are left as they are.
    """
    out = x.copy()
    for t in range(x.shape[0]):
        for i in range(freqs.shape[0]):
            angle = (start + t) * freqs[i]  # float64: at position 8000 float32 would be off by 1e-4 of a turn
            cos, sin = np.float32(math.cos(angle)), np.float32(math.sin(angle))
            for h in range(x.shape[1]):
                a, b = x[t, h, 2 * i], x[t, h, 2 * i + 1]
                out[t, h, 2 * i] = a * cos - b * sin
                out[t, h, 2 * i + 1] = a * sin + b * cos
    return out


@njit
def argmax(x):  # (V,) -> ()
    """The index of the largest value, the first where several are equal.

    Raises FloatingPointError if a value is NaN or infinite, since NaN compares false with everything.
    """
    best = 0
    for i in range(x.shape[0]):
        if not math.isfinite(x[i]):
            raise FloatingPointError("a logit is not finite")
        if x[i] > x[best]:
            best = i
    return best
