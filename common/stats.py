"""From samples to a verdict. Times are positive; a ratio is a's value over b's, so above 1 means that b is faster."""

import math
from statistics import fmean, median, stdev
from typing import NamedTuple

CONFIDENCE = 0.99
EFFECT = 0.03  # less than this is not called a change, however sure
FEWEST = 3  # pairs; below, an interval says nothing


class Verdict(NamedTuple):
    """b against a, from interleaved pairs."""

    ratio: float  # geometric mean of a / b
    low: float | None  # the interval for the ratio, None from too few pairs
    high: float | None
    smallest: float | None  # the smallest change this run could have seen, as a fraction
    verdict: str  # faster | slower | no measurable change | too few runs
    pairs: int


def verdict(a: list[float], b: list[float]) -> Verdict:
    """Judge pairs (a[i], b[i]) by a Student t interval on their log ratios.

    The ratio is log-normal if anything is: noise multiplies. Source: Student 1908; the interval for paired samples.
    """
    logs = [math.log(x / y) for x, y in zip(a, b, strict=True)]
    mean, n = fmean(logs), len(logs)
    if n < FEWEST:
        return Verdict(math.exp(mean), None, None, None, "too few runs", n)
    half = t_quantile(n - 1) * stdev(logs) / math.sqrt(n)
    low, high = mean - half, mean + half
    if low <= 0 <= high or abs(mean) < math.log(1 + EFFECT):
        word = "no measurable change"
    else:
        word = "faster" if mean > 0 else "slower"
    smallest = max(EFFECT, math.exp(half) - 1)
    return Verdict(math.exp(mean), math.exp(low), math.exp(high), smallest, word, n)


def t_quantile(freedom: int) -> float:
    """The two-sided CONFIDENCE quantile of Student's t."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, (1 + CONFIDENCE) / 2))


def summary(samples: list[float]) -> dict:
    """{median, min, stdev, samples}; stdev (n - 1) is None for one sample."""
    return {
        "median": median(samples),
        "min": min(samples),
        "stdev": stdev(samples) if len(samples) > 1 else None,
        "samples": samples,
    }


def percentiles(samples: list[float]) -> dict:
    """{p50, p90, p99} by linear interpolation."""
    import numpy as np

    return {f"p{p}": float(np.percentile(samples, p)) for p in (50, 90, 99)}
