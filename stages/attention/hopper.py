"""Attention as Hopper wants it: the copy engine feeds shared memory, and two groups of warps take turns.

Idea    While one group of warps multiplies, the other takes exponentials, so that both units are always busy.
Was     Every warp issued its own copies and loaded fragments; mma.sync reaches part of the tensor cores' rate only, and
        products and exponentials met in time by chance.
Change  One thread asks the copy engine (TMA) for tiles. Two groups of four warps take 64 queries each and issue wgmma:
        queries and keys come from shared memory, weights from the registers that the scores were in. Two named barriers
        pass the turn to multiply from group to group, and within a group the next tile's scores are multiplied before
        the last one's weights have found their values (Shah et al., FlashAttention-3, 2024).
Expect  The tensor cores at Hopper's rate, with the exponentials behind them. Larger heads gain more: there are more
        multiplications for each exponential.
"""

from common.cuda import Program, tensor_map
from common.cuda_attention import TYPES, blocks, name, operands, wgmma_products

PREVIOUS = "skip"
CHANGES = (
    "tensor_map",
    "TILE_Q",
    "TILE_K",
    "STAGES",
    "THREADS",
    "OPTIONS",
    "SOURCE",
    "SOURCE.address",
    "SOURCE.start",
    "SOURCE.wait",
    "SOURCE.arrive",
    "SOURCE.expect",
    "SOURCE.fetch",
    "SOURCE.describe",
    "SOURCE.hold",
    "SOURCE.power",
    "SOURCE.pair",
    "SOURCE.weigh",
    "SOURCE.bring",
    "SOURCE.feed",
    "SOURCE.attend",
    "SOURCE.attention_float16_64",
    "SOURCE.attention_float16_128",
    "SOURCE.attention_bfloat16_64",
    "SOURCE.attention_bfloat16_128",
    "shared",
    "attention",
    "FRAGMENTS",
    "WARPS",
    "SOURCE.take",
)
ARCHS = ("sm_90a",)

TILE_Q = 128  # queries a block: 64 for each of two groups of warps
TILE_K = 128  # keys a tile: 64 scores a thread
STAGES = 2  # tiles of keys, and of values, in shared memory: 32 KB each where D is 128
THREADS = 384  # one group of warps copies and two multiply
OPTIONS = (f"-DTILE_Q={TILE_Q}", f"-DTILE_K={TILE_K}", f"-DSTAGES={STAGES}", f"-DTHREADS={THREADS}")

SOURCE = (
    TYPES
    + wgmma_products(TILE_K)
    + r"""
struct alignas(64) TensorMap { char bytes[128]; };
template <int D> struct Tiles {  // in panels of 64 columns, 128 bytes wide: the width of the swizzle
    unsigned short q[TILE_Q / 64][D / 64][64][64], k[STAGES][D / 64][TILE_K][64], v[STAGES][D / 64][TILE_K][64];
};
struct Barriers { uint64 queries, keys[STAGES], values[STAGES], keys_free[STAGES], values_free[STAGES]; };

__device__ unsigned address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }

__device__ void start(uint64* barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(barrier)), "r"(count) : "memory");
}

__device__ void wait(uint64* barrier, int phase) {
    asm volatile("{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;"
                 " @done bra go; bra again; go: }" ::"r"(address(barrier)), "r"(phase) : "memory");
}

__device__ void arrive(uint64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address(barrier)) : "memory");
}

__device__ void expect(uint64* barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(barrier)), "r"(bytes)
                 : "memory");
}

__device__ void fetch(void* to, const TensorMap* map, int column, int row, int matrix, uint64* barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(address(to)), "l"(map), "r"(column), "r"(row), "r"(matrix),
                 "r"(address(barrier)) : "memory");
}

// A matrix in shared memory as wgmma reads it: 128-byte swizzle (1 << 62), 1024 bytes from one eight of rows to the
// next, and `panel` bytes from one panel of 64 columns to the next where the columns are contiguous.
__device__ uint64 describe(const void* p, int panel) {
    return (uint64)1 << 62 | (uint64)(1024 >> 4) << 32 | (uint64)(panel >> 4) << 16 | (address(p) & 0x3FFFF) >> 4;
}

template <int COUNT> __device__ void hold(float* x) {  // nothing that reads x moves up past the wait before this
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(x[i])::"memory");
}

__device__ float power(float x) {  // 2 to the x: one instruction
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

template <typename T> __device__ uint32 pair(float a, float b);  // two numbers rounded, a in the lower half
template <> __device__ uint32 pair<half>(float a, float b) {
    const half2 both = __floats2half2_rn(a, b);
    return *(const uint32*)&both;
}
template <> __device__ uint32 pair<bfloat>(float a, float b) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(a, b);
    return *(const uint32*)&both;
}

// Scores of 64 queries become weights; `keep` is what the sums so far shrink by. Rows: g = lane / 4, and g + 8.
__device__ void weigh(float* score, float* most, float* total, float* keep, float scale) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float higher = most[h];
#pragma unroll
        for (int n = 0; n < TILE_K / 8; ++n)
            higher = fmaxf(higher, fmaxf(score[4 * n + 2 * h], score[4 * n + 2 * h + 1]));
        for (int step = 1; step < 4; step *= 2) higher = fmaxf(higher, __shfl_xor_sync(~0u, higher, step));
        const float from = higher == -INFINITY ? 0 : higher * scale;
        keep[h] = power(most[h] * scale - from), most[h] = higher, total[h] *= keep[h];
#pragma unroll
        for (int n = 0; n < TILE_K / 8; ++n)
            for (int v = 4 * n + 2 * h; v < 4 * n + 2 * h + 2; ++v)
                total[h] += score[v] = power(score[v] * scale - from);
    }
}

// Keys or values of tile t to their slot, once it is free.
template <int D, typename Slot>
__device__ void bring(Slot* to, const TensorMap* from, int t, int head, uint64* full, uint64* free) {
    const int slot = t % STAGES;
    wait(&free[slot], t / STAGES % 2 ^ 1);
    expect(&full[slot], sizeof(to[slot]));  // keys outside the matrix arrive as zeros, and count
    for (int panel = 0; panel < D / 64; ++panel)
        fetch(to[slot][panel], from, panel * 64, t * TILE_K, head, &full[slot]);
}

// What one thread of the copying group does: queries, then keys one tile ahead of values.
template <int D> __device__ void feed(Tiles<D>& tile, Barriers& at, const TensorMap* q, const TensorMap* k,
                                      const TensorMap* v, int head, int shared_head, int i0, int count) {
    expect(&at.queries, sizeof(tile.q));
    for (int half = 0; half < TILE_Q / 64; ++half)
        for (int panel = 0; panel < D / 64; ++panel)
            fetch(tile.q[half][panel], q, panel * 64, i0 + 64 * half, head, &at.queries);
    for (int t = 0; t <= count; ++t) {
        if (t < count) bring<D>(tile.k, k, t, shared_head, at.keys, at.keys_free);
        if (t > 0) bring<D>(tile.v, v, t - 1, shared_head, at.values, at.values_free);
    }
}

template <typename T, int D>
__device__ void attend(const TensorMap* q, const TensorMap* k, const TensorMap* v, const int* lengths, T* out,
                       float* lse, int H, int G, int Q, int K, int causal) {
    extern __shared__ char shared[];
    Tiles<D>& tile = *(Tiles<D>*)(((uint64)shared + 1023) / 1024 * 1024);  // the swizzle repeats every 1024 bytes
    __shared__ Barriers at;
    const int tiles = (Q + TILE_Q - 1) / TILE_Q, head = blockIdx.x / tiles, team = threadIdx.x / 128;
    const int i0 = (tiles - 1 - blockIdx.x % tiles) * TILE_Q;  // a head's last queries see most: they start first
    const int length = lengths[head / H], end = visible(min(i0 + TILE_Q, Q) - 1, length, Q, K, causal);
    const int count = (end + TILE_K - 1) / TILE_K;
    if (threadIdx.x == 0) {
        start(&at.queries, 1);
        for (int i = 0; i < STAGES; ++i)
            start(&at.keys[i], 1), start(&at.values[i], 1), start(&at.keys_free[i], 2), start(&at.values_free[i], 2);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // the copy engine must see the barriers too
    }
    __syncthreads();
    if (team == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");  // registers that the multiplying warps can use
        if (threadIdx.x == 0 && count) feed<D>(tile, at, q, k, v, head, head / (H / G), i0, count);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        const int lane = threadIdx.x % 32, first = i0 + (team - 1) * 64;  // the group's first query
        const int own = first + threadIdx.x / 32 % 4 * 16 + lane / 4;     // this thread's, and the one 8 further
        const int whole = visible(first, length, Q, K, causal);           // keys that every query of the group sees
        const int seen[2] = {visible(own, length, Q, K, causal), visible(own + 8, length, Q, K, causal)};
        const bool leader = threadIdx.x % 128 == 0;
        const float scale = rsqrtf(D) * 1.4426950408889634f;
        float score[TILE_K / 2], sum[D / 2] = {}, most[2] = {-INFINITY, -INFINITY}, total[2] = {}, keep[2];
        uint32 weight[TILE_K / 16][4];
        auto scores = [&](int t) {  // starts them
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
            for (int d = 0; d < D; d += 16)  // 16 d's on: 32 bytes along a row of either
                look<T>(score, describe(tile.q[team - 1][d / 64], 0) + (d % 64 * 2 >> 4),
                        describe(tile.k[t % STAGES][d / 64], 0) + (d % 64 * 2 >> 4), d > 0);
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        };
        auto values = [&](int t) {
            wait(&at.values[t % STAGES], t / STAGES % 2);
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
            const uint64 b = describe(tile.v[t % STAGES], sizeof(tile.v[0][0]));
#pragma unroll
            for (int n = 0; n < TILE_K / 16; ++n) gather<T, D>(sum, weight[n], b + (n * 16 * 128 >> 4), 1);
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        };
        auto scored = [&](int t) {  // the scores are there: free their keys, mask, make weights of them
            hold<TILE_K / 2>(score);
            if (leader) arrive(&at.keys_free[t % STAGES]);
            if ((t + 1) * TILE_K > whole)
#pragma unroll
                for (int i = 0; i < TILE_K / 2; ++i)
                    if (t * TILE_K + i / 4 * 8 + lane % 4 * 2 + i % 2 >= seen[i / 2 % 2]) score[i] = -INFINITY;
            weigh(score, most, total, keep, scale);
        };
        auto rounded = [&] {
#pragma unroll
            for (int i = 0; i < TILE_K / 4; ++i) weight[i / 4][i % 4] = pair<T>(score[2 * i], score[2 * i + 1]);
        };
        if (count) {
            wait(&at.queries, 0);
            wait(&at.keys[0], 0);
            scores(0);
            asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
            scored(0);
            rounded();
            if (team == 2 && count > 1) asm volatile("bar.arrive 1, 256;" ::: "memory");  // the first turn is group 1's
        }
        for (int t = 1; t < count; ++t) {
            wait(&at.keys[t % STAGES], t / STAGES % 2);
            asm volatile("bar.sync %0, 256;" ::"r"(team) : "memory");  // my turn
            scores(t);
            values(t - 1);
            if (team == 1 || t + 1 < count) asm volatile("bar.arrive %0, 256;" ::"r"(3 - team) : "memory");
            asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
            scored(t);
            asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
            hold<D / 2>(sum);
            if (leader) arrive(&at.values_free[(t - 1) % STAGES]);
#pragma unroll
            for (int i = 0; i < D / 2; ++i) sum[i] *= keep[i / 2 % 2];
            rounded();
        }
        if (count) {
            values(count - 1);
            asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
            hold<D / 2>(sum);
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            for (int step = 1; step < 4; step *= 2) total[h] += __shfl_xor_sync(~0u, total[h], step);
            const int64 row = (int64)head * Q + own + 8 * h;
            const float inverse = total[h] ? 1 / total[h] : 0;  // a row that sees no key
            if (own + 8 * h >= Q) continue;
#pragma unroll
            for (int d = 0; d < D / 8; ++d)
                *(uint32*)&out[row * D + d * 8 + lane % 4 * 2] =
                    pair<T>(sum[4 * d + 2 * h] * inverse, sum[4 * d + 2 * h + 1] * inverse);
            if (lane % 4 == 0) lse[row] = most[h] * rsqrtf(D) + logf(total[h]);
        }
    }
}

#define MAPPED(T) const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k, \
    const __grid_constant__ TensorMap v, const int* lengths, T* out, float* lse, int H, int G, int Q, int K, int causal
#define HERE &q, &k, &v, lengths, out, lse, H, G, Q, K, causal
extern "C" __global__ void __launch_bounds__(THREADS, 1)
attention_float16_64(MAPPED(half)) { attend<half, 64>(HERE); }
extern "C" __global__ void __launch_bounds__(THREADS, 1)
attention_float16_128(MAPPED(half)) { attend<half, 128>(HERE); }
extern "C" __global__ void __launch_bounds__(THREADS, 1)
attention_bfloat16_64(MAPPED(bfloat)) { attend<bfloat, 64>(HERE); }
extern "C" __global__ void __launch_bounds__(THREADS, 1)
attention_bfloat16_128(MAPPED(bfloat)) { attend<bfloat, 128>(HERE); }
"""
)
PROGRAM = Program(SOURCE, OPTIONS, ARCHS)


def shared(D: int) -> int:
    """Bytes of shared memory: queries, STAGES tiles of keys and as many of values, with room to align."""
    return (TILE_Q + 2 * STAGES * TILE_K) * D * 2 + 1024


def attention(q, k, v, lengths, causal):  # (B, H, Q, D), (B, G, K, D) twice, (B,) -> (B, H, Q, D), (B, H, Q)
    q, k, v, lengths, out, lse, *sizes = operands(q, k, v, lengths, causal)
    matrices = (a.reshape(-1, *a.shape[2:]) for a in (q, k, v))
    D = q.shape[-1]
    maps = (tensor_map(a, (rows, 64), D) for a, rows in zip(matrices, (64, TILE_K, TILE_K), strict=True))
    PROGRAM.launch(name("attention", q), blocks(q, TILE_Q), THREADS, (*maps, lengths, out, lse, *sizes), shared(D))
    return out, lse
