// Memory straight from the system: alignment, presence, what it holds, and what a child sees.
#include "base/pages.h"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <vector>

#include "base/errors.h"
#include "check.h"

using namespace streamlap;

namespace {

std::size_t present(void* pointer, std::size_t bytes) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  std::vector<unsigned char> pages((bytes + page - 1) / page);
  if (mincore(pointer, bytes, pages.data()) != 0) return 0;
  std::size_t count = 0;
  for (unsigned char state : pages) count += state & 1;
  return count * page;
}

}  // namespace

TEST(large_mappings_start_at_a_huge_page) {
  for (std::size_t bytes : {pages::huge_page, 3 * pages::huge_page + 4096}) {
    void* memory = pages::map(bytes, pages::Fork::shared);
    CHECK_EQ(reinterpret_cast<std::uintptr_t>(memory) % pages::huge_page, 0);
    std::memset(memory, 1, bytes);
    pages::unmap(memory, bytes);
  }
  void* one = pages::map(1, pages::Fork::shared);
  std::memset(one, 1, 4096);
  pages::unmap(one, 1);
}

TEST(populate_makes_present_and_changes_nothing) {
  for (bool huge : {true, false}) {
    for (int threads : {1, 3, 4, 64}) {
      const std::size_t bytes = 5 * pages::huge_page + 4096;
      auto* memory = static_cast<char*>(pages::map(bytes, pages::Fork::shared, huge));
      memory[0] = 'a';
      memory[bytes - 1] = 'z';
      pages::populate(memory, bytes, threads);
      CHECK(present(memory, bytes) >= bytes);
      CHECK_EQ(memory[0], 'a');
      CHECK_EQ(memory[bytes - 1], 'z');
      CHECK_EQ(memory[bytes / 2], '\0');
      pages::unmap(memory, bytes);
    }
  }
}

TEST(what_does_not_fit_is_refused) {
  CHECK_THROWS(pages::map(SIZE_MAX, pages::Fork::shared), Error);
  CHECK_THROWS(pages::map(SIZE_MAX / 4, pages::Fork::kept_out), Error);
}

TEST(a_child_has_only_what_is_shared) {
  for (auto [fork_rule, expected] :
       {std::pair{pages::Fork::shared, 0}, std::pair{pages::Fork::kept_out, 1}}) {
    auto* memory = static_cast<char*>(pages::map(pages::huge_page, fork_rule));
    memory[0] = 'a';
    const pid_t child = fork();
    if (child == 0) {
      // Asks without touching: an absent page would end the child by a signal.
      unsigned char state = 0;
      _exit(mincore(memory, 1, &state) == 0 ? 0 : 1);
    }
    int status = 0;
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status));
    CHECK_EQ(WEXITSTATUS(status), expected);
    pages::unmap(memory, pages::huge_page);
  }
}
