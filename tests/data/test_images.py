"""An image file becomes the numbers that transformers' processors make of it."""

import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

from lightning_megatron.data import images
from lightning_megatron.data.images import (
    ImageConfig,
    ImageFit,
    UnreadableImage,
    load_image,
    unreadable_images,
    write_image,
)

SIZES = [(50, 37), (37, 50), (40, 40), (200, 31), (33, 34), (28, 200)]


def picture(width: int, height: int, channels: int) -> np.ndarray:
    """Smooth and rough at once: resampling and rounding both show."""
    draw = np.random.RandomState(width * 1000 + height)
    waves = 127 + 100 * np.sin(np.linspace(0, 9, width * height * channels)).reshape(height, width, channels)
    return np.clip(waves + draw.randint(-60, 60, (height, width, channels)), 0, 255).astype(np.uint8)


def theirs(fit: ImageFit, path: Path, size: int) -> torch.Tensor:
    options = {"size": {"shortest_edge": size}, "crop_size": {"height": size, "width": size}}
    processor = LlavaImageProcessorPil(do_pad=True, **options) if fit == "pad" else CLIPImageProcessorPil(**options)
    pixels: torch.Tensor = processor(Image.open(path), return_tensors="pt")["pixel_values"][0]
    return pixels


@pytest.mark.parametrize("size", [28, 33, 56])
@pytest.mark.parametrize("fit", ["crop", "pad"])
def test_the_numbers_are_those_of_transformers(fit: ImageFit, size: int, tmp_path: Path) -> None:
    made = []
    for width, height in SIZES:
        path = tmp_path / f"{width}-{height}.png"
        write_image(picture(width, height, 3), path)
        made.append(load_image(path, ImageConfig(size=size, fit=fit)))
        assert torch.equal(made[-1], theirs(fit, path, size))
    assert made[0].shape == (3, size, size) and made[0].dtype == torch.float32
    other = load_image(tmp_path / "200-31.png", ImageConfig(size=size, fit="crop" if fit == "pad" else "pad"))
    assert (other - made[3]).abs().max() > 0.1


@pytest.mark.parametrize("mode", ["L", "RGBA", "LA", "P", "CMYK"])
def test_images_of_other_colours_become_those_of_transformers(mode: str, tmp_path: Path) -> None:
    image = Image.fromarray(picture(40, 30, 4 if mode == "RGBA" else 3))
    path = tmp_path / ("image.tiff" if mode == "CMYK" else "image.png")
    image.convert(mode).save(path, **({"transparency": 3} if mode == "P" else {}))
    ours = load_image(path, ImageConfig(size=28))
    assert torch.equal(ours, theirs("crop", path, 28))


def test_a_file_that_is_no_image_or_is_cut_off_is_named(tmp_path: Path) -> None:
    write_image(picture(60, 60, 3), tmp_path / "good.png")
    (tmp_path / "text.png").write_text("no image")
    whole = (tmp_path / "good.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    for name in ("text.png", "cut.png", "absent.png"):
        with pytest.raises(UnreadableImage, match=rf"image .*{name}' cannot be read"):
            load_image(tmp_path / name, ImageConfig(size=28))
    names = ("good.png", "text.png", "cut.png", "absent.png", "text.png")
    found = unreadable_images(tmp_path / name for name in names)
    # Of a file that is cut off the beginning is good.
    assert [path.name for path in found] == ["text.png", "absent.png"]
    assert all(found.values())


def test_faults_of_a_configuration_are_reported_together() -> None:
    with pytest.raises(ValueError) as raised:
        ImageConfig(size=0, fit="stretch", std=(0.0, 1.0, 1.0))  # type: ignore[arg-type]
    for shown in ("size of images (0)", "fit of images ('stretch') must be one of 'crop', 'pad'", "std of images"):
        assert shown in str(raised.value)


@pytest.mark.parametrize("fit", ["crop", "pad"])
@pytest.mark.parametrize("size", [(1, 6000), (6000, 1)])
def test_a_thin_image_takes_the_memory_of_its_square(fit: ImageFit, size: tuple[int, int], tmp_path: Path) -> None:
    file = tmp_path / "thin.png"
    Image.new("RGB", size, (255, 0, 0)).save(file)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    # Scaled before it is cut, it takes 2.7 GB.
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**28, before[1]))
    try:
        values = load_image(file, ImageConfig(size=336, fit=fit))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert values.shape == (3, 336, 336)


def test_an_image_that_unpacks_to_too_much_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "bomb.png"
    Image.new("1", (16000, 5000)).save(file)
    for words in (str(unreadable_images([file])), ""):
        with pytest.raises(UnreadableImage, match="16000 x 5000 pixels, and may have 67,108,864"):
            load_image(file, ImageConfig(size=8))
        assert not words or "16000 x 5000" in words


def test_strips_of_an_image_are_the_image(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "noise.png"
    values = np.random.default_rng(0).integers(0, 256, (90, 41, 4), dtype=np.uint8)
    Image.fromarray(values).save(file)
    fits: tuple[ImageFit, ...] = ("crop", "pad")
    whole = [load_image(file, ImageConfig(size=28, fit=fit)) for fit in fits]
    monkeypatch.setattr(images, "_STRIP_PIXELS", 500)
    for fit, wanted in zip(fits, whole, strict=True):
        assert torch.equal(load_image(file, ImageConfig(size=28, fit=fit)), wanted)
