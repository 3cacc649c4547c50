// The order checker: pairs of programs, one in order and one with a single wait, record or sync
// less. It must refuse the second under every schedule and find nothing in the first.
#include <functional>
#include <thread>

#include "lab.h"
#include "transfer/copy_engine.h"
#include "transfer/pinned_pool.h"
#include "transfer/stripes.h"
#include "transfer/tree_plan.h"

using namespace streamlap;
using namespace streamlap::testing;

namespace {

constexpr std::size_t size = 4096;

template <class Program>
bool refused(Program&& program) {
  try {
    program();
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::order);
    return error.kind() == ErrorKind::order;
  }
  return false;
}

// `program(lab, racy)`, with the racy one refused and the other one not.
#define PAIR(name)                                                \
  static void pair_##name(Lab& lab, bool racy);                   \
  TEST(host_##name) {                                             \
    for (bool racy : {false, true}) {                             \
      Lab lab(host_backend());                                    \
      CHECK_EQ(refused([&] { pair_##name(lab, racy); }), racy);   \
    }                                                             \
  }                                                               \
  TEST(sim_##name) {                                              \
    for (bool racy : {false, true}) {                             \
      for (const std::string& schedule : schedules()) {           \
        Lab lab(sim_backend(schedule, true));                     \
        CHECK_EQ(refused([&] { pair_##name(lab, racy); }), racy); \
      }                                                           \
    }                                                             \
  }                                                               \
  TEST(cuda_##name) {                                             \
    for (bool racy : {false, true}) {                             \
      Lab lab(cuda_backend());                                    \
      CHECK_EQ(refused([&] { pair_##name(lab, racy); }), racy);   \
    }                                                             \
  }                                                               \
  static void pair_##name(Lab& lab, bool racy)

struct UnderWay {
  PinnedPtr out;
  EventPtr copied;
};

// A copy into page-locked memory that nobody has waited for, behind a gate if one is wanted.
UnderWay copy_under_way(Lab& lab, std::unique_ptr<Gate>* gate = nullptr) {
  auto out = lab.pinned(size);
  auto data = lab.device(size, 1);
  StreamRef stream = lab.copy();
  if (gate != nullptr) *gate = lab.runtime->gate(stream);
  lab.runtime->copy_async(out->data(), data->data(), size, stream);
  return {out, lab.record(stream)};
}

void wait(Lab& lab, StreamRef stream, const EventPtr& event) {
  lab.runtime->stream_wait(stream, *event, here);
}

TransferRequest request_of(const PinnedPtr& out, const std::shared_ptr<DeviceBytes>& source) {
  TransferRequest request;
  request.items = {{out->data(), source->data(), size, 1, {}}};
  return request;
}

// The racy one is refused, but it runs: what it uses must live until it has.
struct Settled {
  Lab& lab;
  StreamRef stream;
  ~Settled() { lab.settle(stream); }
};

}  // namespace

PAIR(a_read_after_a_write_on_another_stream) {
  auto data = lab.device(size);
  auto out = lab.pinned(size);
  StreamRef producer = lab.compute();
  StreamRef consumer = lab.copy();
  lab.produce(producer, data->data(), 1, size);
  EventPtr produced = lab.record(producer);
  if (!racy) wait(lab, consumer, produced);
  lab.runtime->copy_async(out->data(), data->data(), size, consumer);
}

PAIR(a_write_after_a_read_on_another_stream) {
  auto data = lab.device(size, 1);
  auto out = lab.pinned(size);
  StreamRef reader = lab.copy();
  StreamRef writer = lab.compute();
  lab.runtime->copy_async(out->data(), data->data(), size, reader);
  EventPtr read = lab.record(reader);
  if (!racy) wait(lab, writer, read);
  lab.produce(writer, data->data(), 2, size);
}

PAIR(a_write_after_a_write_on_another_stream) {
  auto data = lab.device(size, 1);
  StreamRef first = lab.compute();
  StreamRef second = lab.compute();
  lab.produce(first, data->data(), 1, size);
  if (!racy) wait(lab, second, lab.record(first));
  lab.produce(second, data->data(), 2, size);
}

namespace {

// Two pieces into page-locked memory, or out of it.
void move_two(Lab& lab, moves::Way way, void* first, void* second, const PinnedPtr& range,
              StreamRef stream) {
  const TreeLeaf leaf{moves::Element::bytes, moves::Element::bytes, size};
  const TreePlan plan({leaf, leaf}, {.way = way});
  const std::vector<void*> far = {first, second};
  for (const auto& move : plan.bind(far, range->data(), nullptr)) lab.runtime->move(move, stream);
}

}  // namespace

PAIR(a_gather_reads_each_of_its_pieces) {
  auto first = lab.device(size, 1);
  auto second = lab.device(size, 1);
  auto range = lab.pinned(2 * size);
  StreamRef producer = lab.compute();
  StreamRef stream = lab.copy();
  lab.produce(producer, second->data(), 2, 1);
  EventPtr produced = lab.record(producer);
  if (!racy) wait(lab, stream, produced);
  move_two(lab, moves::Way::gather, first->data(), second->data(), range, stream);
}

PAIR(a_scatter_writes_each_of_its_pieces) {
  auto first = lab.device(size, 1);
  auto second = lab.device(size, 1);
  auto range = lab.pinned(2 * size, 3);
  auto out = lab.pinned(size);
  StreamRef reader = lab.compute();
  StreamRef stream = lab.copy();
  lab.runtime->copy_async(out->data(), second->data(), 1, reader);
  EventPtr read = lab.record(reader);
  if (!racy) wait(lab, stream, read);
  move_two(lab, moves::Way::scatter, first->data(), second->data(), range, stream);
}

PAIR(an_event_recorded_too_early) {
  auto data = lab.device(size);
  auto out = lab.pinned(size);
  StreamRef producer = lab.compute();
  StreamRef consumer = lab.copy();
  EventPtr event = lab.record(producer);
  lab.produce(producer, data->data(), 1, size);
  if (!racy) event = lab.record(producer);
  wait(lab, consumer, event);
  lab.runtime->copy_async(out->data(), data->data(), size, consumer);
}

PAIR(a_wait_on_the_wrong_stream) {
  auto data = lab.device(size);
  auto out = lab.pinned(size);
  StreamRef producer = lab.compute();
  StreamRef consumer = lab.copy();
  StreamRef other = lab.copy();
  lab.produce(producer, data->data(), 1, size);
  wait(lab, racy ? other : consumer, lab.record(producer));
  lab.runtime->copy_async(out->data(), data->data(), size, consumer);
}

PAIR(one_byte_of_a_view_is_enough) {
  auto data = lab.device(size);
  auto out = lab.pinned(size);
  StreamRef producer = lab.compute();
  StreamRef consumer = lab.copy();
  lab.produce(producer, data->data(), 1, size / 2);
  const std::size_t first = racy ? size / 2 - 1 : size / 2;
  lab.runtime->copy_async(out->data(), data->data() + first, size / 2, consumer);
}

PAIR(order_along_a_chain) {
  auto data = lab.device(size);
  auto out = lab.pinned(size);
  StreamRef first = lab.compute();
  StreamRef middle = lab.compute();
  StreamRef last = lab.copy();
  lab.produce(first, data->data(), 1, size);
  EventPtr a = lab.record(first);
  if (!racy) wait(lab, middle, a);
  wait(lab, last, lab.record(middle));
  lab.runtime->copy_async(out->data(), data->data(), size, last);
}

PAIR(a_host_that_reads_what_it_has_not_waited_for) {
  auto [out, copied] = copy_under_way(lab);
  if (!racy) CHECK(lab.in_time(copied));
  lab.runtime->host_reads(out->data(), size);
}

PAIR(a_thread_that_was_told_by_nobody) {
  auto out = lab.pinned(size);
  auto data = lab.device(size, 1);
  StreamRef stream = lab.copy();
  lab.runtime->copy_async(out->data(), data->data(), size, stream);
  lab.runtime->stream_sync(stream, here);
  if (!racy) lab.hand_over();
  bool caught = false;
  std::thread([&] {
    if (!racy) lab.take_over();
    caught = refused([&] { lab.runtime->host_reads(out->data(), size); });
  }).join();
  if (caught) throw Error(ErrorKind::order, "as it should be");
}

PAIR(work_of_others_that_is_declared) {
  auto data = lab.device(size);
  auto out = lab.pinned(size);
  StreamRef theirs = lab.compute();
  StreamRef copies = lab.copy();
  lab.runtime->declare(theirs, data->data(), size, true);
  if (!racy) wait(lab, copies, lab.record(theirs));
  lab.runtime->copy_async(out->data(), data->data(), size, copies);
}

PAIR(pool_memory_that_is_handed_out_again) {
  auto pool = std::make_shared<PinnedPool>(lab.runtime, std::size_t{1} << 20);
  auto data = lab.device(size, 1);
  StreamRef stream = lab.copy();
  Settled settled{lab, stream};
  {
    auto block = pool->try_allocate(size);
    lab.runtime->copy_async(block->data(), data->data(), size, stream);
    // Without this use the pool does not know that the copy still writes.
    if (!racy) block->record_use(stream);
  }
  std::shared_ptr<PinnedBlock> again;
  for (int i = 0; i < 10'000 && !again; ++i) {
    again = pool->try_allocate(size);
    lab.runtime->poll();
  }
  CHECK(again != nullptr);
}

PAIR(a_transfer_and_its_producer) {
  CopyEngine engine(lab.runtime);
  auto data = lab.device(size);
  auto out = lab.pinned(size);
  StreamRef producer = lab.compute();
  lab.produce(producer, data->data(), 1, size);
  TransferRequest request = request_of(out, data);
  if (!racy) request.after = {producer};
  auto transfer = engine.submit(std::move(request));
  CHECK(transfer->sync_for(patience));
}

PAIR(a_source_that_is_overwritten_after_the_transfer) {
  CopyEngine engine(lab.runtime);
  auto data = lab.device(size, 1);
  auto out = lab.pinned(size);
  StreamRef writer = lab.compute();
  auto transfer = engine.submit(request_of(out, data));
  if (!racy) transfer->stream_wait(writer);
  lab.produce(writer, data->data(), 2, size);
  CHECK(transfer->sync_for(patience));
}

PAIR(a_late_transfer_and_its_producer) {
  CopyEngine engine(lab.runtime);
  auto data = lab.device(size);
  auto out = lab.pinned(size);
  StreamRef producer = lab.compute();
  lab.produce(producer, data->data(), 1, size);
  TransferRequest request = request_of(out, data);
  request.staged = true;
  if (!racy) request.after = {producer};
  auto transfer = engine.submit(std::move(request));
  CHECK(transfer->sync_for(patience));
}

PAIR(a_transfer_through_scratch_memory_and_its_producer) {
  CopyEngine engine(lab.runtime);
  auto data = lab.device(size);
  auto scratch = lab.device(size);
  auto out = lab.pinned(size);
  StreamRef producer = lab.compute();
  lab.produce(producer, data->data(), 1, size);
  TransferRequest request = request_of(out, data);
  const TreePlan plan({{moves::Element::bytes, moves::Element::bytes, size}}, {});
  const std::vector<void*> far = {data->data()};
  Stripes stripes = stripes_of(*plan.bind(far, scratch->data(), nullptr)[0],
                               reinterpret_cast<std::byte*>(out->data()), 4);
  request.moves = stripes.moves;
  request.landings = stripes.landings;
  if (!racy) request.after = {producer};
  auto transfer = engine.submit(std::move(request));
  CHECK(transfer->sync_for(patience));
  CHECK(out->holds(1));
}

TEST(reads_do_not_race_with_reads) {
  Lab lab(host_backend());
  auto data = lab.device(size, 1);
  for (int i = 0; i < 4; ++i) {
    lab.runtime->copy_async(lab.pinned(size)->data(), data->data(), size, lab.copy());
  }
}

TEST(a_race_names_both_operations_and_where_they_are) {
  Lab lab(host_backend());
  auto data = lab.device(size);
  StreamRef producer = lab.compute();
  lab.produce(producer, data->data(), 1, 100);
  try {
    lab.runtime->copy_async(lab.pinned(size)->data(), data->data(), 200, lab.copy());
    CHECK(false);
  } catch (const Error& error) {
    const std::string what = error.what();
    for (const char* part : {"a copy's read of 200 bytes by stream", "(copy, device 0)",
                             "a copy's write of 100 bytes by stream", "(compute, device 0)"}) {
      CHECK(what.find(part) != std::string::npos);
    }
  }
}

TEST(memory_that_came_back_from_the_system_is_nobodys) {
  Lab lab(host_backend());
  StreamRef first = lab.compute();
  for (int i = 0; i < 50; ++i) {
    void* memory = lab.runtime->alloc_pinned(size);
    lab.runtime->copy_async(memory, lab.pinned(size, i)->data(), size, i % 2 ? first : lab.copy());
    lab.runtime->device_sync(0);
    lab.runtime->free_pinned(memory, size);
  }
}

PAIR(memory_that_another_library_gave_again) {
  auto out = lab.pinned(size);
  lab.runtime->copy_async(out->data(), lab.device(size, 1)->data(), size, lab.copy());
  if (!racy) {
    lab.runtime->device_sync(0);
    lab.runtime->fresh(out->data(), size);
  }
  bool caught = false;
  std::thread([&] {  // that knows nothing of the wait
    caught = refused([&] { lab.runtime->taken(out->data(), size); });
  })
      .join();
  if (caught) throw Error(ErrorKind::order, "as it should be");
}

PAIR(a_write_after_a_read_that_is_declared) {
  auto data = lab.device(size, 1);
  StreamRef theirs = lab.compute();
  StreamRef writer = lab.compute();
  lab.runtime->declare(theirs, data->data(), size, false);
  if (!racy) wait(lab, writer, lab.record(theirs));
  lab.produce(writer, data->data(), 2, size);
}

PAIR(a_write_after_the_reads_of_two_streams) {
  auto data = lab.device(size, 1);
  StreamRef first = lab.copy();
  StreamRef second = lab.copy();
  StreamRef writer = lab.compute();
  lab.runtime->copy_async(lab.pinned(size)->data(), data->data(), size, first);
  lab.runtime->copy_async(lab.pinned(size)->data(), data->data(), size, second);
  if (!racy) wait(lab, writer, lab.record(first));
  wait(lab, writer, lab.record(second));
  lab.produce(writer, data->data(), 2, size);
}

PAIR(a_write_after_the_second_read_of_a_stream) {
  auto data = lab.device(size, 1);
  StreamRef reader = lab.copy();
  StreamRef writer = lab.compute();
  lab.runtime->copy_async(lab.pinned(size)->data(), data->data(), size, reader);
  EventPtr read = lab.record(reader);
  lab.runtime->copy_async(lab.pinned(size)->data(), data->data(), size, reader);
  wait(lab, writer, racy ? read : lab.record(reader));
  lab.produce(writer, data->data(), 2, size);
}

PAIR(a_host_that_synchronises_the_device) {
  auto out = lab.pinned(size);
  auto data = lab.device(size, 1);
  lab.runtime->copy_async(out->data(), data->data(), size, lab.copy());
  if (!racy) lab.runtime->device_sync(0);
  lab.runtime->host_reads(out->data(), size);
}

PAIR(a_host_that_sees_an_idle_stream) {
  auto out = lab.pinned(size);
  auto data = lab.device(size, 1);
  StreamRef stream = lab.copy();
  lab.runtime->copy_async(out->data(), data->data(), size, stream);
  while (!racy && !lab.runtime->stream_idle(stream)) lab.runtime->poll();
  lab.runtime->host_reads(out->data(), size);
}

PAIR(a_host_that_asks_until_it_is_done) {
  auto [out, copied] = copy_under_way(lab);
  while (!racy && !lab.runtime->event_query(*copied, here)) lab.runtime->poll();
  lab.runtime->host_reads(out->data(), size);
}

PAIR(a_host_that_asks_until_it_is_over) {
  auto [out, copied] = copy_under_way(lab);
  while (!racy && lab.runtime->event_state(*copied, here) != EventState::passed) {
    lab.runtime->poll();
  }
  lab.runtime->host_reads(out->data(), size);
}

PAIR(a_host_that_asks_whether_it_is_over_and_is_told_no) {
  std::unique_ptr<Gate> gate;
  auto [out, copied] = copy_under_way(lab, &gate);
  CHECK(lab.runtime->event_state(*copied, here) == EventState::pending);
  if (!racy) {
    gate->open();
    CHECK(lab.in_time(copied));
  }
  lab.runtime->host_reads(out->data(), size);
}

PAIR(a_host_that_asks_and_is_told_no) {
  std::unique_ptr<Gate> gate;
  auto [out, copied] = copy_under_way(lab, &gate);
  CHECK(!lab.runtime->event_query(*copied, here));
  if (!racy) {
    gate->open();
    CHECK(lab.in_time(copied));
  }
  lab.runtime->host_reads(out->data(), size);
}

// Another thread waits for what its starter recorded, and reads what its starter has written.
PAIR(a_thread_knows_what_came_before_the_record) {
  auto out = lab.pinned(size);
  StreamRef stream = lab.copy();
  EventPtr event = lab.record(stream);
  lab.runtime->taken(out->data(), size);
  if (!racy) event = lab.record(stream);
  bool caught = false;
  std::thread([&] {
    CHECK(lab.in_time(event));
    caught = refused([&] { lab.runtime->host_reads(out->data(), size); });
  }).join();
  if (caught) throw Error(ErrorKind::order, "as it should be");
}

PAIR(a_thread_knows_what_came_before_the_lock_was_given_up) {
  auto out = lab.pinned(size);
  auto other = lab.pinned(size);
  lab.runtime->taken(other->data(), size);  // of a thread that did nothing there is nothing to know
  if (racy) lab.hand_over();
  lab.runtime->taken(out->data(), size);
  if (!racy) lab.hand_over();
  bool caught = false;
  std::thread([&] {
    lab.take_over();
    caught = refused([&] { lab.runtime->host_reads(out->data(), size); });
  }).join();
  if (caught) throw Error(ErrorKind::order, "as it should be");
}

PAIR(what_a_lock_guards_is_touched_by_two_threads) {
  int guarded = 0;
  const auto touch = [&] {
    if (!racy) lab.runtime->lock_acquired(&guarded, here);
    lab.runtime->guarded(&guarded, here);
    if (!racy) lab.runtime->lock_released(&guarded, here);
  };
  std::thread(touch).join();
  std::thread(touch).join();
  lab.runtime->host_reads(nullptr, 0);
}

// ---- callables

namespace {

// Runs a callable on a host stream; throws what it threw.
void on_a_host_stream(Lab& lab, std::function<void()> body) {
  StreamRef stream = lab.host();
  lab.runtime->launch(std::move(body), stream);
  lab.runtime->stream_sync(stream, here);
}

}  // namespace

PAIR(a_callable_that_reads_what_it_has_not_waited_for) {
  auto [out, copied] = copy_under_way(lab);
  on_a_host_stream(lab, [&] {
    if (!racy) CHECK(lab.in_time(copied));
    lab.runtime->host_reads(out->data(), size);
  });
}

PAIR(an_event_that_a_callable_records_too_early) {
  auto data = lab.device(size);
  auto out = lab.pinned(size);
  auto value = lab.pinned(size, 1);
  StreamRef producer = lab.compute();
  StreamRef consumer = lab.copy();
  on_a_host_stream(lab, [&] {
    EventPtr event = lab.record(producer);
    lab.runtime->copy_async(data->data(), value->data(), size, producer);
    if (!racy) event = lab.record(producer);
    wait(lab, consumer, event);
    lab.runtime->copy_async(out->data(), data->data(), size, consumer);
  });
}

PAIR(what_a_callable_learned_is_known_to_its_stream) {
  auto out = lab.pinned(size);
  auto data = lab.device(size, 1);
  StreamRef stream = lab.copy();
  StreamRef host = lab.host();
  lab.runtime->copy_async(out->data(), data->data(), size, stream);
  EventPtr copied = lab.record(stream);
  lab.runtime->launch(
      [&] {
        if (!racy) CHECK(lab.in_time(copied));
      },
      host);
  lab.runtime->stream_sync(host, here);
  lab.runtime->stream_sync(host, here);  // the first was issued before the callable ended
  lab.runtime->host_reads(out->data(), size);
}

PAIR(a_callable_that_is_told_by_a_thread) {
  auto out = lab.pinned(size);
  auto data = lab.device(size, 1);
  lab.hand_over();
  std::thread([&] {
    lab.take_over();
    StreamRef stream = lab.copy();
    lab.runtime->copy_async(out->data(), data->data(), size, stream);
    lab.runtime->stream_sync(stream, here);
    if (!racy) lab.hand_over();
  }).join();
  on_a_host_stream(lab, [&] {
    lab.take_over();
    lab.runtime->host_reads(out->data(), size);
  });
}

PAIR(a_thread_that_is_told_by_a_callable) {
  auto out = lab.pinned(size);
  on_a_host_stream(lab, [&] {
    lab.runtime->taken(out->data(), size);
    if (!racy) lab.hand_over();
  });
  bool caught = false;
  std::thread([&] {
    lab.take_over();
    caught = refused([&] { lab.runtime->host_reads(out->data(), size); });
  }).join();
  if (caught) throw Error(ErrorKind::order, "as it should be");
}

namespace {

// A callable's read, and the throw that ends it, come before what the thread does that saw it.
void read_and_fail(Lab& lab) {
  auto out = lab.pinned(size);
  StreamRef host = lab.host();
  lab.runtime->launch(
      [&] {
        lab.runtime->host_reads(out->data(), size);
        throw std::runtime_error("deliberate");
      },
      host);
  CHECK_THROWS(lab.runtime->stream_sync(host, here), std::runtime_error);
  CHECK(!refused([&] { lab.runtime->taken(out->data(), size); }));
}

void wait_for_marks(Lab& lab, bool racy) {
  auto out = lab.pinned(size);
  auto data = lab.device(size, 1);
  StreamRef stream = lab.copy();
  auto gate = lab.runtime->gate(stream);
  lab.runtime->copy_async(out->data(), data->data(), size, stream);
  const std::vector<EventPtr> marks = lab.runtime->mark_workers(0);
  CHECK_EQ(marks.size(), 1);
  gate->open();
  for (const EventPtr& mark : marks) CHECK(racy || lab.in_time(mark));
  CHECK_EQ(refused([&] { lab.runtime->host_reads(out->data(), size); }), racy);
}

}  // namespace

TEST(host_a_sync_that_throws_has_waited) {
  Lab lab(host_backend());
  read_and_fail(lab);
}

TEST(sim_a_sync_that_throws_has_waited) {
  for (const std::string& schedule : schedules()) {
    Lab lab(sim_backend(schedule, true));
    read_and_fail(lab);
  }
}

TEST(host_marks_of_workers_stand_for_their_work) {
  for (bool racy : {false, true}) {
    Lab lab(host_backend());
    wait_for_marks(lab, racy);
  }
}

TEST(sim_marks_of_workers_stand_for_their_work) {
  for (bool racy : {false, true}) {
    for (const std::string& schedule : schedules()) {
      Lab lab(sim_backend(schedule, false));
      wait_for_marks(lab, racy);
    }
  }
}

TEST(host_synchronising_one_device_tells_nothing_of_another) {
  for (int device : {0, 1}) {
    Lab lab(host_backend());
    auto out = lab.pinned(size);
    auto data = lab.device(size, 1);
    StreamRef stream = lab.runtime->stream_create(1, StreamKind::copy);
    lab.runtime->copy_async(out->data(), data->data(), size, stream);
    lab.runtime->device_sync(device);
    CHECK_EQ(refused([&] { lab.runtime->host_reads(out->data(), size); }), device == 0);
    lab.runtime->device_sync(1);
  }
}

// The system may give the same memory again: to somebody who knows nothing of its last owner.
TEST(host_memory_of_another_thread_that_came_back_is_nobodys) {
  struct Same final : ProxyRuntime {
    using ProxyRuntime::ProxyRuntime;
    void* alloc_pinned(std::size_t) override { return memory.data(); }
    void free_pinned(void*, std::size_t) noexcept override {}
    std::vector<unsigned char> memory = std::vector<unsigned char>(size);
  };
  Lab lab(checked(std::make_shared<Same>(make_host_runtime())));
  auto data = lab.runtime->alloc_device(0, size);
  const auto fill = [&](StreamRef stream) {
    void* memory = lab.runtime->alloc_pinned(size);
    lab.runtime->copy_async(memory, data, size, stream);
    lab.runtime->stream_sync(stream, here);
    lab.runtime->free_pinned(memory, size);
  };
  const std::vector<StreamRef> streams{lab.copy(), lab.copy()};
  std::thread([&] { fill(streams[0]); }).join();
  CHECK(!refused([&] { fill(streams[1]); }));
  lab.runtime->free_device(0, data, size);
}

TEST(a_thread_hands_on_what_it_knows_without_doing_anything) {
  for (bool racy : {false, true}) {
    order::OrderChecker checker;
    int byte = 0, first = 0, second = 0;
    std::thread([&] {
      checker.host_access("write", &byte, 1, order::Mode::write);
      checker.released(&first);
    }).join();
    const std::size_t actors = checker.known().size();
    for (int passer = 0; passer < 100; ++passer) {
      std::thread([&] {
        if (!racy) checker.acquired(&first);
        checker.released(&second);
      }).join();
    }
    checker.acquired(&second);
    CHECK_EQ(refused([&] { checker.host_access("write", &byte, 1, order::Mode::write); }), racy);
    // Each actor makes every clock longer: a thread that is none costs nothing once it has ended.
    CHECK(checker.known().size() <= actors + 2);
    CHECK_EQ(checker.threads(), 1);
  }
}

TEST(what_a_thread_did_outlives_it_and_what_it_knew_does_not) {
  order::OrderChecker checker;
  std::vector<char> bytes(100);
  int lock = 0;
  for (char& byte : bytes) {
    std::thread([&] {
      checker.host_access("write", &byte, 1, order::Mode::write);
      checker.released(&lock);
    }).join();
  }
  CHECK(refused([&] { checker.host_access("write", &bytes[50], 1, order::Mode::write); }));
  CHECK_EQ(checker.threads(), 1);
  checker.acquired(&lock);
  for (char& byte : bytes) {
    CHECK(!refused([&] { checker.host_access("write", &byte, 1, order::Mode::write); }));
  }
}

TEST(streams_of_a_stock_go_to_the_next_runtime_once_they_are_idle) {
  std::shared_ptr<Runtime> shared = make_host_runtime();
  auto stock = std::make_shared<StreamStock>(shared);
  StreamRef first;
  std::unique_ptr<Gate> gate;
  {
    order::CheckedRuntime runtime(shared, stock);
    first = runtime.stream_create(0, StreamKind::copy, true);
    CHECK(!(runtime.stream_create(0, StreamKind::copy, true) == first));
    gate = runtime.gate(first);
  }
  order::CheckedRuntime next(shared, stock);
  CHECK(!(next.stream_create(0, StreamKind::copy, true) == first));  // held
  gate->open();
  shared->stream_sync(first, here);
  CHECK(!(next.stream_create(0, StreamKind::compute, true) == first));
  CHECK(!(next.stream_create(0, StreamKind::copy, false) == first));
  CHECK(!(next.stream_create(1, StreamKind::copy, true) == first));
  CHECK(next.stream_create(0, StreamKind::copy, true) == first);
}

TEST(what_a_callable_holds_dies_as_the_callable) {
  // A thread that knows nothing lets go of a block: whoever gets the block next must know its use.
  struct Taker {
    Lab& lab;
    void* memory;
    bool& racy;
    ~Taker() {
      racy = refused([&] { lab.runtime->taken(memory, size); });
    }
  };
  Lab lab(host_backend());
  bool racy = true;
  auto data = lab.pinned(size);
  StreamRef stream = lab.host();
  lab.produce(stream, data->data(), 1, size);
  std::shared_ptr<Taker> taker(new Taker{lab, data->data(), racy});
  lab.runtime->launch([taker] {}, stream);
  taker.reset();
  lab.runtime->stream_sync(stream, here);
  CHECK(!racy);
}

TEST(an_event_that_threw_its_error_is_done) {
  for (bool asked : {false, true}) {
    Lab lab(host_backend());
    auto data = lab.pinned(size);
    StreamRef stream = lab.host();
    lab.produce(stream, data->data(), 1, size);
    lab.runtime->launch([] { throw Error(ErrorKind::runtime, "deliberate"); }, stream);
    EventPtr end = lab.record(stream);
    if (asked) {
      lab.runtime->stream_wait(lab.host(), *end, here);
      while (!lab.runtime->idle()) std::this_thread::yield();
      CHECK_THROWS(lab.runtime->event_query(*end, here), Error);
    } else {
      CHECK_THROWS(lab.in_time(end), Error);
    }
    CHECK(!refused([&] { lab.runtime->host_reads(data->data(), size); }));
  }
}
