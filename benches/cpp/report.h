// What a run found: rows with their samples, and what they were measured on. Printed at the end, as
// tables or as one JSON document.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "options.h"

namespace bench {

struct Label {
  std::string key;
  std::string text;
  std::optional<std::size_t> number = {};  // what JSON has in place of the text
};

struct Row {
  std::string name;
  std::vector<Label> labels;
  std::string unit;
  std::vector<double> samples;
  std::vector<std::pair<std::string, double>> extras = {};
};

struct Setting {
  std::string key;
  std::optional<std::size_t> number;
  std::string text = {};
};

struct Gpu {
  int index;
  std::string name;
  std::size_t memory;
};

struct Report {
  std::string mode;
  std::string runtime;  // "cuda" or "host"
  std::string title;    // the devices, in words
  std::vector<Setting> settings;
  std::vector<std::string> notes;
  std::vector<Gpu> gpus;
  std::vector<std::pair<std::string, std::string>> versions;
  std::vector<Row> rows;
  std::vector<std::string> faults;  // results that were wrong

  void note(const std::string& text);  // once, however often it is said
};

std::string as_json(const Report& report);
std::string as_text(const Report& report);

}  // namespace bench
