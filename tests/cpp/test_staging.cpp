// Copies through the ring of slots: right bytes, each slot reused only when it is free, a bounded
// ring, errors that lose no slot and stay with their transfer.
#include "transfer/staging.h"

#include <atomic>
#include <random>
#include <thread>

#include "base/pages.h"
#include "lab.h"
#include "transfer/copy_engine.h"

using namespace streamlap;
using namespace streamlap::testing;

namespace {

constexpr std::size_t slot = 1024;
constexpr std::size_t slots = 3;
constexpr StagingOptions small_ring{slot, slots, 2, 2};
constexpr std::size_t size = 10 * slot + 7;  // more chunks than slots
constexpr Direction both[] = {Direction::to_host, Direction::to_device};

struct Boom : std::runtime_error {
  Boom() : std::runtime_error("boom") {}
};

struct Keep {
  std::shared_ptr<std::atomic<bool>> gone = std::make_shared<std::atomic<bool>>(false);
  std::shared_ptr<void> handle{new int, [gone = gone](void* memory) {
                                 delete static_cast<int*>(memory);
                                 *gone = true;
                               }};
};

bool in_time(Transfer& transfer) { return transfer.sync_for(patience); }
bool held(Transfer& transfer) { return !transfer.sync_for(moment) && !transfer.done(); }

void reap_all(CopyEngine& engine) {
  for (int i = 0; i < 10'000 && engine.reap() > 0; ++i) {
    engine.runtime()->poll();
    if (!engine.runtime()->virtual_time()) std::this_thread::sleep_for(1ms);
  }
}

// One leaf on its way between a device and ordinary memory, with bytes of its own.
struct Leaf {
  Leaf(Lab& on, Direction way, std::size_t bytes, std::uint64_t seed, std::size_t element = 1)
      : lab(on), direction(way), expected(on.pinned(bytes)), result(on.pinned(bytes)) {
    std::mt19937_64 random(seed);
    for (std::size_t i = 0; i < bytes; ++i) {
      expected->data()[i] = static_cast<unsigned char>(random());
    }
    if (bytes != 0) {
      device = on.device(bytes);
      if (way == Direction::to_host) {
        const StreamRef setup = on.compute();
        on.runtime->copy_async(device->data(), expected->data(), bytes, setup);
        on.runtime->stream_sync(setup, here);
      }
    }
    unsigned char* far = device ? device->data() : nullptr;
    item = way == Direction::to_host ? CopyItem{result->data(), far, bytes, element, nullptr}
                                     : CopyItem{far, expected->data(), bytes, element, nullptr};
  }

  // Call when the transfer is done.
  bool right() const {
    if (direction == Direction::to_device && device) {
      const StreamRef back = lab.compute();
      lab.runtime->copy_async(result->data(), device->data(), result->bytes(), back);
      lab.runtime->stream_sync(back, here);
    }
    return std::memcmp(result->data(), expected->data(), result->bytes()) == 0;
  }

  Lab& lab;
  Direction direction;
  PinnedPtr expected;
  PinnedPtr result;
  std::shared_ptr<DeviceBytes> device;
  CopyItem item;
};

TransferRequest staged(const std::vector<const Leaf*>& leaves) {
  TransferRequest request;
  request.staged = true;
  request.direction = leaves.front()->direction;
  for (const Leaf* leaf : leaves) request.items.push_back(leaf->item);
  return request;
}
TransferRequest staged(const Leaf& leaf) { return staged({&leaf}); }

// Closes a gate before one of the copies on streams of one kind.
struct GateBefore final : ProxyRuntime {
  GateBefore(std::shared_ptr<Runtime> inner, StreamKind on, int index)
      : ProxyRuntime(std::move(inner)), kind(on), left(index) {}
  void copy_async(void* dst, const void* src, std::size_t bytes, StreamRef stream) override {
    if (stream.kind == kind && left-- == 0) {
      gate = ProxyRuntime::gate(stream);
      closed = true;
    }
    ProxyRuntime::copy_async(dst, src, bytes, stream);
  }
  // It is closed when the copies are issued, unless that fails.
  void wait_closed(Transfer& transfer) {
    REQUIRE(transfer.issued_for(patience));
    REQUIRE(closed);
  }
  const StreamKind kind;
  int left;
  std::unique_ptr<Gate> gate;
  std::atomic<bool> closed{false};
};

// Refuses the n-th call that enqueues or allocates. `only`: of this name.
struct FailAt final : ProxyRuntime {
  using ProxyRuntime::ProxyRuntime;
  void before(const char* call) override {
    if (left > 0 && --left == 0) throw Boom();
    if (only != nullptr && std::string(only) == call && skip-- == 0) throw Boom();
  }
  std::atomic<int> left{0};
  const char* only = nullptr;
  int skip = 0;
};

}  // namespace

// ---- bytes

ON_EACH_RUNTIME(every_byte_around_the_size_of_a_slot) {
  CopyEngine engine(lab.runtime, small_ring);
  std::uint64_t seed = 0;
  for (Direction direction : both) {
    for (std::size_t bytes : {std::size_t{1}, slot - 1, slot, slot + 1, 3 * slot, size}) {
      const Leaf leaf(lab, direction, bytes, ++seed);
      REQUIRE(in_time(*engine.submit(staged(leaf))));
      CHECK(leaf.right());
    }
    CHECK(engine.staging_bytes() > 0);
  }
  CHECK(engine.staging_bytes() <= 2 * slots * slot);
}

ON_EACH_RUNTIME(every_leaf_of_a_tree) {
  CopyEngine engine(lab.runtime, small_ring);
  for (Direction direction : both) {
    for (std::size_t record : {std::size_t{1}, std::size_t{700}, std::size_t{1} << 20}) {
      std::vector<std::unique_ptr<Leaf>> leaves;
      std::vector<const Leaf*> borrowed;
      for (std::size_t elements : {3, 0, 100, 1000, 1, 1, 60, 60, 60}) {
        leaves.push_back(std::make_unique<Leaf>(lab, direction, elements * 12, elements, 12));
        borrowed.push_back(leaves.back().get());
      }
      TransferRequest request = staged(borrowed);
      request.policy.record_bytes = record;
      auto transfer = engine.submit(request);
      for (const Chunk& chunk : transfer->plan().chunks) {
        CHECK(chunk.bytes <= slot);
        CHECK_EQ(chunk.offset % 12, 0);
      }
      REQUIRE(in_time(*transfer));
      for (const Leaf* leaf : borrowed) CHECK(leaf->right());
    }
  }
}

ON_EACH_RUNTIME(several_transfers_at_once) {
  CopyEngine engine(lab.runtime, small_ring);
  std::vector<std::unique_ptr<Leaf>> leaves;
  std::vector<std::shared_ptr<Transfer>> transfers;
  for (std::uint64_t i = 0; i < 6; ++i) {
    leaves.push_back(std::make_unique<Leaf>(lab, both[i % 2], size + i, i));
  }
  for (const auto& leaf : leaves) transfers.push_back(engine.submit(staged(*leaf)));
  for (const auto& transfer : transfers) REQUIRE(in_time(*transfer));
  for (const auto& leaf : leaves) CHECK(leaf->right());
  CHECK(engine.staging_bytes() <= 2 * slots * slot);
}

ON_EACH_RUNTIME(times_cover_staged_copies) {
  CopyEngine engine(lab.runtime, small_ring);
  for (Direction direction : both) {
    const Leaf leaf(lab, direction, size, 1);
    auto transfer = engine.submit(staged(leaf));
    REQUIRE(in_time(*transfer));
    CHECK(transfer->elapsed_from(*transfer) >= 0);
    CHECK(transfer->elapsed_from(*transfer) < 60);
  }
}

TEST(host_pages_of_a_fresh_destination) {
  Lab lab(host_backend());
  CopyEngine engine(lab.runtime);
  const std::size_t bytes = (std::size_t{19} << 20) + 5;
  Leaf leaf(lab, Direction::to_host, bytes, 1);
  void* memory = pages::map(bytes, pages::Fork::shared);
  leaf.item.dst = memory;
  leaf.item.fresh = true;
  Keep keep;
  TransferRequest request = staged(leaf);
  request.keep_destination = std::move(keep.handle);
  auto transfer = engine.submit(std::move(request));
  CHECK(in_time(*transfer));
  CHECK(std::memcmp(memory, leaf.expected->data(), bytes) == 0);
  transfer.reset();
  lab.runtime->device_sync(0);
  CHECK(*keep.gone);
  pages::unmap(memory, bytes);
}

// ---- order

ON_EACH_RUNTIME(a_held_dma_leaves_the_destination_as_it_was) {
  auto held_back = std::make_shared<GateBefore>(lab.runtime, StreamKind::copy, 0);
  CopyEngine engine(held_back, small_ring);
  const Leaf leaf(lab, Direction::to_host, 2 * slot, 1);
  auto transfer = engine.submit(staged(leaf));
  held_back->wait_closed(*transfer);
  CHECK(transfer->issued_for(patience));
  CHECK(held(*transfer));
  CHECK(!transfer->source_sync_for(moment));
  CHECK(!transfer->leaf_sync_for(0, moment));
  CHECK(leaf.result->holds(poison));
  held_back->gate->open();
  CHECK(in_time(*transfer));
  CHECK(leaf.right());
}

ON_EACH_RUNTIME(the_source_is_free_before_the_destination_is_whole) {
  auto held_back = std::make_shared<GateBefore>(lab.runtime, StreamKind::host, 0);
  CopyEngine engine(held_back, small_ring);
  const Leaf leaf(lab, Direction::to_host, 2 * slot, 1);
  auto transfer = engine.submit(staged(leaf));
  held_back->wait_closed(*transfer);
  CHECK(transfer->source_sync_for(patience));
  CHECK(transfer->waits_on_host());
  CHECK(held(*transfer));
  // The second chunk is there, on the other copier; the leaf is not.
  CHECK(!transfer->leaf_sync_for(0, moment));
  lab.produce(lab.compute(), leaf.device->data(), 9, 2 * slot);
  held_back->gate->open();
  CHECK(in_time(*transfer));
  CHECK(leaf.right());
}

ON_EACH_RUNTIME(a_writer_of_the_source_waits_until_it_has_been_read) {
  auto held_back = std::make_shared<GateBefore>(lab.runtime, StreamKind::copy, 0);
  CopyEngine engine(held_back, small_ring);
  const Leaf leaf(lab, Direction::to_host, 2 * slot, 1);
  auto transfer = engine.submit(staged(leaf));
  REQUIRE(transfer->issued_for(patience));
  StreamRef writer = lab.compute();
  transfer->stream_wait_source(writer);
  lab.produce(writer, leaf.device->data(), 9, 2 * slot);
  EventPtr written = lab.record(writer);
  CHECK(lab.held(written));
  held_back->gate->open();
  CHECK(lab.in_time(written));
  CHECK(in_time(*transfer));
  CHECK(leaf.right());
}

ON_EACH_RUNTIME(a_host_source_is_free_once_the_copies_are_issued) {
  auto held_back = std::make_shared<GateBefore>(lab.runtime, StreamKind::copy, 0);
  CopyEngine engine(held_back, small_ring);
  const Leaf leaf(lab, Direction::to_device, 2 * slot, 1);
  auto transfer = engine.submit(staged(leaf));
  CHECK(transfer->source_sync_for(patience));
  CHECK(held(*transfer));
  const std::vector<unsigned char> original(leaf.expected->data(),
                                            leaf.expected->data() + 2 * slot);
  StreamRef writer = lab.compute();
  transfer->stream_wait_source(writer);  // it is not held either
  lab.runtime->declare(writer, leaf.expected->data(), 2 * slot, true);
  CHECK(lab.in_time(lab.record(writer)));
  std::memset(leaf.expected->data(), 9, 2 * slot);
  held_back->gate->open();
  CHECK(in_time(*transfer));
  CHECK(!leaf.right());
  CHECK(std::memcmp(leaf.result->data(), original.data(), 2 * slot) == 0);
}

ON_EACH_RUNTIME(a_consumer_on_the_device_waits_for_every_slot) {
  auto held_back = std::make_shared<GateBefore>(lab.runtime, StreamKind::copy, 1);
  CopyEngine engine(held_back, small_ring);
  const Leaf leaf(lab, Direction::to_device, 3 * slot, 1);
  auto transfer = engine.submit(staged(leaf));
  CHECK(!transfer->waits_on_host());
  REQUIRE(transfer->issued_for(patience));
  StreamRef consumer = lab.compute();
  transfer->stream_wait(consumer);
  lab.runtime->copy_async(leaf.result->data(), leaf.device->data(), 3 * slot, consumer);
  EventPtr end = lab.record(consumer);
  CHECK(lab.held(end));
  CHECK(leaf.result->holds(poison));
  held_back->gate->open();
  CHECK(lab.in_time(end));
  CHECK(std::memcmp(leaf.result->data(), leaf.expected->data(), 3 * slot) == 0);
}

ON_EACH_RUNTIME(a_leaf_is_there_before_the_leaves_after_it) {
  auto held_back = std::make_shared<GateBefore>(lab.runtime, StreamKind::host, 1);
  CopyEngine engine(held_back, small_ring);
  const Leaf first(lab, Direction::to_host, slot, 1);
  const Leaf second(lab, Direction::to_host, slot, 2);
  TransferRequest request = staged({&first, &second});
  request.policy.record_bytes = 1;
  auto transfer = engine.submit(request);
  CHECK(transfer->leaf_sync_for(0, patience));
  CHECK(transfer->chunk_sync_for(0, patience));
  CHECK(first.right());
  CHECK(!transfer->leaf_sync_for(1, moment));
  CHECK(!transfer->leaf_done(1));
  CHECK(second.result->holds(poison));
  held_back->wait_closed(*transfer);
  held_back->gate->open();
  CHECK(in_time(*transfer));
  CHECK(second.right());
}

// ---- the ring

ON_EACH_RUNTIME(small_transfers_use_one_slot_again_and_trim_gives_it_back) {
  CopyEngine engine(lab.runtime, small_ring);
  CHECK_EQ(engine.staging_bytes(), 0);
  for (Direction direction : both) {
    for (std::uint64_t i = 0; i < 5; ++i) {
      const Leaf leaf(lab, direction, 100, i);
      REQUIRE(in_time(*engine.submit(staged(leaf))));
      CHECK(leaf.right());
    }
    lab.runtime->device_sync(0);
    CHECK_EQ(engine.staging_bytes(), slot);
    CHECK_EQ(engine.trim_staging(), slot);
    CHECK_EQ(engine.staging_bytes(), 0);
  }
}

ON_EACH_RUNTIME(slots_in_use_are_not_trimmed) {
  auto held_back = std::make_shared<GateBefore>(lab.runtime, StreamKind::copy, 0);
  CopyEngine engine(held_back, small_ring);
  const Leaf leaf(lab, Direction::to_host, 2 * slot, 1);
  auto transfer = engine.submit(staged(leaf));
  REQUIRE(transfer->issued_for(patience));
  CHECK_EQ(engine.trim_staging(), 0);
  CHECK_EQ(engine.staging_bytes(), 2 * slot);
  held_back->gate->open();
  CHECK(in_time(*transfer));
  CHECK(leaf.right());
}

TEST(host_rings_of_one_device_are_bounded) {
  Lab lab(host_backend());
  CopyEngine engine(lab.runtime);
  constexpr std::size_t most = StagingOptions::most_pinned;
  engine.configure_staging({most / 32, 16, 1, 1});
  engine.configure_staging({most / 2, 1, 1, 1});
  for (StagingOptions wrong :
       {StagingOptions{most / 32, 17, 1, 1}, StagingOptions{most / 2 + 1, 1, 1, 1},
        StagingOptions{SIZE_MAX, 2, 1, 1}, StagingOptions{2, SIZE_MAX, 1, 1},
        StagingOptions{0, 1, 1, 1}, StagingOptions{1, 0, 1, 1}, StagingOptions{1, 1, 0, 1},
        StagingOptions{1, 1, 1, 0}}) {
    CHECK_THROWS(engine.configure_staging(wrong), Error);
    CHECK_THROWS(CopyEngine(lab.runtime, wrong), Error);
  }
  CHECK_EQ(engine.staging_options().slot_bytes, most / 2);
}

ON_EACH_THREADED_RUNTIME(a_ring_that_is_configured_anew_serves_what_comes_later) {
  for (Direction direction : both) {
    auto held_back = std::make_shared<GateBefore>(lab.runtime, StreamKind::copy, 0);
    CopyEngine engine(held_back, small_ring);
    const Leaf before(lab, direction, 2 * slot, 1);
    const Leaf after(lab, direction, size, 2);
    auto first = engine.submit(staged(before));
    REQUIRE(first->issued_for(patience));
    engine.configure_staging({3 * slot, 2, 3, 1});
    auto second = engine.submit(staged(after));
    CHECK(!second->issued_for(moment));  // it waits for the slots of the first
    CHECK_EQ(engine.staging_bytes(), 2 * slot);
    held_back->gate->open();
    CHECK(in_time(*first));
    CHECK(in_time(*second));
    CHECK(before.right());
    CHECK(after.right());
    // One slot is enough where it comes back before the next piece asks for one.
    const std::size_t bytes = engine.staging_bytes();
    CHECK(bytes == 3 * slot || bytes == 6 * slot);
  }
}

ON_EACH_RUNTIME(without_more_page_locked_memory_it_goes_on_with_what_there_is) {
  struct Poor final : ProxyRuntime {
    using ProxyRuntime::ProxyRuntime;
    void* alloc_pinned(std::size_t bytes) override {
      if (left-- <= 0) throw Error(ErrorKind::out_of_memory, "no more");
      return ProxyRuntime::alloc_pinned(bytes);
    }
    std::atomic<int> left{0};
  };
  for (Direction direction : both) {
    auto poor = std::make_shared<Poor>(lab.runtime);
    CopyEngine engine(poor, small_ring);
    const Leaf leaf(lab, direction, size, 1);
    auto failed = engine.submit(staged(leaf));
    CHECK_THROWS(in_time(*failed), Error);
    poor->left = 1;
    CHECK(in_time(*engine.submit(staged(leaf))));
    CHECK(leaf.right());
    CHECK_EQ(engine.staging_bytes(), slot);
  }
}

// ---- errors

ON_EACH_RUNTIME(what_cannot_be_staged_is_refused_before_anything_is_enqueued) {
  CopyEngine engine(lab.runtime, small_ring);
  const Leaf leaf(lab, Direction::to_host, 4 * slot, 1, 2 * slot);
  CHECK_THROWS(engine.submit(staged(leaf)), Error);
  TransferRequest body = staged(leaf);
  body.items[0] = {nullptr, nullptr, 8, 1, [] {}};
  CHECK_THROWS(engine.submit(body), Error);
  CHECK(leaf.result->holds(poison));
  CHECK_EQ(engine.reap(), 0);
}

// Whatever call fails, the transfer ends when its memory is out of use, and no slot is lost.
static void fail_every_call(Lab& lab, Direction direction) {
  auto failing = std::make_shared<FailAt>(lab.runtime);
  CopyEngine engine(failing, small_ring);
  bool failed = true;
  int call = 1;
  for (; failed; ++call) {
    REQUIRE(call < 400);
    const Leaf leaf(lab, direction, size, static_cast<std::uint64_t>(call));
    Keep from;
    Keep to;
    TransferRequest request = staged(leaf);
    request.keep_source = std::move(from.handle);
    request.keep_destination = std::move(to.handle);
    failing->left = call;
    failed = false;
    try {
      auto transfer = engine.submit(std::move(request));
      CHECK(in_time(*transfer));
    } catch (const Boom&) {
      failed = true;
    }
    failing->left = 0;
    request = {};
    if (!failed) CHECK(leaf.right());
    reap_all(engine);
    lab.runtime->device_sync(0);
    CHECK(*from.gone);
    CHECK(*to.gone);
    const Leaf next(lab, direction, size, 1);
    REQUIRE(in_time(*engine.submit(staged(next))));
    CHECK(next.right());
    CHECK(engine.staging_bytes() <= slots * slot);
  }
  CHECK(call > 50);
}

ON_EACH_THREADED_RUNTIME(a_call_that_fails_on_the_way_to_the_host_loses_no_slot) {
  fail_every_call(lab, Direction::to_host);
}

ON_EACH_THREADED_RUNTIME(a_call_that_fails_on_the_way_to_a_device_loses_no_slot) {
  fail_every_call(lab, Direction::to_device);
}

// Copies are under way when the next one cannot be issued.
ON_EACH_THREADED_RUNTIME(a_failed_issue_ends_after_its_copies) {
  struct GateAndFail final : ProxyRuntime {
    GateAndFail(std::shared_ptr<Runtime> inner, StreamKind on)
        : ProxyRuntime(std::move(inner)), kind(on) {}
    void copy_async(void* dst, const void* src, std::size_t bytes, StreamRef stream) override {
      if (stream.kind == kind) {
        if (copies++ == 0) {
          gate = ProxyRuntime::gate(stream);
        } else if (copies == 2) {
          failed = true;
          throw Boom();
        }
      }
      ProxyRuntime::copy_async(dst, src, bytes, stream);
    }
    const StreamKind kind;
    int copies = 0;
    std::unique_ptr<Gate> gate;
    std::atomic<bool> failed{false};
  };
  for (Direction direction : both) {
    for (StreamKind kind : {StreamKind::copy, StreamKind::host}) {
      auto failing = std::make_shared<GateAndFail>(lab.runtime, kind);
      CopyEngine engine(failing, small_ring);
      const Leaf leaf(lab, direction, 2 * slot, 1);
      Keep from;
      TransferRequest request = staged(leaf);
      request.keep_source = std::move(from.handle);
      auto transfer = engine.submit(std::move(request));
      const auto until = std::chrono::steady_clock::now() + patience;
      while (!failing->failed && std::chrono::steady_clock::now() < until) {
        REQUIRE(!transfer->issued());
      }
      CHECK(held(*transfer));
      CHECK(!*from.gone);
      failing->gate->open();
      CHECK_THROWS(in_time(*transfer), Boom);
      CHECK_THROWS(transfer->done(), Boom);
      CHECK_THROWS(transfer->source_sync_for(patience), Boom);
      transfer.reset();
      lab.runtime->device_sync(0);
      CHECK(*from.gone);
      const Leaf next(lab, direction, size, 2);
      CHECK(in_time(*engine.submit(staged(next))));
      CHECK(next.right());
    }
  }
}

// Copiers work side by side, and the bytes of the later transfer are to stay.
TEST(host_a_later_transfer_into_the_same_memory_comes_later) {
  Lab lab(host_backend());
  auto gated = std::make_shared<GateBefore>(lab.runtime, StreamKind::host, 0);
  CopyEngine engine(gated, small_ring);
  const Leaf first(lab, Direction::to_host, slot, 1);
  const Leaf second(lab, Direction::to_host, slot, 2);
  auto earlier = engine.submit(staged(first));
  gated->wait_closed(*earlier);
  TransferRequest request = staged(second);
  request.items.front().dst = first.result->data();
  auto later = engine.submit(request);
  CHECK(held(*later));
  gated->gate->open();
  CHECK(earlier->sync_for(patience, false));  // its bytes are not read: they are the later one's
  CHECK(in_time(*later));
  CHECK(std::memcmp(first.result->data(), second.expected->data(), slot) == 0);
}

// The work fails, not its issue.
TEST(host_the_error_of_one_copy_stays_with_its_transfer) {
  struct FailingCopy final : ProxyRuntime {
    FailingCopy(std::shared_ptr<Runtime> inner, StreamKind on, int index)
        : ProxyRuntime(std::move(inner)), kind(on), left(index) {}
    void copy_async(void* dst, const void* src, std::size_t bytes, StreamRef stream) override {
      if (stream.kind == kind && left-- == 0) {
        ProxyRuntime::launch([] { throw Boom(); }, stream);
      }
      ProxyRuntime::copy_async(dst, src, bytes, stream);
    }
    const StreamKind kind;
    int left;
  };
  for (Direction direction : both) {
    for (StreamKind kind : {StreamKind::copy, StreamKind::host}) {
      for (int index : {0, 1, 4, 10}) {
        Lab lab(host_backend());
        CopyEngine engine(std::make_shared<FailingCopy>(lab.runtime, kind, index), small_ring);
        const Leaf bad(lab, direction, size, 1);
        const Leaf good(lab, direction, size, 2);
        auto failed = engine.submit(staged(bad));
        auto fine = engine.submit(staged(good));
        CHECK_THROWS(in_time(*failed), Boom);
        CHECK_THROWS(failed->done(), Boom);
        CHECK(in_time(*fine));
        CHECK(good.right());
        CHECK(engine.staging_bytes() <= slots * slot);
      }
    }
  }
}

// Nothing is known of a stream that cannot be waited for: both ends are kept, and the slots stay
// out until it can.
TEST(host_what_cannot_be_drained_is_kept_and_drained_later) {
  struct Deaf final : ProxyRuntime {
    using ProxyRuntime::ProxyRuntime;
    void copy_async(void* dst, const void* src, std::size_t bytes, StreamRef stream) override {
      if (deaf && copies++ == 1) throw Boom();
      ProxyRuntime::copy_async(dst, src, bytes, stream);
    }
    void stream_sync(StreamRef stream, Site site) override {
      if (deaf) throw Boom();
      ProxyRuntime::stream_sync(stream, site);
    }
    std::atomic<bool> deaf{true};
    int copies = 0;
  };
  for (Direction direction : both) {
    Lab lab(host_backend());
    auto runtime = std::make_shared<Deaf>(lab.runtime);
    CopyEngine engine(runtime, small_ring);
    const Leaf leaf(lab, direction, size, 1);
    Keep from;
    TransferRequest request = staged(leaf);
    request.keep_source = std::move(from.handle);
    auto transfer = engine.submit(std::move(request));
    CHECK_THROWS(in_time(*transfer), Boom);
    CHECK(!transfer->ended());
    engine.abandon(std::move(transfer));
    lab.runtime->device_sync(0);
    CHECK_EQ(engine.reap(), 1);
    CHECK(!engine.expects());
    CHECK(!*from.gone);
    // What was issued to the end is put back; the others are out.
    engine.trim_staging();
    CHECK(engine.staging_bytes() > 0);
    const Leaf refused(lab, direction, size, 2);
    CHECK_THROWS(in_time(*engine.submit(staged(refused))), Boom);
    runtime->deaf = false;
    const Leaf next(lab, direction, size, 3);
    CHECK(in_time(*engine.submit(staged(next))));
    CHECK(next.right());
    lab.runtime->device_sync(0);
    CHECK(engine.trim_staging() > 0);
    CHECK_EQ(engine.staging_bytes(), 0);
  }
}

TEST(host_a_fresh_destination_lives_until_its_pages_are_made) {
  struct GateBeforePages final : ProxyRuntime {
    using ProxyRuntime::ProxyRuntime;
    void launch(std::function<void()> task, StreamRef stream) override {
      if (launches++ == 1) gate = ProxyRuntime::gate(stream);  // the first issues the copies
      ProxyRuntime::launch(std::move(task), stream);
    }
    void copy_async(void*, const void*, std::size_t, StreamRef) override { throw Boom(); }
    std::atomic<int> launches{0};
    std::unique_ptr<Gate> gate;
  };
  Lab lab(host_backend());
  auto runtime = std::make_shared<GateBeforePages>(lab.runtime);
  CopyEngine engine(runtime, small_ring);
  Leaf leaf(lab, Direction::to_host, slot, 1);
  leaf.item.fresh = true;
  Keep keep;
  TransferRequest request = staged(leaf);
  request.keep_destination = std::move(keep.handle);
  auto transfer = engine.submit(std::move(request));
  request = {};
  CHECK_THROWS(in_time(*transfer), Boom);
  transfer.reset();
  REQUIRE(runtime->gate);
  CHECK(!*keep.gone);
  runtime->gate->open();
  lab.runtime->device_sync(0);
  CHECK(*keep.gone);
}

// ---- lifetime and threads

ON_EACH_RUNTIME(both_ends_live_until_the_last_slot_is_copied_out) {
  auto held_back = std::make_shared<GateBefore>(lab.runtime, StreamKind::host, 1);
  CopyEngine engine(held_back, small_ring);
  const Leaf leaf(lab, Direction::to_host, 2 * slot, 1);
  Keep to;
  TransferRequest request = staged(leaf);
  request.keep_destination = std::move(to.handle);
  auto transfer = engine.submit(std::move(request));
  REQUIRE(transfer->source_sync_for(patience));
  transfer->release_source();
  held_back->wait_closed(*transfer);
  engine.abandon(std::move(transfer));
  CHECK_EQ(engine.reap(), 1);
  CHECK(!*to.gone);
  held_back->gate->open();
  reap_all(engine);
  lab.runtime->device_sync(0);
  CHECK(*to.gone);
  CHECK(leaf.right());
}

ON_EACH_THREADED_RUNTIME(many_threads_stage_both_ways) {
  CopyEngine engine(lab.runtime, small_ring);
  constexpr std::size_t count = 6;
  std::vector<std::unique_ptr<Leaf>> leaves;
  for (std::size_t i = 0; i < count * 10; ++i) {
    leaves.push_back(std::make_unique<Leaf>(lab, both[i % 2], 100 + i * 57, i));
  }
  std::atomic<bool> ending{false};
  std::thread trimmer([&] {
    while (!ending) engine.trim_staging();
  });
  std::vector<std::thread> threads;
  lab.hand_over();
  for (std::size_t t = 0; t < count; ++t) {
    threads.emplace_back([&, t] {
      lab.take_over();
      std::vector<std::shared_ptr<Transfer>> waiting;
      for (std::size_t i = t; i < leaves.size(); i += count) {
        waiting.push_back(engine.submit(staged(*leaves[i])));
      }
      for (auto& transfer : waiting) CHECK(in_time(*transfer));
      lab.hand_over();
    });
  }
  for (std::thread& thread : threads) thread.join();
  ending = true;
  trimmer.join();
  lab.take_over();
  for (const auto& leaf : leaves) CHECK(leaf->right());
  CHECK(engine.staging_bytes() <= 2 * slots * slot);
}
