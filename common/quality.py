"""`lesson quality`: what a stage's rounding costs, on a real text and along the stage's own path.

The text is cut into windows of at most WINDOW tokens, each run afresh, so that neither a stage nor the oracle holds
more than one: attention stays small and logits fit in memory. All positions of a window but its first are scored.
The oracle's logits are computed once a window, in float64, and lie in a temporary folder as float32 (50 MB a window of
SmolLM2) while the stages run; divergences are computed from them in float64, ROWS rows at a time.
"""

import hashlib
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common import gate, harness, machine, records, reference, roofline, show
from common.compare import progress
from common.job import Job, UsageError
from common.stage import PEERS, load_stage, require, short

TEXT = Path(__file__).parent / "data" / "tom-sawyer-chapter-1.txt"
TOKENS = 2048  # of a text, unless told; intervals narrow with the root of it
WINDOW = 256  # tokens; the time of attention and the memory of logits grow with it
FEWEST = 32  # tokens of a text; below, a p99 and an interval say nothing
BUDGET_S = 120.0  # seconds a stage
ROWS = 32  # rows of logits scored at a time: 32 x 49,152 float64 are 13 MB, and a few such copies
ORACLE_SHARE = 0.5  # of the packed float64 peak; the rest of an oracle's time is unpacking and attention

CONFIDENCE = 0.95
BLOCK = 16  # positions resampled together, about a clause: further apart, the figures hardly correlate
BLOCKS = 20  # at least, where a text is too short for that many of BLOCK
RESAMPLES = 2000
SEED = 0


# ---- figures and how sure they are -----------------------------------------------------------------------------


class Scores(NamedTuple):
    """What a stage says of each scored position; arrays (P,) float64."""

    nll: np.ndarray  # negative log-likelihood of the text's own next token, nats
    kl: np.ndarray  # KL divergence of the stage's distribution from the oracle's, nats
    same: np.ndarray  # 1.0 where both put the same token first


def score(rows, want, ids) -> Scores:
    """Judge logits rows (P, V) against the oracle's (P, V); ids (P,) are what the text goes on with."""
    parts = [slice(p, p + ROWS) for p in range(0, len(ids), ROWS)]
    return joined([score_rows(np.asarray(rows[p], np.float64), want[p], np.asarray(ids[p])) for p in parts])


def score_rows(rows, want, ids) -> Scores:
    same = rows.argmax(axis=1) == want.argmax(axis=1)
    kl = gate.divergence(np.asarray(want, np.float64), rows)
    return Scores(nll(rows, ids), np.maximum(kl, 0.0), same.astype(np.float64))  # rounding can dip below zero


def nll(rows, ids) -> np.ndarray:  # (P, V), (P,) -> (P,)
    """Negative log-likelihood of each id under the logits row before it, in nats."""
    return -gate.log_softmax(np.asarray(rows, np.float64))[np.arange(len(ids)), ids]


def joined(parts: list[Scores]) -> Scores:
    return Scores(*map(np.concatenate, zip(*parts, strict=True)))


def perplexity(values, axis=-1):
    """exp of the mean negative log-likelihood, of arrays whose positions lie along axis."""
    return np.exp(np.mean(values, axis=axis))


p99 = partial(np.percentile, q=99)  # (values, axis=)

# figure: (which of Scores, statistic). Resamples hold nothing the sample does not: the max is "at least", and where all
# positions agree the interval of their share is a point.
FIGURES: dict[str, tuple[str, Callable]] = {
    "perplexity": ("nll", perplexity),
    "kl_mean": ("kl", np.mean),
    "kl_p99": ("kl", p99),
    "kl_max": ("kl", np.max),
    "same_top1": ("same", np.mean),
}


class Interval(NamedTuple):
    """A two-sided interval of the given confidence."""

    low: float
    high: float


class Difference(NamedTuple):
    """statistic(a) - statistic(b) on the same positions."""

    value: float
    low: float  # two-sided, as Interval
    high: float
    upper: float  # one-sided: below this at the given confidence


def bootstrap(
    values, statistic: Callable, confidence=CONFIDENCE, block=BLOCK, resamples=RESAMPLES, seed=SEED
) -> Interval:  # fmt: skip
    """The percentile interval of statistic(values, axis=-1) over positions, resampled in blocks that wrap around.

    values are (P,), in the order of the text: neighbours correlate, so single positions drawn by themselves would make
    the interval too narrow. The seed fixes it. Source: Politis & Romano 1992, circular block bootstrap.
    """
    values = np.asarray(values, np.float64)
    drawn = [statistic(values[at], axis=-1) for at in draws(len(values), block, resamples, seed)]
    return Interval(*quantiles(drawn, confidence))


def paired_difference(
    a, b, statistic: Callable, confidence=CONFIDENCE, block=BLOCK, resamples=RESAMPLES, seed=SEED
) -> Difference:  # fmt: skip
    """How much statistic(a) exceeds statistic(b), both (P,) on the same positions of the same text.

    Each resample takes the same positions of both, so what a hard passage does to both cancels.
    Raises ValueError where the two differ in length.
    """
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if a.shape != b.shape:
        raise ValueError(f"pairs are wanted, but there are {len(a)} positions and {len(b)}")
    drawn = [statistic(a[at], axis=-1) - statistic(b[at], axis=-1) for at in draws(len(a), block, resamples, seed)]
    upper = float(np.quantile(np.concatenate(drawn), confidence))
    return Difference(
        float(statistic(a, axis=-1) - statistic(b, axis=-1)), *quantiles(drawn, confidence), upper
    )  # fmt: skip


def draws(P: int, block: int, resamples: int, seed: int) -> Iterator[np.ndarray]:
    """Positions of each resample, (some of the resamples, P), a few megabytes at a time."""
    block = max(1, min(block, P // BLOCKS))
    draw, some = np.random.default_rng(seed), max(1, (1 << 20) // P)
    for done in range(0, resamples, some):
        starts = draw.integers(P, size=(min(some, resamples - done), -(-P // block), 1))
        yield ((starts + np.arange(block)) % P).reshape(len(starts), -1)[:, :P]


def quantiles(drawn: list, confidence: float) -> list[float]:
    return [float(q) for q in np.quantile(np.concatenate(drawn), [(1 - confidence) / 2, (1 + confidence) / 2])]


# ---- the worker's side -----------------------------------------------------------------------------------------


def rows_of(stage, model, ids: list[int]) -> tuple[np.ndarray, int]:
    """Logits rows (T - 1, V) before each of ids (T,) but the first, and how many of them came from decoding.

    A stage that keeps nothing between tokens runs the window in one pass, and decodes none of it. One with a cache
    does what it does for its users: half the window is a prompt, the other half goes through its generate.
    """
    if getattr(model, "cache", None) is None:
        return stage.logits(model, stage.forward(model, ids[:-1], 0)), 0
    prompt, given = ids[: len(ids) // 2], iter(ids[len(ids) // 2 :])
    before = stage.logits(model, stage.forward(model, prompt, 0))[:-1]
    told = [np.array(row) for _, row in stage.generate(model, prompt, len(ids) - len(prompt), lambda row: next(given))]
    return np.concatenate([before, told]), len(told) - 1  # the first row that generate tells is the prompt's


def score_windows(request: harness.Request, windows: list[list[int]], wanted: list[str], emit: Callable) -> dict:
    """Run a stage over windows of ids, each against the oracle's logits in the file of wanted; emit(i, ms) after each.

    Ends early once request.budget_s is spent, but not before one window. -> what `joined` makes of the windows, as
    lists, with decode: 1.0 where a position was decoded. Raises FloatingPointError for logits that are no numbers.
    """
    from common.model import open_model

    stage, gguf = load_stage(request.stage), open_model(request.model, request.layers)
    model = stage.load(gguf, max(map(len, windows)), request.threads)
    found, decode, spent_ms = [], [], []
    for i, (ids, file) in enumerate(zip(windows, wanted, strict=True)):
        started = time.perf_counter()
        rows, decoded = rows_of(stage, model, ids)
        if not np.all(np.isfinite(rows)):
            raise FloatingPointError(f"the logits of window {i} are not all finite")
        found.append(score(rows, np.load(file, mmap_mode="r"), ids[1:]))
        decode += [0.0] * (len(rows) - decoded) + [1.0] * decoded
        spent_ms.append((time.perf_counter() - started) * 1e3)
        emit(i, spent_ms[-1])
        if request.budget_s and sum(spent_ms) + spent_ms[-1] > request.budget_s * 1e3:
            break
    return {**{name: part.tolist() for name, part in joined(found)._asdict().items()}, "decode": decode}


# ---- the command -----------------------------------------------------------------------------------------------


class Text(NamedTuple):
    """What is scored."""

    name: str
    sha256: str
    tokens: int  # of the text, before it is limited


def quality(
    names: list[str],
    job: Job,
    text: str | None = None,
    tokens: int | None = None,
    budget_s: float = BUDGET_S,
    save: str | None = None,
) -> dict:
    """Score stages on a text file (the bundled one by default), all on the same positions. -> the JSON document.

    Raises UsageError for a text or a model that can't be scored, StageError, RunError and RecordError.
    """
    for name in names:
        require(name)
    told, windows = cut(job, text, TOKENS if tokens is None else tokens)
    folder = records.writable(records.folder(save))
    here = machine.measure(walks=roofline.walks(names, job.gguf.config))
    print(estimate(names, job, windows, budget_s, here), file=sys.stderr)
    scored, oracle = score_stages(names, job, windows, budget_s)
    ran = windows[: scored[0]["windows"]]
    document = {
        "schema": records.SCHEMA,
        "stages": [row(name, s, oracle) for name, s in zip(names, scored, strict=True)],
        "pairs": [pair(*two) for two in pairwise(zip(names, scored, strict=True))],
        "reference": {"perplexity": float(perplexity(oracle)), "interval": bootstrap(oracle, perplexity)},
        "text": told._asdict(),
        "tokens": sum(map(len, ran)),
        "positions": len(oracle),
        "window": WINDOW,
        "stop_reason": "length" if len(ran) == len(windows) else "budget",
        "bootstrap": {"confidence": CONFIDENCE, "block": BLOCK, "resamples": RESAMPLES, "seed": SEED},
        "model": model_summary(job),
        "machine": records.machine_summary(here),
        "threads": job.threads,
        "commit": records.commit(),
    }
    records.save(document, folder / here.slug / "quality" / file_name(document))
    return document


def score_stages(
    names: list[str], job: Job, windows: list[list[int]], budget_s: float = BUDGET_S
) -> tuple[list[dict], np.ndarray]:
    """Run stages over windows of ids, and the oracle too.

    -> (for each stage what `score_windows` gives, its lists as arrays (P,), and `windows`, how many of them; the
    oracle's NLL (P,)), all cut to the windows that the slowest stage had the time for. Raises RunError.
    """
    scored, oracle, wanted, ran = [], [], [], len(windows)
    with tempfile.TemporaryDirectory() as scratch, progress() as bar:
        task = bar.add_task("the reference", total=len(windows) * (1 + len(names)))
        for i, ids in enumerate(windows):
            rows = reference.compute(job.gguf, ids[:-1]).logits
            oracle.append(nll(rows, ids[1:]))
            wanted.append(str(Path(scratch) / f"{i}.npy"))
            np.save(wanted[i], rows.astype(np.float32))
            bar.advance(task)
        for name in names:
            bar.update(task, description=short(name))
            request, done = job.request(name, budget_s=budget_s), []

            def advance(i: int, ms: float, done=done) -> None:
                done.append(i)
                bar.advance(task)

            found = harness.talk("score", request, advance, windows=windows[:ran], wanted=wanted[:ran])["scores"]
            scored.append(found)
            ran = len(done)
    oracle = np.concatenate(oracle[:ran])
    P = len(oracle)
    return [{"windows": ran, **{part: np.array(s[part][:P]) for part in s}} for s in scored], oracle


def cut(job: Job, text: str | None, tokens: int) -> tuple[Text, list[list[int]]]:
    """The first `tokens` of the text in windows, each begun with BOS where the model wants one."""
    if job.gguf.config.name.endswith("random weights"):
        raise UsageError(
            f"{job.gguf.config.name}: to such a model every text is noise, so its quality means nothing: "
            "choose a trained one, such as -m smollm2"
        )
    path = TEXT if text is None else Path(text)
    try:
        content = path.read_bytes()
        ids = job.tokenizer.encode(content.decode(), bos=False)
    except OSError as error:
        raise UsageError(f"--text {text}: {error.strerror}; give a UTF-8 text file") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--text {text}: not UTF-8 at byte {error.start}; give a UTF-8 text file") from error
    if min(len(ids), tokens) < FEWEST:
        given = f"--tokens {tokens}" if len(ids) >= FEWEST else f"{path.name} has {len(ids)} tokens"
        raise UsageError(f"{given}: at least {FEWEST} are needed to say anything")
    first = [job.tokenizer.bos] if job.tokenizer.add_bos else []
    room = min(WINDOW, job.context) - len(first)
    windows = [first + ids[i : min(i + room, tokens)] for i in range(0, min(len(ids), tokens), room)]
    told = Text(path.name, hashlib.sha256(content).hexdigest(), len(ids))
    return told, [w for w in windows if len(w) > 1]  # a lone token predicts nothing


def row(name: str, scored: dict, oracle) -> dict:
    """One stage's figures, and which path they came by; oracle (P,) is the reference's NLL."""
    decode = scored["decode"] > 0
    figures = {f: float(statistic(scored[of], axis=-1)) for f, (of, statistic) in FIGURES.items()}
    paths = {"prefill": ~decode, "decode": decode}
    return {
        "stage": name,
        "path": "prefill and decode" if decode.any() else "prefill",
        "perplexity": figures["perplexity"],
        "kl": {part: figures[f"kl_{part}"] for part in ("mean", "p99", "max")},
        "same_top1": figures["same_top1"],
        "intervals": {f: bootstrap(scored[of], statistic) for f, (of, statistic) in FIGURES.items()},
        "nll_over_reference": paired_difference(scored["nll"], oracle, np.mean)._asdict(),
        "by_path": {
            path: {"positions": int(at.sum()), "kl_mean": float(scored["kl"][at].mean())}
            for path, at in paths.items()
            if at.any()
        },
    }


def pair(a: tuple[str, dict], b: tuple[str, dict]) -> dict:
    """By how much b's mean KL exceeds a's, and the upper end of that as a share of a's mean. A peer is always a."""
    if b[0] in PEERS and a[0] not in PEERS:
        a, b = b, a
    over, mean = paired_difference(b[1]["kl"], a[1]["kl"], np.mean), float(np.mean(a[1]["kl"]))
    return {"a": a[0], "b": b[0], "kl_mean": over._asdict(), "upper_share": over.upper / mean if mean else None}


def estimate(names: list[str], job: Job, windows: list[list[int]], budget_s: float, here) -> str:
    """How long this will take, said before it starts."""
    tokens = sum(map(len, windows))
    oracle = 2 * sum(m.count * m.K * m.N for m in roofline.matmuls(job.gguf.config)) * tokens
    parts = {"the reference": oracle / (roofline.peak(here, here.threads) / 2 * ORACLE_SHARE) / 1e9}
    for name in names:
        parts[short(name)] = min(budget_s, sum(window_s(name, job, len(ids), here) for ids in windows))
    told = ", ".join(f"{what} {seconds:.0f} s" for what, seconds in parts.items())
    return f"{tokens:,} tokens, about {sum(parts.values()):.0f} s: {told}; at most {budget_s:.0f} s a stage (--budget)"


def window_s(name: str, job: Job, T: int, here) -> float:
    """Seconds that a stage is expected to take for a window of T tokens, logits of every row included."""
    known, config = roofline.modelled(name), job.gguf.config
    prompt, n = (T, 1) if known in roofline.CACHELESS else (T // 2, T - T // 2)
    weights = job.gguf.weights
    types, held = roofline.file_types(weights), roofline.file_bytes(weights)
    found = roofline.expect(known, config, held, prompt, n, here, job.threads, types=types)
    rows = roofline.matmul_ms(known, here, prompt, config.D, config.V)
    passes = 2 if n > 1 else 1  # generate runs the prompt again
    return (passes * found.ttft_ms + rows + (n - 1) * (found.ms_per_token or 0)) / 1e3


def model_summary(job: Job) -> dict:
    from common.job import quant_mix, quantization

    config = job.gguf.config
    return {
        "name": config.name,
        "sha256": job.sha256,
        "quant": quantization(job.gguf),
        "quant_mix": quant_mix(job.gguf),
        "layers": config.L,
        "file_layers": config.file_layers,
    }


def file_name(document: dict) -> str:
    stages = [short(r["stage"]) for r in document["stages"]]
    model, text = document["model"], Path(document["text"]["name"]).stem
    words = [*stages, model["name"], model["quant"], text, f"{document['tokens']} tokens"]
    return machine.slug(" ".join(words)) + ".json"


# ---- what the reader sees --------------------------------------------------------------------------------------


def render(document: dict) -> list:
    """The table: a stage's figures, its intervals in the line under them."""
    shown = show.table("", "perplexity", "KL mean", "KL p99", "KL max", "same top-1")
    oracle = document["reference"]
    shown.add_row("reference", f"{oracle['perplexity']:.3f}", *4 * ["–"])
    shown.add_row("", span(oracle["interval"]), *4 * [""], style="dim")
    for r in document["stages"]:
        kl, spread = r["kl"], r["intervals"]
        parts = ("mean", "p99", "max")
        shown.add_row(
            short(r["stage"]),
            f"{r['perplexity']:.3f}",
            *(f"{kl[part]:.1e}" for part in parts),
            f"{100 * r['same_top1']:.2f} %",
        )
        top = span([100 * share for share in spread["same_top1"]])
        shown.add_row("", span(spread["perplexity"]), *(power(spread[f"kl_{p}"]) for p in parts), top, style="dim")
    return [shown, *map(by_path, document["stages"]), *map(against, document["pairs"]), *notes(document)]


def span(interval) -> str:
    return "–".join(f"{end:.1f}" for end in interval)


def power(interval) -> str:
    """'2.1–3.2e-11': both ends by the power of ten of the upper one."""
    low, high = interval
    if high == 0:
        return "0"
    exponent = math.floor(math.log10(high))
    return f"{low / 10**exponent:.1f}–{high / 10**exponent:.1f}e{exponent:+03d}"


def signed(difference: dict) -> str:
    """'+1.2e-07 (-3e-08 to +3e-07)'."""
    return f"{difference['value']:+.1e} ({difference['low']:+.0e} to {difference['high']:+.0e})"


def by_path(r: dict) -> str:
    """'simd: NLL over the reference +1.2e-07 (-3e-08 to +3e-07); prefill 255 positions, KL 1.1e-11'."""
    paths = (f"{path} {part['positions']:,} positions, KL {part['kl_mean']:.1e}" for path, part in r["by_path"].items())
    return f"{short(r['stage'])}: NLL over the reference {signed(r['nll_over_reference'])}; {', '.join(paths)}"


def against(found: dict) -> str:
    share = found.get("upper_share")
    most = "" if share is None else f", at most {100 * share:+.1f} % of {short(found['a'])}'s at {CONFIDENCE:.0%}"
    return f"{short(found['b'])} over {short(found['a'])}: KL mean {signed(found['kl_mean'])}{most}"


def notes(document: dict) -> list:
    model, commit = document["model"], document["commit"]
    version = f", commit {commit['sha'][:9]}{' + changes' if commit['dirty'] else ''}" if commit else ""
    early = "" if document["stop_reason"] == "length" else ", cut to what the slowest had time for (--budget)"
    return [
        show.dim(
            f"{document['positions']:,} positions of {document['text']['name']} in windows of {document['window']} "
            f"tokens{early}; KL in nats; below each figure its {100 * CONFIDENCE:.0f} % interval"
        ),
        show.dim(f"{document['machine']['name']} · {show.named(model['name'])} {model['quant']}{version}"),
    ]
