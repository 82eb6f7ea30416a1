"""A file that appears complete or not at all.

Used once before training: whatever several processes may prepare at the same moment is written under a temporary name
in the same directory and renamed, so that a reader never meets half a file.
"""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A temporary path in the same directory, renamed to `path` at the end of the block and removed if it fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Ranks on several nodes may share the directory, so a process id alone is not unique.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
