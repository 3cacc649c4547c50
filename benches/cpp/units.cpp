// Numbers on the command line, and sizes for people.
#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <limits>

#include "options.h"

namespace bench {

std::size_t parse_count(const std::string& what, const std::string& text, std::size_t most) {
  std::size_t value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error == std::errc::result_out_of_range || (error == std::errc{} && value > most)) {
    throw UsageError(what + " " + text.substr(0, 40) + " is too large: the most is " +
                     std::to_string(most));
  }
  if (error != std::errc{} || stop != end || value == 0) {
    throw UsageError(what + " '" + text.substr(0, 40) + "' is no whole number from 1 up");
  }
  return value;
}

std::size_t parse_bytes(const std::string& what, const std::string& text) {
  struct Unit {
    const char* name;
    double bytes;
  };
  constexpr std::array<Unit, 10> units{{{"", 1},
                                        {"b", 1},
                                        {"kb", 1e3},
                                        {"mb", 1e6},
                                        {"gb", 1e9},
                                        {"tb", 1e12},
                                        {"kib", 0x1p10},
                                        {"mib", 0x1p20},
                                        {"gib", 0x1p30},
                                        {"tib", 0x1p40}}};
  double number = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number, std::chars_format::fixed);
  std::string unit(stop, end);
  std::erase(unit, ' ');
  std::transform(unit.begin(), unit.end(), unit.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  const auto* found =
      std::find_if(units.begin(), units.end(), [&](const Unit& each) { return unit == each.name; });
  const bool too_large = error == std::errc::result_out_of_range;
  if ((error != std::errc{} && !too_large) || found == units.end() || !(number >= 0) ||
      (!too_large &&
       (number * found->bytes < 1 || number * found->bytes != std::floor(number * found->bytes)))) {
    throw UsageError(what + " '" + text.substr(0, 40) +
                     "' is no size from 1 byte up, in whole bytes: write a number and B, KiB, MiB, "
                     "GiB, KB, MB or "
                     "GB, like 64MiB");
  }
  // 2^53: up to here a double holds every whole number.
  if (too_large || number * found->bytes > 0x1p53) {
    throw UsageError(what + " " + text.substr(0, 40) + " is too large for any machine");
  }
  return static_cast<std::size_t>(number * found->bytes);
}

std::string format_bytes(std::size_t bytes) {
  constexpr std::array<const char*, 4> names{"B", "KiB", "MiB", "GiB"};
  std::size_t unit = 0;
  double value = static_cast<double>(bytes);
  while (value >= 1024 && unit + 1 < names.size()) {
    value /= 1024;
    ++unit;
  }
  std::array<char, 40> text{};
  std::snprintf(text.data(), text.size(), value == std::floor(value) ? "%.0f %s" : "%.1f %s", value,
                names[unit]);
  return text.data();
}

}  // namespace bench
