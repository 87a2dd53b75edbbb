"""`lesson compare` and `lesson sweep` for the rungs of a kernel ladder: checked, then timed in turns.

A ladder whose device is not here shows what was recorded elsewhere, and says so.
"""

import json
import math
import re
import sys
from pathlib import Path

from common import diff, records, show
from common import kernel_ladder as kl
from common.compare import changed
from common.job import UsageError
from common.machine import slug
from common.run import WrongError
from common.stage import FOLDER, LADDER, StageError, code_path, where
from common.stats import summary, verdict
from common.sweep import parse

FEWEST, MOST = 3, 20  # samples of each rung
SWEPT = 5  # samples of each value in a sweep


class MissingError(Exception):
    """The ladder's device, and any record of it, is not here; str(e) says what to do."""

    exit_code = 4


# ---- names ----------------------------------------------------------------------------------------------------


def ladder_of(names: list[str]) -> str | None:
    """The kernel ladder that the names belong to, None where they are stages. Raises UsageError for a mixture.

    A file of the reader's own belongs to the folder it lies in, or to the ladder that its PREVIOUS names
    ('gemm/naive'), or else goes with the others.
    """
    told = {name: belongs(name) for name in names}
    found = {ladder for ladder in told.values() if ladder}
    if not found:
        return None
    if len(found) > 1 or "" in told.values():
        raise UsageError(f"{' and '.join(names)} are of different ladders, which share no job: name rungs of one")
    return found.pop()


def belongs(name: str) -> str | None:
    """The name's kernel ladder, '' for a stage, None where a file does not say."""
    if name in LADDER:
        return ""
    path = code_path(name)
    if path.parent.parent == FOLDER:
        return path.parent.name
    try:
        previous = diff.constant(path, "PREVIOUS")
    except (SyntaxError, ValueError) as error:
        raise StageError(f"{path.name}: {where(error, path)}{type(error).__name__}: {error}", exit_code=1) from error
    return previous.partition("/")[0] if previous and "/" in previous else None


def rung(name: str) -> str:
    """A rung's name within its ladder, or the path of the reader's own file."""
    return name if name.endswith(".py") else name.partition("/")[2]


def checked(names: list[str], shape: str | None, **flags) -> str | None:
    """As ladder_of; for a kernel ladder the shape is good and no flag given that means nothing to it, or UsageError."""
    ladder = ladder_of(names)
    if ladder:
        shape_of(kl.ladder(ladder), shape)
        given = next((name for name, value in flags.items() if value is not None), None)
        if given:
            dashes = "-" if len(given) == 1 else "--"
            raise UsageError(
                f"{dashes}{given} means nothing to a kernel ladder: --shape {','.join(axes(kl.ladder(ladder)))} says "
                "what is computed"
            )
    return ladder


def axes(rungs) -> tuple[str, ...]:
    """What the numbers of a ladder's shape are called."""
    return getattr(rungs, "AXES", ("M", "N", "K"))


def shape_of(rungs, text: str | None) -> tuple[int, ...]:
    """'512' or '64,5632,2048' as (M, N, K), or by the ladder's own `parse`; without text its own. Raises UsageError."""
    if text is None:
        return getattr(rungs, "SHAPE", rungs.SHAPES[-2])
    if hasattr(rungs, "parse"):
        try:
            return rungs.parse(text)
        except ValueError as error:
            raise UsageError(f"--shape {text!r}: {error}") from error
    if not re.fullmatch(r"\d+([,x]\d+[,x]\d+)?", text):
        raise UsageError(f"--shape {text!r}: give M,N,K such as 64,5632,2048, or one number for a square")
    sizes = [int(size) for size in re.split("[,x]", text)]
    m, n, k = sizes * 3 if len(sizes) == 1 else sizes
    step = math.gcd(*(shape[2] for shape in rungs.ODD_SHAPES))  # where K comes in blocks, their length
    if min(m, n, k) < 1 or k % step:
        more = f", and K is a multiple of {step}" if step > 1 else ""
        raise UsageError(f"--shape {text!r}: sizes start at 1{more}")
    return m, n, k


def types(rungs, stages: list[str]) -> list[str]:
    """The type each rung runs in: one they share where there is one, else each its first."""
    every = tuple(dict.fromkeys(dtype for dtypes in rungs.STAGES.values() for dtype in dtypes))
    own = [rungs.STAGES.get(stage, every) for stage in stages]  # a reader's own file takes what it is given
    shared = [dtype for dtype in own[0] if all(dtype in dtypes for dtypes in own)]
    return [shared[0] if shared else dtypes[0] for dtypes in own]


# ---- compare --------------------------------------------------------------------------------------------------


def compare(names: list[str], shape: str | None, budget_s: float, save: str | None = None) -> dict:
    """Check and time rungs and baselines in turns, and judge each rung against the one before it. -> the document.

    Without the ladder's device, times are None and `recorded` holds another machine's; where not all were recorded at
    the ladder's own shape, `shape` is the nearest that was and `unrecorded` the ladder's own. Raises WrongError where
    a rung is wrong, MissingError where there is neither device nor record.
    """
    ladder = ladder_of(names)
    rungs = kl.ladder(ladder)
    here, sizes = kl.device(rungs), shape_of(rungs, shape)
    dtypes = types(rungs, [rung(name) for name in names])
    document = {
        "schema": records.SCHEMA,
        "ladder": ladder,
        "shape": list(sizes),
        "unit": here.UNIT[0],
        "missing": here.missing(),
        "changed": {b: changed(a, b) for a, b in zip(names, names[1:], strict=False)},
    }
    if document["missing"]:
        near = nearest(rungs, ladder, names, dtypes, list(sizes))
        if shape is None and near not in (None, list(sizes)):
            document |= {"shape": near, "unrecorded": list(sizes)}
        return document | recalled(rungs, ladder, names, dtypes, document["shape"], document["missing"])
    folder = records.writable(records.folder(save)) / slug(here.name()) / ladder / "compare"
    with here.alone():
        document |= taken(rungs, names, dtypes, sizes, budget_s)
    document |= {"machine": here.machine(), "recorded": None}
    stems = [Path(name).stem for name in names]
    records.save(document, folder / f"{slug(' '.join([*stems, *map(str, sizes)]))}.json")
    return document


def taken(rungs, names: list[str], dtypes: list[str], shape, budget_s: float) -> dict:
    """stages, baselines and pairs, measured here: samples go forward and back again (ABBA), so that a drift cancels."""
    here = kl.device(rungs)
    rows, ready = {}, {}
    for dtype in dict.fromkeys(dtypes):
        calls = {i: entry(rungs, name) for i, name in enumerate(names) if dtypes[i] == dtype} | rungs.BASELINES
        found, bound = kl.judged(rungs, {(dtype, key): call for key, call in calls.items()}, shape, dtype)
        rows, ready = rows | found, ready | bound
    for (dtype, key), row in rows.items():
        row["stage"] = names[key] if isinstance(key, int) else key
        if isinstance(key, int) and row["right"] is False:
            raise WrongError(
                f"{row['stage']} is wrong at {'x'.join(map(str, shape))} ({dtype}), so no time is shown: the largest "
                f"error is {row['max_abs']:.1e}, {row['allowance']:.1e} times what rounding explains"
            )
    samples = rounds(here.once, ready, budget_s)
    roof, floor = here.peaks(set(dtypes)), here.launch_ms()
    done = {}
    for dtype in dict.fromkeys(dtypes):
        of_type = {key: row for (kind, key), row in rows.items() if kind == dtype}
        kl.timed(rungs, of_type, {key: samples[dtype, key] for key in of_type if (dtype, key) in samples}, roof, floor)
        done |= {(dtype, key): row for key, row in of_type.items()}
    for key, call in ready.items():
        rows[key] |= here.memory(call)
    slots = [(dtype, i) for i, dtype in enumerate(dtypes)]
    return {
        "stages": [done[slot] for slot in slots],
        "baselines": [row for (_, key), row in done.items() if not isinstance(key, int)],
        "peak_tflops": roof,
        "launch_ms": floor,
        "pairs": [
            {"a": names[i], "b": names[i + 1], "metric": "ms", **verdict(samples[a], samples[b])._asdict()}
            for i, (a, b) in enumerate(zip(slots, slots[1:], strict=False))
            if a in samples and b in samples
        ],
    }


def entry(rungs, name: str):
    """A rung's function; what the reader's own raises becomes one sentence with its line."""
    call = kl.entry(rungs, rung(name))
    if not name.endswith(".py"):
        return call

    def guarded(*operands):
        try:
            return call(*operands)
        except Exception as error:
            path = code_path(name)
            said = str(error).splitlines()[:1] or [""]
            raise StageError(f"{path.name}: {where(error, path)}{type(error).__name__}: {said[0]}", 1) from error

    return guarded


def rounds(once, ready: dict, budget_s: float) -> dict:
    """Samples in ms of each call, as many of all; the slowest stays within its budget but for the first FEWEST."""
    samples = {key: [once(call)] for key, call in ready.items()}
    slowest = max(first[0] for first in samples.values()) / 1e3
    most = max(FEWEST, min(MOST, int(budget_s / slowest)))
    total = most * sum(first[0] for first in samples.values()) / 1e3
    if total > 5:
        print(f"about {total:.0f} s: {most} calls of each rung and baseline", file=sys.stderr)
    for i in range(1, most):
        for key in list(ready) if i % 2 == 0 else reversed(list(ready)):
            samples[key].append(once(ready[key]))
    return samples


def recalled(rungs, ladder: str, names: list[str], dtypes: list[str], shape: list[int], why: str) -> dict:
    """The same keys without times, and what other machines recorded. Raises MissingError where none did."""
    found = []
    for path in sorted(records.folder().glob(f"*/{ladder}/ladder.json")):
        record = json.loads(path.read_text("utf-8"))
        wanted = {(rung(name), dtype) for name, dtype in zip(names, dtypes, strict=True)}
        wanted |= {(name, dtype) for name in (*rungs.BASELINES, *rungs.BOUNDS) for dtype in dtypes}
        rows = [r for r in record["rows"] if (r["stage"], r["dtype"]) in wanted and r["shape"] == shape]
        old = [r["stage"] for r in rows if r["stage"] in rungs.STAGES
               and record["sources"][r["stage"]] != kl.source_digest(rungs, r["stage"])]  # fmt: skip
        if rows:
            machine = record["machine"].get("gpu") or record["machine"]["cpu"]
            found.append({"machine": machine, "file": f"{path.parent.parent.name}/{ladder}/ladder.json",
                          "of_another_version": old, "rows": rows})  # fmt: skip
    if not found:
        near = nearest(rungs, ladder, names, dtypes, shape)
        other = f"; --shape {','.join(map(str, near))} was recorded elsewhere" if near else ""
        raise MissingError(f"nothing can be measured here, and no record has {ladder} at {shape}: {why}{other}")
    nothing = {"ms": None, "tflops": None, "percent_peak": None, "ratio_to_baseline": {}, "peak_mb": None}
    stages = [{"stage": n, "dtype": d, "shape": shape, **nothing} for n, d in zip(names, dtypes, strict=True)]
    return {"stages": stages, "baselines": [], "pairs": [], "machine": None, "recorded": found}


def nearest(rungs, ladder: str, names: list[str], dtypes: list[str], shape: list[int]) -> list[int] | None:
    """The recorded shape with a time of most of the named rungs, of those the least far in factors of sizes."""
    wanted = {(rung(n), d) for n, d in zip(names, dtypes, strict=True) if rung(n) in rungs.STAGES}
    timed = {}
    for path in sorted(records.folder().glob(f"*/{ladder}/ladder.json")):
        for row in json.loads(path.read_text("utf-8"))["rows"]:
            if row.get("ms"):
                timed.setdefault(tuple(row["shape"]), set()).add((row["stage"], row["dtype"]))

    def far(sizes):
        factors = ((a + 1) / (b + 1) for a, b in zip(sizes, shape, strict=True))
        return len(wanted - timed[sizes]), sum(abs(math.log(factor)) for factor in factors)

    found = min((sizes for sizes in timed if wanted & timed[sizes]), key=far, default=None)
    return found and list(found)


def result(document: dict) -> list:
    """The numbers, under the code."""
    unit, shape = document["unit"], " x ".join(map(str, document["shape"]))
    named = " x ".join(axes(kl.ladder(document["ladder"])))
    shown = ["", f"{named} = {shape}"]
    if document["missing"]:
        shown += ["", measured_table(document["stages"], unit), ""]
        shown.append(f"not measured here: {document['missing']}")
        if "unrecorded" in document:
            own = " x ".join(map(str, document["unrecorded"]))
            shown.append(
                f"the ladder's own shape, {own}, was not recorded for all of these: shown is the nearest that was"
            )
        for record in document["recorded"]:
            shown += ["", show.heading(f"recorded on {record['machine']} (reports/{record['file']})")]
            shown.append(measured_table(record["rows"], unit))
            if record["of_another_version"]:
                shown.append(f"recorded from another version of {', '.join(record['of_another_version'])}")
        return shown
    shown[-1] += ", random operands, every result checked against float64"
    shown += ["", measured_table(document["stages"] + document["baselines"], unit), ""]
    everything = document["stages"] + document["baselines"]
    shown += [f"{row['stage']} is not here: {row['absent']}" for row in everything if "absent" in row]
    shown += [told(pair) for pair in document["pairs"]]
    return [*shown, show.dim(footer(document["machine"]))]


def measured_table(rows: list[dict], unit: str):
    """One line a rung: time, rate, share of the measured peak, times the first baseline's speed, error, memory."""
    scale = 1e3 if unit == "GFLOP/s" else 1.0
    several = len({row["dtype"] for row in rows}) > 1
    base = next((name for row in rows for name in row.get("ratio_to_baseline") or {}), None)
    laid = show.table("", "ms", "spread", unit, "% peak", f"÷ {base or 'baseline'}", "max error", "MB")
    for row in rows:
        name = Path(row["stage"]).name
        name += f" {row['dtype']}" if several else ""
        if not row.get("ms"):
            laid.add_row(name, *["n/a"] * 7)
            continue
        ratio, error, peak = (row.get("ratio_to_baseline", {}).get(base), row.get("max_abs"), row["percent_peak"])
        laid.add_row(
            name + (" (overhead)" if row.get("overhead_bound") else ""),
            show.number(row["ms"]["median"]),
            show.spread(row["ms"]),
            show.number(row["tflops"] * scale),
            show.number(peak) if peak else "n/a",
            f"{ratio:.3f}" if ratio else "n/a",
            f"{error:.1e}" if error is not None else "–",
            show.number(row["peak_mb"]) if row.get("peak_mb") else "n/a",
        )
    return laid


def told(pair: dict):
    """'gemm/tiled is faster than gemm/coalesced: 1.41× (1.40–1.43 at 99 %; 20 pairs)'."""
    from rich.text import Text

    word, a, b = pair["verdict"], pair["a"], pair["b"]
    claim = f"{b} is {word} than {a}" if word in ("faster", "slower") else f"{a}, {b}: {word}"
    low = f"{show.number(pair['low'])}–{show.number(pair['high'])} at 99 %; " if pair["low"] else ""
    return Text.assemble((claim, show.STYLES[word]), f": {show.times(pair['ratio'])} ({low}{pair['pairs']} pairs)")


def footer(machine: dict) -> str:
    """Where it ran, and on what."""
    if "gpu" in machine:
        return f"{machine['gpu']}, CuPy {machine['cupy']}, one process, L2 flushed before each call"
    blas = f"NumPy multiplies with {', '.join(machine['blas'])}"
    forced = machine["OPENBLAS_CORETYPE"]
    return f"{machine['cpu']}, one thread; {blas}" + (f", forced to {forced} by OPENBLAS_CORETYPE" if forced else "")


# ---- sweep ----------------------------------------------------------------------------------------------------


def sweep(stage: str, setting: str, shape: str | None, save: str | None = None) -> dict:
    """A rung at each value of a constant: right or wrong, ms, and on a GPU registers and occupancy. -> the document.

    Without a GPU the kernels are compiled only. Raises MissingError where that can't be done either.
    """
    name, values = parse(stage, setting)
    ladder = ladder_of([stage])
    rungs = kl.ladder(ladder)
    here, sizes = kl.device(rungs), shape_of(rungs, shape)
    dtype = types(rungs, [rung(stage)])[0]
    missing = here.missing()
    rows = {
        value: {"value": int(value), "wrong": None, "ms": None, "tflops": None, "max_abs": None} for value in values
    }
    document = {
        "schema": records.SCHEMA,
        "ladder": ladder,
        "stage": stage,
        "constant": name,
        "shape": list(sizes),
        "dtype": dtype,
        "unit": here.UNIT[0],
        "missing": missing,
        "rows": list(rows.values()),
    }
    if missing:
        for value, row in rows.items():
            compiled(rungs, stage, name, value, row, missing)
        return document | {"machine": None}
    folder = records.writable(records.folder(save)) / slug(here.name()) / ladder / "sweep"
    with here.alone():
        swept(rungs, stage, name, rows, sizes, dtype)
    document["machine"] = here.machine()
    records.save(document, folder / f"{slug(' '.join([Path(stage).stem, name, *map(str, sizes)]))}.json")
    return document


def swept(rungs, stage: str, name: str, rows: dict[str, dict], shape, dtype: str) -> None:
    """Fill the rows: each value checked, the right ones timed in turns."""
    here, ready = kl.device(rungs), {}
    for value, row in rows.items():
        try:
            call = kl.variant(rungs, rung(stage), **{name: int(value)})
            launches = watched(call)
            found, bound = kl.judged(rungs, {value: call}, shape, dtype)
            if value in bound:
                ready[value], row["max_abs"] = bound[value], found[value]["max_abs"]
            else:
                row["wrong"] = f"wrong: the largest error is {found[value]['max_abs']:.1e}"
            if launches:
                row |= occupied(call, *launches[-1])
        except Exception as error:  # a value may break the kernel's own arithmetic, the compiler or the launch
            row["wrong"] = f"{type(error).__name__}: {sentence(error)}"
    samples = kl.interleaved(here.once, ready, budget_ms=2000, most=SWEPT) if ready else {}
    for value, taken in samples.items():
        rows[value]["ms"] = summary(taken)
        rows[value]["tflops"] = rungs.flops(*shape) / rows[value]["ms"]["median"] / 1e9


def sentence(error: Exception) -> str:
    """What a compiler or driver said, on one line and not at any length."""
    return " ".join(str(error).replace("\0", " ").split())[:120]


def source_of(call) -> dict:
    """The module that a rung's function lives in, as its names."""
    return getattr(call, "py_func", call).__globals__


def watched(call) -> list[tuple]:
    """A list that grows by (kernel's name, threads a block, dynamic shared bytes) with each launch the rung makes."""
    launches, program = [], source_of(call).get("PROGRAM")
    if program:
        launch = program.launch

        def noted(name, blocks, threads, args, shared=0):
            count = threads if isinstance(threads, int) else threads[0] * threads[1]
            launches.append((name, count, shared))
            launch(name, blocks, threads, args, shared)

        program.launch = noted
    return launches


def occupied(call, name: str, threads: int, shared: int) -> dict:
    """Registers a thread, and the share of an SM's threads that can be resident, of the kernel as launched."""
    import cupy

    kernel = source_of(call)["PROGRAM"].kernel(name, shared)
    blocks = cupy.cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor(kernel.kernel.ptr, threads, shared)
    most = cupy.cuda.Device().attributes["MaxThreadsPerMultiProcessor"]
    return {"registers": kernel.num_regs, "occupancy_percent": 100 * blocks * threads / most}


def compiled(rungs, stage: str, name: str, value: str, row: dict, missing: str) -> None:
    """Fill a row with what NVRTC alone can tell, the most of any kernel: registers a thread, and bytes that it spills.

    Raises MissingError where NVRTC is not installed.
    """
    from common import cuda

    module = source_of(kl.variant(rungs, rung(stage), **{name: int(value)}))
    if "SOURCE" not in module:
        raise MissingError(f"{stage} can't be swept here: {missing}")
    try:
        kernels = cuda.compile(module["SOURCE"], module["OPTIONS"], module["ARCHS"][-1]).kernels
        for used in ("registers", "spills"):
            row[used] = max(getattr(kernel, used) for kernel in kernels.values())
    except cuda.MissingCompiler as error:
        raise MissingError(f"{missing}; {error}") from error
    except cuda.CUDAError as error:
        row["wrong"] = f"does not compile: {sentence(error)}"


def render(document: dict) -> list:
    """A sweep as a table."""
    timed = [row["ms"]["median"] for row in document["rows"] if row["ms"]]
    gpu = any("registers" in row for row in document["rows"])
    scale = 1e3 if document["unit"] == "GFLOP/s" else 1.0
    head = [document["constant"], "ms", "spread", document["unit"], "of the best", "max error"]
    laid = show.table(*head, *(["registers", "spilled" if document["missing"] else "occupancy"] if gpu else []))
    for row in document["rows"]:
        cells = ["n/a"] * 5 if not row["wrong"] else ["–"] * 4 + ["wrong"]
        if row["ms"]:
            ms = row["ms"]
            cells = [show.number(ms["median"]), show.spread(ms), show.number(row["tflops"] * scale),
                     show.times(ms["median"] / min(timed)), f"{row['max_abs']:.1e}"]  # fmt: skip
        if gpu:
            spilled = f"{row['spills']:,} B" if "spills" in row else "–"
            last = spilled if document["missing"] else show.number(row.get("occupancy_percent"), " %")
            cells += [str(row.get("registers", "n/a")), last]
        laid.add_row(str(row["value"]), *cells)
    shown = [f"{document['stage']} at {' x '.join(map(str, document['shape']))}, {document['dtype']}", "", laid]
    shown += [f"{document['constant']} = {row['value']}: {row['wrong']}" for row in document["rows"] if row["wrong"]]
    if document["missing"]:
        most = "registers and spills are the most of any of its kernels; " if gpu else ""
        return [*shown, f"{most}compiled only, not run: {document['missing']}"]
    return [*shown, show.dim(footer(document["machine"]))]
