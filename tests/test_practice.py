"""Learning by doing: what is handed out, what passes, and that no shortcut does."""

import json
import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from common import check, compare, diff, practice, records, show
from common.job import UsageError, prepare
from common.stage import LADDER, code_path, import_file, rungs
from common.stats import verdict
from tests.helpers import CLI, ROOT, lesson, one_sentence

STEPS = [name for name in (*LADDER, *rungs()) if diff.constant(code_path(name), "PREVIOUS")]
GPU = {name for name in STEPS if re.search(r"import (cupy|triton)\b|common\.cuda", code_path(name).read_text())}
ON_CPU = [name for name in STEPS if name not in GPU]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Each test in a folder of its own, with a reader of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LESSON_DATA", str(tmp_path / "data"))
    return tmp_path


def definitions(stage):
    return diff.definitions(code_path(stage).read_text())


def pasted(stage: str) -> Path:
    """The practice file of a stage with the course's own definitions where the stubs stood."""
    text, new = practice.exercise(stage), definitions(stage)
    have = diff.definitions(text)
    missing = [d.text for name, d in new.items() if name not in have and "." not in name]
    for name in diff.constant(code_path(stage), "CHANGES"):
        if name not in have or name not in new:
            continue
        inside = [new[n].text for n in new if "." in n and n not in have] if "." in name else missing
        text = text.replace(have[name].text, "\n\n".join([*inside, new[name].text]), 1)
        have |= {n: d for n, d in new.items() if d.text in inside}
        missing = missing if "." in name else []
    return put(stage, text)


def put(stage: str, text: str) -> Path:
    path = Path("practice") / f"{stage.replace('/', '_')}.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


# ---- what is handed out ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STEPS)
def test_an_exercise_is_the_stage_before_with_the_changes_left_out(stage):
    path = put(stage, practice.exercise(stage))
    old, new, have = definitions(practice.previous(stage)), definitions(stage), diff.definitions(path.read_text())
    asked = diff.constant(code_path(stage), "CHANGES")
    for name, d in have.items():
        same = name in old and d.text == old[name].text
        brought = name in new and d.text == new[name].text and name not in asked
        assert same or brought or name in asked, name
    told = practice.written(stage, path)["yours"]
    assert not [name for name in told if name not in new or "import" in new[name].text.split()[:3]]
    functions = [name for name in told if not practice.is_constant(new[name])]
    functions = [name for name in functions if not new[name].text.startswith("class ") and name != "SOURCE"]
    assert set(practice.empty(path.read_text())) == set(functions)
    for name in functions:
        body = [line for line in new[name].text.splitlines() if re.match(r"\s+(return|for|while|if)\b", line)]
        assert not any(line in have[name].text for line in body if len(line) > 24), name
    assert diff.constant(path, "PRACTICE") == stage
    assert max(map(len, path.read_text().splitlines())) <= 120


@pytest.mark.parametrize("stage", STEPS)
def test_an_exercise_keeps_its_change_for_the_hints(stage):
    told = diff.docstring(put(stage, practice.exercise(stage)))
    assert "Change" not in told
    assert {"Idea", "Was", "Expect"} <= set(told)


@pytest.mark.parametrize("stage", STEPS)
def test_an_exercise_can_be_imported(stage):
    module = import_file(put(stage, practice.exercise(stage)).resolve())
    assert stage == module.PRACTICE


@pytest.mark.parametrize("stage", sorted(GPU))
def test_an_exercise_on_a_gpu_is_the_courses_source_once_it_is_written(stage):
    """So it compiles as that does: test_cuda_compile.py."""
    mine, course = import_file(pasted(stage).resolve()), import_file(code_path(stage))
    for name in ("SOURCE", "OPTIONS", "STEP", "STEP_OPTIONS", "ARCHS"):
        assert getattr(mine, name, None) == getattr(course, name, None), name


def test_a_kernel_that_does_not_compile_is_told():
    path = pasted("gemm/tiled")
    path.write_text(path.read_text().replace("float sum = 0;", "float sum = nothing;"))
    with pytest.raises(check.CheckError, match="does not compile: .*nothing"):
        check.check(path, {})


def test_without_a_gpu_a_kernel_is_compiled_and_said_not_to_run():
    done = lesson("check", pasted("gemm/tiled"))
    assert done.returncode == 4
    assert "compiles for sm_75, sm_80, sm_90, but can't be run here" in done.stderr.decode()
    assert len(done.stderr.decode().splitlines()) == 1


def test_an_emptied_function_says_which_others_the_course_has_for_it():
    told = practice.exercise("quantized")
    assert "    # The course calls a function of its own besides: def embed(ids, w): # (T,), (V, D) -> (T, D)\n" in told
    assert "besides" not in practice.exercise("tiling")


def test_what_was_written_is_not_overwritten():
    assert lesson("practice", "tiling").returncode == 0
    path = Path("practice/tiling.py")
    path.write_text("mine")
    done = lesson("practice", "tiling")
    assert done.returncode == 2
    assert "--force" in one_sentence(done)
    assert path.read_text() == "mine"
    assert lesson("practice", "tiling", "--force").returncode == 0
    assert path.read_text() == practice.exercise("tiling")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("practice", "naive"), "naive has no stage before it to start from: begin with tiling"),
        (("practice", "gemm/naive"), "begin with gemm/coalesced"),
        (("practice", "tilling"), "did you mean tiling?"),
        (("check",), "no file in practice/"),
        (("hint",), "no file in practice/"),
        (("check", "simd"), "no file simd: `lesson practice simd` writes one"),
        (("check", "./mine.py"), "no line PRACTICE"),
        (("check", "--watch", "--json", "practice/a.py"), "no file practice/a.py"),
        (("predict", "tiling", "--ttft", "0", "-m", "tiny"), "a ratio is a number above 0"),
        (("predict", "tiling", "--ttft", "2", "-m", "tiny", "-n", "2"), "--ttft 2.5 --ms-per-token 3"),
        (("predict", "naive", "--ttft", "2", "--ms-per-token", "2", "-m", "tiny"), "no stage before it"),
        (("predict", "gemm/tiled", "--ttft", "2"), "runs no model"),
    ],
)
def test_refused_in_one_sentence(words, told):
    Path("mine.py").write_text("PREVIOUS = 1\n")
    done = lesson(*words)
    assert told in one_sentence(done)
    assert done.returncode == 2


# ---- hints -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STEPS)
def test_hints_come_from_the_stage_and_hold_no_answer(stage):
    found = practice.hints(stage)
    assert found
    assert all(found)
    told = " ".join(diff.docstring(code_path(stage))["Change"].split())
    assert found[0] in told


def test_one_more_hint_each_time_and_the_answer_last():
    practice.write("tiling")
    every = practice.hints("tiling")
    for i in range(1, len(every) + 2):
        document = json.loads(lesson("hint", "--json").stdout)
        assert document["hints"] == every[: min(i, len(every))]
        assert document["answer"] is None
    (answer,) = json.loads(lesson("hint", "--show-answer", "--json").stdout)["answer"][-1:]
    assert answer["name"] == "matmul"
    assert practice.progress()["stages"]["tiling"]["answer"]
    practice.write("tiling", force=True)
    assert len(json.loads(lesson("hint", "--json").stdout)["hints"]) == 1


@pytest.mark.parametrize(("stage", "name"), [("simd", "matmul"), ("quantized", "matmul"), ("kv_cache", "forward")])
def test_the_loops_in_a_hint_stand_in_each_other_as_the_courses_own_do(stage, name):
    """A line that the stage before has too is told as well: without it the others would seem nested otherwise."""
    (told,) = [text for text in practice.hints(stage) if text.startswith(f"how {name} runs:")]
    loops = [line for line in definitions(stage)[name].text.splitlines() if line.strip().startswith("for ")]
    assert [line for line in told.splitlines() if line.strip().startswith("for ")] == loops


def test_an_outline_leaves_open_what_is_new_and_shows_what_is_not():
    told = "\n".join(text for text in practice.hints("kv_cache") if " in outline:" in text)
    assert "        keys[start:end] = rope(…)\n" in told
    assert "        q = rope(matmul(h, layer.w_q).reshape(T, H, hd), config.rope_freqs, start)\n" in told
    assert "        start, new = …\n        yield …" in told
    assert "cache = arena(…)" in told


@pytest.mark.parametrize("stage", STEPS)
def test_an_outline_is_no_answer(stage):
    """Of the lines that compute something and are new, none is there as it stands in the stage."""
    old, new = definitions(practice.previous(stage)), definitions(stage)
    for name, d in new.items():
        was = old[name].text if name in old else ""
        told = set(practice.outline(old.get(name), d))
        lines = [
            line
            for line in d.text.splitlines()
            if line[:1] == " " and re.search(r"[-+*/]= .*[(*]| = .*\(.*\S.*\)", line)
        ]
        assert not [line for line in lines if line in told and line.strip() not in was], name


def test_a_heading_alone_is_no_hint():
    for stage in STEPS:
        assert not [text for text in practice.hints(stage) if re.fullmatch(r"how \S+ runs:\n\S.*", text)], stage


def test_an_emptied_load_says_what_a_weight_is():
    from common.gguf import Tensor, Type

    told = " ".join(practice.exercise("quantized").partition("a Tensor of common/gguf.py")[2].split("raise")[0].split())
    assert {"shape", "raw", "type", "id", "block", "bytes"} == set(re.findall(r" \.(\w+)", told))
    assert all(hasattr(Tensor, name) or hasattr(Type, name) for name in re.findall(r" \.(\w+)", told))
    assert "a Tensor" not in practice.exercise("kv_cache")


def test_an_exercise_says_which_sizes_come_and_which_names_mean_something_else():
    told = " ".join(practice.exercise("quantized").replace("# ", "").split())
    assert "total is a function of common/intrinsics.py here and was a sum in kv_cache's matmul" in told
    assert "T, K and N may be any number" in practice.exercise("simd")


def test_a_hint_marks_what_it_leaves_out():
    told = "\n".join(practice.hints("tiling"))
    assert "matmul has 5 loops where naive's has 3: which" in told
    assert "                    for k in range(k0, min(k0 + TILE, K)):\n                        …\n" in told
    assert "load_lanes(w, (k, n))" in "\n".join(practice.hints("simd"))


# ---- what passes -------------------------------------------------------------------------------------------------

FAST = {"previous": 100.0, "yours": 50.0, "course": 40.0}


def timing(took=FAST, memory=FAST):
    """A race whose outcome is known."""

    def race(work, flags, say):
        names = (work.previous, work.name, work.stage)
        taken = {
            measure: {name: [of[key]] for key, name in zip(check.KEYS, names, strict=True)}
            for measure, of in (("ttft_ms", took), ("peak_rss_mb", memory))
        }
        return check.Race(taken, "nowhere", lambda measure, value: "near nothing")

    return race


@pytest.mark.parametrize("stage", ON_CPU)
def test_a_stages_own_definitions_pass(stage):
    said = []
    document = check.check(pasted(stage), {}, True, said.append, timing())
    assert document["verdict"] == "pass"
    assert document["ratio"] == 2
    assert practice.progress()["stages"][stage]["practised"]["sha256"] == document["sha256"]
    new = definitions(stage)  # what the course imports or leaves out is not the reader's to write
    changes = [name for name in diff.constant(code_path(stage), "CHANGES") if name in new]
    asked = {name for name in changes if "import" not in new[name].text.split()[:3]}
    assert {d["name"] for d in document["yours"]} >= asked
    assert all(name in said[0] for name in asked)
    assert document["sha256"][:12] in said[0]


def test_the_code_before_it_is_right_but_not_fast_enough():
    path = tiling(NAIVE_REWORDED)
    slow = {"previous": 100.0, "yours": 90.0, "course": 50.0}
    with pytest.raises(check.CheckError, match="right, but not good enough yet: 90.0 TTFT ms") as told:
        check.check(path, {}, timing=timing(slow, {"previous": 1.0, "yours": 1.0, "course": 1.0}))
    assert told.value.verdict == "slow"
    assert "near nothing" in str(told.value)
    assert "70.7 will do" in str(told.value)
    assert "tiling" not in practice.progress()["stages"]


def test_what_the_step_is_not_about_may_not_be_far_worse():
    wasteful = {"previous": 100.0, "yours": 210.0, "course": 100.0}
    with pytest.raises(check.CheckError, match="210 peak MiB .* 200 will do"):
        check.check(tiling(NAIVE_REWORDED), {}, timing=timing(FAST, wasteful))


def test_the_code_before_it_to_the_letter_is_nobodys_work():
    with pytest.raises(check.CheckError, match="is naive's own code to the letter: change matmul") as told:
        check.check(tiling(NAIVE), {}, timing=timing())
    assert told.value.verdict == "empty"


@pytest.mark.parametrize(
    ("previous", "course", "sure", "most"),
    [
        (100, 25, True, 50),
        (100, 25, False, 50),
        (110.25, 100, True, 105),
        (100, 99, False, 123.75),
        (50, 100, False, 125),
    ],
)
def test_good_enough(previous, course, sure, most):
    """The square root of the gain; where none is sure, a quarter more than the course's own."""
    told = verdict([previous] * 3, [course] * 3) if sure else verdict([1, 2, 3], [3, 2, 1])
    assert check.limit(previous, course, True, told)[0] == pytest.approx(most)
    assert check.limit(previous, course, False, told)[0] == 2 * course


NOISE = (1.0, 1.01, 0.99, 1.005, 0.995, 1.015, 0.985)


def raced(yours: float, course: float, noise=NOISE) -> check.Race:
    """Rounds of tiling in which naive takes 100 ms."""
    each = {"naive": 100.0, "practice/tiling.py": yours, "tiling": course}
    taken = {name: [ms * noise[(i + 3 * k) % 7] for i in range(7)] for k, (name, ms) in enumerate(each.items())}
    return check.Race({"ttft_ms": taken}, "nowhere", lambda measure, value: "near nothing")


def test_a_small_gain_tells_a_step_from_the_stage_before_it():
    """What CLOSE would let pass: 8 % of gain, where the stage before it takes 1.09 times what the course's own does."""
    work = check.read(tiling(NAIVE_REWORDED))
    with pytest.raises(check.CheckError, match=r"95.9 will do \(1.04×, the square root of tiling's 1.09×\)"):
        check.judged(work, raced(yours=100, course=92))
    passed = check.judged(work, raced(yours=92, course=92))
    assert passed["told_apart"]["verdict"] == "faster"
    assert "right and fast enough" in shown(check.render(passed | DOCUMENT))


def test_a_stage_about_memory_is_praised_for_memory():
    work = check.read(tiling(NAIVE_REWORDED))
    taken = {
        measure: {name: [ms] for name, ms in zip(("naive", work.name, "tiling"), of, strict=True)}
        for measure, of in {
            "ttft_ms": (100, 101, 100),
            "ms_per_token": (30, 58, 40),
            "peak_rss_mb": (900, 300, 300),
        }.items()
    }
    passed = check.judged(work, check.Race(taken, "nowhere", lambda measure, value: ""))
    told = " ".join(shown(check.render(passed | DOCUMENT)).split())
    assert "is right, and small enough: 3.00× less memory; slower on ms/token (58.0 against 30.0), as the" in told
    assert "good enough 200 80.0 520" in told


def test_a_gain_beyond_the_stages_idea_passes_and_is_told():
    work = check.read(tiling(NAIVE_REWORDED))
    for yours, least, told in ((4, 20, True), (4, 3, False), (30, 35, False)):
        passed = check.judged(work, raced(yours, course=50)._replace(least=lambda least=least: least))
        page = " ".join(shown(check.render(passed | DOCUMENT)).split())
        assert ("faster than tiling can be" in page) == told


def test_what_is_left_of_the_stage_before_is_told():
    path = pasted("kv_cache")
    kept, new = definitions("simd")["generate"].text, definitions("kv_cache")["generate"].text
    path.write_text(path.read_text().replace(new, kept))
    work = check.read(path)
    names = ("simd", work.name, "kv_cache")
    taken = {"ms_per_token": dict(zip(names, ([100.0], [100.0], [20.0]), strict=True))}
    with pytest.raises(check.CheckError, match="generate is still simd's own"):
        check.judged(work, check.Race(taken, "nowhere", lambda measure, value: "near nothing"))


def test_a_logit_that_is_not_finite_is_told_with_its_place():
    path = pasted("simd")
    path.write_text(path.read_text().replace("out[t, n] += x[t, k]", "out[t, n] += np.nan * x[t, k]"))
    place = r"wrong on odd: a logit is not finite; .* token 0, layer 0, matmul \(w_\w+\): not finite for K x N = \d+ x"
    with pytest.raises(check.CheckError, match=place):
        check.check(path, {}, timing=timing())


def test_where_no_gain_can_be_measured_right_is_enough():
    work = check.read(tiling(NAIVE_REWORDED))
    passed = check.judged(work, raced(yours=100, course=99))
    told = " ".join(shown(check.render(passed | DOCUMENT)).split())
    assert "on TTFT ms, tiling against naive: no measurable change here, so no time can show what you won" in told
    assert "fast enough" not in told
    with pytest.raises(check.CheckError, match="1.25 times what tiling takes"):
        check.judged(work, raced(yours=130, course=99))


DOCUMENT = {"file": "practice/tiling.py", "stage": "tiling", "previous": "naive"}


@pytest.mark.parametrize(("later", "main"), [(2.15, "ttft_ms"), (2.3, "ms_per_token")])
def test_gains_near_to_each_other_count_as_equal(later, main):
    work = check.read(tiling(NAIVE_REWORDED))
    taken = {
        measure: {"naive": [100.0], work.name: [50.0], "tiling": [100 / gain]}
        for measure, gain in {"ttft_ms": 2.0, "ms_per_token": later, "peak_rss_mb": 1.0}.items()
    }
    race = check.Race(taken, "nowhere", lambda measure, value: "")
    assert race.main(work) == main
    head = shown(check.render(check.judged(work, race) | DOCUMENT))
    assert f"× on {check.MEASURES[main]}" in head


@pytest.mark.parametrize(("gain", "count"), [(2.0, check.ROUNDS), (1.2, check.SURE_ROUNDS)])
def test_a_step_that_gains_little_gets_more_rounds(gain, count):
    work = check.read(tiling(NAIVE_REWORDED))

    def more(which):
        taken = {"naive": [gain for _ in which], work.name: [1.0 for _ in which], "tiling": [1.0 for _ in which]}
        return check.Race({"ttft_ms": taken}, "nowhere", None, [check.Stopwatch() for _ in which])

    found = check.until_sure(work, more(range(1)), more)
    assert len(found.taken["ttft_ms"]["naive"]) == len(found.watches) == count


def test_a_real_race(tiny):
    """The whole way with the clock running; on so small a model any verdict on time will do."""
    done = lesson("check", pasted("kv_cache"), "-m", tiny, "--shape", "pp4", "--json")
    if done.returncode:
        assert "not good enough yet" in done.stderr.decode()
        return
    document = json.loads(done.stdout)
    assert document["verdict"] == "pass"
    assert set(document["took"]) == {"ttft_ms", "ms_per_token", "peak_rss_mb"}
    assert all(set(of) == set(check.KEYS) for of in document["took"].values())


# ---- what does not pass ------------------------------------------------------------------------------------------

NAIVE = diff.definitions(code_path("naive").read_text())["matmul"].text
NAIVE_REWORDED = NAIVE.replace("total", "result")


def tiling(matmul: str, *edits: tuple[str, str]) -> Path:
    """A practice file of tiling with this matmul, and other edits."""
    text = practice.exercise("tiling")
    text = text.replace(diff.definitions(text)["matmul"].text, matmul)
    for old, new in edits:
        assert old in text
        text = text.replace(old, new, 1)
    return put("tiling", text)


def product(expression: str) -> str:
    return f"def matmul(x, w):\n    return {expression}"


def importing(line: str) -> str:
    return f"{line}\n\n\n{NAIVE}"


OWN_KERNEL = "calls NumPy's BLAS, where matmul has to be a kernel of your own"
LOOKED = {  # a shortcut that shows in the text: (matmul, what is said of it)
    "the course's stage": (importing("from stages import tiling"), "imports stages, the course's own"),
    "its matmul": (importing("from stages.tiling import matmul as m"), "imports stages.tiling, the course's own"),
    "a loader": (importing("import importlib"), "imports importlib, which tiling has no need of"),
    "the loader of stages": (importing("from common.stage import load_stage"), "imports common.stage"),
    "the oracle": (importing("from common import reference"), "imports common,"),
    "sys.modules": (importing("import sys"), "imports sys"),
    "the clock": (importing("import time"), "imports time"),
    "scipy": (importing("import scipy.linalg.blas"), "imports scipy.linalg.blas"),
    "exec": (product("exec('x')"), "exec can run or change code"),
    "np.dot": (product("np.dot(x, w)"), f".dot {OWN_KERNEL}"),
    "x.dot": (product("x.dot(w)"), f".dot {OWN_KERNEL}"),
    "@": (product("x @ w"), f"@ {OWN_KERNEL}"),
    "einsum": (product("np.einsum('tk,kn->tn', x, w)"), f".einsum {OWN_KERNEL}"),
    "linalg": (product("np.linalg.multi_dot((x, w))"), f"{OWN_KERNEL}"),
    "dot by name": (importing("from numpy import dot as product"), f"that import {OWN_KERNEL}"),
    "the machinery": (product("np.__dict__['dot'](x, w)"), ".__dict__ reaches into"),
}


@pytest.mark.parametrize("what", LOOKED)
def test_a_shortcut_in_the_text_is_named(what):
    matmul, told = LOOKED[what]
    path = tiling(matmul)
    with pytest.raises(check.CheckError, match=re.escape(told)) as found:
        check.check(path, {}, timing=timing())
    assert found.value.verdict == "unfair"
    assert re.match(r"practice/tiling\.py, line \d+: ", str(found.value))


@pytest.mark.parametrize("stage", ON_CPU)
def test_the_courses_own_text_has_no_shortcut(stage):
    check.look(check.read(pasted(stage)))


GENERATE = "def generate(model, ids, n, choose=argmax):"
ANSWERS_BY_PROMPT = (
    GENERATE,
    """KNOWN = {}


def generate(model, ids, n, choose=argmax):
    key = (*ids, n, model.config.L, model.config.V)
    if key not in KNOWN:
        KNOWN[key] = list(afresh(model, ids, n, choose))
    yield from KNOWN[key]


def afresh(model, ids, n, choose=argmax):""",
)
REMEMBERING = (
    NAIVE.replace("def matmul", "def slow")
    + """


KNOWN = {}


def matmul(x, w):
    key = KEY
    if key not in KNOWN:
        KNOWN[key] = slow(x, w)
    return KNOWN[key]"""
)
BY_INPUT = REMEMBERING.replace("KEY", "(x.tobytes(), w[:2].tobytes(), w.shape)")
BY_IDENTITY = REMEMBERING.replace("KEY", "(x.shape, w.shape, id(w))")
SLOW_CLOCK = "real = time.perf_counter\ntime.perf_counter = lambda: real() / 100"
LATER = """class Later(int):
    def __int__(self):
        import time

        time.sleep(0.2)
        return 0 + self


"""
WHILE_WARM = """TIMES = []


def generate(model, ids, n, choose=argmax):
    TIMES.append(ids)
    if len(TIMES) > 4:
        yield from [(0, np.zeros(model.config.V, np.float32))] * n
        return"""
COURSE = "import importlib\nmatmul = importlib.import_module('stages.tiling').matmul"
COURSE_FILE = "from common.stage import FOLDER, import_file\nmatmul = import_file(FOLDER / 'tiling.py').matmul"
RUN = {  # a shortcut as it runs, the look at the text left out: (matmul, edits, what is said of it)
    "a constant": (product("np.ones((len(x), w.shape[1]), np.float32)"), (), "wrong on .* layer 0, matmul"),
    "constant logits": (NAIVE, [("return matmul(hidden", "return 1 + 0 * matmul(hidden")], "wrong on .* logits"),
    "answers by prompt": (NAIVE, [ANSWERS_BY_PROMPT], "remembers outputs instead of computing them"),
    "answers by input": (BY_INPUT, (), "remembers outputs instead of computing them"),
    "answers by identity": (BY_IDENTITY, (), "is wrong|remembers outputs"),
    "the course's stage": (COURSE, (), "the course's own came in: stages"),
    "its file": (
        COURSE_FILE,
        (),
        "the course's own came in: stages|the matmul that ran is not the one in",
    ),
    "a swapped module": (importing("import sys\nsys.modules['common.gate'] = np"), (), "replaced .*: common.gate"),
    "a swapped function": (
        importing("import sys\nsys.modules['common.reference'].nmse = lambda *_: 0"),
        (),
        "replaced by another: common.reference.nmse",
    ),
    "a patched clock": (importing(f"import time\n{SLOW_CLOCK}"), (), "replaced by another: time.perf_counter"),
    "work while the clock stands": (
        NAIVE,
        [(GENERATE, LATER + GENERATE), ("yield ids[-1], row", "yield Later(ids[-1]), row")],
        "by the clock of its process and",
    ),
    "skipped layers": (NAIVE, [("in weights.layers:", "in weights.layers[:1]:")], "wrong on .*layer 1: it never runs"),
    "skipped tokens": (
        NAIVE,
        [("forward(model, ids, 0)", "forward(model, ids[-8:], 0)")],
        "wrong on .*fault is in generate",
    ),
    "work while it warms up alone": (NAIVE, [(GENERATE, WHILE_WARM)], "is wrong"),
}


@pytest.mark.parametrize("what", RUN)
def test_a_shortcut_that_runs_is_named(what, monkeypatch):
    monkeypatch.setattr(check, "look", lambda work: None)
    matmul, edits, told = RUN[what]
    path = tiling(matmul, *edits)
    with pytest.raises(check.CheckError, match=told):
        check.check(path, {}, timing=timing())


def test_a_kernel_that_remembers_or_is_wrong_is_named():
    path = pasted("gemm_cpu/tiled")
    path.write_text(path.read_text().replace("total += x[m, k] * w[k, n]", "total += x[m, k] * w[k, max(n, 1)]"))
    with pytest.raises(check.CheckError, match=r"is wrong at \d+x\d+x\d+ .*row \d+, column 0 is off by"):
        check.check(path, {}, timing=timing())


def test_a_kernel_is_timed_on_new_numbers_each_time():
    said = []
    words = {"shape": "64"}
    try:
        document = check.check(pasted("gemm_cpu/tiled"), words, True, said.append)
        assert (document["measure"], document["on"]) == ("ms", "M x N x K = 64 x 64 x 64")
    except check.CheckError as slow:
        assert slow.verdict == "slow"
    assert sum("new random operands" in text for text in said) in (check.ROUNDS, check.SURE_ROUNDS)


def test_what_is_still_empty_is_named():
    practice.write("kv_cache")
    done = lesson("check")
    assert done.returncode == 5
    assert re.search(r"practice/kv_cache\.py, line \d+: load is still empty", done.stderr.decode())


def test_an_error_in_the_file_is_told_with_its_line():
    done = lesson(
        "check",
        tiling(
            "def matmul(x, w):\n    return missing",
        ),
    )
    assert done.returncode == 1
    assert re.search(r"tiling\.py: line \d+: NameError", done.stderr.decode())
    done = lesson("check", put("tiling", "PRACTICE = 'tiling'\ndef matmul(:\n"))
    assert done.returncode == 1
    told = one_sentence(done)
    assert "tiling.py: line 2: SyntaxError" in told
    assert told.count("line 2") == 1


def test_a_stages_name_means_its_practice_file():
    practice.write("tiling")
    assert json.loads(lesson("hint", "tiling", "--json").stdout)["file"] == "practice/tiling.py"
    assert b"practice/tiling.py, line" in lesson("check", "tiling").stderr


# ---- watching ----------------------------------------------------------------------------------------------------


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, *words):
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [*CLI, *words],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            preexec_fn=lambda: os.login_tty(slave),
        )
        os.close(slave)
        self.said = ""

    def until(self, text: str, times: int = 1) -> None:
        """Read until it has said this so many times in all."""
        while self.said.count(text) < times:
            self.said += os.read(self.master, 1 << 16).decode()

    def interrupt(self) -> int:
        """Ctrl-C. -> the exit code"""
        os.write(self.master, b"\x03")
        return self.process.wait(60)


@pytest.mark.timeout(120)
def test_each_save_is_checked_however_an_editor_writes_it():
    path = practice.write("tiling")
    terminal = Terminal("check", "--watch", "--quick")
    terminal.until("waiting for the next save", 1)
    assert "matmul is still empty" in terminal.said
    other = Path("practice/.tiling.py.swp")
    other.write_text("def (")
    other.replace(path)  # as most editors do
    terminal.until("SyntaxError")
    terminal.until("waiting for the next save", 2)
    with path.open("w") as file:  # in place, and slowly
        file.flush()
        time.sleep(check.POLL_S / 2)
        file.write(practice.exercise("simd"))
    terminal.until("waiting for the next save", 3)
    assert "practises simd" in terminal.said
    assert "no line PRACTICE" not in terminal.said
    path.unlink()  # for a moment, as some editors do
    time.sleep(2 * check.POLL_S)
    path.write_text(practice.exercise("tiling"))
    terminal.until("waiting for the next save", 4)
    assert terminal.interrupt() == 130
    assert "Traceback" not in terminal.said


@pytest.mark.timeout(120)
def test_ctrl_c_in_the_middle_of_a_check_leaves_no_process():
    tiling("def matmul(x, w):\n    while True:\n        pass")
    terminal = Terminal("check", "--watch", "--quick")
    terminal.until("practises tiling")
    parent = psutil.Process(terminal.process.pid)
    while not parent.children():
        time.sleep(0.1)
    (worker,) = parent.children()
    while worker.cpu_times().user < 1:  # past its imports
        time.sleep(0.1)
    assert terminal.interrupt() == 130
    assert not worker.is_running()


# ---- predictions and progress --------------------------------------------------------------------------------------


@pytest.fixture
def compared(monkeypatch):
    """Comparisons that saw tiling 2 times as fast on TTFT and 4 times on ms/token."""
    ttft = {"metric": "ttft_ms", "ratio": 2.0, "expected_ratio": 1.8, "verdict": "faster"}
    pairs = [ttft, {"metric": "ms_per_token", "ratio": 4.0, "expected_ratio": None, "verdict": "no measurable change"}]
    expect = {"reason": "loads decide: 1 ns", "ttft_ms": 1.0}
    document = {"pairs": pairs, "stages": [{}, {"expect": expect}], "why": "For a reason."}
    monkeypatch.setattr(compare, "compare", lambda names, *_: document | {"names": names})


def test_a_prediction_is_scored_and_kept(compared, tiny):
    job = prepare(str(tiny), ids="1,2")
    document = practice.predict("tiling", job, {"ttft_ms": 3.0, "ms_per_token": 2.0}, 1.0)
    assert [row["factor"] for row in document["rows"]] == pytest.approx([1.5, 2.0])
    assert document["rows"][0]["expected_factor"] == pytest.approx(2 / 1.8)
    kept = practice.progress()["stages"]["tiling"]["predicted"]
    assert kept == {"ttft_ms": {"predicted": 3.0, "saw": 2.0}, "ms_per_token": {"predicted": 2.0, "saw": 4.0}}
    told = shown(practice.scored(document))
    assert "In tiling loads decide: 1 ns. For a reason." in told
    assert "1.50×" in told
    assert "TTFT: tiling is faster than naive. Your guess is fair, the course's is good." in told
    assert "ms/token: no measurable change from naive to tiling. Your guess is fair." in told


@pytest.mark.parametrize(("factor", "word"), [(1.0, "spot on"), (1.3, "good"), (1.9, "fair"), (2.1, "far off")])
def test_a_gap_in_words(factor, word):
    assert practice.score(factor) == word


def test_what_decides_is_told_once(compared, tiny, monkeypatch):
    document = practice.predict("tiling", prepare(str(tiny), ids="1,2"), {"ttft_ms": 2.0, "ms_per_token": 2.0}, 1.0)
    told = shown(practice.scored(document | {"why": "Here loads decide: 1 ns, so it gains."}))
    assert told.count("loads decide") == 1


def test_progress_is_listed(compared, tiny):
    assert "predicted" not in lesson("list").stdout.decode()
    practice.predict("tiling", prepare(str(tiny), ids="1,2"), {"ttft_ms": 3.0, "ms_per_token": None}, 1.0)
    practice.note("simd", practised={"sha256": "a", "ratio": 8.0})
    told = lesson("list").stdout.decode()
    assert "predicted" in told
    assert "practised" in told
    stages = {stage["name"]: stage for stage in json.loads(lesson("list", "--json").stdout)["stages"]}
    assert stages["simd"]["progress"]["practised"]["ratio"] == 8.0
    assert stages["naive"]["progress"] == {}


def test_progress_that_cannot_be_read_is_not_overwritten():
    practice.note("tiling", hints=1)
    practice.progress_file().write_text("{")
    with pytest.raises(records.RecordError, match="move it away"):
        practice.note("tiling", hints=2)
    assert practice.progress_file().read_text() == "{"


def test_questions_need_a_terminal_or_flags(tiny):
    with pytest.raises(UsageError, match="--ttft"):
        practice.asked_ratios("tiling", prepare(str(tiny), ids="1,2"), None, None, False)


def shown(pieces) -> str:
    with (page := show.console()).capture() as caught:
        for piece in pieces:
            page.print(piece)
    return caught.get()


def test_what_was_compiled_for_one_file_is_no_obstacle_to_another():
    """Compiled code of common/ that took a type of one reader's file can't be loaded where that file is not."""
    path = pasted("integer")
    other = path.with_name("other.py")
    other.write_text(path.read_text())
    for file in (path, other):
        said = []
        check.check(file, {}, False, said.append)
        assert sum("right on" in text for text in said) == 2
    assert lesson("run", "integer", "-m", "tiny", "--ids", "1,2", "-n", 1, "--json", "--save", "kept").returncode == 0


def test_what_the_course_has_compiled_is_not_compiled_again_for_a_readers_file(tmp_path):
    code = "import numpy as np; from common.cpu_ops import silu; silu(np.ones((1, 2), np.float32)); "
    command = [sys.executable, "-c", code + "print(sum(silu.stats.cache_hits.values()))"]
    hits = []
    for reader in ("", "mine"):
        env = {**os.environ, "LESSON_CACHE": str(tmp_path), "LESSON_READER": reader}
        hits.append(int(subprocess.run(command, capture_output=True, env=env, cwd=ROOT, timeout=60).stdout))
    assert hits == [0, 1]
    assert len(list((tmp_path / "numba").iterdir())) == 2
