"""What a real run says over the whole world: each collective of its ranks, over host memory or devices, by phase."""

import pickle
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, cast

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_megatron import MegatronStrategy
from lightning_megatron.checkpoint import CheckpointConfig
from lightning_megatron.comm import collectives
from lightning_megatron.comm.tree_axis import TreeAxis
from lightning_megatron.mesh import Axis
from lightning_megatron.optim.config import OptimizerConfig
from tests.trainer.layouts import Layout, make_trainer
from tests.trainer.modules import Data, Small
from tests.trainer.trees import talk_by_tree

LAYOUT = Layout(world=4, tp=2, optimizer=OptimizerConfig(kind="distributed", bucket_size=100))
PHASES = ("start", "first steps", "step", "save", "next save", "end")
# The steps before it are looked at more closely.
_STEP = 4
_NAMES = (
    "all_reduce", "all_reduce_", "all_gather", "broadcast_", "broadcast_object", "gather_objects", "merge_objects",
    "gather_on_first", "scatter_objects", "carry_to_first_", "barrier",
)  # fmt: skip


@dataclass(frozen=True)
class Call:
    """A collective over the world, with the bytes that a rank gives, and those that it gets."""

    phase: str
    name: str
    is_on_host: bool
    given_bytes: int
    got_bytes: int


class _Calls:
    """Writes down calls of the outermost function; one that it calls is part of it."""

    def __init__(self) -> None:
        self.phase = PHASES[0]
        self.calls: list[Call] = []
        self._inside = threading.local()

    def recorded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            axis = next((one for one in (*args, *kwargs.values()) if isinstance(one, Axis)), None)
            if axis is None or axis.name != "world" or getattr(self._inside, "is_so", False):
                return function(*args, **kwargs)
            self._inside.is_so = True
            try:
                result = function(*args, **kwargs)
            finally:
                self._inside.is_so = False
            given = b"" if function.__name__ == "barrier" else args[0]
            sizes = [_num_bytes(given), _num_bytes(result)]
            self.calls.append(Call(self.phase, function.__name__, isinstance(axis, TreeAxis), *sizes))
            return result

        return call

    def record(self) -> None:
        """Puts itself in front of all collectives, wherever the package has imported them."""
        for name in _NAMES:
            function = getattr(collectives, name)
            own = self.recorded(function)
            for module in [m for key, m in sys.modules.items() if key.startswith("lightning_megatron")]:
                if vars(module).get(name) is function:
                    setattr(module, name, own)


def _num_bytes(value: Any) -> int:
    return value.numel() * value.element_size() if isinstance(value, Tensor) else len(pickle.dumps(value))


class _Phases(L.Callback):
    def __init__(self, calls: _Calls, folder: Path) -> None:
        self.calls, self.folder = calls, folder

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step <= _STEP:
            self.calls.phase = "step" if trainer.global_step == _STEP else "first steps"

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step > _STEP:
            self.calls.phase = "save" if trainer.global_step == _STEP + 1 else "next save"
            trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")
            self.calls.phase = "after"

    def on_train_end(self, *_: Any) -> None:
        self.calls.phase = "end"


def record(folder: Path) -> list[Call]:
    """The calls of this rank in a run of a few steps with two saves; ranks talk by a tree, to be told from devices."""
    talk_by_tree(1)
    calls = _Calls()
    calls.record()
    strategy = cast(MegatronStrategy, LAYOUT.strategy())
    strategy.checkpoint = CheckpointConfig(asynchronous=False)
    saves = ModelCheckpoint(folder, save_top_k=0)
    options: dict[str, Any] = {"max_steps": _STEP + 2, "max_epochs": -1, "enable_checkpointing": True}
    trainer = make_trainer(LAYOUT, strategy=strategy, callbacks=[saves, _Phases(calls, folder)], **options)
    trainer.fit(Small(), Data(64))
    assert torch.distributed.is_initialized()
    return calls.calls
