"""The target of a command that writes files: whether it can be written, before any work for it."""

import errno
import os
import tempfile
from pathlib import Path

from lightning_megatron.cli.usage import UsageError


def require_writable(folder: Path, told: str) -> None:
    """Makes the folder. Raises UsageError, which begins with the option `told`, where nothing can be written in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        # There is a file instead of the folder.
        why = os.strerror(errno.ENOTDIR) if isinstance(error, FileExistsError) else error.strerror or error
        raise UsageError([f"{told} cannot be written: {why}; name a path in another folder"]) from error
