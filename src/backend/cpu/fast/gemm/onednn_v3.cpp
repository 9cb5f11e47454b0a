#include "backend/cpu/fast/gemm/onednn_matmul.h"

namespace mantissa {

dnnl::matmul::primitive_desc describe_matmul(const MatmulOperands& m, const dnnl::primitive_attr& attributes, const dnnl::engine& engine) {
  if (m.with_bias) return {engine, m.a, m.b, m.bias, m.c, attributes};
  return {engine, m.a, m.b, m.c, attributes};
}

}  // namespace mantissa
