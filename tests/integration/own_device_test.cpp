// Use by train() of a device that the caller makes, whatever training.device says.
#include <gmock/gmock.h>

#include "backend/ceilings.h"
#include "closed_device.h"
#include "train/gemm_rate.h"
#include "training.h"

namespace mantissa::own_device_test {

class OwnDevice : public test::TrainingTest {};

TEST_F(OwnDevice, IsNotComparedWithTheRateOfACpu) {
  LoadedConfig loaded = config("run", {"training.steps=1000000000", "schedule.type=constant", "model.vocab_size=8"});
  const auto cpu = make_backend("cpu"), plain = make_backend("cpu_reference");
  for (const DeviceChoice device : {DeviceChoice::automatic, DeviceChoice::cpu_reference}) {
    loaded.config.training.device = device;
    EXPECT_FALSE(measured_gemm_rate(loaded.config, test::ClosedDevice(), {}));
    EXPECT_FALSE(measured_gemm_rate(loaded.config, *plain, {}));
  }
  EXPECT_TRUE(measured_gemm_rate(loaded.config, *cpu, {}));
}

// Its memory is closed to the host.
TEST_F(OwnDevice, HasCeilingsOfItsOwnKernels) {
  test::ClosedDevice device;
  GemmCeiling gemm(device, Dtype::bf16, 64);
  CopyCeiling copy(device, 4096);
  gemm.run();
  copy.run();
  device.synchronize();
  EXPECT_EQ(gemm.dtype(), Dtype::bf16);
  EXPECT_EQ(gemm.flops(), 2.0 * 64 * 64 * 64);
  EXPECT_GT(GemmCeiling::usual_rows(device), GemmCeiling::usual_rows(*make_backend("cpu")));
}

// Devices of their own memory have no kernel that simulates formats; training.device does not name this one.
TEST_F(OwnDevice, IsRefusedAPlanWithSimulatedOperandsByItsKey) {
  const LoadedConfig simulated = config("run", {"precision.recipe=own", R"(precision.recipes={"own": {"gemms": ["fprop"],
                                                  "simulate": {"input": {"format": "e3m2", "block": [1, 16]}}}})"});
  const Error error = test::error_of([&] { run(simulated, {}, {}, [] { return std::make_unique<test::ClosedDevice>(); }); });
  EXPECT_EQ(error.code(), ExitCode::usage);
  EXPECT_THAT(
      error.what(),
      ::testing::HasSubstr("precision.recipe: recipe \"own\" of layers.0.attn.qkv simulates formats, which only the CPU backend supports"));
}

// 150 TB of weights, gradients and moments.
TEST_F(OwnDevice, IsNotMadeForARunThatTheHostHasNoMemoryFor) {
  const LoadedConfig large =
      config("run", {"model.intermediate_size=4194304", "model.hidden_size=4096", "model.num_attention_heads=32", "model.num_layers=200"});
  int made = 0;
  const auto make_device = [&made]() -> std::unique_ptr<Backend> {
    ++made;
    return std::make_unique<test::ClosedDevice>();
  };
  const Error error = test::error_of([&] { run(large, {}, {}, make_device); });
  EXPECT_EQ(error.code(), ExitCode::environment);
  EXPECT_THAT(error.what(), ::testing::HasSubstr("not enough memory: training needs "));
  EXPECT_EQ(made, 0);
}

}  // namespace mantissa::own_device_test
