"""`lesson import`: rows that llama-bench wrote with `-o json`, kept as records and shown beside a comparison.

A row is taken only for the model, threads and shape it was measured with: llama-bench names its file, and tells its
bytes and parameters. `--check` runs llama.cpp as our own column at the same shapes, so that the two clocks can be
compared: pp64 is our time to first token of 64 ids, tg32 our ms/token over 32 tokens after one, @d512 after 512.
"""

import hashlib
import json
import re
from pathlib import Path
from statistics import median

from common import harness, machine, peers, records, show
from common.compare import progress
from common.job import Job, UsageError, brief, quantization, random_ids, shape_counts
from common.stage import require
from common.stats import summary

NEEDED = {"model_filename": str, "model_type": str, "model_size": int, "model_n_params": int, "n_threads": int,
          "n_prompt": int, "n_gen": int, "cpu_info": str, "samples_ns": list}  # fmt: skip
SETTINGS = ("n_batch", "n_ubatch", "type_k", "type_v", "n_gpu_layers", "flash_attn", "repack", "backends")
TYPE = re.compile(r"\b(?:I?Q\d_\w+|B?F16|F32)")
CLOSE = 0.10  # the two clocks should lie within this
ROUNDS = 3  # fresh processes of the column at each shape


# ---- reading and refusing --------------------------------------------------------------------------------------


def rows_of(path: Path) -> list[dict]:
    """The file's rows, each with the keys that are needed. Raises UsageError."""
    try:
        rows = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}: give a file that `llama-bench -o json` wrote") from error
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: give a file that `llama-bench -o json` wrote") from error
    if not (isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows)):
        raise UsageError(f"{path} holds no list of rows: give a file that `llama-bench -o json` wrote")
    for row in rows:
        for key, kind in NEEDED.items():
            if not isinstance(row.get(key), kind) or isinstance(row.get(key), bool):
                raise UsageError(f"{path} lacks {key} in a row: give a file that `llama-bench -o json` wrote")
        samples = row["samples_ns"]
        if not samples or not all(isinstance(ns, int | float) and ns > 0 for ns in samples):
            raise UsageError(f"{path} has a row whose samples_ns are not times: give a file as llama-bench wrote it")
        if bool(row["n_prompt"]) == bool(row["n_gen"]) or min(row["n_prompt"], row["n_gen"]) < 0:
            raise UsageError(f"{path} has a row of {row_shape(row)}: only rows of a prompt or of new tokens are kept")
    return rows


def matched(rows: list[dict], path: Path, job: Job, threads: int | None, shape: str | None) -> list[dict]:
    """The rows of this model and shape. Raises UsageError where the model, the threads or the shape is another."""
    tensors = job.gguf.gguf.tensors.values()
    own = {"model_size": sum(t.nbytes for t in tensors), "model_n_params": sum(elements(t) for t in tensors)}
    words = {"model_size": "bytes of weights", "model_n_params": "parameters"}
    for row in rows:
        of = f"{path} was taken with"
        for key, has in own.items():
            if row[key] != has:
                raise UsageError(
                    f"{of} a model of {row[key]:,} {words[key]}, and {job.path.name} has {has:,}: give its -m"
                )
        if Path(row["model_filename"]).name != job.path.name:
            raise UsageError(f"{of} {brief(Path(row['model_filename']).name)}, not {job.path.name}: give its -m")
        types = [found.upper() for found in TYPE.findall(row["model_type"])]
        if not row["model_type"].startswith(job.gguf.config.arch) or (types and quantization(job.gguf) not in types):
            raise UsageError(
                f"{of} a model of type {brief(row['model_type'])}, and {job.path.name} is {quantization(job.gguf)}"
            )
        if threads is not None and row["n_threads"] != threads:
            raise UsageError(f"{of} {row['n_threads']} threads, not {threads}: give its --threads")
    if len({row["n_threads"] for row in rows}) > 1:
        raise UsageError(f"{path} mixes numbers of threads: run llama-bench with one -t a file")
    if shape is None:
        return rows
    wanted = parts_of(shape)
    kept = [row for row in rows if row_shape(row) in wanted]
    missing = [name for name in wanted if name not in map(row_shape, kept)]
    if missing:
        have = ", ".join(dict.fromkeys(map(row_shape, rows)))
        raise UsageError(f"{path} has no row of {' or '.join(missing)}: it has {have}")
    return kept


def elements(tensor) -> int:
    count = 1
    for extent in tensor.shape:
        count *= extent
    return count


def parts_of(shape: str) -> list[str]:
    """'pp64+tg32@d512' -> ['pp64@d512', 'tg32@d512']. Raises UsageError."""
    shape_counts(shape, None)
    parts, _, depth = shape.partition("@")
    return [part + (f"@{depth}" if depth else "") for part in parts.split("+")]


def row_shape(row: dict) -> str:
    """A row's shape by llama-bench's names: 'pp64', 'tg32@d512'."""
    parts = [f"pp{row['n_prompt']}"] if row["n_prompt"] else []
    parts += [f"tg{row['n_gen']}"] if row["n_gen"] else []
    return "+".join(parts) + (f"@d{row['n_depth']}" if row.get("n_depth") else "")


# ---- the command -----------------------------------------------------------------------------------------------


def bring_in(
    path: Path, job: Job, threads: int | None = None, shape: str | None = None, check: bool = False, save=None
) -> dict:
    """Keep a file's rows as a record of the machine it names; a shape recorded before is replaced. -> the document.

    Raises UsageError for rows that are not of this model, threads or shape, StageError where --check finds no peer.
    """
    rows = matched(rows_of(path), path, job, threads, shape)
    if check:
        require("llama.cpp")
    first, here = rows[0], machine.identify()
    folder = records.writable(records.folder(save))
    name = machine_of(first, here.name)
    slug = machine.slug(name)
    title = machine.slug(f"llama-bench {job.model_name} {first['n_threads']} threads")
    target = folder / slug / "peers" / f"{title}.json"
    old, fresh = before(target, job), {row_shape(row): told(row) for row in rows}
    kept = {row["shape"]: row for row in old["rows"]} | fresh
    checks = [c for c in old["check"] or [] if c["shape"] not in fresh] + (checked(job, rows) if check else [])
    document = {
        "schema": records.SCHEMA,
        "tool": "llama-bench",
        "file": {"name": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()},
        "build": {"commit": first.get("build_commit"), "number": first.get("build_number")},
        "settings": {key: first[key] for key in SETTINGS if key in first},
        "machine": {"name": name, "slug": slug},
        "model": {
            "name": job.model_name,
            "sha256": job.sha256,
            **{k: first[k] for k in NEEDED if k.startswith("model_")},
            "model_filename": job.path.name,  # which matched has compared; where it lay is nobody's business
        },
        "threads": first["n_threads"],
        "rows": list(kept.values()),
        "check": checks or None,  # a row that is replaced takes its check with it
        "peer": peers.about() if check else old["peer"],
    }
    records.save(document, target)
    return document


def machine_of(row: dict, here: str) -> str:
    """The GPU that a row was taken on, else the CPU; by our own name for it where the file names this machine's."""
    if row.get("gpu_info") and row.get("n_gpu_layers"):
        return row["gpu_info"].split(", ")[0]
    names = row["cpu_info"].split(", ")
    return here if machine.sold_as() in names else names[0]


def before(target: Path, job: Job) -> dict:
    """The record of an earlier import for the same model, or an empty one."""
    nothing = {"rows": [], "check": None, "peer": None}
    try:
        old = json.loads(target.read_text("utf-8"))
    except (OSError, ValueError):
        return nothing
    return old if old["model"]["sha256"] == job.sha256 else nothing


def told(row: dict) -> dict:
    """A row as a record keeps it: ms of the whole prompt, or of one new token."""
    count = row["n_prompt"] or row["n_gen"]
    each = 1 if row["n_prompt"] else row["n_gen"]
    return {
        "shape": row_shape(row),
        "prompt": row["n_prompt"],
        "new": row["n_gen"],
        "depth": row.get("n_depth", 0),
        "ms": summary([ns / each / 1e6 for ns in row["samples_ns"]]),
        "tokens_per_s": median(count / ns * 1e9 for ns in row["samples_ns"]),
        "taken": row.get("test_time"),
    }


def checked(job: Job, rows: list[dict]) -> list[dict]:
    """llama.cpp as our column at each row's shape: [{shape, llama_bench_ms, column_ms, ratio, within}].

    None stands for a prompt at some depth, which the column has no time of its own for.
    """
    shapes = {row_shape(row): row for row in rows if not (row["n_prompt"] and row.get("n_depth"))}
    samples: dict[str, list[float]] = {name: [] for name in shapes}
    with progress() as bar:
        task = bar.add_task("llama.cpp", total=ROUNDS * len(shapes))
        for _ in range(ROUNDS):
            for name, row in shapes.items():
                bar.update(task, description=f"llama.cpp, {name}")
                ids = random_ids(row["n_prompt"] or row.get("n_depth") or 1, job.gguf.config.V)
                request = job.request("llama.cpp", ids=ids, n=row["n_gen"] + 1, threads=row["n_threads"], stop_ids=[])
                sample = harness.run(request)
                samples[name].append(sample.ttft_ms if row["n_prompt"] else sample.ms_per_token())
                bar.advance(task)
    found = []
    for name, row in shapes.items():
        theirs, ours = told(row)["ms"]["median"], summary(samples[name])
        ratio = ours["median"] / theirs
        within = abs(ratio - 1) <= CLOSE
        found.append({"shape": name, "llama_bench_ms": theirs, "column_ms": ours, "ratio": ratio, "within": within})
    return found


# ---- beside a comparison ---------------------------------------------------------------------------------------


def recorded(job: Job, slug: str, save: str | None = None) -> list[dict]:
    """The recorded rows of this machine, model and threads that time what the job times: its prompt, or as many tokens.

    A row of new tokens keeps its own depth, which its shape names.
    """
    found = []
    for path in sorted((records.folder(save) / slug / "peers").glob("llama-bench-*.json")):
        record = json.loads(path.read_text("utf-8"))
        if (record["model"]["sha256"], record["threads"]) != (job.sha256, job.threads) or job.cut:
            continue
        for row in record["rows"]:
            prompt = row["prompt"] == len(job.ids) and not row["depth"]
            if prompt or (row["new"] in (job.n - 1, job.n) and row["depth"] <= len(job.ids)):
                found.append(
                    {**row, "tool": record["tool"], "build": record["build"], "file": f"{slug}/peers/{path.name}"}
                )
    return found


def beside(rows: list[dict]) -> list:
    """The recorded rows, as a comparison shows them."""
    if not rows:
        return []
    laid = show.table("recorded", "ms", "spread", "tokens/s", "taken")
    for row in rows:
        what = "whole prompt" if row["prompt"] else "a token"
        ms, speed = row["ms"], show.number(row["tokens_per_s"])
        taken = (row["taken"] or "")[:10]
        laid.add_row(f"{row['tool']} {row['shape']}, {what}", show.number(ms["median"]), show.spread(ms), speed, taken)
    return [laid, show.dim(f"recorded, not run now: reports/{rows[0]['file']}"), ""]


def render(document: dict) -> list:
    """What was brought in, and how the two clocks agree."""
    checks = {row["shape"]: row for row in document["check"] or []}
    heads = ["llama.cpp here", "ratio"] if checks else []
    laid = show.table("", "ms", "spread", "tokens/s", *heads)
    for row in document["rows"]:
        cells = [
            row["shape"],
            show.number(row["ms"]["median"]),
            show.spread(row["ms"]),
            show.number(row["tokens_per_s"]),
        ]
        if checks:
            found = checks.get(row["shape"])
            cells += [show.number(found["column_ms"]["median"]), f"{found['ratio']:.3f}"] if found else ["–", "–"]
        laid.add_row(*cells)
    shown = [laid]
    if checks:
        off = [name for name, row in checks.items() if not row["within"]]
        word = f"more than {CLOSE:.0%} apart at {', '.join(off)}" if off else f"within {CLOSE:.0%} of each other"
        shown += [f"llama-bench and this course's clock are {word}.", peers.told(document["peer"])]
    threads = f"{document['threads']} thread{'s' if document['threads'] > 1 else ''}"
    build = document["build"]["commit"]
    where = f"{document['machine']['name']}, {threads} · {show.named(document['model']['name'])} · llama.cpp {build}"
    if document["machine"]["slug"] != machine.slug(machine.identify().name):
        shown.append("These rows are of another machine, so no comparison here shows them.")
    return [*shown, show.dim(where)]
