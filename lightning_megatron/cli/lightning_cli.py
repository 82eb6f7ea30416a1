"""`MegatronCLI`: LightningCLI that reads the hyper-parameters of a checkpoint directory, as it does those of a file."""

from pathlib import Path
from typing import Any

from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI

from lightning_megatron.checkpoint import is_checkpoint, read_meta
from lightning_megatron.trainer import ConfigurationError
from lightning_megatron.trainer.checkpointing.hyper_parameters import KEYS
from lightning_megatron.trainer.setup.checks import is_named_checkpoint


class MegatronCLI(LightningCLI):
    """LightningCLI with which `--ckpt_path=DIR.ckpt` restores hyper-parameters: the model is built as the checkpoint's.

    What LightningCLI itself does with files holds for directories: the hyper-parameters that `save_hyperparameters`
    saved come before those of the command line.
    """

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        super().parse_arguments(parser, args)
        subcommand = self.config.get("subcommand")
        path = self.config[subcommand].get("ckpt_path") if subcommand else None
        if path is None or is_named_checkpoint(str(path)) or Path(path).is_file() or not is_checkpoint(path):
            return
        try:
            meta = read_meta(path)
        except (ValueError, OSError) as error:
            raise ConfigurationError(f"ckpt_path ({path}) cannot be read as a checkpoint: {error}") from error
        saved_class = meta.get(KEYS[0], {}).get("_class_path")
        chosen = self.config[subcommand].get("model")
        chosen_class = None if chosen is None else chosen.get("class_path")
        if saved_class is not None and saved_class != chosen_class:
            # A name of a checkpoint is never imported.
            raise ConfigurationError(
                f"ckpt_path ({path}) was saved by a {saved_class}, and the model is {chosen_class or 'not chosen'}; "
                f"give --model={saved_class} if you trust the file"
            )
        if saved := self.model_options(meta.get(KEYS[0], {})):
            self.config = parser.parse_object({subcommand: {"model": saved}}, self.config)

    def model_options(self, saved: dict[str, Any]) -> dict[str, Any]:
        """Hyper-parameters of a checkpoint as options of the model."""
        class_path = saved.get("_class_path")
        # Those with an underscore are notes of LightningCLI to itself.
        saved = {name: value for name, value in saved.items() if not name.startswith("_")}
        return saved if class_path is None else {"class_path": class_path, "dict_kwargs": saved}
