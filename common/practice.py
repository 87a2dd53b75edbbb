"""Learning by doing: a stage left for the reader to write, hints to it, predictions, and what has been done of them.

A practice file is made from the stage and the stage before it each time it is asked for, so that it can't fall behind
either. What the reader did is kept in one file of the user's data folder, which LESSON_DATA moves.
"""

import ast
import importlib
import json
import math
import re
import sys
from functools import partial
from pathlib import Path

from common import diff, records
from common.job import UsageError
from common.stage import FOLDER, LADDER, StageError, code_path, rungs, said, where

FOLDER_NAME = "practice"  # below the folder the reader is in
EMPTY = "is yours to write"  # what an emptied definition raises, and how it is known again
CUDA_EMPTY = "// Yours to write."
PARTS = re.compile(r"(Idea|Was|Change|Expect)\s")


# ---- names ----------------------------------------------------------------------------------------------------


def previous(stage: str) -> str:
    """The stage that `stage` is built on, by its full name. Raises UsageError for a ladder's first."""
    found = diff.constant(code_path(stage), "PREVIOUS")
    ladder, slash, _ = stage.rpartition("/")
    if found is None:
        mine = [name for name in (*LADDER, *rungs()) if name.startswith(ladder) and ("/" in name) == bool(ladder)]
        after = [name for name in mine if f"{ladder}{slash}{diff.constant(code_path(name), 'PREVIOUS')}" == stage]
        hint = f"begin with {after[0]}" if after else "begin with the one after it"
        raise UsageError(f"{stage} has no stage before it to start from: {hint}")
    return f"{ladder}{slash}{found}"


def practised(path: Path) -> str:
    """The stage that a practice file is about. Raises StageError where it can't be read, UsageError where it says none.

    The file is read and not run.
    """
    try:
        stage = diff.constant(path, "PRACTICE")
    except (SyntaxError, ValueError) as error:
        raise StageError(f"{path.name}: {where(error, path)}{said(error)}", exit_code=1) from error
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{path} can't be read ({error}): `lesson practice tiling` writes one to begin with"
        ) from error
    if stage is None:
        raise UsageError(f"{path} has no line PRACTICE = …: `lesson practice tiling` writes a file to begin with")
    code_path(stage)
    return stage


def chosen(file: str | None) -> Path:
    """The file that was named, by its stage or its path, or else the practice file saved last.

    Raises UsageError where there is none.
    """
    if file:
        known = file in (*LADDER, *rungs())
        path = file_of(file) if known and not Path(file).is_file() else Path(file)
        if not path.is_file():
            stage = file if known else "tiling"
            raise UsageError(f"no file {file}: `lesson practice {stage}` writes one to begin with")
        return path
    found = sorted(Path(FOLDER_NAME).glob("*.py"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise UsageError(f"no file in {FOLDER_NAME}/: `lesson practice tiling` writes one to begin with")
    return found[-1]


# ---- the practice file ----------------------------------------------------------------------------------------


def file_of(stage: str) -> Path:
    return Path(FOLDER_NAME) / f"{stage.replace('/', '_')}.py"


def write(stage: str, force: bool = False) -> Path:
    """Write practice/STAGE.py, whole or not at all. Raises UsageError where it is there already."""
    path = file_of(stage)
    text = exercise(stage)
    if path.exists() and not force:
        raise UsageError(f"{path} is there already, and what you wrote in it would be lost: --force begins anew")
    try:
        path.parent.mkdir(exist_ok=True)
        records.write(text, path)
    except OSError as error:
        raise UsageError(f"{path} can't be written ({error.strerror}): go to a folder of your own") from error
    note(stage, hints=0)
    return path


def written(stage: str, path: Path) -> dict:
    """`lesson practice --json`."""
    code = code_path(stage)
    mine = yours(diff.constant(code, "CHANGES"), diff.definitions(code.read_text("utf-8")))
    return {"schema": 1, "stage": stage, "previous": previous(stage), "file": str(path), "yours": mine}


def next_steps(document: dict) -> list:
    return [f"{document['file']} is {document['previous']} with {', '.join(document['yours'])} left for you to write",
            f"next: read it, write, then `lesson check {document['file']}`; `lesson hint` helps"]  # fmt: skip


def exercise(stage: str) -> str:
    """The stage before it, with what CHANGES names left empty but for signature, docstring and hints.

    Made from the stage's own text: what it leaves as it was is the same in both, as a test makes sure. Types that the
    stage brings along stay, since other definitions talk through them; its new functions and constants go, unless
    something that stays needs them.
    """
    before, path = previous(stage), code_path(stage)
    old, new = (diff.definitions(p.read_text("utf-8")) for p in (code_path(before), path))
    text = path.read_text("utf-8")
    lines, tree = text.splitlines(), ast.parse(text)
    asked = diff.constant(path, "CHANGES")
    kept = needed(old, new, asked)
    cuda = any("__global__" in (ast.get_source_segment(text, node) or "") for node in tree.body)
    edits: list[tuple[int, int, list[str]]] = []  # (first line from 0, end, what stands there instead)
    for node in tree.body:
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))]) - 1
        name = getattr(node, "name", None)
        if isinstance(node, ast.Assign):
            name = ast.unparse(node.targets[0])
        here = (first, node.end_lineno)
        if node is tree.body[0]:
            edits.append((*here, docstring(stage, before, lines[slice(*here)], yours(asked, new))))
        elif name == "PREVIOUS":
            edits.append((*here, [f'PREVIOUS = "{before}"', f'PRACTICE = "{stage}"']))
        elif isinstance(node, ast.Assign) and "__global__" in (source := "\n".join(lines[slice(*here)])):
            edits.append((*here, cuda_source(name, source, old, asked, kept).splitlines()))
        elif name in diff.MARKS or name not in new or isinstance(node, ast.ClassDef):
            continue
        elif isinstance(node, ast.FunctionDef):
            if name in asked:
                edits.append((*here, stub(node, lines, old, new, before, asked)))
            elif name not in kept:
                edits.append((*here, []))
        elif not cuda and name in asked and name in old:
            edits.append((*here, [f"# Yours to change: this is {before}'s.", *old[name].text.splitlines()]))
        elif not cuda and name not in kept:  # a kernel's constants are its launch as well
            edits.append((*here, []))
    for first, end, instead in reversed(edits):
        lines[first:end] = instead
    spaced = re.sub(r"\n{3,}(?=\S)", "\n\n", "\n".join(lines).rstrip() + "\n")
    return re.sub(r"\n\n(?=@|def |class )", "\n\n\n", spaced)


def needed(old: dict, new: dict, asked: tuple) -> set[str]:
    """Names of definitions that stay: those of both stages, and whatever they use in turn."""
    stay = {name for name in new if name in old and name not in asked}
    while True:
        used = set().union(*(new[name].uses for name in stay))
        more = {name for name in new if name not in stay and name not in asked and name.rpartition(".")[2] in used}
        if not more:
            return stay
        stay |= more


def yours(asked: tuple, new: dict) -> list[str]:
    """Of what a stage changes, the definitions to write: not what it no longer has, nor imports, which are there."""
    return [name for name in asked if name in new and not re.match("from |import ", new[name].text)]


def docstring(stage: str, before: str, lines: list[str], mine: list[str]) -> list[str]:
    """The stage's own docstring without its Change, which is a hint, and what to do."""
    kept, skipping = [], False
    for line in lines:
        if match := PARTS.match(line):
            skipping = match[1] == "Change"
        if not skipping or line == '"""':
            kept.append(line)
    kept[:1] = [f'"""Practice of {stage}.', "", kept[0].removeprefix('"""')]
    file = file_of(stage)
    kept[-1:] = [
        "",
        *wrapped(
            f"Yours to write: {', '.join(mine)}. All else is {before}'s, whose file `lesson read {before}` shows."
        ),
        "",
        f"    lesson check {file}    # is it right, and is it fast enough?",
        f"    lesson hint {file}     # one more hint each time",
        '"""',
    ]
    return kept


def wrapped(text: str, indent: str = "") -> list[str]:
    import textwrap

    return textwrap.wrap(text, 120, initial_indent=indent, subsequent_indent=indent, break_long_words=False)


def stub(node: ast.FunctionDef, lines: list[str], old: dict, new: dict, before: str, asked: tuple) -> list[str]:
    """A function's decorators, signature and docstring; where its old version stands, and what is new at hand."""
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1
    body = node.body
    documented = ast.get_docstring(node) is not None
    head = lines[first : body[0].end_lineno if documented else body[0].lineno - 1]
    notes = []
    if node.name in old:
        module = re.match(r"from ([\w.]+) import", old[node.name].text)
        place = (
            f"{module[1].replace('.', '/')}.py" if module else f"{shown(code_path(before))}, line {old[node.name].line}"
        )
        notes.append(f"{before}'s own is in {place}.")
    besides = [
        name for name, d in new.items() if name not in old and name not in asked and heading(d).startswith("def")
    ]
    called = [heading(new[name]) for name in besides if re.search(rf"\b{name}\(", new[node.name].text)]
    notes += [f"The course calls a function of its own besides: {line}" for line in called]
    tools = origins(gained(old, new, (node.name,)), new)
    text = new[node.name].text
    if node.args.args and node.args.args[0].arg == "gguf" and re.search(r"\.(type|raw)\b", text):
        notes.append("gguf.weights.map(f) is f of each weight, a Tensor of common/gguf.py: .shape is (N, K), or (D,) "
                     "for a norm, which is to be dequantized; .raw is its bytes; of its .type .id is ggml's number, "
                     ".block the weights a block (1 for a float type, where a row may pass for one) and .bytes a "
                     "block's bytes.")  # fmt: skip
        if "raw[::" in text:
            notes.append("To read raw[::4096] touches each page of the map, so that no fault falls into the timing.")
    if node.name == "matmul" and ", (K, N) ->" in lines[node.lineno - 1]:
        notes.append("T, K and N may be any number: no size of a tile or a register need divide them.")
    elif node.name == "matmul" and ", (N, K) ->" in lines[node.lineno - 1]:
        notes.append("T and N may be any number, and so may K where the type is a float's.")
    was = old[node.name].text if node.name in old else ""
    notes += [
        f"{name} is a function of {module.replace('.', '/')}.py here and was a sum in {before}'s {node.name}."
        for module, names in tools.items()
        for name in names
        if re.search(rf"\b{name} [+]?= ", was)
    ]
    notes += [f"New at hand from {module.replace('.', '/')}.py: {', '.join(names)}." for module, names in tools.items()]
    comments = [line for note in notes for line in wrapped(note, "    # ")]
    return [*head, *comments, f'    raise NotImplementedError("{node.name} {EMPTY}")']


def origins(names: set[str], new: dict) -> dict[str, list[str]]:
    """{module: names} for those of the names that the stage imports from the course's common code."""
    found: dict[str, list[str]] = {}
    for name in sorted(names & set(new)):
        if match := re.match(r"from (common\.\w+) import (\w+)", new[name].text):
            found.setdefault(match[1], []).append(match[2])
    return found


def cuda_source(name: str, text: str, old: dict, asked: tuple, kept: set[str]) -> str:
    """A CUDA source whose functions in `asked` have empty bodies; those that nothing needs any more are gone."""
    for part, (piece, _) in diff.cuda_functions(text).items():
        full = f"{name}.{part}"
        if part and full in asked:
            text = text.replace(piece, cuda_stub(piece), 1)
        elif part and full not in kept and full not in old:
            text = re.sub(r"(?:^//[^\n]*\n)*" + re.escape(piece) + r"\n*", "", text, count=1, flags=re.MULTILINE)
    return text


def cuda_stub(piece: str) -> str:
    """A kernel's signature and the comments on its shapes, around an empty body."""
    match = diff.CUDA_FUNCTION.match(piece)
    brace = piece.index("{", match.end()) + 1
    rest = piece[brace:].split("\n")
    says = [rest[0]] if rest[0].strip().startswith("//") else [""]
    for line in rest[1:]:
        if not line.strip().startswith("//"):
            break
        says.append(line)
    return piece[:brace] + "\n".join([*says, f"    {CUDA_EMPTY}", "}"])


def empty(text: str) -> list[str]:
    """The definitions of a practice file's text that are still as they were handed out."""
    found = []
    for name, piece in diff.definitions(text).items():
        if f'NotImplementedError("{name} {EMPTY}")' in piece.text or CUDA_EMPTY in piece.text and "." in name:
            found.append(name)
    return found


def shown(path: Path) -> str:
    """A file of the course as a reader finds it, stages/naive.py."""
    return str(path.relative_to(FOLDER.parent))


# ---- hints ----------------------------------------------------------------------------------------------------


def hints(stage: str) -> list[str]:
    """Hints from vague to plain, made from the stage's own text; what comes after the last is the diff itself."""
    path = code_path(stage)
    old, new = (diff.definitions(p.read_text("utf-8")) for p in (code_path(previous(stage)), path))
    asked = diff.constant(path, "CHANGES")
    found = re.split(r"(?<=[.;:]) (?=[A-Z])", diff.docstring(path)["Change"])
    found += [f"{module.replace('.', '/')}.py offers:\n" + "\n".join(map(offer(module), names))
              for module, names in origins(gained(old, new, fresh_or(asked, old, new)), new).items()]  # fmt: skip
    fresh = [
        d for name, d in new.items() if (name not in old or name in asked) and is_constant(d) and '"""' not in d.text
    ]
    if fresh:
        found.append("the course's constants:\n" + "\n".join(d.text for d in fresh))
    helpers = [name for name, d in new.items() if name not in old and name not in asked and heading(d)]
    if helpers:
        headings = "\n".join(f"  {heading(new[name])}" for name in helpers)
        found.append(f"the course writes functions of its own besides:\n{headings}")
    for name in asked:
        loops = skeleton(old.get(name), new.get(name))
        if loops:
            found += nested(name, old.get(name), new[name], previous(stage))
            found.append(f"how {name} runs:\n" + "\n".join(loops))
    for name in [*asked, *helpers]:
        if lines := outline(old.get(name), new.get(name)):
            found.append(f"{name} in outline:\n" + "\n".join(lines))
    return found


def fresh_or(asked: tuple, old: dict, new: dict) -> list[str]:
    """The asked definitions and the functions that are new beside them."""
    return [name for name in new if name in asked or name not in old]


def gained(old: dict, new: dict, asked: tuple) -> set[str]:
    """The imported names that these definitions use and did not before; one that is new had all of the old file's."""
    imported = {name for name, d in old.items() if re.match("from |import ", d.text)}
    had = set().union(*(old[name].uses if name in old else imported for name in asked))
    return set().union(*(new[name].uses for name in asked if name in new)) - (had & imported)


def offer(module: str):
    """-> a function from a name to 'load_lanes: what the first line of its docstring says'."""

    def line(name: str) -> str:
        it = getattr(importlib.import_module(module), name)
        if isinstance(it, partial):
            return f"  {name}: {it.func.__name__} with {', '.join(f'{k}={v!r}' for k, v in it.keywords.items())}"
        it = getattr(it, "py_func", getattr(it, "_defn", it))
        told = (getattr(it, "__doc__", None) or "").strip() if callable(it) else f"{it!r}"
        return f"  {name}: {' '.join(told.split())}" if told else f"  {name}"

    return line


def is_constant(definition) -> bool:
    return bool(re.match(r"[A-Z][A-Z0-9_]* = (?!r?\"\"\")", definition.text)) and "__global__" not in definition.text


def heading(definition) -> str:
    """A function's signature line, '' for anything else."""
    match = re.search(r"^def .*|^.*__(?:device|global)__[^{]*", definition.text, re.MULTILINE)
    return " ".join(match[0].split()) if match else ""


def nested(name: str, old, new, before: str) -> list[str]:
    """The question before the loops themselves, where there are more of them than before."""
    had, has = (len(re.findall(r"^ +for ", d.text, re.MULTILINE)) if d else 0 for d in (old, new))
    if not 0 < had < has:
        return []
    return [f"{name} has {has} loops where {before}'s has {had}: which is outermost, and where does what is unfinished "
            "wait meanwhile?"]  # fmt: skip


def skeleton(old, new) -> list[str]:
    """The lines of a changed definition that say what is repeated or decided; none where none of them is new.

    … stands for statements between them.
    """
    control = re.compile(r"\s*(for|while|if|elif|else|with|def)\b")
    was, now = ([line for line in d.text.splitlines() if control.match(line)] if d else [] for d in (old, new))
    inside = {line for line in now if line[0].isspace()}  # a new heading alone says nothing that the stub does not
    if not inside - set(was):
        return []
    found: list[str] = []
    for line in new.text.splitlines():
        pad = line[: len(line) - len(line.lstrip())]
        left_out = found and found[-1].endswith("…") and len(pad) >= len(found[-1]) - 1
        if control.match(line):
            found.append(line)
        elif found and line.strip(" {});") and not line.lstrip().startswith(("//", "#")) and not left_out:
            found.append(f"{pad}…")
    return found


def outline(old, new) -> list[str]:
    """A Python function's lines with … for what it computes, but for the lines that its old version has too.

    None where there is nothing to tell: no function, or nothing that is repeated, decided or stored.
    """
    if not (new and heading(new).startswith("def ")):
        return []
    (node,) = ast.parse(new.text).body
    known = {line.strip() for line in old.text.splitlines()} if old else set()
    found = outlined(node, new.text.splitlines(), known)
    return found if any("… =" in line or "= " in line or line.endswith(":") for line in found[1:]) else []


def outlined(node: ast.stmt, lines: list[str], known: set[str]) -> list[str]:
    """A statement's lines; of one that holds others, its first line as it is."""
    line, pad = lines[node.lineno - 1], " " * node.col_offset
    if hasattr(node, "body"):
        found = [line]
        for part, label in {"body": "", "handlers": "", "orelse": "else:", "finalbody": "finally:"}.items():
            inside = [row for child in getattr(node, part, []) for row in outlined(child, lines, known)]
            if inside and label and not inside[0].startswith(f"{pad}elif "):
                found.append(pad + label)
            found += inside
        return found
    if line.strip() in known and node.end_lineno == node.lineno:
        return [line]
    match node:
        case ast.Expr(value=ast.Constant()):
            return []  # a docstring
        case ast.Assign():
            return [f"{pad}{' = '.join(map(bare, node.targets))} = {left_open(node.value)}"]
        case ast.AugAssign():
            return [f"{pad}{ast.unparse(node).partition('= ')[0]}= {left_open(node.value)}"]
        case ast.Return(value=ast.expr()):
            return [f"{pad}return {left_open(node.value)}"]
        case ast.Raise(exc=ast.expr()):
            return [f"{pad}raise {left_open(node.exc)}"]
        case ast.Expr(value=ast.Yield()):
            return [f"{pad}yield …"]
        case ast.Expr():
            return [f"{pad}{left_open(node.value)}"]
    return [line]


def left_open(value: ast.expr) -> str:
    """A name or a size as it is, a call without what it is given, … for all else."""
    if isinstance(value, ast.Call):
        return f"{ast.unparse(value.func)}(…)"
    plain = (ast.Name, ast.Attribute, ast.Constant, ast.Tuple, ast.Load)
    of = value.value if isinstance(value, ast.Subscript) and isinstance(value.slice, ast.Constant) else value
    return bare(value) if all(isinstance(part, plain) for part in ast.walk(of)) else "…"


def bare(node: ast.expr) -> str:
    """'T, K' and not '(T, K)'."""
    return ", ".join(map(bare, node.elts)) if isinstance(node, ast.Tuple) and len(node.elts) > 1 else ast.unparse(node)


def hint(path: Path, show_answer: bool) -> dict:
    """One hint more than last time, and the diff once it is asked for. -> the JSON document."""
    stage = practised(path)
    every, given = hints(stage), progress()["stages"].get(stage, {}).get("hints", 0)
    given = min(given + 1, len(every))
    note(stage, hints=given, **({"answer": True} if show_answer else {}))
    answer = diff.document(previous(stage), stage)["changed"] if show_answer else None
    return {"schema": 1, "stage": stage, "file": str(path), "hints": every[:given], "of": len(every), "answer": answer}


def confirmed(path: Path, show_answer: bool) -> bool:
    """Whether to show the answer: where it was asked for, or every hint was given and the reader says yes."""
    stage = practised(path)
    given = progress()["stages"].get(stage, {}).get("hints", 0)
    if show_answer or given < len(hints(stage)) or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return show_answer
    import typer

    return typer.confirm(f"Every hint is given. Show how {stage} does it?", default=False)


def told(document: dict) -> list:
    """The hints so far, the new one last."""
    from common import show

    *before, now = document["hints"]
    pieces = [show.dim(f"{i}. {text}") for i, text in enumerate(before, 1)]
    pieces.append(f"{len(document['hints'])}. {now}")
    left = document["of"] - len(document["hints"])
    if document["answer"]:
        for change in diff.changes(code_path(previous(document["stage"])), code_path(document["stage"])):
            pieces += ["", *show.code_diff(change)]
    elif left:
        pieces += ["", show.dim(f"{left} more; after them, the course's own code")]
    else:
        pieces += [
            "",
            show.dim(f"that was the last; `lesson hint {document['file']} --show-answer` is the code itself"),
        ]
    return pieces


# ---- what was done ----------------------------------------------------------------------------------------------


def progress_file() -> Path:
    return records.data_root() / "progress.json"


def progress() -> dict:
    """{schema, stages: {name: {hints, answer, predicted, practised}}}. Raises RecordError where the file is broken."""
    path = progress_file()
    try:
        found = json.loads(path.read_text("utf-8"))
        return {"schema": found["schema"], "stages": dict(found["stages"])}
    except FileNotFoundError:
        return {"schema": 1, "stages": {}}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise records.RecordError(f"{path} can't be read ({error}): move it away to begin anew") from error


def note(stage: str, **what) -> None:
    """Add to what is kept of a stage."""
    kept = progress()
    kept["stages"][stage] = {**kept["stages"].get(stage, {}), **what}
    records.save(kept, progress_file())


def done(kept: dict) -> str:
    """'predicted, practised': what `lesson list` shows of a stage's progress."""
    said = [word for word in ("predicted", "practised") if word in kept]
    return ", ".join(said + (["answer seen"] if kept.get("answer") else []))


# ---- predictions ------------------------------------------------------------------------------------------------

METRICS = {"ttft_ms": "TTFT", "ms_per_token": "ms/token"}


def predict(stage: str, job, said: dict[str, float | None], budget_s: float, save: str | None = None) -> dict:
    """Measure a stage against the one before it and score the prediction. -> the JSON document.

    said: {metric: how many times faster, None for no guess}, by the names of METRICS.
    """
    from common import compare

    before = previous(stage)
    compared = compare.compare([before, stage], job, budget_s, save)
    if not compared["pairs"]:
        why = next((run["missing"] for run in compared["stages"] if run.get("missing")), "it can't be measured here")
        raise StageError(f"no prediction of {stage} can be scored: {why}", 4)
    rows = []
    for pair in compared["pairs"]:
        guess, saw, expected = said[pair["metric"]], pair["ratio"], pair["expected_ratio"]
        rows.append(
            {"metric": pair["metric"], "predicted": guess, "saw": saw, "factor": gap(guess, saw), "expected": expected,
             "expected_factor": gap(expected, saw), "verdict": pair["verdict"]}
        )  # fmt: skip
    note(stage, predicted={row["metric"]: {"predicted": row["predicted"], "saw": row["saw"]} for row in rows})
    expect = compared["stages"][1]["expect"]
    bound = expect["reason"] if expect["ttft_ms"] else None  # of a stage whose time is not computed, none is known
    return {"schema": 1, "stage": stage, "previous": before, "rows": rows, "bound": bound, "why": compared["why"]}


def gap(guess: float | None, saw: float) -> float | None:
    """The factor that a guess is off by, 1 at best."""
    return math.exp(abs(math.log(guess / saw))) if guess else None


def asked_ratios(stage: str, job, ttft: float | None, ms_per_token: float | None, estimate: bool) -> dict:
    """The reader's two ratios, from flags or a terminal. Raises UsageError where neither gives them."""
    said = {"ttft_ms": ttft, "ms_per_token": ms_per_token}
    for metric, value in said.items():
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise UsageError(f"{value:g} times as fast on {METRICS[metric]}: a ratio is a number above 0")
    if estimate:
        print(estimated(stage, job), file=sys.stderr)
    wanted = [m for m, value in said.items() if value is None and (m == "ttft_ms" or job.room > 1)]
    if wanted and not sys.stdin.isatty():
        raise UsageError("say how many times as fast it will be: --ttft 2.5 --ms-per-token 3")
    for metric in wanted:
        said[metric] = asked(stage, job, metric)
    return said


def asked(stage: str, job, metric: str) -> float:
    """A ratio from the terminal; ? shows what the course expects."""
    import typer

    while True:
        answer = typer.prompt(f"{METRICS[metric]}: how many times as fast as {previous(stage)}? (? for an estimate)")
        if answer.strip() == "?":
            print(estimated(stage, job))
            continue
        try:
            value = float(answer.strip().rstrip("x×"))
        except ValueError:
            value = math.nan
        if value > 0 and math.isfinite(value):
            return value
        print("a number above 0, such as 2.5; below 1 where it gets slower")


def estimated(stage: str, job) -> str:
    """What the course expects, from this machine's roofs."""
    from common import machine, roofline, show

    names = [previous(stage), stage]
    here = machine.measure(walks=roofline.walks(names, job.gguf.config))
    old, new = (roofline.expectation(name, job, here) for name in names)
    ratios = [f"{show.times(old[m] / new[m])} on {title}" for m, title in METRICS.items() if old[m] and new[m]]
    return f"the course expects {' and '.join(ratios)}"


SCORES = {1.1: "spot on", 1.3: "good", 2.0: "fair"}  # a factor that a guess is off by at most, and what that is


def score(factor: float) -> str:
    return next((word for most, word in SCORES.items() if factor <= most), "far off")


def scored(document: dict) -> list:
    """The prediction beside what was seen."""
    from common import show

    rows = show.table("", "you", "saw", "off by", "the course", "off by")
    for row in document["rows"]:
        cells = [row[key] for key in ("predicted", "saw", "factor", "expected", "expected_factor")]
        rows.add_row(METRICS[row["metric"]], *map(show.times, cells))
    head = f"{document['stage']}, times as fast as {document['previous']}"
    told = [outcome(row, document["stage"], document["previous"]) for row in document["rows"]]
    why = document["why"]
    if document["bound"] and document["bound"] not in why:
        why = f"In {document['stage']} {document['bound']}. {why}"
    return ["", show.heading(head), rows, "", *told, "", why]


def outcome(row: dict, stage: str, before: str) -> str:
    """'TTFT: tiling is faster than naive. Your guess is good, the course's spot on.'"""
    sure = row["verdict"] in ("faster", "slower")
    saw = f"{stage} is {row['verdict']} than {before}" if sure else f"{row['verdict']} from {before} to {stage}"
    guesses = (("Your guess is", row["factor"]), ("the course's is", row["expected_factor"]))
    told = ", ".join(f"{whose} {score(factor)}" for whose, factor in guesses if factor)
    return f"{METRICS[row['metric']]}: {saw}." + (f" {told[0].upper()}{told[1:]}." if told else "")
