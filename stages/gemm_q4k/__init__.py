"""The ladder of the matmul that an LLM lives on: FP32 activations times Q4_K weights as they lie in the file.

x is (T, K) float32, w is (N, K / 256 * 144) uint8, out is (T, N) float32. With one token the time is that of reading w,
with many it is that of multiplying; the rungs move from one bound to the other. Shapes are TinyLlama's.
"""

ENTRY = "matmul"
STAGES = {
    "naive": ("q4_k",),
    "coalesced": ("q4_k",),
    "tokens": ("q4_k",),
    "tensor_core": ("q4_k",),
    "triton": ("q4_k",),
}
MATRICES = {"attn_q": (2048, 2048), "attn_k": (256, 2048), "ffn_gate": (5632, 2048), "ffn_down": (2048, 5632)}  # N, K
SHAPES = [(t, n, k) for t in (1, 16, 64, 512) for n, k in MATRICES.values()]  # T, N, K
ODD_SHAPES = [
    (1, 1, 256),
    (3, 5, 256),
    (7, 33, 1280),
    (17, 130, 768),
    (65, 100, 512),
    (129, 257, 2304),
    (2, 40000, 256),
]
TOLERANCE = {"q4_k": {"rounding": 2.0**-24, "sums": 1e-3, "tiny": 2.0**-126, "nmse": 1e-6}}  # FP16 operands


def flops(t: int, n: int, k: int) -> int:
    """A multiplication and an addition for every triple."""
    return 2 * t * n * k


def traffic(t: int, n: int, k: int, dtype: str) -> int:
    """The fewest bytes: blocks and x read once, out written once."""
    return n * k // 256 * 144 + (t * k + t * n) * 4


def inputs(shape, dtype, seed):
    """Random x, standard normal, and random blocks whose weights are about a trained model's size."""
    import cupy

    t, n, k = shape
    draw = cupy.random.RandomState(seed)
    w = draw.randint(0, 256, (n, k // 256, 144), "uint8")
    halves = draw.uniform(2e-5, 1e-4, (n, k // 256, 2)).astype("float16")
    halves[..., 1] *= 8  # mins are of the size of scale * 8: weights are then centred
    w[..., :4] = halves.view("uint8")
    return draw.standard_normal((t, k), "float32"), w.reshape(n, -1)


def unpack(w):
    """The exact weights of blocks w, (N, K) float64, by the formula of ggml-quants.c; apart from every kernel here."""
    import cupy

    block = w.reshape(w.shape[0], -1, 144)
    d = block[..., :4].copy().view("float16").astype("float64")
    s = block[..., 4:16]
    scale = cupy.concatenate([s[..., :4] & 63, s[..., 8:] & 15 | s[..., :4] >> 6 << 4], -1)
    low = cupy.concatenate([s[..., 4:8] & 63, s[..., 8:] >> 4 | s[..., 4:8] >> 6 << 4], -1)
    q = block[..., 16:].reshape(*block.shape[:2], 4, 1, 32)
    q = cupy.concatenate([q & 15, q >> 4], -2).reshape(*block.shape[:2], 8, 32)
    weights = d[..., :1, None] * scale[..., None] * q - d[..., 1:, None] * low[..., None]
    return weights.reshape(w.shape[0], -1)


def oracle(x, w):
    """The exact product in float64, and |x| @ |w|, the size against which rounding is judged."""
    import cupy

    x, weights = x.astype("float64"), unpack(w)
    return x @ weights.T, cupy.abs(x) @ cupy.abs(weights).T


_halves = {}  # of the last w and x seen: what the baselines may prepare before the clock


def halves(name: str, array, convert):
    """convert(array), kept while it is asked for the same array again."""
    if _halves.get(name, (None,))[0] is not array:
        _halves[name] = array, convert(array)
    return _halves[name][1]


def cublas(x, w):
    """cuBLAS in FP16 on weights unpacked beforehand: 3.6 times the bytes, nothing to unpack. x is rounded here."""
    return x.astype("float16") @ halves("w", w, lambda w: unpack(w).astype("float16").T.copy())


def cublas_halves(x, w):
    """As cublas, with x rounded beforehand too."""
    return halves("x", x, lambda x: x.astype("float16")) @ halves("w", w, None)


BASELINES = {"cublas": cublas, "cublas_halves": cublas_halves}
READ = r"""
extern "C" __global__ void read(const uint4* w, unsigned* out, long long count) {
    unsigned bits = 0;
    for (long long i = blockIdx.x * 512ll + threadIdx.x; i < count; i += gridDim.x * 512ll) {
        const uint4 v = w[i];
        bits |= v.x ^ v.y ^ v.z ^ v.w;
    }
    if (bits == 0xFFFFFFFF) out[0] = bits;  // almost never, but the compiler cannot know
}
"""


def read(x, w):
    """Read every byte of w and do nothing with it: the bound at T = 1, measured as the rungs are."""
    import cupy
    import numpy

    from common.cuda import Program, processors

    count = w.nbytes // 16
    blocks = min(processors() * 4, -(-count // 512))
    Program(READ, (), ("sm_75",)).launch("read", blocks, 512, (w, cupy.empty(1, "uint32"), numpy.int64(count)))


BOUNDS = {"read": read}
