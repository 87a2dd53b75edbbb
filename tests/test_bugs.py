"""Every planted bug is seen, by its own symptom; the course's own text is not; and a mended file is confirmed."""

import json
import sys

import numpy as np
import pytest

from common import bugs, gate, kernel_gpu, kernel_ladder
from common.bugs import BUGS, about, confirm, examine, exercise, original, place, plant, planted, races, reveal
from common.diff import constant
from common.job import UsageError
from common.stage import import_file
from stages import gemm
from tests.helpers import ROOT, lesson, one_sentence

SEEN = {  # what the tool says of each, in part
    "forgetful": "forward is right at every position, so the fault is in generate",
    "stuttering": "forward is right at every position, so the fault is in generate",
    "dizzy": "layer 0: each op is right on its inputs, but the sum after attention is not",
    "crossed": "layer 0, attention",
    "clairvoyant": "token 0, layer 0, attention",
    "grainy": "token 0, layer 0, matmul",
    "twin": "gives the right ids, but code of stages.tiling is in use",
    "sluggish": "timed at 5,100 ms and 20.0 ms a token",
    "thrifty": "timed at 100 ms and 16.0 ms a token over 5 tokens, 13.3 ms over 3",
    "hasty": "busy for 3 ms was timed at 0.009 ms: kernel at 1.11e+03 TFLOP/s is 30000% of the measured peak",
    "generous": "kernel at 10 TFLOP/s is 160% of the measured peak of 6.25",
    "agreeable": "a kernel that reads its matrix transposed passes this check",
    "coarse": "the baseline torch is wrong by FP32's measure, so it gets no time",
    "flaky": "x_tile is written with no barrier since it was read",
}
STAGES = [name for name, bug in BUGS.items() if bug.bench == "stage"]
BENCHED = [name for name in BUGS if name not in STAGES]


def test_there_are_at_least_twelve():
    assert list(SEEN) == list(BUGS)
    assert len(BUGS) >= 12


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_caught_and_a_mended_file_confirmed(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = plant(name)
    path = place(BUGS[name])
    assert SEEN[name] in found["said"]
    assert len(found["said"].splitlines()) == 1
    monkeypatch.setattr(bugs, "planted", original)
    path.write_text(exercise(BUGS[name]))
    assert confirm(path) == (name, True, BUGS[name].cause)


@pytest.mark.parametrize("name", BUGS)
def test_the_list_tells_the_symptom_and_not_the_cause(name):
    bug = BUGS[name]
    shown = exercise(bug)
    assert bug.cause not in shown
    assert bug.symptom[1:] in shown
    assert constant_of(shown) == name
    compile(shown, name, "exec")
    assert bug.cause not in json.dumps(bugs.listing())


def constant_of(text):
    """What BROKEN is in a file of this text."""
    found = {}
    exec(next(line for line in text.splitlines() if line.startswith("BROKEN")), found)
    return found["BROKEN"]


@pytest.mark.parametrize("name", BUGS)
def test_revealing_shows_each_edit(name):
    found = reveal(name)
    assert found["cause"] == BUGS[name].cause
    changed = [line for line in found["diff"] if line[0] in "+-"]
    assert changed
    assert all(line[1:] in planted(BUGS[name]) for line in changed if line[0] == "+")
    assert all(line[1:] in original(BUGS[name]) for line in changed if line[0] == "-")


# ---- other ways to mend and to fail ----------------------------------------------------------------------------


def changed(name, tmp_path, *edits):
    """A planted file with each (old, new) replaced."""
    text = exercise(BUGS[name])
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    path = tmp_path / place(BUGS[name]).name
    path.write_text(text)
    return path


def test_waiting_for_the_whole_gpu_mends_it_too(tmp_path):
    path = changed("hasty", tmp_path, ("    call()\n", "    call()\n    cupy.cuda.Device().synchronize()\n"))
    assert confirm(path).mended


def test_a_cure_that_is_none_is_no_cure(tmp_path):
    path = changed("twin", tmp_path, ("as loops", "as rings"), ("loops(x, w)", "rings(x, w)"))
    assert not confirm(path).mended
    path = changed("sluggish", tmp_path, ("WARM_IDS = 1", "WARM_IDS = 1 + 0"))
    assert not confirm(path).mended


def test_what_a_readers_file_raises_is_said(tmp_path):
    path = changed("thrifty", tmp_path, ("return sum(gaps)", "return summ(gaps)"))
    found = confirm(path)
    assert not found.mended
    assert "name 'summ' is not defined" in found.said
    path = changed("forgetful", tmp_path, ("def logits", "deff logits"))
    assert "SyntaxError" in bugs.examine(path, BUGS["forgetful"])


def test_another_file_is_refused(tmp_path):
    (tmp_path / "mine.py").write_text("x = 1\n")
    assert about(tmp_path / "mine.py") is None
    with pytest.raises(UsageError, match="no line BROKEN"):
        confirm(tmp_path / "mine.py")
    with pytest.raises(UsageError, match="no bug is called 'foo'"):
        (tmp_path / "mine.py").write_text('BROKEN = "foo"\n')
        confirm(tmp_path / "mine.py")


# ---- the command -----------------------------------------------------------------------------------------------


def test_the_command(tmp_path):
    listed = lesson("break", cwd=tmp_path)
    assert listed.returncode == 0
    assert all(name in listed.stdout.decode() for name in BUGS)
    assert "barrier" not in listed.stdout.decode()
    done = lesson("break", "agreeable", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert SEEN["agreeable"] in " ".join(done.stdout.decode().split())
    assert (tmp_path / "practice" / "broken_agreeable.py").is_file()
    again = lesson("break", "agreeable", cwd=tmp_path)
    assert "--force begins anew" in one_sentence(again)
    assert again.returncode == 2
    shown = lesson("break", "agreeable", "--reveal", "--json", cwd=tmp_path)
    assert json.loads(shown.stdout)["cause"] == BUGS["agreeable"].cause
    assert "did you mean agreeable?" in one_sentence(lesson("break", "agreable", cwd=tmp_path))


# ---- benches ---------------------------------------------------------------------------------------------------

LOOP = "__shared__ float a[8], b[8];\nfor (int k = 0; k < K; ++k) {\n@\n}\n"


@pytest.mark.parametrize(
    ("body", "raced"),
    [
        ("a[i] = x[k];\n__syncthreads();\ns += a[j];\n__syncthreads();", []),
        ("a[i] = x[k];\n__syncthreads();\ns += a[j];", ["a is written"]),
        ("a[i] = x[k];\ns += a[j];\n__syncthreads();", ["a is read"]),
        ("a[i] = x[k]; b[i] = y[k];\n__syncthreads();\ns += a[j] * b[j];\n__syncthreads();", []),
        ("a[i] = x[k];\n// __syncthreads();\ns += a[j];\n__syncthreads();", ["a is read"]),
        ("__syncthreads();\na[i] = x[k];\n__syncthreads();\nfor (int j = 0; j < 8; ++j) { s += a[j]; }", []),
        ("if (a[j] == 1) s += 1;", []),
    ],
)
def test_races_in_a_loop(body, raced):
    found = races(LOOP.replace("@", body))
    assert len(found) == len(raced)
    assert all(told in said for told, said in zip(raced, found, strict=True))


def test_the_courses_tiles_have_no_race():
    for rung in ("tiled", "coarsened", "register_2d", "naive"):
        assert races(kernel_ladder.module(gemm, rung).SOURCE) == [], rung


def test_tf32_keeps_ten_bits():
    x = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    error = np.abs(bugs.tf32(x) - x) / np.abs(x)
    assert 2.0**-13 < error.max() <= 2.0**-11


def test_the_ladder_refuses_a_rate_beyond_its_peak():
    from common.roofline import AccountingError

    assert kernel_ladder.share_of_peak("a", 10.0, None) is None
    assert kernel_ladder.share_of_peak("a", 10.0, 10.0) == pytest.approx(100)
    assert kernel_ladder.share_of_peak("a", 10.4, 10.0) == pytest.approx(104)
    with pytest.raises(AccountingError, match="106% of the measured peak"):
        kernel_ladder.share_of_peak("a", 10.6, 10.0)


def test_the_gate_allows_the_victim_what_it_allows_the_stage(tmp_path):
    path = changed("grainy", tmp_path)
    assert gate.tolerance(str(path)) == gate.tolerance(str(ROOT / "stages" / "integer.py"))
    assert constant(path, "BROKEN") == "grainy"


# ---- on a GPU --------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(kernel_gpu.missing() is not None, reason="no GPU")
def test_an_unsynchronized_clock_on_a_real_gpu(tmp_path):
    from common.roofline import AccountingError

    module = import_file(changed("hasty", tmp_path))
    x, w = gemm.inputs((4096, 4096, 4096), "float32", 1)
    row = {"cublas": {"stage": "cublas", "shape": (4096, 4096, 4096), "dtype": "float32"}}
    for once, wrong in ((module.once, True), (kernel_gpu.once, False)):
        times = [once(lambda: gemm.cublas(x, w)) for _ in range(3)][1:]
        try:
            kernel_ladder.timed(gemm, row, {"cublas": times}, kernel_gpu.peaks({"float32"}), 0.005)
            assert not wrong
        except AccountingError:
            assert wrong


@pytest.mark.gpu
@pytest.mark.skipif(kernel_gpu.missing() is not None, reason="no GPU")
def test_tf32_on_a_real_gpu(tmp_path):
    pytest.importorskip("torch")
    module = import_file(changed("coarse", tmp_path))
    x, w = gemm.inputs((512, 512, 512), "float32", 1)
    found = kernel_ladder.verdict(module.torch(x, w), *gemm.oracle(x, w), **gemm.TOLERANCE["float32"])
    assert not found["right"]


@pytest.mark.gpu
@pytest.mark.skipif(kernel_gpu.missing() is not None, reason="no GPU")
def test_a_mended_kernel_runs_on_a_real_gpu(tmp_path):
    path = changed("flaky", tmp_path, ("threadIdx.x];\n    }", "threadIdx.x];\n        __syncthreads();\n    }"))
    assert examine(path, BUGS["flaky"]) is None
    assert "cupy" not in sys.modules or sys.modules["cupy"].__file__
