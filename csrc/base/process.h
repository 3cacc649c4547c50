// What became of this process: forked from the one that started the library, or about to exit.
// Owners of memory and streams ask before they lock, throw or call a driver; then they leak
// instead.
#pragma once

namespace streamlap::process {

// Called before a thread is started (ours of Python's, too), a driver is touched, or a pool is
// made, whose lock another thread may hold at the moment of a fork.
void mark_started();

// True in a child forked after mark_started(): threads, locks and driver state did not come along.
bool forked() noexcept;

// Set by the exit handler when it begins: nothing new should be started.
void mark_ending() noexcept;
bool ending() noexcept;

// Set by the exit handler when it has waited long enough; never cleared.
void mark_closing() noexcept;
bool closing() noexcept;

// True when resources must be left alone rather than given back.
inline bool leaking() noexcept { return closing() || forked(); }

// Throws Error(forked) in such a child.
void require_usable();

}  // namespace streamlap::process
