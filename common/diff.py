"""What one stage changes against another: its definitions, compared one by one as text.

A definition is a function with its decorators, a module constant, an imported name, or a function inside a CUDA source
string.
"""

import ast
import difflib
import re
from pathlib import Path
from typing import NamedTuple

from common.stage import StageError, code_path, said, where

MARKS = ("PREVIOUS", "PRACTICE", "CHANGES", "FUSED", "PHASES", "ARCHS", "OPERANDS")  # what a stage says of itself
CUDA_FUNCTION = re.compile(
    r"""^(?:extern\ "C"\ |template\ ?<[^>]*>\s*|static\ )*__(?:global|device)__
        (?:[^;{(]|__launch_bounds__\s*\([^)]*\))*?\b(?!__launch_bounds__)(\w+)\s*\(""",
    re.MULTILINE | re.VERBOSE,
)


class Definition(NamedTuple):
    """A named piece of a module's source."""

    name: str
    text: str
    line: int  # where it begins, from 1
    uses: frozenset[str]  # the names that appear in it


class Change(NamedTuple):
    """One definition that differs; None where a side lacks it."""

    name: str
    old: Definition | None
    new: Definition | None

    def unified(self, context: int = 3) -> list[str]:
        """Lines that begin with ' ', '-' or '+', without file headers."""
        old, new = (d.text.splitlines() if d else [] for d in (self.old, self.new))
        lines = list(difflib.unified_diff(old, new, lineterm="", n=context))
        return [line for line in lines[2:] if not line.startswith("@@")]


def definitions(source: str) -> dict[str, Definition]:
    """A module's definitions by name, in order. The docstring and the stage's marks are not among them.

    A name bound twice is one definition of both texts; statements that bind nothing are the definition "(module)".
    """
    lines = source.splitlines()
    found: dict[str, Definition] = {}

    def put(name: str, text: str, line: int) -> None:
        if name in found:
            text, line = found[name].text + "\n" + text, found[name].line
        found[name] = Definition(name, text, line, frozenset(re.findall(r"[A-Za-z_]\w*", text)))

    body = ast.parse(source).body
    if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        del body[0]  # the docstring
    for node in body:
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        text = "\n".join(lines[first - 1 : node.end_lineno])
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            put(node.name, text, first)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            name = ast.unparse(target)
            if name in MARKS:
                continue
            if "__global__" in text:
                for part, (piece, at) in cuda_functions(text).items():
                    put(f"{name}.{part}" if part else name, piece, first + at)
            else:
                put(name, text, first)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            origin = f"from {node.module} " if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                put(alias.asname or alias.name, f"{origin}import {ast.unparse(alias)}", first)
        else:
            put("(module)", text, first)
    return found


def cuda_functions(text: str) -> dict[str, tuple[str, int]]:
    """A CUDA source by function: name -> (text, line within the source); '' holds what stands outside any."""
    parts, rest, at = {}, [], 0
    for match in CUDA_FUNCTION.finditer(text):
        if match.start() < at:
            continue
        depth, end = 0, text.index("{", match.end())
        while True:
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
            if depth == 0:
                break
        rest.append(text[at : match.start()])
        parts[match[1]] = (text[match.start() : end], text.count("\n", 0, match.start()))
        at = end
    rest.append(text[at:])
    # Blank lines around a new function are no difference of what stands outside.
    return {"": (re.sub(r"\n(?:[ \t]*\n)+", "\n", "".join(rest)), 0), **parts}


def text_of(path: Path) -> str:
    """A module's text. Raises StageError where it is no Python."""
    try:
        text = path.read_text("utf-8")
        ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise StageError(f"{path.name}: {where(error, path)}{said(error)}", exit_code=1) from error
    return text


def changes(old: Path, new: Path) -> list[Change]:
    """The definitions that differ between two stages, in the new one's order, removed ones last."""
    a, b = (definitions(text_of(path)) for path in (old, new))
    changed = [Change(name, a.get(name), d) for name, d in b.items() if name not in a or a[name].text != d.text]
    return changed + [Change(name, d, None) for name, d in a.items() if name not in b]


def undeclared(old: Path, new: Path, declared: tuple[str, ...]) -> list[str]:
    """Names that differ without being declared.

    A definition that only one side has needs no declaring where every user of it is declared.
    """
    found = changes(old, new)
    everything = [d for path in (old, new) for d in definitions(path.read_text("utf-8")).values()]

    def implied(change: Change) -> bool:
        if change.old and change.new:
            return False
        users = [d.name for d in everything if change.name in d.uses and d.name != change.name]
        return bool(users) and all(u in declared or u in helpers for u in users)

    helpers = {c.name for c in found if not (c.old and c.new)}
    return [c.name for c in found if c.name not in declared and not implied(c)]


def docstring(path: Path) -> dict[str, str]:
    """The parts of a stage's docstring: '' (its first line), Idea, Was, Change, Expect, each unwrapped to one line."""
    lines = (ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "").splitlines()
    parts: dict[str, list[str]] = {"": []}
    at = ""
    for line in lines:
        match = re.match(r"(Idea|Was|Change|Expect)\s+(.*)", line)
        if match:
            at, line = match[1], match[2]
        parts.setdefault(at, []).append(line.strip())
    return {part: " ".join(filter(None, text)) for part, text in parts.items()}


def constant(path: Path, name: str):
    """The literal value of a module constant (PREVIOUS, CHANGES, TILE, …), read and not run; None where it has none."""
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.literal_eval(node.value)
    return None


def document(a: str, b: str) -> dict:
    """`lesson diff --json`."""
    found = changes(code_path(a), code_path(b))
    return {"schema": 1, "a": a, "b": b, "changed": [{"name": c.name, "diff": c.unified()} for c in found]}
