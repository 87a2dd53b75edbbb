"""The oracle: the same model in NumPy, float64 throughout, from exactly dequantized weights.

Every stage is judged against this one and by nothing else. It shares no code with the stages but the block unpacking,
which has an oracle of its own.
"""

import hashlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common import model, quants
from common.gguf import GGUFError
from common.sources import cache_root

KEEP = 64  # answers kept on disk; the oldest go first


class Answer(NamedTuple):
    """What the model says of ids, at full precision."""

    logits: np.ndarray  # (rows, V) float64: the last `rows` positions
    residual: np.ndarray  # (2 * L + 1, T, D) float64: the stream after embedding and after each add


def logits(gguf: model.ModelFile, ids, rows: int | None = None) -> np.ndarray:  # -> (rows, V) float64
    """The logits after the last `rows` of ids (all of them by default), each position seeing those before it.

    Raises GGUFError where the model's own weights give logits that are not finite.
    """
    ids = [int(i) for i in ids]
    key = repr((gguf.gguf.sha256(), gguf.config.L, ids, rows, source_digest()))
    path = cache_root() / "reference" / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.npy"
    try:
        return np.load(path)
    except (OSError, ValueError, EOFError):
        with np.errstate(all="ignore"):  # whatever goes wrong on the way shows in the logits
            result = compute(gguf, ids, rows).logits
    if not np.isfinite(result).all():
        raise GGUFError(gguf.path, None, "has weights that give logits that are not finite")
    keep(path, result)
    return result


def compute(gguf: model.ModelFile, ids, rows: int | None = None) -> Answer:
    """The logits and how they came about, anew."""
    config, weights = gguf.config, gguf.weights
    T, H, G, hd = len(ids), config.H, config.G, config.hd
    position = np.arange(T)
    hidden_from = position[:, None] < position  # (T, S): nobody sees what comes later
    x = embed(weights.token_embd, ids)
    residual = [x]
    for layer in weights.layers:
        h = rms_norm(x, layer.attn_norm, config.eps)
        q = rope((h @ exact(layer.w_q).T).reshape(T, H, hd), config.rope_freqs)
        k = rope((h @ exact(layer.w_k).T).reshape(T, G, hd), config.rope_freqs).repeat(H // G, axis=1)
        v = (h @ exact(layer.w_v).T).reshape(T, G, hd).repeat(H // G, axis=1)
        heads = np.empty((T, H, hd))
        for i in range(H):  # one at a time, so that a long text's scores fit in memory
            scores = q[:, i] @ k[:, i].T / np.sqrt(hd)
            scores[hidden_from] = -np.inf
            heads[:, i] = softmax(scores) @ v[:, i]
        x = x + heads.reshape(T, H * hd) @ exact(layer.w_o).T
        residual.append(x)
        h = rms_norm(x, layer.ffn_norm, config.eps)
        x = x + (silu(h @ exact(layer.w_gate).T) * (h @ exact(layer.w_up).T)) @ exact(layer.w_down).T
        residual.append(x)
    hidden = rms_norm(x[-rows:] if rows else x, weights.output_norm, config.eps)
    return Answer(hidden @ exact(weights.output).T, np.stack(residual))


def exact(tensor) -> np.ndarray:
    """The tensor's weights as float64; dequantization itself is exact in float32."""
    return quants.dequantize(tensor).astype(np.float64)


def embed(tensor, ids) -> np.ndarray:
    return np.stack([exact(tensor[i : i + 1])[0] for i in ids])


def rms_norm(x, weight, eps):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * exact(weight)


def rope(x, freqs):
    turn = np.exp(1j * np.arange(len(x))[:, None, None] * freqs)  # a pair is a complex number, turned
    out, rotated = x.copy(), 2 * len(freqs)
    pairs = (x[..., 0:rotated:2] + 1j * x[..., 1:rotated:2]) * turn
    out[..., 0:rotated:2], out[..., 1:rotated:2] = pairs.real, pairs.imag
    return out


def softmax(x):
    exp = np.exp(x - x.max(axis=-1, keepdims=True))
    return exp / exp.sum(axis=-1, keepdims=True)


def silu(x):
    return x / (1 + np.exp(-x))


def nmse(got, want) -> float:
    """Sum of squared error over the sum of squares of `want`; infinite where `got` is not finite.

    Against zeros alone, zeros are right (0) and anything else is infinitely wrong.
    """
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if not want.any():
        return float("inf") if got.any() else 0.0
    with np.errstate(all="ignore"):
        error = float(np.sum((got - want) ** 2) / np.sum(want**2))
    return error if np.isfinite(error) else float("inf")


def source_digest() -> str:
    """Changes with any file that an answer depends on."""
    here = Path(__file__)
    files = (here, here.with_name("quants.py"), here.with_name("model.py"))
    return hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()


def keep(path: Path, result: np.ndarray) -> None:
    """Store logits, whole or not at all; a folder that can't be written only costs the next run its time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.stem}.{np.random.default_rng().integers(1 << 60)}.tmp")
        with partial.open("wb") as file:
            np.save(file, result)
        partial.replace(path)
        kept = sorted(path.parent.glob("*.npy"), key=lambda p: p.stat().st_mtime, reverse=True)
        for old in kept[KEEP:]:
            old.unlink(missing_ok=True)
    except OSError:
        pass
