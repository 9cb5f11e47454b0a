// The figures of the error statistics against tensors made by hand, and the parts of a training step that are measured.
#include <gmock/gmock.h>

#include <cmath>
#include <limits>
#include <set>

#include "checkpoint/precision_setup.h"
#include "kernel_backends.h"
#include "metrics/precision_statistics.h"
#include "metrics/run_metrics.h"
#include "ops/quantization_observer.h"
#include "testing.h"
#include "training.h"

namespace mantissa::test::quantization_error_test {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Part = QuantizationError::Part;

class ErrorStatistics : public OnEachBackend {
 protected:
  // Quantizes and measures x [rows, 32], zeros but for the values given.
  std::vector<double> measured(int64_t rows, const std::vector<double>& given, const Quantization& how) {
    std::vector<double> all = given;
    all.resize(static_cast<size_t>(rows * 32));
    const Tensor x = tensor_of(device(), Dtype::bf16, {rows, 32}, all);
    const int64_t padded = (rows + how.block_rows - 1) / how.block_rows * how.block_rows;
    const QuantizedTensor q = empty_quantized(device(), {padded, 32}, how);
    device().run(Quantize{.x = x, .out = q});
    const Tensor out = empty(device(), Dtype::f64, {Part::size});
    device().run(QuantizationError{.x = x, .q = q, .out = out});
    return values(out);
  }
  static std::map<int, double> scales(const std::vector<double>& parts) {
    std::map<int, double> out;
    for (int code = 0; code < 256; ++code) {
      const double blocks = parts[static_cast<size_t>(Part::scales + code)];
      if (blocks > 0) out[code] = blocks;
    }
    return out;
  }
};

INSTANTIATE_TEST_SUITE_P(, ErrorStatistics, ::testing::ValuesIn(tested_backends()), backend_of);

constexpr Quantization kE4m3{Format::e4m3};

// Rows may hold anything.
TEST_P(ErrorStatistics, RowsOfMinusOneDoNotCount) {
  const Tensor x = tensor_of(device(), Dtype::bf16, {3, 32}, std::vector<double>(96, 3.0));
  const QuantizedTensor q = quantized(x, kE4m3);
  device().run(Fill{.out = x.slice(1, 2), .value = std::nan("")});
  const auto measured_rows = [&](const std::vector<double>& rows) {
    const Tensor out = empty(device(), Dtype::f64, {Part::size});
    device().run(QuantizationError{.x = x, .q = q, .out = out, .rows = tensor_of(device(), Dtype::i32, {3}, rows)});
    return values(out);
  };
  const std::vector<double> some = measured_rows({5, -1, 0});
  EXPECT_EQ(some[Part::signal], 64 * 9.0);
  EXPECT_EQ(some[Part::amax], 3);
  EXPECT_EQ(some[Part::elements], 64);
  EXPECT_EQ(scales(some).begin()->second, 2);
  EXPECT_EQ(measured_rows({-1, -1, -1}), std::vector<double>(Part::size, 0.0));
}

// This holds along columns and in tiles, too; a block counts if one of its rows does.
TEST_P(ErrorStatistics, BlocksOfSeveralRowsCountAsOneOfTheirRowsDoes) {
  const Tensor x = tensor_of(device(), Dtype::bf16, {96, 32}, std::vector<double>(96 * 32, 3.0));
  std::vector<double> rows(96, -1.0);
  rows[31] = rows[64] = rows[70] = 0.0;
  for (const auto& [how, blocks] : {std::pair{kE4m3.transposed(), 2 * 32}, std::pair{Quantization{Format::e4m3, 32, 32}, 2}}) {
    const Tensor out = empty(device(), Dtype::f64, {Part::size});
    device().run(QuantizationError{.x = x, .q = quantized(x, how), .out = out, .rows = tensor_of(device(), Dtype::i32, {96}, rows)});
    EXPECT_EQ(values(out)[Part::elements], 3 * 32);
    EXPECT_EQ(values(out)[Part::signal], 3 * 32 * 9.0);
    EXPECT_EQ(scales(values(out)).begin()->second, blocks);
  }
}

// Scale 1, as 448 is the largest code: 1.0625 lies between 1 and 1.125 and goes to the even 1; 2^-10 is half the least code and goes to 0.
TEST_P(ErrorStatistics, NoiseAndFlushedElementsAreExact) {
  const std::vector<double> parts = measured(1, {448, -1.0625, 0x1p-10, -0x1p-9}, kE4m3);
  EXPECT_EQ(parts[Part::signal], 448.0 * 448 + 1.0625 * 1.0625 + 0x1p-20 + 0x1p-18);
  EXPECT_EQ(parts[Part::noise], 0.0625 * 0.0625 + 0x1p-20);
  EXPECT_EQ(parts[Part::clipped], 0);
  EXPECT_EQ(parts[Part::flushed], 1);
  EXPECT_EQ(parts[Part::amax], 448);
  EXPECT_THAT(scales(parts), ElementsAre(std::pair(127, 1)));
}

// The rule floor gives 500 the scale 1, too: it saturates at 448. rceil doubles the scale: 500 = 2 * 250 goes to 2 * 256.
TEST_P(ErrorStatistics, ElementsBeyondTheLargestCodeAreClipped) {
  const std::vector<double> floor = measured(1, {-500, 450, 448, 7}, {Format::e4m3, 1, 32, ScaleRule::floor});
  EXPECT_EQ(floor[Part::clipped], 2);
  EXPECT_EQ(floor[Part::noise], 52.0 * 52 + 2.0 * 2);
  const std::vector<double> rceil = measured(1, {-500}, kE4m3);
  EXPECT_EQ(rceil[Part::clipped], 0);
  EXPECT_EQ(rceil[Part::noise], 12.0 * 12);
  EXPECT_THAT(scales(rceil), ElementsAre(std::pair(128, 1)));
}

TEST_P(ErrorStatistics, PackedCodesOfFakeQuantizationAreMeasured) {
  // Scale 1: 6 is the largest code. 2.5 is a tie and goes to 2; 0.25 is half the least code.
  const std::vector<double> parts = measured(1, {6, -2.5, 0.25}, {Format::e2m1, 1, 32, ScaleRule::flashinfer});
  EXPECT_EQ(parts[Part::noise], 0.25 + 0.0625);
  EXPECT_EQ(parts[Part::flushed], 1);
  EXPECT_EQ(parts[Part::amax], 6);
}

TEST_P(ErrorStatistics, RowsBeyondTheEndOfXDoNotCount) {
  std::vector<double> x(33 * 32, 1.0);
  const std::vector<double> rows = measured(33, x, kE4m3), columns = measured(33, x, kE4m3.transposed()),
                            tiles = measured(33, x, {Format::e4m3, 32, 32});
  for (const std::vector<double>& parts : {rows, columns, tiles}) {
    EXPECT_EQ(parts[Part::signal], 33 * 32);
    EXPECT_EQ(parts[Part::noise], 0);
  }
  EXPECT_THAT(scales(rows), ElementsAre(std::pair(119, 33)));
  EXPECT_THAT(scales(columns), ElementsAre(std::pair(119, 64)));
  EXPECT_THAT(scales(tiles), ElementsAre(std::pair(119, 2)));
}

TEST_P(ErrorStatistics, NanAndInfShow) {
  const std::vector<double> nan = measured(2, {std::nan(""), 1}, kE4m3);
  EXPECT_TRUE(std::isnan(nan[Part::amax]) && std::isnan(nan[Part::noise]));
  EXPECT_THAT(scales(nan), ElementsAre(std::pair(0, 1), std::pair(255, 1)));
  const std::vector<double> inf = measured(1, {std::numeric_limits<double>::infinity(), 1}, kE4m3);
  EXPECT_TRUE(std::isinf(inf[Part::amax]) && std::isnan(inf[Part::noise]));
}

// ---- of a training step

class StepStatistics : public TrainingTest {
 protected:
  std::vector<std::string> sets(const std::vector<std::string>& more) const {
    std::vector<std::string> out = {"precision.dtype=bf16", "model.hidden_size=64", "model.intermediate_size=96", "training.steps=4"};
    out.insert(out.end(), more.begin(), more.end());
    return out;
  }
  std::vector<PrecisionEvent> reports(const std::string& name, const std::vector<std::string>& more) const {
    run(name, sets(more));
    return read_run_metrics(run_folder(name)).precision;
  }
};

std::string described(const PrecisionEvent& event) {
  std::string out =
      text(event.step, ' ', event.module, ' ', event.role, ' ', *event.sqnr_db, ' ', event.clipped, ' ', event.flushed, ' ', *event.amax);
  for (const auto& [code, blocks] : event.scales) out += text(' ', code, ':', blocks);
  return out;
}

std::vector<std::string> described(const std::vector<PrecisionEvent>& reports) {
  std::vector<std::string> out;
  for (const PrecisionEvent& event : reports) out.push_back(described(event));
  return out;
}

TEST_F(StepStatistics, ChangeNoBitOfTraining) {
  const std::vector<std::string> mxfp8 = sets({"precision.recipe=mxfp8"});
  std::vector<std::string> measured = mxfp8;
  measured.push_back("precision.report_interval=1");
  const TrainedRun without = run("without", mxfp8), with = run("with", measured);
  EXPECT_TRUE(same_elements(without.losses, with.losses));
  EXPECT_TRUE(same_elements(without.norms, with.norms));
  EXPECT_TRUE(read_run_metrics(run_folder("without")).precision.empty());
  EXPECT_FALSE(without.steps[0].precision);
  ASSERT_TRUE(with.steps[0].precision);
  EXPECT_THAT(step_line(with.steps[0]), HasSubstr(" | q-sqnr "));
}

TEST_F(StepStatistics, CoverEveryRoleThatARecipeQuantizesOnTheStepsAskedFor) {
  const auto roles = [&](const std::string& recipe) {
    std::set<std::string> out;
    for (const PrecisionEvent& event : reports(recipe, {"precision.recipe=" + recipe, "precision.report_interval=2"})) {
      EXPECT_TRUE(event.step == 2 || event.step == 4) << event.step;
      if (event.module == "layers.1.mlp.down") out.insert(event.role);
      EXPECT_NE(event.module, "embed");
    }
    return out;
  };
  EXPECT_THAT(roles("mxfp8"), ElementsAre("input", "output_grad", "weight"));
  EXPECT_THAT(roles("mxfp8_weights"), ElementsAre("weight"));
  EXPECT_THAT(roles("mxfp4_qat"), ElementsAre("weight"));
  EXPECT_THAT(roles("mxfp4_qat_mxfp8_act"), ElementsAre("input", "output_grad", "weight"));
  EXPECT_TRUE(roles("high").empty());
}

// Recomputation quantizes inputs again, and two micro batches are two halves of the same tokens.
TEST_F(StepStatistics, CountEachOperandOnceHoweverBackwardIsDone) {
  const std::vector<std::string> once = {"precision.recipe=mxfp8", "precision.report_interval=1", "training.steps=1"};
  const std::vector<PrecisionEvent> expected = reports("none", once);
  ASSERT_EQ(expected.size(), 2U * 4 * 3);
  for (const char* how : {"selective", "full"}) {
    std::vector<std::string> more = once;
    more.push_back(text("training.recompute=", how));
    EXPECT_EQ(described(reports(how, more)), described(expected)) << how;
  }
  const auto blocks = [](const PrecisionEvent& event) {
    int64_t sum = 0;
    for (const auto& [code, count] : event.scales) sum += count;
    return sum;
  };
  for (const PrecisionEvent& event : expected) {
    if (event.module != "layers.0.mlp.down") continue;  // [64, 96] on 8 * 16 tokens
    EXPECT_EQ(blocks(event), event.role == "weight" ? 2 * 3 : event.role == "input" ? 128 * 3 : 128 * 2) << event.role;
  }
}

TEST_F(StepStatistics, AreThoseOfTheTensorsThatThePlanQuantizes) {
  RunConfig config = this->config("direct", sets({"precision.recipe=mxfp8"})).config;
  config.model.vocab_size = 8;
  const auto device = make_backend("cpu");
  Gpt model(config.model, *device, resolve_plan(config), {.recompute = Recompute::none, .gradients = true});
  Optimizer optimizer(model.parameters(), {});
  optimizer.initialize(5);
  const Parameter& weight = *model.parameters().find("layers.0.attn.out.weight");
  // The last 32 of 64 tokens are padding, which is larger.
  std::vector<double> content(64 * 32, 3.0), counted(64, 0.0);
  std::fill(content.begin() + 32 * 32, content.end(), 5.0);
  std::fill(counted.begin() + 32, counted.end(), -1.0);
  const Tensor tokens = tensor_of(*device, Dtype::bf16, {64, 32}, content), rows = tensor_of(*device, Dtype::i32, {64}, counted);
  const auto observed = [&](OperandRole role, const Quantization& how) {
    observe_quantization({.weight = &weight.leaf, .role = role, .x = tokens, .codes = quantized(tokens, how), .rows = rows});
  };
  const auto both = [&] {
    observed(OperandRole::input, kE4m3);
    observed(OperandRole::output_grad, kE4m3.transposed());
  };
  const std::vector<PrecisionEvent> measured = measure_precision(model.parameters(), resolve_plan(config), optimizer, 7, both);
  ASSERT_EQ(measured.size(), 10U);
  for (const size_t i : {size_t{2}, size_t{3}}) {
    EXPECT_EQ(*measured[i].amax, 3.0) << measured[i].role;
    EXPECT_EQ(measured[i].scales.size(), 1U) << measured[i].role;
    EXPECT_EQ(measured[i].scales.begin()->second, 32) << measured[i].role;
  }
  EXPECT_EQ(measured[1].module, "layers.0.attn.out");
  EXPECT_EQ(measured[1].step, 7);
  const Tensor decoded = empty(*device, Dtype::f32, weight.codes().shape);
  device->run(Dequantize{.x = weight.codes(), .out = decoded});
  const std::vector<double> x = values(converted(weight.value(), Dtype::bf16)), q = values(decoded);
  double signal = 0.0, noise = 0.0, amax = 0.0;
  for (size_t i = 0; i < x.size(); ++i) {
    signal += x[i] * x[i];
    noise += (x[i] - q[i]) * (x[i] - q[i]);
    amax = std::max(amax, std::abs(x[i]));
  }
  EXPECT_NEAR(*measured[1].sqnr_db, 10.0 * std::log10(signal / noise), 1e-9);
  EXPECT_EQ(*measured[1].amax, amax);
}

// A parameter that is a module itself, as sinks of attention are, is passed over.
TEST_F(StepStatistics, GoToTensorBoardUnderTheirTags) {
  const std::vector<PrecisionEvent> told = reports("tags", {"precision.recipe=mxfp8", "precision.report_interval=1", "training.steps=1",
                                                            "logging.tensorboard=true", "model.attention_sinks=true"});
  EXPECT_EQ(told.size(), 2U * 4 * 3);
  for (const PrecisionEvent& event : told) EXPECT_FALSE(event.module.ends_with("attn")) << event.module;
  std::string events;
  for (const auto& entry : std::filesystem::directory_iterator(run_folder("tags"))) {
    if (entry.path().filename().string().starts_with("events.")) events += read_file(entry.path());
  }
  for (const char* figure : {"amax", "sqnr_db", "clipped", "flushed"})
    EXPECT_THAT(events, HasSubstr(text("precision/layers.1.attn.qkv/output_grad/", figure)));
}

TEST(PrecisionSummary, NamesTheMeanAndTheWorstModule) {
  EXPECT_FALSE(summary_of({}));
  const std::vector<PrecisionEvent> events = {{.step = 1, .module = "a", .role = "weight", .sqnr_db = 30.0, .scales = {}},
                                              {.step = 1, .module = "b", .role = "input", .sqnr_db = 24.75, .scales = {}},
                                              {.step = 1, .module = "c", .role = "input", .sqnr_db = {}, .scales = {}}};
  std::optional<PrecisionSummary> summary = summary_of(events);
  ASSERT_TRUE(summary);
  StepEvent event;
  event.precision = summary;
  EXPECT_THAT(step_line(event), ::testing::EndsWith(" | q-sqnr 27.4 dB (worst b 24.8)"));
  event.precision->fp32_gemms = 12;
  EXPECT_THAT(step_line(event), ::testing::EndsWith(" | fp32 GEMMs 12"));
}

}  // namespace mantissa::test::quantization_error_test
