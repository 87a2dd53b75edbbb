"""The attention ladders in PyTorch: any rung's forward and any rung's backward pass as one differentiable function.

`attention(q, k, v, causal=True)` stands where torch.nn.functional.scaled_dot_product_attention stood. PyTorch and CuPy
look at the same memory (DLPack), so nothing is copied on the way.
"""

import functools

import torch

from common import kernel_ladder
from common.cuda_attention import array, stream, tensor


class Attention(torch.autograd.Function):
    """What autograd keeps between the two passes: the operands, out, and one number a row."""

    @staticmethod
    def forward(ctx, q, k, v, lengths, causal, forward, backward):
        out, lse = forward(q, k, v, lengths, causal)
        ctx.save_for_backward(q, k, v, out, lse, lengths)
        ctx.causal, ctx.pass_back = causal, backward
        return out

    @staticmethod
    def backward(ctx, dout):
        *given, lengths = ctx.saved_tensors
        return *ctx.pass_back(*given, dout, lengths, ctx.causal), None, None, None, None


def attention(q, k, v, lengths=None, causal=False, rung="triton", backward="triton"):
    """softmax(q k^T / sqrt(D)) v, differentiable in q, k and v, by attention/`rung` and attention_backward/`backward`.

    q (B, H, Q, D), k and v (B, G, K, D) on the GPU, FP16 or BF16, D 64 or 128, H a multiple of G -> (B, H, Q, D). Each
    batch sees its first `lengths` keys, (B,) int32, or all; with `causal`, query i those up to i + K - Q. Raises
    ValueError where the shapes or types are others.
    """
    if lengths is None:
        lengths = torch.full(k.shape[:1], k.shape[2], dtype=torch.int32, device=k.device)
    passes = on_tensors("attention", rung), on_tensors("attention_backward", backward)
    return Attention.apply(q, k, v, lengths, int(causal), *passes)


def on_tensors(ladder: str, rung: str):
    """A rung as a function of tensors: Triton's takes them as they are, the others are shown CuPy's arrays."""
    rungs = kernel_ladder.ladder(ladder)
    module = kernel_ladder.module(rungs, rung)
    return getattr(module, "on_tensors", None) or functools.partial(on_arrays, getattr(module, rungs.ENTRY))


def on_arrays(call, *operands):
    """A rung's call with tensors for its arrays, on PyTorch's stream. -> tensors."""
    with stream(torch.cuda.current_stream()):
        return tuple(tensor(a) for a in call(*(array(o) if torch.is_tensor(o) else o for o in operands)))
