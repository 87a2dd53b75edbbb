"""Quality figures: against what is known of them, through the stages' own paths, and how sure they claim to be."""

import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from common import harness, machine, quality, reference, roofline, show
from common.harness import Request, RunError
from common.job import UsageError, prepare
from common.model import open_model
from tests.helpers import ROOT, copy_of

CASES = Path(__file__).parent / "cases"
GOLDEN = json.loads((CASES / "smollm2-golden.json").read_text())
DATA = ROOT / "common" / "data"
TILING, KV_CACHE = (str(ROOT / "stages" / f"{name}.py") for name in ("tiling", "kv_cache"))
FORGETFUL = """
def generate(model, ids, n, choose=argmax):
    start, new = 0, list(ids)
    for _ in range(n):
        row = logits(model, forward(model, new, start)[-1:])[0]
        start, new = start + 1, [choose(row)]
        yield new[0], row
"""  # places every new token a prompt too early
WRONG_SCALE = ("1 / math.sqrt(hd)", "1 / math.sqrt(hd + 1)")


@pytest.fixture(scope="module")
def windows():
    return [np.random.default_rng(seed).integers(512, size=size).tolist() for seed, size in ((1, 24), (2, 24), (3, 9))]


@pytest.fixture(scope="module")
def wanted(tiny, windows, tmp_path_factory):
    """Files of the oracle's logits before each token of a window but its first."""
    gguf, folder = open_model(tiny), tmp_path_factory.mktemp("oracle")
    return [keep(reference.compute(gguf, ids[:-1]).logits, folder / f"{i}.npy") for i, ids in enumerate(windows)]


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    folder = tmp_path_factory.mktemp("golden")
    with np.load(CASES / "smollm2-golden.npz") as rows:
        return {name: keep(rows[name][:-1], folder / f"{name}.npy") for name in GOLDEN}


def keep(rows, path):
    np.save(path, rows.astype(np.float32))
    return str(path)


def built_on(stage, folder, code):
    """A stage file that takes everything from another, compiled kernels too, but what code defines."""
    path = folder / "mine.py"
    path.write_text(f"from stages.{stage} import *\n\n{code}\n")
    return str(path)


def scored(stage, model, windows, wanted, **changes):
    request = Request(str(stage), str(model), [1], 1, **changes)
    found = quality.score_windows(request, windows, wanted, lambda i, ms: None)
    return {name: np.array(part) for name, part in found.items()}


# ---- the figures ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", GOLDEN)
def test_perplexity_is_that_of_the_golden_text(golden, prompt):
    values = quality.nll(np.load(golden[prompt]), GOLDEN[prompt]["ids"][1:])
    assert quality.perplexity(values) == pytest.approx(np.exp(GOLDEN[prompt]["mean_nll"]), rel=2e-6)


def test_a_stage_scores_the_golden_texts_by_prefill_and_decode(golden, smollm2):
    texts = [given["ids"] for given in GOLDEN.values()]
    found = scored(KV_CACHE, smollm2, texts, list(golden.values()))
    ends = np.cumsum([len(ids) - 1 for ids in texts])
    for values, given in zip(np.split(found["nll"], ends), GOLDEN.values(), strict=False):
        assert values.mean() == pytest.approx(given["mean_nll"], abs=1e-5)
    assert found["decode"].sum() == sum(len(ids) - len(ids) // 2 - 1 for ids in texts)
    assert found["kl"].max() < 1e-8
    assert found["same"].all()


def test_the_oracle_does_not_diverge_from_itself(wanted, windows):
    rows = np.load(wanted[0])
    found = quality.score(rows, rows, windows[0][1:])
    assert np.all(found.kl == 0)
    assert np.all(found.same == 1)


def test_figures_by_hand():
    want = np.log([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]])
    rows = np.log([[0.125, 0.75, 0.125], [0.1, 0.8, 0.1]]) + 7  # a constant on a row's logits changes nothing
    found = quality.score(rows, want, [0, 1])
    assert found.kl == pytest.approx([0.5 * np.log(4) - 0.25 * np.log(3) + 0.25 * np.log(2), 0], abs=1e-12)
    assert found.nll == pytest.approx([np.log(8), -np.log(0.8)])
    assert found.same.tolist() == [0, 1]
    statistics = {name: statistic for name, (_, statistic) in quality.FIGURES.items()}
    values = np.arange(101.0)
    assert statistics["perplexity"](np.log([2.0, 8.0]), axis=-1) == pytest.approx(4)
    assert (statistics["kl_p99"](values, axis=-1), statistics["kl_max"](values, axis=-1)) == (99, 100)


@pytest.mark.parametrize("rows", [1, 7, 10_000])
def test_rows_at_a_time_change_nothing(wanted, windows, monkeypatch, rows):
    want, told = np.load(wanted[0]), np.load(wanted[1])
    usual = quality.score(told, want, windows[0][1:])
    monkeypatch.setattr(quality, "ROWS", rows)
    for a, b in zip(usual, quality.score(told, want, windows[0][1:]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)


# ---- a stage's own path --------------------------------------------------------------------------------------


def test_windows_are_scored_each_by_itself(tiny, windows, wanted):
    together = scored(KV_CACHE, tiny, windows, wanted)
    alone = [scored(KV_CACHE, tiny, [w], [f]) for w, f in zip(windows, wanted, strict=True)]
    for part in together:
        assert together[part].tolist() == np.concatenate([a[part] for a in alone]).tolist()


def test_a_cacheless_stage_takes_one_pass_and_a_cached_one_decodes(tiny, windows, wanted):
    one_pass, cached = scored(TILING, tiny, windows, wanted), scored(KV_CACHE, tiny, windows, wanted)
    assert one_pass["decode"].sum() == 0
    assert cached["decode"].sum() == 11 + 11 + 4
    np.testing.assert_allclose(one_pass["nll"], cached["nll"], rtol=1e-5)
    assert max(one_pass["kl"].max(), cached["kl"].max()) < 1e-8


def test_a_wrong_scale_shows_as_divergence(tiny, windows, wanted, tmp_path):
    right = scored(TILING, tiny, windows, wanted)
    wrong = scored(copy_of("tiling", tmp_path, WRONG_SCALE), tiny, windows, wanted)
    assert wrong["kl"].mean() > 1000 * right["kl"].mean()
    found = quality.paired_difference(wrong["kl"], right["kl"], np.mean)
    assert found.low > 0


def test_a_fault_in_decoding_alone_shows_in_its_share(tiny, windows, wanted, tmp_path):
    found = scored(built_on("kv_cache", tmp_path, FORGETFUL), tiny, windows, wanted)
    row = quality.row("mine", found, found["nll"])
    assert row["by_path"]["decode"]["kl_mean"] > 1000 * row["by_path"]["prefill"]["kl_mean"]
    assert row["path"] == "prefill and decode"


def test_a_budget_ends_a_stage_after_a_window(tiny, windows, wanted):
    assert len(scored(TILING, tiny, windows, wanted, budget_s=1e-9)["nll"]) == len(windows[0]) - 1


def test_logits_that_are_no_numbers_are_an_error(tiny, windows, wanted, tmp_path):
    path = built_on(
        "tiling", tmp_path, "def logits(model, hidden):\n    return np.nan * matmul(hidden, model.weights.output)"
    )
    request = Request(path, str(tiny), [1], 1)
    with pytest.raises(RunError, match="window 0 are not all finite") as error:
        harness.talk("score", request, windows=windows, wanted=wanted)
    assert error.value.exit_code == 5


# ---- how sure ------------------------------------------------------------------------------------------------


def correlated(draw, trials, size):
    """Series whose neighbours correlate by 0.6, of mean 0."""
    noise = draw.normal(size=(trials, size + 50))
    for i in range(1, size + 50):
        noise[:, i] += 0.6 * noise[:, i - 1]
    return noise[:, 50:]


@pytest.mark.parametrize(("block", "least", "most"), [(quality.BLOCK, 0.88, 0.99), (1, 0.5, 0.8)])
def test_intervals_cover_what_they_claim_in_blocks_only(block, least, most):
    series = correlated(np.random.default_rng(0), 200, 600)
    found = [quality.bootstrap(values, np.mean, block=block, resamples=300) for values in series]
    assert least <= np.mean([low <= 0 <= high for low, high in found]) <= most


def test_an_interval_is_the_same_each_time_and_holds_its_figure():
    values = correlated(np.random.default_rng(1), 1, 500)[0]
    first = quality.bootstrap(values, quality.p99)
    assert first == quality.bootstrap(values, quality.p99)
    assert first != quality.bootstrap(values, quality.p99, seed=1)
    assert first.low < quality.p99(values, axis=-1) < first.high
    assert quality.bootstrap(np.ones(40), np.mean) == (1, 1)
    narrow = quality.bootstrap(values, np.mean, confidence=0.5)
    wide = quality.bootstrap(values, np.mean)
    assert wide.low < narrow.low < narrow.high < wide.high


def test_every_position_is_drawn_as_often():
    counts = np.bincount(np.concatenate([at.ravel() for at in quality.draws(100, 7, 2000, 0)]), minlength=100)
    assert counts.sum() == 2000 * 100
    assert np.abs(counts / 2000 - 1).max() < 0.15


def test_pairs_see_what_two_intervals_cannot():
    draw = np.random.default_rng(2)
    b = np.abs(correlated(draw, 1, 500)[0]) * 10
    a = b + 0.1 + 0.1 * draw.normal(size=500)
    found = quality.paired_difference(a, b, np.mean)
    assert found.low < found.value < found.upper < found.high
    assert 0.05 < found.low < 0.1 < found.high < 0.15
    assert quality.bootstrap(a, np.mean).low < quality.bootstrap(b, np.mean).high
    with pytest.raises(ValueError, match="500 positions and 499"):
        quality.paired_difference(a, b[1:], np.mean)


# ---- the text and the command --------------------------------------------------------------------------------


def test_the_bundled_text_is_the_one_its_notice_names(smollm2):
    notice, text = (DATA / "NOTICE").read_text(), quality.TEXT.read_bytes()
    assert quality.TEXT.name in notice
    assert re.search("SHA-256 ([0-9a-f]{64})", notice)[1] == hashlib.sha256(text).hexdigest()
    job = prepare(str(smollm2))
    told, windows = quality.cut(job, None, quality.TOKENS)
    assert told.tokens > 2000
    assert sum(map(len, windows)) == quality.TOKENS
    assert sum(windows, []) == job.tokenizer.encode(text.decode())[: quality.TOKENS]
    assert max(map(len, windows)) == quality.WINDOW
    assert sum(map(len, quality.cut(job, None, 300)[1])) == 300


def test_random_weights_are_refused(tiny):
    with pytest.raises(UsageError, match="random weights.*choose a trained one"):
        quality.quality(["naive"], prepare(str(tiny)))


@pytest.fixture
def job(tiny):
    """The tiny model under a name that says nothing of its weights."""
    made = prepare(str(tiny), prompt="a")
    return replace(made, gguf=made.gguf._replace(config=replace(made.gguf.config, name="tiny")))


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "No such file"), (b"\xff", "not UTF-8 at byte 0"), (b"a few", "text.txt has [0-9]+ tokens: at least 32")],
)
def test_texts_that_cannot_be_scored(job, tmp_path, content, said):
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=said):
        quality.cut(job, str(path), quality.TOKENS)


def test_too_few_tokens_are_a_usage_error(job):
    with pytest.raises(UsageError, match="--tokens 5: at least 32"):
        quality.cut(job, None, 5)


def test_every_window_begins_with_bos_where_the_model_wants_it(job, monkeypatch):
    monkeypatch.setattr(job.tokenizer, "add_bos", True)
    monkeypatch.setattr(job.tokenizer, "bos", 3)
    _, windows = quality.cut(job, None, 600)
    assert {w[0] for w in windows} == {3}
    assert max(map(len, windows)) == quality.WINDOW
    assert sum((w[1:] for w in windows), []) == job.tokenizer.encode(quality.TEXT.read_text(), bos=False)[:600]


def test_the_document_and_its_table(job, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(machine, "measure", lambda walks: machine.identify())
    monkeypatch.setattr(quality, "window_s", lambda *of: 2.0)
    monkeypatch.setattr(roofline, "peak", lambda *of: 100.0)
    monkeypatch.setattr(quality, "WINDOW", 40)
    louder = "def logits(model, hidden):\n    return matmul(1.01 * hidden, model.weights.output)"
    document = quality.quality(
        [TILING, KV_CACHE, built_on("tiling", tmp_path, louder)], job, tokens=80, save=str(tmp_path)
    )
    assert "83 tokens, about" in capsys.readouterr().err
    tiling, kv_cache, louder = document["stages"]
    assert document["positions"] == 80  # windows begin with BOS, so every token of the text is one
    assert document["stop_reason"] == "length"
    assert kv_cache["perplexity"] == pytest.approx(document["reference"]["perplexity"], rel=1e-5)
    assert kv_cache["kl"]["mean"] < 1e-8 < louder["kl"]["mean"] <= louder["kl"]["p99"] <= louder["kl"]["max"]
    assert tiling["by_path"].keys() == {"prefill"}
    assert kv_cache["by_path"]["decode"]["positions"] == 39
    assert document["pairs"][1]["kl_mean"]["low"] > 0
    (record,) = (tmp_path / machine.identify().slug / "quality").glob("*.json")
    kept = json.loads(record.read_text())
    assert kept == json.loads(json.dumps(document))
    page = show.Page(width=80, markup=False)
    with page.capture() as shown:
        for piece in quality.render(kept):
            page.print(piece)
    assert f"{louder['kl']['mean']:.1e}" in shown.get()
    assert "decode 39 positions" in shown.get()


def test_stages_are_compared_on_what_the_slowest_had_the_time_for(job, monkeypatch):
    _, windows = quality.cut(job, None, 600)
    asked = []

    def talk(what, request, on_token, windows, wanted):
        asked.append(len(windows))
        for i in range(2 if request.stage == "slow" else len(windows)):
            on_token(i, 1.0)
        P = sum(len(w) - 1 for w in windows[: i + 1])
        return {"scores": {part: [0.0] * P for part in ("nll", "kl", "same", "decode")}}

    monkeypatch.setattr(harness, "talk", talk)
    scored, oracle = quality.score_stages(["quick", "slow", "quick"], job, windows)
    assert asked == [3, 3, 2]
    assert len(oracle) == 2 * (quality.WINDOW - 1)
    assert {(s["windows"], len(s["kl"])) for s in scored} == {(2, len(oracle))}


@pytest.mark.parametrize(
    ("interval", "said"),
    [((2.12e-11, 3.18e-11), "2.1–3.2e-11"), ((0.0, 0.0), "0"), ((4e-3, 2e-2), "0.4–2.0e-02")],
)
def test_intervals_in_words(interval, said):
    assert quality.power(interval) == said
