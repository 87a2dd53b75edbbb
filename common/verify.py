"""`lesson verify`: every number beside a unit, and every ratio, is either proved where it stands or found here.

A number is proved by the formula behind it (common/figures.py), or stands in a part that code and records write
(common/chapters.py). Equations between plain numbers are computed as they stand. What is compared is the text: as many
decimals as are shown. Numbers written as words go unseen.
"""

import re
from pathlib import Path

from rich.text import Text

from common import chapters, show
from common.figures import FIGURE, NUMBER, ROOT, FigureError, computed, folder, scope

PROVED = "□"  # stands for a number that carries a formula
UNIT = r"""(?:
    [nµm]s | s(?:econds?)? | seconds | minutes |
    [KMGTkm]i?B(?:/s)? | bytes? | [MGT]?FLOPs?(?:/s|/byte)? | [GT]op/s | [kMG]?Hz |
    tokens/s | tokens\ (?:a|per)\ second | percent | times | fold | x
)(?!\w) | % | ×(?!\s*[\d□A-Z(])"""
MORE = rf"(?:\s*(?:to|or|–|/)\s*(?:{NUMBER}|{PROVED}))*"  # of 3 to 5 ms, the 3 counts too
CLAIM = re.compile(rf"(?<![\w.,^-])({NUMBER}){MORE}(?:[ -]|\n\ *)?({UNIT})|factors?\ of\ ({NUMBER})", re.X)
BITS = re.compile(r"(?<![\w.])\d+\.\d+\s+bits?(?!\w)")  # whole ones are a format's, a fraction was computed
SCALAR = re.compile(r"[1248]\s+bytes?")  # the size of one number
NAME = re.compile(r"\d+-(?:bytes?|bits?)\b")  # a 32-byte sector: what it is called
SHAPE = re.compile(r"\d+(?: × \d+)+")
HEADED = re.compile(
    r"(?:^|[\s(])(?:[nµm]s|s|[KMGT]i?B(?:/s)?|bytes|[MGT]FLOP/s|%|×(?!\s*[A-Z])|÷|tokens/s)(?=$|[\s),:;])"
)
HIDDEN = re.compile(r"^( *)```.*?^\1```|`[^`\n]+`|<!--.*?-->|(?<=\])\([^)\s]*\)|<[^<>\n]+>", re.S | re.M)
SUM = re.compile(  # 2 + 2 + 16 = 20, in prose or set apart
    rf"(?<![\w.,·÷×/+−*^-])(?<![\w·÷×/+−*-]\ )((?:\(|−)*{NUMBER}(?:[ ()]*[+−·÷×/][ ()−]*{NUMBER}|\))+)\ =\ ({NUMBER})"
    r"(?![\d.,]*\ ?[·÷×*/])"
)
SIGNS = str.maketrans({"·": "*", "÷": "/", "×": "*", "−": "-", ",": ""})
LITERAL = re.compile(r"[-\d.,e\s]+")


def problems(text: str, path: Path) -> list[tuple[int, str]]:
    """(line, sentence) for each number of a file that doesn't hold or has no proof, in order."""
    return sorted([*wrong(text, path), *stale(text, path), *unproved(text), *sums(text)])


def wrong(text: str, path: Path) -> list[tuple[int, str]]:
    """The numbers whose formula gives another, or nothing."""
    names, found = scope(text, folder(path, text)), []
    for match in FIGURE.finditer(text):
        shown, _, formula = match.groups()
        try:
            if LITERAL.fullmatch(formula):
                found.append(
                    (line(text, match), f"{shown} is proved by a number, {formula}: give what it follows from")
                )
            elif (now := computed(shown, formula, names)) != shown:
                found.append((line(text, match), f"{shown} should be {now}: {formula}"))
        except FigureError as error:
            found.append((line(text, match), str(error)))
    return found


def stale(text: str, path: Path) -> list[tuple[int, str]]:
    """The parts that code and records would write otherwise."""
    found = []
    for match in chapters.PART.finditer(text):
        try:
            if chapters.written(match, path) != match[0]:
                found.append(
                    (line(text, match), f"<!-- {match[2]}{match[3]} --> is out of date: `lesson report` writes it")
                )
        except chapters.ChapterError as error:
            found.append((line(text, match), str(error)))
    return found


def unproved(text: str) -> list[tuple[int, str]]:
    """The numbers beside a unit, in prose or under a column's unit, that carry no formula."""
    plain = chapters.PART.sub(blank, text)
    plain = FIGURE.sub(PROVED, plain)
    plain = HIDDEN.sub(blank, plain)
    found = []
    for match in [*CLAIM.finditer(plain), *BITS.finditer(plain)]:
        told = " ".join(match[0].replace(PROVED, "…").split())
        if not SCALAR.fullmatch(told) and not NAME.match(told):
            found.append((line(plain, match), f"{told} has no proof: write its formula behind it, <!--= … -->"))
    return found + cells(plain)


def sums(text: str) -> list[tuple[int, str]]:
    """The equations between numbers that are none, to the decimals shown."""
    plain = HIDDEN.sub(blank, FIGURE.sub(r"\1", chapters.PART.sub(blank, text)))
    found = []
    for match in SUM.finditer(plain):
        try:
            now = computed(match[2], match[1].translate(SIGNS), {})
        except FigureError:
            now = "no number"
        if now != match[2]:
            found.append((line(plain, match), f"{match[0]} is wrong: {now}"))
    return found


def cells(plain: str) -> list[tuple[int, str]]:
    """The numbers of tables in columns whose head names a unit; a head that is a mere number has its neighbour's."""
    found, heads = [], None
    for number, row in enumerate(plain.splitlines(), 1):
        columns = [cell.strip() for cell in row.strip().strip("|").split("|")] if row.lstrip().startswith("|") else None
        if columns and heads is None:
            heads = []
            for head in columns:
                heads.append(bool(HEADED.search(head) or (heads and heads[-1] and re.fullmatch(NUMBER, head))))
        elif columns:
            for head, cell in zip(heads, columns, strict=False):
                for bare in re.findall(rf"(?<![\w@.+-]){NUMBER}(?![\w@.-])", SHAPE.sub("", cell)) if head else ():
                    found.append((number, f"{bare} in a column with a unit has no proof: <!--= … --> behind it"))
        else:
            heads = None
    return found


def blank(match: re.Match) -> str:
    """As many spaces, with the same lines."""
    return re.sub(r"[^\n]", " ", match[0])


def line(text: str, match: re.Match) -> int:
    return text.count("\n", 0, match.start()) + 1


def document() -> dict:
    """{schema, holds, numbers, files, problems: [{file, line, problem}]}"""
    found, numbers = [], 0
    for path in chapters.files():
        text = path.read_text("utf-8")
        numbers += len(FIGURE.findall(text))
        where = path.relative_to(ROOT).as_posix()
        found += [{"file": where, "line": at, "problem": told} for at, told in problems(text, path)]
    for path in chapters.stale():
        told = "out of date: `lesson report` writes it"
        found.append({"file": path.relative_to(chapters.ROOT).as_posix(), "line": 1, "problem": told})
    return {"schema": 1, "holds": not found, "numbers": numbers, "files": len(chapters.files()), "problems": found}


def render(found: dict) -> list:
    told = [f"{p['file']}:{p['line']}: {p['problem']}" for p in found["problems"]]
    word = "hold" if found["holds"] else f"and their parts checked: {len(told)} problems"
    told = [Text(problem, no_wrap=True, overflow="ignore") for problem in told]
    return [*told, show.dim(f"{found['numbers']:,} numbers in {found['files']} files {word}")]
