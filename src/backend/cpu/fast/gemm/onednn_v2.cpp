#include "backend/cpu/fast/gemm/onednn_matmul.h"

namespace mantissa {

dnnl::matmul::primitive_desc describe_matmul(const MatmulOperands& m, const dnnl::primitive_attr& attributes, const dnnl::engine& engine) {
  const auto operation = m.with_bias ? dnnl::matmul::desc(m.a, m.b, m.bias, m.c) : dnnl::matmul::desc(m.a, m.b, m.c);
  return {operation, attributes, engine};
}

}  // namespace mantissa
