"""Whether an error is rounding's, or a bug's.

Rounding to a grid errs in either direction, whatever is rounded: so the error does not grow with the result, and no
channel has much more of it than others. A wrong scale does the one where it is everybody's, the other where it is one
channel's.
"""

import math
from typing import NamedTuple

import numpy as np

SURE = 8  # standard errors from zero at which a slope is no accident
UNEVEN = 4  # times the median channel's mean squared error; of some dozens of tokens, chance gives less than two


class Told(NamedTuple):
    """What the error of a layer's outputs looks like."""

    slope: float  # the error's part along the result: 0.01 where all is one percent too large
    slope_limit: float  # what chance may give
    channel: int  # the one with most error
    uneven: float  # its mean squared error over the median channel's

    @property
    def is_rounding(self) -> bool:
        """NaN is neither."""
        return abs(self.slope) <= self.slope_limit and self.uneven <= UNEVEN


def told(out, exact) -> Told:
    """Look at the error of out (T, N) against exact (T, N); channels are the N outputs."""
    exact = np.asarray(exact, np.float64)
    error = np.asarray(out, np.float64) - exact
    size = float((exact**2).sum())
    slope = float((error * exact).sum() / size)
    rest = error - slope * exact
    channels = (error**2).mean(axis=0)
    worst = int(channels.argmax())
    uneven = float(channels[worst] / np.median(channels)) if np.median(channels) > 0 else math.inf
    return Told(slope, SURE * math.sqrt(float((rest**2).sum()) / size / error.size), worst, uneven)
