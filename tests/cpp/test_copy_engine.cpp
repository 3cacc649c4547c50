// Transfers: right bytes, in order after the producer, both ends alive to the end, errors kept
// apart. Each ordering call of copy_engine.cpp and transfer.cpp has a test here that fails without
// it.
#include "transfer/copy_engine.h"

#include <atomic>
#include <cmath>
#include <random>
#include <thread>

#include "check/checked_runtime.h"
#include "check/faulty_runtime.h"
#include "lab.h"
#include "runtime/proxy_runtime.h"

using namespace streamlap;
using namespace streamlap::testing;

namespace {

constexpr std::size_t size = 64 << 10;

struct Boom : std::runtime_error {
  Boom() : std::runtime_error("boom") {}
};

// A keep-alive whose death can be seen.
struct Keep {
  std::shared_ptr<std::atomic<bool>> gone = std::make_shared<std::atomic<bool>>(false);
  std::shared_ptr<void> handle{new int, [gone = gone](void* memory) {
                                 delete static_cast<int*>(memory);
                                 *gone = true;
                               }};
};

TransferRequest request_of(std::vector<CopyItem> items, std::vector<StreamRef> after = {}) {
  TransferRequest request;
  request.items = std::move(items);
  request.after = std::move(after);
  return request;
}

template <class Destination, class Source>
TransferRequest request_of(const std::shared_ptr<Destination>& dst,
                           const std::shared_ptr<Source>& src, std::vector<StreamRef> after = {}) {
  return request_of({{dst->data(), src->data(), src->bytes(), 1, nullptr}}, std::move(after));
}

bool in_time(Transfer& transfer) { return transfer.sync_for(patience); }
bool held(Transfer& transfer) { return !transfer.sync_for(moment) && !transfer.done(); }

void fill_randomly(Pinned& memory, std::mt19937_64& random) {
  for (std::size_t i = 0; i < memory.bytes(); ++i) {
    memory.data()[i] = static_cast<unsigned char>(random());
  }
}

// One abandoned transfer stays abandoned, given a moment to go wrongly.
bool still_kept(CopyEngine& engine) {
  for (const auto end = std::chrono::steady_clock::now() + moment;
       std::chrono::steady_clock::now() < end; std::this_thread::sleep_for(1ms)) {
    if (engine.reap() != 1) return false;
  }
  return true;
}

void reap_all(CopyEngine& engine) {
  for (int i = 0; i < 10'000 && engine.reap() > 0; ++i) {
    engine.runtime()->poll();  // a simulation moves only when it is asked to
    if (!engine.runtime()->virtual_time()) std::this_thread::sleep_for(1ms);
  }
}

}  // namespace

// ---- bytes
// ----------------------------------------------------------------------------------------

ON_EACH_RUNTIME(every_byte_of_every_leaf) {
  CopyEngine engine(lab.runtime);
  std::mt19937_64 random(7);
  for (std::size_t chunk : {std::size_t{100}, std::size_t{4096}, std::size_t{1} << 20}) {
    for (Direction direction : {Direction::to_host, Direction::to_device}) {
      for (bool late : {false, true}) {
        std::vector<CopyItem> items;
        std::vector<PinnedPtr> sources;
        std::vector<PinnedPtr> results;
        std::vector<std::shared_ptr<DeviceBytes>> middles;
        StreamRef setup = lab.compute();
        for (std::size_t elements : {0, 1, 5, 1000, 12345}) {
          const std::size_t bytes = elements * 4;
          sources.push_back(lab.pinned(bytes));
          results.push_back(lab.pinned(bytes));
          fill_randomly(*sources.back(), random);
          if (bytes == 0) {
            items.push_back({nullptr, nullptr, 0, 4, nullptr});
            continue;
          }
          middles.push_back(lab.device(bytes));
          unsigned char* middle = middles.back()->data();
          if (direction == Direction::to_host) {
            lab.runtime->copy_async(middle, sources.back()->data(), bytes, setup);
            items.push_back({results.back()->data(), middle, bytes, 4, nullptr});
          } else {
            items.push_back({middle, sources.back()->data(), bytes, 4, nullptr});
          }
        }
        TransferRequest request = request_of(items, {setup});
        request.direction = direction;
        request.policy = {chunk, chunk * 2};
        request.staged = late;
        auto transfer = engine.submit(request);
        REQUIRE(in_time(*transfer));
        CHECK(transfer->done());
        if (direction == Direction::to_device) {
          for (std::size_t i = 1; i < items.size(); ++i) {
            lab.runtime->copy_async(results[i]->data(), items[i].dst, items[i].bytes, setup);
          }
          lab.runtime->stream_sync(setup, here);
        }
        for (std::size_t i = 0; i < items.size(); ++i) {
          CHECK(std::memcmp(results[i]->data(), sources[i]->data(), items[i].bytes) == 0);
        }
      }
    }
  }
}

ON_EACH_RUNTIME(nothing_to_copy_is_done_at_once) {
  CopyEngine engine(lab.runtime);
  StreamRef producer = lab.compute();
  auto gate = lab.runtime->gate(producer);
  Keep keep;
  TransferRequest request =
      request_of(std::vector<CopyItem>{{nullptr, nullptr, 0, 8, nullptr}}, {producer});
  request.keep_source = keep.handle;
  auto transfer = engine.submit(request);
  CHECK(transfer->issued());
  CHECK(transfer->done());
  CHECK(transfer->sync_for(0ns));
  CHECK(transfer->leaf_done(0));
  CHECK(transfer->leaf_sync_for(0, 0ns));
  CHECK_EQ(transfer->elapsed_from(*transfer), 0.0);
  CHECK(std::isnan(transfer->interval().first));
  transfer->stream_wait(lab.copy());
  CHECK(engine.submit({})->done());
  gate->open();
}

TEST(host_a_body_copies_its_leaf_whole) {
  Lab lab(host_backend());
  CopyEngine engine(lab.runtime);
  auto out = lab.pinned(size);
  int calls = 0;
  TransferRequest request = request_of({{nullptr, nullptr, size, 1, [&] {
                                           std::memset(out->data(), 5, size);
                                           ++calls;
                                         }}});
  request.policy = {1024, 1024};
  CHECK(in_time(*engine.submit(request)));
  CHECK_EQ(calls, 1);
  CHECK(out->holds(5));
}

ON_EACH_RUNTIME(a_bad_policy_is_refused_before_anything_is_enqueued) {
  CopyEngine engine(lab.runtime);
  auto out = lab.pinned(size);
  auto source = lab.device(size, 1);
  Keep keep;
  TransferRequest request = request_of(out, source);
  request.policy.chunk_bytes = 0;
  request.keep_source = std::move(keep.handle);
  CHECK_THROWS(engine.submit(std::move(request)), Error);
  CHECK(*keep.gone);
  CHECK_EQ(engine.reap(), 0);
  CHECK(out->holds(poison));
}

// ---- order
// ----------------------------------------------------------------------------------------

ON_EACH_RUNTIME(a_copy_starts_after_its_producer) {
  CopyEngine engine(lab.runtime);
  auto data = lab.device(size);
  auto out = lab.pinned(size);
  auto value = lab.pinned(size, 9);
  StreamRef producer = lab.compute();
  auto gate = lab.runtime->gate(producer);
  lab.runtime->copy_async(data->data(), value->data(), size, producer);
  auto transfer =
      engine.submit(request_of({{out->data(), data->data(), size, 1, nullptr}}, {producer}));
  CHECK(transfer->issued());
  CHECK(held(*transfer));
  CHECK(!transfer->leaf_done(0));
  CHECK(out->holds(poison));
  gate->open();
  CHECK(in_time(*transfer));
  CHECK(out->holds(9));
}

ON_EACH_RUNTIME(every_producer_is_waited_for) {
  CopyEngine engine(lab.runtime);
  auto out = lab.pinned(size);
  auto source = lab.device(size, 1);
  std::vector<StreamRef> producers{lab.compute(), lab.compute(), lab.copy()};
  for (StreamRef slow : producers) {
    std::memset(out->data(), poison, size);
    auto gate = lab.runtime->gate(slow);
    auto transfer = engine.submit(request_of(out, source, producers));
    CHECK(held(*transfer));
    CHECK(out->holds(poison));
    gate->open();
    CHECK(in_time(*transfer));
    CHECK(out->holds(1));
  }
}

ON_EACH_RUNTIME(work_that_the_producer_gets_later_is_not_waited_for) {
  CopyEngine engine(lab.runtime);
  auto out = lab.pinned(size);
  auto source = lab.device(size, 1);
  StreamRef producer = lab.compute();
  auto transfer = engine.submit(request_of(out, source, {producer}));
  auto gate = lab.runtime->gate(producer);
  CHECK(in_time(*transfer));
  CHECK(out->holds(1));
  gate->open();
}

ON_EACH_RUNTIME(a_consumer_waits_for_the_copy) {
  CopyEngine engine(lab.runtime);
  auto middle = lab.device(size);
  auto out = lab.pinned(size);
  auto source = lab.device(size, 6);
  StreamRef producer = lab.compute();
  StreamRef consumer = lab.compute();
  auto gate = lab.runtime->gate(producer);
  auto transfer = engine.submit(request_of(middle, source, {producer}));
  transfer->stream_wait(consumer);
  lab.runtime->copy_async(out->data(), middle->data(), size, consumer);
  EventPtr end = lab.record(consumer);
  CHECK(lab.held(end));
  CHECK(out->holds(poison));
  gate->open();
  CHECK(lab.in_time(end));
  CHECK(out->holds(6));
}

ON_EACH_RUNTIME(a_leaf_is_ready_before_the_leaves_after_it) {
  auto out = lab.pinned(size);
  auto source = lab.device(size, 3);
  const std::size_t half = size / 2;
  // A proxy closes a gate between the two leaves.
  struct Between final : ProxyRuntime {
    using ProxyRuntime::ProxyRuntime;
    void copy_async(void* dst, const void* src, std::size_t bytes, StreamRef stream) override {
      if (copies++ == 2) gate = ProxyRuntime::gate(stream);
      ProxyRuntime::copy_async(dst, src, bytes, stream);
    }
    int copies = 0;
    std::unique_ptr<Gate> gate;
  };
  auto between = std::make_shared<Between>(lab.runtime);
  CopyEngine through(between);
  TransferRequest request =
      request_of({{out->data(), source->data(), half, 1, nullptr},
                  {nullptr, nullptr, 0, 1, nullptr},
                  {out->data() + half, source->data() + half, half, 1, nullptr}});
  request.policy = {half / 2, 1};
  auto transfer = through.submit(request);
  REQUIRE(transfer->plan().chunks.size() == 4);
  CHECK(transfer->leaf_sync_for(0, patience));
  CHECK(transfer->leaf_done(0));
  CHECK(transfer->leaf_done(1));
  CHECK(transfer->chunk_sync_for(1, patience));
  for (std::size_t i = 0; i < half; ++i) REQUIRE(out->data()[i] == 3);
  CHECK(!transfer->leaf_sync_for(2, moment));
  CHECK(!transfer->leaf_done(2));
  CHECK(!transfer->chunk_sync_for(2, moment));
  CHECK(!transfer->chunk_sync_for(3, 0ns));
  CHECK(held(*transfer));
  for (std::size_t i = half; i < size; ++i) REQUIRE(out->data()[i] == poison);
  CHECK_THROWS(transfer->leaf_done(3), std::out_of_range);
  between->gate->open();
  CHECK(transfer->leaf_sync_for(2, patience));
  CHECK(transfer->chunk_sync_for(3, patience));
  CHECK(in_time(*transfer));
  CHECK(out->holds(3));
}

ON_EACH_RUNTIME(one_transfer_follows_another_on_its_lane_only) {
  CopyEngine engine(lab.runtime);
  auto first_out = lab.pinned(size);
  auto second_out = lab.pinned(size);
  auto source = lab.device(size, 1);
  StreamRef producer = lab.compute();
  auto gate = lab.runtime->gate(producer);
  auto first = engine.submit(request_of(first_out, source, {producer}));
  TransferRequest other = request_of(second_out, source);
  other.direction = Direction::to_device;
  CHECK(in_time(*engine.submit(other)));  // the other direction is not held
  CHECK(held(*first));
  gate->open();
  CHECK(in_time(*first));
}

ON_EACH_RUNTIME(times_cover_the_copies) {
  CopyEngine engine(lab.runtime);
  auto out = lab.pinned(size);
  auto source = lab.device(size, 1);
  auto transfer = engine.submit(request_of(out, source));
  CHECK(in_time(*transfer));
  CHECK(transfer->elapsed_from(*transfer) >= 0);
  CHECK(transfer->elapsed_from(*transfer) < 60);
}

ON_EACH_RUNTIME(an_untimed_transfer_tells_no_time_but_the_end) {
  CopyEngine engine(lab.runtime);
  auto out = lab.pinned(size);
  auto source = lab.device(size, 1);
  TransferRequest request = request_of(out, source);
  request.timed = false;
  auto transfer = engine.submit(std::move(request));
  CHECK(in_time(*transfer));
  CHECK_THROWS(transfer->elapsed_from(*transfer), Error);
  CHECK(std::isnan(transfer->interval().first));
}

TEST(host_the_interval_is_on_the_runtime_clock) {
  Lab lab(host_backend());
  CopyEngine engine(lab.runtime);
  auto out = lab.pinned(size);
  auto source = lab.device(size, 1);
  StreamRef producer = lab.compute();
  auto gate = lab.runtime->gate(producer);
  for (bool late : {false, true}) {
    TransferRequest request = request_of(out, source, {producer});
    request.staged = late;
    auto transfer = engine.submit(request);
    if (!late) CHECK(held(*transfer));
    const double opened = lab.runtime->now();
    gate->open();
    CHECK(in_time(*transfer));
    const auto [begin, end] = transfer->interval();
    CHECK(begin >= opened);
    CHECK(end >= begin);
    CHECK(end <= lab.runtime->now());
    CHECK(transfer->elapsed_from(*transfer) <= end - begin);
  }
}

// ---- a host stream issues
// -------------------------------------------------------------------------

ON_EACH_RUNTIME(late_copies_are_issued_after_the_producer) {
  CopyEngine engine(lab.runtime);
  auto out = lab.pinned(size);
  auto source = lab.device(size);
  auto value = lab.pinned(size, 4);
  StreamRef producer = lab.compute();
  auto gate = lab.runtime->gate(producer);
  lab.runtime->copy_async(source->data(), value->data(), size, producer);
  TransferRequest request = request_of(out, source, {producer});
  request.staged = true;
  auto transfer = engine.submit(request);
  CHECK(!transfer->issued());
  CHECK(!transfer->issued_for(moment));
  CHECK(held(*transfer));
  CHECK(!transfer->leaf_done(0));
  CHECK(!transfer->leaf_sync_for(0, moment));
  CHECK(!transfer->chunk_sync_for(0, moment));
  CHECK(out->holds(poison));
  gate->open();
  CHECK(transfer->issued_for(patience));
  CHECK(transfer->issued());
  CHECK(in_time(*transfer));
  CHECK(out->holds(4));
  CHECK(transfer->elapsed_from(*transfer) >= 0);
}

TEST(host_errors_of_late_copies_arrive_when_asked) {
  Lab lab(host_backend());
  CopyEngine engine(lab.runtime);
  auto out = lab.pinned(size);
  auto source = lab.device(size, 1);
  StreamRef producer = lab.compute();
  lab.runtime->launch([] { throw Boom(); }, producer);
  TransferRequest request = request_of(out, source, {producer});
  request.staged = true;
  auto failed = engine.submit(request);
  CHECK_THROWS(in_time(*failed), Boom);
  CHECK_THROWS(failed->done(), Boom);
  CHECK_THROWS(failed->issued(), Boom);
  CHECK_THROWS(failed->leaf_done(0), Boom);
  CHECK(out->holds(poison));
  CHECK_THROWS(lab.runtime->stream_sync(producer, here), Boom);
  CHECK(in_time(*engine.submit(request)));
  CHECK(out->holds(1));
}

ON_EACH_RUNTIME(late_issue_takes_no_last_step) {
  CopyEngine engine(lab.runtime);
  auto out = lab.pinned(size);
  auto source = lab.device(size, 1);
  TransferRequest request = request_of(out, source);
  request.staged = true;
  request.finish = [] {};
  CHECK_THROWS(engine.submit(request), Error);
  request.finish = nullptr;
  request.open_ended = true;
  CHECK_THROWS(engine.submit(request), Error);
  request.staged = false;
  request.finish = [] {};
  CHECK_THROWS(engine.submit(request), Error);
}

// ---- last steps
// -----------------------------------------------------------------------------------

ON_EACH_THREADED_RUNTIME(the_last_step_runs_after_the_copies_and_before_done) {
  CopyEngine engine(lab.runtime);
  auto out = lab.pinned(size);
  auto source = lab.device(size, 2);
  StreamRef producer = lab.compute();
  std::atomic<bool> entered{false};
  std::atomic<bool> leave{false};
  bool right = false;
  auto gate = lab.runtime->gate(producer);
  TransferRequest request = request_of(out, source, {producer});
  request.finish = [&] {
    right = out->holds(2);
    entered = true;
    entered.notify_all();
    leave.wait(false);
    std::memset(out->data(), 3, size);
  };
  auto transfer = engine.submit(request);
  CHECK(transfer->waits_on_host());
  CHECK(held(*transfer));
  CHECK(!entered);
  CHECK(out->holds(poison));
  gate->open();
  entered.wait(false);
  CHECK(right);
  CHECK(held(*transfer));
  CHECK(!transfer->leaf_sync_for(0, moment));
  CHECK(!transfer->leaf_done(0));
  CHECK(!transfer->chunk_sync_for(0, moment));
  leave = true;
  leave.notify_all();
  CHECK(in_time(*transfer));
  CHECK(transfer->leaf_done(0));
  CHECK(out->holds(3));
  CHECK(transfer->elapsed_from(*transfer) >= 0);
}

ON_EACH_RUNTIME(a_last_step_alone_runs_after_the_producer) {
  CopyEngine engine(lab.runtime);
  StreamRef producer = lab.compute();
  std::atomic<bool> ran{false};
  auto gate = lab.runtime->gate(producer);
  TransferRequest request = request_of(std::vector<CopyItem>{}, {producer});
  request.finish = [&] { ran = true; };
  auto transfer = engine.submit(request);
  CHECK(held(*transfer));
  CHECK(!ran);
  gate->open();
  CHECK(in_time(*transfer));
  CHECK(ran);
  CHECK(transfer->elapsed_from(*transfer) >= 0);
}

ON_EACH_RUNTIME(the_error_of_a_last_step_is_its_own) {
  CopyEngine engine(lab.runtime);
  auto out = lab.pinned(size);
  auto source = lab.device(size, 2);
  std::atomic<bool> ran{false};
  TransferRequest bad = request_of(out, source);
  bad.finish = [] { throw Boom(); };
  TransferRequest good = request_of(out, source);
  good.finish = [&] { ran = true; };
  auto failed = engine.submit(bad);
  auto fine = engine.submit(good);
  CHECK_THROWS(in_time(*failed), Boom);
  CHECK_THROWS(failed->done(), Boom);
  CHECK(in_time(*fine));
  CHECK(ran);
}

ON_EACH_RUNTIME(an_open_end_includes_what_the_caller_adds) {
  CopyEngine engine(lab.runtime);
  auto out = lab.pinned(size);
  auto source = lab.device(size, 2);
  auto extra = lab.device(size, 8);
  StreamRef stream = engine.copy_stream(0, Direction::to_host);
  for (bool empty : {false, true}) {
    StreamRef producer = lab.compute();
    std::memset(out->data(), poison, size);
    auto held_back = lab.runtime->gate(producer);
    TransferRequest request = empty ? request_of(std::vector<CopyItem>{}, {producer})
                                    : request_of(out, source, {producer});
    request.open_ended = true;
    auto transfer = engine.submit(request);
    CHECK(held(*transfer));  // not before complete() either
    held_back->open();
    lab.runtime->stream_sync(stream, here);
    auto gate = lab.runtime->gate(stream);
    lab.runtime->copy_async(out->data(), extra->data(), size, stream);
    engine.complete(*transfer, stream);
    CHECK(held(*transfer));
    if (!empty) CHECK(!transfer->leaf_sync_for(0, moment));
    CHECK(out->holds(empty ? poison : 2));
    gate->open();
    CHECK(in_time(*transfer));
    CHECK(out->holds(8));
    CHECK(transfer->elapsed_from(*transfer) >= 0);
  }
}

// ---- errors
// ---------------------------------------------------------------------------------------

TEST(host_an_error_does_not_reach_the_next_transfer) {
  Lab lab(host_backend());
  CopyEngine engine(lab.runtime);
  auto bad_out = lab.pinned(size);
  auto good_out = lab.pinned(size);
  auto source = lab.device(size, 1);
  StreamRef broken = lab.compute();
  StreamRef sound = lab.compute();
  auto gate = lab.runtime->gate(broken);
  lab.runtime->launch([] { throw Boom(); }, broken);
  auto failed = engine.submit(request_of(bad_out, source, {broken}));
  auto fine = engine.submit(request_of(good_out, source, {sound}));
  gate->open();
  CHECK_THROWS(in_time(*failed), Boom);
  CHECK_THROWS(failed->done(), Boom);
  CHECK_THROWS(failed->leaf_done(0), Boom);
  CHECK(in_time(*fine));
  CHECK(bad_out->holds(poison));
  CHECK(good_out->holds(1));
  lab.runtime->stream_sync(engine.copy_stream(0, Direction::to_host), here);
}

TEST(host_a_failed_copy_skips_its_last_step) {
  Lab lab(host_backend());
  CopyEngine engine(lab.runtime);
  std::atomic<bool> ran{false};
  TransferRequest request = request_of({{nullptr, nullptr, 8, 1, [] { throw Boom(); }}});
  request.finish = [&] { ran = true; };
  auto failed = engine.submit(request);
  CHECK_THROWS(in_time(*failed), Boom);
  CHECK(!ran);
}

// ---- lifetime
// -------------------------------------------------------------------------------------

ON_EACH_RUNTIME(an_abandoned_transfer_keeps_both_ends_until_it_is_done) {
  CopyEngine engine(lab.runtime);
  for (bool late : {false, true}) {
    auto out = lab.pinned(size);
    auto source = lab.device(size, 1);
    StreamRef producer = lab.compute();
    Keep from;
    Keep to;
    auto gate = lab.runtime->gate(producer);
    TransferRequest request = request_of(out, source, {producer});
    request.staged = late;
    request.keep_source = std::move(from.handle);
    request.keep_destination = std::move(to.handle);
    auto transfer = engine.submit(std::move(request));
    engine.abandon(std::move(transfer));
    CHECK_EQ(engine.reap(), 1);
    CHECK(!*from.gone);
    CHECK(!*to.gone);
    gate->open();
    reap_all(engine);
    CHECK_EQ(engine.reap(), 0);
    lab.runtime->device_sync(0);  // a worker may be about to let go of its reference
    CHECK(*from.gone);
    CHECK(*to.gone);
    CHECK(out->holds(1));
  }
}

// The copy is done, but a stream of the thread that let go may still read what the transfer holds.
ON_EACH_RUNTIME(an_abandoned_transfer_also_waits_for_the_streams_it_is_told) {
  CopyEngine engine(lab.runtime);
  auto out = lab.pinned(size);
  auto source = lab.device(size, 1);
  StreamRef reader = lab.compute();
  Keep from;
  auto gate = lab.runtime->gate(reader);
  TransferRequest request = request_of(out, source);
  request.keep_source = std::move(from.handle);
  auto transfer = engine.submit(std::move(request));
  CHECK(in_time(*transfer));
  transfer->also_after(reader);
  engine.abandon(std::move(transfer));
  CHECK_EQ(engine.reap(), 1);
  CHECK(!*from.gone);
  gate->open();
  reap_all(engine);
  CHECK_EQ(engine.reap(), 0);
  CHECK(*from.gone);
}

TEST(host_an_error_of_another_stream_does_not_end_an_abandoned_transfer) {
  Lab lab(host_backend());
  CopyEngine engine(lab.runtime);
  auto out = lab.pinned(size);
  auto source = lab.device(size, 1);
  StreamRef producer = lab.compute();
  StreamRef failing = lab.compute();
  lab.runtime->launch([] { throw Error(ErrorKind::runtime, "deliberate"); }, failing);
  Keep from;
  auto gate = lab.runtime->gate(producer);
  TransferRequest request = request_of(out, source, {producer});
  request.keep_source = std::move(from.handle);
  auto transfer = engine.submit(std::move(request));
  transfer->also_after(failing);
  while (!lab.runtime->stream_idle(failing)) std::this_thread::yield();
  engine.abandon(std::move(transfer));
  CHECK_EQ(engine.reap(), 1);
  CHECK(!*from.gone);
  gate->open();
  reap_all(engine);
  CHECK(*from.gone);
  CHECK_THROWS(lab.runtime->stream_sync(failing, Site("test")), Error);
}

TEST(host_a_transfer_that_nobody_can_tell_the_end_of_is_kept) {
  Lab lab(host_backend());
  CopyEngine engine(lab.runtime);
  auto out = lab.pinned(size);
  auto source = lab.device(size, 1);
  Keep from;
  TransferRequest request = request_of(out, source);
  request.keep_source = std::move(from.handle);
  auto transfer = engine.submit(std::move(request));
  CHECK(in_time(*transfer));
  transfer->keep_for_ever();
  engine.abandon(std::move(transfer));
  CHECK_EQ(engine.reap(), 1);
  CHECK(!*from.gone);
}

TEST(host_what_is_kept_for_ever_outlives_its_engine) {
  Lab lab(host_backend());
  auto out = lab.pinned(size);
  auto source = lab.device(size, 1);
  Keep from;
  {
    CopyEngine engine(lab.runtime);
    TransferRequest request = request_of(out, source);
    request.keep_source = std::move(from.handle);
    auto transfer = engine.submit(std::move(request));
    CHECK(in_time(*transfer));
    transfer->keep_for_ever();
    engine.abandon(std::move(transfer));
    CHECK(!engine.expects());
  }
  CHECK(!*from.gone);
}

TEST(host_an_abandoned_transfer_that_failed_is_let_go) {
  Lab lab(host_backend());
  CopyEngine engine(lab.runtime);
  Keep from;
  TransferRequest request = request_of({{nullptr, nullptr, 8, 1, [] { throw Boom(); }}});
  request.keep_source = std::move(from.handle);
  engine.abandon(engine.submit(std::move(request)));
  reap_all(engine);
  CHECK(*from.gone);
}

ON_EACH_RUNTIME(submitting_lets_go_of_what_is_done) {
  CopyEngine engine(lab.runtime);
  auto out = lab.pinned(size);
  auto source = lab.device(size, 1);
  Keep from;
  TransferRequest request = request_of(out, source);
  request.keep_source = std::move(from.handle);
  auto transfer = engine.submit(std::move(request));
  CHECK(in_time(*transfer));
  engine.abandon(std::move(transfer));
  CHECK(!*from.gone);
  engine.submit({});
  CHECK(*from.gone);
}

ON_EACH_RUNTIME(ends_are_let_go_when_told) {
  CopyEngine engine(lab.runtime);
  auto out = lab.pinned(size);
  auto source = lab.device(size, 1);
  Keep from;
  Keep to;
  TransferRequest request = request_of(out, source);
  request.keep_source = std::move(from.handle);
  request.keep_destination = std::move(to.handle);
  auto transfer = engine.submit(std::move(request));
  CHECK(in_time(*transfer));
  CHECK(!*from.gone);
  transfer->release_source();
  CHECK(*from.gone);
  CHECK(!*to.gone);
  transfer->release_all();
  transfer->release_all();
  CHECK(*to.gone);
}

// Fails the k-th enqueueing or creating call once armed.
struct FailAt final : ProxyRuntime {
  using ProxyRuntime::ProxyRuntime;
  void before(const char* call) override {
    if (left > 0 && --left == 0) {
      failed_in = call;
      throw Boom();
    }
  }
  std::atomic<int> left{0};
  std::string failed_in;
};

ON_EACH_THREADED_RUNTIME(a_submit_that_fails_anywhere_keeps_both_ends_until_its_work_is_done) {
  auto failing = std::make_shared<FailAt>(lab.runtime);
  CopyEngine engine(failing);
  StreamRef producer = lab.compute();
  auto source = lab.device(size, 1);
  engine.copy_stream(0, Direction::to_host);
  for (bool finish : {false, true}) {
    bool failed = true;
    for (int call = 1; failed; ++call) {
      REQUIRE(call < 100);
      auto out = lab.pinned(size);
      Keep from;
      Keep to;
      auto gate = lab.runtime->gate(producer);
      bool touched_dead = false;
      TransferRequest request = request_of(out, source, {producer});
      request.policy = {size / 4, 1};
      request.keep_source = std::move(from.handle);
      request.keep_destination = std::move(to.handle);
      if (finish) request.finish = [&, gone = to.gone] { touched_dead = *gone; };
      failing->left = call;
      std::shared_ptr<Transfer> transfer;
      failed = false;
      try {
        transfer = engine.submit(std::move(request));
      } catch (const Boom&) {
        failed = true;
      }
      failing->left = 0;
      request = {};
      const bool copied = failing->failed_in == "copy_async" || failing->failed_in == "launch";
      if (failed && copied) {
        CHECK(still_kept(engine));
        CHECK(!*from.gone);
        CHECK(!*to.gone);
      }
      gate->open();
      if (transfer) CHECK(in_time(*transfer));
      transfer.reset();
      reap_all(engine);
      lab.runtime->device_sync(0);
      CHECK(*from.gone);
      CHECK(*to.gone);
      CHECK(!touched_dead);
      // The lane serves the next transfer as if nothing had happened.
      auto next = lab.pinned(size);
      CHECK(in_time(*engine.submit(request_of(next, source))));
      CHECK(next->holds(1));
    }
  }
}

// Fails the first record made at one place.
struct FailRecord final : ProxyRuntime {
  FailRecord(std::shared_ptr<Runtime> inner, std::string at)
      : ProxyRuntime(std::move(inner)), place(std::move(at)) {}
  void event_record(Event& event, StreamRef stream, Site site) override {
    if (place == site.name && !failed.exchange(true)) throw Boom();
    ProxyRuntime::event_record(event, stream, site);
  }
  std::string place;
  std::atomic<bool> failed{false};
};

ON_EACH_THREADED_RUNTIME(a_submit_that_fails_after_its_last_step_was_enqueued_waits_for_it) {
  CopyEngine engine(std::make_shared<FailRecord>(lab.runtime, "engine.record_end"));
  auto out = lab.pinned(size);
  auto source = lab.device(size, 1);
  Keep from;
  std::atomic<bool> entered{false};
  std::atomic<bool> leave{false};
  TransferRequest request = request_of(out, source);
  request.keep_source = std::move(from.handle);
  request.finish = [&] {
    entered = true;
    entered.notify_all();
    leave.wait(false);
  };
  CHECK_THROWS(engine.submit(std::move(request)), Boom);
  request = {};
  entered.wait(false);
  CHECK(still_kept(engine));
  CHECK(!*from.gone);
  leave = true;
  leave.notify_all();
  reap_all(engine);
  CHECK(*from.gone);
}

ON_EACH_RUNTIME(a_late_submit_that_fails_keeps_both_ends_until_its_copies_are_done) {
  CopyEngine engine(std::make_shared<FailRecord>(lab.runtime, "engine.record_issued"));
  auto out = lab.pinned(size);
  auto source = lab.device(size, 1);
  StreamRef producer = lab.compute();
  Keep from;
  auto gate = lab.runtime->gate(producer);
  TransferRequest request = request_of(out, source, {producer});
  request.staged = true;
  request.keep_source = std::move(from.handle);
  CHECK_THROWS(engine.submit(std::move(request)), Boom);
  request = {};
  CHECK(still_kept(engine));
  CHECK(!*from.gone);
  gate->open();
  reap_all(engine);
  lab.runtime->device_sync(0);
  CHECK(*from.gone);
}

// Its error stays on the worker's stream, and is not the next transfer's.
TEST(host_a_failed_late_issue_that_cannot_be_taken_off_is_nobody_elses) {
  struct Broken final : ProxyRuntime {
    using ProxyRuntime::ProxyRuntime;
    void copy_async(void* dst, const void* src, std::size_t bytes, StreamRef stream) override {
      if (broken) throw Boom();
      ProxyRuntime::copy_async(dst, src, bytes, stream);
    }
    void launch(std::function<void()> task, StreamRef stream) override {
      ProxyRuntime::launch(std::move(task), stream);
      launched = true;
    }
    void stream_reset_error(StreamRef stream) override {
      if (broken && launched) throw Boom();
      ProxyRuntime::stream_reset_error(stream);
    }
    std::atomic<bool> broken{true};
    bool launched = false;
  };
  Lab lab(host_backend());
  auto broken = std::make_shared<Broken>(lab.runtime);
  CopyEngine engine(broken);
  auto out = lab.pinned(size);
  auto source = lab.device(size, 1);
  TransferRequest request = request_of(out, source);
  request.staged = true;
  CHECK_THROWS(engine.submit(request), Boom);
  lab.runtime->device_sync(0);
  broken->broken = false;
  CHECK(in_time(*engine.submit(request)));
  CHECK(out->holds(1));
}

// Nobody can tell when the copy that was issued will be done.
TEST(host_a_failed_submit_whose_end_cannot_be_recorded_is_kept) {
  struct Broken final : ProxyRuntime {
    using ProxyRuntime::ProxyRuntime;
    void copy_async(void* dst, const void* src, std::size_t bytes, StreamRef stream) override {
      ProxyRuntime::copy_async(dst, src, bytes, stream);
      broken = true;
    }
    void event_record(Event& event, StreamRef stream, Site site) override {
      if (broken) throw Boom();
      ProxyRuntime::event_record(event, stream, site);
    }
    bool broken = false;
  };
  Lab lab(host_backend());
  auto broken = std::make_shared<Broken>(lab.runtime);
  CopyEngine engine(broken);
  auto out = lab.pinned(size);
  auto source = lab.device(size, 1);
  Keep from;
  TransferRequest request = request_of(out, source);
  request.keep_source = std::move(from.handle);
  CHECK_THROWS(engine.submit(std::move(request)), Boom);
  request = {};
  lab.runtime->device_sync(0);
  CHECK(still_kept(engine));
  CHECK(!*from.gone);
}

TEST(host_a_failed_submit_leaves_no_error_of_its_producer_behind) {
  Lab lab(host_backend());
  auto failing = std::make_shared<FailAt>(lab.runtime);
  CopyEngine engine(failing);
  engine.copy_stream(0, Direction::to_host);
  auto source = lab.device(size, 1);
  for (bool late : {false, true}) {
    for (bool finish : {false, true}) {
      if (late && finish) continue;
      bool failed = true;
      for (int call = 1; failed; ++call) {
        REQUIRE(call < 100);
        auto out = lab.pinned(size);
        StreamRef producer = lab.compute();
        lab.runtime->launch([] { throw Boom(); }, producer);
        TransferRequest request = request_of(out, source, {producer});
        request.staged = late;
        if (finish) request.finish = [] {};
        failing->left = call;
        failed = false;
        std::shared_ptr<Transfer> transfer;
        try {
          transfer = engine.submit(request);
        } catch (const Boom&) {
          failed = true;
        }
        failing->left = 0;
        if (transfer) CHECK_THROWS(in_time(*transfer), Boom);
        TransferRequest next = request_of(lab.pinned(size), source);
        next.staged = late;
        if (finish) next.finish = [] {};
        CHECK(in_time(*engine.submit(next)));
        reap_all(engine);
      }
    }
  }
}

// ---- threads
// --------------------------------------------------------------------------------------

ON_EACH_THREADED_RUNTIME(many_threads_submit_and_abandon) {
  CopyEngine engine(lab.runtime);
  constexpr int rounds = 40;
  constexpr std::size_t bytes = 5000;
  std::vector<StreamRef> producers;
  for (int t = 0; t < 8; ++t) producers.push_back(lab.compute());
  std::vector<PinnedPtr> sources;
  std::vector<std::vector<PinnedPtr>> outs(8);
  std::mt19937_64 random(3);
  for (std::size_t t = 0; t < 8; ++t) {
    sources.push_back(lab.pinned(bytes * rounds));
    fill_randomly(*sources.back(), random);
    for (int i = 0; i < rounds; ++i) outs[t].push_back(lab.pinned(bytes));
  }
  std::vector<std::thread> threads;
  std::atomic<int> finished{0};
  for (std::size_t t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      std::vector<std::shared_ptr<Transfer>> waiting;
      for (std::size_t i = 0; i < rounds; ++i) {
        TransferRequest request =
            request_of({{outs[t][i]->data(), sources[t]->data() + i * bytes, bytes, 1, nullptr}},
                       {producers[t]});
        request.direction = t % 2 == 0 ? Direction::to_host : Direction::to_device;
        request.policy = {1000, 1500};
        request.staged = i % 5 == 0;
        if (i % 5 == 1) request.finish = [&] { ++finished; };
        auto transfer = engine.submit(std::move(request));
        if (i % 3 == 0) {
          engine.abandon(std::move(transfer));
        } else {
          waiting.push_back(std::move(transfer));
        }
      }
      for (auto& transfer : waiting) CHECK(in_time(*transfer));
    });
  }
  for (std::thread& thread : threads) thread.join();
  reap_all(engine);
  CHECK_EQ(engine.reap(), 0);
  CHECK_EQ(finished.load(), 8 * rounds / 5);
  for (std::size_t t = 0; t < 8; ++t) {
    for (std::size_t i = 0; i < rounds; ++i) {
      CHECK(std::memcmp(outs[t][i]->data(), sources[t]->data() + i * bytes, bytes) == 0);
    }
  }
}

namespace {

class Holding final : public ProxyRuntime {
 public:
  using ProxyRuntime::ProxyRuntime;
  std::shared_ptr<void> hold_device(int device) override {
    asked.push_back(device);
    return ProxyRuntime::hold_device(device);
  }
  std::vector<int> asked;
};

}  // namespace

TEST(a_submit_holds_its_device_through_every_wrapper) {
  auto holding = std::make_shared<Holding>(host_backend());
  const std::vector<std::shared_ptr<Runtime>> served{
      holding, std::make_shared<order::CheckedRuntime>(holding),
      std::make_shared<fault::FaultyRuntime>(holding)};
  for (const std::shared_ptr<Runtime>& runtime : served) {
    holding->asked.clear();
    CopyEngine engine(runtime);
    std::byte source[8]{};
    std::byte target[8]{};
    TransferRequest request;
    request.items = {{target, source, sizeof source, 1, nullptr}};
    auto transfer = engine.submit(std::move(request));
    CHECK(in_time(*transfer));
    CHECK_EQ(holding->asked.size(), 1);
  }
}
