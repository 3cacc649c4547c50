#include "check/fault_plan.h"

#include <algorithm>
#include <charconv>

namespace streamlap::fault {
namespace {

template <std::size_t size>
std::size_t find(const std::array<const char*, size>& names, const std::string& name,
                 const std::string& text) {
  const auto found = std::find(names.begin(), names.end(), name);
  if (found != names.end()) return static_cast<std::size_t>(found - names.begin());
  std::string all;
  for (const char* known : names) all += std::string(all.empty() ? "" : ", ") + known;
  throw Error(
      ErrorKind::invalid_argument,
      "the fault '" + text + "' is none of call:number:mode, '" + name + "' none of " + all);
}

Plan parse_plan(const std::string& text) {
  const std::size_t first = std::min(text.find(':'), text.size());
  const std::size_t second = std::min(text.find(':', first + 1), text.size());
  Plan plan;
  plan.call = static_cast<Call>(find(call_names, text.substr(0, first), text));
  const std::string mode = second < text.size() ? text.substr(second + 1) : "";
  plan.mode = static_cast<Mode>(find(mode_names, mode, text));
  const char* begin = text.data() + first + 1;
  const char* end = text.data() + second;
  const auto [stop, fault] = std::from_chars(begin, end, plan.at);
  if (fault != std::errc() || stop != end || plan.at == 0) {
    throw Error(ErrorKind::invalid_argument,
                "the fault '" + text + "' needs the number of a call, 1 or more");
  }
  if (!applies(plan.mode, plan.call)) {
    throw Error(ErrorKind::invalid_argument, "the fault '" + text + "' does not exist: only what " +
                                                 "enqueues fails later, only what waits is " +
                                                 "interrupted, and what asks needs no memory");
  }
  return plan;
}

}  // namespace

std::string to_string(const Plan& plan) {
  return std::string(call_names[static_cast<std::size_t>(plan.call)]) + ":" +
         std::to_string(plan.at) + ":" + mode_names[static_cast<std::size_t>(plan.mode)];
}

std::vector<Plan> parse_plans(const std::string& text) {
  std::vector<Plan> plans;
  if (text.empty()) return plans;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    plans.push_back(parse_plan(text.substr(begin, end - begin)));
    begin = end + 1;
  }
  return plans;
}

}  // namespace streamlap::fault
