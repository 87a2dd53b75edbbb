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
