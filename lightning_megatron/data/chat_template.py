"""Chat templates, which turn a conversation into text.

The template is in the tokenizer's directory, in `chat_template.jinja` or under `chat_template` in
`tokenizer_config.json`, in the dialect that transformers runs (`template_sandbox`), with `raise_exception` and
`strftime_now`.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from lightning_megatron.data.template_sandbox import TemplateEnvironment, TemplateFault
from lightning_megatron.text_files import read_json_table, read_text

Message = Mapping[str, Any]
"""A turn: `role`, `content`, and whatever else the template reads."""

# Of a conversation, and of an error of Python's.
_SHOWN_ROLES = 20
_SHOWN_CHARACTERS = 300
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class _Refusal(Exception):
    """What a template says of messages that it does not take."""


class ChatTemplate:
    """A Jinja template of conversations. `names` are the variables that it may read in addition to the messages."""

    def __init__(self, source: str, names: Mapping[str, Any]) -> None:
        self.source = source
        self._names = dict(names)
        self._environment = TemplateEnvironment(
            {"tojson": _to_json}, {"raise_exception": _refuse, "strftime_now": _now}
        )
        try:
            self._template = self._environment.compiled(source)
        except Exception as error:  # any, from Python's compiler too
            raise ValueError(f"the chat template cannot be read: {_why(error)}") from error

    def render(self, messages: Sequence[Message], *, opens_answer: bool = False) -> str:
        """The text of a conversation; `opens_answer` adds the generation prompt of the assistant.

        Raises ValueError with the template's own words where it refuses the messages, and with its error where it fails
        or does more work than a conversation needs.
        """
        own = [{key: value for key, value in message.items() if value is not None} for message in messages]
        try:
            return self._environment.rendered(
                self._template, {**self._names, "messages": own, "add_generation_prompt": opens_answer}
            )
        except Exception as error:  # a template is a program, and may end in any error
            roles = ", ".join(str(message.get("role")) for message in messages[:_SHOWN_ROLES])
            roles += ", ..." if len(messages) > _SHOWN_ROLES else ""
            raise ValueError(f"the chat template refuses a conversation of ({roles}): {_why(error)}") from error


def load_chat_template(folder: str | Path, kind: type[ChatTemplate] = ChatTemplate) -> ChatTemplate | None:
    """The template in a tokenizer's directory (or that of its tokenizer.json), as an object of `kind`; None without."""
    root = Path(folder)
    root = root if root.is_dir() else root.parent
    config: dict[str, Any] = {}
    if (root / "tokenizer_config.json").is_file():
        config = read_json_table(root / "tokenizer_config.json")
    if (root / "chat_template.jinja").is_file():
        source: Any = read_text(root / "chat_template.jinja")
    else:
        source = config.get("chat_template")
    if isinstance(source, list):
        # Several named templates; transformers takes "default" unless another is named.
        named = [entry for entry in source if isinstance(entry, dict) and entry.get("name") == "default"]
        source = named[-1].get("template") if named else None
    if source is not None and not isinstance(source, str):
        raise ValueError(f"{root / 'tokenizer_config.json'}: chat_template must be text, or a list of named texts")
    return None if source is None else kind(source, _special_tokens(config))


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    spelled = {name: config[name] for name in _SPECIAL_TOKENS if config.get(name) is not None}
    return {name: str(token.get("content") if isinstance(token, dict) else token) for name, token in spelled.items()}


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    # jinja2's own filter would escape characters for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _refuse(message: str) -> NoReturn:
    raise _Refusal(message)


def _why(error: Exception) -> str:
    text = " ".join(str(error).split()) or "no reason given"
    # The words of a template's own, or of jinja2, stand by themselves.
    if isinstance(error, (_Refusal, TemplateFault)):
        return text
    return f"{type(error).__name__}: {text[:_SHOWN_CHARACTERS]}"


def _now(form: str) -> str:
    return datetime.now().strftime(form)
