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
from common.cuda_attention import FRAGMENTS, GIVEN, NAMES, TYPES, blocks, given, name

PREVIOUS = "stored"
CHANGES = (
    "FRAGMENTS",
    "blocks",
    "name",
    "TILE",
    "THREADS",
    "OPTIONS",
    "SOURCE",
    "SOURCE.take",
    "SOURCE.across",
    "SOURCE.onward",
    "SOURCE.spread",
    "SOURCE.write",
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

TILE = 64  # keys a block, 16 for each warp; and queries that it takes at a time
THREADS = TILE * 2
OPTIONS = (f"-DTILE={TILE}", f"-DTHREADS={THREADS}")

SOURCE = (
    TYPES
    + GIVEN
    + FRAGMENTS
    + r"""
template <typename T, int D> struct Tiles {
    T kept[2][TILE][D + 8], walked[2][TILE][D + 8], gradient[TILE][TILE + 8];
    float terms[2][TILE];  // lse and delta of the queries that are walked over
};

// The first rows of a matrix into shared memory, zeros after its last. + 8: rows fall in different banks.
template <int D, typename T> __device__ void take(T (*to)[D + 8], const T* from, int rows) {
#pragma unroll
    for (int i = 0; i < TILE * D / 8 / THREADS; ++i) {
        const int row = threadIdx.x / (D / 8) + i * (8 * THREADS / D), d = threadIdx.x % (D / 8) * 8;
        copy(&to[row][d], from + row * D + d, row < rows);
    }
}

// 16 rows of a by all rows of b: what is contiguous in both is summed over.
template <typename T, int D> __device__ void across(float (*sum)[4], const T (*a)[D + 8], const T (*b)[D + 8]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int d = 0; d < D; d += 16) {
        uint32 left[4], right[4];
        fragment(left, &a[lane % 16][d + lane / 16 * 8]);
#pragma unroll
        for (int n = 0; n < TILE / 8; n += 2) {
            fragment(right, &b[n * 8 + lane % 8 + lane / 16 * 8][d + lane / 8 % 2 * 8]);
            multiply<T>(sum[n], left, right), multiply<T>(sum[n + 1], left, right + 2);
        }
    }
}

// 16 rows of sums, as they lie in registers and rounded, by the matrix b: += (16, TILE) @ (TILE, D)
template <typename T, int D>
__device__ void onward(float (*sum)[4], const float (*a)[4], const T (*b)[D + 8]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < TILE / 8; n += 2) {
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
    uint32 left[TILE / 16][4];
#pragma unroll
    for (int n = 0; n < TILE / 16; ++n)
        fragment_turned(left[n], &tile.gradient[n * 16 + lane % 8 + lane / 16 * 8][down + lane / 8 % 2 * 8]);
#pragma unroll
    for (int d = 0; d < D / 8; d += 2) {
        float sum[2][4] = {};
#pragma unroll
        for (int n = 0; n < TILE / 16; ++n) {
            uint32 right[4];
            fragment_turned(right, &tile.kept[0][n * 16 + lane % 16][d * 8 + lane / 16 * 8]);
            multiply<T>(sum[0], left[n], right), multiply<T>(sum[1], left[n], right + 2);
        }
        for (int i = 0; i < 8; ++i) {
            const int row = down + lane / 4 + i % 4 / 2 * 8, at = row * D + (d + i / 4) * 8 + lane % 4 * 2 + i % 2;
            if (row < rows) atomicAdd(&dq[at], sum[i / 4][i % 4] * rsqrtf(D));
        }
    }
}

// A warp's 16 rows of sums, scaled and rounded, to those of 64 rows that are there.
template <typename T, int D> __device__ void write(T* to, const float (*sum)[4], int rows, float scale) {
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
    for (int h = 0; h < 2; ++h)
        if (row + 8 * h < rows)
#pragma unroll
            for (int d = 0; d < D / 8; ++d)
                *(uint32*)&to[(row + 8 * h) * D + d * 8 + lane % 4 * 2] =
                    pair<T>(sum[d][2 * h] * scale, sum[d][2 * h + 1] * scale);
}

template <typename T, int D> __device__ void of_keys(GIVEN(T), T* dk, T* dv, float* dq) {  // dk, dv: (B, G, K, D)
    extern __shared__ __align__(16) char shared[];
    Tiles<T, D>& tile = *(Tiles<T, D>*)shared;
    const int tiles = (K + TILE - 1) / TILE, group = blockIdx.x / tiles, j0 = blockIdx.x % tiles * TILE;
    const int lane = threadIdx.x % 32, down = threadIdx.x / 32 * 16;  // the warp's first key in the tile
    const int length = lengths[group / G], each = (Q + TILE - 1) / TILE;  // tiles of a head
    const int64 key = (int64)group * K + j0;
    const float scale = rsqrtf(D) * 1.4426950408889634f;
    int from[2];  // the first query that sees this thread's key, and the one 8 further
    for (int h = 0; h < 2; ++h) {
        const int j = j0 + down + lane / 4 + 8 * h;
        from[h] = j < length ? causal ? j + Q - K : 0 : Q;
    }
    take<D>(tile.kept[0], k + key * D, K - j0);
    take<D>(tile.kept[1], v + key * D, K - j0);
    float key_sum[D / 8][4] = {}, value_sum[D / 8][4] = {};
    for (int t = 0; t < each * (H / G); ++t) {
        const int i0 = t % each * TILE, i = threadIdx.x % TILE, which = threadIdx.x / TILE;
        const int64 row = (int64)(group * (H / G) + t / each) * Q + i0;
        __syncthreads();  // every warp has left the tiles before
        take<D>(tile.walked[0], q + row * D, Q - i0);
        take<D>(tile.walked[1], dout + row * D, Q - i0);
        tile.terms[which][i] = i0 + i < Q ? (which ? delta : lse)[row + i] : 0;
        asm volatile("cp.async.wait_all;" ::: "memory");
        __syncthreads();
        float weight[TILE / 8][4] = {}, change[TILE / 8][4] = {};  // keys down, queries across
        across<T, D>(weight, tile.kept[0] + down, tile.walked[0]);
        across<T, D>(change, tile.kept[1] + down, tile.walked[1]);
#pragma unroll
        for (int n = 0; n < TILE / 8; ++n) {
            const float2 logs = *(const float2*)&tile.terms[0][n * 8 + lane % 4 * 2];
            const float2 term = *(const float2*)&tile.terms[1][n * 8 + lane % 4 * 2];
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float less = (e % 2 ? logs.y : logs.x) * 1.4426950408889634f;
                const bool seen = i0 + n * 8 + lane % 4 * 2 + e % 2 >= from[e / 2];
                weight[n][e] = seen ? power(weight[n][e] * scale - less) : 0;
                change[n][e] = weight[n][e] * (change[n][e] - (e % 2 ? term.y : term.x));
            }
        }
        onward<T, D>(value_sum, weight, tile.walked[1]);
        onward<T, D>(key_sum, change, tile.walked[0]);
        for (int n = 0; n < TILE / 8; ++n)
            for (int h = 0; h < 2; ++h)
                *(uint32*)&tile.gradient[down + lane / 4 + 8 * h][n * 8 + lane % 4 * 2] =
                    pair<T>(change[n][2 * h], change[n][2 * h + 1]);
        __syncthreads();
        spread<T, D>(tile, dq + row * D, down, Q - i0);
    }
    write<T, D>(dk + key * D, key_sum, K - j0, rsqrtf(D));
    write<T, D>(dv + key * D, value_sum, K - j0, 1);
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
    """Bytes of shared memory: four tiles, the gradient of their weights, and two numbers for each query."""
    return 4 * TILE * (D + 8) * 2 + TILE * (TILE + 8) * 2 + 8 * TILE


def backward(q, k, v, out, lse, dout, lengths, causal):  # as attention, and out, lse, dout -> dq, dk, dv
    import cupy

    q, k, v, dout, lse, delta, lengths, *sizes = given(PROGRAM, q, k, v, out, lse, dout, lengths, causal)
    dq, dk, dv = map(cupy.empty_like, (q, k, v))
    sums, arguments = cupy.zeros(q.shape, "float32"), (q, k, v, dout, lse, delta, lengths, *sizes)
    PROGRAM.launch(name("of_keys", q), blocks(k, TILE), THREADS, (*arguments, dk, dv, sums), shared(q.shape[3]))
    PROGRAM.launch(f"narrow_{NAMES[str(q.dtype)]}", q.size // 64, 64, (sums, dq))
    return dq, dk, dv
