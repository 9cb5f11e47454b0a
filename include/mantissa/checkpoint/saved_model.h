// Reads the model of a checkpoint: config, plan, tokenizer and files, and checks that its tensors and codes are those of the model.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <vector>

#include "mantissa/checkpoint/checkpoint.h"

namespace mantissa {

// Return the config and the tokenizer that a checkpoint was made with. Throw Error(data).
RunConfig saved_config(const CheckpointReader& reader);
std::optional<Tokenizer> saved_tokenizer(CheckpointReader& reader);

// Return the config of the checkpoint that a path stands for, as load_checkpoint() finds it, and the tokenizer that it was trained with,
// else that of the files which came with its model. Throw what load_checkpoint() does, and Error(data).
RunConfig config_saved_at(const std::filesystem::path& path);
std::optional<Tokenizer> tokenizer_saved_at(const std::filesystem::path& path);

// Returns true if the checkpoint and the data both have a tokenizer, and not the same.
bool has_other_tokenizer(const CheckpointReader& reader, const Data& data);

// Makes the codes of every quantized weight again from its master on a device, one weight after the other, and compares them with the
// manifest's, as require_same_codes() does. Returns how many there are; a checkpoint without a plan says nothing of codes.
int64_t verify_codes(CheckpointReader& reader, Backend& device);

// The config of a checkpoint, for one process, and the plan of its model, without the model. Throws Error(data) if its tensors are not the
// model's.
struct SavedModel {
  RunConfig config;
  PrecisionPlan plan;
};
SavedModel saved_model(const CheckpointReader& reader);

// Returns the tokenizer of the tokenizer.json among the files; none: there is no such file. Throws Error(data) that begins with `source`
// where it is damaged or not supported.
std::optional<Tokenizer> tokenizer_of(const std::vector<TokenizerFile>& files, const std::string& source);

// Returns the files that came with the model that the run started from. Throws Error(data) for names that are none of kTokenizerFiles.
std::vector<TokenizerFile> tokenizer_files(CheckpointReader& reader);

// Returns a config as these tensor ranks hold its model, whatever it was trained on. Throws Error(usage) where it cannot be divided so.
RunConfig for_ranks(RunConfig config, const ModelRanks& ranks);

// Returns the plan of the model as `use`, made of the saved config by for_ranks(), holds it. Compares the saved config with the tensors
// before anything of the size that it asks for is made: Error(data) where they do not fit.
PrecisionPlan plan_for_tensors(const RunConfig& saved, const CheckpointReader& reader, const RunConfig& use);

}  // namespace mantissa
