"""Configuration of gradient reduction, the distributed optimizer and the loss scale."""

from typing import Literal, get_args

from lightning_megatron.config_dataclass import config_dataclass

OptimizerKind = Literal["replicated", "distributed", "distributed_gradients", "distributed_parameters"]
GradientDtype = Literal["auto", "float32", "bfloat16"]
OnNonfinite = Literal["stop", "skip", "ignore"]
DeclaredScope = Literal["auto", "elementwise", "parameter"]


@config_dataclass
class OptimizerConfig:
    """Gradient reduction over data-parallel ranks, and sharding of the optimizer, of gradients and of parameters.

    Source of the distributed kinds: Rajbhandari et al., arXiv 1910.02054, sections 5.1 to 5.3 (ZeRO, stages 1 to 3).
    """

    kind: OptimizerKind = "replicated"
    """Which data-parallel ranks step which weights. replicated: each steps all weights that it holds. distributed
    (ZeRO-1): each of the d ranks (dp x cp; for experts edp) holds the optimizer state of 1/d of the weights and steps
    those, and the ranks all-gather the result. distributed_gradients (ZeRO-2): so, and between backwards a rank holds
    the sums of 1/d of the gradients, which each backward of a microbatch reduce-scatters. distributed_parameters
    (ZeRO-3): so, and a rank holds 1/d of the weights; those of a part of the model (a layer, the embedding, the head)
    are all-gathered before its forward and before its backward, and freed after each."""
    shard_size: int = 0
    """Data-parallel ranks, next to each other, over which a distributed kind shards; further ones hold copies, and
    gradients are summed over those (hybrid sharding). With those of a node, gathers stay within it. 0: all ranks."""
    reshard_after_forward: bool = True
    """With distributed_parameters, free the weights of a part after its forward and gather them again for its backward;
    else gather them once a step and keep them to the end of its backwards, as many microbatches may pay."""
    cpu_offload: bool = False
    """Hold what the optimizer steps (main weights, in float32 under mixed precision, and its moments) and this rank's
    reduced gradients in host memory, and step there: less memory of the GPU, a longer step."""
    offload_fraction: float = 1.0
    """With cpu_offload, the part of a rank's weights whose main weights and moments are in host memory, rounded up to
    complete buckets."""
    grad_dtype: GradientDtype = "auto"
    """Dtype in which gradients are accumulated and reduced. auto: float32 under mixed precision, else the dtype of the
    weights."""
    bucket_size: int = 40_000_000
    """Elements of a gradient bucket, which is reduced in one message; a larger parameter has a bucket of its own."""
    overlap_grad_reduce: bool = False
    """Start to reduce a bucket as soon as the backward of the last microbatch has made its last gradient, so that the
    message overlaps with compute; else reduce all buckets after the last backward."""
    overlap_param_gather: bool = False
    """With the distributed optimizer, return from the step while updated weights are still all-gathered, and let each
    part of the model wait for its own in the next forward; hooks in between must not read weights."""
    gather_for_hooks: bool = True
    """With distributed_parameters, gather all weights of a rank between steps where the module or a callback of yours
    has hooks there, which may read or change them; False says that these read none."""
    on_nonfinite: OnNonfinite = "stop"
    """Reaction to NaN or Inf in a gradient. stop: end the run on all ranks, naming rank, parameter and step. skip:
    leave out the optimizer step on all ranks. ignore: step with it."""
    check_replicas_every_n_steps: int = 0
    """Optimizer steps between two checks that all ranks that hold a weight hold the same bits. 0: only the first three
    steps of a fit. -1: never."""
    update_scope: DeclaredScope = "auto"
    """Scope of an update by an optimizer that torch does not ship. elementwise: an element of a weight depends on its
    own gradient and state alone, as in AdamW, so that the optimizer may be given any part of a weight. parameter: it
    depends on other elements of the weight, as in Muon. auto: unknown, hence refused where tensor or expert parallelism
    shards weights."""

    @property
    def needs_master_weights(self) -> bool:
        """Whether optimizers step something else than the parameters, whatever the precision."""
        return self.shards_states or self.cpu_offload or self.grad_dtype != "auto"

    @property
    def shards_states(self) -> bool:
        """Whether each data-parallel rank steps weights of its own."""
        return self.kind != "replicated"

    @property
    def shards_gradients(self) -> bool:
        """Whether each data-parallel rank holds gradients of its own between backwards."""
        return self.kind in ("distributed_gradients", "distributed_parameters")

    @property
    def shards_parameters(self) -> bool:
        """Whether each data-parallel rank holds parameters of its own between their uses."""
        return self.kind == "distributed_parameters"

    @property
    def frees_parameters(self) -> bool:
        """Whether the parameters of a part of the model are freed after each of its uses."""
        return self.shards_parameters and self.reshard_after_forward

    def __post_init__(self) -> None:
        choices = (
            ("kind", self.kind, get_args(OptimizerKind)),
            ("grad_dtype", self.grad_dtype, get_args(GradientDtype)),
            ("on_nonfinite", self.on_nonfinite, get_args(OnNonfinite)),
            ("update_scope", self.update_scope, get_args(DeclaredScope)),
        )
        faults = [
            f"optimizer {name} ({value!r}) must be one of {', '.join(allowed)}"
            for name, value, allowed in choices
            if value not in allowed
        ]
        if self.bucket_size < 1:
            faults.append(f"bucket_size ({self.bucket_size}) must be at least 1; it counts elements, 40000000 is usual")
        if self.check_replicas_every_n_steps < -1:
            faults.append(
                f"check_replicas_every_n_steps ({self.check_replicas_every_n_steps}) must be at least -1; 0 checks the "
                "first three steps, -1 none"
            )
        if self.shard_size < 0 or self.shard_size == 1:
            faults.append(f"shard_size ({self.shard_size}) must be 2 or more, or 0 for all data-parallel ranks")
        if self.shard_size and self.kind == "replicated":
            faults.append(f"shard_size ({self.shard_size}) needs a distributed kind; leave it out")
        if not 0 < self.offload_fraction <= 1:
            faults.append(
                f"offload_fraction ({self.offload_fraction}) must be above 0 and at most 1; for nothing leave "
                "cpu_offload out"
            )
        if self.offload_fraction != 1 and not self.cpu_offload:
            faults.append(f"offload_fraction ({self.offload_fraction}) acts with cpu_offload alone; leave it out")
        if self.overlap_param_gather and self.kind == "replicated":
            faults.append(
                "overlap_param_gather (True) needs a distributed kind: ranks that step all of their weights gather none"
            )
        if not self.reshard_after_forward and self.kind != "distributed_parameters":
            faults.append(
                'reshard_after_forward (False) acts with kind "distributed_parameters" alone, and it is '
                f"{self.kind!r}; leave it out"
            )
        if not self.gather_for_hooks and self.kind != "distributed_parameters":
            faults.append(
                f'gather_for_hooks (False) acts with kind "distributed_parameters" alone, and it is {self.kind!r}; '
                "leave it out"
            )
        if faults:
            raise ValueError("\n".join(faults))


@config_dataclass
class LossScaleConfig:
    """The dynamic loss scale of float16, which keeps small gradients from becoming zero.

    Source: Micikevicius et al., arXiv 1710.03740, section 3.2.
    """

    initial: float = 65536.0
    """Loss scale of the first step."""
    growth_factor: float = 2.0
    """Factor by which the scale grows after `window` steps in a row without Inf or NaN."""
    backoff_factor: float = 0.5
    """Factor by which the scale shrinks after `hysteresis` steps with Inf or NaN."""
    window: int = 1000
    """Steps in a row without Inf or NaN after which the scale grows."""
    hysteresis: int = 2
    """Steps with Inf or NaN after which the scale shrinks; counted anew after it has grown."""
    minimum: float = 1.0
    """Value below which the scale does not shrink."""

    def __post_init__(self) -> None:
        faults = []
        if self.minimum <= 0:
            faults.append(f"minimum ({self.minimum}) must be above 0")
        if self.initial < self.minimum:
            faults.append(f"initial ({self.initial}) must be at least minimum ({self.minimum})")
        if self.growth_factor < 1:
            faults.append(f"growth_factor ({self.growth_factor}) must be at least 1; with 1 the scale never grows")
        if not 0 < self.backoff_factor <= 1:
            faults.append(f"backoff_factor ({self.backoff_factor}) must be above 0 and at most 1")
        faults += [
            f"{name} ({value}) must be at least 1"
            for name, value in (("window", self.window), ("hysteresis", self.hysteresis))
            if value < 1
        ]
        if faults:
            raise ValueError("\n".join(f"loss scale {fault}" for fault in faults))
