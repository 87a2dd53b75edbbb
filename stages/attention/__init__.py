"""The ladder of attention: from a score matrix in memory to tiles that never leave the processor.

softmax(q k^T / sqrt(D)) v for FP16 or BF16 with FP32 sums: causal or not, padded or not, query heads that share key
heads, more or fewer keys than queries. A rung returns the output and the log-sum-exp of each row, which the backward
pass needs.
"""

import contextlib
import math
import sys
from typing import NamedTuple

from common.cuda_attention import HEADS, array, tensor, visible


class Shape(NamedTuple):
    """One problem: q is (B, H, Q, D), k and v are (B, G, K, D)."""

    B: int
    H: int
    G: int  # key heads, each shared by H / G query heads
    Q: int
    K: int
    D: int
    causal: int = 1  # query i sees keys up to i + K - Q
    padded: int = 0  # 1: each batch has its own number of keys, 0 to K; the rest is padding


ENTRY = "attention"
STAGES = dict.fromkeys(("naive", "online", "flash", "skip", "hopper", "triton"), ("float16", "bfloat16"))
AXES = Shape._fields
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)


def square(n: int, D: int = 64, causal: int = 1) -> Shape:
    """n queries and n keys: 16384 tokens in all where n divides that, and a model of 2048."""
    return Shape(max(1, 16384 // n), 2048 // D, 2048 // D, n, n, D, causal)


SHAPE = square(4096)
SHAPES = [square(n, D, causal) for causal in (1, 0) for D in HEADS for n in LENGTHS]
FEWER = {"bfloat16": [square(n, 128) for n in LENGTHS]}  # it runs as FP16 does: one head size is enough to see that
ODD_SHAPES = [
    Shape(1, 1, 1, 1, 1, 64),
    Shape(1, 1, 1, 5, 3, 64, causal=0),  # below one tile
    Shape(2, 3, 1, 65, 65, 128),
    Shape(2, 4, 2, 257, 257, 64, padded=1),
    Shape(3, 2, 2, 127, 127, 128, causal=0, padded=1),
    Shape(1, 8, 2, 1000, 1000, 64),
    Shape(2, 2, 1, 33, 700, 128),  # queries that continue a cache of keys
    Shape(2, 2, 1, 1, 321, 64),
    Shape(2, 2, 2, 300, 130, 64),  # the first 170 queries see no key at all
    Shape(3, 4, 4, 129, 511, 128, causal=0, padded=1),  # cross attention
    Shape(1, 2, 1, 2049, 2049, 128),
    Shape(5, 1, 1, 191, 193, 64, padded=1),
]
_LSE = {"rounding": 2.0**-24, "sums": 1e-4, "tiny": 2.0**-126, "nmse": 1e-8}
TOLERANCE = {  # of out and lse. Weights are rounded to the operands' type before they are multiplied: that is `sums`
    "float16": ({"rounding": 2.0**-11, "sums": 2.0**-10, "tiny": 2.0**-24, "nmse": 1e-6}, _LSE),
    "bfloat16": ({"rounding": 2.0**-8, "sums": 2.0**-7, "tiny": 2.0**-126, "nmse": 6e-5}, _LSE),
}


def parse(text: str) -> Shape:
    """'4096', '4096,128' (a head size), or all of B,H,G,Q,K,D and perhaps causal, padded. Raises ValueError."""
    words = text.replace("x", ",").split(",")
    if not all(word.isdecimal() for word in words) or len(words) not in (1, 2, 6, 7, 8):
        raise ValueError(f"give {','.join(AXES)}, or N, or N,D for as many queries as keys")
    numbers = [int(word) for word in words]
    if min(numbers[:6]) > 0:
        shape = square(*numbers) if len(numbers) < 3 else Shape(*numbers)
        if shape.D in HEADS and shape.H % shape.G == 0 and max(shape.causal, shape.padded) <= 1:
            return shape
    raise ValueError("sizes start at 1, D is 64 or 128, H a multiple of G, causal and padded 0 or 1")


def flops(B, H, G, Q, K, D, causal=1, padded=0) -> int:
    """Two products of Q x K x D a head; half of each where a causal mask halves it, for whoever computes it."""
    return (2 if causal else 4) * B * H * Q * K * D


def traffic(B, H, G, Q, K, D, causal, padded, dtype: str) -> int:
    """The fewest bytes: q, k and v read once, out and lse written once."""
    return 2 * (2 * B * H * Q * D + 2 * B * G * K * D) + 4 * B * H * Q


def outputs(B, H, G, Q, K, D, causal, padded) -> list[tuple]:
    """The shapes of out and lse."""
    return [(B, H, Q, D), (B, H, Q)]


def rounded(x, dtype: str):
    """An FP32 array as the kernels take it: FP16, or BF16's bits as uint16, to nearest even."""
    if dtype == "float16":
        return x.astype("float16")
    bits = x.view("uint32")
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("uint16")


def inputs(shape, dtype, seed, xp=None):
    """Random q, k, v, standard normal, the lengths, and causal; on the GPU, or where the module `xp` keeps arrays.

    Padding holds large numbers, so that a kernel which looks at it is seen.
    """
    if xp is None:
        import cupy as xp
    B, H, G, Q, K, D, causal, padded = Shape(*shape)
    draw = xp.random.RandomState(seed)
    q, k, v = (draw.standard_normal((B, h, n, D)).astype("float32") for h, n in ((H, Q), (G, K), (G, K)))
    lengths = xp.asarray([(b * 7919 + seed * 31) % (K + 1) for b in range(B)] if padded else [K] * B, "int32")
    hidden = xp.arange(K)[None, :] >= lengths[:, None]
    k, v = (xp.where(hidden[:, None, :, None], xp.float32(64), a) for a in (k, v))
    return *(rounded(a, dtype) for a in (q, k, v)), lengths, causal


def oracle(q, k, v, lengths, causal):
    """(out, lse) in float64 from the given numbers, and the sizes against which rounding is judged.

    A row that sees no key has an output of 0 and a log-sum-exp of -inf. Sizes: weights times |v|, and 1 + |lse|.
    """
    from common.kernel_ladder import wide

    xp = sys.modules[type(q).__module__.partition(".")[0]]
    (B, H, Q, D), (G, K) = q.shape, k.shape[1:3]
    out, size, lse = xp.zeros(q.shape), xp.zeros(q.shape), xp.full((B, H, Q), -math.inf)
    rows = max(1, 2**26 // K)  # of scores at a time: half a gigabyte
    for b in range(B):
        length, values = int(lengths[b]), {}
        for h in range(H):
            g = h // (H // G)
            if g not in values:
                values = {g: (wide(k[b, g]), wide(v[b, g]))}
            keys, weighed = values[g]
            for i in range(0, Q, rows):
                part = slice(i, min(i + rows, Q))
                seen = xp.asarray([visible(t, length, Q, K, causal) for t in range(part.start, part.stop)])
                scores = wide(q[b, h, part]) @ keys.T / math.sqrt(D)
                scores[xp.arange(K)[None, :] >= seen[:, None]] = -math.inf
                most = xp.where(seen > 0, scores.max(1), 0)
                weights = xp.exp(scores - most[:, None])
                total = weights.sum(1)
                weights /= xp.where(total > 0, total, 1)[:, None]
                out[b, h, part], size[b, h, part] = weights @ weighed, weights @ abs(weighed)
                lse[b, h, part] = xp.where(total > 0, most + xp.log(xp.where(total > 0, total, 1)), -math.inf)
    return (out, lse), (size, 1 + xp.where(xp.isfinite(lse), abs(lse), 0))


_last = {}  # the lengths last seen, and the shortest: asking the GPU again at each call would cost time


def shortest(lengths) -> int:
    """The fewest keys of any batch, read from the GPU once for each array."""
    if _last.get("array") is not lengths:
        _last.update(array=lengths, shortest=int(lengths.min()))
    return _last["shortest"]


def sdpa(q, k, v, lengths, causal, backend=None):
    """PyTorch's scaled_dot_product_attention, by the named backend or by its own choice. It gives no log-sum-exp."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if (causal and q.shape[2] != k.shape[2]) or shortest(lengths) < k.shape[2]:
        raise NotImplementedError("PyTorch's kernels take neither this ladder's causal mask nor its lengths here")
    with sdpa_kernel(getattr(SDPBackend, backend)) if backend else contextlib.nullcontext():
        attend = torch.nn.functional.scaled_dot_product_attention
        try:
            out = attend(*map(tensor, (q, k, v)), is_causal=bool(causal), enable_gqa=q.shape[1] != k.shape[1])
        except RuntimeError as error:
            raise NotImplementedError(str(error).splitlines()[0]) from error
    return array(out), None


def flash(q, k, v, lengths, causal):
    """PyTorch pinned to its FlashAttention-2."""
    return sdpa(q, k, v, lengths, causal, "FLASH_ATTENTION")


def cudnn(q, k, v, lengths, causal):
    """PyTorch pinned to cuDNN."""
    return sdpa(q, k, v, lengths, causal, "CUDNN_ATTENTION")


BASELINES = {"sdpa_flash": flash, "sdpa_cudnn": cudnn, "sdpa": sdpa}
BOUNDS = {}
