#include "transfer/chunk_plan.h"

#include <algorithm>
#include <limits>

#include "base/errors.h"

namespace streamlap {
namespace {

// Equal parts cut at element boundaries, so that no short tail pays a whole copy's overhead.
std::size_t piece_bytes(const LeafExtent& leaf, std::size_t chunk_bytes) {
  const std::size_t pieces = (leaf.bytes - 1) / chunk_bytes + 1;
  const std::size_t elements = leaf.bytes / leaf.element_bytes;
  const std::size_t per_piece = (elements - 1) / pieces + 1;
  return per_piece * leaf.element_bytes;
}

}  // namespace

ChunkPlan plan_chunks(std::span<const LeafExtent> leaves, const ChunkPolicy& policy) {
  if (policy.chunk_bytes == 0) {
    throw Error(ErrorKind::invalid_argument, "chunk_bytes must be at least 1");
  }
  ChunkPlan plan;
  plan.last_mark.assign(leaves.size(), ChunkPlan::no_mark);
  std::size_t since_mark = 0;
  for (std::size_t index = 0; index < leaves.size(); ++index) {
    const LeafExtent& leaf = leaves[index];
    if (leaf.bytes == 0) continue;
    if (leaf.element_bytes == 0 || leaf.bytes % leaf.element_bytes != 0) {
      throw Error(ErrorKind::invalid_argument, "a leaf's bytes are no multiple of its element's");
    }
    const std::size_t piece = piece_bytes(leaf, policy.chunk_bytes);
    for (std::size_t offset = 0; offset < leaf.bytes; offset += piece) {
      const std::size_t bytes = std::min(piece, leaf.bytes - offset);
      plan.chunks.push_back({index, offset, bytes, plan.marks});
      since_mark += bytes;
      if (since_mark >= policy.record_bytes) {
        ++plan.marks;
        since_mark = 0;
      }
    }
    plan.last_mark[index] = plan.chunks.back().mark;
  }
  if (!plan.chunks.empty() && plan.chunks.back().mark == plan.marks) ++plan.marks;
  return plan;
}

}  // namespace streamlap
