// The MAC by which ranks know each other, and the secret it is made with.
#include <gmock/gmock.h>
#include <sys/stat.h>

#include "files.h"
#include "job/rendezvous.h"
#include "job/store.h"

namespace mantissa::store_mac_test {

using ::testing::HasSubstr;

std::string hex_of_hmac(const std::string& key, const std::string& message) {
  std::string out;
  for (const std::byte byte : hmac_sha256(key, std::as_bytes(std::span(message)))) {
    for (const int digit : {std::to_integer<int>(byte >> 4), std::to_integer<int>(byte & std::byte{15})}) out += "0123456789abcdef"[digit];
  }
  return out;
}

// The algorithm is libcrypto's: a short key and one that is hashed first.
TEST(Handshake, HmacIsThatOfRfc4231) {
  EXPECT_EQ(hex_of_hmac("Jefe", "what do ya want for nothing?"), "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_EQ(hex_of_hmac(std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First"),
            "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
}

TEST(Handshake, MacDependsOnAllThatItIsOver) {
  const HelloBytes rank = new_hello({.rank = 1, .world = 2}), root = new_hello({.world = 2});
  const Mac mac = mac_of(MacSender::rank, "token", rank, root, "job");
  EXPECT_TRUE(same_mac(mac, mac_of(MacSender::rank, "token", rank, root, "job")));
  EXPECT_FALSE(same_mac(mac, mac_of(MacSender::root, "token", rank, root, "job"))) << "or it could be sent back";
  EXPECT_FALSE(same_mac(mac, mac_of(MacSender::rank, "token2", rank, root, "job")));
  EXPECT_FALSE(same_mac(mac, mac_of(MacSender::rank, "token", rank, root, "job2")));
  for (size_t i = 0; i < rank.size(); ++i) {
    HelloBytes other = rank;
    other[i] ^= std::byte{1};
    EXPECT_FALSE(same_mac(mac, mac_of(MacSender::rank, "token", other, root, "job"))) << i;
    other = root;
    other[i] ^= std::byte{1};
    EXPECT_FALSE(same_mac(mac, mac_of(MacSender::rank, "token", rank, other, "job"))) << i;
  }
  Mac wrong = mac;
  wrong.back() ^= std::byte{1};
  EXPECT_FALSE(same_mac(mac, wrong));
  EXPECT_FALSE(same_mac(std::span(mac).first(31), mac));
  EXPECT_NE(new_hello({}), new_hello({})) << "nonces";
}

TEST(JobToken, ComesFromTheEnvironmentOrAPrivateFile) {
  const test::TemporaryFolder folder;
  const std::string path = folder / "token", long_path = folder / "long";
  const auto write = [](const std::string& file, const std::string& content) {
    test::write_file(file, content);
    ::chmod(file.c_str(), 0600);
  };
  write(path, "0123456789abcdef\n");
  write(long_path, std::string(5000, 'x'));
  EXPECT_EQ(job_secret(Environment{}), std::nullopt);
  EXPECT_EQ(job_secret({{"MANTISSA_SECRET", "0123456789abcdef"}}), "0123456789abcdef");
  EXPECT_EQ(job_secret({{"MANTISSA_SECRET_FILE", path}}), "0123456789abcdef");
  const auto refused = [](const Environment& environment, const std::string& because) {
    const Error error = test::error_of([&] { job_secret(environment); });
    EXPECT_EQ(error.code(), ExitCode::usage);
    EXPECT_THAT(error.what(), HasSubstr(because));
  };
  refused({{"MANTISSA_SECRET", ""}}, "MANTISSA_SECRET: a secret must have 1 to 4095 bytes");
  refused({{"MANTISSA_SECRET", "a"}, {"MANTISSA_SECRET_FILE", path}}, "both set");
  refused({{"MANTISSA_SECRET_FILE", long_path}}, "a secret must have 1 to 4095 bytes");
  for (const std::string& other : {path + "x", folder.path().string()}) refused({{"MANTISSA_SECRET_FILE", other}}, "MANTISSA_SECRET_FILE");
  for (const mode_t mode : {0640U, 0604U, 0660U, 0644U, 0610U}) {
    ::chmod(path.c_str(), mode);
    refused({{"MANTISSA_SECRET_FILE", path}}, "other users can read this secret");
  }
  ::chmod(path.c_str(), 0400);
  EXPECT_TRUE(job_secret({{"MANTISSA_SECRET_FILE", path}}));
}

}  // namespace mantissa::store_mac_test
