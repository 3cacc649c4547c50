// What a machine's memory can do, measured where no interpreter is in the way.
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>

#include "base/errors.h"
#include "base/pages.h"
#include "bindings/types.h"

namespace streamlap::bindings {
namespace {

// How long it takes until new memory is there. Throws Error(out_of_memory) where it does not come.
double populate_seconds(std::size_t bytes, int threads) {
  GilRelease released;
  void* memory = pages::map(bytes, pages::Fork::shared);
  const auto begin = std::chrono::steady_clock::now();
  pages::populate(memory, bytes, threads);
  const auto end = std::chrono::steady_clock::now();
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  unsigned char present = 0;
  mincore(static_cast<std::byte*>(memory) + (bytes - 1) / page * page, 1, &present);
  pages::unmap(memory, bytes);
  if ((present & 1) == 0) {
    throw Error(ErrorKind::out_of_memory,
                "there is no room for " + std::to_string(bytes) + " bytes of memory");
  }
  return std::chrono::duration<double>(end - begin).count();
}

}  // namespace

void bind_pages(py::module_& module) {
  module.def("populate_threads", &pages::threads);
  module.def("use_populate_threads", &pages::use_threads, py::arg("count"));
  module.def("populate_seconds", &populate_seconds, py::arg("nbytes"), py::arg("threads"));
}

}  // namespace streamlap::bindings
