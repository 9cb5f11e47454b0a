#!/usr/bin/env python3
"""Sums up the runs of scripts/moe_quality.sh, as far as they came, and holds them against the goals.

    scripts/moe_quality.py build/moe_quality [--steps 1000]

The gap of a recipe is its validation loss over that of bf16 from the same seed, less 1: mean and twice the standard error over the seeds.
Balance is the largest load of an expert over the mean, of all choices of the last 100 steps; without auxiliary loss and biases it is
reported. The cosine is that of the gradients (first moments) of each parameter after one step. Exit 1 if a goal is missed or a recipe has
fewer than two seeds.
"""
import argparse
import json
import math
import statistics
import sys
from array import array
from pathlib import Path

GAP = {"mxfp8": 0.015, "mxfp4_qat": 0.03, "mxfp4_qat_mxfp8_act": 0.03}
COSINE = {"mxfp8": 0.99, "mxfp4_qat": 0.93, "mxfp4_qat_mxfp8_act": 0.93}
BALANCED, UNBALANCED = ("high", *GAP, "sigmoid-bias"), ("sigmoid-alone", "softmax-alone")
BALANCE, LAST = 1.5, 100


class Goals:
    def __init__(self):
        self.missed = 0

    def verdict(self, met):
        self.missed += not met
        return "met" if met else "MISSED"


def records(run, kind):
    found = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
    return [record for record in found if record["type"] == kind]


def finished(folder):
    """Runs by seed."""
    return {run.name: run for run in sorted(folder.glob("seed-*")) if (run / "finished").exists()}


def mean_and_error(values):
    return statistics.mean(values), 2 * statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf


def losses(folder):
    return {seed: records(run, "eval")[-1] for seed, run in finished(folder).items()}


def print_losses(folder, goals):
    base = losses(folder / "high")
    print(f"{'experts':<22}{'seeds':>6}{'targets':>9}{'loss':>9}{'2 SE':>8}{'gap %':>9}{'2 SE':>8}{'goal %':>8}")
    for recipe in ("high", *GAP):
        own = losses(folder / recipe)
        if not own:
            print(f"{recipe:<22}{0:>6}  {goals.verdict(False)}")
            continue
        loss, error = mean_and_error([r["loss"] for r in own.values()])
        line = f"{'bf16' if recipe == 'high' else recipe:<22}{len(own):>6}{next(iter(own.values()))['targets']:>9}{loss:>9.4f}{error:>8.4f}"
        pairs = [own[seed]["loss"] / base[seed]["loss"] - 1 for seed in own if seed in base] if recipe in GAP else []
        if pairs:
            gap, error = mean_and_error(pairs)
            line += f"{100 * gap:>9.3f}{100 * error:>8.3f}{100 * GAP[recipe]:>8.1f}  {goals.verdict(gap + error <= GAP[recipe])}"
        print(line)


def balance(run):
    """The balance by layer: over all choices of the last steps, and the mean over steps of that of each."""
    last = [record["moe"] for record in records(run, "step")[-LAST:]]
    out = {}
    for layers in zip(*last):
        load = [sum(of_expert) for of_expert in zip(*(layer["load"] for layer in layers))]
        out[layers[0]["layer"]] = max(load) * len(load) / sum(load), statistics.mean(layer["imbalance"] for layer in layers)
    return out


def print_balance(folder, goals):
    print(f"\nlargest over mean load of an expert, last {LAST} steps, worst seed (in brackets: of single steps, on average)")
    for name in (*BALANCED, *UNBALANCED):
        runs = [balance(run) for run in finished(folder / name).values()]
        if not runs:
            print(f"{name:<22} not trained  {goals.verdict(False)}")
        for layer in runs[0] if runs else ():
            (worst, _), steps = max(run[layer] for run in runs), max(run[layer][1] for run in runs)
            verdict = goals.verdict(worst <= BALANCE) if name in BALANCED else "reported"
            print(f"{name:<22} layer {layer}: {worst:.3f} ({steps:.3f})  {verdict}")


class FirstMoments:
    """Reads the newest checkpoint of a run; manifest.json and shards as src/checkpoint/checkpoint_manifest.h describes
    them."""

    def __init__(self, run):
        self.folder = run / "checkpoints" / (run / "checkpoints/latest").read_text().split()[0]
        text = (self.folder / "manifest.json").read_text()
        self.manifest = json.loads(text[: text.rstrip("\n").rindex("\n")])  # the last line is the hash
        self.tensors = {t["name"].removeprefix("m."): t for t in self.manifest["tensors"] if t["name"].startswith("m.")}

    def read(self, name):
        out = array("f")
        for piece in self.tensors[name]["pieces"]:
            with open(self.folder / self.manifest["shards"][piece["shard"]]["file"], "rb") as file:
                file.seek(piece["offset"])
                out.fromfile(file, math.prod(piece["size"]))
        return out


def cosine(a, b):
    dot, aa, bb = (math.fsum(x * y for x, y in zip(*pair)) for pair in ((a, b), (a, a), (b, b)))
    return dot / math.sqrt(aa * bb)


def print_cosines(folder, goals):
    print("\ncosine of the gradient of the first step to that in bf16, least first")
    base = FirstMoments(folder / "high")
    for recipe, goal in COSINE.items():
        own = FirstMoments(folder / recipe)
        found = sorted((cosine(own.read(name), base.read(name)), name) for name in base.tensors)
        worst = ", ".join(f"{name} {value:.4f}" for value, name in found[:5])
        print(f"{recipe:<22} goal {goal}  {goals.verdict(found[0][0] >= goal)}: {worst}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=1000)
    args = parser.parse_args()
    goals, runs = Goals(), args.folder / f"{args.steps}-steps"
    print_losses(runs, goals)
    print_balance(runs, goals)
    print_cosines(args.folder / "first-step", goals)
    sys.exit(goals.missed > 0)


if __name__ == "__main__":
    main()
