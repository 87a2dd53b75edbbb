"""The clock, the roofs and the identity of a GPU, for the kernel ladders that run on one."""

import contextlib
import functools
import importlib
import importlib.util
import platform
import statistics
import subprocess
import sys

from common.cuda import CUDAError, Program, processors

UNIT = "TFLOP/s", 1.0  # what a table shows, and what one is in TFLOP/s
FLUSH = 1 << 29  # bytes written between two timings: eight times the L2 of an H200, and 0.1 ms for the host to queue

# The fewest instructions that keep a unit busy: what they reach is the roof of every rung. The tensor probe multiplies
# noise, because a chip multiplying zeros stays cooler and clocks higher.
TENSOR_PROBE = r"""
typedef unsigned long long uint64;
extern "C" __global__ void __launch_bounds__(256, 1) fp16(float* out, int rounds) {  // two groups of four warps
    extern __shared__ char shared[];
    unsigned* noise = (unsigned*)shared;
    for (unsigned i = threadIdx.x, bits = threadIdx.x; i < 24576; i += 256)
        noise[i] = (bits = bits * 1664525u + 1013904223u) & 0xBBFFBBFFu;  // halves of magnitude below 2
    __syncthreads();
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    const unsigned base = (unsigned)__cvta_generic_to_shared(shared);
    const uint64 x = (uint64)1 << 62 | (uint64)64 << 32 | base >> 4;
    const uint64 w = x + (32768 >> 4) | (uint64)512 << 16;
    float sum[128] = {};
    for (int r = 0; r < rounds; ++r) {
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        for (int k = 0; k < 4; ++k)
            asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {@SUMS@}, %128, %129, 1, 1, 1, 0, 1;"
                         : @OUTPUTS@ : "l"(x + 2 * k), "l"(w + 128 * k));
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    }
    float total = 0;
    for (int i = 0; i < 128; ++i) total += sum[i];
    out[blockIdx.x * 256 + threadIdx.x] = total;
}
""".replace("@SUMS@", ", ".join(f"%{i}" for i in range(128)))
TENSOR_PROBE = TENSOR_PROBE.replace("@OUTPUTS@", ", ".join(f'"+f"(sum[{i}])' for i in range(128)))

PROBES = r"""
extern "C" __global__ void nothing() {}

extern "C" __global__ void fp32(float* out, int rounds) {  // 8 independent chains of multiply-adds a thread
    float a[8], scale = threadIdx.x * 1e-9f + 0.5f;
    for (int i = 0; i < 8; ++i) a[i] = threadIdx.x + i;
    for (int r = 0; r < rounds; ++r)
#pragma unroll
        for (int i = 0; i < 64; ++i) a[i % 8] = fmaf(a[i % 8], scale, 1.0f);
    float sum = 0;
    for (int i = 0; i < 8; ++i) sum += a[i];
    out[(long long)blockIdx.x * blockDim.x + threadIdx.x] = sum;
}
"""


def missing() -> str | None:
    """Why nothing can run here, and the next step; None where it can."""
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed: pip install 'lesson[cuda13x]' (or cuda12x) on a machine with an NVIDIA GPU"
    try:
        import cupy

        cupy.cuda.runtime.getDeviceCount()
    except Exception as error:  # CuPy's own kinds, and whatever its shared libraries raise while loading
        return f"CuPy finds no GPU ({' '.join(str(error).split())[:80]}): run this on a machine with an NVIDIA GPU"
    return None


def alone():
    """Nothing here competes with a kernel for the GPU's time."""
    return contextlib.nullcontext()


def poison(shape) -> None:
    """Leave NaN where the pool will hand out the next array of this size: an element nobody writes is then seen."""
    import cupy

    for dtype in ("float32", "float16"):
        cupy.full(shape, cupy.nan, dtype)


@functools.cache
def _flush_buffer():
    import cupy

    return cupy.empty(FLUSH // 4, "float32")


def once(call) -> float:
    """Milliseconds of one call between two events, L2 flushed before."""
    import cupy

    start, stop = cupy.cuda.Event(), cupy.cuda.Event()
    _flush_buffer().fill(1)
    start.record()
    call()
    stop.record()
    stop.synchronize()
    return cupy.cuda.get_elapsed_time(start, stop)


def fp32_peak() -> float:
    """TFLOP/s of multiply-adds that touch no memory, as the GPU runs now."""
    import cupy
    import numpy

    blocks, threads, rounds = processors() * 8, 256, 4096
    program, out = Program(PROBES, (), ("sm_75",)), cupy.empty(blocks * threads, "float32")
    times = [once(lambda: program.launch("fp32", blocks, threads, (out, numpy.int32(rounds)))) for _ in range(7)]
    return 2 * 64 * rounds * blocks * threads / statistics.median(times) / 1e9


def fp16_peak(kind: str = "f16") -> float | None:
    """TFLOP/s of wgmma on operands that stay in shared memory; None on a GPU without it. `kind` is PTX's: f16, bf16."""
    import cupy
    import numpy

    blocks, rounds = processors(), 4096
    source = TENSOR_PROBE.replace("f32.f16.f16", f"f32.{kind}.{kind}")
    program, out = Program(source, (), ("sm_90a",)), cupy.empty(blocks * 256, "float32")
    try:
        program.kernel("fp16", 98304)
    except CUDAError:
        return None
    call = functools.partial(program.launch, "fp16", blocks, 256, (out, numpy.int32(rounds)), 98304)
    return 2 * 4 * rounds * blocks * 2 * 64 * 256 * 16 / statistics.median(once(call) for _ in range(7)) / 1e9


def peaks(dtypes) -> dict[str, float | None]:
    """TFLOP/s of each type that has a roof here, as the GPU runs now."""
    measured = {"float32": fp32_peak, "float16": fp16_peak, "bfloat16": functools.partial(fp16_peak, "bf16")}
    return {dtype: measured[dtype]() for dtype in measured if dtype in dtypes}


def memory(call) -> dict[str, float]:
    """MB of device memory of a bound call (functools.partial), by CuPy's and PyTorch's allocators.

    peak_mb is the most that was in use, operands included; beyond_mb what of it was neither operand nor result.
    """
    import cupy

    class Held(cupy.cuda.MemoryHook):
        name, now, most = "held", 0, 0

        def malloc_postprocess(self, **kwargs):
            self.now += kwargs["mem_size"]
            self.most = max(self.most, self.now)

        def free_postprocess(self, **kwargs):
            self.now -= kwargs["mem_size"]

    torch = sys.modules.get("torch")
    if torch:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    with Held() as held:
        result = call()
    taken = held.most + (torch.cuda.max_memory_allocated() - before if torch else 0)
    result = result if isinstance(result, tuple) else (result,)
    operands, results = (sum(getattr(a, "nbytes", 0) for a in arrays) for arrays in (call.args, result))
    return {"peak_mb": (operands + taken) / 1e6, "beyond_mb": (taken - results) / 1e6}


def launch_ms() -> float:
    """What an empty kernel takes under the same clock: the floor of every time here."""
    program = Program(PROBES, (), ("sm_75",))
    return statistics.median(once(lambda: program.launch("nothing", 1, 1, ())) for _ in range(50))


def name() -> str:
    """The GPU's marketing name."""
    import cupy

    return cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()


def machine() -> dict:
    """GPU, clocks as found, versions, commit and whether the tree had changes."""
    import cupy

    def output(*command):
        try:
            return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
        except OSError:
            return ""

    properties = cupy.cuda.runtime.getDeviceProperties(0)
    versions = {"python": platform.python_version()}
    for package in ("cupy", "numpy", "torch", "triton"):
        try:
            versions[package] = importlib.import_module(package).__version__
        except ImportError:
            versions[package] = None
    query = "--query-gpu=driver_version,clocks.sm,clocks.max.sm,power.limit,temperature.gpu"
    return {
        "gpu": name(),
        "processors": properties["multiProcessorCount"],
        "l2_mb": properties["l2CacheSize"] / 2**20,
        "cuda_runtime": cupy.cuda.runtime.runtimeGetVersion(),
        "driver, sm clock, its maximum, power limit, temperature": output("nvidia-smi", query, "--format=csv,noheader"),
        "cpu": platform.processor() or platform.machine(),
        **versions,
        "commit": commit if len(commit := output("git", "rev-parse", "HEAD")) == 40 else None,
        "dirty": bool(output("git", "status", "--porcelain")),
    }
