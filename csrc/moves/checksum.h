// A number for many bytes that depends on each of them and on its place: to compare what is too
// large to be brought together. It finds faults, not forgers.
//
// Words of 8 bytes are mixed with their place and added up, so that any number of lanes can share
// the work in any order. The last word is filled up with zeros, and the length is mixed in.
#pragma once

#include <cstddef>
#include <cstdint>

#include "moves/on_both.h"
#include "moves/ranges.h"

namespace streamlap::moves {

// Each bit of the result depends on each bit of the number (the finalizer of SplitMix64, by Steele,
// Lea and Flood).
STREAMLAP_ON_BOTH std::uint64_t mixed(std::uint64_t number) {
  number = (number ^ number >> 30) * 0xbf58476d1ce4e5b9;
  number = (number ^ number >> 27) * 0x94d049bb133111eb;
  return number ^ number >> 31;
}

STREAMLAP_ON_BOTH std::uint64_t mixed_word(std::uint64_t word, std::uint64_t place) {
  return mixed(word ^ mixed(place + 0x9e3779b97f4a7c15));
}

// Up to 8 bytes, the first in the lowest place.
STREAMLAP_ON_BOTH std::uint64_t word_at(const std::byte* pointer, std::size_t bytes) {
  if (bytes == 8 && misalignment(pointer, 8) == 0) return loaded<std::uint64_t>(pointer);
  std::uint64_t word = 0;
  for (unsigned i = 0; i < bytes; ++i) {
    word |= std::uint64_t{loaded<std::uint8_t>(pointer + i)} << 8 * i;
  }
  return word;
}

// What this lane has of the sum over a range that begins at `place`, a multiple of 8.
STREAMLAP_ON_BOTH std::uint64_t sum_of_range(const std::byte* data, std::uint64_t place,
                                             std::size_t bytes, Lane lane) {
  std::uint64_t sum = 0;
  const std::size_t words = (bytes + 7) / 8;
  for (std::size_t at = lane.index; at < words; at += lane.count) {
    const std::size_t left = bytes - 8 * at;
    const std::uint64_t word = word_at(data + 8 * at, left < 8 ? left : 8);
    sum += mixed_word(word, place + 8 * at);
  }
  return sum;
}

// The number for `bytes` bytes whose sum it is.
STREAMLAP_ON_BOTH std::uint64_t checksum_of(std::uint64_t sum, std::uint64_t bytes) {
  return mixed(sum ^ mixed(bytes));
}

}  // namespace streamlap::moves
