// A tiny model, a text with structure, and runs of train() in a temporary folder.
#pragma once

#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "checkpoint/saved_model.h"
#include "files.h"
#include "mantissa/base/rng.h"
#include "mantissa/train/load_config.h"
#include "mantissa/train/train.h"
#include "testing.h"

namespace mantissa::test {

// Options of a run as --set takes them, and some more of them.
using Sets = std::vector<std::string>;
inline Sets with(Sets sets, const Sets& more) {
  sets.insert(sets.end(), more.begin(), more.end());
  return sets;
}

// Letters a-h. Nine in ten follow from the two before them, the tenth is drawn: the last letter alone tells nothing about the next.
inline std::string second_order_text(int64_t length) {
  std::string text = "ab";
  while (static_cast<int64_t>(text.size()) < length) {
    const auto draw = random_words({.seed = 3, .stream = RngStream::test}, 1, text.size());
    const int previous = text[text.size() - 1] - 'a', before = text[text.size() - 2] - 'a';
    const int next = draw[0] % 10 == 0 ? static_cast<int>(draw[1] % 8) : (previous + 3 * before + 1) % 8;
    text += static_cast<char>('a' + next);
  }
  return text;
}

struct TrainedRun {
  TrainSummary summary;
  std::vector<double> losses, norms;  // by step of this call
  std::vector<double> valid_losses;
  std::vector<std::string> samples;
  std::vector<StepEvent> steps;
};

class TrainingTest : public ::testing::Test {
 protected:
  TrainingTest() { write_file(folder_ / "text.txt", second_order_text(20000)); }

  // Two layers of 32 channels, 8 sequences of 16 letters a step, 20 steps. `sets` as on the command line; %T stands for the folder.
  LoadedConfig config(const std::string& name, std::vector<std::string> sets = {}, Start start = Start::as_configured) const {
    nlohmann::json json = {
        {"model",
         {{"hidden_size", 32}, {"num_layers", 2}, {"num_attention_heads", 2}, {"intermediate_size", 48}, {"max_position_embeddings", 16}}},
        {"precision", {{"dtype", "fp32"}}},
        {"optimizer", {{"lr", 1e-2}}},
        {"schedule", {{"warmup_steps", 5}}},
        {"training", {{"steps", 20}, {"seq_len", 16}, {"micro_batch_size", 4}, {"grad_accum", 2}}},
        {"data", {{"path", folder_ / "text.txt"}, {"tokenizer", "char"}}},
        {"eval", {{"interval", 0}, {"iters", 2}}},
        {"checkpoint", {{"interval", 0}}},
        {"logging", {{"run_name", name}, {"dir", folder_ / "runs/%n"}, {"tensorboard", false}}}};
    return load_run_config({.file = folder_ / "run.json", .text = json.dump(), .set_files = {}, .sets = std::move(sets)},
                           Inputs::must_exist, 0, start);
  }

  static TrainedRun run(const LoadedConfig& config, std::function<Request()> request = {}, const Communicator& world = {},
                        const MakeBackend& make_device = {}) {
    TrainedRun run;
    TrainEvents events;
    events.step = [&run](const StepEvent& event) {
      run.losses.push_back(event.loss.value_or(std::numeric_limits<double>::quiet_NaN()));
      run.norms.push_back(event.gradient_norm);
      run.steps.push_back(event);
    };
    events.evaluated = [&run](const EvaluationEvent& event) { run.valid_losses.push_back(event.result.loss); };
    events.wrote = [&run](const SampleEvent& event) { run.samples.push_back(event.text); };
    events.request = std::move(request);
    run.summary = train(config, {"test"}, events, world, make_device);
    return run;
  }

  TrainedRun run(const std::string& name, std::vector<std::string> sets = {}) const { return run(config(name, std::move(sets))); }

  // Writes 24 examples of 11 or 12 tokens, some without a target, and returns the settings of a run on them. Rows of less than 22 tokens
  // have one each.
  std::vector<std::string> examples() const {
    std::string lines;
    for (int i = 0; i < 24; ++i) {
      std::string ids, mask;
      for (int t = 0; t < 12 - i % 2; ++t) {
        ids += (t > 0 ? "," : "") + std::to_string((i * 7 + t * t) % 60);
        mask += t > 0 ? text(",", t > i % 13 ? 1 : 0) : "0";
      }
      lines += R"({"tokens": [)" + ids + R"(], "mask": [)" + mask + "]}\n";
    }
    write_file(folder_ / "examples.jsonl", lines);
    const std::string set = R"([{"path": ")" + (folder_ / "examples.jsonl") + "\"}]";
    return {"data.path=null", "data.train=" + set, "data.valid=" + set, "data.tokenizer=null", "model.vocab_size=60"};
  }

  std::string run_folder(const std::string& name) const { return folder_ / ("runs/" + name); }
  std::string checkpoint(const std::string& name, int64_t step) const { return run_folder(name) + "/checkpoints/" + checkpoint_name(step); }
  // Masters, moments and counters of a checkpoint, as they are in the file.
  std::string state_of(const std::string& name, int64_t step) const {
    const CheckpointReader reader(checkpoint(name, step));
    return read_file(checkpoint(name, step) + "/shard-00000.safetensors") + reader.manifest().state;
  }

  // A tensor of a checkpoint, and the names of its parameters.
  std::vector<float> tensor(const std::string& name, int64_t step, const std::string& of) const {
    CheckpointReader reader(checkpoint(name, step));
    return tensor(reader, of);
  }
  static std::vector<float> tensor(CheckpointReader& reader, const std::string& of) {
    std::vector<float> out(static_cast<size_t>(whole_box(reader.tensor(of).shape).elements()));
    reader.read(of, std::as_writable_bytes(std::span(out)));
    return out;
  }
  std::vector<std::string> parameters(const std::string& name, int64_t step) const {
    std::vector<std::string> out;
    const CheckpointReader reader(checkpoint(name, step));
    for (const ManifestTensor& tensor : reader.manifest().tensors) {
      if (tensor.name.starts_with("master.")) out.push_back(tensor.name.substr(7));
    }
    return out;
  }

  // The checkpoint of a run and step, saved again in the folder `target` as step 0 with other contents; change(model, content) is called
  // before.
  template <class Change>
  void save_changed(const std::string& name, int64_t step, const std::string& target, const Change& change) const {
    CheckpointReader reader(checkpoint(name, step));
    const RunConfig saved = reader.config();
    const std::unique_ptr<Backend> device = make_backend("cpu_reference");
    const PrecisionPlan plan = high_plan(saved.model);
    Gpt model(saved.model, *device, plan, {});
    Optimizer optimizer(model.parameters(), saved.optimizer);
    load_weights(reader, plan, LoadFor::use, model.parameters(), &optimizer);
    const Data data = open_data(saved.data, {.seq_len = saved.training.seq_len});
    CheckpointContent content = checkpoint_content({saved, resolve_plan(saved), data, model.parameters(), optimizer}, {});
    change(model, content);
    CheckpointDirectory(folder_.path() / target, {}, "test").save(content);
  }

  TemporaryFolder folder_;
};

}  // namespace mantissa::test
