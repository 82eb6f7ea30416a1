"""What data-parallel ranks agree on about their loaders: equally many batches, and one order that each reads a part of.

Numbers of batches are compared when a loop begins, as far as loaders know them; `uneven_inputs` watches the others.
Each step then compares, within the message of its log, at which batch the ranks are (`LoaderSync.whereabouts`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from lightning_megatron.comm import collectives
from lightning_megatron.mesh import Mesh
from lightning_megatron.trainer.config import ConfigurationError
from lightning_megatron.trainer.setup.initial_sync import sync_generators
from lightning_megatron.trainer.step import global_batches
from lightning_megatron.trainer.step.global_batches import BatchShare, WithoutRows, cut_of, is_stream

_NAMES = {
    RunningStage.TRAINING: "training",
    RunningStage.SANITY_CHECKING: "validation",
    RunningStage.VALIDATING: "validation",
    RunningStage.TESTING: "test",
    RunningStage.PREDICTING: "prediction",
}

Whereabouts = Mapping[str, Any]
"""What all data-parallel ranks of a step have in common, by name."""


class LoaderSync(pl.Callback):
    """The strategy's own callback where several data-parallel ranks read data."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self.has_global_batches = False
        """Whether ranks read their parts of what samplers draw on all of them."""
        self.share: BatchShare | None = None
        """This rank's part of the global batch that is next; None where the loader was not cut."""

    def cut(self, loader: DataLoader[Any], trainer: pl.Trainer, *, is_planned: bool) -> DataLoader[Any]:
        """The loader, reading this rank's part of its global batches; as it is where a stream has none to share.

        `is_planned`: steps are planned from their documents, so none of them can count for nothing.
        """
        if is_stream(loader):
            return loader
        self.has_global_batches = True
        # Workers read ahead before the loop begins.
        self._sync_generators()
        without_rows: WithoutRows = "repeat"
        if trainer.predicting:
            without_rows = "end"
        elif trainer.training and is_planned:
            without_rows = "drop"
        assert trainer.state.stage is not None
        return global_batches.cut(loader, self._mesh.dp, without_rows, _NAMES[trainer.state.stage])

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._require_equal("limit_train_batches", [trainer.num_training_batches])

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Loaders may have been reloaded.
        self._require_equal("limit_train_batches", [trainer.num_training_batches])
        self._sync_generators()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        is_check = trainer.sanity_checking
        nums = trainer.num_sanity_val_batches if is_check else trainer.num_val_batches
        self._require_equal("limit_val_batches", nums)
        self._sync_generators()

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._require_equal("limit_test_batches", trainer.num_test_batches)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._find_share(trainer.train_dataloader, batch_idx)

    def on_validation_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = -1
    ) -> None:
        is_alone = trainer.state.fn == TrainerFn.VALIDATING
        # `trainer.val_dataloaders` are those of an earlier fit.
        loop = trainer.validate_loop if is_alone else trainer.fit_loop.epoch_loop.val_loop
        assert loop._combined_loader is not None
        self._find_share(loop._combined_loader.iterables, batch_idx, dataloader_idx)

    def on_test_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = -1
    ) -> None:
        self._find_share(trainer.test_dataloaders, batch_idx, dataloader_idx)

    def on_predict_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = -1
    ) -> None:
        self._find_share(trainer.predict_dataloaders, batch_idx, dataloader_idx)
        if self.share is not None and batch_idx == 0:
            # These steps send no message that could compare it.
            orders = collectives.gather_objects(self.share.order, self._mesh.dp)
            if len(set(orders)) > 1:
                raise RuntimeError(disagreement([{"order": order} for order in orders]))

    def whereabouts(self, trainer: pl.Trainer, number: int) -> Whereabouts:
        """Where this rank is in its data, for `disagreement`; `number` is that of its batch in an evaluation."""
        stage = trainer.state.stage
        is_training = stage == RunningStage.TRAINING
        return {
            "stage": "" if stage is None else stage.value,
            "epoch": trainer.current_epoch,
            "batch": trainer.fit_loop.batch_idx if is_training else number,
            "is_last": is_training and trainer.is_last_batch,
            "order": None if self.share is None else self.share.order,
        }

    def _find_share(self, loaders: Any, number: int, index: int = -1) -> None:
        """Finds the part of a batch by its number and that of its loader: -1 for that of a loader alone."""
        leaves = tree_leaves(loaders)
        self.share = None
        if not 0 <= index < len(leaves) and len(leaves) != 1:
            # A batch out of several loaders, which may begin anew within an epoch: none of its parts stands for it.
            if any(batches.repeats_rows for batches in map(cut_of, leaves) if batches is not None):
                raise ConfigurationError(
                    "the last global batch of one of several loaders has fewer samples than there are data-parallel "
                    f"ranks ({self._mesh.dp.size}), so that some have none for a batch out of all loaders; use "
                    "drop_last=True, or numbers of samples, batch_size and ranks that leave no such rest"
                )
            return
        loader = leaves[max(index, 0)]
        if (batches := cut_of(loader)) is None:
            return
        self.share = batches.share(number)
        if self.share is None and number == 0:
            raise RuntimeError(
                f"{type(loader).__name__} has read a batch without its sampler, so all data-parallel ranks would read "
                "the same samples; let it read the indices of its batch_sampler, or shard the data by "
                "trainer.strategy.data_parallel_rank and data_parallel_size with Trainer(use_distributed_sampler=False)"
            )

    def _require_equal(self, limit: str, num_batches: Sequence[int | float]) -> None:
        """Raises ConfigurationError, on every rank, where data-parallel ranks have unequally many batches."""
        of_ranks = collectives.gather_objects(list(num_batches), self._mesh.dp)
        if any(nums != of_ranks[0] for nums in of_ranks):
            shown = "; ".join(f"rank {rank}: {', '.join(map(str, nums))}" for rank, nums in enumerate(of_ranks))
            fewest = min(min(nums) for nums in of_ranks if nums)
            raise ConfigurationError(
                f"the data-parallel ranks have unequally many batches ({shown}), and would wait for each other for "
                f"ever after the last of the fewest; give all equally many, such as by Trainer({limit}={fewest})"
            )

    def _sync_generators(self) -> None:
        if self.has_global_batches:
            # What a rank has drawn for its own samples, such as noise for more rows, must not change the order.
            sync_generators(self._mesh.world)


def disagreement(whereabouts: Sequence[Whereabouts]) -> str:
    """Message about what differs between the whereabouts of the ranks of dp x cp; empty where nothing does."""

    def values(name: str) -> list[Any]:
        return [one.get(name) for one in whereabouts]

    if len(set(values("order"))) > 1:
        return (
            "the samplers of the data-parallel ranks drew different samples for one global batch, of which each rank "
            "reads its part. A sampler that draws at random must draw from the default generators or from one with a "
            "fixed seed; where it shards by itself, use Trainer(use_distributed_sampler=False)"
        )
    if len(set(values("is_last"))) > 1:
        without = [rank for rank, is_last in enumerate(values("is_last")) if is_last]
        number = values("batch")[0] + 1
        return (
            f"after batch number {number} of epoch {values('epoch')[0]} the ranks {without} of dp x cp have no more "
            "training batches, and the others have: they would wait for each other for ever. Give all data-parallel "
            f"ranks equally many batches, such as by Trainer(limit_train_batches={number})"
        )
    places = [tuple(one.get(name) for name in ("stage", "epoch", "batch")) for one in whereabouts]
    if len(set(places)) > 1:
        shown = "; ".join(
            f"rank {i}: {stage}, epoch {epoch}, batch {batch}" for i, (stage, epoch, batch) in enumerate(places)
        )
        return (
            f"the ranks of dp x cp are at different batches ({shown}); give all data-parallel ranks equally many "
            "batches"
        )
    return ""
