"""The backward pass without a matrix in memory: probabilities are computed again from the log-sum-exp.

Idea    exp(score - log-sum-exp) is a probability, so one number for each row stands for Q x K of them.
Was     Five kernels wrote and read two Q x K matrices, on the FP32 units.
Change  A block takes 64 keys and their values, walks over the queries, and makes scores, weights and their gradients
        tile by tile on the tensor cores. The sums for its keys and values stay in registers; those for the queries
        belong to every block, which adds to them in memory, in FP32 (Dao, 2022).
Expect  Memory linear in the length. The additions of all blocks to one array take turns, and their order differs from
        run to run: dq is not the same twice, bit for bit.
"""

from common.cuda import Program
from common.cuda_attention import FRAGMENTS, GIVEN, NAMES, TYPES, given, name

PREVIOUS = "stored"
CHANGES = (
    "FRAGMENTS",
    "name",
    "TILE_Q",
    "TILE_K",
    "THREADS",
    "OPTIONS",
    "SOURCE",
    "SOURCE.take",
    "SOURCE.across",
    "SOURCE.onward",
    "SOURCE.spread",
    "SOURCE.of_keys",
    "SOURCE.of_keys_float16_64",
    "SOURCE.of_keys_float16_128",
    "SOURCE.of_keys_bfloat16_64",
    "SOURCE.of_keys_bfloat16_128",
    "SOURCE.narrow",
    "SOURCE.narrow_float16",
    "SOURCE.narrow_bfloat16",
    "shared",
    "backward",
    "SOURCE.differentiate",
    "SOURCE.of_query",
    "SOURCE.of_key",
    "SOURCE.differentiate_float16",
    "SOURCE.differentiate_bfloat16",
    "SOURCE.of_query_float16",
    "SOURCE.of_query_bfloat16",
    "SOURCE.of_key_float16",
    "SOURCE.of_key_bfloat16",
)
ARCHS = ("sm_80", "sm_90")

TILE_Q = 64  # queries a tile
TILE_K = 64  # keys a block, 16 for each warp
THREADS = TILE_K * 2
OPTIONS = (f"-DTILE_Q={TILE_Q}", f"-DTILE_K={TILE_K}", f"-DTHREADS={THREADS}")

SOURCE = (
    TYPES
    + GIVEN
    + FRAGMENTS
    + r"""
template <typename T, int D> struct Tiles {
    T q[TILE_Q][D + 8], dout[TILE_Q][D + 8], k[TILE_K][D + 8], v[TILE_K][D + 8], gradient[TILE_K][TILE_Q + 8];
    float lse[TILE_Q], delta[TILE_Q];
    int seen[TILE_Q];
};

// The first rows of a matrix into shared memory, zeros after its last. + 8: rows fall in different banks.
template <int COUNT, int D, typename T> __device__ void take(T (*to)[D + 8], const T* from, int rows) {
#pragma unroll
    for (int i = 0; i < COUNT * D / 8 / THREADS; ++i) {
        const int row = threadIdx.x / (D / 8) + i * (8 * THREADS / D), d = threadIdx.x % (D / 8) * 8;
        copy(&to[row][d], from + row * D + d, row < rows);
    }
}

// 16 rows of a, from `down` on, by all rows of b: what is contiguous in both is summed over.
template <typename T, int COLUMNS, int D>
__device__ void across(float (*sum)[4], const T (*a)[D + 8], int down, const T (*b)[D + 8]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int d = 0; d < D; d += 16) {
        uint32 left[4], right[4];
        fragment(left, &a[down + lane % 16][d + lane / 16 * 8]);
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; n += 2) {
            fragment(right, &b[n * 8 + lane % 8 + lane / 16 * 8][d + lane / 8 % 2 * 8]);
            multiply<T>(sum[n], left, right), multiply<T>(sum[n + 1], left, right + 2);
        }
    }
}

// 16 rows of sums, as they lie in registers and rounded, by the matrix b: += (16, ROWS) @ (ROWS, D)
template <typename T, int ROWS, int D>
__device__ void onward(float (*sum)[4], const float (*a)[4], const T (*b)[D + 8]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < ROWS / 8; n += 2) {
        uint32 left[4], right[4];
        for (int p = 0; p < 4; ++p) left[p] = pair<T>(a[n + p / 2][p % 2 * 2], a[n + p / 2][p % 2 * 2 + 1]);
#pragma unroll
        for (int d = 0; d < D / 8; d += 2) {
            fragment_turned(right, &b[n * 8 + lane % 16][d * 8 + lane / 16 * 8]);
            multiply<T>(sum[d], left, right), multiply<T>(sum[d + 1], left, right + 2);
        }
    }
}

// 16 queries' share of dq from this block's keys, added to what all blocks sum up in memory.
template <typename T, int D> __device__ void spread(Tiles<T, D>& tile, float* dq, int down, int rows) {
    const int lane = threadIdx.x % 32;
    uint32 left[TILE_K / 16][4];
#pragma unroll
    for (int n = 0; n < TILE_K / 16; ++n)
        fragment_turned(left[n], &tile.gradient[n * 16 + lane % 8 + lane / 16 * 8][down + lane / 8 % 2 * 8]);
#pragma unroll
    for (int d = 0; d < D / 8; d += 2) {
        float sum[2][4] = {};
#pragma unroll
        for (int n = 0; n < TILE_K / 16; ++n) {
            uint32 right[4];
            fragment_turned(right, &tile.k[n * 16 + lane % 16][d * 8 + lane / 16 * 8]);
            multiply<T>(sum[0], left[n], right), multiply<T>(sum[1], left[n], right + 2);
        }
        for (int i = 0; i < 8; ++i) {
            const int row = down + lane / 4 + i % 4 / 2 * 8, at = row * D + (d + i / 4) * 8 + lane % 4 * 2 + i % 2;
            if (row < rows) atomicAdd(&dq[at], sum[i / 4][i % 4] * rsqrtf(D));
        }
    }
}

template <typename T, int D> __device__ void of_keys(GIVEN(T), T* dk, T* dv, float* dq) {  // dk, dv: (B, G, K, D)
    extern __shared__ __align__(16) char shared[];
    Tiles<T, D>& tile = *(Tiles<T, D>*)shared;
    const int tiles = (K + TILE_K - 1) / TILE_K, group = blockIdx.x / tiles, j0 = blockIdx.x % tiles * TILE_K;
    const int lane = threadIdx.x % 32, down = threadIdx.x / 32 * 16;  // the warp's first key in the tile
    const int length = lengths[group / G], begin = 0;
    take<TILE_K, D>(tile.k, k + ((int64)group * K + j0) * D, K - j0);
    take<TILE_K, D>(tile.v, v + ((int64)group * K + j0) * D, K - j0);
    float key_sum[D / 8][4] = {}, value_sum[D / 8][4] = {};
    for (int head = group * (H / G); head < (group + 1) * (H / G); ++head)
        for (int i0 = begin; i0 < Q; i0 += TILE_Q) {
            const int64 row = (int64)head * Q + i0;
            __syncthreads();  // every warp has left the tiles before
            take<TILE_Q, D>(tile.q, q + row * D, Q - i0);
            take<TILE_Q, D>(tile.dout, dout + row * D, Q - i0);
            if (threadIdx.x < TILE_Q) {
                const int i = i0 + threadIdx.x;
                tile.seen[threadIdx.x] = i < Q ? visible(i, length, Q, K, causal) : 0;
                tile.lse[threadIdx.x] = i < Q ? lse[row + threadIdx.x] * 1.4426950408889634f : 0;
                tile.delta[threadIdx.x] = i < Q ? delta[row + threadIdx.x] : 0;
            }
            asm volatile("cp.async.wait_all;" ::: "memory");
            __syncthreads();
            float weight[TILE_Q / 8][4] = {}, change[TILE_Q / 8][4] = {};  // keys down, queries across
            across<T, TILE_Q, D>(weight, tile.k, down, tile.q);
            across<T, TILE_Q, D>(change, tile.v, down, tile.dout);
#pragma unroll
            for (int n = 0; n < TILE_Q / 8; ++n)
                for (int e = 0; e < 4; ++e) {
                    const int i = n * 8 + lane % 4 * 2 + e % 2, j = j0 + down + lane / 4 + e / 2 * 8;
                    const float p = power(weight[n][e] * (rsqrtf(D) * 1.4426950408889634f) - tile.lse[i]);
                    weight[n][e] = j < tile.seen[i] ? p : 0;
                    change[n][e] = weight[n][e] * (change[n][e] - tile.delta[i]);
                }
            onward<T, TILE_Q, D>(value_sum, weight, tile.dout);
            onward<T, TILE_Q, D>(key_sum, change, tile.q);
            for (int n = 0; n < TILE_Q / 8; ++n)
                for (int h = 0; h < 2; ++h)
                    *(uint32*)&tile.gradient[down + lane / 4 + 8 * h][n * 8 + lane % 4 * 2] =
                        pair<T>(change[n][2 * h], change[n][2 * h + 1]);
            __syncthreads();
            spread<T, D>(tile, dq + row * D, down, Q - i0);
        }
    for (int h = 0; h < 2; ++h) {
        const int j = j0 + down + lane / 4 + 8 * h;
        const int64 at = ((int64)group * K + j) * D + lane % 4 * 2;
        if (j >= K) continue;
#pragma unroll
        for (int d = 0; d < D / 8; ++d) {
            *(uint32*)&dk[at + d * 8] = pair<T>(key_sum[d][2 * h] * rsqrtf(D), key_sum[d][2 * h + 1] * rsqrtf(D));
            *(uint32*)&dv[at + d * 8] = pair<T>(value_sum[d][2 * h], value_sum[d][2 * h + 1]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
of_keys_float16_64(GIVEN(half), half* dk, half* dv, float* dq) { of_keys<half, 64>(PASSED_ON, dk, dv, dq); }
extern "C" __global__ void __launch_bounds__(THREADS, 2)
of_keys_float16_128(GIVEN(half), half* dk, half* dv, float* dq) { of_keys<half, 128>(PASSED_ON, dk, dv, dq); }
extern "C" __global__ void __launch_bounds__(THREADS, 2)
of_keys_bfloat16_64(GIVEN(bfloat), bfloat* dk, bfloat* dv, float* dq) { of_keys<bfloat, 64>(PASSED_ON, dk, dv, dq); }
extern "C" __global__ void __launch_bounds__(THREADS, 2)
of_keys_bfloat16_128(GIVEN(bfloat), bfloat* dk, bfloat* dv, float* dq) { of_keys<bfloat, 128>(PASSED_ON, dk, dv, dq); }

template <typename T> __device__ void narrow(const float* from, T* to) {
    const int64 i = (int64)blockIdx.x * 64 + threadIdx.x;
    round_to(&to[i], from[i]);
}
extern "C" __global__ void narrow_float16(const float* from, half* to) { narrow(from, to); }
extern "C" __global__ void narrow_bfloat16(const float* from, bfloat* to) { narrow(from, to); }
"""
)
PROGRAM = Program(SOURCE, OPTIONS, ARCHS)


def shared(D: int) -> int:
    """Bytes of shared memory: four tiles, the gradient of their weights, and three numbers for each query."""
    return (2 * TILE_Q + 2 * TILE_K) * (D + 8) * 2 + TILE_K * (TILE_Q + 8) * 2 + 12 * TILE_Q


def backward(q, k, v, out, lse, dout, lengths, causal):  # as attention, and out, lse, dout -> dq, dk, dv
    import cupy

    q, k, v, dout, lse, delta, lengths, *sizes = given(PROGRAM, q, k, v, out, lse, dout, lengths, causal)
    dq, dk, dv = map(cupy.empty_like, (q, k, v))
    sums, arguments = cupy.zeros(q.shape, "float32"), (q, k, v, dout, lse, delta, lengths, *sizes)
    blocks = k.shape[0] * k.shape[1] * -(-k.shape[2] // TILE_K)
    PROGRAM.launch(name("of_keys", q), blocks, THREADS, (*arguments, dk, dv, sums), shared(q.shape[3]))
    PROGRAM.launch(f"narrow_{NAMES[str(q.dtype)]}", q.size // 64, 64, (sums, dq))
    return dq, dk, dv
