"""`python tests/suite_times.py AFTER.xml [BEFORE.xml]`: test-seconds of each folder of tests, for docs/suite.md.

The files are pytest's own reports: `make test PYTEST_ARGS="--durations=0 --junitxml=AFTER.xml"`.
"""

import sys
from collections import Counter
from xml.etree import ElementTree


def seconds_by_folder(report: str) -> tuple[Counter[str], Counter[str]]:
    """Seconds, set-up and teardown among them, and number of tests of each folder."""
    seconds: Counter[str] = Counter()
    tests: Counter[str] = Counter()
    for case in ElementTree.parse(report).iter("testcase"):
        # tests.trainer.resume.test_layouts, or with the class of a test behind it.
        parts = case.attrib["classname"].split(".")
        folder = parts[1] if len(parts) > 2 else "tests"
        seconds[folder] += float(case.attrib["time"])
        tests[folder] += 1
    return seconds, tests


def table(reports: list[str]) -> str:
    """A row for each folder, the slowest of the first report first, with seconds and tests of each report."""
    found = [seconds_by_folder(report) for report in reports]
    folders = sorted({name for seconds, _ in found for name in seconds}, key=lambda name: -found[0][0][name])
    lines = ["| folder |" + " seconds | tests |" * len(found), "|---|" + "--:|--:|" * len(found)]
    for name in [*folders, "all"]:
        cells = [
            (sum(seconds.values()), sum(tests.values())) if name == "all" else (seconds[name], tests[name])
            for seconds, tests in found
        ]
        lines.append(f"| {name} |" + "".join(f" {seconds:.0f} | {num:,} |" for seconds, num in cells))
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(sys.argv[1:]))
