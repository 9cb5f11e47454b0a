// Attention as graphs of cuDNN's backend. A graph describes what is computed of tensors [B, H, T, D] with strides, most of them virtual:
// the library finds the kernel that computes all of it at once, if the graph is of a form that it knows. The forms are those that NVIDIA's
// frontend (Apache-2) makes for its attention, so the order of operations, and what is an operation of its own, are not free.
#include <array>
#include <cmath>
#include <map>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "backend/cuda/attention/attention_library.h"
#include "backend/cuda/cudnn/calls.h"
#include "mantissa/base/error.h"
#include "mantissa/base/text.h"

namespace mantissa::gpu {
namespace {

using Descriptor = cudnnBackendDescriptor_t;
using Sizes = std::array<int64_t, 4>;

std::string form_text(const LibraryAttention& a) {
  const AttentionForm& f = a.form;
  return text(a.dout ? "attention backward" : "attention", " of ", f.batch, " x ", f.length, " tokens, ", f.heads, " heads of ", f.head_dim,
              " channels, ", f.kv_heads, " of keys", a.window > 0 ? text(", window ", a.window) : "", a.segment_starts ? ", documents" : "",
              a.sinks ? ", sinks" : "");
}

bool is_unsupported(cudnnStatus_t status) { return status / 1000 == 3; }

// Failures of the driver, the runtime and memory are of the environment.
void check(const CudnnCalls& calls, cudnnStatus_t status, const auto&... what) {
  if (status == CUDNN_STATUS_SUCCESS) return;
  std::array<char, 512> why{};
  calls.GetLastErrorString(why.data(), why.size());
  const bool of_environment = status / 1000 == 1 || is_unsupported(status) || status == CUDNN_STATUS_EXECUTION_FAILED_CUDA_DRIVER ||
                              status == CUDNN_STATUS_EXECUTION_FAILED_CUDART ||
                              status == CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED ||
                              status == CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED;
  fail(of_environment ? ExitCode::environment : ExitCode::internal, "cuDNN: ", what..., " failed: status ", static_cast<int>(status),
       why[0] != '\0' ? text(", ", why.data()) : "");
}

// Tensors of a graph that have memory; the host has that of the last four. Virtual tensors have later numbers.
enum Id : int64_t {
  kQueries = 1,
  kKeys,
  kValues,
  kOut,
  kLse,
  kStarts,
  kSinks,
  kDout,
  kDeltas,
  kDqueries,
  kDkeys,
  kDvalues,
  kScale,
  kHidden,
  kWindow,
  kOne,
  kVirtual
};

// Makes descriptors, which it keeps: a plan refers to those that it was made from.
class Descriptors {
 public:
  explicit Descriptors(const CudnnCalls& calls) : calls_(calls) {}
  const CudnnCalls& calls() const { return calls_; }

  Descriptor make(cudnnBackendDescriptorType_t type) {
    Descriptor made = nullptr;
    check(calls_, calls_.BackendCreateDescriptor(type, &made), "creating a descriptor");
    kept_.emplace_back(made, calls_.BackendDestroyDescriptor);
    return made;
  }
  // Elements of an attribute have one of these types.
  static constexpr auto type_of(int64_t) { return CUDNN_TYPE_INT64; }
  static constexpr auto type_of(bool) { return CUDNN_TYPE_BOOLEAN; }
  static constexpr auto type_of(cudnnDataType_t) { return CUDNN_TYPE_DATA_TYPE; }
  static constexpr auto type_of(cudnnPointwiseMode_t) { return CUDNN_TYPE_POINTWISE_MODE; }
  static constexpr auto type_of(cudnnReduceTensorOp_t) { return CUDNN_TYPE_REDUCTION_OPERATOR_TYPE; }
  static constexpr auto type_of(cudnnBackendHeurMode_t) { return CUDNN_TYPE_HEUR_MODE; }
  static constexpr auto type_of(cudnnHandle_t) { return CUDNN_TYPE_HANDLE; }
  static constexpr auto type_of(Descriptor) { return CUDNN_TYPE_BACKEND_DESCRIPTOR; }

  void set(Descriptor of, cudnnBackendAttributeName_t name, const auto& value) { set(of, name, type_of(value), 1, &value); }
  void set(Descriptor of, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, size_t count, const void* values) {
    check(calls_, calls_.BackendSetAttribute(of, name, type, static_cast<int64_t>(count), values), "setting attribute ",
          static_cast<int>(name));
  }
  Descriptor finished(Descriptor of, const char* what) {
    check(calls_, calls_.BackendFinalize(of), what);
    return of;
  }

 private:
  const CudnnCalls& calls_;
  std::vector<std::unique_ptr<void, cudnnStatus_t (*)(Descriptor)>> kept_;
};

// The operations of attention, or of its gradient.
class Graph {
 public:
  Graph(Descriptors& descriptors, const LibraryAttention& a) : d_(descriptors), a_(a), f_(a.form) { a.dout ? backward() : forward(); }
  const std::vector<Descriptor>& operations() const { return operations_; }
  const std::vector<int64_t>& ids() const { return ids_; }  // tensors that have memory

 private:
  Descriptor tensor(int64_t id, const Sizes& sizes, const Sizes& strides, cudnnDataType_t type) {
    const Descriptor out = d_.make(CUDNN_BACKEND_TENSOR_DESCRIPTOR);
    d_.set(out, CUDNN_ATTR_TENSOR_UNIQUE_ID, id);
    d_.set(out, CUDNN_ATTR_TENSOR_DATA_TYPE, type);
    d_.set(out, CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, sizes.size(), sizes.data());
    d_.set(out, CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, strides.size(), strides.data());
    d_.set(out, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, int64_t{16});
    if (id >= kVirtual) d_.set(out, CUDNN_ATTR_TENSOR_IS_VIRTUAL, true);
    if (id >= kScale && id < kVirtual) d_.set(out, CUDNN_ATTR_TENSOR_IS_BY_VALUE, true);
    if (id < kVirtual) ids_.push_back(id);
    return d_.finished(out, "describing a tensor");
  }
  Descriptor virtual_tensor(const Sizes& sizes, const Sizes& strides, cudnnDataType_t type) {
    return tensor(next_++, sizes, strides, type);
  }
  Descriptor scalar(Id id) { return tensor(id, {1, 1, 1, 1}, {1, 1, 1, 1}, CUDNN_DATA_FLOAT); }
  // Rows of heads, `width` elements apart; transposed: as a matrix of channels and tokens.
  Descriptor heads(Id id, int64_t heads, int64_t width, bool transposed = false) {
    const int64_t t = f_.length, d = f_.head_dim;
    if (transposed) return tensor(id, {f_.batch, heads, d, t}, {t * width, d, 1, width}, CUDNN_DATA_BFLOAT16);
    return tensor(id, {f_.batch, heads, t, d}, {t * width, d, width, 1}, CUDNN_DATA_BFLOAT16);
  }
  int64_t packed() const { return (f_.heads + 2 * f_.kv_heads) * f_.head_dim; }
  Descriptor scores(cudnnDataType_t type = CUDNN_DATA_FLOAT) {
    const int64_t t = f_.length;
    return virtual_tensor({f_.batch, f_.heads, t, t}, {f_.heads * t * t, t * t, t, 1}, type);
  }
  // An element for each query of a head.
  Descriptor of_rows(int64_t id) {
    const int64_t t = f_.length;
    return tensor(id, {f_.batch, f_.heads, t, 1}, {f_.heads * t, t, 1, 1}, CUDNN_DATA_FLOAT);
  }
  Descriptor of_rows() { return of_rows(next_++); }

  Descriptor pointwise(cudnnPointwiseMode_t mode, Descriptor x, Descriptor b, Descriptor y, Descriptor mask = nullptr, int64_t axis = -1) {
    const bool compares = mode == CUDNN_POINTWISE_CMP_GE || mode == CUDNN_POINTWISE_CMP_GT;
    const Descriptor how = d_.make(CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
    d_.set(how, CUDNN_ATTR_POINTWISE_MODE, mode);
    d_.set(how, CUDNN_ATTR_POINTWISE_MATH_PREC, compares ? CUDNN_DATA_BOOLEAN : CUDNN_DATA_FLOAT);
    if (axis >= 0) d_.set(how, CUDNN_ATTR_POINTWISE_AXIS, axis);
    const Descriptor operation = d_.make(CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
    d_.set(operation, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, d_.finished(how, "describing a pointwise operation"));
    d_.set(operation, CUDNN_ATTR_OPERATION_POINTWISE_XDESC, x);
    if (b) d_.set(operation, CUDNN_ATTR_OPERATION_POINTWISE_BDESC, b);
    if (mask) d_.set(operation, CUDNN_ATTR_OPERATION_POINTWISE_TDESC, mask);
    d_.set(operation, CUDNN_ATTR_OPERATION_POINTWISE_YDESC, y);
    return add(operation, y);
  }
  Descriptor matmul(Descriptor a, Descriptor b, Descriptor c) {
    const Descriptor how = d_.make(CUDNN_BACKEND_MATMUL_DESCRIPTOR);
    d_.set(how, CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_DATA_FLOAT);
    const Descriptor operation = d_.make(CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR);
    d_.set(operation, CUDNN_ATTR_OPERATION_MATMUL_ADESC, a);
    d_.set(operation, CUDNN_ATTR_OPERATION_MATMUL_BDESC, b);
    d_.set(operation, CUDNN_ATTR_OPERATION_MATMUL_CDESC, c);
    d_.set(operation, CUDNN_ATTR_OPERATION_MATMUL_DESC, d_.finished(how, "describing a matmul"));
    return add(operation, c);
  }
  // Joins the elements of x for which y has one: those of a row, or those of a group of heads.
  Descriptor reduce(cudnnReduceTensorOp_t by, Descriptor x, Descriptor y) {
    const Descriptor how = d_.make(CUDNN_BACKEND_REDUCTION_DESCRIPTOR);
    d_.set(how, CUDNN_ATTR_REDUCTION_OPERATOR, by);
    d_.set(how, CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_DATA_FLOAT);
    const Descriptor operation = d_.make(CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR);
    d_.set(operation, CUDNN_ATTR_OPERATION_REDUCTION_XDESC, x);
    d_.set(operation, CUDNN_ATTR_OPERATION_REDUCTION_YDESC, y);
    d_.set(operation, CUDNN_ATTR_OPERATION_REDUCTION_DESC, d_.finished(how, "describing a reduction"));
    return add(operation, y);
  }
  // y has the elements of x with rows and columns exchanged; its strides say so.
  Descriptor transpose(Descriptor x, Descriptor y) {
    const Descriptor operation = d_.make(CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR);
    d_.set(operation, CUDNN_ATTR_OPERATION_RESHAPE_XDESC, x);
    d_.set(operation, CUDNN_ATTR_OPERATION_RESHAPE_YDESC, y);
    return add(operation, y);
  }
  Descriptor add(Descriptor operation, Descriptor result) {
    operations_.push_back(d_.finished(operation, "describing an operation"));
    return result;
  }

  // Hides the keys that are behind the query, before its window or before its document.
  Descriptor masked(Descriptor x) {
    const Descriptor hidden = scalar(kHidden);
    const auto places = [&](int64_t axis) {
      return pointwise(CUDNN_POINTWISE_GEN_INDEX, x, nullptr, scores(CUDNN_DATA_INT32), nullptr, axis);
    };
    const auto where = [&](cudnnPointwiseMode_t mode, Descriptor a, Descriptor b) {
      const Descriptor seen = pointwise(mode, a, b, scores(CUDNN_DATA_BOOLEAN));
      x = pointwise(CUDNN_POINTWISE_BINARY_SELECT, x, hidden, scores(), seen);
    };
    const Descriptor query = places(2), key = places(3);
    where(CUDNN_POINTWISE_CMP_GE, query, key);
    if (a_.window > 0) {
      const Descriptor at = places(2), last = pointwise(CUDNN_POINTWISE_ADD, places(3), scalar(kWindow), scores());
      where(CUDNN_POINTWISE_CMP_GT, last, at);
    }
    if (a_.segment_starts) {
      const int64_t t = f_.length;
      where(CUDNN_POINTWISE_CMP_GE, places(3), tensor(kStarts, {f_.batch, 1, t, 1}, {t, t, 1, 1}, CUDNN_DATA_INT32));
    }
    return x;
  }

  // lse = max + log(sum), of exp(score - max) and, where there are sinks, of exp(sink - max): AttentionForward::lse.
  void forward() {
    const Descriptor q = heads(kQueries, f_.heads, packed()), k = heads(kKeys, f_.kv_heads, packed(), true),
                     v = heads(kValues, f_.kv_heads, packed());
    const Descriptor x = masked(pointwise(CUDNN_POINTWISE_MUL, matmul(q, k, scores()), scalar(kScale), scores()));
    const Descriptor sinks = a_.sinks ? tensor(kSinks, {1, f_.heads, 1, 1}, {f_.heads, 1, 1, 1}, CUDNN_DATA_FLOAT) : nullptr;
    Descriptor most = reduce(CUDNN_REDUCE_TENSOR_MAX, x, of_rows());
    if (sinks) most = pointwise(CUDNN_POINTWISE_MAX, most, sinks, of_rows());
    const Descriptor e = pointwise(CUDNN_POINTWISE_EXP, pointwise(CUDNN_POINTWISE_SUB, x, most, scores()), nullptr, scores());
    Descriptor of_sinks = nullptr;
    if (sinks) of_sinks = pointwise(CUDNN_POINTWISE_EXP, pointwise(CUDNN_POINTWISE_SUB, sinks, most, of_rows()), nullptr, of_rows());
    Descriptor sum = reduce(CUDNN_REDUCE_TENSOR_ADD, e, of_rows());
    if (sinks) sum = pointwise(CUDNN_POINTWISE_ADD, sum, of_sinks, of_rows());
    pointwise(CUDNN_POINTWISE_ADD, most, pointwise(CUDNN_POINTWISE_LOG, sum, nullptr, of_rows()), of_rows(kLse));
    const Descriptor p = pointwise(CUDNN_POINTWISE_DIV, e, sum, scores(CUDNN_DATA_BFLOAT16));
    matmul(p, v, heads(kOut, f_.heads, f_.heads * f_.head_dim));
  }

  // dk or dv: the sum of the gradients of the query heads that share them.
  void add_gradient(Descriptor weights, Descriptor rows, Id id) {
    const int64_t h = f_.heads, t = f_.length, d = f_.head_dim;
    const Descriptor transposed = transpose(weights, virtual_tensor({f_.batch, h, t, t}, {h * t * t, t * t, 1, t}, CUDNN_DATA_BFLOAT16));
    const Descriptor out = heads(id, f_.kv_heads, packed());
    if (h == f_.kv_heads) {
      matmul(transposed, rows, out);
      return;
    }
    const Descriptor all = virtual_tensor({f_.batch, h, t, d}, {h * t * d, t * d, d, 1}, CUDNN_DATA_BFLOAT16);
    reduce(CUDNN_REDUCE_TENSOR_ADD, matmul(transposed, rows, all), out);
  }
  // With p = exp(scale q k - lse): ds = scale p (dout v - deltas), dq = ds k, dk = ds^T q, dv = p^T dout. dq is written by its matmul:
  // where it goes through a sum in fp32 instead, blocks add to it in any order.
  void backward() {
    const int64_t h = f_.heads, t = f_.length, d = f_.head_dim, width = h * d;
    const Descriptor q = heads(kQueries, h, packed()), k = heads(kKeys, f_.kv_heads, packed(), true),
                     v = heads(kValues, f_.kv_heads, packed(), true), out = heads(kOut, h, width), dout = heads(kDout, h, width);
    const Descriptor product =
        pointwise(CUDNN_POINTWISE_MUL, dout, out, virtual_tensor({f_.batch, h, t, d}, {h * t * d, t * d, width, 1}, CUDNN_DATA_FLOAT));
    const Descriptor deltas =
        pointwise(CUDNN_POINTWISE_MUL, reduce(CUDNN_REDUCE_TENSOR_ADD, product, of_rows()), scalar(kOne), of_rows(kDeltas));
    const Descriptor scale = scalar(kScale), scaled = pointwise(CUDNN_POINTWISE_MUL, matmul(q, k, scores()), scale, scores());
    const Descriptor p =
        pointwise(CUDNN_POINTWISE_EXP, masked(pointwise(CUDNN_POINTWISE_SUB, scaled, of_rows(kLse), scores())), nullptr, scores());
    add_gradient(p, dout, kDvalues);
    const Descriptor dp = pointwise(CUDNN_POINTWISE_SUB, matmul(dout, v, scores()), deltas, scores());
    const Descriptor ds =
        pointwise(CUDNN_POINTWISE_MUL, pointwise(CUDNN_POINTWISE_MUL, dp, p, scores()), scale, scores(CUDNN_DATA_BFLOAT16));
    add_gradient(ds, q, kDkeys);
    const Descriptor rows_of_k =
        transpose(k, virtual_tensor({f_.batch, f_.kv_heads, t, d}, {t * packed(), d, packed(), 1}, CUDNN_DATA_BFLOAT16));
    matmul(ds, rows_of_k, heads(kDqueries, h, packed()));
  }

  Descriptors& d_;
  const LibraryAttention& a_;
  const AttentionForm& f_;
  std::vector<Descriptor> operations_;
  std::vector<int64_t> ids_;
  int64_t next_ = kVirtual;
};

struct Plan {
  Descriptors descriptors;
  std::vector<int64_t> ids{};
  Descriptor plan = nullptr;
  int64_t workspace = 0;
};

class Cudnn final : public AttentionLibrary {
 public:
  explicit Cudnn(const CudnnCalls& calls) : calls_(calls) { check(calls_, calls_.Create(&handle_), "creating a handle"); }
  ~Cudnn() override {
    plans_.clear();
    calls_.Destroy(handle_);
  }
  Cudnn(const Cudnn&) = delete;
  Cudnn& operator=(const Cudnn&) = delete;

  int version() const override { return static_cast<int>(calls_.GetVersion()); }

  void run(Stream& stream, const LibraryAttention& a, const Memory& memory) override {
    const Plan& plan = plan_for(a);
    const auto& f = a.form;
    const int64_t channels = f.heads * f.head_dim, kv_channels = f.kv_heads * f.head_dim;
    const std::shared_ptr<std::byte> workspace = plan.workspace > 0 ? memory(plan.workspace) : nullptr,
                                     deltas = a.dout ? memory(f.batch * f.heads * f.length * static_cast<int64_t>(sizeof(float))) : nullptr;
    float scale = a.scale, hidden = -INFINITY, one = 1.0F, window = static_cast<float>(a.window);
    const auto part = [](std::byte* rows, int64_t first) -> void* { return rows + first * 2; };
    const std::map<int64_t, void*> addresses = {{kQueries, a.qkv},
                                                {kKeys, part(a.qkv, channels)},
                                                {kValues, part(a.qkv, channels + kv_channels)},
                                                {kOut, a.out},
                                                {kLse, a.lse},
                                                {kStarts, a.segment_starts},
                                                {kSinks, a.sinks},
                                                {kDout, a.dout},
                                                {kDeltas, deltas.get()},
                                                {kDqueries, a.dqkv},
                                                {kDkeys, part(a.dqkv, channels)},
                                                {kDvalues, part(a.dqkv, channels + kv_channels)},
                                                {kScale, &scale},
                                                {kHidden, &hidden},
                                                {kWindow, &window},
                                                {kOne, &one}};
    std::vector<void*> pointers;
    for (const int64_t id : plan.ids) pointers.push_back(addresses.at(id));
    void* const taken = workspace.get();
    Descriptors descriptors(calls_);
    const Descriptor pack = descriptors.make(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
    descriptors.set(pack, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, plan.ids.size(), plan.ids.data());
    descriptors.set(pack, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, pointers.size(), pointers.data());
    descriptors.set(pack, CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, &taken);
    descriptors.finished(pack, "describing operands");
    check(calls_, calls_.SetStream(handle_, static_cast<cudaStream_t>(handle_of(stream))), "setting a stream");
    check(calls_, calls_.BackendExecute(handle_, plan.plan, pack), form_text(a));
  }

 private:
  // A plan is for any scale and any window, which are operands.
  using Key = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, bool, bool, bool, bool>;

  const Plan& plan_for(const LibraryAttention& a) {
    const AttentionForm& f = a.form;
    const Key key{
        f.batch,          f.length, f.heads, f.kv_heads, f.head_dim, a.window > 0, a.segment_starts != nullptr, a.sinks != nullptr,
        a.dout != nullptr};
    std::unique_ptr<Plan>& plan = plans_[key];
    if (!plan) plan = planned(a);
    return *plan;
  }

  // Takes the first of the engines that the library proposes which supports the graph and computes it with the same bits each time. Where
  // the gradients of scores have no memory of their own, blocks add to dq in any order.
  std::unique_ptr<Plan> planned(const LibraryAttention& a) {
    auto out = std::make_unique<Plan>(Plan{.descriptors = Descriptors(calls_)});
    Descriptors& d = out->descriptors;
    const Graph operations(d, a);
    out->ids = operations.ids();
    const Descriptor graph = d.make(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
    d.set(graph, CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, operations.operations().size(),
          operations.operations().data());
    d.set(graph, CUDNN_ATTR_OPERATIONGRAPH_HANDLE, handle_);
    d.finished(graph, "describing a graph");
    std::string why = "it proposes no engine";
    const int64_t gradients_of_scores = 2 * a.form.batch * a.form.heads * a.form.length * a.form.length;  // bytes
    for (const Descriptor engine : engines_for(d, graph)) {
      const Descriptor plan = d.make(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
      d.set(plan, CUDNN_ATTR_EXECUTION_PLAN_HANDLE, handle_);
      d.set(plan, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, engine);
      const cudnnStatus_t status = calls_.BackendFinalize(plan);
      if (is_unsupported(status)) {
        why = text("status ", static_cast<int>(status));
        continue;
      }
      check(calls_, status, "making a plan");
      read(plan, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64, 1, &out->workspace);
      if (a.dout && out->workspace < gradients_of_scores) {
        why = "its engines add gradients of queries in no fixed order";
        continue;
      }
      out->plan = plan;
      return out;
    }
    fail(ExitCode::environment, cudnn_text(version()), " has no ", form_text(a), ": ", why, "; set training.attention to own");
  }

  std::vector<Descriptor> engines_for(Descriptors& d, Descriptor graph) {
    const Descriptor heuristics = d.make(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
    d.set(heuristics, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph);
    d.set(heuristics, CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_HEUR_MODE_A);
    d.finished(heuristics, "asking for engines");
    std::vector<Descriptor> out(
        static_cast<size_t>(read(heuristics, CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR, 0, nullptr)));
    for (Descriptor& each : out) each = d.make(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
    if (out.empty()) return out;
    out.resize(
        static_cast<size_t>(read(heuristics, CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR, std::ssize(out), out.data())));
    return out;
  }

  // Returns how many elements there are.
  int64_t read(Descriptor of, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, int64_t count, void* to) {
    int64_t out = 0;
    check(calls_, calls_.BackendGetAttribute(of, name, type, count, &out, to), "reading attribute ", static_cast<int>(name));
    return out;
  }

  const CudnnCalls calls_;
  cudnnHandle_t handle_ = nullptr;
  std::map<Key, std::unique_ptr<Plan>> plans_;
};

}  // namespace

std::unique_ptr<AttentionLibrary> load_attention_library() { return std::make_unique<Cudnn>(load_cudnn()); }

}  // namespace mantissa::gpu
