"""`lesson list`: the ladder, read from the modules themselves."""

from common import diff, show
from common.stage import LADDER, source_path


def document() -> dict:
    return {"schema": 1, "stages": [entry(name) for name in LADDER]}


def entry(name: str) -> dict:
    """A stage's name, the stage it is built on, what it changes and its idea; nothing of it is run."""
    path = source_path(name)
    told = diff.docstring(path)
    return {
        "name": name,
        "previous": diff.constant(path, "PREVIOUS"),
        "changes": list(diff.constant(path, "CHANGES") or ()),
        "title": told[""],
        "idea": told.get("Idea", ""),
        "lines": len(path.read_text("utf-8").splitlines()),
    }


def render(found: dict) -> list:
    rows = show.table("stage", "built on", "lines")
    rows.add_column("the one idea", justify="left")
    for stage in found["stages"]:
        rows.add_row(stage["name"], stage["previous"] or "–", str(stage["lines"]), stage["idea"])
    return [rows, "", "next: lesson read naive · lesson diff naive tiling · lesson compare naive tiling"]
