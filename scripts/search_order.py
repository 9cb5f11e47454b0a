#!/usr/bin/env python3
"""Measures the layouts that `mantissa explain --search` ranks, and compares both orders.

    scripts/search_order.py [--mantissa PROGRAM] CONFIG --world N [--rounds 5] [--seconds 10] [--set KEY=VALUE]...

The rates are measured first: that of a rank's whole steps in a layout of data ranks alone, by `bench train`, and that of its link, by `bench comm`. Then
`bench train` measures each layout once a round. Prints the predicted and the median step of each layout, and every pair whose predictions differ by 15 % or
more. Exit code 1: the measured order of such a pair is another one.
"""
import argparse
import itertools
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

APART = 1.15  # predictions that are closer to each other are in no order (docs/ranks.md)


def sets(pairs):
    return [word for pair in pairs for word in ("--set", pair)]


class Program:
    def __init__(self, path, ranks, config, settings):
        self.launch = [path, "launch", "--nproc-per-node", str(ranks), "--", "bench"]
        self.explain = [path, "explain", config, "--world", str(ranks), *sets(settings)]
        self.train = ["train", config, *sets(settings)]

    def step(self, layout, seconds):
        """(seconds of a step, FLOP/s of a rank) in a layout."""
        with tempfile.TemporaryDirectory() as folder:
            lines = Path(folder, "bench.jsonl")
            printed = subprocess.run([*self.launch, *self.train, *sets(layout), "--time-budget", str(seconds), "--json", lines], capture_output=True, text=True, check=False)
            if printed.returncode:
                sys.exit(f"search_order: bench train with {layout} ends with {printed.returncode}:\n{printed.stdout}{printed.stderr}")
            return json.loads(lines.read_text())["us"]["med"] / 1e6, float(re.search(r"([\d.e+]+) FLOP/s of each rank", printed.stdout).group(1))

    def link(self):
        printed = subprocess.run([*self.launch, "comm"], capture_output=True, text=True, check=True).stdout
        return float(re.search(r"link ([\d.e+]+) bytes/s", printed).group(1))

    def layouts(self, flops, link):
        printed = subprocess.run([*self.explain, "--search", "--memory", "1P", "--json", "--flops", str(flops), "--link", str(link)], capture_output=True, text=True, check=False)
        if printed.returncode:
            sys.exit(f"search_order: {printed.stderr}")
        return json.loads(printed.stdout)["layouts"]


def settings_of(layout):
    return [f"parallel.tensor={layout['tensor']}", f"parallel.expert={layout['expert']}", f"parallel.sequence_parallel={str(layout['sequence_parallel']).lower()}",
            f"training.recompute={layout['recompute']}", f"training.micro_batch_size={layout['micro_batch_size']}", f"training.grad_accum={layout['grad_accum']}",
            "training.global_batch_size=null"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--mantissa", default="build/release/bin/mantissa")
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=10, help="of each measurement")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    given = parser.parse_args()
    program = Program(given.mantissa, given.world, given.config, given.set)

    data_ranks = next(layout for layout in program.layouts(1e12, 1e9) if layout["tensor"] == layout["expert"] == 1)
    flops, link = program.step(settings_of(data_ranks), given.seconds)[1], program.link()
    layouts = program.layouts(flops, link)
    print(f"{given.world} ranks, {flops:.3g} FLOP/s and {link:.3g} bytes/s of each")
    measured = [[] for _ in layouts]
    for _ in range(given.rounds):
        for steps, layout in zip(measured, layouts):
            steps.append(program.step(settings_of(layout), given.seconds)[0])
    rows = [(f"data {one['data']}, tensor {one['tensor']}, expert {one['expert']}{', sequence parallel' if one['sequence_parallel'] else ''}", one["step"], statistics.median(steps))
            for one, steps in zip(layouts, measured)]
    for (name, predicted, median), steps in zip(rows, measured):
        print(f"{name:50} predicted {predicted * 1e3:8.1f} ms, measured {median * 1e3:8.1f} [{min(steps) * 1e3:.1f} .. {max(steps) * 1e3:.1f}]")
    wrong = 0
    for fast, slow in itertools.combinations(rows, 2):  # the search sorts by prediction
        if slow[1] >= APART * fast[1]:
            agrees = fast[2] < slow[2]
            wrong += not agrees
            print(f"{'agrees' if agrees else 'WRONG '}: {fast[0]} before {slow[0]}: predicted {slow[1] / fast[1]:.2f}, measured {slow[2] / fast[2]:.2f}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
