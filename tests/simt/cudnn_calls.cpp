// cuDNN without a device: it keeps the descriptors that it is given, and computes in fp64 what the operations of a graph say, one after the
// other, with virtual tensors rounded to their dtypes. With MANTISSA_SIMT_CUDNN, the path of a real library, that one is given the same
// descriptors and makes its plans for an H200, which it compiles without one (tests/interop/cudnn.sh); computed is here in any case.
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "backend/cuda/cudnn/calls.h"
#include "cudnn_library.h"
#include "gpu/runtime.h"
#include "mantissa/base/error.h"
#include "mantissa/base/text.h"
#include "mantissa/formats/bf16.h"

namespace mantissa::simt {

CudnnState& cudnn() {
  static CudnnState state;
  return state;
}

}  // namespace mantissa::simt

namespace mantissa::gpu {
namespace {

using Sizes = std::array<int64_t, 4>;
constexpr int64_t kWorkspace = 256;

// A real library that descriptors are given to, or none.
struct RealCudnn {
  CudnnCalls calls{};
  cudnnBackendDescriptor_t device = nullptr;
};
RealCudnn* real() {
  static std::unique_ptr<RealCudnn> library;
  const char* const path = std::getenv("MANTISSA_SIMT_CUDNN");
  if (library || path == nullptr) return library.get();
  void* const opened = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  require(opened != nullptr, ExitCode::environment, "no cuDNN can be loaded: ", path);
  library = std::make_unique<RealCudnn>();
#define MANTISSA_CALL(name) library->calls.name = reinterpret_cast<decltype(library->calls.name)>(dlsym(opened, "cudnn" #name));
  MANTISSA_CUDNN_CALLS(MANTISSA_CALL)
#undef MANTISSA_CALL
  const std::string h200 = text(
      R"({"version":{"cudnnVersion":)", library->calls.GetVersion(), R"(,"schemaVersion":4},"deviceName":"NVIDIA H200","cudaDeviceId":0,)",
      R"("deviceVer":900,"driverVer":13000,"isTccDriver":0,"l2CacheSize":52428800,"maxCtasPerSM":32,"maxRegistersPerSM":65536,)",
      R"("maxSharedMemoryPerBlock":49152,"maxSharedMemoryPerBlockOptin":232448,"maxThreadsPerBlock":1024,"maxThreadsPerSM":2048,)",
      R"("memClockRateKHz":3201000,"multiProcessorCount":132,"smCountOrigin":0,"memoryBusWidth":6144,"oversizedSharedMemoryPerBlock":0,"pciDeviceId":0,"regsPerBlock":65536,"reservedSharedMemoryPerBlock":1024,)",
      R"("smClockRateKHz":1980000,"supportCoopLaunch":1,"totalGlobalMem":150000000000,"warpSize":32,)",
      R"("maxBlockSize":[1024,1024,64],"maxGridSize":[2147483647,65535,65535]})");
  const auto size = static_cast<int64_t>(h200.size());
  const bool made = library->calls.BackendCreateDescriptor(CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR, &library->device) == CUDNN_STATUS_SUCCESS &&
                    library->calls.BackendSetAttribute(library->device, CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, CUDNN_TYPE_CHAR, size,
                                                       h200.data()) == CUDNN_STATUS_SUCCESS &&
                    library->calls.BackendFinalize(library->device) == CUDNN_STATUS_SUCCESS;
  require(made, ExitCode::environment, path, " does not take the description of an H200");
  return library.get();
}

struct Kept {
  cudnnBackendDescriptorType_t type;
  cudnnBackendDescriptor_t original = nullptr;  // the one in the real library
  std::map<int, std::vector<std::byte>> attributes{};
  bool finished = false;
  int engine = -1;  // number of a configuration among those that are proposed for a graph

  bool given(int name) const { return attributes.contains(name); }
  template <class T>
  std::vector<T> all(int name) const {
    const auto found = attributes.find(name);
    if (found == attributes.end()) return {};
    std::vector<T> out(found->second.size() / sizeof(T));
    std::memcpy(out.data(), found->second.data(), found->second.size());
    return out;
  }
  template <class T>
  T one(int name) const {
    const std::vector<T> found = all<T>(name);
    require(found.size() == 1, "attribute ", name, " of a descriptor of type ", static_cast<int>(type), " has ", found.size(), " elements");
    return found[0];
  }
  Kept* part(int name) const { return static_cast<Kept*>(one<void*>(name)); }
  Kept* part_or_null(int name) const { return given(name) ? part(name) : nullptr; }
};
Kept& of(cudnnBackendDescriptor_t descriptor) { return *static_cast<Kept*>(descriptor); }

// Elements of a tensor of four dimensions, contiguous, whatever its strides in memory are.
struct Elements {
  Sizes sizes{}, strides{};
  cudnnDataType_t type{};
  std::vector<double> x{};

  explicit Elements(const Kept& tensor) : type(tensor.one<cudnnDataType_t>(CUDNN_ATTR_TENSOR_DATA_TYPE)) {
    const auto take = [&](int name, Sizes& to) {
      const std::vector<int64_t> given = tensor.all<int64_t>(name);
      require(given.size() == to.size(), "a tensor of ", given.size(), " dimensions");
      std::ranges::copy(given, to.begin());
    };
    take(CUDNN_ATTR_TENSOR_DIMENSIONS, sizes), take(CUDNN_ATTR_TENSOR_STRIDES, strides);
    x.resize(static_cast<size_t>(sizes[0] * sizes[1] * sizes[2] * sizes[3]));
  }
  // Calls body(place, element, offset in memory) for all elements in order.
  template <class Body>
  void each(Body body) {
    Sizes at{};
    for (double& element : x) {
      body(std::as_const(at), element, at[0] * strides[0] + at[1] * strides[1] + at[2] * strides[2] + at[3] * strides[3]);
      for (size_t d = 4; d-- > 0 && ++at[d] == sizes[d];) at[d] = 0;
    }
  }
  // Elements of dimensions with one are those of every place.
  double at(const Sizes& place) const {
    int64_t index = 0;
    for (size_t d = 0; d < 4; ++d) index = index * sizes[d] + (sizes[d] == 1 ? 0 : place[d]);
    return x[static_cast<size_t>(index)];
  }
  void round() {
    for (double& element : x) {
      if (type == CUDNN_DATA_BFLOAT16) element = static_cast<double>(to_float(to_bf16(static_cast<float>(element))));
      if (type == CUDNN_DATA_FLOAT) element = static_cast<double>(static_cast<float>(element));
    }
  }
  void read(const std::byte* memory) {
    each([&](const Sizes&, double& element, int64_t offset) {
      element = type == CUDNN_DATA_BFLOAT16 ? static_cast<double>(to_float(reinterpret_cast<const bf16*>(memory)[offset]))
                : type == CUDNN_DATA_FLOAT  ? static_cast<double>(reinterpret_cast<const float*>(memory)[offset])
                                            : static_cast<double>(reinterpret_cast<const int32_t*>(memory)[offset]);
    });
  }
  void write(std::byte* memory) {
    each([&](const Sizes&, double& element, int64_t offset) {
      if (type == CUDNN_DATA_BFLOAT16)
        reinterpret_cast<bf16*>(memory)[offset] = to_bf16(static_cast<float>(element));
      else
        reinterpret_cast<float*>(memory)[offset] = static_cast<float>(element);
    });
  }
};

// Computes the operations of a graph.
class Computation {
 public:
  // The host's scalars are read at once, memory of the device when the stream comes to it.
  Computation(const Kept& plan, const Kept& pack) {
    for (void* const each : plan.part(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG)
                                ->part(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH)
                                ->all<void*>(CUDNN_ATTR_OPERATIONGRAPH_OPS))
      operations_.push_back(of(each));
    const std::vector<int64_t> ids = pack.all<int64_t>(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS);
    const std::vector<void*> pointers = pack.all<void*>(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS);
    require(ids.size() == pointers.size(), ids.size(), " tensors have ", pointers.size(), " addresses");
    for (size_t i = 0; i < ids.size(); ++i)
      require(memory_.emplace(ids[i], static_cast<std::byte*>(pointers[i])).second, "tensor ", ids[i], " twice");
    for (const Kept& operation : operations_) {
      for (const auto& [name, bytes] : operation.attributes) {
        if (bytes.size() != sizeof(void*) || of(operation.one<void*>(name)).type != CUDNN_BACKEND_TENSOR_DESCRIPTOR) continue;
        const Kept& tensor = *operation.part(name);
        const auto id = tensor.one<int64_t>(CUDNN_ATTR_TENSOR_UNIQUE_ID);
        tensors_.try_emplace(operation.part(name), tensor);
        if (tensor.given(CUDNN_ATTR_TENSOR_IS_VIRTUAL)) continue;
        require(memory_.contains(id) && memory_.at(id) != nullptr, "tensor ", id, " has no memory");
        if (!tensor.given(CUDNN_ATTR_TENSOR_IS_BY_VALUE)) {
          require(reinterpret_cast<uintptr_t>(memory_.at(id)) % 16 == 0, "tensor ", id, " is not aligned");
        } else {
          float value = 0;
          std::memcpy(&value, memory_.at(id), sizeof value);
          values(operation.part(name)).x[0] = static_cast<double>(value), known_[operation.part(name)] = true;
        }
      }
    }
  }
  void compute() {
    for (const Kept& operation : operations_) {
      switch (operation.type) {
        case CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR: pointwise(operation); break;
        case CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR: matmul(operation); break;
        case CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR: reduce(operation); break;
        case CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR: reshape(operation); break;
        default: fail(ExitCode::internal, "an operation of type ", static_cast<int>(operation.type));
      }
    }
  }

 private:
  Elements& values(const Kept* tensor) { return tensors_.at(tensor); }
  const Elements& input(const Kept* tensor) {
    Elements& out = values(tensor);
    if (known_[tensor]) return out;
    require(!tensor->given(CUDNN_ATTR_TENSOR_IS_VIRTUAL), "a virtual tensor is read that nothing has written");
    out.read(memory_.at(tensor->one<int64_t>(CUDNN_ATTR_TENSOR_UNIQUE_ID)));
    known_[tensor] = true;
    return out;
  }
  void finish(const Kept* tensor) {
    Elements& out = values(tensor);
    out.round();
    require(!std::exchange(known_[tensor], true), "a tensor is written twice");
    if (!tensor->given(CUDNN_ATTR_TENSOR_IS_VIRTUAL)) out.write(memory_.at(tensor->one<int64_t>(CUDNN_ATTR_TENSOR_UNIQUE_ID)));
  }

  void pointwise(const Kept& operation) {
    const Kept& how = *operation.part(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR);
    const auto mode = how.one<cudnnPointwiseMode_t>(CUDNN_ATTR_POINTWISE_MODE);
    const Kept* const result = operation.part(CUDNN_ATTR_OPERATION_POINTWISE_YDESC);
    const auto operand = [&](int name) {
      const Kept* const tensor = operation.part_or_null(name);
      return tensor ? &(mode == CUDNN_POINTWISE_GEN_INDEX ? values(tensor) : input(tensor)) : nullptr;
    };
    const Elements *const x = operand(CUDNN_ATTR_OPERATION_POINTWISE_XDESC), *const b = operand(CUDNN_ATTR_OPERATION_POINTWISE_BDESC),
                          *const t = operand(CUDNN_ATTR_OPERATION_POINTWISE_TDESC);
    values(result).each([&](const Sizes& place, double& y, int64_t) {
      switch (mode) {
        case CUDNN_POINTWISE_GEN_INDEX:
          y = static_cast<double>(place[static_cast<size_t>(how.one<int64_t>(CUDNN_ATTR_POINTWISE_AXIS))]);
          break;
        case CUDNN_POINTWISE_MUL: y = x->at(place) * b->at(place); break;
        case CUDNN_POINTWISE_ADD: y = x->at(place) + b->at(place); break;
        case CUDNN_POINTWISE_SUB: y = x->at(place) - b->at(place); break;
        case CUDNN_POINTWISE_DIV: y = x->at(place) / b->at(place); break;
        case CUDNN_POINTWISE_MAX: y = std::fmax(x->at(place), b->at(place)); break;
        case CUDNN_POINTWISE_EXP: y = std::exp(x->at(place)); break;
        case CUDNN_POINTWISE_LOG: y = std::log(x->at(place)); break;
        case CUDNN_POINTWISE_CMP_GE: y = x->at(place) >= b->at(place) ? 1.0 : 0.0; break;
        case CUDNN_POINTWISE_CMP_GT: y = x->at(place) > b->at(place) ? 1.0 : 0.0; break;
        case CUDNN_POINTWISE_BINARY_SELECT: y = t->at(place) != 0.0 ? x->at(place) : b->at(place); break;
        default: fail(ExitCode::internal, "a pointwise operation of mode ", static_cast<int>(mode));
      }
    });
    finish(result);
  }
  // Heads of b are those of groups of heads of a.
  void matmul(const Kept& operation) {
    const Elements &a = input(operation.part(CUDNN_ATTR_OPERATION_MATMUL_ADESC)),
                   &b = input(operation.part(CUDNN_ATTR_OPERATION_MATMUL_BDESC));
    const Kept* const result = operation.part(CUDNN_ATTR_OPERATION_MATMUL_CDESC);
    Elements& c = values(result);
    require(a.sizes[3] == b.sizes[2] && a.sizes[2] == c.sizes[2] && b.sizes[3] == c.sizes[3] && a.sizes[1] == c.sizes[1] &&
                a.sizes[1] % b.sizes[1] == 0,
            "matrices do not fit each other");
    const int64_t depth = a.sizes[3], group = a.sizes[1] / b.sizes[1];
    c.each([&](const Sizes& at, double& sum, int64_t) {
      sum = 0.0;
      for (int64_t k = 0; k < depth; ++k) {
        const double left = a.at({at[0], at[1], at[2], k});
        if (left != 0.0) sum += left * b.at({at[0], at[1] / group, k, at[3]});
      }
    });
    finish(result);
  }
  void reduce(const Kept& operation) {
    const bool adds = operation.part(CUDNN_ATTR_OPERATION_REDUCTION_DESC)->one<cudnnReduceTensorOp_t>(CUDNN_ATTR_REDUCTION_OPERATOR) ==
                      CUDNN_REDUCE_TENSOR_ADD;
    Elements x = input(operation.part(CUDNN_ATTR_OPERATION_REDUCTION_XDESC));
    const Kept* const result = operation.part(CUDNN_ATTR_OPERATION_REDUCTION_YDESC);
    Elements& y = values(result);
    std::ranges::fill(y.x, adds ? 0.0 : -std::numeric_limits<double>::infinity());
    x.each([&](const Sizes& place, double& element, int64_t) {
      int64_t index = 0;
      for (size_t d = 0; d < 4; ++d) index = index * y.sizes[d] + place[d] / (x.sizes[d] / y.sizes[d]);
      double& to = y.x[static_cast<size_t>(index)];
      to = adds ? to + element : std::fmax(to, element);
    });
    finish(result);
  }
  // The elements of x as they lie in memory, read with other sizes and strides.
  void reshape(const Kept& operation) {
    Elements x = input(operation.part(CUDNN_ATTR_OPERATION_RESHAPE_XDESC));
    std::map<int64_t, double> memory;
    x.each([&](const Sizes&, double& element, int64_t offset) { memory[offset] = element; });
    const Kept* const result = operation.part(CUDNN_ATTR_OPERATION_RESHAPE_YDESC);
    values(result).each([&](const Sizes&, double& element, int64_t offset) { element = memory.at(offset); });
    finish(result);
  }

  std::vector<Kept> operations_;
  std::map<int64_t, std::byte*> memory_;
  std::map<const Kept*, Elements> tensors_;
  std::map<const Kept*, bool> known_;
};

cudnnStatus_t status_of(const char* call) {
  const simt::CudnnState& state = simt::cudnn();
  return state.failing_call == call ? static_cast<cudnnStatus_t>(state.status) : CUDNN_STATUS_SUCCESS;
}

cudaStream_t stream_of_calls = nullptr;

cudnnStatus_t create(cudnnHandle_t* handle) {
  static int library = 0;
  *handle = reinterpret_cast<cudnnHandle_t>(&library);
  return status_of("Create");
}
cudnnStatus_t destroy(cudnnHandle_t) { return CUDNN_STATUS_SUCCESS; }
cudnnStatus_t set_stream(cudnnHandle_t, cudaStream_t stream) {
  stream_of_calls = stream;
  return status_of("SetStream");
}
size_t version() { return static_cast<size_t>(simt::cudnn().version); }
void last_error(char* message, size_t size) {
  if (RealCudnn* const library = real()) return library->calls.GetLastErrorString(message, size);
  std::strncpy(message, "as the test asked", size - 1);
}

cudnnStatus_t create_descriptor(cudnnBackendDescriptorType_t type, cudnnBackendDescriptor_t* descriptor) {
  if (const cudnnStatus_t status = status_of("BackendCreateDescriptor"); status != CUDNN_STATUS_SUCCESS) return status;
  auto made = std::make_unique<Kept>(Kept{.type = type});
  if (RealCudnn* const library = real()) {
    if (const cudnnStatus_t status = library->calls.BackendCreateDescriptor(type, &made->original); status != CUDNN_STATUS_SUCCESS)
      return status;
  }
  *descriptor = made.release();
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t destroy_descriptor(cudnnBackendDescriptor_t descriptor) {
  const std::unique_ptr<Kept> gone(static_cast<Kept*>(descriptor));
  return gone->original ? real()->calls.BackendDestroyDescriptor(gone->original) : CUDNN_STATUS_SUCCESS;
}

size_t bytes_of(cudnnBackendAttributeType_t type) {
  switch (type) {
    case CUDNN_TYPE_BOOLEAN: return 1;
    case CUDNN_TYPE_DATA_TYPE:
    case CUDNN_TYPE_POINTWISE_MODE:
    case CUDNN_TYPE_REDUCTION_OPERATOR_TYPE:
    case CUDNN_TYPE_HEUR_MODE: return 4;
    default: return 8;
  }
}

cudnnStatus_t set_attribute(cudnnBackendDescriptor_t descriptor, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
                            int64_t count, const void* elements) {
  Kept& kept = of(descriptor);
  if (const cudnnStatus_t status = status_of("BackendSetAttribute"); status != CUDNN_STATUS_SUCCESS) return status;
  require(!kept.finished, "attribute ", static_cast<int>(name), " is set behind its descriptor's end");
  const auto* const bytes = static_cast<const std::byte*>(elements);
  kept.attributes[name].assign(bytes, bytes + static_cast<size_t>(count) * bytes_of(type));
  RealCudnn* const library = real();
  if (!library || type == CUDNN_TYPE_HANDLE || kept.type == CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR) return CUDNN_STATUS_SUCCESS;
  if (type != CUDNN_TYPE_BACKEND_DESCRIPTOR) return library->calls.BackendSetAttribute(kept.original, name, type, count, elements);
  std::vector<cudnnBackendDescriptor_t> originals;
  for (void* const each : kept.all<void*>(name)) originals.push_back(of(each).original);
  return library->calls.BackendSetAttribute(kept.original, name, type, count, originals.data());
}

cudnnStatus_t finalize(cudnnBackendDescriptor_t descriptor) {
  Kept& kept = of(descriptor);
  if (const cudnnStatus_t status = status_of("BackendFinalize"); status != CUDNN_STATUS_SUCCESS) return status;
  for (const auto& [name, bytes] : kept.attributes) {
    const bool operands = kept.type == CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR || kept.type == CUDNN_BACKEND_TENSOR_DESCRIPTOR;
    const bool handle = name == CUDNN_ATTR_OPERATIONGRAPH_HANDLE || name == CUDNN_ATTR_EXECUTION_PLAN_HANDLE;
    if (operands || handle || bytes.size() % sizeof(void*) != 0 || name == CUDNN_ATTR_POINTWISE_AXIS) continue;
    for (void* const part : kept.all<void*>(name)) require(of(part).finished, "a part of a descriptor has no end");
  }
  const bool plan = kept.type == CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR, heuristics = kept.type == CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR;
  if (plan) {
    kept.one<void*>(CUDNN_ATTR_EXECUTION_PLAN_HANDLE);
    if (kept.part(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG)->engine < simt::cudnn().refused_plans) return CUDNN_STATUS_NOT_SUPPORTED;
    ++simt::cudnn().plans;
  }
  kept.finished = true;
  RealCudnn* const library = real();
  if (!library || kept.type == CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR) return CUDNN_STATUS_SUCCESS;
  if (plan || heuristics) {
    const auto name = plan ? CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP : CUDNN_ATTR_ENGINEHEUR_DEVICEPROP;
    library->calls.BackendSetAttribute(kept.original, name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &library->device);
  }
  return library->calls.BackendFinalize(kept.original);
}

// Returns the bytes of the largest matrix of bf16 that is multiplied; of a forward pass none, whose scores stay on the chip.
int64_t bytes_of_gradients(const Kept& engine) {
  int64_t products = 0, most = 0;
  for (void* const each : engine.part(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH)->all<void*>(CUDNN_ATTR_OPERATIONGRAPH_OPS)) {
    if (of(each).type != CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR) continue;
    ++products;
    for (const int side : {CUDNN_ATTR_OPERATION_MATMUL_ADESC, CUDNN_ATTR_OPERATION_MATMUL_BDESC}) {
      const Elements elements(*of(each).part(side));
      most = std::max(most, 2 * std::ssize(elements.x));
    }
  }
  return products > 2 ? most : 0;
}

cudnnStatus_t get_attribute(cudnnBackendDescriptor_t descriptor, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
                            int64_t requested, int64_t* count, void* elements) {
  Kept& kept = of(descriptor);
  require(kept.finished, "an attribute is read of a descriptor without an end");
  if (const cudnnStatus_t status = status_of("BackendGetAttribute"); status != CUDNN_STATUS_SUCCESS) return status;
  RealCudnn* const library = real();
  if (name == CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE) {
    const Kept& engine = *kept.part(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG);
    int64_t bytes = kWorkspace + (engine.engine < simt::cudnn().unordered_plans ? 0 : bytes_of_gradients(engine));
    if (library) library->calls.BackendGetAttribute(kept.original, name, type, 1, count, &bytes);
    simt::cudnn().workspace = *static_cast<int64_t*>(elements) = bytes;
    kept.attributes[name].assign(static_cast<std::byte*>(elements), static_cast<std::byte*>(elements) + sizeof bytes);
    return CUDNN_STATUS_SUCCESS;
  }
  require(name == CUDNN_ATTR_ENGINEHEUR_RESULTS, "attribute ", static_cast<int>(name), " is read");
  constexpr int64_t kProposed = 2;
  *count = kProposed;
  std::vector<cudnnBackendDescriptor_t> originals;
  auto* const configurations = static_cast<cudnnBackendDescriptor_t*>(elements);
  for (int64_t i = 0; i < requested; ++i) {
    Kept& made = of(configurations[i]);
    made.finished = true, made.engine = static_cast<int>(i);
    made.attributes[CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH] = kept.attributes.at(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH);
    originals.push_back(made.original);
  }
  return library ? library->calls.BackendGetAttribute(kept.original, name, type, requested, count, originals.data()) : CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t execute(cudnnHandle_t, cudnnBackendDescriptor_t plan, cudnnBackendDescriptor_t pack) {
  require(of(plan).finished && of(pack).finished, "a plan or its operands have no end");
  if (const cudnnStatus_t status = status_of("BackendExecute"); status != CUDNN_STATUS_SUCCESS) return status;
  const auto bytes = of(plan).one<int64_t>(CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE);
  auto* const workspace = static_cast<std::byte*>(of(pack).one<void*>(CUDNN_ATTR_VARIANT_PACK_WORKSPACE));
  require(bytes == 0 || workspace != nullptr, "a plan without a workspace");
  const auto computation = std::make_shared<Computation>(of(plan), of(pack));
  ++simt::cudnn().executions;
  submit(*reinterpret_cast<Stream*>(stream_of_calls), [=] {
    if (bytes > 0) std::memset(workspace, 0xff, static_cast<size_t>(bytes));
    computation->compute();
  });
  return CUDNN_STATUS_SUCCESS;
}

}  // namespace

// None unless the executor stands for an architecture.
CudnnCalls load_cudnn() {
  require(simt::stands_for_a_chip(), ExitCode::environment, "training.attention is cudnn, but cuDNN cannot be loaded");
  return {.Create = create,
          .Destroy = destroy,
          .SetStream = set_stream,
          .GetVersion = version,
          .GetLastErrorString = last_error,
          .BackendCreateDescriptor = create_descriptor,
          .BackendDestroyDescriptor = destroy_descriptor,
          .BackendFinalize = finalize,
          .BackendSetAttribute = set_attribute,
          .BackendGetAttribute = get_attribute,
          .BackendExecute = execute};
}

}  // namespace mantissa::gpu
