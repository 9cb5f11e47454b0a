// Every kernel, and every case of it.
#pragma once

#include "kernel_cases_dense.h"
#include "kernel_cases_heads.h"
#include "kernel_cases_moe.h"
#include "kernel_cases_quantized.h"

namespace mantissa::test {

inline std::vector<std::string> kernel_names() {
#define MANTISSA_NAME(Kernel) #Kernel,
  return {MANTISSA_KERNELS(MANTISSA_NAME)};
#undef MANTISSA_NAME
}

inline const std::vector<KernelCase>& kernel_cases() {
  static const std::vector<KernelCase> all = [] {
    Cases add;
    for (const auto append :
         {elementwise_cases, gemms_cases, norms_cases, heads_cases, attention_cases, activations_cases, loss_and_optimizer_cases,
          muon_cases, distillation_cases, quantize_cases, dequantize_cases, simulate_cases, route_cases, dispatch_cases, grouped_cases}) {
      append(add);
    }
    return std::move(add.all);
  }();
  return all;
}

}  // namespace mantissa::test
