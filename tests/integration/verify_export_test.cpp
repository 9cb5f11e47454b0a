// That an export is what it says: what is read back when it is written, and `mantissa verify`.
#include "exports.h"
#include "process.h"
#include "reliability/fault_injection.h"

namespace mantissa::test::verify_export_test {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::SizeIs;
using ::testing::StartsWith;

const std::string kDown = "model.layers.1.mlp.down_proj.weight";

class Verify : public ExportTest {
 protected:
  ~Verify() override { disarm_fault(); }
  std::vector<std::string> quantized() const {
    std::vector<std::string> sets = kShape;
    sets.insert(sets.end(),
                {"precision.dtype=bf16", "precision.recipe=mxfp8", R"(precision.rules=[{"match": "layers.0.*", "recipe": "mxfp4_qat"}])"});
    return sets;
  }
};

// Also where every byte is as it was.
TEST_F(Verify, KnowsNamesTypesAndShapes) {
  run("run", kShape);
  export_to(checkpoint("run", 3), "out");
  const HfFolder folder(path("out"));
  const std::string proof = read_file(path("out/mantissa.json")), name = "model.layers.1.mlp.down_proj.weight", norm = "model.norm.weight";
  const auto problem = [&](const HfFolder& changed, const std::string& list) {
    changed.write(path("out"));
    write_file(path("out/mantissa.json"), list);
    const Error error = error_of([&] { verify_export(path("out")); });
    EXPECT_EQ(error.code(), ExitCode::data) << error.what();
    return std::string(error.what());
  };
  EXPECT_THAT(problem(folder.as(name, FileDtype::f32, {96, 64}), proof),
              HasSubstr(name + " is not what was exported: it is F32 [96, 64], and was F32 [64, 96]"));
  EXPECT_THAT(problem(folder.as(norm, FileDtype::i32, {64}), proof),
              HasSubstr(norm + " is not what was exported: it is I32 [64], and was F32"));
  EXPECT_THAT(problem(folder.without(norm), proof), HasSubstr("lacks " + norm + ", which mantissa.json names"));
  EXPECT_THAT(problem(folder.copy(norm, "model.norm2.weight"), proof),
              HasSubstr("holds model.norm2.weight, which mantissa.json does not name"));
  const auto with = [&](const auto& change) {
    auto json = nlohmann::json::parse(proof);
    change(json["tensors"]);
    return json.dump();
  };
  EXPECT_THAT(problem(folder, with([](auto& tensors) { tensors.push_back(tensors[3]); })), HasSubstr(" twice"));
  EXPECT_THAT(problem(folder, with([](auto& tensors) { tensors.erase(0); })), HasSubstr(", which mantissa.json does not name"));
  for (const char* member : {"tensor", "dtype", "shape", "xxh64"}) {
    for (const nlohmann::json& value : {nlohmann::json(5), nlohmann::json({"64"}), nlohmann::json(nullptr)}) {
      EXPECT_THAT(problem(folder, with([&](auto& tensors) { tensors[1][member] = value; })),
                  HasSubstr(text("out/mantissa.json: tensors[1].", member)))
          << value;
    }
  }
  const auto json_with = [&](const char* member, const nlohmann::json& value) {
    auto json = nlohmann::json::parse(proof);
    json[member] = value;
    return json.dump();
  };
  EXPECT_THAT(problem(folder, json_with("format_version", 3)), HasSubstr("format_version: must be 2, got 3"));
  EXPECT_THAT(problem(folder, json_with("files", nullptr)), HasSubstr("out/mantissa.json: files: must be an object, got null"));
  EXPECT_THAT(problem(folder, json_with("files", {{"../out/config.json", "0"}})),
              HasSubstr("files: \"../out/config.json\" is no name of a file"));
  EXPECT_THAT(problem(folder, json_with("files", {{"config.json", 5}})), HasSubstr("files.config.json: must be a string, got 5"));
  for (const char* member : {"module", "format", "block", "rule"}) {
    EXPECT_THAT(problem(folder, with([&](auto& tensors) { tensors[1][member] = "other"; })), HasSubstr("its hash of itself differs"));
  }
  folder.write(path("out"));
  write_file(path("out/mantissa.json"), proof);
  EXPECT_EQ(verify_export(path("out")), static_cast<int64_t>(folder.names().size()));
  std::string weights = read_file(path("out/model.safetensors"));
  weights.replace(weights.find(R"("format":"pt")"), 13, R"("format":"tp")");
  write_file(path("out/model.safetensors"), weights);
  const Error error = error_of([&] { verify_export(path("out")); });
  EXPECT_EQ(error.code(), ExitCode::data);
  EXPECT_THAT(error.what(), HasSubstr("its __metadata__ differs"));
}

TEST_F(Verify, TheCommandTellsDamageFromAnotherModel) {
  run("run", quantized());
  export_to(checkpoint("run", 3), "out");
  const std::string out = path("out"), run = run_folder("run");
  const auto verify = [&](const std::vector<std::string>& arguments, int code, const std::string& what) {
    std::vector<std::string> all = {"verify"};
    all.insert(all.end(), arguments.begin(), arguments.end());
    const ProcessResult result = run_mantissa(all, folder_.path());
    EXPECT_EQ(result.exit_code, code) << result.output << result.errors;
    EXPECT_THAT(result.output + result.errors, HasSubstr(what));
  };
  verify({out}, 0, out + ": intact: 25 tensors as exported");
  verify({out, "--against", run}, 0, out + ": 0 values differ in 25 tensors from what forward multiplies by in " + checkpoint("run", 3));
  verify({run, "--against", run}, 2, "is no export");
  verify({"nowhere", "--against", run}, 2, "nowhere: there is no such folder");
  for (const char* const name : {"config.json", "model.safetensors"}) {
    std::filesystem::rename(path(text("out/", name)), path("away"));
    verify({out}, 4, text(out, ": lacks ", name));
    verify({out, "--against", run}, 4, text(out, ": lacks ", name));
    std::filesystem::rename(path("away"), path(text("out/", name)));
  }

  const HfFolder folder(out);
  folder.flip(kDown, 2 * 7, 0x40).write(out);
  verify({out}, 4, kDown + " is not what was exported: its hash differs");
  verify({out, "--against", run}, 1, kDown + "[0, 7] is ");
  folder.write(out);
  std::filesystem::remove(out + "/tokenizer.json");
  verify({out}, 4, "lacks tokenizer.json, which mantissa.json names");
  auto config = nlohmann::json::parse(read_file(out + "/config.json"));
  config["rope_theta"] = 77.0;
  write_file(out + "/config.json", config.dump());
  verify({out}, 4, "config.json is not what was exported: its hash differs");
  std::filesystem::remove(out + "/mantissa.json");
  verify({out}, 2, "mantissa.json: there is none");
  verify({out, "--against", run}, 1, "model.rope_theta: 10000 in the checkpoint, 77 here");
}

// Chunks of an export begin and end inside of tiles, of which each has another scale here.
TEST_F(Verify, RowsInsideOfTilesAreThoseOfTheWhole) {
  const HfFolder random(path("random"), "llama", "BF16");
  HfWeights source(path("random"));
  RunConfig config = source.run_config();
  config.precision.recipe = "mxfp8";
  const PrecisionPlan plan = resolve_plan(config);
  ForwardWeights weights(source, plan, make_backend("cpu"));
  for (const std::string name : {"layers.0.mlp.gate_up.weight", "layers.1.mlp_norm.weight"}) {
    const int64_t rows = name.find("norm") == std::string::npos ? 320 : 96, columns = rows == 320 ? 96 : 1, begin = 5, end = 45;
    std::vector<float> all(static_cast<size_t>(rows * columns)), some(static_cast<size_t>((end - begin) * columns));
    weights.read(name, 0, rows, all);
    weights.read(name, begin, end, some);
    EXPECT_TRUE(std::equal(some.begin(), some.end(), all.begin() + begin * columns)) << name;
    ASSERT_EQ(static_cast<bool>(weights.quantized(name)), columns > 1);
    if (columns == 1) continue;
    for (const bool codes : {true, false}) {
      const auto read = [&](int64_t first, int64_t last) {
        return codes ? weights.codes(name, first, last) : weights.scales(name, first, last);
      };
      const std::vector<std::byte> whole = read(0, rows), part = read(begin, end);
      const auto width = static_cast<int64_t>(whole.size()) / rows;
      ASSERT_EQ(std::ssize(part), (end - begin) * width);
      EXPECT_TRUE(std::equal(part.begin(), part.end(), whole.begin() + begin * width)) << name << codes;
    }
  }
}

// A zero has a sign, but where forward has none.
TEST_F(Verify, SignsOfZerosAreComparedWhereForwardHasThem) {
  run("run", quantized());
  export_to(checkpoint("run", 3), "out");
  const HfFolder out(path("out"));
  const std::string up = "model.layers.0.mlp.up_proj.weight";  // of MXFP4
  const std::vector<float> values = out.values(up);
  const auto zero = static_cast<size_t>(std::ranges::find(values, 0.0F) - values.begin());
  ASSERT_LT(zero, values.size());
  out.flip(up, zero * 2 + 1, static_cast<char>(0x80)).write(path("flipped"));
  EXPECT_EQ(difference("flipped", checkpoint("run", 3)), std::nullopt);

  const HfFolder random(path("random"), "llama", "BF16");
  const HfFolder zeros = random.flip(up, 6, random.bytes(up)[6]).flip(up, 7, random.bytes(up)[7]);
  zeros.write(path("zeros"));
  zeros.write(path("same"));
  EXPECT_EQ(difference("zeros", path("same")), std::nullopt);
  zeros.flip(up, 7, static_cast<char>(0x80)).write(path("zeros"));
  EXPECT_THAT(difference("zeros", path("same")).value_or(""), HasSubstr(up + "[0, 3] is -0, forward multiplies by 0"));
}

// Equal codes are not enough: what they are multiplied by is a part of the answer.
TEST_F(Verify, CodesOfAnotherSchemeDiffer) {
  run("run", quantized());
  pack_to(checkpoint("run", 3), "packed");
  const std::string packed = path("packed"), run = run_folder("run");
  const auto verify = [&](int code, const std::string& what) {
    const ProcessResult result = run_mantissa({"verify", packed, "--against", run}, folder_.path());
    EXPECT_EQ(result.exit_code, code) << result.output << result.errors;
    EXPECT_THAT(result.output, HasSubstr(what));
    return result.output;
  };
  verify(0, "0 values differ");
  const nlohmann::json config = nlohmann::json::parse(read_file(packed + "/config.json"));
  const auto with_inputs = [&](const std::string& format, const nlohmann::json& inputs) {
    nlohmann::json changed = config;
    int groups = 0;
    for (nlohmann::json& group : changed["quantization_config"]["config_groups"]) {
      if (group["format"] != format) continue;
      group["input_activations"] = inputs;
      ++groups;
    }
    EXPECT_EQ(groups, 1);
    write_file(packed + "/config.json", changed.dump());
  };
  with_inputs("mxfp8-quantized", nullptr);
  const std::string high = verify(1, packed + " has codes that a server multiplies otherwise than " + checkpoint("run", 3) +
                                         ":\n  layers.1.attn.out: inputs are quantized in the checkpoint, in high precision here\n");
  EXPECT_THAT(high, Not(HasSubstr("layers.0")));
  EXPECT_EQ(std::ranges::count(high, '\n'), 5);
  nlohmann::json inputs;
  for (const nlohmann::json& group : config["quantization_config"]["config_groups"]) {
    if (group["format"] == "mxfp8-quantized") inputs = group["input_activations"];
  }
  with_inputs("mxfp4-pack-quantized", inputs);
  verify(1, "layers.0.mlp.down: inputs are in high precision in the checkpoint, quantized here\n");
}

// Whatever recipes compute with.
TEST_F(Verify, AnOutputProjectionOfAnotherSchemeDiffers) {
  std::vector<std::string> sets = kShape;
  sets.insert(sets.end(), {"precision.dtype=bf16", "precision.recipe=mxfp8", "precision.fp8_output_proj=true", "model.pad_vocab_to=32",
                           R"(precision.rules=[{"match": "layers.*", "recipe": "high"}])"});
  run("run", sets);
  pack_to(checkpoint("run", 3), "packed");
  const std::string packed = path("packed");
  nlohmann::json config = nlohmann::json::parse(read_file(packed + "/config.json"));
  config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = nullptr;
  write_file(packed + "/config.json", config.dump());
  const auto verify = [&](const std::string& against) {
    const ProcessResult result = run_mantissa({"verify", packed, "--against", against}, folder_.path());
    return text(result.exit_code, ' ', result.output, result.errors);
  };
  EXPECT_THAT(verify(run_folder("run")), AllOf(StartsWith("1 "), HasSubstr("output: inputs are quantized in the checkpoint, in high")));
  EXPECT_THAT(verify(packed), AllOf(StartsWith("0 "), HasSubstr("0 values differ")));  // no recipe has these inputs: as values
}

TEST_F(Verify, MantissaJsonSaysWhatEachTensorWasMadeFrom) {
  run("run", quantized());
  const std::string saved = checkpoint("run", 3);
  export_to(saved, "out");
  const auto proof = nlohmann::json::parse(read_file(path("out/mantissa.json")));
  EXPECT_EQ(proof["checkpoint"], nlohmann::json({{"step", 3}, {"manifest", CheckpointReader(saved).hash()}}));
  EXPECT_THAT(proof["tensors"], SizeIs(25));
  EXPECT_THAT(proof["tensors"], Each(::testing::ResultOf([](const auto& tensor) { return tensor.size(); }, ::testing::AnyOf(6U, 8U))));
  const auto entry = [&](const std::string& name) {
    for (nlohmann::json tensor : proof["tensors"]) {
      if (tensor["tensor"] != name) continue;
      tensor.erase("xxh64");
      return tensor;
    }
    return nlohmann::json();
  };
  EXPECT_EQ(entry("model.layers.0.self_attn.k_proj.weight"), nlohmann::json({{"tensor", "model.layers.0.self_attn.k_proj.weight"},
                                                                             {"module", "layers.0.attn.qkv"},
                                                                             {"dtype", "BF16"},
                                                                             {"shape", {32, 64}},
                                                                             {"format", "e2m1"},
                                                                             {"block", {1, 32}},
                                                                             {"rule", "flashinfer"}}));
  EXPECT_EQ(entry(kDown), nlohmann::json({{"tensor", kDown},
                                          {"module", "layers.1.mlp.down"},
                                          {"dtype", "BF16"},
                                          {"shape", {64, 96}},
                                          {"format", "e4m3"},
                                          {"block", {32, 32}},
                                          {"rule", "rceil"}}));
  EXPECT_EQ(
      entry("model.norm.weight"),
      nlohmann::json({{"tensor", "model.norm.weight"}, {"module", "final_norm"}, {"dtype", "BF16"}, {"shape", {64}}, {"format", nullptr}}));
}

TEST_F(Verify, MantissaJsonHasTheRangeOfScalesWhereItIsNotWhole) {
  std::vector<std::string> sets = quantized();
  sets.insert(sets.end(),
              {R"(precision.recipes={"own": {"base": "mxfp8", "weight": {"scale_range": [-20, 125]}}})", "precision.recipe=own"});
  run("run", sets);
  export_to(checkpoint("run", 3), "out");
  const auto proof = nlohmann::json::parse(read_file(path("out/mantissa.json")));
  for (const nlohmann::json& tensor : proof["tensors"]) {
    if (tensor["format"] == "e4m3") {
      EXPECT_EQ(tensor["scale_range"], nlohmann::json({-20, 125})) << tensor;
    } else {
      EXPECT_FALSE(tensor.contains("scale_range")) << tensor;
    }
  }
  EXPECT_GT(verify_export(path("out")), 0);
}

// More elements than are read and converted at once, and more bytes than are hashed at once.
TEST_F(Verify, ALargeTensorIsWholeAndHashedToTheEnd) {
  const HfFolder original(path("large"), "qwen3", "BF16", {{"vocab_size", 70000}, {"hidden_size", 32}, {"num_hidden_layers", 1}});
  export_to(path("large"), "out");
  EXPECT_EQ(all_bytes("out"), all_bytes("large"));
  EXPECT_GT(verify_export(path("out")), 0);
  const HfFolder out(path("out"));
  const std::string embed = "model.embed_tokens.weight";
  out.flip(embed, out.bytes(embed).size() - 1, 1).write(path("out"));
  EXPECT_THAT(error_of([&] { verify_export(path("out")); }).what(), HasSubstr(embed + " is not what was exported"));
  EXPECT_THAT(difference("out", path("large")).value_or(""), HasSubstr(embed + "[69999, 31] is "));
}

// What is read and compared in pieces of 8 MiB.
TEST_F(Verify, AWideTableIsThatOfTheFileInEveryRow) {
  const HfFolder folder(path("wide"), "qwen3", "F32", {{"vocab_size", 22000}, {"num_hidden_layers", 1}});
  const std::string table = "model.embed_tokens.weight", output = "lm_head.weight";
  const HfFolder tied = folder.copy(table, output);
  ASSERT_GT(folder.bytes(table).size(), size_t{8} << 20);
  tied.write(path("wide"));
  HfWeights weights(path("wide"));
  std::string found(folder.bytes(table).size(), '\0');
  weights.read("embed.weight", whole_box(folder.shape(table)), std::as_writable_bytes(std::span(found)));
  EXPECT_TRUE(found == folder.bytes(table));
  tied.flip(output, found.size() - 1, 1).write(path("wide"));
  EXPECT_THAT(folder_error("wide").what(), HasSubstr("lm_head.weight differs from the embeddings"));
}

// Between its writing and its reading back.
TEST_F(Verify, AByteThatChangesOnTheDiskIsFoundBeforeTheFolderHasItsName) {
  run("run", quantized());
  bool flipped = false;
  const auto flip = [&] {
    for (const auto& entry : std::filesystem::directory_iterator(folder_.path())) {
      const std::string file = entry.path() / "model.safetensors";
      if (!std::filesystem::exists(file)) continue;
      std::string bytes = read_file(file);
      bytes.back() = static_cast<char>(bytes.back() ^ 1);
      write_file(file, bytes);
      flipped = true;
    }
  };
  arm_fault({.kind = Fault::other, .at = 1, .only = "open", .path = "mantissa.json", .action = flip});
  const Error error = error_of([&] { export_model(checkpoint("run", 3), path("out"), {}, make_backend("cpu")); });
  EXPECT_TRUE(disarm_fault() && flipped);
  EXPECT_EQ(error.code(), ExitCode::storage);
  EXPECT_THAT(error.what(), HasSubstr("what was written is not what was to be: "));
  for (const auto& entry : std::filesystem::directory_iterator(folder_.path()))
    EXPECT_THAT(entry.path().filename().string(), ::testing::AnyOf("runs", "text.txt"));
}

}  // namespace mantissa::test::verify_export_test
