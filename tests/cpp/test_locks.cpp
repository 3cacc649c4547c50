// Every lock of csrc/transfer, and everything else that tells one thread what another one knew.
// Threads come one after the other, and nobody tells the checker of their start or end: only a lock
// orders them. So in the programs of the mutation gate, where a lock also tells what it guards, one
// that is left out is refused every time. Elsewhere these are plain tests of use from many threads.
#include <functional>
#include <thread>

#include "lab.h"
#include "transfer/copy_engine.h"
#include "transfer/pinned_pool.h"
#include "transfer/slot_ring.h"

using namespace streamlap;
using namespace streamlap::testing;

namespace {

constexpr std::size_t size = 4096;

// Throws here what `body` throws there.
void in_another_thread(const std::function<void()>& body) {
  std::exception_ptr thrown;
  std::thread([&] {
    try {
      body();
    } catch (...) {
      thrown = std::current_exception();
    }
  }).join();
  if (thrown) std::rethrow_exception(thrown);
}

// Throws what the checker found where it could not throw.
void ask(Lab& lab) { lab.runtime->host_reads(nullptr, 0); }

// `first` and then `second`, in a thread each.
void in_turn(Lab& lab, const std::function<void()>& first, const std::function<void()>& second) {
  in_another_thread(first);
  in_another_thread(second);
  ask(lab);
}

// Runs `between` in another thread whenever a lock is let go of to ask the system, and `at_sync`
// before the calling thread waits.
class Interrupted final : public ProxyRuntime {
 public:
  using ProxyRuntime::ProxyRuntime;

  void* alloc_pinned(std::size_t bytes) override {
    if (between) in_another_thread(between);
    if (std::exchange(refuse, false)) throw Error(ErrorKind::runtime, "refused");
    return ProxyRuntime::alloc_pinned(bytes);
  }
  void free_pinned(void* pointer, std::size_t bytes) noexcept override {
    if (between) in_another_thread(between);
    ProxyRuntime::free_pinned(pointer, bytes);
  }

  bool event_sync_for(const Event& event, std::chrono::nanoseconds timeout, Site site) override {
    if (at_sync) in_another_thread(at_sync);
    return ProxyRuntime::event_sync_for(event, timeout, site);
  }
  // So that growth happens in the thread that asks for it.
  bool virtual_time() const noexcept override { return at_once || ProxyRuntime::virtual_time(); }

  std::function<void()> between;
  std::function<void()> at_sync;
  bool refuse = false;
  bool at_once = false;
};

TransferRequest copy_of(Pinned& out, DeviceBytes& source) {
  TransferRequest request;
  request.items = {{out.data(), source.data(), size, 1, nullptr}};
  return request;
}

struct PoolLab : Lab {
  explicit PoolLab(
      std::shared_ptr<Interrupted> proxy = std::make_shared<Interrupted>(host_backend()))
      : Lab(proxy),
        interrupted(proxy),
        pool(std::make_shared<PinnedPool>(proxy, 4 * PinnedPool::smallest_block)) {}

  std::shared_ptr<Interrupted> interrupted;
  std::shared_ptr<PinnedPool> pool;
};

}  // namespace

// ---- the pool
// --------------------------------------------------------------------------------------

TEST(pool_figures_are_guarded) {
  PoolLab lab;
  const auto live = [&] { lab.pool->live(); };
  in_turn(lab, live, [&] { lab.pool->limit(); });
  in_turn(lab, live, live);
  in_turn(lab, live, [&] { lab.pool->has_room(size, 1); });
  in_turn(lab, live, [&] { lab.pool->set_limit(4 * size); });
  in_turn(lab, live, [&] { lab.pool->stats(); });
}

TEST(pool_trimming_is_guarded) {
  PoolLab lab;
  in_turn(lab, [&] { lab.pool->live(); }, [&] { lab.pool->trim(); });
}

TEST(pool_memory_that_leaves_is_guarded) {
  PoolLab lab;
  lab.pool->try_allocate(size).reset();
  lab.interrupted->between = [&] { lab.pool->live(); };
  lab.pool->trim();
  ask(lab);
  lab.interrupted->between = nullptr;
}

TEST(pool_uses_are_found_under_the_lock) {
  PoolLab lab;
  StreamRef stream = lab.copy();
  auto block = lab.pool->try_allocate(size);
  in_turn(lab, [&] { lab.pool->live(); }, [&] { lab.pool->record_use(block->data(), stream); });
}

TEST(pool_uses_are_told_under_the_lock) {
  PoolLab lab;
  auto block = lab.pool->try_allocate(size);
  in_turn(lab, [&] { lab.pool->live(); }, [&] { lab.pool->uses(block->data()); });
}

TEST(pool_uses_of_one_block_are_guarded) {
  PoolLab lab;
  StreamRef stream = lab.copy();
  auto block = lab.pool->try_allocate(size);
  const auto use = [&] { block->record_use(stream); };
  in_turn(lab, use, use);
  in_turn(lab, use, [&] { block->uses(); });
}

TEST(pool_memory_that_comes_back_is_guarded) {
  PoolLab lab;
  auto block = lab.pool->try_allocate(size);
  in_turn(lab, [&] { lab.pool->live(); }, [&] { block.reset(); });
}

TEST(pool_reuse_is_guarded) {
  PoolLab lab;
  lab.pool->try_allocate(size).reset();
  in_turn(lab, [&] { lab.pool->live(); }, [&] { lab.pool->try_allocate(size); });
}

TEST(pool_claims_are_guarded) {
  PoolLab lab;
  lab.pool->try_allocate(4 * size).reset();  // it has to go before there is room
  lab.interrupted->between = [&] { lab.pool->live(); };
  auto block = lab.pool->try_allocate(size);
  ask(lab);
  lab.interrupted->refuse = true;
  CHECK_THROWS(lab.pool->try_allocate(2 * size), Error);
  ask(lab);
  lab.interrupted->between = nullptr;
}

TEST(pool_growth_is_guarded) {
  PoolLab lab;
  lab.interrupted->at_once = true;
  const auto live = [&] { lab.pool->live(); };
  std::shared_ptr<Growth> growth = lab.pool->grow_ahead(size, 1);
  REQUIRE(growth != nullptr);
  in_turn(lab, live, [&] { CHECK(lab.pool->grow_ahead(size, 1) == nullptr); });
  in_turn(lab, live, [&] { lab.pool->cancel(*growth); });
  in_turn(lab, live, [&] { CHECK(lab.pool->grown(*growth)); });
  in_turn(lab, live, [&] { CHECK(!lab.pool->busy()); });
  in_turn(lab, live, [&] { CHECK_THROWS(lab.pool->start_prewarm(size, 5), PoolExhausted); });
  lab.interrupted->between = live;
  lab.pool->grow_ahead(size, 2);
  ask(lab);
  lab.interrupted->between = nullptr;
}

// What a thread wrote to a block, the next owner of the memory in another thread comes after.
TEST(pool_memory_comes_with_what_was_known_of_it) {
  PoolLab lab;
  auto data = lab.device(size, 1);
  std::byte* memory = nullptr;
  lab.hand_over();
  in_another_thread([&] {
    lab.take_over();
    StreamRef stream = lab.copy();
    auto block = lab.pool->try_allocate(size);
    memory = block->data();
    lab.runtime->copy_async(memory, data->data(), size, stream);
    lab.runtime->stream_sync(stream, here);
  });
  in_another_thread([&] { CHECK(lab.pool->try_allocate(size)->data() == memory); });
  ask(lab);
}

// ---- the engine
// ------------------------------------------------------------------------------------

TEST(engine_lanes_are_guarded) {
  Lab lab(host_backend());
  CopyEngine engine(lab.runtime);
  const auto lane = [&] { engine.copy_stream(0, Direction::to_host); };
  in_turn(lab, lane, lane);
}

TEST(engine_abandoned_transfers_are_guarded) {
  Lab lab(host_backend());
  CopyEngine engine(lab.runtime);
  const auto lane = [&] { engine.copy_stream(0, Direction::to_host); };
  in_turn(lab, lane, [&] { engine.abandon(engine.submit({})); });
  in_turn(lab, lane, [&] { engine.reap(); });
}

TEST(engine_what_is_let_go_of_is_guarded) {
  Lab lab(host_backend());
  CopyEngine engine(lab.runtime);
  auto out = lab.pinned(size);
  auto source = lab.device(size, 1);
  TransferRequest request = copy_of(*out, *source);
  std::size_t seen = 0;
  request.keep_source = std::shared_ptr<void>(
      nullptr, [&](void*) { in_another_thread([&] { seen = engine.reap(); }); });
  auto transfer = engine.submit(std::move(request));
  request = {};
  CHECK(transfer->sync_for(patience));
  engine.abandon(std::move(transfer));
  CHECK_EQ(engine.reap(), 0);
  ask(lab);
  CHECK_EQ(seen, 1);  // on its way out it still holds its memory
}

TEST(engine_issues_one_transfer_at_a_time) {
  Lab lab(host_backend());
  CopyEngine engine(lab.runtime);
  auto source = lab.device(size, 1);
  std::vector<PinnedPtr> outs{lab.pinned(size), lab.pinned(size)};
  lab.hand_over();
  const auto submit = [&](std::size_t i) {
    lab.take_over();
    CHECK(engine.submit(copy_of(*outs[i], *source))->sync_for(patience));
  };
  in_turn(lab, [&] { submit(0); }, [&] { submit(1); });
}

TEST(engine_staging_is_configured_under_the_lock) {
  Lab lab(host_backend());
  CopyEngine engine(lab.runtime);
  const auto lane = [&] { engine.copy_stream(0, Direction::to_host); };
  in_turn(lab, lane, [&] { engine.configure_staging({size, 2, 1, 1}); });
  in_turn(lab, lane, [&] { engine.staging_options(); });
  in_turn(lab, lane, [&] { engine.staging_bytes(); });
}

// ---- slots
// -----------------------------------------------------------------------------------------

struct RingLab : Lab {
  explicit RingLab(
      std::shared_ptr<Interrupted> proxy = std::make_shared<Interrupted>(host_backend()))
      : Lab(proxy), interrupted(proxy), ring(proxy, 0) {
    in_another_thread([&] { ring.shape(size, 2); });
    look = [&] { ring.bytes(); };
  }
  // `act` in a thread, after another has looked at the ring.
  void after_a_look(const std::function<void()>& act) { in_turn(*this, look, act); }

  std::shared_ptr<Interrupted> interrupted;
  SlotRing ring;
  std::function<void()> look;
};

TEST(ring_figures_are_guarded) {
  RingLab lab;
  lab.after_a_look(lab.look);
}

TEST(ring_slots_are_taken_and_put_back_under_the_lock) {
  RingLab lab;
  Slot* first = nullptr;
  Slot* second = nullptr;
  lab.after_a_look([&] { first = lab.ring.take_ready(); });
  lab.after_a_look([&] { second = lab.ring.take_ready(); });
  lab.after_a_look([&] { CHECK(lab.ring.take_ready() == nullptr); });
  lab.after_a_look([&] { CHECK_THROWS(lab.ring.take(), Error); });
  const StreamRef stream = lab.copy();
  auto gate = lab.runtime->gate(stream);
  lab.runtime->event_record(*second->moved, stream, here);
  lab.after_a_look([&] { lab.ring.put(*second, second->moved); });
  CHECK(lab.ring.take_ready() == nullptr);
  gate->open();
  lab.after_a_look([&] { CHECK(&lab.ring.take() == second); });
  lab.after_a_look([&] { lab.ring.reclaim(); });
  lab.after_a_look([&] { CHECK(lab.ring.take_ready() != nullptr); });
  lab.after_a_look([&] { lab.ring.reclaim(); });
}

TEST(ring_growth_is_guarded) {
  RingLab lab;
  lab.interrupted->between = lab.look;
  CHECK(lab.ring.take_ready() != nullptr);
  ask(lab);
  lab.interrupted->refuse = true;
  CHECK_THROWS(lab.ring.take_ready(), Error);
  ask(lab);
  lab.interrupted->between = nullptr;
  lab.ring.reclaim();
}

TEST(ring_trimming_and_shaping_are_guarded) {
  RingLab lab;
  const auto fill = [&] {
    CHECK(lab.ring.take_ready() != nullptr);
    lab.ring.reclaim();
  };
  fill();
  lab.after_a_look([&] { CHECK_EQ(lab.ring.trim(), size); });
  fill();
  lab.after_a_look([&] { lab.ring.shape(2 * size, 2); });
  CHECK_EQ(lab.ring.bytes(), 0);
  fill();
  CHECK_EQ(lab.ring.trim(), 2 * size);
}

// A ring of its own size is left alone: the lock is taken once, and the second time to change it.
TEST(ring_that_changes_is_guarded) {
  RingLab lab;
  Slot* slot = lab.ring.take_ready();
  const StreamRef stream = lab.copy();
  lab.runtime->event_record(*slot->moved, stream, here);
  lab.ring.put(*slot, slot->moved);
  lab.interrupted->at_sync = lab.look;
  lab.ring.shape(2 * size, 2);
  ask(lab);
  lab.interrupted->at_sync = nullptr;
}

// ---- transfers
// -------------------------------------------------------------------------------------

TEST(transfer_ends_are_guarded) {
  Lab lab(host_backend());
  CopyEngine engine(lab.runtime);
  auto transfer = engine.submit({});
  const auto source = [&] { transfer->release_source(); };
  const auto all = [&] { transfer->release_all(); };
  in_turn(lab, source, source);
  in_turn(lab, all, all);
}

// Who is told that a transfer is done, by a thread that saw it, may read what came.
TEST(transfer_done_is_told_with_what_was_known) {
  Lab lab(host_backend());
  CopyEngine engine(lab.runtime);
  auto out = lab.pinned(size);
  auto source = lab.device(size, 1);
  TransferRequest request = copy_of(*out, *source);
  auto transfer = engine.submit(std::move(request));
  CHECK(transfer->sync_for(patience));
  in_another_thread([&] { CHECK(transfer->sync_for(patience)); });
  in_another_thread([&] {
    CHECK(transfer->done());
    lab.runtime->host_reads(out->data(), size);
  });
}

// A thread lets go of a transfer that it has waited for; the last reference dies in another one,
// and with it the memory is anybody's again.
TEST(transfer_dies_knowing_what_those_knew_who_let_go) {
  Lab lab(host_backend());
  CopyEngine engine(lab.runtime);
  auto out = lab.pinned(size);
  auto source = lab.device(size, 1);
  TransferRequest request = copy_of(*out, *source);
  request.keep_destination =
      std::shared_ptr<void>(nullptr, [&](void*) { lab.runtime->taken(out->data(), size); });
  auto transfer = engine.submit(std::move(request));
  request = {};
  in_another_thread([&] {
    CHECK(transfer->sync_for(patience));
    transfer->let_go();
  });
  in_another_thread([&] { transfer.reset(); });
  ask(lab);
}
