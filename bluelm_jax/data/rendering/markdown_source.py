"""Generated Markdown: tables of made-up data, and problems with formulas, code and lists."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from bluelm_jax.data.rendering import corpus, formula_grammar, scripts

_NAMES = [
    "Amara",
    "Bruno",
    "Chen",
    "Dalia",
    "Emil",
    "Farah",
    "Goran",
    "Hana",
    "Idris",
    "Jun",
    "Katya",
    "Leon",
    "Mira",
    "Noor",
    "Olga",
    "Pavel",
]
_THINGS = [
    "bolts",
    "lamps",
    "ropes",
    "seeds",
    "tiles",
    "cups",
    "maps",
    "hinges",
    "pumps",
    "brushes",
    "sensors",
    "filters",
]
_PLACES = [
    "Northgate",
    "Millbrook",
    "Eastfield",
    "Harrow",
    "Lakeside",
    "Stonebridge",
    "Redhill",
    "Fernley",
]
_UNITS = ["kg", "m", "s", "W", "°C", "km/h", "mL", "kPa"]
_STATES = ("yes", "no", "open", "closed", "pending", "n/a")
# Languages drawn left to right without a shaping engine, for cells and headers.
_LANGUAGES = ("de", "es", "fr", "pt", "tr", "vi", "ru", "el", "zh", "ja", "ko")

Rng = np.random.Generator


def _pick(rng: Rng, options):
    return options[rng.integers(len(options))]


def _date(rng: Rng) -> str:
    return f"{rng.integers(1990, 2030)}-{rng.integers(1, 13):02d}-{rng.integers(1, 29):02d}"


def _code(rng: Rng) -> str:
    return f"`{_pick(rng, 'ABCDEFGH')}{rng.integers(100, 1000)}_{_pick(rng, 'xyz')}`"


def _formula(rng: Rng) -> str:
    return f"${formula_grammar.formula(rng, 1, 30)}$"


# Header and cells of a column; numbers stand right more often than not.
_COLUMNS: tuple[tuple[tuple[str, ...], Callable[[Rng], str], bool], ...] = (
    (("Name", "Person", "Author"), lambda rng: _pick(rng, _NAMES), False),
    (("Item", "Part", "Article"), lambda rng: _pick(rng, _THINGS), False),
    (("Place", "Station", "Town"), lambda rng: _pick(rng, _PLACES), False),
    (("Unit",), lambda rng: _pick(rng, _UNITS), False),
    (("Status", "State"), lambda rng: _pick(rng, _STATES), False),
    (("Date", "Since", "Due"), _date, False),
    (("Code", "Id", "Key"), _code, False),
    (("Formula", "Expression"), _formula, False),
    (("Count", "n", "Pieces"), lambda rng: str(rng.integers(0, 500)), True),
    (("Price", "Cost"), lambda rng: f"{rng.integers(1, 100000) / 100:,.2f}", True),
    (("Share", "Change"), lambda rng: f"{rng.integers(-500, 1000) / 10:.1f} %", True),
    (("Mean", "Value", "x"), lambda rng: f"{rng.normal(0, 30):.3f}", True),
)


def words(rng: Rng, language: str) -> str:
    """One to three words of a built-in sentence; a few characters where there are no spaces."""
    passage = next(p for p in corpus.builtin() if p.language == language)
    line = _pick(rng, passage.lines)
    if scripts.is_wide(line[0]):
        start = int(rng.integers(max(1, len(line) - 7)))
        found = line[start : start + int(rng.integers(2, 7))]
    else:
        parts = line.split()
        start = int(rng.integers(len(parts)))
        found = " ".join(parts[start : start + int(rng.integers(1, 4))])
    return found.strip(".,;:!?¿¡。，、；：？！“”«»「」 ") or "—"  # noqa: RUF001


def table(rng: Rng, language: str = "en") -> str:
    """A table of 2 to 6 columns and 1 to 9 rows of data.

    With a language other than English, two columns of words of it and numbers besides.
    """
    chosen = list(rng.permutation(len(_COLUMNS))[: rng.integers(2, 7)])
    columns = [(_pick(rng, _COLUMNS[i][0]), _COLUMNS[i][1], _COLUMNS[i][2]) for i in chosen]
    if language != "en":
        own = [(words(rng, language), lambda rng: words(rng, language), False) for _ in range(2)]
        columns = own + [(words(rng, language), c[1], c[2]) for c in columns if c[2]][:3]
    header = [name for name, _, _ in columns]
    rows = [[_styled(rng, make(rng)) for _, make, _ in columns] for _ in range(rng.integers(1, 10))]
    if rng.random() < 0.1:  # an empty cell
        rows[rng.integers(len(rows))][rng.integers(len(columns))] = ""
    marks = [_alignment(rng, number) for _, _, number in columns]
    lines = [header, marks, *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _alignment(rng: Rng, number: bool) -> str:
    weights = (0.2, 0.05, 0.65, 0.1) if number else (0.55, 0.2, 0.05, 0.2)
    return str(rng.choice(["---", ":--", "--:", ":-:"], p=weights))


def _styled(rng: Rng, cell: str) -> str:
    if cell[0] in "`$" or rng.random() < 0.88:
        return cell
    return _pick(rng, ("**{}**", "*{}*")).format(cell)


def _problem(rng: Rng) -> str:
    """One exercise in words, its numbers drawn."""
    a, b, c = (int(n) for n in rng.integers(2, 90, 3))
    name, other = _pick(rng, _NAMES), _pick(rng, _NAMES)
    thing, place = _pick(rng, _THINGS), _pick(rng, _PLACES)
    return _pick(
        rng,
        (
            f"{name} packs {a} boxes with {b} {thing} each and {c} are left over. How many {thing} "
            f"were there **in all**?",
            f"A train leaves {place} at {a % 24}:{b % 60:02d} and travels at ${a + 40}$ km/h. How "
            f"far is it after ${c}$ minutes?",
            f"Solve $x^{{2}} - {a + b} x + {a * b} = 0$ and check both roots.",
            f"The sides of a rectangle are ${a}$ cm and ${b}$ cm. Find its area $A$ and the length "
            rf"of its diagonal, $d = \sqrt{{{a}^{{2}} + {b}^{{2}}}}$.",
            f"*{name}* is {a} years older than *{other}*. Together they are {a + 2 * b} years old. "
            "How old is each of them?",
            f"What does `f({a % 10}, {b % 10})` return?\n\n```\ndef f(a, b):\n"
            f"    total = {c}\n    for i in range(a):\n        total += i * b\n    return total\n```",
            f"Let $f(x) = {a % 9 + 1} x^{{3}} - {b} x + {c}$. Where does $f$ have a local minimum?",
            f"A price of {a * 10} falls by {b % 50} % and then rises by {c % 50} %. Is it now "
            "~~cheaper~~ **dearer** than before? Explain.",
            rf"Show that $\frac{{{a}}}{{{b}}} + \frac{{{b}}}{{{a}}} \geq 2$.",
            f"Write ${a * b}$ as a product of primes.",
        ),
    )


def _list(rng: Rng) -> str:
    """Choices, steps, or points with a level below."""
    kind, count = rng.integers(3), int(rng.integers(2, 6))
    entries = [
        _pick(
            rng,
            (_formula(rng), f"{rng.integers(1, 900)} {_pick(rng, _UNITS)}", words(rng, "en"),
             f"**{words(rng, 'en')}**", f"run {_code(rng)} first"),
        )
        for _ in range(count)
    ]  # fmt: skip
    if kind == 0:
        return "\n".join(f"- {entry}" for entry in entries)
    if kind == 1:
        return "\n".join(f"{n}. {entry}" for n, entry in enumerate(entries, 1))
    return "\n".join(f"- {entry}\n  - {words(rng, 'en')}" for entry in entries)


def _paragraph(rng: Rng) -> str:
    passage = next(p for p in corpus.builtin() if p.language == "en")
    lines = [_pick(rng, passage.lines) for _ in range(rng.integers(1, 4))]
    parts = " ".join(lines).split()
    at = int(rng.integers(len(parts)))
    mark = _pick(rng, ("**{}**", "*{}*", "***{}***"))
    # The mark goes inside the punctuation.
    core = parts[at].strip(".,?!")
    parts[at] = parts[at].replace(core, mark.format(core), 1)
    return " ".join(parts)


def document(rng: Rng) -> str:
    """A page of two to five blocks, a heading first three times in four."""
    blocks: list[str] = []
    if rng.random() < 0.75:
        title = _pick(rng, ("Exercise", "Problem", "Part", "Question", "Section"))
        level = "#" * int(rng.integers(1, 4))
        blocks.append(f"{level} {title} {rng.integers(1, 40)}")
    makers = (_problem, _problem, _paragraph, _list, table, lambda rng: f"> {_paragraph(rng)}")
    previous: Callable[[Rng], str] | None = None
    for _ in range(rng.integers(1, 5)):
        make = _pick(rng, makers)
        if make is _list and previous is _list:
            make = _paragraph  # two lists in a row would be one
        blocks.append(make(rng))
        previous = make
    if rng.random() < 0.1:
        blocks.append("---")
        blocks.append(_paragraph(rng))
    return "\n\n".join(blocks)


def languages() -> tuple[str, ...]:
    """Languages that tables may be in, besides English."""
    return _LANGUAGES
