"""Work shared out: the same bits whoever computes, nobody needed who does not come, nothing left running."""

import gc
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from common import gate, team
from common.jit import njit
from common.job import random_ids
from common.model import open_model
from common.reference import nmse
from common.step import entry, kept
from common.team import ALONE_UNTIL, BACK_OFF, LEAST_NS, MOST_NS, STATE, STOP, WORKERS, WORTH, Team, share
from stages import compiled, half_cache, threads

ROOT = Path(__file__).parent.parent
CORES = team.granted()
NUMBERS = np.zeros(1, np.int64)


def cores(count):
    """As many as asked for, some of them twice where there are too few."""
    return sorted((CORES * count)[:count])


@pytest.mark.parametrize("stage", [threads, half_cache])
def test_what_lies_after_the_last_token_is_not_read(stage):
    beyond = np.full((4, 32), np.nan, np.float32)
    gate, up = np.ones((4, 32), np.float32), beyond[:2]
    gate[2:], up[:] = 0, 2
    stage.gated(gate, up, 0, 32)
    assert np.allclose(gate[:2], 2 / (1 + np.exp(-1))) and not gate[2:].any()


def body():
    @entry((NUMBERS, NUMBERS))
    def work(given, first, last):
        source, out = given[0]
        for i in range(first, last):
            value = source[i]
            for k in range(50):
                value = (value * value + k) % 1_000_003
            out[i] += value + 1

    return work


@njit(nogil=True)
def jobs(board, function, source, out, times, units, least, each):
    for _ in range(times):
        share(board, function, kept((source, out)), units, least, each)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize(
    ("units", "least", "each"), [(1, 1, 8), (2, 1, 1), (7, 3, 8), (61, 1, 1), (61, 1, 8), (1000, 4, 8)]
)
def test_each_unit_is_done_once_a_job(count, units, least, each):
    work, source, out = body(), np.arange(1000), np.zeros(1000, np.int64)
    with Team(count, cores(count)) as found:
        jobs(found.board, work.address, source, out, 200, units, least, each)
    once = np.zeros(1000, np.int64)
    jobs(Team(1).board, work.address, source, once, 1, units, least, each)
    assert np.array_equal(out, 200 * once)
    assert once[:units].all()
    assert not once[units:].any()


def test_a_team_is_no_larger_than_the_cores_granted():
    assert len(Team(1000).threads) == len(CORES) - 1
    assert not Team(0).threads


def test_the_calling_thread_gets_its_cores_back():
    before = team.granted()
    with Team(2, cores(2)):
        assert len(team.granted()) == 1
    assert team.granted() == before


def test_threads_sleep_when_there_is_no_work_and_wake_for_some():
    work, source, out = body(), np.arange(1000), np.zeros(1000, np.int64)
    found = Team(3, cores(3))
    jobs(found.board, work.address, source, out, 50, 1000, 1, 8)
    time.sleep(0.1)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.1
    assert all(found.board[WORKERS:, team.PARKED])
    jobs(found.board, work.address, source, out, 50, 1000, 1, 8)
    assert found.board[STATE, STOP] == 0


def test_threads_end_with_their_team():
    found = Team(3, cores(3))
    ended = found.threads
    assert all(thread.is_alive() for thread in ended)
    del found
    gc.collect()
    for thread in ended:
        thread.join(5)
    assert not any(thread.is_alive() for thread in ended)


def test_delays_send_the_first_thread_alone_for_longer_and_longer():
    """Until the help between two of them is worth what the delay costs; then for half as long each time."""
    board, found, at, late = Team(1).board, [], 10**9, 1000
    for together in [WORTH * late] * 12 + [WORTH * late + 1] * 3:
        at += together
        team.go_alone(board, at, at + late)
        found.append(int(board[STATE, BACK_OFF]))
        assert board[STATE, ALONE_UNTIL] == at + late + found[-1]
        at = int(board[STATE, ALONE_UNTIL])
    assert found[:4] == [LEAST_NS, 2 * LEAST_NS, 4 * LEAST_NS, 8 * LEAST_NS]
    assert found[11:] == [MOST_NS, MOST_NS // 2, MOST_NS // 4, MOST_NS // 8]


def test_alone_nobody_is_asked():
    work, source, out = body(), np.arange(100), np.zeros(100, np.int64)
    found = Team(2, cores(2))
    found.board[STATE, ALONE_UNTIL] = np.iinfo(np.int64).max
    jobs(found.board, work.address, source, out, 5, 100, 1, 8)
    assert found.board[team.TICKET, 0] == 0
    assert out.all()


# ---- the stage -----------------------------------------------------------------------------------------------------


def told(stage, gguf, ids, count, monkeypatch, n=5):
    """Logits at each position of ids, and of n tokens after it."""
    monkeypatch.setattr(team, "granted", lambda: cores(count))
    model = stage.load(gguf, len(ids) + n, count)
    rows = stage.logits(model, stage.forward(model, ids, 0))
    return np.concatenate([rows, [row for _, row in stage.generate(model, ids, n)]])


@pytest.mark.parametrize("quant", ["q4_k_m", "q8_0", "q5_k", "q4_0", "f16"])
@pytest.mark.parametrize("length", [1, 2, 13])
def test_the_same_bits_as_compiled_whatever_the_number_of_threads(tiny_of, quant, length, monkeypatch):
    gguf = open_model(tiny_of(quant))
    ids = random_ids(length, gguf.config.V)
    want = told(compiled, gguf, ids, 1, monkeypatch)
    for count in (1, 2, 3):
        assert np.array_equal(told(threads, gguf, ids, count, monkeypatch), want), count


@pytest.mark.parametrize("length", [1, 13, 70, half_cache.POSITIONS + 4])  # the last in pieces
def test_half_cache_gives_the_same_bits_whatever_the_number_of_threads(tiny, length, monkeypatch):
    gguf = open_model(tiny)
    ids = random_ids(length, gguf.config.V)
    want = told(half_cache, gguf, ids, 1, monkeypatch)
    for count in (2, 3):
        assert np.array_equal(told(half_cache, gguf, ids, count, monkeypatch), want), count


def test_pieces_of_a_long_text_are_joined_to_what_it_is_in_one_piece(monkeypatch):
    draw = np.random.default_rng(5)
    q = draw.standard_normal((1, 6, 64)).astype(np.float32)
    k, v = (draw.standard_normal((600, 2, 64)).astype(np.float16).astype(np.float32) for _ in range(2))
    assert nmse(half_cache.attention(q, k, v, 599), gate.attention(q, k, v, 599)) <= 1e-12


def test_a_generator_dropped_half_way_leaves_nothing_running(tiny, monkeypatch):
    monkeypatch.setattr(team, "granted", lambda: cores(2))
    model = threads.load(open_model(tiny), 32, 2)
    tokens = threads.generate(model, [1, 2, 3], 20)
    next(tokens)
    running = model.team.threads
    del tokens
    time.sleep(0.1)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.1
    with pytest.raises(ValueError, match="do not fit"):
        threads.forward(model, [1] * 33, 0)
    del model
    gc.collect()
    for thread in running:
        thread.join(5)
    assert not any(thread.is_alive() for thread in running)


PROCESS = """
import hashlib, json, sys
import numpy as np
from common import team
from common.model import open_model
from stages import threads

team.granted = lambda cores=team.granted(): sorted((cores * 2)[:2])
gguf = open_model(sys.argv[1])
model = threads.load(gguf, 32, 2)
ids, rows = zip(*threads.generate(model, list(range(9)), 12))
rows = np.concatenate([rows, threads.logits(model, threads.forward(model, list(range(9)), 0))])
print(json.dumps([[int(i) for i in ids], hashlib.sha256(rows.tobytes()).hexdigest()]))
"""


def test_a_process_that_compiles_and_one_that_finds_all_compiled_say_the_same(tiny, tmp_path):
    found = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", PROCESS, str(tiny)],
            env={**os.environ, "LESSON_CACHE": str(tmp_path)},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout.splitlines()[-1]))
    assert found[0] == found[1]
