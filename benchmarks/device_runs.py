"""Training runs of one Llama or Mixtral shape on one device, ours and the peers', with their times and memory.

All start from the same weights and see the same rows. Weights are float32 and products bf16 by autocast; gradients are
clipped to norm 1; fused AdamW. A step is some microbatches and one update; its time is from the end of the step before
to its own end, so that all that is between steps counts.
"""

import importlib.util
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.plain_llama import build_plain, our_weights
from lightning_megatron.models import GPTConfig, GPTModel
from lightning_megatron.precision.kernels import AttentionLibrary
from lightning_megatron.transformer import cost
from lightning_megatron.transformer.recompute import RecomputePart

# Larger ones make the first steps of Adam diverge, and with them the losses of implementations that round differently.
LEARNING_RATE = 1e-5
# Documents of a packed row, equally long, and the probability of dropout.
DOCUMENTS, DROPOUT = 8, 0.1
# Of a parameter: its main weight and both moments of Adam, in float32.
BYTES_OF_STATE = 12


class NotHere(Exception):
    """Raised where a row's requirements are not installed, not on this device, or not in the package yet."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A plan of a training run: model, device and number of steps."""

    config: GPTConfig
    sequence: int
    microbatch_rows: int
    microbatches: int
    warmup_steps: int
    timed_steps: int
    device: torch.device

    @property
    def step_rows(self) -> int:
        return self.microbatch_rows * self.microbatches

    def make_loader(self, dp: int = 1) -> Any:
        """Batches of a data-parallel rank's samples of a step; unevenly distributed tokens make something to learn."""
        generator = torch.Generator().manual_seed(1)
        shape = ((self.warmup_steps + self.timed_steps) * self.step_rows, self.sequence + 1)
        tokens = (torch.rand(shape, generator=generator) ** 4 * self.config.vocab_size).long()
        data = torch.utils.data.TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        return torch.utils.data.DataLoader(data, batch_size=self.step_rows // dp)


class Recorder:
    """Losses, times and memory of the steps of a run."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.is_cuda = plan.device.type == "cuda"
        self.losses: list[Tensor] = []
        self.ends: list[Any] = []
        self.more: dict[str, Any] = {}
        """Further figures of a run."""

    def add(self, loss: Tensor) -> None:
        """Notes the end of a step without waiting for the device."""
        self.losses.append(loss.detach())
        if self.is_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.ends.append(event)
        else:
            self.ends.append(time.perf_counter())
        if self.is_cuda and len(self.ends) == self.plan.warmup_steps:
            # The memory of building and compiling is not that of training.
            torch.cuda.reset_peak_memory_stats(self.plan.device)

    def figures(self) -> dict[str, Any]:
        """Seconds of each timed step, the loss of every step, and the peak of memory in bytes."""
        ends = self.ends[self.plan.warmup_steps - 1 :]
        pairs = list(pairwise(ends))
        if self.is_cuda:
            torch.cuda.synchronize(self.plan.device)
            seconds = [before.elapsed_time(after) / 1e3 for before, after in pairs]
            peak_bytes = torch.cuda.max_memory_allocated(self.plan.device)
        else:
            seconds = [after - before for before, after in pairs]
            status = Path("/proc/self/status").read_text().splitlines()
            peak_bytes = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
        losses = [loss.item() for loss in self.losses]
        return {"seconds": seconds, "losses": losses, "peak_bytes": peak_bytes, **self.more}


def train_ours(
    plan: Plan,
    recorder: Recorder,
    *,
    strategy: Callable[[GPTConfig], dict[str, Any]] = lambda config: {},
    inputs: dict[str, Tensor] | None = None,
    **trainer_options: Any,
) -> None:
    """Our GPT under the Trainer and MegatronStrategy, with more arguments of these and inputs of the model."""
    from benchmarks.fit import fit
    from lightning_megatron.precision.fp8 import engine_faults
    from lightning_megatron.trainer.setup.attention_library import attention_faults

    arguments = strategy(plan.config)
    if "kernels" in arguments and (faults := attention_faults(arguments["kernels"], plan.device)):
        raise NotHere(f"left out: {faults[0]}")
    if "fp8" in arguments and (faults := engine_faults(arguments["fp8"])):
        raise NotHere(f"left out: {faults[0]}")

    def build() -> GPTModel:
        model = GPTModel(plan.config)
        model.load_state_dict(our_weights(build_plain(plan.config, plan.device), plan.config))
        return model

    fit(
        build,
        lambda dp: plan.make_loader(),
        {"num_microbatches": plan.microbatches, **arguments},
        make_optimizer,
        recorder.add,
        inputs,
        accelerator="gpu" if plan.device.type == "cuda" else "cpu",
        devices=1,
        precision="bf16-mixed",
        **trainer_options,
    )


def train_saving(plan: Plan, recorder: Recorder) -> None:
    """Our GPT, whose state is saved after the warm-up; timed steps run while it is written."""
    from benchmarks.timed_saves import TimedSaves

    needed = BYTES_OF_STATE * cost.model_parameters(plan.config)
    with tempfile.TemporaryDirectory() as folder:
        free = {
            "on the disk": shutil.disk_usage(folder).free,
            "in host memory": os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        }
        # Of files two saves are there for a moment.
        for place, of_saves in (("on the disk", 2), ("in host memory", 1)):
            if free[place] < of_saves * needed:
                missing = f"{of_saves * needed / 1e9:.0f} GB, of which {free[place] / 1e9:.0f} are free {place}"
                raise NotHere(f"left out: it needs {missing}; --layers takes fewer")
        saves = TimedSaves(plan.warmup_steps, Path(folder), plan.device)
        train_ours(plan, recorder, callbacks=[saves])
        recorder.more["saves"] = saves.figures


def train_packed(plan: Plan, recorder: Recorder) -> None:
    """Our GPT on rows of several documents, which see nothing of each other."""
    if plan.sequence % DOCUMENTS:
        raise NotHere(f"left out: rows of {plan.sequence} tokens have no {DOCUMENTS} documents of one length")
    # On the host, as the data modules of the package keep them.
    segments_S = torch.arange(DOCUMENTS).repeat_interleave(plan.sequence // DOCUMENTS)
    train_ours(plan, recorder, inputs={"segments": segments_S.expand(plan.microbatch_rows, -1)})


def train_dropping(plan: Plan, recorder: Recorder) -> None:
    """Our GPT with dropout of hidden states and of weights of attention."""
    config = replace(plan.config, hidden_dropout=DROPOUT, attention_dropout=DROPOUT)
    train_ours(replace(plan, config=config), recorder)


def engine_strategy(config: GPTConfig, *, scaling: Literal["none", "current"]) -> dict[str, Any]:
    """The strategy's arguments by which Transformer Engine computes layers, in FP8 unless the scaling is none."""
    from lightning_megatron import Fp8Config

    return {"fp8": Fp8Config(engine="transformer_engine", scaling=scaling)}


def fp8_strategy(config: GPTConfig) -> dict[str, Any]:
    """The strategy's arguments that make the linears' products FP8."""
    from lightning_megatron import Fp8Config

    return {"fp8": Fp8Config()}


def compiled_strategy(config: GPTConfig) -> dict[str, Any]:
    """The strategy's arguments by which torch.compile compiles every layer."""
    from lightning_megatron import KernelConfig

    return {"kernels": KernelConfig(compile_layers=True)}


def attention_strategy(config: GPTConfig, *, library: AttentionLibrary) -> dict[str, Any]:
    """The strategy's arguments by which another library computes attention."""
    from lightning_megatron import KernelConfig

    return {"kernels": KernelConfig(attention=library)}


def recompute_strategy(config: GPTConfig) -> dict[str, Any]:
    """Arguments of the strategy that recompute the cheap activations of every layer in the backward."""
    from lightning_megatron import RecomputeConfig

    # Layers of experts do not offer their activation alone.
    parts: tuple[RecomputePart, ...] = ("norm", "activation") if config.moe is None else ("norm",)
    return {"recompute": RecomputeConfig(granularity="selective", parts=parts)}


def train_plain(plan: Plan, recorder: Recorder, *, is_compiled: bool) -> None:
    """A Llama or a Mixtral in plain torch."""
    model = build_plain(plan.config, plan.device)
    if is_compiled:
        model.compile()
    _train(plan, recorder, model, model)


def train_hugging_face(plan: Plan, recorder: Recorder, *, with_liger: bool = False) -> None:
    """Hugging Face's Llama or Mixtral, with torch's attention, as it comes or with the kernels of Liger."""
    if importlib.util.find_spec("transformers") is None:
        raise NotHere("left out: transformers is not installed")
    if with_liger and importlib.util.find_spec("liger_kernel") is None:
        raise NotHere("left out: liger-kernel is not installed")
    if with_liger and plan.device.type != "cuda":
        raise NotHere("left out: the kernels of Liger run on a GPU")
    from benchmarks.hugging_face import build_hugging_face

    config = plan.config
    with plan.device:
        model = build_hugging_face(config)
    model.load_state_dict(build_plain(config, plan.device).state_dict())

    if with_liger:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=model)

    def loss_of(tokens: Tensor, labels: Tensor) -> Tensor:
        if with_liger:
            # Its loss is fused with the product before it.
            loss: Tensor = model(tokens, labels=labels, shift_labels=labels).loss
            return loss
        # Its own loss would shift the labels, which are shifted already.
        logits = model(tokens).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())

    _train(plan, recorder, model.train(), loss_of)


def _train(plan: Plan, recorder: Recorder, model: nn.Module, loss_of: Callable[[Tensor, Tensor], Tensor]) -> None:
    """A hand-written loop of the same steps that the Trainer makes."""
    optimizer = make_optimizer(model.parameters())
    for batch in plan.make_loader():
        optimizer.zero_grad()
        losses = []
        for tokens, labels in _microbatches(plan, batch):
            with torch.autocast(plan.device.type, torch.bfloat16):
                loss = loss_of(tokens, labels) / plan.microbatches
            loss.backward()
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        recorder.add(torch.stack(losses).sum())


def _microbatches(plan: Plan, batch: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    tokens, labels = (part.to(plan.device) for part in batch)
    yield from zip(tokens.split(plan.microbatch_rows), labels.split(plan.microbatch_rows), strict=True)


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)
