// Exports a model as a folder of Hugging Face's form whose weights are those that forward multiplies by, and compares the folder to show
// it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/file.h"
#include "base/hash.h"
#include "checkpoint/checkpoint_reader.h"
#include "checkpoint/saved_model.h"
#include "data/tokenizer.h"
#include "hf/export_files.h"
#include "hf/export_weights.h"
#include "hf/hf_weights.h"
#include "hf/hugging_face.h"
#include "mantissa/config/run_config.h"

namespace mantissa {

struct ExportedModel {
  Architecture architecture = Architecture::qwen3;
  int64_t tensors = 0, bytes = 0;
  std::optional<int64_t> step = {};     // step of the checkpoint; none: it came from a folder
  bool simulated = false;               // forward rounds some weights further (ModelExport::simulated_weights())
  std::string chat_template = {};       // outcome of take_chat_template()
  std::vector<std::string> lines = {};  // server_lines(), of a file gguf_roundings()
};

// A model to export, with what lies beside its weights. Throws as ModelExport does.
struct ExportSource {
  // precision: values of that section by which weights are quantized in the place of those of the model (as_used()).
  ExportSource(const std::filesystem::path& from, std::unique_ptr<Backend> device, const std::vector<std::string>& precision = {});
  ExportSource(const ExportSource&) = delete;  // its parts refer to each other
  ExportSource& operator=(const ExportSource&) = delete;
  ExportFiles files_beside() const;
  std::optional<ProvenCheckpoint> proven() const;  // none: a folder

  std::vector<std::string> precision;
  std::optional<SavedModel> model;
  std::vector<TokenizerFile> files;
  std::optional<Tokenizer> tokenizer;
  std::optional<CheckpointReader> checkpoint;  // else a folder
  HfWeights* folder = nullptr;
  std::unique_ptr<TensorReader> reader;
  std::vector<std::string> findings;  // about a folder
  std::optional<ForwardWeights> weights;
};

// An export in the making, by one process or several. One calls begin(); each calls write() for a part of the tensors, in any order, into
// the same files; one calls finish(); each calls difference() for a part. A folder with a difference must not be published. Memory is a
// chunk of some megabytes, or one matrix where the architecture keeps it transposed; no model is built.
class ModelExport {
 public:
  // Opens the checkpoint that a path stands for (open_checkpoint), or a folder of Hugging Face's form. Throws Error(data) for damage.
  // summary(), begin() and write() throw Error(usage), with the name of the module, for a model that no architecture expresses and for
  // codes that the convention cannot. The device makes what is written, with the same bits whichever it is.
  // precision: as ExportSource takes it.
  ModelExport(const std::filesystem::path& from, const ExportOptions& options, std::unique_ptr<Backend> device,
              const std::vector<std::string>& precision = {});
  ~ModelExport();
  ModelExport(const ModelExport&) = delete;
  ModelExport& operator=(const ModelExport&) = delete;

  ExportedModel summary() const;
  const std::string& manifest() const;  // hash of the checkpoint's manifest; "": from a folder
  std::vector<std::string> warnings() const;
  std::string simulated_weights() const;  // simulated_weights() of its plan

  void begin(const std::filesystem::path& folder) const;  // makes the files of the weights. Throws Error(storage)
  // Writes part number `part` of `parts`, reads it back and returns the hashes of its tensors. progressed is called after each chunk.
  // Throws Error(usage) for values that the type cannot hold, Error(data) for values that are NaN or Inf, Error(storage).
  std::vector<Hash64> write(const std::filesystem::path& folder, int part, int parts, const Progressed& progressed = {});
  // Writes config.json, the tokenizer and generation files of the model, what the convention and the format add (README.md), and
  // mantissa.json, which says of every tensor what it was made from and its hash. hashes: those of all parts, in order.
  void finish(const std::filesystem::path& folder, const std::vector<Hash64>& hashes) const;

  // Compares the decoded values of part number `part` of `parts` of the folder that finish() completed with what forward multiplies by; the
  // first part also compares how servers and forward quantize inputs, unless the format is mlx and computes some of the model otherwise.
  // Returns the first difference; none: all is right. Throws as write() does, and Error(data) for a source that changed.
  std::optional<std::string> difference(HfWeights& written, int part, int parts, const Progressed& progressed = {});

  // Returns how the tokenizer.json of a folder differs from that of an export; none: it has the same ids, or one of the two has none.
  std::optional<std::string> tokenizer_difference(HfWeights& folder) const;

  const ModelConfig& model() const;
  ForwardWeights& weights();

 private:
  struct Source;
  std::unique_ptr<Source> source_;
};

// Exports in one process to `output`, a folder that is not there yet, which gets its name when its weights were compared.
ExportedModel export_model(const std::filesystem::path& from, const std::filesystem::path& output, const ExportOptions& options,
                           std::unique_ptr<Backend> device, const std::vector<std::string>& precision = {});

// Reports, under checkpoint.export, a model that no architecture has, and what no convention or type can hold.
void check_export(const RunConfig& config, ConfigReport& report);

// Returns the bytes of the weights of an export. Throws what check_export() reports.
int64_t export_bytes(const ModelConfig& model, const PrecisionPlan& plan, const ExportOptions& options);

// Returns warnings about model features that no program computes as training did or, of those that read this format, only some support.
// tokenizer: one that an export writes itself.
std::vector<std::string> export_warnings(const ModelConfig& model, ExportFormat format, const std::optional<Tokenizer>& tokenizer = {});

// Says which weights forward rounds to formats without codes, so that an export has them as they were before; "": none.
std::string simulated_weights(const PrecisionPlan& plan);

// Says of which modules forward quantizes inputs and servers of a folder do not, as these are values there; "": none.
std::string unquantized_inputs(const HfWeights& folder, const PrecisionPlan& plan);
// Returns what allow_different let through, as mantissa.json or, without it, config.json tells it.
std::vector<std::string> export_deviations(HfWeights& folder);
// Returns a line for each thing that a server of a folder rounds otherwise than forward, or needs.
std::vector<std::string> server_lines(HfWeights& folder, const ForwardWeights& types);

// Lists packed modules whose inputs are quantized only by the server or only by the checkpoint's forward: "layers.0.mlp.down:
// inputs are quantized in the checkpoint, in high precision here". Blocks of inputs are compared for the convention fp8 only: all others
// have those of 32, also for weights that were trained with 128.
std::vector<std::string> export_scheme_differences(const HfWeights& folder, const ForwardWeights& types);

// Returns the first value of a folder that differs from the one that forward multiplies by, of the same model:
// "model.embed_tokens.weight[3, 5] is 0.5, and the ... 0.25". Zeros are equal whatever their sign where forward decodes -0 as 0. Throws
// Error(data) for a value of the folder that is NaN or Inf. Parts of the tensors have about as many elements each; progressed is called
// after each chunk.
std::optional<std::string> export_difference(HfWeights& folder, ForwardWeights& weights, int part = 0, int parts = 1,
                                             const Progressed& progressed = {});

// Compares codes and their scales in blocks of 32 with those that an export would hold: different pairs of code and scale can have the same
// value.
struct CodeComparison {
  int64_t tensors = 0;                         // compared
  std::optional<std::string> difference = {};  // the first element whose code or scale is another
};
CodeComparison compare_codes(HfWeights& folder, ForwardWeights& weights);

inline constexpr const char* kProofFile = "mantissa.json";

// Compares names, types, shapes and the hashes of the bytes of all tensors, and the hashes of the files beside them, with the folder's
// mantissa.json. Returns the number of tensors. Throws Error(data) that names the first tensor or file that differs or is missing, or
// tensor that is superfluous, Error(usage) if the folder has no such file. In export.cpp.
int64_t verify_export(const std::filesystem::path& folder);
// Returns whether a folder is the export of the checkpoint whose manifest has this hash, made with these options. Throws Error where its
// mantissa.json cannot be read. In export.cpp.
bool is_export_of(const std::filesystem::path& folder, const std::string& manifest, const ExportOptions& options);

}  // namespace mantissa
