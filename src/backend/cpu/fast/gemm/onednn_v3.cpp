#include "backend/cpu/fast/gemm/onednn_matmul.h"

namespace mantissa {

dnnl::matmul::primitive_desc describe_matmul(const MatmulOperands& m, const dnnl::primitive_attr& attributes, const dnnl::engine& engine) {
  return {engine, m.a, m.b, m.c, attributes};
}

}  // namespace mantissa
