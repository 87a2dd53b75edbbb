"""The command line: one small function per command, no logic."""

import functools
import json
import os
import signal
import sys
from inspect import Signature, signature
from typing import Annotated, NewType

import typer
from typer.core import TyperGroup

BROKEN_PIPE, UNEXPECTED, INTERRUPTED, TERMINATED = 0, 1, 130, 143


class Commands(TyperGroup):
    """Turns every error into one sentence and its documented exit code."""

    def invoke(self, ctx):
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(errors="replace")  # a terminal that can't show a character still shows the rest
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except BrokenPipeError:  # the reader went away, as `| head` does; nothing is left to say
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(BROKEN_PIPE)
        except KeyboardInterrupt:
            sys.exit(INTERRUPTED)
        except MemoryError as error:  # of what this process computes itself, such as the reference
            print(
                f"lesson: there is too little memory ({str(error) or 'an allocation failed'}): try a smaller model",
                file=sys.stderr,
            )
            sys.exit(UNEXPECTED)
        except Exception as error:
            if not hasattr(error, "exit_code") or isinstance(error, (typer.Exit, typer.Abort)) or is_usage(error):
                raise
            print(f"lesson: {error}", file=sys.stderr)
            sys.exit(error.exit_code)


def is_usage(error: Exception) -> bool:
    return hasattr(error, "show")  # the option parser's own, which it prints with the usage line


app = typer.Typer(
    cls=Commands,
    rich_markup_mode=None,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

StageName = Annotated[str | None, typer.Argument(metavar="STAGE", help="A stage's name, or the path of your own .py.")]
StageOption = Annotated[str | None, typer.Option("--stage", help="The same as the bare name.")]
Model = Annotated[
    str | None,
    typer.Option("--model", "-m", envvar="LESSON_MODEL", help="smollm2 (default), tinyllama-shape, … or a GGUF file."),
]
Layers = Annotated[int | None, typer.Option("--layers", min=1, help="Run the first N layers only.")]
Prompt = Annotated[str | None, typer.Option("--prompt", "-p", help="Text to go on from.")]
Ids = Annotated[str | None, typer.Option("--ids", help="The prompt as token ids: 1,2,3.")]
Shape = Annotated[str | None, typer.Option("--shape", help="Random ids by llama-bench's names: pp64+tg32.")]
New = Annotated[int | None, typer.Option("-n", help="New tokens (default 8).")]
Context = Annotated[
    int | None, typer.Option("--context", min=1, envvar="LESSON_CONTEXT", help="Positions to allocate for.")
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        "-t",
        envvar="LESSON_THREADS",
        min=1,
        help="Default: all cores, if a stage shares its work; else 1.",
    ),
]
Budget = Annotated[float, typer.Option("--budget", min=1, help="Seconds of timed work a stage.")]
Temperature = Annotated[
    float | None, typer.Option("--temperature", help="0 (default) takes the first choice; above, tokens are drawn.")
]
TopK = Annotated[int | None, typer.Option("--top-k", help="Draw from the K most likely.")]
TopP = Annotated[float | None, typer.Option("--top-p", help="Draw from the fewest that have this probability.")]
MinP = Annotated[float | None, typer.Option("--min-p", help="Draw from those at least this share as likely.")]
Seed = Annotated[int | None, typer.Option("--seed", help="Of the draws; drawn itself and recorded where not given.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else.")]
Save = Annotated[str | None, typer.Option("--save", metavar="DIR", help="Keep the record there.")]

# What says on what a stage runs, and how its tokens are drawn: flags that a command takes as one dictionary.
Job, Draw = NewType("Job", dict), NewType("Draw", dict)
FLAGS = {
    Job: {
        "model": Model, "layers": Layers, "prompt": Prompt, "ids": Ids, "shape": Shape, "n": New, "context": Context,
        "threads": Threads,
    },
    Draw: {"temperature": Temperature, "top_k": TopK, "top_p": TopP, "min_p": MinP, "seed": Seed},
}  # fmt: skip


def command(function):
    """As app.command(), for a function with a parameter of type Job or Draw: those flags stand in its place."""
    parameters = signature(function).parameters.values()
    groups = {p.name: FLAGS[p.annotation] for p in parameters if p.annotation in FLAGS}

    @functools.wraps(function)
    def called(**given):
        taken = {group: {flag: given.pop(flag) for flag in flags} for group, flags in groups.items()}
        return function(**given, **taken)

    def spread(p):
        flags = groups.get(p.name)
        return [p.replace(name=f, annotation=flags[f], default=None) for f in flags] if flags else [p]

    called.__signature__ = Signature([flag for p in parameters for flag in spread(p)])
    return app.command()(called)


@app.callback()
def main() -> None:
    """How LLM inference is made fast, told as runnable code."""


@app.command("list")
def list_stages(
    ladder: Annotated[str | None, typer.Argument(metavar="LADDER", help="A kernel ladder, such as gemm.")] = None,
    as_json: Json = False,
) -> None:
    """The ladder: every stage, its idea, and what it is built on."""
    from common import catalog

    out(as_json, catalog.document(ladder), catalog.render)


@command
def run(
    stage: StageName = None,
    stage_option: StageOption = None,
    job: Job = None,
    budget: Annotated[float | None, typer.Option("--budget", min=1, help="Stop after so many seconds.")] = None,
    save_logits: Annotated[
        str | None, typer.Option(metavar="FILE.npy", help="Logits of every prompt position.")
    ] = None,
    cold: Annotated[bool, typer.Option("--cold", help="Evict the file first; count page faults.")] = False,
    draw: Draw = None,
    as_json: Json = False,
    save: Save = None,
) -> None:
    """Run one stage on a prompt: its text, TTFT and ms/token."""
    from common import run as running
    from common import show
    from common.sampling import sampler
    from common.stage import require

    name = one(stage, stage_option)
    require(name)
    ready = prepared(**job, sampler=sampler(**draw), stages=[name])
    if cold:
        from common import cold as freezing

        return out(as_json, freezing.cold(name, ready, save), freezing.render)
    return out(as_json, running.run(name, ready, budget, save_logits, as_json, save), show.run_result)


@command
def compare(
    stages: Annotated[
        list[str] | None, typer.Argument(metavar="A B …", help="Stages, each against the one before it; llama.cpp too.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="The whole ladder, each stage against its PREVIOUS.")] = False,
    grid: Annotated[bool, typer.Option("--grid", help="These ideas with and without each other.")] = False,
    job: Job = None,
    budget: Budget = 60.0,
    as_json: Json = False,
    save: Save = None,
) -> None:
    """What changed between stages, what that should be worth, and what it is worth."""
    from common import compare as comparing
    from common import kernel_commands as kernels

    if grid:
        from common import grid as gridding

        ideas = gridding.checked(stages or [])
        return out(as_json, gridding.grid(ideas, prepared(**job), budget, save), gridding.render)
    if every:
        from common import climb
        from common.stage import CPU

        if stages:
            raise typer.BadParameter("--all takes the whole ladder: name no stages beside it")
        return out(as_json, climb.climb(prepared(**job, stages=CPU), budget, save), climb.render)
    names = comparing.checked(stages or [])
    if kernels.checked(names, **{flag: job[flag] for flag in ("shape", "layers", "prompt", "ids", "n")}):
        if not as_json:
            paint(comparing.introduction(names, ops=()))
        return out(as_json, kernels.compare(names, job["shape"], budget, save), kernels.result)
    ready = prepared(**job, stages=names)
    if not as_json:
        paint(comparing.introduction(names))
    return out(as_json, comparing.compare(names, ready, budget, save), comparing.result)


@app.command()
def diff(
    a: Annotated[str, typer.Argument(metavar="A")],
    b: Annotated[str, typer.Argument(metavar="B")],
    side_by_side: Annotated[bool, typer.Option("--side-by-side", "-y", help="Two columns.")] = False,
    as_json: Json = False,
) -> None:
    """The definitions that differ between two stages."""
    from common import diff as diffing
    from common import show

    out(as_json, diffing.document(a, b), lambda _: show.stage_diff(a, b, side_by_side))


@app.command()
def sweep(
    stage: Annotated[str, typer.Argument(metavar="STAGE")],
    setting: Annotated[
        str, typer.Argument(metavar="NAME=2,4,8", help="A constant of the stage, or threads, or depth, and its values.")
    ],
    model: Model = None,
    layers: Layers = None,
    prompt: Prompt = None,
    ids: Ids = None,
    shape: Shape = None,
    threads: Threads = None,
    as_json: Json = False,
    save: Save = None,
) -> None:
    """A stage at several values of a constant, of threads or of depth: is it still right, and how fast?"""
    from common import kernel_commands as kernels
    from common import sweep as sweeping

    curve = sweeping.curve_of(setting)
    if curve:
        job = prepared(model, layers, prompt, ids, shape or sweeping.CURVES[curve], threads=threads, stages=[stage])
        return out(as_json, sweeping.curve(stage, setting, job, save), sweeping.render_curve)

    sweeping.parse(stage, setting)
    if kernels.checked([stage], shape, layers=layers, prompt=prompt, ids=ids):
        return out(as_json, kernels.sweep(stage, setting, shape, save), kernels.render)
    job = prepared(model, layers, prompt, ids, shape, threads=threads, stages=[stage])
    return out(as_json, sweeping.sweep(stage, setting, job, save), sweeping.render)


@app.command()
def read(
    stage: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", help="A stage, a rung, a kernel ladder, or a chapter: start, two-numbers, glossary, …"
        ),
    ] = None,
    stage_option: StageOption = None,
) -> None:
    """Print a stage's module, a kernel ladder's page, or a general chapter."""
    from common import show
    from common.stage import readable

    path = readable(one(stage, stage_option))
    text = show.prose(path) if path.suffix == ".md" else path.read_text("utf-8")
    if sys.stdout.isatty():
        paint(show.page(path, text))
    else:
        print(text, end="")


@command
def chat(
    stage: StageName = None,
    stage_option: StageOption = None,
    model: Model = None,
    layers: Layers = None,
    system: Annotated[str | None, typer.Option("--system", help="What the model is told first.")] = None,
    n: Annotated[int | None, typer.Option("-n", help="New tokens an answer (default 512).")] = None,
    context: Context = None,
    threads: Threads = None,
    draw: Draw = None,
    as_json: Json = False,
) -> None:
    """Talk with a model on any stage; Ctrl-C stops an answer. From a pipe, each line is a turn."""
    from common import chat as talking
    from common.sampling import sampler

    named = one(stage, stage_option) if stage or stage_option else None
    new = talking.NEW_TOKENS if n is None else n
    job = prepared(
        model,
        layers,
        ".",
        n=new,
        context=context,
        threads=threads,
        sampler=sampler(**draw),
        stages=[named] if named else [],
    )
    out(as_json, talking.chat(named, job, system, as_json), lambda _: [])


@app.command("break")
def plant(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Which bug; without one, the list.")] = None,
    reveal: Annotated[bool, typer.Option("--reveal", help="Show what was changed, and why it looked so.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Write the file anew.")] = False,
    as_json: Json = False,
) -> None:
    """Plant a real bug in a copy for you to find, seen from outside first."""
    from common import bugs

    if name is None:
        return out(as_json, bugs.listing(), bugs.render)
    return out(as_json, bugs.reveal(name) if reveal else bugs.plant(name, force), bugs.render)


@app.command()
def quality(
    stages: Annotated[list[str], typer.Argument(metavar="STAGE …", help="Stages, all on the same text.")],
    model: Model = None,
    text: Annotated[str | None, typer.Option("--text", metavar="FILE", help="A UTF-8 text of your own.")] = None,
    tokens: Annotated[int | None, typer.Option("--tokens", min=1, help="Of the text (default 2048).")] = None,
    threads: Threads = None,
    budget: Annotated[float, typer.Option("--budget", min=1, help="Seconds a stage.")] = 120.0,
    as_json: Json = False,
    save: Save = None,
) -> None:
    """Perplexity, KL divergence from the reference and same top token, on a text."""
    from common import quality as scoring

    job = prepared(model, threads=threads, stages=stages)
    out(as_json, scoring.quality(stages, job, text, tokens, budget, save), scoring.render)


@command
def predict(
    stage: StageName = None,
    stage_option: StageOption = None,
    ttft: Annotated[
        float | None, typer.Option("--ttft", help="TTFT: how many times as fast as the stage before.")
    ] = None,
    ms_per_token: Annotated[float | None, typer.Option("--ms-per-token", help="The same for a token after it.")] = None,
    estimate: Annotated[bool, typer.Option("--estimate", help="Show first what the course expects.")] = False,
    job: Job = None,
    budget: Budget = 60.0,
    as_json: Json = False,
    save: Save = None,
) -> None:
    """Say how much a stage gains on the one before it, then measure: how far off were you, and what decides?"""
    from common import practice as practising
    from common.stage import source_path

    name = one(stage, stage_option)
    source_path(name)
    ready = prepared(**job, stages=[name])
    said = practising.asked_ratios(name, ready, ttft, ms_per_token, estimate)
    out(as_json, practising.predict(name, ready, said, budget, save), practising.scored)


@app.command()
def practice(
    stage: StageName = None,
    stage_option: StageOption = None,
    force: Annotated[bool, typer.Option("--force", help="Begin anew, over what is there.")] = False,
    as_json: Json = False,
) -> None:
    """Write practice/STAGE.py: the stage before it, with what this stage changes left for you to write."""
    from common import practice as practising

    name = one(stage, stage_option)
    path = practising.write(name, force)
    out(as_json, practising.written(name, path), practising.next_steps)


PracticeFile = Annotated[
    str | None, typer.Argument(metavar="FILE", help="A practice file; the one saved last where none is named.")
]


@app.command()
def check(
    file: PracticeFile = None,
    quick: Annotated[bool, typer.Option("--quick", help="Only whether it is right, on small models.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Check again after each save.")] = False,
    model: Model = None,
    layers: Layers = None,
    shape: Shape = None,
    as_json: Json = False,
) -> None:
    """Is your practice file right, and fast enough? Exit code 0 where it is both, 5 where not."""
    from common import check as checking

    flags = {"model": model, "layers": layers, "shape": shape}
    checking.command(file, flags, quick, watch, as_json, lambda document: out(as_json, document, checking.render))


@app.command()
def hint(
    file: PracticeFile = None,
    show_answer: Annotated[bool, typer.Option("--show-answer", help="The course's own code, with every hint.")] = False,
    as_json: Json = False,
) -> None:
    """One more hint to a practice file each time; after the last, the answer itself if you say so."""
    from common import practice as practising

    path = practising.chosen(file)
    out(as_json, practising.hint(path, practising.confirmed(path, show_answer)), practising.told)


@command
def profile(
    stage: StageName = None,
    stage_option: StageOption = None,
    job: Job = None,
    ncu: Annotated[bool, typer.Option("--ncu", help="A GPU stage: Nsight Compute's counters too.")] = False,
    as_json: Json = False,
    save: Save = None,
) -> None:
    """Where a stage's time goes, op by op, and what keeps it from the bound."""
    from common import profile as profiling

    name = one(stage, stage_option)
    out(as_json, profiling.profile(name, prepared(**job, stages=[name]), save, ncu), profiling.render)


@app.command()
def explain(
    stage: Annotated[str, typer.Argument(metavar="STAGE")],
    op: Annotated[str, typer.Argument(metavar="OP")],
    asm: Annotated[bool, typer.Option("--asm", help="The hottest loop's instructions.")] = False,
    stress: Annotated[
        str | None, typer.Option("--stress", metavar="compute|bytes|both", help="Double one resource, hold the other.")
    ] = None,
    model: Model = None,
    layers: Layers = None,
    prompt: Prompt = None,
    ids: Ids = None,
    shape: Shape = None,
    as_json: Json = False,
    save: Save = None,
) -> None:
    """What the compiler made of an op, or which limit it runs into."""
    from common import explain as explaining

    job = prepared(model, layers, prompt, ids, shape)
    out(as_json, explaining.explain(stage, op, job, stress, save), lambda found: explaining.render(found, asm))


@app.command()
def roofline(
    stage: StageName = None,
    tokens: Annotated[str | None, typer.Option(metavar="1..64", help="Measure STAGE at these prompt lengths.")] = None,
    model: Model = None,
    layers: Layers = None,
    threads: Threads = None,
    measure: Annotated[bool, typer.Option("--measure", help="Measure this machine again.")] = False,
    as_json: Json = False,
    save: Save = None,
) -> None:
    """This machine's roofs, and the bound they set for a model; with a stage, ms against tokens."""
    from common import roofs

    document = roofs.document(
        prepared(model, layers, threads=threads, stages=[stage] if stage else []), stage, tokens, measure, save
    )
    out(as_json, document, roofs.render)


@app.command()
def record(
    stages: Annotated[list[str], typer.Argument(metavar="STAGE …", help="Stages, or llama.cpp.")],
    models: Annotated[
        list[str] | None,
        typer.Option("--model", "-m", help="Again for each model (default: tinyllama-shape, smollm2)."),
    ] = None,
    threads: Threads = None,
    budget: Annotated[float, typer.Option("--budget", min=1, help="Seconds of timed work a shape.")] = 60.0,
    as_json: Json = False,
    save: Save = None,
) -> None:
    """Measure all that is kept of a stage: shapes, profile, faults, memory, machine code."""
    from common import stage_record as recording

    models = models or list(recording.MODELS)
    out(as_json, recording.record(stages, models, threads, budget, save), recording.render)


@app.command("import")
def bring_in(
    file: Annotated[str, typer.Argument(metavar="FILE", help="What `llama-bench -o json` wrote.")],
    model: Model = None,
    threads: Annotated[int | None, typer.Option("--threads", "-t", min=1, help="What it must have used.")] = None,
    shape: Annotated[str | None, typer.Option("--shape", help="Only these rows: pp64+tg32.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Run llama.cpp here at the same shapes.")] = False,
    as_json: Json = False,
    save: Save = None,
) -> None:
    """Keep llama-bench's rows as records, for a comparison to show beside its own."""
    from pathlib import Path

    from common import llama_bench

    job = prepared(model, shape="pp1")
    out(as_json, llama_bench.bring_in(Path(file), job, threads, shape, check, save), llama_bench.render)


@app.command()
def report(
    folder: Annotated[str, typer.Option("--out", metavar="DIR", help="Where page, report.md and plots go.")] = "report",
    refill: Annotated[bool, typer.Option("--chapters", help="README and chapters only: no page, no plots.")] = False,
) -> None:
    """Write what README and chapters show of code and records anew, then a page, and report.md with plots."""
    from pathlib import Path

    from common import chapters
    from common import report as reporting

    for path in chapters.refresh():
        print(path.relative_to(chapters.ROOT))
    for path in [] if refill else reporting.write(Path(folder)):
        print(path)


@app.command()
def verify(as_json: Json = False) -> None:
    """Check every number in README and chapters against its formula, and find those that have none."""
    from common import verify as verifying

    document = verifying.document()
    out(as_json, document, verifying.render)
    if not document["holds"]:
        raise typer.Exit(UNEXPECTED)


@app.command()
def inspect(file: Annotated[str, typer.Argument(metavar="FILE")], as_json: Json = False) -> None:
    """A GGUF file's three regions: header, metadata, tensor table."""
    from common import inspect as inspecting
    from common import show, sources
    from common.gguf import read

    gguf = read(sources.named(file))
    if as_json:
        out(as_json, inspecting.document(gguf), None)
    else:
        inspecting.show(gguf, show.console())


@app.command()
def tokenize(
    text: Annotated[str, typer.Argument(metavar="TEXT")], model: Model = None, as_json: Json = False
) -> None:  # fmt: skip
    """A text's pieces and token ids."""
    from common import sources
    from common.gguf import read
    from common.job import checked_text
    from common.tokenizer import Tokenizer, report, report_text

    tokenizer = Tokenizer.from_gguf(read(sources.resolve(model)))
    document = report(tokenizer, checked_text(text))
    out(as_json, document, lambda found: [report_text(tokenizer, text, found)])


@app.command()
def pull(name: Annotated[str, typer.Argument(metavar="MODEL", help="smollm2 or tinyllama")] = "smollm2") -> None:
    """Fetch a model into the cache, checked to the byte."""
    from common import sources

    print(sources.pull(name))


@app.command()
def synth(
    output: Annotated[str, typer.Option("-o", metavar="FILE", help="Where to write it.")],
    shape: Annotated[str | None, typer.Argument(metavar="SHAPE", help="tinyllama, smollm2 or tiny")] = None,
    quant: Annotated[str, typer.Option(help="q4_k_m, q4_0, q4_1, q8_0, …")] = "q4_k_m",
    source: Annotated[str | None, typer.Option("--from", metavar="FILE", help="Requantize this file instead.")] = None,
    layers: Annotated[int | None, typer.Option("--layers")] = None,
    seed: Annotated[int, typer.Option("--seed")] = 0,
) -> None:
    """Write a model file: a known shape with random weights, or a real one in other blocks."""
    from pathlib import Path

    from common import sources
    from common import synth as making

    if bool(shape) == bool(source):
        raise typer.BadParameter("give a shape (tinyllama, smollm2, tiny) or --from FILE, one of them")
    if source:
        print(making.requantize(sources.resolve(source), quant, Path(output)))
    else:
        print(making.synth(shape, quant, Path(output), layers, seed))


@app.command()
def doctor(model: Model = None, as_json: Json = False) -> None:
    """What this machine has, and what to do about what it lacks."""
    from common import doctor as examining

    out(as_json, examining.report(model), lambda found: [examining.render(found)])


def one(stage: str | None, option: str | None) -> str:
    """The stage, named bare or with --stage."""
    if stage and option and stage != option:
        raise typer.BadParameter(f"{stage} and --stage {option} name two stages: give one")
    if not (stage or option):
        raise typer.BadParameter("name a stage, such as naive; `lesson list` shows them")
    return stage or option


def prepared(*flags, **named):
    from common.job import prepare

    return prepare(*flags, **named)


def out(as_json: bool, document: dict, render) -> None:
    """Print a document as it is, or as a person reads it."""
    if as_json:
        print(json.dumps(document, ensure_ascii=True, allow_nan=False))
    else:
        paint(render(document))


def paint(shown) -> None:
    from common.show import console

    page = console()
    for piece in shown:
        page.print(piece)


if __name__ == "__main__":
    app()
