"""Text, JSON and YAML of files that others wrote, read within bounds: the one door to `json.loads` of such files.

A file that is not a regular one, too long, not UTF-8, nested too deeply or blown up by aliases is a ValueError with one
line that names it, before it costs memory or time. So is a key that a table has twice, of which others take the last.
"""

import json
import os
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

MOST_BYTES = 64 * 2**20
"""Longest text that is read at once, unless the reader says otherwise."""
MOST_YAML_BYTES = 2**20
"""Longest YAML, which is read more slowly."""
MOST_DEPTH = 100
"""Deepest nesting of tables and lists."""
MOST_VALUES = 100_000
"""Largest number of values that the aliases of a YAML may stand for, all together."""
# Longest number in digits; base 60 takes the square of their number in time.
_MOST_DIGITS = 4300


class UnreadableFile(ValueError):
    """A file, or a text of one, that cannot be read; the message names it."""


def read_text(file: str | os.PathLike[str], most_bytes: int = MOST_BYTES, *, name: str = "") -> str:
    """The text of a UTF-8 file. Raises ValueError that names the file, by `name` if given, and why it is not read."""
    path = os.fspath(file)
    name = name or path
    try:
        # A pipe or a device may never end, and opening a pipe waits for its writer.
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            what = "Is a directory" if stat.S_ISDIR(status.st_mode) else "it is a pipe or a device, and no file"
            raise UnreadableFile(f"{name} cannot be read: {what}")
        if status.st_size > most_bytes:
            raise UnreadableFile(f"{name} cannot be read: it has {status.st_size:,} bytes, and may have {most_bytes:,}")
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UnreadableFile(f"{name} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UnreadableFile(f"{name} cannot be read: byte {error.start} is no UTF-8; save it as UTF-8") from error
    except UnreadableFile:
        raise
    except ValueError as error:
        if "null byte" in str(error):
            raise UnreadableFile(f"{name!r} cannot be read: a path has no zero byte") from error
        raise


def read_json(file: str | os.PathLike[str]) -> Any:
    """The value in a file of JSON. Raises ValueError that names the file."""
    return json_of(read_text(file), os.fspath(file))


def read_json_table(file: str | os.PathLike[str]) -> dict[str, Any]:
    """The table in a file of JSON. Raises ValueError that names the file, also for any other value."""
    return _table(read_json(file), os.fspath(file))


def json_of(text: str | bytes, name: str) -> Any:
    """The value of a JSON text. Raises ValueError that begins with `name`, also for a key that a table has twice."""
    try:
        value = json.loads(text, object_pairs_hook=_once)
    except ValueError as error:
        raise UnreadableFile(f"{name} is no JSON: {error}") from error
    except RecursionError:
        raise UnreadableFile(_too_deep(name)) from None
    _require_shallow(value, name)
    return value


def yaml_of(text: str, name: str) -> Any:
    """The value of a YAML text. Raises ValueError that begins with `name`, also for a key that a table has twice."""
    require_yaml(text, name)
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError, TypeError, LookupError) as error:
        # Values of a tag that are none, a date of month 99 for instance, end in errors of Python.
        raise UnreadableFile(f"{name} is no YAML: {' '.join(str(error).split())}") from error


def require_yaml(text: str, name: str) -> None:
    """Raises ValueError for a YAML text that a loader would take too long for, too deeply or not at all."""
    if len(text) > MOST_YAML_BYTES:
        raise UnreadableFile(f"{name} has {len(text):,} characters, and YAML may have {MOST_YAML_BYTES:,}")
    try:
        _require_bounded(yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)), name)
    except yaml.YAMLError as error:
        raise UnreadableFile(f"{name} is no YAML: {' '.join(str(error).split())}") from error


def read_table(file: str | os.PathLike[str], *, name: str = "") -> dict[str, Any]:
    """The table in a file of YAML or JSON. Raises ValueError for one that cannot be read, or is no table."""
    name = name or os.fspath(file)
    text = read_text(file, name=name)
    value: Any = None
    if text.lstrip().startswith("{"):
        # JSON is YAML, and YAML's own reader takes seconds for a long one.
        with suppress(ValueError):
            value = json_of(text, name)
    value = yaml_of(text, name) if value is None else value
    return _table(value, name)


def _table(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UnreadableFile(f"{name} is no table of fields")
    return value


def _require_bounded(events: Iterator[Any], name: str) -> None:
    """Reads the events of a YAML, none of which goes deep by itself, and raises ValueError where they are too many."""
    # Of each open table or list its anchor, and the number of values before it.
    opened: list[tuple[str | None, int]] = []
    sizes: dict[str, int] = {}
    count = aliased = 0
    for event in events:
        if isinstance(event, yaml.AliasEvent):
            if any(event.anchor == anchor for anchor, _ in opened):
                raise UnreadableFile(f"{name} has the alias *{event.anchor} within what it stands for; write it out")
            size = sizes.get(event.anchor, 0)
            count, aliased = count + size, aliased + size
            if aliased > MOST_VALUES:
                raise UnreadableFile(
                    f"{name} has aliases that stand for more than {MOST_VALUES:,} values (at *{event.anchor}); write "
                    "out what they stand for, or use fewer"
                )
        elif isinstance(event, yaml.CollectionStartEvent):
            opened.append((event.anchor, count))
            count += 1
            if len(opened) > MOST_DEPTH:
                raise UnreadableFile(_too_deep(name))
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = opened.pop()
            if anchor is not None:
                sizes[anchor] = count - before
        elif isinstance(event, yaml.ScalarEvent):
            count += 1
            if event.anchor is not None:
                sizes[event.anchor] = 1
            if len(event.value) > _MOST_DIGITS and event.implicit[0] and event.value.lstrip("+-")[:1].isdigit():
                raise UnreadableFile(f"{name} has a number of {len(event.value)} characters ({event.value[:20]}...)")


def _require_shallow(value: Any, name: str) -> None:
    level = [value]
    for _ in range(MOST_DEPTH + 1):
        level = [
            inner
            for outer in level
            if isinstance(outer, (dict, list))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return
    raise UnreadableFile(_too_deep(name))


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A table of JSON. Raises ValueError for a key that it has twice."""
    table = dict(pairs)
    if len(table) < len(pairs):
        raise ValueError(_named_twice(Counter(key for key, _ in pairs).most_common(1)[0][0]))
    return table


def _named_twice(key: str) -> str:
    return f"{key} is named twice; leave one of them out"


def _too_deep(name: str) -> str:
    return f"{name} is nested more than {MOST_DEPTH} deep, which nothing that is read here is"


class _Loader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # Before merge keys (<<) bring in keys of other tables. The usual readers silently take the last of two.
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, _named_twice(key.value), key.start_mark)
            seen.add(key.value)
        return node
