"""The target of a command that writes files: whether it can be written, before any work for it."""

import errno
import os
import tempfile
from pathlib import Path

from lightning_megatron.cli.usage import UsageError


def require_writable(target: Path, option: str) -> None:
    """Makes the target's folder. Raises UsageError, with the option's name, where nothing can be written in it."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=target.parent):
            pass
    except OSError as error:
        # There is a file instead of the folder.
        why = os.strerror(errno.ENOTDIR) if isinstance(error, FileExistsError) else error.strerror or error
        raise UsageError([f"{option} ({target}) cannot be written: {why}; name a path in another folder"]) from error
