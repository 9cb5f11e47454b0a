#include "hf/model_files.h"

#include "base/file.h"
#include "hf/gguf_reader.h"
#include "io/gguf_file.h"

namespace mantissa {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kMostTextBytes = 100'000'000;

class FolderFiles : public ModelFiles {
 public:
  explicit FolderFiles(fs::path folder) : folder_(std::move(folder)) {}

  std::string config() override {
    seen_.look_at(config_source());
    return hf_file(folder_, "config.json");
  }
  std::string config_source() const override { return (folder_ / "config.json").string(); }
  std::optional<std::string> file(const std::string& name) override {
    seen_.look_at(folder_ / name);
    std::error_code error;
    if (!fs::exists(folder_ / name, error)) return {};
    std::string content = hf_file(folder_, name);
    seen_.look_at(folder_ / name);
    return content;
  }
  const std::vector<SafetensorsEntry>& entries() override { return tensors().entries(); }
  void read(const SafetensorsEntry& entry, int64_t offset, std::span<std::byte> out) override { tensors().read(entry, offset, out); }
  std::optional<ExportFormat> format() override {
    const auto format = tensors().metadata().find("format");
    const bool mlx = format != tensors().metadata().end() && format->second == choice_name(ExportFormat::mlx);
    return mlx ? std::optional(ExportFormat::mlx) : std::nullopt;
  }
  void require_unchanged() override {
    seen_.require_unchanged();
    tensors().require_unchanged();
  }

 private:
  SafetensorsFolder& tensors() { return tensors_ ? *tensors_ : tensors_.emplace(folder_); }

  fs::path folder_;
  UnchangedFiles seen_;  // beside the weights
  std::optional<SafetensorsFolder> tensors_;
};

}  // namespace

std::unique_ptr<ModelFiles> open_model_files(const fs::path& path) {
  if (is_gguf_file(path)) return std::make_unique<GgufModelFiles>(path);
  return std::make_unique<FolderFiles>(path);
}

bool is_published_model(const fs::path& path) {
  std::error_code error;
  const bool folder = fs::exists(path / "config.json", error) && !fs::exists(path / "manifest.json", error) &&
                      (fs::exists(path / "model.safetensors", error) || fs::exists(path / "model.safetensors.index.json", error));
  return folder || is_gguf_file(path);
}

std::string hf_file(const fs::path& folder, const std::string& name) { return File::open_input(folder / name).content(kMostTextBytes); }

}  // namespace mantissa
