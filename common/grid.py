"""`lesson compare --grid`: ideas with and without each other.

A ladder measures an idea on top of all those below it, so its order decides what each one is worth. Here every
combination of a few ideas is put together from the stages' own definitions: an idea is what a stage changes in the one
before it, applied to a stage that may lack what came between. A combination is checked like any stage, and one that
can't be had, or is wrong, is an answer too: that idea rests on the other.

An idea's worth is then told three ways: as the first of these ideas, as the last, and as the mean over all orders,
which is the one way of sharing the whole that favours none (Shapley 1953, "A value for n-person games"; of logarithms
of times, since speed-ups multiply).
"""

import ast
import difflib
import re
import sys
import tempfile
from itertools import combinations, pairwise, permutations
from math import exp, log
from pathlib import Path
from statistics import fmean, median

from common import compare, diff, harness, machine, records, show
from common.diff import Change, Definition
from common.job import Job, UsageError
from common.run import WrongError, answered, check
from common.stage import CPU, code_path
from common.stats import FEWEST, summary, verdict

IDEAS = ("tiling", "kv_cache")  # what a grid shows unless told otherwise
MOST = 4  # ideas: 16 combinations
ALIKE = 0.6  # of a definition's words: an idea that changes less than this of it may change it elsewhere, too
METRICS = ("ttft_ms", "ms_per_token")
PLACES = ("first", "last")  # of an idea among the others


class Missing(Exception):
    """A combination that can't be put together; str(e) says why."""


# ---- putting stages together -----------------------------------------------------------------------------------


def checked(names: list[str]) -> list[str]:
    """The ideas in the ladder's order. Raises UsageError, and StageError for a name that is no stage."""
    names = list(names) or list(IDEAS)
    for name in names:
        code_path(name)
        if name not in CPU or not diff.constant(code_path(name), "PREVIOUS"):
            raise UsageError(f"{name} can't be taken apart: a grid is of CPU stages that are built on another")
    if len(set(names)) != len(names) or not 2 <= len(names) <= MOST:
        raise UsageError(f"a grid is of two to {MOST} different ideas, such as {' '.join(IDEAS)}")
    return sorted(names, key=CPU.index)


def combine(base: str, ideas: tuple[str, ...]) -> str:
    """The text of a stage that has these ideas, given in the ladder's order, and base's own code elsewhere.

    Raises Missing where an idea changes what base and the other ideas don't have.
    """
    text = code_path(base).read_text("utf-8")
    for idea in ideas:
        before, after = (code_path(n) for n in (diff.constant(code_path(idea), "PREVIOUS"), idea))
        changes = diff.changes(before, after)
        for change in changes:
            text = applied(text, change, idea)
        text = without(text, [change.name for change in changes if not change.new])
        for mark in set(diff.MARKS) - {"PREVIOUS", "CHANGES"}:
            value = diff.constant(after, mark)
            if value is not None:
                text = re.sub(rf"^{mark} = .*\n", "", text, flags=re.M)
                text = text.replace("\nCHANGES =", f"\n{mark} = {value!r}\nCHANGES =", 1)
        text = re.sub(r"^PREVIOUS = .*$", f'PREVIOUS = "{idea}"', text, flags=re.M)  # whose costs are most like its own
    return text


def applied(text: str, change: Change, idea: str) -> str:
    """The text with one definition changed as the idea changes it."""
    there, old, new = diff.definitions(text), change.old, change.new
    have = there.get(change.name)
    if new is None or (have and have.text == new.text):
        return text
    if (have and have.text) != (old and old.text):
        text_of_both = have and old and merged(have, old, new)
        if not text_of_both:
            writer = author(idea, change.name, old)
            raise Missing(
                f"{idea} changes {change.name} as {writer} has it: without {writer}, nothing is there to change"
            )
        new = new._replace(text=text_of_both)
    return replaced(text, have, new)


def without(text: str, names: list[str]) -> str:
    """The text without those of these definitions that nothing in it needs any more."""
    for name in names:
        there = diff.definitions(text)
        if name in there and name not in needed(there):
            text = removed(text, there[name])
    return text


def needed(there: dict[str, Definition]) -> set[str]:
    """What a stage's entry points use, and what that uses."""
    found, new = set(), {"load", "forward", "logits", "generate"}
    while new:
        found |= new
        trees = [ast.parse(there[name].text) for name in new if name in there]
        new = {n.id for tree in trees for n in ast.walk(tree) if isinstance(n, ast.Name)} - found
    return found


def author(idea: str, name: str, old: Definition | None) -> str:
    """The stage below an idea that gave a definition the text that the idea changes."""
    found = below = diff.constant(code_path(idea), "PREVIOUS")
    while old and below:
        there = diff.definitions(code_path(below).read_text("utf-8")).get(name)
        if not there or there.text != old.text:
            break
        found, below = below, diff.constant(code_path(below), "PREVIOUS")
    return found


def merged(have: Definition, old: Definition, new: Definition) -> str | None:
    """A function where the idea's change of it meets another change; None where they collide."""
    if not all(map(is_function, (have, old, new))):
        return None
    a, b, c = (words(d.text) for d in (have, old, new))
    if difflib.SequenceMatcher(None, a, b, autojunk=False).ratio() < ALIKE:
        return None
    both = merge(b, a, c)
    return both and "".join(both)


def is_function(definition: Definition) -> bool:
    return isinstance(ast.parse(definition.text).body[0], ast.FunctionDef)


def words(text: str) -> list[str]:
    """A function's text in its smallest pieces, without docstring and comments, which two ideas word differently."""
    node = ast.parse(text).body[0]
    if ast.get_docstring(node) is not None:
        del node.body[0]
    return re.findall(r"\n *|\w+|[^\w\n]", ast.unparse(node))


def merge(base: list[str], ours: list[str], theirs: list[str]) -> list[str] | None:
    """base with the edits of both sides; None where they touch the same place. The merge of diff3, word by word."""

    def edits(side):
        matcher = difflib.SequenceMatcher(None, base, side, autojunk=False)
        return [(i, j, side[k:m]) for tag, i, j, k, m in matcher.get_opcodes() if tag != "equal"]

    both = sorted([*edits(ours), *(e for e in edits(theirs) if e not in edits(ours))], key=lambda e: e[:2])
    for (i, j, _), (k, m, _) in pairwise(both):
        if k < j or (i, j) == (k, m):
            return None
    merged, at = [], 0
    for i, j, instead in both:
        merged += [*base[at:i], *instead]
        at = j
    return merged + base[at:]


def replaced(text: str, have: Definition | None, new: Definition) -> str:
    """The text with a definition in the place of another; without one, an import goes on top, the rest before load."""
    imported = is_import(new)
    if have and not is_import(have) and not imported:
        lines, at = text.splitlines(), have.line - 1
        lines[at : at + len(have.text.splitlines())] = new.text.splitlines()
        return "\n".join(lines) + "\n"
    lines = (removed(text, have) if have else text).splitlines()
    if imported:
        last = max(n.end_lineno for n in ast.parse("\n".join(lines)).body if isinstance(n, ast.Import | ast.ImportFrom))
        lines[last:last] = [new.text]
    else:
        at = diff.definitions("\n".join(lines))["load"].line - 1
        lines[at:at] = [*new.text.splitlines(), "", ""]
    return "\n".join(lines) + "\n"


def removed(text: str, have: Definition) -> str:
    lines = text.splitlines()
    if not is_import(have):
        del lines[have.line - 1 : have.line - 1 + len(have.text.splitlines())]
        return "\n".join(lines) + "\n"
    for node in reversed(ast.parse(text).body):
        if isinstance(node, ast.Import | ast.ImportFrom):
            kept = [alias for alias in node.names if (alias.asname or alias.name) != have.name]
            if len(kept) < len(node.names):
                node.names = kept
                lines[node.lineno - 1 : node.end_lineno] = [ast.unparse(node)] if kept else []
    return "\n".join(lines) + "\n"


def is_import(definition: Definition) -> bool:
    return definition.text.startswith(("from ", "import "))


# ---- measuring -------------------------------------------------------------------------------------------------


def grid(names: list[str], job: Job, budget_s: float, save: str | None = None) -> dict:
    """Build, check and time every combination. -> the JSON document."""
    ideas = checked(names)
    base = diff.constant(code_path(ideas[0]), "PREVIOUS")
    folder = records.writable(records.folder(save))
    subsets = [chosen for count in range(len(ideas) + 1) for chosen in combinations(ideas, count)]
    cells = {chosen: {"ideas": list(chosen), "missing": None, "wrong": None} for chosen in subsets}
    samples = {}
    with tempfile.TemporaryDirectory() as scratch:
        paths = written(base, cells, Path(scratch))
        first = first_runs(paths, cells, job, budget_s)
        here = machine.measure()
        if first:
            print(estimate(first, budget_s), file=sys.stderr)
            ready = list(first)
            taken, agreed = compare.take([paths[chosen] for chosen in ready], job, budget_s)
            samples = dict(zip(ready, taken, strict=True))
            for chosen, found in zip(ready, agreed, strict=True):
                records.within_roof(job, paths[chosen], samples[chosen], here)
                cells[chosen]["nmse"] = found.nmse
    times = {chosen: measured(taken, samples) for chosen, taken in samples.items()}
    for chosen, cell in cells.items():
        for metric in METRICS:
            found = times.get(chosen, {}).get(metric)
            cell[metric] = summary(found) if found else None
    document = {
        "schema": records.SCHEMA,
        "base": base,
        "ideas": ideas,
        "cells": list(cells.values()),
        "credit": [credit(idea, ideas, times, metric) for metric in METRICS for idea in ideas],
        "model": job.model_name,
        "shape": job.shape,
        "tokens_timed": min((len(s.output_ids) for taken in samples.values() for s in taken), default=None),
        "threads": job.threads,
        "machine": records.machine_summary(here),
        "commit": records.commit(),
        "budget_s": budget_s,
    }
    name = machine.slug(" ".join([*ideas, job.model_name, job.shape]))[: records.LONGEST]
    records.save(document, folder / here.slug / "grid" / f"{name}.json")
    return document


def written(base: str, cells: dict, folder: Path) -> dict[tuple, str]:
    """A file for each combination that can be had; the others' cells say why not."""
    paths = {}
    for chosen, cell in cells.items():
        try:
            text = combine(base, chosen)
        except Missing as error:
            cell["missing"] = str(error)
            continue
        path = folder / f"{'_'.join([base, *chosen])}.py"
        path.write_text(text, "utf-8")
        paths[chosen] = str(path)
    return paths


def first_runs(paths: dict[tuple, str], cells: dict, job: Job, budget_s: float) -> dict[tuple, harness.Sample]:
    """One run of each file, so that a combination that is wrong costs the others nothing; its cell says how."""
    first = {}
    with tempfile.TemporaryDirectory() as scratch, compare.progress() as bar:
        task = bar.add_task("checking", total=len(paths))
        for chosen, path in paths.items():
            bar.update(task, description=f"checking {label(chosen)}")
            rows = str(Path(scratch) / "rows.npy")
            try:
                sample = answered(job, job.request(path, n=min(2, job.n), budget_s=budget_s / 3, rows_file=rows))
                check(path, job, sample, rows)
                first[chosen] = sample
            except (WrongError, harness.RunError) as error:
                cells[chosen]["wrong"] = str(error).replace(path, label(chosen) or "the base")
            bar.advance(task)
    return first


def label(chosen: tuple[str, ...]) -> str:
    return " + ".join(chosen)


def estimate(first: dict[tuple, harness.Sample], budget_s: float) -> str:
    """How long the timed rounds will take, from a run of each."""
    each = [compare.START_S + s.ttft_ms / 1e3 + (s.ms_per_token() or 0) * 7 / 1e3 for s in first.values()]
    most = len(each) * (budget_s + compare.ROUNDS * compare.START_S)
    total = min(most, compare.ROUNDS * sum(each))
    return (
        f"about {total:.0f} s: {len(each)} combinations, {compare.ROUNDS} rounds of each, at most {budget_s:.0f} s of "
        "timed work each (--budget)"
    )


def measured(taken: list, samples: dict) -> dict[str, list[float]]:
    """A combination's times by metric, over the tokens that every run has; the first round is not among them."""
    if len(taken) > FEWEST:
        taken = taken[1:]
    n = min(len(s.output_ids) for every in samples.values() for s in every)
    later = [s.ms_per_token(n) for s in taken] if n > 1 else None
    return {"ttft_ms": [s.ttft_ms for s in taken], "ms_per_token": later}


# ---- credit ----------------------------------------------------------------------------------------------------


def credit(idea: str, ideas: list[str], times: dict[tuple, dict], metric: str) -> dict:
    """What an idea is worth by how many times it shortens a metric: put first, put last, and over all orders.

    Only orders in which every step could be measured count; a value that no such order gives is None.
    """
    known = {chosen: median(found[metric]) for chosen, found in times.items() if found.get(metric)}

    def ordered(some) -> tuple[str, ...]:
        return tuple(i for i in ideas if i in some)

    def step(without, with_it) -> dict | None:
        if without not in known or with_it not in known:
            return None
        return verdict(times[without][metric], times[with_it][metric])._asdict()

    gains = []
    for order in permutations(ideas):
        stops = [ordered(order[:i]) for i in range(len(order) + 1)]
        if all(stop in known for stop in stops):
            at = order.index(idea)
            gains.append(log(known[stops[at]] / known[stops[at + 1]]))
    others = ordered(set(ideas) - {idea})
    return {
        "idea": idea,
        "metric": metric,
        "first": step((), (idea,)),
        "last": step(others, tuple(ideas)),
        "mean": exp(fmean(gains)) if gains else None,
        "orders": len(gains),
    }


# ---- what the reader sees --------------------------------------------------------------------------------------


def render(document: dict) -> list:
    ideas, cells = document["ideas"], document["cells"]
    base = cells[0]
    rows = show.table(*ideas, "TTFT ms", "spread", "×", "ms/token", "spread", "×")
    for column in rows.columns[: len(ideas)]:
        column.justify = "center"
    notes = []
    for cell in cells:
        shown = ["with" if idea in cell["ideas"] else "–" for idea in ideas]
        for metric in METRICS:
            found = cell[metric]
            if not found:
                shown += ["none" if cell["missing"] else "wrong" if cell["wrong"] else "–", "", ""]
                continue
            ratio = base[metric]["median"] / found["median"] if base[metric] else None
            shown += [show.number(found["median"]), show.spread(found), show.times(ratio)]
        rows.add_row(*shown)
        if why := cell["missing"] or cell["wrong"]:
            notes.append(f"{label(cell['ideas']) or document['base']}: {why}")
    worth = show.table("what each is worth", "first", "last", "mean of all orders")
    for found in document["credit"]:
        metric = {"ttft_ms": "TTFT", "ms_per_token": "ms/token"}[found["metric"]]
        ratios = [told(found[at]) for at in PLACES]
        worth.add_row(f"{found['idea']}, {metric}", *ratios, show.times(found["mean"]))
    head = f"{document['base']} with and without {', '.join(ideas)}"
    if any(found[at] and found[at]["verdict"] == "too few runs" for found in document["credit"] for at in PLACES):
        notes.append("? from too few runs to be sure: a larger --budget gives more")
    where = f"{document['machine']['name']}, {document['threads']} thread{'s' * (document['threads'] > 1)}"
    where += f" · {show.named(document['model'])}"
    return [
        show.heading(head),
        rows,
        "",
        worth,
        "",
        *notes,
        show.dim(f"{where} · {document['shape']}, {document['tokens_timed']} tokens timed"),
    ]


def told(step: dict | None) -> str:
    """'1.83×', '1.83× ?' from too few runs, '≈ 1' for no measurable change, '–' for a step that can't be taken."""
    if step is None:
        return "–"
    if step["verdict"] == "no measurable change":
        return "≈ 1"
    return show.times(step["ratio"]) + " ?" * (step["verdict"] == "too few runs")
