// Writes what stands before the data of a GGUF file (io/gguf_file.h): keys and tensor infos.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "io/gguf_file.h"

namespace mantissa {

// Keys that are written beside those of io/gguf_file.h.
namespace gguf {
inline constexpr const char* kExtraNames = "general.tensor_extra.name";        // strings: tensors of which the next key says:
inline constexpr const char* kFourBitInputs = "general.tensor_extra.prec_a4";  // bools: inputs may be rounded to 4 bits
}  // namespace gguf

// Keys and values in the order in which they were added.
class GgufKeys {
 public:
  // A value as files hold it: its bytes, or those of the elements of an array.
  struct Entry {
    std::string key;
    GgufType type = GgufType::u8, element = GgufType::u8;
    int64_t count = 1;
    std::string bytes;
  };

  // A key is added once.
  void add_u32(std::string key, int64_t value);  // Error(internal) beyond 32 bits
  void add_f32(std::string key, double value);
  void add_bool(std::string key, bool value);
  void add_string(std::string key, std::string_view value);
  void add_strings(std::string key, const std::vector<std::string>& values);
  void add_i32s(std::string key, const std::vector<int32_t>& values);
  void add_bools(std::string key, const std::vector<bool>& values);

  const std::vector<Entry>& entries() const { return entries_; }

 private:
  void add(Entry entry);
  std::vector<Entry> entries_;
};

struct GgufLayout {
  std::string front;                // all before the data, with the padding
  std::vector<GgufTensor> tensors;  // with their places in the file
  int64_t bytes = 0;                // size of the file
};

// Lays out a file with these tensors, whose places are not looked at. The sizes of values alone decide about places, so that a value may be
// replaced by one of the same size when the data is there. Throws Error(internal) for a row that is no whole number of blocks.
GgufLayout gguf_layout(const GgufKeys& keys, std::vector<GgufTensor> tensors);

}  // namespace mantissa
