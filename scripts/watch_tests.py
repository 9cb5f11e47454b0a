#!/usr/bin/env python3
"""Shows how far ctest has come, and sums up its results.

    ctest … | scripts/watch_tests.py BUILD LIST      prints what failed and, now and then, what is left; then a summary of a few lines

BUILD is the build folder, whose log of the tests has the cases of each entry, LIST what ctest lists of the same entries (--show-only). What is left
is estimated by tests/times.txt.
"""
import collections
import re
import sys
import time
from pathlib import Path

TIMES = Path(__file__).resolve().parent.parent / "tests/times.txt"
LISTED = re.compile(r"^ *Test +#\d+: (\S+)", re.M)
RESULT = re.compile(r"^ *(\d+)/(\d+) Test +#\d+: (.*?) \.*(?: +|[\w ]*\*\*\*)(Passed|Skipped|Failed|Timeout|Exception|Not Run)")
INSTANT = 0.1  # seconds of an entry that the file does not name
SHARD = re.compile(r"\.(\d+)of(\d+)$")


def known_seconds(text):
    """Seconds of each entry that was ever recorded."""
    return {name: float(seconds) for name, seconds in re.findall(r"^test (\S+) (\S+)", text, re.M)}


def seconds_of(entry, known):
    shard = SHARD.search(entry)
    return known.get(SHARD.sub("", entry), INSTANT) / (int(shard[2]) if shard else 1)


class Progress:
    """Prints a line for each twentieth of the seconds that the entries are expected to take."""

    def __init__(self, known, listed):
        self.known, self.begun, self.done, self.printed = known, time.monotonic(), 0.0, 0
        self.all = sum(seconds_of(entry, known) for entry in listed)

    def take(self, entry, number, count):
        self.done += seconds_of(entry, self.known)
        share = max(min(self.done / max(self.all, self.done), 0.99), number / count * 0.05)
        if int(share * 20) > self.printed and number < count:
            self.printed = int(share * 20)
            left = (time.monotonic() - self.begun) * (1 - share) / share / 60
            print(f"test: {share:.0%}, {number} of {count} entries, about {left:.0f} minutes left", flush=True)


def watch(lines, known, listed):
    """Passes on all lines but those of entries that begin, pass or are skipped. Returns how each entry ended."""
    progress, failing, endings = Progress(known, listed), False, {}
    for line in lines:
        result = RESULT.match(line)
        if result:
            progress.take(result[3], int(result[1]), int(result[2]))
            endings[result[3]] = result[4]
            failing = result[4] not in ("Passed", "Skipped")
        elif re.match(r"^ +Start +\d+: ", line):
            continue
        if failing or not result:
            print(line, end="", flush=True)
    return endings


def entries(log):
    """(name, output, seconds) of each entry in a log of ctest."""
    pattern = r'^\d+/\d+ Testing: (.*)\n(?:(?!\d+/\d+ Testing: ).*\n)*?Output:\n-+\n((?:.*\n)*?)<end of output>\nTest time = +([\d.]+) sec'
    return [(m[1], m[2], float(m[3])) for m in re.finditer(pattern, log, re.M)]


def count_cases(all_entries, endings):
    """Numbers of cases that passed, failed, were skipped and did not run, as those behind a crash, and how many were skipped for each reason. An entry
    without output, as one whose executable is absent, failed."""
    counts, reasons = collections.Counter(failed=len(endings.keys() - {name for name, _, _ in all_entries})), collections.Counter()
    for name, output, _ in all_entries:
        ran = re.search(r"^\[=+\] Running (\d+) tests? from", output, re.M)
        skipped = len(re.findall(r"^\[  SKIPPED \] \S+ \(\d+ ms\)", output, re.M))
        failed = len(re.findall(r"^\[  FAILED  \] .* \(\d+ ms\)", output, re.M))
        found = re.findall(r": Skipped\n(.*)", output) if ran else []
        if not ran:
            skipped = int(endings.get(name) == "Skipped")
            found = (re.findall(r"^SKIPPED: (.*)", output, re.M) or [f"{name} does not say why"])[:skipped]
        failed = max(failed, int(endings.get(name) not in ("Passed", "Skipped")))
        passed = len(re.findall(r"^\[       OK \]", output, re.M)) if ran else int(not failed and not skipped)
        counts.update(passed=passed, failed=failed, skipped=skipped, unrun=max(int(ran[1]) - passed - failed - skipped, 0) if ran else 0)
        reasons.update(reason.strip() for reason in found)
    return counts, reasons


def summary(counts, reasons, count, minutes):
    lines = [f"test: {sum(counts.values())} cases in {count} entries of ctest, {minutes:.1f} minutes"]
    lines += [f"test: {counts['unrun']} did not run, because their process ended"] if counts["unrun"] else []
    lines += [f"test: {number} skipped: {reason}" for reason, number in reasons.most_common()]
    return lines + [f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped"]


def main():
    begun = time.time()
    for stream in (sys.stdin, sys.stdout):  # tests of hostile input may print any byte
        stream.reconfigure(errors="replace")
    endings = watch(sys.stdin, known_seconds(TIMES.read_text()), LISTED.findall(Path(sys.argv[2]).read_text()))
    log = Path(sys.argv[1]) / "Testing/Temporary/LastTest.log"
    if not log.exists() or log.stat().st_mtime < begun:
        return
    all_entries = entries(log.read_text(errors="replace"))
    print("\n".join(summary(*count_cases(all_entries, endings), len(endings), (time.time() - begun) / 60)))


if __name__ == "__main__":
    main()
