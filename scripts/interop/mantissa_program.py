"""Runs mantissa as a user would, and reads its output."""
import json
import struct
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from mantissa_files import Checkpoint, TrainingBatches


class Failed(Exception):
    """A command of mantissa that did not end as it should have, or a comparison that does not hold."""


def run_cases(label, cases):
    """Runs each (name, check), check(work) in a folder of its own, and prints a line with its result or its failure. Returns true if one
    failed."""
    failed = False
    for name, check in cases:
        with tempfile.TemporaryDirectory(prefix="mantissa-case-") as work:
            try:
                outcome = check(Path(work))
            except Failed as failure:
                outcome, failed = f"FAILED: {failure}", True
        print(f"{label} | {name} | {outcome}", flush=True)
    return failed


def table(rows, columns, cell):
    """Markdown with cell(row, column) for each."""
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    return "\n".join(lines + [f"| {row} | " + " | ".join(cell(row, column) for column in columns) + " |" for row in rows])


def first_step(checkpoint):
    """Gradients and tokens of the only step of a run, as one_step() has them."""
    moments = {name.removeprefix("m."): checkpoint.read(name) for name in checkpoint.tensors if name.startswith("m.")}
    return {name: moment / 0.5 for name, moment in moments.items()}, TrainingBatches(checkpoint).step(0)


class Mantissa:
    def __init__(self, binary, work):
        self.binary, self.work = binary, Path(work)

    def run(self, *arguments, exit_code=0):
        """The output of a command, of both streams."""
        command = [self.binary, *map(str, arguments)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode != exit_code:
            shown = " ".join(command[1:]).replace(str(self.work), "")
            raise Failed(f"mantissa {shown}: exit {done.returncode}, not {exit_code}: {done.stdout[-1500:].strip()}")
        return done.stdout

    def token_ids(self, tokenizer, texts):
        """The ids that `mantissa tokenize` gives each text."""
        file, out = self.work / "texts.jsonl", self.work / "ids"
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        for old in self.work.glob("ids.*"):
            old.unlink()
        self.run("tokenize", file, "--tokenizer", tokenizer, "--output", out)
        raw = Path(f"{out}.idx").read_bytes()
        width, count = {8: 2, 4: 4}[raw[17]], struct.unpack_from("<Q", raw, 18)[0]
        lengths = np.frombuffer(raw, "<i4", count, 34)
        ids = np.fromfile(f"{out}.bin", f"<u{width}")
        return [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])]

    def log_probabilities(self, folder, prompts, *options):
        """Log-probabilities, one array for each list of token ids: of every token after the first."""
        out = self.work / "logprobs.jsonl"
        out.unlink(missing_ok=True)
        ids = [argument for tokens in prompts for argument in ("--prompt-ids", ",".join(map(str, tokens)))]
        self.run("eval", folder, *ids, "--logprobs", out, *options)
        records = [json.loads(line) for line in out.read_text().splitlines()]
        if [record["tokens"] for record in records] != prompts or any(record["logprobs"][0] is not None for record in records):
            raise Failed("eval --logprobs tells other tokens than it was asked for")
        return [np.array(record["logprobs"][1:], np.float64) for record in records]

    def likeliest(self, folder, tokens, count, *options):
        """The tokens with which generate goes on after those given; fewer at an end token."""
        ids = ",".join(map(str, tokens))
        told = self.run("generate", folder, "--prompt-ids", ids, "--max-new-tokens", count, "--temperature", 0, *options)
        found = [int(word) for word in told.split()]
        if found[: len(tokens)] != tokens:
            raise Failed(f"generate goes on from other tokens than it was given: {told[-400:]}")
        return found[len(tokens) :]

    def trained(self, name, tokens, config):
        """The checkpoint after training on a list of token ids."""
        data, run = self.work / f"{name}.bin", self.work / name
        np.array(tokens, np.uint16).tofile(data)
        whole = {"data": {"path": str(data), "dtype": "u16", "valid_fraction": 0.1}, "eval": {"interval": 0, "iters": 1}, "logging": {"dir": str(run)}, **config}
        (self.work / f"{name}.json").write_text(json.dumps(whole))
        self.run("train", self.work / f"{name}.json")
        return Checkpoint(run / "checkpoints" / (run / "checkpoints/latest").read_text().split()[0])

    def one_step(self, start, vocab_size, seed, checkpoint=False):
        """Gradients of the first step from a model, by mantissa's names, and the tokens [B, T + 1] of that step; or its checkpoint."""
        tokens = np.random.default_rng(seed).integers(0, vocab_size, 500).tolist()
        after = self.trained(f"step-{seed}-from-{Path(start).name}", tokens, {
            "checkpoint": {"init_from": str(start)},
            "training": {"steps": 1, "seq_len": 32, "micro_batch_size": 2, "grad_accum": 1, "threads": 1},
            "precision": {"dtype": "fp32", "recipe": "high"},
            "optimizer": {"lr": 1e-12, "beta1": 0.5, "weight_decay": 0.0, "grad_clip": 0.0},
            "schedule": {"type": "constant", "warmup_steps": 0}})
        return after if checkpoint else first_step(after)
