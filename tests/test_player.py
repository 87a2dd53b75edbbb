"""The memory player against counted runs of the real loops, an independent cache, and a browser."""

import json
import random
import re
from collections import OrderedDict
from pathlib import Path
from types import FunctionType, SimpleNamespace

import numpy as np
import pytest

from common import trace
from common.gguf import TYPES
from common.stage import load_stage

LANES = 16
ROOT = Path(__file__).parent.parent
SIZES = ((1, 1, 1), (3, 7, 5), (2, 33, 35), (5, 24, 48), (4, 17, 64))  # T, K, N


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """The player on a page of its own."""
    file = tmp_path_factory.mktemp("player") / "page.html"
    head = '<!doctype html><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    style = ":root { color-scheme: light dark; --ink: light-dark(#111, #eee); --paper: light-dark(#fff, #111) }"
    file.write_text(f"{head}<style>{style}</style>{trace.fragment()}", "utf-8")
    return f"file://{file}"


@pytest.fixture(scope="module")
def page(browser, address):
    page = browser.new_page()
    page.goto(address)
    return page


class Noted:
    """An array that notes each access to it: (name, what, floats, index in memory order)."""

    def __init__(self, name, array, log):
        self.name, self.array, self.log, self.shape = name, array, log, array.shape

    def note(self, what, count, index):
        axes = index if isinstance(index, tuple) else (index,)
        at = 0
        for i, length in zip(axes, self.shape, strict=True):
            at = at * length + int(i)
        self.log.append([self.name, what, count, at])
        return at

    def __getitem__(self, index):
        self.note("read", 1, index)
        return self.array[index]

    def __setitem__(self, index, value):
        if isinstance(index, slice):
            self.log.append([self.name, "write", self.array.size, 0])
        else:
            self.note("write", 1, index)
        self.array[index] = value


def weights(block):
    """A Q4_1 block's 32 weights: d and m as float16, then q; w = d q + m. Compiling the stage's own would take long."""
    d, m = block[:4].view(np.float16).astype(np.float32)
    return d * np.concatenate((block[4:] & 15, block[4:] >> 4)) + m


def recorded(name, T, K, N, **constants):
    """Run a stage's own matmul, not compiled, on noted arrays. Returns what it touched and the largest error."""
    log, rng = [], np.random.default_rng(T * K * N)
    x, w = (rng.standard_normal(s).astype("float32") for s in ((T, K), (K, N)))
    made = iter(("out", "sums", "block"))

    def allocate(shape, dtype):
        return Noted(next(made), np.zeros(shape, dtype), log)

    def load_lanes(array, index):
        at = array.note("read", LANES, index)
        return array.array.reshape(-1)[at : at + LANES].copy()

    def store_lanes(array, index, value):
        at = array.note("write", LANES, index)
        array.array.reshape(-1)[at : at + LANES] = value

    def unpack(kind, raw, at, block):
        raw.note("read", TYPES["Q4_1"].bytes, at)
        block.note("write", block.array.size, 0)
        block.array[:] = weights(raw.array[at : at + 20])

    def prefetch(array, index):
        array.log.append([array.name, "prefetch", 1, index[0] * array.shape[1] + index[1]])

    stage = load_stage(name)
    operand = Noted("w", w, log)
    if name == "quantized":
        kind = TYPES["Q4_1"]
        raw = rng.integers(0, 256, (N, K // 32, kind.bytes), np.uint8)
        raw[..., :4] = rng.standard_normal((N, K // 32, 2)).astype("float16").view(np.uint8)
        operand = stage.Blocks(N, K, kind.id, kind.block, kind.bytes, Noted("w", raw.reshape(-1), log))
        w = np.array([[weights(block) for block in row] for row in raw]).reshape(N, K).T
    python = FunctionType(
        stage.matmul.py_func.__code__,
        {
            **vars(stage),
            "np": SimpleNamespace(empty=allocate, zeros=allocate, float32=np.float32),
            "load_lanes": load_lanes,
            "store_lanes": store_lanes,
            "multiply_add": lambda a, b, c: a * b + c,
            "prefetch": prefetch,
            "unpack": unpack,
            "total": np.sum,
            **constants,
        },
    )
    out = python(Noted("x", x, log), operand)
    return log, np.abs(out.array - x @ w).max()


CASES = [
    (stage, T, K if stage != "quantized" else -(-K // 32) * 32, N, constants)
    for stage, choices in {
        "naive": ({},),
        "tiling": ({"TILE": 1}, {"TILE": 4}, {"TILE": 16}, {"TILE": 64}),
        "simd": ({"TILE": 8, "AHEAD": 16}, {"TILE": 4, "AHEAD": 0}, {"TILE": 8, "AHEAD": 4096}),
        "quantized": ({},),
    }.items()
    for constants in choices
    for T, K, N in SIZES
]


@pytest.mark.parametrize(("stage", "T", "K", "N", "constants"), CASES)
def test_loops_touch_what_the_stage_touches(page, stage, T, K, N, constants):
    log, error = recorded(stage, T, K, N, **constants)
    assert error < 1e-3  # the counted run multiplied, too
    assert traced(page, stage, T=T, K=K, N=N, **constants) == log
    assert page.evaluate(f"player.trace('{stage}', {settings(T=T, K=K, N=N, **constants)}).multiplied") == T * K * N


def settings(**choices):
    return json.dumps({"TILE": 8, "AHEAD": 0, "lines": 32, "ways": 8, "block": 0, "warp": 0, "pitch": 0} | choices)


def traced(page, stage, **choices):
    steps = "map(({array, kind, count, at}) => [array.name, kind, count, at])"
    return page.evaluate(f"player.trace('{stage}', {settings(**choices)}).steps.{steps}")


def lru(log, shapes, lines, ways):
    """Hits and misses of each array, and bytes moved, in a cache that is written here once more, otherwise."""
    base, end, cell = {}, 0, {}
    for name, (count, size) in shapes.items():
        base[name], cell[name] = end, size
        end += -(-count * size // 64) * 64
    sets, moved = [OrderedDict() for _ in range(lines // ways)], 0
    found = {name: [0, 0] for name in shapes}
    for name, what, count, at in log:
        if what == "prefetch" and at >= shapes[name][0]:
            continue
        first, last = ((base[name] + i * cell[name]) // 64 for i in (at, at + count - 1))
        for line in range(first, last + 1):
            chosen = sets[line % len(sets)]
            hit = line in chosen
            if not hit:
                moved += 64
                if len(chosen) == ways:
                    moved += 64 * chosen.popitem(last=False)[1]
            chosen[line] = chosen.get(line, False) or what == "write"
            chosen.move_to_end(line)
            if what != "prefetch":
                found[name][not hit] += 1
    return found, moved


@pytest.mark.parametrize("seed", range(12))
def test_cache_is_a_cache(page, seed):
    draw = random.Random(seed)
    stage = trace.LOOPS[seed % 4]
    T, K, N, TILE = draw.randint(1, 6), 32 * draw.randint(1, 2), draw.randint(1, 70), draw.choice((4, 8, 16))
    lines = 2 ** draw.randint(2, 7)
    ways = 2 ** draw.randint(0, lines.bit_length() - 1)
    constants = {"TILE": TILE, "AHEAD": 16 * draw.randint(0, 9)}
    log, _ = recorded(stage, T, K, N, **constants)
    shapes = {"x": (T * K, 4), "w": (K // 32 * 20 * N, 1) if stage == "quantized" else (K * N, 4), "out": (T * N, 4)}
    if stage == "quantized":
        shapes |= {"sums": (T * LANES, 4), "block": (32, 4)}
    chosen = settings(T=T, K=K, N=N, lines=lines, ways=ways, **constants)
    run = page.evaluate(
        f"""(() => {{ const run = player.whole('{stage}', {chosen});
        const found = run.memory.arrays.map((a, i) => [a.name, [run.counts[i].hits, run.counts[i].misses]]);
        return [Object.fromEntries(found),
                run.moved] }})()"""
    )
    assert tuple(run) == lru(log, shapes, lines, ways)


def warp(stage, block, number, M, K, N, TILE, swap=False, pitch=0):
    """A warp's requests by the rules the chapters give: (array, what, index of each lane or None)."""
    lanes = []
    for thread in range(32 * number, min(32 * number + 32, TILE * TILE)):
        along, across = thread % TILE, thread // TILE
        lanes.append((across, along) if (stage == "gemm/naive") == swap else (along, across))  # (down, right)
    blocks_right = -(-N // TILE)
    top, left = block // blocks_right * TILE, block % blocks_right * TILE
    inside = [top + down < M and left + right < N for down, right in lanes]

    def request(name, what, index, takes_part):
        found = [index(down, right) if part else None for (down, right), part in zip(lanes, takes_part, strict=True)]
        if any(at is not None for at in found):
            requests.append([name, what, found + [None] * (32 - len(found))])

    requests = []
    if stage != "gemm/tiled":
        for k in range(K):
            request("x", "read", lambda down, right, k=k: (top + down) * K + k, inside)
            request("w", "read", lambda down, right, k=k: k * N + left + right, inside)
    else:
        all_lanes, width = [True] * len(lanes), TILE + pitch
        for k0 in range(0, K, TILE):
            valid = [top + down < M and k0 + right < K for down, right in lanes]
            request("x", "read", lambda down, right, k0=k0: (top + down) * K + k0 + right, valid)
            request("x_tile", "write", lambda down, right: down * width + right, all_lanes)
            valid = [k0 + down < K and left + right < N for down, right in lanes]
            request("w", "read", lambda down, right, k0=k0: (k0 + down) * N + left + right, valid)
            request("w_tile", "write", lambda down, right: down * width + right, all_lanes)
            for k in range(TILE):
                request("x_tile", "read", lambda down, right, k=k: down * width + k, all_lanes)
                request("w_tile", "read", lambda down, right, k=k: k * width + right, all_lanes)
    request("out", "write", lambda down, right: (top + down) * N + left + right, inside)
    return requests


@pytest.mark.parametrize("stage", trace.KERNELS)
@pytest.mark.parametrize(
    ("M", "K", "N", "TILE"), [(32, 32, 32, 32), (33, 5, 65, 32), (40, 37, 35, 16), (9, 9, 9, 8), (5, 3, 7, 4)]
)
def test_warp_touches_what_its_lanes_compute(page, stage, M, K, N, TILE):
    blocks = -(-M // TILE) * -(-N // TILE)
    for block, number in {(0, 0), (blocks - 1, 0), (blocks - 1, max(TILE * TILE // 32 - 1, 0)), (blocks // 2, 0)}:
        for swap, pitch in ((False, 0), (True, 1)):
            chosen = settings(T=M, K=K, N=N, TILE=TILE, block=block, warp=number, swap=swap, pitch=pitch)
            steps = "map(({array, kind, lanes}) => [array.name, kind, lanes])"
            found = page.evaluate(f"player.trace('{stage}', {chosen}).steps.{steps}")
            assert found == warp(stage, block, number, M, K, N, TILE, swap, pitch)


@pytest.mark.parametrize("stage", trace.KERNELS)
def test_sectors_are_those_that_the_gpu_counted(page, stage):
    record = json.loads((ROOT / "reports/nvidia-h200/gemm/counters.json").read_text("utf-8"))
    row = next(r for r in record["rows"] if "gemm/" + r["stage"] == stage and r["shape"] == [4096] * 3)
    chosen = settings(T=4096, K=4096, N=4096, TILE=32, block=129, warp=5)
    requests, sectors, used = page.evaluate(
        f"""(() => {{ const run = player.whole('{stage}', {chosen});
        const loads = run.counts.filter((_, i) => "xw".includes(run.memory.arrays[i].name));
        return ["requests", "pieces", "used"].map((what) => loads.reduce((sum, count) => sum + count[what], 0)) }})()"""
    )
    assert requests * 4096 * 4096 // 32 == row["global_load_requests"]
    assert sectors * 4096 * 4096 // 32 == row["global_load_sectors"]
    assert round(used / sectors, 1) == row["bytes_used_per_sector"]


@pytest.mark.parametrize(
    ("swap", "pitch", "passes"),
    [(False, 0, 1), (False, 1, 1), (True, 0, 32), (True, 1, 1), (True, 2, 2), (True, 4, 4), (True, 8, 8)],
)
def test_bank_conflicts(page, swap, pitch, passes):
    """32 rows of 32 words start in one bank; a word more a row, and each starts in a bank of its own."""
    chosen = settings(T=64, K=64, N=64, TILE=32, swap=swap, pitch=pitch)
    most = page.evaluate(f"Math.max(...player.whole('gemm/tiled', {chosen}).counts.slice(3).map((c) => c.most))")
    assert most == passes


@pytest.mark.parametrize("stage", (*trace.LOOPS, *trace.KERNELS))
def test_the_marked_line_makes_the_access(page, stage):
    chosen = settings(T=33, K=64, N=37, TILE=8, AHEAD=16)
    lines = page.evaluate(
        f"""[...new Set(player.trace('{stage}', {chosen}).steps.map(({{array, line}}) =>
        array.name + ": " + LOOPS['{stage}'].text.split("\\n")[line - 1]))]"""
    )
    for name, line in (found.split(": ", 1) for found in lines):
        assert re.search(rf"\b{name}\[|\({name},|, {name}\)|raw", line), (name, line)


@pytest.fixture
def shown(browser, address):
    """shown(width, ...) opens the player; whatever it says on the console or throws fails the test."""
    opened, said = [], []

    def open_page(width=1200, **options):
        context = browser.new_context(viewport={"width": width, "height": 800}, **options)
        page = context.new_page()
        page.set_default_timeout(120_000)  # ms; a busy machine is no failure
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(address)
        opened.append(context)
        return page

    yield open_page
    for context in opened:
        context.close()
    assert not said


def choose(page, stage):
    page.get_by_role("radio", name=stage, exact=True).check(force=True)


def slide(page, label, steps):
    """Move a slider by keys, as a reader without a mouse would."""
    slider = page.get_by_role("slider", name=label)
    slider.focus()
    for _ in range(abs(steps)):
        page.keyboard.press("ArrowRight" if steps > 0 else "ArrowLeft")


def at_the_end(page, name):
    return int(page.locator("#player tbody tr", has_text=name).first.locator("td").last.inner_text().replace(",", ""))


def notice(page):
    return page.locator('[data-part="notice"]').inner_text()


def numbers(text):
    return [float(n.replace(",", "")) for n in re.findall(r"(?<![\w.])\d[\d,]*(?:\.\d+)?", text)]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [380, 800, 1200])
def test_every_stage_plays_and_fits(shown, width, scheme):
    page = shown(width, color_scheme=scheme)
    for stage in (*trace.LOOPS, *trace.KERNELS):
        choose(page, stage)
        assert page.evaluate("document.documentElement.scrollWidth") == width
        before = page.locator('[data-part="status"]').inner_text()
        page.get_by_role("button", name="Step").click()
        after = page.locator('[data-part="status"]').inner_text()
        assert numbers(after)[0] == numbers(before)[0] + 1
        page.get_by_role("button", name="To the end").click()
        at, of = numbers(page.locator('[data-part="status"]').inner_text())[:2]
        assert at == of
        assert page.locator(".player-code .at").count() == 1
        colours = page.evaluate(
            """[...document.querySelectorAll('#player .bare')].map((cell) => getComputedStyle(cell).fill)"""
        )
        assert all((numbers(colour)[0] > 128) == (scheme == "light") for colour in colours)


def test_misses_move_with_the_settings(shown):
    page = shown()
    choose(page, "tiling")
    small = at_the_end(page, "w")
    slide(page, "TILE", 2)
    assert at_the_end(page, "w") > 4 * small
    choose(page, "naive")
    many = at_the_end(page, "w")
    slide(page, "cache", 1)
    assert at_the_end(page, "w") * 4 < many
    choose(page, "gemm/tiled")
    assert "no two words" in notice(page)
    slide(page, "swapped", 1)
    assert "up to 32" in notice(page)
    slide(page, "words added", 1)
    assert "no two words" in notice(page)


def test_play_pause_and_back(shown):
    page = shown()
    page.get_by_role("button", name="Reset").click()
    assert "Before the first" in page.locator('[data-part="status"]').inner_text()
    page.get_by_role("button", name="Play").click()
    page.wait_for_function("Number(document.querySelector('[data-part=position]').value) > 2")
    page.get_by_role("button", name="Pause").click()
    position = page.get_by_role("slider", name="Position")
    at = int(position.input_value())
    position.focus()
    page.keyboard.press("ArrowLeft")
    assert int(position.input_value()) == at - 1
    page.get_by_role("button", name="Back").press("Enter")
    assert int(position.input_value()) == at - 2


def test_whoever_wants_no_motion_gets_the_end(shown):
    page = shown(reduced_motion="reduce")
    page.get_by_role("button", name="Play").click()
    position = page.get_by_role("slider", name="Position")
    assert position.input_value() == position.get_attribute("max")


@pytest.mark.parametrize("seed", range(3))
def test_what_to_notice_is_true(shown, seed):
    """The sentence's numbers are those of the counted run in the independent cache."""
    draw, page = random.Random(seed), shown()
    T, N, lines = draw.randint(1, 8), draw.randint(16, 80), 2 ** draw.randint(3, 7)
    choose(page, "naive")
    for label, place in {"rows of x": T - 1, "N, columns": N - 16, "cache": lines.bit_length() - 4}.items():
        page.get_by_role("slider", name=label).fill(str(place))
    size = {"x": (T * 64, 4), "w": (64 * N, 4), "out": (T * N, 4)}
    naive = lru(recorded("naive", T, 64, N)[0], size, lines, lines)[0]["w"]
    assert f"{naive[1]:,} times" in notice(page) or "fetched once" in notice(page) and naive[1] == 4 * N
    choose(page, "tiling")
    tiling = lru(recorded("tiling", T, 64, N, TILE=16)[0], size, lines, lines)[0]["w"]
    assert f"fetched {tiling[1]:,} times" in notice(page) or "fetched once" in notice(page) and tiling[1] == 4 * N
    assert f"fetches {naive[1]:,}: " in notice(page)
    assert ("times as many" in notice(page)) == (naive[1] > tiling[1])
    choose(page, "simd")
    log = recorded("simd", T, 64, N, TILE=8, AHEAD=16)[0]
    simd = lru(log, size, lines, lines)[0]["w"]
    assert f"touched {sum(simd):,} times, by naive {sum(naive):,}." in notice(page)
    assert f"{simd[1]:,} had to be waited for" in notice(page)
    choose(page, "quantized")
    size = {"x": (T * 64, 4), "w": (40 * N, 1), "out": (T * N, 4), "sums": (T * LANES, 4), "block": (32, 4)}
    found = lru(recorded("quantized", T, 64, N)[0], size, lines, lines)[0]
    w = -(-40 * N // 64)
    assert f"fetched {found['w'][1]:,} times" in notice(page) or "fetched once" in notice(page) and found["w"][1] == w
    assert f"misses {found['block'][1]:,} of {sum(found['block']):,} times" in notice(page)
