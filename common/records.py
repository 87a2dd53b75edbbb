"""Records: every number shown anywhere comes from one of these JSON files, which names its machine."""

import contextlib
import json
import os
import subprocess
from pathlib import Path
from statistics import median

from common import peers
from common.harness import Sample
from common.job import Job, quant_mix, quantization
from common.stage import PEERS, short
from common.stats import percentiles, summary

SCHEMA = 1  # raised when a key changes its meaning or goes away
LONGEST = 200  # letters of a file's name; file systems take 255 with what save puts around it
ROOT = Path(__file__).parent.parent


def folder(save: str | None = None) -> Path:
    """Where records go: --save, else reports/ of a clone, else the user's data folder."""
    if save:
        return Path(save)
    if (ROOT / ".git").exists():
        return ROOT / "reports"
    return data_root() / "reports"


def data_root() -> Path:
    """The user's data folder for this course; LESSON_DATA moves it."""
    import platformdirs

    return Path(os.environ.get("LESSON_DATA") or platformdirs.user_data_dir("lesson"))


def run_record(job: Job, stage: str, samples: list[Sample], agreed, expected, machine) -> dict:
    """The JSON of one stage's runs on one job; times over the tokens that every sample has.

    agreed: its gate.Agreement, None where nothing was checked.
    """
    first = samples[0]
    shortest = min(len(s.output_ids) for s in samples)
    per_token = [s.ms_per_token(shortest) for s in samples]
    gaps = [gap for s in samples for gap in s.gaps_ms]
    within_roof(job, stage, samples, machine)
    return {
        **heading(stage, job, machine),
        "prompt_ids": job.ids,
        "output_ids": first.output_ids,
        "text": None if job.made_up else job.decode(first.output_ids),
        "stop_reason": first.stop_reason,
        "sampler": job.sampler._asdict(),
        "tokens_timed": shortest,
        "ttft_ms": summary([s.ttft_ms for s in samples]),
        "ms_per_token": None if None in per_token else summary(per_token),
        "inter_token_ms": percentiles(gaps) if gaps else None,
        "gaps_ms": [s.gaps_ms for s in samples],
        "load_ms": median(s.load_ms for s in samples),
        "jit_ms": first.jit_ms,
        "tokenize_ms": job.tokenize_ms,
        "peak_rss_mb": max(s.peak_rss_mb for s in samples),
        "page_faults": {k: sum(part[k] for part in first.faults.values()) for k in ("minor", "major")},
        "page_faults_by_phase": first.faults,
        "expect": expected,
        "agreement": agreed._asdict() if agreed else None,
    }


def heading(stage: str, job: Job, machine) -> dict:
    """What every record begins with: which stage, on what, where."""
    config = job.gguf.config
    return {
        "schema": SCHEMA,
        "stage": stage,
        "model": {
            "name": config.name,
            "sha256": job.sha256,
            "quant": quantization(job.gguf),
            "quant_mix": quant_mix(job.gguf),
            "layers": config.L,
            "file_layers": config.file_layers,
        },
        "machine": machine and machine_summary(machine),
        "threads": job.threads,
        "shape": job.shape,
        "commit": commit(),
        **({"peer": peers.about()} if stage in PEERS else {}),
    }


def absent_record(job: Job, stage: str, why: str) -> dict:
    """The JSON of a stage that can't run here."""
    nothing = dict.fromkeys(("ttft_ms", "ms_per_token", "inter_token_ms", "output_ids", "text", "agreement"))
    return {**heading(stage, job, None), "prompt_ids": job.ids, **nothing, "missing": why}


def within_roof(job: Job, stage: str, samples: list[Sample], machine) -> None:
    """Raises AccountingError where a run took less time than its bytes and FLOPs can.

    A GPU's tokens are judged by their mean: a host that was late for one finds the next, queued ahead, done already.
    """
    from common import gpu, roofline

    config, T = job.gguf.config, len(job.ids)
    weights = roofline.bytes_read(stage, job.gguf)
    kind, kept = roofline.operands(stage), roofline.cache_bytes(stage)
    for sample in samples:
        steps = [(T, T, sample.ttft_ms), *((1, T + i, ms) for i, ms in enumerate(sample.gaps_ms, 1))]
        if (n := len(sample.gaps_ms)) and gpu.on_gpu(stage):
            steps[1:] = [(1, T + n // 2, sum(sample.gaps_ms) / n)]
        for new, seen, ms in steps:
            work = roofline.total(roofline.work(config, new, seen, weights, kept=kept))
            roofline.plausible(work, ms, machine, job.threads, kind)


def machine_summary(machine) -> dict:
    """What identifies a machine in a record."""
    return {
        "name": machine.name,
        "slug": machine.slug,
        "cores": machine.cores,
        "affinity": list(machine.affinity),
        "quota": machine.quota,
        "memory": machine.memory,
        "os": machine.os,
        "versions": machine.versions,
    }


def commit() -> dict | None:
    """{sha, dirty} of the clone, dirty where anything but reports/ differs; None outside a clone."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return {"sha": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "--", ".", ":!reports"))}
    except (OSError, subprocess.CalledProcessError):
        return None


class RecordError(Exception):
    """A record that can't be kept; str(e) is one sentence."""

    exit_code = 1


def save(record: dict, path: Path) -> Path:
    """Write a record whole or not at all. Raises RecordError."""
    writable(path.parent)
    try:
        return write(json.dumps(record, indent=1, allow_nan=False) + "\n", path)
    except OSError as error:
        raise refused(path.parent, error.strerror) from None


def write(text: str, path: Path) -> Path:
    """Write a file whole or not at all. Raises OSError."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text, "utf-8")
        partial.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    return path


def writable(place: Path) -> Path:
    """The folder, made where it was missing. Raises RecordError, best before a long run."""
    try:
        place.mkdir(parents=True, exist_ok=True)
        if os.access(place, os.W_OK):
            return place
        reason = "it can't be written"
    except OSError as error:
        reason = error.strerror
    raise refused(place, reason)


def refused(place: Path, reason: str) -> RecordError:
    return RecordError(f"no record can be kept in {place} ({reason}): choose another folder with --save")


def file_name(runs: list[dict]) -> str:
    """'naive-tiling-smollm2-135m-q4-1-30-layers-pp9-tg8.json': stages, model, shape, and threads if several."""
    from common.machine import slug

    model = runs[0]["model"]
    stages = [short(r["stage"]) for r in runs]
    words = [*stages, model["name"], model["quant"], f"{model['layers']} layers", runs[0]["shape"]]
    threads = max(r["threads"] for r in runs)
    words += [f"{threads} threads"] * (threads > 1)
    return slug(" ".join(words))[:LONGEST] + ".json"
