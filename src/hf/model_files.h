// The files of a model that another program wrote: a folder of Hugging Face's form or of mlx-lm, or one GGUF file, which is read as if it
// were such a folder (gguf_reader.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "io/safetensors.h"
#include "mantissa/config/run_config.h"

namespace mantissa {

class ModelFiles {
 public:
  virtual ~ModelFiles() = default;

  // Content of config.json. Throws Error(usage) if there is none.
  virtual std::string config() = 0;
  virtual std::string config_source() const = 0;  // for messages
  // Returns a text file; none if there is no such file. Throws Error(data) as require_unchanged() does.
  virtual std::optional<std::string> file(const std::string& name) = 0;
  // Tensors by name. The first call checks them, and throws what SafetensorsFolder throws.
  virtual const std::vector<SafetensorsEntry>& entries() = 0;
  virtual void read(const SafetensorsEntry& entry, int64_t offset, std::span<std::byte> out) = 0;
  // Names and layouts of the tensors; none: config.json says.
  virtual std::optional<ExportFormat> format() = 0;
  // Throws Error(data) unless everything read until now belongs to one state of the files.
  virtual void require_unchanged() = 0;
};

std::unique_ptr<ModelFiles> open_model_files(const std::filesystem::path& path);

// Returns whether a path given by a user is a folder of Hugging Face's form or a GGUF file.
bool is_published_model(const std::filesystem::path& path);

// Returns the text of a file in a model's folder. Throws Error(usage) if there is none.
std::string hf_file(const std::filesystem::path& folder, const std::string& name);

}  // namespace mantissa
