"""What a run of a recipe has written and where, in lines that end it."""

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger


def written_files(trainer: L.Trainer) -> list[str]:
    """Where the logs and the last checkpoint of a run are."""
    loggers = [logger for logger in trainer.loggers if isinstance(logger, CSVLogger | TensorBoardLogger)]
    callbacks = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
    return [f"Logs: {logger.log_dir}" for logger in loggers] + [
        f"Checkpoint: {path}"
        for callback in callbacks
        if (path := callback.last_model_path or callback.best_model_path)
    ]
