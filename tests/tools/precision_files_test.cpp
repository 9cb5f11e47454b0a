// Values of section "precision" in files, for commands that use a saved model.
#include "exports.h"
#include "tool_commands.h"

namespace mantissa::precision_files_test {

using test::command_result;
using test::CommandResult;
using ::testing::HasSubstr;

class PrecisionFiles : public test::ExportTest {
 protected:
  // Returns the loss that eval prints.
  static std::string loss_in(const std::string& output) {
    const size_t at = output.find(" | loss ") + 8;
    return output.substr(at, output.find(' ', at) - at);
  }
};

TEST_F(PrecisionFiles, AreAnOptionOfTheCommandsThatUseAModel) {
  const std::string saved = trained("saved", {}), rules = path("rules.json");
  test::write_file(rules,
                   "// a comment\n"
                   R"({"precision": {"recipe": "mxfp8", "rules": [{"match": "layers.0.*", "recipe": "mxfp4_qat"}]}})");
  const std::vector<std::string> file = {"--set-file", rules}, ids = {"--prompt-ids", "1,2,3,4,5,6,7"};
  const auto loss = [&](std::vector<std::string> words) { return loss_in(command_result(words).output); };
  const std::string set = R"(precision.rules=[{"match": "layers.0.*", "recipe": "mxfp4_qat"}])";
  EXPECT_EQ(loss(test::with(test::with({"eval", saved}, file), ids)),
            loss(test::with({"eval", saved, "--set", "precision.recipe=mxfp8", "--set", set}, ids)));
  EXPECT_EQ(loss(test::with(test::with({"eval", saved, "--set", "precision.recipe=high", "--set", "precision.rules=[]"}, file), ids)),
            loss(test::with({"eval", saved}, ids)))
      << "--set comes after it";
  EXPECT_EQ(command_result(test::with({"export", saved, "--output", path("out"), "--weights", "packed"}, file)).exit_code, 0);
  EXPECT_EQ(command_result(test::with({"verify", path("out"), "--against", saved}, file)).exit_code, 0);
  EXPECT_EQ(command_result({"verify", path("out"), "--against", saved}).exit_code, 1);
  const auto refused = [&](const std::string& content) {
    test::write_file(rules, content);
    const CommandResult result = command_result(test::with({"eval", saved}, file));
    EXPECT_EQ(result.exit_code, 2);
    return result.error;
  };
  EXPECT_THAT(refused(R"({"precision": {"recipe": "mxfp8"}, "optimizer": {}})"),
              HasSubstr("rules.json: must have a section \"precision\""));
  EXPECT_THAT(refused("[1]"), HasSubstr("must have a section"));
  EXPECT_THAT(refused("{\"precision\":\n {,}}"), HasSubstr("rules.json:2:"));
  EXPECT_THAT(refused(R"({"precision": {"dtype": "fp32"}})"), HasSubstr("--dtype"));
}

}  // namespace mantissa::precision_files_test
