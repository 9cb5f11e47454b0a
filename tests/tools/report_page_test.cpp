// `mantissa report` and the page it writes, from runs whose metrics are written here line by line.
#include "tools/report/report_page.h"

#include <gmock/gmock.h>

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <regex>

#include "process.h"
#include "tool_commands.h"
#include "tools/report/report_charts.h"
#include "tools/report/svg.h"

namespace mantissa::report_page_test {

using namespace tools;

using test::error_of;
using test::ProcessResult;
using test::read_file;
using test::write_file;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

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

void expect_parts(const std::string& page, const std::vector<std::string>& parts) {
  for (const std::string& part : parts) EXPECT_THAT(page, HasSubstr(part));
}

class ReportPage : public ::testing::Test {
 protected:
  RunMetrics run(const std::string& name, const std::string& metrics, const std::string& config = "") {
    std::filesystem::create_directories(folder_ / name);
    write_file(folder_ / (name + "/metrics.jsonl"), metrics);
    if (!config.empty()) write_file(folder_ / (name + "/config.json"), config);
    return read_run_metrics(folder_ / name);
  }

  std::string page(const std::string& metrics, const std::string& config = "") { return report_page({run("a", metrics, config)}); }

  // The number of drawings. The whole page must be well-formed XML, so that each drawing is.
  int drawings(const std::string& page) {
    write_file(folder_ / "page.html", page);
    const char* program = "import sys, xml.dom.minidom as m; print(len(m.parse(sys.argv[1]).getElementsByTagName('svg')))";
    const ProcessResult parsed = test::run_process({"python3", "-c", program, "page.html"}, folder_.path());
    EXPECT_EQ(parsed.exit_code, 0) << parsed.errors;
    return parsed.exit_code == 0 ? std::stoi(parsed.output) : -1;
  }

  test::TemporaryFolder folder_;
};

const std::string kStep = kStart + step_line(1, "3.5");

TEST_F(ReportPage, ARunWithoutPrecisionStatisticsHasFourChartsAndSaysHowToGetMore) {
  const std::string shown = page(kStep + step_line(2, "2.5") + R"({"type":"eval","step":2,"loss":2.75})" + "\n");
  EXPECT_EQ(drawings(shown), 4);
  expect_parts(shown, {"precision.report_interval turns them on", "<title>a validation, step 2: 2.75</title>",
                       "<td>2 of 4</td><td>0</td><td>128</td><td>7</td><td>2.5</td><td>2.75</td><td>2.75</td><td>1234.5</td>",
                       "prefers-color-scheme: dark", "td.text { overflow-wrap: anywhere;"});
  for (const char* outside : {"http", "<script", "<link", "<img", "url(", "@import", "@font-face"})
    EXPECT_THAT(shown, Not(HasSubstr(outside)));
}

TEST_F(ReportPage, TheBestValidationLossIsTheLeastThatIsANumber) {
  std::string metrics = kStep;
  for (const char* loss : {"null", "2.75", "2.25", "2.5"}) metrics += text(R"({"type":"eval","step":1,"loss":)", loss, "}\n");
  EXPECT_THAT(page(metrics), HasSubstr("<td>3.5</td><td>2.5</td><td>2.25</td>"));
  EXPECT_THAT(page(kStep + R"({"type":"eval","step":1,"loss":null})" + "\n"), HasSubstr("<td>-</td><td>1234.5</td>"));
}

TEST_F(ReportPage, RunsAreOverlaidEachInItsColorAndOnlySettingsThatDifferAreCompared) {
  const RunMetrics a = run("a", kStep + step_line(2, "3"), R"({"optimizer": {"lr": 0.001, "beta1": 0.9}, "x": {}, "y": [], "z": null})"),
                   b = run("b", kStep + step_line(2, "2"), R"({"optimizer": {"lr": 0.002, "beta1": 0.9}, "x": null, "y": [1], "z": {}})");
  const std::string page = report_page({a, b});
  EXPECT_EQ(drawings(page), 4);
  const std::string td = "</td><td class=\"text\">";
  expect_parts(page, {"<span class=\"swatch run1\"></span>b</td>", "<title>b training</title>", "<path class=\"line run1\" d=\"M64 ",
                      "optimizer.lr" + td + "0.001" + td + "0.002</td></tr>", "x" + td + "{}" + td + "null<", "y" + td + "[]</td>",
                      "z" + td + "null" + td + "{}<"});
  EXPECT_THAT(page, Not(HasSubstr(">optimizer.beta1</td>")));
}

TEST_F(ReportPage, RanksAreThoseOfTheConfiguration) {
  const auto ranks = [&](const std::string& parallel) { return page(kStep, text(R"({"parallel": )", parallel, "}")); };
  EXPECT_THAT(ranks(R"({"data": 4, "tensor": 2, "expert": 4})"), HasSubstr("<td>8</td><td class=\"text\">"));
  EXPECT_THAT(ranks("{}"), HasSubstr("<td>1</td><td class=\"text\">"));
  for (const char* const bad : {"9223372036854775807", "18446744073709551615", "0", "-1", "1.5", "\"2\"", "[2]"}) {
    const Error error = error_of([&] { ranks(text(R"({"data": 2, "tensor": )", bad, "}")); });
    EXPECT_EQ(error.code(), ExitCode::data) << bad;
    EXPECT_THAT(error.what(), ::testing::StartsWith("a/config.json: parallel.tensor")) << bad;
  }
}

TEST_F(ReportPage, NamesPromptsAndSettingsAreEscaped) {
  const std::string name = "<b>&\"'\x01\xff";
  const std::string sample = R"({"type":"sample","step":1,"prompt":"<i>","text":"a & b\u0000\u001b[31m</pre>"})"
                             "\n";
  const RunMetrics a = run(name, kStep + precision_line(1, "<m>", "30") + sample, R"({"x": "</pre><script>"})");
  const std::string page = report_page({a});
  EXPECT_EQ(drawings(page), 6);
  expect_parts(page, {"&lt;b&gt;&amp;&quot;&#39;\xEF\xBF\xBD\xEF\xBF\xBD training</title>", "&lt;m&gt; input, step 1: 30 dB",
                      "<pre><b>&lt;i&gt;</b>a &amp; b\xEF\xBF\xBD\xEF\xBF\xBD[31m&lt;/pre&gt;</pre>"});
  EXPECT_THAT(page, Not(HasSubstr("<script")));
}

TEST_F(ReportPage, HeatMapHasACellPerModuleAndStepWithItsFiguresAsTooltip) {
  std::string grouped = precision_line(1, "layers.0.mlp.up", "20");
  grouped.insert(grouped.find_last_of('}'), R"(,"worst_expert":{"expert":3,"sqnr_db":17.25})");
  const RunMetrics a = run("a", kStep + grouped + precision_line(1, "output", "30") + precision_line(2, "layers.0.mlp.up", "null") +
                                    precision_line(2, "output", "null", "null"));
  EXPECT_FALSE(a.precision[1].worst_expert);
  EXPECT_THAT(a.precision[0].scales, ElementsAre(std::pair(126, 3), std::pair(127, 1)));
  const std::string map = heat_map("a: input", a.precision, {20, 30});
  expect_parts(map, {"layers.0.mlp.up input, step 1: 20 dB, clipped 25%, flushed 12.5%, amax 3.5, scales 2^-1: 75%, 2^0: 25%, "
                     "worst expert 3: 17.25 dB</title>",
                     R"svg(x="180" y="0" width="360" height="15" fill="rgb(68,1,84)")svg",      // the least
                     R"svg(x="180" y="16" width="360" height="15" fill="rgb(253,231,37)")svg",  // the most
                     R"svg(x="540" y="0" width="360" height="15" fill="rgb(253,231,37)")svg",   // exact
                     "layers.0.mlp.up input, step 2: exact", "output input, step 2: NaN or Inf"});
  EXPECT_EQ(drawings(report_page({a})), 6);
}

TEST_F(ReportPage, TablesTheLoadOfExpertsOfEachLayer) {
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
  const std::string page = report_page({a, run("dense", kStep)});
  expect_parts(page, {"<h2>Experts</h2>\n<h3>a</h3>", "<th>load, largest over mean, step 150</th><th>the same of the steps from 51</th>",
                      "<tr><td>1</td><td>1.5</td><td>1.4</td><td>1</td><td>12.5%</td><td>1.062</td><td>-</td></tr>",  // 70 of 100
                      "<tr><td>3</td><td>1.5</td><td>1</td><td>0</td><td>12.5%</td><td>1.062</td><td>-</td></tr>"});
  EXPECT_THAT(page, Not(HasSubstr("<h3>dense</h3>")));
  EXPECT_THAT(report_page({run("other", kStep)}), Not(HasSubstr("Experts</h2>")));
}

TEST_F(ReportPage, AllHeatMapsHaveOneScaleOfThreeDecibelsOrMore) {
  const RunMetrics fine = run("fine", kStep + precision_line(1, "a", "31.5") + precision_line(1, "b", "32"));
  const RunMetrics coarse = run("coarse", kStep + precision_line(1, "a", "14") + precision_line(1, "b", "19"));
  expect_parts(report_page({fine, coarse}), {">14 dB</text>", ">32 dB, or exact</text>", heat_map("fine: input", fine.precision, {14, 32}),
                                             heat_map("coarse: input", coarse.precision, {14, 32})});
  expect_parts(report_page({fine}), {heat_map("fine: input", fine.precision, {29, 32})});
  expect_parts(report_page({fine, run("without", kStep)}), {heat_map("fine: input", fine.precision, {29, 32})});
  const RunMetrics exact = run("exact", kStep + precision_line(1, "a", "null"));  // no cell has an error
  expect_parts(report_page({exact}), {">0 dB</text>", ">3 dB, or exact</text>"});
}

TEST_F(ReportPage, TheSummaryHasRestartsAndStepsAreThoseSinceTheLastOne) {
  const auto start = [](int64_t step) { return std::regex_replace(kStart, std::regex("\"step\":0"), text("\"step\":", step)); };
  const RunMetrics a = run("a", kStep + start(1) + start(1) + step_line(2, "3") + start(2) + start(2) + start(2)),
                   b = run("b", kStep + start(1)), c = run("c", start(3));
  EXPECT_THAT(a.starts, ElementsAre(0, 1, 1, 2, 2, 2));
  expect_parts(report_page({a, b, c}), {"<th>restarts</th>", "<td>2 of 4</td><td>5, at steps ... 1, 2, 2, 2</td>",
                                        "<td>1 of 4</td><td>1, at step 1</td>", "<td>3 of 4</td>"});
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
  expect_parts(page(kStep + step_line(2, "2.5") + step_line(3, "null")), {"<td>3 of 4</td><td>0</td><td>192</td><td>7</td><td>2.5</td>"});
}

TEST_F(ReportPage, TheNewestTextIsTheFirstAndOpen) {
  std::string lines = kStep;
  for (int step = 1; step <= 14; ++step) lines += text(R"({"type":"sample","step":)", step, R"(,"prompt":"p","text":"t"})", "\n");
  const std::string shown = page(lines);
  EXPECT_THAT(shown, HasSubstr("the newest 12 of 14</p>\n<details open=\"open\"><summary>step 14</summary><pre><b>p</b>t</pre></details>\n"
                               "<details><summary>step 13</summary>"));
  EXPECT_THAT(shown, Not(HasSubstr("<summary>step 2</summary>")));
}

std::string chart_of(const Series& series, bool dots = false) {
  return line_chart("loss", {{.label = "a", .run = 0, .dots = dots, .points = &series}});
}

TEST(Charts, ValuesThatAreNotFiniteAreGapsAndALongSeriesKeepsItsSpike) {
  const double nan = std::nan("");
  EXPECT_THAT(chart_of({{1, 1.0}, {2, 2.0}, {3, nan}, {4, 2.0}, {5, 1.0}}), HasSubstr(R"(d="M64 226h0L205 10M487 10h0L628 226")"));
  EXPECT_EQ(chart_of({{1, nan}}), "");
  Series series;
  for (int64_t i = 0; i < 100000; ++i) series.push_back({i, i == 77777 ? 50.0 : 1.0});
  const std::string chart = chart_of(series);
  EXPECT_LT(chart.size(), 40000U);
  EXPECT_THAT(chart, HasSubstr(" 10L")) << "the top of the chart is reached";
}

// The estimate: a digit of the style sheet's 11 pixels is about 6.2 wide.
void expect_labels_inside(const std::string& chart) {
  const std::regex label(R"re(<text x="([^"]*)" y="[^"]*" text-anchor="(\w+)">([^<]*)</text>)re"), box(R"(viewBox="0 0 ([0-9]+) )");
  std::smatch size;
  ASSERT_TRUE(std::regex_search(chart, size, box));
  int labels = 0;
  for (std::sregex_iterator found(chart.begin(), chart.end(), label), end; found != end; ++found, ++labels) {
    const std::string anchor = (*found)[2], content = (*found)[3];
    const double width = 6.2 * static_cast<double>(content.size()), x = std::stod((*found)[1]);
    const double left = x - (anchor == "end" ? width : anchor == "middle" ? width / 2 : 0.0);
    EXPECT_GE(left, 0.0) << content;
    EXPECT_LE(left + width, std::stod(size[1])) << content;
  }
  EXPECT_GT(labels, 4);
}

TEST(Charts, NoLabelIsCutOff) {
  for (const int64_t last : {int64_t{10}, int64_t{20000}, int64_t{4000000}, int64_t{200000000}})
    expect_labels_inside(chart_of({{1, 0.00012}, {last, 123456.0}}, true));
}

TEST(Charts, ExtremeStepsAndValuesHaveFiniteCoordinates) {
  constexpr int64_t kLast = std::numeric_limits<int64_t>::max();
  const auto is_finite = [](const std::string& drawn) { return drawn.find("nan") == drawn.npos && drawn.find("inf") == drawn.npos; };
  for (const Series& series : {Series{{kLast - 1, 1.0}, {kLast, 2.0}},
                               {{0, -1.7e308}, {1, 1.7e308}},
                               {{0, -1e300}, {kLast, 1e300}},
                               {{-kLast, 1.0}, {kLast, 1.0 + 1e-15}},
                               {{5, 5e-324}, {6, 0.0}}})
    EXPECT_TRUE(is_finite(chart_of(series, true)));
  EXPECT_THAT(chart_of({{0, 1.0}, {1, 1.7e308}, {2, 2.0}}), HasSubstr("M628 10h0")) << "a gap";
  const std::string map = heat_map("m",
                                   {{.step = 1, .module = "a", .role = "input", .sqnr_db = -1.7e308, .amax = 1.0},
                                    {.step = 1, .module = "b", .role = "input", .sqnr_db = 1.7e308, .amax = 1.0}},
                                   {-1.7e308, 1.7e308});
  EXPECT_THAT(map, HasSubstr("rgb(68,1,84)"));
  EXPECT_THAT(map, Not(HasSubstr("rgb(-")));
  EXPECT_TRUE(is_finite(map));
}

TEST(Axes, RangeTooNarrowForTicksIsWidened) {
  for (const double at : {1.0, -9.2e18, 1e300}) {
    const Axis axis = axis_over(at, std::nextafter(at, HUGE_VAL), 8);
    EXPECT_LT(axis.low, at);
    EXPECT_GT(axis.high, at);
    EXPECT_LE(axis.ticks.size(), 12U);
    EXPECT_GE(axis.ticks.size(), 3U);
  }
}

TEST(Axes, TicksAreOneTwoOrFiveTimesAPowerOfTenAndHoldTheRange) {
  EXPECT_THAT(axis_over(0.0, 10.0, 5).ticks, ElementsAre(0, 2, 4, 6, 8, 10));
  EXPECT_THAT(axis_over(-3.0, 41.0, 5).ticks, ElementsAre(-10, 0, 10, 20, 30, 40, 50));
  const Axis axis = axis_over(1.21e-4, 5.9e-4, 5);
  EXPECT_DOUBLE_EQ(axis.low, 1e-4);
  EXPECT_DOUBLE_EQ(axis.high, 6e-4);
  EXPECT_EQ(axis.ticks.size(), 6U);
  for (const double same : {0.0, 3.0, -2e5}) {
    const Axis flat = axis_over(same, same, 5);
    EXPECT_LT(flat.low, same);
    EXPECT_GT(flat.high, same);
  }
  EXPECT_EQ(number_text(6e-4), "0.0006");
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
                                      {precision + R"({"-1":1}})", "scales.-1: is no name of an entry"},
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
  EXPECT_THAT(read_file("out.html"), HasSubstr("mantissa report: a (a/) a (x/a)"));
  write_file("a/metrics.jsonl", "{}\n");
  EXPECT_EQ(test::command_result({"report", "a", "--output", "never.html"}).exit_code, 4);
  EXPECT_FALSE(std::filesystem::exists("never.html"));
}

}  // namespace mantissa::report_page_test
