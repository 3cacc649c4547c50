// A plan for a tree of tensors that is copied again and again: where each leaf lies in one range,
// worked out once, and moves made of it for the addresses of each time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "moves/move.h"

namespace streamlap {

struct TreeLeaf {
  moves::Element from = moves::Element::bytes;
  moves::Element to = moves::Element::bytes;
  std::size_t count = 0;  // elements; of bytes: bytes
  // How the far side lies where it is not one range.
  std::optional<moves::Layout> layout = std::nullopt;
};

struct TreeOptions {
  moves::Way way = moves::Way::gather;
  // Leaves begin at multiples of this, a power of two.
  std::size_t align = 256;
  // Where they begin instead, one for each leaf, in a range of so many bytes.
  std::vector<std::size_t> offsets = {};
  std::size_t range_bytes = 0;
  // Of leaves that are no bytes.
  moves::Change change = {};
  moves::Grid grid = {};
};

// Thread-safe: it does not change. Errors are Error(invalid_argument), before anything is enqueued.
class TreePlan {
 public:
  // Refuses casts that there are not, sizes that overflow, and destinations that overlap.
  TreePlan(std::vector<TreeLeaf> leaves, TreeOptions options);

  std::size_t size() const noexcept { return leaves_.size(); }
  // Of the one range.
  std::size_t range_bytes() const noexcept { return range_bytes_; }
  const std::vector<std::size_t>& offsets() const noexcept { return offsets_; }
  const TreeOptions& options() const noexcept { return options_; }
  // A leaf's bytes in the one range, and on the other side.
  std::size_t near_bytes(std::size_t leaf) const;
  std::size_t far_bytes(std::size_t leaf) const;
  // How many moves one time takes.
  std::size_t move_count() const noexcept { return groups_.size(); }
  // How many numbers a count of non-finite elements needs: see moves::Move::counts.
  std::size_t counts() const noexcept;

  // The moves of one time, in order: one for each pair of types, and for each leaf with a layout.
  // `far` has an address for each leaf, which may be null for an empty one. Refuses memory that is
  // not there and ranges that overlap. `scale` replaces the plan's own, if that scales.
  std::vector<moves::MovePtr> bind(std::span<void* const> far, void* base, std::uint64_t* counts,
                                   std::optional<float> scale = std::nullopt) const;

 private:
  // Leaves of one pair of types, or one with a layout.
  struct Group {
    moves::Move move;                 // without addresses
    std::vector<std::size_t> leaves;  // of its pieces
  };

  std::vector<TreeLeaf> leaves_;
  TreeOptions options_;
  std::vector<std::size_t> offsets_;
  std::size_t range_bytes_ = 0;
  std::vector<Group> groups_;
};

}  // namespace streamlap
