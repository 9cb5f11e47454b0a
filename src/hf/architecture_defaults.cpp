#include <algorithm>
#include <array>

#include "hf/architecture_options.h"

namespace mantissa {
namespace {

constexpr ClassDefault kNoNull{.null = false};

constexpr std::array kDefaults = {
    ClassDefaults{
        .architecture = Architecture::llama, .kv_heads = {}, .head_dim = {}, .positions = 2048, .norm_eps = 1e-6, .rope_theta = 1e4},
    ClassDefaults{.architecture = Architecture::qwen2,
                  .kv_heads = {.absent = 32},
                  .head_dim = kNoNull,
                  .positions = 32768,
                  .norm_eps = 1e-6,
                  .rope_theta = 1e4},
    ClassDefaults{.architecture = Architecture::qwen3,
                  .kv_heads = {.absent = 32},
                  .head_dim = {.absent = 128, .null = false},
                  .positions = 32768,
                  .norm_eps = 1e-6,
                  .rope_theta = 1e4},
    ClassDefaults{.architecture = Architecture::qwen3_moe,
                  .kv_heads = {.absent = 4, .null = false},
                  .head_dim = kNoNull,
                  .positions = 32768,
                  .norm_eps = 1e-6,
                  .rope_theta = 1e4,
                  .experts = 128,
                  .experts_per_token = 8},
    ClassDefaults{.architecture = Architecture::mixtral,
                  .kv_heads = {.absent = 8},
                  .head_dim = {},
                  .positions = 131072,
                  .norm_eps = 1e-5,
                  .rope_theta = 1e6,
                  .experts = 8,
                  .experts_per_token = 2},
    ClassDefaults{.architecture = Architecture::gpt_oss,
                  .kv_heads = {.absent = 8},
                  .head_dim = {.absent = 64},
                  .positions = 131072,
                  .norm_eps = 1e-5,
                  .rope_theta = 150000.0,
                  .experts = 128,
                  .experts_per_token = 4}};

}  // namespace

const ClassDefaults& class_defaults(Architecture architecture) {
  return *std::ranges::find_if(kDefaults, [&](const ClassDefaults& one) { return one.architecture == architecture; });
}

}  // namespace mantissa
