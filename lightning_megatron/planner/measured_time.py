"""Seconds of a step from what dry runs counted, of any model: kernels at the rates of a GPU, messages by their links.

No formula of a layer is read: a model's own operations are timed one by one, as torch runs them. What is timed is
otherwise as in `step_time`, whose constants it takes, and which composes the step.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache

from lightning_megatron.mesh import Mesh, Sizes
from lightning_megatron.planner.collective_time import Group, exchange_seconds, gather_seconds, groups_of, hop_seconds
from lightning_megatron.planner.constants import Constants
from lightning_megatron.planner.fake_process_group import Messages
from lightning_megatron.planner.hardware import GIGA, Gpu
from lightning_megatron.planner.measured import RankWork
from lightning_megatron.planner.run import RunSettings
from lightning_megatron.planner.step_time import ROUTING, Pass, StepTime, composed, share_in_chunks
from lightning_megatron.planner.step_trace import Passes, Work

# Data-parallel ranks send gradients and weights alone; the first microbatch gathers the weights.
_OF_WEIGHTS = ("dp", "edp")
# Of a layer's forward: up, with the gate, and down.
_PRODUCTS_OF_EXPERTS = 2


def measured_time(run: RunSettings, ranks: Sequence[RankWork], gpu: Gpu, constants: Constants) -> StepTime:
    """Time of a step of pipeline ranks that do this work, first stage first."""
    passes = [_passes(run, rank, gpu, constants) for rank in ranks]
    steps = [rank.step for rank in ranks]
    return composed(run, passes, lambda index: ranks[index].trained, steps, gpu, constants)


def timed(run: RunSettings, passes: Passes, gpu: Gpu, constants: Constants) -> tuple[Pass, Pass]:
    """Seconds of the kernels and the messages of a forward and a backward, without those between stages."""
    routing = constants.routing_seconds * passes[0].counts.get("grouped products", 0) / _PRODUCTS_OF_EXPERTS
    found: list[Pass] = []
    for work in passes:
        exposed = _exposed(run, work, gpu, constants, is_backward=bool(found))
        if routing:
            exposed[ROUTING] = routing
        found.append(Pass(compute=_kernel_seconds(run, work.counts, gpu, constants), exposed=exposed))
    return found[0], found[1]


def _passes(run: RunSettings, rank: RankWork, gpu: Gpu, constants: Constants) -> tuple[Pass, Pass]:
    """The forward and the backward of one microbatch through a rank."""
    least = constants.layer_seconds * rank.num_layers
    hop = max(_hops(run, work, gpu, constants) for work in rank.passes)
    forward, backward = (
        Pass(compute=max(own.compute, least), exposed={**own.exposed, **({"pp": hop} if hop else {})})
        for own in timed(run, rank.passes, gpu, constants)
    )
    return forward, backward


def _kernel_seconds(run: RunSettings, counts: Mapping[str, float], gpu: Gpu, constants: Constants) -> float:
    plain = gpu.timed_as(run.plain_products)
    plain_rate = gpu.matmul_flops(plain) * constants.product_share(gpu.family, is_fp8=False)
    fp8_rate = gpu.matmul_flops("fp8") * constants.product_share(gpu.family, is_fp8=True)
    edges = constants.edge * counts.get("edges", 0) + constants.grouped_edge * counts.get("grouped edges", 0)
    seconds = (counts.get("products", 0) + edges) / plain_rate
    if fp8_flops := counts.get("fp8 products", 0):
        seconds += fp8_flops / fp8_rate
    share = constants.attention_share(gpu.family, run.fused_attention if plain == "half" else "first")
    seconds += counts.get("attention", 0) / (gpu.attention_flops(plain) * share)
    # These bytes were counted, and are not the least that would do.
    return seconds + counts.get("moved bytes", 0) / gpu.memory_bytes_per_second


def _exposed(run: RunSettings, work: Work, gpu: Gpu, constants: Constants, *, is_backward: bool) -> dict[str, float]:
    """Exposed communication of a pass by axis, without that between stages."""
    waited: dict[str, float] = {}
    for (axis, kind), messages in work.messages.items():
        # Ranks of an expert axis may be those of another one.
        own, _, experts = axis.partition("=")
        is_exchange = kind == "all-to-all"
        if own == "pp" or (own.partition("+")[0] in _OF_WEIGHTS and not is_exchange):
            continue
        if own == "host":
            waited[own] = messages.tensor_bytes / (gpu.pcie_gb_per_second * GIGA)
            continue
        name = experts if experts and is_exchange else own
        seconds = _message_seconds(kind, messages, _group_of(name, run.sizes), gpu, constants)
        hidden = 0.0
        if name == "tp":
            # Networks gather tokens in front of a part of a layer, and scatter them in linears.
            hidden = 1.0 if is_backward else share_in_chunks(run) if kind == "reduce-scatter" else 0.0
        name = name.partition("_")[0]
        waited[name] = waited.get(name, 0.0) + seconds * (1 - hidden * (1 - constants.exposed_tensor))
    return waited


def _message_seconds(kind: str, messages: Messages, group: Group, gpu: Gpu, constants: Constants) -> float:
    each = messages.tensor_bytes / messages.number
    if kind == "all-to-all":
        seconds = exchange_seconds(each, group, gpu, constants)
    elif kind == "send":
        seconds = hop_seconds(each, group, gpu, constants)
    else:
        seconds = gather_seconds(each, group, gpu, constants) * (2 if kind == "all-reduce" else 1)
    return messages.number * seconds


def _hops(run: RunSettings, work: Work, gpu: Gpu, constants: Constants) -> float:
    """Seconds that a rank waits for what it sends to another stage in a pass."""
    if (sent := work.messages.get(("pp", "send"))) is None:
        return 0.0
    seconds = _message_seconds("send", sent, groups_of(run.sizes)["pp"], gpu, constants)
    return constants.exposed_hop * seconds + constants.hop_seconds * sent.number


@lru_cache(maxsize=1024)
def _group_of(axis: str, sizes: Sizes) -> Group:
    """The ranks of an axis, as their places in the numbering of all ranks go."""
    ranks = sorted(Mesh.imagine(0, sizes).axis(axis).ranks)
    return Group(size=len(ranks), stride=max(ranks[1] - ranks[0], 1) if len(ranks) > 1 else 1)
