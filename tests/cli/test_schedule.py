"""`lightning-megatron schedule`: what it prints and writes is the order that a run would execute, and its mistakes."""

import json
import re
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from lightning_megatron.cli.main import main
from lightning_megatron.pipeline.registry import order_of
from lightning_megatron.pipeline.schedule_spec import Schedule
from lightning_megatron.pipeline.simulate import Costs, play

ROOT = Path(__file__).resolve().parents[2]
SIZES = ("--pp", "4", "--microbatches", "8")


@pytest.fixture(autouse=True)
def empty_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def printed(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["schedule", *options]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def record(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(printed(capsys, *options, "--json"))
    return found


def error_of(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """The one line of a command that ends with a mistake."""
    assert main(["schedule", *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1 and captured.err.endswith("\n")
    return captured.err


@pytest.mark.parametrize(
    ("options", "kind", "vp"),
    [
        ((), "1f1b", 1),
        (("--vp", "1"), "1f1b", 1),
        (("--vp", "2"), "interleaved", 2),
        (("--schedule", "zb_v"), "zb_v", 2),
        (("--schedule", "zb_h1"), "zb_h1", 1),
        (("--schedule", "dualpipe_v"), "dualpipe_v", 2),
        (("--schedule", "gpipe", "--vp", "3"), "gpipe", 3),
        (("--overlapped",), "1f1b", 1),
        (("--overlapped", "--vp", "2"), "interleaved", 2),
    ],
)
def test_the_kind_follows_vp_and_vp_follows_the_kind(
    options: tuple[str, ...], kind: str, vp: int, capsys: pytest.CaptureFixture[str]
) -> None:
    found = record(capsys, *SIZES, *options)
    assert (found["schedule"], found["vp"]) == (kind, vp)


def test_json_has_every_compute_of_the_order_with_its_times(capsys: pytest.CaptureFixture[str]) -> None:
    found = record(capsys, *SIZES, "--vp", "2", "--backward", "3", "--group-size", "5")
    schedule = Schedule(name="interleaved", pp=4, chunks=2, microbatches=8, group_size=5)
    # Without message costs a plan takes as long as its order.
    timeline = play(order_of(schedule), Costs(forward=0.5, backward=1.5))
    assert found["makespan"] == timeline.makespan
    assert found["bubble"] == timeline.bubble
    assert found["formula"] is None
    assert found["group_size"] == 5
    for rank, spans in zip(found["ranks"], timeline.spans, strict=True):
        computes = [dict(zip(found["compute_fields"], compute, strict=True)) for compute in rank["computes"]]
        assert computes == [
            {
                "kind": span.action.kind.value,
                "stage": span.action.stage,
                "microbatch": span.action.microbatch,
                "start": span.start,
                "end": span.end,
            }
            for span in spans
        ]
    assert [rank["peak_shares"] for rank in found["ranks"]] == [peak / 2 for peak in timeline.peak_activations]


def test_every_cost_reaches_the_clock(capsys: pytest.CaptureFixture[str]) -> None:
    assert record(capsys, *SIZES, "--forward", "2", "--backward", "5")["makespan"] == (8 + 3) * 7
    zero_bubble = ("--schedule", "zb_h1", "--microbatches", "1", "--pp", "1")
    costs = ("--forward", "1", "--backward-input", "10", "--backward-weight", "100")
    assert record(capsys, *zero_bubble, *costs)["makespan"] == 111
    one_by_one = ("--pp", "2", "--microbatches", "1")
    assert record(capsys, *one_by_one, "--message", "0.5")["makespan"] == 2 * 3 + 2 * 0.5
    # A message between chunks is as large as one between ranks' whole layers: three forward and three back.
    assert record(capsys, *one_by_one, "--vp", "2", "--message", "0.5")["makespan"] == 2 * 3 + 6 * 0.5


def test_the_report_has_bubble_formula_makespan_and_peaks(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, *SIZES, "--vp", "2")
    assert out.startswith("interleaved, 4 ranks of 2 chunks, 8 microbatches\n")
    assert "bubble    15.8% of the makespan, mean over the ranks; formula (p - 1)/(v m + p - 1) = 15.8%" in out
    assert "makespan  28.5, of which a rank computes 24" in out
    assert re.findall(r"^ +(\d) +15.8% +(\d+) +([\d.]+)$", out, re.MULTILINE) == [
        ("0", "11", "5.5"),
        ("1", "9", "4.5"),
        ("2", "7", "3.5"),
        ("3", "5", "2.5"),
    ]
    assert "no formula" in printed(capsys, *SIZES, "--vp", "2", "--message", "0.1")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--pp", "0", "--microbatches", "0"), ("pp (0) must be at least 1", "microbatches (0)")),
        (("--pp", "8", "--microbatches", "125001"), ("pp x vp x microbatches (1000008) must be at most 1,000,000",)),
        ((*SIZES, "--schedule", "zb_v", "--vp", "3"), ("chunks (3) must be 2", "zb_v")),
        ((*SIZES, "--schedule", "1f1b", "--vp", "2"), ("chunks (2) must be 1", "interleaved")),
        ((*SIZES, "--vp", "0"), ("chunks (0) must be at least 1",)),
        ((*SIZES, "--vp", "2", "--group-size", "3"), ("group_size (3) must be at least pp (4)",)),
        ((*SIZES, "--schedule", "dualpipe"), ("'dualpipe'", "gpipe, 1f1b, interleaved, zb_h1, zb_v, dualpipe_v")),
        ((*SIZES, "--forward", "0"), ("forward (0.0) must be above 0",)),
        ((*SIZES, "--message", "nan", "--backward", "-1"), ("message (nan)", "backward (-1.0)")),
        ((*SIZES, "--max-columns", "3"), ("--max-columns (3) must be at least 20",)),
        ((*SIZES, "--out", "file.gif"), ("--out (file.gif) must end in one of .svg, .png, .pdf", "use file.gif.svg")),
        ((*SIZES, "--out", "."), ("--out (.) must end in one of .svg, .png, .pdf", "use picture.svg")),
        ((*SIZES, "--forward", "1e308"), ("more than a number can hold",)),
        ((*SIZES, "--json", "--max-columns", "40"), ("--max-columns (40) is for the grid, and --json prints none",)),
        (
            (*SIZES, "--backward-input", "5", "--backward-weight", "9"),
            ("--backward-input (5) acts on nothing: 1f1b", "--backward-weight (9)"),
        ),
        ((*SIZES, "--schedule", "zb_h1", "--backward", "2"), ("--backward (2) acts on nothing: zb_h1",)),
        (("--pp", "1", "--microbatches", "4", "--message", "1"), ("--message (1) acts on nothing",)),
        ((*SIZES, "--out", "none/file.svg"), ("--out (none/file.svg)", "no directory")),
        ((*SIZES, "--out", "folder.svg"), ("--out (folder.svg) cannot be written", "directory")),
        ((*SIZES, "--out", "folder.png"), ("--out (folder.png) cannot be written", "directory")),
        (
            ("--pp", "-1", "--microbatches", "4", "--forward", "-2", "--out", "none/file.gif"),
            ("pp (-1)", "forward (-2.0)", "must end in", "no directory"),
        ),
    ],
)
def test_a_mistake_is_reported_in_one_line_with_all_others(
    options: tuple[str, ...], words: tuple[str, ...], empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("folder.svg", "folder.png"):
        (empty_folder / name).mkdir()
    if "--out" in options:
        pytest.importorskip("matplotlib")
    line = error_of(capsys, *options)
    for word in words:
        assert word in line


def test_a_picture_without_matplotlib_is_refused_before_anything_is_played(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def nothing_played(*_: Any) -> None:
        raise AssertionError("the schedule was played before the error")

    # What the import system takes for "there is none".
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr("lightning_megatron.cli.schedule.timeline_of", nothing_played)
    line = error_of(capsys, *SIZES, "--forward", "0", "--out", "file.svg")
    assert "lightning_megatron[plot]" in line and "forward (0.0) must be above 0" in line
    assert not Path("file.svg").exists()


def test_out_writes_a_picture_as_well_as_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert printed(capsys, *SIZES, "--out", "file.SVG") == printed(capsys, *SIZES)
    root = ElementTree.parse("file.SVG").getroot()
    texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"1f1b, 4 ranks, 8 microbatches: bubble 27.3%", "forward", "backward", "idle", "rank 3", "time"} <= {*texts}
    # Of each of four ranks a forward and a backward of every microbatch; 5 is at the axis too.
    assert texts.count("7") == 2 * 4 and texts.count("5") == 2 * 4 + 1


# ----------------------------------------------------------------------------------------------------------------------
# The pipeline page


def page() -> str:
    return (ROOT / "docs/pipeline.md").read_text()


def test_the_page_shows_what_the_command_prints_and_draws(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    block = r"```bash\nlightning-megatron schedule (.*?) --out (\S+)\n```\n\n```text\n(.*?)```"
    shown = re.search(block, page(), re.DOTALL)
    assert shown is not None
    options, path, out = shown.groups()
    assert printed(capsys, *options.split(), "--out", "own.svg") == out
    assert Path("own.svg").read_text() == (ROOT / path).read_text()


@pytest.mark.parametrize(("name", "options"), [("interleaved", ("--vp", "2")), ("zb_v", ("--schedule", "zb_v"))])
def test_the_other_pictures_of_the_page_are_those_of_the_command(
    name: str, options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    printed(capsys, *SIZES, *options, "--out", "own.svg")
    assert f"](pictures/{name}.svg)" in page()
    assert Path("own.svg").read_text() == (ROOT / f"docs/pictures/{name}.svg").read_text()
