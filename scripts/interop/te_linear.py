#!/usr/bin/env python3
"""Quantizes the operands of one linear layer as Transformer Engine's MXFP8BlockScaling(fp8_format=HYBRID) does, in NumPy.

    te_linear.py tests/golden/linears/te.safetensors [--write]

The file has x [M, K], w [N, K] and dy [M, N] in bf16, and codes and scales of the six operands of fprop, dgrad and wgrad, each quantized from the
values in the direction in which its GEMM sums. Written after Transformer Engine's common/util/ptx.cuh (float_to_e8m0, exp2f_rcp) and
common/cast/mxfp8/quantize_mxfp8.cuh: the scale is amax times the fp32 reciprocal of the largest element, its exponent rounded up; the element is
the value times 2^(127 - scale), rounded to nearest even and saturated. With --write the file is made, else it must be the same.
"""
import json
import struct
import sys
from pathlib import Path

import numpy as np

from mx_numpy import e4m3, e5m2

BLOCK = 32
M, K, N = 64, 64, 96
LARGEST = {"e4m3": np.float32(448), "e5m2": np.float32(57344)}
TABLES = {"e4m3": e4m3, "e5m2": e5m2}


def to_bf16(x):
    bits = x.astype(np.float32).view(np.uint32)
    return (((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16).view(np.float32)


def float_to_e8m0(x):
    bits = x.view(np.uint32)
    exponent, mantissa = (bits >> 23).astype(np.int64), bits & 0x7FFFFF
    up = (mantissa > 0) & (exponent != 0xFE) & ~((exponent == 0) & (mantissa <= 0x400000))
    return np.where(x == 0, 0, exponent + up).astype(np.uint8)


def to_fp8(x, fmt):
    """Codes nearest to fp32 x, ties to even, saturated: found among all codes by their values."""
    magnitudes = TABLES[fmt](np.arange(128, dtype=np.uint8)).astype(np.float64)
    finite = int(np.searchsorted(magnitudes[: {"e4m3": 127, "e5m2": 124}[fmt]], float(LARGEST[fmt]))) + 1
    middle = (magnitudes[: finite - 1] + magnitudes[1:finite]) / 2
    a = np.abs(x).astype(np.float64)
    below = np.searchsorted(middle, a, side="left")  # a tie is below: the even of the two codes counts
    tie = (below < finite - 1) & (middle[np.minimum(below, finite - 2)] == a)
    codes = below + (tie & (below % 2 == 1))
    return (codes | np.where(np.signbit(x), 0x80, 0)).astype(np.uint8)


def rowwise(x, fmt):
    blocks = x.reshape(x.shape[0], -1, BLOCK)
    amax = np.abs(blocks).max(-1)
    scales = float_to_e8m0(amax * (np.float32(1) / LARGEST[fmt]))
    inverse = np.where(scales == 0, np.float32(1), np.exp2(127.0 - scales.astype(np.float64))).astype(np.float32)
    return to_fp8(blocks * inverse[:, :, None], fmt).reshape(x.shape), scales


def columnwise(x, fmt):
    codes, scales = rowwise(np.ascontiguousarray(x.T), fmt)
    return np.ascontiguousarray(codes.T), np.ascontiguousarray(scales.T)


def spread(rng, rows, cols):
    """Rows and columns of magnitudes that differ by 2^12, and some rows of zeros."""
    x = rng.standard_normal((rows, cols)) * 2.0 ** rng.integers(-6, 7, (rows, 1)) * 2.0 ** rng.integers(-6, 7, (1, cols))
    x[5], x[:, 7] = 0, -0.0
    return to_bf16(x)


def tensors():
    rng = np.random.default_rng(7)
    x, w, dy = spread(rng, M, K), spread(rng, N, K), spread(rng, M, N)
    out = {name: ("BF16", (value.view(np.uint32) >> 16).astype("<u2")) for name, value in (("x", x), ("w", w), ("dy", dy))}
    operands = {"fprop.x": rowwise(x, "e4m3"), "fprop.w": rowwise(w, "e4m3"), "dgrad.dy": rowwise(dy, "e5m2")}
    operands |= {"dgrad.w": columnwise(w, "e4m3"), "wgrad.dy": columnwise(dy, "e5m2"), "wgrad.x": columnwise(x, "e4m3")}
    for name, (codes, scales) in operands.items():
        out |= {name + ".codes": ("U8", codes), name + ".scales": ("U8", scales)}
    return out


def main():
    header, data = {}, b""
    for name, (dtype, value) in sorted(tensors().items()):
        raw = value.tobytes()
        header[name] = {"dtype": dtype, "shape": list(value.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    content = struct.pack("<Q", len(text)) + text + data
    if "--write" in sys.argv:
        Path(sys.argv[1]).write_bytes(content)
    elif Path(sys.argv[1]).read_bytes() != content:
        sys.exit(f"{sys.argv[1]} is not what Transformer Engine's rules give")
    print(f"{len(header)} tensors")


if __name__ == "__main__":
    main()
