"""The backward pass as calculus gives it, the probabilities and their gradient in memory.

Idea    Five products, each by a kernel of its own, with Q x K matrices between them.
Was     Nothing: this is where the ladder starts.
Change  Nothing yet. The first kernel writes the probabilities that a forward pass without FlashAttention would have
        kept, the second their gradient.
Expect  Two matrices that grow with the square of the length. Time goes by reading them, and by threads that walk along
        rows of their own.
"""

from common.cuda import Program
from common.cuda_attention import GIVEN, NAMES, TYPES, given

PREVIOUS = None
CHANGES = ()
ARCHS = ("sm_80", "sm_90")

THREADS = 128  # of the kernel that makes a row of both matrices
OPTIONS = (f"-DTHREADS={THREADS}",)

SOURCE = (
    TYPES
    + GIVEN
    + r"""
template <typename T>  // a block for one query -> weights and gradient, (B, H, Q, K) each
__device__ void differentiate(GIVEN(T), float* weights, float* gradient, int D) {
    const int64 row = blockIdx.x, head = row / Q, key = head / (H / G) * K;
    const int seen = visible(row % Q, lengths[head / H], Q, K, causal);
    for (int j = threadIdx.x; j < K; j += THREADS) {
        float score = 0, change = 0;
        for (int d = 0; d < D; ++d) {
            score += plain(q[row * D + d]) * plain(k[(key + j) * D + d]);
            change += plain(dout[row * D + d]) * plain(v[(key + j) * D + d]);
        }
        const float weight = j < seen ? expf(score * rsqrtf(D) - lse[row]) : 0;
        weights[row * K + j] = weight;
        gradient[row * K + j] = weight * (change - delta[row]) * rsqrtf(D);
    }
}

template <typename T>  // a block for one query, a thread for each d
__device__ void of_query(const float* gradient, const T* k, T* dq, int H, int G, int Q, int K, int D) {
    const int64 row = blockIdx.x, key = row / Q / (H / G) * K;
    float sum = 0;
    for (int j = 0; j < K; ++j) sum += gradient[row * K + j] * plain(k[(key + j) * D + threadIdx.x]);
    round_to(&dq[row * D + threadIdx.x], sum);
}

template <typename T>  // a block for one key, a thread for each d: the sum of matrix x rows over queries and heads
__device__ void of_key(const float* matrix, const T* rows, T* out, int H, int G, int Q, int K, int D) {
    const int64 row = blockIdx.x, first = row / K * (H / G) * Q;
    float sum = 0;
    for (int64 i = first; i < first + H / G * Q; ++i) sum += matrix[i * K + row % K] * plain(rows[i * D + threadIdx.x]);
    round_to(&out[row * D + threadIdx.x], sum);
}

extern "C" __global__ void __launch_bounds__(THREADS)
differentiate_float16(GIVEN(half), float* weights, float* gradient, int D) {
    differentiate(PASSED_ON, weights, gradient, D);
}
extern "C" __global__ void __launch_bounds__(THREADS)
differentiate_bfloat16(GIVEN(bfloat), float* weights, float* gradient, int D) {
    differentiate(PASSED_ON, weights, gradient, D);
}
extern "C" __global__ void
of_query_float16(const float* gradient, const half* k, half* dq, int H, int G, int Q, int K, int D) {
    of_query(gradient, k, dq, H, G, Q, K, D);
}
extern "C" __global__ void
of_query_bfloat16(const float* gradient, const bfloat* k, bfloat* dq, int H, int G, int Q, int K, int D) {
    of_query(gradient, k, dq, H, G, Q, K, D);
}
extern "C" __global__ void
of_key_float16(const float* matrix, const half* rows, half* out, int H, int G, int Q, int K, int D) {
    of_key(matrix, rows, out, H, G, Q, K, D);
}
extern "C" __global__ void
of_key_bfloat16(const float* matrix, const bfloat* rows, bfloat* out, int H, int G, int Q, int K, int D) {
    of_key(matrix, rows, out, H, G, Q, K, D);
}
"""
)
PROGRAM = Program(SOURCE, OPTIONS, ARCHS)


def backward(q, k, v, out, lse, dout, lengths, causal):  # as attention, and out, lse, dout -> dq, dk, dv
    import cupy
    import numpy

    q, k, v, dout, lse, delta, lengths, *sizes = given(PROGRAM, q, k, v, out, lse, dout, lengths, causal)
    dq, dk, dv = map(cupy.empty_like, (q, k, v))
    weights, gradient = (cupy.empty((*lse.shape, k.shape[2]), "float32") for _ in range(2))
    kind, D, keys = NAMES[str(q.dtype)], numpy.int32(q.shape[3]), k.size // k.shape[3]
    arguments = (q, k, v, dout, lse, delta, lengths, *sizes, weights, gradient, D)
    PROGRAM.launch(f"differentiate_{kind}", lse.size, THREADS, arguments)
    PROGRAM.launch(f"of_query_{kind}", lse.size, int(D), (gradient, k, dq, *sizes[:4], D))
    PROGRAM.launch(f"of_key_{kind}", keys, int(D), (gradient, q, dk, *sizes[:4], D))
    PROGRAM.launch(f"of_key_{kind}", keys, int(D), (weights, dout, dv, *sizes[:4], D))
    return dq, dk, dv
