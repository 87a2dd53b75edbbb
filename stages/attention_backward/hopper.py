"""The backward pass as Hopper wants it: the copy engine feeds shared memory, groups of warps issue wgmma.

Idea    As in the forward pass: copies by the copy engine, products by wgmma, and the one that needs no exponential
        under way while those are taken.
Was     Every warp issued its own copies, waited for them, and loaded fragments for mma.sync, which reaches part of the
        tensor cores' rate only.
Change  A block keeps two matrices for each group of four warps, keys and values or queries and dout, and walks over
        tiles of the other two, which one warp asks the copy engine (TMA) for. Scores and the weights' gradients are
        products of two matrices in shared memory; what is made of them goes from registers into the sums. A second warp
        stores the two numbers of each query beside its tile: since these are plain stores and loads, every lane that
        stored and every thread that loaded reports to the tile's barrier for itself.
Expect  The tensor cores at Hopper's rate. There is more arithmetic for each exponential than in the forward pass, so
        products take most of the time at both head sizes.
"""

from common.cuda import Program, tensor_map
from common.cuda_attention import GIVEN, TYPES, blocks, given, name, wgmma_products

PREVIOUS = "skip"
CHANGES = (
    "tensor_map",
    "wgmma_products",
    "GROUPS",
    "STAGES",
    "TILE_Q",
    "TILE_K",
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
    "SOURCE.along",
    "SOURCE.hold",
    "SOURCE.power",
    "SOURCE.pair",
    "SOURCE.feed",
    "SOURCE.tell",
    "SOURCE.open",
    "SOURCE.both",
    "SOURCE.onward",
    "SOURCE.write",
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
    "FRAGMENTS",
    "TILE",
    "SOURCE.copy_word",
    "SOURCE.take",
    "SOURCE.across",
)
ARCHS = ("sm_90a",)

GROUPS = 2  # groups of four warps that multiply, each for 64 rows of the gradient
STAGES = 3  # pairs of tiles in shared memory
TILE_Q = 64  # queries a tile, for the gradients of keys and values
TILE_K = {64: 128, 128: 64}  # head size -> keys a tile, for the gradients of queries: 16 KB
THREADS = 128 + 128 * GROUPS  # one group of warps copies
OPTIONS = (
    *(f"-DGROUPS={GROUPS}", f"-DSTAGES={STAGES}", f"-DTHREADS={THREADS}", f"-DTILE_Q={TILE_Q}"),
    *(f"-DTILE_K_{D}={TILE_K[D]}" for D in TILE_K),
)

SOURCE = (
    TYPES
    + GIVEN
    + wgmma_products(TILE_Q, *TILE_K.values())
    + r"""
constexpr int ROWS = 64 * GROUPS;  // of the gradient a block
struct alignas(64) TensorMap { char bytes[128]; };
template <int D, int N> struct Tiles {  // in panels of 64 columns, 128 bytes wide: the width of the swizzle
    unsigned short kept[2][GROUPS][D / 64][64][64], walked[STAGES][2][D / 64][N][64];
    float lse[STAGES][N], delta[STAGES][N];
};
struct Barriers { uint64 kept, full[STAGES], free[STAGES]; };

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

// What begins d columns into panels of 64: 16 d's are 32 bytes along a row.
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

struct Maps { const TensorMap *kept[2], *walked[2]; };

// What a block walks over: tiles from row `begin` to `end` of each of `heads` matrices, the first of them `head`.
struct Walk { int head, heads, begin, end; };

// What one thread does: the two matrices that the block keeps, from `row` of `matrix`, then tile after tile.
template <int D, int N> __device__ void feed(Tiles<D, N>& tile, Barriers& at, const Maps& maps,
                                             int matrix, int row, Walk walk) {
    expect(&at.kept, sizeof(tile.kept));
#pragma unroll
    for (int which = 0; which < 2; ++which)
        for (int group = 0; group < GROUPS; ++group)
            for (int panel = 0; panel < D / 64; ++panel)
                fetch(tile.kept[which][group][panel], maps.kept[which], panel * 64, row + 64 * group, matrix, &at.kept);
    for (int t = 0, head = walk.head; head < walk.head + walk.heads; ++head)
#pragma unroll 1
        for (int i0 = walk.begin; i0 < walk.end; i0 += N, ++t) {
            const int slot = t % STAGES;
            wait(&at.free[slot], t / STAGES % 2 ^ 1);
            expect(&at.full[slot], sizeof(tile.walked[slot]));  // rows outside the matrix arrive as zeros, and count
#pragma unroll
            for (int which = 0; which < 2; ++which)
                for (int panel = 0; panel < D / 64; ++panel)
                    fetch(tile.walked[slot][which][panel], maps.walked[which], panel * 64, i0, head, &at.full[slot]);
        }
}

// What one warp does where queries are walked over: their log-sum-exp, in base 2, and the term that their scores share.
template <int D, int N> __device__ void tell(Tiles<D, N>& tile, Barriers& at, const float* lse, const float* delta,
                                             int Q, Walk walk) {
    for (int t = 0, head = walk.head; head < walk.head + walk.heads; ++head)
#pragma unroll 1
        for (int i0 = walk.begin; i0 < walk.end; i0 += N, ++t) {
            const int slot = t % STAGES;
            wait(&at.free[slot], t / STAGES % 2 ^ 1);
#pragma unroll 1
            for (int i = threadIdx.x % 32; i < N; i += 32) {
                const unsigned row = (unsigned)head * Q + i0 + i;  // 32 bits: this warp has 24 registers
                const float sum = i0 + i < Q ? lse[row] : -INFINITY;
                tile.lse[slot][i] = sum == -INFINITY ? INFINITY : sum * 1.4426950408889634f;  // all weights are 0 then
                tile.delta[slot][i] = i0 + i < Q ? delta[row] : 0;
            }
            arrive(&at.full[slot]);  // every lane, which answers for its own stores only
        }
}

__device__ void open(Barriers& at, int sources) {
    if (threadIdx.x == 0) {
        start(&at.kept, 1);
        for (int i = 0; i < STAGES; ++i) start(&at.full[i], sources), start(&at.free[i], 128 * GROUPS);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // the copy engine must see the barriers too
    }
    __syncthreads();
}

#define FENCE asm volatile("wgmma.fence.sync.aligned;" ::: "memory")
#define COMMIT asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory")
#define WAIT(COUNT) asm volatile("wgmma.wait_group.sync.aligned " #COUNT ";" ::: "memory")

// Starts both products of what a group keeps and a tile: scores, and the gradients of their weights.
template <typename T, int D, int N>
__device__ void both(Tiles<D, N>& tile, Barriers& at, int t, int group, float* score, float* change) {
    const int slot = t % STAGES;
    wait(&at.full[slot], t / STAGES % 2);
    FENCE;
#pragma unroll
    for (int which = 0; which < 2; ++which) {
#pragma unroll
        for (int d = 0; d < D; d += 16)
            (d ? look<T, N> : begin<T, N>)(which ? change : score, along(tile.kept[which][group], d),
                                           along(tile.walked[slot][which], d));
        COMMIT;
    }
}

// Starts sum += (64, N) @ the tile (N, D): of numbers in registers, rounded.
template <typename T, int D, int N>
__device__ void onward(const unsigned short (*tile)[N][64], const float* x, float* sum, uint32 (*left)[4], int add) {
#pragma unroll
    for (int i = 0; i < N / 4; ++i) left[i / 4][i % 4] = pair<T>(x[2 * i], x[2 * i + 1]);
    FENCE;
#pragma unroll
    for (int n = 0; n < N / 16; ++n)
        gather<T, D>(sum, left[n], describe(tile, sizeof(*tile)) + (n * 16 * 128 >> 4), n > 0 || add);
    COMMIT;
}

template <typename T, int D> __device__ void write(T* to, const float* sum, int rows, float scale) {
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4;
#pragma unroll
    for (int h = 0; h < 2; ++h)
        if (row + 8 * h < rows)
#pragma unroll
            for (int d = 0; d < D / 8; ++d)
                *(uint32*)&to[(row + 8 * h) * D + d * 8 + lane % 4 * 2] =
                    pair<T>(sum[4 * d + 2 * h] * scale, sum[4 * d + 2 * h + 1] * scale);
}

template <typename T, int D, int N> __device__ void of_keys(const Maps& maps, const float* lse,
        const float* delta, const int* lengths, int H, int G, int Q, int K, int causal, T* dk, T* dv) {
    extern __shared__ char shared[];
    Tiles<D, N>& tile = *(Tiles<D, N>*)(shared + -address(shared) % 1024);  // the swizzle repeats every 1024 bytes
    __shared__ Barriers at;
    const int tiles = (K + ROWS - 1) / ROWS, matrix = blockIdx.x / tiles, j0 = blockIdx.x % tiles * ROWS;
    const int length = lengths[matrix / G], first = causal ? max(j0 + Q - K, 0) : 0;  // the first query to see a key
    const Walk walk = {matrix * (H / G), H / G, j0 < length ? first / N * N : Q, Q};
    const int count = (Q - walk.begin + N - 1) / N * walk.heads;
    open(at, 33);  // the copy engine, and a warp's lanes
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");  // registers that the multiplying warps can use
        if (threadIdx.x / 32 == 1) tell<D, N>(tile, at, lse, delta, Q, walk);
        else if (threadIdx.x == 0 && count) feed<D, N>(tile, at, maps, matrix, j0, walk);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        const int group = threadIdx.x / 128 - 1, lane = threadIdx.x % 32;
        const int last = j0 + 64 * group + 63;  // the group's last key
        const float scale = rsqrtf(D) * 1.4426950408889634f;
        const int whole = last < length ? causal ? last + Q - K : 0 : Q;  // from this query on all see all of its keys
        int from[2];  // the first query that sees this thread's key, and the one 8 further
        for (int h = 0; h < 2; ++h) {
            const int j = last - 63 + threadIdx.x / 32 % 4 * 16 + lane / 4 + 8 * h;
            from[h] = j < length ? causal ? j + Q - K : 0 : Q;
        }
        float score[N / 2], change[N / 2], key_sum[D / 2], value_sum[D / 2];
        uint32 weights[N / 16][4], changes[N / 16][4];
        if (count) wait(&at.kept, 0);
        for (int t = 0, i0 = walk.begin; t < count; ++t, i0 = i0 + N < Q ? i0 + N : walk.begin) {
            const int slot = t % STAGES;
            both<T>(tile, at, t, group, score, change);
            WAIT(1);
            hold<N / 2>(score);
            if (t) arrive(&at.free[(t - 1) % STAGES]);  // its sums were there before these scores
#pragma unroll
            for (int i = 0; i < N / 2; i += 4) {
                const float2 less = *(const float2*)&tile.lse[slot][i / 4 * 8 + lane % 4 * 2];
#pragma unroll
                for (int e = 0; e < 4; ++e) score[i + e] = power(score[i + e] * scale - (e % 2 ? less.y : less.x));
            }
            if (i0 < whole)
#pragma unroll
                for (int i = 0; i < N / 2; ++i)
                    if (i0 + i / 4 * 8 + lane % 4 * 2 + i % 2 < from[i / 2 % 2]) score[i] = 0;
            onward<T, D, N>(tile.walked[slot][1], score, value_sum, weights, t);
            if (D > 64) WAIT(0);  // where registers are few, the rounded weights must not outlive their product
            else WAIT(1);
            hold<N / 2>(change);
#pragma unroll
            for (int i = 0; i < N / 2; i += 4) {
                const float2 less = *(const float2*)&tile.delta[slot][i / 4 * 8 + lane % 4 * 2];
#pragma unroll
                for (int e = 0; e < 4; ++e) change[i + e] = score[i + e] * (change[i + e] - (e % 2 ? less.y : less.x));
            }
            onward<T, D, N>(tile.walked[slot][0], change, key_sum, changes, t);
        }
        WAIT(0);
        hold<D / 2>(key_sum), hold<D / 2>(value_sum);
        if (!count)
#pragma unroll
            for (int i = 0; i < D / 2; ++i) key_sum[i] = value_sum[i] = 0;
        const int64 row = (int64)matrix * K + last - 63;
        write<T, D>(dk + row * D, key_sum, K + 63 - last, rsqrtf(D));
        write<T, D>(dv + row * D, value_sum, K + 63 - last, 1);
    }
}

template <typename T, int D, int N> __device__ void of_queries(const Maps& maps, const float* lse,
        const float* delta, const int* lengths, int H, int G, int Q, int K, int causal, T* dq) {
    extern __shared__ char shared[];
    Tiles<D, N>& tile = *(Tiles<D, N>*)(shared + -address(shared) % 1024);
    __shared__ Barriers at;
    const int tiles = (Q + ROWS - 1) / ROWS, head = blockIdx.x / tiles;
    const int i0 = (tiles - 1 - blockIdx.x % tiles) * ROWS;  // a head's last queries see most: they start first
    const int length = lengths[head / H], end = visible(min(i0 + ROWS, Q) - 1, length, Q, K, causal);
    const int count = (end + N - 1) / N;
    open(at, 1);
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x == 0 && count) feed<D, N>(tile, at, maps, head, i0, {head / (H / G), 1, 0, end});
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        const int group = threadIdx.x / 128 - 1, lane = threadIdx.x % 32;
        const int first = i0 + 64 * group;  // the group's first query
        const float scale = rsqrtf(D) * 1.4426950408889634f;
        const int whole = visible(first, length, Q, K, causal);  // keys that every query of the group sees
        const int64 row = (int64)head * Q + first;
        float score[N / 2], change[N / 2], sum[D / 2], less[2], term[2];
        uint32 changes[N / 16][4];
        int seen[2];
        for (int h = 0; h < 2; ++h) {
            const int i = threadIdx.x / 32 % 4 * 16 + lane / 4 + 8 * h;
            const bool inside = first + i < Q;
            seen[h] = visible(first + i, length, Q, K, causal);
            const float log = inside ? lse[row + i] : -INFINITY;
            less[h] = log == -INFINITY ? INFINITY : log * 1.4426950408889634f, term[h] = inside ? delta[row + i] : 0;
        }
        if (count) wait(&at.kept, 0);
        for (int t = 0; t < count; ++t) {
            const int slot = t % STAGES;
            both<T>(tile, at, t, group, score, change);
            WAIT(1);
            hold<N / 2>(score);
            if (t) arrive(&at.free[(t - 1) % STAGES]);
#pragma unroll
            for (int i = 0; i < N / 2; ++i) score[i] = power(score[i] * scale - less[i / 2 % 2]);
            if ((t + 1) * N > whole)
#pragma unroll
                for (int i = 0; i < N / 2; ++i)
                    if (t * N + i / 4 * 8 + lane % 4 * 2 + i % 2 >= seen[i / 2 % 2]) score[i] = 0;
            WAIT(0);
            hold<N / 2>(change);
#pragma unroll
            for (int i = 0; i < N / 2; ++i) change[i] = score[i] * (change[i] - term[i / 2 % 2]);
            onward<T, D, N>(tile.walked[slot][0], change, sum, changes, t);
        }
        WAIT(0);
        hold<D / 2>(sum);
        if (!count)
#pragma unroll
            for (int i = 0; i < D / 2; ++i) sum[i] = 0;
        write<T, D>(dq + row * D, sum, Q - first, rsqrtf(D));
    }
}

// The maps: of the two matrices that a block keeps, and of the two that it walks over.
#define MAPPED const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, \
    const __grid_constant__ TensorMap c, const __grid_constant__ TensorMap d, const float* lse, const float* delta, \
    const int* lengths, int H, int G, int Q, int K, int causal
#define HERE {{&a, &b}, {&c, &d}}, lse, delta, lengths, H, G, Q, K, causal
extern "C" __global__ void __launch_bounds__(THREADS, 1)
of_keys_float16_64(MAPPED, half* dk, half* dv) { of_keys<half, 64, TILE_Q>(HERE, dk, dv); }
extern "C" __global__ void __launch_bounds__(THREADS, 1)
of_keys_float16_128(MAPPED, half* dk, half* dv) { of_keys<half, 128, TILE_Q>(HERE, dk, dv); }
extern "C" __global__ void __launch_bounds__(THREADS, 1)
of_keys_bfloat16_64(MAPPED, bfloat* dk, bfloat* dv) { of_keys<bfloat, 64, TILE_Q>(HERE, dk, dv); }
extern "C" __global__ void __launch_bounds__(THREADS, 1)
of_keys_bfloat16_128(MAPPED, bfloat* dk, bfloat* dv) { of_keys<bfloat, 128, TILE_Q>(HERE, dk, dv); }
extern "C" __global__ void __launch_bounds__(THREADS, 1)
of_queries_float16_64(MAPPED, half* dq) { of_queries<half, 64, TILE_K_64>(HERE, dq); }
extern "C" __global__ void __launch_bounds__(THREADS, 1)
of_queries_float16_128(MAPPED, half* dq) { of_queries<half, 128, TILE_K_128>(HERE, dq); }
extern "C" __global__ void __launch_bounds__(THREADS, 1)
of_queries_bfloat16_64(MAPPED, bfloat* dq) { of_queries<bfloat, 64, TILE_K_64>(HERE, dq); }
extern "C" __global__ void __launch_bounds__(THREADS, 1)
of_queries_bfloat16_128(MAPPED, bfloat* dq) { of_queries<bfloat, 128, TILE_K_128>(HERE, dq); }
"""
)
PROGRAM = Program(SOURCE, OPTIONS, ARCHS)


def shared(D: int, walked: int) -> int:
    """Bytes of shared memory: what a block keeps, STAGES pairs of tiles, two numbers a query, with room to align."""
    return (2 * 64 * GROUPS + 2 * STAGES * walked) * D * 2 + 8 * STAGES * walked + 1024


def backward(q, k, v, out, lse, dout, lengths, causal):  # as attention, and out, lse, dout -> dq, dk, dv
    import cupy

    q, k, v, dout, lse, delta, lengths, *sizes = given(PROGRAM, q, k, v, out, lse, dout, lengths, causal)
    dq, dk, dv = map(cupy.empty_like, (q, k, v))
    D = q.shape[3]

    def maps(matrices, rows):  # for the copy engine: tiles of so many rows
        return [tensor_map(a.reshape(-1, *a.shape[2:]), (rows, 64), D) for a in matrices]

    rest = (lse, delta, lengths, *sizes)
    arguments = (*maps((k, v), 64), *maps((q, dout), TILE_Q), *rest, dk, dv)
    PROGRAM.launch(name("of_keys", q), blocks(k, 64 * GROUPS), THREADS, arguments, shared(D, TILE_Q))
    arguments = (*maps((q, dout), 64), *maps((k, v), TILE_K[D]), *rest, dq)  # made while the first kernel runs
    PROGRAM.launch(name("of_queries", q), blocks(q, 64 * GROUPS), THREADS, arguments, shared(D, TILE_K[D]))
    return dq, dk, dv
