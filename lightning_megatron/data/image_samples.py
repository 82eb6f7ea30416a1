"""Samples of conversations with images: tokens made once by one process, images read when a sample is taken.

A sample is no longer than `sequence_length`, and ends with its last label: an image is complete or absent. Rows that
are left out are counted: those without a label, and, where `unreadable` is "skip", those of which an image cannot be
opened. An image that turns out to be broken later is grey, and its sample has weight 0: the batches are the same on
every rank and every layout.
"""

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from lightning_megatron.data.chat import MarkedTokens
from lightning_megatron.data.chat_samples import MarkedSamples, PackedChats, RowCounts, write_marked
from lightning_megatron.data.chat_template import ChatTemplate
from lightning_megatron.data.image_chats import (
    IMAGE,
    Conversation,
    conversation_of,
    encode_conversations,
)
from lightning_megatron.data.images import (
    ImageConfig,
    ImageSource,
    TableImage,
    UnreadableImage,
    load_image,
    unreadable_images,
)
from lightning_megatron.data.packing import row_of
from lightning_megatron.data.sources import corpus_fingerprint, plain_rows
from lightning_megatron.data.tokenizer import Tokenizer
from lightning_megatron.progress import watched_ranges

if TYPE_CHECKING:
    from lightning_megatron.data.sources import Documents

Unreadable = Literal["skip", "refuse"]
"""Treatment of a row with an image that cannot be read."""

# Of the file.
_FORM = 2
# Names that a message has.
_SHOWN = 5
logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ImageRowCounts(RowCounts):
    """Counts of a table's rows: samples, cut, dropped and unreadable."""

    unreadable: tuple[str, ...]
    """Rows left out because of an image, with the reason."""

    def __str__(self) -> str:
        summary = super().__str__()
        if not self.unreadable:
            return summary
        shown = "; ".join(self.unreadable[:_SHOWN]) + ("; ..." if len(self.unreadable) > _SHOWN else "")
        return f"{summary}; {len(self.unreadable)} were left out, because an image of theirs cannot be read: {shown}"


class ImageSamples(MarkedSamples):
    """Samples from a file that `prepare_image_chats` wrote of `rows`, with images from them or the folder `images`."""

    def __init__(
        self,
        path: str | Path,
        rows: "Documents",
        images: str | Path | None,
        config: ImageConfig,
        unreadable: Unreadable,
    ) -> None:
        super().__init__(path)
        self.rows, self.images = rows, Path(images or "")
        self.config, self.unreadable = config, unreadable
        # The text would stay in the memory of every worker in addition to its parsed form.
        summary = json.loads(self._arrays.pop("told").tobytes())
        # Names of files, or the row and which of its images it is.
        self._images: list[str | list[int]] = summary["images"]
        self.counts = ImageRowCounts(
            samples=len(self), cut=summary["cut"], dropped=summary["dropped"], unreadable=tuple(summary["unreadable"])
        )

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """`tokens`, `labels` and `loss_mask`, each [s], as of ChatSamples, and `images` [images, 3, size, size].

        Raises UnreadableImage for a broken image, unless such are skipped.
        """
        sample = super().__getitem__(index)
        images = torch.zeros(0, 3, self.config.size, self.config.size)
        own = self._images[row_of(self._arrays["image_ends"], index)]
        try:
            if own:
                images = torch.stack([load_image(source, self.config) for source in self._sources(own)])
        except UnreadableImage as error:
            if self.unreadable == "refuse":
                raise
            logger.warning("sample %d counts nothing: %s", index, error)
            images = images.new_zeros(len(own), *images.shape[1:])
            sample["loss_mask"] = torch.zeros_like(sample["loss_mask"])
        return {**sample, "images": images}

    def _sources(self, images: Sequence[str | list[int]]) -> list[ImageSource]:
        """The images of one sample: files, or bytes in its row, which is read once."""
        number = next((image[0] for image in images if not isinstance(image, str)), None)
        held = [] if number is None else self._held(int(number))
        return [self.images / image if isinstance(image, str) else held[image[1]] for image in images]

    def _held(self, number: int) -> list[ImageSource]:
        """The images of a row; those in the table are named after the row."""
        [row] = plain_rows(self.rows, number, number + 1)
        return [
            TableImage(image.content, f"row {number}, {image.name}") if isinstance(image, TableImage) else image
            for image in conversation_of(row).images
        ]

    def __reduce__(self) -> tuple[type["ImageSamples"], tuple[Any, ...]]:
        # A loader's workers read the file themselves.
        return ImageSamples, (self.path, self.rows, self.images, self.config, self.unreadable)


class PackedImageSamples(PackedChats):
    """Rows of `sequence_length` that each hold several samples, and their images."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """`tokens`, `labels`, `loss_mask` and `segments`, each [s], and the samples' `images`, in their order."""
        members = self._members(index)
        return {**self._joined(members), "images": torch.cat([member["images"] for member in members])}


def prepare_image_chats(
    rows: "Documents",
    tokenizer: Tokenizer,
    template: ChatTemplate,
    *,
    images: str | Path | None,
    features_per_image: int,
    sequence_length: int,
    unreadable: Unreadable,
    directory: str | Path,
    batch_size: int = 128,
) -> Path:
    """The `.npz` file in `directory` that holds the samples of a table, written unless it is there.

    Images are in the rows, or are files in the folder `images`; where that is None, files need their full paths. The
    name of the file is a hash of rows, tokenizer, template, folder and lengths; images of rows that it leaves out are
    not opened later. Raises ValueError for a row that is no conversation, for images that cannot be opened unless such
    are skipped, and where no label is left.
    """
    if unreadable not in get_args(Unreadable):
        choices = ", ".join(map(repr, get_args(Unreadable)))
        raise ValueError(f"unreadable_images ({unreadable!r}) must be one of {choices}")
    key = (
        *(_FORM, corpus_fingerprint(rows), tokenizer.fingerprint, template.source, type(template).__name__),
        *(None if images is None else str(Path(images).resolve()), features_per_image, sequence_length, unreadable),
    )
    path = Path(directory) / f"images-{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}.npz"
    if path.is_file():
        return path
    image = tokenizer.token_id(IMAGE)
    assert image is not None, "the tokenizer has been given the token of images"
    samples: list[MarkedTokens] = []
    of_samples: list[list[str | list[int]]] = []
    left_out: list[str] = []
    num_cut = num_dropped = 0
    for own in watched_ranges(len(rows), batch_size, what="tokenizing", unit="rows"):
        some = plain_rows(rows, own.start, own.stop)
        numbered = [(i, _conversation(row, i)) for i, row in enumerate(some, own.start)]
        readable = _readable(numbered, None if images is None else Path(images), left_out, unreadable)
        written = encode_conversations([one for _, one in readable], tokenizer, template, features_per_image)
        for (number, conversation), encoded in zip(readable, written, strict=True):
            sample = _cut(encoded, sequence_length + 1)
            if len(sample.ids) < 2:
                num_dropped += 1
                continue
            num_cut += any(encoded.is_marked[len(sample.ids) :])
            samples.append(sample)
            left = conversation.images[: sample.ids.count(image) // features_per_image]
            of_samples.append([one if isinstance(one, str) else [number, index] for index, one in enumerate(left)])
    if not samples:
        raise ValueError(_nothing_left(len(rows), left_out, num_dropped, sequence_length, features_per_image))
    summary = {
        "images": list(chain.from_iterable(of_samples)),
        "cut": num_cut,
        "dropped": num_dropped,
        "unreadable": left_out,
    }
    write_marked(
        path,
        samples,
        image_ends=np.cumsum([len(own) for own in of_samples], dtype=np.int64),
        told=np.frombuffer(json.dumps(summary).encode(), dtype=np.uint8),
    )
    return path


def _conversation(row: Any, number: int) -> Conversation:
    try:
        return conversation_of(row)
    except ValueError as error:
        raise ValueError(f"row {number} of the table: {error}") from error


def _nothing_left(
    num_rows: int, left_out: Sequence[str], num_dropped: int, sequence_length: int, features_per_image: int
) -> str:
    why, ways = [], []
    if left_out:
        why.append(f"of {len(left_out)} an image cannot be read ({'; '.join(left_out[:_SHOWN])})")
        ways.append("look after image_folder")
    if num_dropped:
        why.append(
            f"{num_dropped} have no answer within sequence_length ({sequence_length}), of which an image takes"
            f" {features_per_image}"
        )
        ways.append("give rows with answers, or raise sequence_length")
    return f"none of the {num_rows} rows is left: {', and '.join(why)}; {', or '.join(ways)}"


def _readable(
    numbered: Sequence[tuple[int, Conversation]], folder: Path | None, left_out: list[str], unreadable: Unreadable
) -> list[tuple[int, Conversation]]:
    """The conversations whose images can be opened; the errors of the others are added to `left_out`."""
    images = [(number, image) for number, conversation in numbered for image in conversation.images]
    named = [
        f"row {number}, {image}" for number, image in images if isinstance(image, str) and not Path(image).is_absolute()
    ]
    if folder is None and named:
        raise ValueError(
            f"images are files ({'; '.join(named[:_SHOWN])}), and the dataset does not say where they lie; give"
            " image_folder"
        )
    # Joining leaves absolute paths as they are.
    sources = [image if isinstance(image, TableImage) else Path(folder or "", image) for _, image in images]
    faults = unreadable_images(sources)
    bad = {
        number: f"row {number}, {image}: {faults[source]}"
        for (number, image), source in zip(images, sources, strict=True)
        if source in faults
    }
    if bad and unreadable == "refuse":
        where = "" if folder is None else f"put them into image_folder ({str(folder)!r}), or "
        raise ValueError(
            f"images of {len(bad)} rows cannot be read: {'; '.join(list(bad.values())[:_SHOWN])}; {where}leave such"
            " rows out by unreadable_images='skip'"
        )
    left_out += bad.values()
    return [(number, conversation) for number, conversation in numbered if number not in bad]


def _cut(sample: MarkedTokens, length: int) -> MarkedTokens:
    """The tokens up to the last marked one within a length; None where there is none."""
    marks = sample.is_marked[:length]
    end = len(marks) - marks[::-1].index(True) if any(marks[1:]) else 0
    return MarkedTokens(sample.ids[:end], sample.is_marked[:end])
