// Lists of modules that are not quantized ("ignore", "modules_to_not_convert", "exclude_modules") and what servers make of them. There is
// no one reading: vLLM takes an entry for a whole name or, by skip_with_substr, for any part of one (is_layer_skipped of its
// quant_utils.py), SGLang for parts between dots since its pull request 23467, others for the beginning of a name. Servers ask by the names
// of the modules into which they fuse linears: qkv_proj, gate_up_proj, and experts.
#pragma once

#include <string>
#include <vector>

namespace mantissa {

struct IgnoreList {
  std::string where;  // file and key, for messages
  std::vector<std::string> entries;
  bool whole_names = true;  // as those who wrote it read it; else transformers: ends of names, and expressions up to the end of a module
};

// A linear of a file by name ("model.layers.0.mlp.up_proj"), and whether it holds codes.
struct FileLinear {
  std::string name;
  bool codes = false;
};

// Returns a sentence for each entry and each reading that disagrees with the file: an entry that names linears that are codes, one that
// names nothing in the file, and linears that are values although no entry is their whole name. Each names all its linears. Entries that
// are expressions ("re:...", * and ?) are read alike by all; they are left out. `modules`: all names in the file that an entry may mean.
std::vector<std::string> ignore_list_findings(const IgnoreList& list, const std::vector<FileLinear>& linears,
                                              const std::vector<std::string>& modules);

}  // namespace mantissa
