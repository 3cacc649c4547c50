// Copies past the caches: bit for bit, whatever the alignment and the size, and nothing beside.
#include "base/stream_copy.h"

#include <cstring>
#include <random>
#include <vector>

#include "check.h"

using namespace streamlap;

namespace {

std::vector<StoreWidth> widths() {
  std::vector<StoreWidth> all{StoreWidth::plain};
  if (widest_store() != StoreWidth::plain) all.push_back(StoreWidth::avx2);
  if (widest_store() == StoreWidth::avx512) all.push_back(StoreWidth::avx512);
  return all;
}

std::vector<unsigned char> random_bytes(std::size_t count) {
  std::mt19937_64 random(11);
  std::vector<unsigned char> bytes(count);
  for (unsigned char& byte : bytes) byte = static_cast<unsigned char>(random());
  return bytes;
}

}  // namespace

TEST(every_alignment_and_size) {
  constexpr std::size_t margin = 128;
  constexpr std::size_t most = 1200;
  constexpr unsigned char untouched = 0xEE;
  const std::vector<unsigned char> source = random_bytes(margin + most);
  std::vector<unsigned char> out(most + 3 * margin);
  for (StoreWidth width : widths()) {
    for (std::size_t to = 0; to < 64; ++to) {
      for (std::size_t from : {0, 1, 31, 63}) {
        for (std::size_t bytes = 0; bytes <= most; bytes += bytes < 600 ? 1 : 37) {
          std::memset(out.data(), untouched, out.size());
          unsigned char* dst = out.data() + margin + to;
          stream_copy(dst, source.data() + from, bytes, width);
          bool right = std::memcmp(dst, source.data() + from, bytes) == 0;
          for (std::size_t i = 0; i < margin; ++i) {
            right = right && dst[-1 - static_cast<std::ptrdiff_t>(i)] == untouched &&
                    dst[bytes + i] == untouched;
          }
          REQUIRE(right);
        }
      }
    }
  }
}

TEST(large_pieces_at_odd_places) {
  constexpr std::size_t bytes = (std::size_t{1} << 20) + 77;
  const std::vector<unsigned char> source = random_bytes(bytes + 64);
  std::vector<unsigned char> out(bytes + 64, 0);
  for (std::size_t offset : {0, 5, 63}) {
    stream_copy(out.data() + offset, source.data() + 3, bytes);
    CHECK(std::memcmp(out.data() + offset, source.data() + 3, bytes) == 0);
  }
}
