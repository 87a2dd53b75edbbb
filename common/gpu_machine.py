"""The GPU as a machine with roofs, so that a GPU stage is held against the chip it runs on."""

import functools
import hashlib
import json
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import median

import platformdirs

from common import gpu, machine, roofline
from common.cuda import Program, processors
from common.machine import MB, Machine, slug

SIZES = tuple(2 * MB << i for i in range(10))  # 2 MB, which keep every processor at work, … 1 GB
ROUNDS = 7

# The fewest instructions that keep reading, or a tensor core, busy: what they reach is the roof. Eight chains of
# multiply-adds a warp hide the latency of one; operands are noise, since a chip that multiplies zeros clocks higher.
PROBES = r"""
extern "C" __global__ void __launch_bounds__(512)
reading(const uint4* x, uint4* out, long long size, int repeats) {  // past the L1, which no weight outlives a token in
    uint4 sum = {};
    const long long step = (long long)gridDim.x * 512, first = (long long)blockIdx.x * 512 + threadIdx.x;
    for (int r = 0; r < repeats; ++r) {
        long long i = first;
        for (; i + 3 * step < size; i += 4 * step) {
            const uint4 a = __ldcg(x + i), b = __ldcg(x + i + step);
            const uint4 c = __ldcg(x + i + 2 * step), d = __ldcg(x + i + 3 * step);
            sum.x ^= a.x ^ b.x ^ c.x ^ d.x, sum.y += a.y ^ b.y ^ c.y ^ d.y;
            sum.z ^= a.z ^ b.z ^ c.z ^ d.z, sum.w += a.w ^ b.w ^ c.w ^ d.w;
        }
        for (; i < size; i += step) {
            const uint4 a = __ldcg(x + i);
            sum.x ^= a.x, sum.y += a.y, sum.z ^= a.z, sum.w += a.w;
        }
    }
    if (sum.x == 1 && sum.y == 2 && sum.z == 3 && sum.w == 4) out[0] = sum;  // or the loads would go
}

extern "C" __global__ void __launch_bounds__(256) tensor(float* out, int rounds) {
#if __CUDA_ARCH__ >= 800
    unsigned a[4], b[2];
    float sum[8][4] = {};
    for (int i = 0; i < 4; ++i) a[i] = (threadIdx.x * 1664525u + 1013904223u * i) & 0xBBFFBBFFu;
    for (int i = 0; i < 2; ++i) b[i] = (threadIdx.x * 22695477u + 2531011u * i) & 0xBBFFBBFFu;
    for (int r = 0; r < rounds; ++r)
#pragma unroll
        for (int i = 0; i < 8; ++i)
            asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                         "{%0,%1,%2,%3};" : "+f"(sum[i][0]), "+f"(sum[i][1]), "+f"(sum[i][2]), "+f"(sum[i][3])
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    float total = 0;
    for (int i = 0; i < 8; ++i) total += sum[i][0] + sum[i][1] + sum[i][2] + sum[i][3];
    out[blockIdx.x * 256 + threadIdx.x] = total;
#endif
}
"""
PROGRAM = Program(PROBES, (), ("sm_50",))


def of(stage: str, config) -> Machine:
    """What a stage runs on: a GPU for one with CUDA source, else the CPU with the walks that its expectation wants.

    Raises StageError (exit code 4) where there is no GPU for a stage that needs one.
    """
    if gpu.on_gpu(stage):
        gpu.backend()
        return measure()
    return machine.measure(walks=roofline.walks([stage], config))


def identify() -> Machine:
    """This GPU, nothing measured yet; `versions` names what runs it and the CPU beside it."""
    import cupy

    runtime, cpu = cupy.cuda.runtime, machine.identify()
    properties = runtime.getDeviceProperties(0)
    name = properties["name"].decode()
    versions = {**cpu.versions, "cpu": cpu.name, "cupy": cupy.__version__}
    versions |= {"cuda": runtime.runtimeGetVersion(), "driver": runtime.driverGetVersion()}
    return replace(cpu, name=name, slug=slug(name), memory=properties["totalGlobalMem"], versions=versions)


@functools.cache
def measure() -> Machine:
    """This GPU with its roofs, from the user's cache where it was measured before; the first time takes a second."""
    me = identify()
    key = hashlib.sha256((json.dumps([me.name, me.versions]) + Path(__file__).read_text("utf-8")).encode()).hexdigest()
    root = Path(os.environ.get("LESSON_CACHE") or platformdirs.user_cache_dir("lesson")) / "machine"
    path = root / f"{me.slug}-{key[:12]}.json"
    with suppress(OSError, ValueError, TypeError, KeyError):
        return Machine.from_json(json.loads(path.read_text("utf-8")))
    reads, rate = read_curve(), multiply_adds()
    found = replace(me, read_gbs=reads, read_all_gbs=reads, fma_gflops=rate, fma_all_gflops=rate)
    machine.save(found, path)
    return found


def read_curve() -> tuple[tuple[int, float], ...]:
    """(bytes, GB/s) of reading that many over and over, the best of ROUNDS: below the L2's size, from there."""
    import cupy
    import numpy

    noise, out = cupy.random.default_rng(0).integers(0, 255, SIZES[-1], dtype=numpy.uint8), cupy.empty(4, numpy.uint32)
    points = []
    for size in SIZES:
        repeats = max(1, SIZES[-1] // size)
        arguments = noise, out, numpy.int64(size // 16), numpy.int32(repeats)
        took = min(
            timed(lambda a=arguments: PROGRAM.launch("reading", 2 * processors(), 512, a)) for _ in range(ROUNDS)
        )
        points.append((size, repeats * size / took / 1e6))
    return tuple(points)


def multiply_adds() -> float:
    """GFLOP/s of the fastest multiply-adds that a stage may use: FP16 tensor cores where they are, else FP32."""
    import cupy
    import numpy

    from common import kernel_gpu

    rates, rounds, blocks = [kernel_gpu.fp32_peak(), kernel_gpu.fp16_peak() or 0], 2048, 4 * processors()
    if int(cupy.cuda.Device().compute_capability) >= 80:
        out = cupy.empty(blocks * 256, numpy.float32)
        took = median(
            timed(lambda: PROGRAM.launch("tensor", blocks, 256, (out, numpy.int32(rounds)))) for _ in range(7)
        )
        rates.append(blocks * 8 * rounds * 8 * 2 * 16 * 8 * 16 / took / 1e9)
    return 1e3 * max(rates)


def launched(*arguments):
    return functools.partial(PROGRAM.launch, *arguments)


def timed(call) -> float:
    """Milliseconds between two events around a call, warm."""
    import cupy

    start, stop = cupy.cuda.Event(), cupy.cuda.Event()
    call()
    start.record()
    call()
    stop.record()
    stop.synchronize()
    return cupy.cuda.get_elapsed_time(start, stop)
