"""The doctor's report: complete, honest about what is missing, and with one thing to do for each warning."""

import importlib.machinery
import json
import os
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest

from common import doctor, machine, sources


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("LESSON_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("LESSON_MODEL", raising=False)
    return tmp_path / "cache"


def find(report: dict, name: str) -> dict:
    return next(c for c in report["checks"] if c["name"] == name)


def test_the_report_is_json_and_covers_everything(tiny):
    report = json.loads(json.dumps(doctor.report(str(tiny))))
    assert report["schema"] == 1
    names = "Python,system,CPU,vectors,caches,cores,memory,disk,cache folder,numba,kernels,model,GPU"
    assert ",".join(c["name"] for c in report["checks"]) == names
    assert all(c["value"] and "\n" not in c["value"] for c in report["checks"])
    assert report["ok"] == all(c["next"] is None for c in report["checks"])
    assert report["machine"]["threads"] <= report["machine"]["cores"] == os.cpu_count()
    assert report["model"]["size"] == tiny.stat().st_size and report["model"]["sha256_ok"] is None
    assert find(report, "model")["status"] == "ok" and "2 layers" in find(report, "model")["value"]


def test_features_agree_with_the_kernel():
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    features = doctor.cpu_features()
    named = {"AVX2": "avx2", "FMA": "fma", "F16C": "f16c", "AVX-512": "avx512f", "AMX": "amx_int8"}
    for name, flag in named.items():
        if name in features and flags:
            assert features[name] == (f" {flag} " in flags.replace("\n", " ")), name
    assert features


def test_a_machine_without_vectors_or_with_a_quota_is_warned():
    this = replace(machine.identify(), affinity=(0, 1), quota=0.5)
    warned = [c["name"] for c in doctor.system_checks(this, {"AVX2": False, "AMX": False}) if c["status"] == "warn"]
    assert warned == ["vectors", "cores"]
    this = replace(this, quota=None)
    assert all(c["status"] == "ok" for c in doctor.system_checks(this, {"AVX2": True, "AMX": False}))


def test_rendering_shows_every_line_and_what_to_do():
    checks = [doctor.check("one", "fine"), doctor.check("another", "not so [bold]", "do this")]
    assert doctor.render({"checks": checks}) == (
        "ok    one      fine\nwarn  another  not so [bold]\n               → do this"
    )


def test_a_model_not_yet_fetched_is_not_fetched(cache):
    model = doctor.model_check("smollm2")
    assert not model["present"] and "lesson pull smollm2" in model["next"]
    model = doctor.model_check("tinyllama-shape")
    assert not model["present"] and model["next"] is None
    assert not cache.exists()


def test_a_damaged_model_is_found_by_size_and_by_digest(cache, smollm2):
    path = sources.PULLED["smollm2"].path
    path.parent.mkdir(parents=True)
    content = bytearray(smollm2.read_bytes())
    path.write_bytes(content)
    assert doctor.model_check("smollm2")["sha256_ok"] is True
    content[-1] ^= 1
    path.write_bytes(content)
    model = doctor.model_check("smollm2")
    assert model["sha256_ok"] is False and "damaged" in model["state"] and model["next"] == "lesson pull smollm2"
    path.write_bytes(content[:-1])
    assert doctor.model_check("smollm2")["sha256_ok"] is False


@pytest.mark.parametrize("spec, words", [("tinylama", "did you mean tinyllama"), ("absent.gguf", "does not exist")])
def test_a_model_that_is_not_there(cache, spec, words):
    model = doctor.model_check(spec)
    assert words in model["state"] and model["next"] and not model["present"]


def test_a_file_that_is_no_model(tmp_path):
    (tmp_path / "image.gguf").write_bytes(b"\x89PNG" * 100)
    model = doctor.model_check(str(tmp_path / "image.gguf"))
    assert model["present"] and "not a GGUF file" in model["state"] and model["next"]


def test_a_cache_folder_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("LESSON_CACHE", str(tmp_path / "file"))
    checks = {c["name"]: c for c in doctor.memory_checks(machine.identify())}
    assert "cannot be written" in checks["cache folder"]["value"] and "LESSON_CACHE" in checks["cache folder"]["next"]


def test_little_disk_and_memory(monkeypatch):
    this = machine.identify()
    monkeypatch.setattr("shutil.disk_usage", lambda path: types.SimpleNamespace(free=10**9))
    monkeypatch.setattr("psutil.virtual_memory", lambda: types.SimpleNamespace(available=10**9))
    warned = [c["name"] for c in doctor.memory_checks(this) if c["status"] == "warn"]
    assert warned == ["memory", "disk"]


# CuPy, played by a module.


def play_cupy(monkeypatch, count) -> None:
    cupy = types.ModuleType("cupy")
    cupy.__spec__ = importlib.machinery.ModuleSpec("cupy", None)
    cupy.__version__ = "14.0"
    runtime = types.SimpleNamespace(getDeviceCount=count, getDeviceProperties=lambda i: {"name": b"Card %d" % i})
    cupy.cuda = types.SimpleNamespace(runtime=runtime)
    monkeypatch.setitem(sys.modules, "cupy", cupy)


def fail():
    raise RuntimeError("cudaErrorInsufficientDriver:\n driver too old")


def test_gpu_states(monkeypatch):
    play_cupy(monkeypatch, lambda: 2)
    assert doctor.gpu_check() == doctor.check("GPU", "CuPy 14.0: Card 0, Card 1")
    play_cupy(monkeypatch, fail)
    found = doctor.gpu_check()
    assert found["status"] == "warn" and "cudaErrorInsufficientDriver: driver too old" in found["value"]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/nvidia-smi")
    assert "no CuPy" in doctor.gpu_check()["value"] and "cuda13x" in doctor.gpu_check()["next"]


def test_sizes_in_words():
    assert [doctor.size(n) for n in (0, 48 << 10, 2 << 20, 93_800_000, 25 << 30)] == [
        "0 B",
        "48 KB",
        "2 MiB",
        "89.5 MiB",
        "25 GiB",
    ]
