"""A model under the Trainer and `MegatronStrategy`, as a user would train it, with a hook after each step."""

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn


def fit(
    build: Callable[[], nn.Module],
    make_loader: Callable[[int], Any],
    strategy: dict[str, Any],
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
    on_step: Callable[[Tensor], None],
    inputs: dict[str, Tensor] | None = None,
    **trainer_options: Any,
) -> None:
    """Trains what `build` makes over the loader for the number of data-parallel ranks; batches are [tokens, labels].

    `strategy` holds arguments of MegatronStrategy, `on_step` is given the loss of each step, and every call of the
    model further `inputs`.
    """
    from lightning_megatron import MegatronStrategy

    class Module(L.LightningModule):
        def configure_model(self) -> None:
            self.model = build()

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            output = self.model(batch[0], labels=batch[1], **(inputs or {}))
            # Models of transformers return more than the loss.
            loss: Tensor = output if isinstance(output, Tensor) else output.loss
            self.log("train_loss", loss)
            return loss

        def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
            on_step(outputs["loss"])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return make_optimizer(self.parameters())

    trainer = L.Trainer(
        strategy=MegatronStrategy(**strategy),
        max_epochs=1,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"use_distributed_sampler": False, **trainer_options},
    )
    dp: int = trainer.strategy.data_parallel_size  # type: ignore[attr-defined]
    trainer.fit(Module(), make_loader(dp))
