"""Sentences end where readers say so, and together they are the text."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_megatron.data import split_sentences


@pytest.mark.parametrize(
    "sentences",
    [
        ["Dr. Smith met J. R. Tolkien.", ' He said "Hi!"', " Then he left. and so on... ok?", " Yes!"],
        ["This is e.g. Latin of the U.S. Army, etc. by v1.5.", " (See fig. 3.)", " Now."],
        ["No. 5 is alive.", " I said no.", " It is p. 7 of vol. 2.", " Done"],
        ["これは文です。", "「はい。」", "と言った！", "次？"],
        ["Wait...", " What?!", " „Nein.“", " 'Yes.'", " ¿Qué?", " ¡Sí!"],
        ["def f(x):\n", "    return x. y\n\n\n    \n", "done"],
        ["\n\n  a. \n", " b\r\n", "c\u2028", "d"],
        ["A line  \n", "and another"],
        ["   "],
        [],
    ],
)
def test_sentences_end_where_a_reader_ends_them(sentences: list[str]) -> None:
    assert split_sentences("".join(sentences)) == sentences


@given(st.text(alphabet="ab A1.!?。\n\t \"')(\u2028é", max_size=60))
def test_sentences_together_are_the_text_and_none_is_blank(text: str) -> None:
    sentences = split_sentences(text)
    assert "".join(sentences) == text
    assert not any(sentence.isspace() or not sentence for sentence in sentences) or sentences == [text]


def test_a_longer_text_takes_longer_in_proportion() -> None:
    def seconds(unit: str, count: int) -> float:
        started = time.process_time()
        split_sentences(unit * count)
        return time.process_time() - started

    # Each was or could be quadratic: a hundred times the text would take ten thousand times as long.
    for unit in (".", ". ", "\n ", ".   ", '."', "。", "A. "):
        assert seconds(unit, 200_000) < 5.0, unit
