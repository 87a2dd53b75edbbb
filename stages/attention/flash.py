"""Attention by tiles on the tensor cores: FlashAttention-2, forward.

Idea    A tile of queries looks at a tile of keys while both are in shared memory; scores live and die in registers.
Was     Each query read every key and value for itself, one multiply-add a lane, and a shuffle tree for every score.
Change  A block takes 128 queries and walks over the keys, 64 at a time, the next tile on its way while one is used. A
        warp multiplies its 32 queries by the tile, makes weights of the scores where they lie, and multiplies those by
        the values: what mma.sync leaves of a sum is just what it takes as its left operand (Dao, 2023). The second half
        of a tile's scores is multiplied before the first half's weights are made, so that products and exponentials
        overlap. Weights count from a maximum that is raised only where a score exceeds it by more than 8 powers of 2,
        which is seldom: the sums then shrink as online softmax has them shrink.
Expect  Tensor cores instead of FP32 units, and a key read once for 128 queries: by far the largest step. The
        exponentials, one for each score, now cost about as much as the products.
"""

from common.cuda import Program
from common.cuda_attention import FRAGMENTS, TYPES, blocks, name, operands

PREVIOUS = "online"
CHANGES = (
    "FRAGMENTS",
    "TILE_Q",
    "TILE_K",
    "WARPS",
    "THREADS",
    "shared",
    "OPTIONS",
    "SOURCE",
    "SOURCE.take",
    "SOURCE.raise",
    "SOURCE.attend",
    "SOURCE.attention_float16_64",
    "SOURCE.attention_float16_128",
    "SOURCE.attention_bfloat16_64",
    "SOURCE.attention_bfloat16_128",
    "attention",
)
ARCHS = ("sm_80", "sm_90")

TILE_Q = 128  # queries a block
TILE_K = 64  # keys a tile, two of which are in shared memory
WARPS = 4  # 32 queries each: a fragment of keys or values serves two fragments of queries
THREADS = 32 * WARPS
OPTIONS = (f"-DTILE_Q={TILE_Q}", f"-DTILE_K={TILE_K}", f"-DWARPS={WARPS}", f"-DTHREADS={THREADS}")

SOURCE = (
    TYPES
    + FRAGMENTS
    + r"""
constexpr int ROWS = TILE_Q / WARPS / 16;  // fragments of 16 queries a warp
constexpr int HALF = TILE_K / 2;            // keys whose scores are multiplied while the other half's become weights
constexpr float SLACK = 8;                  // weights may reach 2 to the 8: FP16 ends at 2 to the 16
template <typename T, int D> struct Tiles { T q[TILE_Q][D + 8], k[2][TILE_K][D + 8], v[2][TILE_K][D + 8]; };

// The first rows of a matrix into shared memory, zeros after its last. + 8: rows fall in different banks.
template <int COUNT, int D, typename T> __device__ void take(T (*to)[D + 8], const T* from, int rows) {
#pragma unroll
    for (int i = 0; i < COUNT * D / 8 / THREADS; ++i) {
        const int row = threadIdx.x / (D / 8) + i * (8 * THREADS / D), d = threadIdx.x % (D / 8) * 8;
        copy(&to[row][d], from + row * D + d, row < rows);
    }
}

// Weights count from `most`, in base 2. Where a score exceeds it by more than SLACK, `most` rises, and what was summed
// shrinks. A lane holds two scores of query g = lane / 4 and two of query g + 8 in each fragment of 8 keys.
template <int D> __device__ void raise(const float (*score)[HALF / 8][4], float (*sum)[D / 8][4], float (*most)[2],
                                       float (*total)[2], float scale) {
    float top[ROWS][2];
    bool far = false;
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            top[r][h] = -INFINITY;
#pragma unroll
            for (int n = 0; n < HALF / 8; ++n)
                top[r][h] = fmaxf(top[r][h], fmaxf(score[r][n][2 * h], score[r][n][2 * h + 1]));
            far |= top[r][h] * scale > most[r][h] + SLACK;
        }
    if (!__any_sync(~0u, far)) return;
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            for (int step = 1; step < 4; step *= 2) top[r][h] = fmaxf(top[r][h], __shfl_xor_sync(~0u, top[r][h], step));
            const float higher = fmaxf(most[r][h], top[r][h] * scale), keep = power(most[r][h] - higher);
            most[r][h] = higher, total[r][h] *= keep;
#pragma unroll
            for (int d = 0; d < D / 8; ++d) sum[r][d][2 * h] *= keep, sum[r][d][2 * h + 1] *= keep;
        }
}

template <typename T, int D> __device__ void attend(OPERANDS(T)) {
    extern __shared__ __align__(16) char shared[];
    Tiles<T, D>& tile = *(Tiles<T, D>*)shared;
    const int tiles = (Q + TILE_Q - 1) / TILE_Q, head = blockIdx.x / tiles, i0 = blockIdx.x % tiles * TILE_Q;
    const int lane = threadIdx.x % 32, down = threadIdx.x / 32 * ROWS * 16;  // the warp's first query in the tile
    const int length = lengths[head / H], end = K;
    const float scale = rsqrtf(D) * 1.4426950408889634f;
    k += (int64)(head / (H / G)) * K * D, v += (int64)(head / (H / G)) * K * D;
    constexpr bool KEPT = D <= 64;  // the queries stay in registers where there is room for them
    uint32 query[KEPT ? D / 16 : 1][ROWS][4];
    float sum[ROWS][D / 8][4] = {}, most[ROWS][2], total[ROWS][2] = {};
    int seen[ROWS][2];
    for (int r = 0; r < ROWS; ++r)
        for (int h = 0; h < 2; ++h)
            most[r][h] = -3e38f, seen[r][h] = visible(i0 + down + 16 * r + lane / 4 + 8 * h, length, Q, K, causal);
    auto fetch = [&](int j0) {
        if (j0 < end) {
            take<TILE_K, D>(tile.k[j0 / TILE_K % 2], k + (int64)j0 * D, K - j0);
            take<TILE_K, D>(tile.v[j0 / TILE_K % 2], v + (int64)j0 * D, K - j0);
        }
    };
    auto load = [&](uint32 (*a)[4], int d) {
        for (int r = 0; r < ROWS; ++r) fragment(a[r], &tile.q[down + 16 * r + lane % 16][d + lane / 16 * 8]);
    };
    auto look = [&](float (*score)[HALF / 8][4], const T (*keys)[D + 8]) {  // score += queries @ keys
#pragma unroll
        for (int d = 0; d < D; d += 16) {
            uint32(*a)[4] = query[KEPT ? d / 16 : 0];
            if (!KEPT) load(a, d);
#pragma unroll
            for (int n = 0; n < HALF / 8; n += 2) {
                uint32 b[4];
                fragment(b, &keys[n * 8 + lane % 8 + lane / 16 * 8][d + lane / 8 % 2 * 8]);
                for (int r = 0; r < ROWS; ++r)
                    multiply<T>(score[r][n], a[r], b), multiply<T>(score[r][n + 1], a[r], b + 2);
            }
        }
    };
    auto hide = [&](float (*score)[HALF / 8][4], int j0) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int n = 0; n < HALF / 8; ++n)
                for (int v = 0; v < 4; ++v)
                    if (j0 + n * 8 + lane % 4 * 2 + v % 2 >= seen[r][v / 2]) score[r][n][v] = -INFINITY;
    };
    auto gather = [&](const float (*score)[HALF / 8][4], const T (*values)[D + 8]) {  // sum += weights @ values
#pragma unroll
        for (int n = 0; n < HALF / 8; n += 2) {
            uint32 a[ROWS][4];
#pragma unroll
            for (int r = 0; r < ROWS; ++r)
#pragma unroll
                for (int p = 0; p < 4; ++p) {
                    const float* two = &score[r][n + p / 2][p % 2 * 2];
                    const float x = power(two[0] * scale - most[r][p % 2]), y = power(two[1] * scale - most[r][p % 2]);
                    total[r][p % 2] += x + y, a[r][p] = pair<T>(x, y);
                }
#pragma unroll
            for (int d = 0; d < D / 8; d += 2) {
                uint32 b[4];
                fragment_turned(b, &values[n * 8 + lane % 16][d * 8 + lane / 16 * 8]);
                for (int r = 0; r < ROWS; ++r) multiply<T>(sum[r][d], a[r], b), multiply<T>(sum[r][d + 1], a[r], b + 2);
            }
        }
    };
    take<TILE_Q, D>(tile.q, q + ((int64)head * Q + i0) * D, Q - i0);
    fetch(0);
    for (int j0 = 0; j0 < end; j0 += TILE_K) {
        asm volatile("cp.async.wait_all;" ::: "memory");
        __syncthreads();  // this tile is there, and every warp has left the one that the next overwrites
        fetch(j0 + TILE_K);
        if (KEPT && j0 == 0)
            for (int d = 0; d < D; d += 16) load(query[KEPT ? d / 16 : 0], d);
        float score[2][ROWS][HALF / 8][4] = {};
        look(score[0], tile.k[j0 / TILE_K % 2]);
#pragma unroll
        for (int part = 0; part < 2; ++part) {
            hide(score[part], j0 + part * HALF);
            raise<D>(score[part], sum, most, total, scale);
            if (part == 0) look(score[1], tile.k[j0 / TILE_K % 2] + HALF);
            gather(score[part], tile.v[j0 / TILE_K % 2] + part * HALF);
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
        for (int h = 0; h < 2; ++h) {
            for (int step = 1; step < 4; step *= 2) total[r][h] += __shfl_xor_sync(~0u, total[r][h], step);
            const int i = i0 + down + 16 * r + lane / 4 + 8 * h;
            const int64 row = (int64)head * Q + i;
            const float inverse = total[r][h] ? 1 / total[r][h] : 0;  // a row that sees no key
            if (i >= Q) continue;
#pragma unroll
            for (int d = 0; d < D / 8; ++d)
                *(uint32*)&out[row * D + d * 8 + lane % 4 * 2] =
                    pair<T>(sum[r][d][2 * h] * inverse, sum[r][d][2 * h + 1] * inverse);
            if (lane % 4 == 0) lse[row] = (most[r][h] + log2f(total[r][h])) * 0.6931471805599453f;
        }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
attention_float16_64(OPERANDS(half)) { attend<half, 64>(PASSED); }
extern "C" __global__ void __launch_bounds__(THREADS, 2)
attention_float16_128(OPERANDS(half)) { attend<half, 128>(PASSED); }
extern "C" __global__ void __launch_bounds__(THREADS, 2)
attention_bfloat16_64(OPERANDS(bfloat)) { attend<bfloat, 64>(PASSED); }
extern "C" __global__ void __launch_bounds__(THREADS, 2)
attention_bfloat16_128(OPERANDS(bfloat)) { attend<bfloat, 128>(PASSED); }
"""
)
PROGRAM = Program(SOURCE, OPTIONS, ARCHS)


def shared(D: int) -> int:
    """Bytes of shared memory: a tile of queries, two of keys and two of values."""
    return (TILE_Q + 4 * TILE_K) * (D + 8) * 2


def attention(q, k, v, lengths, causal):  # (B, H, Q, D), (B, G, K, D) twice, (B,) -> (B, H, Q, D), (B, H, Q)
    q, k, v, lengths, out, lse, *sizes = operands(q, k, v, lengths, causal)
    arguments = (q, k, v, lengths, out, lse, *sizes)
    PROGRAM.launch(name("attention", q), blocks(q, TILE_Q), THREADS, arguments, shared(q.shape[-1]))
    return out, lse
