"""What reads files by fsspec, as Lightning does, reads a checkpoint directory as the file that it stands for."""

import errno
import io
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import lightning as L
import pytest
import torch
from fsspec.implementations import local
from torch.utils.data import DataLoader

import lightning_megatron
from lightning_megatron.checkpoint import consolidate
from tests.any_module import networks
from tests.harness.ranks import run_on_ranks
from tests.trainer.layouts import PLAIN, Layout, make_trainer


class Plain(L.LightningModule):
    """A GPT that somebody wrote, cut over tp by its plan, who knows no more of the package."""

    model_plan = networks.TrainsOverTensor.model_plan

    def __init__(self, lr: float, betas: tuple[float, float] = (0.9, 0.999)) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net: Any = networks.GPT()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch["tokens"], batch["targets"])[1]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("validation", self.net(batch["tokens"], batch["targets"])[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])

    def train_dataloader(self) -> Any:
        return DataLoader(networks.batches(), batch_size=None)

    val_dataloader = train_dataloader


def fitted(layout: Layout, path: Path, max_steps: int = 3, ckpt_path: Path | None = None) -> dict[str, Any]:
    """The weights of a module after some steps, with a checkpoint of it at the path."""
    torch.manual_seed(3)
    module = Plain(0.01, (0.5, 0.75)).double()
    options: dict[str, Any] = {"limit_val_batches": 0, "max_steps": max_steps}
    trainer = make_trainer(layout, **options)
    trainer.fit(module, ckpt_path=ckpt_path)
    trainer.save_checkpoint(path)
    return {name: tensor.detach() for name, tensor in module.state_dict().items()}


@pytest.fixture(scope="module", params=["dp2", "tp2"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint directory of an epoch of three steps under a layout."""
    path = tmp_path_factory.mktemp(request.param) / "step=3.ckpt"
    run_on_ranks(2, fitted, Layout(world=2, tp=2 if request.param == "tp2" else 1), path, init=False)
    assert path.is_dir()
    return path


def test_lightning_loads_a_module_from_a_directory_as_the_package_does(path: Path) -> None:
    ours, stock = lightning_megatron.load_from_checkpoint(Plain, path), Plain.load_from_checkpoint(path)
    assert stock.hparams == ours.hparams == {"lr": 0.01, "betas": (0.5, 0.75)}
    weights = stock.state_dict()
    assert weights.keys() == ours.state_dict().keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in ours.state_dict().items())
    # A new module has other weights, so that one which was not filled would be noticed.
    assert not torch.equal(Plain(0.01).net.head.weight, stock.net.head.weight)
    assert Plain.load_from_checkpoint(f"file://{path}", lr=0.5).hparams["lr"] == 0.5


def test_lightning_validates_and_goes_on_from_a_directory(path: Path, tmp_path: Path) -> None:
    validates = partial(make_trainer(PLAIN).validate, verbose=False)
    [[found], [expected]] = (
        validates(Plain(0.5).double(), ckpt_path=path),
        validates(lightning_megatron.load_from_checkpoint(Plain, path).double()),
    )
    # The module was loaded in float32.
    assert found["validation"] == pytest.approx(expected["validation"], abs=1e-6)
    unbroken = fitted(PLAIN, tmp_path / "unbroken.ckpt", max_steps=4)
    for name, tensor in fitted(PLAIN, tmp_path / "resumed.ckpt", max_steps=4, ckpt_path=path).items():
        torch.testing.assert_close(tensor, unbroken[name], rtol=0, atol=1e-9)


def test_the_stream_holds_what_consolidation_writes(path: Path) -> None:
    with fsspec.open(path, "rb") as stream:
        found = torch.load(stream, weights_only=True)
    expected = consolidate.consolidate(path)
    buffer = io.BytesIO()
    torch.save(expected, buffer)
    assert found.keys() == expected.keys()
    assert fsspec.filesystem("file").cat_file(str(path)) == buffer.getvalue()


def a_file_less(path: Path) -> str:
    next(path.glob("*.distcp")).unlink()
    return r"_0\.distcp is missing"


def another_byte(path: Path) -> str:
    file = max(path.glob("*.distcp"), key=lambda file: file.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))
    return "is not as it was written|has checksum"


def another_manifest(path: Path) -> str:
    (path / "manifest.json").write_text("{}")
    return r"manifest\.json is not one that this package writes"


@pytest.mark.parametrize("damage", [a_file_less, another_byte, another_manifest])
def test_a_damaged_directory_is_refused_by_what_is_wrong(damage: Callable[[Path], str], tmp_path: Path) -> None:
    fitted(Layout(), tmp_path / "a.ckpt")
    Plain.load_from_checkpoint(tmp_path / "a.ckpt")
    message = damage(tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match=message):
        Plain.load_from_checkpoint(tmp_path / "a.ckpt")


def test_a_directory_too_large_for_the_memory_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_bytes = sum(entry.num_bytes for entry in lightning_megatron.checkpoint.read_entries(path).values())
    monkeypatch.setattr(consolidate, "machine_memory_bytes", lambda: 2 * num_bytes)
    Plain.load_from_checkpoint(path)
    monkeypatch.setattr(consolidate, "machine_memory_bytes", lambda: 2 * num_bytes - 1)
    with pytest.raises(ValueError, match=r"takes 0\.0 GiB of memory, twice its bytes, and this machine has"):
        Plain.load_from_checkpoint(path)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("can't allocate memory")

    monkeypatch.undo()
    monkeypatch.setattr(consolidate, "load", fail)
    with pytest.raises(ValueError, match=r"cannot be read as one file: RuntimeError: can't allocate memory"):
        Plain.load_from_checkpoint(path)


def test_everything_else_is_as_fsspec_has_it(path: Path, tmp_path: Path) -> None:
    found, stock = fsspec.filesystem("file"), local.LocalFileSystem()
    assert isinstance(found, local.LocalFileSystem) and type(found).__name__ == "LocalFileSystem"
    assert fsspec.core.url_to_fs(path)[0] is fsspec.filesystem("local") is pickle.loads(pickle.dumps(found))
    (tmp_path / "manifest.json").mkdir()
    for folder, mode in ((tmp_path, "rb"), (path, "wb"), (path, "ab"), (path, "r+b")):
        for system in (found, stock):
            with pytest.raises(IsADirectoryError) as raised:
                system.open(folder, mode)
            assert raised.value.errno == errno.EISDIR and raised.value.filename == str(folder)
    with pytest.raises(FileNotFoundError):
        found.open(tmp_path / "none", "rb")
    with found.open(tmp_path / "a.txt.gz", "wt", compression="infer") as text:
        text.write("a line")
    with stock.open(tmp_path / "a.txt.gz", "rb", compression="infer") as stream:
        assert stream.read() == b"a line"
    with found.transaction, found.open(tmp_path / "b", "wb") as stream:
        stream.write(b"b")
        assert not (tmp_path / "b").exists()
    assert (tmp_path / "b").read_bytes() == b"b"
    # To all but the reading it is a directory.
    assert found.info(path) == stock.info(path) and found.ls(path) == stock.ls(path) and not found.isfile(path)
