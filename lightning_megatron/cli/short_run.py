"""A run that its command line makes shorter than the warm-up in its configuration, as one that shall only start.

The warm-up of a configuration is meant for the run that is described there; `--trainer.max_steps 2` tries whether that
run starts. So the warm-up is shortened, and told. Where the command line has options of the optimizer, its warm-up
stays, and is refused.
"""

from collections.abc import Sequence

from jsonargparse import Namespace
from lightning.pytorch.utilities import rank_zero_info

_MAX_STEPS = "--trainer.max_steps"
# Options that a warm-up may be in.
_WITH_WARMUP = ("--model.optimizer.warmup_steps", "--model.optimizer", "--model")


def shorten_warmup(optimizer: Namespace, max_steps: int, given: Sequence[str]) -> None:
    """Changes an AdamWConfig's options where the steps that the command line `given` asks for have no room for them.

    A curve with an end of its own, `total_steps`, has room in itself.
    """
    options = {word.partition("=")[0] for word in given}
    if _MAX_STEPS not in options or not options.isdisjoint(_WITH_WARMUP) or optimizer.total_steps:
        return
    if 1 <= max_steps <= optimizer.warmup_steps:
        rank_zero_info(
            f"{_MAX_STEPS} ({max_steps}) has no room for the configured warm-up of {optimizer.warmup_steps} steps: "
            f"model.optimizer.warmup_steps is {max_steps - 1} in this run"
        )
        optimizer.warmup_steps = max_steps - 1
