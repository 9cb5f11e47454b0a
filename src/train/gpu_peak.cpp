#include "train/gpu_peak.h"

#include <cstdint>
#include <set>
#include <string>

#include "mantissa/comm/agreement.h"

namespace mantissa {
namespace {

struct Peak {
  std::string_view gpu;
  double flops;
};

// Peaks by NVIDIA's data sheets, without sparsity. Where a sheet states only the rate with sparsity, the dense rate is half of it.
constexpr Peak kPeaks[] = {{"NVIDIA A100-SXM4-40GB", 312e12},
                           {"NVIDIA A100-SXM4-80GB", 312e12},
                           {"NVIDIA A100-PCIE-40GB", 312e12},
                           {"NVIDIA A100 80GB PCIe", 312e12},
                           {"NVIDIA H100 80GB HBM3", 989e12},
                           {"NVIDIA H100 NVL", 835e12},
                           {"NVIDIA H100 PCIe", 756e12},
                           {"NVIDIA H200", 989e12},
                           {"NVIDIA GH200 480GB", 989e12},
                           {"NVIDIA GH200 144G HBM3e", 989e12},
                           {"NVIDIA B200", 2250e12},
                           {"NVIDIA GB200", 2500e12},
                           {"NVIDIA GeForce RTX 4090", 165e12},
                           {"NVIDIA GeForce RTX 5090", 209.5e12}};

}  // namespace

std::optional<double> data_sheet_peak(std::string_view gpu) {
  for (const Peak& peak : kPeaks) {
    if (peak.gpu == gpu) return peak.flops;
  }
  return {};
}

std::optional<double> data_sheet_peak(const std::vector<Gpu>& of_ranks) {
  std::set<uint64_t> counted;
  double sum = 0.0;
  for (const Gpu& gpu : of_ranks) {
    const std::optional<double> peak = data_sheet_peak(gpu.name);
    if (!peak) return {};
    if (counted.insert(gpu.place).second) sum += *peak;
  }
  return sum;
}

std::optional<double> data_sheet_peak(const Backend& device, const Communicator& world) {
  if (device.name() != std::string_view("cuda")) return {};
  const Gpu own = find_gpu(default_gpu()).value_or(Gpu{});
  const std::vector<std::string> names = all_gather_strings(world, own.name);
  const std::vector<uint64_t> places = world.all(own.place);
  std::vector<Gpu> of_ranks;
  for (size_t r = 0; r < names.size(); ++r) of_ranks.push_back({.name = names[r], .place = places[r]});
  return data_sheet_peak(of_ranks);
}

}  // namespace mantissa
