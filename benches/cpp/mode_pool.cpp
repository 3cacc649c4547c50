// Mode pool: what page-locked memory costs, by the way it is made, and what its reuse costs.
#include <algorithm>
#include <optional>

#include "buffers.h"
#include "machine.h"
#include "mode.h"
#include "pages.h"
#include "pattern.h"
#include "transfer/pinned_pool.h"

namespace bench {
namespace {

using streamlap::PinnedBlock;
using streamlap::PinnedPool;

constexpr std::size_t warm_up = 1;
constexpr std::size_t source_seed = 1;

// Seconds of one growth; steps that a way has not got stay at 0.
struct Growth {
  double total = 0;
  double populate = 0;
  double registration = 0;
  double release = 0;
};

class Clock {
 public:
  explicit Clock(Device& device) : runtime_(*device.runtime()), last_(runtime_.now()) {}
  // Seconds since the last call.
  double lap() {
    const double before = last_;
    last_ = runtime_.now();
    return last_ - before;
  }

 private:
  Runtime& runtime_;
  double last_;
};

// What is on the device is brought into new memory, which must be able to take it.
class Check {
 public:
  Check(Bench& bench, std::size_t bytes)
      : bench_(bench),
        device_(bench.first()),
        stream_(device_.stream()),
        source_(device_, Memory::device, bytes) {
    Buffer pattern(device_, Memory::pageable, bytes);
    write_pattern(pattern.data(), bytes, source_seed);
    device_.copy_now(source_.data(), pattern.data(), bytes, stream_);
  }

  void operator()(std::byte* memory, const std::string& way) {
    if (!device_.page_locked(memory)) {
      bench_.fault(way + ": the memory is not page-locked");
      return;
    }
    poison(memory, source_.bytes());
    device_.copy_now(memory, source_.data(), source_.bytes(), stream_);
    if (!has_pattern(memory, source_.bytes(), source_seed)) bench_.fault(way + ": wrong bytes");
  }

 private:
  Bench& bench_;
  Device& device_;
  StreamRef stream_;
  Buffer source_;
};

struct Way {
  std::string name;
  std::function<Growth(Check* check)> grow;
  std::vector<Growth> times = {};
};

Way by_alloc(Device& device, std::size_t bytes) {
  const std::string name = "cudaHostAlloc";
  return {name, [=, &device](Check* check) {
            Growth growth;
            Clock clock(device);
            std::optional<Buffer> buffer(std::in_place, device, Memory::pinned, bytes);
            growth.total = clock.lap();
            if (check != nullptr) (*check)(buffer->data(), name);
            clock.lap();
            buffer.reset();
            growth.release = clock.lap();
            return growth;
          }};
}

// Registered pages must not go back to the system as they are, whatever is thrown.
class Registered {
 public:
  Registered(Device& device, Pages& pages) : device_(device), pages_(pages) {
    device_.register_pages(pages_.data(), pages_.bytes());
  }
  Registered(const Registered&) = delete;
  Registered& operator=(const Registered&) = delete;
  ~Registered() { device_.unregister_pages(pages_.data()); }

 private:
  Device& device_;
  Pages& pages_;
};

Way by_pages(Bench& bench, std::size_t bytes, bool huge, std::size_t threads) {
  Device& device = bench.first();
  const std::string name = std::string(huge ? "huge pages" : "4 KiB pages") + ", " +
                           std::to_string(threads) + (threads == 1 ? " thread" : " threads");
  return {name, [=, &bench, &device](Check* check) {
            Growth growth;
            Clock clock(device);
            std::optional<Pages> pages(std::in_place, bytes, huge);
            pages->populate(threads);
            growth.populate = clock.lap();
            std::optional<Registered> registered(std::in_place, device, *pages);
            if (device.gpu()) growth.registration = clock.lap();
            growth.total = growth.populate + growth.registration;
            if (check != nullptr) (*check)(pages->data(), name);
            if (!pages->refused().empty()) bench.note(pages->refused());
            clock.lap();
            registered.reset();
            pages.reset();
            growth.release = clock.lap();
            return growth;
          }};
}

std::shared_ptr<PinnedBlock> take(PinnedPool& pool, std::size_t bytes) {
  std::shared_ptr<PinnedBlock> block = pool.try_allocate(bytes);
  if (!block) throw streamlap::Error(streamlap::ErrorKind::runtime, "the pool gave no block");
  return block;
}

Way by_pool(Device& device, std::size_t bytes) {
  const std::string name = "PinnedPool";
  return {name, [=, &device](Check* check) {
            Growth growth;
            auto pool =
                std::make_shared<PinnedPool>(device.runtime(), PinnedPool::size_class(bytes));
            Clock clock(device);
            std::shared_ptr<PinnedBlock> block = take(*pool, bytes);
            growth.total = clock.lap();
            if (check != nullptr) (*check)(block->data(), name);
            clock.lap();
            block.reset();
            pool.reset();
            growth.release = clock.lap();
            return growth;
          }};
}

// One extra column for each step that the way has.
void add_step(Row& row, const char* name, const std::vector<Growth>& times, double Growth::* step,
              std::size_t bytes) {
  std::vector<double> seconds;
  for (const Growth& each : times) seconds.push_back(each.*step);
  std::sort(seconds.begin(), seconds.end());
  const double middle = seconds[seconds.size() / 2];
  row.extras.emplace_back(name, static_cast<double>(bytes) / middle * 1e-9);
}

void grow(Bench& bench, std::size_t bytes) {
  Device& device = bench.first();
  std::vector<Way> ways;
  if (device.gpu()) ways.push_back(by_alloc(device, bytes));
  for (const bool huge : {true, false}) {
    for (const std::size_t threads : {1, 4, 8}) {
      ways.push_back(by_pages(bench, bytes, huge, threads));
    }
  }
  ways.push_back(by_pool(device, bytes));

  bench.progress("touching memory");
  Pages(2 * bytes, false).populate(std::min<std::size_t>(this_machine().cores, 16));
  Check check(bench, bytes);
  for (std::size_t round = 0; round < warm_up + bench.options.repeat; ++round) {
    for (Way& way : ways) {
      bench.progress(way.name);
      // Filling the memory for the check is no part of a way: only the first round does it.
      const Growth growth = way.grow(round == 0 ? &check : nullptr);
      if (round >= warm_up) way.times.push_back(growth);
    }
  }
  for (const Way& way : ways) {
    Row row{way.name, {{"device", device.label()}}, "GB/s", {}};
    for (const Growth& each : way.times) {
      row.samples.push_back(static_cast<double>(bytes) / each.total * 1e-9);
    }
    add_step(row, "populate", way.times, &Growth::populate, bytes);
    add_step(row, "register", way.times, &Growth::registration, bytes);
    add_step(row, "free", way.times, &Growth::release, bytes);
    bench.report.rows.push_back(std::move(row));
  }
}

void reuse(Bench& bench, std::size_t bytes, bool with_use) {
  constexpr std::size_t times = 1000;
  Device& device = bench.first();
  const StreamRef stream = device.stream();
  auto pool = std::make_shared<PinnedPool>(device.runtime(), 2 * PinnedPool::size_class(bytes));
  const std::byte* home = take(*pool, bytes)->data();
  Row row{with_use ? "take, record a use, give back" : "take, give back",
          {{"device", device.label()}, {"block", format_bytes(bytes), bytes}},
          "us",
          {}};
  bool same_block = true;
  for (std::size_t round = 0; round < warm_up + bench.options.repeat; ++round) {
    double seconds = 0;
    for (std::size_t i = 0; i < times; ++i) {
      Clock clock(device);
      std::shared_ptr<PinnedBlock> block = take(*pool, bytes);
      if (with_use) block->record_use(stream);
      same_block = same_block && block->data() == home;
      block.reset();
      seconds += clock.lap();
      // The use has to be over, or the pool would have to grow.
      if (with_use) device.sync(stream);
    }
    if (round >= warm_up) row.samples.push_back(seconds / times * 1e6);
  }
  const streamlap::PoolStats stats = pool->stats();
  if (!same_block || stats.misses != 1 || stats.live != 0) {
    bench.fault(row.name + ": the block was not reused");
  }
  bench.report.rows.push_back(std::move(row));
}

}  // namespace

void run_pool(Bench& bench) {
  const std::size_t default_bytes = std::size_t{bench.on_gpu() ? 1024U : 64U} << 20;
  const std::size_t bytes = bench.options.bytes.value_or(default_bytes);
  // One growth, what it is checked with, and the memory that is touched first.
  require_host_room(3 * bytes, "--bytes");
  require_device_room(bench.first(), bytes, "--bytes");
  bench.report.settings.push_back({"bytes", bytes, format_bytes(bytes)});
  if (!bench.on_gpu()) {
    bench.note("on the CPU PinnedPool only maps memory, and its pages come when they are touched");
  }
  grow(bench, bytes);
  for (const bool with_use : {false, true}) {
    for (const std::size_t block : {std::size_t{64} << 10, std::size_t{1} << 20}) {
      bench.progress("reuse");
      reuse(bench, block, with_use);
    }
  }
}

}  // namespace bench
