"""Threads: every core takes chunks of each op, and they meet as seldom as they can.

Idea    A machine has several cores, and each brings its own arithmetic and its own share of what memory delivers.
Was     compiled runs on one core; the others idle.
Change  What is large is shared out (common/team.py): strips of rows of q, k and v together, heads, strips of w_o, of
        gate and up together with what follows from them, and of w_down: five meetings a layer for a token. A prompt
        shares out its tokens as well, wherever each is computed by itself. Results do not depend on who computes what.
Expect  A token gains what more cores get from memory, since one core alone does not use it up. A prompt gains the
        number of cores, less where only one works. Each meeting costs a few trips of a cache line between cores.
"""

import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from common.cpu_ops import add, argmax, scale
from common.int8 import (
    GROUP,
    INTEGER,
    STEP,
    ask,
    float_matmul,
    kernel,
    pack,
    packed_bytes,
    panel_dots,
    raised,
    round_token,
    span,
    store_rows,
    strip_dots,
    strip_integers,
    strip_scales,
    to_int8,
    unrounded,
    whole,
)
from common.intrinsics import (
    LANES,
    ROWS,
    TOKENS,
    load_lanes,
    load_tokens,
    multiply_add,
    of_tile,
    of_tokens,
    row_store,
    store_lanes,
    store_tokens,
    sums_as_floats,
    total,
    zero_lanes,
)
from common.jit import njit
from common.lane_ops import rms_norm, silu_lanes, softmax
from common.quants import dequantize, unpack
from common.stage import arena, pieces, room
from common.step import (
    ATTENTION,
    EMBED,
    GATE,
    HEADS,
    LOOK,
    MATMUL,
    NORM,
    NORMED,
    PROJECT,
    ROPE,
    ROUNDED,
    ROW,
    SILU,
    TIMES,
    TURNED,
    Input,
    Matrix,
    Model,
    begin_laps,
    blocks_of,
    call,
    entry,
    given,
    kept,
    lap,
    layer_of,
    strips_in,
)
from common.team import Team, share

PREVIOUS = "compiled"
CHANGES = (
    "load", "kernels", "parts", "matmul", "share", "times", "each", "code", "strips", "rows", "rope", "attend_alone",
    "heads", "attention", "vocabulary", "step", "forward", "logits",
)  # fmt: skip
FUSED = {"dot": "attention", "silu": "gated", "mul": "gated"}
PHASES = ("embed", "rms_norm", "matmul", "rope", "attention", "silu")
OPERANDS = "int8"

PAGE = 4096  # bytes; where pages are larger, some are touched more than once
PANEL = 1024  # weights of each of sixteen rows at a time: with their scales 24 KB at most, which a common L1 holds
TILE = TOKENS  # their sums of integers take eight registers


class Blocks(NamedTuple):
    """A matrix as the file holds it: N rows, each of K / length blocks."""

    N: int
    K: int
    kind: int  # ggml's type id
    length: int  # weights a block; a row of a float type is one block
    size: int  # bytes a block
    raw: Any  # (bytes,) uint8, in the map


class Packed(NamedTuple):
    """A matrix in strips of sixteen rows, word by word side by side (common/int8.py). Fields as in Blocks."""

    N: int
    K: int
    kind: int
    length: int
    size: int
    raw: Any  # (bytes / 16, 16) uint8


def load(gguf, context, threads):
    """Touch every page of the map, pack, make room, and find a team of `threads` cores, or as many as are granted."""

    def blocks(tensor):
        if len(tensor.shape) == 1:
            return dequantize(tensor)
        kind = tensor.type
        length = kind.block if kind.block > 1 else tensor.shape[1]
        tensor.raw[::PAGE].max()  # reads a byte of each page, so that the clock sees no page fault
        return Blocks(*tensor.shape, kind.id, length, length // kind.block * kind.bytes, tensor.raw)

    config = gguf.config
    cache = arena(config.L, 2, context, config.G, config.hd)
    weights = gguf.weights.map(blocks)
    take = pieces(gguf)
    packed = weights.map(lambda w: pack_rows(w, take) if isinstance(w, Blocks) else w)
    packed = packed._replace(token_embd=weights.token_embd)  # rows of which are read one by one
    team, found = Team(threads), given(config, packed, cache, described, PHASES)
    found = found._replace(board=team.board, parts=np.array([part.address for part in parts()]))
    return Model(config, packed, cache, found, team)


def described(w):
    """A matrix by the addresses of its bytes, which must be kept, and of the code for its type."""
    return Matrix(*w[:-1], w.raw.ctypes.data, *(code.address for code in kernels(w.kind)))


@cache
def kernels(kind):
    """The code for one token and for several, compiled for this type alone."""

    if kind not in INTEGER:

        @entry(TIMES)
        def floats(given, first, last):
            x, w, out = given[0]
            float_rows(x.floats[: len(out)], blocks_of(w), out, first * ROWS, min(last * ROWS, w.N))

        return floats, floats

    @entry(TIMES)
    def alone(given, first, last):
        x, w, out = given[0]
        strips_of(kind, x.integers, strips_in(w), out, first, last)

    @entry(TIMES)
    def together(given, first, last):
        x, w, out = given[0]
        tiles(kind, x.integers, strips_in(w), out, first, last)

    return alone, together


@cache
def parts():
    """The code of what is shared out beside single matrices, in the order of PROJECT to TURNED of common/step.py."""
    x, w, out = TIMES

    @entry((x, ((w, out), (w, out), (w, out))))
    def project(given, first, last):  # strips
        x, pairs = given[0]
        in_turn(x, pairs, first, last)

    @entry((x, w, w, out, out))
    def gate(given, first, last):  # strips of both
        x, w_gate, w_up, gate, up = given[0]
        in_turn(x, ((w_gate, gate),), first, last)
        in_turn(x, ((w_up, up),), first, last)
        gated(gate, up, first * ROWS, last * ROWS)

    @entry((HEADS, HEADS, HEADS, 0, out))
    def look(given, first, last):  # heads
        q, k, v, start, out = given[0]
        heads(q, k, v, start, out, first, last)

    @entry((out, out, ROW, 0.0, x))
    def norm_rows(given, first, last):  # tokens, as the rest
        x, y, weight, eps, h = given[0]
        normed(x, y, weight, eps, h, first, last)

    @entry((x,))
    def rounded_rows(given, first, last):
        round_rows(given[0][0], first, last)

    @entry((HEADS, HEADS, HEADS, HEADS, HEADS, HEADS))
    def turned(given, first, last):
        q, k, v, keys, values, turns = given[0]
        for t in range(first, last):
            turn(q[t], q[t], turns[t])
            turn(k[t], keys[t], turns[t])
            values[t] = v[t]

    return project, gate, look, norm_rows, rounded_rows, turned


def pack_rows(w, take=room):
    """A matrix of a type with integers, packed into memory from `take`; any other as it is."""
    if w.kind not in INTEGER:
        return w
    packed = take(packed_bytes(w.N, w.K, w.length, w.size)).reshape(-1, ROWS)
    pack(w.kind, w.raw, w.N, w.K // w.length, w.size, packed)
    return Packed(*w[:-1], packed)


@njit
def embed(ids, w):  # (T,), (V, D) -> (T, D)
    V, D, kind, length, size, raw = w
    T, blocks = len(ids), D // length
    out = np.empty((T, D), np.float32)
    for t in range(T):
        for b in range(blocks):
            unpack(kind, raw, (ids[t] * blocks + b) * size, out[t, b * length : (b + 1) * length])
    return out


def matmul(x, w):  # (T, K), (N, K) -> (T, N)
    return product(Team(1).board, rounded(x), described(w))


@njit
def product(board, x, w):  # Input (T, K), (N, K) -> (T, N)
    out = np.empty((len(x.floats), w.N), np.float32)
    times(board, x, w, out)
    return out


@njit
def rounded(x):  # (T, K) -> Input
    fits = x.shape[1] % STEP == 0  # else no matrix that it meets has integers
    return Input(x, to_int8(x if fits else np.zeros((len(x), STEP), np.float32), TILE if len(x) > 1 else 1))


@njit
def times(board, x, w, out):  # Input (T, K), (N, K) -> out (T, N)
    share(board, code(w, out), kept((x, w, out)), strips(w), 1, each(len(out)))


@njit
def each(T):  # chunks a thread: several even out, but each begins with a wait for memory, long for a lone token's work
    return 1 if T == 1 else 8


@njit
def code(w, out):
    return w.together if len(out) > 1 else w.alone


@njit
def strips(w):
    return (w.N + ROWS - 1) // ROWS


@njit
def in_turn(x, pairs, first, last):
    """Strips `first` to `last` of matrices one after the other: pairs of a matrix and its out."""
    for w, out in pairs:
        a, b = max(first, 0), min(last, strips(w))
        if a < b:
            call(code(w, out), kept((x, w, out)), a, b)
        first, last = first - strips(w), last - strips(w)


@njit
def gated(gate, up, first, last):
    """silu(gate) * up in columns `first` to `last`."""
    for t in range(len(up)):  # gate has whole tiles of tokens
        for i in range(first, last, LANES):
            store_lanes(gate, (t, i), silu_lanes(load_lanes(gate, (t, i))) * load_lanes(up, (t, i)))


@njit
def normed(x, y, weight, eps, h, first, last):
    """x + y to x, and its norm to h, of tokens `first` to `last`."""
    x[first:last] = add(x[first:last], y[first:last])
    h.floats[first:last, : x.shape[1]] = rms_norm(x[first:last], weight, eps)
    round_rows(h, first, last)


@njit
def round_rows(h, first, last):
    if h.floats.shape[1] % STEP == 0:  # else no matrix that it meets has integers
        for t in range(first, last):
            round_token(h.floats, t, h.integers)


@njit
def room_for(T, K):
    """An Input to be filled; floats in whole tiles of tokens and whole lanes."""
    floats = np.zeros((T if T == 1 else whole(T, TILE), whole(K, LANES)), np.float32)
    return Input(floats, unrounded(T, K, TILE if T > 1 else 1))


@njit
def float_rows(x, w, out, first, last):
    """Rows `first` to `last` of a matrix of a type without integers."""
    row = w.K // w.length * w.size
    some = Blocks(last - first, w.K, w.kind, w.length, w.size, w.raw[first * row : last * row])
    out[:, first:last] = float_matmul(x, some)


@kernel
def strips_of(kind, x, w, out, first, last):
    N, K, _, length, size, raw = w
    blocks, groups, step = K // length, length // GROUP, span(kind) // GROUP
    asked = first * blocks * size
    for strip in range(first, last):
        for t in range(len(out)):
            lanes = zero_lanes(1)
            for b in range(blocks):
                at = (strip * blocks + b) * size
                for g in range(0, groups, step):
                    here = b * groups + g
                    asked = ask(raw, asked, at + g * (size // groups))
                    dots = strip_dots(kind, raw, at, g, x, t, here, lanes)
                    d, m = strip_scales(kind, raw, at, g)
                    d = d * of_tile(lanes, x.scales, (t, here // 2))
                    lanes = multiply_add(d, sums_as_floats(dots), lanes)
                    if raised(kind) == 0:
                        lanes = multiply_add(m, of_tile(lanes, x.offsets, (t, here // 2)), lanes)
            store_rows(out, t, strip * ROWS, lanes)


@njit
def tiles(kind, x, w, out, first, last):  # Rounded (T, K) in tiles of TILE, (N, K) -> out (T, N)
    q = np.empty((PANEL, ROWS), np.uint8)
    d, m = np.empty((PANEL // GROUP, ROWS), np.float32), np.empty((PANEL // GROUP, ROWS), np.float32)
    totals = np.empty((len(x.p) * TILE, ROWS), np.float32)
    tiles_of(kind, x, w, out, first, last, q, d, m, totals)


@kernel
def tiles_of(kind, x, w, out, first, last, q, d, m, totals):
    K, step, asked = w.K, span(kind) // GROUP, first * (w.K // w.length) * w.size
    for strip in range(first, last):
        for t in range(len(totals)):
            store_lanes(totals, (t, 0), zero_lanes(1))
        for k in range(0, K, PANEL):
            groups = min(PANEL, K - k) // GROUP
            for g in range(0, groups, step):
                at, first_of = (strip * K + k + g * GROUP) // w.length * w.size, (k + g * GROUP) % w.length // GROUP
                for i in range(step):
                    row_store(q, (g + i) * GROUP, strip_integers(kind, w.raw, at, first_of + i))
                scale, least = strip_scales(kind, w.raw, at, first_of)
                row_store(d, g, scale)
                row_store(m, g, least)
            end, more = (strip * K + k + groups * GROUP) // w.length * w.size, groups * GROUP // w.length * w.size
            for tile in range(len(x.p)):
                asked = ask(w.raw, asked, end + more * (tile + 1) // len(x.p))  # the next panel, a share at a time
                add_panel(kind, totals, q, d, m, x, tile, k // GROUP, groups)
        for t in range(len(out)):
            store_rows(out, t, strip * ROWS, load_lanes(totals, (t, 0)))


@kernel
def add_panel(kind, totals, q, d, m, x, tile, first, groups):
    """Products of `groups` times sixteen weights from group `first` on to the totals of a tile of tokens."""
    lanes, step = load_tokens(zero_lanes(TILE), totals, (tile * TILE, 0)), span(kind) // GROUP
    for g in range(0, groups, step):
        here = first + g
        dots = panel_dots(kind, q, g, x, tile, here, lanes)
        products = of_tile(lanes, x.scales, (tile, here // 2)) * sums_as_floats(dots)
        lanes = multiply_add(load_lanes(d, (g, 0)), products, lanes)
        if raised(kind) == 0:
            lanes = multiply_add(load_lanes(m, (g, 0)), of_tile(lanes, x.offsets, (tile, here // 2)), lanes)
    store_tokens(totals, (tile * TILE, 0), lanes)


@njit
def angles(start, T, freqs):  # -> (T, hd / 2, 2)
    """The cosine and sine of each position and pair: the same in every layer and head."""
    turns = np.empty((T, len(freqs), 2), np.float32)
    for t in range(T):
        for i in range(len(freqs)):
            angle = (start + t) * freqs[i]
            turns[t, i, 0], turns[t, i, 1] = math.cos(angle), math.sin(angle)
    return turns


@njit
def turn(x, out, turns):  # (heads, hd), (heads, hd), (hd / 2, 2)
    for h in range(len(x)):
        for i in range(len(turns)):
            a, b, cos, sin = x[h, 2 * i], x[h, 2 * i + 1], turns[i, 0], turns[i, 1]
            out[h, 2 * i] = a * cos - b * sin
            out[h, 2 * i + 1] = a * sin + b * cos


@njit
def rope(x, freqs, start):  # (T, heads, hd), (hd/2,), () -> (T, heads, hd)
    out, turns = x.copy(), angles(start, len(x), freqs)
    for t in range(len(x)):
        turn(x[t], out[t], turns[t])
    return out


@njit
def rows(T, N):
    return np.empty((T, N), np.float32)


@njit
def by_tokens(m, part, arguments, T):
    share(m.board, m.parts[part], arguments, T, 4, each(T))  # fewer are done sooner than shared out


@njit(nogil=True)
def vocabulary(m, hidden):  # (T, D) -> (T, V)
    begin_laps(m.clock)
    out = product(m.board, rounded(hidden), m.output)
    lap(m.clock, MATMUL)
    return out


def stamps(model):
    """(len(PHASES), 2) int64: nanoseconds that each phase took so far, and how often it ran."""
    return model.given.clock[:-1]


@njit
def attend_alone(q, k, v, out, h):  # (1, H, hd), (S, G, hd), (S, G, hd) -> out (1, H * hd)
    """A lone token's head h, lanes along it: by itself, though its group shares the keys (half_cache mends that)."""
    _, H, hd = q.shape
    S, G = k.shape[:2]
    scores, full, g = np.empty(S, np.float32), hd - hd % LANES, h // (H // G)
    for s in range(S):
        lanes = zero_lanes(1)
        for i in range(0, full, LANES):
            lanes = multiply_add(load_lanes(q, (0, h, i)), load_lanes(k, (s, g, i)), lanes)
        scores[s] = total(lanes)
        for i in range(full, hd):
            scores[s] += q[0, h, i] * k[s, g, i]
    weights = softmax(scale(scores, 1 / math.sqrt(hd)))
    for i in range(0, full, LANES):
        lanes = zero_lanes(1)
        for s in range(S):
            lanes = multiply_add(load_lanes(v, (s, g, i)), weights[s], lanes)
        store_lanes(out, (0, h * hd + i), lanes)
    for i in range(full, hd):
        out[0, h * hd + i] = 0
        for s in range(S):
            out[0, h * hd + i] += weights[s] * v[s, g, i]


@njit
def attend(none, queries, keys, v, weights, out, t, start, T):
    """One head of as many tokens from t on as `none`, zeros, has room for."""
    hd, last = queries.shape[1], min(t + TILE, T)
    S = start + last
    for s in range(0, S, LANES):
        lanes = none
        for i in range(hd):
            lanes = multiply_add(of_tokens(lanes, queries, (t, i)), load_lanes(keys, (s // LANES, i, 0)), lanes)
        store_tokens(weights, (0, s), lanes)
    for row in range(last - t):
        seen = start + t + row + 1  # a token sees itself and all before it
        weights[row, :seen] = softmax(scale(weights[row, :seen], 1 / math.sqrt(hd)))
        weights[row, seen:] = 0
    for i in range(0, hd - LANES + 1, LANES):
        lanes = none
        for s in range(S):
            lanes = multiply_add(of_tokens(lanes, weights, (0, s)), load_lanes(v, (s, i)), lanes)
        store_tokens(out, (t, i), lanes)
    for row in range(last - t):
        for i in range(hd - hd % LANES, hd):
            out[t + row, i] = 0
            for s in range(S):
                out[t + row, i] += weights[row, s] * v[s, i]


@njit
def heads(q, k, v, start, out, first, last):
    """Heads `first` to `last`; out (T in whole tiles, H * hd)."""
    T, H, hd = q.shape
    S, G = start + T, k.shape[1]
    if T == 1:
        for h in range(first, last):
            attend_alone(q, k[:S], v[:S], out, h)
        return
    keys = np.zeros(((S + LANES - 1) // LANES, hd, LANES), np.float32)  # sixteen positions side by side
    queries, weights = np.zeros((len(out), hd), np.float32), np.zeros((TILE, len(keys) * LANES), np.float32)
    for h in range(first, last):
        g = h // (H // G)
        if h == first or h % (H // G) == 0:
            for s in range(S):
                for i in range(hd):
                    keys[s // LANES, i, s % LANES] = k[s, g, i]
        queries[:T] = q[:, h]
        for t in range(0, T, TILE):
            attend(zero_lanes(TILE), queries, keys, v[:, g], weights, out[:, h * hd : (h + 1) * hd], t, start, T)


@njit
def attention(q, k, v, start):  # (T, H, hd), (S, G, hd), (S, G, hd) -> (T, H * hd)
    T, H, hd = q.shape
    out = np.empty((T if T == 1 else whole(T, TILE), H * hd), np.float32)
    heads(q, k, v, start, out, 0, H)
    return out[:T]


@njit(nogil=True)
def step(m, ids, start):  # (T,) -> (T, D)
    begin_laps(m.clock)
    T, end, (G, hd) = len(ids), start + len(ids), m.cache.shape[3:]
    x, turns = embed(ids, blocks_of(m.embedding)), angles(start, T, m.freqs)
    H, F = m.matrices[0, 0, 0] // hd, m.matrices[0, 4, 0]
    y, q, k, v = np.zeros(x.shape, np.float32), rows(T, H * hd), rows(T, G * hd), rows(T, G * hd)
    h, seen, gate, up = room_for(T, x.shape[1]), room_for(T, H * hd), room_for(T, F), rows(T, whole(F, LANES))
    lap(m.clock, EMBED)
    for l in range(len(m.matrices)):
        layer, keys, values = layer_of(m, l), m.cache[l, 0], m.cache[l, 1]
        by_tokens(m, NORMED, kept((x, y, layer.attn_norm, m.eps, h)), T)
        lap(m.clock, NORM)
        pairs = (layer.w_q, q), (layer.w_k, k), (layer.w_v, v)
        share(m.board, m.parts[PROJECT], kept((h, pairs)), strips(layer.w_q) + 2 * strips(layer.w_k), 1, each(T))
        lap(m.clock, MATMUL)
        of_heads = q.reshape(T, H, hd), k.reshape(T, G, hd), v.reshape(T, G, hd)
        by_tokens(m, TURNED, kept((*of_heads, keys[start:end], values[start:end], turns)), T)
        lap(m.clock, ROPE)
        share(m.board, m.parts[LOOK], kept((of_heads[0], keys[:end], values[:end], start, seen.floats)), H, 1, each(T))
        by_tokens(m, ROUNDED, kept((seen,)), T)
        lap(m.clock, ATTENTION)
        times(m.board, seen, layer.w_o, y)
        lap(m.clock, MATMUL)
        by_tokens(m, NORMED, kept((x, y, layer.ffn_norm, m.eps, h)), T)
        lap(m.clock, NORM)
        share(
            m.board, m.parts[GATE], kept((h, layer.w_gate, layer.w_up, gate.floats, up)), strips(layer.w_up), 1, each(T)
        )
        lap(m.clock, MATMUL)
        by_tokens(m, ROUNDED, kept((gate,)), T)
        lap(m.clock, SILU)
        times(m.board, gate, layer.w_down, y)
        lap(m.clock, MATMUL)
    by_tokens(m, NORMED, kept((x, y, m.output_norm, m.eps, h)), T)
    return h.floats[: len(x), : y.shape[1]].copy()  # what `kept` points to must be in use later: x and y here


def forward(model, ids, start):  # (T,) -> (T, D)
    end = start + len(ids)
    if end > model.cache.shape[2]:
        raise ValueError(f"{end} tokens do not fit a context of {model.cache.shape[2]}")
    with model.team:
        return step(model.given, np.array(ids), start)


def logits(model, hidden):  # (T, D) -> (T, V)
    with model.team:
        return vocabulary(model.given, hidden)


def generate(model, ids, n, choose=argmax):
    """Yield n pairs of a new id and the logits row (V,) that it was chosen from; choose(row) -> id."""
    start, new = 0, list(ids)
    for _ in range(n):
        hidden = forward(model, new, start)
        row = logits(model, hidden[-1:])[0]
        start, new = start + len(new), [choose(row)]
        yield new[0], row
