"""Splitting of text into sentences, by punctuation.

Between sources and tokenizer. No language needs to be set: a sentence ends at a line break, after 。！？ and the like,
and after a full stop, ! or ? with a space and no small letter after it. A full stop does not end one after an
initial ("J. Smith"), letters with stops ("e.g.") and common abbreviations. So code is split into its lines.
"""

import re

_LINE_BREAKS = r"\r\n\f\v\x85\u2028\u2029"
_SPACES = r" \t\u00a0\u3000"
_OPENING = r"\"'“‘«„(\[{¿¡"
_CLOSING = r"\"'”“’»«)\]}"

# Quantifiers are possessive and a run of marks is met at its start alone: a text of a million stops takes no longer.
_ENDS = re.compile(
    # Blank lines belong to the line before them.
    rf"[{_LINE_BREAKS}](?:[{_SPACES}]*+[{_LINE_BREAKS}])*+"
    rf"|[。！？｡]++[」』）{_CLOSING}]*+"
    rf"|(?<![.!?…])(?P<stop>[.!?…]++)[{_CLOSING}]*+(?=[{_SPACES}]++[{_OPENING}]*+(?P<next>[^\s{_OPENING}]))"
)

_BEFORE = re.compile(r"(?:[^\W\d_]\.)*[^\W\d_]*\Z")
"""The letters in front of a full stop, with the stops between them."""

_LONGEST = 12
"""Most characters of an abbreviation."""

# fmt: off
_ABBREVIATIONS = frozenset((
    "mr", "mrs", "ms", "dr", "prof", "rev", "hon", "st", "sr", "jr", "gen", "col", "capt", "lt", "sgt", "gov", "messrs",
    "mme", "mlle", "herr", "hr", "fr", "sra", "srta", "vs", "cf", "al", "approx", "dept", "inc", "ltd", "corp", "bros",
    "ca", "bzw", "usw", "ggf", "vgl",
))

_BEFORE_NUMBERS = frozenset((
    "no", "nos", "nr", "nrs", "p", "pp", "fig", "figs", "eq", "eqs", "sec", "secs", "ch", "chap", "vol", "vols", "art",
    "bd", "abs", "tel", "str", "jan", "feb", "mar", "apr", "jun", "jul", "aug", "sep", "sept", "oct", "nov", "dec",
))
# fmt: on
"""Abbreviations where a number follows, and words of their own elsewhere."""


def split_sentences(text: str) -> list[str]:
    """The sentences of a text, which together are the text: spaces between two begin the second, line breaks end the
    first, and a sentence has something else than white space, unless nothing has."""
    sentences, start = [], 0
    for end in _ENDS.finditer(text):
        if end["stop"] and not _is_end(text, end):
            continue
        sentence = text[start : end.end()]
        if not sentence.isspace():
            sentences.append(sentence)
            start = end.end()
    rest = text[start:]
    if rest.isspace() and sentences:
        sentences[-1] += rest
    elif rest:
        sentences.append(rest)
    return sentences


def _is_end(text: str, end: re.Match[str]) -> bool:
    if end["next"].islower():
        return False
    if end["stop"] != ".":
        return True
    before = _BEFORE.search(text[max(0, end.start() - _LONGEST) : end.start()])
    assert before is not None, "it may be empty"
    word = before[0]
    is_initial = len(word) == 1 and word.isupper()
    short = _ABBREVIATIONS | _BEFORE_NUMBERS if end["next"].isdigit() else _ABBREVIATIONS
    return not (is_initial or "." in word or word.lower() in short)
