// Mode small: many small tensors to the host.
#include <algorithm>
#include <chrono>

#include "buffers.h"
#include "machine.h"
#include "mode.h"
#include "pattern.h"
#include "transfer/copy_engine.h"

namespace bench {
namespace {

using streamlap::CopyEngine;
using streamlap::Transfer;
using streamlap::TransferRequest;

// Tensors behind one gate: far below what a driver queues behind a held stream before it blocks the
// caller. More than that are done in several goes, and their times added.
constexpr std::size_t most_behind_a_gate = 400;
constexpr std::size_t warm_up = 2;
constexpr std::size_t source_seed = 1;
constexpr std::chrono::milliseconds slice{1};

// The tensors: apart on the device, next to each other on the host.
class Tensors {
 public:
  Tensors(Device& device, CopyEngine& engine, std::size_t n, std::size_t size)
      : device_(device),
        engine_(engine),
        n_(n),
        size_(size),
        stream_(device.stream()),
        begin_(device.mark(true)),
        end_(device.mark(true)),
        source_(device, Memory::device, 2 * n * size),
        target_(device, Memory::pinned, n * size) {
    Buffer pattern(device, Memory::pageable, source_.bytes());
    write_pattern(pattern.data(), pattern.bytes(), source_seed);
    device.copy_now(source_.data(), pattern.data(), pattern.bytes(), stream_);
    spoil();
    for (std::size_t i = 0; i < n; ++i) {
      dst_.push_back(target(i));
      src_.push_back(source(i));
      bytes_.push_back(size);
    }
  }

  // Each way enqueues the tensors [from, to), on the stream that stream_of says.
  void loop(std::size_t from, std::size_t to) {
    for (std::size_t i = from; i < to; ++i) device_.copy(target(i), source(i), size_, stream_);
  }

  // False where CUDA has no such call.
  bool batch(std::size_t from, std::size_t to) {
    return device_.copy_batch(&dst_[from], &src_[from], &bytes_[from], to - from, stream_);
  }

  std::shared_ptr<Transfer> with_streamlap(std::size_t from, std::size_t to) {
    return engine_.submit(request(from, to));
  }

  // As many bytes in one piece.
  void wire(std::size_t from, std::size_t to) {
    device_.copy(target(from), source_.data() + from * size_, (to - from) * size_, stream_);
  }

  StreamRef plain_stream() const { return stream_; }
  StreamRef engine_stream() {
    return engine_.copy_stream(device_.index(), streamlap::Direction::to_host);
  }

  // Seconds by the host's clock, from an idle device.
  template <class Way>
  double wall(Way way) {
    device_.sync(stream_);
    const double begin = device_.runtime()->now();
    way(0, n_);
    return device_.runtime()->now() - begin;
  }

  double wall_with_streamlap() {
    device_.sync(stream_);
    TransferRequest whole = request(0, n_);  // ready before the clock, as the arrays of batch() are
    const double begin = device_.runtime()->now();
    const std::shared_ptr<Transfer> transfer = engine_.submit(std::move(whole));
    while (!transfer->sync_for(slice)) {
    }
    return device_.runtime()->now() - begin;
  }

  // Seconds of the device, without what it costs to enqueue.
  template <class Way>
  double gated(Way enqueue, StreamRef stream) {
    double seconds = 0;
    for (std::size_t from = 0; from < n_; from += most_behind_a_gate) {
      const std::unique_ptr<streamlap::Gate> gate = device_.runtime()->gate(stream);
      device_.record(*begin_, stream);
      enqueue(from, std::min(from + most_behind_a_gate, n_));
      device_.record(*end_, stream);
      gate->open();
      device_.sync(stream);
      if (gate->timed_out()) {
        throw streamlap::Error(streamlap::ErrorKind::runtime,
                               "the gate opened by itself: enqueuing took more than 5 s, so the "
                               "times mean nothing");
      }
      seconds += device_.seconds(*begin_, *end_);
    }
    return seconds;
  }

  void sync() { device_.sync(stream_); }
  void spoil() { poison(target_.data(), target_.bytes()); }
  bool right(bool in_one_piece) {
    if (in_one_piece) return has_pattern(target_.data(), target_.bytes(), source_seed);
    for (std::size_t i = 0; i < n_; ++i) {
      if (!has_pattern(target(i), size_, source_seed, 2 * i * size_)) return false;
    }
    return true;
  }

 private:
  TransferRequest request(std::size_t from, std::size_t to) {
    TransferRequest made;
    made.device = device_.index();
    made.timed = false;
    made.items.reserve(to - from);
    for (std::size_t i = from; i < to; ++i) {
      made.items.push_back({target(i), source(i), size_, 1, {}});
    }
    return made;
  }

  std::byte* source(std::size_t i) const { return source_.data() + 2 * i * size_; }
  std::byte* target(std::size_t i) const { return target_.data() + i * size_; }

  Device& device_;
  CopyEngine& engine_;
  std::size_t n_;
  std::size_t size_;
  StreamRef stream_;
  MarkPtr begin_;
  MarkPtr end_;
  Buffer source_;
  Buffer target_;
  std::vector<void*> dst_;
  std::vector<const void*> src_;
  std::vector<std::size_t> bytes_;
  Settled settled_{device_};  // last, so that it dies before the buffers
};

struct Way {
  std::string name;
  std::function<double()> wall;
  std::function<double()> device;
  bool in_one_piece;
  std::vector<double> wall_times = {};
  std::vector<double> device_times = {};
};

std::vector<Way> ways_for(Bench& bench, Tensors& tensors) {
  const StreamRef plain = tensors.plain_stream();
  const auto looped = [&](std::size_t from, std::size_t to) { tensors.loop(from, to); };
  const auto batched = [&](std::size_t from, std::size_t to) { tensors.batch(from, to); };
  const auto ours = [&](std::size_t from, std::size_t to) { tensors.with_streamlap(from, to); };
  const auto wire = [&](std::size_t from, std::size_t to) { tensors.wire(from, to); };
  const auto then_sync = [&tensors](auto enqueue) {
    return [&tensors, enqueue](std::size_t from, std::size_t to) {
      enqueue(from, to);
      tensors.sync();
    };
  };
  const auto plain_way = [&](const char* name, auto enqueue, bool in_one_piece) {
    return Way{name, [&tensors, enqueue, then_sync] { return tensors.wall(then_sync(enqueue)); },
               [&tensors, enqueue, plain] { return tensors.gated(enqueue, plain); }, in_one_piece};
  };
  std::vector<Way> ways;
  const bool gpu = bench.on_gpu();
  ways.push_back(plain_way(gpu ? "loop of cudaMemcpyAsync" : "loop of copies", looped, false));
  if (gpu) {
    if (tensors.batch(0, 1)) {
      ways.push_back(plain_way("cudaMemcpyBatchAsync", batched, false));
    } else {
      bench.note("cudaMemcpyBatchAsync is missing here: it needs CUDA 12.8, in the driver too");
    }
    tensors.sync();
  }
  ways.push_back(
      {"streamlap", [&tensors] { return tensors.wall_with_streamlap(); },
       [&tensors, ours, stream = tensors.engine_stream()] { return tensors.gated(ours, stream); },
       false});
  ways.push_back(plain_way("one big copy", wire, true));
  return ways;
}

void measure(Bench& bench, CopyEngine& engine, std::size_t n, std::size_t size) {
  Tensors tensors(bench.first(), engine, n, size);
  std::vector<Way> ways = ways_for(bench, tensors);
  const std::size_t rounds = warm_up + bench.options.repeat;
  for (std::size_t round = 0; round < rounds; ++round) {
    // The last round starts from nothing, so what it leaves it has copied.
    const bool last = round + 1 == rounds;
    for (Way& way : ways) {
      bench.progress(format_bytes(size) + ", " + way.name);
      const auto timed = [&](const std::function<double()>& run, std::vector<double>& times,
                             const char* clock) {
        if (last) tensors.spoil();
        const double seconds = run();
        if (round >= warm_up) times.push_back(seconds);
        if (last && !tensors.right(way.in_one_piece)) {
          bench.fault(format_bytes(size) + ", " + way.name + ", " + clock);
        }
      };
      timed(way.wall, way.wall_times, "wall");
      timed(way.device, way.device_times, "device");
    }
  }
  const double bytes = static_cast<double>(n * size);
  const auto add = [&](const Way& way, const char* clock, const std::vector<double>& times) {
    std::vector<double> sorted = times;
    std::sort(sorted.begin(), sorted.end());
    bench.report.rows.push_back(
        {way.name,
         {{"device", bench.first().label()}, {"size", format_bytes(size), size}, {"clock", clock}},
         "s",
         times,
         {{"GB/s", bytes / sorted[sorted.size() / 2] * 1e-9}}});
  };
  for (const char* clock : {"wall", "device"}) {
    for (const Way& way : ways) {
      add(way, clock, *clock == 'w' ? way.wall_times : way.device_times);
    }
  }
}

}  // namespace

void run_small(Bench& bench) {
  const std::size_t n = bench.options.n.value_or(bench.on_gpu() ? 2000 : 500);
  std::vector<std::size_t> sizes{std::size_t{4} << 10, std::size_t{16} << 10,
                                 std::size_t{64} << 10};
  if (bench.options.size) sizes = {*bench.options.size};
  const std::size_t largest = sizes.back();
  if (largest > (std::size_t{1} << 53) / n) {
    throw UsageError("--n " + std::to_string(n) + " tensors of " + format_bytes(largest) +
                     " are too large for any machine: use a smaller --n or --size");
  }
  // The pattern that the device gets, the results, and on the CPU the device's memory too.
  require_host_room(n * largest * (bench.on_gpu() ? 3 : 5), "--n or --size");
  require_device_room(bench.first(), 2 * n * largest, "--n or --size");
  bench.report.settings.push_back({"n", n});
  CopyEngine engine(bench.first().runtime());
  for (const std::size_t size : sizes) measure(bench, engine, n, size);
}

}  // namespace bench
