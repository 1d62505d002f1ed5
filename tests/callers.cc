// callers CORES CALLERS LOOPS: so many threads call parallel_for at a time, also within its tasks; each task is to be done once.

#include <cstdlib>
#include <vector>

#include "team.h"

int main(int, char** arguments) {
  odriver_use_cores(atoi(arguments[1]));
  std::atomic<int> wrong{0};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < atoi(arguments[2]); ++caller)
    callers.emplace_back([&, caller] {
      for (int loop = 0; loop < atoi(arguments[3]); ++loop) {
        std::vector<int> done(1 + (7 * loop + caller) % 97);
        odriver::parallel_for(done.size(), [&](int64_t task) {
          done[task] += 1;
          if (loop % 50 == 0 && task == 0) odriver::parallel_for(5, [](int64_t) {});
        });
        for (const int times : done) wrong += times != 1;
        if (loop % 500 == 0) std::this_thread::sleep_for(2 * odriver::kPatience);  // so that helpers sleep
      }
    });
  for (std::thread& caller : callers) caller.join();
  return wrong != 0;
}
