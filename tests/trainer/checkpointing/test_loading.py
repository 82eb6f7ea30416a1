"""A module comes back from a checkpoint directory: its arguments, its weights, whole or this rank's part."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_megatron import load_from_checkpoint
from lightning_megatron.checkpoint import read_meta
from lightning_megatron.checkpoint.consolidate import write_consolidated
from lightning_megatron.lightning_modules import AdamWConfig, GenerationConfig, GPTModule
from lightning_megatron.mesh import Sizes
from lightning_megatron.models import GPTConfig
from lightning_megatron.trainer.checkpointing.hyper_parameters import rebuilt
from tests.checkpoint.small_model import mesh_of
from tests.harness.ranks import run_on_ranks
from tests.trainer.fits import parts_apart, weights
from tests.trainer.layouts import Layout, make_trainer

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no:UserWarning")
TP2_PP2 = Layout(world=4, tp=2, pp=2)
CONFIG = GPTConfig(num_layers=2, hidden_size=16, num_attention_heads=2, max_sequence_length=8, vocab_size=37)


def gpt() -> GPTModule:
    return GPTModule(CONFIG, AdamWConfig(lr=0.5, betas=(0.5, 0.6)), GenerationConfig(max_new_tokens=3))


class Rows(L.LightningDataModule):
    def train_dataloader(self) -> Any:
        tokens = torch.arange(18).reshape(2, 9)
        rows = [{"tokens": row[:-1], "labels": row[1:], "loss_mask": torch.ones(8)} for row in tokens]
        return DataLoader(rows, batch_size=2)


def save_gpt(layout: Layout, path: Path) -> dict[str, Any]:
    module = gpt()
    trainer = make_trainer(layout, max_steps=1)
    trainer.fit(module, Rows())
    trainer.save_checkpoint(path)
    return weights(module)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gpt") / "gpt.ckpt"
    run_on_ranks(4, save_gpt, TP2_PP2, path, init=False)
    return path


def load_part(path: Path) -> dict[str, Any]:
    mesh = mesh_of(Sizes(world=2, tp=2))
    return weights(load_from_checkpoint(GPTModule, path, mesh=mesh))


def test_a_module_comes_back_without_an_argument_in_full_or_in_parts(path: Path) -> None:
    torch.manual_seed(123)
    module = load_from_checkpoint(GPTModule, path)
    assert (module.config, module.optimizer, module.generation) == (gpt().config, gpt().optimizer, gpt().generation)
    full = weights(module)
    assert full["model.layers.1.mlp.up.weight"][1].shape == (64, 16)
    for part in run_on_ranks(2, load_part, path):
        assert part["model.layers.1.mlp.up.weight"][1].shape == (32, 16)
        assert parts_apart(part, full) == 0
    # It would be noticed: what a module starts with is something else.
    fresh = gpt()
    fresh.configure_model()
    assert parts_apart(weights(fresh), full) > 0.01


def test_the_weights_are_those_that_were_saved(tmp_path: Path) -> None:
    [saved] = run_on_ranks(1, save_gpt, Layout(), tmp_path / "one.ckpt", init=False)
    # It was trained in float64, and comes back in the dtype of a new module.
    assert parts_apart(weights(load_from_checkpoint(GPTModule, tmp_path / "one.ckpt")), saved) < 1e-6


def test_lightning_loads_the_consolidated_file_and_the_directory_by_its_own_means(path: Path, tmp_path: Path) -> None:
    write_consolidated(path, tmp_path / "one.ckpt", weights_only=True)

    class Stock(GPTModule):
        load_from_checkpoint = vars(L.LightningModule)["load_from_checkpoint"]

    module = Stock.load_from_checkpoint(tmp_path / "one.ckpt", weights_only=True)
    assert (module.config, module.optimizer, module.generation) == (gpt().config, gpt().optimizer, gpt().generation)
    assert parts_apart(weights(module), weights(GPTModule.load_from_checkpoint(path, map_location="cpu"))) < 1e-6
    assert parts_apart(weights(module), weights(Stock.load_from_checkpoint(path))) == 0


def test_hyper_parameters_are_plain_data_on_disk(path: Path) -> None:
    assert read_meta(path)["hyper_parameters"]["config"] == asdict(CONFIG)


def test_arguments_given_come_before_those_saved(path: Path) -> None:
    optimizer = AdamWConfig(lr=0.25)
    assert load_from_checkpoint(GPTModule, path, optimizer=optimizer).optimizer == optimizer


def test_weights_go_where_they_are_asked_to(path: Path) -> None:
    moved: list[tuple[Any, ...]] = []

    class Moved(GPTModule):
        def to(self, *args: Any, **kwargs: Any) -> Any:
            assert self.model is not None
            moved.append(args)
            return super().to(*args, **kwargs)

    load_from_checkpoint(Moved, path, map_location="cpu")
    assert moved == [("cpu",)]


@dataclass
class Note:
    text: str


@dataclass
class Notes:
    first: Note
    second: Note | None = None


class Noted(L.LightningModule):
    def __init__(self, size: int, notes: Notes, more: Note | None = None, **others: Any) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.linear = nn.Linear(size, size)
        self.notes, self.more, self.others = notes, more, others
        self.loaded: dict[str, Any] = {}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.linear(batch).sum()
        return loss

    def train_dataloader(self) -> Any:
        return DataLoader(torch.ones(2, 3), batch_size=2)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loaded = checkpoint


class Unsaved(Noted):
    """Saves no arguments."""

    def save_hyperparameters(self, *args: Any, **kwargs: Any) -> None:
        pass


def save_noted(cls: type[Noted], path: Path) -> None:
    trainer = make_trainer(Layout(), max_steps=1, precision="32-true")
    trainer.fit(cls(3, Notes(Note("a"), Note("b")), Note("c"), extra=[1, 2]))
    trainer.save_checkpoint(path)


def test_dataclasses_come_back_as_the_constructor_names_them(tmp_path: Path) -> None:
    run_on_ranks(1, save_noted, Noted, tmp_path / "a.ckpt", init=False)
    module = load_from_checkpoint(Noted, tmp_path / "a.ckpt")
    assert module.notes == Notes(Note("a"), Note("b"))
    assert module.more == Note("c")
    assert module.others == {"extra": [1, 2]}
    assert module.loaded["global_step"] == 1
    assert torch.equal(module.loaded["state_dict"]["linear.weight"], module.linear.weight)
    with pytest.raises(ValueError, match=r"of another shape: linear\.bias: \(3,\) there, \(4,\) asked for"):
        load_from_checkpoint(Noted, tmp_path / "a.ckpt", size=4)


def test_what_does_not_fit_is_left_with_a_warning_where_requested(tmp_path: Path) -> None:
    run_on_ranks(1, save_noted, Noted, tmp_path / "a.ckpt", init=False)

    class Grown(Noted):
        def configure_model(self) -> None:
            self.more_weights = nn.Linear(2, 2)

    with pytest.raises(ValueError, match=r"asked for but not in it: more_weights\.bias"):
        load_from_checkpoint(Grown, tmp_path / "a.ckpt")
    with pytest.warns(UserWarning, match=r"more_weights\.bias"):
        grown = load_from_checkpoint(Grown, tmp_path / "a.ckpt", strict=False)
    assert torch.equal(grown.linear.weight, load_from_checkpoint(Noted, tmp_path / "a.ckpt").linear.weight)


def test_arguments_that_were_not_saved_are_asked_for_by_name(tmp_path: Path) -> None:
    run_on_ranks(1, save_noted, Unsaved, tmp_path / "a.ckpt", init=False)
    with pytest.raises(ValueError, match=r"Unsaved needs size, notes, which the checkpoint does not have"):
        load_from_checkpoint(Unsaved, tmp_path / "a.ckpt")
    assert load_from_checkpoint(Unsaved, tmp_path / "a.ckpt", size=3, notes=Notes(Note("d"))).notes.first == Note("d")


def test_a_path_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        load_from_checkpoint(GPTModule, tmp_path / "none.ckpt")
    with pytest.raises(ValueError, match=r"first argument of load_from_checkpoint \('a\.ckpt'\) must be the class"):
        load_from_checkpoint("a.ckpt", GPTModule)  # type: ignore[type-var]


def test_only_annotations_make_a_dataclass_of_a_mapping() -> None:
    assert rebuilt(Note, {"text": "a"}) == Note("a")
    assert rebuilt(Note | None, {"text": "a"}) == Note("a")
    assert rebuilt(Note | None, None) is None
    assert rebuilt(Note, Note("a")) == Note("a")
    assert rebuilt(tuple[Note, ...], [{"text": "a"}, {"text": "b"}]) == (Note("a"), Note("b"))
    assert rebuilt(tuple[int, ...], (1, 2)) == (1, 2)
    for kind in (dict[str, Note], Any, None, int):
        assert rebuilt(kind, {"text": "a"}) == {"text": "a"}
    with pytest.raises(ValueError, match=r"Note has no fields \['txt'\]"):
        rebuilt(Note, {"txt": "a"})
