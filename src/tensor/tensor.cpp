#include "mantissa/tensor/tensor.h"

#include <algorithm>
#include <cstring>

namespace mantissa {

int64_t dtype_bytes(Dtype dtype) {
  switch (dtype) {
    case Dtype::f32: return 4;
    case Dtype::bf16: return 2;
    case Dtype::f64: return 8;
    case Dtype::i32: return 4;
    case Dtype::u8: return 1;
  }
  fail(ExitCode::internal, "unknown dtype ", static_cast<int>(dtype));
}

const char* dtype_name(Dtype dtype) {
  switch (dtype) {
    case Dtype::f32: return "fp32";
    case Dtype::bf16: return "bf16";
    case Dtype::f64: return "fp64";
    case Dtype::i32: return "i32";
    case Dtype::u8: return "u8";
  }
  return "unknown";
}

std::ostream& operator<<(std::ostream& out, Dtype dtype) { return out << dtype_name(dtype); }

Shape::Shape(std::initializer_list<int64_t> dims) : rank_(static_cast<int>(dims.size())) {
  require(dims.size() <= kMaxRank, "shape has ", dims.size(), " dimensions, at most ", kMaxRank, " are supported");
  std::copy(dims.begin(), dims.end(), dims_.begin());
  for (const int64_t d : dims) require(d >= 0, "shape ", *this, " has a negative dimension");
}

int64_t Shape::operator[](int dim) const {
  const int i = dim < 0 ? dim + rank_ : dim;
  require(i >= 0 && i < rank_, "dimension ", dim, " of a shape of rank ", rank_);
  return dims_[static_cast<size_t>(i)];
}

int64_t Shape::elements() const {
  int64_t n = 1;
  for (int i = 0; i < rank_; ++i) n *= dims_[static_cast<size_t>(i)];
  return n;
}

int64_t Shape::rows() const {
  int64_t n = 1;
  for (int i = 0; i + 1 < rank_; ++i) n *= dims_[static_cast<size_t>(i)];
  return n;
}

Shape Shape::with_dim0(int64_t size) const {
  require(rank_ > 0 && size >= 0, "with_dim0(", size, ") on shape ", *this);
  Shape out = *this;
  out.dims_[0] = size;
  return out;
}

std::ostream& operator<<(std::ostream& out, const Shape& shape) {
  out << '[';
  for (int i = 0; i < shape.rank(); ++i) out << (i ? ", " : "") << shape[i];
  return out << ']';
}

Tensor::Tensor(Backend& device, std::shared_ptr<std::byte> memory, bool host_memory, Dtype dtype, Shape shape)
    : device_(&device), memory_(std::move(memory)), host_memory_(host_memory), dtype_(dtype), shape_(shape) {}

Backend& Tensor::device() const {
  require(defined(), "device of an undefined tensor");
  return *device_;
}

Tensor Tensor::view(Shape shape) const {
  require(defined(), "view of an undefined tensor");
  require(shape.elements() == elements(), "view: ", shape_, " has ", elements(), " elements, ", shape, " has ", shape.elements());
  Tensor out = *this;
  out.shape_ = shape;
  return out;
}

Tensor Tensor::slice(int64_t begin, int64_t end) const {
  require(shape_.rank() > 0 && begin >= 0 && begin <= end && end <= dim(0), "slice [", begin, ", ", end, ") of ", shape_);
  Tensor out = *this;
  out.shape_ = shape_.with_dim0(end - begin);
  out.offset_ += begin * shape_.with_dim0(1).elements() * dtype_bytes(dtype_);
  return out;
}

namespace {

// Index of the first value whose exponent bits are all ones, or -1. The maximum over a block of absolute bits vectorizes.
template <class Bits>
int64_t first_of_bits(std::span<const std::byte> bytes, Bits magnitude, Bits infinity) {
  constexpr size_t kBlock = 4096;
  Bits values[kBlock];
  for (size_t begin = 0; begin < bytes.size(); begin += sizeof values) {
    const size_t count = std::min(sizeof values, bytes.size() - begin) / sizeof(Bits);
    std::memcpy(values, bytes.data() + begin, count * sizeof(Bits));
    Bits most = 0;
    for (size_t i = 0; i < count; ++i) most = std::max(most, static_cast<Bits>(values[i] & magnitude));
    if (most < infinity) continue;
    const auto bad = std::find_if(values, values + count, [&](Bits v) { return static_cast<Bits>(v & magnitude) >= infinity; });
    return static_cast<int64_t>(begin / sizeof(Bits)) + (bad - values);
  }
  return -1;
}

}  // namespace

int64_t first_nonfinite(Dtype dtype, std::span<const std::byte> values) {
  switch (dtype) {
    case Dtype::f32: return first_of_bits<uint32_t>(values, 0x7fffffff, 0x7f800000);
    case Dtype::bf16: return first_of_bits<uint16_t>(values, 0x7fff, 0x7f80);
    case Dtype::f64: return first_of_bits<uint64_t>(values, 0x7fffffffffffffff, 0x7ff0000000000000);
    case Dtype::i32:
    case Dtype::u8: return -1;
  }
  return -1;
}

}  // namespace mantissa
