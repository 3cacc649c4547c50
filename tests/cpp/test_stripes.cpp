// Gathers by way of device memory: every byte where the gather itself would have put it, in stripes
// that follow each other, and a source that is free as soon as it is packed.
#include "transfer/stripes.h"

#include <algorithm>
#include <random>

#include "lab.h"
#include "transfer/copy_engine.h"
#include "transfer/tree_plan.h"

using namespace streamlap;
using namespace streamlap::testing;

namespace {

using moves::Element;

constexpr std::size_t large = std::size_t{4} << 20;  // as much as is cut into stripes

struct Tree {
  const char* name;
  std::vector<TreeLeaf> leaves;
  std::size_t far_bytes;  // of each leaf's memory
};

moves::Layout transposed(std::uint64_t rows, std::uint64_t columns, std::uint32_t element) {
  moves::Layout layout;
  layout.dims = 2;
  layout.element_bytes = element;
  layout.sizes[0] = rows;
  layout.sizes[1] = columns;
  layout.strides[0] = element;
  layout.strides[1] = static_cast<std::int64_t>(rows * element);
  return layout;
}

std::vector<Tree> trees() {
  std::vector<Tree> all;
  all.push_back({"many small leaves", {}, 5000});
  for (std::size_t i = 0; i < 1000; ++i) {
    all.back().leaves.push_back({Element::bytes, Element::bytes, i % 7 == 0 ? 5000 : 4096 + i % 5});
  }
  all.push_back({"a huge one among small ones", {}, large + 9});
  for (std::size_t i = 0; i < 5; ++i) {
    all.back().leaves.push_back({Element::bytes, Element::bytes, i == 2 ? large + 9 : 100});
  }
  all.push_back({"a cast", {{Element::float32, Element::bfloat16, large + 3}}, 4 * (large + 3)});
  all.push_back({"little", {{Element::bytes, Element::bytes, 1000}}, 1000});
  for (auto [rows, columns] : {std::pair{1100, 1001}, {3, 400'001}, {400'001, 3}, {1, 1 << 20}}) {
    const std::size_t bytes = 4u * rows * columns;
    TreeLeaf leaf{Element::bytes, Element::bytes, bytes};
    leaf.layout = transposed(rows, columns, 4);
    all.push_back({"a transpose", {leaf}, bytes});
  }
  return all;
}

// One tree's move and its stripes, with the memory of both.
struct Packing {
  Packing(const Tree& tree, unsigned seed) : plan(tree.leaves, {}) {
    std::mt19937_64 random(seed);
    far_memory.resize(tree.leaves.size() * (tree.far_bytes + 8) / 8 + 8);
    for (std::uint64_t& word : far_memory) word = random();
    for (std::size_t i = 0; i < tree.leaves.size(); ++i) {
      far.push_back(far_memory.data() + i * ((tree.far_bytes + 8) / 8));
    }
    expected.resize(plan.range_bytes() / 8 + 1);
    scratch.resize(expected.size());
    moves::run(*plan.bind(far, expected.data(), nullptr)[0]);
  }

  Stripes stripes(std::byte* host) {
    return stripes_of(*plan.bind(far, scratch.data(), nullptr)[0], host, 4);
  }

  TreePlan plan;
  std::vector<std::uint64_t> far_memory;
  std::vector<void*> far;
  std::vector<std::uint64_t> expected;
  std::vector<std::uint64_t> scratch;
};

}  // namespace

TEST(stripes_follow_each_other_and_hold_all_that_is_moved) {
  for (const Tree& tree : trees()) {
    Packing packing(tree, 11);
    std::vector<std::uint64_t> host(packing.expected.size(), 0);
    auto* begin = reinterpret_cast<std::byte*>(host.data());
    const Stripes stripes = packing.stripes(begin);
    REQUIRE(stripes.moves.size() == stripes.landings.size());
    const auto& layout = tree.leaves[0].layout;
    const bool can_be_cut = !layout || layout->sizes[0] > 1;
    const bool is_large = packing.plan.range_bytes() >= large && can_be_cut;
    CHECK_EQ(stripes.moves.size() > 1, is_large);
    CHECK(stripes.moves.size() <= 4);
    const std::byte* end = begin;
    for (std::size_t i = 0; i < stripes.moves.size(); ++i) {
      const Landing& landing = stripes.landings[i];
      moves::check(*stripes.moves[i]);
      moves::run(*stripes.moves[i]);
      // All of a stripe lies within its landing: what is copied once may be packed no more.
      CHECK(landing.dst >= end);
      end = static_cast<std::byte*>(landing.dst) + landing.bytes;
      std::memcpy(landing.dst, landing.src, landing.bytes);
      // The first is soon packed.
      if (i == 0 && is_large && !layout) CHECK(landing.bytes < large * 5 / 8);
    }
    CHECK(end <= begin + packing.plan.range_bytes());
    CHECK(std::memcmp(host.data(), packing.expected.data(), packing.plan.range_bytes()) == 0);
  }
}

ON_EACH_RUNTIME(every_byte_goes_through_scratch_memory) {
  CopyEngine engine(lab.runtime);
  const std::size_t leaf = large / 4 + 100;
  const TreePlan plan(std::vector<TreeLeaf>(5, {Element::bytes, Element::bytes, leaf}), {});
  StreamRef producer = lab.compute();
  std::vector<std::shared_ptr<DeviceBytes>> sources;
  std::vector<void*> far;
  auto scratch = lab.device(plan.range_bytes());
  auto out = lab.pinned(plan.range_bytes());
  TransferRequest request;
  for (int i = 0; i < 5; ++i) {
    sources.push_back(lab.device(leaf));
    far.push_back(sources.back()->data());
    lab.produce(producer, far.back(), i + 1, leaf);
    request.items.push_back({out->data() + plan.offsets()[i], far.back(), leaf, 1, nullptr});
  }
  Stripes stripes = stripes_of(*plan.bind(far, scratch->data(), nullptr)[0],
                               reinterpret_cast<std::byte*>(out->data()), 4);
  REQUIRE(stripes.moves.size() == 2);
  request.moves = stripes.moves;
  request.landings = stripes.landings;
  request.after = {producer};
  request.policy.chunk_bytes = large / 8;
  auto transfer = engine.submit(std::move(request));
  // A source is free as soon as it is packed: whoever waits for that may write it at once.
  transfer->stream_wait_source(producer);
  for (void* source : far) lab.produce(producer, source, 9, leaf);
  REQUIRE(transfer->sync_for(patience));
  for (int i = 0; i < 5; ++i) {
    const unsigned char* at = out->data() + plan.offsets()[i];
    CHECK(std::all_of(at, at + leaf, [&](unsigned char byte) { return byte == i + 1; }));
  }
}

ON_EACH_RUNTIME(a_source_is_free_while_its_bytes_are_on_the_wire) {
  CopyEngine engine(lab.runtime);
  const std::size_t size = 4096;
  const TreePlan plan({{Element::bytes, Element::bytes, size}}, {});
  auto source = lab.device(size, 1);
  auto scratch = lab.device(size);
  auto out = lab.pinned(size);
  const std::vector<void*> far = {source->data()};
  Stripes stripes = stripes_of(*plan.bind(far, scratch->data(), nullptr)[0],
                               reinterpret_cast<std::byte*>(out->data()), 4);
  auto gate = lab.runtime->gate(engine.copy_stream(0, Direction::to_host));
  TransferRequest request;
  request.items = {{out->data(), source->data(), size, 1, nullptr}};
  request.moves = stripes.moves;
  request.landings = stripes.landings;
  auto transfer = engine.submit(std::move(request));
  CHECK(transfer->source_sync_for(patience));
  CHECK(!transfer->done());
  StreamRef writer = lab.compute();
  transfer->stream_wait_source(writer);
  lab.produce(writer, source->data(), 2, size);
  lab.runtime->stream_sync(writer, here);
  gate->open();
  REQUIRE(transfer->sync_for(patience));
  CHECK(out->holds(1));
}

ON_EACH_RUNTIME(a_move_without_a_landing_is_refused) {
  CopyEngine engine(lab.runtime);
  const TreePlan plan({{Element::bytes, Element::bytes, 64}}, {});
  auto source = lab.device(64, 1);
  auto out = lab.pinned(64);
  const std::vector<void*> far = {source->data()};
  TransferRequest request;
  request.items = {{out->data(), source->data(), 64, 1, nullptr}};
  request.moves = plan.bind(far, out->data(), nullptr);
  request.landings.resize(2);
  CHECK_THROWS(engine.submit(std::move(request)), Error);
  CHECK(out->holds(poison));
}
