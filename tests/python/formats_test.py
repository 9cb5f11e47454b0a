"""The package python/mantissa_formats against golden vectors and worked examples. Exit code 77 without NumPy."""
import json
import struct
import sys
import unittest
import zlib
from pathlib import Path

try:
    import numpy as np
except ImportError:
    print("SKIPPED: no NumPy (package python3-numpy)")
    sys.exit(77)

TESTS = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(TESTS.parent / "python"))
import mantissa_formats as mx  # noqa: E402

FORMATS = ("e4m3", "e5m2", "e2m1")
MODES = ("floor", "rceil", "flashinfer", "even", "ceil", "mse")
BLOCKS = ((1, 32), (32, 1), (32, 32))


def golden(path):
    """Input, scales, codes, dequantized and swizzled arrays of one case; None for what it lacks."""
    raw = path.read_bytes()
    magic, version, fmt, mode, dtype, orient, rows, columns, flags, scales, codes, swizzled, crc = struct.unpack("<4s12I", raw[:52])
    payload, start = raw[64:], rows * columns * (2 if dtype == 0 else 4)
    assert magic == b"MXG1" and version == 1 and zlib.crc32(payload) == crc, path
    x = mx.bf16_values(np.frombuffer(payload, "<u2", rows * columns)) if dtype == 0 else np.frombuffer(payload, "<f4", rows * columns)
    block = BLOCKS[orient]
    scale = np.frombuffer(payload, np.uint8, scales, start).reshape(rows // block[0], columns // block[1])
    code = np.frombuffer(payload, np.uint8, codes, start + scales).reshape(rows, -1)
    start += scales + codes
    dequantized = np.frombuffer(payload, "<f4", rows * columns, start).reshape(rows, columns) if flags & 1 else None
    start += 4 * rows * columns if flags & 1 else 0
    layout = np.frombuffer(payload, np.uint8, swizzled, start) if flags & 2 else None
    return FORMATS[fmt], MODES[mode], block, x.reshape(rows, columns), scale, code, dequantized, layout


def same_bits(a, b):
    return bool(((a.view(np.uint32) == b.view(np.uint32)) | (np.isnan(a) & np.isnan(b))).all())


def wide(seed, shape, spread=40):
    """Values of bfloat16 of many binades, with zeros of both signs, NaN and Inf in some blocks."""
    random = np.random.default_rng(seed)
    x = np.ldexp(random.standard_normal(shape), random.integers(-spread, spread, shape)).astype(np.float32)
    x[random.random(shape) < 0.05] = -0.0
    return mx.bf16_values((x.view(np.uint32) >> 16).astype(np.uint16))


class Golden(unittest.TestCase):
    def test_every_case_has_the_bits(self):
        cases = sorted((TESTS / "golden").glob("*.mxg"))
        self.assertGreater(len(cases), 30)
        for path in cases:
            format, rule, block, x, scales, codes, dequantized, layout = golden(path)
            with self.subTest(path.name):
                found = mx.quantize(x, format, rule=rule, block=block)
                np.testing.assert_array_equal(found.scales, scales)
                np.testing.assert_array_equal(found.codes, codes)
                if dequantized is not None:
                    self.assertTrue(same_bits(mx.dequantize(codes, scales, format, rule=rule, block=block), dequantized))
                if layout is not None:
                    np.testing.assert_array_equal(mx.swizzle(scales if block != (32, 1) else scales.T), layout)

    def test_worked_examples(self):
        examples = json.loads((TESTS / "golden/worked_examples.json").read_text())
        self.assertGreater(len(examples), 10)
        for example in examples:
            with self.subTest(example["title"]):
                count = len(example["input"])
                x = np.zeros((1, 32), np.float32)
                x[0, :count] = [float(each) for each in example["input"]]
                codes, scales = mx.quantize(x, example["fmt"], rule=example["mode"])
                each = mx.unpack(codes) if example["fmt"] == "e2m1" else codes
                self.assertEqual(scales[0, 0], example["scale_code"])
                self.assertEqual([hex(code) for code in each[0, :count]], [hex(int(code, 16)) for code in example["codes"]])
                found = mx.dequantize(codes, scales, example["fmt"], rule=example["mode"])[0, :count]
                self.assertTrue(same_bits(found, np.array([float(each) for each in example["dequant"]], np.float32)))


class Properties(unittest.TestCase):
    def test_a_second_pass_changes_no_value(self):
        for format in FORMATS:
            for rule in ("rceil", "floor", "even", "ceil", "mse"):
                x = wide(1, (64, 128), 20)
                once = mx.dequantize(*mx.quantize(x, format, rule=rule), format)
                twice = mx.dequantize(*mx.quantize(once, format, rule=rule), format)
                self.assertTrue(same_bits(once, twice), (format, rule))

    def test_mse_is_the_best_of_neighboring_scales(self):
        """E2M1 in any blocks, fp32 values, and sums of exact differences."""
        random = np.random.default_rng(10)
        x = np.concatenate([random.standard_normal((64, 64)), random.integers(0, 65, (64, 64)) / 16 * np.where(random.random((64, 64)) < 0.9, 0.25, 1)])
        x = x.astype(np.float32)
        values = mx.FORMATS["e2m1"].values()
        chosen = set()
        for block in BLOCKS:
            scales = mx.quantize(x, "e2m1", rule="mse", block=block).scales.astype(int)
            floor = mx.quantize(x, "e2m1", rule="floor", block=block).scales.astype(int)
            each = mx._spread(floor, block)
            y = np.abs(np.ldexp(x.astype(np.float64), 127 - each))
            def nearest(step):
                grid = values[:8] * 2.0**step
                return grid[np.abs(y[..., None] - grid).argmin(-1)]
            errors = np.stack([mx._blocks((nearest(step) - nearest(0)) * (nearest(step) + nearest(0) - 2 * y), block).sum(axis=(-3, -1)) for step in (-1, 0, 1)])
            np.testing.assert_array_equal(scales - floor, errors.argmin(0) - 1)
            chosen.update((scales - floor).ravel().tolist())
        self.assertEqual(chosen, {-1, 0, 1})

    def test_leading_dimensions_are_matrices(self):
        x = wide(2, (3, 64, 96))
        for block in BLOCKS:
            whole = mx.quantize(x, "e2m1", block=block)
            for i in range(3):
                one = mx.quantize(x[i], "e2m1", block=block)
                np.testing.assert_array_equal(whole.codes[i], one.codes)
                np.testing.assert_array_equal(whole.scales[i], one.scales)
        row = mx.quantize(x[0, 0], "e4m3")
        np.testing.assert_array_equal(row.codes, mx.quantize(x[0], "e4m3").codes[0])
        self.assertEqual(row.scales.shape, (3,))
        self.assertTrue(same_bits(mx.dequantize(*row), mx.dequantize(*mx.quantize(x[0]))[0]))

    def test_columns_are_rows_of_the_transpose(self):
        x = wide(3, (96, 64))
        rows, columns = mx.quantize(x.T.copy(), "e5m2"), mx.quantize(x, "e5m2", block=(32, 1))
        np.testing.assert_array_equal(columns.codes, rows.codes.T)
        np.testing.assert_array_equal(columns.scales, rows.scales.T)

    def test_a_tile_is_rows_of_its_scale(self):
        codes, scales = mx.quantize(wide(4, (64, 64), 3), "e4m3", block=(32, 32))
        tiles = mx.dequantize(codes, scales, block=(32, 32))
        self.assertTrue(same_bits(tiles, mx.dequantize(codes, mx.row_scales(scales, (32, 32)))))

    def test_requantized_columns_are_those_of_the_values(self):
        x = wide(5, (64, 64), 5)
        rows = mx.quantize(x)
        found = mx.requantize(*rows)
        expected = mx.quantize(mx.dequantize(*rows), block=(32, 1))
        np.testing.assert_array_equal(found.codes, expected.codes)
        np.testing.assert_array_equal(found.scales, expected.scales)

    def test_packing_goes_back_and_forth(self):
        nibbles = np.random.default_rng(6).integers(0, 16, (5, 64), dtype=np.uint8)
        packed = mx.pack(nibbles)
        self.assertEqual(packed[0, 0], nibbles[0, 0] | nibbles[0, 1] << 4)
        np.testing.assert_array_equal(mx.unpack(packed), nibbles)

    def test_blocks_of_ggml(self):
        codes, scales = mx.quantize(wide(7, (4, 96)), "e2m1")
        blocks = mx.to_ggml(codes, scales)
        self.assertEqual(blocks.shape, (4, 51))
        self.assertEqual(blocks[2, 17], scales[2, 1])
        element = mx.unpack(codes)
        self.assertEqual(blocks[2, 17 + 1 + 3], element[2, 32 + 3] | element[2, 32 + 19] << 4)
        back = mx.from_ggml(blocks)
        np.testing.assert_array_equal(back.codes, codes)
        np.testing.assert_array_equal(back.scales, scales)

    def test_words_of_mlx_are_the_bytes(self):
        for format, words in (("e2m1", 8), ("e4m3", 16)):
            codes, scales = mx.quantize(wide(8, (4, 64)), format)
            weight, same = mx.to_mlx(codes, scales)
            self.assertEqual(weight.shape, (4, words))
            self.assertEqual(weight.tobytes(), codes.tobytes())
            np.testing.assert_array_equal(mx.from_mlx(weight, same).codes, codes)

    def test_names_of_torchao(self):
        x = wide(9, (8, 64))
        scales, codes = mx.to_mx(x, "float4_e2m1fn_x2", scaling_mode=mx.ScaleCalculationMode.EVEN)
        expected = mx.quantize(x, "e2m1", rule="even")
        np.testing.assert_array_equal(codes, expected.codes)
        np.testing.assert_array_equal(scales, expected.scales)
        self.assertTrue(same_bits(mx.to_dtype(codes, scales, "fp4_e2m1"), mx.dequantize(*expected, "e2m1")))


class Differences(unittest.TestCase):
    def reasons(self, x, a, b, format="e2m1"):
        return {name: count for name, count in mx.explain_differences(x, a, b, format).items() if count}

    def block(self, **places):
        x = np.zeros((1, 32), np.float32)
        for place, value in places.items():
            x[0, int(place[1:])] = value
        return x

    def changed(self, encoded, place, nibble):
        codes = mx.unpack(encoded.codes)
        codes[0, place] = nibble
        return mx.MxArray(mx.pack(codes), encoded.scales)

    def test_each_reason_is_told(self):
        x = self.block(_0=6, _1=2.5, _2=0.2, _3=-0.0, _4=3.2)
        right = mx.quantize(x, "e2m1")
        self.assertEqual(self.reasons(x, right, right), {})
        self.assertEqual(self.reasons(x, right, self.changed(right, 1, 5)), {"tie": 1})
        self.assertEqual(self.reasons(x, right, self.changed(right, 2, 1)), {"flush": 1})
        self.assertEqual(self.reasons(x, right, self.changed(right, 3, 0)), {"sign_of_zero": 1})
        self.assertEqual(self.reasons(x, right, self.changed(right, 4, 6)), {"other": 1})
        doubled = mx.quantize(x * 2, "e2m1")
        self.assertEqual(self.reasons(x, right, mx.MxArray(self.changed(right, 1, 2).codes, doubled.scales)), {"scale_off_by_one": 1})
        self.assertEqual(self.reasons(x, right, mx.MxArray(self.changed(right, 1, 2).codes, doubled.scales + 3)), {"scale": 1})
        clipped = self.block(_0=7)
        floor = mx.quantize(clipped, "e2m1", rule="floor")
        self.assertEqual(self.reasons(clipped, floor, self.changed(floor, 0, 6)), {"saturation": 1})


class Refusals(unittest.TestCase):
    def test_what_cannot_be_taken_is_named(self):
        x = np.zeros((32, 64), np.float32)
        for wrong, said in [
            (lambda: mx.quantize(x, "e3m2"), "unknown element format 'e3m2'"),
            (lambda: mx.quantize(x, rule="round"), "unknown scale rule 'round'"),
            (lambda: mx.quantize(x, rule="flashinfer"), "flashinfer is of e2m1"),
            (lambda: mx.block_scales(x, "e2m1", "mse"), "all elements of a block"),
            (lambda: mx.quantize(x + np.float32(1.0000001), "e2m1", rule="flashinfer"), "values of bfloat16"),
            (lambda: mx.quantize(x[:, :33]), "not a multiple"),
            (lambda: mx.quantize(x[:20], block=(32, 1)), "not a multiple"),
            (lambda: mx.quantize(x[0], block=(32, 1)), "has no blocks"),
            (lambda: mx.quantize(x.astype(np.int32)), "cannot quantize int32"),
            (lambda: mx.quantize(x + 0.1), "rounded twice") if (x + 0.1).dtype == np.float64 else (lambda: mx.quantize(np.full((1, 32), 0.1)), "rounded twice"),
            (lambda: mx.dequantize(np.zeros((32, 64), np.uint8), np.zeros((32, 3), np.uint8)), "scales have shape"),
            (lambda: mx.pack(np.full((2,), 16, np.uint8)), "below 16"),
            (lambda: mx.to_ggml(np.zeros((1, 16), np.uint8), np.full((1, 1), 255, np.uint8)), "no scale for NaN"),
            (lambda: mx.from_ggml(np.zeros(16, np.uint8)), "no blocks of 17"),
        ]:
            with self.assertRaisesRegex(ValueError, said):
                wrong()


if __name__ == "__main__":
    unittest.main()
