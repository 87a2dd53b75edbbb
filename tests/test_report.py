"""`lesson report`: report.md and plots say what the records say, and what has no record is left out."""

import json
import shutil
import sys

import pytest
from typer.testing import CliRunner

import cli
from common import chapters, figures, plots, report, roofline, show, webpage
from common.figures import REPORTS, multiply_adds

TIMED = [path for kind in ("compare/*", "llm/*", "*/ladder") for path in REPORTS.glob(f"*/{kind}.json")]


@pytest.fixture(scope="session")
def places():
    return {place.slug: place for place in report.gather(REPORTS)}


@pytest.fixture
def one(tmp_path):
    """A reports/ of one comparison: (folder, path of the record, its document)."""
    found = {path: json.loads(path.read_text("utf-8"))["stages"] for path in REPORTS.glob("*/compare/*.json")}
    whole = {p: all(run["ms_per_token"] and run["threads"] == 1 for run in runs) for p, runs in found.items()}
    source = max(found, key=lambda p: (whole[p], len(found[p])))
    path = tmp_path / source.parent.parent.name / "compare" / source.name
    path.parent.mkdir(parents=True)
    shutil.copy(source, path)
    return tmp_path, path, json.loads(path.read_text("utf-8"))


def told(reports):
    place = report.gather(reports)[0]
    return report.markdown(place, plots.plots(place))


def test_every_machine_that_has_records_is_there(places):
    assert set(places) >= {path.relative_to(REPORTS).parts[0] for path in TIMED}
    assert all(place.name and place.about and place.commits for place in places.values())


def test_times_are_the_records(one):
    folder, path, document = one
    for run in document["stages"]:
        assert f"| {run['stage']} |" in told(folder) and show.number(run["ttft_ms"]["median"]) in told(folder)
    document["stages"][-1]["ttft_ms"]["median"] = 123456.0
    path.write_text(json.dumps(document), "utf-8")
    assert "123,456" in told(folder)


def test_a_plot_follows_its_record(one):
    folder, path, document = one
    document["stages"][0]["ms_per_token"]["median"] = 98765.0
    path.write_text(json.dumps(document), "utf-8")
    place = report.gather(folder)[0]
    climb = next(p for p in plots.plots(place) if p.name == "climb-token")
    bound = document["stages"][0]["expect"]["bound_ms_per_token"]
    assert climb.rows[0][2] == "98,765"
    assert climb.spec["data"]["values"][0]["over"] == pytest.approx(98765 / bound)


def test_the_bound_of_a_record_without_one_is_what_a_comparison_states(places):
    checked = 0
    for place in places.values():
        for run in place.runs:
            size = place.sizes.get(run.model)
            if "/compare/" in run.file and size and place.roofs:
                passes = report.passes(size, run.stage, run.prompt)
                for metric in [m for m in report.METRICS if run.bound[m]]:
                    now = report.bound(place, passes[metric], run.threads, run.stage)
                    assert now == pytest.approx(run.bound[metric], rel=0.1), (run.file, metric)  # roofs of another day
                    checked += 1
    assert checked


def test_a_prompt_is_held_against_the_highest_peak_that_any_record_of_its_gpu_measured(places):
    place = places["nvidia-h200"]
    run = next(r for r in place.runs if (r.stage, r.shape) == ("cuda", "pp512"))
    flops = report.works(place.sizes[run.model], "cuda", 512)["prompt"].flops
    assert run.bound["prompt"] == pytest.approx(flops / multiply_adds(REPORTS / place.slug) / 1e6)


@pytest.mark.parametrize(
    ("verdict", "expected", "elsewhere", "is_one"),
    [
        ("slower", 1.0, True, True),
        ("no measurable change", 1.5, False, True),
        ("no measurable change", 1.5, True, False),
        ("no measurable change", 1.0, False, False),
        ("faster", 1.5, False, False),
    ],
)
def test_a_step_that_gained_at_another_shape_is_no_loss_unless_it_is_slower(verdict, expected, elsewhere, is_one):
    assert report.is_loss({"verdict": verdict, "expected_ratio": expected}, elsewhere) == is_one


def test_losses_are_told_with_their_reason(one):
    folder, path, document = one
    first, second = document["pairs"][:2]
    run = next(run for run in document["stages"] if run["stage"] == first["b"])
    run["expect"]["reason"] = "unpacking decides; for a token after it memory decides"
    document["pairs"] = [first, second]

    def losses(**ends):
        first.update({"low": 0.4, "high": 0.625, **ends})
        path.write_text(json.dumps(document), "utf-8")
        return [line for line in told(folder).splitlines() if line.startswith(f"* {first['b']} against {first['a']}, ")]

    (line,) = losses(verdict="slower", ratio=0.5)
    assert line.endswith(": TTFT 2.00× the time before (1.60× to 2.50×); expected: unpacking decides.")
    (line,) = losses(verdict="no measurable change", ratio=1.0, expected_ratio=2.0)
    assert line.endswith("(1.60× to 2.50×), where 0.500× was expected: unpacking decides.")
    assert losses(expected_ratio=1.0) == []
    first |= {"a": first["b"], "b": first["a"]}
    assert losses(verdict="slower") == []  # the step before lost, as it should
    first |= {"a": first["b"], "b": first["a"]}
    second |= {**first, "metric": "ms_per_token", "verdict": "slower"}
    (line,) = losses(verdict="slower")
    assert "unpacking decides. ms/token" in line and line.endswith("(1.60× to 2.50×); expected: memory decides.")


def test_a_step_measured_backwards_is_turned_round(one):
    folder, path, document = one
    want = figures.in_order(document)
    first = document["pairs"][0]
    first |= {"verdict": "faster", "ratio": 2.0, "low": 1.6, "high": 2.5, "expected_ratio": 4.0}
    document["stages"].reverse()
    back = {"verdict": "slower", "ratio": 0.5, "low": 0.4, "high": 0.625, "expected_ratio": 0.25}
    document["pairs"][0] = {**first, **back, "a": first["b"], "b": first["a"]}
    assert figures.in_order(document) == want
    path.write_text(json.dumps(document), "utf-8")
    pair = report.gather(folder)[0].pairs[0]
    assert {key: pair[key] for key in first} == first and pair["at"]
    assert "of two records" not in told(folder)


def test_no_record_is_below_the_bound_of_what_its_stage_multiplies(places):
    for place in places.values():
        for run in place.runs:
            assert all((run.over(metric) or 1) > 1 / roofline.SLACK for metric in report.METRICS), run


def test_what_has_no_record_is_left_out_with_its_command(one):
    text = told(one[0])
    for command in ("lesson roofline kv_cache", "lesson profile quantized", "lesson sweep kv_cache depth="):
        assert f"`{command}" in text.partition("## Left out")[2]


@pytest.mark.parametrize("text", ["{", '{"stages": [{}], "pairs": []}'])
def test_a_broken_record_is_one_sentence(one, text):
    one[1].write_text(text, "utf-8")
    with pytest.raises(report.ReportError, match=f"{one[1].name}.*measure again"):
        report.gather(one[0])


def test_what_a_stages_record_notes_of_its_times_is_told(tmp_path):
    folder = tmp_path / "nvidia-h200" / "llm"
    folder.mkdir(parents=True)
    record = json.loads((REPORTS / "nvidia-h200" / "llm" / "resident.json").read_text("utf-8"))
    (folder / "resident.json").write_text(json.dumps(record | {"note": "of another build"}), "utf-8")
    place = report.gather(tmp_path)[0]
    assert "* resident: of another build.\n" in told(tmp_path)
    assert "resident: of another build." in webpage.machine(place, plots.plots(place))["left_out"]


def test_no_records_is_one_sentence(tmp_path):
    with pytest.raises(report.ReportError, match="lesson compare naive tiling"):
        report.gather(tmp_path)


def test_without_the_libraries_report_md_is_written_and_the_command_named(one, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    monkeypatch.setattr(chapters, "refresh", list)
    monkeypatch.setattr(report.write, "__defaults__", (one[0],))
    found = CliRunner().invoke(cli.app, ["report", "--out", str(tmp_path / "out")])
    assert found.exit_code == 4 and "pip install 'lesson[plot]'" in found.stderr and found.stderr.count("\n") == 1
    assert len(list(tmp_path.glob("out/*/report.md"))) == 1


def test_chapters_alone_need_no_library_and_write_no_report(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    monkeypatch.setattr(chapters, "refresh", lambda: [chapters.ROOT / "README.md"])
    found = CliRunner().invoke(cli.app, ["report", "--chapters", "--out", str(tmp_path / "out")])
    assert (found.exit_code, found.stdout) == (0, "README.md\n") and not (tmp_path / "out").exists()


def test_pictures_are_drawn_beside_report_md(one, tmp_path):
    pages = report.write(tmp_path / "out", one[0])
    assert [page.name for page in pages] == ["report.md", "index.html"]
    text, pictures = pages[0].read_text("utf-8"), list(pages[0].parent.glob("*.png"))
    assert pictures and all(p.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and f"({p.name})" in text for p in pictures)
    climb = (pages[0].parent / "climb-token.svg").read_text("utf-8")
    assert all(f">{run['stage']}<" in climb for run in one[2]["stages"])
    assert "$" not in climb and "var(" not in climb


def test_sweeps_profiles_and_roofs_are_drawn_as_recorded(one):
    folder, path, document = one
    run, place = document["stages"][-1], path.parent.parent
    head = {key: run[key] for key in ("schema", "stage", "model", "machine", "commit", "threads")}
    pass_ms = {"new_tokens": 1, "outside_ms": 1.0, "rows": [
        {"op": "matmul", "ms": 5.0}, {"op": "matmul", "ms": 2.0}, {"op": "silu", "ms": 2.0}]}  # fmt: skip
    roofs = {"read_gbs": [[1 << 20, 100.0], [1 << 30, 10.0]], "read_all_gbs": [], "fma_gflops": 50.0}
    machine = {**run["machine"], **roofs, "fma_all_gflops": 90.0, "int8_gops": None}
    tokens = [{"tokens": T, "ms": 3.0 * T, "expect_ms": None, "bound_ms": 1.0 * T} for T in (1, 8)]
    made = {
        "profile/a": {**head, "prefill": {**pass_ms, "new_tokens": 9}, "decode": pass_ms},
        "roofline/a": {**head, "model": run["model"]["name"], "machine": machine, "tokens": tokens},
    }
    for setting, values in (("depth", (0, 100)), ("threads", (1, 2))):
        rows = [
            {"value": v, "ms_per_token": {"median": 4.0 + v}, "expect": {"bound_ms_per_token": 2.0}} for v in values
        ]
        made[f"sweep/{setting}"] = {**head, "setting": setting, "shape": "pp9+tg8", "rows": rows}
    for name, text in made.items():
        (place / name).parent.mkdir(exist_ok=True)
        (place / f"{name}.json").write_text(json.dumps(text), "utf-8")
    drawn = {p.name: p for p in plots.plots(report.gather(folder)[0])}
    assert not [p for p in drawn.values() if isinstance(p, plots.Absent)]
    stage = run["stage"]
    assert drawn["ops-token"].rows == [(stage, "matmul", "7.00 ms", "70.0 %"), (stage, "silu", "2.00 ms", "20.0 %"),
                                       (stage, "other", "1.00 ms", "10.0 %")]  # fmt: skip
    assert drawn["depth"].rows == [(stage, "0", "4.00", "2.00"), (stage, "100", "104", "2.00")]
    assert drawn["threads"].rows == [(stage, "1", "5.00", "2.00"), (stage, "2", "6.00", "2.00")]
    assert (stage, "8", "24.0", "8.00") in drawn["tokens"].rows
    assert any(row[0] == stage for row in drawn["roofline"].rows)
    assert all(plots.pictures(plot) for plot in drawn.values())


def test_a_folder_that_cannot_be_written_is_one_sentence(one, tmp_path):
    (tmp_path / "out").touch()
    with pytest.raises(report.ReportError, match="can't be written .*--out"):
        report.write(tmp_path / "out", one[0])


def test_every_plot_of_every_machine_has_values_and_a_table(places):
    for place in places.values():
        for plot in plots.plots(place):
            if isinstance(plot, plots.Plot):
                assert plot.rows and all(len(row) == len(plot.columns) for row in plot.rows), plot.name
                assert plot.caption and plot.title and json.dumps(plots.for_page(plot), allow_nan=False)


def test_a_shape_of_attention_names_its_mask_in_words():
    assert report.shape_text("attention", [8, 16, 16, 2048, 2048, 128, 1, 0]) == (
        "B 8, H 16, G 16, Q 2048, K 2048, D 128, causal"
    )
    assert report.shape_text("attention", [1, 1, 1, 5, 3, 64, 0, 1]).endswith("D 64, padded")
    assert report.shape_text("gemm", [512, 512, 512]) == "512 × 512 × 512"


def test_types_are_called_as_the_field_calls_them():
    assert [plots.type_name(t) for t in ("float16", "bfloat16", "int8")] == ["FP16", "BF16", "int8"]
