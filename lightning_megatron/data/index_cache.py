"""Index arrays that are computed once and memory-mapped by all processes.

Used once before training: ends of documents, their assignment to rows, the order of samples.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from lightning_megatron.data.atomic_file import atomic_write
from lightning_megatron.data.packing import Numbers


def cached_index(
    path: Path, what: str, form: int, make: Callable[[], Numbers], directory: str | Path | None = None
) -> Numbers:
    """An array that is a function of the file `path` and of `what`, memory-mapped; computed unless it is cached.

    It is written into `directory`, or next to the file where that is not given. `form` is the version of the rule that
    makes it, so that no array of an older rule is read. One process calls this first and the others after it; several
    at once do the work twice and do no harm.
    """
    status = path.stat()
    # A token file that is rewritten has other documents; in a directory for several there may be two of one name.
    location = "" if directory is None else path.resolve()
    stamp = hashlib.sha256(f"{form} {status.st_size} {status.st_mtime_ns}{location}".encode()).hexdigest()[:8]
    table = Path(directory or path.parent) / f"{path.stem}.{what}-{stamp}.npy"
    if not table.is_file():
        made = make()
        try:
            with atomic_write(table) as temporary, temporary.open("wb") as file:
                np.save(file, made)
        except OSError as error:
            raise ValueError(
                f"the index of {path} is written once, as {table}, and cannot be ({error.strerror}); let a process that"
                " may write there be first, or give a directory of your own for it (cache_directory of a data module)"
            ) from error
    mapped: Numbers = np.load(table, mmap_mode="r")
    return mapped
