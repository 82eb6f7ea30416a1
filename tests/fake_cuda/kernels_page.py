"""The page of kernels, bytes and waits: a row for each kind of layer, to which tests hold the code."""

from pathlib import Path

from tests.fake_cuda.cases import CASES, Cost
from tests.fake_cuda.compiled import COMPILED, CompiledCost
from tests.harness.fake_cuda import ROOT

PAGE = ROOT / "docs" / "benchmarks" / "kernels.md"
COMMAND = "python -m tests.fake_cuda --write docs/benchmarks/kernels.md"

_INTRODUCTION = f"""# Kernels, bytes and waits of a microbatch

What forward and backward of one microbatch ask of a GPU, counted on CUDA tensors without numbers
(`tests/harness/fake_cuda.py`, `benchmarks/device_work.py`): no GPU takes part, and no time is measured.
`{COMMAND}` writes this page. The tests of every run
(`tests/fake_cuda/test_kernels.py`) count again, and fail where a number is not the one shown: a change that makes one
rise shows so here. Whole steps run there too (`tests/fake_cuda/test_steps.py`): under the Trainer on one rank the host
waits once a step, to learn whether gradients are finite; ranks of tp, cp, pp and ep are imagined, and send nothing.
Experts are all on the rank: where ranks share them, the host waits once more in each of their layers, to learn how many
rows it receives.

Weights are as the strategy trains them under `bf16-mixed`: matrices in bf16, vectors and all gradients in float32, with
autocast; one rank; 8,192 tokens, in rows as long as the model takes. It is a model's second microbatch: what a model
makes once, such as the angles of rotary positions, it made in the first. A
kernel is an operation that launches at least one, other than matrix products and fused attention; bytes are those that
these kernels read and write. FLOPs are those of products. A layer is the difference of models of two layers and of one,
and a call what is left of the latter: embedding, head, loss and what layers share. Attention of T5 runs in tiles, so
that its kernels grow with the batch; it is counted for one row. Random keys and masks of dropout are one kernel each,
as where Triton and a C compiler are installed (`lightning_megatron/comm/random_kernels.py`); elsewhere torch draws the
same numbers by some 25.
"""
_HEAD = (
    "| model | kernels of a layer | GB of a layer | TFLOP of a layer | kernels of a call | copies between host and "
    "device | the host waits | and again in each further layer |\n" + "|---|" + "--:|" * 7
)


# Kernels of a call that are aimed at.
MOST = 60
_CALLS = f"""
## Calls of more than {MOST} kernels

A call is to ask for no more than {MOST} kernels beside its layers. Where one asks for more, these are all of them, by
the file that asks. A LLaVA is one call of two stacks: to the kernels of a Llama's call come those that cut patches and
embed them, find the image tokens of labels and text, count them for the host, and put features in their places, each
with what its gradient takes. The order of sentences adds to BERT's call a second head, with a loss of its own, and a
weight for each sample. What could join them is a compiler, or a kernel for each: torch has none, and layers alone are
compiled.
"""
_CALLS_HEAD = "| model | kernels of a call, by file |\n|---|---|"

_COMPILED = """
## Compiled layers

What is left of it with `KernelConfig(compile_layers=True)`: the kernels that Inductor plans for an H200, and what they
read and write (`tests/fake_cuda/compiled.py`), without code and without a run. With them count those of operators that
run uncompiled, such as a layer's experts; products of weights' gradients are written to their buckets, as those of
uncompiled layers. A mask of dropout is no kernel of its own any more, but drawn where it is used. By FlexAttention
(`ContextConfig(kernel="flex")`) weights of attention are dropped within its kernel, and are nowhere laid out; what it
reads and writes is attention's, and not in the table.
"""
_COMPILED_HEAD = (
    "| model | kernels of a layer | the same compiled | GB of a layer | the same compiled |\n|---|--:|--:|--:|--:|"
)


def compiled_row_of(name: str, cost: Cost, compiled: CompiledCost) -> str:
    return (
        f"| {name}, compiled | {cost.layer_kernels} | {compiled.kernels} | {cost.layer_bytes / 1e9:.2f} "
        f"| {compiled.bytes / 1e9:.2f} |"
    )


def row_of(name: str, cost: Cost) -> str:
    return (
        f"| {name} | {cost.layer_kernels} | {cost.layer_bytes / 1e9:.2f} | {cost.layer_flops / 1e12:.3f} "
        f"| {cost.call_kernels.total()} | {cost.copies.total()} | {cost.waits.total()} | {cost.layer_waits} |"
    )


def calls_row_of(name: str, cost: Cost) -> str:
    """The row of a call of more than MOST kernels; of other calls there is none: empty."""
    if cost.call_kernels.total() <= MOST:
        return ""
    found = sorted((-number, file) for file, number in cost.call_kernels.items() if number)
    return f"| {name}, a call | {', '.join(f'{file} {-number}' for number, file in found)} |"


def page_of(costs: dict[str, Cost], compiled: dict[str, CompiledCost]) -> str:
    """The page. Raises KeyError where a case is missing."""
    rows = [row_of(name, costs[name]) for name in CASES]
    calls = [row for name in CASES if (row := calls_row_of(name, costs[name]))]
    of_compiled = [compiled_row_of(name, costs[case], compiled[name]) for name, (case, _) in COMPILED.items()]
    tables = [_HEAD, *rows, _CALLS, _CALLS_HEAD, *calls, _COMPILED, _COMPILED_HEAD, *of_compiled]
    return "\n".join([_INTRODUCTION, *tables, ""])


def shown_row(name: str, page: Path = PAGE) -> str:
    """The row of the page; empty: it has none."""
    lines = page.read_text(encoding="utf-8").splitlines()
    return next((line for line in lines if line.startswith(f"| {name} |")), "")
