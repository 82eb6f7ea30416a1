"""Step hooks: two calls around each activity of a rank in a step, made only where a hook is set.

The runtime calls the hook around the actions of a schedule, the trainer around what it does outside of a schedule.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from lightning_megatron.pipeline.schedule import Action

Activity = Action | str
"""An action of a schedule, or the name of anything else that a rank does in a step."""


class StepHook(Protocol):
    """A pair of calls at the begin and the end of each activity; the time they take is added to the step."""

    def begin(self, activity: Activity) -> None: ...

    def end(self, activity: Activity) -> None: ...


_NO_HOOK = nullcontext()


def hooked(step_hook: StepHook | None, activity: Activity) -> AbstractContextManager[None]:
    """A block whose begin and end a step hook is called at, if there is one."""
    return _NO_HOOK if step_hook is None else _hooked(step_hook, activity)


@contextmanager
def _hooked(step_hook: StepHook, activity: Activity) -> Iterator[None]:
    step_hook.begin(activity)
    try:
        yield
    finally:
        step_hook.end(activity)
