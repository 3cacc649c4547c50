#include "pages.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <new>
#include <thread>
#include <vector>

namespace bench {
namespace {

constexpr std::size_t huge_page = std::size_t{2} << 20;

// In Linux since 5.14, in the headers of the C library later.
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

void touch(std::byte* begin, std::size_t bytes) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  for (std::size_t at = 0; at < bytes; at += page) {
    *static_cast<volatile unsigned char*>(static_cast<void*>(begin + at)) = 0;
  }
}

}  // namespace

Pages::Pages(std::size_t bytes, bool huge) : mapped_bytes_(bytes + huge_page), bytes_(bytes) {
  void* mapped =
      mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) throw std::bad_alloc();
  mapped_ = static_cast<std::byte*>(mapped);
  const auto address = reinterpret_cast<std::uintptr_t>(mapped_);
  data_ = mapped_ + (huge_page - address % huge_page) % huge_page;
  if (madvise(data_, bytes_, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE) != 0) {
    refused_ = std::string(huge ? "MADV_HUGEPAGE" : "MADV_NOHUGEPAGE") + " is refused (" +
               std::strerror(errno) + "): the system chooses the size of pages";
  }
}

Pages::~Pages() { munmap(mapped_, mapped_bytes_); }

void Pages::populate(std::size_t threads) {
  const std::size_t share = bytes_ / threads / huge_page * huge_page;
  std::atomic<int> error{0};
  {
    std::vector<std::jthread> team;
    for (std::size_t i = 0; i < threads; ++i) {
      const std::size_t begin = i * share;
      const std::size_t length = (i + 1 == threads ? bytes_ : begin + share) - begin;
      team.emplace_back([this, begin, length, &error] {
        if (length == 0 || madvise(data_ + begin, length, MADV_POPULATE_WRITE) == 0) return;
        error = errno;
        touch(data_ + begin, length);
      });
    }
  }
  if (error != 0) {
    refused_ = std::string("MADV_POPULATE_WRITE is refused (") + std::strerror(error) +
               "): the pages were touched one by one";
  }
}

}  // namespace bench
