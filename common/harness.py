"""How a stage is timed: in a process of its own, warmed up, checked against the oracle.

TTFT runs from prompt ids ready to the first id chosen; ms/token is the mean of the gaps after it. Loading, compiling
and tokenizing lie outside both and are reported apart.
"""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from common.events import memory
from common.sampling import GREEDY, Sampler
from common.stage import PEERS, StageError, load_stage, where

WARM_IDS = 2  # enough for every array kind: a prompt of more than one row, and a step after it
SHORT_S = 1.0  # a run expected to be shorter than this is warmed up at its own shape, for no longer than this


@dataclass(frozen=True)
class Request:
    """One run of one stage."""

    stage: str
    model: str  # path of the GGUF file
    ids: list[int]  # the prompt
    n: int  # new tokens wanted
    layers: int | None = None  # the first layers only; None for all
    context: int | None = None  # positions to allocate for; None for what the model allows
    threads: int = 1
    budget_s: float | None = None  # stop early once this is spent, but not before two tokens
    stop_ids: list[int] = field(default_factory=list)
    sampler: Sampler = GREEDY
    warm_ids: list[int] | None = None  # what to warm up on where it must not be the prompt itself; None for the prompt
    rows_file: str | None = None  # where to keep the logits rows that the ids were chosen from, .npy
    logits_file: str | None = None  # where to keep the logits of every prompt position, .npy


@dataclass(frozen=True)
class Sample:
    """What one run gave. Times in ms, faults and memory as the operating system counts them."""

    output_ids: list[int]
    stop_reason: str  # length | stop token | budget | context
    ttft_ms: float
    gaps_ms: list[float]  # between one id and the next
    load_ms: float
    jit_ms: float
    peak_rss_mb: float
    faults: dict  # {load | prefill | decode: {minor, major}}

    def ms_per_token(self, n: int | None = None) -> float | None:
        """(t_last - t_first) / (n - 1) over the first n ids, None for fewer than two."""
        gaps = self.gaps_ms[: n - 1] if n else self.gaps_ms
        return sum(gaps) / len(gaps) if gaps else None


class RunError(Exception):
    """A run that gave no numbers; str(e) is one sentence. exit_code is for the command line."""

    def __init__(self, message: str, exit_code: int = 1):
        super().__init__(message)
        self.exit_code = exit_code


# ---- the parent's side -----------------------------------------------------------------------------------------


def run(request: Request, on_token: Callable[[int, float], None] = lambda token, ms: None) -> Sample:
    """Run a request in a fresh process; on_token(id, ms since the last) is called as each token arrives.

    Raises RunError if the stage fails. The process is gone when this returns, however it returns.
    """
    return Sample(**talk("run", request, on_token)["sample"])


def diagnose(request: Request) -> str:
    """A clause that names token, layer and op where the stage parts from the oracle, or what else is wrong."""
    return talk("diagnose", request)["diagnosis"]


def talk(what: str, request: Request, on_token: Callable[[int, float], None] = lambda token, ms: None, **more) -> dict:
    """Start a worker, hand it the request, and return its answer. Raises RunError for an error or a silent death.

    What a worker does beyond measuring may need more than a request: JSON values, by name.
    """
    with tempfile.TemporaryFile() as errors:
        process = spawn("common.harness", request.stage, errors)
        try:
            process.stdin.write(json.dumps({"do": what, "request": asdict(request), **more}).encode() + b"\n")
            process.stdin.flush()
            for line in process.stdout:
                event = json.loads(line)
                if "error" in event:
                    raise RunError(event["error"], event["exit_code"])
                if "token" not in event:
                    return event
                on_token(event["token"], event["ms"])
            raise RunError(f"{request.stage} ended without a result: {last_words(process.wait(), errors)}")
        finally:
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()


def spawn(module: str, stage: str, errors) -> subprocess.Popen:
    """A worker for a stage: a module of ours as a fresh process, with pipes to talk through and a file for errors."""
    root = str(Path(__file__).parent.parent)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
    if stage.endswith(".py"):
        env["LESSON_READER"] = Path(stage).stem
    command = [sys.executable, "-m", module]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=env)


def last_words(code: int, errors) -> str:
    if code < 0:
        hint = {
            signal.SIGKILL: ", perhaps out of memory",
            signal.SIGSEGV: ": compiled code checks no index, so one beyond an array's end does that",
        }.get(-code, "")
        return f"killed by {signal.Signals(-code).name}{hint}"
    errors.seek(0)
    lines = errors.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), f"exit code {code}")


# ---- the worker's side -----------------------------------------------------------------------------------------


def measure(
    request: Request,
    emit: Callable[[int, float], None] = lambda token, ms: None,
    begin: Callable[[], None] = lambda: None,
    stage=None,
) -> Sample:
    """Load, warm up and time one generation in this process; begin() is called just before the clock starts.

    stage: the module, where it is loaded already. Raises what the stage raises, and GGUFError.
    """
    import numpy as np

    from common.gpu import settler
    from common.model import open_model

    confine(request.threads)
    stage = stage or load_stage(request.stage)
    jit_ms, warm_s = (0.0, 0.0) if request.stage in PEERS else compile_all(stage, request)
    settle = settler(stage)

    counted, before = {}, faults()
    started = time.perf_counter()
    gguf = open_model(request.model, request.layers)
    context = request.context or gguf.config.context
    model = stage.load(gguf, context, request.threads)
    settle()
    load_ms = (time.perf_counter() - started) * 1e3
    counted["load"] = since(before)

    # The last new id is chosen at the last position and needs no room of its own.
    n = min(request.n, context - len(request.ids) + 1)
    stop_reason = "length" if n == request.n else "context"
    warm_up(stage, model, request, n, warm_s * gguf.config.L)

    ids, rows, times_ms = [], [], []
    tokens = stage.generate(model, request.ids, n, *choosing(request))
    before = faults()
    begin()
    while len(ids) < n:
        started = time.perf_counter()
        pair = next(tokens, None)
        settle()
        times_ms.append((time.perf_counter() - started) * 1e3)
        if pair is None:
            raise StageError(f"{request.stage}: generate ended after {len(ids)} of {n} tokens", exit_code=1)
        token, row = pair
        if not ids:
            counted["prefill"], before = since(before), faults()
        ids.append(int(token))
        rows.append(np.array(row) if request.rows_file else None)
        emit(ids[-1], times_ms[-1])
        if ids[-1] in request.stop_ids:
            stop_reason = "stop token"
            break
        if request.budget_s and 2 <= len(ids) < n and sum(times_ms) > request.budget_s * 1e3:
            stop_reason = "budget"
            break
    counted["decode"] = since(before)
    peak_mb = memory()["peak_mb"]
    if request.rows_file:
        np.save(request.rows_file, np.stack(rows))
    if request.logits_file:
        np.save(request.logits_file, stage.logits(model, stage.forward(model, request.ids, 0)))
    return Sample(ids, stop_reason, times_ms[0], times_ms[1:], load_ms, jit_ms, peak_mb, counted)


def confine(threads: int) -> None:
    """Keep this process, and the threads it will start, to as many cores as it asks for, where the system can."""
    if hasattr(os, "sched_setaffinity"):
        granted = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, granted[:threads])


def compile_all(stage, request: Request) -> tuple[float, float]:
    """Run the first layer alone, twice, so that no compiler runs later. -> (ms spent compiling, s of a warm run)"""
    from common.gpu import settler
    from common.model import open_model

    gguf, settle = open_model(request.model, 1), settler(stage)
    spent = []
    for _ in range(2):
        started = time.perf_counter()
        model = stage.load(gguf, min(gguf.config.context, 2 * WARM_IDS), request.threads)
        settle()
        loaded = time.perf_counter()
        for _ in stage.generate(model, (request.warm_ids or request.ids)[:WARM_IDS], 2, *choosing(request)):
            pass
        settle()
        finished = time.perf_counter()
        spent.append(finished - started)
    return max(0.0, spent[0] - spent[1]) * 1e3, finished - loaded


def warm_up(stage, model, request: Request, n: int, guess_s: float) -> None:
    """Run two ids, then the timed shape itself, as long as each promises to be short; on a GPU the timed shape at once.

    guess_s: seconds for two ids by the first layer alone, too high since it counts the logits once a layer.
    """
    from common.gpu import settler

    settle, warm = settler(stage), request.warm_ids or request.ids

    def took(ids, new: int) -> float:
        started = time.perf_counter()
        for i, _ in enumerate(stage.generate(model, ids, new, *choosing(request))):
            settle()
            if i and time.perf_counter() - started > SHORT_S:  # longer than it promised; each kind of step has run
                break
        settle()  # a stage that is stopped may have queued its next step
        return time.perf_counter() - started

    if hasattr(stage, "ARCHS"):  # it may compile for the whole model, and capture a graph for each length of prompt
        took(warm, n)
        return
    for ids, new, short_s in ((warm[:WARM_IDS], min(2, n), 10 * SHORT_S), (warm, n, SHORT_S)):
        if guess_s * (len(request.ids) + n) / WARM_IDS > short_s:
            return
        guess_s = took(ids, new)


def choosing(request: Request) -> list:
    """What generate is given beside its model, ids and count: nothing for greedy, which is its own default."""
    choose = request.sampler.chooser()
    return [choose] if choose else []


def faults() -> dict:
    """Page faults of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {"minor": usage.ru_minflt, "major": usage.ru_majflt}


def since(before: dict) -> dict:
    return {kind: count - before[kind] for kind, count in faults().items()}


def received(data: dict) -> Request:
    """A request as JSON gives it."""
    return Request(**{**data, "sampler": Sampler(*data["sampler"])})


def serve() -> None:
    """The worker: one request from stdin, tokens and then one result to stdout, one JSON document a line."""
    line = sys.stdin.readline()
    threading.Thread(target=die_with_parent, daemon=True).start()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a stage prints must not look like an answer

    def say(event: dict) -> None:
        answers.write(json.dumps(event) + "\n")
        answers.flush()

    def tell(token: int | None, ms: float) -> None:
        say({"token": token, "ms": ms})

    message = json.loads(line)
    request = received(message["request"])
    try:
        if message["do"] == "diagnose":
            from common.gate import first_fault

            say({"diagnosis": first_fault(request)})
        elif message["do"] == "score":
            from common.quality import score_windows

            say({"scores": score_windows(request, message["windows"], message["wanted"], tell)})
        elif message["do"] == "profile":
            from common import gpu, gpu_profile, profile

            profiling = gpu_profile if gpu.on_gpu(request.stage) else profile
            say({"profile": profiling.profile_run(request)})
        elif message["do"] == "explain":
            from common.explain import explain_run

            say({"explain": explain_run(request, message["op"], message["stress"])})
        elif message["do"] == "cold":
            from common.cold import cold_run

            say({"cold": cold_run(request)})
        elif message["do"] == "examine":
            from common.check import examine

            say(examine(request, message["models"], tell))
        elif message["do"] == "examine_kernel":
            from common.check import examine_kernel

            rung = (message["ladder_stage"], request.stage, message["shape"], message["odd"], message["seeds"])
            say(examine_kernel(*rung, tell))
        elif message["do"] == "compile":
            from common.check import compiles

            say(compiles(request.stage))
        else:
            say({"sample": asdict(measure(request, tell))})
    except Exception as error:  # a reader's stage may raise anything
        from common.gpu import out_of_memory

        reason, code = explain(out_of_memory(error, request) or error, request.stage)
        say({"error": reason, "exit_code": code})


def explain(error: Exception, stage: str) -> tuple[str, int]:
    """One sentence and an exit code for what went wrong in a worker."""
    from common.gguf import GGUFError
    from common.stage import code_path

    if isinstance(error, GGUFError):
        return str(error), 3
    if isinstance(error, StageError):
        return str(error), error.exit_code
    if isinstance(error, MemoryError):
        return f"{stage} needs more memory than there is: {error}; try a shorter --context or fewer --layers", 1
    if isinstance(error, FloatingPointError):
        return f"{stage} is wrong: {error}", 5
    if stage in PEERS:
        return f"{stage}: {type(error).__name__}: {error}", 1
    path = code_path(stage)
    if type(error).__module__.startswith("numba"):
        return f"{path.name}: {compilers_word(str(error))}", 1
    said = "".join(f": {line}" for line in str(error).splitlines()[:1])
    return f"{path.name}: {where(error, path)}{type(error).__name__}{said}", 1


def compilers_word(message: str) -> str:
    """What numba has against a function, with its line: from several screens, the two facts that help."""
    lines = re.findall(r'File "[^"]*", line (\d+)', message)
    facts = [line.strip() for line in message.splitlines() if line.strip()]
    facts = [line for line in facts if not line.startswith("Failed in nopython mode")]
    what = re.sub(r"\x1b\[[0-9;]*m", "", facts[0]) if facts else "it gives no reason"
    return f"{f'line {lines[-1]}: ' if lines else ''}numba can't compile this: {what}"


def die_with_parent() -> None:
    """The parent holds our stdin open; when it is gone, however it went, so are we."""
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    serve()
