// Runtimes that live as long as Python needs them, and how they end.
#include <atomic>
#include <mutex>
#include <thread>

#include "base/process.h"
#include "bindings/types.h"

namespace streamlap::bindings {
namespace {

struct HandedOut {
  std::mutex mutex;
  std::vector<std::weak_ptr<Runtime>> runtimes;
  std::atomic<int> ending{0};  // being taken down: their workers finish what they have been given
};

HandedOut& handed_out() {
  static auto* made = new HandedOut();
  return *made;
}

void take_down(std::shared_ptr<Runtime> runtime) noexcept {
  // Owned by a pointer of its own, so that it can be leaked wherever this fails.
  auto* kept = new std::shared_ptr<Runtime>(std::move(runtime));
  if (process::leaking()) return;
  ++handed_out().ending;
  try {
    std::thread([kept] {
      delete kept;
      --handed_out().ending;
    }).detach();
  } catch (...) {
    --handed_out().ending;  // no thread can be had: its workers stay
  }
}

}  // namespace

std::shared_ptr<Runtime> hand_out(std::shared_ptr<Runtime> runtime) {
  Runtime* raw = runtime.get();
  std::shared_ptr<Runtime> handed(
      raw, [kept = std::move(runtime)](Runtime*) mutable { take_down(std::move(kept)); });
  std::lock_guard lock(handed_out().mutex);
  std::erase_if(handed_out().runtimes, [](const auto& other) { return other.expired(); });
  handed_out().runtimes.push_back(handed);
  return handed;
}

bool is_idle(Runtime& runtime) noexcept {
  try {
    return runtime.idle();
  } catch (...) {
    return true;
  }
}

bool handed_out_idle() {
  std::vector<std::shared_ptr<Runtime>> alive;
  {
    std::lock_guard lock(handed_out().mutex);
    for (const auto& weak : handed_out().runtimes) {
      if (auto runtime = weak.lock()) alive.push_back(std::move(runtime));
    }
  }
  for (const auto& runtime : alive) {
    if (!runtime->virtual_time() && !is_idle(*runtime)) return false;
  }
  return handed_out().ending == 0;
}

}  // namespace streamlap::bindings
