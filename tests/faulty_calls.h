// Every fault that an operand can have, made from good kernel calls.
#pragma once

#include <set>

#include "testing.h"

namespace mantissa::test {

// A backend that executes nothing. From every call of one kernel that keeps its contract it makes calls with one fault each, expects for
// each an error that names kernel and operand, and lists the faults for which none came: they are what the contract leaves open.
class FaultyCalls : public Backend {
 public:
  explicit FaultyCalls(std::string kernel) : kernel_(std::move(kernel)) {}
  const char* name() const override { return "faulty_calls"; }
  std::shared_ptr<std::byte> allocate(int64_t bytes) override { return memory_->allocate(bytes); }
  AllocatorStats allocator_stats() const override { return memory_->allocator_stats(); }
  bool host_memory() const override { return true; }
  void synchronize() override {}
  void upload(const void* from, const Tensor& to) override { memory_->upload(from, to); }
  void download(const Tensor& from, void* to) override { memory_->download(from, to); }
  bool computes_fp64() const override { return computes_fp64_; }

  int calls() const { return calls_; }
  // "weight: rows": the call is taken with another number of rows of weight.
  const std::set<std::string>& accepted() const { return accepted_; }
  bool accepts_fp64() const { return accepts_fp64_; }  // for all operands whose dtype follows from the values
  bool copies_fp64() const { return copies_fp64_; }    // also without computing it

 protected:
#define MANTISSA_EXECUTE(Kernel) \
  void execute(const Kernel& k) override { take(k, #Kernel); }
  MANTISSA_KERNELS(MANTISSA_EXECUTE)
#undef MANTISSA_EXECUTE

 private:
  using Operand = Contract::Operand;
  using Replaced = std::vector<std::pair<size_t, Tensor>>;
  struct Fault {
    const char* name;
    Tensor tensor;
  };

  template <class Kernel>
  void take(const Kernel& k, const char* kernel) {
    executed_ = true;
    if (trying_ || kernel != kernel_) return;
    trying_ = true;
    ++calls_;
    const Contract contract = k.contract();
    for (size_t i = 0; i < contract.operands().size(); ++i) {
      const Operand& operand = contract.operands()[i];
      for (const Fault& fault : faults(*operand.tensor)) expect_refusal(k, {{i, fault.tensor}}, text(operand.name, ": ", fault.name));
      const std::string_view name = operand.name;
      if (operand.tensor->defined() && (name == "branch" || name == "sum")) {
        expect_refusal(k, {{i, Tensor()}}, text(name, " is alone"));
      } else if (std::string(operand.spec).ends_with('?')) {
        EXPECT_TRUE(attempt(k, {{i, Tensor()}}, "")) << operand.name << " may be missing";
      } else {
        expect_refusal(k, {{i, Tensor()}}, text(operand.name, " is missing"));
      }
      for (size_t j = 0; j < i; ++j) overlap(k, contract.operands()[j], j, operand, i);
    }
    in_fp64(k, contract);
    trying_ = false;
  }

  std::vector<Fault> faults(const Tensor& good) {
    const Shape& shape = good.shape();
    const Shape wider = shape.rank() == 3 ? Shape{shape[0], shape[1], shape[2] + 1} : Shape{shape[0], shape[-1] + 1};
    std::vector<Fault> out{{"rows", empty(*this, good.dtype(), shape.with_dim0(shape[0] + 1))},
                           {"rank", good.view(shape.rank() == 3 ? Shape{good.elements()} : Shape{1, 1, good.elements()})}};
    if (shape.rank() > 1) out.push_back({"columns", empty(*this, good.dtype(), wider)});
    for (const Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::f64, Dtype::i32, Dtype::u8}) {
      const bool floats = is_floating(dtype) && is_floating(good.dtype());
      if (dtype != good.dtype()) out.push_back({floats ? "floating dtype" : "dtype", empty(*this, dtype, shape)});
    }
    return out;
  }

  static bool is_floating(Dtype dtype) { return dtype != Dtype::i32 && dtype != Dtype::u8; }

  // Puts both operands in one memory: at the same address, and one element apart.
  template <class Kernel>
  void overlap(const Kernel& k, const Operand& a, size_t i, const Operand& b, size_t j) {
    if (a.role == Contract::Role::input && b.role == Contract::Role::input) return;
    const auto memory = allocate(a.tensor->bytes() + b.tensor->bytes());
    const auto at = [&](const Operand& o, int64_t first) {
      const int64_t n = o.tensor->elements();
      return Tensor(*this, memory, true, o.tensor->dtype(), {first + n}).slice(first, first + n).view(o.tensor->shape());
    };
    expect_refusal(k, {{i, at(a, 0)}, {j, at(b, 0)}}, text(b.name, ": memory of ", a.name));
    if (a.tensor->bytes() <= dtype_bytes(b.tensor->dtype())) return;
    expect_refusal(k, {{i, at(a, 0)}, {j, at(b, 1)}}, text(b.name, ": part of the memory of ", a.name));
  }

  template <class Kernel>
  void expect_refusal(const Kernel& k, const Replaced& replaced, const std::string& fault) {
    if (attempt(k, replaced, fault)) accepted_.insert(fault);
  }

  // Makes the same call in fp64, also to a backend that computes none.
  template <class Kernel>
  void in_fp64(const Kernel& k, const Contract& contract) {
    Replaced replaced;
    for (size_t i = 0; i < contract.operands().size(); ++i) {
      const auto& [name, tensor, role, spec] = contract.operands()[i];
      const bool follows = !std::string(spec).starts_with("fp") && !std::string(spec).starts_with("any");
      if (follows && is_floating(tensor->dtype())) replaced.push_back({i, empty(*this, Dtype::f64, tensor->shape())});
    }
    if (replaced.empty() || !attempt(k, replaced, "in fp64")) return;
    accepts_fp64_ = true;
    computes_fp64_ = false;
    copies_fp64_ |= attempt(k, replaced, "in fp64");
    computes_fp64_ = true;
  }

  // Returns true if the call is taken with other operands in the places of these.
  template <class Kernel>
  bool attempt(const Kernel& good, const Replaced& replaced, const std::string& fault) {
    Kernel bad = good;
    const Contract contract = bad.contract();
    for (const auto& [i, tensor] : replaced) const_cast<Tensor&>(*contract.operands()[i].tensor) = tensor;
    executed_ = false;
    try {
      run(bad);
    } catch (const Error& error) {
      expect_names(contract, replaced, error, fault);
    }
    return executed_;
  }

  // Messages in which kernels name several operands together.
  static constexpr const char* kTogether[] = {"op(a) is ", "pairs need a power of two of losses, ", "the rule flashinfer quantizes ",
                                              "branch and sum must be given together"};

  // An operand that is missing or shares memory must be named itself; for one of a wrong dtype or shape a later operand may be named, which
  // has to fit it.
  void expect_names(const Contract& contract, const Replaced& replaced, const Error& error, const std::string& fault) const {
    const std::string message = error.what(), rest = message.substr(message.find(": ") + 2);
    EXPECT_EQ(error.code(), ExitCode::internal) << message;
    EXPECT_EQ(message.substr(0, message.find(": ")), contract.kernel()) << fault;
    const auto& operands = contract.operands();
    if (fault.find(": memory of ") != std::string::npos || fault.find(": part of the memory of ") != std::string::npos) {
      EXPECT_EQ(rest, text(operands[replaced[1].first].name, " overlaps ", operands[replaced[0].first].name)) << fault;
    } else if (fault.ends_with(" is missing")) {
      EXPECT_EQ(rest, fault);
    } else {
      const auto from = operands.subspan(replaced[0].first);
      const auto named = [&](const Operand& operand) { return rest.starts_with(text(operand.name, ' ')); };
      const auto begins = [&](const char* words) { return rest.starts_with(words); };
      EXPECT_TRUE(std::any_of(from.begin(), from.end(), named) || std::any_of(std::begin(kTogether), std::end(kTogether), begins))
          << fault << ": " << message;
    }
  }

  std::string kernel_;
  std::unique_ptr<Backend> memory_ = make_backend("cpu_reference");
  std::set<std::string> accepted_;
  int calls_ = 0;
  bool trying_ = false, executed_ = false, computes_fp64_ = true, accepts_fp64_ = false, copies_fp64_ = false;
};

}  // namespace mantissa::test
