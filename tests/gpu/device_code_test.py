#!/usr/bin/env python3
"""Looks at the machine code of the CUDA kernels: device_code_test.py OBJECT..., those that nvcc made of src/backend/cuda.

No kernel keeps values of a thread in memory, as a stack or spilled registers; kernels of codes compute nothing in fp64; what moves rows and
tiles does so by 16 bytes; and every kernel says how many threads its blocks have. The costs of kernels are those of a table in
docs/performance.md, which --renew writes anew: device_code_test.py --renew OBJECT... . Needs cuobjdump and nvdisasm: those of the CUDA
toolkit, or of PyPI in .venv-interop (scripts/interop/setup.sh). Exit code 77: they are missing.
"""
import os
import re
import shutil
import sys
from pathlib import Path

import machine_code
from machine_code import output

ARCHITECTURE = "sm_90a"
# Opcodes of the kernels of a file of src/backend/cuda: every one of the first is in one of them, none of the second in any.
EXPECTED = {
    "quantize.cu": (["LDG.E.128", "STG.E.128", "F2FP"], ["DADD", "DMUL", "DFMA", "DSETP"]),
    "dequantize.cu": (["LDG.E.64", "STG.E.128", "F2FP"], ["DADD", "DMUL", "DFMA", "DSETP"]),
    "gemm.cu": (["LDS.128", "FFMA"], ["DADD", "DMUL", "DFMA", "LDL", "STL"]),
    "mma_gemm.cu": (["HMMA", "LDSM", "LDGSTS"], ["DADD", "DMUL", "DFMA", "LDL", "STL"]),
    "attention.cu": (["LDS.128", "FFMA"], ["DADD", "DMUL", "DFMA", "LDL", "STL"]),
    "flash_attention.cu": (["HMMA", "LDSM", "LDGSTS", "F2FP"], ["DADD", "DMUL", "DFMA", "LDL", "STL"]),
    "flash_attention_backward.cu": (["HMMA", "LDSM", "LDGSTS", "F2FP"], ["DADD", "DMUL", "DFMA", "LDL", "STL"]),
    "dispatch.cu": (["LDG.E.128", "STG.E.128"], ["LDL", "STL"]),
    "column_sums.h": (["LDG.E.128", "STG.E.128"], ["LDL", "STL"]),
    "optimizer.cu": (["LD.E.128", "STG.E.128"], ["LDL", "STL"]),  # a table in memory holds its addresses, which nvcc takes for any memory's
    **{
        f"{rows}.cu": (["LDG.E.128", "STG.E.128"], ["LDL", "STL"])
        for rows in ("activation", "cross_entropy", "elementwise", "embedding", "norm", "qk_norm", "rope")
    },
}
# An H200 issues so many instructions of a lane while its memory moves a byte: 132 multiprocessors, 128 lanes, 1.755 GHz, 4.1 TB/s.
INSTRUCTIONS_OF_A_BYTE = 132 * 128 * 1.755e9 / 4.1e12
# A table of costs, behind the line that says of which toolkit they are. Only its first two columns are written by hand: a kernel, and the
# bytes that an element has to read and write, or "product".
TABLE = Path("docs/performance.md")
TITLE = re.compile(r"^Machine code of nvcc (\S+) for sm_90a.*\n\n(\| .*\n\|[-|]*\n)((?:\|.*\n)*)", re.M)
# Bytes of shared memory that launches ask for, where it decides how many blocks there are.
LAUNCHED = {"cross_entropy<true, bf16>": 197 << 9}
# Kernels that move a few bytes at a time, and bytes of a thread's loads that are under way at least when one is waited for.
LEAST_IN_FLIGHT = {"count_choices": 32, "place_choices": 32, "transpose_bytes": 64}
# Kernels with a stack, which run once a step over little data.
MAY_HAVE_A_STACK = []


def add_tools_of_pypi():
    for folder in Path(".venv-interop").glob("lib/python*/site-packages/nvidia/*/bin"):
        os.environ["PATH"] += os.pathsep + str(folder.resolve())


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
    return re.findall(r"__global__\s+void\s+__launch_bounds__\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)\s*(\w+)\(", path.read_text())


def wrong_opcodes(path, opcodes):
    wanted, unwanted = EXPECTED[path.name]
    there = set().union(*(opcodes[kernel] for kernel in kernels_in(path)))
    has = lambda opcode: any(each == opcode or each.startswith(opcode + ".") for each in there)
    return [f"{path.name}: no {each}" for each in wanted if not has(each)] + [f"{path.name}: has {each}" for each in unwanted if has(each)]


def blocks_of_multiprocessor(name, code):
    """By the registers, threads and shared memory of one of compute capability 9.0."""
    warps = code.threads // 32
    shared = max(code.shared, 1024) + LAUNCHED.get(name, 0)  # the system has 1024 bytes of them
    return min(65536 // (-(-code.registers * 32 // 256) * 256) // warps, 64 // warps, 228 * 1024 // shared, 32)


def costs_of(name, element, code):
    """The cells of a row of the table behind those written by hand."""
    blocks = blocks_of_multiprocessor(name, code)
    if element == "product":
        passes = machine_code.Graph(code.instructions, machine_code.is_product).passes()
        each = min(instructions / sum(map(machine_code.is_product, path)) for instructions, path in passes)
        return [f"{each:.1f}", "", "", "", str(code.registers), f"{blocks} ({blocks * code.threads // 32})"]
    read, written = (float(each) for each in element.split("+"))
    best = {}  # the pass that moves most, of those that read alone and of those that write, too; others do what it leaves
    for instructions, path in machine_code.Graph(code.instructions, machine_code.work_of_bytes).passes():
        stored, loaded = machine_code.widest(path, "STG"), machine_code.widest(path, "LD[GS]")
        if loaded[0] > 0:
            size, all = stored if stored[0] else loaded
            each = (size, all / (written if stored[0] else read), instructions, path)
            best[stored[0] > 0] = max(each, best.get(stored[0] > 0, each), key=lambda found: found[:3])
    instructions = sum(each[2] / each[1] for each in best.values())
    moves = sum(sum(each.opcode == "PRMT" for each in path) / elements for _, elements, _, path in best.values())
    in_flight = max(machine_code.bytes_in_flight(path) for _, _, _, path in best.values())
    share = instructions / ((read + written) * INSTRUCTIONS_OF_A_BYTE)
    in_all = f"{in_flight} ({in_flight * code.threads * blocks / 1024:.0f} KiB)"
    return [f"{instructions:.1f}", f"{share:.2f}", f"{moves:.1f}", in_all, str(code.registers), f"{blocks} ({blocks * code.threads // 32})"]


def table_of_costs(objects, renew):
    """Returns how the table of costs differs from the code, or writes it anew; and kernels that wait for loads one by one."""
    text, release = TABLE.read_text(), machine_code.toolkit(objects[0], ARCHITECTURE)
    table = TITLE.search(text)
    if table[1] != release and not renew:
        print(f"SKIPPED: the costs of kernels are those of nvcc {table[1]}, and these are of {release}")
        return []
    kernels = {name: code for path in objects for name, code in machine_code.kernels(path, ARCHITECTURE).items()}
    in_flight = {name: machine_code.bytes_in_flight(kernels[name].instructions) for name in LEAST_IN_FLIGHT}
    wrong = [f"{name} has {in_flight[name]} bytes in flight, not {least}" for name, least in LEAST_IN_FLIGHT.items() if in_flight[name] < least]
    rows = []
    for row in table[3].splitlines():
        name, element, *written = (each.strip() for each in row.strip("|").split("|"))
        if name.strip("`") not in kernels:
            wrong.append(f"{TABLE}: there is no kernel {name}")
            continue
        found = costs_of(name.strip("`"), element, kernels[name.strip("`")])
        rows.append(f"| {' | '.join([name, element, *found])} |\n")
        if found != written:
            wrong.append(f"{TABLE}: {name} has {', '.join(written)}; the code has {', '.join(found)} (device_code_test.py --renew)")
    if renew:
        title = table[0][: table.start(3) - table.start()].replace(f"nvcc {table[1]}", f"nvcc {release}")
        TABLE.write_text(text[: table.start()] + title + "".join(rows) + text[table.end() :])
        wrong = [each for each in wrong if not each.startswith(f"{TABLE}:")]
    return wrong


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
    renew = "--renew" in sys.argv
    objects = [Path(each) for each in sys.argv[1:] if each != "--renew"]
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
    wrong += table_of_costs(objects, renew)
    print(*wrong or [f"{len(opcodes)} kernels"], sep="\n")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
