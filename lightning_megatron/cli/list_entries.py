"""Options that change one callback or logger of a configuration's list, by its class.

    --trainer.callbacks.ModelCheckpoint.every_n_train_steps 50
    --trainer.logger.CSVLogger.name other

jsonargparse changes the last entry of a list alone (`--trainer.callbacks.NAME`), and adds others
(`--trainer.callbacks+=CLASS`). A class name begins with a capital letter, by which these options are told from those.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import yaml
from jsonargparse import Namespace

from lightning_megatron.cli.option_errors import about_option
from lightning_megatron.cli.usage import UsageError

_OPTION = re.compile(r"--trainer\.(callbacks|logger)\.([A-Z]\w*)\.([a-z]\w*)(?:=(.*))?", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class EntryOption:
    """One value for an entry of a list."""

    option: str
    entries: str
    """Name of the list: callbacks or logger."""
    class_name: str
    name: str
    value: Any


def entry_options(given: Sequence[str]) -> tuple[list[EntryOption], list[str]]:
    """The options of a command line that change one entry, and all other words. Raises UsageError for one that has no
    value."""
    found, others = [], []
    words = iter(given)
    for word in words:
        match = _OPTION.fullmatch(word)
        if match is None:
            others.append(word)
            continue
        text = match[4] if match[4] is not None else next(words, None)
        option = word.partition("=")[0]
        if text is None:
            raise UsageError([f"{option} needs a value, as in {option} 50"])
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise UsageError([f"{option} ({text}) is no value: {error}"]) from error
        found.append(EntryOption(option=option, entries=match[1], class_name=match[2], name=match[3], value=value))
    return found, others


def change_entries(config: Namespace, options: Sequence[EntryOption]) -> None:
    """Sets each value in the one entry of its class. Raises UsageError with all options that no such entry takes."""
    faults = []
    for option in options:
        given = config.trainer.get(option.entries)
        entries = [one for one in (given if isinstance(given, list) else [given]) if isinstance(one, Namespace)]
        own = [one for one in entries if one.class_path.rpartition(".")[2] == option.class_name]
        if len(own) != 1:
            names = ", ".join(one.class_path.rpartition(".")[2] for one in entries) or "none"
            faults.append(
                f"{option.option} needs one {option.class_name} among trainer.{option.entries}, and there are "
                f"{len(own)}: the configuration has {names}; add one by --trainer.{option.entries}+={option.class_name}"
            )
            continue
        if own[0].get("init_args") is None:
            own[0].init_args = Namespace()
        own[0].init_args[option.name] = option.value
    if faults:
        raise UsageError(faults)


@contextmanager
def telling_entries(options: Sequence[EntryOption]) -> Iterator[None]:
    """A block in which jsonargparse validates changed entries; its error is told as one about the options."""
    try:
        yield
    except (TypeError, ValueError, KeyError) as error:
        # The first word names the list.
        why = about_option(str(error), ()).partition(": ")[2]
        raise UsageError([f"{', '.join(option.option for option in options)}: {why}"]) from error
