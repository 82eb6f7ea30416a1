"""Rows of a table as tokens, of which the assistant's are marked: the labels of fine-tuning.

    columns                text                                      marked
    messages (role,        the output of the tokenizer's chat        what it adds for each message of the assistant,
    content)               template                                  after the words that open an answer
    prompt, completion     one after the other, and the end of text  the completion and the end
    text                   itself and the end of text                all of it

A text is tokenized whole, as it is when the model is used. A token is marked where all of its characters are. Special
tokens that are spelled out in a row count as such.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lightning_megatron.data.chat_template import ChatTemplate, Message
from lightning_megatron.data.tokenizer import Tokenizer

RowKind = Literal["messages", "completion", "text"]
_COLUMNS: dict[RowKind, tuple[str, ...]] = {
    "messages": ("messages",),
    "completion": ("prompt", "completion"),
    "text": ("text",),
}
TextSpan = tuple[int, int]
ChatRow = Mapping[str, Any]


@dataclass(frozen=True)
class MarkedTokens:
    """Token ids, and for each whether it has a label."""

    ids: list[int]
    is_marked: list[bool]


def kind_of_rows(columns: Sequence[str]) -> RowKind:
    """The kind of a table's rows by its columns: the first that fits of messages, completion and text.

    Raises ValueError where none does.
    """
    for kind, needed in _COLUMNS.items():
        if set(needed) <= set(columns):
            return kind
    raise ValueError(
        f"the rows have the columns {', '.join(map(repr, columns))}; fine-tuning needs 'messages' (a list of role and "
        "content), or 'prompt' and 'completion', or 'text'; rename the columns of the file"
    )


def row_encoder(
    kind: RowKind, tokenizer: Tokenizer, template: ChatTemplate | None
) -> Callable[[Sequence[ChatRow]], list[MarkedTokens]]:
    """The function that turns rows of a kind into marked tokens; it raises ValueError for a row that is not of it."""
    if kind == "messages":
        _required(template)

    def encode(rows: Sequence[ChatRow]) -> list[MarkedTokens]:
        if kind == "messages":
            return marked_tokens([chat_spans(_messages(row), _required(template)) for row in rows], tokenizer)
        if kind == "completion":
            pairs = [(_text(row, "prompt"), _text(row, "completion")) for row in rows]
            texts = [(prompt + answer, [(len(prompt), len(prompt) + len(answer))]) for prompt, answer in pairs]
        else:
            texts = [(text, [(0, len(text))]) for text in (_text(row, "text") for row in rows)]
        return [_between(tokenizer, marked) for marked in marked_tokens(texts, tokenizer)]

    return encode


@dataclass(frozen=True)
class Question:
    """A prompt and its answer."""

    prompt: str
    answer: str


def questions_of(kind: RowKind, row: ChatRow, template: ChatTemplate | None) -> list[Question]:
    """The answers of a row, each with all that comes before it. Raises ValueError for a row that is not of that kind.

    Of messages the prompt ends with the words that open an answer, and the answer with what ends it.
    """
    if kind == "completion":
        return [Question(_text(row, "prompt"), _text(row, "completion"))]
    if kind == "text":
        raise ValueError("a text alone asks nothing; give rows of 'prompt' and 'completion', or of 'messages'")
    text, spans = chat_spans(_messages(row), _required(template))
    return [Question(text[:start], text[start:end]) for start, end in spans]


def chat_spans(messages: Sequence[Message], template: ChatTemplate) -> tuple[str, list[TextSpan]]:
    """The text of a conversation, and the spans of the assistant's answers, ends included.

    Raises ValueError for a template that writes an earlier turn in a way in which the answer to it is not found.
    """
    text = template.render(messages)
    spans = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = template.render(messages[:index], opens_answer=True)
        through = template.render(messages[: index + 1])
        start, end = len(before), _end_of_answer(text, len(before), through, str(message.get("content") or "").strip())
        if not text.startswith(before) or end < start:
            raise ValueError(
                "the chat template writes the words before an answer of the assistant in another way once more "
                "messages follow, so its answers cannot be told from the rest; end each conversation with its only "
                "answer, or give rows of 'prompt' and 'completion'"
            )
        spans.append((start, end))
    return text, spans


def _end_of_answer(text: str, start: int, through: str, content: str) -> int:
    """The end of an answer in the text of the conversation; -1 where it is unknown."""
    if text.startswith(through):
        return len(through)
    if not content:
        return -1
    # Some templates write an answer longer while it is the last (with the thoughts that led to it); its own words and
    # what ends them are the same.
    closing = content + through.rpartition(content)[2]
    index = text.find(closing, start)
    return -1 if index < 0 else index + len(closing)


def _required(template: ChatTemplate | None, column: str = "messages") -> ChatTemplate:
    if template is None:
        raise ValueError(
            f"the rows have {column!r}, and the tokenizer has no chat template: its directory holds neither "
            "chat_template.jinja nor a chat_template in tokenizer_config.json; use the tokenizer of an instruct model, "
            "or rows of 'prompt' and 'completion'"
        )
    return template


def messages_of(row: ChatRow, column: str, template: ChatTemplate | None) -> tuple[list[Message], ChatTemplate]:
    """The conversation in a column of a row, and the template that writes it. Raises ValueError without either."""
    return _messages(row, column), _required(template, column)


def _messages(row: ChatRow, column: str = "messages") -> list[Message]:
    messages: list[Message] = row[column]
    is_sound = isinstance(messages, list) and all(
        isinstance(m, Mapping) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str | None)
        for m in messages
    )
    if not is_sound or not messages:
        raise ValueError(f"{column!r} must be a list of {{'role': text, 'content': text}}, and a row has {messages!r}")
    return messages


def _text(row: ChatRow, column: str) -> str:
    value = row[column]
    if not isinstance(value, str):
        raise ValueError(f"{column!r} must be text, and a row has {value!r}; put conversations under 'messages'")
    return value


def marked_tokens(texts: Sequence[tuple[str, list[TextSpan]]], tokenizer: Tokenizer) -> list[MarkedTokens]:
    """The tokens of each text, of which those within its spans are marked."""
    encoded = tokenizer.encode_spelled([text for text, _ in texts])
    return [
        MarkedTokens(ids, [any(start <= first and last <= end for start, end in spans) for first, last in offsets])
        for (ids, offsets), (_, spans) in zip(encoded, texts, strict=True)
    ]


def _between(tokenizer: Tokenizer, marked: MarkedTokens) -> MarkedTokens:
    """The tokens between the one that begins a text, where the tokenizer has one, and the marked end of text."""
    opening = tokenizer.opening if marked.ids[:1] != tokenizer.opening else []
    closing = [tokenizer.end_of_text] if marked.ids[-1:] != [tokenizer.end_of_text] else []
    return MarkedTokens(
        [*opening, *marked.ids, *closing], [*(False for _ in opening), *marked.is_marked, *(True for _ in closing)]
    )
