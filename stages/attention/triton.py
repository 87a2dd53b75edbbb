"""Attention in Triton, forward: the tiles of `skip` in forty lines, their sizes found by trying.

Idea    Say what a block computes and let a compiler choose threads, registers, shared memory and instructions.
Was     CUDA C++ for one generation of GPU: copies, barriers, turns and the layout of fragments by hand.
Change  One kernel of blocks over the same loop: whole tiles first, then those that the mask's edge crosses. `tl.dot`
        becomes wgmma, and how many tiles are on their way is a number, num_stages. Triton times each of CONFIGS once
        for each head size, mask and power of two of the length, and keeps the fastest.
Expect  Between `skip` and `hopper`: the tensor cores at Hopper's rate, but nobody arranges that one group of warps
        takes exponentials while the other multiplies.
"""

import functools
import math

from common.cuda_attention import operands, tensor

PREVIOUS = "hopper"
CHANGES = (
    "functools",
    "math",
    "tensor",
    "CONFIGS",
    "kernel",
    "launch",
    "on_tensors",
    "attention",
    "Program",
    "processors",
    "tensor_map",
    "TYPES",
    "blocks",
    "name",
    "wgmma_products",
    "TILE_K",
    "STAGES",
    "GROUPS",
    "OPTIONS",
    "SOURCE",
    "SOURCE.address",
    "SOURCE.start",
    "SOURCE.wait",
    "SOURCE.arrive",
    "SOURCE.expect",
    "SOURCE.fetch",
    "SOURCE.describe",
    "SOURCE.along",
    "SOURCE.hold",
    "SOURCE.power",
    "SOURCE.pair",
    "SOURCE.weigh",
    "SOURCE.bring",
    "SOURCE.feed",
    "SOURCE.attend",
    "SOURCE.attention_float16_64",
    "SOURCE.attention_float16_128",
    "SOURCE.attention_bfloat16_64",
    "SOURCE.attention_bfloat16_128",
    "PROGRAM",
    "shared",
)

CONFIGS = {  # head size -> TILE_Q, TILE_K, warps, stages
    64: [(128, 64, 4, 3), (128, 128, 8, 2), (64, 64, 4, 3)],
    128: [(128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 3)],
}


@functools.cache
def kernel(D: int):
    """The kernel for one head size, tuned for each mask and length at its first call there."""
    global tl, over
    import triton
    import triton.language as tl

    configs = [
        triton.Config({"TILE_Q": i, "TILE_K": j}, num_warps=warps, num_stages=stages)
        for i, j, warps, stages in CONFIGS[D]
    ]

    @triton.jit
    def over(
        sum,  # (TILE_Q, D) FP32, and so on: what the tiles before left
        most,
        total,
        query,
        k,
        v,
        seen,  # (TILE_Q,) keys that each query sees
        start,
        stop,
        K,
        scale,
        MASKED: tl.constexpr,
        D: tl.constexpr,
        TILE_K: tl.constexpr,
    ):
        for j0 in range(start, stop, TILE_K):
            j = j0 + tl.arange(0, TILE_K)
            at = j[:, None] * D + tl.arange(0, D)[None, :]
            inside = j[:, None] < K if MASKED else None
            keys = tl.load(k + at, mask=inside)
            values = tl.load(v + at, mask=inside, other=0.0 if MASKED else None)
            score = tl.dot(query, tl.trans(keys), input_precision="ieee")
            if MASKED:
                score = tl.where(j[None, :] < seen[:, None], score, float("-inf"))
            higher = tl.maximum(most, tl.max(score, 1))
            base = tl.where(higher == float("-inf"), 0.0, higher * scale)  # a row that sees no key
            keep, weight = tl.exp2(most * scale - base), tl.exp2(score * scale - base[:, None])
            most, total = higher, total * keep + tl.sum(weight, 1)
            sum = tl.dot(weight.to(values.dtype), values, sum * keep[:, None], input_precision="ieee")
        return sum, most, total

    @triton.autotune(configs=configs, key=["near", "CAUSAL"])
    @triton.jit(do_not_specialize=["H", "G", "Q", "K", "near"])
    def attention_kernel(
        q,  # (B, H, Q, D)
        k,  # (B, G, K, D), as v
        v,
        lengths,  # (B,)
        out,  # (B, H, Q, D)
        lse,  # (B, H, Q)
        H,
        G,
        Q,
        K,
        near,  # the length's next power of two
        scale,  # of scores, in base 2
        CAUSAL: tl.constexpr,
        D: tl.constexpr,
        TILE_Q: tl.constexpr,
        TILE_K: tl.constexpr,
    ):
        tiles, block = tl.cdiv(Q, TILE_Q), tl.program_id(0)
        head = (block // tiles).to(tl.int64)
        i0 = (tiles - 1 - block % tiles) * TILE_Q  # a head's last queries see most: they start first
        i = i0 + tl.arange(0, TILE_Q)
        length = tl.load(lengths + head // H)
        shift = K - Q if CAUSAL else K  # without a mask every query sees as far as the last
        seen = tl.minimum(length, tl.maximum(i + 1 + shift, 0))
        whole = tl.minimum(length, tl.maximum(i0 + 1 + shift, 0)) // TILE_K * TILE_K
        end = tl.minimum(length, tl.maximum(tl.minimum(i0 + TILE_Q, Q) + shift, 0))
        k += head // (H // G) * K * D
        v += head // (H // G) * K * D
        rows = head * Q + i
        at = rows[:, None] * D + tl.arange(0, D)[None, :]
        query = tl.load(q + at, mask=i[:, None] < Q, other=0.0)
        sum, total = tl.zeros((TILE_Q, D), tl.float32), tl.zeros((TILE_Q,), tl.float32)
        most = total - float("inf")
        sum, most, total = over(sum, most, total, query, k, v, seen, 0, whole, K, scale, False, D, TILE_K)
        sum, most, total = over(sum, most, total, query, k, v, seen, whole, end, K, scale, True, D, TILE_K)
        sum = sum / tl.where(total == 0, 1.0, total)[:, None]
        tl.store(out + at, sum.to(out.dtype.element_ty), mask=i[:, None] < Q)
        tl.store(lse + rows, (most * scale + tl.log2(total)) * 0.6931471805599453, mask=i < Q)

    return attention_kernel


def launch(q, k, v, lengths, out, lse, causal) -> None:
    """Fill out and lse, all of them PyTorch's, contiguous and of one type."""
    (B, H, Q, D), (G, K) = q.shape, k.shape[1:3]
    near, scale = max(512, 1 << (max(Q, K) - 1).bit_length()), math.log2(math.e) / math.sqrt(D)
    kernel(D)[lambda config: (B * H * -(-Q // config["TILE_Q"]),)](
        q, k, v, lengths, out, lse, H, G, Q, K, near, scale, CAUSAL=bool(causal), D=D
    )


def on_tensors(q, k, v, lengths, causal):  # as attention, for PyTorch's tensors, FP32 among them
    import torch

    q, k, v = (a.contiguous() for a in (q, k, v))
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    launch(q, k, v, lengths, out, lse, causal)
    return out, lse


def attention(q, k, v, lengths, causal):  # (B, H, Q, D), (B, G, K, D) twice, (B,) -> (B, H, Q, D), (B, H, Q)
    q, k, v, lengths, out, lse, *_ = operands(q, k, v, lengths, causal)
    launch(*map(tensor, (q, k, v, lengths, out, lse)), causal)
    return out, lse
