"""Few ranks that talk over host memory as thousands do: by a tree."""

from functools import partial

from lightning_megatron.comm.tree_axis import tree_over
from lightning_megatron.trainer import strategy
from lightning_megatron.trainer.setup import process_groups


def talk_by_tree(fan_out: int) -> None:
    """Gives a rank of this process's later runs so few children. Called within a rank, whose process ends with it."""
    strategy.FAN_OUT = fan_out  # type: ignore[attr-defined]
    process_groups.tree_over = partial(tree_over, fan_out=fan_out)  # type: ignore[attr-defined]
