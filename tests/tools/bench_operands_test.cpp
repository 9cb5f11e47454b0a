#include "tools/bench/bench_operands.h"

#include <gtest/gtest.h>

#include <set>

#include "closed_device.h"

namespace mantissa::bench_operands_test {

// Notes the operands of sums, and copies nothing.
class NotedSums final : public test::ClosedDevice {
 public:
  std::vector<const std::byte*> first, second;
  int copies = 0;

 protected:
  void execute(const Add& k) override {
    EXPECT_EQ(k.out.device_bytes(), k.a.device_bytes()) << "in place";
    first.push_back(k.a.device_bytes());
    second.push_back(k.b.device_bytes());
  }
  void execute(const Convert&) override { ++copies; }
};

TEST(BenchOperands, OfADeviceTurnThroughMoreThanFourCaches) {
  NotedSums device;
  const Shape shape{16 << 20};  // 32 MiB, three times a call
  const Tensor a = empty(device, Dtype::bf16, shape), b = empty(device, Dtype::bf16, shape);
  const tools::Workload workload = tools::BenchOperands(device, Dtype::bf16).workload("add", "", Add{.a = a, .b = b, .out = a});
  for (int call = 0; call < 20; ++call) workload.run();
  const std::set apart(device.first.begin(), device.first.end());
  EXPECT_GT(static_cast<double>(apart.size()) * workload.bytes, double{4 << 20} * 128);
  EXPECT_EQ(std::set(device.second.begin(), device.second.end()).size(), apart.size());
  EXPECT_EQ(device.copies, 2 * (static_cast<int>(apart.size()) - 1));
  for (size_t call = apart.size(); call < device.first.size(); ++call) EXPECT_EQ(device.first[call], device.first[call - apart.size()]);
}

TEST(BenchOperands, OfACpuAndSmallOnesStay) {
  const auto host = make_backend("cpu");
  NotedSums device;
  for (Backend* each : {host.get(), static_cast<Backend*>(&device)}) {
    const Tensor x = empty(*each, Dtype::f32, {1000});
    EXPECT_EQ(tools::beyond_the_cache(*each, Add{.a = x, .b = x, .out = x}, each->host_memory() ? int64_t{1} << 30 : 4000).size(), 1U);
  }
}

}  // namespace mantissa::bench_operands_test
