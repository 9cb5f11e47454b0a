#!/usr/bin/env python3
"""Compares scale rules with the code of others: scale_rules.py FOLDER with golden vectors.

Scales and codes of the golden vectors with blocks of 1 x 32, and scales of every bf16 amax, are held against torchao's to_mx in its four modes;
those of even in E2M1 against compressed-tensors, too, which rounds amax to the mantissa of E2M1 also for E4M3, and rceil against ModelOpt. Blocks that hold Inf are left out:
here their scale is 255, there 254 or that of the largest number; so are codes at scale 0, by which torchao divides as by the smallest normal
number, under RCEIL as by 1. Prints the signal to noise of each rule and format on 2^20 normal values of bf16. Exit code 77: torchao is missing.
"""
import struct
import sys
from pathlib import Path

import numpy as np

try:
    import torch
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx
except ImportError as missing:
    print(f"SKIPPED: {missing}")
    sys.exit(77)

BLOCK = 32
FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "e2m1": torch.float4_e2m1fn_x2}
EMAX = {"e4m3": 8, "e5m2": 15, "e2m1": 2}
MANTISSA = {"e4m3": 3, "e5m2": 2, "e2m1": 1}
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0, "e2m1": 6.0}
RULES = ("floor", "rceil", "even", "ceil")


def block_scale(amax, fmt, rule):
    """The scale codes of fp32 amax, by the rules of docs/precision.md."""
    bits = amax.astype(np.float32).view(np.uint32).astype(np.int64)
    fraction, exponent = bits & 0x7FFFFF, bits >> 23
    kept = {
        "floor": 0x7FFFFF,
        "ceil": 0,
        "even": (1 << 23) - (1 << (22 - MANTISSA[fmt])) - 1,
        "rceil": int(np.float32(LARGEST[fmt]).view(np.uint32)) & 0x7FFFFF,
    }[rule]
    return np.where(exponent == 255, 255, np.maximum(exponent - EMAX[fmt] + (fraction > kept), 0)).astype(np.uint8)


def torchao(x, fmt, rule):
    scales, codes = to_mx(x, FORMATS[fmt], BLOCK, ScaleCalculationMode(rule))
    return scales.view(torch.uint8).reshape(-1).numpy(), codes.view(torch.uint8).reshape(scales.numel(), -1).numpy()


def compare(x, scales, codes, fmt, rule, what):
    """Returns how many blocks were compared."""
    theirs, their_codes = torchao(x, fmt, rule)
    amax = x.float().abs().reshape(-1, BLOCK).amax(-1).numpy()
    known = ~np.isinf(amax)
    if codes is not None:
        codes = np.where((np.isnan(amax) | (scales == 0))[:, None], their_codes, codes)  # a block with NaN holds no numbers
    if not (scales[known] == theirs[known]).all():
        sys.exit(f"{what}: {np.count_nonzero(scales[known] != theirs[known])} scales differ under {rule}")
    if codes is not None and not (codes[known] == their_codes[known]).all():
        sys.exit(f"{what}: {np.count_nonzero((codes[known] != their_codes[known]).any(1))} blocks of codes differ under {rule}")
    return int(np.count_nonzero(known))


def golden_blocks(path):
    """Input, scales and codes of a file of golden vectors, or None if its blocks are no rows."""
    raw = path.read_bytes()
    _, _, _, _, dtype, orient, rows, columns, _, scales, codes, _, _ = struct.unpack("<4s12I", raw[:52])
    if orient != 0:
        return None
    start = 64 + rows * columns * (2 if dtype == 0 else 4)
    if dtype == 0:
        x = torch.from_numpy(np.frombuffer(raw, np.int16, rows * columns, 64).copy()).view(torch.bfloat16)
    else:
        x = torch.from_numpy(np.frombuffer(raw, np.float32, rows * columns, 64).copy())
    scale = np.frombuffer(raw, np.uint8, scales, start)
    return x.reshape(rows, columns), scale, np.frombuffer(raw, np.uint8, codes, start + scales).reshape(scales, -1)


def amax_blocks(seed):
    """A block for every finite bf16 amax, with smaller random elements."""
    amax = torch.arange(1, 0x7F80, dtype=torch.int16).view(torch.bfloat16)
    parts = torch.rand(amax.numel(), BLOCK, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    x = (parts * amax.float()[:, None]).bfloat16()
    x[:, 7] = amax
    return x


def compare_with_compressed_tensors():
    """Returns how many amax were compared: those whose scale is above 0, and does not overflow there."""
    from compressed_tensors.quantization.utils.mxfp_utils import generate_mx_scales

    amax = torch.arange(1, 0x7F80, dtype=torch.int16).view(torch.bfloat16)
    ours, theirs = block_scale(amax.float().numpy(), "e2m1", "even"), generate_mx_scales(amax, num_bits=4).float().numpy()
    known = (ours > 0) & np.isfinite(theirs)
    if not (ours[known] == theirs[known]).all():
        sys.exit(f"{np.count_nonzero(ours[known] != theirs[known])} scales differ from compressed-tensors'")
    return int(np.count_nonzero(known))


def nibbles(codes):
    return np.stack([codes & 15, codes >> 4], -1).reshape(codes.shape[0], -1)


def modelopt(x, fmt):
    from modelopt.torch.quantization.qtensor.mxfp4_tensor import MXFP4QTensor
    from modelopt.torch.quantization.qtensor.mxfp8_tensor import MXFP8QTensor

    tensor, scales = MXFP8QTensor.quantize(x) if fmt == "e4m3" else MXFP4QTensor.quantize(x, BLOCK)
    codes = tensor._quantized_data.view(torch.uint8).reshape(scales.numel(), -1).numpy()
    return scales.reshape(-1).numpy(), codes if fmt == "e4m3" else nibbles(codes)


def compare_modelopt(x, scales, codes, fmt):
    """Returns how many blocks were compared. ModelOpt rounds ties of E2M1 down, in magnitude, and gives its zeros a sign; it has no NaN in
    either format."""
    found, found_codes = modelopt(x, fmt)
    amax = x.float().abs().reshape(-1, BLOCK).amax(-1).numpy()
    known = np.isfinite(amax) & (amax > 0) & (scales > 0)
    if not (found[known] == scales[known]).all():
        sys.exit(f"{np.count_nonzero(found[known] != scales[known])} scales of {fmt} differ from ModelOpt's")
    if codes is not None:
        ours = codes if fmt == "e4m3" else nibbles(codes)
        scaled = np.abs(x.double().reshape(-1, BLOCK).numpy()) * 2.0 ** (127 - scales.astype(np.float64))[:, None]
        tie = np.isin(scaled, [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]) & (fmt == "e2m1")
        differ = (ours != found_codes) & known[:, None] & (scaled != 0)
        if (differ & ~(tie & (ours == found_codes + 1))).any():
            sys.exit(f"{np.count_nonzero(differ)} codes of {fmt} differ from ModelOpt's")
    return int(np.count_nonzero(known))


def compare_with_modelopt(golden):
    """Compares every bf16 amax, and golden vectors in bf16, under rceil as MXFP8 and MXFP4."""
    compared = 0
    for fmt in ("e4m3", "e2m1"):
        x = amax_blocks(3)
        compared += compare_modelopt(x, block_scale(x.float().abs().amax(-1).numpy(), fmt, "rceil"), None, fmt)
        vectors = [golden_blocks(path) for path in golden if path.name.startswith(fmt + "_rceil")]
        compared += sum(compare_modelopt(*v, fmt) for v in vectors if v and v[0].dtype == torch.bfloat16)
    return compared


def signal_to_noise(fmt, rule):
    """The signal-to-noise ratio in dB."""
    x = torch.randn(1 << 15, BLOCK, generator=torch.Generator().manual_seed(1)).bfloat16()
    scales, codes = to_mx(x, FORMATS[fmt], BLOCK, ScaleCalculationMode(rule))
    noise = to_dtype(codes, scales, FORMATS[fmt], BLOCK, torch.float32).reshape(x.shape).double() - x.double()
    return 10 * torch.log10(x.double().square().sum() / noise.square().sum()).item()


def main():
    for rule in RULES:
        print(f"{rule}:", ", ".join(f"{fmt} {signal_to_noise(fmt, rule):.1f} dB" for fmt in FORMATS))
    compared = 0
    golden = sorted(Path(sys.argv[1]).glob("*.mxg"))
    for path in golden:
        fmt, _, rest = path.name.partition("_")
        rule = rest.partition("_")[0]
        blocks = golden_blocks(path) if fmt in FORMATS and rule in RULES else None
        if blocks:
            compared += compare(*blocks, fmt, rule, path.name)
    for fmt in FORMATS:
        for rule in RULES:
            x = amax_blocks(3)
            compared += compare(x, block_scale(x.float().abs().amax(-1).numpy(), fmt, rule), None, fmt, rule, f"every amax as {fmt}")
    print(f"scale_rules: {compared} blocks as torchao's, {compare_with_compressed_tensors()} scales as compressed-tensors', ", end="")
    print(f"{compare_with_modelopt(golden)} blocks as ModelOpt's")


if __name__ == "__main__":
    main()
