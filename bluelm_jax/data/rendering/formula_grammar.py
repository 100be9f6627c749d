"""Random formulas in the LaTeX that Matplotlib's mathtext draws."""

from __future__ import annotations

import numpy as np

_LETTERS = tuple("abcdefghkmnpqrstuvwxyzABCDEFGHKLMNPQRSTUVXYZ")
_GREEK = (
    r"\alpha",
    r"\beta",
    r"\gamma",
    r"\delta",
    r"\epsilon",
    r"\theta",
    r"\lambda",
    r"\mu",
    r"\nu",
    r"\xi",
    r"\pi",
    r"\rho",
    r"\sigma",
    r"\tau",
    r"\phi",
    r"\chi",
    r"\psi",
    r"\omega",
    r"\Gamma",
    r"\Delta",
    r"\Theta",
    r"\Lambda",
    r"\Sigma",
    r"\Phi",
    r"\Psi",
    r"\Omega",
)
_FUNCTIONS = (
    r"\sin",
    r"\cos",
    r"\tan",
    r"\ln",
    r"\log",
    r"\exp",
    r"\arctan",
    r"\sinh",
    r"\cosh",
    r"\det",
    r"\max",
    r"\min",
)
_RELATIONS = (
    r"=",
    r"=",
    r"=",
    r"=",
    r"<",
    r">",
    r"\leq",
    r"\geq",
    r"\neq",
    r"\approx",
    r"\equiv",
    r"\sim",
    r"\propto",
    r"\in",
    r"\subset",
    r"\rightarrow",
)
_ACCENTS = (r"\hat", r"\bar", r"\vec", r"\tilde", r"\dot", r"\mathbf", r"\mathcal", r"\mathrm")
_SIGNS = ("+", "+", "-", "-", r"\pm")
_FENCES = (("(", ")"), ("[", "]"), ("|", "|"), (r"\{", r"\}"), (r"\lfloor", r"\rfloor"))


class _Writer:
    """Writes one formula; every method returns a piece of LaTeX."""

    def __init__(self, rng: np.random.Generator):
        self._rng = rng

    def _pick(self, options):
        return options[self._rng.integers(len(options))]

    def variable(self) -> str:
        kind = self._rng.random()
        if kind < 0.62:
            return self._pick(_LETTERS)
        if kind < 0.9:
            return self._pick(_GREEK)
        return f"{self._pick(_ACCENTS)}{{{self._pick(_LETTERS)}}}"

    def number(self) -> str:
        if self._rng.random() < 0.15:
            return f"{self._rng.integers(1, 1000) / 10:.1f}"
        return str(self._rng.integers(0, 10 ** int(self._rng.integers(1, 4))))

    def index(self) -> str:
        if self._rng.random() < 0.7:
            return str(self._pick((*"ijkmn012", "0", "1")))
        return f"{self._pick('ijkn')}{self._pick('+-')}{self._rng.integers(1, 4)}"

    def atom(self) -> str:
        if self._rng.random() < 0.25:
            return self.number()
        text = self.variable()
        if self._rng.random() < 0.3:
            text += f"_{{{self.index()}}}"
        if self._rng.random() < 0.25:
            text += f"^{{{self._pick(('2', '3', 'n', '-1', self.index()))}}}"
        return text

    def expression(self, depth: int) -> str:
        terms = [self.product(depth) for _ in range(self._rng.integers(1, 4))]
        text = ("-" if self._rng.random() < 0.1 else "") + terms[0]
        for term in terms[1:]:
            text += f" {self._pick(_SIGNS)} {term}"
        return text

    def product(self, depth: int) -> str:
        if self._rng.random() < 0.6:
            return self.factor(depth)
        first, second = self.factor(depth), self.factor(depth)
        # Two numbers side by side would read as one.
        joints = (r" \cdot ", r" \times ") if second[0].isdigit() else (" ", " ", r" \cdot ")
        return self._pick(joints).join((first, second))

    def factor(self, depth: int) -> str:
        if depth <= 0 or self._rng.random() < 0.35:
            return self.atom()
        return self._pick(
            (self.fraction, self.root, self.function, self.fenced, self.power, self.big)
        )(depth - 1)

    def fraction(self, depth: int) -> str:
        if self._rng.random() < 0.1:
            return rf"\binom{{{self.atom()}}}{{{self.atom()}}}"
        if self._rng.random() < 0.15:
            x = self._pick("xyzt")
            return rf"\frac{{\partial {self.variable()}}}{{\partial {x}}}"
        return rf"\frac{{{self.expression(depth)}}}{{{self.expression(depth)}}}"

    def root(self, depth: int) -> str:
        degree = f"[{self._rng.integers(3, 9)}]" if self._rng.random() < 0.25 else ""
        return rf"\sqrt{degree}{{{self.expression(depth)}}}"

    def function(self, depth: int) -> str:
        return rf"{self._pick(_FUNCTIONS)} \left( {self.expression(depth)} \right)"

    def fenced(self, depth: int) -> str:
        left, right = self._pick(_FENCES)
        text = rf"\left{left} {self.expression(depth)} \right{right}"
        return text + ("^{2}" if self._rng.random() < 0.25 else "")

    def power(self, depth: int) -> str:
        base = self._pick(("e", "2", self.variable(), self.variable()))
        return f"{base}^{{{self.expression(min(depth, 1))}}}"

    def big(self, depth: int) -> str:
        i, n = self._pick("ijkm"), self._pick(("n", "N", r"\infty", "10"))
        inner = self.product(depth)
        kind = self._rng.integers(4)
        if kind < 2:
            sign = (r"\sum", r"\prod")[kind]
            return rf"{sign}_{{{i}={self._rng.integers(0, 2)}}}^{{{n}}} {inner}"
        if kind == 2:
            low, high = self._pick(("0", "a", r"-\infty")), self._pick(("1", "b", r"\infty"))
            return rf"\int_{{{low}}}^{{{high}}} {inner} \, d{self._pick('xyzt')}"
        variable, limit = self._pick("xyzt"), self._pick(("0", r"\infty"))
        return rf"\lim_{{{variable} \rightarrow {limit}}} {inner}"

    def statement(self, depth: int) -> str:
        text = self.expression(depth)
        if self._rng.random() < 0.75:
            text = f"{self.expression(min(depth, 1))} {self._pick(_RELATIONS)} {text}"
        return text


def formula(rng: np.random.Generator, max_depth: int = 3, max_chars: int = 160) -> str:
    """Draws a formula, without dollar signs.

    Args:
      rng: random numbers.
      max_depth: deepest nesting of fractions, roots, brackets.
      max_chars: longer formulas are drawn again, one level shallower each time.
    """
    depth = int(rng.integers(0, max_depth + 1))
    while True:
        text = _Writer(rng).statement(depth)
        if len(text) <= max_chars or depth == 0:
            return text
        depth -= 1
