"""Why a test of Lightning's may fail under MegatronStrategy although nothing is wrong, one class a reason.

A pattern is kept as narrow as what it defends: a failure that no reason knows is a defect until somebody has looked.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Reason:
    """A class of failures, by patterns of their message and of the test's name that must both be found."""

    name: str
    defence: str
    """Why such a failure is no defect, in a sentence."""
    message: str
    test: str = ""
    modes: tuple[str, ...] = ("world1", "lockstep", "ddp")

    def covers(self, mode: str, test: str, message: str) -> bool:
        """Whether the failure is of this class."""
        return mode in self.modes and bool(re.search(self.message, message) and re.search(self.test, test))


REASONS = (
    Reason(
        name="the class's name",
        defence="The test asks for the class of the strategy, of its launcher or of its precision plugin.",
        message=r"isinstance\(.*(MegatronStrategy|MegatronPrecision|Launcher) object.*|MegatronStrategy.*SingleDevice",
    ),
    Reason(
        name="a mock of an internal",
        defence="The test puts a mock in place of a method of Lightning's base strategy, which ours overrides, or of "
        "an object that a real run always has.",
        message=r"MagicMock name='backward'|Mock object has no attribute|call\.__eq__|call_count|has been called",
    ),
    Reason(
        name="a checkpoint that is not there",
        defence="The test mocks the loading of a checkpoint, and gives a path at which there is none: a run looks "
        "before it starts.",
        message=r"ckpt_path \(random\.ckpt\) does not exist",
    ),
    Reason(
        name="precision 16-true",
        defence="Refused, with the precisions that are supported.",
        message=r"precision '16-true' \(HalfPrecision\) is not supported by MegatronStrategy",
    ),
)

CONTROL = Reason(
    name="Lightning's DDP fails it too",
    defence="In lockstep, Lightning's own DDPStrategy over the two processes fails the test as well: it asks for one "
    "process, or for what only rank 0 does.",
    message="",
    modes=("lockstep",),
)


def reason_of(mode: str, test: str, message: str) -> Reason | None:
    """The first reason that covers a failure; None where there is none."""
    return next((reason for reason in REASONS if reason.covers(mode, test, message)), None)
