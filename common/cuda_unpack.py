"""GGUF's blocks in CUDA C++: source text that unpacks eight weights of a row for each thread.

Layouts and formulas are those of common/quants.py, whose docstrings give the fields of each block. There a block is
sixteen bytes in a vector register; here a thread takes eight neighbouring weights, whatever the type, and the weights
are scale * q + offset, with q a byte each.
"""

from common.gguf import TYPES

TYPES_UNPACKED = ("F32", "F16", "Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K")

UNPACK = (
    "#include <cuda_fp16.h>\n"
    + "".join(f"constexpr int {name} = {TYPES[name].id};\n" for name in TYPES_UNPACKED)  # ggml's type ids
    + r"""
typedef long long int64;
typedef unsigned char uint8;
typedef unsigned short uint16;
typedef unsigned int uint32;

struct Eight { uint2 q; float scale, offset; };  // eight weights: scale * q + offset, one q a byte

__device__ float f16(const uint8* at) { return __half2float(*(const half*)at); }

// Eight bytes, loaded two at a time: a block of 18, 22, 34 or 210 bytes starts at any even address.
__device__ uint2 eight_bytes(const uint8* at) {
    const uint16* pairs = (const uint16*)at;
    return {pairs[0] | (uint32)pairs[1] << 16, pairs[2] | (uint32)pairs[3] << 16};
}

// The bits of each byte that a mask keeps, after a shift to the right.
__device__ uint2 part(uint2 bytes, int shift, uint32 mask) {
    return {bytes.x >> shift & mask, bytes.y >> shift & mask};
}

// q with a fifth (and sixth) bit from another eight bytes.
__device__ uint2 with_upper(uint2 q, uint2 upper) { return {q.x | upper.x << 4, q.y | upper.y << 4}; }

// Byte j as a float: the low end of 2^23's fraction, and 2^23 taken off. A conversion instruction takes longer.
__device__ float number(uint2 bytes, int j) {
    return __uint_as_float(__byte_perm(j < 4 ? bytes.x : bytes.y, 0x4B000000, 0x7440 | j % 4)) - 8388608.0f;
}

// Blocks of 32: byte i of q holds weight i in its low half and weight i + 16 in its high half.

__device__ Eight unpack_q4_0(const uint8* row, uint32 k) {  // 18 bytes: d 2 | q 16
    const uint8* block = row + (int64)(k / 32) * 18;
    const float d = f16(block);
    return {part(eight_bytes(block + 2 + k % 16), k % 32 / 16 * 4, 0x0F0F0F0F), d, -8 * d};
}

__device__ Eight unpack_q4_1(const uint8* row, uint32 k) {  // 20 bytes: d 2 | m 2 | q 16
    const uint8* block = row + (int64)(k / 32) * 20;
    return {part(eight_bytes(block + 4 + k % 16), k % 32 / 16 * 4, 0x0F0F0F0F), f16(block), f16(block + 2)};
}

__device__ Eight unpack_q5_0(const uint8* row, uint32 k) {  // 22 bytes: d 2 | h 4 | q 16
    const uint8* block = row + (int64)(k / 32) * 22;
    const float d = f16(block);
    const uint2 q = part(eight_bytes(block + 6 + k % 16), k % 32 / 16 * 4, 0x0F0F0F0F);
    const uint32 h = block[2 + k % 32 / 8];  // a bit a weight; times 2^0 + 2^7 + 2^14 + 2^21 puts four into four bytes
    return {with_upper(q, {(h & 15) * 0x204081 & 0x01010101, (h >> 4) * 0x204081 & 0x01010101}), d, -16 * d};
}

__device__ Eight unpack_q8_0(const uint8* row, uint32 k) {  // 34 bytes: d 2 | q 32 int8
    const uint8* block = row + (int64)(k / 32) * 34;
    const uint2 q = eight_bytes(block + 2 + k % 32);
    const float d = f16(block);
    return {{q.x ^ 0x80808080, q.y ^ 0x80808080}, d, -128 * d};  // 0 to 255 instead of -128 to 127
}

// Super-blocks of 256, in groups of 32 or 16 with a scale each.

// d scale and -dmin min of the 32 weights of group j: 6 bits each, j < 4 in bytes j and j + 4, else in byte j + 4 and
// the upper bits of bytes j - 4 and j.
__device__ Eight scale_min(const uint8* block, uint32 j) {
    const uint8* s = block + 4;
    const int scale = j < 4 ? s[j] & 63 : s[j + 4] & 15 | s[j - 4] >> 6 << 4;
    const int least = j < 4 ? s[j + 4] & 63 : s[j + 4] >> 4 | s[j] >> 6 << 4;
    return {{}, f16(block) * scale, -f16(block + 2) * least};
}

__device__ Eight unpack_q4_k(const uint8* row, uint32 k) {  // 144 bytes: d 2 | dmin 2 | s 12 | q 128
    const uint8* block = row + (int64)(k / 256) * 144;
    const uint32 i = k % 256;
    Eight out = scale_min(block, i / 32);
    out.q = part(*(const uint2*)(block + 16 + i / 64 * 32 + i % 32), i / 32 % 2 * 4, 0x0F0F0F0F);
    return out;
}

__device__ Eight unpack_q5_k(const uint8* row, uint32 k) {  // 176 bytes: d 2 | dmin 2 | s 12 | h 32 | q 128
    const uint8* block = row + (int64)(k / 256) * 176;
    const uint32 i = k % 256;
    Eight out = scale_min(block, i / 32);
    out.q = part(*(const uint2*)(block + 48 + i / 64 * 32 + i % 32), i / 32 % 2 * 4, 0x0F0F0F0F);
    out.q = with_upper(out.q, part(*(const uint2*)(block + 16 + i % 32), i / 32, 0x01010101));
    return out;
}

__device__ Eight unpack_q6_k(const uint8* row, uint32 k) {  // 210 bytes: q 128 | h 64 | s 16 int8 | d 2
    const uint8* block = row + (int64)(k / 256) * 210;
    const uint32 i = k % 256, half_block = i / 128, j = i % 128 / 32;  // j: which 32 of the 128 that share bytes of h
    const uint2 q = eight_bytes(block + half_block * 64 + j % 2 * 32 + i % 32);
    const uint2 h = eight_bytes(block + 128 + half_block * 32 + i % 32);
    const float scale = f16(block + 208) * (signed char)block[192 + i / 16];
    return {with_upper(part(q, j / 2 * 4, 0x0F0F0F0F), part(h, j * 2, 0x03030303)), scale, -32 * scale};
}

// A row of floats may end anywhere.
__device__ void unpack_f32(const uint8* row, int k, int K, float* out) {
    for (int j = 0; j < 8; ++j) if (k + j < K) out[j] = ((const float*)row)[k + j];
}

__device__ void unpack_f16(const uint8* row, int k, int K, float* out) {
    for (int j = 0; j < 8; ++j) if (k + j < K) out[j] = __half2float(((const half*)row)[k + j]);
}

// Weights k to k + 7 of a row of K of type `kind`, k a multiple of 8, into out, which starts on 16 bytes.
__device__ void unpack_eight(int kind, const uint8* row, int k, int K, float* out) {
    Eight eight;
    switch (kind) {
        case F32: return unpack_f32(row, k, K, out);
        case F16: return unpack_f16(row, k, K, out);
        case Q4_0: eight = unpack_q4_0(row, k); break;
        case Q4_1: eight = unpack_q4_1(row, k); break;
        case Q5_0: eight = unpack_q5_0(row, k); break;
        case Q8_0: eight = unpack_q8_0(row, k); break;
        case Q4_K: eight = unpack_q4_k(row, k); break;
        case Q5_K: eight = unpack_q5_k(row, k); break;
        default: eight = unpack_q6_k(row, k);
    }
#pragma unroll
    for (int j = 0; j < 8; j += 4) {
        float4 four;
        four.x = fmaf(eight.scale, number(eight.q, j), eight.offset);
        four.y = fmaf(eight.scale, number(eight.q, j + 1), eight.offset);
        four.z = fmaf(eight.scale, number(eight.q, j + 2), eight.offset);
        four.w = fmaf(eight.scale, number(eight.q, j + 3), eight.offset);
        *(float4*)(out + j) = four;
    }
}
"""
)
