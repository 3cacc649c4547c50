// One deliberate fault of each kind: a run that does not report the one of its sanitizer proves
// nothing. A program (faults thread|address|leak|undefined) and a shared library: loaded into
// Python, it shows that the faults are seen there too, under the same options and suppressions.
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>

namespace {

int g_counter = 0;
std::atomic<int> g_inside{0};

}  // namespace

// Called by two threads at once. They meet first, without ordering each other: else one might be
// over before the other starts, and how threads are started orders that. Gives up after 10 s.
extern "C" __attribute__((visibility("default"))) int fault_count() {
  g_inside.fetch_add(1, std::memory_order_relaxed);
  const auto late = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (g_inside.load(std::memory_order_relaxed) < 2) {
    if (std::chrono::steady_clock::now() > late) return 0;
  }
  for (int i = 0; i < 1000; ++i) ++g_counter;
  return g_counter;
}

extern "C" __attribute__((visibility("default"))) int fault_thread() {
  std::thread other(fault_count);
  fault_count();
  other.join();
  return g_counter;
}

extern "C" __attribute__((visibility("default"))) int fault_address() {
  auto owner = std::make_unique<int>(1);
  const volatile int* left = owner.get();
  owner.reset();
  return *left;  // use after free
}

extern "C" __attribute__((visibility("default"))) int fault_leak() {
  int* lost = new int(1);
  const int value = *static_cast<volatile int*>(lost);
  lost = nullptr;
  return value;
}

extern "C" __attribute__((visibility("default"))) int fault_undefined() {
  volatile int largest = INT_MAX;
  return largest + 1;  // signed overflow
}

int main(int argc, char** argv) {
  const char* kind = argc > 1 ? argv[1] : "";
  if (std::strcmp(kind, "thread") == 0) return fault_thread() == 0;
  if (std::strcmp(kind, "address") == 0) return fault_address() == 0;
  if (std::strcmp(kind, "leak") == 0) return fault_leak() == 0;
  if (std::strcmp(kind, "undefined") == 0) return fault_undefined() == 0;
  return 2;
}
