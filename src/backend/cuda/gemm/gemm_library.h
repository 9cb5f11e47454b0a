// GEMMs of cuBLASLt, row-major. cublaslt/cublaslt.cpp has them where CMake finds the library with its header, else
// cublaslt/no_cublaslt.cpp; the library is loaded when a device is opened.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "backend/cuda/runtime_calls.h"
#include "mantissa/formats/format.h"
#include "mantissa/tensor/tensor.h"

namespace mantissa::gpu {

// Layout of the scales of codes; i is a row of op(a) or a column of op(b), and j a block along the contraction of k elements.
enum class ScaleLayout : uint8_t {
  none,
  swizzled_e8m0,  // per 32: formats/swizzle.h
  swizzled_e4m3,  // per 16, likewise
  outer_fp32,     // per 128: at j * outer + i
  tiles_fp32      // per 128 x 128: at i / 128 * round_up(ceil(k / 128), 4) + j
};

// Alignment of addresses, in bytes, where nothing else is said. The library chooses algorithms by it, so it is the same wherever operands
// lie.
inline constexpr uint32_t kLibraryAlignment = 16;

inline constexpr int64_t kLongSum = 16384;  // addends from which on any sum may be split

struct LibraryMatrix {
  const std::byte* data = nullptr;
  Dtype dtype = Dtype::bf16;     // for values
  Format format = Format::none;  // for codes: e4m3, e5m2 or nvfp4
  bool transposed = false;       // read as the transpose of what lies there
  ScaleLayout layout = ScaleLayout::none;
  const std::byte* scales = nullptr;
};

struct LibraryGemm {  // out [m, n] (+)= factor * op(a) [m, k] * op(b) [k, n] + bias [n]; no size is 0
  LibraryMatrix a, b;
  std::byte* out;
  Dtype out_dtype;
  bool accumulate;
  const std::byte* bias;  // has out_dtype, at a multiple of 16 bytes; null: none
  int64_t m, n, k;
  uint32_t alignment = kLibraryAlignment;  // alignment of all addresses, in bytes
  float factor = 1.0F;
};

// Matrices of groups, an element of each array for each group. The arrays are in device memory.
struct GroupedMatrix {
  void* addresses;  // pointers to the matrices, which begin at multiples of 16 bytes
  const int32_t *rows, *cols;
  Dtype dtype;
  bool transposed;  // read as the transpose of what lies there
};
struct GroupedProduct {  // out_g = factors[0] * op(a_g) * op(b_g) + factors[1] * out_g for every group g; some m or k may be 0
  GroupedMatrix a, b, out;
  int groups;
  const float* factors;  // in device memory
  int64_t m, n, k;       // sizes of a usual group
};

class GemmLibrary {
 public:
  using Memory = std::function<std::shared_ptr<std::byte>(int64_t bytes)>;  // belongs to the stream, in whose order it goes back

  virtual ~GemmLibrary() = default;
  virtual int version() const = 0;
  // Returns true if it has an algorithm for this GEMM, which then is on the stream. It may split sums over tokens, where op(a) is
  // transposed, and any of kLongSum addends or more, because few elements with long sums leave most of a GPU idle; it adds the parts in a
  // fixed order behind the GEMM, so that the same GEMM has the same bits on the same device. Other sums are whole. Throws
  // Error(environment) where the GPU, its driver or its memory is to blame for a failure, and Error(internal) for any other: a call that
  // the library refuses as invalid, or a kernel that fails, as one of ours that does (chip/runtime.cpp).
  virtual bool multiply(Stream& stream, const LibraryGemm& gemm, const Memory& workspace) = 0;
  // Like multiply(), but for several GEMMs of values, one after the other: it runs all of them or none. They differ from the usual one in
  // addresses, and in m or in k along rows of operands; all take its algorithm, so that the bits of a group do not depend on its rows.
  virtual bool multiply_groups(Stream& stream, const LibraryGemm& usual, std::span<const LibraryGemm> groups, const Memory& workspace) = 0;
  // Like multiply(), but for groups whose sizes only the device knows. Sums are whole, and the bits of a row do not depend on other rows.
  virtual bool multiply_at_once(Stream& stream, const GroupedProduct& product, const Memory& workspace) = 0;
};

// Null where there is none.
std::unique_ptr<GemmLibrary> load_gemm_library();

}  // namespace mantissa::gpu
