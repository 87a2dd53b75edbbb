"""Attention in one pass over the keys: no score is ever stored.

Idea    A softmax can be summed before its largest score is known: when a larger one comes, what was summed so far
        shrinks by one factor (Milakov and Gimelshein, 2018).
Was     Three kernels wrote Q x K scores to memory, read them three times, and wrote and read the weights.
Change  A warp takes one query and walks over the keys: a score, a new maximum perhaps, and the value times its weight
        onto the sum. Of each row there remain the output and its log-sum-exp.
Expect  Memory grows with the length, no longer with its square. The arithmetic is as it was, on the FP32 units, and
        each query still reads every key and value for itself.
"""

from common.cuda import Program
from common.cuda_attention import TYPES, blocks, name, operands

PREVIOUS = "naive"
CHANGES = (
    "NAMES",
    "blocks",
    "name",
    "THREADS",
    "TILE_Q",
    "OPTIONS",
    "SOURCE",
    "SOURCE.attend",
    "SOURCE.attention_float16_64",
    "SOURCE.attention_float16_128",
    "SOURCE.attention_bfloat16_64",
    "SOURCE.attention_bfloat16_128",
    "attention",
    "SOURCE.score",
    "SOURCE.softmax",
    "SOURCE.weigh",
    "SOURCE.score_float16",
    "SOURCE.score_bfloat16",
    "SOURCE.weigh_float16",
    "SOURCE.weigh_bfloat16",
)
ARCHS = ("sm_80", "sm_90")

TILE_Q = 4  # queries a block, a warp for each
THREADS = 32 * TILE_Q
OPTIONS = (f"-DTILE_Q={TILE_Q}", f"-DTHREADS={THREADS}")

SOURCE = (
    TYPES
    + r"""
template <typename T, int D> __device__ void attend(OPERANDS(T)) {
    const int tiles = (Q + TILE_Q - 1) / TILE_Q, lane = threadIdx.x % 32;
    const int head = blockIdx.x / tiles, i = blockIdx.x % tiles * TILE_Q + threadIdx.x / 32;
    if (i >= Q) return;
    const int64 row = (int64)head * Q + i, key = (int64)(head / (H / G)) * K;
    const int seen = visible(i, lengths[head / H], Q, K, causal);
    float query[D / 32], sum[D / 32] = {}, most = -INFINITY, total = 0;  // a lane holds every 32nd d
    for (int r = 0; r < D / 32; ++r) query[r] = plain(q[row * D + r * 32 + lane]) * rsqrtf(D);
    for (int j = 0; j < K; ++j) {
        const int64 at = (key + j) * D + lane;
        float score = 0;
        for (int r = 0; r < D / 32; ++r) score += query[r] * plain(k[at + r * 32]);
        for (int step = 16; step; step /= 2) score += __shfl_xor_sync(~0u, score, step);
        if (j >= seen) score = -INFINITY;

        const float higher = fmaxf(most, score), from = higher == -INFINITY ? 0 : higher;
        const float keep = expf(most - from), weight = expf(score - from);
        most = higher, total = total * keep + weight;
        for (int r = 0; r < D / 32; ++r) sum[r] = sum[r] * keep + weight * plain(v[at + r * 32]);
    }
    for (int r = 0; r < D / 32; ++r) round_to(&out[row * D + r * 32 + lane], total ? sum[r] / total : 0);
    if (lane == 0) lse[row] = most + logf(total);
}

extern "C" __global__ void __launch_bounds__(THREADS)
attention_float16_64(OPERANDS(half)) { attend<half, 64>(PASSED); }
extern "C" __global__ void __launch_bounds__(THREADS)
attention_float16_128(OPERANDS(half)) { attend<half, 128>(PASSED); }
extern "C" __global__ void __launch_bounds__(THREADS)
attention_bfloat16_64(OPERANDS(bfloat)) { attend<bfloat, 64>(PASSED); }
extern "C" __global__ void __launch_bounds__(THREADS)
attention_bfloat16_128(OPERANDS(bfloat)) { attend<bfloat, 128>(PASSED); }
"""
)
PROGRAM = Program(SOURCE, OPTIONS, ARCHS)


def attention(q, k, v, lengths, causal):  # (B, H, Q, D), (B, G, K, D) twice, (B,) -> (B, H, Q, D), (B, H, Q)
    q, k, v, lengths, out, lse, *sizes = operands(q, k, v, lengths, causal)
    PROGRAM.launch(name("attention", q), blocks(q, TILE_Q), THREADS, (q, k, v, lengths, out, lse, *sizes))
    return out, lse
