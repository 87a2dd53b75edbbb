"""The command line for kernel ladders, and how their rungs are timed."""

import json
from types import SimpleNamespace

import pytest

from common import cuda
from common import kernel_commands as commands
from common import kernel_ladder as kl
from common.diff import constant
from common.job import UsageError
from common.stage import FOLDER, StageError, rungs
from tests.helpers import copy_of, lesson, one_sentence

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
ROW = {"stage", "dtype", "shape", "right", "max_abs", "mean_abs", "ms", "tflops", "percent_peak", "ratio_to_baseline",
       "peak_mb"}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("kernels")


def mine(folder, *edits, previous='"gemm_cpu/naive"', name="mine.py"):
    """A copy of gemm_cpu/tiled as a reader would make one, with each (old, new) replaced."""
    return copy_of("gemm_cpu/tiled", folder, ('PREVIOUS = "naive"', f"PREVIOUS = {previous}"), *edits, name=name)


# ---- finding and reading ---------------------------------------------------------------------------------------


def test_list_names_the_kernel_ladders_and_shows_one_in_its_order():
    found = json.loads(lesson("list", "--json").stdout)
    assert {"gemm", "gemm_cpu", "gemm_q4k"} <= {ladder["name"] for ladder in found["ladders"]}
    rows = json.loads(lesson("list", "gemm_cpu", "--json").stdout)["stages"]
    assert [row["name"] for row in rows] == [f"gemm_cpu/{s}" for s in kl.ladder("gemm_cpu").STAGES]
    assert rows[1]["previous"] == "naive" and rows[1]["idea"].startswith("Use a piece of w")
    assert "lesson compare gemm_cpu/naive gemm_cpu/tiled" in lesson("list", "gemm_cpu").stdout.decode()


def test_every_rung_of_a_ladder_is_declared():
    declared = {f"{ladder}/{s}" for ladder in ("gemm", "gemm_cpu", "gemm_q4k") for s in kl.ladder(ladder).STAGES}
    assert declared == {rung for rung in rungs() if rung.split("/")[0] in ("gemm", "gemm_cpu", "gemm_q4k")}


def test_read_prints_a_rung_and_diff_compares_two():
    assert lesson("read", "gemm/tiled").stdout == (FOLDER / "gemm" / "tiled.py").read_bytes()
    assert lesson("read", "gemm").stdout.startswith(b"# gemm: ")
    changed = json.loads(lesson("diff", "gemm/coalesced", "gemm/tiled", "--json").stdout)["changed"]
    assert [change["name"] for change in changed] == ["SOURCE.matmul"]
    assert b"__shared__" in lesson("diff", "gemm/coalesced", "gemm/tiled").stdout


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("run", "gemm/tiled"), 2, "gemm/tiled is a rung of a kernel ladder and runs no model: `lesson compare`"),
        (
            ("diff", "gemm", "gemm/naive"),
            2,
            "gemm is a kernel ladder: `lesson read gemm` shows its page, `lesson list gemm` its",
        ),
        (("profile", "gemm/tiled"), 2, "gemm/tiled is a rung of a kernel ladder and runs no model"),
        (("read", "gemm/tild"), 2, "unknown stage 'gemm/tild': did you mean gemm/tiled?"),
        (("read", "atention"), 2, "unknown stage 'atention': did you mean attention?"),
        (("list", "gem"), 2, "unknown ladder 'gem': did you mean gemm?"),
        (("compare", "naive", "gemm/naive"), 2, "naive and gemm/naive are of different ladders"),
        (("compare", "gemm/naive", "gemm_cpu/naive"), 2, "are of different ladders, which share no job"),
        (("compare", "gemm_cpu/naive"), 2, "name two stages or more"),
        (("compare", "gemm_cpu/naive", "gemm_cpu/tiled", "-n", 3), 2, "-n means nothing to a kernel ladder"),
        (("compare", "gemm_cpu/naive", "gemm_cpu/tiled", "--shape", "pp64"), 2, "--shape 'pp64': give M,N,K"),
        (("compare", "gemm_q4k/naive", "gemm_q4k/tokens", "--shape", "1,8,100"), 2, "K is a multiple of 256"),
        (("sweep", "gemm_cpu/tiled", "TIEL=2"), 2, "has no constant 'TIEL' to sweep: it has TILE"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(words, code, told):
    done = lesson(*words)
    assert done.returncode == code
    assert told in one_sentence(done)


# ---- compare, measured -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compared(folder):
    words = ("gemm_cpu/naive", "gemm_cpu/tiled", "gemm_cpu/tiled", "--shape", "50,70,90")
    return json.loads(lesson("compare", *words, "--json", "--save", folder / "json").stdout)


def test_compare_gives_the_documented_keys(compared, folder):
    assert compared["schema"] == 1 and compared["shape"] == [50, 70, 90] and compared["missing"] is None
    assert [row["stage"] for row in compared["stages"]] == ["gemm_cpu/naive", "gemm_cpu/tiled", "gemm_cpu/tiled"]
    for row in compared["stages"]:
        assert set(row) >= ROW and row["right"] is True
        assert set(row["ms"]) == {"median", "min", "stdev", "samples"}
        assert row["tflops"] == pytest.approx(2 * 50 * 70 * 90 / row["ms"]["median"] / 1e9)
        assert 0 < row["percent_peak"] < 105 and set(row["ratio_to_baseline"]) == {"numpy"}
    assert [row["stage"] for row in compared["baselines"]] == ["numpy"]
    assert compared["changed"]["gemm_cpu/tiled"] == []  # the second step: a rung against itself
    kept = list((folder / "json").rglob("naive-tiled-tiled-50-70-90.json"))
    assert [json.loads(path.read_text()) for path in kept] == [compared]


def test_compare_judges_each_step_by_pairs_of_equal_count(compared):
    assert [(pair["a"], pair["b"]) for pair in compared["pairs"]] == [
        ("gemm_cpu/naive", "gemm_cpu/tiled"), ("gemm_cpu/tiled", "gemm_cpu/tiled")]  # fmt: skip
    words = {"faster", "slower", "no measurable change"}
    assert all(pair["pairs"] == commands.MOST and pair["verdict"] in words for pair in compared["pairs"])


def test_compare_tells_the_idea_the_code_and_the_numbers(folder):
    words = ("compare", "gemm_cpu/tiled", "gemm_cpu/contiguous", "--shape", "200", "--save", folder / "told")
    told = lesson(*words, COLUMNS="80").stdout.decode()
    order = ["The loops in another order", "Idea", "Expect", "Changed: ", "checked against float64", "GFLOP/s", "numpy",
             "gemm_cpu/contiguous is faster than", "one thread"]  # fmt: skip
    flat = " ".join(told.split())
    at = [flat.index(word) for word in order]
    assert at == sorted(at)
    assert max(map(len, told.splitlines())) <= 80


def test_a_file_of_ones_own_stands_in_for_a_rung(folder):
    own = mine(folder, ("TILE = 64", "TILE = 32"))
    words = ("compare", "gemm_cpu/tiled", own, "--shape", "40", "--json", "--save", folder / "own")
    found = json.loads(lesson(*words).stdout)
    assert found["ladder"] == "gemm_cpu" and found["changed"][str(own)] == ["TILE"]
    assert found["stages"][1]["right"] is True


def test_a_ladder_is_told_by_previous_by_the_folder_or_by_the_others(folder):
    own = str(mine(folder, name="a.py"))
    bare = str(mine(folder, previous='"naive"', name="b.py"))
    assert commands.ladder_of([own, own]) == "gemm_cpu"
    assert commands.ladder_of([bare, bare]) is None  # as for a stage of the reader's own
    assert commands.ladder_of(["gemm/naive", bare]) == "gemm"
    assert commands.ladder_of([str(FOLDER / "gemm" / "tiled.py"), bare]) == "gemm"
    with pytest.raises(UsageError, match="different ladders"):
        commands.ladder_of(["gemm/naive", own])


@pytest.mark.parametrize(
    ("edit", "code", "told"),
    [
        (("range(k0, min(k0 + TILE, K))", "range(k0, min(k0 + TILE, K - 1))"), 5, "is wrong at 30x30x30 (float32)"),
        (("def matmul(", "def matmuls("), 1, "mine.py has no matmul: start from a copy of a rung"),
        (("TILE = 64", "TILE = 64 +"), 1, "mine.py: line"),
        (("M, K = x.shape", "M, K, L = x.shape"), 1, "mine.py: "),
    ],
)
def test_a_broken_file_of_ones_own_gets_one_sentence_and_no_time(folder, edit, code, told):
    own = mine(folder, edit)
    done = lesson("compare", "gemm_cpu/naive", own, "--shape", "30", "--json", "--save", folder / "broken")
    assert (done.returncode, told in one_sentence(done)) == (code, True), done.stderr
    assert list((folder / "broken").rglob("*.json")) == []


# ---- compare, without the GPU -----------------------------------------------------------------------------------


def test_recorded_numbers_are_marked_as_recorded():
    done = lesson("compare", "gemm/coalesced", "gemm/tiled", **NO_GPU)
    told = done.stdout.decode()
    assert done.returncode == 0
    here, there = told.split("recorded on NVIDIA H200 (reports/nvidia-h200/gemm/ladder.json)")
    assert "not measured here: CuPy" in here and here.count("n/a") == 14 and "is faster" not in told
    record = json.loads((FOLDER.parent / "reports" / "nvidia-h200" / "gemm" / "ladder.json").read_text())
    row = next(r for r in record["rows"] if r["stage"] == "tiled" and r["shape"] == [4096] * 3)
    assert f"{row['ms']['median']:.1f}" in there and "cublas" in there


def test_recorded_numbers_stay_apart_in_the_document():
    words = ("compare", "gemm/warptiled", "gemm/tensor_core", "--shape", "2048", "--json")
    found = json.loads(lesson(*words, **NO_GPU).stdout)
    assert found["missing"] and found["pairs"] == [] and found["machine"] is None
    assert [(row["ms"], row["tflops"], row["dtype"]) for row in found["stages"]] == [
        (None, None, "float32"), (None, None, "float16")]  # fmt: skip
    recorded = found["recorded"][0]
    assert recorded["machine"] == "NVIDIA H200" and recorded["of_another_version"] == []
    assert {"warptiled", "tensor_core", "cublas"} == {row["stage"] for row in recorded["rows"]} - {"torch"}


def test_without_gpu_or_record_the_exit_code_is_4():
    done = lesson("compare", "gemm/coalesced", "gemm/tiled", "--shape", "100", "--json", **NO_GPU)
    assert done.returncode == 4
    assert "no record has gemm at [100, 100, 100]: CuPy" in one_sentence(done)


def test_a_record_of_another_version_is_said_to_be_one(monkeypatch):
    monkeypatch.setattr(kl, "source_digest", lambda rungs, stage: "another")
    found = commands.recalled(kl.ladder("gemm"), "gemm", ["gemm/tiled"], ["float32"], [4096] * 3, "no GPU")
    assert found["recorded"][0]["of_another_version"] == ["tiled"]


# ---- sweep ------------------------------------------------------------------------------------------------------


def test_a_sweep_checks_each_value_and_times_the_right_ones(folder):
    words = ("sweep", "gemm_cpu/tiled", "TILE=0,2,16", "--shape", "48", "--json", "--save", folder / "sweep")
    found = json.loads(lesson(*words).stdout)
    none, two, sixteen = found["rows"]
    assert none["value"] == 0 and none["ms"] is None and "ValueError" in none["wrong"]
    for row in (two, sixteen):
        assert row["wrong"] is None and row["ms"]["median"] > 0 and row["max_abs"] < 1e-4
    assert len(two["ms"]["samples"]) == commands.SWEPT
    assert len(list((folder / "sweep").rglob("tiled-tile-48-48-48.json"))) == 1


def test_a_sweep_binds_the_value_it_names(folder):
    """Compiled code of another value, kept in a cache, would give another's time."""
    own = mine(folder, ("for k0 in range(0, K, TILE):", "out[0, 0] = TILE - 3\n    for k0 in range(0, K, TILE):"))
    words = ("sweep", own, "TILE=2,3", "--shape", "20", "--json", "--save", folder / "bound")
    two, three = json.loads(lesson(*words).stdout)["rows"]
    assert "wrong: the largest error is 1.0e+00" in two["wrong"]
    assert three["wrong"] is None


def test_a_sweep_without_a_gpu_compiles():
    found = json.loads(lesson("sweep", "gemm/register_2d", "THREAD=4,8,16", "--json", **NO_GPU).stdout)
    four, eight, _ = found["rows"]
    assert found["missing"] and four["ms"] is None
    assert 0 < four["registers"] < eight["registers"]
    too_much = json.loads(lesson("sweep", "gemm/coarsened", "COARSE=4000", "--json", **NO_GPU).stdout)["rows"][0]
    assert too_much["wrong"].startswith("does not compile")
    told = lesson("sweep", "gemm/coarsened", "COARSE=2", **NO_GPU).stdout.decode()
    assert "registers" in told and "compiled only, not run: CuPy" in " ".join(told.split())
    kept, spilt = json.loads(lesson("sweep", "attention/flash", "TILE_K=64,128", "--json", **NO_GPU).stdout)["rows"]
    assert kept["spills"] == 0 < spilt["spills"]


def test_a_sweep_with_nothing_to_compile_by_says_so(monkeypatch):
    monkeypatch.setattr(cuda, "compilers", dict)
    with pytest.raises(commands.MissingError, match="no GPU; to compile .* pip install nvidia-cuda-nvrtc") as caught:
        commands.compiled(kl.ladder("gemm"), "gemm/tiled", "TILE", "8", {}, "no GPU")
    assert caught.value.exit_code == 4
    with pytest.raises(commands.MissingError, match="gemm/triton can't be swept here: no GPU"):
        commands.compiled(kl.ladder("gemm"), "gemm/triton", "GROUP", "8", {}, "no GPU")


# ---- timing -----------------------------------------------------------------------------------------------------


def test_rounds_go_forward_and_back_and_end_with_the_budget():
    order = []
    ms = {"a": 400.0, "b": 100.0}

    def once(call):
        order.append(call)
        return ms[call]

    samples = commands.rounds(once, {"a": "a", "b": "b"}, budget_s=1.7)
    assert samples == {"a": [400.0] * 4, "b": [100.0] * 4}
    assert "".join(order) == "abbaabba"
    assert len(commands.rounds(once, {"a": "a"}, budget_s=0.1)["a"]) == commands.FEWEST


def test_types_are_shared_where_they_can_be():
    gemm = kl.ladder("gemm")
    assert commands.types(gemm, ["hopper", "triton"]) == ["float16", "float16"]
    assert commands.types(gemm, ["warptiled", "hopper"]) == ["float32", "float16"]
    assert commands.types(gemm, ["hopper", "mine.py"]) == ["float16", "float16"]


def test_launches_are_seen_with_their_threads():
    call = kl.variant(kl.ladder("gemm"), "tiled", TILE=8)
    program, launched = commands.source_of(call)["PROGRAM"], []
    program.launch = lambda *args: launched.append(args)
    seen = commands.watched(call)
    program.launch("matmul", 7, (8, 8), ("x",), 64)
    program.launch("matmul", 7, 256, ("x",))
    assert seen == [("matmul", 64, 64), ("matmul", 256, 0)]
    assert launched == [("matmul", 7, (8, 8), ("x",), 64), ("matmul", 7, 256, ("x",), 0)]


def test_a_rung_too_slow_for_a_shape_is_left_out_by_its_lowest_rate():
    rungs = kl.ladder("gemm_cpu")
    rows = [{"stage": "naive", "tflops": rate, "ms": {}} for rate in (0.003, 0.0003)]
    rows += [{"stage": "tiled", "tflops": 0.003, "ms": {}}]
    assert kl.too_slow(rungs, rows, (2048,) * 3, limit_ms=10_000) == ["naive"]
    assert kl.too_slow(rungs, [], (2048,) * 3, limit_ms=1) == []


def test_a_type_may_be_measured_at_fewer_shapes(monkeypatch):
    rungs = kl.ladder("attention_backward")
    here = SimpleNamespace(launch_ms=lambda: 1.0, peaks=lambda dtypes: {}, machine=dict)
    monkeypatch.setattr(kl, "device", lambda rungs: here)
    monkeypatch.setattr(kl, "check", lambda *args, **kwargs: {"right": True})
    monkeypatch.setattr(kl, "measure", lambda rungs, shape, dtype, *rest: [{"dtype": dtype, "shape": shape}])
    *_, record = kl.measured(rungs, "attention_backward", 1.0, 1.0)
    rows = record["rows"]
    assert [row["shape"] for row in rows if row["dtype"] == "float16"] == rungs.SHAPES
    assert [row["shape"] for row in rows if row["dtype"] == "bfloat16"] == rungs.FEWER["bfloat16"]
    assert set(rungs.FEWER["bfloat16"]) < set(rungs.SHAPES)


def test_a_measurement_that_is_ended_keeps_the_shapes_it_has(monkeypatch, tmp_path):
    taken = iter([[{"right": True, "shape": (1, 1, 1), "dtype": "float32", "stage": "naive", "absent": "quick"}]])
    monkeypatch.setattr(kl, "check", lambda *args, **kwargs: {"right": True})
    monkeypatch.setattr(kl, "measure", lambda *args: next(taken))
    kept = tmp_path / "ladder.json"
    kept.write_text("the last whole record")
    with pytest.raises(RuntimeError, match="StopIteration"):  # at the second shape
        kl.main(["gemm_cpu", "--save", str(tmp_path)])
    assert kept.read_text() == "the last whole record"
    assert len(json.loads((tmp_path / "ladder.unfinished.json").read_text())["rows"]) == 1


def test_a_numba_rung_is_known_by_its_code_and_not_by_its_docstring(folder):
    rungs = kl.ladder("gemm_cpu")
    same = mine(folder, ("Idea    Use a piece", "Idea    Take a piece"), name="same.py")
    other = mine(folder, ("TILE = 64", "TILE = 65"), name="other.py")
    assert kl.source_digest(rungs, str(same)) == kl.source_digest(rungs, "tiled")
    assert kl.source_digest(rungs, str(other)) != kl.source_digest(rungs, "tiled")


def test_a_file_that_raises_while_it_is_read_names_its_line(folder):
    own = mine(folder, ("TILE = 64", "TILE = 64 // 0"), name="raises.py")
    line = next(i for i, text in enumerate(own.read_text().splitlines(), 1) if text.startswith("TILE ="))
    with pytest.raises(StageError, match=f"raises.py: line {line}: ZeroDivisionError"):
        kl.entry(kl.ladder("gemm_cpu"), str(own))
    assert constant(own, "PREVIOUS") == "gemm_cpu/naive"
