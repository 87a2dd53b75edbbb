"""What a kernel ladder needs: right or wrong against float64, time beside the baselines, and one table.

`python -m common.kernel_ladder gemm --save DIR` checks and times every rung on the GPU of this machine.
"""

import argparse
import csv
import functools
import hashlib
import importlib
import json
import math
import platform
import re
import statistics
import subprocess
import sys
import types
from pathlib import Path

from common.cuda import CUDAError, Program, processors

SCHEMA = 1
FLUSH = 1 << 29  # bytes written between two timings: eight times the L2 of an H200, and 0.1 ms for the host to queue
OVERHEAD = 5  # a time below this many launches says more about launching than about the kernel

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


def ladder(name: str):
    """The ladder's package, which declares its stages, shapes, formulas, oracle and baselines."""
    return importlib.import_module(f"stages.{name}")


def entry(rungs, stage: str):
    """The function that a rung is called by."""
    return getattr(importlib.import_module(f"{rungs.__name__}.{stage}"), rungs.ENTRY)


def variant(rungs, stage: str, **constants):
    """The entry function of a rung with some of its module constants bound to other values."""
    path = Path(rungs.__file__).parent / f"{stage}.py"
    source = path.read_text()
    for name, value in constants.items():
        source, found = re.subn(rf"^{name} = [^#\n]*", f"{name} = {value}  ", source, flags=re.M)
        if not found:
            raise ValueError(f"{path.name} has no constant {name}")
    module = types.ModuleType(f"{stage}_variant")
    exec(compile(source, str(path), "exec"), module.__dict__)
    return getattr(module, rungs.ENTRY)


def verdict(out, exact, size, rounding: float, sums: float, tiny: float, nmse: float) -> dict:
    """Errors of `out` against float64 `exact`: max and mean absolute, NMSE, and the worst share of the allowance.

    Each element may be off by two roundings of its own value, by `sums` of `size` (|x| @ |w|), and by `tiny`, the
    step below which its type has no relative precision: so one wrong element fails.
    """
    import cupy

    error = cupy.abs(out.astype("float64") - exact)
    share = float((error / (2 * rounding * cupy.abs(exact) + sums * size + tiny)).max())
    mean = float((error**2).sum() / ((exact**2).sum() + 1e-300))
    return {
        "max_abs": float(error.max()),
        "mean_abs": float(error.mean()),
        "nmse": mean,
        "allowance": share,
        "right": share <= 1 and (mean <= nmse or exact.size < 1000),  # NaN is neither
    }


def poison(shape) -> None:
    """Leave NaN where the pool will hand out the next array of this size: an element nobody writes is then seen."""
    import cupy

    for dtype in ("float32", "float16"):
        cupy.full(shape[:2], cupy.nan, dtype)


def check(rungs, stage: str, shape, dtype: str, seed: int = 0) -> dict:
    """One rung on random data of one shape, against the ladder's oracle."""
    x, w = rungs.inputs(shape, dtype, seed)
    poison(shape)
    return {
        "stage": stage,
        "dtype": dtype,
        "shape": shape,
        **verdict(entry(rungs, stage)(x, w), *rungs.oracle(x, w), **rungs.TOLERANCE[dtype]),
    }


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


def interleaved(calls: dict, budget_ms: float, most: int = 30) -> dict[str, list[float]]:
    """Samples in ms of each call, taken in turn so that a drifting clock meets all alike; 3 to `most` of each."""
    first = {name: (once(call), once(call))[1] for name, call in calls.items()}
    counts = {name: max(3, min(most, int(budget_ms / ms))) for name, ms in first.items()}
    samples = {name: [] for name in calls}
    for i in range(max(counts.values())):
        for name, call in calls.items():
            if i < counts[name]:
                samples[name].append(once(call))
    return samples


def summary(samples: list[float]) -> dict:
    """Median, min, sample standard deviation and every sample, in ms."""
    spread = statistics.stdev(samples) if len(samples) > 1 else None
    return {"median": statistics.median(samples), "min": min(samples), "stdev": spread, "samples": samples}


def fp32_peak() -> float:
    """TFLOP/s of multiply-adds that touch no memory, as the GPU runs now."""
    import cupy
    import numpy

    blocks, threads, rounds = processors() * 8, 256, 4096
    program, out = Program(PROBES, (), ("sm_75",)), cupy.empty(blocks * threads, "float32")
    times = [once(lambda: program.launch("fp32", blocks, threads, (out, numpy.int32(rounds)))) for _ in range(7)]
    return 2 * 64 * rounds * blocks * threads / statistics.median(times) / 1e9


def fp16_peak() -> float | None:
    """TFLOP/s of wgmma on operands that stay in shared memory; None on a GPU without it."""
    import cupy
    import numpy

    blocks, rounds = processors(), 4096
    program, out = Program(TENSOR_PROBE, (), ("sm_90a",)), cupy.empty(blocks * 256, "float32")
    try:
        program.kernel("fp16", 98304)
    except CUDAError:
        return None
    call = functools.partial(program.launch, "fp16", blocks, 256, (out, numpy.int32(rounds)), 98304)
    return 2 * 4 * rounds * blocks * 2 * 64 * 256 * 16 / statistics.median(once(call) for _ in range(7)) / 1e9


def launch_ms() -> float:
    """What an empty kernel takes under the same clock: the floor of every time here."""
    program = Program(PROBES, (), ("sm_75",))
    return statistics.median(once(lambda: program.launch("nothing", 1, 1, ())) for _ in range(50))


def source_digest(rungs, stage: str) -> str:
    """SHA-256 of what a rung compiles, its CUDA source and options, or of its file: which code a record measured."""
    module = importlib.import_module(f"{rungs.__name__}.{stage}")
    compiled = f"{module.SOURCE}{module.OPTIONS}" if hasattr(module, "SOURCE") else Path(module.__file__).read_text()
    return hashlib.sha256(compiled.encode()).hexdigest()


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
        "gpu": properties["name"].decode(),
        "processors": properties["multiProcessorCount"],
        "l2_mb": properties["l2CacheSize"] / 2**20,
        "cuda_runtime": cupy.cuda.runtime.runtimeGetVersion(),
        "driver, sm clock, its maximum, power limit, temperature": output("nvidia-smi", query, "--format=csv,noheader"),
        "cpu": platform.processor() or platform.machine(),
        **versions,
        "commit": commit if len(commit := output("git", "rev-parse", "HEAD")) == 40 else None,
        "dirty": bool(output("git", "status", "--porcelain")),
    }


def measure(rungs, shape, dtype: str, roof: dict, floor_ms: float, budget_ms: float = 200) -> list[dict]:
    """Every rung and baseline of one type at one shape: checked, then timed in turn. A wrong rung has no time."""
    x, w = rungs.inputs(shape, dtype, seed=sum(shape))
    exact, size = rungs.oracle(x, w)
    calls = {stage: entry(rungs, stage) for stage, dtypes in rungs.STAGES.items() if dtype in dtypes}
    rows, ready = {}, {}
    for name, call in (calls | rungs.BASELINES).items():
        rows[name] = {"stage": name, "dtype": dtype, "shape": shape}
        try:
            poison(shape)
            rows[name] |= verdict(call(x, w), exact, size, **rungs.TOLERANCE[dtype])
            if rows[name]["right"]:
                ready[name] = functools.partial(call, x, w)
        except ImportError as error:
            rows[name] |= {"right": None, "absent": str(error)}
    for name, call in rungs.BOUNDS.items():  # no matmul, so nothing to check
        rows[name] = {"stage": name, "dtype": dtype, "shape": shape}
        ready[name] = functools.partial(call, x, w)
    del exact, size
    times = {name: summary(samples) for name, samples in interleaved(ready, budget_ms).items()}
    for name, ms in times.items():
        tflops = rungs.flops(*shape) / ms["median"] / 1e9
        others = [*rungs.BASELINES, *rungs.BOUNDS]
        rows[name] |= {
            "ms": ms,
            "tflops": tflops,
            "gbps": rungs.traffic(*shape, dtype) / ms["median"] / 1e6,
            "percent_peak": 100 * tflops / roof[dtype] if roof.get(dtype) else None,
            "ratio_to_baseline": {other: times[other]["median"] / ms["median"] for other in others if other in times},
            "overhead_bound": ms["median"] < OVERHEAD * floor_ms,
        }
    return list(rows.values())


def table(rows: list[dict]) -> str:
    """One line a row: shape, rung, ms, TFLOP/s, GB/s, share of peak, ratio to each baseline and bound, errors."""
    others = list(dict.fromkeys(other for row in rows for other in row.get("ratio_to_baseline", {})))
    lines = ["      M       N       K  type     rung                 ms  TFLOP/s   GB/s  peak  "]
    lines[0] += " ".join(f"{other:>6}" for other in others) + "  max error"
    for row in rows:
        m, n, k = row["shape"]
        line = f"{m:7} {n:7} {k:7}  {row['dtype']:8} {row['stage']:12}"
        if "ms" in row:
            peak = f"{row['percent_peak']:4.0f}%" if row["percent_peak"] else "    -"
            line += f" {row['ms']['median']:10.4f} {row['tflops']:8.2f} {row['gbps']:6.0f} {peak}  "
            line += " ".join(f"{row['ratio_to_baseline'].get(other, math.nan):6.3f}" for other in others)
            line += f"  {row.get('max_abs', math.nan):9.2e}" + ("  overhead-bound" if row["overhead_bound"] else "")
        else:
            line += f"  {row.get('absent') or 'WRONG, so no time: error ' + format(row['max_abs'], '.2e')}"
        lines.append(line)
    return "\n".join(lines)


METRICS = {  # of Nsight Compute's raw page, by the names that a record and a chapter use
    "gpu__time_duration.sum": "seconds",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "compute_percent",
    "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed": "memory_percent",
    "launch__registers_per_thread": "registers",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "occupancy_percent",
    "smsp__issue_active.avg.pct_of_peak_sustained_active": "issue_percent",
    "smsp__inst_executed.sum": "instructions",
    "l1tex__t_sector_hit_rate.pct": "l1_hit_percent",
    "lts__t_sector_hit_rate.pct": "l2_hit_percent",
    "dram__bytes_read.sum": "dram_bytes_read",
    "smsp__sass_average_data_bytes_per_sector_mem_global_op_ld.ratio": "bytes_used_per_sector",
    "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum": "global_load_requests",
    "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum": "global_load_sectors",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum": "shared_wavefronts",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum": "bank_conflicts",
}
STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio")
UNITS = {"G": 1e9, "M": 1e6, "K": 1e3, "ns": 1e-9, "us": 1e-6, "ms": 1e-3}


def counters(raw: str, names: list[str]) -> list[dict]:
    """Nsight Compute's raw page (CSV), one dict a launch, in base units; `names` says which rung each launch was.

    `stall` is the reason for which a warp waited most, and `stall_cycles` how long for each instruction issued.
    """
    titles, units, *launches = csv.reader(line for line in raw.splitlines() if line.startswith('"'))
    found = []
    for name, launch in zip(names, launches, strict=True):
        row, stalls = {"stage": name}, {}
        for title, unit, text in zip(titles, units, launch, strict=True):
            if title in METRICS and text:
                scale = UNITS.get(unit, UNITS.get(unit[:1], 1) if unit.endswith("byte") else 1)
                row[METRICS[title]] = float(text.replace(",", "")) * scale
            elif (match := STALL.fullmatch(title)) and match[1] not in ("selected", "not_selected"):
                stalls[match[1]] = float(text.replace(",", ""))
        row["stall"] = max(stalls, key=stalls.get, default=None)
        row["stall_cycles"] = stalls.get(row["stall"])
        found.append(row)
    return found


def estimates(details: str) -> list[float]:
    """The largest speed-up in percent that Nsight Compute's details page hopes for, launch by launch."""
    launches = re.split(r"^  \w+ \(\d+, \d+, \d+\)x\(", details, flags=re.M)[1:]
    return [max(map(float, re.findall(r"Est\. Speedup: ([\d.]+)%", text)), default=0.0) for text in launches]


def profile(rungs, shapes, stages) -> None:
    """Launch each rung once a shape where Nsight Compute looks (--profile-from-start off), compiled and warm before."""
    import cupy

    for shape in shapes:
        for stage in stages:
            x, w = rungs.inputs(shape, rungs.STAGES[stage][0], seed=1)
            call = entry(rungs, stage)
            call(x, w)
            _flush_buffer().fill(1)
            cupy.cuda.Device().synchronize()
            cupy.cuda.profiler.start()
            call(x, w)
            cupy.cuda.Device().synchronize()
            cupy.cuda.profiler.stop()


FIGURE = re.compile(r"(\d[\d,]*(?:\.\d+)?)(<!--= (.*?) -->)")


def figures(text: str, reports: Path) -> str:
    """A chapter with each number that carries a formula, as in `2<!--= ms("naive") / ms("tiled") -->`, computed anew.

    The formula reads the records in `reports`: ms, tflops and ratio (to cuBLAS) of a rung at a shape, counter(rung,
    name), and load(file) for the rest. A number keeps its count of decimals.
    """

    @functools.cache
    def load(name):
        return json.loads((reports / f"{name}.json").read_text())

    def row(stage, *shape, dtype=None):
        shape = [*shape] * 3 if len(shape) == 1 else [*shape]
        rows = [r for r in load("ladder")["rows"] if r["stage"] == stage and r["shape"] == shape]
        return next(r for r in rows if dtype in (None, r["dtype"]))

    scope = {
        "load": load,
        "row": row,
        "ms": lambda stage, *shape, **of: row(stage, *(shape or (4096,)), **of)["ms"]["median"],
        "tflops": lambda stage, *shape, **of: row(stage, *(shape or (4096,)), **of)["tflops"],
        "ratio": lambda stage, *shape, to="cublas", **of: row(stage, *shape, **of)["ratio_to_baseline"][to],
        "counter": lambda stage, name, at=0: [r for r in load("counters")["rows"] if r["stage"] == stage][at][name],
        "next": next,
        "sum": sum,
    }

    def again(match):
        shown, mark, formula = match.groups()
        decimals = len(shown.partition(".")[2])
        return f"{eval(formula, {'__builtins__': {}}, scope):,.{decimals}f}".replace(",", "") + mark

    return FIGURE.sub(again, text)


def main(arguments=None) -> int:
    """Check every rung on odd shapes, then measure all; exit 5 where a rung is wrong."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("ladder")
    parser.add_argument("--save", type=Path, help="folder for the record")
    parser.add_argument("--budget", type=float, default=200, help="ms of samples for one rung at one shape")
    parser.add_argument("--profile", metavar="M,N,K", action="append", help="launch each rung once, for ncu to see")
    parser.add_argument("--chapters", type=Path, metavar="REPORTS", help="renew the chapters' figures")
    options = parser.parse_args(arguments)
    rungs = ladder(options.ladder)
    if options.profile:
        cuda = [stage for stage in rungs.STAGES if stage != "triton"]
        profile(rungs, [tuple(map(int, shape.split(","))) for shape in options.profile], cuda)
        return 0
    if options.chapters:
        for path in sorted(Path(rungs.__file__).parent.glob("*.md")):
            path.write_text(figures(path.read_text(), options.chapters))
        return 0
    odd = [
        check(rungs, stage, shape, dtype, seed=i)
        for i, shape in enumerate(rungs.ODD_SHAPES)
        for stage, dtypes in rungs.STAGES.items()
        for dtype in dtypes
    ]
    wrong = [row for row in odd if not row["right"]]
    for row in wrong:
        print(f"wrong: {row}", file=sys.stderr)
    print(f"odd shapes: {len(odd) - len(wrong)} of {len(odd)} right", flush=True)
    floor = launch_ms()
    roof = {"float32": fp32_peak(), "float16": fp16_peak()}
    rows = []
    for dtype in sorted({dtype for dtypes in rungs.STAGES.values() for dtype in dtypes}):
        for shape in rungs.SHAPES:
            rows += measure(rungs, shape, dtype, roof, floor, options.budget)
            print(f"{dtype} {shape} done", file=sys.stderr, flush=True)
    record = {
        "schema": SCHEMA,
        "ladder": options.ladder,
        "machine": machine(),
        "sources": {stage: source_digest(rungs, stage) for stage in rungs.STAGES},
        "launch_ms": floor,
        "peak_tflops": roof,
        "odd_shapes": odd,
        "rows": rows,
    }
    if options.save:
        options.save.mkdir(parents=True, exist_ok=True)
        (options.save / "ladder.json").write_text(json.dumps(record, indent=1) + "\n")
    print(table(rows))
    return 5 if wrong or any(row.get("right") is False for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
