// Mode bandwidth: what the link to the device carries, by direction, size and kind of memory.
#include <algorithm>
#include <array>
#include <future>
#include <optional>

#include "buffers.h"
#include "machine.h"
#include "mode.h"
#include "pattern.h"

namespace bench {
namespace {

// Far below what a driver queues behind a held stream before it blocks the caller.
constexpr std::size_t most_copies = 400;
constexpr std::size_t warm_up = 2;

enum class Way { down, up, both };

const char* way_name(Way way) {
  if (way == Way::down) return "D2H";
  return way == Way::up ? "H2D" : "both at once";
}

struct Case {
  Memory memory;
  Way way;
  std::size_t size;   // of one copy
  std::size_t count;  // copies a sample and direction

  std::size_t covered() const { return size * count; }
  std::size_t moved() const { return covered() * (way == Way::both ? 2 : 1); }
};

struct Plan {
  std::size_t bytes;           // a sample and direction, page-locked memory
  std::size_t pageable_bytes;  // the same, ordinary memory
  std::vector<Case> cases;     // all of one kind of memory together

  std::size_t of(Memory memory) const { return memory == Memory::pinned ? bytes : pageable_bytes; }
};

Plan plan_for(const Options& options, bool on_gpu) {
  Plan plan{};
  const std::size_t largest = std::size_t{64} << 20;
  plan.bytes = options.bytes.value_or(on_gpu ? std::size_t{1} << 30 : largest);
  if (options.size && *options.size > plan.bytes) {
    throw UsageError("--size " + format_bytes(*options.size) + " is more than --bytes " +
                     format_bytes(plan.bytes) + ": raise --bytes or lower --size");
  }
  plan.pageable_bytes =
      std::max({plan.bytes / 4, std::min(plan.bytes, largest), options.size.value_or(0)});
  std::vector<std::size_t> sizes;
  if (options.size) {
    sizes = {*options.size};
  } else {
    for (std::size_t size = std::size_t{16} << 10; size <= std::min(largest, plan.bytes);
         size *= 4) {
      sizes.push_back(size);
    }
    if (sizes.empty() || sizes.back() < plan.bytes) sizes.push_back(plan.bytes);
  }
  for (const Memory memory : {Memory::pinned, Memory::pageable}) {
    for (const Way way : {Way::down, Way::up, Way::both}) {
      for (const std::size_t size : sizes) {
        if (size > plan.of(memory)) continue;
        const std::size_t count = std::clamp<std::size_t>(plan.of(memory) / size, 1, most_copies);
        plan.cases.push_back({memory, way, size, count});
      }
    }
  }
  return plan;
}

// The copies of one device.
class Link {
 public:
  Link(Device& device, std::size_t rank, StartLine& line, std::size_t bytes)
      : device_(device),
        rank_(rank),
        line_(line),
        source_(device, Memory::device, bytes),
        target_(device, Memory::device, bytes),
        down_(device.stream()),
        up_(device.stream()),
        begin_(device.mark(true)),
        end_down_(device.mark(true)),
        end_up_(device.mark(true)) {
    // By way of a page-locked piece, since the whole may be large.
    Buffer piece(device, Memory::pinned, std::min(bytes, std::size_t{64} << 20));
    for (std::size_t at = 0; at < bytes; at += piece.bytes()) {
      const std::size_t length = std::min(piece.bytes(), bytes - at);
      write_pattern(piece.data(), length, down_seed(), at);
      device.copy_now(source_.data() + at, piece.data(), length, down_);
    }
  }

  // The memory on the host's side; it must outlive its use here.
  void use(Memory memory, std::size_t bytes) {
    host_down_.reset();
    host_up_.reset();
    host_down_.emplace(device_, memory, bytes);
    host_up_.emplace(device_, memory, bytes);
    poison(host_down_->data(), bytes);
    write_pattern(host_up_->data(), bytes, up_seed());
  }

  void spoil(const Case& each) {
    if (each.way != Way::up) poison(host_down_->data(), each.covered());
    if (each.way != Way::down) device_.fill(target_.data(), 0xA5, each.covered());
  }

  bool right(const Case& each) {
    const std::size_t bytes = each.covered();
    if (each.way != Way::up && !has_pattern(host_down_->data(), bytes, down_seed())) return false;
    if (each.way == Way::down) return true;
    poison(host_down_->data(), bytes);
    device_.copy_now(host_down_->data(), target_.data(), bytes, down_);
    return has_pattern(host_down_->data(), bytes, up_seed());
  }

  double seconds(const Case& each) {
    return each.memory == Memory::pinned ? gated(each) : by_the_clock(each);
  }

 private:
  // Behind a gate: the launches do not count, and all devices start together.
  double gated(const Case& each) {
    const bool down = each.way != Way::up;
    const bool up = each.way != Way::down;
    const StreamRef first = down ? down_ : up_;
    StartLine::Hold hold = line_.arm(device_, rank_, first);
    device_.record(*begin_, first);
    if (down && up) device_.wait(up_, *begin_);
    if (down) {
      copies(each, *host_down_, source_, down_);
      device_.record(*end_down_, down_);
    }
    if (up) {
      copies(each, target_, *host_up_, up_);
      device_.record(*end_up_, up_);
    }
    hold.go();
    if (down) device_.sync(down_);
    if (up) device_.sync(up_);
    hold.check();
    return std::max(down ? device_.seconds(*begin_, *end_down_) : 0.0,
                    up ? device_.seconds(*begin_, *end_up_) : 0.0);
  }

  // Copies of ordinary memory block the caller: no gate, and a thread for each direction.
  double by_the_clock(const Case& each) {
    line_.meet();
    const double begin = device_.runtime()->now();
    std::future<void> other;
    if (each.way == Way::both) {
      other = std::async(std::launch::async, [&] {
        device_.use_in_this_thread();
        copies(each, target_, *host_up_, up_);
        device_.sync(up_);
      });
    }
    if (each.way == Way::up) {
      copies(each, target_, *host_up_, up_);
      device_.sync(up_);
    } else {
      copies(each, *host_down_, source_, down_);
      device_.sync(down_);
    }
    if (other.valid()) other.get();
    return device_.runtime()->now() - begin;
  }

  void copies(const Case& each, const Buffer& dst, const Buffer& src, StreamRef stream) {
    for (std::size_t i = 0; i < each.count; ++i) {
      device_.copy(dst.data() + i * each.size, src.data() + i * each.size, each.size, stream);
    }
  }

  std::size_t down_seed() const { return 2 * rank_ + 1; }
  std::size_t up_seed() const { return 2 * rank_ + 2; }

  Device& device_;
  std::size_t rank_;
  StartLine& line_;
  Buffer source_;
  Buffer target_;
  std::optional<Buffer> host_down_;
  std::optional<Buffer> host_up_;
  StreamRef down_;
  StreamRef up_;
  MarkPtr begin_;
  MarkPtr end_down_;
  MarkPtr end_up_;
  Settled settled_{device_};  // last, so that it dies before the buffers
};

using Times = std::vector<std::vector<double>>;  // by case, then by sample

Times measure(Bench& bench, const Plan& plan, Device& device, std::size_t rank, StartLine& line) {
  require_device_room(device, 2 * plan.bytes, "--bytes");
  Link link(device, rank, line, plan.bytes);
  Times times;
  std::optional<Memory> memory;
  for (const Case& each : plan.cases) {
    if (memory != each.memory) link.use(each.memory, plan.of(each.memory));
    memory = each.memory;
    const std::string what = std::string(each.memory == Memory::pinned ? "pinned " : "pageable ") +
                             way_name(each.way) + ", " + format_bytes(each.size);
    if (rank == 0) bench.progress(what);
    std::vector<double> samples;
    for (std::size_t round = 0; round < warm_up + bench.options.repeat; ++round) {
      // The last round starts from nothing, so what it leaves it has copied.
      if (round + 1 == warm_up + bench.options.repeat) link.spoil(each);
      const double seconds = link.seconds(each);
      if (round >= warm_up) samples.push_back(seconds);
    }
    line.meet();  // looking at one device's bytes would slow the other's last copies
    if (!link.right(each)) bench.fault(device.label() + ", " + what);
    times.push_back(std::move(samples));
  }
  return times;
}

Row row_for(const Case& each, const std::string& device, const std::vector<double>& seconds,
            std::size_t devices) {
  Row row{way_name(each.way),
          {{"device", device},
           {"memory", each.memory == Memory::pinned ? "pinned" : "pageable"},
           {"size", format_bytes(each.size), each.size},
           {"copies", std::to_string(each.count), each.count}},
          "GB/s",
          {}};
  for (const double sample : seconds) {
    row.samples.push_back(static_cast<double>(each.moved() * devices) / sample * 1e-9);
  }
  return row;
}

}  // namespace

void run_bandwidth(Bench& bench) {
  const Plan plan = plan_for(bench.options, bench.on_gpu());
  const std::size_t devices = bench.devices.size();
  // On the CPU the two buffers of the device are the host's memory as well.
  require_host_room(plan.bytes * devices * (bench.on_gpu() ? 2 : 4), "--bytes");
  bench.report.settings.push_back({"bytes", plan.bytes, format_bytes(plan.bytes)});
  bench.report.settings.push_back(
      {"pageable bytes", plan.pageable_bytes, format_bytes(plan.pageable_bytes)});

  std::vector<Times> times(devices);
  on_each(bench.devices, [&](Device& device, std::size_t rank, StartLine& line) {
    times[rank] = measure(bench, plan, device, rank, line);
  });

  for (std::size_t rank = 0; rank < devices; ++rank) {
    for (std::size_t i = 0; i < plan.cases.size(); ++i) {
      bench.report.rows.push_back(
          row_for(plan.cases[i], bench.devices[rank]->label(), times[rank][i], 1));
    }
  }
  if (devices == 1) return;
  for (std::size_t i = 0; i < plan.cases.size(); ++i) {
    std::vector<double> slowest(bench.options.repeat, 0);
    for (const Times& each : times) {
      for (std::size_t round = 0; round < slowest.size(); ++round) {
        slowest[round] = std::max(slowest[round], each[i][round]);
      }
    }
    bench.report.rows.push_back(row_for(plan.cases[i], "all", slowest, devices));
  }
}

}  // namespace bench
