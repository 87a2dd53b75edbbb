"""Attention as the formula is written: every score in memory, then every weight, then every sum.

Idea    Three kernels for the three steps: scores, softmax, weighted sum of the values.
Was     Nothing: this is where the ladder starts.
Change  Nothing yet. Scores are a Q x K matrix for each head, written and read in full between the kernels.
Expect  Memory grows with the square of the length, and so do the bytes moved. Each thread walks along its own row of k,
        as in the naive matmul, so the first kernel is slower than its bytes explain.
"""

from common.cuda import Program
from common.cuda_attention import NAMES, TYPES, operands

PREVIOUS = None
CHANGES = ()
ARCHS = ("sm_80", "sm_90")

THREADS = 128  # of the kernel that makes a row of scores
OPTIONS = (f"-DTHREADS={THREADS}",)

SOURCE = (
    TYPES
    + r"""
template <typename T>  // a block for one query: (B, H, Q, D), (B, G, K, D) -> (B, H, Q, K)
__device__ void score(const T* q, const T* k, const int* lengths, float* scores, int H, int G, int Q, int K, int causal,
                      int D) {
    const int64 row = blockIdx.x, head = row / Q, key = head / (H / G) * K;
    const int seen = visible(row % Q, lengths[head / H], Q, K, causal);
    for (int j = threadIdx.x; j < K; j += THREADS) {
        float sum = 0;
        for (int d = 0; d < D; ++d) sum += plain(q[row * D + d]) * plain(k[(key + j) * D + d]);
        scores[row * K + j] = j < seen ? sum * rsqrtf(D) : -INFINITY;
    }
}

extern "C" __global__ void softmax(float* scores, float* lse, int K) {  // in place, a warp for each row
    float* row = scores + (int64)blockIdx.x * K;
    float most = -INFINITY, total = 0;
    for (int j = threadIdx.x; j < K; j += 32) most = fmaxf(most, row[j]);
    for (int step = 16; step; step /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
    const float from = most == -INFINITY ? 0 : most;  // a row that sees no key has weights of 0
    for (int j = threadIdx.x; j < K; j += 32) total += expf(row[j] - from);
    for (int step = 16; step; step /= 2) total += __shfl_xor_sync(~0u, total, step);
    for (int j = threadIdx.x; j < K; j += 32) row[j] = total ? expf(row[j] - from) / total : 0;
    if (threadIdx.x == 0) lse[blockIdx.x] = most + logf(total);
}

template <typename T>  // a block for one query, a thread for each d: (B, H, Q, K), (B, G, K, D) -> (B, H, Q, D)
__device__ void weigh(const float* weights, const T* v, T* out, int H, int G, int Q, int K, int D) {
    const int64 row = blockIdx.x, key = row / Q / (H / G) * K;
    float sum = 0;
    for (int j = 0; j < K; ++j) sum += weights[row * K + j] * plain(v[(key + j) * D + threadIdx.x]);
    round_to(&out[row * D + threadIdx.x], sum);
}

extern "C" __global__ void __launch_bounds__(THREADS)
score_float16(const half* q, const half* k, const int* lengths, float* scores, int H, int G, int Q, int K, int causal,
              int D) { score(q, k, lengths, scores, H, G, Q, K, causal, D); }
extern "C" __global__ void __launch_bounds__(THREADS)
score_bfloat16(const bfloat* q, const bfloat* k, const int* lengths, float* scores, int H, int G, int Q, int K,
               int causal, int D) { score(q, k, lengths, scores, H, G, Q, K, causal, D); }

extern "C" __global__ void
weigh_float16(const float* weights, const half* v, half* out, int H, int G, int Q, int K, int D) {
    weigh(weights, v, out, H, G, Q, K, D);
}
extern "C" __global__ void
weigh_bfloat16(const float* weights, const bfloat* v, bfloat* out, int H, int G, int Q, int K, int D) {
    weigh(weights, v, out, H, G, Q, K, D);
}
"""
)
PROGRAM = Program(SOURCE, OPTIONS, ARCHS)


def attention(q, k, v, lengths, causal):  # (B, H, Q, D), (B, G, K, D) twice, (B,) -> (B, H, Q, D), (B, H, Q)
    import cupy
    import numpy

    q, k, v, lengths, out, lse, H, G, Q, K, causal = operands(q, k, v, lengths, causal)
    scores, rows, D = cupy.empty((*lse.shape, K), "float32"), lse.size, numpy.int32(q.shape[-1])
    kind = NAMES[str(q.dtype)]
    PROGRAM.launch(f"score_{kind}", rows, THREADS, (q, k, lengths, scores, H, G, Q, K, causal, D))
    PROGRAM.launch("softmax", rows, 32, (scores, lse, K))
    PROGRAM.launch(f"weigh_{kind}", rows, int(D), (scores, v, out, H, G, Q, K, D))
    return out, lse
