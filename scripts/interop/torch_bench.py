#!/usr/bin/env python3
"""Trains the model of a mantissa configuration with mantissa and with PyTorch, in turn, from the same weights on the same batches, and compares.

    .venv-interop/bin/python scripts/interop/torch_bench.py --mantissa build/release/bin/mantissa --config configs/quickstart.json --steps 20

Prints one JSON object per step and, last, a summary: milliseconds per step (medians), ours over theirs, the largest relative difference of
the losses, and the largest difference of a weight at the end; of a mixture of experts also that of auxiliary losses, in how many layers and
steps loads differ, and by how much the logit (with expert biases: the biased score) of the last expert chosen exceeded the next, at the least.
The learning rate of each step is the one mantissa logs. Exit 1 if --weight-tolerance is exceeded, or --loss-tolerance, by an auxiliary loss,
too, and then also for other loads. Exit 3 if a margin was smaller than --margin: rounding may choose others there, so nothing can be
concluded, and another training.seed has to be tried.
"""
import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from mantissa_files import Checkpoint, TrainingBatches
from torch_gpt import Gpt, TaughtGpt, Trainer
from torch_moe import MoeGpt, RoutingComparison

UNTIMED_STEPS = 2  # the first ones allocate
EXIT_DIFFERENT, EXIT_UNDECIDED = 1, 3


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mantissa", required=True, help="the program")
    parser.add_argument("--config", required=True, help="run configuration; one training file: text, nanoGPT or llm.c ids")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as for mantissa train")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=2, help="times each of the two trains")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="of both")
    parser.add_argument("--experts", choices=["loop", "grouped"], default="loop", help="in PyTorch: one after the other, or by its grouped product")
    parser.add_argument("--loss-tolerance", type=float, help="largest relative difference of the losses")
    parser.add_argument("--weight-tolerance", type=float, help="largest difference of a weight at the end")
    parser.add_argument("--start-lr", type=float, default=3e-2, help="of the steps before those that are compared; with experts large ones collapse the routers, for speed take 1e-3")
    parser.add_argument("--teacher-share", type=float, help="learn from a teacher of one layer and twice the width, by this share of the loss")
    parser.add_argument("--teacher-temperature", type=float, default=1.0)
    parser.add_argument("--margin", type=float, default=0.0, help="of routing that --loss-tolerance asks for")
    args = parser.parse_args()
    if args.steps <= UNTIMED_STEPS:
        parser.error(f"--steps must be more than {UNTIMED_STEPS}")
    return args


def train(args, folder, *settings):
    """Runs mantissa; returns its step records and its checkpoint."""
    common = [f"logging.dir={folder}", f"training.device={args.device}", f"training.threads={args.threads}", f"precision.dtype={args.dtype}", f"training.steps={args.steps}"]
    quiet = ["eval.interval=0", "eval.iters=1", "eval.samples=null", "checkpoint.interval=0", "logging.interval=1", "logging.console=off", "logging.tensorboard=false"]
    command = [args.mantissa, "train", args.config]
    for setting in [*args.set, *common, *quiet, *settings]:
        command += ["--set", setting]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode != 0:
        sys.exit(f"{' '.join(command)}\nexit {run.returncode}\n{run.stderr}")
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    newest = (folder / "checkpoints/latest").read_text().split()[0]
    return [r for r in records if r["type"] == "step"], folder / "checkpoints" / newest


def initial_checkpoint(args, folder):
    # Some large steps come first: at the start norm weights are 1 and biases 0, which would hide where they are applied.
    steps = ["training.steps=10", f"optimizer.lr={args.start_lr}", "schedule.type=constant", "schedule.warmup_steps=0"]
    return Checkpoint(train(args, folder, *steps)[1])


def teacher_checkpoint(args, folder, width):
    """A teacher whose shape and seed are its own."""
    sets = ["model.num_layers=1", f"model.hidden_size={width}", "training.seed=99", "training.steps=10", "schedule.warmup_steps=0"]
    return Checkpoint(train(args, folder, *sets)[1])


def model_of(start, args, teacher):
    config, vocab_size, experts = start.config["model"], start.vocab_size(), args.experts
    if teacher:
        return TaughtGpt(config, vocab_size, Gpt(teacher.config["model"], vocab_size), teacher.masters(), args.teacher_share, args.teacher_temperature)
    return MoeGpt(config, vocab_size, start.buffers(), experts) if config["moe"] else Gpt(config, vocab_size)


def report(who, step, loss, milliseconds, times):
    if step >= UNTIMED_STEPS:
        times.append(milliseconds)
    print(json.dumps({"who": who, "step": step + 1, "loss": loss, "ms": round(milliseconds, 2)}), flush=True)


def larger(a, b):
    """A difference that is no number is the largest."""
    return max(a, b) if math.isfinite(b) else math.inf


def train_in_turn(args, work):
    """The checkpoint both start from, milliseconds of both, and how far their losses and their routing are apart."""
    ours, theirs, worst, apart = [], [], 0.0, 0.0
    start = initial_checkpoint(args, work / "init")
    weights, batches = start.masters(), TrainingBatches(start)
    routing = RoutingComparison() if start.config["model"]["moe"] else None
    teacher = teacher_checkpoint(args, work / "teacher", 2 * start.config["model"]["hidden_size"]) if args.teacher_share else None
    taught = [f"training.teacher={teacher.folder}", f"training.teacher_weight={args.teacher_share}", f"training.teacher_temperature={args.teacher_temperature}"] if teacher else []
    for number in range(args.rounds):
        steps, saved = train(args, work / f"round-{number}", f"checkpoint.init_from={start.folder}", *taught)
        for step, record in enumerate(steps):
            report("mantissa", step, record["loss"], record["dt_ms"], ours)
        trainer = Trainer(model_of(start, args, teacher), weights, start.config, args.dtype == "bf16")
        for step, record in enumerate(steps):
            loss, milliseconds = trainer.step(batches.step(step), record["lr"])
            report("torch", step, loss, milliseconds, theirs)
            worst = larger(worst, abs(record["loss"] - loss) / abs(loss))
            if routing:
                routing.add(record["moe"], *trainer.model.take_statistics())
        for name, master in Checkpoint(saved).masters().items():
            apart = larger(apart, float(abs(trainer.masters[name].detach().cpu().numpy().reshape(master.shape) - master).max()))
    return start, ours, theirs, worst, apart, routing


def verdict(args, worst, routing):
    if routing and routing.margin < args.margin:
        return EXIT_UNDECIDED
    agrees = worst <= args.loss_tolerance and (routing is None or routing.agrees(args.loss_tolerance))
    return 0 if agrees else EXIT_DIFFERENT


def main():
    args = arguments()
    torch.set_num_threads(args.threads)
    torch.set_default_device(args.device)
    with tempfile.TemporaryDirectory(prefix="torch-bench-") as work:
        start, ours, theirs, worst, apart, routing = train_in_turn(args, Path(work))
    mantissa_ms, torch_ms = statistics.median(ours), statistics.median(theirs)
    training = start.config["training"]
    print(json.dumps({"summary": args.config, "dtype": args.dtype, "device": args.device, "threads": args.threads, "tokens_per_step": training["global_batch_size"] * training["seq_len"],
                      "steps": args.steps, "rounds": args.rounds, "mantissa_ms": round(mantissa_ms, 2), "torch_ms": round(torch_ms, 2),
                      "ours_over_theirs": round(mantissa_ms / torch_ms, 3), "largest_relative_loss_difference": worst, "largest_weight_difference": apart,
                      **(routing.summary() if routing else {}), "torch": torch.__version__}))
    if args.weight_tolerance is not None and apart > args.weight_tolerance:
        sys.exit(EXIT_DIFFERENT)
    if args.loss_tolerance is not None:
        sys.exit(verdict(args, worst, routing))


if __name__ == "__main__":
    main()
