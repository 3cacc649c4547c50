#include "base/process.h"

#include <pthread.h>

#include <atomic>
#include <mutex>

#include "base/errors.h"

namespace streamlap::process {
namespace {

std::atomic<bool> g_started{false};
std::atomic<bool> g_forked{false};
std::atomic<bool> g_ending{false};
std::atomic<bool> g_closing{false};

void in_child() {
  if (g_started.load(std::memory_order_relaxed)) g_forked.store(true, std::memory_order_relaxed);
}

}  // namespace

void mark_started() {
  static std::once_flag once;
  std::call_once(once, [] {
    pthread_atfork(nullptr, nullptr, in_child);
    g_started.store(true);
  });
}

bool forked() noexcept { return g_forked.load(std::memory_order_relaxed); }
void mark_ending() noexcept { g_ending.store(true); }
bool ending() noexcept { return g_ending.load(std::memory_order_relaxed); }
void mark_closing() noexcept { g_closing.store(true); }
bool closing() noexcept { return g_closing.load(std::memory_order_relaxed); }

void require_usable() {
  if (forked()) {
    throw Error(
        ErrorKind::forked,
        "streamlap was started in the parent of this forked process; its threads, streams and "
        "pinned memory did not come along. Start the child with the 'spawn' or 'forkserver' "
        "method, or use streamlap only in one of the two");
  }
}

}  // namespace streamlap::process
