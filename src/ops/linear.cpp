#include <optional>

#include "mantissa/backend/functions.h"
#include "mantissa/ops/ops.h"
#include "ops/linear_products.h"

namespace mantissa {
namespace {

// What backward reads of the input: its codes, or the tensor, or the means to compute that again.
class SavedInput {
 public:
  SavedInput(const Var& x, const LinearInput& read, const LinearProducts& products) {
    if (products.keeps_codes() && !x.rebuilt()) {
      codes_ = products.kept(read);
    } else {
      tensor_.emplace(x);
    }
  }
  LinearInput get(const LinearProducts& products) const { return tensor_ ? products.kept(products.input(tensor_->get())) : codes_; }

 private:
  LinearInput codes_;
  std::optional<Saved> tensor_;
};

}  // namespace

Tensor linear_product(const Tensor& x, const LinearWeight& weight, Dtype out, const Recipe& recipe) {
  const LinearProducts products(weight, recipe);
  Tensor y = empty(weight.device(), out, {x.dim(0), weight.shape()[0]});
  products.fprop(products.input(x), {}, y);
  return y;
}

Var linear(const Var& x, const LinearWeight& weight, const Var& bias, const Recipe& recipe) {
  const LinearProducts products(weight, recipe);
  const LinearInput input = products.input(x.value());
  Tensor y = empty(weight.device(), x.value().dtype(), {x.value().dim(0), weight.shape()[0]});
  products.fprop(input, bias.value(), y);
  if (!recording({x, weight.var(), bias})) return Var(y);
  const bool wants_dx = x.wants_gradient();
  return record(
      "linear", y, {x, weight.var(), bias},
      [saved = SavedInput(x, input, products), products, wants_dx, columns = weight.shape()[1], bias_leaf = bias.leaf()](const Tensor& dy) {
        Backend& device = dy.device();
        const Tensor dx = wants_dx ? empty(device, dy.dtype(), {dy.dim(0), columns}) : Tensor();
        products.backward(saved.get(products), dy, dx);
        if (bias_leaf) {
          const auto [dbias, accumulate] = bias_leaf->target();
          device.run(SumRows{.x = dy, .out = dbias, .accumulate = accumulate});
        }
        return std::vector<Tensor>{dx, {}, {}};
      });
}

}  // namespace mantissa
