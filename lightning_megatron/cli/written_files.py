"""What a run of a recipe has written and where, in lines that end it; a refused one leaves no logs."""

import shutil
from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_megatron.lightning_modules.export import ExportPretrained
from lightning_megatron.lightning_modules.text_data import TextDataModule

# Files of logs that tell the options of a run alone.
_OF_OPTIONS = {"config.yaml", "hparams.yaml"}


def written_files(trainer: L.Trainer) -> list[str]:
    """Where the logs, the tokenizer that was trained, the last checkpoint and the exported model of a run are."""
    loggers = [logger for logger in trainer.loggers if isinstance(logger, CSVLogger | TensorBoardLogger)]
    callbacks = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
    exports = [callback for callback in trainer.callbacks if isinstance(callback, ExportPretrained)]  # type: ignore[attr-defined]
    data = trainer.datamodule  # type: ignore[attr-defined]
    trained = data.trained_tokenizer if isinstance(data, TextDataModule) else None
    return [
        *(f"Logs: {logger.log_dir}" for logger in loggers),
        *([] if trained is None else [f"Tokenizer: {trained}"]),
        *(f"Checkpoint: {path}" for one in callbacks if (path := one.last_model_path or one.best_model_path)),
        *(f"Exported model: {one.path}" for one in exports if one.path is not None),
    ]


def remove_empty_logs(trainer: L.Trainer) -> None:
    """Removes the folder of logs of a run that has logged nothing, so that the next one has its number."""
    if not trainer.is_global_zero or trainer.global_step:
        return
    for folder in (Path(logger.log_dir) for logger in trainer.loggers if isinstance(logger, CSVLogger)):
        if folder.is_dir() and {path.name for path in folder.iterdir()} <= _OF_OPTIONS:
            shutil.rmtree(folder)
