// Decides when a thread runs its parallel loops alone.
#pragma once

#include <algorithm>
#include <chrono>

namespace tvmify {

using Clock = std::chrono::steady_clock;

// Makes a thread run its loops alone while other processes occupy the cores. An OpenMP region
// begins and ends only when all of its threads run, even those with no task, so a loop may wait for
// a time slice of the scheduler: milliseconds for microseconds of work.
class Backoff {
 public:
  // How long to wait for other threads before running loops alone, and how long to work on a loop
  // alone before involving them: about one time slice of the scheduler.
  static constexpr Clock::duration kPatience = std::chrono::milliseconds(4);

  bool alone(Clock::time_point now) const { return now < until_; }

  // Records a loop: when it forked, when its tasks began and ended, when it joined, and that the
  // calling thread ran `own` of the tasks.
  void add(Clock::time_point forked, Clock::time_point begun, Clock::time_point done,
           Clock::time_point joined, int tasks, int own) {
    if (own == 0) return;  // the caller itself was late
    const auto waited = (begun - forked) + (joined - done);
    const auto saved = (done - begun) * (tasks - own) / own;
    lost_ = std::max(lost_ + waited - saved, Clock::duration::zero());
    balance_ += saved - waited;
    if (lost_ < kPatience) return;
    // Tell one slice lost by chance from a net loss since the last pause.
    const bool still = balance_ < Clock::duration::zero();
    pause_ = still ? std::clamp(2 * pause_, kShortest, kLongest) : kShortest;
    until_ = joined + pause_;
    lost_ = balance_ = Clock::duration::zero();
  }

 private:
  // The shortest pause costs about as much as a loss by chance; the longest one retries once a
  // second while the contention lasts.
  static constexpr Clock::duration kShortest = std::chrono::milliseconds(10);
  static constexpr Clock::duration kLongest = std::chrono::seconds(1);

  Clock::duration lost_{0};     // recently
  Clock::duration balance_{0};  // saved minus lost since the last pause
  Clock::duration pause_{0};
  Clock::time_point until_{};
};

}  // namespace tvmify
