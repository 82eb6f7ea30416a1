"""Chat templates, which turn a conversation into text: the one door to `jinja2`.

The template is in the tokenizer's directory, in `chat_template.jinja` or under `chat_template` in
`tokenizer_config.json`, in the dialect that transformers runs: sandboxed, blocks trimmed, with `raise_exception`,
`strftime_now`, loop controls and the block `generation`, whose body is rendered as it is.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = Mapping[str, Any]
"""A turn: `role`, `content`, and whatever else the template reads."""

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class _Generation(Extension):
    """Tag `{% generation %} ... {% endgeneration %}`, by which some templates mark the assistant's text."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 reads it off the class)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A Jinja template of conversations. `names` are the variables that it may read in addition to the messages."""

    def __init__(self, source: str, names: Mapping[str, Any]) -> None:
        self.source = source
        self._names = dict(names)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ValueError(f"the chat template cannot be read: {error}") from error

    def render(self, messages: Sequence[Message], *, opens_answer: bool = False) -> str:
        """The text of a conversation; `opens_answer` adds the generation prompt of the assistant.

        Raises ValueError with the template's own words where it refuses the messages.
        """
        own = [{key: value for key, value in message.items() if value is not None} for message in messages]
        try:
            return self._template.render(messages=own, add_generation_prompt=opens_answer, **self._names)
        except TemplateError as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise ValueError(f"the chat template refuses a conversation of ({roles}): {error}") from error


def load_chat_template(folder: str | Path, kind: type[ChatTemplate] = ChatTemplate) -> ChatTemplate | None:
    """The template in a tokenizer's directory (or that of its tokenizer.json), as an object of `kind`; None without."""
    root = Path(folder)
    root = root if root.is_dir() else root.parent
    config: dict[str, Any] = {}
    if (root / "tokenizer_config.json").is_file():
        config = json.loads((root / "tokenizer_config.json").read_text(encoding="utf-8"))
    if (root / "chat_template.jinja").is_file():
        source: Any = (root / "chat_template.jinja").read_text(encoding="utf-8")
    else:
        source = config.get("chat_template")
    if isinstance(source, list):
        # Several named templates; transformers takes "default" unless another is named.
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    return None if source is None else kind(source, _special_tokens(config))


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    spelled = {name: config[name] for name in _SPECIAL_TOKENS if config.get(name) is not None}
    return {name: str(token["content"] if isinstance(token, dict) else token) for name, token in spelled.items()}


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    # jinja2's own filter would escape characters for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
