"""The device mesh as one rank sees it: named axes over two factorisations of the same world.

It is built once, when the process group is up, before the first step; every layer then gets the axes it talks over as
constructor arguments.

    dense   world = pp x dp  x cp x tp     tp varies fastest: tp neighbours sit on one node
    expert  world = pp x edp x ep x etp    the same pipeline stages, the other axes folded anew

cp is ring x Ulysses, Ulysses varying fastest: a ring of keys and values, of groups that exchange heads.

A stage's coordinate runs against the global rank: the last stage sits on global rank 0, because code after the model
call runs on the last stage and loggers, progress bars and `is_global_zero` live on global rank 0.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain
from typing import Any, Literal

from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_megatron.config_dataclass import config_dataclass
from lightning_megatron.handles import handle_of

DENSE = ("pp", "dp", "cp", "tp")
EXPERT = ("pp", "edp", "ep", "etp")
# Unions of axes with a collective over them. Gradients: dp+cp. One model's parameters: pp+tp. Ranks that must see one
# batch: pp+cp+tp. Only these get process groups, because each group costs threads and memory on every rank.
UNIONS = (("dp", "cp"), ("pp", "tp"), ("pp", "cp", "tp"))

NewGroup = Callable[[tuple[int, ...]], ProcessGroup | None]

Placement = Literal["loop", "v"]
"""Which stages a pipeline rank holds: every pp-th (loop), or the two at equal distance from the middle (v)."""


ContextExchange = Literal["ring", "all_gather"]
"""Exchange of keys and values over cp: around a ring, or by an all-gather."""

AttentionKernel = Literal["fused", "flex"]
"""Kernel of attention within documents or over cp on CUDA: fused ones, or one that FlexAttention compiles."""


@config_dataclass
class StageLayout:
    """Spread of a model's parts over pipeline stages; `pipeline.layout` reads it and reports errors."""

    text: str = ""
    """Every stage written out: E embedding, t layer, L output head, | between stages, as in "Et*3|t*4|t*4|tL". Excludes
    all other fields; empty: the stages follow from those."""
    balance: Literal["layers", "cost"] = "layers"
    """Spread of the layers. layers: equally many for each stage; cost: so that the slowest stage is fastest."""
    num_layers_in_first_stage: int = 0
    """Layers in the first stage; 0: as many as in the others."""
    num_layers_in_last_stage: int = 0
    """Layers in the last stage; 0: as many as in the others."""
    counts_embedding: bool = False
    """Count the embedding as a layer when layers are spread over stages."""
    counts_head: bool = False
    """Count the output head as a layer when layers are spread over stages."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of the axes, and what else describes a layout; dp and edp follow from the world. `faults` lists errors."""

    world: int = 1
    """World size: number of ranks in all."""
    tp: int = 1
    """Tensor-parallel size: ranks that share each layer's weights."""
    pp: int = 1
    """Pipeline-parallel size: ranks that share the layers."""
    cp: int = 1
    """Context-parallel size: ranks that share each sequence."""
    cp_ulysses: int = 1
    """Neighbouring ranks of cp that exchange heads for tokens (Ulysses); across them keys and values are exchanged."""
    cp_exchange: ContextExchange = "ring"
    """Exchange of keys and values over cp."""
    attention_kernel: AttentionKernel = "fused"
    """Kernel of attention within documents or over cp on CUDA."""
    pads_uneven: bool = True
    """Whether a sequence that cp does not divide is padded; else it is refused."""
    context_groups: tuple[int, ...] = ()
    """Sizes of groups of neighbours among dp x cp over which single microbatches may be cut instead of over cp."""
    context_groups_by_heads: bool = False
    """Whether such a group exchanges heads for tokens; else it exchanges keys and values by `cp_exchange`."""
    ep: int = 1
    """Expert-parallel size: ranks that share the experts of a layer."""
    etp: int = 1
    """Expert-tensor-parallel size: ranks that share each expert's weights."""
    sequence_parallel: bool = False
    """Whether activations between tensor-parallel regions are cut over tp."""
    vp: int = 1
    """Virtual-pipeline-parallel size: stages (model chunks) on each pp rank."""
    placement: Placement = "loop"
    """Which pp rank holds which stages."""
    stage_layout: StageLayout = field(default_factory=StageLayout)
    """Spread of the model's parts over stages."""

    def faults(self) -> list[str]:
        """Every rule that these sizes break, one sentence each."""
        faults = [
            f"{name} ({size}) must be at least 1"
            for name, size in (
                ("tensor_model_parallel_size", self.tp),
                ("pipeline_model_parallel_size", self.pp),
                ("context_parallel_size", self.cp),
                ("expert_model_parallel_size", self.ep),
                ("expert_tensor_parallel_size", self.etp),
                ("virtual_pipeline_model_parallel_size", self.vp),
                ("world size", self.world),
            )
            if size < 1
        ]
        if faults:
            return faults
        if self.vp > 1 and self.pp == 1:
            faults.append(
                f"virtual_pipeline_model_parallel_size ({self.vp}) needs pipeline_model_parallel_size above 1; "
                "with one rank use 1"
            )
        if self.cp_ulysses < 1 or self.cp % self.cp_ulysses:
            fits = ", ".join(str(n) for n in range(1, self.cp + 1) if self.cp % n == 0)
            faults.append(
                f"ulysses_size ({self.cp_ulysses}) must divide context_parallel_size ({self.cp}); it may be {fits}"
            )
        faults += [
            f"a group of {size} ranks does not divide the {self.dp * self.cp} data x context parallel ranks"
            for size in self.context_groups
            if self.world % (self.pp * self.cp * self.tp) == 0 and self.dp * self.cp % size
        ]
        products = [(self.pp * self.cp * self.tp, "pipeline x context x tensor")]
        if self.ep * self.etp > 1:
            # With no expert axis this product repeats the first.
            products.append((self.pp * self.ep * self.etp, "pipeline x expert x expert tensor"))
        for product, names in products:
            if self.world % product:
                below, above = self.world // product * product, (self.world // product + 1) * product
                fits = " or ".join(str(n) for n in (below, above) if n)
                faults.append(
                    f"world size ({self.world}) must be a multiple of {names} parallel size ({product}); "
                    f"use {fits} processes, or sizes whose product divides {self.world}"
                )
        return faults

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages of the whole model."""
        return self.pp * self.vp

    def pp_rank_of(self, stage: int) -> int:
        """The pp rank that holds a stage; the last stage is on the last rank under either placement."""
        if self.placement == "loop":
            return stage % self.pp
        return self.pp - 1 - stage if stage < self.pp else stage - self.pp

    @property
    def dp(self) -> int:
        return self.world // (self.pp * self.cp * self.tp)

    @property
    def edp(self) -> int:
        return self.world // (self.pp * self.ep * self.etp)

    def of(self, name: str) -> int:
        """Size of the axis with that short name."""
        size: int = getattr(self, name)
        return size


@dataclass(frozen=True)
class Axis:
    """One line of ranks through the mesh that talk to each other; `ranks` are global, in the order of the axis."""

    name: str
    size: int
    rank: int
    ranks: tuple[int, ...]
    group: ProcessGroup | None = field(default=None, compare=False, repr=False)
    handle: Tensor | None = field(init=False, compare=False, repr=False)
    """Handle of a weak reference to the axis, for compiled code; None without a process group."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "handle", None if self.group is None else handle_of(weakref.ref(self)))

    @staticmethod
    def alone(global_rank: int, name: str = "alone") -> "Axis":
        """An axis of one rank: a tensor cut over it is unsharded, and no message is sent."""
        return Axis(name, 1, 0, (global_rank,))

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1

    def __deepcopy__(self, memo: dict[int, Any]) -> "Axis":
        # A copy of a layer talks over the same axis; a process group cannot be copied.
        return self

    def __reduce__(self) -> tuple[type["Axis"], tuple[str, int, int, tuple[int, ...]]]:
        # A process group cannot be pickled: what comes back is the arithmetic alone.
        return Axis, (self.name, self.size, self.rank, self.ranks)


@lru_cache(maxsize=8)
def _world_ranks(size: int) -> tuple[int, ...]:
    return tuple(range(size))


def _coordinates(sizes: Sizes, names: tuple[str, ...], global_rank: int) -> dict[str, int]:
    """Coordinate of a global rank on each axis; pp counts stages, so it runs backwards."""
    coordinates: dict[str, int] = {}
    rest = global_rank
    for name in reversed(names):
        rest, coordinates[name] = divmod(rest, sizes.of(name))
    coordinates["pp"] = sizes.pp - 1 - coordinates["pp"]
    return coordinates


def _line(
    sizes: Sizes, names: tuple[str, ...], along: tuple[str, ...], global_rank: int
) -> tuple[int, tuple[int, ...]]:
    """Rank on, and global ranks of, the line through `global_rank` along some axes, the first of them slowest."""
    coordinates = _coordinates(sizes, names, global_rank)
    stride: dict[str, int] = {}
    step = 1
    for name in reversed(names):
        stride[name] = -step if name == "pp" else step
        step *= sizes.of(name)
    ranks = [global_rank - sum(coordinates[name] * stride[name] for name in along)]
    own = 0
    for name in along:
        # Without a loop in Python over ranks of which there may be thousands.
        step, length = stride[name], sizes.of(name) * stride[name]
        ranks = [*chain.from_iterable(range(rank, rank + length, step) for rank in ranks)]
        own = own * sizes.of(name) + coordinates[name]
    return own, tuple(ranks)


@dataclass(frozen=True, eq=False)
class Mesh:
    """Every axis of one rank. `build` makes process groups, `imagine` makes none, `single` is one device."""

    global_rank: int
    sizes: Sizes
    axes: dict[str, Axis]

    @staticmethod
    def imagine(rank: int, sizes: Sizes) -> "Mesh":
        """The mesh as `rank` would see it, with no process groups: for plans, dry runs and tests."""
        return Mesh._make(rank, sizes, lambda ranks: None)

    @staticmethod
    def single() -> "Mesh":
        """The mesh of one device."""
        return Mesh.imagine(0, Sizes())

    @staticmethod
    def build(sizes: Sizes, global_rank: int, new_group: NewGroup) -> "Mesh":
        """The mesh with a process group on every axis longer than 1.

        `new_group(ranks)` gets ascending global ranks and is called once for each distinct set that this rank belongs
        to, in the same order of axes on every rank.
        """
        groups: dict[tuple[int, ...], ProcessGroup | None] = {}

        def group_of(ranks: tuple[int, ...]) -> ProcessGroup | None:
            if len(ranks) == 1:
                return None
            members = tuple(sorted(ranks))
            if members not in groups:
                groups[members] = new_group(members)
            return groups[members]

        return Mesh._make(global_rank, sizes, group_of)

    @staticmethod
    def _make(global_rank: int, sizes: Sizes, group_of: NewGroup) -> "Mesh":
        if faults := sizes.faults():
            raise ValueError("\n".join(faults))
        if not 0 <= global_rank < sizes.world:
            raise ValueError(f"rank ({global_rank}) must be from 0 to world size - 1 ({sizes.world - 1})")
        lines: list[tuple[tuple[str, ...], tuple[str, ...]]] = [(n, (name,)) for n in (DENSE, EXPERT) for name in n]
        lines += [(DENSE, union) for union in UNIONS]
        axes: dict[str, Axis] = {}
        for names, along in lines:
            name = "+".join(along)
            if name not in axes:
                own, ranks = _line(sizes, names, along, global_rank)
                axes[name] = Axis(name, len(ranks), own, ranks, group_of(ranks))
        cp = axes["cp"]
        ring, ulysses = divmod(cp.rank, sizes.cp_ulysses)
        for name, own, ranks in (
            ("cp_ring", ring, cp.ranks[ulysses :: sizes.cp_ulysses]),
            ("cp_ulysses", ulysses, cp.ranks[ring * sizes.cp_ulysses :][: sizes.cp_ulysses]),
        ):
            axes[name] = Axis(name, len(ranks), own, ranks, group_of(ranks))
        line = axes["dp+cp"]
        for size in sizes.context_groups:
            block, own = divmod(line.rank, size)
            ranks = line.ranks[block * size :][:size]
            axes[f"context{size}"] = Axis(f"context{size}", size, own, ranks, group_of(ranks))
        world = _world_ranks(sizes.world)
        # `sp` is tp where activations are cut over it, else an axis of one rank: layers take `sp` and need no flag.
        axes["world"] = Axis("world", sizes.world, global_rank, world, group_of(world))
        axes["sp"] = replace(axes["tp"], name="sp") if sizes.sequence_parallel else Axis.alone(global_rank, "sp")
        return Mesh(global_rank, sizes, axes)

    def axis(self, name: str) -> Axis:
        """The axis called `name`: a short name, `sp`, `cp_ring`, `cp_ulysses`, `world`, or a union (`dp+cp`)."""
        if name not in self.axes:
            raise ValueError(f"axis {name!r} is not on the mesh; there are {', '.join(self.axes)}")
        return self.axes[name]

    def context_group(self, size: int) -> Axis:
        """The ranks that share a microbatch which is cut over `size` of them, one of `Sizes.context_groups`."""
        return self.axis(f"context{size}")

    @property
    def own_stages(self) -> tuple[int, ...]:
        """The stages of this pp rank, in the order of the model."""
        return tuple(s for s in range(self.sizes.num_stages) if self.sizes.pp_rank_of(s) == self.pp.rank)

    @property
    def tp(self) -> Axis:
        return self.axes["tp"]

    @property
    def sp(self) -> Axis:
        return self.axes["sp"]

    @property
    def pp(self) -> Axis:
        return self.axes["pp"]

    @property
    def cp(self) -> Axis:
        return self.axes["cp"]

    @property
    def dp(self) -> Axis:
        return self.axes["dp"]

    @property
    def world(self) -> Axis:
        return self.axes["world"]


_AMBIENT: ContextVar[Mesh | None] = ContextVar("lightning_megatron_mesh", default=None)


def ambient_mesh() -> Mesh:
    """The mesh that the running strategy set up, or that of one device. Only constructors of full models read it."""
    return _AMBIENT.get() or Mesh.single()


@contextmanager
def ambient(mesh: Mesh) -> Iterator[Mesh]:
    """Makes `mesh` the ambient mesh inside the block."""
    token = _AMBIENT.set(mesh)
    try:
        yield mesh
    finally:
        _AMBIENT.reset(token)
