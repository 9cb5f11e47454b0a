#!/usr/bin/env python3
"""Restates simulated formats and NVFP4 in NumPy and compares: nvfp4.py FILE CODES, which build/*/bin/dump_simulated wrote, bit for bit.

NVFP4 is that of arXiv 2509.25149, appendix C, in the order of operations of TransformerEngine's NVFP4QuantizerRef (custom_recipes/
quantization_nvfp4.py at 1a4d3b0): the amax of the tensor is taken after the Hadamard transform, whose result is rounded to bf16; the scale of a
block is E4M3(amax * (S * (1 / 6))) with S = 2688 / amax of the tensor; elements are those of x * (1 / (scale * (1 / S))), all in fp32. Its kernels
give the codes of zeros their sign, its reference +0; here zeros keep their sign. Where torch and torchao are found, E4M3 scales are held against
torch's conversion, and the signal to noise of NVFP4 against that of torchao's nvfp4_quantize, which divides in another order.

Codes of NVFP4, whose tensor has a scale of 2^n, are held against those of ModelOpt, compressed-tensors and torchao for the same scale of the
tensor. The first two have the same, but for scales of blocks of zeros, and of those that compressed-tensors rounds to zero and replaces.
torchao multiplies by a reciprocal that is rounded, so a tie may go the other way, and its scales begin with 2^-6, the least normal one.
"""
import struct
import sys
from pathlib import Path

import numpy as np

F32 = np.float32
LARGEST_FP32 = np.finfo(np.float32).max
SIGNS = 0x6A88D7E8
RULES = ("rceil", "floor", "flashinfer", "even", "ceil")


def bf16(x):
    """Rounds fp32 to bf16, ties to even; no NaN."""
    bits = x.astype(F32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(F32)


def magnitudes(exponent, mantissa):
    codes = np.arange(1 << (exponent + mantissa))
    codes = codes[: len(codes) - {(4, 3): 1, (5, 2): 4}.get((exponent, mantissa), 0)]
    field, fraction = codes >> mantissa, codes & ((1 << mantissa) - 1)
    significand = np.where(field == 0, fraction, fraction + (1 << mantissa)).astype(np.float64)
    return np.ldexp(significand, np.maximum(field, 1) - ((1 << (exponent - 1)) - 1) - mantissa)


def neighbors(y, table):
    """The elements around each |y|, and how far it is from the lower one to the upper one."""
    below = np.clip(np.searchsorted(table, y, side="right") - 1, 0, len(table) - 2)
    low, high = table[below], table[below + 1]
    return low, high, np.minimum((y - low) / (high - low), 1.0)


def nearest(y, table):
    low, high, rest = neighbors(np.abs(y), table)
    up = (rest > 0.5) | ((rest == 0.5) & (low / (high - low) % 2 == 1))
    return np.copysign(np.where(up, high, low), y)


def at_random(y, table, words):
    low, high, rest = neighbors(np.abs(y), table)
    return np.copysign(np.where((words * 2.0**-32 < rest) | (rest == 1.0), high, low), y)


def philox(counter, key):
    """Philox4x32-10 of Salmon et al. 2011; counter and key as columns of 32-bit words."""
    c, k = [np.uint64(word) for word in counter], [np.uint64(word) for word in key]
    c = list(np.broadcast_arrays(*c))
    mask = np.uint64(0xFFFFFFFF)
    for _ in range(10):
        a, b = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [(b >> np.uint64(32)) ^ c[1] ^ k[0], b & mask, (a >> np.uint64(32)) ^ c[3] ^ k[1], a & mask]
        k = [(k[0] + np.uint64(0x9E3779B9)) & mask, (k[1] + np.uint64(0xBB67AE85)) & mask]
    return np.stack(c)


def words_of(shape, seed, what, first):
    """Element [r, c] draws word n % 4 of counter n / 4, n = first + r * columns + c."""
    number = first + np.arange(shape[0] * shape[1], dtype=np.uint64).reshape(shape)
    index = number // np.uint64(4)
    drawn = philox((index & np.uint64(0xFFFFFFFF), index >> np.uint64(32), what, 5), (seed & 0xFFFFFFFF, seed >> 32))
    return np.take_along_axis(drawn, (number % np.uint64(4)).astype(np.int64)[None], 0)[0].astype(np.float64)


def hadamard(x, length, axis):
    h = np.ones((1, 1))
    while len(h) < length:
        h = np.block([[h, h], [h, -h]])
    signs = np.array([-1.0 if SIGNS >> i & 1 else 1.0 for i in range(length)])
    matrix = signs[:, None] * h
    if axis == 0:
        return hadamard(x.T, length, 1).T
    turned = x.astype(np.float64).reshape(-1, length) @ matrix * (0.25 if length == 16 else np.sqrt(2.0) / 8)
    return bf16(turned.astype(F32)).reshape(x.shape)


def block_amax(x, rows, columns):
    """The amax of the block of each element; blocks at the edges may be short."""
    padded = np.zeros((-(-x.shape[0] // rows) * rows, -(-x.shape[1] // columns) * columns), F32)
    padded[: x.shape[0], : x.shape[1]] = np.abs(x)
    blocks = padded.reshape(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns).max((1, 3))
    return blocks.repeat(rows, 0).repeat(columns, 1)[: x.shape[0], : x.shape[1]]


def e4m3(x):
    return nearest(x.astype(np.float64), magnitudes(4, 3)).astype(F32)


def two_levels(x, rows, columns, table, round_element):
    largest = F32(table[-1])
    with np.errstate(divide="ignore", over="ignore"):
        encode = np.minimum(F32(448) * largest / np.abs(x).max(), LARGEST_FP32)  # S
        decode = F32(1) / encode
        scale = e4m3(np.minimum(block_amax(x, rows, columns) * (encode * (F32(1) / largest)), F32(448)))
        y = x * np.minimum(F32(1) / (scale * decode), LARGEST_FP32)
    element = round_element(np.clip(y, -largest, largest).astype(np.float64))
    return element.astype(F32) * scale * decode


def one_level(x, rows, columns, rule, exponent_bits, mantissa_bits, table, round_element):
    amax = block_amax(x, rows, columns)
    bits = amax.view(np.uint32).astype(np.int64)
    fraction, field = bits & 0x7FFFFF, bits >> 23
    emax = int(np.floor(np.log2(table[-1])))
    kept = {
        "floor": 0x7FFFFF,
        "ceil": 0,
        "even": (1 << 23) - (1 << (22 - mantissa_bits)) - 1,
        "rceil": int(F32(table[-1]).view(np.uint32)) & 0x7FFFFF,
    }[rule]
    power = np.ldexp(1.0, np.clip(field - emax + (fraction > kept), 0, 254) - 127)
    return (round_element(x.astype(np.float64) / power) * power).astype(F32)


def restated(x, case):
    rows, exponent, mantissa, block_rows, block_columns, scale, rule, stochastic, length, axis, what, seed, first = case
    x = np.concatenate([x, np.zeros((rows - x.shape[0], x.shape[1]), F32)])
    if length:
        x = hadamard(x, length, axis)
    table = magnitudes(exponent, mantissa)
    words = words_of(x.shape, seed, what, first) if stochastic else None
    round_element = (lambda y: at_random(y, table, words)) if stochastic else (lambda y: nearest(y, table))
    if scale:
        return two_levels(x, block_rows, block_columns, table, round_element)
    return one_level(x, block_rows, block_columns, RULES[rule], exponent, mantissa, table, round_element)


def cases(raw):
    at = 0
    while at < len(raw):
        rows, columns, *case, _ = struct.unpack_from("<16i", raw, at)
        sizes = rows * columns, case[0] * columns
        x = np.frombuffer(raw, F32, sizes[0], at + 64).reshape(rows, columns)
        result = np.frombuffer(raw, F32, sizes[1], at + 64 + 4 * sizes[0]).reshape(case[0], columns)
        at += 64 + 4 * sum(sizes)
        yield x, result, case


def compare_with_torch():
    try:
        import torch
        from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale
    except ImportError as missing:
        return f"without torchao ({missing})"
    scales = np.abs(np.random.default_rng(1).standard_normal(1 << 18) * 100).astype(F32).clip(0, 448)
    theirs = torch.from_numpy(scales).to(torch.float8_e4m3fn).float().numpy()
    if not (e4m3(scales) == theirs).all():
        sys.exit("nvfp4: E4M3 scales differ from torch's")
    x = bf16(np.random.default_rng(2).standard_normal((256, 1024)).astype(F32))
    table = magnitudes(2, 1)
    ours = two_levels(x, 1, 16, table, lambda y: nearest(y, table))
    tensor = torch.from_numpy(x.copy())
    level = per_tensor_amax_to_scale(tensor.abs().max())
    block, packed = nvfp4_quantize(tensor, 16, level)
    packed = packed.numpy().view(np.uint8)
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(x.shape)
    values = np.where(codes & 8, -1.0, 1.0) * table[codes & 7]
    values = values * block.float().numpy().reshape(256, 64).repeat(16, 1) * level.item()
    noise = [10 * np.log10((x.astype(np.float64) ** 2).sum() / ((of - x.astype(np.float64)) ** 2).sum()) for of in (ours, values)]
    equal = np.isclose(ours, values, rtol=1e-6).mean()
    if equal < 0.99 or abs(noise[0] - noise[1]) > 0.05:
        sys.exit(f"nvfp4: torchao has other values: {equal:.4f} are equal, {noise[0]:.2f} and {noise[1]:.2f} dB")
    return f"{100 * equal:.2f} % of values are torchao's, {noise[0]:.2f} dB here and {noise[1]:.2f} there"


def code_cases(raw):
    at = 0
    while at < len(raw):
        rows, columns, exponent = struct.unpack_from("<3i", raw, at)
        count = rows * columns
        x, at = np.frombuffer(raw, F32, count, at + 12).reshape(rows, columns), at + 12 + 4 * count
        scales, at = np.frombuffer(raw, np.uint8, count // 16, at), at + count // 16
        packed, at = np.frombuffer(raw, np.uint8, count // 2, at), at + count // 2
        yield x, exponent, scales, nibbles(packed)


def nibbles(packed):
    packed = packed.reshape(-1)
    return np.stack([packed & 15, packed >> 4], -1).reshape(-1, 16)


def scale_values(codes):
    return magnitudes(4, 3)[codes].astype(F32)


def restated_codes(x, exponent):
    """Scales and codes: divisions of fp32 decide like the numbers themselves, because ties have few digits."""
    blocks, tensor = x.reshape(-1, 16), F32(2.0**exponent)
    scale = np.maximum(e4m3(np.minimum(np.abs(blocks).max(1) / F32(6) / tensor, F32(448))), F32(2**-9))
    element = nearest(np.clip(blocks / (scale * tensor)[:, None], -6, 6).astype(np.float64), magnitudes(2, 1))
    codes = np.searchsorted(magnitudes(2, 1), np.abs(element)) + 8 * np.signbit(element)
    return np.searchsorted(magnitudes(4, 3), scale), codes


def modelopt_codes(x, tensor):
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    quantized, scales, _ = NVFP4QTensor.quantize(x, 16, None, tensor[0])
    return scales.float().numpy().reshape(-1), nibbles(quantized._quantized_data.numpy().view(np.uint8))


def compressed_tensors_codes(x, tensor):
    import torch
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils.helpers import calculate_qparams

    of_scale = {"scale_dtype": torch.float8_e4m3fn, "zp_dtype": torch.float8_e4m3fn}
    how = QuantizationArgs(num_bits=4, type="float", strategy="tensor_group", group_size=16, symmetric=True, dynamic=False, **of_scale)
    blocks = x.reshape(x.shape[0], -1, 16)
    scales, zeros = calculate_qparams(blocks.amin(-1), blocks.amax(-1), how, global_scale=1 / tensor)
    values = quantize(x, scales, zeros, how, global_scale=1 / tensor).float().numpy().reshape(-1, 16)
    return scales.float().numpy().reshape(-1), np.searchsorted(magnitudes(2, 1), np.abs(values)) + 8 * np.signbit(values)


def torchao_codes(x, tensor):
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

    scales, packed = nvfp4_quantize(x, 16, tensor)
    return scales.float().numpy().reshape(-1), nibbles(packed.numpy().view(np.uint8))


def compare_codes(path):
    """Blocks without numbers count only where they are zeros; a zero may have either sign."""
    found, count = {}, 0
    for x, exponent, scales, codes in code_cases(Path(path).read_bytes()):
        ours = restated_codes(x, exponent)
        if not (ours[0] == scales).all() or not (ours[1] == codes).all():
            sys.exit(f"nvfp4: codes with a tensor's scale of 2^{exponent} are not those restated")
        count += codes.size
        for name, of in (("ModelOpt", modelopt_codes), ("compressed-tensors", compressed_tensors_codes), ("torchao", torchao_codes)):
            try:
                import torch

                theirs, their_codes = of(torch.from_numpy(x.copy()), torch.tensor([2.0**exponent]))
            except ImportError as missing:
                found[name] = str(missing)
                continue
            filled = np.abs(x.reshape(-1, 16)).max(1) > 0
            same_scale = (theirs == scale_values(scales)) | ~filled
            same = (their_codes == codes) | ((codes & 7 == 0) & (their_codes & 7 == 0))
            small = scale_values(scales) < {"ModelOpt": 0, "compressed-tensors": 2**-8, "torchao": 2**-6}[name]
            known = ~small  # scales that they have, too
            total = found.setdefault(name, [0, 0, 0, 0])
            for i, part in enumerate((same_scale[known], same[known])):
                total[2 * i] += np.count_nonzero(part)
                total[2 * i + 1] += part.size
            shares = same[same_scale].mean() if same_scale.any() else 1.0
            right = (same_scale | small).all() and shares >= (0.998 if name == "torchao" else 1.0)
            if not right:
                sys.exit(f"nvfp4: {name} has other codes at 2^{exponent}: {same_scale.mean():.6f} of scales, {same.mean():.6f} of codes are equal")
    shares = [f"{name} {100 * of[0] / of[1]:.3f} % and {100 * of[2] / of[3]:.3f} %" if isinstance(of, list) else f"without {name} ({of})" for name, of in found.items()]
    return f"{count} codes as restated; equal scales and codes: " + ", ".join(shares)


def main():
    count = values = 0
    for x, result, case in cases(Path(sys.argv[1]).read_bytes()):
        expected = restated(x, case)
        different = np.flatnonzero(expected.view(np.uint32) != result.view(np.uint32))
        if len(different):
            i = different[0]
            sys.exit(f"nvfp4: case {count} {case}: {len(different)} values differ, first [{i}]: {result.flat[i]!r}, expected {expected.flat[i]!r}")
        count, values = count + 1, values + result.size
    if not count:
        sys.exit("nvfp4: no cases")
    print(f"nvfp4: {count} cases, {values} values as restated; {compare_with_torch()}")
    print(f"nvfp4: {compare_codes(sys.argv[2])}")


if __name__ == "__main__":
    main()
