#include "transfer/tree_plan.h"

#include <bit>
#include <limits>
#include <string>
#include <utility>

#include "base/errors.h"

namespace streamlap {
namespace {

using moves::Element;
using moves::Move;
using moves::Piece;
using moves::Way;

constexpr std::size_t most = std::numeric_limits<std::size_t>::max();

[[noreturn]] void refuse(const std::string& why) { throw Error(ErrorKind::invalid_argument, why); }

std::size_t bytes_of(std::size_t count, Element element) {
  if (count > most / moves::size_of(element)) refuse("the sizes of a tree overflow");
  return count * moves::size_of(element);
}

}  // namespace

TreePlan::TreePlan(std::vector<TreeLeaf> leaves, TreeOptions options)
    : leaves_(std::move(leaves)), options_(std::move(options)) {
  if (!std::has_single_bit(options_.align)) refuse("the alignment must be a power of two");
  const bool placed = !options_.offsets.empty();
  if (placed && options_.offsets.size() != leaves_.size()) {
    refuse(std::to_string(options_.offsets.size()) + " offsets for " +
           std::to_string(leaves_.size()) + " leaves");
  }
  const bool changes = options_.change.scales || options_.change.counts;
  for (std::size_t index = 0; index < leaves_.size(); ++index) {
    TreeLeaf& leaf = leaves_[index];
    if (leaf.from == leaf.to && !changes && leaf.from != Element::bytes) {
      leaf.count = bytes_of(leaf.count, leaf.from);
      leaf.from = leaf.to = Element::bytes;
    }
    bytes_of(leaf.count, leaf.from);
    const std::size_t bytes = near_bytes(index);
    if (placed) {
      offsets_.push_back(options_.offsets[index]);
    } else {
      if (range_bytes_ > most - (options_.align - 1)) refuse("the sizes of a tree overflow");
      range_bytes_ = (range_bytes_ + options_.align - 1) & ~(options_.align - 1);
      offsets_.push_back(range_bytes_);
      if (bytes > most - range_bytes_) refuse("the sizes of a tree overflow");
      range_bytes_ += bytes;
    }
    if (leaf.count == 0) continue;
    Group* group = nullptr;
    for (Group& known : groups_) {
      const bool same = known.move.from == leaf.from && known.move.to == leaf.to;
      if (same && !leaf.layout && !known.move.layout) group = &known;
    }
    if (group == nullptr) {
      group = &groups_.emplace_back();
      group->move.way = options_.way;
      group->move.from = leaf.from;
      group->move.to = leaf.to;
      if (leaf.from != Element::bytes) group->move.change = options_.change;
      group->move.grid = options_.grid;
      group->move.layout = leaf.layout;
    }
    group->move.pieces.push_back({nullptr, offsets_.back(), leaf.count, 0, 0});
    group->leaves.push_back(index);
  }
  if (placed) range_bytes_ = options_.range_bytes;
  for (Group& group : groups_) moves::number_tiles(group.move);
  std::vector<moves::Extent> places;
  for (std::size_t index = 0; index < leaves_.size(); ++index) {
    const std::size_t bytes = near_bytes(index);
    if (bytes == 0) continue;
    if (bytes > range_bytes_ || offsets_[index] > range_bytes_ - bytes) {
      refuse("leaf " + std::to_string(index) + " is not inside the range of " +
             std::to_string(range_bytes_) + " bytes");
    }
    places.push_back({offsets_[index], offsets_[index] + bytes});
  }
  if (options_.way == Way::gather && moves::any_overlap(places)) {
    refuse("two destinations of a tree overlap");
  }
}

std::size_t TreePlan::near_bytes(std::size_t leaf) const {
  const TreeLeaf& is = leaves_.at(leaf);
  return bytes_of(is.count, options_.way == Way::gather ? is.to : is.from);
}

std::size_t TreePlan::far_bytes(std::size_t leaf) const {
  const TreeLeaf& is = leaves_.at(leaf);
  return bytes_of(is.count, options_.way == Way::gather ? is.from : is.to);
}

std::size_t TreePlan::counts() const noexcept {
  std::size_t counting = 0;
  for (const Group& group : groups_) counting += group.move.change.counts;
  return counting * options_.grid.blocks;
}

std::vector<moves::MovePtr> TreePlan::bind(std::span<void* const> far, void* base,
                                           std::uint64_t* counts,
                                           std::optional<float> scale) const {
  if (scale && !options_.change.scales) refuse("a scale for a plan that was made without one");
  if (far.size() != leaves_.size()) {
    refuse(std::to_string(far.size()) + " addresses for " + std::to_string(leaves_.size()) +
           " leaves");
  }
  std::vector<moves::MovePtr> made;
  std::vector<moves::Extent> written;
  for (const Group& group : groups_) {
    auto move = std::make_shared<Move>(group.move);
    move->base = static_cast<std::byte*>(base);
    move->base_bytes = range_bytes_;
    if (scale && move->change.scales) move->change.scale = *scale;
    if (move->change.counts) {
      move->counts = counts;
      if (counts != nullptr) counts += options_.grid.blocks;
    }
    for (std::size_t i = 0; i < group.leaves.size(); ++i) {
      move->pieces[i].far = static_cast<std::byte*>(far[group.leaves[i]]);
    }
    moves::check(*move);
    made.push_back(std::move(move));
  }
  if (options_.way == Way::scatter && groups_.size() > 1) {  // else the move's own check has told
    for (std::size_t index = 0; index < far.size(); ++index) {
      // Of those that lie apart only the spans are known, and spans may interleave.
      if (leaves_[index].count == 0 || leaves_[index].layout) continue;
      const auto begin = reinterpret_cast<std::uintptr_t>(far[index]);
      written.push_back({begin, begin + far_bytes(index)});
    }
    if (moves::any_overlap(written)) refuse("two destinations of a tree overlap");
  }
  return made;
}

}  // namespace streamlap
