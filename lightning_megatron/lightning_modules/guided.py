"""`GuidedModule`: the base of modules that train a causal model of transformers beside a frozen one.

Under pipeline parallelism the trained model is cut over the stages, and the frozen one is whole on each: only the last
stage calls it in training. Over tensor-parallel ranks both are cut.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_megatron import hf
from lightning_megatron.any_module.layer_list import layers_of
from lightning_megatron.any_module.plan import ModelPlan
from lightning_megatron.lightning_modules.causal import WEIGHT_DTYPES, CausalModule
from lightning_megatron.trainer import ConfigurationError


class GuidedModule(CausalModule):
    """A causal model that is trained by what a frozen one, the `guide`, says of the same tokens.

    A subclass says where the frozen weights are (`guide_path`); with None there is no such model.
    """

    def __init__(self, path: str, **options: Any) -> None:
        super().__init__(path, **options)
        # The frozen model, from `configure_model` on.
        self.guide: Any = None

    @property
    def guide_path(self) -> str | None:
        """Folder of the frozen model; None where there is none."""
        raise NotImplementedError

    def _guide_faults(self, path: str) -> list[str]:
        """The fault of a frozen model in a folder that is not there, or that has another vocabulary."""
        try:
            vocab_size = hf.read_config(path).get_text_config().vocab_size
        except ValueError as error:
            return [f"the frozen model: {error}"]
        if vocab_size == self.vocab_size:
            return []
        return [
            f"the frozen model in {path} has a vocabulary of {vocab_size}, and the model in {self.path} one of "
            f"{self.vocab_size}; they must have the same tokenizer and vocabulary"
        ]

    def configure_model(self) -> None:
        super().configure_model()
        if self.guide is None and self.guide_path is not None:
            precision = str(self.trainer.precision) if self._trainer is not None else ""
            try:
                guide = hf.load_unchanged(self.guide_path, WEIGHT_DTYPES.get(precision))
            except ValueError as error:
                raise ConfigurationError(str(error)) from error
            if precision == "64-true":
                guide.set_experts_implementation("eager")
            self.guide = guide.train().requires_grad_(False)

    def ask_guide(self, tokens_BT: Tensor) -> Any:
        """The output of the frozen model for tokens [batch, sequence], without dropout and without gradients.

        Waits for tp, so all of its ranks must call it; in training after the trained model, so that the last stage of a
        pipeline alone does.
        """
        # Lightning sets the mode of all networks, and would warn of one that is evaluated when training starts.
        self.guide.eval()
        with torch.no_grad():
            return self.guide(input_ids=tokens_BT, use_cache=False)

    def model_plan(self) -> ModelPlan:
        """The plan that cuts the layers of the trained model over stages, and not those of the frozen one."""
        if self.model is None or self.guide is None:
            return ModelPlan()
        lists = dict.fromkeys(f"model.{name}".rpartition(".")[0] for name in layers_of(self.model))
        return replace(ModelPlan(), layers=tuple(lists))
