"""LLaVA: a GPT that reads images, as parts `vision.*`, `projector` and those of the GPT, under the GPT's names.

    pixels ─ vision.embedding ─ vision.layers.0 ... ─ projector ─┐
    tokens ───────────────────────────────────────── embedding ──┴─ layers.0 ... ─ final_norm ─ head
    └──────────────────── stage 0 ──────────────────────────────┘

The features of an image replace its image tokens: the k-th feature of a row's images replaces the k-th image token of
the row. The tower is on the first stage; stages exchange what they exchange in a GPT. Ranks of cp encode different
images and gather their features, of which each rank needs those of its own tokens; gradients go back the same way. A
rank without an image encodes an empty one, which nobody reads: its gradients are zeros, and a step is the same on every
rank whatever the batch.

N images of a call, P features of an image, F feature rows of all ranks, T tokens of the stream, H hidden, B batch,
S sequence.
Source: Liu et al., arXiv 2304.08485, section 4.1; arXiv 2310.03744, section 3.3 (the projector of two layers).
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_megatron.comm import differentiable, rng
from lightning_megatron.comm.host_numbers import on_device
from lightning_megatron.comm.p2p import Payload
from lightning_megatron.comm.rng import Draws
from lightning_megatron.config_dataclass import config_dataclass
from lightning_megatron.mesh import Axis, Mesh, Sizes, ambient_mesh
from lightning_megatron.models.embedding import Embedding
from lightning_megatron.models.gpt import GPTConfig, GPTInputs, GPTModel
from lightning_megatron.models.images import Images, images_by_row
from lightning_megatron.models.vision import VisionConfig, image_stream, vision_parts
from lightning_megatron.pipeline.module import Part
from lightning_megatron.pipeline.ragged import Ragged
from lightning_megatron.sharding import Initial
from lightning_megatron.tensor.activation import Activation, activate
from lightning_megatron.tensor.cross_entropy import IGNORED
from lightning_megatron.tensor.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.transformer.decode_state import DecodeState
from lightning_megatron.transformer.position_cache import PositionCache
from lightning_megatron.transformer.tokens import Tokens

_VISION, _PROJECTOR, _LANGUAGE = "vision", "projector", "language"
PARTS = (_VISION, _PROJECTOR, _LANGUAGE)
"""What can be frozen."""

_PROJECTOR_ACTIVATIONS = ("gelu", "gelu_tanh", "quick_gelu")
# Rows that an error names.
_SHOWN = 5


@config_dataclass
class LlavaConfig(GPTConfig):
    """Architecture of a LLaVA: the fields of its language model, a GPT, and how it sees."""

    predicts_further: ClassVar[bool] = False

    vision: VisionConfig
    """Architecture of the vision tower."""
    image_token: int
    """Token id that stands for one feature of an image; it need not be in the vocabulary."""
    feature_layer: int = -2
    """Layer of the vision tower whose output is taken as features, counted as in a list of the embedding's output and
    each layer's: -1 is the last layer, -2 the one before it."""
    keeps_class_token: bool = False
    """Whether the class token's output is a feature too, the first of its image."""
    projector_activation: Activation = "gelu"
    """Activation between the two linears of the projector from features to hidden states."""
    projector_bias: bool = True
    """Whether both linears of the projector have a bias."""

    @classmethod
    def of(cls, language: GPTConfig, **own: Any) -> "LlavaConfig":
        """The configuration with that language model; `own` are the fields that a LLaVA has beyond it."""
        return cls(**_fields_of(language), **own)

    @property
    def language(self) -> GPTConfig:
        """The language model alone."""
        return GPTConfig(**_fields_of(self))

    @property
    def num_vision_layers(self) -> int:
        """Layers of the tower that images go through; later ones are not used."""
        return self.feature_layer + (self.vision.num_layers + 1 if self.feature_layer < 0 else 0)

    @property
    def features_per_image(self) -> int:
        """P, and the image tokens that an image takes."""
        return self.vision.num_patches + self.keeps_class_token

    def faults(self) -> list[str]:
        faults = super().faults()
        num_layers = self.vision.num_layers
        if not 0 <= self.num_vision_layers <= num_layers:
            faults.append(
                f"feature_layer ({self.feature_layer}) must be from {-num_layers - 1} to {num_layers}, because the "
                f"vision tower has {num_layers} layers"
            )
        if self.projector_activation not in _PROJECTOR_ACTIVATIONS:
            may_be = ", ".join(map(repr, _PROJECTOR_ACTIVATIONS))
            faults.append(f"projector_activation ({self.projector_activation!r}) must be one of {may_be}")
        if self.image_token == IGNORED:
            faults.append(f"image_token ({self.image_token}) must be another number: as a label it means no target")
        return faults

    def layout_faults(self, sizes: Sizes) -> list[str]:
        faults = super().layout_faults(sizes)
        faults += [f"vision: {fault}" for fault in self.vision.layout_faults(sizes)]
        if self.hidden_size % sizes.tp:
            faults.append(
                f"hidden_size ({self.hidden_size}), the features between the linears of the projector, must be a "
                f"multiple of tensor_model_parallel_size ({sizes.tp})"
            )
        return faults

    @property
    def has_dense_layers(self) -> bool:
        # Layers of the tower are dense.
        return True

    @property
    def idle_parts(self) -> frozenset[str]:
        unused = range(self.num_vision_layers, self.vision.num_layers)
        return frozenset((*(f"{_VISION}.layers.{i}" for i in unused), f"{_VISION}.final_norm"))


def _fields_of(config: GPTConfig) -> dict[str, Any]:
    return {field.name: getattr(config, field.name) for field in fields(GPTConfig)}


@dataclass(frozen=True, kw_only=True)
class ImageInputs:
    """Images of a call as the first stage takes them."""

    pixels: Tensor
    """Pixels of this rank's images: [images, channels, height, width]."""
    stream: Tokens
    """Token stream of their patches."""
    is_feature_T: Tensor
    """Whether a row of all ranks' features replaces an own token: [T/sp]."""
    features_T: Tensor
    """Which row replaces it, int64 [T/sp]; -1: none."""


@dataclass(frozen=True, kw_only=True)
class LlavaInputs(GPTInputs):
    """Inputs of a call's parts besides the hidden states."""

    ids_T: Tensor
    """Token ids, 0 at image tokens."""
    image_inputs: ImageInputs | None
    """Images of the call; none: it has none, or another stage takes them."""


class _Placed(torch.autograd.Function):
    """Hidden states [T, H], in place of some of them the rows of features [F, H] that their numbers [T] name; -1: none.

    No row is named twice.
    """

    @staticmethod
    def forward(ctx: Any, hidden_TH: Tensor, features_FH: Tensor, is_feature_T: Tensor, rows_T: Tensor) -> Tensor:
        ctx.save_for_backward(is_feature_T, rows_T)
        ctx.num_rows, ctx.dtype = len(features_FH), features_FH.dtype
        # Row -1, the last one, is read by none.
        return torch.where(is_feature_T.unsqueeze(1), features_FH[rows_T].to(hidden_TH.dtype), hidden_TH)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor | None, ...]:
        is_feature_T, rows_T = ctx.saved_tensors
        # Its padding index is left out.
        grad_FH = torch.ops.aten.embedding_dense_backward(grad_TH, rows_T, ctx.num_rows, -1, False).to(ctx.dtype)
        return grad_TH.masked_fill(is_feature_T.unsqueeze(1), 0.0), grad_FH, None, None


class Projector(nn.Module):
    """Features of the tower to hidden states of the language model: two linears, [T/sp, H of vision] to [T/sp, H]."""

    def __init__(self, config: LlavaConfig, *, tp: Axis, sp: Axis) -> None:
        super().__init__()
        self.activation = config.projector_activation
        width, bias, initial = config.hidden_size, config.projector_bias, Initial(std=config.init_std)
        self.up = ColumnParallelLinear(config.vision.hidden_size, width, tp=tp, sp=sp, bias=bias, initial=initial)
        self.down = RowParallelLinear(width, width, tp=tp, sp=sp, bias=bias, initial=initial)

    def forward(self, features_TH: Tensor, tokens: Tokens) -> Tensor:
        hidden_TH: Tensor = self.down(activate(self.up(features_TH, tokens), self.activation), tokens)
        return hidden_TH


class LlavaModel(GPTModel):
    """A LLaVA of which this rank holds its stage and its slice of each weight; it is called as a GPT, with images.

    Without images it computes what a GPT with the same weights computes. Layers of the tower after those that are used
    are there for files that have them, and are not trained.
    Raises ValueError where the architecture does not fit the mesh.
    """

    spreads_documents = False

    config: LlavaConfig

    def __init__(self, config: LlavaConfig, *, mesh: Mesh | None = None, seed: int | None = None) -> None:
        mesh = mesh if mesh is not None else ambient_mesh()
        super().__init__(config, mesh=mesh, seed=seed, first_parts=_first_parts(config, mesh))
        self.image_positions = PositionCache(config.vision)
        used = [f"{_VISION}.layers.{i}" for i in range(config.num_vision_layers)]
        # Recomputed as those of the language model are.
        self.layer_names |= frozenset(used)
        self._idle = config.idle_parts
        for name in self._idle:
            if self._has(name):
                self.get_submodule(name).requires_grad_(False)

    def freeze(self, *names: str) -> None:
        """Takes "vision", "projector" or "language", or several of them, out of the training.

        Raises ValueError for another name.
        """
        if unknown := sorted(set(names) - set(PARTS)):
            raise ValueError(
                f"{', '.join(map(repr, unknown))} is no part of a LLaVA that could be frozen; it may be "
                f"{_VISION!r}, {_PROJECTOR!r} or {_LANGUAGE!r}"
            )
        for name, parameter in self.named_parameters():
            if _owner(name) in names:
                parameter.requires_grad_(False)

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        segments: Tensor | None = None,
        decode_state: DecodeState | None = None,
        images: Images | None = None,
        image_rows: Tensor | None = None,
    ) -> Tensor:
        """The loss [] with labels, else logits, as of a GPT. Image tokens are no targets, whatever the mask says.

        `images` and `image_rows` are as `images_by_row` takes them. Raises ValueError where a row has not
        `features_per_image` image tokens for each of its images.
        """
        # Before the call is cut into microbatches: of the forms that images have, not all can be.
        by_row = images_by_row(images, image_rows, tokens.shape[0])
        given = {} if decode_state is None else {"decode_state": decode_state}
        output: Tensor = super(GPTModel, self).forward(
            tokens, labels=labels, loss_mask=loss_mask, segments=segments, images=by_row, **given
        )
        return output

    def prepare(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        segments: Tensor | None = None,
        decode_state: DecodeState | None = None,
        images: Ragged | None = None,
    ) -> tuple[Tensor, LlavaInputs]:
        is_image_BS = tokens == self.config.image_token
        if decode_state is not None:
            # Tokens after the end of a row do not count, whatever they are.
            places_S = torch.arange(tokens.shape[1])
            is_image_BS &= (places_S < decode_state.lengths_B.unsqueeze(1)).to(tokens.device)
        if labels is not None:
            labels = labels.masked_fill(labels == self.config.image_token, IGNORED)
        # Image tokens are looked up in no table.
        ids_T, inputs = super().prepare(tokens.masked_fill(is_image_BS, 0), labels, loss_mask, segments, decode_state)
        counts = (0,) * tokens.shape[0] if images is None else images.counts
        pixels = self._pixels(images, tokens.device)
        self._check_image_tokens(counts, is_image_BS)
        image_inputs = (
            self._image_inputs(pixels, counts, is_image_BS, inputs.tokens) if self._runs_vision(len(pixels)) else None
        )
        return ids_T, LlavaInputs(**vars(inputs), ids_T=ids_T, image_inputs=image_inputs)

    def run_part(self, name: str, hidden: Payload, context: GPTInputs) -> Payload:
        assert isinstance(context, LlavaInputs)
        image_inputs = context.image_inputs
        if name in self._idle or (_owner(name) != _LANGUAGE and image_inputs is None):
            return hidden
        if name == f"{_VISION}.embedding":
            assert image_inputs is not None
            return self._module_output(name, image_inputs.pixels, image_inputs.stream)
        if _owner(name) != _LANGUAGE:
            assert image_inputs is not None
            return self._module_output(name, hidden, image_inputs.stream)
        if name == "embedding":
            assert isinstance(hidden, Tensor)
            return self._first_payload(self._embed(hidden, context))
        return super().run_part(name, hidden, context)

    def _module_output(self, name: str, x: Payload, stream: Tokens) -> Tensor:
        output: Tensor = self.get_submodule(name)(x, stream)
        return output

    def _embed(self, projected_TH: Tensor, context: LlavaInputs) -> Tensor:
        """The embedding of tokens, with features of images instead of image tokens."""
        embedding = self.get_submodule("embedding")
        assert isinstance(embedding, Embedding)
        hidden_TH = embedding.embed(context.ids_T)
        if context.image_inputs is not None:
            # Each rank reads the features of its own tokens: its gradient is a partial sum.
            features_FH = differentiable.all_gather(differentiable.all_gather(projected_TH, self.mesh.sp), self.mesh.cp)
            images = context.image_inputs
            hidden_TH = _Placed.apply(hidden_TH, features_FH, images.is_feature_T, images.features_T)
        return embedding.placed(hidden_TH, context.tokens)

    def _runs_vision(self, num_images: int) -> bool:
        """Whether this rank runs the tower, as all or none of its neighbours of tp and cp do."""
        if 0 not in self.mesh.own_stages:
            return False
        sees = (p for name, p in self.named_parameters() if _owner(name) != _LANGUAGE)
        return num_images > 0 or (torch.is_grad_enabled() and any(parameter.requires_grad for parameter in sees))

    def _image_inputs(self, pixels: Tensor, counts: Sequence[int], is_image_BS: Tensor, tokens: Tokens) -> ImageInputs:
        """This rank's images, and where the features of all go."""
        config, cp = self.config, self.mesh.cp
        if self.context_group is not None or self.draws.documents is not None:
            raise ValueError(
                "a LLaVA does not train with dynamic context parallelism, which spreads documents and not images; "
                "leave dynamic_context out"
            )
        num_own = max(1, -(-len(pixels) // cp.size))
        first = min(cp.rank * num_own, len(pixels))

        def own(values: Tensor) -> Tensor:
            return _padded(values[first : first + num_own], num_own)

        # The draws of this call: their owner sets others for the next, before the backward of this one.
        make_keys = partial(_image_keys, replace(self.draws), counts, pixels.device)
        stream = image_stream(num_own, lambda: own(make_keys()), self.image_positions, self.mesh, pixels.device)
        # Rows of the streams of all ranks that are features, image by image. Padding and unused class tokens are none.
        rows_F = torch.arange(cp.size * stream.num_tokens, device=pixels.device).view(cp.size, -1)
        rows_FP = rows_F[:, : stream.num_real].unflatten(1, stream.shape)[..., int(not config.keeps_class_token) :]
        features_BS = torch.full(is_image_BS.shape, -1, device=pixels.device)
        features_BS.masked_scatter_(is_image_BS, rows_FP.reshape(-1))
        return ImageInputs(
            pixels=own(pixels),
            stream=stream,
            is_feature_T=tokens.shard(tokens.flat(is_image_BS)),
            features_T=tokens.shard(tokens.flat(features_BS, padding=-1)),
        )

    def _pixels(self, images: Ragged | None, device: torch.device) -> Tensor:
        side, channels = self.config.vision.image_size, self.config.vision.num_channels
        if images is None or len(images.values) == 0:
            return torch.zeros(0, channels, side, side, device=device)
        pixels = images.values
        if pixels.shape[1:] != (channels, side, side) or not pixels.is_floating_point():
            raise ValueError(
                f"images ({tuple(pixels.shape)} of {pixels.dtype}) must be floating-point numbers of shape [images, "
                f"{channels}, {side}, {side}], as the vision tower has been built for"
            )
        return pixels

    def _check_image_tokens(self, num_images: Sequence[int], is_image_BS: Tensor) -> None:
        """Raises ValueError unless each row has an image token for each feature of its images."""
        if is_image_BS.is_meta:
            # There is nothing to count.
            return
        each, found = self.config.features_per_image, is_image_BS.sum(1).tolist()
        wrong = [row for row, num in enumerate(num_images) if found[row] != num * each]
        if wrong:
            shown = "; ".join(
                f"row {row} has {found[row]}, and its images ({num_images[row]}) take {num_images[row] * each}"
                for row in wrong[:_SHOWN]
            )
            raise ValueError(
                f"an image takes {each} image tokens (id {self.config.image_token}) of its row, one for each of its "
                f"features: {shown}{'; ...' if len(wrong) > _SHOWN else ''}"
            )


def _image_keys(draws: Draws, counts: Sequence[int], device: torch.device) -> Tensor:
    """A random key for each image, by its row and its number in the row: int64 [N]."""
    keys_B = draws.sample_keys(len(counts), device)
    numbers = [number for count in counts for number in range(1, count + 1)]
    keys_N = keys_B.repeat_interleave(on_device(counts, device), output_size=len(numbers))
    return rng.bits(keys_N, on_device(numbers, device))


def _padded(values: Tensor, length: int) -> Tensor:
    """The values followed by zeros, `length` in all."""
    num_missing = length - len(values)
    return F.pad(values, (0, 0) * (values.dim() - 1) + (0, num_missing)) if num_missing else values


def _owner(name: str) -> str:
    """Part of a LLaVA (vision, projector or language) that a module or a parameter belongs to."""
    first = name.partition(".")[0]
    return first if first in (_VISION, _PROJECTOR) else _LANGUAGE


def _first_parts(config: LlavaConfig, mesh: Mesh) -> list[Part]:
    """Tower and projector; costs are the FLOPs of one image's forward."""
    tokens, width = config.vision.max_sequence_length, config.hidden_size
    return [
        *vision_parts(config.vision, mesh, _VISION, config.num_vision_layers),
        Part(
            name=_PROJECTOR,
            build=partial(Projector, config, tp=mesh.tp, sp=mesh.sp),
            symbol="",
            cost=2.0 * tokens * width * (config.vision.hidden_size + width),
        ),
    ]
