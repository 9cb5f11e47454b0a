// Dispatch tables, rows to groups and back, and grouped GEMMs: by their definitions, over groups of every awkward size.
#include <cmath>
#include <numeric>

#include "backend/ceilings.h"
#include "backend/cpu/fast/gemm/packed_gemm.h"
#include "contract_check.h"
#include "gemm_shapes.h"
#include "kernel_cases_moe.h"
#include "mantissa/base/integers.h"

namespace mantissa::test::moe_kernels_test {

class MoeKernels : public ContractCheck {};
INSTANTIATE_TEST_SUITE_P(, MoeKernels, ::testing::ValuesIn(all_backends()), backend_of);

class MoeKernelsOfTheCpu : public BackendTest {};

// Runs on the backends that are compared with the reference.
class MoeProducts : public OnEachBackend {};
INSTANTIATE_TEST_SUITE_P(, MoeProducts, ::testing::ValuesIn(tested_backends()), backend_of);

std::vector<int64_t> integers(const Tensor& tensor) {
  const std::vector<double> from = values(tensor);
  return {from.begin(), from.end()};
}

DispatchTable table_of(Backend& device, const Tensor& experts, int64_t groups, int64_t multiple, int64_t capacity) {
  const DispatchTable out{.experts = experts,
                          .offsets = empty(device, Dtype::i32, {groups + 1}),
                          .rows = empty(device, Dtype::i32, experts.shape()),
                          .assignments = empty(device, Dtype::i32, {dispatch_rows(experts.elements(), groups, multiple)}),
                          .multiple = multiple,
                          .capacity = capacity};
  device.run(out);
  return out;
}

// Expects the assignments of each expert in its group, in order, as far as there is room for them.
void expect_table(const DispatchTable& table) {
  const std::vector<int64_t> experts = integers(table.experts), offsets = integers(table.offsets);
  std::vector<int64_t> rows(experts.size(), -1), assignments(static_cast<size_t>(table.assignments.elements()), -1);
  int64_t begin = 0;
  for (int64_t g = 0; g < std::ssize(offsets) - 1; ++g) {
    ASSERT_EQ(offsets[static_cast<size_t>(g)], begin);
    int64_t kept = 0;
    for (size_t i = 0; i < experts.size(); ++i) {
      if (experts[i] != g || (table.capacity > 0 && kept == table.capacity)) continue;
      rows[i] = begin + kept++;
      assignments[static_cast<size_t>(rows[i])] = static_cast<int64_t>(i);
    }
    begin += (kept + table.multiple - 1) / table.multiple * table.multiple;
  }
  ASSERT_EQ(offsets.back(), begin);
  ASSERT_EQ(integers(table.rows), rows);
  ASSERT_EQ(integers(table.assignments), assignments);
}

// Counts what arrives by rank and expert, row by row.
void expect_arrivals(const ArrivalTable& table) {
  const int64_t ranks = table.counts.dim(0), experts = table.counts.dim(1);
  const std::vector<int64_t> counts = integers(table.counts), offsets = integers(table.offsets), sources = integers(table.source_offsets);
  std::vector<int64_t> first(counts.size()), rows(static_cast<size_t>(table.rows.elements()));
  std::exclusive_scan(counts.begin(), counts.end(), first.begin(), int64_t{0});
  std::vector<int64_t> assignments;
  for (int64_t e = 0; e < experts; ++e) {
    ASSERT_EQ(offsets[static_cast<size_t>(e)], std::ssize(assignments));
    for (int64_t r = 0; r < ranks; ++r) {
      ASSERT_EQ(sources[static_cast<size_t>(e * ranks + r)], std::ssize(assignments));
      const auto from = static_cast<size_t>(r * experts + e);
      for (int64_t i = first[from]; i < first[from] + counts[from]; ++i) {
        rows[static_cast<size_t>(i)] = std::ssize(assignments);
        assignments.push_back(i);
      }
      while (std::ssize(assignments) % table.multiple != 0) assignments.push_back(-1);
    }
  }
  ASSERT_EQ(offsets.back(), std::ssize(assignments));
  ASSERT_EQ(sources.back(), std::ssize(assignments));
  ASSERT_EQ(integers(table.rows), rows);
  ASSERT_EQ(integers(table.assignments), assignments);
}

ArrivalTable arrivals_of(Backend& device, const std::vector<double>& counts, int64_t ranks, int64_t multiple) {
  const int64_t experts = std::ssize(counts) / ranks;
  int64_t arrivals = 0, rows = 0;
  for (const double count : counts) {
    arrivals += static_cast<int64_t>(count);
    rows += round_up(static_cast<int64_t>(count), multiple);
  }
  return {.counts = tensor_of(device, Dtype::i32, {ranks, experts}, counts),
          .offsets = empty(device, Dtype::i32, {experts + 1}),
          .rows = empty(device, Dtype::i32, {arrivals}),
          .assignments = empty(device, Dtype::i32, {rows}),
          .multiple = multiple,
          .source_offsets = empty(device, Dtype::i32, {experts * ranks + 1})};
}

TEST_P(MoeKernels, LayOutWhateverArrives) {
  for (uint32_t number = 0; number < 200; ++number) {
    CaseDraw draw(number);
    const int64_t ranks = draw.from<int64_t>({1, 2, 3, 8}), experts = draw.from<int64_t>({1, 2, 5, 16}),
                  multiple = draw.from<int64_t>({1, 32, 64, 128}), most = draw.from<int64_t>({1, 2, 33, 200});
    const std::vector<double> counts = values(random_indices(device(), ranks * experts, most, number));
    SCOPED_TRACE(text(ranks, " ranks, ", experts, " experts, multiple ", multiple, ", below ", most));
    ArrivalTable table = arrivals_of(device(), counts, ranks, multiple);
    device().run(table);
    expect_arrivals(table);
    if (HasFatalFailure()) return;
    const std::vector<int64_t> offsets = integers(table.offsets);
    table.source_offsets = {};
    device().run(table);
    EXPECT_EQ(integers(table.offsets), offsets);
  }
}

TEST_P(MoeKernels, RefuseCountsOfOtherArrivals) {
  ArrivalTable table = arrivals_of(device(), {1, 2, 3, 4}, 2, 32);
  accepts(table);
  const auto refuses_counts = [&](const std::vector<double>& counts, const std::string& words) {
    ArrivalTable bad = table;
    bad.counts = tensor_of(device(), Dtype::i32, {2, 2}, counts);
    refuses(bad, "arrival_table", {words});
  };
  refuses_counts({1, 2, 3, 5}, "11 rows arrive, but rows has 10");
  refuses_counts({1, 2, -3, 10}, "counts[2] is -3, not in [0, 10]");
  refuses_counts({0, 0, 10, 0}, "32 rows with padding, but assignments has 128");
  table = arrivals_of(device(), {32, 0, 0, 0}, 2, 32);
  refuses_counts({8, 8, 8, 8}, "128 rows with padding, but assignments has 32");
}

TEST_P(MoeKernels, CountsAreSummedExactly) {
  const double large = 2147483647;
  const Tensor counts = tensor_of(device(), Dtype::i32, {3, 2}, {large, -1, large, 5, large, 0}), out = empty(device(), Dtype::f64, {2});
  device().run(SumCounts{.counts = counts, .out = out});
  EXPECT_EQ(values(out), (std::vector<double>{3 * large, 4}));
  const Tensor none = empty(device(), Dtype::i32, {0, 2});
  device().run(SumCounts{.counts = none, .out = out});
  EXPECT_EQ(values(out), (std::vector<double>{0, 0}));
}

TEST_P(MoeKernels, GroupsMayBeginAtAnyRow) {
  const int64_t begins[] = {0, 7, 7, 40, 99};
  const Tensor a = random_tensor(device(), Dtype::f32, {100, 24}, 1), b = random_tensor(device(), Dtype::f32, {4 * 24, 17}, 2),
               offsets = tensor_of(device(), Dtype::i32, {5}, {0, 7, 7, 40, 99}), out = empty(device(), Dtype::f32, {100, 17});
  device().run(GroupedGemm{.a = {a}, .b = {b}, .out = out, .offsets = offsets});
  for (int64_t g = 0; g < 4; ++g) {
    if (begins[g] == begins[g + 1]) continue;
    const Tensor alone = empty(device(), Dtype::f32, {begins[g + 1] - begins[g], 17});
    const Tensor all = tensor_of(device(), Dtype::i32, {2}, {0, static_cast<double>(begins[g + 1] - begins[g])});
    device().run(GroupedGemm{.a = {a.slice(begins[g], begins[g + 1])}, .b = {b.slice(24 * g, 24 * (g + 1))}, .out = alone, .offsets = all});
    EXPECT_TRUE(same_elements(values(out.slice(begins[g], begins[g + 1])), values(alone))) << "group " << g;
  }
  EXPECT_EQ(values(out.slice(99, 100)), std::vector<double>(17, 0.0));
}

TEST_P(MoeKernels, SortTheAssignmentsOfAnyTokens) {
  for (uint32_t number = 0; number < 200; ++number) {
    CaseDraw draw(number);
    const int64_t tokens = draw.log_uniform(1, 500) - 1, groups = draw.from<int64_t>({1, 2, 8, 128}),
                  assignments = 1 + draw.below(std::min<int64_t>(8, groups));
    const int64_t multiple = draw.from<int64_t>({1, 32, 64, 128}), capacity = draw.one_in(3) ? 1 + draw.below(40) : 0;
    std::vector<double> ids = values(random_indices(device(), tokens * assignments, groups, number));
    if (draw.one_in(4)) std::fill(ids.begin(), ids.end(), static_cast<double>(draw.below(groups)));  // all to one
    for (double& id : ids) id = number % 3 == 0 && draw.one_in(3) ? -1.0 : id;                       // to none
    SCOPED_TRACE(text(tokens, " tokens, ", assignments, " of ", groups, ", multiple ", multiple, ", capacity ", capacity));
    expect_table(table_of(device(), tensor_of(device(), Dtype::i32, {tokens, assignments}, ids), groups, multiple, capacity));
    if (HasFatalFailure()) return;
  }
}

TEST_P(MoeKernels, BringEveryRowToItsGroupsAndBack) {
  const int64_t tokens = 70, assignments = 3, columns = 40;
  const DispatchTable table = table_of(
      device(), tensor_of(device(), Dtype::i32, {tokens, assignments}, values(random_indices(device(), tokens * assignments, 5, 1))), 5, 32,
      30);
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
    const Tensor x = random_tensor(device(), dtype, {tokens, columns}, 2), back = empty_like(x);
    const Tensor y = empty(device(), dtype, {table.assignments.elements(), columns});
    device().run(Permute{.x = x, .out = y, .assignments = table.assignments, .per_row = assignments});
    device().run(Unpermute{.x = y, .rows = table.rows, .out = back});
    const std::vector<double> from = values(x), to = values(y), returned = values(back);
    const std::vector<int64_t> origin = integers(table.assignments), rows = integers(table.rows);
    for (int64_t i = 0; i < y.elements(); ++i) {
      const int64_t choice = origin[static_cast<size_t>(i / columns)];
      ASSERT_EQ(to[static_cast<size_t>(i)], choice < 0 ? 0.0 : from[static_cast<size_t>(choice / assignments * columns + i % columns)]);
    }
    for (int64_t i = 0; i < x.elements(); ++i) {
      const auto row = rows.begin() + i / columns * assignments;
      const auto kept = static_cast<float>(assignments - std::count(row, row + assignments, -1));
      const float sum = kept * static_cast<float>(from[static_cast<size_t>(i)]);  // times 2 and 3: one rounding
      ASSERT_EQ(returned[static_cast<size_t>(i)], static_cast<double>(dtype == Dtype::bf16 ? to_float(to_bf16(sum)) : sum));
    }
  }
}

TEST_P(MoeKernels, PermuteCodesToWhatQuantizingPermutedValuesGives) {
  const int64_t tokens = 50, columns = 256;
  const Tensor x = random_tensor(device(), Dtype::bf16, {tokens, columns}, 2),
               assignments = tensor_of(device(), Dtype::i32, {6}, {99, -1, 0, 31, 30, 0});
  const Tensor y = empty(device(), Dtype::bf16, {6, columns});
  device().run(Permute{.x = x, .out = y, .assignments = assignments, .per_row = 2});
  for (const Quantization how : {Quantization{Format::e4m3, 1, 32}, {Format::e4m3, 1, 128}, {Format::e2m1, 1, 32}}) {
    const QuantizedTensor out = empty_quantized(device(), y.shape(), how), expected = quantized(y, how);
    device().run(Permute{.x = quantized(x, how), .out = out, .assignments = assignments, .per_row = 2});
    EXPECT_TRUE(same_bits(out.codes, expected.codes)) << how;
    std::vector<double> scales = values(expected.scales);
    const int64_t per_row = expected.scales.dim(1);
    std::fill_n(scales.begin() + per_row, per_row, 0.0);  // any scale will do for a row of zeros
    EXPECT_EQ(values(out.scales), scales) << how;
  }
}

TEST_P(MoeKernels, RefuseIndicesOfNothing) {
  const auto refuses_at = [&](const auto& good, auto index, int64_t at, int32_t value, const std::string& kernel,
                              const std::string& words) {
    auto bad = good;
    bad.*index = test::copied(device(), good.*index);
    set_value(bad.*index, at, value);
    refuses(bad, kernel, {words});
  };
  const DispatchTable table = table_of(device(), tensor_of(device(), Dtype::i32, {2, 2}, {0, 1, 1, 2}), 3, 32, 0);
  refuses_at(table, &DispatchTable::experts, 2, 3, "dispatch_table", "experts[2] is 3, not in [-1, 3)");
  refuses_at(table, &DispatchTable::experts, 0, -2, "dispatch_table", "experts[0] is -2");
  accepts(table);  // a device that refuses later has written to it
  const Permute permute{.x = f32({2, 4}), .out = f32({table.assignments.elements(), 4}), .assignments = table.assignments, .per_row = 2};
  accepts(permute);
  refuses_at(permute, &Permute::assignments, 1, 4, "permute", "assignments[1] is 4, not in [-1, 4)");
  refuses_at(permute, &Permute::assignments, 1, -2, "permute", "assignments[1] is -2");
  const Unpermute unpermute{.x = f32({table.assignments.elements(), 4}), .rows = table.rows, .out = f32({2, 4})};
  accepts(unpermute);
  refuses_at(unpermute, &Unpermute::rows, 3, 96 + 32, "unpermute", "rows[3] is 128");
  const GroupedGemm product{.a = {f32({96, 4})}, .b = {f32({12, 5})}, .out = f32({96, 5}), .offsets = table.offsets};
  accepts(product);
  refuses_at(product, &GroupedGemm::offsets, 0, 1, "grouped_gemm", "offsets[0] is 1, not 0");
  refuses_at(product, &GroupedGemm::offsets, 2, 31, "grouped_gemm", "offsets[2] is 31, not in [32, 96]");
  refuses_at(product, &GroupedGemm::offsets, 3, 97, "grouped_gemm", "offsets[3] is 97");
  GroupedGemm tiles = product;
  tiles.a = {f32({96, 32})}, tiles.b = {codes({96, 32}, {Format::e4m3, 32, 32})}, tiles.out = f32({96, 32});
  accepts(tiles);
  tiles.b = {codes({96, 32}, {Format::e4m3, 96, 32})};
  refuses(tiles, "grouped_gemm", {"offsets is [4], for 3 matrices, but b is [96, 32]"});
  Permute mixed = permute;
  mixed.x = codes({2, 32}, {Format::e4m3, 1, 32});
  refuses(mixed, "permute", {"x and out must both be codes"});
}

// Groups of every awkward size, each padded to 32 rows, with experts that have none at the beginning, in the middle and at the end.
std::vector<std::vector<int64_t>> awkward_loads() {
  return {{0, 1, 31, 0, 32, 33, 200, 0}, {200, 0, 0, 1}, {0, 0, 0, 257}, {33}, {0, 0}, {64, 128, 32, 192}};
}

std::vector<double> offsets_of(const std::vector<int64_t>& load) {
  std::vector<double> out{0};
  for (const int64_t rows : load) out.push_back(out.back() + static_cast<double>(round_up(rows, 32)));
  return out;
}

// Rows of an operand in memory of their own.
Value copied(const Value& value, int64_t begin, int64_t end) {
  if (const auto* x = std::get_if<Tensor>(&value)) return test::copied(x->device(), x->slice(begin, end));
  const QuantizedTensor part = slice(std::get<QuantizedTensor>(value), begin, end);
  return test::copied(part.device(), part);
}

struct OperandKinds {
  Quantization a, b;
  Dtype dtype, out;
};

std::vector<OperandKinds> operand_kinds() {
  constexpr Quantization kRows{Format::e4m3, 1, 32}, kLongRows{Format::e4m3, 1, 128}, kTiles{Format::e4m3, 32, 32},
      kFake{Format::e2m1, 1, 32};
  return {{{}, {}, Dtype::f32, Dtype::f32},
          {{}, {}, Dtype::bf16, Dtype::bf16},
          {{}, {}, Dtype::bf16, Dtype::f32},
          {kRows, kTiles, Dtype::bf16, Dtype::bf16},
          {kRows, kRows, Dtype::bf16, Dtype::f32},
          {{}, kTiles, Dtype::bf16, Dtype::bf16},
          {kLongRows, kLongRows, Dtype::bf16, Dtype::bf16},
          {{}, kFake, Dtype::bf16, Dtype::bf16},
          {kRows, kFake, Dtype::bf16, Dtype::bf16},
          {{}, kFake, Dtype::f32, Dtype::f32}};
}

Value operand(Backend& device, Dtype dtype, const Shape& shape, const Quantization& how, uint32_t what) {
  const Tensor x = random_tensor(device, how ? Dtype::bf16 : dtype, shape, what);
  if (how) return quantized(x, how);
  return x;
}

void set_nan(const Tensor& tensor) {
  if (tensor.elements() > 0) tensor.device().run(Fill{.out = tensor, .value = std::nan("")});
}

// A grouped GEMM with NaN behind the last group and in the output.
GroupedGemm grouped_gemm(Backend& device, const std::vector<int64_t>& load, const OperandKinds& kinds, bool transposed) {
  constexpr int64_t kIn = 128, kOut = 128, kTail = 64;
  const std::vector<double> offsets = offsets_of(load);
  const auto rows = static_cast<int64_t>(offsets.back()), experts = std::ssize(load);
  const Value a = operand(device, kinds.dtype, {rows + kTail, kIn}, kinds.a, 1);
  if (!kinds.a) set_nan(std::get<Tensor>(a).slice(rows, rows + kTail));
  if (kinds.a) device.run(Fill{.out = std::get<QuantizedTensor>(a).scales.slice(rows, rows + kTail), .value = 255.0});
  const Operand b{operand(device, kinds.dtype, transposed ? Shape{experts * kOut, kIn} : Shape{experts * kIn, kOut}, kinds.b, 2),
                  transposed};
  const Tensor out = empty(device, kinds.out, {rows + kTail, kOut});
  set_nan(out);
  return {.a = {a}, .b = b, .out = out, .offsets = tensor_of(device, Dtype::i32, {experts + 1}, offsets)};
}

// Results on the reference are equal to the bit.
TEST_P(MoeProducts, OfGroupsAreThoseOfTheirExpertsAlone) {
  for (const std::vector<int64_t>& load : awkward_loads()) {
    for (const OperandKinds& kinds : operand_kinds()) {
      for (const bool transposed : {true, false}) {
        const GroupedGemm k = grouped_gemm(reference(), load, kinds, transposed), actual = grouped_gemm(device(), load, kinds, transposed);
        reference().run(k);
        device().run(actual);
        ASSERT_TRUE(close(actual.out, k.out, kinds.out == Dtype::bf16 ? kSums.bf16 : kSums.f32)) << kinds.a << ' ' << kinds.b;
        const std::vector<int64_t> offsets = integers(k.offsets);
        const int64_t matrix = shape_of(k.b.value)[0] / std::ssize(load);
        for (int64_t e = 0; e < std::ssize(load); ++e) {
          const int64_t begin = offsets[static_cast<size_t>(e)], end = offsets[static_cast<size_t>(e) + 1];
          const Tensor alone = empty(reference(), kinds.out, {end - begin, k.out.dim(1)});
          reference().run(Gemm{.a = {copied(k.a.value, begin, end)},
                               .b = {copied(k.b.value, e * matrix, (e + 1) * matrix), transposed},
                               .out = alone,
                               .accumulate = false});
          ASSERT_TRUE(same_bits(k.out.slice(begin, end), alone)) << "expert " << e << ' ' << kinds.a << ' ' << kinds.b;
        }
        for (const double value : values(k.out.slice(offsets.back(), k.out.dim(0)))) ASSERT_EQ(value, 0.0) << "a row of no group";
      }
    }
  }
}

// A row of the second of three groups, of a matrix from `in` to `out` columns: its bits among any number of others, in any place.
void expect_rows_alike(Backend& device, const OperandKinds& kinds, bool transposed, int64_t in, int64_t out) {
  constexpr int64_t kMost = 600;
  const Tensor x = random_tensor(device, kinds.dtype, {kMost, in}, 1);
  const Tensor w = random_tensor(device, kinds.dtype, transposed ? Shape{3 * out, in} : Shape{3 * in, out}, 2);
  const auto product = [&](int64_t first, int64_t rows, int64_t before) {  // `before` rows of the first expert
    const Tensor a = random_tensor(device, kinds.dtype, {before + rows, in}, 3), y = empty(device, kinds.out, {before + rows, out});
    device.run(Convert{.x = x.slice(first, first + rows), .out = a.slice(before, before + rows)});
    const auto b = static_cast<double>(before), end = static_cast<double>(before + rows);
    device.run(GroupedGemm{.a = {a}, .b = {w, transposed}, .out = y, .offsets = tensor_of(device, Dtype::i32, {4}, {0, b, end, end})});
    return y.slice(before, before + rows);
  };
  const Tensor all = product(0, kMost, 0);
  for (const int64_t rows : {1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 192, 200, 255, 256, 257, 300, 512}) {
    for (const int64_t first : {int64_t{0}, int64_t{7}, kMost - rows}) {
      if (first + rows > kMost || (in > 700 && first < kMost - rows)) continue;  // one place is enough of wide ones
      ASSERT_TRUE(same_bits(product(first, rows, first % 3 * 32), all.slice(first, first + rows)))
          << rows << " rows from " << first << " on, " << in << " to " << out << (transposed ? " transposed " : " ") << kinds.dtype
          << kinds.out << ", " << device.name();
    }
  }
}

// Parameters are the widths of rows in and out.
class RowsOfGroups : public ::testing::TestWithParam<std::pair<int64_t, int64_t>> {};

TEST_P(RowsOfGroups, HaveBitsThatDoNotDependOnTheOthers) {
  const auto [in, out] = GetParam();
  const KernelBackends backends;
  for (Backend* device : backends.tested()) {
    for (const bool transposed : {true, false}) {
      expect_rows_alike(*device, {{}, {}, Dtype::f32, Dtype::f32}, transposed, in, out);
      expect_rows_alike(*device, {{}, {}, Dtype::bf16, Dtype::bf16}, transposed, in, out);
      expect_rows_alike(*device, {{}, {}, Dtype::bf16, Dtype::f32}, transposed, in, out);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, RowsOfGroups,
                         ::testing::ValuesIn(std::vector<std::pair<int64_t, int64_t>>{
                             {32, 64}, {96, 400}, {768, 384}, {1000, 33}, {2304, 800}, {3072, 96}}),
                         [](const auto& c) { return text(c.param.first, "_to_", c.param.second); });

TEST_P(MoeKernels, GiveWeightGradientsOfExpertsAloneAndNothingWithoutRows) {
  constexpr int64_t kIn = 64, kOut = 96;
  constexpr Quantization kColumns{Format::e4m3, 32, 1};
  for (const std::vector<int64_t>& load : awkward_loads()) {
    for (const OperandKinds& kinds :
         {OperandKinds{{}, {}, Dtype::f32, Dtype::f32}, {{}, {}, Dtype::bf16, Dtype::f32}, {kColumns, kColumns, Dtype::bf16, Dtype::f32}}) {
      for (const bool accumulate : {false, true}) {
        const std::vector<double> offsets = offsets_of(load);
        const auto rows = static_cast<int64_t>(offsets.back()), experts = std::ssize(load);
        const Value dy = operand(device(), kinds.dtype, {rows + 32, kOut}, kinds.a, 1),
                    x = operand(device(), kinds.dtype, {rows + 32, kIn}, kinds.b, 2);
        if (!kinds.a) set_nan(std::get<Tensor>(dy).slice(rows, rows + 32)), set_nan(std::get<Tensor>(x).slice(rows, rows + 32));
        const Tensor before = random_tensor(device(), Dtype::f32, {experts * kOut, kIn}, 3), out = empty_like(before);
        accumulate ? device().run(Convert{.x = before, .out = out}) : set_nan(out);
        device().run(GroupedWeightGradient{
            .a = dy, .b = x, .out = out, .offsets = tensor_of(device(), Dtype::i32, {experts + 1}, offsets), .accumulate = accumulate});
        for (int64_t e = 0; e < experts; ++e) {
          const auto begin = static_cast<int64_t>(offsets[static_cast<size_t>(e)]),
                     end = static_cast<int64_t>(offsets[static_cast<size_t>(e) + 1]);
          const Tensor alone = std::get<Tensor>(copied(before, e * kOut, (e + 1) * kOut));
          if (!accumulate) device().run(Fill{.out = alone, .value = 0.0});
          if (begin < end)
            device().run(Gemm{.a = {copied(dy, begin, end), true}, .b = {copied(x, begin, end)}, .out = alone, .accumulate = accumulate});
          ASSERT_TRUE(same_bits(out.slice(e * kOut, (e + 1) * kOut), alone)) << device().name() << " expert " << e;
        }
      }
    }
  }
}

TEST_P(MoeKernels, BiasesBelongToTheRowsOfTheirGroups) {
  constexpr int64_t kRows = 6, kColumns = 3, kGroups = 3;  // two rows of the first and the last group, two of none
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
    std::vector<double> ones(kRows * kColumns, 1.0);
    const Tensor dy = tensor_of(device(), dtype, {kRows, kColumns}, ones), x = tensor_of(device(), Dtype::f32, {kRows, kColumns}, ones),
                 bias = tensor_of(device(), dtype, {kGroups * kColumns}, {1, 2, 3, 4, 5, 6, 7, 8, 9}),
                 offsets = tensor_of(device(), Dtype::i32, {kGroups + 1}, {0, 2, 2, 4});
    const Tensor sums = empty(device(), dtype, {kRows, kColumns}), dbias = empty(device(), Dtype::f32, {kGroups * kColumns}),
                 product = empty(device(), Dtype::f32, {kRows});
    for (const Tensor& out : {sums, dbias, product}) set_nan(out);
    device().run(AddGroupedBias{.x = x, .bias = bias, .out = sums, .offsets = offsets});
    device().run(GroupedBiasGradient{.dy = dy, .dbias = dbias, .offsets = offsets, .accumulate = false});
    device().run(GroupedBiasDot{.dy = dy, .bias = bias, .out = product, .offsets = offsets});
    EXPECT_EQ(values(sums), (std::vector<double>{2, 3, 4, 2, 3, 4, 8, 9, 10, 8, 9, 10, 1, 1, 1, 1, 1, 1})) << device().name();
    EXPECT_EQ(values(dbias), (std::vector<double>{2, 2, 2, 0, 0, 0, 2, 2, 2})) << device().name();
    EXPECT_EQ(values(product), (std::vector<double>{6, 6, 24, 24, 0, 0})) << device().name();
  }
}

TEST_F(MoeKernelsOfTheCpu, ComputeFewMoreRowsThanGroupsHave) {
  EXPECT_EQ(grouped_rows(0), 0);
  for (int64_t rows = 1; rows < 700; ++rows) {
    EXPECT_GE(grouped_rows(rows), rows);
    EXPECT_LT(grouped_rows(rows), rows + 64);
  }
}

TEST_F(MoeKernelsOfTheCpu, MultiplyInFp32WhereAnExpertWithRowsHasExtremeScales) {
  constexpr Quantization kTiles{Format::e4m3, 32, 32};
  const QuantizedTensor w = quantized(random_tensor(fast(), Dtype::bf16, {128, 64}, 1), kTiles);
  set_value(w.scales, w.scales.elements() - 1, 2);  // the scale is of the second expert
  for (const auto& [second, products] : {std::pair<double, int64_t>{64, 0}, {96, 1}}) {
    const auto device = make_backend("cpu");
    device->run(GroupedGemm{.a = {quantized(random_tensor(*device, Dtype::bf16, {96, 64}, 2), {Format::e4m3, 1, 32})},
                            .b = {test::copied(*device, w), true},
                            .out = empty(*device, Dtype::bf16, {96, 64}),
                            .offsets = tensor_of(*device, Dtype::i32, {3}, {0, 64, second})});
    EXPECT_EQ(device->fp32_gemms(), onednn_has_bf16() ? products : 0);
  }
}

}  // namespace mantissa::test::moe_kernels_test
