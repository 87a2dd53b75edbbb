"""Every stage against the oracle, and both against golden logits of a real model."""

import json
import os
import shutil
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest

from common import gate, gpu, reference, synth
from common.gguf import GGUFError, read
from common.model import open_model
from common.stage import CPU, GPU, load_stage
from common.tokenizer import Tokenizer

CASES = Path(__file__).parent / "cases"
GOLDEN = json.loads((CASES / "smollm2-golden.json").read_text())
STORY = " girl named Emma who loved to play in the sun. She would often go to the beach and play with her friends. "
STORY += "One day, she decided to go to"
GOLDEN_NMSE = 1e-10  # each position by itself, of a stage that rounds nothing
EXACT = [name for name in CPU if gate.operands(name) == "float32"]  # whose text is the oracle's, near-ties included
QUANTS = ("q4_k_m", "q8_0", "f16")
IDS = [1, 17, 300, 17, 511, 0, 42, 42, 9]
NEW = 4


@pytest.fixture(scope="module")
def golden_logits():
    with np.load(CASES / "smollm2-golden.npz") as arrays:
        return {name: arrays[name] for name in GOLDEN}


@pytest.fixture(scope="module")
def spoken(smollm2):
    """spoken[stage][prompt]: logits at each position of the prompt and of the golden ids after it, in one forward."""
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        return dict(zip(CPU, pool.map(speak, CPU, [smollm2] * len(CPU)), strict=True))


@pytest.fixture(scope="module")
def told(smollm2):
    """told[prompt]: the oracle's logits for the golden ids."""
    gguf = open_model(smollm2)
    texts = {prompt: given["ids"] + given["greedy"][:-1] for prompt, given in GOLDEN.items()}
    return {prompt: reference.logits(gguf, ids, rows=len(GOLDEN[prompt]["greedy"])) for prompt, ids in texts.items()}


def speak(name, path):
    """Everything one stage says of the golden texts."""
    stage, gguf = load_stage(name), open_model(path)
    model = stage.load(gguf, 64, 1)
    return {
        prompt: stage.logits(model, stage.forward(model, given["ids"] + given["greedy"][:-1], 0))
        for prompt, given in GOLDEN.items()
    }


@pytest.mark.parametrize("name", CPU)
@pytest.mark.parametrize("prompt", GOLDEN)
def test_logits_of_the_real_model(spoken, golden_logits, name, prompt):
    want = golden_logits[prompt]
    got = spoken[name][prompt][: len(want)]
    assert got.dtype == np.float32
    if name in EXACT:
        assert max(map(reference.nmse, got, want)) <= GOLDEN_NMSE
    assert reference.nmse(got, want) <= gate.tolerance(name)
    assert max(map(reference.nmse, got, want)) <= gate.tolerance(name, 1)


@pytest.mark.parametrize("name", CPU)
@pytest.mark.parametrize("prompt", GOLDEN)
def test_ids_of_the_real_model(spoken, told, name, prompt):
    rows = spoken[name][prompt][len(GOLDEN[prompt]["ids"]) - 1 :]
    ids = [load_stage(name).argmax(row) for row in rows]
    if name in EXACT:
        assert ids == GOLDEN[prompt]["greedy"]
    assert gate.agreement(rows, ids, told[prompt], gate.tolerance(name)).passed


@pytest.mark.parametrize("name", EXACT)
def test_the_real_model_tells_its_story(spoken, smollm2, name):
    rows = spoken[name]["story"][len(GOLDEN["story"]["ids"]) - 1 :]
    assert Tokenizer.from_gguf(read(smollm2)).decode([int(row.argmax()) for row in rows]) == STORY


@pytest.mark.parametrize("prompt", GOLDEN)
def test_the_oracle_on_the_real_model(smollm2, golden_logits, prompt):
    ids, greedy = GOLDEN[prompt]["ids"], GOLDEN[prompt]["greedy"]
    rows = reference.compute(open_model(smollm2), ids + greedy[:-1]).logits
    assert rows.dtype == np.float64
    assert max(map(reference.nmse, rows[: len(ids)], golden_logits[prompt])) <= GOLDEN_NMSE
    told = rows[len(ids) - 1 :]
    assert told.argmax(axis=1).tolist() == greedy
    first, second = np.sort(told, axis=1)[:, :-3:-1].T
    assert np.allclose(first - second, GOLDEN[prompt]["margins"], atol=2e-4)
    likely = -gate.log_softmax(rows[: len(ids) - 1])[np.arange(len(ids) - 1), ids[1:]]
    assert likely.mean() == pytest.approx(GOLDEN[prompt]["mean_nll"], abs=1e-5)


@pytest.fixture(scope="module", params=[*CPU, *(pytest.param(name, marks=pytest.mark.gpu) for name in GPU)])
def stage(request):
    if request.param in GPU and gpu.missing():
        pytest.skip(gpu.missing())
    return load_stage(request.param)


def allowed(stage):
    return gate.tolerance(stage.__name__.rpartition(".")[2], 1)  # each position by itself


@pytest.fixture(scope="module", params=QUANTS)
def gguf(request, tiny_of):
    return open_model(tiny_of(request.param))


def test_logits_at_every_position(stage, gguf):
    want = reference.compute(gguf, IDS).logits
    model = stage.load(gguf, len(IDS), 1)
    got = stage.logits(model, stage.forward(model, IDS, 0))
    assert got.shape == want.shape == (len(IDS), gguf.config.V)
    assert max(map(reference.nmse, got, want)) <= allowed(stage)


@pytest.mark.parametrize("length", [1, 2, len(IDS)])
def test_generate(stage, gguf, length):
    """Its rows are the oracle's for the text so far, its ids those rows' largest, and there are n of them."""
    prompt = IDS[:length]
    model = stage.load(gguf, length + NEW, 1)
    ids, rows = zip(*stage.generate(model, prompt, NEW), strict=True)
    assert len(ids) == NEW
    assert list(ids) == [int(np.argmax(row)) for row in rows]
    want = reference.compute(gguf, [*prompt, *ids[:-1]], rows=NEW).logits
    assert gate.agreement(rows, ids, want, allowed(stage)).passed


def test_generate_goes_on_from_ids_it_is_given(stage, gguf):
    """A choose that returns given ids walks the stage's own decode path along a known text."""
    given, seen = iter(IDS[2:]), []

    def choose(row):
        seen.append(row.copy())
        return next(given)

    model = stage.load(gguf, len(IDS), 1)
    pairs = list(stage.generate(model, IDS[:2], len(IDS) - 2, choose))
    assert [i for i, _ in pairs] == IDS[2:]
    assert all(np.array_equal(row, kept) for (_, row), kept in zip(pairs, seen, strict=True))
    want = reference.compute(gguf, IDS[:-1], rows=len(pairs)).logits
    assert max(map(reference.nmse, [row for _, row in pairs], want)) <= allowed(stage)


def test_generate_twice_says_the_same(stage, gguf):
    model = stage.load(gguf, len(IDS) + NEW, 1)
    first = list(stage.generate(model, IDS, NEW))
    list(stage.generate(model, IDS[::-1], NEW))
    again = list(stage.generate(model, IDS, NEW))
    assert [i for i, _ in first] == [i for i, _ in again]
    assert all(np.array_equal(a, b) for (_, a), (_, b) in zip(first, again, strict=True))


def test_fewer_layers(stage, tiny):
    gguf = open_model(tiny, 1)
    model = stage.load(gguf, len(IDS), 1)
    want = reference.compute(gguf, IDS).logits
    assert reference.nmse(stage.logits(model, stage.forward(model, IDS, 0)), want) <= allowed(stage)
    assert reference.nmse(reference.compute(open_model(tiny), IDS).logits, want) > 1e-2


def test_the_oracle_keeps_answers_and_knows_when_they_are_old(tiny, monkeypatch, tmp_path):
    monkeypatch.setenv("LESSON_CACHE", str(tmp_path))
    gguf = open_model(tiny)
    first = reference.logits(gguf, IDS, rows=2)
    assert np.allclose(first, reference.compute(gguf, IDS).logits[-2:], rtol=1e-12)  # BLAS sums by shape
    (kept,) = (tmp_path / "reference").glob("*.npy")
    monkeypatch.setattr(reference, "compute", lambda *_: pytest.fail("computed again"))
    assert np.array_equal(reference.logits(gguf, IDS, rows=2), first)
    monkeypatch.undo()
    monkeypatch.setenv("LESSON_CACHE", str(tmp_path))
    kept.write_bytes(kept.read_bytes()[:100])  # as a full disk leaves it
    assert np.array_equal(reference.logits(gguf, IDS, rows=2), first)
    assert not np.array_equal(reference.logits(gguf, IDS[::-1], rows=2), first)
    assert not np.array_equal(reference.logits(open_model(tiny, 1), IDS, rows=2), first)
    monkeypatch.setattr(reference, "source_digest", lambda: "another source")
    reference.logits(gguf, IDS, rows=2)
    assert len(list((tmp_path / "reference").glob("*.npy"))) == 4


def test_the_oracle_keeps_answers_of_the_model_it_computed_from(tiny, monkeypatch, tmp_path):
    monkeypatch.setenv("LESSON_CACHE", str(tmp_path / "cache"))
    path = synth.synth("tiny", "q4_k_m", tmp_path / "a.gguf", seed=1)
    older = open_model(path)
    os.replace(shutil.copy(tiny, tmp_path / "b.gguf"), path)
    assert not np.array_equal(reference.logits(older, IDS), reference.logits(open_model(path), IDS))
    assert np.array_equal(reference.logits(open_model(path), IDS), reference.compute(open_model(tiny), IDS).logits)


def test_weights_that_give_no_finite_logits_are_the_files_fault(tiny, monkeypatch, tmp_path):
    monkeypatch.setenv("LESSON_CACHE", str(tmp_path))
    gguf = open_model(tiny)
    nowhere = gguf._replace(config=replace(gguf.config, rope_freqs=gguf.config.rope_freqs * np.nan))
    with pytest.raises(GGUFError, match="weights that give logits that are not finite"):
        reference.logits(nowhere, IDS)
    assert not list(tmp_path.rglob("*.npy"))


def test_the_oracle_without_a_cache(tiny, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("LESSON_CACHE", str(tmp_path / "file" / "cache"))
    gguf = open_model(tiny)
    assert np.array_equal(reference.logits(gguf, IDS), reference.compute(gguf, IDS).logits)


@pytest.mark.parametrize(
    ("got", "want", "error"), [([1, 2], [1, 2], 0), ([1, 3], [1, 2], 0.2), ([0, 0], [3, 4], 1), ([0, 0], [0, 0], 0)]
)
def test_nmse(got, want, error):
    assert reference.nmse(got, want) == pytest.approx(error)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nmse_of_what_is_not_finite_is_infinite(bad):
    with np.errstate(all="raise"):  # and says nothing of it
        assert reference.nmse([1, bad], [1, 2]) == np.inf
        assert reference.nmse([1, bad], [1, bad]) == np.inf
        assert reference.nmse([0, bad], [0, 0]) == reference.nmse([0, 1e-9], [0, 0]) == np.inf
