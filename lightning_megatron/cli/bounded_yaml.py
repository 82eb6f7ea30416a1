"""YAML of options, read within the bounds of `text_files`: a mode of jsonargparse, and a look at config files.

jsonargparse reads every value of an option as YAML, and a config file whole, wherever that ends.
"""

import os
import stat
from collections.abc import Iterator, Sequence
from typing import Any

import yaml
from jsonargparse import get_loader, set_loader

from lightning_megatron.text_files import MOST_YAML_BYTES, read_text, require_yaml, yaml_of

BOUNDED_YAML = "bounded_yaml"
"""The `parser_mode` of our parsers."""
_CONFIG_OPTIONS = ("-c", "--config")


def require_readable_configs(args: Sequence[str]) -> None:
    """Raises ValueError for a config file of a command line that is no YAML, names a key twice, or may never end."""
    for file in _config_files(args):
        # That a file does not exist is told by jsonargparse, which takes YAML itself for a file, too.
        is_file = len(file) < os.pathconf("/", "PC_PATH_MAX") and "\0" not in file and os.path.lexists(file)
        name = f"--config ({file})" if is_file else "--config"
        yaml_of(read_text(file, MOST_YAML_BYTES, name=name) if is_file else file, name)
    for word in args:
        option, equals, value = word.partition("=")
        # The value of a nested option may be a path, which jsonargparse opens.
        if stat.S_ISFIFO(_mode_of(value if equals else option)):
            raise ValueError(f"{word} names a pipe, which may never end; save what it gives in a file")


def _mode_of(path: str) -> int:
    try:
        return os.stat(path).st_mode
    except (OSError, ValueError):
        # There is none, or this is no path.
        return 0


def _config_files(args: Sequence[str]) -> Iterator[str]:
    for word, following in zip(args, [*args[1:], ""], strict=True):
        option, equals, value = word.partition("=")
        if option in _CONFIG_OPTIONS and (value or following):
            yield value if equals else following


def _load(text: str) -> Any:
    require_yaml(text, "the value")
    return get_loader("yaml")(text)


set_loader(BOUNDED_YAML, _load, exceptions=(yaml.YAMLError, ValueError))
