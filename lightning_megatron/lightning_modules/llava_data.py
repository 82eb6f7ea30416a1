"""`LlavaDataModule`: conversations with images, for training a LLaVA on its answers."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import field
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_megatron.config_dataclass import config_dataclass
from lightning_megatron.data import (
    ChatTemplate,
    ImageConfig,
    ImageSamples,
    PackedImageSamples,
    Tokenizer,
    collate_padded,
    encode_prompt,
    image_template,
    load_image,
    load_rows,
    load_tokenizer,
    prepare_image_chats,
)
from lightning_megatron.data.collate import Sample
from lightning_megatron.data.image_chats import IMAGE, Conversation, TemplateName, built_in_template, conversation_of
from lightning_megatron.data.image_samples import Unreadable
from lightning_megatron.data.images import ImageFit
from lightning_megatron.data.sources import corpus_fingerprint, files_of, plain_rows
from lightning_megatron.data.synthetic_images import draw_images
from lightning_megatron.lightning_modules.conversation_data import ConversationDataConfig, ConversationDataModule
from lightning_megatron.lightning_modules.data_module import Samples, as_configuration_error
from lightning_megatron.lightning_modules.loaders import Collate, collate_images
from lightning_megatron.trainer.config import ConfigurationError

_NUM_DRAWN = 4096
"""Rows of the table that is drawn where none is given."""


@config_dataclass
class LlavaDataConfig(ConversationDataConfig):
    """Conversations with images, and how images become tokens."""

    vocab_size: int
    """Tokens that the model knows; also the size of a tokenizer that is trained here."""
    image_token: int
    """Id of the token `<image>`, which stands for each token of an image."""
    image_size: int
    """Height and width of the vision tower's images, in pixels."""
    patch_size: int
    """Height and width of the vision tower's patches, in pixels: each patch is one token."""
    keeps_class_token: bool = False
    """Whether the vision tower's class token is a token of the image too."""
    image_folder: str | None = None
    """Directory that the names of images start from; None: the directory of the table."""
    image_fit: ImageFit = "pad"
    """How an image becomes a square: padded at its borders (`pad`), or cropped (`crop`)."""
    unreadable_images: Unreadable = "refuse"
    """Rows with an image that cannot be read are an error ('refuse'), or left out and counted ('skip')."""
    template: TemplateName = "vicuna"
    """How a conversation is written as text: one of LLaVA's templates, or that of the tokenizer ('tokenizer')."""
    prompt_images: list[list[str]] = field(default_factory=list)
    """Files of the images of each prompt, put in front of its text unless `<image>` marks their positions."""


class LlavaDataModule(ConversationDataModule):
    """Batches of `tokens`, `labels` and `loss_mask`, each [global_batch_size / dp, s], s the longest sample of the
    batch rounded up to `pad_to_multiple`, and of `images`, a Ragged of any number for each row; with packing of
    `segments` too.

    `data.image_chats` documents the forms of rows. Images are in the table, or are files. Without a table, images of
    coloured shapes are drawn. Answers alone have labels. A sample has at most `sequence_length` tokens, and never a
    part of an image.
    """

    config: LlavaDataConfig
    special_tokens: ClassVar[tuple[str, ...]] = (IMAGE,)

    def __init__(self, config: LlavaDataConfig) -> None:
        super().__init__(config)
        self.features_per_image = (config.image_size // config.patch_size) ** 2 + config.keeps_class_token
        """Tokens of one image."""
        # The template of conversations, from `setup` on.
        self.template: ChatTemplate | None = None
        # The images of each prompt, from `setup` for prediction on: [n, 3, image_size, image_size].
        self._prompt_images: list[Tensor] = []

    # --- faults -----------------------------------------------------------------------------------------------------

    @property
    def _choices(self) -> Mapping[str, Any]:
        return {**super()._choices, "template": TemplateName, "unreadable_images": Unreadable}

    def faults(self) -> list[str]:
        faults, config = super().faults(), self.config
        if config.template == "tokenizer" and config.tokenizer is None:
            faults.append("template is 'tokenizer', and no tokenizer is given; give one that has a chat template")
        if config.prompt_images and len(config.prompt_images) != len(config.prompts):
            faults.append(
                f"prompt_images ({len(config.prompt_images)}) must have the images of each of the"
                f" {len(config.prompts)} prompts: a list of names for each, empty where it has none"
            )
        if config.image_folder is not None and not Path(config.image_folder).is_dir():
            faults.append(f"image_folder ({config.image_folder!r}) is no directory")
        try:
            ImageConfig(size=config.image_size, fit=config.image_fit)
        except ValueError as error:
            faults += str(error).splitlines()
        return faults

    def _tokenizer_faults(self) -> list[str]:
        return self._vocabulary_faults(self.config.vocab_size)

    def sample_faults(self) -> list[str]:
        faults = super().sample_faults()
        if self.features_per_image >= self.sequence_length:
            faults.append(
                f"sequence_length ({self.sequence_length}) must be above the {self.features_per_image} tokens that an "
                "image takes"
            )
        return faults

    @property
    def _image_config(self) -> ImageConfig:
        return ImageConfig(size=self.config.image_size, fit=self.config.image_fit)

    # --- preparing --------------------------------------------------------------------------------------------------

    def _prepare(self) -> tuple[Samples | None, Samples | None]:
        config = self.config
        rows: Any = None if self._only_predicts and config.tokenizer is not None else self._rows()
        if config.tokenizer is not None:
            own = load_tokenizer(config.tokenizer)
        else:
            written = f"{corpus_fingerprint(rows)} {config.template}"
            name = hashlib.sha256(written.encode()).hexdigest()[:16]
            own = self._trained_tokenizer(name, _texts(rows, config.template), config.vocab_size)
        self.tokenizer = tokenizer = own.with_special_token(IMAGE)
        if (found := tokenizer.token_id(IMAGE)) != config.image_token:
            raise ConfigurationError(
                f"image_token ({config.image_token}) must be the id of {IMAGE} in the tokenizer, or, where it has "
                f"none, the one after all others: {found}; set model.config.image_token to it"
            )
        self.template = image_template(config.template, tokenizer, str(config.tokenizer))
        if self._only_predicts:
            return None, None
        training, held_out = self._split_rows(rows)
        samples = self._samples(self._images, training, tokenizer)
        return samples, None if held_out is None else self._samples(self._held_out_images, held_out, tokenizer)

    def _rows(self) -> Any:
        if self.config.path is not None or self.config.dataset is not None:
            return super()._rows()
        draw_images(self._drawn, _NUM_DRAWN)
        return load_rows(path=self._drawn, cache_dir=self._documents_cache)

    @property
    def _drawn(self) -> Path:
        return self._cache / f"shapes-{_NUM_DRAWN}"

    @property
    def _images(self) -> Path | None:
        """The folder that names of images start from; none is known of a dataset."""
        if self.config.image_folder is not None:
            return Path(self.config.image_folder)
        if self.config.dataset is not None:
            return None
        return self._drawn if self.config.path is None else files_of(self.config.path)[0].parent

    @property
    def _held_out_images(self) -> Path | None:
        """The folder that names of held-out images start from: that of the held-out table, if it is another."""
        if self.config.validation_path is None or self.config.image_folder is not None:
            return self._images
        return files_of(self.config.validation_path)[0].parent

    def _samples(self, folder: Path | None, documents: Any, tokenizer: Tokenizer) -> Samples:
        """Samples of rows whose images are in a folder."""
        assert self.template is not None
        path = prepare_image_chats(
            documents,
            tokenizer,
            self.template,
            images=folder,
            features_per_image=self.features_per_image,
            sequence_length=self.sequence_length,
            unreadable=self.config.unreadable_images,
            directory=self._cache,
        )
        samples = ImageSamples(path, documents, folder, self._image_config, self.config.unreadable_images)
        if self.config.packing == "none":
            return Samples(dataset=samples, count=len(samples), summary=str(samples.counts))
        rows = PackedImageSamples(
            samples, self.sequence_length, end_of_text=tokenizer.end_of_text, seed=self.config.seed
        )
        return Samples(dataset=rows, count=len(rows), summary=str(rows))

    @property
    def _collate(self) -> Collate:
        padding = self._padding(self._ready_tokenizer)
        return partial(
            collate_images, collate=partial(collate_padded, padding=padding, multiple=self.config.pad_to_multiple)
        )

    # --- prediction -------------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage == "predict":
            with as_configuration_error():
                self._prompt_images = [self._loaded(own) for own in self._prompt_names]

    @property
    def _prompt_entries(self) -> list[Sample]:
        return [{"images": own} for own in self._prompt_images]

    def _prompt_ids(self) -> list[list[int]]:
        tokenizer, template = self._ready_tokenizer, self.template
        assert template is not None, "setup comes first; Trainer calls it"
        conversations = map(_prompt, self.config.prompts, self._prompt_names)
        return [encode_prompt(one, tokenizer, template, self.features_per_image) for one in conversations]

    @property
    def _prompt_names(self) -> list[list[str]]:
        """The images of each prompt."""
        return self.config.prompt_images or [[] for _ in self.config.prompts]

    def _loaded(self, names: list[str]) -> Tensor:
        loaded = [load_image(name, self._image_config) for name in names]
        return torch.stack(loaded) if loaded else torch.zeros(0, 3, self.config.image_size, self.config.image_size)

    def text_of(self, ids: Any) -> str:
        """The text of a row of tokens, with one `<image>` for all the tokens of one image or of several in a row."""
        pieces = [
            IMAGE if is_image else self._ready_tokenizer.decode(run)
            for is_image, run in groupby(ids, lambda i: i == self.config.image_token)
        ]
        return "".join(pieces)


def _texts(rows: Any, template: TemplateName) -> Iterator[str]:
    """The rows as text without images: what a tokenizer is trained on."""
    writing = built_in_template(template, "")
    for row in plain_rows(rows):
        yield writing.render(conversation_of(row).messages).replace(IMAGE, "")


def _prompt(prompt: str, images: list[str]) -> Conversation:
    if IMAGE not in prompt:
        prompt = f"{IMAGE}\n" * len(images) + prompt
    elif (found := prompt.count(IMAGE)) != len(images):
        raise ValueError(f"the prompt {prompt!r} has {found} {IMAGE}, and {len(images)} prompt_images")
    return Conversation(messages=[{"role": "user", "content": prompt}], images=list(images))
