"""Who hears when a rank does what: nobody, unless someone asks; then two calls around each thing that is done.

The runtime tells of its actions, and the trainer of what it does beside a schedule, by name.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from lightning_megatron.pipeline.schedule import Action

Doing = Action | str
"""An action of a schedule, or the name of anything else."""


class Listener(Protocol):
    """Hears when something begins and ends. What it does there takes time from the step."""

    def begin(self, doing: Doing) -> None: ...

    def end(self, doing: Doing) -> None: ...


class _Heard:
    """A block that a listener hears begin and end."""

    def __init__(self, listener: Listener, doing: Doing) -> None:
        self._listener = listener
        self._doing = doing

    def __enter__(self) -> None:
        self._listener.begin(self._doing)

    def __exit__(self, *_: object) -> None:
        self._listener.end(self._doing)


_UNHEARD = nullcontext()


def heard(listener: Listener | None, doing: Doing) -> AbstractContextManager[None]:
    """A block in which something is done, heard where there is a listener."""
    return _UNHEARD if listener is None else _Heard(listener, doing)
