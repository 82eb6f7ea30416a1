"""Conversations with images: rows of a table as text in which `<image>` stands for each image, and that as tokens.

    columns                                            a turn                            its images
    conversations (from, value), image or images       text with `<image>` in it         the column's, in order
    messages (role, content), image or images          the same                          the same
    messages (role, content), content a list           parts of type "text" and "image"  the parts' `image`, `path` or
                                                                                         `url`, else the column's

An image is the name of a file, or {"bytes", "path"}, which is what `datasets` makes of one that lies in a table:
without bytes its path is that of a file. Tokens are marked as in `data.chat`; an image's are not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lightning_megatron.data.chat import ChatRow, MarkedTokens, chat_spans, marked_tokens
from lightning_megatron.data.chat_template import ChatTemplate, Message, load_chat_template
from lightning_megatron.data.images import TableImage
from lightning_megatron.data.tokenizer import Tokenizer

IMAGE = "<image>"
"""Placeholder of an image in a text, and spelling of the image token in a vocabulary."""

TemplateName = Literal["vicuna", "plain", "tokenizer"]
"""Template of a conversation: as LLaVA 1.5 was tuned (Vicuna's way), as its projector was trained before (the images
and then the answer, without the question), or by the tokenizer's own chat template."""

_ROLES = {"human": "user", "gpt": "assistant", "user": "user", "assistant": "assistant", "system": "system"}
_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, "
    "and polite answers to the user's questions."
)
_VICUNA = (
    "{% if messages[0]['role'] != 'system' %}{{ default_system + ' ' }}{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] + ' ' }}"
    "{% elif message['role'] == 'user' %}{{ 'USER: ' + message['content'] + ' ' }}"
    "{% else %}{{ 'ASSISTANT: ' + message['content'] + eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
_PLAIN = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '<image>' * message['content'].count('<image>') }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + '\\n' }}{% endif %}"
    "{% endfor %}"
)
_NAMES = ("image", "path", "url")


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Turns whose text has an `<image>` for each image, and the images, in order: names of files, or their content."""

    messages: list[Message]
    images: list[str | TableImage]


class PartsTemplate(ChatTemplate):
    """A template that takes a turn's text and images as a list of parts, as those of vision models often do."""

    def render(self, messages: Sequence[Message], *, opens_answer: bool = False) -> str:
        in_parts = [{**message, "content": _parts(message["content"])} for message in messages]
        return super().render(in_parts, opens_answer=opens_answer)


def _parts(text: str) -> list[dict[str, str]]:
    pieces = text.split(IMAGE)
    parts: list[dict[str, str]] = []
    for index, piece in enumerate(pieces):
        if index > 0:
            parts.append({"type": "image"})
        # The template writes the line breaks between an image and text.
        words = piece.strip("\n") if len(pieces) > 1 else piece
        if words:
            parts.append({"type": "text", "text": words})
    return parts


def built_in_template(name: TemplateName, end_of_text: str) -> ChatTemplate:
    """The built-in template of that name."""
    return ChatTemplate(_VICUNA if name == "vicuna" else _PLAIN, {"eos_token": end_of_text, "default_system": _SYSTEM})


def image_template(name: TemplateName, tokenizer: Tokenizer, folder: str | Path) -> ChatTemplate:
    """The template of that name; "tokenizer" is that of the tokenizer's directory. Raises ValueError without one."""
    if name != "tokenizer":
        return built_in_template(name, tokenizer.pieces()[tokenizer.end_of_text])
    template = load_chat_template(folder)
    if template is None:
        raise ValueError(
            f"template is 'tokenizer', and the directory of the tokenizer ({str(folder)!r}) has no chat template; take "
            "'vicuna' or 'plain'"
        )
    probe = "what is in it"
    if probe in template.render([{"role": "user", "content": probe}]):
        return template
    return load_chat_template(folder, PartsTemplate) or template


def conversation_of(row: ChatRow) -> Conversation:
    """The conversation of a row. Raises ValueError for an empty row, or without an `<image>` for each image."""
    turns = row.get("conversations") or row.get("messages")
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, Mapping) for turn in turns):
        raise ValueError(
            "a row needs 'conversations' (a list of {'from': 'human' or 'gpt', 'value': text}) or 'messages' (a list "
            f"of {{'role': text, 'content': text or parts}}), and this one has columns {', '.join(map(repr, row))}"
        )
    inner: list[Any] = []
    messages = [_message(turn, inner) for turn in turns]
    images = [_image(one, index) for index, one in enumerate(inner or _column(row))]
    found = sum(str(message["content"]).count(IMAGE) for message in messages)
    if found != len(images):
        raise ValueError(
            f"its text has {found} {IMAGE}, and its images are {len(images)} ({', '.join(map(str, images))})"
        )
    return Conversation(messages=messages, images=images)


def _message(turn: Mapping[str, Any], images: list[Any]) -> Message:
    """A turn with text; names of images in its parts are added to `images`."""
    role = turn.get("from") or turn.get("role")
    content = turn["value"] if turn.get("value") is not None else turn.get("content")
    if role not in _ROLES:
        raise ValueError(f"a turn is of {role!r}; it must be of one of {', '.join(map(repr, _ROLES))}")
    if isinstance(content, list):
        content = "".join(_text(part, images) for part in content)
    if not isinstance(content, str):
        raise ValueError(f"a turn of {role!r} has {content!r}, and must have text")
    return {"role": _ROLES[role], "content": content}


def _text(part: Any, images: list[Any]) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text":
        return str(part["text"])
    if kind != "image":
        raise ValueError(f"a part of a turn is {part!r}; it must be of type 'text' or 'image'")
    images += [part[name] for name in _NAMES if part.get(name)][:1]
    return f"{IMAGE}\n"


def _column(row: ChatRow) -> list[Any]:
    images = row.get("images") or row.get("image") or []
    return images if isinstance(images, list) else [images]


def _image(given: Any, index: int) -> str | TableImage:
    if isinstance(given, str):
        return given
    if isinstance(given, Mapping) and isinstance(content := given.get("bytes"), bytes):
        return TableImage(content, f"image {index}" + (f" ({given['path']})" if given.get("path") else ""))
    if isinstance(given, Mapping) and isinstance(path := given.get("path"), str):
        return path
    raise ValueError(
        f"its image {index} is {str(given)[:100]}; it must be the name of a file, or {{'bytes', 'path'}} of one"
    )


def encode_conversations(
    conversations: Sequence[Conversation], tokenizer: Tokenizer, template: ChatTemplate, features_per_image: int
) -> list[MarkedTokens]:
    """The tokens of each conversation, with image tokens for each image; the assistant's are marked.

    The tokenizer must have the token `<image>`.
    """
    written = [chat_spans(conversation.messages, template) for conversation in conversations]
    marked = marked_tokens(written, tokenizer)
    return [_expanded(one.ids, one.is_marked, tokenizer, features_per_image) for one in marked]


def encode_prompt(
    conversation: Conversation, tokenizer: Tokenizer, template: ChatTemplate, features_per_image: int
) -> list[int]:
    """The tokens of a question, up to where the answer begins."""
    [(ids, _)] = tokenizer.encode_spelled([template.render(conversation.messages, opens_answer=True)])
    return _expanded(ids, [False] * len(ids), tokenizer, features_per_image).ids


def _expanded(ids: Sequence[int], marks: Sequence[bool], tokenizer: Tokenizer, features_per_image: int) -> MarkedTokens:
    """The tokens with one image token for each feature of an image, after the token that begins a text, if any."""
    image, opening = tokenizer.token_id(IMAGE), tokenizer.opening
    begins = list(ids[: len(opening)]) == opening
    every, marked = ([], []) if begins else (list(opening), [False] * len(opening))
    for one, is_marked in zip(ids, marks, strict=True):
        times = features_per_image if one == image else 1
        every += [one] * times
        marked += [is_marked and one != image] * times
    return MarkedTokens(every, marked)
