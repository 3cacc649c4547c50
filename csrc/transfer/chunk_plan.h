// How the bytes of a tree of tensors are cut into copies. Pure arithmetic: no runtime, no memory.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace streamlap {

struct LeafExtent {
  std::size_t bytes;
  std::size_t element_bytes;  // a cut never falls inside an element
};

struct ChunkPolicy {
  std::size_t chunk_bytes = std::size_t{16} << 20;  // no copy is longer, but by one element
  std::size_t record_bytes = std::size_t{1} << 20;  // an event follows at least so many bytes
};

struct Chunk {
  std::size_t leaf;
  std::size_t offset;
  std::size_t bytes;
  std::size_t mark;  // index of the first event recorded at or after this copy
};

struct ChunkPlan {
  std::vector<Chunk> chunks;           // in order of issue; empty leaves have none
  std::vector<std::size_t> last_mark;  // per leaf: the event that makes it whole; no_mark if empty
  std::size_t marks = 0;               // events to record

  static constexpr std::size_t no_mark = static_cast<std::size_t>(-1);

  // True when an event is recorded right after chunk `index`.
  bool records_after(std::size_t index) const {
    return index + 1 == chunks.size() || chunks[index + 1].mark != chunks[index].mark;
  }
};

// Cuts each leaf into equal chunks (the last may be shorter). Small leaves share an event.
// Throws Error(invalid_argument) for a policy or an extent that makes no sense.
ChunkPlan plan_chunks(std::span<const LeafExtent> leaves, const ChunkPolicy& policy);

}  // namespace streamlap
