"""`run_recipe`: a LightningCLI of one module and one data module, that ends a user's mistake with one clear message.

| exit code | |
|---|---|
| 2 | the configuration cannot run, or a file or the memory is not to be had: errors are printed, without a traceback |
| 1 | anything else that fails, with its traceback |
"""

import inspect
import os
import sys
import time
import warnings
from argparse import ArgumentError
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, NoReturn, get_args

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ProgressBar, TQDMProgressBar
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.plugins.precision import TransformerEnginePrecision
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_megatron.checkpoint import is_checkpoint, read_meta
from lightning_megatron.cli.bounded_yaml import BOUNDED_YAML, require_readable_configs
from lightning_megatron.cli.lightning_lines import leave_out_what_is_no_news
from lightning_megatron.cli.list_entries import change_entries, entry_options, telling_entries
from lightning_megatron.cli.option_errors import STRATEGY, about_option, error_lines, settings_faults, settings_of
from lightning_megatron.cli.recipe_optimizer import OPTIMIZER, SCHEDULER, add_optimizer_options, use_optimizer
from lightning_megatron.cli.short_run import shorten_warmup
from lightning_megatron.cli.usage import USAGE_ERROR, UsageError, mistake_of, shortened
from lightning_megatron.cli.written_files import remove_empty_logs, written_files
from lightning_megatron.lightning_modules import AdamWConfig
from lightning_megatron.lightning_modules.data_module import config_of
from lightning_megatron.lightning_modules.final_checkpoint import FinalCheckpoint
from lightning_megatron.mesh import Sizes
from lightning_megatron.precision.fp8 import Fp8Config, engine_faults
from lightning_megatron.rules.limits import MOST_PROCESSES, limit_faults, model_limit_faults, shown
from lightning_megatron.trainer import ConfigurationError, MegatronStrategy
from lightning_megatron.trainer.checkpointing.hyper_parameters import warn_of_other_hyper_parameters
from lightning_megatron.trainer.checkpointing.single_file import why_unread
from lightning_megatron.trainer.setup.checks import DescribesData, architecture_of, is_named_checkpoint, trainer_faults
from lightning_megatron.trainer.setup.memory_checks import memory_faults

_PARSER = {"exit_on_error": False, "allow_abbrev": False, "parser_mode": BOUNDED_YAML}
# Seeds of torch, NumPy and Python alike.
_MOST_SEED = 2**32 - 1
# Options of modules that read their first weights from folders.
_FOLDERS = ("path", "language", "vision")
# Options of the Trainer that `barebones` does not take and configurations have, each with what turns it off.
_NOT_BAREBONES = {"logger": "false", "callbacks": "null", "log_every_n_steps": "0"}
# Seconds that the rank which reports an error gets to end before the others do.
_SECONDS_TO_REPORT = 10.0


class RecipeCLI(LightningCLI):
    """`fit`, `validate`, `test` and `predict` of fixed classes, with `links` from one option to another.

    Errors of the options are raised: as UsageError where they cannot be read, else as ConfigurationError.
    """

    def __init__(
        self,
        module: Callable[..., L.LightningModule],
        data: type[L.LightningDataModule],
        *,
        links: Mapping[str, str],
        made_links: Mapping[str, str] | None = None,
        callbacks: Mapping[str, type[L.Callback]],
        args: Sequence[str] | None,
        run: bool = True,
    ) -> None:
        """Without `run` the options have no subcommand, and module, data and Trainer are made and left alone."""
        given = self._given = list(sys.argv[1:] if args is None else args)
        self._subcommand = given[0] if given and given[0] in LightningCLI.subcommands() else None
        self._links, self._made_links = links, made_links or {}
        self._callbacks: dict[str, type[L.Callback]] = {"final_checkpoint": FinalCheckpoint, **callbacks}
        self._data_config = config_of(data)
        # Classes that the options of a run configure.
        self._owners: dict[str, Callable[..., Any]] = {
            "model": module,
            "data": self._data_config or data,
            STRATEGY: MegatronStrategy,
        }
        # Of all options.
        self._names = [f"{STRATEGY}.{name}" for name in inspect.signature(MegatronStrategy).parameters]
        super().__init__(
            module,
            data,
            seed_everything_default=0,
            auto_configure_optimizers=False,
            # The options of a run are saved with its logs; an older run's are no reason to stop.
            save_config_kwargs={"overwrite": True},
            # Errors of an option are raised, and not shown below the list of all options.
            # Options must be spelled out: a part of a name might become that of a new option.
            parser_kwargs={**_PARSER, **dict.fromkeys(self.subcommands(), _PARSER)},
            args=list(args) if args is not None else None,
            run=run,
        )

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """The subcommand that the command line begins with, else all: building the parser of each one is slow."""
        named = super().subcommands()
        return named if self._subcommand is None else {self._subcommand: named[self._subcommand]}

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        if self._data_config is None:
            super().add_core_arguments_to_parser(parser)
            return
        parser.add_lightning_class_args(self.trainer_class, "trainer")
        parser.add_lightning_class_args(self._model_class, "model")
        # The options of a data module are the fields of its configuration: --data.path, not --data.config.path.
        parser.add_class_arguments(self._data_config, "data", sub_configs=True)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        for source, target in self._links.items():
            parser.link_arguments(source, target)
        for source, target in self._made_links.items():
            parser.link_arguments(source, target, apply_on="instantiate")
        for name, callback in self._callbacks.items():
            parser.add_lightning_class_args(callback, name)
        add_optimizer_options(parser)
        self._names += parser.get_defaults(skip_validation=True).keys()

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        try:
            # Lightning's CLI has parsers of subcommands only where it runs one of them.
            parsers = (parser, *vars(self).get("_subcommand_parsers", {}).values())
            sections = sorted({name for one in parsers for name in one.groups or ()})
            require_readable_configs(args if isinstance(args, list) else sys.argv[1:], sections)
            own, others = entry_options(self._given)
            if own:
                self.config = parser.parse_args(others)
                change_entries(self.config[self._subcommand] if self._subcommand else self.config, own)
                with telling_entries(own):
                    parser.validate(self.config)
            else:
                super().parse_arguments(parser, args)
        except ArgumentError as error:
            raise UsageError([about_option(str(error), self._names)]) from error
        except ValueError as error:
            raise UsageError([str(error)]) from error

    def _set_seed(self) -> None:
        seed = self._get(self.config, "seed_everything")
        if not isinstance(seed, bool) and seed is not None and not 0 <= seed <= _MOST_SEED:
            raise UsageError([f"--seed_everything ({shown(seed)}) must be at least 0 and at most {_MOST_SEED}"])
        super()._set_seed()

    def before_instantiate_classes(self) -> None:
        if self.subcommand != "fit" or not _speaks():
            # The warning is about the best checkpoints of a run, which other subcommands neither read nor save.
            # One rank alone gives it of a run that goes on.
            warnings.filterwarnings("ignore", "The dirpath has changed", UserWarning)
        if self.subcommand in ("validate", "test", "predict") and self._has_new_weights():
            rank_zero_warn(
                f"{self.subcommand} without --ckpt_path runs a model with new weights, which has learnt nothing; give "
                "the checkpoint of a run, as runs/toy/version_0/checkpoints/step=200.ckpt is one"
            )
        if self.subcommand != "fit" or self._get(self.config, OPTIMIZER):
            return
        optimizer = inspect.signature(self._owners["model"]).parameters.get("optimizer")
        settings = self._get(self.config, "model.optimizer")
        if settings is not None and optimizer is not None and optimizer.annotation is AdamWConfig:
            shorten_warmup(settings, self._get(self.config, "trainer.max_steps"), self._given)

    def _has_new_weights(self) -> bool:
        """Whether no option names weights to begin with."""
        folders = () if self._get(self.config, "model.from_scratch") else _FOLDERS
        return not any(self._get(self.config, name) for name in ("ckpt_path", *(f"model.{name}" for name in folders)))

    def _run_subcommand(self, subcommand: str) -> None:
        try:
            super()._run_subcommand(subcommand)
        except (ConfigurationError, MisconfigurationException):
            remove_empty_logs(self.trainer)
            raise

    def after_fit(self) -> None:
        for line in written_files(self.trainer):
            rank_zero_info(line)

    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
            if self._data_config is not None:
                self.datamodule = self._datamodule_class(self.datamodule)
            use_optimizer(self.model, *(self._get(self.config_init, name) for name in (OPTIMIZER, SCHEDULER)))
        except ConfigurationError:
            raise
        except ValueError as error:
            # Dataclasses check themselves, and so does the Trainer. The first error hides the others.
            settings, first = self._faults_of_settings(), error_lines(str(error))
            found = settings + [fault for fault in first if fault not in settings]
            raise ConfigurationError(found + self._faults_of_data()) from error

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        devices = self._get(self.config, "trainer.devices")
        # A number is text here, for the option takes names too.
        devices = int(devices) if str(devices).isdecimal() else 1
        if faults := limit_faults({"trainer.devices": devices}, MOST_PROCESSES):
            # Lightning makes an object for each.
            raise ConfigurationError(faults)
        off = [
            f"--trainer.{name} {off}"
            for name, off in _NOT_BAREBONES.items()
            if self._get(self.config, f"trainer.{name}")
        ]
        if off and self._is_barebones():
            raise ConfigurationError(
                "trainer.barebones (true) is a run without logger, callbacks and logged steps, and the configuration "
                f"has some of them; add {' '.join(off)}"
            )
        try:
            return super().instantiate_trainer(**self._with_bar(), **kwargs)
        except MisconfigurationException as error:
            if "backend found" not in str(error):
                raise
            accelerator = self._get(self.config, "trainer.accelerator")
            raise ConfigurationError(
                f"trainer.accelerator ({accelerator!r}) is not on this machine; use 'cpu', or 'auto' for what is there"
            ) from error
        except (TypeError, ImportError, OverflowError, OSError, RuntimeError) as error:
            # Lightning makes its own plugin of Transformer Engine before it calls the strategy.
            is_by_precision = self._get(self.config, "trainer.precision") == TransformerEnginePrecision.precision
            if is_by_precision and (faults := engine_faults(Fp8Config(engine="transformer_engine"))):
                raise ConfigurationError(faults) from error
            if isinstance(error, (OSError, RuntimeError)):
                raise
            # A number of devices that is none, an accelerator that is not installed.
            raise ConfigurationError(f"the Trainer cannot be made: {' '.join(str(error).split())}") from error

    def _is_barebones(self) -> bool:
        return bool(self._get(self.config, "trainer.barebones"))

    def _with_bar(self) -> dict[str, list[L.Callback]]:
        """The callbacks of the Trainer with a progress bar, where the options have none and do not turn it off."""
        # Lightning takes rich's where that is installed, which counts epochs to -2 in a run that steps end.
        given = self._get(self.config_init, "trainer.callbacks") or []
        callbacks: list[L.Callback] = given if isinstance(given, list) else [given]
        shows = self._get(self.config, "trainer.enable_progress_bar") is not False and not self._is_barebones()
        if not shows or any(isinstance(one, ProgressBar) for one in callbacks):
            return {}
        return {"callbacks": [*callbacks, TQDMProgressBar()]}

    def _faults_of_settings(self) -> list[str]:
        """Errors of the dataclasses that the module, the data and the strategy take, about their values."""
        faults = []
        for owner, kind in self._owners.items():
            for name, parameter in inspect.signature(kind).parameters.items():
                settings = self._get(self.config, f"{owner}.{name}")
                if settings is not None and _is_settings(parameter.annotation):
                    faults += settings_faults(parameter.annotation, settings)
        return faults

    def _faults_of_data(self) -> list[str]:
        """Errors of the data, which a module that cannot be made would hide until it is mended."""
        settings = self._get(self.config, "data")
        # What comes from the module is not there.
        is_whole = not any(target.startswith("data.") for target in self._made_links.values())
        if self._data_config is None or not is_whole or settings_faults(self._data_config, settings):
            return []
        data = self._datamodule_class(settings_of(self._data_config, settings))
        return data.faults() if isinstance(data, DescribesData) else []

    def after_instantiate_classes(self) -> None:
        path = self._get(self.config, "ckpt_path")
        if self.trainer is None:
            # Whoever wants the options alone makes none.
            return
        if path is not None and not is_named_checkpoint(str(path)) and is_checkpoint(path):
            try:
                meta = read_meta(path)
            except ValueError as error:
                raise ConfigurationError(str(error)) from error
            # The options of a run count, as those of its optimizer and sampling must; but not in silence.
            warn_of_other_hyper_parameters(self.model, meta, path)
        # MegatronStrategy reports this with all other errors of the run.
        if isinstance(self.trainer.strategy, MegatronStrategy):
            return
        if path is not None:
            _require_checkpoint(str(path))
        # Without a subcommand nothing runs, and the model may still be made smaller.
        if self.subcommand is not None and self.trainer.strategy.root_device.type == "cpu":
            model, precision = architecture_of(self.model), str(self.trainer.precision)
            faults = trainer_faults(self.trainer) + ([] if model is None else list(model_limit_faults(model)))
            if found := faults + memory_faults(model, Sizes(), num_processes=1, precision=precision):
                raise ConfigurationError(found)

    def _parse_ckpt_path(self) -> None:
        # LightningCLI looks into a checkpoint for options, before anything has checked that it is one.
        try:
            super()._parse_ckpt_path()
        except ConfigurationError:
            raise
        except Exception as error:
            # A file that is no checkpoint can end in any error of the unpickler.
            path = self.config[self.config.subcommand].get("ckpt_path")
            reason = why_unread(path, error)
            raise ConfigurationError(f"ckpt_path ({path}) cannot be read as a checkpoint: {reason}") from error


def run_recipe(
    module: Callable[..., L.LightningModule],
    data: type[L.LightningDataModule],
    *,
    links: Mapping[str, str],
    made_links: Mapping[str, str] | None = None,
    callbacks: Mapping[str, type[L.Callback]],
    args: Sequence[str] | None = None,
) -> None:
    """Runs the command line of a recipe: `args`, or those that the script was called with.

    `module` is the class of the module, or a function that makes it of its options.
    `links` takes options from others ("model.config.vocab_size": "data.vocab_size"), `made_links` from attributes of
    the module that is made; `callbacks` are always there and take options under their names. Exits with 2 on a mistake
    of the user's.
    """
    leave_out_what_is_no_news()
    _exit_on_mistake(
        lambda: RecipeCLI(module, data, links=links, made_links=made_links, callbacks=callbacks, args=args)
    )


def _exit_on_mistake(run: Callable[[], Any]) -> None:
    try:
        run()
    except (ConfigurationError, MisconfigurationException, UsageError) as error:
        _exit_with(str(error))
    except Exception as error:
        if not (message := mistake_of(error)):
            raise
        _exit_with(message)


def _exit_with(message: str) -> NoReturn:
    # Ranks find the same error together.
    if _speaks():
        print(f"error: {shortened(message)}", file=sys.stderr, flush=True)
    else:
        _wait_for_the_parent()
    sys.exit(USAGE_ERROR)


def _speaks() -> bool:
    """Whether this is the rank of its machine that prints what all of them have to say."""
    return os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) == "0"


def _wait_for_the_parent() -> None:
    # Lightning's launcher starts the other ranks from the first, and kills it when one of them ends before it: its
    # message and its exit code would be lost.
    parent, end = os.getppid(), time.monotonic() + _SECONDS_TO_REPORT
    while os.getppid() == parent and time.monotonic() < end:
        time.sleep(0.05)


def _is_settings(annotation: Any) -> bool:
    return any(is_dataclass(kind) for kind in (annotation, *get_args(annotation)))


def _require_checkpoint(path: str) -> None:
    if is_named_checkpoint(path) or "://" in path:
        return
    if not os.path.exists(path):
        raise ConfigurationError(f"ckpt_path ({path}) does not exist; give a checkpoint, or leave it out")
