"""The ladder of matrix multiplication on one CPU core, in numba: from a triple loop to OpenBLAS's own method.

FP32, one thread. `lesson compare gemm_cpu/naive gemm_cpu/tiled` checks and times two rungs.
"""

ENTRY = "matmul"
DEVICE = "cpu"
STAGES = {
    "naive": ("float32",),
    "tiled": ("float32",),
    "contiguous": ("float32",),
    "blocked": ("float32",),
    "packed": ("float32",),
}
SHAPES = [(n, n, n) for n in (512, 1000, 1024, 2048)]  # M, N, K; 1000 for a row that is no power of two
SHAPE = (512, 512, 512)  # what a comparison runs unless told otherwise: naive takes about a second
ODD_SHAPES = [
    (1, 1, 1),
    (1, 1, 4097),
    (3, 5, 7),
    (257, 129, 1),
    (1, 4099, 513),
    (4099, 1, 513),
    (127, 257, 33),
    (13, 1057, 300),
    (61, 65, 1031),
    (5000, 17, 31),
    (17, 5000, 64),
]
TOLERANCE = {"float32": {"rounding": 2.0**-24, "sums": 1e-5, "tiny": 2.0**-126, "nmse": 1e-9}}


def flops(m: int, n: int, k: int) -> int:
    """A multiplication and an addition for every triple."""
    return 2 * m * n * k


def traffic(m: int, n: int, k: int, dtype: str) -> int:
    """The fewest bytes: x and w read once, out written once."""
    return (m * k + k * n + m * n) * 4


def inputs(shape, dtype, seed):
    """Random x (M, K) and w (K, N), standard normal."""
    import numpy

    m, n, k = shape
    draw = numpy.random.default_rng(seed).standard_normal
    return draw((m, k), dtype), draw((k, n), dtype)


def oracle(x, w):
    """The product of the given numbers in float64, and |x| @ |w|, the size against which rounding is judged."""
    x, w = x.astype("float64"), w.astype("float64")
    return x @ w, abs(x) @ abs(w)


def numpy(x, w):
    """What a user would call: NumPy, and so the BLAS it was built with, kept to one thread."""
    return x @ w


BASELINES = {"numpy": numpy}
BOUNDS = {}
