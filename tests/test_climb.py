"""The whole ladder as one table: who runs what, what is compared with what, and how it is drawn."""

import io
import json
import re
from dataclasses import replace

import pytest
from rich.console import Console

from common import climb, compare
from common.gate import Agreement
from common.harness import Sample
from common.job import prepare
from common.stage import CPU, GPU, StageError
from tests.helpers import lesson

FORKED = {"a": None, "b": "a", "c": "b", "d": "c", "e": "b", "f": "e"}
SECONDS = {"naive": 20.0, "tiling": 10.0, "simd": 1.0, "kv_cache": 0.1, "quantized": 0.05}  # of 8 ids and 8 new tokens


@pytest.fixture(scope="module")
def job(tiny):
    return prepare(str(tiny), shape="pp8+tg8")


@pytest.fixture
def timed(monkeypatch):
    """Expected and measured times by SECONDS, in proportion to the tokens; nothing runs."""

    def run_s(name, job, here):
        return SECONDS.get(name, 0.01) * (len(job.ids) + job.n) / 16

    def take(names, job, budget_s):
        one = {n: [run_s(n, job, None) * 500 * (1 + i / 1000) for i in range(5)] for n in names}
        samples = [
            [
                Sample([1] * job.n, "length", ms, [ms / 10] * (job.n - 1), 1.0, 0.0, 1.0, {"load": FAULTS})
                for ms in one[n]
            ]
            for n in names
        ]
        return samples, [Agreement(1e-12, 1e-13, True, None, True) for _ in names]

    monkeypatch.setattr(climb, "run_s", run_s)
    monkeypatch.setattr(compare, "take", take)
    monkeypatch.setattr(climb.records, "within_roof", lambda *_: None)
    monkeypatch.setattr(climb, "installed", lambda peer: False)


FAULTS = {"minor": 0, "major": 0}


def missing(monkeypatch, *gone):
    """Machines as they are, but without what these stages need."""
    found = compare.machines

    def machines(names, job):
        here, _ = found([n for n in names if n not in gone], job)
        return here, {n: "no GPU is here" for n in names if n in gone}

    monkeypatch.setattr(compare, "machines", machines)


# ---- the tree --------------------------------------------------------------------------------------------------


def test_a_chain_is_flush_and_a_fork_indents_its_branches():
    drawn = [prefix + name for prefix, name in climb.tree(FORKED)]
    assert drawn == ["a", "b", "├─ c", "│  d", "└─ e", "   f"]
    assert [prefix + name for prefix, name in climb.tree(FORKED, True)][2:4] == ["|- c", "|  d"]


def test_a_stage_whose_parent_is_not_there_is_a_root():
    assert climb.tree({"b": "a", "c": "b", "llama.cpp": None}) == [("", "b"), ("", "c"), ("", "llama.cpp")]


# ---- who runs what ---------------------------------------------------------------------------------------------


def test_all_at_one_shape_where_time_allows(timed, job):
    previous = {"naive": None, "tiling": "naive", "simd": "tiling"}
    assert climb.planned([*previous], previous, job, 1000.0, {}) == [(job, [*previous])]


def test_the_slow_run_a_smaller_shape_with_their_neighbour(timed, job):
    previous = {"naive": None, "tiling": "naive", "simd": "tiling", "kv_cache": "simd", "quantized": "kv_cache"}
    (large, quick), (small, slow) = climb.planned([*previous], previous, job, 60.0, {})
    assert (large, quick) == (job, ["simd", "kv_cache", "quantized"])
    assert slow == ["naive", "tiling", "simd"]
    assert (len(small.ids), small.n) == (4, 2)  # 20 s x 6 / 16 x 7 rounds = 52 s
    assert small.ids == job.ids[:4]


def test_what_never_fits_still_runs_the_least(timed, job):
    ((small, names),) = climb.planned(["naive"], {"naive": None}, job, 0.1, {})
    assert (len(small.ids), small.n, names) == (2, 1, ["naive"])


# ---- the document ----------------------------------------------------------------------------------------------


@pytest.fixture
def document(timed, job, tmp_path, monkeypatch):
    missing(monkeypatch, *GPU)
    return climb.climb(job, 60.0, str(tmp_path))


def test_each_stage_stands_against_the_one_it_is_built_on(document):
    rows = {r["stage"]: r for r in document["rows"]}
    assert (rows["naive"]["shape"], rows["simd"]["shape"]) == ("pp4+tg2", "pp8+tg8")
    assert rows["naive"]["over_previous"] == {"ttft_ms": None, "ms_per_token": None}
    step = rows["simd"]["over_previous"]["ttft_ms"]
    assert (step["a"], step["shape"]) == ("tiling", "pp4+tg2")
    assert step["ratio"] == pytest.approx(10.0)
    step = rows["kv_cache"]["over_previous"]["ms_per_token"]
    assert (step["a"], step["shape"], step["verdict"]) == ("simd", "pp8+tg8", "faster")
    assert step["ratio"] == pytest.approx(10.0)


def test_a_time_is_never_extrapolated(document):
    for run in document["stages"]:
        row = next(r for r in document["rows"] if r["stage"] == run["stage"])
        if row["shape"] == run["shape"]:
            assert row["ttft_ms"] == run["ttft_ms"]["median"] in run["ttft_ms"]["samples"]


def test_the_record_is_kept(document, tmp_path):
    (kept,) = tmp_path.rglob("climb/*.json")
    assert json.loads(kept.read_text()) == json.loads(json.dumps(document))


def test_a_stage_without_its_gpu_shows_what_was_recorded_or_nothing(document, monkeypatch):
    rows = {r["stage"]: r for r in document["rows"]}
    assert rows["cuda"]["missing"] == "no GPU is here"
    assert rows["cuda"]["recorded"]["machine"] == "NVIDIA H200"
    assert rows["cuda"]["over_bound"]["ttft_ms"] is None
    step = rows["cuda"]["over_previous"]["ms_per_token"]
    assert step is None or (step["verdict"] is None and step["shape"] == rows["cuda"]["shape"])
    monkeypatch.setattr(compare, "recall", lambda names: [])
    (bare,) = climb.recorded({"cuda": "no GPU is here"}, {"cuda": "offload"})
    assert (bare["recorded"], bare["ttft_ms"], bare["shape"]) == (None, None, None)
    assert climb.line("", bare, "pp8+tg8")[1:] == ["n/a"] * 7


def test_it_is_drawn_as_a_tree_and_as_bars(document):
    text = shown(climb.render(document))
    assert "naive pp4+tg2" in text
    assert "quantized pp8" not in text
    assert text.count("recorded on NVIDIA H200") == 1
    assert re.search(r"cuda pp\d+\+tg\d+\*", text)
    assert "†" in text
    lines = text.splitlines()
    bars = [line for line in lines if "█" in line]
    assert [line.split()[0] for line in bars] == list(CPU)
    assert [line.count("█") for line in bars[:2]] == sorted([line.count("█") for line in bars[:2]], reverse=True)
    assert max(map(len, lines)) <= 80


def test_steps_that_change_nothing_take_a_line_a_metric(document):
    for row in document["rows"]:
        for step in filter(None, row["over_previous"].values()):
            step["verdict"] = "no measurable change"
    lines = [str(line) for line in climb.notes(document)]
    told = [line for line in lines if "no measurable change" in line]
    assert [line.partition(":")[0] for line in told] == [f"no measurable change of {m}" for m in ("TTFT", "ms/token")]
    assert told[0].count("tiling") == 1


def test_not_every_stage_of_it_shares_its_work(document):
    assert "1 thread ·" in str(climb.notes(document)[-1]) and "up to" not in str(climb.notes(document)[-1])
    document["stages"][0]["threads"] = 2
    assert "up to 2 threads ·" in str(climb.notes(document)[-1])


def test_records_of_two_machines_are_told_apart():
    rows = [{"stage": s, "recorded": {"machine": m, "model": "x"}} for s, m in (("a", "A"), ("b", "B"), ("c", "A"))]
    assert climb.elsewhere(rows) == ["* a, c: recorded on A, x, not run now", "* b: recorded on B, x, not run now"]
    assert climb.elsewhere(rows[:1]) == ["* recorded on A, x, not run now"]


def test_a_tenfold_time_is_a_decade_of_the_axis():
    over = {"ttft_ms": None, "kl": None}
    rows = [{"stage": n, "over_bound": {**over, "ms_per_token": x}} for n, x in (("a", 100.0), ("b", 10.0), ("c", 1.0))]
    text = shown(climb.chart(rows, [("", "a"), ("", "b"), ("", "c")]))
    assert [line.count("█") for line in text.splitlines()[1:4]] == [climb.BAR, climb.BAR // 2, 0]
    assert climb.axis(2).split() == ["1×", "10×", "100×"]


def test_names_and_all_exclude_each_other():
    done = lesson("compare", "naive", "--all")
    assert done.returncode == 2
    assert b"name no stages" in done.stderr


def test_a_peer_that_is_missing_is_no_row(monkeypatch):
    def absent(name):
        raise StageError("not here", exit_code=4)

    monkeypatch.setattr(climb, "require", absent)
    assert not climb.installed("llama.cpp")


def test_a_short_ladder_really_runs(tiny, tmp_path, monkeypatch):
    """simd and kv_cache as they are, and the numbers of the table are those of the runs."""
    monkeypatch.setattr(climb, "installed", lambda peer: False)
    monkeypatch.setattr(compare, "ROUNDS", 2)
    job = replace(prepare(str(tiny), shape="pp3+tg2"), context=16)
    found = climb.climb(job, 5.0, str(tmp_path), ladder=("simd", "kv_cache"))
    assert [r["stage"] for r in found["rows"]] == ["simd", "kv_cache"]
    assert all(r["passed"] and r["ttft_ms"] > 0 and r["kl"] < 1e-6 for r in found["rows"])
    assert found["rows"][1]["over_previous"]["ttft_ms"]["a"] == "simd"


def shown(pieces) -> str:
    console = Console(width=80, record=True, file=io.StringIO())
    for piece in pieces:
        console.print(piece)
    return console.export_text()
