"""Sampling against its definitions, each filter by itself, in its order, and as draws."""

import json
from collections import Counter

import numpy as np
import pytest

from common import gate, harness
from common.job import prepare
from common.model import open_model
from common.run import WrongError, check
from common.sampling import GREEDY, Sampler, SamplingError, candidates, draw, sampler
from common.stage import load_stage
from tests.helpers import copy_of, lesson, one_sentence

DRAWS = 20_000


@pytest.fixture
def row():
    return np.random.default_rng(3).normal(0, 3, 1000).astype(np.float32)


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def kept(row, **settings):
    return candidates(row, Sampler(**{"temperature": 1.0, "seed": 0, **settings}))


# ---- each filter by its definition -----------------------------------------------------------------------------


def test_no_filter_keeps_the_models_own_distribution(row):
    ids, chances = kept(row)
    assert sorted(ids) == list(range(1000))
    assert np.allclose(chances, softmax(row.astype(np.float64))[ids], rtol=1e-12)


@pytest.mark.parametrize("k", [1, 7, 1000, 5000])
def test_top_k_keeps_the_k_largest(row, k):
    ids, chances = kept(row, top_k=k)
    assert set(ids) == set(np.argsort(row)[::-1][:k])
    p = softmax(row.astype(np.float64))[ids]
    assert np.allclose(chances, p / p.sum(), rtol=1e-12)


@pytest.mark.parametrize("p", [1e-9, 0.3, 0.9, 0.999])
def test_top_p_is_the_smallest_set_that_reaches_p(row, p):
    ids, _ = kept(row, top_p=p)
    chances = np.sort(softmax(row.astype(np.float64)))[::-1]
    assert chances[: len(ids)].sum() >= p, "too few"
    assert chances[: len(ids) - 1].sum() < p, "one more than needed"
    assert set(ids) == set(np.argsort(row)[::-1][: len(ids)])


@pytest.mark.parametrize("share", [1e-6, 0.02, 0.5, 1.0])
def test_min_p_is_a_share_of_the_likeliest(row, share):
    ids, _ = kept(row, min_p=share)
    p = softmax(row.astype(np.float64))
    assert set(ids) == set(np.flatnonzero(p >= share * p.max()))


@pytest.mark.parametrize("temperature", [0.1, 1.0, 7.0])
def test_temperature_divides_the_logits(row, temperature):
    ids, chances = kept(row, temperature=temperature)
    assert np.allclose(chances, softmax(row.astype(np.float64) / temperature)[ids], rtol=1e-9)


def test_the_filters_see_the_model_and_not_the_temperature(row):
    for settings in ({"top_p": 0.7}, {"min_p": 0.1}):
        cold, hot = kept(row, temperature=0.2, **settings)[0], kept(row, temperature=5.0, **settings)[0]
        assert np.array_equal(cold, hot), "a temperature before the filters lets tokens back in"


def test_top_k_comes_before_top_p():
    """Of 0.4, 0.3, 0.2, 0.1: top-k 2 leaves 4/7 and 3/7, and the first alone is half of that; of all it is not."""
    row = np.log([0.1, 0.4, 0.2, 0.3])
    assert list(kept(row, top_k=2, top_p=0.5)[0]) == [1]
    assert list(kept(row, top_p=0.5)[0]) == [1, 3]


def test_ties_go_to_the_lower_id():
    row = np.tile([0.0, 1.0], 500)
    assert list(kept(row, top_k=600)[0]) == [*range(1, 1000, 2), *range(0, 200, 2)]


def test_one_token_is_always_left():
    for settings in ({"top_k": 1}, {"top_p": 1e-300}, {"min_p": 1.0}):
        assert list(kept(np.array([1.0, 9.0, 3.0]), **settings)[0]) == [1]


def test_large_logits_do_not_overflow():
    assert kept(np.array([1e30, -1e30, 0.0]))[1].tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_logit_that_is_not_finite_is_refused(bad):
    with pytest.raises(FloatingPointError):
        kept(np.array([1.0, bad]))


# ---- draws -----------------------------------------------------------------------------------------------------


def test_draws_follow_the_probabilities():
    row, settings = np.log([0.5, 0.3, 0.15, 0.05]), Sampler(0.7, seed=1)
    ids, chances = candidates(row, settings)
    choose = settings.chooser()
    counts = Counter(choose(row) for _ in range(DRAWS))
    for i, p in zip(ids, chances, strict=True):
        assert abs(counts[i] / DRAWS - p) < 5 * np.sqrt(p * (1 - p) / DRAWS)


def test_a_seed_gives_the_same_draws_again_and_another_seed_others(row):
    def taken(seed):
        choose = Sampler(1.0, seed=seed).chooser()
        return [choose(row) for _ in range(30)]

    assert taken(5) == taken(5)
    assert taken(5) != taken(6)


def test_a_draw_at_the_very_end_is_still_a_token():
    class Last:
        def random(self):
            return np.nextafter(1.0, 0)

    assert draw(np.zeros(3), Sampler(1.0, seed=0), Last()) == 2


# ---- flags -----------------------------------------------------------------------------------------------------


def test_greedy_is_the_default_and_wins_at_temperature_0():
    assert sampler() is GREEDY
    assert sampler(seed=3) is GREEDY
    assert sampler(temperature=0, top_k=5, seed=3) is GREEDY
    assert GREEDY.chooser() is None


def test_a_filter_alone_means_temperature_1_and_a_seed_is_drawn():
    found = sampler(top_k=5)
    assert found.temperature == 1.0
    assert isinstance(found.seed, int)
    assert sampler(top_k=5).seed != found.seed


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", float("nan")),
        ("min_p", -0.1),
        ("min_p", 2.0),
        ("seed", -1),
    ],
)
def test_a_bad_value_is_refused_by_its_flag(flag, value):
    with pytest.raises(SamplingError, match=f"--{flag.replace('_', '-')} {value}"):
        sampler(**{flag: value})


def test_a_bad_flag_on_the_command_line(tiny):
    done = lesson("run", "naive", "-m", tiny, "--ids", "1", "--top-p", "1.5")
    assert "--top-p 1.5" in one_sentence(done)
    assert done.returncode == 2


def test_a_cold_run_draws_nothing_and_says_so(tiny):
    done = lesson("run", "naive", "-m", tiny, "--ids", "1", "--cold", "--top-k", "5")
    assert "draws no token" in one_sentence(done)
    assert done.returncode == 2


# ---- a sampled run ---------------------------------------------------------------------------------------------

HOT = Sampler(3.0, top_k=100, seed=11)


def sampled(tiny, tmp_path, stage, **changes):
    """A run of six sampled tokens, in this process, and what the gate says of it."""
    job = prepare(str(tiny), ids="1,17,300", n=6, context=32, sampler=HOT)
    rows = str(tmp_path / "rows.npy")
    sample = harness.measure(job.request(stage, rows_file=rows, **changes))
    return job, sample, check(stage, job, sample, rows)


def test_a_sampled_run_is_the_stages_own_generation_and_passes_the_gate(tiny, tmp_path):
    _, sample, agreed = sampled(tiny, tmp_path, "kv_cache")
    assert agreed.passed
    stage = load_stage("kv_cache")
    model = stage.load(open_model(tiny), 32, 1)
    own = [i for i, _ in stage.generate(model, [1, 17, 300], 6, HOT.chooser())]
    assert sample.output_ids == own, "the warm-up must not use up draws"
    greedy = [i for i, _ in stage.generate(model, [1, 17, 300], 6)]
    assert sample.output_ids != greedy


def test_a_stage_that_ignores_choose_is_caught(tiny, tmp_path):
    path = copy_of("kv_cache", tmp_path, ("[choose(row)]", "[argmax(row)]"))
    with pytest.raises(WrongError, match="not the ones that"):
        sampled(tiny, tmp_path, str(path))


def test_wrong_logits_are_caught_on_sampled_text_too(tiny, tmp_path):
    path = copy_of("kv_cache", tmp_path, ("start, new = start + len(new)", "start, new = start + len(new) - 1"))
    with pytest.raises(WrongError, match="logits NMSE"):
        sampled(tiny, tmp_path, str(path))


def test_the_record_names_the_sampler(tiny, tmp_path):
    words = ("-m", tiny, "--ids", "1,17,300", "-n", 3, "--context", 32, "--json", "--save", tmp_path)
    flags = ("--temperature", "3", "--top-k", "100", "--seed", "11")
    found = [json.loads(lesson("run", "kv_cache", *words, *more).stdout) for more in ((), flags, flags)]
    assert found[0]["sampler"] == GREEDY._asdict()
    assert found[1]["sampler"] == HOT._asdict()
    assert found[1]["output_ids"] == found[2]["output_ids"] != found[0]["output_ids"]
    assert gate.TOLERANCE["float32"] >= found[1]["agreement"]["nmse"]
