"""llama.cpp as a column: with a library that stands in for it, and, where it is installed, with itself."""

import importlib.util
import io
import json
import re
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from common import gate, harness, llama_bench, machine, peers, quality, reference, stage_record
from common.job import UsageError, prepare
from common.model import open_model
from common.stage import StageError, load_stage, require
from tests.helpers import ROOT, lesson, one_sentence

# A library of llama.cpp's names over the oracle. SPOIL adds noise to its logits, BUILT is its system info.
STAND_IN = """
import ctypes, os
from types import SimpleNamespace as Space
import numpy as np
from common import reference
from common.model import open_model

llama_log_callback = lambda function: function
llama_log_set = lambda function, data: None
llama_backend_init = lambda: None
llama_model_default_params = Space
llama_context_default_params = lambda: Space(n_ctx=512)
llama_print_system_info = lambda: os.environ.get("BUILT", "CPU : SSE3 = 1 | AVX2 = 1 | AVX = 0 | ").encode()

def llama_model_load_from_file(path, options):
    assert options.n_gpu_layers == 0
    return open_model(path.decode())

def llama_init_from_model(model, options):
    assert options.n_threads == options.n_threads_batch == len(os.sched_getaffinity(0)) == 1
    return Space(model=model, n_ctx=options.n_ctx, n_batch=options.n_batch, text=[], rows=None)

llama_get_memory = lambda context: context

def llama_memory_seq_rm(context, sequence, start, end):
    assert (sequence, end) == (-1, -1)
    del context.text[start:]

llama_batch_get_one = lambda tokens, count: Space(token=tokens, n_tokens=count, logits=None)

def llama_decode(context, batch):
    context.text += list(batch.token)
    if len(context.text) > context.n_ctx or batch.n_tokens > context.n_batch:
        return 1
    wanted = batch.n_tokens if batch.logits else 1
    rows = reference.compute(context.model, context.text, wanted).logits.astype(np.float32)
    context.rows = rows + float(os.environ.get("SPOIL", 0)) * np.random.default_rng(0).normal(size=rows.shape)
    context.rows = np.ascontiguousarray(context.rows, np.float32)
    return 0

llama_get_logits = lambda context: context.rows.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
"""

installed = pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="llama-cpp-python is missing")


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory):
    """A folder with a package llama_cpp, for PYTHONPATH."""
    folder = tmp_path_factory.mktemp("library")
    (folder / "llama_cpp").mkdir()
    (folder / "llama_cpp" / "__init__.py").touch()
    (folder / "llama_cpp" / "llama_cpp.py").write_text(STAND_IN)
    return folder


@pytest.fixture(scope="module")
def compared(stand_in, tiny, tmp_path_factory):
    """simd beside the stand-in, as JSON."""
    words = ("simd", "llama.cpp", "-m", tiny, "--ids", "5,7,11", "-n", 3, "--save", tmp_path_factory.mktemp("kept"))
    done = lesson("compare", *words, "--budget", 5, "--json", PYTHONPATH=stand_in)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# ---- without it ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words", [("run", "llama.cpp"), ("compare", "simd", "llama.cpp"), ("quality", "llama.cpp", "-m", "smollm2")]
)
def test_where_it_is_missing_one_sentence_says_how_to_get_it(words, tmp_path):
    (tmp_path / "llama_cpp").mkdir()  # a folder without code hides an installed one from nobody
    done = lesson(*words, PYTHONPATH=hidden(tmp_path))
    assert done.returncode == 4
    assert "pip install llama-cpp-python" in one_sentence(done)


def hidden(folder):
    """A PYTHONPATH under which llama_cpp can't be found, whatever is installed."""
    (folder / "sitecustomize.py").write_text(
        "import importlib.util as u\nfind = u.find_spec\n"
        "u.find_spec = lambda name, *more: None if name == 'llama_cpp' else find(name, *more)\n"
    )
    return folder


@pytest.mark.parametrize(
    "words", [("profile",), ("explain", "OP", "matmul"), ("run", "--cold"), ("sweep", "OP", "A=1")]
)
def test_what_looks_inside_a_stage_refuses_it(words, tiny):
    command, *rest = words
    rest = ["llama.cpp" if word == "OP" else word for word in rest]
    done = lesson(command, *(rest if "llama.cpp" in rest else ["llama.cpp", *rest]), "-m", tiny)
    assert done.returncode in (2, 4)
    assert "llama.cpp" in one_sentence(done)


def test_a_name_nearly_right_is_corrected():
    with pytest.raises(StageError, match=r"did you mean llama\.cpp\?"):
        require("llama-cpp")


# ---- with a library that stands in for it ----------------------------------------------------------------------


def test_it_is_one_more_column(compared):
    simd, peer = compared["stages"]
    assert (peer["stage"], peer["prompt_ids"], peer["threads"]) == ("llama.cpp", simd["prompt_ids"], simd["threads"])
    assert peer["model"] == simd["model"]
    assert peer["output_ids"] == simd["output_ids"]
    assert len(peer["ttft_ms"]["samples"]) == len(simd["ttft_ms"]["samples"])
    assert [p["metric"] for p in compared["pairs"]] == ["ttft_ms", "ms_per_token"]
    assert compared["changed"] == {"llama.cpp": []}
    assert (peer["expect"]["ttft_ms"], peer["jit_ms"]) == (None, 0)
    assert 0 < peer["expect"]["bound_ttft_ms"] < simd["expect"]["bound_ttft_ms"]  # it multiplies 8-bit integers


def test_its_build_is_recorded(compared):
    found = compared["stages"][1]["peer"]
    assert found["system_info"] == "CPU : SSE3 = 1 | AVX2 = 1 | AVX = 0 |"
    assert found["flags"] == ["SSE3", "AVX2"]
    assert "AVX2" not in found["lacks"]
    assert "built with SSE3 AVX2" in peers.told(found)
    assert "GGML_NATIVE=ON" in peers.told({**found, "lacks": ["AVX512"]})


def test_it_passes_the_same_gate_with_a_tolerance_of_its_own(compared):
    agreed = compared["agree"][1]
    assert agreed["passed"]
    assert agreed["tolerance"] == gate.tolerance("llama.cpp", len(compared["stages"][1]["output_ids"]))
    assert agreed["nmse"] < 1e-9


@pytest.mark.parametrize("shown_as", ["--json", None])
def test_outside_its_tolerance_it_is_shown_with_a_remark(shown_as, stand_in, tiny, tmp_path):
    words = ("llama.cpp", "-m", tiny, "--ids", "5,7,11", "-n", 2, "--save", tmp_path, *filter(None, [shown_as]))
    done = lesson("run", *words, PYTHONPATH=stand_in, SPOIL="1.0", COLUMNS="200")
    assert done.returncode == 0, done.stderr
    if shown_as:
        assert json.loads(done.stdout)["agreement"]["passed"] is False
    else:
        assert "outside its tolerance" in done.stdout.decode()


def test_a_cut_model_is_written_out_for_it(tiny, tmp_path):
    whole, part = open_model(tiny), open_model(tiny, 1)
    written = open_model(peers.cut(part, tmp_path / "cut.gguf"))
    assert (written.config.L, written.config.file_layers) == (1, 1)
    assert written.config.name == whole.config.name
    want = reference.compute(part, [5, 7, 11]).logits
    np.testing.assert_array_equal(reference.compute(written, [5, 7, 11]).logits, want)


@pytest.fixture
def here(stand_in, monkeypatch):
    """The peer loaded in this process over the stand-in."""
    monkeypatch.syspath_prepend(str(stand_in))
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0}, raising=False)
    return load_stage("llama.cpp")


def test_forward_gives_every_row_and_goes_on_from_start(here, tiny):
    gguf, ids = open_model(tiny), [5, 7, 11, 13, 17]
    model = here.load(gguf, 16, 1)._replace(batch=2)  # more than one piece
    want = reference.compute(gguf, ids).logits
    np.testing.assert_allclose(here.logits(model, here.forward(model, ids, 0)), want, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(here.forward(model, ids[3:], 3), want[3:], rtol=1e-4, atol=1e-4)


def test_generate_takes_what_it_is_told(here, tiny):
    gguf, ids = open_model(tiny), [5, 7, 11]
    model, given = here.load(gguf, 16, 1), iter([1, 2, 3])
    told = [(token, row.copy()) for token, row in here.generate(model, ids, 3, lambda row: next(given))]
    assert [token for token, _ in told] == [1, 2, 3]
    want = reference.compute(gguf, [*ids, 1, 2], 3).logits
    np.testing.assert_allclose([row for _, row in told], want, rtol=1e-4, atol=1e-4)


def test_more_than_the_context_holds_is_an_error(here, tiny):
    model = here.load(open_model(tiny), 4, 1)
    with pytest.raises(StageError, match="gives up on 1 tokens"):
        here.forward(model, [1, 2, 3, 4, 5], 0)


# ---- with itself -----------------------------------------------------------------------------------------------


@pytest.mark.peers
@installed
@pytest.mark.parametrize("layers", [None, 2])
def test_llama_cpp_agrees_with_the_reference(layers, smollm2, tmp_path):
    job = prepare(str(smollm2), layers, ids="6403,1980,253,655,28,665,436,253,1838", n=4)
    sample = harness.run(job.request("llama.cpp", rows_file=str(tmp_path / "rows.npy")))
    rows = np.load(tmp_path / "rows.npy")
    want = reference.logits(job.gguf, job.ids + sample.output_ids[:-1], rows=4)
    assert gate.agreement(rows, sample.output_ids, want, gate.tolerance("llama.cpp")).passed


@pytest.mark.peers
@installed
def test_llama_cpp_scores_a_text(smollm2, tmp_path):
    done = lesson("quality", "llama.cpp", "-m", smollm2, "--tokens", 64, "--json", "--save", tmp_path)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["stages"]
    assert 0 < row["kl"]["mean"] < 0.05


# ---- rows of llama-bench ---------------------------------------------------------------------------------------

# As build 0c1e570 writes a row.
ROW = {"build_commit": "0c1e570", "build_number": 1, "cpu_info": "AMD EPYC", "gpu_info": "", "backends": "CPU",
       "model_filename": "", "model_type": "llama ?B Q4_K - Medium", "model_size": 0, "model_n_params": 0,
       "n_batch": 2048, "n_ubatch": 512, "n_threads": 1, "cpu_mask": "0x0", "cpu_strict": False, "poll": 50,
       "type_k": "f16", "type_v": "f16", "n_gpu_layers": -1, "main_gpu": 0, "flash_attn": -1, "repack": True,
       "n_prompt": 0, "n_gen": 0, "n_depth": 0, "test_time": "2026-11-30T00:00:39Z", "avg_ns": 1, "stddev_ns": 0,
       "avg_ts": 1.0, "stddev_ts": 0.0}  # fmt: skip


@pytest.fixture(scope="module")
def job(tiny):
    return prepare(str(tiny), shape="pp3", n=2)


@pytest.fixture(scope="module")
def row(tiny):
    tensors = open_model(tiny).gguf.tensors.values()
    own = {
        "model_filename": f"/elsewhere/{tiny.name}",
        "model_size": sum(t.raw.nbytes for t in tensors),
        "model_n_params": sum(int(np.prod(t.shape)) for t in tensors),
        "cpu_info": machine.sold_as(),
    }
    return ROW | own


def prompt_row(row, n=3, ns=(2_000_000, 4_000_000, 3_000_000), **more):
    return {**row, "n_prompt": n, "samples_ns": list(ns), **more}


def token_row(row, n=2, ns=(8_000_000,), **more):
    return {**row, "n_gen": n, "samples_ns": list(ns), **more}


@pytest.fixture
def bring_in(tmp_path, job):
    """Import rows, given as a value or as text; records go to a folder of the test's own."""

    def call(rows, **more):
        path = tmp_path / "bench.json"
        path.write_text(rows if isinstance(rows, str) else json.dumps(rows))
        return llama_bench.bring_in(path, job, save=str(tmp_path / "kept"), **more)

    return call


def test_rows_are_kept_in_ms_of_a_prompt_and_of_a_token(bring_in, row, tmp_path):
    found = bring_in([prompt_row(row), token_row(row, n_depth=4)])
    (kept,) = (tmp_path / "kept").rglob("*.json")
    assert json.loads(kept.read_text()) == json.loads(json.dumps(found))
    assert kept.parent.name == "peers"
    assert kept.parent.parent.name == found["machine"]["slug"] == machine.identify().slug
    assert "elsewhere" not in kept.read_text(), "where the model lay is told"
    prompt, token = found["rows"]
    assert (prompt["shape"], prompt["ms"]["median"], prompt["tokens_per_s"]) == ("pp3", 3.0, 1000.0)
    assert (token["shape"], token["ms"]["median"], token["tokens_per_s"]) == ("tg2@d4", 4.0, 250.0)


def test_a_second_import_replaces_a_shape_and_keeps_the_others(bring_in, row):
    bring_in([prompt_row(row), token_row(row)])
    found = bring_in([token_row(row, ns=[2_000_000])])
    assert {r["shape"]: r["ms"]["median"] for r in found["rows"]} == {"pp3": 3.0, "tg2": 1.0}


def test_a_second_import_keeps_the_checks_of_other_shapes(bring_in, row, monkeypatch):
    monkeypatch.setattr(llama_bench, "require", lambda name: None)
    monkeypatch.setattr(llama_bench, "checked", lambda job, rows: [{"shape": llama_bench.row_shape(r)} for r in rows])
    monkeypatch.setattr(peers, "about", lambda: {"package": "1"})
    bring_in([prompt_row(row), token_row(row)], check=True)
    found = bring_in([token_row(row)])
    assert (found["check"], found["peer"]) == ([{"shape": "pp3"}], {"package": "1"})


def test_rows_of_another_machine_go_to_its_folder(bring_in, row):
    assert bring_in([prompt_row(row, cpu_info="Some Other CPU")])["machine"]["slug"] == "some-other-cpu"
    gpu = bring_in([prompt_row(row, gpu_info="NVIDIA H200", n_gpu_layers=-1, backends="CUDA")])
    assert gpu["machine"] == {"name": "NVIDIA H200", "slug": "nvidia-h200"}


@pytest.mark.parametrize(
    ("change", "asked", "told"),
    [
        ({"model_size": 96576768}, {}, "96,576,768 bytes of weights"),
        ({"model_n_params": 7}, {}, "7 parameters"),
        ({"model_filename": "/models/other.gguf"}, {}, "'other.gguf', not tiny"),
        ({"model_type": "llama ?B Q8_0"}, {}, "is Q4_K"),
        ({"model_type": "qwen2 ?B Q4_K - Medium"}, {}, "type 'qwen2"),
        ({"n_threads": 2}, {"threads": 1}, "2 threads, not 1"),
        ({}, {"shape": "pp64+tg2"}, "no row of pp64 or tg2: it has pp3"),
        ({}, {"shape": "64"}, "give it as pp64"),
        ({"n_gen": 4}, {}, "pp3+tg4"),
        ({"samples_ns": []}, {}, "not times"),
        ({"samples_ns": [0]}, {}, "not times"),
        ({"n_prompt": "3"}, {}, "lacks n_prompt"),
    ],
)
def test_what_does_not_match_is_refused(change, asked, told, bring_in, row, tmp_path):
    with pytest.raises(UsageError, match=re.escape(told)):
        bring_in([prompt_row(row) | change], **asked)
    assert list((tmp_path / "kept").rglob("*.json")) == []


@pytest.mark.parametrize("text", ["", "{}", "[]", "[1]", '[{"model": "x"}]', "| model | size |"])
def test_what_is_not_llama_benchs_is_refused(text, bring_in):
    with pytest.raises(UsageError, match="llama-bench"):
        bring_in(text)


def test_rows_of_several_threads_are_refused(bring_in, row):
    with pytest.raises(UsageError, match="mixes numbers of threads"):
        bring_in([prompt_row(row), prompt_row(row, n_threads=2)])


def test_the_command_line_says_so_in_one_sentence(tiny, tmp_path, row):
    (tmp_path / "bench.json").write_text(json.dumps([prompt_row(row)]))
    done = lesson("import", tmp_path / "bench.json", "-m", tiny, "-t", 3)
    assert (done.returncode, "1 threads, not 3" in one_sentence(done)) == (2, True)
    done = lesson("import", tmp_path / "missing.json", "-m", tiny)
    assert (done.returncode, "No such file" in one_sentence(done)) == (2, True)


def test_a_comparison_shows_the_rows_that_time_what_it_times(bring_in, row, job, tmp_path):
    found = bring_in(
        [prompt_row(row), prompt_row(row, 64), token_row(row), token_row(row, 7), token_row(row, n_depth=99)]
    )
    slug, kept = found["machine"]["slug"], str(tmp_path / "kept")
    rows = llama_bench.recorded(job, slug, kept)
    assert [r["shape"] for r in rows] == ["pp3", "tg2"]
    assert "recorded, not run now" in shown(llama_bench.beside(rows))
    assert llama_bench.recorded(replace(job, threads=2), slug, kept) == []
    assert llama_bench.recorded(job, "elsewhere", kept) == []
    assert llama_bench.beside([]) == []


def test_compare_carries_them(stand_in, tiny, row, tmp_path):
    (tmp_path / "bench.json").write_text(json.dumps([prompt_row(row)]))
    kept = ("--save", tmp_path / "kept")
    assert lesson("import", tmp_path / "bench.json", "-m", tiny, *kept).returncode == 0
    words = ("simd", "llama.cpp", "-m", tiny, "--shape", "pp3", "-n", 1, "--budget", 1, *kept)
    done = lesson("compare", *words, "--json", PYTHONPATH=stand_in)
    assert done.returncode == 0, done.stderr
    assert [r["shape"] for r in json.loads(done.stdout)["llama_bench"]] == ["pp3"]


def test_check_holds_the_two_clocks_together(stand_in, tiny, row, tmp_path):
    hour = 3600e9
    rows = [prompt_row(row, ns=[hour]), token_row(row, ns=[hour]), prompt_row(row, n_depth=4, ns=[hour])]
    (tmp_path / "bench.json").write_text(json.dumps(rows))
    words = ("import", tmp_path / "bench.json", "-m", tiny, "--check", "--save", tmp_path / "kept")
    done = lesson(*words, "--json", PYTHONPATH=stand_in)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [(c["shape"], c["within"]) for c in found["check"]] == [("pp3", False), ("tg2", False)]
    assert all(len(c["column_ms"]["samples"]) == llama_bench.ROUNDS and c["ratio"] < 0.1 for c in found["check"])
    assert "more than 10% apart at pp3, tg2" in shown(llama_bench.render(found))


def shown(pieces) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    for piece in pieces:
        console.print(piece)
    return console.export_text()


# ---- quality and records ---------------------------------------------------------------------------------------


def test_a_stage_is_judged_over_the_peer_whichever_is_named_first():
    draw = np.random.default_rng(0).random(400)
    stage, peer = ("simd", {"kl": draw}), ("llama.cpp", {"kl": 2 * draw})
    found = quality.pair(stage, peer)
    assert found == quality.pair(peer, stage)
    assert (found["a"], found["b"]) == ("llama.cpp", "simd")
    assert found["kl_mean"]["value"] == pytest.approx(-draw.mean())
    assert found["upper_share"] == pytest.approx(found["kl_mean"]["upper"] / (2 * draw.mean()))
    assert "simd over llama.cpp" in quality.against(found)


def test_a_record_of_the_peer_has_the_keys_of_any_other(here, stand_in, tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(stand_in))
    monkeypatch.setattr(stage_record, "SHAPES", ("pp4", "tg2"))
    found = stage_record.record(["llama.cpp"], [str(tiny)], 1, 60.0, str(tmp_path))
    (kept,) = tmp_path.rglob("llm/llama.cpp.json")
    assert found["files"] == [str(kept)]
    assert json.loads(kept.read_text()) == json.loads(json.dumps(found["records"][0]))
    assert [(r["shape"], r["prompt"], r["new"]) for r in found["records"][0]["rows"]] == [("pp4", 4, 1), ("tg2", 1, 3)]
    of_gpu = json.loads((ROOT / "reports/nvidia-h200/llm/cuda.json").read_text())
    shared = {
        "schema",
        "stage",
        "model",
        "machine",
        "threads",
        "commit",
        "rows",
        "ms",
        "load_ms",
        "agreement",
    }
    assert shared <= set(of_gpu) & set(found["records"][0])
    assert set(of_gpu["model"]) <= set(found["records"][0]["model"])
    assert {"shape", "prompt", "new", "ttft_ms", "ms_per_token"} <= set(found["records"][0]["rows"][0])


def test_a_record_takes_the_shapes_that_time_allows(tiny, monkeypatch):
    job = prepare(str(tiny), shape="pp1")
    monkeypatch.setattr(stage_record, "expected_s", lambda name, job, here: len(job.ids) + job.n)
    assert stage_record.fitting("simd", job, None, 1e9) == list(stage_record.SHAPES[:3])  # the context holds 1024
    assert stage_record.fitting("simd", job, None, 3 * 65) == ["pp64", "tg32"]
    assert stage_record.fitting("simd", job, None, 3 * 8) == ["pp4+tg2"]
    assert stage_record.fitting("simd", job, None, 0) == ["pp2+tg1"]
    at = stage_record.at(job, "tg32")
    assert (len(at.ids), at.n) == (1, 33)
    assert stage_record.at(job, "pp64").n == 1
