// Attention by cuDNN. cudnn/cudnn.cpp has it where CMake finds the header of the library, else cudnn/no_cudnn.cpp; the library is loaded
// when a run asks for it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "backend/cuda/runtime_calls.h"
#include "mantissa/backend/attention_path.h"

namespace mantissa::gpu {

// Operands in device memory, as AttentionForward and AttentionBackward have them. Rows begin at multiples of 16 bytes.
struct LibraryAttention {
  AttentionForm form;
  int64_t window;  // 0: none
  float scale;
  std::byte* qkv;
  std::byte* out;  // bf16
  float* lse;
  int32_t* segment_starts;  // null: none
  float* sinks;             // null: none; the backward pass has them in lse
  // Only of the backward pass; null: this is the forward pass.
  std::byte *dout, *dqkv;  // bf16
};

class AttentionLibrary {
 public:
  using Memory = std::function<std::shared_ptr<std::byte>(int64_t bytes)>;  // belongs to the stream, in whose order it goes back

  virtual ~AttentionLibrary() = default;
  virtual int version() const = 0;
  // Submits attention, or its gradient, whose bits are the same for the same operands on the same GPU. The first one of a form takes up to
  // seconds: the library compiles for it. Throws Error(environment) where it has none for this form, or where the GPU or its memory is to
  // blame, and Error(internal) for any other failure.
  virtual void run(Stream& stream, const LibraryAttention& attention, const Memory& memory) = 0;
};

// Throws Error(environment) where this build or this host has none.
std::unique_ptr<AttentionLibrary> load_attention_library();

}  // namespace mantissa::gpu
