"""Writes tests/io/ggml_blocks.json: random blocks of every type that mantissa reads from GGUF files, decoded by gguf-py's NumPy code.

    python scripts/interop/ggml_blocks.py tests/io/ggml_blocks.json

Needs the packages gguf and numpy.
"""

import json
import sys

import gguf
import numpy as np

TYPES = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4"]
HALVES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}


def random_blocks(name, rng):
    """Any bytes, and scales that are finite: normal, subnormal, zero and negative ones."""
    elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    blocks = rng.integers(0, 256, (2 if elements == 256 else 8 if elements == 32 else 64, size), dtype=np.uint8)
    for at in HALVES.get(name, []):
        scales = rng.normal(0, 1, len(blocks)).astype(np.float16)
        scales[0] = np.float16(-6e-6)
        if len(scales) > 3:
            scales[3] = 0
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    if name == "MXFP4":
        blocks[:, 0] = [0, 1, 2, 100, 127, 128, 250, 254]
    if name in ("F32", "F16", "BF16"):
        values = rng.normal(0, 1, len(blocks)).astype(np.float32)
        narrow = {"F32": values, "F16": values.astype(np.float16), "BF16": (values.view(np.uint32) >> 16).astype(np.uint16)}[name]
        blocks = narrow.view(np.uint8).reshape(len(blocks), size)
    return blocks


def main():
    rng = np.random.default_rng(5)
    out = {}
    for name in TYPES:
        kind = gguf.GGMLQuantizationType[name]
        blocks = random_blocks(name, rng)
        with np.errstate(over="ignore"):
            values = np.ascontiguousarray(gguf.dequantize(blocks, kind), dtype=np.float32)
        out[name] = {"type": int(kind), "blocks": blocks.tobytes().hex(), "values": values.tobytes().hex()}
    with open(sys.argv[1], "w") as file:
        json.dump(out, file, indent=1)
        file.write("\n")


main()
