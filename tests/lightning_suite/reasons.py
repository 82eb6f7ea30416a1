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
        defence="The test asks whether the strategy, its launcher or its precision plugin is of Lightning's class.",
        message=r"isinstance\(<lightning_megatron\.\S+ object|MegatronStrategy'> (is|==)",
    ),
    Reason(
        name="a mock of an internal",
        defence="The test puts a mock in place of a method of Lightning's base class, which ours overrides, of "
        "an object that a run needs, or of a callback, and asks how the mock was called.",
        message=r"MagicMock name='backward'|Mock object has no attribute|call\.__eq__|type object 'Mock'|"
        r"Expected 'on_exception' to be called once",
    ),
    Reason(
        name="a checkpoint that is not there",
        defence="The test mocks the loading of a checkpoint and names a path at which there is none; a run looks "
        "before it starts.",
        message=r"ckpt_path \(random\.ckpt\) does not exist|this configuration cannot run",
        test=r"test_checkpoint_path_input",
    ),
    Reason(
        name="os.rename made to fail",
        defence="The test makes os.rename fail as between two devices; ours renames within one folder.",
        message=r"Invalid cross-device link",
        test=r"test_local_cross_device_checkpoint",
    ),
    Reason(
        name="precision 16-true",
        defence="It is refused, with the precisions that are supported.",
        message=r"precision '16-true' \(HalfPrecision\) is not supported by MegatronStrategy",
    ),
    Reason(
        name="the closure runs before the optimizer's step",
        defence="The test asks that `step` of the optimizer is entered before training_step. Gradients are reduced, "
        "clipped and unscaled between the two, so the closure comes first, as under Lightning's own mixed precision.",
        message=r"assert \['training_st.* == \['step', 'tra",
        test=r"test_train_loop_system",
    ),
)

CONTROL = Reason(
    name="Lightning's DDP fails it too",
    defence="Over the same two processes Lightning's own DDPStrategy fails the test with the same message: it asks for "
    "one process, or rank 1 for what only rank 0 does (warnings, logs, files).",
    message="",
    modes=("lockstep",),
)


def reason_of(mode: str, test: str, message: str) -> Reason | None:
    """The first reason that covers a failure; None where there is none."""
    return next((reason for reason in REASONS if reason.covers(mode, test, message)), None)
