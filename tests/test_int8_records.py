"""The int8 ladder's records measured the code that stands here and say what its chapters say."""

import json
import re
from pathlib import Path

import pytest

from common import chapters, figures
from common import kernel_ladder as kl
from stages import int8
from tests import int8_sanitized
from tests.helpers import ROOT

FOLDER = Path(int8.__file__).parent
GPU, CPU = (ROOT / "reports" / machine / "int8" for machine in ("nvidia-h200", "amd-epyc-znver4"))
PARTS = ["Idea", "Picture", "Arithmetic", "Predict", "Code", "Measured", "What it costs", "What lost, and why",
         "Three questions", "Sources"]  # fmt: skip
FEED, VOCABULARY = int8.MATRICES.values()


def record(folder: Path, name: str) -> dict:
    return json.loads((folder / f"{name}.json").read_text())


def us(stage: str, t: int, matrix, **of) -> float:
    """A layer's time in a graph."""
    return next(
        r["us"] for r in record(GPU, "graph")["rows"]
        if r["stage"] == stage and r.get("shape") == [t, *matrix] and of.items() <= r.items()
    )  # fmt: skip


def of(rows: list[dict], **wanted) -> dict:
    return next(row for row in rows if wanted.items() <= row.items())


@pytest.mark.parametrize(("folder", "device"), [(GPU, "gpu"), (CPU, "cpu")], ids=["gpu", "cpu"])
def test_a_record_measured_this_source(folder, device, monkeypatch):
    monkeypatch.setattr(int8, "DEVICE", device, raising=False)
    found = record(folder, "ladder")
    assert found["sources"] == {stage: kl.source_digest(int8, stage) for stage in int8.STAGES}
    stages = {stage for stage in int8.STAGES if device == "gpu" or stage != "tensor_core"}
    assert {(r["stage"], tuple(r["shape"])) for r in found["odd_shapes"] if r["right"]} == {
        (stage, shape) for stage in stages for shape in int8.ODD_SHAPES
    }
    timed = {(r["stage"], tuple(r["shape"])) for r in found["rows"] if r["right"] and "ms" in r}
    assert {(stage, shape) for stage in stages for shape in int8.SHAPES} <= timed
    assert all(r["ms"]["median"] >= found["launch_ms"] for r in found["rows"] if "ms" in r)


@pytest.mark.parametrize("matrix", [FEED, VOCABULARY], ids=["feed-forward", "vocabulary"])
def test_a_lone_token_is_faster_than_in_fp16(matrix):
    for other in ("fp16", "fp16 without b"):
        assert us("tensor_core", 1, matrix) < us(other, 1, matrix)
    assert us("tensor_core", 1, matrix) < us("bitsandbytes", 1, matrix, graph=True)


def test_tensor_cores_are_worth_what_the_chapter_says():
    for matrix in (FEED, VOCABULARY):
        assert us("outliers", 512, matrix) > 5 * us("tensor_core", 512, matrix)
    assert us("tensor_core", 512, VOCABULARY) < us("fp16", 512, VOCABULARY)
    assert us("tensor_core", 512, FEED) > us("fp16", 512, FEED)  # what lost


def test_memory_is_half_and_what_the_columns_add():
    found = record(GPU, "memory")["rows"]
    assert all(row["finite"] for row in found)
    for output in (True, False):
        ours, theirs, halves = (
            of(found, layers=kind, output_projection=output) for kind in ("tensor_core", "bitsandbytes", "fp16")
        )
        rounded = ours["weights"]
        assert halves["static_bytes"] - ours["static_bytes"] > 0.5 * rounded
        columns = ours["outliers"] / ours["channels"] * 2 * rounded
        assert ours["static_bytes"] - theirs["static_bytes"] < 1.2 * columns
        assert ours["peak_bytes"] < theirs["peak_bytes"] + 1.2 * columns
        assert (ours["peak_bytes"] < theirs["peak_bytes"]) is output


def test_loud_channels_cost_absmax_and_hardly_outliers():
    found = record(CPU, "quality")["planted"]
    assert found["float"]["kl"]["max"] < 1e-6  # the rescaling changes nothing
    absmax, outliers = (of(found["rows"], rung=rung) for rung in ("absmax", "outliers"))
    assert absmax["more_percent"] > 10 and absmax["more_percent"] > 20 * outliers["more_percent"]
    assert outliers["more_percent"] < 1  # half a percent was wanted
    theirs = of(record(CPU, "linear8bit")["planted"]["rows"], rung="bitsandbytes")
    assert outliers["kl"]["mean"] < theirs["kl"]["mean"] / 2
    ratios = of(record(CPU, "ratios")["planted"]["rows"], rung="outliers")
    assert ratios["kl"]["mean"] < outliers["kl"]["mean"] / 3  # what the rule missed beside loud channels
    there = found["found"]
    assert there["planted_found"] > 0.95 * there["planted"] and there["own_found"] < 0.1 * there["own"]


def test_outliers_bring_most_of_it_back():
    found = record(CPU, "quality")
    for output in (True, False):
        before, after = (of(found["rows"], rung=rung, output_projection=output) for rung in ("absmax", "outliers"))
        assert after["kl"]["mean"] < before["kl"]["mean"] / 3
        assert after["more_percent"] < before["more_percent"] / 3
        assert after["same_top1"] > before["same_top1"]
        assert len(after["outputs"]["texts"]) == 15
        theirs = of(record(CPU, "linear8bit")["rows"], rung="bitsandbytes", output_projection=output)
        assert after["kl"]["mean"] < theirs["kl"]["mean"]


def test_most_of_what_is_left_is_the_activations_of_ffn_down():
    found = record(CPU, "quality")
    weights, activations = (
        of(found["one_side_rounded"], only=side)["kl"]["mean"] for side in ("weights", "activations")
    )
    assert activations > 4 * weights
    alone = {row["kind"]: row["kl"]["mean"] for row in found["one_kind_rounded"]}
    assert max(alone, key=alone.get) == "ffn_down"
    rows = {row["kind"]: row for row in record(CPU, "loudest")["rows"]}
    for what in ("channels", "crest"):
        down = rows["ffn_down"][what]
        assert all(down > 1.8 * row[what] for kind, row in rows.items() if kind != "ffn_down")
    without = of(found["layer_sets"], layer_set="without ffn_down and output")
    assert abs(without["more_percent"]) <= 0.1


def test_the_outliers_are_those_of_the_rule():
    found = record(CPU, "quality")
    kept, channels = (sum(kind[what] for kind in found["layer_set"]) for what in ("outliers", "channels"))
    assert 0.01 < kept / channels < 0.02  # what fell short of one in a hundred
    assert found["sigmas"] == 3


@pytest.mark.parametrize("stage", int8.STAGES)
def test_a_chapter_has_its_parts_and_quotes_the_records(stage):
    path = FOLDER / f"{stage}.md"
    text = path.read_text()
    assert re.findall(r"^## (.*)$", text, re.M) == PARTS
    assert text.count("<details>") == 3
    assert len(figures.FIGURE.findall(text)) >= 5
    assert chapters.filled(text, path) == text


def test_the_overview_quotes_the_records():
    path = FOLDER / "README.md"
    text = path.read_text()
    assert len(figures.FIGURE.findall(text)) > 50
    assert chapters.filled(text, path) == text


def test_pictures_are_those_of_the_code():
    from stages.int8 import _pictures

    for path, drawn in _pictures.drawn().items():
        assert path.read_text() == drawn, path.name


def test_a_translator_says_the_same():
    found = record(CPU, "translate")
    assert found["right"] >= 8  # an untrained one has nothing to lose
    for output in (True, False):
        row, halves, theirs = (
            of(found["rows"], layers=kind, output_projection=output) for kind in ("int8", "fp16", "bitsandbytes")
        )
        assert row["words_alike"] >= 0.95 * row["words"] and row["same"] >= 13
        assert halves["kl"] < row["kl"] < theirs["kl"]
        assert row["bytes"] < 0.6 * halves["bytes"]
    parted = [row["perplexity"] / found["perplexity"] - 1 for row in found["rows"]]
    assert max(map(abs, parted)) == -min(parted) < 0.001  # as the overview says


@pytest.mark.parametrize("folder", [CPU, GPU], ids=["cpu", "gpu"])
def test_a_rounded_translator_puts_the_same_word_first(folder):
    """Given the right words before, as the overview says of both tables."""
    rows = [row for row in record(folder, "translate")["rows"] if "error" not in row]
    assert len(rows) >= 5 and all(row["same_top1"] == 1 for row in rows)


def test_on_a_gpu_a_translator_says_what_fp16_says_where_the_baseline_stops():
    found = record(GPU, "translate")
    assert found["rung"] == "tensor_core" and found["right"] >= 8
    rows = found["rows"]
    for output in (True, False):
        row, halves = (of(rows, layers=kind, output_projection=output) for kind in ("int8", "fp16"))
        assert row["translations"] == halves["translations"]  # what parts from the model parts in FP16
        assert (row["same"], row["words_alike"]) == (row["of"] - 1, row["words"] - 1)
        assert halves["kl"] < row["kl"] < 1e-4
        assert row["bytes"] < 0.6 * halves["bytes"]
    theirs = of(rows, layers="bitsandbytes", output_projection=True)
    assert theirs["error"].startswith("cublasLt") and "translations" not in theirs
    assert of(rows, layers="bitsandbytes", output_projection=False)["translations"] == found["translations"]


def test_the_layer_that_was_left_out_stops_above_64_tokens_where_its_outputs_are_no_multiple_of_4():
    found = record(GPU, "left_out")
    asked = {(v, t, threshold) for v in (52236, 52239, 52240) for t in (1, 7, 8, 64, 65, 128, 256, 511, 512)
             for threshold in (0.0, 6.0)}  # fmt: skip
    assert {(row["V"], row["tokens"], row["threshold"]) for row in found["rows"]} == asked
    for row in found["rows"]:
        assert ("error" in row) == (row["V"] % 4 > 0 and row["tokens"] > 64), row
        if "error" in row:
            assert "cublasLt ran into an error!" in row["error"] and "failed with status 15" in row["printed"]
        else:
            assert row["nmse"] < 1e-3
    text, machine = (FOLDER / "README.md").read_text(), found["machine"]
    versions = f"bitsandbytes {machine['bitsandbytes']} (torch {machine['torch'][:4]}, CUDA {machine['cuda_of_torch']})"
    assert versions in text.replace("\n", " ")


def test_the_sanitizer_watched_this_source_and_found_what_was_planted_and_nothing_else(monkeypatch):
    monkeypatch.setattr(int8, "DEVICE", "gpu", raising=False)
    found = record(GPU, "sanitizer")
    assert found["sources"] == {rung: kl.source_digest(int8, rung) for rung in int8_sanitized.RUNGS}
    runs = {(run["tool"], run["run"]): run for run in found["runs"]}
    for tool, planted, first in (("memcheck", "planted", "Invalid __global__"), ("racecheck", "race", "Error: Race")):
        clean, caught = runs.pop((tool, "clean")), runs.pop((tool, planted))
        assert (clean["exit"], clean["first"]) == (0, None)
        assert re.search(r"SUMMARY: 0 (errors|hazards)", clean["summary"])
        assert caught["exit"] and caught["first"].startswith(first)
    for tool in ("initcheck", "synccheck"):
        assert runs.pop((tool, "clean")) == {"tool": tool, "run": "clean", "exit": 0, "first": None,
                                             "summary": "ERROR SUMMARY: 0 errors"}  # fmt: skip
    (theirs,) = runs.values()
    assert "cupy_" in theirs["first"] and "(0 errors" in theirs["summary"]  # a warning, and not of ours
