"""The optimizer of a run to plan, made on a rank's part of a model as `fit` makes it."""

import hashlib
import inspect
import json
import pkgutil
from argparse import ArgumentError
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from jsonargparse import Namespace
from lightning.pytorch.cli import LightningArgumentParser
from torch import nn
from torch.optim import Optimizer

from lightning_megatron.cli.bounded_yaml import BOUNDED_YAML
from lightning_megatron.cli.option_errors import about_option
from lightning_megatron.cli.recipe_optimizer import OPTIMIZER, add_optimizer_options, chosen_optimizer
from lightning_megatron.lightning_modules.adamw import AdamWConfig, optimizer_of
from lightning_megatron.planner.expected_step import step_of
from lightning_megatron.planner.memory_tracker import MemoryTracker
from lightning_megatron.planner.step_work import MakeOptimizer
from lightning_megatron.testing.telling import told
from lightning_megatron.trainer import ConfigurationError
from lightning_megatron.trainer.setup.whole_shapes import WholeShapes

# Schedules of a learning rate want an end that is far away.
_MANY_STEPS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class RecipeOptimizer:
    """Makes the optimizer of a recipe: that of the ready modules, or one that the recipe chooses."""

    config: AdamWConfig
    """Configuration of the module's own optimizer."""
    chosen: str = ""
    """Class and settings of another one, as JSON; empty: the module's own."""
    source: str = ""
    """Digest of the file of that class."""

    def __call__(self, module: nn.Module) -> Optimizer:
        """The optimizer of the parameters of a module."""
        with WholeShapes(module):
            if self.chosen:
                return chosen_optimizer(module, json.loads(self.chosen))
            return optimizer_of(module, self.config)


@dataclass(frozen=True)
class ConfiguredOptimizer:
    """Makes the optimizer that a LightningModule's own configure_optimizers returns."""

    def __call__(self, module: nn.Module) -> Optimizer:
        """The optimizer of the parameters of a module. Raises ValueError where it makes several."""
        assert isinstance(module, pl.LightningModule)
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            max_steps=_MANY_STEPS,
            # Steps would be counted by the data.
            max_epochs=-1,
            logger=False,
            enable_checkpointing=False,
        )
        trainer.strategy.connect(module)
        module.trainer = trainer
        try:
            with WholeShapes(module):
                trainer.strategy.setup_optimizers(trainer)
        finally:
            # Without one a step logs nothing.
            module.trainer = None
        found = trainer.strategy.optimizers
        if len(found) != 1:
            raise ValueError(f"configure_optimizers makes {len(found)} optimizers, and one is planned")
        return found[0]


def recipe_optimizer(config: AdamWConfig, chosen: Any) -> RecipeOptimizer:
    """The optimizer of a recipe, in which `chosen` takes the place of the module's own. Raises ValueError with what is
    wrong with it."""
    if not chosen:
        return RecipeOptimizer(config=config)
    parser = LightningArgumentParser(exit_on_error=False, parser_mode=BOUNDED_YAML)
    add_optimizer_options(parser)
    try:
        parsed: Namespace = parser.parse_object({OPTIMIZER: chosen})
    except ArgumentError as error:
        raise ValueError(about_option(str(error), [OPTIMIZER])) from error
    made: Mapping[str, Any] = parsed[OPTIMIZER].as_dict()
    kind = pkgutil.resolve_name(made["class_path"])
    source = Path(inspect.getfile(kind)).read_bytes()
    return RecipeOptimizer(config=config, chosen=json.dumps(made), source=hashlib.sha256(source).hexdigest())


def step_fault(make: MakeOptimizer, module: nn.Module) -> str:
    """Why an optimizer does not step a module that is on the meta device; empty where it does. Raises ValueError for
    settings that `fit` refuses."""
    try:
        with MemoryTracker(next(module.parameters()).device) as tracker:
            step_of(make(module), tracker)
    except ConfigurationError as error:
        raise ValueError(str(error)) from error
    except Exception as error:
        return " ".join(told(error).split())
    return ""
