"""Verdicts from planted samples: no clock is read here."""

import math
import random

import numpy as np
import pytest
from scipy import stats as scipy_stats

from common import stats

QUIET = [1.0, 1.002, 0.998, 1.001, 0.999, 1.0]
TRIALS = 100


def slowed(samples, factor):
    return [factor * x for x in samples]


def noisy(seed, mean=1.0, spread=0.02, n=6):
    draw = random.Random(seed)
    return [mean * math.exp(draw.gauss(0, spread)) for _ in range(n)]


def test_faster_and_slower():
    shuffled = QUIET[3:] + QUIET[:3]
    assert stats.verdict(slowed(shuffled, 2), QUIET).verdict == "faster"
    assert stats.verdict(QUIET, slowed(shuffled, 2)).verdict == "slower"


def test_ratio_is_the_first_over_the_second():
    found = stats.verdict(slowed(QUIET, 2), QUIET)
    assert found.ratio == pytest.approx(2)
    assert found.pairs == 6


def test_no_change_where_nothing_changed():
    assert stats.verdict(QUIET, QUIET[::-1]).verdict == "no measurable change"
    same = stats.verdict(QUIET, QUIET)
    assert same.verdict == "no measurable change"
    assert same.ratio == 1


@pytest.mark.parametrize("n", [1, 2])
def test_too_few_pairs_have_a_ratio_and_no_interval(n):
    found = stats.verdict([2.0] * n, [1.0] * n)
    assert found == stats.Verdict(pytest.approx(2), None, None, None, "too few runs", n)


def test_three_pairs_are_enough():
    assert stats.verdict(slowed(QUIET[:3], 2), QUIET[1:4]).verdict == "faster"


@pytest.mark.parametrize("seed", range(5))
def test_the_interval_is_the_paired_t_test_on_logs(seed):
    a, b = noisy(seed, 1.2, 0.1), noisy(seed + 50, 1.0, 0.1)
    found = stats.verdict(a, b)
    test = scipy_stats.ttest_rel(np.log(a), np.log(b))
    interval = test.confidence_interval(0.99)
    assert math.log(found.low) == pytest.approx(interval.low)
    assert math.log(found.high) == pytest.approx(interval.high)
    assert math.log(found.ratio) == pytest.approx(np.mean(np.log(a) - np.log(b)))
    beyond = abs(math.log(found.ratio)) >= math.log(1.03)
    assert (found.verdict != "no measurable change") == (test.pvalue < 0.01 and beyond)


def test_pairs_matter():
    """A machine that drifts by a half hits both of a pair alike, and the change of 10 % is still seen."""
    drift = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5]
    wobble = [1.0, 1.004, 0.996, 1.002, 0.998, 1.0]
    b = [1.1 * d * w for d, w in zip(drift, wobble, strict=True)]
    assert stats.verdict(drift, b).verdict == "slower"
    with pytest.raises(ValueError, match="argument"):
        stats.verdict(drift, b[:-1])


@pytest.mark.parametrize(("factor", "word"), [(1.029, "no measurable change"), (1.031, "slower")])
def test_less_than_three_percent_is_no_change_however_sure(factor, word):
    tiny = [1 + 1e-6 * i for i in range(6)]
    assert stats.verdict(tiny, slowed(tiny, factor)).verdict == word
    faster = stats.verdict(slowed(tiny, factor), tiny).verdict
    assert faster == word.replace("slower", "faster")


def test_smallest_is_what_the_interval_leaves_and_three_percent_at_least():
    assert stats.verdict(QUIET, slowed(QUIET, 2)).smallest == pytest.approx(stats.EFFECT)
    wide = stats.verdict([1, 2, 1, 2, 1, 2], [1.5] * 6)
    assert wide.verdict == "no measurable change"
    assert wide.smallest == pytest.approx(wide.high / wide.ratio - 1)
    assert wide.smallest > 0.5


def test_ten_percent_is_found_in_two_percent_of_noise():
    found = [stats.verdict(noisy(2 * s), noisy(2 * s + 1, 1.1)).verdict for s in range(TRIALS)]
    assert found.count("slower") >= 95
    assert found.count("faster") == 0


def test_equal_samples_are_hardly_ever_called_a_change():
    found = [stats.verdict(noisy(2 * s), noisy(2 * s + 1)).verdict for s in range(TRIALS)]
    assert found.count("no measurable change") >= 97


def test_a_wild_sample_makes_it_unsure_rather_than_wrong():
    disturbed = [*slowed(QUIET[:5], 1.1), 9.0]
    assert stats.verdict(QUIET, disturbed).verdict == "no measurable change"


@pytest.mark.parametrize("freedom", [1, 2, 5, 9, 100])
def test_t_quantile(freedom):
    assert stats.t_quantile(freedom) == pytest.approx(scipy_stats.t.ppf(0.995, freedom))


def test_summary():
    assert stats.summary([3.0, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "stdev": 1.0, "samples": [3.0, 1.0, 2.0]}
    assert stats.summary([4.0]) == {"median": 4.0, "min": 4.0, "stdev": None, "samples": [4.0]}


def test_percentiles():
    samples = [float(i) for i in range(101)]
    assert stats.percentiles(samples) == {"p50": 50.0, "p90": 90.0, "p99": 99.0}
    assert stats.percentiles([7.0]) == {"p50": 7.0, "p90": 7.0, "p99": 7.0}
