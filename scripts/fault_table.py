#!/usr/bin/env python3
"""Writes the figures of soaks into docs/reliability.md:   scripts/fault_table.py [RESULT.json...]

Without arguments it takes the results that scripts/soak.sh left in build/soak/.
"""
import collections
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/reliability.md"
HEADING = "## Figures\n"
COLUMNS = 4  # faults side by side


def missing_tests(page):
    """Names of the column of tests that no test has, neither as its suite nor as an entry of ctest."""
    sources = "".join(path.read_text() for pattern in ("tests/*/*.cpp", "tests/*.h", "tests/CMakeLists.txt", "tests/*.cmake") for path in sorted(ROOT.glob(pattern)))
    suites = set(re.findall(r"TEST(?:_F|_P)?\((\w+), *\w+\)", sources))
    cases = {f"{suite}.{case}" for suite, case in re.findall(r"TEST(?:_F|_P)?\((\w+), *(\w+)\)", sources)}
    named = [name for row in page.splitlines() if row.startswith("| ") for name in re.findall(r"`([\w.]+)`", row.rsplit("|", 2)[1])]
    return [name for name in named if name not in cases and name not in suites and not re.search(rf"\b{name}\b", sources)]


def figures(results):
    trials, pauses, totals = collections.Counter(), collections.Counter(), collections.Counter()
    for result in results:
        trials.update(result["trials"])
        for name, pause in result["longest_pause_s"].items():
            pauses[name] = max(pauses[name], pause)
        for name, count in result["totals"].items():
            totals[name] = max(totals[name], count) if name.startswith("most ") else totals[name] + count
    codes = sum((collections.Counter(result["exit_codes"]) for result in results), collections.Counter())
    hours = sum(result["hours"] for result in results)
    lost = sum(result["finding"].startswith("a save was lost") for result in results)
    findings = [result["finding"] for result in results if result["finding"]]
    lines = [f"Of the latest soaks, {', '.join(str(result['layout']) + ' ' + str(result['seed']) for result in results)}: {hours:.2f} hours, {sum(trials.values())} faults, {totals['starts']} starts, {totals['starts by hand']} of them by hand, "
             f"{totals['failed attempts']} failed attempts. {totals['rounds']} rounds",
             f"were finished and had the bits of the quiet run. Saves lost: {lost}. Findings: {'; '.join(findings) or 'none'}. Exit codes of attempts and launchers: "
             + ", ".join(f"{code}: {count}" for code, count in sorted(codes.items(), key=lambda one: int(one[0]))) + ".", ""]
    cells = [f"{name} | {trials[name]} | {pauses[name]:.1f}" for name in sorted(trials)]
    rows = -(-len(cells) // COLUMNS)
    cells += [" | | "] * (COLUMNS * rows - len(cells))
    lines += [f"|{' fault | trials | pause, s |' * COLUMNS}", f"|{'---|' * 3 * COLUMNS}"]
    lines += [f"| {' | '.join(cells[row::rows])} |" for row in range(rows)]
    return "\n".join(lines) + "\n"


def main():
    page = PAGE.read_text()
    files = [Path(name) for name in sys.argv[1:]] or sorted((ROOT / "build/soak").glob("*.json"))
    if not files:
        sys.exit("fault_table: no results; run scripts/soak.sh")
    results = [json.loads(path.read_text()) for path in files]
    PAGE.write_text(page.split(HEADING)[0] + HEADING + "\n" + figures(results))
    for result in results:
        print(f"{result['layout']} {result['seed']}, {result['hours']:.2f} h: {result['finding'] or 'no finding'}")


if __name__ == "__main__":
    main()
