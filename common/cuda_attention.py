"""What no rung of the attention ladders changes: their operands, the mask, and two element types under one name each.

BF16, which CuPy lacks, travels as uint16: the upper half of an FP32's bits.
"""

import math

NAMES = {"float16": "float16", "uint16": "bfloat16"}  # an array's dtype -> the kernels' name for it
HEADS = (64, 128)  # head sizes that the kernels are compiled for

TYPES = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>
typedef long long int64;
typedef unsigned uint32;
typedef __nv_bfloat16 bfloat;
#define INFINITY __int_as_float(0x7f800000)

// q and out are (B, H, Q, D), k and v (B, G, K, D), lse (B, H, Q), lengths (B,): H / G query heads share a key head.
#define OPERANDS(T) const T* q, const T* k, const T* v, const int* lengths, T* out, float* lse, int H, int G, int Q, \
    int K, int causal
#define PASSED q, k, v, lengths, out, lse, H, G, Q, K, causal

// How many keys, counted from the first, query i sees. With fewer queries than keys the last query sees the last key.
__device__ int visible(int i, int length, int Q, int K, int causal) {
    return causal ? min(length, max(i + 1 + K - Q, 0)) : length;
}

__device__ float plain(half x) { return __half2float(x); }
__device__ float plain(bfloat x) { return __bfloat162float(x); }
__device__ void round_to(half* to, float x) { *to = __float2half(x); }
__device__ void round_to(bfloat* to, float x) { *to = __float2bfloat16(x); }
"""

# What every kernel of a backward pass is given, and the term that all scores of a row share.
GIVEN = r"""
#define GIVEN(T) const T* q, const T* k, const T* v, const T* dout, const float* lse, const float* delta, \
    const int* lengths, int H, int G, int Q, int K, int causal
#define PASSED_ON q, k, v, dout, lse, delta, lengths, H, G, Q, K, causal

template <typename T>  // 16 bytes a thread: (B, H, Q, D) twice -> delta (B, H, Q), the sum of out x dout over a row
__device__ void row_term(const T* out, const T* dout, float* delta, int64 rows, int D) {
    const int64 at = (int64)blockIdx.x * blockDim.x + threadIdx.x, row = at / (D / 8);
    float sum = 0;
    if (row < rows) {
        const uint4 a = ((const uint4*)out)[at], b = ((const uint4*)dout)[at];
        for (int i = 0; i < 8; ++i) sum += plain(((const T*)&a)[i]) * plain(((const T*)&b)[i]);
    }
    for (int step = D / 16; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (row < rows && threadIdx.x % (D / 8) == 0) delta[row] = sum;
}

extern "C" __global__ void row_term_float16(const half* out, const half* dout, float* delta, int64 rows, int D) {
    row_term(out, dout, delta, rows, D);
}
extern "C" __global__ void
row_term_bfloat16(const bfloat* out, const bfloat* dout, float* delta, int64 rows, int D) {
    row_term(out, dout, delta, rows, D);
}
"""

FRAGMENTS = r"""
__device__ uint32 address(const void* p) { return (uint32)__cvta_generic_to_shared(p); }

__device__ void copy(void* to, const void* from, bool inside) {  // 16 bytes; outside none are read, and zeros written
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address(to)), "l"(from), "r"(inside ? 16 : 0)
                 : "memory");
}

__device__ void fragment(uint32* f, const void* from) {  // four 8 x 8 matrices; lane l names row l % 8 of l / 8
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(f[0]), "=r"(f[1]), "=r"(f[2]), "=r"(f[3]) : "r"(address(from)) : "memory");
}

__device__ void fragment_turned(uint32* f, const void* from) {  // each matrix transposed
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(f[0]), "=r"(f[1]), "=r"(f[2]), "=r"(f[3]) : "r"(address(from)) : "memory");
}

#define MULTIPLY(TYPE) "mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 {%0, %1, %2, %3}, " \
    "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#define SUMS : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
#define FACTORS : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1])
template <typename T> __device__ void multiply(float* sum, const uint32* a, const uint32* b);  // += (16, 16) @ (16, 8)
template <> __device__ void multiply<half>(float* sum, const uint32* a, const uint32* b) {
    asm(MULTIPLY("f16") SUMS FACTORS);
}
template <> __device__ void multiply<bfloat>(float* sum, const uint32* a, const uint32* b) {
    asm(MULTIPLY("bf16") SUMS FACTORS);
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

__device__ float power(float x) {  // 2 to the x: one instruction, 0 where x is -inf or the result would be denormal
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
"""


def visible(i: int, length: int, Q: int, K: int, causal: int) -> int:
    """How many keys, counted from the first, query i sees: the kernels' mask, for tests and the oracle."""
    return min(length, max(i + 1 + K - Q, 0)) if causal else length


def name(kernel: str, q) -> str:
    """The kernel for an array's type and head size."""
    return f"{kernel}_{NAMES[str(q.dtype)]}_{q.shape[-1]}"


def operands(q, k, v, lengths, causal):
    """q, k, v, lengths, an empty out (B, H, Q, D), an empty lse (B, H, Q) FP32, and H, G, Q, K, causal for a kernel.

    q is (B, H, Q, D), k and v (B, G, K, D), all FP16 or all BF16 (as uint16); lengths (B,) int32, how many keys of each
    batch are no padding. Raises ValueError where that does not hold.
    """
    import cupy
    import numpy

    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"attention needs (B, H, Q, D) and (B, G, K, D) twice, not {q.shape}, {k.shape} and {v.shape}")
    (B, H, Q, D), (G, K) = q.shape, k.shape[1:3]
    if str(q.dtype) not in NAMES or not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"attention needs FP16, or BF16 as uint16, and was given {q.dtype}, {k.dtype} and {v.dtype}")
    if D not in HEADS or H % G or min(q.size, k.size) == 0:
        raise ValueError(f"attention needs heads of {HEADS[0]} or {HEADS[1]}, H a multiple of G, and no size of 0")
    if lengths.shape != (B,):
        raise ValueError(f"attention needs a length for each of {B} batches, and was given {lengths.shape}")
    q, k, v = map(aligned, map(cupy.ascontiguousarray, (q, k, v)))
    lengths = cupy.ascontiguousarray(lengths, "int32")
    sizes = map(numpy.int32, (H, G, Q, K, causal))
    return q, k, v, lengths, cupy.empty_like(q), cupy.empty((B, H, Q), "float32"), *sizes


def given(program, q, k, v, out, lse, dout, lengths, causal):
    """q, k, v, dout, lse, delta, lengths, H, G, Q, K, causal as GIVEN has them; delta is computed here.

    Shapes as `operands`; out and dout as q. Raises ValueError where they are not.
    """
    import cupy
    import numpy

    q, k, v, lengths, *_, H, G, Q, K, causal = operands(q, k, v, lengths, causal)
    if not (out.shape == dout.shape == q.shape and out.dtype == dout.dtype == q.dtype and lse.shape == q.shape[:3]):
        raise ValueError(f"the backward pass needs out and dout as q, and was given {out.shape} and {dout.shape}")
    out, dout = map(aligned, map(cupy.ascontiguousarray, (out, dout)))
    lse, delta = cupy.ascontiguousarray(lse, "float32"), cupy.empty(lse.shape, "float32")
    arguments = (out, dout, delta, numpy.int64(lse.size), numpy.int32(q.shape[3]))
    program.launch(f"row_term_{NAMES[str(q.dtype)]}", -(-q.size // 2048), 256, arguments)
    return q, k, v, dout, lse, delta, lengths, H, G, Q, K, causal


def aligned(a):
    """The array, or a copy of it where it does not start where a copy of 16 bytes may."""
    return a.copy() if a.data.ptr % 16 else a


def tensor(array):
    """A CuPy array as PyTorch sees it, not copied; uint16 holds the bits of BF16, which CuPy lacks."""
    import torch

    bits = array.dtype == "uint16"
    return torch.from_dlpack(array.view("int16")).view(torch.bfloat16) if bits else torch.from_dlpack(array)


def array(tensor):
    """A tensor on the GPU as CuPy sees it, not copied; BF16 becomes its bits as uint16."""
    import cupy
    import torch

    bits, tensor = tensor.dtype == torch.bfloat16, tensor.detach()
    return cupy.from_dlpack(tensor.view(torch.int16)).view("uint16") if bits else cupy.from_dlpack(tensor)


def stream(theirs):
    """PyTorch's stream as CuPy's, for a with statement. CuPy 14 asks the object itself, older ones for its number."""
    import cupy

    if hasattr(cupy.cuda.Stream, "from_external") and hasattr(theirs, "__cuda_stream__"):
        return cupy.cuda.Stream.from_external(theirs)
    return cupy.cuda.ExternalStream(theirs.cuda_stream)


def blocks(q, tile: int) -> int:
    """Thread blocks where each takes `tile` queries of one head."""
    return math.prod(q.shape[:2]) * -(-q.shape[2] // tile)


WGMMA = r"""
typedef unsigned long long uint64;
template <typename T, int N> __device__ void begin(float* sum, uint64 a, uint64 b);  // (64, 16), (N, 16) -> (64, N)
template <typename T, int N> __device__ void look(float* sum, uint64 a, uint64 b);  // += (64, 16), (N, 16)
template <typename T, int D> __device__ void gather(float* sum, const uint32* a, uint64 b, int add);  // (64, 16), (16, D)
"""  # noqa: E501


def wgmma(function: str, kind: str, columns: int, left: str) -> str:
    """CUDA for one wgmma: 64 rows by 16 k's times 16 k's by `columns`. `left` is 'shared' or 'registers'.

    Left from shared memory, the right matrix has its k's contiguous; left in registers, its columns. `begin` takes
    nothing from what `sum` was, and `gather` only where `add`: sums that were set to 0 would make each one wait.
    """
    sums, fresh = columns // 2, function.startswith("begin")
    outputs = ", ".join(f'"{"=" if fresh else "+"}f"(sum[{i}])' for i in range(sums))
    if left == "shared":
        a, b, add = f"%{sums}", f"%{sums + 1}", "0" if fresh else "1"
        parameters, given, turned = "uint64 a, uint64 b", '"l"(a), "l"(b)', "0, 0"
    else:
        a, b, add = "{" + ", ".join(f"%{sums + i}" for i in range(4)) + "}", f"%{sums + 4}", f"%{sums + 5}"
        parameters, turned = "const uint32* a, uint64 b, int add", "1"
        given = ", ".join(f'"r"(a[{i}])' for i in range(4)) + ', "l"(b), "r"(add)'
    return f"""
template <> __device__ void {function}(float* sum, {parameters}) {{
    asm volatile("{{ .reg .pred add; setp.ne.b32 add, {add}, 0;"
                 " wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind} {{{", ".join(f"%{i}" for i in range(sums))}}},"
                 " {a}, {b}, add, 1, 1, {turned}; }}"
                 : {outputs} : {given});
}}
"""  # noqa: E501


def wgmma_products(*columns: int) -> str:
    """CUDA for both products of attention: queries times so many keys, and weights times values."""
    products = [
        "".join(
            wgmma(f"{function}<{element}, {N}>", kind, N, "shared")
            for N in sorted(set(columns))
            for function in ("begin", "look")
        )
        + "".join(wgmma(f"gather<{element}, {D}>", kind, D, "registers") for D in HEADS)
        for element, kind in (("half", "f16"), ("bfloat", "bf16"))
    ]
    return WGMMA + "".join(products)
