"""The command `lightning-megatron`: one parser, and under it a parser for each command.

Every command is a file or a folder of its own in this room with `add_parser`, which declares its options and sets by
`set_defaults(run=...)` the function that runs them; that returns nothing or the exit code. Only the file of the command
that is called is imported: `--help` takes a tenth of a second, and `schedule` does not wait for Lightning.

| exit code | |
|---|---|
| 0 | done |
| 2 | a user's mistake: one line on stderr with every fault, no traceback |
| 1 | a command that looks for faults has found some; or anything else that fails, with its traceback |
"""

import argparse
import atexit
import gc
import os
import sys
from collections.abc import Collection, Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import Any, NoReturn

from lightning_megatron.cli.commands import COMMANDS
from lightning_megatron.cli.usage import USAGE_ERROR, UsageError, mistake_of, shortened
from lightning_megatron.version import VERSION


class _Parser(argparse.ArgumentParser):
    """A parser whose mistakes are one line, without the usage that argparse puts above it.

    A command's parser reports unknown options itself: else argparse would leave it to the parser of all commands.
    """

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error_of_unknown(unknown)
        return options, unknown

    def error_of_unknown(self, unknown: Sequence[str]) -> NoReturn:
        """Raises UsageError with unknown words of a command line, and with options of names near to theirs."""
        self.error("; ".join([f"unrecognized arguments: {' '.join(unknown)}", *self._nearest(unknown)]))

    def knows(self, option: str) -> bool:
        """Whether this parser, before any command, has an option of that name."""
        return option in self._option_string_actions

    def _nearest(self, unknown: Sequence[str]) -> list[str]:
        known, hints = [name[2:] for name in self._option_string_actions if name.startswith("--")], []
        for name in (word.partition("=")[0].lstrip("-") for word in unknown if word.startswith("-")):
            nearest = [one for one in known if name and one.startswith(name)] or get_close_matches(name, known, n=1)
            hints += [f"did you mean --{one}?" for one in nearest[:1]]
        return hints

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            nearest = get_close_matches(str(value), [str(choice) for choice in action.choices or ()], n=1)
            if nearest:
                error.message = f"invalid choice: {value!r}; did you mean {nearest[0]}?"
            raise

    def error(self, message: str) -> NoReturn:
        raise UsageError([f"{message}; see {self.prog} --help"])


class _Version(argparse.Action):
    """Prints the version, and those of torch and Lightning beside it, which are read from files and not imported."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        # It takes as long to import as all of `--help`.
        from importlib.metadata import PackageNotFoundError, version

        beside = []
        for name in ("torch", "lightning"):
            try:
                beside.append(f"{name} {version(name)}")
            except PackageNotFoundError:
                beside.append(f"no {name}")
        print(f"lightning-megatron {VERSION} ({', '.join(beside)})")
        parser.exit()


def main(args: Sequence[str] | None = None) -> int:
    """Runs a command line, that of the process if none is given. Returns the exit code."""
    if args is None:
        # The process ends with the command. Its last look for garbage, through all that Lightning imports, takes a
        # second and finds nothing among what is frozen.
        atexit.register(gc.freeze)
    try:
        called = sys.argv[1:] if args is None else args
        parser = command_line(called)
        if not called:
            parser.print_help()
            return 0
        if called[0].startswith("-") and not parser.knows(called[0]):
            # Of this, argparse would only say that a command is missing.
            parser.error_of_unknown(called[:1])
        options = parser.parse_args(called)
        code: int | None = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of the pipe, such as `head`, has closed it. Python would complain when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except UsageError as error:
        return _told(str(error))
    except Exception as error:
        if not (message := mistake_of(error)):
            raise
        return _told(" ".join(message.split()))
    return code or 0


def _told(message: str) -> int:
    print(f"error: {shortened(message)}", file=sys.stderr)
    return USAGE_ERROR


def command_line(called: Collection[str] = tuple(COMMANDS)) -> "_Parser":
    """The parser of all commands; those that are not called have a name and a line of help, and no options."""
    parser = _Parser(
        prog="lightning-megatron",
        description="Runs the recipes of lightning_megatron, and answers what one asks before and after a run.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the versions of this, torch and Lightning")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, line in COMMANDS.items():
        if name in called:
            import_module(f"lightning_megatron.cli.{name.replace('-', '_')}").add_parser(commands)
        else:
            commands.add_parser(name, help=line)
    return parser
