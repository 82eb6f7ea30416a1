"""What a user's code raises, in one line: every command that runs such code ends by it."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_megatron.testing.subject import SubjectError

PACKAGE = Path(__file__).resolve().parents[1]
"""The folder of this package, whose frames are not the user's."""


@contextmanager
def telling(what: str) -> Iterator[None]:
    """Raises SubjectError, with `what` before it, for whatever code of the user's raises inside the block."""
    try:
        yield
    except SubjectError:
        raise
    except BaseException as error:
        raise SubjectError(f"{what}: {told(error)}") from error


def told(error: BaseException) -> str:
    """An error in a line, with the place in the user's code where it was raised and how its notes begin."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "site-packages" not in frame.filename and PACKAGE not in Path(frame.filename).parents
    ]
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    # What cannot be compiled has no frame of its own, and names its file itself.
    line = f": {error.text.strip()}" if isinstance(error, SyntaxError) and error.text else where
    notes = (note.splitlines() for note in getattr(error, "__notes__", ()))
    return "; ".join([f"{type(error).__name__}: {error}{line}", *(lines[0] for lines in notes if lines)])
