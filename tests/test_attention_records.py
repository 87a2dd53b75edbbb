"""The attention ladders' pictures are those of the code, and a record's verdicts follow from its numbers."""

import functools
import importlib
import json
from pathlib import Path

import pytest

from common import attention_picture
from common import kernel_ladder as kl

REPORTS = Path(kl.__file__).parent.parent / "reports" / "nvidia-h200"
LADDERS = {name: importlib.import_module(f"stages.{name}") for name in ("attention", "attention_backward")}
RUNGS = [(ladder, stage) for ladder, package in LADDERS.items() for stage in package.STAGES]


@functools.cache
def record(ladder: str, name: str = "ladder") -> dict:
    return json.loads((REPORTS / ladder / f"{name}.json").read_text())


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


def test_the_transformers_verdict_follows_from_its_losses():
    runs = record("attention", "transformer")["runs"]

    def apart(name):
        pairs = zip(runs[name]["losses"], runs["sdpa"]["losses"], strict=True)
        return [abs(x - y) for x, y in pairs]

    def first_and_mean(name):
        return max(apart(name)[:40]), sum(apart(name)) / 200

    for name, run in runs.items():
        assert run["losses"][-1] < 0.05
        assert first_and_mean(name) == pytest.approx([run["parted_from_sdpa"][k] for k in ("first_fifth", "mean")])
        most = [2 * x for x in first_and_mean("sdpa, math")]
        assert run["within_tolerance"] and all(x <= y for x, y in zip(first_and_mean(name), most, strict=True))
        assert run["as_sdpa_with_its_weights"] == 15
