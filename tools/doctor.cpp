#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <vector>

#include "backend/ceilings.h"
#include "backend/gpus.h"
#include "base/cpu_level.h"
#include "base/parallel.h"
#include "comm/nccl_link.h"
#include "config/open_device.h"
#include "mantissa/backend/functions.h"
#include "mantissa/base/text.h"
#include "mantissa/base/version.h"
#include "mantissa/comm/transport.h"
#include "plan/plan_table.h"
#include "tools/command.h"
#include "train/replicas.h"

namespace mantissa::tools {
namespace {

std::string processor_name() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    if (line.rfind("model name", 0) == 0) return line.substr(line.find(':') + 2);
  }
  return "unknown";
}

void line(const char* what, const std::string& value) { std::printf("%-16s %s\n", what, value.c_str()); }

// A GEMM that agrees with the reference proves that the library, the kernel it picked and the allocator work together on this machine.
bool gemms_are_right(const char* backend) {
  const auto fast = make_backend(backend), slow = make_backend("cpu_reference");
  std::vector<std::vector<float>> results;
  for (Backend* device : {fast.get(), slow.get()}) {
    const Tensor a = empty(*device, Dtype::f32, {96, 80}), b = empty(*device, Dtype::f32, {72, 80}),
                 out = empty(*device, Dtype::f32, {96, 72});
    device->run(RandomNormal{.out = a, .key = {}, .what = 0, .first_index = 0, .std = 1.0});
    device->run(RandomNormal{.out = b, .key = {}, .what = 1, .first_index = 0, .std = 1.0});
    device->run(Gemm{.a = {a}, .b = {b, true}, .out = out, .accumulate = false});
    results.push_back(to_host<float>(out));
  }
  const auto near = [](float a, float b) { return std::abs(a - b) <= 1e-4F; };
  return std::ranges::equal(results[0], results[1], near);
}

ExitCode doctor() {
  std::printf("%s\n", version_text().c_str());
  line("processor", processor_name());
  const long cores = sysconf(_SC_NPROCESSORS_ONLN), pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
  line("cores", text(cores, " online, ", num_threads(), " usable by this process"));
  line("memory", text(static_cast<double>(pages) * static_cast<double>(page) / 1073741824.0, " GiB"));
  if (num_threads() < cores) line("hint", "the process is bound to fewer cores than there are (taskset, mpirun --bind-to none)");
  if (const char* threads = std::getenv("OMP_NUM_THREADS")) {
    line("OMP_NUM_THREADS", text(printable(threads), ": not used; training.threads decides"));
  }
  const std::string isa = gemm_instruction_set();
  line("matmuls", "oneDNN, " + isa + (isa.find("bf16") == std::string::npos ? "; bf16 operands are widened to fp32 (exact)" : ""));
  require(gemms_are_right("cpu"), ExitCode::environment, "oneDNN's GEMM differs from the reference on this machine");
  const CpuLevel level = cpu_level(), highest = highest_cpu_level();
  line("other kernels", level == highest ? name(level) : text(name(level), " (MANTISSA_MAX_CPU_LEVEL; the CPU has ", name(highest), ')'));
  const Gpus gpus = find_gpus();
  line("GPUs", gpus.text);
  if (gpus.usable) {
    require(gemms_are_right("cuda"), ExitCode::environment, "a GEMM of the GPU differs from the reference");
    line("GEMMs of a GPU", gemm_device_text(make_backend("cuda")->gemm_device()));
  }
  line("UCX", ucx_text());
  line("NCCL", find_nccl().text);
  line("devices", text("cpu, cpu_reference", gpus.usable ? ", cuda" : "", "; auto is ", backend_name(DeviceChoice::automatic)));
  struct statvfs disk {};
  if (statvfs(".", &disk) == 0) {
    line("disk (.)", text(static_cast<double>(disk.f_bavail) * static_cast<double>(disk.f_frsize) / 1073741824.0, " GiB free"));
  }
  require_equal_places(*make_backend("cpu"), "runs with experts, several ranks or padding are refused");
  line("equal bits", "the place of a row or column in a GEMM does not matter");
  return ExitCode::ok;
}

}  // namespace

Command doctor_command() {
  return {.name = "doctor", .summary = "show what this machine and this build can do", .example = "mantissa doctor", .run = doctor};
}

}  // namespace mantissa::tools
