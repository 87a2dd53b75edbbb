"""The backward pass in two kernels that share nothing: one for keys and values, one for queries.

Idea    Computing a tile's weights twice can be cheaper than having every block add to the same memory.
Was     All blocks added their shares of dq to one FP32 array, which then had to be rounded into another.
Change  The kernel for keys and values leaves dq alone. A second one takes 64 queries a block and walks over the keys,
        as the forward pass does, with the sum for its queries in registers. What dq took is room for more: the next
        tile is on its way while one is used, and where heads are small, fragments of the rows that a block keeps stay
        in registers.
Expect  Seven products instead of five, but no additions in memory and no pass to round them; and the same bits in every
        run. Which weighs more depends on how fast the GPU adds in its L2.
"""

from common.cuda import Program
from common.cuda_attention import FRAGMENTS, GIVEN, TYPES, blocks, given, name

PREVIOUS = "recomputed"
CHANGES = (
    "TILE",
    "SOURCE",
    "SOURCE.copy_word",
    "SOURCE.across",
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
    "shared",
    "backward",
    "NAMES",
    "SOURCE.spread",
    "SOURCE.narrow",
    "SOURCE.narrow_float16",
    "SOURCE.narrow_bfloat16",
)
ARCHS = ("sm_80", "sm_90")

TILE = 64  # keys or queries a block, 16 for each warp; and queries or keys that it takes at a time
THREADS = TILE * 2
OPTIONS = (f"-DTILE={TILE}", f"-DTHREADS={THREADS}")

SOURCE = (
    TYPES
    + GIVEN
    + FRAGMENTS
    + r"""
template <typename T, int D> struct Tiles {
    T kept[2][TILE][D + 8], walked[2][2][TILE][D + 8];  // a pair of matrices each; of those walked over, the next also
    float terms[2][2][TILE];                            // lse and delta of queries that are walked over
};

__device__ void copy_word(float* to, const float* from, bool inside) {  // as `copy`, of 4 bytes
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(address(to)), "l"(from), "r"(inside ? 4 : 0)
                 : "memory");
}

// The first rows of a matrix into shared memory, zeros after its last. + 8: rows fall in different banks.
template <int D, typename T> __device__ void take(T (*to)[D + 8], const T* from, int rows) {
#pragma unroll
    for (int i = 0; i < TILE * D / 8 / THREADS; ++i) {
        const int row = threadIdx.x / (D / 8) + i * (8 * THREADS / D), d = threadIdx.x % (D / 8) * 8;
        copy(&to[row][d], from + row * D + d, row < rows);
    }
}

template <int D> struct Left {  // fragments of 16 rows that a warp keeps: all, where registers have room for them
    static constexpr bool KEPT = D <= 64;
    uint32 of[KEPT ? D / 16 : 1][4];
    template <typename T> __device__ void load(const T (*rows)[D + 8], int d) {
        fragment(of[KEPT ? d / 16 : 0], &rows[threadIdx.x % 16][d + threadIdx.x % 32 / 16 * 8]);
    }
    template <typename T> __device__ void keep(const T (*rows)[D + 8]) {
        if (KEPT)
            for (int d = 0; d < D; d += 16) load(rows, d);
    }
};

// 16 rows of a by all rows of b: what is contiguous in both is summed over.
template <typename T, int D>
__device__ void across(float (*sum)[4], Left<D>& left, const T (*a)[D + 8], const T (*b)[D + 8]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int d = 0; d < D; d += 16) {
        uint32 right[4], *a16 = left.of[left.KEPT ? d / 16 : 0];
        if (!left.KEPT) left.load(a, d);
#pragma unroll
        for (int n = 0; n < TILE / 8; n += 2) {
            fragment(right, &b[n * 8 + lane % 8 + lane / 16 * 8][d + lane / 8 % 2 * 8]);
            multiply<T>(sum[n], a16, right), multiply<T>(sum[n + 1], a16, right + 2);
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

template <typename T, int D> __device__ void of_keys(GIVEN(T), T* dk, T* dv) {  // dk, dv: (B, G, K, D)
    extern __shared__ __align__(16) char shared[];
    Tiles<T, D>& tile = *(Tiles<T, D>*)shared;
    const int tiles = (K + TILE - 1) / TILE, group = blockIdx.x / tiles, j0 = blockIdx.x % tiles * TILE;
    const int lane = threadIdx.x % 32, down = threadIdx.x / 32 * 16;  // the warp's first key in the tile
    const int length = lengths[group / G], begin = 0;
    const int each = (Q - begin + TILE - 1) / TILE, count = each * (H / G);  // tiles of one head, and of all heads
    const int64 key = (int64)group * K + j0;
    const float scale = rsqrtf(D) * 1.4426950408889634f;
    int from[2];  // the first query that sees this thread's key, and the one 8 further
    for (int h = 0; h < 2; ++h) {
        const int j = j0 + down + lane / 4 + 8 * h;
        from[h] = j < length ? causal ? j + Q - K : 0 : Q;
    }
    auto fetch = [&](int t) {
        if (t >= count) return;
        const int i0 = begin + t % each * TILE, i = threadIdx.x % TILE, which = threadIdx.x / TILE;
        const int64 row = (int64)(group * (H / G) + t / each) * Q + i0;
        take<D>(tile.walked[t % 2][0], q + row * D, Q - i0);
        take<D>(tile.walked[t % 2][1], dout + row * D, Q - i0);
        copy_word(&tile.terms[t % 2][which][i], (which ? delta : lse) + row + i, i0 + i < Q);
    };
    take<D>(tile.kept[0], k + key * D, K - j0);
    take<D>(tile.kept[1], v + key * D, K - j0);
    fetch(0);
    Left<D> keys, values;
    float key_sum[D / 8][4] = {}, value_sum[D / 8][4] = {};
    for (int t = 0; t < count; ++t) {
        asm volatile("cp.async.wait_all;" ::: "memory");
        __syncthreads();  // this tile is there, and every warp has left the one that the next overwrites
        fetch(t + 1);
        if (t == 0) keys.keep(tile.kept[0] + down), values.keep(tile.kept[1] + down);
        const auto& queries = tile.walked[t % 2][0];
        const auto& given = tile.walked[t % 2][1];
        float weight[TILE / 8][4] = {}, change[TILE / 8][4] = {};  // keys down, queries across
        across<T, D>(weight, keys, tile.kept[0] + down, queries);
        across<T, D>(change, values, tile.kept[1] + down, given);
        const int i0 = begin + t % each * TILE;
#pragma unroll
        for (int n = 0; n < TILE / 8; ++n) {
            const float2 less = *(const float2*)&tile.terms[t % 2][0][n * 8 + lane % 4 * 2];
#pragma unroll
            for (int e = 0; e < 4; ++e)
                weight[n][e] = power(weight[n][e] * scale - (e % 2 ? less.y : less.x) * 1.4426950408889634f);
        }
#pragma unroll
        for (int n = 0; n < TILE / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                if (i0 + n * 8 + lane % 4 * 2 + e % 2 < from[e / 2]) weight[n][e] = 0;
#pragma unroll
        for (int n = 0; n < TILE / 8; ++n) {
            const float2 less = *(const float2*)&tile.terms[t % 2][1][n * 8 + lane % 4 * 2];
#pragma unroll
            for (int e = 0; e < 4; ++e) change[n][e] = weight[n][e] * (change[n][e] - (e % 2 ? less.y : less.x));
        }
        onward<T, D>(value_sum, weight, given);
        onward<T, D>(key_sum, change, queries);
    }
    write<T, D>(dk + key * D, key_sum, K - j0, rsqrtf(D));
    write<T, D>(dv + key * D, value_sum, K - j0, 1);
}

template <typename T, int D> __device__ void of_queries(GIVEN(T), T* dq) {  // dq: (B, H, Q, D)
    extern __shared__ __align__(16) char shared[];
    Tiles<T, D>& tile = *(Tiles<T, D>*)shared;
    const int tiles = (Q + TILE - 1) / TILE, head = blockIdx.x / tiles, i0 = blockIdx.x % tiles * TILE;
    const int lane = threadIdx.x % 32, down = threadIdx.x / 32 * 16;  // the warp's first query in the tile
    const int length = lengths[head / H], end = K;
    const int64 row = (int64)head * Q + i0;
    const float scale = rsqrtf(D) * 1.4426950408889634f;
    k += (int64)(head / (H / G)) * K * D, v += (int64)(head / (H / G)) * K * D;
    float less[2], term[2];
    int seen[2];
    for (int h = 0; h < 2; ++h) {
        const int i = down + lane / 4 + 8 * h;
        const bool inside = i0 + i < Q;
        seen[h] = inside ? visible(i0 + i, length, Q, K, causal) : 0;
        less[h] = inside ? lse[row + i] * 1.4426950408889634f : 0, term[h] = inside ? delta[row + i] : 0;
    }
    auto fetch = [&](int j0) {
        if (j0 >= end) return;
        take<D>(tile.walked[j0 / TILE % 2][0], k + (int64)j0 * D, K - j0);
        take<D>(tile.walked[j0 / TILE % 2][1], v + (int64)j0 * D, K - j0);
    };
    take<D>(tile.kept[0], q + row * D, Q - i0);
    take<D>(tile.kept[1], dout + row * D, Q - i0);
    fetch(0);
    Left<D> queries, given;
    float sum[D / 8][4] = {};
    for (int j0 = 0; j0 < end; j0 += TILE) {
        asm volatile("cp.async.wait_all;" ::: "memory");
        __syncthreads();
        fetch(j0 + TILE);
        if (j0 == 0) queries.keep(tile.kept[0] + down), given.keep(tile.kept[1] + down);
        const auto& keys = tile.walked[j0 / TILE % 2][0];
        const auto& values = tile.walked[j0 / TILE % 2][1];
        float weight[TILE / 8][4] = {}, change[TILE / 8][4] = {};  // queries down, keys across
        across<T, D>(weight, queries, tile.kept[0] + down, keys);
        across<T, D>(change, given, tile.kept[1] + down, values);
#pragma unroll
        for (int n = 0; n < TILE / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) weight[n][e] = power(weight[n][e] * scale - less[e / 2]);
#pragma unroll
        for (int n = 0; n < TILE / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                if (j0 + n * 8 + lane % 4 * 2 + e % 2 >= seen[e / 2]) weight[n][e] = 0;
#pragma unroll
        for (int n = 0; n < TILE / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) change[n][e] = weight[n][e] * (change[n][e] - term[e / 2]);
        onward<T, D>(sum, change, keys);
    }
    write<T, D>(dq + row * D, sum, Q - i0, rsqrtf(D));
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
    """Bytes of shared memory: two tiles that a block keeps, two pairs that it walks over, and two numbers a query."""
    return 6 * TILE * (D + 8) * 2 + 16 * TILE


def backward(q, k, v, out, lse, dout, lengths, causal):  # as attention, and out, lse, dout -> dq, dk, dv
    import cupy

    q, k, v, dout, lse, delta, lengths, *sizes = given(PROGRAM, q, k, v, out, lse, dout, lengths, causal)
    dq, dk, dv = map(cupy.empty_like, (q, k, v))
    arguments, room = (q, k, v, dout, lse, delta, lengths, *sizes), shared(q.shape[3])
    PROGRAM.launch(name("of_keys", q), blocks(k, TILE), THREADS, (*arguments, dk, dv), room)
    PROGRAM.launch(name("of_queries", q), blocks(q, TILE), THREADS, (*arguments, dq), room)
    return dq, dk, dv
