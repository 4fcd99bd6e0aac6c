"""All tests with two workers: how long they take, and the slowest 20.

python benchmarks/bench_tests.py
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from _common import print_row

OPTIONS = ("-q", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")
SLOWEST = 20


def main() -> int:
    with tempfile.TemporaryDirectory() as made:
        report = Path(made) / "report.xml"
        command = (sys.executable, "-m", "pytest", *OPTIONS, f"--junitxml={report}")
        ended = subprocess.run(command, check=False).returncode
        (suite,) = ElementTree.parse(report).getroot().iter("testsuite")
    failed = sum(int(suite.attrib[name]) for name in ("failures", "errors"))
    passed = int(suite.attrib["tests"]) - failed - int(suite.attrib["skipped"])
    note = f"{passed} passed, {failed} failed, {suite.attrib['skipped']} skipped"
    print_row({"what": "passed", "figure": suite.attrib["time"], "note": note})
    cases = sorted(suite.iter("testcase"), key=lambda case: -float(case.attrib["time"]))
    for case in cases[:SLOWEST]:
        name = f"{case.attrib['classname']}::{case.attrib['name']}"
        print_row({"what": name, "figure": case.attrib["time"]})
    return ended


if __name__ == "__main__":
    sys.exit(main())
