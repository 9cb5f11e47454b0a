#include "mantissa/metrics/event_file.h"

#include <unistd.h>

#include <array>
#include <atomic>
#include <bit>
#include <cstdio>

#include "mantissa/base/error.h"
#include "mantissa/base/host_name.h"
#include "mantissa/base/reflected_crc.h"

namespace mantissa {
namespace {

template <class Integer>
void put_little_endian(std::string& out, Integer value) {
  for (size_t i = 0; i < sizeof value; ++i) out += static_cast<char>(static_cast<unsigned char>(value >> (8 * i)));
}

void put_varint(std::string& out, uint64_t value) {
  for (; value >= 0x80; value >>= 7) out += static_cast<char>(static_cast<unsigned char>(value | 0x80));
  out += static_cast<char>(static_cast<unsigned char>(value));
}

// A protobuf key is field number << 3 | wire type.
enum class Wire : uint32_t { varint = 0, fixed64 = 1, bytes = 2, fixed32 = 5 };
void put_key(std::string& out, uint32_t field, Wire wire) { put_varint(out, field << 3 | static_cast<uint32_t>(wire)); }

void put_bytes(std::string& out, uint32_t field, std::string_view bytes) {
  put_key(out, field, Wire::bytes);
  put_varint(out, bytes.size());
  out += bytes;
}

std::string event_with_time(double wall_time) {
  std::string out;
  put_key(out, 1, Wire::fixed64);
  put_little_endian(out, std::bit_cast<uint64_t>(wall_time));
  return out;
}

void put_double(std::string& out, uint32_t field, double value) {
  put_key(out, field, Wire::fixed64);
  put_little_endian(out, std::bit_cast<uint64_t>(value));
}

std::string summary_event(int64_t step, double wall_time, const std::string& summary) {
  std::string out = event_with_time(wall_time);
  put_key(out, 2, Wire::varint);
  put_varint(out, static_cast<uint64_t>(step));
  put_bytes(out, 5, summary);
  return out;
}

std::string file_name(double wall_time) {
  static std::atomic<int> number{0};  // two files of one process may start within a second
  std::array<char, 32> seconds{};
  std::snprintf(seconds.data(), seconds.size(), "%010lld", static_cast<long long>(wall_time));
  return std::string("events.out.tfevents.") + seconds.data() + "." + host_name() + "." + std::to_string(::getpid()) + "." +
         std::to_string(number++);
}

}  // namespace

uint32_t crc32c(std::string_view bytes) { return reflected_crc<kCastagnoliPolynomial>(bytes); }

uint32_t masked_crc32c(std::string_view bytes) {
  const uint32_t crc = crc32c(bytes);
  return (crc >> 15 | crc << 17) + 0xa282ead8u;
}

std::string event_record(std::string_view data) {
  std::string out;
  put_little_endian(out, uint64_t{data.size()});
  put_little_endian(out, masked_crc32c(out));
  out += data;
  put_little_endian(out, masked_crc32c(data));
  return out;
}

std::string version_event(double wall_time) {
  std::string out = event_with_time(wall_time);
  put_bytes(out, 3, "brain.Event:2");
  return out;
}

std::string scalar_event(int64_t step, double wall_time, std::span<const TaggedValue> scalars) {
  std::string summary;
  for (const TaggedValue& scalar : scalars) {
    std::string value;
    put_bytes(value, 1, scalar.tag);
    put_key(value, 2, Wire::fixed32);
    put_little_endian(value, std::bit_cast<uint32_t>(scalar.value));
    put_bytes(summary, 1, value);
  }
  return summary_event(step, wall_time, summary);
}

std::string histogram_event(int64_t step, double wall_time, std::string_view tag, const std::map<int, int64_t>& counts) {
  require(!counts.empty(), "a histogram of nothing: ", tag);
  const int least = counts.begin()->first, greatest = counts.rbegin()->first;
  double number = 0.0, sum = 0.0, squares = 0.0;
  std::string ends, buckets;
  put_little_endian(ends,
                    std::bit_cast<uint64_t>(least - 0.5));  // an empty bucket first: TensorBoard takes its end for where the next begins
  put_little_endian(buckets, std::bit_cast<uint64_t>(0.0));
  for (int value = least; value <= greatest; ++value) {
    const auto found = counts.find(value);
    const double count = found == counts.end() ? 0.0 : static_cast<double>(found->second);
    number += count, sum += count * value, squares += count * value * value;
    put_little_endian(ends, std::bit_cast<uint64_t>(value + 0.5));
    put_little_endian(buckets, std::bit_cast<uint64_t>(count));
  }
  std::string histogram, value, summary;
  put_double(histogram, 1, least);
  put_double(histogram, 2, greatest);
  put_double(histogram, 3, number);
  put_double(histogram, 4, sum);
  put_double(histogram, 5, squares);
  put_bytes(histogram, 6, ends);
  put_bytes(histogram, 7, buckets);
  put_bytes(value, 1, tag);
  put_bytes(value, 5, histogram);
  put_bytes(summary, 1, value);
  return summary_event(step, wall_time, summary);
}

EventFile::EventFile(const std::filesystem::path& folder, double wall_time) : file_(folder / file_name(wall_time)) {
  file_.append(event_record(version_event(wall_time)));
}

void EventFile::write(int64_t step, double wall_time, std::span<const TaggedValue> scalars) {
  file_.append(event_record(scalar_event(step, wall_time, scalars)));
}

void EventFile::write_histogram(int64_t step, double wall_time, std::string_view tag, const std::map<int, int64_t>& counts) {
  file_.append(event_record(histogram_event(step, wall_time, tag, counts)));
}

}  // namespace mantissa
