"""Pipeline schedules at pp 2: time against GPipe and against the simulator, memory against the simulator.

Two processes run the engine without Lightning: a chain of linears whose compute dwarfs the messages, the same work for
every schedule. The time of one forward, backward, dgrad and wgrad is measured in the same run and given to the
simulator, whose makespan is the prediction. Memory is the peak of live tensor bytes above weights and gradients,
counted storage by storage; the prediction is the simulator's peak of activations times the bytes that one forward
leaves behind. Last the simulator alone: 8 ranks, 8 to 64 microbatches.

    python benchmarks/pipeline.py --rounds 5
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
import weakref
from pathlib import Path
from typing import Any, NamedTuple


class Shape(NamedTuple):
    """Sizes of a chain of linears and of what runs through it."""

    layers: int
    hidden: int
    tokens: int
    microbatches: int


SHAPE = Shape(layers=8, hidden=1536, tokens=256, microbatches=8)
# Name: (schedule, chunks).
SCHEDULES = {
    "GPipe": ("gpipe", 1),
    "1F1B": ("1f1b", 1),
    "interleaved, vp 2": ("interleaved", 2),
    "interleaved, vp 4": ("interleaved", 4),
    "ZB-H1": ("zb_h1", 1),
    "ZB-V": ("zb_v", 2),
}


def run_rank(rounds: int) -> None:
    """Runs every schedule on this rank and prints its record as JSON."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    runs = {name: Run(*schedule) for name, schedule in SCHEDULES.items()}
    for run in runs.values():
        run.step()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            seconds[name].append(run.timed_step())
    figures: dict[str, Any] = {}
    for name, run in runs.items():
        figures[name] = {"seconds": seconds[name], "costs": run.median_costs(), **run.memory()}
    print(json.dumps(figures))
    dist.destroy_process_group()


class Run:
    """One schedule on this rank, with a model of its own."""

    def __init__(self, name: str, chunks: int, shape: Shape = SHAPE) -> None:
        import torch
        import torch.distributed as dist
        from torch import nn

        from lightning_megatron.comm.p2p import Mailbox, build_lanes
        from lightning_megatron.mesh import Mesh, Sizes
        from lightning_megatron.pipeline.lower import hops
        from lightning_megatron.pipeline.module import Part, PipelineModule
        from lightning_megatron.pipeline.plans import training_plan
        from lightning_megatron.pipeline.registry import placement_of
        from lightning_megatron.pipeline.runtime import Runtime
        from lightning_megatron.pipeline.schedule_spec import Schedule
        from lightning_megatron.pipeline.scheduled import ScheduledCall
        from lightning_megatron.sharding import Initial
        from lightning_megatron.tensor.linear import ColumnParallelLinear
        from lightning_megatron.tensor.weight_gradients import WeightGradients, share

        def new_group(ranks: tuple[int, ...]) -> Any:
            return dist.new_group(list(ranks), use_local_synchronization=True)

        sizes = Sizes(world=2, pp=2, vp=chunks, placement=placement_of(name))  # type: ignore[arg-type]
        mesh = Mesh.build(sizes, dist.get_rank(), new_group)
        single = Mesh.single()

        def build() -> nn.Module:
            layer = ColumnParallelLinear(
                shape.hidden, shape.hidden, tp=single.tp, sp=single.sp, bias=False, initial=Initial(std=0.03)
            )
            nn.init.normal_(layer.weight, std=0.03)
            return nn.Sequential(layer, nn.Tanh())

        self.model = PipelineModule([Part(name=f"layers.{i}", build=build) for i in range(shape.layers)], mesh=mesh)
        gradients = WeightGradients()
        share(self.model, gradients)
        inputs = torch.randn(shape.microbatches, shape.tokens, shape.hidden)
        call = ScheduledCall(
            [self.model],
            mesh,
            lambda microbatch: self.model(inputs[microbatch]).square().mean(),
            lambda loss: loss.backward(),
            [0] * shape.microbatches,
            gradients.opened,
        )
        self.model.driver = call
        self.work = Stopwatch(call)
        ranks = tuple(sizes.pp_rank_of(stage) for stage in range(sizes.num_stages))
        lanes = build_lanes(mesh.pp, hops(ranks), new_group, new_group)
        self.runtime = Runtime(mesh.pp, Mailbox(mesh.pp, lanes, torch.device("cpu")))
        schedule = Schedule(name=name, pp=2, chunks=chunks, microbatches=shape.microbatches)  # type: ignore[arg-type]
        self.program = training_plan(schedule)
        self.world = mesh.world

    def step(self) -> None:
        """Runs a step whose gradients exist already, as under flat buckets."""
        import torch

        for parameter in self.model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            else:
                parameter.grad.zero_()
        self.runtime.run(self.program, self.work)

    def timed_step(self) -> float:
        """Wall seconds of a step that all ranks start together."""
        from lightning_megatron.comm import collectives

        collectives.barrier(self.world)
        began = time.perf_counter()
        self.step()
        collectives.barrier(self.world)
        return time.perf_counter() - began

    def median_costs(self) -> dict[str, float]:
        """Seconds of each kind of compute."""
        return {kind: statistics.median(spent) for kind, spent in self.work.seconds.items()}

    def memory(self) -> dict[str, float]:
        """Peak bytes of a step, and the bytes that one forward saves for backward."""
        counter = live_bytes()
        self.work.read_live = lambda: counter.live
        with counter:
            self.step()
        self.work.read_live = None
        return {"peak_bytes": counter.peak, "activation_bytes": statistics.median(self.work.left)}


class Stopwatch:
    """Stopwatch around the handlers of a stage."""

    def __init__(self, work: Any) -> None:
        self.seconds: dict[str, list[float]] = {}
        self.read_live: Any = None
        self.left: list[int] = []
        self._work = work

    def _timed(self, kind: str, *args: Any) -> Any:
        began = time.perf_counter()
        result = getattr(self._work, kind)(*args)
        self.seconds.setdefault(kind, []).append(time.perf_counter() - began)
        return result

    def forward(self, *args: Any) -> Any:
        before = self.read_live() if self.read_live else 0
        result = self._timed("forward", *args)
        if self.read_live:
            self.left.append(self.read_live() - before)
        return result

    def backward(self, *args: Any) -> Any:
        return self._timed("backward", *args)

    def backward_input(self, *args: Any) -> Any:
        return self._timed("backward_input", *args)

    def backward_weight(self, *args: Any) -> Any:
        return self._timed("backward_weight", *args)

    def reduce_gradients(self, stage: int) -> None:
        self._work.reduce_gradients(stage)

    def gather_parameters(self, stage: int) -> None:
        self._work.gather_parameters(stage)


def live_bytes() -> Any:
    """A context that counts the bytes of tensors made inside it that are still there (`live`), and their `peak`."""
    from torch import Tensor
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_flatten

    class LiveBytes(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.live = self.peak = 0
            self.known: set[int] = set()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            given = {t.untyped_storage().data_ptr() for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)}
            result = func(*args, **(kwargs or {}))
            for tensor in tree_flatten(result)[0]:
                if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in given:
                    self._add(tensor.untyped_storage())
            return result

        def _add(self, storage: Any) -> None:
            address = storage.data_ptr()
            if address == 0 or address in self.known:
                return
            self.known.add(address)
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._gone, address, storage.nbytes())

        def _gone(self, address: int, num_bytes: int) -> None:
            self.known.discard(address)
            self.live -= num_bytes

    return LiveBytes()


def run(rounds: int) -> list[dict[str, Any]]:
    """Records of all ranks."""
    from benchmarks.ranks import run_ranks

    try:
        return run_ranks([__file__, "--run-rank", "--rounds", str(rounds)], 2)
    except RuntimeError as error:
        raise SystemExit(f"a rank failed:\n{error}") from None


def predicted(name: str, costs: dict[str, float]) -> Any:
    """The simulator's timeline of a schedule, with measured seconds of a forward, and so on, of one chunk."""
    from lightning_megatron.pipeline.lower import lower
    from lightning_megatron.pipeline.registry import order_of
    from lightning_megatron.pipeline.schedule_spec import Schedule
    from lightning_megatron.pipeline.simulate import Costs, play

    schedule, chunks = SCHEDULES[name]
    order = order_of(Schedule(name=schedule, pp=2, chunks=chunks, microbatches=SHAPE.microbatches))  # type: ignore[arg-type]
    return play(lower(order).plan, Costs(**costs))


def report(figures: list[dict[str, Any]], rounds: int) -> str:
    """The table of the schedules, and the simulator's own."""
    import torch

    # Ranks wait for each other at the start and the end of a step: the longer time is the step's.
    steps = {
        name: [max(pair) for pair in zip(*(rank[name]["seconds"] for rank in figures), strict=True)]
        for name in SCHEDULES
    }
    lines = [
        f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}; pp 2, {SHAPE.layers} layers "
        f"of {SHAPE.hidden} x {SHAPE.hidden}, {SHAPE.microbatches} microbatches of {SHAPE.tokens} tokens; "
        f"{rounds} rounds, medians",
        "",
        "| schedule | s/step | to GPipe | predicted s/step | measured/predicted | bubble, predicted "
        "| peak MB by rank | predicted MB by rank |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in SCHEDULES:
        kinds = {kind for rank in figures for kind in rank[name]["costs"]}
        costs = {kind: statistics.mean(rank[name]["costs"][kind] for rank in figures) for kind in kinds}
        timeline = predicted(name, costs)
        measured = statistics.median(steps[name])
        ratio = statistics.median(a / b for a, b in zip(steps[name], steps["GPipe"], strict=True))
        peaks = [rank[name]["peak_bytes"] / 2**20 for rank in reversed(figures)]
        expected = [
            count * rank[name]["activation_bytes"] / 2**20
            for count, rank in zip(timeline.peak_activations, reversed(figures), strict=True)
        ]
        lines.append(
            f"| {name} | {measured:.3f} | {ratio:.3f} | {timeline.makespan:.3f} | {measured / timeline.makespan:.3f} | "
            f"{timeline.bubble:.1%} | {', '.join(f'{p:.1f}' for p in peaks)} | "
            f"{', '.join(f'{e:.1f}' for e in expected)} |"
        )
    return "\n".join([*lines, "", *simulated()])


def simulated() -> list[str]:
    """The simulator's table for 8 ranks: the bubble, and the time relative to 1F1B."""
    from benchmarks.schedule_table import schedule_table

    columns = {microbatches: schedule_table(8, microbatches) for microbatches in (16, 32, 64)}
    lines = ["| p = 8 | " + " | ".join(f"m = {m}" for m in columns) + " |", "|---" * (1 + len(columns)) + "|"]
    for rows in zip(*columns.values(), strict=True):
        cells = [f"{row.bubble:.1%}, {row.relative_time:.3f}" for row in rows]
        lines.append(f"| {rows[0].schedule.name}, v = {rows[0].schedule.chunks} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="how often each schedule runs, interleaved")
    parser.add_argument("--json", type=Path, help="where to save the records of all ranks")
    parser.add_argument("--run-rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run_rank:
        run_rank(arguments.rounds)
        return
    figures = run(arguments.rounds)
    print(report(figures, arguments.rounds))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    main()
