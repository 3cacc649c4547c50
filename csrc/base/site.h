// The places in the source that order something: waits, records, locks, keep-alives, guards.
#pragma once

namespace streamlap {

// Names one such place. The mutation gate (tests/mutants.py) leaves out one at a time.
struct Site {
  explicit constexpr Site(const char* site_name) : name(site_name) {}
  const char* name;
};

// True where the gate leaves this place out: the one that STREAMLAP_WITHOUT_SITE names, in the
// gate's own programs (STREAMLAP_MUTANTS). Everywhere else a constant, and no code at all.
#ifdef STREAMLAP_MUTANTS
bool dropped(Site site) noexcept;
#else
constexpr bool dropped(Site) noexcept { return false; }
#endif

}  // namespace streamlap
