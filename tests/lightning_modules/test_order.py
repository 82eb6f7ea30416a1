"""The samples of every global batch are the same for any number of dp ranks and workers, and go on from any batch."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron import ConfigurationError
from lightning_megatron.data import BatchRamp, streaming
from lightning_megatron.lightning_modules import BlendSource, GPTDataConfig, GPTDataModule, StreamingConfig
from lightning_megatron.trainer.setup.replica import Replica
from tests.lightning_modules.corpus import data
from tests.trainer.layouts import PLAIN, make_trainer

RAMP = BatchRamp(first_size=4, last_size=12, step_size=4, ramp_samples=30)
BATCHES = 9
ALONE = Replica(0, 1)
NAMES = ["stream", "documents", "blend", "ramp", "blend ramp", "streaming", "streaming documents", "streaming ramp"]


class OfReplica(GPTDataModule):
    """The data module on one data-parallel rank."""

    dp_rank = ALONE

    @property
    def _replica(self) -> Replica:
        return self.replica


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus, its tokenizer and its token files."""
    path: Path = tmp_path_factory.mktemp("order")
    data(path).setup("fit")
    return path


def options(name: str, folder: Path) -> dict[str, Any]:
    [tokenizer] = (folder / "cache").glob("tokenizer-*.json")
    found: dict[str, Any] = {"path": str(folder / "corpus"), "tokenizer": str(tokenizer)}
    if "documents" in name:
        found["packing"] = "documents"
    if "streaming" in name:
        found["streaming"] = StreamingConfig(window_documents=5)
    if "blend" in name:
        # Those to train on: what is held out is next to them.
        prefix = max((folder / "cache").glob("tokens-*.idx"), key=lambda path: path.stat().st_size).with_suffix("")
        found["path"] = None
        found["blend"] = [
            BlendSource(path=str(folder / "corpus"), weight=2),
            BlendSource(path=str(prefix), weight=1),
        ]
        found["epoch_samples"] = 100
    if "ramp" in name:
        found |= {"batch_ramp": RAMP, "global_batch_size": 12}
    return found


def loader(name: str, folder: Path, dp_rank: Replica = ALONE, num_workers: int = 0, **changes: Any) -> Any:
    config = GPTDataConfig(
        **(
            {
                "vocab_size": 300,
                "sequence_length": 16,
                "global_batch_size": 4,
                "cache_directory": str(folder / "cache"),
                "num_workers": num_workers,
            }
            | options(name, folder)
            | changes
        )
    )
    module = OfReplica(config)
    module.replica = dp_rank
    module.trainer = make_trainer(PLAIN, max_steps=30)
    module.setup("fit")
    return module.train_dataloader()


def batches(loader: Any, count: int) -> list[Tensor]:
    return [batch["tokens"] for batch in itertools.islice(iter(loader), count)]


def together(parts: list[list[Tensor]]) -> list[list[list[int]]]:
    return [torch.cat(found).tolist() for found in zip(*parts, strict=True)]


@pytest.mark.parametrize("name", NAMES)
def test_a_global_batch_is_the_same_on_any_number_of_dp_ranks_and_workers(name: str, folder: Path) -> None:
    wanted = together([batches(loader(name, folder), BATCHES)])
    assert len({str(batch) for batch in wanted}) == BATCHES
    sizes = [len(batch) for batch in wanted]
    assert sizes == ([4, 4, 4, 4, 8, 8, 12, 12, 12] if "ramp" in name else [4] * BATCHES)
    for size, workers in ((2, 0), (4, 0), (1, 2), (2, 2)):
        parts = [batches(loader(name, folder, Replica(rank, size), workers), BATCHES) for rank in range(size)]
        assert together(parts) == wanted, (size, workers)


@pytest.mark.matrix
@pytest.mark.parametrize("num_before", [2, 4, 7])
@pytest.mark.parametrize("name", NAMES)
def test_a_loader_goes_on_from_its_state_on_another_number_of_dp_ranks(
    name: str, num_before: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A state is taken before batch 0 and 3, and what comes after is recomputed.
    monkeypatch.setattr(streaming, "NUM_BETWEEN", 3)
    wanted = together([batches(loader(name, folder), BATCHES)])
    begun = [loader(name, folder, Replica(rank, 2), 2 * (num_before == 4)) for rank in range(2)]
    for one in begun:
        batches(one, num_before)
    states = [one.state_dict() for one in begun]
    for size in (1, 2, 4):
        resumed = [loader(name, folder, Replica(rank, size)) for rank in range(size)]
        for one in resumed:
            one.load_state_dict(one.merged_state(states) if "streaming" in name else states[0])
        parts = [batches(one, BATCHES - num_before) for one in resumed]
        assert together(parts) == wanted[num_before:], size
        again = [
            one.merged_state([other.state_dict() for other in resumed]) for one in resumed[:1] if "streaming" in name
        ]
        assert all(
            sorted(packer for part in state["states"] for packer in part["packers"]) == list("0123") for state in again
        )


@pytest.mark.parametrize("name", ["blend", "ramp", "streaming"])
def test_a_round_goes_on_after_the_one_before_it(name: str, folder: Path) -> None:
    changes = {} if name == "ramp" else {"epoch_samples": 12}
    rounds = loader(name, folder, **changes)
    count = len(rounds)
    assert count == (11 if name == "ramp" else 3)
    first, second = batches(rounds, count), batches(rounds, count)
    longer = loader(name, folder, **({} if name == "ramp" else {"epoch_samples": 24}))
    full = batches(longer, count) + batches(longer, count)
    assert together([first + second]) == together([full])
    assert len(list(loader(name, folder, num_workers=2, **changes))) == count


@pytest.mark.parametrize("name", ["blend", "ramp", "streaming"])
def test_what_has_no_order_but_its_own_cannot_be_overfitted(name: str, folder: Path) -> None:
    module = OfReplica(
        GPTDataConfig(
            vocab_size=300,
            sequence_length=16,
            **({"global_batch_size": 4} | options(name, folder)),
            cache_directory=str(folder / "cache"),
        )
    )
    module.trainer = make_trainer(PLAIN, overfit_batches=2, max_steps=3)
    module.setup("fit")
    with pytest.raises(ConfigurationError, match=r"overfit_batches \(2\)"):
        module.train_dataloader()


def test_streamed_text_needs_an_end_from_somewhere(folder: Path) -> None:
    config = GPTDataConfig(vocab_size=300, sequence_length=16, global_batch_size=4, **options("streaming", folder))
    module = OfReplica(config)
    module.trainer = make_trainer(PLAIN)
    module.setup("fit")
    with pytest.raises(ConfigurationError, match="streamed text has no end"):
        module.train_dataloader()


def test_a_ramp_must_end_with_the_global_batch_size_and_fit_the_samples(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"last_size \(12\), which must be global_batch_size \(8\)"):
        loader("ramp", folder, global_batch_size=8)
    ramp = BatchRamp(first_size=400, last_size=800, step_size=400, ramp_samples=9)
    with pytest.raises(ConfigurationError, match="too few for one global batch of 400"):
        loader("ramp", folder, batch_ramp=ramp, global_batch_size=800)
    with pytest.raises(ConfigurationError, match=r"steps of 3 would do"):
        loader("ramp", folder, Replica(0, 3))
