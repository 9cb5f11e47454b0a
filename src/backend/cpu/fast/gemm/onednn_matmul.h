// Parts of oneDNN that the GEMMs of this folder share.
#pragma once

#include <dnnl.hpp>
#include <string>

#include "mantissa/tensor/tensor.h"

namespace mantissa {

struct MatmulOperands {
  dnnl::memory::desc a, b, c;
};

// Makes the one call that differs between the programming interfaces of oneDNN 2.x and 3.x, in onednn_v2.cpp or onednn_v3.cpp, chosen by
// CMake. Throws dnnl::error if there is no implementation.
dnnl::matmul::primitive_desc describe_matmul(const MatmulOperands& operands, const dnnl::primitive_attr& attributes,
                                             const dnnl::engine& engine);

// Uses scratch memory of the caller, and adds to what c holds if asked for. Throws Error(internal) that names `which` if there is no
// implementation.
dnnl::matmul::primitive_desc describe_gemm(const MatmulOperands& operands, bool accumulate, const std::string& which);

const char* isa_name(dnnl::cpu_isa isa);  // named like onednn_isa_name()

const dnnl::engine& cpu_engine();
dnnl::memory::data_type data_type_of(Dtype dtype);
dnnl::memory::desc matrix_description(int64_t rows, int64_t cols, Dtype dtype, int64_t row_stride, int64_t col_stride);

}  // namespace mantissa
