// The backend of CUDA. A lane is a stream; memory of each comes from a pool of its own, and copies go through pinned memory of the host.
// Kernels are in the .cu files, a family each, in the folders gemm, attention, codes, rows and moe; nvcc compiles them for the chip, and
// tests/simt compiles all of this for an executor on the host.
#pragma once

#include <array>
#include <deque>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "backend/caching_allocator.h"
#include "backend/cuda/attention/attention_library.h"
#include "backend/cuda/gemm/gemm_library.h"
#include "backend/index_rule.h"
#include "gpu/runtime.h"
#include "mantissa/backend/backend.h"
#include "mantissa/backend/gemm_path.h"

namespace mantissa::gpu {

// Reports of the kernels of a lane to the host, in device memory: whoever waits for the lane reads them.
struct ErrorWord {  // zeros, until the first index that is out of range fills it; then the host throws
  uint32_t taken;
  int64_t value, index;
  IndexRule rule;
};

struct LaneReport {
  ErrorWord error;
  uint32_t fp32_gemms;  // GEMMs in fp32 that codes with extreme scales have led to
};

// A condition on the device for a kernel to do its work.
struct OnlyIf {
  const int32_t* flag = nullptr;   // down: no work; null: it is done in any case
  uint32_t* fp32_gemms = nullptr;  // counts the times that the flag was up
};

// A matrix of each group, one below the other: the group's rows of tokens, or `rows` rows of a weight.
struct MatrixOfGroups {
  std::byte* first;
  int64_t row_bytes;
  int32_t rows, cols;
  bool of_tokens;
};
struct TablesOfGroups {  // [3, groups], in device memory
  std::byte** addresses;
  int32_t *rows, *cols;
  float* factors;
};

struct CheckedIndices {  // an operand, which kernels read by checked()
  const int32_t* values;
  IndexRule rule;
  ErrorWord* error;
};

}  // namespace mantissa::gpu

namespace mantissa {

class CudaBackend final : public Backend {
 public:
  // Throws Error(environment) where there is no such device.
  explicit CudaBackend(int gpu);
  ~CudaBackend() override;

  const char* name() const override { return "cuda"; }
  std::shared_ptr<std::byte> allocate(int64_t bytes) override;
  AllocatorStats allocator_stats() const override;
  bool host_memory() const override { return false; }
  bool computes_fp64() const override { return false; }
  void upload(const void* from, const Tensor& to) override;
  void download(const Tensor& from, void* to) override;
  std::function<void(void* to)> begin_download(const Tensor& from) override;
  void synchronize() override;
  Mark mark() override {
    return asked([this] { return gpu::record(stream()); });
  }
  void follow(const Mark& mark) override;
  bool reached(const Mark& mark) const override { return !mark || has_come(mark); }
  double seconds(const Mark& from, const Mark& to) const override { return gpu::seconds(from, to); }
  GemmDevice gemm_device() const override;
  GemmCounts gemm_counts() const override { return gemm_counts_; }
  int64_t fp32_gemms() const override { return int64_t{parts_[0].fp32_gemms} + parts_[1].fp32_gemms; }
  void allow_native_gemms(bool allowed) override { native_gemms_ = allowed; }
  void allow_grouped_gemms(bool allowed) override { grouped_gemms_ = allowed; }
  void choose_attention(AttentionBy by) override;
  AttentionDevice attention_device() const override;
  gpu::Stream& stream() {  // the stream of this thread's lane
    const int current = gpu::current_device();
    require(current == gpu_, "GPU ", gpu_, " is used by a thread whose device is ", current);
    return *part().stream;
  }

 protected:
#define MANTISSA_EXECUTE(Kernel) void execute(const Kernel& k) override;
  MANTISSA_KERNELS(MANTISSA_EXECUTE)
#undef MANTISSA_EXECUTE
  void execute_all(std::span<const AdamW> all) override;
  void execute_all(std::span<const SquaredNorm> all) override;

 private:
  // Bytes of the host that a copy to or from the device may still use.
  struct Staged {
    std::shared_ptr<std::byte> bytes;
    gpu::Event copied;
  };
  struct LaneParts {
    std::shared_ptr<gpu::Stream> stream;
    std::shared_ptr<CachingAllocator> memory, staging;
    std::deque<Staged> staged;
    std::shared_ptr<gpu::LaneReport> report;
    uint32_t fp32_gemms = 0;  // as of the latest report
  };
  LaneParts& part() { return parts_[static_cast<size_t>(current_lane())]; }
  // CUDA reports failures at a later call, which knows nothing of kernels: the names of the latest ones are added to the error.
  template <class Call>
  std::invoke_result_t<Call> asked(const Call& call) const {
    try {
      return call();
    } catch (const Error& error) {
      fail_with_kernels(error);
    }
  }
  [[noreturn]] void fail_with_kernels(const Error& error) const;
  bool has_come(const gpu::Event& event) const;
  void wait(const gpu::Event& event) const;
  void await_lanes() const;

  void copy_in(LaneParts& lane, const std::byte* from, std::byte* to, int64_t bytes);
  Staged copy_out(LaneParts& lane, const std::byte* from, int64_t bytes);
  const Staged& keep(LaneParts& lane, const std::shared_ptr<std::byte>& bytes);
  // ask_report() copies what the kernels of a lane have reported so far; heed_report(), once the copy is here, throws their error and
  // clears it on the device, so that later ones can report.
  Staged ask_report(LaneParts& lane) { return copy_out(lane, reinterpret_cast<std::byte*>(lane.report.get()), sizeof(gpu::LaneReport)); }
  void heed_report(LaneParts& lane, const Staged& answer);
  gpu::ErrorWord* error_word() { return &part().report->error; }  // for kernels that are launched now
  gpu::CheckedIndices checked(const Tensor& indices, const IndexRule& rule) { return {indices.device_data<int32_t>(), rule, error_word()}; }
  // Returns the offsets of groups of so many rows; if one is refused, those of groups without rows.
  Tensor checked_offsets(const char* kernel, const Tensor& offsets, int64_t rows);
  // Starts that are refused are reported, but not replaced: kernels must tolerate them.
  void check_segment_starts(const char* kernel, const Tensor& starts, int64_t length);

  // State of a GEMM of the library besides its operands.
  struct Scratch {
    bool native;    // codes are multiplied as codes
    Dtype values;   // dtype of codes as values, where they are not multiplied as codes
    Tensor flag{};  // up where a block of codes that become values has an extreme scale
    std::vector<Tensor> held{};
  };
  // Multiplies operands that begin at multiples of 16 bytes, by multiply(), and copies those that begin elsewhere.
  template <class Product>
  void multiply_aligned(const Product& k, bool accumulate);
  void multiply(const Gemm& k);
  template <class Groups>
  void multiply(const Groups& k);
  bool multiply_by_library(const Gemm& k, const GemmForm& form, const GemmRoute& route);
  template <class Groups>
  std::vector<gpu::LibraryGemm> library_groups(const Groups& k, const Tensor& a, const Tensor& b, const std::vector<int64_t>& ends);
  // These ask the library for a GEMM of each group, or for one of all. They return false if it refuses them.
  template <class Groups>
  bool multiply_one_by_one(const Groups& k, const Tensor& a, const Tensor& b, const Tensor& offsets, const GemmForm& usual);
  template <class Groups>
  bool multiply_at_once(const Groups& k, const Tensor& a, const Tensor& b, const Tensor& offsets, const GemmForm& usual);
  void add_extremes(const Gemm& k, const Scratch& scratch);
  gpu::LibraryMatrix side_of(const Operand& operand, bool left, const GemmRoute& route, int64_t block, Scratch& scratch);
  Scratch scratch_for(const GemmRoute& route);
  Tensor values_of(const Value& value, Scratch& scratch);
  // These multiply bf16 operands on tensor cores: those of k, or a and b in their place.
  void multiply_values(const Gemm& k);
  void multiply_values(const GroupedGemm& k, const Tensor& a, const Tensor& b, const Tensor& offsets);
  void multiply_values(const GroupedWeightGradient& k, const Tensor& a, const Tensor& b, const Tensor& offsets);
  void clear_rows_of_no_group(const Tensor& out, const Tensor& offsets);
  // These multiply any operands, in fp32.
  void multiply_plainly(const Gemm& k, gpu::OnlyIf only_if = {});
  void multiply_plainly(const GroupedGemm& k, const Tensor& offsets, gpu::OnlyIf only_if = {});
  void multiply_plainly(const GroupedWeightGradient& k, const Tensor& offsets, gpu::OnlyIf only_if = {});
  gpu::OnlyIf only_if_extreme(const Scratch& scratch) { return {scratch.flag.device_data<int32_t>(), &part().report->fp32_gemms}; }
  QuantizedTensor widened_codes(const QuantizedTensor& x);  // writes E2M1 codes as E4M3 codes, with the same scales
  void transpose(const Tensor& x, const Tensor& out);       // matrices of bytes
  // Writes columnwise codes and scales as rowwise ones of the transpose.
  void transpose(const QuantizedTensor& x, const QuantizedTensor& out);
  Tensor scales_of_side(const QuantizedTensor& x, bool along_rows, int64_t block, gpu::ScaleLayout layout);
  // Writes the arrays that the library reads of groups of rows, a column of tables for each group: addresses of a, b and out, then their
  // rows, then their columns; and two factors, the second of which is 1 or 0.
  void describe_groups(const std::array<gpu::MatrixOfGroups, 3>& matrices, const Tensor& offsets, const gpu::TablesOfGroups& tables,
                       bool accumulate);
  void clear_groups_without_rows(const Tensor& out, const Tensor& offsets);
  void clear_where(const Tensor& flag, const Tensor& values);
  void report_refused(const GemmForm& form, const GemmRoute& route);
  void count_gemm(GemmPath path) { ++gemm_counts_[static_cast<size_t>(path)]; }

  void copy(const Tensor& from, const Tensor& to);  // bytes as they are
  // Computes attention or its gradient by cuDNN. Returns false where the table leaves it to our kernels.
  template <class Kernel>
  bool attend_by_library(const Kernel& k);
  // Returns dout . out [B, H, T], of rows that lie [B, T, H, D]; lse has its shape.
  Tensor attention_deltas(const Tensor& out, const Tensor& dout, const HeadLayout& layout, const Tensor& lse);
  // Both norms: an RMS norm is a layer norm without mean and bias.
  template <bool kLayerNorm>
  void normalize(const LayerNormForward& k);
  template <bool kLayerNorm>
  void differentiate_norm(const LayerNormBackward& k);
  // out[j] (+)= the sum of column j over the rows that a term of sum_pieces() gives (rows/column_sums.h).
  template <class Term>
  void sum_rows(const Term& term, int64_t rows, int64_t cols, const Tensor& out, bool accumulate);

  // Launches nothing if a grid has no blocks, which CUDA refuses.
  template <class... P>
  void launch(void (*kernel)(P...), gpu::Grid grid, std::type_identity_t<P>... arguments) {
    if (grid.blocks > 0) asked([&] { gpu::launch(stream(), kernel, grid, arguments...); });
  }
  // Launches blocks that find their entry in a table.
  template <class Entry>
  void launch_over(void (*kernel)(const Entry*, int64_t), const std::vector<Entry>& entries, gpu::Grid grid) {
    const int64_t bytes = std::ssize(entries) * static_cast<int64_t>(sizeof(Entry));
    const std::shared_ptr<std::byte> table = allocate(bytes);
    copy_in(part(), reinterpret_cast<const std::byte*>(entries.data()), table.get(), bytes);
    launch(kernel, grid, reinterpret_cast<const Entry*>(table.get()), std::ssize(entries));
  }

  const int gpu_;
  gpu::Facts facts_;
  std::unique_ptr<gpu::GemmLibrary> library_;
  std::unique_ptr<gpu::AttentionLibrary> attention_;  // once it is asked for
  bool native_gemms_ = true, grouped_gemms_ = false;
  GemmCounts gemm_counts_{};
  std::set<std::string> refused_;        // GEMMs that the library has no algorithm for, and forms that were reported
  const std::unique_ptr<Backend> host_;  // for what the host computes
  std::array<LaneParts, 2> parts_;
};

}  // namespace mantissa
