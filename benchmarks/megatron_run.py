"""Training runs of megatron-core's GPT, from the same weights as the other runs: with experts on CPU ranks, and on one
device, in bfloat16.

megatron-core is written for GPUs: it names the device "cuda" where it makes small tensors and streams. In the process
of a run on CPUs these names are mapped to the CPU; its computations are its own. Its layers are those without
Transformer Engine and Apex, experts one after another, tokens sent by its all-to-all.
"""

import contextlib
import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor

from benchmarks import device_runs as runs
from benchmarks.device_runs import Plan, Recorder
from benchmarks.expert_runs import LEARNING_RATE, NotHere, Record, Size, make_loader
from benchmarks.joined import joined_by, joined_by_gloo
from benchmarks.plain_llama import build_plain, our_weights
from lightning_megatron.models import GPTConfig


class _NoStream:
    """Stand-in for a stream of the CPU, and for an event on it: all work is done already."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        pass

    def record_event(self) -> "_NoStream":
        return self

    def synchronize(self) -> None:
        pass


def lead_to_cpu() -> None:
    """Redirects megatron-core's calls of CUDA to the CPU, in this process."""
    stream = _NoStream()
    cuda: Any = torch.cuda
    cuda.Stream = _NoStream
    cuda.current_device = lambda: "cpu"
    cuda.current_stream = cuda.default_stream = lambda *_: stream
    cuda.stream = lambda _: contextlib.nullcontext()
    cuda.synchronize = cuda.empty_cache = lambda *_: None

    def on_cpu(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @wraps(make)
        def made(*args: Any, **kwargs: Any) -> Tensor:
            return make(*args, **kwargs | ({"device": "cpu"} if kwargs.get("device") == "cuda" else {}))

        return made

    library: Any = torch
    for name in ("zeros", "ones", "tensor"):
        setattr(library, name, on_cpu(getattr(library, name)))
    # Sizes that come from a GPU become a list on their way to the host; here they are there already, as a tensor.
    exchange: Any = torch.distributed.all_to_all_single

    @wraps(exchange)
    def exchanged(*args: Any, **kwargs: Any) -> Any:
        sizes = {
            name: value.tolist() for name, value in kwargs.items() if isinstance(value, Tensor) and "split" in name
        }
        return exchange(*args, **kwargs | sizes)

    library.distributed.all_to_all_single = exchanged
    # Clipping checks that gradients are of this type.
    tensor: Any = Tensor
    as_type = tensor.type
    tensor.type = lambda self, *args, **kwargs: (
        as_type(self, *args, **kwargs) if args or kwargs else as_type(self).replace("torch.", "torch.cuda.")
    )


def is_installed() -> bool:
    """Whether megatron-core is."""
    return importlib.util.find_spec("megatron") is not None and importlib.util.find_spec("megatron.core") is not None


def train_megatron(size: Size, record: Record, *, ep: int) -> None:
    """Trains with data parallelism over all ranks and experts sharded over `ep` of them."""
    if not is_installed():
        raise NotHere("megatron-core is not installed here; --megatron-python names an interpreter that has it")
    lead_to_cpu()
    _train(size, record, ep)


@joined_by_gloo
def _train(size: Size, record: Record, ep: int) -> None:
    world = int(os.environ["WORLD_SIZE"])
    _train_steps(
        size.config(),
        make_loader(size, world),
        record.add,
        microbatches=size.microbatches(world),
        ep=ep,
        learning_rate=LEARNING_RATE,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )


def train_megatron_on_device(plan: Plan, recorder: Recorder) -> None:
    """Trains a dense model or one of experts on one device, with weights in bfloat16 and main weights in float32."""
    if not is_installed():
        raise runs.NotHere("left out: megatron-core is not installed")
    if plan.device.type == "cpu":
        lead_to_cpu()
    joined_by("nccl" if plan.device.type == "cuda" else "gloo")(_train_steps)(
        plan.config,
        plan.make_loader(),
        recorder.add,
        microbatches=plan.microbatches,
        ep=1,
        learning_rate=runs.LEARNING_RATE,
        device=plan.device,
        dtype=torch.bfloat16,
    )


def _train_steps(
    config: GPTConfig,
    loader: Iterable[Sequence[Tensor]],
    on_step: Callable[[Tensor], None],
    *,
    microbatches: int,
    ep: int,
    learning_rate: float,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.moe import moe_utils

    # Attention takes a generator of the GPU before its dropout, which is 0.
    tracker: Any = CudaRNGStatesTracker
    tracker.fork = lambda self, *_: contextlib.nullcontext()
    # Its router looks for a kernel of Transformer Engine by a name that is only there with it.
    vars(moe_utils).setdefault("te_general_gemm", None)
    parallel_state.initialize_model_parallel(expert_model_parallel_size=ep)
    is_low = dtype == torch.bfloat16
    model = build_megatron(config, ep=ep, device=device, dtype=dtype)
    whole = Float16Module(model.config, model) if is_low else model
    reduction = DistributedDataParallelConfig(overlap_grad_reduce=False, grad_reduce_in_fp32=is_low)
    ddp = DistributedDataParallel(model.config, reduction, whole)
    settings = OptimizerConfig(
        optimizer="adam", lr=learning_rate, weight_decay=0.01, clip_grad=1.0, bf16=is_low, params_dtype=dtype
    )
    optimizer = get_megatron_optimizer(settings, [ddp])
    for group in optimizer.param_groups:
        # It does not offer the faster kernel, which the other runs use; its optimizer is torch's AdamW all the same.
        group["fused"], group["foreach"] = True, False
    model.config.finalize_model_grads_func = finalize_model_grads
    model.config.grad_scale_func = optimizer.scale_loss if is_low else None
    forward_backward = get_forward_backward_func()
    for batch in loader:
        tokens, labels = (part.to(device) for part in batch)
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        losses = forward_backward(
            forward_step_func=_forward_step,
            data_iterator=zip(tokens.chunk(microbatches), labels.chunk(microbatches), strict=True),
            model=[ddp],
            num_microbatches=microbatches,
            seq_length=tokens.shape[1],
            micro_batch_size=len(tokens) // microbatches,
            forward_only=False,
        )
        is_done, *_ = optimizer.step()
        assert is_done
        on_step(torch.stack([loss["loss"] for loss in losses]).mean())
    parallel_state.destroy_model_parallel()


def _forward_step(microbatches: Iterator[tuple[Tensor, Tensor]], model: Any) -> Any:
    tokens, labels = next(microbatches)
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    return model(tokens, positions, None, labels=labels), partial(_loss)


def _loss(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = losses.mean()
    # A copy: the loss itself is divided in place afterwards.
    return loss, {"loss": loss.detach().clone()}


def build_megatron(config: GPTConfig, *, ep: int, device: torch.device, dtype: torch.dtype) -> Any:
    """Its GPT of this architecture, with this rank's part of the common weights."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    experts: dict[str, Any] = {}
    if config.moe is not None:
        router = config.moe.router
        experts = {"num_moe_experts": router.num_experts, "moe_router_topk": router.top_k}
        experts |= {"moe_ffn_hidden_size": config.ffn_hidden_size, "moe_router_load_balancing_type": "none"}
        experts |= {"moe_token_dispatcher_type": "alltoall", "expert_model_parallel_size": ep}
    model = GPTModel(
        config=TransformerConfig(
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            num_query_groups=config.num_query_groups,
            ffn_hidden_size=config.ffn_hidden_size,
            **experts,
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            bias_activation_fusion=False,
            normalization="RMSNorm",
            layernorm_epsilon=config.norm_epsilon,
            add_bias_linear=False,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            masked_softmax_fusion=False,
            gradient_accumulation_fusion=False,
            use_cpu_initialization=True,
            perform_initialization=False,
            params_dtype=dtype,
            bf16=dtype == torch.bfloat16,
        ),
        transformer_layer_spec=get_gpt_layer_local_spec(
            num_experts=experts.get("num_moe_experts"), moe_grouped_gemm=False, normalization="RMSNorm"
        ),
        vocab_size=config.vocab_size,
        max_sequence_length=config.max_sequence_length,
        position_embedding_type="rope",
        rotary_base=int(config.rotary_base),
        share_embeddings_and_output_weights=False,
    ).to(device)
    weights = _megatron_weights(config, ep, device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights.pop(name))
    assert not weights, sorted(weights)
    return model


def _megatron_weights(config: GPTConfig, ep: int, device: torch.device) -> dict[str, Tensor]:
    """The common weights under its names: one matrix an expert, numbered from 0 on each rank."""
    ours = our_weights(build_plain(config, device), config)
    weights = {
        "embedding.word_embeddings.weight": ours["embedding.tokens.weight"],
        "decoder.final_layernorm.weight": ours["final_norm.weight"],
        "output_layer.weight": ours["head.weight"],
    }
    for i in range(config.num_layers):
        there, here = f"decoder.layers.{i}", f"layers.{i}"
        weights |= {
            f"{there}.input_layernorm.weight": ours[f"{here}.attention_norm.weight"],
            f"{there}.self_attention.linear_qkv.weight": ours[f"{here}.attention.qkv.weight"],
            f"{there}.self_attention.linear_proj.weight": ours[f"{here}.attention.projection.weight"],
            f"{there}.pre_mlp_layernorm.weight": ours[f"{here}.mlp_norm.weight"],
        }
        if config.moe is None:
            weights[f"{there}.mlp.linear_fc1.weight"] = ours[f"{here}.mlp.up.weight"].flatten(0, 1)
            weights[f"{there}.mlp.linear_fc2.weight"] = ours[f"{here}.mlp.down.weight"]
            continue
        weights[f"{there}.mlp.router.weight"] = ours[f"{here}.moe.router.weight"]
        own = config.moe.router.num_experts // ep
        first = int(os.environ["RANK"]) % ep * own
        for j in range(own):
            expert = f"{there}.mlp.experts.local_experts.{j}"
            weights[f"{expert}.linear_fc1.weight"] = ours[f"{here}.moe.experts.up"][first + j].flatten(0, 1)
            weights[f"{expert}.linear_fc2.weight"] = ours[f"{here}.moe.experts.down"][first + j]
    return weights
