#!/usr/bin/env python3
"""Records the cost of building and testing in tests/times.txt.

    scripts/record_times.py BUILD      after a cold scripts/test.sh on a quiet machine; BUILD is its build folder

A line is "build PART SECONDS" or "test SUITE SECONDS", in seconds of one of the jobs that ran beside each other. The lines "lines PART COUNT" count
lines of sources, by which scripts/check.py sees that the times are of another tree. "reference" is how long the compiler took for a small source
of its own on that machine, so that totals of machines can be compared: check.py holds (build + test) / reference against "budget". The budget stays
what it is unless --budget renews it; the commit that raises it says so.

ctest starts long suites first by these times and makes several entries of the longest; scripts/test.sh tells by them what is left.
"""
import argparse
import collections
import re
import subprocess
import tempfile
import time
from pathlib import Path

from watch_tests import SHARD, entries

ROOT = Path(__file__).resolve().parent.parent
TIMES = ROOT / "tests/times.txt"
REFERENCE = "#include <map>\n#include <regex>\nint main(int n, char** words) { std::map<std::string, int> m; m[words[0]] = std::regex_match(words[n - 1], std::regex(\"a*b\")); }\n"
PARTS = {"product": ("include", "src", "tools"), "tests": ("tests", "scripts")}
ALLOWED_GROWTH = 1.02


def count_lines(paths):
    """Lines of sources by part of the tree."""
    counts = collections.Counter()
    for path in paths:
        part = next((part for part, tops in PARTS.items() if path.parts[0] in tops), None)
        if part and path.suffix in (".h", ".cpp", ".cu", ".py", ".sh"):
            counts[part] += (ROOT / path).read_bytes().count(b"\n")
    return counts


def build_part(output):
    if not output.endswith((".o", ".gch")):
        return "link"
    if "/cuda/" in output or output.startswith("cuda/"):
        return "cuda"
    if "simt_backend" in output or "simt_primitives" in output:
        return "executor"
    return "tests" if output.startswith("tests/") else "kernels" if "mantissa_backend.dir" in output else "product"


def build_seconds(log):
    """Seconds by part of the last build of each output, of which a command may have several."""
    outputs = {}
    for line in log.splitlines()[1:]:
        begin, end, _, output, command = line.split("\t")
        outputs[output] = (int(end) - int(begin), command)
    commands = {(milliseconds, command): output for output, (milliseconds, command) in outputs.items()}
    seconds = collections.Counter()
    for (milliseconds, _), output in commands.items():
        seconds[build_part(output)] += milliseconds / 1000
    return seconds


def reference_seconds():
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "reference.cpp"
        source.write_text(REFERENCE)
        tries = []
        for _ in range(3):
            begun = time.monotonic()
            subprocess.run(["c++", "-std=c++20", "-O2", "-c", source, "-o", Path(folder) / "reference.o"], check=True)
            tries.append(time.monotonic() - begun)
    return min(tries)


def cpu_name():
    text = Path("/proc/cpuinfo").read_text()
    found = {key: re.search(rf"^{key}\s*: (.*)$", text, re.M)[1] for key in ("model name", "cpu family", "model")}
    return f"{found['model name'].strip()}, family {found['cpu family']}, model {found['model']}"


def total(text, kinds=("build", "test")):
    return sum(float(seconds) for kind, seconds in re.findall(r"^(\w+) \S+ (\S+)$", text, re.M) if kind in kinds)


def value(text, name):
    found = re.search(rf"^{name} (\S+)$", text, re.M)
    return float(found[1]) if found else None


def check_times(text, counts, findings):
    """The recorded times are within the budget, and of about this tree."""
    used, budget = total(text) / value(text, "reference"), value(text, "budget")
    if used > budget * ALLOWED_GROWTH:
        findings.add("tests/times.txt", 1, f"building and testing cost {used:.0f} references, the budget is {budget:.0f}: make it less, or raise the budget (record_times.py --budget) and say in the commit why")
    for part, count in counts.items():
        if count > (recorded := float(re.search(rf"^lines {part} (\d+)$", text, re.M)[1])) * ALLOWED_GROWTH:
            findings.add("tests/times.txt", 1, f"{part} has {count} lines, {recorded:.0f} when the times were recorded: record them again (scripts/record_times.py) and say in the commit what they grew by")


def check_raised_budget(text, findings, root=ROOT):
    """The last commit that changed the budget says the word, if it raised it."""
    def git(*words):
        return subprocess.run(["git", "-C", root, *words], capture_output=True, text=True)
    commit = git("log", "-1", "-G^budget ", "--format=%H", "--", "tests/times.txt").stdout.strip()
    before = git("show", f"{commit}~1:tests/times.txt").stdout if commit else ""
    if before and value(text, "budget") > value(before, "budget") and "budget" not in git("log", "-1", "--format=%B", commit).stdout.lower():
        findings.add("tests/times.txt", 1, f"commit {commit[:9]} raised the budget of building and testing and does not say so")


def main():
    from check import project_files  # check imports this module

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=Path)
    parser.add_argument("--budget", action="store_true", help="make what is recorded the budget")
    args = parser.parse_args()

    tests = collections.Counter()
    for name, _, seconds in entries((args.build / "Testing/Temporary/LastTest.log").read_text(errors="replace")):
        tests[SHARD.sub("", name)] += seconds
    lines = [f"# What building and testing cost: scripts/record_times.py, on {cpu_name()}."]
    lines += [f"reference {reference_seconds():.2f}"]
    lines += [f"lines {part} {count}" for part, count in sorted(count_lines(project_files()).items())]
    lines += [f"build {part} {seconds:.0f}" for part, seconds in sorted(build_seconds((args.build / ".ninja_log").read_text()).items())]
    lines += [f"test {name} {seconds:.1f}" for name, seconds in sorted(tests.items(), key=lambda item: (-item[1], item[0]))]
    text = "\n".join(lines) + "\n"
    used = total(text) / value(text, "reference")
    budget = used if args.budget or not TIMES.exists() else value(TIMES.read_text(), "budget")
    TIMES.write_text(text.replace("\nlines", f"\nbudget {budget:.0f}\nlines", 1))
    print(f"record_times: building {total(text, ('build',)):.0f} s, testing {total(text, ('test',)):.0f} s, {used:.0f} references; the budget is {budget:.0f}")


if __name__ == "__main__":
    main()
