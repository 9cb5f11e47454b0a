// Reports of checkpoints and statistics about each expert of a grouped weight.
#include <gmock/gmock.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <map>

#include "base/hash.h"
#include "checkpoint/saved_model.h"
#include "checkpoint_shards.h"
#include "hf/load_model.h"
#include "mantissa/backend/functions.h"
#include "metrics/run_metrics.h"
#include "training_on_ranks.h"

namespace mantissa::expert_reports_test {

using nlohmann::json;
using test::error_of;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr const char* kGroupedWeight = "layers.1.moe.experts.down.weight";

class ExpertReports : public test::TrainingOnRanks {
 protected:
  // Two layers of 5 experts; 64 channels, experts of 32: grouped weights of 5 x 64 rows. After one step, which changes no weight.
  static std::vector<std::string> sets(std::vector<std::string> more) {
    std::vector<std::string> out;
    out.insert(out.end(), {"precision.dtype=bf16", "precision.recipe=mxfp8", "model.hidden_size=64", "model.intermediate_size=96",
                           "model.moe.num_experts=5", "model.moe.intermediate_size=32", "model.moe.num_experts_per_tok=2",
                           "training.accumulation=tree", "training.steps=1", "optimizer.lr=1e-60", "precision.report_interval=1",
                           "training.global_batch_size=8", "training.grad_accum=null", "training.micro_batch_size=2"});
    out.insert(out.end(), more.begin(), more.end());
    return out;
  }

  json codes_of(const std::string& name) const {
    return json::parse(CheckpointReader(checkpoint(name, 1)).manifest().plan).at("quantized");
  }

  void change_codes(const std::string& name, const std::function<void(json&)>& change) const {
    test::change_manifest(checkpoint(name, 1), [&](Manifest& manifest) {
      json plan = json::parse(manifest.plan);
      change(plan.at("quantized").at(kGroupedWeight));
      manifest.plan = plan.dump();
    });
  }

  // Changes a master of one expert, and makes the hashes of the bytes right again.
  void set_master(const std::string& name, int64_t expert, float value) const {
    test::set_element(checkpoint(name, 1), std::string("master.") + kGroupedWeight, expert * 64 * 32 + 5, value);
  }

  Error error_of_verify(const std::string& name) const {
    CheckpointReader reader(checkpoint(name, 1));
    return error_of([&] { verify_codes(reader, *make_backend("cpu")); });
  }

  struct ExpertError {
    int64_t expert = -1;
    double sqnr_db = 1e300;
  };

  // The worst expert of a grouped weight, by the definition, from the masters.
  ExpertError worst_of(const std::string& name, const std::string& module, int64_t rows, int64_t columns, const Quantization& how) const {
    const auto device = make_backend("cpu_reference");
    const std::vector<float> master = tensor(name, 1, "master." + module + ".weight");
    const int64_t experts = std::ssize(master) / (rows * columns);
    const Tensor x = converted(from_host(*device, Dtype::f32, {experts * rows, columns}, master.data()), Dtype::bf16);
    const Tensor decoded = empty(*device, Dtype::f32, x.shape());
    device->run(Dequantize{.x = quantized(x, how), .out = decoded});
    const std::vector<float> a = to_host<float>(converted(x, Dtype::f32)), b = to_host<float>(decoded);
    ExpertError worst;
    for (int64_t e = 0; e < experts; ++e) {
      double signal = 0.0, noise = 0.0;
      for (auto i = static_cast<size_t>(e * rows * columns); i < static_cast<size_t>((e + 1) * rows * columns); ++i) {
        signal += double{a[i]} * double{a[i]};
        noise += (double{a[i]} - double{b[i]}) * (double{a[i]} - double{b[i]});
      }
      const double db = 10.0 * std::log10(signal / noise);
      if (db < worst.sqnr_db) worst = {e, db};
    }
    return worst;
  }

  // Statistics name the worst expert of each weight that is quantized in groups, and of no other.
  void expect_worst_experts(const std::string& name, int64_t width, const std::map<std::string, Quantization>& grouped) const {
    size_t named = 0;
    for (const PrecisionEvent& event : read_run_metrics(run_folder(name)).precision) {
      const auto how = grouped.find(event.module.substr(event.module.rfind('.') + 1));
      const bool is_grouped = event.role == "weight" && event.module.find(".experts.") != std::string::npos;
      ASSERT_EQ(event.worst_expert.has_value(), is_grouped) << event.module << ' ' << event.role;
      if (!is_grouped) continue;
      ASSERT_NE(how, grouped.end());
      const bool up = how->first == "gate_up";
      const ExpertError expected = worst_of(name, event.module, up ? 2 * width : 64, up ? 64 : width, how->second);
      EXPECT_EQ(event.worst_expert->expert, expected.expert) << event.module;
      EXPECT_NEAR(event.worst_expert->sqnr_db, expected.sqnr_db, 1e-6) << event.module;
      EXPECT_LE(event.worst_expert->sqnr_db, event.sqnr_db.value()) << "no better than all together";
      ++named;
    }
    EXPECT_EQ(named, 2 * grouped.size());
  }
};

TEST_F(ExpertReports, ACheckpointTellsTheCodesOfEachExpert) {
  run("saved", sets({"logging.tensorboard=true"}));
  const json entry = codes_of("saved").at(kGroupedWeight);
  const LoadedModel loaded = load_model(checkpoint("saved", 1), make_backend("cpu"));
  const QuantizedTensor& codes = loaded.model->parameters().find(kGroupedWeight)->codes();
  uint64_t sum = 0;
  ASSERT_EQ(entry.at("codes_by_expert").size(), 5U);
  ASSERT_EQ(entry.at("values_by_expert").size(), 5U);
  for (int64_t e = 0; e < 5; ++e) {
    const CodeSums sums = code_sums(slice(codes, 64 * e, 64 * (e + 1)), {.rows = 64, .columns = 32, .first_row = 64 * e});
    EXPECT_EQ(entry["codes_by_expert"][static_cast<size_t>(e)], Hash64{sums.codes}.text()) << e;
    EXPECT_EQ(entry["values_by_expert"][static_cast<size_t>(e)], Hash64{sums.values}.text()) << e;
    sum += sums.codes;
  }
  EXPECT_EQ(entry["codes_sum"], Hash64{sum}.text()) << "of all";
  EXPECT_FALSE(codes_of("saved").at("layers.1.attn.qkv.weight").contains("codes_by_expert"));
  std::string events;
  for (const auto& file : std::filesystem::directory_iterator(run_folder("saved"))) {
    if (file.path().filename().string().starts_with("events.")) events += test::read_file(file.path());
  }
  EXPECT_THAT(events, HasSubstr("precision/layers.1.moe.experts.down/weight/worst_expert_sqnr_db"));
  EXPECT_THAT(events, Not(HasSubstr("precision/layers.1.attn.qkv/weight/worst_expert_sqnr_db")));
}

// Shards are row blocks of 32 rows: they end inside experts. And in rows of 40 also cells would, inside experts of 80 rows. Where ranks
// share experts each holds whole ones.
TEST_F(ExpertReports, CodesAndWorstExpertsAreThoseOfAnyLayout) {
  const Quantization tiles{Format::e4m3, 32, 32}, rows{Format::e2m1, 1, 32, ScaleRule::flashinfer};
  struct Case {
    std::string name;
    std::vector<std::string> sets, on_ranks;
    int64_t width;
    std::map<std::string, Quantization> grouped;
  };
  const Case cases[] = {{"plain", {}, {}, 32, {{"gate_up", tiles}, {"down", tiles}}},
                        {"odd",
                         {"precision.recipe=high", R"(precision.recipes={"up":{"base":"mxfp4_qat"}})",
                          R"(precision.rules=[{"match":"layers.*.moe.experts.gate_up","recipe":"up"}])", "model.moe.intermediate_size=40"},
                         {},
                         40,
                         {{"gate_up", rows}}},
                        {"shared", {"model.moe.num_experts=6"}, {"parallel.expert=2"}, 32, {{"gate_up", tiles}, {"down", tiles}}}};
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    std::vector<std::string> together = c.sets;
    together.insert(together.end(), c.on_ranks.begin(), c.on_ranks.end());
    for (const int ranks : {1, 2, 4}) {
      const std::string name = text(c.name, ranks);
      run_on(ranks, name, sets(ranks > 1 ? together : c.sets));
      EXPECT_EQ(codes_of(name), codes_of(c.name + "1")) << ranks;
      EXPECT_EQ(codes_of(name).at("layers.0.moe.experts.gate_up.weight").at("codes_by_expert").size(), c.name == "shared" ? 6U : 5U);
      expect_worst_experts(name, c.width, c.grouped);
    }
    CheckpointReader reader(checkpoint(c.name + "4", 1));
    EXPECT_NO_THROW(verify_codes(reader, *make_backend("cpu")));
    if (c.name != "odd") continue;
    const std::vector<PrecisionEvent> events = read_run_metrics(run_folder("odd4")).precision;
    int64_t blocks = 0;
    for (const auto& [scale, count] : events.at(0).scales) blocks += count;
    EXPECT_EQ(blocks, 5 * 80 * 2) << "each row of each expert once";
  }
}

TEST_F(ExpertReports, CodesThatDifferAreRefusedByTheNamesOfTheirExperts) {
  run("saved", sets({}));
  set_master("saved", 3, 5.0F);
  const auto expect_expert = [](const Error& error, const std::string& experts) {
    EXPECT_EQ(error.code(), ExitCode::data);
    EXPECT_THAT(error.what(), HasSubstr(text("the codes of ", kGroupedWeight, ", ", experts,
                                             ", are not those that the checkpoint was written with: hash ")));
    EXPECT_THAT(error.what(), Not(HasSubstr("by_expert"))) << "one expert's sums, not the lists";
  };
  expect_expert(error_of_verify("saved"), "expert 3");
  expect_expert(error_of([&] { load_model(checkpoint("saved", 1), make_backend("cpu")); }), "expert 3");
  set_master("saved", 0, 5.0F);
  expect_expert(error_of_verify("saved"), "experts 0, 3");
  const json there = codes_of("saved").at(kGroupedWeight);
  EXPECT_THAT(
      error_of_verify("saved").what(),
      HasSubstr(text(json{{"codes_sum", there["codes_by_expert"][0]}, {"values_sum", there["values_by_expert"][0]}}.dump(), " there, ")));
}

TEST_F(ExpertReports, ManyExpertsThatDifferAreNamedInShortAndNoneWithoutLists) {
  run("saved", sets({"model.moe.num_experts=12"}));
  change_codes("saved", [](json& entry) {
    for (json& sum : entry["values_by_expert"]) sum = "0000000000000000";
  });
  EXPECT_THAT(error_of_verify("saved").what(), HasSubstr(", experts 0, 1, 2, 3, 4, 5, 6, 7 and 4 more, are not those"));
  change_codes("saved", [](json& entry) {
    entry.erase("codes_by_expert");
    entry.erase("values_by_expert");
  });
  EXPECT_THAT(error_of([&] { load_model(checkpoint("saved", 1), make_backend("cpu")); }).what(),
              HasSubstr(text("the codes of ", kGroupedWeight, " are not those")));
}

TEST_F(ExpertReports, InspectNamesTheExpertsWhoseCodesDiffer) {
  run("a", sets({}));
  run("b", sets({}));
  const auto difference = [&] { return test::run_mantissa({"inspect", "--diff", checkpoint("a", 1), checkpoint("b", 1)}, folder_.path()); };
  EXPECT_EQ(difference().exit_code, 0) << difference().output;
  change_codes("b", [](json& entry) {
    entry["codes_sum"] = "0000000000000000";
    for (const size_t e : {1U, 3U}) entry["codes_by_expert"][e] = "0000000000000000";
  });
  const test::ProcessResult result = difference();
  EXPECT_EQ(result.exit_code, 1) << result.errors;
  EXPECT_THAT(result.output, HasSubstr("codes of 1 weight differ\n"));
  EXPECT_THAT(result.output, ::testing::ContainsRegex(std::string(kGroupedWeight) + " +e4m3 32x32 rceil, experts 1, 3 of 5\n"));
  change_codes("a", [](json& entry) {
    entry.erase("codes_by_expert");
    entry.erase("values_by_expert");
  });
  EXPECT_THAT(difference().output, ::testing::ContainsRegex(std::string(kGroupedWeight) + " +e4m3 32x32 rceil\n"));
}

}  // namespace mantissa::expert_reports_test
