"""Cost of gloo's collectives between two CPU ranks, against the exchanges that `comm/collectives.py` runs instead.

CPU milliseconds of one rank and wall milliseconds, medians over interleaved rounds.

    torchrun --nproc-per-node 2 benchmarks/gloo.py
"""

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

WIDTH = 256
ROWS = (4, 512, 2048, 8192, 32768)
ROUNDS = 7


def main() -> None:
    from lightning_megatron.comm import collectives
    from lightning_megatron.mesh import Axis

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    axis = Axis("tp", 2, rank, (0, 1), dist.group.WORLD)
    if rank == 0:
        print("| size | collective | gloo: CPU ms | wall ms | here: CPU ms | wall ms |\n|---|---|---|---|---|---|")
    for rows in ROWS:
        full, part = torch.randn(rows, WIDTH), torch.randn(rows // 2, WIDTH)
        pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
            "all-reduce": (lambda x=full: dist.all_reduce(x), lambda x=full: collectives.all_reduce_(x, axis)),
            "reduce-scatter": (lambda x=full: _reduce_scatter(x), lambda x=full: collectives.reduce_scatter(x, axis)),
            "all-gather": (lambda x=part: _all_gather(x), lambda x=part: collectives.all_gather(x, axis)),
        }
        for name, (plain, own) in pairs.items():
            samples = [[measured(run, rows) for run in (plain, own)] for _ in range(ROUNDS)]
            cells = [statistics.median(s[side][kind] for s in samples) for side in (0, 1) for kind in (0, 1)]
            if rank == 0:
                print(f"| {rows} KiB | {name} | {' | '.join(f'{cell:.2f}' for cell in cells)} |", flush=True)
    dist.destroy_process_group()


def _reduce_scatter(x: Tensor) -> None:
    dist.reduce_scatter_tensor(torch.empty_like(x[: len(x) // 2]), x)


def _all_gather(x: Tensor) -> None:
    dist.all_gather_into_tensor(x.new_empty(2 * len(x), x.shape[1]), x)


def measured(run: Callable[[], object], rows: int) -> tuple[float, float]:
    """CPU and wall milliseconds of one run."""
    count = max(5, 30 * 512 // max(rows, 512))
    run()
    dist.barrier()
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(count):
        run()
    return (time.process_time() - cpu) / count * 1e3, (time.perf_counter() - wall) / count * 1e3


if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    main()
