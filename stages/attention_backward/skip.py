"""The backward pass that never looks at what the mask hides.

Idea    As in the forward pass: whole tiles are masked, so do not visit them. Here there are two walks to shorten.
Was     Each block of keys walked over all queries, and each block of queries over all keys.
Change  Keys begin with the first query that sees one of them, queries end with the last key that one of them sees; keys
        that are padding have no walk at all. Blocks of queries start with the longest.
Expect  Half the time where the mask is causal and the length many tiles.
"""

from common.cuda import Program
from common.cuda_attention import FRAGMENTS, GIVEN, TYPES, blocks, given, name

PREVIOUS = "split"
CHANGES = (
    "SOURCE.of_keys",
    "SOURCE.of_queries",
)
ARCHS = ("sm_80", "sm_90")

TILE_Q = 64  # queries a tile; for their own gradient a block, 16 for each warp
TILE_K = 64  # keys a block, or a tile
THREADS = TILE_K * 2
OPTIONS = (f"-DTILE_Q={TILE_Q}", f"-DTILE_K={TILE_K}", f"-DTHREADS={THREADS}")

SOURCE = (
    TYPES
    + GIVEN
    + FRAGMENTS
    + r"""
template <typename T, int D> struct Tiles {
    T q[TILE_Q][D + 8], dout[TILE_Q][D + 8], k[TILE_K][D + 8], v[TILE_K][D + 8];
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

template <typename T, int D> __device__ void of_keys(GIVEN(T), T* dk, T* dv) {  // dk, dv: (B, G, K, D)
    extern __shared__ __align__(16) char shared[];
    Tiles<T, D>& tile = *(Tiles<T, D>*)shared;
    const int tiles = (K + TILE_K - 1) / TILE_K, group = blockIdx.x / tiles, j0 = blockIdx.x % tiles * TILE_K;
    const int lane = threadIdx.x % 32, down = threadIdx.x / 32 * 16;  // the warp's first key in the tile
    const int length = lengths[group / G], first = causal ? max(j0 + Q - K, 0) : 0;  // the first query to see a key
    const int begin = j0 < length ? first / TILE_Q * TILE_Q : Q;
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

template <typename T, int D> __device__ void of_queries(GIVEN(T), T* dq) {  // dq: (B, H, Q, D)
    extern __shared__ __align__(16) char shared[];
    Tiles<T, D>& tile = *(Tiles<T, D>*)shared;
    const int tiles = (Q + TILE_Q - 1) / TILE_Q, head = blockIdx.x / tiles;
    const int i0 = (tiles - 1 - blockIdx.x % tiles) * TILE_Q;  // a head's last queries see most: they start first
    const int lane = threadIdx.x % 32, down = threadIdx.x / 32 * 16;  // the warp's first query in the tile
    const int length = lengths[head / H], end = visible(min(i0 + TILE_Q, Q) - 1, length, Q, K, causal);
    const int64 row = (int64)head * Q + i0;
    take<TILE_Q, D>(tile.q, q + row * D, Q - i0);
    take<TILE_Q, D>(tile.dout, dout + row * D, Q - i0);
    k += (int64)(head / (H / G)) * K * D, v += (int64)(head / (H / G)) * K * D;
    float sum[D / 8][4] = {}, sums_log[2], term[2];
    int seen[2];
    for (int h = 0; h < 2; ++h) {
        const int i = down + lane / 4 + 8 * h;
        const bool inside = i0 + i < Q;
        seen[h] = inside ? visible(i0 + i, length, Q, K, causal) : 0;
        sums_log[h] = inside ? lse[row + i] * 1.4426950408889634f : 0, term[h] = inside ? delta[row + i] : 0;
    }
    for (int j0 = 0; j0 < end; j0 += TILE_K) {
        __syncthreads();  // every warp has left the tiles before
        take<TILE_K, D>(tile.k, k + (int64)j0 * D, K - j0);
        take<TILE_K, D>(tile.v, v + (int64)j0 * D, K - j0);
        asm volatile("cp.async.wait_all;" ::: "memory");
        __syncthreads();
        float weight[TILE_K / 8][4] = {}, change[TILE_K / 8][4] = {};  // queries down, keys across
        across<T, TILE_K, D>(weight, tile.q, down, tile.k);
        across<T, TILE_K, D>(change, tile.dout, down, tile.v);
#pragma unroll
        for (int n = 0; n < TILE_K / 8; ++n)
            for (int e = 0; e < 4; ++e) {
                const float p = power(weight[n][e] * (rsqrtf(D) * 1.4426950408889634f) - sums_log[e / 2]);
                weight[n][e] = j0 + n * 8 + lane % 4 * 2 + e % 2 < seen[e / 2] ? p : 0;
                change[n][e] = weight[n][e] * (change[n][e] - term[e / 2]);
            }
        onward<T, TILE_K, D>(sum, change, tile.k);
    }
    for (int h = 0; h < 2; ++h) {
        const int i = down + lane / 4 + 8 * h;
        if (i0 + i >= Q) continue;
#pragma unroll
        for (int d = 0; d < D / 8; ++d)
            *(uint32*)&dq[(row + i) * D + d * 8 + lane % 4 * 2] =
                pair<T>(sum[d][2 * h] * rsqrtf(D), sum[d][2 * h + 1] * rsqrtf(D));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
of_keys_float16_64(GIVEN(half), half* dk, half* dv) { of_keys<half, 64>(PASSED_ON, dk, dv); }
extern "C" __global__ void __launch_bounds__(THREADS, 2)
of_keys_float16_128(GIVEN(half), half* dk, half* dv) { of_keys<half, 128>(PASSED_ON, dk, dv); }
extern "C" __global__ void __launch_bounds__(THREADS, 2)
of_keys_bfloat16_64(GIVEN(bfloat), bfloat* dk, bfloat* dv) { of_keys<bfloat, 64>(PASSED_ON, dk, dv); }
extern "C" __global__ void __launch_bounds__(THREADS, 2)
of_keys_bfloat16_128(GIVEN(bfloat), bfloat* dk, bfloat* dv) { of_keys<bfloat, 128>(PASSED_ON, dk, dv); }
extern "C" __global__ void __launch_bounds__(THREADS, 2)
of_queries_float16_64(GIVEN(half), half* dq) { of_queries<half, 64>(PASSED_ON, dq); }
extern "C" __global__ void __launch_bounds__(THREADS, 2)
of_queries_float16_128(GIVEN(half), half* dq) { of_queries<half, 128>(PASSED_ON, dq); }
extern "C" __global__ void __launch_bounds__(THREADS, 2)
of_queries_bfloat16_64(GIVEN(bfloat), bfloat* dq) { of_queries<bfloat, 64>(PASSED_ON, dq); }
extern "C" __global__ void __launch_bounds__(THREADS, 2)
of_queries_bfloat16_128(GIVEN(bfloat), bfloat* dq) { of_queries<bfloat, 128>(PASSED_ON, dq); }
"""
)
PROGRAM = Program(SOURCE, OPTIONS, ARCHS)


def shared(D: int) -> int:
    """Bytes of shared memory: four tiles, and three numbers for each query."""
    return (2 * TILE_Q + 2 * TILE_K) * (D + 8) * 2 + 12 * TILE_Q


def backward(q, k, v, out, lse, dout, lengths, causal):  # as attention, and out, lse, dout -> dq, dk, dv
    import cupy

    q, k, v, dout, lse, delta, lengths, *sizes = given(PROGRAM, q, k, v, out, lse, dout, lengths, causal)
    dq, dk, dv = map(cupy.empty_like, (q, k, v))
    arguments, room = (q, k, v, dout, lse, delta, lengths, *sizes), shared(q.shape[3])
    PROGRAM.launch(name("of_keys", q), blocks(k, TILE_K), THREADS, (*arguments, dk, dv), room)
    PROGRAM.launch(name("of_queries", q), blocks(q, TILE_Q), THREADS, (*arguments, dq), room)
    return dq, dk, dv
