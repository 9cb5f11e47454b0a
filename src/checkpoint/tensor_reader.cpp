#include "mantissa/checkpoint/tensor_reader.h"

#include <algorithm>
#include <bit>

#include "mantissa/formats/bf16.h"
#include "mantissa/formats/block_scale.h"
#include "mantissa/formats/with_element.h"

namespace mantissa {

Quantization packed_form(Format format) {
  return {.format = format, .block_rows = 1, .block_cols = kPackedBlock, .rule = ScaleRule::rceil};
}

int64_t code_bytes(const WeightForm& form) { return form.codes.format == Format::e2m1 ? form.columns / 2 : form.columns; }
int64_t scale_bytes(const WeightForm& form) { return form.columns / form.codes.block_cols; }

void TensorReader::decode(const std::string& parameter, const WeightForm& kept, const Box& box, std::span<float> out) {
  const int64_t rows = box.size[0], first = box.start[1], wanted = box.size[1], height = kept.codes.block_rows,
                block = kept.codes.block_cols;
  const int64_t above = box.start[0] % height, begin = box.start[0] - above, read = above + rows;  // from the start of a block
  std::vector<std::byte> codes(static_cast<size_t>(read * code_bytes(kept)));
  std::vector<std::byte> scales(static_cast<size_t>((read + height - 1) / height * scale_bytes(kept)));
  read_codes(parameter, begin, begin + read, codes, scales);
  with_element(kept.codes.format, [&]<class E>() {
    constexpr bool packed = std::is_same_v<E, E2M1>;
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t i = 0; i < wanted; ++i) {
        const int64_t column = first + i;
        const int64_t place = (above + row) * code_bytes(kept) + (packed ? column / 2 : column);
        const auto byte = std::to_integer<uint8_t>(codes[static_cast<size_t>(place)]);
        const auto code = static_cast<uint8_t>(packed ? (column % 2 == 0 ? byte & 0xF : byte >> 4) : byte);
        const int64_t of_block = (above + row) / height * scale_bytes(kept) + column / block;
        const auto scale = std::to_integer<uint8_t>(scales[static_cast<size_t>(of_block)]);
        out[static_cast<size_t>(row * wanted + i)] = std::bit_cast<float>(decode_in_block<E>(code, scale, kept.codes.rule));
      }
    }
  });
}

void TensorReader::read_fp32(const std::string& parameter, const Box& box, std::span<float> out) {
  const WeightForm kept = form(parameter);
  if (kept.codes) return decode(parameter, kept, box, out);
  if (kept.dtype == Dtype::f32) return read(parameter, box, std::as_writable_bytes(out));
  require(kept.dtype == Dtype::bf16, parameter, " of ", where(), " is ", kept.dtype);
  // Reads into the second half of the output, so that it can be widened from the front.
  const std::span<std::byte> narrow = std::as_writable_bytes(out).subspan(out.size() * sizeof(bf16));
  read(parameter, box, narrow);
  for (size_t i = 0; i < out.size(); ++i) {
    bf16 value;
    std::copy_n(narrow.begin() + static_cast<std::ptrdiff_t>(i * sizeof value), sizeof value,
                std::as_writable_bytes(std::span(&value, 1)).begin());
    out[i] = to_float(value);
  }
}

void CheckpointWeights::read_codes(const std::string& parameter, int64_t, int64_t, std::span<std::byte>, std::span<std::byte>) {
  fail(ExitCode::internal, parameter, ": a checkpoint holds masters, no codes");
}

}  // namespace mantissa
