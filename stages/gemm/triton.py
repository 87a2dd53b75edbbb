"""Matrix multiplication in Triton, both types, its tiles found by trying.

Idea    Say what a block computes and let a compiler choose threads, registers, shared memory and instructions.
Was     Four hundred lines of CUDA C++ for two types, each tied to one generation of GPU.
Change  One kernel of blocks; `tl.dot` becomes multiply-adds in FP32 and wgmma in FP16, and the ring of tiles is a
        number, num_stages. Triton times each of CONFIGS once a shape and keeps the fastest.
Expect  Close to the hand-written rung where a tensor core does the work, further off in FP32, where nobody writes
        Triton. The search costs seconds at the first call of a shape.
"""

import functools

from common.cuda import operands, trim

PREVIOUS = "hopper"
CHANGES = (
    "GROUP",
    "matmul",
    "SOURCE.address",
    "SOURCE.wait",
    "SOURCE.arrive",
    "SOURCE.expect",
    "SOURCE.fetch",
    "SOURCE.send",
    "SOURCE.keep",
    "SOURCE.describe",
    "SOURCE.multiply",
    "SOURCE.matmul",
)

CONFIGS = {  # TILE_M, TILE_N, TILE_K, warps, stages
    "float32": [(128, 128, 32, 8, 3), (128, 128, 16, 8, 2), (128, 64, 32, 4, 4), (64, 64, 16, 4, 3)],
    "float16": [(128, 256, 64, 8, 3), (128, 128, 64, 4, 4), (128, 64, 64, 4, 4), (64, 64, 64, 4, 4)],
}
GROUP = 8  # rows of tiles that consecutive blocks walk down together


@functools.cache
def kernel(dtype: str):
    """The kernel for one type, tuned for each shape at its first call there."""
    global tl
    import triton
    import triton.language as tl

    configs = [
        triton.Config({"TILE_M": m, "TILE_N": n, "TILE_K": k}, num_warps=warps, num_stages=stages)
        for m, n, k, warps, stages in CONFIGS[dtype]
    ]

    @triton.autotune(configs=configs, key=["M", "N", "K"])
    @triton.jit
    def matmul_kernel(
        x,  # (M, K)
        w,  # (K, N)
        out,  # (M, N)
        M,
        N,
        K,
        stride,
        TILE_M: tl.constexpr,
        TILE_N: tl.constexpr,
        TILE_K: tl.constexpr,
        GROUP: tl.constexpr,
    ):
        tiles_m, tiles_n = tl.cdiv(M, TILE_M), tl.cdiv(N, TILE_N)
        block = tl.program_id(0)
        group, within = block // (GROUP * tiles_n), block % (GROUP * tiles_n)
        height = min(GROUP, tiles_m - group * GROUP)
        rows = ((group * GROUP + within % height) * TILE_M + tl.arange(0, TILE_M)).to(tl.int64)
        columns = (within // height * TILE_N + tl.arange(0, TILE_N)).to(tl.int64)
        ks = tl.arange(0, TILE_K).to(tl.int64)
        x_at = x + rows[:, None] * stride + ks[None, :]
        w_at = w + ks[:, None] * N + columns[None, :]
        total = tl.zeros((TILE_M, TILE_N), tl.float32)
        for k0 in range(0, K, TILE_K):
            a = tl.load(x_at, mask=(rows[:, None] < M) & (k0 + ks[None, :] < K), other=0.0)
            b = tl.load(w_at, mask=(k0 + ks[:, None] < K) & (columns[None, :] < N), other=0.0)
            total = tl.dot(a, b, total, input_precision="ieee")
            x_at += TILE_K
            w_at += TILE_K * N.to(tl.int64)
        inside = (rows[:, None] < M) & (columns[None, :] < N)
        tl.store(out + rows[:, None] * N + columns[None, :], total.to(out.dtype.element_ty), mask=inside)

    return matmul_kernel


def matmul(x, w):  # (M, K), (K, N) -> (M, N)
    import torch

    columns = w.shape[1]
    x, w, out, m, n, k = operands(x, w, str(x.dtype), multiple=16 // x.itemsize)
    x_, w_, out_ = (torch.from_dlpack(a) for a in (x, w, out))
    kernel(str(out.dtype))[lambda config: (-(-m // config["TILE_M"]) * -(-n // config["TILE_N"]),)](
        x_, w_, out_, int(m), int(n), int(k), x.shape[1], GROUP=GROUP
    )
    return trim(out, columns)
