"""Threads and depth as settings of a sweep: which values are taken, what is timed at each, and how it is drawn."""

import io
import json

import pytest
from rich.console import Console

from common import machine, sweep
from common.harness import RunError
from common.job import ContextError, UsageError, prepare
from common.records import RecordError
from common.stage import StageError
from tests.helpers import lesson, one_sentence


@pytest.fixture(scope="module")
def job(tiny):
    return prepare(str(tiny), shape="tg3")


@pytest.fixture(scope="module")
def document(tiny, tmp_path_factory):
    """simd at two depths, as JSON, and its record."""
    folder = tmp_path_factory.mktemp("kept")
    words = ("sweep", "simd", "depth=0,5", "--shape", "tg3", "-m", tiny, "--save", folder)
    done = lesson(*words, "--json")
    assert done.returncode == 0, done.stderr
    (kept,) = folder.rglob("sweep/*.json")
    return json.loads(done.stdout), json.loads(kept.read_text())


def test_depth_is_so_many_ids_before_the_tokens_that_are_timed(job):
    found = sweep.points("depth=16,0,4", job)
    assert {value: (len(at.ids), at.n) for value, at in found.items()} == {0: (1, 4), 4: (4, 4), 16: (16, 4)}


def test_threads_leave_the_rest_alone(job):
    assert sweep.points("threads=1", job) == {1: job}


@pytest.mark.parametrize("setting", ["depth=", "depth=a", "depth=1.5", "threads=0", "threads=1,9999", "threads=-1"])
def test_what_is_no_count_is_refused(setting, job):
    with pytest.raises(UsageError):
        sweep.points(setting, job)


def test_a_depth_beyond_the_context_is_refused(job):
    with pytest.raises(ContextError):
        sweep.points("depth=0,1022", job)
    assert max(sweep.points("depth=1021", job)) == 1021


def test_an_unknown_stage_is_refused_before_anything_runs(job):
    with pytest.raises(StageError, match="did you mean simd"):
        sweep.curve("simdd", "depth=1", job)


def test_a_constant_is_a_number_that_a_line_binds(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from a import LANES\nROWS = 12 if LANES else 6  # of x\nTILE, N = 4, 5\nHALF = -LANES / 2\nWIDE = LANES\n"
        'SOURCE = "x" * 2\nSIGMAS = 3.0\nPLAN = {1: 2}\nPLAN[1] = 3\n'
        "MOST = max(1, 2)\nLONG = (\n    1\n    + 2\n)\nsmall = 1\n"
    )
    for name in ("ROWS", "HALF", "SIGMAS"):
        assert sweep.parse(str(path), f"{name}=1, 2") == (name, ["1", "2"])
    for name in ("LANES", "TILE", "WIDE", "SOURCE", "PLAN", "MOST", "LONG", "small"):
        with pytest.raises(UsageError, match="to sweep: it has ROWS, HALF, SIGMAS$"):
            sweep.parse(str(path), f"{name}=1,2")


def test_where_no_value_can_run_no_value_is_called_wrong(job, monkeypatch, tmp_path):
    def run(request):
        raise RunError("GPU stages need CuPy", 4)

    monkeypatch.setattr(sweep.harness, "run", run)
    with pytest.raises(RunError, match="need CuPy"):
        sweep.sweep("cuda", "TILE=8,16", job, str(tmp_path))


def test_where_no_record_can_be_kept_nothing_runs(job, monkeypatch, tmp_path):
    monkeypatch.setattr(sweep.harness, "run", lambda request: pytest.fail("it ran"))
    (tmp_path / "file").touch()
    with pytest.raises(RecordError):
        sweep.sweep("tiling", "TILE=8,16", job, str(tmp_path / "file"))


def test_the_command_line_refuses_in_one_sentence(tiny):
    done = lesson("sweep", "simd", "threads=0", "-m", tiny)
    assert (done.returncode, f"1 to {machine.identify().threads} threads" in one_sentence(done)) == (2, True)


def test_each_depth_is_timed_and_checked(document):
    found, kept = document
    assert found == kept
    assert (found["setting"], found["shape"], found["stage"]) == ("depth", "tg3", "simd")
    assert [(r["value"], r["shape"]) for r in found["rows"]] == [(0, "pp1+tg4"), (5, "pp5+tg4")]
    for row in found["rows"]:
        assert len(row["ttft_ms"]["samples"]) == len(row["ms_per_token"]["samples"]) == sweep.ROUNDS
        assert row["agreement"]["passed"]
        assert row["expect"]["bound_ms_per_token"] > 0


def test_it_is_drawn_against_the_bound(document):
    found, _ = document
    console = Console(width=80, record=True, file=io.StringIO())
    for piece in sweep.render_curve(found):
        console.print(piece)
    text = console.export_text()
    assert "ms/token by depth" in text
    assert "●" in text
    assert "○" in text
    assert max(map(len, text.splitlines())) <= 80
