// Workers and completions: in order, waited for, and never believed done too early. What a runtime
// makes of them is in test_runtime_contract.cpp.
#include "runtime/worker.h"

#include <atomic>
#include <future>

#include "lab.h"

using namespace streamlap;
using namespace streamlap::testing;

namespace {

constexpr auto soon = 3s;  // what must come; much longer than it takes

// A task that holds its worker until it is let go.
struct Held {
  explicit Held(Worker& worker) {
    worker.task([this] {
      entered = true;
      entered.notify_all();
      left.wait(false);
      ended = true;
    });
  }
  void leave() {
    left = true;
    left.notify_all();
  }
  std::atomic<bool> entered{false};
  std::atomic<bool> left{false};
  std::atomic<bool> ended{false};
};

// True while `call`, which another thread is making, has not come back.
bool pending(const std::future<void>& call) {
  return call.wait_for(moment) == std::future_status::timeout;
}

}  // namespace

TEST(a_record_is_done_after_the_work_before_it_and_not_sooner) {
  Worker worker;
  Held held(worker);
  CompletionPtr completion = worker.record();
  CHECK(!completion->done());
  CHECK(!completion->wait_for(moment));
  auto waiting = std::async(std::launch::async, [&] { completion->wait(); });
  CHECK(pending(waiting));
  held.leave();
  CHECK(waiting.wait_for(soon) == std::future_status::ready);
  CHECK(completion->wait_for(soon));
  CHECK(completion->done());
  CHECK(held.ended);
}

TEST(a_worker_wakes_for_new_work) {
  Worker worker;
  CHECK(worker.record()->wait_for(soon));
  for (int i = 0; i < 20; ++i) {
    while (!worker.idle()) std::this_thread::yield();
    std::this_thread::sleep_for(1ms);  // so that it sleeps, too
    CHECK(worker.record()->wait_for(soon));
  }
}

TEST(sync_returns_when_all_is_done) {
  Worker worker;
  Held held(worker);
  auto syncing = std::async(std::launch::async, [&] { worker.sync(); });
  CHECK(pending(syncing));
  held.leave();
  syncing.get();
  CHECK(held.ended);
}

TEST(a_worker_refuses_to_wait_for_itself) {
  Worker worker;
  std::atomic<bool> refused{false};
  worker.task([&] {
    try {
      worker.sync();
    } catch (const Error& error) {
      refused = error.kind() == ErrorKind::invalid_argument;
    }
  });
  worker.sync();
  CHECK(refused);
}

TEST(a_worker_that_has_work_is_not_idle) {
  Worker worker;
  CHECK(worker.idle());
  for (int i = 0; i < 200; ++i) {
    Held held(worker);
    const bool queued_idle = worker.idle();
    held.entered.wait(false);
    const bool busy_idle = worker.idle();
    held.leave();
    worker.sync();
    REQUIRE(!queued_idle);
    REQUIRE(!busy_idle);
    REQUIRE(worker.idle());
  }
}

TEST(a_worker_finishes_what_it_was_given_before_it_dies) {
  auto worker = std::make_unique<Worker>();
  Held held(*worker);
  held.entered.wait(false);
  auto dying = std::async(std::launch::async, [&] { worker.reset(); });
  CHECK(pending(dying));
  held.leave();
  dying.get();
  CHECK(held.ended);
}

TEST(an_idle_worker_can_die) {
  auto worker = std::make_unique<Worker>();
  worker->sync();
  std::this_thread::sleep_for(1ms);  // so that it sleeps
  worker.reset();
}

TEST(tasks_run_in_order) {
  Worker worker;
  Held held(worker);
  held.entered.wait(false);
  std::atomic<int> turn{0};
  std::atomic<int> wrong{0};
  for (int i = 0; i < 10; ++i) {
    worker.task([&, i] { wrong += turn++ != i; });
  }
  held.leave();
  while (turn < 10) std::this_thread::yield();
  worker.sync();
  CHECK_EQ(wrong.load(), 0);
}

TEST(a_failed_worker_still_waits) {
  Worker first;
  Worker second;
  second.task([] { throw std::runtime_error("deliberate"); });
  Held held(first);
  CompletionPtr before = first.record();
  second.wait([before] { before->wait(); });
  CompletionPtr after = second.record();
  CHECK(!after->wait_for(moment));
  held.leave();
  CHECK(after->wait_for(soon));
  CHECK_THROWS(second.sync(), std::runtime_error);
}

// What a callable holds may use the worker while it dies.
TEST(a_callable_dies_without_the_lock) {
  Worker worker;
  std::atomic<bool> asked{false};
  worker.task([kept = std::shared_ptr<void>(nullptr, [&](void*) { asked = !worker.idle(); })] {});
  worker.sync();
  CHECK(asked);
}
