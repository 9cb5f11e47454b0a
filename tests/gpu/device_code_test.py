#!/usr/bin/env python3
"""Looks at the machine code of the CUDA kernels: device_code_test.py OBJECT..., those that nvcc made of src/backend/cuda.

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
# Opcodes of the kernels of a file of src/backend/cuda: every one of the first is in one of them, none of the second in any.
EXPECTED = {
    "quantize.cu": (["LDG.E.128", "STG.E.128", "F2FP"], ["DADD", "DMUL", "DFMA", "DSETP"]),
    "gemm.cu": (["LDS.128", "FFMA"], ["DADD", "DMUL", "DFMA", "LDL", "STL"]),
    "mma_gemm.cu": (["HMMA", "LDSM", "LDGSTS"], ["DADD", "DMUL", "DFMA", "LDL", "STL"]),
    "attention.cu": (["LDS.128", "FFMA"], ["DADD", "DMUL", "DFMA", "LDL", "STL"]),
    "flash_attention.cu": (["HMMA", "LDSM", "LDGSTS", "F2FP"], ["DADD", "DMUL", "DFMA", "LDL", "STL"]),
    "flash_attention_backward.cu": (["HMMA", "LDSM", "LDGSTS", "F2FP"], ["DADD", "DMUL", "DFMA", "LDL", "STL"]),
    "dispatch.cu": (["LDG.E.128", "STG.E.128"], ["LDL", "STL"]),
    "column_sums.h": (["LDG.E.128", "STG.E.128"], ["LDL", "STL"]),
    **{
        f"{rows}.cu": (["LDG.E.128", "STG.E.128"], ["LDL", "STL"])
        for rows in ("activation", "cross_entropy", "elementwise", "embedding", "norm", "optimizer", "qk_norm", "rope")
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


def kernel_of(symbol):
    """The last name of a mangled one: _ZN 8mantissa 3gpu 6rotate IfEE..."""
    at, name = len("_ZN"), ""
    while match := re.match(r"L?(\d+)", symbol[at:]):
        at += match.end()
        name, at = symbol[at : at + int(match[1])], at + int(match[1])
    return name


def opcodes_of_kernels(objects):
    """For each kernel the opcodes of all its instances."""
    opcodes = {}
    for path in objects:
        for function in output("cuobjdump", "-arch", ARCHITECTURE, "-sass", path).split("Function : ")[1:]:
            of_kernel = opcodes.setdefault(kernel_of(function), set())
            of_kernel.update(re.findall(r"/\*[0-9a-f]+\*/\s+(?:@!?\w+\s+)?([A-Z0-9_.]+)", function))
    return opcodes


def wrong_ptx(objects):
    """Packages have PTX of 8.9, which converts FP8 by instructions, for GPUs without machine code."""
    of_packages = [path for path in objects if "sm_100a" in output("cuobjdump", "--list-elf", path)]
    has = lambda path: "e4m3x2" in output("cuobjdump", "-ptx", "-arch", "sm_89", path)
    return [f"{path.name}: no PTX that converts FP8" for path in of_packages if path.name == "quantize.o" and not has(path)]


def kernels_in(path):
    return re.findall(r"__global__\s+void\s+__launch_bounds__\((?:[^()]|\([^()]*\))*\)\s*(\w+)\(", path.read_text())


def wrong_opcodes(path, opcodes):
    wanted, unwanted = EXPECTED[path.name]
    there = set().union(*(opcodes[kernel] for kernel in kernels_in(path)))
    has = lambda opcode: any(each == opcode or each.startswith(opcode + ".") for each in there)
    return [f"{path.name}: no {each}" for each in wanted if not has(each)] + [f"{path.name}: has {each}" for each in unwanted if has(each)]


def kernels_without_bounds():
    return [
        f"{path}: a kernel without __launch_bounds__"
        for folder in ("src/backend/cuda", "tests/gpu")
        for path in [*Path(folder).glob("**/*.cu"), *Path(folder).glob("**/*.h")]
        for match in re.finditer(r"__global__\s+void\s+(\S+)", path.read_text())
        if not match[1].startswith("__launch_bounds__")
    ]


def main():
    add_tools_of_pypi()
    wrong = kernels_without_bounds()
    if missing := [tool for tool in ("cuobjdump", "nvdisasm") if not shutil.which(tool)]:
        print(*wrong, f"SKIPPED: no {' and no '.join(missing)}", sep="\n")
        sys.exit(1 if wrong else 77)
    objects = [Path(each) for each in sys.argv[1:]]
    if not all(ARCHITECTURE in output("cuobjdump", "--list-elf", each) for each in objects):
        print(*wrong, f"SKIPPED: no code of {ARCHITECTURE} (MANTISSA_CUDA_ARCHITECTURES)", sep="\n")
        sys.exit(1 if wrong else 77)
    sources = [*Path("src/backend/cuda").glob("**/*.cu"), *Path("src/backend/cuda").glob("**/*.h")]
    kernels = [kernel for path in sources for kernel in kernels_in(path)]
    opcodes = opcodes_of_kernels(objects)
    if absent := set(EXPECTED) - {path.name for path in sources} or set(kernels) - set(opcodes):
        sys.exit(f"there is no {' and no '.join(sorted(absent))}")
    wrong += [f"{kernel}: the name of two kernels" for kernel in sorted(set(kernels)) if kernels.count(kernel) > 1]
    wrong += wrong_ptx(objects)
    for path in objects:
        wrong += functions_with_a_stack(path)
    for path in sources:
        if path.name in EXPECTED:
            wrong += wrong_opcodes(path, opcodes)
    print(*wrong or [f"{len(opcodes)} kernels"], sep="\n")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
