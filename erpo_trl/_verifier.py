r"""Are two short LaTeX answers the same? String work around math-verify's parser, and the process that runs it.

`verify(answer, gold)` reads an answer in three steps:

1. `clean`: one spelling for what is written in several ways (Unicode, spacing, `\frac43`, `1{,}000`, `2 1/2`);
2. `same`: lists, sets, tuples, intervals, `x =`, ±, units, words and base numerals are told apart *as written*,
   because a computer-algebra object forgets them (`(3,1)` or `(1,3)`, `10_3` or `10`, `\text{god}` or `\text{dog}`);
3. what is left is one expression, equation or matrix: parsed by math-verify's parser and compared by value, exactly or
   at sample points, never by the size of a difference (1/2006! is not 1/2004!) and never with `simplify` or `solve`.
   Anything else goes to `math_verify.verify`.

This file also runs by itself (`python -P _verifier.py`): it must import nothing of this package, and `math_verify` and
`sympy` only inside the functions that the worker calls. No text reaches `eval`: the parser is a grammar, not sympy's.
"""

import json
import logging
import os
import re
import signal
import sys
import unicodedata
from functools import lru_cache
from itertools import groupby, product


MAX_LENGTH = 2000  # characters; a longer answer is no final answer, and the parser's time grows with it
MAX_DEPTH = 16  # nested braces and brackets; the parser's time grows exponentially with it
MAX_DIGITS = 10_000  # size of a number that is still worked out

Brackets = tuple[str, str, list[str]]  # opening, closing, the parts between


# ---------------------------------------------------------------------------------------------------------- strings

_SYMBOLS = {
    "−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ",
    "÷": "/", "⁄": "/", "∕": "/", "√": r"\sqrt ", "∞": r"\infty ", "≤": r"\le ", "⩽": r"\le ", "≥": r"\ge ",
    "⩾": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "±": r"\pm ", "∓": r"\mp ", "∪": r"\cup ", "∩": r"\cap ",
    "∈": r"\in ", "∅": r"\emptyset ", "°": r"^\circ ", "º": r"^\circ ", "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}",
    "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}", "ℂ": r"\mathbb{C}", "∖": r"\setminus ", "′": "'", "’": "'",
    "∠": r"\angle ", "⟨": r"\langle ", "⟩": r"\rangle ", "∧": r"\and ", "∨": r"\or ", "∛": r"\sqrt[3]",
    "¢": r"\text{cents}", "“": '"', "”": '"', "\u00ad": "", "\u200b": "", "\u200c": "",
    "\u200d": "", "\u2060": "", "\ufeff": "",
}  # fmt: skip


def _ascii_char(char: str) -> str:
    if char.isascii():
        return char
    if char in _SYMBOLS:
        return _SYMBOLS[char]
    kind, plain = unicodedata.decomposition(char), unicodedata.normalize("NFKC", char)
    if kind.startswith("<fraction>") and "⁄" in plain:
        return r"\frac{{{}}}{{{}}}".format(*plain.split("⁄"))
    plain = "".join(_SYMBOLS.get(c, str(unicodedata.decimal(c, c))) for c in plain)
    name = re.fullmatch(r"GREEK (SMALL|CAPITAL) LETTER (\w+)", unicodedata.name(plain, "") if len(plain) == 1 else "")
    if name:
        letter = name[2].lower().replace("lamda", "lambda")
        return f"\\{letter if name[1] == 'SMALL' else letter.capitalize()} "
    return plain


def _script(char: str) -> str:
    """ "^" for a superscript character, "_" for a subscript one."""
    return "" if char in _SYMBOLS else {"<supe": "^", "<sub>": "_"}.get(unicodedata.decomposition(char)[:5], "")


def to_ascii(text: str) -> str:
    """Unicode digits, minus, operators, Greek, superscripts, `½` and full-width forms as plain LaTeX."""
    if text.isascii():
        return text
    runs = ((script, "".join(map(_ascii_char, run))) for script, run in groupby(text, _script))
    text = "".join(f"{script}{{{run}}}" if script else run for script, run in runs)
    return re.sub(r"\^\{(\d+)\}/_\{(\d+)\}", r"\\frac{\1}{\2}", text)


_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|.", re.DOTALL)
_OPEN = {"(", "[", "{", r"\{", r"\langle", r"\begin"}
_CLOSE = {")", "]", "}", r"\}", r"\rangle", r"\end"}


def depth(text: str) -> int:
    """Deepest nesting of braces and brackets."""
    level = deepest = 0
    for token in re.findall(r"\\[A-Za-z]+|\\.|[()\[\]{}]", text, re.DOTALL):
        level += (token in _OPEN) - (token in _CLOSE)
        deepest = max(deepest, level)
    return deepest


def balanced(text: str) -> bool:
    """Whether every `{` has its `}` (escaped ones are symbols, not braces)."""
    level = 0
    for token in re.findall(r"\\.|[{}]", text, re.DOTALL):
        level += (token == "{") - (token == "}")
        if level < 0:
            return False
    return level == 0


def split(text: str, separators: set[str]) -> tuple[list[str], list[str]]:
    """The parts of `text` between separators that stand outside all brackets, and those separators."""
    parts, found, level = [""], [], 0
    for token in _TOKEN.findall(text):
        level += (token in _OPEN) - (token in _CLOSE)
        if level <= 0 and token in separators:
            parts.append("")
            found.append(token)
        else:
            parts[-1] += token
    return [p.strip() for p in parts], found


def enclosed(text: str) -> tuple[str, str, str] | None:
    """(opening, inside, closing) when one pair of brackets holds all of `text`."""
    tokens = _TOKEN.findall(text)
    if len(tokens) < 2 or tokens[0] not in _OPEN - {r"\begin"} or tokens[-1] not in _CLOSE:
        return None
    level = 0
    for i, token in enumerate(tokens):
        level += (token in _OPEN) - (token in _CLOSE)
        if level == 0:
            return (tokens[0], "".join(tokens[1:-1]).strip(), tokens[-1]) if i == len(tokens) - 1 else None
    return None


def _argument(text: str, i: int, many_digits: bool = False) -> tuple[str, int]:
    """The TeX argument at position i, with its own arguments braced, and where it ends."""
    while i < len(text) and text[i] == " ":
        i += 1
    if i < len(text) and text[i] == "{":
        level = 0
        for match in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, i):
            level += (match[0] == "{") - (match[0] == "}")
            if level == 0:
                return brace_arguments(text[i + 1 : match.start()]), match.end()
        raise ValueError("unbalanced")
    match = re.compile(r"\d+" if many_digits else r"\d").match(text, i) or _TOKEN.match(text, i)
    if not match or match[0] in "}^_&":
        raise ValueError("argument missing")
    if match[0] in (r"\sqrt", r"\frac", r"\binom"):
        return _command(text, match)
    return match[0], match.end()


def _command(text: str, match: re.Match) -> tuple[str, int]:
    name, i = match[0], match.end()
    if name == r"\sqrt":
        root = re.compile(r"\s*\[([^\[\]]*)\]").match(text, i)
        inside, i = _argument(text, root.end() if root else i, many_digits=True)
        return (rf"\sqrt[{root[1]}]{{{inside}}}" if root else rf"\sqrt{{{inside}}}"), i
    first, i = _argument(text, i)
    if name in (r"\log", "_", "^"):
        return f"{name}{{{first}}}", i
    second, i = _argument(text, i)
    return f"{name}{{{first}}}{{{second}}}", i


_TAKES_ARGUMENTS = re.compile(r"\\(?:frac|binom|sqrt)(?![A-Za-z])|(?<=\\log)_|[_^](?=\s*\\(?:frac|sqrt))")


def brace_arguments(text: str) -> str:
    r"""`\frac43` → `\frac{4}{3}`, `\sqrt2` → `\sqrt{2}`, `\log_28` → `\log_{2}8`. Raises ValueError on broken TeX."""
    out, i = [], 0
    while match := _TAKES_ARGUMENTS.search(text, i):
        out.append(text[i : match.start()])
        braced, i = _command(text, match)
        out.append(braced)
    return "".join(out) + text[i:]


_REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"\\\\\s*\[[^\]]*(?:pt|em|ex|mm|cm)\]", r"\\\\"),
        (r"\\\\\\\\", r"\\\\"),
        (r"\\(?:underline|textcolor\{[^{}]*\}|color\{[^{}]*\})(?=\s*\{)", ""),
        (r"\{([^{}]*)\\choose(?![A-Za-z])([^{}]*)\}", r"\\binom{\1}{\2}"),
        (r"\\begin\{(?:small|b|B)?matrix\}|\\begin\{array\}\s*(?:\[\w\])?\{[^{}]*\}", r"\\begin{pmatrix}"),
        (r"\\end\{(?:(?:small|b|B)?matrix|array)\}", r"\\end{pmatrix}"),
        (r"\\m?(?:left|right)\s*\.|\\(?:left|right|mleft|mright|[bB]igg?[lrm]?)(?![A-Za-z])", ""),
        (r"[(\[]\s*(\\begin\{pmatrix\}(?:(?!\\begin).)*\\end\{pmatrix\})\s*[)\]]", r"\1"),
        (r"\\\\\s*(?=\\end\{pmatrix\})", ""),
        (r"(?<!\\)\\[()\[\]]", " "),
        (r"(?:(?<!\\)\\(?:text|math)(?:bf|it|rm)?\{\s*)?\\(?:\$|textdollar)(?:\s*\})?"
         r"|(?<=^)\$(?=[\d.,]+$)|€|£|¥|₹", r"\\$ "),
        (r"(?<!\\)\$", " "),
        (r"(?<=\d)(?:\{,\}|,\\!)(?=\d{3}(?!\d))|\\,?!|\\(?:displaystyle|textstyle|limits|nolimits)(?![A-Za-z])", ""),
        (r"\{,\}", ","),
        (r"(?<!\\)\\[,;: >]|\\q?quad(?![A-Za-z])|\\[hv]?space\*?\{[^{}]*\}|~|[\s\u00a0]+", " "),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\[dt]binom(?![A-Za-z])", r"\\binom"),
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"\\(?:varnothing|empty)(?![A-Za-z])|\\\{\s*\\\}", r"\\emptyset"),
        (r"\\(?:leqslant|leqq|leq)(?![A-Za-z])|<=", r"\\le "),
        (r"\\(?:geqslant|geqq|geq)(?![A-Za-z])|>=", r"\\ge "),
        (r"\\(?:neq|not\s*=)(?![A-Za-z])|!=", r"\\ne "),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"\\(?:lor|vee)(?![A-Za-z])", r"\\or "),
        (r"\\(?:land|wedge)(?![A-Za-z])", r"\\and "),
        (r"\\mathbb\s*([A-Z])", r"\\mathbb{\1}"),
        (r"\\R(?![A-Za-z])", r"\\mathbb{R}"),
        (r"(\\mathbb\{\w\})\s*(?:-|\\backslash)\s*(?=\\\{)", r"\1\\setminus "),
        (r"^\s*\\approx(?![A-Za-z])", ""),
        (r"\\(?:text|mathbb)?\{\s*\}", ""),
        (r"\\(?:textbf|textit|textrm|textnormal|textsf|texttt|emph|mathrm|mathbf|mathit|mathsf|mbox|hbox|bm|boldsymbol)"
         r"\s*(?=\{)", r"\\text"),
        (r"\\operatorname\*?\{(\w+)\}", r"\\text{\1}"),
        (r"\\text\{\s*(\\text\{[^{}]*\})\s*\}", r"\1"),
        (r"\\text(?=\{[^{}]*\\(?:frac|sqrt|pi))", ""),
        (r"\\text\{\s*(-?[\d.,]+)\s+([A-Za-z][^{}]*)\}", r"\1 \\text{\2}"),
        (r"(\\text\{\s*|^)(?:all )?real numbers(?(1)\s*\}|$)", r"\\mathbb{R}"),
        (r"(\\text\{\s*|^)(?:the )?empty set(?(1)\s*\}|$)", r"\\emptyset"),
        (r"_\s*(\\text\{[^{}]*\})", r"_{\1}"),
        (r"\\text\s*\{\s*(-?[\d.,]+|\(?[A-Za-z]\)?)\s*\}", r" \1 "),
        (r"\\text\{([^{}]*?),?\s*\b(and|or)\s*\}", r"\\text{\1} \\\2 "),
        (r"\\text\{\s*(and|or)\b([^{}]*)\}", r" \\\1 \\text{\2}"),
        (r"\\text\{\s*\}", ""),
        (r"(?<=[\w)}\]$%])\s*,?\s+(and|or)\s+(?=\S)", r" \\\1 "),
        (r"[,;]\s*(\\(?:and|or)\b)", r"\1"),
        (r"\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\degrees?(?![A-Za-z])|\\deg\s*$|\\textdegree(?![A-Za-z])", r"^{\\circ}"),
        (r"(?<![A-Za-z\\])oo(?![A-Za-z])|(?<![A-Za-z\\])inf(?:inity|ty)?(?![A-Za-z])", r"\\infty "),
        (r"(?<![A-Za-z\\])(sqrt|pi)(?![A-Za-z])", r"\\\1 "),
        (r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"\^\s*\(([^()]*)\)", r"^{\1}"),
        (r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([+-]?\d+)(?!\w)", r"\1 \\cdot 10^{\2}"),
        (r"(?<=\d)\s*\*\s*|(?<=[\w)}])\s*\*\s*(?=[\w(\\])", r" \\cdot "),
        (r"(?<![\d.])\.(?=\d)", "0."),
        (r"(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{?(\d+)\}?", lambda m: _repeating(*m.groups())),
    ]
]  # fmt: skip


def _repeating(whole: str, start: str, period: str) -> str:
    r"""0.1\overline{6} as an exact fraction."""
    top = int((whole or "0") + start + period) - int((whole or "0") + start)
    return rf"\frac{{{top}}}{{{(10 ** len(period) - 1) * 10 ** len(start)}}}"


_THOUSANDS = re.compile(
    r"(?<![\w.,])[1-9]\d{0,2}(?:,\d{3})+(?!,?\d)|(?<![\w.,}] )(?<![\w.,}])[1-9]\d{0,2}(?: \d{3})+(?![\d/]| ?\d)"
)
_MIXED = re.compile(r"(?<![\w.^_}\)])(\d+) *(?:\\frac\{(\d+)\}\{(\d+)\}|(?<= )(\d+) ?/ ?(\d+))(?![\d.!^])")


def _join_thousands(text: str) -> str:
    """`1,000` and `1 000` → `1000`, but not between brackets, where a comma separates."""
    level, spans = 0, []
    for match in re.finditer(r"\\[{}]|\\.|[(\[)\]]|" + _THOUSANDS.pattern, text, re.DOTALL):
        level += (match[0] in ("(", "[", r"\{")) - (match[0] in (")", "]", r"\}"))
        if match[0][0].isdigit() and (level <= 0 or "," not in match[0]):
            spans.append(match.span())
    for start, end in reversed(spans):
        text = text[:start] + re.sub("[ ,]", "", text[start:end]) + text[end:]
    return text


def _mixed(match: re.Match) -> str:
    top, bottom = int(match[2] or match[4]), int(match[3] or match[5])
    if not 0 < top < bottom:  # 2\frac{3}{2} is a product: the fraction of a mixed number is proper
        return rf"{match[1]} \cdot \frac{{{top}}}{{{bottom}}}"
    return rf"({match[1]}+\frac{{{top}}}{{{bottom}}})"


@lru_cache(maxsize=4096)
def clean(text: str) -> str:
    """One spelling per meaning. Raises ValueError on TeX that is broken, too long or too deep to read."""
    if len(text) > MAX_LENGTH:
        raise ValueError(f"{len(text)} characters, at most {MAX_LENGTH}")
    text = to_ascii(text).strip()
    if not any(env in text for env in ("matrix", "array", "cases")):
        text = re.sub(r"\\\\(?=[A-Za-z])", r"\\", text)
    text = re.sub(r"^\s*(\*\*|__)(.*)\1\s*$", r"\2", text)
    while "\\boxed" in text or "\\fbox" in text:
        text, before = re.sub(r"\\(?:boxed|fbox)\s*(?=\{)", "", text), text
        if text == before:
            raise ValueError("box without braces")
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    while (flat := re.sub(r"\(\s*(\([^()]*\))\s*\)", r"\1", text)) != text:
        text = flat
    if not balanced(text) or depth(text) > MAX_DEPTH or re.search(r"(?:\^[^{}^]{1,4}){4}", text):
        raise ValueError("unbalanced or nested too deep")
    text = re.sub(r"(?<!\\)[.,;:?\s]+$", "", text).strip()
    while (parts := enclosed(text)) and parts[0] == "{" and parts[2] == "}":
        text = parts[1]
    text = re.sub(r" +", " ", brace_arguments(text))
    if french := re.fullmatch(r"([\[\]])([^\[\]]+,[^\[\]]+)([\[\]])", text):
        text = {"]": "("}.get(french[1], "[") + french[2] + {"[": ")"}.get(french[3], "]")
    return _MIXED.sub(_mixed, _join_thousands(text)).strip()


def literal(text: str) -> str:
    """What is left of a cleaned text when markup, case, spaces and punctuation do not count."""
    text = re.sub(r"\\text\s*\{([^{}]*)\}", r" \1 ", text).casefold()
    text = re.sub(r"(?<=\d)\s+(?=\d)", "_", text.strip())  # 2 1/2 is not 21/2
    text = re.sub(r"[\s'\"`]|(?<!\d)\.|\.(?!\d)|!$(?<![\d)}]!)", "", text)
    text = re.sub(r"(?<=[a-z])-(?=[a-z]{2})", "", re.sub(r"\{(\w)\}", r"\1", text))
    return text[1:-1] if re.fullmatch(r"\([a-z]\)", text) else text


# ----------------------------------------------------------------------------------------- lists, sets, names, units

_NAME = re.compile(
    r"(?:m ?)?(?:\\(?:angle|triangle|overline|vec|hat|bar|text|operatorname|widehat)\s*)?"
    r"\{?(?:\\?[A-Za-z]+[A-Za-z .]*)\}?(?:\^\{?-1\}?)?(?:_(?:\w|\{[^{}]*\}))?'*\s*(?:\([^()=]*\))?"
    r"|\([A-Za-z\\_0-9{}]+(?:, ?[A-Za-z\\_0-9{}]+)+\)|\|[A-Za-z]+\||\[[A-Z]+\]"
)
_NOT_NAMES = re.compile(r"\\(?:frac|sqrt|binom|cdot|times|pm|mp|pi|infty|ln|log|sin|cos|tan)(?![A-Za-z])|^e$|^i$")


def is_name(text: str) -> bool:
    r"""Whether `text` can stand left of the = that introduces an answer: `x`, `f(x)`, `\text{Area}`, `(x,y)`."""
    return bool(_NAME.fullmatch(text)) and not _NOT_NAMES.search(text)


def named(text: str) -> tuple[str, str]:
    r"""(name, value) of `x = 5`, `5 = x`, `x = 2 + 3 = 5`, `x \approx 5`, `x \in S`; ("", text) without a name."""
    sides, _ = split(text, {"=", r"\approx", r"\in"})
    if len(sides) < 2 or any(op in text for op in (r"\le", r"\ge", "<", ">", r"\ne")) and r"\in" not in text:
        return "", text
    if is_name(sides[0]) and sides[-1]:
        return re.sub(r"\s", "", literal(sides[0])), sides[-1]
    if len(sides) == 2 and is_name(sides[1]) and sides[0]:
        return re.sub(r"\s", "", literal(sides[1])), sides[0]
    return "", text


def signs(text: str) -> list[str]:
    r"""One text per choice of sign: each \pm for itself, all together where a \mp says that they belong together."""
    places = re.findall(r"\\(?:pm|mp)(?![A-Za-z])", text)
    if not places or len(places) > 4:
        return [text]
    linked = len(set(places)) == 2
    choices = [("+",) * len(places), ("-",) * len(places)] if linked else product("+-", repeat=len(places))
    flip = {"+": "-", "-": "+"}
    out = []
    for choice in choices:
        signed = iter(flip[s] if linked and place == r"\mp" else s for s, place in zip(choice, places, strict=True))
        signed_text = re.sub(r"\\(?:pm|mp)(?![A-Za-z])", lambda _, s=signed: next(s), text)
        out.append(re.sub(r"(^|[(,={])\s*\+", r"\1", signed_text))
    return out


def items(text: str) -> tuple[list[str], bool]:
    r"""The elements of a list (`1, 2`, `1 \and 2`, ±) or of a set in braces, and whether it was a set in braces."""
    name, value = named(text)
    pair = enclosed(value)
    if pair and (pair[0], pair[2]) == (r"\{", r"\}"):
        parts, _ = split(pair[1], {",", ";"})
        return [s for p in parts for s in signs(p)], True
    parts, _ = split(text, {",", ";", r"\and", r"\or"})
    return [s for p in parts if p for s in signs(p)], False


def brackets(text: str) -> Brackets | None:
    """A tuple or an interval: its brackets and its parts, two or more."""
    pair = enclosed(text)
    if not pair or pair[0] not in ("(", "[", r"\langle"):
        return None
    parts, _ = split(pair[1], {",", ";"})
    return (pair[0], pair[2], parts) if len(parts) > 1 else None


_UNITS = {
    "m": "m meter metre", "cm": "cm centimeter centimetre", "mm": "mm millimeter millimetre",
    "km": "km kilometer kilometre", "in": "in inch inche", "ft": "ft foot feet", "yd": "yd yard", "mi": "mi mile",
    "kg": "kg kilogram", "g": "g gram", "mg": "mg milligram", "lb": "lb pound", "oz": "oz ounce",
    "s": "s sec second", "min": "min minute", "h": "h hr hour", "day": "day", "week": "week", "month": "month",
    "year": "year yr", "dollar": r"$ dollar usd", "cent": "cent", "euro": "euro eur", "am": "am", "pm": "pm",
    "l": "l liter litre", "ml": "ml milliliter millilitre", "mph": "mph", "kmh": "kmh kph",
    "n": "newton", "j": "joule", "w": "watt", "pa": "pascal", "hz": "hz hertz", "degc": "celsius",
    "degf": "fahrenheit", "deg": "degree deg", "rad": "radian rad",
}  # fmt: skip
_UNIT_OF = {word: unit for unit, words in _UNITS.items() for word in words.split()}
_BARE_UNIT = "|".join(sorted((re.escape(w) for w in _UNIT_OF if len(w) > 1), key=len, reverse=True))
_WORDS_AFTER = re.compile(
    r"(?P<value>.*?[\d)}a-zA-Z])\s*"
    r"(?P<unit>(?:\\text\{(?:[^{}]|\{[^{}]*\})*\}\s*(?:\^\s*\{?-?\d\}?\s*)?[/.]?\s*(?:\\cdot\s*)?)+)"
    r"|(?P<value2>.*[\d)}])\s+"
    r"(?P<unit2>(?!(?:sin|cos|tan|log|ln|mod)\b)[A-Za-z]{2,}[A-Za-z .]*(?:\^\{?\d\}?)?(?:/ ?[A-Za-z]+(?:\^\{?\d\}?)?)?"
    r"|(?:[a-zA-Z]{1,3} ?/ ?[a-zA-Z]{1,3}(?:\^\{?\d\}?)?))"
    rf"|(?P<value3>.*[\d)}}])(?P<unit3>(?:{_BARE_UNIT})s?(?:\^\{{?\d\}}?)?)"
)
_DEGREE = re.compile(r"\s*\^\{\\circ\}\s*(?:\\text\{\s*)?([CF]?)\s*\}?$")


def unit_name(words: str) -> str:
    """One spelling of a known unit with its power, "" for a unit (or thing counted) that is not in the table."""
    words = re.sub(r"\\text|[{}]", " ", words).lower().replace(".", "")
    power = {"square": "2", "sq": "2", "cubic": "3", "cu": "3"}
    found, exponent = "", ""
    for word in re.findall(r"[a-z$]+|\d", words):
        if word in power or word.isdigit():
            exponent = power.get(word, word)
        elif found:
            return ""
        else:
            found = _UNIT_OF.get(word) or _UNIT_OF.get(word.removesuffix("s")) or "?"
    return "" if found in ("", "?") else found + exponent.replace("1", "")


def without_unit(text: str) -> tuple[str, str, bool]:
    """(value, unit, percent) of one element; the unit is "" where none is written or it is not a known one."""
    percent = re.fullmatch(r"(.+?)\s*(?:\\?%|\\text\{\s*(?:percent|\\?%)\s*\}|percent)", text)
    if percent:
        return percent[1], "", True
    money = re.fullmatch(r"(-?)\s*(?:\\\$|(?:USD|EUR|Rs\.?|\\text\{\s*(?:USD|EUR|Rs\.?)\s*\})(?= ?[\d]))\s*(.+)", text)
    if money:
        value, unit, _ = without_unit(money[2])
        return money[1] + value, unit or "dollar" * ("$" in text), False
    if text.endswith(r"\$") and len(text) > 2:
        return text[:-2].strip(), "dollar", False
    degree = _DEGREE.search(text)
    if degree and degree.start() and not re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", text):
        return text[: degree.start()], {"C": "degc", "F": "degf", "": "deg"}[degree[1]], False
    match = _WORDS_AFTER.fullmatch(text)
    if match and re.search(r"\d|\\(?:pi|frac|sqrt)", value := match["value"] or match["value2"] or match["value3"]):
        return value.strip(), unit_name(match["unit"] or match["unit2"] or match["unit3"]), False
    return text, "", False


# -------------------------------------------------------------------------------------------- words and base numerals

_NUMBERS = ["two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
_BASE_WORDS = {**{word: base for base, word in enumerate(_NUMBERS, start=2)}, "sixteen": 16}
_BASE = re.compile(
    r"(?:\\text)?[({]?(-?[0-9A-Za-z .]*\d[0-9A-Za-z .]*|[A-F]+)[)}]?\s*_\s*(?:(\d)|\{([^{}]*(?:\{[^{}]*\})?[^{}]*)\})"
)


def base_numeral(text: str) -> tuple[str, int] | None:
    r"""(digits, base) of `2516_8`, `(1011)_{2}`, `1A_{16}`, `1011_{\text{two}}`."""
    match = _BASE.fullmatch(text)
    if not match:
        return None
    word = re.sub(r"\\text|base|[{}()\s]", "", match[2] or match[3]).lower()
    base = int(word) if word.isdecimal() else _BASE_WORDS.get(word)
    digits = match[1].replace(" ", "").upper()
    if base is None or not 2 <= base <= 36 or any(int(d, 36) >= base for d in digits if d.isalnum()):
        return None
    return re.sub(r"^(-?)0+(?=\w)", r"\1", digits), base


def is_words(text: str) -> bool:
    r"""Whether an element is text (`\text{Friday}`, `Friday`, `\text{June 20}`) and no product of letters (`abc`)."""
    rest = re.sub(r"\\text\s*\{[^{}]*\}", "", text).strip(" .,:'\"-")
    if rest != text.strip(" .,:'\"-"):
        return not re.search(r"[\\=+*/^<>]|\d", rest)
    words = re.findall(r"[A-Za-z]+", text)
    if not re.fullmatch(r"[A-Za-z][A-Za-z .,'()-]*", text):
        return False
    return any(len(w) > 3 or (len(w) == 3 and re.search("[efghijlo]", w.lower())) for w in words)


def _label(text: str) -> tuple[str, str]:
    r"""(`C`, `12`) of the multiple-choice answer `\textbf{(C)}\ 12`."""
    match = re.fullmatch(r"\(\s*([A-E])\s*\)\s*(.+)|([A-E])\s*[.:)]\s+(.+)", text)
    return (match[1] or match[3], match[2] or match[4]) if match else ("", text)


# ------------------------------------------------------------------------------------------------------- comparison


def usable(gold: str) -> bool:
    """Whether a gold can be compared with at all: it parses, or is words or notation that can be matched literally."""
    try:
        text = clean(gold)
    except ValueError:
        return False
    bare = re.sub(r"\\(?:text|frac|sqrt|binom|cdot|times|and|or)(?![A-Za-z])|\\(?:begin|end)\{\w+\}", "", text)
    if not any(map(str.isalnum, bare)):
        return False
    if r"\text" not in gold and len(re.findall(r"(?<![\\A-Za-z])[A-Za-z]{2,}", re.sub(r"\\[A-Za-z]+", "", bare))) > 3:
        return False  # a sentence, not an answer
    return all(_readable(item) for item in items(text)[0] or [""])


def _readable(text: str) -> bool:
    pair = brackets(text)
    if pair:
        return all(map(_readable, pair[2]))
    if is_words(text) or base_numeral(text) or _set_like(text):
        return True
    value = without_unit(named(text)[1])[0]
    # notation that the parser does not know (6:00, x \equiv 3 \pmod 5) still matches itself
    return parse(value) is not None or bool(
        re.search(r":|[A-Za-z]{2,}", re.sub(r"\\(?:frac|sqrt|cdot|times)", "", value))
    )


def verify(answer: str, gold: str) -> bool:
    """Whether `answer` is `gold`. Both are the inside of a box; an answer that cannot be read is wrong."""
    try:
        a, g = clean(answer), clean(gold)
    except ValueError:
        return False
    if not a or not g:
        return False
    label, rest = _label(a)
    if label and re.fullmatch(r"\(?[A-E]\)?", g):
        return label == g.strip("()")
    return same(a, g) or bool(label and not _label(g)[0] and same(rest, g))


def same(a: str, g: str) -> bool:
    """Whether two cleaned texts mean the same: unordered lists, sets, set expressions, or single elements."""
    if literal(a) == literal(g):
        return True
    if (unknown := _unknown(a)) and (expected := _unknown(g)) and unknown != expected:
        return False
    if _set_like(a) or _set_like(g):
        left, right = as_set(a), as_set(g)
        if left is not None and right is not None:
            return _same_set(left, right)
    (of_a, braces_a), (of_g, braces_g) = items(a), items(g)
    if braces_a or braces_g:
        ordered = brackets(named(a)[1]) or brackets(named(g)[1])
        covers = all(any(same_item(x, y) for x in of_a) for y in of_g)
        return covers and not ordered and all(any(same_item(x, y) for y in of_g) for x in of_a)
    if len(of_a) == len(of_g) == 1:
        return same_item(of_a[0], of_g[0])
    for many, pair in ((of_a, brackets(named(g)[1])), (of_g, brackets(named(a)[1]))):
        names = [named(x)[0] for x in many]
        if pair and len(pair[2]) == len(set(names)) == len(many) and all(names):  # x = 1, y = 2 for (1, 2)
            return all(same_item(named(x)[1], y) for x, y in zip(many, pair[2], strict=True))
    return len(of_a) == len(of_g) and _match_all(of_a, of_g)


def _match_all(of_a: list[str], of_g: list[str]) -> bool:
    """Whether each gold element has an answer element of its own (equality is transitive: the first will do)."""
    left = list(of_a)
    for y in of_g:
        found = next((x for x in left if same_item(x, y)), None)
        if found is None:
            return False
        left.remove(found)
    return True


def same_item(a: str, g: str) -> bool:
    """Whether two elements are the same: tuples and intervals part by part, then names, words, units, values."""
    if literal(a) == literal(g):
        return True
    (name_a, value_a), (name_g, value_g) = named(a), named(g)
    if name_a and name_g and name_a != name_g and not {name_a, name_g} <= {"y", "f(x)"}:
        return same_value(a, g)  # different unknowns, or one relation solved for different letters
    if (name_a or name_g) and not ("=" in value_a or "=" in value_g):
        return same(value_a, value_g)
    sides, _ = split(a, {"="})
    if len(sides) == 2 and "=" not in g and not re.search(r"\d", sides[0]):  # x + y = 5 for 5, but not 2x = 10 for 10
        return same(sides[1], g)
    pair_a, pair_g = brackets(a), brackets(g)
    if pair_a and pair_g:
        return pair_a[:2] == pair_g[:2] and len(pair_a[2]) == len(pair_g[2]) and all(map(same, pair_a[2], pair_g[2]))
    if pair_a or pair_g:
        return False
    if a.startswith(r"\{") and g.startswith(r"\{"):
        return same(a, g)
    return same_leaf(a, g)


def same_leaf(a: str, g: str) -> bool:
    """One word, base numeral or quantity against another."""
    base_a, base_g = base_numeral(a), base_numeral(g)
    if base_a or base_g:
        return (base_a or (a, 10)) == (base_g or (g, 10))
    if is_words(a) or is_words(g):
        return literal(a) == literal(g)
    (value_a, unit_a, percent_a), (value_g, unit_g, percent_g) = without_unit(a), without_unit(g)
    (value_a, letter_a), (value_g, letter_g) = _without_letter(value_a, value_g), _without_letter(value_g, value_a)
    unit_a, unit_g = unit_a or letter_a, unit_g or letter_g
    if unit_a and unit_g and unit_a != unit_g:
        return False
    if literal(value_a) == literal(value_g) or same_value(value_a, value_g):
        return True
    if percent_a != percent_g:  # 28\% is 28 with its unit, and it is 0.28 too
        of_100 = [rf"\frac{{{v}}}{{100}}" if p else v for v, p in ((value_a, percent_a), (value_g, percent_g))]
        return same_value(*of_100)
    return False


def _without_letter(text: str, other: str) -> tuple[str, str]:
    """(5, m) for `5 m` where the other side shows that m is no variable."""
    bare = re.fullmatch(r"(.*\d) ?([msgLNJWVKhAC](?:\^\{?\d\}?)?)", text)
    return (bare[1], unit_name(bare[2])) if bare and not re.search("[A-Za-z]", other) else (text, "")


# ----------------------------------------------------------------------------------------- intervals and inequalities

_RELATION = re.compile(r"<|>|\\(?:le|ge|ne)(?![A-Za-z])")
_FLIP = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le", r"\ne": r"\ne"}


def _set_like(text: str) -> bool:
    return bool(_RELATION.search(text) or re.search(r"\\(?:cup|cap|setminus|mathbb|mid)(?![A-Za-z])|\\\{.*[:|]", text))


def as_set(text: str):
    """The sympy set that intervals, unions or inequalities in one unknown describe, or None."""
    import sympy

    text = named(text)[1]
    if (pair := enclosed(text)) and pair[0] == r"\{":
        parts = re.split(r"\\mid(?![A-Za-z])|[:|]", pair[1], maxsplit=1)
        if len(parts) == 2:
            return as_set(parts[1].strip(" :|"))
    first, *rest = split(text, {",", r"\and"})[0]
    if rest and r"\ne" in first and not any(map(_RELATION.search, rest)):  # x \ne 1, 2
        unknown = first.split(r"\ne")[0]
        text = ",".join([first, *(rf"{unknown}\ne {side}" for side in rest)])
    for connector, join in ((r"\or", sympy.Union), (r"\and", sympy.Intersection), (",", None)):
        parts, _ = split(text, {connector})
        if len(parts) > 1 and all(map(_RELATION.search, parts)):
            sets = [as_set(p) for p in parts]
            if None in sets or len({_unknown(p) for p in parts}) > 1:
                return None
            if join is None:  # "x < 1, x > 3" leaves it to the reader
                both = sympy.Intersection(*sets)
                return sympy.Union(*sets) if both.is_empty else both
            return join(*sets)
    if _RELATION.search(text):
        return _from_inequality(text)
    for operator, join in ((r"\setminus", sympy.Complement), (r"\cup", sympy.Union), (r"\cap", sympy.Intersection)):
        parts, _ = split(text, {operator})
        if len(parts) > 1:
            sets = [as_set(p) for p in parts]
            return None if None in sets else join(*sets)
    return _atom_set(text)


def _atom_set(text: str):
    import sympy

    literals = {"R": sympy.Reals, "Z": sympy.Integers, "N": sympy.Naturals, "Q": sympy.Rationals, "C": sympy.Complexes}
    if match := re.fullmatch(r"\\mathbb\{([RZNQC])\}", text):
        return literals[match[1]]
    if text == r"\emptyset":
        return sympy.EmptySet
    pair = enclosed(text)
    if pair and pair[0] == r"\{":
        elements = [_number(p) for p in items(text)[0]]
        return None if None in elements else sympy.FiniteSet(*elements)
    if pair and (inside := brackets(text)) and len(inside[2]) == 2:
        return _interval(*inside[2], inside[0] == "(", inside[1] == ")")
    return as_set(pair[1]) if pair and pair[0] in ("(", "[") else None


def _number(text: str):
    """A text's value as an exact sympy number or constant, or None."""
    expr = parse(without_unit(text)[0])
    if expr is None or not hasattr(expr, "free_symbols") or not _is_scalar(expr) or _too_big(expr):
        return None
    return _evaluated(_exact(expr)[0])


def _interval(low: str, high: str, left_open: bool, right_open: bool):
    import sympy

    low, high = _number(low), _number(high)
    if low is None or high is None:
        return None
    if not (low.is_extended_real and high.is_extended_real):
        return None
    return sympy.Interval(low, high, left_open, right_open)


def _unknown(text: str) -> str | None:
    """The one letter that an inequality is solved for, or None."""
    sides = [s.strip() for s in _RELATION.split(text)]
    names = [s for s in sides if is_name(s) and "|" not in s]
    return literal(names[0]) if len(names) == 1 < len(sides) else None


def _from_inequality(text: str):
    r"""`x < 3`, `3 > x`, `1 < x \le 2` and `x \ne 2` as sets of reals."""
    import sympy

    sides, ops = [s.strip() for s in _RELATION.split(text)], _RELATION.findall(text)
    unknown = [i for i, side in enumerate(sides) if is_name(side) and "|" not in side]
    if len(unknown) != 1 or len(sides) > 3:
        return _solved(text)
    i, out = unknown[0], []
    bounds = [(ops[i], sides[i + 1])] if i + 1 < len(sides) else []
    bounds += [(_FLIP[ops[i - 1]], sides[i - 1])] if i else []
    if len(bounds) != len(ops):
        return None
    for op, side in bounds:
        bound = _number(side)
        if bound is None or not bound.is_extended_real:
            return None
        below = sympy.Interval(-sympy.oo, bound, True, op != r"\le")
        above = sympy.Interval(bound, sympy.oo, op != r"\ge", True)
        out.append(sympy.Union(below, above) if op == r"\ne" else below if op in ("<", r"\le") else above)
    return sympy.Intersection(*out)


def _solved(text: str):
    """The reals that satisfy an inequality not yet solved for its one unknown (`|x| < 1`, `2x < 6`), or None."""
    import sympy
    from sympy.solvers.inequalities import solve_univariate_inequality

    relation = parse(text)
    parts = [relation] if isinstance(relation, sympy.core.relational.Relational) else getattr(relation, "args", ())
    unknown = relation.free_symbols if hasattr(relation, "free_symbols") else ()
    if len(unknown) != 1 or not all(isinstance(part, sympy.core.relational.Relational) for part in parts):
        return None
    if any(_too_big(side) for part in parts for side in part.args):
        return None
    real = sympy.Symbol("x", real=True)
    exact = [
        part.func(*(_exact(side)[0].xreplace({next(iter(unknown)): real}).doit() for side in part.args))
        for part in parts
    ]
    try:
        return sympy.Intersection(*(solve_univariate_inequality(part, real, relational=False) for part in exact))
    except (NotImplementedError, TypeError, ValueError, AttributeError):  # what sympy says of what it cannot solve
        return None


def _same_set(left, right) -> bool:
    """Whether two sets of reals are equal: the same pieces with the same ends."""
    import sympy

    def pieces(s):
        return list(s.args) if isinstance(s, sympy.Union) else [s]

    if left == right:
        return True
    left, right = pieces(left), pieces(right)
    return len(left) == len(right) and all(map(_same_piece, left, right))


def _same_piece(left, right) -> bool:
    import sympy

    if isinstance(left, sympy.Interval) and isinstance(right, sympy.Interval):
        ends = (left.start, right.start), (left.end, right.end)
        return (left.left_open, left.right_open) == (right.left_open, right.right_open) and all(
            a == b or same_expr(a, b) for a, b in ends
        )
    if isinstance(left, sympy.FiniteSet) and isinstance(right, sympy.FiniteSet):
        return len(left) == len(right) and all(map(same_expr, left.args, right.args))
    return left == right


# ----------------------------------------------------------------------------------------------------------- values


@lru_cache(maxsize=4096)
def parse(text: str):
    """math-verify's parser on one cleaned expression, under our settings: a sympy object, or None."""
    from latex2sympy2_extended import latex2sympy

    text = re.sub(r"\\\$|\\text(?=\{)|\\%", "", text)
    if re.search(r"\d \d", text):
        return None
    text = re.sub(r"(?<=\d) ?(?=\(\d)", r" \\cdot ", text)  # the parser takes 2(3) for a mixed number
    text = re.sub(r"(\d+(?:\.\d+)?)\s*\^\{\\circ\}", r"(\\frac{\1\\pi}{180})", text)
    try:
        return latex2sympy(text, is_real=None, convert_degrees=False, normalization_config=None)
    except Exception:  # the parser raises whatever its generated code meets on text that is no mathematics
        return None


def same_value(a: str, g: str) -> bool:
    """Two expressions, equations or matrices, by value."""
    left, right = parse(a), parse(g)
    if left is None or right is None:
        return False
    return same_expr(left, right)


def _is_scalar(expr) -> bool:
    import sympy

    return isinstance(expr, sympy.Expr) and not getattr(expr, "is_Matrix", False)


def same_expr(left, right) -> bool:
    """Two parsed objects by value; kinds that are neither scalar, equation nor matrix are math-verify's to compare."""
    import sympy
    from math_verify import verify as math_verify

    if left == right:
        return True
    if _is_scalar(left) and _is_scalar(right):
        return _same_scalar(left, right)
    if getattr(left, "is_Matrix", False) and getattr(right, "is_Matrix", False):
        left, right = left.doit(), right.doit()
        same_shape = (
            isinstance(left, sympy.MatrixBase) and isinstance(right, sympy.MatrixBase) and left.shape == right.shape
        )
        return same_shape and all(map(same_expr, left.flat(), right.flat()))
    if isinstance(left, sympy.Eq) and isinstance(right, sympy.Eq) and all(map(_is_scalar, (*left.args, *right.args))):
        return _same_scalar(left.lhs - left.rhs, right.lhs - right.rhs, up_to_factor=True)
    if _is_scalar(left) != _is_scalar(right):
        return False
    return math_verify(right, left, timeout_seconds=None)


def _too_big(expr) -> bool:
    """Whether a number in `expr` has more digits than could be worked out (10^{10^{10}}, (10^9)!)."""
    try:
        return _digits(expr) > MAX_DIGITS
    except OverflowError:
        return True


def _digits(expr) -> float:
    """An upper estimate of log10 of `expr` and of everything in it; raises OverflowError where it is out of reach."""
    import sympy

    if expr.is_Rational:
        return max(abs(int(expr.p)).bit_length(), int(expr.q).bit_length()) * 0.3011
    if not expr.args:
        return 1.0
    sizes = [_digits(arg) for arg in expr.args]
    if isinstance(expr, sympy.Pow) and not expr.args[1].free_symbols:
        size = 10.0 ** min(sizes[1], 300)
        if sizes[1] < 9 and expr.args[1].is_Rational:
            size = abs(float(expr.args[1]))
        sizes.append(max(sizes[0], 0.31) * size)
    elif isinstance(expr, (sympy.exp, sympy.factorial, sympy.gamma, sympy.binomial, sympy.Sum, sympy.Product)):
        sizes.append(sizes[0] * 10.0 ** min(max(sizes), 300))
    elif isinstance(expr, (sympy.Add, sympy.Mul)):
        sizes.append(sum(sizes))
    if max(sizes) > 1e9:
        raise OverflowError
    return max(sizes)


def _exact(expr):
    """(expr with its decimals as fractions, whether it had decimals): 0.1 is exactly 1/10."""
    import sympy

    decimals = expr.atoms(sympy.Float)
    return expr.xreplace({f: sympy.Rational(str(f)) for f in decimals}), bool(decimals)


def _terminates(expr) -> bool:
    """Whether a number can be written out in decimals."""
    if not expr.is_Rational:
        return False
    q = int(expr.q)
    for prime in (2, 5):
        while q % prime == 0:
            q //= prime
    return q == 1


# Sample points: numerator and denominator for the first symbol, step to the next; fractions, integers, both signs.
_POINTS = [(7, 3, 1), (5, 1, 2), (-11, 7, 3), (2, 9, 1), (4, 1, 3)]


def _same_scalar(left, right, up_to_factor: bool = False) -> bool:
    """Equality of two expressions: of their values, or at every sample point (up to one constant factor on request).

    Exact expressions must agree to 50 digits. A decimal stands for what it rounds: it may differ by a relative 1e-6
    from a value that has no finite decimal form (0.333333 and 1/3), and not at all from one that has.
    """
    (left, decimal_left), (right, decimal_right) = _exact(left), _exact(right)
    if _too_big(left) or _too_big(right):
        return False  # same_expr has compared their form
    names = {s.name for s in left.free_symbols | right.free_symbols}
    rounded = decimal_left or decimal_right
    if not names - {"i"} and not up_to_factor:
        x, y = _value(left, {}), _value(right, {})
        return x is not None and y is not None and _close(x, y, rounded and not (_terminates(x) and _terminates(y)))
    agreed, factor = 0, None
    for at in _sample_points(sorted(names - {"i"})):
        x, y = _value(left, at), _value(right, at)
        if x is None or y is None or up_to_factor and (_is_zero(x) or _is_zero(y)):
            continue
        if up_to_factor:
            x = (x / y).evalf(60)
            y = factor = x if factor is None else factor
        if _close(x, y, rounded):
            agreed += 1
        elif "i" in names or (x.is_extended_real and y.is_extended_real):
            return False  # elsewhere both may be off the reals, where branches of roots and logarithms differ
    return agreed >= 3


def _sample_points(names: list[str]) -> list[dict]:
    from sympy import Rational

    return [
        {name: Rational(p, q) + step * k + Rational(k * int(q > 1), 13 + k) for k, name in enumerate(names)}
        for p, q, step in _POINTS
    ]


def _value(expr, at: dict):
    """The number that `expr` is with its symbols replaced by name (i is the imaginary unit), or None."""
    import sympy

    if expr.has(sympy.Derivative):
        expr = expr.doit()
    at = {**at, "i": sympy.I}
    expr = expr.xreplace({s: at[s.name] for s in expr.free_symbols if s.name in at})
    if expr in (sympy.oo, -sympy.oo):
        return expr
    exact = _evaluated(expr)
    if exact.has(sympy.Sum, sympy.Product, sympy.Limit, sympy.Derivative):
        exact = exact.doit()
    if exact.is_Rational:
        return exact
    value = exact.evalf(60)
    if not value.is_number or value.has(sympy.nan, sympy.zoo) or value.free_symbols:
        return None
    return value if all(part.is_Number for part in value.as_real_imag()) else None


def _evaluated(expr):
    """The parser's unevaluated tree, evaluated from the leaves up: `doit` can take exponential time."""
    if not expr.args:
        return expr
    args = [_evaluated(arg) for arg in expr.args]
    return args[0] if type(expr).__name__ == "UnevaluatedExpr" else expr.func(*args)


def _is_zero(value) -> bool:
    """Zero, or a cancellation of which no digit is certain (sympy then marks its precision as 1)."""
    return all(part == 0 or getattr(part, "_prec", 2) == 1 for part in value.as_real_imag())


def _close(x, y, rounded: bool) -> bool:
    import sympy

    if x == y:
        return True
    if x.is_Rational and y.is_Rational and not rounded:
        return False
    if not (x.is_finite and y.is_finite):
        return False
    if _is_zero(x) or _is_zero(y):
        return _is_zero(x) and _is_zero(y)
    tolerance = sympy.Rational(101, 10**8) if rounded else sympy.Rational(1, 10**50)
    if rounded:
        x, y = x.evalf(60), y.evalf(60)
    difference = (x - y).evalf(60)
    return _is_zero(difference) or bool(abs(difference) <= tolerance * abs(y))


# ----------------------------------------------------------------------------------------------------------- worker


def _grade_loop() -> None:
    """Answer requests until the input ends or an answer kills this process: its alarm, its memory, its stack."""
    while line := _read_line():
        answer, gold, deadline = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, deadline)  # default action: the kernel ends this process
        try:
            if usable(gold):
                os.write(1, b"g")
                verdict = b"1" if verify(answer, gold) else b"0"
            else:
                verdict = b"n"
        except MemoryError:
            os._exit(1)
        except Exception:  # whatever sympy raises on an answer like this one: it is not the gold
            verdict = b"0"
        signal.setitimer(signal.ITIMER_REAL, 0)
        os.write(1, verdict)


def _read_line() -> bytes:
    """One request from standard input, unbuffered: what follows it belongs to the next process."""
    line = b""
    while not line.endswith(b"\n"):
        chunk = os.read(0, 65536)
        if not chunk:
            return b""
        line += chunk
    return line


def main(memory_bytes: int) -> None:
    """Import sympy once, then keep one forked grader alive: `t` goes out in its place when an answer kills it."""
    import resource

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of the missing timeout that we keep ourselves
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    for answer, gold in ((r"\frac{x+1}{2}", r"\frac{1}{2}(x+1)"), ("(1,2]", r"1<x\le 2"), ("x+y<1", "y+x<1")):
        assert verify(answer, gold)  # also imports and caches, so that every fork starts warm
    os.write(1, b"r")
    while True:
        pid = os.fork()
        if pid == 0:
            try:
                _grade_loop()
                os._exit(0)
            finally:
                os._exit(1)
        _, status = os.waitpid(pid, 0)
        if status == 0:
            return
        os.write(1, b"t")


if __name__ == "__main__":
    main(int(sys.argv[1]))
