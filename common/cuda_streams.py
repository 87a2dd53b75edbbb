"""Weights as the kernel of a token takes them: for each warp of the GPU a stream, in the order in which it multiplies.

A matrix is cut in one of two ways. By rows, where every block has the whole input: a block has tiles of 16 rows, and
each of its warps some of their k's. By columns, where a block has made a part of the input itself: the block has those
k's of every row, or of a share of the rows where other blocks have made the same (a head's values), and each of its
warps 16 rows of every 256.

A unit is 16 rows x 16 k's, as `mma.m16n8k32` takes two of: lane 4 g + c holds rows g and g + 8 of k's 4 c to 4 c + 3. A
share is the units that a warp multiplies together. Weights are scale * q + offset, with q an integer. Formats:
    NIBBLES  a word a unit: row g in the low halves of its bytes, g + 8 in the high ones; q + 8       Q4_0 Q4_1 Q4_K
    BYTES    two words a unit, a row each                                                   Q5_0 Q8_0 Q5_K Q6_K
    HALVES   two shares of BYTES: the high and the low bytes of 16-bit integers                              F16 F32
After the words come (scale, offset) of each row, two FP16 (one FP32 for HALVES), for every unit, or in rows of NIBBLES
for every two.

A piece is what is copied at once: a share, or several that lie together. After it stand 16 bytes that say how long the
piece is that takes its slot of the ring; those of the first pieces stand before the stream.
"""

from typing import Any, NamedTuple

import numpy as np

from common.cuda import Program
from common.cuda_tiles import EIGHT
from common.cuda_unpack import UNPACK
from common.gguf import TYPES

WARPS = 16  # of a block, all alike
GROUP = WARPS // 2  # tiles of 16 rows that a block multiplies before its warps add up, each half a tile
SHARE = 1280  # bytes of the largest piece
PIECE = SHARE + 16  # bytes of a slot of a warp's ring
HEADER = 64  # bytes before a stream
ROOM = (227 - 4) * 1024  # bytes of shared memory that Hopper has for a block, but for what the kernel declares
CHUNK_K = 128  # k's of a share by rows: eight units
NIBBLES, BYTES, HALVES = range(3)
FORMATS = {"Q4_0": NIBBLES, "Q4_1": NIBBLES, "Q4_K": NIBBLES, "Q5_0": BYTES, "Q8_0": BYTES, "Q5_K": BYTES,
           "Q6_K": BYTES, "F16": HALVES, "F32": HALVES}  # fmt: skip
FORMAT_OF = {TYPES[name].id: number for name, number in FORMATS.items()}

CONSTANTS = (
    f"constexpr int NIBBLES = {NIBBLES}, BYTES = {BYTES}, HALVES = {HALVES}, WARPS = {WARPS}, GROUP = {GROUP}, "
    f"SHARE = {SHARE}, PIECE = {PIECE}, HEADER = {HEADER};\n"
)

INSTRUCTIONS = r"""
typedef unsigned long long uint64;

__device__ uint32 address(const void* p) { return (uint32)__cvta_generic_to_shared(p); }
__device__ void prepare(uint64* barrier) {  // in shared memory: passed once one thread has told what is to arrive, and
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address(barrier)) : "memory");  // it has
}
__device__ void prepared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }  // for the copy engine too
__device__ void fetch(void* to, const void* from, uint32 bytes, uint64* barrier) {  // by the engine; not needed again
    uint64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(barrier)), "r"(bytes)
                 : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
                 " [%0], [%1], %2, [%3], %4;"
                 ::"r"(address(to)), "l"(from), "r"(bytes), "r"(address(barrier)), "l"(policy) : "memory");
}
__device__ bool passed(uint64* barrier, int phase) {
    uint32 done;
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done) : "r"(address(barrier)), "r"(phase) : "memory");
    return done;
}

// Words that blocks exchange live in the L2 cache: relaxed operations go there, and order nothing around them.
__device__ void put(uint64* to, uint64 word) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(word) : "memory");
}
__device__ void get(const uint64* from, uint64* two) {
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(two[0]), "=l"(two[1]) : "l"(from) : "memory");
}
__device__ uint64 get(const uint64* from) {
    uint64 word;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(from) : "memory");
    return word;
}
__device__ void add(uint64* to, uint64 word) {
    asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(to), "l"(word) : "memory");
}
__device__ void count(uint32* at) { asm volatile("red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(at) : "memory"); }
__device__ uint32 counted(const uint32* at) {
    uint32 value;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}
__device__ int64 nanoseconds() {
    int64 now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

// (16, 32) of lanes' a by (32, 8) of lanes' b, both bytes, added to (16, 8) of lanes' sums; nibbles have no sign
template <int FORMAT> __device__ void multiply(int* sum, const uint32* a, uint32 b0, uint32 b1) {
    if (FORMAT == NIBBLES)
        asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};" : "+r"(sum[0]), "+r"(sum[1]), "+r"(sum[2]), "+r"(sum[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};" : "+r"(sum[0]), "+r"(sum[1]), "+r"(sum[2]), "+r"(sum[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
"""

STREAMS = (
    UNPACK
    + CONSTANTS
    + INSTRUCTIONS
    + r"""
// ---- shares by activations ------------------------------------------------------------------------------------------

// An activation is 256 high + low, both bytes, times a factor for all of a warp's. An instruction multiplies by eight
// columns: 2 u holds the high bytes of one group of k's, 2 u + 1 their low bytes, and elsewhere these columns are zero.
// So lane 4 g + c ends with rows g and g + 8 of group c, high and low, and applies that group's scale.
constexpr uint32 MAGIC = 0x4B400000;  // as a float 3 * 2^22: an integer added to its bits is added to the float
constexpr float MAGIC_FLOAT = 12582912;
constexpr float MOST = 32512;  // 127 * 256: what the largest activation of a warp becomes

// Four activations to the bytes of this lane's column.
__device__ uint32 bytes_of(const float* x, float factor) {
    const bool low = threadIdx.x & 4;
    uint32 v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = __float_as_uint(fmaf(x[i], factor, MAGIC_FLOAT + 128));
    const uint32 which = low ? 0x0040 : 0x0051;
    return __byte_perm(__byte_perm(v[0], v[1], which), __byte_perm(v[2], v[3], which), 0x5410) ^ (low ? 0x80808080 : 0);
}

// The largest of a warp's values, none of which is below zero.
__device__ float highest(float value) { return __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(value))); }

struct Sums { float high, low; };  // of the activations of a lane's group

template <int UNITS> __device__ Sums sums_of(const uint32* b) {
    const uint32 ones[4] = {0x01010101, 0x01010101, 0x01010101, 0x01010101};
    int sum[4] = {MAGIC, MAGIC, MAGIC, MAGIC};
#pragma unroll
    for (int u = 0; u < UNITS; u += 2) multiply<BYTES>(sum, ones, b[u], u + 1 < UNITS ? b[u + 1] : 0);
    return {__int_as_float(sum[0]) - MAGIC_FLOAT, __int_as_float(sum[1]) - MAGIC_FLOAT};
}

// What a lane holds of a share.
template <int FORMAT, int UNITS> struct Share {
    static constexpr int WORDS = UNITS * (FORMAT == NIBBLES ? 1 : 2), GROUPS = UNITS == 8 ? 4 : UNITS;
    static constexpr int VECTOR = WORDS % 4 == 0 ? 4 : WORDS % 2 == 0 ? 2 : 1, SIZE = WORDS * 128 + GROUPS * 64;
    uint32 w[WORDS];
    uint2 means;  // scale and offset of this lane's group, of rows g and g + 8

    __device__ void load(const uint8* share) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < WORDS / VECTOR; ++i) {
            if (VECTOR == 4) *(uint4*)(w + 4 * i) = ((const uint4*)share)[i * 32 + lane];
            else if (VECTOR == 2) *(uint2*)(w + 2 * i) = ((const uint2*)share)[i * 32 + lane];
            else w[i] = ((const uint32*)share)[i * 32 + lane];
        }
        means = ((const uint2*)(share + WORDS * 128))[min(lane % 4, GROUPS - 1) * 8 + lane / 4];
    }

    // Onto the lane's sums of rows g and g + 8; that of g + 8 is 16 times too large where weights are nibbles.
    __device__ void multiply(float* sum, const uint32* b, Sums of) const {
        int c[4] = {MAGIC, MAGIC, MAGIC, MAGIC};
#pragma unroll
        for (int u = 0; u < UNITS; u += 2) {
            uint32 a[4] = {};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int unit = u + i / 2;
                if (unit >= UNITS) continue;
                if (FORMAT == NIBBLES) a[i] = w[unit] & (i % 2 ? 0xF0F0F0F0 : 0x0F0F0F0F);  // high halves unshifted
                else a[i] = w[2 * unit + i % 2];
            }
            ::multiply<FORMAT>(c, a, b[u], u + 1 < UNITS ? b[u + 1] : 0);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float bias = FORMAT == NIBBLES ? r ? 128 : 8 : 0, times = FORMAT == NIBBLES && r ? 16 : 1;
            const float high = __int_as_float(c[2 * r]) - (MAGIC_FLOAT + bias * of.high);
            const float low = __int_as_float(c[2 * r + 1]) - (MAGIC_FLOAT + bias * of.low);
            const uint32 bits = r ? means.y : means.x;
            const float2 mean = FORMAT == HALVES ? float2{__uint_as_float(bits), 0} : __half22float2(*(half2*)&bits);
            sum[r] = fmaf(fmaf(high, 256, low), mean.x, sum[r]);
            if (FORMAT != HALVES) sum[r] = fmaf(times * fmaf(of.high, 256, of.low), mean.y, sum[r]);
        }
    }
};

// The sums of rows g and g + 8 over the four lanes of g: of g for even lanes, of g + 8 for odd ones.
__device__ float over_lanes(const float* sum, int format) {
    const bool odd = threadIdx.x & 1;
    const float lower = format == NIBBLES ? sum[1] * 0.0625f : sum[1];
    float mine = odd ? lower : sum[0];
    mine += __shfl_xor_sync(~0u, odd ? sum[0] : lower, 1);
    return mine + __shfl_xor_sync(~0u, mine, 2);
}
"""
)

PACK = Program(
    UNPACK
    + EIGHT
    + CONSTANTS
    + r"""
struct Rows { const uint8* raw; int64 bytes; int kind, N, K; };  // a matrix in the file's blocks

struct Four { uint32 q; float scale, offset; };  // four weights, a signed byte each

__device__ Four quarter(const Rows& w, int row, int k) {
    const Eight found = eight(w.kind, w.raw + row * w.bytes, k & ~7);
    const int middle = w.kind == Q8_0 ? 128 : w.kind == Q6_K ? 32 : w.kind == Q5_0 || w.kind == Q5_K ? 16 : 8;
    return {__vsub4(k & 4 ? found.q.y : found.q.x, middle * 0x01010101), found.scale,
            found.offset + found.scale * middle};
}

// The high or low bytes of four weights as integers of 16 bits, with one scale for the four lanes of a unit's row.
__device__ Four sixteen_bits(const Rows& w, int row, int k, bool inside, int plane) {
    __align__(16) float weights[8] = {};
    if (inside) unpack_eight(w.kind, w.raw + row * w.bytes, k & ~7, w.K, weights);
    float most = 0;
    for (int i = 0; i < 4; ++i) most = fmaxf(most, fabsf(weights[(k & 4) + i]));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1)), most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
    const float scale = most / 32512;
    uint32 q = 0;
    for (int i = 0; i < 4; ++i) {
        const int value = scale ? __float2int_rn(weights[(k & 4) + i] / scale) : 0, high = value + 128 >> 8;
        q |= (uint32)((plane ? value - 256 * high : high) & 255) << 8 * i;
    }
    return {q, plane ? scale : 256 * scale, 0};
}

// A share of `units` units, by a warp: the k's of unit n from k0 + n * step on, `width` of them and none from `end` on;
// rows 0 to 7 are those of a from n0 on, 8 to 15 those of b from n1 on.
__device__ void pack_share(uint8* out, const Rows& a, const Rows& b, int n0, int n1, int format, int units, int plane,
                           int k0, int step, int width, int end) {
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4, words = units * (format == NIBBLES ? 1 : 2);
    const int vector = words % 4 == 0 ? 4 : words % 2 == 0 ? 2 : 1, both = units == 8 ? 2 : 1;
    for (int n = 0; n < units; ++n) {
        uint32 q[2];
        for (int r = 0; r < 2; ++r) {
            const Rows& w = r ? b : a;
            const int row = r ? n1 + g : n0 + g, k = k0 + n * step + 4 * c;
            const bool inside = row < w.N && k < end && 4 * c < width;
            Four found = {};
            if (format == HALVES) found = sixteen_bits(w, row, k, inside, plane);
            else if (inside) found = quarter(w, row, k);
            q[r] = found.q;
            uint32* means = (uint32*)(out + words * 128) + (n / both * 8 + g) * 2 + r;
            const half2 pair = __floats2half2_rn(found.scale, found.offset);
            if (c == 0 && n % both == 0) *means = format == HALVES ? __float_as_uint(found.scale) : *(uint32*)&pair;
        }
        uint32* to = (uint32*)out;
        auto place = [&](int i) { return (i / vector * 32 + lane) * vector + i % vector; };
        if (format == NIBBLES)
            to[place(n)] = ((q[0] ^ 0x08080808) & 0x0F0F0F0F) | ((q[1] ^ 0x08080808) & 0x0F0F0F0F) << 4;
        else to[place(2 * n)] = q[0], to[place(2 * n + 1)] = q[1];
    }
}

// By rows: a thread block for each piece of each tile, a warp for each that will multiply it. With pairs, eight rows of
// a lie above the same eight of b.
extern "C" __global__ void
pack_rows(const __grid_constant__ Rows a, const __grid_constant__ Rows b, int pairs, int format, int chunks,
          const int64* places, uint8* out, int64 stride) {
    const int warp = threadIdx.x / 32, pieces = chunks << format;
    const int tile = blockIdx.x / pieces, piece = blockIdx.x % pieces, chunk = piece >> format;
    const int k0 = (warp * chunks + chunk) * 128, j = piece & 1, rows = pairs ? 8 : 16;
    uint8* to = out + places[blockIdx.x] + warp * stride;
    const int n0 = tile * rows, n1 = n0 + (pairs ? 0 : 8);
    if (format == NIBBLES) pack_share(to, a, b, n0, n1, format, 8, 0, k0, 16, 16, a.K);
    else pack_share(to, a, b, n0, n1, format, 4, piece >> 1 & 1, k0 + 16 * j, 32, 16, a.K);
}

// By columns: a thread block for each piece of each block of the kernel of a token, a warp for each of its warps.
extern "C" __global__ void
pack_columns(const __grid_constant__ Rows a, int format, int units, int passes, int tiles, int turns, int parts,
             int each, int first, int span, int step, int width, const int64* places, const int64* others, int warps,
             uint8* out, int64 stride) {
    const int warp = threadIdx.x / 32, planes = format == HALVES ? 2 : 1, pieces = turns * passes * planes;
    const int block = blockIdx.x / pieces, piece = blockIdx.x % pieces, plane = piece % planes;
    const int pass = piece / planes % passes, turn = (piece / planes / passes + block) % turns;
    const int size = units * (format == NIBBLES ? 192 : 320), k0 = block / parts * first;
    uint8* to = out + (warp < warps ? places : others)[blockIdx.x] + warp * stride;
    for (int t = 0; t < tiles; ++t) {
        const int local = (turn * tiles + t) * 16 + warp, tile = block % parts * each + local;
        const int n0 = local < each ? tile * 16 : a.N;
        pack_share(to + t * size, a, a, n0, n0 + 8, format, units, plane, k0 + pass * units * step, step, width,
                   min(a.K, k0 + span));
    }
}

// What stands before the streams of warps `first` to `end`, and after each of their pieces.
extern "C" __global__ void
chain(const int64* places, const uint32* bytes, int count, int first, int end, uint8* out, int64 stride) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) for (int warp = first; warp < end; ++warp) *(uint32*)(out + places[i] + warp * stride) = bytes[i];
}
""",
    (),
    ("sm_75",),
)


class Cut(NamedTuple):
    """How a model's matrices are dealt to the blocks of the kernel of a token, which has these numbers as constants."""

    D: int
    F: int
    H: int
    G: int
    hd: int
    V: int
    L: int
    blocks: int

    @property
    def chunks(self):  # of 128 k's, a warp, in rows of D
        return -(-self.D // (CHUNK_K * WARPS))

    @property
    def warps(self):  # that have any of them
        return -(-self.D // (CHUNK_K * self.chunks))

    @property
    def slots(self):  # of a warp's ring: as many as fit beside sums over warps and an embedding
        return (ROOM - self._beside) // (WARPS * PIECE)

    @property
    def shared(self):  # bytes of a block
        return WARPS * self.slots * PIECE + self._beside

    @property
    def _beside(self):
        return 4 * (GROUP * WARPS * 16 + CHUNK_K * self.chunks * self.warps)

    @property
    def unit(self):  # values of a head in a unit: as many as share a scale, wherever a head begins
        return 8 if self.hd % 16 else 16

    @property
    def parts(self):  # blocks of a head, which share its positions and the rows of its output
        return self.blocks // self.H

    @property
    def each(self):  # tiles of rows that such a block has
        return -(-tall(self.D) // self.parts)

    @property
    def seen(self):  # (units a share, shares) of a head's values
        return _even(-(-self.hd // self.unit))

    @property
    def act(self):  # the same, of a block's activations between gate_up and down
        return _even(-(-tall(self.F) // self.blocks))

    @property
    def options(self) -> tuple[str]:
        """For the compiler: names and values, as `constexpr int` wants them."""
        found = {"D": self.D, "F": self.F, "H": self.H, "G": self.G, "HD": self.hd, "V": self.V, "L": self.L}
        found |= {"BLOCKS": self.blocks, "CHUNKS": self.chunks, "ACTIVE": self.warps, "SLOTS": self.slots}
        found |= {"UNIT": self.unit, "PARTS": self.parts, "EACH": self.each}
        found |= {"SEEN_UNITS": self.seen[0], "SEEN_PASSES": self.seen[1]}
        found |= {"ACT_UNITS": self.act[0], "ACT_PASSES": self.act[1]}
        return ("-DCUT=" + ",".join(f"{name}={value}" for name, value in found.items()),)


def tall(N: int) -> int:
    """Tiles of 16 rows."""
    return -(-N // 16)


def _even(count: int) -> tuple[int, int]:
    """As few shares of at most four units as hold `count`: (units, shares)."""
    passes = -(-count // 4)
    return -(-count // passes), passes


def _turns(form: int, count: int, tiles: int) -> tuple[int, int]:
    """By columns: tiles of rows a piece, where each is a share of `count` units, and pieces that hold `tiles` tiles."""
    at_once = max(1, min(SHARE // _size(form, count), tiles))
    return at_once, -(-tiles // at_once)


def _size(form: int, count: int) -> int:
    """Bytes of a share of `count` units by columns."""
    return count * (192 if form == NIBBLES else 320)


def order(cut: Cut, layers: list, output: int) -> list[list]:
    """What each block's warps multiply in a step, in order: for each block a list of (matrix, piece, bytes, by rows).

    layers: the formats of each layer's q, k, v, o, gate_up, down; matrix 6 l + i is the i-th of layer l, and the
    output's is the last. A piece's number goes along the tiles of a matrix by rows, and along blocks by columns.
    """
    B, found = cut.blocks, [[] for _ in range(cut.blocks)]

    def rows(block, matrix, form, tile):
        pieces = cut.chunks << form
        found[block] += [(matrix, tile * pieces + i, SHARE, True) for i in range(pieces)]

    def columns(block, matrix, form, shares, tiles):
        at_once, count = _turns(form, shares[0], -(-tiles // WARPS))
        count *= shares[1] * (2 if form == HALVES else 1)
        nbytes = at_once * _size(form, shares[0])
        found[block] += [(matrix, block * count + i, nbytes, False) for i in range(count)]

    for l, forms in enumerate(layers):
        qkv = [(6 * l + i, forms[i], tile) for i, heads in enumerate((cut.H, cut.G, cut.G))
               for tile in range(tall(heads * cut.hd))]  # fmt: skip
        for b in range(B):
            for tile in qkv[B - 1 - b :: B]:
                rows(b, *tile)
            if b < cut.parts * cut.H:
                columns(b, 6 * l + 3, forms[3], cut.seen, cut.each)
            for unit in range(b, tall(cut.F), B):
                rows(b, 6 * l + 4, forms[4], 2 * unit), rows(b, 6 * l + 4, forms[4], 2 * unit + 1)
            columns(b, 6 * l + 5, forms[5], cut.act, tall(cut.D))
    for b in range(B):
        for tile in range(b, tall(cut.V), B):
            rows(b, 6 * cut.L, output, tile)
    return found


class Plan(NamedTuple):
    """Where `order`'s pieces lie: bytes from the start, of warp 0; a warp's stream is `stride` after the one before."""

    cut: Cut
    layers: list  # formats, as order takes them
    output: int
    stride: int
    places: list  # for each matrix, those of its pieces, of warps that have k's of rows
    others: list  # and of those that have none
    links: list  # for both kinds of warps: (places, bytes) of what says how long a piece is

    @property
    def nbytes(self):
        return self.cut.blocks * WARPS * self.stride + 128


def plan(cut: Cut, layers: list, output: int) -> Plan:
    listed, count, slots = order(cut, layers, output), 6 * cut.L + 1, cut.slots
    stride, places, links = 0, [], []
    for everyone in (True, False):
        at, spots, sizes = [{} for _ in range(count)], [], []
        for b, pieces in enumerate(listed):
            mine = [piece for piece in pieces if everyone or not piece[3]]
            ends = HEADER + np.cumsum([0, *(size + 16 for _, _, size, _ in mine)])
            stride = max(stride, int(ends[-1]))
            follow = [size + 16 for _, _, size, _ in mine] + slots * [0]
            spots += [(b, 4 * i) for i in range(slots)]
            sizes += follow[:slots]
            for i, (matrix, number, size, _) in enumerate(mine):
                at[matrix][number] = b, int(ends[i])
                spots.append((b, int(ends[i]) + size))
                sizes.append(follow[i + slots])
        places.append(at)
        links.append((spots, sizes))
    stride = -(-stride // 128) * 128

    def flat(pairs):
        return np.array([b * WARPS * stride + at for b, at in pairs], np.int64)

    places = [[flat([of[i] for i in sorted(of)]) for of in at] for at in places]
    links = [(flat(spots), np.array(sizes, np.uint32)) for spots, sizes in links]
    return Plan(cut, layers, output, stride, *places, links)


def formats(weights) -> tuple[list, int]:
    """What order and plan take, of a file's tensors: the format of gate_up is the one that holds both."""
    layers = []
    for layer in weights.layers:
        _, q, k, v, o, _, gate, up, down = (FORMATS[tensor.type.name] for tensor in layer)
        layers.append((q, k, v, o, max(gate, up), down))
    return layers, FORMATS[weights.output.type.name]


def room(plan: Plan):
    """(bytes,) uint8 on the GPU for all streams, with the lengths of their pieces."""
    import cupy

    out = cupy.zeros(plan.nbytes, np.uint8)
    warps = plan.cut.warps
    for (places, sizes), (first, end) in zip(plan.links, ((0, warps), (warps, WARPS)), strict=True):
        count, ends = len(places), map(np.int32, (len(places), first, end))
        args = cupy.asarray(places), cupy.asarray(sizes), *ends, out, np.int64(plan.stride)
        PACK.launch("chain", -(-count // 256), 256, args)
    return out


def pack(plan: Plan, out, number: int, w) -> None:
    """Put matrix `number` of order into all streams that have something of it: given in raw blocks on the GPU, as
    (N, K, kind, length, size, raw), or two of them for gate_up.
    """
    import cupy

    cut, column = plan.cut, number % 6 if number < 6 * plan.cut.L else None
    form = plan.output if column is None else plan.layers[number // 6][column]
    places, others, stride = *(cupy.asarray(of[number]) for of in (plan.places, plan.others)), np.int64(plan.stride)
    if column not in (3, 5):
        a, b = w if column == 4 else (w, w)
        sizes = map(np.int32, (column == 4, form, cut.chunks))
        args = _rows(a), _rows(b), *sizes, places, out, stride
        PACK.launch("pack_rows", len(places), 32 * cut.warps, args)
        return
    (many, passes), tiles = (cut.seen, cut.each) if column == 3 else (cut.act, tall(cut.D))
    dealt = (cut.parts, tiles, cut.hd, cut.hd, cut.unit, cut.unit)
    if column == 5:
        dealt = (1, tiles, 16, cut.F, 16 * cut.blocks, 16)
    sizes = map(np.int32, (form, many, passes, *_turns(form, many, -(-tiles // WARPS)), *dealt))
    args = _rows(w), *sizes, places, others, np.int32(cut.warps), out, stride
    PACK.launch("pack_columns", len(places), 32 * WARPS, args)


def _rows(w: Any) -> np.ndarray:
    """Struct Rows by value."""
    numbers = np.array([w.raw.data.ptr, w.K // w.length * w.size, 0, 0], np.int64)
    numbers[2:].view(np.int32)[:3] = w.kind, w.N, w.K
    return numbers.view("V32")
