"""From what the reader asked for to what every stage is given: a model file, prompt ids, a number of new tokens."""

import math
import os
import random
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from common import sources
from common.harness import Request
from common.model import ModelFile, open_model
from common.sampling import GREEDY, Sampler

PROMPT = "Once upon a time, there was a little"
NEW_TOKENS = 8
SHAPE = re.compile(r"(?:pp(?P<pp>\d{1,9})(?:\+tg(?P<tg>\d{1,9}))?|tg(?P<only>\d{1,9}))(?:@d(?P<d>\d{1,9}))?")
SHOWN = 60  # characters of a flag's value that an error repeats


class UsageError(Exception):
    """A request that can't be carried out as asked; str(e) is one sentence with the next step."""

    exit_code = 2


class ContextError(UsageError):
    """More tokens than the context holds."""

    exit_code = 6


@dataclass(frozen=True)
class Job:
    """What all stages of one command run on."""

    path: Path
    gguf: ModelFile
    ids: list[int]
    n: int
    context: int
    threads: int
    tokenizer: object | None
    tokenize_ms: float | None
    made_up: bool  # random ids or random weights: the text means nothing
    stop_ids: list[int] = field(default_factory=list)
    sampler: Sampler = GREEDY

    def request(self, stage: str, **changes) -> Request:
        """This job for one stage."""
        return Request(
            **{
                "stage": stage,
                "model": str(self.path),
                "ids": self.ids,
                "n": self.n,
                "layers": self.gguf.config.L if self.cut else None,
                "context": self.context,
                "threads": self.threads,
                "stop_ids": self.stop_ids,
                "sampler": self.sampler,
                **changes,
            }
        )

    @property
    def cut(self) -> bool:
        """Whether fewer layers run than the file has."""
        return self.gguf.config.file_layers > self.gguf.config.L

    @property
    def model_name(self) -> str:
        """'SmolLM2 135M Instruct Q4_1', with ', first 2 of 22 layers' where it is cut."""
        config = self.gguf.config
        name = f"{config.name} {quantization(self.gguf)}"
        return f"{name}, first {config.L} of {config.file_layers} layers" if self.cut else name

    @property
    def shape(self) -> str:
        """The shape by llama-bench's names, 'pp9+tg8'."""
        return f"pp{len(self.ids)}+tg{self.n}"

    @property
    def room(self) -> int:
        """How many of the n new tokens the context holds; the last one needs no position of its own."""
        return min(self.n, self.context - len(self.ids) + 1)

    @cached_property
    def sha256(self) -> str:
        """The digest of the model that is mapped, whatever its path names by now."""
        return self.gguf.gguf.sha256()

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids) if self.tokenizer else ""


def prepare(
    model: str | None = None,
    layers: int | None = None,
    prompt: str | None = None,
    ids: str | None = None,
    shape: str | None = None,
    n: int | None = None,
    context: int | None = None,
    threads: int | None = None,
    sampler: Sampler = GREEDY,
    stages: Iterable[str] = (),
) -> Job:
    """Resolve flags to a Job. Raises UsageError, ContextError, SourceError or GGUFError.

    Where threads are not given there is one, or as many as there are cores if one of the stages shares its work.
    """
    threads = threads or most_threads(stages)
    if sum(x is not None for x in (prompt, ids, shape)) > 1:
        raise UsageError("give one of --prompt, --ids and --shape: each says what the prompt is")
    if n is not None and n < 1:
        raise UsageError(f"-n {n}: at least one new token is needed")
    path = sources.resolve(model)
    try:
        gguf = open_model(path, layers)
    except ValueError as error:
        raise UsageError(f"--layers {layers}: {error}") from error
    if context is not None and context < 1:
        raise UsageError(f"--context {context}: at least one position is needed")
    context = context or gguf.config.context
    if context > gguf.config.context:
        raise ContextError(f"--context {context}: this model knows {gguf.config.context} positions")
    synthetic = gguf.config.name.endswith("random weights")
    tokenizer, tokenize_ms, stop_ids = None, None, []
    if ids is not None:
        prompt_ids = parse_ids(ids, gguf.config.V)
    elif shape is not None or (prompt is None and synthetic):
        count, n = shape_counts(shape or "pp16", n)
        check_fits(count, context, gguf)
        prompt_ids = random_ids(count, gguf.config.V)
    else:
        prompt_ids = None
    if prompt_ids is None or "tokenizer.ggml.model" in gguf.gguf.metadata:
        from common.tokenizer import Tokenizer

        tokenizer = Tokenizer.from_gguf(gguf.gguf)
    if prompt_ids is None:
        text = checked_text(PROMPT if prompt is None else prompt)
        started = time.perf_counter()
        prompt_ids = tokenizer.encode(text)
        tokenize_ms = (time.perf_counter() - started) * 1e3
        stop_ids = sorted(tokenizer.stop_ids)
    check_fits(len(prompt_ids), context, gguf)
    made_up = synthetic or shape is not None
    n = n or NEW_TOKENS
    return Job(path, gguf, prompt_ids, n, context, threads, tokenizer, tokenize_ms, made_up, stop_ids, sampler)


def most_threads(stages: Iterable[str]) -> int:
    """As many as these stages can use: all cores granted, where one has a team; so all run under the same terms."""
    from common.stage import shares_work

    if not any(map(shares_work, stages)):
        return 1
    from common.machine import identify

    return identify().threads


def check_fits(tokens: int, context: int, gguf: ModelFile) -> None:
    if tokens > context:
        raise ContextError(
            f"the prompt is {tokens} tokens and the context holds {context}: shorten it"
            + ("" if context == gguf.config.context else " or raise --context")
        )


def checked_text(text: str) -> str:
    """The prompt, refused where it is empty or was not valid UTF-8 on the command line."""
    if not text:
        raise UsageError("the prompt is empty: give at least one character, or --ids")
    try:
        return os.fsencode(text).decode()  # an argument's bytes, however the locale reads them
    except UnicodeError as error:
        raise UsageError(f"the prompt is not valid UTF-8 at byte {error.start}: give it as --ids") from error


def parse_ids(text: str, V: int) -> list[int]:
    try:
        ids = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(f"--ids {brief(text)}: give token ids separated by commas, such as 1,2,3") from error
    for i in ids:
        if not 0 <= i < V:
            raise UsageError(f"--ids: {brief(i)} is no token of this model, whose vocabulary is 0 to {V - 1}")
    return ids


def parse_shape(text: str, V: int, n: int | None) -> tuple[list[int], int]:
    """'pp64+tg32@d512' -> random ids of depth + prompt, and the number of new tokens."""
    count, new = shape_counts(text, n)
    return random_ids(count, V), new


def shape_counts(text: str, n: int | None) -> tuple[int, int]:
    """'pp64+tg32@d512' -> (576, 32): ids of depth + prompt, new tokens. Raises UsageError."""
    match = SHAPE.fullmatch(text)
    if not match:
        raise UsageError(f"--shape {brief(text)}: give it as pp64, tg32, or pp64+tg32@d512, in up to nine digits each")
    prompt, new, depth = (
        int(found) if found else None for found in (match["pp"], match["tg"] or match["only"], match["d"])
    )
    if prompt == 0 or new == 0:
        raise UsageError(f"--shape {text!r}: counts start at 1")
    if n is not None and new is not None and n != new:
        raise UsageError(f"--shape {text!r} and -n {n} disagree: give one of them")
    return (prompt or 1) + (depth or 0), n or new or 1


def random_ids(count: int, V: int) -> list[int]:
    draw = random.Random(count)  # the same ids for the same shape, so that runs can be paired
    return [draw.randrange(V) for _ in range(count)]


def brief(text: str | int) -> str:
    """A flag's value in an error: quoted where it is text, and cut."""
    text = repr(text)
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"


def quantization(gguf: ModelFile) -> str:
    """The type most weights of its layers are in, 'Q4_K', however many of them run; a mix's own name adds to that."""
    mix = counted(tensor for layer in gguf.weights.layers for tensor in layer)
    return max(mix, key=mix.get)


def quant_mix(gguf: ModelFile) -> dict[str, int]:
    """Weights (elements) by type, for the layers that run."""
    tensors = []
    gguf.weights.map(tensors.append)
    return counted(tensors)


def counted(tensors: Iterable) -> dict[str, int]:
    """Elements by type."""
    mix: dict[str, int] = {}
    for tensor in tensors:
        mix[tensor.type.name] = mix.get(tensor.type.name, 0) + math.prod(tensor.shape)
    return mix
