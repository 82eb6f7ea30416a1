"""`LlavaDataModule`: conversations with images, for training a LLaVA on what is to be answered."""

import hashlib
from collections.abc import Iterator
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor
from torch.utils.data import DataLoader

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
    split_documents,
)
from lightning_megatron.data.image_chats import IMAGE, Conversation, TemplateName, built_in_template, conversation_of
from lightning_megatron.data.image_samples import Unreadable
from lightning_megatron.data.images import ImageFit
from lightning_megatron.data.packed_rows import IGNORE_INDEX, NO_SEGMENT
from lightning_megatron.data.sources import corpus_fingerprint, files_of, plain_rows
from lightning_megatron.data.synthetic_images import draw_images
from lightning_megatron.lightning_modules.data_module import Samples, as_configuration_error
from lightning_megatron.lightning_modules.loaders import Collate, Sample, collate_images, prompt_loader
from lightning_megatron.lightning_modules.text_data import TextDataModule
from lightning_megatron.trainer.config import ConfigurationError

ImagePacking = Literal["none", "documents"]
"""What shares a row: nothing, or samples that do not see each other."""

# Rows of the table that is drawn where none is given.
_NUM_DRAWN = 4096


class LlavaDataModule(TextDataModule):
    """Batches of `tokens`, `labels` and `loss_mask`, each [global_batch_size / replicas, s], and `images`, a Ragged of
    any number for each row; s is the longest sample of the batch rounded up to `pad_to_multiple`.

    Rows come from `path` (a .json, .jsonl or .parquet table as a file, a directory or a pattern) or `dataset`; of what
    form they are is said in `data.image_chats`. Images lie in the table, or are files in `image_folder`, beside the
    table where it is not given. Where no source is given, pictures of coloured shapes are drawn. `image_fit` says how
    an image becomes a square of `image_size` pixels, which takes an image token for each of its patches, and one for
    the class token where `keeps_class_token`. Of an image that cannot be read the row is left out ("skip"; how many is
    told), or it is a fault ("refuse").

    Only what is to be answered has labels. A sample has at most `sequence_length` tokens, and no part of an image. With
    `packing` a row of a batch holds several samples, up to `sequence_length`, and the batches have `segments` too.
    Without `tokenizer` a byte-level one is trained on the text.

    `template` says how a conversation is written. `prompts` are questions that prediction answers, and `prompt_images`
    the files that each asks about, in front of it unless it has `<image>` where they belong.
    """

    special_tokens: ClassVar[tuple[str, ...]] = (IMAGE,)

    def __init__(
        self,
        *,
        vocab_size: int,
        image_token: int,
        image_size: int,
        patch_size: int,
        sequence_length: int,
        global_batch_size: int,
        keeps_class_token: bool = False,
        path: str | None = None,
        dataset: str | None = None,
        split: str = "train",
        image_folder: str | None = None,
        image_fit: ImageFit = "pad",
        unreadable_images: Unreadable = "refuse",
        tokenizer: str | None = None,
        template: TemplateName = "vicuna",
        packing: ImagePacking = "none",
        validation_path: str | None = None,
        validation_fraction: float | None = None,
        pad_to_multiple: int = 8,
        prompts: list[str] | None = None,
        prompt_images: list[list[str]] | None = None,
        num_workers: int = 0,
        seed: int = 0,
        cache_directory: str = "runs/data",
    ) -> None:
        super().__init__(
            vocab_size=vocab_size,
            sequence_length=sequence_length,
            global_batch_size=global_batch_size,
            path=path,
            dataset=dataset,
            tokenizer=tokenizer,
            validation_fraction=validation_fraction,
            validation_path=validation_path,
            prompts=prompts,
            num_workers=num_workers,
            seed=seed,
            cache_directory=cache_directory,
        )
        self.image_token = image_token
        self.image_size = image_size
        self.image_fit = image_fit
        self.features_per_image = (image_size // patch_size) ** 2 + keeps_class_token
        self.split = split
        self.image_folder = image_folder
        self.unreadable_images = unreadable_images
        self.template_name = template
        self.packing = packing
        self.pad_to_multiple = pad_to_multiple
        self.prompt_images = prompt_images or []
        # There from `setup` on.
        self.template: ChatTemplate | None = None
        # Of each prompt, from `setup` for prediction on: [n, 3, image_size, image_size].
        self._asked_images: list[Tensor] = []

    @property
    def hides_padding(self) -> bool:
        """Whether batches have padding that no `segments` tell of."""
        return self.packing == "none"

    # --- what is wrong ----------------------------------------------------------------------------------------------

    def faults(self) -> list[str]:
        faults = super().faults()
        faults += [
            f"{name} ({value!r}) must be one of {', '.join(map(repr, get_args(choices)))}"
            for name, value, choices in (
                ("packing", self.packing, ImagePacking),
                ("template", self.template_name, TemplateName),
                ("unreadable_images", self.unreadable_images, Unreadable),
            )
            if value not in get_args(choices)
        ]
        if self.pad_to_multiple < 1:
            faults.append(f"pad_to_multiple ({self.pad_to_multiple}) must be at least 1")
        if self.template_name == "tokenizer" and self.tokenizer_path is None:
            faults.append("template is 'tokenizer', and no tokenizer is given; give one that has a chat template")
        if self.prompt_images and len(self.prompt_images) != len(self.prompts):
            faults.append(
                f"prompt_images ({len(self.prompt_images)}) must have the images of each of the {len(self.prompts)} "
                "prompts: a list of names for each, empty where it has none"
            )
        if self.image_folder is not None and not Path(self.image_folder).is_dir():
            faults.append(f"image_folder ({self.image_folder!r}) is no directory")
        try:
            ImageConfig(size=self.image_size, fit=self.image_fit)
        except ValueError as error:
            faults += str(error).splitlines()
        return faults

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
        return ImageConfig(size=self.image_size, fit=self.image_fit)

    # --- preparing --------------------------------------------------------------------------------------------------

    def _prepare(self) -> tuple[Samples | None, Samples | None]:
        rows: Any = None if self._only_predicts and self.tokenizer_path is not None else self._rows()
        if self.tokenizer_path is not None:
            own = load_tokenizer(self.tokenizer_path)
        else:
            written = f"{corpus_fingerprint(rows)} {self.template_name}"
            name = hashlib.sha256(written.encode()).hexdigest()[:16]
            own = self._tokenizer_for(name, _texts(rows, self.template_name))
        self.tokenizer = tokenizer = own.with_special_token(IMAGE)
        if (found := tokenizer.token_id(IMAGE)) != self.image_token:
            raise ConfigurationError(
                [
                    f"image_token ({self.image_token}) must be the id of {IMAGE} in the tokenizer, or, where it has "
                    f"none, the one behind all others: {found}; set model.config.image_token to it"
                ]
            )
        self.template = image_template(self.template_name, tokenizer, str(self.tokenizer_path))
        if self._only_predicts:
            return None, None
        if self.validation_path is not None:
            held_out = load_rows(path=self.validation_path, cache_dir=self._documents_cache)
        elif self._held_out_fraction > 0:
            rows, held_out = split_documents(rows, self._held_out_fraction)
        else:
            return self._samples(rows, tokenizer), None
        return self._samples(rows, tokenizer), self._samples_in(self._held_out_images, held_out, tokenizer)

    def _rows(self) -> Any:
        if self.path is None and self.dataset is None:
            draw_images(self._drawn, _NUM_DRAWN)
            return load_rows(path=self._drawn, cache_dir=self._documents_cache)
        # A named dataset may lie in the cache of `datasets` already.
        cache = self._documents_cache if self.dataset is None else None
        return load_rows(path=self.path, dataset=self.dataset, split=self.split, cache_dir=cache)

    @property
    def _drawn(self) -> Path:
        return self.cache_directory / f"shapes-{_NUM_DRAWN}"

    @property
    def _images(self) -> Path | None:
        """The folder that names of images start from; none is known of a dataset."""
        if self.image_folder is not None:
            return Path(self.image_folder)
        if self.dataset is not None:
            return None
        return self._drawn if self.path is None else files_of(self.path)[0].parent

    @property
    def _held_out_images(self) -> Path | None:
        """The same for what is held out: names in a table of its own start beside it."""
        if self.validation_path is None or self.image_folder is not None:
            return self._images
        return files_of(self.validation_path)[0].parent

    def _samples(self, documents: Any, tokenizer: Tokenizer) -> Samples:
        return self._samples_in(self._images, documents, tokenizer)

    def _samples_in(self, folder: Path | None, documents: Any, tokenizer: Tokenizer) -> Samples:
        """Samples of rows whose images are in a folder."""
        assert self.template is not None
        path = prepare_image_chats(
            documents,
            tokenizer,
            self.template,
            images=folder,
            features_per_image=self.features_per_image,
            sequence_length=self.sequence_length,
            unreadable=self.unreadable_images,
            directory=self.cache_directory,
        )
        samples = ImageSamples(path, documents, folder, self._image_config, self.unreadable_images)
        if self.packing == "none":
            return Samples(dataset=samples, count=len(samples), told=str(samples.kept))
        rows = PackedImageSamples(samples, self.sequence_length, end_of_text=tokenizer.end_of_text, seed=self.seed)
        return Samples(dataset=rows, count=len(rows), told=str(rows))

    @property
    def _collate(self) -> Collate:
        assert self.tokenizer is not None, "setup comes first; Trainer calls it"
        padding = {"tokens": self.tokenizer.end_of_text, "labels": IGNORE_INDEX, "loss_mask": 0}
        if self.packing == "documents":
            padding["segments"] = NO_SEGMENT
        return partial(collate_images, collate=partial(collate_padded, padding=padding, multiple=self.pad_to_multiple))

    # --- prediction -------------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage == "predict":
            with as_configuration_error():
                self._asked_images = [self._loaded(own) for own in self._asked_names]

    def predict_dataloader(self) -> DataLoader[Sample]:
        ids = [torch.tensor(ids) for ids in self._prompt_ids()]
        extras = [{"images": own} for own in self._asked_images]
        return prompt_loader(ids, self.global_batch_size, self._replica, extras)

    def _prompt_ids(self) -> list[list[int]]:
        assert self.tokenizer is not None and self.template is not None, "setup comes first; Trainer calls it"
        asked = map(_asked, self.prompts, self._asked_names)
        return [encode_prompt(one, self.tokenizer, self.template, self.features_per_image) for one in asked]

    @property
    def _asked_names(self) -> list[list[str]]:
        """The images of each prompt."""
        return self.prompt_images or [[] for _ in self.prompts]

    def _loaded(self, names: list[str]) -> Tensor:
        loaded = [load_image(name, self._image_config) for name in names]
        return torch.stack(loaded) if loaded else torch.zeros(0, 3, self.image_size, self.image_size)

    def text_of(self, ids: Any) -> str:
        """As of other texts, with `<image>` for all the tokens of an image, or of several in a row."""
        assert self.tokenizer is not None, "setup comes first; Trainer calls it"
        pieces = [
            IMAGE if is_image else self.tokenizer.decode(run)
            for is_image, run in groupby(ids, lambda i: i == self.image_token)
        ]
        return "".join(pieces)


def _texts(rows: Any, template: TemplateName) -> Iterator[str]:
    """What a tokenizer is to learn from: the rows as they are written, without images."""
    writing = built_in_template(template, "")
    for row in plain_rows(rows):
        yield writing.render(conversation_of(row).messages).replace(IMAGE, "")


def _asked(prompt: str, images: list[str]) -> Conversation:
    if IMAGE not in prompt:
        prompt = f"{IMAGE}\n" * len(images) + prompt
    elif (found := prompt.count(IMAGE)) != len(images):
        raise ValueError(f"the prompt {prompt!r} has {found} {IMAGE}, and {len(images)} prompt_images")
    return Conversation(messages=[{"role": "user", "content": prompt}], images=list(images))
