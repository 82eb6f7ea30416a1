"""Huge texts cut into parts whose tokens together are the text's own, to bound a tokenizer's memory.

Under `tokenizer.py`. A tokenizer takes some hundred times a text's size in memory. Byte-pair encoding merges within the
words that a pattern finds from left to right. In each of the patterns below no word goes on from a letter or a digit to
a space, a line break or a mark of punctuation, and what stands before a word does not change how it is found: so before
these the text can be cut. None of them is composed with what stands before it (NFC). So texts of Chinese or Thai, which
have no spaces between words, are cut at the ends of clauses. Tokenizers that do anything else get the text uncut, and
so is a stretch without such a position, as a million letters in a row: a part is then as long as that.
"""

import re
from collections.abc import Iterator
from typing import Any

PART_CHARACTERS = 1 << 20
"""Characters of a part, about."""

_GPT_4 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PATTERNS = (_GPT_4 % r"\p{N}{1,3}", _GPT_4 % r"\p{N}")
"""Split patterns of Llama 3 and Qwen 2, as GPT-4's; that of GPT-2 is ByteLevel's own."""

_LETTERS = "A-Za-zÀ-ÖØ-öø-ÿΑ-ΡΣ-Ωα-ωА-яЁёא-תء-غف-يअ-हก-ฮぁ-ゖァ-ヺ一-龥가-힣"
"""Ranges of letters that were letters in every version of Unicode since its third: Latin, Greek, Cyrillic, Hebrew,
Arabic, Devanagari, Thai, Japanese, Chinese, Korean."""

_MARKS = ",.;:!?)،؛؟।。，、；：！？）」』》"  # noqa: RUF001
"""Punctuation marks, without the apostrophe, after which a word may go on."""

_BOUNDARY = re.compile(f"(?<=[0-9{_LETTERS}])[ \n{_MARKS}]")


def is_cuttable(settings: dict[str, Any]) -> bool:
    """Whether the parts of a text together have the tokens of the text under a tokenizer.json."""
    first, *others = _steps(settings["pre_tokenizer"], "pretokenizers")
    *before, last = [first, *others]
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space", True):
        return False
    finds_words = (
        not before
        if last.get("use_regex", True)
        else len(before) == 1
        and before[0].get("type") == "Split"
        and before[0].get("pattern", {}).get("Regex") in _PATTERNS
        and (before[0].get("behavior"), before[0].get("invert")) == ("Isolated", False)
    )
    return (
        finds_words
        and all(step.get("type") in (None, "NFC") for step in _steps(settings["normalizer"], "normalizers"))
        and settings["model"].get("type") == "BPE"
        and not settings["model"].get("dropout")
        # A text is searched for other added tokens before it is split into words.
        and all(token["special"] for token in settings["added_tokens"])
    )


def parts_of(text: str, characters: int = PART_CHARACTERS) -> Iterator[str]:
    """The text, cut where `is_cuttable` allows it, each part but the last of that many characters or somewhat more."""
    start = 0
    while found := _BOUNDARY.search(text, start + characters):
        yield text[start : found.start()]
        start = found.start()
    yield text[start:]


def _steps(step: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    if step is None:
        return [{}]
    return list(step[name]) or [{}] if step.get("type") == "Sequence" else [step]
