// A report as tables: a new one wherever the columns or the unit change.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>

#include "report.h"
#include "stats.h"

namespace bench {
namespace {

std::string shown(double value) {
  if (!std::isfinite(value)) return "-";
  const double size = std::abs(value);
  std::array<char, 40> text{};
  std::snprintf(text.data(), text.size(),
                size >= 100 ? "%.1f"
                : size >= 1 ? "%.3f"
                            : "%.5f",
                value);
  return text.data();
}

// The unit that is easy to read; JSON keeps seconds.
double readable(const std::string& unit) { return unit == "s" ? 1e3 : 1.0; }

std::vector<std::string> header(const Row& row) {
  std::vector<std::string> cells;
  for (const Label& label : row.labels) cells.push_back(label.key);
  cells.push_back("row");
  cells.push_back(row.unit == "s" ? "ms" : row.unit);
  cells.push_back("min");
  cells.push_back("max");
  for (const auto& extra : row.extras) cells.push_back(extra.first);
  return cells;
}

std::vector<std::string> cells_of(const Row& row) {
  std::vector<std::string> cells;
  for (const Label& label : row.labels) cells.push_back(label.text);
  cells.push_back(row.name);
  const double factor = readable(row.unit);
  cells.push_back(shown(factor * median(row.samples)));
  cells.push_back(shown(factor * least(row.samples)));
  cells.push_back(shown(factor * most(row.samples)));
  for (const auto& extra : row.extras) cells.push_back(shown(extra.second));
  return cells;
}

// Words to the left, numbers to the right.
std::string table(const std::vector<std::vector<std::string>>& lines, std::size_t words) {
  std::vector<std::size_t> widths(lines.front().size(), 0);
  for (const auto& line : lines) {
    for (std::size_t i = 0; i < line.size(); ++i) widths[i] = std::max(widths[i], line[i].size());
  }
  std::string out;
  for (const auto& line : lines) {
    std::string text;
    for (std::size_t i = 0; i < line.size(); ++i) {
      const std::string pad(widths[i] - line[i].size(), ' ');
      text.append("  ").append(i < words ? line[i] + pad : pad + line[i]);
    }
    text.erase(text.find_last_not_of(' ') + 1);
    out += text + "\n";
  }
  return out;
}

}  // namespace

void Report::note(const std::string& text) {
  if (std::find(notes.begin(), notes.end(), text) == notes.end()) notes.push_back(text);
}

std::string as_text(const Report& report) {
  std::string out = "streamlap-bench " STREAMLAP_VERSION " " + report.mode + " on " + report.title;
  for (const auto& [name, version] : report.versions) {
    if (name != "streamlap") out += ", " + name + " " + version;
  }
  out += "\n";
  for (const Setting& setting : report.settings) {
    out += (&setting == report.settings.data() ? "" : ", ") + setting.key + " " +
           (setting.text.empty() ? std::to_string(*setting.number) : setting.text);
  }
  out += "\n";
  for (const std::string& note : report.notes) out += "note: " + note + "\n";
  std::vector<std::vector<std::string>> lines;
  std::size_t words = 0;
  const auto flush = [&] {
    if (!lines.empty()) out.append("\n").append(table(lines, words));
    lines.clear();
  };
  for (const Row& row : report.rows) {
    if (lines.empty() || header(row) != lines.front()) {
      flush();
      lines.push_back(header(row));
      words = row.labels.size() + 1;
    }
    lines.push_back(cells_of(row));
  }
  flush();
  out += "\nmedian, least and greatest of the samples\n";
  for (const std::string& fault : report.faults) out += "WRONG: " + fault + "\n";
  if (report.faults.empty()) out += "every row's results were checked, byte by byte\n";
  return out;
}

}  // namespace bench
