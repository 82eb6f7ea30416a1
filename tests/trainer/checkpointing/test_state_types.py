"""What callbacks, hooks and hyper-parameters keep comes back as the type that it was, or is refused by name."""

from collections import Counter, OrderedDict, deque
from pathlib import Path
from typing import Any, cast

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_megatron import CheckpointConfig, MegatronStrategy
from tests.harness.ranks import run_on_ranks
from tests.trainer.layouts import Layout, make_trainer

VALUES: dict[str, Any] = {
    "a set": {1, "two"},
    "a frozen set": frozenset({(1, 2)}),
    "complex": 1 + 2j,
    "a dtype": torch.bfloat16,
    "a device": torch.device("cpu", 0),
    "bytes": bytearray(b"ab"),
    "no bytes": b"",
    "a scalar": np.float32(1.5),
    "an integer": np.int64(3),
    "an array": np.arange(6.0).reshape(2, 3),
    "texts": np.array(["a", "bc"]),
    "a counter": Counter("aab"),
    "in order": OrderedDict(b=1, a=np.int8(2)),
    "a tuple": (1, (2, None)),
    "a size": torch.Size([2, 3]),
    "a path": Path("some/where"),
    "keys": {np.int64(3): 1, Path("k"): 2, (1, 2): 3, None: 4},
}


class Keeps(L.Callback):
    """Its state is under its class, as Lightning's documentation once had it."""

    def __init__(self) -> None:
        self.loaded: dict[str, Any] = {}
        self.more: Any = None

    @property
    def state_key(self) -> Any:
        return type(self)

    def state_dict(self) -> dict[str, Any]:
        return VALUES

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded = state_dict


class Module(BoringModel):
    def __init__(self, odd: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.loaded: dict[str, Any] = {}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        is_late = isinstance(self.hparams["odd"], str)
        checkpoint["of the user"] = VALUES | ({"odd": [deque([1])]} if is_late else {})

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loaded = checkpoint


def trainer_of(kind: Any, folder: Path, *callbacks: L.Callback) -> L.Trainer:
    strategy = cast(MegatronStrategy, Layout().strategy())
    strategy.checkpoint = CheckpointConfig(kind=kind)
    saving = ModelCheckpoint(folder, save_last=True)
    limits = {"limit_train_batches": 2, "limit_val_batches": 0, "max_epochs": 1, "precision": "32-true"}
    return make_trainer(
        Layout(), strategy=strategy, callbacks=[saving, *callbacks], enable_checkpointing=True, **cast(Any, limits)
    )


def comes_back(folder: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    trainer_of("directory", folder, Keeps()).fit(Module(odd=VALUES))
    keeps, module = Keeps(), Module()
    trainer = trainer_of("directory", folder, keeps)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, ckpt_path=folder / "last.ckpt")
    return keeps.loaded, module.loaded["of the user"], module.loaded["hyper_parameters"]


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, (dict, OrderedDict)):
        pairs = zip(one.items(), other.items(), strict=True)
        return len(one) == len(other) and all(same(tuple(ours), tuple(theirs)) for ours, theirs in pairs)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, (np.ndarray, np.generic)):
        return one.dtype == other.dtype and bool(np.array_equal(one, other))
    return bool(one == other)


def test_every_type_comes_back_as_it_was(tmp_path: Path) -> None:
    [(callback, hook, hyper)] = run_on_ranks(1, comes_back, tmp_path, init=False)
    for found in (callback, hook, hyper["odd"]):
        assert found.keys() == VALUES.keys()
        for name, value in VALUES.items():
            assert same(found[name], value), (name, found[name])


def refused(kind: str, odd: Any, folder: Path) -> str:
    try:
        with pytest.warns() as told:
            trainer_of(kind, folder).fit(Module(odd=odd))
    except (ValueError, RuntimeError) as error:
        return str(error)
    assert (folder / "last.ckpt").exists()
    return "\n".join(str(one.message) for one in told)


def test_what_cannot_come_back_is_named_with_its_type_and_the_way_out(tmp_path: Path) -> None:
    """Of hyper-parameters before a step; of a hook at the save; of a file, which Lightning writes as well, in words."""
    layer = torch.nn.Linear(1, 1)
    [at_start] = run_on_ranks(1, refused, "directory", layer, tmp_path / "a", init=False)
    [at_save] = run_on_ranks(1, refused, "directory", "late", tmp_path / "b", init=False)
    [in_file] = run_on_ranks(1, refused, "file", layer, tmp_path / "c", init=False)
    assert "the hyper-parameters of Module['odd'] is a torch.nn.modules.linear.Linear" in at_start
    assert "save_hyperparameters(ignore=[...])" in at_start and not (tmp_path / "a").exists()
    assert "meta['of the user']['odd'][0] is a collections.deque" in at_save
    assert "checkpoint['hyper_parameters']['odd'] is a torch.nn.modules.linear.Linear" in in_file
    assert "weights_only=False" in in_file
