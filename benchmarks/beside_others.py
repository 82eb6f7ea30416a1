"""An unchanged model of transformers over two processes: by transformers itself, by Lightning's strategy, and by ours.

A Qwen3 of 8 layers, hidden 256, 8 heads, feed-forward 688, sequence 256, vocabulary 8192; AdamW; a global batch of 8
rows in 4 micro-batches, on the CPU. First each way runs one step in float64, and every gradient of it is compared with
those of one device; then steps are timed in float32.

    python benchmarks/beside_others.py --rounds 3

"plain" is one device, a loop written by hand. "transformers" is `from_pretrained` with its own `tp_plan="auto"`, in the
same loop, "whole" without micro-batches; "lightning" is `ModelParallelStrategy` with torch's `parallelize_module`,
called in `configure_model` by the plan of the model; "ours" is the module without such a call.

    python benchmarks/beside_others.py --logits

compares the logits of some types over two stages, of transformers' own pipeline and of ours, with those of one device
(float64, random weights), and counts the causal types of the installed transformers that have a plan for either.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

WAYS = {
    "plain": 1,
    "ours tp2": 2,
    "ours pp2": 2,
    "ours tp2 pp2": 4,
    "transformers tp2": 2,
    "transformers tp2 whole": 2,
    "lightning tp2": 2,
}
# Types of models whose logits are compared over two stages; transformers' pipeline returns no loss to train by.
STAGED_TYPES = ("qwen3", "llama", "granite", "gpt_neox")
WARMUP_STEPS, TIMED_STEPS = 1, 3
ROWS, MICRO_BATCH = 8, 2


def main() -> None:
    """Runs every way and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="how often each way is timed, interleaved")
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS), help="a choice of ways")
    parser.add_argument("--logits", action="store_true", help="compare logits over two stages, and count plans")
    parser.add_argument("--run-rank", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--run-logits", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run_logits:
        way, model_type, folder = options.run_logits
        print(json.dumps(run_logits(way, model_type, Path(folder))))
        return
    if options.logits:
        show_logits()
        show_plans()
        return
    if options.run_rank:
        way, dtype, folder = options.run_rank
        print(json.dumps(run_rank(way, dtype, Path(folder))))
        return
    ways = list(dict.fromkeys(["plain", *options.ways]))
    with tempfile.TemporaryDirectory() as folder:
        proofs = {way: ranks_of(way, "float64", folder) for way in ways}
        times: dict[str, list[Any]] = {way: [] for way in ways}
        for _ in range(options.rounds):
            for way in ways:
                times[way].append(ranks_of(way, "float32", folder))
    print("| way | largest deviation of a gradient | of | CPU s/step, all ranks | to plain | peak MB, largest rank |")
    print("|---|--:|---|--:|--:|--:|")
    for way in ways:
        if isinstance(proofs[way], str):
            print(f"| {way} | {proofs[way]} | | | | |")
            continue
        worst = max((figures["worst"] for figures in proofs[way]), key=lambda found: found[0])
        cpu = {
            one: statistics.median(sum(f["cpu"] for f in figures) for figures in times[one]) for one in ("plain", way)
        }
        peak = statistics.median(max(figure["peak"] for figure in figures) for figures in times[way])
        print(f"| {way} | {worst[0]:.0e} | {worst[1]} | {cpu[way]:.2f} | {cpu[way] / cpu['plain']:.2f} | {peak:.0f} |")


def show_logits() -> None:
    """Prints the deviation of logits over two stages, by type."""
    from benchmarks.ranks import RankFailed, run_ranks

    ways = {"plain": 1, "transformers pp2": 2, "ours pp2": 2}
    print("| type | transformers pp2 | ours pp2 |\n|---|--:|--:|")
    for model_type in STAGED_TYPES:
        cells = []
        with tempfile.TemporaryDirectory() as folder:
            for way, world in ways.items():
                try:
                    found = run_ranks([__file__, "--run-logits", way, model_type, folder], world, timeout_seconds=300)
                    cells.append(f"{max(one for one in found if one is not None):.0e}")
                except RankFailed as error:
                    cells.append(str(error).strip().splitlines()[-1])
        print(f"| {model_type} | {' | '.join(cells[1:])} |")


def show_plans() -> None:
    """Prints how many causal types of transformers have plans of their own."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    def plan_of(model_type: str, name: str) -> Any:
        config = CONFIG_MAPPING[model_type]
        # Of a model of images and text it is that of its text.
        inner = getattr(config, "sub_configs", {}).get("text_config")
        return getattr(config, name, None) or (isinstance(inner, type) and getattr(inner, name, None))

    types = [one for one in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if one in CONFIG_MAPPING]
    counts = {name: sum(bool(plan_of(one, f"base_model_{name}_plan")) for one in types) for name in ("tp", "pp", "ep")}
    print(f"\nof {len(types)} causal types have a plan: " + ", ".join(f"{name} {n}" for name, n in counts.items()))


def run_logits(way: str, model_type: str, folder: Path) -> float | None:
    """The largest deviation of this rank's logits from those that the first way has left in the folder, relative; None
    where it has none."""
    import lightning as L
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from lightning_megatron import MegatronStrategy

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    tokens = torch.randint(0, 128, (4, 16), generator=torch.Generator().manual_seed(1))
    sizes = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
    config = AutoConfig.for_model(model_type, **sizes, vocab_size=128, num_key_value_heads=4, head_dim=16)
    if model_type == "granite":
        # Those of its published sizes; by default they are 1.
        config.embedding_multiplier, config.residual_multiplier, config.logits_scaling = 12.0, 0.22, 8.0

    class Module(L.LightningModule):
        def configure_model(self) -> None:
            self.model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64)

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self.model(batch[0]).logits

    if way == "plain":
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
        model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64)
        with torch.no_grad():
            torch.save(model(tokens).logits, folder / "logits.pt")
    wanted = torch.load(folder / "logits.pt")
    found: Any = wanted
    if way == "transformers pp2":
        from transformers.distributed import DistributedConfig

        torch.distributed.init_process_group("gloo")
        model = AutoModelForCausalLM.from_pretrained(
            folder / "model", dtype=torch.float64, distributed_config=DistributedConfig(pp_size=2)
        )
        with torch.no_grad():
            found = model(tokens, use_cache=False).logits
    if way == "ours pp2":
        trainer = L.Trainer(
            strategy=MegatronStrategy(pipeline_model_parallel_size=2),
            accelerator="cpu",
            devices=2,
            precision="64-true",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(tokens), batch_size=len(tokens))
        outputs = trainer.predict(Module(), data)
        if not outputs or not isinstance(outputs[0], torch.Tensor):
            return None
        found = outputs[0]
    return float((found - wanted).abs().max() / wanted.abs().max())


def ranks_of(way: str, dtype: str, folder: str) -> Any:
    """Figures of each rank; the last line of the error where a way does not run."""
    from benchmarks.ranks import RankFailed, run_ranks

    print(f"{way}, {dtype}", file=sys.stderr, flush=True)
    try:
        return run_ranks([__file__, "--run-rank", way, dtype, folder], WAYS[way], timeout_seconds=600)
    except RankFailed as error:
        return str(error).strip().splitlines()[-1]


def run_rank(way: str, dtype: str, folder: Path) -> dict[str, Any]:
    """Trains on this rank: in float64 the gradients of the first step are compared, in float32 steps are timed."""
    import torch

    from benchmarks.clock import StepClock

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.set_default_dtype(getattr(torch, dtype))
    clock = StepClock(WARMUP_STEPS, TIMED_STEPS)
    found: dict[str, Any] = {}
    is_proof = dtype == "float64"
    kind, _, layout = way.partition(" ")
    train = {"plain": by_hand, "transformers": by_hand, "ours": by_trainer, "lightning": by_trainer}[kind]
    train(kind, layout, folder, found if is_proof else None, clock)
    status = Path("/proc/self/status").read_text()
    peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) / 1024
    if not is_proof:
        return {"cpu": clock.cpu_seconds, "peak": peak}
    if kind == "plain":
        torch.save(found, folder / "gradients.pt")
    wanted = torch.load(folder / "gradients.pt")
    deviations = {
        name: float((gradient - wanted[name]).abs().max() / wanted[name].abs().max())
        for name, gradient in found.items()
    }
    assert deviations.keys() == wanted.keys(), f"{way} has no gradient of {sorted(wanted.keys() - deviations.keys())}"
    name = max(deviations, key=lambda one: deviations[one])
    return {"worst": (deviations[name], name)}


def model_in(folder: Path, **options: Any) -> Any:
    """The model of transformers, which the first way leaves in the folder."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    path = folder / "model"
    if not path.exists():
        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=8192,
            hidden_size=256,
            intermediate_size=688,
            num_hidden_layers=8,
            num_attention_heads=8,
            num_key_value_heads=8,
            head_dim=32,
            max_position_embeddings=256,
            use_cache=False,
            pad_token_id=None,
        )
        AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.get_default_dtype(), **options).train()


def batches(rows: int) -> Any:
    """Batches of so many rows, the same for every way: random tokens, which are their own labels."""
    import torch

    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 8192, (ROWS * (WARMUP_STEPS + TIMED_STEPS), 256), generator=generator)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(tokens), batch_size=rows)


def by_hand(kind: str, layout: str, folder: Path, found: dict[str, Any] | None, clock: Any) -> None:
    """A loop over micro-batches, as one writes it for one device."""
    import torch
    import torch.distributed as dist

    if kind == "transformers":
        dist.init_process_group("gloo")
    model = model_in(folder, **({"tp_plan": "auto"} if kind == "transformers" else {}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for (tokens,) in batches(ROWS):
        optimizer.zero_grad()
        size = ROWS if "whole" in layout else MICRO_BATCH
        for rows in tokens.split(size):
            (model(rows, labels=rows).loss * size / ROWS).backward()
        if found is not None:
            shapes = {name: tuple(weight.shape) for name, weight in model_in(folder).named_parameters()}
            found.update({name: whole(weight.grad, shapes[name]) for name, weight in model.named_parameters()})
            return
        optimizer.step()
        clock.tick()


def by_trainer(kind: str, layout: str, folder: Path, found: dict[str, Any] | None, clock: Any) -> None:
    """An ordinary LightningModule, under one strategy or the other."""
    import lightning as L
    import torch
    from lightning.pytorch.strategies import ModelParallelStrategy

    from lightning_megatron import MegatronStrategy, named_gradients

    class Module(L.LightningModule):
        def configure_model(self) -> None:
            if not hasattr(self, "model"):
                self.model = model_in(folder)
                if kind == "lightning":
                    parallelize(self.model, self.device_mesh["tensor_parallel"])

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.model(batch[0], labels=batch[0]).loss

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            if found is None:
                return
            if kind == "ours":
                found.update({name.removeprefix("model."): one for name, one in named_gradients(self)})
            else:
                found.update({name: whole(one.grad, tuple(one.shape)) for name, one in self.model.named_parameters()})
            self.trainer.should_stop = True

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if is_cut or batch_idx % (ROWS // MICRO_BATCH) == ROWS // MICRO_BATCH - 1:
                clock.tick()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    sizes = {"tensor_model_parallel_size": "tp2", "pipeline_model_parallel_size": "pp2"}
    own = {name: 2 for name, word in sizes.items() if word in layout}
    is_cut = "pp2" in layout
    strategy: Any = (
        MegatronStrategy(**own, **({"num_microbatches": ROWS // MICRO_BATCH} if is_cut else {}))
        if kind == "ours"
        else ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2, process_group_backend="gloo")
    )
    double = torch.get_default_dtype() == torch.float64
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        max_epochs=1,
        max_steps=1 if found is not None else -1,
        precision="64-true" if double and kind == "ours" else "32-true",
        accumulate_grad_batches=1 if is_cut else ROWS // MICRO_BATCH,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), batches(ROWS if is_cut else MICRO_BATCH))


def parallelize(model: Any, mesh: Any) -> None:
    """Torch's call by the plan that the model brings along, as far as torch has its styles: not for norms of heads."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    styles = {
        "colwise": ColwiseParallel(),
        "rowwise": RowwiseParallel(),
        "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
    }
    plan = {key: styles[style] for key, style in model._tp_plan.items() if style in styles}
    plan["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    parallelize_module(model, mesh, plan)


def whole(gradient: Any, shape: tuple[int, ...]) -> Any:
    """A gradient of its full shape, of which this rank may hold a part."""
    import torch
    import torch.distributed as dist

    if hasattr(gradient, "full_tensor"):
        return gradient.full_tensor()
    if tuple(gradient.shape) == shape:
        return gradient.clone()
    parts = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, gradient.contiguous())
    dim = next(place for place, size in enumerate(shape) if gradient.shape[place] != size)
    return torch.cat(parts, dim)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    main()
