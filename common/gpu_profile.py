"""`lesson profile` of a GPU stage: kernels by time, copies, and what each call into CUDA cost the host.

Three runs tell three things, since watching one disturbs another: the step as it is; each kernel between two events,
behind a delay that lets the host get ahead, so that no gap is counted; and each call into CUDA on the host's clock,
once as it is and once with the wait for earlier kernels on a clock of its own.
"""

import csv
import json
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import median
from types import SimpleNamespace

from common import gpu, gpu_machine, harness, records, roofline, show
from common.cuda import Program
from common.job import Job
from common.stage import StageError

ROUNDS = 3  # of the step as it is
DELAY = 80_000  # cycles, some 40 us: longer than the host takes to queue two events and a kernel
DELAYED = Program(
    r"""
extern "C" __global__ void delay(long long cycles) {
    const long long began = clock64();
    while (clock64() - began < cycles) {}
}
extern "C" __global__ void nothing() {}
""",
    archs=("sm_50",),
)

# ---- the worker's side -----------------------------------------------------------------------------------------


def profile_run(request: harness.Request) -> dict:
    """Profile one stage in this process. Raises what the stage raises."""
    import cupy
    import numpy as np

    from common.model import open_model
    from common.stage import load_stage

    stage = load_stage(request.stage)
    settle = gpu.settler(stage)
    jit_ms, _ = harness.compile_all(stage, request)
    cupy.get_default_memory_pool().free_all_blocks()  # what the first layer alone left there
    before = used()
    started = time.perf_counter()
    gguf = open_model(request.model, request.layers)
    context = request.context or gguf.config.context
    model = stage.load(gguf, context, request.threads)
    settle()
    load_ms, loaded = (time.perf_counter() - started) * 1e3, used()
    n = min(request.n, context - len(request.ids) + 1)

    def steps(watch):
        """One generation, step by step: (ms, what watch saw of it)."""
        found, tokens, rows = [], stage.generate(model, request.ids, n), []
        for _ in range(n):
            settle()
            begun = time.perf_counter()
            token, row = next(tokens)
            settle()
            found.append(((time.perf_counter() - begun) * 1e3, watch()))
            rows.append((int(token), np.array(row)))
        return found, rows

    steps(lambda: None)
    plain = [steps(lambda: None) for _ in range(ROUNDS)]
    with Kernels(matrices(model)) as kernels:
        timed = [seen for _, seen in steps(kernels.taken)[0]]
    with Calls(apart=False) as calls:
        steps(calls.taken)
        together = steps(calls.taken)[0]
    with Calls(apart=True) as calls:
        steps(calls.taken)
        apart = [seen for _, seen in steps(calls.taken)[0]]
        scratch = calls.most
    if request.rows_file:
        np.save(request.rows_file, np.stack([row for _, row in plain[-1][1]]))

    def one(part: slice, T: int) -> dict:
        ms = [sum(ms for ms, _ in found[part]) / len(found[part]) for found, _ in plain]
        return {
            "new_tokens": T,
            "steps": len(timed[part]),
            "ms": median(ms),
            "samples_ms": ms,
            "watched_ms": sum(ms for ms, _ in together[part]) / len(together[part]),
            "kernels": summed_kernels(timed[part]),
            "calls": summed_calls([seen for _, seen in together[part]], apart[part]),
        }

    return {
        "output_ids": [token for token, _ in plain[-1][1]],
        "prefill": one(slice(0, 1), len(request.ids)),
        "decode": one(slice(1, None), 1) if n > 1 else None,
        "event_us": Kernels.floor_us(),
        "load_ms": load_ms,
        "jit_ms": jit_ms,
        "gpu_mb": {"model": (loaded - before) / 1e6, "peak": (loaded - before + scratch) / 1e6, "cuda": before / 1e6},
    }


def used() -> int:
    """Bytes of the GPU's memory that are taken, by whomever."""
    import cupy

    free, total = cupy.cuda.runtime.memGetInfo()
    return total - free


def matrices(model) -> dict[int, tuple]:
    """Address of each weight matrix on the GPU -> (its name, N, K, bytes)."""
    weights, held = model.weights, {}
    named = [(name, w) for layer in weights.layers for name, w in layer._asdict().items()]
    for name, w in [*named, ("output", weights.output), ("token_embd", weights.token_embd)]:
        if hasattr(getattr(w, "raw", None), "data") and hasattr(w.raw.data, "ptr"):
            held.setdefault(w.raw.data.ptr, (name, w.N, w.K, w.raw.nbytes))
    return held


class Kernels:
    """Puts two events around every kernel that Program launches, a delay before them."""

    def __init__(self, held: dict[int, tuple]):
        self.held, self.log, self.delay = held, [], DELAYED.kernel("delay")

    def __enter__(self):
        import cupy
        import numpy

        self.kept = kept = Program.launch

        def launch(program, name, blocks, threads, args, *rest, **more):
            start, stop = cupy.cuda.Event(), cupy.cuda.Event()
            self.delay((1,), (1,), (numpy.int64(DELAY),))
            start.record()
            kept(program, name, blocks, threads, args, *rest, **more)
            stop.record()
            owners = (self.held.get(a.data.ptr) for a in args if hasattr(a, "data") and hasattr(a.data, "ptr"))
            self.log.append((name, next(filter(None, owners), None), start, stop))

        Program.launch = launch
        return self

    def __exit__(self, *error):
        Program.launch = self.kept

    def taken(self) -> list[tuple]:
        """(kernel, weight or None, ms) of each launch since this was last asked. The GPU must be done."""
        import cupy

        found = [(name, weight, cupy.cuda.get_elapsed_time(a, b)) for name, weight, a, b in self.log]
        self.log.clear()
        return found

    @classmethod
    def floor_us(cls) -> float:
        """What a kernel that does nothing seems to take."""
        import cupy

        with cls({}) as kernels:
            for _ in range(50):
                DELAYED.launch("nothing", 1, 1, ())
            cupy.cuda.runtime.deviceSynchronize()
            return 1e3 * median(ms for *_, ms in kernels.taken())


class Calls:
    """Counts the calls into CUDA and the host's time in them; apart: the wait for earlier kernels on its own clock.

    Real allocations and frees are seen by an allocator that makes them itself: under CuPy's pool, and instead of none.
    """

    def __init__(self, apart: bool):
        self.apart, self.log, self.inner = apart, {}, [0.0]
        self.sizes, self.live, self.most = {}, 0, 0

    def __enter__(self):
        import cupy

        self.runtime = cupy.cuda.runtime
        allocator = cupy.cuda.PythonFunctionAllocator(self.malloc, self.free)
        pool = cupy.cuda.MemoryPool(allocator.malloc)
        using = cupy.cuda.using_allocator

        @contextmanager
        def counted(chosen=None):
            with using(chosen or allocator.malloc):
                yield

        self.kept = [
            (cupy.cuda, "using_allocator", using, counted),
            (Program, "launch", Program.launch, self.timed("cudaLaunchKernel", Program.launch)),
            (cupy.ndarray, "get", cupy.ndarray.get, self.timed("cudaMemcpy, GPU to host", cupy.ndarray.get, sizes)),
            (cupy.ndarray, "set", cupy.ndarray.set, self.timed("cudaMemcpy, host to GPU", cupy.ndarray.set, sizes)),
            *(
                (cupy, name, vars(cupy)[name], self.timed("cudaMemcpy, host to GPU", vars(cupy)[name], given))
                for name in ("asarray", "array")
            ),
        ]
        for place, name, _, watched in self.kept:
            setattr(place, name, watched)
        self.pooled = using(pool.malloc)
        self.pooled.__enter__()
        return self

    def __exit__(self, *error):
        self.pooled.__exit__(*error)
        for place, name, call, _ in self.kept:
            setattr(place, name, call)

    def timed(self, name: str, call, size=lambda *_: 0):
        """A call whose own time is logged, less that of the calls within it."""

        def watched(*inputs, **more):
            wait = 0.0
            if self.apart and name not in ("cudaLaunchKernel", "cudaMalloc"):  # which wait for nothing
                started = time.perf_counter()
                self.runtime.deviceSynchronize()
                wait = time.perf_counter() - started
            self.inner.append(0.0)
            started = time.perf_counter()
            try:
                return call(*inputs, **more)
            finally:
                took, inner = time.perf_counter() - started, self.inner.pop()
                self.inner[-1] += took + wait
                entry = self.log.setdefault(name, [0, 0, 0.0, 0.0])
                for i, grown in enumerate((1, size(*inputs), wait, took - inner)):
                    entry[i] += grown

        return watched

    def malloc(self, size: int, device: int) -> int:
        address = self.timed("cudaMalloc", self.runtime.malloc, lambda size: size)(size)
        self.sizes[address] = size
        self.live += size
        self.most = max(self.most, self.live)
        return address

    def free(self, address: int, device: int) -> None:
        self.live -= self.sizes.pop(address)
        self.timed("cudaFree", self.runtime.free)(address)

    def taken(self) -> dict[str, list]:
        """call -> [how often, bytes, s of waiting, s of its own] since this was last asked."""
        found, self.log = self.log, {}
        return found


def sizes(array, *_) -> int:
    return array.nbytes


def given(source, *_) -> int:
    """Bytes of what is copied to the GPU."""
    import numpy

    return numpy.asarray(source).nbytes if not hasattr(source, "get") else 0


def summed_kernels(steps: list[list[tuple]]) -> list[dict]:
    """Rows by kernel and weight, ms and calls a step."""
    rows: dict[tuple, dict] = {}
    for kernel, weight, ms in (launch for step in steps for launch in step):
        name, N, K, nbytes = weight or (None, None, None, None)
        new = {"kernel": kernel, "weight": name, "N": N, "K": K, "bytes_each": nbytes, "calls": 0, "ms": 0.0}
        row = rows.setdefault((kernel, name, nbytes), new)
        row["calls"] += 1 / len(steps)
        row["ms"] += ms / len(steps)
    return list(rows.values())


def summed_calls(together: list[dict], apart: list[dict]) -> list[dict]:
    """Rows by call, a step: ms of the host as it is; waiting and its own cost where the wait is taken apart."""
    rows = []
    for name in dict.fromkeys(name for step in together for name in step):
        as_is, split = (
            [sum(step.get(name, [0] * 4)[i] for step in steps) / len(steps) for i in range(4)]
            for steps in (together, apart)
        )
        rows.append(
            {
                "call": name,
                "calls": as_is[0],
                "bytes": as_is[1],
                "ms": 1e3 * as_is[3],
                "wait_ms": 1e3 * split[2],
                "own_ms": 1e3 * split[3],
            }  # fmt: skip
        )
    return rows


# ---- the parent's side -----------------------------------------------------------------------------------------


def profile(name: str, job: Job, ncu: bool = False, save: str | None = None) -> dict:
    """Profile, check and record one GPU stage. Raises WrongError, RunError, StageError or AccountingError."""
    from common.run import check

    folder = records.writable(records.folder(save))
    here = gpu_machine.of(name, job.gguf.config)
    with tempfile.TemporaryDirectory() as scratch:
        rows_file = str(Path(scratch) / "rows.npy")
        found = harness.talk("profile", job.request(name, rows_file=rows_file))["profile"]
        agreed = check(name, job, SimpleNamespace(output_ids=found["output_ids"]), rows_file)
    for kind in ("prefill", "decode"):
        if found[kind]:
            judge(found[kind], here, job)
    record = {
        **records.heading(name, job, here),
        **found,
        "counters": counters(job.request(name)) if ncu else None,
        "agreement": agreed._asdict(),
    }
    records.save(record, folder / here.slug / "profile" / records.file_name([record]))
    return record


def judge(one: dict, here, job: Job) -> None:
    """Add shares, and to each matrix its rates and bound on this GPU. Raises AccountingError."""
    one["kernel_ms"] = sum(row["ms"] for row in one["kernels"])
    for row in one["kernels"]:
        row |= {"share": row["ms"] / one["kernel_ms"], "gbs": None, "tflops": None, "bound_ms": None}
        if row["weight"] and row["kernel"] == "matmul":
            T = 1 if row["weight"] == "output" else one["new_tokens"]
            work = roofline.matmul(T, row["K"], row["N"], row["bytes_each"])
            roofline.plausible(work, row["ms"] / row["calls"], here, job.threads)
            row["bound_ms"] = row["calls"] * roofline.bound_ms(work, here, job.threads)
            row["gbs"] = row["calls"] * work.bytes / row["ms"] / 1e6
            row["tflops"] = row["calls"] * work.flops / row["ms"] / 1e9


# ---- Nsight Compute --------------------------------------------------------------------------------------------

COUNTED = {  # ncu's metric -> the name in a record
    "gpu__time_duration.sum": "us",
    "launch__registers_per_thread": "registers",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "occupancy_percent",
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed": "dram_percent",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "compute_percent",
    "lts__t_sector_hit_rate.pct": "l2_hit_percent",
    "smsp__issue_active.avg.pct_of_peak_sustained_active": "issue_percent",
    "smsp__inst_executed.sum": "warp_instructions",
}
MICROSECONDS = {"ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0, "ms": 1e3, "msecond": 1e3}
THOUSANDS = {"K": 1e3, "M": 1e6, "G": 1e9}


def counters(request: harness.Request) -> list[dict]:
    """Nsight Compute's counters of the first layer, by pass, kernel and grid. Raises StageError without ncu."""
    ncu = shutil.which("ncu")
    if ncu is None:
        raise StageError("--ncu needs NVIDIA's Nsight Compute: install it, and put ncu on the PATH", gpu.NEEDS_GPU)
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "ncu.csv"
        options = ["--csv", "--page", "raw", "--log-file", str(log), "--profile-from-start", "off"]
        options += ["--clock-control", "none", "--metrics", ",".join(COUNTED)]
        worker = [sys.executable, "-m", "common.gpu_profile", json.dumps(asdict(request))]
        done = subprocess.run(
            [ncu, *options, *worker], capture_output=True, text=True, cwd=records.ROOT, timeout=600
        )  # fmt: skip
        if done.returncode or not log.exists():
            said = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no reason"]
            raise StageError(f"ncu failed: {said[0][:200]}: see whether it may read this GPU's counters", gpu.NEEDS_GPU)
        return counted(log.read_text(), int(done.stdout.strip().splitlines()[-1]))


def counted(raw: str, prefill: int) -> list[dict]:
    """Rows of ncu's raw page, a mean over launches of one kernel and grid; the first `prefill` are of the prompt."""
    lines = [line for line in raw.splitlines() if line.startswith('"')]
    titles, units, *launches = csv.reader(lines)
    rows: dict[tuple, list] = {}
    for i, launch in enumerate(launches):
        told = dict(zip(titles, zip(launch, units, strict=True), strict=True))
        key = "prefill" if i < prefill else "decode", told["Kernel Name"][0].partition("(")[0], told["Grid Size"][0]
        rows.setdefault(key, []).append({name: value(*told[metric]) for metric, name in COUNTED.items()})
    return [
        {"pass": kind, "kernel": kernel, "grid": grid, "launches": len(found)}
        | {name: sum(one[name] for one in found) / len(found) for name in COUNTED.values()}
        for (kind, kernel, grid), found in rows.items()
    ]


def value(text: str, unit: str) -> float:
    return float(text.replace(",", "")) * MICROSECONDS.get(
        unit, THOUSANDS.get(unit[:1], 1.0) if "inst" in unit else 1.0
    )


def watched_by_ncu(request: harness.Request) -> None:
    """One layer's prompt and the token after it, where ncu looks; then on stdout, how many launches the prompt took."""
    import cupy

    from common.model import open_model
    from common.stage import load_stage

    stage, launches = load_stage(request.stage), []
    gguf = open_model(request.model, 1)
    model = stage.load(gguf, min(gguf.config.context, len(request.ids) + 2), request.threads)
    for _ in stage.generate(model, request.ids, 2):
        pass
    kept = Program.launch
    Program.launch = lambda *given, **more: launches.append(1) or kept(*given, **more)
    cupy.cuda.runtime.deviceSynchronize()
    tokens = stage.generate(model, request.ids, 2)
    cupy.cuda.profiler.start()
    next(tokens)
    cupy.cuda.runtime.deviceSynchronize()
    prompt = len(launches)
    next(tokens)
    cupy.cuda.runtime.deviceSynchronize()
    cupy.cuda.profiler.stop()
    print(prompt)


# ---- what the reader sees --------------------------------------------------------------------------------------


def render(document: dict) -> list:
    """Both passes: kernels and copies, then calls; counters where ncu ran; memory and the machine."""
    shown = []
    for kind in ("prefill", "decode"):
        one = document[kind]
        if one:
            shown += [show.heading(title(kind, one)), kernel_table(one), "", call_table(one), told(one), ""]
            if document["counters"]:
                shown += [counter_table([row for row in document["counters"] if row["pass"] == kind]), ""]
    mb = document["gpu_mb"]
    shown.append(
        f"GPU memory: {mb['model']:,.0f} MB for model and cache, {mb['peak']:,.0f} at most; "
        f"{mb['cuda']:,.0f} more were taken before, by CUDA itself and by others"
    )
    shown.append(show.dim(f"An event pair around a kernel that does nothing shows {document['event_us']:.1f} us."))
    return [*shown, show.dim(show.footer(document))]


def title(kind: str, one: dict) -> str:
    what = f"prefill, {one['new_tokens']} tokens" if kind == "prefill" else "a token after it"
    return f"{what}: {show.number(one['ms'])} ms, of which kernels run {show.number(one['kernel_ms'])}"


def kernel_table(one: dict):
    """Kernels by time, matmul by matrix under it; then copies."""
    rows = show.table("kernel", "share", "ms", "calls", "us each", "GB/s", "TFLOP/s", "x bound")
    whole: dict[str, list[dict]] = {}
    for row in one["kernels"]:
        whole.setdefault(row["kernel"], []).append(row)

    def line(name, parts, **more):
        ms, calls = (sum(part[key] for part in parts) for key in ("ms", "calls"))
        cells = [f"{ms / one['kernel_ms']:.1%}", show.number(ms), f"{calls:,.0f}", show.number(1e3 * ms / calls)]
        bounds = [part["bound_ms"] for part in parts]
        if len(parts) == 1 and bounds[0]:
            cells += [show.number(parts[0]["gbs"]), show.number(parts[0]["tflops"])]
        rows.add_row(
            name, *cells, *[""] * (6 - len(cells)), show.number(ms / sum(bounds)) if all(bounds) else "", **more
        )

    for kernel, parts in sorted(whole.items(), key=lambda item: -sum(part["ms"] for part in item[1])):
        line(kernel, parts)
        if len(parts) > 1:
            for part in sorted(parts, key=lambda part: -part["ms"]):
                line(f"  {part['weight']}", [part], style="dim")
    for row in one["calls"]:
        if row["call"].startswith("cudaMemcpy"):
            size = f"{row['bytes'] / 1e6:,.2f} MB"
            rows.add_row(row["call"].partition(", ")[2], size, show.number(row["own_ms"]), f"{row['calls']:,.0f}",
                         show.number(1e3 * row["own_ms"] / row["calls"]))  # fmt: skip
    return rows


def call_table(one: dict):
    """Calls into CUDA by the host's time, as it is; and how that splits where the wait is taken apart."""
    rows = show.table("call, on the host's clock", "share", "ms", "calls", "waiting ms", "own ms", "own us each")
    for row in sorted(one["calls"], key=lambda row: -row["ms"]):
        rows.add_row(
            row["call"],
            f"{row['ms'] / one['watched_ms']:.1%}",
            show.number(row["ms"]),
            f"{row['calls']:,.0f}",
            show.number(row["wait_ms"]),
            show.number(row["own_ms"]),
            show.number(1e3 * row["own_ms"] / row["calls"]),
        )
    return rows


def told(one: dict) -> str:
    """What the longest call spends its time on."""
    row = max(one["calls"], key=lambda row: row["ms"])
    if row["wait_ms"] > row["own_ms"]:
        return (
            f"{row['call']} takes {row['ms'] / one['watched_ms']:.0%} of the step, but its own cost is "
            f"{row['own_ms'] / one['watched_ms']:.1%}: the rest is the host's wait for kernels."
        )
    return f"{row['call']} takes {row['ms'] / one['watched_ms']:.0%} of the step, and that is its own cost."


def counter_table(found: list[dict]):
    """Nsight Compute's counters of the first layer, by kernel and grid."""
    rows = show.table("first layer, ncu", "us", "registers", "occupancy", "DRAM", "compute", "L2 hits")
    for row in sorted(found, key=lambda row: -row["us"] * row["launches"]):
        percent = (f"{row[name]:.1f} %" for name in COUNTED.values() if name in PERCENT)
        times = f" x{row['launches']}" if row["launches"] > 1 else ""
        rows.add_row(
            f"{row['kernel']} {row['grid']}{times}", show.number(row["us"]), f"{row['registers']:.0f}", *percent
        )
    return rows


PERCENT = ("occupancy_percent", "dram_percent", "compute_percent", "l2_hit_percent")

if __name__ == "__main__":
    watched_by_ncu(harness.received(json.loads(sys.argv[1])))
