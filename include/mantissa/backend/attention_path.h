// Who computes attention on a device: kernels of mantissa, or cuDNN. One table for the CUDA backend, which runs attention, explain
// --device, which reports it, and the checks of a run that asks for cuDNN.
//
// cuDNN's operation for attention (CUDNN_BACKEND_OPERATION_SDPA_FWD_DESCRIPTOR) has no causal mask before 9.21, and its gradient names no
// way to the same bits again. So it is given graphs of matmuls, pointwise operations and reductions instead, which it recognizes: causal
// masks, grouped queries, windows, documents and sinks, and a backward pass that has the same bits again on 9.0, because the gradients of
// the scores are written to memory before dq is their product, where the other form adds to dq from several blocks at once. The price is
// memory that grows with the square of the length (attention_workspace()). On other GPUs that form is taken by the engine of 8.0 alone, so
// they keep our kernels.
//
// No GPU has confirmed results, bits and speed, nor what NaN does: our kernels keep a NaN from queries that do not see it, and nothing
// promises that of cuDNN. So training.attention: auto means own.
#pragma once

#include <cstdint>
#include <string>

#include "mantissa/tensor/tensor.h"

namespace mantissa {

enum class AttentionBy : uint8_t { automatic, own, cudnn };  // training.attention

struct AttentionDevice {
  int architecture = 0;  // ten times the compute capability; 0: a CPU
  int library = 0;       // cuDNN as it numbers its versions: 91900 is 9.19; 0: there is none
  AttentionBy by = AttentionBy::own;
};

struct AttentionForm {
  Dtype dtype = Dtype::bf16;
  int64_t batch = 1, length = 1, heads = 1, kv_heads = 1, head_dim = 64;
};

// Reasons why our kernels compute attention.
enum class AttentionObstacle : uint8_t { none, not_asked, cpu, architecture, no_library, old_library, dtype, head_dim, one_token };
AttentionObstacle obstacle_of_cudnn(const AttentionForm& form, const AttentionDevice& device);
// Returns a clause for "because ..."; empty for none.
std::string obstacle_text(AttentionObstacle obstacle, const AttentionForm& form, const AttentionDevice& device);

inline constexpr int kSupposedCudnn = 91900;  // that explain supposes, and the first whose graphs were looked at
std::string cudnn_text(int version);          // "cuDNN 9.19"

// Returns the bytes that the backward pass by cuDNN takes beyond its operands, at most.
double attention_workspace(const AttentionForm& form);

}  // namespace mantissa
