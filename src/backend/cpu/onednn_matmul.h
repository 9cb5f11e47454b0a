// The one call that differs between the programming interfaces of oneDNN 2.x and 3.x: onednn_v2.cpp or onednn_v3.cpp, chosen by CMake.
#pragma once

#include <dnnl.hpp>

namespace mantissa {

struct MatmulOperands {
  dnnl::memory::desc a, b, c, bias;
  bool with_bias;
};

// Throws dnnl::error if there is no implementation.
dnnl::matmul::primitive_desc describe_matmul(const MatmulOperands& operands, const dnnl::primitive_attr& attributes,
                                             const dnnl::engine& engine);

}  // namespace mantissa
