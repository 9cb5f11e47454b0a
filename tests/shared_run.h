// A run that the tests of a suite share: trained once, in SetUpTestSuite(), and changed by none of them.
#pragma once

#include "training.h"

namespace mantissa::test {

class SharedRun : public TrainingTest {
 public:
  explicit SharedRun(std::vector<std::string> sets) {
    write_file(folder_ / "run.json", effective_config(config("run", sets).config));
    run("run", std::move(sets));
  }
  // The folder, with run.json, its configuration, text.txt, and runs/run, the run.
  const TemporaryFolder& folder() const { return folder_; }
  std::string path() const { return run_folder("run"); }
  // Copies the run into the folder of another test, which may change it.
  void copy_to(const std::filesystem::path& path) const {
    std::filesystem::create_directories(path.parent_path());
    std::filesystem::copy(run_folder("run"), path, std::filesystem::copy_options::recursive);
  }

 private:
  void TestBody() override {}
};

}  // namespace mantissa::test
