#include "mantissa/backend/bytes.h"

#include "mantissa/backend/functions.h"

namespace mantissa {

Bytes::Bytes(const Tensor& tensor)
    : Bytes(tensor.device_bytes(), tensor.bytes(), tensor.device().host_memory() ? nullptr : &tensor.device()) {}

Bytes Bytes::slice(int64_t begin, int64_t end) const {
  require(begin >= 0 && begin <= end && end <= size, "bytes [", begin, ", ", end, ") of ", size);
  return {data + begin, end - begin, device};
}

std::span<std::byte> Bytes::host() const {
  require(!device, size, " bytes of a device where bytes of the host are needed");
  return {data, static_cast<size_t>(size)};
}

Tensor Bytes::tensor() const {
  require(device != nullptr, size, " bytes of the host where bytes of a device are needed");
  return {*device, std::shared_ptr<std::byte>(std::shared_ptr<void>(), data), false, Dtype::u8, {size}};
}

}  // namespace mantissa
