// Page-locked memory made by hand: pages mapped, filled in by threads and registered.
#pragma once

#include <cstddef>
#include <string>

namespace bench {

// Anonymous memory that begins at a huge page's boundary.
class Pages {
 public:
  Pages(std::size_t bytes, bool huge);
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  ~Pages();

  // Makes every page be there, by so many threads.
  void populate(std::size_t threads);
  std::byte* data() const noexcept { return data_; }
  std::size_t bytes() const noexcept { return bytes_; }
  // What the system refused, in words; empty if nothing.
  const std::string& refused() const noexcept { return refused_; }

 private:
  std::byte* mapped_ = nullptr;
  std::size_t mapped_bytes_;
  std::byte* data_ = nullptr;
  std::size_t bytes_;
  std::string refused_;
};

}  // namespace bench
