"""`lesson list`: the ladder, read from the modules themselves."""

import importlib
from difflib import get_close_matches

from common import diff, practice, show
from common.stage import LADDER, StageError, code_path, ladders


def document(ladder: str | None = None) -> dict:
    """The ladder of stages and the names of the kernel ladders, or the rungs of one of those. Raises StageError."""
    known = ladders()
    if ladder is None:
        return {"schema": 1, "stages": [entry(name) for name in LADDER], "ladders": [kernels(name) for name in known]}
    if ladder not in known:
        near = get_close_matches(ladder, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
        raise StageError(f"unknown ladder {ladder!r}: {hint}")
    found = kernels(ladder)
    return {"schema": 1, "ladder": ladder, "stages": [entry(name) for name in found["rungs"]]}


def kernels(ladder: str) -> dict:
    """A kernel ladder's name, title and rungs in order."""
    package = importlib.import_module(f"stages.{ladder}")
    return {"name": ladder, "title": package.__doc__.split("\n")[0], "rungs": [f"{ladder}/{s}" for s in package.STAGES]}


def entry(name: str) -> dict:
    """A stage's name, the stage it is built on, what it changes and its idea; nothing of it is run."""
    path = code_path(name)
    told = diff.docstring(path)
    return {
        "name": name,
        "previous": diff.constant(path, "PREVIOUS"),
        "changes": list(diff.constant(path, "CHANGES") or ()),
        "title": told[""],
        "idea": told.get("Idea", ""),
        "lines": len(path.read_text("utf-8").splitlines()),
        "progress": practice.progress()["stages"].get(name, {}),
    }


def render(found: dict) -> list:
    rows = show.table("stage", "built on", "lines")
    rows.add_column("the one idea", justify="left")
    you = [practice.done(stage["progress"]) for stage in found["stages"]]
    if any(you):
        rows.add_column("you", justify="left")
    for stage, did in zip(found["stages"], you, strict=True):
        cells = [stage["name"], stage["previous"] or "–", str(stage["lines"]), stage["idea"]]
        rows.add_row(*cells, *([did] if any(you) else []))
    ladders = show.table("kernel ladder")
    ladders.add_column("", justify="left")
    for ladder in found.get("ladders", []):
        ladders.add_row(ladder["name"], ladder["title"])
    a, b = (stage["name"] for stage in found["stages"][:2])
    shown = [rows, "", ladders, ""] if found.get("ladders") else [rows, ""]
    return [*shown, f"next: lesson read {a} · lesson diff {a} {b} · lesson compare {a} {b}"]
