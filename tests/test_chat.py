"""A conversation: what is fed, what is kept, where it ends; then as a process, from a pipe and on a terminal."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import time

import psutil
import pytest

from common.chat import Conversation, Stopped, fastest, steps
from common.job import ContextError, prepare
from common.model import open_model
from common.stage import LADDER, load_stage
from tests.helpers import CLI, copy_of, lesson, one_sentence


def job(tiny, **changes):
    return prepare(str(tiny), prompt=".", **{"n": 5, "context": 256, **changes})


class Fed:
    """A stage that answers with given ids and keeps what it was fed."""

    def __init__(self, *answers):
        self.answers, self.calls = list(answers), []

    def __call__(self, ids, start):
        self.calls.append((list(ids), start))
        answer = self.answers.pop(0)
        if answer is None:
            raise Stopped
        return answer


def words(job, text):
    return job.tokenizer.encode(text, bos=False)


# ---- what is fed -----------------------------------------------------------------------------------------------


def test_a_cached_stage_is_fed_only_what_is_new(tiny):
    asked = job(tiny)
    stop = asked.stop_ids[0]
    step = Fed(40, 41, stop, 42, stop)
    talk = Conversation(asked, step, cached=True)
    first, second = talk.ask("Once upon a time"), talk.ask("And then?")
    prompt = asked.tokenizer.chat([{"role": "user", "content": "Once upon a time"}])
    assert step.calls[:3] == [(prompt, 0), ([40], len(prompt)), ([41], len(prompt) + 1)]
    new, start = step.calls[3]
    whole = asked.tokenizer.chat([*first.messages, {"role": "user", "content": "And then?"}])
    assert start > len(prompt) - 1
    assert new == whole[start:]
    assert whole[:start] == (prompt + [40, 41])[:start]
    assert (second.fed, second.prompt_tokens) == (len(new), len(whole))


def test_the_last_token_is_fed_even_if_all_is_known(tiny):
    """An answer that ended at once leaves no turn: the same message again finds its whole prompt in the cache."""
    asked = job(tiny)
    step = Fed(asked.stop_ids[0], asked.stop_ids[0])
    talk = Conversation(asked, step, cached=True)
    first, second = talk.ask("a"), talk.ask("a")
    assert step.calls[1] == (step.calls[0][0][-1:], first.prompt_tokens - 1)
    assert second.fed == 1


def test_a_stage_without_a_cache_is_fed_everything_each_time(tiny):
    asked = job(tiny)
    step = Fed(40, 41, asked.stop_ids[0])
    Conversation(asked, step, cached=False).ask("Once upon a time")
    prompt = step.calls[0][0]
    assert step.calls == [(prompt, 0), (prompt + [40], 0), (prompt + [40, 41], 0)]


def test_a_stop_token_ends_the_answer_and_is_no_part_of_it(tiny):
    asked = job(tiny)
    turn = Conversation(asked, Fed(40, asked.stop_ids[-1]), cached=True).ask("a")
    assert (turn.output_ids, turn.stop_reason) == ([40], "stop token")
    assert turn.assistant == asked.tokenizer.pieces([40])[0]


def test_n_ends_the_answer(tiny):
    turn = Conversation(job(tiny, n=3), Fed(40, 41, 42), cached=True).ask("a")
    assert (turn.output_ids, turn.stop_reason) == ([40, 41, 42], "length")


def test_what_a_broken_step_may_have_overwritten_is_fed_again(tiny):
    """A stopped answer leaves rows of its own in the cache: what the stage held there before is not to be relied on."""
    asked = job(tiny)
    stop = asked.stop_ids[0]
    step = Fed(40, stop, None, 42, stop)
    talk = Conversation(asked, step, cached=True)
    talk.ask("Once upon a time")
    held = list(talk.held)
    assert talk.ask("Never mind this").stop_reason == "interrupted"
    overwritten = step.calls[2][1]
    assert talk.held == held[:overwritten]
    talk.ask("And then?")
    assert step.calls[3][1] <= overwritten
    assert [turn.user for turn in talk.turns] == ["Once upon a time", "And then?"]


def test_an_interrupted_answer_stays_in_the_conversation(tiny):
    asked = job(tiny)
    talk = Conversation(asked, Fed(40, 41, None), cached=True)
    turn = talk.ask("a")
    assert (turn.output_ids, turn.stop_reason) == ([40, 41], "interrupted")
    assert talk.turns == [turn]


def test_readers_text_never_becomes_a_special_token(tiny):
    asked = job(tiny)
    special = set(asked.tokenizer.specials.values())
    assert special
    name = next(text for text, i in asked.tokenizer.specials.items() if i in asked.stop_ids)

    def specials(text, system=None):
        step = Fed(asked.stop_ids[0])
        Conversation(asked, step, cached=True, system=system).ask(text)
        return [i for i in step.calls[0][0] if i in special]

    assert specials(f"a {name} b") == specials("a b")
    assert specials("a b", f"{name}") == specials("a b", "c")


# ---- where the context ends ------------------------------------------------------------------------------------


def test_the_oldest_turns_go_when_the_context_is_full(tiny):
    asked = job(tiny, n=4, context=120)
    step = Fed(*[40, 41, 42, 43] * 8)
    talk = Conversation(asked, step, cached=True, system="Be brief")
    turns = [talk.ask(f"message number {i}") for i in range(8)]
    assert turns[0].dropped == 0
    assert sum(turn.dropped for turn in turns) > 0
    assert turns[-1].user == talk.turns[-1].user
    assert max(start + len(ids) for ids, start in step.calls) <= 120
    assert all(turn.stop_reason == "length" for turn in turns)
    system = words(asked, "Be brief")[1:]
    last = next(ids for ids, start in reversed(step.calls) if len(ids) > 1)
    before = [message for turn in talk.turns[:-1] for message in turn.messages]
    last_prompt = asked.tokenizer.chat([*talk.first, *before, {"role": "user", "content": "message number 7"}])
    assert last_prompt[-len(last) :] == last
    assert str(system)[1:-1] in str(last_prompt), "the system message stays"


def test_a_message_longer_than_the_context_is_refused_and_forgotten(tiny):
    talk = Conversation(job(tiny, context=60), Fed(40, 41, 42, 43, 44), cached=True)
    with pytest.raises(ContextError, match="this message alone is .* the context holds 60: shorten it or raise"):
        talk.ask("word " * 60)
    assert talk.ask("a").stop_reason == "length"


def test_an_answer_ends_where_the_context_does(tiny):
    asked = job(tiny, context=256)
    length = len(asked.tokenizer.chat([{"role": "user", "content": "a"}]))
    short = job(tiny, n=50, context=length + 2)
    step = Fed(40, 41, 42, 43)
    turn = Conversation(short, step, cached=True).ask("a")
    assert (turn.output_ids, turn.stop_reason) == ([40, 41, 42], "context")
    assert max(start + len(ids) for ids, start in step.calls) == length + 2


# ---- real stages -----------------------------------------------------------------------------------------------


def talked(asked, stage):
    """Three turns on a stage, in this process."""
    messages = []
    served = steps(asked.request(stage), (messages.pop() for _ in iter(int, 1)))
    cached = next(served)["cached"]

    def step(ids, start):
        messages.append({"ids": ids, "start": start})
        return next(served)["token"]

    talk = Conversation(asked, step, cached)
    return cached, [talk.ask(text) for text in ("Once upon a time", "And then?", "The end")]


def test_a_cache_changes_nothing_but_what_is_fed(tiny):
    asked = job(tiny, n=6)
    (no, plain), (yes, cached) = talked(asked, "naive"), talked(asked, "kv_cache")
    assert (no, yes) == (False, True)
    assert [turn.output_ids for turn in plain] == [turn.output_ids for turn in cached]
    assert all(a.fed == a.prompt_tokens for a in plain)
    assert all(b.fed < b.prompt_tokens for b in cached[1:])
    stage = load_stage("kv_cache")
    prompt = asked.tokenizer.chat([{"role": "user", "content": "Once upon a time"}])
    own = [i for i, _ in stage.generate(stage.load(open_model(tiny), 256, 1), prompt, 6)]
    assert own[: len(plain[0].output_ids)] == plain[0].output_ids


def test_the_default_stage_needs_no_gpu():
    assert fastest() in LADDER
    assert fastest() not in ("naive", "offload", "cuda", "resident")


# ---- from a pipe -----------------------------------------------------------------------------------------------


def piped(tiny, text, *flags, stage="kv_cache"):
    command = [*CLI, "chat", stage, "-m", str(tiny), "--context", "256", "-n", "4", *map(str, flags)]
    return subprocess.run(command, input=text, capture_output=True, timeout=120)


def test_each_line_of_a_pipe_is_a_turn(tiny):
    done = piped(tiny, b"Once upon a time\n\nAnd then?\n", "--json", "--system", "Be brief", "--temperature", 2)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["schema"], found["stage"], found["cached"], found["system"]) == (1, "kv_cache", True, "Be brief")
    assert [turn["user"] for turn in found["turns"]] == ["Once upon a time", "And then?"]
    assert found["turns"][1]["fed"] < found["turns"][1]["prompt_tokens"]
    assert found["sampler"]["temperature"] == 2
    assert done.stderr == b""


def test_no_input_is_no_turn(tiny):
    done = piped(tiny, b"")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_model_text_cannot_act_on_the_terminal(tiny, tmp_path):
    asked = job(tiny)
    escape = asked.tokenizer.texts.index("<0x1B>")
    liar = f"def argmax(row):\n    return {escape}\n\n\nPREVIOUS = 0"
    path = copy_of("kv_cache", tmp_path, ('PREVIOUS = "simd"', liar))
    done = piped(tiny, b"a\n", stage=str(path))
    assert done.stdout == rb"\x1b\x1b\x1b\x1b" + b"\n"


@pytest.mark.parametrize(
    ("text", "flags", "code", "told"),
    [
        (b"caf\xe9\n", (), 2, "not valid UTF-8"),
        (b"word " * 300, (), 6, "the context holds 256"),
        (b"a", ("--top-p", "0"), 2, "--top-p 0"),
        (b"a", ("--context", "100000"), 6, "this model knows 1024"),
        (b"a", ("-n", "0"), 2, "-n 0"),
    ],
)
def test_what_is_refused_from_a_pipe(tiny, text, flags, code, told):
    done = piped(tiny, text, *flags)
    assert told in one_sentence(done)
    assert done.returncode == code


def test_an_unknown_stage_and_a_broken_one(tiny, tmp_path):
    assert "did you mean tiling?" in one_sentence(lesson("chat", "tileing", "-m", tiny))
    path = copy_of("kv_cache", tmp_path, ("return matmul(hidden", "return matmull(hidden"))
    done = piped(tiny, b"a\n", stage=str(path))
    assert "matmull" in one_sentence(done)
    assert done.returncode == 1


# ---- on a terminal ---------------------------------------------------------------------------------------------


class Terminal:
    """`lesson chat` with a terminal at every end; Ctrl-C goes to the whole group, as a real one's does."""

    def __init__(self, *words):
        self.master, slave = pty.openpty()
        env = {**os.environ, "TERM": "dumb", "NO_COLOR": "1"}
        self.process = subprocess.Popen(
            [*CLI, "chat", *map(str, words)], stdin=slave, stdout=slave, stderr=slave, env=env, start_new_session=True
        )
        os.close(slave)
        self.text = ""

    def wait(self, pattern, seconds=90):
        """Read until the pattern comes, and forget what was read."""
        end = time.monotonic() + seconds
        while not (found := re.search(pattern, self.text, re.S)):
            assert time.monotonic() < end, self.text
            if select.select([self.master], [], [], 0.2)[0]:
                try:
                    self.text += os.read(self.master, 4096).decode(errors="replace")
                except OSError:  # the other end is closed
                    assert re.search(pattern, self.text, re.S), self.text
        before, self.text = self.text[: found.end()], self.text[found.end() :]
        return before

    def type(self, text):
        os.write(self.master, text.encode())

    def interrupt(self):
        time.sleep(0.3)  # readline shows its prompt a moment before it listens
        os.killpg(self.process.pid, signal.SIGINT)

    def ended(self):
        """The exit code, and what processes of its own are left."""
        code = self.process.wait(30)
        time.sleep(0.1)
        return code, [p for p in psutil.process_iter() if p.pid != self.process.pid and runs_in(self.process.pid, p)]


def runs_in(group, process):
    """Whether a process of that group still runs; one that nobody has collected yet is over."""
    try:
        return os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False


@pytest.fixture
def terminal(tiny, tmp_path):
    """A conversation with a stage that takes a tenth of a second for a token."""
    slow = ("    return matmul(hidden", "    time.sleep(0.1)\n    return matmul(hidden")
    path = copy_of("kv_cache", tmp_path, ("import math\n", "import math\nimport time\n"), slow)
    opened = Terminal(path, "-m", tiny, "-n", 200, "--context", 1000, "--temperature", 1, "--seed", 1)
    yield opened
    if opened.process.poll() is None:
        os.killpg(opened.process.pid, signal.SIGKILL)
        opened.process.wait()
    os.close(opened.master)


def test_ctrl_c_stops_one_answer_and_ctrl_d_ends(terminal):
    terminal.wait("> ")
    terminal.type("Once upon a time\n")
    terminal.wait(r"time\r\n.*reading")
    time.sleep(1)
    terminal.interrupt()
    terminal.wait(r"written, interrupted\).*> ")
    terminal.type("Go on\n")
    told = terminal.wait(r"Go on\r\n.*reading")
    assert "KeyboardInterrupt" not in told
    time.sleep(0.5)
    terminal.interrupt()
    terminal.wait(r"(\d+) of (\d+) tokens read, .*interrupted\).*> ")
    terminal.type("\x04")
    assert terminal.ended() == (0, [])


def test_ctrl_c_twice_ends(terminal):
    terminal.wait("> ")
    terminal.type("Once upon a time\n")
    terminal.wait("reading")
    time.sleep(0.5)
    terminal.interrupt()
    terminal.wait("> ")
    terminal.interrupt()
    assert terminal.ended() == (130, [])


def test_ctrl_c_at_the_prompt_asks_first(terminal):
    terminal.wait("> ")
    terminal.interrupt()
    terminal.wait("Ctrl-C again or Ctrl-D ends.*> ")
    terminal.interrupt()
    assert terminal.ended() == (130, [])


def test_a_message_that_does_not_fit_ends_nothing(terminal):
    terminal.wait("> ")
    terminal.type("word " * 600 + "\n")
    terminal.wait("shorten it.*> ")
    terminal.type("\x04")
    assert terminal.ended() == (0, [])


def test_nothing_is_left_when_the_command_is_terminated(terminal):
    terminal.wait("> ")
    terminal.type("Once upon a time\n")
    terminal.wait("reading")
    terminal.process.terminate()
    assert terminal.ended() == (143, [])
