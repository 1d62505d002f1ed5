// The threads that the CPU kernels work with, one for each core but the caller's.
//
// They are not XLA's: a step is dozens of kernels with microseconds between them, and to sleep and be woken each time
// costs a virtual machine 50 of them. A helper looks for the next loop a while before it sleeps.

#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>

namespace odriver {

constexpr int kHelped = 8;  // other threads' shares that a helper looks at: to look at all takes long where there are many
constexpr auto kPatience = std::chrono::microseconds(200);  // longer than the gaps within a step
constexpr int kLoops = 4;   // callers that have help at a time: virtual devices of one process

// How many threads there are, the callers' among them. Python says so before the first loop.
inline std::atomic<int> cores{1};

// The tasks of a thread in a loop: those from `next` to `end`, both in one word, so that whoever counts it up knows by it alone
// whether it has a task. What a thread does that comes late, and finds another loop's tasks there, is right for that reason: it
// does one of these, and that loop is not over before it has.
class alignas(64) Share {
 public:
  void set(int64_t first, int64_t end) {
    word_.store(static_cast<uint64_t>(end) << kBits | static_cast<uint64_t>(first), std::memory_order_release);
  }

  // One of them that nobody has had, or -1.
  int64_t take() {
    if (!is_left(word_.load(std::memory_order_relaxed))) return -1;  // a look does not take the line from others
    const uint64_t word = word_.fetch_add(1, std::memory_order_acq_rel);
    return is_left(word) ? static_cast<int64_t>(word & kNext) : -1;
  }

 private:
  static constexpr int kBits = 32;
  static constexpr uint64_t kNext = (uint64_t{1} << kBits) - 1;

  static bool is_left(uint64_t word) { return (word & kNext) < word >> kBits; }

  std::atomic<uint64_t> word_{0};
};

// Tasks 0 to count - 1, each done once. A thread has a share of them, one after the other, so that it reads on where it was;
// then it helps some others with theirs, and the caller, who waits for the last one, all others.
class Loop {
 public:
  using Body = void (*)(const void* of, int64_t task);

  void share_among(int threads) {
    threads_ = threads;
    shares_ = std::make_unique<Share[]>(threads);
  }

  // Whether it is the caller's now, who gives it back.
  bool take() { return !taken_.load(std::memory_order_relaxed) && !taken_.exchange(true, std::memory_order_acquire); }
  void give_back() { taken_.store(false, std::memory_order_release); }

  // Only the caller's, once all tasks of the loop before are done. A task that can be had is behind the body that it is for.
  void begin(Body body, const void* of, int64_t count) {
    body_ = body, of_ = of;
    done_.store(0, std::memory_order_relaxed);
    for (int64_t thread = 0; thread < threads_; ++thread)
      shares_[thread].set(thread * count / threads_, (thread + 1) * count / threads_);
  }

  void work(int thread) {
    const int looked_at = thread == 0 ? threads_ : std::min(threads_, 1 + kHelped);
    for (int other = 0; other < looked_at; ++other) {
      Share& share = shares_[(thread + other) % threads_];
      int64_t did = 0;
      for (int64_t task; (task = share.take()) >= 0; ++did) body_(of_, task);
      if (did) done_.fetch_add(did, std::memory_order_release);
    }
  }

  void wait(int64_t count) const {
    while (done_.load(std::memory_order_acquire) < count) std::this_thread::yield();
  }

 private:
  std::unique_ptr<Share[]> shares_;
  int threads_ = 1;
  Body body_ = nullptr;
  const void* of_ = nullptr;
  alignas(64) std::atomic<int64_t> done_{0};
  alignas(64) std::atomic<bool> taken_{false};
};

class Team {
 public:
  Team() : size_(std::max(1, cores.load(std::memory_order_relaxed))) {
    for (Loop& loop : loops_) loop.share_among(size_);
    for (int helper = 1; helper < size_; ++helper) std::thread([this, helper] { help(helper); }).detach();
  }

  // The threads, the caller's among them.
  int size() const { return size_; }

  // Works on the loop until all its tasks are done; alone, where there is one task or there are too many callers.
  void run(Loop::Body body, const void* of, int64_t count) {
    Loop* loop = count > 1 && size_ > 1 ? free_loop() : nullptr;
    if (loop == nullptr) {
      for (int64_t task = 0; task < count; ++task) body(of, task);
      return;
    }
    loop->begin(body, of, count);
    post();
    loop->work(0);
    loop->wait(count);
    loop->give_back();
  }

 private:
  Loop* free_loop() {
    for (Loop& loop : loops_)
      if (loop.take()) return &loop;
    return nullptr;
  }

  // A helper counts itself asleep before it looks for the last time, so that one of both sees what the other did.
  void post() {
    posted_.fetch_add(1, std::memory_order_seq_cst);
    if (asleep_.load(std::memory_order_seq_cst) == 0) return;
    { const std::lock_guard<std::mutex> it_waits(mutex_); }
    wake_.notify_all();
  }

  void help(int thread) {
    for (int64_t seen = 0;;) {
      seen = await_other_than(seen);
      for (Loop& loop : loops_) loop.work(thread);
    }
  }

  int64_t await_other_than(int64_t seen) {
    const auto patience = std::chrono::steady_clock::now() + kPatience;
    while (std::chrono::steady_clock::now() < patience) {
      for (int look = 0; look < 64; ++look)
        if (const int64_t posted = posted_.load(std::memory_order_acquire); posted != seen) return posted;
      std::this_thread::yield();
    }
    std::unique_lock<std::mutex> held(mutex_);
    asleep_.fetch_add(1, std::memory_order_seq_cst);
    wake_.wait(held, [&] { return posted_.load(std::memory_order_seq_cst) != seen; });
    asleep_.fetch_sub(1, std::memory_order_relaxed);
    return posted_.load(std::memory_order_acquire);
  }

  const int size_;
  std::array<Loop, kLoops> loops_;
  alignas(64) std::atomic<int64_t> posted_{0};  // loops so far
  std::atomic<int> asleep_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
};

// One team for the process, even of several libraries where GCC compiles them; its threads run until the process ends.
inline Team& team() {
  static Team& only = *new Team;
  return only;
}

// Calls body(task) for each task below `count`, on the calling thread and its helpers.
template <typename Body>
void parallel_for(int64_t count, const Body& body) {
  team().run([](const void* of, int64_t task) { (*static_cast<const Body*>(of))(task); }, &body, count);
}

}  // namespace odriver

// How many cores the kernels have, which is settled with their first loop.
extern "C" inline __attribute__((used)) void odriver_use_cores(int count) { odriver::cores.store(count); }
