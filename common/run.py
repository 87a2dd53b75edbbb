"""`lesson run`: one stage on one prompt, its text as it comes, then what it cost."""

import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.live import Live
from rich.text import Text

from common import gate, gpu_machine, harness, records, reference, roofline
from common.job import Job
from common.show import safe
from common.stage import PEERS, require


class WrongError(Exception):
    """A stage whose answers are not the oracle's; no time of it is shown."""

    exit_code = 5


def run(
    name: str, job: Job, budget_s: float | None, save_logits: str | None, quiet: bool, save: str | None = None
) -> dict:
    """Run, check and record one stage. quiet: nothing on stdout. Raises WrongError, RunError and StageError."""
    require(name)
    folder = records.writable(records.folder(save))
    here = gpu_machine.of(name, job.gguf.config)
    expected = roofline.expectation(name, job, here)
    with tempfile.TemporaryDirectory() as scratch:
        rows_file = str(Path(scratch) / "rows.npy")
        request = job.request(name, budget_s=budget_s, rows_file=rows_file, logits_file=save_logits)
        with Stream(job, expected, quiet) as stream:
            sample = answered(job, request, stream.token)
        agreed = check(name, job, sample, rows_file)
    expected = roofline.expectation(name, replace(job, n=len(sample.output_ids)), here)
    record = records.run_record(job, name, [sample], agreed, expected, here)
    records.save(record, folder / here.slug / "run" / records.file_name([record]))
    return record


def answered(job: Job, request: harness.Request, on_token=lambda token, ms: None) -> harness.Sample:
    """A run. Raises GGUFError rather than RunError where the model itself gives logits that are not finite."""
    try:
        return harness.run(request, on_token)
    except harness.RunError as error:
        if error.exit_code != WrongError.exit_code:
            raise
        reference.logits(job.gguf, job.ids, rows=1)
        if request.stage in PEERS:
            raise
        raise harness.RunError(f"{error}; {harness.diagnose(request)}", error.exit_code) from error


def check(name: str, job: Job, sample: harness.Sample, rows_file: str) -> gate.Agreement:
    """Hold the rows a stage chose its ids from against the oracle's. Raises WrongError that says where they part.

    A peer's times are shown whatever it answers, with what the gate found beside them.
    """
    import numpy as np

    rows, ids = np.load(rows_file), sample.output_ids
    choose = job.sampler.chooser()
    if choose and (again := [choose(row) for row in rows]) != ids:
        at = next(i for i, (a, b) in enumerate(zip(again, ids, strict=True)) if a != b)
        raise WrongError(
            f"{name} is wrong, so no time is shown: its ids are not the ones that its logits and the seed give, from "
            f"new token {at} on: generate must take each id from choose(row), once"
        )
    # A drawn id is nobody's first choice: then the gate compares the first choices, on the text as drawn.
    firsts = rows.argmax(axis=1) if choose else ids
    want = reference.logits(job.gguf, job.ids + ids[:-1], rows=len(ids))
    agreed = gate.agreement(rows, firsts, want, gate.tolerance(name, len(rows)))
    if not agreed.passed and name not in PEERS:
        where = harness.diagnose(job.request(name, ids=job.ids + ids[:-1]))
        raise WrongError(
            f"{name} is wrong, so no time is shown: logits NMSE {agreed.nmse:.1e}, allowed {agreed.tolerance:.0e}; "
            f"{where}"
        )
    return agreed


class Stream:
    """Text as it comes on stdout, and on a terminal's stderr what is left to wait."""

    def __init__(self, job: Job, expected: dict, quiet: bool):
        self.job, self.quiet, self.times = job, quiet, []
        self.decoder = job.tokenizer.stream(job.ids) if job.tokenizer and not job.made_up else None
        self.expected_ms = expected["ttft_ms"]
        self.live = (
            Live(self, console=Console(stderr=True), transient=True, refresh_per_second=8) if terminal() else None
        )
        self.started = time.monotonic()

    def __enter__(self):
        if self.decoder and not self.quiet:
            write(self.job.decode(self.job.ids))
        if self.live:
            self.live.start()
        return self

    def __exit__(self, kind, *rest):
        if self.live:
            self.live.stop()
        if self.decoder and not self.quiet:
            write(self.decoder.flush() + "\n")

    def token(self, token: int, ms: float) -> None:
        self.times.append(ms)
        if self.decoder and not self.quiet:
            write(self.decoder.push(token))

    def __rich__(self) -> Text:
        spent = time.monotonic() - self.started
        if not self.times:
            expected = f", about {self.expected_ms / 1e3:.0f} s expected after loading" if self.expected_ms else ""
            return Text(f"loading and first token: {spent:.0f} s{expected}")
        left = (self.job.room - len(self.times)) * fmean(self.times[-3:]) / 1e3
        return Text(f"token {len(self.times)} of {self.job.room}, about {left:.0f} s left")


def terminal() -> bool:
    return sys.stderr.isatty()


def write(text: str) -> None:
    """Model text, to stdout: never markup, never a command, and no character the terminal can't show ends the run."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(safe(text).encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()
