"""The CPU's ladder of matrix multiplication: right at any shape, in registers, and as its record and chapters say."""

import importlib
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from common import diff, figures
from common import kernel_ladder as kl
from stages import gemm_cpu
from tests.helpers import ROOT

FOLDER = Path(gemm_cpu.__file__).parent
REPORTS = ROOT / "reports" / "intel-xeon-processor" / "gemm_cpu"
PARTS = ["Idea", "Picture", "Arithmetic", "Predict", "Code", "Measured", "What it costs", "What lost, and why",
         "Three questions", "Sources"]  # fmt: skip
X86 = platform.machine() in ("x86_64", "AMD64")
FUSED = re.compile(r"\bvfn?madd\d*ps\s.*%[yz]mm" if X86 else r"\bfmla\s+v\d+\.4s")


@pytest.fixture(scope="module")
def record():
    return json.loads((REPORTS / "ladder.json").read_text())


@pytest.mark.parametrize("stage", gemm_cpu.STAGES)
def test_a_rung_is_right_on_odd_shapes(stage):
    for i, shape in enumerate(gemm_cpu.ODD_SHAPES):
        found = kl.check(gemm_cpu, stage, shape, "float32", seed=i)
        assert found["right"], found


def test_one_wrong_element_fails():
    x, w = gemm_cpu.inputs((50, 60, 70), "float32", 0)
    judge = gemm_cpu.TOLERANCE["float32"]
    assert kl.verdict(x @ w, *gemm_cpu.oracle(x, w), **judge)["right"]
    for wrong in (0.01, np.nan):
        out = x @ w
        out[3, 5] += wrong
        assert not kl.verdict(out, *gemm_cpu.oracle(x, w), **judge)["right"]


@pytest.mark.parametrize("stage", gemm_cpu.STAGES)
def test_a_rung_declares_what_it_changes(stage):
    rung = importlib.import_module(f"stages.gemm_cpu.{stage}")
    assert list(diff.docstring(FOLDER / f"{stage}.py")) == ["", "Idea", "Was", "Change", "Expect"]
    if rung.PREVIOUS is None:
        assert rung.CHANGES == () and stage == next(iter(gemm_cpu.STAGES))
        return
    old, new = FOLDER / f"{rung.PREVIOUS}.py", FOLDER / f"{stage}.py"
    assert diff.undeclared(old, new, rung.CHANGES) == []
    changes = diff.changes(old, new)
    assert set(rung.CHANGES) <= {change.name for change in changes}
    assert sum(line.startswith("+") for change in changes for line in change.unified()) <= 60


COMPILE = """
import importlib, json
import numpy as np
from common.jit import numba

answer = {}
for stage in ("blocked", "packed"):
    module = importlib.import_module(f"stages.gemm_cpu.{stage}")
    kernel = numba.njit(**module.multiply_tile.targetoptions)(module.multiply_tile.py_func)  # anew: not from the cache
    x, w, out = (np.ones((module.ROWS, module.ROWS), np.float32), np.ones((module.ROWS, module.COLUMNS), np.float32),
                 np.zeros((module.ROWS, module.COLUMNS), np.float32))
    kernel(x, w, out, 0, 0)
    assert (out == module.ROWS).all()
    x, w = np.ones((130, 70), np.float32), np.ones((70, 140), np.float32)
    assert (module.matmul(x, w) == 70).all()
    answer[stage] = {"asm": list(kernel.inspect_asm().values())[0], "sums": module.SUMS}
print(json.dumps(answer))
"""


def compiled(**env) -> dict:
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], env={**os.environ, **env}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def innermost(asm: str) -> list[str]:
    """The instructions of the loop that multiplies most: from a label to the first jump back to it."""
    lines, loops, labels = asm.splitlines(), [], {}
    for i, line in enumerate(lines):
        if label := re.match(r"(\.?L\w+):", line):
            labels[label[1]] = i
        elif (jump := re.search(r"\b(?:j\w+|b\.\w+|b)\s+(\.?L\w+)", line)) and jump[1] in labels:
            start = labels[jump[1]]
            if not any(start <= inner < i for inner, _ in loops):
                loops.append((start, i))
    return max(
        (lines[start + 1 : end + 1] for start, end in loops),
        key=lambda loop: sum(bool(FUSED.search(line)) for line in loop),
    )


def test_sums_stay_in_registers():
    for stage, made in compiled().items():
        loop = innermost(made["asm"])
        fused = [line for line in loop if FUSED.search(line)]
        assert len(fused) >= made["sums"], stage  # more where the compiler unrolled k, or a register holds eight
        assert len(fused) % made["sums"] == 0
        stored = [line for line in loop if re.search(r"\bvmov\w*\s+%[yz]mm\d+,\s*[-\d]*\(", line)]
        assert stored == [], stage


def test_a_cpu_without_wide_registers_gets_the_same_numbers():
    made = compiled(NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES="")
    if X86:
        assert not re.search(r"%[yz]mm|vfmadd", made["packed"]["asm"])


def test_the_record_measured_this_source(record):
    assert record["sources"] == {stage: kl.source_digest(gemm_cpu, stage) for stage in gemm_cpu.STAGES}
    assert all(row["right"] for row in record["odd_shapes"])
    assert {tuple(row["shape"]) for row in record["odd_shapes"]} == set(gemm_cpu.ODD_SHAPES)
    assert record["machine"]["OPENBLAS_CORETYPE"] is None
    for row in record["rows"]:
        assert row["right"] or "too slow" in row["absent"]
        assert row.get("percent_peak") is None or row["percent_peak"] <= 105


def test_the_last_rung_reaches_openblas(record):
    last = [row for row in record["rows"] if row["stage"] == "packed"]
    assert {tuple(row["shape"]) for row in last} == set(gemm_cpu.SHAPES)
    assert all(row["ratio_to_baseline"]["numpy"] >= 0.85 for row in last)


def test_each_rung_is_faster_than_the_one_before_at_1024(record):
    ms = {row["stage"]: row["ms"]["median"] for row in record["rows"] if row["shape"] == [1024] * 3}
    times = [ms[stage] for stage in gemm_cpu.STAGES]
    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize("stage", gemm_cpu.STAGES)
def test_a_chapter_has_its_parts_and_quotes_the_record(stage):
    from common import chapters

    path = FOLDER / f"{stage}.md"
    text = path.read_text()
    assert re.findall(r"^## (.*)$", text, re.M) == PARTS
    assert text.count("<details>") == 3
    assert len(figures.FIGURE.findall(text)) >= 5
    assert figures.figures(text, REPORTS) == text
    assert chapters.filled(text, path) == text
    assert "not run" not in text or stage in ("naive", "contiguous", "tiled")


def test_the_overview_quotes_the_record():
    text = (FOLDER / "README.md").read_text()
    assert len(figures.FIGURE.findall(text)) > 20
    assert figures.figures(text, REPORTS) == text


def test_pictures_are_those_of_the_code():
    from stages.gemm_cpu import _pictures

    for path, drawn in _pictures.drawn().items():
        assert path.read_text() == drawn, path.name
