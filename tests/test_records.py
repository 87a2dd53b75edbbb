"""Records are written whole, under a name that any file system takes, or refused in one sentence."""

import json

import pytest

from common import chapters, records
from common.stage import FOLDER


def run_of(name="A model", stages=("naive",), shape="pp2+tg3", threads=1):
    model = {"name": name, "quant": "Q4_1", "layers": 30}
    return [{"stage": s, "model": model, "shape": shape, "threads": threads} for s in stages]


def test_a_records_name_tells_its_stages_model_and_shape():
    found = records.file_name(run_of("SmolLM2 135M", ("naive", "./my/own.py")))
    assert found == "naive-own-smollm2-135m-q4-1-30-layers-pp2-tg3.json"
    assert records.file_name(run_of(threads=2)) == "naive-a-model-q4-1-30-layers-pp2-tg3-2-threads.json"


@pytest.mark.parametrize("name", ["a" * 300, "\\u202e" * 100, "A"])
def test_a_long_name_is_one_that_can_be_saved(tmp_path, name):
    runs = run_of(name, ["naive"] * 60, f"pp2+tg{10**300}")
    path = records.save(runs[0], tmp_path / records.file_name(runs))
    assert json.loads(path.read_text()) == runs[0]
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_record_that_cannot_be_written_leaves_nothing(tmp_path):
    (tmp_path / "a.json").mkdir()
    for name in ("a.json", "b" * 300):
        with pytest.raises(records.RecordError, match="no record can be kept .*--save"):
            records.save({}, tmp_path / name)
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_the_ladder_takes_a_column_from_each_stages_own_record():
    rows = chapters.ladder(FOLDER, "nvidia-h200/llm").splitlines()
    record = json.loads((chapters.REPORTS / "nvidia-h200/llm/resident.json").read_text())
    took = next(r["ttft_ms"]["median"] for r in record["rows"] if r["shape"] == "pp512")
    cells = {row.split("]")[0].strip("| ["): row.split(" | ")[2:] for row in rows if row.startswith("| [")}
    assert float(cells["resident"][0]) == pytest.approx(took, abs=0.5)
    assert cells["quantized"][0] == "–"  # recorded there too, but on the host's CPU
    assert "NVIDIA H200" in rows[-1]


def test_a_peer_recorded_beside_the_stages_is_the_ladders_last_row():
    *_, last, _, _ = chapters.ladder(FOLDER, "nvidia-h200/llm").splitlines()
    ms = json.loads((chapters.REPORTS / "nvidia-h200/llm/llama.cpp.json").read_text())["ms"]
    name, _, *cells = last.strip("| ").split(" | ")
    assert name == "llama.cpp"
    assert [float(cell) for cell in cells] == pytest.approx([ms["pp512"], ms["tg128"]], rel=0.01)


def test_what_a_record_notes_of_its_times_stands_beside_them(monkeypatch):
    read = chapters.figures.record

    def noted(name):
        return read(name) | ({"note": "of another build"} if name.endswith("resident") else {"note": ""})

    monkeypatch.setattr(chapters.figures, "record", noted)
    cells, line = chapters.folder_columns("nvidia-h200/llm")[1:]
    assert all(cell.endswith("†") for cell in cells["resident"])
    assert not any("†" in cell for cell in cells["cuda"])
    assert line.endswith(". † resident: of another build")


def test_what_a_run_said_is_quoted_from_its_record(monkeypatch):
    run = run_of()[0] | {"machine": {"name": "M"}, "commit": None, "text": " a word", "output_ids": [1, 2]}
    run["model"] = run["model"] | {"file_layers": 30}
    monkeypatch.setattr(chapters.figures, "record", lambda name: run | {"ms_per_token": {"median": 2.5}})
    told = chapters.said(FOLDER, "any")
    assert told.startswith("> … a word …\n") and told.endswith("2 tokens, 2.50 ms each.")
