"""The report's page in a real browser: it says what records say, from a file, by keyboard, dark, light, narrow."""

import json
import math
import re
import shutil
from collections import Counter
from html.parser import HTMLParser
from itertools import combinations
from math import dist
from operator import mul

import pytest

from common import catalog, chapters, plots, report, show, webpage
from common.figures import REPORTS
from common.stage import LADDER, code_path, rungs

WIDTHS = {"desktop": 1280, "phone": 380}


def built(places):
    return webpage.page(places, {place.slug: plots.plots(place) for place in places})


@pytest.fixture(scope="session")
def places():
    return report.gather(REPORTS)


@pytest.fixture(scope="session")
def file(tmp_path_factory, places):
    """The page, built once."""
    path = tmp_path_factory.mktemp("page") / "index.html"
    path.write_text(built(places), "utf-8")
    return path


@pytest.fixture(scope="session")
def machines(places):
    return [place for place in places if place.pairs]


@pytest.fixture
def opened(browser, file):
    """opened(width, scheme) -> the page, with everything it complained of or asked for in page.said."""
    contexts = []

    def at(width=WIDTHS["desktop"], scheme="light", path=file):
        context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(120_000)  # ms: a machine that does other things too is no failure
        page.said = []
        page.on("console", lambda m: page.said.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: page.said.append(str(error)))
        page.on("request", lambda r: None if r.url.startswith(("file:", "data:", "blob:")) else page.said.append(r.url))
        page.goto(path.as_uri())
        return page

    yield at
    for context in contexts:
        context.close()


def draw_all(page):
    page.evaluate("Promise.all([...document.querySelectorAll('.machine:not([hidden]) .chart')].map(draw))")


def choose(page, a, b):
    page.select_option("#stage-a", a)
    page.select_option("#stage-b", b)


class Tags(HTMLParser):
    """The elements of a page that name something outside it."""

    def __init__(self, text):
        super().__init__()
        self.outside = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            loads = name in ("src", "srcset", "data", "poster") or tag in ("link", "image", "use") and "href" in name
            if loads and value and not value.startswith(("#", "data:")):
                self.outside.append((tag, value))


def test_it_is_one_small_file_that_names_nothing_outside(file):
    text = file.read_text("utf-8")
    assert len(text.encode()) < webpage.LIMIT
    assert Tags(text).outside == []
    assert not re.search(r"@import|url\((?!['\"]?(?:data:|#))", text.partition("</style>")[0])


@pytest.mark.parametrize(("width", "scheme"), [(WIDTHS["desktop"], "light"), (WIDTHS["phone"], "dark")])
def test_nothing_is_complained_of_and_nothing_sticks_out(opened, places, width, scheme):
    page = opened(width, scheme)
    for place in places:
        page.select_option("#machine", place.slug)
        draw_all(page)
        drawn = page.locator(".machine:not([hidden]) .chart svg").count()
        assert drawn == sum(isinstance(p, plots.Plot) for p in plots.plots(place))
        grown = page.evaluate(
            """[...document.querySelectorAll(".machine:not([hidden]) .chart")]
              .filter((e) => e.querySelector("svg").clientHeight !== parseInt(e.style.height))
              .map((e) => e.dataset.plot)"""
        )
        assert grown == []
    page.evaluate("document.querySelectorAll('main details').forEach((d) => { d.open = true; })")
    assert page.evaluate("[document.documentElement.scrollWidth, innerWidth]") == [width, width]
    outside = page.evaluate(
        """[...document.querySelectorAll("main *")].filter((e) => {
          const box = e.getBoundingClientRect();
          return box.width && box.right > innerWidth + 1 && !e.closest(".scroll, pre, #diff, svg, .unseen, .player");
        }).map((e) => e.outerHTML.slice(0, 120))"""
    )
    assert outside == [] and page.said == []


def test_dark_follows_the_system_and_the_button(opened):
    def dark(page):
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(map(int, re.findall(r"\d+", colour)[:3])) < 3 * 128

    assert not dark(opened(scheme="light"))
    page = opened(scheme="dark")
    assert dark(page) and page.get_attribute("#theme", "aria-pressed") == "true"
    draw_all(page)
    ink = page.evaluate("getComputedStyle(document.querySelector('.chart text[fill*=ink]')).fill")
    assert sum(map(int, re.findall(r"\d+", ink)[:3])) > 3 * 128
    page.click("#theme")
    assert not dark(page) and page.get_attribute("#theme", "aria-pressed") == "false"
    page.reload()
    assert not dark(page)


def lab(red, green, blue):
    """A colour of sRGB, as lightness and two distances from grey."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (red / 255, green / 255, blue / 255)]
    to_xyz = ((0.4338, 0.3762, 0.1899), (0.2126, 0.7152, 0.0722), (0.0177, 0.1095, 0.8729))  # over white's own
    x, y, z = (sum(map(mul, row, linear)) ** (1 / 3) for row in to_xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_two_colours_of_a_plot_are_alike(opened, scheme):
    names = [name[1:] for name in (*plots.SERIES, "$peer", "$bound")]
    shown = opened(scheme=scheme).evaluate(
        """(names) => names.map((name) => {
          document.body.style.color = `var(--${name})`;
          return getComputedStyle(document.body).color;
        })""",
        names,
    )
    colours = [lab(*map(int, re.findall(r"\d+", colour)[:3])) for colour in shown]
    near = [(a, b) for (a, p), (b, q) in combinations(zip(names, colours, strict=True), 2) if dist(p, q) < 24]
    assert near == []


def test_two_stages_are_chosen_and_their_difference_shown(opened, machines):
    page = opened()
    pair = machines[0].pairs[0]
    page.select_option("#machine", machines[0].slug)
    choose(page, pair["a"], pair["b"])
    assert page.locator("#diff thead th").all_inner_texts() == [pair["a"], pair["b"]]
    assert page.locator("#diff .old").count() and page.locator("#diff .new").count()
    page.check("#whole")
    for side, stage in ((2, pair["a"]), (4, pair["b"])):
        cells = page.evaluate(
            f"""[...document.querySelectorAll("#diff tbody tr")].map((row) => row.cells[{side - 1}])
              .filter((cell) => cell.previousElementSibling.textContent)
              .map((cell) => {{ cell.querySelector(".unseen")?.remove(); return cell.textContent; }})"""
        )
        assert cells == code_path(stage).read_text("utf-8").splitlines()
    page.uncheck("#columns")
    assert page.locator("#diff thead th").all_inner_texts() == [f"{pair['a']} → {pair['b']}"]


def test_what_is_the_same_is_folded_and_unfolds(opened):
    page = opened()
    choose(page, "naive", "tiling")
    before = page.locator("#diff tbody tr").count()
    fold = page.locator("#diff .fold button").first
    hidden = int(fold.inner_text().split()[0])
    fold.focus()
    page.keyboard.press("Enter")
    assert page.locator("#diff tbody tr").count() == before - 1 + hidden


def test_the_numbers_above_two_stages_are_the_records(opened, machines):
    page = opened()
    for place in machines:
        page.select_option("#machine", place.slug)
        for pair in place.pairs[:3]:
            choose(page, pair["a"], pair["b"])
            told = page.inner_text("#numbers")
            if page.locator("#numbers details").count():
                page.click("#numbers summary")
                told += page.inner_text("#numbers")
            run = next(r for r in place.runs if r.stage == pair["b"] and (r.model, r.at) == (pair["model"], pair["at"]))
            metric = next(m for m, key in report.KEYS.items() if key == pair["metric"])
            for number in (run.ms[metric], pair["ratio"], pair["expected_ratio"]):
                assert show.number(number) in told, (pair["a"], pair["b"], number)
            assert pair["verdict"] in told and pair["model"] in told


def test_a_comparison_opens_with_the_climb_unless_only_another_shape_shows_a_change(opened, machines):
    page, checked = opened(), Counter()
    for place in machines:
        page.select_option("#machine", place.slug)
        main = report.climbs(place)[0]
        by_stage = {run.stage: run for run in main.runs if run.at == main.shape}
        for stage in by_stage:
            before = catalog.entry(stage)["previous"] if stage in LADDER else None
            if before in by_stage:
                choose(page, before, stage)
                steps = [
                    p for p in place.pairs if (p["a"], p["b"], p["metric"]) == (before, stage, report.KEYS[main.metric])
                ]
                changed = [p for p in steps if p["verdict"] in ("faster", "slower")]
                here = [p for p in changed if (p["model"], p["at"]) == (main.model, main.shape)]
                top = max(changed, key=lambda p: abs(math.log(p["ratio"])), default=None)
                model, at = (top["model"], top["at"]) if changed and not here else (main.model, main.shape)
                assert f"{model}, {at}" in page.inner_text("#numbers .cards")
                checked[bool(changed and not here)] += 1
    assert set(checked) == {False, True}


def test_an_address_of_another_machine_shows_that_machine(opened, places):
    page, place = opened(), places[-1]
    plot = next(p for p in plots.plots(place) if isinstance(p, plots.Plot))
    assert page.input_value("#machine") != place.slug
    page.evaluate(f"location.hash = '{place.slug}-{plot.name}'")
    page.wait_for_function(f"document.getElementById('machine').value === '{place.slug}'")
    assert 0 <= page.evaluate(f"document.getElementById('{place.slug}-{plot.name}').getBoundingClientRect().top") < 200


def test_the_headline_holds_a_peer_against_a_run_of_the_same_record_or_says_that_it_does_not(places):
    checked = 0
    for place in places:
        climb = report.climbs(place)[0]
        told = [sentence for _, sentence in webpage.headline(place, climb) if "llama.cpp" in sentence]
        peer = next((run for run in climb.runs if run.stage == "llama.cpp"), None)
        for sentence in told:
            beside = [r for r in place.runs if (r.stage, r.file) == (climb.best.stage, peer.file)]
            assert ("two records" in sentence) == (not beside) and peer.at in sentence
            checked += 1
    assert checked


def test_rungs_have_numbers_too(opened, places):
    place, ladder = next((p, name) for p in places for name in p.kernels)
    rows = list({r["stage"]: r for r in report.kernel_rows(place, ladder)}.values())[:2]  # of a rung's types, one
    page = opened()
    page.select_option("#machine", place.slug)
    choose(page, *(f"{ladder}/{r['stage']}" for r in rows))
    assert all(show.number(r["ms"]["median"]) in page.inner_text("#numbers") for r in rows)


def test_two_stages_that_no_record_compares_name_the_command(opened):
    page = opened()
    choose(page, "naive", "fused")
    assert "lesson compare naive fused" in page.inner_text("#numbers")


def test_the_page_follows_its_records(opened, tmp_path):
    source = max(REPORTS.glob("*/compare/*.json"), key=lambda p: len(json.loads(p.read_text("utf-8"))["stages"]))
    path = tmp_path / "reports" / source.parent.parent.name / "compare" / source.name
    path.parent.mkdir(parents=True)
    document = json.loads(shutil.copy(source, path).read_text("utf-8"))
    first, second = document["stages"][:2]
    second["ttft_ms"]["median"], document["pairs"][0]["ratio"] = 98765.4, 0.01234
    path.write_text(json.dumps(document), "utf-8")
    (tmp_path / "page.html").write_text(built(report.gather(tmp_path / "reports")), "utf-8")
    page = opened(path=tmp_path / "page.html")
    choose(page, first["stage"], second["stage"])
    assert "98,765" in page.inner_text("#numbers") and "0.012×" in page.inner_text("#numbers")
    assert "98,765" in page.inner_text("#climb")


def test_all_chapters_are_there_and_their_links_lead_somewhere(opened):
    page = opened()
    titles = page.locator("details.chapter article > h4").all_text_contents()
    paths = [path for path in chapters.files() if path.name != "README.md" or path.parent != chapters.ROOT]
    assert sorted(titles) == sorted(show.prose(path).lstrip().split("\n")[0].lstrip("# ") for path in paths)
    lost = page.evaluate(
        """[...document.querySelectorAll("main a[href^='#'], nav a")].map((a) => decodeURIComponent(a.hash.slice(1)))
          .filter((name) => name.startsWith("compare=") ? name.slice(8).split(",").some((s) => !data.code[s])
                                                        : !document.getElementById(name))"""
    )
    assert lost == []
    assert page.evaluate("[...document.querySelectorAll('article')].every((a) => !a.innerHTML.includes('<!--'))")
    pictures = sum(len(re.findall(r"!\[", show.prose(path))) for path in paths)
    assert page.locator("article .picture svg[aria-label]").count() == pictures


def test_every_stage_and_rung_can_be_chosen(opened):
    page = opened()
    for side in "ab":
        assert page.locator(f"#stage-{side} option").all_text_contents() == [
            *LADDER,
            *(rung for ladder in webpage.ladders() for rung in catalog.kernels(ladder)["rungs"]),
        ]
    assert set(page.evaluate("Object.keys(data.code)")) == {*LADDER, *rungs()}


def test_it_is_used_by_keyboard_alone(opened):
    page = opened()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    page.wait_for_function("document.activeElement.id === 'main' || location.hash === '#main'")
    page.focus("#machine")
    slug = page.input_value("#machine")
    page.keyboard.press("ArrowDown")
    assert page.input_value("#machine") != slug
    page.focus("details.chapter summary")
    page.keyboard.press("Enter")
    assert page.locator("details.chapter[open] article").first.is_visible()
    page.focus("#stage-b")
    page.keyboard.press("End")
    assert page.locator("#diff thead th").last.inner_text() == page.input_value("#stage-b")


def test_a_reader_who_listens_finds_the_way(opened):
    page = opened()
    draw_all(page)
    assert page.evaluate(
        "['main', 'nav', 'header', 'footer'].every((tag) => document.querySelectorAll(tag).length === 1)"
    )
    unnamed = page.evaluate(
        """[...document.querySelectorAll("select, input, button, .chart, nav, article, .scroll, summary")].filter((e) =>
          !(e.labels?.length || e.getAttribute("aria-label") || e.textContent.trim())).map((e) => e.outerHTML)"""
    )
    assert unnamed == []
    for figure in page.locator(".machine:not([hidden]) figure.plot").all():
        assert figure.locator(".chart[role=img]").count() == 1
        assert figure.locator("table thead th[scope=col]").count() > 1 and figure.locator("tbody tr").count()
    levels = page.evaluate("[...document.querySelectorAll('h1, h2, h3, h4, h5')].map((h) => +h.tagName[1])")
    assert levels.count(1) == 1 and levels[0] == 1
    assert all(b - a <= 1 for a, b in zip(levels, levels[1:], strict=False))


def test_an_address_opens_a_chapter_or_two_stages(opened, file):
    page = opened()
    page.goto(f"{file.as_uri()}#chapter-tiling")
    page.reload()
    assert page.locator("#chapter-tiling article").is_visible()
    page.goto(f"{file.as_uri()}#compare=tiling,simd")
    assert page.locator("#diff thead th").all_inner_texts() == ["tiling", "simd"]


@pytest.mark.parametrize("width", WIDTHS.values())
@pytest.mark.parametrize("address", ["chapter-kv_cache", "compare=naive,tiling"])
def test_an_address_lands_at_its_place(opened, file, width, address):
    page = opened(width, path=file.parent)  # so that the address is the page's first
    page.goto(f"{file.as_uri()}#{address}")
    page.wait_for_timeout(3000)  # ms: plots that come near are drawn
    assert 0 <= page.evaluate(f"$('{address.partition('=')[0]}').getBoundingClientRect().top") <= 150


@pytest.mark.parametrize("width", WIDTHS.values())
def test_the_contents_lead_to_their_place(opened, width):
    page = opened(width)
    if not page.locator("nav a[href='#chapters']").is_visible():
        page.click("#contents > summary")
    page.click("nav a[href='#chapters']")
    page.wait_for_timeout(3000)
    assert 0 <= page.evaluate("$('chapters').getBoundingClientRect().top") <= 150


def test_contents_fold_on_a_phone(opened):
    page = opened(WIDTHS["phone"])
    link = page.locator("nav a[href='#measured']")
    assert not link.is_visible()
    page.click("#contents > summary")
    link.click()
    assert not link.is_visible() and page.evaluate("location.hash") == "#measured"


def test_the_player_is_driven(opened):
    page = opened(WIDTHS["phone"])
    page.get_by_role("radio", name="gemm/naive", exact=True).check(force=True)
    assert "32 sectors" in page.locator("#player [role=status]").inner_text()
    page.get_by_role("button", name="Step").click()
    assert "read w, 1 sector:" in page.locator("#player [role=status]").inner_text()
    assert page.evaluate("document.documentElement.scrollWidth") == WIDTHS["phone"] and page.said == []


def test_it_prints_light_and_without_controls(opened):
    page = opened(scheme="dark")
    page.emulate_media(media="print")
    assert not page.locator("nav").is_visible() and not page.locator("#machine").is_visible()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.locator("h1").is_visible()
