#!/usr/bin/env python3
"""Reads safetensors folders and decodes MX tensors in NumPy, from the documents of the formats and not from mantissa's code.

    .venv-interop/bin/python scripts/interop/mx_numpy.py tests/golden      holds the decoders against golden vectors (.mxg)
"""
import json
import struct
import sys
import zlib
from pathlib import Path

import numpy as np

BLOCK = 32
BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U8": 1, "I8": 1}


class Folder:
    """The tensors of model.safetensors, or of the files that its index names."""

    def __init__(self, folder):
        self.folder, self.entries = Path(folder), {}
        index = self.folder / "model.safetensors.index.json"
        places = json.loads(index.read_text())["weight_map"] if index.exists() else None
        for file in sorted(set(places.values())) if places else ["model.safetensors"]:
            raw = (self.folder / file).read_bytes()
            length = struct.unpack("<Q", raw[:8])[0]
            header = json.loads(raw[8 : 8 + length])
            header.pop("__metadata__", None)
            for name, entry in header.items():
                first, last = (8 + length + offset for offset in entry["data_offsets"])
                assert name not in self.entries and (places is None or places[name] == file), name
                self.entries[name] = entry["dtype"], tuple(entry["shape"]), raw[first:last]
        assert places is None or places.keys() == self.entries.keys()

    def names(self):
        return self.entries.keys()

    def dtype(self, name):
        return self.entries[name][0]

    def bytes(self, name):
        """dtype, shape and bytes as they lie in the file."""
        return self.entries[name]

    def codes(self, name):
        """A tensor of one byte an element, undecoded."""
        dtype, shape, raw = self.entries[name]
        assert BYTES[dtype] == 1, (name, dtype)
        return np.frombuffer(raw, np.uint8).reshape(shape)

    def values(self, name):
        """A tensor of F32, BF16 or F16 as fp32."""
        dtype, shape, raw = self.entries[name]
        if dtype == "BF16":
            return (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)
        return np.frombuffer(raw, {"F32": "<f4", "F16": "<f2"}[dtype]).astype(np.float32).reshape(shape)


def eight_bits(codes, exponent_bits, mantissa_bits, bias):
    """Values of sign, exponent and mantissa, as float64; no special codes."""
    magnitude = codes.astype(np.int64) & ((1 << (exponent_bits + mantissa_bits)) - 1)
    exponent, mantissa = magnitude >> mantissa_bits, magnitude & ((1 << mantissa_bits) - 1)
    normal = np.ldexp(1.0 + mantissa / (1 << mantissa_bits), exponent - bias)
    subnormal = np.ldexp(mantissa / (1 << mantissa_bits), 1 - bias)
    value = np.where(exponent > 0, normal, subnormal)
    return np.where(codes >> (exponent_bits + mantissa_bits) & 1, -value, value)


def e4m3(codes):
    return np.where(codes & 0x7F == 0x7F, np.nan, eight_bits(codes, 4, 3, 7))


def e5m2(codes):
    value = eight_bits(codes, 5, 2, 15)
    special = np.where(codes & 3, np.nan, np.where(codes & 0x80, -np.inf, np.inf))
    return np.where(codes >> 2 & 31 == 31, special, value)


def e2m1(packed):
    """[..., n] bytes to [..., 2n] values, the low nibble first."""
    nibbles = np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1)
    return eight_bits(nibbles, 2, 1, 1)


def e8m0(codes):
    return np.where(codes == 255, np.nan, np.ldexp(1.0, codes.astype(np.int64) - 127))


def scaled(values, scales):
    """Values [..., n] times E8M0 codes [..., n / 32], rounded once to fp32."""
    with np.errstate(over="ignore"):
        return (values * np.repeat(e8m0(scales), BLOCK, -1)).astype(np.float32)


PACKED = {".weight_packed": (".weight_scale", e2m1), ".weight": (".weight_scale", e4m3), "_blocks": ("_scales", e2m1)}


def packed_weights(folder):
    """The packed weights of a folder, in any of the conventions: by the name of the weight, the fp32 values, the name of the scales, and a
    flag that is true if values have four bits."""
    found = {}
    for name in folder.names():
        module, part = split_name(name)
        if part not in PACKED:
            continue
        suffix, decode = PACKED[part]
        scale = next((module + end for end in (suffix, suffix + "_inv") if module + end in folder.names()), None)
        if scale is None:
            continue
        assert folder.dtype(name) == ("F8_E4M3" if decode is e4m3 else "U8") and folder.dtype(scale) == "U8", name
        codes = folder.codes(name)
        if part == "_blocks":  # [E, out, in / 32, 16] stands for [E, in, out]
            found[module] = scaled(e2m1(codes.reshape(*codes.shape[:2], -1)), folder.codes(scale)).swapaxes(1, 2), scale, True
        else:
            found[module + ".weight"] = scaled(decode(codes), folder.codes(scale)), scale, decode is e2m1
    return found


def split_name(name):
    if name.endswith("_blocks"):
        return name.removesuffix("_blocks"), "_blocks"
    return name.rpartition(".")[0], "." + name.rpartition(".")[2]


def golden(path):
    """One case of tests/golden: element values, scale codes by element, dequantized fp32."""
    raw = path.read_bytes()
    magic, version, fmt, mode, dtype, orient, rows, columns, flags, scales, codes, _, crc = struct.unpack("<4s12I", raw[:52])
    payload, start = raw[64:], rows * columns * (2 if dtype == 0 else 4)
    assert magic == b"MXG1" and version == 1 and zlib.crc32(payload) == crc, path
    scale = np.frombuffer(payload, np.uint8, scales, start).reshape(((rows, columns // BLOCK), (rows // BLOCK, columns), (rows // BLOCK, columns // BLOCK))[orient])
    code = np.frombuffer(payload, np.uint8, codes, start + scales).reshape(rows, -1)
    if not flags & 1:
        return None
    if orient:
        scale = np.repeat(scale, BLOCK, 0)
    if orient != 1:
        scale = np.repeat(scale, BLOCK, 1)
    dequantized = np.frombuffer(payload, np.float32, rows * columns, start + scales + codes).reshape(rows, columns)
    value = (e4m3, e5m2, e2m1)[fmt](code)
    return (np.where(value == 0, 0.0, value) if mode == 2 else value), scale, dequantized  # flashinfer knows no -0


def main():
    compared = 0
    for path in sorted(Path(sys.argv[1]).glob("*.mxg")):
        case = golden(path)
        if case is None:
            continue
        value, scale, expected = case
        with np.errstate(over="ignore", invalid="ignore"):
            found = (value * e8m0(scale)).astype(np.float32)
        same = (found.view(np.uint32) == expected.view(np.uint32)) | (np.isnan(found) & np.isnan(expected))
        if not same.all():
            sys.exit(f"{path.name}: {np.count_nonzero(~same)} of {same.size} values differ")
        compared += same.size
    print(f"mx_numpy: {compared} values equal")
    sys.exit(compared == 0)


if __name__ == "__main__":
    main()
