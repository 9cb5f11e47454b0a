// Lanes and memory of the backend of CUDA, on streams that come late: the promises of every device (backend.h).
#include <numeric>

#include "files.h"
#include "gpu/runtime.h"
#include "testing.h"

namespace mantissa::lanes_test {

constexpr int64_t kElements = 5000;

Tensor filled(Backend& device, double value) {
  const Tensor out = empty(device, Dtype::f32, {kElements});
  device.run(Fill{.out = out, .value = value});
  return out;
}
void expect_all(const Tensor& x, double value) { EXPECT_EQ(test::values(x), std::vector<double>(kElements, value)); }

// Every pair of lanes hands over many times, so that a lane that does not wait is early at least once.
TEST(CudaLanes, FollowMarks) {
  const auto device = make_backend("cuda");
  const Tensor x = filled(*device, 0), one = filled(*device, 1);
  const Tensor* const added = &one;
  for (int i = 0; i < 40; ++i) {
    const Backend::Mark before = device->mark();
    const LaneScope scope(i % 2 == 0 ? Lane::communication : Lane::compute);
    device->follow(before);
    device->run(Add{.a = x, .b = *added, .out = x});
    const Backend::Mark done = device->mark();
    const LaneScope other(Lane::compute);
    device->follow(done);
  }
  expect_all(x, 40);
}

TEST(CudaLanes, TakeTheBytesOfAnUploadAtOnce) {
  const auto device = make_backend("cuda");
  std::vector<Tensor> copies;
  std::vector<float> source(kElements);
  for (int i = 0; i < 10; ++i) {
    source.assign(kElements, static_cast<float>(i));
    copies.push_back(empty(*device, Dtype::f32, {kElements}));
    device->upload(source.data(), copies.back());
  }
  for (size_t i = 0; i < copies.size(); ++i) expect_all(copies[i], static_cast<double>(i));
}

// Copies to and from the device, and the bytes that the host is given, go by pieces of 16 MiB: here two and a part of a third.
TEST(CudaLanes, CopyEveryPieceOfATensorToItsPlace) {
  const auto device = make_backend("cuda");
  constexpr int64_t kCount = (int64_t{10} << 20) + 3;
  std::vector<float> sent(kCount), received(kCount);
  std::iota(sent.begin(), sent.end(), 1.0F);  // each number is exact
  const Tensor x = empty(*device, Dtype::f32, {kCount}), other = empty(*device, Dtype::f32, {kCount});
  device->upload(sent.data(), x);
  device->download(x, received.data());
  EXPECT_TRUE(received == sent);
  device->run(Convert{.x = x, .out = other});
  std::vector<std::byte> pieces;
  for_each_piece(other, [&](std::span<const std::byte> piece) { pieces.insert(pieces.end(), piece.begin(), piece.end()); });
  EXPECT_TRUE(std::ranges::equal(pieces, std::as_bytes(std::span(sent))));
}

// A block of one lane is not lent to the other, whose kernels may run before those that still read it.
TEST(CudaLanes, HavePoolsOfTheirOwn) {
  const auto device = make_backend("cuda");
  const std::byte* const freed = filled(*device, 1).device_bytes();
  {
    const LaneScope scope(Lane::communication);
    EXPECT_NE(filled(*device, 2).device_bytes(), freed);
  }
  EXPECT_EQ(filled(*device, 3).device_bytes(), freed) << "its own lane has it again";
}

TEST(CudaLanes, ReuseMemoryInTheirOrder) {
  const auto device = make_backend("cuda");
  const Tensor sum = filled(*device, 0);
  for (int i = 1; i <= 20; ++i) {
    const Tensor x = filled(*device, i);
    device->run(Add{.a = sum, .b = x, .out = sum});
  }
  expect_all(sum, 210);
}

// A tensor may outlive kernels that use it: its memory goes back when its lane has come so far. What ends with an error is no exception.
TEST(CudaLanes, EndBeforeTheirMemory) {
  for (int i = 0; i < 20; ++i) {
    const auto device = make_backend("cuda");
    const Tensor ids = test::tensor_of(*device, Dtype::i32, {1}, {7}), table = filled(*device, 1).view({10, kElements / 10});
    device->run(EmbeddingForward{.ids = ids, .weight = table, .out = empty(*device, Dtype::f32, {1, kElements / 10})});
    device->set_interrupt([] { fail(ExitCode::stopped, "ended"); });
    for (int k = 0; k < 30; ++k) device->run(Add{.a = table, .b = table, .out = table});
  }
}

// A copy that comes to the host is as it was when it was asked for, and brings the errors that kernels had reported until then.
TEST(CudaLanes, DownloadWhatWasThereBeforeLaterWork) {
  const auto device = make_backend("cuda");
  const Tensor x = filled(*device, 1);
  std::vector<float> read(static_cast<size_t>(kElements));
  for (int i = 0; i < 20; ++i) {
    device->run(Fill{.out = x, .value = static_cast<double>(i)});
    const auto here = device->begin_download(x);
    for (int k = 0; k < 5; ++k) device->run(Add{.a = x, .b = x, .out = x});
    here(read.data());
    EXPECT_EQ(read, std::vector<float>(read.size(), static_cast<float>(i)));
  }
  const Tensor ids = test::tensor_of(*device, Dtype::i32, {1}, {7}), table = filled(*device, 1).view({5, kElements / 5});
  device->run(EmbeddingForward{.ids = ids, .weight = table, .out = empty(*device, Dtype::f32, {1, kElements / 5})});
  const auto here = device->begin_download(x);
  EXPECT_EQ(test::error_of([&] { here(read.data()); }).code(), ExitCode::data);
}

TEST(CudaLanes, RefuseAThreadThatHasAnotherDevice) {
  const auto device = make_backend("cuda");
  simt::current_device() = 1;
  const Error error = test::error_of([&] { filled(*device, 1); });
  simt::current_device() = 0;
  EXPECT_EQ(std::string(error.what()).find("GPU 0 is used by a thread whose device is 1"), 0U) << error.what();
}

}  // namespace mantissa::lanes_test
