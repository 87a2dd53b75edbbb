"""The correctness gate: no time is shown for a stage that gives other answers than the oracle."""

from itertools import pairwise
from types import FunctionType
from typing import NamedTuple

import numpy as np

from common import diff, reference
from common.gpu import host, on_gpu
from common.quants import dequantize, unpack_blocks
from common.stage import code_path

# The largest NMSE of logits that a stage may show, by what its matmul rounds its inputs to (its OPERANDS).
TOLERANCE = {"float32": 1e-8, "float16": 1e-4, "int8": 5e-3}
MANY = 8  # rows of logits whose mean no single position decides
MARGIN = 8  # an id may differ where the oracle prefers its own by less than this many times the RMS logit error


def tolerance(stage: str, rows: int = MANY) -> float:
    """The largest NMSE of logits over so many rows allowed to a stage.

    Rounding to 8 bits spikes at single positions. Over 400 of SmolLM2's the worst one alone is at half of what this
    allows, and so are the worst two, four and eight in a row: the spike is shared by the rows beside it.
    """
    rounded = operands(stage)
    return TOLERANCE[rounded] * (max(1.0, MANY / rows) if rounded == "int8" else 1.0)


def operands(stage: str) -> str:
    """What the stage's matmul rounds its inputs to, as its file says. Raises StageError for an unknown stage."""
    return diff.constant(code_path(stage), "OPERANDS") or "float32"


class Agreement(NamedTuple):
    """How a stage's logits rows and ids stand to the oracle's, each position judged on the stage's own text so far."""

    nmse: float
    kl: float  # mean KL divergence of the stage from the oracle, in nats
    tokens_equal: bool  # every id is the oracle's first choice, or a tie within MARGIN
    first_difference: int | None  # index of the first new id that differs, ties included
    passed: bool
    tolerance: float = 0.0  # the NMSE that was allowed


def agreement(rows, ids, want, tolerance: float) -> Agreement:
    """Judge logits rows (n, V) and the n ids chosen from them against the oracle's rows (n, V)."""
    rows, want = np.asarray(rows, np.float64), np.asarray(want, np.float64)
    ids = np.asarray(ids)
    at = np.arange(len(ids))
    error = reference.nmse(rows, want)
    rms = np.sqrt(np.mean((rows - want) ** 2, axis=1))
    lost = want.max(axis=1) - want[at, ids]  # by how much the oracle prefers its own choice
    differs = np.flatnonzero(lost > 0)
    equal = bool(np.all(lost <= MARGIN * rms))  # False where anything is NaN
    kl = float(np.mean(divergence(want, rows)))
    first = int(differs[0]) if len(differs) else None
    return Agreement(error, kl, equal, first, equal and error <= tolerance, tolerance)


def divergence(p_logits, q_logits) -> np.ndarray:
    """KL(p || q) in nats for each row of logits (rows, V). Source: Kullback & Leibler 1951."""
    p, q = log_softmax(p_logits), log_softmax(q_logits)
    return np.sum(np.exp(p) * (p - q), axis=-1)


def log_softmax(x):
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.sum(np.exp(x), axis=-1, keepdims=True))


# ---- where a wrong stage parts from the oracle -----------------------------------------------------------------

MATMULS = ("w_q", "w_k", "w_v", "w_o", "w_gate", "w_up", "w_down")  # in the order of forward
OP_TOLERANCE = 1e-7  # NMSE of one op on the inputs it was given
ATTENTION_TOLERANCE = {"float32": OP_TOLERANCE, "float16": OP_TOLERANCE, "int8": 1e-6}  # keys and values in float16
MATMUL_TOLERANCE = {"float32": OP_TOLERANCE, "float16": 1e-6, "int8": 2e-3}  # SmolLM2's worst, a w_v, is at half
STREAM_TOLERANCE = {"float32": 1e-9, "float16": 1e-4, "int8": 5e-3}  # NMSE of the residual stream; float32 is at 1e-12


class Parted(Exception):
    """Raised out of a traced forward at the first op whose output is wrong."""


def first_fault(request) -> str:
    """A clause that says where a stage first fails; request is a harness.Request whose ids are the text to run.

    First one text from position 0; where that is right, what else generate may ask of forward.
    """
    from common.model import open_model
    from common.stage import load_stage

    stage, gguf = load_stage(request.stage), open_model(request.model, request.layers)
    context = request.context or gguf.config.context
    if place := first_place(request, stage, gguf, context):
        return f"it first parts from the reference at {place}"
    told = asked_again(request, stage, gguf, stage.load(gguf, context, request.threads))
    return told or "forward is right at every position, so the fault is in generate, which asks it for something else"


def asked_again(request, stage, gguf, model) -> str | None:
    """What is wrong with a stage's forward once a model has been used, None where nothing is.

    A text and another, both from 0; then, of a stage with a cache, the first in pieces, the last of them one token.
    """
    ids, told = list(request.ids), "forward is right on a first text from start = 0 on, but"

    def right(text: list[int], starts: list[int]) -> bool:
        for start, end in pairwise([*starts, len(text)]):
            rows = stage.logits(model, stage.forward(model, text[start:end], start))
        want = reference.compute(gguf, text, rows=len(rows)).logits
        return reference.nmse(rows, want) <= tolerance(request.stage, len(rows))

    stage.forward(model, ids, 0)
    if not right(ids[::-1], [0]):
        return f"{told} does not begin anew: a second text from 0 on, on the same model, is wrong"
    half, last = len(ids) // 2, len(ids) - 1
    for starts in ([0, half], [0, half, last]) if getattr(model, "cache", None) is not None else ():
        if starts == sorted(set(starts)) and not right(ids, starts):
            return f"{told} wrong at start = {starts[-1]}, where it follows on what came before"
    return None


def first_place(request, stage, gguf, context: int) -> str | None:
    """Run the stage's forward with every op checked in float64 on the very inputs it got; where does it first fail?

    None where it does not. Where every op is right on its inputs, the fault is in how forward connects them, and the
    residual stream says in which layer. Of a stage whose step is
    compiled as a whole, the ops are run by the text of the nearest stage before it that calls them from Python; then
    its own step, cut after each layer.
    """
    from common.model import open_model

    rounded = operands(request.stage)
    allowed = STREAM_TOLERANCE[rounded]
    model = stage.load(gguf, context, request.threads)
    whole = hasattr(stage, "PHASES") and not on_gpu(request.stage)
    space = {**vars(before(stage)), **vars(stage)} if whole else vars(stage)
    trace = Trace(
        space, gguf.config.L, {"matmul": MATMUL_TOLERANCE[rounded], "attention": ATTENTION_TOLERANCE[rounded]}
    )
    forward = FunctionType(before(stage).forward.__code__, space) if whole else stage.forward
    try:
        plain = model._replace(cache=floats(gguf.config, len(request.ids))) if whole else model
        rows = stage.logits(model, forward(plain, request.ids, 0))
    except Parted as found:
        return str(found)
    finally:
        trace.undo()
    answer = reference.compute(gguf, request.ids)
    want = answer.residual[1:]
    for step, (got, right) in enumerate(zip(trace.residual, want, strict=False)):
        if not reference.nmse(got, right) <= allowed:
            part = "attention" if step % 2 == 0 else "the feed-forward"
            at = f"{place(got, right, allowed)}, layer {step // 2}"
            return f"{at}: each op is right on its inputs, but the sum after {part} is not"
    if whole:
        for layer in range(gguf.config.L):
            cut = open_model(request.model, layer + 1)
            model = stage.load(cut, context, request.threads)
            got = stage.forward(model, request.ids, 0)
            right = rms_norm(want[2 * layer + 1], dequantize(cut.weights.output_norm), gguf.config.eps)
            if not reference.nmse(got, right) <= allowed:
                at = f"{place(got, right, allowed)}, layer {layer}"
                return f"{at}: each op is right on its inputs, but what the step makes of them is not"
        rows = stage.logits(model, got)
    if len(trace.residual) < len(want):
        return f"layer {len(trace.residual) // 2}: it never runs"
    if not reference.nmse(rows, answer.logits) <= allowed:
        at = place(rows, answer.logits, allowed)
        return f"{at}: every layer is right, but the output norm or the logits are not"
    return None


def before(stage):
    """The nearest stage before it whose ops pass through Python."""
    from common.stage import load_stage

    while hasattr(stage, "PHASES"):
        stage = load_stage(stage.PREVIOUS)
    return stage


def floats(config, tokens: int) -> np.ndarray:
    """A cache as the stages have it whose ops pass through Python."""
    return np.zeros((config.L, 2, tokens, config.G, config.hd), np.float32)


class Trace:
    """Wraps a stage's ops, in the names that its forward sees, with a check against float64."""

    def __init__(self, space: dict, layers: int, tolerances: dict[str, float]):
        self.space, self.layers, self.tolerances = space, layers, tolerances
        self.kept = {name: self.space[name] for name in ORACLE if name in self.space}
        self.residual: list[np.ndarray] = []
        self.matmuls = 0
        for name, op in self.kept.items():
            self.space[name] = self.checked(name, op)

    def undo(self) -> None:
        self.space.update(self.kept)

    def checked(self, name: str, op):
        def call(*inputs):
            layer, label, allowed = len(self.residual) // 2, name, self.tolerances.get(name, OP_TOLERANCE)
            if name == "matmul":
                label = f"matmul ({MATMULS[self.matmuls % 7] if layer < self.layers else 'output'})"
                self.matmuls += 1
            want = ORACLE[name](*map(here, inputs))  # before the op, which might write to its inputs
            out = op(*inputs)
            got = host(out)
            if not reference.nmse(got, want) <= allowed:
                error = reference.nmse(got, want)
                size = f"NMSE {error:.1e}" if np.isfinite(got).all() else "not finite"
                on = f" for K x N = {inputs[0].shape[-1]} x {got.shape[-1]}" if name == "matmul" else ""
                raise Parted(f"{place(got, want, allowed)}, layer {layer}, {label}: {size}{on}")
            if name == "add":
                self.residual.append(np.array(got))
            return out

        return call


def here(value):
    """An op's input as the oracle takes it: brought from the GPU, where a position is an array too."""
    if hasattr(value, "raw"):
        return value._replace(raw=host(value.raw))
    value = host(value)
    one = isinstance(value, np.ndarray) and value.shape == (1,) and value.dtype == np.int64
    return int(value[0]) if one else value


def place(got, want, tolerance: float) -> str:
    """'token 3': the first row whose error stands out."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    rows = (((got - want) ** 2).reshape(len(want), -1).sum(axis=1)) / (np.sum(want**2) / len(want))
    bad = np.flatnonzero(~(rows <= tolerance))
    return f"token {int(bad[0]) if len(bad) else 0}"


def attention(q, k, v, start):  # (T, H, hd), (S, G, hd), (S, G, hd) -> (T, H * hd)
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    T, H, hd = q.shape
    k, v = (a[: start + T].repeat(H // k.shape[1], axis=1) for a in (k, v))
    scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(hd)
    scores[:, start + np.arange(T)[:, None] < np.arange(start + T)] = -np.inf
    return np.einsum("hts,shd->thd", reference.softmax(scores), v).reshape(T, H * hd)


def matmul(x, w):  # (T, K), (K, N) or blocks of (N, K) -> (T, N)
    if not isinstance(w, np.ndarray):
        w = (unpack_rows(w) if w.raw.ndim == 1 else unpack_strips(w)).T
    return x.astype(np.float64) @ w.astype(np.float64)


def unpack_rows(w):
    """Blocks in the file's order as floats (N, K)."""
    rows = np.empty((w.N, w.K), np.float32)
    unpack_blocks(w.kind, w.raw, w.size, rows.reshape(-1), w.length)
    return rows


def unpack_strips(w):
    """A packed matrix as floats (N, K)."""
    from common.int8 import unpacked

    return unpacked(w.kind, w.raw, w.N, w.K, w.length, w.size)


def rms_norm(x, weight, eps):
    x = x.astype(np.float64)
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def rope(x, freqs, start):
    padded = np.concatenate([np.zeros((start, *x.shape[1:])), x.astype(np.float64)])
    return reference.rope(padded, freqs)[start:]


ORACLE = {
    "matmul": matmul,
    "add": lambda a, b: a.astype(np.float64) + b,
    "mul": lambda a, b: a.astype(np.float64) * b,
    "silu": lambda x: reference.silu(x.astype(np.float64)),
    "rms_norm": rms_norm,
    "rope": rope,
    "attention": attention,
}
