"""Attention as Hopper wants it: the copy engine feeds shared memory, and groups of warps take turns to multiply.

Idea    While one group of warps multiplies, another takes exponentials, so that both units are always busy.
Was     Every warp issued its own copies and loaded fragments; mma.sync reaches part of the tensor cores' rate only, and
        products and exponentials met in time by chance. At the end of a block its processor had nothing to do until the
        next had fetched its first tiles.
Change  One thread asks the copy engine (TMA) for tiles. Groups of four warps take 64 queries each and issue wgmma:
        queries and keys come from shared memory, weights from the registers that the scores were in. Named barriers
        pass the turn to multiply from group to group, and within a group a tile's scores become weights while those of
        the tile before are multiplied by their values (Shah et al., FlashAttention-3, 2024). A block stays on its
        processor and draws one piece of work after another from a counter, with the next one's tiles on their way.
Expect  The tensor cores at Hopper's rate, with the exponentials behind them. Larger heads gain more: there are more
        multiplications for each exponential.
"""

from common.cuda import Program, processors, tensor_map
from common.cuda_attention import TYPES, blocks, name, operands, wgmma_products

PREVIOUS = "skip"
CHANGES = (
    "processors",
    "tensor_map",
    "wgmma_products",
    "TILE_K",
    "STAGES",
    "GROUPS",
    "OPTIONS",
    "SOURCE",
    "SOURCE.address",
    "SOURCE.start",
    "SOURCE.wait",
    "SOURCE.arrive",
    "SOURCE.expect",
    "SOURCE.fetch",
    "SOURCE.describe",
    "SOURCE.along",
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
    "TILE_Q",
    "WARPS",
    "THREADS",
    "SOURCE.take",
    "SOURCE.raise",
)
ARCHS = ("sm_90a",)

TILE_K = 128  # keys a tile: 64 scores a thread
STAGES = 2  # tiles of keys, and of values, in shared memory: 32 KB each where D is 128
GROUPS = {64: 3, 128: 2}  # head size -> groups of warps that multiply, 64 queries each: as many as registers allow
OPTIONS = (f"-DTILE_K={TILE_K}", f"-DSTAGES={STAGES}", *(f"-DGROUPS_{D}={GROUPS[D]}" for D in GROUPS))

SOURCE = (
    TYPES
    + wgmma_products(TILE_K)
    + r"""
constexpr float SLACK = 8;  // weights may reach 2 to the 8: FP16 ends at 2 to the 16
struct alignas(64) TensorMap { char bytes[128]; };
// Queries of one head, from i0 on, and the `count` tiles of keys that they see. No more work where head is below 0.
struct Work { int head, i0, length, count; };
template <int D, int GROUPS> struct Tiles {  // in panels of 64 columns, 128 bytes wide: the width of the swizzle
    unsigned short q[2][GROUPS][D / 64][64][64], k[STAGES][D / 64][TILE_K][64], v[STAGES][D / 64][TILE_K][64];
};
struct Barriers {
    uint64 queries[2], queries_free[2], keys[STAGES], values[STAGES], keys_free[STAGES], values_free[STAGES];
    Work work[2];
};

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

// What begins d columns into panels of 64: 16 of them are 32 bytes along a row.
template <int ROWS> __device__ uint64 along(const unsigned short (*panels)[ROWS][64], int d) {
    return describe(panels[d / 64], 0) + (d % 64 * 2 >> 4);
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

// Scores of 64 queries become weights, which count from `from`, in base 2. It rises only where a score exceeds it by
// more than SLACK: then true, and `keep` is what the sums so far shrink by. Rows: g = lane / 4, and g + 8.
__device__ bool weigh(float* score, float* from, float* total, float* keep, float scale) {
    float top[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        top[h] = fmaxf(score[2 * h], score[2 * h + 1]);
#pragma unroll
        for (int n = 1; n < TILE_K / 8; ++n)
            top[h] = fmaxf(top[h], fmaxf(score[4 * n + 2 * h], score[4 * n + 2 * h + 1]));
    }
    const bool far = __any_sync(~0u, top[0] * scale > from[0] + SLACK || top[1] * scale > from[1] + SLACK);
    if (far)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            for (int step = 1; step < 4; step *= 2) top[h] = fmaxf(top[h], __shfl_xor_sync(~0u, top[h], step));
            const float higher = fmaxf(from[h], top[h] * scale);
            keep[h] = power(from[h] - higher), from[h] = higher, total[h] *= keep[h];
        }
#pragma unroll
    for (int i = 0; i < TILE_K / 2; ++i) total[i / 2 % 2] += score[i] = power(score[i] * scale - from[i / 2 % 2]);
    return far;
}

// Keys or values from `row` on, the s-th tile since the kernel began, to their slot, once it is free.
template <int D, typename Slot>
__device__ void bring(Slot* to, const TensorMap* from, int s, int row, int head, uint64* full, uint64* free) {
    const int slot = s % STAGES;
    wait(&free[slot], s / STAGES % 2 ^ 1);
    expect(&full[slot], sizeof(to[slot]));  // keys outside the matrix arrive as zeros, and count
#pragma unroll
    for (int panel = 0; panel < D / 64; ++panel)
        fetch(to[slot][panel], from, panel * 64, row, head, &full[slot]);
}

// What one thread of the copying group does: draw work, bring its queries, then keys one tile ahead of values.
template <int D, int GROUPS>
__device__ void feed(Tiles<D, GROUPS>& tile, Barriers& at, const TensorMap* q, const TensorMap* k, const TensorMap* v,
                     const int* lengths, int* next, int B, int H, int G, int Q, int K, int causal) {
    constexpr int TILE_Q = 64 * GROUPS;
    const int tiles = (Q + TILE_Q - 1) / TILE_Q;
    for (int n = 0, s = 0;; ++n) {
        const int item = atomicAdd(next, 1), head = item / tiles, slot = n % 2;
        const int i0 = (tiles - 1 - item % tiles) * TILE_Q;  // a head's last queries see most: they start first
        wait(&at.queries_free[slot], n / 2 % 2 ^ 1);
        if (head >= B * H) {
            at.work[slot].head = -1;
            arrive(&at.queries[slot]);
            break;
        }
        const int length = lengths[head / H], end = visible(min(i0 + TILE_Q, Q) - 1, length, Q, K, causal);
        const int count = (end + TILE_K - 1) / TILE_K, matrix = head / (H / G);
        at.work[slot] = {head, i0, length, count};
        expect(&at.queries[slot], sizeof(tile.q[slot]));
#pragma unroll
        for (int group = 0; group < GROUPS; ++group)
            for (int panel = 0; panel < D / 64; ++panel)
                fetch(tile.q[slot][group][panel], q, panel * 64, i0 + 64 * group, head, &at.queries[slot]);
#pragma unroll 1
        for (int t = 0; t <= count; ++t) {
            if (t < count) bring<D>(tile.k, k, s + t, t * TILE_K, matrix, at.keys, at.keys_free);
            if (t > 0) bring<D>(tile.v, v, s + t - 1, (t - 1) * TILE_K, matrix, at.values, at.values_free);
        }
        s += count;
    }
}

template <typename T, int D, int GROUPS>
__device__ void attend(const TensorMap* q, const TensorMap* k, const TensorMap* v, const int* lengths, int* next,
                       T* out, float* lse, int B, int H, int G, int Q, int K, int causal) {
    extern __shared__ char shared[];
    auto& tile = *(Tiles<D, GROUPS>*)(shared + -address(shared) % 1024);  // the swizzle repeats every 1024 bytes
    __shared__ Barriers at;
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; ++i) start(&at.queries[i], 1), start(&at.queries_free[i], 128 * GROUPS);
        for (int i = 0; i < STAGES; ++i)
            start(&at.keys[i], 1), start(&at.values[i], 1), start(&at.keys_free[i], GROUPS),
                start(&at.values_free[i], GROUPS);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // the copy engine must see the barriers too
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(GROUPS == 2 ? 40 : 32));  // for the multiplying warps
        if (threadIdx.x == 0) feed<D, GROUPS>(tile, at, q, k, v, lengths, next, B, H, G, Q, K, causal);
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(GROUPS == 2 ? 232 : 160));
    const int group = threadIdx.x / 128 - 1, lane = threadIdx.x % 32;
    const bool leader = threadIdx.x % 128 == 0;
    const float scale = rsqrtf(D) * 1.4426950408889634f;
    auto turn = [&] { asm volatile("bar.sync %0, 256;" ::"r"(group + 1) : "memory"); };  // 0 is __syncthreads'
    auto pass = [&] { asm volatile("bar.arrive %0, 256;" ::"r"((group + 1) % GROUPS + 1) : "memory"); };
    if (group == GROUPS - 1) pass();  // the first turn is the first group's
    for (int n = 0, s = 0;; ++n) {
        wait(&at.queries[n % 2], n / 2 % 2);
        const Work work = at.work[n % 2];
        if (work.head < 0) break;
        const int first = work.i0 + group * 64;                        // the group's first query
        const int own = first + threadIdx.x / 32 % 4 * 16 + lane / 4;  // this thread's, and the one 8 further
        const int whole = visible(first, work.length, Q, K, causal);  // keys that every query of the group sees
        const int seen[2] = {visible(own, work.length, Q, K, causal), visible(own + 8, work.length, Q, K, causal)};
        float score[TILE_K / 2], sum[D / 2], from[2] = {-3e38f, -3e38f}, total[2] = {}, keep[2];
        uint32 weight[TILE_K / 16][4];
        auto scores = [&](int t) {  // starts them
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
            for (int d = 0; d < D; d += 16)
                (d ? look<T, TILE_K> : begin<T, TILE_K>)(score, along(tile.q[n % 2][group], d),
                                                         along(tile.k[(s + t) % STAGES], d));
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        };
        auto values = [&](int t) {
            const int slot = (s + t) % STAGES;
            wait(&at.values[slot], (s + t) / STAGES % 2);
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
            const uint64 b = describe(tile.v[slot], sizeof(tile.v[0][0]));
#pragma unroll
            for (int i = 0; i < TILE_K / 16; ++i) gather<T, D>(sum, weight[i], b + (i * 16 * 128 >> 4), i > 0 || t > 0);
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        };
        auto scored = [&](int t) {  // the scores are there: free their keys, mask, make weights of them
            hold<TILE_K / 2>(score);
            if (leader) arrive(&at.keys_free[(s + t) % STAGES]);
            if (t == work.count - 1) arrive(&at.queries_free[n % 2]);
            if ((t + 1) * TILE_K > whole)
#pragma unroll
                for (int i = 0; i < TILE_K / 2; ++i)
                    if (t * TILE_K + i / 4 * 8 + lane % 4 * 2 + i % 2 >= seen[i / 2 % 2]) score[i] = -INFINITY;
            return weigh(score, from, total, keep, scale);
        };
        auto rounded = [&] {
#pragma unroll
            for (int i = 0; i < TILE_K / 4; ++i) weight[i / 4][i % 4] = pair<T>(score[2 * i], score[2 * i + 1]);
        };
        if (work.count) {
            wait(&at.keys[s % STAGES], s / STAGES % 2);
            turn();
            scores(0);
            pass();
            asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
            scored(0);
            rounded();
        } else arrive(&at.queries_free[n % 2]);
        for (int t = 1; t < work.count; ++t) {
            wait(&at.keys[(s + t) % STAGES], (s + t) / STAGES % 2);
            turn();
            scores(t);
            values(t - 1);
            pass();
            asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
            const bool far = scored(t);
            asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
            hold<D / 2>(sum);
            if (leader) arrive(&at.values_free[(s + t - 1) % STAGES]);
            if (far)
#pragma unroll
                for (int i = 0; i < D / 2; ++i) sum[i] *= keep[i / 2 % 2];
            rounded();
        }
        if (work.count) {
            values(work.count - 1);
            asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
            hold<D / 2>(sum);
            if (leader) arrive(&at.values_free[(s + work.count - 1) % STAGES]);
        } else {
#pragma unroll
            for (int i = 0; i < D / 2; ++i) sum[i] = 0;
        }
        s += work.count;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            for (int step = 1; step < 4; step *= 2) total[h] += __shfl_xor_sync(~0u, total[h], step);
            const int64 row = (int64)work.head * Q + own + 8 * h;
            const float inverse = total[h] ? 1 / total[h] : 0;  // a row that sees no key
            if (own + 8 * h >= Q) continue;
#pragma unroll
            for (int d = 0; d < D / 8; ++d)
                *(uint32*)&out[row * D + d * 8 + lane % 4 * 2] =
                    pair<T>(sum[4 * d + 2 * h] * inverse, sum[4 * d + 2 * h + 1] * inverse);
            if (lane % 4 == 0) lse[row] = (from[h] + log2f(total[h])) * 0.6931471805599453f;
        }
    }
    if (group == 0) turn();  // which nobody needs any more
}

#define MAPPED(T) const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k, \
    const __grid_constant__ TensorMap v, const int* lengths, int* next, T* out, float* lse, int B, int H, int G, \
    int Q, int K, int causal
#define HERE &q, &k, &v, lengths, next, out, lse, B, H, G, Q, K, causal
extern "C" __global__ void __launch_bounds__(128 + 128 * GROUPS_64, 1)
attention_float16_64(MAPPED(half)) { attend<half, 64, GROUPS_64>(HERE); }
extern "C" __global__ void __launch_bounds__(128 + 128 * GROUPS_128, 1)
attention_float16_128(MAPPED(half)) { attend<half, 128, GROUPS_128>(HERE); }
extern "C" __global__ void __launch_bounds__(128 + 128 * GROUPS_64, 1)
attention_bfloat16_64(MAPPED(bfloat)) { attend<bfloat, 64, GROUPS_64>(HERE); }
extern "C" __global__ void __launch_bounds__(128 + 128 * GROUPS_128, 1)
attention_bfloat16_128(MAPPED(bfloat)) { attend<bfloat, 128, GROUPS_128>(HERE); }
"""
)
PROGRAM = Program(SOURCE, OPTIONS, ARCHS)


def shared(D: int) -> int:
    """Bytes of shared memory: queries twice, STAGES tiles of keys and as many of values, with room to align."""
    return (2 * 64 * GROUPS[D] + 2 * STAGES * TILE_K) * D * 2 + 1024


def attention(q, k, v, lengths, causal):  # (B, H, Q, D), (B, G, K, D) twice, (B,) -> (B, H, Q, D), (B, H, Q)
    import cupy
    import numpy

    q, k, v, lengths, out, lse, *sizes = operands(q, k, v, lengths, causal)
    matrices = (a.reshape(-1, *a.shape[2:]) for a in (q, k, v))
    D = q.shape[-1]
    maps = (tensor_map(a, (rows, 64), D) for a, rows in zip(matrices, (64, TILE_K, TILE_K), strict=True))
    arguments = (*maps, lengths, cupy.zeros(1, "int32"), out, lse, numpy.int32(len(q)), *sizes)
    count, threads = min(processors(), blocks(q, 64 * GROUPS[D])), 128 + 128 * GROUPS[D]
    PROGRAM.launch(name("attention", q), count, threads, arguments, shared(D))
    return out, lse
