#include "mantissa/backend/contract.h"

#include <string_view>

namespace mantissa {
namespace {

struct Span {
  const std::byte *begin, *end;
};
Span span_of(const Tensor& tensor) { return {tensor.device_bytes(), tensor.device_bytes() + tensor.bytes()}; }

bool conflict(const Contract::Operand& a, const Contract::Operand& b) {
  using enum Contract::Role;
  if (a.role == input && b.role == input) return false;
  const Span x = span_of(*a.tensor), y = span_of(*b.tensor);
  const bool apart = x.end <= y.begin || y.end <= x.begin || x.begin == x.end || y.begin == y.end;
  const bool same = x.begin == y.begin && x.end == y.end && a.tensor->dtype() == b.tensor->dtype();
  return !apart && !(same && (a.role == in_place) != (b.role == in_place) && a.role != output && b.role != output);
}

}  // namespace

// Takes the text of an operand apart.
struct Contract::Spec {
  struct Size {  // size of one dimension: factor times what the letter stands for
    char letter = '\0';
    int64_t factor = 1;
  };

  explicit Spec(std::string_view text) {
    const size_t bracket = text.find('[');
    if (bracket > 0) dtype = text.substr(0, bracket - 1);
    Size next;
    for (const char c : text.substr(bracket)) {
      if (c >= '1' && c <= '9') next.factor = c - '0';
      if (c >= 'A' && c <= 'Z') next.letter = c;
      open = open || c == '.';
      optional = optional || c == '?';
      if (c != ',' && (c != ']' || open)) continue;
      sizes.at(rank++) = next;
      next = {};
    }
  }

  bool values() const { return dtype.empty() || dtype == "fp32|bf16"; }

  std::string_view dtype;
  std::array<Size, Shape::kMaxRank> sizes{};
  size_t rank = 0;
  bool open = false, optional = false;  // open: further dimensions follow
};

Contract& Contract::size(char letter, int64_t size) {
  sizes_.at(static_cast<size_t>(letter - 'A')) = size;
  return *this;
}

// Returns the factor alone if there is no letter.
std::optional<int64_t> Contract::known(char letter, int64_t factor) const {
  if (letter == '\0') return factor;
  return size(letter) < 0 ? std::nullopt : std::optional(factor * size(letter));
}

bool Contract::takes(const Spec& spec, Dtype dtype) {
  const bool narrow = dtype == Dtype::f32 || dtype == Dtype::bf16, floating = narrow || dtype == Dtype::f64;
  if (spec.dtype == "any") return true;
  if (spec.dtype == "floating") return floating;
  if (spec.dtype == "stats") {
    if (!values_ && floating) values_ = dtype;
    return values_ && dtype == stats_dtype(*values_);
  }
  if (!spec.values()) return spec.dtype == dtype_name(dtype);
  const bool allowed = spec.dtype.empty() ? floating : narrow;
  if (!values_ && allowed) values_ = dtype;
  return allowed && dtype == values_;
}

bool Contract::takes(const Spec& spec, const Shape& shape) {
  const int rank = static_cast<int>(spec.rank), rest = shape.rank() - rank;
  if (spec.open ? rest < 0 : rest != 0) return false;
  for (int i = 0; i < rank; ++i) {
    const auto [letter, factor] = spec.sizes.at(static_cast<size_t>(i));
    if (!known(letter, factor) && shape[i] % factor == 0) size(letter, shape[i] / factor);
    if (shape[i] != known(letter, factor)) return false;
  }
  if (!spec.open) return true;
  if (rest_ == nullptr) rest_ = &shape, rest_from_ = rank;
  bool same = rest == rest_->rank() - rest_from_;
  for (int i = 0; same && i < rest; ++i) same = shape[rank + i] == (*rest_)[rest_from_ + i];
  return same;
}

// Prints letters whose sizes are not known as they are.
std::string Contract::expected(const Spec& spec) const {
  std::ostringstream out;
  if (values_ && spec.values()) {
    out << *values_;
  } else if (values_ && spec.dtype == "stats") {
    out << stats_dtype(*values_);
  } else {
    out << (spec.dtype.empty() || spec.dtype == "floating" ? "fp32, bf16 or fp64" : spec.dtype);
  }
  const char* separator = " [";
  for (size_t i = 0; i < spec.rank; ++i, separator = ", ") {
    const auto [letter, factor] = spec.sizes.at(i);
    const std::optional<int64_t> size = known(letter, factor);
    out << separator << (size ? text(*size) : text(factor > 1 ? text(factor) : "", letter));
  }
  if (!spec.open) return out.str() + ']';
  for (int i = rest_from_; rest_ != nullptr && i < rest_->rank(); ++i, separator = ", ") out << separator << (*rest_)[i];
  if (rest_ == nullptr) out << separator << "...";
  return out.str() + ']';
}

void Contract::add(const Operand& operand) {
  that(operand.tensor->defined(), operand.name, " is missing");
  for (const Operand& other : operands()) that(!conflict(other, operand), operand.name, " overlaps ", other.name);
  operands_.at(count_++) = operand;
}

Contract& Contract::declare(const Operand& operand) {
  const Spec spec(operand.spec);
  const Tensor& tensor = *operand.tensor;
  if (spec.optional && !tensor.defined()) return *this;
  add(operand);
  if (!takes(spec, tensor.dtype()) || !takes(spec, tensor.shape())) {
    that(false, operand.name, " is ", tensor.dtype(), ' ', tensor.shape(), ", expected ", expected(spec));
  }
  const bool computed = spec.values() || spec.dtype == "stats" || spec.dtype == "floating";
  if (tensor.dtype() == Dtype::f64 && computed && fp64_ == nullptr) fp64_ = operand.name;
  return *this;
}

Contract& Contract::declare(const char* name, const QuantizedTensor& tensor, Role role) {
  that(bool{tensor.how}, name, " has no format");
  const auto part = [&](const Tensor& bytes, const Shape& shape) {
    add({name, &bytes, role, "u8"});
    that(bytes.dtype() == Dtype::u8 && bytes.shape() == shape, name, " is ", bytes.dtype(), ' ', bytes.shape(), ", expected u8 ", shape);
  };
  part(tensor.codes, codes_shape(tensor.shape, tensor.how));
  part(tensor.scales, scales_shape(tensor.shape, tensor.how));
  return *this;
}

int64_t Contract::bytes() const {
  int64_t sum = 0;
  for (const Operand& operand : operands()) sum += operand.tensor->bytes();
  return sum;
}

std::string Contract::text_of_operands() const {
  std::ostringstream out;
  const char* separator = "";
  for (const Operand& operand : operands()) {
    out << separator << operand.name << ' ' << operand.tensor->dtype() << ' ' << operand.tensor->shape();
    separator = ", ";
  }
  return out.str();
}

void Contract::refuse_fp64(const char* backend) const {
  if (fp64_) fail(ExitCode::internal, kernel_, ": ", fp64_, " is fp64, which the backend ", backend, " does not compute");
}

}  // namespace mantissa
