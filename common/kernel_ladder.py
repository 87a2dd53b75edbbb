"""What a kernel ladder needs: right or wrong against float64, time beside the baselines, and one table.

`python -m common.kernel_ladder gemm --save DIR` checks and times every rung on this machine.
"""

import argparse
import csv
import functools
import hashlib
import importlib
import json
import math
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from common import diff, figures, roofline
from common.stage import StageError, import_file, where
from common.stats import summary

SCHEMA = 1
LONG = 1000  # ms: a call that long is not disturbed by being the first
OVERHEAD = 5  # a time below this many launches says more about launching than about the kernel


def ladder(name: str):
    """The ladder's package, which declares its stages, shapes, formulas, oracle and baselines."""
    return importlib.import_module(f"stages.{name}")


def device(rungs):
    """The module that times, measures the roofs of and names what the ladder runs on."""
    return importlib.import_module(f"common.kernel_{getattr(rungs, 'DEVICE', 'gpu')}")


def module(rungs, stage: str):
    """A rung's module; `stage` may be the path of the reader's own file. Raises StageError where that is broken."""
    if not stage.endswith(".py"):
        return importlib.import_module(f"{rungs.__name__}.{stage}")
    path = Path(stage).resolve()
    try:
        found = import_file(path)
    except Exception as error:  # the reader's own file may raise anything
        raise StageError(f"{path.name}: {where(error, path)}{type(error).__name__}: {error}", exit_code=1) from error
    if not hasattr(found, rungs.ENTRY):
        raise StageError(f"{path.name} has no {rungs.ENTRY}: start from a copy of a rung", exit_code=1)
    return found


def entry(rungs, stage: str):
    """The function that a rung is called by."""
    return getattr(module(rungs, stage), rungs.ENTRY)


@functools.cache
def _copies() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory()  # gone with the process: Triton reads a kernel's source when it is launched


def variant(rungs, stage: str, **constants):
    """The entry function of a copy of a rung with some of its module constants bound to other values."""
    path = Path(stage) if stage.endswith(".py") else Path(rungs.__file__).parent / f"{stage}.py"
    source = path.read_text("utf-8")
    for name, value in constants.items():
        source, found = re.subn(rf"^{name} = [^#\n]*", f"{name} = {value}  ", source, flags=re.M)
        if not found:
            raise ValueError(f"{path.name} has no constant {name}")
    words = [path.stem, *(f"{name}_{value}" for name, value in constants.items())]
    copy = Path(_copies().name) / f"{'_'.join(words).replace('-', 'minus')}.py"
    copy.write_text(source, "utf-8")
    return entry(rungs, str(copy))


def several(result) -> tuple:
    """What a rung returned, as a tuple: most return one array."""
    return result if isinstance(result, tuple) else (result,)


def wide(a):
    """An array as float64. uint16 holds the bits of BF16, a type that CuPy lacks: the upper half of an FP32."""
    return ((a.astype("uint32") << 16).view("float32") if a.dtype == "uint16" else a).astype("float64")


def judge(rungs, out, exact, size, dtype: str) -> dict:
    """The verdict on what a rung returned. Of several outputs each must be right; the errors told are the first's.

    A baseline may return None for an output that it does not give.
    """
    every = zip(several(out), several(exact), several(size), several(rungs.TOLERANCE[dtype]), strict=True)
    found = [verdict(a, b, c, **judged_by) for a, b, c, judged_by in every if a is not None]
    worst = max((each["allowance"] for each in found), key=lambda share: math.inf if math.isnan(share) else share)
    return found[0] | {"allowance": worst, "right": all(each["right"] for each in found)}


def poison(rungs, shape) -> None:
    """Leave NaN where a rung's outputs may come to lie."""
    for size in rungs.outputs(*shape) if hasattr(rungs, "outputs") else [shape[:2]]:
        device(rungs).poison(size)


def verdict(out, exact, size, rounding: float, sums: float, tiny: float, nmse: float) -> dict:
    """Errors of `out` against float64 `exact`: max and mean absolute, NMSE, and the worst share of the allowance.

    Each element may be off by two roundings of its own value, by `sums` of `size` (|x| @ |w|), and by `tiny`, the
    step below which its type has no relative precision: so one wrong element fails. Equal infinities are no error.
    """
    out = wide(out)
    error = abs(out - exact)
    error[out == exact] = 0
    share = float((error / (2 * rounding * abs(exact) + sums * size + tiny)).max())
    mean = float((error**2).sum() / ((exact**2).sum() + 1e-300))
    return {
        "max_abs": float(error.max()),
        "mean_abs": float(error.mean()),
        "nmse": mean,
        "allowance": share,
        "right": share <= 1 and (mean <= nmse or exact.size < 1000),  # NaN is neither
    }


def check(rungs, stage: str, shape, dtype: str, seed: int = 0) -> dict:
    """One rung on random data of one shape, against the ladder's oracle; `right` is None where it does not run here."""
    operands, row = rungs.inputs(shape, dtype, seed), {"stage": stage, "dtype": dtype, "shape": shape}
    poison(rungs, shape)
    try:
        out = entry(rungs, stage)(*operands)
    except NotImplementedError as error:
        return row | {"right": None, "absent": str(error)}
    return row | judge(rungs, out, *rungs.oracle(*operands), dtype)


def interleaved(once, calls: dict, budget_ms: float, most: int = 30) -> dict[str, list[float]]:
    """Samples in ms of each call, taken in turn so that a drifting clock meets all alike; 3 to `most` of each."""
    first = {name: once(call) for name, call in calls.items()}
    first |= {name: once(calls[name]) for name, ms in first.items() if ms < LONG}
    counts = {name: max(3, min(most, int(budget_ms / ms))) for name, ms in first.items()}
    samples = {name: [] for name in calls}
    for i in range(max(counts.values())):
        for name, call in calls.items():
            if i < counts[name]:
                samples[name].append(once(call))
    return samples


def source_digest(rungs, stage: str) -> str:
    """SHA-256 of what a rung compiles, or of its file: which code a record measured.

    What it compiles is its CUDA source and options, or the definitions that numba sees.
    """
    path = Path(stage) if stage.endswith(".py") else Path(rungs.__file__).parent / f"{stage}.py"
    if getattr(rungs, "DEVICE", "gpu") == "cpu":
        found = diff.definitions(path.read_text("utf-8"))
        compiled = "\n".join(d.text for name, d in found.items() if not name.startswith("SOURCE"))
    else:
        found = module(rungs, stage)
        compiled = f"{found.SOURCE}{found.OPTIONS}" if hasattr(found, "SOURCE") else path.read_text("utf-8")
    return hashlib.sha256(compiled.encode()).hexdigest()


def judged(rungs, calls: dict, shape, dtype: str) -> tuple[dict[str, dict], dict]:
    """Rows by name, each with its verdict, and the calls that were right, bound to this shape's operands.

    A call whose library is not installed, that does not take this shape (NotImplementedError) or finds no room has
    `right` None and the reason as `absent`.
    """
    operands = rungs.inputs(shape, dtype, seed=sum(shape))
    exact, size = rungs.oracle(*operands)
    rows, ready = {}, {}
    for name, call in calls.items():
        rows[name] = {"stage": name, "dtype": dtype, "shape": shape}
        try:
            poison(rungs, shape)
            rows[name] |= judge(rungs, call(*operands), exact, size, dtype)
            if rows[name]["right"]:
                ready[name] = functools.partial(call, *operands)
        except (ImportError, NotImplementedError, MemoryError) as error:
            rows[name] |= {"right": None, "absent": str(error)}
    for name, call in rungs.BOUNDS.items():  # no matmul, so nothing to check
        rows[name] = {"stage": name, "dtype": dtype, "shape": shape}
        ready[name] = functools.partial(call, *operands)
    return rows, ready


def timed(rungs, rows: dict[str, dict], samples: dict[str, list[float]], roof: dict, floor_ms: float) -> list[dict]:
    """The rows with what their samples say: times, rates, share of the peak, ratio to each baseline and bound."""
    times = {name: summary(taken) for name, taken in samples.items()}
    others = [name for name in (*rungs.BASELINES, *rungs.BOUNDS) if name in times]
    for name, ms in times.items():
        shape, dtype = rows[name]["shape"], rows[name]["dtype"]
        tflops = rungs.flops(*shape) / ms["median"] / 1e9
        rows[name] |= {
            "ms": ms,
            "tflops": tflops,
            "gbps": rungs.traffic(*shape, dtype) / ms["median"] / 1e6,
            "percent_peak": share_of_peak(rows[name]["stage"], tflops, roof.get(dtype)),
            "ratio_to_baseline": {other: times[other]["median"] / ms["median"] for other in others},
            "overhead_bound": ms["median"] < OVERHEAD * floor_ms,
        }
    return list(rows.values())


def share_of_peak(name, tflops: float, peak: float | None) -> float | None:
    """Percent of the measured peak, None where there is none. Raises AccountingError above 105 %."""
    if not peak:
        return None
    if tflops > roofline.SLACK * peak:
        raise roofline.AccountingError(
            f"{name} at {tflops:.3g} TFLOP/s is {tflops / peak:.0%} of the measured peak of {peak:.3g}: "
            "the FLOPs or the clock are wrong"
        )
    return 100 * tflops / peak


def measure(rungs, shape, dtype: str, roof: dict, floor_ms: float, budget_ms: float = 200, slow=()) -> list[dict]:
    """Every rung and baseline of one type at one shape: checked, then timed in turn. A wrong rung has no time.

    A rung in `slow` is neither: its row says so.
    """
    stages = [stage for stage, dtypes in rungs.STAGES.items() if dtype in dtypes]
    calls = {stage: entry(rungs, stage) for stage in stages if stage not in slow} | rungs.BASELINES
    rows, ready = judged(rungs, calls, shape, dtype)
    samples = interleaved(device(rungs).once, ready, budget_ms)
    for name, call in ready.items():
        rows[name] |= device(rungs).memory(call)
    left_out = [
        {"stage": s, "dtype": dtype, "shape": shape, "right": None, "absent": "too slow to run here"}
        for s in stages
        if s in slow
    ]
    return timed(rungs, rows, samples, roof, floor_ms) + left_out


def too_slow(rungs, rows: list[dict], shape, limit_ms: float) -> list[str]:
    """The rungs that would take more than limit_ms a call at this shape, at the lowest rate they had so far."""
    rates = {}
    for row in rows:
        if "ms" in row:
            rates[row["stage"]] = min(rates.get(row["stage"], math.inf), row["tflops"])
    return [stage for stage in rungs.STAGES if rungs.flops(*shape) / rates.get(stage, math.inf) / 1e9 > limit_ms]


def table(rows: list[dict], unit: tuple[str, float] = ("TFLOP/s", 1.0)) -> str:
    """One line a row: shape, rung, ms, rate, GB/s, share of peak, ratio to each baseline and bound, errors.

    `unit` is the rate's name and what one of it is in TFLOP/s.
    """
    others = list(dict.fromkeys(other for row in rows for other in row.get("ratio_to_baseline", {})))
    width = max((len(_sizes(row["shape"])) for row in rows), default=0)
    lines = [f"{'shape':>{width}}  type     rung                 ms  {unit[0]}   GB/s  peak  "]
    lines[0] += " ".join(f"{other:>6}" for other in others) + "  max error"
    for row in rows:
        line = f"{_sizes(row['shape']):>{width}}  {row['dtype']:8} {row['stage']:12}"
        if "ms" in row:
            peak = f"{row['percent_peak']:4.0f}%" if row["percent_peak"] else "    -"
            line += f" {row['ms']['median']:10.4f} {row['tflops'] / unit[1]:8.2f} {row['gbps']:6.0f} {peak}  "
            line += " ".join(f"{row['ratio_to_baseline'].get(other, math.nan):6.3f}" for other in others)
            line += f"  {row.get('max_abs', math.nan):9.2e}" + ("  overhead-bound" if row["overhead_bound"] else "")
        else:
            line += f"  {row.get('absent') or 'WRONG, so no time: error ' + format(row['max_abs'], '.2e')}"
        lines.append(line)
    return "\n".join(lines)


def _sizes(shape) -> str:
    return " x ".join(map(str, shape))


METRICS = {  # of Nsight Compute's raw page, by the names that a record and a chapter use
    "gpu__time_duration.sum": "seconds",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "compute_percent",
    "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed": "memory_percent",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed": "tensor_percent",
    "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_elapsed": "exponential_percent",
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

    from common.kernel_gpu import once

    for shape in shapes:
        for stage in stages:
            operands = rungs.inputs(shape, rungs.STAGES[stage][0], seed=1)
            call = entry(rungs, stage)
            once(functools.partial(call, *operands))
            cupy.cuda.Device().synchronize()
            cupy.cuda.profiler.start()
            call(*operands)
            cupy.cuda.Device().synchronize()
            cupy.cuda.profiler.stop()


def main(arguments=None) -> int:
    """Check every rung on odd shapes, then measure all; exit 5 where a rung is wrong."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("ladder")
    parser.add_argument("--save", type=Path, help="folder for the record")
    parser.add_argument("--budget", type=float, default=200, help="ms of samples for one rung at one shape")
    parser.add_argument("--limit", type=float, default=15000, help="ms a call may take and not be left out")
    parser.add_argument("--profile", metavar="SHAPE", action="append", help="launch each rung once, for ncu to see")
    parser.add_argument("--chapters", type=Path, metavar="REPORTS", help="renew the chapters' figures")
    options = parser.parse_args(arguments)
    rungs = ladder(options.ladder)
    if options.profile:
        cuda = [stage for stage in rungs.STAGES if stage != "triton"]
        profile(rungs, [tuple(map(int, shape.split(","))) for shape in options.profile], cuda)
        return 0
    if options.chapters:
        for path in sorted(Path(rungs.__file__).parent.glob("*.md")):
            path.write_text(figures.figures(path.read_text(), options.chapters))
        return 0
    if options.save:
        options.save.mkdir(parents=True, exist_ok=True)
        begun = options.save / "ladder.unfinished.json"
    with device(rungs).alone():
        for record in measured(rungs, options.ladder, options.budget, options.limit):
            if options.save:
                begun.write_text(json.dumps(record, indent=1) + "\n")
    if options.save:
        begun.replace(options.save / "ladder.json")
    print(table(record["rows"], device(rungs).UNIT))
    return 5 if any(row.get("right") is False for row in record["odd_shapes"] + record["rows"]) else 0


def measured(rungs, name: str, budget_ms: float, limit_ms: float) -> Iterator[dict]:
    """The record of a whole ladder: every rung on odd shapes, then all of them timed, as it is after each shape."""
    here = device(rungs)
    odd = [
        check(rungs, stage, shape, dtype, seed=i)
        for i, shape in enumerate(rungs.ODD_SHAPES)
        for stage, dtypes in rungs.STAGES.items()
        for dtype in dtypes
    ]
    wrong = [row for row in odd if row["right"] is False]
    for row in wrong:
        print(f"wrong: {row}", file=sys.stderr)
    print(f"odd shapes: {len(odd) - len(wrong)} of {len(odd)} right", flush=True)
    dtypes = sorted({dtype for dtypes in rungs.STAGES.values() for dtype in dtypes})
    record = {
        "schema": SCHEMA,
        "ladder": name,
        "machine": here.machine(),
        "sources": {stage: source_digest(rungs, stage) for stage in rungs.STAGES},
        "launch_ms": here.launch_ms(),
        "peak_tflops": here.peaks(dtypes),
        "odd_shapes": odd,
        "rows": [],
    }
    for dtype in dtypes:
        for shape in getattr(rungs, "FEWER", {}).get(dtype, rungs.SHAPES):
            slow = too_slow(rungs, record["rows"], shape, limit_ms)
            record["rows"] += measure(rungs, shape, dtype, record["peak_tflops"], record["launch_ms"], budget_ms, slow)
            print(f"{dtype} {shape} done", file=sys.stderr, flush=True)
            yield record


if __name__ == "__main__":
    raise SystemExit(main())
