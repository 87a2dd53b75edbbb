"""A linear layer in floating point.

Idea    out = x w^T + b, by the library's own matmul, in the type that the operands have.
Was     Nothing: this is where the ladder begins.
Change  Nothing is rounded.
Expect  With one token every weight is read for one multiplication, and the time is that of reading them; with hundreds
        it is that of multiplying. Both would fall if a weight were a byte.
"""

from stages.int8 import kept

PREVIOUS = None
CHANGES = ()


def quantize(w, b, seen):  # (N, K), (N,), (K,)
    """The layer as `multiply` takes it; seen, the largest |x| of each channel that calibration saw, is not needed."""
    return w, b


def multiply(x, layer):  # (T, K) -> (T, N)
    w, b = layer
    return x @ w.T + b


def linear(x, w, b, seen):
    """The layer as the ladder times it: weights are made ready once."""
    return multiply(x, kept(quantize, w, b, seen))
