"""Combinations of ideas: put together from the stages' own text, right like any stage, and credited by every order."""

import json
from itertools import combinations
from math import prod

import pytest

from common import diff, gate, grid, harness, reference
from common.grid import Missing, combine, credit, merge
from common.harness import Sample
from common.job import UsageError, prepare
from common.model import open_model
from common.stage import CPU, StageError, code_path, load_stage
from tests.helpers import copy_of, lesson, one_sentence

IDS = [1, 17, 300, 511, 42, 8]
FLOAT = ("tiling", "kv_cache")


def definitions(text):
    return {name: d.text for name, d in diff.definitions(text).items()}


def stage_text(name):
    return code_path(name).read_text()


# ---- putting together ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CPU[1:])
def test_a_step_applied_to_the_stage_below_is_the_stage(name):
    """What the idea no longer imports may stay; all else is the stage's own text."""
    got, want = definitions(combine(diff.constant(code_path(name), "PREVIOUS"), (name,))), definitions(stage_text(name))
    assert {key: got[key] for key in want} == want


def test_the_whole_ladder_applied_is_its_last_stage():
    assert definitions(stage_text(CPU[-1])).items() <= definitions(combine("naive", CPU[1:])).items()


def test_a_cache_without_tiling_is_each_stages_own_part():
    got = definitions(combine("naive", ("kv_cache",)))
    naive, cached = definitions(stage_text("naive")), definitions(stage_text("kv_cache"))
    assert got["matmul"] == naive["matmul"]
    for name in ("load", "forward", "generate", "arena"):
        assert got[name] == cached[name]


def test_an_idea_that_rests_on_another_can_not_be_had_without_it():
    with pytest.raises(Missing, match="simd changes TILE as tiling has it: without tiling, nothing is there to change"):
        combine("naive", ("simd",))
    with pytest.raises(Missing, match="quantized changes matmul as simd has it"):
        combine("tiling", ("quantized",))


def test_two_ideas_in_one_function_are_merged():
    """quantized and kv_cache both change load and forward; without the cache, blocks alone are left."""
    got = definitions(combine("simd", ("quantized",)))
    assert "arena" not in got["load"]
    assert "Blocks(" in got["load"]
    assert "embed(" in got["forward"]
    assert "cache" not in got["forward"]
    assert got["matmul"] == definitions(stage_text("quantized"))["matmul"]


def test_marks_come_along(monkeypatch, tmp_path):
    """A combination that rounds its operands is allowed what such a stage is."""
    path = copy_of("quantized", tmp_path, ('PREVIOUS = "kv_cache"', 'PREVIOUS = "kv_cache"\nOPERANDS = "int8"'))
    real = grid.code_path
    monkeypatch.setattr(grid, "code_path", lambda name: path if name == "quantized" else real(name))
    (tmp_path / "made.py").write_text(combine("simd", ("quantized",)))
    assert gate.tolerance(str(tmp_path / "made.py")) == gate.TOLERANCE["int8"]


@pytest.mark.parametrize(
    ("ours", "theirs", "both"),
    [
        ("abcd", "abcd", "abcd"),
        ("aXcd", "abcd", "aXcd"),
        ("abcd", "abYd", "abYd"),
        ("aXcd", "abcY", "aXcY"),
        ("acd", "abcdY", "acdY"),
        ("bcd", "Yabcd", "Ybcd"),
        ("aXcd", "aYcd", None),
        ("aXcd", "aXcd", "aXcd"),
        ("acd", "aYcd", None),
        ("Xabcd", "Yabcd", None),
        ("ad", "abYcd", None),
    ],
)
def test_merging(ours, theirs, both):
    found = merge(list("abcd"), list(ours), list(theirs))
    assert (found and "".join(found)) == both


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["naive", "tiling"], "naive can't be taken apart"),
        (["tiling"], "two to 4 different ideas"),
        (["tiling", "tiling"], "two to 4 different ideas"),
        (["tiling", "cuda"], "cuda can't be taken apart"),
        (["tiling", "gemm/tiled"], "can't be taken apart"),
        (["tiling", "tilling"], "did you mean tiling"),
    ],
)
def test_what_no_grid_is_of(names, told):
    with pytest.raises((UsageError, StageError), match=told):
        grid.checked(names)


def test_ideas_stand_in_the_ladders_order():
    assert grid.checked(["kv_cache", "tiling"]) == ["tiling", "kv_cache"]
    assert grid.checked([]) == list(grid.IDEAS)


# ---- right like any stage --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "ideas"), [("naive", ("kv_cache",)), ("simd", ("quantized",)), ("naive", ("tiling", "kv_cache"))]
)
def test_a_combination_passes_the_gate(base, ideas, tiny, tmp_path):
    path = tmp_path / f"{'_'.join((base, *ideas))}.py"
    path.write_text(combine(base, ideas))
    gguf, stage = open_model(tiny), load_stage(str(path))
    model = stage.load(gguf, 16, 1)
    ids, rows = zip(*stage.generate(model, IDS, 4), strict=True)
    want = reference.compute(gguf, [*IDS, *ids[:-1]], rows=4).logits
    assert gate.agreement(rows, ids, want, gate.tolerance(str(path))).passed
    assert (getattr(model, "cache", None) is not None) == ("kv_cache" in ideas)


# ---- credit ----------------------------------------------------------------------------------------------------


def times(**medians):
    return {
        tuple(key.split("_and_")) if key != "none" else (): {"ttft_ms": [ms, ms * 1.001, ms * 0.999, ms]}
        for key, ms in medians.items()
    }


def test_credit_depends_on_the_order_and_the_mean_does_not():
    """Together 10x; a alone 5x, b alone 4x: after b, a is worth 2.5; after a, b is worth 2."""
    known = times(none=1000, a=200, b=250, a_and_b=100)
    a, b = (credit(idea, ["a", "b"], known, "ttft_ms") for idea in "ab")
    assert a["first"]["ratio"] == pytest.approx(5, rel=0.01)
    assert a["last"]["ratio"] == pytest.approx(2.5, rel=0.01)
    assert b["first"]["ratio"] == pytest.approx(4, rel=0.01)
    assert b["last"]["ratio"] == pytest.approx(2, rel=0.01)
    assert a["mean"] == pytest.approx((5 * 2.5) ** 0.5)
    assert a["mean"] * b["mean"] == pytest.approx(10), "the shares make up the whole"
    assert a["orders"] == 2


def test_shares_of_three_make_up_the_whole():
    known = times(none=1000, a=500, b=900, c=300, a_and_b=400, a_and_c=100, b_and_c=250, a_and_b_and_c=80)
    shares = [credit(idea, list("abc"), known, "ttft_ms") for idea in "abc"]
    assert prod(s["mean"] for s in shares) == pytest.approx(1000 / 80)
    assert {s["orders"] for s in shares} == {6}


def test_an_idea_that_rests_on_another_has_one_order():
    known = times(none=1000, a=500, a_and_b=100)
    a, b = (credit(idea, ["a", "b"], known, "ttft_ms") for idea in "ab")
    assert (a["mean"], b["mean"]) == (pytest.approx(2), pytest.approx(5))
    assert (a["orders"], b["first"], a["last"]) == (1, None, None)


def test_an_idea_worth_nothing_is_said_so():
    found = credit("a", ["a", "b"], times(none=100, a=100, b=50, a_and_b=50), "ttft_ms")
    assert grid.told(found["first"]) == "≈ 1"
    assert grid.told(None) == "–"
    few = {chosen: {"ttft_ms": found["ttft_ms"][:2]} for chosen, found in times(none=100, a=50).items()}
    assert grid.told(credit("a", ["a"], few, "ttft_ms")["first"]) == "2.00× ?"


# ---- the whole way ---------------------------------------------------------------------------------------------


@pytest.fixture
def here(monkeypatch):
    """Runs in this process, and few of them: what is tested is not how long they take."""
    monkeypatch.setattr(harness, "run", lambda request, *_: harness.measure(request))
    monkeypatch.setattr(harness, "diagnose", lambda request: "somewhere")
    monkeypatch.setattr(grid.compare, "ROUNDS", 3)
    monkeypatch.setattr(grid.compare, "MOST_ROUNDS", 3)


def small(tiny):
    return prepare(str(tiny), ids="1,2,3", n=3, context=16)


def test_a_grid_is_a_record(tiny, tmp_path, here, capsys):
    found = grid.grid(["kv_cache", "tiling"], small(tiny), 5.0, str(tmp_path))
    assert (found["schema"], found["base"], found["ideas"]) == (1, "naive", ["tiling", "kv_cache"])
    assert [cell["ideas"] for cell in found["cells"]] == [[], ["tiling"], ["kv_cache"], ["tiling", "kv_cache"]]
    assert all(cell["ttft_ms"]["median"] > 0 and cell["nmse"] < 1e-8 for cell in found["cells"])
    assert [(c["idea"], c["metric"]) for c in found["credit"]][:2] == [("tiling", "ttft_ms"), ("kv_cache", "ttft_ms")]
    assert all(c["orders"] == 2 and c["mean"] > 0 for c in found["credit"])
    said = capsys.readouterr()
    assert "4 combinations" in said.err
    assert said.out == ""
    assert json.loads(next(tmp_path.rglob("grid/*.json")).read_text()) == found


def test_a_combination_that_is_wrong_or_missing_has_no_time_and_a_reason(tiny, tmp_path, monkeypatch, here):
    """kv_cache alone made wrong, and an idea that can't be had: the others are measured all the same."""
    real = grid.combine

    def spoiled(base, chosen):
        if chosen == ("tiling",):
            raise Missing("it rests on kv_cache")
        text = real(base, chosen)
        return text.replace("start + len(new)", "start + len(new) - 1") if chosen == ("kv_cache",) else text

    monkeypatch.setattr(grid, "combine", spoiled)
    found = grid.grid(list(FLOAT), small(tiny), 5.0, str(tmp_path))
    cells = {tuple(cell["ideas"]): cell for cell in found["cells"]}
    assert cells["tiling",]["missing"] == "it rests on kv_cache"
    assert "kv_cache is wrong, so no time is shown" in cells["kv_cache",]["wrong"]
    assert cells["kv_cache",]["ttft_ms"] is cells["tiling",]["ttft_ms"] is None
    assert cells[()]["ttft_ms"] and cells["tiling", "kv_cache"]["ttft_ms"]
    assert all(c["mean"] is None for c in found["credit"])
    shown = [piece for piece in grid.render(found) if isinstance(piece, str)]
    assert "tiling: it rests on kv_cache" in shown


def test_the_estimate_covers_every_combination():
    sample = Sample([1, 2], "length", 1000.0, [500.0], 0, 0, 0, {})
    first = {chosen: sample for count in range(3) for chosen in combinations(FLOAT, count)}
    assert "4 combinations" in grid.estimate(first, 60.0)
    assert grid.estimate(first, 60.0).startswith("about 238 s")


def test_a_grid_of_one_idea_on_the_command_line():
    done = lesson("compare", "--grid", "tiling")
    assert "two to 4 different ideas" in one_sentence(done)
    assert done.returncode == 2
