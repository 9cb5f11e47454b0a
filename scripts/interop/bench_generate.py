#!/usr/bin/env python3
"""Measures generation with mantissa and with transformers, in turn, in models of one shape with random weights.

    .venv-interop/bin/python scripts/interop/bench_generate.py --mantissa build/release/bin/mantissa --config configs/gpt2-124m.json --set precision.recipe=mxfp8

Both continue prompts of one token greedily. Prints what `mantissa bench generate` says, and last a JSON object: milliseconds per token (medians
of all rounds) and ours over theirs, for each dtype in which transformers computes.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import transformers

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mantissa", required=True, help="the program")
    parser.add_argument("--config", required=True, help="one of " + ", ".join(SHAPES))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as for mantissa bench generate")
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=["bf16", "fp32"], help="of transformers")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--time-budget", type=float, default=20, help="seconds of mantissa in each round")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    if Path(args.config).name not in SHAPES:
        parser.error(f"--config {args.config}: is none of {', '.join(SHAPES)}")
    return args


def gpt2():
    return transformers.GPT2Config()  # the 124M one


def qwen3():
    return transformers.Qwen3Config(vocab_size=151936, hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128,
                                    intermediate_size=3072, max_position_embeddings=40960, tie_word_embeddings=True)


SHAPES = {"gpt2-124m.json": gpt2, "qwen3-0.6b.json": qwen3}


def ours(args):
    """Milliseconds per token of a step of the batch."""
    with tempfile.TemporaryDirectory(prefix="bench-generate-") as work:
        told = Path(work) / "bench.jsonl"
        command = [args.mantissa, "bench", "generate", args.config, "--batch", str(args.batch), "--new-tokens", str(args.new_tokens), "--json", str(told),
                   "--time-budget", str(args.time_budget)]
        for setting in [f"training.threads={args.threads}", *args.set]:
            command += ["--set", setting]
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode != 0:
            sys.exit(f"{' '.join(command)}\nexit {run.returncode}\n{run.stderr}")
        print(run.stdout, end="", flush=True)
        return json.loads(told.read_text().splitlines()[0])["us"]["med"] / 1e3 / args.new_tokens


def theirs(model, args):
    ids = torch.arange(args.batch).view(-1, 1)
    begin = time.perf_counter()
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=args.new_tokens, max_new_tokens=args.new_tokens, pad_token_id=0)
    seconds = time.perf_counter() - begin
    if out.shape != (args.batch, 1 + args.new_tokens):
        sys.exit(f"transformers made {tuple(out.shape)} ids of prompts of one token")
    return seconds * 1e3 / args.new_tokens


def main():
    args = arguments()
    torch.set_num_threads(args.threads)
    torch.manual_seed(1)
    models = {}
    for dtype in args.dtypes:
        config = SHAPES[Path(args.config).name]()
        models[dtype] = transformers.AutoModelForCausalLM.from_config(config).to(DTYPES[dtype]).eval()
        theirs(models[dtype], args)
    own, other = [], {dtype: [] for dtype in models}
    for _ in range(args.rounds):
        own.append(ours(args))
        for dtype, model in models.items():
            other[dtype] += [theirs(model, args) for _ in range(3)]
    mine = statistics.median(own)
    print(json.dumps({"summary": args.config, "set": args.set, "batch": args.batch, "threads": args.threads, "mantissa_ms": round(mine, 2),
                      **{f"transformers_{dtype}_ms": round(statistics.median(times), 2) for dtype, times in other.items()},
                      **{f"ours_over_{dtype}": round(mine / statistics.median(times), 3) for dtype, times in other.items()},
                      "transformers": transformers.__version__, "torch": torch.__version__}))


if __name__ == "__main__":
    main()
