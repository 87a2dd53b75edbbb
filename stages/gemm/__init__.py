"""The ladder of matrix multiplication: from one thread an output to Hopper's own instructions.

Eight rungs of CUDA C++ in FP32 and FP16, and one in Triton. `common.kernel_ladder` checks, times and tables them.
"""

ENTRY = "matmul"
STAGES = {
    "naive": ("float32",),
    "coalesced": ("float32",),
    "tiled": ("float32",),
    "coarsened": ("float32",),
    "register_2d": ("float32",),
    "vectorized": ("float32",),
    "warptiled": ("float32",),
    "tensor_core": ("float16",),
    "hopper": ("float16",),
    "triton": ("float32", "float16"),
}
SHAPES = [(n, n, n) for n in (512, 1024, 2048, 4096, 8192)]  # M, N, K
TOLERANCE = {  # sums: FP32 additions, in a tensor core with fewer guard bits; rounding: of the stored result
    "float32": {"rounding": 2.0**-24, "sums": 1e-5, "tiny": 2.0**-126, "nmse": 1e-9},
    "float16": {"rounding": 2.0**-11, "sums": 1e-5, "tiny": 2.0**-24, "nmse": 2e-7},
}
ODD_SHAPES = [
    (1, 1, 1),
    (1, 1, 4097),
    (3, 5, 7),
    (257, 129, 1),
    (1, 4099, 513),
    (4099, 1, 513),
    (127, 257, 33),
    (129, 1000, 1023),
    (1023, 65, 8191),
    (5000, 17, 31),
    (17, 5000, 64),
    (200000, 3, 5),
    (3, 200000, 5),
]


def flops(m: int, n: int, k: int) -> int:
    """A multiplication and an addition for every triple."""
    return 2 * m * n * k


def traffic(m: int, n: int, k: int, dtype: str) -> int:
    """The fewest bytes: x and w read once, out written once."""
    return (m * k + k * n + m * n) * {"float32": 4, "float16": 2}[dtype]


def inputs(shape, dtype, seed):
    """Random x (M, K) and w (K, N), standard normal, on the GPU."""
    import cupy

    m, n, k = shape
    draw = cupy.random.RandomState(seed).standard_normal
    return draw((m, k), "float32").astype(dtype), draw((k, n), "float32").astype(dtype)


def oracle(x, w):
    """The product of the given numbers in float64, and |x| @ |w|, the size against which rounding is judged."""
    import cupy

    x, w = x.astype("float64"), w.astype("float64")
    return x @ w, cupy.abs(x) @ cupy.abs(w)


def cublas(x, w):
    """What a user would call: cuBLAS through CuPy, FP32 sums, TF32 off."""
    return x @ w


def torch(x, w):
    """cuBLAS as PyTorch calls it, TF32 off."""
    import cupy
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    return cupy.from_dlpack(torch.from_dlpack(x) @ torch.from_dlpack(w))


BASELINES = {"cublas": cublas, "torch": torch}
BOUNDS = {}
