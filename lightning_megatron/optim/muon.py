"""`Muon`: momentum whose steps are orthogonalised matrix by matrix, on any layout, and AdamW for all that is no matrix.

    momentum     B <- mu B + (1 - mu) G                    element by element, on what a rank holds
    update       U = (1 - mu) G + mu B                     with Nesterov's momentum, else B
    matrix       O = NewtonSchulz(U)                       on the whole matrix
    weight       W <- (1 - lr wd) W - lr s O               s by the matrix's shape

Only O needs a whole matrix. Weights that an axis cuts have an owner among its ranks, spread by FLOPs: all send it their
parts of U and get back theirs of O, in one all-to-all each way. Momentum is held as weights are, so checkpoints,
resuming and the distributed optimizer know nothing of it. A weight of several matrices (`Fused`, experts) is taken
apart. Sources: Jordan, kellerjordan.github.io/posts/muon; Liu et al., arXiv 2502.16982, section 2.2 (the factor 0.2).
"""

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatch
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from lightning_megatron.mesh import Axis
from lightning_megatron.optim.owners import PartExchange, spread, whole_shape
from lightning_megatron.sharding import Shard, shard_of

AdjustLr = Literal["original", "match_rms_adamw"]
"""Factor on the learning rate of a matrix [M, N], as in torch.optim.Muon: sqrt(max(1, M / N)), or 0.2 sqrt(max(M, N)),
which makes a step as large as AdamW's."""

NsDtype = Literal["bfloat16", "float32"]
"""Dtype in which matrices are orthogonalised; those in float64 are in float64."""

FusedHeads = Literal["projections", "heads"]
"""Matrices of fused queries, keys and values: each projection whole, or each head of it."""

# Rows of fused heads: groups, heads of each, features of a head.
_DIMS_OF_HEADS = 3
_NS_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}

NOT_MATRICES = (
    *("*embed*", "wte", "wpe", "*position*", "*relative*bias*", "shared.weight", "*.shared.weight"),
    *("head", "heads", "*_head", "score", "classifier", "*norm*", "*conv*", "a_log", "*bias"),
)
"""Names of parameters that are none of a layer's matrices: embeddings and tables of positions, output heads, norms,
convolutions, biases. In lower case; each is one between dots, or all of a name."""

# Bytes of updates that a step works on at a time: several copies of them are held besides.
_PIECE_BYTES = 1 << 28

_Loads = dict[Axis, list[float]]
"""FLOPs of a step by axis, and by rank that owns them."""


def muon_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]], *, weight_decay: float, adamw: Sequence[str] = NOT_MATRICES
) -> list[dict[str, Any]]:
    """Three parameter groups for `Muon`: matrices of layers, other weights with weight decay, all else without it.

    Names that match a pattern in `adamw`, and parameters of fewer than two dims, are stepped by AdamW.
    """
    matrices: list[nn.Parameter] = []
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in named_parameters:
        # Biases of gates and of experts have several dims.
        is_matrix = parameter.dim() > 1 and not name.endswith("bias")
        parts = [name.lower(), *name.lower().split(".")]
        is_of_layer = is_matrix and not any(fnmatch(part, pattern) for part in parts for pattern in adamw)
        (matrices if is_of_layer else decayed if is_matrix else others).append(parameter)
    return [
        {"params": matrices, "weight_decay": weight_decay, "use_muon": True},
        {"params": decayed, "weight_decay": weight_decay, "use_muon": False},
        {"params": others, "weight_decay": 0.0, "use_muon": False},
    ]


class Muon(Optimizer):
    """Muon for the matrices of groups with `use_muon`, AdamW for the other groups; equal on every layout.

    `momentum`, `nesterov`, `ns_steps`, `ns_coefficients`, `eps` and `adjust_lr_fn` are those of torch.optim.Muon;
    `betas` and `adamw_eps` AdamW's. Matrices are orthogonalised in `ns_dtype`, in bfloat16 as there; those in float64
    in float64. A weight of more than two dims is a stack of matrices. A step waits for the axes that cut weights.
    Raises ValueError with all errors.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        ns_dtype: NsDtype = "bfloat16",
        eps: float = 1e-7,
        adjust_lr_fn: AdjustLr = "original",
        fused_heads: FusedHeads = "projections",
        betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "ns_coefficients": ns_coefficients,
            "ns_dtype": ns_dtype,
            "eps": eps,
            "adjust_lr_fn": adjust_lr_fn,
            "fused_heads": fused_heads,
            "betas": betas,
            "adamw_eps": adamw_eps,
            "use_muon": True,
        }
        if faults := _faults(defaults):
            raise ValueError("\n".join(faults))
        super().__init__(params, defaults)
        by_head = [group for group in self.param_groups if group["use_muon"] and group["fused_heads"] == "heads"]
        parameters = [parameter for group in by_head for parameter in group["params"]]
        if parameters and not any(_has_heads(shard_of(parameter)) for parameter in parameters):
            warnings.warn(
                "Muon's fused_heads ('heads') does nothing here: none of its matrices holds fused queries, keys and "
                "values, as the attention of this package's models does; leave it out",
                stacklevel=2,
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group. Raises ValueError with all errors of its settings, and for a parameter that is no matrix."""
        faults = _faults(self.defaults | param_group)
        given = param_group["params"]
        param_group["params"] = [given] if isinstance(given, Tensor) else list(given)
        if param_group.get("use_muon", True):
            # Parameters may come with their names.
            parameters = [one[1] if isinstance(one, tuple) else one for one in param_group["params"]]
            faults += [
                f"a parameter of shape {tuple(parameter.shape)} is no matrix; give it to a group with use_muon False, "
                "as muon_groups does"
                for parameter in parameters
                if parameter.dim() < 2
            ]
        if faults:
            raise ValueError("\n".join(faults))
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps all parameters that have a gradient; returns what the closure does."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            stepped = [parameter for parameter in group["params"] if parameter.grad is not None]
            if group["use_muon"]:
                self._step_matrices(stepped, group)
            elif stepped:
                self._step_others(stepped, group)
        return loss

    def _step_matrices(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        loads: _Loads = {}
        for piece in _pieces(parameters):
            self._step_piece(piece, group, loads)

    def _step_piece(self, parameters: list[Tensor], group: dict[str, Any], loads: _Loads) -> None:
        updates = []
        for parameter in parameters:
            gradient, state = parameter.grad, self.state[parameter]
            assert gradient is not None
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(gradient)
            momentum = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
            updates.append(gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum.clone())
        _orthogonalise_(updates, [shard_of(parameter) for parameter in parameters], group, loads)
        for parameter, update in zip(parameters, updates, strict=True):
            parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])

    def _step_others(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        states = [self.state[parameter] for parameter in parameters]
        for parameter, state in zip(parameters, states, strict=True):
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        adamw(
            parameters,
            [parameter.grad for parameter in parameters if parameter.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            # By itself torch takes its fast kernels for parameters of its own type alone.
            foreach=parameters[0].is_cuda,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["adamw_eps"],
            maximize=False,
        )


def _faults(group: dict[str, Any]) -> list[str]:
    """Errors of the settings of a group."""
    faults = [
        f"{name} ({group[name]}) must be at least 0, and finite"
        for name in ("lr", "weight_decay")
        if not 0 <= group[name] < math.inf
    ]
    betas = {"betas[0]": group["betas"][0], "betas[1]": group["betas"][1]}
    faults += [
        f"{name} ({value}) must be at least 0 and below 1"
        for name, value in ({"momentum": group["momentum"]} | betas).items()
        if not 0 <= value < 1
    ]
    if group["ns_steps"] < 1:
        faults.append(f"ns_steps ({group['ns_steps']}) must be at least 1")
    for name, words in (("ns_dtype", NsDtype), ("adjust_lr_fn", AdjustLr), ("fused_heads", FusedHeads)):
        if group[name] not in get_args(words):
            faults.append(f"{name} ({group[name]!r}) must be one of {', '.join(get_args(words))}")
    return faults


# --- whole matrices out of parts, and back ------------------------------------------------------------------------


def _pieces(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    """Parameters in turn, so many bytes of them at a time: the same on all ranks that hold parts of them."""
    piece: list[Tensor] = []
    size = 0
    for parameter in parameters:
        piece.append(parameter)
        size += parameter.numel() * parameter.element_size()
        if size >= _PIECE_BYTES:
            yield piece
            piece, size = [], 0
    if piece:
        yield piece


def _orthogonalise_(updates: list[Tensor], shards: list[Shard], group: dict[str, Any], loads: _Loads) -> None:
    """Orthogonalises updates in place, each of them the part that this rank holds."""
    by_axis: defaultdict[Axis, list[int]] = defaultdict(list)
    for index, (update, shard) in enumerate(zip(updates, shards, strict=True)):
        # Of an axis all ranks go the same way, also where one of them holds all there is.
        if shard.axis is not None and shard.axis.size > 1:
            by_axis[shard.axis].append(index)
        else:
            whole = shard.valid(update)
            whole.copy_(_orthogonal(whole, shard, group))
    for axis, indices in by_axis.items():
        load = loads.setdefault(axis, [])
        _orthogonalise_over(axis, [updates[i] for i in indices], [shards[i] for i in indices], group, load)


def _orthogonalise_over(
    axis: Axis, updates: list[Tensor], shards: list[Shard], group: dict[str, Any], load: list[float]
) -> None:
    """Orthogonalises updates that an axis cuts: its ranks share the matrices out among themselves."""
    owners = spread([_flops(whole_shape(shard)) for shard in shards], axis.size, load)
    exchange = PartExchange(axis, shards, owners)
    parts = [shard.valid(update) for update, shard in zip(updates, shards, strict=True)]
    wholes, memory = exchange.gather(parts)
    for index, whole in wholes.items():
        wholes[index] = _orthogonal(whole, shards[index], group)
    for part, returned in zip(parts, exchange.give_back(wholes, memory), strict=True):
        part.copy_(returned.view(part.shape))


# --- the matrices of a weight -------------------------------------------------------------------------------------


def _orthogonal(weight: Tensor, shard: Shard, group: dict[str, Any]) -> Tensor:
    """The orthogonalised matrices of an update of a whole weight, scaled by their shapes, where they lie in it."""
    weight = weight.contiguous()
    result = torch.empty_like(weight)
    by_head = group["fused_heads"] == "heads"
    for source, target in zip(_matrices(weight, shard), _matrices(result, shard), strict=True):
        is_by_head = by_head and _has_heads(shard)
        stack = source.flatten(0, -3) if is_by_head else source.flatten(1, -2)
        low = stack if stack.dtype == torch.float64 else stack.to(_NS_DTYPES[group["ns_dtype"]])
        orthogonal = newton_schulz(low, group["ns_steps"], group["ns_coefficients"], group["eps"])
        rows, columns = stack.shape[-2:]
        is_original = group["adjust_lr_fn"] == "original"
        scale = math.sqrt(max(1.0, rows / columns)) if is_original else 0.2 * math.sqrt(max(rows, columns))
        target.copy_(orthogonal.mul_(scale).view(source.shape))
    return result


def _has_heads(shard: Shard) -> bool:
    """Whether a weight is fused queries, keys and values of heads."""
    return shard.fused is not None and len(shard.fused.shape) == _DIMS_OF_HEADS


def _matrices(weight: Tensor, shard: Shard) -> Iterator[Tensor]:
    """Views of the kinds of matrices of a whole weight: [number, rows ..., columns] each."""
    columns = weight.shape[-1]
    if shard.fused is None:
        yield weight.view(-1, *weight.shape[-2:])
        return
    stack = weight.view(-1, *shard.fused.shape, columns)
    yield from stack.split(shard.fused.sizes, dim=1 + shard.fused.dim)


def _flops(shape: tuple[int, ...]) -> float:
    """FLOPs of an iteration on the matrices of a weight, but for a factor, as if it were one."""
    rows, columns = math.prod(shape[:-1]), shape[-1]
    return float(min(rows, columns) * rows * columns)


def newton_schulz(matrices: Tensor, num_steps: int, coefficients: tuple[float, float, float], eps: float) -> Tensor:
    """Matrices [..., M, N] with the singular vectors of those given and singular values near 1.

    Each step is x <- a x + (b g + c g g) x with g = x x^T. Source: Jordan, kellerjordan.github.io/posts/muon.
    """
    a, b, c = coefficients
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(num_steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    found: Tensor = x.mT if is_tall else x
    return found
