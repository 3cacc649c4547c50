// streamlap-bench: reads the command line, finds the devices, runs one mode and prints its report.
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>

#include "gemm.h"
#include "mode.h"

namespace bench {
namespace {

// Work may be in flight and threads may hold locks: end at once, the system cleans up.
extern "C" void interrupted(int) {
  constexpr char text[] = "streamlap-bench: interrupted\n";
  [[maybe_unused]] const auto written = write(STDERR_FILENO, text, sizeof(text) - 1);
  _exit(130);
}

bool watched() {
  static const bool terminal = isatty(STDERR_FILENO) == 1;
  return terminal;
}

std::string dotted(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

void use_host(const Options& options, Devices& devices, Report& report) {
  const std::shared_ptr<Runtime> runtime = streamlap::make_host_runtime();
  const int count = options.all_gpus ? 2 : 1;
  for (int index = 0; index < count; ++index) {
    devices.push_back(make_host_device(runtime, index));
  }
  report.runtime = "host";
  report.title = count == 1 ? "the CPU" : "two logical CPU devices";
  report.note("worker threads stand in for a GPU: this shows that it works, not how fast a GPU is");
}

#ifdef STREAMLAP_WITH_CUDA
void use_gpus(const Options& options, Devices& devices, Report& report) {
  const std::shared_ptr<Runtime> runtime = streamlap::make_cuda_runtime();
  const std::vector<Gpu> found = gpus();
  const int wanted = options.device ? std::stoi(*options.device) : 0;
  for (const Gpu& gpu : found) {
    if (!options.all_gpus && gpu.index != wanted) continue;
    devices.push_back(make_cuda_device(runtime, gpu.index));
    report.gpus.push_back(gpu);
    report.title += (report.title.empty() ? "" : ", ") + devices.back()->label() + " " + gpu.name;
  }
  report.runtime = "cuda";
}
#else
void use_gpus(const Options&, Devices&, Report&) {}
#endif

void find_devices(const Options& options, Devices& devices, Report& report) {
  report.versions.emplace_back("streamlap", STREAMLAP_VERSION);
  if (options.device == "cpu") {
    use_host(options, devices, report);
    return;
  }
  const streamlap::CudaProbe probe = streamlap::probe_cuda();
  if (options.device && std::stoi(*options.device) >= probe.devices) {
    throw UsageError("--device " + *options.device + ": there is no such GPU; " +
                     (probe.devices == 0 ? probe.reason + "; use --device cpu"
                                         : "use 0 to " + std::to_string(probe.devices - 1)));
  }
  if (probe.devices == 0) {
    report.note("no GPU: " + probe.reason);
    use_host(options, devices, report);
    return;
  }
  report.versions.emplace_back("CUDA runtime", dotted(probe.runtime_version));
  report.versions.emplace_back("CUDA driver", dotted(probe.driver_version));
  if (!cublas_version().empty()) report.versions.emplace_back("cuBLAS", cublas_version());
  use_gpus(options, devices, report);
}

void print(const std::string& text) {
  const bool whole = std::fwrite(text.data(), 1, text.size(), stdout) == text.size();
  if (whole && std::fflush(stdout) == 0) return;
  // A reader that left early knows why.
  if (errno == EPIPE) std::_Exit(1);
  throw streamlap::Error(streamlap::ErrorKind::runtime,
                         std::string("cannot write the report: ") + std::strerror(errno));
}

int run(const std::vector<std::string>& arguments) {
  const Options options = parse(arguments);
  if (options.help) {
    print(*options.help);
    return 0;
  }
  Report report;
  report.mode = mode_name(options.mode);
  Devices devices;
  find_devices(options, devices, report);
  devices.front()->use_in_this_thread();
  report.settings.push_back({"repeat", options.repeat});

  Bench bench{options, devices, report};
  switch (options.mode) {
    case Mode::bandwidth:
      run_bandwidth(bench);
      break;
    case Mode::pool:
      run_pool(bench);
      break;
    case Mode::overlap:
      run_overlap(bench);
      break;
    case Mode::small:
      run_small(bench);
      break;
  }
  bench.progress("");
  print(options.json ? as_json(report) : as_text(report));
  if (report.faults.empty()) return 0;
  std::fprintf(stderr, "streamlap-bench: wrong results: %s\n", report.faults.front().c_str());
  return 1;
}

}  // namespace

void Bench::progress(const std::string& text) {
  if (!watched()) return;
  std::lock_guard lock(mutex);
  std::fprintf(stderr, "\r\033[K%.100s", text.c_str());
}

}  // namespace bench

namespace {

// What is echoed of the command line may hold anything; an error is one line.
void complain(const char* end, std::string what) {
  for (char& c : what) {
    if (static_cast<unsigned char>(c) < 0x20) c = ' ';
  }
  std::fprintf(stderr, "%sstreamlap-bench: %s\n", end, what.c_str());
}

}  // namespace

int main(int count, char** words) {
  std::signal(SIGINT, bench::interrupted);
  std::signal(SIGPIPE, SIG_IGN);
  // More hardware queues than the default, so that no two streams share one by accident.
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  const char* end = bench::watched() ? "\r\033[K" : "";
  try {
    return bench::run({words + 1, words + count});
  } catch (const bench::UsageError& error) {
    complain(end, error.what());
    return 2;
  } catch (const std::bad_alloc&) {
    std::fprintf(stderr, "%sstreamlap-bench: no memory left: use smaller sizes\n", end);
  } catch (const std::exception& error) {
    complain(end, error.what());
  }
  return 1;
}
