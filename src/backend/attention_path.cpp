#include "mantissa/backend/attention_path.h"

#include "mantissa/base/integers.h"
#include "mantissa/base/text.h"

namespace mantissa {
namespace {

constexpr int64_t kWidestHead = 256, kHeadMultiple = 8;

}  // namespace

AttentionObstacle obstacle_of_cudnn(const AttentionForm& form, const AttentionDevice& device) {
  using enum AttentionObstacle;
  if (device.by != AttentionBy::cudnn) return not_asked;
  if (form.dtype != Dtype::bf16) return dtype;
  if (form.head_dim > kWidestHead || form.head_dim % kHeadMultiple != 0) return head_dim;
  if (form.length < 2) return one_token;
  if (device.architecture == 0) return cpu;
  if (device.architecture != 90) return architecture;
  if (device.library == 0) return no_library;
  return device.library < kSupposedCudnn ? old_library : none;
}

std::string obstacle_text(AttentionObstacle obstacle, const AttentionForm& form, const AttentionDevice& device) {
  switch (obstacle) {
    case AttentionObstacle::none: return "";
    case AttentionObstacle::not_asked: return "training.attention is not cudnn";
    case AttentionObstacle::cpu: return "cuDNN is for GPUs, and the device is a CPU";
    case AttentionObstacle::architecture:
      return text("cuDNN's backward pass has the same bits again at speed on sm_90 alone, and the device is sm_", device.architecture);
    case AttentionObstacle::no_library: return "there is no cuDNN";
    case AttentionObstacle::old_library: return text(cudnn_text(device.library), " is older than ", cudnn_text(kSupposedCudnn));
    case AttentionObstacle::dtype: return text("cuDNN takes bf16, and attention is computed in ", dtype_name(form.dtype));
    case AttentionObstacle::head_dim:
      return text("cuDNN takes heads of up to ", kWidestHead, " channels, a multiple of ", kHeadMultiple, ", and head_dim is ",
                  form.head_dim);
    case AttentionObstacle::one_token: return "sequences have one token";
  }
  return "";
}

std::string cudnn_text(int version) { return text("cuDNN ", version / 10000, '.', version / 100 % 100); }

// Gradients of the scores in bf16, in tiles of 64 queries and 128 keys, and with grouped queries dk and dv of every query head: so many
// bytes and 256 more were asked for by 9.19 for an H200. The rest are the sums of dout and out.
double attention_workspace(const AttentionForm& form) {
  const double heads = static_cast<double>(form.batch) * static_cast<double>(form.heads), length = static_cast<double>(form.length);
  const auto rounded = [&](int64_t unit) { return static_cast<double>(round_up(form.length, unit)); };
  const double scores = 2 * rounded(64) * rounded(128);
  const double full_heads = form.heads == form.kv_heads ? 0.0 : 2 * 2 * length * static_cast<double>(form.head_dim);
  return heads * (scores + full_heads + 4 * length) + 1024;
}

}  // namespace mantissa
