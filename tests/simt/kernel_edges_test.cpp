// Shapes that the cases of all backends leave out, and operands that begin anywhere: odd blocks and widths, more experts than a block has
// threads, more choices than a warp has lanes, and nothing at all.
#include <cmath>
#include <limits>

#include "kernel_backends.h"
#include "kernel_cases_dense.h"
#include "kernel_cases_heads.h"
#include "kernel_cases_moe.h"
#include "quantized_matrices.h"

namespace mantissa::test::kernel_edges_test {

class KernelEdges : public OnAllBackends {
 protected:
  // Expects that `run` gives on each backend what it gives on the reference, wherever its operands begin.
  template <class Run>
  void expect_as_reference(const std::string& what, const Run& run) {
    SCOPED_TRACE(what);
    Operands expected(reference(), Dtype::bf16);
    run(expected);
    for (Backend* device : tested()) {
      for (const Operands::Memory memory : {Operands::Memory::aligned, Operands::Memory::misaligned}) {
        Operands actual(*device, Dtype::bf16, memory);
        run(actual);
        for (size_t i = 0; i < expected.results().size(); ++i) {
          const auto& [name, wanted, unused] = expected.results()[i];
          const auto& [same_name, found, tolerance] = actual.results()[i];
          EXPECT_TRUE(tolerance.bf16 == 0 ? same_bits(found, wanted) : close(found, wanted, tolerance.bf16)) << name;
        }
        actual.expect_margins_untouched();
      }
    }
  }
};

// Sums take several rounds of a block, or pieces of rows that are not whole.
TEST_F(KernelEdges, LongSumsAreWhole) {
  expect_as_reference("product", [](Operands& o) {
    const Tensor a = o.input({70, 100}), b = o.input({66, 100});
    o.device().run(Gemm{.a = {.value = a},
                        .b = {.value = b, .transposed = true},
                        .out = o.output_of(Dtype::f32, "out", {70, 66}, kStatSums),
                        .accumulate = false});
  });
  expect_as_reference("sum", [](Operands& o) {
    o.device().run(Sum{.x = o.input_of(Dtype::f32, {3000}), .out = o.output_of(Dtype::f64, "out", {1}, {1e-12, 1e-12}), .factor = 0.3});
  });
  for (const int64_t rows : {1, 64, 65, 200}) {
    expect_as_reference(text("sum of ", rows, " rows"), [&](Operands& o) {
      o.device().run(SumRows{.x = o.input({rows, 37}), .out = o.output_of(Dtype::f32, "out", {37}, kStatSums), .accumulate = false});
    });
  }
}

// Ranks before and behind have targets, too, down to those beside the columns here.
TEST_F(KernelEdges, LogitsOfTargetsAreThoseOfTheRankThatHasThem) {
  const std::vector<double> targets = {0, 31, 32, 63, 64, 95, 40, -100};
  expect_as_reference("share", [&](Operands& o) {
    o.device().run(CrossEntropyShare{.logits = o.input({8, 32}, 1.0, 3.0),
                                     .targets = o.given(Dtype::i32, {8}, targets),
                                     .sums = o.output_of(Dtype::f32, "sums", {8, 2}, kStatSums),
                                     .first = 32,
                                     .vocab = 96});
  });
}

// The host draws 2^22 elements at once: parts of rows, some whole rows, or parts of the whole matrix.
TEST_F(KernelEdges, RandomNumbersOfSeveralPiecesAreThoseOfTheirPlaces) {
  constexpr RngKey kKey{.seed = 9, .stream = RngStream::init};
  constexpr int64_t kPiece = int64_t{1} << 22, kFirst = 11;
  for (const auto& [rows, columns, stride] :
       {std::array<int64_t, 3>{2, kPiece + 5, kPiece + 12}, {1500, 3000, 3007}, {1500, 3000, 3000}, {1, 2 * kPiece + 3, 0}}) {
    for (Backend* device : tested()) {
      const Tensor out = empty(*device, Dtype::f32, {rows, columns});
      device->run(RandomNormal{.out = out, .key = kKey, .what = 1, .first_index = kFirst, .std = 2.0, .row_stride = stride});
      const std::vector<float> drawn = to_host<float>(out);
      for (int64_t row = 0; row < rows; ++row) {
        for (const int64_t column : {int64_t{0}, columns / 2, kPiece - 1, kPiece, 2 * kPiece, columns - 1}) {
          if (column >= columns) continue;
          const auto index = static_cast<uint64_t>(kFirst + row * stride + column);
          const double expected = 2.0 * static_cast<double>(random_normal(kKey, 1, index));
          ASSERT_EQ(drawn[static_cast<size_t>(row * columns + column)], static_cast<float>(expected)) << row << ", " << column;
        }
      }
    }
  }
}

// Pieces of rows that are not whole, and rows for one pass, for two, for a warp and for a block.
TEST_F(KernelEdges, NormsHaveRowsOfAnyLength) {
  for (const int64_t columns : {24, 250, 256, 264, 768, 1000, 1032, 1536, 1544, 2048, 2056, 4104, 6152, 8200}) {
    for (const int64_t rows : {1, 39, 64}) {
      if (rows != 39 && columns != 250 && columns != 264) continue;
      expect_as_reference(text("norms ", named({rows, columns})), [&](Operands& o) {
        if (columns <= 1032) rms_norm_case(o, rows, columns, false), layer_norm_case(o, rows, columns, rows == 39, rows == 64);
        rms_norm_backward_case(o, rows, columns, rows == 39);
        layer_norm_backward_case(o, rows, columns, true, rows == 39);
        layer_norm_backward_case(o, rows, columns, false, rows == 64);
      });
    }
  }
}

// Norms of sums, and gradients that they are added to, have the bits of an addition and a norm.
TEST_F(KernelEdges, NormsAddAsAdditionsDo) {
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
    for (const int64_t columns : {24, 250, 768, 1544, 4104, 8200}) {
      for (Backend* device : tested()) {
        Operands o(*device, dtype);
        const auto random = [&] { return o.input({39, columns}, 3.0); };
        const auto made = [&](Dtype of, const Shape& shape) { return empty(*device, of, shape); };
        const Tensor x = random(), branch = random(), dy = random(), weight = o.input({columns}, 0.3, 1.0);
        const Tensor sum = made(dtype, x.shape()), sums = made(dtype, x.shape()), mean = made(Dtype::f32, {39}),
                     rstd = made(Dtype::f32, {39});
        const auto forward = [&](const Tensor& of, const Tensor& more, const Tensor& total) {
          const Tensor y = made(dtype, x.shape()), z = made(dtype, x.shape());
          device->run(RmsNormForward{.x = of, .weight = weight, .y = y, .rstd = rstd, .eps = 1e-5, .branch = more, .sum = total});
          device->run(
              LayerNormForward{.x = of, .weight = weight, .y = z, .mean = mean, .rstd = rstd, .eps = 1e-5, .branch = more, .sum = total});
          return std::pair(y, z);
        };
        const auto backward = [&](const Tensor& other) {
          const Tensor dx = made(dtype, x.shape()), dz = made(dtype, x.shape()), dw = made(Dtype::f32, {columns});
          device->run(RmsNormBackward{
              .x = x, .weight = weight, .rstd = rstd, .dy = dy, .dx = dx, .dweight = dw, .accumulate = false, .other = other});
          device->run(LayerNormBackward{.x = x,
                                        .weight = weight,
                                        .mean = mean,
                                        .rstd = rstd,
                                        .dy = dy,
                                        .dx = dz,
                                        .dweight = dw,
                                        .accumulate = false,
                                        .other = other});
          return std::pair(dx, dz);
        };
        device->run(Add{.a = x, .b = branch, .out = sums});
        const auto [y, z] = forward(x, branch, sum);
        const auto [wanted_y, wanted_z] = forward(sums, {}, {});
        EXPECT_TRUE(same_bits(sum, sums) && same_bits(y, wanted_y) && same_bits(z, wanted_z)) << columns;
        const auto [dx, dz] = backward(branch);
        const auto [wanted_dx, wanted_dz] = backward({});
        for (const Tensor& each : {wanted_dx, wanted_dz}) device->run(Add{.a = branch, .b = each, .out = each});
        EXPECT_TRUE(same_bits(dx, wanted_dx) && same_bits(dz, wanted_dz)) << columns;
      }
    }
  }
}

// A block has a row that is too long for a warp, of whole packs or not, which its threads hold or read again.
TEST_F(KernelEdges, LongRowsHaveABlockEach) {
  for (const int64_t columns : {2056, 4104, 4101, 8200}) {
    expect_as_reference(text("rows of ", columns), [&](Operands& o) {
      rms_norm_case(o, 3, columns, true);
      layer_norm_case(o, 3, columns, true, true);
      const Tensor x = o.input({3, 2 * columns}), dy = o.input({3, columns}), weights = o.input_of(Dtype::f32, {3});
      o.device().run(SwiGluForward{.x = x, .out = o.output("glu", {3, columns}, kValues), .row_weights = weights});
      o.device().run(SwiGluBackward{.x = x,
                                    .dy = dy,
                                    .dx = o.output("dglu", {3, 2 * columns}, kValues),
                                    .row_weights = weights,
                                    .drow_weights = o.output_of(Dtype::f32, "drow_weights", {3}, kStatSums)});
      const Tensor ids = o.indices(3, 5), table = o.input({5, columns});
      o.device().run(EmbeddingForward{.ids = ids, .weight = table, .out = o.output("rows", {3, columns}, kExact)});
    });
  }
  for (const Quantization& how : {Quantization{Format::e4m3, 1, 32}, {Format::e4m3, 32, 1}, {Format::e2m1, 1, 32}}) {
    expect_as_reference("codes of 4128 columns", [&](Operands& o) {
      const QuantizedTensor x = quantized_input(o, 32, 4128, how, 8);
      o.device().run(Dequantize{.x = x, .out = o.output("values", {32, 4128}, kExact)});
    });
  }
}

// A warp has one, two or four heads at a time, or parts of one.
TEST_F(KernelEdges, HeadsOfAnyLengthAreNormalizedAndTurned) {
  for (const HeadLayout& layout :
       {HeadLayout{1, 1, 64}, {12, 4, 64}, {6, 3, 64}, {3, 1, 128}, {8, 2, 128}, {2, 1, 256}, {4, 2, 24}, {1, 1, 528}}) {
    for (const int64_t rows : {1, 33, 70}) {
      expect_as_reference(text("heads ", named({rows}), ' ', named(layout)), [&](Operands& o) {
        qk_norm_case(o, rows, layout);
        qk_norm_backward_case(o, rows, layout, rows == 33);
        rope_case(o, rows, layout, rows != 33);
      });
    }
  }
}

TEST_F(KernelEdges, CodesOfOddBlocksShareTheirBytes) {
  for (const Format format : {Format::e2m1, Format::e4m3}) {
    for (const auto& [block_rows, block_cols] : {std::pair<int64_t, int64_t>{1, 3}, {1, 1}, {3, 1}, {3, 3}, {1, 33}, {5, 2}}) {
      const Quantization how{format, block_rows, block_cols};
      for (const int64_t blocks_down : {0, 1, 3}) {
        const Shape shape{blocks_down * block_rows, 6 * block_cols};
        expect_as_reference(text(shape, ' ', how), [&](Operands& o) {
          const Tensor x = o.input(shape);
          const QuantizedTensor codes = quantized_output(o, "codes", "scales", shape, how);
          o.device().run(Quantize{.x = x, .out = codes});
          o.device().run(Dequantize{.x = codes, .out = o.output("values", shape, kExact)});
          o.device().run(FakeQuantize{.x = x, .out = o.output("fake", shape, kExact), .how = how});
        });
      }
    }
  }
}

// Behind x lie bytes that are not zero.
TEST_F(KernelEdges, RowsBelowAMatrixAreZeros) {
  for (const Quantization& how : {Quantization{Format::e4m3, 32, 1}, {Format::e2m1, 32, 32}, {Format::e5m2, 3, 2}}) {
    for (const int64_t rows : {1, 5, 95}) {
      expect_as_reference(text(rows, " rows ", how), [&](Operands& o) {
        const Shape whole{round_up(rows, how.block_rows), 64};
        o.device().run(Quantize{.x = o.input({rows, 64}), .out = quantized_output(o, "codes", "scales", whole, how)});
      });
    }
  }
}

TEST_F(KernelEdges, ColumnsOfCodesBeginWithinAByte) {
  constexpr Quantization kColumns{Format::e2m1, 8, 1};
  for (const auto& [columns, first, width] :
       {std::array<int64_t, 3>{10, 1, 1}, {10, 1, 4}, {10, 3, 7}, {10, 9, 1}, {10, 4, 0}, {24, 4, 16}}) {
    expect_as_reference(text("columns from ", first, " on, ", width), [&, columns = columns, at = first, w = width](Operands& o) {
      const QuantizedTensor x = quantized_input(o, 16, columns, kColumns, 120);
      if (at == 3) o.device().run(Fill{.out = x.scales, .value = 254});  // an extreme one
      const Tensor extreme = o.updated("extreme", o.given(Dtype::i32, {1}, {0}), kExact);
      o.device().run(Dequantize{.x = x, .out = o.output("out", {16, w}, kExact), .first_col = at, .extreme = extreme});
    });
  }
}

TEST_F(KernelEdges, ErrorsOfNothingAreZero) {
  for (const auto& [rows, kept] : {std::pair<int64_t, double>{0, 0}, {37, -1}, {37, 4}}) {
    expect_as_reference(text(rows, " rows, all ", kept), [&, n = rows, row = kept](Operands& o) {
      const Tensor x = o.input({n, 96});
      const QuantizedTensor q = quantized_input(o, n, 96, {Format::e4m3, 1, 32}, 2);
      const Tensor counted = o.given(Dtype::i32, {n}, std::vector<double>(static_cast<size_t>(n), row));
      o.device().run(QuantizationError{.x = x, .q = q, .out = error_output(o), .rows = counted});
    });
  }
}

// The last rows of the first block and of the third count.
TEST_F(KernelEdges, ABlockOfSeveralRowsCountsAsAnyOfThemDoes) {
  std::vector<double> rows(70, -1.0);
  rows[31] = rows[69] = 4.0;
  for (const Quantization& how : {Quantization{Format::e4m3, 32, 32}, Quantization{Format::e4m3, 32, 1}}) {
    expect_as_reference(text(how.block_rows, 'x', how.block_cols), [&](Operands& o) {
      const Tensor x = o.input({70, 96});
      const QuantizedTensor q = quantized_input(o, 96, 96, how, 2);
      o.device().run(QuantizationError{.x = x, .q = q, .out = error_output(o), .rows = o.given(Dtype::i32, {70}, rows)});
    });
  }
}

// A copy that begins one element past a boundary.
Tensor moved(Backend& device, const Tensor& x) {
  const std::shared_ptr<std::byte> memory = device.allocate(x.bytes() + 64);
  const Tensor out(device, std::shared_ptr<std::byte>(memory, memory.get() + dtype_bytes(x.dtype())), device.host_memory(), x.dtype(),
                   x.shape());
  device.run(Convert{.x = x, .out = out});
  return out;
}

// The others are not read by 16 bytes, whichever of them it is.
TEST_F(KernelEdges, OneOfTheOperandsBeginsAnywhere) {
  const HeadLayout layout{2, 1, 64};
  for (const int elsewhere : {0, 1, 2}) {
    expect_as_reference(text("operand ", elsewhere), [&](Operands& o) {
      const auto place = [&](int which, const Tensor& x) { return which == elsewhere ? moved(o.device(), x) : x; };
      const auto output = [&](int which, const char* name, Shape shape) {
        return o.updated(name, place(which, o.given(Dtype::bf16, shape, std::vector<double>(static_cast<size_t>(shape.elements())))),
                         kValues);
      };
      o.device().run(Add{.a = place(0, o.input({8203})), .b = place(1, o.input({8203})), .out = output(2, "sum", {8203})});
      o.device().run(GeluBackward{
          .x = place(0, o.input({8203})), .dy = place(1, o.input({8203})), .dx = output(2, "dgelu", {8203}), .form = GeluForm::tanh});
      o.device().run(
          AddBias{.x = place(0, o.input_of(Dtype::f32, {3, 64})), .bias = place(1, o.input({64})), .out = output(2, "biased", {3, 64})});
      o.device().run(SwiGluForward{.x = place(0, o.input({3, 128})), .out = output(1, "gated", {3, 64})});
      o.device().run(
          SwiGluBackward{.x = place(0, o.input({3, 128})), .dy = place(1, o.input({3, 64})), .dx = output(2, "dgated", {3, 128})});
      const Tensor positions = o.indices(5, 50);
      o.device().run(Rope{.x = place(0, o.input({5, layout.row()})),
                          .table = place(1, o.input_of(Dtype::f32, {50, layout.head_dim})),
                          .positions = positions,
                          .y = output(2, "rotated", {5, layout.row()}),
                          .layout = layout,
                          .inverse = false});
      o.device().run(RmsNormForward{.x = place(0, o.input({3, 64})),
                                    .weight = place(1, o.input({64})),
                                    .y = output(2, "normed", {3, 64}),
                                    .rstd = o.output_of(Dtype::f32, "rstd", {3}, kStats),
                                    .eps = 1e-5});
      o.device().run(Unpermute{.x = place(0, o.input({4, 64})),
                               .rows = o.given(Dtype::i32, {3, 2}, {3, 0, -1, 1, 2, -1}),
                               .out = output(1, "unpermuted", {3, 64})});
      const Tensor ids = o.given(Dtype::i32, {3}, {2, 0, 2});
      o.device().run(EmbeddingForward{.ids = ids, .weight = place(0, o.input({4, 64})), .out = output(1, "embedded", {3, 64})});
      o.device().run(EmbeddingBackward{.ids = ids,
                                       .dy = place(0, o.input({3, 64})),
                                       .dweight = o.updated("dweight", place(1, o.input_of(Dtype::f32, {4, 64})), kExact),
                                       .accumulate = true});
    });
  }
}

// Packs of which one is not full, and a NaN anywhere in them.
TEST_F(KernelEdges, RoundingKeepsEachNaN) {
  for (const int64_t count : {7, 8, 15}) {
    for (int64_t at = 0; at < count; ++at) {
      expect_as_reference(text(count, " with a NaN at ", at), [&](Operands& o) {
        std::vector<double> from = random_values(count, 5, 1.0);
        from[static_cast<size_t>(at)] = std::nan("");
        o.device().run(Convert{.x = o.given(Dtype::f32, {count}, from), .out = o.output("out", {count}, kExact)});
      });
    }
  }
}

TEST_F(KernelEdges, OneInfinityIsFound) {
  for (const size_t at : {size_t{0}, size_t{7}, size_t{95}}) {
    expect_as_reference(text("at ", at), [&](Operands& o) {
      std::vector<double> from = random_values(96, 5, 1.0);
      from[at] = -HUGE_VAL;
      const QuantizedTensor out = quantized_output(o, "codes", "scales", {1, 96}, {Format::e4m3, 1, 32});
      const Tensor nonfinite = o.updated("nonfinite", o.given(Dtype::i32, {1}, {0}), kExact);
      o.device().run(Quantize{.x = o.given(Dtype::bf16, {1, 96}, from), .out = out, .nonfinite = nonfinite});
    });
  }
}

// A thread has several packs of a row, of which any may have the largest logit, and padding follows. Shared memory keeps the longer rows.
TEST_F(KernelEdges, LogitsOfLongRowsAreReadOnce) {
  for (const double scale : {1.0, 40.0}) {
    expect_as_reference(text("logits times ", scale), [&](Operands& o) {
      cross_entropy_case(o, 5, 6007, 6008, scale, Gradient::apart);
      cross_entropy_share_case(o, 5, 6007, 6008, scale);
      cross_entropy_case(o, 3, 16381, 16392, scale, scale > 1.0 ? Gradient::in_place : Gradient::apart);
    });
  }
}

// There are more ids than a block has threads, of few rows: one gets what is far from its first use, the others the sum of many, in their
// order.
TEST_F(KernelEdges, GradientsOfOftenUsedEmbeddingsAreSumsInOrder) {
  for (const int64_t columns : {1, 40, 300}) {
    for (const int64_t count : {255, 257, 700}) {
      expect_as_reference(text(count, " ids, ", columns, " columns"), [&](Operands& o) {
        std::vector<double> ids;
        for (int64_t i = 0; i < count; ++i) ids.push_back(static_cast<double>(i % 600 == 1 ? 5 : i % 7 == 0 ? 4 : i * i % 3));
        o.device().run(EmbeddingBackward{.ids = o.given(Dtype::i32, {count}, ids),
                                         .dy = o.input({count, columns}),
                                         .dweight = o.gradient("dweight", {6, columns}, kExact, false),
                                         .accumulate = false});
      });
    }
  }
}

TEST_F(KernelEdges, RowsOfAnyWidthArePermuted) {
  for (const int64_t columns : {1, 2, 3, 8, 12, 40, 90, 2880, 4104}) {
    for (const int64_t rows : {0, 1, 7}) {
      expect_as_reference(text(rows, " rows of ", columns), [&](Operands& o) {
        permute_case(o, 5, rows, columns, {});
        if (columns % 32 == 0) permute_case(o, 5, rows, columns, {Format::e2m1, 1, 32});
        for (const int64_t choices : {2, 6}) {
          const Tensor back = o.given(Dtype::i32, {rows, choices}, some_dropped(o, rows * choices, 5));
          o.device().run(Unpermute{.x = o.input({5, columns}), .rows = back, .out = o.output("back", {rows, columns}, kExact)});
        }
      });
    }
  }
}

TEST_F(KernelEdges, TablesAreOfManyExpertsAndOfNoTokens) {
  for (const auto& [tokens, assignments, experts, capacity] :
       {std::array<int64_t, 4>{0, 2, 3, 0}, {0, 1, 300, 5}, {1, 1, 255, 0}, {100, 3, 256, 1}, {90, 8, 257, 0}, {70, 2, 520, 0}}) {
    expect_as_reference(text("dispatch ", named({tokens, assignments, experts, capacity})),
                        [&, n = tokens, k = assignments, e = experts, most = capacity](Operands& o) {
                          const Tensor ids = o.given(Dtype::i32, {n, k}, values(o.indices(n * k, e)));
                          o.device().run(DispatchTable{.experts = ids,
                                                       .offsets = index_output(o, "offsets", {e + 1}),
                                                       .rows = index_output(o, "rows", {n, k}),
                                                       .assignments = index_output(o, "assignments", {dispatch_rows(n * k, e, 32)}),
                                                       .multiple = 32,
                                                       .capacity = most});
                        });
  }
  for (const auto& [ranks, experts, most] : {std::array<int64_t, 3>{1, 1, 1}, {2, 128, 3}, {3, 100, 4}, {260, 1, 2}, {1, 520, 1}}) {
    expect_as_reference(text("arrivals ", named({ranks, experts, most})),
                        [&, r = ranks, e = experts, m = most](Operands& o) { arrival_case(o, values(o.indices(r * e, m)), r, 32); });
  }
  expect_as_reference("no arrivals", [](Operands& o) {
    o.device().run(ArrivalTable{.counts = o.given(Dtype::i32, {2, 3}, std::vector<double>(6)),
                                .offsets = index_output(o, "offsets", {4}),
                                .rows = index_output(o, "rows", {0}),
                                .assignments = index_output(o, "assignments", {0}),
                                .multiple = 32});
  });
}

void route_case(Operands& o, const RouteShape& s, const std::vector<double>& logits) {
  const int64_t tokens = s.tokens();
  std::vector<double> bias = random_values(s.experts, 4, 1.0);
  for (double& each : bias) each = std::round(each) / 4;
  const RouteForward k{.logits = o.given(Dtype::f32, {tokens, s.experts}, logits),
                       .experts = index_output(o, "experts", {tokens, s.rule.top_k}),
                       .weights = o.output_of(Dtype::f32, "weights", {tokens, s.rule.top_k}, kStats),
                       .scores = o.output_of(Dtype::f32, "scores", {tokens, s.experts}, kStats),
                       .counts = index_output(o, "counts", {s.sequences, s.experts}),
                       .rule = s.rule,
                       .bias = s.bias ? o.given(Dtype::f32, {s.experts}, bias) : Tensor()};
  o.device().run(k);
  const Tensor dweights = o.input_of(Dtype::f32, {tokens, s.rule.top_k});
  o.device().run(RouteBackward{.logits = k.logits,
                               .scores = k.scores,
                               .experts = k.experts,
                               .counts = k.counts,
                               .dweights = dweights,
                               .dlogits = o.output_of(Dtype::f32, "dlogits", {tokens, s.experts}, kSums),
                               .rule = s.rule,
                               .balance = 0.3,
                               .sequence_balance = 0.2,
                               .z = 0.1});
  const Tensor losses = o.output_of(Dtype::f64, "losses", {3}, kStats);
  o.device().run(RouterLosses{.logits = k.logits, .scores = k.scores, .counts = k.counts, .out = losses, .rule = s.rule});
}

// Logits are whole numbers, so that many scores are equal, and a bias moves some of them; zeros of both signs are among them.
TEST_F(KernelEdges, EqualScoresGoToTheSameExperts) {
  const std::vector<RouteShape> shapes = {{1, 1, 31, sigmoid_rule(5, true), true},
                                          {2, 0, 8, softmax_rule(2, false, true), false},
                                          {3, 3, 33, sigmoid_rule(33, true), false},
                                          {1, 9, 300, sigmoid_rule(40, false), true},
                                          {1, 5, 70, softmax_rule(35, true, true), false},
                                          {2, 4, 200, sigmoid_rule(6, true, 40, 3), true},
                                          {2, 65, 6, sigmoid_rule(2, true, 3, 2), true},
                                          {1, 7, 8, sigmoid_rule(1, false, 4, 2), true},
                                          {1, 3, 40, forced(softmax_rule(37, false, false)), false}};
  for (const RouteShape& s : shapes) {
    std::vector<double> logits = random_values(s.tokens() * s.experts, 3, 2.0);
    for (double& logit : logits) logit = std::round(logit);
    expect_as_reference(text(named({s.sequences, s.length, s.experts, s.rule.top_k, s.rule.groups})),
                        [&](Operands& o) { route_case(o, s, logits); });
  }
}

// A warp reads 32 logits at a time. The second token is padding.
TEST_F(KernelEdges, ATokenWhoseOnlyFiniteLogitIsBehind32OthersIsNoPadding) {
  std::vector<double> logits(3 * 40, -std::numeric_limits<double>::infinity());
  logits[39] = 0.5, logits[2 * 40 + 32] = 1.0;
  expect_as_reference("route", [&](Operands& o) { route_case(o, {1, 3, 40, softmax_rule(1, false, false), false}, logits); });
}

}  // namespace mantissa::test::kernel_edges_test
