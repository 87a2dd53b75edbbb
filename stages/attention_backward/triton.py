"""The backward pass in Triton: the two kernels of `skip`, their tiles found by trying.

Idea    Say what a block computes and let a compiler choose threads, registers, shared memory and instructions.
Was     Two kernels of CUDA C++ on mma.sync, one tile of each operand in shared memory at a time.
Change  The same two loops in blocks; `tl.dot` becomes wgmma and the next tiles are on their way while one is used. The
        term that all scores of a row share is made where out and its gradient are read anyway, by the kernel for
        queries, which therefore goes first.
Expect  The tensor cores at Hopper's rate: faster than `skip` where tiles are many. The search costs seconds.
"""

import functools
import math

from common.cuda_attention import operands, tensor

PREVIOUS = "skip"
CHANGES = (
    "functools",
    "math",
    "operands",
    "tensor",
    "CONFIGS",
    "kernels",
    "launch",
    "on_tensors",
    "backward",
    "Program",
    "FRAGMENTS",
    "GIVEN",
    "TYPES",
    "blocks",
    "given",
    "name",
    "TILE",
    "THREADS",
    "OPTIONS",
    "SOURCE",
    "SOURCE.copy_word",
    "SOURCE.take",
    "SOURCE.across",
    "SOURCE.onward",
    "SOURCE.write",
    "SOURCE.of_keys",
    "SOURCE.of_queries",
    "SOURCE.of_keys_float16_64",
    "SOURCE.of_keys_float16_128",
    "SOURCE.of_keys_bfloat16_64",
    "SOURCE.of_keys_bfloat16_128",
    "SOURCE.of_queries_float16_64",
    "SOURCE.of_queries_float16_128",
    "SOURCE.of_queries_bfloat16_64",
    "SOURCE.of_queries_bfloat16_128",
    "PROGRAM",
    "shared",
)

CONFIGS = {  # head size -> TILE_Q, TILE_K, warps, stages: of the kernel for queries, and of that for keys
    64: ([(128, 64, 8, 3), (64, 64, 4, 3)], [(64, 128, 8, 1), (32, 128, 8, 2), (64, 64, 4, 1)]),
    128: ([(128, 64, 8, 2), (64, 64, 4, 2)], [(64, 128, 8, 1), (32, 128, 8, 2), (64, 64, 4, 1)]),
}


@functools.cache
def kernels(D: int):
    """The kernels for queries and for keys of one head size, tuned for each mask and length at their first calls."""
    global tl, over_keys, over_queries
    import triton
    import triton.language as tl

    @triton.jit
    def over_keys(
        sum,  # (TILE_Q, D) FP32: what the tiles before left
        query,
        given,  # the gradient of out, (TILE_Q, D)
        logs,
        term,
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
            keys = tl.load(k + at, mask=inside, other=0.0 if MASKED else None)
            values = tl.load(v + at, mask=inside, other=0.0 if MASKED else None)
            weight = tl.exp2(tl.dot(query, tl.trans(keys), input_precision="ieee") * scale - logs[:, None])
            if MASKED:
                weight = tl.where(j[None, :] < seen[:, None], weight, 0.0)
            change = weight * (tl.dot(given, tl.trans(values), input_precision="ieee") - term[:, None])
            sum = tl.dot(change.to(keys.dtype), keys, sum, input_precision="ieee")
        return sum

    @triton.jit
    def over_queries(
        key_sum,  # (TILE_K, D) FP32, as value_sum: what the tiles before left
        value_sum,
        keys,
        values,
        q,
        dout,
        lse,
        delta,
        j,
        shift,
        length,
        start,
        stop,
        Q,
        scale,
        MASKED: tl.constexpr,
        D: tl.constexpr,
        TILE_Q: tl.constexpr,
    ):
        for i0 in range(start, stop, TILE_Q):
            i = i0 + tl.arange(0, TILE_Q)
            at = i[:, None] * D + tl.arange(0, D)[None, :]
            query = tl.load(q + at, mask=i[:, None] < Q, other=0.0)  # zeros after the last add nothing
            given = tl.load(dout + at, mask=i[:, None] < Q, other=0.0)
            logs = tl.load(lse + i, mask=i < Q, other=0.0) * 1.4426950408889634
            term = tl.load(delta + i, mask=i < Q, other=0.0)
            weight = tl.exp2(tl.dot(keys, tl.trans(query), input_precision="ieee") * scale - logs[None, :])
            if MASKED:
                seen = tl.minimum(length, tl.maximum(i + 1 + shift, 0))
                weight = tl.where(j[:, None] < seen[None, :], weight, 0.0)
            value_sum = tl.dot(weight.to(given.dtype), given, value_sum, input_precision="ieee")
            change = weight * (tl.dot(values, tl.trans(given), input_precision="ieee") - term[None, :])
            key_sum = tl.dot(change.to(query.dtype), query, key_sum, input_precision="ieee")
        return key_sum, value_sum

    def tuned(configs):
        found = [triton.Config({"TILE_Q": i, "TILE_K": j}, num_warps=w, num_stages=s) for i, j, w, s in configs]
        return triton.autotune(configs=found, key=["near", "CAUSAL"])

    @tuned(CONFIGS[D][0])
    @triton.jit(do_not_specialize=["H", "G", "Q", "K", "near"])
    def of_queries(
        q,  # (B, H, Q, D), as out, dout and dq
        k,  # (B, G, K, D), as v
        v,
        out,
        lse,  # (B, H, Q), as delta
        dout,
        lengths,  # (B,)
        delta,
        dq,
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
        given = tl.load(dout + at, mask=i[:, None] < Q, other=0.0)
        result = tl.load(out + at, mask=i[:, None] < Q, other=0.0)
        term = tl.sum(given.to(tl.float32) * result.to(tl.float32), 1)
        tl.store(delta + rows, term, mask=i < Q)
        logs = tl.load(lse + rows, mask=i < Q, other=0.0) * 1.4426950408889634
        sum = tl.zeros((TILE_Q, D), tl.float32)
        sum = over_keys(sum, query, given, logs, term, k, v, seen, 0, whole, K, scale, False, D, TILE_K)
        sum = over_keys(sum, query, given, logs, term, k, v, seen, whole, end, K, scale, True, D, TILE_K)
        tl.store(dq + at, (sum * (scale * 0.6931471805599453)).to(dq.dtype.element_ty), mask=i[:, None] < Q)

    @tuned(CONFIGS[D][1])
    @triton.jit(do_not_specialize=["H", "G", "Q", "K", "near"])
    def of_keys(
        q,  # as in of_queries
        k,
        v,
        lse,
        dout,
        lengths,
        delta,
        dk,  # (B, G, K, D), as dv
        dv,
        H,
        G,
        Q,
        K,
        near,
        scale,
        CAUSAL: tl.constexpr,
        D: tl.constexpr,
        TILE_Q: tl.constexpr,
        TILE_K: tl.constexpr,
    ):
        tiles, block = tl.cdiv(K, TILE_K), tl.program_id(0)
        group = (block // tiles).to(tl.int64)
        j0 = block % tiles * TILE_K  # a head's first keys are seen by most queries, and start first
        j = j0 + tl.arange(0, TILE_K)
        length = tl.load(lengths + group // G)
        shift = K - Q if CAUSAL else K
        start = tl.maximum(j0 - shift, 0) // TILE_Q * TILE_Q  # the first tile with a query that sees a key of these
        edge = tl.cdiv(tl.maximum(j0 + TILE_K - 1 - shift, 0), TILE_Q) * TILE_Q  # the first whose queries see all
        start = tl.where(j0 < length, start, Q)
        edge = tl.where(j0 + TILE_K <= length, tl.minimum(tl.maximum(edge, start), Q), Q)
        rows = (group * K + j)[:, None] * D + tl.arange(0, D)[None, :]
        keys = tl.load(k + rows, mask=j[:, None] < K, other=0.0)
        values = tl.load(v + rows, mask=j[:, None] < K, other=0.0)
        key_sum, value_sum = tl.zeros((TILE_K, D), tl.float32), tl.zeros((TILE_K, D), tl.float32)
        for member in range(H // G):
            row = (group * (H // G) + member) * Q
            key_sum, value_sum = over_queries(
                key_sum, value_sum, keys, values, q + row * D, dout + row * D, lse + row, delta + row,
                j, shift, length, start, edge, Q, scale, True, D, TILE_Q
            )  # fmt: skip
            key_sum, value_sum = over_queries(
                key_sum, value_sum, keys, values, q + row * D, dout + row * D, lse + row, delta + row,
                j, shift, length, edge, Q, Q, scale, False, D, TILE_Q
            )  # fmt: skip
        key_sum *= scale * 0.6931471805599453
        tl.store(dk + rows, key_sum.to(dk.dtype.element_ty), mask=j[:, None] < K)
        tl.store(dv + rows, value_sum.to(dv.dtype.element_ty), mask=j[:, None] < K)

    return of_queries, of_keys


def launch(q, k, v, out, lse, dout, lengths, delta, dq, dk, dv, causal) -> None:
    """Fill delta, dq, dk and dv, all of them PyTorch's, contiguous, and all but lse and delta of one type."""
    (B, H, Q, D), (G, K) = q.shape, k.shape[1:3]
    near, scale = max(512, 1 << (max(Q, K) - 1).bit_length()), math.log2(math.e) / math.sqrt(D)
    of_queries, of_keys = kernels(D)
    sizes = H, G, Q, K, near, scale, bool(causal), D
    of_queries[lambda config: (B * H * -(-Q // config["TILE_Q"]),)](q, k, v, out, lse, dout, lengths, delta, dq, *sizes)
    of_keys[lambda config: (B * G * -(-K // config["TILE_K"]),)](q, k, v, lse, dout, lengths, delta, dk, dv, *sizes)


def on_tensors(q, k, v, out, lse, dout, lengths, causal):  # as backward, for PyTorch's tensors, FP32 among them
    import torch

    q, k, v, out, lse, dout = (a.contiguous() for a in (q, k, v, out, lse, dout))
    delta, *gradients = map(torch.empty_like, (lse, q, k, v))
    launch(q, k, v, out, lse, dout, lengths, delta, *gradients, causal)
    return tuple(gradients)


def backward(q, k, v, out, lse, dout, lengths, causal):  # as attention, and out, lse, dout -> dq, dk, dv
    import cupy

    q, k, v, lengths, dq, delta, *_ = operands(q, k, v, lengths, causal)
    dk, dv = map(cupy.empty_like, (k, v))
    out, lse, dout = map(cupy.ascontiguousarray, (out, lse, dout))
    launch(*map(tensor, (q, k, v, out, lse, dout, lengths, delta, dq, dk, dv)), causal)
    return dq, dk, dv
