"""How the next token is drawn from a row of logits, where the first choice is not simply taken.

A softmax turns logits into probabilities; three filters each take tokens away from the unlikely end; the temperature
flattens or sharpens what is left, and one token is drawn. The order is llama.cpp's (its `--samplers` default: top_k,
top_p, min_p, temperature): the filters see the model's own probabilities, so a higher temperature never lets back in
what they took away.

Temperature: Ackley, Hinton & Sejnowski 1985. Top-k: Fan, Lewis & Dauphin 2018, arXiv 1805.04833. Top-p (nucleus):
Holtzman et al. 2020, arXiv 1904.09751. Min-p: Nguyen et al. 2024, arXiv 2407.01082.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

SEEDS = 1 << 32  # a seed that was not given is drawn below this, and recorded


class SamplingError(Exception):
    """A setting that draws nothing; str(e) is one sentence."""

    exit_code = 2


class Sampler(NamedTuple):
    """What the reader asked for. As it stands: greedy, the token with the largest logit."""

    temperature: float = 0.0  # 0: greedy, whatever the rest says
    top_k: int = 0  # keep the k most likely; 0 keeps all
    top_p: float = 1.0  # keep the fewest most likely that together have this much probability
    min_p: float = 0.0  # keep those at least this many times as likely as the most likely
    seed: int | None = None  # of the draws; None where nothing is drawn

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def chooser(self) -> Callable | None:
        """A new choose(row) -> id, its draws from the seed on; None for greedy, which is every stage's own default."""
        if self.greedy:
            return None
        import numpy as np

        draws = np.random.default_rng(self.seed)
        return lambda row: draw(row, self, draws)


GREEDY = Sampler()


def sampler(
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int | None = None,
) -> Sampler:
    """A Sampler from flags. A filter without a temperature means temperature 1. Raises SamplingError."""
    filters = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    given = {name: value for name, value in filters.items() if value is not None}
    if temperature is None:
        temperature = 1.0 if given else 0.0
    if not 0 <= temperature < math.inf:
        raise SamplingError(f"--temperature {temperature}: give a number from 0 (greedy) upwards, such as 0.8")
    if top_k is not None and top_k < 0:
        raise SamplingError(f"--top-k {top_k}: give how many tokens to keep, 1 or more, or 0 for all")
    if top_p is not None and not 0 < top_p <= 1:
        raise SamplingError(f"--top-p {top_p}: give a probability above 0, up to 1 for all, such as 0.95")
    if min_p is not None and not 0 <= min_p <= 1:
        raise SamplingError(f"--min-p {min_p}: give a share of the likeliest token's probability, 0 to 1, such as 0.05")
    if seed is not None and seed < 0:
        raise SamplingError(f"--seed {seed}: give a whole number from 0 upwards")
    if temperature == 0:
        return GREEDY
    if seed is None:
        import secrets

        seed = secrets.randbelow(SEEDS)
    return Sampler(temperature, seed=seed, **given)


def draw(row, sampler: Sampler, draws) -> int:
    """One token of logits (V,). draws: a numpy Generator. Raises FloatingPointError where a logit is not finite."""
    import numpy as np

    ids, chances = candidates(row, sampler)
    at = np.searchsorted(np.cumsum(chances), draws.random(), side="right")
    return int(ids[min(at, len(ids) - 1)])  # rounding may leave the last sum a little below 1


def candidates(row, sampler: Sampler):  # (V,) -> (n,) ids, (n,) float64 probabilities
    """What the filters leave, most likely first, with its probabilities at the temperature; they sum to 1.

    Of equally likely tokens the one with the lower id comes first, as with argmax. At least one token is left.
    """
    import numpy as np

    row = np.asarray(row, np.float64)
    if not np.isfinite(row).all():
        raise FloatingPointError("a logit is not finite")
    ids = np.argsort(-row, kind="stable")
    logits = row[ids] - row[ids[0]]  # the largest first, and 0: exp can't overflow
    if sampler.top_k:
        logits = logits[: sampler.top_k]
    chances = np.exp(logits) / np.exp(logits).sum()
    if sampler.top_p < 1:
        before = np.cumsum(chances) - chances  # a token stays while those before it have not reached top_p
        logits = logits[before < sampler.top_p]
    if sampler.min_p:
        logits = logits[np.exp(logits) >= sampler.min_p]  # the likeliest has 1: its logit is 0
    chances = np.exp(logits / sampler.temperature)
    return ids[: len(logits)], chances / chances.sum()
