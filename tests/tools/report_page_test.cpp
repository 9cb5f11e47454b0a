// `mantissa report` and the page it writes, from runs whose metrics are written here line by line. tests/tools/report_page.py sees what a
// browser draws of it.
#include "tools/report/report_page.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <regex>

#include "files.h"
#include "tool_commands.h"

namespace mantissa::report_page_test {

using namespace tools;

using test::error_of;
using test::read_file;
using test::write_file;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using Parsed = nlohmann::json;

const std::string kStart =
    R"({"type":"start","step":0,"steps":4,"resumed":"","parameters":7,"precision":"bf16, mxfp8","device":"cpu","threads":2,"time":1.5})"
    "\n";

std::string step_line(int64_t step, const std::string& loss) {
  return text(R"({"type":"step","step":)", step, R"(,"loss":)", loss, R"(,"lr":0.001,"grad_norm":)", 1.0 / static_cast<double>(step),
              R"(,"tokens":)", 64 * step, R"(,"dt_ms":5,"tok_s":1234.5,"time":2})", "\n");
}

std::string precision_line(int64_t step, const std::string& module, const std::string& sqnr, const std::string& amax = "3.5") {
  return text(R"({"type":"precision","step":)", step, R"(,"module":")", module, R"(","role":"input","sqnr_db":)", sqnr,
              R"(,"clipped":0.25,"flushed":0.125,"amax":)", amax, R"(,"scales":{"126":3,"127":1}})", "\n");
}

// Returns the figures in a page, as a browser reads them.
Parsed metrics_in(const std::string& page) {
  const std::string opening = R"(<script type="application/json" id="metrics">)";
  const size_t begin = page.find(opening);
  require(begin != std::string::npos, "the page has no metrics");
  const std::string rest = page.substr(begin + opening.size());
  return Parsed::parse(rest.substr(0, rest.find("</script")));
}
Parsed runs_in(const std::string& page) { return metrics_in(page).at("runs"); }

// Returns [step, value] of each point.
Parsed points_in(const Parsed& series) {
  Parsed points = Parsed::array();
  for (const Parsed& range : series.at("steps")) {
    for (int64_t i = 0; i < range.at(2).get<int64_t>(); ++i) {
      const int64_t step = range.at(0).get<int64_t>() + i * range.at(1).get<int64_t>();
      points.push_back({step, series.at("values").at(points.size())});
    }
  }
  EXPECT_EQ(points.size(), series.at("values").size());
  return points;
}

class ReportPage : public ::testing::Test {
 protected:
  RunMetrics run(const std::string& name, const std::string& metrics, const std::string& config = "") {
    std::filesystem::create_directories(folder_ / name);
    write_file(folder_ / (name + "/metrics.jsonl"), metrics);
    if (!config.empty()) write_file(folder_ / (name + "/config.json"), config);
    return read_run_metrics(folder_ / name);
  }

  Parsed shown(const std::string& metrics, const std::string& config = "") {
    return runs_in(report_page({run("a", metrics, config)})).at(0);
  }

  test::TemporaryFolder folder_;
};

const std::string kStep = kStart + step_line(1, "3.5");

TEST_F(ReportPage, HoldsTheMetricsOfARunAndNoMapsWithoutPrecisionStatistics) {
  const Parsed held = shown(kStep + step_line(2, "2.5") + R"({"type":"eval","step":2,"loss":2.75})" + "\n");
  EXPECT_EQ(held.at("name"), "a");
  EXPECT_EQ(held.at("precision"), "bf16, mxfp8");
  EXPECT_EQ(held.at("device"), "cpu, 2 threads");
  for (const auto& [name, value] : {std::pair{"step", 2}, {"steps", 4}, {"tokens", 128}, {"parameters", 7}})
    EXPECT_EQ(held.at(name), value) << name;
  const Parsed& series = held.at("series");
  EXPECT_EQ(points_in(series.at("loss")), Parsed::parse("[[1, 3.5], [2, 2.5]]"));
  EXPECT_EQ(points_in(series.at("valid_loss")), Parsed::parse("[[2, 2.75]]"));
  EXPECT_EQ(points_in(series.at("lr")), Parsed::parse("[[1, 0.001], [2, 0.001]]"));
  EXPECT_EQ(points_in(series.at("grad_norm")), Parsed::parse("[[1, 1.0], [2, 0.5]]"));
  EXPECT_EQ(points_in(series.at("tok_s")), Parsed::parse("[[1, 1234.5], [2, 1234.5]]"));
  EXPECT_EQ(points_in(series.at("imbalance")), Parsed::array());
  for (const char* const empty : {"restarts", "maps"}) EXPECT_EQ(held.at(empty), Parsed::array()) << empty;
  for (const char* const none : {"ranks", "experts"}) EXPECT_TRUE(held.at(none).is_null()) << none;
  EXPECT_EQ(held.at("config"), "");
}

// The best evaluation is the one that checkpoint.keep_best keeps: beside a teacher not that of the least loss.
TEST_F(ReportPage, ItsBestIsTheLeastObjective) {
  const auto evaluation = [](int64_t step, double loss, const std::string& more = "") {
    return text(R"({"type":"eval","step":)", step, R"(,"loss":)", loss, more, "}\n");
  };
  const auto best = [&](const std::string& metrics, const std::string& config = "") { return shown(kStep + metrics, config).at("best"); };
  const std::string plain = evaluation(1, 2.5) + evaluation(2, 2.25) + evaluation(3, 2.75),
                    taught =
                        evaluation(1, 2.25, R"(,"kl":0.5)") + evaluation(2, 2.5, R"(,"kl":0.25)") + evaluation(3, 2.75, R"(,"kl":null)");
  EXPECT_TRUE(best("").is_null());
  EXPECT_EQ(best(plain), Parsed({{"value", 2.25}, {"objective", "loss"}}));
  EXPECT_EQ(best(taught), Parsed({{"value", 0.25}, {"objective", "kl"}}));
  EXPECT_EQ(best(evaluation(0, 0.01) + taught), Parsed({{"value", 0.25}, {"objective", "kl"}})) << "the first had no teacher yet";
  const std::string again =
      R"({"type":"start","step":1,"steps":4,"resumed":"","parameters":7,"precision":"","device":"cpu","threads":2,"time":1})";
  EXPECT_EQ(best(taught + again + "\n" + evaluation(2, 2.5, R"(,"kl":0.75)")), Parsed({{"value", 0.5}, {"objective", "kl"}}))
      << "what a restart repeats";
  const auto weighted = [](const std::string& weight) { return R"({"training": {"teacher_weight": )" + weight + "}}"; };
  EXPECT_EQ(best(taught, weighted("0.25")), Parsed({{"value", 1.8125}, {"objective", "0.25 kl + 0.75 loss"}}));
  EXPECT_EQ(error_of([&] { best(taught, weighted("2")); }).code(), ExitCode::data);
}

TEST_F(ReportPage, IsOneFileThatLoadsNothing) {
  const std::string page = report_page({run("a", kStep)});
  EXPECT_THAT(
      page, HasSubstr(R"("Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'")"));
  EXPECT_THAT(page, HasSubstr("prefers-color-scheme: dark"));
  for (const char* const outside : {"{{", "<link", "<img", " src=", "@import", "@font-face", "import(", "fetch(", "https:"})
    EXPECT_THAT(page, Not(HasSubstr(outside)));
}

TEST_F(ReportPage, RunsComeInTheirOrderWithTheirSettingsByKey) {
  const RunMetrics a = run("a", kStep, R"({"optimizer": {"lr": 0.001, "beta1": 0.9}, "x": {}, "seed": 18446744073709551615})"),
                   b = run("b", kStep + step_line(2, "2"), R"({"optimizer": {"lr": 0.002, "beta1": 0.9}, "x": null, "y": ["<"]})"),
                   c = run("c", kStep);
  const Parsed runs = runs_in(report_page({a, b, c}));
  ASSERT_EQ(runs.size(), 3U);
  EXPECT_EQ(runs[0].at("settings"),
            Parsed({{"optimizer.lr", "0.001"}, {"optimizer.beta1", "0.9"}, {"x", "{}"}, {"seed", "18446744073709551615"}}));
  EXPECT_EQ(runs[1].at("settings"), Parsed({{"optimizer.lr", "0.002"}, {"optimizer.beta1", "0.9"}, {"x", "null"}, {"y.0", "\"<\""}}));
  EXPECT_EQ(runs[1].at("config"), b.config);
  EXPECT_EQ(runs[2].at("settings"), Parsed::object());
  EXPECT_EQ(points_in(runs[1].at("series").at("loss")), Parsed::parse("[[1, 3.5], [2, 2.0]]"));
}

TEST_F(ReportPage, RanksAreThoseOfTheConfiguration) {
  const auto ranks = [&](const std::string& parallel) { return shown(kStep, text(R"({"parallel": )", parallel, "}")).at("ranks"); };
  EXPECT_EQ(ranks(R"({"data": 4, "tensor": 2, "expert": 4})"), 8);
  EXPECT_EQ(ranks("{}"), 1);
  for (const char* const bad : {"9223372036854775807", "18446744073709551615", "0", "-1", "1.5", "\"2\"", "[2]"}) {
    const Error error = error_of([&] { ranks(text(R"({"data": 2, "tensor": )", bad, "}")); });
    EXPECT_EQ(error.code(), ExitCode::data) << bad;
    EXPECT_THAT(error.what(), ::testing::StartsWith("a/config.json: parallel.tensor")) << bad;
  }
  EXPECT_EQ(error_of([&] { shown(kStep, "{"); }).code(), ExitCode::data);
}

TEST_F(ReportPage, NoTextOfARunEndsTheElementOrOpensAComment) {
  const std::string name = "<b>&\"'\x01\xff", hostile = "</script><!-- <script>\u2028 {{report.js}} {{metrics}}";
  const std::string sample = text(R"({"type":"sample","step":1,"prompt":"<i>","text":"a & b\u0000\u001b[31m)", hostile, "\"}\n");
  const RunMetrics a = run(name, kStep + precision_line(1, "<m>", "30") + sample, text(R"({"x": ")", hostile, "\"}"));
  const std::string page = report_page({a}), plain = report_page({run("a", kStep)});
  EXPECT_EQ(std::count(page.begin(), page.end(), '<'), std::count(plain.begin(), plain.end(), '<'));
  const Parsed held = runs_in(page).at(0);
  EXPECT_EQ(held.at("name"), "<b>&\"'\x01\xEF\xBF\xBD");
  EXPECT_EQ(held.at("maps").at(0).at("modules"), Parsed({"<m>"}));
  EXPECT_EQ(held.at("samples").at("newest").at(0).at("prompt"), "<i>");
  EXPECT_EQ(held.at("samples").at("newest").at(0).at("text"), std::string("a & b\0\x1b[31m", 11) + hostile);
  EXPECT_EQ(held.at("settings").at("x"), "\"" + hostile + "\"");
}

TEST_F(ReportPage, AMapHasACellPerModuleAndReportWithItsFigures) {
  std::string grouped = precision_line(1, "layers.0.mlp.up", "20");
  grouped.insert(grouped.find_last_of('}'), R"(,"worst_expert":{"expert":3,"sqnr_db":17.25})");
  const RunMetrics a = run("a", kStep + grouped + precision_line(1, "output", "30") + precision_line(2, "layers.0.mlp.up", "null") +
                                    precision_line(2, "output", "null", "null"));
  EXPECT_FALSE(a.precision[1].worst_expert);
  EXPECT_THAT(a.precision[0].scales, ElementsAre(std::pair(126, 3), std::pair(127, 1)));
  const Parsed maps = runs_in(report_page({a})).at(0).at("maps");
  ASSERT_EQ(maps.size(), 1U);
  EXPECT_EQ(maps[0].at("role"), "input");
  EXPECT_EQ(maps[0].at("modules"), Parsed({"layers.0.mlp.up", "output"}));
  EXPECT_EQ(maps[0].at("steps"), 2);
  EXPECT_EQ(maps[0].at("cells"), Parsed::parse(R"([[0, 1, 20, 0.25, 0.125, 3.5, [-1, 3, 0, 1], 3, 17.25],
                                                   [1, 1, 30, 0.25, 0.125, 3.5, [-1, 3, 0, 1]],
                                                   [0, 2, null, 0.25, 0.125, 3.5, [-1, 3, 0, 1]],
                                                   [1, 2, null, 0.25, 0.125, null, [-1, 3, 0, 1]]])"));
}

TEST_F(ReportPage, TooManyCellsLeaveOutStepsAndSayHowManyThereWere) {
  std::string lines = kStep;
  for (int step = 1; step <= 5; ++step) lines += precision_line(step, "a", "20") + precision_line(step, "b", "30");
  const Parsed map = runs_in(report_page({run("a", lines)}, {}, {.points = 100, .cells = 5})).at(0).at("maps").at(0);
  std::vector<int64_t> steps;
  for (const Parsed& cell : map.at("cells")) steps.push_back(cell.at(1));
  EXPECT_THAT(steps, ElementsAre(1, 1, 3, 3, 5, 5));
  EXPECT_EQ(map.at("steps"), 5);
}

TEST_F(ReportPage, HoldsTheLoadOfExpertsOfEachLayer) {
  const auto line = [](int64_t step, const std::string& imbalance, const std::string& load, const std::string& z) {
    std::string out = step_line(step, "3.5");
    const auto layer = [&](int number, const std::string& loads) {
      return text(R"({"layer":)", number, R"(,"imbalance":)", imbalance, R"(,"dropped":0.125,"balance_loss":1.0625,)",
                  R"("sequence_balance_loss":1.5,"z_loss":)", z, R"(,"load":)", loads, "}");
    };
    out.insert(out.find_last_of('}'), R"(,"moe":[)" + layer(1, load) + "," + layer(3, "[10,10]") + "]");
    return out;
  };
  const RunMetrics a = run("a", kStart + line(1, "2", "[1000,0]", "2.5") + line(51, "1.75", "[10,30]", "2.5") +
                                    line(101, "1.25", "[15,25]", "2.5") + line(150, "1.5", "[5,15]", "null"));
  ASSERT_EQ(a.routing.size(), 3U) << "of the newest 100 steps";
  EXPECT_EQ(a.imbalance.size(), 4U);
  const Parsed runs = runs_in(report_page({a, run("dense", kStep)}));
  EXPECT_EQ(runs[0].at("experts"), Parsed::parse(R"({"step": 150, "first": 51, "layers": [
      {"layer": 1, "imbalance": 1.5, "dropped": 0.125, "balance_loss": 1.0625, "z_loss": null, "load": [30, 70]},
      {"layer": 3, "imbalance": 1.5, "dropped": 0.125, "balance_loss": 1.0625, "z_loss": null, "load": [30, 30]}]})"));
  EXPECT_EQ(points_in(runs[0].at("series").at("imbalance")), Parsed::parse("[[1, 2.0], [51, 1.75], [101, 1.25], [150, 1.5]]"));
  EXPECT_TRUE(runs[1].at("experts").is_null());
}

TEST_F(ReportPage, HoldsRestartsAndTheStepsSinceTheLastOne) {
  const auto start = [](int64_t step) { return std::regex_replace(kStart, std::regex("\"step\":0"), text("\"step\":", step)); };
  const RunMetrics a = run("a", kStep + start(1) + start(1) + step_line(2, "3") + start(2) + start(2) + start(2)), c = run("c", start(3));
  EXPECT_THAT(a.starts, ElementsAre(0, 1, 1, 2, 2, 2));
  const Parsed runs = runs_in(report_page({a, c}));
  EXPECT_EQ(runs[0].at("restarts"), Parsed({1, 1, 2, 2, 2}));
  EXPECT_EQ(runs[0].at("step"), 2);
  EXPECT_EQ(runs[1].at("restarts"), Parsed::array());
  EXPECT_EQ(runs[1].at("step"), 3);
  const RunMetrics again = run("d", kStep + step_line(2, "9") + precision_line(2, "output", "30") + start(1) + step_line(2, "2.5"));
  ASSERT_EQ(again.loss.size(), 2U) << "steps done again count once";
  EXPECT_EQ(again.loss[1].value, 2.5);
  EXPECT_TRUE(again.precision.empty());
}

// A step that was skipped had a loss that is not finite: a gap.
TEST_F(ReportPage, StepsWithoutTargetsHaveNoPointOfTheLoss) {
  std::string skipped = step_line(4, "null");
  skipped.replace(skipped.find("\"time\""), 0, "\"skipped\":true,");
  const RunMetrics read = run("a", kStep + step_line(2, "2.5") + step_line(3, "null") + skipped);
  ASSERT_EQ(read.loss.size(), 3U);
  EXPECT_EQ(read.loss[1].value, 2.5);
  EXPECT_EQ(read.loss[2].step, 4);
  EXPECT_TRUE(std::isnan(read.loss[2].value));
  EXPECT_EQ(read.lr.size(), 4U);
  const Parsed held = runs_in(report_page({read})).at(0);
  EXPECT_EQ(points_in(held.at("series").at("loss")), Parsed::parse("[[1, 3.5], [2, 2.5], [4, null]]"));
  EXPECT_EQ(held.at("step"), 4);
}

TEST_F(ReportPage, HoldsTheNewestTextsTheNewestFirst) {
  std::string lines = kStep;
  for (int step = 1; step <= 14; ++step) lines += text(R"({"type":"sample","step":)", step, R"(,"prompt":"p","text":"t"})", "\n");
  const Parsed samples = shown(lines).at("samples");
  EXPECT_EQ(samples.at("count"), 14);
  ASSERT_EQ(samples.at("newest").size(), 12U);
  EXPECT_EQ(samples.at("newest").at(0), Parsed({{"step", 14}, {"prompt", "p"}, {"text", "t"}}));
  EXPECT_EQ(samples.at("newest").at(11).at("step"), 3);
}

Parsed loss_held(const Series& loss, const PageLimits& limits = {}) {
  RunMetrics run;
  run.loss = loss;
  return runs_in(report_page({run}, {}, limits)).at(0).at("series").at("loss");
}

TEST(ReportSeries, ValuesThatAreNotFiniteAreNullAndOthersHaveSevenDigits) {
  const Series loss = {{1, std::nan("")}, {2, HUGE_VAL},         {3, -HUGE_VAL},
                       {4, 1.0 / 3.0},    {5, -1.23456789e-300}, {6, 1.7976931348623157e308}};
  EXPECT_EQ(loss_held(loss).at("values"), Parsed::parse("[null, null, null, 0.3333333, -1.234568e-300, 1.797693e308]"));
}

TEST(ReportSeries, StepsOfOneStrideAreARange) {
  const auto ranges = [](const std::vector<int64_t>& steps) {
    Series loss;
    for (const int64_t step : steps) loss.push_back({step, 1.0});
    const Parsed held = loss_held(loss);
    const Parsed points = points_in(held);
    EXPECT_EQ(points.size(), steps.size());
    for (size_t i = 0; i < points.size(); ++i) EXPECT_EQ(points[i][0], steps[i]);
    return held.at("steps").size();
  };
  constexpr int64_t kLast = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(ranges({}), 0U);
  EXPECT_EQ(ranges({1, 2, 3, 4}), 1U);
  EXPECT_EQ(ranges({10, 20, 30, 31, 32, 40}), 3U);
  EXPECT_EQ(ranges({5, 5, 5, 3, 1}), 3U);
  EXPECT_EQ(ranges({-kLast - 1, 0, kLast - 1, kLast}), 3U);
}

// A series of 10^5 steps, whose text is about a megabyte, is held whole.
TEST(ReportSeries, AreThinnedOnlyInAPageThatWouldBeTooLargeAndKeepOutliersGapsAndEnds) {
  Series series;
  for (int64_t i = 0; i < 100'000; ++i) series.push_back({i, 1.0 + 1e-6 * static_cast<double>(i)});
  series[33'333].value = std::nan("");
  series[77'777].value = 50.0;
  EXPECT_EQ(loss_held(series).at("values").size(), series.size());
  const Parsed held = loss_held(series, {.points = 1000, .cells = 1});
  EXPECT_EQ(held.at("points"), series.size());
  const Parsed points = points_in(held);
  EXPECT_LE(points.size(), 1000U);
  for (const Parsed& kept : {Parsed({0, 1.0}), Parsed({33'333, nullptr}), Parsed({77'777, 50.0}), Parsed({99'999, 1.099999})})
    EXPECT_EQ(std::count(points.begin(), points.end(), kept), 1) << kept;
}

TEST_F(ReportPage, ADamagedLineIsNamedWithItsFileAndNumberButForATornLastOne) {
  EXPECT_EQ(run("a", kStep + R"({"type":"st)").loss.size(), 1U);
  const std::string precision =
      R"({"type":"precision","step":1,"module":"m","role":"input","sqnr_db":1,"clipped":0,"flushed":0,"amax":1,"scales":)";
  for (const auto& [line, problem] : {std::pair{std::string("{\"type\":\"step\""), ""},
                                      {"[1]", "must be an object, got [1]"},
                                      {"{}", "has no \"type\""},
                                      {R"({"type":"step","step":1.5})", "step: must be an integer, got 1.5"},
                                      {R"({"type":"step","step":9223372036854775808})", "step: must be in [-9223372036854775808, "},
                                      {R"({"type":"step","step":1,"loss":"low"})", "loss: must be a number or null, got \"low\""},
                                      {precision + R"({"-1":1}})", "scales.-1: is not a valid name of an entry"},
                                      {precision + R"({"1":-9223372036854775808}})", "scales.1: must be "},
                                      {precision + R"({"1":9223372036854775808}})", "scales.1: must be "},
                                      {precision + R"({"1":1.5}})", "scales.1: must be "}}) {
    const Error error = error_of([&, line = line] { run("a", kStart + line + "\n"); });
    EXPECT_EQ(error.code(), ExitCode::data) << line;
    EXPECT_THAT(error.what(), ::testing::StartsWith(text(folder_ / "a/metrics.jsonl", ":2: ", problem))) << line;
  }
}

TEST_F(ReportPage, TheCommandWritesTheFileAndNothingForADamagedRun) {
  const test::WorkingFolder here(folder_.path());
  run("a", kStep);
  run("x/a", kStep);
  EXPECT_EQ(test::command_result({"report", "a/", "x/a", "--output", "out.html"}).output, "out.html: 2 runs\n");
  const Parsed runs = runs_in(read_file("out.html"));
  EXPECT_EQ(runs.at(0).at("name"), "a (a/)");
  EXPECT_EQ(runs.at(1).at("name"), "a (x/a)");
  write_file("a/metrics.jsonl", "{}\n");
  EXPECT_EQ(test::command_result({"report", "a", "--output", "never.html"}).exit_code, 4);
  EXPECT_FALSE(std::filesystem::exists("never.html"));
}

// As `mantissa analyze --json` writes it, with members that the page does not show.
const std::string kAnalysis = R"({"model": "m<b>", "step": 3, "data": "t.txt", "seq_len": 12, "targets": 72,
  "high": {"elements": 9, "bytes": 18, "bits_per_weight": 16, "loss": 2, "kl": 0, "equal_greedy": 1},
  "recipes": [{"recipe": "r", "set": [], "misfits": [], "problem": "why", "loss": 2.5, "kl": 0.25, "equal_greedy": 0.5,
    "linears": {"elements": 4, "bytes": 2, "bits_per_weight": 4.25}, "model": {"elements": 9, "bytes": 7, "bits_per_weight": 6},
    "weights": [{"module": "layers.0.mlp.up", "elements": 4, "bytes": 2, "sqnr_db": null, "amax": 1.5, "clipped": 0.125, "flushed": 0,
                 "signal": 4, "noise": 0, "scales": {"127": 1}}]}],
  "parts": [{"modules": ["layers.0.mlp.up"], "recipe": "r", "bytes": 2, "loss": 2.5, "kl": 0.25, "equal_greedy": 0.5}],
  "proposal": {"bits_per_weight": 5, "predicted_kl": 0.5, "loss": 2.5, "kl": 0.25, "equal_greedy": 0.5, "file": {"precision": {}}}})";

TEST_F(ReportPage, HoldsWhatAnalyzeWrote) {
  const std::string file = folder_ / "m.json";
  write_file(file, kAnalysis);
  const Parsed all = metrics_in(report_page({run("a", kStep)}, {read_analysis(file), read_analysis(file)}));
  EXPECT_EQ(all.at("runs").size(), 1U);
  ASSERT_EQ(all.at("analyses").size(), 2U);
  const Parsed& held = all.at("analyses").at(0);
  EXPECT_EQ(held.at("model"), "m<b>");
  EXPECT_EQ(held.at("targets"), 72);
  EXPECT_EQ(held.at("high"), Parsed::parse(R"({"bytes": 18, "bits_per_weight": 16.0, "loss": 2.0, "kl": 0.0, "equal_greedy": 1.0})"));
  EXPECT_EQ(held.at("recipes").at(0).at("problem"), "why");
  EXPECT_EQ(held.at("recipes").at(0).at("linears").at("bits_per_weight"), 4.25);
  EXPECT_EQ(held.at("recipes").at(0).at("weights").at(0), Parsed::parse(R"({"module": "layers.0.mlp.up", "bytes": 2, "sqnr_db": null,
      "amax": 1.5, "clipped": 0.125, "flushed": 0.0, "signal": 4.0, "noise": 0.0})"));
  EXPECT_EQ(held.at("parts").at(0).at("kl"), 0.25);
  EXPECT_EQ(held.at("proposal").at("file"), Parsed::parse(R"({"precision": {}})"));

  Parsed weights_alone = Parsed::parse(kAnalysis);
  for (const char* const name : {"data", "seq_len", "targets", "parts", "proposal"}) weights_alone.erase(name);
  for (Parsed* const of : {&weights_alone["high"], &weights_alone["recipes"][0]})
    of->erase("loss"), of->erase("kl"), of->erase("equal_greedy");
  weights_alone["step"] = nullptr;
  write_file(file, weights_alone.dump());
  const Parsed without = metrics_in(report_page({}, {read_analysis(file)})).at("analyses").at(0);
  for (const char* const name : {"step", "data", "seq_len", "targets", "proposal"}) EXPECT_TRUE(without.at(name).is_null()) << name;
  EXPECT_EQ(without.at("parts"), Parsed::array());
  EXPECT_TRUE(without.at("high").at("loss").is_null());
}

TEST_F(ReportPage, RefusesAFileThatAnalyzeDidNotWrite) {
  const std::string file = folder_ / "m.json";
  const auto refused = [&](const std::string& content, const std::string& problem) {
    write_file(file, content);
    const Error error = error_of([&] { read_analysis(file); });
    EXPECT_EQ(error.code(), ExitCode::data) << content;
    EXPECT_THAT(error.what(), ::testing::StartsWith(file + ":")) << content;
    EXPECT_THAT(error.what(), HasSubstr(problem));
  };
  const auto changed = [&](const std::string& pointer, const Parsed& value, const std::string& problem) {
    Parsed other = Parsed::parse(kAnalysis);
    const Parsed::json_pointer at(pointer);
    if (value.is_discarded()) {
      other.at(at.parent_pointer()).erase(at.back());
    } else {
      other[at] = value;
    }
    refused(other.dump(), problem);
  };
  const Parsed absent(Parsed::value_t::discarded);
  refused("{", "");
  refused("[]", "");
  refused("{}", "model");
  changed("/recipes", absent, "recipes");
  changed("/recipes/0/weights/0/noise", "much", "noise");
  changed("/recipes/0/weights/0/bytes", -1, "bytes");
  changed("/recipes/0/fits", false, "recipes: must have loss");
  changed("/recipes/0/kl", absent, "recipes: must have loss, kl and equal_greedy");
  changed("/high/loss", nullptr, "high: must have loss");
  changed("/parts/0/loss", absent, "parts: must have loss");
  changed("/parts/0/modules", Parsed::array(), "a part has no module");
  changed("/proposal/kl", nullptr, "proposal: must have loss");
  changed("/seq_len", absent, "data, seq_len and targets together");
  changed("/data", nullptr, "data, seq_len and targets together");
}

TEST_F(ReportPage, TheCommandDrawsFilesBesideFoldersAndAlone) {
  const test::WorkingFolder here(folder_.path());
  run("a", kStep);
  write_file("m.json", kAnalysis);
  EXPECT_EQ(test::command_result({"report", "m.json", "a", "--output", "out.html"}).output, "out.html: 1 run, 1 analysis\n");
  EXPECT_EQ(test::command_result({"report", "m.json", "m.json", "--output", "out.html"}).output, "out.html: 0 runs, 2 analyses\n");
  write_file("m.json", "{}");
  EXPECT_EQ(test::command_result({"report", "a", "m.json", "--output", "never.html"}).exit_code, 4);
  EXPECT_FALSE(std::filesystem::exists("never.html"));
}

}  // namespace mantissa::report_page_test
