"""Bad input of every kind ends a command or a recipe with one message and exit code 2, in bounded time and memory."""

import base64
import json
import os
import resource
import signal
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers

from lightning_megatron.checkpoint import save, summary
from lightning_megatron.checkpoint.manifest import _signed
from lightning_megatron.cli.main import main
from lightning_megatron.data.tiktoken_tokenizer import read_ranks
from lightning_megatron.hf import weights
from lightning_megatron.trainer.setup import memory_checks
from tests.checkpoint.folders import WORLD
from tests.cli.test_checkpoint import META, TENSORS
from tests.cli.test_recipe import ALONE, AUTO, folder, run
from tests.harness.sample import every_nth

assert folder, "the fixture of a recipe's folder is used here"
# A bad input that is not stopped takes all of it.
_MOST_BYTES = 2 * 2**30
_MOST_SECONDS = 60
LLAMA = {
    "model_type": "llama",
    "vocab_size": 131,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.fixture(autouse=True)
def bounds(folder: Path) -> Iterator[None]:
    """Little memory and time, in the folder of a recipe."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + _MOST_BYTES, before[1]))
    handler = signal.signal(signal.SIGALRM, _late)
    signal.alarm(_MOST_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)


def _late(*_: Any) -> None:
    raise TimeoutError(f"a bad input takes more than {_MOST_SECONDS} s")


def message_of(capfd: pytest.CaptureFixture[str], call: Callable[[], int | None]) -> str:
    """The one message that a call prints, which ends with exit code 2."""
    try:
        code = call()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else None
    printed = capfd.readouterr().err
    assert code == 2 and "Traceback" not in printed and printed.count("error: ") == 1, printed
    return printed[printed.index("error: ") :]


# --- files of text ----------------------------------------------------------------------------------------------------

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9)
)
MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 12))


def text(written: str) -> Callable[[Path], None]:
    return lambda path: path.write_text(written) and None


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 8 * 2**30)


FILES: dict[str, tuple[Callable[[Path], None], str]] = {
    "nested JSON": (text("[" * 100_000), "nested more than 100 deep"),
    "nested tables of JSON": (text('{"model":' * 100_000 + "1" + "}" * 100_000), "nested more than 100 deep"),
    "nested YAML": (text("\n".join(" " * depth + "a:" for depth in range(200)) + " 1"), "nested more than 100 deep"),
    "aliases": (text(BOMB), "aliases that stand for more than 100,000 values"),
    "merged aliases": (text(MERGES), "aliases that stand for more than 100,000 values"),
    "an alias of itself": (text("model: &a\n  config: *a\n"), "the alias *a within what it stands for"),
    "no UTF-8": (lambda path: path.write_bytes(b"a: \xff\xfe\n") and None, "byte 3 is no UTF-8"),
    "UTF-16": (lambda path: path.write_text("a: 1\n", encoding="utf-16") and None, "byte 0 is no UTF-8"),
    "zero bytes": (lambda path: path.write_bytes(b"\0" * 100) and None, "is no YAML"),
    "a pipe": (os.mkfifo, "it is a pipe or a device"),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "it is a pipe or a device"),
    "links in a ring": (lambda path: path.symlink_to(path), "Too many levels of symbolic links"),
    "gigabytes of nothing": (sparse, "8,589,934,592 bytes"),
    "a long comment": (text("#" * 3_000_000), "YAML may have 1,048,576"),
    "a number of base 60": (text("model: " + "1:" * 50_000 + "1\n"), "has a number of 100001 characters"),
    "a word for a number": (text("model: !!int abc\n"), "is no YAML"),
    "a key twice in JSON": (text('{"model_type": "llama", "model_type": "gpt2"}'), "model_type is named twice"),
    "a tag of Python": (text("!!python/object/apply:os.system ['true']\n"), "is no YAML"),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_bad_file_of_text_is_named_with_what_is_wrong(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    make, words = FILES[kind]
    Path("llama").mkdir()
    Path("llama/config.json").write_text(json.dumps(LLAMA))
    make(Path("bad.yaml"))
    for args in (
        ("plan", "bad.yaml", "--gpu", "h100"),
        ("plan", "llama3_8b", "--gpu", "bad.yaml", "--num-gpus", "8"),
        ("convert", "llama", "experts.ckpt", "--upcycle", "bad.yaml"),
    ):
        told = message_of(capfd, lambda args=args: main(args))  # type: ignore[misc]
        assert words in told and "bad.yaml" in told and told.count("\n") == 1, told
    assert "--config" in message_of(capfd, lambda: run("--config", "bad.yaml"))


# --- sizes, seeds, devices, folders -----------------------------------------------------------------------------------

HUGE = {"num_hidden_layers": 10**9, "hidden_size": 10**12 + 1, "vocab_size": 10**13, "num_attention_heads": 10**9}
OPTIONS: dict[str, tuple[tuple[str, ...], str]] = {
    "a seed beyond 32 bits": (("--seed_everything=4294967296",), "--seed_everything (4294967296) must be"),
    "a seed below zero": (("--seed_everything=-1",), "--seed_everything (-1) must be at least 0"),
    "a value that is nested": (("--model.config", "[" * 100_000), "--model.config"),
    "a value of any length": (("--data.path", "x" * 200_000), "xxx ... xxx"),
    "a zero byte in a path": (("--data.path=a\0b",), "a"),
    "devices below zero": (("--trainer.devices=-5",), "should be an int > 0"),
    "devices by a word": (("--trainer.devices=x",), "should be an int > 0"),
    "a million devices": (("--trainer.devices=1000000",), "devices (1000000) must be at most 1,024"),
    "an accelerator that is not there": (("--trainer.accelerator=tpu",), "the Trainer cannot be made"),
    "a million workers": (("--data.num_workers=1000000",), "num_workers (1000000) must be at most 1,024"),
    "no batch to a step": (("--trainer.accumulate_grad_batches=0",), "accumulate_grad_batches (0) must be at least 1"),
    "a norm below zero": (("--trainer.gradient_clip_val=-1",), "gradient_clip_val (-1) must be at least 0"),
    "a rate without end": (("--model.optimizer.lr=1e400",), "lr (inf) must be at least 0, and finite"),
    "a hidden size of 1e8": (("--model.config.hidden_size=100000000",), "GiB of this machine"),
    "1e9 layers": (("--model.config.num_layers=1000000000",), "num_layers (1000000000) must be at most 4,096"),
    "a cache that cannot be made": (("--data.cache_directory=tiny.yaml/x",), "tiny.yaml"),
    "a cache in a place of the kernel's": (("--data.cache_directory=/proc/x",), "/proc/x"),
    "a name that is too long": (("--data.cache_directory=" + "a" * 300,), "File name too long"),
    "an output that cannot be made": (
        ("--trainer.logger=lightning.pytorch.loggers.CSVLogger", "--trainer.logger.save_dir=tiny.yaml/x"),
        "tiny.yaml/x",
    ),
}


@pytest.mark.parametrize("case", OPTIONS)
@pytest.mark.parametrize("strategy", [AUTO, ALONE], ids=["auto", "megatron"])
def test_a_bad_option_of_a_recipe_ends_it(
    case: str, strategy: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    options, words = OPTIONS[case]
    assert words in message_of(capfd, lambda: run(*strategy, *options))


@pytest.mark.parametrize("field", HUGE)
def test_sizes_of_a_config_that_no_model_has_are_refused(field: str, capfd: pytest.CaptureFixture[str]) -> None:
    Path("llama").mkdir()
    for kind in ("llama", "qwen3_moe"):
        written = {**LLAMA, "model_type": kind, field: HUGE[field]}
        Path("llama/config.json").write_text(json.dumps(written))
        for args in (("convert", "llama", "a.ckpt"), ("plan", "llama", "--gpu", "h100", "--num-gpus", "8")):
            message_of(capfd, lambda args=args: main(args))  # type: ignore[misc]


def test_a_model_that_this_machine_cannot_hold_is_refused_and_one_that_it_can_is_not(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory_checks, "machine_memory_bytes", lambda: 1000)
    assert "it has 0.0 GiB" in message_of(capfd, lambda: run(*ALONE, "--data.path=nowhere"))
    monkeypatch.undo()
    assert "GiB" not in message_of(capfd, lambda: run(*ALONE, "--data.path=nowhere"))


# --- weights ----------------------------------------------------------------------------------------------------------


def safetensors(header: Any, length: int | None = None) -> bytes:
    written = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(written) if length is None else length) + written


HEADERS = {
    "nothing": b"",
    "nested": safetensors(b"[" * 100_000),
    "a length beyond the file": safetensors({}, length=2**63),
    "a list": safetensors([1]),
    "an entry that is none": safetensors({"a": [1]}),
    "a shape that is none": safetensors({"a": {"dtype": "F32", "shape": "ab", "data_offsets": [0, 0]}}),
    "a shape below zero": safetensors({"a": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 0]}}),
    "a tensor twice": safetensors(
        b"{%s, %s}" % ((b'"a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}',) * 2)
    ),
    "offsets that are none": safetensors({"a": {"dtype": "F32", "shape": [0], "data_offsets": "ab"}}),
    "offsets that are swapped": safetensors({"a": {"dtype": "F32", "shape": [0], "data_offsets": [4, 0]}}),
    "a header of many megabytes": safetensors(b" " * (17 * 2**20)),
    "a dtype that is a list": safetensors({"a": {"dtype": [1], "shape": [0], "data_offsets": [0, 0]}}),
}
# What they are told by, where the file is as long as its header says.
TOLD_OF_HEADERS = {
    "a shape below zero": "a tensor in its header that cannot be: a, by {'dtype': 'F32', 'shape': [-1, -1]",
    "a tensor twice": "model.safetensors is no safetensors file",
}
INDICES = {
    "a list": [1],
    "files that are numbers": {"weight_map": {"a": 5}},
    "a zero byte": {"weight_map": {"a": "a\0b"}},
}


@pytest.mark.parametrize("damage", [*HEADERS, *(f"index: {name}" for name in INDICES)])
def test_weights_that_are_none_are_refused(damage: str, capfd: pytest.CaptureFixture[str]) -> None:
    Path("llama").mkdir()
    Path("llama/config.json").write_text(json.dumps(LLAMA))
    if damage in HEADERS:
        Path("llama/model.safetensors").write_bytes(HEADERS[damage])
    else:
        index = json.dumps(INDICES[damage.removeprefix("index: ")])
        Path("llama/model.safetensors.index.json").write_text(index)
    told = message_of(capfd, lambda: main(("convert", "llama", "a.ckpt")))
    assert TOLD_OF_HEADERS.get(damage, "llama") in told
    assert not Path("a.ckpt").exists()


FIELDS = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 5}
STRANGE: tuple[dict[str, Any], ...] = (
    {"num_layers": float("nan")},
    {"num_layers": True},
    {"num_layers": "1"},
    {"hidden_size": 8.5},
    {"activation": ["gelu"]},
    {"moe": {"router": {"num_experts": 2}, "layers": ["a"]}},
    {"moe": {"router": {"num_experts": True}}},
)


@pytest.mark.parametrize("fields", STRANGE, ids=str)
def test_a_field_of_another_type_is_refused(fields: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    save("bare.ckpt", TENSORS, {}, world=WORLD)
    for given in ({}, fields):
        Path("model.json").write_text(json.dumps(FIELDS | given))
        told = message_of(capfd, lambda: main(("convert", "bare.ckpt", "out", "--config", "model.json")))
        assert ("of type" in told) == bool(given)


def test_experts_that_no_model_or_no_memory_has_are_told_by_their_sizes(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**LLAMA))
    model.save_pretrained("llama")
    Path("many.yaml").write_text("router: {num_experts: 1000000000, top_k: 2}\n")
    Path("few.yaml").write_text("router: {num_experts: 4, top_k: 2}\n")
    for out in ("experts", "experts.ckpt"):
        args = ("convert", "llama", out, "--upcycle", "many.yaml")
        told = message_of(capfd, lambda args=args: main(args))  # type: ignore[misc]
        assert "RouterConfig: num_experts (1000000000) must be at most 65,536" in told
    args = ("convert", "llama", "experts.ckpt", "--upcycle", "few.yaml")
    # An expert's gate and up, of all experts.
    num_bytes = 4 * 2 * 48 * 32 * 4
    monkeypatch.setattr(weights, "machine_memory_bytes", lambda: num_bytes - 1)
    told = message_of(capfd, lambda: main(args))
    assert "with num_experts (4) of ffn_hidden_size (48) takes 0.0 GiB, and this machine has 0.0 GiB" in told
    assert not Path("experts.ckpt").exists()
    monkeypatch.setattr(weights, "machine_memory_bytes", lambda: num_bytes)
    assert main(args) == 0


def test_a_target_that_cannot_be_written_is_told_by_its_name(capfd: pytest.CaptureFixture[str]) -> None:
    save("a.ckpt", TENSORS, META, world=WORLD)
    args: tuple[str, ...] = ("checkpoint", "consolidate", "a.ckpt", "/proc/a.pt")
    assert "OUT (/proc/a.pt) cannot be written: " in message_of(capfd, lambda: main(args))
    transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**LLAMA)).save_pretrained("llama")
    args = ("convert", "llama", "/proc/a.ckpt")
    assert "TARGET (/proc/a.ckpt) cannot be written: " in message_of(capfd, lambda: main(args))


def test_layers_of_experts_that_are_no_numbers_are_refused(capfd: pytest.CaptureFixture[str]) -> None:
    Path("llama").mkdir()
    Path("llama/config.json").write_text(json.dumps(LLAMA))
    Path("llama/model.safetensors").write_bytes(safetensors({}))
    Path("experts.yaml").write_text("router: {num_experts: 2}\nlayers: [a]\n")
    message_of(capfd, lambda: main(("convert", "llama", "experts.ckpt", "--upcycle", "experts.yaml")))


def test_a_pipe_in_the_place_of_what_is_read_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    save("a.ckpt", TENSORS, {}, world=WORLD)
    Path("a.ckpt/manifest.json").unlink()
    for name in ("a.ckpt/manifest.json", "pipe"):
        os.mkfifo(name)
    Path("loop").symlink_to("loop")
    told = message_of(capfd, lambda: main(("checkpoint", "inspect", "a.ckpt")))
    assert "a.ckpt has a pipe or device of the name manifest.json" in told
    for place, words in (("pipe", "pipe cannot be read: it is a pipe"), ("loop", "loop cannot be read: Too many")):
        assert words in message_of(capfd, lambda place=place: main(("plan", place, "--gpu", "h100")))  # type: ignore[misc]
        args = ("prepare-data", "--path", place, "--train-vocab-size", "300", "--output", "x")
        assert f"path ('{place}') is a pipe, a device or a link that leads to nothing" in message_of(
            capfd,
            lambda args=args: main(args),  # type: ignore[misc]
        )


def test_a_pipe_in_the_place_of_a_target_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    for name in ("a.ckpt", "a.svg"):
        os.mkfifo(name)
    assert "pipe" in message_of(capfd, lambda: main(("checkpoint", "inspect", "a.ckpt")))
    args = ("schedule", "--pp", "2", "--microbatches", "2", "--out", "a.svg")
    assert "pipe" in message_of(capfd, lambda: main(args))


@pytest.mark.parametrize("words", [("--model.config", "pipe"), ("--model.config=pipe",), ("--data.path=pipe",)])
def test_a_pipe_in_the_place_of_a_value_is_refused(words: tuple[str, ...], capfd: pytest.CaptureFixture[str]) -> None:
    os.mkfifo("pipe")
    assert "names a pipe, which may never end" in message_of(capfd, lambda: run(*words))


# --- checkpoints ------------------------------------------------------------------------------------------------------

FOREIGN: dict[str, Any] = {
    "global_step": "five",
    "epoch": None,
    "mesh": 5,
    "models": {"model": 5},
    "other_states": 5,
    "optimizers": [{"groups": [{"params": 5}], "state": {}}],
}


@pytest.mark.parametrize("key", FOREIGN)
def test_metadata_that_another_wrote_under_our_key_is_named(
    key: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    save("a.ckpt", TENSORS, META, world=WORLD)
    assert main(("checkpoint", "inspect", "a.ckpt")) == 0
    capfd.readouterr()
    # A save reads some of them itself: only other programs write such ones.
    monkeypatch.setattr(summary, "read_meta", lambda path: {**META, key: FOREIGN[key]})
    for args in (
        ("checkpoint", "inspect", "a.ckpt"),
        ("checkpoint", "consolidate", "a.ckpt", "a.pt"),
        ("convert", "a.ckpt", "out"),
    ):
        assert f"{key} (" in message_of(capfd, lambda args=args: main(args))  # type: ignore[misc]


def test_a_manifest_beyond_all_bounds_is_refused(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    save("a.ckpt", TENSORS, META, world=WORLD)
    manifest = Path("a.ckpt/manifest.json")
    body = json.loads(manifest.read_text())
    del body["checksum"]
    chunk = body["tensors"]["w"]["chunks"][0][2:]
    body["tensors"]["w"] |= {"shape": [0, 10**30], "chunks": [[[0, 0], [0, 10**30], *chunk]]}
    manifest.write_bytes(_signed(body))
    args = ("checkpoint", "consolidate", "a.ckpt", "a.pt")
    assert "no tensor has the shape" in message_of(capfd, lambda: main(args))
    monkeypatch.setattr("lightning_megatron.checkpoint.manifest._MOST_BYTES", 1000)
    assert "has more than 1,000 bytes" in message_of(capfd, lambda: main(args))


def test_an_empty_path_is_not_the_folder_of_today(capfd: pytest.CaptureFixture[str]) -> None:
    assert "the path is empty" in message_of(capfd, lambda: main(("checkpoint", "prune", "")))


# --- files of a user's ------------------------------------------------------------------------------------------------

USER_FILES = {
    "raises": ("raise KeyError('weights')\n", "KeyError: 'weights'"),
    "is no UTF-8": ("a = '\udcff'\n", "can't decode byte 0xff"),
    "has zero bytes": ("a = 1\0\n", "null bytes"),
    "ends it at once": ("import os\nos._exit(0)\n", "ended by exit code 0 without a word"),
    "ends the process": ("import sys\nsys.exit(0)\n", "SystemExit: 0"),
    "is interrupted": ("raise KeyboardInterrupt\n", "KeyboardInterrupt"),
    "calls itself": ("def Module():\n    return Module()\n", "RecursionError"),
    "makes nothing": ("def Module():\n    pass\n", "what was made is a NoneType"),
    "fails late": (
        "import lightning\nclass Module(lightning.LightningModule):\n    def __init__(self):\n        1 / 0\n",
        "ZeroDivisionError",
    ),
}


@pytest.mark.parametrize("what", every_nth(USER_FILES, 3))
@pytest.mark.parametrize("command", ["model-plan", "certify"])
def test_a_file_of_a_users_that_fails_ends_in_one_way(
    command: str, what: str, capfd: pytest.CaptureFixture[str]
) -> None:
    written, words = USER_FILES[what]
    Path("fails_here.py").write_bytes(written.encode(errors="surrogateescape"))
    told = message_of(capfd, lambda: main((command, "fails_here.py:Module")))
    assert words in told and "fails_here.py" in told


@pytest.mark.parametrize("command", ["model-plan", "certify"])
def test_a_file_that_is_not_there_is_told_before_a_process_is_started(
    command: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for module in ("testing.proof", "cli.cut_report"):
        monkeypatch.setattr(f"lightning_megatron.{module}.run_processes", lambda *_, **__: 1 / 0)
    Path("mine.py").touch()
    for spec, words in (
        ("nowhere.py:Module", "nowhere.py is no file"),
        ("mine.py:", "'mine.py:' must be a file and a name in it"),
        ("mine.py:a.b", "'mine.py:a.b' must be a file and a name in it"),
    ):
        assert words in message_of(capfd, lambda spec=spec: main((command, spec)))  # type: ignore[misc]
    args = ("certify", "mine.py", "--data", "there.py:data")
    told = message_of(capfd, lambda: main(args))
    assert "'mine.py' must be a file" in told and "there.py is no file" in told


# --- schedules and tokens ---------------------------------------------------------------------------------------------

SCHEDULES: dict[str, tuple[str, ...]] = {
    "costs that differ by all": ("--pp", "4", "--microbatches", "8", "--forward", "1e-320"),
    "a message without end": ("--pp", "4", "--microbatches", "8", "--message", "1e300"),
    "a million ranks": ("--pp", "1000000", "--microbatches", "1"),
    "a picture of all": ("--pp", "100", "--microbatches", "1000", "--out", "a.svg"),
}


@pytest.mark.parametrize("case", SCHEDULES)
def test_a_schedule_that_nobody_can_look_at_is_refused(case: str, capfd: pytest.CaptureFixture[str]) -> None:
    message_of(capfd, lambda: main(("schedule", *SCHEDULES[case])))


@pytest.mark.parametrize("number", ["254", "-5", "9" * 30])
def test_ranks_that_are_no_numbering_are_refused(number: str) -> None:
    pytest.importorskip("tiktoken")
    lines = [f"{base64.b64encode(bytes([byte])).decode()} {byte}" for byte in range(255)]
    Path("t.tiktoken").write_text("\n".join([*lines, f"/w== {number}"]))
    with pytest.raises(ValueError, match="must number each token once"):
        read_ranks(Path("t.tiktoken"))


def test_a_vocabulary_that_no_memory_holds_is_not_trained(capfd: pytest.CaptureFixture[str]) -> None:
    args = ("prepare-data", "--path", "tiny.yaml", "--train-vocab-size", "1000000000000", "--output", "x")
    assert "--train-vocab-size" in message_of(capfd, lambda: main(args))


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--workers=999999999999", "--workers (999999999999) must be at most 1,024"),
        ("--output=", "--output (.) is a folder; name the files in it, as in ./corpus"),
        ("--output=..", "--output (..) is a folder"),
        ("--text-column=body", "--text-column (body) names columns of tables, and --path (tiny.yaml)"),
        ("--special-tokens=[A] [A]", "--special-tokens ([A] [A]) names a token twice"),
    ],
)
def test_tokens_are_not_written_by_any_number_of_workers_or_without_a_name(
    option: str, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    name, _, values = option.partition("=")
    words_of_option = (name, *values.split()) if " " in values else (option,)
    args = ("prepare-data", "--path", "tiny.yaml", "--train-vocab-size", "300", "--output", "x", *words_of_option)
    assert words in message_of(capfd, lambda: main(args))
