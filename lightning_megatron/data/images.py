"""Image files to tensors, as CLIP's towers are trained on: the one door to PIL.

    file -> red, green and blue, on white where it is transparent -> a square of `size` pixels -> (value - mean) / std

The square is either cut out of the middle of the image, whose shorter edge has become `size` ("crop", as CLIP does),
or holds all of it, padded with the mean's colour ("pad", as LLaVA 1.5 does). Numbers are those of transformers'
`CLIPImageProcessor` and `LlavaImageProcessor`. Source: Radford et al., arXiv 2103.00020, section 2.5; Liu et al., arXiv
2310.03744, section 3.2.
"""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_megatron.data.optional_packages import optional_package

if TYPE_CHECKING:
    from PIL import Image

ImageFit = Literal["crop", "pad"]
"""Ways to make an image a square."""

# Threads that open files at a time: they wait for the disk.
_THREADS = 16


class UnreadableImage(ValueError):
    """A file that is no image, or a broken one."""


@dataclass(frozen=True, kw_only=True)
class ImageConfig:
    """Preprocessing of an image for a vision tower. Raises ValueError that names all faults."""

    size: int
    """Height and width in pixels."""
    fit: ImageFit = "crop"
    """How an image becomes a square."""
    mean: tuple[float, float, float] = (0.48145466, 0.4578275, 0.40821073)
    """Mean of red, green and blue, between 0 and 1, that is subtracted; CLIP's by default."""
    std: tuple[float, float, float] = (0.26862954, 0.26130258, 0.27577711)
    """Standard deviation of red, green and blue that the result is divided by; CLIP's by default."""

    def __post_init__(self) -> None:
        faults = []
        if self.size < 1:
            faults.append(f"size of images ({self.size}) must be at least 1")
        if self.fit not in get_args(ImageFit):
            faults.append(f"fit of images ({self.fit!r}) must be one of {', '.join(map(repr, get_args(ImageFit)))}")
        if min(self.std) <= 0:
            faults.append(f"std of images {self.std} must be above 0")
        if faults:
            raise ValueError("\n".join(faults))


@dataclass(frozen=True)
class TableImage:
    """An image of a table: the bytes of its file, and its name."""

    content: bytes
    name: str

    def __str__(self) -> str:
        return self.name


ImageSource = str | Path | TableImage
"""An image's file, or its bytes in a table."""


def load_image(source: ImageSource, config: ImageConfig) -> Tensor:
    """The image: float32 [3, size, size]. Raises UnreadableImage."""
    try:
        with _opened(source) as image:
            square = _square(_on_white(image), config)
    except Exception as error:  # a broken file ends in any error of its decoder
        raise UnreadableImage(f"image {str(source)!r} cannot be read: {error}") from error
    values_CHW = (np.asarray(square).transpose(2, 0, 1) * (1 / 255)).astype(np.float32)
    mean, std = (np.array(values, dtype=np.float32)[:, None, None] for values in (config.mean, config.std))
    return torch.from_numpy((values_CHW - mean) / std)


def unreadable_images(sources: Iterable[ImageSource]) -> dict[ImageSource, str]:
    """The sources that are no images by their first bytes, and why."""
    distinct = list(dict.fromkeys(sources))
    with ThreadPoolExecutor(_THREADS) as threads:
        found = zip(distinct, threads.map(_fault, distinct), strict=True)
        return {source: fault for source, fault in found if fault}


def write_image(values_HWC: NDArray[np.uint8], path: Path) -> None:
    """Writes red, green and blue of each pixel to a file in the format of its ending."""
    _pil().fromarray(values_HWC).save(path)


def _fault(source: ImageSource) -> str:
    try:
        with _opened(source):
            return ""
    except Exception as error:  # as in `load_image`
        # PIL names the object in memory that it read.
        return "it is no image that PIL knows" if isinstance(source, TableImage) else str(error)


def _opened(source: ImageSource) -> "Image.Image":
    opened: Image.Image = _pil().open(BytesIO(source.content) if isinstance(source, TableImage) else source)
    return opened


def _on_white(image: "Image.Image") -> "Image.Image":
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    image = image.convert("RGBA")
    white = _pil().new("RGBA", image.size, (255, 255, 255, 255))
    on_white: Image.Image = _pil().alpha_composite(white, image).convert("RGB")
    return on_white


def _square(image: "Image.Image", config: ImageConfig) -> "Image.Image":
    if config.fit == "pad":
        side = max(image.size)
        padded: Image.Image = _pil().new("RGB", (side, side), tuple(int(255 * value) for value in config.mean))
        padded.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
        image = padded
    size, short, long = config.size, min(image.size), max(image.size)
    # Rounded down, as they do.
    scaled = int(size * long / short)
    width, height = (size, scaled) if image.width <= image.height else (scaled, size)
    image = image.resize((width, height), _pil().Resampling.BICUBIC)
    left, top = (width - size) // 2, (height - size) // 2
    return image.crop((left, top, left + size, top + size))


def _pil() -> ModuleType:
    return optional_package("PIL.Image", "reading images", distribution="pillow")
