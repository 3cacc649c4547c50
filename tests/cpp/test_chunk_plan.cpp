// How trees of leaves are cut: checked against what the header promises, not against a second plan.
#include "transfer/chunk_plan.h"

#include <random>

#include "base/errors.h"
#include "check.h"

using namespace streamlap;

namespace {

std::size_t rounded_up(std::size_t bytes, std::size_t element) {
  return (bytes + element - 1) / element * element;
}

// False, and told, when the plan breaks one promise.
bool good(const std::vector<LeafExtent>& leaves, const ChunkPolicy& policy) {
  const ChunkPlan plan = plan_chunks(leaves, policy);
  const int before = check::failures;
  CHECK_EQ(plan.last_mark.size(), leaves.size());
  std::size_t next = 0;
  std::size_t since_record = 0;
  std::size_t records = 0;
  for (std::size_t leaf = 0; leaf < leaves.size(); ++leaf) {
    const LeafExtent& extent = leaves[leaf];
    if (extent.bytes == 0) {
      CHECK_EQ(plan.last_mark[leaf], ChunkPlan::no_mark);
      continue;
    }
    std::size_t offset = 0;
    const std::size_t first = next;
    while (next < plan.chunks.size() && plan.chunks[next].leaf == leaf) {
      const Chunk& chunk = plan.chunks[next];
      CHECK_EQ(chunk.offset, offset);
      CHECK(chunk.bytes > 0);
      CHECK(chunk.bytes <= rounded_up(policy.chunk_bytes, extent.element_bytes));
      CHECK_EQ(chunk.bytes % extent.element_bytes, 0);
      const bool last = offset + chunk.bytes == extent.bytes;
      if (last) {
        CHECK(chunk.bytes <= plan.chunks[first].bytes);
      } else {
        CHECK_EQ(chunk.bytes, plan.chunks[first].bytes);
      }
      CHECK_EQ(chunk.mark, records);
      offset += chunk.bytes;
      since_record += chunk.bytes;
      if (plan.records_after(next)) {
        const bool at_end = next + 1 == plan.chunks.size();
        CHECK(at_end || since_record >= policy.record_bytes);
        since_record = 0;
        ++records;
      } else {
        CHECK(since_record < policy.record_bytes);
      }
      ++next;
    }
    CHECK_EQ(offset, extent.bytes);
    const std::size_t pieces = next - first;
    const std::size_t fewest = (extent.bytes - 1) / policy.chunk_bytes + 1;
    CHECK(pieces <= fewest);
    // The event that makes the leaf whole is recorded at or after its last chunk.
    REQUIRE(pieces > 0);
    CHECK_EQ(plan.last_mark[leaf], plan.chunks[next - 1].mark);
  }
  CHECK_EQ(next, plan.chunks.size());
  CHECK_EQ(records, plan.marks);
  return check::failures == before;
}

}  // namespace

TEST(every_small_case) {
  for (std::size_t element : {1, 2, 3, 4, 8, 16}) {
    for (std::size_t elements = 0; elements <= 40; ++elements) {
      for (std::size_t chunk = 1; chunk <= 70; ++chunk) {
        for (std::size_t record : {0, 1, 7, 64, 100000}) {
          REQUIRE(good({{elements * element, element}}, {chunk, record}));
        }
      }
    }
  }
}

TEST(random_trees) {
  std::mt19937_64 random(12345);
  auto below = [&](std::size_t n) { return static_cast<std::size_t>(random() % n); };
  for (int round = 0; round < 3000; ++round) {
    std::vector<LeafExtent> leaves;
    for (std::size_t i = below(12); i > 0; --i) {
      const std::size_t element = std::size_t{1} << below(5);
      leaves.push_back({below(4) == 0 ? 0 : below(3000) * element, element});
    }
    REQUIRE(good(leaves, {1 + below(5000), below(3) == 0 ? 0 : below(20000)}));
  }
}

TEST(equal_pieces_rather_than_a_short_tail) {
  const std::vector<LeafExtent> leaves{{33, 1}};
  const ChunkPlan plan = plan_chunks(leaves, {32, 1});
  REQUIRE(plan.chunks.size() == 2);
  CHECK_EQ(plan.chunks[0].bytes, 17);
  CHECK_EQ(plan.chunks[1].bytes, 16);
}

TEST(small_leaves_share_an_event) {
  const std::vector<LeafExtent> leaves{{10, 1}, {10, 1}, {0, 1}, {10, 1}, {10, 1}};
  const ChunkPlan plan = plan_chunks(leaves, {100, 20});
  CHECK_EQ(plan.marks, 2);
  CHECK(plan.last_mark == std::vector<std::size_t>({0, 0, ChunkPlan::no_mark, 1, 1}));
}

TEST(nothing_to_copy) {
  CHECK(plan_chunks({}, {}).chunks.empty());
  CHECK_EQ(plan_chunks({}, {}).marks, 0);
  const std::vector<LeafExtent> empties{{0, 4}, {0, 0}};
  const ChunkPlan plan = plan_chunks(empties, {});
  CHECK(plan.chunks.empty());
  CHECK_EQ(plan.marks, 0);
  CHECK(plan.last_mark == std::vector<std::size_t>(2, ChunkPlan::no_mark));
}

TEST(more_than_32_bits) {
  constexpr std::size_t GiB = std::size_t{1} << 30;
  CHECK(good({{5 * GiB + 4, 4}}, {16 << 20, 1 << 20}));
  CHECK(good({{7 * GiB, 1}, {4, 4}, {9 * GiB + 2, 2}}, {6 * GiB, GiB}));
  CHECK(good({{std::size_t{3} << 40, 8}}, {std::size_t{5} << 32, std::size_t{1} << 33}));
  CHECK(good({{5 * GiB, 1}}, {static_cast<std::size_t>(-1), 0}));
  const std::vector<LeafExtent> leaves{{static_cast<std::size_t>(-1), 1}};
  CHECK_EQ(plan_chunks(leaves, {static_cast<std::size_t>(-1), 0}).chunks.size(), 1);
}

TEST(one_element_longer_than_a_chunk) {
  CHECK(good({{64, 16}}, {1, 1}));
  CHECK(good({{std::size_t{6} << 30, std::size_t{3} << 30}}, {1 << 20, 1}));
}

TEST(what_makes_no_sense_is_refused) {
  const std::vector<LeafExtent> leaf{{8, 4}};
  CHECK_THROWS(plan_chunks(leaf, {0, 1}), Error);
  CHECK_THROWS(plan_chunks({}, {0, 1}), Error);
  const std::vector<LeafExtent> no_element{{8, 0}};
  CHECK_THROWS(plan_chunks(no_element, {}), Error);
  const std::vector<LeafExtent> split_element{{9, 4}};
  CHECK_THROWS(plan_chunks(split_element, {}), Error);
  try {
    plan_chunks(leaf, {0, 1});
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::invalid_argument);
  }
}
