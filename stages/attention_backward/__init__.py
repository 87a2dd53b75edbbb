"""The ladder of attention's backward pass: from probabilities kept in memory to kernels that compute them again.

Given q, k, v, out, the log-sum-exp of each row, and the gradient of out, a rung returns those of q, k and v. Shapes,
masks and types are those of `attention`.
"""

import math
import sys

from common.cuda_attention import array, tensor
from stages import attention
from stages.attention import AXES, FEWER, ODD_SHAPES, SHAPE, SHAPES, parse, rounded, shortest, square  # noqa: F401

ENTRY = "backward"
STAGES = dict.fromkeys(("stored", "recomputed", "split", "skip", "hopper", "triton"), ("float16", "bfloat16"))
TOLERANCE = {  # of dq, dk and dv; weights, their gradients and the given out are rounded to the operands' type: `sums`
    "float16": ({"rounding": 2.0**-11, "sums": 2.0**-9, "tiny": 2.0**-24, "nmse": 1e-5},) * 3,
    "bfloat16": ({"rounding": 2.0**-8, "sums": 2.0**-6, "tiny": 2.0**-126, "nmse": 1e-3},) * 3,
}


def flops(*shape) -> int:
    """Five products where the forward pass has two: scores again, and the gradients of weights, values, q and k."""
    return attention.flops(*shape) * 5 // 2


def traffic(B, H, G, Q, K, D, causal, padded, dtype: str) -> int:
    """The fewest bytes: q, k, v, out, dout and lse read once, the three gradients written once."""
    return 2 * (4 * B * H * Q * D + 4 * B * G * K * D) + 4 * B * H * Q


def outputs(B, H, G, Q, K, D, causal, padded) -> list[tuple]:
    """The shapes of dq, dk and dv."""
    return [(B, H, Q, D), (B, G, K, D), (B, G, K, D)]


def inputs(shape, dtype, seed, xp=None):
    """attention's inputs, its exact output and log-sum-exp rounded, and a random gradient of the output."""
    if xp is None:
        import cupy as xp
    q, k, v, lengths, causal = attention.inputs(shape, dtype, seed, xp)
    (out, lse), _ = attention.oracle(q, k, v, lengths, causal)
    dout = xp.random.RandomState(seed + 1).standard_normal(q.shape).astype("float32")
    return q, k, v, rounded(out.astype("float32"), dtype), lse.astype("float32"), rounded(dout, dtype), lengths, causal


def oracle(q, k, v, out, lse, dout, lengths, causal):
    """(dq, dk, dv) in float64, and the sizes against which rounding is judged: each sum with all its terms positive."""
    from common.cuda_attention import visible
    from common.kernel_ladder import wide

    xp = sys.modules[type(q).__module__.partition(".")[0]]
    (B, H, Q, D), (G, K) = q.shape, k.shape[1:3]
    exact, size = ([xp.zeros(a.shape) for a in (q, k, v)] for _ in range(2))
    rows = max(1, 2**26 // K)
    for b, h in ((b, h) for b in range(B) for h in range(H)):
        g, keys, values = h // (H // G), wide(k[b, h // (H // G)]), wide(v[b, h // (H // G)])
        for i in range(0, Q, rows):
            part = slice(i, min(i + rows, Q))
            seen = xp.asarray([visible(t, int(lengths[b]), Q, K, causal) for t in range(part.start, part.stop)])
            queries, given, result = wide(q[b, h, part]), wide(dout[b, h, part]), wide(out[b, h, part])
            scores = queries @ keys.T / math.sqrt(D)
            scores[xp.arange(K)[None, :] >= seen[:, None]] = -math.inf
            weights = xp.exp(scores - xp.where(seen > 0, scores.max(1), 0)[:, None])
            weights /= xp.where(seen > 0, weights.sum(1), 1)[:, None]
            gradient = given @ values.T
            gradient -= (weights * gradient).sum(1)[:, None]
            gradient *= weights / math.sqrt(D)
            bound = abs(given) @ abs(values).T + (abs(given) * abs(result)).sum(1)[:, None]
            bound *= weights / math.sqrt(D)
            for into, ds, p, turn in ((exact, gradient, weights, lambda a: a), (size, bound, weights, abs)):
                into[0][b, h, part] = ds @ turn(keys)
                into[1][b, g] += ds.T @ turn(queries)
                into[2][b, g] += p.T @ turn(given)
    return tuple(exact), tuple(size)


_graph = {}  # of the last q seen: what autograd needs before the clock


def sdpa(q, k, v, out, lse, dout, lengths, causal, backend=None):
    """Autograd through PyTorch's scaled_dot_product_attention; its forward pass ran before the clock."""
    import contextlib

    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if (causal and q.shape[2] != k.shape[2]) or shortest(lengths) < k.shape[2]:
        raise NotImplementedError("PyTorch's kernels take neither this ladder's causal mask nor its lengths here")
    if _graph.get("q") is not q:
        _graph.clear()
        _graph["q"] = q
    if backend not in _graph:
        leaves = [tensor(a).detach().requires_grad_() for a in (q, k, v)]
        with sdpa_kernel(getattr(SDPBackend, backend)) if backend else contextlib.nullcontext():
            attend = torch.nn.functional.scaled_dot_product_attention
            try:
                made = attend(*leaves, is_causal=bool(causal), enable_gqa=q.shape[1] != k.shape[1])
            except RuntimeError as error:
                raise NotImplementedError(str(error).splitlines()[0]) from error
        _graph[backend] = leaves, made, tensor(dout)
    leaves, made, given = _graph[backend]
    found = torch.autograd.grad(made, leaves, given, retain_graph=True)
    return tuple(map(array, found))


def flash(*operands):
    """PyTorch pinned to its FlashAttention-2."""
    return sdpa(*operands, "FLASH_ATTENTION")


def cudnn(*operands):
    """PyTorch pinned to cuDNN."""
    return sdpa(*operands, "CUDNN_ATTENTION")


BASELINES = {"sdpa_flash": flash, "sdpa_cudnn": cudnn, "sdpa": sdpa}
BOUNDS = {}
