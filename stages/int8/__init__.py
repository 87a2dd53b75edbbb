"""The ladder of a linear layer in int8: rounded after training, with what calibration saw kept in floating point.

out = x w^T + b for x (T, K), w (N, K) and b (N,). A rung rounds w before the clock and x under it. The ladder runs on
the GPU where there is one (FP16) and else on one core of the CPU (FP32); the shapes are a feed-forward matrix of
TinyLlama and the output projection of a translation model with 52,239 words.
"""

ENTRY = "linear"
STAGES = dict.fromkeys(("float", "absmax", "outliers", "tensor_core"), ("int8",))
AXES = ("T", "N", "K")
MATRICES = {"feed-forward": (5632, 2048), "vocabulary": (52239, 512)}  # N, K
SHAPES = [(t, n, k) for t in (1, 16, 512) for n, k in MATRICES.values()]
SHAPE = (16, 5632, 2048)
ODD_SHAPES = [
    (1, 1, 1),
    (3, 5, 7),
    (1, 4099, 31),
    (4, 33, 1000),
    (5, 17, 4100),
    (17, 130, 768),
    (65, 100, 513),
    (129, 257, 2304),
    (2, 40000, 256),
    (300, 52, 64),
]
EVERY = 100  # one channel in so many is an outlier in the ladder's inputs
LOUD = 20  # and so many times as loud as the others
TOLERANCE = {"int8": {"rounding": 2.0**-11, "sums": 1.0, "tiny": 2.0**-14, "nmse": 2e-2}}  # absmax's rounding; see size


def __getattr__(name):
    """DEVICE, which is asked of the machine when it is needed."""
    if name != "DEVICE":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from common import kernel_gpu

    return "cpu" if kernel_gpu.missing() else "gpu"


def flops(t: int, n: int, k: int) -> int:
    """A multiplication and an addition for every triple."""
    return 2 * t * n * k


def traffic(t: int, n: int, k: int, dtype: str) -> int:
    """The fewest bytes: a byte a weight and a step a row read once, x read and out written once in FP16."""
    return n * k + 4 * n + 2 * (t * k + t * n)


def inputs(shape, dtype, seed, xp=None):
    """Random x with a few loud channels, w, b, and the largest |x| of each channel that calibration has seen.

    On the GPU in FP16, or where the module `xp` keeps arrays: NumPy's are FP32.
    """
    if xp is None:
        import importlib

        xp = importlib.import_module("cupy" if __getattr__("DEVICE") == "gpu" else "numpy")
    t, n, k = shape
    draw, kind = xp.random.RandomState(seed), "float32" if xp.__name__ == "numpy" else "float16"
    loud = xp.ones(k, "float32")
    loud[draw.permutation(k)[: k // EVERY]] = LOUD
    x = (draw.standard_normal((t, k)).astype("float32") * loud).astype(kind)
    w = (draw.standard_normal((n, k)).astype("float32") / k**0.5).astype(kind)
    seen = abs(draw.standard_normal((32, k)).astype("float32") * loud).max(0)
    return x, w, draw.standard_normal(n).astype(kind), seen


def oracle(x, w, b, seen):
    """The layer in float64, and how far rounding may take it: half a step for each operand, all errors of one sign."""
    x, w, b = (a.astype("float64") for a in (x, w, b))
    step_x, step_w = abs(x).max(1)[:, None] / 127, abs(w).max(1)[None, :] / 127
    size = step_x * abs(w).sum(1)[None, :] / 2 + abs(x).sum(1)[:, None] * step_w / 2 + x.shape[1] * step_x * step_w / 4
    return x @ w.T + b, size


_kept = {}  # what each rung made of the last weights: its rounding is no part of the clock


def kept(make, w, b, seen):
    """make(w, b, seen), kept while it is asked for the same arrays again."""
    if _kept.get(make, (None,))[0] is not w:
        _kept[make] = w, make(w, b, seen)
    return _kept[make][1]


def blas(x, w, b, seen):
    """What a user would call, in the operands' own type: NumPy's matmul, or cuBLASLt with the bias inside."""
    if type(x).__module__ == "numpy":
        return x @ w.T + b
    import cupy
    import torch

    return cupy.from_dlpack(torch.nn.functional.linear(*map(torch.from_dlpack, (x, w, b))))


def bitsandbytes(x, w, b, seen):
    """Linear8bitLt of bitsandbytes, which looks for outliers above 6 in each x anew."""
    if type(x).__module__ == "numpy":
        raise NotImplementedError("timed on a GPU only")
    import cupy
    import torch

    layer = kept(_linear8bit, w, b, seen)
    try:
        with torch.no_grad():
            return cupy.from_dlpack(layer(torch.from_dlpack(x)))
    except RuntimeError as error:
        raise NotImplementedError(str(error).splitlines()[0]) from error


def _linear8bit(w, b, seen):
    import torch
    from bitsandbytes.nn import Linear8bitLt

    layer = Linear8bitLt(w.shape[1], w.shape[0], has_fp16_weights=False, threshold=6.0)
    layer.load_state_dict({"weight": torch.from_dlpack(w).cpu(), "bias": torch.from_dlpack(b).cpu()})
    return layer.cuda()


BASELINES = {"blas": blas, "bitsandbytes": bitsandbytes}
BOUNDS = {}
