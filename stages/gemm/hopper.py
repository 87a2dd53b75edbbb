"""Matrix multiplication as Hopper wants it: the copy engine feeds shared memory, four warps multiply straight from it.

Idea    Take the warps out of the data's way: neither copies nor fragments pass through registers.
Was     Every warp issued copies, loaded fragments with ldmatrix and waited at the block's barrier for every tile.
Change  One thread asks the copy engine (TMA) for whole tiles; barriers in shared memory count the bytes. Two groups of
        four warps issue wgmma, which reads both operands from shared memory, 64 x 256 outputs at a time, and hand
        their outputs to the copy engine too. A block stays on its processor and takes tile after tile, so that
        copies in and out run under the multiplication.
Expect  mma.sync reaches only part of Hopper's tensor rate and wgmma the whole: the largest step left. What remains
        is power, since a chip with every tensor core busy lowers its clock.
"""

from common.cuda import Program, operands, processors, tensor_map, trim

PREVIOUS = "tensor_core"
CHANGES = (
    "TILE_M",
    "TILE_K",
    "STAGES",
    "GROUP",
    "THREADS",
    "SHARED",
    "OPTIONS",
    "SOURCE",
    "SOURCE.address",
    "SOURCE.wait",
    "SOURCE.arrive",
    "SOURCE.expect",
    "SOURCE.fetch",
    "SOURCE.send",
    "SOURCE.keep",
    "SOURCE.describe",
    "SOURCE.multiply",
    "SOURCE.matmul",
    "matmul",
    "SOURCE.copy",
    "SOURCE.fragment",
    "SOURCE.fragment_turned",
)
ARCHS = ("sm_90a",)

TILE_M = 128  # outputs a block: 64 x 256 for each of two groups of warps, 128 sums a thread
TILE_N = 256
TILE_K = 64  # k's a tile: 128 bytes, the width of the swizzle
STAGES = 3  # tiles in the ring: 48 KB each, and 64 KB hold the outputs on their way out
GROUP = 16  # rows of tiles that consecutive blocks walk down together
THREADS = 384  # one group of warps copies and two multiply
SHARED = STAGES * (TILE_M + TILE_N) * TILE_K * 2 + TILE_M * TILE_N * 2 + 1024  # bytes, with room to align
OPTIONS = (f"-DTILE_M={TILE_M}", f"-DTILE_N={TILE_N}", f"-DTILE_K={TILE_K}",
           f"-DSTAGES={STAGES}", f"-DGROUP={GROUP}", f"-DTHREADS={THREADS}")  # fmt: skip

SOURCE = r"""
#include <cuda_fp16.h>
typedef long long int64;
typedef unsigned long long uint64;
struct alignas(64) TensorMap { char bytes[128]; };
struct Stage { half x[TILE_M][TILE_K], w[TILE_N / 64][TILE_K][64]; };  // w in panels of 64 columns, 128 bytes wide

__device__ unsigned address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }

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

__device__ void fetch(void* to, const TensorMap* map, int column, int row, uint64* barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%2, %3}], [%4];" ::"r"(address(to)), "l"(map), "r"(column), "r"(row),
                 "r"(address(barrier)) : "memory");
}

__device__ void send(const TensorMap* map, int column, int row, const void* from) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map),
                 "r"(column), "r"(row), "r"(address(from)) : "memory");
}

__device__ void keep(void* to, const float* sum) {  // four 8 x 8 matrices; lane l names row l % 8 of matrix l / 8
    half2 pair[4];
    for (int i = 0; i < 4; ++i) pair[i] = __floats2half2_rn(sum[2 * i], sum[2 * i + 1]);
    const unsigned* bits = (const unsigned*)pair;
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address(to)), "r"(bits[0]),
                 "r"(bits[1]), "r"(bits[2]), "r"(bits[3]) : "memory");
}

// A matrix in shared memory as wgmma reads it: 128-byte swizzle (1 << 62), 1024 bytes from one eight of rows to the
// next, and `panel` bytes from one panel of 64 columns to the next where the columns are contiguous.
__device__ uint64 describe(const void* p, int panel) {
    return (uint64)1 << 62 | (uint64)(1024 >> 4) << 32 | (uint64)(panel >> 4) << 16 | (address(p) & 0x3FFFF) >> 4;
}

#define F4(i) "+f"(sum[i]), "+f"(sum[i + 1]), "+f"(sum[i + 2]), "+f"(sum[i + 3])
#define F16(i) F4(i), F4(i + 4), F4(i + 8), F4(i + 12)
__device__ void multiply(float* sum, uint64 x, uint64 w, int add) {  // (64, 16), (16, 256) -> (64, 256)
    asm volatile("{ .reg .pred add; setp.ne.b32 add, %130, 0;"
                 " wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {@SUMS@}, %128, %129, add, 1, 1, 0, 1; }"
                 : F16(0), F16(16), F16(32), F16(48), F16(64), F16(80), F16(96), F16(112)
                 : "l"(x), "l"(w), "r"(add));
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
matmul(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, const __grid_constant__ TensorMap out,
       int M, int N, int K) {  // (M, K), (K, N) -> (M, N)
    extern __shared__ char shared[];
    Stage* ring = (Stage*)(((uint64)shared + 1023) / 1024 * 1024);  // the swizzle repeats every 1024 bytes
    __shared__ uint64 full[STAGES], empty[STAGES];
    const int tiles_m = (M + TILE_M - 1) / TILE_M, tiles_n = (N + TILE_N - 1) / TILE_N;
    const int steps = (K + TILE_K - 1) / TILE_K, team = threadIdx.x / 128;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address(&full[i])) : "memory");
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 2;" ::"r"(address(&empty[i])) : "memory");
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // the copy engine must see the barriers too
    }
    __syncthreads();

    int slot = 0, phase = 0;
    auto next = [&] { if (++slot == STAGES) slot = 0, phase ^= 1; };
    auto place = [&](int tile, int& row0, int& column0) {
        const int group = tile / (GROUP * tiles_n), within = tile % (GROUP * tiles_n);
        const int height = min(GROUP, tiles_m - group * GROUP);
        row0 = (group * GROUP + within % height) * TILE_M, column0 = within / height * TILE_N;
    };
    int row0, column0;
    if (team == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");  // registers that the multiplying warps can use
        if (threadIdx.x == 0)
            for (int tile = blockIdx.x; tile < tiles_m * tiles_n; tile += gridDim.x) {
                place(tile, row0, column0);
                for (int step = 0; step < steps; ++step, next()) {
                    wait(&empty[slot], phase ^ 1);
                    expect(&full[slot], sizeof(Stage));  // parts outside the matrix arrive as zeros, and count
                    fetch(ring[slot].x, &x, step * TILE_K, row0, &full[slot]);
                    for (int panel = 0; panel < TILE_N / 64; ++panel)
                        fetch(ring[slot].w[panel], &w, column0 + panel * 64, step * TILE_K, &full[slot]);
                }
            }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        float sum[TILE_N / 2];
        half (*outputs)[64][64] = (half (*)[64][64])(ring + STAGES) + (team - 1) * (TILE_N / 64);  // panels, as w's
        const int lane = threadIdx.x % 32, own = threadIdx.x / 32 % 4 * 16 + lane % 16;  // the row this lane names
        const bool leader = threadIdx.x % 128 == 0;
        for (int tile = blockIdx.x; tile < tiles_m * tiles_n; tile += gridDim.x) {
            place(tile, row0, column0);
            for (int step = 0; step < steps; ++step, next()) {
                wait(&full[slot], phase);
                asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
                const uint64 a = describe(ring[slot].x[(team - 1) * 64], 0);
                const uint64 b = describe(ring[slot].w, sizeof(ring[slot].w[0]));
                for (int k = 0; k < TILE_K; k += 16)  // 16 k's on: 32 bytes along a row of x, 16 rows of w
                    multiply(sum, a + (k * 2 >> 4), b + (k * 128 >> 4), step + k > 0);
                asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
                asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");  // the step before is done: free it
                if (step > 0 && leader) arrive(&empty[(slot + STAGES - 1) % STAGES]);
            }
            asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
            if (leader) arrive(&empty[(slot + STAGES - 1) % STAGES]);

            if (leader) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");  // the last outputs have left
            asm volatile("bar.sync %0, 128;" ::"r"(team) : "memory");
            for (int i = 0; i < TILE_N / 8; i += 2) {
                const int eight = i % 8 + lane / 16;  // which 16 bytes of the row, before the swizzle
                keep(&outputs[i / 8][own][(eight ^ own % 8) * 8], sum + 4 * i);
            }
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            asm volatile("bar.sync %0, 128;" ::"r"(team) : "memory");
            if (leader) {
                for (int i = 0; i < TILE_N / 64; ++i) send(&out, column0 + i * 64, row0 + (team - 1) * 64, outputs[i]);
                asm volatile("cp.async.bulk.commit_group;" ::: "memory");
            }
        }
        if (leader) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }
}
""".replace("@SUMS@", ", ".join(f"%{i}" for i in range(TILE_N // 2)))
PROGRAM = Program(SOURCE, OPTIONS, ARCHS)


def matmul(x, w):  # (M, K), (K, N) -> (M, N)
    columns = w.shape[1]
    x, w, out, m, n, k = operands(x, w, "float16", multiple=8)
    maps = tensor_map(x, (TILE_M, TILE_K), k), tensor_map(w, (TILE_K, 64), n), tensor_map(out, (64, 64), n)
    blocks = min(processors(), -(-m // TILE_M) * -(-n // TILE_N))
    PROGRAM.launch("matmul", blocks, THREADS, (*maps, m, n, k), SHARED)
    return trim(out, columns)
