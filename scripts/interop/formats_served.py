#!/usr/bin/env python3
"""Compares python/mantissa_formats with torchao's to_mx and MLX's quantize and dequantize, on random blocks of bf16.

    .venv-interop/bin/python scripts/interop/formats_served.py

Blocks of 32 have normal values around every power of two, any finite bits, or any finite bf16 as their largest magnitude. Prints a line for each
program, rule and format: how many blocks have equal scales and codes, and why elements differ. Blocks whose scale is 0 are left out, since the
others divide by another number there. Exits with 1 at a difference that docs/precision.md does not list, with 77 where torchao or MLX is missing.
"""
import sys
from pathlib import Path

import numpy as np

try:
    import mlx.core as mx
    import torch
    import torchao
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx
except ImportError as missing:
    print(f"SKIPPED: {missing}; scripts/interop/setup.sh installs it")
    sys.exit(77)

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))
import mantissa_formats as formats  # noqa: E402

BLOCK, BLOCKS = formats.BLOCK, 1 << 14
TORCHAO = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "e2m1": torch.float4_e2m1fn_x2}
TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # halfway between elements of E2M1
MLX = {"e4m3": ("mxfp8", 8), "e2m1": ("mxfp4", 4)}


def bits_of(values):
    """bf16 bits of values, rounded to the nearest with ties away from zero."""
    return ((values.astype(np.float32).view(np.uint32) + 0x8000) >> 16).astype(np.uint16)


def random_blocks():
    """bf16 bits [blocks, 32] by name."""
    random = np.random.default_rng(11)
    binades = np.ldexp(random.standard_normal((BLOCKS, BLOCK)), random.integers(-130, 126, (BLOCKS, 1)))
    anything = random.integers(0, 1 << 16, (BLOCKS, BLOCK), dtype=np.uint16)
    anything[(anything & 0x7F80) == 0x7F80] &= 0xBFFF  # finite
    amax = np.arange(1, 0x7F80, dtype=np.uint16)
    parts = formats.bf16_values(amax)[:, None] * random.uniform(-1, 1, (len(amax), BLOCK))
    largest = bits_of(np.clip(parts, -3e38, 3e38))
    largest[np.arange(len(amax)), random.integers(0, BLOCK, len(amax))] = amax | random.integers(0, 2, len(amax), dtype=np.uint16) << 15
    return {"normal values": bits_of(binades), "any bits": anything, "each largest magnitude": largest}


def by_torchao(bits, element, rule):
    x = torch.from_numpy(bits.view(np.int16).copy()).view(torch.bfloat16)
    scales, codes = to_mx(x, TORCHAO[element], BLOCK, ScaleCalculationMode(rule))
    return formats.MxArray(codes.view(torch.uint8).numpy(), scales.view(torch.uint8).reshape(-1, 1).numpy())


def by_mlx(bits, element, _):
    mode, width = MLX[element]
    weight, scales = mx.quantize(mx.array(bits).view(mx.bfloat16), group_size=BLOCK, bits=width, mode=mode)[:2]
    return formats.from_mlx(np.array(weight), np.array(scales))


def each_code(codes, element):
    return formats.unpack(codes) if formats.FORMATS[element].packed else codes


def compare(program, element, rule, encode, kinds):
    """Prints counts, and returns how many elements in blocks above scale 0 differ otherwise than docs/precision.md lists."""
    blocks = equal = subnormal = unknown = 0
    reasons = {}
    for bits in kinds.values():
        x = formats.bf16_values(bits)
        ours, theirs = formats.quantize(x, element, rule=rule), encode(bits, element, rule)
        above = ours.scales[:, 0] > 0
        codes = [each_code(one.codes, element).astype(np.int16) for one in (ours, theirs)]
        differ = (codes[0] != codes[1]) | (ours.scales != theirs.scales)
        listed = np.broadcast_to((program == "mlx") & (ours.scales == 1) & (theirs.scales == 0), x.shape)
        if program == "mlx" and element == "e2m1":
            unsigned_zero, one_less = (codes[0] & 7 == 0) & (codes[1] == 0), codes[0] - codes[1] == 1
            tie = np.isin(np.abs(np.ldexp(x.astype(np.float64), 127 - ours.scales.astype(np.int64))), TIES)
            listed = listed | (ours.scales == theirs.scales) & (unsigned_zero | (tie & one_less))
        blocks, equal, subnormal = blocks + above.sum(), equal + (~differ.any(1) & above).sum(), subnormal + (~above).sum()
        unknown += int((differ & ~listed)[above].sum())
        kept = [formats.MxArray(one.codes[above], one.scales[above]) for one in (ours, theirs)]
        for name, count in formats.explain_differences(x[above], *kept, element).items():
            if count:
                reasons[name] = reasons.get(name, 0) + count
    why = ", ".join(f"{count} elements: {name}" for name, count in reasons.items()) or "no difference"
    print(f"{program} | {element} {rule} | {equal} of {blocks} blocks have equal scales and codes | {why} | {subnormal} blocks of scale 0 left out", flush=True)
    return unknown


def decoding_differs():
    """How many values of all codes under all scales below NaN MLX decodes otherwise."""
    differ = 0
    for element, (mode, width) in MLX.items():
        codes = np.tile(np.arange(256, dtype=np.uint8), (255, 1))
        scales = np.repeat(np.arange(255, dtype=np.uint8)[:, None], codes.shape[1] * (2 if width == 4 else 1) // BLOCK, 1)
        ours = formats.dequantize(codes, scales, element)
        weight, scale = formats.to_mlx(codes, scales)
        theirs = np.array(mx.dequantize(mx.array(weight), mx.array(scale), group_size=BLOCK, bits=width, mode=mode, dtype=mx.float32))
        differ += int(((ours.view(np.uint32) != theirs.view(np.uint32)) & ~(np.isnan(ours) & np.isnan(theirs))).sum())
        print(f"mlx | decodes {element} | {ours.size} codes under all scales", flush=True)
    return differ


def main():
    mx.set_default_device(mx.cpu)
    print(f"torchao {torchao.__version__}, torch {torch.__version__}, mlx {mx.__version__}")
    kinds, unknown = random_blocks(), 0
    for element in TORCHAO:
        for rule in ("floor", "ceil", "even", "rceil"):
            unknown += compare("torchao", element, rule, by_torchao, kinds)
    for element in MLX:
        unknown += compare("mlx", element, "rceil", by_mlx, kinds)
    unknown += decoding_differs()
    print(f"formats_served: {unknown} elements differ otherwise than docs/precision.md lists")
    sys.exit(unknown > 0)


if __name__ == "__main__":
    main()
