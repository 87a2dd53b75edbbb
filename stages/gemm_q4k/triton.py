"""A Q4_K matmul in Triton, its tiles found by trying.

Idea    Say what a block computes and let a compiler choose threads, registers and instructions.
Was     Bit tricks, fragments and a ring of tiles by hand, in two kernels.
Change  One kernel of blocks: bytes to halves by shift and mask, `tl.dot` for the tensor cores. Triton times each of
        CONFIGS once a shape and keeps the fastest.
Expect  Near the hand-written rung with many tokens. With one token a block of rows walks all of K by itself, so few
        bytes are on their way at once and the read bound is far.
"""

import functools

PREVIOUS = "tensor_core"
CHANGES = (
    "matmul",
    "SOURCE.prepare",
    "SOURCE.pair",
    "SOURCE.multiply",
    "SOURCE.eight",
    "SOURCE.few",
    "SOURCE.few_floats",
    "SOURCE.few_halves",
    "SOURCE.many",
)

CONFIGS = [(16, 2, 4), (16, 4, 4), (32, 4, 4), (64, 4, 3), (128, 8, 3)]  # rows of w a block, warps, stages
TILES_T = (16, 64)  # tokens a block: the fewest a tensor core takes, or as many as registers hold


@functools.cache
def kernel():
    """The kernel, tuned for each shape at its first call there."""
    global tl
    import triton
    import triton.language as tl

    configs = [triton.Config({"TILE_N": n}, num_warps=warps, num_stages=stages) for n, warps, stages in CONFIGS]

    @triton.autotune(configs=configs, key=["T", "N", "K"])
    @triton.jit
    def matmul_kernel(x, w, halves, out, T, N, K, TILE_N: tl.constexpr, TILE_T: tl.constexpr):
        tiles = tl.cdiv(N, TILE_N)
        rows = (tl.program_id(0) % tiles * TILE_N + tl.arange(0, TILE_N)).to(tl.int64)
        tokens = (tl.program_id(0) // tiles * TILE_T + tl.arange(0, TILE_T)).to(tl.int64)
        row, i = rows < N, tl.arange(0, 32)
        total = tl.zeros((TILE_T, TILE_N), tl.float32)
        for b in range(K // 256):
            block = (rows * (K // 256) + b) * 144
            d = tl.load(halves + block // 2, mask=row, other=0.0)
            low = tl.load(halves + block // 2 + 1, mask=row, other=0.0)
            for j in tl.static_range(8):  # groups of 32 weights
                if j < 4:
                    scale = tl.load(w + block + 4 + j, mask=row, other=0) & 63
                    min_ = tl.load(w + block + 8 + j, mask=row, other=0) & 63
                else:
                    four = tl.load(w + block + 8 + j, mask=row, other=0)
                    scale = four & 15 | tl.load(w + block + j, mask=row, other=0) >> 6 << 4
                    min_ = four >> 4 | tl.load(w + block + 4 + j, mask=row, other=0) >> 6 << 4
                q = tl.load(w + block[:, None] + 16 + j // 2 * 32 + i[None, :], mask=row[:, None], other=0)
                q = (q >> 4 * (j % 2) & 15).to(tl.float16)
                weights = q * (d * scale.to(tl.float16))[:, None] - (low * min_.to(tl.float16))[:, None]
                at = x + tokens[:, None] * K + b * 256 + j * 32 + i[None, :]
                some = tl.load(at, mask=tokens[:, None] < T, other=0.0).to(tl.float16)
                total = tl.dot(some, tl.trans(weights), total)
        tl.store(out + tokens[:, None] * N + rows[None, :], total, mask=(tokens[:, None] < T) & row[None, :])

    return matmul_kernel


def matmul(x, w):  # (T, K), (N, K / 256 * 144) -> (T, N)
    import cupy
    import torch

    (t, k), n = x.shape, w.shape[0]
    out, tile = cupy.empty((t, n), "float32"), TILES_T[t > TILES_T[0]]
    x_, w_, halves, out_ = (torch.from_dlpack(a) for a in (x, w, w.view("float16"), out))
    kernel()[lambda config: (-(-n // config["TILE_N"]) * -(-t // tile),)](x_, w_, halves, out_, t, n, k, TILE_T=tile)
    return out
