// What a test program needs on any runtime: memory with known bytes, streams, and a producer.
// ON_EACH_RUNTIME(program) { ... lab ... } is one program and one test per runtime.
#pragma once

#include <errno.h>  // program_invocation_name

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "check.h"
#include "check/checked_runtime.h"
#include "runtime/proxy_runtime.h"
#include "sim/runtime_sim.h"

namespace streamlap::testing {

using namespace std::chrono_literals;

inline constexpr Site here{"test"};
inline constexpr unsigned char poison = 0xEE;
// A wait that must not end is given this long to end wrongly.
inline constexpr auto moment = 20ms;
// A wait that must end; far above anything that is not a deadlock.
inline constexpr auto patience = 60s;

// Programs share one CUDA runtime and its streams: beyond CUDA_DEVICE_MAX_CONNECTIONS streams share
// a hardware queue, and then a gate holds streams that have nothing to do with it.
class ReusedStreams final : public ProxyRuntime {
 public:
  using ProxyRuntime::ProxyRuntime;

  void next_program() {
    std::lock_guard lock(mutex_);
    for (auto& entry : made_) entry.second.used = 0;
  }
  StreamRef stream_create(int device, StreamKind kind, bool high_priority) override {
    std::lock_guard lock(mutex_);
    Made& made = made_[{device, kind, high_priority}];
    if (made.used == made.streams.size()) {
      made.streams.push_back(ProxyRuntime::stream_create(device, kind, high_priority));
    }
    StreamRef stream = made.streams[made.used++];
    ProxyRuntime::stream_reset_error(stream);
    return stream;
  }

 private:
  struct Made {
    std::vector<StreamRef> streams;
    std::size_t used = 0;
  };
  std::mutex mutex_;
  std::map<std::tuple<int, StreamKind, bool>, Made> made_;
};

// A mutant: the calls at one site are left out. See tests/mutants.py.
class WithoutSite final : public ProxyRuntime {
 public:
  using ProxyRuntime::ProxyRuntime;

  void stream_sync(StreamRef stream, Site site) override {
    if (!dropped(site)) ProxyRuntime::stream_sync(stream, site);
  }
  void stream_wait(StreamRef stream, const Event& event, Site site) override {
    if (!dropped(site)) ProxyRuntime::stream_wait(stream, event, site);
  }
  void event_record(Event& event, StreamRef stream, Site site) override {
    if (!dropped(site)) ProxyRuntime::event_record(event, stream, site);
  }
  bool event_query(const Event& event, Site site) override {
    return dropped(site) || ProxyRuntime::event_query(event, site);
  }
  EventState event_state(const Event& event, Site site) noexcept override {
    return dropped(site) ? EventState::passed : ProxyRuntime::event_state(event, site);
  }
  bool event_sync_for(const Event& event, std::chrono::nanoseconds timeout, Site site) override {
    return dropped(site) || ProxyRuntime::event_sync_for(event, timeout, site);
  }
  void lock_acquired(const void* lock, Site site) noexcept override {
    if (!dropped(site)) ProxyRuntime::lock_acquired(lock, site);
  }
  void lock_released(const void* lock, Site site) noexcept override {
    if (!dropped(site)) ProxyRuntime::lock_released(lock, site);
  }
};

// With the order checker in between, which must find nothing in any of the programs.
inline std::shared_ptr<Runtime> checked(std::shared_ptr<Runtime> runtime) {
  return std::make_shared<WithoutSite>(std::make_shared<order::CheckedRuntime>(std::move(runtime)));
}

inline std::shared_ptr<Runtime> host_backend() { return checked(make_host_runtime()); }

inline std::shared_ptr<Runtime> cuda_backend() {
  CudaProbe probe = probe_cuda();
  if (probe.devices == 0) SKIP(probe.reason);
  static auto shared = std::make_shared<ReusedStreams>(checked(make_cuda_runtime()));
  shared->next_program();
  return shared;
}

// A number from the environment.
inline std::uint64_t asked(const char* name, std::uint64_t otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr ? otherwise : std::strtoull(value, nullptr, 10);
}

// Schedules that every program runs under on the simulation. STREAMLAP_SEED and STREAMLAP_SEEDS say
// where the random ones start and how many there are; STREAMLAP_SCHEDULE is one alone.
inline const std::vector<std::string>& schedules() {
  static const std::vector<std::string> all = [] {
    if (const char* one = std::getenv("STREAMLAP_SCHEDULE")) return std::vector<std::string>{one};
    const std::uint64_t first = asked("STREAMLAP_SEED", 1);
    const std::uint64_t count = asked("STREAMLAP_SEEDS", 4);
    std::vector<std::string> made = {"eager", "lazy", "starve(0)", "starve(1)"};
    for (std::uint64_t seed = first; seed < first + count; ++seed) {
      made.push_back("random(" + std::to_string(seed) + ")");
    }
    for (std::uint64_t seed = first; seed < first + (count * 3 + 3) / 4; ++seed) {
      made.push_back("pct(" + std::to_string(seed) + "," + (seed % 3 == 0 ? "5" : "3") + ")");
    }
    return made;
  }();
  return all;
}

inline std::shared_ptr<sim::SimRuntime> simulation(const std::string& schedule, bool device_rules) {
  sim::SimOptions options;
  options.device_rules = device_rules;
  options.cost.per_copy = 2e-6;
  options.cost.to_host = options.cost.to_device = 55e9;
  return std::make_shared<sim::SimRuntime>(options, sim::parse_strategy(schedule));
}

inline std::shared_ptr<Runtime> sim_backend(const std::string& schedule, bool device_rules) {
  return checked(simulation(schedule, device_rules));
}

// Bytes that everybody can reach; freed with the last reference.
class Pinned {
 public:
  Pinned(std::shared_ptr<Runtime> runtime, std::size_t bytes, int fill = poison)
      : runtime_(std::move(runtime)),
        bytes_(bytes),
        data_(static_cast<unsigned char*>(runtime_->alloc_pinned(bytes + (bytes == 0)))) {
    std::memset(data_, fill, bytes_);
  }
  ~Pinned() { runtime_->free_pinned(data_, bytes_ + (bytes_ == 0)); }
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;

  unsigned char* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  bool holds(int value) const {
    for (std::size_t i = 0; i < bytes_; ++i) {
      if (data_[i] != static_cast<unsigned char>(value)) return false;
    }
    return true;
  }

 private:
  std::shared_ptr<Runtime> runtime_;
  std::size_t bytes_;
  unsigned char* data_;
};
using PinnedPtr = std::shared_ptr<Pinned>;

class DeviceBytes {
 public:
  DeviceBytes(std::shared_ptr<Runtime> runtime, std::size_t bytes)
      : runtime_(std::move(runtime)), bytes_(bytes), data_(runtime_->alloc_device(0, bytes)) {}
  ~DeviceBytes() { runtime_->free_device(0, data_, bytes_); }
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;

  unsigned char* data() const { return static_cast<unsigned char*>(data_); }
  std::size_t bytes() const { return bytes_; }

 private:
  std::shared_ptr<Runtime> runtime_;
  std::size_t bytes_;
  void* data_;
};

struct Lab {
  explicit Lab(std::shared_ptr<Runtime> served) : runtime(std::move(served)) {}
  // Nothing that a program owns may die under work that is still going on, whatever went wrong.
  ~Lab() {
    for (StreamRef stream : streams) settle(stream);
    try {
      runtime->device_sync(0);  // streams that others made
    } catch (...) {
    }
  }

  bool cuda() const { return runtime->uses_device_memory(); }
  // A thread that is started comes after what its starter did; no call of the seam says so.
  void hand_over() { runtime->lock_released(this, here); }
  void take_over() { runtime->lock_acquired(this, here); }
  StreamRef stream(StreamKind kind) {
    streams.push_back(runtime->stream_create(0, kind));
    return streams.back();
  }
  StreamRef compute() { return stream(StreamKind::compute); }
  StreamRef copy() { return stream(StreamKind::copy); }
  StreamRef host() { return stream(StreamKind::host); }
  PinnedPtr pinned(std::size_t bytes, int fill = poison) {
    kept.push_back(std::make_shared<Pinned>(runtime, bytes, fill));
    return kept.back();
  }
  // On a device, holding `fill`. Sources of gated copies to pinned memory are such: CUDA copies
  // from host to host in the calling thread.
  std::shared_ptr<DeviceBytes> device(std::size_t bytes, int fill = poison) {
    kept_device.push_back(std::make_shared<DeviceBytes>(runtime, bytes));
    if (filler.handle == 0) filler = compute();
    produce(filler, kept_device.back()->data(), fill, bytes);
    runtime->stream_sync(filler, here);
    return kept_device.back();
  }
  // Enqueues the writing of `value` to every byte of dst.
  void produce(StreamRef on, void* dst, int value, std::size_t bytes) {
    runtime->copy_async(dst, pinned(bytes, value)->data(), bytes, on);
  }
  EventPtr record(StreamRef on, bool timed = false) {
    EventPtr event = runtime->event_create(0, timed);
    runtime->event_record(*event, on, here);
    return event;
  }
  bool in_time(const EventPtr& event) { return runtime->event_sync_for(*event, patience, here); }
  bool held(const EventPtr& event) { return !runtime->event_sync_for(*event, moment, here); }
  void settle(StreamRef on) noexcept {
    try {
      runtime->stream_sync(on, here);
    } catch (...) {
      // The error of a failed program is told elsewhere.
    }
  }

  std::shared_ptr<Runtime> runtime;
  StreamRef filler;
  std::vector<StreamRef> streams;
  std::vector<PinnedPtr> kept;
  std::vector<std::shared_ptr<DeviceBytes>> kept_device;
};

// Runs a program in every schedule and says how many of the schedules were different. Of one that
// fails it prints the line that replays it.
inline void on_simulations(const char* name, void (*program)(Lab&)) {
  std::set<sim::Decisions> different;
  std::size_t runs = 0;
  for (bool device_rules : {false, true}) {
    for (const std::string& schedule : schedules()) {
      const int before = check::failures;
      const auto simulated = simulation(schedule, device_rules);
      const auto replay = [&] {
        std::fprintf(check::out, "replay: STREAMLAP_SCHEDULE='%s' %s %s\n", schedule.c_str(),
                     program_invocation_name, name);
      };
      try {
        Lab lab(checked(simulated));
        program(lab);
      } catch (...) {
        replay();
        throw;
      }
      if (check::failures != before) replay();
      different.insert(simulated->decisions());
      ++runs;
    }
  }
  std::fprintf(check::out, "schedules %s: %zu runs, %zu different\n", name, runs, different.size());
}

}  // namespace streamlap::testing

// With host threads that wait for each other outside the library: not on the simulation, where a
// callable runs in the thread that waits for it.
#define ON_EACH_THREADED_RUNTIME(program)                            \
  static void program_##program(streamlap::testing::Lab& lab);       \
  TEST(host_##program) {                                             \
    streamlap::testing::Lab lab(streamlap::testing::host_backend()); \
    program_##program(lab);                                          \
  }                                                                  \
  TEST(cuda_##program) {                                             \
    streamlap::testing::Lab lab(streamlap::testing::cuda_backend()); \
    program_##program(lab);                                          \
  }                                                                  \
  static void program_##program(streamlap::testing::Lab& lab)

#define ON_EACH_RUNTIME(program)                                                                  \
  static void program_##program(streamlap::testing::Lab& lab);                                    \
  TEST(sim_##program) { streamlap::testing::on_simulations("sim_" #program, program_##program); } \
  ON_EACH_THREADED_RUNTIME(program)
