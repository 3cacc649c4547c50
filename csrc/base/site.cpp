#include "base/site.h"

#ifdef STREAMLAP_MUTANTS

#include <cstdlib>
#include <cstring>

namespace streamlap {

bool dropped(Site site) noexcept {
  static const char* const without = std::getenv("STREAMLAP_WITHOUT_SITE");
  return without != nullptr && std::strcmp(without, site.name) == 0;
}

}  // namespace streamlap

#endif
