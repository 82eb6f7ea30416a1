"""Steps written for one device with no thought of stages: what they compute, log and return is what it is there, or the
strategy refuses them and names the mode that does not."""

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_megatron.pipeline.module import PipelineModule
from tests.harness.ranks import RankFailed, run_on_ranks
from tests.harness.sample import diagonal
from tests.trainer.layouts import Layout, make_trainer
from tests.trainer.lightning_api.test_ledger import LAYOUTS, Case, Record, discrepancies, fit
from tests.trainer.modules import NUM_CLASSES, Data, Manual, Small, chain

# --- several calls of a model in a step -------------------------------------------------------------------------------


class Preferences(Small):
    """Learns from pairs against a frozen copy of itself: the policy is called twice, and so is the reference."""

    def __init__(self) -> None:
        super().__init__()
        del self.net
        torch.manual_seed(7)
        self.policy_parts, self.reference_parts = chain(), chain()

    def configure_model(self) -> None:
        super().configure_model()
        if not hasattr(self, "policy"):
            self.policy = PipelineModule.from_modules(dict(self.policy_parts.named_children()))
            self.reference = PipelineModule.from_modules(dict(self.reference_parts.named_children()))
            self.reference.requires_grad_(False).eval()
            del self.policy_parts, self.reference_parts

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        chosen, rejected = self.before(batch[0]), self.before(-batch[0])
        with torch.no_grad():
            known = self.reference(chosen).mean(-1) - self.reference(rejected).mean(-1)
        wanted = self.policy(chosen).mean(-1) - self.policy(rejected).mean(-1)
        loss = -functional.logsigmoid(wanted - known).mean() + self.after(chosen).square().mean()
        self.log_dict({"train_loss": loss, "reward": (wanted - known).mean()}, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.policy(self.before(batch[0])).square().mean())


class TwoViews(Small):
    """Calls the model twice and asks both outputs to agree."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        first, second = self.logits(batch[0]), self.logits(batch[0] * 1.1)
        loss = functional.cross_entropy(first, batch[1]) + functional.kl_div(
            first.log_softmax(-1), second.log_softmax(-1), log_target=True, reduction="batchmean"
        )
        self.log("train_loss", loss)
        return loss


class Branches(Small):
    """Decides by a value of its first call whether there is a second, and on what."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.logits(batch[0])
        if logits.argmax(-1).sum().item() % 2:
            logits = logits + self.logits(batch[0] * logits.mean().detach())
        return functional.cross_entropy(logits, batch[1])


class Decodes(Small):
    """Predicts token after token, each by a call on all that there are so far."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_CLASSES, 8)

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        tokens = batch[1][:, None]
        scores = []
        while tokens.shape[1] < 6 and len(scores) < 5:
            hidden = self.net(self.embedding(tokens)).mean(1)
            score, chosen = self.after(hidden).max(-1)
            scores.append(score)
            tokens = torch.cat([tokens, chosen[:, None]], 1)
        return {"tokens": tokens, "scores": torch.stack(scores, 1), "rows": len(tokens)}


def predictions(layout: Layout, _: Path) -> Record:
    trainer = make_trainer(layout)
    kept = trainer.predict(Decodes(), Data())
    return {"own kept": kept, "not kept": trainer.predict(Decodes(), Data(), return_predictions=False)}


# --- what a step returns ----------------------------------------------------------------------------------------------


class Returns(Small):
    """Returns more than its loss, and writes down what the hooks after the steps get."""

    def __init__(self) -> None:
        super().__init__()
        self.got: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.logits(batch[0])
        loss = functional.cross_entropy(logits, batch[1])
        return {"loss": loss, "logits": logits.detach(), "name": "step", "index": batch_idx}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return {"logits": self.logits(batch[0]), "index": batch_idx} if batch_idx else None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.got.append(outputs)

    def on_validation_batch_end(self, outputs: Any, *_: Any) -> None:
        self.got.append(outputs)


def returns(layout: Layout, _: Path) -> Record:
    module = Returns()
    shown = fit(layout, module)
    losses = [entry["loss"] for entry in module.got if isinstance(entry, dict) and "loss" in entry]
    return shown | {"losses": losses, "own got": module.got}


def returns_loss(layout: Layout, _: Path) -> Record:
    found = returns(layout, _)
    del found["own got"]
    return found


class Noisy(Small):
    """Adds noise to its inputs, as a diffusion model does, and drops some of its outputs."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs = batch[0] + torch.rand(len(batch[0]), 1) * torch.randn_like(batch[0])
        loss = functional.cross_entropy(functional.dropout(self.logits(inputs), 0.2), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", functional.cross_entropy(self.logits(batch[0] + torch.randn_like(batch[0])), batch[1]))


class SkipsSome(Small):
    """Skips every second batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx % 2 else loss


# --- batches of every shape -------------------------------------------------------------------------------------------


class Named(NamedTuple):
    inputs: Tensor
    classes: Tensor


@dataclass
class Record:
    inputs: Tensor
    classes: Tensor
    names: list[str]
    scale: float = 1.0


class Shaped(Small):
    """Turns each batch into another shape of the same, as a collate function would."""

    def __init__(self, shape: str) -> None:
        super().__init__()
        self.shape = shape

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        inputs, classes = batch[0], batch[1]
        names = [f"row {i}" for i in range(len(inputs))]
        match self.shape:
            case "dict":
                return {"x": {"inputs": inputs}, "classes": classes, "names": names, "scale": 1.0, "none": None}
            case "named tuple":
                return Named(inputs, classes)
            case "dataclass":
                return Record(inputs, classes, names)
            case "dataclass in a tuple":
                return inputs, Record(inputs, classes, names)
            case "tensor":
                return torch.cat([inputs, classes[:, None].double()], 1)
        return [inputs, [classes]]

    def _parts(self, batch: Any) -> tuple[Tensor, Tensor]:
        match self.shape:
            case "dict":
                assert len(batch["names"]) == len(batch["classes"])
                return batch["x"]["inputs"], batch["classes"]
            case "named tuple":
                return batch.inputs, batch.classes
            case "dataclass":
                assert len(batch.names) == len(batch.inputs)
                return batch.inputs, batch.classes
            case "dataclass in a tuple":
                assert len(batch[0]) == len(batch[1].inputs)
                return batch[0], batch[1].classes
            case "tensor":
                return batch[:, :-1], batch[:, -1].long()
        return batch[0], batch[1][0]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(self._parts(batch), batch_idx)  # type: ignore[no-any-return]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(self._parts(batch), batch_idx)


SHAPES = ("dict", "named tuple", "dataclass", "dataclass in a tuple", "tensor", "list")


# --- the table --------------------------------------------------------------------------------------------------------

CASES: dict[str, Case] = {
    "a frozen reference": lambda layout, _: fit(layout, Preferences()),
    "two views": lambda layout, _: fit(layout, TwoViews()),
    "a call that depends on another": lambda layout, _: fit(layout, Branches()),
    "manual optimization": lambda layout, _: fit(layout, Manual()),
    "decoding": predictions,
    "more than a loss": returns,
    "the loss of more": returns_loss,
    **{f"a batch as {shape}": lambda layout, _, s=shape: fit(layout, Shaped(s), max_epochs=1) for shape in SHAPES},  # type: ignore[misc]
    "noise": lambda layout, _: fit(layout, Noisy()),
    "a skipped batch": lambda layout, _: fit(layout, SkipsSome()),
}
SEVERAL_CALLS = ("a frozen reference", "two views", "a call that depends on another")


def names_for(layout: str) -> list[str]:
    """All that a layout can run; a schedule takes one call a step and hands on the loss alone, and Lightning skips no
    batch where there are several processes."""
    chosen = LAYOUTS[layout]
    without: set[str] = set()
    if chosen.pp > 1 and not chosen.collective:
        without |= {*SEVERAL_CALLS, "more than a loss"}
    if chosen.world > 1:
        without |= {"a skipped batch"}
    if chosen.pp > 1 or chosen.dp > 1:
        # Drawn alike on all stages, but not what one device draws: see test_alignment.
        without |= {"noise"}
    if chosen.dp > 1:
        # Each dp rank would decide by its own rows.
        without |= {"a call that depends on another"}
    if chosen.world > 2:
        return ["the loss of more", "manual optimization", "a batch as dict"]
    return [case for case in CASES if case not in without]


CELLS = diagonal([(layout, case) for layout in LAYOUTS if layout != "pp2 m1" for case in names_for(layout)])


@pytest.mark.matrix
@pytest.mark.parametrize(("layout", "case"), CELLS)
def test_a_step_does_what_it_does_on_one_device(layout: str, case: str) -> None:
    names = [name for chosen, name in CELLS if chosen == layout]
    assert discrepancies(__name__, names, LAYOUTS[layout], case, list(CASES)) == []


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("a frozen reference", 'holds 2 pipelined models .*PipelineConfig\\(mode="collective"\\)'),
        ("two views", 'more than once.*PipelineConfig\\(mode="collective"\\)'),
        (
            "a skipped batch",
            "returned no loss for a microbatch.*Lightning skips no batch either.*a loss of zero",
        ),
    ],
)
def test_what_a_schedule_cannot_run_is_refused_with_the_way_out(case: str, message: str) -> None:
    with pytest.raises(RankFailed, match=f"(?s){message}"):
        run_on_ranks(2, run_one, case, init=False)


def run_one(case: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        CASES[case](LAYOUTS["pp2"], Path())
