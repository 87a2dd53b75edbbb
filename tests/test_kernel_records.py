"""The kernel ladders' records measured the code that stands here, the chapters quote them, and the figures hold."""

import importlib
import json
import re
from pathlib import Path

import pytest

from common import figures
from common import kernel_ladder as kl

REPORTS = Path(kl.__file__).parent.parent / "reports" / "nvidia-h200"
TOLD = {  # whose chapters have the same parts
    name: importlib.import_module(f"stages.{name}") for name in ("gemm", "gemm_q4k", "attention", "attention_backward")
}
LADDERS = {name: TOLD[name] for name in ("gemm", "gemm_q4k")}
RUNGS = [(ladder, stage) for ladder, package in LADDERS.items() for stage in package.STAGES]
PARTS = ["Idea", "Picture", "Arithmetic", "Predict", "Code", "Measured", "What it costs", "What lost, and why",
         "Three questions", "Sources"]  # fmt: skip


def record(ladder: str, name: str = "ladder") -> dict:
    return json.loads((REPORTS / ladder / f"{name}.json").read_text())


def row(ladder: str, stage: str, *shape: int, dtype: str | None = None) -> dict:
    rows = [r for r in record(ladder)["rows"] if r["stage"] == stage and r["shape"] == [*shape]]
    return next(r for r in rows if dtype in (None, r["dtype"]))


def test_the_peak_of_multiply_adds_is_the_highest_recorded_and_nothing_beats_it(tmp_path):
    for name, document in {
        "llm/old": {"roofs": {"multiply_add_gflops": 600.0}},
        "llm/none": {"roofs": None},
        "llm/list": [],
        "gemm/ladder": {"peak_tflops": {"float32": 0.06, "float16": 0.9, "int8": 1.8}},
    }.items():
        path = tmp_path / f"{name}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(document))
    assert figures.multiply_adds(tmp_path) == pytest.approx(900.0)
    with pytest.raises(KeyError):
        figures.multiply_adds(tmp_path / "llm")
    peak = figures.multiply_adds(REPORTS)
    assert 1e3 * max(r["tflops"] for r in record("gemm")["rows"]) < peak


def counter(stage: str, name: str) -> float:
    return next(r[name] for r in record("gemm", "counters")["rows"] if r["stage"] == stage)


@pytest.mark.parametrize(("ladder", "stage"), RUNGS)
def test_a_record_measured_this_source(ladder, stage):
    for name in ("ladder", "counters"):
        assert record(ladder, name)["sources"][stage] == kl.source_digest(LADDERS[ladder], stage)


@pytest.mark.parametrize("ladder", LADDERS)
def test_every_timed_row_was_right_first(ladder):
    found, package = record(ladder), LADDERS[ladder]
    assert all(r["right"] for r in found["odd_shapes"])
    assert {tuple(r["shape"]) for r in found["odd_shapes"]} == set(package.ODD_SHAPES)
    timed = {(r["stage"], r["dtype"], tuple(r["shape"])) for r in found["rows"] if r.get("right") and "ms" in r}
    wanted = {(s, d, shape) for s, types in package.STAGES.items() for d in types for shape in package.SHAPES}
    assert wanted <= timed
    for r in found["rows"]:
        assert r["ms"]["median"] >= found["launch_ms"], "faster than an empty kernel"
        assert (r["percent_peak"] or 0) <= 105, "above the measured peak: an error in the accounting"


def test_fp32_reaches_cublas():
    for n in (2048, 4096, 8192):
        assert row("gemm", "warptiled", n, n, n)["ratio_to_baseline"]["cublas"] >= 0.9


def test_fp16_reaches_cublas():
    assert row("gemm", "hopper", 8192, 8192, 8192)["ratio_to_baseline"]["cublas"] >= 0.95


def test_each_rung_is_faster_than_the_one_before():
    for stage in LADDERS["gemm"].STAGES:
        previous = importlib.import_module(f"stages.gemm.{stage}").PREVIOUS
        if previous and stage != "triton":
            assert row("gemm", stage, *[4096] * 3)["ms"]["median"] < row("gemm", previous, *[4096] * 3)["ms"]["median"]


def test_q4k_reaches_the_read_bound_and_beats_cublas_with_few_tokens():
    for n, k in ((5632, 2048), (2048, 5632)):
        assert row("gemm_q4k", "tensor_core", 1, n, k)["ratio_to_baseline"]["read"] >= 0.6
        for t in (1, 16):
            assert row("gemm_q4k", "tensor_core", t, n, k)["ratio_to_baseline"]["cublas"] > 1


@pytest.mark.parametrize(("before", "after", "name", "factor"), [
    ("naive", "coalesced", "global_load_sectors", 5),  # 33 sectors a multiply-add of a warp become 5
    ("coalesced", "tiled", "global_load_requests", 30),  # TILE = 32
    ("tiled", "coarsened", "shared_wavefronts", 1.5),  # COARSE = 4
    ("coarsened", "register_2d", "shared_wavefronts", 2),
    ("register_2d", "vectorized", "global_load_requests", 3.9),  # float4
    ("register_2d", "vectorized", "instructions", 1.3),
    ("vectorized", "warptiled", "shared_wavefronts", 1.1),
    ("warptiled", "tensor_core", "instructions", 20),
    ("tensor_core", "hopper", "instructions", 3),  # neither copies nor fragments
])  # fmt: skip
def test_the_counter_that_should_move_moves(before, after, name, factor):
    assert counter(before, name) >= factor * counter(after, name)


def test_ones_pass_the_planted_bug():
    found = record("gemm", "planted_bug")["verdicts"]
    assert {name: v["right"] for name, v in found.items()} == {
        "tiled, ones": True,
        "tiled with w_tile read transposed, ones": True,
        "tiled, random": True,
        "tiled with w_tile read transposed, random": False,
    }


@pytest.mark.parametrize(("ladder", "stage"), [(name, stage) for name in TOLD for stage in TOLD[name].STAGES])
def test_a_chapter_has_its_parts_and_quotes_the_record(ladder, stage):
    path = Path(TOLD[ladder].__file__).parent / f"{stage}.md"
    text = path.read_text()
    assert re.findall(r"^## (.*)$", text, re.M) == PARTS
    assert text.count("<details>") == 3
    assert len(figures.FIGURE.findall(text)) >= 5
    assert figures.figures(text, REPORTS / ladder) == text
    for picture in re.findall(r"!\[.*?\]\((.*?)\)", text):
        assert (path.parent / picture).read_text().startswith("<svg")


@pytest.mark.parametrize("ladder", TOLD)
def test_the_overview_quotes_the_record(ladder):
    text = (Path(TOLD[ladder].__file__).parent / "README.md").read_text()
    assert len(figures.FIGURE.findall(text)) > 100
    assert figures.figures(text, REPORTS / ladder) == text


def test_a_wrong_figure_is_corrected():
    quoted = '99.9<!--= ms("naive") / ms("coalesced") -->'
    assert figures.figures(quoted, REPORTS / "gemm") == quoted.replace("99.9", "11.9")


def test_a_figure_names_a_shape_as_its_ladder_does(tmp_path):
    rows = [
        {"stage": "skip", "shape": [*importlib.import_module("stages.attention").square(512, 64, causal)],
         "dtype": dtype, "tflops": 10 * causal + (dtype == "float16")}
        for causal in (0, 1) for dtype in ("bfloat16", "float16")
    ]  # fmt: skip
    (tmp_path / "ladder.json").write_text(json.dumps({"ladder": "attention", "rows": rows}))
    for shape, found in (("512", 11), ("512, 64, 0", 1), ('512, dtype="bfloat16"', 10)):
        assert figures.figures(f'0<!--= tflops("skip", {shape}) -->', tmp_path).startswith(f"{found}<")


def test_pictures_are_those_of_the_code():
    from common import kernel_picture

    folder = Path(LADDERS["gemm"].__file__).parent
    for stage in LADDERS["gemm"].STAGES:
        if stage != "triton":
            rung = importlib.import_module(f"stages.gemm.{stage}")
            assert (folder / f"{stage}.svg").read_text() == kernel_picture.draw(rung), stage


RAW = """"ID","gpu__time_duration.sum","dram__bytes_read.sum","smsp__average_warps_issue_stalled_wait_per_issue_active.ratio","smsp__average_warps_issue_stalled_selected_per_issue_active.ratio"
"","us","Mbyte","inst","inst"
"0","1,200.5","3","0.5","1"
"1","7","2","0.25","1"
"""  # noqa: E501


def test_counters_come_in_base_units():
    first, second = kl.counters("==PROF== noise\n" + RAW, ["a", "b"])
    assert first == {"stage": "a", "seconds": pytest.approx(1200.5e-6), "dram_bytes_read": 3e6, "stall": "wait",
                     "stall_cycles": 0.5}  # fmt: skip
    assert (second["stage"], second["stall_cycles"]) == ("b", 0.25)
    with pytest.raises(ValueError):
        kl.counters(RAW, ["a"])


def test_estimates_are_the_largest_of_each_launch():
    details = "  f (1, 1, 1)x(32, 1, 1)\n Est. Speedup: 3%\n Est. Speedup: 12.5%\n  g (2, 1, 1)x(32, 1, 1)\n none\n"
    assert kl.estimates(details) == [12.5, 0.0]


def test_a_table_names_what_it_cannot_time():
    rows = [
        {"stage": "a", "dtype": "float32", "shape": (2, 3, 4), "right": False, "max_abs": 1.5},
        {"stage": "b", "dtype": "float32", "shape": (2, 3, 4), "right": None, "absent": "no module named triton"},
    ]
    told = kl.table(rows)
    assert "WRONG, so no time: error 1.50e+00" in told and "no module named triton" in told


def test_a_variant_binds_a_constant_and_no_other():
    f = kl.variant(LADDERS["gemm"], "coarsened", COARSE=8)
    assert f.__globals__["OPTIONS"] == ("-DTILE=32", "-DCOARSE=8")
    with pytest.raises(ValueError, match=r"coarsened\.py has no constant COARS"):
        kl.variant(LADDERS["gemm"], "coarsened", COARS=8)
