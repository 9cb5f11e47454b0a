#!/usr/bin/env python3
"""Lists where a step of training goes on a GPU, kernel by kernel: the slice `profile` of scripts/gpu.sh.

  scripts/gpu_profile.py HOME OUT    HOME has the program `mantissa`; files of Nsight Compute go to OUT

Nsight Compute (ncu) times every kernel of one step of four runs, and says of the slowest kinds of row kernels why their warps wait. Where
Python has torch, rates of what libraries offer instead follow: cuDNN's attention, also the deterministic one, grouped products and a copy.
Exit code 77: there is no ncu.
"""
import collections
import csv
import os
import shutil
import subprocess
import sys

ON_GPU = ["--set", "training.device=cuda"]
DENSE = ["configs/dense-1.3b.json", "--set", "training.global_batch_size=8"]
RUNS = {
    "gpt2": ["configs/gpt2-124m.json", "--set", "training.micro_batch_size=16", "--set", "training.global_batch_size=16"],
    "dense": DENSE,
    "fp8_block": [*DENSE, "--set", "precision.recipe=fp8_block"],
    "experts": ["configs/moe-8x1b.json", "--set", "model.num_layers=16", "--set", "model.num_attention_heads=16",
                "--set", "model.num_key_value_heads=16", "--set", "model.moe.intermediate_size=3072",
                "--set", "training.micro_batch_size=4", "--set", "training.global_batch_size=4"],
}
ROWS = "norm_forward|norm_backward|qk_norm|rotate|swiglu|quantize_rows|quantize_held|dequantize|transpose|cross_entropy|scatter|unpermute|tree_sum|adamw"
MICROSECONDS = {"ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0, "ms": 1e3, "msecond": 1e3}

LIBRARIES = """
try:
    import torch
except ImportError:
    raise SystemExit("no rates of libraries: this Python has no torch")
from torch.nn.attention import sdpa_kernel, SDPBackend
def ms(call, times=20):
    for _ in range(3): call()
    begin, end = torch.cuda.Event(True), torch.cuda.Event(True)
    begin.record()
    for _ in range(times): call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / times
def normal(*shape, **more): return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, **more)
for batch, length, heads, width in ((16, 1024, 12, 64), (8, 2048, 16, 128), (2, 8192, 16, 128)):
    q, k, v = (normal(batch, heads, length, width, requires_grad=True) for _ in range(3))
    flops = 2 * batch * heads * length * length * width
    for exact in (False, True):
        torch.use_deterministic_algorithms(exact, warn_only=True)
        name = f"cuDNN attention {batch}x{length}x{heads}x{width}" + (", deterministic" if exact else "")
        try:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                forward = lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
                out = forward()
                dout = torch.randn_like(out)
                backward = lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
                print(f"{name}: forward {flops / ms(forward) / 1e9:.0f}, backward {2.5 * flops / ms(backward) / 1e9:.0f} TFLOP/s")
        except Exception as error:
            print(f"{name}: {error}")
torch.use_deterministic_algorithms(False)
a, dense, weights = normal(16384, 2048), normal(2048, 6144), normal(8, 2048, 6144)
ends = torch.arange(1, 9, device="cuda", dtype=torch.int32) * 2048
flops = 2 * 16384 * 2048 * 6144
each = lambda: [a[i * 2048:(i + 1) * 2048] @ weights[i] for i in range(8)]
for name, call in (("dense", lambda: a @ dense), ("grouped", lambda: torch._grouped_mm(a, weights, offs=ends)), ("one by one", each)):
    try:
        print(f"product of 16384x2048 and 2048x6144, {name}: {flops / ms(call) / 1e9:.0f} TFLOP/s")
    except Exception as error:
        print(f"product, {name}: {error}")
x = normal(16384, 8192)
y = torch.empty_like(x)
print(f"copy: {4 * x.numel() / ms(lambda: y.copy_(x)) / 1e9:.2f} TB/s")
"""


def profiled(out: str, options: list[str], command: list[str], seconds: int) -> str:
    """Returns what ncu prints, and writes it to the file."""
    # Clocks stay as they are in a run.
    call = ["timeout", str(seconds), "ncu", "--clock-control", "none", *options, *command]
    text = subprocess.run(call, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False).stdout
    with open(out, "w", encoding="utf-8") as file:
        file.write(text)
    return text


def durations(text: str) -> list[tuple[str, float]]:
    """Returns name and microseconds of each launch in what `ncu --csv` prints."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    return [(row["Kernel Name"], float(row["Metric Value"].replace(",", "")) * MICROSECONDS[row["Metric Unit"]])
            for row in csv.DictReader(lines) if row.get("Metric Unit") in MICROSECONDS]


def table(name: str, launches: list[tuple[str, float]]) -> str:
    """Returns the sum of a run's launches, and the kernels with the largest shares."""
    times, spent = collections.Counter(), collections.Counter()
    for kernel, microseconds in launches:
        times[kernel[:90]] += 1
        spent[kernel[:90]] += microseconds
    lines = [f"{name}: {len(launches)} launches, {sum(spent.values()) / 1e3:.2f} ms"]
    lines += [f"  {microseconds:10.0f} us {times[kernel]:5d} {kernel}" for kernel, microseconds in spent.most_common(25)]
    return "\n".join(lines)


def main() -> int:
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    program, out = os.path.join(sys.argv[1], "mantissa"), sys.argv[2]
    if not shutil.which("ncu"):
        print("gpu: no ncu in PATH (package nsight-compute)", file=sys.stderr)
        return 77
    os.makedirs(out, exist_ok=True)
    failed = False
    for name, config in RUNS.items():
        command = [program, "bench", "train", *config, *ON_GPU, "--time-budget", "3"]
        options = ["--metrics", "gpu__time_duration.sum", "--launch-skip", "1500", "--launch-count", "1300", "--csv"]
        launches = durations(profiled(os.path.join(out, f"{name}.csv"), options, command, 70))
        failed = failed or not launches
        print(table(name, launches) if launches else f"{name}: ncu has timed no kernel, see {out}/{name}.csv", flush=True)
    sections = [word for section in ("SpeedOfLight", "WarpStateStats", "Occupancy") for word in ("--section", section)]
    command = [program, "bench", "train", *RUNS["fp8_block"], *ON_GPU, "--time-budget", "2"]
    print(profiled(os.path.join(out, "rows.txt"), [*sections, "-k", f"regex:{ROWS}", "--launch-skip", "200", "--launch-count", "16"], command, 80))
    subprocess.run(["timeout", "90", sys.executable, "-c", LIBRARIES], check=False)  # torch is a convenience
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
