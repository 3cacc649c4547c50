// A report as one JSON document.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>

#include "machine.h"
#include "report.h"
#include "stats.h"

namespace bench {
namespace {

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      std::array<char, 8> code{};
      std::snprintf(code.data(), code.size(), "\\u%04x", static_cast<unsigned>(c));
      out += code.data();
    } else {
      out += c;
    }
  }
  return out + "\"";
}

// Keys are easier to use without blanks.
std::string key(std::string text) {
  std::replace(text.begin(), text.end(), ' ', '_');
  return quoted(text);
}

std::string number(double value) {
  if (!std::isfinite(value)) return "null";
  std::array<char, 40> text{};
  std::snprintf(text.data(), text.size(), "%.9g", value);
  return text.data();
}

template <class List, class Show>
std::string joined(const List& list, Show show) {
  std::string out;
  for (const auto& each : list) {
    if (!out.empty()) out += ", ";
    out += show(each);
  }
  return out;
}

std::string row_json(const Row& row) {
  std::string out = "{\"row\": " + quoted(row.name);
  for (const Label& label : row.labels) {
    out += ", " + key(label.key) + ": " +
           (label.number ? std::to_string(*label.number) : quoted(label.text));
  }
  out += ", \"unit\": " + quoted(row.unit) + ", \"median\": " + number(median(row.samples)) +
         ", \"min\": " + number(least(row.samples)) + ", \"max\": " + number(most(row.samples));
  for (const auto& [name, value] : row.extras) out += ", " + key(name) + ": " + number(value);
  return out + ", \"samples\": [" + joined(row.samples, number) + "]}";
}

}  // namespace

std::string as_json(const Report& report) {
  const Machine machine = this_machine();
  std::string out = "{\n  \"mode\": " + quoted(report.mode);
  out += ",\n  \"runtime\": " + quoted(report.runtime);
  out += ",\n  \"machine\": {\"cpu\": " + quoted(machine.cpu) +
         ", \"cores\": " + std::to_string(machine.cores) +
         ", \"memory\": " + std::to_string(machine.memory) +
         ", \"kernel\": " + quoted(machine.kernel) + ", \"gpus\": [" +
         joined(report.gpus,
                [](const Gpu& gpu) {
                  return "{\"index\": " + std::to_string(gpu.index) +
                         ", \"name\": " + quoted(gpu.name) +
                         ", \"memory\": " + std::to_string(gpu.memory) + "}";
                }) +
         "]}";
  out += ",\n  \"versions\": {" +
         joined(report.versions,
                [](const auto& version) {
                  return key(version.first) + ": " + quoted(version.second);
                }) +
         "}";
  out += ",\n  \"settings\": {" +
         joined(report.settings,
                [](const Setting& setting) {
                  return key(setting.key) + ": " +
                         (setting.number ? std::to_string(*setting.number) : quoted(setting.text));
                }) +
         "}";
  out += ",\n  \"notes\": [" + joined(report.notes, quoted) + "]";
  out += std::string(",\n  \"verified\": ") + (report.faults.empty() ? "true" : "false");
  out += ",\n  \"faults\": [" + joined(report.faults, quoted) + "]";
  out += ",\n  \"rows\": [";
  for (std::size_t i = 0; i < report.rows.size(); ++i) {
    out += (i == 0 ? "\n    " : ",\n    ") + row_json(report.rows[i]);
  }
  return out + "\n  ]\n}\n";
}

}  // namespace bench
