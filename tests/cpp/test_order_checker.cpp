// The order checker: pairs of programs, one in order and one with a single wait, record or sync
// less. It must refuse the second under every schedule and find nothing in the first.
#include <thread>

#include "lab.h"
#include "transfer/copy_engine.h"
#include "transfer/pinned_pool.h"

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
  auto out = lab.pinned(size);
  auto data = lab.device(size, 1);
  StreamRef stream = lab.copy();
  lab.runtime->copy_async(out->data(), data->data(), size, stream);
  EventPtr copied = lab.record(stream);
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
  std::unique_ptr<PinnedBlock> again;
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
