#include "machine.h"

#include <sched.h>
#include <sys/utsname.h>

#include <algorithm>
#include <fstream>
#include <limits>

#include "options.h"

namespace bench {
namespace {

// The value of the first line that begins with `key`, without colon and blanks.
std::string value_of(const char* file, const std::string& key) {
  std::ifstream in(file);
  for (std::string line; std::getline(in, line);) {
    if (!line.starts_with(key)) continue;
    const std::size_t begin = line.find_first_not_of(" \t", line.find(':') + 1);
    return begin == std::string::npos ? "" : line.substr(begin);
  }
  return "";
}

std::size_t kilobytes_of(const std::string& key) {
  const std::string text = value_of("/proc/meminfo", key + ":");
  return text.empty() ? 0 : std::stoull(text) * 1024;
}

// Numbers only: "max" stands for no limit.
std::size_t number_in(const std::string& file, std::size_t otherwise) {
  std::ifstream in(file);
  std::size_t value = 0;
  return in >> value ? value : otherwise;
}

// Pages that nobody can take away: what files left in memory does not count.
std::size_t kept_by(const std::string& group) {
  std::ifstream in(group + "/memory.stat");
  std::string key;
  for (std::size_t value = 0; in >> key >> value;) {
    if (key == "anon") return value;
  }
  return 0;
}

// What the process's control group leaves, with version 2 of control groups.
std::size_t group_room() {
  constexpr std::size_t none = std::numeric_limits<std::size_t>::max();
  std::string group = value_of("/proc/self/cgroup", "0::");
  if (group.starts_with(":")) group.erase(0, 1);
  std::size_t room = none;
  for (std::string folder = "/sys/fs/cgroup" + group; folder.size() >= 14;
       folder.resize(std::max<std::size_t>(folder.rfind('/'), 1))) {
    const std::size_t limit = number_in(folder + "/memory.max", none);
    const std::size_t used = kept_by(folder);
    if (limit != none) room = std::min(room, limit > used ? limit - used : 0);
  }
  return room;
}

}  // namespace

Machine this_machine() {
  Machine machine;
  machine.cpu = value_of("/proc/cpuinfo", "model name");
  machine.memory = kilobytes_of("MemTotal");
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0) {
    machine.cores = static_cast<std::size_t>(CPU_COUNT(&set));
  }
  machine.cores = std::max<std::size_t>(machine.cores, 1);
  utsname system{};
  if (uname(&system) == 0) machine.kernel = std::string(system.sysname) + " " + system.release;
  return machine;
}

std::size_t host_room() {
  const std::size_t available = kilobytes_of("MemAvailable");
  return std::min(available == 0 ? std::numeric_limits<std::size_t>::max() : available,
                  group_room());
}

void require_host_room(std::size_t bytes, const std::string& what) {
  // A tenth stays for everybody else.
  const std::size_t room = host_room() / 10 * 9;
  if (bytes > room) {
    throw UsageError("this needs " + format_bytes(bytes) + " of host memory and there are " +
                     format_bytes(room) + ": use a smaller " + what);
  }
}

}  // namespace bench
