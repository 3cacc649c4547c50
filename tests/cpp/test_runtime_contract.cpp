// What every runtime does alike: one set of programs, the same answers on each.
// Order is shown by gates and bytes: hold the producer, see the poison, open, see the value.
#include <atomic>
#include <cmath>
#include <future>
#include <thread>

#include "lab.h"

using namespace streamlap;
using namespace streamlap::testing;

namespace {

constexpr std::size_t size = 1 << 16;

struct Boom : std::runtime_error {
  Boom() : std::runtime_error("boom") {}
};

void fail(Lab& lab, StreamRef on) {
  lab.runtime->launch([] { throw Boom(); }, on);
}

}  // namespace

// ---- order on one stream
// --------------------------------------------------------------------------

ON_EACH_RUNTIME(one_stream_runs_in_order) {
  auto data = lab.device(size);
  auto out = lab.pinned(size);
  StreamRef stream = lab.compute();
  for (int value = 1; value <= 50; ++value) lab.produce(stream, data->data(), value, size);
  lab.runtime->copy_async(out->data(), data->data(), size, stream);
  lab.produce(stream, data->data(), 77, size);
  lab.runtime->stream_sync(stream, here);
  CHECK(out->holds(50));
}

ON_EACH_RUNTIME(a_gate_holds_what_comes_after_it) {
  auto out = lab.pinned(size);
  auto source = lab.device(size, 3);
  StreamRef stream = lab.compute();
  auto gate = lab.runtime->gate(stream);
  lab.runtime->copy_async(out->data(), source->data(), size, stream);
  EventPtr event = lab.record(stream);
  CHECK(lab.held(event));
  CHECK(!lab.runtime->event_query(*event, here));
  CHECK(!lab.runtime->stream_idle(stream));
  CHECK(out->holds(poison));
  gate->open();
  CHECK(lab.in_time(event));
  CHECK(out->holds(3));
  CHECK(!gate->timed_out());
}

ON_EACH_RUNTIME(destroying_a_gate_opens_it) {
  StreamRef stream = lab.compute();
  auto gate = lab.runtime->gate(stream);
  EventPtr event = lab.record(stream);
  CHECK(lab.held(event));
  gate.reset();
  CHECK(lab.in_time(event));
}

ON_EACH_RUNTIME(a_forgotten_gate_opens_itself_with_an_error) {
  StreamRef stream = lab.compute();
  auto gate = lab.runtime->gate(stream);
  try {
    lab.runtime->stream_sync(stream, here);
  } catch (const Error&) {
    // Where the gate can poison its stream it does; everywhere it says so.
  }
  CHECK(gate->timed_out());
}

ON_EACH_RUNTIME(idle_means_done) {
  StreamRef stream = lab.compute();
  CHECK(lab.runtime->stream_idle(stream));
  for (int round = 0; round < 200; ++round) {
    EventPtr event = lab.record(stream);
    REQUIRE(lab.in_time(event));
    REQUIRE(lab.runtime->stream_idle(stream));
  }
  lab.runtime->stream_sync(stream, here);
  CHECK(lab.runtime->stream_idle(stream));
  auto gate = lab.runtime->gate(stream);
  CHECK(!lab.runtime->stream_idle(stream));
  CHECK(!lab.runtime->idle());
  gate->open();
  lab.runtime->stream_sync(stream, here);
  CHECK(lab.runtime->stream_idle(stream));
  CHECK(lab.runtime->idle());
}

// ---- order between streams
// ------------------------------------------------------------------------

ON_EACH_RUNTIME(a_consumer_waits_for_its_producer) {
  auto data = lab.device(size);
  auto out = lab.pinned(size);
  auto value = lab.pinned(size, 9);
  StreamRef producer = lab.compute();
  StreamRef consumer = lab.copy();
  auto gate = lab.runtime->gate(producer);
  lab.runtime->copy_async(data->data(), value->data(), size, producer);
  EventPtr produced = lab.record(producer);
  lab.runtime->stream_wait(consumer, *produced, here);
  lab.runtime->copy_async(out->data(), data->data(), size, consumer);
  EventPtr consumed = lab.record(consumer);
  CHECK(lab.held(consumed));
  CHECK(!lab.runtime->event_query(*produced, here));
  CHECK(out->holds(poison));
  gate->open();
  CHECK(lab.in_time(consumed));
  CHECK(out->holds(9));
  CHECK(lab.runtime->event_query(*produced, here));
}

ON_EACH_RUNTIME(order_rides_along_a_chain_of_streams) {
  auto data = lab.device(size);
  auto out = lab.pinned(size);
  StreamRef first = lab.compute();
  StreamRef middle = lab.compute();
  StreamRef last = lab.copy();
  auto value = lab.pinned(size, 4);
  auto gate = lab.runtime->gate(first);
  lab.runtime->copy_async(data->data(), value->data(), size, first);
  EventPtr a = lab.record(first);
  lab.runtime->stream_wait(middle, *a, here);
  EventPtr b = lab.record(middle);
  lab.runtime->stream_wait(last, *b, here);
  lab.runtime->copy_async(out->data(), data->data(), size, last);
  EventPtr c = lab.record(last);
  CHECK(lab.held(c));
  CHECK(out->holds(poison));
  gate->open();
  CHECK(lab.in_time(c));
  CHECK(out->holds(4));
}

ON_EACH_RUNTIME(streams_without_an_event_are_independent) {
  auto out = lab.pinned(size);
  StreamRef held = lab.compute();
  StreamRef free = lab.compute();
  auto value = lab.device(size, 5);
  auto gate = lab.runtime->gate(held);
  lab.runtime->copy_async(out->data(), value->data(), size, free);
  lab.runtime->stream_sync(free, here);
  CHECK(out->holds(5));
  CHECK(!lab.runtime->stream_idle(held));
  gate->open();
}

ON_EACH_RUNTIME(one_event_orders_many_waiters) {
  StreamRef producer = lab.compute();
  std::vector<StreamRef> waiters;
  for (int i = 0; i < 4; ++i) waiters.push_back(lab.copy());
  auto gate = lab.runtime->gate(producer);
  EventPtr produced = lab.record(producer);
  std::vector<EventPtr> ends;
  for (StreamRef waiter : waiters) {
    lab.runtime->stream_wait(waiter, *produced, here);
    ends.push_back(lab.record(waiter));
  }
  CHECK(lab.held(ends[0]));
  for (const EventPtr& end : ends) CHECK(!lab.runtime->event_query(*end, here));
  gate->open();
  for (const EventPtr& end : ends) CHECK(lab.in_time(end));
}

// ---- events
// ---------------------------------------------------------------------------------------

ON_EACH_RUNTIME(an_event_never_recorded_is_done_and_no_wait) {
  EventPtr event = lab.runtime->event_create(0);
  CHECK(lab.runtime->event_query(*event, here));
  CHECK(lab.runtime->event_sync_for(*event, 0ns, here));
  StreamRef stream = lab.compute();
  lab.runtime->stream_wait(stream, *event, here);
  EventPtr after = lab.record(stream);
  CHECK(lab.in_time(after));
}

ON_EACH_RUNTIME(record_captures_the_work_so_far) {
  StreamRef stream = lab.compute();
  EventPtr before = lab.record(stream);
  auto gate = lab.runtime->gate(stream);
  CHECK(lab.in_time(before));
  CHECK(lab.runtime->event_query(*before, here));
  gate->open();
}

ON_EACH_RUNTIME(recording_again_replaces) {
  StreamRef done = lab.compute();
  StreamRef held = lab.compute();
  EventPtr event = lab.record(done);
  CHECK(lab.in_time(event));
  auto gate = lab.runtime->gate(held);
  lab.runtime->event_record(*event, held, here);
  CHECK(lab.held(event));
  lab.runtime->event_record(*event, done, here);
  CHECK(lab.in_time(event));
  gate->open();
}

ON_EACH_RUNTIME(a_wait_captures_what_the_event_stands_for_at_the_call) {
  StreamRef first = lab.compute();
  StreamRef second = lab.compute();
  StreamRef idle = lab.compute();
  StreamRef waiter = lab.copy();
  StreamRef other = lab.copy();
  auto first_gate = lab.runtime->gate(first);
  EventPtr event = lab.record(first);
  lab.runtime->stream_wait(waiter, *event, here);
  EventPtr waited = lab.record(waiter);
  // Neither a later recording that is done lets the waiter go...
  lab.runtime->event_record(*event, idle, here);
  CHECK(lab.in_time(event));
  CHECK(lab.held(waited));
  // ... nor does one that is held keep it.
  auto second_gate = lab.runtime->gate(second);
  lab.runtime->event_record(*event, second, here);
  lab.runtime->stream_wait(other, *event, here);
  EventPtr other_waited = lab.record(other);
  first_gate->open();
  CHECK(lab.in_time(waited));
  CHECK(lab.held(other_waited));
  second_gate->open();
  CHECK(lab.in_time(other_waited));
}

ON_EACH_RUNTIME(an_event_may_die_before_its_waiter_runs) {
  StreamRef producer = lab.compute();
  StreamRef waiter = lab.copy();
  auto gate = lab.runtime->gate(producer);
  EventPtr event = lab.record(producer);
  lab.runtime->stream_wait(waiter, *event, here);
  event.reset();
  EventPtr waited = lab.record(waiter);
  CHECK(lab.held(waited));
  gate->open();
  CHECK(lab.in_time(waited));
}

ON_EACH_RUNTIME(a_timed_wait_ends_in_time) {
  StreamRef stream = lab.compute();
  auto gate = lab.runtime->gate(stream);
  EventPtr event = lab.record(stream);
  CHECK(!lab.runtime->event_sync_for(*event, 0ns, here));
  const double begin = lab.runtime->now();
  CHECK(!lab.runtime->event_sync_for(*event, 30ms, here));
  const double took = lab.runtime->now() - begin;
  CHECK(took >= 0.03);
  CHECK(took < Gate::limit_seconds - 1);
  gate->open();
  CHECK(lab.runtime->event_sync_for(*event, patience, here));
  CHECK(lab.runtime->event_sync_for(*event, 0ns, here));
}

ON_EACH_RUNTIME(elapsed_is_of_done_events_only) {
  auto data = lab.device(size);
  StreamRef stream = lab.compute();
  EventPtr begin = lab.record(stream, true);
  lab.produce(stream, data->data(), 1, size);
  auto gate = lab.runtime->gate(stream);
  EventPtr end = lab.record(stream, true);
  CHECK_THROWS(lab.runtime->event_elapsed(*begin, *end), Error);
  EventPtr never = lab.runtime->event_create(0, true);
  CHECK_THROWS(lab.runtime->event_elapsed(*begin, *never), Error);
  CHECK(lab.held(end));
  gate->open();
  CHECK(lab.in_time(end));
  CHECK(lab.runtime->event_elapsed(*begin, *end) >= 0.01);  // it was held for a moment
  CHECK_EQ(lab.runtime->event_elapsed(*begin, *begin), 0.0);
}

ON_EACH_RUNTIME(event_time_is_on_the_clock_of_now_or_unknown) {
  StreamRef stream = lab.host();
  CHECK(std::isnan(lab.runtime->event_time(*lab.runtime->event_create(0, true))));
  const double before = lab.runtime->now();
  auto gate = lab.runtime->gate(stream);
  EventPtr event = lab.record(stream, true);
  CHECK(std::isnan(lab.runtime->event_time(*event)));
  gate->open();
  CHECK(lab.in_time(event));
  const double time = lab.runtime->event_time(*event);
  CHECK(time >= before);
  CHECK(time <= lab.runtime->now());
}

ON_EACH_RUNTIME(device_sync_waits_for_every_stream) {
  auto out = lab.pinned(size);
  auto value = lab.device(size, 6);
  auto flag = std::make_shared<std::atomic<bool>>(false);
  StreamRef first = lab.compute();
  StreamRef second = lab.copy();
  StreamRef host = lab.host();
  auto first_gate = lab.runtime->gate(first);
  auto host_gate = lab.runtime->gate(host);
  lab.runtime->copy_async(out->data(), value->data(), size, first);
  EventPtr event = lab.record(first);
  lab.runtime->stream_wait(second, *event, here);
  EventPtr last = lab.record(second);
  lab.runtime->launch([flag] { *flag = true; }, host);
  EventPtr host_last = lab.record(host);
  std::atomic<bool> back{false};
  std::jthread syncing([&] {
    lab.runtime->device_sync(0);
    back = true;
  });
  CHECK(lab.held(last));
  CHECK(!back);
  first_gate->open();
  CHECK(lab.in_time(last));
  CHECK(lab.held(host_last));
  CHECK(!back);
  host_gate->open();
  syncing.join();
  CHECK(out->holds(6));
  CHECK(*flag);
}

// ---- memory, devices
// ------------------------------------------------------------------------------

ON_EACH_RUNTIME(memory_of_every_kind_is_usable) {
  StreamRef stream = lab.compute();
  for (std::size_t bytes : {std::size_t{1}, std::size_t{4097}, std::size_t{3} << 20}) {
    auto source = lab.pinned(bytes);
    auto out = lab.pinned(bytes);
    for (std::size_t i = 0; i < bytes; ++i) {
      source->data()[i] = static_cast<unsigned char>(i * 7 + i / 251);
    }
    auto one = lab.device(bytes);
    auto two = lab.device(bytes);
    lab.runtime->copy_async(one->data(), source->data(), bytes, stream);
    lab.runtime->copy_async(two->data(), one->data(), bytes, stream);
    lab.runtime->copy_async(out->data(), two->data(), bytes, stream);
    lab.runtime->stream_sync(stream, here);
    CHECK(std::memcmp(out->data(), source->data(), bytes) == 0);
    lab.runtime->copy_async(out->data(), source->data(), bytes, stream);
    lab.runtime->stream_sync(stream, here);
    CHECK(std::memcmp(out->data(), source->data(), bytes) == 0);
  }
}

ON_EACH_RUNTIME(too_much_memory_is_an_error_that_says_so) {
  constexpr std::size_t absurd = std::size_t{1} << 60;
  for (int round = 0; round < 2; ++round) {
    try {
      lab.runtime->alloc_pinned(absurd);
      CHECK(false);
    } catch (const Error& error) {
      CHECK(error.kind() == ErrorKind::out_of_memory);
      CHECK(std::string(error.what()).find(std::to_string(absurd)) != std::string::npos);
    }
    CHECK_THROWS(lab.runtime->alloc_device(0, absurd), Error);
    lab.pinned(size, 1);  // the next call works
  }
}

ON_EACH_RUNTIME(devices_that_do_not_exist_are_refused) {
  CHECK(lab.runtime->device_count() > 0);
  for (int device : {-1, -1000, lab.runtime->device_count(), 1 << 30}) {
    for (StreamKind kind : {StreamKind::compute, StreamKind::copy, StreamKind::host}) {
      try {
        lab.runtime->stream_create(device, kind);
        CHECK(false);
      } catch (const Error& error) {
        CHECK(error.kind() == ErrorKind::invalid_argument);
      }
    }
    CHECK_THROWS(lab.runtime->alloc_device(device, 64), Error);
    CHECK_THROWS(lab.runtime->device_sync(device), Error);
  }
  CHECK_EQ(lab.runtime->stream_create(0, StreamKind::copy).device, 0);
}

ON_EACH_RUNTIME(no_stream_is_capturing) {
  CHECK(!lab.runtime->stream_capturing(lab.compute()));
  CHECK(!lab.runtime->stream_capturing(lab.copy()));
  CHECK(!lab.runtime->stream_capturing(lab.host()));
}

// ---- threads
// --------------------------------------------------------------------------------------

ON_EACH_RUNTIME(many_threads_issue_to_one_stream) {
  constexpr int threads = 8;
  constexpr int rounds = 50;
  StreamRef stream = lab.copy();
  std::vector<PinnedPtr> sources;
  std::vector<PinnedPtr> outs;
  std::vector<std::shared_ptr<DeviceBytes>> slots;
  for (int t = 0; t < threads; ++t) {
    sources.push_back(lab.pinned(rounds * 64));
    outs.push_back(lab.pinned(rounds * 64));
    slots.push_back(lab.device(64));
    for (std::size_t i = 0; i < sources.back()->bytes(); ++i) {
      sources.back()->data()[i] = static_cast<unsigned char>(i * 13 + i / 64 + std::size_t(t));
    }
  }
  std::vector<std::thread> pool;
  lab.hand_over();
  for (std::size_t t = 0; t < threads; ++t) {
    pool.emplace_back([&, t] {
      lab.take_over();
      for (std::size_t i = 0; i < rounds; ++i) {
        lab.runtime->copy_async(slots[t]->data(), sources[t]->data() + i * 64, 64, stream);
        lab.runtime->copy_async(outs[t]->data() + i * 64, slots[t]->data(), 64, stream);
      }
      CHECK(lab.in_time(lab.record(stream)));
      CHECK(std::memcmp(outs[t]->data(), sources[t]->data(), rounds * 64) == 0);
    });
  }
  for (std::thread& thread : pool) thread.join();
}

ON_EACH_RUNTIME(many_threads_share_one_event) {
  StreamRef stream = lab.compute();
  StreamRef waiter = lab.copy();
  EventPtr event = lab.runtime->event_create(0);
  std::vector<std::thread> pool;
  for (int t = 0; t < 6; ++t) {
    pool.emplace_back([&] {
      for (int i = 0; i < 100; ++i) {
        lab.runtime->event_record(*event, stream, here);
        lab.runtime->stream_wait(waiter, *event, here);
        lab.runtime->event_query(*event, here);
      }
      CHECK(lab.in_time(event));
    });
  }
  for (std::thread& thread : pool) thread.join();
  lab.runtime->stream_sync(waiter, here);
}

// ---- host streams
// ---------------------------------------------------------------------------------

ON_EACH_RUNTIME(callables_run_in_order_on_a_host_stream) {
  StreamRef stream = lab.host();
  std::vector<int> seen;
  for (int i = 0; i < 100; ++i) lab.runtime->launch([&seen, i] { seen.push_back(i); }, stream);
  CHECK(lab.in_time(lab.record(stream)));
  CHECK_EQ(seen.size(), 100);
  for (int i = 0; i < 100; ++i) CHECK_EQ(seen[static_cast<std::size_t>(i)], i);
}

ON_EACH_RUNTIME(a_host_stream_waits_for_a_device) {
  auto out = lab.pinned(size);
  auto value = lab.device(size, 8);
  StreamRef producer = lab.compute();
  StreamRef host = lab.host();
  bool right = false;
  auto gate = lab.runtime->gate(producer);
  lab.runtime->copy_async(out->data(), value->data(), size, producer);
  EventPtr produced = lab.record(producer);
  lab.runtime->stream_wait(host, *produced, here);
  lab.runtime->launch([&] { right = out->holds(8); }, host);
  EventPtr end = lab.record(host);
  CHECK(lab.held(end));
  CHECK(out->holds(poison));
  gate->open();
  CHECK(lab.in_time(end));
  CHECK(right);
}

ON_EACH_RUNTIME(a_host_stream_waits_for_another) {
  StreamRef first = lab.host();
  StreamRef second = lab.host();
  int value = 0;
  int seen = -1;
  auto gate = lab.runtime->gate(first);
  lab.runtime->launch([&] { value = 7; }, first);
  EventPtr event = lab.record(first);
  lab.runtime->stream_wait(second, *event, here);
  lab.runtime->launch([&] { seen = value; }, second);
  EventPtr end = lab.record(second);
  CHECK(lab.held(end));
  gate->open();
  CHECK(lab.in_time(end));
  CHECK_EQ(seen, 7);
}

ON_EACH_RUNTIME(a_device_stream_accepts_host_work_that_is_done) {
  auto out = lab.pinned(size);
  auto value = lab.device(size, 2);
  StreamRef host = lab.host();
  StreamRef device = lab.copy();
  EventPtr event = lab.record(host);
  CHECK(lab.in_time(event));
  lab.runtime->stream_wait(device, *event, here);
  lab.runtime->copy_async(out->data(), value->data(), size, device);
  lab.runtime->stream_sync(device, here);
  CHECK(out->holds(2));
}

ON_EACH_RUNTIME(a_callable_dies_before_later_work_is_reported) {
  StreamRef stream = lab.host();
  auto held = std::make_shared<int>(1);
  std::weak_ptr<int> watch = held;
  lab.runtime->launch([kept = std::move(held)] {}, stream);
  CHECK(lab.in_time(lab.record(stream)));
  CHECK(watch.expired());
}

ON_EACH_RUNTIME(a_callable_may_issue_work) {
  auto out = lab.pinned(size);
  auto value = lab.device(size, 12);
  StreamRef host = lab.host();
  StreamRef device = lab.copy();
  EventPtr copied = lab.runtime->event_create(0);
  lab.runtime->launch(
      [&] {
        lab.runtime->copy_async(out->data(), value->data(), size, device);
        lab.runtime->event_record(*copied, device, here);
      },
      host);
  lab.runtime->stream_sync(host, here);
  CHECK(lab.in_time(copied));
  CHECK(out->holds(12));
}

// ---- errors
// ---------------------------------------------------------------------------------------

ON_EACH_RUNTIME(the_first_error_skips_later_work_until_sync_takes_it_off) {
  StreamRef stream = lab.host();
  std::atomic<int> ran{0};
  auto held = std::make_shared<int>(1);
  std::weak_ptr<int> watch = held;
  lab.runtime->launch([&] { ++ran; }, stream);
  fail(lab, stream);
  lab.runtime->launch([&ran, kept = std::move(held)] { ++ran; }, stream);
  lab.runtime->launch([] { throw std::logic_error("a later error hides none"); }, stream);
  EventPtr event = lab.record(stream);
  CHECK_THROWS(lab.in_time(event), Boom);
  CHECK_EQ(ran.load(), 1);
  CHECK(watch.expired());  // skipped, yet destroyed
  CHECK_THROWS(lab.runtime->event_query(*event, here), Boom);
  CHECK(lab.runtime->stream_idle(stream));
  CHECK_THROWS(lab.runtime->stream_sync(stream, here), Boom);
  lab.runtime->stream_sync(stream, here);  // taken off
  lab.runtime->launch([&] { ++ran; }, stream);
  lab.runtime->stream_sync(stream, here);
  CHECK_EQ(ran.load(), 2);
  CHECK_THROWS(lab.in_time(event), Boom);  // an event keeps its error
}

ON_EACH_RUNTIME(an_error_rides_on_events_to_waiting_streams) {
  StreamRef first = lab.host();
  StreamRef second = lab.host();
  StreamRef third = lab.host();
  std::atomic<int> ran{0};
  auto gate = lab.runtime->gate(first);
  EventPtr before = lab.record(first);
  fail(lab, first);
  EventPtr failed = lab.record(first);
  lab.runtime->stream_wait(second, *before, here);
  lab.runtime->launch([&] { ++ran; }, second);
  lab.runtime->stream_wait(second, *failed, here);
  lab.runtime->launch([&] { ++ran; }, second);
  EventPtr second_end = lab.record(second);
  lab.runtime->stream_wait(third, *second_end, here);
  lab.runtime->launch([&] { ++ran; }, third);
  gate->open();
  CHECK_THROWS(lab.runtime->stream_sync(third, here), Boom);
  CHECK_EQ(ran.load(), 1);
  CHECK(lab.in_time(before));
  CHECK_THROWS(lab.runtime->stream_sync(second, here), Boom);
  CHECK_THROWS(lab.runtime->stream_sync(first, here), Boom);
  for (StreamRef stream : {first, second, third}) lab.runtime->stream_sync(stream, here);
}

ON_EACH_RUNTIME(a_poisoned_stream_still_waits) {
  StreamRef producer = lab.compute();
  StreamRef stream = lab.host();
  fail(lab, stream);
  auto gate = lab.runtime->gate(producer);
  EventPtr produced = lab.record(producer);
  lab.runtime->stream_wait(stream, *produced, here);
  EventPtr end = lab.record(stream);
  CHECK(lab.held(end));
  gate->open();
  CHECK_THROWS(lab.in_time(end), Boom);
}

ON_EACH_RUNTIME(resetting_the_error_is_in_order_with_the_work) {
  StreamRef stream = lab.host();
  std::atomic<int> ran{0};
  auto gate = lab.runtime->gate(stream);
  fail(lab, stream);
  lab.runtime->launch([&] { ran += 10; }, stream);
  EventPtr failed = lab.record(stream);
  lab.runtime->stream_reset_error(stream);
  lab.runtime->launch([&] { ran += 1; }, stream);
  EventPtr fine = lab.record(stream);
  gate->open();
  CHECK_THROWS(lab.in_time(failed), Boom);
  CHECK(lab.in_time(fine));
  CHECK_EQ(ran.load(), 1);
  lab.runtime->stream_sync(stream, here);
}

ON_EACH_RUNTIME(device_sync_passes_a_poisoned_stream) {
  StreamRef stream = lab.host();
  fail(lab, stream);
  lab.runtime->device_sync(0);
  CHECK_THROWS(lab.runtime->stream_sync(stream, here), Boom);
}

// ---- where runtimes differ, by contract
// -----------------------------------------------------------

TEST(host_every_stream_runs_callables_and_carries_errors) {
  Lab lab(host_backend());
  StreamRef producer = lab.compute();
  StreamRef consumer = lab.copy();
  auto out = lab.pinned(size);
  auto value = lab.pinned(size, 1);
  fail(lab, producer);
  lab.runtime->stream_wait(consumer, *lab.record(producer), here);
  lab.runtime->copy_async(out->data(), value->data(), size, consumer);
  CHECK_THROWS(lab.runtime->stream_sync(consumer, here), Boom);
  CHECK(out->holds(poison));
}

TEST(host_devices_are_synchronised_one_by_one) {
  Lab lab(host_backend());
  StreamRef other = lab.runtime->stream_create(1, StreamKind::compute);
  auto gate = lab.runtime->gate(other);
  lab.runtime->device_sync(0);
  CHECK(!lab.runtime->stream_idle(other));
  gate->open();
  lab.runtime->device_sync(1);
}

TEST(host_syncing_a_device_waits_for_what_its_workers_issue) {
  Lab lab(host_backend());
  StreamRef issuer = lab.host();
  StreamRef copies = lab.copy();
  auto out = lab.pinned(size);
  auto value = lab.pinned(size, 5);
  auto before = lab.runtime->gate(issuer);
  std::unique_ptr<Gate> after;
  lab.runtime->launch(
      [&] {
        after = lab.runtime->gate(copies);
        lab.runtime->copy_async(out->data(), value->data(), size, copies);
      },
      issuer);
  EventPtr issued = lab.record(issuer);
  std::atomic<bool> back{false};
  std::jthread syncing([&] {
    lab.runtime->device_sync(0);
    back = true;
  });
  CHECK(lab.held(issued));
  before->open();
  CHECK(lab.in_time(issued));
  CHECK(lab.held(lab.record(copies)));
  CHECK(!back);
  after->open();
  syncing.join();
  CHECK(out->holds(5));
}

TEST(host_a_task_may_drop_the_last_reference_to_its_runtime) {
  auto runtime = make_host_runtime();
  StreamRef stream = runtime->stream_create(0, StreamKind::host);
  auto gate = runtime->gate(stream);
  auto keeper = std::make_shared<std::shared_ptr<Runtime>>(runtime);
  auto dropped = std::make_shared<std::promise<void>>();
  auto told = dropped->get_future();
  runtime->launch(
      [keeper, dropped] {
        keeper->reset();
        dropped->set_value();
      },
      stream);
  runtime.reset();
  gate->open();
  CHECK(told.wait_for(patience) == std::future_status::ready);
}

TEST(cuda_a_device_stream_refuses_unfinished_host_work) {
  Lab lab(cuda_backend());
  StreamRef host = lab.host();
  StreamRef device = lab.copy();
  auto gate = lab.runtime->gate(host);
  EventPtr event = lab.record(host);
  CHECK_THROWS(lab.runtime->stream_wait(device, *event, here), Error);
  gate->open();
  CHECK(lab.in_time(event));
  lab.runtime->stream_wait(device, *event, here);
  lab.runtime->stream_sync(device, here);
}

TEST(cuda_a_device_stream_runs_no_callables) {
  Lab lab(cuda_backend());
  CHECK_THROWS(lab.runtime->launch([] {}, lab.compute()), Error);
  CHECK_THROWS(lab.runtime->launch([] {}, lab.copy()), Error);
}

TEST(cuda_no_time_between_a_device_and_a_host) {
  Lab lab(cuda_backend());
  EventPtr device = lab.record(lab.compute(), true);
  EventPtr host = lab.record(lab.host(), true);
  CHECK(lab.in_time(device));
  CHECK(lab.in_time(host));
  CHECK_THROWS(lab.runtime->event_elapsed(*device, *host), Error);
  CHECK(lab.runtime->event_elapsed(*host, *host) >= 0);
}
