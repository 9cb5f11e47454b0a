// Tiles of one shape: their contents, the promises of GEMMs made of them, and the check of promises that rest on the library.
#include "backend/cpu/fast/gemm/packed_gemm.h"

#include <sys/mman.h>
#include <unistd.h>

#include <new>
#include <string_view>

#include "backend/cpu/fast/gemm/gemm_tiles.h"
#include "backend/few_rows.h"
#include "gemm_shapes.h"

namespace mantissa::test::packed_gemm_test {

Block whole(const Tensor& tensor, bool transposed = false) { return block(tensor, transposed); }

// Elements of magnitudes that differ by 2^12.
Tensor wide_tensor(Backend& device, Dtype dtype, Shape shape, uint32_t what) {
  const Tensor out = random_tensor(device, Dtype::f32, std::move(shape), what);
  for (int64_t i = 0; i < out.elements(); ++i) out.data<float>()[i] *= std::ldexp(1.0F, static_cast<int>((7 * i) % 13) - 6);
  return converted(out, dtype);
}

float element_of(Dtype dtype, const std::byte* data, int64_t i) {
  return dtype == Dtype::bf16 ? to_float(reinterpret_cast<const bf16*>(data)[i]) : reinterpret_cast<const float*>(data)[i];
}

class PackBlock : public BackendTest {
 protected:
  // Compares element by element with the definition in the header.
  void expect_packed(const Block& from, const TileLayout& tile) {
    std::vector<float> to(static_cast<size_t>(tile.rows * tile.ld), -7.0F);
    pack_block(from, tile, reinterpret_cast<std::byte*>(to.data()));
    const auto element = [&](int64_t i, int64_t j) {
      if (i >= from.rows || j >= from.cols) return 0.0F;
      return element_of(from.dtype, from.data, from.transposed ? j * from.ld + i : i * from.ld + j);
    };
    int64_t wrong = 0;
    for (int64_t i = 0; i < tile.rows; ++i) {
      for (int64_t j = 0; j < tile.cols; ++j) {
        wrong += element_of(tile.dtype, reinterpret_cast<const std::byte*>(to.data()), i * tile.ld + j) != element(i, j);
      }
    }
    EXPECT_EQ(wrong, 0) << from.rows << " x " << from.cols << (from.transposed ? " transposed" : "") << " into " << tile.rows << " x "
                        << tile.cols << " of " << tile.dtype;
  }
};

// Kernels of the library prefetch up to 55 KB behind an operand, at a hundred times the cost where a page was never written.
TEST(AlignedBytes, AreBackedByMemoryAndSoAreThe64KiBBehindThem) {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  for (const int64_t bytes : {int64_t{1}, int64_t{5000}, int64_t{3} << 20}) {
    AlignedBytes memory;
    memory.at_least(bytes / 2);
    const auto begin = reinterpret_cast<uintptr_t>(memory.at_least(bytes)), end = begin + static_cast<uintptr_t>(bytes) + (56U << 10);
    const uintptr_t first = begin / page * page, pages = (end - first) / page + 1;
    std::vector<unsigned char> resident(pages);
    ASSERT_EQ(mincore(reinterpret_cast<void*>(first), pages * page, resident.data()), 0);
    EXPECT_EQ(std::ranges::count_if(resident, [](unsigned char of_page) { return (of_page & 1) == 0; }), 0) << bytes << " bytes";
  }
}

TEST_F(PackBlock, LaysOutAnyPartOfAMatrixWithZerosBehind) {
  CaseDraw draw(1);
  for (int i = 0; i < 200; ++i) {
    const Dtype from = draw.from({Dtype::f32, Dtype::bf16}), to = from == Dtype::f32 ? Dtype::f32 : draw.from({Dtype::f32, Dtype::bf16});
    const int64_t rows = draw.from<int64_t>({16, 64, 136}), cols = draw.from<int64_t>({24, 128, 200});
    const Tensor matrix = random_tensor(fast(), from, {rows + 150, rows + 150}, static_cast<uint32_t>(i));
    const Block part = whole(matrix, draw.one_in(2)).part(draw.below(40), draw.below(40), 1 + draw.below(rows), 1 + draw.below(cols));
    expect_packed(part, {.dtype = to, .rows = rows, .cols = cols, .ld = cols + draw.from<int64_t>({0, 16})});
  }
}

// Bytes that end where memory ends that may not be read.
class GuardedBytes {
 public:
  explicit GuardedBytes(size_t size) : pages_((size + kPage - 1) / kPage * kPage) {
    void* const memory = ::mmap(nullptr, pages_ + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    start_ = static_cast<std::byte*>(memory);
    if (::mprotect(start_ + pages_, kPage, PROT_NONE) != 0) throw std::bad_alloc();
    bytes_ = start_ + pages_ - size;
  }
  ~GuardedBytes() { ::munmap(start_, pages_ + kPage); }
  GuardedBytes(const GuardedBytes&) = delete;
  GuardedBytes& operator=(const GuardedBytes&) = delete;
  std::byte* data() const { return bytes_; }

 private:
  static constexpr size_t kPage = 4096;
  size_t pages_;
  std::byte *start_, *bytes_;
};

// Packs a block that is all of its memory, at a distance of rows that need not be even.
TEST_F(PackBlock, LaysOutPanelsOfAnyPartAndReadsNothingElse) {
  CaseDraw draw(2);
  for (int i = 0; i < 300; ++i) {
    const Dtype from = draw.from({Dtype::f32, Dtype::bf16}), to = from == Dtype::f32 ? Dtype::f32 : draw.from({Dtype::f32, Dtype::bf16});
    const int64_t panel = draw.from<int64_t>({16, 48, 64}), rows = draw.from<int64_t>({32, 128});
    const PanelLayout tile{.dtype = to,
                           .rows = rows,
                           .cols = panel * (1 + draw.below(3)),
                           .panel = panel,
                           .ld = panel + draw.from<int64_t>({0, 8}),
                           .pairs = to == Dtype::bf16 && draw.one_in(2)};
    Block block{.data = nullptr,
                .dtype = from,
                .ld = 0,
                .rows = 1 + draw.below(rows),
                .cols = 1 + draw.below(tile.cols),
                .transposed = draw.one_in(2)};
    block.ld = block.transposed ? block.rows : block.cols;
    const Tensor values = random_tensor(fast(), from, {block.rows * block.cols}, static_cast<uint32_t>(i));
    const GuardedBytes source(static_cast<size_t>(values.bytes())), packed(static_cast<size_t>(tile.bytes()));
    std::memcpy(source.data(), values.device_bytes(), static_cast<size_t>(values.bytes()));
    block.data = source.data();
    std::memset(packed.data(), 0xC1, static_cast<size_t>(tile.bytes()));
    pack_panels(block, tile, packed.data());
    int64_t wrong = 0;
    for (int64_t k = 0; k < tile.rows; ++k) {
      for (int64_t j = 0; j < tile.cols; ++j) {
        const int64_t in_panel = tile.pairs ? k / 2 * 2 * tile.ld + 2 * (j % panel) + k % 2 : k * tile.ld + j % panel;
        const int64_t at = j / panel * tile.rows * tile.ld + in_panel, source_at = block.transposed ? j * block.ld + k : k * block.ld + j;
        const bool inside = k < block.rows && j < block.cols;
        wrong += element_of(to, packed.data(), at) != (inside ? element_of(from, block.data, source_at) : 0.0F);
      }
    }
    EXPECT_EQ(wrong, 0) << block.rows << " x " << block.cols << (block.transposed ? " transposed" : "") << " of " << from << " into " << to
                        << (tile.pairs ? " in pairs" : "");
  }
}

using FewRowsOfGemms = BackendTest;

struct GemmSize {
  int64_t m, n, k;
};

class Tiles : public BackendTest, public ::testing::WithParamInterface<Dtype> {
 protected:
  void SetUp() override {
    if (GetParam() == Dtype::bf16 && !onednn_has_bf16()) GTEST_SKIP() << "this CPU has no bf16 dot product";
  }
};

// Draws sizes for every way to cut a GEMM (gemm_tiles.cpp): with operands packed for one task or for all, in one column block or several,
// at once or a step of the depth at a time, written through the caches or past them. The first ones are rare, for fp32 and for bf16.
GemmSize drawn_size(uint32_t number, CaseDraw& draw) {
  constexpr GemmSize kRare[] = {{700, 300, 4500}, {700, 300, 8500}, {600, 1100, 3500}, {600, 1100, 7500}};
  if (number < std::size(kRare)) return kRare[number];
  switch (draw.below(5)) {
    case 0: return {.m = draw.log_uniform(513, 1200), .n = draw.log_uniform(1, 500), .k = draw.log_uniform(1, 700)};
    case 1: return {.m = draw.log_uniform(513, 700), .n = draw.log_uniform(513, 1200), .k = draw.log_uniform(2500, 4000)};
    case 2: return {.m = draw.log_uniform(1, 600), .n = draw.log_uniform(1, 300), .k = draw.log_uniform(4500, 9000)};
    case 3: return {.m = draw.log_uniform(900, 1300), .n = draw.log_uniform(900, 1300), .k = draw.log_uniform(1, 60)};
    default: return {.m = draw.log_uniform(1, 300), .n = draw.log_uniform(1, 500), .k = draw.log_uniform(1, 700)};
  }
}

// Expects element (i, j) of a * b within the bound of a sum of so many fp32 roundings.
void expect_sum(const Tensor& a, const Tensor& b, const Tensor& out, int64_t i, int64_t j) {
  const int64_t depth = a.dim(1), cols = b.dim(1);
  double sum = 0.0, magnitudes = 0.0;
  for (int64_t k = 0; k < depth; ++k) {
    const double term =
        double{element_of(a.dtype(), a.device_bytes(), i * depth + k)} * double{element_of(b.dtype(), b.device_bytes(), k * cols + j)};
    sum += term, magnitudes += std::abs(term);
  }
  EXPECT_NEAR(double{out.data<float>()[i * cols + j]}, sum, 0x1p-24 * static_cast<double>(depth) * magnitudes) << i << ", " << j;
}

// Rows, columns and depth of zeros behind, another orientation, another place in memory: none changes a bit of what was there before.
TEST_P(Tiles, ZerosBehindAnyDimensionChangeNoBit) {
  for (uint32_t number = 0; number < 18; ++number) {
    CaseDraw draw(number);
    const auto [m, n, k] = drawn_size(number, draw);
    const int64_t more_m = m + draw.below(200), more_n = n + draw.below(300), more_k = k + draw.below(400);
    const Tensor a = wide_tensor(fast(), GetParam(), {m, k}, 3 * number), b = wide_tensor(fast(), GetParam(), {k, n}, 3 * number + 1);
    const bool a_transposed = draw.one_in(2), b_transposed = draw.one_in(2);
    const auto padded = [&](const Tensor& from, int64_t rows, int64_t cols, bool transposed) {
      const Tensor out = zeros(fast(), GetParam(), transposed ? Shape{cols, rows} : Shape{rows, cols});
      const int64_t element = dtype_bytes(GetParam());
      for (int64_t i = 0; i < from.dim(0); ++i) {
        for (int64_t j = 0; j < from.dim(1); ++j) {
          const int64_t to = transposed ? j * rows + i : i * cols + j;
          std::memcpy(out.device_bytes() + to * element, from.device_bytes() + (i * from.dim(1) + j) * element, size_t(element));
        }
      }
      return out;
    };
    const Tensor large_a = padded(a, more_m, more_k, a_transposed), large_b = padded(b, more_k, more_n, b_transposed);
    const Tensor out = empty(fast(), Dtype::f32, {m, n}), large = empty(fast(), Dtype::f32, {more_m, more_n});
    const auto product = [](const Block& left, const Block& right, const Tensor& to) {
      return TiledGemm{.a = left, .b = right, .out = to.device_bytes(), .out_dtype = Dtype::f32, .out_ld = to.dim(1), .accumulate = false};
    };
    const TiledGemm one = product(whole(a), whole(b), out),
                    other = product(whole(large_a, a_transposed), whole(large_b, b_transposed), large);
    multiply(GetParam(), Subnormals::flushed, {&one, 1});
    multiply(GetParam(), Subnormals::flushed, {&other, 1});
    int64_t different = 0;
    for (int64_t i = 0; i < m; ++i) {
      different += std::memcmp(out.data<float>() + i * n, large.data<float>() + i * more_n, static_cast<size_t>(n) * sizeof(float)) != 0;
    }
    EXPECT_EQ(different, 0) << "rows of " << m << " x " << n << " x " << k << " in " << more_m << " x " << more_n << " x " << more_k;
    for (int sample = 0; sample < 50; ++sample) expect_sum(a, b, out, draw.below(m), draw.below(n));
  }
}

TEST_P(Tiles, ManyAtOnceAreThoseOneByOne) {
  for (uint32_t number = 0; number < 8; ++number) {
    CaseDraw draw(100 + number);
    std::vector<Tensor> operands, outs[2];
    std::vector<TiledGemm> products[2];
    const double most = number < 4 ? 600.0 : 1600.0;  // the memory that they share is small for the latter
    for (int64_t i = 0, count = 2 + draw.below(4); i < count; ++i) {
      const GemmSize size{
          .m = draw.log_uniform(100, 1000), .n = draw.log_uniform(most / 4.0, most), .k = draw.log_uniform(most / 4.0, most)};
      for (const Shape& shape : {Shape{size.m, size.k}, Shape{size.k, size.n}}) {
        operands.push_back(random_tensor(fast(), GetParam(), shape, 10 * number + static_cast<uint32_t>(operands.size())));
      }
      for (const int way : {0, 1}) {
        const Tensor out = empty(fast(), Dtype::f32, {size.m, size.n});
        outs[way].push_back(out);
        products[way].push_back({.a = whole(operands[operands.size() - 2]),
                                 .b = whole(operands.back()),
                                 .out = out.device_bytes(),
                                 .out_dtype = Dtype::f32,
                                 .out_ld = size.n,
                                 .accumulate = false});
      }
    }
    multiply(GetParam(), Subnormals::flushed, products[0]);
    for (const TiledGemm& product : products[1]) multiply(GetParam(), Subnormals::flushed, {&product, 1});
    for (size_t i = 0; i < outs[0].size(); ++i)
      EXPECT_TRUE(same_elements(values(outs[0][i]), values(outs[1][i]))) << "GEMM " << i << " of " << number;
  }
}

// A group of its own gives a row the bits that it has among others: this rests on the place in a tile.
TEST_P(Tiles, ARowHasTheSameBitsAtEveryPlace) {
  const PackedGemms& products = packed_gemms(GetParam());
  EXPECT_EQ(unequal_places(products.whole), "");
  EXPECT_EQ(unequal_places(products.half), "");
  EXPECT_EQ(unequal_depths(products), "");
  EXPECT_EQ(products.whole.shape().rows % 32, 0) << "grouped_rows() is the same for every dtype";
}

// Otherwise it would lay b out anew in every call. AVX2's kernels do, whatever the layout.
TEST_P(Tiles, AreStoredAsTheLibraryReadsThem) {
  const auto& [whole, half] = packed_gemms(GetParam());
  EXPECT_EQ(2 * half.shape().depth, whole.shape().depth);
  if (std::string_view(onednn_isa_name()).starts_with("AVX2")) return;
  for (const PackedGemm* product : {&whole, &half}) {
    const auto [rows, cols, depth] = product->shape();
    EXPECT_EQ(product->b_bytes(), depth * cols * dtype_bytes(GetParam())) << "rows with padding between them";
  }
}

INSTANTIATE_TEST_SUITE_P(, Tiles, ::testing::Values(Dtype::f32, Dtype::bf16),
                         [](const auto& dtype) { return std::string(dtype_name(dtype.param)); });

// The shape that AMX has, on any CPU.
TEST_F(PackBlock, OtherShapesGiveTheSameGemm) {
  const TileShape shape{.rows = 64, .cols = 256, .depth = 256};
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
    if (dtype == Dtype::bf16 && !onednn_has_bf16()) continue;
    const PackedGemm large(dtype, shape);
    EXPECT_EQ(unequal_places(large), "") << dtype;
  }
}

// Generation's way to the library.
TEST_F(FewRowsOfGemms, AreThoseOfTheReference) {
  const FewRows scope;
  for (uint32_t i = 0; i < 60; ++i) {
    CaseDraw draw(i);
    GemmCase c = drawn_case(draw);
    c.a_transposed = false;
    c.m = 1 + draw.below(16);
    if (c.a && c.a.block_rows > 1) c.a = {};
    if (!c.a && c.b && c.out == Dtype::bf16) c.out = c.dense;
    c.n = std::min<int64_t>(c.n, 1024), c.k = std::min<int64_t>(c.k, 1024);
    whole_blocks_of(c.a, false, c.m, c.k);
    whole_blocks_of(c.b, c.b_transposed, c.k, c.n);
    whole_blocks_of(c.a, false, c.m, c.k);
    EXPECT_TRUE(gemms_agree(fast(), reference(), c, i)) << "case " << i;
  }
}

// Outside of generation, in training, they have the bits that they have among others, and in a wider GEMM.
TEST_F(FewRowsOfGemms, OutsideOfGenerationHaveTheBitsOfMany) {
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
    const Tensor x = wide_tensor(fast(), dtype, {100, 96}, 1), w = wide_tensor(fast(), dtype, {200, 96}, 2);
    const Tensor all = empty(fast(), Dtype::f32, {100, 200});
    fast().run(Gemm{.a = {x}, .b = {w, true}, .out = all, .accumulate = false});
    for (const int64_t rows : {1, 3, 16}) {
      for (const int64_t columns : {1, 8, 65}) {
        const Tensor out = empty(fast(), Dtype::f32, {rows, columns});
        fast().run(Gemm{.a = {x.slice(20, 20 + rows)}, .b = {w.slice(0, columns), true}, .out = out, .accumulate = false});
        int64_t different = 0;
        for (int64_t i = 0; i < rows; ++i) {
          for (int64_t j = 0; j < columns; ++j) different += out.data<float>()[i * columns + j] != all.data<float>()[(20 + i) * 200 + j];
        }
        EXPECT_EQ(different, 0) << rows << " x " << columns << ' ' << dtype;
      }
    }
  }
}

TEST(UnequalLines, AreRowsOrColumnsWithAnElementThatDiffers) {
  std::vector<float> sums(6 * 4, 1.0F);
  EXPECT_EQ(unequal_lines(sums, 4, Alike::rows) + unequal_lines(sums, 4, Alike::columns), 0);
  sums[2 * 4 + 1] = std::nextafter(1.0F, 2.0F);
  sums[5 * 4 + 1] = -1.0F;
  EXPECT_EQ(unequal_lines(sums, 4, Alike::rows), 2);
  EXPECT_EQ(unequal_lines(sums, 4, Alike::columns), 1);
}

TEST_F(PackBlock, GemmsWithoutDepthAreTheirBias) {
  for (const int64_t rows : {8, 600}) {
    const Tensor a = random_tensor(fast(), Dtype::f32, {rows, 0}, 1), b = random_tensor(fast(), Dtype::f32, {0, 8}, 2),
                 bias = random_tensor(fast(), Dtype::f32, {8}, 3), out = random_tensor(fast(), Dtype::f32, {rows, 8}, 4);
    const TiledGemm product{
        .a = whole(a), .b = whole(b), .out = out.device_bytes(), .out_dtype = Dtype::f32, .out_ld = 8, .accumulate = false, .bias = &bias};
    multiply(Dtype::f32, Subnormals::flushed, {&product, 1});
    for (int64_t i = 0; i < rows; ++i) ASSERT_EQ(to_host<float>(out.slice(i, i + 1)), to_host<float>(bias)) << "row " << i;
  }
}

TEST_F(PackBlock, GemmsWithoutElementsDoNothing) {
  const Tensor a = random_tensor(fast(), Dtype::f32, {0, 8}, 1), b = random_tensor(fast(), Dtype::f32, {8, 0}, 2),
               c = random_tensor(fast(), Dtype::f32, {8, 8}, 3), out = random_tensor(fast(), Dtype::f32, {8, 8}, 4);
  const std::vector<float> before = to_host<float>(out);
  const auto product = [&](const Tensor& x, const Tensor& y) {
    return TiledGemm{.a = whole(x), .b = whole(y), .out = out.device_bytes(), .out_dtype = Dtype::f32, .out_ld = 8, .accumulate = false};
  };
  const std::vector<TiledGemm> products = {product(a, c), product(c, b)};
  multiply(Dtype::f32, Subnormals::flushed, products);
  EXPECT_EQ(to_host<float>(out), before);
}

}  // namespace mantissa::test::packed_gemm_test
