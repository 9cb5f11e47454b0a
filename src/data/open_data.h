// Opens everything a run reads, from its config.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/file.h"
#include "data/batch.h"
#include "data/token_writer.h"
#include "data/tokenizer.h"
#include "mantissa/data/data_config.h"

namespace mantissa {

struct DataOptions {
  int64_t seq_len = 0;
  std::optional<int64_t> vocab_size = {};   // model.vocab_size; none: the tokenizer's size
  uint64_t seed = 0;                        // training.seed
  std::optional<Tokenizer> tokenizer = {};  // a checkpoint's: takes the place of data.tokenizer, nothing is collected from the data
  Progressed progressed = {};               // called often while files are read: large ones take minutes
};

struct Data {
  std::optional<Tokenizer> tokenizer;    // none: token files only, no text can be encoded or decoded
  int64_t vocab_size = 0;                // every id is below
  std::vector<TokenDataset> files = {};  // whole, one for each path
  std::optional<TrainData> train = {};   // none: open_validation_data
  ValidationData valid;                  // may have no sets
  DataFingerprints fingerprints = {};    // the one file of data.path counts as training data
};

// Returns the tokenizer that data.tokenizer names; none if it is null. `char` reads the training text (with data.path the whole file); for
// token files it reads PREFIX.tokenizer.json or nanoGPT's meta.json beside the first, and all other files must have the same beside them.
std::optional<Tokenizer> make_tokenizer(const DataConfig& config, const Progressed& progressed = {});

// Returns whether some file has conversations, which a chat template renders.
bool has_conversations(const Data& data);

// Opens the data of a training run. Throws Error(usage) for paths that match nothing, options that do not fit the files, a chat template
// that nothing uses (neither conversations nor ids of any format, which it may have rendered), data too short for a sample, and a
// vocabulary size that is missing or smaller than the tokenizer's; Error(data) for files that are damaged.
Data open_data(const DataConfig& config, const DataOptions& options);

// Opens the validation part alone, without fingerprints. The chat template is that of the run, so these data need not use it.
Data open_validation_data(const DataConfig& config, const DataOptions& options);

// Warns of opened data that may not be what their user meant.

// Returns a warning for each of mask_eod_loss, reset_position_ids and document_mask that is on and does nothing because every data set is
// one text, which is one document, beginning with its key; and for each file with examples that are longer than a row, or with what
// repetition_warnings() tells, beginning with its name. `data` is what `config` opened; row_length names what sets the tokens of a row.
std::vector<std::string> data_warnings(const DataConfig& config, const Data& data, const char* row_length = "training.seq_len");

// Returns warnings, which begin with `name`, that texts spell what the tokenizer puts around each text.
std::vector<std::string> repetition_warnings(const std::string& name, const RepeatedTokens& repeated);

}  // namespace mantissa
