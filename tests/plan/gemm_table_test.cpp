// The table of GEMM paths: requests of recipes to architectures and versions of cuBLASLt, held against a file.
#include <gmock/gmock.h>

#include <fstream>

#include "files.h"
#include "mantissa/precision/config.h"
#include "plan/plan_table.h"
#include "testing.h"

namespace mantissa::test::gemm_table_test {

using ::testing::HasSubstr;

constexpr const char* kFile = "/tests/plan/gemm_paths.txt";
constexpr std::array<int, 3> kLibraries = {120800, 130100, 130400};

std::string line_of(const std::string& what, const GemmForm& form, const GemmDevice& device) {
  const GemmRoute route = route_gemm(form, device);
  std::ostringstream out;
  out << what << " | " << gemm_path_name(route.path) << " | dequantized " << route.dequantized
      << (route.widened > 0 ? text(", widened ", route.widened) : "") << ", transposed " << route.transposed << ", scales " << route.scales
      << " | " << std::scientific << std::setprecision(2) << route.bound;
  if (route.obstacle != GemmObstacle::none) out << " | " << obstacle_text(route.obstacle, form, device);
  return out.str() + '\n';
}

// The table for rows of 256 tokens, and a weight of 512 x 1024.
std::string table() {
  std::string out = "# preset, GEMM, device | path | operands written before | bound | why codes are not multiplied as codes\n";
  const ModuleShape weight{.path = "layers.0.mlp.up", .out = 512, .in = 1024};
  for (const std::string& preset : preset_names()) {
    for (const GemmRole role : kGemmRoles) {
      const GemmForm form = gemm_form(preset_recipe(preset), role, weight, 256);
      const std::string what = text(preset, ' ', gemm_name(role), ' ');
      out += line_of(what + "cpu", form, {});
      for (const int architecture : {80, 89, 90, 100, 120}) {
        std::string before;
        for (const int library : kLibraries) {  // later ones where they differ
          const GemmDevice device{.architecture = architecture, .library = library};
          const std::string line = line_of("", role == GemmRole::wgrad ? along_rows(form, device) : form, device);
          if (line != before) out += text(what, "sm_", architecture, ' ', gemm_library_text(library)) + line;
          before = line;
        }
      }
    }
  }
  return out;
}

// To write it anew: MANTISSA_WRITE_GOLDEN=1 layer_tests --gtest_filter='GemmTable.*'
TEST(GemmTable, IsThatOfTheFile) {
  const std::string path = std::string(MANTISSA_SOURCE_DIR) + kFile, found = table();
  if (std::getenv("MANTISSA_WRITE_GOLDEN")) std::ofstream(path) << found;
  EXPECT_EQ(found, read_file(path));
}

TEST(GemmTable, NeverMultipliesCodesAsCodesWhereItMayNot) {
  const ModuleShape weight{.path = "w", .out = 512, .in = 1024};
  for (const auto& [preset, architecture] : {std::pair{"fp8_block", 90},
                                             {"mxfp8", 100},
                                             {"mxfp8", 103},
                                             {"mxfp8", 120},
                                             {"mxfp4_qat_mxfp8_act", 100},
                                             {"nvfp4_qat_nvfp4_act", 100},
                                             {"nvfp4_qat_nvfp4_act", 120}}) {
    const GemmForm form = gemm_form(preset_recipe(preset), GemmRole::fprop, weight, 256);
    const GemmDevice may{.architecture = architecture, .library = 130100},
        may_not{.architecture = architecture, .library = 130100, .native = false};
    EXPECT_TRUE(is_native(route_gemm(form, may).path)) << preset;
    EXPECT_EQ(route_gemm(form, may_not).path, GemmPath::bf16) << preset;
    EXPECT_EQ(route_gemm(form, may_not).obstacle, GemmObstacle::switched_off) << preset;
  }
}

GemmRoute route_with(const std::function<void(GemmForm&, GemmDevice&)>& change) {
  const ModuleShape weight{.path = "w", .out = 512, .in = 1024};
  GemmForm form = gemm_form(preset_recipe("fp8_block"), GemmRole::fprop, weight, 256);
  GemmDevice device{.architecture = 90, .library = 130100};
  change(form, device);
  return route_gemm(form, device);
}

TEST(GemmTable, SaysWhatStandsAgainstANativeGemm) {
  const std::vector<std::pair<GemmObstacle, std::function<void(GemmForm&, GemmDevice&)>>> changes = {
      {GemmObstacle::none, [](GemmForm&, GemmDevice&) {}},
      {GemmObstacle::no_library, [](GemmForm&, GemmDevice& d) { d.library = 0; }},
      {GemmObstacle::old_library, [](GemmForm&, GemmDevice& d) { d.library = 120805; }},
      {GemmObstacle::none, [](GemmForm&, GemmDevice& d) { d.library = 120900; }},
      {GemmObstacle::architecture, [](GemmForm&, GemmDevice& d) { d.architecture = 89; }},
      {GemmObstacle::architecture, [](GemmForm&, GemmDevice& d) { d.architecture = 100; }},
      {GemmObstacle::one_operand, [](GemmForm& f, GemmDevice&) { f.a.how = {}; }},
      {GemmObstacle::element_format, [](GemmForm& f, GemmDevice&) { f.a.how.format = Format::e2m1; }},
      {GemmObstacle::element_format, [](GemmForm& f, GemmDevice&) { f.a.how.block_cols = 32; }},
      {GemmObstacle::blocks, [](GemmForm& f, GemmDevice&) { f.a.transposed = true; }},
      {GemmObstacle::blocks, [](GemmForm& f, GemmDevice&) { f.a.how = f.a.how.transposed(); }},
      {GemmObstacle::two_e5m2, [](GemmForm& f, GemmDevice&) { f.a.how.format = f.b.how.format = Format::e5m2; }},
      {GemmObstacle::none, [](GemmForm& f, GemmDevice&) { f.a.how.format = Format::e5m2; }},
      {GemmObstacle::two_tiles, [](GemmForm& f, GemmDevice&) { f.a.how = f.b.how; }},
      {GemmObstacle::sizes, [](GemmForm& f, GemmDevice&) { f.m = 255; }},
      {GemmObstacle::sizes, [](GemmForm& f, GemmDevice&) { f.n = 520; }},
      {GemmObstacle::sizes, [](GemmForm& f, GemmDevice&) { f.n = 576; }},  // 4.5 tiles
      {GemmObstacle::none, [](GemmForm& f, GemmDevice&) { f.m = 272; }},   // the blocks of a lie along its rows
      {GemmObstacle::sizes, [](GemmForm& f, GemmDevice&) { f.k = 1024 + 16; }},
      {GemmObstacle::alignment, [](GemmForm& f, GemmDevice&) { f.b.alignment = 8; }},
      {GemmObstacle::nothing, [](GemmForm& f, GemmDevice&) { f.k = 0; }},
  };
  for (const auto& [obstacle, change] : changes) {
    const GemmRoute route = route_with(change);
    EXPECT_EQ(route.obstacle, obstacle);
    EXPECT_EQ(is_native(route.path), obstacle == GemmObstacle::none);
    EXPECT_EQ(route.path == GemmPath::mma, obstacle == GemmObstacle::no_library);
    EXPECT_EQ(route.path == GemmPath::plain, obstacle == GemmObstacle::nothing);
  }
}

TEST(GemmTable, SaysWhatStandsAgainstNvfp4) {
  const auto obstacle = [](const std::function<void(GemmForm&, GemmDevice&)>& change) {
    return route_with([&](GemmForm& f, GemmDevice& d) {
             f.a.how = {Format::nvfp4, 1, 16, ScaleRule::nearest, {}, -2}, f.b.how = {Format::nvfp4, 1, 16, ScaleRule::nearest, {}, -8};
             d.architecture = 103, d.library = 120800;
             change(f, d);
           })
        .obstacle;
  };
  EXPECT_EQ(obstacle([](GemmForm&, GemmDevice&) {}), GemmObstacle::none);
  EXPECT_EQ(obstacle([](GemmForm& f, GemmDevice&) { f.k = 1024 + 32, f.n = 528, f.m = 16; }), GemmObstacle::none);
  EXPECT_EQ(obstacle([](GemmForm&, GemmDevice& d) { d.library = 120700; }), GemmObstacle::old_library);
  EXPECT_EQ(obstacle([](GemmForm&, GemmDevice& d) { d.architecture = 90; }), GemmObstacle::architecture);
  EXPECT_EQ(obstacle([](GemmForm& f, GemmDevice&) { f.b.how = {}; }), GemmObstacle::one_operand);
  EXPECT_EQ(obstacle([](GemmForm& f, GemmDevice&) { f.b.how = {Format::e4m3, 1, 32}; }), GemmObstacle::element_format);
  EXPECT_EQ(obstacle([](GemmForm& f, GemmDevice&) { f.a.how = {Format::e2m1, 1, 32}; }), GemmObstacle::element_format);
  EXPECT_EQ(obstacle([](GemmForm& f, GemmDevice&) { f.b.transposed = false; }), GemmObstacle::blocks);
  EXPECT_EQ(obstacle([](GemmForm& f, GemmDevice&) { f.a.transposed = true; }), GemmObstacle::blocks);
  EXPECT_EQ(obstacle([](GemmForm& f, GemmDevice&) { f.k = 1024 + 16; }), GemmObstacle::sizes);
  EXPECT_EQ(obstacle([](GemmForm& f, GemmDevice&) { f.m = 248; }), GemmObstacle::sizes);
  EXPECT_EQ(obstacle([](GemmForm& f, GemmDevice&) { f.a.alignment = 8; }), GemmObstacle::alignment);
}

TEST(GemmTable, WidensE2m1InWholeBlocks) {
  const auto route = [](Quantization of_weight, int64_t block_of_input) {
    return route_with([&](GemmForm& f, GemmDevice& d) {
      f.a.how = {Format::e4m3, 1, block_of_input}, f.b.how = of_weight;
      d.architecture = block_of_input == 32 ? 100 : 90;
    });
  };
  const auto e2m1 = [](int64_t block) { return Quantization{Format::e2m1, 1, block, ScaleRule::flashinfer}; };
  EXPECT_EQ(route(e2m1(32), 32).widened, 1);
  EXPECT_EQ(route(e2m1(96), 32).path, GemmPath::mxfp8);
  for (const auto& [of_weight, of_input] : {std::pair<int64_t, int64_t>{16, 32}, {48, 32}, {32, 128}, {128, 128}, {256, 128}})
    EXPECT_EQ(route(e2m1(of_weight), of_input).obstacle, GemmObstacle::element_format) << of_weight;
  EXPECT_EQ(route(e2m1(32).transposed(), 32).obstacle, GemmObstacle::blocks);
  EXPECT_EQ(route(Quantization{Format::e2m1, 32, 32}, 32).obstacle, GemmObstacle::element_format);
}

TEST(GemmTable, MultipliesGroupsAtOnceWhereThatIsAskedFor) {
  const auto path = [](const std::function<void(GemmForm&, GemmDevice&)>& change, int64_t usual_rows = 600) {
    GemmForm form{.a = {}, .b = {}, .m = 600, .n = 512, .k = 1024};
    GemmDevice device{.architecture = 90, .library = 131000, .grouped = true};
    change(form, device);
    return route_grouped_gemm(form, device, usual_rows).path;
  };
  EXPECT_EQ(path([](GemmForm&, GemmDevice&) {}), GemmPath::grouped);
  EXPECT_EQ(path([](GemmForm&, GemmDevice&) {}, 1), GemmPath::grouped);
  EXPECT_EQ(path([](GemmForm&, GemmDevice&) {}, 0), GemmPath::mma) << "layouts are to have the bits of one rank";
  EXPECT_EQ(path([](GemmForm& f, GemmDevice&) { f.b.how = {Format::e4m3, 32, 32}; }), GemmPath::grouped);
  EXPECT_EQ(path([](GemmForm&, GemmDevice& d) { d.architecture = 103; }), GemmPath::grouped);
  EXPECT_EQ(path([](GemmForm&, GemmDevice& d) { d.grouped = false; }), GemmPath::bf16);
  EXPECT_EQ(path([](GemmForm&, GemmDevice& d) { d.library = 130999; }), GemmPath::bf16);
  for (const int architecture : {80, 89, 120})
    EXPECT_EQ(path([&](GemmForm&, GemmDevice& d) { d.architecture = architecture; }), GemmPath::bf16) << architecture;
  EXPECT_EQ(path([](GemmForm& f, GemmDevice&) { f.n = 508, f.b.transposed = true; }), GemmPath::bf16);
  EXPECT_EQ(path([](GemmForm& f, GemmDevice&) { f.n = 508, f.b.transposed = true, f.out = Dtype::f32; }), GemmPath::grouped);
  EXPECT_EQ(path([](GemmForm& f, GemmDevice&) { f.a.dtype = Dtype::f32; }), GemmPath::fp32);
}

TEST(GemmTable, HasKernelsOfOursWithoutTheLibrary) {
  const auto path = [](const std::function<void(GemmForm&)>& change) {
    GemmForm form{.a = {}, .b = {}, .m = 24, .n = 32, .k = 40};
    change(form);
    return route_gemm(form, {.architecture = 90}).path;
  };
  EXPECT_EQ(path([](GemmForm&) {}), GemmPath::mma);
  EXPECT_EQ(path([](GemmForm& f) { f.m = 21; }), GemmPath::mma);
  EXPECT_EQ(path([](GemmForm& f) { f.m = 21, f.a.transposed = true; }), GemmPath::plain);
  EXPECT_EQ(path([](GemmForm& f) { f.n = 31; }), GemmPath::plain);
  EXPECT_EQ(path([](GemmForm& f) { f.n = 31, f.b.transposed = true; }), GemmPath::mma);
  EXPECT_EQ(path([](GemmForm& f) { f.k = 44; }), GemmPath::plain);
  EXPECT_EQ(path([](GemmForm& f) { f.a.alignment = 8; }), GemmPath::mma);  // operands of values, which are copied before
  EXPECT_EQ(path([](GemmForm& f) { f.b.dtype = Dtype::f32; }), GemmPath::plain);
  EXPECT_EQ(path([](GemmForm& f) { f.k = 0; }), GemmPath::plain);
}

TEST(GemmTable, KnowsDevicesByName) {
  EXPECT_EQ(gemm_device("cpu").architecture, 0);
  EXPECT_EQ(gemm_device("sm_90").architecture, 90);
  EXPECT_THAT(error_of([] { gemm_device("sm_91"); }).what(), HasSubstr("sm_91"));
}

}  // namespace mantissa::test::gemm_table_test
