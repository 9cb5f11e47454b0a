#!/usr/bin/env python3
"""Checks with objdump that the clones of every fast CPU kernel (src/backend/cpu/fast/simd.h) hold the instructions of their levels.

    tests/clones_test.py LIBRARY

What a body calls without its being inlined stays at the level of the build. Results are the same then, only slow, so no other test can see
it. Exit code 77 (skipped) without objdump.
"""
import re
import shutil
import subprocess
import sys
from collections import defaultdict

# Bodies that take eight bf16 elements at a time, which are 16 bytes at every level.
NARROW = re.compile(r"\btranspose<mantissa::bf16>")
# Functions that clones may call: the C library, accessors, constructors and errors, and the way for blocks and draws that the lanes
# do not cover.
CALLEES = re.compile(r"(mem(cpy|set)|__mem(cpy|set)_chk|expf|logf|__stack_chk_fail|__chk_fail)$|mantissa::(dtype_name\(|random_normal\(|Shape::operator\[\]|\(anonymous namespace\)::Reader<.*>::Reader\()"
                     r"|[\w ]*\*? ?mantissa::(Tensor::device_data<|fail<|lanes::\(anonymous namespace\)::quantize_blocks<|quantize_block<)|mantissa::bf16\* mantissa::Tensor::device_data<")


def clones_of(library):
    """{(body, level): instructions}"""
    dump = subprocess.run(["objdump", "-dr", "--no-show-raw-insn", "-C", library], capture_output=True, text=True, check=True).stdout
    clones, lines = {}, []
    for line in dump.splitlines():
        if symbol := re.match(r"[0-9a-f]+ <(.*)>:$", line):
            clone = re.match(r"(?:.* )?mantissa::Clones<(.*)>::(v4|v3|baseline)\(", symbol.group(1))
            lines = clones.setdefault(clone.groups(), []) if clone else []
        else:
            lines.append(line)
    return clones


def foreign_calls(lines):
    """Functions that are called and not allowed to be."""
    for line, after in zip(lines, [*lines[1:], ""]):
        call = re.match(r"\s+[0-9a-f]+:\s+(?:call|jmp)\s+[0-9a-f]+ <(.*?)(\+0x[0-9a-f]+)?>$", line)
        relocation = re.match(r"\s+[0-9a-f]+: R_X86_64_(?:PLT32|PC32)\s+(.*?)(-0x[0-9a-f]+)?$", after)
        callee = relocation.group(1) if call and relocation else call.group(1) if call and not call.group(2) else None
        if callee and not CALLEES.match(callee):
            yield callee


def findings(clones):
    bodies = defaultdict(set)
    for (body, level), lines in clones.items():
        bodies[body].add(level)
        widest = "zmm or ymm" if any("%zmm" in line or "%ymm" in line for line in lines) else "xmm"
        if level == "baseline" and widest != "xmm":
            yield f"{body}: the baseline uses {widest}"
        if level != "baseline" and widest == "xmm" and not NARROW.search(body):
            yield f"{body}: {level} has no wide vectors"
        if level != "baseline":
            yield from (f"{body}: {level} calls {callee}, which stays at the baseline" for callee in sorted(set(foreign_calls(lines))))
    yield from (f"{body}: has only {', '.join(sorted(levels))}" for body, levels in bodies.items() if len(levels) != 3)


def main():
    if not shutil.which("objdump"):
        print("SKIPPED: no objdump (Debian: binutils)")
        sys.exit(77)
    clones = clones_of(sys.argv[1])
    wrong = list(findings(clones))
    print("\n".join(wrong))
    wide = sum("%zmm" in "".join(lines) for (_, level), lines in clones.items() if level == "v4")
    print(f"{len(clones)} clones, {wide} with 64-byte vectors; {len(wrong)} findings")
    sys.exit(1 if wrong or len(clones) < 3 * 50 or wide < 20 else 0)


if __name__ == "__main__":
    main()
