"""Faults of the kind this code could have: each is one piece of text of one file and what a slip would make of it."""

from typing import NamedTuple


class Fault(NamedTuple):
    """A slip, and the tests that should notice it first."""

    file: str
    """In the package."""
    old: str
    """Stands in the file exactly once."""
    new: str
    tests: tuple[str, ...]
    """Files or folders under tests/ that mirror the file."""


FAULTS = (
    # Tensor parallelism.
    Fault(
        "tensor/linear.py",
        "grad_TO.sum(0, dtype=ctx.bias_dtype).view(weight.shape[:-1])",
        "grad_TO.mean(0, dtype=ctx.bias_dtype).view(weight.shape[:-1])",
        ("tensor/test_linear.py",),
    ),
    Fault(
        "tensor/cross_entropy.py",
        "exps_TV.narrow(1, valid, length - valid).zero_()",
        "exps_TV.narrow(1, valid, length - valid)",
        ("tensor/test_cross_entropy.py",),
    ),
    Fault(
        "tensor/cross_entropy.py",
        "mul_(smoothing / vocab_size)",
        "mul_(smoothing / length)",
        ("tensor/test_cross_entropy.py",),
    ),
    Fault(
        "tensor/cross_entropy.py",
        "collectives.all_reduce_(sums_2T, tp)",
        "collectives.all_reduce_(sums_2T, tp).div_(1.0001)",
        ("tensor/test_cross_entropy.py",),
    ),
    Fault(
        "tensor/embedding.py",
        "return differentiable.reduce(own_TH, self.tp)",
        "return own_TH",
        ("tensor/test_embedding.py",),
    ),
    # Collectives and random numbers.
    Fault(
        "comm/chunked_collectives.py",
        "= part.view(axis.size, len(own), *part.shape[1:])",
        "= part.view(len(own), axis.size, *part.shape[1:]).transpose(0, 1)",
        ("comm/test_chunked_collectives.py",),
    ),
    Fault(
        "comm/differentiable.py",
        "lambda grad: collectives.reduce_scatter(grad, axis, dim)",
        "lambda grad: collectives.shard_slice(grad, axis, dim)",
        ("comm/test_differentiable.py",),
    ),
    Fault(
        "comm/differentiable.py",
        "collectives.all_to_all(grad, axis, join, split)",
        "collectives.all_to_all(grad, axis, split, join)",
        ("comm/test_differentiable.py",),
    ),
    Fault(
        "comm/rng.py",
        "torch.arange(first_column, first_column + num_columns",
        "torch.arange(0, num_columns",
        ("comm/test_rng.py",),
    ),
    Fault("comm/rng.py", "uniform(keys, index * 2 + 1)", "uniform(keys, index * 2)", ("comm/test_rng.py",)),
    # Shards.
    Fault(
        "sharding.py",
        "offsets[self.dim] = min(self.axis.rank * self.local_length,",
        "offsets[self.dim] = min((self.axis.rank + 1) * self.local_length,",
        ("test_sharding.py",),
    ),
    Fault(
        "sharding.py",
        "tuple(first + more for first, more in zip(own.offsets, box.offsets, strict=True))",
        "box.offsets",
        ("transformer/test_init.py",),
    ),
    Fault(
        "sharding.py",
        "                if isinstance(one, DeferredParameter):",
        "                if one is args[0] and isinstance(one, DeferredParameter):",
        ("test_deferred_parameters.py",),
    ),
    Fault(
        "sharding.py",
        "_storage(parameter) == _storage(deferral.stand_in)",
        "not any(parameter.stride())",
        ("test_deferred_parameters.py",),
    ),
    Fault(
        "sharding.py",
        'parameter.__dict__.pop("deferral", None)',
        "pass",
        ("test_deferred_parameters.py",),
    ),
    Fault(
        "trainer/strategy.py",
        "if not self._shards_parameters:\n                yield",
        "if True:\n                yield",
        ("trainer/setup/test_deferred_parameters.py",),
    ),
    Fault(
        "trainer/strategy.py",
        "                    materialize(parameter)",
        "                    pass",
        ("trainer/setup/test_deferred_parameters.py",),
    ),
    Fault(
        "sharding.py",
        "first, last = -(-start // row), end // row",
        "first, last = start // row, end // row",
        ("test_sharding.py",),
    ),
    Fault(
        "sharding.py",
        "return all(axis.rank == 0 for axis in self.replicas)",
        "return any(axis.rank == 0 for axis in self.replicas)",
        ("test_sharding.py", "optim"),
    ),
    # Context parallelism.
    Fault(
        "context/context_layout.py",
        "first = max(key.position, tile.position - window + 1)",
        "first = max(key.position, tile.position - window + 2)",
        ("context",),
    ),
    Fault("context/context_layout.py", "(distance < self.window)", "(distance <= self.window)", ("context",)),
    Fault(
        "context/context_layout.py",
        "[*range(ring_size), *reversed(range(ring_size))]",
        "[*range(ring_size), *range(ring_size)]",
        ("context",),
    ),
    Fault("context/context_layout.py", "for chunk in turns[:rest]:", "for chunk in turns[: rest - 1]:", ("context",)),
    # Pipeline schedules.
    Fault(
        "pipeline/schedules/zero_bubble.py",
        "num_warmup = pp - 1 - rank",
        "num_warmup = max(pp - 2 - rank, 0)",
        ("pipeline/schedules/test_zero_bubble.py",),
    ),
    Fault(
        "pipeline/schedules/zero_bubble.py",
        "*[f_up, i_up, w_up] * (rank + 1),",
        "*[f_up, i_up, w_up] * rank,",
        ("pipeline/schedules/test_zero_bubble.py",),
    ),
    Fault(
        "pipeline/schedules/interleaved.py",
        "min(2 * (pp - rank - 1) + (chunks - 1) * group_size, len(turns))",
        "min(2 * (pp - rank - 1) + chunks * group_size, len(turns))",
        ("pipeline/schedules/test_interleaved.py",),
    ),
    Fault(
        "pipeline/schedules/interleaved.py",
        "(chunks - 1 - chunk) * pp + rank",
        "chunk * pp + rank",
        ("pipeline/schedules/test_interleaved.py",),
    ),
    # Optimizer.
    Fault("optim/bucket.py", "self.grad_views[param.parameter].zero_()", "pass", ("optim",)),
    Fault(
        "optim/bucket.py",
        "        self.pending.wait()\n        self.pending = None\n        return True",
        "        self.pending = None\n        return True",
        ("optim",),
    ),
    Fault(
        "optim/bucket.py",
        "self._sum += collectives.shard_slice(self.gradient, self.shards)",
        "self._sum.copy_(collectives.shard_slice(self.gradient, self.shards))",
        ("optim/test_sharded_gradients.py",),
    ),
    Fault(
        "optim/bucket.py",
        "            self._sum.zero_()",
        "            pass",
        ("optim/test_sharded_gradients.py",),
    ),
    Fault(
        "optim/bucket.py",
        "first = self.layout.starts[index] + found.start - self.shards.rank * length",
        "first = self.layout.starts[index] - self.shards.rank * length",
        ("optim/test_sharded_gradients.py",),
    ),
    Fault(
        "optim/bucket.py",
        "            self._gradient, self._grad_views = None, {}",
        "            pass",
        ("optim/test_sharded_gradients.py",),
    ),
    Fault(
        "any_module/cut_model.py",
        "if name.startswith(layers) and (self.tokens.sp.size > 1 or",
        "if name.startswith(layers) and (self.tokens.sp.size > 3 or",
        ("any_module/test_cut_tokens.py",),
    ),
    Fault(
        "any_module/cut_tokens.py",
        "if (layer, place) in self._terms:",
        "if (layer, place + 1) in self._terms:",
        ("any_module/test_cut_tokens.py",),
    ),
    Fault(
        "optim/host_weights.py",
        "if bool(fingerprint(self._on_device) != self._sent):",
        "if False:",
        ("optim/test_master_weights.py",),
    ),
    Fault(
        "optim/master_weights.py",
        "self._on_host[bucket].send()",
        "pass",
        ("optim/test_master_weights.py",),
    ),
    Fault(
        "transformer/recompute.py",
        "name = *_name_of(saved), saved.dtype, saved._version",
        "name = saved.shape",
        ("transformer/test_offload.py",),
    ),
    Fault(
        "planner/memory_tracker.py",
        "if self._left_out and self._is_left_out((args, kwargs)):",
        "if False:",
        ("optim/test_host_weights.py",),
    ),
    Fault(
        "optim/sharded_params.py",
        "        take_over(self.shard, now)",
        "        pass",
        ("optim/test_sharded_parameters.py",),
    ),
    Fault(
        "optim/sharded_params.py",
        "all_gather_(values, self.flat.shards).cpu()",
        "all_gather_(values, self.flat.shards)",
        ("fake_cuda/test_steps.py",),
    ),
    Fault(
        "optim/sharded_params.py",
        "        _resize(self.gathered, 0)",
        "        pass",
        ("optim/test_sharded_parameters.py",),
    ),
    Fault(
        "optim/sharded_params.py",
        "            if not self._holders:\n                self.take_changed()\n                self._free()",
        "            self.take_changed()\n            self._free()",
        ("optim/test_sharded_parameters.py",),
    ),
    Fault(
        "optim/sharded_params.py",
        "                self.take_changed()\n                self._free()",
        "                self._free()",
        ("optim/test_sharded_params.py",),
    ),
    Fault(
        "optim/sharded_params.py",
        "                view.copy_(parameter.detach())",
        "                pass",
        ("optim/test_sharded_params.py",),
    ),
    Fault(
        "optim/bucket.py",
        'agreed = collectives.all_reduce(are_ready, axis, "min").tolist()',
        "agreed = are_ready.tolist()",
        ("optim/test_sharded_parameters.py",),
    ),
    Fault(
        "optim/bucket.py",
        "self._made.add(param.parameter)",
        "pass",
        ("optim/test_sharded_parameters.py",),
    ),
    Fault(
        "optim/float8_gather.py",
        'joined = collectives.all_reduce(torch.cat([parts[index][1] for index in indices]), axis, "max")',
        "joined = torch.cat([parts[index][1] for index in indices])",
        ("optim/test_float8_gather.py",),
    ),
    Fault(
        "optim/float8_gather.py",
        "self._own, torch.empty_like(x))",
        "self._own, x)",
        ("trainer/setup/test_fp8_layers.py",),
    ),
    Fault(
        "optim/sharded_params.py",
        "if self._is_gathered and self._is_rounded and is_exact:",
        "if False:",
        ("optim/test_float8_gather.py",),
    ),
    Fault(
        "optim/sharded_params.py",
        "if self.float8 is not None and self._is_rounded:",
        "if False:",
        ("optim/test_float8_gather.py",),
    ),
    Fault(
        "transformer/fp8_layers.py",
        "others |= {one.key_value_up.weight",
        "_ = {one.key_value_up.weight",
        ("trainer/setup/test_fp8_layers.py",),
    ),
    Fault(
        "optim/sharded_params.py",
        "            # Whoever wanted them exact may have changed them.\n            self._forget_scales()",
        "            pass",
        ("optim/test_float8_gather.py",),
    ),
    Fault(
        "optim/gradients.py",
        "self.reducer.reduce_late(late)",
        "pass",
        ("optim/test_sharded_params.py",),
    ),
    Fault(
        "transformer/fp8_layers.py",
        "casts.items() if weight not in others}",
        "casts.items()}",
        ("trainer/setup/test_fp8_layers.py",),
    ),
    Fault(
        "planner/dry_run.py",
        "(splits and run.optimizer.shards_gradients)",
        "(splits and run.is_collective)",
        ("planner/test_random_runs.py",),
    ),
    Fault(
        "optim/part_gathers.py",
        "            if are_written:",
        "            if are_written and False:",
        ("optim/test_sharded_params.py",),
    ),
    Fault(
        "optim/part_gathers.py",
        "            if most != -least:",
        "            if most < -least:",
        ("optim/test_sharded_params.py",),
    ),
    Fault(
        "trainer/strategy.py",
        "            self.steps.dp_comm.end_without_step()\n            run.end",
        "            run.end",
        ("optim/test_sharded_params.py",),
    ),
    Fault(
        "optim/part_gathers.py",
        "if left not in before[0].parts[: before[1]]:",
        "if left:",
        ("optim/test_part_gathers.py",),
    ),
    Fault(
        "optim/part_gathers.py",
        "            self._go_back(graph, 0)",
        "            pass",
        ("optim/test_part_gathers.py",),
    ),
    Fault(
        "optim/part_gathers.py",
        "graph.reaches |= bool(made) or self._is_trained(part)",
        "graph.reaches |= bool(made)",
        ("optim/test_part_gathers.py",),
    ),
    Fault(
        "optim/part_gathers.py",
        "            graph.task, graph.num_left = task, len(graph.parts)",
        "            graph.task = task",
        ("optim/test_part_gathers.py",),
    ),
    Fault(
        "optim/part_gathers.py",
        "            self._hold(self._backward, graph.parts[place - 1])",
        "            pass",
        ("optim/test_part_gathers.py",),
    ),
    Fault(
        "optim/bucket.py",
        "one.shards_params and one.part in parts]",
        "one.shards_params]",
        ("optim/test_sharded_parameters.py",),
    ),
    Fault(
        "optim/replica_check.py",
        "[sharded.get(param.parameter, param.replicas), *param.shard.replicas]",
        "[param.replicas, *param.shard.replicas]",
        ("optim/test_sharded_parameters.py",),
    ),
    Fault(
        "optim/gradients.py",
        "                collectives.all_reduce_(bucket.own, bucket.copies)",
        "                pass",
        ("optim/test_hybrid_sharding.py",),
    ),
    Fault(
        "optim/gradients.py",
        "holders = self._copies.get(param.replicas.ranks) if is_shard else param.replicas",
        "holders = None if is_shard else param.replicas",
        ("optim/test_hybrid_sharding.py",),
    ),
    Fault(
        "optim/data_parallel_comm.py",
        "            self._parts.forget()",
        "            pass",
        ("optim/test_sharded_parameters.py",),
    ),
    Fault(
        "trainer/checkpointing/contents.py",
        "return self.lowered | self.sharded",
        "return self.lowered",
        ("optim/test_sharded_parameters.py",),
    ),
    Fault(
        "optim/bucket.py",
        "in self._stages_left.items() if stages == {stage}]",
        "in self._stages_left.items() if stage in stages]",
        ("optim/test_bucket.py",),
    ),
    Fault(
        "optim/gradients.py",
        "parameter.grad = gradient.add_(parameter.grad)",
        "parameter.grad = gradient",
        ("optim",),
    ),
    Fault("optim/gradients.py", "collectives.all_reduce_(bucket.own, bucket.partial)", "pass", ("optim",)),
    Fault("optim/gradients.py", "collectives.all_reduce_(bucket.own, bucket.holders)", "pass", ("optim",)),
    Fault(
        "optim/loss_scale.py",
        "self._good_steps >= config.window",
        "self._good_steps > config.window",
        ("optim/test_loss_scale.py",),
    ),
    Fault(
        "optim/sharded_params.py",
        "torch.where(is_same, main, now.to(main.dtype))",
        "now.to(main.dtype)",
        ("optim",),
    ),
    Fault(
        "optim/rates.py",
        "(1.0 - self.initial) * step / self.warmup_steps",
        "(1.0 - self.initial) * (step + 1) / self.warmup_steps",
        ("lightning_modules/test_gpt.py",),
    ),
    # Mixture of experts.
    Fault("moe/permute.py", "first_PQL.permute(2, 1, 0)", "first_PQL.permute(2, 0, 1)", ("moe",)),
    Fault("moe/permute.py", "choices_R.div(self.num_chosen", "choices_R.div(self.num_chosen + 1", ("moe",)),
    Fault(
        "moe/load_balancing.py",
        "return torch.sign(counts_E.sum() - counts_E * counts_E.shape[0])",
        "return torch.sign(counts_E * counts_E.shape[0] - counts_E.sum())",
        ("moe",),
    ),
    Fault("moe/load_balancing.py", "logits_TE.logsumexp(1).square()", "logits_TE.logsumexp(1)", ("moe",)),
    Fault("moe/topk.py", "due_P1 = groups.sum(real_T1) / num_experts", "due_P1 = groups.sum(real_T1)", ("moe",)),
    Fault("moe/topk.py", ": count // group_topk]", ": count]", ("moe",)),
    Fault(
        "moe/token_dispatcher.py",
        "self.num_received: list[int] = own_PQ[:, etp.rank].tolist()",
        "self.num_received: list[int] = own_PQ[:, 0].tolist()",
        ("moe",),
    ),
    Fault("moe/grouped_gemm.py", "(groups.sizes_L == 0)", "(groups.sizes_L == 1)", ("moe/test_experts.py",)),
    Fault("moe/grouped_gemm.py", "rows_R, right=True", "rows_R, right=False", ("moe/test_expert_biases.py",)),
    Fault("transformer/tokens.py", "min(rest, own)", "rest", ("transformer/test_tokens.py",)),
    # Data.
    Fault(
        "data/sampler.py",
        "start = self.consumed_samples - self.epoch * self.total_size",
        "start = self.consumed_samples - self.epoch * self.num_samples",
        ("data/test_sampler.py",),
    ),
    Fault(
        "data/sampler.py",
        "first = self.rank * self.num_replica_samples",
        "first = self.rank",
        ("data/test_sampler.py",),
    ),
    Fault(
        "data/gpt_samples.py",
        "num_left = self.sequence_length + 1",
        "num_left = self.sequence_length + 2",
        ("data/test_gpt_samples.py",),
    ),
    Fault(
        "data/gpt_samples.py",
        "min(int(ends[at]) - position, num_left)",
        "min(int(ends[at]) - position - 1, num_left)",
        ("data/test_gpt_samples.py",),
    ),
    Fault("data/masking.py", "token += token >= special", "token += token > special", ("data/test_masking.py",)),
    Fault(
        "data/packing.py",
        "lengths=np.minimum(lengths[documents] - starts, sequence_length)",
        "lengths=np.minimum(lengths[documents], sequence_length)",
        ("data/test_packing.py",),
    ),
    Fault("data/blend.py", "(heavier, index - before)", "(heavier, index)", ("data/test_blend.py",)),
    # Layers and models.
    Fault(
        "transformer/rotary.py",
        "return plain_R / scaling.factor",
        "return plain_R * scaling.factor",
        ("transformer/test_rotary.py",),
    ),
    Fault(
        "transformer/rotary.py",
        "(unscaled_R + (1 - unscaled_R) / scaling.factor)",
        "(unscaled_R + (1 - unscaled_R) * scaling.factor)",
        ("transformer/test_rotary.py",),
    ),
    Fault(
        "models/sampling.py",
        "(before_BV < top_p)",
        "(before_BV <= top_p - 0.1)",
        ("models/test_sampling.py", "models/test_generation.py"),
    ),
    Fault(
        "models/sampling.py",
        "sorted_BV[:, top_k:]",
        "sorted_BV[:, top_k + 1 :]",
        ("models/test_sampling.py", "models/test_generation.py"),
    ),
    # Checkpoints and Hugging Face.
    Fault(
        "checkpoint/state.py",
        "whole = flat[begin - self.start :][: math.prod(box.sizes)].view(box.sizes)",
        "whole = flat[: math.prod(box.sizes)].view(box.sizes)",
        ("checkpoint/test_state.py", "checkpoint/test_optimizer.py"),
    ),
    Fault(
        "checkpoint/state.py",
        "min(start + own.sizes[dim], offsets[dim] + sizes[dim])",
        "offsets[dim] + sizes[dim]",
        ("checkpoint/test_state.py", "checkpoint/test_optimizer.py"),
    ),
    Fault(
        "hf/converted_weights.py",
        "if start <= numbers[source.pattern] < start + size:",
        "if numbers[source.pattern] < size:",
        ("hf/test_converted_weights.py",),
    ),
    Fault(
        "hf/converted_weights.py",
        "return own if size < first.global_shape[0] else []",
        "return []",
        ("hf/test_converted_weights.py",),
    ),
    Fault(
        "hf/converted_weights.py",
        "model._weight_conversions = used",
        "model._weight_conversions = []",
        ("hf/test_converted_weights.py",),
    ),
    Fault(
        "hf/blocks.py",
        "self.theirs.offsets[i] + starts[dim] - self.ours.offsets[dim]",
        "self.theirs.offsets[i] + starts[dim]",
        ("hf/test_blocks.py", "hf/test_load.py"),
    ),
    # Training.
    Fault(
        "lightning_modules/adamw.py",
        'is_matrix = parameter.dim() > 1 and not name.endswith("bias")',
        "is_matrix = parameter.dim() > 1",
        ("lightning_modules/test_gpt.py",),
    ),
    # Optimizers and norms.
    Fault(
        "optim/muon.py",
        "if shard.axis is not None and shard.axis.size > 1:",
        "if shard.axis is not None and shard.axis.size > 8:",
        ("optim/test_muon.py",),
    ),
    Fault(
        "optim/muon.py",
        "yield from stack.split(shard.fused.sizes, dim=1 + shard.fused.dim)",
        "yield stack",
        ("optim/test_muon.py",),
    ),
    Fault("optim/owners.py", "axis=replace(shard.axis, rank=rank), ", "", ("optim/test_muon.py",)),
    Fault(
        "optim/master_weights.py",
        "tensor.shard = param.shard  # type: ignore[attr-defined]",
        "pass",
        ("certificate/test_certificate.py",),
    ),
    Fault("optim/rates.py", "if step > self.total_steps:", "if step >= self.total_steps:", ("optim/test_rates.py",)),
    Fault(
        "tensor/norm.py",
        "ctx.save_for_backward(x, rstd, weight)",
        "ctx.save_for_backward(x.to(wide), rstd, weight)",
        ("tensor/test_norm.py",),
    ),
    Fault("tensor/norm.py", "addcmul_(normed, inner, value=-1)", "add_(inner, alpha=-1)", ("tensor/test_norm.py",)),
    # What is planned.
    Fault("planner/held_tensors.py", "self._at_peak.pop(key, None)", "pass", ("planner/test_held_tensors.py",)),
    Fault("cli/dry_module.py", "_disable_current_modes(), ", "", ("cli/test_dry_module.py",)),
    Fault("planner/time_range.py", "one.num_rows >= _LEAST_ROWS", "one.num_rows", ("planner/test_time_range.py",)),
    # What a user's code does beside a step.
    Fault(
        "trainer/step/step_gradients.py",
        "if self._trainer.training and not self.weight_gradients.is_open:",
        "if self._trainer.training and self.weight_gradients is None:",
        ("trainer/step/test_step_checks.py",),
    ),
    Fault(
        "trainer/setup/optimizers.py",
        "is_read = early or late",
        "is_read = early",
        ("trainer/step/test_step_checks.py",),
    ),
    Fault(
        "trainer/step/hook_check.py",
        "self._num_begun < _NUM_WATCHED or self._num_begun % _EVERY == 0",
        "self._num_begun < _NUM_WATCHED",
        ("trainer/step/test_hook_check.py",),
    ),
    Fault(
        "trainer/fault_tolerance/early_end.py",
        "return bool(self._epochs.total.ready > int(number))",
        "return bool(self._epochs.total.ready >= int(number))",
        ("trainer/fault_tolerance/test_early_end.py",),
    ),
    Fault(
        "trainer/step/reduction.py",
        "return summed / axis.size",
        "return summed",
        ("trainer/lightning_api/test_logging.py", "trainer/test_strategy.py"),
    ),
    Fault(
        "metrics/throughput.py",
        "return self.flops_per_second / (self.num_devices * peak_flops)",
        "return self.flops_per_second / peak_flops",
        ("metrics/test_throughput.py",),
    ),
    # Plans.
    Fault(
        "planner/kernel_counts.py",
        "FLASH_BACKWARD / 2 if",
        "FLASH_BACKWARD if",
        ("planner/test_kernel_counts.py",),
    ),
    Fault(
        "planner/measured_time.py",
        "is_backward=bool(found)",
        "is_backward=not found",
        ("planner/test_measured_time.py",),
    ),
    Fault(
        "planner/forecast.py",
        "[(2 - number, one), (number - 1, two)]",
        "[(0, one), (number / 2, two)]",
        ("planner/test_forecast.py",),
    ),
)
