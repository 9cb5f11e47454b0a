"""Codecs of the OCP microscaling (MX) formats in NumPy, equal to the program mantissa bit for bit.

A tensor in an MX format is two arrays of uint8: codes of elements, and one scale for each block. A scale code s stands for 2^(s - 127), 255 for NaN
(E8M0). Elements are E4M3 (the "fn" variant), E5M2 or E2M1, whose codes are packed two to a byte along the last dimension, the low nibble first.

    codes, scales = quantize(x, "e4m3")                  # blocks of 1 x 32, rule rceil
    y = dequantize(codes, scales, "e4m3")                # float32

Scale rules, with amax the largest magnitude of a block and E the binary exponent of a number:

    rceil       2^ceil(log2(amax / largest element)): Transformer Engine, cuBLAS, torchao's RCEIL. Nothing saturates.
    floor       2^(E(amax) - E(largest element)): OCP v1.0, torchao's FLOOR. The part above the largest element is clipped.
    ceil        2^(ceil(log2 amax) - E(largest element)): torchao's CEIL.
    even        floor of amax rounded to the bits of an element, half up: compressed-tensors, Quark, torchao's EVEN.
    flashinfer  fp4_quantize of FlashInfer >= 0.3.1 with UE8M0 scales: rceil with its flushes. E2M1 of bfloat16 values alone.
    mse         of floor's scale, half of it and twice it, the one whose elements have the least squared error; of equal ones the smallest. For E4M3
                and E5M2 amax decides: twice floor's scale if amax is more than half a step beyond floor's largest element.

Elements are rounded to the nearest, ties to even, and saturate; zeros keep their sign. A NaN or Inf in a block makes its scale 255 and its values NaN
(but under flashinfer). Every function is pure, takes arrays of any number of leading dimensions and raises ValueError for what it cannot take.
"""
from __future__ import annotations

import enum
from typing import NamedTuple

import numpy as np

__all__ = [
    "BLOCK", "FORMATS", "RULES", "Element", "MxArray", "ScaleCalculationMode", "bf16_values", "block_scales", "decode_elements", "decode_scales", "dequantize",
    "explain_differences", "from_ggml", "from_mlx", "pack", "quantize", "requantize", "row_scales", "swizzle", "to_dtype", "to_ggml", "to_mlx", "to_mx", "unpack",
    "views",
]

BLOCK = 32
NAN_SCALE = 255
RULES = ("rceil", "floor", "ceil", "even", "flashinfer", "mse")


class Element(NamedTuple):
    """An element format: sign, exponent and mantissa, with subnormals. `largest_code` is that of the largest finite magnitude."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    largest_code: int
    nan_code: int  # written for NaN; a format without NaN has its largest code here
    poison_code: int  # every element in a block with scale 255 has it

    @property
    def bias(self) -> int:
        return (1 << (self.exponent_bits - 1)) - 1

    @property
    def sign_bit(self) -> int:
        return 1 << (self.exponent_bits + self.mantissa_bits)

    @property
    def emax(self) -> int:
        """Binary exponent of the largest element."""
        return (self.largest_code >> self.mantissa_bits) - self.bias

    @property
    def packed(self) -> bool:
        """True if two codes share a byte."""
        return self.sign_bit < 0x10

    def values(self) -> np.ndarray:
        """float64 value of every code, [2 * sign_bit]. Infinities are read, never written."""
        code = np.arange(self.sign_bit)
        exponent, mantissa = code >> self.mantissa_bits, code & ((1 << self.mantissa_bits) - 1)
        fraction = mantissa / (1 << self.mantissa_bits)
        value = np.where(exponent > 0, np.ldexp(1.0 + fraction, exponent - self.bias), np.ldexp(fraction, 1 - self.bias))
        value[code > self.largest_code] = np.nan
        if self.name == "e5m2":
            value[self.largest_code + 1] = np.inf
        return np.concatenate([value, -value])


FORMATS = {
    "e4m3": Element("e4m3", 4, 3, 0x7E, 0x7F, 0x7F),
    "e5m2": Element("e5m2", 5, 2, 0x7B, 0x7F, 0x7F),
    "e2m1": Element("e2m1", 2, 1, 0x7, 0x7, 0x0),
}
# Names of other programs.
_ALIASES = {
    "float8_e4m3fn": "e4m3", "fp8_e4m3": "e4m3", "mxfp8": "e4m3", "float8_e5m2": "e5m2", "fp8_e5m2": "e5m2",
    "float4_e2m1fn": "e2m1", "float4_e2m1fn_x2": "e2m1", "fp4_e2m1": "e2m1", "mxfp4": "e2m1",
}


class MxArray(NamedTuple):
    codes: np.ndarray
    scales: np.ndarray


def _element(format) -> Element:
    name = str(format).removeprefix("torch.")
    element = FORMATS.get(_ALIASES.get(name, name))
    if element is None:
        raise ValueError(f"unknown element format {format!r}: one of {', '.join(FORMATS)}")
    return element


def _check_rule(rule: str, element: Element) -> None:
    if rule not in RULES:
        raise ValueError(f"unknown scale rule {rule!r}: one of {', '.join(RULES)}")
    if rule == "flashinfer" and not element.packed:
        raise ValueError("the rule flashinfer is of e2m1")


def _check_block(shape: tuple[int, ...], block: tuple[int, int]) -> None:
    rows, columns = block
    if rows < 1 or columns < 1:
        raise ValueError(f"block {block} is empty")
    if len(shape) < (1 if rows == 1 else 2):
        raise ValueError(f"an array of shape {shape} has no blocks of {rows} x {columns}")
    if shape[-1] % columns or (rows > 1 and shape[-2] % rows):
        raise ValueError(f"shape {shape} is not a multiple of blocks of {rows} x {columns}")


def bf16_values(bits: np.ndarray) -> np.ndarray:
    """float32 values of bfloat16 bits (uint16)."""
    return (np.asarray(bits, np.uint16).astype(np.uint32) << 16).view(np.float32)


def _float32(x) -> np.ndarray:
    """Takes float32, float16, float64 of float32 values, and bfloat16 of ml_dtypes, all exactly."""
    x = np.asarray(x)
    if x.dtype.kind not in "f" and x.dtype.name != "bfloat16":
        raise ValueError(f"cannot quantize {x.dtype}: float32, float16 or bfloat16 (bf16_values() makes values of its bits)")
    with np.errstate(over="ignore"):
        out = np.ascontiguousarray(x, dtype=np.float32)
    if x.dtype == np.float64 and not np.array_equal(out.astype(np.float64), x, equal_nan=True):
        raise ValueError("float64 values that float32 does not have would be rounded twice; round them to float32 first")
    return out.reshape(x.shape)


def _blocks(x: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """[..., R, C] as [..., R / rows, rows, C / columns, columns]; a vector counts as one row."""
    rows, columns = block
    lead = x.shape[:-2] if x.ndim > 1 else ()
    height = x.shape[-2] if x.ndim > 1 else 1
    return x.reshape(*lead, height // rows, rows, x.shape[-1] // columns, columns)


def _spread(scales: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """One scale for each element, from one for each block."""
    rows, columns = block
    out = np.repeat(scales, columns, axis=-1)
    return np.repeat(out, rows, axis=-2) if rows > 1 else out


def block_scales(amax: np.ndarray, format="e4m3", rule: str = "rceil") -> np.ndarray:
    """Scale codes (uint8) of blocks whose largest magnitudes are `amax` (float32). NaN and Inf give 255; under flashinfer Inf gives 254, and NaN is
    that of a block without numbers. A largest magnitude of exactly 6 * 2^-126 under flashinfer gives 1, where hardware may give 0. ValueError: mse of
    e2m1, for which quantize() looks at all elements."""
    element = _element(format)
    _check_rule(rule, element)
    if rule == "mse" and element.packed:
        raise ValueError("under the rule mse all elements of a block of e2m1 decide about its scale, not the largest one")
    bits = np.abs(np.asarray(amax, np.float32)).view(np.uint32)
    exponent, fraction = (bits >> 23).astype(np.int64), bits & 0x7FFFFF
    largest_fraction = (element.largest_code & ((1 << element.mantissa_bits) - 1)) << (23 - element.mantissa_bits)
    half_step = 1 << (22 - element.mantissa_bits)
    kept = {"floor": 0x7FFFFF, "ceil": 0, "even": 0x800000 - half_step - 1, "mse": largest_fraction + half_step}.get(rule, largest_fraction)
    scale = np.clip(exponent - element.emax + (fraction > kept), 0, 254)
    scale = np.where(bits >= 0x7F800000, NAN_SCALE, scale)
    if rule == "flashinfer":
        scale = np.where(bits == 0x7F800000, 254, np.where(bits < ((element.emax + 1) << 23 | largest_fraction), 0, scale))
    return scale.astype(np.uint8)


def _searched_scales(magnitude: np.ndarray, element: Element) -> np.ndarray:
    """Scale codes under mse of _blocks() of magnitudes. Errors are compared at an amax of 4 to 8 by their differences from those at floor's scale, which
    are exact in float64, and so are sums of up to 2^17 of them."""
    amax = magnitude.max(axis=(-3, -1), keepdims=True)
    finite = np.isfinite(amax)
    numbers = np.where(finite, magnitude, np.float32(0)).astype(np.float64)
    largest = np.where(finite & (amax > 0), amax, np.float32(1)).astype(np.float64)
    floor = np.frexp(largest)[1] - 1 - element.emax
    x = np.ldexp(numbers, -floor)
    values = element.values()

    def rounded(exponent):
        return np.ldexp(values[_encode(x, np.full(x.shape, 127 + exponent), element)], exponent)

    at_floor = rounded(0)
    errors = [((q - at_floor) * (q + at_floor - 2 * x)).sum(axis=(-3, -1)) for q in (rounded(-1), at_floor, rounded(1))]
    scale = floor[..., 0, :, 0] + 127 - 1 + np.argmin(errors, axis=0)  # the first of equal ones
    scale = np.where(amax[..., 0, :, 0] > 0, np.clip(scale, 0, 254), 0)
    return np.where(finite[..., 0, :, 0], scale, NAN_SCALE).astype(np.uint8)


def _encode(x: np.ndarray, scale: np.ndarray, element: Element) -> np.ndarray:
    """Codes of x * 2^(127 - scale), finite x, every step exact in float64."""
    y = np.ldexp(np.abs(x).astype(np.float64), 127 - scale.astype(np.int64))
    binade = np.where(y > 0, np.maximum(np.frexp(y)[1] - 1, 1 - element.bias), 1 - element.bias)
    steps = np.rint(np.ldexp(y, element.mantissa_bits - binade)).astype(np.int64)  # ties to even
    code = ((binade.astype(np.int64) + element.bias - 1) << element.mantissa_bits) + steps
    return np.minimum(code, element.largest_code) | np.where(np.signbit(x), element.sign_bit, 0)


def quantize(x, format="e4m3", *, rule: str = "rceil", block: tuple[int, int] = (1, BLOCK)) -> MxArray:
    """Codes and scales of x [..., R, C] in blocks of rows x columns: (1, 32) along rows, (32, 1) along columns, (32, 32) tiles.

    x: float32, float16, bfloat16 (ml_dtypes), or float64 that holds values of float32. Returns codes, uint8 [..., R, C], for E2M1
    [..., R, C / 2], and scales, uint8 [..., R / rows, C / columns]. ValueError: a shape that is no multiple of the blocks; an unknown format or rule;
    flashinfer with values that bfloat16 does not have.
    """
    element = _element(format)
    _check_rule(rule, element)
    values = _float32(x)
    _check_block(values.shape, block)
    if element.packed and values.shape[-1] % 2:
        raise ValueError(f"shape {values.shape}: codes of four bits need an even number of columns")
    flashinfer = rule == "flashinfer"
    if flashinfer and (values.view(np.uint32) & 0xFFFF)[~np.isnan(values)].any():
        raise ValueError("the rule flashinfer takes values of bfloat16")
    magnitude = np.abs(_blocks(values, block))
    if flashinfer:
        none = np.isnan(magnitude).all(axis=(-3, -1))
        amax = np.where(none, np.float32(np.nan), np.where(np.isnan(magnitude), np.float32(0), magnitude).max(axis=(-3, -1)))
    else:
        amax = magnitude.max(axis=(-3, -1))  # NaN wins
    scales = _searched_scales(magnitude, element) if rule == "mse" and element.packed else block_scales(amax, element.name, rule)
    if values.ndim == 1:
        scales = scales[0]
    each = _spread(scales, block)
    finite = np.isfinite(values)
    if flashinfer:
        flushed = (np.abs(values) < np.float32(2.0**-126)) | (each == 0) | (each == 254)
        number = np.where(finite & ~flushed, values, np.copysign(np.float32(0), values))
        codes = np.where(finite & (each != NAN_SCALE), _encode(number, each, element), element.nan_code)
    else:
        number = np.where(finite, values, np.float32(0))
        codes = np.where(each == NAN_SCALE, element.poison_code, _encode(number, each, element))
    codes = codes.astype(np.uint8)
    return MxArray(pack(codes) if element.packed else codes, scales)


def decode_scales(scales: np.ndarray) -> np.ndarray:
    """float64 values of scale codes, NaN for 255."""
    scales = np.asarray(scales)
    return np.where(scales == NAN_SCALE, np.nan, np.ldexp(1.0, scales.astype(np.int64) - 127))


def decode_elements(codes: np.ndarray, format="e4m3") -> np.ndarray:
    """float64 values of codes, without a scale; E2M1 codes are packed: [..., n] gives [..., 2n]."""
    element = _element(format)
    codes = np.asarray(codes, np.uint8)
    return element.values()[unpack(codes) if element.packed else codes]


def dequantize(codes: np.ndarray, scales: np.ndarray, format="e4m3", *, rule: str = "rceil", block: tuple[int, int] = (1, BLOCK)) -> np.ndarray:
    """float32 values: element times 2^(scale - 127), exact or Inf; NaN where the scale is 255. Under flashinfer -0 becomes 0, as in its
    mxfp4_dequantize_host. ValueError: shapes that do not fit each other."""
    element = _element(format)
    _check_rule(rule, element)
    values = decode_elements(codes, element.name)
    scales = np.asarray(scales, np.uint8)
    _check_block(values.shape, block)
    wanted = (*values.shape[:-2], values.shape[-2] // block[0], values.shape[-1] // block[1]) if values.ndim > 1 else (values.shape[-1] // block[1],)
    if scales.shape != wanted:
        raise ValueError(f"scales have shape {scales.shape}; codes of these blocks have {wanted}")
    if rule == "flashinfer":
        values = np.where(values == 0, 0.0, values)
    with np.errstate(over="ignore", invalid="ignore"):
        return (values * decode_scales(_spread(scales, block))).astype(np.float32)


def requantize(codes, scales, format="e4m3", *, block=(1, BLOCK), to_block=(BLOCK, 1), rule: str = "rceil", to_format=None) -> MxArray:
    """The values of codes and scales, quantized in other blocks or another format. For FP8 this is the columnwise copy of an operand that training
    derives from its rowwise codes."""
    return quantize(dequantize(codes, scales, format, rule=rule, block=block), to_format or format, rule=rule, block=to_block)


def pack(nibbles: np.ndarray) -> np.ndarray:
    """Codes of four bits [..., 2n], one a byte, as [..., n] bytes, the even column in the low nibble."""
    nibbles = np.asarray(nibbles, np.uint8)
    if nibbles.ndim == 0 or nibbles.shape[-1] % 2 or (nibbles > 15).any():
        raise ValueError("pack() takes an even number of codes below 16")
    return nibbles[..., 0::2] | nibbles[..., 1::2] << 4


def unpack(packed: np.ndarray) -> np.ndarray:
    """The inverse of pack()."""
    packed = np.asarray(packed, np.uint8)
    return np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1)


def row_scales(scales: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """Scales of blocks of 1 x columns that give the same values, for programs that know no tiles: a tile's scale for each of its rows."""
    return np.repeat(np.asarray(scales, np.uint8), block[0], axis=-2)


def to_ggml(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """E2M1 codes [..., C / 2] and scales [..., C / 32] as blocks of ggml's type MXFP4: uint8 [..., C / 32 * 17], a scale, then byte j with element
    j in its low and element j + 16 in its high nibble. ggml reads scale 255 as 2^128 and not as NaN: ValueError."""
    codes, scales = np.asarray(codes, np.uint8), np.asarray(scales, np.uint8)
    if codes.shape[-1] % 16 or scales.shape != (*codes.shape[:-1], codes.shape[-1] // 16):
        raise ValueError(f"codes {codes.shape} and scales {scales.shape} are not those of blocks of 1 x 32")
    if (scales == NAN_SCALE).any():
        raise ValueError("ggml has no scale for NaN")
    nibbles = unpack(codes).reshape(*scales.shape, 2, 16)
    blocks = np.concatenate([scales[..., None], nibbles[..., 0, :] | nibbles[..., 1, :] << 4], -1)
    return blocks.reshape(*codes.shape[:-1], -1)


def from_ggml(blocks: np.ndarray) -> MxArray:
    """The inverse of to_ggml(): codes and scales of bytes [..., n * 17]."""
    blocks = np.asarray(blocks, np.uint8)
    if blocks.shape[-1] % 17:
        raise ValueError(f"{blocks.shape[-1]} bytes are no blocks of 17")
    each = blocks.reshape(*blocks.shape[:-1], -1, 17)
    nibbles = np.concatenate([each[..., 1:] & 15, each[..., 1:] >> 4], -1)
    return MxArray(pack(nibbles.reshape(*blocks.shape[:-1], -1)), each[..., 0].copy())


def to_mlx(codes: np.ndarray, scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`weight` (uint32, four bytes of codes each, no byte changed) and `scales` of MLX's modes mxfp4 and mxfp8; blocks of 1 x 32."""
    codes, scales = np.ascontiguousarray(codes, np.uint8), np.asarray(scales, np.uint8)
    if codes.shape[-1] % 16:
        raise ValueError(f"codes {codes.shape} are not those of blocks of 1 x 32")
    return codes.view("<u4"), scales


def from_mlx(weight: np.ndarray, scales: np.ndarray) -> MxArray:
    """The inverse of to_mlx()."""
    return MxArray(np.ascontiguousarray(weight, "<u4").view(np.uint8), np.asarray(scales, np.uint8))


def swizzle(scales: np.ndarray) -> np.ndarray:
    """Scales [I, J] in the 128 x 4 layout of cuBLASLt and tcgen05, padded with 0: uint8 [ceil(I / 128) * ceil(J / 4) * 512]."""
    scales = np.asarray(scales, np.uint8)
    if scales.ndim != 2:
        raise ValueError(f"swizzle() takes [I, J], got {scales.shape}")
    rows, columns = -(-scales.shape[0] // 128) * 128, -(-scales.shape[1] // 4) * 4
    padded = np.zeros((rows, columns), np.uint8)
    padded[: scales.shape[0], : scales.shape[1]] = scales
    return padded.reshape(rows // 128, 4, 32, columns // 4, 4).transpose(0, 3, 2, 1, 4).reshape(-1)


def views(codes: np.ndarray, scales: np.ndarray, format="e4m3") -> MxArray:
    """Returns the same bytes as arrays of ml_dtypes (float8_e4m3fn, float8_e5m2, float8_e8m0fnu), which has no packed E2M1. ImportError without it."""
    import ml_dtypes

    element = _element(format)
    if element.packed:
        raise ValueError("ml_dtypes holds one E2M1 element a byte; these codes are packed")
    dtype = ml_dtypes.float8_e4m3fn if element.name == "e4m3" else ml_dtypes.float8_e5m2
    return MxArray(np.asarray(codes, np.uint8).view(dtype), np.asarray(scales, np.uint8).view(ml_dtypes.float8_e8m0fnu))


class ScaleCalculationMode(enum.Enum):
    """torchao's names of the rules."""

    FLOOR = "floor"
    CEIL = "ceil"
    EVEN = "even"
    RCEIL = "rceil"


def to_mx(data, elem_dtype="float8_e4m3fn", block_size: int = BLOCK, scaling_mode: ScaleCalculationMode = ScaleCalculationMode.FLOOR):
    """quantize() by torchao's name, order of results and default: (scales, codes) of blocks along the last dimension."""
    codes, scales = quantize(data, elem_dtype, rule=ScaleCalculationMode(scaling_mode).value, block=(1, block_size))
    return scales, codes


def to_dtype(data, scales, elem_dtype="float8_e4m3fn", block_size: int = BLOCK, target_dtype=np.float32) -> np.ndarray:
    """dequantize() by torchao's name and order of arguments; target_dtype: any that NumPy casts to, bfloat16 of ml_dtypes too."""
    return dequantize(data, scales, elem_dtype, block=(1, block_size)).astype(target_dtype)


def explain_differences(x, first: MxArray, second: MxArray, format="e4m3", *, block: tuple[int, int] = (1, BLOCK)) -> dict[str, int]:
    """Counts the elements of x whose codes differ between two encodings, by the first reason that holds:

    scale_off_by_one, scale    the scales of the block differ, by one or by more
    sign_of_zero               both are zero
    saturation                 x lies beyond the largest element
    tie                        x lies in the middle between the two: another rule for ties
    flush                      one is zero, the other is not
    other
    """
    element = _element(format)
    values = _float32(x)
    _check_block(values.shape, block)
    spread = [_spread(np.asarray(each.scales).astype(np.int64), block) for each in (first, second)]
    codes = [(unpack(each.codes) if element.packed else np.asarray(each.codes)).astype(np.int64) for each in (first, second)]
    if codes[0].shape != values.shape or codes[1].shape != values.shape or spread[0].shape != values.shape or spread[1].shape != values.shape:
        raise ValueError(f"codes and scales are not those of an array of shape {values.shape}")
    left = codes[0] != codes[1]
    table = element.values()
    with np.errstate(invalid="ignore", over="ignore"):
        y = np.abs(np.ldexp(values.astype(np.float64), 127 - spread[0]))
        magnitudes = [np.abs(table[code]) for code in codes]
        reasons = {
            "scale_off_by_one": np.abs(spread[0] - spread[1]) == 1,
            "scale": spread[0] != spread[1],
            "sign_of_zero": (magnitudes[0] == 0) & (magnitudes[1] == 0),
            "saturation": y > np.abs(table[element.largest_code]),
            "tie": y * 2 == magnitudes[0] + magnitudes[1],
            "flush": (magnitudes[0] == 0) | (magnitudes[1] == 0),
            "other": np.ones_like(left),
        }
    counts = {}
    for name, holds in reasons.items():
        counts[name] = int(np.count_nonzero(left & holds))
        left = left & ~holds
    return counts
