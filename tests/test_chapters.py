"""The chapters: every number in them is proved where it stands and holds, what they name exists, all can be read."""

import re

import pytest
import typer
from typer.testing import CliRunner

import cli
from common import chapters, figures, verify

FILES = [path.relative_to(chapters.ROOT).as_posix() for path in chapters.files()]
NAMES = ["start", "glossary", "roofline", "gguf", "quantization", "two-numbers", "what-the-articles-got-wrong",
         "adding-a-stage"]  # fmt: skip
COMMANDS = typer.main.get_command(cli.app).commands
LINK = re.compile(r"\]\(([^)#\s]+)[^)\s]*\)")
CALL = re.compile(r"(?:^ *|`)lesson ([a-z-]+)([^`\n#]*)", re.M)


def text(name):
    return (chapters.ROOT / name).read_text("utf-8")


def altered(shown):
    """A number 20 % higher, or at least one in its last place."""
    decimals = len(shown.partition(".")[2])
    number = float(shown.replace(",", ""))
    return f"{max(number * 1.2, number + 10**-decimals):.{decimals}f}"


@pytest.mark.parametrize("name", FILES)
def test_every_number_holds(name):
    assert verify.problems(text(name), chapters.ROOT / name) == []


def test_pages_and_pictures_are_what_code_and_records_say(monkeypatch):
    assert [path.name for path in chapters.stale()] == []
    path, text = next(iter(chapters.diffs(chapters.untracked()).items()))
    monkeypatch.setattr(chapters, "diffs", lambda without=(): {path: text + "more"})
    assert [path for path, _ in chapters.outdated()] == chapters.stale() == [path]
    monkeypatch.setattr(chapters, "untracked", lambda: {path})  # a reader's own record, before `lesson report`
    monkeypatch.setattr(chapters, "diffs", lambda without=(): {path: text if without else text + "more"})
    assert [path for path, _ in chapters.outdated()] == [path] and chapters.stale() == []


@pytest.mark.parametrize("name", FILES)
def test_a_number_altered_by_a_fifth_is_found(name):
    wrong = figures.FIGURE.sub(lambda match: altered(match[1]) + match[2], text(name))
    assert len(verify.wrong(wrong, chapters.ROOT / name)) == len(figures.FIGURE.findall(wrong))


@pytest.mark.parametrize("name", [name for name in FILES if figures.FIGURE.search(text(name))])
def test_a_proof_taken_away_is_missed(name):
    assert verify.unproved(figures.FIGURE.sub(r"\1", text(name)))


@pytest.mark.parametrize("name", FILES)
def test_an_altered_part_is_found(name):
    old = text(name)
    numbers = re.compile(rf"(?<=[| ])({figures.NUMBER})(?=[ ×|])")
    parts = [match for match in chapters.PART.finditer(old) if numbers.search(match[4])]
    for match in parts:
        for number in numbers.finditer(match[4]):
            at = match.start(4) + number.start()
            wrong = old[:at] + altered(number[0]) + old[at + len(number[0]) :]
            again = chapters.PART.match(wrong, match.start())
            assert chapters.written(again, chapters.ROOT / name) != again[0]
            break


@pytest.mark.parametrize("told", [
    "It takes 3 ms.", "2.4x", "2.4× the stage before", "12 GB/s", "30 % of it", "5 tokens/s", "0.2 s",
    "ten or 10 times",
    "from 3 to 5<!--= 2 + 3 --> ms", "20 bytes", "a factor of 8", "a 16 KB tile", "4.5 bits a weight", "a 3-fold gain",
    "1.5 × cuda", "17\nms", "14 FLOP/byte", "3.1 GHz", "1,024 KB", "about 9 seconds",
    "| shape | ms |\n|---|---:|\n| a | 3.5 |",
    "| | TFLOP/s at 512 | 1024 |\n|---|---|---|\n| a | 1<!--= 2 - 1 --> | 3 |",
])  # fmt: skip
def test_a_number_beside_a_unit_needs_a_proof(told):
    assert len(verify.unproved(told)) == 1


@pytest.mark.parametrize("told", [
    "32 weights", "512 tokens", "576 × 1536", "576 × N", "4 bytes each", "6 bits", "a 32-byte sector",
    "in 8-bit lanes",
    "`--budget 90 s`", "```\n3 ms\n```", "3<!--= 1 + 2 --> ms", "5<!--= 2 + 3 --> to 6<!--= 2 * 3 --> ms", "pp64 ms",
    "in 2009", "[x](3ms.md)", "| shape | ms |\n|---|---:|\n| 5 × 7 | 3<!--= 1 + 2 --> |",
    "| T | ms |\n|---|---|\n| 64 | – |",
    "<!-- costs a.json -->\n3 ms\n<!-- end -->\n",
])  # fmt: skip
def test_a_name_a_size_or_a_proved_number_needs_none(told):
    assert verify.unproved(told) == []


@pytest.mark.parametrize(("told", "reason"), [
    ("3<!--= 3 --> ms", "proved by a number"),
    ("3<!--= 2 + 2 --> ms", "3 should be 4: 2 + 2"),
    ("3<!--= load('nothing') --> ms", "no record nothing"),
    ("3<!--= 1 / 0 --> ms", "ZeroDivisionError"),
    ("3<!--= open('x') --> ms", "NameError"),
    ("\n<!-- compared no.json -->\n<!-- end -->", "no record no.json"),
    ("2 · (3 + 4) ÷ 7 = 3 weights<!-- -->", "is wrong: 2"),
    ("\n<!-- nonsense -->\n<!-- end -->", "no part is called 'nonsense'"),
])  # fmt: skip
def test_a_problem_says_what_is_wrong(told, reason):
    ((line, problem),) = verify.problems(told, chapters.ROOT / "README.md")
    assert reason in problem
    assert line == told.count("\n", 0, told.index("<!--")) + 1


def test_a_number_keeps_its_decimals_and_commas():
    assert figures.figures("1,000<!--= 999.6 + 2000 -->, 0.10<!--= 1 / 3 -->, 0.0<!--= -0.01 -->", figures.REPORTS) == (
        "3,000<!--= 999.6 + 2000 -->, 0.33<!--= 1 / 3 -->, 0.0<!--= -0.01 -->"
    )


def test_the_command_ends_with_1_and_names_the_line(tmp_path, monkeypatch):
    page = tmp_path / "README.md"
    monkeypatch.setattr(chapters, "files", lambda: [page])
    monkeypatch.setattr(chapters, "outdated", list)
    monkeypatch.setattr(verify, "ROOT", tmp_path)
    page.write_text("fine\n\nIt takes 3 ms.\n")
    found = CliRunner().invoke(cli.app, ["verify"])
    assert (found.exit_code, found.output.splitlines()[0][:22]) == (1, "README.md:3: 3 ms has ")
    page.write_text("It takes 3<!--= 1 + 2 --> ms.\n")
    found = CliRunner().invoke(cli.app, ["verify", "--json"])
    assert (found.exit_code, found.output) == (
        0, '{"schema": 1, "holds": true, "numbers": 1, "files": 1, "problems": []}\n'
    )  # fmt: skip


def test_outside_a_clone_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(chapters, "REPORTS", tmp_path / "reports")
    found = CliRunner().invoke(cli.app, ["verify"])
    assert (found.exit_code, found.stderr[:34]) == (1, "lesson: there is no reports/ here:")


def test_each_general_chapter_can_be_read():
    assert {f"chapters/{name}.md" for name in NAMES} == {name for name in FILES if name.startswith("chapters/")}
    for name in NAMES:
        shown = CliRunner().invoke(cli.app, ["read", name])
        assert shown.exit_code == 0
        assert shown.output.startswith("# ")
        assert "<!--" not in re.sub(r"`[^`\n]*`|^ {4}.*$", "", shown.output, flags=re.M)
    wrong = CliRunner().invoke(cli.app, ["read", "glosary"])
    assert (wrong.exit_code, wrong.stderr) == (2, "lesson: unknown chapter 'glosary': did you mean glossary?\n")


def test_start_names_every_general_chapter():
    assert {f"{name}.md" for name in NAMES if name != "start"} <= set(LINK.findall(text("chapters/start.md")))


@pytest.mark.parametrize("name", FILES)
def test_links_lead_somewhere(name):
    for link in LINK.findall(text(name)):
        assert "://" in link or (chapters.ROOT / name).parent.joinpath(link).exists(), link


@pytest.mark.parametrize("name", FILES)
def test_commands_and_flags_exist(name):
    for command, rest in CALL.findall(text(name)):
        assert command in COMMANDS, command
        known = {flag for param in COMMANDS[command].params for flag in param.opts} | {"--help"}
        assert set(re.findall(r"(?<=\s)--?[a-z][\w-]*", rest)) <= known, (command, rest)
