// The backends whose kernels are tested, in one list. These tests reach the memory of a backend by upload() and download() alone.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "mantissa/backend/backend.h"

namespace mantissa::test {

// Names of the backends that are held against cpu_reference: that of the CPU, and in simt_tests that of CUDA on the executor of the host
// (simt/). The executable defines the function.
std::vector<std::string> tested_backends();

// The tested backends and the reference, for tests of what is true of every backend.
inline std::vector<std::string> all_backends() {
  std::vector<std::string> all = tested_backends();
  all.insert(all.begin(), "cpu_reference");
  return all;
}

// CUDA simulates no formats: a run refuses that.
inline bool has_kernel(const Backend& device, const std::string& kernel) {
  return kernel != "Simulate" || device.name() != std::string("cuda");
}

// All backends, opened, for tests that go through them.
class KernelBackends {
 public:
  KernelBackends() {
    for (const std::string& name : all_backends()) owned_.push_back(make_backend(name));
    for (const auto& backend : owned_) all_.push_back(backend.get());
  }
  Backend& reference() const { return *all_.front(); }
  std::vector<Backend*> all() const { return all_; }
  std::vector<Backend*> tested() const { return {all_.begin() + 1, all_.end()}; }

 private:
  std::vector<std::unique_ptr<Backend>> owned_;
  std::vector<Backend*> all_;
};

// A test that goes through the backends itself.
class OnAllBackends : public ::testing::Test {
 protected:
  Backend& reference() const { return backends_.reference(); }
  std::vector<Backend*> tested() const { return backends_.tested(); }  // held against the reference
  std::vector<Backend*> devices() const { return backends_.all(); }

 private:
  const KernelBackends backends_;
};

// A test that runs on each backend that its suite is instantiated with by name.
class OnEachBackend : public ::testing::TestWithParam<std::string> {
 protected:
  Backend& device() { return *device_; }
  Backend& reference() { return *reference_; }

 private:
  std::unique_ptr<Backend> reference_ = make_backend("cpu_reference"), device_ = make_backend(GetParam());
};

inline std::string backend_of(const ::testing::TestParamInfo<std::string>& info) { return info.param; }

}  // namespace mantissa::test
