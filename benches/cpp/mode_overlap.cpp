// Mode overlap: the rounds of the job, what must fit for it, and the rows.
#include <algorithm>

#include "machine.h"
#include "mode.h"
#include "overlap_job.h"
#include "stats.h"

namespace bench {
namespace {

constexpr std::size_t warm_up = 2;

struct Way {
  const char* name;
  void (OverlapJob::*run)();
  // Null where results stay on the device: the next way brings them to the host.
  const std::byte* (OverlapJob::*result)(std::size_t) const;
  bool reads_device;  // results that are on the device already
};

// Copy alone follows compute alone, whose results it copies.
constexpr Way ways[] = {
    {"compute alone", &OverlapJob::compute_alone, nullptr, false},
    {"copy alone", &OverlapJob::copy_alone, &OverlapJob::plain_result, true},
    {"run, then copy", &OverlapJob::run_then_copy, &OverlapJob::plain_result, false},
    {"one stream", &OverlapJob::one_stream, &OverlapJob::plain_result, false},
    {"side stream by hand", &OverlapJob::side_stream, &OverlapJob::plain_result, false},
    {"streamlap", &OverlapJob::with_streamlap, &OverlapJob::pool_result, false},
};
constexpr std::size_t way_count = std::size(ways);

using Times = std::vector<std::vector<double>>;  // by way, then by round

// The ways that overlap change places each round, so that neither is always the later one.
std::vector<std::size_t> order(std::size_t round) {
  std::vector<std::size_t> places(way_count);
  for (std::size_t i = 0; i < way_count; ++i) places[i] = i;
  if (round % 2 == 1) std::swap(places[way_count - 2], places[way_count - 1]);
  return places;
}

void check(Bench& bench, OverlapJob& job, const Way& way, std::size_t n, const std::string& where) {
  if (way.result == nullptr) return;
  for (std::size_t i = 0; i < n; ++i) {
    if (job.right(i, (job.*way.result)(i))) continue;
    bench.fault(where + ", " + way.name + ": item " + std::to_string(i));
    return;
  }
}

Times measure(Bench& bench, Device& device, std::size_t rank, StartLine& line,
              OverlapJob::Size size, streamlap::CopyEngine& engine, streamlap::PinnedPool& pool) {
  OverlapJob job(device, size, engine, pool);
  const std::string where = device.label() + ", " + dtype_name(size.dtype);
  if (!job.plausible_product()) bench.fault(where + ": the product itself");
  Times times(way_count);
  const std::size_t rounds = warm_up + bench.options.repeat;
  for (std::size_t round = 0; round < rounds; ++round) {
    const bool last = round + 1 == rounds;
    for (const std::size_t place : order(round)) {
      const Way& way = ways[place];
      if (rank == 0) bench.progress(std::string(dtype_name(size.dtype)) + ", " + way.name);
      job.drop_results();
      if (last && way.reads_device) job.spoil_host();
      if (last && !way.reads_device) job.spoil();
      device.runtime()->device_sync(device.index());
      line.meet();
      const double begin = device.runtime()->now();
      (job.*way.run)();
      const double seconds = device.runtime()->now() - begin;
      if (round >= warm_up) times[place].push_back(seconds);
      if (!last) continue;
      line.meet();  // looking at one device's bytes would slow the other's last copies
      check(bench, job, way, size.n, where);
    }
  }
  job.drop_results();
  return times;
}

void add_rows(Report& report, const std::string& device, Dtype dtype, const Times& times) {
  const bool compute_bound = median(times[0]) >= median(times[1]);
  const std::vector<double>& limit = times[compute_bound ? 0 : 1];
  const std::vector<Label> labels{{"device", device}, {"dtype", dtype_name(dtype)}};
  for (std::size_t place = 0; place < way_count; ++place) {
    report.rows.push_back({ways[place].name,
                           labels,
                           "s",
                           times[place],
                           {{"x limit", median(times[place]) / median(limit)}}});
  }
}

// All at once have taken as long as the slowest, round by round.
Times slowest(const std::vector<Times>& all) {
  Times times = all.front();
  for (const Times& each : all) {
    for (std::size_t place = 0; place < way_count; ++place) {
      for (std::size_t round = 0; round < times[place].size(); ++round) {
        times[place][round] = std::max(times[place][round], each[place][round]);
      }
    }
  }
  return times;
}

std::vector<Dtype> dtypes_for(const Options& options, bool on_gpu) {
  if (!on_gpu) {
    if (options.dtype && *options.dtype != "fp32") {
      throw UsageError("--dtype " + *options.dtype +
                       " needs a GPU: on the CPU products are made in fp32 only");
    }
    return {Dtype::fp32};
  }
  std::vector<Dtype> found;
  for (const Dtype dtype : {Dtype::fp32, Dtype::tf32, Dtype::bf16}) {
    if (!options.dtype || *options.dtype == dtype_name(dtype)) found.push_back(dtype);
  }
  return found;
}

void require_room(Bench& bench, const OverlapJob::Size& size, std::size_t limit) {
  const std::size_t devices = bench.devices.size();
  const std::size_t on_device =
      size.stride() * (std::max(size.n, OverlapJob::depth) + 2) + (std::size_t{64} << 20);
  const std::size_t on_host =
      limit + size.result_bytes() * devices * (size.n + 3) + (bench.on_gpu() ? 0 : on_device);
  require_host_room(on_host, "--n or --size");
  for (DevicePtr& device : bench.devices) {
    device->use_in_this_thread();
    require_device_room(*device, on_device, "--n or --size");
  }
  bench.first().use_in_this_thread();
}

}  // namespace

void run_overlap(Bench& bench) {
  require_products(bench.on_gpu());
  const Options& options = bench.options;
  const std::size_t devices = bench.devices.size();
  const std::size_t side = options.size.value_or(bench.on_gpu() ? 4000 : 192);
  const std::size_t n = options.n.value_or(bench.on_gpu() ? 50 : 20);
  bench.report.settings.push_back({"n", n});
  bench.report.settings.push_back({"size", side});
  bench.report.settings.push_back({"depth", OverlapJob::depth});
  for (const Dtype dtype : dtypes_for(options, bench.on_gpu())) {
    const OverlapJob::Size size{dtype, side, n};
    const std::size_t limit = devices * n * streamlap::PinnedPool::size_class(size.result_bytes());
    require_room(bench, size, limit);
    streamlap::CopyEngine engine(bench.first().runtime());
    auto pool = std::make_shared<streamlap::PinnedPool>(bench.first().runtime(), limit);
    std::vector<Times> times(devices);
    on_each(bench.devices, [&](Device& device, std::size_t rank, StartLine& line) {
      times[rank] = measure(bench, device, rank, line, size, engine, *pool);
    });
    for (std::size_t rank = 0; rank < devices; ++rank) {
      add_rows(bench.report, bench.devices[rank]->label(), dtype, times[rank]);
    }
    if (devices > 1) add_rows(bench.report, "all", dtype, slowest(times));
  }
}

}  // namespace bench
