// Estimates what a run will need, before it starts.
#pragma once

#include <cstdint>

#include "mantissa/config/run_config.h"

namespace mantissa {

// GPU memory of CUDA for each process: its context, with the code of kernels and of cuBLASLt. An assumption: 400 to 600 MiB are usual.
inline constexpr int64_t kCudaContext = int64_t{512} << 20;
// GPU memory of NCCL for each group of several ranks that the process is in. An assumption: 100 to 500 MB are reported, by the number of
// channels.
inline constexpr int64_t kNcclGroup = int64_t{256} << 20;

// Bytes of the rank that needs most, by purpose, in the memory where its tensors are: that of the host, or of its GPU if training.device is
// one; each at most 1e18. Between steps the first four and the exchange are allocated: exactly, except for scalars and sums of a few
// kilobytes. Experts are assumed to be chosen evenly; otherwise activations take more.
struct MemoryEstimate {
  int64_t masters = 0;      // fp32 weights: the own ones, and those of others where forward reads them
  int64_t values = 0;       // beside the masters: copies in the compute dtype (fp32: the masters), codes and scales; buffers
  int64_t gradients = 0;    // fp32, as many buffers as training.accumulation needs
  int64_t optimizer = 0;    // moments of the own weights: two of AdamW, one of Muon
  int64_t activations = 0;  // kept between forward and backward of one micro batch, for training.recompute
  int64_t workspace = 0;    // at most beyond these in forward and backward, with GEMMs as this CPU computes them
  int64_t exchange = 0;     // received from other ranks: gradients of a bucket
  int64_t inputs = 0;       // on a GPU: the uploaded batch of a step
  int64_t teacher = 0;      // weights of training.teacher, in the compute dtype
  // Memory of the host beside tensors: code, libraries, generated kernels, stacks and, with several ranks, transport; measured. 0 on a GPU.
  int64_t program = 0;
  // Memory of a GPU beside tensors; 0 on the host.
  int64_t cuda_context = 0;  // kCudaContext
  int64_t cublaslt = 0;      // its workspace, at most kGemmWorkspace in each lane
  int64_t nccl = 0;          // kNcclGroup for each group of several ranks
  bool on_gpu() const { return cuda_context > 0; }
  int64_t tensors() const { return masters + values + gradients + optimizer + activations + workspace + exchange + inputs + teacher; }
  int64_t total() const { return tensors() + program + cuda_context + cublaslt + nccl; }
};

// model.vocab_size must be set; `plan` is that of the config, on parallel.data ranks.
MemoryEstimate estimate_memory(const RunConfig& config, const PrecisionPlan& plan);

// Returns the FLOPs of a step for each token: those of training the model (training_flops_per_token()), and a third as many as training the
// teacher would take, of which there is the forward pass alone.
double step_flops_per_token(const RunConfig& config);

// Returns the FLOPs of an evaluation for each token: those of the forward passes of the model and of its teacher, if there is one.
double evaluation_flops_per_token(const RunConfig& config);

}  // namespace mantissa
