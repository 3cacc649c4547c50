// The pool of page-locked blocks: sizes, the hard limit, reuse only after the events, and recovery.
#include "transfer/pinned_pool.h"

#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <functional>
#include <random>
#include <set>
#include <thread>

#include "lab.h"

using namespace streamlap;
using namespace streamlap::testing;

namespace {

constexpr std::size_t KiB = 1 << 10;
constexpr std::size_t MiB = 1 << 20;
constexpr std::size_t GiB = 1 << 30;
constexpr std::size_t plenty = 64 * GiB;

// Counts what is page-locked; refuses beyond a cap or on demand; may hand out addresses alone.
class Upstream final : public ProxyRuntime {
 public:
  using ProxyRuntime::ProxyRuntime;

  void* alloc_pinned(std::size_t bytes) override {
    ++calls;
    if (on_alloc) on_alloc(bytes);
    if (refuse > 0) {
      --refuse;
      throw Error(ErrorKind::out_of_memory, "refused " + std::to_string(bytes) + " bytes");
    }
    if (break_next.exchange(false)) throw Error(ErrorKind::runtime, "broken");
    const std::size_t now_held = held += bytes;
    if (now_held > cap) {
      held -= bytes;
      throw Error(ErrorKind::out_of_memory, "over the cap");
    }
    void* pointer = ProxyRuntime::alloc_pinned(bytes);
    std::size_t seen = most;
    while (now_held > seen && !most.compare_exchange_weak(seen, now_held)) {
    }
    return pointer;
  }
  void free_pinned(void* pointer, std::size_t bytes) noexcept override {
    held -= bytes;
    ProxyRuntime::free_pinned(pointer, bytes);
  }

  std::function<void(std::size_t)> on_alloc;  // in the thread that asks
  std::atomic<std::size_t> held{0};
  std::atomic<std::size_t> most{0};
  std::atomic<std::size_t> cap{plenty};
  std::atomic<int> calls{0};
  std::atomic<int> refuse{0};
  std::atomic<bool> break_next{false};
};

struct PoolLab : Lab {
  explicit PoolLab(std::size_t limit)
      : PoolLab(std::make_shared<Upstream>(host_backend()), limit) {}
  PoolLab(std::shared_ptr<Upstream> counted, std::size_t limit)
      : Lab(counted), upstream(counted), pool(std::make_shared<PinnedPool>(counted, limit)) {}

  std::shared_ptr<PinnedBlock> allocate(std::size_t bytes) {
    auto block = pool->try_allocate(bytes);
    REQUIRE(block != nullptr);
    return block;
  }
  void add_up() {
    const PoolStats stats = pool->stats();
    CHECK_EQ(stats.live + stats.in_flight + stats.cached + stats.growing, stats.reserved);
    CHECK_EQ(stats.reserved, upstream->held.load());
    CHECK(stats.reserved <= stats.peak);
    CHECK(stats.peak <= stats.limit);
    CHECK(stats.waste <= stats.live);
  }

  std::shared_ptr<Upstream> upstream;
  std::shared_ptr<PinnedPool> pool;
};

std::size_t resident() {
  std::FILE* file = std::fopen("/proc/self/statm", "r");
  unsigned long pages = 0;
  unsigned long resident_pages = 0;
  const int fields = std::fscanf(file, "%lu %lu", &pages, &resident_pages);
  std::fclose(file);
  REQUIRE(fields == 2);
  return resident_pages * 4096;
}

}  // namespace

// ---- sizes
// ----------------------------------------------------------------------------------------

TEST(rounding_wastes_an_eighth_at_most) {
  auto good = [](std::size_t bytes) {
    const std::size_t block = PinnedPool::size_class(bytes);
    CHECK(block >= bytes);
    CHECK(block >= PinnedPool::smallest_block);
    if (bytes >= PinnedPool::smallest_block) CHECK((block - bytes) * 8 <= bytes);
    CHECK_EQ(PinnedPool::size_class(block), block);
  };
  for (std::size_t bytes = 0; bytes < 200'000; ++bytes) good(bytes);
  for (int shift = 12; shift < 61; ++shift) {
    for (int delta = -2; delta <= 2; ++delta) {
      const std::size_t at = std::size_t{1} << shift;
      good(at + static_cast<std::size_t>(delta));
      for (std::size_t eighth = 1; eighth < 8; ++eighth) {
        good(at + at / 8 * eighth + static_cast<std::size_t>(delta));
      }
    }
  }
  std::mt19937_64 random(1);
  for (int i = 0; i < 100'000; ++i) good(static_cast<std::size_t>(random() >> (3 + i % 50)));
  CHECK_THROWS(PinnedPool::size_class(static_cast<std::size_t>(-1)), Error);
  CHECK_THROWS(PinnedPool::size_class(std::size_t{1} << 63), Error);
}

TEST(few_sizes_per_power_of_two) {
  std::set<std::size_t> classes;
  for (std::size_t bytes = MiB + 1; bytes <= 2 * MiB; bytes += 1 * KiB) {
    classes.insert(PinnedPool::size_class(bytes));
  }
  CHECK_EQ(classes.size(), 8);
}

TEST(a_gigabyte_and_one_byte) {
  PoolLab lab(4 * GiB);
  auto block = lab.allocate(GiB + 1);
  CHECK(block->capacity() >= GiB + 1);
  const PoolStats stats = lab.pool->stats();
  CHECK_EQ(stats.waste, block->capacity() - (GiB + 1));
  CHECK(stats.waste * 8 <= GiB + 1);
  CHECK_EQ(stats.live, block->capacity());
  block->data()[GiB] = std::byte{1};
  lab.add_up();
}

TEST(no_bytes_are_a_block_too) {
  PoolLab lab(MiB);
  auto first = lab.allocate(0);
  auto second = lab.allocate(0);
  CHECK(first->data() != second->data());
}

TEST(a_limit_below_the_smallest_block_is_refused) {
  CHECK_THROWS(PoolLab(4095), Error);
  PoolLab lab(4096);
  CHECK_THROWS(lab.pool->set_limit(0), Error);
  CHECK_EQ(lab.pool->limit(), 4096);
  lab.allocate(4096);
}

// ---- reuse
// ----------------------------------------------------------------------------------------

TEST(an_unused_block_comes_back_at_once) {
  PoolLab lab(MiB);
  auto* data = lab.allocate(10'000)->data();
  auto again = lab.allocate(10'000);
  CHECK(again->data() == data);
  const PoolStats stats = lab.pool->stats();
  CHECK_EQ(stats.hits, 1);
  CHECK_EQ(stats.misses, 1);
  CHECK_EQ(lab.upstream->calls.load(), 1);
}

TEST(a_block_comes_back_only_after_its_uses) {
  PoolLab lab(MiB);
  StreamRef stream = lab.copy();
  auto block = lab.allocate(8192);
  auto* data = block->data();
  auto gate = lab.runtime->gate(stream);
  block->record_use(stream);
  block.reset();
  CHECK_EQ(lab.pool->stats().in_flight, 8192);
  auto other = lab.allocate(8192);
  CHECK(other->data() != data);
  gate->open();
  lab.runtime->stream_sync(stream, here);
  CHECK_EQ(lab.pool->stats().in_flight, 0);
  CHECK(lab.allocate(8192)->data() == data);
  lab.add_up();
}

TEST(every_use_counts_not_only_the_last) {
  PoolLab lab(MiB);
  StreamRef first = lab.copy();
  StreamRef second = lab.copy();
  auto block = lab.allocate(8192);
  auto* data = block->data();
  auto first_gate = lab.runtime->gate(first);
  auto second_gate = lab.runtime->gate(second);
  block->record_use(first);
  block->record_use(second);
  block.reset();
  second_gate->open();
  lab.runtime->stream_sync(second, here);
  CHECK(lab.allocate(8192)->data() != data);
  first_gate->open();
  lab.runtime->stream_sync(first, here);
  CHECK_EQ(lab.pool->stats().in_flight, 0);
}

TEST(a_slow_event_holds_back_no_other_block) {
  PoolLab lab(MiB);
  StreamRef slow = lab.copy();
  StreamRef fast = lab.copy();
  auto held = lab.allocate(8192);
  auto free = lab.allocate(8192);
  auto* data = free->data();
  auto gate = lab.runtime->gate(slow);
  held->record_use(slow);
  held.reset();
  free->record_use(fast);
  free.reset();
  lab.runtime->stream_sync(fast, here);
  CHECK(lab.allocate(8192)->data() == data);
  gate->open();
}

TEST(a_use_captures_the_work_so_far) {
  PoolLab lab(MiB);
  StreamRef stream = lab.copy();
  auto block = lab.allocate(8192);
  auto* data = block->data();
  block->record_use(stream);
  EventPtr before = lab.record(stream);
  auto gate = lab.runtime->gate(stream);  // later work: none of this block's business
  CHECK(lab.in_time(before));
  block.reset();
  CHECK(lab.allocate(8192)->data() == data);
  gate->open();
}

TEST(many_uses_of_one_block_are_all_kept) {
  PoolLab lab(MiB);
  StreamRef slow = lab.copy();
  StreamRef fast = lab.copy();
  auto block = lab.allocate(8192);
  auto gate = lab.runtime->gate(slow);
  block->record_use(slow);
  for (int i = 0; i < 300; ++i) block->record_use(fast);
  lab.runtime->stream_sync(fast, here);
  block.reset();
  CHECK_EQ(lab.pool->stats().in_flight, 8192);
  gate->open();
  lab.runtime->stream_sync(slow, here);
  CHECK_EQ(lab.pool->stats().in_flight, 0);
}

TEST(who_writes_to_a_block_again_finds_its_uses) {
  PoolLab lab(MiB);
  StreamRef stream = lab.copy();
  auto block = lab.allocate(10'000);
  int foreign = 0;
  CHECK(lab.pool->uses(&foreign).empty());
  CHECK(lab.pool->uses(block->data()).empty());
  auto gate = lab.runtime->gate(stream);
  block->record_use(stream);
  auto found = lab.pool->uses(block->data() + 9'999);
  CHECK_EQ(found.size(), 1);
  CHECK(!lab.runtime->event_query(*found[0], here));
  gate->open();
  CHECK(lab.in_time(found[0]));
  CHECK_EQ(lab.pool->uses(block->data()).size(), 1);  // they still hold the block back
  block.reset();
  auto again = lab.allocate(10'000);
  CHECK(lab.pool->uses(again->data()).empty());
}

TEST(a_failed_use_releases_its_block) {
  PoolLab lab(MiB);
  StreamRef stream = lab.copy();
  auto block = lab.allocate(8192);
  auto* data = block->data();
  lab.runtime->launch([] { throw std::runtime_error("boom"); }, stream);
  block->record_use(stream);
  block.reset();
  CHECK_THROWS(lab.runtime->stream_sync(stream, here), std::runtime_error);
  CHECK(lab.allocate(8192)->data() == data);
}

TEST(uses_are_recorded_by_any_pointer_into_a_live_block) {
  PoolLab lab(MiB);
  StreamRef stream = lab.copy();
  int foreign = 0;
  CHECK(!lab.pool->record_use(&foreign, stream));
  CHECK(!lab.pool->record_use(nullptr, stream));
  auto block = lab.allocate(10'000);
  CHECK(!lab.pool->record_use(&foreign, stream));
  CHECK(!lab.pool->record_use(block->data() - 1, stream));
  CHECK(!lab.pool->record_use(block->data() + block->capacity(), stream));
  CHECK(lab.pool->record_use(block->data(), stream));
  CHECK(lab.pool->record_use(block->data() + block->capacity() - 1, stream));
  auto gate = lab.runtime->gate(stream);
  CHECK(lab.pool->record_use(block->data() + 5000, stream));
  const auto* data = block->data();
  block.reset();
  CHECK_EQ(lab.pool->stats().in_flight, PinnedPool::size_class(10'000));
  CHECK(!lab.pool->record_use(data, stream));  // nobody holds it any more
  gate->open();
}

TEST(a_condemned_block_never_comes_back) {
  PoolLab lab(64 * KiB);
  auto block = lab.allocate(8192);
  auto* data = block->data();
  block->condemn();
  block.reset();
  CHECK_EQ(lab.pool->stats().live, 8192);
  lab.pool->trim();
  std::vector<std::shared_ptr<PinnedBlock>> all;
  for (int i = 0; i < 7; ++i) {
    all.push_back(lab.allocate(8192));
    CHECK(all.back()->data() != data);
  }
  CHECK_THROWS(lab.pool->try_allocate(8192), PoolExhausted);
  CHECK_EQ(lab.upstream->held.load(), 64 * KiB);
  lab.add_up();
}

TEST(blocks_outlive_the_last_reference_to_their_pool) {
  auto upstream = std::make_shared<Upstream>(host_backend());
  auto pool = std::make_shared<PinnedPool>(upstream, MiB);
  auto block = pool->try_allocate(8192);
  pool.reset();
  block->data()[8191] = std::byte{1};
  CHECK_EQ(upstream->held.load(), 8192);
  block.reset();
  CHECK_EQ(upstream->held.load(), 0);
}

TEST(a_pool_that_dies_leaves_alone_what_a_device_may_still_use) {
  PoolLab lab(MiB);
  StreamRef stream = lab.copy();
  auto block = lab.allocate(8192);
  auto gate = lab.runtime->gate(stream);
  block->record_use(stream);
  block.reset();
  lab.pool.reset();
  CHECK_EQ(lab.upstream->held.load(), 8192);
  gate->open();
}

// ---- the limit
// ------------------------------------------------------------------------------------

TEST(exhausted_says_how_much_is_used_of_what) {
  PoolLab lab(32 * KiB);
  auto first = lab.allocate(16 * KiB);
  auto second = lab.allocate(8 * KiB);
  try {
    lab.pool->try_allocate(16 * KiB);
    CHECK(false);
  } catch (const PoolExhausted& error) {
    CHECK(error.kind() == ErrorKind::pool_exhausted);
    CHECK_EQ(error.used, 24 * KiB);
    CHECK_EQ(error.limit, 32 * KiB);
  }
  CHECK_THROWS(lab.pool->try_allocate(33 * KiB), PoolExhausted);
  lab.allocate(8 * KiB);
  first.reset();
  lab.allocate(16 * KiB);
  lab.add_up();
}

TEST(blocks_in_flight_are_waited_for_blocks_held_are_not) {
  PoolLab lab(32 * KiB);
  StreamRef stream = lab.copy();
  auto block = lab.allocate(32 * KiB);
  auto gate = lab.runtime->gate(stream);
  block->record_use(stream);
  CHECK_THROWS(lab.pool->try_allocate(8 * KiB), PoolExhausted);
  block.reset();
  CHECK(lab.pool->try_allocate(32 * KiB) == nullptr);
  CHECK(lab.pool->try_allocate(8 * KiB) == nullptr);
  lab.add_up();
  gate->open();
  lab.runtime->stream_sync(stream, here);
  CHECK(lab.allocate(8 * KiB) != nullptr);
  CHECK(lab.allocate(32 * KiB) != nullptr);
  lab.add_up();
}

TEST(coming_again_keeps_what_is_cached) {
  PoolLab lab(32 * KiB);
  StreamRef stream = lab.copy();
  auto cached = lab.allocate(8 * KiB);
  auto flying = lab.allocate(24 * KiB);
  auto gate = lab.runtime->gate(stream);
  flying->record_use(stream);
  flying.reset();
  cached.reset();
  CHECK(lab.pool->try_allocate(32 * KiB) == nullptr);
  CHECK_EQ(lab.pool->stats().cached, 8 * KiB);
  lab.add_up();
  CHECK(lab.allocate(8 * KiB) != nullptr);
  CHECK_EQ(lab.pool->stats().hits, 1);
  gate->open();
}

TEST(cached_blocks_of_other_sizes_make_room) {
  PoolLab lab(64 * KiB);
  for (std::size_t bytes : {4 * KiB, 8 * KiB, 16 * KiB, 32 * KiB}) lab.allocate(bytes);
  CHECK_EQ(lab.pool->stats().cached, 60 * KiB);
  auto block = lab.allocate(64 * KiB);
  CHECK_EQ(lab.upstream->held.load(), 64 * KiB);
  CHECK_EQ(lab.upstream->most.load(), 64 * KiB);
  lab.add_up();
}

TEST(lowering_the_limit_takes_nothing_away) {
  PoolLab lab(64 * KiB);
  auto block = lab.allocate(32 * KiB);
  lab.pool->set_limit(16 * KiB);
  CHECK_THROWS(lab.pool->try_allocate(4 * KiB), PoolExhausted);
  block->data()[0] = std::byte{1};
  block.reset();
  CHECK(lab.allocate(16 * KiB) != nullptr);
  CHECK_EQ(lab.upstream->held.load(), 16 * KiB);
}

TEST(the_limit_holds_under_many_threads) {
  constexpr std::size_t limit = 512 * KiB;
  PoolLab lab(limit);
  std::vector<StreamRef> on;
  for (int t = 0; t < 8; ++t) on.push_back(lab.copy());
  std::atomic<int> given{0};
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937_64 random(t);
      std::vector<std::shared_ptr<PinnedBlock>> mine;
      for (int i = 0; i < 400; ++i) {
        if (!mine.empty() && random() % 2 == 0) {
          if (random() % 2 == 0) {
            PinnedBlock& used = *mine.back();
            lab.runtime->launch([data = used.data()] { *data = std::byte{1}; }, on[t]);
            used.record_use(on[t]);
          }
          mine.pop_back();
          continue;
        }
        try {
          const std::size_t bytes = 1 + random() % (100 * KiB);
          if (auto block = lab.pool->try_allocate(bytes)) {
            *block->data() = std::byte{2};
            ++given;
            mine.push_back(std::move(block));
          }
        } catch (const PoolExhausted& error) {
          CHECK(error.used <= limit);
          mine.clear();
        }
        if (random() % 50 == 0) lab.pool->trim();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(given > 0);  // how many more is the scheduler's business
  CHECK(lab.upstream->most <= limit);
  for (StreamRef stream : on) lab.runtime->stream_sync(stream, here);
  const PoolStats stats = lab.pool->stats();
  CHECK_EQ(stats.live, 0);
  CHECK_EQ(stats.live_blocks, 0);
  CHECK_EQ(stats.in_flight, 0);
  CHECK_EQ(stats.waste, 0);
  lab.add_up();
  lab.pool->trim();
  CHECK_EQ(lab.upstream->held.load(), 0);
  CHECK(lab.allocate(limit) != nullptr);  // nothing was lost on the way
}

TEST(threads_that_come_again_all_get_their_blocks) {
  PoolLab lab(64 * KiB);
  std::vector<StreamRef> on;
  for (int t = 0; t < 4; ++t) on.push_back(lab.copy());
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 100; ++i) {
        std::shared_ptr<PinnedBlock> block;
        // At most 16 KiB of 64 is held by each, so nobody may be told that the pool is exhausted.
        while (!(block = lab.pool->try_allocate((4 + 4 * ((t + std::size_t(i)) % 4)) * KiB))) {
          std::this_thread::yield();
        }
        lab.runtime->launch([data = block->data()] { *data = std::byte{1}; }, on[t]);
        block->record_use(on[t]);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// ---- order behind a slow copy
// ---------------------------------------------------------------------

TEST(two_threads_share_one_size_behind_a_slow_copy) {
  PoolLab lab(16 * MiB);
  constexpr std::size_t bytes = 64 * KiB;
  std::vector<std::thread> threads;
  std::vector<StreamRef> on{lab.copy(), lab.copy()};
  std::vector<std::unique_ptr<Gate>> gates;
  for (StreamRef stream : on) gates.push_back(lab.runtime->gate(stream));
  std::vector<std::vector<PinnedPtr>> outs(2);
  for (std::size_t t = 0; t < 2; ++t) {
    for (int i = 0; i < 32; ++i) outs[t].push_back(lab.pinned(bytes));
  }
  for (std::size_t t = 0; t < 2; ++t) {
    threads.emplace_back([&, t] {
      for (std::size_t i = 0; i < 32; ++i) {
        auto block = lab.pool->try_allocate(bytes);
        REQUIRE(block != nullptr);
        std::memset(block->data(), static_cast<int>(1 + 2 * i + t), bytes);
        lab.runtime->copy_async(outs[t][i]->data(), block->data(), bytes, on[t]);
        block->record_use(on[t]);
        if (i == 16) gates[t]->open();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (StreamRef stream : on) lab.runtime->stream_sync(stream, here);
  for (std::size_t t = 0; t < 2; ++t) {
    for (std::size_t i = 0; i < 32; ++i) CHECK(outs[t][i]->holds(static_cast<int>(1 + 2 * i + t)));
  }
}

// ---- giving back, failing
// -------------------------------------------------------------------------

TEST(trim_gives_memory_back) {
  PoolLab lab(4 * GiB);
  constexpr std::size_t bytes = 512 * MiB;
  auto held = lab.allocate(8 * KiB);
  auto block = lab.allocate(bytes);
  std::memset(block->data(), 1, bytes);
  const std::size_t full = resident();
  block.reset();
  CHECK_EQ(lab.pool->stats().cached, bytes);
  CHECK_EQ(lab.pool->trim(), bytes);
  CHECK_EQ(lab.pool->stats().cached, 0);
  CHECK_EQ(lab.upstream->held.load(), 8 * KiB);
  CHECK(resident() + bytes * 9 / 10 < full);
  CHECK_EQ(lab.pool->trim(), 0);
  lab.add_up();
}

TEST(trim_leaves_what_is_in_flight) {
  PoolLab lab(MiB);
  StreamRef stream = lab.copy();
  auto block = lab.allocate(8 * KiB);
  auto gate = lab.runtime->gate(stream);
  block->record_use(stream);
  block.reset();
  CHECK_EQ(lab.pool->trim(), 0);
  CHECK_EQ(lab.upstream->held.load(), 8 * KiB);
  gate->open();
  lab.runtime->stream_sync(stream, here);
  CHECK_EQ(lab.pool->trim(), 8 * KiB);
}

TEST(a_refused_allocation_is_rolled_back) {
  PoolLab lab(MiB);
  auto block = lab.allocate(8 * KiB);
  for (int round = 0; round < 20; ++round) {
    lab.upstream->refuse = 1;
    try {
      lab.pool->try_allocate(128 * KiB);
      CHECK(false);
    } catch (const Error& error) {
      CHECK(error.kind() == ErrorKind::out_of_memory);
    }
    lab.add_up();
    CHECK_EQ(lab.pool->stats().live, 8 * KiB);
    CHECK_EQ(lab.pool->stats().live_blocks, 1);
  }
  lab.allocate(128 * KiB);  // nothing was left latched
  lab.add_up();
}

TEST(a_refused_allocation_trims_and_tries_once_more) {
  PoolLab lab(MiB);
  lab.allocate(64 * KiB);
  lab.upstream->cap = 96 * KiB;
  auto block = lab.allocate(48 * KiB);  // fits under the cap only without the cached block
  CHECK_EQ(lab.upstream->held.load(), 48 * KiB);
  lab.add_up();
  block.reset();
  lab.upstream->refuse = 2;
  const int calls = lab.upstream->calls;
  CHECK_THROWS(lab.pool->try_allocate(64 * KiB), Error);
  CHECK_EQ(lab.upstream->calls - calls, 2);
  lab.add_up();
  lab.allocate(64 * KiB);
}

TEST(another_error_is_not_tried_again) {
  PoolLab lab(MiB);
  lab.allocate(64 * KiB);
  lab.upstream->break_next = true;
  const int calls = lab.upstream->calls;
  CHECK_THROWS(lab.pool->try_allocate(8 * KiB), Error);
  CHECK_EQ(lab.upstream->calls - calls, 1);
  CHECK_EQ(lab.pool->stats().cached, 64 * KiB);
  lab.add_up();
  lab.allocate(8 * KiB);
}

TEST(a_refusal_half_way_leaves_the_rest_usable) {
  PoolLab lab(MiB);
  std::vector<std::shared_ptr<PinnedBlock>> blocks;
  blocks.push_back(lab.allocate(128 * KiB));
  blocks.push_back(lab.allocate(128 * KiB));
  lab.upstream->cap = 256 * KiB;
  CHECK_THROWS(lab.pool->try_allocate(128 * KiB), Error);
  lab.add_up();
  blocks.pop_back();
  blocks.push_back(lab.allocate(128 * KiB));
  CHECK_EQ(lab.pool->stats().hits, 1);
}

TEST(the_books_balance_after_anything) {
  PoolLab lab(2 * MiB);
  StreamRef stream = lab.copy();
  std::mt19937_64 random(99);
  std::vector<std::shared_ptr<PinnedBlock>> blocks;
  std::unique_ptr<Gate> gate;
  for (int i = 0; i < 3000; ++i) {
    switch (random() % 8) {
      case 0:
      case 1:
      case 2:
        if (random() % 5 == 0) lab.upstream->refuse = 1 + static_cast<int>(random() % 2);
        try {
          if (auto block = lab.pool->try_allocate(random() % (300 * KiB))) {
            blocks.push_back(std::move(block));
          }
        } catch (const Error&) {
          // Exhausted or refused: either is fine here.
        }
        lab.upstream->refuse = 0;
        break;
      case 3:
      case 4:
        if (!blocks.empty()) blocks.erase(blocks.begin() + long(random() % blocks.size()));
        break;
      case 5:
        if (!blocks.empty()) blocks[random() % blocks.size()]->record_use(stream);
        break;
      case 6:
        gate.reset();
        if (random() % 2 == 0) gate = lab.runtime->gate(stream);
        break;
      default:
        if (random() % 4 == 0) lab.pool->trim();
    }
    std::size_t live = 0;
    std::size_t waste = 0;
    for (const auto& block : blocks) {
      live += block->capacity();
      waste += block->capacity() - block->requested();
    }
    const PoolStats stats = lab.pool->stats();
    REQUIRE(stats.live == live);
    REQUIRE(stats.waste == waste);
    REQUIRE(stats.live_blocks == blocks.size());
    lab.add_up();
  }
  gate.reset();
}

// ---- slabs
// ----------------------------------------------------------------------------------------

TEST(small_blocks_cost_few_calls) {
  PoolLab lab(GiB);
  std::vector<std::shared_ptr<PinnedBlock>> blocks;
  std::set<std::byte*> addresses;
  for (int i = 0; i < 2000; ++i) {
    blocks.push_back(lab.allocate(4096));
    addresses.insert(blocks.back()->data());
    std::memset(blocks.back()->data(), i, 4096);
  }
  CHECK_EQ(addresses.size(), 2000);
  for (std::size_t i = 0; i < 2000; ++i) {
    CHECK(*blocks[i]->data() == static_cast<std::byte>(i));
    CHECK(*(blocks[i]->data() + 4095) == static_cast<std::byte>(i));
  }
  CHECK(lab.upstream->calls < 20);
  CHECK(lab.upstream->held <= 2 * 2000 * 4096);  // never more idle than in use
  CHECK_EQ(static_cast<int>(lab.pool->stats().slabs), lab.upstream->calls.load());
  lab.add_up();
}

TEST(large_blocks_have_a_slab_each) {
  PoolLab lab(GiB);
  std::vector<std::shared_ptr<PinnedBlock>> blocks;
  for (int i = 0; i < 5; ++i) blocks.push_back(lab.allocate(MiB));
  CHECK_EQ(lab.upstream->calls.load(), 5);
  CHECK_EQ(lab.upstream->held.load(), 5 * MiB);
}

TEST(slabs_are_as_large_as_asked) {
  PoolLab lab(MiB);
  auto pool = std::make_shared<PinnedPool>(lab.upstream, 64 * MiB, 4 * 4096);
  std::vector<std::shared_ptr<PinnedBlock>> blocks;
  std::size_t largest = 0;
  for (int i = 0; i < 100; ++i) {
    const std::size_t before = pool->stats().reserved;
    blocks.push_back(pool->try_allocate(4096));
    largest = std::max(largest, pool->stats().reserved - before);
  }
  CHECK_EQ(largest, 4 * 4096);
}

TEST(a_small_pool_has_small_slabs) {
  PoolLab lab(MiB);
  std::vector<std::shared_ptr<PinnedBlock>> blocks;
  std::size_t before = 0;
  for (int i = 0; i < 100; ++i) {
    blocks.push_back(lab.allocate(4096));
    CHECK(lab.upstream->held - before <= MiB / 64);
    before = lab.upstream->held;
  }
  // All of the limit can be had, whatever is cut into what.
  while (lab.pool->has_room(4096, 1)) blocks.push_back(lab.allocate(4096));
  CHECK_EQ(lab.pool->stats().live, MiB);
  CHECK_THROWS(lab.pool->try_allocate(4096), PoolExhausted);
}

TEST(trim_gives_back_empty_slabs_and_no_others) {
  PoolLab lab(GiB);
  std::vector<std::shared_ptr<PinnedBlock>> blocks;
  for (int i = 0; i < 256; ++i) blocks.push_back(lab.allocate(4096));
  auto kept = std::move(blocks.back());
  *kept->data() = std::byte{7};
  blocks.clear();
  const std::size_t before = lab.upstream->held;
  const std::size_t given = lab.pool->trim();
  CHECK_EQ(lab.upstream->held.load(), before - given);
  const PoolStats stats = lab.pool->stats();
  CHECK_EQ(stats.slabs, 1);
  CHECK_EQ(stats.live, 4096);
  CHECK_EQ(stats.cached, 127 * 4096);  // the last slab has as many blocks as those before it
  CHECK(*kept->data() == std::byte{7});
  lab.allocate(4096);
  CHECK_EQ(lab.pool->stats().hits, stats.hits + 1);
  kept.reset();
  lab.pool->trim();
  CHECK_EQ(lab.upstream->held.load(), 0);
  lab.add_up();
}

TEST(what_lies_beside_held_blocks_is_not_promised_to_others) {
  PoolLab lab(MiB);
  std::vector<std::shared_ptr<PinnedBlock>> blocks;
  for (int i = 0; i < 256; ++i) blocks.push_back(lab.allocate(4096));
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    if (i % 4 != 0) blocks[i].reset();
  }
  // 64 blocks are held, in slabs of four at most; the other three are of no use for larger ones.
  const PoolStats stats = lab.pool->stats();
  CHECK_EQ(stats.live, 256 * KiB);
  CHECK(!lab.pool->has_room(MiB / 2 + MiB / 4, 1));
  CHECK(lab.pool->has_room(4096, 192));
  CHECK(!lab.pool->has_room(4096, 193));
  CHECK_THROWS(lab.pool->try_allocate(MiB / 2 + MiB / 4), PoolExhausted);
  while (lab.pool->has_room(4096, 1)) blocks.push_back(lab.allocate(4096));
  CHECK_EQ(lab.pool->stats().live, MiB);
  lab.add_up();
}

TEST(a_refused_slab_leaves_nothing_behind) {
  PoolLab lab(GiB);
  auto first = lab.allocate(4096);
  auto second = lab.allocate(4096);
  for (int round = 0; round < 10; ++round) {
    lab.upstream->refuse = 1;
    CHECK_THROWS(lab.pool->try_allocate(4096), Error);
    CHECK_EQ(lab.pool->stats().reserved, 2 * 4096);
    lab.add_up();
  }
  auto third = lab.allocate(4096);
  auto fourth = lab.allocate(4096);
  CHECK_EQ(lab.pool->stats().hits, 1);
  lab.add_up();
}

// ---- growth ahead
// ----------------------------------------------------------------------------------------

TEST(prewarmed_blocks_are_hits) {
  for (std::size_t bytes : {16 * KiB, 4 * MiB}) {
    PoolLab lab(GiB);
    lab.pool->prewarm(bytes, 50);
    const int calls = lab.upstream->calls;
    CHECK_EQ(lab.pool->stats().cached, 50 * bytes);
    lab.pool->prewarm(bytes, 50);  // they are there
    CHECK(lab.pool->grow_ahead(bytes, 20) == nullptr);
    std::vector<std::shared_ptr<PinnedBlock>> blocks;
    for (int i = 0; i < 50; ++i) blocks.push_back(lab.allocate(bytes));
    CHECK_EQ(lab.upstream->calls.load(), calls);
    CHECK_EQ(lab.pool->stats().hits, 50);
    CHECK_EQ(lab.pool->stats().misses, 0);
    lab.add_up();
  }
}

TEST(prewarming_beyond_the_limit_makes_nothing) {
  PoolLab lab(16 * MiB);
  auto held = lab.allocate(4 * MiB);
  CHECK_THROWS(lab.pool->prewarm(4 * MiB, 4), PoolExhausted);
  CHECK_EQ(lab.upstream->calls.load(), 1);
  lab.pool->prewarm(4 * MiB, 3);
  CHECK_EQ(lab.upstream->held.load(), 16 * MiB);
  lab.pool->prewarm(2 * MiB, 2);  // others make room
  // Two workers may each have given up one for theirs.
  CHECK(lab.pool->stats().cached >= 4 * MiB + 4 * MiB);
  CHECK(lab.upstream->most <= 16 * MiB);
  lab.add_up();
}

TEST(prewarming_says_what_the_system_refused) {
  PoolLab lab(GiB);
  lab.upstream->cap = 10 * MiB;
  try {
    lab.pool->prewarm(4 * MiB, 5);
    CHECK(false);
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::out_of_memory);
  }
  CHECK_EQ(lab.pool->stats().cached, 8 * MiB);
  CHECK_EQ(lab.pool->stats().growing, 0);
  lab.add_up();
  lab.upstream->cap = plenty;
  lab.pool->prewarm(4 * MiB, 5);
  CHECK_EQ(lab.pool->stats().cached, 20 * MiB);
}

namespace {

// Reservations wait here until they are let through.
class Door {
 public:
  void pass() {
    std::unique_lock lock(mutex_);
    ++waiting_;
    changed_.notify_all();
    changed_.wait(lock, [&] { return let_ > 0; });
    --let_;
  }
  void let(int count) {
    std::lock_guard lock(mutex_);
    let_ += count;
    changed_.notify_all();
  }
  bool reached(int count) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, patience, [&] { return waiting_ >= count; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int waiting_ = 0;
  int let_ = 0;
};

std::shared_ptr<PinnedBlock> patiently(PinnedPool& pool, std::size_t bytes) {
  for (;;) {
    const auto seen = pool.changes().seen();
    if (auto block = pool.try_allocate(bytes)) return block;
    pool.changes().wait(seen, 1ms);
  }
}

void until_grown(PinnedPool& pool, const Growth& growth) {
  for (;;) {
    const auto seen = pool.changes().seen();
    if (pool.grown(growth)) return;
    pool.changes().wait(seen, patience);
  }
}

}  // namespace

TEST(whoever_asks_waits_for_the_block_that_is_being_made) {
  PoolLab lab(GiB);
  Door door;
  const auto here_thread = std::this_thread::get_id();
  lab.upstream->on_alloc = [&](std::size_t) {
    CHECK(std::this_thread::get_id() != here_thread);
    door.pass();
  };
  auto growth = lab.pool->grow_ahead(4 * MiB, 3);
  CHECK(growth != nullptr);
  CHECK(door.reached(2));
  CHECK(lab.pool->busy());
  CHECK(lab.pool->try_allocate(4 * MiB) == nullptr);
  CHECK(!lab.pool->grown(*growth));
  door.let(1);
  std::vector<std::shared_ptr<PinnedBlock>> blocks;
  blocks.push_back(patiently(*lab.pool, 4 * MiB));
  CHECK(!lab.pool->grown(*growth));
  door.let(2);
  blocks.push_back(patiently(*lab.pool, 4 * MiB));
  blocks.push_back(patiently(*lab.pool, 4 * MiB));
  until_grown(*lab.pool, *growth);
  CHECK(!lab.pool->busy());
  CHECK_EQ(lab.upstream->calls.load(), 3);
  CHECK_EQ(lab.pool->stats().misses, 0);
  lab.add_up();
}

TEST(other_sizes_do_not_wait_for_growth) {
  PoolLab lab(GiB);
  Door door;
  lab.upstream->on_alloc = [&](std::size_t bytes) {
    if (bytes == 4 * MiB) door.pass();
  };
  auto growth = lab.pool->grow_ahead(4 * MiB, 1);
  CHECK(door.reached(1));
  CHECK(lab.allocate(2 * MiB) != nullptr);
  door.let(1);
  until_grown(*lab.pool, *growth);
}

TEST(what_is_cancelled_is_not_begun) {
  PoolLab lab(GiB);
  Door door;
  lab.upstream->on_alloc = [&](std::size_t) { door.pass(); };
  auto growth = lab.pool->grow_ahead(4 * MiB, 50);
  CHECK(door.reached(2));
  lab.pool->cancel(*growth);
  lab.pool->cancel(*growth);
  CHECK(!lab.pool->grown(*growth));  // two are being made
  door.let(2);
  until_grown(*lab.pool, *growth);
  CHECK_EQ(lab.upstream->calls.load(), 2);
  CHECK_EQ(lab.pool->stats().cached, 8 * MiB);
  CHECK_EQ(lab.pool->stats().growing, 0);
  lab.upstream->on_alloc = nullptr;
  std::vector<std::shared_ptr<PinnedBlock>> blocks;
  for (int i = 0; i < 3; ++i) blocks.push_back(lab.allocate(4 * MiB));  // nobody waits for ever
  lab.add_up();
}

TEST(growth_that_is_refused_leaves_the_rest_to_who_needs_it) {
  PoolLab lab(GiB);
  lab.upstream->refuse = 1;
  auto growth = lab.pool->grow_ahead(4 * MiB, 10);
  CHECK_THROWS(until_grown(*lab.pool, *growth), Error);
  std::vector<std::shared_ptr<PinnedBlock>> blocks;
  for (int i = 0; i < 10; ++i) blocks.push_back(lab.allocate(4 * MiB));
  lab.add_up();
  lab.upstream->refuse = 1;
  auto again = lab.pool->grow_ahead(2 * MiB, 1);
  CHECK_THROWS(until_grown(*lab.pool, *again), Error);
  lab.upstream->cap = lab.upstream->held.load();
  CHECK_THROWS(lab.pool->try_allocate(2 * MiB), Error);  // and now it is his error
}

TEST(growth_stops_at_the_limit) {
  PoolLab lab(16 * MiB);
  auto growth = lab.pool->grow_ahead(4 * MiB, 10);
  CHECK_THROWS(until_grown(*lab.pool, *growth), PoolExhausted);
  CHECK_EQ(lab.pool->stats().cached, 16 * MiB);
  CHECK(lab.upstream->most <= 16 * MiB);
  lab.allocate(16 * MiB);  // what lies ready makes room
  lab.add_up();
}

TEST(a_pool_that_dies_while_it_grows_gives_all_back) {
  for (int round = 0; round < 20; ++round) {
    auto upstream = std::make_shared<Upstream>(host_backend());
    Door door;
    upstream->on_alloc = [&](std::size_t) { door.pass(); };
    auto pool = std::make_shared<PinnedPool>(upstream, GiB);
    pool->grow_ahead(4 * MiB, 50);
    CHECK(door.reached(2));
    std::thread dropping([dropped = std::move(pool)]() mutable { dropped.reset(); });
    door.let(50);
    dropping.join();
    // A worker may be the last to let go of the pool, at the end of what it was at.
    const auto begin = std::chrono::steady_clock::now();
    while (upstream.use_count() > 1 && std::chrono::steady_clock::now() - begin < patience) {
      std::this_thread::yield();
    }
    CHECK_EQ(upstream.use_count(), 1);
    CHECK_EQ(upstream->held.load(), 0);
    CHECK(upstream->calls <= 50);
  }
}

TEST(the_limit_holds_while_many_grow_and_take) {
  constexpr std::size_t limit = 4 * MiB;
  PoolLab lab(limit);
  std::vector<std::shared_ptr<Growth>> growths[6];
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 6; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937_64 random(t);
      std::vector<std::shared_ptr<PinnedBlock>> mine;
      for (int i = 0; i < 300; ++i) {
        const std::size_t bytes = std::size_t{4096} << random() % 8;
        if (random() % 8 == 0) {
          auto growth = lab.pool->grow_ahead(bytes, 1 + random() % 20);
          if (growth && random() % 2 == 0) lab.pool->cancel(*growth);
          if (growth) growths[t].push_back(std::move(growth));
        }
        if (random() % 16 == 0) lab.pool->trim();
        try {
          if (auto block = lab.pool->try_allocate(bytes)) {
            std::memset(block->data(), static_cast<int>(t), bytes);
            mine.push_back(std::move(block));
          }
        } catch (const PoolExhausted&) {
          mine.clear();
        }
        if (mine.size() > 4) mine.erase(mine.begin());
        for (const auto& block : mine) CHECK(*block->data() == static_cast<std::byte>(t));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& started : growths) {
    for (const auto& growth : started) {
      try {
        while (!lab.pool->grown(*growth)) std::this_thread::yield();
      } catch (const PoolExhausted&) {
      }
    }
  }
  CHECK(lab.upstream->most <= limit);
  lab.add_up();
  lab.allocate(limit);  // nothing was lost on the way
}

// ---- the same on a device
// -------------------------------------------------------------------------

ON_EACH_RUNTIME(a_block_copied_from_is_not_handed_out_again) {
  auto pool = std::make_shared<PinnedPool>(lab.runtime, 64 * MiB);
  constexpr std::size_t bytes = 1 * MiB;
  auto out = lab.device(bytes);
  auto back = lab.pinned(bytes);
  StreamRef stream = lab.copy();
  auto spare = pool->try_allocate(bytes);
  auto block = pool->try_allocate(bytes);
  auto* data = block->data();
  std::memset(data, 7, bytes);
  auto gate = lab.runtime->gate(stream);
  lab.runtime->copy_async(out->data(), data, bytes, stream);
  block->record_use(stream);
  block.reset();
  spare.reset();
  auto next = pool->try_allocate(bytes);
  CHECK(next->data() != data);
  std::memset(next->data(), 8, bytes);
  gate->open();
  lab.runtime->copy_async(back->data(), out->data(), bytes, stream);
  lab.runtime->stream_sync(stream, here);
  CHECK(back->holds(7));
  CHECK_EQ(pool->stats().in_flight, 0);
}
