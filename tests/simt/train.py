#!/usr/bin/env python3
"""Trains two steps of a small model on the CPU and on the CUDA kernels of the executor, with two seeds: train.py MANTISSA_SIMT FOLDER.

The losses of both seeds are equal, those of the CPU near. Two ranks are refused the one device, before there is a run folder.
"""
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

SETS = ["data.train=[]", "data.valid=[]", "data.path=README.md", "eval.interval=0", "eval.samples=null", "checkpoint.interval=0",
        "precision.dtype=bf16", "precision.recipe=mxfp8", "model.hidden_size=64", "model.num_layers=2",
        "model.num_attention_heads=2", "model.intermediate_size=96", "training.seq_len=24", "training.micro_batch_size=2", "training.steps=2", "logging.interval=1"]


def training(run, device, more=()):
    sets = SETS + [f"training.device={device}", f"logging.dir={run}", *more]
    return ["train", "configs/quickstart.json"] + [word for one in sets for word in ("--set", one)]


def losses(mantissa, folder, device, seed):
    run = folder / f"{device}{seed}"
    command = [mantissa, *training(run, device)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"MANTISSA_SIMT_SEED": str(seed)})
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [event["loss"] for event in events if event["type"] == "step"]


def check_two_ranks(mantissa, folder):
    run = folder / "two"
    command = [mantissa, "launch", "--nproc-per-node", "2", "--", *training(run, "cuda", ["parallel.data=2"])]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 3 or "2 ranks on this host for the 1 GPU that they see" not in result.stderr or run.exists():
        sys.exit(f"two ranks end with {result.returncode}:\n{result.stdout}{result.stderr}")


def main():
    mantissa, folder = sys.argv[1], Path(sys.argv[2])
    shutil.rmtree(folder, ignore_errors=True)
    cpu, first, second = (losses(mantissa, folder, device, seed) for device, seed in (("cpu", 1), ("cuda", 1), ("cuda", 2)))
    print(f"cpu {cpu}\ncuda {first}")
    if len(cpu) != 2 or first != second:
        sys.exit(f"{len(cpu)} steps; another seed gives {second}")
    check_two_ranks(mantissa, folder)
    for step, (a, b) in enumerate(zip(cpu, first, strict=True), 1):
        if not abs(a - b) <= 5e-3 * abs(a):
            sys.exit(f"step {step}: {b} where the CPU has {a}")


if __name__ == "__main__":
    main()
