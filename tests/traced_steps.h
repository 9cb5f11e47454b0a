// Steps of a few kernels, traced into a folder, and what must stand there.
#pragma once

#include <gmock/gmock.h>

#include <nlohmann/json.hpp>

#include "files.h"
#include "mantissa/backend/functions.h"
#include "metrics/run_trace.h"

namespace mantissa::test {

// Steps 1 to 4 of a device, of which 2 and 3 are traced: three kernels each, and one in the communication lane.
inline void trace_steps(Backend& device, const std::filesystem::path& folder) {
  RunConfig config;
  config.training.trace = TraceConfig{.steps = {2, 3}};
  config.logging.dir = folder;
  const Communicator alone;
  RunTrace trace(config, device, alone);
  const Tensor x = empty(device, Dtype::f32, {64, 64});
  for (int64_t step = 1; step <= 4; ++step) {
    trace.begin_step(step, [] {});
    const TraceSpan whole(Track::step, "step", step);
    {
      const TraceSpan pass(Track::pass, "forward");
      for (int i = 0; i < 3; ++i) device.run(Fill{.out = x, .value = 1.0});
    }
    const LaneScope lane(Lane::communication);
    const Tensor y = empty(device, Dtype::f32, {8});
    device.run(Fill{.out = y, .value = 2.0});
  }
}

// Expects steps 2 and 3. A device with lanes has one for what runs beside the computation.
inline void expect_traced_steps(const std::filesystem::path& folder, bool lanes = false) {
  const nlohmann::json events = nlohmann::json::parse(read_file(joined_trace(folder)));
  std::map<std::string, std::vector<nlohmann::json>> spans;
  for (const nlohmann::json& event : events) {
    if (event["ph"] == "X") spans[event["name"]].push_back(event);
  }
  ASSERT_THAT(spans["step"], ::testing::SizeIs(2));
  EXPECT_EQ(spans["step"][0]["args"]["number"], 2);
  EXPECT_EQ(spans["step"][1]["args"]["number"], 3);
  ASSERT_THAT(spans["forward"], ::testing::SizeIs(2));
  ASSERT_THAT(spans["fill"], ::testing::SizeIs(8));
  const auto begin = [](const nlohmann::json& span) { return span["ts"].get<double>(); };
  const auto end = [&](const nlohmann::json& span) { return begin(span) + span["dur"].get<double>(); };
  constexpr double kRounding = 0.01;  // microseconds
  for (size_t i = 0; i < 8; ++i) {
    const bool beside = i % 4 == 3;
    const nlohmann::json &fill = spans["fill"][i], &outer = spans[beside ? "step" : "forward"][i / 4];
    EXPECT_EQ(fill["args"]["bytes"], beside ? 32 : 4 * 64 * 64);
    EXPECT_EQ(fill["args"]["operands"], beside ? "out fp32 [8]" : "out fp32 [64, 64]");
    EXPECT_EQ(fill["tid"] == outer["tid"], !(beside && lanes)) << i;
    if (beside && lanes) continue;
    EXPECT_GE(begin(fill), begin(outer) - kRounding);
    EXPECT_LE(end(fill), end(outer) + kRounding);
  }
}

}  // namespace mantissa::test
