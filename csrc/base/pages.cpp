#include "base/pages.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "base/errors.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace streamlap::pages {
namespace {

std::size_t page_bytes() {
  static const auto bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

std::size_t round_up(std::size_t bytes, std::size_t step) {
  return (bytes + step - 1) / step * step;
}

// Of a file with one number; what cannot be read, or is "max", is no limit.
std::size_t number_in(const char* path, std::size_t otherwise) {
  std::ifstream file(path);
  std::size_t number = 0;
  return file >> number ? number : otherwise;
}

// Of a file with lines of a name and a number.
std::size_t number_named(const char* path, std::string_view wanted) {
  std::ifstream file(path);
  std::string name;
  for (std::size_t number = 0; file >> name >> number;) {
    if (name == wanted) return number;
  }
  return 0;
}

// A process that makes more pages present than its control group may have is killed, not refused.
// What the group keeps of files goes first, so it counts as free.
bool room_for(std::size_t bytes) {
  constexpr std::size_t none = SIZE_MAX;
  const std::size_t limit = number_in("/sys/fs/cgroup/memory.max", none);
  if (limit == none) return true;
  constexpr const char* parts = "/sys/fs/cgroup/memory.stat";
  const std::size_t files =
      number_named(parts, "active_file") + number_named(parts, "inactive_file");
  const std::size_t all = number_in("/sys/fs/cgroup/memory.current", 0);
  const std::size_t used = all - std::min(all, files);
  return used < limit && bytes <= limit - used;
}

// A system older than Linux 5.14 knows no MADV_POPULATE_WRITE: a write to each page does the same.
void touch(std::byte* begin, std::size_t bytes) {
  for (std::size_t offset = 0; offset < bytes; offset += page_bytes()) {
    // Another thread may write there at the same time: what it writes must stay.
    reinterpret_cast<std::atomic<std::uint8_t>*>(begin + offset)->fetch_or(0);
  }
}

void populate_part(std::byte* begin, std::size_t bytes) {
  if (madvise(begin, bytes, MADV_POPULATE_WRITE) == 0) return;
  if (errno == EINVAL || errno == ENOSYS) touch(begin, bytes);
  // Anything else: the pages come when they are used, or the error then does.
}

}  // namespace

void* map(std::size_t bytes, Fork fork, bool huge) {
  const std::size_t wanted = round_up(std::max<std::size_t>(bytes, 1), page_bytes());
  const std::size_t slack = wanted >= huge_page ? huge_page : 0;
  void* whole = bytes > SIZE_MAX - 2 * huge_page
                    ? MAP_FAILED
                    : mmap(nullptr, wanted + slack, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (whole == MAP_FAILED) {
    throw Error(ErrorKind::out_of_memory, "the system refused " + std::to_string(bytes) +
                                              " bytes of memory: " + std::strerror(errno));
  }
  auto* begin = static_cast<std::byte*>(whole);
  if (slack != 0) {
    const auto address = reinterpret_cast<std::uintptr_t>(whole);
    const std::size_t before = round_up(address, huge_page) - address;
    if (before != 0) munmap(begin, before);
    begin += before;
    if (slack != before) munmap(begin + wanted, slack - before);
  }
  if (fork == Fork::kept_out && madvise(begin, wanted, MADV_DONTFORK) != 0) {
    const int error = errno;
    munmap(begin, wanted);
    throw Error(
        ErrorKind::out_of_memory,
        std::string("memory cannot be kept out of child processes: ") + std::strerror(error));
  }
  // Without them it is only slower.
  if (huge && slack != 0) madvise(begin, wanted, MADV_HUGEPAGE);
  return begin;
}

void unmap(void* pointer, std::size_t bytes) noexcept {
  munmap(pointer, round_up(std::max<std::size_t>(bytes, 1), page_bytes()));
}

bool populate(void* pointer, std::size_t bytes, int threads) {
  if (bytes == 0) return true;
  if (!room_for(bytes)) return false;
  auto* begin = static_cast<std::byte*>(pointer);
  const std::size_t whole = round_up(bytes, page_bytes());
  const auto parts = static_cast<std::size_t>(std::max(threads, 1));
  const std::size_t unit = whole >= parts * huge_page ? huge_page : page_bytes();
  const std::size_t part = round_up((whole + parts - 1) / parts, unit);
  std::vector<std::thread> others;
  std::size_t own = 0;  // what is left to the calling thread where no other can be had
  try {
    for (own = part; own < whole; own += part) {
      others.emplace_back(populate_part, begin + own, std::min(part, whole - own));
    }
  } catch (...) {
    populate_part(begin + own, whole - own);
  }
  populate_part(begin, std::min(part, whole));
  for (std::thread& other : others) other.join();
  return true;
}

}  // namespace streamlap::pages
