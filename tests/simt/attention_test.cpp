// Attention where something that is not seen is no number, as in the reference.
#include <cmath>

#include "kernel_backends.h"
#include "testing.h"

namespace mantissa::test::attention_test {

constexpr HeadLayout kLayout{.heads = 2, .kv_heads = 1, .head_dim = 8};
constexpr int64_t kLength = 150, kOut = 16;

struct Hidden {
  const char* name;
  int64_t window;
  bool documents, sinks;
};

// One element of a row that is not finite: of the packed row, or of dout.
struct Fault {
  int64_t row, column;
  bool of_dout;
  double value;
};

class SimtAttention : public OnAllBackends {
 protected:
  struct Results {
    std::vector<double> out, lse, dqkv;
  };

  static Results run(Backend& device, Dtype dtype, const Hidden& hidden, const Fault& fault) {
    const Tensor qkv = random_tensor(device, dtype, {kLength, kLayout.row()}, 1), dout = random_tensor(device, dtype, {kLength, kOut}, 2);
    set_value(fault.of_dout ? dout : qkv, fault.row * (fault.of_dout ? kOut : kLayout.row()) + fault.column, fault.value);
    std::vector<double> starts;  // documents that begin at 0, 40, 70 and 131
    for (int64_t i = 0; i < kLength; ++i) starts.push_back(i < 40 ? 0.0 : i < 70 ? 40.0 : i < 131 ? 70.0 : 131.0);
    const Tensor of_documents = hidden.documents ? tensor_of(device, Dtype::i32, {kLength}, starts) : Tensor(),
                 out = empty(device, dtype, {kLength, kOut}), lse = empty(device, Dtype::f32, {1, 2, kLength}), dqkv = empty_like(qkv);
    device.run(AttentionForward{.qkv = qkv,
                                .out = out,
                                .lse = lse,
                                .batch = 1,
                                .layout = kLayout,
                                .scale = 0.4,
                                .segment_starts = of_documents,
                                .window = hidden.window,
                                .sinks = hidden.sinks ? tensor_of(device, dtype, {2}, {0.5, -1.0}) : Tensor()});
    device.run(AttentionBackward{.qkv = qkv,
                                 .out = out,
                                 .lse = lse,
                                 .dout = dout,
                                 .dqkv = dqkv,
                                 .batch = 1,
                                 .layout = kLayout,
                                 .scale = 0.4,
                                 .segment_starts = of_documents,
                                 .window = hidden.window});
    return {values(out), values(lse), values(dqkv)};
  }

  // Not finite where the reference is not, and close to it elsewhere.
  static void expect_as(const std::vector<double>& expected, const std::vector<double>& actual, double tolerance, const char* what) {
    ASSERT_EQ(expected.size(), actual.size());
    std::vector<double> finite, found;
    for (size_t i = 0; i < expected.size(); ++i) {
      ASSERT_EQ(std::isfinite(actual[i]), std::isfinite(expected[i])) << what << ' ' << i << ": " << actual[i] << ", not " << expected[i];
      if (std::isfinite(expected[i])) finite.push_back(expected[i]), found.push_back(actual[i]);
    }
    EXPECT_TRUE(close(found, finite, tolerance)) << what;
  }
};

// At the edges of tiles, of windows and of documents. Columns 16 and 24 of a packed row begin its key and its value.
TEST_F(SimtAttention, WhatIsNotSeenMayBeNaN) {
  for (const Hidden& hidden : {Hidden{"causal", 0, false, false},
                               {"window", 5, false, false},
                               {"long window", 70, false, true},
                               {"documents", 0, true, true},
                               {"window of documents", 20, true, false}}) {
    for (const int64_t row : {0, 39, 64, 100, 149}) {
      for (const Fault fault : {Fault{row, 19, false, std::nan("")}, {row, 27, false, HUGE_VAL}, {row, 9, true, std::nan("")}}) {
        SCOPED_TRACE(text(hidden.name, ": row ", row, ", column ", fault.column, fault.of_dout ? " of dout" : "", ", ", fault.value));
        const Results expected = run(reference(), Dtype::f32, hidden, fault);
        for (Backend* device : tested()) {
          const Results actual = run(*device, Dtype::f32, hidden, fault);
          expect_as(expected.out, actual.out, 1e-5, "out");
          expect_as(expected.lse, actual.lse, 1e-5, "lse");
          expect_as(expected.dqkv, actual.dqkv, 5e-5, "dqkv");
        }
        if (HasFailure()) return;
      }
    }
  }
}

// A value that a query sees counts, however small its weight is: 0 times Inf.
TEST_F(SimtAttention, WhatIsSeenIsMultipliedByAWeightOfZero) {
  for (Backend* device : devices()) {
    const HeadLayout layout{.heads = 1, .kv_heads = 1, .head_dim = 2};
    const Tensor qkv = tensor_of(*device, Dtype::f32, {2, 6}, {1, 0, -200, 0, HUGE_VAL, 1, 1, 0, 200, 0, 1, 1}),
                 out = empty(*device, Dtype::f32, {2, 2}), lse = empty(*device, Dtype::f32, {1, 1, 2});
    device->run(AttentionForward{.qkv = qkv, .out = out, .lse = lse, .batch = 1, .layout = layout, .scale = 1.0});
    const std::vector<double> mixed = values(out);
    EXPECT_TRUE(std::isnan(mixed[2])) << device->name();
    EXPECT_EQ(mixed[3], 1.0) << device->name();
  }
}

}  // namespace mantissa::test::attention_test
