"""`lesson sweep`: one module constant of a stage at several values, each in a copy of the file, each checked."""

import re
import tempfile
from pathlib import Path

from common import diff, harness, machine, records, show
from common.compare import progress
from common.job import Job, UsageError
from common.run import WrongError, check
from common.stage import code_path, source_path
from common.stats import summary

ROUNDS = 3


def parse(stage: str, setting: str) -> tuple[str, list[str]]:
    """'TILE=16,32' -> ('TILE', ['16', '32']). Raises UsageError where the stage has no such constant."""
    name, _, values = setting.partition("=")
    found = diff.definitions(code_path(stage).read_text("utf-8"))
    constants = [c for c in found if c.isupper()]
    if name not in constants:
        have = f"it has {', '.join(constants)}" if constants else "it has none"
        raise UsageError(f"{stage} has no constant {name!r} to sweep: {have}")
    listed = [v.strip() for v in values.split(",") if v.strip()]
    if not listed or not all(re.fullmatch(r"-?\d+", v) for v in listed):
        raise UsageError(f"{setting!r}: give whole numbers, such as {name}=16,32,64")
    return name, listed


def sweep(stage: str, setting: str, job: Job, save: str | None = None) -> dict:
    """TTFT of the stage at each value, ROUNDS runs each, taken in turns. -> the JSON document."""
    name, values = parse(stage, setting)
    source = source_path(stage).read_text("utf-8")
    rows = {value: {"value": int(value), "nmse": None, "wrong": None, "times": []} for value in values}
    with tempfile.TemporaryDirectory() as folder, progress() as bar:
        task = bar.add_task(stage, total=ROUNDS * len(values))
        for _ in range(ROUNDS):
            for value, row in rows.items():
                bar.update(task, description=f"{name} = {value}")
                if not row["wrong"]:
                    copy = Path(folder) / f"{source_path(stage).stem}_{name}_{value.replace('-', 'minus')}.py"
                    bound = re.sub(rf"^{name} = [^#\n]*", f"{name} = {value}  ", source, flags=re.MULTILINE)
                    copy.write_text(bound, "utf-8")
                    logits = str(Path(folder) / "rows.npy")
                    try:
                        sample = harness.run(job.request(str(copy), n=1, rows_file=logits))
                        row["nmse"] = check(str(copy), job, sample, logits).nmse
                        row["times"].append(sample.ttft_ms)
                    except (WrongError, harness.RunError) as error:
                        row["wrong"] = str(error)
                bar.advance(task)
    here = machine.identify()
    for row in rows.values():
        taken = row.pop("times")
        row["ttft_ms"] = summary(taken) if taken else None
    document = {
        "schema": records.SCHEMA,
        "stage": stage,
        "constant": name,
        "shape": f"pp{len(job.ids)}",
        "model": job.model_name,
        "machine": records.machine_summary(here),
        "commit": records.commit(),
        "rows": list(rows.values()),
    }
    path = records.folder(save) / here.slug / "sweep" / f"{machine.slug(f'{stage} {name} {job.model_name}')}.json"
    records.save(document, path)
    return document


def render(document: dict) -> list:
    timed = [r["ttft_ms"]["median"] for r in document["rows"] if r["ttft_ms"]]
    best = min(timed, default=None)
    rows = show.table(document["constant"], "TTFT ms", "spread", "of the best", "logits NMSE")
    wrong = []
    for r in document["rows"]:
        if r["wrong"]:
            rows.add_row(str(r["value"]), "–", "–", "–", "wrong")
            wrong.append(f"{document['constant']} = {r['value']}: {r['wrong']}")
            continue
        time = r["ttft_ms"]
        rows.add_row(
            str(r["value"]),
            show.number(time["median"]),
            show.spread(time),
            show.times(time["median"] / best),
            f"{r['nmse']:.0e}",
        )
    where = f"{document['stage']}, {document['shape']}, {document['model']}, {document['machine']['name']}"
    return [rows, *wrong, show.dim(where)]
