// The command line: which mode, on what, how big. Everything is checked here or in the mode's first
// lines, before anything is measured.
#pragma once

#include <cstddef>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace bench {

// Bad arguments: one line that says what to do, and exit status 2.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

enum class Mode { bandwidth, pool, overlap, small };

struct Options {
  Mode mode = Mode::bandwidth;
  bool json = false;
  std::optional<std::string> device;  // "cpu", or the number of a GPU
  bool all_gpus = false;
  std::size_t repeat = 9;
  std::optional<std::size_t> size;
  std::optional<std::size_t> n;
  std::optional<std::size_t> bytes;
  std::optional<std::string> dtype;
  std::optional<std::string> help;  // to print instead of running
};

// Throws UsageError.
Options parse(const std::vector<std::string>& arguments);
const char* mode_name(Mode mode);

// "64MiB", "1.5GB" or a plain number of bytes. Throws UsageError that begins with `what`.
std::size_t parse_bytes(const std::string& what, const std::string& text);
// A whole number from 1 to `most`.
std::size_t parse_count(const std::string& what, const std::string& text, std::size_t most);
// 65536 is "64 KiB"; what is no multiple of a unit gets one decimal.
std::string format_bytes(std::size_t bytes);

}  // namespace bench
