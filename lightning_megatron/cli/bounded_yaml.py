"""YAML of options, read within the bounds of `text_files`: a mode of jsonargparse, and a look at config files.

jsonargparse reads every value of an option as YAML, and a config file whole, wherever that ends.
"""

import os
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import product, zip_longest
from typing import Any

import yaml
from jsonargparse import get_loader, set_loader
from lightning.pytorch.cli import LightningCLI

from lightning_megatron.text_files import MOST_YAML_BYTES, read_text, require_yaml, yaml_of

BOUNDED_YAML = "bounded_yaml"
"""The `parser_mode` of our parsers."""
_CONFIG_OPTIONS = ("-c", "--config")


def require_readable_configs(args: Sequence[str], sections: Collection[str]) -> None:
    """Raises ValueError for a config file of a command line that is no YAML, names a key twice, may never end, or has
    something else than a table of options, or a file of them, in one of the `sections`."""
    faults: list[str] = []
    for file in _config_files(args):
        # That a file does not exist is told by jsonargparse, which takes YAML itself for a file, too.
        is_file = len(file) < os.pathconf("/", "PC_PATH_MAX") and "\0" not in file and os.path.lexists(file)
        name = f"--config ({file})" if is_file else "--config"
        config = yaml_of(read_text(file, MOST_YAML_BYTES, name=name) if is_file else file, name)
        if is_file or isinstance(config, Mapping):
            faults += [f"{name}: {fault}" for fault in _section_faults(config, sections)]
    if faults:
        raise ValueError("; ".join(faults))
    for word in args:
        option, equals, value = word.partition("=")
        # The value of a nested option may be a path, which jsonargparse opens.
        if stat.S_ISFIFO(_mode_of(value if equals else option)):
            raise ValueError(f"{word} names a pipe, which may never end; save what it gives in a file")


def _section_faults(config: Any, sections: Collection[str]) -> Iterator[str]:
    if config is None or (isinstance(config, Mapping) and not any(one is not None for one in config.values())):
        yield "it has no options; leave it out, or write some, as in trainer: {max_steps: 100}"
        return
    if not isinstance(config, Mapping):
        yield f"it holds {config!r}, and must be a table of options, as in trainer: {{max_steps: 100}}"
        return
    # A file may have the options under the subcommand.
    tables = [config, *(config[name] for name in LightningCLI.subcommands() if isinstance(config.get(name), Mapping))]
    for table, section in product(tables, sections):
        found = _option_of(table, section)
        # A text names a file with the options.
        if not isinstance(found, Mapping | str | None):
            yield f"{section} ({found!r}) must be a table of options, as in {section}: {{OPTION: VALUE}}"


def _option_of(table: Mapping[Any, Any], name: str) -> Any:
    """The value of an option with dots in its name; None where it is not there."""
    first, _, rest = name.partition(".")
    value = table.get(first)
    if rest:
        return _option_of(value, rest) if isinstance(value, Mapping) else None
    return value


def _mode_of(path: str) -> int:
    try:
        return os.stat(path).st_mode
    except (OSError, ValueError):
        # There is none, or this is no path.
        return 0


def _config_files(args: Sequence[str]) -> Iterator[str]:
    for word, following in zip_longest(args, args[1:], fillvalue=""):
        option, equals, value = word.partition("=")
        if option in _CONFIG_OPTIONS and (value or following):
            yield value if equals else following


def _load(text: str) -> Any:
    require_yaml(text, "the value")
    return get_loader("yaml")(text)


set_loader(BOUNDED_YAML, _load, exceptions=(yaml.YAMLError, ValueError))
