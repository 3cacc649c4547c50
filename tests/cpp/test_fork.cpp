// A child that is forked while other threads are inside the library comes to its end: what runs
// when a thread ends takes no lock that one of them may have held.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <thread>

#include "base/process.h"
#include "lab.h"

using namespace streamlap;
using namespace streamlap::testing;

namespace {

constexpr int children = 500;

// Whether the child is gone, with status 0, before long; else it is killed.
bool ends(pid_t child) {
  const auto deadline = std::chrono::steady_clock::now() + 10s;
  int status = 0;
  while (waitpid(child, &status, WNOHANG) == 0) {
    if (std::chrono::steady_clock::now() > deadline) {
      kill(child, SIGKILL);
      waitpid(child, &status, 0);
      return false;
    }
    std::this_thread::sleep_for(100us);
  }
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

void check_children(Lab& lab) {
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  SKIP("a sanitizer has locks of its own");
#else
  process::mark_started();
  const StreamRef stream = lab.copy();
  const auto use = [&] { lab.in_time(lab.record(stream)); };
  use();  // from here on this thread has an end that the library knows of
  std::atomic<bool> over{false};
  std::vector<std::thread> busy;
  for (int i = 0; i < 2; ++i) {
    busy.emplace_back([&] {
      while (!over) use();
    });
  }
  int ended = 0;
  for (int i = 0; i < children && ended == i; ++i) {
    std::fflush(nullptr);
    const pid_t child = fork();
    if (child == 0) std::exit(0);
    ended += ends(child);
  }
  over = true;
  for (std::thread& thread : busy) thread.join();
  CHECK_EQ(ended, children);
#endif
}

}  // namespace

TEST(host_children_end_whatever_lock_another_thread_held) {
  Lab lab(host_backend());
  check_children(lab);
}

TEST(sim_children_end_whatever_lock_another_thread_held) {
  Lab lab(sim_backend("eager", true));
  check_children(lab);
}
