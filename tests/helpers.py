"""What several test files need: stages in temporary copies, and the command line as a process."""

import os
import struct
import subprocess
import sys
from array import array
from pathlib import Path

import numpy as np

from common.gguf import TYPES, Strings

ROOT = Path(__file__).parent.parent
CLI = [sys.executable, str(ROOT / "cli.py")]


def weight(stage, array):  # (K, N) float32
    """The array as the stage's matmul takes it, and the float64 (K, N) that this stands for."""
    exact = array.astype(np.float64)
    if not hasattr(stage, "Blocks"):
        return np.ascontiguousarray(array), exact
    K, N = array.shape
    raw = np.ascontiguousarray(array.T).reshape(-1).view(np.uint8)  # a row of float32 is one block
    return stage.Blocks(N, K, TYPES["F32"].id, K, 4 * K, raw), exact


def rounded_exactly(x, w, b, loud):
    """x (T, K) times w (N, K) plus b in int8 arithmetic, nothing else rounded: in float64, from a step for each row.

    `loud` are the channels that keep their precision.
    """
    x, w = x.astype(np.float32), w.astype(np.float32)
    kept = x[:, loud].astype(np.float64) @ w[:, loud].astype(np.float16).astype(np.float64).T
    x, w = x.copy(), w.copy()
    x[:, loud], w[:, loud] = 0, 0
    top, most = abs(x).max(1, keepdims=True), abs(w).max(1)
    p = np.rint(x * np.where(top > 0, np.float32(127) / np.where(top > 0, top, 1), 0)).astype(np.float64)
    steps = np.where(most > 0, most, 1).astype(np.float32) / np.float32(127)
    q = np.rint(w / steps[:, None]).astype(np.float64)
    return p @ q.T * (top / np.float32(127)) * steps[None, :] + kept + b.astype(np.float64)


class Settings(dict):
    """Metadata as a file gives it, from plain values: a list of text lies as strings do, another as an array."""

    setting = dict.get

    def __init__(self, items):
        super().__init__({key: laid_out(value) if isinstance(value, list) else value for key, value in items.items()})


def laid_out(items: list) -> Strings | np.ndarray:
    if not all(isinstance(item, str | bytes) for item in items):
        return np.array(items)
    texts = [item.encode() if isinstance(item, str) else item for item in items]
    ends = np.cumsum([8 + len(text) for text in texts], dtype=np.int64)
    return Strings(b"".join(struct.pack("<Q", len(text)) + text for text in texts), 0, array("q", ends.tolist()))


def copy_of(stage: str, folder: Path, *edits: tuple[str, str], name: str = "mine.py") -> Path:
    """A copy of a stage's file with each (old, new) replaced once; every old must be there."""
    text = (ROOT / "stages" / f"{stage}.py").read_text()
    for old, new in edits:
        assert text.count(old) >= 1, f"{stage} holds no {old!r}"
        text = text.replace(old, new, 1)
    path = folder / name
    path.write_text(text)
    return path


def lesson(*words, cwd=None, **env) -> subprocess.CompletedProcess:
    """Run the command line to its end; env adds to the environment (None takes a variable away)."""
    surroundings = {k: v for k, v in {**os.environ, **env}.items() if v is not None}
    command = [*CLI, *(word if isinstance(word, bytes) else str(word) for word in words)]
    return subprocess.run(command, capture_output=True, cwd=cwd, env=surroundings, timeout=300)


def one_sentence(done: subprocess.CompletedProcess) -> str:
    """The error of a command that failed: one line on stderr, nothing else anywhere, no traceback."""
    said = done.stderr.decode()
    assert done.stdout == b"", done.stdout
    assert "Traceback" not in said, said
    assert len(said.strip().splitlines()) == 1, said
    return said.strip()
