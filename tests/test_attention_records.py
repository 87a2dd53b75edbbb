"""What the chapters of both attention ladders say is what their records hold, and the records measured this code."""

import functools
import importlib
import itertools
import json
import math
import re
import statistics
from pathlib import Path

import pytest

from common import attention_picture, roofline
from common import kernel_ladder as kl
from stages.attention import square

REPORTS = Path(kl.__file__).parent.parent / "reports" / "nvidia-h200"
LADDERS = {name: importlib.import_module(f"stages.{name}") for name in ("attention", "attention_backward")}
RUNGS = [(ladder, stage) for ladder, package in LADDERS.items() for stage in package.STAGES]
SIZES = [(D, causal) for D in (64, 128) for causal in (0, 1)]
LENGTHS = LADDERS["attention"].LENGTHS
BASELINES = tuple(LADDERS["attention"].BASELINES)


@functools.cache
def record(ladder: str, name: str = "ladder") -> dict:
    return json.loads((REPORTS / ladder / f"{name}.json").read_text())


def row(ladder: str, stage: str, n: int, D: int = 64, causal: int = 1, dtype: str = "float16") -> dict:
    rows = record(ladder)["rows"]
    shape = [*square(n, D, causal)]
    return next(r for r in rows if (r["stage"], r["shape"], r["dtype"]) == (stage, shape, dtype))


@pytest.mark.parametrize(("ladder", "stage"), [rung for rung in RUNGS if rung[1] != "triton"])
def test_pictures_are_those_of_the_code(ladder, stage):
    rung = importlib.import_module(f"stages.{ladder}.{stage}")
    path = Path(LADDERS[ladder].__file__).with_name(f"{stage}.svg")
    assert path.read_text() == attention_picture.draw(ladder, rung)


def test_a_picture_shows_the_tiles_that_are_visited():
    """flash walks to the last key; skip and hopper end at the first tile behind the block's last query."""
    walks = {}
    for stage in ("flash", "skip", "hopper"):
        (walk,) = attention_picture.forward(importlib.import_module(f"stages.attention.{stage}"), stage)
        walks[stage] = walk.whole
    assert walks["flash"][3] == attention_picture.SCORES
    assert walks["skip"] == (384, 0, 128, 512)
    assert walks["hopper"] == (384, 0, 192, 640)
    rung = importlib.import_module("stages.attention_backward.skip")
    keys, queries = attention_picture.backward(rung, "skip")
    assert (keys.whole, queries.whole) == ((256, 256, 512, 64), (384, 0, 64, 448))


@pytest.mark.parametrize(("ladder", "stage"), RUNGS)
def test_a_record_measured_this_source(ladder, stage):
    assert record(ladder)["sources"][stage] == kl.source_digest(LADDERS[ladder], stage)


@pytest.mark.parametrize("ladder", LADDERS)
def test_every_rung_was_right_on_the_odd_shapes(ladder):
    found, package = record(ladder)["odd_shapes"], LADDERS[ladder]
    assert all(r["right"] for r in found)
    assert sorted((r["stage"], r["dtype"], tuple(r["shape"])) for r in found) == sorted(
        (s, d, shape) for s, types in package.STAGES.items() for d in types for shape in package.ODD_SHAPES
    )


@pytest.mark.parametrize("ladder", LADDERS)
def test_every_timed_row_was_right_first(ladder):
    found, package = record(ladder), LADDERS[ladder]
    timed = {(r["stage"], r["dtype"], tuple(r["shape"])) for r in found["rows"] if r.get("right") and "ms" in r}
    quick = [s for s in package.STAGES if s not in ("naive", "online", "stored")]
    shapes = {d: package.FEWER.get(d, package.SHAPES) for d in ("float16", "bfloat16")}
    assert {(s, d, shape) for s in quick for d in shapes for shape in shapes[d]} <= timed
    for r in found["rows"]:
        if "ms" in r:
            assert r["ms"]["median"] >= found["launch_ms"], "faster than an empty kernel"
            assert r["percent_peak"] <= 100 * roofline.SLACK, "above the measured peak: an error in the accounting"


def test_the_articles_count_would_be_refused():
    """Twice the operations for the own kernel puts it above the peak: no record is written."""
    found = row("attention", "hopper", 8192, 128)
    peak = record("attention")["peak_tflops"]["float16"]
    assert kl.share_of_peak("hopper", found["tflops"], peak) == pytest.approx(found["percent_peak"])
    with pytest.raises(roofline.AccountingError):
        kl.share_of_peak("hopper", 2 * found["tflops"], peak)


def test_one_formula_counts_for_every_column():
    for ladder, package in LADDERS.items():
        for r in record(ladder)["rows"]:
            if "ms" in r:
                assert r["tflops"] == pytest.approx(package.flops(*r["shape"]) / r["ms"]["median"] / 1e9)


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize(("ladder", "stage"), [rung for rung in RUNGS if rung[1] not in ("naive", "stored")])
def test_memory_is_linear_in_the_length(ladder, stage, n):
    """What is neither operand nor result: nothing, or an FP32 a row, delta; where all blocks add to dq that is FP32.

    Every shape has as many tokens, so what is linear in the length is the same at every length.
    """
    rows = [r for r in record(ladder)["rows"] if r["stage"] == stage and r["shape"][3] == n and "ms" in r]
    assert rows or (stage, n) == ("online", 16384)
    for r in rows:
        B, H, _, Q, _, D, *_ = r["shape"]
        kept = (ladder == "attention_backward") + D * (stage == "recomputed")
        assert r["beyond_mb"] == pytest.approx(4 * B * H * Q * kept / 1e6, abs=0.1), r["shape"]


@pytest.mark.parametrize(
    ("ladder", "stage", "matrices"), [("attention", "naive", 1), ("attention_backward", "stored", 2)]
)
def test_a_matrix_in_memory_is_seen(ladder, stage, matrices):
    timed = [r for r in record(ladder)["rows"] if r["stage"] == stage and "ms" in r]
    assert {r["shape"][3] for r in timed} >= {512, 1024}
    for r in timed:
        B, H, _, Q, K, *_ = r["shape"]
        assert r["beyond_mb"] == pytest.approx(matrices * 4 * B * H * Q * K / 1e6, rel=0.01)


def test_skip_reaches_flash_attention_and_nearly_halves_the_time():
    for D, n in itertools.product((64, 128), (2048, 4096, 8192, 16384)):
        assert row("attention", "skip", n, D)["ratio_to_baseline"]["sdpa_flash"] >= 0.9, (D, n)
    for D in (64, 128):
        assert (
            row("attention", "flash", 8192, D)["ms"]["median"]
            >= 1.7 * row("attention", "skip", 8192, D)["ms"]["median"]
        )


@pytest.mark.parametrize("ladder", LADDERS)
def test_hopper_and_triton_are_ahead_of_flash_attention(ladder):
    rows = [r for r in record(ladder)["rows"] if r["stage"] in ("hopper", "triton")]
    assert len(rows) == 2 * (len(SIZES) + 1) * len(LENGTHS)  # BF16 at one size
    assert all(r["ratio_to_baseline"]["sdpa_flash"] > 1 for r in rows)


def test_what_the_overviews_say_of_cudnn():
    def ahead(stage, D, causal):
        rows = {n: row("attention", stage, n, D, causal) for n in LENGTHS}
        return {n for n, r in rows.items() if r["ratio_to_baseline"]["sdpa_cudnn"] > 1}

    long = {2048, 4096, 8192, 16384}
    assert ahead("hopper", 64, 1) == long <= ahead("hopper", 64, 0)
    assert ahead("hopper", 128, 1) == long - {2048} and not ahead("hopper", 128, 0)
    assert not any(ahead(stage, *size) for stage in ("skip", "triton") for size in SIZES)
    rows = [r for r in record("attention_backward")["rows"] if "ms" in r and r["stage"] not in BASELINES]
    faster = [(r["stage"], tuple(r["shape"])) for r in rows if r["ratio_to_baseline"]["sdpa_cudnn"] > 1]
    assert faster == [("triton", square(512))]


@pytest.mark.parametrize("ladder", LADDERS)
def test_triton_is_between_skip_and_hopper_but_for_short_heads_of_64(ladder):
    for n, (D, causal) in itertools.product(LENGTHS, SIZES):
        skip, hopper, triton = (row(ladder, s, n, D, causal)["tflops"] for s in ("skip", "hopper", "triton"))
        assert skip < triton
        assert (triton > hopper) == ((D, causal) == (64, 1) and n <= 1024)


def test_the_backward_pass_reaches_most_of_flash_attention():
    """5 / 7 is what seven products for five would leave of equal rates."""
    rows = [r for r in record("attention_backward")["rows"] if r["stage"] == "skip"]
    assert len(rows) == (len(SIZES) + 1) * len(LENGTHS)
    assert min(r["ratio_to_baseline"]["sdpa_flash"] for r in rows) > 5 / 7


@pytest.mark.parametrize(
    ("ladder", "before", "after"), [("attention", "flash", "skip"), ("attention_backward", "split", "skip")]
)
def test_skipping_is_worth_more_the_longer_the_sequence(ladder, before, after):
    def worth(n, D, causal=1):
        return row(ladder, before, n, D, causal)["ms"]["median"] / row(ladder, after, n, D, causal)["ms"]["median"]

    for D in (64, 128):
        gains = [worth(n, D) for n in LENGTHS]
        assert gains == sorted(gains) and gains[0] > 1.3 and gains[-1] > 1.85
        assert all(worth(n, D, 0) < 1.2 for n in LENGTHS)  # nothing is hidden


@pytest.mark.parametrize("ladder", LADDERS)
def test_each_rung_is_faster_than_the_one_before(ladder):
    for stage in LADDERS[ladder].STAGES:
        previous = importlib.import_module(f"stages.{ladder}.{stage}").PREVIOUS
        if previous and (ladder, stage) != ("attention", "triton"):
            for n, D in itertools.product(LENGTHS, (64, 128)):
                slower = row(ladder, previous, n, D)
                if "ms" in slower or n <= 1024:
                    assert row(ladder, stage, n, D)["ms"]["median"] < slower["ms"]["median"], (stage, n, D)


def test_the_sanitizer_watched_this_source_and_found_what_was_planted_and_nothing_else():
    found = record("attention", "sanitizer")
    assert found["sources"] == {f"{p}/{s}": kl.source_digest(LADDERS[p], s) for p, s in RUNGS}
    runs = {(run["tool"], run["run"]): run for run in found["runs"]}
    for run, first in {
        ("memcheck", "overrun"): "Invalid __global__ read",
        ("initcheck", "unset"): "Uninitialized __global__ memory read",
        ("synccheck", "divergent"): "Barrier error detected. Divergent thread",
        ("racecheck", "race"): "Error: Race",
    }.items():
        caught = runs.pop(run)
        assert caught["exit"] and caught["first"].startswith(first)
    tools = "initcheck", "memcheck", "racecheck", "synccheck"
    assert sorted(runs) == [*itertools.product(tools, ("backward", "forward", "triton"))]
    for run in runs.values():
        assert (run["exit"], run["first"]) == (0, None)
        assert re.search(r"SUMMARY: 0 (errors|hazards)", run["summary"])


def test_the_gpus_tests_were_of_this_source():
    found = record("llm", "tests")
    assert found["sources"] == {f"{p}/{s}": kl.source_digest(LADDERS[p], s) for p, s in RUNGS}
    assert found["by_file"]["tests/test_attention_gpu.py"] and found["by_file"]["tests/test_torch_attention.py"]


def test_the_counters_are_of_this_source_and_show_what_the_chapters_say():
    found = record("attention", "counters")
    assert found["sources"] == {s: kl.source_digest(LADDERS["attention"], s) for s in ("flash", "skip", "hopper")}
    rows = {(r["stage"], r["shape"][5]): r for r in found["rows"]}
    assert [(r["stage"], r["shape"]) for r in found["rows"]] == [
        (s, [*square(8192, D)]) for D in (64, 128) for s in ("flash", "skip", "hopper")
    ]
    for (stage, D), r in rows.items():
        operations = 4 * D / 4096 * 16  # cycles of tensor core for one of exponential unit, at wgmma's rate
        longer = r["tensor_percent"] / r["exponential_percent"] / operations
        assert longer == pytest.approx(1 if stage == "hopper" else 1.5, rel=0.02), (stage, D)
        assert r["seconds"] * 1e3 == pytest.approx(row("attention", stage, 8192, D)["ms"]["median"], rel=0.05)
        assert r["dram_bytes_read"] == pytest.approx(3 * 2 * 16384 * 2048, rel=0.05)  # q, k and v, once
        assert rows["skip", D]["instructions"] < 0.45 * rows["flash", D]["instructions"]
    assert min(rows["hopper", 64][f"{unit}_percent"] for unit in ("tensor", "exponential")) > 50  # they overlap


def test_errors_are_of_this_source_and_close_to_pytorchs():
    """No rung's mean error in FP16 is more than a tenth above PyTorch's."""
    found = record("attention", "errors")
    assert found["sources"] == {f"{p}/{s}": kl.source_digest(LADDERS[p], s) for p, s in RUNGS}
    assert {r["rung"] for r in found["rows"]} == {"PyTorch", *found["sources"]}
    rows = [r for r in found["rows"] if (r["dtype"], r["against"]) == ("float16", "float64")]
    torchs = {(r["result"], r["shape"][5]): r["mean_abs"] for r in rows if r["rung"] == "PyTorch"}
    for r in rows:
        assert r["result"] in ("lse", "D") or r["mean_abs"] <= 1.1 * torchs[r["result"], r["shape"][5]], r


def test_from_split_on_the_backward_rungs_differ_by_the_same():
    """They add the same products in the same order; recomputed adds to dq in any."""
    told = {}
    for r in record("attention", "errors")["rows"]:
        if r["rung"].startswith("attention_backward/") and not r["rung"].endswith(("stored", "recomputed")):
            same = r["dtype"], tuple(r["shape"]), r["result"], r["against"]
            told.setdefault(same, set()).add((r["max_abs"], r["mean_abs"]))
    assert len(told) == 32 and all(len(found) == 1 for found in told.values())


def test_the_transformers_verdict_follows_from_its_losses():
    """Of today's rungs; the rule is written out once more, and sentences are counted again."""
    found = record("attention", "transformer")
    assert found["model"] == {"blocks": 6, "heads": 8, "width": 512, "vocabulary": 52239}
    assert [found["task"][k] for k in ("batch", "steps", "starts", "sentences", "longest")] == [64, 200, 8, 15, 12]
    runs, starts = found["runs"], 8
    assert sorted(runs) == ["hopper, hopper", "sdpa", "sdpa, again", "sdpa, math", "skip, skip", "triton, triton"]
    assert runs["sdpa, again"]["losses"] == runs["sdpa"]["losses"]
    rungs = {f"{p}/{s}" for p in LADDERS for s in ("triton", "skip", "hopper")}
    assert found["sources"] == {name: kl.source_digest(LADDERS[p], s) for name in rungs for p, s in [name.split("/")]}

    def parted(name):
        curves = [[abs(x - y) for x, y in zip(*pair, strict=True)]
                  for pair in zip(runs[name]["losses"], runs["sdpa"]["losses"], strict=True)]  # fmt: skip
        assert [len(curve) for curve in curves] == [200] * starts
        assert max(max(curve[:40]) for curve in curves) <= 0.002  # as the overview says
        each = [(max(curve[:40]), sum(curve) / 200) for curve in curves]  # start
        return [*(sum(found) / starts for found in zip(*each, strict=True)), max(map(max, curves))], each

    def alike(translations, others):
        pairs = [pair for each in zip(translations, others, strict=True) for pair in zip(*each, strict=True)]
        assert len(pairs) == 15 * starts
        return sum(a == b for a, b in pairs)

    (*most, _), maths = parted("sdpa, math")
    times = []
    for name, run in runs.items():
        assert all(losses[-1] < 0.05 for losses in run["losses"])
        (*apart, largest), each = parted(name)
        told = [run["parted_from_sdpa"][k] for k in ("first_fifth", "mean", "largest")]
        assert [*apart, largest] == pytest.approx(told)
        assert run["within_tolerance"] and all(x <= 2 * y for x, y in zip(apart, most, strict=True))
        assert run["as_sdpa_trained"] == alike(run["translations"], runs["sdpa"]["translations"])
        assert run["right"] == alike(run["translations"], [found["target"]] * starts)
        with_its_weights = alike(run["with_sdpas_weights"], runs["sdpa"]["translations"])
        assert run["as_sdpa_with_its_weights"] == with_its_weights == 15 * starts
        if not name.startswith("sdpa"):
            times += [(a / c, b / d) for (a, b), (c, d) in zip(each, maths, strict=True)]
    assert (len(times), sum(over > 1 for _, over in times)) == (24, 21)  # as the overview says
    assert sum(max(pair) > 2 for pair in times) == 7


def test_the_picture_of_the_losses_shows_the_record():
    found = record("attention", "transformer")
    plot = attention_picture.losses(found)
    assert len(plot.rows) == 4 * 200
    name, step, apart = plot.rows[450]
    runs, at = found["runs"], step - 1
    pairs = zip(runs[name]["losses"], runs["sdpa"]["losses"], strict=True)
    assert apart == pytest.approx(sum(abs(x[at] - y[at]) for x, y in pairs) / found["task"]["starts"])
    drawn = (Path(kl.__file__).parent.parent / "stages" / "attention_backward" / "losses.svg").read_text()
    lines = re.findall(r'attention: ([^"]*)"[^>]* d="M([^"]*)"', drawn)
    assert [name for name, _ in lines for _ in range(200)] == [name for name, _, _ in plot.rows]
    heights = [float(point.split(",")[1]) for _, line in lines for point in line.split("L")]
    assert statistics.correlation(heights, [math.log(apart) for *_, apart in plot.rows]) == pytest.approx(-1, abs=1e-8)
