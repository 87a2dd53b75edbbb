"""What differs between two modules, piece by piece. (That the ladder's stages differ as declared: test_lessons.py.)"""

import pytest

from common import diff, show
from common.stage import source_path
from tests.helpers import copy_of

OLD = '''"""Old: the first line,
and what follows it.

Idea    One idea,
        told on two lines.
Was     Nothing.
"""

import math

from common.jit import njit

PREVIOUS = None
CHANGES = ()
SIZE = 4  # floats


@njit
def same(x):  # (T,) -> (T,)
    return x + SIZE


def gone(x):
    return math.sqrt(x)


def body(x):
    a = 1
    b = 2
    return a + b + x
'''
NEW = (
    OLD.replace("    b = 2\n", "    b = 3\n")
    .replace("def gone(x)", "def came(x)")
    .replace("PREVIOUS = None", "PREVIOUS = 1")
)


@pytest.fixture
def files(tmp_path):
    (tmp_path / "old.py").write_text(OLD)
    (tmp_path / "new.py").write_text(NEW)
    return tmp_path / "old.py", tmp_path / "new.py"


def test_definitions():
    found = diff.definitions(OLD)
    own = {name: d for name, d in found.items() if name in ("SIZE", "same", "gone", "body")}
    assert list(own) == ["SIZE", "same", "gone", "body"]
    assert own["SIZE"].text == "SIZE = 4  # floats"
    assert own["same"].text == "@njit\ndef same(x):  # (T,) -> (T,)\n    return x + SIZE"
    assert OLD.splitlines()[own["same"].line - 1] == "@njit"
    assert {"SIZE", "njit"} <= own["same"].uses
    assert not {"PREVIOUS", "CHANGES"} & set(found)


def test_changes_come_in_the_new_order_and_removed_ones_last(files):
    found = diff.changes(*files)
    assert [(c.name, bool(c.old), bool(c.new)) for c in found] == [
        ("came", False, True),
        ("body", True, True),
        ("gone", True, False),
    ]
    assert diff.changes(files[0], files[0]) == []


def test_unified(files):
    came, body, gone = diff.changes(*files)
    assert body.unified() == [" def body(x):", "     a = 1", "-    b = 2", "+    b = 3", "     return a + b + x"]
    assert body.unified(0) == ["-    b = 2", "+    b = 3"]
    assert came.unified() == ["+def came(x):", "+    return math.sqrt(x)"]
    assert gone.unified() == ["-def gone(x):", "-    return math.sqrt(x)"]


def test_what_a_stage_says_of_itself_is_no_change(tmp_path):
    old = copy_of("tiling", tmp_path, name="old.py")
    new = copy_of("tiling", tmp_path, ('PREVIOUS = "naive"', 'PREVIOUS = "tiling"'), ('("matmul",)', "()"))
    assert diff.changes(old, new) == []


def test_docstring(files):
    assert diff.docstring(files[0]) == {
        "": "Old: the first line, and what follows it.",
        "Idea": "One idea, told on two lines.",
        "Was": "Nothing.",
    }
    (files[0].parent / "none.py").write_text("x = 1\n")
    assert diff.docstring(files[0].parent / "none.py") == {"": ""}


def test_document():
    found = diff.document("naive", "tiling")
    assert (found["schema"], found["a"], found["b"]) == (1, "naive", "tiling")
    changed = {c["name"]: c["diff"] for c in found["changed"]}
    assert {"TILE", "matmul"} <= set(changed)
    assert "attention" not in changed
    assert "-        for n in range(N):" in changed["matmul"]
    assert diff.document("naive", "naive")["changed"] == []


def test_cuda_functions_by_name():
    source = """
#include <cuda_fp16.h>
__device__ float twice(float x) { return x * 2; }
extern "C" __global__ void matmul(float* x) {
    if (x) { x[0] = twice(x[0]); }
}
__device__ int after;
"""
    found = diff.cuda_functions(source)
    assert list(found) == ["", "twice", "matmul"]
    text, line = found["matmul"]
    assert text.startswith('extern "C"')
    assert text.endswith("}\n}")
    assert source.splitlines()[line] == text.splitlines()[0]
    assert "#include" in found[""][0]
    assert "int after" in found[""][0]
    assert "return" not in found[""][0]


@pytest.mark.parametrize("side_by_side", [False, True])
def test_what_is_shown_fits_eighty_columns(side_by_side, capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    page = show.console()
    for piece in show.stage_diff("naive", "tiling", side_by_side):
        page.print(piece)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    shown = "\n".join(lines)
    assert "for k0 in range(0, K, TILE):" in shown.replace("│", " ")
    assert "def attention" not in shown


def test_every_changed_line_is_shown_once(capsys):
    page = show.console()
    for piece in show.stage_diff("naive", "tiling", False):
        page.print(piece)
    shown = capsys.readouterr().out.splitlines()
    for change in diff.changes(source_path("naive"), source_path("tiling")):
        for line in change.unified():
            if line[1:].strip() and len(line) < 70:
                assert f"{line[0]} {line[1:]}".rstrip() in [s.rstrip() for s in shown]


def test_two_equal_stages_are_said_to_be():
    assert show.stage_diff("naive", "naive", False) == ["naive and naive are the same code"]
