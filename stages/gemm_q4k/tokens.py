"""A Q4_K matmul whose unpacked weights serve several tokens, and whose activations serve several rows.

Idea    Decode a weight once for a tile of tokens; load an activation once for a tile of rows.
Was     Each token decoded all weights again: with 64 tokens, 64 times. Each row loaded all activations again.
Change  A warp takes ROWS rows and TOKENS tokens: a lane turns four weights of each row into floats in registers, and
        multiplies them with each token's four activations.
Expect  Loads a multiply-add fall by ROWS and decoding by TOKENS, so many tokens gain both. A single token gains
        nothing and has fewer warps to ask for bytes.
"""

import numpy

from common.cuda import Program
from common.cuda_blocks import Q4_K

PREVIOUS = "coalesced"
CHANGES = ("THREADS", "OPTIONS", "SOURCE.matmul", "matmul")
ARCHS = ("sm_75", "sm_80", "sm_90")

THREADS = 128  # four warps a block
ROWS = 4  # rows of w a warp
TOKENS = 8  # rows of x a warp: 32 sums a thread
OPTIONS = (f"-DTHREADS={THREADS}", f"-DROWS={ROWS}", f"-DTOKENS={TOKENS}")

SOURCE = (
    Q4_K
    + r"""
extern "C" __global__ void __launch_bounds__(THREADS)
matmul(const float* x, const uint8* w, float* out, int T, int N, int K) {  // (T, K), (N, K) blocks -> (T, N)
    const int64 i = (int64)blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
    const int lane = threadIdx.x % 32, part = lane % 8, tiles = (N + ROWS - 1) / ROWS, blocks = K / BLOCK;
    const int row0 = i % tiles * ROWS;  // rows past the end read the last, and are not stored
    const int64 token0 = i / tiles * TOKENS;
    if (token0 >= T) return;
    float sum[ROWS][TOKENS] = {};
    for (int b = lane / 8; b < blocks; b += 4) {  // four blocks a step, eight lanes each
        uint4 q[ROWS];
        float scale[ROWS][2], min[ROWS][2];
        for (int r = 0; r < ROWS; ++r) {
            const uint8* block = w + ((int64)(row0 + r < N ? row0 + r : N - 1) * blocks + b) * BLOCK_BYTES;
            const uint4 head = *(const uint4*)block;
            q[r] = *(const uint4*)(block + 16 + part * 16);
            const float2 d = __half22float2(*(const half2*)&head.x);
            uint2 scales, mins;  // one a byte; this lane's groups are part / 2 * 2 and the next
            scales_mins({head.y, head.z, head.w}, scales, mins);
            const unsigned two = (part < 4 ? scales.x : scales.y) >> part / 2 % 2 * 16;
            const unsigned low = (part < 4 ? mins.x : mins.y) >> part / 2 % 2 * 16;
            for (int high = 0; high < 2; ++high) {
                scale[r][high] = d.x * (two >> 8 * high & 255);
                min[r][high] = d.y * (low >> 8 * high & 255);
            }
        }
        const float* from = x + token0 * K + b * BLOCK + part / 2 * 64 + part % 2 * 16;
#pragma unroll
        for (int j = 0; j < 32; j += 4) {  // four weights of each row at a time
            const int high = j / 16;
            float weights[ROWS][4];
            for (int r = 0; r < ROWS; ++r)
                for (int u = 0; u < 4; ++u)
                    weights[r][u] = scale[r][high] * ((&q[r].x)[j % 16 / 4] >> (4 * high + 8 * u) & 15) - min[r][high];
#pragma unroll
            for (int t = 0; t < TOKENS; ++t) {
                if (token0 + t >= T) break;
                const float4 v = *(const float4*)(from + (int64)t * K + 32 * high + j % 16);
                for (int r = 0; r < ROWS; ++r)
                    sum[r][t] += weights[r][0] * v.x + weights[r][1] * v.y + weights[r][2] * v.z + weights[r][3] * v.w;
            }
        }
    }
    for (int r = 0; r < ROWS; ++r)
        for (int t = 0; t < TOKENS; ++t) {
            for (int step = 16; step; step /= 2) sum[r][t] += __shfl_xor_sync(~0u, sum[r][t], step);
            if (lane == 0 && row0 + r < N && token0 + t < T) out[(token0 + t) * N + row0 + r] = sum[r][t];
        }
}
"""
)
PROGRAM = Program(SOURCE, OPTIONS, ARCHS)


def matmul(x, w):  # (T, K), (N, K / 256 * 144) -> (T, N)
    import cupy

    (t, k), n = x.shape, w.shape[0]
    out = cupy.empty((t, n), "float32")
    warps = -(-t // TOKENS) * -(-n // ROWS)
    PROGRAM.launch("matmul", -(-warps // (THREADS // 32)), THREADS, (x, w, out, *map(numpy.int32, (t, n, k))))
    return out
