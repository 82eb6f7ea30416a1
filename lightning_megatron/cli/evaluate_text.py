"""The perplexity of a text under a model, by `Trainer.validate` on any layout."""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_megatron.checkpoint import is_checkpoint
from lightning_megatron.cli.lightning_lines import leave_out_what_is_no_news
from lightning_megatron.cli.source import no_source
from lightning_megatron.cli.usage import UsageError
from lightning_megatron.data import load_documents, load_tokenizer
from lightning_megatron.data.tokenizer import Tokenizer
from lightning_megatron.hf.weights import folder_of_run, in_checkpoint
from lightning_megatron.hub import CONFIG_FILES, model_folder
from lightning_megatron.lightning_modules import CausalModule, GPTModule
from lightning_megatron.lightning_modules.evaluation_data import EvaluationDataModule, TextWindows
from lightning_megatron.models.gpt import GPTConfig
from lightning_megatron.progress import progress_bar, watched_ranges
from lightning_megatron.testing.layout_name import layout_of
from lightning_megatron.trainer import ConfigurationError

_TIMEOUT_SECONDS = 1800.0
# Documents that are tokenized together.
_DOCUMENTS = 1000


def text_results(options: argparse.Namespace) -> dict[str, Any] | None:
    """The figures of the text on the first rank; None on others. Raises UsageError with what is wrong."""
    try:
        return _results(options)
    except ConfigurationError as error:
        raise UsageError(error.faults) from error
    except ValueError as error:
        raise UsageError(str(error).splitlines()) from error


def _results(options: argparse.Namespace) -> dict[str, Any] | None:
    from lightning_megatron.cli.evaluate import figures

    leave_out_what_is_no_news()
    # Ranks are to be seeded alike.
    L.seed_everything(0, workers=True, verbose=False)
    module, vocab_size, folder = _module_of(options.model)
    tokenizer = _tokenizer_of(options, folder, vocab_size)
    ids, num_bytes = _tokens_of(options, tokenizer)
    windows = TextWindows(ids, options.sequence_length)
    ckpt_path = options.model if is_checkpoint(options.model) else None
    data = EvaluationDataModule(windows, options.batch_size)
    with progress_bar("evaluating", "batches") as watch:
        trainer = _trainer(options, _WatchedBatches(watch))
        [logged] = trainer.validate(module, datamodule=data, ckpt_path=ckpt_path, verbose=False)
    if not trainer.is_global_zero:
        return None
    loss = math.log(logged["val_perplexity"]) if "val_perplexity" in logged else logged["val_loss"]
    return figures(loss, windows.num_predicted, num_bytes)


def _module_of(model: str) -> tuple[L.LightningModule, int, Path | None]:
    """The module of a folder or a checkpoint, its vocabulary, and the folder that may have its tokenizer."""
    if not is_checkpoint(model):
        if not Path(model_folder(model, CONFIG_FILES)).exists():
            raise UsageError([no_source(model, "MODEL")])
        made = CausalModule(model)
        return made, made.vocab_size, Path(model)
    if folder := folder_of_run(model):
        made = CausalModule(folder, from_scratch=True)
        return made, made.vocab_size, Path(folder)
    config = in_checkpoint(model).config
    if type(config) is not GPTConfig:
        raise UsageError(
            [
                f"{model} holds a model of {type(config).__name__}, and models that write text alone have the "
                "perplexity of a text"
            ]
        )
    return GPTModule(config), config.vocab_size, None


def _tokenizer_of(options: argparse.Namespace, folder: Path | None, vocab_size: int) -> Tokenizer:
    path = options.tokenizer or folder
    if path is None:
        raise UsageError(
            [
                f"{options.model} has no tokenizer; give the one that it was trained with, by --tokenizer: a run of a "
                "recipe names at its end the one that it trained"
            ]
        )
    tokenizer = load_tokenizer(path)
    if tokenizer.vocab_size > vocab_size:
        raise UsageError(
            [
                f"--tokenizer ({path}) has ids up to {tokenizer.vocab_size - 1}, and {options.model} has a vocabulary "
                f"of {vocab_size}; give the tokenizer of the model"
            ]
        )
    return tokenizer


def _tokens_of(options: argparse.Namespace, tokenizer: Tokenizer) -> tuple[torch.Tensor, int]:
    """The tokens of all documents [num_tokens], an end of text behind each, and the bytes of their text."""
    documents = load_documents(
        path=options.path,
        dataset=options.dataset,
        text_column=options.text_column,
        split=options.split if options.dataset is not None else "train",
    )
    ids: list[int] = []
    num_bytes = 0
    for own in watched_ranges(len(documents), _DOCUMENTS, what="tokenizing", unit="documents"):
        rows = documents[own.start : own.stop]
        if unread := [fault for fault in rows.get("fault", ()) if fault]:
            raise UsageError(unread[:5])
        for text, tokens in zip(rows["text"], tokenizer.encode(rows["text"]), strict=True):
            num_bytes += len(text.encode())
            ids += [*tokens, tokenizer.end_of_text]
    return torch.tensor(ids), num_bytes


class _WatchedBatches(L.Callback):
    """The first rank tells `watch` how many batches of how many are done."""

    def __init__(self, watch: Callable[[int, int], None]) -> None:
        self._watch = watch

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if trainer.is_global_zero:
            self._watch(batch_idx + 1, int(trainer.num_val_batches[0]))


def _trainer(options: argparse.Namespace, callback: L.Callback) -> L.Trainer:
    layout = None if options.layout is None else layout_of(options.layout)
    world = 1 if layout is None else layout.world
    if world % options.num_nodes:
        raise UsageError(
            [f"--layout ({options.layout}) has {world} ranks, which --num-nodes ({options.num_nodes}) must divide"]
        )
    try:
        return L.Trainer(
            accelerator=options.accelerator,
            devices=world // options.num_nodes,
            num_nodes=options.num_nodes,
            precision=options.precision,
            strategy="auto" if layout is None else layout.strategy(_TIMEOUT_SECONDS),
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
            callbacks=callback,
        )
    except MisconfigurationException as error:
        told = f"--accelerator ({options.accelerator}), --precision ({options.precision})"
        raise UsageError(
            [f"{told}: {' '.join(str(error).split())}; 'cpu' is everywhere, and 'auto' takes what is there"]
        ) from error
