#include "pattern.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "machine.h"

namespace bench {
namespace {

constexpr std::size_t word = sizeof(std::uint64_t);

std::uint64_t word_at(std::size_t seed, std::size_t index) {
  std::uint64_t value = (index + seed * 0x9E3779B97F4A7C15u) * 0xBF58476D1CE4E5B9u;
  value ^= value >> 29;
  return value * 0x94D049BB133111EBu;
}

// Calls body(begin, bytes, source) for pieces that lie within one word of the pattern each.
template <class Body>
bool each_word(std::size_t bytes, std::size_t seed, std::size_t from, Body body) {
  for (std::size_t at = 0; at < bytes;) {
    const std::size_t skip = (from + at) % word;
    const std::size_t length = std::min(word - skip, bytes - at);
    const std::uint64_t value = word_at(seed, (from + at) / word);
    if (!body(at, length, reinterpret_cast<const char*>(&value) + skip)) return false;
    at += length;
  }
  return true;
}

// For the tests of the checks: a result that is not what it should be.
bool broken_on_purpose() {
  static const bool broken = std::getenv("STREAMLAP_BENCH_BREAK") != nullptr;
  return broken;
}

}  // namespace

void in_parallel(std::size_t bytes,
                 const std::function<void(std::size_t begin, std::size_t end)>& body) {
  constexpr std::size_t worth_a_thread = std::size_t{4} << 20;
  static const std::size_t cores = std::min<std::size_t>(this_machine().cores, 8);
  const std::size_t threads = std::clamp<std::size_t>(bytes / worth_a_thread, 1, cores);
  const std::size_t share = bytes / threads / 4096 * 4096;
  std::vector<std::jthread> team;
  for (std::size_t i = 1; i < threads; ++i) {
    team.emplace_back([&, i] { body(i * share, i + 1 == threads ? bytes : (i + 1) * share); });
  }
  body(0, threads == 1 ? bytes : share);
}

void write_pattern(void* memory, std::size_t bytes, std::size_t seed, std::size_t from) {
  in_parallel(bytes, [&](std::size_t begin, std::size_t end) {
    char* out = static_cast<char*>(memory) + begin;
    each_word(end - begin, seed, from + begin,
              [&](std::size_t at, std::size_t length, const char* source) {
                if (length == word) {
                  std::memcpy(out + at, source, word);  // a fixed length: no call
                } else {
                  std::memcpy(out + at, source, length);
                }
                return true;
              });
  });
}

bool has_pattern(const void* memory, std::size_t bytes, std::size_t seed, std::size_t from) {
  std::atomic<bool> right{!broken_on_purpose()};
  in_parallel(bytes, [&](std::size_t begin, std::size_t end) {
    const char* in = static_cast<const char*>(memory) + begin;
    const bool same =
        each_word(end - begin, seed, from + begin,
                  [&](std::size_t at, std::size_t length, const char* source) {
                    return (length == word ? std::memcmp(in + at, source, word)
                                           : std::memcmp(in + at, source, length)) == 0;
                  });
    if (!same) right = false;
  });
  return right;
}

void poison(void* memory, std::size_t bytes) {
  in_parallel(bytes, [&](std::size_t begin, std::size_t end) {
    std::memset(static_cast<char*>(memory) + begin, 0xA5, end - begin);
  });
}

bool same_bytes(const void* a, const void* b, std::size_t bytes) {
  std::atomic<bool> right{!broken_on_purpose()};
  in_parallel(bytes, [&](std::size_t begin, std::size_t end) {
    if (std::memcmp(static_cast<const char*>(a) + begin, static_cast<const char*>(b) + begin,
                    end - begin) != 0) {
      right = false;
    }
  });
  return right;
}

}  // namespace bench
