"""Families of transformers' models as modules that train tiny twins of them, each with batches of its own kind."""

from collections.abc import Mapping
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
)
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from lightning_megatron import ModelPlan
from lightning_megatron.testing.tiny import twin_of
from tests.any_module.model_settings import (
    DRAWING,
    FEATURES,
    GRIDS,
    IMAGE,
    IMAGE_TOKEN,
    ROWS,
    SETTINGS,
    SQUARES,
    TOKENS,
    VOCABULARY,
    WHOLE,
)
from tests.any_module.network_families import Family, Networks


class Causal(L.LightningModule):
    """A model of transformers as it is, trained on its own loss."""

    auto: Any = AutoModelForCausalLM
    types: Mapping[str, Any] = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    layouts: tuple[str, ...] = ("pp2", "pp2vp2-zb_v", "tp2", "tp2-sp", "dp2pp2tp2-zero", "cp2", "ep2")
    settings: Mapping[str, dict[str, Any]] = {"reformer": {"is_decoder": True}}
    """Values of a type that are others in another family."""

    def __init__(self, model_type: str) -> None:
        super().__init__()
        self.model_type = model_type
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is None:
            torch.manual_seed(1)
            self.model = self.auto.from_config(config_of(self.model_type, **self.settings.get(self.model_type, {})))
            if self.model_type in DRAWING:
                self.model.eval()
            norms = [one for one in self.model.modules() if isinstance(one, nn.modules.batchnorm._BatchNorm)]
            if norms:
                self._freeze(norms)

    @torch.no_grad()
    def _freeze(self, norms: list[Any]) -> None:
        """Gives batch norms the statistics of one batch: those of each microbatch would be others."""
        for norm in norms:
            norm.momentum = 1.0
        dtype = next(self.model.parameters()).dtype
        batch = self.batches(self.model_type)[0]
        self.model(**{name: one.to(dtype) if one.is_floating_point() else one for name, one in batch.items()})
        for norm in norms:
            norm.eval()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return self.model(**batch).loss

    def configure_optimizers(self) -> Any:
        # Gradients that are zero but for rounding, as those of keys' biases, move weights by what eps makes of them.
        return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=1e-6)

    @classmethod
    def batches(cls, model_type: str) -> list[dict[str, Tensor]]:
        """The batches that train a type."""
        found = batches()
        generator = torch.Generator().manual_seed(4)
        for name, shape in FEATURES.get(model_type, {}).items():
            for batch in found:
                batch[name] = torch.randn(ROWS, *shape, generator=generator)
        return found


class Masked(Causal):
    """An encoder, whose loss is of some tokens, where others stand or a mask."""

    auto = AutoModelForMaskedLM
    types = modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    layouts = ("pp2", "pp2vp2-zb_v", "tp2", "tp2-sp", "dp2pp2tp2-zero", "cp2")
    settings: Mapping[str, dict[str, Any]] = {}

    @classmethod
    def batches(cls, model_type: str) -> list[dict[str, Tensor]]:
        found = batches()
        for batch in found:
            labels = batch["input_ids"].clone()
            labels[:, 1::3] = -100
            batch |= {"labels": labels, "attention_mask": (labels.cumsum(1) >= 0).long()}
            batch["attention_mask"][1::3, 8:] = 0
            batch["labels"][1::3, 8:] = -100
        return found


class Translation(Causal):
    """An encoder and a decoder; the layers of the one that is larger are cut."""

    auto = AutoModelForSeq2SeqLM
    types = modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    layouts = ("pp2", "pp2vp2-zb_v", "tp2", "tp2-sp", "dp2pp2tp2-zero", "cp2")


class Images(Causal):
    """A model that tells what an image shows."""

    auto = AutoModelForImageClassification
    # The logits of a new efficientnet are zero, and its gradients the noise of rounding.
    types = dict.fromkeys(set(modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES) - {"efficientnet"})
    layouts = ("pp2", "pp2vp2-zb_v", "tp2", "dp2pp2tp2-zero")

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        found = self.model(**batch)
        # A type may leave the loss to others.
        return found.loss if "loss" in found else cross_entropy(found.last_hidden_state, batch["labels"])

    @classmethod
    def batches(cls, model_type: str) -> list[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(3)
        found = []
        for number in range(3):
            images = torch.randn(ROWS, 3, IMAGE, IMAGE, generator=generator)
            batch = {"pixel_values": images, "labels": (torch.arange(ROWS) + number) % 4}
            if model_type == "imagegpt":
                # Its images are colours among few, pixel by pixel.
                batch["input_ids"] = (batch.pop("pixel_values")[:, 0, :4, :4].flatten(1).sigmoid() * VOCABULARY).long()
            elif model_type == "siglip2":
                # Its images are patches of a grid, of any height and width.
                batch["pixel_values"] = images.view(ROWS, 16, -1)
                batch["spatial_shapes"] = torch.tensor([[4, 4], [2, 8]]).repeat(ROWS // 2, 1)
                batch["pixel_attention_mask"] = torch.ones(ROWS, 16)
            found.append(batch)
        return found


class ImageText(Causal):
    """A language model that sees images: each row has one, whose features stand in the places of its tokens."""

    auto = AutoModelForImageTextToText
    # Those that take images as [rows, 3, 32, 32], and as patches of a grid.
    types = dict.fromkeys((*SQUARES, *GRIDS))
    layouts = ("pp2", "pp2vp2-zb_v", "tp2", "dp2pp2tp2-zero", "cp2", "ep2")

    def model_plan(self) -> ModelPlan:
        """Cuts the language model, which is larger than what sees in all but a twin."""
        decoder = None if self.model is None else self.model.get_decoder()
        names = [name for name, module in self.named_modules() if module is decoder]
        return ModelPlan(layers=tuple(f"{name}.layers" for name in names))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        if "image_grid_thw" in batch:
            batch = {**batch, "pixel_values": batch["pixel_values"].flatten(0, 1)}
        return super().training_step(batch, batch_idx)

    @classmethod
    def batches(cls, model_type: str) -> list[dict[str, Tensor]]:
        found = super().batches(model_type)
        generator = torch.Generator().manual_seed(4)
        shape, grid = (3, IMAGE, IMAGE), torch.tensor([[1, 4, 4]])
        if model_type in GRIDS:
            vision = config_of(model_type).vision_config
            shape = (16, 3 * getattr(vision, "temporal_patch_size", 1) * vision.patch_size**2)
        for batch in found:
            batch["pixel_values"] = torch.randn(ROWS, *shape, generator=generator)
            if model_type in GRIDS:
                batch["image_grid_thw"] = grid.repeat(ROWS, 1)
        count = cls._num_image_tokens(model_type, {name: one[:1] for name, one in found[0].items()})
        images = torch.full((ROWS, count), IMAGE_TOKEN)
        for batch in found:
            tokens, labels = batch["input_ids"].clamp(min=8), batch["labels"]
            batch["input_ids"] = torch.cat((tokens[:, :2], images, tokens[:, 2:]), 1)
            batch["labels"] = torch.cat((labels[:, :2], images * 0 - 100, labels[:, 2:]), 1)
            batch["mm_token_type_ids"] = (batch["input_ids"] == IMAGE_TOKEN).long()
        return found

    @classmethod
    def _num_image_tokens(cls, model_type: str, row: dict[str, Tensor]) -> int:
        """Number of features that a type makes of an image."""
        module = cls(model_type)
        module.configure_model()
        find = getattr(module.model, "get_image_features", None) or module.model.model.get_image_features
        given = {"pixel_values": row["pixel_values"]}
        if model_type in GRIDS:
            given = {"pixel_values": row["pixel_values"][0], "image_grid_thw": row["image_grid_thw"]}
        with torch.no_grad():
            found = find(**given)
        found = getattr(found, "pooler_output", found)
        width = module.model.config.get_text_config().hidden_size
        return int(sum(one.numel() for one in tree_leaves(found)) // width)


FAMILIES: dict[str, tuple[str, Family]] = {
    "causal": ("Causal models", Causal),
    "masked": ("Encoders", Masked),
    "translation": ("Encoder-decoders", Translation),
    "images": ("Classifiers of images", Images),
    "image-text": ("Language models that see images", ImageText),
    "networks": ("Networks of other kinds", Networks()),
}


def config_of(model_type: str, **settings: Any) -> Any:
    """The configuration of a type, small, without dropout."""
    settings = {**SETTINGS.get(model_type, {}), **settings}
    config = twin_of(CONFIG_MAPPING[model_type](**settings))
    for name, value in WHOLE.get(model_type, {}).items():
        setattr(config, name, value)
    for one in _all_of(config):
        for name, value in list(vars(one).items()):
            if "drop" in name and isinstance(value, (float, list)):
                setattr(one, name, [0.0] * len(value) if isinstance(value, list) else 0.0)
        for number, name in enumerate(("image", "video", "vision_start", "vision_end")):
            for key in (f"{name}_token_id", f"{name}_token_index"):
                if hasattr(one, key):
                    setattr(one, key, IMAGE_TOKEN + number)
        for name, token in (("pad_token_id", 0), ("bos_token_id", 1), ("eos_token_id", 2)):
            setattr(one, name, token)
        if getattr(one, "decoder_start_token_id", None) is None:
            one.decoder_start_token_id = 0
        rope = getattr(one, "rope_parameters", None) or {}
        if model_type in GRIDS and rope:
            # Of a head's pairs of features.
            head_dim = getattr(one, "head_dim", None) or one.hidden_size // one.num_attention_heads
            pairs = int(head_dim * rope.get("partial_rotary_factor", 1.0)) // 2
            rope["mrope_section"] = [pairs // 2, pairs - pairs // 2 - pairs // 4, pairs // 4]
        # Numbers of tokens of an image, which gemma makes of all of its patches.
        sizes = {"image_size": IMAGE, "patch_size": IMAGE // 4, "mm_tokens_per_image": 4}
        for name, size in sizes.items():
            given = getattr(one, name, None)
            if name not in settings and isinstance(given, int):
                setattr(one, name, size)
            elif name == "image_size" and isinstance(given, (list, tuple)):
                setattr(one, name, [size] * len(given))
        if one is config or hasattr(one, "vocab_size"):
            one.vocab_size = VOCABULARY
        one.use_cache = False
        # The grouped products of experts know no float64.
        one._experts_implementation = "eager"
    config.num_labels = 4
    return config


def _all_of(config: Any) -> list[Any]:
    """A configuration and all inside of it."""
    inner = {id(one): one for one in vars(config).values() if isinstance(one, PreTrainedConfig)}
    return [config, *(found for one in inner.values() for found in _all_of(one))]


def batches() -> list[dict[str, Tensor]]:
    """Three batches of tokens [8, 12], labels ragged."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for _ in range(3):
        tokens = torch.randint(3, VOCABULARY, (ROWS, TOKENS), generator=generator)
        labels = tokens.clone()
        labels[::2, 7:] = -100
        found.append({"input_ids": tokens, "labels": labels})
    return found
