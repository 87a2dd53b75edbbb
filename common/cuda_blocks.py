"""GGUF's blocks in CUDA C++: source text that a stage puts before its own kernels.

A Q4_K block is 144 bytes for 256 weights: d 2 f16 | dmin 2 f16 | scales 12 | q 128. A row of K weights is K / 256
blocks side by side, so every block starts on 16 bytes. Layout and formula are those of ggml-quants.c.
"""

Q4_K = r"""
#include <cuda_fp16.h>
typedef long long int64;
typedef unsigned char uint8;
constexpr int BLOCK = 256, BLOCK_BYTES = 144;

// Scale and min of group j (32 weights), 6 bits each: j < 4 in bytes j and j + 4, else in 4 bits of byte j + 4 and 2 of
// bytes j - 4 and j.
__device__ void scale_min(const uint8* scales, int j, int& scale, int& min) {
    if (j < 4) {
        scale = scales[j] & 63, min = scales[j + 4] & 63;
    } else {
        scale = scales[j + 4] & 15 | scales[j - 4] >> 6 << 4;
        min = scales[j + 4] >> 4 | scales[j] >> 6 << 4;
    }
}

// Weight i of a block. 32 bytes of q hold 64 weights: the low halves the first 32, the high halves the next.
__device__ float weight(const uint8* block, int i) {
    const half* d = (const half*)block;
    int scale, min;
    scale_min(block + 4, i / 32, scale, min);
    const int q = block[16 + i / 64 * 32 + i % 32] >> i / 32 % 2 * 4 & 15;
    return __half2float(d[0]) * scale * q - __half2float(d[1]) * min;
}

// The eight scales and mins of a block at once, one a byte: from its 12 bytes as three words.
__device__ void scales_mins(uint3 s, uint2& scales, uint2& mins) {
    scales = {s.x & 0x3F3F3F3F, s.z & 0x0F0F0F0F | s.x >> 2 & 0x30303030};
    mins = {s.y & 0x3F3F3F3F, s.z >> 4 & 0x0F0F0F0F | s.y >> 2 & 0x30303030};
}
"""
