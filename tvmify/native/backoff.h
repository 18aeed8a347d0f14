// When a thread runs its parallel loops alone.
#pragma once

#include <algorithm>
#include <chrono>

namespace tvmify {

using Clock = std::chrono::steady_clock;

// Keeps one thread's loops to itself while other processes have the cores. A region of OpenMP
// begins and ends when all of its threads run, even those that find no task left, so each loop may
// wait for a time slice of the scheduler: milliseconds for microseconds of work.
class Backoff {
 public:
  // What others are waited for before the caller works alone, and what it works on a loop alone
  // before they are waited for: about a slice of the scheduler's.
  static constexpr Clock::duration kPatience = std::chrono::milliseconds(4);

  bool alone(Clock::time_point now) const { return now < until_; }

  // A loop forked, its tasks began and were done, its threads joined; of the tasks, the calling
  // thread ran `own`.
  void add(Clock::time_point forked, Clock::time_point begun, Clock::time_point done,
           Clock::time_point joined, int tasks, int own) {
    if (own == 0) return;  // it was late itself
    const auto waited = (begun - forked) + (joined - done);
    const auto saved = (done - begun) * (tasks - own) / own;
    lost_ = std::max(lost_ + waited - saved, Clock::duration::zero());
    balance_ += saved - waited;
    if (lost_ < kPatience) return;
    // One slice lost by chance, or has there been nothing but loss since the last pause?
    const bool still = balance_ < Clock::duration::zero();
    pause_ = still ? std::clamp(2 * pause_, kShortest, kLongest) : kShortest;
    until_ = joined + pause_;
    lost_ = balance_ = Clock::duration::zero();
  }

 private:
  // The first pause costs about as much as was lost, if that was chance; with the longest one, a
  // trouble that lasts is looked at once a second.
  static constexpr Clock::duration kShortest = std::chrono::milliseconds(10);
  static constexpr Clock::duration kLongest = std::chrono::seconds(1);

  Clock::duration lost_{0};     // of late
  Clock::duration balance_{0};  // saved, less what was lost, since the last pause
  Clock::duration pause_{0};
  Clock::time_point until_{};
};

}  // namespace tvmify
