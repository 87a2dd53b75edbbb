"""Faults for the kernels of both attention ladders: by rung, what of its source becomes what."""

SEES_ONE_MORE = "i + 1 + K - Q", "i + 2 + K - Q"
TILED = {  # of flash and skip
    "causal, off by one": SEES_ONE_MORE,
    "sums that do not shrink": ("sum[r][d][2 * h] *= keep, sum[r][d][2 * h + 1] *= keep", ""),
    "totals that do not shrink": (", total[r][h] *= keep", ""),
    "a row that sees no key": ("total[r][h] ? 1 / total[r][h] : 0", "1 / total[r][h]"),
}
FORWARD = {
    "flash": TILED,
    "skip": TILED,
    "hopper": {
        "causal, off by one": SEES_ONE_MORE,
        "sums that do not shrink": ("sum[i] *= keep[i / 2 % 2]", ""),
        "totals that do not shrink": (", total[h] *= keep[h]", ""),
        "a row that sees no key": ("total[h] ? 1 / total[h] : 0", "1 / total[h]"),
    },
}
ALL_BACKWARD = {
    "causal, off by one": ("causal ? j + Q - K : 0 : Q", "causal ? j - 1 + Q - K : 0 : Q"),
    "delta forgotten": ("== 0) delta[row] = sum;", "== 0) delta[row] = 0;"),
}
LSE = "the log-sum-exp forgotten"
SPLIT = ALL_BACKWARD | {LSE: ("* scale - (e % 2 ? less.y : less.x) * 1.4426950408889634f", "* scale")}
BACKWARD = {
    "recomputed": ALL_BACKWARD | {LSE: ("* scale - less)", "* scale)")},
    "split": SPLIT,
    "skip": SPLIT,
    "hopper": ALL_BACKWARD | {LSE: ("* scale - (e % 2 ? less.y : less.x)", "* scale")},
}
FORWARD_FAULTS = [(stage, fault) for stage, faults in FORWARD.items() for fault in faults.values()]
BACKWARD_FAULTS = [(stage, fault) for stage, faults in BACKWARD.items() for fault in faults.values()]


def planted(source: str, fault: tuple[str, str]) -> str:
    """The source with its fault. Raises AssertionError where the text to be changed does not stand there once."""
    old, new = fault
    assert source.count(old) == 1, old
    return source.replace(old, new)
