"""What `lesson roofline` draws, and how it reads --tokens."""

from types import SimpleNamespace

import pytest

from common import roofline, roofs
from common.job import UsageError
from tests.test_roofline import BIG, MACHINE


def drawn(points, knee) -> dict:
    rows = [{"tokens": T, "ms": ms or least, "expect_ms": ms, "bound_ms": least} for T, ms, least in points]
    return {"stage": "naive", "model": "BIG", "tokens": rows, "knee_tokens": knee, "ridge_flop_per_byte": 12.0}


@pytest.mark.parametrize("ascii", [False, True])
def test_drawings_fit_eighty_columns(ascii):
    stored = roofline.float_bytes(BIG)
    points = roofline.against_tokens("naive", BIG, stored, range(1, 65), MACHINE)
    unknown = roofline.against_tokens("another", BIG, stored, (1, 64), MACHINE)
    rows = roofs.bound_rows(BIG, stored, 16, MACHINE, 1)
    shown = [
        roofs.curves(MACHINE, 80, ascii),
        roofs.bounds({"bounds": rows, "ridge_flop_per_byte": 12.0}),
        roofs.tokens_plot(drawn(points, roofline.knee(BIG, stored, MACHINE)), ascii),
        roofs.tokens_plot(drawn(unknown, None), ascii),
    ]
    for line in "\n".join(shown).splitlines():
        assert len(line) <= 80, line
        assert line.isascii() or not ascii
    assert shown[2].count("*" if ascii else "●") > 20


def test_the_rows_add_up():
    rows = roofs.bound_rows(BIG, roofline.float_bytes(BIG), 16, MACHINE, 1)
    for phase in ("prefill", "decode"):
        assert rows[-1][phase]["flops"] == sum(row[phase]["flops"] for row in rows[:-1])
        assert rows[-1][phase]["bytes"] == sum(row[phase]["bytes"] for row in rows[:-1])


def test_tokens_are_doubled_or_listed():
    assert roofs.parse_tokens("1..64") == [1, 2, 4, 8, 16, 32, 64]
    assert roofs.parse_tokens("9,1,17") == [1, 9, 17]
    for wrong in ("", "0..8", "8..1", "a", "1..b", "-1"):
        with pytest.raises(UsageError):
            roofs.parse_tokens(wrong)


def test_a_plot_puts_the_largest_above_and_to_the_right():
    rows = roofs.plot([[(1, 1.0), (10, 10.0), (100, 100.0)]], str, str, 40, ascii=True)
    marks = [(y, row.index("*")) for y, row in enumerate(rows) if "*" in row]
    assert [y for y, _ in marks] == [0, 4, 8]
    assert marks[0][1] > marks[1][1] > marks[2][1]
    flat = roofs.plot([[(5, 3.0)]], str, str, 40, ascii=True)
    assert sum("*" in row for row in flat) == 1


def test_a_stream_without_unicode_gets_ascii():
    assert roofs.plain(SimpleNamespace(encoding="ascii"))
    assert roofs.plain(SimpleNamespace(encoding=None))
    assert not roofs.plain(SimpleNamespace(encoding="utf-8"))
