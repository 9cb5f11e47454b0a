#include "checkpoint/checkpoint_diff.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <span>

namespace mantissa {
namespace {

constexpr int64_t kChunkBytes = 32 << 20;  // bounds the memory, whatever the size of the tensors

// Cuts the tensor along dim 0 into boxes of about kChunkBytes.
std::vector<Box> chunks(const ManifestTensor& tensor) {
  const Box whole = whole_box(tensor.shape);
  if (whole.size.empty()) return {whole};
  const int64_t rows = whole.size[0];
  if (whole.elements() == 0) return {};
  const int64_t step = std::max<int64_t>(1, kChunkBytes / (whole.elements() / rows * dtype_bytes(tensor.dtype)));
  std::vector<Box> out;
  for (int64_t row = 0; row < rows; row += step) {
    Box& box = out.emplace_back(whole);
    box.start[0] = row;
    box.size[0] = std::min(step, rows - row);
  }
  return out;
}

// Counts elements of so many bytes that differ.
struct DifferenceCount {
  size_t width;
  int64_t differing = 0, first = -1, done = 0;

  std::vector<std::byte> a = {}, b = {};

  // Returns where the next bytes of both go.
  std::pair<std::span<std::byte>, std::span<std::byte>> room(size_t bytes) {
    a.resize(bytes);
    b.resize(bytes);
    return {a, b};
  }
  void add() {
    const bool equal = a.empty() || std::memcmp(a.data(), b.data(), a.size()) == 0;
    for (size_t i = 0; !equal && i < a.size(); i += width) {
      if (std::memcmp(&a[i], &b[i], width) == 0) continue;
      if (differing++ == 0) first = done + static_cast<int64_t>(i / width);
    }
    done += static_cast<int64_t>(a.size() / width);
  }
  std::string text() const { return differing == 0 ? "" : mantissa::text(differing, " of ", done, " elements, the first at ", first); }
};

// Says what differs before the values: one of both that is missing, another type or another shape; "" if nothing does.
template <class Entry>
std::string other_form(const Entry* a, const Entry* b) {
  if (b == nullptr) return "only in the first";
  if (a == nullptr) return "only in the second";
  if (a->dtype == b->dtype && a->shape == b->shape) return "";
  return text(a->dtype, " ", shape_text(a->shape), " and ", b->dtype, " ", shape_text(b->shape));
}

}  // namespace

std::vector<TensorDifference> diff_folders(SafetensorsFolder& a, SafetensorsFolder& b) {
  std::map<std::string, std::pair<const SafetensorsEntry*, const SafetensorsEntry*>> tensors;
  for (const SafetensorsEntry& tensor : a.entries()) tensors[tensor.name].first = &tensor;
  for (const SafetensorsEntry& tensor : b.entries()) tensors[tensor.name].second = &tensor;
  std::vector<TensorDifference> out;
  for (const auto& [name, pair] : tensors) {
    const auto [in_a, in_b] = pair;
    std::string what = other_form(in_a, in_b);
    if (what.empty()) {
      DifferenceCount count{.width = static_cast<size_t>(std::max(8, file_dtype_bits(in_a->dtype)) / 8)};  // at least a byte
      for (int64_t at = 0; at < in_a->bytes(); at += kChunkBytes) {
        const auto [left, right] = count.room(static_cast<size_t>(std::min(kChunkBytes, in_a->bytes() - at)));
        a.read(*in_a, at, left);
        b.read(*in_b, at, right);
        count.add();
      }
      what = count.text();
    }
    if (!what.empty()) out.push_back({name, what});
  }
  return out;
}

// Compares tensors in the order of the first manifest, which is that of its files: what lies together is compared together.
std::vector<TensorDifference> diff_checkpoints(CheckpointReader& a, CheckpointReader& b) {
  std::vector<TensorDifference> out;
  const auto add = [&](const ManifestTensor* in_a, const ManifestTensor* in_b) {
    std::string what = other_form(in_a, in_b);
    if (what.empty()) {
      DifferenceCount count{.width = static_cast<size_t>(dtype_bytes(in_a->dtype))};
      for (const Box& box : chunks(*in_a)) {
        const auto [left, right] = count.room(static_cast<size_t>(box.elements()) * count.width);
        a.read(in_a->name, box, left);
        b.read(in_a->name, box, right);
        count.add();
      }
      what = count.text();
    }
    if (!what.empty()) out.push_back({(in_a ? in_a : in_b)->name, what});
  };
  for (const ManifestTensor& tensor : a.manifest().tensors) add(&tensor, b.has(tensor.name) ? &b.tensor(tensor.name) : nullptr);
  for (const ManifestTensor& tensor : b.manifest().tensors)
    if (!a.has(tensor.name)) add(nullptr, &tensor);
  std::ranges::sort(out, {}, &TensorDifference::name);
  return out;
}

}  // namespace mantissa
