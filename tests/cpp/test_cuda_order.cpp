// What the CUDA runtime orders beside test_runtime_contract.cpp: each wait is shown not to come
// back while a gate holds what it waits for, whatever else of the device is done.
#include <atomic>
#include <future>
#include <thread>

#include "lab.h"

using namespace streamlap;
using namespace streamlap::testing;

namespace {

constexpr std::size_t size = 1 << 16;

// A call that another thread makes; it may throw there.
class Call {
 public:
  template <class Body>
  explicit Call(Body&& body) : made_(std::async(std::launch::async, std::forward<Body>(body))) {}
  // True while it has not come back, given a moment to do so wrongly.
  bool pending() const { return made_.wait_for(moment) == std::future_status::timeout; }
  void come_back() { made_.get(); }

 private:
  std::future<void> made_;
};

}  // namespace

TEST(cuda_syncing_a_stream_waits_for_its_work) {
  Lab lab(cuda_backend());
  auto out = lab.pinned(size);
  auto source = lab.device(size, 3);
  StreamRef stream = lab.compute();
  auto gate = lab.runtime->gate(stream);
  lab.runtime->copy_async(out->data(), source->data(), size, stream);
  Call syncing([&] { lab.runtime->stream_sync(stream, here); });
  CHECK(syncing.pending());
  CHECK(out->holds(poison));
  gate->open();
  syncing.come_back();
  CHECK(out->holds(3));
}

TEST(cuda_syncing_a_host_stream_waits_for_its_work) {
  Lab lab(cuda_backend());
  StreamRef stream = lab.host();
  auto gate = lab.runtime->gate(stream);
  std::atomic<bool> ran{false};
  lab.runtime->launch([&] { ran = true; }, stream);
  Call syncing([&] { lab.runtime->stream_sync(stream, here); });
  CHECK(syncing.pending());
  CHECK(!ran);
  gate->open();
  syncing.come_back();
  CHECK(ran);
  // Where the sync came back too early the callable must still not outlive the flag.
  while (!lab.runtime->stream_idle(stream)) std::this_thread::yield();
}

// No worker has anything to do: the device alone is waited for.
TEST(cuda_syncing_a_device_waits_for_its_streams) {
  Lab lab(cuda_backend());
  auto out = lab.pinned(size);
  auto source = lab.device(size, 4);
  StreamRef stream = lab.copy();
  auto gate = lab.runtime->gate(stream);
  lab.runtime->copy_async(out->data(), source->data(), size, stream);
  Call syncing([&] { lab.runtime->device_sync(0); });
  CHECK(syncing.pending());
  CHECK(out->holds(poison));
  gate->open();
  syncing.come_back();
  CHECK(out->holds(4));
}

// A worker has yet to issue what the device will do: the device alone is idle.
TEST(cuda_syncing_a_device_waits_for_work_that_is_yet_to_be_issued) {
  Lab lab(cuda_backend());
  auto out = lab.pinned(size);
  auto source = lab.device(size, 5);
  StreamRef host = lab.host();
  StreamRef stream = lab.copy();
  auto gate = lab.runtime->gate(host);
  lab.runtime->launch([&] { lab.runtime->copy_async(out->data(), source->data(), size, stream); },
                      host);
  Call syncing([&] { lab.runtime->device_sync(0); });
  CHECK(syncing.pending());
  CHECK(out->holds(poison));
  gate->open();
  syncing.come_back();
  CHECK(out->holds(5));
  lab.runtime->stream_sync(host, here);
}

TEST(cuda_a_worker_that_is_held_is_not_idle) {
  Lab lab(cuda_backend());
  StreamRef host = lab.host();
  lab.runtime->device_sync(0);
  CHECK(lab.runtime->idle());
  auto gate = lab.runtime->gate(host);
  CHECK(!lab.runtime->idle());
  gate->open();
  lab.runtime->stream_sync(host, here);
  CHECK(lab.runtime->idle());
}

TEST(cuda_a_stream_that_is_held_is_not_idle) {
  Lab lab(cuda_backend());
  StreamRef stream = lab.compute();
  auto gate = lab.runtime->gate(stream);
  CHECK(!lab.runtime->idle());
  gate->open();
  lab.runtime->stream_sync(stream, here);
  CHECK(lab.runtime->idle());
}

// A worker asks for the recording that it was told to wait for, not for one made since.
TEST(cuda_a_host_stream_waits_for_the_recording_of_its_moment) {
  Lab lab(cuda_backend());
  StreamRef slow = lab.compute();
  StreamRef idle = lab.compute();
  StreamRef host = lab.host();
  auto out = lab.pinned(size);
  auto source = lab.device(size, 6);
  bool right = false;
  auto gate = lab.runtime->gate(slow);
  lab.runtime->copy_async(out->data(), source->data(), size, slow);
  EventPtr event = lab.record(slow);
  lab.runtime->stream_wait(host, *event, here);
  lab.runtime->launch([&] { right = out->holds(6); }, host);
  EventPtr end = lab.record(host);
  lab.runtime->event_record(*event, idle, here);
  CHECK(lab.in_time(event));
  CHECK(lab.held(end));
  gate->open();
  CHECK(lab.in_time(end));
  CHECK(right);
}

// An event whose Event died is given to the next one only when no worker waits for it any more.
TEST(cuda_an_event_that_a_worker_waits_for_is_not_recycled) {
  Lab lab(cuda_backend());
  StreamRef slow = lab.compute();
  StreamRef idle = lab.compute();
  StreamRef host = lab.host();
  auto gate = lab.runtime->gate(slow);
  EventPtr event = lab.record(slow);
  lab.runtime->stream_wait(host, *event, here);
  EventPtr end = lab.record(host);
  event.reset();
  for (int i = 0; i < 100; ++i) CHECK(lab.in_time(lab.record(idle)));
  CHECK(lab.held(end));
  gate->open();
  CHECK(lab.in_time(end));
}

TEST(cuda_a_question_is_answered_truly) {
  Lab lab(cuda_backend());
  for (StreamRef stream : {lab.compute(), lab.copy(), lab.host()}) {
    auto gate = lab.runtime->gate(stream);
    EventPtr event = lab.record(stream);
    CHECK(!lab.runtime->event_query(*event, here));
    CHECK(!lab.runtime->event_sync_for(*event, 0ns, here));
    CHECK(!lab.runtime->event_sync_for(*event, moment, here));
    gate->open();
    CHECK(lab.in_time(event));
    CHECK(lab.runtime->event_query(*event, here));
  }
}
