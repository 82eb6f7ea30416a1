"""Ten networks of other kinds than models of transformers, each with a module that trains it and batches."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import lightning as L

from tests.any_module import more_networks, networks


class Family(Protocol):
    """Networks by their names, which train on layouts."""

    @property
    def types(self) -> Mapping[str, Any]:
        """What has a row, by name."""
        ...

    @property
    def layouts(self) -> tuple[str, ...]:
        """The layouts that it trains on."""
        ...

    def __call__(self, model_type: str, /) -> L.LightningModule:
        """A module that trains the network of that name."""
        ...

    def batches(self, model_type: str, /) -> list[Any]:
        """The batches that train it."""
        ...


class Networks:
    """Networks as people write them, with what their modules say of how they are cut."""

    types: Mapping[str, tuple[Callable[[], L.LightningModule], Callable[[], list[Any]]]] = {
        "a diffusion transformer with conditioning": (networks.TrainsDiffusion, networks.batches),
        "a list of lists of layers": (more_networks.FitsForked, more_networks.ids),
        "a mixture of experts by hand": (more_networks.FitsMixture, more_networks.ids),
        "a recommender with wide embeddings": (more_networks.FitsRecommender, more_networks.ids),
        "a ResNet by its stages": (more_networks.FitsResNet, more_networks.images),
        "a stack of LSTMs": (more_networks.FitsRecurrent, more_networks.ids),
        "a trunk with two heads": (more_networks.FitsTwoHeads, more_networks.ids),
        "a U-Net": (more_networks.FitsSkips, more_networks.images),
        "nanoGPT's shape": (networks.TrainsPacked, networks.batches),
        "torch's encoder and decoder": (networks.TrainsTranslator, networks.batches),
    }
    layouts: tuple[str, ...] = ("pp2", "pp2vp2-zb_v", "tp2", "tp2-sp", "dp2pp2tp2-zero")

    def __call__(self, model_type: str) -> L.LightningModule:
        make, _ = self.types[model_type]
        return make()

    def batches(self, model_type: str) -> list[Any]:
        """The batches that train the network of that name."""
        _, make_batches = self.types[model_type]
        return make_batches()
