"""A Q4_K matmul with a warp on a row and 16 bytes a load.

Idea    Let a warp read a row of blocks side by side, and decode a scale once for the weights that share it.
Was     A thread walked a row alone: 1 byte used of each 32 moved, a scale decoded for each weight.
Change  A warp takes a row. A lane loads 16 bytes of q, which are 32 weights of two groups, and the activations as
        float4; the warp adds up its sums by shuffles.
Expect  Sectors are used whole, so one token comes near the read bound, as far as decoding in FP32 allows. T tokens
        still cost T times one.
"""

import numpy

from common.cuda import Program
from common.cuda_blocks import Q4_K

PREVIOUS = "naive"
CHANGES = ("THREADS", "SOURCE.matmul", "matmul")
ARCHS = ("sm_75", "sm_80", "sm_90")

THREADS = 128  # four rows a block, a warp each
OPTIONS = (f"-DTHREADS={THREADS}",)

SOURCE = (
    Q4_K
    + r"""
extern "C" __global__ void __launch_bounds__(THREADS)
matmul(const float* x, const uint8* w, float* out, int T, int N, int K) {  // (T, K), (N, K) blocks -> (T, N)
    const int64 i = (int64)blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
    const int lane = threadIdx.x % 32, part = lane % 8, row = i % N, blocks = K / BLOCK;
    const int64 token = i / N;
    if (token >= T) return;
    float sum = 0;
    for (int b = lane / 8; b < blocks; b += 4) {  // four blocks a step, eight lanes each
        const uint8* block = w + ((int64)row * blocks + b) * BLOCK_BYTES;
        const uint4 head = *(const uint4*)block, q = *(const uint4*)(block + 16 + part * 16);
        const float2 d = __half22float2(*(const half2*)&head.x);
        uint2 scales, mins;  // one a byte; this lane's groups are part / 2 * 2 and the next
        scales_mins({head.y, head.z, head.w}, scales, mins);
        const unsigned two = (part < 4 ? scales.x : scales.y) >> part / 2 % 2 * 16;
        const unsigned low = (part < 4 ? mins.x : mins.y) >> part / 2 % 2 * 16;
        const float* from = x + token * K + b * BLOCK + part / 2 * 64 + part % 2 * 16;
#pragma unroll
        for (int high = 0; high < 2; ++high) {
            const float scale = d.x * (two >> 8 * high & 255), min = d.y * (low >> 8 * high & 255);
            float dot = 0, plain = 0;  // sum of q x, and of x: the min is taken off once
#pragma unroll
            for (int j = 0; j < 16; j += 4) {
                const float4 v = *(const float4*)(from + 32 * high + j);
                const unsigned four = (&q.x)[j / 4] >> 4 * high;
                dot += (four & 15) * v.x + (four >> 8 & 15) * v.y + (four >> 16 & 15) * v.z + (four >> 24 & 15) * v.w;
                plain += v.x + v.y + v.z + v.w;
            }
            sum += scale * dot - min * plain;
        }
    }
    for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (lane == 0) out[token * N + row] = sum;
}
"""
)
PROGRAM = Program(SOURCE, OPTIONS, ARCHS)


def matmul(x, w):  # (T, K), (N, K / 256 * 144) -> (T, N)
    import cupy

    (t, k), n = x.shape, w.shape[0]
    out = cupy.empty((t, n), "float32")
    PROGRAM.launch("matmul", -(-t * n // (THREADS // 32)), THREADS, (x, w, out, *map(numpy.int32, (t, n, k))))
    return out
