"""Reads safetensors folders and decodes the MX tensors in them by the package python/mantissa_formats."""
import json
import struct
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))
from mantissa_formats import BLOCK, decode_elements, decode_scales  # noqa: E402

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


def e4m3(codes):
    return decode_elements(codes, "e4m3")


def e5m2(codes):
    return decode_elements(codes, "e5m2")


def e2m1(packed):
    """[..., n] bytes to [..., 2n] values, the low nibble first."""
    return decode_elements(packed, "e2m1")


def scaled(values, scales):
    """Values [..., n] times E8M0 codes [..., n / 32], rounded once to fp32."""
    with np.errstate(over="ignore"):
        return (values * np.repeat(decode_scales(scales), BLOCK, -1)).astype(np.float32)


def two_levels(packed, scales, of_tensor):
    """NVFP4: values [..., n] of packed codes times E4M3 codes [..., n / 16], times or divided by the scale of the tensor."""
    return (e2m1(packed) * np.repeat((e4m3(scales) * of_tensor).astype(np.float32), 16, -1)).astype(np.float32)


PACKED = {".weight_packed": (".weight_scale", e2m1), ".weight": (".weight_scale", e4m3), "_blocks": ("_scales", e2m1)}


TENSOR_SCALES = {True: ".weight_global_scale", False: ".weight_scale_2"}  # divisors are those of compressed-tensors, factors those of ModelOpt
INPUT_SCALES = (".input_global_scale", ".input_scale")


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
        of_tensor = {convention: module + end for convention, end in TENSOR_SCALES.items() if module + end in folder.names()}
        if of_tensor:
            (divides, of_tensor), = of_tensor.items()
            assert folder.dtype(name) == "U8" and folder.dtype(scale) == "F8_E4M3", name
            factor = folder.values(of_tensor).reshape(())
            found[module + ".weight"] = two_levels(folder.codes(name), folder.codes(scale), 1 / factor if divides else factor), scale, False
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
