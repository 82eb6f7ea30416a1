"""`UsageError`: a user's mistake on the command line, which ends a command with a message and exit code 2.

Beside it what else counts as one, wherever it comes from: files that cannot be read or written, packages that are not
installed, and too little memory.
"""

from collections.abc import Sequence

from lightning_megatron.text_files import UnreadableFile

USAGE_ERROR = 2
"""The exit code of a user's mistake."""
_LONGEST_LINE = 2000
# How torch says it, on a CPU and on a GPU, in errors of no class of their own.
_OUT_OF_MEMORY = ("can't allocate memory", "out of memory")
# How the package says that the package of an extra is not installed.
_WITHOUT_EXTRA = "pip install 'lightning"
_JSONARGPARSE = "jsonargparse"


class UsageError(Exception):
    """A request that a command cannot do; the message is one line with every error."""

    def __init__(self, faults: Sequence[str]) -> None:
        super().__init__("; ".join(faults))


def mistake_of(error: BaseException) -> str:
    """The message about an error that is no fault of the program's; empty for any other."""
    if isinstance(error, OSError) and error.filename is not None:
        names = " -> ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
        return f"{names} cannot be read or written: {error.strerror or error}"
    text = " ".join(str(error).split())
    if isinstance(error, UnreadableFile) or (isinstance(error, ImportError) and _WITHOUT_EXTRA in text):
        return text
    if isinstance(error, ModuleNotFoundError):
        # `--help` does not wait for it.
        from lightning_megatron.cli.doctor.software import EXTRAS

        # Of jsonargparse, Lightning's error has a text and no name.
        name = _JSONARGPARSE if _JSONARGPARSE in text else error.name
        if name in EXTRAS:
            return f"this needs the package {name!r}: pip install 'lightning-megatron[{EXTRAS[name].name}]'"
    if isinstance(error, MemoryError) or any(words in text for words in _OUT_OF_MEMORY):
        return f"the memory of this machine is not enough{f': {text}' if text else ''}; use a smaller model or batch"
    if isinstance(error, UnicodeError) or "null byte" in text:
        return f"a path or a text has characters that cannot be used: {text}"
    return ""


def shortened(message: str) -> str:
    """A message with the middle of each very long line left out: it may quote a value of any length."""
    half = _LONGEST_LINE // 2
    return (
        "\n".join(
            line if len(line) <= _LONGEST_LINE else f"{line[:half]} ... {line[-half:]}" for line in message.splitlines()
        )
        .encode(errors="backslashreplace")
        .decode()
    )
