// States to save, and checks of what a checkpoint gives back.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/checkpoint_directory.h"
#include "files.h"
#include "mantissa/backend/functions.h"
#include "mantissa/base/log.h"

namespace mantissa::test {

// Elements in the memory of a backend, as a run has them.
template <class T>
Tensor saved_tensor(Shape shape, const std::vector<T>& elements) {
  static const std::unique_ptr<Backend> device = make_backend("cpu_reference");
  return from_host(*device, DtypeOf<T>::value, shape, elements.data());
}

// Two tensors whose values are a function of the step, so that a mixture of two saves cannot pass for either.
class State {
 public:
  explicit State(int64_t step, int64_t elements = 1000) : step_(step), weights_(static_cast<size_t>(elements)), moments_(weights_.size()) {
    for (size_t i = 0; i < weights_.size(); ++i) {
      weights_[i] = value(i, 1);
      moments_[i] = value(i, 2);
    }
  }

  CheckpointContent content() const {
    return {{.step = step_,
             .samples = step_ * 64,
             .config = R"({"model":{"hidden_size":512}})",
             .tokenizer = R"({"type":"byte"})",
             .state = R"({"skipped":0,"window":[1,2.5]})",
             .fingerprints = {.build = "build", .config = "", .dataset = "data"}},
            {{.name = "w", .shape = {size() / 10, 10}, .boxes = {}, .data = saved_tensor({size()}, weights_)},
             {.name = "w.m", .shape = {size()}, .boxes = {}, .data = saved_tensor({size()}, moments_)}}};
  }

  // Returns true if the checkpoint holds exactly this state; reads everything.
  bool equals(CheckpointReader& reader) const {
    std::vector<float> weights(weights_.size()), moments(moments_.size());
    reader.read("w", std::as_writable_bytes(std::span(weights)));
    reader.read("w.m", std::as_writable_bytes(std::span(moments)));
    return reader.manifest().step == step_ && reader.manifest().samples == step_ * 64 && weights == weights_ && moments == moments_;
  }

  int64_t step() const { return step_; }
  int64_t size() const { return static_cast<int64_t>(weights_.size()); }
  std::vector<float>& weights() { return weights_; }

 private:
  // Any finite value that differs from step to step; cheap, so that tests spend their time in saves.
  float value(size_t index, uint32_t what) const {
    return static_cast<float>((static_cast<uint32_t>(index) * 2654435761u + static_cast<uint32_t>(step_) * 2246822519u + what) >> 8);
  }

  int64_t step_;
  std::vector<float> weights_, moments_;
};

inline CheckpointDirectory open_directory(const TemporaryFolder& folder, KeepPolicy keep = {}) {
  return CheckpointDirectory(folder / "checkpoints", keep, "test");
}

// The names in a folder, sorted.
inline std::vector<std::string> names_in(const std::filesystem::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

inline void flip_byte(const std::filesystem::path& path, int64_t position) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(position);
  const char byte = static_cast<char>(file.get());
  file.seekp(position);
  file.put(static_cast<char>(byte ^ 1));
  ASSERT_TRUE(file.flush().good());
}

// The exit code of the Error that body throws; ok if it throws none.
template <class Body>
ExitCode error_code_of(Body&& body) {
  try {
    body();
    return ExitCode::ok;
  } catch (const Error& error) {
    return error.code();
  }
}

// A folder with the log of one test and, once saved, its checkpoints.
class CheckpointTest : public ::testing::Test {
 protected:
  CheckpointTest() { open_log({.console = false, .file = folder / "log.txt"}); }
  ~CheckpointTest() override { close_log(); }
  std::string log() const { return read_file(folder / "log.txt"); }
  std::filesystem::path checkpoints() const { return folder / "checkpoints"; }

  std::optional<int64_t> newest() const {
    const auto loaded = load_newest(checkpoints(), [](CheckpointReader& reader) {
      if (!State(reader.manifest().step, reader.tensor("w.m").shape[0]).equals(reader)) ADD_FAILURE() << "wrong values";
    });
    return loaded ? std::optional(loaded->step) : std::nullopt;
  }

  TemporaryFolder folder;
};

}  // namespace mantissa::test
