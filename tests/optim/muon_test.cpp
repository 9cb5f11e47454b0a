#include "optim/muon.h"

#include <gmock/gmock.h>

#include <mutex>
#include <set>

#include "optim/optimizer.h"
#include "testing.h"
#include "thread_ranks.h"

namespace mantissa::muon_test {

using ::testing::Each;
using ::testing::IsEmpty;
using Matrix = std::vector<double>;

// Newton-Schulz in fp64, from Jordan et al. 2024: X = a X + (b A + c A A) X with A = X X^T, of the transposed matrix where that is wider.
Matrix newton_schulz(Matrix x, int64_t rows, int64_t columns, int64_t steps) {
  const auto at = [](Matrix& m, int64_t width, int64_t i, int64_t j) -> double& { return m[static_cast<size_t>(i * width + j)]; };
  const auto transposed = [&](Matrix m, int64_t r, int64_t c) {
    Matrix out(m.size());
    for (int64_t i = 0; i < r; ++i)
      for (int64_t j = 0; j < c; ++j) at(out, r, j, i) = at(m, c, i, j);
    return out;
  };
  if (rows > columns) return transposed(newton_schulz(transposed(x, rows, columns), columns, rows, steps), columns, rows);
  const auto times = [&](Matrix a, Matrix b, int64_t r, int64_t k, int64_t c) {
    Matrix out(static_cast<size_t>(r * c));
    for (int64_t i = 0; i < r; ++i)
      for (int64_t j = 0; j < c; ++j)
        for (int64_t l = 0; l < k; ++l) at(out, c, i, j) += at(a, k, i, l) * at(b, c, l, j);
    return out;
  };
  double squares = 0.0;
  for (const double value : x) squares += value * value;
  for (double& value : x) value /= std::max(std::sqrt(squares), 1e-7);
  for (int64_t step = 0; step < steps; ++step) {
    const Matrix gram = times(x, transposed(x, rows, columns), rows, columns, rows), square = times(gram, gram, rows, rows, rows);
    Matrix polynomial(gram.size());
    for (size_t i = 0; i < gram.size(); ++i) polynomial[i] = -4.7750 * gram[i] + 2.0315 * square[i];
    const Matrix more = times(polynomial, x, rows, rows, columns);
    for (size_t i = 0; i < x.size(); ++i) x[i] = 3.4445 * x[i] + more[i];
  }
  return x;
}

class MuonTest : public test::BackendTest {};

TEST_F(MuonTest, OrthogonalizesMatricesOfAnyShapeAndScale) {
  for (const auto& [rows, columns] : {std::pair<int64_t, int64_t>{1, 1}, {1, 9}, {9, 1}, {24, 24}, {40, 7}, {33, 65}}) {
    for (const double scale : {1e-12, 1.0, 1e6}) {
      for (const int64_t steps : {1, 5, 6}) {
        const Matrix values = test::random_values(rows * columns, 7, scale);
        const Matrix expected = newton_schulz(values, rows, columns, steps);
        for (const auto& [dtype, tolerance] : {std::pair{Dtype::f32, 2e-5}, {Dtype::bf16, 1e-1}}) {
          const Tensor x = empty(fast(), dtype, {rows, columns});
          test::assign(x, values);
          orthogonalize(x, steps);
          EXPECT_TRUE(test::close(test::values(x), expected, tolerance)) << rows << " x " << columns << " times " << scale << " " << dtype;
        }
      }
    }
  }
  const Tensor nothing = zeros(fast(), Dtype::f32, {5, 3});
  orthogonalize(nothing, 5);
  EXPECT_THAT(test::values(nothing), Each(0.0)) << "of no gradient";
}

// Fused parts, experts with fused parts, and matrices that tensor ranks divide by columns; a vector, which AdamW trains.
std::vector<ParameterSpec> specs(const ModelRanks& ranks) {
  std::vector<ParameterSpec> out;
  const auto add = [&](const char* name, Shape shape, Split split, std::vector<int64_t> parts, int64_t experts) {
    ParameterSpec whole{
        .name = name, .shape = shape, .init = {.std = 0.5}, .dtype = Dtype::bf16, .parts = std::move(parts), .matrices = experts};
    whole.training.muon = true;
    ModelRanks own = ranks;
    if (experts == 1) own.expert = 1, own.expert_rank = 0;
    out.push_back(sharded(std::move(whole), {.split = split, .ranks = own}));
  };
  add("layers.0.qkv.weight", {160, 40}, Split::column_parallel, {96, 32, 32}, 1);
  add("layers.0.out.weight", {72, 64}, Split::row_parallel, {}, 1);
  add("layers.0.norm.weight", {75}, Split::none, {}, 1);
  add("layers.0.router.weight", {48, 20}, Split::none, {}, 1);
  add("layers.0.gate_up.weight", {256, 24}, Split::column_parallel, std::vector<int64_t>(8, 32), 4);
  add("layers.0.down.weight", {192, 64}, Split::row_parallel, {}, 4);
  add("layers.1.up.weight", {80, 48}, Split::column_parallel, {}, 1);
  out.back().training.muon = false;  // by AdamW
  return out;
}

using State = std::map<std::string, Matrix>;  // whole tensors

// Writes a shard to, or reads it from, the whole tensor of its name.
template <class Move>
void each_element(const ParameterShard& shard, Matrix& whole, const Move& move) {
  const int64_t columns = shard.of->stored_shape().with_dim0(1).elements(), own = shard.shape().with_dim0(1).elements();
  whole.resize(static_cast<size_t>(shard.of->stored_shape().elements()));
  for (const ParameterShard::Chunk& chunk : shard.chunks()) {
    for (int64_t row = 0; row < chunk.end - chunk.begin; ++row) {
      for (int64_t column = 0; column < own; ++column) {
        move(static_cast<size_t>((chunk.begin - shard.begin + row) * own + column),
             whole[static_cast<size_t>((chunk.row + row) * columns + chunk.column + column)]);
      }
    }
  }
}

// Takes three steps. The gradients come from the first rank of those that hold a parameter, so that sums are those of one.
void train(const Communicator& world, const ModelRanks& ranks, const OptimizerConfig& config, Dtype dtype, State& out, std::mutex& mutex) {
  const test::Threads one(1);
  const auto device = make_backend("cpu");
  const Mesh mesh = make_mesh(world, ranks);
  ParameterSet set;
  for (const ParameterSpec& spec : specs(mesh.ranks())) set.add(spec);
  set.allocate(*device, Dtype::f32, true);
  Optimizer optimizer(set, config, mesh, 1, {.directions = dtype, .seed = 9});
  optimizer.initialize(5);
  for (uint32_t step = 0; step < 3; ++step) {
    for (Parameter& parameter : set.all()) {
      const ParameterShard all{.of = &parameter, .begin = 0, .end = parameter.shape[0]};
      const int first = parameter.among_experts() ? mesh.expert_data.rank() : mesh.data.rank();
      Matrix whole = test::random_values(parameter.stored_shape().elements(), 100 * step + parameter.number(), first == 0 ? 1.0 : 0.0),
             own(static_cast<size_t>(parameter.shape.elements()));
      each_element(all, whole, [&](size_t i, double& value) { own[i] = value; });
      test::assign(parameter.leaf.grad, own);
    }
    optimizer.update(1e-2, {.losses = zeros(*device, Dtype::f64, {1})});
  }
  const std::lock_guard lock(mutex);
  for (const Optimizer::State& state : optimizer.states()) {
    for (const auto& [prefix, tensor] : {std::pair{"master.", state.master}, {"m.", state.first_moment}, {"v.", state.second_moment}}) {
      if (!tensor.defined()) continue;
      const Matrix values = test::values(tensor);
      each_element(state.shard, out[prefix + state.shard.of->name], [&](size_t i, double& value) { value = values[i]; });
    }
  }
}

struct Layout4 {
  int ranks, tensor, expert;
};

TEST(MuonOnRanks, HasTheBitsOfOneRankAtAnyLayout) {
  std::mutex mutex;
  for (const Dtype moments : {Dtype::f32, Dtype::bf16}) {
    for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
      const OptimizerConfig config{.grad_clip = 0.0, .moments = moments};
      State alone;
      train({}, {}, config, dtype, alone, mutex);
      EXPECT_EQ(alone.count("v.layers.0.qkv.weight"), 0U);
      EXPECT_EQ(alone.count("v.layers.1.up.weight"), 1U);
      for (const auto& [ranks, tensor, expert] : {Layout4{2, 1, 1}, {3, 1, 1}, {2, 2, 1}, {2, 1, 2}, {4, 2, 2}, {4, 1, 2}, {4, 2, 1}}) {
        State shared;
        const auto errors = test::run_ranks(ranks, [&, tensor = tensor, expert = expert](const Communicator& world) {
          train(world, {.tensor = tensor, .expert = expert}, config, dtype, shared, mutex);
        });
        EXPECT_THAT(errors, Each(IsEmpty()));
        for (const auto& [name, values] : alone)
          EXPECT_EQ(shared[name], values) << name << ": " << ranks << " ranks, tensor " << tensor << ", expert " << expert;
      }
    }
  }
}

// Muon and AdamW in fp64 from their papers, of a model without ranks, against the optimizer in fp32.
TEST_F(MuonTest, UpdatesMatricesAsThePaperSaysAndTheRestAsBefore) {
  for (const auto& [scale, nesterov] : {std::pair{MuonScale::match_rms_adamw, true}, {MuonScale::original, false}}) {
    const OptimizerConfig config{.weight_decay = 0.1, .grad_clip = 1.0, .muon = {.momentum = 0.9, .nesterov = nesterov, .scale = scale}};
    ParameterSet set;
    ParameterSpec fused{.name = "fused", .shape = {24, 10}, .init = {.std = 0.5}, .parts = {16, 8}};
    fused.training = {.lr_factor = 0.5, .muon = true};
    set.add(fused);
    set.allocate(fast(), Dtype::f32, true);
    Optimizer optimizer(set, config);
    optimizer.initialize(5);
    Matrix master = test::values(optimizer.states()[0].master), momentum(master.size());
    for (uint32_t step = 0; step < 10; ++step) {
      const double lr = 1e-2 * (step + 1), drawn = step % 2 == 0 ? 1.0 : 0.01;
      const Matrix gradient = test::random_values(240, step, drawn);
      test::assign(set.all()[0].leaf.grad, gradient);
      optimizer.update(lr, {.losses = zeros(fast(), Dtype::f64, {1})});
      double squares = 0.0;
      for (const double g : gradient) squares += g * g;
      const double clip = std::min(1.0, 1.0 / (std::sqrt(squares) + 1e-6));
      for (const auto& [begin, rows] : {std::pair<int64_t, int64_t>{0, 16}, {16, 8}}) {
        Matrix direction;
        for (int64_t i = begin * 10; i < (begin + rows) * 10; ++i) {
          const double g = gradient[static_cast<size_t>(i)] * clip;
          double& m = momentum[static_cast<size_t>(i)];
          m = 0.9 * m + 0.1 * g;
          direction.push_back(nesterov ? 0.1 * g + 0.9 * m : m);
        }
        direction = newton_schulz(direction, rows, 10, 5);
        const double out = static_cast<double>(rows),
                     factor = scale == MuonScale::original ? std::sqrt(std::max(1.0, out / 10)) : 0.2 * std::sqrt(std::max(out, 10.0));
        for (size_t i = 0; i < direction.size(); ++i) {
          double& weight = master[static_cast<size_t>(begin * 10) + i];
          weight -= 0.5 * lr * (factor * direction[i] + 0.1 * weight);
        }
      }
    }
    EXPECT_TRUE(test::close(test::values(optimizer.states()[0].master), master, 1e-5));
    EXPECT_TRUE(test::close(test::values(optimizer.states()[0].first_moment), momentum, 1e-5));
    EXPECT_FALSE(optimizer.states()[0].second_moment.defined());
  }
}

TEST_F(MuonTest, ASkippedStepChangesNothing) {
  ParameterSet set;
  for (const ParameterSpec& spec : specs({})) set.add(spec);
  set.allocate(fast(), Dtype::f32, true);
  Optimizer optimizer(set, {.moments = Dtype::bf16});
  optimizer.initialize(5);
  const auto state = [&] {
    std::vector<Matrix> out;
    for (const Optimizer::State& of : optimizer.states()) {
      for (const Tensor& tensor : {of.master, of.first_moment, of.second_moment})
        if (tensor.defined()) out.push_back(test::values(tensor));
    }
    return out;
  };
  const auto step = [&](double last) {
    for (Parameter& parameter : set.all()) test::assign(parameter.leaf.grad, test::random_values(parameter.shape.elements(), 3));
    test::set_value(set.all()[0].leaf.grad, 17, last);
    return optimizer.update(0.1, {.losses = zeros(fast(), Dtype::f64, {1})});
  };
  step(1.0);
  const auto before = state();
  EXPECT_TRUE(step(std::nan("")).skipped);
  EXPECT_EQ(state(), before);
  step(1.0);
  EXPECT_NE(state(), before);
}

// The mean of many roundings is the value, neighbors are not rounded alike, and no step, parameter or seed repeats another.
TEST_F(MuonTest, MomentsInBf16AreRoundedWithoutBias) {
  constexpr int64_t kCount = 1 << 14;
  const double g = 1.0 + 0x1p-9;  // m and v lie between two numbers of bf16
  std::set<Matrix> first, second;
  for (const uint64_t seed : {uint64_t{3}, uint64_t{4}}) {
    ParameterSet set;
    for (const char* name : {"layers.0.bias", "layers.1.bias"}) set.add({.name = name, .shape = {kCount}});
    set.allocate(fast(), Dtype::f32, true);
    Optimizer optimizer(set, {.beta1 = 0.5, .beta2 = 0.75, .grad_clip = 0.0, .moments = Dtype::bf16}, {}, 1, {.seed = seed});
    optimizer.initialize(5);
    for (int step = 0; step < 2; ++step) {
      for (const Optimizer::State& state : optimizer.states()) {
        fast().run(Fill{.out = state.first_moment, .value = 0.0});
        fast().run(Fill{.out = state.second_moment, .value = 0.0});
        fast().run(Fill{.out = state.shard.gradient(), .value = g});
      }
      optimizer.update(0.0, {.losses = zeros(fast(), Dtype::f64, {1})});
      for (const Optimizer::State& state : optimizer.states()) {
        for (const auto& [tensor, value] : {std::pair{state.first_moment, 0.5 * g}, {state.second_moment, 0.25 * g * g}}) {
          const Matrix rounded = test::values(tensor);
          double sum = 0.0;
          int64_t equal = 0;
          for (size_t i = 0; i < rounded.size(); ++i) sum += rounded[i], equal += i > 0 && rounded[i] == rounded[i - 1] ? 1 : 0;
          EXPECT_NEAR(sum / kCount, value, value * 0x1p-7 * 4 * 0.5 / std::sqrt(kCount)) << "four standard deviations";
          EXPECT_GT(equal, kCount / 4);
          EXPECT_LT(equal, kCount * 3 / 4);
        }
        first.insert(test::values(state.first_moment)), second.insert(test::values(state.second_moment));
      }
    }
  }
  EXPECT_EQ(first.size(), 8U);
  EXPECT_EQ(second.size(), 8U);
}

}  // namespace mantissa::muon_test
