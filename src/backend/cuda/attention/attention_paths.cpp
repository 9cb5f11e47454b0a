// Attention by the library, where a run asks for it and the table of attention_path.h has it.
#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/gemm/aligned.h"

namespace mantissa {
namespace {

AttentionForm form_of(const Tensor& qkv, int64_t batch, const HeadLayout& layout) {
  return {.dtype = qkv.dtype(),
          .batch = batch,
          .length = batch > 0 ? qkv.dim(0) / batch : 0,
          .heads = layout.heads,
          .kv_heads = layout.kv_heads,
          .head_dim = layout.head_dim};
}

}  // namespace

void CudaBackend::choose_attention(AttentionBy by) {
  Backend::choose_attention(by);
  // The table asks for the library alone where all else is as it wants it.
  if (!attention_ && obstacle_of_cudnn({.length = 2}, attention_device()) == AttentionObstacle::no_library)
    attention_ = gpu::load_attention_library();
}

AttentionDevice CudaBackend::attention_device() const {
  return {.architecture = facts_.architecture, .library = attention_ ? attention_->version() : 0, .by = Backend::attention_device().by};
}

template <class Kernel>
bool CudaBackend::attend_by_library(const Kernel& k) {
  constexpr bool kBackward = requires { k.dout; };
  const AttentionForm form = form_of(k.qkv, k.batch, k.layout);
  if (obstacle_of_cudnn(form, attention_device()) != AttentionObstacle::none) return false;
  const gpu::Contents of_results = kBackward ? gpu::Contents::read : gpu::Contents::overwritten;
  const Tensor qkv = gpu::aligned(*this, k.qkv), out = gpu::aligned(*this, k.out, of_results), lse = gpu::aligned(*this, k.lse, of_results);
  const Tensor starts = k.segment_starts.defined() ? gpu::aligned(*this, k.segment_starts) : Tensor();
  Tensor sinks, dout, dqkv;
  if constexpr (kBackward)
    dout = gpu::aligned(*this, k.dout), dqkv = gpu::aligned(*this, k.dqkv, gpu::Contents::overwritten);
  else if (k.sinks.defined())
    sinks = converted(k.sinks, Dtype::f32);
  const gpu::LibraryAttention attention{.form = form,
                                        .window = k.window,
                                        .scale = static_cast<float>(k.scale),
                                        .qkv = qkv.device_bytes(),
                                        .out = out.device_bytes(),
                                        .lse = lse.device_data<float>(),
                                        .segment_starts = starts.defined() ? starts.device_data<int32_t>() : nullptr,
                                        .sinks = sinks.defined() ? sinks.device_data<float>() : nullptr,
                                        .dout = kBackward ? dout.device_bytes() : nullptr,
                                        .dqkv = kBackward ? dqkv.device_bytes() : nullptr};
  asked([&] { attention_->run(stream(), attention, [this](int64_t bytes) { return allocate(bytes); }); });
  if constexpr (kBackward)
    gpu::copy_back(*this, dqkv, k.dqkv);
  else
    gpu::copy_back(*this, out, k.out), gpu::copy_back(*this, lse, k.lse);
  return true;
}

template bool CudaBackend::attend_by_library(const AttentionForward&);
template bool CudaBackend::attend_by_library(const AttentionBackward&);

}  // namespace mantissa
