"""Image files to tensors, as CLIP's towers are trained on: the one door to PIL.

    file -> red, green and blue, on white where it is transparent -> a square of `size` pixels -> (value - mean) / std

The square is either cut out of the middle of the image, whose shorter edge has become `size` ("crop", as CLIP does),
or holds all of it, padded with the mean's colour ("pad", as LLaVA 1.5 does). Numbers are those of transformers'
`CLIPImageProcessor` and `LlavaImageProcessor`. Source: Radford et al., arXiv 2103.00020, section 2.5; Liu et al., arXiv
2310.03744, section 3.2.
"""

from collections.abc import Iterable, Iterator
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

MOST_PIXELS = 2**26
"""Largest image in pixels: a file of a few bytes may unpack to any size."""
MOST_SIDE = 2**14
"""Largest width or height of an image."""

# Threads that open files at a time: they wait for the disk.
_THREADS = 16
# Pixels that are worked on at a time where a whole image would take several copies of it.
_STRIP_PIXELS = 2**22
# Longest image for its width that is scaled as it is; of a longer one next to nothing is in the square.
_MOST_RATIO = 64


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
        if not 1 <= self.size <= MOST_SIDE:
            faults.append(f"size of images ({self.size}) must be at least 1 and at most {MOST_SIDE}")
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
    if not isinstance(source, TableImage) and not Path(source).is_file():
        raise ValueError("it is no file")
    opened: Image.Image = _pil().open(BytesIO(source.content) if isinstance(source, TableImage) else source)
    if opened.width * opened.height > MOST_PIXELS or max(opened.size) > MOST_SIDE:
        size = f"{opened.width} x {opened.height}"
        opened.close()
        raise ValueError(
            f"it has {size} pixels, and may have {MOST_PIXELS:,} in all and {MOST_SIDE:,} on a side; make it smaller"
        )
    return opened


def _on_white(image: "Image.Image") -> "Image.Image":
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    on_white: Image.Image = _pil().new("RGB", image.size)
    for top, bottom in _strips(image.width, image.height):
        strip = image.crop((0, top, image.width, bottom)).convert("RGBA")
        white = _pil().new("RGBA", strip.size, (255, 255, 255, 255))
        on_white.paste(_pil().alpha_composite(white, strip).convert("RGB"), (0, top))
    return on_white


def _strips(width: int, height: int) -> Iterator[tuple[int, int]]:
    """First and last row, not included, of each strip of an image."""
    rows = max(1, _STRIP_PIXELS // width)
    return ((top, min(top + rows, height)) for top in range(0, height, rows))


def _square(image: "Image.Image", config: ImageConfig) -> "Image.Image":
    return _padded(image, config) if config.fit == "pad" else _cut_out(image, config.size)


def _padded(image: "Image.Image", config: ImageConfig) -> "Image.Image":
    """The whole image on a square, in the two passes that a resize makes: a square of its longer edge may be huge."""
    size, side, mean = config.size, max(image.size), tuple(int(255 * value) for value in config.mean)
    left, above = (side - image.width) // 2, (side - image.height) // 2
    narrow: Image.Image = _pil().new("RGB", (size, side), mean)
    for top, bottom in _strips(side, image.height):
        strip = _pil().new("RGB", (side, bottom - top), mean)
        strip.paste(image.crop((0, top, image.width, bottom)), (left, 0))
        narrow.paste(strip.resize((size, bottom - top), _pil().Resampling.BICUBIC), (0, above + top))
    return narrow.resize((size, size), _pil().Resampling.BICUBIC)


def _cut_out(image: "Image.Image", size: int) -> "Image.Image":
    """The square in the middle of the image, whose shorter edge becomes `size`."""
    longest = _MOST_RATIO * min(image.size)
    if max(image.size) > longest:
        # Scaled, it would be as many times the size of the square.
        left, top = max(0, image.width - longest) // 2, max(0, image.height - longest) // 2
        image = image.crop((left, top, image.width - left, image.height - top))
    short, long = min(image.size), max(image.size)
    # Rounded down, as they do.
    scaled = int(size * long / short)
    width, height = (size, scaled) if image.width <= image.height else (scaled, size)
    image = image.resize((width, height), _pil().Resampling.BICUBIC)
    left, top = (width - size) // 2, (height - size) // 2
    return image.crop((left, top, left + size, top + size))


def _pil() -> ModuleType:
    return optional_package("PIL.Image", "reading images", distribution="pillow")
