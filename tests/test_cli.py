"""The command line as its users meet it: a process with arguments, an exit code, and what it says."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest

from common.gguf import read
from common.gguf_writer import write
from common.sources import cache_root
from common.stage import LADDER
from tests.helpers import CLI, ROOT, copy_of, lesson, one_sentence

ESCAPE = b"\x1b"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cli")


@pytest.fixture(scope="module")
def speaking(tiny, folder):
    """The tiny model under a name that does not say that its weights are random, so that its text is shown."""
    gguf = read(tiny)
    tensors = ((name, t.type, t.shape, [bytes(t.raw)]) for name, t in gguf.tensors.items())
    write(folder / "speaking.gguf", {**gguf.metadata, "general.name": "speaking"}, tensors, gguf.value_types)
    return folder / "speaking.gguf"


@pytest.fixture(scope="module")
def ran(speaking, folder):
    """A run of text, as a person sees it."""
    words = ("tiling", "-m", speaking, "-p", "Once upon a time", "-n", 3, "--save", folder / "kept")
    return lesson("run", *words, NO_COLOR=None, COLUMNS=None)


@pytest.fixture(scope="module")
def document(tiny, folder):
    """The JSON of a run by --ids, and its process."""
    words = ("--stage", "naive", "-m", tiny, "--ids", "1,2,3", "-n", 4, "--save-logits", folder / "logits.npy")
    done = lesson("run", *words, "--json", "--save", folder / "json")
    return done, json.loads(done.stdout)


# ---- what is refused, before anything runs ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("run", "tilling", "-m", "MODEL"), 2, "unknown stage 'tilling': did you mean tiling?"),
        (("run", "zzz", "-m", "MODEL"), 2, "known stages: naive, tiling"),
        (("compare", "naive", "nave", "-m", "MODEL"), 2, "did you mean naive?"),
        (("compare", "naive", "-m", "MODEL"), 2, "two stages or more"),
        (("diff", "naive", "tileing"), 2, "did you mean tiling?"),
        (("read", "tileing"), 2, "did you mean tiling?"),
        (("diff", "naive", "FOLDER/broken.py"), 1, "broken.py: line 1: SyntaxError: "),
        (("sweep", "FOLDER/broken.py", "TILE=1", "-m", "MODEL"), 1, "broken.py: line 1: SyntaxError: "),
        (("run", "./missing.py", "-m", "MODEL"), 2, "no file ./missing.py"),
        (("run", "naive", "-m", "MODEL", "-p", ""), 2, "the prompt is empty"),
        (("run", "naive", "-m", "MODEL", "-p", b"caf\xe9"), 2, "not valid UTF-8"),
        (("run", "naive", "-m", "MODEL", "--ids", "1,512"), 2, "512 is no token"),
        (("run", "naive", "-m", "MODEL", "--ids", "1,x"), 2, "separated by commas"),
        (("run", "naive", "-m", "MODEL", "--ids", "1", "-n", "0"), 2, "at least one new token"),
        (("run", "naive", "-m", "MODEL", "--ids", "1", "-p", "a"), 2, "give one of"),
        (("run", "naive", "-m", "MODEL", "--shape", "64"), 2, "give it as pp64"),
        (("run", "naive", "-m", "MODEL", "--layers", "99"), 2, "--layers 99"),
        (("run", "naive", "-m", "MODEL", "--shape", "pp1025"), 6, "1025 tokens and the context holds 1024"),
        (("run", "naive", "-m", "MODEL", "--ids", "1,2,3", "--context", "2"), 6, "raise --context"),
        (("compare", "naive", "tiling", "-m", "MODEL", "--shape", "pp1025", "--json"), 6, "the context holds 1024"),
        (("run", "naive", "-m", "missing.gguf"), 3, "'missing.gguf' does not exist"),
        (("run", "naive", "-m", "FOLDER"), 3, "is a folder"),
        (("run", "naive", "-m", "FOLDER/empty.gguf"), 3, "empty.gguf"),
        (("run", "naive", "-m", "FOLDER/image.gguf"), 3, "image.gguf"),
        (("inspect", "FOLDER/image.gguf"), 3, "image.gguf"),
        (("inspect", "missing.gguf"), 3, "missing.gguf"),
        (("tokenize", "a", "-m", "FOLDER/empty.gguf"), 3, "empty.gguf"),
        (("tokenize", "", "-m", "MODEL"), 2, "empty"),
        (("run", "naive", "-m", "smolm2"), 2, "smollm2"),
    ],
)
def test_refused_in_one_sentence(words, code, told, tiny, folder):
    (folder / "empty.gguf").touch()
    (folder / "broken.py").write_text("def (\n")
    (folder / "image.gguf").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(100))
    words = [w if isinstance(w, bytes) else w.replace("MODEL", str(tiny)).replace("FOLDER", str(folder)) for w in words]
    done = lesson(*words, cwd=folder)
    assert told in one_sentence(done)
    assert done.returncode == code


def test_inspect_takes_a_models_name_as_run_does(folder):
    done = lesson("inspect", "tiny", "--json", LESSON_CACHE=folder / "cache")
    assert json.loads(done.stdout)["header"]["tensors"] == 21


MISUSED = [(), ("run",), ("runn", "naive"), ("run", "naive", "--n"), ("diff", "naive")]
MISUSED += [("run", "naive", "--stage", "tiling")]


@pytest.mark.parametrize("words", MISUSED)
def test_usage_errors_have_exit_code_2_and_no_traceback(words):
    done = lesson(*words)
    assert done.returncode == 2
    assert b"Traceback" not in done.stderr + done.stdout
    assert b"Usage" in done.stderr + done.stdout


def test_a_readers_own_stage_with_an_error_in_it(tiny, tmp_path):
    copy_of("tiling", tmp_path, ("return matmul(hidden", "return matmull(hidden"), ("TILE = 64", "TILE = 64\nprint(1)"))
    done = lesson("run", "./mine.py", "-m", tiny, "--ids", "1,2", "--json", cwd=tmp_path)
    assert done.returncode == 1
    assert re.search(r"mine\.py: line \d+: NameError: name 'matmull' is not defined", one_sentence(done))


# ---- what a run says -------------------------------------------------------------------------------------------


def test_a_run_shows_text_and_times(ran):
    assert ran.returncode == 0, ran.stderr
    shown = ran.stdout.decode()
    assert shown.startswith("Once upon a time")
    assert "time to first token" in shown
    assert "a token after it" in shown
    assert max(map(len, shown[shown.index("time to first") :].splitlines())) <= 80


def test_no_escape_codes_in_a_pipe(ran):
    assert ESCAPE not in ran.stdout + ran.stderr


def test_json_is_one_document_and_nothing_else(document, folder):
    done, found = document
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1
    assert (found["schema"], found["stage"]) == (1, "naive")
    assert found["prompt_ids"] == [1, 2, 3]
    assert len(found["output_ids"]) == 4
    assert found["stop_reason"] == "length"
    assert found["tokenize_ms"] is None
    assert set(found["ttft_ms"]) == set(found["ms_per_token"]) == {"median", "min", "stdev", "samples"}
    assert set(found["inter_token_ms"]) == {"p50", "p90", "p99"}
    assert set(found["page_faults"]) == {"minor", "major"}
    assert {"name", "sha256", "quant", "layers"} <= set(found["model"])
    assert {"ttft_ms", "ms_per_token", "bound_ms_per_token"} <= set(found["expect"])
    assert {"load_ms", "jit_ms", "peak_rss_mb", "machine", "threads", "text"} <= set(found)


def test_ms_per_token_is_the_mean_of_the_gaps(document):
    _, found = document
    (gaps,) = found["gaps_ms"]
    assert len(gaps) == 3
    assert found["ms_per_token"]["median"] == pytest.approx(sum(gaps) / 3)


def test_the_record_is_kept_where_asked(document, folder):
    (kept,) = (folder / "json").rglob("*.json")
    assert json.loads(kept.read_text()) == document[1]


def test_logits_are_kept_where_asked(document, folder):
    import numpy as np

    assert np.load(folder / "logits.npy").shape == (3, 512)


@pytest.mark.parametrize(
    "words", [("list",), ("diff", "naive", "tiling"), ("inspect", "MODEL"), ("tokenize", "a b", "-m", "MODEL")]
)
def test_json_of_the_quick_commands(words, tiny):
    done = lesson(*(w.replace("MODEL", str(tiny)) for w in words), "--json")
    assert done.returncode == 0, done.stderr
    assert "schema" in json.loads(done.stdout)
    assert done.stderr == b""


def test_layers_are_said(tiny, folder):
    words = ("tiling", "-m", tiny, "--ids", "1,2", "-n", 1, "--layers", 1, "--save", folder / "layers")
    done = lesson("run", *words, "--json")
    found = json.loads(done.stdout)
    assert (found["model"]["layers"], found["model"]["file_layers"]) == (1, 2)
    assert (found["ms_per_token"], found["inter_token_ms"]) == (None, None)
    assert "1-layers" in next((folder / "layers").rglob("*.json")).name


def test_model_text_is_never_markup(tmp_path, speaking):
    """A prompt that looks like terminal markup comes out as it is."""
    words = ("tiling", "-m", speaking, "-p", "[bold]a[/bold] [/]", "-n", 1, "--save", tmp_path)
    done = lesson("run", *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode().lstrip().startswith("[bold]a[/bold] [/]")


# ---- pipes, terminals and languages ----------------------------------------------------------------------------


@pytest.mark.parametrize("words", [("read", "naive"), ("diff", "naive", "tiling"), ("list",)])
def test_a_reader_that_goes_away_ends_it_quietly(words):
    for take in ("head -n 1", "true"):
        command = f"{' '.join(CLI)} {' '.join(words)} | {take}; exit ${{PIPESTATUS[0]}}"
        done = subprocess.run(["bash", "-c", command], capture_output=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, b""), take


def test_list_names_the_ladder():
    done = lesson("list")
    assert all(name in done.stdout.decode() for name in LADDER)
    assert ESCAPE not in done.stdout


@pytest.mark.parametrize("name", LADDER)
def test_read_gives_the_file_itself(name):
    """`lesson read naive > mine.py` is how a stage of one's own begins."""
    assert lesson("read", name).stdout.decode().rstrip() == (ROOT / "stages" / f"{name}.py").read_text().rstrip()


def test_colour_on_a_terminal_unless_no_color_says_no():
    coloured = on_terminal("diff", "naive", "tiling", TERM="xterm-256color", NO_COLOR=None)
    assert re.search(rb"\x1b\[[0-9;]*3[0-9]", coloured)
    plain = on_terminal("diff", "naive", "tiling", TERM="xterm-256color", NO_COLOR="1")
    assert not re.search(rb"\x1b\[[0-9;]*[34][0-9]", plain)


def on_terminal(*words, **env):
    """What a command writes to a terminal."""
    import pty

    master, slave = pty.openpty()
    surroundings = {k: v for k, v in {**os.environ, **env}.items() if v is not None}
    process = subprocess.Popen([*CLI, *words], stdin=slave, stdout=slave, stderr=slave, env=surroundings)
    os.close(slave)
    found = b""
    while True:
        try:
            part = os.read(master, 1 << 16)
        except OSError:  # Linux says so when the last writer is gone
            break
        if not part:
            break
        found += part
    os.close(master)
    assert process.wait(60) == 0
    return found


def test_an_ascii_terminal_shows_what_it_can(tiny, speaking, tmp_path):
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": None}
    for words in (("list",), ("diff", "naive", "tiling"), ("read", "naive")):
        done = lesson(*words, **ascii_only)
        assert (done.returncode, done.stderr) == (0, b""), words
    words = ("tiling", "-m", speaking, "-p", "Once", "-n", 2, "--save", tmp_path)
    done = lesson("run", *words, **ascii_only)
    assert done.returncode == 0, done.stderr
    assert b"time to first token" in done.stdout
    words = ("tiling", "-m", tiny, "--ids", "1,2", "-n", 1, "--save", tmp_path, "--json")
    assert json.loads(lesson("run", *words, **ascii_only).stdout)["stage"] == "tiling"


# ---- places that can't be written ------------------------------------------------------------------------------


def test_a_package_folder_that_cannot_be_written(tiny, tmp_path):
    """A file where each __pycache__ would be: not even root can write compiled code beside the source."""
    package = tmp_path / "package"
    for part in ("common", "stages"):
        shutil.copytree(ROOT / part, package / part, ignore=shutil.ignore_patterns("__pycache__"))
        for place in [package / part, *(p for p in (package / part).rglob("*") if p.is_dir())]:
            (place / "__pycache__").touch()
    shutil.copy(ROOT / "cli.py", package)
    command = [sys.executable, str(package / "cli.py"), "run", "tiling", "-m", str(tiny), "--ids", "1,2", "-n", "1"]
    env = {**os.environ, "XDG_DATA_HOME": str(tmp_path / "data")}
    done = subprocess.run([*command, "--json"], capture_output=True, env=env, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["commit"] is None
    assert list((tmp_path / "data").rglob("*.json"))  # outside a clone, records go to the user's data folder
    assert not (package / "reports").exists()


def test_a_cache_that_cannot_be_written(tiny, tmp_path):
    """Files where its folders would be; only what was measured of this machine can be read."""
    cache = tmp_path / "cache"
    cache.mkdir()
    for part in ("numba", "reference", "models"):
        (cache / part).touch()
    (cache / "machine").symlink_to(cache_root() / "machine")
    words = ("tiling", "-m", tiny, "--ids", "1,2", "-n", 1, "--json", "--save", tmp_path / "kept")
    done = lesson("run", *words, LESSON_CACHE=str(cache))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["stage"] == "tiling"
    assert done.stderr.count(b"compiles anew") == 1, done.stderr


def test_no_cache_at_all(tiny, tmp_path):
    (tmp_path / "file").touch()
    nowhere = str(tmp_path / "file" / "cache")
    for words in (("list",), ("tokenize", "a", "-m", tiny), ("diff", "naive", "tiling")):
        done = lesson(*words, LESSON_CACHE=nowhere)
        assert done.returncode == 0, done.stderr
        assert b"Traceback" not in done.stderr
    done = lesson("pull", "smollm2", LESSON_CACHE=nowhere)
    assert done.returncode == 1
    assert "cannot write" in one_sentence(done)


@pytest.mark.parametrize("flag", ["--save", "--save-logits"])
def test_a_place_for_results_that_cannot_be_written(flag, tiny, tmp_path):
    (tmp_path / "file").touch()
    places = {"--save": tmp_path / "kept", flag: tmp_path / "file" / "x.npy"}
    words = [word for pair in places.items() for word in pair]
    done = lesson("run", "tiling", "-m", tiny, "--ids", "1,2", "-n", 1, "--json", *words)
    assert done.returncode == 1
    assert str(tmp_path / "file") in one_sentence(done)


# ---- interrupted -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "number", "to_group", "code"),
    [
        ("run", signal.SIGINT, True, 130),  # Ctrl-C reaches the whole group
        ("run", signal.SIGINT, False, 130),
        ("run", signal.SIGTERM, False, 143),
        ("compare", signal.SIGINT, True, 130),
    ],
)
def test_interrupted_with_no_orphan(command, number, to_group, code, tiny, tmp_path):
    note = f"open({str(tmp_path / 'pid')!r}, 'w').write(str(__import__('os').getpid()))"
    wait = f"{note}; __import__('time').sleep(600)"
    path = copy_of("tiling", tmp_path, ("hidden = forward(model, ids, 0)", wait))
    stages = [str(path)] if command == "run" else [str(path), "tiling"]
    words = [*stages, "-m", str(tiny), "--ids", "1,2", "-n", "2", "--save", str(tmp_path / "kept")]
    process = subprocess.Popen(
        [*CLI, command, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    worker = psutil.Process(int(patiently(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())))
    (os.killpg if to_group else os.kill)(process.pid, number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == code, said
    assert b"Traceback" not in said
    patiently(lambda: not worker.is_running())
    assert list((tmp_path / "kept").rglob("*.json")) == []


def patiently(found):
    """What found() gives once it is true; a minute is far more than it needs."""
    for _ in range(600):
        value = found()
        if value:
            return value
        time.sleep(0.1)
    return pytest.fail("it never came")


@pytest.mark.parametrize("said", ["32 GiB", ""])
def test_too_little_memory_is_one_sentence(said):
    code = f"""
import cli, common.gguf
def read(path): raise MemoryError({said!r})
common.gguf.read = read
cli.app(["inspect", "x"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=ROOT, timeout=60)
    assert f"too little memory ({said or 'an allocation failed'})" in one_sentence(done)
    assert done.returncode == 1


def test_help_imports_none_of_the_course():
    code = "import sys, cli; from typer.testing import CliRunner; r = CliRunner().invoke(cli.app, ['run', '--help'])\n"
    code += "assert r.exit_code == 0, r.output\n"
    code += "print([m for m in sys.modules if m.split('.')[0] in ('common', 'stages', 'numba', 'numpy', 'scipy')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_the_list_waits_for_no_compiler():
    code = "import sys, cli; from typer.testing import CliRunner; r = CliRunner().invoke(cli.app, ['list'])\n"
    code += "assert r.exit_code == 0, r.output\n"
    code += "print([m for m in ('numba', 'llvmlite', 'scipy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


# ---- a GPU stage where there is no GPU -------------------------------------------------------------------------


NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


def test_a_gpu_stage_without_a_gpu_is_one_sentence(tiny):
    done = lesson("run", "cuda", "-m", tiny, "--json", **NO_GPU)
    assert done.returncode == 4
    assert "GPU" in one_sentence(done)


def test_a_comparison_shows_what_was_recorded_of_a_gpu_stage(tiny, tmp_path):
    words = ("compare", "quantized", "cuda", "-m", tiny, "--ids", "1,2", "-n", 2, "--budget", 1)
    done = lesson(*words, "--save", tmp_path, "--json", **NO_GPU)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    here, away = found["stages"]
    assert here["ttft_ms"]["median"] > 0
    assert away["ttft_ms"] is None and "GPU" in away["missing"]
    assert [record["stage"] for record in found["recorded"]] == ["cuda"]
    assert not list(tmp_path.rglob("*.json"))  # half a comparison is no record
