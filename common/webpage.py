"""The report as one page: plots, chapters, and any two stages' code beside each other, in a file that needs no network.

The template, its style and its script are in common/page/. The rest is made here of records, chapters and modules.
"""

import json
import re
from functools import cache
from itertools import groupby
from pathlib import Path

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup, escape

from common import catalog, plots, report, show, trace
from common.figures import ROOT
from common.report import METRICS, Place
from common.stage import FOLDER, GENERAL, LADDER, code_path, rungs

PAGE = Path(__file__).parent / "page"
# The general chapters in the order to read them; others follow
FIRST = ("start", "two-numbers", "roofline", "gguf", "quantization", "what-the-articles-got-wrong", "adding-a-stage",
         "glossary")  # fmt: skip
LIMIT = 5_000_000  # bytes


def page(places: list[Place], drawn: dict[str, list]) -> str:
    """The whole page. drawn: each machine's plots by its slug. Raises ImportError without the plot extra."""
    templates = Environment(loader=FileSystemLoader(PAGE), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    templates.filters["numeric"] = lambda cell: bool(re.match(r"[\d–][\d,.]*( ?(%|×|ms|[GT]FLOP/s))?$", cell))
    names = [*LADDER, *rungs()]
    data = {
        "plots": {
            f"{slug}/{plot.name}": plots.for_page(plot)
            for slug, found in drawn.items()
            for plot in found
            if isinstance(plot, plots.Plot)
        },
        "code": {name: highlighted(code_path(name).read_text("utf-8"), "python") for name in names},
        "runs": {place.slug: [run_row(run) for run in place.runs] for place in places},
        "pairs": {place.slug: [pair_row(pair) for pair in place.pairs] for place in places},
        "climbs": {place.slug: main_shapes(place) for place in places},
        "previous": {name: catalog.entry(name)["previous"] for name in LADDER},
        "kernels": {place.slug: kernel_rows(place) for place in places},
    }
    return templates.get_template("page.html").render(
        machines=[machine(place, drawn[place.slug]) for place in places],
        groups=groups(places),
        stages=[("The ladder", LADDER), *((name, catalog.kernels(name)["rungs"]) for name in ladders())],
        data=document(data),
        css=Markup((PAGE / "page.css").read_text("utf-8") + "\n".join(picture_styles())),
        js=script((PAGE / "page.js").read_text("utf-8")),
        vega=script(bundle()),
        player=Markup(trace.fragment()),
    )


@cache
def bundle() -> str:
    """Vega, Vega-Lite and what draws with them, as one program."""
    import vl_convert

    return vl_convert.javascript_bundle()


def document(data: dict) -> Markup:
    """JSON that may stand inside <script>: nothing in it ends it."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("</", "<\\/").replace("<!--", "\\u003c!--"))


def script(text: str) -> Markup:
    """A program that may stand inside <script>."""
    return Markup(re.sub(r"</(?=script)", r"<\\/", text, flags=re.I))


# ---- numbers ---------------------------------------------------------------------------------------------------


def run_row(run) -> dict:
    """What the page computes with, of one run."""
    kept = {"stage": run.stage, "model": run.model, "at": run.at, "file": run.file}
    return kept | {m: run.ms[m] for m in METRICS} | {f"{m}_expected": run.expected[m] for m in METRICS}


def pair_row(pair: dict) -> dict:
    keys = ("a", "b", "model", "at", "file", "ratio", "verdict")
    metric = next(m for m, key in report.KEYS.items() if key == pair["metric"])
    return {key: pair[key] for key in keys} | {"metric": metric, "expected": pair["expected_ratio"]}


def main_shapes(place: Place) -> dict[str, str]:
    """By metric 'model, shape' of the climb that the page opens with."""
    climbs = report.climbs(place)
    return {c.metric: f"{c.model}, {c.shape}" for c in climbs if c.model == climbs[0].model}


def kernel_rows(place: Place) -> list[dict]:
    return [
        {"stage": f"{name}/{r['stage']}", "at": report.shape_text(name, r["shape"]), "dtype": r["dtype"],
         "ms": r["ms"]["median"], "tflops": r["tflops"]}
        for name, record in place.kernels.items()
        for r in record["rows"]
        if r.get("ms")
    ]  # fmt: skip


def machine(place: Place, drawn: list) -> dict:
    """What the template shows of a machine: its plots, its headline, its stages' times."""
    climbs = report.climbs(place)
    shown = [p for p in drawn if isinstance(p, plots.Plot)]
    first = [p for p in shown if p.name in ("climb-token", "climb-prompt")]
    return {
        "slug": place.slug,
        "name": place.name,
        "about": report.about(place),
        "headline": headline(place, climbs[0]) if climbs else [],
        "first": sorted(first, key=lambda p: p.name != f"climb-{climbs[0].metric}"),
        "plots": [p for p in shown if p not in first],
        "lost": [line.removeprefix("* ") for line in report.lost(place)],
        "left_out": [code_marks(p.sentence) for p in drawn if isinstance(p, plots.Absent)] + place.notes,
    }


def headline(place: Place, climb) -> list[tuple[str, str]]:
    """Two or three numbers that sum a climb up, each with its sentence."""
    metric, first, best = climb.metric, climb.first, climb.best
    ms, of = best.ms[metric], "a token" if metric == "token" else "the prompt"
    told = []
    if first.at == best.at and first is not best:
        change = f"{first.stage} to {best.stage}: {show.number(first.ms[metric])} → {show.number(ms)} ms"
        told.append((show.times(first.ms[metric] / ms), f"faster for {of} at {best.at}, {change}"))
    told.append((show.times(best.over(metric)), f"the bound, still: {of} takes {show.number(ms)} ms where "
                 f"{show.number(best.bound[metric])} would do"))  # fmt: skip
    for run in [run for run in climb.runs if run.stage in report.PEERS][:1]:
        mine = next((r for r in place.runs if (r.stage, r.file) == (best.stage, run.file) and r.at == run.at), None)
        mine, apart = (mine, "") if mine else (best, ", two records")
        ratio = run.ms[metric] / mine.ms[metric]
        word = "faster" if ratio > 1 else "slower"
        times = f"{show.number(mine.ms[metric])} ms against {show.number(run.ms[metric])}"
        told.append((show.times(max(ratio, 1 / ratio)), f"{word} than {run.stage} at {run.at}: {times}{apart}"))
    return told


def code_marks(sentence: str) -> Markup:
    """`words` as <code>."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(sentence))))


# ---- chapters --------------------------------------------------------------------------------------------------


def ladders() -> list[str]:
    return sorted({rung.partition("/")[0] for rung in rungs()})


def groups(places: list[Place]) -> list[dict]:
    """The chapters as the page lists them: [{id, title, chapters: [{id, name, title, idea, html, …}]}]."""
    general = sorted(GENERAL.glob("*.md"), key=lambda p: (FIRST.index(p.stem) if p.stem in FIRST else 99, p.stem))
    found = [{"id": "general", "title": "General", "chapters": [chapter(path) for path in general]}]
    stages = [stage_chapter(name, places) for name in LADDER if (FOLDER / f"{name}.md").exists()]
    found.append({"id": "ladder", "title": "The ladder", "chapters": stages})
    for name in ladders():
        intro = [chapter(FOLDER / name / "README.md")] if (FOLDER / name / "README.md").exists() else []
        steps = [rung for rung in catalog.kernels(name)["rungs"] if code_path(rung).with_suffix(".md").exists()]
        steps = [stage_chapter(rung, places) for rung in steps]
        found.append({"id": f"ladder-{name}", "title": f"Kernels: {name}", "chapters": intro + steps})
    for group in found:
        group["wide"] = max(8.5, *(1.5 + 0.58 * len(c["name"]) for c in group["chapters"]), 0)  # rem of its names
    return [group for group in found if group["chapters"]]


def stage_chapter(name: str, places: list[Place]) -> dict:
    """A stage's or rung's chapter, with its idea and what it takes on each machine."""
    told = catalog.entry(name)
    folder, _, short = name.rpartition("/")
    path = code_path(name).with_suffix(".md")
    times = {}
    for place in places:
        if folder in place.kernels:
            rows = [r for r in report.kernel_rows(place, folder) if r["stage"] == short]
            unit, factor = report.kernel_unit(report.kernel_rows(place, folder))
            if rows:
                times[place.slug] = f"{show.number(max(r['tflops'] for r in rows) * factor)} {unit}"
        for climb in [] if folder else report.climbs(place)[:1]:
            for run in climb.runs:
                if run.stage == name:
                    times[place.slug] = f"{show.number(run.ms[climb.metric])} ms"
    previous = told["previous"] and (f"{folder}/{told['previous']}" if folder else told["previous"])
    return chapter(path) | {"name": short, "idea": told["idea"], "stage": name, "previous": previous, "times": times}


def chapter(path: Path) -> dict:
    """A chapter as HTML, its title apart."""
    text = show.prose(path)
    title, _, body = text.lstrip().partition("\n")
    title = title.lstrip("# ")
    name = path.parent.name if path.stem == "README" else path.stem
    html = Markup(markdown(path).render(body))
    return {"id": anchor(path), "name": name, "title": title, "idea": "", "html": html, "times": {}}


def anchor(path: Path) -> str:
    """The id of a chapter's place on the page: naive, gemm-tiled, gemm for its README."""
    parts = path.relative_to(ROOT).with_suffix("").parts[1:]
    return "chapter-" + "-".join(parts).removesuffix("-README")


def markdown(path: Path):
    """A renderer for the file at `path`: headings below the page's own, code in colour, pictures and links inside."""
    from markdown_it import MarkdownIt

    made = MarkdownIt("commonmark", {"html": True}).enable("table")

    def heading(self, tokens, i, options, env):
        tokens[i].tag = f"h{min(6, int(tokens[i].tag[1]) + 3)}"
        return self.renderToken(tokens, i, options, env)

    def fence(self, tokens, i, options, env):
        return code_block(tokens[i].content, tokens[i].info.strip())

    def image(self, tokens, i, options, env):
        return picture(path.parent / tokens[i].attrGet("src"), tokens[i].content)

    def link(self, tokens, i, options, env):
        href = target(path, tokens[i].attrGet("href"))
        return f'<a href="{escape(href)}">' if href else "<a>"  # a name without a place

    def table(self, tokens, i, options, env):
        return '<div class="scroll" tabindex="0" role="group" aria-label="table">\n<table>\n'

    for name, rule in {"heading_open": heading, "heading_close": heading, "fence": fence, "image": image,
                       "link_open": link, "table_open": table}.items():  # fmt: skip
        made.add_render_rule(name, rule)
    made.add_render_rule("table_close", lambda *_: "</table>\n</div>\n")
    return made


def target(path: Path, href: str) -> str | None:
    """Where a chapter's link leads on the page; None where the page doesn't hold it."""
    if re.match(r"[a-z]+:", href):
        return href
    there = (path.parent / href.partition("#")[0]).resolve()
    if there.suffix == ".md" and there.is_relative_to(ROOT / "reports" / "diffs"):
        return f"#compare={there.stem.replace('-', ',')}"
    if there.suffix == ".md" and any(there.is_relative_to(folder) for folder in (FOLDER, GENERAL)):
        return f"#{anchor(there)}"
    return None


# ---- pictures --------------------------------------------------------------------------------------------------

STYLE = re.compile(r"<style>(.*?)</style>", re.S)
# The caption and legend that pictures.drawing ends with
BELOW = re.compile(r'<text y="\d+">([^<]*)</text>\n<text y="\d+">([^<]*)</text>\n(?=</svg>)')
DARK = re.compile(r"@media \(prefers-color-scheme: dark\) \{(.*?\})\s*\}", re.S)


def picture(path: Path, alt: str) -> str:
    """A chapter's picture inside the page. Its style would hold for the whole page: picture_styles has it, bounded."""
    svg = re.sub(r"<\?xml.*?\?>", "", path.read_text("utf-8"))
    svg = re.sub(r"<title>.*?</title>", "", svg, flags=re.S)
    svg = STYLE.sub("", svg).replace("<svg ", f'<svg role="img" aria-label="{escape(alt)}" ', 1)
    svg = re.sub(r' role="img">', ">", svg, count=1) if svg.count('role="img"') > 1 else svg
    svg = sized(svg)
    styled = "drawn" if "class=" in svg else "plain"
    below = BELOW.search(svg)
    if below:  # words as words, which do not shrink with the picture
        svg = re.sub(r'(viewBox="\S+ \S+ \S+) (\d+)', lambda m: f"{m[1]} {int(m[2]) - 40}", BELOW.sub("", svg), count=1)
    words = f"<small>{below[1]}<br>{below[2]}</small>" if below else ""
    return f'<span class="picture {styled}">{svg}{words}</span>'


def sized(svg: str) -> str:
    """An SVG with a viewBox for its width and height, so that it can shrink."""
    head = svg[: svg.index(">")]
    if "viewBox" in head:
        return svg
    width, height = (re.search(rf'\b{side}="([\d.]+)"', head)[1] for side in ("width", "height"))
    return svg.replace("<svg ", f'<svg viewBox="0 0 {width} {height}" ', 1)


@cache
def picture_styles() -> list[str]:
    """The pictures' own style sheets, for pictures alone: light, and dark where the page is dark."""
    found = []
    for path in FOLDER.rglob("*.svg"):
        match = STYLE.search(path.read_text("utf-8"))
        if match and match[1] not in found:
            found.append(match[1])
    made = []
    for text in found:
        dark = DARK.search(text)
        made.append(f".picture.drawn {{ {DARK.sub('', text)} }}")
        if dark:
            made.append(f"@media screen {{ [data-theme=dark] .picture.drawn {{ {dark[1]} }} }}")
    return made


# ---- code ------------------------------------------------------------------------------------------------------


def code_block(text: str, language: str) -> str:
    """A fenced block, in colour; a difference with its lines tinted."""
    if language == "diff":
        rows = []
        for row in text.splitlines():
            kind = {"-": "old", "+": "new"}.get(row[:1], "")
            rows.append(f'<span class="{kind}">{row[:1]}{highlighted(row[1:], "python")[0]}</span>')
        body = "\n".join(rows)
    else:
        body = "\n".join(highlighted(text.rstrip("\n"), language))
    return f'<pre tabindex="0"><code>{body}</code></pre>\n'


def highlighted(text: str, language: str) -> list[str]:
    """Lines of HTML, with keywords, strings, comments, numbers and defined names marked; CUDA inside Python too."""
    lines = [""]
    for kind, value in tokens(text, language):
        for i, part in enumerate(value.split("\n")):
            if i:
                lines.append("")
            if part:
                lines[-1] += f"<i class={kind}>{escape(part)}</i>" if kind and part.strip() else str(escape(part))
    return lines[:-1] if len(lines) > 1 and not lines[-1] else lines


def tokens(text: str, language: str):
    """(class or '', text), neighbours of one class as one. A definition quoted from a CUDA string is CUDA."""
    from pygments.lexers import get_lexer_by_name
    from pygments.token import Comment, Keyword, Name, Number, String
    from pygments.util import ClassNotFound

    if re.match(r'extern "C"|__(?:global|device)__|template ?<', text):
        language = "cuda"
    try:
        lexer = get_lexer_by_name(language or "text", stripnl=False, ensurenl=False)
    except ClassNotFound:
        lexer = get_lexer_by_name("text", stripnl=False, ensurenl=False)
    kinds = ((Keyword, "k"), (String, "s"), (Comment.Preproc, "k"), (Comment, "c"), (Number, "n"), (Name.Function, "f"),
             (Name.Class, "f"), (Name.Decorator, "f"), (Keyword.Type, "k"))  # fmt: skip

    def kind_of(token) -> str:
        return next((name for kind, name in kinds if token in kind), "")

    pieces = ((kind_of(token), value) for token, value in lexer.get_tokens(text))
    for kind, run in groupby(pieces, key=lambda piece: piece[0]):
        value = "".join(part for _, part in run)
        if kind == "s" and language == "python" and re.search(r"__(?:global|device)__", value):
            yield from tokens(value, "cuda")
        else:
            yield kind, value
