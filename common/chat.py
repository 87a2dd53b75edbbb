"""`lesson chat`: a conversation with a stage.

The stage runs in a process of its own and makes one token a request. So Ctrl-C stops an answer at once, by asking for
no more, however long the stage is still at it. A stage with a cache is fed only what it has not seen; one without is
fed the whole conversation for each token, which the reader can feel.
"""

import json
import os
import queue
import select
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import NamedTuple

from common import harness
from common.job import ContextError, Job, UsageError
from common.run import write
from common.sampling import Sampler
from common.stage import CPU, load_stage, source_path
from common.tokenizer import TokenizerError

NEW_TOKENS = 512  # of an answer, where -n does not say
ROOM = 4  # a quarter of the context is kept for the answer, unless -n asks for less


def fastest() -> str:
    """The last CPU stage of the ladder."""
    return CPU[-1]


class Stopped(Exception):
    """The reader pressed Ctrl-C while an answer came."""


class Turn(NamedTuple):
    """One message and its answer."""

    user: str
    assistant: str
    prompt_tokens: int  # the whole conversation up to the answer, as the template lays it out
    fed: int  # of these, how many the stage had to compute for the first token
    output_ids: list[int]
    stop_reason: str  # stop token | length | context | interrupted
    dropped: int  # older turns that no longer fit the context

    @property
    def messages(self) -> list[dict]:
        return [{"role": "user", "content": self.user}, {"role": "assistant", "content": self.assistant}]


class Conversation:
    """What was said so far, and how much of it the stage holds in its cache.

    step(ids, start) -> the id after them, which stand at positions start, start + 1, …; cached: whether the stage keeps
    what it was fed, so that start may be more than 0.
    """

    def __init__(self, job: Job, step: Callable[[list[int], int], int], cached: bool, system: str | None = None):
        self.job, self.step, self.cached = job, step, cached
        self.first = [{"role": "system", "content": system}] if system else []
        self.turns: list[Turn] = []
        self.held: list[int] = []  # the ids in the stage's cache

    def ask(self, text: str, say: Callable[[str], None] = lambda text: None) -> Turn:
        """Answer one message; say gets the text as it comes. Raises ContextError, TokenizerError and what step does."""
        ids, dropped = self.prompt(text)
        room = min(self.job.n, self.job.context - len(ids) + 1)  # the last id is chosen and needs no position
        decoder = self.job.tokenizer.stream(ids)
        start = self.reusable(ids) if self.cached else 0
        fed = len(ids) - start
        said, output, reason = [], [], "length" if room == self.job.n else "context"
        try:
            for _ in range(room):
                self.held = self.held[:start]  # a step that is broken off may have written over the rest
                token = self.step((ids + output)[start:], start)
                if self.cached:
                    self.held = ids + output
                    start = len(self.held)
                if token in self.job.stop_ids:
                    reason = "stop token"
                    break
                output.append(token)
                said.append(decoder.push(token))
                say(said[-1])
        except Stopped:
            reason = "interrupted"
        said.append(decoder.flush())
        say(said[-1])
        turn = Turn(text, "".join(said), len(ids), fed, output, reason, dropped)
        if output:
            self.turns.append(turn)
        return turn

    def prompt(self, text: str) -> tuple[list[int], int]:
        """The conversation's ids with text as its last message, and how many of the oldest turns had to go for it."""
        context, dropped = self.job.context, 0
        while True:
            said = [message for turn in self.turns for message in turn.messages]
            ids = self.job.tokenizer.chat([*self.first, *said, {"role": "user", "content": text}])
            if len(ids) + min(self.job.n, context // ROOM) <= context + 1:
                return ids, dropped
            if not self.turns:
                if len(ids) <= context:
                    return ids, dropped
                raise ContextError(
                    f"this message alone is {len(ids)} tokens and the context holds {context}: shorten it"
                    + ("" if context == self.job.gguf.config.context else " or raise --context")
                )
            del self.turns[0]
            dropped += 1

    def reusable(self, ids: list[int]) -> int:
        """How many of ids the cache holds already; the last is fed in any case, since its logits are wanted."""
        same = 0
        for a, b in zip(self.held, ids[:-1], strict=False):
            if a != b:
                break
            same += 1
        return same


# ---- the stage's process ---------------------------------------------------------------------------------------


class Engine:
    """A stage at work in a process of its own; it is gone when the with block ends. Raises RunError where it fails."""

    def __init__(self, stage: str, job: Job):
        self.stage, self.unread, self.buffer = stage, 0, b""
        self.interrupted = False
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed by __exit__)
        self.process = harness.spawn("common.chat", stage, self.errors)
        try:
            self.send(asdict(job.request(stage)))
            self.cached = self.answer()["cached"]
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        self.errors.close()

    def step(self, ids: list[int], start: int) -> int:
        """The id after ids. Raises Stopped once `interrupted` is set; that answer is thrown away when it comes."""
        self.send({"ids": ids, "start": start})
        self.unread += 1
        while True:
            token = self.answer()["token"]
            self.unread -= 1
            if not self.unread:
                return token

    def send(self, message: dict) -> None:
        try:
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            self.fail()

    def answer(self) -> dict:
        """The next line of the process. select, since a read that a signal breaks off could lose half a line."""
        pipe = self.process.stdout.fileno()
        while b"\n" not in self.buffer:
            if self.interrupted:
                raise Stopped
            if select.select([pipe], [], [], 0.1)[0]:
                got = os.read(pipe, 1 << 16)
                if not got:
                    self.fail()
                self.buffer += got
        line, _, self.buffer = self.buffer.partition(b"\n")
        event = json.loads(line)
        if "error" in event:
            raise harness.RunError(event["error"], event["exit_code"])
        return event

    def fail(self):
        raise harness.RunError(f"{self.stage} ended: {harness.last_words(self.process.wait(), self.errors)}")


def serve() -> None:
    """The engine's process: a request on the first line, then ids and their start a line, an id back for each."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all of a terminal's processes; the parent acts on it
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a stage prints must not look like an answer
    lines: queue.SimpleQueue = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            lines.put(json.loads(line))
        os._exit(0)  # the parent is gone, however it went

    def say(event: dict) -> None:
        answers.write(json.dumps(event) + "\n")
        answers.flush()

    threading.Thread(target=listen, daemon=True).start()
    asked = lines.get()
    request = harness.Request(**{**asked, "sampler": Sampler(*asked["sampler"])})
    try:
        for event in steps(request, iter(lines.get, None)):
            say(event)
    except Exception as error:  # a reader's stage may raise anything
        reason, code = harness.explain(error, request.stage)
        say({"error": reason, "exit_code": code})


def steps(request: harness.Request, asked: Iterator[dict]) -> Iterator[dict]:
    """{"cached"} once the stage is loaded, then {"token"} for each {"ids", "start"}."""
    from common.model import open_model

    stage = load_stage(request.stage)
    model = stage.load(open_model(request.model, request.layers), request.context, request.threads)
    choose = request.sampler.chooser() or stage.argmax
    yield {"cached": getattr(model, "cache", None) is not None}
    for message in asked:
        hidden = stage.forward(model, message["ids"], message["start"])
        yield {"token": int(choose(stage.logits(model, hidden[-1:])[0]))}


# ---- the reader's side -----------------------------------------------------------------------------------------


def chat(name: str | None, job: Job, system: str | None, quiet: bool) -> dict:
    """Talk until the input ends. quiet: no answer on stdout. -> the JSON document.

    From a terminal an error of one turn is told and the next turn follows; from a pipe, a turn a line, it is raised.
    """
    from common.show import named

    name, model = name or fastest(), named(job.model_name)
    source_path(name)
    job.tokenizer.chat([{"role": "system", "content": system}] * bool(system) + [{"role": "user", "content": "."}])
    typed = sys.stdin.isatty()
    note = Note()
    note.show(f"loading {model} into {name} …")
    turns = []
    with Engine(name, job) as engine:
        note.clear()
        cached = engine.cached
        if typed:
            note.say(f"{model} on {name}: Ctrl-C stops an answer, twice or Ctrl-D ends")
        talk = Conversation(job, engine.step, cached, system)
        stops = 0  # Ctrl-C since the reader last said something
        for line in messages(typed):
            if line is None:
                stops += 1
            else:
                stops = 0
                try:
                    turn = answered(talk, engine, line, note, quiet)
                    turns.append(turn._asdict())
                    stops = int(turn.stop_reason == "interrupted")
                except (UsageError, TokenizerError) as error:
                    if not typed:
                        raise
                    note.say(str(error))
            if stops > 1:
                raise KeyboardInterrupt
            if stops and line is None:
                note.say("Ctrl-C again or Ctrl-D ends")
    config = job.gguf.config
    return {
        "schema": 1,
        "stage": name,
        "model": {"name": config.name, "layers": config.L, "file_layers": config.file_layers, "sha256": job.sha256},
        "threads": job.threads,
        "context": job.context,
        "sampler": job.sampler._asdict(),
        "system": system,
        "cached": cached,
        "turns": turns,
    }


def answered(talk: Conversation, engine: Engine, line: str, note: "Note", quiet: bool) -> Turn:
    """One turn on the screen."""
    try:
        line.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"the message is not valid UTF-8 at character {error.start}: send it as UTF-8") from None
    wrote = ""

    def say(text: str) -> None:
        nonlocal wrote
        if text:
            note.clear()
            wrote = text
            if not quiet:
                write(text)

    def stop(*_) -> None:
        if engine.interrupted:
            raise KeyboardInterrupt
        engine.interrupted = True

    engine.interrupted = False
    before = signal.signal(signal.SIGINT, stop)
    note.show("reading …")
    try:
        turn = talk.ask(line, say)
    finally:
        signal.signal(signal.SIGINT, before)
        note.clear()
    if not quiet and not wrote.endswith("\n"):
        write("\n")
    if turn.dropped:
        note.tell(f"the context holds {talk.job.context} tokens: the oldest {turn.dropped} turns were left out")
    if turn.stop_reason == "context":
        note.tell(f"the context of {talk.job.context} tokens is full, so the answer ends here")
    note.say(f"{turn.fed} of {turn.prompt_tokens} tokens read, {len(turn.output_ids)} written, {turn.stop_reason}")
    return turn


def messages(typed: bool) -> Iterator[str | None]:
    """What the reader says, without empty lines; None for Ctrl-C at the prompt."""
    sys.stdin.reconfigure(errors="surrogateescape")
    prompt = ""
    if typed and sys.stdout.isatty():
        import contextlib

        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (line editing and history in input)
        prompt = "> "
    while True:
        try:
            line = input(prompt)
        except EOFError:
            if prompt:
                print()
            return
        except KeyboardInterrupt:
            if not typed:
                raise
            print(file=sys.stderr)
            yield None
            continue
        if line.strip():
            yield line


class Note:
    """What the program says beside the conversation, on stderr; what only a person can use, on a terminal alone."""

    def __init__(self):
        self.terminal, self.shown = sys.stderr.isatty(), False

    def show(self, text: str) -> None:
        """Until the next clear."""
        if self.terminal:
            sys.stderr.write(text)
            sys.stderr.flush()
            self.shown = True

    def clear(self) -> None:
        if self.shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self.shown = False

    def say(self, text: str) -> None:
        if self.terminal:
            self.tell(f"({text})")

    def tell(self, text: str) -> None:
        print(text, file=sys.stderr)


if __name__ == "__main__":
    serve()
