#include "options.h"

#include <algorithm>
#include <array>
#include <limits>
#include <string_view>

namespace bench {
namespace {

constexpr const char* top_help = R"(usage: streamlap-bench MODE [options]

Measures what this machine's copies cost and how well they hide behind compute. Needs no Python.
Without a GPU it runs on worker threads, small, and says so. Every result is checked, byte by byte.

modes:
  bandwidth   copies to and from the device, by size, page-locked and ordinary memory
  pool        what page-locked memory costs, by the way it is made, and what its reuse costs
  overlap     n products and n copies to the host, in several ways
  small       many small tensors to the host

options:
  --json           one JSON document on stdout instead of tables
  --device N|cpu   the GPU (default 0), or the runtime on worker threads
  --gpus all       every GPU at once, rows for each (bandwidth, overlap); without a GPU, two logical
                   CPU devices
  --repeat N       samples of each row (default 9)
  --help, --version

exit status: 0; 1 for a failure or a result that was wrong; 2 for bad arguments; 130 for Ctrl-C

examples:
  streamlap-bench overlap                        the whole experiment on GPU 0
  streamlap-bench bandwidth --gpus all           every link at once
  streamlap-bench pool --bytes 4GiB --json > pool.json
  streamlap-bench small --device cpu             on worker threads

'streamlap-bench MODE --help' says more about a mode.
)";

constexpr const char* bandwidth_help = R"(usage: streamlap-bench bandwidth [options]

Copies to the host (D2H), to the device (H2D) and both at once, in GB/s (1e9 bytes). Many copies of
one size follow each other on one stream. To and from page-locked ("pinned") memory they wait behind
a gate until all are enqueued, so that the launches do not count, and the device's own clock times
them: at most 400 copies a sample. Copies of ordinary ("pageable") memory block the caller, so the
host's clock times them.

options:
  --bytes B    bytes a sample of large copies (default 1GiB; on the CPU 64MiB); pageable a quarter
  --size B     one size of copies instead of 16KiB to 64MiB
  --json, --device N|cpu, --gpus all, --repeat N: see 'streamlap-bench --help'

examples:
  streamlap-bench bandwidth
  streamlap-bench bandwidth --size 16MiB --bytes 4GiB
  streamlap-bench bandwidth --gpus all --json
)";

constexpr const char* pool_help = R"(usage: streamlap-bench pool [options]

What it costs to get page-locked memory: by cudaHostAlloc, by mapping pages, filling them in with 1,
4 or 8 threads and registering them, and by streamlap's PinnedPool. Then what it costs to take a
block from the pool again. Columns "populate", "register" and "free" are GB/s of these steps.

Virtual machines often get their memory from the host only when it is touched first, which is slow
whatever one does. So the memory is touched once before anything is timed.

options:
  --bytes B    bytes to get (default 1GiB; on the CPU 64MiB)
  --json, --device N|cpu, --repeat N: see 'streamlap-bench --help'

examples:
  streamlap-bench pool
  streamlap-bench pool --bytes 4GiB
)";

constexpr const char* overlap_help = R"(usage: streamlap-bench overlap [options]

n products of two size x size matrices, all of them brought to the host, from an idle device to
results that can be read. Rows are measured in turn within each round. "x limit" divides by the
longer of compute alone and copy alone.

  compute alone         the products
  copy alone            n copies to page-locked memory
  run, then copy        all products, then one blocking copy after the other
  one stream            product, copy, product, copy on the same stream
  side stream by hand   copies on a stream of their own, events, four buffers in turn
  streamlap             the same by CopyEngine and PinnedPool

options:
  --n N        products (default 50; on the CPU 20; most 2048)
  --size N     rows and columns (default 4000; on the CPU 192)
  --dtype T    fp32, tf32 or bf16 (default all three; on the CPU fp32 only)
  --json, --device N|cpu, --gpus all, --repeat N: see 'streamlap-bench --help'

examples:
  streamlap-bench overlap
  streamlap-bench overlap --dtype tf32 --gpus all
  streamlap-bench overlap --device cpu --size 256 --n 10
)";

constexpr const char* small_help = R"(usage: streamlap-bench small [options]

Many small tensors to page-locked memory on the host: a loop of copies, cudaMemcpyBatchAsync (where
CUDA has it), streamlap's engine with one request, and one big copy of as many bytes, which is what
the wire allows. "wall" is the host's clock from the first call to the last byte. "device" is the
device's time behind a gate, at most 400 tensors at a time, summed.

options:
  --n N        tensors (default 2000; on the CPU 500; most 100000)
  --size B     bytes of each, instead of 4KiB, 16KiB and 64KiB
  --json, --device N|cpu, --repeat N: see 'streamlap-bench --help'

examples:
  streamlap-bench small
  streamlap-bench small --n 10000 --size 1KiB
)";

struct ModeEntry {
  Mode mode;
  const char* name;
  const char* help;
  const char* options;  // beside those of every mode
};

constexpr std::array<ModeEntry, 4> modes{{
    {Mode::bandwidth, "bandwidth", bandwidth_help, " --bytes --size --gpus "},
    {Mode::pool, "pool", pool_help, " --bytes "},
    {Mode::overlap, "overlap", overlap_help, " --n --size --dtype --gpus "},
    {Mode::small, "small", small_help, " --n --size "},
}};

const ModeEntry& entry_of(const std::string& name) {
  for (const ModeEntry& entry : modes) {
    if (name == entry.name) return entry;
  }
  throw UsageError("unknown mode '" + name.substr(0, 40) +
                   "': use bandwidth, pool, overlap or small");
}

bool takes(const ModeEntry& entry, const std::string& option) {
  return std::string_view(" --device --repeat ").find(" " + option + " ") != std::string::npos ||
         std::string_view(entry.options).find(" " + option + " ") != std::string::npos;
}

void set(Options& options, const std::string& name, const std::string& value) {
  constexpr std::size_t most_repeats = 10'000;
  if (name == "--device") {
    if (value != "cpu") {
      const bool digits = !value.empty() && std::all_of(value.begin(), value.end(), [](char c) {
        return c >= '0' && c <= '9';
      });
      if (!digits || value.size() > 6) {
        throw UsageError("--device '" + value.substr(0, 40) +
                         "' is unknown: use the number of a GPU, like 0, or cpu");
      }
    }
    options.device = value;
  } else if (name == "--gpus") {
    if (value != "all") {
      throw UsageError("--gpus '" + value.substr(0, 40) +
                       "' is unknown: use --gpus all, or --device N for one GPU");
    }
    options.all_gpus = true;
  } else if (name == "--repeat") {
    options.repeat = parse_count(name, value, most_repeats);
  } else if (name == "--bytes") {
    options.bytes = parse_bytes(name, value);
  } else if (name == "--size") {
    options.size = options.mode == Mode::overlap ? parse_count(name, value, 100'000)
                                                 : parse_bytes(name, value);
  } else if (name == "--n") {
    options.n = parse_count(name, value, options.mode == Mode::overlap ? 2048 : 100'000);
  } else if (name == "--dtype") {
    if (value != "fp32" && value != "tf32" && value != "bf16") {
      throw UsageError("--dtype '" + value.substr(0, 40) + "' is unknown: use fp32, tf32 or bf16");
    }
    options.dtype = value;
  }
}

}  // namespace

const char* mode_name(Mode mode) { return modes[static_cast<std::size_t>(mode)].name; }

Options parse(const std::vector<std::string>& arguments) {
  Options options;
  if (arguments.empty()) {
    throw UsageError("which mode? Use bandwidth, pool, overlap or small (see --help)");
  }
  const std::string& first = arguments.front();
  if (first == "--help" || first == "-h") {
    options.help = top_help;
    return options;
  }
  if (first == "--version") {
    options.help = "streamlap-bench " STREAMLAP_VERSION "\n";
    return options;
  }
  if (first.starts_with("-")) throw UsageError("the mode comes first (see --help)");
  const ModeEntry& entry = entry_of(first);
  options.mode = entry.mode;
  for (std::size_t i = 1; i < arguments.size(); ++i) {
    std::string name = arguments[i];
    if (name == "--help" || name == "-h") {
      options.help = entry.help;
      return options;
    }
    if (name == "--json") {
      options.json = true;
      continue;
    }
    std::optional<std::string> value;
    if (const std::size_t equals = name.find('='); equals != std::string::npos) {
      value = name.substr(equals + 1);
      name.resize(equals);
    }
    if (value && (name == "--json" || name == "--help" || name == "--version")) {
      throw UsageError(name + " takes no value");
    }
    if (!takes(entry, name)) {
      throw UsageError(std::string(entry.name) + " has no option '" + name.substr(0, 40) +
                       "': see streamlap-bench " + entry.name + " --help");
    }
    if (!value) {
      if (i + 1 == arguments.size() || arguments[i + 1].starts_with("--")) {
        throw UsageError(name + " needs a value: see streamlap-bench " + entry.name + " --help");
      }
      value = arguments[++i];
    }
    set(options, name, *value);
  }
  if (options.all_gpus && options.device) {
    throw UsageError("--device and --gpus all contradict each other: give one of them");
  }
  return options;
}

}  // namespace bench
