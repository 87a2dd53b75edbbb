"""`lesson run --cold`: a run whose file no one has read yet, and which pages that brings in.

A mapped page that is not in memory faults when it is touched: minor where the page cache has it or nothing has to be
read (memory never written), major where the disk must answer. The kernel counts faults by whether they waited, and
resident memory by whether it is a file's: so both are told, side by side.
"""

import ctypes
import gc
import mmap
import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

from common import harness, machine, records, show
from common.job import Job, UsageError
from common.profile import heading
from common.stage import source_path


def cold_run(request: harness.Request) -> dict:
    """Evict the file, then load it and run the prompt twice, in this process: what each step costs and brings in.

    {evicted: {before, after, pages, reason}, steps: [{step, ms, minor, major, anon_mb, file_mb}], output_ids}; the last
    two are MiB that the step added to resident memory, None where the system does not say. Raises what the stage does.
    """
    import numpy as np

    from common.model import open_model
    from common.stage import load_stage

    stage = load_stage(request.stage)
    harness.compile_all(stage, request)
    gc.collect()  # a page that is still mapped can't be evicted
    evicted, steps = evict(Path(request.model)), []

    def step(name: str, run):
        with Counted(name, steps):
            return run()

    def load():
        gguf = open_model(request.model, request.layers)
        return stage.load(gguf, request.context or gguf.config.context, request.threads)

    model = step("load", load)
    for name in ("first forward", "second forward"):
        row = step(name, lambda: stage.logits(model, stage.forward(model, request.ids, 0)[-1:])[0])
    if request.rows_file:
        np.save(request.rows_file, np.array(row)[None])
    return {"evicted": evicted, "steps": steps, "output_ids": [int(np.argmax(row))]}


class Counted:
    """A block's time, faults and growth, appended to `steps`."""

    def __init__(self, name: str, steps: list[dict]):
        self.name, self.steps = name, steps

    def __enter__(self):
        from common.events import memory

        self.memory, self.faults, self.started = memory(), harness.faults(), time.perf_counter()

    def __exit__(self, *error):
        from common.events import memory

        ms, faults, now = (time.perf_counter() - self.started) * 1e3, harness.since(self.faults), memory()
        grown = {k: None if now[k] is None else now[k] - self.memory[k] for k in ("anon_mb", "file_mb")}
        self.steps.append({"step": self.name, "ms": ms, **faults, **grown})


def evict(path: Path) -> dict:
    """Ask the kernel to forget a file's pages: {before, after, pages, reason}, pages resident before and after of all.

    reason is None where all of them went, else a sentence that says why the run is not, or not wholly, cold.
    """
    before, pages = resident(path)
    if not hasattr(os, "posix_fadvise"):
        return {"before": before, "after": before, "pages": pages, "reason": "this system can't evict a single file"}
    with open(path, "rb") as file:
        with suppress(OSError):  # a page not yet on disk stays; a read-only file system has none
            os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    after, _ = resident(path)
    reason = None
    if after is None:
        reason = "the file's pages were given up, but this system does not say whether they went"
    elif after:
        reason = (
            f"{after:,} of the file's {pages:,} pages stayed in memory, since another process has them mapped or they "
            "lie in a memory file system"
        )
    return {"before": before, "after": after, "pages": pages, "reason": reason}


def resident(path: Path) -> tuple[int | None, int]:
    """(pages of a file in the page cache, pages in all); None where the system does not say. Source: mincore(2)."""
    size = path.stat().st_size
    pages = -(-size // mmap.PAGESIZE)
    mincore = getattr(ctypes.CDLL(None), "mincore", None) if os.name == "posix" else None
    if mincore is None or not os.access(path, os.W_OK):  # Linux tells only those who could write the file
        return None, pages
    found = (ctypes.c_ubyte * pages)()
    with open(path, "rb") as file, mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE) as held:
        view = ctypes.c_char.from_buffer(held)
        failed = mincore(ctypes.byref(view), ctypes.c_size_t(size), found)
        del view
    return (None if failed else sum(page & 1 for page in found)), pages


# ---- the parent's side -----------------------------------------------------------------------------------------


def cold(name: str, job: Job, save: str | None = None) -> dict:
    """Run one stage cold, check its logits, and record it. Raises WrongError, RunError, StageError and UsageError."""
    from common.run import check

    source_path(name)
    if not job.sampler.greedy:
        raise UsageError(
            "--cold counts the page faults of two forward passes and draws no token: leave --temperature out"
        )
    folder = records.writable(records.folder(save))
    here = machine.identify()
    unmap(job.gguf.gguf.file)
    with tempfile.TemporaryDirectory() as scratch:
        rows_file = str(Path(scratch) / "rows.npy")
        found = harness.talk("cold", job.request(name, rows_file=rows_file, n=1))["cold"]
        agreed = check(name, job, SimpleNamespace(output_ids=found["output_ids"]), rows_file)
    record = heading(name, job, here) | found | {"agreement": agreed._asdict(), "file_mb": size_mb(job)}
    records.save(record, folder / here.slug / "cold" / records.file_name([record]))
    return record


def unmap(file) -> None:
    """Let go of the pages of a map (uint8 array over it) that this process has read; they fault in again at need."""
    held = getattr(file.base, "obj", file.base)
    if hasattr(mmap, "MADV_DONTNEED") and isinstance(held, mmap.mmap):
        held.madvise(mmap.MADV_DONTNEED)


def size_mb(job: Job) -> float:
    return job.path.stat().st_size / (1 << 20)


def render(record: dict) -> list:
    """The steps, each with its faults and what came into memory."""
    rows = show.table("cold", "ms", "minor", "major", "anonymous MiB", "file MiB")
    for step in record["steps"]:
        grown = ("–" if step[k] is None else f"{step[k]:+,.1f}" for k in ("anon_mb", "file_mb"))
        rows.add_row(step["step"], show.number(step["ms"]), f"{step['minor']:,}", f"{step['major']:,}", *grown)
    evicted = record["evicted"]
    if evicted["reason"]:
        said = f"Not cold: {evicted['reason']}."
    else:
        said = f"All {evicted['pages']:,} pages of the file ({record['file_mb']:,.0f} MiB) were out of memory at first."
    return [rows, said, show.dim(show.footer(record))]
