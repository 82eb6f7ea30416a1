"""What is marked to be learnt is what the assistant says, token by token, in several templates."""

from pathlib import Path
from typing import Any

import pytest

from lightning_megatron.data import ChatTemplate, Tokenizer, load_chat_template, load_tokenizer
from lightning_megatron.data.chat import chat_spans, kind_of_rows, row_encoder
from tests.data.chats import TEMPLATES, TURNS, write_tokenizer


def loaded(folder: Path, name: str | None) -> tuple[Tokenizer, ChatTemplate | None]:
    write_tokenizer(folder, TEMPLATES[name] if name else None)
    return load_tokenizer(folder), load_chat_template(folder)


def runs(ids: list[int], is_marked: list[bool], tokenizer: Tokenizer) -> list[tuple[bool, str]]:
    """The text of each run of tokens that are marked alike."""
    found: list[tuple[bool, list[int]]] = []
    for i, mark in zip(ids, is_marked, strict=True):
        if not found or found[-1][0] != mark:
            found.append((mark, []))
        found[-1][1].append(i)
    return [(mark, tokenizer.decode(part)) for mark, part in found]


EXPECTED = {
    "headers": [
        (False, "<|begin|>user\n\nWhat is  two and two?<|end|>\n<|begin|>assistant\n\n"),
        (True, "Four, é 🙂.<|end|>\n"),
        (False, "<|begin|>user\n\nFour, é?<|end|>\n<|begin|>assistant\n\n"),
        (True, "Yes.<|end|>\n"),
    ],
    "inst": [
        (False, "<s>[INST] What is  two and two? [/INST]"),
        (True, "  Four, é 🙂.<|endoftext|>"),
        (False, "[INST] Four, é? [/INST]"),
        (True, " Yes.<|endoftext|>"),
    ],
    "thoughts": [
        (False, "<|begin|>user\nWhat is  two and two?<|end|>\n<|begin|>assistant\n"),
        (True, " Four, é 🙂.<|end|>\n"),
        (False, "<|begin|>user\nFour, é?<|end|>\n<|begin|>assistant\n"),
        (True, "<think>\n\n</think>\n\nYes.<|end|>\n"),
    ],
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_answers_of_every_turn_are_marked_and_nothing_else(tmp_path: Path, name: str) -> None:
    tokenizer, template = loaded(tmp_path, name)
    [marked] = row_encoder("messages", tokenizer, template)([{"messages": TURNS}])
    assert runs(marked.ids, marked.is_marked, tokenizer) == EXPECTED[name]


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_tokens_are_those_that_transformers_makes(tmp_path: Path, name: str) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer, template = loaded(tmp_path, name)
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    for turns in (TURNS, TURNS[:1], TURNS[:2]):
        [marked] = row_encoder("messages", tokenizer, template)([{"messages": turns}])
        assert marked.ids == theirs.apply_chat_template(turns, tokenize=True, return_dict=False)
    assert template is not None
    asked = template.render(TURNS[:1], opens_answer=True)
    assert asked == theirs.apply_chat_template(TURNS[:1], tokenize=False, add_generation_prompt=True)


def test_a_mark_of_generation_in_the_template_says_the_same(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer, template = loaded(tmp_path, "thoughts")
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    # Theirs loses the token of a space in front.
    turns = [{**turn, "content": turn["content"].strip()} for turn in TURNS]
    shown = theirs.apply_chat_template(turns, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    [marked] = row_encoder("messages", tokenizer, template)([{"messages": turns}])
    assert 0 < sum(shown["assistant_masks"]) < len(marked.ids)
    assert [int(mark) for mark in marked.is_marked] == shown["assistant_masks"]


def test_of_prompt_and_completion_the_completion_and_the_end_are_marked(tmp_path: Path) -> None:
    tokenizer, _ = loaded(tmp_path, None)
    rows = [{"prompt": "two and two? ", "completion": " Four"}, {"prompt": "<s>é", "completion": "é<|endoftext|>"}]
    first, second = row_encoder("completion", tokenizer, None)(rows)
    # The space that the prompt ends with belongs to it, whichever token it is in.
    assert runs(first.ids, first.is_marked, tokenizer) == [(False, "<s>two and two? "), (True, " Four<|endoftext|>")]
    # Neither the beginning nor the end comes twice.
    assert runs(second.ids, second.is_marked, tokenizer) == [(False, "<s>é"), (True, "é<|endoftext|>")]


def test_a_token_that_the_prompt_began_is_not_to_be_learnt(tmp_path: Path) -> None:
    tokenizer, _ = loaded(tmp_path, None)
    [what] = tokenizer.encode(["What"])
    assert len(what) == 1, "one token stands on both sides"
    [marked] = row_encoder("completion", tokenizer, None)([{"prompt": "Wh", "completion": "at, é"}])
    assert runs(marked.ids, marked.is_marked, tokenizer) == [(False, "<s>What"), (True, ", é<|endoftext|>")]


def test_plain_text_is_marked_whole(tmp_path: Path) -> None:
    tokenizer, _ = loaded(tmp_path, None)
    [marked] = row_encoder("text", tokenizer, None)([{"text": "Four, é"}])
    assert runs(marked.ids, marked.is_marked, tokenizer) == [(False, "<s>"), (True, "Four, é<|endoftext|>")]


def test_a_conversation_without_an_answer_has_nothing_marked(tmp_path: Path) -> None:
    tokenizer, template = loaded(tmp_path, "headers")
    [marked] = row_encoder("messages", tokenizer, template)([{"messages": TURNS[:1]}])
    assert not any(marked.is_marked)


def test_an_answer_without_words_has_its_end_marked(tmp_path: Path) -> None:
    _, template = loaded(tmp_path, "headers")
    assert template is not None
    text, [(start, end)] = chat_spans([TURNS[0], {"role": "assistant", "content": ""}], template)
    assert text[start:end] == "<|end|>\n"


def test_a_template_that_rewrites_what_was_said_is_refused() -> None:
    rewriting = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(ValueError, match="answers cannot be told from the rest"):
        chat_spans(TURNS, ChatTemplate(rewriting, {}))


def test_a_template_refuses_in_its_own_words(tmp_path: Path) -> None:
    _, template = loaded(tmp_path, "inst")
    assert template is not None
    with pytest.raises(ValueError, match=r"\(system\): only user and assistant roles are supported"):
        template.render([{"role": "system", "content": "Be brief."}])


def test_a_template_cannot_reach_outside_of_its_sandbox() -> None:
    with pytest.raises(ValueError, match="refuses"):
        ChatTemplate("{{ messages.__class__.__mro__ }}", {}).render([{"role": "user", "content": ""}])


@pytest.mark.parametrize("where", ["config", "file", "list"])
def test_a_template_is_found_wherever_tokenizers_keep_it(tmp_path: Path, where: str) -> None:
    source = "{{ eos_token }}{{ messages[0].content }}"
    config: dict[str, Any] = {}
    if where == "list":
        config["chat_template"] = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": source}]
    write_tokenizer(tmp_path, source if where == "config" else None, **config)
    if where == "file":
        (tmp_path / "chat_template.jinja").write_text(source)
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        template = load_chat_template(path)
        assert template is not None
        assert template.render([{"role": "user", "content": "x", "tool_calls": None}]) == "<|endoftext|>x"


def test_a_template_of_many_lines_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    source = """{%- for m in messages %}
    {%- if m.tool_calls is defined %}
        called
    {% endif %}
    {% if loop.last %}
        {% break %}
    {% endif %}
{{ m | tojson }}
{% endfor %}
{{ bos_token }}"""
    write_tokenizer(tmp_path, source)
    template = load_chat_template(tmp_path)
    turns = [{"role": "user", "content": "<é>"}, {"role": "user", "content": "x"}]
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path)).apply_chat_template(turns, tokenize=False)
    assert template is not None
    # A table gives a missing entry of a message as none.
    assert template.render([{**turn, "tool_calls": None} for turn in turns]) == theirs
    assert '"<é>"' in theirs and "called" not in theirs


def test_a_template_that_is_none_is_reported() -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        ChatTemplate("{% for %}", {})


def test_columns_say_what_rows_are() -> None:
    assert kind_of_rows(["id", "messages", "prompt"]) == "messages"
    assert kind_of_rows(["completion", "prompt", "text"]) == "completion"
    assert kind_of_rows(["text"]) == "text"
    with pytest.raises(ValueError, match=r"'question', 'answer'; fine-tuning needs 'messages'"):
        kind_of_rows(["question", "answer"])


def test_rows_that_are_not_what_their_columns_say_are_reported(tmp_path: Path) -> None:
    tokenizer, template = loaded(tmp_path, "headers")
    with pytest.raises(ValueError, match="no chat template"):
        row_encoder("messages", tokenizer, None)
    for messages in ([], "Hello", [{"content": "x"}], [{"role": "user", "content": ["x"]}]):
        with pytest.raises(ValueError, match="'messages' must be a list"):
            row_encoder("messages", tokenizer, template)([{"messages": messages}])
    with pytest.raises(ValueError, match="'prompt' must be text"):
        row_encoder("completion", tokenizer, None)([{"prompt": [TURNS[0]], "completion": "x"}])


# Each ends in an error of Python's, or would end in none for hours, or would take all memory.
BAD_TEMPLATES = {
    "{{ 1 / 0 }}": "ZeroDivisionError",
    "{{ 'a' + 1 }}": "TypeError",
    "{{ 2.0 ** 100000 }}": "OverflowError",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "RecursionError",
    "{% include 'x' %}": "no loader",
    "{% for i in [1] %}" * 30 + "{% endfor %}" * 30: "cannot be read",
    "{{ " + "(" * 5000 + " }}": "cannot be read",
    "x" * 200_000: "may have 131,072",
    "{{ 'a' * 10 ** 10 }}": "more work",
    "{{ [1] * 10 ** 10 }}": "more work",
    "{{ 9 ** (10 ** 8) }}": "more work",
    "{{ 'a' | center(10 ** 10) }}": "more work",
    "{{ 'a'.ljust(10 ** 10) }}": "more work",
    "{{ '%10000000000d' % 1 }}": "more work",
    "{{ '{:>{}}'.format(1, 10 ** 10) }}": "more work",
    "{{ ('a' * 10 ** 6) | replace('a', 'b' * 10 ** 6) }}": "more work",
    "{{ ('b,' * 10 ** 5).split(',') | join('a' * 10 ** 6) }}": "more work",
    "{{ range(99999) | map('center', 99999) | join }}": "more work",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}": "more work",
    "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}": "more work",
    "{% set n = namespace(x=1) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}": "more work",
}


@pytest.mark.parametrize("source", BAD_TEMPLATES, ids=lambda source: source[:40])
def test_a_template_that_fails_or_never_ends_is_one_error(source: str) -> None:
    with pytest.raises(ValueError, match=BAD_TEMPLATES[source]):
        ChatTemplate(source, {}).render([{"role": "user", "content": "a"}])


def test_a_long_conversation_is_within_the_budget() -> None:
    source = "{% for m in messages %}{{ m.role ~ (messages | length) }}{{ m.content.split('x') | join }}{% endfor %}"
    text = ChatTemplate(source, {}).render([{"role": "user", "content": "axb" * 1000}] * 500)
    assert text == ("user500" + "ab" * 1000) * 500
