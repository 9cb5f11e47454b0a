#!/usr/bin/env python3
"""Looks at the machine code of the CUDA kernels: device_code_test.py FOLDER with the objects that nvcc made.

No kernel keeps values of a thread in memory, as a stack or spilled registers; kernels of codes compute nothing in fp64; what moves rows and
tiles does so by 16 bytes; and every kernel says how many threads its blocks have. Needs cuobjdump and nvdisasm: those of the CUDA toolkit, or
of PyPI in .venv-interop (scripts/interop/setup.sh). Exit code 77: they are missing.
"""
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ARCHITECTURE = "sm_90a"
# Opcodes in the code of a file: at least one of the first, none of the second.
EXPECTED = {
    "quantize.o": (["LDG.E.128", "STG.E.128", "F2FP"], ["DADD", "DMUL", "DFMA", "DSETP"]),
    "gemm.o": (["LDS.128", "FFMA"], ["DADD", "DMUL", "DFMA", "LDL", "STL"]),
    "grouped_gemm.o": (["LDS.128", "FFMA"], ["DADD", "DMUL", "DFMA", "LDL", "STL"]),
    "mma_gemm.o": (["HMMA", "LDSM", "LDGSTS"], ["DADD", "DMUL", "DFMA", "LDL", "STL"]),
    "attention.o": (["LDS.128", "FFMA"], ["DADD", "DMUL", "DFMA", "LDL", "STL"]),
    "flash_attention.o": (["HMMA", "LDSM", "LDGSTS", "F2FP"], ["DADD", "DMUL", "DFMA", "LDL", "STL"]),
    "flash_attention_backward.o": (["HMMA", "LDSM", "LDGSTS", "F2FP"], ["DADD", "DMUL", "DFMA", "LDL", "STL"]),
    "dispatch.o": (["LDG.E.128", "STG.E.128"], ["LDL", "STL"]),
    **{
        f"{rows}.o": (["LDG.E.128", "STG.E.128"], ["LDL", "STL"])
        for rows in ("activation", "cross_entropy", "elementwise", "embedding", "layer_norm", "norm", "optimizer", "qk_norm", "rope", "sum")
    },
}
# Kernels with a stack, which run once a step over little data.
MAY_HAVE_A_STACK = []


def add_tools_of_pypi():
    for folder in Path(".venv-interop").glob("lib/python*/site-packages/nvidia/*/bin"):
        os.environ["PATH"] += os.pathsep + str(folder.resolve())


def output(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def functions_with_a_stack(path):
    name, found = "", []
    for line in output("cuobjdump", "--dump-resource-usage", path).splitlines():
        if match := re.match(r" Function (\S+):", line):
            name = match[1]
        if (match := re.search(r"STACK:(\d+).*LOCAL:(\d+)", line)) and match.groups() != ("0", "0"):
            found.append(f"{path.name}: {name} has {match[1]} bytes of stack and {match[2]} of local memory")
    return [each for each in found if not any(word in each for word in MAY_HAVE_A_STACK)]


def wrong_opcodes(path):
    wanted, unwanted = EXPECTED[path.name]
    opcodes = set(re.findall(r"/\*[0-9a-f]+\*/\s+(?:@!?\w+\s+)?([A-Z0-9_.]+)", output("cuobjdump", "-arch", ARCHITECTURE, "-sass", path)))
    has = lambda opcode: any(each == opcode or each.startswith(opcode + ".") for each in opcodes)
    return [f"{path.name}: no {each}" for each in wanted if not has(each)] + [f"{path.name}: has {each}" for each in unwanted if has(each)]


def kernels_without_bounds():
    return [
        f"{path}: a kernel without __launch_bounds__"
        for folder in ("src/backend/cuda", "tests/gpu")
        for path in Path(folder).glob("*.[cu]*")
        for match in re.finditer(r"__global__\s+void\s+(\S+)", path.read_text())
        if not match[1].startswith("__launch_bounds__")
    ]


def main():
    add_tools_of_pypi()
    wrong = kernels_without_bounds()
    if missing := [tool for tool in ("cuobjdump", "nvdisasm") if not shutil.which(tool)]:
        print(*wrong, f"SKIPPED: no {' and no '.join(missing)}", sep="\n")
        sys.exit(1 if wrong else 77)
    objects = sorted(path for path in Path(sys.argv[1]).glob("*.o") if Path(f"src/backend/cuda/{path.stem}.cu").exists())
    if not set(EXPECTED) <= {path.name for path in objects}:
        sys.exit(f"{sys.argv[1]} has only {[path.name for path in objects]}")
    for path in objects:
        wrong += functions_with_a_stack(path)
        if path.name in EXPECTED:
            wrong += wrong_opcodes(path)
    print(*wrong or [f"{len(objects)} files of kernels"], sep="\n")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
