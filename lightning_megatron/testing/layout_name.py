"""Layouts by short names, such as `dp2tp2` or `pp2-collective`, and the strategy of each.

A name is a row of sizes (`tp2`, `pp2`, `vp2`, `cp2`, `ep2`, `etp2`, `dp2`, `m4` for microbatches), of words and of the
name of a schedule (`zb_v`), in any order; `-`, `+` and `.` between them are for the eye.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, cast

from lightning_megatron.optim.config import OptimizerConfig, OptimizerKind
from lightning_megatron.pipeline.registry import SCHEDULES, ScheduleName

if TYPE_CHECKING:
    from lightning_megatron.trainer.strategy import MegatronStrategy

WORDS = {
    "sp": "sequence parallelism",
    "zero3": "the distributed optimizer with sharded gradients and parameters",
    "zero2": "the distributed optimizer with sharded gradients",
    "zero": "the distributed optimizer",
    "hybrid": "shards over two data-parallel ranks, and copies over the others",
    "offload": "the optimizer's step on the host",
    "collective": "collective mode",
}
"""Words of a name that are no size, and what each is."""

_KINDS: dict[str, OptimizerKind] = {
    "zero3": "distributed_parameters",
    "zero2": "distributed_gradients",
    "zero": "distributed",
}

MOST_RANKS = 8
"""Ranks of a layout, each a process of this machine."""

DEFAULT = ("m2", "dp2", "dp2-zero", "tp2", "tp2-sp", "pp2", "pp2-collective", "cp2", "dp2tp2", "dp2pp2", "tp2pp2")
"""Layouts of 1, 2 and 4 ranks that are run where none is asked for."""
OF_EXPERTS = ("ep2", "ep2-zero", "tp2-sp-ep2")
"""Further ones for a module that has experts."""

_SIZES = ("etp", "tp", "pp", "vp", "cp", "ep", "dp", "m")
_PART = re.compile(rf"({'|'.join(_SIZES)})(\d+)|({'|'.join(WORDS)})|({'|'.join(SCHEDULES)})|[-+.,_ ]")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of the axes, the number of microbatches, and the settings that a name has words for."""

    name: str
    tp: int = 1
    pp: int = 1
    vp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    dp: int = 1
    microbatches: int = 1
    has_sequence_parallel: bool = False
    optimizer: OptimizerKind = "replicated"
    is_hybrid: bool = False
    is_offloaded: bool = False
    is_collective: bool = False
    schedule: ScheduleName | Literal["auto"] = "auto"

    @property
    def world(self) -> int:
        """Ranks of the layout."""
        return self.tp * self.pp * self.cp * self.dp

    @property
    def num_parts(self) -> int:
        """Parts into which the rows of a global batch are divided."""
        return self.dp * self.microbatches

    @property
    def axes(self) -> frozenset[str]:
        """What the layout divides over ranks."""
        return frozenset(axis for axis in ("tp", "pp", "cp", "ep", "etp") if getattr(self, axis) > 1)

    def strategy(self, timeout_seconds: float) -> "MegatronStrategy":
        """A new strategy of this layout."""
        # Lightning takes seconds to import, and whoever reads or checks a name need not wait for it.
        from lightning_megatron.trainer.config import PipelineConfig
        from lightning_megatron.trainer.strategy import MegatronStrategy

        return MegatronStrategy(
            tensor_model_parallel_size=self.tp,
            pipeline_model_parallel_size=self.pp,
            virtual_pipeline_model_parallel_size=self.vp,
            context_parallel_size=self.cp,
            expert_model_parallel_size=self.ep,
            expert_tensor_parallel_size=self.etp,
            sequence_parallel=self.has_sequence_parallel,
            num_microbatches=self.microbatches,
            pipeline=PipelineConfig(mode="collective" if self.is_collective else "auto", schedule=self.schedule),
            optimizer=OptimizerConfig(
                kind=self.optimizer, shard_size=2 if self.is_hybrid else 0, cpu_offload=self.is_offloaded
            ),
            timeout_seconds=timeout_seconds,
        )


def layout_of(name: str) -> Layout:
    """The layout of a name. Raises ValueError for one that names none.

    A pipeline has two microbatches unless the name says another number; experts have the data-parallel ranks that they
    need.
    """
    sizes, words, end = dict.fromkeys(_SIZES, 0), set(), 0
    schedule: ScheduleName | Literal["auto"] = "auto"
    while end < len(name) and (part := _PART.match(name, end)):
        end = part.end()
        if part[1]:
            sizes[part[1]] = int(part[2])
        elif part[3]:
            words.add(part[3])
        elif part[4]:
            schedule = cast(ScheduleName, part[4])
    if end < len(name) or not (words or any(sizes.values())):
        raise ValueError(
            f"layout {name!r} must be made of sizes ({', '.join(f'{size}2' for size in _SIZES)}) and of "
            f"{', '.join((*WORDS, *SCHEDULES))}, as in tp2, dp2pp2 or pp2m4-collective"
        )
    tp, cp, experts = sizes["tp"] or 1, sizes["cp"] or 1, (sizes["ep"] or 1) * (sizes["etp"] or 1)
    dp = sizes["dp"] or experts // math.gcd(experts, tp * cp)
    pp = sizes["pp"] or 1
    layout = Layout(
        name=name,
        tp=tp,
        pp=pp,
        vp=sizes["vp"] or 1,
        cp=cp,
        ep=sizes["ep"] or 1,
        etp=sizes["etp"] or 1,
        dp=dp,
        microbatches=sizes["m"] or (2 if pp > 1 else 1),
        has_sequence_parallel="sp" in words,
        optimizer=next((kind for word, kind in _KINDS.items() if word in words), "replicated"),
        is_hybrid="hybrid" in words,
        is_offloaded="offload" in words,
        is_collective="collective" in words,
        schedule=schedule,
    )
    if layout.is_collective and schedule != "auto":
        raise ValueError(
            f"layout {name!r} names a schedule ({schedule}), and collective steps run under none; leave one of them out"
        )
    if layout.world > MOST_RANKS:
        raise ValueError(
            f"layout {name!r} has {layout.world} ranks, each a process of this machine, and may have {MOST_RANKS}; "
            "halve its sizes: what goes wrong with 4 ranks of an axis goes wrong with 2"
        )
    return layout


def layouts_of(names: Iterable[str]) -> list[Layout]:
    """The layouts of several names, each another. Raises ValueError with all errors, one a line."""
    if isinstance(names, str):
        raise ValueError(f"layouts ({names!r}) must be a list of names, or 'all'; use {names.split(',')}")
    found: dict[Layout, Layout] = {}
    faults = []
    for name in names:
        try:
            layout = layout_of(name)
        except ValueError as error:
            faults.append(str(error))
            continue
        known = found.setdefault(replace(layout, name=""), layout)
        if known is not layout:
            faults.append(f"layouts {known.name!r} and {name!r} are the same; leave one out")
    if not (found or faults):
        faults.append("layouts are empty and must name at least one, as 'dp2'; 'all' are those of 1, 2 and 4 ranks")
    if faults:
        raise ValueError("\n".join(faults))
    return list(found.values())


def refused_before(layout: Layout, refused: Sequence[Layout]) -> Layout | None:
    """A refused layout all of whose axes the given one has too: it would be refused alike."""
    return next((one for one in refused if one.axes and one.axes < layout.axes), None)
