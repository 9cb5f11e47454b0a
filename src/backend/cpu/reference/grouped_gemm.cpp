#include "backend/cpu/groups.h"
#include "backend/cpu/reference/reference.h"
#include "backend/index_rule.h"

namespace mantissa {

Groups::Groups(const char* kernel, const Tensor& offsets, int64_t rows)
    : offsets_(offsets.device_data<int32_t>()), count_(offsets.elements() - 1) {
  const IndexRule rule = IndexRule::each(kernel, "offsets");
  for (int64_t g = 0; g <= count_; ++g) rule.offset(offsets_, g, rows).check(g, offsets_[g]);
}

Value slice(const Value& value, int64_t begin, int64_t end) {
  if (const auto* tensor = std::get_if<Tensor>(&value)) return tensor->slice(begin, end);
  return slice(std::get<QuantizedTensor>(value), begin, end);
}

// Runs the plain GEMM group by group.
void CpuReference::execute(const GroupedGemm& k) {
  const Groups groups("grouped_gemm", k.offsets, k.out.dim(0));
  const int64_t matrix = shape_of(k.b.value)[0] / groups.count();
  for (int64_t g = 0; g < groups.count(); ++g) {
    const auto [begin, end] = groups[g];
    if (begin == end) continue;
    run(Gemm{.a = {slice(k.a.value, begin, end)},
             .b = {slice(k.b.value, g * matrix, (g + 1) * matrix), k.b.transposed},
             .out = k.out.slice(begin, end),
             .accumulate = false});
  }
  run(Fill{.out = k.out.slice(groups.end(), k.out.dim(0)), .value = 0.0});
}

void CpuReference::execute(const GroupedWeightGradient& k) {
  const Groups groups("grouped_weight_gradient", k.offsets, shape_of(k.a)[0]);
  const int64_t matrix = shape_of(k.a)[1];
  for (int64_t g = 0; g < groups.count(); ++g) {
    const auto [begin, end] = groups[g];
    const Tensor out = k.out.slice(g * matrix, (g + 1) * matrix);
    if (begin < end) {
      run(Gemm{.a = {slice(k.a, begin, end), true}, .b = {slice(k.b, begin, end)}, .out = out, .accumulate = k.accumulate});
    } else if (!k.accumulate) {
      run(Fill{.out = out, .value = 0.0});
    }
  }
}

}  // namespace mantissa
