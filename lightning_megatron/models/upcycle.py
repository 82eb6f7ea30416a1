"""Upcycling of a dense model to one with experts that computes the same: initial weights of each expert.

    dense MLP    its F features in G parts          | part 0 | ... | part G-1 |
    experts      expert e is a copy of part e % G   | part 0 | ... | part G-1 | part 0 | ... | part G-1 | ...
    router       one row for G experts              | row 0 ................. | row 1 ................. | ...

G is the dense MLP's features divided by an expert's. G experts in a row have one logit, to rounding. Of equal ones the
first wins, and top_k is a multiple of G: a token chooses full MLPs. Where its weights sum up to a constant c the
output is the MLP's times c / G, and `down` starts G / c times as large. A bias of `up` is cut as its rows are; that of
`down` goes to every expert, divided by c.

Normalised weights sum up to their scaling factor whatever the logits are: the sum is exact, and router rows are drawn
as any other weight. Others depend on logits: there the rows are drawn so small that all experts weigh the same to about
the rounding of the router's dtype, and differ by just enough to choose by.

Source: He et al., arXiv 2410.07524, sections 3.2 (virtual groups) and 3.3 (scaling of weights).
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_megatron.comm import rng
from lightning_megatron.models.gpt import GPTConfig
from lightning_megatron.moe.config import MoEConfig
from lightning_megatron.sharding import Box

Read = Callable[[str, Box, Tensor], None]
"""Writes the box of a model's tensor of that name to memory, in the dtype of that."""

_OF_EXPERTS = re.compile(r"(layers\.\d+)\.moe\.(.+)")
# Logits of a router whose weights must not depend on them: so many roundings of a number near 1.
_NUM_ROUNDINGS = 32


@dataclass(frozen=True, kw_only=True)
class Upcycling:
    """Upcycling of a dense model to one with experts. Raises ValueError that lists all that keeps it from computing the
    same."""

    dense: GPTConfig
    """Architecture of the dense model."""
    moe: MoEConfig
    """Mixture of experts that replaces its MLPs; an expert has a part of the dense features, or all."""
    seed: int = 0
    """Seed of the router's initial weights."""

    def __post_init__(self) -> None:
        if faults := self.faults():
            raise ValueError("\n".join(f"upcycling: {fault}" for fault in faults))

    @property
    def config(self) -> GPTConfig:
        """The architecture of the model with experts."""
        return replace(self.dense, moe=self.moe)

    @property
    def width(self) -> int:
        """Features of an expert."""
        return self.moe.ffn_hidden_size or self.dense.ffn_hidden_size

    @property
    def granularity(self) -> int:
        """Into how many parts the dense features are cut: G."""
        return self.dense.ffn_hidden_size // self.width

    @property
    def scale(self) -> float:
        """Factor of `down`."""
        router = self.moe.router
        of_one = {"softmax": 1 / router.num_experts, "sigmoid": 0.5, "sqrt_softplus": math.sqrt(math.log(2))}
        total = 1.0 if router.norm_topk_prob else router.top_k * of_one[router.score_function]
        return self.granularity / (total * router.topk_scaling_factor)

    def faults(self) -> list[str]:
        """Everything that keeps the model with experts from computing what the dense one does, one sentence each."""
        router, width = self.moe.router, self.dense.ffn_hidden_size
        faults = self.moe.layer_faults(self.dense.num_layers)
        if self.dense.moe is not None:
            faults.append(f"the model has {self.dense.moe.router.num_experts} experts already; give a dense one")
        if self.moe.shared_expert_intermediate_size:
            faults.append(
                f"shared_expert_intermediate_size ({self.moe.shared_expert_intermediate_size}) must be 0: "
                "nothing in a dense model is a shared expert's"
            )
        if self.moe.capacity is not None:
            faults.append("capacity must be None: a token that is dropped gets less than the dense MLP gave")
        if router.routing_type != "top_k":
            faults.append(f"routing_type ({router.routing_type!r}) must be 'top_k': others do not choose whole MLPs")
        if width % self.width:
            fits = ", ".join(str(width // n) for n in range(1, width + 1) if width % n == 0)
            return [
                *faults,
                f"ffn_hidden_size of an expert ({self.width}) must divide the dense ({width}); it may be {fits}",
            ]
        parts = f"the parts of a dense MLP ({self.granularity} = {width} / {self.width})"
        faults += [
            f"{name} ({size}) must be a multiple of {parts}"
            for name, size in (("num_experts", router.num_experts), ("top_k", router.top_k))
            if size % self.granularity
        ]
        size = router.num_experts // router.num_groups
        if router.group_topk < router.num_groups and size % self.granularity:
            faults.append(f"the experts of a group ({size}) must be a multiple of {parts}, or a choice cuts an MLP")
        return faults

    def read(self, name: str, box: Box, out: Tensor, dense: Read) -> None:
        """Writes a box of one of the tensors of the model with experts to `out`, as `dense` has the dense model's.

        Reads of the dense tensor what the box needs, once.
        """
        found = _OF_EXPERTS.fullmatch(name)
        if found is None:
            dense(name, box, out)
        elif found[2] == "router.weight":
            self._fill_router(name, box, out)
        else:
            self._fill_experts(f"{found[1]}.mlp", found[2].removeprefix("experts."), box, out, dense)

    def _fill_router(self, name: str, box: Box, out: Tensor) -> None:
        router = self.moe.router
        std = self.dense.init_std
        if not router.norm_topk_prob:
            dtype = torch.promote_types(out.dtype, getattr(torch, router.dtype))
            # Features of a token are about 1 after a norm.
            std = _NUM_ROUNDINGS * torch.finfo(dtype).eps / math.sqrt(self.dense.hidden_size)
        shape = (router.num_experts // self.granularity, self.dense.hidden_size)
        rows = torch.empty(shape, dtype=torch.promote_types(out.dtype, torch.float32), device=out.device)
        rng.fill_normal_(rows, std, rng.key(self.seed, name), shape, (0, 0))
        rows = rows.repeat_interleave(self.granularity, 0)
        out.copy_(rows.narrow(0, box.offsets[0], box.sizes[0]).narrow(1, box.offsets[1], box.sizes[1]))

    def _fill_experts(self, mlp: str, kind: str, box: Box, out: Tensor, dense: Read) -> None:
        """`up` [E, (2,) F/G, H] of [(2,) F, H], `up_bias` [E, (2,) F/G] of [(2,) F], `down` [E, H, F/G] of [H, F], or
        `down_bias` [E, H] of [H]."""
        linear, _, what = kind.partition("_")
        # From the end: where the features of an expert are, if the tensor has them.
        cut = {"up": -2, "up_bias": -1, "down": -1}.get(kind)
        scale = {"down": self.scale, "down_bias": self.scale / self.granularity}.get(kind, 1.0)
        for index in range(min(box.sizes[0], self.granularity)):
            offsets = list(box.offsets[1:])
            if cut is not None:
                offsets[cut] += (box.offsets[0] + index) % self.granularity * self.width
            dense(f"{mlp}.{linear}.{what or 'weight'}", Box(tuple(offsets), box.sizes[1:]), out[index])
            out[index].mul_(scale)
        for index in range(self.granularity, box.sizes[0]):
            out[index].copy_(out[index - self.granularity])
